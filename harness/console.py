"""
What a run tells who watches it; and is it still alive? What has nothing to learn from is ended.

    greet(run)                                   # what begins
    tell(run, metrics, rows)                     # of every step; `metrics` as in metrics.jsonl
    watch = Watch(args)
    better = watch.see(metrics)                  # of every step
    watch.verdict                                # "" while it lives
    farewell(run)                                # what came of it

A step is sick where it shows one of the symptoms below and is not simply all right (accuracy of
0.95 and more). Ten sick steps in a row, of 200 groups at least, are a death: where one group in
twenty teaches something, 200 that do not come by chance 0.95^200 = 3e-5 of the time. A resumed run
is watched anew.

Not here: a reward that rises while answers get worse; curves for that are in tools/plot.py.
"""
import math
from collections import deque

import torch

from harness.figures import confidence_interval
from harness.files import read_log
from harness.ranks import RANK, WORLD, say

ALL_RIGHT = 0.95

# -----------------------------------------------------------------------------
# Is it alive?

def symptom(metrics, args, best):
    """-> what is wrong with a step and which flag it likely is, or "". best: as Watch.best."""
    lr = f"--lr {args.lr} may be too high"
    if args.overlong_buffer:
        lr += f", or --overlong-buffer {args.overlong_buffer} too much"
    if metrics["accuracy"] >= ALL_RIGHT:
        return ""
    if metrics["truncated"] == 1 and args.overlong == "mask":
        return (f"every answer was cut and masked: --max-new-tokens {args.max_new_tokens} is too "
                "few, or take --overlong keep")
    if metrics["length"] < 1.5:
        return f"answers had one token: {lr}"
    if metrics.get("entropy", 1.0) < 1e-3:
        return f"the entropy was zero: {lr}"
    if metrics["accuracy"] == 0 and best > 0 and not args.reward:
        return f"no answer was right, where {best:.0%} had been: {lr}"
    if metrics["groups"] == 0 and args.reward:
        return f"--reward {args.reward} gave all answers to a problem the same, or {lr}"
    if metrics["groups"] == 0 and best > 0:
        return f"no group of answers had anything to teach: {lr}"
    if metrics["groups"] == 0:
        return (f"no answer was right so far: --data {args.data} is too hard for this model, or "
                f"--max-new-tokens {args.max_new_tokens} too few "
                f"({metrics['truncated']:.0%} were cut)")
    return ""


class Watch:
    """best: mean accuracy (mean reward, of a --reward) of the best `patience` steps in a row."""

    def __init__(self, args):
        self.args = args
        self.patience = max(10, math.ceil(200 / args.prompts_per_step))
        self.key = "reward" if args.reward else "accuracy"
        self.recent = deque(maxlen=self.patience)
        self.best = 0.0
        self.sick = 0                            # steps in a row
        self.verdict = ""

    def see(self, metrics):
        """-> whether the last steps were the best so far, or are too few to tell."""
        said = symptom(metrics, self.args, self.best)
        self.sick = self.sick + 1 if said else 0
        if self.sick == self.patience:
            self.verdict = f"for {self.sick} steps {said}"
        few = len(self.recent) < self.patience
        self.recent.append(metrics[self.key])
        mean = sum(self.recent) / len(self.recent)
        better = few or mean > self.best
        if better:
            self.best = mean
        return better


# -----------------------------------------------------------------------------
# What it says

def greet(run):
    args = run.args
    device = run.model.device
    why = "" if device.type == "cuda" or torch.cuda.is_available() else ", torch sees no GPU"
    say(f"{args.steps} steps of {args.prompts_per_step} problems x {args.group_size} answers: "
        f"{args.model} as {args.base} learns {args.data} ({len(run.problems):,} problems, "
        f"{len(run.held_out):,} held out) on {WORLD} x {device}{why}; "
        f"{run.learner.adapter.master.numel():,} trained parameters; writes {args.out}")


def tell(run, metrics, rows):
    """A step on the bar, or as a line where there is no terminal."""
    args = run.args
    bar = run.bar
    step = metrics["step"] + 1
    figures = {key: f"{metrics[key]:.3g}"
               for key in ("reward", "accuracy", "length", "tokens_per_s")}
    if metrics["step"] == bar.initial:
        left = (args.steps - step) * metrics["seconds"]
        say(f"a step takes {metrics['seconds']:.1f} s: {duration(left)} to go, without evaluations")
    bar.set_postfix(figures)
    bar.update()
    if bar.disable:
        said = ", ".join(f"{key} {value}" for key, value in figures.items())
        say(f"step {step}/{args.steps}: {said}, {metrics['seconds']:.1f} s")
    if args.show and step % args.show == 0:
        row = rows[0]
        said = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1]
                       for c in f"{row['question']}\n-> {row['completion']}")
        say(f"step {step}, {row['id']}, reward {row['reward']:.3g}:\n{said}")


def duration(seconds):
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def farewell(run):
    """Where the run is, what it changed, how long it took, what can be done with it."""
    if RANK > 0:
        return
    metrics = [row for row, _ in read_log(run.folder.path / "metrics.jsonl")]
    seconds = sum(m.get("seconds", 0.0) for m in metrics)
    n = len(run.held_out)
    texts = []
    for accuracy in [m["eval_accuracy"] for m in metrics if "eval_accuracy" in m]:
        right = round(accuracy * n)
        mean, low, high = confidence_interval([1.0] * right + [0.0] * (n - right))
        texts.append(f"{mean:.1%} [{low:.1%}, {high:.1%}]")
    before = f"{texts[0]} before" if texts else "lost"
    after = f", {texts[-1]} after" if texts[1:] else ""
    say(f"{run.folder.path}: {len(metrics)} steps in {duration(seconds)}; held-out accuracy "
        f"{before}{after}, on {n} problems")
    say(f"next: python evaluate.py {run.folder.path}\n"
        f"      python -m tools.report {run.folder.path}\n"
        f"      python -m tools.convert merge {run.folder.path} OUT")
