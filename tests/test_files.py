"""
Files are written whole or not at all, and a bad one is named. How data files are read is in test_problems.py.

python -m pytest tests/test_files.py -v
"""
import errno
import os
import stat

import pytest

from files import (
    append_lines,
    check_keys,
    equal_to,
    new_folder,
    positive_number,
    read_json,
    read_text,
    whole_number,
    write_atomically,
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "adapter.bin"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["adapter.bin"]


def test_a_new_folder_appears_whole_and_readable_to_all_or_not_at_all(tmp_path):
    with new_folder(tmp_path / "deep" / "out") as folder:
        assert folder.parent == tmp_path / "deep" and not (tmp_path / "deep" / "out").exists()
        (folder / "a").write_text("1")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    assert stat.S_IMODE((tmp_path / "deep/out").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "deep/out/a").stat().st_mode) == 0o644
    with pytest.raises(KeyboardInterrupt):
        with new_folder(tmp_path / "cut") as folder:
            (folder / "a").write_text("1")
            raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]


def test_a_new_folder_may_be_a_link_to_an_empty_one(tmp_path):
    """Replacing the link itself would fail at the end, with everything written."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "a").exists()


def test_a_new_folder_replaces_nothing_but_an_empty_one(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("taken", "file"):
        with pytest.raises(ValueError, match=f"{name}: exists and is not an empty folder"):
            with new_folder(tmp_path / name):
                pass
    assert (tmp_path / "taken/notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "empty/a").exists()


def test_a_full_disk_names_the_file_that_was_being_written(tmp_path, monkeypatch):
    """Python names the file if open() fails, but not if write() or fsync() does."""
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda path: write_atomically(path, b"x"), lambda path: append_lines(path, [{"step": 1}])):
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'log'}'"):
            write(tmp_path / "log")


def test_a_text_is_read_without_its_byte_order_mark_and_never_from_a_pipe(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfhalf: \xc2\xbd")
    assert read_text(tmp_path / "text") == "half: \u00bd"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"\xbd")
    for name, why in (("pipe", "no regular file"), ("latin", "can't decode byte 0xbd"), ("absent", "No such file")):
        with pytest.raises(ValueError, match=f"{name}: cannot be read .*{why}"):
            read_text(tmp_path / name)


@pytest.mark.parametrize("text,why", [
    ("[1]", "holds no JSON object"), ('{"a": Infinity}', "cannot be read as JSON .Infinity is not JSON"),
    ("", "cannot be read as JSON .Expecting value"), ("[" * 100_000, "cannot be read as JSON .maximum recursion")])
def test_a_file_that_holds_no_json_object_is_one_line_that_names_it(tmp_path, text, why):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=f"x.json: {why}") as error:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value,message", [
    ({"r": 8}, None), ({"r": 8, "bias": None, "other": []}, None),
    ({}, "x.json: lacks r, expected a whole number from 1 to 65,536"),
    ({"r": True}, "x.json: r is True, expected a whole number from 1 to 65,536"),
    ({"r": 8, "alpha": 0}, "x.json: alpha is 0, expected a number above 0, at most 1e+09"),
    ({"r": 8, "alpha": float("nan")}, "x.json: alpha is nan, expected a number above 0, at most 1e+09"),
    ({"r": 8, "bias": "all"}, "x.json: bias is 'all', expected 'none'")])
def test_the_first_key_that_breaks_its_rule_is_named_with_what_it_must_be(value, message):
    rules = {"r": (*whole_number(1, 2**16), True), "alpha": (*positive_number(1e9), False),
             "bias": (*equal_to("none"), False)}
    if message is None:
        check_keys("x.json", value, rules)
    else:
        with pytest.raises(ValueError) as error:
            check_keys("x.json", value, rules)
        assert str(error.value) == message
