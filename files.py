"""
Reads files with errors of one line that name the file, and writes files that are whole or absent.

Reading. Whatever is wrong with a file raises a ValueError of one line, which names the file and, if
possible, the line in it. check_keys() compares a JSON object with a table of what each key must
hold.

Writing. A file is never written in place:

    .run.json.4711.tmp   written, then synced to the disk
    run.json             the temporary file gets this name: os.replace() is atomic

So a kill, a full disk or a power cut at any moment leaves the old file or the new one, never half
of one. new_folder() does the same for a folder of files.
"""
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# -----------------------------------------------------------------------------
# Errors, and texts for messages

# How a run that ended can go on.
GO_ON = "go on with --resume"
MEND_AND_GO_ON = f"once that is mended, {GO_ON}"


class UserError(ValueError):
    """A wrong flag, file or folder: ends the program in one line, which is this error's text."""


class Stopped(BaseException):
    """Ends the program with a one-line message: a signal, a lost rank, a failing user function.

    It is a BaseException, as KeyboardInterrupt is, so that no library's `except Exception`
    swallows it.
    then: how a run can go on afterwards, "" if it cannot; the message adds the run's folder.
    """

    def __init__(self, text: str, then: str = MEND_AND_GO_ON):
        super().__init__(text)
        self.then = then


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its class name where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def counted(number: int, noun: str) -> str:
    """1 step, but 0 steps and 2 steps."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def short_repr(value: object, longest: int = 80) -> str:
    """repr(value), cut to so many characters: what a file holds, quoted in a message."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest - 3]}..."


# -----------------------------------------------------------------------------
# Reading

def read_bytes(path: Path) -> bytes:
    """The file's bytes. OSError if it cannot be read, and for a pipe or a device: reading one would
    wait for ever.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: no regular file")
    return path.read_bytes()


def read_text(path: str | Path) -> str:
    """The file's text in UTF-8; a byte order mark, as Windows' editors write it, is dropped.
    ValueError if the file cannot be read or is no UTF-8.
    """
    try:
        return read_bytes(Path(path)).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(f"{path}: cannot be read ({why})") from None


def parse_json(text: str) -> object:
    """The value of a JSON text. Unlike json.loads, a ValueError for NaN and Infinity, which JSON
    does not have, and for brackets nested deeper than Python's stack.
    """
    def refuse_constant(name):
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError(first_line(error)) from None


def read_json(path: str | Path) -> dict:
    """The JSON object that a file holds. ValueError if it holds anything else."""
    text = read_text(path)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


def read_rows(path: Path) -> list[tuple[int, object]]:
    """The rows of a data file with their numbers, from 1, for messages. ValueError if the file
    cannot be read.

    .json holds one list, whose rows are counted. .parquet is counted likewise. Everything else,
    such as .jsonl, has one row a line and is numbered by lines; blank lines are passed over.
    """
    if path.suffix == ".parquet":
        return list(enumerate(read_parquet(path), 1))
    text = read_text(path)
    if path.suffix == ".json":
        try:
            rows = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: cannot be read as JSON ({first_line(error)}); a file with "
                             "one row a line is a .jsonl") from None
        if not isinstance(rows, list):
            raise ValueError(f"{path}: a .json file must hold a list of rows, this one holds "
                             f"{short_repr(rows)}")
        return list(enumerate(rows, 1))
    rows = []
    # Not splitlines(): it also splits at U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((number, parse_json(line)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: is not JSON ({first_line(error)})") from None
    return rows


def read_parquet(path: Path) -> list[dict]:
    """The rows of a parquet file. ValueError if it is none, or pyarrow is not installed."""
    try:
        import pyarrow.parquet
        return pyarrow.parquet.read_table(path).to_pylist()
    except ImportError:
        raise ValueError(f"{path}: reading parquet needs pip install pyarrow") from None
    except Exception as error:                   # pyarrow's errors have no common class
        raise ValueError(f"{path}: is not a parquet file ({first_line(error)})") from None


def read_log(path: Path) -> Iterator[tuple[dict, int]]:
    """Yields every row of a run's log such as metrics.jsonl, with the byte offset where it ends.

    A last line without its line feed is what a kill cut off, and is left out. Stopped names a
    line that no run can have written.
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


