"""
The device and the kernels are what the machine has, and what it has not is refused in one line.

python -m pytest tests/test_device.py -v
"""
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from files import UserError
from harness.setup import KERNELS, choose_device, configure_cpu, device_of, kernels_for


@pytest.mark.parametrize("name", ["abacus", "cuda:9", "cpu:1", "meta", "mps", "", None])
def test_a_device_that_is_not_there_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="^--model nowhere: " if name is None else f"^--device {name}: "):
        device_of(name, "nowhere")
    assert device_of("cpu", "nowhere") == device_of(None, ".") == torch.device("cpu")


@pytest.mark.parametrize("capability,wanted,want", [
    ((9, 0), "auto", "hopper"), ((9, 0), "portable", "portable"), ((9, 0), "hopper", "hopper"),
    ((8, 0), "auto", "portable"), ((8, 9), "auto", "portable"), ((12, 0), "auto", "portable"),
    ((10, 0), "portable", "portable"),
    ((8, 6), "hopper", "--kernels hopper: .*sm_86"), ((10, 0), "hopper", "--kernels hopper: .*sm_100"),
    ((7, 5), "auto", "--device cuda: .*sm_75"), ((7, 0), "portable", "--device cuda: .*sm_70")])
def test_the_kernels_are_chosen_by_the_gpu_and_refused_in_one_line(capability, wanted, want, fake_gpu, monkeypatch):
    fake_gpu(capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    gpu = torch.device("cuda")
    if want in KERNELS:
        assert kernels_for(gpu, wanted) == want
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        want = "--device cuda: .*Triton"
    with pytest.raises(UserError, match=f"^{want}"):
        kernels_for(gpu, wanted)


def test_a_program_is_told_its_device_and_its_kernels(fake_gpu, monkeypatch):
    assert choose_device("cpu", "auto", "nowhere") == (torch.device("cpu"), None)
    fake_gpu((8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert choose_device(None, "auto", "nowhere") == (torch.device("cuda", 0), "portable")


def test_an_amd_gpu_is_refused_in_one_line(fake_gpu, monkeypatch):
    fake_gpu((9, 0))                                                      # what ROCm reports of an MI200: not a Hopper
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for wanted in ("auto", *KERNELS):
        with pytest.raises(ValueError, match="^--device cuda: .*AMD"):
            kernels_for(torch.device("cuda"), wanted)


def test_a_cpu_has_no_kernels():
    assert kernels_for(torch.device("cpu"), "auto") is None
    with pytest.raises(ValueError, match="--kernels portable"):
        kernels_for(torch.device("cpu"), "portable")


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
