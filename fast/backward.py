"""
The learner on a GPU: hand-written backward passes in place of autograd's, which save gigabytes and
time. Skip this file to learn the method: it computes what the plain functions say.

Everything here is torch and needs no Triton. kernels.py in turn replaces the functions marked
@replaced_on_gpu by Triton kernels; with --kernels torch they run as they are.

    linear           the wide matrix: y, dx, dA and dB in few products, nothing expanded is kept
    mlp              down(silu(gate) * up), with 16-bit gradients between its matmuls
    token_logprobs   log softmax at the sampled tokens, without the (T, V) tensor of all logits
    attend_packed    FlashAttention over a shared prompt, in two parts
    look_up          full fine-tuning: the gradient of the embedding, added in place
    head_logprobs    full fine-tuning: the same for the head

Each has the name and arguments of the plain function that it replaces, which says what it computes.

Shapes: T tokens, D hidden size, F intermediate size, V vocabulary; M rows, N columns and K summed
terms of a product; R LoRA rank, P parts of a fused linear; c rows of a chunk; S keys, H query
heads, KV key-value heads, d head size.
"""
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

import full
from attention import PackedAttention
from lora import Linear
from ops import PLAIN, mm_fp32, replaced_on_gpu


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) @ b (K, N) of equal dtype -> (M, N) in that dtype, summed in fp32, then rounded.

    Only for gradients. If cuBLAS splits K across programs, it may also round their partial sums to
    16 bits (torch allows that by default: allow_bf16_reduced_precision_reduction).
    """
    return torch.mm(a, b) if a.is_cuda else mm_fp32(a, b).to(a.dtype)


def add_mm(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """total (M, N) fp32 += scale * a (M, K) @ b (K, N), in place, summed as in mm_fp32."""
    if not a.is_cuda or a.dtype == torch.float32:
        total += scale * mm_fp32(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, alpha=scale, out=total)


# -----------------------------------------------------------------------------
# A linear as a wide matrix: lora.linear in one product, rounded differently
#
# Computing x @ W.T and then adding (x @ A.T) @ (s * B).T would read and write y, a large tensor, a
# second time. Instead, the learner expands W into a buffer with P*R extra columns and rows, for s*B
# to the right of W and A below it. For q|k|v (P = 3):
#
#                         K          R    R    R
#                   +-----------+----+----+----+
#         rows of q |           |sB_q|  0 |  0 |
#         rows of k |     W     |  0 |sB_k|  0 |  N      block diagonal: the rows of a part
#         rows of v |           |  0 |  0 |sB_v|         see only the part's own x @ A.T
#                   +-----------+----+----+----+
#                   |    A_q    |              |
#                   |    A_k    |  never read  |  P*R
#                   |    A_v    |              |
#                   +-----------+--------------+
#
# x and dL/dy get P*R extra columns too. Then y and dx take one matmul each, and A and B add only
# P*R / K (or P*R / N) to the work:
#
#     forward      x_wide = [ x  | x @ A.T ]      y  = x_wide @ wide[:N].T    wide[:N] = [W | s*B]
#                                                    = x @ W.T + (x @ A.T) @ (s*B).T
#     backward    dy_wide = [ dy | dy @ s*B ]     dx = dy_wide @ wide[:, :K]  wide[:, :K] = W over A
#                                                    = dy @ W + (dy @ s*B) @ A
#                      dA = (dy @ s*B).T @ x      (P*R, K)
#                      dB = s * dy.T @ (x @ A.T)  (N, R), for each part its rows and its R columns

def wide_weight(linear: Linear) -> Tensor:
    """The wide matrix (N + P*R, K + P*R) in the shared buffer."""
    if isinstance(linear, full.Linear):          # without A and B there is nothing to widen
        return linear.weight.dequantize()
    n = linear.weight.N
    k = linear.weight.K
    pr = linear.rank * len(linear.parts)
    wide = scratch_on(linear.weight.device).view(n + pr, k + pr, linear.weight.dtype)
    linear.weight.dequantize(out=wide[:n, :k])
    if pr:
        wide[n:, :k] = linear.working_a
        wide[:n, k:] = torch.block_diag(*linear.working_b.split(linear.parts))
    return wide


def empty_wide(linear: Linear, rows: int, columns: int) -> Tensor:
    """An empty (rows, columns + P*R) for x (columns = K) or dL/dy (columns = N), with room on
    the right for what product() or product_backward() writes there.
    """
    columns += linear.rank * len(linear.parts)
    return torch.empty(rows, columns, dtype=linear.weight.dtype, device=linear.weight.device)


def widened(linear: Linear, x: Tensor) -> Tensor:
    """x, or dL/dy, rounded to the model's dtype, in the first columns of an empty_wide()."""
    if not linear.rank:
        return x.to(linear.weight.dtype)         # no columns to add, so no copy if dtypes agree
    wide = empty_wide(linear, *x.shape)
    wide[:, :x.shape[1]] = x
    return wide


