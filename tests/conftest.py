"""
Puts the repository's root on the import path, so that a bare `pytest` finds the modules; the tiny checkpoints; the
kernels in Triton's interpreter.
"""
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, as program.py
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: two threads on a busy machine take 12 times longer
from tiny_qwen2 import SHAPES, config_json, random_tensors, write_folder


try:
    from triton import __version__ as TRITON
except ImportError:  # no Linux: what the kernels' tests show is for a machine that has it
    TRITON = ""
    collect_ignore = ["test_decode.py", "test_kernels.py", "test_marlin_fp4.py", "test_hopper_fp4.py",
                      "test_portable_kernel.py"]
# Of what needs no GPU, what Triton 3.6 (torch 2.11's) cannot pass: its interpreter fails with numpy 2.4 and later, and
# its ptxas makes another loop for sm_120 and spills 8 bytes on sm_90.
NOT_BY_3_6 = re.compile("in_tritons_interpreter|decodes_no_weight_twice.120-(32|64)|launched.*.90-hopper-16")


class Tiny(NamedTuple):
    folder: Path
    raw: dict                                   # of config.json
    tensors: dict                               # Hugging Face name -> bf16


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """shape name -> its checkpoint on disk and in memory."""
    made = {}
    for shape in SHAPES:
        raw = config_json(shape)
        tensors = random_tensors(raw)
        made[shape] = Tiny(write_folder(tmp_path_factory.mktemp(shape), raw, tensors), raw, tensors)
    return made


@pytest.fixture
def fake_gpu(monkeypatch):
    """-> function(capability): from then on torch sees such a GPU, on which nothing can be put."""
    def see(capability):
        for name, answer in dict(is_available=True, device_count=1, set_device=None, get_device_name="a GPU",
                                 get_device_capability=capability).items():
            monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, answer=answer: answer)
    return see


@pytest.fixture(scope="session", autouse=True)
def interpreted(request):
    """-> how many tests of a file passed in the interpreter: a process for all files, beside the others' tests."""
    files = {str(item.path) for item in request.session.items if "in_tritons_interpreter" in item.name}
    if not files or os.environ.get("TRITON_INTERPRET"):
        yield
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rp", "-k", "not compile", *files]
    process = subprocess.Popen(command, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True)
    output = []

    def passed(file):
        if not output:
            output.append(process.communicate()[0])
        assert process.returncode == 0, output[0][-3000:]
        return len(re.findall(rf"^PASSED .*{Path(file).name}::", output[0], re.M))

    yield passed
    process.kill()


def pytest_collection_modifyitems(items):
    """Who waits for that process comes last."""
    items.sort(key=lambda item: "in_tritons_interpreter" in item.name)
    for item in items:
        if TRITON.startswith("3.6.") and NOT_BY_3_6.search(item.name):
            item.add_marker(pytest.mark.skip(reason="needs Triton 3.7"))


def pytest_collection_finish():
    """In the interpreter's process: it patches triton.language at every call of a function, a fifth of its time."""
    if os.environ.get("TRITON_INTERPRET"):
        import triton.language as tl
        from triton.runtime import interpreter
        interpreter._patch_lang(SimpleNamespace(__globals__=dict(tl=tl, core=tl.core)))
        interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
