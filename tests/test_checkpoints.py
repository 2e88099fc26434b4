"""
The folder of a run survives any end: its logs, its checkpoints, its lock, and what a signal does. Whole runs that are
killed, stopped and resumed are in test_train.py.

python -m pytest tests/test_checkpoints.py -v
"""
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from files import Stopped
from harness import folder as folder_py
from harness.folder import Checkpoints, RunFolder, ending_with, signals_wait, trim_log


@pytest.fixture
def handlers():
    """Restores the signal handlers of this process after the test."""
    before = {number: signal.getsignal(number) for number in folder_py.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def some_live():
    return {"master": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0)}


# -----------------------------------------------------------------------------
# Logs

def test_a_log_is_cut_back_to_the_whole_lines_of_earlier_steps(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    trim_log(path, 3)
    assert capsys.readouterr().out == f"{path}: holds 0 of the 3 steps done\n"
    lines = "".join(json.dumps({"step": step, "x": "é"}) + "\n" for step in (0, 0, 1, 2, 3, 3, 4))
    path.write_text(lines + '{"step": 1, "x"')                            # a line that a kill cut off
    trim_log(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 0, 1, 2]
    before = path.stat().st_mtime_ns
    trim_log(path, 3)
    assert path.stat().st_mtime_ns == before and capsys.readouterr().out == ""
    trim_log(path, 9, has_every_step=False)                               # as of evaluations
    assert path.stat().st_mtime_ns == before and capsys.readouterr().out == ""


@pytest.mark.parametrize("line", ["x", "[]", "3", "null", "{}", "\xff",
                                  '{"step": "1"}', '{"step": 1.5}', "[" * 100_000])
def test_a_line_that_no_run_wrote_is_named_and_nothing_is_cut(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line.encode("latin-1") + b'\n{"step": 1}\n{"st')
    before = path.read_bytes()
    with pytest.raises(Stopped, match="metrics.jsonl:2: no line of a run"):
        trim_log(path, 1)
    assert path.read_bytes() == before


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="metrics.jsonl: no regular file"):
        trim_log(tmp_path / "metrics.jsonl", 1)


def test_numbers_that_are_not_finite_are_null_in_a_log(tmp_path):
    folder = RunFolder(tmp_path, some_live(), lambda *_: None)
    folder.log("a.jsonl", [{"x": float("nan"), "parts": {"y": -float("inf")}, "z": 1}])
    assert (tmp_path / "a.jsonl").read_text() == '{"x": null, "parts": {"y": null}, "z": 1}\n'


# -----------------------------------------------------------------------------
# Checkpoints

def saved(folder, step, live=None):
    checkpoints = Checkpoints(folder, live or some_live())
    checkpoints.snapshot(live or some_live(), {"step": step, "cursor": 7 * step})
    checkpoints.save()
    return checkpoints


def loaded(folder):
    checkpoints = Checkpoints(folder, some_live())
    return checkpoints, checkpoints.load()


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    live = {"master": torch.randn(5, 3), "step": torch.tensor(3.0), "half": torch.randn(4).bfloat16()}
    checkpoints = Checkpoints(tmp_path, live)
    counters = {"step": 40, "cursor": 3, "loss_scale": 2.0**14, "tokens": 10**12}
    checkpoints.snapshot(live, counters)
    checkpoints.save()
    other = Checkpoints(tmp_path, live)
    lines = other.load()
    assert other.counters == counters and lines == [f"{tmp_path / 'step_000040'}: going on from here"]
    assert all(torch.equal(other.tensors[name], live[name]) and other.tensors[name].dtype == live[name].dtype
               for name in live)
    assert other.tensors.keys() == live.keys()


@pytest.mark.parametrize("changed", [{1: 0.5}, (3, 4), torch.tensor(0.5), {3}])
def test_a_counter_that_json_would_change_is_refused_at_once(tmp_path, changed):
    """It would come back as another value; a key that is a number would also make the checksum fail."""
    checkpoints = Checkpoints(tmp_path, some_live())
    with pytest.raises(AssertionError, match="mine is .*, of which a checkpoint would make"):
        checkpoints.snapshot(some_live(), {"step": 1, "mine": changed})
    kept = {"step": 1, "mine": {"seen": [3, 4], "of": {"x": 0.1}}, "best": -1e9}
    checkpoints.snapshot(some_live(), kept)
    checkpoints.save()
    other, _ = loaded(tmp_path)
    assert other.counters == kept


