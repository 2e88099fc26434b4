"""
Files are written completely or not at all, and errors name the file. test_problems.py tests how data files are read.

python -m pytest tests/test_files.py -v
"""
import errno
import json
import os
import stat

import pytest

from files import UserError, append_lines, new_folder, read_json, read_log, read_text, tell_unfinished, write_atomically


def test_failed_write_keeps_old_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "adapter.bin"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: write_atomically(path, b"new and longer"), lambda: append_lines(tmp_path / "log", [{}])):
        with pytest.raises(OSError, match="No space left on device"):
            write()
    assert path.read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["adapter.bin", "log"]


def test_new_folder_appears_complete_or_not_at_all(tmp_path):
    with new_folder(tmp_path / "deep" / "out") as folder:
        assert folder.parent == tmp_path / "deep" and not (tmp_path / "deep" / "out").exists()
        (folder / "a").write_text("1")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]
    assert stat.S_IMODE((tmp_path / "deep/out").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "deep/out/a").stat().st_mode) == 0o644
    with pytest.raises(KeyboardInterrupt):
        with new_folder(tmp_path / "cut") as folder:
            (folder / "a").write_text("1")
            with pytest.raises(UserError, match="cut: another process"):
                with new_folder(tmp_path / "cut"):
                    pass
            raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "left by a kill").write_text("1")
    with new_folder(tmp_path / "out"):
        pass
    assert not list((tmp_path / "out").iterdir())


def test_new_folder_only_replaces_an_empty_one(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("taken", "file"):
        with pytest.raises(UserError, match=name):
            with new_folder(tmp_path / name):
                pass
    assert (tmp_path / "taken/notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "empty/a").exists()


def test_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfhalf: \xc2\xbd")
    assert read_text(tmp_path / "text") == "half: \u00bd"
    (tmp_path / "latin").write_bytes(b"\xbd")
    for name in ("latin", "absent"):
        with pytest.raises(UserError, match=f"{name}: cannot be read"):
            read_text(tmp_path / name)


@pytest.mark.parametrize("text", ["[1]", "", "{", '{"a": NaN}', "[" * 100_000])
def test_file_without_a_json_object_is_named(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="x.json: ") as error:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(error.value)


def test_log_writes_null_for_nan_and_ignores_a_cut_line(tmp_path):
    path = tmp_path / "log.jsonl"
    append_lines(path, [{"step": 0, "x": float("nan"), "y": [-float("inf")]}, {"step": 1, "x": "é\u2028"}])
    whole = path.stat().st_size
    with open(path, "a") as file:
        file.write('{"step": 1')                                          # cut off by a kill
    rows = list(read_log(path))
    assert [row for row, _ in rows] == [{"step": 0, "x": None, "y": [None]}, {"step": 1, "x": "é\u2028"}]
    assert rows[1][1] == whole and json.loads(path.read_bytes()[:rows[0][1]])
    for other in ("not a row", "[" * 100_000):
        path.write_text('{"step": 1}\n' + other + "\n")
        with pytest.raises(UserError, match="log.jsonl:2"):
            list(read_log(path))


@pytest.mark.parametrize("row", ["5", '{"reward": 1}', "[]", "null"])
def test_log_row_without_a_step_is_named(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{row}\n')
    with pytest.raises(UserError, match="metrics.jsonl:2: has no step"):
        tell_unfinished(tmp_path, 3)
