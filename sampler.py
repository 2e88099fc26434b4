"""
The sampler: draws groups of answers to many prompts, with a paged KV cache, and records the
log-prob with which each token was drawn (adapter, noise, temperature, top_k and top_p included).

    sampler = Sampler(model, max_length=2048)
    rollouts = sampler.generate(prompts, 8, Sampling(max_new_tokens=1024, end_ids=(151645,)))

Sampler.generate, in outline (a row is one answer):

    queue all answers, those to the same prompt next to each other
    while any are waiting or running:
        while rows and memory are free: start the next one; the first of a group computes the keys
            and values of its prompt (prefill), which the others share
        for each running row: draw the next token from softmax(logits / temperature) and keep its
            log-prob
        remove rows that drew an end token or reached their limit

- Prefill computes the keys and values of prefixes. The prompt's last token is the first input of
  each row's decode steps, so every sampled token comes from a decode step. On a GPU, a short
  prefill also takes the next waiting prefixes if enough kv_blocks are free.
- A decode step computes one new token for each running row. Rows that have ended leave the batch
  and waiting sequences take their places (continuous batching), so steps get cheaper when few rows
  are left.
- The CPU reads the drawn tokens after every *window* of decode steps: 8 steps on a GPU, because
  each read stalls it, and 1 on a CPU. A row that ends mid-window stays in the batch until the
  window is over. CUDA graphs exist only for some batch sizes, so a GPU's batch is padded to the
  next size. Rollouts.idle counts both.
- Random numbers come from a hash, not from a generator with state. The token after position t of
  sample g of the prompt at place p in the run is drawn with u(seed, p, g, t), independent of
  batching, preemption and GPU count, which can change a token only through rounding.

Not here: which rows run and where their keys and values are (scheduler.py); beam search, penalties,
stop strings, prefixes shared by different prompts.

Shapes: P prompts, G samples per prompt, n running rows, T tokens, V vocabulary, L layers, H query
heads, KV key-value heads, d head size. Positions count from 0, the prompt's first token.
"""
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention import PackedAttention
from files import Stopped
from model import Transformer
from ops import mm_fp32, on_gpu
from scheduler import KV_BLOCK, Prefix, Scheduler, Sequence, allocate_kv, blocks_for

PREFILL_TOKENS = 16384                           # in one packed prefill: bounds its activations
MASK64 = 2**64 - 1                               # Python's integers do not overflow at 64 bits


class Sampling(NamedTuple):
    """How to draw tokens. Their log-probs are those of the distribution they are drawn from.

    temperature 0 is greedy, with log-probs at temperature 1. top_k and top_p are for evaluation
    only: the learner doesn't filter, so its log-probs wouldn't match.
    """
    max_new_tokens: int | list[int]              # a list: one for each of the P * G sequences
    end_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0                               # only the top_k most likely tokens; 0: all
    top_p: float = 1.0                           # nucleus sampling (1904.09751); 1: all
    seed: int = 0


@dataclass
class Row:
    """One answer: how it was sampled and, once graded, what it is worth."""
    prompt: list[int]                            # token ids; one object per group
    completion: list[int]                        # token ids, the end id included
    logprobs: Tensor                             # (completion tokens,) fp32, on the CPU
    finished: bool                               # stopped by an end id, not by the limit
    # Which tokens of the completion were sampled, (completion tokens,) bool; None: all. A tool or a
    # user wrote the others: the learner reads them, but neither trains on them nor uses their
    # log-probs.
    mask: Tensor | None = None
    graded: dict = field(default_factory=dict)   # its line in samples.jsonl (train.score)
    place: int = 0                               # its own place in the run, for Sampler.extend()

    def __post_init__(self):
        if self.mask is None:
            self.mask = torch.ones(len(self.completion), dtype=torch.bool)

    def with_text(self, ids: list[int]) -> "Row":
        """This row plus tokens that weren't sampled, of a tool or a user. Sampler.extend()
        continues it.
        """
        none = torch.zeros(len(ids))
        return replace(self, completion=self.completion + ids, finished=False,
                       logprobs=torch.cat([self.logprobs, none]),
                       mask=torch.cat([self.mask, none.bool()]))


