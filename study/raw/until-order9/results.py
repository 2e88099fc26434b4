"""
The study's tables, made from the runs in study/runs.

    python -m study.results tables bf16 calibrated nearest --primary calibrated
    python -m study.results spread
    python -m study.results mean entropy nearest-aqn --first 6 --last 11
    python -m study.results pairs accuracy calibrated:bf16 1.5b-calibrated:1.5b-bf16 \\
        --last-common 20
    python -m study.results pairs greedy calibrated:bf16
    python -m study.results keep runs/x bf16-s3
    python -m study.results verdicts bf16-s3 greedy.jsonl sampled.jsonl
    python -m study.results sampler

An arm is one way to train, run with one or several seeds. study/runs holds of each arm

    ARM-sSEED.jsonl         metrics.jsonl of the run with that seed; docs/metrics.md defines the
                            keys
    ARM-sSEED.rows.csv.gz   step, id, correct, length, mean_logprob of every sampled answer
    held_out.json           "ARM" and "ARM-sSEED": which test problems were answered correctly
                            (greedily) before and after training, as a string of 0 and 1, in the
                            test file's order; where each run made a 4-bit model of its own,
                            "ARM-sSEED-before" in place of "ARM"
    sampled.json            the same of 8 answers at temperature 1 to each problem: `right`, a
                            string of digits that say how many of the 8 are right, and
                            `sampler_entropy`
    sampler.jsonl.gz        what study/entropy.py sampled before training, by base and noise; the
                            0.5B's sums of log-probs are rounded to a tenth

tables prints every arm's accuracy, gain, entropy and length, then each arm minus the first one,
before and after training and in the gain: greedy, and sampled where all arms have that. --primary
names the one comparison that was chosen before the runs were made (it is marked in sampled answers
if there are any); all others are exploratory.
spread prints for each pool V (see below), and the whole variance from seed to seed.
mean prints the mean of one logged number over some steps and all seeds.
pairs subtracts runs with the same seed from each other and prints every difference, their mean,
and its 95 % interval by Student's t over the seeds: these alone tell how sure the mean is. With
several pairs of arms each seed counts once, with the mean of its pairs. For greedy and sampled
there is also the interval that `tables` would give to this mean.
--seeds limits tables, mean and pairs to some seeds. V comes from all seeds of all arms in any case.
keep copies a run of train.py into study/runs. verdicts adds the verdicts on its answers that
evaluate.py --out wrote, once.
sampler prints entropy, accuracy and length of every setting of study/entropy.py, and differences
from the same base without noise and from 16 bits without noise.

The 95 % intervals of `tables` answer: where would this figure lie with other seeds and on other
problems like these? A difference D of two arms that have S seeds and P problems in common varies
because the problems do and because the seeds do:

    variance of D = (variance over problems of the mean difference on a problem) / P
                    + 2 * V / S

V is the variance of an arm's accuracy from seed to seed, beyond what the luck of single answers
explains. Three seeds are too few to estimate it, so it is pooled over many arms (pool,
seed_variance). The interval is D +- t * root of the variance; t is the quantile of Student's
distribution, with the degrees of freedom of Satterthwaite's rule. The variance of one arm's gain
over the untrained model has V / S instead of 2 * V / S; that of a difference of untrained models
has no V.

The intervals of `pairs` assume nothing but a normal distribution of the seeds' differences, and are
wide for three seeds. The intervals of `sampler` are paired over the problems. They leave out that
another draw of the noise would have another effect; the last column of the second table has
intervals over the draws.

Not here: how each run was made (study/methods.md).
"""
import argparse
import csv
import gzip
import io
import json
import math
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import env  # isort: skip; its settings come before torch

import numpy as np

from files import json_line, parse_json, read_json, read_rows, short_repr, write_atomically
from tasks.figures import sampler_entropy
from tools.report import log_rows, series

RUNS = Path("study/runs")
# Keys of metrics.jsonl that older runs logged under another name.
RENAMED = {"mismatch_abs": "rollout_logp_diff", "mismatch_within": "rollout_logp_within",
           "mismatch_k3": "rollout_kl", "ratio_max": "rollout_is_max", "ess": "rollout_is_ess",
           "ratio_outside": "rollout_is_outside", "clip_low": "clip_ratio_low",
           "clip_high": "clip_ratio_high"}
SAMPLES = 8                                      # answers to a problem in sampled.json


