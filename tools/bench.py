"""
Measures the speeds that docs/ reports; needs a GPU. Each command ends with one line of JSON. A
`floor` is what an H200's copy and matmul take, and left out on any other card.

    python -m tools.bench linears --model 7b [--lora-rank 32]      a layer's linears against cuBLAS
    python -m tools.bench rollout --model 7b --base nvfp4 [--batch 1,8,32,64,256]        tokens/s
    python -m tools.bench rollout --model qwen3-8b                 sizes of Qwen2.5 need no prefix
    python -m tools.bench step --model 32b --memory-gib 48         a whole GRPO step
    torchrun --nproc-per-node 2 -m tools.bench step --model 7b     the same on several GPUs

linears. `chain`, `cublas`: the four of a layer one after the other, as in a step of decoding; slabs
are not summed, since other kernels do that.

rollout. The whole sampler on random weights and a live random adapter: B sequences in groups of
gcd(B, 8), end ids ignored, log-probs returned; tokens/s count prefill and the host's work.

step. train.py's own sampler, memory plan and Learner.update, the slowest rank's seconds.

Shapes: M rows, N out_features, K in_features.
"""
import argparse
import functools
import json
import math
import operator
import time

from harness import process  # isort: skip; before torch
import torch

import grpo
import model as qwen
import nvfp4
from attention import lay_out
from fast import memory
from harness.config import Memory, Rollout, check_ranges
from harness.prepare import divide_memory
from harness.ranks import (KERNELS, LOCAL_RANK, WORLD, capability, choose_device, gather,
                           join_ranks, say, share)
