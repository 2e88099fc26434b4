"""
Settings that must come before `import torch`, a program's name and parser, and how it ends.

Every program imports this file first:

    import env                                   # isort: skip; before torch
    import torch

    with env.one_line(): ...

    wrong flag, file or folder; too little memory;      one line on stderr, code 1
    Ctrl-C, SIGTERM, SIGHUP from a closed terminal
    stdout is closed, as by `| head`                    nothing, code 1
    Ctrl-C during the imports                           nothing, code 130
    a bug of ours                                       its traceback, code 1

While a run trains, one_line(save) also saves its last step, and the line says so.
"""
import signal
import sys
from pathlib import Path

# Ctrl-C during the imports that follow, here and in the program, ends it at once. Not in Jupyter or
# pytest, which handle it.
if Path(__file__).resolve().parent in Path(sys.argv[0]).resolve().parents[:2]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import os
import platform
import re
import shlex
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import NoReturn

from files import CONTINUE, FIX_AND_CONTINUE, Stopped, UserError, first_line

# -----------------------------------------------------------------------------
# Settings that torch reads once, when it is imported or when CUDA starts

# By default a waiting OpenMP thread spins, which keeps its core busy. On shared cores, it may take
# that core from the very process it's waiting for: a run can take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Lets the CUDA allocator's segments grow in place instead of adding one for each new size, so less
# memory is reserved.
if sys.platform == "linux":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# torch.compile has only a few small kernels to compile here, but would start a process per core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
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
# The ranks

def read_number(name: str, default: int, allowed: range) -> int:
    """A number from the environment. Exits with one line unless it is an allowed one."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) not in allowed:
        wanted = "below WORLD_SIZE" if 0 in allowed else "above 0"
        sys.exit(f"{program()}: the environment says {name}={text}, but it must be a number "
                 f"{wanted}: unset {name}, or start the program with torchrun")
    return int(text)


# How many processes there are, this one's number, and its number on its machine, from torchrun.
WORLD = read_number("WORLD_SIZE", 1, range(1, 10**6))
RANK = read_number("RANK", 0, range(WORLD))
LOCAL_RANK = read_number("LOCAL_RANK", 0, range(WORLD))


# -----------------------------------------------------------------------------
# Ending

# Signals that end a program: Ctrl-C, a cluster's or torchrun's SIGTERM, and SIGHUP from a closed
# terminal. Under nohup SIGHUP is ignored, and the program continues. Windows has no SIGHUP.
SIGNALS = [signal.SIGINT, signal.SIGTERM]
if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    SIGNALS.append(signal.SIGHUP)


def stop_on_signal(number: int, frame: object = None) -> None:
    """A signal handler that raises Stopped in the main thread."""
    raise Stopped(f"stopped by {signal.Signals(number).name}", CONTINUE)


def ignore_signal(number: int, frame: object = None) -> None:
    """A signal handler that forked processes don't keep, unlike SIG_IGN."""


def let_signals_end_child() -> None:
    """Restores a forked process's signals, so that a --reward's timeout can terminate it even in a
    long call, and without a traceback. A user's own handlers stay.
    """
    for number in SIGNALS:
        if signal.getsignal(number) in (stop_on_signal, ignore_signal):
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):                              # not on Windows
    os.register_at_fork(after_in_child=let_signals_end_child)


@contextmanager
def one_line(save: Callable[[str], str] | None = None) -> Iterator[None]:
    """A context in which everything but a bug ends the program with one line and code 1:

        train.py: stopped by SIGTERM; step 7 is saved; continue with --resume --out runs/x

    save(then) is called before the end, even after a bug, and returns the second half; `then` is
    Stopped.then. Rank 0 prints the line. Other ranks print one only for an error that may be theirs
    alone, such as one in --reward, because rank 0 sees only that a rank was lost.
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
    except BaseException as error:
        if not save and isinstance(error, BrokenPipeError):
            end_at_once()
        then = getattr(error, "then", FIX_AND_CONTINUE)
        saved = ""
        if save:
            # torchrun repeats its SIGTERM. From here on, only SIGKILL can interrupt the save;
            # torchrun sends it after 30 seconds.
            for number in SIGNALS:
                signal.signal(number, ignore_signal)
            saved = save(then)
        why = reason(error)
        who = program() if RANK == 0 else f"{program()}: rank {RANK}"
        line = f"{who}: {'; '.join(filter(None, (why, saved)))}"
        if why and WORLD == 1:
            sys.exit(line)
        if RANK == 0 and (why or saved) or why and then == FIX_AND_CONTINUE:
            print(line, file=sys.stderr, flush=True)
        if not why:
            if WORLD == 1 or isinstance(error, SystemExit):
                raise
            traceback.print_exc()
        end_at_once()


def reason(error: BaseException) -> str:
    """What went wrong, in one line; "" for a bug of ours."""
    # torch raises a plain RuntimeError when host memory is full, and a subclass of it when GPU
    # memory is. Both say "allocate".
    is_memory = isinstance(error, RuntimeError) and "allocate" in str(error)
    if is_memory or isinstance(error, MemoryError):
        return f"not enough memory: {first_line(error)}"
    return first_line(error) if isinstance(error, (UserError, Stopped, OSError)) else ""


def end_at_once() -> NoReturn:
    """Ends the process with code 1, without Python's normal exit."""
    # A normal exit destroys the process group, which makes NCCL wait for all ranks, and library
    # threads print tracebacks.
    try:
        sys.stdout.flush()
    finally:
        os._exit(1)


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