class Verdicts(NamedTuple):
    """Which share of a model's answers to each problem was right; one answer if they are greedy.

    before and after training, (seeds, problems): seeds that began with the same model have the same
    row in `before`. entropy: None, or that of the sampler before and after, (2, seeds)
    """
    before: np.ndarray
    after: np.ndarray
    entropy: np.ndarray | None = None


class Arm:
    """The runs of one arm: those that were tested or, with tested=False, all; of wanted seeds if
    these are given.

    seeds     their names
    metrics   for each seed, the rows of its metrics.jsonl
    greedy, sampled    Verdicts; None where no such evaluation was made, or with tested=False
    """

    def __init__(self, folder: Path, name: str, tested: bool = True,
                 wanted: list[str] | None = None):
        path = folder / "held_out.json"
        held_out = read_json(path) if tested else {}
        runs = runs_of(folder, held_out, name) if tested else logged_runs(folder, name)
        if not runs:
            raise ValueError(f"{folder}: no runs {name}-sSEED.jsonl"
                             + (" that held_out.json knows" if tested else ""))
        if wanted:
            known = runs
            runs = [run for run in known if seed_of(run) in wanted]
            if len(runs) < len({*wanted}):
                raise ValueError(f"--seeds {' '.join(wanted)}: {name} has "
                                 f"{', '.join(map(seed_of, known))}")
        self.name = name
        self.seeds = [seed_of(run) for run in runs]
        self.metrics = [metrics_rows(folder / f"{run}.jsonl") for run in runs]
        self.steps = [len(steps) for steps in self.metrics]
        self.greedy = self.sampled = None
        if not tested:
            return
        names = [before_training(run, held_out) for run in runs] + runs
        self.greedy = Verdicts(*np.split(shares_right(path, held_out, names, 1), 2))
        self.sampled = self._sampled(folder / "sampled.json", names)

    def _sampled(self, path: Path, names: list[str]) -> Verdicts | None:
        """names: the models before training, then the runs. ValueError if some were tested so and
        others not.
        """
        held = read_json(path) if path.exists() else {}
        if held.keys().isdisjoint(names):
            return None
        for name in names:
            entry = held.get(name)
            entropy = entry.get("sampler_entropy") if isinstance(entry, dict) else None
            if type(entropy) is not float:
                raise ValueError(f"{path}: {name} is {short_repr(entry)}, expected an object with "
                                 "right and sampler_entropy")
        right = {name: held[name].get("right") for name in names}
        entropies = [held[name]["sampler_entropy"] for name in names]
        return Verdicts(*np.split(shares_right(path, right, names, SAMPLES), 2),
                        np.reshape(entropies, (2, -1)))

    def mean(self, key: str, first: int | None, last: int | None) -> float:
        """Mean of a logged number over steps[first:last] of all seeds.

        Steps that did not log it are left out; NaN if none did, as when nothing could teach.
        """
        values = [step[key] for steps in self.metrics for step in steps[first:last]
                  if step.get(key) is not None]
        return sum(values) / len(values) if values else math.nan

    def start_to_end(self, key: str, digits: int) -> str:
        """A logged number in the first five and in the last five steps."""
        return f"{self.mean(key, None, 5):.{digits}f} -> {self.mean(key, -5, None):.{digits}f}"


def shares_right(path: Path, held: dict, names: list[str], answers: int) -> np.ndarray:
    """held[name], strings of each problem's number of right answers -> shares (names, problems)."""
    problems = max(2, len(str(held[names[0]])))  # one has no variance
    for name in names:
        if not re.fullmatch(f"[0-{answers}]{{{problems}}}", str(held[name])):
            raise ValueError(f"{path}: {name} is {short_repr(held[name])}, expected "
                             f"{'0 or 1' if answers == 1 else f'0 to {answers}'} for each problem")
    return np.array([list(held[name]) for name in names], int) / answers


def metrics_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; what an older run logged has its present name too."""
    return [row | {RENAMED[key]: row[key] for key in RENAMED.keys() & row.keys()}
            for row in log_rows(path)]


def arm_of(name: str) -> str:
    """The arm of ARM, ARM-sSEED and ARM-sSEED-before."""
    return re.sub(r"-s\d+(-before)?$", "", name)


def seed_of(run: str) -> str:
    """The seed of the run ARM-sSEED."""
    return run.rpartition("-s")[2]


def logged_runs(folder: Path, arm: str) -> list[str]:
    """The runs ARM-sSEED that the folder has metrics of, in the order of their seeds."""
    names = [path.name.removesuffix(".jsonl") for path in folder.glob("*.jsonl")]
    names = [name for name in names if re.fullmatch(re.escape(arm) + r"-s\d+", name)]
    return sorted(names, key=lambda name: int(seed_of(name)))


def before_training(run: str, held_out: dict) -> str:
    """The name in held_out.json of the model that a run began with: its own one, or its arm's."""
    own = f"{run}-before"
    return own if own in held_out else arm_of(run)


