"""
Attention of the learner: sequences packed end to end, a group's prompt computed once.

Tokens are (T,): several sequences laid end to end, no padding. The G samples of a problem share
their prompt, so the prompt is one sequence and each sample a branch of it:

    rows that are scored          prompt a1 a2 a3      prompt b1 b2
    what is computed              prompt  a1 a2 a3  b1 b2

A branch sees its prompt and itself, not its siblings. That is two softmaxes, of every token over
its own piece (causal) and of every branch over its prompt, merged by their log-sum-exp. The
backward adds the two parts' gradients, with the whole's log-sum-exp.

Shapes: T tokens, H query heads, KV key-value heads, d head size.
"""
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import torch

from ops import twin_in_kernels


class Spans(NamedTuple):
    """Queries q_starts[i]..q_starts[i + 1] see keys k_starts[i]..k_starts[i + 1]."""
    q_starts: torch.Tensor                       # (n + 1,) int32
    k_starts: torch.Tensor                       # (n + 1,) int32, equal to q_starts where causal
    longest_q: int
    longest_k: int
    causal: bool


def spans_of(q_lengths, k_lengths, causal, device):
    starts = [torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
              for lengths in (q_lengths, k_lengths)]
    return Spans(*starts, max(q_lengths), max(k_lengths), causal)


# -----------------------------------------------------------------------------
# Which token stands where

def lay_out(rows, starts):
    """Rows that follow each other and share rows[i][:starts[i]] become a sequence with branches.

    -> tokens, lengths, branches (as PackedAttention takes them), predictors: for every scored
    token, row by row, the place of the token before it. A row's last token predicts nothing and is
    left out: lay_out([[1, 2, 7, 8], [1, 2, 5]], [2, 2]) == [1, 2, 7], [2], [[1, 0]], [1, 2, 1].
    """
    groups = groupby(range(len(rows)), lambda i: rows[i][:starts[i]])
    groups = [list(group) for _, group in groups]
    tokens = []
    lengths = []
    for first, *others in groups:
        trunk = rows[first][:starts[first] if others else -1]    # a row alone does not branch
        tokens += trunk
        lengths.append(len(trunk))
    branches = []
    predictors = []
    for group, length, end in zip(groups, lengths, accumulate(lengths)):
        tails = [rows[i][length:-1] for i in group]
        branches.append([len(tail) for tail in tails])
        for i, tail in zip(group, tails):
            predictors += range(end - length + starts[i] - 1, end)
            predictors += range(len(tokens), len(tokens) + len(tail))
            tokens += tail
    return tokens, lengths, branches, predictors


class PackedAttention:
    """Causal attention inside each of several sequences laid end to end, which may branch.

    lengths: of the sequences (trunks); branches: of each, the lengths of its continuations. After
    all sequences come all branches, sequence by sequence. positions (T,) int64: from 0 in each
    sequence, going on from its end in each of its branches.
    """

    def __init__(self, lengths, device, branches=()):
        own = [*lengths, *(n for n in chain(*branches) if n)]
        self.inside = spans_of(own, own, True, device)           # every token over its own piece
        self.across = None                       # the branches of a sequence over it: one span
        if any(chain(*branches)):
            self.across = spans_of([sum(group) for group in branches], lengths, False, device)
        self.trunks = sum(lengths)               # tokens of the sequences; those of branches follow
        positions = [torch.arange(n) for n in lengths]
        for start, group in zip(lengths, branches):
            positions += [torch.arange(start, start + n) for n in group]
        self.positions = torch.cat(positions).to(device)

    def __call__(self, q, k, v):
        """q (T, H, d), k, v (T, KV, d) -> (T, H, d)."""
        return _Attention.apply(q, k, v, self)


# -----------------------------------------------------------------------------
# The softmax over one set of keys, its backward, and two of them as one

@twin_in_kernels
def attend_spans(q, k, v, spans):
    """q (T, H, d), k, v (S, KV, d) -> out (T, H, d), log-sum-exp of scores (H, T) fp32."""
    out = torch.empty_like(q)
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=dtype)
    for rows, _, _, _, values, scores in _each_span(q, k, v, spans):
        lse[:, rows] = scores.logsumexp(-1)
        p = (scores - lse[:, rows, None]).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", p, values).to(q.dtype)
    return out, lse


@twin_in_kernels
def attend_spans_backward(dout, q, k, v, out, lse, spans):
    """-> dq, dk, dv: this set of keys' share, where out and lse are those of a softmax over it and
    others. Probabilities are exp(score - lse), the softmax's own term is out . dout.
    """
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    own = (dout.to(lse.dtype) * out).sum(-1).T[:, :, None]                      # (H, T, 1)
    for rows, columns, query, key, value, scores in _each_span(q, k, v, spans):
        p = (scores - lse[:, rows, None]).exp()
        upstream = dout[rows].to(lse.dtype)
        dp = torch.einsum("qhd,khd->hqk", upstream, value)
        ds = p * (dp - own[:, rows]) * q.shape[-1] ** -0.5
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, key).to(q.dtype)
        for grad, of_heads in ((dk, torch.einsum("hqk,qhd->khd", ds, query)),
                               (dv, torch.einsum("hqk,qhd->khd", p, upstream))):
            grad[columns] = of_heads.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)
    return dq, dk, dv


def _each_span(q, k, v, spans):
    """Yields places of queries and keys, their q, k, v (., H, d) and scores (H, ., .) in fp32."""
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


@twin_in_kernels
def merge(out, lse, other, other_lse):
    """Softmax over two sets of keys from those over each: into out (T, H, d) and lse (H, T)."""
    both = torch.logaddexp(lse, other_lse)
    mine, its = ((t - both).exp().T[:, :, None] for t in (lse, other_lse))
    out.copy_(out * mine + other * its)
    lse.copy_(both)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pack):
        out, lse = attend_spans(q, k, v, pack.inside)
        if pack.across:
            n = pack.trunks
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
            n = pack.trunks
            more_q, more_k, more_v = attend_spans_backward(
                dout[n:], q[n:], k[:n], v[:n], out[n:], lse[:, n:].contiguous(), pack.across)
            dq[n:] += more_q
            dk[:n] += more_k
            dv[:n] += more_v
        return dq, dk, dv, None
