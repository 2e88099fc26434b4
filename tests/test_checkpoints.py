"""
A run's folder is crash-safe: logs, checkpoints, lock, signals. test_train.py kills, stops and resumes complete runs.

python -m pytest tests/test_checkpoints.py -v
"""
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from env import one_line
from files import Stopped, UserError
from harness.folder import RunFolder, claim, trim_log


def some_live():
    return {"master": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0), "half": torch.ones(4).bfloat16()}


def saved(path, step):
    folder = RunFolder(path, some_live(), None)
    folder.snapshot({"step": step, "cursor": 7 * step})
    folder.save_checkpoint()


def loaded(path):
    folder = RunFolder(path, some_live(), None)
    folder.load()
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# -----------------------------------------------------------------------------
# Logs and checkpoints

def test_log_is_trimmed_to_earlier_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    trim_log(path, 0)                                                     # there is no log yet
    lines = "".join(json.dumps({"step": step, "x": "é"}) + "\n" for step in (0, 0, 1, 2, 3, 3, 4))
    path.write_text(lines + '{"step": 1, "x"')                            # cut off by a kill
    trim_log(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 0, 1, 2]
    before = path.stat().st_mtime_ns
    trim_log(path, 3)
    assert path.stat().st_mtime_ns == before


def test_checkpoint_round_trips_and_last_two_are_kept(tmp_path, capsys):
    for step in (999_960, 999_980, 1_000_000):                            # sorted by name, the last would be first
        saved(tmp_path, step)
    assert names_in(tmp_path / "checkpoints") == ["step_1000000", "step_999980"]
    folder = loaded(tmp_path)
    assert folder.counters == {"step": 1_000_000, "cursor": 7_000_000}
    for name, tensor in some_live().items():
        assert torch.equal(folder.copies[name], tensor) and folder.copies[name].dtype == tensor.dtype
    assert "step_1000000: continuing from here" in capsys.readouterr().out


def test_save_writes_last_complete_step(tmp_path):
    # If a save restored the live tensors, an interrupted --resume would replace the trained adapter with a new one.
    live, written = some_live(), []
    folder = RunFolder(tmp_path, live, lambda tensors, path: written.append((tensors["master"].clone(), path)))
    assert folder.save() == "nothing was changed" and not written and not names_in(tmp_path)
    folder.snapshot({"step": 2})
    live["master"].mul_(-3)                                               # the middle of step 2
    assert folder.save() == "step 2 is saved"
    assert torch.equal(live["master"], -3 * some_live()["master"])
    on_disk = load_file(tmp_path / "checkpoints/step_000002/state.safetensors")
    assert torch.equal(on_disk["master"], some_live()["master"])
    (master, path), = written
    assert torch.equal(master, some_live()["master"]) and path == tmp_path / "adapter"


def cut(file):
    os.truncate(file, file.stat().st_size - 5)


@pytest.mark.parametrize("damage", [cut, Path.unlink])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_damaged_checkpoint_is_named_and_the_previous_one_loads(tmp_path, damage, name):
    for step in (3, 6):
        saved(tmp_path, step)
    damage(tmp_path / "checkpoints/step_000006" / name)
    with pytest.raises(Stopped, match="step_000006 is damaged"):
        loaded(tmp_path)
    (tmp_path / "checkpoints/step_000006").rename(tmp_path / "checkpoints/step_000006.bak")
    assert loaded(tmp_path).counters["step"] == 3
    (tmp_path / "checkpoints/step_000003").rename(tmp_path / "checkpoints/step_000009")
    with pytest.raises(Stopped, match="step_000009 was renamed: .* step 3"):
        loaded(tmp_path)


def test_resume_without_checkpoints(tmp_path):
    (tmp_path / "checkpoints" / ".step_000019.tmp").mkdir(parents=True)         # left by a kill
    assert loaded(tmp_path).counters == {}
    saved(tmp_path, 20)
    assert names_in(tmp_path / "checkpoints") == ["step_000020"]
    # If a user deletes the checkpoints, --resume from step 0 would empty the logs.
    (tmp_path / "adapter").mkdir()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(Stopped, match="--adapter"):
        loaded(tmp_path)


@pytest.mark.parametrize("change", [{"foreign": torch.zeros(2)}, {"master": torch.zeros(3)}, {"step": torch.tensor(4)}])
def test_checkpoint_of_another_run_is_rejected(tmp_path, change):
    folder = RunFolder(tmp_path, some_live() | change, None)
    folder.snapshot({"step": 3})
    folder.save_checkpoint()
    with pytest.raises(Stopped, match="step_000003 is not from this run"):
        loaded(tmp_path)
    assert names_in(tmp_path / "checkpoints") == ["step_000003"]


def killed_at(moment, save):
    """Runs save() in a process that is killed before disk operation `moment`. -> whether save() finished"""
    child = os.fork()
    if child == 0:
        left = [moment]

        def counted(real):
            def call(*arguments, **options):
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return real(*arguments, **options)
            return call

        for module, name in ((os, "fsync"), (os, "replace"), (Path, "rename"), (shutil, "rmtree")):
            setattr(module, name, counted(getattr(module, name)))
        save()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_kill_during_save_leaves_old_or_new_checkpoint(tmp_path):
    steps, done = [], False
    while not done:
        folder = tmp_path / str(len(steps))
        saved(folder, 1)
        saved(folder, 2)
        done = killed_at(len(steps), lambda: saved(folder, 3))
        steps.append(loaded(folder).counters["step"])
        saved(folder, 4)                                                  # what the kill left does not interfere
        assert loaded(folder).counters["step"] == 4
    # fsync and replace state.json, fsync both files and the folder, rename, fsync, rmtree step 1.
    assert steps == sorted(steps) and steps.count(2) >= 6 and steps.count(3) >= 3


# -----------------------------------------------------------------------------
# The folder of a run

@pytest.mark.parametrize("name,said", [
    ("file", "/file"), ("file/x", "/file/x"), ("dangling", "/dangling"), ("killed", ".base.tmp.* calibrating"),
    ("calibrated", "--model .*/calibrated/base"), ("hidden", ".notes")])
def test_unusable_out_is_named_and_kept(tmp_path, name, said):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for folder in ("killed/.base.tmp", "calibrated/base", "hidden/.notes"):          # by a start that failed
        (tmp_path / folder).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((UserError, OSError), match=said):
        claim(tmp_path / name, False)
    assert sorted(tmp_path.rglob("*")) == before


def test_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("a file system without locks")

    monkeypatch.setattr("fcntl.flock", unsupported)
    claim(tmp_path / "x", False)
    assert (tmp_path / "x").is_dir()


# -----------------------------------------------------------------------------
# How a run ends


def test_second_signal_does_not_interrupt_save():
    def save(then):
        os.kill(os.getpid(), signal.SIGTERM)                              # torchrun sends it twice
        os.kill(os.getpid(), signal.SIGINT)
        saves.append("whole")
        return "saved"

    saves = []
    with pytest.raises(SystemExit):
        with one_line(save):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    assert saves == ["whole"]
