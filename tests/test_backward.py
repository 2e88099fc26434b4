"""
The hand-written backwards against float64 autograd on the full tensors.

python -m pytest tests/test_backward.py -v
"""
import pytest
import torch
import torch.nn.functional as F

from backward import (_TokenLogprobs, attention, merge, mlp, scores, spans, swiglu, swiglu_backward, token_logprobs)
from lora import Adapter, Linear
from model import freeze

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the kernels with plain torch")


def whole_sequences(q, k, v, prompts, groups):
    """Each prompt and each prompt + completion as a sequence of its own through PyTorch's attention: the reference."""
    def one(at):
        rows = [t[at].transpose(0, 1) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(0, 1)
    out, start, tail = [], 0, sum(prompts)
    trunks = []
    for p in prompts:
        trunks.append(list(range(start, start + p)))
        out.append(one(trunks[-1]))
        start += p
    for trunk, group in zip(trunks, groups):
        for n in group:
            out.append(one(trunk + list(range(tail, tail + n)))[len(trunk):])
            tail += n
    return torch.cat(out)


@pytest.mark.parametrize("prompts,groups", [
    ((5,), [(3, 1)]), ((1,), [(1, 2, 3, 4, 5, 6, 7, 8)]), ((7, 2, 4), [(5, 3), (1, 6)]), ((3, 9), [])])
@pytest.mark.parametrize("device,dtype,heads,d", [
    ("cpu", torch.float64, (4, 2), 16), pytest.param("cuda", torch.bfloat16, (28, 4), 128, marks=needs_gpu),
    pytest.param("cuda", torch.float16, (14, 2), 64, marks=needs_gpu)])
def test_attention_of_completions_to_one_prompt_equals_whole_sequences(prompts, groups, device, dtype, heads, d):
    torch.manual_seed(0)
    scale = 1 if device == "cpu" else 40                                  # longer than a tile of the GPU's kernels
    prompts, groups = [p * scale for p in prompts], [[n * scale for n in g] for g in groups]
    tails = [n for g in groups for n in g]
    T, shared = sum(prompts) + sum(tails), sum(prompts[:len(groups)])
    inside = spans(prompts + tails, prompts + tails, True, device)
    across = spans([sum(g) for g in groups], prompts[:len(groups)], False, device) if groups else None
    inputs = [torch.randn(T, h, d, dtype=dtype, device=device, requires_grad=True) for h in (heads[0], *heads[1:] * 2)]
    upstream = torch.randn(T, heads[0], d, dtype=dtype, device=device)
    out = attention(*inputs, inside, across, sum(prompts), shared)
    got = torch.autograd.grad(out, inputs, upstream)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = whole_sequences(*exact, prompts, groups)
    gradients = torch.autograd.grad(want, exact, upstream.double())
    # bf16: 2^-9 for each rounding of q, k, v's products, of two outputs and of up to three parts of a gradient.
    bound = {torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    for a, b in zip((out, *got), (want, *gradients)):
        assert (a - b).norm() < bound * b.norm()
    if device == "cuda":
        again = torch.autograd.grad(attention(*inputs, inside, across, sum(prompts), shared), inputs, upstream)
        assert all(torch.equal(a, b) for a, b in zip(got, again))


@needs_gpu
@pytest.mark.parametrize("H,d", [(28, 128), (14, 64), (40, 128)])
def test_merge_kernel_equals_plain_torch(H, d):
    torch.manual_seed(0)
    (out, other), (lse, other_lse) = torch.randn(2, 9, H, d), 9 * torch.randn(2, H, 9)
    got, got_lse = out.cuda(), torch.cat([lse, lse], 1).cuda()[:, :9]                    # a row stride, as slices have
    merge(got, got_lse, other.cuda(), other_lse.cuda())
    merge(out, lse, other, other_lse)
    assert (got.cpu() - out).abs().max() < 1e-5 and (got_lse.cpu() - lse).abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_logprob_gradient_equals_autograd_through_the_whole_tensor(monkeypatch, chunk):
    monkeypatch.setattr(_TokenLogprobs, "CHUNK", chunk)
    torch.manual_seed(0)
    n, D, V, padding, temperature = 17, 32, 50, 11, 0.7
    x, head, targets = torch.randn(n, D), torch.randn(V, D) / 3, torch.randint(V, (n,))
    rstd, upstream = torch.rand(n, 1) + 0.5, torch.randn(n)
    x64, rstd64 = x.double().requires_grad_(), rstd.double().requires_grad_()
    log_p = (x64 @ head.double().T * rstd64 / temperature).log_softmax(-1)
    want = log_p[torch.arange(n), targets]
    want.backward(upstream.double())
    x, rstd = x.requires_grad_(), rstd.requires_grad_()
    padded = torch.cat([head, 30 * torch.randn(padding, D)])              # rows nobody trains may well be large
    got, entropy = token_logprobs(x, rstd, padded, targets, V, temperature)
    got.backward(upstream)
    assert not entropy.requires_grad
    # 50 terms of size ~3 in fp32: 50 * 3 * 2^-24 = 1e-5.
    for a, b in ((got, want), (entropy, -(log_p.exp() * log_p).sum(-1)), (x.grad, x64.grad), (rstd.grad, rstd64.grad)):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
@pytest.mark.parametrize("adapter", [False, True])
def test_mlp_gradients_equal_autograd_through_the_merged_matrices(base, adapter):
    torch.manual_seed(0)
    M, D, width, R, alpha = 9, 64, 48, 4, 10
    gate_up = Linear(freeze([torch.randn(width, D) * 0.2 for _ in range(2)], base, torch.float32), ["gate", "up"],
                     (width, width))
    down = Linear(freeze([torch.randn(D, width) * 0.2], base, torch.float32), ["down"], (D,))
    w_in, w_out = gate_up.merged().double(), down.merged().double()
    leaves = [torch.randn(M, D, requires_grad=True), (torch.rand(M, 1) + 0.5).requires_grad_()]      # x, rstd
    if adapter:
        stub = torch.nn.Module()                                          # as much of a model as Adapter looks at
        stub.gate_up, stub.down, stub.layers, stub.dtype = gate_up, down, [], torch.float32
        Adapter(stub, rank=R, alpha=alpha)
        for linear in (gate_up, down):
            linear.b.data.normal_()
            leaves += [linear.a, linear.b]
        stub.adapter.sync()
    upstream = torch.randn(M, D)
    out = mlp(gate_up, down, *leaves[:2])
    out.backward(upstream)

    exact = [t.detach().double().requires_grad_() for t in leaves]
    if adapter:
        a_in, b_in, a_out, b_out = exact[2:]
        w_in = w_in + alpha / R * torch.cat([b @ a for b, a in zip(b_in.split(width), a_in.split(R))])
        w_out = w_out + alpha / R * b_out @ a_out
    gate, up = (exact[0] @ w_in.T * exact[1]).chunk(2, dim=-1)
    want = F.silu(gate) * up @ w_out.T
    want.backward(upstream.double())
    # Sums of up to 96 fp32 terms, three in a row: about 2e-6 of the result's scale.
    assert (out - want).abs().max() < 1e-5 * want.abs().max()
    for got, e in zip(leaves, exact):
        assert (got.grad - e.grad).abs().max() < 1e-5 * e.grad.abs().max()


@needs_gpu
@pytest.mark.parametrize("M,width", [(1, 16), (5, 1000), (3, 4864)])      # less than, between and beyond whole blocks
def test_swiglu_kernels_equal_plain_torch(M, width):
    torch.manual_seed(0)
    y, rstd, dh = 2 * torch.randn(M, 2 * width), torch.rand(M, 1) + 0.5, torch.randn(M, width)
    want_dy, got_dy = torch.empty(M, 2 * width), torch.full((M, 2 * width + 8), 7.0, device="cuda")       # a row stride
    want_drstd = swiglu_backward(y, rstd, dh, want_dy)
    got_drstd = swiglu_backward(y.cuda(), rstd.cuda(), dh.cuda(), got_dy[:, :2 * width])
    # The GPU's exp is good to 2^-22 relative, and results reach 100.
    wide, h = torch.full((M, width + 8), 7.0, device="cuda"), torch.empty(M, width)
    rounded = swiglu(y.cuda(), rstd.cuda(), wide[:, :width])
    assert torch.equal(swiglu(y, rstd, h), rounded.cpu()) and torch.equal(rounded.cpu(), y)
    assert (wide[:, :width].cpu() - h).abs().max() < 1e-4 and (wide[:, width:] == 7).all()
    assert torch.equal(swiglu(y.cuda(), rstd.cuda(), wide[:, :width].bfloat16()).cpu(), y.bfloat16())
    assert (got_dy[:, :2 * width].cpu() - want_dy).abs().max() < 1e-4
    assert (got_dy[:, 2 * width:] == 7).all()
    assert (got_drstd.cpu() - want_drstd).abs().max() < 1e-6 * width + 1e-4


@needs_gpu
@pytest.mark.parametrize("c,V,live", [(1, 5, 5), (7, 4096, 4096), (3, 10001, 9000), (2, 8208, 4095)])    # 1 to 3 blocks
def test_scores_kernel_equals_plain_torch(c, V, live):
    torch.manual_seed(0)
    products, scale, targets = 9 * torch.randn(c, V), torch.rand(c, 1) + 0.5, torch.randint(live, (c,))
    products[:, live:] = 1e30                                             # e^1e30 is inf
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        got, got_ahead = scores(products.cuda(), scale.cuda(), targets.cuda(), live, dtype)
        want, ahead = scores(products.clone(), scale, targets, live, dtype)
        assert (got.cpu() - torch.stack(want)).abs().max() < 1e-4         # logits of 50: 2^-23 of that, times a few
        if dtype:
            assert (got_ahead.cpu().float() - ahead.float()).abs().max() < (1e-5 if dtype == torch.float32 else 2**-8)
            assert not got_ahead[:, live:].any() and not ahead[:, live:].any()
