"""
Shared by all tests: the import path, tiny checkpoints, default signal handling, Triton's interpreter.

`pytest` runs the tests in several processes (pyproject.toml), `pytest -n 0` in one.
"""
import dataclasses
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# torch reads both on import, as in env.py. These tensors are tiny: on a busy machine, two threads are 12 times slower
# than one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from tiny_qwen2 import SHAPES, config_json, random_tensors, write_folder

# `nohup pytest` ignores SIGHUP, and `pytest &` in a shell script ignores SIGINT. The programs that tests start would
# inherit this and ignore the signals that tests send. An empty handler protects pytest as well and is not inherited.
SIGNALS = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)
for number in SIGNALS:
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

try:
    from triton import __version__ as TRITON
except ImportError:  # not Linux: skip the kernel tests
    TRITON = ""
NEEDS_TRITON = re.compile(r"^(import|from) (triton|marlin_fp4|fast\.(kernels|decode|hopper_fp4|register))\b"
                          r"|^from fast import .*\b(kernels|decode|hopper_fp4)\b", re.M)
if not TRITON:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")
                      if NEEDS_TRITON.search(path.read_text(encoding="utf-8"))]
if TRITON and torch.cuda.is_available():
    import fast.register  # noqa: F401, as harness/setup.py does


class Tiny(NamedTuple):
    folder: Path
    raw: dict                                   # config.json
    tensors: dict                               # Hugging Face name -> bf16


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Shape name -> a checkpoint with that shape, on disk and in memory."""
    made = {}
    for shape in SHAPES:
        raw = config_json(shape)
        tensors = random_tensors(raw)
        made[shape] = Tiny(write_folder(tmp_path_factory.mktemp(shape), raw, tensors), raw, tensors)
    return made


@pytest.fixture(scope="session")
def tiny_nvfp4(tmp_path_factory):
    """../tiny as an NVFP4 folder: equal to ../tiny quantized on load (test_convert.py), but loads faster."""
    import calibrate
    from weights import ModelFolder
    out = tmp_path_factory.mktemp("nvfp4") / "tiny"
    calibrate.to_nvfp4(calibrate.source_of(ModelFolder(ROOT / "tiny"), torch.device("cpu")), out)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_nvfp4):
    import trained_runs
    with pytest.MonkeyPatch.context() as patch:
        trained_runs.start_server(patch.setenv)
    return trained_runs.Runs(tmp_path_factory.mktemp("runs"), tiny_nvfp4)


@pytest.fixture(params=["autograd", "by hand"])
def both(request, monkeypatch):
    """Runs a test twice: as on a CPU, and with the hand-written backward passes of a GPU (fast/backward.py)."""
    if request.param == "by hand":
        from fast import backward
        from ops import PLAIN
        for name, function in backward.gpu_versions().items():
            monkeypatch.setitem(PLAIN, name, function)
    return request.param


@pytest.fixture
def fake_gpu(monkeypatch):
    """A function that makes torch report a GPU with the given compute capability. No tensor can go there."""
    def see(capability):
        for name, answer in dict(is_available=True, device_count=1, set_device=None, get_device_name="a GPU",
                                 get_device_capability=capability).items():
            monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, answer=answer: answer)
    return see


@pytest.fixture(autouse=True)
def handlers():
    """Restores the signal handlers that a program sets when it runs in this process."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)                        # unknown to `pytest -n 0 -p no:xdist`
def pytest_xdist_auto_num_workers():
    """The number of processes for `-n auto`: one more than there are cores, because some tests wait for a signal or
    another process, but at most four, because each takes up to 1 GB. On a machine with a GPU, one process: tests that
    measure GPU memory would disturb each other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if torch.cuda.is_available() or cores == 1 else min(cores + 1, 4)


def pytest_collection_modifyitems(items):
    """Starts the two slowest groups first: test_train.py and test_full.py, whose tests share a server, in the first
    process, and the tests in Triton's interpreter in the second. If started last, they would leave the other worker
    idle.
    """
    for item in items:
        if TRITON.startswith("3.6.") and "in_tritons_interpreter" in item.name:
            item.add_marker(pytest.mark.skip(reason="Triton 3.6's interpreter fails with numpy 2.4"))
    interpreted = [item for item in items if "in_tritons_interpreter" in item.name]
    others = [item for item in items if "in_tritons_interpreter" not in item.name]
    others.sort(key=lambda item: (item.path.stem not in ("test_train", "test_full"), item.path.stem == "test_full"))
    second = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # where the second worker's share starts
    items[:] = others[:second] + interpreted + others[second:]


def pytest_collection_finish():
    """Skips work that takes half of the interpreter's time and checks nothing.

    Triton patches triton.language on every function call; once is enough. The interpreter repeats integer arithmetic in
    64 bits for a disabled overflow check.
    """
    if os.environ.get("TRITON_INTERPRET"):
        import triton.language as tl
        from triton.runtime import interpreter
        interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
        interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
