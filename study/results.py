"""
The study's tables and curves, made from the runs in study/runs.

    python -m study.results tables bf16 calibrated nearest
    python -m study.results mean entropy nearest-aqn --first 6 --last 11
    python -m study.results pairs accuracy calibrated:bf16 1.5b-calibrated:1.5b-bf16 --last-common 20
    python -m study.results pairs greedy calibrated:bf16
    python -m study.results curves bf16-s0 bf16-s1 --out curves.png

An arm is one way to train, run with one or several seeds. study/runs holds of each arm

    ARM-sSEED.jsonl     metrics.jsonl of the run with that seed; docs/metrics.md defines the keys
    held_out.json       "ARM" and "ARM-sSEED": which test problems were answered correctly (greedily)
                        before and after training, as a string of 0 and 1, in the test file's order

tables prints every arm's accuracy, gain, entropy and length, then each arm minus the first one.
mean prints the mean of one logged number over some steps and all seeds.
pairs subtracts runs with the same seed from each other and prints every difference, their mean,
and its 95 % interval by Student's t: the seeds alone tell how sure the mean is.
curves draws the panels of tools/report.py into a picture. It needs matplotlib, which is not in
requirements.txt; `python -m tools.report` shows the same curves of any run without it.

Two kinds of 95 % intervals. Those of `tables` resample seeds and problems 4,000 times, both with
replacement. They count the noise of single answers, which is nearly all there is, about twice:
with three seeds and 1,319 problems their half width is 2.1 points where 1.5 would do. Those of
`pairs` assume nothing but a normal distribution, and are wide for three seeds.

Not here: how each run was made (study/README.md).
"""
import argparse
import colorsys
import math
import re
from pathlib import Path
from typing import NamedTuple

from harness import process  # isort: skip; before numpy
import numpy as np

from harness.files import read_json
from harness.process import short_repr
from tools.report import PANELS, log_rows, series, smooth

RUNS = Path("study/runs")


class Arm:
    """All runs of one arm.

    seeds     their names
    metrics   for each seed, the rows of its metrics.jsonl
    before    (problems,) 0 or 1: was the problem answered correctly before training
    after     (seeds, problems) the same after training
    """

    def __init__(self, folder: Path, name: str):
        path = folder / "held_out.json"
        held_out = read_json(path)
        files = sorted(folder.glob(f"{name}-s*.jsonl")) if name in held_out else []
        runs = [file.stem for file in files if file.stem in held_out]
        if not runs:
            raise ValueError(f"{folder}: no runs {name}-sSEED.jsonl that held_out.json knows")
        for run in (name, *runs):
            if not re.fullmatch(f"[01]{{{len(str(held_out[name]))}}}", str(held_out[run])):
                raise ValueError(f"{path}: {run} is {short_repr(held_out[run])}, expected 0 or 1 for each problem")
        self.name = name
        self.seeds = [run.removeprefix(f"{name}-s") for run in runs]
        self.metrics = [log_rows(folder / f"{run}.jsonl") for run in runs]
        self.steps = [len(steps) for steps in self.metrics]
        self.before = np.array(list(held_out[name]), int)
        self.after = np.array([list(held_out[run]) for run in runs], int)

    def mean(self, key: str, first: int | None, last: int | None) -> float:
        """Mean of a logged number over steps[first:last] of all seeds.

        Steps that did not log it are left out; NaN if none did, as when nothing could teach.
        """
        values = [step[key] for steps in self.metrics for step in steps[first:last] if step.get(key) is not None]
        return sum(values) / len(values) if values else math.nan

    def start_to_end(self, key: str, digits: int) -> str:
        """A logged number in the first five and in the last five steps."""
        return f"{self.mean(key, None, 5):.{digits}f} -> {self.mean(key, -5, None):.{digits}f}"


# -----------------------------------------------------------------------------
# tables

def bootstrap_interval(differences: np.ndarray) -> tuple[float, float, float]:
    """(seeds, problems) -> mean, low and high end of its 95 % interval, in points."""
    seeds, problems = differences.shape
    draw = np.random.default_rng(0)
    means = []
    for _ in range(4000):
        rows = draw.integers(seeds, size=seeds)
        columns = draw.integers(problems, size=problems)
        means.append(differences[rows].mean(axis=0)[columns].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return 100 * differences.mean(), 100 * low, 100 * high


def points(differences: np.ndarray) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*bootstrap_interval(differences))


