"""
A linear and its adapter against autograd through an explicit W + s * B @ A in float64; its files are in test_peft.py.

python -m pytest tests/test_lora.py -v
"""

import pytest
import torch
from helpers import FP32, adapted, tokens_of
from safetensors.torch import load_file
from tiny_qwen2 import SHAPES, merged, plain_logits, random_adapter, set_adapter

import nvfp4
from lora import Linear, attach, load_adapter, save_adapter
from model import load
from sampler import Sampler, Sampling


def plain(case, adapter, scale, tokens):
    weights = merged(case.tensors, adapter, scale)
    return torch.stack([plain_logits(case.raw, weights, row) for row in tokens])


# -----------------------------------------------------------------------------
# What it computes

def test_every_a_starts_uniform_as_pefts_does_and_every_b_at_zero(tiny):
    model = load(tiny["untied"].folder, "bf16", "cpu")
    adapter = attach(model, rank=8)
    for linear in adapter.linears:                                        # kaiming_uniform_ with a = sqrt(5)
        bound = linear.weight.K ** -0.5
        assert 0.99 * bound < linear.a.max() <= bound and -bound <= linear.a.min() < -0.99 * bound
        assert abs(linear.a.mean()) < 0.1 * bound and not linear.b.any()
    first, other = (attach(model, rank=8, seed=seed).linears[0].a.clone() for seed in (0, 1))
    assert not torch.equal(first, other)


def test_of_two_adapters_that_are_loaded_in_turn_a_sampler_takes_the_last(tiny, tmp_path):
    # As in a notebook that compares the adapters of a run on one model.
    case, answers = tiny["tied"], {}
    fresh = load(case.folder, base="bf16", device="cpu")
    sampler = Sampler(fresh, 40, 1)
    for name, rank in (("a", 4), ("b", 3)):
        trained, _ = adapted(case, rank=rank, seed=rank)
        save_adapter(trained, tmp_path / name)
        answers[name] = Sampler(trained, 40, 1).generate([[1, 2, 3]], 1, Sampling(30, seed=1)).completions
    assert answers["a"] != answers["b"]
    for name in ("a", "b", "a"):
        load_adapter(fresh, tmp_path / name)
        assert sampler.generate([[1, 2, 3]], 1, Sampling(30, seed=1)).completions == answers[name]


