"""
The sampler's bookkeeping: which answers are being decoded, and where their keys and values are. It
decides nothing about tokens: to learn the method, the drawing below is enough.

    scheduler = Scheduler(sequences, engine, kv_blocks, max_rows)
    while not scheduler.done:
        prefixes = scheduler.admit()             # to prefill
        running = scheduler.grow()               # decode the next window of these
        scheduler.remove_ended()

The KV cache is a pool of kv_blocks of KV_BLOCK (32) tokens each. A row's `table` lists its
kv_blocks, and its slot s is entry s % KV_BLOCK of kv_block table[s // KV_BLOCK]. The G answers to a
prompt share the kv_blocks of its prefix, which is the prompt without its last token. For a prompt
of 41 tokens, so a prefix of 40, and G = 3:

    slots     0 ...      31  32 ... 39   gap  63  64 ...     95  96 ...
             +--------------+--------------------+--------------+--------------+
    row 0    |  kv_block 7  |  kv_block 3        |  kv_block 12 |  kv_block 5  |  table 7 3 12 5
    row 1    |       7      |       3            |  kv_block 9  |                 table 7 3 9
    row 2    |       7      |       3            |  kv_block 4  |                 table 7 3 4
             +--------------+--------------------+--------------+--------------+
              the prefix, computed once            the row's own tokens: position t, from 40 on, is
              for the group; the gap is            in slot 64 + t - 40
              never read

A row's own tokens start a new kv_block, so shared kv_blocks are never written to or copied.

A prefix keeps its kv_blocks until the last sequence of its group ends; a row gets its own as it
grows. When the pool runs dry, prefixes used only by waiting sequences are freed first and prefilled
again later. Then the newest row is preempted: it gives up its kv_blocks and waits, and its prompt
and tokens so far are prefilled again later. The oldest row is never preempted, so every request
finishes.

Shapes: L layers, KV key-value heads, d head size.
"""
import math
import os
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from files import UserError
from model import Transformer

KV_BLOCK = 32                                    # tokens

# -----------------------------------------------------------------------------
# Sequences and their kv_blocks

