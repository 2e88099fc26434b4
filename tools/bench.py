"""
Measures the speeds that docs/ reports; needs a GPU. Each command ends with one line of JSON.

    python -m tools.bench linears --model 7b [--lora-rank 32]      a layer's linears against cuBLAS
    python -m tools.bench rollout --model 7b --base nvfp4 [--batch 1,8,32,64,256]        tokens/s
    python -m tools.bench rollout --spread --batch 128,32,16       many lengths, by slots
    python -m tools.bench train --model 7b --base nvfp4            the learner alone
    python -m tools.bench step --model 32b --memory-gib 48         a whole GRPO step
    torchrun --nproc-per-node 2 -m tools.bench step --model 7b     the same on several GPUs

linears. A CUDA graph that walks through more weights than the L2 cache holds, replayed; the
median of the replays. `chain` is the four linears of a layer one after the other, as a step has
them, launched with programmatic dependent launch; `alone` is the sum of the four, each in a graph
of its own without it. Slabs are written, not summed: the kernels that finish a linear do that.
Many rows are those of lora.Linear, which expands W and multiplies, beside cuBLAS on a W that is
there already, same types: fp32 results forward, bf16 for dX.

rollout. The whole sampler on random weights and a live random adapter: B sequences as B/8 prompts
of 8 samples, end ids ignored, log-probs returned; tokens/s count prefill and the host's work.

step. train.py's own sampler, memory plan and Learner.update. Prompts of 64 to 256 tokens,
completions of 50 to 1,024, mean 300; rewards alternate, so that every row is trained on.

Not here: the search for marlin_fp4.TUNED, made by `bench.py tune` at 5814e75.

Shapes: M rows, N out_features, K in_features, R rows of LoRA's A.
"""
import argparse
import functools
import json
import math
import operator
import sys
import time

import torch

import grpo
import memory
import model as qwen
import nvfp4
from attention import lay_out
from learner import Learner
from lora import Adapter, Linear
from run import LOCAL_RANK, RANK, WORLD, all_sum, gather, join, say, share
from sampler import Sampling, sampler_for
from train import make_sampler

SIZES = {  # D, F, layers, H, KV, V, tied: config.json of Qwen2.5-*-Instruct
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False)}
LIVE_VOCAB = 151665                              # of all sizes: ids that the tokenizer has
PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}              # each has a LoRA A of its own
COPY = 4.3e12                                    # bytes/s of an H200's copy, and
TENSOR = 790e12                                  # FLOP/s of its 8192^3 bf16 matmul, measured
TRAFFIC = 400e6                                  # bytes of weights per graph: 7 times the L2
BYTES = 0.5625                                   # of an NVFP4 weight
DEVICE = torch.device("cuda", LOCAL_RANK)


# -------------------------------------------------------------------------------------------------
# Random models

def random_model(size, base, dtype):
    """Random weights of a published size, made on the device: to measure speed and memory."""
    config = qwen.ModelConfig(*SIZES[size])
    generator = torch.Generator(DEVICE).manual_seed(0)

    def get(name, *shape):
        if "norm" in name:
            return torch.ones(shape, device=DEVICE, dtype=dtype)
        w = torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)
        return w * shape[-1] ** -0.5

    def frozen(names, parts, k):
        return nvfp4.freeze([get(name, n, k) for name, n in zip(names, parts)], base, dtype)

    model = qwen.build(config, get, frozen, dtype, f"random-{size}")
    model.live_vocab = min(config.vocab, LIVE_VOCAB)
    return model


def live_model(args):
    """random_model, with an adapter whose B is random too, not zero, if --lora-rank is not 0."""
    torch.manual_seed(0)
    model = random_model(args.model, args.base, getattr(torch, args.dtype))
    if args.lora_rank:
        adapter = Adapter(model, rank=args.lora_rank, alpha=args.lora_rank)
        adapter.master.data[adapter.b_start:].normal_(0, 0.02)
        adapter.sync()
    return model


def graph_sampler(model, max_length, max_rows):
    from decode import GraphEngine               # the engine room: Triton
    return sampler_for(GraphEngine, model, max_length, max_rows)


def random_prompts(model, lengths):
    return [torch.randint(model.live_vocab, (n,)).tolist() for n in lengths]