from learner import Batch, Learner
from lora import Linear, attach
from sampler import Sampler, Sampling, engine_for

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
    """Prints a line of them, and hands them on; without the floors where they do not hold."""
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
    """GPU seconds of each work() as a CUDA graph: medians of nine replays, taken in turn, so that
    what the card's clock does, it does to all of them.
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
    """Of the decode matmul with M rows, a layer."""
    from fast.decode import decode_matmul_for
    decode_matmul = functools.partial(decode_matmul_for(kernels), pdl=capability(DEVICE) >= (9, 0))
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
                for N, K in shapes.values())     # the later of reading W and multiplying
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


def load_figures(model, sampler, B, prompt, new):
    """B completions of `new` tokens -> figures."""
    G = math.gcd(B, 8)
    prompts = random_prompts(model, [prompt] * (B // G))
    sampler.generate(prompts, G, Sampling(2))    # compiles and captures
    prefill = sampler.generate(prompts, G, Sampling(1)).seconds        # and one step
    rollouts = sampler.generate(prompts, G, Sampling(new))
    step = (rollouts.seconds - prefill) / (new - 1)
    c = model.config                             # keys and values that a step half way reads
    kv_bytes = 4 * c.layers * c.kv_heads * c.head_dim * (B // G * prompt + B * new / 2)
    floor = (weight_bytes(model) + kv_bytes) / COPY
    return {"tokens_s": rollouts.num_tokens / rollouts.seconds, "step_ms": step * 1e3,
            "floor_ms": floor * 1e3, "floor_of_step": floor / step, "prefill_ms": prefill * 1e3}


def rollout(model: str, kernels: str, base: str, dtype: str, lora_rank: int, batch: list[int],
            prompt: int, new: int) -> dict:
    """The whole sampler, for each number of sequences in `batch`."""
    network = random_model(model, base, getattr(torch, dtype), lora_rank)
    sampler = Sampler(engine_for(DEVICE, kernels), network, prompt + new, max(batch))
    figures = {B: print_figures(f"B={B}", load_figures(network, sampler, B, prompt, new))
               for B in batch}
    return {"weight_gb": weight_bytes(network) / 1e9, "batch": figures}


def training_step(model: str, kernels: str, base: str, dtype: str, lora_rank: int,
                  memory_gib: float | None, kv_gib: float | None, micro_batch_tokens: int | None,
                  group_size: int, prompts: int) -> dict:
    """A training step on random weights, twice: the first compiles. With torchrun, a rank's share.
    """
    wanted = Memory(None, kernels, memory_gib, kv_gib, micro_batch_tokens)
    memory.bound(memory_gib, DEVICE)
    join_ranks(DEVICE)
    G = group_size
    B = prompts * G
    network = random_model(model, base, getattr(torch, dtype), lora_rank)
    learner = Learner(network, grpo.LOSSES["dapo"])
    lengths = torch.tensor(drawn_lengths(B, 50, 1024, 300))
    questions = random_prompts(network, torch.randint(64, 257, (prompts,)).tolist())
    advantages = grpo.group_advantages(torch.arange(B) % 2, G)   # so every row is trained on
    weights = grpo.token_weights(lengths, torch.ones(B, dtype=torch.bool), learner.loss, 1024)
    mine = share(questions)
    limits = Sampling(share(lengths.view(-1, G)).flatten().tolist())
    sizes = Rollout(prompts_per_step=len(mine), group_size=G, max_new_tokens=1024, max_rows=256)
    sampler = divide_memory(network, learner, wanted, sizes, max_prompt_tokens=256, num_held_out=0)
    for _ in range(2):
        gather([])                               # all ranks begin together, and
        began = time.perf_counter()
        own = sampler.generate(mine, G, limits, share(range(prompts)))
        rollouts = functools.reduce(operator.add, gather([own]))         # end this together
        sampled = time.perf_counter()
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


MEASUREMENTS = {"linears": linears, "rollout": rollout, "step": training_step}


def measure(command: str, kernels: str, flags: dict) -> None:
    """Runs a command and prints its flags, commit, versions, GPU and figures."""
    flags = flags | {"kernels": kernels}
    figures = MEASUREMENTS[command](**flags)
    about = process.provenance(torch.cuda.get_device_name())
    properties = torch.cuda.get_device_properties(DEVICE)
    gpu = {name: getattr(properties, name, None) for name in SIZES_OF_GPU}       # not in all torch
    say(json.dumps({"command": command, **flags, **about, "gpu": gpu, **figures}))


def read_bench_flags():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in MEASUREMENTS:
        commands.add_parser(name, allow_abbrev=False)

    def add(names, flag, **options):
        for name in names.split():
            commands.choices[name].add_argument(flag, **options)

    add("linears rollout step", "--model", choices=SIZES, default="7b")
    add("linears rollout step", "--kernels", choices=["auto", *KERNELS], default="auto")
    add("linears", "--lora-rank", type=int, default=0, help="of each part's adapter; 0: none")
    add("linears", "--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256])
    add("rollout step", "--lora-rank", type=int, default=32)
    add("rollout step", "--base", choices=list(nvfp4.FORMATS), default="nvfp4")
    add("rollout step", "--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add("rollout", "--batch", type=lambda text: [int(n) for n in text.split(",")],
        default=[1, 8, 32, 64, 256], help="as 1,8,32")
    add("rollout", "--prompt", type=int, default=256, help="tokens of a prompt")
    add("rollout", "--new", type=int, default=512, help="tokens of a completion, at least 2")
    add("step", "--memory-gib", type=float, help="bound of the whole process")
    add("step", "--group-size", type=int, default=8, help="samples a problem, at least 2")
    add("step", "--prompts", type=int, default=16, help="problems")
    add("step", "--kv-gib", type=float, help="of the KV cache (default: as memory.py plans)")
    add("step", "--micro-batch-tokens", type=int, help="(default: as memory.py plans)")
    return parser.parse_args()


def main() -> None:
    with process.one_line("bench"):
        flags = vars(read_bench_flags())
        command = flags.pop("command")
        if command == "step":
            check_ranges(Rollout(group_size=flags["group_size"]))
            check_ranges(Memory(memory_gib=flags["memory_gib"], kv_gib=flags["kv_gib"],
                                micro_batch_tokens=flags["micro_batch_tokens"]))
            if flags["lora_rank"] < 1:
                raise ValueError(f"--lora-rank {flags['lora_rank']}: the learner trains an adapter")
        if not torch.cuda.is_available():
            raise ValueError("measures a GPU and there is none")
        _, kernels = choose_device("cuda", flags["kernels"], flags["model"])
        say(f"decode kernels: {kernels}, on {torch.cuda.get_device_name()}")
        measure(command, kernels, flags)


if __name__ == "__main__":
    main()
