"""
The folder of a run: who may write there, its logs, and checkpoints that survive any end.

    runs/x/run.json                                the flags, and what ran them
          /metrics.jsonl, samples.jsonl            one line a step, one line a completion
          /held_out.jsonl                          one line a completion of an evaluation
          /checkpoints/step_000040/state.safetensors     the tensors that training changes
                                  /state.json            the counters, one SHA-256 of both files
          /adapter/, adapters/NAME/                PEFT folders: of the last save; kept for good

Training changes its tensors in place, one after the other, in the middle of a step. If they were
saved at that point, half would be of one step and half of the next. So at the end of each step
`Checkpoints` copies them to the host's memory, and files are written from that copy alone:

    |<------------------ step 7 ------------------>|<------------------ step 8 -----------
    | sample, score, update | logs | copy | (save) | sample, score, update | logs | copy | ...
    | live tensors change   | signals wait here    | live tensors change   | signals wait
                                      ^
       left of it the copy is step 6, | right of it step 7

If Python notices the end of the run (a signal, an error, a lost rank), the copy is saved on the way
out. This needs neither the other ranks nor the GPU, which may be stuck. So a signal need not wait
for the end of the step: a cluster may give 30 seconds, and a step may take longer.

If Python cannot notice the end (SIGKILL, a power cut), the steps since the last save are lost.
Their log lines are on disk already: the logs are synced before the copy is made. So the logs are
ahead of the newest checkpoint or equal to it, never behind. --resume cuts the logs back to the
checkpoint and does those steps again, with the same bits: noise, order and sampling are functions
of the seed and the counters, so there is no random generator whose state would have to be saved.

A crash while saving leaves the whole new checkpoint or none of it (files.new_folder). The last two
checkpoints are kept, in case the newest is damaged later.

Somebody may move or remove the folder while the run writes there. The run keeps the folder open,
and the open handle stays with the folder wherever it is moved. So before each step's log lines are
written, the handle is compared with the folder that has the name now. If the folder was moved, the
run saves its last step in the new place and ends, since another run may have the old name by then.

The copy takes 50 ms a step for a 7B with an adapter of rank 32 (1 GB, in pinned memory).
"""
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

import env
from env import stop_on_signal
from files import (
    GO_ON,
    MEND_AND_GO_ON,
    Stopped,
    append_lines,
    counted,
    create_json,
    first_line,
    new_folder,
    read_bytes,
    read_json,
    read_log,
    short_repr,
    write_atomically,
    write_json,
)
from ranks import RANK, WORLD, collective, gather, say

try:
    import fcntl
except ImportError:                              # Windows: run.json alone keeps a second run out
    fcntl = None

# While training, Ctrl-C saves the last step as the other signals do.
STOP_SIGNALS = [*env.SIGNALS, signal.SIGINT]

Tensors = dict[str, torch.Tensor]


# -----------------------------------------------------------------------------
# How a run ends

