"""
A program as its user meets it: how its threads wait, and how it ends where that is no fault of
ours. Every program imports this before torch, which reads its settings once.

    with one_line("train.py"): ...     a wrong flag, file or folder, or a signal such as SIGTERM,
                                       ends in one line and code 1

Ctrl-C ends in one line and code 130, also while libraries are still being imported. A bug keeps
its traceback.
"""
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

# A thread that spins while it waits takes the core that a busy machine gave to another process:
# with one such process 80 steps of the tiny model took 12 minutes instead of one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A GPU's segments of memory grow: 32B's largest micro-batch reserves 10 % less. Read when CUDA
# starts: asked for a GPU's name.
if sys.platform == "linux":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


class Stopped(BaseException):
    """The run ends though it did nothing wrong. Not an Exception: no library may swallow it."""


def first_line(error):
    """An exception's message in one line, its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def short(value):
    """repr() of what a file holds, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


SIGNALS = [signal.SIGTERM]
if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    SIGNALS.append(signal.SIGHUP)                # a lost terminal; nohup has it ignored


def stop(number, _=None):
    """A signal's handler."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    hint = " (asked to, or because a rank died: see torchrun's report)" if ranks > 1 else ""
    raise Stopped(f"stopped by {signal.Signals(number).name}{hint}")


@contextmanager
def one_line(name):
    """What a user's flag, file or folder can hold, or a machine lack, ends in one line, code 1."""
    def end(number, _):
        signal.signal(number, signal.SIG_DFL)    # a second one ends what does not end: a download
        stop(number)

    for number in SIGNALS:
        signal.signal(number, end)               # unhandled, it would leave half a folder behind
    try:
        for flag, value in zip(sys.argv, [*sys.argv[1:], None]):
            if value == "" or re.fullmatch("--[a-z-]+=", flag):          # "$NOT_SET" in a shell
                raise ValueError(f"{flag} is given nothing: an empty argument")
        yield
    except (ValueError, OSError, Stopped) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].line or "raise"
        if isinstance(error, ValueError) and not last.startswith("raise"):
            raise                                # Python's own, as of `x, y = [1]`: a bug of ours
        sys.exit(f"{name}: {first_line(error)}")
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise                                # memory of a GPU or the host; that has no class
        sys.exit(f"{name}: not enough memory: {first_line(error)}")


def report(kind, error, trace):
    """sys.excepthook."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print(f"\n{Path(sys.argv[0]).name}: stopped by Ctrl-C", file=sys.stderr, flush=True)
    os._exit(130)


sys.excepthook = report

LIBRARIES = "torch", "triton", "safetensors", "tokenizers", "numpy"


def about(hardware):
    """What run.json says of a start of its run: code, libraries, hardware, command, date."""
    root = Path(__file__).parent.parent
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=root,
                             capture_output=True, text=True, timeout=10)
        commit = git.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"commit": commit, "versions": versions, "hardware": hardware,
            "command": f"python {shlex.join(sys.argv)}", "date": now()}


def now():
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
