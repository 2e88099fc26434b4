"""
The study's figures, recomputed from results.csv, and its picture:

    python study/table.py
    python study/table.py accuracy.svg

results.csv has one row a run: which arm and seed, model, data, codes of the frozen weights, learning rate (lr), noise
(sigma) and how the loss corrects for it, steps, the number of test problems, and the right answers in percent before and
after training: greedy, and sampled (8 answers a problem at temperature 1).

A line of the output is arm A minus arm B in points of right answers after training, with the half width of its 95 %
interval by three rules:

    paired    Student's t over the differences of the seeds that both arms have
    Welch     Welch's t over the seeds of either arm: pairs are worth little where seeds hardly correlate
    pooled    the seeds that both arms have, with the common variance over seeds of every arm of that model and data; the
              better one where there are two or three seeds

All say where the figure would lie with other seeds on the same test problems.
"""
import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev, variance

# What the page compares: (what, arm A, arm B); several arms in a row are averaged, seed by seed.
COMPARISONS = (
    ("calibrated - bf16, both at 2e-4", "o9-cal", "o9-bf16"),
    ("repaired - calibrated", "o9-rep", "o9-cal"),
    ("AQN 1e-2 - none, calibrated", "o9-aqn", "o9-cal"),
    ("calibrated at 1e-4 - bf16 at 2e-4", "rate-calibrated-1e-4", "rate-bf16-2e-4"),
    ("MATH, 1.5B: calibrated - bf16, mean of 1e-4 and 2e-4",
     "math-calibrated-1e-4 math-calibrated-2e-4", "math-bf16-1e-4 math-bf16-2e-4"),
    ("MATH, 1.5B: calibrated - bf16, both at 2e-4", "math-calibrated-2e-4", "math-bf16-2e-4"),
    ("MATH, 1.5B: calibrated - bf16, both at 1e-4", "math-calibrated-1e-4", "math-bf16-1e-4"),
    ("MATH, 1.5B: calibrated, 2e-4 - 1e-4", "math-calibrated-2e-4", "math-calibrated-1e-4"),
    ("MATH, 1.5B: bf16, 2e-4 - 1e-4", "math-bf16-2e-4", "math-bf16-1e-4"),
    ("bf16, 2e-4 - 1e-4", "rate-bf16-2e-4", "rate-bf16-1e-4"),
    ("calibrated, 2e-4 - 1e-4", "rate-calibrated-2e-4", "rate-calibrated-1e-4"),
    ("calibrated - nearest, 1e-4", "rate-calibrated-1e-4", "noise-none"),
    ("sigma 5e-2, release's loss - none", "noise-uncorrected", "noise-none"),
    ("sigma 5e-2, default correction - none", "noise-truncate", "noise-none"),
    ("sigma 5e-2, paper's clip - none", "noise-ppo", "noise-none"),
    ("sigma 5e-2: a draw an answer - a draw a step", "noise-draws", "noise-uncorrected"),
    ("advantages undivided - divided, 1.5B", "recipe-undivided", "recipe-divided"),
    ("nearest - bf16, 1e-4", "nearest", "bf16"),
    ("searched - bf16, 1e-4", "search", "bf16"),
    ("NF4 - bf16, 1e-4", "nf4", "bf16"),
    ("MXFP4 - bf16, 1e-4", "mxfp4", "bf16"),
)
# The picture's bars: arm, label.
BARS = (("o9-bf16", "bf16"), ("o9-cal", "NVFP4, calibrated"), ("o9-rep", "NVFP4, repaired"),
        ("o9-aqn", "NVFP4, AQN 1e-2"), ("noise-none", "NVFP4, to nearest (lr 1e-4)"),
        ("noise-uncorrected", "nearest, noise 5e-2, release's loss"), ("noise-ppo", "nearest, noise 5e-2, paper's clip"))
# Quantiles of Student's t at 97.5 % by degrees of freedom; beyond 15 they are 1.96 + 2.5 / f.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def t_quantile(freedom: float) -> float:
    return T[int(freedom) - 1] if freedom < 16 else 1.96 + 2.5 / freedom


def read(path: Path) -> dict[str, dict[int, dict]]:
    """arm -> seed -> row of results.csv"""
    arms = defaultdict(dict)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            arms[row["arm"]][int(row["seed"])] = row
    return arms


def values(arms: dict, names: str, kind: str) -> dict[int, float]:
    """seed -> accuracy, averaged over the arms that `names` lists; seeds that all of them have."""
    parts = [{seed: float(row[kind]) for seed, row in arms[name].items() if row[kind]} for name in names.split()]
    return {seed: mean(part[seed] for part in parts) for seed in sorted(set.intersection(*map(set, parts)))}


def pooled_variance(arms: dict, like: dict, kind: str) -> tuple[float, int]:
    """The variance over seeds within arms of the same model and data, and its degrees of freedom."""
    groups = [[float(row[kind]) for row in arm.values() if row[kind]] for arm in arms.values()
              if all(next(iter(arm.values()))[key] == like[key] for key in ("model", "data"))]
    groups = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    return sum((len(group) - 1) * variance(group) for group in groups) / freedom, freedom