@pytest.mark.parametrize("base", ["nvfp4", "bf16", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_with_b_zero_is_the_base_bit_for_bit(base, dtype):
    # Whole numbers up to 6: every sum is exact, in any order.
    torch.manual_seed(0)
    w = torch.randint(-1, 2, (48, 128)) * torch.tensor([1.0, 2.0, 3.0, 6.0]).repeat(32)
    linear = Linear(nvfp4.freeze([w], base, dtype), ["o"], (48,))
    x = torch.randint(-6, 7, (9, 128)).to(dtype)
    before = linear(x)
    attach(OneLinear(linear, dtype), rank=8, alpha=16)
    assert torch.equal(before.double(), x.double() @ w.double().T)
    assert linear.rank == 8 and torch.equal(linear(x), before)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_merged_weights(tiny, shape):
    case = tiny[shape]
    (model, adapter), tokens = adapted(case), tokens_of(case, 2, 13)
    with torch.no_grad():
        assert (model(tokens) - plain(case, adapter, 6 / 4, tokens)).abs().max() < FP32


def test_each_part_of_a_fused_linear_adds_its_own_adapter_alone(tiny):
    # One module's adapter at a time: a part of a fused linear must not see its neighbour's.
    case, tokens = tiny["untied"], tokens_of(tiny["untied"], 1, 9)
    model, adapter = adapted(case)
    for linear in model.layers[1].qkv, model.layers[1].o, model.layers[1].gate_up, model.layers[1].down:
        for name in linear.names:
            only = {n: t if name in n else torch.zeros_like(t) for n, t in adapter.items()}
            set_adapter(model, only)
            with torch.no_grad():
                assert (model(tokens) - plain(case, only, 6 / 4, tokens)).abs().max() < FP32, name


def test_off_gives_the_base_bit_for_bit_and_back(tiny):
    tokens, base = tokens_of(tiny["tied"], 2, 13), load(tiny["tied"].folder, base="nvfp4", device="cpu")
    model, _ = adapted(tiny["tied"], base="nvfp4")
    with torch.no_grad():
        want, on = base(tokens), model(tokens)
        with pytest.raises(KeyboardInterrupt):
            with model.adapter.off():
                assert torch.equal(model(tokens), want)
                raise KeyboardInterrupt
        assert torch.equal(model(tokens), on) and not torch.equal(on, want)


def test_sync_rewrites_the_working_copies_where_they_are(tiny):
    # CUDA graphs hold these addresses.
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
    """A frozen (N, K) and the float64 matrix it stands for."""
    weights = [torch.randn(n, K) * std for n in parts]
    if kind == "foreign":                                                 # a tensor scale per part, none a power of two
        tensors = [nvfp4.quantize(w, w.abs().max() / 2688) for w in weights]
        return nvfp4.fuse(tensors, dtype), torch.cat([nvfp4.dequantize(*t, torch.float64) for t in tensors])
    weight = nvfp4.freeze(weights, kind, dtype)
    return weight, weight.dequantize().double() if kind != "bf16" else torch.cat(weights).bfloat16().double()


class OneLinear(torch.nn.Module):
    """As much of a model as attach() looks at."""

    def __init__(self, linear, dtype=torch.float32):
        super().__init__()
        self.linear, self.layers, self.dtype = linear, [], dtype


@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "foreign", "mxfp4", "nf4"])
@pytest.mark.parametrize("parts", [(48,), (64, 16, 16), (40, 24)])
def test_gradients_equal_autograd_through_the_merged_matrix(kind, parts):
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
    # Up to 128 fp32 terms: a result is off by about sqrt(128) * 2^-24 = 7e-7 of its scale; twice in a row for x and A.
    results = dict(y=(y, want), x=(x.grad, x64.grad), a=(linear.a.grad, a.grad), b=(linear.b.grad, b.grad))
    for name, (got, exact) in results.items():
        assert (got - exact).abs().max() < 5e-6 * exact.abs().max(), name
    # Both land in the flat vector that the optimizer steps, where Adapter's docstring draws them.
    n = linear.a.numel()
    assert torch.equal(adapter.master.grad[:n].view_as(linear.a), linear.a.grad)
    assert adapter.master.grad.count_nonzero() == linear.a.numel() + linear.b.numel()


@pytest.mark.parametrize("std", [0.02, 0.002])                            # of weights; 1 / sqrt(K) of 7B is 0.017
@pytest.mark.parametrize("kind", ["nvfp4", "foreign"])
def test_bf16_gradients_are_those_of_float64_but_for_their_rounding(kind, std):
    # A folder of another quantizer has tensor scales like 2e-5, no power of two. u = 2^-8 is one rounding.
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
    # One rounding each of x @ A.T, W, A, s * B and dy; a sum of N fp32 terms rounds less than one more.
    w_off = 1.01 * u * w.abs()
    x_abs, dy_abs, a_abs, spread_abs = x64.abs(), dy.abs(), a.abs(), spread.abs()
    bounds = {
        "y": (y, x64 @ w.T + xa @ spread.T,
              x_abs @ w_off.T + 3.1 * u * (x_abs @ a_abs.T) @ spread_abs.T),
        "x": (x.grad, dy @ w + dxa @ a,
              dy_abs @ (w_off + 2.1 * u * w.abs()) + 5.1 * u * (dy_abs @ spread_abs) @ a_abs),
        "a": (linear.a.grad, dxa.T @ x64, 3.1 * u * (dy_abs @ spread_abs).T @ x_abs)}
    for name, (got, want, bound) in bounds.items():
        assert ((got.double() - want).abs() <= bound + 1e-7).all(), name
        # Roundings go up as often as down and cancel: 0.94 u was seen, 0.05 %.
        assert (got.double() - want).norm() < 1.5 * u * want.norm(), name
    for p, rows in enumerate(rows_of):
        own, own_abs = xa[:, p * R:(p + 1) * R], (x_abs @ a_abs.T)[:, p * R:(p + 1) * R]
        off = (linear.b.grad[rows].double() - s * dy[:, rows].T @ own).abs()
        assert (off <= 3.1 * u * s * dy_abs[:, rows].T @ own_abs + 1e-7).all()


