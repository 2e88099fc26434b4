"""
Rollouts: groups of samples for a batch of prompts, from a KV cache of blocks, with the log-probs they were drawn with.

    sampler = Sampler(model, max_length=2048)
    rollouts = sampler.generate(prompts, group_size=8, max_new_tokens=1024, end_ids=tokenizer.end_ids, seed=step)

How it works
- A prompt is computed once per group: its KV blocks are shared by the G samples, counted, and freed with the last one.
  The prefill covers all but the prompt's last token; that token is every sample's first decode input, so there is one
  path to a sampled token, the decode step.
- Rows. A live sequence is a row of the decode batch. A finished row leaves and a waiting sequence takes its place
  (continuous batching); rows are kept dense, so a draining batch uses smaller and cheaper steps.
- Windows. The host looks at the rows every few steps; within such a window the engine runs alone. A row that ends
  inside one idles for the rest of it: at 8 steps and 200-token answers, 2 % of the work, printed as `idle`.
- Blocks are given out as rows grow. If the pool runs dry the newest row goes back to the queue with what it has written
  so far and is prefilled again later: more sequences than fit wait, never an error.
- Randomness. The token at position t of sample g of prompt p is the inverse CDF at u(seed, p, g, t), a hash: it depends
  on nothing else, not on batch, row, window or number of GPUs (only on how matmuls round).

The old policy of the loss is what is written down here: temperature, noisy norms and adapter included.

Engines run prefills and decode steps: TorchEngine below, in plain torch, on any device; decode.py's with CUDA graphs.
Not here: beam search, penalties, stop strings, prefix sharing between different prompts.

Shapes: P prompts, G samples a prompt, n live rows, T tokens, V vocabulary, H query heads, KV key-value heads,
d head size.
"""
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

import marlin_fp4
import nvfp4
from marlin_fp4 import mm_fp32
from model import PackedAttention

BLOCK = 32                                     # tokens per KV block: half of one is wasted per sequence, on average
WINDOW = 8                                     # decode steps between two looks of the host
PREFILL_TOKENS = 16384                         # tokens in one packed prefill: bounds its activations
PREFILL_SIZES = 64, 128, 256, 512, 1024        # tokens of prefills that a GPU engine replays as a graph
MASK64 = 2**64 - 1


@dataclass
class Rollouts:
    """B = P * G sequences, flat and without padding; rows [p * G, (p + 1) * G) belong to prompt p."""
    prompts: list                              # B lists of ids; the G entries of a group are one object
    completions: list                          # B lists of ids, the end id included
    logprobs: list                             # B fp32 tensors, one entry per completion token
    finished: list                             # B bools: stopped on an end id (False: cut at max_new_tokens)
    seconds: float = 0.0
    idle: float = 0.0                          # share of decoded row-steps that produced no token
    num_tokens: int = 0                        # completion tokens sampled, those of rows that select() left out too

    def select(self, rows):
        """The given rows; seconds, idle and num_tokens stay those of the whole."""
        lists = ([column[i] for i in rows] for column in (self.prompts, self.completions, self.logprobs, self.finished))
        return Rollouts(*lists, self.seconds, self.idle, self.num_tokens)

    def __add__(self, other):
        """Rows of both; idle is weighted by time."""
        seconds = self.seconds + other.seconds
        return Rollouts(self.prompts + other.prompts, self.completions + other.completions,
                        self.logprobs + other.logprobs, self.finished + other.finished, seconds,
                        (self.idle * self.seconds + other.idle * other.seconds) / max(seconds, 1e-9),
                        self.num_tokens + other.num_tokens)


@dataclass(eq=False)
class Prefix:
    """Tokens whose KV is computed before decoding starts, and the blocks that hold it while anybody needs it."""
    tokens: list
    blocks: list = field(default_factory=list)
    resident: bool = False
    users: int = 0