@dataclass
class Rollouts:
    """B = P * G answers, of which rows [p * G, (p + 1) * G) answer prompt p."""
    rows: list[Row]
    seconds: float = 0.0                         # time that generate() took
    computed: int = 0                            # rows computed, summed over all decode steps

    @property
    def prompts(self) -> list[list[int]]:
        return [row.prompt for row in self.rows]

    @property
    def completions(self) -> list[list[int]]:
        return [row.completion for row in self.rows]

    def sampled(self) -> Tensor:
        """The masks of all rows, padded with False to the longest: (B, L) bool."""
        return torch.nn.utils.rnn.pad_sequence([row.mask for row in self.rows], batch_first=True)

    @property
    def num_tokens(self) -> int:
        """How many tokens were sampled, end ids included."""
        return sum(int(row.mask.sum()) for row in self.rows)

    @property
    def idle(self) -> float:
        """The share of computed rows that yielded no token: ended rows and spare rows."""
        return 1 - self.num_tokens / self.computed if self.computed else 0.0

    def __add__(self, other: "Rollouts") -> "Rollouts":
        """The rows of two ranks. They sampled in parallel, so `seconds` is the longer one."""
        return Rollouts(self.rows + other.rows, max(self.seconds, other.seconds),
                        self.computed + other.computed)


# -----------------------------------------------------------------------------
# The sampler

class Sampler:
    """Samples answers, with its own KV cache.

    max_length: tokens in the longest sequence (prompt and completion). max_rows: the most sequences
    to decode at a time. The KV cache has room for max_rows sequences of full length, up to kv_gib
    GiB; by default, half of the GPU's free memory or, on a CPU, of the machine's memory. engine: a
    class like TorchEngine; None: engine_for(the model's device). UserError if the cache is too
    small for one sequence.
    """

    def __init__(self, model: Transformer, max_length: int, max_rows: int = 256,
                 kv_gib: float | None = None, engine: Callable | None = None):
        kv = allocate_kv(model, max_length, max_rows, kv_gib)
        self.engine = (engine or engine_for(model.device))(model, kv, max_rows)
        self.kv_blocks = kv.shape[2]
        self.max_length = max_length
        self.max_rows = max_rows

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], group_size: int, sampling: Sampling,
                 places: list[int] | range | None = None,
                 progress: Callable | None = None) -> Rollouts:
        """P prompts, lists of token ids -> Rollouts of P * group_size answers.

        places: P ints, each prompt's place in the run, by default 0, 1, 2, ... Together with the
        seed, they determine the random numbers, so a prompt gets different answers at a different
        place. progress(made, sequences) is called after each window with the number of new tokens
        and the Sequences that got them. files.Stopped if a log-prob is not finite.
        """
        began = time.perf_counter()
        sequences = self._sequences(prompts, group_size, sampling, places)
        scheduler = Scheduler(sequences, self.engine, self.kv_blocks, self.max_rows)
        computed = 0
        while not scheduler.done:
            self._prefill(scheduler.admit())
            running = scheduler.grow()
            steps = min(self.engine.window, max(s.limit - s.pos for s in running))
            computed += steps * self.engine.batch_size(len(running))
            drawn = self.engine.decode(self._decode_batch(running), steps, sampling)
            made = add_tokens(running, drawn, sampling.end_ids)
            scheduler.remove_ended()
            if progress:
                progress(made, running)
        rows = [Row(s.prompt, s.completion, torch.tensor(s.logprobs), s.finished, place=s.place)
                for s in sequences]
        return Rollouts(rows, time.perf_counter() - began, computed)

    def extend(self, rows: list[Row], sampling: Sampling) -> Rollouts:
        """Samples the next turn of rows that end with the text of a tool or a user (Row.with_text).

        sampling.max_new_tokens limits the entire completion; the rows must have room left. Each row
        gets random numbers of its own, which differ from those of its first turn.
        """
        limits = [sampling.max_new_tokens - len(row.completion) for row in rows]
        turn = sampling._replace(seed=sampling.seed + 1, max_new_tokens=limits)
        new = self.generate([row.prompt + row.completion for row in rows], 1, turn,
                            [row.place for row in rows])
        longer = [replace(row, completion=row.completion + more.completion, finished=more.finished,
                          logprobs=torch.cat([row.logprobs, more.logprobs]),
                          mask=torch.cat([row.mask, more.mask]))
                  for row, more in zip(rows, new.rows)]
        return replace(new, rows=longer)

    def _sequences(self, prompts, group_size, sampling, places):
        """One Sequence per answer; the Sequences of a group share one Prefix."""
        limits = sampling.max_new_tokens
        size = len(prompts) * group_size
        if not isinstance(limits, list):
            limits = [limits] * size
        assert len(limits) == size and min(limits, default=1) > 0, \
            f"need {size} limits above 0, got {len(limits)}"
        if places is None:
            places = range(len(prompts))
        sequences = []
        for prompt, place in zip(prompts, places, strict=True):
            prefix = Prefix(prompt[:-1], users=group_size)
            pos = len(prompt) - 1
            for g in range(group_size):
                row = len(sequences)
                limit = pos + limits[row]
                assert 0 <= pos and limit < self.max_length, (
                    f"a prompt of {pos + 1} tokens + {limit - pos} new ones does not fit "
                    f"max_length={self.max_length}")
                sequences.append(Sequence(
                    row, prompt, key=row_key(sampling.seed, place, g), place=place * group_size + g,
                    prefix=prefix, token=prompt[-1], pos=pos, limit=limit))
        return sequences

    def _prefill(self, prefixes):
        """Prefills prefixes in packs of at most PREFILL_TOKENS tokens; a longer one goes alone."""
        batches = [[]]
        for prefix in prefixes:
            if sum(len(p.tokens) for p in [*batches[-1], prefix]) > PREFILL_TOKENS:
                batches.append([])
            batches[-1].append(prefix)
        for batch in filter(None, batches):
            lengths = [len(p.tokens) for p in batch]
            blocks = [torch.tensor(p.blocks).repeat_interleave(KV_BLOCK)[:n]
                      for p, n in zip(batch, lengths)]
            tokens = torch.tensor([t for p in batch for t in p.tokens])
            self.engine.prefill(tokens, torch.cat(blocks), lengths)

    def _decode_batch(self, running):
        """The DecodeBatch of the running sequences."""
        def column(values):                      # torch.tensor(values) takes longer
            return torch.from_numpy(np.array(values))

        table = np.zeros((len(running), blocks_for(self.max_length) + 1), dtype=np.int64)
        for line, s in zip(table, running):
            blocks = s.prefix.blocks + s.blocks
            line[:len(blocks)] = blocks
        groups = {}                              # prefix -> its number
        return DecodeBatch(
            token=column([s.token for s in running]),
            pos=column([s.pos for s in running]),
            prefix=column([len(s.prefix.tokens) for s in running]),
            group=column([groups.setdefault(s.prefix, len(groups)) for s in running]),
            limit=column([s.limit for s in running]),
            key=column([s.key for s in running]),
            table=torch.from_numpy(table))


