"""
Accuracy figures of graded answers: pass@k and intervals.

    figures = evaluation_figures(rows, samples)     rows of evaluate.py --out
    entropy = sampler_entropy(rows)                 sampled rows, of evaluate.py or train.py

For a problem with n answers, c of them right:

    pass@k   The probability that k of the n answers, drawn without replacement, include a right
             one: 1 - C(n - c, k) / C(n, k).

Each figure is a mean over problems, with a 95% interval for a new sample of such problems.
"""
import math
from collections import Counter

Z = 1.959964                                     # 95% of a normal lies within +-Z


def evaluation_figures(rows: list[dict], samples: int) -> dict:
    """name -> figure; each problem has `samples` consecutive rows. A list is [mean, low, high].

    docs/metrics.md defines every name.
    """
    groups = [rows[i:i + samples] for i in range(0, len(rows), samples)]
    correct = [[int(row["correct"]) for row in group] for group in groups]
    ks = sorted({samples, *(2**i for i in range(samples.bit_length()))})         # 1, 2, 4, ..., N
    values = {f"pass@{k}": [pass_at_k(samples, sum(c), k) for c in correct] for k in ks}
    figures = {name: confidence_interval(each, samples) for name, each in values.items()}
    figures |= {key: mean([row[key] for row in rows]) for key in ("format", "length")}
    figures["truncated"] = mean([not row["finished"] for row in rows])
    return figures | {"rules": dict(Counter(row["rule"] for row in rows).most_common())}


def mean(values: list) -> float:
    return sum(values) / len(values)


def sampler_entropy(rows: list[dict]) -> float:
    """Entropy of the policy that sampled these answers, in nats per token, including noise.

    Entropy is the mean of -log p under p, so the estimate is minus the mean log-prob of all tokens.
    rows: with `mean_logprob` and `length`. The tokens must be sampled from the recorded
    probabilities, so greedy answers don't work. With top-k or top-p, it is the entropy of the
    truncated distribution.
    """
    tokens = sum(row["length"] for row in rows)
    return 0.0 - sum(row["mean_logprob"] * row["length"] for row in rows) / tokens    # not -0.0


# -----------------------------------------------------------------------------
# One problem

def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate from n answers, c of them right (Chen et al. 2021).

    The first k answers alone would be unbiased too, but would waste the other n - k.
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# -----------------------------------------------------------------------------
# All problems

def confidence_interval(values: list[float], samples: int = 1) -> list[float]:
    """[mean, low, high] at 95% for a figure in [0, 1] with one value per problem, from `samples`
    answers each.

    Wilson's interval for a proportion stays inside [0, 1] and is accurate near the ends. Values
    between 0 and 1 vary less than verdicts, so it uses an effective sample size: the number of 0-1
    verdicts whose mean would have this variance. That is the number of problems if all values are
    0 or 1, and at most the number of answers. The interval is too narrow for few problems with many
    answers that are nearly all right or all wrong: in simulations with 50 such problems, it covered
    the truth 80 to 90% of the time.
    """
    n = len(values)
    p = mean(values)
    spread = p * (1 - p)                         # variance of a single verdict
    if spread:
        variance = sum((v - p) ** 2 for v in values) / n**2
        n = spread / max(variance, spread / (n * samples))
    center = p + Z * Z / (2 * n)
    half = Z * math.sqrt(spread / n + (Z / (2 * n)) ** 2)
    scale = 1 + Z * Z / n
    return [p, max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)]
