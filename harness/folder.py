"""
The folder of a run: who may write there, its logs, and checkpoints that survive any end.

    runs/x/run.json                                the flags, and what ran them
          /metrics.jsonl, samples.jsonl            one line a step, one line a completion
          /held_out.jsonl                          one line a completion of an evaluation
          /checkpoints/step_000040/state.safetensors     the tensors that training changes
                                  /state.json            the counters, one SHA-256 of both files
          /adapter/, adapters/NAME/                PEFT folders: of the last save; kept for good
          /model/, models/NAME/                    with --train full in their place: model folders

Training changes its tensors in place, one after the other, in the middle of a step. If they were
saved at that point, half would be of one step and half of the next. So at the end of each step
`Checkpoints` copies them to the host's memory, and files are written only from that copy:

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

The copy takes 50 ms a step for a 7B with an adapter of rank 32 (1 GB, in pinned memory).
"""
import hashlib
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch

import env
from files import (
    FIX_AND_GO_ON,
    Stopped,
    UserError,
    append_lines,
    first_line,
    new_folder,
    read_log,
    write_json,
)
from harness.config import flags_to_repeat
from ranks import RANK, broadcast, gather, say

try:
    import fcntl
except ImportError:                              # Windows has no such locks
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

        train.py: stopped by SIGTERM; step 7 is saved; continue with --resume --out runs/x

    Rank 0 prints it. Another rank prints a line only for an error that it alone may have met, such
    as one of --reward: about that error rank 0 learns only that a rank is lost.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, env.stop_on_signal)
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
        if not isinstance(error, (Stopped, UserError, OSError, torch.OutOfMemoryError)):
            raise
        then = getattr(error, "then", FIX_AND_GO_ON)
        if RANK == 0:
            told = "; ".join(filter(None, (first_line(error), saved, advice(then))))
            env.end_with(f"train.py: {told}")
        if then == FIX_AND_GO_ON:
            env.end_with(f"train.py: rank {RANK}: {first_line(error)}")
        env.end_at_once(1)


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
        env.stop_on_signal(arrived[0])


# -----------------------------------------------------------------------------
# Whose folder it is

@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """Makes --out this run's own, for as long as its process lives.

    UserError if it is not empty, or another process writes there. The block sets up the run. If
    it fails, a new run leaves an empty folder, without the calibrated base that may be in it.
    """
    if RANK == 0:
        claim(folder, resume)
    try:
        yield
    except BaseException:
        if RANK == 0 and not resume:
            shutil.rmtree(folder / "base", ignore_errors=True)
        raise


def claim(folder: Path, resume: bool) -> None:
    """Makes a folder and locks it until the process ends. UserError if there can be no such folder,
    another run has the lock, or a new run would find something in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: there can be no such folder ({error.strerror})") from None
    if fcntl:
        # The lock belongs to the open handle, which therefore stays open on purpose. The system
        # drops the lock whenever the process ends, so unlike a lock file it cannot be left over.
        try:
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {folder}: another run is writing there") from None
        except OSError:                          # a file system without locks
            pass
    found = sorted(path.name for path in folder.iterdir())
    if found and not resume:
        advice = ", or --resume it" if "run.json" in found else ""
        raise UserError(f"--out {folder} is not empty, it has {found[0]}: choose another folder"
                        f"{advice}")


# -----------------------------------------------------------------------------
# Checkpoints

def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of all checkpoints, in the order of their steps. A copy that the user made under
    a longer name is not one of them.
    """
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


class Checkpoints:
    """The last whole step in memory, and its way to the disk and back.

    tensors: name -> copy on the host; counters: name -> number, or what else JSON keeps as it is,
    {} before the first whole step. result: see RunFolder.
    """

    def __init__(self, folder: Path, live: Tensors, result: str = "adapter"):
        self.folder = folder
        self.result = result
        # Pinned memory lets the GPU copy into it directly, at the full speed of the bus.
        self.tensors = {name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                        for name, t in live.items()}
        self.counters = {}

    def snapshot(self, live: Tensors, counters: dict) -> None:
        """Copies the live tensors and the counters at the end of a step."""
        # A tuple, say, would come back as a list. Large state belongs in the tensors.
        assert json.loads(json.dumps(counters)) == counters, f"JSON would change {counters}"
        for name, t in live.items():
            self.tensors[name].copy_(t)
        self.counters = dict(counters)

    def save(self) -> None:
        """Writes the copy to the disk. OSError leaves the earlier checkpoints as they were."""
        final = self.folder / f"step_{self.counters['step']:06d}"
        if final.exists():                       # this run wrote it, or load() found it whole
            return
        for cut_off in self.folder.glob(".step_*.????????"):     # new_folder's, after a kill
            shutil.rmtree(cut_off)
        tensors = safetensors.torch.save(self.tensors)
        with new_folder(final) as folder:
            (folder / "state.safetensors").write_bytes(tensors)
            write_json(folder / "state.json",
                       self.counters | {"sha256": digest(tensors, self.counters)})
        for old in checkpoints_in(self.folder)[:-2]:
            shutil.rmtree(old)

    def load(self) -> None:
        """Fills the copy from the newest whole checkpoint, if there is any, and says which.

        Damaged ones that are newer are renamed, so that they are neither lost nor tried again.
        Stopped, and nothing is changed, if the whole one is not this run's, or if none is whole
        although the run has saved one.
        """
        damaged = []
        for folder in reversed(checkpoints_in(self.folder)):
            try:
                counters, tensors = read_checkpoint(folder)
            except (OSError, ValueError, KeyError) as error:
                say(f"{folder}: damaged checkpoint passed over: {error}")
                damaged.append(folder)
                continue
            held, wanted = ({name: (t.shape, t.dtype) for name, t in part.items()}
                            for part in (tensors, self.tensors))
            if held != wanted:
                raise Stopped(f"{folder}: holds no state of this run: its tensors have other "
                              "names, shapes or types", "")
            for other in damaged:
                other.rename(other.with_name(f"damaged_{other.name}_{time.time_ns()}"))
            for name, t in tensors.items():
                self.tensors[name].copy_(t)
            self.counters = counters
            say(f"{folder}: going on from here")
            return
        # Somebody who deletes checkpoints to save space does not mean the run to begin again: that
        # would cut the logs to nothing and train a new adapter in place of the one that is there.
        trained = self.folder.parent / self.result
        if damaged or trained.exists():
            raise Stopped(f"{self.folder}: holds no whole checkpoint: begin another run, with "
                          f"--{self.result} {trained}", "")
        say(f"{self.folder}: no checkpoint, starting from step 0")