def product(linear: Linear, x_wide: Tensor) -> Tensor:
    """widened(x) -> y (M, N) fp32. Writes x @ A.T to the right of x, for the backward pass."""
    k = linear.weight.K
    if linear.rank:                              # rounded to the dtype, as the sampler's kernels do
        x_wide[:, k:] = mm_fp32(x_wide[:, :k], linear.working_a.T)
    return mm_fp32(x_wide, wide_weight(linear)[:linear.weight.N].T)


def product_backward(linear: Linear, x_wide: Tensor, dy_wide: Tensor) -> Tensor:
    """The backward pass of product(): returns dx (M, K) in the model's dtype, and adds dA and
    dB to a.grad and b.grad; dW to a full.Linear's leaf.grad.

    x_wide: as product() left it. dy_wide: widened(dL/dy).
    """
    if isinstance(linear, full.Linear):
        add_mm(linear.leaf.grad, dy_wide.T, x_wide)
        return mm(dy_wide, wide_weight(linear))
    n = linear.weight.N
    k = linear.weight.K
    # Expanded again: keeping every layer's expanded W would take 3.5 times the 4-bit model.
    wide = wide_weight(linear)
    assert x_wide.shape[1] == wide.shape[1], \
        f"{linear.names[0]}: adapter switched between forward and backward"
    if not linear.rank:
        return mm(dy_wide, wide[:, :k])
    dy_wide[:, n:] = mm_fp32(dy_wide[:, :n], wide[:n, k:])       # dL/d(x @ A.T), (M, P*R)
    add_mm(linear.a.grad, dy_wide[:, n:].T, x_wide[:, :k])           # (P*R, K)
    part_dy = dy_wide[:, :n].split(linear.parts, dim=1)              # P of (M, the part's rows)
    part_xa = x_wide[:, k:].split(linear.rank, dim=1)                # P of (M, R)
    for db, dy, xa in zip(linear.b.grad.split(linear.parts), part_dy, part_xa):
        add_mm(db, dy.T, xa, linear.adapter.scale)
    return mm(dy_wide, wide[:, :k])


class _Product(torch.autograd.Function):
    """linear: x (M, K) -> y (M, N)."""

    @staticmethod
    def forward(ctx, x, linear):
        x_wide = widened(linear, x)
        ctx.linear = linear
        ctx.save_for_backward(x_wide)            # product() still writes x @ A.T into it
        return product(linear, x_wide)

    @staticmethod
    def backward(ctx, dy):
        x_wide, = ctx.saved_tensors
        return product_backward(ctx.linear, x_wide, widened(ctx.linear, dy)), None


def linear(x: Tensor, layer: Linear) -> Tensor:
    """Replaces lora.linear. x must require a gradient: otherwise autograd skips the backward pass,
    which also fills a.grad and b.grad.
    """
    return _Product.apply(x, layer)


class Scratch:
    """One buffer into which all linears on a device expand their matrices, one at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flat = None

    def view(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """(rows, columns), uninitialized; valid until the next linear asks for one."""
        size = rows * columns
        if self.flat is None or len(self.flat) < size or self.flat.dtype != dtype:
            self.flat = None                                     # free the smaller one first
            self.flat = torch.empty(size, dtype=dtype, device=self.device)
        return self.flat[:size].view(rows, columns)


@functools.cache
def scratch_on(device: torch.device) -> Scratch:
    """The device's Scratch."""
    return Scratch(device)


# -----------------------------------------------------------------------------
# The MLP

@replaced_on_gpu
def swiglu(y: Tensor, rstd: Tensor, h: Tensor, keep: bool = True) -> Tensor | None:
    """Write silu(gate) * up into h (T, F), whose rows may have any stride; gate|up = y * rstd.

    y (T, 2F) fp32 is gate_up's result, rstd (T, 1) fp32 the norm's 1/rms. Returns y rounded to h's
    dtype, for swiglu_backward. keep: whether there will be a backward pass. If not, ignore the
    result, which is None on a GPU.
    """
    gate, up = (y * rstd).chunk(2, dim=-1)
    h.copy_(F.silu(gate) * up)
    return y.to(h.dtype)


