"""
Several seeds of several arms as the tables of study/README.md.

    python -m study.results bf16 nvfp4 --runs study/runs
    python -m study.results bf16 --mean accuracy --first 6 --last 17     of those steps, all seeds

Of an arm it reads ARM-sSEED.jsonl, the metrics.jsonl of each of its runs, and from held_out.json
which held-out problems were answered right, greedily: "ARM" before training, "ARM-sSEED" after, a
string of 0 and 1 each, in the order of the file.

A difference is of the same seed and the same problem. Its 95 % interval is of 4,000 resamples of
seeds and of problems, both with replacement: with three seeds that of the seeds is coarse.

Not here: the runs (study/README.md has each command), curves (study/plot.py).
"""
import argparse
import math
import re
from pathlib import Path

from harness import process  # isort: skip; before numpy
import numpy as np

from harness.files import read_json
from harness.process import short_repr
from study.plot import rows_of


class Arm:
    """metrics: of each seed its steps; before (problems,) and after (seeds, problems): 0, 1."""

    def __init__(self, folder, name):
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
        self.metrics = [rows_of(folder / f"{run}.jsonl") for run in runs]
        self.steps = [len(steps) for steps in self.metrics]
        self.before = np.array(list(held_out[name]), int)
        self.after = np.array([list(held_out[run]) for run in runs], int)

    def mean(self, key, first, last):
        """Of a logged number over some steps and all seeds; steps that lack it are left out.
        NaN if all do: nothing taught any more.
        """
        values = [step[key] for steps in self.metrics for step in steps[first:last] if step.get(key) is not None]
        return sum(values) / len(values) if values else math.nan

    def moved(self, key, digits):
        """From the first five steps to the last five."""
        return f"{self.mean(key, None, 5):.{digits}f} -> {self.mean(key, -5, None):.{digits}f}"


def interval(differences):
    """(seeds, problems) -> mean, low, high in points."""
    seeds, problems = differences.shape
    draw = np.random.default_rng(0)
    means = []
    for _ in range(4000):
        rows = draw.integers(seeds, size=seeds)
        columns = draw.integers(problems, size=problems)
        means.append(differences[rows].mean(axis=0)[columns].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return 100 * differences.mean(), 100 * low, 100 * high


def points(differences):
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*interval(differences))


def row(arm):
    """A line of the first table."""
    after = " / ".join(f"{100 * share:.1f}" for share in arm.after.mean(axis=1))
    steps = "-".join(map(str, sorted({min(arm.steps), max(arm.steps)})))
    return (f"| {arm.name} | {steps} | {100 * arm.before.mean():.1f} "
            f"| **{100 * arm.after.mean():.1f}** | {after} | {points(arm.after - arm.before)} "
            f"| {arm.moved('entropy', 3)} | {arm.moved('accuracy', 3)} | {arm.moved('length', 0)} "
            f"| {arm.mean('seconds', 5, None):.1f} |")


def compare(first, other):
    """A line of the second table: other minus first, of the seeds that both have."""
    seeds = [seed for seed in first.seeds if seed in other.seeds]
    if not seeds or first.before.shape != other.before.shape:
        raise ValueError(f"{first.name} and {other.name} have no seed in common, or other problems")
    after = [arm.after[[arm.seeds.index(seed) for seed in seeds]] for arm in (first, other)]
    return (f"| {other.name} - {first.name} | {points((other.before - first.before)[None])} "
            f"| {points(after[1] - after[0])} | {', '.join(seeds)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", help="the others are compared with the first")
    parser.add_argument("--runs", type=Path, default=Path("study/runs"), help="folder of the files")
    parser.add_argument("--mean", metavar="KEY", help="only the mean of a logged number")
    parser.add_argument("--first", type=int, default=0, help="step of --mean")
    parser.add_argument("--last", type=int, default=10**9, help="step of --mean, included")
    args = parser.parse_args()
    with process.one_line("study"):
        arms = [Arm(args.runs, name) for name in args.arms]
        if args.mean:
            for arm in arms:
                print(f"{arm.name} {arm.mean(args.mean, args.first, args.last + 1):.5g}")
            return
        print("| arm | steps | before, % | after, % | by seed | gain | entropy | accuracy | length "
              "| s a step |\n|---|---|---|---|---|---|---|---|---|---|")
        print(*map(row, arms), sep="\n")
        if len(arms) > 1:
            print("\n| points | before | after | seeds |\n|---|---|---|---|")
            print(*(compare(arms[0], arm) for arm in arms[1:]), sep="\n")


if __name__ == "__main__":
    main()
