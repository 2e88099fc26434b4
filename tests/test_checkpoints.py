"""
The folder of a run survives any end: its logs, its checkpoints, its lock, and what a signal does. Whole runs that are
killed, stopped and resumed are in test_train.py.

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

from files import Stopped, UserError
from harness import folder as folder_py
from harness.folder import Checkpoints, RunFolder, claim, claimed, ending_with, signals_wait, trim_log


@pytest.fixture
def handlers():
    """Restores the signal handlers of this process after the test."""
    before = {number: signal.getsignal(number) for number in folder_py.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def some_live():
    return {"master": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0), "half": torch.ones(4).bfloat16()}


def saved(folder, step):
    checkpoints = Checkpoints(folder, some_live())
    checkpoints.snapshot(some_live(), {"step": step, "cursor": 7 * step, "best": -1e9})
    checkpoints.save()


def loaded(folder):
    checkpoints = Checkpoints(folder, some_live())
    checkpoints.load()
    return checkpoints


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# -----------------------------------------------------------------------------
# Logs and checkpoints

def test_a_log_is_cut_back_to_the_whole_lines_of_earlier_steps(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    trim_log(path, 0)                                                     # none yet
    assert not capsys.readouterr().out
    trim_log(path, 3)
    assert "metrics.jsonl is missing" in capsys.readouterr().out
    lines = "".join(json.dumps({"step": step, "x": "é"}) + "\n" for step in (0, 0, 1, 2, 3, 3, 4))
    path.write_text(lines + '{"step": 1, "x"')                            # a line that a kill cut off
    trim_log(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 0, 1, 2]
    before = path.stat().st_mtime_ns
    trim_log(path, 3)
    assert path.stat().st_mtime_ns == before


def test_a_checkpoint_comes_back_bit_for_bit_and_the_last_two_are_kept(tmp_path, capsys):
    for step in (999_960, 999_980, 1_000_000):                            # by name, the last would be the first
        saved(tmp_path, step)
    assert names_in(tmp_path) == ["step_1000000", "step_999980"]
    checkpoints = loaded(tmp_path)
    assert checkpoints.counters == {"step": 1_000_000, "cursor": 7_000_000, "best": -1e9}
    for name, tensor in some_live().items():
        assert torch.equal(checkpoints.tensors[name], tensor) and checkpoints.tensors[name].dtype == tensor.dtype
    assert "step_1000000: continuing from here" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{1: 0.5}, (3, 4), torch.tensor(0.5), {3}])
def test_a_counter_that_json_would_change_is_refused_at_once(tmp_path, changed):
    with pytest.raises((AssertionError, TypeError)):
        Checkpoints(tmp_path, some_live()).snapshot(some_live(), {"step": 1, "mine": changed})


def test_saving_writes_the_last_whole_step_and_leaves_the_live_tensors_alone(tmp_path):
    # A save that rolled the live tensors back would, in an interrupted --resume, replace a trained adapter by an
    # untrained one.
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


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[-6] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_used(tmp_path, capsys, damage, name):
    for step in (3, 6):
        saved(tmp_path / "checkpoints", step)
    damage(tmp_path / "checkpoints/step_000006" / name)
    assert loaded(tmp_path / "checkpoints").counters["step"] == 3
    assert "step_000006: skipping damaged checkpoint" in capsys.readouterr().out
    left = names_in(tmp_path / "checkpoints")
    assert len(left) == 2 and left[0].startswith("damaged_step_000006") and left[1] == "step_000003"      # not lost
    damage(tmp_path / "checkpoints/step_000003" / name)
    with pytest.raises(Stopped, match=f"--adapter {tmp_path}/adapter"):
        loaded(tmp_path / "checkpoints")
    assert names_in(tmp_path / "checkpoints") == left                     # nothing is renamed: a disk may recover


def test_a_run_without_checkpoints_starts_from_step_0_unless_it_had_some(tmp_path):
    (tmp_path / "checkpoints" / ".step_000020.abcdefgh").mkdir(parents=True)         # as a kill leaves it
    assert loaded(tmp_path / "checkpoints").counters == {}
    saved(tmp_path / "checkpoints", 20)
    assert names_in(tmp_path / "checkpoints") == ["step_000020"]
    # Somebody deletes them to save space. Starting from step 0, --resume would cut the logs to nothing.
    (tmp_path / "adapter").mkdir()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(Stopped, match="--adapter"):
        loaded(tmp_path / "checkpoints")


@pytest.mark.parametrize("change", [{"foreign": torch.zeros(2)}, {"master": torch.zeros(3)}, {"step": torch.tensor(4)}])
def test_a_checkpoint_of_another_run_is_refused_and_left_alone(tmp_path, change):
    live = some_live() | change
    checkpoints = Checkpoints(tmp_path, live)
    checkpoints.snapshot(live, {"step": 3})
    checkpoints.save()
    with pytest.raises(Stopped, match="step_000003: is not a state of this run"):
        loaded(tmp_path)
    assert names_in(tmp_path) == ["step_000003"]


def killed_at(moment, save):
    """Runs save() in a process that is killed before its call number `moment` to the disk -> whether it ended."""
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


def test_a_kill_at_any_moment_of_saving_leaves_the_old_checkpoint_or_the_new(tmp_path):
    steps, done = [], False
    while not done:
        folder = tmp_path / str(len(steps))
        saved(folder, 1)
        saved(folder, 2)
        done = killed_at(len(steps), lambda: saved(folder, 3))
        steps.append(loaded(folder).counters["step"])
        saved(folder, 4)                                                  # what the kill left is no obstacle
        assert loaded(folder).counters["step"] == 4
    # fsync and replace of state.json, fsync of both and of their folder, rename, fsync, rmtree of step 1.
    assert steps == sorted(steps) and steps.count(2) >= 6 and steps.count(3) >= 3


# -----------------------------------------------------------------------------
# The folder of a run


@pytest.mark.parametrize("name", ["file", "file/x", "dangling", "taken"])
def test_an_out_that_cannot_be_a_new_folder_is_named_with_its_flag(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "taken" / ".base.x1").mkdir(parents=True)
    said = ".base.x1" if name == "taken" else f"--out {tmp_path}/{name}"      # a hidden file too
    with pytest.raises(UserError, match=said):
        claim(tmp_path / name, False)


def test_without_locks_a_folder_is_claimed_all_the_same(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("a file system without locks")

    monkeypatch.setattr(folder_py.fcntl, "flock", unsupported)
    claim(tmp_path / "x", False)
    assert (tmp_path / "x").is_dir()


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_that_cannot_begin_leaves_no_calibrated_base(tmp_path, resume):
    with pytest.raises(Stopped):
        with claimed(tmp_path, resume):
            (tmp_path / "base").mkdir()
            raise Stopped("before the first step")
    assert (tmp_path / "base").exists() == resume


def begun(path, step):
    """A run that has done so many steps; its adapter is a file."""
    def write_adapter(tensors, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter").write_bytes(tensors["master"].numpy().tobytes())

    folder = RunFolder(path, some_live(), write_adapter)
    assert folder.start({"lr": 1e-5}, resume=False) == {}
    for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl"):
        folder.log(name, [{"step": n} for n in range(step + 1)])
    folder.snapshot({"step": step})
    return folder


def test_a_resumed_run_has_its_checkpoints_state_its_adapter_and_logs_cut_back_to_it(tmp_path):
    folder = begun(tmp_path, 2)
    folder.checkpoints.save()                                             # a kill came before adapter/
    live = {name: torch.zeros_like(t) for name, t in some_live().items()}
    again = RunFolder(tmp_path, live, folder.write_adapter)
    assert again.start(json.loads((tmp_path / "run.json").read_text()), resume=True) == {"step": 2}
    assert all(torch.equal(live[name], t) for name, t in some_live().items())
    assert (tmp_path / "adapter/adapter").read_bytes() == live["master"].numpy().tobytes()
    for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [0, 1]
    again.note(steps=3)
    assert json.loads((tmp_path / "run.json").read_text()) == {"lr": 1e-5, "steps": 3}


def test_advice_names_the_folder_unless_the_run_cannot_go_on(tmp_path):
    (tmp_path / "my runs").mkdir()
    folder = RunFolder(tmp_path / "my runs", some_live(), None)
    assert folder.advice("continue with --resume") == ""                     # it had not begun
    folder.start({"reward": "my:score", "prompt_style": "boxed"}, resume=False)
    assert folder.advice("continue with --resume") == (
        f"continue with --resume --out '{tmp_path}/my runs' --reward my:score")          # or it would be refused
    assert folder.advice("") == ""                                        # the cause is of a kind that stays


def test_other_ranks_neither_read_nor_write(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_py, "RANK", 1)
    folder = RunFolder(tmp_path, some_live(), lambda *_: 1 / 0)
    folder.start({"lr": 1e-5}, resume=False)
    folder.snapshot({"step": 1})
    folder.log("metrics.jsonl", [{"step": 0}])
    folder.keep_adapter("best")
    assert folder.save() == "step 1 is saved" and not names_in(tmp_path)


# -----------------------------------------------------------------------------
# How a run ends

def test_no_librarys_except_exception_swallows_stopped():
    assert not issubclass(Stopped, Exception)


def test_a_signal_waits_until_files_and_memory_agree(handlers):
    done, before = [], [signal.getsignal(number) for number in folder_py.STOP_SIGNALS]
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        with signals_wait():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("log")
    assert done == ["log"] and [signal.getsignal(number) for number in folder_py.STOP_SIGNALS] == before


def end(error, save=lambda: "step 7 is saved"):
    with ending_with(save, lambda then: f"{then} --out x"):
        raise error


@pytest.mark.parametrize("error", [Stopped("stopped by SIGTERM"), OSError("disk full\nsecond line"),
                                   UserError("x.json: bad"), torch.OutOfMemoryError("no room\nsecond line")])
def test_an_end_that_is_no_bug_is_one_line_and_code_1(handlers, error):
    with pytest.raises(SystemExit) as stop:
        end(error)
    line = str(error).splitlines()[0]
    assert stop.value.code == (f"train.py: {line}; step 7 is saved; fix this, then continue with --resume --out x")


def test_a_bug_keeps_its_traceback_but_the_step_is_saved(handlers):
    calls = []
    with pytest.raises(ZeroDivisionError):
        end(ZeroDivisionError("bug"), lambda: calls.append(1))
    assert calls == [1]


def test_a_failed_save_is_told(handlers):
    with pytest.raises(SystemExit, match="stopped by SIGINT; the last step cannot be saved .disk full.*--resume"):
        end(Stopped("stopped by SIGINT"), lambda: (_ for _ in ()).throw(OSError("disk full")))


def test_a_second_signal_does_not_cut_the_saving_short(handlers):
    def save():
        os.kill(os.getpid(), signal.SIGTERM)                              # torchrun repeats it
        os.kill(os.getpid(), signal.SIGINT)
        saves.append("whole")

    saves = []
    with pytest.raises(SystemExit):
        with ending_with(save, str):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    assert saves == ["whole"]
