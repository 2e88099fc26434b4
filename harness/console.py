"""
Console output of a run, and early stopping when nothing is being learned.

    console = Console(settings)
    console.greet(problems, held_out, device)    # the first line: what is learnt, from what, where
    with console:
        console.start_at(step)                   # a bar on a terminal, else a line a step
        console.tell(metrics, rows, updates)     # after every step; `metrics` as in metrics.jsonl
    console.farewell(folder, len(held_out))      # what came of it, and what can be done with it

    watch = Watch(settings)
    better = watch.see(metrics)                  # after every step
    watch.verdict                                # "", or why training should stop

When does training stop by itself? A step counts as sick if it shows one of the symptoms below.
After ten sick steps in a row, and at least 200 groups of answers, the run is given up. The 200 are
there against bad luck: if one group in twenty could still teach something, 200 groups in a row
without one would come by chance 0.95^200 = 3e-5 of the time. A resumed run is watched anew.

Not here: a reward that rises while the answers get worse. Nothing but reading them shows that:
`python -m tools.report`.
"""
import math
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from harness.config import Settings
from harness.figures import confidence_interval
from harness.files import read_log
from harness.ranks import RANK, WORLD, say

# -----------------------------------------------------------------------------
# Is anything being learned?

def symptom(metrics: dict, settings: Settings, best: float) -> str:
    """-> what is wrong with a step and which flag is the likely cause, or "".

    best: the best mean accuracy (of a --reward: mean reward) so far, as Watch.best.
    """
    too_high = f"--lr {settings.optim.lr} may be too high"
    most = settings.rollout.max_new_tokens
    if metrics["truncated"] == 1 and settings.objective.overlong == "mask":
        return (f"every answer was cut and left out of the loss: --max-new-tokens {most} may be "
                "too few, or take --overlong keep")
    if metrics["length"] < 1.5:
        return f"answers had one token: {too_high}"
    if metrics["accuracy"] == 0 and best > 0 and not settings.data.reward:
        return f"no answer was right, where {best:.0%} had been: {too_high}"
    if metrics["groups"] == 0 and settings.data.reward and metrics["accuracy"] < ALL_RIGHT:
        return (f"--reward {settings.data.reward} gave all answers to a problem the same, or "
                f"{too_high}")
    if metrics["groups"] == 0 and best == 0:
        return (f"no answer was right so far: --data {settings.data.data} may be too hard for "
                f"this model, or --max-new-tokens {most} too few ({metrics['truncated']:.0%} of "
                "the answers were cut)")
    return ""


ALL_RIGHT = 0.95                                 # accuracy from which equal rewards are no symptom