def runs_of(folder: Path, held_out: dict, arm: str) -> list[str]:
    """The runs ARM-sSEED that the folder has both metrics and verdicts of."""
    return [run for run in logged_runs(folder, arm)
            if run in held_out and before_training(run, held_out) in held_out]


def arms_in(folder: Path) -> list[Arm]:
    """Every arm that the folder has runs of."""
    held_out = read_json(folder / "held_out.json")
    arms = dict.fromkeys(arm_of(name) for name in held_out)          # each once
    return [Arm(folder, arm) for arm in arms if runs_of(folder, held_out, arm)]


# -----------------------------------------------------------------------------
# How sure is a difference?

FEW = 20                                         # degrees of freedom of a pool: see trusted()


class SeedVariance(NamedTuple):
    """How much an arm's accuracy varies from seed to seed.

    true      the part that is not the luck of single answers, V in the docstring above; it is a
              difference of two estimates and can come out below 0
    seen      the whole variance of the seeds' accuracies, from which that part was subtracted
    freedom   degrees of freedom: seeds - 1, over all arms; 0 if no arm has two seeds
    """
    true: float
    seen: float
    freedom: int

    @property
    def trusted(self) -> float:
        """V as the intervals take it. From few seeds a V below 0 is chance, and counts as 0. From
        many it counts as it is: if it were raised to 0, intervals would be too wide on average.
        """
        return max(0.0, self.true) if self.freedom < FEW else self.true


def pool(folder: Path, kind: str, problems: int) -> SeedVariance:
    """V of the arms in the folder that answered so many problems. kind: greedy or sampled.

    V of greedy answers comes from the arms that have no sampled ones, if these have enough seeds.
    They are the arms of the first study. So the first study's intervals do not change when runs are
    added, and the intervals of later arms rest on seeds of other runs than their own.
    """
    arms = [arm for arm in arms_in(folder) if arm.greedy.after.shape[1] == problems]
    if kind == "greedy":
        first = seed_variance([arm.greedy.after for arm in arms if not arm.sampled])
        if first.freedom >= FEW:
            return first
    return seed_variance([getattr(arm, kind).after for arm in arms if getattr(arm, kind)])


def seed_variance(arms: list[np.ndarray]) -> SeedVariance:
    """arms: the shares right after training of each, (seeds, problems). One seed says nothing.

    A seed's accuracy differs from that of another for two reasons: the seeds learned differently,
    and on each problem their answers differ by chance. The second part is the residual of seeds x
    problems (after the means of both are taken away), divided by the number of problems.
    """
    freedom = sum(len(arm) - 1 for arm in arms)
    if not freedom:
        return SeedVariance(0.0, 0.0, 0)
    seen = noise = 0.0
    for arm in arms:
        seeds, problems = arm.shape
        if seeds > 1:
            means = arm.mean(axis=1, keepdims=True)
            residual = arm - means - arm.mean(axis=0) + arm.mean()
            seen += (seeds - 1) / freedom * means.var(ddof=1)
            # Its mean square has (seeds - 1) (problems - 1) degrees of freedom; seeds - 1 cancels
            # with the weight (seeds - 1) / freedom.
            noise += (residual**2).sum() / (freedom * (problems - 1) * problems)
    return SeedVariance(seen - noise, seen, freedom)


def difference_interval(differences: np.ndarray, spread: SeedVariance,
                        arms: float) -> tuple[float, float]:
    """(seeds, problems) -> their mean, and half the width of its 95 % interval.

    arms: how many trained arms the difference has: 2, 1 for a gain over the untrained model, or 0;
    in a mean of n differences of 2 arms each, 2 / n.
    """
    count, problems = differences.shape
    of_problems = differences.mean(axis=0).var(ddof=1) / problems
    of_seeds = arms / count
    # The bound keeps a V below 0 from making all of it negative.
    variance = max(of_problems + of_seeds * spread.trusted, of_problems / 2)
    # Satterthwaite: a sum of variances is as uncertain as one with so many degrees of freedom.
    doubt = of_problems**2 / (problems - 1)
    if spread.freedom:
        doubt += (of_seeds * spread.seen)**2 / spread.freedom
    t = student_quantile(variance**2 / doubt) if doubt else 0.0
    return float(differences.mean()), float(t * variance**0.5)


# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
           2.160, 2.145, 2.131)


def student_quantile(freedom: float) -> float:
    """A difference lies within so many standard errors of its mean in 95 % of cases.

    A freedom between whole numbers is rounded down, which is on the safe side.
    """
    whole = max(1, int(freedom))
    return STUDENT[whole - 1] if whole <= len(STUDENT) else 1.96 + 2.5 / whole      # right to 0.005


# -----------------------------------------------------------------------------
# tables

def points(differences: np.ndarray, spread: SeedVariance, arms: int) -> str:
    """A difference in points with its 95 % interval; the arguments are difference_interval()'s."""
    mean, half = difference_interval(differences, spread, arms)
    # + 0.0: a figure that is rounded to -0.0 is shown as +0.0
    mean, low, high = (round(100 * x, 1) + 0.0 for x in (mean, mean - half, mean + half))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def percents(shares: np.ndarray) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def greedy_line(arm: Arm, folder: Path) -> str:
    """An arm's line of the first table."""
    before, after, _ = arm.greedy
    spread = pool(folder, "greedy", before.shape[1])
    steps = "-".join(map(str, sorted({min(arm.steps), max(arm.steps)})))
    return (f"| {arm.name} | {steps} | {100 * before.mean():.1f} "
            f"| **{100 * after.mean():.1f}** | {percents(after.mean(axis=1))} "
            f"| {points(after - before, spread, 1)} "
            f"| {arm.start_to_end('entropy', 3)} | {arm.start_to_end('accuracy', 3)} "
            f"| {arm.start_to_end('length', 0)} "
            f"| {arm.mean('seconds', 5, None):.1f} |")


def sampled_line(arm: Arm, folder: Path) -> str:
    """An arm's line of the table of sampled answers."""
    before, after, entropy = arm.sampled
    spread = pool(folder, "sampled", before.shape[1])
    return (f"| {arm.name} | {100 * before.mean():.1f} | **{100 * after.mean():.1f}** "
            f"| {percents(after.mean(axis=1))} | {points(after - before, spread, 1)} "
            f"| {100 * (before > 0).mean():.1f} -> {100 * (after > 0).mean():.1f} "
            f"| {entropy[0].mean():.3f} -> {entropy[1].mean():.3f} |")


def difference_line(first: Arm, other: Arm, kind: str, folder: Path, primary: bool) -> str:
    """Other minus first, on the same problems, over the seeds that both have."""
    common = [seed for seed in first.seeds if seed in other.seeds]
    mine, theirs = (getattr(arm, kind) for arm in (first, other))
    if not common or mine.after.shape[1] != theirs.after.shape[1]:
        raise ValueError(f"{first.name} and {other.name} have no seed in common, or other problems")
    before, after = (
        getattr(theirs, when)[[other.seeds.index(seed) for seed in common]]
        - getattr(mine, when)[[first.seeds.index(seed) for seed in common]]
        for when in ("before", "after"))
    spread = pool(folder, kind, mine.after.shape[1])
    name = f"{other.name} - {first.name}"
    return (f"| {f'**{name}** (primary)' if primary else name} "
            f"| {points(before.mean(axis=0)[None], spread, 0)} "
            f"| {points(after, spread, 2)} | {points(after - before, spread, 2)} "
            f"| {', '.join(common)} |")


def print_differences(arms: list[Arm], kind: str, folder: Path, primary: str | None):
    if len(arms) > 1:
        print(f"\n| points, {kind} | before | after | gain | seeds |\n|---|---|---|---|---|")
        print(*(difference_line(arms[0], arm, kind, folder, arm.name == primary)
                for arm in arms[1:]), sep="\n")


