"""
Divides a GPU's memory for a training run, before its first step.

The sampler wants a large KV pool, and the learner wants large micro-batches whose activations stay
in memory. Both share the same GiB. The most that the learner can need is measured by running that
case once, so a run does not fail at step 300, on the first batch of long answers.

    |<-------------------------- limit: --memory-gib, or what is free ------------------------->|
    +---------+---------+--------+--------------+-----------+-----------------------------------+
    | weights | adapter | graphs | CUDA context | fragments |               free                |
    +---------+---------+--------+--------------+-----------+-----------------------------------+
                                                            | longest     | KV   | activations  |
                                                            | micro-batch | pool |              |
                                                            +-------------+------+--------------+
                                                             what is decided here

    weights               measured: frozen linears, the buffer that expands one of them, embeddings
    adapter               measured: master, its gradient, the optimizer's moments, 16-bit copies
    graphs                estimated: for a decode step three times its fp32 logits, and the expanded
                          W if no kernel reads the packed one; for a prefill its activations
    CUDA context, NCCL    estimated: what a process takes besides torch's own allocations
    fragments             estimated: what torch loses between its segments
    longest micro-batch   measured for each size that is tried: forward and backward of rows of full
                          length while every layer runs again in the backward; or the sampler's
                          largest prefill, if that takes more
    KV pool               of use up to max_rows sequences of full length
    activations           of layers that keep theirs, and so do not run again in the backward

For each size of micro-batch, from the largest on, what it leaves free is given away in this order:

    1. to the KV pool, up to half of what is of use, but at least one sequence of full length: few
       answers reach that, and a row that finds no free kv_block waits;
    2. to activations, of as many layers as fit;
    3. to the KV pool, up to all that is of use;
    4. what then remains is kept free, and listed with the activations.

Of the sizes that fit, the best Option (below) is taken: it leaves the pool at least a quarter of
what is of use, if any size does, and of those sizes it is the one at which a token costs least.

Where --max-rows does not say how many rows are decoded at a time, it is 512 if their pool is whole
and the learner's tokens cost hardly more than beside 256 (MORE_ROWS_MAY_COST), else 256.

A run that cannot fit is refused at one of two places. check_size() compares the model with the card
by arithmetic, before the model is downloaded and read. Plan measures the rest, before the first
step. Both say which flags help, beginning with those that change a run least.
"""
import math
import sys
from functools import cached_property
from typing import Callable, Collection, NamedTuple

import torch

from files import UserError
from learner import Learner
from lora import Linear
from model import ModelConfig
from sampler import KV_BLOCK, PREFILL_TOKENS, blocks_for

GIB = 2**30
MAX_ROWS = 256, 512                                    # that are tried, if --max-rows is not given
# Decoding 512 rows at a time instead of 256 saves more than 2 % of an update takes.
MORE_ROWS_MAY_COST = 1.02
MICRO_BATCH_TOKENS = 32768, 16384, 8192, 4096, 2048    # the sizes that are tried
# Micro-batches beyond 8,192 tokens are tried up to this product of tokens and width, since a narrow
# model's kernels are so short that most time goes into launching them. Twice as many tokens are
# taken only if all layers keep their activations and the pool is whole, which are worth more.
WORTHWHILE = 2**25
# Each micro-batch expands W anew, which costs as much as multiplying 240 tokens: 3, 6 and 12 % of
# micro-batches of 8,192, 4,096 and 2,048 tokens.
EXPANSION_TOKENS = 240
GRAPH_LOGITS = 3 * 4                                   # bytes of one logit: three times in fp32
LARGEST_PREFILL = 1024                                 # tokens of a graph: decode.PREFILL_SIZES
CUDA_CONTEXT = 0.6 * GIB                               # and NCCL
# The share of the limit that is lost between torch's segments. On Linux they can grow, which
# env.py asks for.
FRAGMENTS = 0.03 if sys.platform == "linux" else 0.06


# Bits of a weight in each of nvfp4.FORMATS, scales included.
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5, "bf16": 16}


class Limits(NamedTuple):
    """What is fixed beforehand. None: it follows from the rest."""
    memory_gib: float | None = None              # of the whole process
    kv_gib: float | None = None                  # of the KV pool
    micro_batch_tokens: int | None = None
    max_rows: int | None = None                  # answers that are decoded at a time


