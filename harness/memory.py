"""
Divides a GPU's memory for a training run, before its first step.

The sampler wants a large KV pool; the learner wants large micro-batches whose activations stay in
memory. Both share the same GiB. The learner's worst case is measured by running it once, so a run
does not fail at step 300, on the first batch of long answers.

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
    graphs                estimated: for a decode step three times its fp32 logits, and the expanded
                          W if no kernel reads the packed one; for a prefill its activations
    CUDA context, NCCL    estimated: what a process takes besides torch's own allocations
    fragments             estimated: what torch loses between its segments
    longest micro-batch   measured for each size that is tried: forward and backward of rows of full
                          length, with every layer recomputed in the backward; or the sampler's
                          largest prefill, if that takes more
    KV pool               useful up to max_rows sequences of full length
    activations           of layers that keep theirs, and are not recomputed in the backward

For each size of micro-batch, largest first, the memory that it leaves free is assigned in this
order:

    1. to the KV pool, up to half of its useful size, but at least one sequence of full length: few
       answers get that long, and a row that finds no free kv_block waits;
    2. to activations, of as many layers as fit;
    3. to the KV pool, up to its useful size;
    4. what remains is kept free, and listed with the activations.

Of the sizes that fit, the best Option (below) is taken: one that leaves the pool at least a quarter
of its useful size, if there is any, and of those the one at which a token costs least.

Without --max-rows, 512 rows are decoded at a time if a full pool for 512 fits and costs the learner
almost no speed (MORE_ROWS_MAY_COST), else 256.

A run that cannot fit is refused at one of two places. check_size() estimates from config.json
whether the model fits, before it is downloaded. Plan measures the rest, before the first step. Both
name the flags that help.
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
from sampler import KV_BLOCK, PREFILL_TOKENS, blocks_for

GIB = 2**30
MAX_ROWS = 256, 512                                    # that are tried, if --max-rows is not given
# Decoding 512 rows at a time instead of 256 saves more time than a 2 % slower update costs.
MORE_ROWS_MAY_COST = 1.02
MICRO_BATCH_TOKENS = 32768, 16384, 8192, 4096, 2048    # the sizes that are tried
# Micro-batches beyond 8,192 tokens are tried up to this product of tokens and width: a narrow
# model's kernels are so short that most time goes into launching them. Twice as many tokens are
# used only if all layers keep their activations and the pool is full: both are worth more.
WORTHWHILE = 2**25
# A micro-batch takes as long as this many more tokens would: it expands W again, it is not quite
# full, and small matmuls are slower. Both constants are fitted to updates of a 7B and a 1.5B on an
# H200.
OVERHEAD_TOKENS = 1200
# It takes at least as long as this many tokens times the weights of a layer, because launching a
# layer's kernels takes that long: 4,300 tokens of a 7B, 21,000 of a 1.5B.
LAUNCH_BOUND = 1e12
GRAPH_LOGITS = 3 * 4                                   # bytes of one logit: three times in fp32
LARGEST_PREFILL = 1024                                 # tokens of a graph: decode.PREFILL_SIZES
CUDA_CONTEXT = 0.6 * GIB                               # and NCCL
FRAGMENTS = 0.03                                       # of the limit; torch's segments can grow


# Bits of a weight in each of nvfp4.FORMATS, scales included.
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5, "bf16": 16}


class Limits(NamedTuple):
    """What is fixed beforehand. None: it follows from the rest."""
    memory_gib: float | None = None              # of this process
    kv_gib: float | None = None                  # of the KV pool
    micro_batch_tokens: int | None = None
    max_rows: int | None = None                  # answers that are decoded at a time


class Option(NamedTuple):
    """One way to divide what is free.

    The best has the least pool_lack, then the fewest forwards, then the largest micro-batches,
    which are tried first.
    """
    pool_lack: float              # bytes missing for a quarter of the useful pool, 0 if it fits
    forwards: float               # the learner's cost per token, in forwards through the model
    max_rows: int
    micro_batch_tokens: int
    micro_batch: float            # bytes
    pool: float                   # bytes
    pool_is_whole: bool           # max_rows sequences of full length fit
    kept_layers: int              # how many layers keep their activations


def learner_cost(tokens: int, kept: float, layer_weights: float) -> float:
    """The learner's cost per token of a micro-batch, in forwards through the model.

    tokens: of the micro-batch. kept: share of the layers that keep their activations.
    layer_weights: how many weights a layer has.
    """
    # Forward, backward, and a second forward of the layers that kept nothing. The backward costs as
    # much as a forward: W is frozen, so only the gradient of x is computed.
    forwards = 3 - kept
    return forwards * max(tokens + OVERHEAD_TOKENS, LAUNCH_BOUND / layer_weights) / tokens


def bound(memory_gib: float | None, device: torch.device) -> None:
    """Limit torch to its part of the process's memory_gib; None: no limit. Call it before the first
    allocation. UserError if memory_gib exceeds the GPU's memory or is too little for CUDA itself.
    """
    if memory_gib is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if not CUDA_CONTEXT < memory_gib * GIB <= total:
        raise UserError(f"--memory-gib {memory_gib}: must be between {CUDA_CONTEXT / GIB} and "
                         f"{total / GIB:.1f}, the GPU's memory")
    torch.cuda.set_per_process_memory_fraction((memory_gib * GIB - CUDA_CONTEXT) / total, device)


def model_bytes(config: ModelConfig, base: str, rank: int) -> tuple[float, int]:
    """Bytes of a model's weights, and of its adapter in training. Norms and biases, a thousandth of
    that, are left out.
    """
    c = config
    heads = c.heads * c.head_dim
    kv_heads = c.kv_heads * c.head_dim
    linears = [(heads, c.width), (kv_heads, c.width), (kv_heads, c.width), (c.width, heads),
               (c.feed_forward, c.width), (c.feed_forward, c.width), (c.width, c.feed_forward)]
    embeddings = (2 - c.tied) * c.vocab * c.width
    weights = c.layers * sum(n * k for n, k in linears) * BITS[base] / 8 + 2 * embeddings
    parameters = c.layers * sum(rank * (n + k) for n, k in linears)
    return weights, Learner.state_bytes(parameters, torch.bfloat16)


def check_size(wanted: Model, config: ModelConfig, limit: float) -> None:
    """UserError if weights and adapter alone, or all weights in training, exceed `limit` bytes of a
    GPU's memory.
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
        raise UserError(f"--model {wanted.model} needs more than the {limit / GIB:.1f} GiB that "
                        f"are available: {taken}. Use {help}, a smaller model or a larger card")


