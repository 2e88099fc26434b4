"""
What the hand-written backward passes do beside computing gradients. Tests with the fixture `both` (test_lora, test_ops,
test_attention, test_learner, test_full) compare those with float64 autograd.

python -m pytest tests/test_backward.py -v
"""
import pytest
import torch
from helpers import ROOT, adapted

import lora
import ops
from fast import backward
from loading import load

PLAIN = dict(ops.PLAIN)


def test_switched_adapter_is_refused(tiny):
    model, _ = adapted(tiny["tied"])
    y = backward.linear(torch.zeros(3, 64, requires_grad=True), model.layers[0].o)
    with model.adapter.off(), pytest.raises(AssertionError, match="switched between forward and backward"):
        y.sum().backward()


@pytest.mark.parametrize("name", sorted({"linear", "mlp", "token_logprobs", "attend_packed"} & ops.PLAIN.keys()))
def test_one_plain_function_among_the_others(both, monkeypatch, name):
    # As in a fork that removes one @replaced_on_gpu: in bf16, which the plain version must differentiate on a GPU too.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    versions = ops.ON_GPU if device == "cuda" else ops.PLAIN
    policy = load(ROOT / "tiny", device=device, dtype=torch.bfloat16)
    adapter = lora.attach(policy, rank=4)
    adapter.master.data.normal_(std=0.02, generator=torch.Generator(device).manual_seed(0))
    adapter.sync()

    def gradient():
        adapter.master.grad.zero_()
        policy.token_logprobs([[5, 6, 7, 8, 9], [5, 6, 9, 9], [7, 8, 3, 2, 1]], [2, 2, 1])[0].sum().backward()
        return adapter.master.grad.clone()

    want = gradient()
    monkeypatch.setitem(versions, name, getattr(backward, name) if both == "autograd" else PLAIN[name])
    got = gradient()
    assert want.norm() > 0 and (got - want).norm() < 2.0**-5 * want.norm()  # roundings of 2^-9 in other places


def test_no_gpu_version_hides_a_changed_function(monkeypatch):
    # A fork that removes @replaced_on_gpu above lora.linear changes the linears of the MLP too.
    for containing, changed in backward.CONTAINS.items():
        monkeypatch.setitem(ops.PLAIN, changed, PLAIN.get(changed))
        assert backward.gpu_versions()[containing] is getattr(backward, containing)
        monkeypatch.delitem(ops.PLAIN, changed)
        assert backward.gpu_versions()[containing] is PLAIN[containing]
