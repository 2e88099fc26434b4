"""
Speed of sampling, training and whole steps, with random weights; needs a GPU.

    python -m tools.bench step --model 7b --prompts 64             a GRPO step
    python -m tools.bench step --model 32b --memory-gib 48         ... on a smaller card
    python -m tools.bench rollout --model 7b --batch 1,8,64,256    tokens/s of the sampler
    python -m tools.bench rollout --model qwen3-8b --base bf16
    python -m tools.bench update --model 7b --new 4096             the learner, on long answers
    python -m tools.bench linears --model 7b --lora-rank 32        a layer's linears against cuBLAS
    torchrun --nproc-per-node 2 -m tools.bench step --model 7b     on several GPUs

step       train.py's sampler, memory plan and update, on answers of 50 to 1,024 tokens, 300 on
           average; the seconds of the slowest rank.
rollout    B sequences in groups of gcd(B, 8), with an adapter, ignoring end ids; tokens/s include
           prefill and the host's work. `preempted`: rows that waited for KV blocks.
update     Learner.update on random answers of `new` tokens.
linears    A layer's four linears in a row, as in a decode step: `chain` is ours, without adding up
           slabs (other kernels do that), `cublas` is bf16.

Each command ends with a line of JSON. On an H200, `floor` is the time that the same work would take
at the speed of a plain copy or a large matmul.
"""
import argparse
import functools
import json
import math
import operator
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

if find_spec("env") is None:                     # as python tools/bench.py, where no import works
    sys.exit("bench.py: run it from the project's folder, as python -m tools.bench")

import env  # isort: skip; its settings come before torch

import torch

import grpo
import model as qwen
import nvfp4
from attention import lay_out
from evaluate import within
from files import UserError
from harness import memory
from harness.config import Rollout
from harness.setup import choose_device, divide_memory
from learner import Batch, Learner, micro_batches
from lora import Linear, attach
from ops import ON_GPU
from ranks import LOCAL_RANK, WORLD, gather, join_ranks, say, share
from sampler import Rollouts, Row, Sampler, Sampling

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
PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}              # each has its own LoRA A
H200 = "NVIDIA H200"                             # neither GH200, nor H200 NVL, nor a part by MIG
COPY = 4.3e12                                    # bytes/s of its copy, and
TENSOR = 790e12                                  # FLOP/s of its 8192^3 bf16 matmul, measured
TRAFFIC = 400e6                                  # bytes of weights per graph: 7 times the L2
BYTES = 0.5625                                   # of an NVFP4 weight
SIZES_OF_GPU = ("major", "minor", "multi_processor_count", "shared_memory_per_multiprocessor",
                "shared_memory_per_block_optin", "L2_cache_size")
DEVICE = torch.device("cuda", LOCAL_RANK)


def random_model(size: str, base: str, lora_rank: int) -> qwen.Qwen:
    """A model of a published size, made on the device. The adapter's B is random, not zero."""
    dtype = torch.bfloat16
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
    """`count` lengths in [low, high] of that mean: exponential, with a long tail as answers have.
    """
    generator = torch.Generator().manual_seed(0)
    excess = torch.empty(count).exponential_(generator=generator)
    for _ in range(20):                          # cutting the tail lowers the mean: scale it back
        excess *= (mean - low) / excess.clamp(max=high - low).mean()
    return (low + excess).clamp(max=high).round().int().tolist()