@replaced_on_gpu
def swiglu_backward(y: Tensor, rstd: Tensor, dh: Tensor, dy: Tensor) -> Tensor:
    """Write dL/dy into dy (T, 2F), whose rows may have any stride; -> dL/drstd (T, 1) fp32.

    y (T, 2F) as swiglu returned it, the same rstd (T, 1), dh (T, F) = dL/dh. With z = y * rstd, the
    gate|up of swiglu, dL/dy = dL/dz * rstd and dL/drstd = sum of dL/dz * y over the row. With
    s = sigmoid(gate), d silu(gate) / d gate = s + gate * s * (1 - s).
    """
    gate, up = (y * rstd).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    silu = gate * s
    dz = torch.cat([dh * up * (s + silu * (1 - s)), dh * silu], dim=-1)
    dy.copy_(dz * rstd)
    return (dz * y).sum(-1, keepdim=True, dtype=rstd.dtype)


class _Mlp(torch.autograd.Function):
    """Both linears and everything between them as one autograd function. The inputs are wide, with
    x @ A.T to the right of x.

        x_wide   [x | x @ A.T]   in 16 bits on a GPU; A is gate_up's
          |  product(gate_up)
        y        (T, 2F)         fp32
          |  swiglu
        h_wide   [h | h @ A.T]   A is down's; swiglu writes h, product() the columns after it
          |  product(down)
        result   (T, D)          fp32

    Three separate functions would move more bytes, in three places:
    - Autograd wants the gradient of an fp32 tensor in fp32. Inside one function, dL/dh and dL/dy
      are 16-bit, and dL/dy is written straight to where gate_up's backward pass multiplies it.
    - swiglu writes h to its place in h_wide. A separate function's result would be copied there.
    - Only y rounded to 16 bits has to live until the backward pass: half the bytes of fp32.
    """

    @staticmethod
    def forward(ctx, x, rstd, gate_up, down, keep):
        call_hooks(gate_up, x)
        x_wide = widened(gate_up, x)
        y = product(gate_up, x_wide)
        h_wide = empty_wide(down, len(x), down.weight.K)
        h = h_wide[:, :down.weight.K]
        y = swiglu(y, rstd, h, keep=keep)
        call_hooks(down, h)
        ctx.linears = gate_up, down
        ctx.save_for_backward(x_wide, y, rstd, h_wide)
        return product(down, h_wide)

    @staticmethod
    def backward(ctx, dout):
        x_wide, y, rstd, h_wide = ctx.saved_tensors
        gate_up, down = ctx.linears
        dh = product_backward(down, h_wide, widened(down, dout))
        dy_wide = empty_wide(gate_up, *y.shape)
        drstd = swiglu_backward(y, rstd, dh, dy_wide[:, :y.shape[1]])
        return product_backward(gate_up, x_wide, dy_wide), drstd, None, None, None


def mlp(gate_up: Linear, down: Linear, x: Tensor, rstd: Tensor) -> Tensor:
    """Replaces model.mlp."""
    return _Mlp.apply(x, rstd, gate_up, down, torch.is_grad_enabled() and x.requires_grad)