class Option(NamedTuple):
    """One way to divide what is free.

    The best is the one with the least pool_lack; of equals the one with the fewest forwards; of
    equals again the one that is tried first, which has the largest micro-batches.
    """
    pool_lack: float              # bytes missing for a quarter of the useful pool, 0 if it fits
    forwards: float               # what a token of the learner costs, in forwards through the model
    micro_batch_tokens: int
    micro_batch: float            # bytes
    pool: float                   # bytes
    kept_layers: int              # how many layers keep their activations


def bound(memory_gib: float | None, device: torch.device) -> None:
    """Limit torch to its part of the process's memory_gib; None: no limit. Call it before the first
    allocation. UserError if that is more than the GPU has or too little for CUDA itself, or if the
    device is not a GPU.
    """
    if memory_gib is None:
        return
    if device.type != "cuda":
        raise UserError(f"--memory-gib {memory_gib:g} bounds the memory of a GPU, --device is "
                         f"{device}")
    total = torch.cuda.get_device_properties(device).total_memory
    if not CUDA_CONTEXT < memory_gib * GIB <= total:
        raise UserError(f"--memory-gib {memory_gib}: must lie between {CUDA_CONTEXT / GIB} and "
                         f"the GPU's {total / GIB:.1f}")
    torch.cuda.set_per_process_memory_fraction((memory_gib * GIB - CUDA_CONTEXT) / total, device)


def model_bytes(config: ModelConfig, base: str, rank: int,
                kept: Collection[str] = ()) -> tuple[float, int]:
    """What the weights of a model take, and its adapter in training, in bytes. Norms and biases, a
    thousandth of that, are left out.

    kept: names of linears that are in 16 bits whatever `base` is, as `ignore` of an NVFP4 folder's
    config.json has them.
    """
    c = config
    heads = c.heads * c.head_dim
    kv_heads = c.kv_heads * c.head_dim
    linears = {"q_proj": (heads, c.width), "k_proj": (kv_heads, c.width),
               "v_proj": (kv_heads, c.width), "o_proj": (c.width, heads),
               "gate_proj": (c.feed_forward, c.width), "up_proj": (c.feed_forward, c.width),
               "down_proj": (c.width, c.feed_forward)}
    in_16_bits = sum(math.prod(linears.get(name.split(".")[-1], (0,))) for name in kept)
    of_base = c.layers * sum(n * k for n, k in linears.values()) - in_16_bits
    embeddings = (2 - c.tied) * c.vocab * c.width
    weights = of_base * BITS[base] / 8 + 2 * (in_16_bits + embeddings)
    parameters = c.layers * sum(rank * (n + k) for n, k in linears.values())
    return weights, Learner.state_bytes(parameters, torch.bfloat16)


def check_size(name: str, config: ModelConfig, base: str, rank: int, limit: float,
               kept: Collection[str] = ()) -> None:
    """UserError if weights and adapter alone exceed `limit` bytes of a GPU's memory. kept: as in
    model_bytes().
    """
    weights, adapter = model_bytes(config, base, rank, kept)
    if weights + adapter + CUDA_CONTEXT <= limit:
        return
    helps = []
    if base == "bf16":
        helps.append(("--base nvfp4", weights - model_bytes(config, "nvfp4", rank)[0]))
    if rank > 1:
        helps.append((f"--lora-rank {rank // 2}", adapter / 2))
    raise UserError(f"--model {name}: its {base} weights take {weights / GIB:.1f} GiB, an adapter "
                     f"of rank {rank} in training {adapter / GIB:.1f} and CUDA "
                     f"{CUDA_CONTEXT / GIB:.1f}, and there are {limit / GIB:.1f} GiB: "
                     + advice(helps))


def advice(helps: list[tuple[str, float | None]]) -> str:
    """"take --lora-rank 16 (1.2 GiB less), or a smaller model or a larger card".

    helps: (flag and value, bytes that it frees or None) in the order in which to try them. What
    frees less than 0.05 GiB is left out.
    """
    flags = [flag if freed is None else f"{flag} ({freed / GIB:.1f} GiB less)"
             for flag, freed in helps if freed is None or freed > GIB / 20]
    flags = [", then ".join(flags)] if flags else []
    return f"take {', or '.join([*flags, 'a smaller model or a larger card'])}"


def free_memory(memory_gib: float | None) -> float:
    """The bytes that this process may take in all, CUDA's context and what it holds already
    included: --memory-gib, or what is free on the GPU.
    """
    if memory_gib:
        return memory_gib * GIB
    return torch.cuda.memory_reserved() + torch.cuda.mem_get_info()[0] + CUDA_CONTEXT


