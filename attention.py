"""
Attention over sequences packed end to end, in which the answers to a problem share their prompt.

Used by everything that computes whole sequences: the learner, the sampler's prefill and
calibration. Decode steps, with one new token per row, have their own (sampler.attention_to_cache).

Tokens are (T,): several sequences laid end to end without padding. The G answers to a problem share
their prompt, so the prompt is computed once, as a shared prefix, and each answer is a suffix of it
(FlashInfer's cascade attention; Hydragen, 2402.05099):

    two rows                      p1 p2 a1 a2 a3      p1 p2 b1 b2
    what is computed              p1 p2   a1 a2 a3   b1 b2

A suffix sees its prefix and itself, but no other suffix:

        queries |  p1 p2 | a1 a2 a3 | b1 b2    keys
        --------+--------+----------+-------
           p1   |  x     |          |
           p2   |  x  x  |          |          x  inside: each token over its own piece, causal
        --------+--------+----------+-------
           a1   |  o  o  | x        |          o  across: each suffix over its entire prefix
           a2   |  o  o  | x  x     |
           a3   |  o  o  | x  x  x  |
        --------+--------+----------+-------
           b1   |  o  o  |          | x
           b2   |  o  o  |          | x  x

FlashAttention needs a query's keys to be contiguous, but a1..a3 are between the prompt and b1. So
each part, inside and across, gets its own softmax, and merge() combines the two. With lse = log of
the sum of e^score over a part's keys, a part's weight is its share of the total:

    lse = log(e^lse_inside + e^lse_across)
    out = out_inside * e^(lse_inside - lse) + out_across * e^(lse_across - lse)

The backward pass needs no merging: with the merged lse, e^(score - lse) is already a probability of
the full softmax, whichever part the key is in. So each part computes its gradients from the merged
out and lse, and they add up.

In bf16, each part's out is rounded before the merge and the merged one after it. The sampler has
one softmax and rounds once. This is the only place where sampler and learner round differently.

Shapes: T tokens (queries), S keys, H query heads, KV key-value heads, d head size.
"""
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ops import twin_in_kernels

# -----------------------------------------------------------------------------
# Where each token goes

@dataclass(frozen=True)
class Layout:
    """Rows of ids packed by lay_out(): all prefixes, then all suffixes, prefix by prefix."""
    tokens: list[int]                            # T ids
    prefixes: list[int]                          # lengths
    suffixes: list[list[int]]                    # for each prefix the lengths of its suffixes
    # For each completion token, row by row, the index in `tokens` of the token that predicts it.
    predictors: list[int]


def lay_out(rows: list[list[int]], starts: list[int]) -> Layout:
    """Pack rows of ids, each a prompt and a completion, so that equal prompts are computed once.

    starts[i]: where row i's completion begins, at least 1. Adjacent rows with equal prompts become
    a prefix with suffixes; equal prompts that aren't adjacent are computed twice. A row whose
    neighbors have other prompts is all prefix, with one empty suffix. A row's last token predicts
    nothing and is left out.

        rows             1 2 | 7 8     a prompt of two tokens, completions of two and one:
                         1 2 | 5       starts == [2, 2]

        index            0    1    2
        tokens           1    2    7   the prompt, then the suffixes without their last tokens
        row 0 predicts   .    7    8
        row 1 predicts   .    5        its suffix is empty: 5 is its last token

        lay_out(rows, starts) ==
            Layout(tokens=[1, 2, 7], prefixes=[2], suffixes=[[1, 0]],
                   predictors=[1, 2, 1])         of 7, 8 and 5
    """
    groups = groupby(range(len(rows)), lambda i: rows[i][:starts[i]])
    groups = [list(group) for _, group in groups]
    tokens = []
    prefixes = []
    for first, *others in groups:
        prefix = rows[first][:starts[first] if others else -1]   # without others: the full row
        tokens += prefix
        prefixes.append(len(prefix))
    suffixes = []
    predictors = []
    for group, length, end in zip(groups, prefixes, accumulate(prefixes)):
        of_group = [rows[i][length:-1] for i in group]
        suffixes.append([len(suffix) for suffix in of_group])
        for i, suffix in zip(group, of_group):
            # The prompt's last token predicts the first completion token. Each later one is
            # predicted by the token before it, which is in the prefix if that is the entire row,
            # else in the suffix: one of these two ranges is empty.
            predictors += range(end - length + starts[i] - 1, end)
            predictors += range(len(tokens), len(tokens) + len(suffix))
            tokens += suffix
    return Layout(tokens, prefixes, suffixes, predictors)


class PackedAttention:
    """Attention as model.Layer calls it, over packed tokens: all prefixes end to end, then their
    suffixes, prefix by prefix.

    prefixes: lengths, each at least 1. suffixes: for each prefix the lengths of its suffixes, which
    may be 0; by default there are none, and the prefixes are ordinary sequences. The attribute
    positions, (T,) int64 for rotary embeddings, counts from 0 in each prefix and continues from the
    prefix's end in each of its suffixes.
    """

    def __init__(self, prefixes: Sequence[int], device: torch.device | str,
                 suffixes: Sequence[Sequence[int]] = ()):
        pieces = [*prefixes, *(n for n in chain(*suffixes) if n)]
        self.inside = spans_of(pieces, pieces, True, device)
        self.across = None                       # span i: all suffixes of prefix i, over prefix i
        if any(chain(*suffixes)):
            self.across = spans_of([sum(group) for group in suffixes], prefixes, False, device)
        self.prefix_tokens = sum(prefixes)       # the first suffix begins here
        positions = [torch.arange(n) for n in prefixes]
        for start, group in zip(prefixes, suffixes):
            positions += [torch.arange(start, start + n) for n in group]
        self.positions = torch.cat(positions).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, H, d), k and v (T, KV, d) -> (T, H, d), differentiable."""
        return _Attention.apply(q, k, v, self)


# -----------------------------------------------------------------------------
# The softmax over one part of the keys, its backward pass, and the merge

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


@twin_in_kernels
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


@twin_in_kernels
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


@twin_in_kernels
def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Combines attention over two sets of keys (see the top of this file).

    out and other (T, H, d), lse and other_lse (H, T) as attend_spans returns them; the result
    overwrites out and lse.
    """
    both = torch.logaddexp(lse, other_lse)
    share, other_share = ((t - both).exp().T[:, :, None] for t in (lse, other_lse))
    out.copy_(out * share + other * other_share)
    lse.copy_(both)


class _Attention(torch.autograd.Function):
    """PackedAttention.__call__: both parts, forward and backward."""

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
