"""
The folder of a run: who may write there, its logs, and checkpoints that survive any end.

Training changes tensors in place, in the middle of steps. `Checkpoints` keeps a copy
on the host as of the end of the last whole step (50 ms a step for 7B at rank 32: 1 GB, pinned),
and files are written from that copy alone. So wherever in a step a run ends, rank 0 can save the
last whole one without a word to other ranks or to a GPU that may be stuck. A signal raises Stopped
wherever the step is: a cluster may give 30 seconds, a step may take longer.

    checkpoints/step_000040/state.safetensors     the tensors
                           /state.json            the counters, SHA-256 of both files' content

A crash leaves all of a checkpoint or nothing. The last two stay. Noise, order and sampling are
functions of the seed and the counters: there is no generator to save.
"""
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from harness import process
from harness.files import json_line, named, new_folder, read_bytes, read_log, write_atomically, write_json
from harness.process import Stopped, first_line, short, stop
from harness.ranks import RANK, WORLD, collective, gather, say

try:
    import fcntl
except ImportError:                              # Windows: there run.json alone is exclusive
    fcntl = None

SIGNALS = [*process.SIGNALS, signal.SIGINT]


@contextmanager
def signals_wait():
    """Within, files and memory change together; a signal takes effect at the end."""
    came = []
    before = [signal.signal(number, lambda n, _: came.append(n)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before):
            signal.signal(number, handler)
    if came:
        stop(came[0])


@contextmanager
def ending_with(save, advice):
    """However the block ends early, save() is called, which returns what to say of it. What is no
    fault of the code ends in one line and code 1; a bug keeps its traceback.
    """
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        yield
    except BaseException as error:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)        # torchrun repeats it; SIGKILL after 30 s
        try:
            saved = save()
        except OSError as failure:
            saved = f"the last step cannot be saved ({failure}), earlier checkpoints are whole"
        if not isinstance(error, (Stopped, OSError, torch.OutOfMemoryError)):
            raise
        if RANK == 0:
            print(f"train.py: {first_line(error)}; {saved}; {advice}", file=sys.stderr, flush=True)
        if WORLD > 1:
            os._exit(1)                                  # NCCL's farewell waits for ranks now gone
        sys.exit(1)


@contextmanager
def claimed(folder, resume):
    """--out becomes this run's own. If the block fails, a new run has left nothing: neither the
    folder nor a base in it. ValueError if it is not empty, or another process holds it.
    """
    if RANK == 0:
        claim(folder, resume)
    try:
        yield
    except BaseException:
        if RANK == 0 and not resume:
            shutil.rmtree(folder / "base", ignore_errors=True)
            with suppress(OSError):              # something else came to be in it
                folder.rmdir()
        raise


def claim(folder, resume):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder}: not writable")
    if fcntl:
        handle = os.open(folder, os.O_RDONLY)    # a lock ends with its owner, however that ends
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {folder}: another run is writing there") from None
        except OSError:                          # a file system without locks
            os.close(handle)
    if not resume and any(folder.iterdir()):
        advice = ", or --resume it" if (folder / "run.json").exists() else ""
        raise ValueError(f"--out {folder} is not empty: choose another folder{advice}")