def test_saving_writes_the_last_whole_step_and_leaves_the_live_tensors_alone(tmp_path):
    # A save that rolled the live tensors back would, in an interrupted --resume, replace a trained adapter by an
    # untrained one.
    live = some_live()
    whole = {name: t.clone() for name, t in live.items()}
    folder = RunFolder(tmp_path, live, lambda tensors, path: written.append((tensors["master"].clone(), path)))
    written = []
    folder.snapshot({"step": 2})
    with torch.no_grad():                                                 # the middle of step 2
        live["master"].mul_(-3).add_(0.25)
        live["step"].add_(1)
    now = {name: t.clone() for name, t in live.items()}
    addresses = {name: t.data_ptr() for name, t in live.items()}
    assert folder.save() == "step 2 is saved"
    for name, t in live.items():
        assert torch.equal(t, now[name]) and not torch.equal(t, whole[name]) and t.data_ptr() == addresses[name]
    on_disk = load_file(tmp_path / "checkpoints/step_000002/state.safetensors")
    assert all(torch.equal(on_disk[name], whole[name]) for name in whole)
    (master, path), = written
    assert torch.equal(master, whole["master"]) and path == tmp_path / "adapter"


def test_before_the_first_whole_step_there_is_nothing_to_save(tmp_path):
    def write(*_):
        raise AssertionError("there is no step to write the adapter of")

    assert RunFolder(tmp_path, some_live(), write).save() == "nothing was changed"
    assert not list(tmp_path.iterdir())


