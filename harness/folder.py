"""
The folder of a run: who may write there, its logs, and crash-safe checkpoints.

    runs/x/run.json                                the flags, and what ran them
          /metrics.jsonl, samples.jsonl            one line per step, one line per completion
          /held_out.jsonl                          one line per completion of an evaluation
          /checkpoints/step_000040/state.safetensors     the tensors that training changes
                                  /state.json            the counters
          /adapter/, adapters/NAME/                PEFT folders: of the last save; kept for good
          /model/, models/NAME/                    model folders instead, with --train full

Training changes its tensors in place, one after the other, in the middle of a step. Saved at that
point, half of them would belong to one step and half to the next. So at the end of each step
`RunFolder` copies them to host memory, and files are written only from that copy:

    |<------------------ step 7 ------------------>|<------------------ step 8 -----------
    | sample, score, update | logs | copy | (save) | sample, score, update | logs | copy | ...
    | live tensors change   | signals wait here    | live tensors change   | signals wait
                                      ^
       left of it the copy is step 6, | right of it step 7

If Python sees the run end (a signal, an error, a lost rank), the copy is saved on the way out. This
does not involve the other ranks or the GPU, which may be stuck, and a signal does not wait for the
end of the step: a cluster may give 30 seconds, and a step may take longer.

If Python cannot see it (SIGKILL, a power cut), the steps since the last save are lost, but not
their log lines: logs are synced to disk before the copy is made, so they are never behind the
newest checkpoint. --resume cuts the logs back to the checkpoint and repeats those steps bit for
bit: noise, order and sampling are functions of the seed and the counters, so there is no random
generator whose state would have to be saved.

A crash while saving leaves a complete new checkpoint or none (files.new_folder). The last two
checkpoints are kept, in case the newest is damaged later. Then remove it, and --resume continues
from the other.

The copy takes 50 ms per step for a 7B with an adapter of rank 32 (1 GB, in pinned memory).
"""
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

import env
from files import (
    FIX_AND_CONTINUE,
    Stopped,
    UserError,
    append_lines,
    first_line,
    new_folder,
    read_log,
    write_json,
)
from harness.config import flags_to_repeat
from ranks import RANK, say

try:
    import fcntl
except ImportError:                              # Windows has no such locks
    fcntl = None

# While training, Ctrl-C saves the last step, as the other signals do.
STOP_SIGNALS = [*env.SIGNALS, signal.SIGINT]

Tensors = dict[str, torch.Tensor]


# -----------------------------------------------------------------------------
# How a run ends

@contextmanager
def ending_with(save: Callable[[], str], advice: Callable[[str], str]) -> Iterator[None]:
    """A context: whatever ends the program early inside it calls save() first.

    save() returns a part of the message: "step 7 is saved". advice(then) says how to continue the
    run, if possible; `then` is Stopped.then. A bug keeps its traceback. Any other end prints one
    line and exits with code 1:

        train.py: stopped by SIGTERM; step 7 is saved; continue with --resume --out runs/x

    Rank 0 prints it. Another rank prints a line only for an error that may be its own, such as one
    of --reward: rank 0 only sees that a rank is lost.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, env.stop_on_signal)
    try:
        yield
    except BaseException as error:
        # torchrun repeats its SIGTERM. From here on only SIGKILL can interrupt the saving; torchrun
        # sends it after 30 seconds.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        try:
            saved = save()
        except OSError as failure:
            saved = f"the last step cannot be saved ({failure}); earlier checkpoints are intact"
        if not isinstance(error, (Stopped, UserError, OSError, torch.OutOfMemoryError)):
            raise
        then = getattr(error, "then", FIX_AND_CONTINUE)
        if RANK == 0:
            message = "; ".join(filter(None, (first_line(error), saved, advice(then))))
            env.end_with(f"{env.program()}: {message}")
        if then == FIX_AND_CONTINUE:
            env.end_with(f"{env.program()}: rank {RANK}: {first_line(error)}")
        env.end_at_once(1)


@contextmanager
def signals_wait() -> Iterator[None]:
    """A context in which a signal is only recorded; it takes effect when the block ends.

    For the block in which the logs, the copy and the checkpoint advance to a new step. A run that
    ended between two of these would save step 7 with the log lines of step 8.
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