def free_memory(memory_gib: float | None) -> float:
    """The bytes that this process may take, including CUDA's context and what it has allocated:
    --memory-gib, or what is free on the GPU.
    """
    if memory_gib:
        return memory_gib * GIB
    return torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0] + CUDA_CONTEXT


class Plan:
    """The division for one run: micro_batch_tokens, pool (bytes of the KV pool), kept_layers, and
    max_rows, how many rows are decoded at a time.

    model: with its adapter, after its Learner was made, which allocates everything it keeps.
    prompt_tokens, new_tokens: of the longest row. answers: the most that a step or an evaluation
    decodes. with_reference: whether the learner also computes log-probs without the adapter.
    UserError if nothing fits.
    """

    def __init__(self, model: torch.nn.Module, limits: Limits, prompt_tokens: int, new_tokens: int,
                 answers: int, with_reference: bool = False):
        self.model = model
        self.limits = limits
        self.with_reference = with_reference
        self.measured = {}                       # tokens of a micro-batch -> its bytes
        self.prompt_tokens = prompt_tokens
        self.row_tokens = prompt_tokens + new_tokens
        # All of the model's: an adapter may leave some out.
        self.linears = [module for module in model.modules() if isinstance(module, Linear)]
        for linear in self.linears:
            linear.wide_weight()                 # allocates their shared buffer, to measure it
        torch.cuda.empty_cache()
        self.held = torch.cuda.memory_reserved()
        self.limit = free_memory(limits.memory_gib)
        tried = [limits.max_rows] if limits.max_rows else MAX_ROWS
        few, *more = sorted({min(most, answers) for most in tried})
        best = self._best_option(few)
        if best is None:
            taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self._fixed(few).items())
            raise UserError(f"rows of {self.row_tokens} tokens do not fit: of "
                            f"{self.limit / GIB:.1f} GiB {taken} leave too little for a forward "
                            "and backward and the KV cache: use a smaller --micro-batch-tokens, "
                            "--max-rows, --max-new-tokens or --lora-rank, a smaller model or a "
                            "larger card")
        for rows in more:
            option = self._best_option(rows)
            if option and option.pool_is_whole \
                    and option.forwards <= MORE_ROWS_MAY_COST * best.forwards:
                best = option
        self.max_rows = best.max_rows
        self.micro_batch_tokens = best.micro_batch_tokens
        self.pool = best.pool
        self.kept_layers = best.kept_layers
        fixed = self._fixed(best.max_rows)
        self.free = self.limit - sum(fixed.values())                   # bytes that were divided
        table = fixed | {
            "longest micro-batch": best.micro_batch, "KV pool": best.pool,
            "activations": self.free - best.micro_batch - best.pool, "together": self.limit}
        for name, size in table.items():
            say(f"{name:22} {size / GIB:8.2f} GiB")

    def _fixed(self, max_rows: int) -> dict[str, float]:
        """The parts that are not decided here: name -> bytes."""
        parameters = self.model.adapter.master.numel()
        adapter_bytes = Learner.state_bytes(parameters, self.model.dtype)
        c = self.model.config
        weights = [linear.weight for linear in self.linears]
        graphs = GRAPH_LOGITS * max_rows * c.vocab
        graphs += max(w.N * w.K * w.dtype.itemsize * w.expands(max_rows) for w in weights)
        # Bytes per token: gate|up in fp32 and h in 16 bits, 10 F; tensors of width D, 20 D.
        graphs += LARGEST_PREFILL * (10 * c.feed_forward + 20 * c.width)
        return {"weights": self.held - adapter_bytes, "adapter": adapter_bytes, "graphs": graphs,
                "CUDA context, NCCL": CUDA_CONTEXT, "fragments": FRAGMENTS * self.limit}

    def _best_option(self, max_rows: int) -> Option | None:
        """Try the sizes of micro-batches and divide what each leaves, as the top of the file says.
        None if no size leaves the pool one sequence of full length, or limits.kv_gib.
        """
        c, limits = self.model.config, self.limits
        kv_token = 2 * c.layers * c.kv_heads * c.head_dim * self.model.dtype.itemsize
        # The least that sampler.allocate_kv accepts: one sequence of full length.
        least_pool = (blocks_for(self.row_tokens) + 2) * KV_BLOCK * kv_token
        useful_pool = max_rows * self.row_tokens * kv_token
        free = self.limit - sum(self._fixed(max_rows).values())
        layer_weights = sum(one.weight.N * one.weight.K for one in self.linears) / c.layers
        worthwhile = max(8192, WORTHWHILE // c.width)
        sizes = [tokens for tokens in MICRO_BATCH_TOKENS if tokens <= 2 * worthwhile]
        if limits.micro_batch_tokens:
            worthwhile = limits.micro_batch_tokens
            sizes = [worthwhile]
        options = []
        for tokens in sizes:
            if tokens not in self.measured:
                self.measured[tokens] = self.worst_case(tokens)
            left = free - self.measured[tokens]
            if left < max(least_pool, (limits.kv_gib or 0) * GIB):
                continue                         # a smaller micro-batch may leave enough
            computed = max(tokens, self.row_tokens)      # a longer row is its own micro-batch
            layer = self.layer_bytes_per_token * computed
            # The pool gets what the activations of all layers leave, up to its useful size, and at
            # least half of that, or one sequence of full length.
            least = max(least_pool, useful_pool / 2)
            pool = min(left, max(least, min(useful_pool, left - c.layers * layer)))
            if limits.kv_gib:
                pool = limits.kv_gib * GIB
            kept_layers = int((left - pool) / layer + 1e-6)      # 2.9999999 is 3
            kept_layers = min(c.layers, max(0, kept_layers))
            if tokens > worthwhile and (kept_layers < c.layers or pool < useful_pool):
                continue
            forwards = learner_cost(computed, kept_layers / c.layers, layer_weights)
            options.append(Option(max(0, useful_pool / 4 - left), forwards, max_rows, tokens,
                                  self.measured[tokens], pool, pool >= useful_pool,
                                  kept_layers))
            if kept_layers == c.layers:
                break                            # a smaller size gains nothing
        return min(options, key=lambda option: (option.pool_lack, option.forwards), default=None)

    def _largest_micro_batch(self, tokens: int, kept_layers: int) -> torch.Tensor:
        """Log-probs of rows of full length: prompts of one token, so that all others are scored."""
        full, rest = divmod(tokens, self.row_tokens)
        rows = [[0] * self.row_tokens] * max(full, 1)
        if full and rest > 1:
            rows.append([0] * rest)
        return self.model.token_logprobs(rows, [1] * len(rows), kept_layers=kept_layers)[0]

    @cached_property
    def layer_bytes_per_token(self) -> float:
        """What a layer keeps per token of a micro-batch if it keeps its activations."""
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
        """Try the plan with the pool in place, and let layers drop their activations until it fits.

        Activations were extrapolated from one layer and one row, and segments may not grow as well
        as they did without the pool. -> this Plan. UserError if nothing fits next to the pool.
        """
        free = self.free - self.pool
        tokens = self.micro_batch_tokens
        layer = self.layer_bytes_per_token * max(tokens, self.row_tokens)
        while self.kept_layers and (over := self.worst_case(tokens, self.kept_layers) - free) > 0:
            # Drop as many as are too many, or an eighth if the GPU ran out of memory (inf).
            fewer = math.ceil(over / layer) if over < math.inf else self.kept_layers // 8
            self.kept_layers = max(0, self.kept_layers - max(1, fewer))
        if not self.kept_layers and self.worst_case(tokens) == math.inf:
            raise UserError(f"micro-batches of {tokens} tokens do not fit with a KV pool of "
                             f"{self.pool / GIB:.1f} GiB: use --micro-batch-tokens {tokens // 2}")
        return self