def digest(tensors, counters):
    return hashlib.sha256(tensors + json.dumps(counters, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The last whole step: `tensors`, name -> copy on the host; `counters`, {} before the first."""

    def __init__(self, folder, live):
        self.folder = folder
        self.tensors = {name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                        for name, t in live.items()}
        self.counters = {}

    def snapshot(self, live, counters):
        for name, t in live.items():
            self.tensors[name].copy_(t)
        self.counters = dict(counters)

    def save(self):
        """OSError leaves the earlier checkpoints untouched and gives the space back."""
        final = self.folder / f"step_{self.counters['step']:06d}"
        if final.exists():
            return                                       # load() saw it whole, or this run wrote it
        for cut_off in list(self.folder.glob(".step_*")):        # new_folder's, by a kill
            shutil.rmtree(cut_off)
        tensors = safetensors.torch.save(self.tensors)
        record = {**self.counters, "sha256": digest(tensors, self.counters)}
        with new_folder(final) as folder:
            write_atomically(folder / "state.safetensors", tensors)
            write_json(folder / "state.json", record)
        for old in sorted(self.folder.glob("step_*"))[:-2]:
            shutil.rmtree(old)

    def load(self):
        """From the newest whole checkpoint -> lines to print. Damaged ones are renamed."""
        lines = []
        for folder in sorted(self.folder.glob("step_*"), reverse=True):
            try:
                counters = json.loads(read_bytes(folder / "state.json"))
                tensors = read_bytes(folder / "state.safetensors")
                if counters.pop("sha256") != digest(tensors, counters):
                    raise ValueError("its checksum does not match")
                held = safetensors.torch.load(tensors)
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError,
                    SafetensorError) as error:
                lines.append(f"{folder}: damaged checkpoint passed over: {error}")
                folder.rename(folder.with_name(f"damaged_{folder.name}_{time.time_ns()}"))
                continue
            kinds = [{name: (t.shape, t.dtype) for name, t in part.items()}
                     for part in (held, self.tensors)]
            if kinds[0] != kinds[1] or folder.name != f"step_{counters['step']:06d}":
                raise Stopped(f"{folder}: holds no state of this run: {short(counters)}, "
                              f"{short({name: tuple(t.shape) for name, t in held.items()})}")
            for name, t in held.items():
                self.tensors[name].copy_(t)
            self.counters = counters
            return lines + [f"{folder}: going on from here"]
        if (self.folder.parent / "adapter").exists() and not any(self.folder.glob("*step_*")):
            raise Stopped(f"{self.folder}: no checkpoint is left; from step 0 on the run would "
                          "replace its adapter and logs: begin another, with --adapter")
        return lines + [f"{self.folder}: no whole checkpoint, starting from step 0"]


class Folder:
    """run.json, metrics.jsonl, samples.jsonl, checkpoints/, adapter/ and adapters/ of one run.

    live: name -> tensor that training changes; write_adapter(tensors, folder) writes PEFT's files.
    """

    def __init__(self, path, live, write_adapter):
        self.path = path
        self.live = live
        self.write_adapter = write_adapter
        self.checkpoints = Checkpoints(path / "checkpoints", live)

    def start(self, flags, resume):
        """Write run.json, or load the newest checkpoint into every rank's `live` and cut the logs
        to it -> its counters, {} if there is none.
        """
        if RANK == 0 and resume:
            for line in self.checkpoints.load():
                say(line)
            for name in ("metrics.jsonl", "samples.jsonl"):      # later steps will be done again
                trim_log(self.path / name, self.checkpoints.counters.get("step", 0))
        elif RANK == 0:
            (self.path / "run.json").touch(exist_ok=False)       # of two runs, one comes first
            write_json(self.path / "run.json", flags)
        counters = gather([self.checkpoints.counters])[0]
        if counters:
            for name, t in self.checkpoints.tensors.items():
                if WORLD > 1:
                    collective(dist.broadcast, t, 0)
                self.live[name].copy_(t)
            self.save()                          # adapter/, in case the end came between the two
        return counters

    def note(self, **changes):
        """Changes keys of run.json."""
        if RANK == 0:
            path = self.path / "run.json"
            write_json(path, json.loads(path.read_text()) | changes)

    def snapshot(self, counters):
        """From here on, whatever ends the run saves this whole step."""
        self.checkpoints.snapshot(self.live, counters)

    def log(self, name, objects):
        """One JSON object a line, to disk before any checkpoint that counts on them."""
        if RANK == 0:
            with named(self.path / name), open(self.path / name, "a") as f:
                f.writelines(map(json_line, objects))
                f.flush()
                os.fsync(f.fileno())

    def keep_adapter(self, name, tensors=None):
        """Write adapters/NAME, which stays: of `tensors`, or as of the last whole step."""
        if RANK == 0:
            self.write_adapter(tensors or self.checkpoints.tensors, self.path / "adapters" / name)

    def save(self):
        """Checkpoint and adapter/ of the last whole step -> what there is to say."""
        kept = self.checkpoints
        if not kept.counters:
            return "nothing was changed"
        if RANK == 0:
            kept.save()
            self.write_adapter(kept.tensors, self.path / "adapter")
        return f"step {kept.counters['step']} is saved"


def trim_log(path, step):
    """Keep the lines of steps before `step`, which come first. Steps that are missing are said."""
    held = set()
    kept = 0
    for row, end in read_log(path) if path.exists() else ():
        if row["step"] < step:
            held.add(row["step"])
            kept = end
    if len(held) < step:
        say(f"{path}: holds {len(held)} of the {step} steps done")
    if path.exists() and kept < path.stat().st_size:
        os.truncate(path, kept)
