"""
GPU memory of a training run, found out before its first step: what the learner needs at worst is measured by doing it
once, and the KV pool gets what is left. So a run does not fail at step 300, on the first batch of long answers.

    weights                       packed linears, embeddings
    adapter                       master, gradient and two moments in fp32, the bf16 copies
    longest micro-batch           forward, recomputation and backward of --micro-batch-tokens, in rows as long as rows
                                  can get, or the sampler's largest prefill; with lora.py's scratch, which stays
    decode graphs                 activations of the widest decode step: about three times its fp32 logits
    CUDA context, NCCL            outside torch's allocator: 0.6 GiB
    fragments                     3 %
    KV pool                       the rest, at most what --max-rows sequences need
    activations                   what the pool leaves: so many of the last blocks are not run again in the backward

Not here: the host's memory, and other processes on the same GPU (they lower what is free, not a bound that is given).
"""
import math

import torch

from sampler import PREFILL_TOKENS

OUTSIDE = 0.6 * 2**30
# A weight is decoded once a micro-batch: that costs 3, 6 and 12 % of its matmuls.
MICRO_BATCH_TOKENS = 8192, 4096, 2048


def bound(gib, device):
    """Let torch's allocator have what a process of `gib` GiB leaves to it."""
    total = torch.cuda.get_device_properties(device).total_memory
    if not OUTSIDE < gib * 2**30 <= total:
        raise ValueError(f"--memory-gib {gib}: must lie between {OUTSIDE / 2**30} and the GPU's {total / 2**30:.1f}")
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 - OUTSIDE) / total, device)


class Plan:
    """What takes what, measured and said, and what is `left` for the KV pool (bytes).

    micro_batch_tokens None: the most of MICRO_BATCH_TOKENS that leaves the pool a quarter of what max_rows sequences of
    full length need: few are that long. gib None: the process may take what is free.
    """

    def __init__(self, model, adapter, prompt_tokens, new_tokens, micro_batch_tokens, max_rows, gib, say):
        self.model, self.adapter, self.prompt, self.longest = model, adapter, prompt_tokens, prompt_tokens + new_tokens
        torch.cuda.empty_cache()
        held, free, c = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0], model.config
        limit = gib * 2**30 if gib else held + free + OUTSIDE
        adapter_bytes = 4 * adapter.master.nbytes + adapter.working.nbytes
        table = {"weights": held - adapter_bytes, "adapter": adapter_bytes,
                 "decode graphs": 3 * 4 * max_rows * c.vocab, "CUDA context, NCCL": OUTSIDE, "fragments": 0.03 * limit}
        pool = max_rows * self.longest * c.layers * 2 * c.kv_heads * c.head_dim * model.dtype.itemsize
        for tokens in [micro_batch_tokens] if micro_batch_tokens else MICRO_BATCH_TOKENS:
            self.micro_batch_tokens = tokens
            table["longest micro-batch"] = self.worst = self.worst_case()
            self.left = limit - sum(table.values())
            if self.left > pool / 4:
                break
        if math.isinf(self.worst):
            raise ValueError(f"no room for rows of {self.longest} tokens beside {held / 2**30:.1f} GiB of weights and "
                             f"adapter: lower --micro-batch-tokens ({tokens}) or --max-new-tokens")
        for name, size in {**table, "left for the KV pool": self.left, "together": limit}.items():
            say(f"{name:22} {size / 2**30:8.2f} GiB")

    def largest(self, kept):
        """Log-probs of the largest micro-batch: a group whose prompt is one token, so that all others are scored."""
        full, rest = divmod(self.micro_batch_tokens, self.longest)
        rows = [[0] * self.longest] * max(full, 1) + [[0] * rest] * (full > 0 and rest > 1)
        return self.model.token_logprobs(rows, [1] * len(rows), kept=kept)[0]

    def worst_case(self, kept=0):
        """Bytes that torch reserves for the largest micro-batch and the largest prefill, inf if it cannot."""
        count = max(PREFILL_TOKENS // self.prompt, 1)
        prompts = [[i % self.model.config.vocab] + [0] * self.prompt for i in range(count)]         # no two the same
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        try:
            self.largest(kept).sum().backward()
            with torch.no_grad():
                self.model.token_logprobs(prompts, [self.prompt] * count)
            return torch.cuda.max_memory_reserved() - held
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            self.adapter.zero_grad()
            torch.cuda.empty_cache()

    def blocks_to_keep(self, pool):
        """So many that their activations fit into what a KV pool of that many bytes leaves; tried out."""
        sizes, spare = [], self.left - pool
        for kept in (0, 1):
            logprobs = self.largest(kept)                            # its graph holds them
            sizes.append(torch.cuda.memory_allocated())
            del logprobs
        kept = max(0, min(len(self.model.layers), int(spare / (sizes[1] - sizes[0]))))
        while kept and self.worst_case(kept) > self.worst + spare:
            kept = kept * 7 // 8
        return kept