def compare(arms: dict, a: str, b: str, kind: str) -> str:
    """The difference and its half widths as a line, "" if an arm lacks this kind of answers."""
    left, right = values(arms, a, kind), values(arms, b, kind)
    both = sorted(left.keys() & right.keys())
    if not both:
        return ""
    differences = [left[seed] - right[seed] for seed in both]
    n = len(both)
    paired = t_quantile(n - 1) * stdev(differences) / n**0.5 if n > 1 else float("nan")
    each, freedom = pooled_variance(arms, arms[a.split()[0]][both[0]], kind)
    count = len(a.split())                       # the mean of several arms varies less
    pooled = t_quantile(freedom) * (2 * each / count / n)**0.5
    return f"{mean(differences):+.2f}, paired {paired:.2f}, Welch {welch(left, right):.2f}, pooled {pooled:.2f}; {n} seeds"


def welch(left: dict[int, float], right: dict[int, float]) -> float:
    """Half the width of Welch's 95 % interval, over all seeds of either arm; NaN for a single seed."""
    sides = [list(side.values()) for side in (left, right)]
    if min(map(len, sides)) < 2:
        return float("nan")
    parts = [variance(side) / len(side) for side in sides]
    freedom = sum(parts)**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, sides))
    return t_quantile(freedom) * sum(parts)**0.5


def picture(arms: dict) -> str:
    """An SVG of BARS: sampled accuracy before and after training, and the interval of the mean over seeds."""
    def x(percent):
        return 240 + 11 * percent

    lines = ["<style>text{fill:#1f2328;font:13px system-ui,sans-serif}.grid{stroke:#d0d7de}.gain{fill:#4493f8}"
             ".start{fill:#8c959f}.width{stroke:#1f2328}@media(prefers-color-scheme:dark){text{fill:#e6edf3}"
             ".grid{stroke:#30363d}.width{stroke:#e6edf3}}</style>"]
    bottom = 34 + 30 * len(BARS)
    for percent in range(0, 41, 10):
        lines.append(f'<line class="grid" x1="{x(percent)}" x2="{x(percent)}" y1="30" y2="{bottom}"/>'
                     f'<text x="{x(percent)}" y="{bottom + 16}" text-anchor="middle">{percent} %</text>')
    for i, (name, label) in enumerate(BARS):
        after = [float(row["sampled"]) for row in arms[name].values()]
        before, end, y = float(next(iter(arms[name].values()))["sampled_before"]), mean(after), 36 + 30 * i
        half = t_quantile(len(after) - 1) * stdev(after) / len(after)**0.5
        lines.append(f'<text x="232" y="{y + 14}" text-anchor="end">{label}</text>'
                     f'<rect class="start" x="{x(0)}" y="{y}" width="{11 * before:.1f}" height="18"/>'
                     f'<rect class="gain" x="{x(before):.1f}" y="{y}" width="{11 * (end - before):.1f}" height="18"/>'
                     f'<line class="width" x1="{x(end - half):.1f}" x2="{x(end + half):.1f}" y1="{y + 9}" y2="{y + 9}"/>'
                     f'<text x="{x(end + half) + 8:.1f}" y="{y + 14}">{end:.1f}</text>')
    title = "0.5B on GSM8K: right answers in percent, sampled, before (grey) and after 60 steps"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {bottom + 24}" width="740" '
            f'height="{bottom + 24}" role="img" aria-label="{title}"><text x="8" y="18">{title}</text>'
            + "\n".join(lines) + "</svg>\n")


def main() -> None:
    arms = read(Path(__file__).with_name("results.csv"))
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(picture(arms))
        return
    print("right answers in percent: before -> after training, mean of the seeds\n")
    for name, arm in arms.items():
        parts = []
        for kind in ("greedy", "sampled"):
            rows = [row for row in arm.values() if row[kind]]
            if rows:
                before = [float(row[f"{kind}_before"]) for row in rows if row[f"{kind}_before"]]
                start = f"{mean(before):.1f} -> " if before else ""
                parts.append(f"{kind} {start}{mean(float(row[kind]) for row in rows):.1f}")
        row = next(iter(arm.values()))
        print(f"{name:24} {row['model']} {row['data']:5} {row['codes']:10} lr {row['lr']} sigma {row['sigma']:10} "
              f"{row['steps']:>3} steps, {len(arm):2} seeds: {', '.join(parts)}")
    print("\ndifferences in points after training\n")
    for what, a, b in COMPARISONS:
        if all(name in arms for name in (*a.split(), *b.split())):
            for kind in ("sampled", "greedy"):
                found = compare(arms, a, b, kind)
                if found:
                    print(f"{what:56} {kind:8} {found}")


if __name__ == "__main__":
    main()
