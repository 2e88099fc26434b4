"""
Wrong input, signals and Ctrl-C end a program in one line, whatever the moment; a bug keeps its traceback. Also how long
--help takes.

python -m pytest tests/test_process.py -v
"""
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch

import env
import model
import weights
from files import Stopped, first_line

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "tiny")
# Runs the program that sys.argv[1:] names, and interrupts it where it loads its model.
INTERRUPTED = """
import model, runpy, signal, sys
model.load = lambda *_: signal.raise_signal(signal.SIGINT)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*argv, cwd, code=None):
    command = [sys.executable, *(["-c", code] if code else []), *map(str, argv)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})
    return done.returncode, done.stdout + done.stderr


def run_here(folder, monkeypatch, program, *flags):
    """Runs a program in this process, which takes no time to import torch."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / program), *flags])
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("argv", [
    ["evaluate.py", "--model", TINY, "--data", "arithmetic", "--device", "cpu", "--out", "x.jsonl"],
    ["tools/chat.py", "--model", TINY, "--device", "cpu", "--question", "1+1?"]])
def test_ctrl_c_while_loading_leaves_no_file(tmp_path, monkeypatch, ctrl_c_interrupts, argv):
    monkeypatch.setattr(model, "load", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):                 # process.report_uncaught prints the line
        run_here(tmp_path, monkeypatch, *argv)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_ctrl_c_while_loading_is_one_line_and_code_130(tmp_path):
    status, said = run(ROOT / "train.py", "--device", "cpu", "--out", "x", cwd=tmp_path, code=INTERRUPTED)
    assert status == 130 and said.splitlines()[-1] == "train.py: stopped by Ctrl-C" and "Traceback" not in said
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("number,end", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_in_convert_leaves_no_half_folder(tmp_path, monkeypatch, ctrl_c_interrupts, number, end):
    monkeypatch.setattr(weights, "write_json", lambda *_: signal.raise_signal(number))         # the weights are there
    with pytest.raises(end) as stop:
        run_here(tmp_path, monkeypatch, "tools/convert.py", "nvfp4", TINY, "out")
    assert end is KeyboardInterrupt or stop.value.code == "convert nvfp4: stopped by SIGTERM"
    assert not list(tmp_path.iterdir())


def test_the_memory_and_thread_settings_are_made_before_torch_is_imported(tmp_path):
    """Made afterwards, torch would ignore them without a word."""
    code = """
import os, sys
import env
print("torch" in sys.modules, os.environ["PYTORCH_CUDA_ALLOC_CONF"], os.environ["OMP_WAIT_POLICY"])
import torch
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
"""
    told = "PYTORCH_CUDA_ALLOC_CONF", "OMP_WAIT_POLICY"
    env = {key: value for key, value in os.environ.items() if key not in told} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["False", "expandable_segments:True", "PASSIVE"], done.stderr


@pytest.mark.skipif(os.name != "posix", reason="only there a program inherits which signals are ignored")
def test_these_tests_pass_whatever_signals_the_caller_ignores(tmp_path):
    """As under nohup, which ignores SIGHUP, and in the background of a shell script, which ignores SIGINT."""
    def ignore():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    names = "ctrl_c_while_loading or lost_terminal"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", names, __file__]
    done = subprocess.run(command, preexec_fn=ignore, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("hangups,stop", [("SIG_IGN", False), ("SIG_DFL", True)])
def test_a_lost_terminal_stops_a_program_but_not_under_nohup(tmp_path, hangups, stop):
    code = f"""
import os, signal
signal.signal(signal.SIGHUP, signal.{hangups})
import env
with env.one_line("me"):
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on")
"""
    assert run(cwd=tmp_path, code=code) == ((1, "me: stopped by SIGHUP\n") if stop else (0, "goes on\n"))


def test_ctrl_c_while_libraries_are_imported_is_one_line(tmp_path):
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), "--device", "cpu"]
    process = subprocess.Popen(command, text=True, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for line in process.stderr:
        if "| env" in line:                                           # torch comes next
            break
    env.send_signal(signal.SIGINT)
    said = process.stderr.read()
    assert env.wait(30) == 130 and "Traceback" not in said
    assert said.splitlines()[-1] == "train.py: stopped by Ctrl-C"


@pytest.mark.parametrize("argv,words", [
    (["train.py", "--lr", "nan"], "--lr must lie in (0, 10], got nan"),
    (["train.py", "--device", "cuda:77"], "--device cuda:77: torch sees"),
    (["train.py", "--model", "qwen2.5-8b", "--device", "cpu"],
     "--model qwen2.5-8b: neither a folder nor one of qwen2.5-0.5b"),
    *[([*program, "--model", "nosuch"], "--model nosuch: neither a folder nor a name such as qwen2.5-7b")
      for program in (["train.py"], ["evaluate.py", "--data", "arithmetic"], ["tools/chat.py"])],
    (["train.py", "--model", "Qwen2.5-7B"], "--model Qwen2.5-7B: say Qwen/Qwen2.5-7B for the base model"),
    (["tools/convert.py", "nvfp4", "nosuch", "out"], "--model nosuch: neither a folder nor a name such as qwen2.5-7b"),
    (["train.py", "--memory-gib", "9", "--device", "cpu"],
     "--memory-gib 9 bounds the memory of a GPU, --device is cpu"),
    (["train.py", "--model", "folder"], "folder/config.json: cannot be read"),
    (["train.py", "--like", "folder"], "folder/run.json: cannot be read"),
    (["train.py", "--adapter", "folder"], "folder/adapter_config.json: cannot be read"),
    (["evaluate.py", "folder"], "folder/run.json: cannot be read"),
    (["evaluate.py"], "needs the folder of a run, or --model and --data"),
    (["evaluate.py", "--model", TINY, "--data", "arithmetic", "--adapter", ""], "--adapter is given nothing"),
    (["evaluate.py", "--model", TINY, "--data="], "--data= is given nothing"),
    (["tools/chat.py", ""], "chat.py is given nothing"), (["train.py", "--out", ""], "--out is given nothing"),
    (["tools/convert.py", "nvfp4", TINY, ""], "tiny is given nothing"),
    (["tools/convert.py", "merge", "folder", "out"], "folder/run.json: cannot be read"),
    (["tools/convert.py", "nvfp4", "folder", "out"], "folder/config.json: cannot be read")])
def test_wrong_input_is_one_line_and_code_1(tmp_path, monkeypatch, capfd, argv, words):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as stop:                # its text goes to stderr, and the code is 1
        run_here(tmp_path, monkeypatch, *argv)
    assert words in stop.value.code and "\n" not in stop.value.code and capfd.readouterr() == ("", "")
    assert not [p for p in tmp_path.rglob("*") if p.name not in ("folder", "runs")]


@pytest.mark.parametrize("name,said", [
    ("./my-model", "there is no such folder"), ("a/b/c", "there is no such folder"),
    ("qwen3-9b", "neither a folder nor one of qwen3-0.6b"), ("nosuch", "neither a folder nor a name such as"),
    ("some/model", "there is no such folder; to download a model, torch has to see a GPU")])
@pytest.mark.parametrize("argv", [["train.py"], ["evaluate.py", "--data", "arithmetic"], ["tools/chat.py"]])
def test_a_models_name_is_checked_before_a_gpu_is_asked_for(tmp_path, monkeypatch, argv, name, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit) as stop:
        run_here(tmp_path, monkeypatch, *argv, "--model", name)
    assert f"--model {name}: {said}" in stop.value.code


def test_a_process_with_wrong_input_ends_with_one_line_and_code_1(tmp_path):
    status, said = run(ROOT / "evaluate.py", cwd=tmp_path)
    assert status == 1 and len(said.splitlines()) == 1, said


@pytest.mark.parametrize("argv", [
    ["train.py", "--model", "some/model", "--max-new-tokens", "8"], ["evaluate.py", "--model", "some/model"],
    ["tools/convert.py", "nvfp4", "some/model", "out", "--calibrate", "8"]])
def test_wrong_data_is_found_before_a_models_weights_are_downloaded(tmp_path, monkeypatch, argv):
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1"}\n')
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda name, allow_patterns: asked.extend(allow_patterns) or TINY)
    with pytest.raises(SystemExit, match="bad.jsonl:1: has no answer"):
        run_here(tmp_path, monkeypatch, *argv, "--data", "bad.jsonl", "--device", "cpu")
    assert "*.json" in asked and "*.safetensors" not in asked


