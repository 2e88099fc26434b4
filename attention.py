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
           p2   |  x  x  |          |          x  each token over its own piece, causal
        --------+--------+----------+-------
           a1   |  o  o  | x        |          o  each suffix over its entire prefix
           a2   |  o  o  | x  x     |
           a3   |  o  o  | x  x  x  |
        --------+--------+----------+-------
           b1   |  o  o  |          | x
           b2   |  o  o  |          | x  x

Not here: how a GPU computes it, in two softmaxes per suffix (fast/backward.py).

Shapes: T tokens (queries), S keys, H query heads, KV key-value heads, d head size.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import replaced_on_gpu

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
    """Packs rows of ids, each a prompt and a completion, so that equal prompts are computed once.

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
            # The prompt's last token predicts the first completion token; each later one is
            # predicted by the token before it.
            if len(group) > 1:
                predictors += [end - 1, *range(len(tokens), len(tokens) + len(suffix))]
            else:                                # the row is all prefix
                predictors += range(end - length + starts[i] - 1, end)
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
        self.prefixes = prefixes
        self.suffixes = suffixes
        positions = [torch.arange(n) for n in prefixes]
        for start, group in zip(prefixes, suffixes):
            positions += [torch.arange(start, start + n) for n in group]
        self.positions = torch.cat(positions).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, H, d), k and v (T, KV, d) -> (T, H, d), differentiable."""
        return attend_packed(q, k, v, self)


@replaced_on_gpu
def attend_packed(q: Tensor, k: Tensor, v: Tensor, pack: PackedAttention) -> Tensor:
    """PackedAttention.__call__, piece by piece: a prefix attends to itself, a suffix to its prefix
    and itself.
    """
    lengths = [*pack.prefixes, *chain(*pack.suffixes)]
    queries, keys, values = (t.split(lengths) for t in (q, k, v))
    outs = [causal(*piece) for piece in islice(zip(queries, keys, values), len(pack.prefixes))]
    for p, group in enumerate(pack.suffixes):
        for _ in group:
            i = len(outs)
            key, value = (torch.cat([t[p], t[i]]) for t in (keys, values))
            outs.append(causal(queries[i], key, value))
    return torch.cat(outs)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T tokens of a sequence, q (T, H, d), to all of its S tokens,
    k and v (S, KV, d) -> (T, H, d).
    """
    if not len(q):
        return q
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))       # (1, heads, tokens, d)
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1)
