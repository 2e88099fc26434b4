"""
Rollouts: groups of samples for a batch of prompts, from a KV cache of blocks, with the log-probs
they were drawn with: temperature, noise and adapter included.

    sampler = Sampler(TorchEngine, model, max_length=2048)
    rollouts = sampler.generate(prompts, 8, Sampling(max_new_tokens=1024, end_ids=(151645,)))

- A prompt is computed once per group: its KV blocks are shared by the G samples, and freed with
  the last one. The prefill covers all but the prompt's last token; that token is every sample's
  first decode input, so there is one path to a sampled token, the decode step.
- A live sequence is a row of the decode batch. A finished row leaves and a waiting sequence takes
  its place (continuous batching); rows are dense, so a draining batch uses cheaper steps.
- The host looks at the rows every few steps. A row that ends between two looks idles:
  at 8 steps and 200-token answers, 2 % of the work, logged as `idle`.
- Blocks are given out as rows grow. If the pool runs dry the newest row is preempted: back to the
  queue with what it has written so far, to be prefilled again later. Never an error.
- Randomness. The token at position t of sample g of prompt p is the inverse CDF at
  u(seed, p, g, t), a hash: batch, row, window and number of GPUs do not change it.

Not here: beam search, penalties, stop strings, prefix sharing between different prompts.

Shapes: P prompts, G samples a prompt, n live rows, T tokens, V vocabulary, L layers, KV key-value
heads, d head size.
"""
import functools
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from attention import PackedAttention
from harness.process import Stopped
from ops import mm_fp32

KV_BLOCK = BLOCK = 32                            # tokens per KV block: half a block wasted a row
PREFILL_TOKENS = 16384                           # in one packed prefill: bounds its activations
MASK64 = 2**64 - 1


class Sampling(NamedTuple):
    """How to draw. temperature 0 is greedy; its log-probs are those at temperature 1."""
    max_new_tokens: int                          # or one for each sequence: a list of P * G
    end_ids: tuple = ()
    temperature: float = 1.0
    top_k: int = 0                               # only the likeliest so many; 0: all
    top_p: float = 1.0                           # nucleus
    seed: int = 0


@dataclass
class Rollouts:
    """B = P * G sequences without padding; rows [p * G, (p + 1) * G) belong to prompt p."""
    prompts: list                                # B lists of ids, one object for a whole group
    completions: list                            # B lists of ids, the end id included
    logprobs: list                               # B fp32 tensors, one entry per completion token
    finished: list                               # B bools: stopped on an end id, not on the limit
    seconds: float = 0.0
    computed: int = 0                            # rows of all decode steps
    proximal: dict = field(default_factory=dict)  # row -> learner's log-probs at its first pass

    @property
    def num_tokens(self):
        return sum(map(len, self.completions))

    @property
    def idle(self):
        """Share of the decode steps' rows that produced no token."""
        return 1 - self.num_tokens / self.computed if self.computed else 0.0

    def __add__(self, other):
        """Rows of two ranks, which sampled side by side."""
        return Rollouts(self.prompts + other.prompts, self.completions + other.completions,
                        self.logprobs + other.logprobs, self.finished + other.finished,
                        max(self.seconds, other.seconds), self.computed + other.computed)


# -----------------------------------------------------------------------------
# The draw

def mix64(x):
    """SplitMix64's finalizer: 64 bits in, 64 well-mixed bits out (Steele et al. 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def row_key(seed, prompt, sample):
    """A 63-bit key of one sample; 63 so that it fits torch's int64."""
    key = 0
    for part in (seed, prompt, sample):
        key = mix64((key + part + 0x9E3779B97F4A7C15) & MASK64)
    return key >> 1


