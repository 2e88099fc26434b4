"""
Operations whose backward is written by hand, because autograd's would keep or move tensors of gigabytes.

    gated_linear     silu(gate) * up of the fused gate|up linear; its backward writes the matmul's bf16 input at once
    token_logprobs   log softmax at the sampled tokens, without the (T, V) tensor

Both return what plain torch would (tests compare them with autograd on the full tensors).

Shapes: T tokens, D width, F feed-forward, V vocabulary.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import lora
from marlin_fp4 import mm_fp32


def swiglu(y, rstd, dtype):
    """Result of the gate|up matmul y (T, 2F) fp32 and 1/rms (T, 1) -> silu(gate) * up (T, F) in dtype."""
    if y.is_cuda:
        h = torch.empty(y.shape[0], y.shape[1] // 2, device=y.device, dtype=dtype)
        _swiglu_kernel[(y.shape[0], triton.cdiv(h.shape[1], 1024))](y, rstd, h, h.shape[1], BLOCK=1024, num_warps=8)
        return h
    gate, up = (y * rstd).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(dtype)


def swiglu_backward(y, rstd, dh, dy):
    """Writes dL/dy into dy (T, 2F), any row stride and dtype; returns dL/drstd (T, 1). dh (T, F) is dL/dh."""
    if y.is_cuda:
        drstd = torch.empty_like(rstd)
        _swiglu_backward_kernel[(y.shape[0],)](y, rstd, dh.contiguous(), dy, dy.stride(0), drstd, dh.shape[1],
                                               BLOCK=2048, num_warps=8)
        return drstd
    gate, up = (y * rstd).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    silu = gate * s
    dz = torch.cat([dh * up * (s + silu * (1 - s)), dh * silu], dim=-1)
    dy.copy_(dz * rstd)
    return (dz * y).sum(-1, keepdim=True)


@triton.jit
def _swiglu_kernel(y_ptr, rstd_ptr, h_ptr, F, BLOCK: tl.constexpr):
    """BLOCK columns of one row of swiglu()."""
    row = tl.program_id(0).to(tl.int64)                              # row * 2F passes 2^31 from 57k tokens of 7B on
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < F
    rstd = tl.load(rstd_ptr + row)
    gate = tl.load(y_ptr + row * 2 * F + col, mask=live, other=0.0) * rstd
    up = tl.load(y_ptr + row * 2 * F + F + col, mask=live, other=0.0) * rstd
    tl.store(h_ptr + row * F + col, (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty), mask=live)


@triton.jit
def _swiglu_backward_kernel(y_ptr, rstd_ptr, dh_ptr, dy_ptr, dy_stride, drstd_ptr, F, BLOCK: tl.constexpr):
    """One row of swiglu_backward(): reads y and dh once, writes dy once."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < F
        y_gate = tl.load(y_ptr + row * 2 * F + col, mask=live, other=0.0)
        y_up = tl.load(y_ptr + row * 2 * F + F + col, mask=live, other=0.0)
        dh = tl.load(dh_ptr + row * F + col, mask=live, other=0.0).to(tl.float32)
        gate, up = y_gate * rstd, y_up * rstd
        s = tl.sigmoid(gate)
        silu = gate * s
        dgate, dup = dh * up * (s + silu * (1 - s)), dh * silu
        total += dgate * y_gate + dup * y_up
        dy = dy_ptr + row * dy_stride + col
        tl.store(dy, (dgate * rstd).to(dy_ptr.dtype.element_ty), mask=live)
        tl.store(dy + F, (dup * rstd).to(dy_ptr.dtype.element_ty), mask=live)
    tl.store(drstd_ptr + row, tl.sum(total))


class _GatedLinear(torch.autograd.Function):
    """As two functions, the gradient between them would be fp32: 10 bytes of traffic an element instead of 2."""

    @staticmethod
    def forward(ctx, x, rstd, a, b, linear):
        y, xa = lora.matmul(x, linear)
        ctx.linear, ctx.rank = linear, linear.rank
        ctx.save_for_backward(xa, y, rstd)
        return swiglu(y, rstd, x.dtype)

    @staticmethod
    def backward(ctx, dh):
        xa, y, rstd = ctx.saved_tensors
        dy = lora.gradient_buffer(xa, ctx.linear, ctx.rank)
        drstd = swiglu_backward(y, rstd, dh, dy[:, :y.shape[1]])
        dx, da, db = lora.matmul_backward(xa, dy, ctx.linear, ctx.rank, ctx.needs_input_grad[2])
        return dx, drstd, da, db, None


def gated_linear(linear, x, rstd):
    """gate|up as one lora.Linear, x (T, D), rstd (T, 1) -> silu(gate * rstd) * up * rstd (T, F) in x's dtype."""
    a, b = (linear.a, linear.b) if linear.rank else (None, None)
    return _GatedLinear.apply(x, rstd, a, b, linear)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(x @ head.T * rstd / temperature) at `targets`, without the (T, V) tensor.

    One log-prob's gradient with respect to its own x is one row, (onehot - p) @ head * rstd / temperature. It is
    computed while the chunk's logits are at hand, so the backward is a multiplication and logits are computed once.
    """
    CHUNK = 512                                                      # rows a time: 0.3 GB of fp32 logits at V = 152k

    @staticmethod
    def forward(ctx, x, rstd, head, targets, temperature):
        n = x.shape[0]
        logprobs, entropy = torch.empty(2, n, device=x.device)
        needs_grad = any(ctx.needs_input_grad[:2])
        dx = torch.empty(x.shape, device=x.device) if needs_grad else None
        drstd = torch.empty_like(rstd) if needs_grad else None
        for i in range(0, n, _TokenLogprobs.CHUNK):
            s = slice(i, i + _TokenLogprobs.CHUNK)
            scale = rstd[s] / temperature                            # (c, 1)
            logits = mm_fp32(x[s], head.T).mul_(scale)               # (c, V)
            picked = logits.gather(1, targets[s, None])              # (c, 1)
            lse = logits.logsumexp(1, keepdim=True)
            p = torch.exp(logits - lse)
            mean_logit = torch.linalg.vecdot(p, logits)[:, None]     # (c, 1)
            logprobs[s], entropy[s] = (picked - lse)[:, 0], (lse - mean_logit)[:, 0]
            if needs_grad:
                drstd[s] = (picked - mean_logit) / rstd[s]
                p.neg_().scatter_add_(1, targets[s, None], torch.ones_like(picked))      # onehot - p
                dx[s] = mm_fp32(p.to(x.dtype), head).mul_(scale)
        ctx.save_for_backward(dx, drstd)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _):
        dx, drstd = ctx.saved_tensors
        return (dx * dlogprobs[:, None]).to(ctx.dtype), drstd * dlogprobs[:, None], None, None, None


def token_logprobs(x, rstd, head, targets, temperature):
    """x (T, D), rstd (T, 1), head (V, D), targets (T,) -> log-probs (T,) fp32 with a gradient, entropy (T,) without."""
    return _TokenLogprobs.apply(x, rstd, head, targets, temperature)