def add_tokens(running: list[Sequence], drawn: tuple, end_ids: tuple[int, ...]) -> int:
    """Adds the tokens of a window to the sequences and returns how many there were. drawn: from the
    engine's decode(). files.Stopped if a log-prob is not finite.
    """
    tokens, logprobs, made = drawn
    logprobs = logprobs.cpu()
    made = made.cpu()
    # (steps, n): True up to a row's end
    counts = torch.arange(len(logprobs))[:, None] < made
    if not logprobs[counts].isfinite().all():
        raise Stopped("a sampled token's log-prob is not finite: the temperature is too low, "
                      "or the weights or the adapter are too large")
    tokens = tokens.cpu().T.tolist()
    logprobs = logprobs.T.tolist()
    made = made.tolist()
    for row, s in enumerate(running):
        s.completion += tokens[row][:made[row]]
        s.logprobs += logprobs[row][:made[row]]
        s.token = s.completion[-1]
        s.pos += made[row]
        s.finished = s.token in end_ids
    return sum(made)


# -----------------------------------------------------------------------------
# The engine: prefills and decode steps

class DecodeBatch(NamedTuple):
    """The running rows as input to a window of decode steps: (n,) int64 tensors, on the CPU."""
    token: Tensor                                # the next input
    pos: Tensor                                  # its position
    prefix: Tensor                               # length of the row's prefix, in tokens
    group: Tensor                                # rows that share a prefix are neighbors and have
                                                 # the same number, which a kernel may use
    limit: Tensor                                # the position of the last token that may be drawn
    key: Tensor                                  # of the row's randomness, see row_key
    table: Tensor                                # (n, width) kv_blocks: the prefix's, its own, 0s


