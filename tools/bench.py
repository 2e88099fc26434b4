"""
Measures the speeds that docs/ reports; needs a GPU. Each command ends with one line of JSON. A
`floor` is the time of the same work at the speed of an H200's copy and large matmul. It is left out
on any other card.

    python -m tools.bench linears --model 7b [--lora-rank 32]      a layer's linears against cuBLAS
    python -m tools.bench rollout --model 7b --base nvfp4 [--batch 1,8,32,64,256]        tokens/s
    python -m tools.bench rollout --model qwen3-8b                 sizes of Qwen2.5 need no prefix
    python -m tools.bench decode --model 7b --batch 32,64 --new 4096,8192     steps of long answers
    python -m tools.bench tail --model 7b --lengths runs/x/samples.jsonl      lengths as real ones
    python -m tools.bench update --model 7b --new 4096             the learner, on long answers
    python -m tools.bench step --model 32b --memory-gib 48         a whole GRPO step
    torchrun --nproc-per-node 2 -m tools.bench step --model 7b     the same on several GPUs

linears. `chain` (our matmuls) and `cublas` are times of a layer's four linears one after the other,
as in a decode step. Slabs (partial sums) are not added up, since other kernels do that.

rollout. The whole sampler on random weights and a live random adapter: B sequences in groups of
gcd(B, 8), end ids ignored, log-probs returned; tokens/s count prefill and the host's work.
`preempted` counts rows that had to wait because the KV pool was full.

decode. One window of decode steps of the same sampler, for rows that have written half of `new`
tokens. A step's time grows in proportion to what is written, so this is the mean step of answers of
`new` tokens. What they wrote before is not computed: the KV cache holds random numbers.
`attention_gb_s` is the rate at which the keys and values of the answers are read: their bytes
divided by the time that they add to a step.

tail. Answers of given lengths, in several orders, and as many answers of their mean length. `few`
is the share of the time in which at most an eighth of the rows were still writing. The orders by
length show what could be gained if lengths were known, which they are not before the sampling.

update. Learner.update on random answers of `new` tokens. The `floor` is the time of all matmuls,
including those of attention, at the rate of a large matmul.

step. A step with train.py's own sampler, memory plan and Learner.update; seconds of the slowest
rank.

Shapes: M rows, N out_features, K in_features.
"""
import argparse
import functools
import json
import math
import operator
import time
from pathlib import Path
from typing import NamedTuple

import env  # isort: skip; its settings come before torch

import torch

import grpo
import model as qwen
import nvfp4
from attention import lay_out
from files import read_rows, short_repr
from harness import memory
from harness.config import LongHelp, Rollout, check_ranges
from harness.memory import Limits
from harness.setup import KERNELS, choose_device, divide_memory
from learner import Batch, Learner, micro_batches
from lora import Linear, attach
from ranks import LOCAL_RANK, WORLD, gather, join_ranks, say, share
from sampler import BlockPool, Rollouts, Sampler, Sampling, blocks_for, engine_for

SIZES = {  # D, F, layers, H, KV, V, tied: config.json of Qwen2.5-*-Instruct
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False),
    # The same of Qwen3-*, and: d, biases of q, k and v, norms of q and k
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 151936, True, 128, False, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 151936, True, 128, False, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 151936, True, 128, False, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 151936, False, 128, False, True),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 151936, False, 128, False, True),
    "qwen3-32b": (5120, 25600, 64, 64, 8, 151936, False, 128, False, True)}
LIVE_VOCAB = 151665                              # ids that the tokenizer has, of Qwen2.5
LIVE_VOCAB_QWEN3 = 151669                        # and </think>, <think>, two for a tool's response
PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}              # each has a LoRA A of its own
H200 = "NVIDIA H200"                             # neither GH200, nor H200 NVL, nor a part by MIG
COPY = 4.3e12                                    # bytes/s of its copy, and
TENSOR = 790e12                                  # FLOP/s of its 8192^3 bf16 matmul, measured
TRAFFIC = 400e6                                  # bytes of weights per graph: 7 times the L2
BYTES = 0.5625                                   # of an NVFP4 weight
SIZES_OF_GPU = ("major", "minor", "multi_processor_count", "shared_memory_per_multiprocessor",
                "shared_memory_per_block_optin", "L2_cache_size")
