"""
Is a run still alive? Read off its metrics: what has nothing to learn from any more is ended.

    watch = Watch(args)
    better = watch.see(metrics)                  # of every step; `metrics` as in metrics.jsonl
    watch.verdict                                # "" while it lives

A step is sick where it shows one of the symptoms below and is not simply all right (accuracy of
0.95 and more). Ten sick steps in a row, of 200 groups at least, are a death: where one group in
twenty teaches something, 200 that do not come by chance 0.95^200 = 3e-5 of the time. A resumed run
is watched anew.

Not here: a reward that rises while answers get worse; curves for that are in tools/plot.py.
"""
import math
from collections import deque

ALL_RIGHT = 0.95


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