class TorchEngine:
    """Computes prefills and decode steps in plain torch, on any device.

    fast/decode.py's GraphEngine must give the same numbers, up to rounding. kv: the cache,
    (L, 2, kv_blocks, KV, KV_BLOCK, d). max_rows: for GraphEngine's buffers.
    """
    window = 1                                   # decode steps before the CPU reads the tokens

    def __init__(self, model: Transformer, kv: Tensor, max_rows: int):
        self.model = model
        self.kv = kv

    def batch_size(self, n: int) -> int:
        """How many rows a decode step computes for n running rows; no spare rows here."""
        return n

    def prefill_early(self, prefixes: list[Prefix], waiting: Iterable[Sequence],
                      room: int) -> list[Prefix]:
        """Which prefixes of waiting sequences to prefill together with `prefixes`, in at most
        `room` kv_blocks. None here: on a CPU, prefilling early saves nothing.
        """
        return []

    @torch.no_grad()
    def prefill(self, tokens: Tensor, blocks: Tensor, lengths: list[int]) -> None:
        """Computes the keys and values of several prefixes and writes them to the KV cache.

        tokens (T,) int64, the prefixes laid end to end; blocks (T,) int64, the kv_block of each
        token; lengths: of the prefixes.
        """
        device = self.kv.device
        attend = PackedAttention(lengths, device)
        fill_cache(self.model, self.kv, tokens.to(device), blocks.to(device), attend.positions,
                   attend)

    @torch.no_grad()
    def decode(self, batch: DecodeBatch, steps: int,
               sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        """Draws up to `steps` tokens for each row -> tokens (steps, n) int64, logprobs (steps, n)
        fp32, and made (n,) int64. Only the first made[i] tokens of row i count: the others come
        after its end.
        """
        model = self.model
        batch = DecodeBatch(*(t.to(self.kv.device) for t in batch))
        token = batch.token.clone()
        pos = batch.pos.clone()
        alive = batch.limit > batch.pos
        made = torch.zeros_like(pos)
        ends = torch.tensor(sorted(sampling.end_ids), dtype=torch.int64, device=pos.device)
        tokens = []
        logprobs = []
        for _ in range(steps):
            attends = attention_to_cache(self.kv, batch.table, batch.prefix, pos)
            xw, rstd = model.hidden(token, attends, pos)
            scale = rstd / (sampling.temperature or 1.0)
            logits = mm_fp32(xw, model.lm_head[:model.live_vocab].T) * scale
            u = uniforms(batch.key, pos) if sampling.temperature else None
            picked, logprob = draw_tokens(filter_logits(logits, sampling.top_k, sampling.top_p), u)
            tokens.append(picked)
            logprobs.append(logprob)
            made += alive
            token = torch.where(alive, picked, token)
            pos = pos + alive
            alive &= ~torch.isin(picked, ends) & (pos < batch.limit)
        return torch.stack(tokens), torch.stack(logprobs), made


def write_cache(layer: Tensor, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k and v (T, KV, d) to the cache: those of token t go to entry offsets[t] of kv_block
    blocks[t].

    layer (2, kv_blocks, KV, KV_BLOCK, d): one layer of the KV cache; blocks, offsets (T,) int64.
    """
    keys, values = layer
    keys[blocks, :, offsets] = k
    values[blocks, :, offsets] = v


def fill_cache(model: Transformer, kv: Tensor, tokens: Tensor, blocks: Tensor, positions: Tensor,
               attend: Callable) -> None:
    """Runs a packed forward pass, in which every layer writes its keys and values to the KV cache.

    tokens, blocks, positions (T,) int64: token t goes to entry positions[t] % KV_BLOCK of kv_block
    blocks[t]. attend(q, k, v) is the attention of these tokens to each other.
    """
    offsets = positions % KV_BLOCK

    def write_and_attend(layer, q, k, v):
        write_cache(layer, blocks, offsets, k, v)
        return attend(q, k, v)

    model.hidden(tokens, [functools.partial(write_and_attend, layer) for layer in kv], positions)


def attention_to_cache(kv: Tensor, table: Tensor, prefix: Tensor, pos: Tensor) -> list[Callable]:
    """For each layer, a function attend(q, k, v) for one new token per row, at position pos. It
    writes the token's key and value to the row's last slot and attends to all slots up to it.

    q (n, H, d), k and v (n, KV, d) -> (n, H, d). table (n, width), prefix and pos (n,) as in
    DecodeBatch. The diagram at the top of scheduler.py shows the slots.
    """
    start = (prefix + KV_BLOCK - 1) // KV_BLOCK * KV_BLOCK       # slot of the first own token
    last = start + pos - prefix                                  # the new token's slot
    offset = last % KV_BLOCK
    width = int(last.max()) // KV_BLOCK + 1
    table = table[:, :width]
    block = table.gather(1, (last // KV_BLOCK)[:, None])[:, 0]
    slot = torch.arange(width * KV_BLOCK, device=table.device)[None, :]
    own = (slot >= start[:, None]) & (slot <= last[:, None])
    mask = ((slot < prefix[:, None]) | own)[:, None, None, :]    # (n, 1, 1, slots): not the gap

    def attend(layer, q, k, v):
        write_cache(layer, block, offset, k, v)
        context = [t[table].transpose(1, 2).flatten(2, 3) for t in layer]   # (n, KV, slots, d)
        y = F.scaled_dot_product_attention(q[:, :, None], *context, attn_mask=mask, enable_gqa=True)
        return y[:, :, 0]

    return [functools.partial(attend, layer) for layer in kv]


def engine_for(device: torch.device) -> Callable:
    """The engine that decodes on a device, for Sampler."""
    return TorchEngine if device.type == "cpu" else on_gpu("GraphEngine")


# -----------------------------------------------------------------------------
# The draw

def mix64(x: int) -> int:
    """SplitMix64's finalizer: 64 bits in, 64 well-mixed bits out (Steele et al. 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def row_key(seed: int, place: int, sample: int) -> int:
    """The key of a sample's random numbers: 63 bits, which fit int64."""
    key = 0
    for part in (seed, place, sample):
        key = mix64((key + part + 0x9E3779B97F4A7C15) & MASK64)
    return key >> 1


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """The random number of each row's next token: keys, positions (n,) int64 -> u (n,) in (0, 1).

    positions: of the rows' last tokens. u is a hash: output number `position`, counted from 0, of
    SplitMix64 seeded with `key`. kernels.uniform makes the same bits.
    """
    # Not a generator, whose state would depend on which rows were drawn before.
    def shift(x, s):                             # logical: torch's >> of an int64 keeps the sign
        return (x >> s) & ((1 << (64 - s)) - 1)
    z = keys + (positions + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    z = z ^ shift(z, 31)
    return (shift(z, 41).float() + 0.5) * 2.0**-23               # 23 bits: exact, never 0 or 1


def running_sum(p: Tensor) -> Tensor:
    """Cumulative sums of each row: (n, V) -> (n, V).

    On a GPU torch sums a single row in an order that depends on timing (pytorch issue 75240), but
    two or more rows in a fixed order, so a single row goes in twice.
    """
    return (p.expand(2, -1) if len(p) == 1 else p).cumsum(-1)[:len(p)]


def filter_logits(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sets the logits (n, V) of tokens that top_k or top_p rule out to -inf, in place.

    top_k keeps the top_k highest (and any that tie with the lowest of them). Of these, top_p keeps
    the smallest set of most likely tokens whose probabilities sum to top_p or more.
    """
    assert top_k >= 0 and 0 < top_p <= 1, f"need {top_k=} >= 0 (0 is all) and 0 < {top_p=} <= 1"
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits.masked_fill_(logits < kth, -torch.inf)
    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        enough = running_sum(p) - p >= top_p     # the tokens before this one sum to top_p already
        logits.scatter_(-1, index, ordered.masked_fill_(enough, -torch.inf))
    return logits


def draw_tokens(logits: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draws from softmax(logits): logits (n, V) fp32, u (n,) -> tokens (n,), log-probs (n,) fp32.

    Inverse CDF: lay the tokens' probabilities end to end on [0, 1) and take the token that u falls
    on, the first at which they sum to more than u. u None: the most likely token.
    """
    lse = logits.logsumexp(-1)
    if u is None:
        token = logits.argmax(-1)
    else:
        p = (logits - lse[:, None]).exp()
        # A GPU sums in blocks, and from one block to the next the sum can change by an ulp even at
        # a token of probability 0, which must never be drawn.
        cdf = running_sum(p).masked_fill_(p == 0, 0.0)
        target = u * cdf.amax(-1)                # an fp32 sum of probabilities is not exactly 1
        token = (cdf > target[:, None]).byte().argmax(-1)        # the first one
    return token, logits.gather(1, token[:, None])[:, 0] - lse
