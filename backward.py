"""
Operations whose backward is written by hand, because autograd's would keep or move tensors of gigabytes.

    attention        causal inside sequences, and of several continuations to the one sequence they share
    mlp              down(silu(gate) * up); its backward writes the inputs of the matmuls in 16 bits at once
    token_logprobs   log softmax at the sampled tokens, without the (T, V) tensor

All return what plain torch would (tests compare them with autograd on the full tensors).

Shapes: T tokens, D width, F feed-forward, V vocabulary, H query heads, KV key-value heads, d head size.
"""
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import lora
from marlin_fp4 import mm_fp32


# -----------------------------------------------------------------------------
# Attention

class Spans(NamedTuple):
    """Which queries see which keys: queries q_starts[i]..q_starts[i + 1] those of k_starts[i]..k_starts[i + 1]."""
    q_starts: torch.Tensor                                           # (n + 1,) int32
    k_starts: torch.Tensor                                           # equal to q_starts where causal
    longest_q: int
    longest_k: int
    causal: bool


def spans(q_lengths, k_lengths, causal, device):
    starts = [torch.tensor([0, *n], device=device).cumsum(0).to(torch.int32) for n in (q_lengths, k_lengths)]
    return Spans(*starts, max(q_lengths), max(k_lengths), causal)


def attend(q, k, v, s):
    """q (T, H, d), k, v (S, KV, d) -> out (T, H, d), log-sum-exp of its scores (H, T) fp32."""
    if q.is_cuda and q.dtype.itemsize == 2:                          # FlashAttention 2, varlen
        flash = torch.ops.aten._flash_attention_forward
        return flash(q, k, v, s.q_starts, s.k_starts, s.longest_q, s.longest_k, 0.0, s.causal, False)[:2]
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, _, _, _, values, scores in _each_span(q, k, v, s):
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", (scores - lse[:, rows, None]).exp(), values).to(q.dtype)
    return out, lse


def attend_backward(dout, q, k, v, out, lse, s):
    """-> dq, dk, dv of attend() for out and lse of a softmax over these keys and, it may be, others.

    Probabilities are exp(score - lse) and the softmax's own term is out . dout: with those of the whole, the gradients
    are this part's share of the whole's.
    """
    if q.is_cuda and q.dtype.itemsize == 2:
        unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # of dropout
        with _same_bits_every_time():
            return torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, s.q_starts, s.k_starts, s.longest_q, s.longest_k, 0.0, s.causal, *unused)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    own = (dout.to(lse.dtype) * out).sum(-1).T[:, :, None]           # (H, T, 1)
    for rows, columns, query, key, value, scores in _each_span(q, k, v, s):
        p, upstream = (scores - lse[:, rows, None]).exp(), dout[rows].to(lse.dtype)
        ds = p * (torch.einsum("qhd,khd->hqk", upstream, value) - own[:, rows]) * q.shape[-1] ** -0.5
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, key).to(q.dtype)
        for grad, t in ((dk, torch.einsum("hqk,qhd->khd", ds, query)), (dv, torch.einsum("hqk,qhd->khd", p, upstream))):
            grad[columns] = t.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)          # over the heads of a key head
    return dq, dk, dv