def call_hooks(layer: Linear, x: Tensor) -> None:
    """A linear's forward pre-hooks (calibrate.listening), which only layer(x) would call."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, (x,))


# -----------------------------------------------------------------------------
# Log-probs

@replaced_on_gpu
def softmax_at(products: Tensor, scale: Tensor, targets: Tensor, live: int,
               dtype: torch.dtype | None = None) -> tuple:
    """What the loss needs from the softmax of logits = products[:, :live] * scale, row by row.

    products (c, V) fp32, which may be overwritten; scale (c, 1) fp32; targets (c,) int64, below
    `live`. Returns two things:
    - a triple of (c,) fp32: the target's logit, the log-sum-exp of the logits, and their mean,
      weighted by probability;
    - the gradient of the target's log-prob with respect to the logits, onehot(target) - softmax:
      (c, V) in `dtype`, zero from column `live` on. None if `dtype` is None.
    """
    logits = products[:, :live].mul_(scale)
    picked = logits.gather(1, targets[:, None])
    lse = logits.logsumexp(1, keepdim=True)
    p = torch.exp(logits - lse)
    sums = picked[:, 0], lse[:, 0], torch.linalg.vecdot(p, logits)
    if dtype is None:
        return sums, None
    dlogits = p.neg_().scatter_add_(1, targets[:, None], torch.ones_like(picked))
    return sums, F.pad(dlogits, (0, products.shape[1] - live)).to(dtype)


# Rows whose logits are in memory at a time: 0.3 GB in fp32 with a vocabulary of 152k.
LOGIT_ROWS = 512


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs in chunks of rows, with the gradient already computed in the forward pass.

    The log-prob of row t depends only on row t of x, so its gradient is one row too:

        dL/dx[t] = dL/dlogprob[t] * ((onehot(target) - softmax) @ head * scale)[t]

    The forward pass computes the second factor while it has the chunk's logits, keeps it in fp32
    and drops the logits; the backward pass multiplies it by dL/dlogprob. Keeping the logits of
    8,192 tokens would take 5 GB with a vocabulary of 152k.
    """
    @staticmethod
    def forward(ctx, x, scale, head, targets, live):
        n = x.shape[0]
        logprobs, entropy = torch.empty(2, n, device=x.device)
        needs_x, needs_scale, *_ = ctx.needs_input_grad
        dx = dscale = dtype = None
        if needs_x or needs_scale:
            dx = torch.empty(x.shape, device=x.device)
            dscale = torch.empty_like(scale)
            dtype = x.dtype
        for i in range(0, n, LOGIT_ROWS):
            s = slice(i, i + LOGIT_ROWS)
            products = mm_fp32(x[s], head.T)                                    # (c, V)
            sums, dlogits = softmax_at(products, scale[s], targets[s], live, dtype)
            picked, lse, mean_logit = sums
            logprobs[s] = picked - lse
            entropy[s] = lse - mean_logit        # -sum of p log p, where log p = logit - lse
            if dtype:
                # A logit is proportional to scale, so d logit / d scale = logit / scale.
                dscale[s] = (picked - mean_logit)[:, None] / scale[s]
                dx[s] = mm_fp32(dlogits, head).mul_(scale[s])
        ctx.save_for_backward(dx, dscale)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _):
        dx, dscale = ctx.saved_tensors
        upstream = dlogprobs[:, None]
        return (dx * upstream).to(ctx.dtype), dscale * upstream, None, None, None


def token_logprobs(x: Tensor, scale: Tensor, head: Tensor, targets: Tensor,
                   live: int) -> tuple[Tensor, Tensor]:
    """Replaces model.token_logprobs; `head` gets no gradient. All V rows are multiplied and
    the padding is dropped afterwards, because Qwen2.5's live, 151,665, is odd and cuBLAS has no
    aligned kernel for odd widths.
    """
    return _TokenLogprobs.apply(x, scale, head, targets, live)


# -----------------------------------------------------------------------------
# Attention: the softmax over one part of the keys, its backward pass, and the merge
#
# FlashAttention needs a query's keys to be contiguous, but in attention.py's drawing, a1..a3 are
# between the prompt and b1. So each part, inside and across, gets its own softmax, and merge()
# combines the two. With lse = log of the sum of e^score over a part's keys, a part's weight is its
# share of the total:
#
#     lse = log(e^lse_inside + e^lse_across)
#     out = out_inside * e^(lse_inside - lse) + out_across * e^(lse_across - lse)
#
# The backward pass needs no merging: with the merged lse, e^(score - lse) is already a probability
# of the full softmax, whichever part the key is in. So each part computes its gradients from the
# merged out and lse, and they add up.
#
# In bf16, each part's out is rounded before the merge and the merged one after it. The sampler has
# one softmax and rounds once. This is the only place where sampler and learner round differently.

class Spans(NamedTuple):
    """Which queries see which keys, in FlashAttention's form: n spans. In span i, the queries
    q_starts[i] to q_starts[i + 1] - 1 see the keys k_starts[i] to k_starts[i + 1] - 1.

    Each query and each key belongs to exactly one span. A span may have no queries, but one with
    queries needs keys, because a softmax over nothing is NaN.
    """
    q_starts: Tensor                             # (n + 1,) int32, from 0 to the number of queries
    k_starts: Tensor                             # (n + 1,) int32, equal to q_starts if causal
    longest_q: int                               # the most queries in a span
    longest_k: int                               # the most keys in a span
    causal: bool                                 # query j of a span sees only its keys 0 to j


