"""
Divides a GPU's memory before the first step of a training run.

The sampler wants a large KV pool, the learner wants large micro-batches whose activations stay in
memory, and they compete for the same GiB. The learner's worst case is measured by running it once,
so a run doesn't fail at step 300, on the first batch of long answers.

    |<-------------------------- limit: --memory-gib, or what is free ------------------------->|
    +---------+---------+--------+--------------+-----------+-----------------------------------+
    | weights | adapter | graphs | CUDA context | fragments |               free                |
    +---------+---------+--------+--------------+-----------+-----------------------------------+
                                                            | longest     | KV   | activations  |
                                                            | micro-batch | pool |              |
                                                            +-------------+------+--------------+
                                                             this file decides

    weights               measured: frozen linears, the buffer that expands one of them, embeddings
    adapter               measured: master, its gradient, the optimizer's moments, 16-bit copies
    graphs                estimated: for a decode step, three copies of its fp32 logits, and the
                          expanded W if no kernel reads the packed one; for a prefill, its
                          activations
    CUDA context, NCCL    estimated: what a process uses besides torch's own allocations
    fragments             estimated: what torch loses between its segments
    longest micro-batch   measured for each size tried: forward and backward of full-length rows,
                          with every layer recomputed in the backward; or the sampler's largest
                          prefill, if that takes more
    KV pool               useful up to max_rows full-length sequences
    activations           of the layers that keep theirs instead of recomputing them

Free memory goes, in this order:

    1. to the KV pool, up to a quarter of its useful size;
    2. to the longest micro-batch, of the first size in preferred_sizes() that fits, or else the
       size that leaves the largest pool;
    3. to the pool, up to half of its useful size: few answers reach full length, and a row that
       finds no free kv_block waits;
    4. to the activations of as many layers as fit;
    5. if that is all layers, to the pool, up to its useful size.

The rest stays unused; the table counts it under activations. Without --max-rows, 512 rows are
decoded at a time if all of this fits for 512, else 256.

A run that can't fit is rejected in one of two places: check_size() estimates from config.json
whether the model fits, before it is downloaded, and Plan measures the rest before the first step.
Both name the flags that help.
"""
import math
from functools import cached_property
from typing import NamedTuple

import torch

from files import UserError
from harness.config import Model
from learner import Learner
from lora import Linear
from model import ModelConfig
from ranks import say
from sampler import PREFILL_TOKENS
from scheduler import KV_BLOCK, blocks_for

GIB = 2**30
MAX_ROWS = 256, 512                                    # tried without --max-rows
GRAPH_LOGITS = 3 * 4                                   # bytes per logit: three times in fp32
LARGEST_PREFILL = 1024                                 # tokens in a graph: decode.PREFILL_SIZES
CUDA_CONTEXT = 0.6 * GIB                               # and NCCL
FRAGMENTS = 0.03                                       # of the limit; torch's segments can grow
BITS = {"nvfp4": 4.5, "bf16": 16}                      # per weight, scales included


class Limits(NamedTuple):
    """What is fixed in advance. None: left to the plan."""
    memory_gib: float | None = None              # of this process
    kv_gib: float | None = None                  # of the KV pool
    micro_batch_tokens: int | None = None
    max_rows: int | None = None                  # answers decoded at a time


class Division(NamedTuple):
    """How free memory is divided for one micro-batch size."""
    micro_batch_tokens: int
    pool: float                   # bytes
    kept_layers: int              # how many layers keep their activations


def preferred_sizes(width: int) -> list[tuple[int, float]]:
    """Micro-batch sizes in tokens, best first, each with the share of layers that must keep their
    activations: if fewer can, the next size is faster. width: of the model.
    """
    # A micro-batch must be large enough for kernels to take longer than their launches: about 4,096
    # tokens in a wide model, 16,384 or more in a narrow one, whose kernels are shorter. Beyond
    # that, keeping activations saves more time than larger micro-batches. This is based on update
    # times on an H200, listed in tests/test_memory.py.
    if width <= 1024:                            # a 0.5B
        best = [(32768, 0), (16384, 0)]
    elif width <= 2048:                          # up to a 3B
        best = [(32768, 1), (16384, 0)]
    else:
        best = [(16384, 1), (8192, 2 / 3), (4096, 2 / 3)]
    return [*best, (8192, 0), (4096, 0), (2048, 0)]


def bound(memory_gib: float | None, device: torch.device) -> None:
    """Limits torch to its share of the process's memory_gib (None: no limit). Call it before the
    first allocation. UserError if memory_gib exceeds the GPU's memory or is too little for CUDA.
    """
    if memory_gib is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if not CUDA_CONTEXT < memory_gib * GIB <= total:
        raise UserError(f"--memory-gib {memory_gib}: must be between {CUDA_CONTEXT / GIB} and "
                         f"{total / GIB:.1f}, the GPU's memory")
    torch.cuda.set_per_process_memory_fraction((memory_gib * GIB - CUDA_CONTEXT) / total, device)


