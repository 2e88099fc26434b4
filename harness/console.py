"""
What a run prints, and where else its numbers go.

    console = Console(settings)
    console.greet(problems, held_out, device)    # the first line: what is learned, from what, where
    phases = Phases()
    with phases("weights"): ...                  # a part of the preparation
    phases.tell()                                # how long each took
    with console:
        console.start_at(step)                   # a bar on a terminal, else a line a step
        console.tell(metrics, updates)           # after every step, before its evaluation
    console.farewell(folder)                     # the result, and what to do with it

    watch = Watch(settings)
    watch.see(metrics, updates)                  # after every step: it warns, or ends the run
    tracker = Tracker(name, folder, flags)       # --report-to
    tracker.log(metrics)

Not here: a reward that rises while the answers get worse. Only reading them shows that:
`python -m tools.report`.
"""
import importlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from files import Stopped, counted, first_line, read_log
from harness.config import Settings, flags_to_repeat
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

STEPS_BAR = "{n_fmt}/{total_fmt} |{bar}| {remaining} left, {rate_fmt}{postfix}"


class Phases:
    """Measures how long each part of the preparation takes."""

    def __init__(self):
        self.began = time.perf_counter()
        self.told = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.told.append(f"{name} {time.perf_counter() - began:.1f} s")

    def tell(self) -> None:
        """Prints one line with all phases."""
        say(f"ready after {time.perf_counter() - self.began:.1f} s: {', '.join(self.told)}")


class Console:
    """What a run prints, from rank 0 alone."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.steps = settings.general.steps
        self.bar = None                          # from start_at() on

    def greet(self, problems: list, held_out: list, device: torch.device) -> None:
        """The first line of a run: what is learned, from what, where."""
        model, rollout = self.settings.model, self.settings.rollout
        on = f"{WORLD} x {device.type}" if WORLD > 1 else device.type
        no_gpu = "" if torch.cuda.is_available() else " (torch sees no GPU)"
        weights = "all weights trained" if model.train == "full" else f"frozen {model.base} weights"
        say(f"{model.model}, with {weights}, learns {self.settings.data.data} "
            f"({counted(len(problems), 'problem')}, and {len(held_out):,} held out): "
            f"{counted(self.steps, 'step')} of {counted(rollout.prompts_per_step, 'problem')} x "
            f"{counted(rollout.group_size, 'answer')} on {on}{no_gpu}; writes "
            f"{self.settings.general.out}")

    def start_at(self, step: int) -> None:
        """Training begins or continues at this step; on a terminal it gets a bar."""
        self.bar = tqdm(total=self.steps, initial=step, unit="step", dynamic_ncols=True,
                        smoothing=0, bar_format=STEPS_BAR,
                        disable=RANK > 0 or not sys.stderr.isatty())
        if torch.cuda.is_initialized():          # farewell() prints the memory of training alone
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.close()

    def tell(self, metrics: dict, updates: list) -> None:
        """Prints a step: on the bar, or as a line where there is no terminal.

        metrics: the step's line of metrics.jsonl, before an evaluation adds to it; updates: what
        Learner.update() returned.
        """
        step, seconds = metrics["step"] + 1, metrics["seconds"]
        for update in updates:
            if update.failure:
                say(f"step {step}: {update.failure}: this update was skipped")
        # Without a --reward it is the accuracy.
        reward = f"reward {metrics['reward']:.3g}, " if self.settings.data.reward else ""
        # These may fill 80 columns: a number after them shows on wider terminals only.
        self.bar.set_postfix_str(f"{reward}right {metrics['accuracy']:.0%}, "
                                 f"{metrics['length']:.0f} tokens", refresh=False)
        self.bar.update()
        if self.bar.disable:
            left = (self.steps - step) * seconds
            say(f"step {step}/{self.steps}: {reward}accuracy {metrics['accuracy']:.3f}, "
                f"length {metrics['length']:.0f}, informative {metrics['informative']:.2f}, "
                f"{metrics['tokens_per_s']:,.0f} tokens/s, {seconds:.1f} s"
                f"{f', {duration(left)} to go' if left else ''}")

    def farewell(self, folder: Path) -> None:
        """Prints where the run is, what it changed, how long it took, and what to do next."""
        if RANK > 0:
            return
        metrics = [row for row, _ in read_log(folder / "metrics.jsonl")]
        key = "eval_reward" if self.settings.data.reward else "eval_accuracy"
        held_out = [f"{row[key]:.3f}" for row in metrics if row.get(key) is not None]
        change = " -> ".join([*held_out[:1], *held_out[1:][-1:]])        # of the first and the last
        changed = f"; held-out {key[5:]} {change}" if change else ""
        reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0
        peak = f"; at most {reserved / 2**30:.1f} GiB of GPU memory" if reserved else ""
        seconds = sum(row["seconds"] for row in metrics)
        say(f"{folder}: {counted(len(metrics), 'step')} in {duration(seconds)}{changed}{peak}")
        data = vars(self.settings.data)
        style = flags_to_repeat({"prompt_style": data["prompt_style"]})
        commands = [command("evaluate.py", folder, *flags_to_repeat(data)),
                    command("tools.report", folder), command("tools.chat", folder, *style)]
        if self.settings.model.train == "lora":
            commands.append(command("tools.convert", "merge", folder, f"{folder}-merged"))
        say("next: " + "\n      ".join(commands))


def command(program: str, *arguments: object) -> str:
    """A command line of this project, for a shell in its folder.

    program: a file such as "evaluate.py", or a module such as "tools.report".
    """
    start = ["python"] if program.endswith(".py") else ["python", "-m"]
    return shlex.join([*start, program, *map(str, arguments)])


def duration(seconds: float) -> str:
    """90 s, 12 min or 3 h 5 min."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


# -----------------------------------------------------------------------------
# --report-to

class Tracker:
    """Sends the metrics of each step from rank 0 to a service; with name None, nowhere.

    The first failure is printed and ends the tracking, not the training.
    """

    def __init__(self, name: str | None, folder: Path, flags: dict):
        self.name = name if RANK == 0 else None
        self.folder = folder
        self.flags = flags
        self.write: Callable | None = None       # function(numbers, step), once it is open

    def log(self, metrics: dict) -> None:
        if self.name is None:
            return
        try:
            # Opened with the first metrics, so a run that cannot begin leaves no empty run there.
            if self.write is None:               # wandb and trackio have the same functions
                service = importlib.import_module(self.name)
                service.init(project="qerl", name=self.folder.name, config=self.flags)
                self.write = service.log
            numbers = {k: v for k, v in metrics.items() if k != "step" and v is not None}
            self.write(numbers, step=metrics["step"])
        except Exception as error:               # of a network, a login, a service: anything
            say(f"--report-to {self.name} stops here: {first_line(error)}")
            self.name = None