def print_figures(what, figures):
    """Prints the figures in a line and returns them, without floors if the card is not an H200."""
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
    """A PackedWeight of random codes and scales."""
    from marlin_fp4 import pack
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(40, 100, (N, K // 16), dtype=torch.uint8, device=DEVICE)
    return pack(codes, scales.view(torch.float8_e4m3fn), torch.ones((), device=DEVICE))


def graph_times(*works):
    """GPU seconds of each work() as a CUDA graph: medians of nine replays."""
    # The graphs take turns, so that changes of the card's clock affect all of them alike.
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
    decode_matmul = functools.partial(decode_matmul_for(DEVICE, kernels),
                                      pdl=torch.cuda.get_device_capability(DEVICE) >= (9, 0))
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


def linears(args: argparse.Namespace) -> dict:
    """The four linears of a layer against cuBLAS, for each number of rows."""
    shapes = fused_shapes(args.model)
    decode = {M: print_figures(f"{M} rows", decode_figures(shapes, M, args.lora_rank, args.kernels))
              for M in args.rows}
    return {"decode": decode}


def weight_bytes(model):
    """Bytes that a decode step reads: linears, adapter, lm_head."""
    frozen = sum(m.weight.nbytes for m in model.modules() if isinstance(m, Linear))
    adapter = model.adapter.working.nbytes if model.adapter else 0
    return frozen + adapter + model.lm_head.nbytes


def kv_read(config, B, prompt, written):
    """Bytes of keys and values that a decode step of B rows reads, after `written` tokens each. The
    rows of a group read their prompt together.
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
    step_seconds = (rollouts.seconds - prefill) / (new - 1)
    floor = (weight_bytes(model) + kv_read(model.config, B, prompt, new / 2)) / COPY
    return {"tokens_s": rollouts.num_tokens / rollouts.seconds, "step_ms": step_seconds * 1e3,
            "floor_ms": floor * 1e3, "floor_of_step": floor / step_seconds,
            "prefill_ms": prefill * 1e3, "preempted": rollouts.preempted}


def rollout(args: argparse.Namespace) -> dict:
    """The sampler, for each number of sequences in --batch."""
    model = random_model(args.model, args.base, args.lora_rank)
    sampler = Sampler(model, args.prompt + args.new, max(args.batch), args.kv_gib)
    figures = {B: print_figures(f"B={B}", load_figures(model, sampler, B, args.prompt, args.new))
               for B in args.batch}
    return {"weight_gb": weight_bytes(model) / 1e9,
            "kv_gib": sampler.engine.kv.nbytes / 2**30, "batch": figures}


def update_flops(config, tokens, scored, pairs, kept_layers):
    """FLOPs of the matmuls of a forward and backward, without the adapter's.

    tokens: computed; scored: predicted; pairs: of a query and a key.
    """
    # Every linear is multiplied in the forward, in the backward (the gradient of x alone: W is
    # frozen) and, in layers that keep no activations, in a second forward. FlashAttention's
    # backward multiplies 2.5 times as much as its forward. The head is multiplied twice.
    c = config
    linears = (c.width * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.width
               + 3 * c.width * c.feed_forward)
    forwards = 2 * c.layers - kept_layers
    attention = 4 * c.heads * c.head_dim * pairs * (forwards + 2.5 * c.layers)
    return 2 * linears * tokens * (forwards + c.layers) + attention + 4 * c.vocab * c.width * scored


def random_learner(args: argparse.Namespace) -> Learner:
    return Learner(random_model(args.model, args.base, args.lora_rank), grpo.LOSSES["dapo"])


def planned(args: argparse.Namespace, learner: Learner, prompt_tokens: int,
            **sizes: int) -> Sampler:
    """The sampler that train.py would make, with its memory plan, which the learner follows too.

    sizes: fields of config.Rollout.
    """
    limits = memory.Limits(args.memory_gib, args.kv_gib, args.micro_batch_tokens)
    return divide_memory(learner, limits, Rollout(**sizes), prompt_tokens, num_held_out=0)


def update(args: argparse.Namespace) -> dict:
    """Learner.update on --prompts groups of eight random answers of --new tokens. Runs twice: the
    first compiles.
    """
    memory.bound(args.memory_gib, DEVICE)
    G, prompt, new = 8, args.prompt, args.new
    B = args.prompts * G
    learner = random_learner(args)
    planned(args, learner, prompt, prompts_per_step=args.prompts, group_size=G, max_new_tokens=new,
            max_rows=128)
    model = learner.model
    questions = [question for question in random_prompts(model, [prompt] * args.prompts)
                 for _ in range(G)]
    answers = random_prompts(model, [new] * B)
    rollouts = Rollouts([Row(question, answer, torch.full((new,), -1.0), True)
                         for question, answer in zip(questions, answers)])
    weights = grpo.token_weights(rollouts.sampled(), learner.loss, new)
    advantages = grpo.group_advantages(torch.arange(B) % 2, G, "group")
    for _ in range(2):
        began = time.perf_counter()
        done = learner.update(Batch(rollouts.rows, advantages), weights, lr=1e-6)
        assert not done.failure, done.failure
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    computed = pairs = 0
    batches = micro_batches(questions, rollouts.completions, learner.micro_batch_tokens)
    for _, batch in batches:
        rows = [questions[b] + rollouts.completions[b] for b in batch]
        computed += len(lay_out(rows, [prompt] * len(rows)).tokens)
        groups = len({id(questions[b]) for b in batch})
        pairs += groups * prompt**2 / 2 + len(batch) * (prompt * new + new**2 / 2)
    flops = update_flops(model.config, computed, B * new, pairs, learner.kept_layers)
    return print_figures(f"N={new}", {
        "seconds": seconds, "tokens_s": B * new / seconds, "tflop_s": flops / seconds / 1e12,
        "floor": flops / TENSOR, "floor_of_seconds": flops / TENSOR / seconds,
        "micro_batches": len(batches), "micro_batch": learner.micro_batch_tokens,
        "kept": learner.kept_layers, "reserved_gib": torch.cuda.max_memory_reserved() / 2**30})


def step(args: argparse.Namespace) -> dict:
    """A training step; with torchrun, a rank's share. Runs twice: the first compiles."""
    memory.bound(args.memory_gib, DEVICE)
    join_ranks(DEVICE)
    G, prompts = args.group_size, args.prompts
    B = prompts * G
    learner = random_learner(args)
    lengths = torch.tensor(drawn_lengths(B, 50, 1024, 300))
    questions = random_prompts(learner.model, torch.randint(64, 257, (prompts,)).tolist())
    advantages = grpo.group_advantages(torch.arange(B) % 2, G, "group")  # none is 0: all rows train
    mine = share(questions)
    limits = Sampling(share(lengths.view(-1, G)).flatten().tolist())
    sampler = planned(args, learner, 256, prompts_per_step=len(mine), group_size=G,
                      max_new_tokens=1024, max_rows=args.max_rows)
    for _ in range(2):
        gather([])                               # all ranks begin together, and
        began = time.perf_counter()
        own = sampler.generate(mine, G, limits, share(range(prompts)))
        rollouts = functools.reduce(operator.add, gather([own]))         # end this together
        sampled = time.perf_counter()
        weights = grpo.token_weights(rollouts.sampled(), learner.loss, 1024)
        done = learner.update(Batch(rollouts.rows, advantages), weights, lr=1e-6)
        assert not done.failure, done.failure
        torch.cuda.synchronize()
        ended = time.perf_counter()
    rows = [row.prompt + row.completion for row in rollouts.rows]
    starts = [len(prompt) for prompt in rollouts.prompts]
    return {"seconds": ended - began, "rollout": sampled - began, "update": ended - sampled,
            "tokens": rollouts.num_tokens, "learner_tokens": sum(map(len, rows)),
            "learner_computed": len(lay_out(rows, starts).tokens),
            "idle": rollouts.idle, "samples": len(rows), "gpus": WORLD,
            "micro_batch": learner.micro_batch_tokens, "kept": learner.kept_layers,
            "kv_gib": sampler.engine.kv.nbytes / 2**30,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            **grpo.summarize(done.sums)}


# Each command, and the defaults of its flags where they are its own.
COMMANDS = {linears: dict(lora_rank=0), rollout: dict(new=512), update: dict(new=4096, prompts=2),
            step: dict(prompts=16)}


def read_flags() -> tuple[Callable, argparse.Namespace]:
    """-> the function of the command, and the flags."""
    parser = argparse.ArgumentParser(usage="bench {step,rollout,update,linears} [flags], --help "
                                     "lists them", description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {function.__name__: function for function in COMMANDS}
    add = parser.add_argument
    add("command", choices=commands)
    add("--model", choices=SIZES, default="7b", type=lambda name: name.removeprefix("random:"))
    add("--base", choices=nvfp4.FORMATS, default="nvfp4")
    add("--kernels", choices=("hopper", "portable"), help="decode kernels (default: by the GPU)")
    add("--lora-rank", type=int, default=32, help="0: no adapter (default: 32; linears: 0)")
    add("--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256],
        help="linears: numbers of rows of x")
    add("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64, 256],
        help="rollout: sequences decoded at a time (default: 1,8,32,64,256)")
    add("--prompt", type=within(int, 1, 1e6), default=256, help="rollout, update: tokens per "
        "prompt (default: 256)")
    add("--new", type=within(int, 2, 1e6), help="rollout, update: tokens per answer "
        "(default: 512, 4096)")
    add("--prompts", type=within(int, 1, 1e6), help="step, update: problems (default: 16, 2)")
    add("--group-size", type=within(int, 2, 1e6), default=8, help="step: answers per problem "
        "(default: 8)")
    add("--max-rows", type=within(int, 1, 32768), help="step: answers decoded at a time (default: "
        "by the memory plan)")
    add("--memory-gib", type=float, help="step, update: GPU memory for this process, in GiB")
    add("--kv-gib", type=within(float, 1e-9, 1e9), help="size of the KV cache, in GiB (default: "
        "by the memory plan; rollout: what is needed, at most half of the free memory)")
    add("--micro-batch-tokens", type=within(int, 1, 2e9), help="tokens per forward and backward "
        "pass (default: by the memory plan)")
    function = commands[parser.parse_args().command]
    parser.set_defaults(**COMMANDS[function])
    args = parser.parse_args()
    if function in (update, step) and args.lora_rank < 1:
        parser.error(f"--lora-rank {args.lora_rank}: the learner trains an adapter")
    return function, args


def main() -> None:
    function, args = read_flags()
    with env.one_line("bench"):
        if not torch.cuda.is_available():
            raise UserError("needs a GPU, and torch sees none")
        choose_device("cuda", args.model)
        if args.kernels:
            ON_GPU["GraphEngine"] = functools.partial(ON_GPU["GraphEngine"], kernels=args.kernels)
        gpu = torch.cuda.get_device_name()
        say(f"on {gpu}")
        figures = function(args)
        properties = torch.cuda.get_device_properties(DEVICE)
        sizes = {name: getattr(properties, name, None) for name in SIZES_OF_GPU}  # not in all torch
        say(json.dumps({**vars(args), **env.provenance(gpu), "gpu": sizes, **figures}))


if __name__ == "__main__":
    main()
