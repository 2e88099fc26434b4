"""
What a run prints, on rank 0 only.

    greet(settings, problems, held_out, device)  # the first line: model, data, sizes, device
    tell(settings, metrics, updates)             # after every step, before its evaluation
    farewell(settings, evaluable)                # the result

    watch = Watch(settings)
    watch.see(metrics, updates)                  # after every step: warns, or ends the run

None of this detects reward hacking. For that, read the answers: `python -m tools.report`.
"""
import math
from pathlib import Path

import torch

from files import Stopped, counted, read_log
from harness.config import Settings
from ranks import RANK, WORLD, gather, say

# -----------------------------------------------------------------------------
# Is anything being learned?

PATIENCE = 20                                    # bad steps in a row before it warns or stops
# It warns if sampler and learner differ by more nats than this (mean of abs). bf16: up to 0.01.
DRIFT = 0.05


class Watch:
    """Ends a run whose updates are all skipped. Warns if there is nothing to learn, or if sampler
    and learner compute different models.

    A resumed run counts from 0 again.
    """
    # A run without a finite update in PATIENCE steps can't recover, because its adapter never
    # changes. Anything else may pass, so it only warns.

    def __init__(self, settings: Settings):
        self.settings = settings
        self.skipped = 0                         # steps in a row whose updates were all skipped
        self.idle = 0                            # steps in a row with `groups` at 0
        self.warned = False                      # about drift

    def see(self, metrics: dict, updates: list) -> None:
        """Raises Stopped after PATIENCE steps whose updates were all skipped, not counting steps
        without a row to train on.

        metrics: the step's line of metrics.jsonl; updates: what Learner.update() returned.
        """
        trained = [update for update in updates if update.sums]
        if trained:                              # a step without a row to train on says nothing
            self.skipped = self.skipped + 1 if all(one.failure for one in trained) else 0
        self.idle = self.idle + 1 if metrics["groups"] == 0 else 0
        if trained and self.skipped == PATIENCE:
            gather([])                           # when one rank ends, torchrun ends all
            raise Stopped(f"every update in {PATIENCE} steps was skipped ({trained[-1].failure}): "
                          f"--lr {self.settings.lr} may be too high, or the --reward too "
                          "large", "")
        if self.idle and self.idle % PATIENCE == 0:
            why = (f"in each group, all answers got the same reward ({metrics['accuracy']:.0%} "
                   f"right) or were left out ({metrics['truncated']:.0%} cut off at "
                   "--max-new-tokens); --data may be too easy or too hard for this model")
            if math.isnan(metrics["reward"]):
                why = f"--reward {self.settings.reward} was NaN for every answer"
            say(f"nothing to learn for {self.idle} steps: {why}")
        drift = metrics.get("rollout_logp_diff", 0.0)
        if drift > DRIFT and not metrics["sigma"] and not self.warned:
            self.warned = True
            say(f"sampler and learner disagree by {drift:.3f} nats per token without noise, more "
                "than rounding explains: if you changed the model, update fast/decode.py too")


# -----------------------------------------------------------------------------
# What a run prints

HERE = Path.cwd()                                # before a --reward may change it


def shown(path: str) -> str:
    """An absolute path as a user would type it: relative, if it is in the working directory."""
    return str(Path(path).relative_to(HERE)) if Path(path).is_relative_to(HERE) else path


def greet(settings: Settings, problems: list, held_out: list, device: torch.device) -> None:
    """The first line of a run: model, data, sizes, device, folder."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    frozen = f"frozen {settings.base} weights"
    weights = "all weights trained" if settings.train == "full" else frozen
    say(f"training {settings.model} ({weights}) on {settings.data} "
        f"({counted(len(problems), 'problem')}, {len(held_out):,} held out): "
        f"{counted(settings.steps, 'step')} of "
        f"{counted(settings.prompts_per_step, 'problem')} x "
        f"{counted(settings.group_size, 'answer')} on {WORLD} x {where}, to {shown(settings.out)}")


def tell(settings: Settings, metrics: dict, updates: list) -> None:
    """Prints a step.

    metrics: the step's line of metrics.jsonl, before an evaluation adds to it; updates: what
    Learner.update() returned.
    """
    step, steps, seconds = metrics["step"] + 1, settings.steps, metrics["seconds"]
    for update in updates:
        if update.failure:
            say(f"step {step}: update skipped ({update.failure})")
    # Without --reward, it is the accuracy.
    reward = f"reward {metrics['reward']:.3g}, " if settings.reward else ""
    left = f", {duration((steps - step) * seconds)} to go" if step < steps else ""
    say(f"step {step}/{steps}: {reward}accuracy {metrics['accuracy']:.3f}, "
        f"length {metrics['length']:.0f}, informative {metrics['informative']:.2f}, "
        f"{metrics['tokens_per_s']:,.0f} tokens/s, {seconds:.1f} s{left}")


def farewell(settings: Settings, evaluable: bool) -> None:
    """Prints where the run is, how accuracy changed, how long it took, and what to run next.

    evaluable: whether evaluate.py samples and grades as the run did.
    """
    if RANK > 0:
        return
    folder = shown(settings.out)
    metrics = [row for row, _ in read_log(Path(settings.out) / "metrics.jsonl")]
    key = "eval_reward" if settings.reward else "eval_accuracy"
    before, after = ([row[name] for row in metrics if row.get(name) is not None]
                     for name in (f"{key}_before", key))
    change = " -> ".join(f"{value:.3f}" for value in before + after[-1:])
    changed = f"; held-out {key[5:]} {change}" if change else ""
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0
    peak = f"; peak GPU memory {reserved / 2**30:.1f} GiB" if reserved else ""
    seconds = sum(row["seconds"] for row in metrics)
    say(f"{folder}: {counted(len(metrics), 'step')} in {duration(seconds)}{changed}{peak}")
    evaluation = f"python evaluate.py {folder}; " if evaluable else ""
    say(f"next: {evaluation}python -m tools.report {folder}")


def duration(seconds: float) -> str:
    """80 s, 12 min or 3 h 5 min."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
