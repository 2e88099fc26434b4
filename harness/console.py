"""
What a run prints, from rank 0 alone.

    greet(settings, problems, held_out, device)  # the first line: what is learned, from what, where
    tell(settings, metrics, updates)             # after every step, before its evaluation
    farewell(settings)                           # the result

    watch = Watch(settings)
    watch.see(metrics, updates)                  # after every step: it warns, or ends the run

Not here: a reward that rises while the answers get worse. Only reading them shows that:
`python -m tools.report`.
"""
from pathlib import Path

import torch

from files import Stopped, counted, read_log
from harness.config import Settings
from ranks import RANK, WORLD, gather, say

# -----------------------------------------------------------------------------
# Is anything being learned?

PATIENCE = 20                                    # steps in a row that make a warning, or end a run


class Watch:
    """Ends a run whose updates are all skipped, and warns of one that finds nothing to learn.

    It counts from 0 in a resumed run.
    """
    # A run without a finite update in PATIENCE steps cannot recover: its adapter stays as it is.
    # Anything else may get better by itself, so it is only a warning.

    def __init__(self, settings: Settings):
        self.settings = settings
        self.skipped = 0                         # steps in a row whose updates were all skipped
        self.idle = 0                            # steps in a row without a group that teaches

    def see(self, metrics: dict, updates: list) -> None:
        """Stopped after PATIENCE steps whose updates were all skipped.

        metrics: the step's line of metrics.jsonl; updates: what Learner.update() returned in it.
        """
        self.skipped = self.skipped + 1 if all(update.failure for update in updates) else 0
        self.idle = self.idle + 1 if metrics["groups"] == 0 else 0
        if self.skipped == PATIENCE:
            gather([])                           # when one rank ends, torchrun ends all
            raise Stopped(f"for {PATIENCE} steps every update was skipped ({updates[-1].failure}): "
                          f"--lr {self.settings.optim.lr} may be too high, or a --reward too large",
                          "")
        if self.idle and self.idle % PATIENCE == 0:
            say(f"for {self.idle} steps no group had a learning signal: all answers to a problem "
                f"had the same reward ({metrics['accuracy']:.0%} were right) or were left out "
                f"({metrics['truncated']:.0%} were cut at --max-new-tokens); --data may be too "
                "easy or too hard for this model")


# -----------------------------------------------------------------------------
# What a run prints

def greet(settings: Settings, problems: list, held_out: list, device: torch.device) -> None:
    """The first line of a run: what is learned, from what, where."""
    model, rollout = settings.model, settings.rollout
    on = f"{WORLD} x {device.type}" if WORLD > 1 else device.type
    no_gpu = "" if torch.cuda.is_available() else " (torch sees no GPU)"
    weights = "all weights trained" if model.train == "full" else f"frozen {model.base} weights"
    say(f"{model.model}, with {weights}, learns {settings.data.data} "
        f"({counted(len(problems), 'problem')}, and {len(held_out):,} held out): "
        f"{counted(settings.general.steps, 'step')} of "
        f"{counted(rollout.prompts_per_step, 'problem')} x "
        f"{counted(rollout.group_size, 'answer')} on {on}{no_gpu}; writes {settings.general.out}")


def tell(settings: Settings, metrics: dict, updates: list) -> None:
    """Prints a step.

    metrics: the step's line of metrics.jsonl, before an evaluation adds to it; updates: what
    Learner.update() returned.
    """
    step, steps, seconds = metrics["step"] + 1, settings.general.steps, metrics["seconds"]
    for update in updates:
        if update.failure:
            say(f"step {step}: {update.failure}: this update was skipped")
    # Without a --reward it is the accuracy.
    reward = f"reward {metrics['reward']:.3g}, " if settings.data.reward else ""
    left = f", {duration((steps - step) * seconds)} to go" if step < steps else ""
    say(f"step {step}/{steps}: {reward}accuracy {metrics['accuracy']:.3f}, "
        f"length {metrics['length']:.0f}, informative {metrics['informative']:.2f}, "
        f"{metrics['tokens_per_s']:,.0f} tokens/s, {seconds:.1f} s{left}")


def farewell(settings: Settings) -> None:
    """Prints where the run is, what it changed, how long it took, and how to read it."""
    if RANK > 0:
        return
    folder = Path(settings.general.out)
    metrics = [row for row, _ in read_log(folder / "metrics.jsonl")]
    key = "eval_reward" if settings.data.reward else "eval_accuracy"
    held_out = [f"{row[key]:.3f}" for row in metrics if row.get(key) is not None]
    change = " -> ".join([*held_out[:1], *held_out[1:][-1:]])        # of the first and the last
    changed = f"; held-out {key[5:]} {change}" if change else ""
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0
    peak = f"; at most {reserved / 2**30:.1f} GiB of GPU memory" if reserved else ""
    seconds = sum(row["seconds"] for row in metrics)
    say(f"{folder}: {counted(len(metrics), 'step')} in {duration(seconds)}{changed}{peak}")
    say(f"next: python evaluate.py {folder}; python -m tools.report {folder}")


def duration(seconds: float) -> str:
    """90 s, 12 min or 3 h 5 min."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