def arm_line(arm: Arm) -> str:
    """An arm's line of the first table."""
    after = " / ".join(f"{100 * share:.1f}" for share in arm.after.mean(axis=1))
    steps = "-".join(map(str, sorted({min(arm.steps), max(arm.steps)})))
    return (f"| {arm.name} | {steps} | {100 * arm.before.mean():.1f} "
            f"| **{100 * arm.after.mean():.1f}** | {after} | {points(arm.after - arm.before)} "
            f"| {arm.start_to_end('entropy', 3)} | {arm.start_to_end('accuracy', 3)} | {arm.start_to_end('length', 0)} "
            f"| {arm.mean('seconds', 5, None):.1f} |")


def difference_line(first: Arm, other: Arm) -> str:
    """A line of the second table: other minus first, on the same problems, over the seeds that both have."""
    seeds = [seed for seed in first.seeds if seed in other.seeds]
    if not seeds or first.before.shape != other.before.shape:
        raise ValueError(f"{first.name} and {other.name} have no seed in common, or other problems")
    after = [arm.after[[arm.seeds.index(seed) for seed in seeds]] for arm in (first, other)]
    return (f"| {other.name} - {first.name} | {points((other.before - first.before)[None])} "
            f"| {points(after[1] - after[0])} | {', '.join(seeds)} |")


def print_tables(args):
    arms = [Arm(args.runs, name) for name in args.arms]
    print("| arm | steps | before, % | after, % | by seed | gain | entropy | accuracy | length "
          "| s a step |\n|---|---|---|---|---|---|---|---|---|---|")
    print(*map(arm_line, arms), sep="\n")
    if len(arms) > 1:
        print("\n| points | before | after | seeds |\n|---|---|---|---|")
        print(*(difference_line(arms[0], arm) for arm in arms[1:]), sep="\n")


# -----------------------------------------------------------------------------
# mean and pairs

def print_mean(args):
    for name in args.arms:
        print(f"{name} {Arm(args.runs, name).mean(args.key, args.first, args.last + 1):.5g}")


# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def student_quantile(freedom: int) -> float:
    """A difference lies within so many standard errors of its mean in 95 % of cases."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.5 / freedom    # right to 0.005


class Pair(NamedTuple):
    name: str               # "calibrated:bf16 s0"
    steps: str              # "40 to 59", or "after training"
    difference: float       # the first run's figure minus the other's


def pairs_of_runs(arm: Arm, other: Arm, key: str, first: int, last: int, last_common: int | None) -> list[Pair]:
    """One difference for each seed that both arms have.

    key greedy: of the test accuracy after training. Any other key: of its mean over the steps that
    both runs logged, from first to last, or the last `last_common` of them. Runs that ended at
    different steps are so compared at equal ones.
    """
    pairs = []
    for seed in [seed for seed in arm.seeds if seed in other.seeds]:
        i, j = arm.seeds.index(seed), other.seeds.index(seed)
        if key == "greedy":
            steps, difference = "after training", arm.after[i].mean() - other.after[j].mean()
        else:
            values = [dict(zip(*series(rows, key))) for rows in (arm.metrics[i], other.metrics[j])]
            common = [step for step in sorted(values[0].keys() & values[1].keys()) if first <= step <= last]
            common = common[-last_common:] if last_common else common
            if not common:
                raise ValueError(f"{arm.name} and {other.name}, seed {seed}: no step in common that logged {key}")
            steps = f"{common[0]} to {common[-1]}"
            difference = sum(values[0][step] - values[1][step] for step in common) / len(common)
        pairs.append(Pair(f"{arm.name} - {other.name}, seed {seed}", steps, float(difference)))
    if not pairs:
        raise ValueError(f"{arm.name} and {other.name} have no seed in common")
    return pairs


def print_pairs(args):
    found = []
    for text in args.pairs:
        names = text.split(":")
        if len(names) != 2:
            raise ValueError(f"{text}: a pair is written ARM:OTHER")
        arm, other = (Arm(args.runs, name) for name in names)
        found += pairs_of_runs(arm, other, args.key, args.first, args.last, args.last_common)
    print(f"| pair | steps | {args.key} |\n|---|---|---|")
    print(*(f"| {pair.name} | {pair.steps} | {pair.difference:+.4f} |" for pair in found), sep="\n")
    differences = [pair.difference for pair in found]
    if len(found) > 1:
        half = student_quantile(len(found) - 1) * np.std(differences, ddof=1) / len(found) ** 0.5
        print(f"| mean of {len(found)}, 95 % by Student's t | | **{np.mean(differences):+.4f}** +- {half:.4f} |")


# -----------------------------------------------------------------------------
# curves

# Colours of Okabe and Ito, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def distinct_colours(n: int) -> list:
    """n colours: the seven above, then hues a golden angle apart, light and dark in turn."""
    more = [colorsys.hls_to_rgb(i * 0.618 % 1, (0.35, 0.6)[i % 2], 0.6) for i in range(n)]
    return [*COLOURS, *more][:n]


def draw_curve(axis, steps, values, key, colour):
    """One run's curve: raw values faint, on top of them a moving mean."""
    if PANELS[key][1] == "share":
        axis.set_ylim(-0.02, 1.02)
    if PANELS[key][1] == "log":
        axis.set_yscale("symlog", linthresh=1e-4)        # plain log cannot show a sigma of 0
        axis.plot(steps, values, color=colour, linewidth=1.3, drawstyle="steps-post")
    elif key == "eval_accuracy":
        axis.plot(steps, values, color=colour, linewidth=1.6, marker="o", markersize=3)
    else:
        axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        axis.plot(steps, smooth(values, len(values) // 15), color=colour, linewidth=1.6)


def panels(runs: dict, plt):
    """{name: rows} -> a matplotlib figure with every panel for which some run has values."""
    keys = [key for key in PANELS if any(series(rows, key)[0] for rows in runs.values())]
    if not keys:
        raise ValueError(f"nothing to draw: none of {', '.join(PANELS)} in {', '.join(runs)}")
    colours = distinct_colours(len(runs))
    picture, axes = plt.subplots(3, 4, layout="constrained", figsize=(14.4, 8.6))
    for axis in axes.flat[len(keys):]:
        axis.set_axis_off()
    for axis, key in zip(axes.flat, keys):
        for rows, colour in zip(runs.values(), colours):
            draw_curve(axis, *series(rows, key), key, colour)
        axis.set_title(PANELS[key][0], fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.set_xlabel("step", fontsize=8)
    handles = [plt.Line2D([], [], color=c, label=name) for name, c in zip(runs, colours)]
    picture.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=9, frameon=False)
    return picture


def metrics_file(run: str, folder: Path) -> Path:
    """A file, a folder that train.py wrote, or the name of a run in study/runs -> its metrics."""
    if run.endswith(".jsonl"):
        return Path(run)
    named = folder / f"{run}.jsonl"
    return named if named.exists() else Path(run) / "metrics.jsonl"


def write_curves(args):
    out = args.out
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--out {out}: must end in .png, .svg or .pdf")
    runs = {run: log_rows(metrics_file(run, args.runs)) for run in args.curves}
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ValueError("curves need pip install matplotlib, which is not in requirements.txt") from None
    plt.switch_backend("Agg")                    # draws into files, so no display is needed
    picture = panels(runs, plt)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}{out.suffix}")      # a full disk must not destroy the old picture
    picture.savefig(new, dpi=150)
    new.replace(out)
    print(out)


# -----------------------------------------------------------------------------

def parse_args():
    parser = argparse.ArgumentParser(prog="study.results", description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, function, summary):
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(function=function)
        sub.add_argument("--runs", type=Path, default=RUNS, help=f"folder of the runs (default: {RUNS})")
        return sub

    sub = command("tables", print_tables, "accuracy before and after training, and differences from the first arm")
    sub.add_argument("arms", nargs="+", metavar="ARM")
    sub = command("mean", print_mean, "mean of one logged number over some steps and all seeds")
    sub.add_argument("key", metavar="KEY", help="a key of docs/metrics.md")
    sub.add_argument("arms", nargs="+", metavar="ARM")
    add_steps(sub)
    sub = command("pairs", print_pairs, "differences between runs of the same seed, with Student's t")
    sub.add_argument("key", metavar="KEY", help="a key of docs/metrics.md, or greedy: test accuracy after training")
    sub.add_argument("pairs", nargs="+", metavar="ARM:OTHER", help="the first minus the second, seed by seed")
    add_steps(sub)
    sub.add_argument("--last-common", type=int, metavar="N", help="only the last N steps that both runs have")
    sub = command("curves", write_curves, "curves of runs as a picture")
    sub.add_argument("curves", nargs="+", metavar="RUN", help="a run's name, its folder or a metrics.jsonl")
    sub.add_argument("--out", type=Path, required=True, help="a .png, .svg or .pdf")
    return parser.parse_args()


def add_steps(sub):
    sub.add_argument("--first", type=int, default=0, help="first step (default: 0)")
    sub.add_argument("--last", type=int, default=10**9, help="last step, included (default: the run's)")


def main():
    args = parse_args()
    with process.one_line("study"):
        args.function(args)


if __name__ == "__main__":
    main()
