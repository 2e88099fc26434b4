"""
Recompute the study's figures from results.csv, or draw its picture.

    python study/table.py                    the figures
    python study/table.py accuracy.svg       the picture

results.csv has one row per run: arm and seed, model, data, codes of the frozen
weights ("trained": full fine-tuning), learning rate, noise (sigma), correction,
steps, number of test problems, and the right answers in percent before and
after training: greedy, and sampled (8 per problem at temperature 1).

A difference is arm A minus arm B in points after training, with the half width
of its 95 % interval (other seeds, same test problems and 4-bit conversions):

    paired    Student's t over the seeds that both arms have
    Welch     Welch's t over all seeds of either arm, for the difference of
              their means
    pooled    the seeds that both arms have, with the common variance of all
              LoRA arms of that model and data; best for two or three seeds
"""
import argparse
import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev, variance

# What the page compares: (what, arm A, arm B). Several arms in a row are averaged, seed by seed; arms joined by + have
# one setting and different seeds.
COMPARISONS = (
    ("calibrated - bf16, both at 2e-4", "o9-cal", "o9-bf16"),
    ("calibrated - bf16, both at 2e-4, with the seeds before", "o9-cal+rate-calibrated-2e-4",
     "o9-bf16+rate-bf16-2e-4"),
    ("repaired - calibrated", "o9-rep", "o9-cal"),
    ("AQN 1e-2 - none, calibrated", "o9-aqn", "o9-cal"),
    ("LoRA at 2e-4 - full at 1e-5, bf16", "o9-bf16", "o10-full-1e-5"),
    ("calibrated LoRA at 2e-4 - full at 1e-5", "o9-cal", "o10-full-1e-5"),
    ("calibrated at 1e-4 - all bf16 at 2e-4", "rate-calibrated-1e-4", "rate-bf16-2e-4+o9-bf16"),
    ("MATH, 1.5B: calibrated - bf16, mean of 1e-4 and 2e-4",
     "math-calibrated-1e-4 math-calibrated-2e-4", "math-bf16-1e-4 math-bf16-2e-4"),
    ("MATH, 1.5B: calibrated - bf16, both at 2e-4", "math-calibrated-2e-4", "math-bf16-2e-4"),
    ("MATH, 1.5B: calibrated - bf16, planned seeds", "o11-cal", "o11-bf16"),
    ("MATH, 1.5B: the same with the seeds before", "math-calibrated-2e-4+o11-cal",
     "math-bf16-2e-4+o11-bf16"),
    ("MATH, 1.5B: calibrated - bf16, both at 1e-4", "math-calibrated-1e-4", "math-bf16-1e-4"),
    ("MATH, 1.5B: calibrated, 2e-4 - 1e-4", "math-calibrated-2e-4", "math-calibrated-1e-4"),
    ("MATH, 1.5B: bf16, 2e-4 - 1e-4", "math-bf16-2e-4", "math-bf16-1e-4"),
    ("bf16, 2e-4 - 1e-4", "rate-bf16-2e-4", "rate-bf16-1e-4"),
    ("calibrated, 2e-4 - 1e-4", "rate-calibrated-2e-4", "rate-calibrated-1e-4"),
    ("calibrated - nearest, 1e-4", "rate-calibrated-1e-4", "noise-none"),
    ("sigma 5e-2, release's loss - none", "noise-uncorrected", "noise-none"),
    ("sigma 5e-2, paper's clip - default correction", "noise-ppo", "noise-truncate"),
    ("sigma 5e-2: noise resampled per answer - per step", "noise-draws", "noise-uncorrected"),
    ("advantages undivided - divided, 1.5B", "recipe-undivided", "recipe-divided"),
    ("nearest - bf16, 1e-4", "nearest", "bf16"),
    ("MXFP4 - bf16, 1e-4", "mxfp4", "bf16"),
    ("NF4 - NVFP4 searched, 1e-4", "nf4", "search"),
    ("MXFP4 - NVFP4 searched, 1e-4", "mxfp4", "search"),
)
# The picture's bars: arm, label.
BARS = (("o9-bf16", "bf16"), ("o9-cal", "NVFP4, calibrated"), ("o9-rep", "NVFP4, repaired"),
        ("o9-aqn", "NVFP4, AQN 1e-2"), ("noise-none", "NVFP4, to nearest (lr 1e-4)"),
        ("noise-uncorrected", "nearest, noise 5e-2, release's loss"),
        ("noise-ppo", "nearest, noise 5e-2, paper's clip"))