def drawn_lengths(count, low, high, mean, seed=0):
    """`count` lengths in [low, high] of that mean: exponential, a long tail as answers have."""
    generator = torch.Generator().manual_seed(seed)
    excess = torch.empty(count).exponential_(generator=generator)
    for _ in range(20):                          # cutting the tail lowers the mean: scale it back
        excess *= (mean - low) / excess.clamp(max=high - low).mean()
    return (low + excess).clamp(max=high).round().int().tolist()


def show(what, figures):
    """Prints a line of them, and hands them on."""
    words = [f"{name} {value if isinstance(value, dict) else f'{value:,.5g}'}"
             for name, value in figures.items()]
    print(f"{what:10}", ", ".join(words), flush=True)
    return figures


# -------------------------------------------------------------------------------------------------
# Clocks

def captured(work):
    """A function that replays a CUDA graph of work()."""
    with torch.cuda.stream(torch.cuda.Stream()): # compiles and warms up outside the capture
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return graph.replay


def medians(runs, replays):
    """GPU seconds of each of several functions, called in turn: the card's clock meets them all."""
    times = torch.zeros(replays, len(runs))
    for i in range(replays):
        for j, run in enumerate(runs):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[i, j] = start.elapsed_time(end) / 1e3
    return times.median(0).values.tolist()


def graph_time(work, replays=9):
    return medians([captured(work)], replays)[0]


def seconds_of(work, repeats):
    """Median wall time of work() after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]


# -------------------------------------------------------------------------------------------------
# linears

def fused_shapes(size):
    """name -> (N, K) of the four fused linears of a layer."""
    c = qwen.ModelConfig(*SIZES[size])
    heads = (c.heads + 2 * c.kv_heads) * c.head_dim
    return {"qkv": (heads, c.width), "o": (c.width, c.heads * c.head_dim),
            "gate_up": (2 * c.feed_forward, c.width), "down": (c.width, c.feed_forward)}


def random_weights(N, K, count):
    """`count` different packed weights: random codes, random normal E4M3 scales."""
    import marlin_fp4
    weights = []
    for _ in range(count):
        codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(40, 100, (N, K // 16), dtype=torch.uint8, device=DEVICE)
        one = torch.ones((), device=DEVICE)
        weights.append(marlin_fp4.pack(codes, scales.view(torch.float8_e4m3fn), one))
    return weights


def random_bf16(*shape):
    return torch.randn(shape, device=DEVICE).bfloat16()


def copies(N, K, bytes_per_weight):
    return max(2, math.ceil(TRAFFIC / (N * K * bytes_per_weight)))


def decode_figures(shapes, M, rank):
    """Of decode_matmul with M rows, a layer."""
    from marlin_fp4 import decode_matmul
    read = sum(N * K * BYTES for N, K in shapes.values())
    layers = math.ceil(TRAFFIC / read)
    operands = {}
    for name, (N, K) in shapes.items():
        x = random_bf16(M, K)
        weights = random_weights(N, K, max(layers, copies(N, K, BYTES)))
        lora = [random_bf16(PARTS[name] * rank, K) if rank else None for _ in weights]
        operands[name] = x, weights, lora, decode_matmul(x, weights[0], lora[0]).sums

    def one(name, i, pdl):
        x, weights, lora, slabs = operands[name]
        decode_matmul(x, weights[i], lora[i], slabs=slabs, pdl=pdl)

    chain = graph_time(lambda: [one(name, i, True) for i in range(layers) for name in shapes])
    chain /= layers
    each = {}
    for name in shapes:
        count = len(operands[name][1])
        each[name] = graph_time(lambda: [one(name, i, False) for i in range(count)]) / count
    cublas = cublas_time(shapes, M)
    floor = sum(max((N * K * BYTES + 2 * M * (N + K)) / COPY, 2 * M * N * K / TENSOR)
                for N, K in shapes.values())     # the later of reading W and multiplying
    return {"chain_us": chain * 1e6, "alone_us": sum(each.values()) * 1e6,
            "floor_us": floor * 1e6, "cublas_us": cublas * 1e6, "cublas_of_chain": cublas / chain,
            "floor_of_chain": floor / chain, "chain_gbs": read / chain / 1e9,
            "each_us": {name: round(seconds * 1e6, 2) for name, seconds in each.items()}}


def cublas_time(shapes, M):
    """Seconds of x @ W.T in bf16, by cuBLAS, summed over the linears."""
    total = 0.0
    for N, K in shapes.values():
        weights = [random_bf16(N, K) for _ in range(copies(N, K, 2))]
        x = random_bf16(M, K)
        total += graph_time(lambda: [x @ w.T for w in weights]) / len(weights)
    return total


def large_figures(shapes, M):
    """Of lora.Linear's forward and dX, and the same products by cuBLAS, a layer."""
    sums = torch.zeros(4)
    for name, (N, K) in shapes.items():
        linear = Linear(random_weights(N, K, 1)[0], [name], (N,))
        dense = linear.weight.dequantize()
        x = random_bf16(M, K)
        dy = random_bf16(M, N)
        sums += torch.tensor(medians([
            captured(lambda: linear.product(x)),
            captured(lambda: linear.product_backward(x, dy, False)),
            captured(lambda: torch.mm(x, dense.T, out_dtype=torch.float32)),
            captured(lambda: dy @ dense)], 15))
    forward, dx, cublas_forward, cublas_dx = sums.tolist()
    return {"forward_us": forward * 1e6, "dx_us": dx * 1e6,
            "forward_of_cublas": cublas_forward / forward, "dx_of_cublas": cublas_dx / dx}