DEVICE = torch.device("cuda", LOCAL_RANK)


def random_model(size: str, base: str, dtype: torch.dtype, lora_rank: int) -> qwen.Qwen:
    """A model of a published size, made on the device. The adapter's B is random too, not zero."""
    torch.manual_seed(0)
    shape = qwen.ModelConfig(*SIZES[size])
    generator = torch.Generator(DEVICE).manual_seed(0)

    def get(name, *shape):
        if "norm" in name:
            return torch.ones(shape, device=DEVICE, dtype=dtype)
        w = torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)
        return w * shape[-1] ** -0.5

    def frozen(names, parts, k):
        return nvfp4.freeze([get(name, n, k) for name, n in zip(names, parts)], base, dtype)

    model = qwen.Qwen(shape, get, frozen, dtype, f"random-{size}")
    model.live_vocab = min(shape.vocab, LIVE_VOCAB_QWEN3 if shape.qk_norm else LIVE_VOCAB)
    if lora_rank:
        adapter = attach(model, rank=lora_rank, alpha=lora_rank)
        adapter.master.data[adapter.b_start:].normal_(0, 0.02)
        adapter.sync()
    return model


class Network(NamedTuple):
    """The flags that say which model is measured, and which kernels decode for it."""
    model: str
    kernels: str | None
    base: str
    dtype: str
    lora_rank: int

    def build(self) -> qwen.Qwen:
        return random_model(self.model, self.base, getattr(torch, self.dtype), self.lora_rank)


def random_prompts(model, lengths):
    return [torch.randint(model.live_vocab, (n,)).tolist() for n in lengths]


def drawn_lengths(count, low, high, mean):
    """`count` lengths in [low, high] of that mean: exponential, a long tail as answers have."""
    generator = torch.Generator().manual_seed(0)
    excess = torch.empty(count).exponential_(generator=generator)
    for _ in range(20):                          # cutting the tail lowers the mean: scale it back
        excess *= (mean - low) / excess.clamp(max=high - low).mean()
    return (low + excess).clamp(max=high).round().int().tolist()


def print_figures(what, figures):
    """Prints the figures in a line and returns them, on any card but an H200 without the floors."""
    if torch.cuda.get_device_name() != H200:
        figures = {name: value for name, value in figures.items() if "floor" not in name}
    words = [f"{name} {value:,.5g}" for name, value in figures.items()]
    print(f"{what:10}", ", ".join(words), flush=True)
    return figures


def fused_shapes(size):
    """name -> (N, K) of the four fused linears of a layer."""
    c = qwen.ModelConfig(*SIZES[size])
    heads = (c.heads + 2 * c.kv_heads) * c.head_dim
    return {"qkv": (heads, c.width), "o": (c.width, c.heads * c.head_dim),
            "gate_up": (2 * c.feed_forward, c.width), "down": (c.width, c.feed_forward)}