def read_checkpoint(folder: Path) -> tuple[dict, Tensors]:
    """-> the counters and tensors of a checkpoint. OSError, ValueError or KeyError if it is
    damaged.
    """
    counters = json.loads((folder / "state.json").read_bytes())
    tensors = (folder / "state.safetensors").read_bytes()
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
    result: the name of what is trained, "adapter", or "model" if the files are a whole model's.
    """

    def __init__(self, path: Path, live: Tensors, write_adapter: Callable[[Tensors, Path], None],
                 result: str = "adapter"):
        self.path = path
        self.live = live
        self.write_adapter = write_adapter
        self.result = result
        self.checkpoints = Checkpoints(path / "checkpoints", live, result)
        self.run_json = {}                       # what the file of that name holds, from start() on

    def start(self, run_json: dict, resume: bool) -> dict:
        """Writes the run.json of a new run. For a resumed one: puts the newest checkpoint into
        every rank's live tensors and cuts the logs back to it. Returns the checkpoint's counters,
        {} if there is none.

        run_json: what the file is to hold, or, of a resumed run, holds.
        """
        self.run_json = run_json
        if RANK == 0 and resume:
            self.checkpoints.load()
            for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl"):
                trim_log(self.path / name, self.checkpoints.counters.get("step", 0))
        elif RANK == 0:
            self.note()
        counters = gather([self.checkpoints.counters])[0]
        if counters:
            for name, t in self.checkpoints.tensors.items():
                self.live[name].copy_(broadcast(t))
            self.save()                          # a kill may have come between state and adapter/
        return counters

    def log(self, name: str, objects: list[dict]) -> None:
        """Appends lines to a log. They are on the disk before the checkpoint of their step."""
        if RANK == 0:
            append_lines(self.path / name, objects)

    def snapshot(self, counters: dict) -> None:
        """Copies the live tensors: whatever ends the run from here on saves this step."""
        self.checkpoints.snapshot(self.live, counters)

    def save(self) -> str:
        """Writes the last whole step's checkpoint and adapter/. OSError if the disk is full.

        -> a part of the message with which a run ends: which step is saved.
        """
        last = self.checkpoints
        if not last.counters:
            return "nothing was changed"
        if RANK == 0:
            last.save()
            self.write_adapter(last.tensors, self.path / self.result)
        return f"step {last.counters['step']} is saved"

    def keep_adapter(self, name: str) -> None:
        """Writes the live tensors as adapters/NAME, which no save replaces."""
        if RANK == 0:
            self.write_adapter(self.live, self.path / f"{self.result}s" / name)

    def note(self, **changes: object) -> None:
        """Writes run.json with these keys changed."""
        self.run_json = self.run_json | changes
        if RANK == 0:
            write_json(self.path / "run.json", self.run_json)

    def advice(self, then: str) -> str:
        """-> the last part of the message with which a run ends: how it can go on, "" if it cannot.
        then: Stopped.then.
        """
        begun = (self.path / "run.json").exists()
        words = ["--out", str(self.path), *flags_to_repeat(self.run_json)]
        return f"{then} {shlex.join(words)}" if then and begun else ""


def trim_log(path: Path, step: int) -> None:
    """Cuts a log after its last line of a step before `step`. Says so if the log is missing."""
    if not path.exists():
        if step:
            say(f"{path} is missing: it begins again at step {step}")
        return
    kept = 0
    for row, end in read_log(path):
        if row["step"] < step:
            kept = end
    if kept < path.stat().st_size:
        os.truncate(path, kept)