def test_the_last_two_checkpoints_are_kept_and_none_is_written_twice(tmp_path):
    for step in (1, 2, 10):
        saved(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000010"]
    before = (tmp_path / "step_000010/state.json").stat().st_mtime_ns
    saved(tmp_path, 10, {"master": torch.zeros(2, 3), "step": torch.tensor(0.0)})
    assert (tmp_path / "step_000010/state.json").stat().st_mtime_ns == before


def cut_tensors(folder):
    os.truncate(folder / "state.safetensors", (folder / "state.safetensors").stat().st_size - 1)


def flip_a_bit(folder):
    data = bytearray((folder / "state.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "state.safetensors").write_bytes(data)


def change_a_counter(folder):
    counters = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(counters | {"cursor": counters["cursor"] + 1}))


def lose_the_sum(folder):
    counters = json.loads((folder / "state.json").read_text())
    del counters["sha256"]
    (folder / "state.json").write_text(json.dumps(counters))


def cut_counters(folder):
    os.truncate(folder / "state.json", 5)


def lose_tensors(folder):
    (folder / "state.safetensors").unlink()


DAMAGES = cut_tensors, flip_a_bit, lose_tensors, change_a_counter, lose_the_sum, cut_counters


def test_copies_that_the_user_made_of_a_checkpoint_are_neither_counted_nor_read_nor_removed(tmp_path):
    saved(tmp_path, 3)
    others = "step_000003_keep", "step_000003_best", "step_000009.bak", "step_a", ".step_backup", ".step_000001.abc"
    for name in others:
        shutil.copytree(tmp_path / "step_000003", tmp_path / name)
    for step in (6, 9, 12):
        saved(tmp_path, step)
    (tmp_path / ".step_000015.a1b2c3d4").mkdir()            # a kill cut the writing of step 15 short
    saved(tmp_path, 18)
    assert {p.name for p in tmp_path.iterdir()} == {*others, "step_000012", "step_000018"}
    checkpoints, lines = loaded(tmp_path)
    assert lines == [f"{tmp_path / 'step_000018'}: going on from here"] and checkpoints.counters["step"] == 18


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_used(tmp_path, damage):
    saved(tmp_path, 3)
    saved(tmp_path, 6)
    damage(tmp_path / "step_000006")
    checkpoints, lines = loaded(tmp_path)
    assert lines[0].startswith(f"{tmp_path / 'step_000006'}: damaged checkpoint passed over: ")
    assert lines[1:] == [f"{tmp_path / 'step_000003'}: going on from here"] and checkpoints.counters["step"] == 3
    left = sorted(p.name for p in tmp_path.iterdir())
    assert len(left) == 2 and left[0].startswith("damaged_step_000006_") and left[1] == "step_000003"       # not lost
    damage(tmp_path / "step_000003")
    with pytest.raises(Stopped, match=f"{tmp_path}: no checkpoint is whole; a start from step 0 would replace the "
                                      "run's adapter and logs: begin another, with --adapter .*/adapter$"):
        loaded(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == left                  # nothing is renamed: a disk may recover


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_step_0(tmp_path):
    checkpoints, lines = loaded(tmp_path)
    assert lines == [f"{tmp_path}: no checkpoint, starting from step 0"] and checkpoints.counters == {}


def test_a_run_that_was_killed_while_it_wrote_its_first_checkpoint_starts_from_step_0(tmp_path):
    (tmp_path / ".step_000020.abcd").mkdir()                 # as files.new_folder leaves it
    assert loaded(tmp_path)[1] == [f"{tmp_path}: no checkpoint, starting from step 0"]
    (tmp_path / "damaged_step_000040_1").mkdir()             # it had got further
    with pytest.raises(Stopped, match="no checkpoint is whole"):
        loaded(tmp_path)


def test_the_last_two_checkpoints_are_those_of_the_highest_steps(tmp_path):
    """By name, step_1000000 would stand before step_999980."""
    for step in (999_960, 999_980, 1_000_000, 1_000_020):
        saved(tmp_path, step)
    assert {path.name for path in tmp_path.iterdir()} == {"step_1000000", "step_1000020"}
    assert loaded(tmp_path)[0].counters["step"] == 1_000_020


@pytest.mark.parametrize("change", [
    dict(master=None), dict(foreign=torch.zeros(2)), dict(master=torch.zeros(3)), dict(step=torch.tensor(4)),
    {"counter": ("step", 7)}])
def test_a_checkpoint_of_another_run_or_step_ends_in_one_line_and_is_left_alone(tmp_path, change):
    counters = {"step": 3, "cursor": 21} | dict([change.pop("counter")] if "counter" in change else [])
    tensors = save({name: t for name, t in (some_live() | change).items() if t is not None})
    folder = tmp_path / "step_000003"
    folder.mkdir()
    (folder / "state.safetensors").write_bytes(tensors)
    (folder / "state.json").write_text(json.dumps(counters | {"sha256": folder.digest(tensors, counters)}))
    with pytest.raises(Stopped, match="step_000003: holds no state of this run: {'step': ") as error:
        loaded(tmp_path)
    assert "\n" not in str(error.value) and [p.name for p in tmp_path.iterdir()] == ["step_000003"]


@pytest.mark.parametrize("remove", [lambda folder: shutil.rmtree(folder), lambda folder: None])
def test_a_run_whose_checkpoints_were_deleted_does_not_start_over_its_adapter(tmp_path, remove):
    """Somebody deletes them to save space. Starting from step 0, --resume would cut the logs to nothing."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "checkpoints").mkdir()
    remove(tmp_path / "checkpoints")
    with pytest.raises(Stopped, match="/checkpoints: no checkpoint is left; .* begin another, with --adapter"):
        loaded(tmp_path / "checkpoints")


@pytest.mark.parametrize("text", ["[]", "3", "null", "[" * 100_000, "x", ""])
def test_a_checkpoint_whose_counters_are_no_object_is_damaged(tmp_path, text):
    saved(tmp_path, 2)
    saved(tmp_path, 3)
    (tmp_path / "step_000003" / "state.json").write_text(text)
    assert "damaged checkpoint passed over" in loaded(tmp_path)[1][0]


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

        for module, name in ((os, "fsync"), (os, "replace"), (os, "link"), (shutil, "rmtree")):
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
        checkpoints, lines = loaded(folder)
        assert len(lines) == 1 and checkpoints.counters["step"] in (2, 3)
        assert torch.equal(checkpoints.tensors["master"], some_live()["master"])
        steps.append(checkpoints.counters["step"])
        saved(folder, 4)                                                  # what the kill left is no obstacle
        assert loaded(folder)[0].counters["step"] == 4
    # fsync and replace of two files, fsync of both and of their folder, (rename,) fsync, rmtree of step 1.
    assert steps == sorted(steps) and steps.count(2) >= 6 and steps.count(3) >= 3


def test_a_full_disk_raises_and_gives_the_space_back(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
        saved(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


# -----------------------------------------------------------------------------
# The folder of a run

def test_a_folder_belongs_to_one_run_while_its_process_lives(tmp_path):
    code = ("import sys, pathlib; from harness.folder import claim; claim(pathlib.Path(sys.argv[1]), False); "
            "print('mine', flush=True); input()")
    root = Path(folder_py.__file__).parent.parent
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], cwd=root, text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout.readline() == "mine\n"
    for resume in (False, True):
        with pytest.raises(ValueError, match="--out .*/x: another run is writing there"):
            folder_py.claim(tmp_path / "x", resume)
    owner.kill()
    owner.wait()
    folder_py.claim(tmp_path / "x", False)


@pytest.mark.parametrize("name,why", [("file", "is no folder"), ("file/x", "Not a directory"),
                                      ("dangling", "is no folder")])
def test_an_out_that_cannot_be_a_folder_is_named_with_its_flag(tmp_path, name, why):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"^--out {tmp_path}/{name}: {why}$"):
        folder_py.claim(tmp_path / name, False)


def test_a_folder_that_is_refused_keeps_all_its_files_and_what_a_kill_left_goes(tmp_path):
    left_by_a_kill = ".run.json.17.tmp", ".run.json.17.new", "..run.json.17.new.17.tmp"
    users = ".run.json.swp", ".old.run.json.bak", "notes.txt"
    for folder, names in (("taken", left_by_a_kill + users), ("free", left_by_a_kill)):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("x")
    with pytest.raises(ValueError, match="is not empty: choose another folder$"):
        folder_py.claim(tmp_path / "taken", False)
    assert {p.name for p in (tmp_path / "taken").iterdir()} == {*left_by_a_kill, *users}
    folder_py.claim(tmp_path / "free", False)             # empty but for what the kill left
    assert not list((tmp_path / "free").iterdir())


def test_a_run_that_cannot_begin_leaves_nothing_and_takes_nothing_that_others_made(tmp_path):
    def fail(name, resume=False):
        with folder_py.claimed(tmp_path / name, resume):
            (tmp_path / name / "base").mkdir(exist_ok=True)
            (tmp_path / name / "base" / "model.safetensors").write_text("")
            raise Stopped("before the first step")

    with pytest.raises(Stopped):
        fail("new")
    assert not list(tmp_path.iterdir())
    with pytest.raises(Stopped):
        fail("a/folder/in/it")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    with pytest.raises(Stopped):
        fail("mine")
    (tmp_path / "mine").rmdir()                             # it is there, and empty
    (tmp_path / "taken" / "base").mkdir(parents=True)
    with pytest.raises(ValueError, match="taken holds only base, left by a run that was killed before its first step"):
        fail("taken")
    (tmp_path / "cut" / ".base.x1y2").mkdir(parents=True)   # the kill came while base/ was written
    with pytest.raises(ValueError, match="cut holds only .base.x1y2, left by a run that was killed"):
        fail("cut")
    (tmp_path / "full" / "of").mkdir(parents=True)
    with pytest.raises(ValueError, match="full is not empty: choose another folder$"):
        fail("full")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="begun is not empty: choose another folder, or --resume it$"):
        fail("begun")
    assert sorted(tmp_path.rglob("*/*")) == [tmp_path / "begun" / "run.json", tmp_path / "cut" / ".base.x1y2",
                                                tmp_path / "full" / "of", tmp_path / "taken" / "base"]
    (tmp_path / "resumed").mkdir()
    with pytest.raises(Stopped):
        fail("resumed", resume=True)
    assert (tmp_path / "resumed" / "base" / "model.safetensors").exists()


def test_without_locks_the_second_run_fails_to_create_run_json(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_py, "fcntl", None)
    for _ in range(2):
        folder_py.claim(tmp_path, False)
    RunFolder(tmp_path, some_live(), lambda *_: None).start({}, resume=False)
    with pytest.raises(FileExistsError):
        RunFolder(tmp_path, some_live(), lambda *_: None).start({}, resume=False)


def test_a_new_run_writes_its_flags_first(tmp_path):
    folder = RunFolder(tmp_path, some_live(), lambda *_: None)
    assert folder.start({"lr": 1e-5, "model": "x"}, resume=False) == {}
    assert json.loads((tmp_path / "run.json").read_text()) == {"lr": 1e-5, "model": "x"}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_resumed_run_has_its_checkpoints_state_and_logs_cut_back_to_it(tmp_path, capsys):
    saved(tmp_path / "checkpoints", 2)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
    (tmp_path / "run.json").write_text('{"ended": null}')
    live, written = {name: torch.zeros_like(t) for name, t in some_live().items()}, []
    addresses = [t.data_ptr() for t in live.values()]
    folder = RunFolder(tmp_path, live, lambda tensors, path: written.append(tensors["master"].clone()))
    assert folder.start({}, resume=True) == {"step": 2, "cursor": 14}
    assert all(torch.equal(live[name], t) for name, t in some_live().items())
    assert addresses == [t.data_ptr() for t in live.values()]
    assert len(written) == 1 and torch.equal(written[0], live["master"])  # adapter/: a kill may come between the two
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [0, 1]
    assert "step_000002: going on from here" in capsys.readouterr().out
    assert (tmp_path / "run.json").read_text() == '{"ended": null}'       # its own flags stay as they are


def files_in(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def begun(path, step=2):
    """A run of three steps that has done two of them; its adapter is a file."""
    def write_adapter(tensors, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter").write_bytes(tensors["master"].numpy().tobytes())

    path.mkdir(exist_ok=True)
    folder = RunFolder(path, some_live(), write_adapter)
    folder.start({"steps": 3, "lr": 1e-5}, resume=False)
    folder.snapshot({"step": step})
    return folder


def test_a_resumed_run_that_had_ended_changes_no_file(tmp_path):
    folder = begun(tmp_path, step=3)
    folder.save()
    folder.finish()
    assert json.loads((tmp_path / "run.json").read_text())["ended"]
    before = files_in(tmp_path)
    again = RunFolder(tmp_path, some_live(), folder.write_adapter)
    assert again.start({}, resume=True) == {"step": 3}
    again.finish()
    assert files_in(tmp_path) == before


def test_a_folder_that_was_moved_gets_the_last_step_where_it_is_and_its_name_stays_free(tmp_path):
    folder = begun(tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "my runs")
    (tmp_path / "x").mkdir()                                              # another run has the name by now
    with pytest.raises(Stopped, match="/x was moved to .*/my runs while the run wrote there") as stop:
        folder.log("metrics.jsonl", [{"step": 2}])
    assert folder.save() == "step 2 is saved" and not any((tmp_path / "x").iterdir())
    assert (tmp_path / "my runs/checkpoints/step_000002/state.json").exists()
    assert folder.advice(stop.value.then) == f"go on with --resume --out '{tmp_path}/my runs'"


@pytest.mark.parametrize("act", [lambda folder: folder.log("metrics.jsonl", [{"step": 2}]),
                                 lambda folder: folder.note(ended="today")])
def test_a_folder_that_was_removed_is_not_made_again_and_nothing_is_advised(tmp_path, act):
    folder = begun(tmp_path / "x")
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(Stopped, match="/x was removed or moved away while the run wrote there") as stop:
        act(folder)
    assert folder.save() == "step 2 cannot be saved" and not list(tmp_path.iterdir())
    assert folder.advice(stop.value.then) == ""


def test_without_its_run_json_a_run_ends_and_is_saved_but_cannot_go_on(tmp_path):
    folder = begun(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(Stopped, match="run.json was removed while the run went on") as stop:
        folder.log("metrics.jsonl", [{"step": 2}])
    assert folder.save() == "step 2 is saved"
    (tmp_path / "metrics.jsonl").touch()
    assert folder.advice(stop.value.then).startswith(f"the run cannot go on: {tmp_path}/run.json: cannot be read")


def test_advice_is_given_where_it_helps(tmp_path):
    folder = begun(tmp_path)
    out = f" --out {tmp_path}"
    assert folder.advice("go on with --resume") == f"go on with --resume{out}"
    assert folder.advice(Stopped("disk full").then) == f"once that is mended, go on with --resume{out}"
    assert folder.advice("") == ""                                        # the cause is of a kind that stays
    folder.snapshot({"step": 3})
    assert folder.advice("go on with --resume") == "that was its last step"
    (tmp_path / "run.json").write_text('{"steps": 3')
    assert folder.advice("go on with --resume").startswith("the run cannot go on: ")
    (tmp_path / "new").mkdir()
    assert RunFolder(tmp_path / "new", some_live(), None).advice("go on with --resume") == "the run had not begun"


@pytest.mark.parametrize("resume", [False, True])
def test_a_kill_while_run_json_is_written_leaves_the_old_file_or_the_new(tmp_path, resume):
    seen, done = [], False
    while not done:
        path = tmp_path / str(len(seen))
        folder = begun(path) if resume else RunFolder(path, some_live(), None)
        path.mkdir(exist_ok=True)
        write = (lambda: folder.note(lr=1.0)) if resume else (lambda: folder.start({"lr": 1.0}, False))
        done = killed_at(len(seen), write)
        folder_py.claim(path, resume or (path / "run.json").exists())   # what was cut off is in nobody's way
        text = (path / "run.json").read_text() if (path / "run.json").exists() else "{}"
        seen.append(json.loads(text).get("lr"))
        assert [p.name for p in path.iterdir()] == ["run.json"] * (seen[-1] is not None)
    old = 1e-5 if resume else None
    assert seen == sorted(seen, key=lambda lr: lr == 1.0) and old in seen and seen[-1] == 1.0


def test_a_folder_whose_run_json_is_not_whole_is_not_offered_to_resume(tmp_path):
    (tmp_path / "run.json").touch()
    with pytest.raises(ValueError, match="is not empty: choose another folder$"):
        folder_py.claim(tmp_path, False)


def test_other_ranks_neither_read_nor_write(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_py, "RANK", 1)
    folder = RunFolder(tmp_path, some_live(), lambda *_: (_ for _ in ()).throw(AssertionError("rank 1 wrote")))
    folder.snapshot({"step": 1})
    folder.log("metrics.jsonl", [{"step": 0}])
    assert folder.save() == "step 1 is saved" and not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# How a run ends

def test_no_librarys_except_exception_swallows_stopped():
    assert not issubclass(Stopped, Exception)


def test_a_signal_waits_until_files_and_memory_agree(handlers):
    def whole():
        with signals_wait():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("log")
            done.append("keep")

    done, before = [], [signal.getsignal(number) for number in folder_py.STOP_SIGNALS]
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        whole()
    assert done == ["log", "keep"] and [signal.getsignal(number) for number in folder_py.STOP_SIGNALS] == before
    with signals_wait():
        pass


def end(error, save=lambda: "step 7 is saved"):
    with ending_with(save, lambda then: f"{then} --out x"):
        raise error


@pytest.mark.parametrize("error", [Stopped("stopped by SIGTERM"), OSError("disk full\nsecond line"),
                                   torch.OutOfMemoryError("no room\nsecond line")])
def test_an_end_that_is_no_bug_is_one_line_and_code_1(handlers, capsys, error):
    with pytest.raises(SystemExit) as stop:
        end(error)
    assert stop.value.code == 1
    line = str(error).splitlines()[0]
    told = f"train.py: {line}; step 7 is saved; once that is mended, go on with --resume --out x\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("error,line", [
    (Stopped("stopped by SIGTERM", "go on with --resume"), ""), (Stopped("no state of this run", ""), ""),
    (Stopped("--reward r: broke"), "train.py: rank 1: --reward r: broke\n"),
    (OSError("disk full"), "train.py: rank 1: disk full\n")])
def test_a_rank_other_than_0_says_what_it_alone_met(handlers, capsys, monkeypatch, error, line):
    monkeypatch.setattr(folder_py, "RANK", 1)
    with pytest.raises(SystemExit):
        end(error)
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), AssertionError("bug"), RuntimeError("bug")])
def test_a_bug_keeps_its_traceback_but_the_step_is_saved(handlers, capsys, error):
    calls = []
    with pytest.raises(type(error), match="bug"):
        end(error, lambda: calls.append(1))
    assert calls == [1] and capsys.readouterr().err == ""


def test_a_failed_save_is_reported_and_earlier_checkpoints_are_kept(handlers, capsys):
    def full():
        raise OSError("disk full")

    with pytest.raises(SystemExit):
        end(Stopped("stopped by SIGINT"), full)
    assert ("stopped by SIGINT; the last step cannot be saved (disk full), earlier checkpoints are whole; once"
            in capsys.readouterr().err)


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


def test_a_block_that_ends_normally_saves_nothing(handlers):
    saves = []
    with ending_with(lambda: saves.append("early"), str):
        pass
    assert saves == []