def test_whole_model_gradient_equals_float64_finite_differences(tiny, tmp_path):
    # Not autograd: central differences of the float64 forward along three directions of the whole adapter.
    case, scale, step = tiny["ragged"], 6 / 4, 1e-5
    model, adapter = adapted(case)
    row = tokens_of(case, 14).tolist()
    model.adapter.master.grad.zero_()
    model.token_logprobs([row], [5])[0].sum().backward()

    def value(tensors):
        log_p = plain_logits(case.raw, merged(case.tensors, tensors, scale), row).log_softmax(-1)
        return log_p[range(4, 13), row[5:]].sum()

    # The gradient by PEFT's names: save_adapter writes whatever the master vector holds.
    model.adapter.master.data.copy_(model.adapter.master.grad)
    save_adapter(model, tmp_path)
    gradient = {name: t.double() for name, t in load_file(tmp_path / "adapter_model.safetensors").items()}
    for seed in range(3):
        direction = {n: t.double() for n, t in random_adapter(case.raw, 4, seed=10 + seed).items()}
        up, down = ({n: t.double() + sign * step * direction[n] for n, t in adapter.items()} for sign in (1, -1))
        want = (value(up) - value(down)) / (2 * step)
        got = sum((gradient[n] * direction[n]).sum() for n in direction)
        assert abs(got - want) < 1e-4 * max(abs(want), 1), (got, want)


# -----------------------------------------------------------------------------
# Files

def test_adapter_comes_back_from_its_folder_bit_for_bit(tiny, tmp_path):
    case = tiny["untied"]
    model, _ = adapted(case, base="nvfp4")
    save_adapter(model, tmp_path / "adapter")
    again = load(case.folder, base="nvfp4", device="cpu")
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again.adapter.master, model.adapter.master)
    tokens = tokens_of(case, 2, 13)
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_rank_of_0_and_wrong_shapes_are_refused(tiny):
    with pytest.raises(AssertionError, match="rank must be at least 1, got 0"):
        attach(load(tiny["tied"].folder, base="bf16", device="cpu"), rank=0)
    model, _ = adapted(tiny["tied"])
    with pytest.raises(AssertionError, match=r"q_proj: x \(3, 65\), not K=64"):
        model.layers[0].qkv(torch.zeros(3, 65))
    y = model.layers[0].o(torch.zeros(3, 64, requires_grad=True))
    with model.adapter.off(), pytest.raises(AssertionError, match="switched between forward and backward"):
        y.sum().backward()
    with pytest.raises(AssertionError, match="do not add up to N=64"):
        weight = nvfp4.freeze([torch.zeros(64, 64)], "bf16", torch.float32)
        Linear(weight, ["a", "b"], (32, 16))


# -----------------------------------------------------------------------------
# The buffer of expanded matrices

def test_a_scratch_that_ran_out_of_memory_works_again_afterwards(tiny, monkeypatch):
    # memory.Plan tries a large micro-batch, runs out of memory and goes on with a smaller one.
    model, _ = adapted(tiny["tied"])
    model.layers[0].qkv.scratch.flat = torch.empty(1)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
        full.setattr(torch, "empty", out_of_memory)
        model.layers[0].qkv.wide_weight()
    assert model.layers[0].qkv.wide_weight().shape == (128 + 12, 64 + 12)


def test_the_linears_of_a_model_share_one_scratch_and_two_models_none(tiny):
    # A buffer that two models shared would let one write over the other's expanded matrix.
    one, other = (adapted(tiny[shape])[0] for shape in ("tied", "untied"))
    scratches = [{id(linear.scratch) for linear in model.adapter.linears} for model in (one, other)]
    assert [len(s) for s in scratches] == [1, 1] and scratches[0] != scratches[1]
    wide = one.layers[0].qkv.wide_weight().fill_(7)                 # its corner, never read, may hold NaN
    tokens = tokens_of(tiny["untied"], 1, 5)
    with torch.no_grad():
        other(tokens)
    other.token_logprobs([tokens[0].tolist()], [2])[0].sum().backward()
    assert (wide == 7).all()
    assert one.layers[0].qkv.scratch.flat.data_ptr() != other.layers[0].qkv.scratch.flat.data_ptr()