@contextmanager
def ending_with(save: Callable[[], str], advice: Callable[[str], str]) -> Iterator[None]:
    """Within, whatever ends the program early calls save() first.

    save() returns a part of the message: "step 7 is saved". advice(then) says how the run can go
    on, if it can; `then` is Stopped.then. A bug keeps its traceback. Any other end prints one line
    and exits with code 1:

        train.py: stopped by SIGTERM; step 7 is saved; go on with --resume --out runs/x

    Rank 0 prints it. Another rank prints a line only for an error that it alone may have met, such
    as one of --reward: about that error rank 0 learns only that a rank is lost.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, stop_on_signal)
    try:
        yield
    except BaseException as error:
        # torchrun repeats its SIGTERM. From here on nothing can interrupt the saving except
        # SIGKILL, which torchrun sends after 30 seconds.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        try:
            saved = save()
        except OSError as failure:
            saved = f"the last step cannot be saved ({failure}), earlier checkpoints are whole"
        if not isinstance(error, (Stopped, OSError, torch.OutOfMemoryError)) \
                or env.reader_has_ended(error):
            raise
        then = getattr(error, "then", MEND_AND_GO_ON)
        if RANK == 0:
            parts = filter(None, (first_line(error), saved, advice(then)))
            print(f"train.py: {'; '.join(parts)}", file=sys.stderr, flush=True)
        elif then == MEND_AND_GO_ON:
            print(f"train.py: rank {RANK}: {first_line(error)}", file=sys.stderr, flush=True)
        if WORLD > 1:
            # Python's ordinary exit destroys the process group, where NCCL waits for all ranks;
            # some of them may be gone.
            sys.stdout.flush()
            os._exit(1)
        sys.exit(1)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Within, a signal is only noted down; it takes effect when the block ends.

    It is for the block in which the logs, the copy and the checkpoint move on to a new step. If the
    run ended between two of these, it would save step 7 with the log lines of step 8.
    """
    arrived = []
    before = [signal.signal(number, lambda n, _: arrived.append(n)) for number in STOP_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(STOP_SIGNALS, before):
            signal.signal(number, handler)
    if arrived:
        stop_on_signal(arrived[0])


# -----------------------------------------------------------------------------
# Whose folder it is

CUT_OFF = re.compile(r"(\.run\.json\.\d+\.(new|tmp)|\.\.run\.json\.\d+\.new\.\d+\.tmp)")


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """Makes --out this run's own, for as long as its process lives.

    ValueError if it is not empty, or another process writes there. The block sets up the run. If
    it fails, a new run leaves nothing behind: no folder, and no calibrated base in it.
    """
    made = claim(folder, resume) if RANK == 0 else []
    try:
        yield
    except BaseException:
        if RANK == 0 and not resume:
            shutil.rmtree(folder / "base", ignore_errors=True)
            with suppress(OSError):              # rmdir: a file that somebody else put there stays
                for one in made:
                    one.rmdir()
        raise


def claim(folder: Path, resume: bool) -> list[Path]:
    """Makes a folder and locks it until the process ends -> the folders that were made, the deepest
    first. ValueError if it cannot be written to, another run has the lock, or a new run would find
    something in it.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        there = os.path.lexists(folder)          # a file, a pipe or a link that leads nowhere
        why = "is no folder" if there and not folder.is_dir() else error.strerror
        raise ValueError(f"--out {folder}: {why}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder}: the folder is not writable")
    if fcntl:
        # The lock belongs to the open handle, which therefore stays open on purpose. The system
        # drops the lock whenever the process ends, so unlike a lock file it cannot be left over.
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {folder}: another run is writing there") from None
        except OSError:                          # a file system without locks: run.json decides
            os.close(handle)
    # What is left where a kill came while run.json was written (files.create_json).
    cut_off = [path for path in folder.iterdir() if CUT_OFF.fullmatch(path.name)]
    names = sorted({path.name for path in folder.iterdir()} - {path.name for path in cut_off})
    if not resume and names:
        if all(name == "base" or name.startswith(".base.") for name in names):
            raise ValueError(f"--out {folder} holds only {', '.join(names)}, left by a run that was "
                             "killed before its first step: remove that, or choose another folder")
        advice = "" if why_not_resumed(folder) else ", or --resume it"
        raise ValueError(f"--out {folder} is not empty: choose another folder{advice}")
    for path in cut_off:
        path.unlink(missing_ok=True)
    return made


def why_not_resumed(folder: Path) -> str:
    """-> what is wrong with a folder's run.json, without which no run can go on; or ""."""
    try:
        read_json(folder / "run.json")
    except ValueError as error:
        return first_line(error)
    return ""


# -----------------------------------------------------------------------------
# Checkpoints

def names_like(folder: Path, pattern: str) -> list[str]:
    """What in the folder has a name of this form. Whatever else is there, such as a copy that the
    user made of a checkpoint, is not ours. OSError if the folder cannot be read.
    """
    held = os.listdir(folder) if folder.exists() else []
    return [name for name in held if re.fullmatch(pattern, name)]


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of all checkpoints, in the order of their steps."""
    names = sorted(names_like(folder, r"step_\d{6,}"), key=lambda name: (len(name), name))
    return [folder / name for name in names]


class Checkpoints:
    """The last whole step in memory, and its way to the disk and back.

    tensors: name -> copy on the host; counters: name -> number, or what else JSON keeps as it is,
    {} before the first whole step.
    """

    def __init__(self, folder: Path, live: Tensors):
        self.folder = folder
        # Pinned memory lets the GPU copy into it directly, at the full speed of the bus.
        self.tensors = {name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                        for name, t in live.items()}
        self.counters = {}

    def snapshot(self, live: Tensors, counters: dict) -> None:
        """Copies the live tensors and the counters at the end of a step.

        The counters are stored as JSON. What JSON changes (a key that is no string, a tuple) or
        does not know (numpy's and torch's numbers) would not come back as it was, so it is refused
        here. Large state belongs in the tensors.
        """
        for name, value in counters.items():
            stored = json.loads(json.dumps(value, default=str))
            assert repr(stored) == repr(value), (
                f"{name} is {short_repr(value)}, of which a checkpoint would make "
                f"{short_repr(stored)}: take Python's own numbers, texts, lists, or dicts whose "
                "keys are texts")
        for name, t in live.items():
            self.tensors[name].copy_(t)
        self.counters = dict(counters)

    def save(self) -> None:
        """Writes the copy to the disk. OSError leaves the earlier checkpoints as they were."""
        final = self.folder / f"step_{self.counters['step']:06d}"
        if final.exists():                       # this run wrote it, or load() found it whole
            return
        # What is left where a kill cut new_folder() short.
        for cut_off in names_like(self.folder, r"\.step_\d{6,}\..{8}"):
            shutil.rmtree(self.folder / cut_off)
        tensors = safetensors.torch.save(self.tensors)
        state = {**self.counters, "sha256": digest(tensors, self.counters)}
        with new_folder(final) as folder:
            write_atomically(folder / "state.safetensors", tensors)
            write_json(folder / "state.json", state)
        for old in checkpoints_in(self.folder)[:-2]:
            shutil.rmtree(old)

    def load(self) -> list[str]:
        """Fills the copy from the newest whole checkpoint; returns lines to print.

        Damaged ones that are newer are renamed, so that they are neither lost nor tried again.
        Stopped, and nothing is changed, if the whole one is not this run's, or if none is whole
        although the run has saved one.
        """
        damaged = []
        lines = []
        for folder in reversed(checkpoints_in(self.folder)):
            try:
                counters, tensors = read_checkpoint(folder)
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError,
                    SafetensorError) as error:
                damaged.append(folder)
                lines.append(f"{folder}: damaged checkpoint passed over: {error}")
                continue
            held, wanted = ({name: (t.shape, t.dtype) for name, t in part.items()}
                            for part in (tensors, self.tensors))
            if held != wanted or folder.name != f"step_{counters['step']:06d}":
                shapes = {name: tuple(t.shape) for name, t in tensors.items()}
                raise Stopped(f"{folder}: holds no state of this run: {short_repr(counters)}, "
                              f"{short_repr(shapes)}", "")
            for other in damaged:
                other.rename(other.with_name(f"damaged_{other.name}_{time.time_ns()}"))
            for name, t in tensors.items():
                self.tensors[name].copy_(t)
            self.counters = counters
            return lines + [f"{folder}: going on from here"]
        # Somebody who deletes checkpoints to save space does not mean the run to begin again. Nor
        # may it do so where all are damaged: it would cut the logs to nothing and train a new
        # adapter in place of the one that is there.
        adapter = self.folder.parent / "adapter"
        damaged += self.folder.glob("damaged_step_*")
        if damaged or adapter.exists():
            for line in lines:
                say(line)
            which = "no checkpoint is whole" if damaged else "no checkpoint is left"
            raise Stopped(f"{self.folder}: {which}; a start from step 0 would replace the run's "
                          f"adapter and logs: begin another, with --adapter {adapter}", "")
        return [f"{self.folder}: no checkpoint, starting from step 0"]


def read_checkpoint(folder: Path) -> tuple[dict, Tensors]:
    """Returns the counters and tensors of a checkpoint; what it raises means that it is damaged."""
    counters = json.loads(read_bytes(folder / "state.json"))
    tensors = read_bytes(folder / "state.safetensors")
    if counters.pop("sha256") != digest(tensors, counters):
        raise ValueError("its checksum does not match")
    return counters, safetensors.torch.load(tensors)


def digest(tensors: bytes, counters: dict) -> str:
    """SHA-256 of a checkpoint: of the bytes of state.safetensors, then of its counters."""
    return hashlib.sha256(tensors + json.dumps(counters, sort_keys=True).encode()).hexdigest()


# -----------------------------------------------------------------------------
# The folder

class RunFolder:
    """Everything that a run writes, by rank 0 alone.

    live: name -> tensor that training changes; write_adapter(tensors, folder) writes PEFT's files.
    """

    def __init__(self, path: Path, live: Tensors, write_adapter: Callable[[Tensors, Path], None]):
        self.path = path
        self.live = live
        self.write_adapter = write_adapter
        self.checkpoints = Checkpoints(path / "checkpoints", live)
        self.handle = None                       # of the folder, open from start() on
        self.steps = None                        # --steps, from start() on

    def start(self, flags: dict, resume: bool) -> dict:
        """Writes the run.json of a new run. For a resumed one: puts the newest checkpoint into
        every rank's live tensors and cuts the logs back to it. Returns the checkpoint's counters,
        {} if there is none. flags: what a new run.json is to hold.
        """
        ended = None
        self.steps = flags.get("steps")
        if RANK == 0 and hasattr(os, "O_DIRECTORY"):     # Windows moves no folder that is in use
            self.handle = os.open(self.path, os.O_RDONLY)
        if RANK == 0 and resume:
            ended = read_json(self.path / "run.json").get("ended")
            for line in self.checkpoints.load():
                say(line)
            step = self.checkpoints.counters.get("step", 0)
            for name in ("metrics.jsonl", "samples.jsonl"):      # later steps will be done again
                trim_log(self.path / name, step)
            trim_log(self.path / "held_out.jsonl", step, has_every_step=False)
        elif RANK == 0:
            # Where folders cannot be locked, the first run to write run.json has the folder.
            create_json(self.path / "run.json", flags)
        counters = gather([self.checkpoints.counters])[0]
        if counters:
            for name, t in self.checkpoints.tensors.items():
                if WORLD > 1:
                    collective(dist.broadcast, t, 0)
                self.live[name].copy_(t)
            if not ended:                        # a kill may have come between state and adapter/
                self.save()
        return counters

    def log(self, name: str, objects: list[dict]) -> None:
        """Appends lines to a log. They are on the disk before the checkpoint of their step."""
        if RANK == 0:
            self.check_place()
            append_lines(self.path / name, objects)

    def snapshot(self, counters: dict) -> None:
        """Copies the live tensors: whatever ends the run from here on saves this step."""
        self.checkpoints.snapshot(self.live, counters)

    def save(self) -> str:
        """Writes the last whole step's checkpoint and adapter/. OSError if the disk is full.

        -> a part of the message with which a run ends: which step is saved, or cannot be.
        """
        last = self.checkpoints
        if not last.counters:
            return "nothing was changed"
        step = f"step {last.counters['step']}"
        if RANK == 0:
            if not self.is_there():
                return f"{step} cannot be saved"
            last.save()
            self.write_adapter(last.tensors, self.path / "adapter")
        return f"{step} is saved"

    def keep_adapter(self, name: str, tensors: Tensors | None = None) -> None:
        """Writes `tensors`, or the live ones, as adapters/NAME, which no save replaces."""
        if RANK == 0:
            self.write_adapter(tensors or self.live, self.path / "adapters" / name)

    def note(self, **changes: object) -> None:
        """Changes keys of run.json."""
        if RANK == 0:
            self.check_place()
            path = self.path / "run.json"
            write_json(path, read_json(path) | changes)

    def finish(self) -> None:
        """Notes down when the run came to its end, unless that is known."""
        if RANK == 0 and not read_json(self.path / "run.json").get("ended"):
            self.note(ended=env.now())

    def advice(self, then: str) -> str:
        """-> the last part of the message with which a run ends: how it can go on, or why it
        cannot; or "". then: Stopped.then.
        """
        if not (then and self.is_there()):
            return ""
        if not any((self.path / name).exists() for name in ("run.json", "metrics.jsonl")):
            return "the run had not begun"
        wrong = why_not_resumed(self.path)
        if wrong:
            return f"the run cannot go on: {wrong}"
        if then == GO_ON and self.checkpoints.counters.get("step") == self.steps:
            return "that was its last step"
        return f"{then} --out {shlex.quote(str(self.path))}"

    def check_place(self) -> None:
        """Stopped if the folder or its run.json was moved or removed. If the folder was moved,
        `path` is then its new place.
        """
        run_json = self.path / "run.json"
        if self.handle is None or (self.is_there() and run_json.exists()):
            return
        time.sleep(1)                            # rm -r may still be at work
        if self.is_there():
            raise Stopped(f"{run_json} was removed while the run went on")
        before = self.path
        try:                                     # Linux knows the name of what is open
            self.path = Path(os.readlink(f"/proc/self/fd/{self.handle}"))
        except OSError:
            pass
        if not self.is_there():
            self.path = before
            raise Stopped(f"{before} was removed or moved away while the run wrote there")
        self.checkpoints.folder = self.path / "checkpoints"
        raise Stopped(f"{before} was moved to {self.path} while the run wrote there", GO_ON)

    def is_there(self) -> bool:
        """Whether the folder's name still leads to the folder in which the run began to write."""
        if self.handle is None:
            return True
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.handle))
        except (FileNotFoundError, NotADirectoryError):
            return False


def trim_log(path: Path, step: int, has_every_step: bool = True) -> None:
    """Cuts a log after its last line of a step before `step`; says so if steps are missing from a
    log that should have every step.
    """
    steps = set()
    kept = 0
    for row, end in read_log(path) if path.exists() else ():
        if row["step"] < step:
            steps.add(row["step"])
            kept = end
    if has_every_step and len(steps) < step:
        say(f"{path}: holds {len(steps)} of the {counted(step, 'step')} done")
    if path.exists() and kept < path.stat().st_size:
        os.truncate(path, kept)