def model_bytes(config: ModelConfig, base: str, rank: int) -> tuple[float, int]:
    """Bytes of a model's weights, and of its adapter in training, without norms and biases, which
    would add a thousandth.
    """
    c = config
    heads = c.heads * c.head_dim
    kv_heads = c.kv_heads * c.head_dim
    linears = [(heads, c.hidden), (kv_heads, c.hidden), (kv_heads, c.hidden), (c.hidden, heads),
               (c.intermediate, c.hidden), (c.intermediate, c.hidden), (c.hidden, c.intermediate)]
    embeddings = (2 - c.tied) * c.vocab * c.hidden
    weights = c.layers * sum(n * k for n, k in linears) * BITS[base] / 8 + 2 * embeddings
    parameters = c.layers * sum(rank * (n + k) for n, k in linears)
    return weights, Learner.state_bytes(parameters, torch.bfloat16)


def check_size(wanted: Model, config: ModelConfig, limit: float) -> None:
    """UserError if weights and adapter alone, or all weights in training, take more than `limit`
    bytes of GPU memory.
    """
    weights, adapter = model_bytes(config, wanted.base, wanted.lora_rank)
    parts = {f"its {wanted.base} weights": weights,
             f"an adapter of rank {wanted.lora_rank} in training": adapter, "CUDA": CUDA_CONTEXT}
    if wanted.train == "full":
        parameters = weights / torch.bfloat16.itemsize
        parts = {"all weights in training": Learner.state_bytes(parameters, torch.bfloat16),
                 "CUDA": CUDA_CONTEXT}
    if sum(parts.values()) > limit:
        taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        help = "--train lora" if wanted.train == "full" else "--base nvfp4, a smaller --lora-rank"
        raise UserError(f"--model {wanted.model} needs more than the {limit / GIB:.1f} GiB "
                        f"available: {taken}. Use {help}, a smaller model or a larger card")


def free_memory(memory_gib: float | None) -> float:
    """Bytes that this process may use, including CUDA's context and what it has already allocated:
    --memory-gib, or what is free on the GPU.
    """
    if memory_gib:
        return memory_gib * GIB
    return torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0] + CUDA_CONTEXT


