"""
Console output of a run, warnings, and early stopping when nothing can be learned any more.

    console = Console(settings)
    console.greet(problems, held_out, device)    # the first line: what is learnt, from what, where
    phases = Phases()
    with phases("weights"): ...                  # a part of what comes before the first step
    phases.tell()                                # how long each took, and how much memory
    with console:
        console.start_at(step)                   # a bar on a terminal, else a line a step
        console.tell(metrics, rows, updates)     # after every step, before its evaluation
    console.farewell(folder, len(held_out))      # what came of it, and what can be done with it

    watch = Watch(settings)
    better = watch.see(metrics)                  # after every step; it may print a warning
    watch.verdict                                # "", or why training should stop

When does training stop by itself? Only where going on cannot help. cannot_learn() lists these
cases: updates are not finite, all answers are cut off and left out of the loss, answers have one
token, or no answer is right although one in ten was right before. The run ends after ten such steps
in a row, or more if ten have fewer than 200 groups of answers. The 200 guard against chance: if one
group in ten still had a right answer, 200 groups in a row without one would have a probability of
0.9^200 = 7e-10.

Other signs may mean trouble, or only that the run is done or slow. may_not_learn() lists them; they
give a warning, and the run goes on. A resumed run is watched from the beginning. `--watch off`
turns both off.

Not here: a reward that rises while the answers get worse. Only reading the answers shows that:
`python -m tools.report`.
"""
import importlib
import math
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from files import counted, first_line, read_log
from harness.config import Settings
from ranks import RANK, WORLD, say
from tasks.figures import confidence_interval

# -----------------------------------------------------------------------------
# Is anything being learned?

GOOD_LEVEL = 0.1                                 # a fall from this accuracy to 0 is a collapse
ALL_RIGHT = 0.95                                 # accuracy from which a data set is learnt
NO_CHOICE = 0.01                                 # entropy in nats a token: the model never doubts


def cannot_learn(metrics: dict, settings: Settings, level: float, skipping: bool) -> str:
    """-> why nothing can be learned from a step like this one, now or later, and which flag is the
    likely cause; or "".

    level: the best mean accuracy so far, as Watch.level. skipping: an update of the step was left
    out because it was not finite, and a smaller loss scale would not help.
    """
    too_high = f"--lr {settings.optim.lr} may be too high"
    most = settings.rollout.max_new_tokens
    if skipping:
        causes = [too_high]
        if settings.data.reward:
            causes.append(f"the values of --reward {settings.data.reward} too large")
        if settings.model.dtype == "float16":
            causes.append("the range of --dtype float16 too small")
        return ("a loss or gradient was not finite and its update was skipped: "
                + ", or ".join(causes))
    if math.isnan(metrics["reward"]):
        return f"--reward {settings.data.reward} gave every answer nan"
    if metrics["truncated"] == 1 and settings.objective.overlong == "mask":
        return (f"every answer was cut and left out of the loss: --max-new-tokens {most} may be "
                "too few, or take --overlong keep")
    if metrics["length"] < 1.5 and most > 1:
        return f"answers had one token: {too_high}"
    if metrics["accuracy"] == 0 and level >= GOOD_LEVEL and not settings.data.reward:
        return f"no answer was right, where {level:.0%} had been: {too_high}"
    return ""


def may_not_learn(metrics: dict, settings: Settings, level: float) -> str:
    """-> what a person should look at in a step like this one, or "".

    level: as in cannot_learn().
    """
    data, accuracy = settings.data, metrics["accuracy"]
    if metrics["groups"] == 0:
        if data.reward:
            return (f"--reward {data.reward} gave all answers to a problem the same, "
                    f"{metrics['reward']:.3g} on average")
        if accuracy >= ALL_RIGHT:
            return (f"{accuracy:.0%} of the answers were right and no group of them taught "
                    f"anything: --data {data.data} may have nothing left to teach")
        if accuracy == 0 and level == 0:
            return (f"no answer was right so far: --data {data.data} may be too hard for this "
                    f"model, or --max-new-tokens {settings.rollout.max_new_tokens} too few "
                    f"({metrics['truncated']:.0%} of the answers were cut)")
        return ("the answers to a problem were all right or all wrong, which teaches nothing "
                f"({accuracy:.0%} were right): a larger --group-size or other --data may help")
    # (A model that has learned to be right has no choice either.)
    if metrics.get("entropy", math.inf) < NO_CHOICE and metrics["accuracy"] < ALL_RIGHT:
        return (f"the model hardly had a choice, its entropy was {metrics['entropy']:.2g} nats a "
                f"token: --temperature {settings.rollout.temperature} may be too low or --lr "
                f"{settings.optim.lr} too high")
    return ""


