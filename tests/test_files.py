"""
Writing and reading files: a write that fails leaves the old file, a new folder appears whole or not at all.

python -m pytest tests/test_files.py -v
"""
import os
import stat

import pytest

from harness.files import new_folder, write_atomically


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
    """It failed at the end, with all that had been written."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "a").exists()


def test_a_new_folder_takes_the_place_of_nothing_but_an_empty_one(tmp_path):
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