def random_weight(N, K):
    """Packed, of random codes and random normal E4M3 scales."""
    from marlin_fp4 import pack
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(40, 100, (N, K // 16), dtype=torch.uint8, device=DEVICE)
    return pack(codes, scales.view(torch.float8_e4m3fn), torch.ones((), device=DEVICE))


def graph_times(*works):
    """GPU seconds of each work() as a CUDA graph: medians of nine replays. The graphs are replayed
    in turn, so that changes of the card's clock affect all of them alike.
    """
    graphs = []
    for work in works:
        with torch.cuda.stream(torch.cuda.Stream()):             # compiles and warms up
            work()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            work()
        graphs[-1].replay()
    times = torch.zeros(9, len(graphs))
    for i in range(9):
        for j, graph in enumerate(graphs):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[i, j] = start.elapsed_time(end) / 1e3
    return times.median(0).values


def random_bf16(*shape):
    return torch.randn(shape, device=DEVICE).bfloat16()


def decode_figures(shapes, M, rank, kernels):
    """Figures of the decode matmul with M rows, for one layer."""
    from fast.decode import decode_matmul_for
    decode_matmul = functools.partial(decode_matmul_for(kernels), pdl=torch.cuda.get_device_capability(DEVICE) >= (9, 0))
    layers = math.ceil(TRAFFIC / (BYTES * sum(N * K for N, K in shapes.values())))
    operands = []
    for name, (N, K) in shapes.items():
        x = random_bf16(M, K)
        weights = [random_weight(N, K) for _ in range(layers)]
        lora = [random_bf16(PARTS[name] * rank, K) if rank else None for _ in weights]
        slabs = decode_matmul(x, weights[0], lora[0]).sums
        dense = [random_bf16(N, K) for _ in weights]
        operands.append((x, weights, lora, slabs, dense))

    def ours():
        for i in range(layers):
            for x, weights, lora, slabs, _ in operands:
                decode_matmul(x, weights[i], lora[i], slabs=slabs)

    def theirs():
        for i in range(layers):
            for x, *_, dense in operands:
                x @ dense[i].T

    chain, cublas = (graph_times(ours, theirs) / layers).tolist()
    floor = sum(max((N * K * BYTES + 2 * M * (N + K)) / COPY, 2 * M * N * K / TENSOR)
                for N, K in shapes.values())     # the longer of reading W and multiplying
    return {"chain_us": chain * 1e6, "floor_us": floor * 1e6, "cublas_us": cublas * 1e6,
            "cublas_of_chain": cublas / chain, "floor_of_chain": floor / chain}


def linears(model: str, kernels: str, lora_rank: int, rows: list[int]) -> dict:
    """The four linears of a layer against cuBLAS, for each number of rows."""
    shapes = fused_shapes(model)
    decode = {M: print_figures(f"{M} rows", decode_figures(shapes, M, lora_rank, kernels))
              for M in rows}
    return {"decode": decode}


def weight_bytes(model):
    """Bytes that every decode step reads: linears, adapter, lm_head."""
    frozen = sum(m.weight.nbytes for m in model.modules() if isinstance(m, Linear))
    adapter = model.adapter.working.nbytes if model.adapter else 0
    return frozen + adapter + model.lm_head.nbytes


def kv_read(config, B, prompt, written):
    """Bytes of keys and values that a step of B rows reads, each of which has written so many
    tokens. The rows of a group read their prompt together.
    """
    groups = B // math.gcd(B, 8)
    return 4 * config.layers * config.kv_heads * config.head_dim * (groups * prompt + B * written)


def load_figures(model, sampler, B, prompt, new):
    """B completions of `new` tokens -> figures."""
    G = math.gcd(B, 8)
    prompts = random_prompts(model, [prompt] * (B // G))
    sampler.generate(prompts, G, Sampling(2))    # compiles and captures
    prefill = sampler.generate(prompts, G, Sampling(1)).seconds        # and one step
    rollouts = sampler.generate(prompts, G, Sampling(new))
    step = (rollouts.seconds - prefill) / (new - 1)
    floor = (weight_bytes(model) + kv_read(model.config, B, prompt, new / 2)) / COPY
    return {"tokens_s": rollouts.num_tokens / rollouts.seconds, "step_ms": step * 1e3,
            "floor_ms": floor * 1e3, "floor_of_step": floor / step, "prefill_ms": prefill * 1e3,
            "preempted": rollouts.preempted}


def rollout(network: Network, batch: list[int], prompt: int, new: int, kv_gib: float | None
            ) -> dict:
    """The whole sampler, for each number of sequences in `batch`."""
    model = network.build()
    sampler = Sampler(engine_for(network.kernels), model, prompt + new, max(batch), kv_gib)
    figures = {B: print_figures(f"B={B}", load_figures(model, sampler, B, prompt, new))
               for B in batch}
    return {"weight_gb": weight_bytes(model) / 1e9,
            "kv_gib": sampler.engine.kv.nbytes / 2**30, "batch": figures}


def rows_half_way(sampler, model, B, prompt, written):
    """The input of a decode step of B rows that have written so many tokens each, in the KV blocks
    that the sampler would have given them; None if its pool has too few blocks.
    """
    G = math.gcd(B, 8)
    prompts = random_prompts(model, [prompt] * (B // G))
    sampler.pool = BlockPool(sampler.engine.kv.shape[2])
    live = sampler._sequences(prompts, G, Sampling(written + 2 * sampler.engine.window), None)
    own = blocks_for(written + 2 * sampler.engine.window)
    if len(sampler.pool) < B // G * blocks_for(prompt - 1) + B * own:
        return None
    for sequence in live:
        if not sequence.prefix.blocks:
            sequence.prefix.blocks = sampler.pool.take(blocks_for(prompt - 1))
        sequence.blocks = sampler.pool.take(own)
        sequence.pos += written
    return sampler._rows(live)


def window_seconds(sampler, rows):
    """Median seconds of a decode step, of nine windows."""
    engine = sampler.engine
    times = []
    for _ in range(10):                          # the first compiles and captures
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.decode(rows, engine.window, Sampling(2))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / engine.window)
    return sorted(times[1:])[4]


def decode(network: Network, batch: list[int], prompt: int, new: list[int],
           kv_gib: float | None) -> dict:
    """A decode step of B rows half way through answers of N tokens, for each B and N."""
    model = network.build()
    config = model.config
    sampler = Sampler(engine_for(network.kernels), model, prompt + max(new) // 2 + 32,
                      max(batch), kv_gib)
    sampler.engine.kv.normal_()
    figures = {}
    for B in batch:
        start = rows_half_way(sampler, model, B, prompt, 0)
        first = start and window_seconds(sampler, start)
        for N in new:
            rows = rows_half_way(sampler, model, B, prompt, N // 2)
            if rows is None:                     # as always if even `start` is None
                print(f"B={B} N={N}: the KV pool is too small for these rows", flush=True)
                continue
            step = window_seconds(sampler, rows)
            floor = (weight_bytes(model) + kv_read(config, B, prompt, N / 2)) / COPY
            added = kv_read(config, B, prompt, N / 2) - kv_read(config, B, prompt, 0)
            figures[f"{B} x {N}"] = print_figures(f"B={B} N={N}", {
                "tokens_s": B / step, "step_ms": step * 1e3, "floor_ms": floor * 1e3,
                "floor_of_step": floor / step, "attention_gb_s": added / (step - first) / 1e9,
                "kv_at_the_end_gib": kv_read(config, B, prompt, N) / 2**30})
    return {"weight_gb": weight_bytes(model) / 1e9, "steps": figures}


def lengths_of(path, count):
    """The lengths of the first answers of a samples.jsonl, or of evaluate.py's --out."""
    lengths = []
    for number, row in read_rows(Path(path)):
        length = row.get("length") if isinstance(row, dict) else None
        if not (isinstance(length, int) and length > 0):
            raise ValueError(f"--lengths {path}:{number}: needs a length, got {short_repr(length)}")
        lengths.append(length)
        if len(lengths) == count:
            return lengths
    raise ValueError(f"--lengths {path}: has {len(lengths)} answers, --answers is {count}")


def tail_figures(sampler, prompts, lengths, window):
    """Samples answers of these lengths -> figures."""
    moments = []
    sampler.engine.window = window
    began = time.perf_counter()
    rollouts = sampler.generate(prompts, len(lengths) // len(prompts), Sampling(lengths), progress=(
        lambda made, _: moments.append((time.perf_counter(), made))))
    few = 0.0
    for (moment, made), before in zip(moments, [began, *(moment for moment, _ in moments)]):
        if made <= window * sampler.max_rows / 8:
            few += moment - before
    return {"seconds": rollouts.seconds, "tokens_s": rollouts.num_tokens / rollouts.seconds,
            "idle": rollouts.idle, "few": few / rollouts.seconds, "preempted": rollouts.preempted}


def tail(network: Network, prompt: int, answers: int, new: int, lengths: str | None,
         max_rows: int | None, kv_gib: float | None) -> dict:
    """Answers of different lengths beside answers of equal ones, in several orders."""
    drawn = lengths_of(lengths, answers) if lengths else drawn_lengths(answers, 8, new, new / 8)
    model = network.build()
    sampler = Sampler(engine_for(network.kernels), model, prompt + max(drawn),
                      max_rows or answers, kv_gib)
    prompts = random_prompts(model, [prompt] * (answers // math.gcd(answers, 8)))
    usual = sampler.engine.window
    mean = round(sum(drawn) / answers)
    orders = {"equal lengths": ([mean] * answers, usual), "as they come": (drawn, usual),
              "longest first": (sorted(drawn, reverse=True), usual),
              "shortest first": (sorted(drawn), usual)}
    windows = [window for window in (4, 2, 1) if window < usual]
    orders |= {f"window of {window}": (drawn, window) for window in windows}
    for rows in {sampler.engine.batch_size(n) for n in range(1, sampler.max_rows + 1)}:
        sampler.generate(prompts[:1], rows, Sampling(2))         # captures the graph of each size
    figures = {name: print_figures(name, tail_figures(sampler, prompts, *order))
               for name, order in orders.items()}
    return {"tokens": sum(drawn), "longest": max(drawn), "mean": mean, "orders": figures}


def update_flops(config, tokens, scored, pairs, kept_layers):
    """FLOPs of the matmuls of a forward and backward, without the adapter's.

    tokens: computed; scored: predicted; pairs: of a query and a key. Every linear is multiplied in
    the forward, in the backward (the gradient of x alone: W is frozen) and, in layers that keep no
    activations, in a second forward. FlashAttention's backward multiplies 2.5 times as much as its
    forward. The head is multiplied twice.
    """
    c = config
    linears = (c.width * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.width
               + 3 * c.width * c.feed_forward)
    forwards = 2 * c.layers - kept_layers
    attention = 4 * c.heads * c.head_dim * pairs * (forwards + 2.5 * c.layers)
    return 2 * linears * tokens * (forwards + c.layers) + attention + 4 * c.vocab * c.width * scored


def learner_update(network: Network, wanted: Limits, prompts: int, prompt: int, new: int) -> dict:
    """Learner.update on `prompts` groups of eight random answers of `new` tokens, twice: the first
    compiles.
    """
    memory.bound(wanted.memory_gib, DEVICE)
    G = 8
    B = prompts * G
    model = network.build()
    learner = Learner(model, grpo.LOSSES["dapo"])
    sizes = Rollout(prompts_per_step=prompts, group_size=G, max_new_tokens=new, max_rows=128)
    divide_memory(model, learner, engine_for(network.kernels), wanted, sizes,
                  max_prompt_tokens=prompt, num_held_out=0)
    questions = [question for question in random_prompts(model, [prompt] * prompts)
                 for _ in range(G)]
    rollouts = Rollouts(questions, random_prompts(model, [new] * B),
                        [torch.full((new,), -1.0)] * B, [True] * B)
    weights = grpo.token_weights(rollouts.sampled(), learner.loss, new)
    advantages = grpo.group_advantages(torch.arange(B) % 2, G)
    for _ in range(2):
        began = time.perf_counter()
        done = learner.update(Batch(rollouts, advantages), weights, lr=1e-6)
        assert not done.failure, done.failure
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    computed = pairs = 0
    parts = micro_batches(questions, rollouts.completions, learner.micro_batch_tokens)
    for part in parts:
        rows = [questions[b] + rollouts.completions[b] for b in part]
        computed += len(lay_out(rows, [prompt] * len(rows))[0])
        groups = len({id(questions[b]) for b in part})
        pairs += groups * prompt**2 / 2 + len(part) * (prompt * new + new**2 / 2)
    flops = update_flops(model.config, computed, B * new, pairs, learner.kept_layers)
    return print_figures(f"N={new}", {
        "seconds": seconds, "tokens_s": B * new / seconds, "tflop_s": flops / seconds / 1e12,
        "floor": flops / TENSOR, "floor_of_seconds": flops / TENSOR / seconds,
        "micro_batches": len(parts), "micro_batch": learner.micro_batch_tokens,
        "kept": learner.kept_layers, "reserved_gib": torch.cuda.max_memory_reserved() / 2**30})


def training_step(network: Network, wanted: Limits, group_size: int, prompts: int) -> dict:
    """A training step on random weights, twice: the first compiles. With torchrun, a rank's share.
    """
    memory.bound(wanted.memory_gib, DEVICE)
    join_ranks(DEVICE)
    G = group_size
    B = prompts * G
    model = network.build()
    learner = Learner(model, grpo.LOSSES["dapo"])
    lengths = torch.tensor(drawn_lengths(B, 50, 1024, 300))
    questions = random_prompts(model, torch.randint(64, 257, (prompts,)).tolist())
    advantages = grpo.group_advantages(torch.arange(B) % 2, G)   # so every row is trained on
    mine = share(questions)
    limits = Sampling(share(lengths.view(-1, G)).flatten().tolist())
    sizes = Rollout(prompts_per_step=len(mine), group_size=G, max_new_tokens=1024, max_rows=256)
    sampler = divide_memory(model, learner, engine_for(network.kernels), wanted, sizes,
                            max_prompt_tokens=256, num_held_out=0)
    for _ in range(2):
        gather([])                               # all ranks begin together, and
        began = time.perf_counter()
        own = sampler.generate(mine, G, limits, share(range(prompts)))
        rollouts = functools.reduce(operator.add, gather([own]))         # end this together
        sampled = time.perf_counter()
        weights = grpo.token_weights(rollouts.sampled(), learner.loss, 1024)
        update = learner.update(Batch(rollouts, advantages), weights, lr=1e-6)
        assert not update.failure, update.failure
        torch.cuda.synchronize()
        done = time.perf_counter()
    rows = [prompt + answer for prompt, answer in zip(rollouts.prompts, rollouts.completions)]
    starts = [len(prompt) for prompt in rollouts.prompts]
    return {"seconds": done - began, "rollout": sampled - began, "update": done - sampled,
            "tokens": rollouts.num_tokens, "learner_tokens": sum(map(len, rows)),
            "learner_computed": len(lay_out(rows, starts)[0]),
            "idle": rollouts.idle, "samples": len(rows), "gpus": WORLD,
            "micro_batch": learner.micro_batch_tokens, "kept": learner.kept_layers,
            "kv_gib": sampler.engine.kv.nbytes / 2**30,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            **grpo.summarize(update.sums)}


MEASUREMENTS = {"linears": linears, "rollout": rollout, "decode": decode, "tail": tail,
                "update": learner_update, "step": training_step}


def grouped(flags: dict) -> dict:
    """A command's flags as the arguments of its function: those of the model become one Network,
    those of the learner's memory one Limits.
    """
    rest = dict(flags)
    if "memory_gib" in rest:
        rest["wanted"] = Limits(**{name: rest.pop(name) for name in Limits._fields})
    if "base" in rest:                           # linears makes no model
        rest["network"] = Network(**{name: rest.pop(name) for name in Network._fields})
    return rest


def measure(command: str, flags: dict) -> None:
    """Runs a command and prints its flags, commit, versions, GPU and figures."""
    figures = MEASUREMENTS[command](**grouped(flags))
    about = env.provenance(torch.cuda.get_device_name())
    properties = torch.cuda.get_device_properties(DEVICE)
    gpu = {name: getattr(properties, name, None) for name in SIZES_OF_GPU}       # not in all torch
    say(json.dumps({"command": command, **flags, **about, "gpu": gpu, **figures}))


def read_bench_flags():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=LongHelp)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in MEASUREMENTS:
        commands.add_parser(name, allow_abbrev=False, formatter_class=LongHelp)

    def add(names, flag, **options):
        if options.get("default") is not None:
            options.setdefault("help", "(default: %(default)s)")
        for name in names.split():
            commands.choices[name].add_argument(flag, **options)

    def numbers_by_comma(text):
        return [int(n) for n in text.split(",")]

    numbers = dict(type=numbers_by_comma, help="as 1,8,32")
    whole = "rollout decode tail update step"
    add(f"linears {whole}", "--model", choices=SIZES, default="7b")
    add(f"linears {whole}", "--kernels", choices=["auto", *KERNELS], default="auto")
    add("linears", "--lora-rank", type=int, default=0, help="of each part's adapter; 0: none")
    add("linears", "--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256])
    add(whole, "--lora-rank", type=int, default=32)
    add(whole, "--base", choices=list(nvfp4.FORMATS), default="nvfp4")
    add(whole, "--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add("rollout decode", "--batch", default=[1, 8, 32, 64, 256], **numbers)
    add("rollout decode tail update", "--prompt", type=int, default=256, help="tokens of a prompt")
    add("rollout", "--new", type=int, default=512, help="tokens of a completion, at least 2")
    add("decode", "--new", default=[4096, 8192, 16384], **numbers)
    add("tail", "--new", type=int, default=4096, help="longest answer, without --lengths")
    add("tail", "--lengths", help="samples.jsonl of a run, or evaluate.py's --out (default: drawn, "
        "with an eighth of --new as their mean)")
    add("tail", "--answers", type=int, default=128, help="how many")
    add("tail", "--max-rows", type=int, help="most that are decoded at a time (default: all)")
    add("update", "--new", type=int, default=4096, help="tokens of an answer")
    add("update step", "--memory-gib", type=float, help="GPU memory of the whole process")
    add("step", "--group-size", type=int, default=8, help="samples a problem, at least 2")
    add("step", "--prompts", type=int, default=16, help="problems")
    add("update", "--prompts", type=int, default=2, help="problems, of eight answers each")
    add("rollout decode tail", "--kv-gib", type=float, help="GiB of the KV cache (default: what "
        "is needed, at most half of the free memory)")
    add("update step", "--kv-gib", type=float, help="GiB of the KV cache (default: by memory.py)")
    add("update step", "--micro-batch-tokens", type=int, help="(default: by memory.py)")
    return parser.parse_args()


def main() -> None:
    with env.one_line("bench"):
        flags = vars(read_bench_flags())
        command = flags.pop("command")
        if command == "step":
            check_ranges(Rollout(group_size=flags["group_size"]))
        if command in ("step", "update"):
            for name in Limits._fields:
                if (flags[name] or 1) <= 0:
                    raise ValueError(f"--{name.replace('_', '-')} must be above 0, got "
                                     f"{flags[name]}")
            if flags["lora_rank"] < 1:
                raise ValueError(f"--lora-rank {flags['lora_rank']}: the learner trains an adapter")
        if not torch.cuda.is_available():
            raise ValueError("measures a GPU and there is none")
        _, kernels = choose_device("cuda", flags["kernels"], flags["model"])
        say(f"decode kernels: {kernels}, on {torch.cuda.get_device_name()}")
        measure(command, flags | {"kernels": kernels})


if __name__ == "__main__":
    main()
