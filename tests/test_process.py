"""
Wrong input, signals and Ctrl-C end a program with one line at any moment; a bug keeps its traceback.

python -m pytest tests/test_process.py -v
"""
import os
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers import HERE, ROOT, write_sums

import env
import weights
from files import Stopped, UserError

TINY = str(ROOT / "tiny")


def run(*argv, cwd, code=None, **more):
    """Runs a program, or code. -> its exit code and output."""
    command = [sys.executable, *(["-c", code] if code else []), *map(str, argv)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | more)
    return done.returncode, done.stdout + done.stderr


def run_here(folder, monkeypatch, program, *flags):
    """Runs a program in this process, which already imported torch."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / program), *flags])
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at,program,flags", [
    ("harness.setup.load", "evaluate.py", ["--model", TINY, "--data", "sums.jsonl", "--out", "x.jsonl"]),
    ("weights.write_json", "tools/convert.py", ["nvfp4", TINY, "out"])])  # after the weights are written
def test_signal_is_one_line_and_leaves_no_file(tmp_path, monkeypatch, at, program, flags, number):
    monkeypatch.setattr(at, lambda *_, **__: signal.raise_signal(number))
    write_sums(tmp_path / "sums.jsonl", range(4))
    with pytest.raises(SystemExit, match=f"^[a-z. -]*: stopped by {number.name}$"):
        run_here(tmp_path, monkeypatch, program, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["sums.jsonl"]


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("hangups,stop", [("SIG_IGN", False), ("SIG_DFL", True)])
def test_sighup_stops_program_except_under_nohup(tmp_path, hangups, stop):
    code = f"""
import os, signal
signal.signal(signal.SIGHUP, signal.{hangups})
import env
with env.one_line():
    os.kill(os.getpid(), signal.SIGHUP)
    print("continues")
"""
    assert run(cwd=tmp_path, code=code) == ((1, "-c: stopped by SIGHUP\n") if stop else (0, "continues\n"))


@pytest.mark.skipif(os.name != "posix", reason="Windows has no fork")
def test_signals_end_forked_process_quietly_also_during_a_save(tmp_path):
    code = """
import env, multiprocessing, signal
def end_children(then=None):
    for number in env.SIGNALS:
        child = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=[number])
        child.start()
        child.join()
        print(child.exitcode)
with env.one_line(end_children):
    end_children()
    raise SystemExit
"""
    ends = "".join(f"{-number}\n" for number in env.SIGNALS)
    assert run(cwd=tmp_path, code=code) == (0, ends * 2)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no fork")
@pytest.mark.parametrize("end,status", [("sys.exit(3)", 3), ("0.0", 0)])
def test_process_forked_by_users_code_ends_there(tmp_path, end, status):
    (tmp_path / "forks.py").write_text(f"""
import os, sys
def f():
    return os.waitpid(child, 0)[1] >> 8 if (child := os.fork()) else {end}
