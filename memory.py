"""
GPU memory of a training run, found out before its first step: what the learner needs at worst is measured by doing it
once, and the rest divided. So a run does not fail at step 300, on the first batch of long answers.

    weights                       packed linears, embeddings
    adapter                       master, gradient and two moments in fp32, the 16-bit copies
    longest micro-batch           forward, recomputation and backward of --micro-batch-tokens, in rows as long as rows
                                  can get, or the sampler's largest prefill; with lora.py's scratch, which stays
    graphs                        activations of the widest decode step: about three times its fp32 logits, and the W
                                  that it expands where there is no kernel for the packed one; and of a prefill
    CUDA context, NCCL            outside torch's allocator: 0.6 GiB
    fragments                     3 %
    KV pool                       at most what --max-rows sequences need
    activations                   of blocks that then need not be run again in the backward

Not here: the host's memory, and other processes on the same GPU (they lower what is free, not a bound that is given).
"""
import math
import os

import torch

import marlin_fp4
from sampler import PREFILL_TOKENS
PREFILL_SIZES = (0,)

OUTSIDE = 0.6 * 2**30
MICRO_BATCH_TOKENS = 8192, 4096, 2048
DECODE = 240           # tokens whose matmuls take as long as to decode the weights, once a micro-batch: 3, 6 and 12 %


def bound(gib, device):
    """Before the first allocation: let torch's allocator have what a process of `gib` GiB leaves to it; None: all.

    Segments that grow instead of many of fixed size: the largest micro-batch of 32B then reserves a tenth less.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if gib is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if not OUTSIDE < gib * 2**30 <= total:
        raise ValueError(f"--memory-gib {gib}: must lie between {OUTSIDE / 2**30} and the GPU's {total / 2**30:.1f}")
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 - OUTSIDE) / total, device)


def expanded(weights, rows):
    """Bytes of the largest W that a decode step of so many rows expands: decode.partial_sums, one at a time."""
    def in_place(w):
        if isinstance(w, marlin_fp4.PackedWeight):
            return rows <= marlin_fp4.CROSSOVER and marlin_fp4.runs_on(w.device)
        return w.tensors[0].dtype == w.dtype                         # base bf16
    return max(0 if in_place(w) else w.N * w.K * torch.bfloat16.itemsize for w in weights)


class Plan:
    """Measures, divides what is there, says so -> micro_batch_tokens, pool (bytes), kept (blocks).

    micro_batch_tokens, kv_gib: as given, or None to choose; gib None: the process may take what is free. More than a
    pool for max_rows sequences of full length is of no use. Blocks that keep their activations come second, but before
    the second half of that: few sequences get so long, and those that find no room wait. Micro-batches are as large
    as leaves a quarter of it.
    """

    def __init__(self, model, adapter, prompt_tokens, new_tokens, micro_batch_tokens, max_rows, kv_gib, gib, say):
        self.model, self.adapter, self.prompt, self.longest = model, adapter, prompt_tokens, prompt_tokens + new_tokens
        torch.cuda.empty_cache()
        held, free, c = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0], model.config
        limit = gib * 2**30 if gib else held + free + OUTSIDE
        adapter_bytes = 4 * adapter.master.nbytes + adapter.working.nbytes
        graphs = 3 * 4 * max_rows * c.vocab + expanded([linear.weight for linear in adapter.linears], max_rows)
        graphs += PREFILL_SIZES[-1] * (10 * c.feed_forward + 20 * c.width)      # fp32 gate|up, 16-bit h; five of x
        table = {"weights": held - adapter_bytes, "adapter": adapter_bytes, "graphs": graphs,
                 "CUDA context, NCCL": OUTSIDE, "fragments": 0.03 * limit}
        self.room = limit - sum(table.values())
        useful = max_rows * self.longest * c.layers * 2 * c.kv_heads * c.head_dim * model.dtype.itemsize
        options = []
        for tokens in [micro_batch_tokens] if micro_batch_tokens else MICRO_BATCH_TOKENS:
            options.append(self.option(tokens, useful, kv_gib))
            if options[-1][-1] == c.layers:
                break                                                # nothing to gain from smaller ones
        *_, self.micro_batch_tokens, worst, self.pool, self.kept = min(options)
        if math.isinf(worst):
            raise ValueError(f"no room for rows of {self.longest} tokens beside {held / 2**30:.1f} GiB of weights and "
                             f"adapter: lower --micro-batch-tokens ({self.micro_batch_tokens}) or --max-new-tokens")
        if self.pool > self.room - worst:
            raise ValueError(f"--kv-gib {kv_gib}: only {(self.room - worst) / 2**30:.2f} GiB are left")
        table |= {"longest micro-batch": worst, "KV pool": self.pool, "activations": self.room - worst - self.pool}
        for name, size in {**table, "together": limit}.items():
            say(f"{name:22} {size / 2**30:8.2f} GiB")

    def option(self, tokens, useful, kv_gib):
        """-> (bytes that a pool of a quarter lacks, forwards a token, tokens, worst, pool, kept): the least is best."""
        self.micro_batch_tokens, layers = tokens, len(self.model.layers)
        worst = self.worst_case()
        if math.isinf(worst):
            return worst, worst, tokens, worst, 0, 0
        left, block = self.room - worst, self.block_bytes() * tokens
        pool = kv_gib * 2**30 if kv_gib else min(left, max(useful / 2, min(useful, left - layers * block)))
        kept = min(layers, max(0, int((left - pool) / block)))
        return max(0, useful / 4 - left), (3 - kept / layers) * (1 + DECODE / tokens), tokens, worst, pool, kept

    def largest(self, tokens, kept):
        """Log-probs of the largest micro-batch: a group whose prompt is one token, so that all others are scored."""
        full, rest = divmod(tokens, self.longest)
        rows = [[0] * self.longest] * max(full, 1) + [[0] * rest] * (full > 0 and rest > 1)
        return self.model.token_logprobs(rows, [1] * len(rows), kept=kept)[0]

    def block_bytes(self):
        """Bytes a token that a block adds which keeps its activations."""
        sizes = []
        for kept in (0, 1):
            logprobs = self.largest(self.longest, kept)              # its graph holds what the backward needs
            sizes.append(torch.cuda.memory_allocated())
            del logprobs
        return (sizes[1] - sizes[0]) / self.longest

    def worst_case(self, kept=0):
        """Bytes that torch reserves for the largest micro-batch and the largest prefill, inf if it cannot."""
        count = max(PREFILL_TOKENS // self.prompt, 1)
        prompts = [[i % self.model.config.vocab] + [0] * self.prompt for i in range(count)]         # no two the same
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        try:
            self.largest(self.micro_batch_tokens, kept).sum().backward()
            with torch.no_grad():
                self.model.token_logprobs(prompts, [self.prompt] * count)
            return torch.cuda.max_memory_reserved() - held
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            self.adapter.zero_grad()
            torch.cuda.empty_cache()

    def dry_step(self):
        """With the pool in place, once through the worst case; keeps fewer blocks if they do not fit after all."""
        while self.kept and self.worst_case(self.kept) > self.room - self.pool:
            self.kept = self.kept * 7 // 8
        return self