def print_tables(args):
    if args.primary and args.primary not in args.arms[1:]:
        raise ValueError(f"--primary {args.primary}: not among the arms that are compared with "
                         f"{args.arms[0]}")
    arms = [Arm(args.runs, name, wanted=args.seeds) for name in args.arms]
    print("| arm | steps | before, % | after, % | by seed | gain | entropy | accuracy | length "
          "| s a step |\n|---|---|---|---|---|---|---|---|---|---|")
    print(*(greedy_line(arm, args.runs) for arm in arms), sep="\n")
    sampled = all(arm.sampled for arm in arms)
    print_differences(arms, "greedy", args.runs, None if sampled else args.primary)
    if sampled:
        print(f"\n| arm, {SAMPLES} answers | before, % | after, % | by seed | gain "
              f"| pass@{SAMPLES}, % | sampler's entropy |\n|---|---|---|---|---|---|---|")
        print(*(sampled_line(arm, args.runs) for arm in arms), sep="\n")
        print_differences(arms, "sampled", args.runs, args.primary)
    if all(len(arm.seeds) == 1 for arm in arms_in(args.runs)):
        print("\nNo arm has two seeds: the intervals leave out that seeds differ.")


def print_spread(args):
    for problems in sorted({arm.greedy.after.shape[1] for arm in arms_in(args.runs)}):
        for kind in "greedy", "sampled":
            true, seen, freedom = pool(args.runs, kind, problems)
            if freedom:
                print(f"{kind}, {problems:,} problems: an arm's accuracies have a variance of "
                      f"{1e4 * seen:.4f} points^2 from seed to seed, {1e4 * true:.4f} without the "
                      f"luck of single answers ({freedom} degrees of freedom)")


# -----------------------------------------------------------------------------
# keep and verdicts

def write_new(path: Path, data: bytes) -> None:
    """ValueError if the file is there."""
    if path.exists():
        raise ValueError(f"{path} exists and is not overwritten")
    write_atomically(path, data)
    print(path)


def check_name(name: str) -> None:
    if not re.fullmatch(r"[\w.-]+-s\d+", name):
        raise ValueError(f"{name}: a run is named ARM-sSEED, bf16-s0 for example")


def columns(path: Path, rows: list, keys: tuple[str, ...]) -> list[list]:
    """The values of these keys of each row. ValueError names the file where a row lacks one, or has
    something else than a verdict or a number where these belong.
    """
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not {*keys} <= row.keys():
            raise ValueError(f"{path}: row {number} has not all of {', '.join(keys)}")
        for key in {"correct", "length", "mean_logprob"} & {*keys}:
            value = row[key]
            if not isinstance(value, (int, float)) or (key == "correct" and value not in (0, 1)):
                raise ValueError(f"{path}: row {number}: {key} is {short_repr(value)}")
    return [[row[key] for key in keys] for row in rows]


def keep_run(args):
    check_name(args.name)
    metrics = log_rows(args.run / "metrics.jsonl")
    samples = args.run / "samples.jsonl"
    table = io.StringIO()
    keys = "step", "id", "correct", "length", "mean_logprob"
    write = csv.writer(table, lineterminator="\n").writerow
    write(keys)
    for step, name, correct, length, mean_logprob in columns(samples, log_rows(samples), keys):
        write([step, name, int(correct), length, f"{mean_logprob:.4f}"])
    rows = gzip.compress(table.getvalue().encode(), mtime=0)
    out = args.runs / f"{args.name}.rows.csv.gz"
    if out.exists():                             # before the first of the two files is written
        raise ValueError(f"{out} exists and is not overwritten")
    write_new(args.runs / f"{args.name}.jsonl", "".join(map(json_line, metrics)).encode())
    write_new(out, rows)