def spans_of(q_lengths: Sequence[int], k_lengths: Sequence[int], causal: bool,
             device: torch.device | str) -> Spans:
    """Spans from the n lengths of each: the first q_lengths[0] queries see the first k_lengths[0]
    keys, the next q_lengths[1] queries see the next k_lengths[1] keys, and so on.
    """
    starts = [torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
              for lengths in (q_lengths, k_lengths)]
    return Spans(*starts, max(q_lengths), max(k_lengths), causal)


@replaced_on_gpu
def attend_spans(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """Attention of one part: each span's queries over its keys.

    q (T, H, d), k and v (S, KV, d) of one dtype -> out (T, H, d) in that dtype, and the log-sum-exp
    of each query's scores, (H, T) fp32 (float64 if q is). On a GPU the dtype must be 16-bit.
    """
    out = torch.empty_like(q)
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=dtype)
    for rows, _, _, _, values, scores in _each_span(q, k, v, spans):
        lse[:, rows] = scores.logsumexp(-1)
        p = (scores - lse[:, rows, None]).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", p, values).to(q.dtype)
    return out, lse


@replaced_on_gpu
def attend_spans_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                          spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """One part's share of dq, dk and dv; out and lse are the merged ones, not the part's.

    dout and out (T, H, d), lse (H, T), q, k and v as in attend_spans -> dq (T, H, d), dk and dv
    (S, KV, d). With p = e^(score - lse) and dp = dout . v, the gradient of a score is
    p * (dp - sum of p * dp). That sum is over the keys of all parts, but it equals dout . out,
    which is known.
    """
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    mean_dp = (dout.to(lse.dtype) * out).sum(-1).T[:, :, None]                  # (H, T, 1)
    for rows, columns, query, key, value, scores in _each_span(q, k, v, spans):
        p = (scores - lse[:, rows, None]).exp()
        upstream = dout[rows].to(lse.dtype)
        dp = torch.einsum("qhd,khd->hqk", upstream, value)
        ds = p * (dp - mean_dp[:, rows]) * q.shape[-1] ** -0.5
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, key).to(q.dtype)
        for grad, per_head in ((dk, torch.einsum("hqk,qhd->khd", ds, query)),
                               (dv, torch.einsum("hqk,qhd->khd", p, upstream))):
            # H / KV query heads share a key-value head, whose gradient is the sum of theirs. Assign
            # it rather than add it, since a key is in only one span.
            grad[columns] = per_head.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)
    return dq, dk, dv


