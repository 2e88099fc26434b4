"""
The run folder: who may write to it, its logs, and crash-safe checkpoints.

    runs/x/run.json                                the flags, versions and hardware
          /metrics.jsonl, samples.jsonl            one line per step, one line per completion
          /held_out.jsonl                          one line per completion of an evaluation
          /checkpoints/step_000040/state.safetensors     the tensors that training changes
                                  /state.json            the counters
          /adapter/, adapters/NAME/                PEFT folders: the last save; those kept for good
          /model/, models/NAME/                    with --train full, model folders instead

Within a step, training changes its tensors in place, one after another. If they were saved halfway,
some would belong to one step and some to the next. So at the end of each step `RunFolder` copies
them to host memory, and files are written only from that copy:

    |<------------------ step 7 ------------------>|<------------------ step 8 -----------
    | sample, score, update | logs | copy | (save) | sample, score, update | logs | copy | ...
    | live tensors change   | signals wait here    | live tensors change   | signals wait
                                      ^
       left of it the copy is step 6, | right of it step 7

If Python sees the run end (a signal, an error, a lost rank), it saves the copy on the way out. That
doesn't involve the other ranks or the GPU, which may be stuck. A signal doesn't wait for the step
to end either: a cluster may give 30 seconds, and a step may take longer.

If Python doesn't see it (SIGKILL, a power cut), the steps since the last save are lost, but their
log lines aren't: logs are synced to disk before the copy is made, so they are never behind the
newest checkpoint. --resume cuts the logs back to the checkpoint and repeats those steps bit for
bit. Noise, problem order and sampling are functions of the seed and the counters, so there is no
generator state to save.

A crash while saving leaves a complete new checkpoint or none (files.new_folder). The last two
checkpoints are kept in case the newest gets damaged later. If so, remove it, and --resume continues
from the other.

For a 7B with a rank-32 adapter (1 GB, in pinned memory), the copy takes 50 ms per step.
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
import files
from files import Stopped, UserError, append_lines, first_line, new_folder, read_log, write_json
from ranks import RANK, say

Tensors = dict[str, torch.Tensor]
LOGS = "metrics.jsonl", "samples.jsonl", "held_out.jsonl"


# -----------------------------------------------------------------------------
# Signals

@contextmanager
def signals_wait() -> Iterator[None]:
    """A context in which a signal is only recorded and takes effect when the block ends.

    It's for the block in which logs, copy and checkpoint advance to a new step. A run that ended
    between two of these would save step 7 with the log lines of step 8.
    """
    arrived = []
    before = [signal.signal(number, lambda n, _: arrived.append(n)) for number in env.SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(env.SIGNALS, before):
            signal.signal(number, handler)
    if arrived:
        env.stop_on_signal(arrived[0])


# -----------------------------------------------------------------------------
# Whose folder it is

def claim(folder: Path, resume: bool) -> None:
    """Reserves --out for this run: rank 0 creates the folder and locks it until the process ends.
    UserError if another run has the lock, or if a new run's folder isn't empty.
    """
    if RANK > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    files.lock(folder, f"--out {folder}")        # the handle is left open on purpose
    found = sorted(path.name for path in folder.iterdir())
    if found and not resume:
        advice = "choose another folder"
        if "run.json" in found:
            advice += f", or --resume --out {folder}"
        if found == ["base"]:                    # a run's setup failed after calibration
            advice += f", with --model {folder / 'base'}, which is calibrated"
        if all(name.startswith(".base.") for name in found):     # files.new_folder's
            advice = "a run was killed there while calibrating: empty it or choose another folder"
        raise UserError(f"--out {folder} is not empty (it contains {found[0]}); {advice}")


def checkpoints_in(folder: Path) -> list[Path]:
    """All checkpoint folders, ordered by step. A user's copy under a longer name doesn't count."""
    found = [path for path in folder.glob("step_*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


# -----------------------------------------------------------------------------
# The folder

class RunFolder:
    """Everything that a run writes, on rank 0 only, and the copy of its last complete step.

    live: name -> tensor that training changes; write_adapter(tensors, folder) writes the result.
    result: "adapter", or "model" if a full model is trained.

    copies: name -> host copy of a live tensor; counters: name -> number (or anything that JSON
    preserves), {} before the first complete step.
    """

    def __init__(self, path: Path, live: Tensors, write_adapter: Callable[[Tensors, Path], None],
                 result: str = "adapter"):
        self.path = path
        self.write_adapter = write_adapter
        self.result = result
        self.checkpoints = path / "checkpoints"
        self.live, self.copies = {}, {}
        for name, tensor in live.items():
            self.add(name, tensor)
        self.counters = {}
        self.run_json = {}                       # the content of run.json, set by start()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Makes a tensor part of every checkpoint, before start(); it may only change in place."""
        self.live[name] = tensor
        # The GPU can copy into pinned memory directly, at the full speed of the bus.
        self.copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    def start(self, run_json: dict, resume: bool) -> dict:
        """For a new run, writes run.json. For a resumed one, loads the newest checkpoint into the
        live tensors and cuts the logs back to it. Returns the checkpoint's counters, {} if there
        is none.

        run_json: the file's new content, or for a resumed run its current content.
        """
        self.run_json = run_json
        if not resume:
            self.note()
            return {}
        self.load()                              # on every rank
        if RANK == 0:
            for name in self.run_json.get("logs", LOGS):
                trim_log(self.path / name, self.counters.get("step", 0))
        if self.counters:
            for name, t in self.copies.items():
                self.live[name].copy_(t)
            self.save()                          # in case a kill came between state and adapter/
        return self.counters

    def log(self, name: str, objects: list[dict]) -> None:
        """Appends lines to a log. They reach the disk before their step's checkpoint. Each line has
        a `step`, at which --resume cuts the log.
        """
        known = self.run_json.get("logs", LOGS)
        if name not in known:
            self.note(logs=[*known, name])
        if RANK == 0:
            append_lines(self.path / name, objects)

    def snapshot(self, counters: dict) -> None:
        """Copies the live tensors and the counters at the end of a step. If the run ends after
        this, it saves this step.
        """
        # A tuple would come back as a list. Large state belongs in the tensors.
        assert json.loads(json.dumps(counters)) == counters, f"JSON would change {counters}"
        for name, t in self.live.items():
            self.copies[name].copy_(t)
        self.counters = dict(counters)

    def save(self) -> str:
        """Writes the last complete step's checkpoint and adapter/. OSError if the disk is full.

        -> which step is saved, as part of the message with which a run ends.
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
        for cut_off in self.checkpoints.glob(".step_*.tmp"):         # new_folder's, after a kill
            shutil.rmtree(cut_off)
        with new_folder(final) as folder:
            data = safetensors.torch.save(self.copies)
            (folder / "state.safetensors").write_bytes(data)
            write_json(folder / "state.json", self.counters)
        for old in checkpoints_in(self.checkpoints)[:-2]:
            shutil.rmtree(old)

    def load(self) -> None:
        """Fills the copy from the newest checkpoint, if there is one, and prints which.

        Raises Stopped, with nothing changed, if it is damaged or doesn't belong to this run, or if
        there is none although the run has saved one.
        """
        found = checkpoints_in(self.checkpoints)
        trained = self.path / self.result
        if not found and trained.exists():
            # Anyone who deletes checkpoints to save space doesn't want the run to start over, which
            # would empty the logs and replace the trained adapter with a new one.
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
            raise Stopped(f"{newest} is damaged ({first_line(error)}): remove it to continue from "
                          "the one before", "") from None
        if counters.get("step") != int(newest.name[5:]):
            raise Stopped(f"{newest} was renamed: its state.json says step {counters.get('step')}",
                          "")
        held, wanted = ({name: (t.shape, t.dtype) for name, t in part.items()}
                        for part in (tensors, self.copies))
        if held != wanted:
            raise Stopped(f"{newest} is not from this run: tensor names, shapes or types differ",
                          "")
        for name, t in tensors.items():
            self.copies[name].copy_(t)
        self.counters = counters
        say(f"{newest}: continuing from here")

    def keep_adapter(self, name: str) -> None:
        """Writes the live tensors to adapters/NAME, which no save replaces."""
        if RANK == 0:
            self.write_adapter(self.live, self.path / f"{self.result}s" / name)

    def note(self, **changes: object) -> None:
        """Writes run.json with these keys changed."""
        self.run_json = self.run_json | changes
        if RANK == 0:
            write_json(self.path / "run.json", self.run_json)

    def end(self, then: str) -> str:
        """Saves the last complete step -> the end of the message with which the run ends: which
        step is saved, and how the run can continue, if it can. then: Stopped.then.
        """
        try:
            saved = self.save()
        except OSError as failure:
            saved = f"the last step can't be saved ({failure}); earlier checkpoints are intact"
        begun = (self.path / "run.json").exists()
        return f"{saved}; {then} --out {shlex.quote(str(self.path))}" if then and begun else saved


def trim_log(path: Path, step: int) -> None:
    """Cuts a log, if there is one, after the last line from a step before `step`."""
    if not path.exists():
        return
    kept = 0
    for row, end in read_log(path):
        if row["step"] < step:
            kept = end
    if kept < path.stat().st_size:
        os.truncate(path, kept)