class Plan:
    """The division for one run: micro_batch_tokens, pool (bytes of the KV pool), kept_layers, and
    max_rows, how many rows are decoded at a time.

    model: with its adapter, after its Learner was made, which allocates all that it keeps.
    prompt_tokens, new_tokens: of the longest row. answers: most that there are to decode.
    with_reference: whether the learner computes the log-probs of the model without its adapter too.
    say: is called with each line of the table. UserError names the flag to change where nothing
    fits.
    """

    def __init__(self, model: torch.nn.Module, limits: Limits, prompt_tokens: int, new_tokens: int,
                 answers: int, say: Callable[[str], None], with_reference: bool = False):
        self.model = model
        self.with_reference = with_reference
        self.measured = {}                       # tokens of a micro-batch -> its bytes
        self.prompt_tokens = prompt_tokens
        self.row_tokens = prompt_tokens + new_tokens
        # All of the model's: an adapter may leave some out.
        self.linears = [module for module in model.modules() if isinstance(module, Linear)]
        for linear in self.linears:
            linear.wide_weight()                 # makes their common buffer, so that it is measured
        torch.cuda.empty_cache()
        self.held = torch.cuda.memory_reserved()
        limit = free_memory(limits.memory_gib)
        c = model.config
        kv_token = 2 * c.layers * c.kv_heads * c.head_dim * model.dtype.itemsize   # keys and values
        # What sampler.allocate_kv asks for, for one sequence of full length.
        self.least_pool = (blocks_for(self.row_tokens) + 2) * KV_BLOCK * kv_token
        self.least_micro_batch = math.inf        # bytes of the smallest that was tried
        cheapest = math.inf
        tried = [limits.max_rows] if limits.max_rows else MAX_ROWS
        for rows in sorted({min(most, answers) for most in tried}):
            useful_pool = rows * self.row_tokens * kv_token
            fixed_now = self._fixed(limit, rows)
            free = limit - sum(fixed_now.values())
            option = self._best_option(limits, free, useful_pool)
            fewer_do = (option is None or option.pool < useful_pool
                        or option.forwards > MORE_ROWS_MAY_COST * cheapest)
            if cheapest < math.inf and fewer_do:
                break
            best, fixed, self.free, self.max_rows = option, fixed_now, free, rows
            if option is None:
                break
            cheapest = option.forwards
        most_left = self.free - self.least_micro_batch
        if best is None and limits.kv_gib is not None and most_left >= self.least_pool:
            raise UserError(f"a KV pool of {limits.kv_gib} GiB does not fit: only "
                            f"{most_left / GIB:.2f} GiB are left")
        if best is None:
            raise UserError(self._too_large(limits, fixed, limit))
        left = self.free - best.micro_batch
        self.micro_batch_tokens = best.micro_batch_tokens
        self.pool = best.pool
        self.kept_layers = best.kept_layers
        table = fixed | {"longest micro-batch": best.micro_batch, "KV pool": best.pool,
                         "activations": left - best.pool, "together": limit}
        for name, size in table.items():
            say(f"{name:22} {size / GIB:8.2f} GiB")

    def _fixed(self, limit: float, max_rows: int) -> dict[str, float]:
        """What there is nothing to decide about: name -> bytes."""
        parameters = self.model.adapter.master.numel()
        adapter_bytes = Learner.state_bytes(parameters, self.model.dtype)
        c = self.model.config
        weights = [linear.weight for linear in self.linears]
        graphs = GRAPH_LOGITS * max_rows * c.vocab
        graphs += max(w.N * w.K * w.dtype.itemsize * w.expands(max_rows) for w in weights)
        # Bytes of a token: gate|up in fp32 and h in 16 bits, 10 F; what is D wide, 20 D.
        graphs += LARGEST_PREFILL * (10 * c.feed_forward + 20 * c.width)
        return {"weights": self.held - adapter_bytes, "adapter": adapter_bytes, "graphs": graphs,
                "CUDA context, NCCL": CUDA_CONTEXT, "fragments": FRAGMENTS * limit}

    def _best_option(self, limits: Limits, free: float, useful_pool: int) -> Option | None:
        """Try the sizes of micro-batches and divide what each leaves of `free`, as the top of the
        file says. None if none leaves the pool one sequence of full length, or limits.kv_gib.

        useful_pool: bytes of all rows' sequences of full length.
        """
        layers = self.model.config.layers
        worthwhile = max(8192, WORTHWHILE // self.model.config.width)
        sizes = [tokens for tokens in MICRO_BATCH_TOKENS if tokens <= 2 * worthwhile]
        if limits.micro_batch_tokens:
            worthwhile = limits.micro_batch_tokens
            sizes = [worthwhile]
        options = []
        for tokens in sizes:
            if tokens not in self.measured:
                self.measured[tokens] = self.worst_case(tokens)
            micro_batch = self.least_micro_batch = self.measured[tokens]
            left = free - micro_batch
            if left < self.least_pool:
                continue
            computed = max(tokens, self.row_tokens)      # a longer row is a micro-batch of its own
            layer = self.layer_bytes_per_token * computed
            # The pool gets what the activations of all layers leave, up to what is of use to it; at
            # least half of that, and what one sequence of full length takes.
            least = max(self.least_pool, useful_pool / 2)
            pool = min(left, max(least, min(useful_pool, left - layers * layer)))
            if limits.kv_gib is not None:
                pool = limits.kv_gib * GIB
                if pool > left:
                    continue                     # a smaller micro-batch may leave enough
            kept_layers = int((left - pool) / layer + 1e-6)      # 2.9999999 is 3
            kept_layers = min(layers, max(0, kept_layers))
            if tokens > worthwhile and (kept_layers < layers or pool < useful_pool):
                continue
            # Forward, backward, and a second forward of the layers that kept nothing. The backward
            # costs what a forward does: W is frozen, so only the gradient of x is multiplied.
            forwards = (3 - kept_layers / layers) * (1 + EXPANSION_TOKENS / computed)
            options.append(Option(max(0, useful_pool / 4 - left), forwards, tokens, micro_batch,
                                  pool, kept_layers))
            if kept_layers == layers:
                break                            # a smaller size has nothing to gain
        return min(options, key=lambda option: (option.pool_lack, option.forwards), default=None)

    def _too_large(self, limits: Limits, fixed: dict[str, float], limit: float) -> str:
        """The message where not even one row fits: what takes how much, and which flags help."""
        taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in fixed.items())
        smallest = min(MICRO_BATCH_TOKENS)
        needed = f"{self.least_micro_batch / GIB:.1f}"
        if self.least_micro_batch == math.inf:
            needed = "more than that"
        helps = []
        if (limits.micro_batch_tokens or 0) > smallest:
            helps.append((f"--micro-batch-tokens {smallest}", None))
        if self.max_rows > 8:
            freed = GRAPH_LOGITS * (self.max_rows - 8) * self.model.config.vocab
            helps.append(("--max-rows 8", freed))
        new_tokens = self.row_tokens - self.prompt_tokens
        if new_tokens > 1:
            helps.append((f"--max-new-tokens {new_tokens // 2}", None))
        rank = self.model.adapter.rank
        if rank > 1:
            helps.append((f"--lora-rank {rank // 2}", fixed["adapter"] / 2))
        return (f"rows of {self.row_tokens} tokens do not fit: of {limit / GIB:.1f} GiB {taken} "
                f"leave {self.free / GIB:.1f}, a forward and backward takes {needed} and the KV "
                f"cache of one row {self.least_pool / GIB:.1f}: {advice(helps)}")

    def _largest_micro_batch(self, tokens: int, kept_layers: int) -> torch.Tensor:
        """Log-probs of rows of full length: prompts of one token, so that all others are scored."""
        full, rest = divmod(tokens, self.row_tokens)
        rows = [[0] * self.row_tokens] * max(full, 1)
        if full and rest > 1:
            rows.append([0] * rest)
        return self.model.token_logprobs(rows, [1] * len(rows), kept_layers=kept_layers)[0]

    @cached_property
    def layer_bytes_per_token(self) -> float:
        """What a layer holds of each token of a micro-batch if it keeps its activations."""
        def held(kept_layers):
            logprobs = self._largest_micro_batch(self.row_tokens, kept_layers)  # noqa: F841
            return torch.cuda.memory_allocated()     # while logprobs' graph holds the activations

        return (held(1) - held(0)) / self.row_tokens

    def worst_case(self, tokens: int, kept_layers: int = 0) -> float:
        """Bytes that torch reserves for the largest micro-batch, or for the largest prefill if that
        takes more; inf if they do not fit.
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
        as they did without the pool. -> this Plan. UserError if nothing fits beside the pool.
        """
        free = self.free - self.pool
        tokens = self.micro_batch_tokens
        while self.kept_layers and self.worst_case(tokens, self.kept_layers) > free:
            self.kept_layers = self.kept_layers * 7 // 8
        if not self.kept_layers and self.worst_case(tokens) == math.inf:
            raise UserError(f"micro-batches of {tokens} tokens do not fit beside a KV pool of "
                             f"{self.pool / GIB:.1f} GiB: take --micro-batch-tokens "
                             f"{tokens // 2}")
        return self
