"""
Reading and writing files: what is wrong with one is a single line that names it; what is written is whole.

A file is written under a temporary name and renamed, so a crash leaves the old one or the new one.
"""
import json
import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from harness.process import Stopped, first_line, short

# -----------------------------------------------------------------------------
# Reading


def read_bytes(path):
    """OSError for a pipe or a device, which would be waited for."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: no regular file")
    return path.read_bytes()


def read_text(path):
    """ValueError names the file. Neither a pipe nor a device is waited for."""
    try:
        return read_bytes(Path(path)).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(f"{path}: cannot be read ({why})") from None


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def read_json(path):
    """The JSON object in a file, or a ValueError that names the file."""
    text = read_text(path)
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


BLANK = re.compile(r"[ \t\r\n]*")


def read_rows(path):
    """-> [(number, row)]: the line where it begins, or its place in a list or parquet, from 1."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
            return list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        except ImportError:
            raise ValueError(f"{path}: reading parquet needs pip install pyarrow") from None
        except Exception as error:               # pyarrow's, each of another kind
            raise ValueError(f"{path}: not parquet ({first_line(error)})") from None
    text = read_text(path).rstrip(" \t\r\n")
    decode = json.JSONDecoder(parse_constant=refuse_constant).raw_decode
    rows = []
    number = 1                                   # of the line of text[start]
    start = at = 0
    while at < len(text):
        at = BLANK.match(text, at).end()
        number += text.count("\n", start, at)
        start = at
        try:
            row, at = decode(text, start)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON: {first_line(error)}") from None
        rows.append((number, row))
    if len(rows) == 1 and isinstance(rows[0][1], list):
        return list(enumerate(rows[0][1], 1))
    return rows


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

# -----------------------------------------------------------------------------
# What a JSON object must hold


def check(path, value, rules):
    """rules: key -> (what it must be, test, whether it must be there). ValueError names the first
    key of the object `value` that is not.
    """
    for key, (what, test, needed) in rules.items():
        if value.get(key) is None:
            if needed:
                raise ValueError(f"{path}: no {key}")
        elif not test(value[key]):
            raise ValueError(f"{path}: {key} is {short(value[key])}, expected {what}")


def whole(least, most):
    what = f"a whole number from {least} to {most:,}"
    return what, lambda value: type(value) is int and least <= value <= most


def exactly(wanted):
    return repr(wanted), lambda value: value == wanted


def number(most):
    return (f"a number above 0, at most {most:g}",
            lambda value: type(value) in (int, float) and 0 < value <= most)

# -----------------------------------------------------------------------------
# Writing


def flush(path):
    """A file's bytes, or the names in a folder, to disk: else a rename may be lost with power."""
    if not hasattr(os, "O_DIRECTORY"):           # Windows: a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


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


def json_line(value):
    """NaN and infinity are no JSON: null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None)) + "\n"
