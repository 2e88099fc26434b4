"""
Measures the speeds that docs/ reports. Every subcommand ends with one line of JSON.

    python bench.py linears --model 7b [--lora-rank 32]     the four fused linears of a layer against cuBLAS bf16
    python bench.py rollout --model 7b --base nvfp4 [--lora-rank 32] [--batch 1,8,32,64,256]     tokens/s of sampler.py
    python bench.py rollout --spread --batch 128,32,16      the same with completions of many lengths, by slots
    python bench.py train --model 7b --base nvfp4           learner tokens/s, share of the matmul ceiling, peak memory
    python bench.py step --model 32b --memory-gib 48        a whole GRPO step and its split; also under torchrun
    python bench.py tune                                    prints the lines of marlin_fp4.TUNED

Method: a CUDA graph that walks through more weights than the L2 cache holds, replayed; the median of the replays.
`chain` is the four linears of a layer one after the other, as a step has them, launched with programmatic dependent
launch; `alone` is the sum of the four, each in a graph of its own without it. Slabs are written, their sum is not
taken: the kernels that finish a linear do that (decode.py).
`rollout` runs the whole sampler on random weights and a live random adapter: prompt 256, 512 new tokens, end ids
ignored, B sequences as B/8 prompts of 8 samples, log-probs returned; tokens/s count prefill and the host's work.
With --spread instead 128 completions of 50 to 1,024 tokens through fewer and fewer slots; --head nvfp4 rounds lm_head.

Shapes: M rows, N out_features, K in_features, R rows of LoRA's A.
"""
import argparse
import functools
import json
import math
import operator
import time

import torch

import grpo
import marlin_fp4
import memory
import nvfp4
import process
from decode import FIELDS
from lora import Adapter
from marlin_fp4 import Config, PackedWeight, decode_matmul, matmul
from model import SIZES, ModelConfig, lay_out, random_model
from sampler import Sampler, quantize_head

PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}                  # each has a LoRA A of its own
HBM, TENSOR = 4.3e12, 790e12                                         # an H200's copy and 8192^3 bf16 matmul, measured
TRAFFIC = 400e6                                                      # bytes of weights per graph: 7 times the L2


def fused_shapes(model):
    """name -> (N, K) of the four fused linears of a layer."""
    c = ModelConfig.of_size(model)
    return {"qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.width), "o": (c.width, c.heads * c.head_dim),
            "gate_up": (2 * c.feed_forward, c.width), "down": (c.width, c.feed_forward)}