POWERS_OF_TWO = {2**n for n in range(32)}        # a warning after 1, 2, 4, ... x `patience` steps


class Watch:
    """Looks at every step's metrics, warns, and says when training should stop.

    patience: how many steps in a row make a verdict or a warning.
    best: mean accuracy (with --reward: mean reward) of the best `patience` steps in a row.
    level: the best mean accuracy of up to `patience` steps in a row, and at least half as many. A
    collapse is measured against it. Half is enough so that an early collapse is noticed too.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.patience = max(10, math.ceil(200 / settings.rollout.prompts_per_step))
        self.key = "reward" if settings.data.reward else "accuracy"
        self.recent = deque(maxlen=self.patience)
        self.accuracies = deque(maxlen=self.patience)
        self.best = 0.0
        self.level = 0.0
        self.lost = 0                            # steps in a row that cannot_learn() names
        self.doubtful = 0                        # steps in a row that may_not_learn() names
        self.counters = None                     # of the step before: skipped updates, loss scale
        self.verdict = ""

    def see(self, metrics: dict) -> bool:
        """-> whether the last steps were the best so far, or are too few to tell."""
        if self.settings.watching.watch == "on":
            self._judge(metrics)
        self.accuracies.append(metrics["accuracy"])
        if len(self.accuracies) >= self.patience / 2:
            self.level = max(self.level, sum(self.accuracies) / len(self.accuracies))
        if math.isnan(metrics[self.key]):        # no answer could be scored
            return False
        too_few = len(self.recent) < self.patience
        self.recent.append(metrics[self.key])
        mean = sum(self.recent) / len(self.recent)
        better = too_few or mean > self.best
        if better:
            self.best = mean
        return better

    def _judge(self, metrics: dict) -> None:
        """Gives the verdict or a warning, once this step's symptom has lasted long enough."""
        counters = metrics.get("skipped", 0), metrics.get("loss_scale")
        before, self.counters = self.counters or counters, counters
        # While float16's loss scale is being halved, skipped updates are normal: they are how the
        # right scale is found.
        skipping = counters[0] > before[0] and counters[1] == before[1]
        found = cannot_learn(metrics, self.settings, self.level, skipping)
        self.lost = self.lost + 1 if found else 0
        if self.lost == self.patience:
            self.verdict = f"for {self.lost} steps {found}"
        doubt = "" if found else may_not_learn(metrics, self.settings, self.level)
        self.doubtful = self.doubtful + 1 if doubt else 0
        times, rest = divmod(self.doubtful, self.patience)
        if times in POWERS_OF_TWO and rest == 0:
            say(f"for {self.doubtful} steps {doubt} (training goes on; --watch off says no more)")


# -----------------------------------------------------------------------------
# What a run says

# A step's numbers: key of metrics.jsonl, text on a terminal's bar, text in a line where there is no
# terminal; "" leaves a number out. The bar's three numbers can fill 80 columns: a number that is
# added after them shows only on wider terminals.
SHOWN = (
    ("reward", "reward {:.3g}", "reward {:.3g}"),     # unless it is the accuracy
    ("accuracy", "right {:.0%}", "accuracy {:.3f}"),
    ("length", "{:.0f} tokens", "length {:.0f}"),
    ("informative", "", "informative {:.2f}"),
    ("tokens_per_s", "", "{:,.0f} tokens/s"),
)
STEPS_BAR = "{n_fmt}/{total_fmt} |{bar}| {remaining} left, {rate_fmt}{postfix}"
TIMED_STEPS = 10                                 # after as many the time that is left is told anew
SOURCE = Path(__file__).parent.parent            # where train.py lies


class Phases:
    """Measures each part of the preparation before a run's first step: its time, and the most GPU
    memory that torch reserved in it. This shows in which part a model would not fit on a card.
    """

    def __init__(self):
        self.began = time.perf_counter()
        self.told = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        forget_gpu_peak()
        yield
        seconds = time.perf_counter() - began
        if seconds >= 0.05:                      # shorter: a download of what is there, say
            self.told.append(f"{name} {whole_seconds(seconds)}{gpu_peak(' (%.1f GiB)')}")

    def tell(self) -> None:
        """One line of all phases."""
        say(f"ready after {whole_seconds(time.perf_counter() - self.began)}: "
            + ", ".join(self.told))


