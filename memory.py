"""
GPU memory of a training run, found out before its first step: what the learner needs at worst is measured by doing it
once, and the KV pool gets what is left. So a run does not fail at step 300, on the first batch of long answers.

    weights                       packed linears, embeddings
    adapter                       master, gradient and two moments in fp32, the bf16 copies
    longest micro-batch           forward and backward of --micro-batch-tokens, in rows as long as rows can get, or the
                                  sampler's largest prefill; with the scratch of lora.py, which stays
    decode graphs                 activations of the widest decode step: about three times its fp32 logits
    CUDA context, NCCL            outside torch's allocator: 0.6 GiB
    fragments                     3 %
    KV pool                       the rest, at most what --max-rows sequences need

Not here: the host's memory, and other processes on the same GPU (they lower what is free, not a bound that is given).
"""
import torch

from sampler import PREFILL_TOKENS

OUTSIDE = 0.6 * 2**30


def bound(gib, device):
    """Let torch's allocator have what a process of `gib` GiB leaves to it."""
    total = torch.cuda.get_device_properties(device).total_memory
    if not OUTSIDE < gib * 2**30 <= total:
        raise ValueError(f"--memory-gib {gib}: must lie between {OUTSIDE / 2**30} and the GPU's {total / 2**30:.1f}")
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 - OUTSIDE) / total, device)


def worst_case(model, adapter, prompt_tokens, new_tokens, micro_batch_tokens):
    """Bytes that torch reserves for the largest micro-batch and the largest prefill; gradients are zero afterwards."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, longest = torch.cuda.memory_reserved(), prompt_tokens + new_tokens
    full, rest = divmod(micro_batch_tokens, longest)
    rows = [[0] * longest] * max(full, 1) + [[0] * rest] * (full > 0 and rest > 1)       # as grpo.micro_batches packs
    prompts = [[0] * prompt_tokens] * max(PREFILL_TOKENS // prompt_tokens, 1)
    try:
        model.token_logprobs(rows, [1] * len(rows))[0].sum().backward()
        with torch.no_grad():
            model.token_logprobs(prompts, [prompt_tokens - 1] * len(prompts))
    except torch.OutOfMemoryError:
        raise ValueError(f"no room for rows of {longest} tokens beside {held / 2**30:.1f} GiB of weights and adapter: "
                         f"lower --micro-batch-tokens ({micro_batch_tokens}) or --max-new-tokens") from None
    adapter.zero_grad()
    torch.cuda.empty_cache()
    return torch.cuda.max_memory_reserved() - held


def kv_budget(model, adapter, prompt_tokens, new_tokens, micro_batch_tokens, max_rows, gib, say):
    """Measures, says what takes what -> GiB for the KV pool. gib None: the process may take what is free."""
    torch.cuda.empty_cache()
    held, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    limit = gib * 2**30 if gib else held + free + OUTSIDE
    adapter_bytes = 4 * adapter.master.nbytes + adapter.working.nbytes
    table = {"weights": held - adapter_bytes, "adapter": adapter_bytes,
             "longest micro-batch": worst_case(model, adapter, prompt_tokens, new_tokens, micro_batch_tokens),
             "decode graphs": 3 * 4 * max_rows * model.config.vocab, "CUDA context, NCCL": OUTSIDE,
             "fragments": 0.03 * limit}
    left = limit - sum(table.values())
    for name, size in {**table, "left for the KV pool": left, "together": limit}.items():
        say(f"{name:22} {size / 2**30:8.2f} GiB")
    return left / 2**30