def _each_span(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Iterator[tuple]:
    """Yield for each span: the slices of its queries and of its keys in T and S; their q, k and v,
    (queries or keys, H, d) in fp32, with k and v repeated for the query heads that share them; and
    the scores (H, queries, keys), scaled by 1 / sqrt(d), -inf where masked.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1]
    q_starts = spans.q_starts.tolist()
    k_starts = spans.k_starts.tolist()
    for i in range(len(q_starts) - 1):
        rows = slice(*q_starts[i:i + 2])
        columns = slice(*k_starts[i:i + 2])
        query = q[rows].to(dtype)
        key, value = (t[columns].to(dtype).repeat_interleave(heads // k.shape[1], dim=1)
                      for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query, key) * q.shape[-1] ** -0.5
        if spans.causal:
            future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
            scores.masked_fill_(future, -torch.inf)
        yield rows, columns, query, key, value, scores


@replaced_on_gpu
def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Combines attention over two sets of keys (see above).

    out and other (T, H, d), lse and other_lse (H, T) as attend_spans returns them; the result
    overwrites out and lse.
    """
    both = torch.logaddexp(lse, other_lse)
    share, other_share = ((t - both).exp().T[:, :, None] for t in (lse, other_lse))
    out.copy_(out * share + other * other_share)
    lse.copy_(both)


class _Attention(torch.autograd.Function):
    """attend_packed: both parts, forward and backward."""

    @staticmethod
    def forward(ctx, q, k, v, pack):
        out, lse = attend_spans(q, k, v, pack.inside)
        if pack.across:
            n = pack.prefix_tokens               # queries: the suffixes; keys: the prefixes
            merge(out[n:], lse[:, n:], *attend_spans(q[n:], k[:n], v[:n], pack.across))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pack = pack
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        pack = ctx.pack
        dout = dout.contiguous()
        dq, dk, dv = attend_spans_backward(dout, q, k, v, out, lse, pack.inside)
        if pack.across:
            n = pack.prefix_tokens
            more_q, more_k, more_v = attend_spans_backward(
                dout[n:], q[n:], k[:n], v[:n], out[n:], lse[:, n:].contiguous(), pack.across)
            dq[n:] += more_q
            dk[:n] += more_k
            dv[:n] += more_v
        return dq, dk, dv, None


class PackSpans:
    """The two parts of an attention.PackedAttention. inside: each token over its own piece; across:
    the suffixes of each prefix over the prefix.
    """

    def __init__(self, pack: PackedAttention):
        device = pack.positions.device
        pieces = [*pack.prefixes, *(n for n in chain(*pack.suffixes) if n)]
        self.inside = spans_of(pieces, pieces, True, device)
        self.across = None                       # span i: all suffixes of prefix i, over prefix i
        if any(chain(*pack.suffixes)):
            totals = [sum(group) for group in pack.suffixes]
            self.across = spans_of(totals, pack.prefixes, False, device)
        self.prefix_tokens = sum(pack.prefixes)  # the first suffix begins here


SPANS = WeakKeyDictionary()                      # PackedAttention -> PackSpans, for all layers


def attend_packed(q: Tensor, k: Tensor, v: Tensor, pack: PackedAttention) -> Tensor:
    """Replaces attention.attend_packed."""
    if pack not in SPANS:
        SPANS[pack] = PackSpans(pack)
    return _Attention.apply(q, k, v, SPANS[pack])


# -----------------------------------------------------------------------------
# Full fine-tuning: gradients that an adapter doesn't need

class _LookUp(torch.autograd.Function):
    """The rows of the embedding: tokens (T,) -> (T, D) fp32."""

    @staticmethod
    def forward(ctx, leaf, tokens, embed):
        ctx.leaf, ctx.tokens = leaf, tokens
        return embed[tokens].float()

    @staticmethod
    def backward(ctx, dx):
        # In place, because a separate gradient would be as large as the embedding. A token that
        # occurs twice gets the sum, in a fixed order (on a GPU, index_add_ has none).
        ctx.leaf.grad.index_put_((ctx.tokens,), dx, accumulate=True)
        return None, None, None


class _HeadLogprobs(torch.autograd.Function):
    """token_logprobs with a gradient for the head. That needs dL/dlogprob, which isn't known
    until the backward pass, so the logits are recomputed there, chunk by chunk.
    """

    @staticmethod
    def forward(ctx, x, scale, leaf, head, targets, live):
        ctx.save_for_backward(x, scale, targets)
        ctx.leaf, ctx.head, ctx.live = leaf, head, live
        logprobs, entropy = token_logprobs(x.detach(), scale.detach(), head, targets, live)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _):
        x, scale, targets = ctx.saved_tensors
        dx, dscale = torch.empty_like(x), torch.empty_like(scale)
        for i in range(0, len(x), LOGIT_ROWS):
            s = slice(i, i + LOGIT_ROWS)
            upstream = dlogprobs[s, None]
            (picked, _, mean_logit), dlogits = softmax_at(
                mm_fp32(x[s], ctx.head.T), scale[s], targets[s], ctx.live, x.dtype)
            scaled = scale[s] * upstream
            dx[s] = mm_fp32(dlogits, ctx.head) * scaled
            dscale[s] = (picked - mean_logit)[:, None] / scale[s] * upstream
            add_mm(ctx.leaf.grad, dlogits.T, (x[s] * scaled).to(x.dtype))
        return dx, dscale, None, None, None, None


def look_up(leaf: Tensor, tokens: Tensor, copy: Tensor) -> Tensor:
    """Replaces full.look_up."""
    return _LookUp.apply(leaf, tokens, copy)


def head_logprobs(x: Tensor, scale: Tensor, leaf: Tensor, copy: Tensor, targets: Tensor,
                  live: int) -> tuple[Tensor, Tensor]:
    """Replaces full.head_logprobs."""
    return _HeadLogprobs.apply(x, scale, leaf, copy, targets, live)


# Versions that also compute what another marked function computes, instead of calling it.
CONTAINS = {"mlp": "linear", "head_logprobs": "token_logprobs"}


def gpu_versions() -> dict[str, Callable]:
    """name -> what a GPU runs for each function marked @replaced_on_gpu: the one here or, if it
    isn't here or contains one whose mark a fork removed, the plain function.
    """
    here = {function.__name__: function for function in (
        linear, mlp, token_logprobs, attend_packed, look_up, head_logprobs)}
    return {name: here.get(name, plain) if CONTAINS.get(name, name) in PLAIN else plain
            for name, plain in PLAIN.items()}
