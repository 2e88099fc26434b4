"""
Packing: where each token goes. Attention to a shared prompt and its backward, on a GPU too, against float64 autograd
through complete sequences. test_kernels.py tests the kernels one by one.

python -m pytest tests/test_attention.py -v
"""
import random
from dataclasses import astuple

import pytest
import torch
import torch.nn.functional as F

from attention import Layout, PackedAttention, lay_out

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")


# -----------------------------------------------------------------------------
# Where each token goes

def test_lay_out_by_hand():
    # The example in lay_out's docstring.
    assert lay_out([[1, 2, 7, 8], [1, 2, 5]], [2, 2]) == Layout([1, 2, 7], [2], [[1, 0]], [1, 2, 1])
    # Two rows after prompt 1 2, one after 5, two of one token after 7 8. Only the first prompt has suffixes.
    rows = [[1, 2, 3, 4], [5, 6, 9], [1, 2, 6], [1, 2, 3, 4], [7, 8, 1], [7, 8, 2]]
    assert lay_out([rows[0], rows[2], *rows[1:2], *rows[4:]], [2, 2, 1, 2, 2]) == Layout(
        [1, 2, 5, 6, 7, 8, 3], [2, 2, 2], [[1, 0], [0], [0, 0]], [1, 6, 1, 2, 3, 5, 5])


def test_lay_out_gives_each_token_its_context():
    # 500 random mixes, with groups of a single row, completions of a single token, and equal prompts apart.
    for seed in range(500):
        draw, rows, starts = random.Random(seed), [], []
        for _ in range(draw.randint(1, 4)):
            prompt = draw.choices((1, 2), k=draw.randint(1, 3))
            for _ in range(draw.randint(1, 4)):
                rows.append(prompt + draw.choices((1, 2), k=draw.choice((1, 1, 2, 4))))
                starts.append(len(prompt))
        tokens, lengths, suffixes, predictors = astuple(lay_out(rows, starts))
        left, seen = iter(tokens), []                                     # seen: the tokens that each place attends to
        prefixes = [[next(left) for _ in range(n)] for n in lengths]
        tails = [(prefix, [next(left) for _ in range(n)]) for prefix, b in zip(prefixes, suffixes) for n in b]
        for prefix, tail in [([], prefix) for prefix in prefixes] + tails:
            seen += [prefix + tail[:i + 1] for i in range(len(tail))]
        assert PackedAttention(lengths, "cpu", suffixes).positions.tolist() == [len(s) - 1 for s in seen]
        assert len(tokens) == len(seen)
        assert [seen[p] for p in predictors] == [r[:t] for r, s in zip(rows, starts) for t in range(s, len(r))]


# -----------------------------------------------------------------------------
# The softmax

def whole_sequences(q, k, v, prompts, groups):
    """The reference: PyTorch's attention on each prompt and on each prompt + completion, as separate sequences."""
    def one(at):
        rows = [t[at].transpose(0, 1) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(0, 1)
    out, start, tail = [], 0, sum(prompts)
    prefixes = []
    for p in prompts:
        prefixes.append(list(range(start, start + p)))
        out.append(one(prefixes[-1]))
        start += p
    for prefix, group in zip(prefixes, groups):
        for n in group:
            out.append(one(prefix + list(range(tail, tail + n)))[len(prefix):])
            tail += n
    return torch.cat(out)


@pytest.mark.parametrize("prompts,groups", [
    ((5,), [(3, 1)]), ((1,), [(1, 2, 3, 4, 5, 6, 7, 8)]), ((7, 2, 4), [(5, 3), (1, 6), ()]), ((3, 9), [])])
@pytest.mark.parametrize("device,dtype,heads,d", [
    ("cpu", torch.float64, (4, 2), 16), pytest.param("cuda", torch.bfloat16, (28, 4), 128, marks=needs_gpu),
    pytest.param("cuda", torch.float16, (14, 2), 64, marks=needs_gpu)])
def test_shared_prompt_attention_matches_separate_sequences(both, prompts, groups, device, dtype, heads, d):
    torch.manual_seed(0)
    scale = 1 if device == "cpu" else 40                                  # longer than a tile of a GPU kernel
    prompts, groups = [p * scale for p in prompts], [[n * scale for n in g] for g in groups]
    T = sum(prompts) + sum(n for g in groups for n in g)
    attention = PackedAttention(prompts, device, groups)
    inputs = [torch.randn(T, h, d, dtype=dtype, device=device, requires_grad=True) for h in (heads[0], *heads[1:] * 2)]
    upstream = torch.randn(T, heads[0], d, dtype=dtype, device=device)
    out = attention(*inputs)
    got = torch.autograd.grad(out, inputs, upstream)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = whole_sequences(*exact, prompts, groups)
    gradients = torch.autograd.grad(want, exact, upstream.double())
    # bf16: 2^-9 per rounding, of the products of q, k and v, two outputs, and up to three parts of a gradient.
    bound = {torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    for a, b in zip((out, *got), (want, *gradients)):
        assert (a - b).norm() < bound * b.norm()
    if device == "cuda":
        again = attention(*inputs)
        repeated = again, *torch.autograd.grad(again, inputs, upstream)
        assert all(torch.equal(a, b) for a, b in zip((out, *got), repeated))


def test_bf16_result_is_rounded_a_few_times(both):
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, h, 16).bfloat16() for h in (4, 2, 2))
    out = PackedAttention([300], "cpu")(q, k, v)
    want = whole_sequences(*(t.double() for t in (q, k, v)), [300], [()])
    assert out.dtype == torch.bfloat16 and (out - want).norm() < 2.0**-8 * want.norm()