# -----------------------------------------------------------------------------
# What a JSON object must hold
#
# A table of rules has a row for each key: what the value must be, in words for the message; a test
# of the value; and whether the key must be there.
#
#     {"r": (*whole_number(1, 65536), True), "bias": (*equal_to("none"), False)}

def check_keys(path: str | Path, value: dict, rules: dict[str, tuple]) -> None:
    """ValueError names the first key of a JSON object that breaks its rule, and the file."""
    for key, (expected, test, needed) in rules.items():
        if value.get(key) is None:
            if needed:
                raise ValueError(f"{path}: lacks {key}, expected {expected}")
        elif not test(value[key]):
            raise ValueError(f"{path}: {key} is {short_repr(value[key])}, expected {expected}")


def whole_number(least: int, most: int) -> tuple[str, Callable]:
    """Words and test of a rule: an int from `least` to `most`."""
    return (f"a whole number from {least} to {most:,}",
            lambda value: type(value) is int and least <= value <= most)         # True is no int


def positive_number(most: float) -> tuple[str, Callable]:
    """Words and test of a rule: a number above 0, at most `most`."""
    return (f"a number above 0, at most {most:g}",
            lambda value: type(value) in (int, float) and 0 < value <= most)


def equal_to(wanted: object) -> tuple[str, Callable]:
    """Words and test of a rule: this value alone."""
    return repr(wanted), lambda value: value == wanted


# -----------------------------------------------------------------------------
# Writing

def write_atomically(path: str | Path, data: bytes) -> None:
    """Writes a file, or replaces it, whole. OSError names the file: a full disk, say."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with errors_name_file(path), open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            # Without this the rename may reach the disk before the bytes do: after a power cut
            # the new name would stand for an empty file.
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)        # what a full disk cut off


def write_json(path: str | Path, value: object) -> None:
    """Writes a value as JSON, or replaces the file, whole. OSError as write_atomically()."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def create_json(path: Path, value: object) -> None:
    """Writes a file that is not there yet. FileExistsError if it is.

    The file is written under another name first, and then gets a hard link of its own name. A link
    is made at once or not at all: only one of two processes succeeds, and a kill leaves the file
    whole or absent.
    """
    whole = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        write_json(whole, value)
        try:
            os.link(whole, path)
        except FileExistsError:
            raise
        except OSError:                          # a file system without hard links
            path.touch(exist_ok=False)
            os.replace(whole, path)
    finally:
        whole.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `out` as a whole when the block ends.

    If the block raises, the temporary folder is removed and `out` is as it was. ValueError if
    `out` is anything but absent or an empty folder.
    """
    out = Path(os.path.realpath(out))            # a link to an empty folder stays a link
    must_be_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside `out`, not in /tmp: a rename is only atomic within one file system.
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        for path in (*folder.iterdir(), folder):
            # mkdtemp and safetensors make files that their owner alone may read.
            path.chmod(0o755 if path.is_dir() else 0o644)
            sync_to_disk(path)
        if out.exists():                         # empty; Windows does not rename over it
            out.rmdir()
        folder.rename(out)
        sync_to_disk(out.parent)                 # the name `out` itself
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def must_be_new(out: Path) -> None:
    """ValueError if `out` is anything but absent or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder")


def append_lines(path: Path, values: Iterable) -> None:
    """Appends each value as a line of JSON and waits until the disk has them."""
    with errors_name_file(path), open(path, "a") as f:
        f.writelines(map(json_line, values))
        f.flush()
        os.fsync(f.fileno())


def json_line(value: object) -> str:
    """A value as one line. JSON has no NaN and no infinity: they are written as null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None)) + "\n"


def sync_to_disk(path: Path) -> None:
    """Waits until the disk has a file's bytes, or a folder's list of names."""
    if not hasattr(os, "O_DIRECTORY"):           # Windows cannot open a folder for this
        return
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


@contextmanager
def errors_name_file(path: str | Path) -> Iterator[None]:
    """Within, an OSError names the file. Python's own names it when open() fails, but not when
    write() does: "No space left on device" alone would not say on which disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = str(path)
        raise
