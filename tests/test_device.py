"""
Unsupported hardware is rejected with a one-line error.

python -m pytest tests/test_device.py -v
"""
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, read_rows
from tiny_qwen2 import config_json, random_tensors, write_folder

import calibrate
from fast import backward
from files import UserError
from harness import setup
from harness.setup import choose_device, configure_cpu, load_kernels
from loading import load
from sampler import TorchEngine
from weights import ModelFolder

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares kernels with plain torch on a GPU")


@pytest.mark.parametrize("name", ["abacus", "cuda:9", "cpu:1", "meta", "mps", "", None])
def test_missing_device_is_rejected(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="^--model nowhere: " if name is None else f"^--device {name}: "):
        choose_device(name, "nowhere")
    assert choose_device("cpu", "nowhere") == choose_device(None, ".") == torch.device("cpu")


@pytest.mark.parametrize("capability,hip,triton,refused", [
    ((9, 0), None, True, ""), ((8, 0), None, True, ""), ((12, 0), None, True, ""), ((7, 5), None, True, "sm_75"),
    ((9, 0), None, False, "Triton"), ((9, 0), "6.4", True, "AMD")])             # as ROCm reports an MI200
def test_gpu_without_kernels_is_rejected(capability, hip, triton, refused, fake_gpu, monkeypatch):
    fake_gpu(capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton or None)
    if not refused:
        load_kernels(torch.device("cuda"))
        return
    with pytest.raises(UserError, match=f"^--device cuda: .*{refused}"):
        load_kernels(torch.device("cuda"))


def test_ranks_choose_their_own_gpus(fake_gpu, monkeypatch):
    fake_gpu((9, 0))
    monkeypatch.setattr(setup, "WORLD", 2)
    with pytest.raises(UserError, match="^--device cuda:0: "):
        choose_device("cuda:0", ".")


def test_plain_kernels_need_no_triton(monkeypatch):
    registered = {}
    monkeypatch.setattr(setup, "ON_GPU", registered)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load_kernels(torch.device("cuda"), "torch")
    assert registered["linear"] is backward.linear and registered["GraphEngine"] is TorchEngine
    assert choose_device("cpu", ".", "torch") == torch.device("cpu")
    with pytest.raises(UserError, match="^--kernels portable needs a GPU"):
        choose_device("cpu", ".", "portable")


@needs_gpu
def test_plain_kernels_train_like_the_others(tmp_path):
    """The bundled model's first steps differ by rounding alone."""
    logs = []
    for kernels in ("torch", "portable"):
        out = tmp_path / kernels
        subprocess.run([sys.executable, ROOT / "train.py", "--device", "cuda", "--kernels", kernels, "--steps", "3",
                        "--memory-gib", "9", "--eval-problems", "32", "--calibrate", "0", "--out", out], check=True)
        logs.append(read_rows(out / "metrics.jsonl"))
    for plain, fast in zip(*logs, strict=True):
        assert plain["rollout_logp_diff"] < 0.02 and fast["rollout_logp_diff"] < 0.02
        assert plain["reward"] == pytest.approx(fast["reward"], abs=0.05)


@needs_gpu
@torch.no_grad()
def test_calibration_with_a_massive_activation(tmp_path):
    """One input of down_proj is 10,000 times as large as the others, as in real models: H must stay positive definite
    for a GPU to find codes whose error is about the format's.
    """
    raw = config_json("untied") | {"intermediate_size": 4864}
    tensors = random_tensors(raw)
    for name in tensors:
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name][7] *= 100
    folder = ModelFolder(write_folder(tmp_path / "model", raw, tensors))
    texts = [calibrate.Text([(7 * i + j) % raw["vocab_size"] for j in range(200)], 20) for i in range(40)]
    calibrate.to_nvfp4(calibrate.source_of(folder, torch.device("cuda")), tmp_path / "out", texts, None)
    exact, coded = load(folder, "bf16", "cpu"), load(tmp_path / "out", "nvfp4", "cpu")
    for layer, with_codes in zip(exact.layers, coded.layers):
        w = layer.down.matrix()
        assert (with_codes.down.matrix() - w).norm() < 0.2 * w.norm()   # rounding to nearest: 0.1


def test_cpu_gradient_accumulation_is_deterministic():
    """Otherwise threads add a shared prompt's last token in varying order, and equal seeds diverge within 30 steps."""
    g = torch.Generator().manual_seed(0)
    # The repeats are in the middle, where two threads split the work.
    at = torch.cat([torch.arange(1490), torch.full((20,), 5), torch.arange(1490)])
    upstream = torch.randn(len(at), 128, generator=g)
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        torch.set_num_threads(2)
        configure_cpu(SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(hidden=128)))
        sums = set()
        for _ in range(300):
            x = torch.zeros(1500, 128, requires_grad=True)
            x[at].backward(upstream)
            sums.add(x.grad[5].sum().item())
        assert len(sums) == 1
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