@pytest.mark.parametrize("argv,said", [
    (["train.py", "--lr", "nan"], "--lr must lie in"), (["train.py", "--out", "taken"], "taken is not empty"),
    (["train.py", "--reward", "no:f"], "--reward no:f"), (["train.py", "--prompt-style", "no:f"], "--prompt-style no"),
    (["train.py", "--reward", "no.py:f"], "--reward no.py:f: name the module without .py: no:f"),
    (["train.py", "--prompt-style", "no.py:f"], "--prompt-style no.py:f: name the module without .py: no:f"),
    (["train.py", "--adapter", "no"], "no/adapter_config"), (["train.py", "--resume", "--out", "no"], "no/run.json"),
    (["evaluate.py", "--out", "taken/x"], "taken/x exists"), (["evaluate.py", "--reward", "no:f"], "--reward no:f"),
    (["evaluate.py", "--against", "no"], "no: cannot be read")])
def test_what_is_cheap_to_check_is_checked_before_any_download(tmp_path, monkeypatch, argv, said):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("mine")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit, match=said):
        run_here(tmp_path, monkeypatch, *argv, "--model", "some/model", "--data", "gsm8k", "--device", "cpu")


def test_help_takes_little_longer_than_torchs_import(tmp_path):
    """In processor time: 1.0 s on a quick machine, 2 to 3.5 s on a busy one; nine tenths are torch's import."""
    def seconds(*argv, code=None):
        before = os.times()
        status, said = run(*argv, cwd=tmp_path, code=code)
        after = os.times()
        assert status == 0, said
        return after.children_user - before.children_user + after.children_system - before.children_system, said

    torchs, _ = seconds(code="import torch")
    ours, said = seconds(ROOT / "train.py", "--help")
    said = " ".join(said.split())
    assert "what most runs set:" in said and said.count("(default: 48)") == 2   # --steps, --max-new-tokens
    assert "(default: arithmetic)" in said                                # of a run without --model
    assert ours < 2 * torchs, (ours, torchs)


