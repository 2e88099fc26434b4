"""
Recompute the study's figures from results.csv: python study/table.py

results.csv has one row per run: arm and seed, model, data, codes of the frozen
weights ("trained": full fine-tuning), learning rate, noise (sigma), correction,
steps, number of test problems, and the percentage of right answers before and
after training, greedy and sampled (8 per problem at temperature 1).

A difference is arm A minus arm B after training, in points, with the half width
of its 95% interval for other seeds (same test problems, same 4-bit conversions):

    paired    Student's t over the seeds that both arms have
    Welch     Welch's t over all seeds of either arm, for the difference of
              their means

With few seeds, each seed's difference is printed too.

comparisons.csv has what the page compares, arm a with arm b. Arms separated by a
space are averaged, seed by seed; arms joined by + have the same setting and
different seeds; arm@2-6 means its seeds 2 to 6. With a second pair of arms, the
differences of both models are averaged.
"""
import csv
import signal
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev, variance

FOLDER = Path(__file__).parent
FEW, LISTED = 5, 7
# 97.5% quantiles of Student's t by degrees of freedom f: linear in between, 1.96 + 2.5 / f from 15 on.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def t_quantile(freedom: float) -> float:
    if freedom >= 15:
        return 1.96 + 2.5 / freedom
    low = int(freedom)
    return T[low - 1] + (freedom - low) * (T[low] - T[low - 1])


def read(path: Path) -> dict[str, dict[int, dict]]:
    """arm -> seed -> row of results.csv"""
    arms = defaultdict(dict)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            arms[row["arm"]][int(row["seed"])] = row
    return arms


def chosen(arms: dict, name: str) -> dict[int, dict]:
    """The rows of an arm, or of some of its seeds: planned-calibrated or planned-calibrated@7-12."""
    name, _, seeds = name.partition("@")
    low, high = map(int, seeds.split("-")) if seeds else (0, 10**9)
    return {seed: row for seed, row in arms[name].items() if low <= seed <= high}


def values(arms: dict, names: str, kind: str) -> dict[int, float]:
    """seed -> accuracy, averaged over the arms in `names`, for the seeds that all of them have. kind: a column, or
    "gain" or "greedy gain": sampled or greedy after training minus before.
    """
    def value(row):
        if kind.endswith("gain"):
            answers = "greedy" if kind == "greedy gain" else "sampled"
            known = row[answers] and row[f"{answers}_before"]
            return float(row[answers]) - float(row[f"{answers}_before"]) if known else None
        return float(row[kind]) if row[kind] else None

    parts = [{seed: value(row) for name in joined.split("+") for seed, row in chosen(arms, name).items()
              if value(row) is not None} for joined in names.split()]
    return {seed: mean(part[seed] for part in parts) for seed in sorted(set.intersection(*map(set, parts)))}


def compare(arms: dict, a: str, b: str, kind: str) -> dict | None:
    """The difference between two arms; None if an arm lacks this kind of answer.

    differences: seed by seed; mean, paired: their mean and half width, absent if the arms have no seed in common.
    welch_mean: the difference between the arms' means over all their seeds, the center of Welch's interval.
    all_seeds: how many each arm has. other_seeds: whether the arms' seeds differ.
    """
    left, right = values(arms, a, kind), values(arms, b, kind)
    if not left or not right:
        return None
    differences = [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]
    found = {"Welch": welch(left, right), "welch_mean": mean(left.values()) - mean(right.values()),
             "all_seeds": (len(left), len(right)), "other_seeds": left.keys() != right.keys(),
             "differences": differences}
    n = len(differences)
    if n:
        found["mean"] = mean(differences)
        found["paired"] = t_quantile(n - 1) * stdev(differences) / n**0.5 if n > 1 else float("nan")
    return found


def line_of(found: dict) -> str:
    differences = found["differences"]
    if not differences:
        left, right = found["all_seeds"]
        return f"{found['welch_mean']:+.2f}, Welch {found['Welch']:.2f}; {left} and {right} seeds"
    line = f"{found['mean']:+.2f}, paired {found['paired']:.2f}, Welch {found['Welch']:.2f}"
    if found["other_seeds"]:
        line += f" about {found['welch_mean']:+.2f}"
    line += f"; {len(differences)} seeds"
    if len(differences) < LISTED:
        line += ": " + ", ".join(f"{one:+.2f}" for one in differences)
    return line


def over_both(found: list[dict]) -> tuple[float, float]:
    """Combines paired differences, weighted by inverse variance -> mean, and half width by Student's t with
    Welch-Satterthwaite degrees of freedom.
    """
    freedoms = [len(one["differences"]) - 1 for one in found]
    weights = [(t_quantile(f) / one["paired"])**2 for f, one in zip(freedoms, found)]
    total = sum(weights)
    freedom = total**2 / sum(w**2 / f for w, f in zip(weights, freedoms))
    return sum(w * one["mean"] for w, one in zip(weights, found)) / total, t_quantile(freedom) / total**0.5


def welch(left: dict[int, float], right: dict[int, float]) -> float:
    """The half width of Welch's 95% interval, over all seeds of both arms; NaN if either has only one."""
    sides = [list(side.values()) for side in (left, right)]
    if min(map(len, sides)) < 2:
        return float("nan")
    parts = [variance(side) / len(side) for side in sides]
    freedom = sum(parts)**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, sides))
    return t_quantile(freedom) * sum(parts)**0.5


def main() -> None:
    if hasattr(signal, "SIGPIPE"):                       # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)    # `| head` ends the program without a traceback
    arms = read(FOLDER / "results.csv")
    with open(FOLDER / "comparisons.csv", newline="") as file:
        comparisons = list(csv.DictReader(file))
    print("right answers in percent, before -> after training, mean over seeds\n")
    for name, arm in arms.items():
        parts = []
        for kind in ("greedy", "sampled"):
            rows = [row for row in arm.values() if row[kind]]
            if rows:
                before = [float(row[f"{kind}_before"]) for row in rows if row[f"{kind}_before"]]
                start = f"{mean(before):.1f} -> " if before else ""
                after = [float(row[kind]) for row in rows]
                each = " (" + ", ".join(f"{one:.1f}" for one in after) + ")" if len(after) < LISTED else ""
                parts.append(f"{kind} {start}{mean(after):.1f}{each}")
        row = next(iter(arm.values()))
        steps = "-".join(sorted({row["steps"] for row in arm.values()}, key=int))
        print(f"{name:24} {row['model']} {row['data']:5} {row['codes']:10} lr {row['lr']} sigma {row['sigma']:10} "
              f"{steps:>3} steps, {len(arm):2} seeds: {', '.join(parts)}")
    print("\ndifferences in points after training\n")
    for row in comparisons:
        for kind in ("sampled", "greedy", "gain", "greedy gain") if not row["second_a"] else ():
            found = compare(arms, row["a"], row["b"], kind)
            if found:
                print(f"{row['comparison']:56} {kind:11} {line_of(found)}")
    print()
    for row in comparisons:
        for kind in ("sampled", "greedy", "gain") if row["second_a"] else ():
            found = [compare(arms, row["a"], row["b"], kind), compare(arms, row["second_a"], row["second_b"], kind)]
            if not all(found):
                continue
            if min(len(one["differences"]) for one in found) < FEW:
                line = f"{mean(one['mean'] for one in found):+.2f}, mean of the two"
            else:
                line = "{:+.2f}, by inverse variance {:.2f}".format(*over_both(found))
            print(f"{row['comparison'] + ', both models':56} {kind:11} {line}")


if __name__ == "__main__":
    main()