@dataclass(eq=False)
class Sequence:
    """One sample: prefix + next input token + own blocks. `key` seeds its uniforms; `limit` is its last position."""
    prompt: list
    key: int
    prefix: Prefix
    token: int
    limit: int
    blocks: list = field(default_factory=list)
    completion: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finished: bool = False
    pos: int = 0                               # absolute position of `token`


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
    """keys, positions (n,) int64 -> u (n,) fp32 in (0, 1). The GPU kernel in decode.py computes the same bits."""
    def shift(x, s):                                                 # logical shift right of an int64
        return (x >> s) & ((1 << (64 - s)) - 1)
    z = keys + (positions + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    z = z ^ shift(z, 31)
    return (shift(z, 41).float() + 0.5) * 2.0**-23                   # 23 bits and a half: exact, never 0 or 1


def filter_logits(logits, top_k=0, top_p=1.0):
    """Keep the top_k highest and, of those, the smallest set with mass >= top_p; the rest becomes -inf. In place."""
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits.masked_fill_(logits < kth, -torch.inf)
    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        ordered.masked_fill_(p.cumsum(-1) - p >= top_p, -torch.inf)  # mass before this token already suffices
        logits.scatter_(-1, index, ordered)
    return logits


def draw(logits, u):
    """logits (n, V) fp32, u (n,) -> token (n,), its log-prob (n,). Inverse CDF in vocabulary order; u None: greedy."""
    lse = logits.logsumexp(-1)
    if u is None:
        token = logits.argmax(-1)
    else:
        cdf = (logits - lse[:, None]).exp().cumsum(-1)
        token = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return token, logits.gather(1, token[:, None])[:, 0] - lse


def quantize_head(model):
    """Round lm_head to NVFP4, for sampler and learner alike: its 16-bit values replace it, the codes serve few rows."""
    model.packed_head = marlin_fp4.pack(*nvfp4.quantize(model.lm_head), dtype=model.dtype)
    model.lm_head = model.packed_head.dequantize(dtype=model.dtype)  # exact: the tensor's scale is a power of two


def prefill(model, kv, tokens, blocks, positions, attend):
    """One packed forward over whole prefixes; the keys and values of token t go to blocks[t], positions[t] % BLOCK.

    tokens, blocks, positions: (T,) int64 on the model's device; attend: a model.PackedAttention or what acts like one.
    """
    def layer(keys, values):
        def write_and_attend(q, k, v):
            keys[blocks, :, positions % BLOCK], values[blocks, :, positions % BLOCK] = k, v
            return attend(q, k, v)
        return write_and_attend
    model.hidden(tokens, [layer(*cache) for cache in kv], positions)


class TorchEngine:
    """Prefill and decode step in plain torch: the reference for decode.py, and the path of a machine without GPU."""
    window = 1                                                       # steps between two looks of the host: it is free
    shared = 1                                                       # rows whose prefix is read together

    def __init__(self, model, kv, max_rows):
        self.model, self.kv, self.max_rows = model, kv, max_rows

    def batch_size(self, n):
        return n

    @torch.no_grad()
    def prefill(self, tokens, blocks, lengths):
        """Keys and values of prefixes of so many tokens each: tokens, blocks (T,) int64 on the CPU, as prefill()."""
        device, attend = self.kv.device, PackedAttention(lengths, self.kv.device)
        prefill(self.model, self.kv, tokens.to(device), blocks.to(device), attend.positions(), attend)

    @torch.no_grad()
    def decode(self, rows, steps, temperature, end_ids, top_k, top_p):
        """Advance `rows` (dict of (n,) tensors and the (n, width) block table) by `steps` steps.

        -> tokens (steps, n) int64, logprobs (steps, n) fp32, made (n,): how many of a row's tokens count.
        """
        model, kv = self.model, self.kv
        token, pos, alive = rows["token"].clone(), rows["pos"].clone(), rows["limit"] > rows["pos"]
        made, ends = torch.zeros_like(pos), torch.tensor(sorted(end_ids), dtype=torch.int64, device=pos.device)
        tokens, logprobs = [], []
        for _ in range(steps):
            cache = CachedAttention(kv, rows["table"], rows["prefix"], pos)
            xw, rstd = model.hidden(token, [cache.layer(i) for i in range(len(model.layers))], pos)
            logits = mm_fp32(xw, model.lm_head[:model.live_vocab].T) * (rstd / (temperature or 1.0))
            u = uniforms(rows["key"], pos) if temperature else None
            picked, logprob = draw(filter_logits(logits, top_k, top_p), u)
            tokens.append(picked)
            logprobs.append(logprob)
            made += alive
            token, pos = torch.where(alive, picked, token), pos + alive
            alive &= ~torch.isin(picked, ends) & (pos < rows["limit"])
        return torch.stack(tokens), torch.stack(logprobs), made


class CachedAttention:
    """One new token per row attends to the row's blocks: prefix tokens, a gap up to the block's end, own tokens.

    Virtual index of a row's token at position p: p inside the prefix, else slots(prefix) + p - prefix.
    """

    def __init__(self, kv, table, prefix, pos):
        start = (prefix + BLOCK - 1) // BLOCK * BLOCK                # where the row's own blocks begin
        last = start + pos - prefix                                  # virtual index of the new token
        width = int(last.max()) // BLOCK + 1
        self.kv, self.table = kv, table[:, :width]
        self.block, self.offset = table.gather(1, (last // BLOCK)[:, None])[:, 0], last % BLOCK
        index = torch.arange(width * BLOCK, device=table.device)[None, :]
        valid = (index < prefix[:, None]) | ((index >= start[:, None]) & (index <= last[:, None]))
        self.mask = valid[:, None, None, :]                          # (n, 1, 1, width * BLOCK)

    def layer(self, i):
        def attend(q, k, v):
            keys, values = self.kv[i]                                # (blocks, KV, BLOCK, d)
            keys[self.block, :, self.offset], values[self.block, :, self.offset] = k, v
            context = [t[self.table].transpose(1, 2).flatten(2, 3) for t in (keys, values)]      # (n, KV, T, d)
            y = F.scaled_dot_product_attention(q[:, :, None], *context, attn_mask=self.mask, enable_gqa=True)
            return y[:, :, 0]
        return attend


class Sampler:
    """max_length: longest prompt + completion; max_rows: most sequences decoded at a time.

    kv_gib: memory for the KV blocks; by default what max_rows sequences of max_length need, at most half of what is
    free. ValueError if that does not hold even one sequence.
    """

    def __init__(self, model, max_length, max_rows=256, kv_gib=None, engine=None):
        c, self.model, self.max_length = model.config, model, max_length
        self.width = -(-max_length // BLOCK) + 1                     # blocks a row can need; +1: the prefix's rounding
        block_bytes = c.layers * 2 * c.kv_heads * BLOCK * c.head_dim * model.dtype.itemsize
        blocks = max_rows * self.width + 1                           # block 0 is scratch for rows that do not count
        if kv_gib is None and model.device.type == "cuda":
            kv_gib = torch.cuda.mem_get_info(model.device)[0] / 2 / 2**30
        if kv_gib is not None:
            blocks = min(blocks, int(kv_gib * 2**30 / block_bytes))
        if blocks < self.width + 1:
            raise ValueError(f"KV pool of {kv_gib:.2f} GiB holds {max(blocks, 0) * BLOCK} tokens: less than one "
                             f"sequence of {max_length} tokens ({(self.width + 1) * block_bytes / 2**30:.2f} GiB)")
        shape = (c.layers, 2, blocks, c.kv_heads, BLOCK, c.head_dim)
        self.kv = torch.zeros(shape, dtype=model.dtype, device=model.device)     # 0 * NaN would poison masked keys
        self.free = list(range(blocks - 1, 0, -1))
        self.max_rows = max_rows
        if engine is None and model.device.type == "cuda":
            from decode import GraphEngine as engine                 # Triton kernels: only where there is a GPU
        self.engine = (engine or TorchEngine)(model, self.kv, max_rows)

    @torch.no_grad()
    def generate(self, prompts, group_size=1, max_new_tokens=256, end_ids=(), temperature=1.0, seed=0, prompt_ids=None,
                 top_k=0, top_p=1.0, progress=None):
        """prompts: P lists of ids -> Rollouts of P * group_size sequences.

        max_new_tokens: one for all, or a list of B (benchmarks draw lengths from a distribution). temperature 0 is
        greedy; its log-probs are those at temperature 1. prompt_ids: P ints that key the randomness (default: the
        index). progress: called with the number of new tokens after each window.
        """
        size = len(prompts) * group_size
        limits = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * size
        assert len(limits) == size and min(limits, default=1) > 0, f"need {size} limits above 0, got {len(limits)}"
        for p in prompts:
            assert 0 < len(p) <= self.max_length - max(limits), (
                f"a prompt of {len(p)} tokens + {max(limits)} new ones does not fit max_length={self.max_length}")
        self.free = list(range(self.kv.shape[2] - 1, 0, -1))         # all: a call ended by an exception gave none back
        began, steps_made = time.perf_counter(), 0
        sequences = []
        for prompt, prompt_id in zip(prompts, prompt_ids or range(len(prompts)), strict=True):
            prefix = Prefix(prompt[:-1])
            for g in range(group_size):
                sequences.append(Sequence(prompt, row_key(seed, prompt_id, g), prefix, prompt[-1],
                                          len(prompt) - 1 + limits[len(sequences)], pos=len(prompt) - 1))
        waiting, live = deque(sequences), []
        while waiting or live:
            self._admit(waiting, live)
            self._grow(waiting, live)
            steps = min(self.engine.window, max(s.limit - s.pos for s in live))
            tokens, logprobs, made = self.engine.decode(self._rows(live), steps, temperature, end_ids, top_k, top_p)
            logprobs = logprobs.cpu()
            if not logprobs.isfinite().all():
                reach = ", or a number beyond float16's 65,504" if self.model.dtype == torch.float16 else ""
                raise FloatingPointError(f"a sampled token's log-prob is not finite: NaN in weights or adapter{reach}?")
            steps_made += steps * self.engine.batch_size(len(live))
            tokens, logprobs, made = tokens.cpu().T.tolist(), logprobs.T.tolist(), made.tolist()
            for row, s in enumerate(live):
                s.completion += tokens[row][:made[row]]
                s.logprobs += logprobs[row][:made[row]]
                s.token, s.pos = s.completion[-1], s.pos + made[row]
                s.finished = s.token in end_ids
            for s in [s for s in live if s.finished or s.pos == s.limit]:
                live.remove(s)
                self._release(s)
            if progress:
                progress(sum(made))
        made = sum(len(s.completion) for s in sequences)
        return Rollouts([s.prompt for s in sequences], [s.completion for s in sequences],
                        [torch.tensor(s.logprobs) for s in sequences], [s.finished for s in sequences],
                        seconds=time.perf_counter() - began, idle=1 - made / steps_made if steps_made else 0.0,
                        num_tokens=made)

    def _admit(self, waiting, live):
        """Move sequences from the queue to the batch while rows and blocks last; prefill their prefixes."""
        new = []
        while waiting and len(live) < self.max_rows:
            s = waiting[0]
            prefix_blocks = 0 if s.prefix.resident else -(-len(s.prefix.tokens) // BLOCK)
            if len(self.free) < prefix_blocks + 1 + len(live) and live:
                break                                                # wait: each live row may need a block this window
            waiting.popleft()
            if not s.prefix.resident:
                s.prefix.blocks = [self.free.pop() for _ in range(prefix_blocks)]
                s.prefix.resident = True
                new.append(s.prefix)
            s.prefix.users += 1
            live.append(s)
        batch, size = [], 0
        for prefix in [p for p in new if p.tokens] + [None]:
            if batch and (prefix is None or size + len(prefix.tokens) > PREFILL_TOKENS):
                self._prefill(batch)
                batch, size = [], 0
            if prefix:
                batch.append(prefix)
                size += len(prefix.tokens)

    def _grow(self, waiting, live):
        """Give every row the blocks of its next window, oldest first; the newest rows go back to the queue if short."""
        for s in list(live):
            if s not in live:
                break                                                # it and all after it were sent back
            last = min(s.pos + self.engine.window, s.limit) - len(s.prefix.tokens)   # own tokens after this window
            need = -(-last // BLOCK) - len(s.blocks)
            while need > len(self.free):
                victim = live.pop()
                assert victim is not s or live, "the pool holds one sequence, by the check in __init__"
                self._release(victim)
                victim.prefix = Prefix((victim.prompt + victim.completion)[:-1])
                waiting.appendleft(victim)
                if victim is s:
                    break
            else:
                s.blocks += [self.free.pop() for _ in range(need)]

    def _release(self, s):
        self.free += s.blocks
        s.blocks = []
        s.prefix.users -= 1
        if s.prefix.users == 0:
            self.free += s.prefix.blocks
            s.prefix.blocks, s.prefix.resident = [], False

    def _rows(self, live):
        """The rows' state as tensors: what an engine needs to run a window on its own. One copy to the device."""
        share, first = [0] * len(live), 0                            # at the first of rows with one prefix: how many
        for row, s in enumerate(live):
            if s.prefix is not live[first].prefix or row - first == self.engine.shared:
                first = row
            share[first] += 1
        names = "token", "pos", "prefix", "share", "limit", "key"
        values = np.zeros((len(live), len(names) + self.width), dtype=np.int64)
        for line, s, k in zip(values, live, share):
            known = [s.token, s.pos, len(s.prefix.tokens), k, s.limit, s.key, *s.prefix.blocks, *s.blocks]
            line[:len(known)] = known
        values = torch.from_numpy(values).to(self.kv.device)
        columns = values[:, :len(names)].T.contiguous()
        return {**dict(zip(names, columns)), "table": values[:, len(names):]}

    def _prefill(self, prefixes):
        """KV of several prefixes in one packed forward."""
        lengths = [len(p.tokens) for p in prefixes]
        blocks = torch.cat([torch.tensor(p.blocks).repeat_interleave(BLOCK)[:n] for p, n in zip(prefixes, lengths)])
        self.engine.prefill(torch.tensor([t for p in prefixes for t in p.tokens]), blocks, lengths)