""")
    code = "from tasks.plugin import *\nprint(call_users('', load_function('forks:f', ''), ''))"
    assert run(cwd=tmp_path, code=code) == (0, f"{status}\n")


# -----------------------------------------------------------------------------
# Wrong input

@pytest.mark.parametrize("name,value", [
    *(("WORLD_SIZE", value) for value in ("abc", "", "0", "-2", "1.5")),
    *((name, value) for name in ("RANK", "LOCAL_RANK") for value in ("abc", "", "-1", "2"))])
def test_wrong_rank_is_one_line(tmp_path, name, value):
    status, text = run(cwd=tmp_path, code="import env", **{"WORLD_SIZE": "2", name: value})
    assert status == 1 and f" {name}={value}, " in text and text.count("\n") == 1


COMMANDS = [line.split(" => ") for line in (HERE / "wrong_input.txt").read_text().splitlines() if " => " in line]


@pytest.mark.parametrize("command,named", [
    *COMMANDS, (f"tools/chat.py --model TINY --question {'1+' * 2000}", "no room"),
    (f"evaluate.py --model TINY --data taken/my.jsonl --out {'x' * 250}", "cannot be written (File name too long")])
def test_wrong_input_is_named_before_any_download(tmp_path, monkeypatch, capfd, command, named):
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken").mkdir()
    problems = Path(write_sums(tmp_path / "taken/my.jsonl", range(4))).read_text()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit) as stop:                # prints the text and exits with 1, or argparse did
        run_here(tmp_path, monkeypatch, *shlex.split(command.replace("TINY", TINY)))
    line = capfd.readouterr().err.splitlines()[-1] if stop.value.code == 2 else stop.value.code
    assert named.replace("TINY", TINY) in line and "\n" not in line
    assert (tmp_path / "taken/my.jsonl").read_text() == problems
    assert {path.name for path in tmp_path.rglob("*")} - {"runs", "tiny-nvfp4-my-0"} == {"folder", "taken", "my.jsonl"}


@pytest.mark.parametrize("argv", [["train.py", "--max-new-tokens", "8"], ["evaluate.py"]])
def test_wrong_data_is_found_before_weights_are_downloaded(tmp_path, monkeypatch, argv):
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1"}\n')
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda name, repo_type, allow_patterns: asked.extend(allow_patterns) or TINY)
    with pytest.raises(SystemExit, match="bad.jsonl:1"):
        run_here(tmp_path, monkeypatch, *argv, "--model", "some/model", "--data", "bad.jsonl", "--device", "cpu")
    assert "*.json" in asked and not any("safetensors" in pattern for pattern in asked)
    weights.ModelFolder("some/model").download()
    assert "model*.safetensors" in asked


@pytest.mark.parametrize("error,line", [
    (UserError("x.json: bad\nmore"), "x.json: bad"), (OSError(), "OSError"), (Stopped("stopped"), "stopped"),
    (FileExistsError(17, "File exists", "x"), "File exists: 'x'"), (MemoryError("big"), "not enough memory: big"),
    (RuntimeError("you tried to allocate 9 bytes"), "not enough memory: you tried to allocate 9 bytes")])
@pytest.mark.parametrize("file,called", [("tools/report.py", "python -m tools.report"), ("train.py", "train.py")])
def test_expected_error_is_one_line(error, line, file, called, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / file)])
    with pytest.raises(SystemExit) as stop:
        with env.one_line():
            raise error
    assert stop.value.code == f"{called}: {line}"


@pytest.mark.parametrize("code,status", [
    ("os.dup2(os.pipe()[1], 1)\nos.closerange(3, 9)\nwith env.one_line():\n    print(1)", 1),
    ("env.signal.raise_signal(2)", -2)])
def test_closed_stdout_and_early_ctrl_c_end_quietly(code, status):
    assert run(cwd=ROOT, code=f"import env, os\n{code}") == (status, "")


def test_output_is_unbuffered_in_any_encoding(tmp_path):
    code = "import env, os\nprint('\u03c0')\nos.kill(os.getpid(), 9)"
    environment = dict(PYTHONUNBUFFERED="", PYTHONIOENCODING="ascii")
    assert run(cwd=tmp_path, code=code, **environment) == (-9, "\\u03c0\n")


@pytest.mark.parametrize("bug", [lambda: max([]), lambda: int("x"), lambda: 1 / 0, lambda: {}["x"],
                                 lambda: torch.zeros(2) @ torch.zeros(3)])
def test_bug_keeps_traceback_and_saves_step(bug, capsys):
    with pytest.raises((ArithmeticError, LookupError, RuntimeError, ValueError)):
        with env.one_line(lambda then: "step 7 is saved"):
            bug()
    assert "step 7 is saved" in capsys.readouterr().err


def test_bug_on_a_rank_exits_at_once_after_traceback(tmp_path):
    """A normal exit would wait for the other ranks."""
    code = "import atexit, env\natexit.register(print, 'normal exit')\nprint('before')\nwith env.one_line():\n    1 / 0"
    status, output = run(cwd=tmp_path, code=code, WORLD_SIZE="2")
    assert status == 1 and "ZeroDivisionError" in output and "before" in output and "normal" not in output