def keep_verdicts(args):
    for file in args.files:
        rows = [row for _, row in read_rows(file)]
        keys = "sample", "correct", "length", "mean_logprob"
        numbers = [sample for sample, *_ in columns(file, rows, keys)]
        samples = SAMPLES if 1 in numbers else 1             # sample 0 alone: greedy
        if not rows or numbers != [*range(samples)] * (len(rows) // samples):
            raise ValueError(f"{file}: expected 1 answer (greedy) or {SAMPLES} to each problem")
        groups = [rows[i:i + samples] for i in range(0, len(rows), samples)]
        right = "".join(str(sum(int(row["correct"]) for row in group)) for group in groups)
        path = args.runs / ("held_out.json" if samples == 1 else "sampled.json")
        held = read_json(path) if path.exists() else {}
        if args.name in held:
            raise ValueError(f"{path}: {args.name} is there: a run is tested once")
        held[args.name] = right if samples == 1 else {
            "right": right, "sampler_entropy": round(sampler_entropy(rows), 5)}
        write_atomically(path, (json.dumps(held, indent=1) + "\n").encode())
        print(f"{path}: {args.name}, {len(groups)} problems x {samples}")


# -----------------------------------------------------------------------------
# mean and pairs

def check_steps(args):
    """ValueError for --first, --last and --last-common that name no steps."""
    if not 0 <= args.first <= args.last:
        raise ValueError(f"--first {args.first} --last {args.last}: expected 0 <= first <= last")
    if getattr(args, "last_common", None) is not None and args.last_common < 1:
        raise ValueError(f"--last-common must be at least 1, got {args.last_common}")


def print_mean(args):
    check_steps(args)
    for name in args.arms:
        arm = Arm(args.runs, name, False, args.seeds)
        if not any(args.key in step for steps in arm.metrics for step in steps):
            raise ValueError(f"{name}: no step logged {args.key}")
        print(f"{name} {arm.mean(args.key, args.first, args.last + 1):.5g}")


class Pair(NamedTuple):
    name: str               # "calibrated - bf16"
    seed: str
    steps: str              # "40 to 59", or "after training"
    difference: float       # the first run's figure minus the other's


def pairs_of_runs(arm: Arm, other: Arm, key: str, first: int, last: int,
                  last_common: int | None) -> list[Pair]:
    """One difference for each seed that both arms have.

    key greedy or sampled: differences of the test accuracy after training. Any other key:
    differences of its mean over the steps that both runs logged, from first to last, or over the
    last `last_common` of them. So runs that ended at different steps are compared at the same ones.
    """
    pairs = []
    for seed in [seed for seed in arm.seeds if seed in other.seeds]:
        i, j = arm.seeds.index(seed), other.seeds.index(seed)
        if key in ("greedy", "sampled"):
            verdicts, theirs = getattr(arm, key), getattr(other, key)
            if not (verdicts and theirs):
                raise ValueError(f"sampled.json has not both {arm.name} and {other.name}")
            steps = "after training"
            difference = verdicts.after[i].mean() - theirs.after[j].mean()
        else:
            values = [dict(zip(*series(rows, key))) for rows in (arm.metrics[i], other.metrics[j])]
            common = [step for step in sorted(values[0].keys() & values[1].keys())
                      if first <= step <= last]
            common = common[-last_common:] if last_common else common
            if not common:
                raise ValueError(f"{arm.name} and {other.name}, seed {seed}: "
                                 f"no step in common that logged {key}")
            steps = f"{common[0]} to {common[-1]}"
            difference = sum(values[0][step] - values[1][step] for step in common) / len(common)
        pairs.append(Pair(f"{arm.name} - {other.name}", seed, steps, float(difference)))
    if not pairs:
        raise ValueError(f"{arm.name} and {other.name} have no seed in common")
    return pairs


def print_pairs(args):
    check_steps(args)
    tested = args.key in ("greedy", "sampled")
    arms, found = [], []
    for text in args.pairs:
        names = text.split(":")
        if len(names) != 2:
            raise ValueError(f"{text}: a pair is written ARM:OTHER")
        arm, other = (Arm(args.runs, name, tested, args.seeds) for name in names)
        arms.append((arm, other))
        found += pairs_of_runs(arm, other, args.key, args.first, args.last, args.last_common)
    print(f"| pair | steps | {args.key} |\n|---|---|---|")
    print(*(f"| {pair.name}, seed {pair.seed} | {pair.steps} | {pair.difference:+.4f} |"
            for pair in found), sep="\n")
    seeds = list(dict.fromkeys(pair.seed for pair in found))              # each once
    means = [np.mean([pair.difference for pair in found if pair.seed == seed]) for seed in seeds]
    if len(seeds) > 1:
        half = student_quantile(len(seeds) - 1) * np.std(means, ddof=1) / len(seeds) ** 0.5
        print(f"| mean of {len(seeds)} seeds, 95 % by Student's t | "
              f"| **{np.mean(means):+.4f}** +- {half:.4f} |")
    if tested:
        mean, half = interval_of_pairs(arms, seeds, args.key, args.runs)
        print(f"| the same over seeds and problems | | {mean:+.4f} +- {half:.4f} |")


def interval_of_pairs(arms: list[tuple[Arm, Arm]], seeds: list[str], key: str,
                      folder: Path) -> tuple[float, float]:
    """The mean over pairs of arms of what difference_interval() takes, over seeds that all have."""
    if len({arm.greedy.after.shape[1] for pair in arms for arm in pair}) > 1:
        raise ValueError("these arms answered different problems")
    common = [seed for seed in seeds if all(seed in arm.seeds for pair in arms for arm in pair)]
    if not common:
        raise ValueError("these pairs have no seed in common")
    differences = [
        np.mean([getattr(arm, key).after[arm.seeds.index(seed)]
                 - getattr(other, key).after[other.seeds.index(seed)] for arm, other in arms],
                axis=0) for seed in common]
    # A pair has two trained arms; in the mean of n pairs each has a weight of 1 / n.
    spread = pool(folder, key, len(differences[0]))
    return difference_interval(np.array(differences), spread, 2 / len(arms))


# -----------------------------------------------------------------------------
# sampler

class Setting(NamedTuple):
    """One base with one noise. The mean of each array (problems,) is that figure of the setting,
    and the standard error of the mean is that of the figure."""
    name: str               # "0.5b-nearest", or "nearest"
    noise: str              # "none", "aqn 0.01", "gain 0.07"
    entropy: np.ndarray     # nats a token
    accuracy: np.ndarray    # share of right answers
    length: np.ndarray      # tokens an answer
    problems_a_draw: int    # so many problems in a row were answered with one draw of the noise


def sampled_setting(line: dict) -> Setting:
    """A line of study/entropy.py, summed over the answers to each problem.

    The entropy H is a ratio of sums, -log p over tokens. Its standard error is, to first order in
    1 / problems, that of the mean of (-log p - H tokens) / (mean of tokens), in which log p and
    tokens are a problem's sums. These quotients have a mean of 0. H is added to each, so that their
    mean is the figure.
    """
    answers = np.array(line["answers"], dtype=float).reshape(-1, line["samples"], 4)
    correct, _, tokens, logprobs = answers.sum(axis=1).T
    entropy = -logprobs.sum() / tokens.sum()
    noise = line["noise"] if line["noise"] == "none" else f"{line['noise']} {line['sigma']:g}"
    return Setting(line["name"], noise,
                   entropy + (-logprobs - entropy * tokens) / tokens.mean(),
                   correct / line["samples"], tokens / line["samples"], line["problems_a_draw"])


def read_sampled(path: Path) -> list[Setting]:
    """The lines of a .jsonl or .jsonl.gz that study/entropy.py wrote. ValueError names the file."""
    text = path.read_bytes()
    try:
        text = gzip.decompress(text) if path.suffix == ".gz" else text
        lines = [parse_json(line, path) for line in text.decode().splitlines()]
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path}: is not JSON lines, or not gzip ({error})") from None
    columns(path, lines, ("name", "noise", "sigma", "samples", "problems_a_draw", "answers"))
    try:
        return [sampled_setting(line) for line in lines]
    except (TypeError, ValueError):
        raise ValueError(f"{path}: answers must be lists of 4 numbers, `samples` of them to each "
                         "problem") from None


