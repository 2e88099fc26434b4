"""
The pieces of the hand-written backward passes, in plain torch: the functions that kernels.py replaces, and what
autograd doesn't need. Tests with the fixture `both` (test_lora, test_ops, test_attention, test_learner, test_full)
compare the whole functions with float64 autograd.

python -m pytest tests/test_backward.py -v
"""
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, adapted
from test_attention import whole_sequences
from test_ops import an_mlp

import lora
import ops
from fast import backward
from fast.backward import attend_spans, scratch_on, softmax_at, spans_of, swiglu, swiglu_backward, wide_weight
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


# -----------------------------------------------------------------------------
# The scratch buffer of expanded matrices

def test_scratch_works_after_out_of_memory(tiny, monkeypatch):
    # memory.Plan tries a large micro-batch, runs out of memory and continues with a smaller one.
    model, _ = adapted(tiny["tied"])
    qkv = model.layers[0].qkv
    scratch_on(qkv.weight.device).flat = torch.empty(1)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
        full.setattr(torch, "empty", out_of_memory)
        wide_weight(qkv)
    assert wide_weight(qkv).shape == (128 + 12, 64 + 12)


# -----------------------------------------------------------------------------
# The MLP

@pytest.mark.parametrize("M,width", [(1, 16), (5, 100)])
def test_swiglu_and_backward_match_autograd(M, width):
    torch.manual_seed(0)
    y, rstd = (2 * torch.randn(M, 2 * width)).requires_grad_(), (torch.rand(M, 1) + 0.5).requires_grad_()
    upstream, wider = torch.randn(M, width), torch.full((M, width + 8), 7.0)
    exact = [t.detach().double().requires_grad_() for t in (y, rstd)]
    gate, up = (exact[0] * exact[1]).chunk(2, dim=-1)
    want = gate / (1 + torch.exp(-gate)) * up
    dy, drstd = torch.autograd.grad(want, exact, upstream.double())
    with torch.no_grad():
        kept = swiglu(y, rstd, wider[:, :width])
        assert torch.equal(kept, y) and (wider[:, width:] == 7).all()
        assert (wider[:, :width] - want).abs().max() < 1e-5 * want.abs().max()
        half = torch.empty(M, width, dtype=torch.bfloat16)
        assert torch.equal(swiglu(y, rstd, half), y.bfloat16())           # keeps y in h's dtype
        assert ((half - want).abs() <= 2.0**-8 * want.abs() + 1e-5).all()
        wide = torch.full((M, 2 * width + 4), 7.0)
        got = swiglu_backward(y, rstd, upstream, wide[:, :2 * width])
    assert (wide[:, :2 * width] - dy).abs().max() < 1e-5 * dy.abs().max() and (wide[:, 2 * width:] == 7).all()
    assert got.shape == (M, 1) and (got - drstd).abs().max() < 1e-5 * drstd.abs().max()


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_gate_up_is_kept_only_for_a_backward_pass(monkeypatch, grad_enabled):
    # With keep=False, a GPU's swiglu returns nothing.
    kept = []

    def as_on_a_gpu(y, rstd, h, keep=True):
        kept.append(keep)
        result = swiglu(y, rstd, h)
        return result if keep else None

    monkeypatch.setattr(backward, "swiglu", as_on_a_gpu)
    gate_up, down = an_mlp("bf16", 16, 16, R=4)
    with torch.set_grad_enabled(grad_enabled):
        out = backward.mlp(gate_up, down, torch.randn(3, 16, requires_grad=True), torch.ones(3, 1))
    assert kept == [grad_enabled] == [out.requires_grad]
    if grad_enabled:
        out.sum().backward()
        assert gate_up.a.grad.any() and down.b.grad.any()


# -----------------------------------------------------------------------------
# Log-probs

@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("c,V,live", [(1, 5, 5), (3, 101, 90)])
def test_softmax_at_covers_the_live_logits(c, V, live, dtype):
    torch.manual_seed(0)
    products, scale, targets = 9 * torch.randn(c, V), torch.rand(c, 1) + 0.5, torch.randint(live, (c,))
    products[:, live:] = 1e30                                             # e^1e30 is inf
    logits = products[:, :live].double() * scale.double()
    p = logits.softmax(-1)
    (picked, lse, mean), ahead = softmax_at(products.clone(), scale, targets, live, dtype)
    assert (picked - logits[torch.arange(c), targets]).abs().max() < 1e-5
    assert (lse - logits.logsumexp(-1)).abs().max() < 1e-5
    assert (mean - (p * logits).sum(-1)).abs().max() < 1e-4
    if dtype is None:
        assert ahead is None
        return
    want = F.one_hot(targets, live) - p
    assert ahead.shape == (c, V) and ahead.dtype == dtype and not ahead[:, live:].any()
    assert (ahead[:, :live] - want).abs().max() < (1e-5 if dtype == torch.float32 else 2**-8)


# -----------------------------------------------------------------------------
# Attention

def test_bf16_inputs_are_summed_in_fp32():
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, h, 16).bfloat16() for h in (4, 2, 2))
    out, lse = attend_spans(q, k, v, spans_of([300], [300], True, "cpu"))
    want = whole_sequences(*(t.double() for t in (q, k, v)), [300], [()])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert ((out - want).abs() <= 2.0**-8 * want.abs() + 1e-5).all()             # the result is rounded once
