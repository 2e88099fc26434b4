"""
GPU memory of a training run, divided before its first step: the learner's worst case is measured by
doing it once. So a run does not fail at step 300, on the first batch of long answers.

    weights, adapter      linears, one of them expanded, embeddings; master, gradient, moments,
                          16-bit copies
    graphs                of a decode step: three times its fp32 logits, and the W that it
                          expands where no kernel reads the packed one; of a prefill
    longest micro-batch   of the longest rows, or the sampler's largest prefill
    KV pool               at most what --max-rows sequences need
    activations           of layers that are then not run again in the backward
"""
import math
import sys
from functools import cached_property

import torch

from sampler import PREFILL_TOKENS

GIB = 2**30
FRAGMENTS = 0.03 if sys.platform == "linux" else 0.06  # lost between segments: see harness/process.py
OUTSIDE = 0.6 * GIB    # not torch's: CUDA context, NCCL
MICRO_BATCH_TOKENS = 32768, 16384, 8192, 4096, 2048
WORTH = 2**25          # tokens x width of the largest that pays: below, launches bound it
PREFILL = 1024         # tokens of the largest graph: decode.PREFILL_SIZES
DECODE = 240           # tokens whose matmuls take as long as to decode the weights: 3, 6 and 12 %


def bound(gib, device):
    """Before the first allocation: torch's part of a process's `gib` GiB; None: all."""
    if gib is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if not OUTSIDE < gib * GIB <= total:
        raise ValueError(f"--memory-gib {gib}: must lie between {OUTSIDE / GIB} and the GPU's "
                         f"{total / GIB:.1f}")
    torch.cuda.set_per_process_memory_fraction((gib * GIB - OUTSIDE) / total, device)


class Plan:
    """-> micro_batch_tokens, pool (bytes), kept_layers. gib None: what is free.

    Layers that keep their activations come before the second half of a pool for max_rows sequences
    of full length: few get so long, the others wait. Micro-batches leave a quarter of it.
    """

    def __init__(self, model, prompt_tokens, new_tokens, micro_batch_tokens, max_rows, kv_gib,
                 gib, say):
        self.model = model
        adapter = model.adapter
        self.prompt = prompt_tokens
        self.longest = prompt_tokens + new_tokens
        for linear in adapter.linears:
            linear.wide_weight()                        # their buffer stays: before anything is measured
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        limit = gib * GIB if gib else held + torch.cuda.mem_get_info()[0] + OUTSIDE
        of_adapter = 4 * adapter.master.nbytes + adapter.working.nbytes
        c = model.config
        weights = [linear.weight for linear in adapter.linears]
        graphs = 3 * 4 * max_rows * c.vocab
        graphs += max(w.N * w.K * w.dtype.itemsize * w.expands(max_rows) for w in weights)
        graphs += PREFILL * (10 * c.feed_forward + 20 * c.width)  # fp32 gate|up, 16-bit h, x
        table = {"weights": held - of_adapter, "adapter": of_adapter, "graphs": graphs,
                 "CUDA context, NCCL": OUTSIDE, "fragments": FRAGMENTS * limit}
        self.room = limit - sum(table.values())
        token = 2 * c.layers * c.kv_heads * c.head_dim * model.dtype.itemsize  # of the KV cache
        choices = [tokens for tokens in MICRO_BATCH_TOKENS if tokens <= max(8192, WORTH // c.width)]
        if micro_batch_tokens:
            choices = [micro_batch_tokens]
        useful = max_rows * self.longest * token
        options = []  # (what a quarter of `useful` lacks, forwards a token, ...): the least is best
        for tokens in choices:
            worst = self.worst_case(tokens)
            left = self.room - worst
            if left <= 0:
                continue
            layer = self.layer_bytes * tokens
            pool = min(left, max(useful / 2, min(useful, left - c.layers * layer)))
            if kv_gib is not None:
                pool = kv_gib * GIB
            kept_layers = min(c.layers, max(0, int((left - pool) / layer + 1e-6)))  # not 2.999
            forwards = (3 - kept_layers / c.layers) * (1 + DECODE / tokens)
            options.append((max(0, useful / 4 - left), forwards, tokens, worst, pool, kept_layers))
            if kept_layers == c.layers:
                break                            # nothing to gain from smaller ones
        if not options:
            raise ValueError(f"no room for rows of {self.longest} tokens beside {held / GIB:.1f} "
                             "GiB of weights and adapter: lower --max-new-tokens or "
                             f"--micro-batch-tokens ({tokens})")
        *_, self.micro_batch_tokens, worst, self.pool, self.kept_layers = min(options)
        left = self.room - worst
        if self.pool > left:
            raise ValueError(f"--kv-gib {kv_gib}: only {left / GIB:.2f} GiB are left")
        table |= {"longest micro-batch": worst, "KV pool": self.pool,
                  "activations": left - self.pool, "together": limit}
        for name, size in table.items():
            say(f"{name:22} {size / GIB:8.2f} GiB")

    def largest(self, tokens, kept_layers):
        """Log-probs of the largest micro-batch: prompts of one token, all others scored."""
        full, rest = divmod(tokens, self.longest)
        rows = [[0] * self.longest] * max(full, 1)
        if full and rest > 1:
            rows.append([0] * rest)
        return self.model.token_logprobs(rows, [1] * len(rows), kept_layers=kept_layers)[0]

    @cached_property
    def layer_bytes(self):
        """Bytes a token that a layer adds which keeps its activations."""
        def held(kept_layers):
            logprobs = self.largest(self.longest, kept_layers)  # its graph holds activations
            return torch.cuda.memory_allocated()

        return (held(1) - held(0)) / self.longest

    def worst_case(self, tokens, kept_layers=0):
        """Bytes that torch reserves for the largest micro-batch and prefill, or inf."""
        prompts = [[i % self.model.config.vocab] + [0] * self.prompt  # no two the same
                   for i in range(max(PREFILL_TOKENS // self.prompt, 1))]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        try:
            self.largest(tokens, kept_layers).sum().backward()
            with torch.no_grad():
                self.model.token_logprobs(prompts, [self.prompt] * len(prompts))
            return torch.cuda.max_memory_reserved() - held
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            self.model.adapter.master.grad.zero_()
            torch.cuda.empty_cache()

    def dry_step(self):
        """With the pool in place; fewer layers keep theirs if need be."""
        room = self.room - self.pool
        tokens = self.micro_batch_tokens
        while self.kept_layers and self.worst_case(tokens, self.kept_layers) > room:
            self.kept_layers = self.kept_layers * 7 // 8
        return self