# -----------------------------------------------------------------------------
# What a program finds around it

@pytest.mark.parametrize("values,said", [
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x: expected a whole number; torchrun sets it"),
    ({"RANK": "1"}, "RANK=1, WORLD_SIZE=1: the first must be below the second; torchrun sets both")])
def test_a_wrong_environment_is_one_line(tmp_path, monkeypatch, values, said):
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert run(code="import env, ranks", cwd=tmp_path) == (1, f"-c: {said}\n")


def test_without_its_assertions_no_program_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    for program in ("train.py", "evaluate.py", "tools/chat.py", "tools/convert.py", "tools/report.py"):
        assert run(ROOT / program, cwd=tmp_path) == (1, f"{Path(program).name}: PYTHONOPTIMIZE=2 (python -O) takes out "
                                                     "the assertions by which this program checks itself: unset it\n")


WITHOUT = """
import runpy, sys
sys.modules[sys.argv[1]] = None
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", ["train.py", "evaluate.py", "tools/convert.py"])
def test_a_library_that_is_not_installed_is_one_line(tmp_path, program):
    said = f"{Path(program).name}: torch is not installed: pip install -r {ROOT / 'requirements.txt'}\n"
    assert run("torch", ROOT / program, cwd=tmp_path, code=WITHOUT) == (1, said)


@pytest.mark.parametrize("missing", ["files", "json", "torc"])
def test_a_missing_module_that_is_none_of_the_required_libraries_is_a_bug(tmp_path, missing):
    status, said = run(cwd=tmp_path, code=f"""