class Plan:
    """One run's division: micro_batch_tokens, pool (bytes of the KV pool), kept_layers, and
    max_rows (rows decoded at a time).

    model: with its adapter, after its Learner was created, which allocates everything it keeps.
    prompt_tokens, new_tokens: of the longest row. answers: the most that a step or an evaluation
    decodes. with_reference: whether the learner also computes log-probs without the adapter.
    UserError if nothing fits.
    """

    def __init__(self, model: torch.nn.Module, limits: Limits, prompt_tokens: int, new_tokens: int,
                 answers: int, with_reference: bool = False):
        from fast import backward  # late: a CPU doesn't need it
        self.model = model
        self.limits = limits
        self.with_reference = with_reference
        self.measured = {}                       # tokens of a micro-batch -> its bytes
        self.prompt_tokens = prompt_tokens
        self.row_tokens = prompt_tokens + new_tokens
        # All of the model's, since an adapter may skip some.
        self.linears = [module for module in model.modules() if isinstance(module, Linear)]
        for linear in self.linears:
            backward.wide_weight(linear)         # allocates their shared buffer, so it's measured
        torch.cuda.empty_cache()
        self.held = torch.cuda.memory_reserved()
        self.limit = free_memory(limits.memory_gib)
        c = model.config
        kv_token = 2 * c.layers * c.kv_heads * c.head_dim * model.dtype.itemsize
        self.kv_row = self.row_tokens * kv_token
        # The least that scheduler.allocate_kv accepts: one full-length sequence.
        self.least_pool = (blocks_for(self.row_tokens) + 2) * KV_BLOCK * kv_token
        tried = [limits.max_rows] if limits.max_rows else MAX_ROWS
        for rows in sorted({min(most, answers) for most in tried}, reverse=True):
            best = self._divide(rows)
            if best and best.pool >= rows * self.kv_row:
                break                            # the pool has its useful size
        fixed = self._fixed(rows)
        if best is None:
            taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in fixed.items())
            raise UserError(f"rows of {self.row_tokens} tokens do not fit: of "
                            f"{self.limit / GIB:.1f} GiB, {taken} leave too little for a forward "
                            "and backward pass and the KV cache: use a smaller "
                            "--micro-batch-tokens, --max-rows, --max-new-tokens or --lora-rank, a "
                            "smaller model or a larger card")
        self.max_rows = rows
        self.micro_batch_tokens, self.pool, self.kept_layers = best
        self.free = self.limit - sum(fixed.values())                   # bytes that were divided
        micro_batch = self.measured[self.micro_batch_tokens]
        table = fixed | {
            "longest micro-batch": micro_batch, "KV pool": self.pool,
            "activations": self.free - micro_batch - self.pool, "together": self.limit}
        for name, size in table.items():
            say(f"{name:22} {size / GIB:8.2f} GiB")

    def _fixed(self, max_rows: int) -> dict[str, float]:
        """The parts that aren't decided here: name -> bytes."""
        parameters = self.model.adapter.master.numel()
        adapter_bytes = Learner.state_bytes(parameters, self.model.dtype)
        c = self.model.config
        weights = [linear.weight for linear in self.linears]
        graphs = GRAPH_LOGITS * max_rows * c.vocab
        graphs += max(w.N * w.K * w.dtype.itemsize * w.expands(max_rows) for w in weights)
        # Bytes per token: gate|up in fp32 and h in 16 bits, 10 F; tensors of width D, 20 D.
        graphs += LARGEST_PREFILL * (10 * c.intermediate + 20 * c.hidden)
        return {"weights": self.held - adapter_bytes, "adapter": adapter_bytes, "graphs": graphs,
                "CUDA context, NCCL": CUDA_CONTEXT, "fragments": FRAGMENTS * self.limit}

    def _divide(self, max_rows: int) -> Division | None:
        """Divides free memory as described at the top of the file. None if no micro-batch size
        leaves the pool enough for one full-length sequence, or for limits.kv_gib.
        """
        layers = self.model.config.layers
        free = self.limit - sum(self._fixed(max_rows).values())
        least_pool, useful_pool = self.least_pool, max_rows * self.kv_row
        if self.limits.kv_gib:
            least_pool = useful_pool = self.limits.kv_gib * GIB
        sizes = preferred_sizes(self.model.config.hidden)
        if self.limits.micro_batch_tokens:
            sizes = [(self.limits.micro_batch_tokens, 0)]
        tried = []
        for tokens, share in sizes:
            if tokens not in self.measured:
                self.measured[tokens] = self.worst_case(tokens)
            left = free - self.measured[tokens]
            if left < least_pool:
                continue
            # A longer row is a micro-batch of its own.
            layer = self.layer_bytes_per_token * max(tokens, self.row_tokens)
            pool = min(left, max(least_pool, useful_pool / 2))
            kept_layers = min(layers, int((left - pool) / layer))
            if kept_layers == layers:
                pool = max(pool, min(useful_pool, left - layers * layer))
            tried.append(Division(tokens, pool, kept_layers))
            if pool >= useful_pool / 4 and kept_layers >= share * layers:
                return tried[-1]
        return max(tried, key=lambda division: division.pool, default=None)

    def _largest_micro_batch(self, tokens: int, kept_layers: int) -> torch.Tensor:
        """Log-probs of full-length rows with one-token prompts, so all other tokens are scored."""
        full, rest = divmod(tokens, self.row_tokens)
        rows = [[0] * self.row_tokens] * max(full, 1)
        if full and rest > 1:
            rows.append([0] * rest)
        return self.model.token_logprobs(rows, [1] * len(rows), kept_layers=kept_layers)[0]

    @cached_property
    def layer_bytes_per_token(self) -> float:
        """Bytes per token of a micro-batch that a layer takes to keep its activations."""
        def held(kept_layers):
            logprobs = self._largest_micro_batch(self.row_tokens, kept_layers)  # noqa: F841
            return torch.cuda.memory_allocated()     # while logprobs' graph holds the activations

        return (held(1) - held(0)) / self.row_tokens

    def worst_case(self, tokens: int, kept_layers: int = 0) -> float:
        """Bytes that torch reserves for the largest micro-batch, or for the largest prefill if that
        takes more; inf if it runs out of memory.
        """
        count = max(PREFILL_TOKENS // self.prompt_tokens, 1)
        vocab = self.model.config.vocab
        prompts = [[i % vocab] + [0] * self.prompt_tokens for i in range(count)]   # all different
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        try:
            logprobs = self._largest_micro_batch(tokens, kept_layers)
            if self.with_reference:              # while the policy's graph holds its activations
                with torch.no_grad(), self.model.adapter.off():
                    self._largest_micro_batch(tokens, 0)
            logprobs.sum().backward()
            with torch.no_grad():
                self.model.token_logprobs(prompts, [self.prompt_tokens] * len(prompts))
            return torch.cuda.max_memory_reserved() - held
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            self.model.adapter.master.grad.zero_()
            torch.cuda.empty_cache()

    def dry_step(self) -> "Plan":
        """Tries the plan with the pool in place, and drops layers' activations until it fits.

        Activations were extrapolated from one layer and one row, and segments may not grow as well
        as they did without the pool. A plan that leaves a fifth of the memory unused isn't tried.
        -> this Plan. UserError if nothing fits next to the pool.
        """
        free = self.free - self.pool
        tokens = self.micro_batch_tokens
        layer = self.layer_bytes_per_token * max(tokens, self.row_tokens)
        if self.measured[tokens] + self.kept_layers * layer < 0.8 * free:
            return self
        while self.kept_layers and (over := self.worst_case(tokens, self.kept_layers) - free) > 0:
            # Drop the excess layers, or an eighth if the GPU ran out of memory (inf).
            fewer = math.ceil(over / layer) if over < math.inf else self.kept_layers // 8
            self.kept_layers = max(0, self.kept_layers - max(1, fewer))
        if not self.kept_layers and self.worst_case(tokens) == math.inf:
            raise UserError(f"micro-batches of {tokens} tokens do not fit with a KV pool of "
                             f"{self.pool / GIB:.1f} GiB: use --micro-batch-tokens {tokens // 2}")
        return self