class Console:
    """What a run tells the person who started it. Rank 0 alone speaks."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.steps = settings.general.steps
        self.first = 0                           # the step that this process begins with
        self.bar = None                          # from start_at() on
        objective = settings.objective
        self.reward_is_accuracy = not (settings.data.reward or objective.format_weight
                                       or objective.overlong_buffer)
        self.told_seconds = None                 # a step's time, as it was told last
        self.first_seconds = None                # that of the first step of this process
        self.recent = deque(maxlen=TIMED_STEPS)  # of the last steps, without the first

    def greet(self, problems: list, held_out: list, device: torch.device) -> None:
        """The first line of a run: what is learnt, from what, where."""
        model, rollout = self.settings.model, self.settings.rollout
        no_gpu = device.type != "cuda" and not torch.cuda.is_available()
        on = (counted(WORLD, "GPU") if device.type == "cuda" else
              "the CPU" if WORLD == 1 else f"{WORLD} processes of the CPU")
        say(f"{model.model}, with frozen {model.base} weights, learns {self.settings.data.data} "
            f"({len(problems):,} problems, and {len(held_out):,} held-out ones): "
            f"{counted(self.steps, 'step')} of {counted(rollout.prompts_per_step, 'problem')} x "
            f"{counted(rollout.group_size, 'answer')} on {on}"
            f"{' (torch sees no GPU)' if no_gpu else ''}; writes {self.settings.general.out}")

    def start_at(self, step: int) -> None:
        """Training begins or goes on at this step: with a bar, if there is a terminal."""
        no_bar = RANK > 0 or not sys.stderr.isatty()
        self.first = step
        forget_gpu_peak()
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
        """One step: on the bar, or as a line where there is no terminal.

        metrics, rows: the step's part of metrics.jsonl and of samples.jsonl, without what an
        evaluation after the step adds. updates: what Learner.update() returned.
        """
        step = metrics["step"] + 1
        for update in updates:
            if update.failure:
                say(f"step {step}: {update.failure}: this update was skipped")
        # A step without trained tokens lacks the numbers that need them (docs/metrics.md).
        shown = [row for row in SHOWN if row[0] in metrics
                 and not (row[0] == "reward" and self.reward_is_accuracy)]
        on_bar = ", ".join(bar.format(metrics[key]) for key, bar, _ in shown if bar)
        in_line = ", ".join(line.format(metrics[key]) for key, _, line in shown if line)
        self.bar.set_postfix_str(on_bar, refresh=False)
        self.bar.update()
        if self.bar.disable:
            say(f"step {step}/{self.steps}: {in_line}, {metrics['seconds']:.1f} s")
        self.tell_time_left(step, metrics["seconds"])
        if self.settings.watching.show and step % self.settings.watching.show == 0:
            row = rows[0]
            # What a model writes may hold a terminal's control codes: they are shown, not obeyed.
            text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1]
                           for c in f"{row['question']}\n-> {row['completion']}")
            say(f"step {step}, {row['id']}, reward {row['reward']:.3g}:\n{text}")

    def tell_time_left(self, step: int, seconds: float) -> None:
        """Says after this process's first step how long the rest will take, and corrects it later.

        The first step is slower than others: kernels are compiled and memory is taken. Later ones
        change with the length of the answers. So after every ten steps the time left is estimated
        anew from the last ten, without the first. It is told if a step's time differs from the one
        that was told last by more than a tenth (after the first ten steps) or a quarter of that,
        unless this makes less than ten seconds. A terminal's bar tells the time left by itself.
        """
        left = self.steps - step
        if self.first_seconds is None:
            self.first_seconds = self.told_seconds = seconds
            later = (f": {duration(left * seconds)} to go at this speed, which changes with the "
                     "length of the answers, and without evaluations") if left else ""
            say(f"the first step took {seconds:.1f} s{gpu_peak()}{later}")
            return
        self.recent.append(seconds)
        done = step - self.first
        if done % TIMED_STEPS or not left:
            return
        mean = sum(self.recent) / len(self.recent)
        first_time = done == TIMED_STEPS
        before = self.told_seconds
        gap = abs(mean - before)
        # 0.1 %: a tenth, as a float, is not exactly that. Ten seconds matter to nobody.
        if gap > before * (0.1 if first_time else 0.25) * 1.001 and gap * left > 10:
            if first_time or self.bar.disable:   # a bar tells the time that is left itself
                say(f"after {step} steps: {duration(left * mean)} to go at {mean:.1f} s a step (it "
                    f"was {before:.1f} s), without evaluations")
            self.told_seconds = mean
        if first_time and not self.bar.disable:  # the bar's own estimate leaves out the slow start
            self.bar.start_t += max(0.0, self.first_seconds - mean)

    def farewell(self, folder: Path, held_out: int) -> None:
        """Where the run is, what it changed, how long it took, what can be done with it.

        held_out: the number of held-out problems.
        """
        if RANK > 0:
            return
        metrics = [row for row, _ in read_log(folder / "metrics.jsonl")]
        seconds = sum(row.get("seconds", 0.0) for row in metrics)
        texts = {"before": "unknown before"}
        rewards = {"before": "unknown before"}
        for row in [row for row in metrics if "eval_accuracy" in row]:
            right = round(row["eval_accuracy"] * held_out)
            mean, low, high = confidence_interval([1.0] * right + [0.0] * (held_out - right))
            when = "after" if row["step"] else "before"      # that of step 0 precedes its update
            texts[when] = f"{mean:.1%} [{low:.1%}, {high:.1%}] {when}"
            reward = row.get("eval_reward")      # None where no answer could be scored
            rewards[when] = f"{math.nan if reward is None else reward:.3g} {when}"
        reward = f"reward {', '.join(rewards.values())}; " if self.settings.data.reward else ""
        say(f"{folder}: {counted(len(metrics), 'step')} in {duration(seconds)}; held-out {reward}"
            f"accuracy {', '.join(texts.values())}, on {counted(held_out, 'problem')}{gpu_peak()}")
        if metrics and all(row.get("grad_norm") == 0 for row in metrics):
            say("nothing was learned: the gradient of every step was 0")
        commands = (command("evaluate.py", folder), command("tools.report", folder),
                    command("tools.chat", folder),
                    command("tools.convert", "merge", folder, f"{folder}-merged"))
        say("next: " + "\n      ".join(commands))


def command(program: str, *arguments: object) -> str:
    """A command line of this project that can be pasted into the shell that the user is in.

    program: "evaluate.py", or "tools.report" of a module. If the user's working directory is not
    the folder of the source, the command names that folder.
    """
    there = Path.cwd() == SOURCE
    name = Path(sys.executable).name
    words = [name if shutil.which(name) == sys.executable else sys.executable]
    if program.endswith(".py"):
        words.append(program if there else str(SOURCE / program))
        before = ""
    else:
        words += ["-m", program]
        # Without PYTHONSAFEPATH, which Python 3.10 does not know, `-m` would take the user's own
        # rewards.py, say, for the one of this project.
        before = "" if there else f"PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(SOURCE))} "
    return before + shlex.join([*words, *map(str, arguments)])


def forget_gpu_peak() -> None:
    """Lets gpu_peak() begin anew, from what is held at this moment."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()                 # what is reserved and holds nothing does not count
        torch.cuda.reset_peak_memory_stats()


