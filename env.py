"""
Settings that must come before `import torch`, a program's name and parser, and how it ends.

Every program imports this file first:

    import env                                   # isort: skip; before torch
    import torch

    with env.one_line(): ...

    wrong flag, file or folder; too little memory       one line on stderr, code 1   (one_line)
    stdout is closed, as by `| head`                    nothing, code 1              (one_line);
                                                        while a run trains, one line
    SIGTERM, or SIGHUP from a closed terminal           one line on stderr, code 1   (one_line)
    Ctrl-C                                              one line on stderr, code 130 (the hook);
                                                        while a run trains, code 1
    a bug of ours                                       its traceback, code 1        (the hook)

For how a training run saves its last step on the way out, see harness/folder.py (ending_with).
"""
import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from files import CONTINUE, Stopped, UserError, first_line

# -----------------------------------------------------------------------------
# Settings that torch reads once, when it is imported or when CUDA starts

# By default a waiting OpenMP thread spins, which keeps its core busy. On shared cores, it may take
# that core from the very process it's waiting for: a run can take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Lets the CUDA allocator's segments grow in place instead of adding one for each new size, so less
# memory is reserved.
if sys.platform == "linux":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# `> log` and `| tee log` get each line at once, not after 8 KB, so a kill loses none. An ASCII
# terminal or log gets \u03c0 for a letter it lacks.
if hasattr(sys.stdout, "reconfigure"):
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")


# -----------------------------------------------------------------------------
# The command line

def program() -> str:
    """How the user calls this program: train.py, or python -m tools.report."""
    path = Path(sys.argv[0]).resolve()
    if path.parent.parent == Path(__file__).resolve().parent:
        return f"python -m {path.parent.name}.{path.stem}"
    return path.name


def parser(usage: str, text: str) -> argparse.ArgumentParser:
    """A program's parser. usage: what follows the program's name; text: its --help."""
    return argparse.ArgumentParser(
        prog=program(), usage=f"%(prog)s {usage}", description=text.strip(),
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)


# -----------------------------------------------------------------------------
# Ending

# Signals that end a program. SIGINT is not here: Python turns Ctrl-C into a KeyboardInterrupt, and
# report_uncaught() prints its line. SIGHUP means that the terminal was closed; under nohup it is
# ignored, and the program continues. Windows has no SIGHUP.
SIGNALS = [signal.SIGTERM]
if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    SIGNALS.append(signal.SIGHUP)


def stop_on_signal(number: int, frame: object = None) -> None:
    """A signal handler that raises Stopped in the main thread."""
    raise Stopped(f"stopped by {signal.Signals(number).name}", CONTINUE)


@contextmanager
def one_line() -> Iterator[None]:
    """A context in which errors that the user can fix end the program with one line and code 1:
    UserError, Stopped, OSError (a missing file, a full disk) and too little memory. Any other
    exception is a bug of ours and keeps its traceback.
    """
    # An unhandled signal would end Python on the spot and leave a half-written folder behind.
    for number in SIGNALS:
        signal.signal(number, stop_on_signal)
    try:
        # `--out "$RUN"` with RUN unset passes "", which is never intended.
        for flag, value in zip(sys.argv, [*sys.argv[1:], None]):
            if value == "" or re.fullmatch("--[a-z-]+=", flag):
                raise UserError(f"{flag}: the value is empty")
        yield
    except BrokenPipeError:
        end_at_once(1)
    except (UserError, Stopped, OSError) as error:
        end_with(f"{program()}: {first_line(error)}")
    except (RuntimeError, MemoryError) as error:
        # torch raises a plain RuntimeError when host memory is full, and a subclass of it when GPU
        # memory is. Both say "allocate".
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        end_with(f"{program()}: not enough memory: {first_line(error)}")


def end_with(line: str) -> NoReturn:
    """Ends the program with a line on stderr and code 1."""
    if alone():
        sys.exit(line)
    print(line, file=sys.stderr, flush=True)
    end_at_once(1)


def alone() -> bool:
    """Whether this process is the only rank."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def end_at_once(code: int) -> NoReturn:
    """Ends the process without Python's normal exit."""
    # A normal exit destroys the process group, which makes NCCL wait for all ranks, and library
    # threads print tracebacks.
    try:
        sys.stdout.flush()
    finally:
        os._exit(code)


def report_uncaught(kind: type, error: BaseException, trace: object) -> None:
    """The sys.excepthook: one line for Ctrl-C, a traceback for everything else."""
    if isinstance(error, KeyboardInterrupt):
        print(f"\n{program()}: stopped by Ctrl-C", file=sys.stderr, flush=True)
        end_at_once(130)
    sys.__excepthook__(kind, error, trace)
    if not alone():
        end_at_once(1)


sys.excepthook = report_uncaught


# -----------------------------------------------------------------------------
# What a result was made with

LIBRARIES = "torch", "triton", "safetensors", "tokenizers", "numpy"


def provenance(hardware: str) -> dict:
    """Commit, versions, hardware, command and date, for run.json and the results of programs.

    A commit that ends in -dirty had uncommitted changes. None: no git, no repository, or a library
    that isn't installed.
    """
    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"],
                             cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = git.stdout.strip() or None
    except OSError:
        commit = None
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    return {"commit": commit, "versions": versions, "hardware": hardware,
            "program": program(), "command": f"python {shlex.join(sys.argv)}",
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z")}
