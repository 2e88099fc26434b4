"""
Process settings that must come before `import torch`, and one-line exits for user errors.

Every program imports this file first:

    import env                                   # isort: skip; before torch
    import torch

    with env.one_line("train.py"): ...

How a program ends:

    wrong flag, file or folder; too little memory       one line on stderr, code 1   (one_line)
    SIGTERM, or SIGHUP of a closed terminal             one line on stderr, code 1   (one_line)
    Ctrl-C, also while libraries are being imported     one line on stderr, code 130 (the hook);
                                                        while a run trains, code 1
    a library that is not installed                     one line on stderr, code 1   (the hook)
    stdout's reader has ended, as in `| head`           nothing is said, code 141    (the hook)
    a bug of ours                                       its traceback, code 1

Not here: how a training run saves its last step on the way out (harness/folder.py, ending_with).
"""
import atexit
import os
import platform
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from files import GO_ON, Stopped, UserError, first_line

# -----------------------------------------------------------------------------
# Settings that torch reads once, when it is imported or when CUDA starts

# By default a waiting OpenMP thread spins: it keeps its core busy doing nothing. On a machine
# whose cores are shared it takes that core from the process it waits for. With one such process
# beside it, 80 steps of the tiny model took 12 minutes instead of one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Let the segments of the CUDA allocator grow in place, instead of adding one for each new size.
# This reserves 10 % less memory for the largest micro-batch of a 32B model.
if sys.platform == "linux":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


# -----------------------------------------------------------------------------
# Ending

# What asks a program to end. SIGINT is not here: Python makes Ctrl-C a KeyboardInterrupt, and
# report_uncaught() prints its line. SIGHUP means that the terminal was closed; a program started
# with nohup has it ignored already and should go on. Windows has no SIGHUP.
SIGNALS = [signal.SIGTERM]
if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    SIGNALS.append(signal.SIGHUP)


def stop_on_signal(number: int, frame: object = None) -> None:
    """A signal handler that raises Stopped in the main thread."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    hint = "" if alone else " (asked to, or because a rank died: see torchrun's report)"
    raise Stopped(f"stopped by {signal.Signals(number).name}{hint}", GO_ON)


@contextmanager
def one_line(program: str) -> Iterator[None]:
    """Within, errors that the user can mend end the program with one line and code 1: a UserError,
    a Stopped, and an OSError, which is the machine's: a missing file, a full disk. Every other
    exception is a bug of ours and keeps its traceback.

    Until all files raise UserError, a ValueError of a source line that begins with `raise` counts
    as one.
    """
    def end(number, frame):
        # A download may not react to the exception. A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        stop_on_signal(number)

    # Unhandled, a signal would end Python on the spot and leave a half-written folder behind.
    for number in SIGNALS:
        signal.signal(number, end)
    try:
        # `--out "$RUN"` with RUN unset passes "": almost certainly not what was meant.
        for flag, value in zip(sys.argv, [*sys.argv[1:], None]):
            if value == "" or re.fullmatch("--[a-z-]+=", flag):
                raise UserError(f"{flag} is given nothing: the argument after it is empty")
        yield
    except (ValueError, OSError, Stopped) as error:
        if reader_has_ended(error):
            raise
        if isinstance(error, ValueError) and not isinstance(error, UserError):
            source_line = traceback.extract_tb(error.__traceback__)[-1].line or "raise"
            if not source_line.startswith("raise"):
                raise
        end_with(f"{program}: {first_line(error)}")
    except (RuntimeError, MemoryError) as error:
        # torch raises a plain RuntimeError when the host's memory is full, and a subclass of
        # RuntimeError when a GPU's is. Both say "allocate".
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        end_with(f"{program}: not enough memory: {first_line(error)}")


def end_with(line: str) -> NoReturn:
    """Ends the program with a line on stderr and code 1."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(line)
    # Python's ordinary exit destroys the group of the ranks, where NCCL waits for all of them, and
    # a thread may still be waiting for one that never comes.
    print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def program_name() -> str:
    """The file name of the program that runs, such as train.py."""
    return Path(sys.argv[0]).name


def reader_has_ended(error: BaseException) -> bool:
    """Whether the error means that nobody reads stdout or stderr any more, as when `| head` has
    its ten lines. Libraries raise the same error for a socket, so the two pipes are asked.
    """
    if not isinstance(error, BrokenPipeError) or not hasattr(select, "poll"):    # Windows has none
        return False
    pipes = select.poll()
    pipes.register(1, 0)                         # 0: of errors and hang-ups alone
    pipes.register(2, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in pipes.poll(0))


def end_quietly() -> None:
    """Ends the process as SIGPIPE, which is 13, ends other programs."""
    os._exit(128 + 13)


def flush_stdout() -> None:
    """The last act of a program: Python's own flush would complain where nobody reads any more, and
    print tracebacks where the disk is full.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        end_quietly()
    except OSError as error:
        print(f"{program_name()}: stdout: {first_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)


REQUIREMENTS = Path(__file__).parent / "requirements.txt"


def report_uncaught(kind: type, error: BaseException, trace: object) -> None:
    """The sys.excepthook: one line for Ctrl-C, for a library that is not installed and for what is
    raised while files are imported; nothing where nobody reads; a traceback for everything else.

    It is installed when this file is imported, so it also covers the seconds in which torch is
    imported, where no `with` block of ours is active yet. os._exit skips the interpreter's
    shutdown, in which threads of libraries would print tracebacks of their own.
    """
    program = program_name()
    if isinstance(error, KeyboardInterrupt):
        print(f"\n{program}: stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(130)
    if reader_has_ended(error):
        end_quietly()
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and re.search(rf"^{re.escape(missing)}\b", REQUIREMENTS.read_text(), re.M):
        print(f"{program}: {missing} is not installed: pip install -r {REQUIREMENTS}",
              file=sys.stderr)
    elif isinstance(error, (Stopped, UserError)):
        print(f"{program}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = report_uncaught
atexit.register(flush_stdout)

# A caller may have closed a standard stream, as `2>&-` does. Python then has None in its place, and
# the next file that is opened gets its number. That could be a log of the run, and libraries would
# write into it what they mean for stderr. So /dev/null is opened before any file, in the order of
# the numbers.
for stream, mode in dict(stdin="r", stdout="w", stderr="w").items():
    if getattr(sys, stream) is None:
        setattr(sys, stream, open(os.devnull, mode))

# Where stdout is not UTF-8 (a log file on Windows, PYTHONIOENCODING, an old locale), a character
# that it lacks is written as its code, as on stderr. It may come from a problem, an answer or a
# path, and should not end a run.
if hasattr(sys.stdout, "reconfigure"):
    sys.stdout.reconfigure(errors="backslashreplace")

if not __debug__:
    raise Stopped(f"PYTHONOPTIMIZE={sys.flags.optimize} (python -O) takes out the assertions by "
                  "which this program checks itself: unset it")


# -----------------------------------------------------------------------------
# What a result was made with

LIBRARIES = "torch", "triton", "safetensors", "tokenizers", "numpy"


def provenance(hardware: str) -> dict:
    """Commit, versions, hardware, command and date, for run.json and the results of programs.

    A commit that ends in -dirty had uncommitted changes. None stands for what cannot be found
    out: no git, no repository, a library that is not installed.
    """
    root = Path(__file__).parent
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


def now() -> str:
    """The local time with its offset from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