def paired(differences: np.ndarray, scale: float, digits: int) -> str:
    """The mean of differences (problems,) and its 95 % interval over the problems."""
    half = (student_quantile(len(differences) - 1) * differences.std(ddof=1)
            / len(differences) ** 0.5)
    return f"{scale * differences.mean():+.{digits}f} +- {scale * half:.{digits}f}"


def by_draw(differences: np.ndarray, problems_a_draw: int) -> np.ndarray:
    """(problems,) -> (draws,) with the same mean, also where the last draw has fewer problems."""
    mean = differences.mean()
    sums = np.add.reduceat(differences - mean, range(0, len(differences), problems_a_draw))
    return mean + sums * len(sums) / len(differences)


def print_sampler(args):
    found = {}
    for path in args.files or [args.runs / "sampler.jsonl.gz"]:
        for one in read_sampled(path):
            if (one.name, one.noise) in found:
                raise ValueError(f"{path}: {one.name}, {one.noise} is there twice")
            found[one.name, one.noise] = one
    by_noise = {}                # ("0.5b-", "aqn 0.01") -> [(with noise, without), ...]: its bases
    print("| base | noise | entropy | accuracy, % | length | entropy - own | points - own "
          "| entropy - bf16 | points - bf16 |\n|---|---|---|---|---|---|---|---|---|")
    for one in found.values():
        size = "".join(one.name.rpartition("-")[:2])
        others = [found.get((name, "none")) for name in (one.name, f"{size}bf16")]
        for other, name in zip(others, (one.name, f"{size}bf16")):
            if other is None or len(other.length) != len(one.length):
                raise ValueError(f"{one.name}, {one.noise}: {name} without noise is not there with "
                                 f"as many problems ({len(one.length)})")
        cells = ["" if other is one else cell for other in others
                 for cell in (paired(one.entropy - other.entropy, 1, 4),
                              paired(one.accuracy - other.accuracy, 100, 2))]
        print(f"| {one.name} | {one.noise} | {one.entropy.mean():.4f} "
              f"| {100 * one.accuracy.mean():.2f} | {one.length.mean():.1f} "
              f"| {' | '.join(cells)} |")
        if one.noise != "none":
            by_noise.setdefault((size, one.noise), []).append((one, others[0]))
    print("\n| mean over | bases | noise | | difference from own | over draws |\n"
          "|---|---|---|---|---|---|")
    for (size, noise), pairs in by_noise.items():
        for figure, scale, digits, unit in (("entropy", 1, 4, "nats"),
                                            ("accuracy", 100, 2, "points")):
            differences = np.mean([getattr(one, figure) - getattr(own, figure)
                                   for one, own in pairs], axis=0)
            draws = by_draw(differences, pairs[0][0].problems_a_draw)
            over_draws = paired(draws, scale, digits) if len(draws) > 1 else "one draw"
            print(f"| {size}* | {len(pairs)} | {noise} | {unit} "
                  f"| {paired(differences, scale, digits)} | {over_draws} |")


