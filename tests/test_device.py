"""
The device and the kernels are what the machine has, and what it has not is refused in one line.

python -m pytest tests/test_device.py -v
"""
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from files import UserError
from harness.setup import choose_device, configure_cpu, load_kernels


@pytest.mark.parametrize("name", ["abacus", "cuda:9", "cpu:1", "meta", "mps", "", None])
def test_a_device_that_is_not_there_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="^--model nowhere: " if name is None else f"^--device {name}: "):
        choose_device(name, "nowhere")
    assert choose_device("cpu", "nowhere") == choose_device(None, ".") == torch.device("cpu")


@pytest.mark.parametrize("capability,refused", [
    ((9, 0), ""), ((8, 0), ""), ((12, 0), ""), ((7, 5), "sm_75"), ((7, 0), "sm_70")])
def test_a_gpu_without_the_kernels_is_refused_in_one_line(capability, refused, fake_gpu, monkeypatch):
    fake_gpu(capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    gpu = torch.device("cuda")
    if not refused:
        load_kernels(gpu)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        refused = "Triton"
    with pytest.raises(UserError, match=f"^--device cuda: .*{refused}"):
        load_kernels(gpu)


def test_a_program_is_told_its_device(fake_gpu, monkeypatch):
    assert choose_device("cpu", "nowhere") == torch.device("cpu")
    fake_gpu((8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert choose_device(None, "nowhere") == torch.device("cuda", 0)


def test_an_amd_gpu_is_refused_in_one_line(fake_gpu, monkeypatch):
    fake_gpu((9, 0))                                                      # what ROCm reports of an MI200: not a Hopper
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UserError, match="^--device cuda: .*AMD"):
        load_kernels(torch.device("cuda"))


def test_a_gradient_that_rows_share_is_always_added_up_in_one_order_on_a_cpu():
    """Else threads add the last token of a shared prompt in any order, and runs with one seed part within 30 steps."""
    g = torch.Generator().manual_seed(0)
    at = torch.cat([torch.arange(1490), torch.full((20,), 5), torch.arange(1490)])   # repeats lie astride the middle
    upstream = torch.randn(len(at), 128, generator=g)
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        torch.set_num_threads(2)
        configure_cpu(SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(width=128)))
        sums = set()
        for _ in range(300):
            x = torch.zeros(1500, 128, requires_grad=True)
            x[at].backward(upstream)
            sums.add(x.grad[5].sum().item())
        assert len(sums) == 1
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