def random_weights(N, K, count, device="cuda"):
    """`count` different packed weights: random codes, random normal E4M3 scales."""
    weights = []
    for _ in range(count):
        tiles = -(-N // 128), -(-K // 128), 128
        codes = torch.randint(-2**15, 2**15, (*tiles, 32), dtype=torch.int16, device=device)
        scale = torch.randint(40, 100, (*tiles, 8), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        ones, order = torch.ones(N, device=device), marlin_fp4.ORDERS[torch.bfloat16]
        words = marlin_fp4._to_scale_words(scale.float(), order)
        weights.append(PackedWeight(N, K, codes, words, ones, ones * 2**order.power, True, torch.bfloat16))
    return weights


def captured(work):
    """A function that replays a CUDA graph of work()."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):                                  # compiles and warms up outside the capture
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return graph.replay


def medians(runs, replays):
    """GPU seconds of each of several functions, called in turn: what the card's clock does, it does to all of them."""
    times = torch.zeros(replays, len(runs))
    for i in range(replays):
        for j, run in enumerate(runs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times[i, j] = start.elapsed_time(end) / 1e3
    return times.median(0).values.tolist()


def graph_time(work, replays=9):
    """Seconds of one replay of a CUDA graph of work(); the median."""
    return medians([captured(work)], replays)[0]


def copies(N, K, bytes_per_weight):
    return max(2, math.ceil(TRAFFIC / (N * K * bytes_per_weight)))


# -----------------------------------------------------------------------------
# linears

def layers_of(shapes):
    return math.ceil(TRAFFIC / sum(N * K * 0.5625 for N, K in shapes.values()))


def decode_times(shapes, M, rank):
    """Seconds per layer: (chain, alone, {name: alone}) of decode_matmul with M rows."""
    layers = layers_of(shapes)
    x = {name: torch.randn(M, K, device="cuda").bfloat16() for name, (_, K) in shapes.items()}
    weights = {name: random_weights(N, K, max(layers, copies(N, K, 0.5625))) for name, (N, K) in shapes.items()}
    lora = {name: [torch.randn(PARTS[name] * rank, K, device="cuda").bfloat16() if rank else None
                   for _ in weights[name]] for name, (_, K) in shapes.items()}
    slabs = {name: decode_matmul(x[name], weights[name][0], lora[name][0]).sums for name in shapes}

    def one(name, i, pdl):
        decode_matmul(x[name], weights[name][i], lora[name][i], slabs=slabs[name], pdl=pdl)

    def layer_chain():
        for i in range(layers):
            for name in shapes:
                one(name, i, pdl=True)

    chain = graph_time(layer_chain) / layers
    alone = {}
    for name in shapes:
        count = len(weights[name])
        alone[name] = graph_time(lambda: [one(name, i, pdl=False) for i in range(count)]) / count
    return chain, sum(alone.values()), alone


def cublas_times(shapes, M):
    """Seconds of x @ W.T in bf16 for each linear, by cuBLAS."""
    times = {}
    for name, (N, K) in shapes.items():
        weights = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies(N, K, 2))]
        x = torch.randn(M, K, device="cuda").bfloat16()
        times[name] = graph_time(lambda: [x @ w.T for w in weights]) / len(weights)
    return times


def floor_time(shapes, M):
    """The later of reading the weights and multiplying, summed over the linears."""
    return sum(max((N * K * 0.5625 + 2 * M * (N + K)) / HBM, 2 * M * N * K / TENSOR) for N, K in shapes.values())


def large_times(shapes, M):
    """Seconds of (forward, dX) through matmul and of the same products by cuBLAS, bf16 out, summed over the linears."""
    sums = torch.zeros(4)
    for N, K in shapes.values():
        weight, = random_weights(N, K, 1)
        dense = weight.dequantize()
        x, dy = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(M, N, device="cuda").bfloat16()
        leaf = x.clone().requires_grad_()
        forward, both, *cublas = medians([
            captured(lambda: matmul(x, weight, torch.bfloat16)),
            captured(lambda: torch.autograd.grad(matmul(leaf, weight, torch.bfloat16), leaf, dy)),
            captured(lambda: x @ dense.T), captured(lambda: dy @ dense)], 15)
        sums += torch.tensor([forward, both - forward, *cublas])
    return sums.tolist()


def dequantize_rate(shapes):
    """(bytes per second of dequantize, of a copy kernel), both counting bytes read and written."""
    seconds = moved = 0
    for N, K in shapes.values():
        weights = random_weights(N, K, copies(N, K, 0.5625))
        outs = [torch.empty(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        work = lambda: [w.dequantize(out=outs[i % 2]) for i, w in enumerate(weights)]
        seconds += graph_time(work) / len(weights)
        moved += N * K * 2.5625
    a = torch.randn(2**29, device="cuda").bfloat16()
    b = torch.empty_like(a)
    return moved / seconds, 2 * a.nbytes / graph_time(lambda: torch.mul(a, 1, out=b))


def linears(args):
    shapes = fused_shapes(args.model)
    weight_bytes = sum(N * K * 0.5625 for N, K in shapes.values())
    result = {"model": args.model, "lora_rank": args.lora_rank, "device": torch.cuda.get_device_name(), "decode": {},
              "large": {}}
    print(f"{args.model}, one layer, LoRA rank {args.lora_rank}: us\n"
          f"{'M':>5} {'chain':>7} {'alone':>7} {'cuBLAS':>7} {'ratio':>6} {'GB/s':>6} {'floor':>7} {'share':>6}")
    for M in args.rows:
        chain, alone, each = decode_times(shapes, M, args.lora_rank)
        cublas, floor = cublas_times(shapes, M), floor_time(shapes, M)
        ratio, rate = sum(cublas.values()) / chain, weight_bytes / chain / 1e9
        print(f"{M:5} {chain * 1e6:7.1f} {alone * 1e6:7.1f} {sum(cublas.values()) * 1e6:7.1f} {ratio:6.2f} {rate:6.0f} "
              f"{floor * 1e6:7.1f} {floor / chain:6.1%}   " + " ".join(f"{n} {t * 1e6:.1f}" for n, t in each.items()))
        result["decode"][M] = {"chain_us": chain * 1e6, "alone_us": alone * 1e6, "floor_us": floor * 1e6,
                               "cublas_us": sum(cublas.values()) * 1e6,
                               "each_us": {n: t * 1e6 for n, t in each.items()}}
    for M in args.large_rows:
        forward, backward, cublas_forward, cublas_backward = large_times(shapes, M)
        print(f"M={M}: forward {forward * 1e6:.0f} us, {cublas_forward / forward:.1%} of cuBLAS; "
              f"dX {backward * 1e6:.0f} us, {cublas_backward / backward:.1%} of cuBLAS")
        result["large"][M] = {"forward_us": forward * 1e6, "dx_us": backward * 1e6,
                              "forward_of_cublas": cublas_forward / forward, "dx_of_cublas": cublas_backward / backward}
    result["dequantize_gbs"], result["copy_gbs"] = (rate / 1e9 for rate in dequantize_rate(shapes))
    print(f"dequantize {result['dequantize_gbs']:.0f} GB/s, a copy {result['copy_gbs']:.0f} GB/s")
    print(json.dumps(result))


# -----------------------------------------------------------------------------
# rollout

def weight_bytes(model):
    """Bytes that every decode step reads: linears, adapter, lm_head."""
    linears = [linear.weight for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    frozen = sum(t.nbytes for w in linears for t in ((w.codes, w.scales) if isinstance(w, PackedWeight) else w.tensors))
    head = model.packed_head
    head_bytes = head.codes.nbytes + head.scales.nbytes if head else model.lm_head.nbytes
    return frozen + (model.adapter.working.nbytes if model.adapter else 0) + head_bytes


def kv_bytes(model, prompts, sequences, prompt, new):
    """Bytes of keys and values that a step in the middle of the rollouts reads, a shared prompt once."""
    c = model.config
    return c.layers * 2 * c.kv_heads * c.head_dim * 2 * (prompts * prompt + sequences * new / 2)


def live_model(args):
    """Random weights of a published size; if --lora-rank is not 0, an adapter whose B is random too, not zero."""
    torch.manual_seed(0)
    device = torch.device("cuda", process.LOCAL_RANK)
    model = random_model(args.model, args.base, device, getattr(torch, args.dtype))
    if args.lora_rank:
        adapter = Adapter(model, rank=args.lora_rank, alpha=args.lora_rank)
        adapter.master.data[adapter.b_start:].normal_(0, 0.02)
        adapter.sync()
    return model


def spread_load(sampler, prompts, G, rows):
    """Completions of 50 to 1,024 tokens, mean 200, through `rows` slots, against as many tokens at full occupancy.

    That is: equal lengths, so that every slot is busy to the end. -> tokens/s, share of idle slots, ratio of the times.
    """
    B = len(prompts) * G
    limits = drawn_lengths(B, 50, 1024, 200)
    for _ in range(2):                                               # the first compiles and captures
        spread = sampler.generate(prompts, G, limits)
        packed = sampler.generate(prompts[:max(1, rows // G)], min(G, rows), round(sum(limits) / B))
    return {"tokens_s": spread.num_tokens / spread.seconds, "idle": spread.idle, "seconds": spread.seconds,
            "times_packed": spread.seconds / (packed.seconds * spread.num_tokens / packed.num_tokens)}


def rollout(args):
    model = live_model(args)
    if args.head == "nvfp4":
        quantize_head(model)
    result = {"model": args.model, "base": args.base, "dtype": args.dtype, "head": args.head,
              "lora_rank": args.lora_rank, "prompt": args.prompt, "new": args.new,
              "device": torch.cuda.get_device_name(), "weight_gb": weight_bytes(model) / 1e9, "batch": {}}
    if args.spread:
        prompts = torch.randint(model.live_vocab, (16, args.prompt)).tolist()
        print(f"{args.model} {args.base}, 128 completions of 50 to 1,024 tokens, mean 200, from 16 prompts")
        for rows in args.batch:
            load = result["batch"][rows] = spread_load(Sampler(model, args.prompt + 1024, rows), prompts, 8, rows)
            print(f"{rows:5} slots: {load['tokens_s']:9,.0f} tokens/s, {load['seconds']:.2f} s, idle "
                  f"{load['idle']:.1%}, {load['times_packed']:.2f} x packed", flush=True)
        print(json.dumps(result))
        return
    sampler = Sampler(model, args.prompt + args.new, max_rows=max(args.batch))
    print(f"{args.model} {args.base} {args.dtype}, LoRA rank {args.lora_rank}, prompt {args.prompt}, {args.new} new "
          f"tokens\n{'B':>5} {'tokens/s':>9} {'ms/step':>8} {'floor':>7} {'share':>6} {'prefill ms':>11}")
    for B in args.batch:
        G = min(B, 8)
        assert B % G == 0, f"--batch {B}: more than 8 sequences come as groups of 8"
        prompts = torch.randint(model.live_vocab, (B // G, args.prompt)).tolist()
        sampler.generate(prompts, G, max_new_tokens=2)               # compiles and captures
        prefill = sampler.generate(prompts, G, max_new_tokens=1).seconds               # and one step
        rollouts = sampler.generate(prompts, G, max_new_tokens=args.new)
        step = (rollouts.seconds - prefill) / (args.new - 1)
        floor = (weight_bytes(model) + kv_bytes(model, B // G, B, args.prompt, args.new)) / HBM
        rate = rollouts.num_tokens / rollouts.seconds
        step, floor, prefill = step * 1e3, floor * 1e3, prefill * 1e3
        print(f"{B:5} {rate:9,.0f} {step:8.3f} {floor:7.3f} {floor / step:6.1%} {prefill:11.1f}", flush=True)
        result["batch"][B] = {"tokens_s": rate, "step_ms": step, "floor_ms": floor, "prefill_ms": prefill}
    print(json.dumps(result))


# -----------------------------------------------------------------------------
# train and step

def drawn_lengths(count, low, high, mean, seed=0):
    """`count` lengths in [low, high] of the given mean: exponential and cut at `high`, a long tail as answers have."""
    generator = torch.Generator().manual_seed(seed)
    excess = torch.empty(count).exponential_(generator=generator)
    for _ in range(20):                                              # cutting the tail lowers the mean: scale it back
        excess *= (mean - low) / (excess.clamp(max=high - low)).mean()
    return (low + excess).clamp(max=high).round().int().tolist()


def matmul_ceiling():
    """FLOP/s of an 8192^3 bf16 product on random data: what this GPU gives today."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / seconds_of(lambda: a @ b, 10)


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


def train(args):
    """The learner alone: forward, recomputation and backward of packed sequences of about 512 tokens."""
    assert args.lora_rank >= 1, f"--lora-rank {args.lora_rank}: the learner trains an adapter"
    memory.bound(args.memory_gib, torch.device("cuda", 0))
    ceiling, G = matmul_ceiling(), args.group_size
    model = live_model(args)
    sizes = drawn_lengths(args.tokens // 512 // G * G, 256, 1024, 512)
    starts = [min(sizes[i // G * G:i // G * G + G]) // 3 for i in range(len(sizes))]        # prompts: not scored
    prompts = [torch.randint(model.live_vocab, (n,)).tolist() for n in starts[::G]]
    rows = [prompts[i // G] + torch.randint(model.live_vocab, (n - start,)).tolist()
            for i, (n, start) in enumerate(zip(sizes, starts))]
    tokens, computed = sum(map(len, rows)), len(lay_out(rows, starts)[0])
    torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(lambda: model.token_logprobs(rows, starts, kept=args.kept)[0].mean().backward(), 3)
    weights = sum(linear.weight.N * linear.weight.K for linear in model.adapter.linears)
    again = 1 - min(args.kept, len(model.layers)) / len(model.layers)    # blocks run a second time
    flops = (4 + 2 * again) * weights * computed + 4 * model.live_vocab * model.config.width * (tokens - sum(starts))
    print(json.dumps({"model": args.model, "base": args.base, "dtype": args.dtype, "lora_rank": args.lora_rank,
                      "group_size": G, "kept": args.kept, "tokens": tokens, "computed": computed,
                      "tokens_s": tokens / seconds,
                      "computed_s": computed / seconds, "share_of_matmul_ceiling": flops / seconds / ceiling,
                      "ceiling_tflops": ceiling / 1e12, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}))


class Step:
    """A GRPO step on random weights, with train.py's plan of memory; under torchrun, this rank's share of it.

    Prompts of 64 to 256 tokens, completions of 50 to 1,024 with mean 300; rewards are coin flips.
    """

    def __init__(self, args, device):
        self.args, self.device, self.model = args, device, live_model(args)
        self.loss_scale = grpo.FIRST_LOSS_SCALE if self.model.dtype == torch.float16 else 1.0
        G, B, self.adapter = args.group_size, args.prompts * args.group_size, self.model.adapter
        self.optimizer = torch.optim.AdamW([self.adapter.master], lr=1e-6, fused=True)
        moments = {name: torch.zeros_like(self.adapter.master.data) for name in ("exp_avg", "exp_avg_sq")}
        self.optimizer.state[self.adapter.master] = {"step": torch.zeros((), device=device), **moments}
        sizes = torch.randint(64, 257, (args.prompts,)).tolist()
        self.prompts = [torch.randint(self.model.live_vocab, (n,)).tolist() for n in sizes]
        self.lengths = torch.tensor(drawn_lengths(B, 50, 1024, 300))
        self.mine = [p * G + g for p in process.share(range(args.prompts)) for g in range(G)]      # places in the step
        rows = min(len(self.mine), 256)
        self.plan = memory.Plan(self.model, self.adapter, 256, 1024, args.micro_batch_tokens, rows, args.kv_gib,
                                args.memory_gib, process.say)
        self.micro_batch_tokens = min(process.gather([self.plan.micro_batch_tokens])[0])       # as train.py
        self.sampler = Sampler(self.model, 256 + 1024, rows, self.plan.pool / 2**30)
        self.plan.dry_step()
        for n in self.sampler.engine.buckets:                        # a graph for every number of rows
            self.sampler.generate([[1, 2]] * n, 1, 2)
        self.advantages = grpo.group_advantages(torch.rand(B).round(), G).to(device)
        self.weights = grpo.token_weights(self.lengths, torch.ones(B, dtype=torch.bool), "dapo", 1024).to(device)

    def sample(self, share=1.0):
        """share: of every length."""
        limits = (self.lengths[self.mine] * share).ceil().int().tolist()
        return self.sampler.generate(process.share(self.prompts), self.args.group_size, limits,
                                     prompt_ids=process.share(range(self.args.prompts)))

    def gradient(self, rollouts, rank, ranks):
        """This rank's share of everybody's rows, into adapter.master.grad -> sums for summarize()."""
        self.adapter.zero_grad()
        sums = {}
        for part in grpo.micro_batches(rollouts.prompts, rollouts.completions, self.micro_batch_tokens, ranks, rank):
            rows = [rollouts.prompts[b] + rollouts.completions[b] for b in part]
            starts = [len(rollouts.prompts[b]) for b in part]
            logprobs, _ = self.model.token_logprobs(rows, starts, kept=self.plan.kept)
            old = torch.cat([rollouts.logprobs[b] for b in part]).to(self.device)
            lengths = torch.tensor([len(rollouts.completions[b]) for b in part])
            row = torch.arange(len(part)).repeat_interleave(lengths).to(self.device)
            loss, more = grpo.policy_loss(logprobs, old, self.advantages[part], row, self.weights[part], "dapo")
            (loss * self.loss_scale).backward()
            sums = grpo.add_sums(sums, more)
        return {name: t.cpu() for name, t in sums.items()}

    def update(self, rollouts):
        everybody = functools.reduce(operator.add, process.gather([rollouts])[0])
        mine = self.gradient(everybody, process.RANK, process.WORLD)
        sums = functools.reduce(grpo.add_sums, process.gather([mine])[0])
        process.all_sum(self.adapter.master.grad).div_(self.loss_scale)
        self.optimizer.step()
        self.adapter.sync()
        torch.cuda.synchronize()
        return sums

    def difference(self, rollouts):
        """Relative distance of the ranks' summed gradient from the one that a rank computes alone."""
        everybody = functools.reduce(operator.add, process.gather([rollouts])[0])
        self.gradient(everybody, 0, 1)
        alone = self.adapter.master.grad.clone()
        self.gradient(everybody, process.RANK, process.WORLD)
        process.gather([])                                           # see process.py: before a big all_sum
        return ((process.all_sum(self.adapter.master.grad) - alone).norm() / alone.norm()).item()


def step(args):
    """Seconds of a step after one of an eighth of its tokens, which compiles and captures; of ranks, the slowest's."""
    device = torch.device("cuda", process.LOCAL_RANK)
    memory.bound(args.memory_gib, device)
    torch.cuda.set_device(device)
    process.join(device)
    work = Step(args, device)
    for share in (1 / 8, 1.0):
        process.gather([])                                           # all ranks begin together
        began = time.perf_counter()
        rollouts = work.sample(share)
        sampled = time.perf_counter()
        sums = work.update(rollouts)
        done = time.perf_counter()
    rows = [p + c for p, c in zip(rollouts.prompts, rollouts.completions)]
    computed = len(lay_out(rows, list(map(len, rollouts.prompts)))[0])
    mine = done - began, sampled - began, done - sampled, rollouts.num_tokens, sum(map(len, rows)), computed
    every = torch.tensor(process.gather([mine])[0], dtype=torch.float64)
    seconds, counts = every[:, :3].amax(0).tolist(), every[:, 3:].sum(0).int().tolist()
    difference = {"gradient_difference": work.difference(rollouts)} if process.WORLD > 1 else {}
    names = "seconds", "rollout", "update", "tokens", "learner_tokens", "learner_computed"
    process.say(json.dumps({
        "model": args.model, "base": args.base, "dtype": args.dtype, "gpus": process.WORLD,
        "samples": len(work.lengths), **dict(zip(names, seconds + counts)), "idle": rollouts.idle,
        "micro_batch": work.micro_batch_tokens, "kept": work.plan.kept, "memory_gib": args.memory_gib,
        "kv_gib": work.sampler.kv.nbytes / 2**30, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30, **difference, **grpo.summarize(sums)}))


# -----------------------------------------------------------------------------
# tune

CANDIDATES = {M: [Config(M, *c) for c in more] for M, more in {      # num_stages, per_sm, ahead
    8: [(3, 4, 2), (4, 4, 2), (4, 4, 3), (4, 3, 2), (4, 3, 3), (6, 3, 2)],
    16: [(3, 4, 1), (4, 3, 1), (4, 3, 2), (4, 3, 3), (5, 3, 1), (5, 3, 2)],
    32: [(3, 3, 2), (4, 2, 2), (5, 2, 2)],
    64: [(3, 2, 2), (3, 2, 3)]}.items()}


class Tuning:
    """A model cut to as many layers as the L2 cannot hold, and the weights of as long a chain of linears."""

    def __init__(self, size):
        c, self.shapes = ModelConfig.of_size(size), fused_shapes(size)
        self.layers = layers_of(self.shapes)
        SIZES["cut"] = c.width, c.feed_forward, self.layers, c.heads, c.kv_heads, 4096, False
        self.model = live_model(argparse.Namespace(model="cut", base="nvfp4", lora_rank=32, dtype="bfloat16"))
        self.weights = {name: random_weights(N, K, self.layers) for name, (N, K) in self.shapes.items()}

    def times(self, M):
        """us a layer of a step of M rows with its adapter, and of the chain without, with marlin_fp4.TUNED as it is."""
        sampler = Sampler(self.model, 320, M)
        sampler.generate(torch.randint(4096, (max(1, M // 8), 256)).tolist(), min(8, M), max_new_tokens=2)
        replay = sampler.engine.graph(M, False, 0, 1.0)

        def step():
            sampler.engine.state[FIELDS.index("step")] = 0           # where a step writes its token: inside the window
            replay()

        x = {name: torch.randn(M, K, device="cuda").bfloat16() for name, (_, K) in self.shapes.items()}
        slabs = {name: decode_matmul(x[name], self.weights[name][0]).sums for name in x}
        chain = captured(lambda: [decode_matmul(x[name], self.weights[name][i], slabs=slabs[name], pdl=True)
                                  for i in range(self.layers) for name in x])
        return [t / self.layers * 1e6 for t in medians([step, chain], 31)]


def tune(args):
    """Tries every candidate for one linear at a time; prints those with which step and chain together take 1 us a layer
    less. From one capture to the next that sum varies by half as much."""
    found = {}
    for size in args.models:
        tuning = Tuning(size)
        for M, candidates in CANDIDATES.items():
            default = marlin_fp4.DEFAULTS[M]
            for name, (N, K) in tuning.shapes.items():
                times = {config: [math.inf, math.inf] for config in (default, *candidates)}
                for config in 2 * list(times):                       # twice: the card's clock moves meanwhile
                    marlin_fp4.TUNED.clear()
                    marlin_fp4.TUNED[M, N, K] = config
                    times[config] = list(map(min, times[config], tuning.times(M)))
                marlin_fp4.TUNED.clear()
                best = min(times, key=lambda config: sum(times[config]))
                print(f"{size} {name} {M} rows, step and chain, us a layer: "
                      + "  ".join(f"{tuple(c)[1:]} {a:.1f} {b:.1f}" for c, (a, b) in times.items()), flush=True)
                if sum(times[default]) - sum(times[best]) > 1.0:
                    found[M, N, K] = tuple(best)
    for key, config in found.items():
        print(f"    {key}: Config{config},")
    print(json.dumps([[*key, *config] for key, config in found.items()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("linears", help="the linears of one layer against cuBLAS bf16")
    p.add_argument("--model", choices=SIZES, default="7b")
    p.add_argument("--lora-rank", type=int, default=0, help="rank of each part's adapter; 0: none")
    p.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256], help="M of decode_matmul")
    p.add_argument("--large-rows", type=int, nargs="*", default=[1024, 4096, 16384], help="M of matmul, forward and dX")
    p.set_defaults(run=linears)
    p = commands.add_parser("rollout", help="tokens/s of the sampler")
    p.add_argument("--model", choices=SIZES, default="7b")
    p.add_argument("--base", choices=nvfp4.FORMATS, default="nvfp4", help="how the linears are held")
    p.add_argument("--lora-rank", type=int, default=32, help="rank of each part's adapter; 0: none")
    p.add_argument("--batch", type=lambda s: [int(b) for b in s.split(",")], default=[1, 8, 32, 64, 256],
                   help="live sequences, comma-separated")
    p.add_argument("--head", choices=["bf16", "nvfp4"], default="bf16", help="how lm_head is held")
    p.add_argument("--spread", action="store_true", help="128 completions of many lengths; --batch: slots")
    p.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    p.add_argument("--new", type=int, default=512, help="tokens of a completion")
    p.set_defaults(run=rollout)
    for name, run, text in (("train", train, "tokens/s of the learner"), ("step", step, "a whole GRPO step")):
        p = commands.add_parser(name, help=text)
        p.add_argument("--model", choices=SIZES, default="7b")
        p.add_argument("--base", choices=nvfp4.FORMATS, default="nvfp4", help="how the linears are held")
        p.add_argument("--lora-rank", type=int, default=32, help="rank of each part's adapter")
        p.add_argument("--memory-gib", type=float, help="cap of this process's GPU memory")
        p.set_defaults(run=run)
    for p in (commands.choices["rollout"], commands.choices["train"], commands.choices["step"]):
        p.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="of the inputs of matmuls")
    p.add_argument("--prompts", type=int, default=16, help="problems of the step")
    p.add_argument("--group-size", type=int, default=8, help="samples a problem")
    p.add_argument("--kv-gib", type=float, help="memory for the KV cache (default: as memory.py plans)")
    p.add_argument("--micro-batch-tokens", type=int, help="tokens in one forward and backward (default: by the memory)")
    p = commands.choices["train"]
    p.add_argument("--tokens", type=int, default=16384, help="tokens in the one micro-batch, shared prompts many times")
    p.add_argument("--group-size", type=int, default=1, help="sequences that share a prompt, a third of each")
    p.add_argument("--kept", type=int, default=0, help="blocks that keep their activations instead of running again")
    p = commands.add_parser("tune", help="find marlin_fp4.TUNED")
    p.add_argument("--models", choices=SIZES, nargs="*", default=["1.5b", "3b", "7b", "14b", "32b"])
    p.set_defaults(run=tune)
    args = parser.parse_args()
    assert torch.cuda.is_available(), "bench.py measures a GPU and there is none"
    args.run(args)


if __name__ == "__main__":
    main()