class Watch:
    """Looks at every step's metrics and says when training should stop.

    best: mean accuracy (of a --reward: mean reward) of the best `patience` steps in a row.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.patience = max(10, math.ceil(200 / settings.rollout.prompts_per_step))
        self.key = "reward" if settings.data.reward else "accuracy"
        self.recent = deque(maxlen=self.patience)
        self.best = 0.0
        self.sick = 0                            # sick steps in a row
        self.verdict = ""

    def see(self, metrics: dict) -> bool:
        """-> whether the last steps were the best so far, or are too few to tell."""
        found = symptom(metrics, self.settings, self.best)
        self.sick = self.sick + 1 if found else 0
        if self.sick == self.patience:
            self.verdict = f"for {self.sick} steps {found}"
        too_few = len(self.recent) < self.patience
        self.recent.append(metrics[self.key])
        mean = sum(self.recent) / len(self.recent)
        better = too_few or mean > self.best
        if better:
            self.best = mean
        return better


# -----------------------------------------------------------------------------
# What a run says

SHOWN = "reward", "accuracy", "length", "tokens_per_s"
# On a terminal of 80 columns there is space for all but the speed, which metrics.jsonl holds.
STEPS_BAR = "{n_fmt}/{total_fmt} |{bar}| {remaining} left, {rate_fmt}{postfix}"
FIRST_STEPS = 10                                 # after which the time that is left is told anew
SOURCE = Path(__file__).parent.parent            # where train.py lies


class Console:
    """What a run tells the person who started it. Rank 0 alone speaks."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.steps = settings.general.steps
        self.first = 0                           # the step that this process begins with
        self.bar = None                          # from start_at() on
        self.seconds = []                        # of the first steps of this process

    def greet(self, problems: list, held_out: list, device: torch.device) -> None:
        """The first line of a run: what is learnt, from what, where."""
        model, rollout = self.settings.model, self.settings.rollout
        no_gpu = device.type != "cuda" and not torch.cuda.is_available()
        say(f"{model.model}, with frozen {model.base} weights, learns {self.settings.data.data} "
            f"({len(problems):,} problems, {len(held_out):,} held out): {self.steps} steps of "
            f"{rollout.prompts_per_step} problems x {rollout.group_size} answers on {WORLD} x "
            f"{device}{' (torch sees no GPU)' if no_gpu else ''}; writes "
            f"{self.settings.general.out}")

    def start_at(self, step: int) -> None:
        """Training begins or goes on at this step: with a bar, if there is a terminal."""
        no_bar = RANK > 0 or not sys.stderr.isatty()
        self.first = step
        self.bar = tqdm(total=self.steps, initial=step, unit="step", dynamic_ncols=True,
                        smoothing=0, disable=no_bar, bar_format=STEPS_BAR)

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.close()

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """The bar's steps per second leave out the time spent within."""
        began = time.time()
        yield
        if not self.bar.disable:
            self.bar.start_t += time.time() - began

    def tell(self, metrics: dict, rows: list, updates: list) -> None:
        """One step: on the bar, or as a line where there is no terminal."""
        step = metrics["step"] + 1
        for update in updates:
            if update.failure:
                say(f"step {metrics['step']}: {update.failure}: this update was skipped")
        figures = {key: f"{metrics[key]:.3g}" for key in SHOWN}
        self.tell_time_left(step, metrics["seconds"])
        told = f"reward {metrics['reward']:.3g}, right {metrics['accuracy']:.0%}"
        self.bar.set_postfix_str(f"{told}, {metrics['length']:.0f} tokens", refresh=False)
        self.bar.update()
        if self.bar.disable:
            told = ", ".join(f"{key} {value}" for key, value in figures.items())
            say(f"step {step}/{self.steps}: {told}, {metrics['seconds']:.1f} s")
        if self.settings.watching.show and step % self.settings.watching.show == 0:
            row = rows[0]
            # What a model writes may hold a terminal's control codes: they are shown, not obeyed.
            text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1]
                           for c in f"{row['question']}\n-> {row['completion']}")
            say(f"step {step}, {row['id']}, reward {row['reward']:.3g}:\n{text}")

    def tell_time_left(self, step: int, seconds: float) -> None:
        """Says after this process's first step how long the rest will take, and corrects it later.

        The first step is slower than others: kernels are compiled and memory is taken. So after
        ten steps the estimate is made anew from the nine others, on the bar too.
        """
        if len(self.seconds) >= FIRST_STEPS:
            return
        self.seconds.append(seconds)
        first, *others = self.seconds
        if not others:
            say(f"a step takes {first:.1f} s: {duration((self.steps - step) * first)} to go, "
                "without evaluations")
        elif len(self.seconds) == FIRST_STEPS:
            mean = sum(others) / len(others)
            if step < self.steps:
                say(f"after {FIRST_STEPS} steps: a step takes {mean:.1f} s, not {first:.1f} s as "
                    f"the first did: {duration((self.steps - step) * mean)} to go, without "
                    "evaluations")
            if not self.bar.disable:
                self.bar.start_t += max(0.0, first - mean)

    def farewell(self, folder: Path, held_out: int) -> None:
        """Where the run is, what it changed, how long it took, what can be done with it.

        held_out: the number of held-out problems.
        """
        if RANK > 0:
            return
        metrics = [row for row, _ in read_log(folder / "metrics.jsonl")]
        seconds = sum(row.get("seconds", 0.0) for row in metrics)
        texts = []
        for accuracy in [row["eval_accuracy"] for row in metrics if "eval_accuracy" in row]:
            right = round(accuracy * held_out)
            mean, low, high = confidence_interval([1.0] * right + [0.0] * (held_out - right))
            texts.append(f"{mean:.1%} [{low:.1%}, {high:.1%}]")
        before = f"{texts[0]} before" if texts else "lost"
        after = f", {texts[-1]} after" if texts[1:] else ""
        say(f"{folder}: {len(metrics)} steps in {duration(seconds)}; held-out accuracy "
            f"{before}{after}, on {held_out} problems")
        commands = (command("evaluate.py", folder), command("tools.report", folder),
                    command("tools.chat", folder),
                    command("tools.convert", "merge", folder, f"{folder}-merged"))
        say("next: " + "\n      ".join(commands))


def command(program: str, *arguments: object) -> str:
    """A command line of this project that can be pasted into the shell that the user is in.

    program: "evaluate.py", or "tools.report" of a module. Where the user stands in another folder
    than the source's the command names that folder.
    """
    there = Path.cwd() == SOURCE
    name = Path(sys.executable).name
    words = [name if shutil.which(name) == sys.executable else sys.executable]
    if program.endswith(".py"):
        words.append(program if there else str(SOURCE / program))
        before = ""
    else:
        words += ["-m", program]
        before = "" if there else f"PYTHONPATH={shlex.quote(str(SOURCE))} "
    return before + shlex.join([*words, *map(str, arguments)])


def duration(seconds: float) -> str:
    """90 s, 12 min or 3 h 5 min."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
