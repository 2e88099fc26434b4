"""
What all tests share: the import path, the tiny checkpoints, signals as from a shell, Triton's interpreter.

A bare `pytest` runs the tests in several processes (pyproject.toml); `pytest -n 0` runs them in one.
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
# Both before torch is imported, as in env.py. The tensors here are tiny: on a busy machine two threads
# take 12 times as long as one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from tiny_qwen2 import SHAPES, config_json, random_tensors, write_folder

# A caller may have signals ignored: `nohup pytest` ignores SIGHUP, `pytest &` in a shell script ignores SIGINT. Every
# program that a test starts would inherit that and could not be stopped by the signal that the test sends. A handler
# that does nothing protects pytest just as well, and is not inherited: a new program starts with the default.
for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

try:
    from triton import __version__ as TRITON
except ImportError:  # not Linux: the kernels' tests need a machine that has it
    TRITON = ""
NEEDS_TRITON = re.compile(r"^(import|from) (triton|marlin_fp4|fast\.(kernels|decode|hopper_fp4))\b"
                          r"|^from fast import .*\b(kernels|decode|hopper_fp4)\b", re.M)
if not TRITON:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")
                      if NEEDS_TRITON.search(path.read_text(encoding="utf-8"))]
if TRITON and torch.cuda.is_available():
    import fast  # noqa: F401, registers the kernels, as harness/setup.py does



class Tiny(NamedTuple):
    folder: Path
    raw: dict                                   # of config.json
    tensors: dict                               # Hugging Face name -> bf16


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Shape name -> a checkpoint of that shape, on disk and in memory."""
    made = {}
    for shape in SHAPES:
        raw = config_json(shape)
        tensors = random_tensors(raw)
        made[shape] = Tiny(write_folder(tmp_path_factory.mktemp(shape), raw, tensors), raw, tensors)
    return made


@pytest.fixture(scope="session")
def tiny_nvfp4(tmp_path_factory):
    """../tiny as a folder in NVFP4. It computes the same as ../tiny that is quantized while it loads
    (test_weights.py), which takes three times as long.
    """
    import calibrate
    from weights import ModelFolder
    out = tmp_path_factory.mktemp("nvfp4") / "tiny"
    calibrate.to_nvfp4(calibrate.source_of(ModelFolder(ROOT / "tiny"), torch.device("cpu")), out, "search")
    return out


@pytest.fixture
def fake_gpu(monkeypatch):
    """A function of a compute capability. After its call torch reports such a GPU, though no tensor can go there."""
    def see(capability):
        for name, answer in dict(is_available=True, device_count=1, set_device=None, get_device_name="a GPU",
                                 get_device_capability=capability).items():
            monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, answer=answer: answer)
    return see


@pytest.fixture
def ctrl_c_interrupts():
    """In this process SIGINT raises KeyboardInterrupt, also where the caller of pytest ignores that signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(optionalhook=True)                        # `pytest -n 0 -p no:xdist` has no such hook
def pytest_xdist_auto_num_workers():
    """How many processes `-n auto` starts: one more than there are cores, since some tests wait for a signal or another
    process, and at most four, since each holds up to 1 GB with the run that it tests. On a machine with a GPU there is
    one alone: tests that measure the GPU's memory would disturb each other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if torch.cuda.is_available() or cores == 1 else min(cores + 1, 4)


def pytest_collection_modifyitems(items):
    """Two groups take a minute or more by themselves: test_train.py, whose tests share runs, begins in the first
    process, what runs in Triton's interpreter in the second. Begun last, they would leave the other nothing to do.
    """
    for item in items:
        if TRITON.startswith("3.6.") and "in_tritons_interpreter" in item.name:
            item.add_marker(pytest.mark.skip(reason="Triton 3.6's interpreter fails with numpy 2.4"))
    interpreted = [item for item in items if "in_tritons_interpreter" in item.name]
    others = [item for item in items if "in_tritons_interpreter" not in item.name]
    others.sort(key=lambda item: item.path.stem != "test_train")
    second = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # the first of its share
    items[:] = others[:second] + interpreted + others[second:]


def pytest_collection_finish():
    """In the interpreter's process, leave out what takes half of the time there and checks nothing.

    Triton would patch triton.language at every call of a function; once is enough. Behind every sum, difference and
    product of whole numbers it computes in 64 bits whether 32 were enough, for an assertion that is off.
    """
    if os.environ.get("TRITON_INTERPRET"):
        import triton.language as tl
        from triton.runtime import interpreter
        interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
        interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