def _each_span(q, k, v, s):
    """Of plain torch: yields places of queries and of keys, then query, key, value (., H, d) and scores (H, ., .)."""
    work, H = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    q_starts, k_starts = s.q_starts.tolist(), s.k_starts.tolist()
    for i in range(len(q_starts) - 1):
        rows, columns = slice(*q_starts[i:i + 2]), slice(*k_starts[i:i + 2])
        query = q[rows].to(work)
        key, value = (t[columns].to(work).repeat_interleave(H // k.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query, key) * q.shape[-1] ** -0.5
        if s.causal:
            scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        yield rows, columns, query, key, value, scores


@contextmanager
def _same_bits_every_time():
    """FlashAttention's backward adds up dq by atomics, in any order, unless this global switch says otherwise."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def merge(out, lse, other, other_lse):
    """Softmax over two sets of keys from those over each: into out (T, H, d) and lse (H, T), in place."""
    if out.is_cuda:
        T, H, d = out.shape
        _merge_kernel[(T,)](out, lse, lse.stride(0), other, other_lse, other_lse.stride(0), H,
                            BLOCK_H=triton.next_power_of_2(H), D=d, BLOCK_D=triton.next_power_of_2(d))
        return
    both = torch.logaddexp(lse, other_lse)
    mine, its = ((t - both).exp().T[:, :, None] for t in (lse, other_lse))
    out.copy_(out * mine + other * its)
    lse.copy_(both)


@triton.jit
def _merge_kernel(out_ptr, lse_ptr, lse_stride, other_ptr, other_lse_ptr, other_stride, H,
                  BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One token of merge()."""
    token = tl.program_id(0).to(tl.int64)
    head, col = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    a = tl.load(lse_ptr + head * lse_stride + token, mask=head < H, other=0.0)
    b = tl.load(other_lse_ptr + head * other_stride + token, mask=head < H, other=0.0)
    top = tl.maximum(a, b)
    both = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
    at = token * H * D + head[:, None] * D + col[None, :]
    live = (head < H)[:, None] & (col < D)[None, :]
    mine = tl.load(out_ptr + at, mask=live, other=0.0).to(tl.float32) * tl.exp(a - both)[:, None]
    its = tl.load(other_ptr + at, mask=live, other=0.0).to(tl.float32) * tl.exp(b - both)[:, None]
    tl.store(out_ptr + at, (mine + its).to(out_ptr.dtype.element_ty), mask=live)
    tl.store(lse_ptr + head * lse_stride + token, both, mask=head < H)


class _Attention(torch.autograd.Function):
    """Two softmaxes merged by their log-sum-exp: of every token over its own sequence, causal, and of the tokens from
    `first` on over the first `shared` tokens of all, as `across` says."""

    @staticmethod
    def forward(ctx, q, k, v, inside, across, first, shared):
        out, lse = attend(q, k, v, inside)
        if across:
            merge(out[first:], lse[:, first:], *attend(q[first:], k[:shared], v[:shared], across))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = inside, across, first, shared
        return out

    @staticmethod
    def backward(ctx, dout):
        (q, k, v, out, lse), (inside, across, first, shared) = ctx.saved_tensors, ctx.plan
        dout = dout.contiguous()
        dq, dk, dv = attend_backward(dout, q, k, v, out, lse, inside)
        if across:
            more = attend_backward(dout[first:], q[first:], k[:shared], v[:shared], out[first:],
                                   lse[:, first:].contiguous(), across)
            for whole, part in zip((dq[first:], dk[:shared], dv[:shared]), more):
                whole += part
        return dq, dk, dv, None, None, None, None


def attention(q, k, v, inside, across=None, first=0, shared=0):
    """q (T, H, d), k, v (T, KV, d) -> (T, H, d); see _Attention."""
    return _Attention.apply(q, k, v, inside, across, first, shared)


# -----------------------------------------------------------------------------
# The MLP

def swiglu(y, rstd, h, keep=True):
    """Writes silu(gate) * up into h (T, F), rows of any stride -> y in its dtype, if that is to be kept.

    y (T, 2F) fp32 is the result of the gate|up matmul, rstd (T, 1) 1/rms.
    """
    if y.is_cuda:
        rounded = torch.empty_like(y, dtype=h.dtype) if keep else None
        _swiglu_kernel[(y.shape[0], triton.cdiv(h.shape[1], 1024))](
            y, rstd, h, h.stride(0), rounded if keep else h, h.shape[1], KEEP=keep, BLOCK=1024, num_warps=8)
        return rounded
    gate, up = (y * rstd).chunk(2, dim=-1)
    h.copy_(F.silu(gate) * up)
    return y.to(h.dtype)


def swiglu_backward(y, rstd, dh, dy):
    """Writes dL/dy into dy (T, 2F), any row stride and dtype; returns dL/drstd (T, 1) fp32. dh (T, F) is dL/dh."""
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
    return (dz * y).sum(-1, keepdim=True, dtype=rstd.dtype)


@triton.jit
def _swiglu_kernel(y_ptr, rstd_ptr, h_ptr, h_stride, rounded_ptr, F, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row of swiglu()."""
    row = tl.program_id(0).to(tl.int64)                              # row * 2F passes 2^31 from 57k tokens of 7B on
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < F
    rstd = tl.load(rstd_ptr + row)
    gate = tl.load(y_ptr + row * 2 * F + col, mask=live, other=0.0)
    up = tl.load(y_ptr + row * 2 * F + F + col, mask=live, other=0.0)
    if KEEP:
        tl.store(rounded_ptr + row * 2 * F + col, gate.to(h_ptr.dtype.element_ty), mask=live)
        tl.store(rounded_ptr + row * 2 * F + F + col, up.to(h_ptr.dtype.element_ty), mask=live)
    gate, up = gate * rstd, up * rstd
    tl.store(h_ptr + row * h_stride + col, (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty), mask=live)


@triton.jit
def _swiglu_backward_kernel(y_ptr, rstd_ptr, dh_ptr, dy_ptr, dy_stride, drstd_ptr, F, BLOCK: tl.constexpr):
    """One row of swiglu_backward(): reads y and dh once, writes dy once."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < F
        y_gate = tl.load(y_ptr + row * 2 * F + col, mask=live, other=0.0).to(tl.float32)
        y_up = tl.load(y_ptr + row * 2 * F + F + col, mask=live, other=0.0).to(tl.float32)
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


class _Mlp(torch.autograd.Function):
    """As three functions, the gradients between them would be fp32, and h be copied to where x @ A.T stands beside it.

    The backward reads y as rounded to x's dtype, as it does every other operand: half of what a block has to keep.
    """

    @staticmethod
    def forward(ctx, x, rstd, gate_up, down, *_):
        y, xa = lora.matmul(x, gate_up)
        ha = lora.with_room(y.shape[0], down, x)
        y = swiglu(y, rstd, ha[:, :down.weight.K], keep=ctx.needs_input_grad[0])
        out, ha = lora.matmul(ha[:, :down.weight.K], down, ha)
        ctx.linears, ctx.ranks = (gate_up, down), (gate_up.rank, down.rank)
        ctx.save_for_backward(xa, y, rstd, ha)
        return out

    @staticmethod
    def backward(ctx, dout):
        (xa, y, rstd, ha), (gate_up, down), ranks = ctx.saved_tensors, ctx.linears, ctx.ranks
        buffer = lora.gradient_buffer(ha, down, ranks[1])
        buffer[:, :dout.shape[1]] = dout
        dh, *of_down = lora.matmul_backward(ha, buffer, down, ranks[1], ctx.needs_input_grad[6])
        dy = lora.gradient_buffer(xa, gate_up, ranks[0])
        drstd = swiglu_backward(y, rstd, dh, dy[:, :y.shape[1]])
        dx, *of_gate_up = lora.matmul_backward(xa, dy, gate_up, ranks[0], ctx.needs_input_grad[4])
        return dx, drstd, None, None, *of_gate_up, *of_down


def mlp(gate_up, down, x, rstd):
    """Two lora.Linears, x (T, D), rstd (T, 1) -> (silu(gate * rstd) * up * rstd) through down (T, D) fp32."""
    adapters = (t for linear in (gate_up, down) for t in ((linear.a, linear.b) if linear.rank else (None, None)))
    return _Mlp.apply(x, rstd, gate_up, down, *adapters)


# -----------------------------------------------------------------------------
# Log-probs

def scores(products, scale, targets, live, dtype=None):
    """products (c, V) fp32, scale (c, 1) -> of logits = products[:, :live] * scale: (target's, log-sum-exp, mean under
    softmax), each (c,), and onehot(targets) - softmax (c, V) in dtype, zeros from `live` on, None if dtype is.
    Overwrites products."""
    c, V = products.shape
    if products.is_cuda:
        sums, ahead = products.new_empty(3, c), products.new_empty(c, V, dtype=dtype) if dtype else products
        _scores_kernel[(c,)](products, scale, targets, sums, ahead, c, V, live, AHEAD=dtype is not None, BLOCK=4096,
                             num_warps=8)
        return sums, ahead if dtype else None
    logits = products[:, :live].mul_(scale)
    picked, lse = logits.gather(1, targets[:, None]), logits.logsumexp(1, keepdim=True)
    p = torch.exp(logits - lse)
    sums = picked[:, 0], lse[:, 0], torch.linalg.vecdot(p, logits)
    if dtype is None:
        return sums, None
    return sums, F.pad(p.neg_().scatter_add_(1, targets[:, None], torch.ones_like(picked)), (0, V - live)).to(dtype)


@triton.jit
def _scores_kernel(products_ptr, scale_ptr, targets_ptr, sums_ptr, ahead_ptr, c, V, live, AHEAD: tl.constexpr,
                   BLOCK: tl.constexpr):
    """One row of scores(): reads it twice, where plain torch moves it twenty times."""
    row = tl.program_id(0).to(tl.int64)
    scale, target = tl.load(scale_ptr + row), tl.load(targets_ptr + row)
    products_ptr += row * V
    top = tl.full((BLOCK,), -float("inf"), tl.float32)               # each lane for itself: one reduction at the end
    mass, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, live, BLOCK):
        col = start + tl.arange(0, BLOCK)
        logit = tl.load(products_ptr + col, mask=col < V, other=0.0) * scale   # col < live is odd: 4-byte loads
        logit = tl.where(col < live, logit, -float("inf"))
        higher = tl.maximum(top, logit)
        old, new = tl.where(top == higher, 1.0, tl.exp(top - higher)), tl.where(col < live, tl.exp(logit - higher), 0.0)
        mass, mean = mass * old + new, mean * old + tl.where(col < live, new * logit, 0.0)
        top = higher
    highest = tl.max(top, 0)
    share = tl.exp(top - highest)                                    # 0 for a lane that saw nothing
    total = tl.sum(mass * share, 0)
    lse = highest + tl.log(total)
    tl.store(sums_ptr + row, tl.load(products_ptr + target) * scale)
    tl.store(sums_ptr + c + row, lse)
    tl.store(sums_ptr + 2 * c + row, tl.sum(mean * share, 0) / total)
    if AHEAD:
        for start in range(0, V, BLOCK):
            col = start + tl.arange(0, BLOCK)
            p = tl.exp(tl.load(products_ptr + col, mask=col < V, other=0.0) * scale - lse)
            value = tl.where(col == target, 1.0, 0.0) - tl.where(col < live, p, 0.0)
            tl.store(ahead_ptr + row * V + col, value.to(ahead_ptr.dtype.element_ty), mask=col < V)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(x @ head[:live].T * rstd / temperature) at `targets`, without the (T, V) tensor.

    One log-prob's gradient with respect to its own x is one row, (onehot - p) @ head * rstd / temperature. It is
    computed while the chunk's logits are at hand, so the backward is a multiplication and logits are computed once.
    """
    CHUNK = 512                                                      # rows a time: 0.3 GB of fp32 logits at V = 152k

    @staticmethod
    def forward(ctx, x, rstd, head, targets, live, temperature):
        n = x.shape[0]
        logprobs, entropy = torch.empty(2, n, device=x.device)
        needs_grad = any(ctx.needs_input_grad[:2])
        dx = torch.empty(x.shape, device=x.device) if needs_grad else None
        drstd = torch.empty_like(rstd) if needs_grad else None
        for i in range(0, n, _TokenLogprobs.CHUNK):
            s = slice(i, i + _TokenLogprobs.CHUNK)
            scale = rstd[s] / temperature                            # (c, 1)
            sums, ahead = scores(mm_fp32(x[s], head.T), scale, targets[s], live, x.dtype if needs_grad else None)
            picked, lse, mean_logit = sums                           # (c,) each
            logprobs[s], entropy[s] = picked - lse, lse - mean_logit
            if needs_grad:
                drstd[s] = (picked - mean_logit)[:, None] / rstd[s]
                dx[s] = mm_fp32(ahead, head).mul_(scale)
        ctx.save_for_backward(dx, drstd)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _):
        dx, drstd = ctx.saved_tensors
        return (dx * dlogprobs[:, None]).to(ctx.dtype), drstd * dlogprobs[:, None], None, None, None, None


def token_logprobs(x, rstd, head, targets, live, temperature):
    """x (T, D), rstd (T, 1), head (V, D), targets (T,) -> log-probs (T,) fp32 with a gradient, entropy (T,) without.

    Over the first `live` rows of the head. The others are multiplied too, for nothing: Qwen2.5's 151,665 columns of
    logits would keep cuBLAS off its aligned kernels.
    """
    return _TokenLogprobs.apply(x, rstd, head, targets, live, temperature)
