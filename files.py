"""
Reads JSON, writes files atomically, and defines the two errors that end a program with one line.

A file is never written in place:

    .run.json.4711.tmp   written, then synced to disk
    run.json             then renamed to this by os.replace(), which is atomic

So a kill, a full disk or a power cut leaves either the old file or the new one, never half a file.
new_folder() does the same for a folder.
"""
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# -----------------------------------------------------------------------------
# Errors, and texts for messages

# How to continue a run that ended.
CONTINUE = "continue with --resume"
FIX_AND_CONTINUE = f"fix this, then {CONTINUE}"


class UserError(ValueError):
    """A wrong flag, file or folder. The program ends with its text as a single line."""


class Stopped(BaseException):
    """Ends the program with a one-line message: a signal, a lost rank, a failing user function.

    A BaseException like KeyboardInterrupt, so that no library's `except Exception` swallows it.
    then: how the run can continue, "" if it cannot; the message adds the run's folder.
    """

    def __init__(self, text: str, then: str = FIX_AND_CONTINUE):
        super().__init__(text)
        self.then = then


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without an OSError's number, or its class name if
    the message is empty.
    """
    text = re.sub(r"^\[Errno -?\d+\]", "", str(error)).strip()
    return (text or type(error).__name__).splitlines()[0]


def counted(number: int, noun: str) -> str:
    """1 step, but 0 steps and 2,000 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_repr(value: object, longest: int = 80) -> str:
    """repr(value) for a message, cut to at most `longest` characters."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest - 3]}..."


# -----------------------------------------------------------------------------
# Reading

def read_text(path: str | Path) -> str:
    """The file's text, without the byte order mark of Windows editors. UserError if it can't be
    read or isn't UTF-8.
    """
    try:
        return Path(path).read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path}: cannot be read ({why})") from None


def read_json(path: str | Path) -> dict:
    """The JSON object in a file. UserError if it contains anything else."""
    value = parse_json(read_text(path), path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not a JSON object")
    return value


def read_run_json(folder: str | Path) -> dict:
    """A run's run.json. UserError if the folder isn't a run's."""
    path = Path(folder) / "run.json"
    if not path.exists():
        raise UserError(f"{folder} is not a run folder: it has no run.json")
    flags = read_json(path)
    if "model" not in flags:                     # defaults would replace what was trained
        raise UserError(f"{path}: has no `model`, so no run wrote it")
    return flags


def tell_unfinished(folder: str | Path, steps: int) -> None:
    """Prints how far a run of `steps` steps has come, unless it is finished."""
    log = Path(folder) / "metrics.jsonl"
    done = max((row["step"] + 1 for row, _ in read_log(log)), default=0) if log.exists() else 0
    if done < steps:                             # not on stdout, which may be read by a program
        print(f"{folder} is unfinished: {done:,} of {counted(steps, 'step')}", file=sys.stderr)


def read_rows(path: Path) -> list[tuple[int, object]]:
    """The rows of a data file, each with its number for messages, from 1. UserError if the file
    can't be read.

    A .json file is a list, a .parquet file a table. Any other file, such as .jsonl, has one row per
    line; rows are numbered by line, and blank lines are skipped.
    """
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"{path}: reading parquet needs pip install pyarrow") from None
        try:
            return list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        except pyarrow.ArrowException as error:
            raise UserError(f"{path}: is not a parquet file ({first_line(error)})") from None
    text = read_text(path)
    if path.suffix == ".json":
        rows = parse_json(text, path)
        if not isinstance(rows, list):
            raise UserError(f"{path}: expected a list of rows, got {short_repr(rows)}")
        return list(enumerate(rows, 1))
    return parse_lines(text, path)


def parse_lines(text: str, place: str | Path) -> list[tuple[int, object]]:
    """The value of each line of JSON, with its number from 1. Blank lines are skipped."""
    # Not splitlines(): it also splits at U+2028, which may occur inside a JSON string.
    return [(number, parse_json(line, f"{place}:{number}"))
            for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def parse_json(text: str | bytes, place: str | Path) -> object:
    """The value of a JSON text. UserError, naming `place`, if it isn't JSON. NaN, Infinity and an
    object with two values for one key aren't, although json.loads accepts them.
    """
    def refuse_constant(name):
        raise ValueError(f"{name} is not JSON")

    def to_dict(pairs):
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"it has {twice!r} twice")
        return value

    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=to_dict)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: is not JSON ({first_line(error)})") from None


def read_log(path: Path) -> Iterator[tuple[dict, int]]:
    """Yields every row of a run's log, such as metrics.jsonl, with the byte offset where it ends.

    A last line without a newline was cut off by a kill and is skipped. UserError for a line that
    isn't JSON or has no step.
    """
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            row = parse_json(line, f"{path}:{number}")
            if not isinstance(row, dict) or "step" not in row:
                raise UserError(f"{path}:{number}: has no step, got {short_repr(row)}")
            yield row, end


# -----------------------------------------------------------------------------
# Writing

def write_atomically(path: str | Path, data: bytes) -> None:
    """Writes or replaces a file, completely or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            # Otherwise the rename may reach the disk before the bytes do, and a power cut leaves
            # an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)        # left behind if the disk is full


def write_json(path: str | Path, value: object) -> None:
    """Writes a value as JSON, like write_atomically()."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `out` when the block ends. If the block raises, it
    is removed and `out` is unchanged; if a kill left it behind, the next call reuses it. UserError
    unless `out` is absent or an empty folder, or if another process is writing it.
    """
    # Next to `out`, not in /tmp: a rename is only atomic within one file system.
    folder = out.with_name(f".{out.name}.tmp")
    folder.mkdir(parents=True, exist_ok=True)
    handle = lock(folder, out)
    try:
        must_be_new(out)
        for left in folder.iterdir():
            left.unlink()
        yield folder
        for path in (*folder.iterdir(), folder):
            # safetensors makes files that only their owner can read.
            path.chmod(0o755 if path.is_dir() else 0o644)
            sync_to_disk(path)
        if out.exists():                         # empty; Windows cannot rename over it
            out.rmdir()
        folder.rename(out)
        sync_to_disk(out.parent)                 # the name `out` itself
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def lock(folder: Path, what: object) -> int | None:
    """Locks a folder until the process ends or closes the handle returned. UserError, which names
    `what`, if it is locked already.
    """
    # The system releases the lock when the process ends, however that happens, so unlike a lock
    # file it can't be left over.
    handle = None
    try:
        import fcntl
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{what}: another process is writing there") from None
    except (ImportError, OSError):               # Windows, or a file system without locks
        pass
    return handle


def must_be_new(out: Path) -> None:
    """UserError unless `out` is absent or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty folder")


def append_lines(path: Path, values: Iterable) -> None:
    """Appends each value as a line of JSON and waits until they are on disk."""
    with open(path, "a") as file:
        file.writelines(map(json_line, values))
        file.flush()
        os.fsync(file.fileno())


def json_line(value: object) -> str:
    """A value as one line of JSON. NaN and infinity, which JSON lacks, are written as null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None)) + "\n"


def sync_to_disk(path: Path) -> None:
    """Waits until a file's bytes, or a folder's list of names, are on disk."""
    if not hasattr(os, "O_DIRECTORY"):           # Windows cannot open a folder for this
        return
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
