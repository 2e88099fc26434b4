"""
A linear and its adapter against autograd through an explicit W + s * B @ A in float64. test_peft.py tests the files.

python -m pytest tests/test_lora.py -v
"""

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


class OneLinear(torch.nn.Module):
    """The parts of a model that attach() uses."""

    def __init__(self, linear, dtype=torch.float32):
        super().__init__()
        self.linear, self.layers, self.dtype = linear, [], dtype


@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "foreign"])
@pytest.mark.parametrize("parts", [(48,), (64, 16, 16), (40, 24)])
def test_gradients_match_autograd_through_the_merged_matrix(both, kind, parts):
    torch.manual_seed(0)
    M, K, R, alpha = 11, 128, 4, 10
    weight, w = frozen_weight(kind, parts, K)
    linear = Linear(weight, [f"part{p}" for p in range(len(parts))], parts)
    adapter = attach(OneLinear(linear), rank=R, alpha=alpha)
    with torch.no_grad():
        linear.b.normal_()
    adapter.sync()
    x, upstream = torch.randn(M, K, requires_grad=True), torch.randn(M, sum(parts))
    y = linear(x)
    y.backward(upstream)

    a, b, x64 = (t.detach().double().requires_grad_() for t in (linear.a, linear.b, x))
    delta = torch.cat([rows @ a_p for rows, a_p in zip(b.split(parts), a.split(R))])
    want = x64 @ (w + alpha / R * delta).T
    want.backward(upstream.double())
    # Sums of up to 128 fp32 terms are off by about sqrt(128) * 2^-24 = 7e-7 of their scale, twice in a row for x and A.
    results = dict(y=(y, want), x=(x.grad, x64.grad), a=(linear.a.grad, a.grad), b=(linear.b.grad, b.grad))
    for name, (got, exact) in results.items():
        assert (got - exact).abs().max() < 5e-6 * exact.abs().max(), name
    # Both are views of the flat vector that the optimizer updates, laid out as in Adapter's docstring.
    n = linear.a.numel()
    assert torch.equal(adapter.master.grad[:n].view_as(linear.a), linear.a.grad)
    assert adapter.master.grad.count_nonzero() == linear.a.numel() + linear.b.numel()


@pytest.mark.parametrize("std", [0.02, 0.002])                            # of the weights; a 7B's 1 / sqrt(K) is 0.017
@pytest.mark.parametrize("kind", ["nvfp4", "foreign"])
def test_bf16_gradients_are_off_by_their_roundings(both, kind, std):
    # Folders of other quantizers have global scales like 2e-5, no powers of two. u = 2^-8 is one rounding.
    torch.manual_seed(0)
    parts, M, K, R, alpha, u = (64, 32, 32), 24, 128, 4, 8, 2.0**-8
    weight, w = frozen_weight(kind, parts, K, torch.bfloat16, std)
    linear = Linear(weight, ["q", "k", "v"], parts)
    adapter = attach(OneLinear(linear, torch.bfloat16), rank=R, alpha=alpha)
    linear.b.data.normal_(0, 0.02)
    adapter.sync()
    x, upstream = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(M, sum(parts))
    y = linear(x)
    y.backward(upstream)

    a, b, x64, dy = (t.detach().double() for t in (linear.a, linear.b, x, upstream))
    s = alpha / R
    spread = torch.zeros(sum(parts), len(parts) * R, dtype=torch.float64)              # s * B, block diagonal
    rows_of = torch.arange(sum(parts)).split(parts)
    for p, rows in enumerate(rows_of):
        spread[rows, p * R:(p + 1) * R] = s * b[rows]
    xa, dxa = x64 @ a.T, dy @ spread
    db = torch.cat([s * dy[:, rows].T @ xa[:, p * R:(p + 1) * R] for p, rows in enumerate(rows_of)])
    results = {"y": (y, x64 @ w.T + xa @ spread.T), "x": (x.grad, dy @ w + dxa @ a),
               "a": (linear.a.grad, dxa.T @ x64), "b": (linear.b.grad, db)}
    for name, (got, want) in results.items():
        # One rounding each for x @ A.T, W, A, s * B and dy, which go up as often as down: 0.94 u in practice.
        assert (got.double() - want).norm() < 1.5 * u * want.norm(), name