def uniforms(keys, positions):
    """keys, positions (n,) int64 -> u (n,) fp32 in (0, 1). kernels.uniform: the same bits."""
    def shift(x, s):                                             # logical, of an int64
        return (x >> s) & ((1 << (64 - s)) - 1)
    z = keys + (positions + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    z = z ^ shift(z, 31)
    return (shift(z, 41).float() + 0.5) * 2.0**-23               # exact, never 0 or 1


def filter_logits(logits, top_k=0, top_p=1.0):
    """Keep the top_k highest and of those the smallest set with mass >= top_p; in place."""
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits.masked_fill_(logits < kth, -torch.inf)
    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        enough = p.cumsum(-1) - p >= top_p                       # mass before this token suffices
        logits.scatter_(-1, index, ordered.masked_fill_(enough, -torch.inf))
    return logits


def draw(logits, u):
    """logits (n, V) fp32, u (n,) -> token (n,), its log-prob (n,): inverse CDF; u None: greedy."""
    lse = logits.logsumexp(-1)
    if u is None:
        token = logits.argmax(-1)
    else:
        cdf = (logits - lse[:, None]).exp().cumsum(-1)
        target = (u * cdf[:, -1])[:, None]
        token = torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return token, logits.gather(1, token[:, None])[:, 0] - lse


# -----------------------------------------------------------------------------
# The engine: prefills and decode steps

class Rows(NamedTuple):
    """The live rows on the device, (n,) int64 each: what an engine needs for a window."""
    token: torch.Tensor                          # next input
    pos: torch.Tensor                            # its position
    prefix: torch.Tensor                         # how many tokens its prefix has
    siblings: torch.Tensor                       # at the first of rows with one prefix: how many
    limit: torch.Tensor                          # the last position
    key: torch.Tensor                            # of the row's randomness
    table: torch.Tensor                          # (n, width) blocks: of the prefix, then its own


class TorchEngine:
    """In plain torch, on any device; its fast twin is decode.GraphEngine.

    kv: (L, 2, blocks, KV, BLOCK, d), keys and values. max_rows: for the twin's buffers.
    """
    window = 1                                   # decode steps between two looks of the host
    most_siblings = 1                            # rows whose prefix is read together

    def __init__(self, model, kv, max_rows):
        self.model = model
        self.kv = kv

    def batch_size(self, n):
        """The rows that a step of n live rows computes."""
        return n

    @torch.no_grad()
    def prefill(self, tokens, blocks, lengths):
        """Keys and values of packed prefixes of so many tokens each; tokens, blocks (T,) int64."""
        device = self.kv.device
        attend = PackedAttention(lengths, device)
        fill_cache(self.model, self.kv, tokens.to(device), blocks.to(device), attend.positions,
                   attend)

    @torch.no_grad()
    def decode(self, rows, steps, sampling):
        """-> tokens (steps, n) int64, logprobs (steps, n) fp32, made (n,): tokens that count."""
        model = self.model
        token = rows.token.clone()
        pos = rows.pos.clone()
        alive = rows.limit > rows.pos
        made = torch.zeros_like(pos)
        ends = torch.tensor(sorted(sampling.end_ids), dtype=torch.int64, device=pos.device)
        tokens = []
        logprobs = []
        for _ in range(steps):
            attends = attention_to_cache(self.kv, rows.table, rows.prefix, pos)
            xw, rstd = model.hidden(token, attends, pos)
            scale = rstd / (sampling.temperature or 1.0)
            logits = mm_fp32(xw, model.lm_head[:model.live_vocab].T) * scale
            u = uniforms(rows.key, pos) if sampling.temperature else None
            picked, logprob = draw(filter_logits(logits, sampling.top_k, sampling.top_p), u)
            tokens.append(picked)
            logprobs.append(logprob)
            made += alive
            token = torch.where(alive, picked, token)
            pos = pos + alive
            alive &= ~torch.isin(picked, ends) & (pos < rows.limit)
        return torch.stack(tokens), torch.stack(logprobs), made


def write_cache(layer, blocks, offsets, k, v):
    """Key and value of token t (KV, d) go to place offsets[t] of block blocks[t]."""
    keys, values = layer                                         # (blocks, KV, BLOCK, d) each
    keys[blocks, :, offsets] = k
    values[blocks, :, offsets] = v


def fill_cache(model, kv, tokens, blocks, positions, attend):
    """One packed forward, whose keys and values go to positions % BLOCK of blocks."""
    offsets = positions % BLOCK

    def write_and_attend(layer, q, k, v):
        write_cache(layer, blocks, offsets, k, v)
        return attend(q, k, v)

    model.hidden(tokens, [functools.partial(write_and_attend, layer) for layer in kv], positions)


def attention_to_cache(kv, table, prefix, pos):
    """-> for each layer the attention of one new token per row, at pos.

    A row's slots: its prefix, a gap up to a whole block, from `start` on its own tokens.
    """
    start = (prefix + BLOCK - 1) // BLOCK * BLOCK
    last = start + pos - prefix                                  # the new token's slot
    offset = last % BLOCK
    width = int(last.max()) // BLOCK + 1
    table = table[:, :width]
    block = table.gather(1, (last // BLOCK)[:, None])[:, 0]
    slot = torch.arange(width * BLOCK, device=table.device)[None, :]
    own = (slot >= start[:, None]) & (slot <= last[:, None])
    mask = ((slot < prefix[:, None]) | own)[:, None, None, :]    # (n, 1, 1, slots)

    def attend(layer, q, k, v):
        write_cache(layer, block, offset, k, v)
        context = [t[table].transpose(1, 2).flatten(2, 3) for t in layer]
        y = F.scaled_dot_product_attention(q[:, :, None], *context, attn_mask=mask, enable_gqa=True)
        return y[:, :, 0]

    return [functools.partial(attend, layer) for layer in kv]


def engine_for(device, kernels="auto"):
    """The engine class of a device; kernels: --kernels, see run.kernels_for."""
    if device.type != "cuda":
        return TorchEngine
    from fast.decode import GraphEngine
    return functools.partial(GraphEngine, kernels=kernels)


# -----------------------------------------------------------------------------
# Sequences and their blocks

def blocks_for(tokens):
    return -(-tokens // BLOCK)


class BlockPool:
    """Numbers of the free KV blocks. Block 0 is never given out: a graph's spare rows use it."""

    def __init__(self, count):
        self.free = list(range(count - 1, 0, -1))

    def __len__(self):
        return len(self.free)

    def take(self, n):
        return [self.free.pop() for _ in range(n)]

    def give(self, blocks):
        """Takes back, and empties the list."""
        self.free += blocks
        blocks.clear()


@dataclass(eq=False)
class Prefix:
    """Tokens whose keys and values are computed before decoding, and the blocks that hold those."""
    tokens: list
    blocks: list = field(default_factory=list)
    users: int = 0                               # live sequences; the last one frees the blocks


@dataclass(eq=False)
class Sequence:
    """One sample: prefix + next input token + own blocks."""
    row: int                                     # of Rollouts
    prompt: list
    key: int                                     # seeds its uniforms
    prefix: Prefix
    token: int                                   # next input, and
    pos: int                                     # its position
    limit: int                                   # the last position
    blocks: list = field(default_factory=list)
    completion: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finished: bool = False


def rollouts_of(sequences, seconds=0.0, computed=0):
    return Rollouts([s.prompt for s in sequences], [s.completion for s in sequences],
                    [torch.tensor(s.logprobs) for s in sequences],
                    [s.finished for s in sequences], seconds, computed)


def allocate_kv(model, max_length, max_rows, kv_gib):
    """-> kv as TorchEngine takes it; arguments as of Sampler."""
    c = model.config
    row_blocks = blocks_for(max_length) + 1                      # +1: the prefix's rounding
    block_bytes = c.layers * 2 * c.kv_heads * BLOCK * c.head_dim * model.dtype.itemsize
    memory = math.inf                                            # Windows does not tell
    if kv_gib is not None:
        memory = kv_gib * 2**30
    elif model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        allowed = torch.cuda.get_per_process_memory_fraction(model.device) * total  # --memory-gib
        memory = min(free, allowed - torch.cuda.memory_reserved(model.device)) / 2
    elif hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    blocks = int(min(max_rows * row_blocks + 1, memory / block_bytes))     # +1: block 0
    if blocks < row_blocks + 1:
        need = (row_blocks + 1) * block_bytes / 2**30
        raise ValueError(f"KV pool of {memory / 2**30:.2f} GiB holds {blocks * BLOCK} tokens: less "
                         f"than one sequence of {max_length} tokens ({need:.2g}): raise --kv-gib")
    shape = c.layers, 2, blocks, c.kv_heads, BLOCK, c.head_dim
    try:
        return torch.zeros(shape, dtype=model.dtype, device=model.device)  # 0 * NaN would be NaN
    except RuntimeError:
        raise ValueError(f"not enough memory for {blocks * block_bytes / 2**30:.1f} GiB of KV "
                         "cache: lower --kv-gib, --max-rows or --max-new-tokens") from None


class Sampler:
    """An engine_class on a new KV pool, for sequences of at most max_length tokens (prompt and
    completion), max_rows decoded at a time.

    kv_gib: memory for the KV blocks; by default what max_rows such rows need, at most half of a
    GPU's free memory or of the machine's. ValueError if that does not hold even one row.
    """

    def __init__(self, engine_class, model, max_length, max_rows=256, kv_gib=None):
        kv = allocate_kv(model, max_length, max_rows, kv_gib)
        self.engine = engine_class(model, kv, max_rows)
        self.pool = BlockPool(kv.shape[2])
        self.max_length = max_length
        self.max_rows = max_rows

    @torch.no_grad()
    def generate(self, prompts, group_size, sampling, numbers=None, progress=None):
        """prompts: P lists of ids -> Rollouts of P * group_size sequences.

        numbers: of the prompts, P ints that key their randomness (default: from 0 on). progress:
        called after each window with how many tokens are new, and the sequences that ended in it.
        """
        began = time.perf_counter()
        sequences = self._sequences(prompts, group_size, sampling, numbers)
        self.pool = BlockPool(self.engine.kv.shape[2])           # a call cut short gave none back
        waiting = deque(sequences)
        live = []
        computed = 0
        while waiting or live:
            self._admit(waiting, live)
            self._grow(waiting, live)
            steps = min(self.engine.window, max(s.limit - s.pos for s in live))
            computed += steps * self.engine.batch_size(len(live))
            window = self.engine.decode(self._rows(live), steps, sampling)
            made, ended = self._record(live, window, sampling.end_ids)
            if progress:
                progress(made, ended)
        return rollouts_of(sequences, time.perf_counter() - began, computed)

    def _sequences(self, prompts, group_size, sampling, numbers):
        limits = sampling.max_new_tokens
        size = len(prompts) * group_size
        if not isinstance(limits, list):
            limits = [limits] * size
        assert len(limits) == size and min(limits, default=1) > 0, \
            f"need {size} limits above 0, got {len(limits)}"
        sequences = []
        for prompt, number in zip(prompts, numbers or range(len(prompts)), strict=True):
            prefix = Prefix(prompt[:-1])
            pos = len(prompt) - 1
            for g in range(group_size):
                row = len(sequences)
                limit = pos + limits[row]
                assert 0 <= pos and limit < self.max_length, (
                    f"a prompt of {pos + 1} tokens + {limit - pos} new ones does not fit "
                    f"max_length={self.max_length}")
                key = row_key(sampling.seed, number, g)
                sequences.append(Sequence(row, prompt, key, prefix, prompt[-1], pos, limit))
        return sequences

    def _admit(self, waiting, live):
        """Queue -> batch, while rows and blocks last; prefill the prefixes that came."""
        new = []
        while waiting and len(live) < self.max_rows:
            prefix = waiting[0].prefix
            need = 0 if prefix.users else blocks_for(len(prefix.tokens))
            if live and len(self.pool) < need + 1 + len(live):
                break                            # wait: each live row may need a block this window
            if prefix.tokens and not prefix.users:
                prefix.blocks = self.pool.take(need)
                new.append(prefix)
            prefix.users += 1
            live.append(waiting.popleft())
        self._prefill(new)

    def _prefill(self, prefixes):
        """Packed: at most PREFILL_TOKENS tokens together, or one prefix."""
        batches = [[]]
        for prefix in prefixes:
            if sum(len(p.tokens) for p in [*batches[-1], prefix]) > PREFILL_TOKENS:
                batches.append([])
            batches[-1].append(prefix)
        for batch in filter(None, batches):
            lengths = [len(p.tokens) for p in batch]
            blocks = [torch.tensor(p.blocks).repeat_interleave(BLOCK)[:n]
                      for p, n in zip(batch, lengths)]
            tokens = torch.tensor([t for p in batch for t in p.tokens])
            self.engine.prefill(tokens, torch.cat(blocks), lengths)

    def _grow(self, waiting, live):
        """Blocks of the next window, oldest row first; if short, the newest are preempted."""
        for s in live:                           # rows from its end may be sent back on the way
            end = min(s.pos + self.engine.window, s.limit)
            need = blocks_for(end - len(s.prefix.tokens)) - len(s.blocks)
            while need > len(self.pool):
                newest = live.pop()
                self._release(newest)
                newest.prefix = Prefix((newest.prompt + newest.completion)[:-1])
                waiting.appendleft(newest)
                assert live, "the pool holds one sequence: see allocate_kv"
                if newest is s:
                    return
            s.blocks += self.pool.take(need)

    def _rows(self, live):
        """The rows' state as tensors, in one copy to the device."""
        siblings = [0] * len(live)
        first = 0
        for row, s in enumerate(live):
            if s.prefix is not live[first].prefix or row - first == self.engine.most_siblings:
                first = row
            siblings[first] += 1
        columns = len(Rows._fields) - 1
        width = blocks_for(self.max_length) + 1
        values = np.zeros((len(live), columns + width), dtype=np.int64)
        for line, s, count in zip(values, live, siblings):
            state = [s.token, s.pos, len(s.prefix.tokens), count, s.limit, s.key]
            known = [*state, *s.prefix.blocks, *s.blocks]
            line[:len(known)] = known
        values = torch.from_numpy(values).to(self.engine.kv.device)
        return Rows(*values[:, :columns].T.contiguous(), table=values[:, columns:])

    def _record(self, live, window, end_ids):
        """Write down what a window made -> how many tokens, the sequences that ended."""
        tokens, logprobs, made = window
        logprobs = logprobs.cpu()
        if not logprobs.isfinite().all():
            raise Stopped("a sampled token's log-prob is not finite: --temperature is too low, or "
                          "weights or adapter are too large, for --dtype float16 above 65,504")
        tokens = tokens.cpu().T.tolist()
        logprobs = logprobs.T.tolist()
        made = made.tolist()
        ended = []
        for row, s in enumerate(list(live)):
            s.completion += tokens[row][:made[row]]
            s.logprobs += logprobs[row][:made[row]]
            s.token = s.completion[-1]
            s.pos += made[row]
            s.finished = s.token in end_ids
            if s.finished or s.pos == s.limit:
                live.remove(s)
                self._release(s)
                ended.append(s)
        return sum(made), ended

    def _release(self, s):
        self.pool.give(s.blocks)
        s.prefix.users -= 1
        if s.prefix.users == 0:
            self.pool.give(s.prefix.blocks)