def gpu_peak(text: str = ", at most %.1f GiB of GPU memory") -> str:
    """The text with what torch reserved at most since forget_gpu_peak(), in GiB; "" on a CPU."""
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0
    return text % (reserved / 2**30) if reserved else ""


def whole_seconds(seconds: float) -> str:
    """A time that is to be compared with others: 2.5 s, 130 s."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def duration(seconds: float) -> str:
    """90 s, 12 min or 3 h 5 min."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


# -----------------------------------------------------------------------------
# --report-to

class Tracker:
    """Reports the metrics of each step from rank 0; name None: reports nothing.

    The service is opened with the first step's metrics, so a run that cannot begin leaves no
    empty run there. The first failure is printed and ends the tracking, not the training.
    """

    def __init__(self, name: str | None, folder: Path, flags: dict):
        self.name = name if RANK == 0 else None
        self.folder = folder
        self.flags = flags
        self.write = None                        # function(numbers, step), once it is open

    def log(self, metrics: dict) -> None:
        if self.name is None:
            return
        try:
            self.write = self.write or open_tracker(self.name, self.folder, self.flags)
            numbers = {k: v for k, v in metrics.items() if k != "step" and v is not None}
            self.write(numbers, step=metrics["step"])
        except Exception as error:               # of a network, a login, a service: anything
            say(f"--report-to {self.name} stops here: {first_line(error)}")
            self.name = None


def open_tracker(name: str, folder: Path, flags: dict) -> Callable:
    """Opens a run at the service and returns its function(numbers, step)."""
    if name != "tensorboard":                    # trackio has the functions of wandb
        package = importlib.import_module(name)
        package.init(project="qerl", name=folder.name, config=flags)
        return package.log
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(numbers, step):
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()
    return log