def claim(folder: Path, resume: bool) -> None:
    """Reserves --out for this run: rank 0 creates the folder and locks it until the process ends.
    UserError if another run has the lock, or the folder of a new run is not empty.
    """
    if RANK > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl:
        # The lock belongs to the open handle, which is left open on purpose. The system releases it
        # whenever the process ends, so unlike a lock file it cannot be left over.
        try:
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {folder}: another run is writing there") from None
        except OSError:                          # a file system without locks
            pass
    found = sorted(path.name for path in folder.iterdir())
    if found and not resume:
        advice = f", or --resume --out {folder}" if "run.json" in found else ""
        if found == ["base"]:                    # the set-up of a run failed after its calibration
            advice = f", and --model {folder / 'base'}, which is calibrated already"
        if all(name.startswith(".base.") for name in found):     # files.new_folder's
            advice = ", or empty this one: a run was killed there while it calibrated"
        raise UserError(f"--out {folder} is not empty, it contains {found[0]}: choose another "
                        f"folder{advice}")


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of all checkpoints, in the order of their steps. A user's copy under a longer
    name does not count.
    """
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


# -----------------------------------------------------------------------------
# The folder

class RunFolder:
    """Everything that a run writes, on rank 0 only, and the copy of its last complete step.

    live: name -> tensor that training changes; write_adapter(tensors, folder) writes PEFT's files.
    result: the name of what is trained, "adapter", or "model" if the files are a full model.

    copies: name -> copy of a live tensor on the host; counters: name -> number (or anything that
    JSON preserves), {} before the first complete step.
    """

    def __init__(self, path: Path, live: Tensors, write_adapter: Callable[[Tensors, Path], None],
                 result: str = "adapter"):
        self.path = path
        self.live = live
        self.write_adapter = write_adapter
        self.result = result
        self.checkpoints = path / "checkpoints"
        # Pinned memory lets the GPU copy into it directly, at the full speed of the bus.
        self.copies = {name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                       for name, t in live.items()}
        self.counters = {}
        self.run_json = {}                       # the content of run.json, set by start()

    def start(self, run_json: dict, resume: bool) -> dict:
        """Writes the run.json of a new run. For a resumed one: puts the newest checkpoint into the
        live tensors and cuts the logs back to it. Returns the checkpoint's counters, {} if there
        is none.

        run_json: the file's new content; for a resumed run its present content.
        """
        self.run_json = run_json
        if not resume:
            self.note()
            return {}
        self.load()                              # on every rank
        if RANK == 0:
            for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl"):
                trim_log(self.path / name, self.counters.get("step", 0))
        if self.counters:
            for name, t in self.copies.items():
                self.live[name].copy_(t)
            self.save()                          # a kill may have come between state and adapter/
        return self.counters

    def log(self, name: str, objects: list[dict]) -> None:
        """Appends lines to a log. They are on disk before the checkpoint of their step."""
        if RANK == 0:
            append_lines(self.path / name, objects)

    def snapshot(self, counters: dict) -> None:
        """Copies the live tensors and the counters at the end of a step. If the run ends after
        this, this step is what it saves.
        """
        # A tuple would come back as a list. Large state belongs in the tensors.
        assert json.loads(json.dumps(counters)) == counters, f"JSON would change {counters}"
        for name, t in self.live.items():
            self.copies[name].copy_(t)
        self.counters = dict(counters)

    def save(self) -> str:
        """Writes the last complete step's checkpoint and adapter/. OSError if the disk is full.

        -> a part of the message with which a run ends: which step is saved.
        """
        if not self.counters:
            return "nothing was changed"
        if RANK == 0:
            self.save_checkpoint()
            self.write_adapter(self.copies, self.path / self.result)
        return f"step {self.counters['step']} is saved"

    def save_checkpoint(self) -> None:
        """Writes the copy to disk. OSError leaves earlier checkpoints as they were."""
        final = self.checkpoints / f"step_{self.counters['step']:06d}"
        if final.exists():                       # this run wrote it, or load() read it
            return
        for cut_off in self.checkpoints.glob(".step_*.????????"):    # new_folder's, after a kill
            shutil.rmtree(cut_off)
        with new_folder(final) as folder:
            data = safetensors.torch.save(self.copies)
            (folder / "state.safetensors").write_bytes(data)
            write_json(folder / "state.json", self.counters)
        for old in checkpoints_in(self.checkpoints)[:-2]:
            shutil.rmtree(old)

    def load(self) -> None:
        """Fills the copy from the newest checkpoint, if there is one, and prints which.

        Stopped, with nothing changed, if it is damaged or does not belong to this run, or if there
        is none although the run has saved one.
        """
        found = checkpoints_in(self.checkpoints)
        trained = self.path / self.result
        if not found and trained.exists():
            # Somebody who deletes checkpoints to save space does not want the run to start over:
            # that would empty the logs and replace the trained adapter with a new one.
            raise Stopped(f"{self.checkpoints}: no checkpoint: start a new run with "
                          f"--{self.result} {trained}", "")
        if not found:
            say(f"{self.checkpoints}: no checkpoint, starting from step 0")
            return
        newest = found[-1]
        try:
            counters = json.loads((newest / "state.json").read_bytes())
            tensors = safetensors.torch.load((newest / "state.safetensors").read_bytes())
        except (OSError, ValueError, SafetensorError) as error:
            raise Stopped(f"{newest}: is damaged ({first_line(error)}): remove it to continue from "
                          "the one before", "") from None
        held, wanted = ({name: (t.shape, t.dtype) for name, t in part.items()}
                        for part in (tensors, self.copies))
        if held != wanted:
            raise Stopped(f"{newest}: is not a state of this run: tensor names, shapes or types "
                          "differ", "")
        for name, t in tensors.items():
            self.copies[name].copy_(t)
        self.counters = counters
        say(f"{newest}: continuing from here")

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
        """-> the last part of the message with which a run ends: how it can continue, "" if it
        cannot. then: Stopped.then.
        """
        begun = (self.path / "run.json").exists()
        words = ["--out", str(self.path), *flags_to_repeat(self.run_json)]
        return f"{then} {shlex.join(words)}" if then and begun else ""


def trim_log(path: Path, step: int) -> None:
    """Cuts a log, if there is one, after its last line of a step before `step`."""
    if not path.exists():
        return
    kept = 0
    for row, end in read_log(path):
        if row["step"] < step:
            kept = end
    if kept < path.stat().st_size:
        os.truncate(path, kept)
