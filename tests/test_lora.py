"""
A linear and its adapter against autograd through an explicit W + s * B @ A in float64. test_peft.py tests the files.

python -m pytest tests/test_lora.py -v
"""
from types import SimpleNamespace

import pytest
import torch
from helpers import adapted, tokens_of

import nvfp4
from loading import load
from lora import Linear, attach

# -----------------------------------------------------------------------------
# Forward

def test_a_starts_uniform_like_pefts_and_b_at_zero(tiny):
    model = load(tiny["untied"].folder, "bf16", "cpu")
    adapter = attach(model, rank=8)
    for linear in adapter.linears:                                        # kaiming_uniform_ with a = sqrt(5)
        bound = linear.weight.K ** -0.5
        assert 0.99 * bound < linear.a.max() <= bound and -bound <= linear.a.min() < -0.99 * bound
        assert abs(linear.a.mean()) < 0.1 * bound and not linear.b.any()
        assert torch.equal(linear.working_a, linear.a)                    # or B's first gradient would be 0
    first, other = (attach(model, rank=8, seed=seed).linears[0].a.clone() for seed in (0, 1))
    assert not torch.equal(first, other)


def test_off_gives_the_base_and_back(tiny):
    tokens, base = tokens_of(tiny["tied"], 2, 13), load(tiny["tied"].folder, base="nvfp4", device="cpu")
    model, _ = adapted(tiny["tied"], base="nvfp4")
    with torch.no_grad():
        want, on = base(tokens), model(tokens)
        with pytest.raises(KeyboardInterrupt):
            with model.adapter.off():
                assert torch.equal(model(tokens), want)
                raise KeyboardInterrupt
        assert torch.equal(model(tokens), on) and not torch.equal(on, want)


def test_sync_rewrites_the_working_copies_in_place(tiny):
    # CUDA graphs contain these addresses.
    model, _ = adapted(tiny["ragged"], rank=3, alpha=4.5)
    addresses = [(lin.working_a.data_ptr(), lin.working_b.data_ptr()) for lin in model.adapter.linears]
    with torch.no_grad():
        model.adapter.master.mul_(3)
    model.adapter.sync()
    assert addresses == [(lin.working_a.data_ptr(), lin.working_b.data_ptr()) for lin in model.adapter.linears]
    for lin in model.adapter.linears:
        assert torch.equal(lin.working_a, lin.a) and torch.equal(lin.working_b, lin.b * 1.5)
        assert lin.working_a.storage_offset() % 128 == 0 and lin.working_b.storage_offset() % 128 == 0


# -----------------------------------------------------------------------------
# Gradients

def frozen_weight(kind, parts, K, dtype=torch.float32, std=0.1):
    """-> a frozen weight (N, K) and its float64 value."""
    weights = [torch.randn(n, K) * std for n in parts]
    if kind == "foreign":                                                 # a scale per part, none a power of two
        tensors = [nvfp4.quantize(w, w.abs().max() / 2688) for w in weights]
        return nvfp4.fuse(tensors, dtype), torch.cat([nvfp4.dequantize(*t, torch.float64) for t in tensors])
    weight = nvfp4.freeze(weights, kind, dtype)
    return weight, weight.dequantize().double() if kind != "bf16" else torch.cat(weights).bfloat16().double()


@pytest.mark.parametrize("kind,parts,dtype,std", [
    *((kind, parts, torch.float32, 0.1) for kind in ("bf16", "nvfp4", "foreign")
      for parts in ((48,), (64, 16, 16), (40, 24))),
    # Folders of other quantizers have global scales like 2e-5, no powers of two. A 7B's weights have an std of 0.017.
    *((kind, (64, 32, 32), torch.bfloat16, std) for kind in ("nvfp4", "foreign") for std in (0.02, 0.002))])
def test_gradients_match_autograd_through_the_merged_matrix(both, kind, parts, dtype, std):
    torch.manual_seed(0)
    M, K, R, alpha = 24, 128, 1 if len(parts) == 1 else 4, 10
    weight, w = frozen_weight(kind, parts, K, dtype, std)
    linear = Linear(weight, [f"part{p}" for p in range(len(parts))], parts)
    adapter = attach(SimpleNamespace(modules=lambda: [linear], dtype=dtype), rank=R, alpha=alpha)
    linear.b.data.normal_(0, 1.0 if dtype == torch.float32 else 0.02)
    adapter.sync()
    x, upstream = torch.randn(M, K).to(dtype).requires_grad_(), torch.randn(M, sum(parts))
    y = linear(x)
    y.backward(upstream)

    a, b, x64 = (t.detach().double().requires_grad_() for t in (linear.a, linear.b, x))
    delta = torch.cat([rows @ a_p for rows, a_p in zip(b.split(parts), a.split(R))])
    want = x64 @ (w + alpha / R * delta).T
    want.backward(upstream.double())
    # Sums of up to 128 fp32 terms are off by about sqrt(128) * 2^-24 = 7e-7 of their scale, twice in a row for x and A.
    # In bf16, x @ A.T, W, A, s * B and dy are rounded once each, up as often as down: 0.94 * 2^-8 in practice.
    bound = 1e-6 if dtype == torch.float32 else 1.5 * 2.0**-8
    results = dict(y=(y, want), x=(x.grad, x64.grad), a=(linear.a.grad, a.grad), b=(linear.b.grad, b.grad))
    for name, (got, exact) in results.items():
        assert (got.double() - exact).norm() < bound * exact.norm(), name
    # Both are views of the flat vector that the optimizer updates, laid out as in Adapter's docstring.
    n = linear.a.numel()
    assert torch.equal(adapter.master.grad[:n].view_as(linear.a), linear.a.grad)
    assert adapter.master.grad.count_nonzero() == linear.a.numel() + linear.b.numel()