def dequantize_figures(shapes):
    """GB/s read and written by dequantize, and by a copy."""
    seconds = moved = 0
    for N, K in shapes.values():
        weights = random_weights(N, K, copies(N, K, BYTES))
        outs = [torch.empty(N, K, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        work = lambda: [w.dequantize(outs[i % 2]) for i, w in enumerate(weights)]
        seconds += graph_time(work) / len(weights)
        moved += N * K * (BYTES + 2)
    a = random_bf16(2**29)
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / graph_time(lambda: torch.mul(a, 1, out=b))
    return {"dequantize_gbs": moved / seconds / 1e9, "copy_gbs": copy / 1e9}


def linears(args):
    shapes = fused_shapes(args.model)
    result = {"model": args.model, "lora_rank": args.lora_rank,
              "device": torch.cuda.get_device_name(), "decode": {}, "large": {}}
    for M in args.rows:
        result["decode"][M] = show(f"{M} rows", decode_figures(shapes, M, args.lora_rank))
    for M in args.large_rows:
        result["large"][M] = show(f"{M} rows", large_figures(shapes, M))
    print(json.dumps(result | show("rates", dequantize_figures(shapes))))


# -------------------------------------------------------------------------------------------------
# rollout

def weight_bytes(model):
    """Bytes that every decode step reads: linears, adapter, lm_head."""
    frozen = sum(m.weight.nbytes for m in model.modules() if isinstance(m, Linear))
    adapter = model.adapter.working.nbytes if model.adapter else 0
    return frozen + adapter + model.lm_head.nbytes


def fixed_load(model, sampler, B, prompt, new):
    """B completions of `new` tokens -> figures."""
    G = min(B, 8)
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


def spread_load(sampler, prompts, rows):
    """128 completions of 50 to 1,024 tokens, mean 200, through `rows` slots -> figures.

    times_packed: against as many tokens in equal lengths, where every slot is busy to the end.
    """
    limits = drawn_lengths(128, 50, 1024, 200)
    for _ in range(2):                           # the first compiles and captures
        spread = sampler.generate(prompts, 8, Sampling(limits))
        packed = sampler.generate(prompts[:max(1, rows // 8)], min(8, rows),
                                  Sampling(round(sum(limits) / 128)))
    ratio = spread.seconds / spread.num_tokens / (packed.seconds / packed.num_tokens)
    return {"tokens_s": spread.num_tokens / spread.seconds, "idle": spread.idle,
            "seconds": spread.seconds, "times_packed": ratio}


def rollout(args):
    model = live_model(args)
    result = {"model": args.model, "base": args.base, "dtype": args.dtype,
              "lora_rank": args.lora_rank, "prompt": args.prompt, "new": args.new,
              "device": torch.cuda.get_device_name(), "weight_gb": weight_bytes(model) / 1e9,
              "batch": {}}
    if args.spread:
        prompts = random_prompts(model, [args.prompt] * 16)
        for rows in args.batch:
            sampler = graph_sampler(model, args.prompt + 1024, rows)
            result["batch"][rows] = show(f"{rows} slots", spread_load(sampler, prompts, rows))
    else:
        sampler = graph_sampler(model, args.prompt + args.new, max(args.batch))
        for B in args.batch:
            load = fixed_load(model, sampler, B, args.prompt, args.new)
            result["batch"][B] = show(f"B={B}", load)
    print(json.dumps(result))


# -------------------------------------------------------------------------------------------------
# train

def matmul_ceiling():
    """FLOP/s of an 8192^3 bf16 product on random data: what this GPU gives today."""
    a, b = random_bf16(2, 8192, 8192)
    return 2 * 8192**3 / seconds_of(lambda: a @ b, 10)


def train(args):
    """Forward, recomputation and backward of packed sequences of about 512 tokens."""
    memory.bound(args.memory_gib, DEVICE)
    ceiling = matmul_ceiling()
    model = live_model(args)
    G = args.group_size
    sizes = drawn_lengths(args.tokens // 512 // G * G, 256, 1024, 512)
    prompts = random_prompts(model, [min(sizes[i:i + G]) // 3 for i in range(0, len(sizes), G)])
    starts = [len(prompts[i // G]) for i in range(len(sizes))]         # prompts: not scored
    answers = random_prompts(model, [size - start for size, start in zip(sizes, starts)])
    rows = [prompts[i // G] + answer for i, answer in enumerate(answers)]
    tokens = sum(sizes)
    computed = len(lay_out(rows, starts)[0])
    torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(
        lambda: model.token_logprobs(rows, starts, kept=args.kept)[0].mean().backward(), 3)
    weights = sum(linear.weight.N * linear.weight.K for linear in model.adapter.linears)
    again = 1 - min(args.kept, len(model.layers)) / len(model.layers)  # blocks run a second time
    head = 4 * model.live_vocab * model.config.width * (tokens - sum(starts))
    flops = (4 + 2 * again) * weights * computed + head
    print(json.dumps({
        "model": args.model, "base": args.base, "dtype": args.dtype, "lora_rank": args.lora_rank,
        "group_size": G, "kept": args.kept, "tokens": tokens, "computed": computed,
        "tokens_s": tokens / seconds, "computed_s": computed / seconds,
        "share_of_matmul_ceiling": flops / seconds / ceiling, "ceiling_tflops": ceiling / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30}))


# -------------------------------------------------------------------------------------------------
# step

class Step:
    """A GRPO step on random weights; under torchrun, this rank's share of it."""

    def __init__(self, args):
        G = args.group_size
        self.model = live_model(args)
        self.learner = Learner(self.model, grpo.LOSSES["dapo"])
        self.places = share(range(args.prompts))
        self.group_size = G
        self.lengths = torch.tensor(drawn_lengths(args.prompts * G, 50, 1024, 300))
        self.prompts = random_prompts(self.model, torch.randint(64, 257, (args.prompts,)).tolist())
        rows = min(len(self.places) * G, 256)
        plan = argparse.Namespace(**vars(args), max_prompt_tokens=256, max_new_tokens=1024,
                                  max_rows=rows)
        self.sampler = make_sampler(plan, self.model, self.learner)
        for n in range(1, rows + 1):             # a graph for every number of rows
            if self.sampler.engine.batch_size(n) == n:
                self.sampler.generate([[1, 2]] * n, 1, Sampling(2))
        rewards = torch.arange(args.prompts * G) % 2
        live = torch.ones(args.prompts * G, dtype=torch.bool)
        self.advantages = grpo.group_advantages(rewards, G)
        self.weights = grpo.token_weights(self.lengths, live, self.learner.loss, 1024)

    def sample(self, part):
        """part: of every length."""
        mine = [p * self.group_size + g for p in self.places for g in range(self.group_size)]
        limits = (self.lengths[mine] * part).ceil().int().tolist()
        return self.sampler.generate(share(self.prompts), self.group_size, Sampling(limits),
                                     self.places)

    def update(self, rollouts):
        """-> sums for grpo.summarize."""
        update = self.learner.update(everybody(rollouts), self.advantages, self.weights, lr=1e-6)
        assert not update.problem, update.problem
        torch.cuda.synchronize()
        return update.sums

    def difference(self, rollouts):
        """Relative distance of the ranks' summed gradient from the one that a rank computes."""
        of_step = everybody(rollouts), self.advantages, self.weights
        adapter = self.model.adapter
        adapter.zero_grad()
        self.learner.gradient(*of_step, 0, 1)
        alone = adapter.master.grad.clone()
        adapter.zero_grad()
        self.learner.gradient(*of_step, RANK, WORLD)
        gather([])                               # see run.py: before a big all_sum
        return ((all_sum(adapter.master.grad) - alone).norm() / alone.norm()).item()


def everybody(rollouts):
    return functools.reduce(operator.add, gather([rollouts])[0])


def step(args):
    """Times a step after one of an eighth of its tokens, which compiles; the slowest rank's."""
    memory.bound(args.memory_gib, DEVICE)
    torch.cuda.set_device(DEVICE)
    join(DEVICE)
    work = Step(args)
    for part in (1 / 8, 1.0):
        gather([])                               # all ranks begin together
        began = time.perf_counter()
        rollouts = work.sample(part)
        sampled = time.perf_counter()
        sums = work.update(rollouts)
        done = time.perf_counter()
    rows = [prompt + answer for prompt, answer in zip(rollouts.prompts, rollouts.completions)]
    computed = len(lay_out(rows, [len(prompt) for prompt in rollouts.prompts])[0])
    seconds = done - began, sampled - began, done - sampled
    counts = rollouts.num_tokens, sum(map(len, rows)), computed
    every = torch.tensor(gather([seconds + counts])[0], dtype=torch.float64)
    slowest = every[:, :3].amax(0).tolist()
    total = every[:, 3:].sum(0).int().tolist()
    names = "seconds", "rollout", "update", "tokens", "learner_tokens", "learner_computed"
    figures = dict(zip(names, slowest + total))
    if WORLD > 1:
        figures["gradient_difference"] = work.difference(rollouts)
    say(json.dumps({
        "model": args.model, "base": args.base, "dtype": args.dtype, "gpus": WORLD,
        "samples": len(work.lengths), **figures, "idle": rollouts.idle,
        "micro_batch": work.learner.micro_batch_tokens, "kept": work.learner.kept_blocks,
        "memory_gib": args.memory_gib, "kv_gib": work.sampler.engine.kv.nbytes / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30, **grpo.summarize(sums)}))


# -------------------------------------------------------------------------------------------------
# The command line

def batch_sizes(text):
    sizes = [int(size) for size in text.split(",")]
    if any(size < 1 or size > 8 and size % 8 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: more than 8 sequences come as groups of 8")
    return sizes


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for run in (linears, rollout, train, step):
        commands.add_parser(run.__name__, allow_abbrev=False).set_defaults(run=run)

    def add(names, flag, **options):
        for name in names.split():
            commands.choices[name].add_argument(flag, **options)

    three = "rollout train step"
    add("linears rollout train step", "--model", choices=SIZES, default="7b")
    add("linears", "--lora-rank", type=int, default=0, help="of each part's adapter; 0: none")
    add("linears", "--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256])
    add("linears", "--large-rows", type=int, nargs="*", default=[1024, 4096, 16384])
    add(three, "--lora-rank", type=int, default=32, help="of each part's adapter")
    add(three, "--base", choices=list(nvfp4.FORMATS), default="nvfp4", help="of the linears")
    add(three, "--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="of inputs")
    add("rollout", "--batch", type=batch_sizes, default=[1, 8, 32, 64, 256], help="as 1,8,32")
    add("rollout", "--spread", action="store_true", help="many lengths; --batch: slots")
    add("rollout", "--prompt", type=int, default=256, help="tokens of a prompt")
    add("rollout", "--new", type=int, default=512, help="tokens of a completion, at least 2")
    add("train step", "--memory-gib", type=float, help="bound of the whole process")
    add("train", "--tokens", type=int, default=16384, help="of the rows, shared prompts counted")
    add("train", "--group-size", type=int, default=1, help="rows that share a third of each")
    add("train", "--kept", type=int, default=0, help="blocks that keep their activations")
    add("step", "--group-size", type=int, default=8, help="samples a problem, at least 2")
    add("step", "--prompts", type=int, default=16, help="problems")
    add("step", "--kv-gib", type=float, help="of the KV cache (default: as memory.py plans)")
    add("step", "--micro-batch-tokens", type=int, help="(default: as memory.py plans)")
    return parser.parse_args()


def main():
    args = parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench: measures a GPU and there is none")
    if args.command in ("train", "step") and args.lora_rank < 1:
        sys.exit(f"bench: --lora-rank {args.lora_rank}: the learner trains an adapter")
    args.run(args)


if __name__ == "__main__":
    main()