def blocks_for(tokens: int) -> int:
    """The number of kv_blocks for `tokens` tokens."""
    return -(-tokens // KV_BLOCK)


class BlockPool:
    """The free kv_blocks, by number. All others except 0 belong to a sequence or a prefix.

    Number 0 is never handed out: it fills the unused columns of tables, and the spare rows of a
    CUDA graph write there.
    """

    def __init__(self, count: int):
        self.free_blocks = list(range(count - 1, 0, -1))

    def __len__(self) -> int:
        return len(self.free_blocks)

    def allocate(self, n: int) -> list[int]:
        """Hands out n kv_blocks. The caller checks that there are enough."""
        return [self.free_blocks.pop() for _ in range(n)]

    def free(self, blocks: list[int]) -> None:
        """Takes kv_blocks back and empties the caller's list."""
        self.free_blocks += blocks
        blocks.clear()


@dataclass(eq=False)
class Prefix:
    """Tokens that a group's sequences share, prefilled once, and the kv_blocks with their keys and
    values. These depend on adapter and noise, which must be the same for the entire group.
    """
    tokens: list[int]
    users: int                                   # its sequences that have not ended
    blocks: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """How many kv_blocks its prefill needs; 0 afterwards."""
        return blocks_for(len(self.tokens)) - len(self.blocks)


@dataclass(eq=False)
class Sequence:
    """An answer in progress: a prefix, then its own tokens.

    Its last token, `token` at position `pos`, isn't in the cache yet: the next decode step computes
    its key and value and draws the token at pos + 1.
    """
    row: int                                     # in Rollouts
    prompt: list[int]
    key: int                                     # of its randomness
    place: int                                   # Row.place
    prefix: Prefix
    token: int                                   # the next input
    pos: int                                     # its position
    limit: int                                   # the position of the last token that may be drawn
    blocks: list[int] = field(default_factory=list)              # of its own tokens
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False                       # by an end id

    @property
    def ended(self) -> bool:
        """Whether it is complete: by an end id or at its limit."""
        return self.finished or self.pos == self.limit


def half_of_memory(device: torch.device) -> float:
    """Bytes: half of a GPU's free memory or, for a CPU, of the machine's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total         # --memory-gib
        return min(free, allowed - torch.cuda.memory_reserved(device)) / 2
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    return math.inf                              # on Windows, which has no sysconf


def allocate_kv(model: Transformer, max_length: int, max_rows: int, kv_gib: float | None) -> Tensor:
    """The KV cache of a Sampler, (L, 2, kv_blocks, KV, KV_BLOCK, d) of zeros in the model's dtype.
    """
    c = model.config
    row_blocks = blocks_for(max_length) + 1      # + 1: for the gap after the prefix
    block_bytes = c.layers * 2 * c.kv_heads * KV_BLOCK * c.head_dim * model.dtype.itemsize
    memory = half_of_memory(model.device) if kv_gib is None else kv_gib * 2**30
    blocks = int(min(max_rows * row_blocks + 1, memory / block_bytes))      # + 1: number 0
    if blocks < row_blocks + 1:
        need = (row_blocks + 1) * block_bytes / 2**30
        raise UserError(
            f"a KV pool of {memory / 2**30:.4g} GiB is too small for one sequence of "
            f"{max_length:,} tokens ({need:.4g} GiB): free memory or shorten the sequences")
    shape = c.layers, 2, blocks, c.kv_heads, KV_BLOCK, c.head_dim
    try:
        # Zeros, because attention multiplies masked slots by 0, and 0 * NaN is NaN.
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    except RuntimeError:
        raise UserError(
            f"not enough memory for a KV cache of {blocks * block_bytes / 2**30:.1f} GiB "
            f"({max_rows} sequences of {max_length:,} tokens): use fewer or shorter sequences"
        ) from None


# -----------------------------------------------------------------------------
# The scheduler

class Scheduler:
    """One call's queue and batch, and the kv_blocks of both.

    sequences: all of the call, those of a group next to each other; engine: a sampler.TorchEngine,
    for its window and prefill_early(); kv_blocks: of the cache, block 0 included.
    """

    def __init__(self, sequences: list[Sequence], engine, kv_blocks: int, max_rows: int):
        self.engine = engine
        self.max_rows = max_rows
        self.pool = BlockPool(kv_blocks)
        self.waiting = deque(sequences)
        self.running = []                        # the rows of the decode batch, oldest first

    @property
    def done(self) -> bool:
        return not (self.waiting or self.running)

    def admit(self) -> list[Prefix]:
        """Moves sequences from the queue to the batch while rows and kv_blocks last -> the prefixes
        to prefill.
        """
        new = []
        while self.waiting and len(self.running) < self.max_rows:
            prefix = self.waiting[0].prefix
            # This row and each running row may need one more kv_block in the next window. Without
            # that reserve, grow() would preempt this one right away and waste its prefill.
            if prefix.missing + 1 + len(self.running) > len(self.pool):
                if self.running:
                    break
                self._free_waiting_prefixes()    # now the entire pool is free
            new += self._allocate(prefix)
            self.running.append(self.waiting.popleft())
        if new:
            # Two per running row stay free, or the extra prefixes would soon be evicted.
            room = len(self.pool) - 2 * (len(self.running) + 1)
            for prefix in self.engine.prefill_early(new, self.waiting, room):
                new += self._allocate(prefix)
        return new

    def _allocate(self, prefix):
        """Gives a prefix its kv_blocks -> [prefix] if it had none, else []."""
        if not prefix.missing:
            return []
        prefix.blocks = self.pool.allocate(prefix.missing)
        return [prefix]

    def grow(self) -> list[Sequence]:
        """Gives every row its kv_blocks for the next window, oldest row first -> the rows that run
        in it. When the pool runs dry, it frees prefixes that no row uses, then preempts the newest
        row.
        """
        i = 0
        while i < len(self.running):
            s = self.running[i]
            end = min(s.pos + self.engine.window, s.limit)
            need = blocks_for(end - len(s.prefix.tokens)) - len(s.blocks)
            if need > len(self.pool):
                self._free_waiting_prefixes()
            if need <= len(self.pool):
                s.blocks += self.pool.allocate(need)
                i += 1
            else:
                self._preempt()
                # The preempted row goes next; prefixes behind it must not hold it up.
                self._free_waiting_prefixes()
                assert self.running, "the pool has room for one sequence: see allocate_kv"
        return list(self.running)

    def remove_ended(self) -> None:
        """Frees the kv_blocks of the rows that ended."""
        for s in self.running:
            if s.ended:
                self._release(s)
        self.running = [s for s in self.running if not s.ended]

    def _preempt(self):
        """Takes back the newest row's kv_blocks and puts it at the front of the queue.

        Its prompt and tokens so far, except the last, become its own prefix, prefilled when it
        resumes. It keeps its position and key, and with them its random numbers.
        """
        s = self.running.pop()
        self._release(s)
        s.prefix = Prefix((s.prompt + s.completion)[:-1], users=1)
        self.waiting.appendleft(s)

    def _release(self, s):
        """Frees a sequence's own kv_blocks, and those of its prefix if it is the last user."""
        self.pool.free(s.blocks)
        s.prefix.users -= 1
        if s.prefix.users == 0:
            self.pool.free(s.prefix.blocks)

    def _free_waiting_prefixes(self):
        """Frees the prefixes that only waiting sequences use; they are prefilled again later."""
        in_use = {s.prefix for s in self.running}
        for s in self.waiting:
            if s.prefix not in in_use:
                self.pool.free(s.prefix.blocks)
