"""
What verdicts say of a model: pass@k, maj@k, intervals, the difference of two models.

    figures = measure(rows, samples)             rows as of evaluate.py --out
    figures |= paired(rows, others)              against another model's, problem by problem

For c of a problem's n answers right
    pass@k = 1 - C(n - c, k) / C(n, k)      chance that k of the n hold a right one
    maj@k  is the commonest of k answers right? Mean over the n // k blocks of k as drawn. Equal
           answers vote together, none is no vote, a tie counts as its right share.
Each is a mean over problems, with its 95 % interval.
"""
import math
from collections import Counter, defaultdict

from answers import is_equal

Z = 1.959964                                     # 95 % of a normal lies within +-Z


def mean(values):
    return sum(values) / len(values)


def pass_at_k(n, c, k):
    """The unbiased estimate (Chen et al. 2021)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def ballots(answers):
    """Extracted answers -> for each the first one equal to it; None stays None."""
    vote = {None: None}
    for answer in answers:
        if answer not in vote:
            equal = (v for v in vote.values() if is_equal(answer, v))
            vote[answer] = next(equal, answer)
    return [vote[answer] for answer in answers]


def maj_at_k(votes, correct, k):
    """ballots() of one problem's n answers and their verdicts -> mean over n // k blocks."""
    right = dict(zip(reversed(votes), reversed(correct)))        # the first of equal ones decides
    scores = []
    for i in range(0, len(votes) - k + 1, k):
        count = Counter(vote for vote in votes[i:i + k] if vote is not None)
        tied = [vote for vote in count if count[vote] == max(count.values())]
        scores.append(sum(right[vote] for vote in tied) / max(len(tied), 1))
    return mean(scores)


def interval(values, samples=1):
    """A value in [0, 1] for each problem, from `samples` answers -> [mean, low, high] at 95 %.

    Wilson's, at the effective sample size: the number of problems if all values are 0 or 1, and
    never more than that of answers.
    """
    n = len(values)
    p = mean(values)
    spread = p * (1 - p)
    if spread:
        variance = sum((v - p) ** 2 for v in values) / n**2
        n = spread / max(variance, spread / (n * samples))
    centre = p + Z * Z / (2 * n)
    half = Z * math.sqrt(spread / n + (Z / (2 * n)) ** 2)
    scale = 1 + Z * Z / n
    return [p, max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)]


def mcnemar(won, lost):
    """Exact two-sided p of so uneven a split of the problems that one of two runs solved."""
    tail = sum(math.comb(won + lost, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def by_problem(rows):
    verdicts = defaultdict(list)
    for row in rows:
        verdicts[row["id"], row["question"]].append(row["correct"])
    return verdicts


def paired(rows, others):
    """Accuracy of rows minus others on the problems of both; ValueError if there are none.

    The interval is normal over problems with one won and one lost added (Bonett and Price 2012).
    McNemar's p is for one answer a problem, else None.
    """
    mine = by_problem(rows)
    theirs = by_problem(others)
    gaps = [mean(mine[key]) - mean(theirs[key]) for key in mine if key in theirs]
    if not gaps:
        raise ValueError(f"--against: none of its {len(theirs)} problems is among the {len(mine)} "
                         "here")
    n = len(gaps) + 2
    centre = sum(gaps) / n
    half = Z * math.sqrt(((sum(gap**2 for gap in gaps) + 2) / n - centre**2) / n)
    won = sum(gap > 0 for gap in gaps)
    lost = sum(gap < 0 for gap in gaps)
    single = len(rows) == len(mine) and len(others) == len(theirs)
    return {"pairs": len(gaps), "unpaired": len(mine) + len(theirs) - 2 * len(gaps), "won": won,
            "lost": lost,
            "difference": [mean(gaps), max(-1.0, centre - half), min(1.0, centre + half)],
            "mcnemar_p": mcnemar(won, lost) if single else None}


def measure(rows, samples):
    """Rows as of --out, `samples` a problem -> figures; lists are [mean, low, high]."""
    groups = [rows[i:i + samples] for i in range(0, len(rows), samples)]
    correct = [[int(row["correct"]) for row in group] for group in groups]
    votes = [ballots([row["extracted"] for row in group]) for group in groups]
    ks = sorted({samples, *(2**i for i in range(samples.bit_length()))})         # 1, 2, 4, ..., N
    values = {f"pass@{k}": [pass_at_k(samples, sum(c), k) for c in correct] for k in ks}
    for k in ks[1:]:
        values[f"maj@{k}"] = [maj_at_k(v, c, k) for v, c in zip(votes, correct)]
    values["pass@1_lenient"] = [mean([row["lenient"] for row in group]) for group in groups]
    figures = {name: interval(of_problem, samples) for name, of_problem in values.items()}
    figures |= {key: mean([row[key] for row in rows]) for key in ("format", "length")}
    figures["truncated"] = mean([not row["finished"] for row in rows])
    return figures | {"rules": dict(Counter(row["rule"] for row in rows).most_common())}