# Quantiles of Student's t at 97.5 % by degrees of freedom; between two the straight line, beyond 15 1.96 + 2.5 / f.
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


def values(arms: dict, names: str, kind: str) -> dict[int, float]:
    """seed -> accuracy, averaged over the arms that `names` lists; seeds that all of them have. kind: a column, or
    "gain": sampled after training minus before.
    """
    def value(row):
        if kind == "gain":
            known = row["sampled"] and row["sampled_before"]
            return float(row["sampled"]) - float(row["sampled_before"]) if known else None
        return float(row[kind]) if row[kind] else None

    parts = [{seed: value(row) for name in joined.split("+") for seed, row in arms[name].items()
              if value(row) is not None} for joined in names.split()]
    return {seed: mean(part[seed] for part in parts) for seed in sorted(set.intersection(*map(set, parts)))}


def pooled_variance(arms: dict, like: dict, kind: str) -> tuple[float, int]:
    """The variance over seeds within arms of the same model and data that train an adapter; its degrees of freedom."""
    firsts = {name: next(iter(arm.values())) for name, arm in arms.items()}
    alike = [arm for name, arm in arms.items() if firsts[name]["codes"] != "trained"
             and all(firsts[name][key] == like[key] for key in ("model", "data"))]
    groups = [[float(row[kind]) for row in arm.values() if row[kind]] for arm in alike]
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
    line = f"{mean(differences):+.2f}, paired {paired:.2f}, Welch {welch(left, right):.2f}"
    if left.keys() != right.keys():              # Welch's t takes all seeds of either arm
        line += f" about {mean(left.values()) - mean(right.values()):+.2f}"
    runs = [next(iter(arms[name.split()[0].split("+")[0]].values())) for name in (a, b)]
    if all(run["codes"] != "trained" for run in runs):
        each, freedom = pooled_variance(arms, runs[0], "sampled" if kind == "gain" else kind)
        count = len(a.split())                   # the mean of several arms varies less
        line += f", pooled {t_quantile(freedom) * (2 * each / count / n)**0.5:.2f}"
    return f"{line}; {n} seeds"


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
        before = mean(float(row["sampled_before"]) for row in arms[name].values())
        end, y = mean(after), 36 + 30 * i
        half = t_quantile(len(after) - 1) * stdev(after) / len(after)**0.5
        lines.append(f'<text x="232" y="{y + 14}" text-anchor="end">{label}</text>'
                     f'<rect class="start" x="{x(0)}" y="{y}" width="{11 * before:.1f}" height="18"/>'
                     f'<rect class="gain" x="{x(before):.1f}" y="{y}" width="{11 * (end - before):.1f}" height="18"/>'
                     f'<line class="width" x1="{x(end - half):.1f}" x2="{x(end + half):.1f}" y1="{y + 9}" '
                     f'y2="{y + 9}"/>'
                     f'<text x="{x(end + half) + 8:.1f}" y="{y + 14}">{end:.1f}</text>')
    title = "0.5B on GSM8K: right answers in percent, sampled, before (grey) and after 60 steps"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {bottom + 24}" width="740" '
            f'height="{bottom + 24}" role="img" aria-label="{title}"><text x="8" y="18">{title}</text>'
            + "\n".join(lines) + "</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(usage="table.py [picture.svg]", description=__doc__.strip(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", type=Path, help="SVG file to draw instead")
    out = parser.parse_args().picture
    arms = read(Path(__file__).with_name("results.csv"))
    if out:
        out.write_text(picture(arms))
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
        if all(name in arms for name in f"{a} {b}".replace("+", " ").split()):
            for kind in ("sampled", "greedy", "gain"):
                found = compare(arms, a, b, kind)
                if found:
                    print(f"{what:56} {kind:8} {found}")


if __name__ == "__main__":
    main()