# -----------------------------------------------------------------------------

def parse_args():
    parser = argparse.ArgumentParser(prog="study.results", description=__doc__.strip(),
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, function, summary):
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(function=function)
        sub.add_argument("--runs", type=Path, default=RUNS,
                         help=f"folder of the runs (default: {RUNS})")
        return sub

    sub = command("tables", print_tables,
                  "accuracy before and after training, and differences from the first arm")
    sub.add_argument("arms", nargs="+", metavar="ARM")
    sub.add_argument("--primary", metavar="ARM", help="the arm whose difference from the first was "
                     "named as the primary one before the runs")
    add_seeds(sub)
    command("spread", print_spread, "how much the accuracy of an arm varies from seed to seed")
    sub = command("mean", print_mean, "mean of one logged number over some steps and seeds")
    sub.add_argument("key", metavar="KEY", help="a key of docs/metrics.md")
    sub.add_argument("arms", nargs="+", metavar="ARM")
    add_steps(sub)
    sub = command("pairs", print_pairs,
                  "differences between runs of the same seed, with Student's t")
    sub.add_argument("key", metavar="KEY", help="a key of docs/metrics.md, or greedy or sampled: "
                     "test accuracy after training")
    sub.add_argument("pairs", nargs="+", metavar="ARM:OTHER",
                     help="the first minus the second, seed by seed")
    add_steps(sub)
    sub.add_argument("--last-common", type=int, metavar="N",
                     help="only the last N steps that both runs have")
    sub = command("keep", keep_run, "copies a run's metrics and a line of each answer into --runs")
    sub.add_argument("run", type=Path, metavar="FOLDER", help="folder of a run of train.py")
    sub.add_argument("name", metavar="ARM-sSEED", help="what it is called there")
    sub = command("verdicts", keep_verdicts, "adds the verdicts of evaluate.py --out to --runs")
    sub.add_argument("name", metavar="NAME", help="ARM-sSEED; before training ARM, or "
                     "ARM-sSEED-before of a run that made its own 4-bit model")
    sub.add_argument("files", nargs="+", type=Path, metavar="FILE",
                     help=f"greedy answers to the test problems, or {SAMPLES} to each")
    sub = command("sampler", print_sampler, "the sampler before training, by base and noise")
    sub.add_argument("files", nargs="*", type=Path, metavar="FILE",
                     help="written by study/entropy.py, plain or gzipped (default: "
                     "sampler.jsonl.gz in --runs)")
    return parser.parse_args()


def add_steps(sub):
    sub.add_argument("--first", type=int, default=0, help="first step (default: 0)")
    sub.add_argument("--last", type=int, default=10**9,
                     help="last step, included (default: the run's)")
    add_seeds(sub)


def add_seeds(sub):
    sub.add_argument("--seeds", nargs="+", metavar="SEED",
                     help="only the runs with these seeds (default: all)")


def main():
    args = parse_args()
    with env.one_line("study"):
        args.function(args)


if __name__ == "__main__":
    main()
