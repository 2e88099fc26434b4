"""
What a run stands on: its device, ranks, signals, files, checkpoints, trackers.

Ranks. Started by torchrun, WORLD processes run the same script, each with a GPU of its own and
the whole model; RANK is this one's number. Started by hand there is one: share, gather and all_sum
are the identity. Rank 0 alone prints and writes.

Ends. A signal raises Stopped wherever the step is: a cluster may give 30 seconds, a step may take
longer. A rank that dies makes the next gather() of the others raise Stopped. Lists travel by gloo,
also on GPUs: a gloo call fails as soon as a peer's socket closes, while an NCCL kernel waits for
the dead until a timeout. So an all_sum() of a big GPU tensor comes right after a gather().

Checkpoints. Training changes tensors in place, in the middle of steps. `Checkpoints` keeps a copy
on the host as of the end of the last whole step (50 ms a step for 7B at rank 32: 1 GB, pinned),
and files are written from that copy alone. So wherever in a step a run ends, rank 0 can save the
last whole one without a word to other ranks or to a GPU that may be stuck.

    checkpoints/step_000040/state.safetensors     the tensors
                           /state.json            the counters, SHA-256 of both files' content

A crash leaves all of a checkpoint or nothing. The last two stay. Noise, order and sampling are
functions of the seed and the counters: there is no generator to save.

Not here: model parallelism, elastic restarts.
"""
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

import program
from program import Stopped, first_line, read_bytes, short, stop

try:
    import fcntl
except ImportError:                              # Windows: there run.json alone is exclusive
    fcntl = None

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
SIGNALS = [*program.SIGNALS, signal.SIGINT]
KERNELS = "hopper", "portable"                   # --kernels


def device_of(name, model):
    """--device -> torch.device, of several ranks each its own GPU; ValueError if there is none. It
    becomes the current one, on which Triton launches.

    name None: a GPU if there is one, else the CPU for a model that is here already.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and not Path(model).is_dir():
            raise ValueError(f"--model {model}: torch sees no GPU; --device cpu runs it on the CPU")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not match:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device(name)
    index = LOCAL_RANK if WORLD > 1 else int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def settle_cpu(model):
    """On a CPU: gradients of a prompt that answers share, which threads would add in any order, are
    added in one; and two threads for a small model, more wait for each other longer than they work.
    """
    if model.device.type == "cpu":
        torch.set_deterministic_debug_mode("error")              # imports less than its other name
        torch.utils.deterministic.fill_uninitialized_memory = False      # of torch.empty
        if model.config.width < 1024:
            torch.set_num_threads(min(2, torch.get_num_threads()))


def capability(device):
    """(8, 6) of an sm_86; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def kernels_for(device, wanted):
    """--kernels -> which 4-bit matmul decodes: "hopper" of marlin_fp4.py, "portable" of
    portable_fp4.py, None on a CPU. ValueError if the GPU cannot run it.
    """
    if device.type != "cuda":
        if wanted != "auto":
            raise ValueError(f"--kernels {wanted}: for a GPU, --device is {device}")
        return None
    major, minor = capability(device)
    gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if major < 8:
        raise ValueError(f"--device {device}: {gpu}: the kernels need sm_80 (Ampere) or later")
    if not importlib.util.find_spec("triton"):
        raise ValueError(f"--device {device}: a GPU needs Triton: pip install triton")
    if wanted == "hopper" and major != 9:
        raise ValueError(f"--kernels hopper: {gpu}: it needs sm_90")
    if wanted == "auto":
        return "hopper" if major == 9 else "portable"
    return wanted


def choose_device(args):
    """--device and --kernels of a program -> torch.device; says which kernels decode there."""
    device = device_of(args.device, args.model)
    args.device = args.device or device.type
    kernels = kernels_for(device, args.kernels)
    if kernels:
        say(f"decode kernels: {kernels}, on {torch.cuda.get_device_name(device)}")
    return device