import sys
sys.modules[{missing!r}] = None
import env
import {missing}
""")
    assert status == 1 and "Traceback" in said and "is not installed" not in said


posix = pytest.mark.skipif(os.name != "posix", reason="closes file descriptors as a shell does")


@posix
@pytest.mark.parametrize("closed", [(2,), (1,), (0,), (1, 2), (0, 1, 2)])
def test_what_goes_to_a_closed_stream_lands_in_no_file(tmp_path, closed):
    """The next file that is opened would get its number."""
    code = """
import os, sys
import env
with open("log", "wb", buffering=0) as log:
    for number in (1, 2):
        os.write(number, b"noise")
    assert sys.stdin.read() == "" and log.fileno() > 2
    print("noise", file=sys.stderr)
    log.write(b"whole")
"""
    def close():
        for number in closed:
            os.close(number)

    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          preexec_fn=close, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0 and (tmp_path / "log").read_bytes() == b"whole", done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_character_that_stdout_lacks_does_not_end_a_run(tmp_path, encoding):
    code = r"import env; from ranks import say; print('\u8bed\udcff'); say('\u8bed\udcff')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": f"{encoding}:strict"})
    assert done.returncode == 0 and done.stdout.count(rb"\udcff") == 2, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_under_a_buffered_stdout_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", "import env; print('a figure')"], cwd=tmp_path,
                              env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}, stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "-c: stdout: [Errno 28] No space left on device\n")


def unread(code, folder, unbuffered=""):
    """Runs code whose stdout nobody reads -> its exit status, its stderr."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, stdout=theirs, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered})
    os.close(theirs)
    return done.returncode, done.stderr


@posix
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("then", ["with env.one_line('me'): print('x', flush=True)", "print('x', flush=True)",
                                  "print('x')"])
def test_a_program_whose_output_nobody_reads_ends_quietly_as_others_do(tmp_path, then, unbuffered):
    assert unread(f"import env\n{then}", tmp_path, unbuffered) == (141, "")


@posix
def test_a_broken_pipe_to_something_else_than_the_reader_is_told(tmp_path):
    code = "import env\nwith env.one_line('me'): raise BrokenPipeError(32, 'Broken pipe')"
    assert run(cwd=tmp_path, code=code) == (1, "me: [Errno 32] Broken pipe\n")
    assert unread(code.replace("BrokenPipeError(32, 'Broken pipe')", "OSError('full')"), tmp_path) == (1, "me: full\n")


@posix
def test_a_training_run_whose_output_nobody_reads_saves_its_last_step_and_ends_quietly(tmp_path):
    code = """
from pathlib import Path
from harness.folder import ending_with
with ending_with(lambda: Path("saved").touch(), "go on"):
    print("step 1", flush=True)
"""
    assert unread(code, tmp_path) == (141, "") and (tmp_path / "saved").exists()


@pytest.mark.parametrize("error,said", [
    (ValueError("x.json: bad\nmore"), "me: x.json: bad"), (OSError(), "me: OSError"),
    (Stopped("stopped"), "me: stopped"), (MemoryError("big"), "me: not enough memory: big"),
    (RuntimeError("you tried to allocate 9 bytes"), "me: not enough memory: you tried to allocate 9 bytes")])
def test_an_error_of_the_user_or_the_machine_is_one_line(error, said):
    with pytest.raises(SystemExit) as stop:
        with env.one_line("me"):
            raise error
    assert stop.value.code == said


@pytest.mark.parametrize("bug", [lambda: max([]), lambda: dict([(1, 2, 3)]), lambda: int("x")])
def test_a_value_error_of_pythons_own_is_a_bug(bug):
    with pytest.raises(ValueError):
        with env.one_line("me"):
            bug()


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), TypeError("x"), AssertionError(), KeyError("x")])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        with env.one_line("me"):
            raise error


def test_an_error_without_a_message_is_named_by_its_class():
    assert first_line(OSError()) == "OSError"
    assert first_line(ValueError("no file\nat all")) == "no file"
