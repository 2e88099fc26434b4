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
"""
import csv
import signal
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev, variance

FEW = 5
# What the page compares: (what, arm A, arm B). Arms separated by a space are averaged, seed by seed; arms joined by +
# have the same setting and different seeds; arm@2-6 means its seeds 2 to 6.
COMPARISONS = (
    ("calibrated - bf16, both at 2e-4", "planned-calibrated", "planned-bf16"),
    ("calibrated - bf16, both at 2e-4, with the seeds before", "planned-calibrated+rate-calibrated-2e-4",
     "planned-bf16+rate-bf16-2e-4"),
    ("repaired - calibrated", "planned-repaired", "planned-calibrated"),
    ("AQN 1e-2 - none, calibrated", "planned-aqn", "planned-calibrated"),
    ("full at 3e-6 - at 1e-5, bf16", "full-3e-6", "full-1e-5"),
    ("LoRA at 2e-4 - full at 3e-6, bf16", "planned-bf16", "full-3e-6"),
    ("LoRA at 2e-4 - full at 1e-5, bf16", "planned-bf16", "full-1e-5"),
    ("calibrated LoRA at 2e-4 - full at 1e-5", "planned-calibrated", "full-1e-5"),
    ("calibrated at 1e-4 - all bf16 at 2e-4", "rate-calibrated-1e-4", "rate-bf16-2e-4+planned-bf16"),
    ("MATH, 1.5B: calibrated - bf16, mean of 1e-4 and 2e-4",
     "math-calibrated-1e-4 math-calibrated-2e-4", "math-bf16-1e-4 math-bf16-2e-4"),
    ("MATH, 1.5B: calibrated at 1e-4 - bf16 at 2e-4", "math-calibrated-1e-4", "math-bf16-2e-4"),
    ("MATH, 1.5B: calibrated - bf16, both at 2e-4", "math-calibrated-2e-4", "math-bf16-2e-4"),
    ("MATH, 1.5B: calibrated - bf16, planned seeds", "math-planned-calibrated", "math-planned-bf16"),
    ("MATH, 1.5B: the same with the seeds before", "math-calibrated-2e-4+math-planned-calibrated",
     "math-bf16-2e-4+math-planned-bf16"),
    ("MATH, 1.5B: repaired - calibrated", "math-planned-repaired", "math-planned-calibrated"),
    ("MATH, 1.5B: calibrated - bf16, both at 1e-4", "math-calibrated-1e-4", "math-bf16-1e-4"),
    ("MATH, 1.5B: calibrated, 2e-4 - 1e-4", "math-calibrated-2e-4", "math-calibrated-1e-4"),
    ("MATH, 1.5B: bf16, 2e-4 - 1e-4", "math-bf16-2e-4", "math-bf16-1e-4"),
    ("bf16, 2e-4 - 1e-4", "rate-bf16-2e-4", "rate-bf16-1e-4"),
    ("calibrated, 2e-4 - 1e-4", "rate-calibrated-2e-4", "rate-calibrated-1e-4"),
    ("calibrated - bf16, both at 1e-4", "rate-calibrated-1e-4", "rate-bf16-1e-4"),
    ("calibrated - nearest, 1e-4", "rate-calibrated-1e-4", "noise-none"),
    ("200 steps, calibrated - bf16, both at 1e-4", "default-0.5b", "default-bf16-0.5b"),
    ("200 steps, calibrated - bf16, both at 1e-4, 1.5B", "default-1.5b", "default-bf16-1.5b"),
    ("200 steps, calibrated, 2e-4 - 1e-4", "default-2e-4-0.5b", "default-0.5b"),
    ("200 steps, calibrated, 2e-4 - 1e-4, 1.5B", "default-2e-4-1.5b", "default-1.5b"),
    ("200 steps, calibrated, 2e-4 - 1e-4, same code", "default-2e-4-0.5b", "default-0.5b@2-3"),
    ("200 steps, calibrated, 2e-4 - 1e-4, same code, 1.5B", "default-2e-4-1.5b", "default-1.5b@2-3"),
    ("200 steps, bf16, 2e-4 - 1e-4", "default-bf16-2e-4-0.5b", "default-bf16-0.5b"),
    ("200 steps, bf16, 2e-4 - 1e-4, 1.5B", "default-bf16-2e-4-1.5b", "default-bf16-1.5b"),
    ("200 steps, bf16 at 2e-4 - calibrated at 1e-4", "default-bf16-2e-4-0.5b", "default-0.5b"),
    ("200 steps, bf16 at 2e-4 - calibrated at 1e-4, 1.5B", "default-bf16-2e-4-1.5b", "default-1.5b"),
    ("paper's recipe, 600 steps: NVFP4 with AQN - bf16 without", "paper-nvfp4-aqn", "paper-bf16"),
    ("200 steps, bf16 - calibrated, both at 2e-4", "default-bf16-2e-4-0.5b", "default-2e-4-0.5b"),
    ("200 steps, bf16 - calibrated, both at 2e-4, 1.5B", "default-bf16-2e-4-1.5b", "default-2e-4-1.5b"),
    ("sigma 5e-2, release's loss - none", "noise-uncorrected", "noise-none"),
    ("sigma 5e-2, release's loss - none, seeds 7 to 12", "noise-uncorrected@7-12", "noise-none"),
    ("calibrated at 1e-4 - all bf16 at 2e-4, seeds 2 to 6", "rate-calibrated-1e-4@2-6", "rate-bf16-2e-4"),
    ("bf16 at 2e-4, earlier - later seeds", "rate-bf16-2e-4", "planned-bf16"),
    ("calibrated at 1e-4 - later seeds of bf16 at 2e-4", "rate-calibrated-1e-4", "planned-bf16"),
    ("sigma 5e-2, default correction - none", "noise-truncate", "noise-none"),
    ("sigma 5e-2, paper's clip - none", "noise-ppo", "noise-none"),
    ("sigma 5e-2, paper's clip - default correction", "noise-ppo", "noise-truncate"),
    ("sigma 5e-2: noise resampled per answer - per step", "noise-draws", "noise-uncorrected"),
    ("advantages undivided - divided, 1.5B", "recipe-undivided", "recipe-divided"),
    ("nearest - bf16, 1e-4", "nearest", "bf16"),
    ("MXFP4 - bf16, 1e-4", "mxfp4", "bf16"),
    ("NF4 - NVFP4 searched, 1e-4", "nf4", "search"),
    ("MXFP4 - NVFP4 searched, 1e-4", "mxfp4", "search"),
)
# Comparisons averaged over the 0.5B and the 1.5B.
BOTH_MODELS = {
    "200 steps, calibrated - bf16, both at 1e-4": (("default-0.5b", "default-bf16-0.5b"),
                                                   ("default-1.5b", "default-bf16-1.5b")),

    "calibrated - bf16, both at 2e-4": (("planned-calibrated", "planned-bf16"),
                                        ("math-planned-calibrated", "math-planned-bf16")),
    "the same with MATH's seeds before": (
        ("planned-calibrated", "planned-bf16"),
        ("math-calibrated-2e-4+math-planned-calibrated", "math-bf16-2e-4+math-planned-bf16")),
    "repaired - calibrated": (("planned-repaired", "planned-calibrated"),
                              ("math-planned-repaired", "math-planned-calibrated")),
}
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
    if len(differences) < FEW:
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
    arms = read(Path(__file__).with_name("results.csv"))
    print("right answers in percent, before -> after training, mean over seeds\n")
    for name, arm in arms.items():
        parts = []
        for kind in ("greedy", "sampled"):
            rows = [row for row in arm.values() if row[kind]]
            if rows:
                before = [float(row[f"{kind}_before"]) for row in rows if row[f"{kind}_before"]]
                start = f"{mean(before):.1f} -> " if before else ""
                after = [float(row[kind]) for row in rows]
                each = " (" + ", ".join(f"{one:.1f}" for one in after) + ")" if len(after) < FEW else ""
                parts.append(f"{kind} {start}{mean(after):.1f}{each}")
        row = next(iter(arm.values()))
        steps = "-".join(sorted({row["steps"] for row in arm.values()}, key=int))
        print(f"{name:24} {row['model']} {row['data']:5} {row['codes']:10} lr {row['lr']} sigma {row['sigma']:10} "
              f"{steps:>3} steps, {len(arm):2} seeds: {', '.join(parts)}")
    print("\ndifferences in points after training\n")
    for what, a, b in COMPARISONS:
        for kind in ("sampled", "greedy", "gain", "greedy gain"):
            found = compare(arms, a, b, kind)
            if found:
                print(f"{what:56} {kind:11} {line_of(found)}")
    print()
    for what, comparisons in BOTH_MODELS.items():
        for kind in ("sampled", "greedy", "gain"):
            found = [compare(arms, a, b, kind) for a, b in comparisons]
            if not all(found):
                continue
            if min(len(one["differences"]) for one in found) < FEW:
                line = f"{mean(one['mean'] for one in found):+.2f}, mean of the two"
            else:
                line = "{:+.2f}, by inverse variance {:.2f}".format(*over_both(found))
            print(f"{what + ', both models':56} {kind:11} {line}")


if __name__ == "__main__":
    main()