# -----------------------------------------------------------------------------
# Ranks

def say(text):
    """Prints above the progress bar; rank 0 alone."""
    if RANK == 0:
        tqdm.write(text)


def join(device):
    """Meet the other ranks. 30 minutes: one rank may sample that long after another is done."""
    if WORLD > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))


def collective(operation, *arguments):
    try:
        operation(*arguments)
    except RuntimeError as error:
        raise Stopped(f"another rank was lost ({first_line(error)})") from None


def share(items):
    """This rank's part of a list that all have: consecutive, sizes differ by one at most."""
    return items[len(items) * RANK // WORLD:len(items) * (RANK + 1) // WORLD]


def gather(items):
    """-> all ranks' items as one list, in order of the ranks. CPU tensors."""
    parts = [items]
    if WORLD > 1:
        parts = [None] * WORLD
        collective(dist.all_gather_object, parts, items)
    return [item for part in parts for item in part]


def all_sum(tensor):
    """In place, the same bits on every rank. Waits in Python, where signals get through."""
    if WORLD > 1:
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            time.sleep(1e-4)
        collective(work.wait)
    return tensor


# -----------------------------------------------------------------------------
# Signals

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


# -----------------------------------------------------------------------------
# Files

def flush(path):
    """A file's bytes, or the names in a folder, to disk: else a rename may be lost with power."""
    if not hasattr(os, "O_DIRECTORY"):           # Windows: a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


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


@contextmanager
def named(path):
    """Within, a full disk's error names the file."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = str(path)
        raise


def write_json(path, value):
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def write_atomically(path, data):
    """bytes -> file, by a temporary one beside it. A crash leaves the old file or the new."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with named(path), open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)                # what a full disk cut off


def must_be_new(out):
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder")


@contextmanager
def new_folder(out):
    """A temporary folder beside `out`: becomes `out` if the block ends well, else is removed."""
    out = Path(os.path.realpath(out))            # a link to an empty folder stays one
    must_be_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        for path in (*folder.iterdir(), folder):         # mkdtemp and safetensors let only us read
            path.chmod(0o755 if path.is_dir() else 0o644)
            flush(path)
        if out.exists():                         # empty; Windows renames over nothing
            out.rmdir()
        folder.rename(out)
        flush(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


# -----------------------------------------------------------------------------
# The folder of a run

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


def json_line(value):
    """NaN and infinity are no JSON: null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None)) + "\n"


def read_log(path):
    """Yields (row, where its line ends) of metrics.jsonl or samples.jsonl. What has no line feed,
    as what a kill cut off, is no line; Stopped names one of something else.
    """
    end = 0
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise ValueError("its step is no whole number")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Stopped(f"{path}:{number}: no line of a run ({first_line(error)})") from None
        end += len(line) + 1
        yield row, end


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


# -----------------------------------------------------------------------------
# Trackers

def open_tracker(name, folder, flags):
    """-> function(numbers, step) of trackio, wandb or tensorboard."""
    if name != "tensorboard":
        package = importlib.import_module(name)
        package.init(project="qerl", name=folder.name, config=flags)
        return package.log
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(metrics, step):
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)
        writer.flush()
    return log


class Tracker:
    """--report-to: opened with the first step's metrics, on rank 0. A failure of it is said once
    and ends the tracking, not the run: metrics.jsonl has every number.
    """

    def __init__(self, name, folder, flags):
        self.name = name if RANK == 0 else None
        self.about = folder, flags
        self.write = None

    def log(self, metrics):
        if self.name is None:
            return
        try:
            self.write = self.write or open_tracker(self.name, *self.about)
            numbers = {k: v for k, v in metrics.items() if k != "step" and v is not None}
            self.write(numbers, step=metrics["step"])
        except Exception as error:               # of a network, a login, a service: anything
            say(f"--report-to {self.name} stops here: {first_line(error)}")
            self.name = None
