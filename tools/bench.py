"""
Measure sampling and training steps on a GPU, with random weights.

    python -m tools.bench step --model 7b --prompts 64
    python -m tools.bench step --model 7b --prompts 2 --new 4096
    python -m tools.bench step --model 32b --memory-gib 48
    python -m tools.bench rollout --model 7b --batch 1,8,64,256
    torchrun --nproc-per-node 2 -m tools.bench step --model 7b

step       a GRPO step with train.py's sampler, memory plan and update, on
           answers of 50 to 1,024 tokens (mean 300), or --new tokens each;
           seconds are the slowest rank's
rollout    the sampler's tokens/s, including prefill and host time, on B
           sequences in groups of gcd(B, 8), with an adapter and ignoring end
           ids

The output is JSON: a line with the flags and the machine, then a line per case,
preceded by the memory plan for step.
"""
import argparse
import functools
import json
import math
import operator
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))            # for python tools/bench.py
import env  # isort: skip; its settings come before torch

import torch

import grpo
import nvfp4
from harness import memory
from harness.config import Rollout, add_flag, number
from harness.setup import choose_device, divide_memory
from learner import Batch, Learner
from lora import attach
from model import ModelConfig, Transformer
from ranks import LOCAL_RANK, WORLD, gather, join_ranks, say, share
from sampler import Sampler, Sampling
from weights import SCALING

SIZES = {  # D, F, layers, H, KV, V, tied: config.json of Qwen2.5-*-Instruct
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False),
    # The same for Qwen3-* and Llama-3.1-*, plus d, biases of q, k and v, norms of q and k, and
    # Llama's rotary base, eps and scaling
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 151936, True, 128, False, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 151936, False, 128, False, True),
    "llama3.1-8b": (4096, 14336, 32, 32, 8, 128256, False, 128, False, False, 5e5, 1e-5,
                    dict(zip(SCALING, (8.0, 1.0, 4.0, 8192))))}
LIVE_VOCAB = 151665                              # ids in Qwen2.5's tokenizer
DEVICE = torch.device("cuda", LOCAL_RANK)


def random_model(size: str, base: str, lora_rank: int) -> Transformer:
    """A model of a published size, made on the device. The adapter's B is random, not zero."""
    dtype = torch.bfloat16
    torch.manual_seed(0)
    shape = ModelConfig(*SIZES[size])
    generator = torch.Generator(DEVICE).manual_seed(0)

    def get(name, *shape):
        if "norm" in name:
            return torch.ones(shape, device=DEVICE, dtype=dtype)
        w = torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)
        return w * shape[-1] ** -0.5

    def frozen(names, parts, k):
        return nvfp4.freeze([get(name, n, k) for name, n in zip(names, parts)], base, dtype)

    model = Transformer(shape, get, frozen, dtype, f"random-{size}")
    model.live_vocab = min(shape.vocab, LIVE_VOCAB)
    if lora_rank:
        adapter = attach(model, rank=lora_rank, alpha=lora_rank)
        adapter.master.data[adapter.b_start:].normal_(0, 0.02)
        adapter.sync()
    return model


def random_prompts(model, lengths):
    return [torch.randint(model.live_vocab, (n,)).tolist() for n in lengths]


def drawn_lengths(count, low, high, mean):
    """`count` lengths in [low, high] with this mean: exponential, with a long tail like answers."""
    generator = torch.Generator().manual_seed(0)
    excess = torch.empty(count).exponential_(generator=generator)
    for _ in range(20):                          # cutting the tail lowers the mean: scale it up
        excess *= (mean - low) / excess.clamp(max=high - low).mean()
    return (low + excess).clamp(max=high).round().int().tolist()


def load_figures(sampler, B, prompt, new):
    """B completions of `new` tokens -> figures."""
    G = math.gcd(B, 8)
    prompts = random_prompts(sampler.engine.model, [prompt] * (B // G))
    sampler.generate(prompts, G, Sampling(2))    # compiles and captures
    prefill = sampler.generate(prompts, G, Sampling(1)).seconds        # plus one step
    rollouts = sampler.generate(prompts, G, Sampling(new))
    return {"batch": B, "tokens_s": rollouts.num_tokens / rollouts.seconds,
            "step_ms": (rollouts.seconds - prefill) / (new - 1) * 1e3, "prefill_ms": prefill * 1e3,
            "kv_gib": sampler.engine.kv.nbytes / 2**30}


def rollout(args: argparse.Namespace) -> Iterator[dict]:
    """Measures the sampler, for each number of sequences in --batch."""
    model = random_model(args.model, args.base, args.lora_rank)
    new = args.new or 512
    sampler = Sampler(model, args.prompt + new, max(args.batch), args.kv_gib)
    for B in args.batch:
        yield load_figures(sampler, B, args.prompt, new)


def step(args: argparse.Namespace) -> Iterator[dict]:
    """Measures a training step, or a rank's share. Runs it twice, since the first run compiles."""
    memory.bound(args.memory_gib, DEVICE)
    join_ranks(DEVICE)
    G, prompts = args.group_size, args.prompts
    B = prompts * G
    learner = Learner(random_model(args.model, args.base, args.lora_rank), grpo.LOSSES["dapo"])
    lengths = [args.new] * B if args.new else drawn_lengths(B, 50, 1024, 300)
    longest = max(lengths)
    questions = random_prompts(learner.model, torch.randint(64, 257, (prompts,)).tolist())
    advantages = grpo.group_advantages(torch.arange(B) % 2, G, "group")  # none is 0: all rows train
    mine = share(questions)
    limits = Sampling(share(torch.tensor(lengths).view(-1, G)).flatten().tolist())
    sizes = Rollout(prompts_per_step=prompts, group_size=G, max_new_tokens=longest,
                    max_rows=args.max_rows)      # over all ranks, as in train.py
    plan = memory.Limits(args.memory_gib, args.kv_gib, args.micro_batch_tokens)
    sampler = divide_memory(learner, plan, sizes, max_prompt_tokens=256, num_held_out=0)
    for _ in range(2):
        gather([])                               # all ranks start together
        began = time.perf_counter()
        own = sampler.generate(mine, G, limits, share(range(prompts)))
        rollouts = functools.reduce(operator.add, gather([own]))         # and end this together
        sampled = time.perf_counter()
        weights = grpo.loss_weights(rollouts.sampled(), learner.loss, longest)
        done = learner.update(Batch(rollouts.rows, advantages), weights, lr=1e-6)
        assert not done.failure, done.failure
        torch.cuda.synchronize()
        ended = time.perf_counter()
    yield {"seconds": ended - began, "rollout": sampled - began, "update": ended - sampled,
           "tokens": rollouts.num_tokens, "idle": rollouts.idle, "samples": len(rollouts.rows),
           "gpus": WORLD,
           "micro_batch": learner.micro_batch_tokens, "kept": learner.kept_layers,
           "kv_gib": sampler.engine.kv.nbytes / 2**30,
           "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
           "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
           **grpo.summarize(done.sums)}


COMMANDS = {function.__name__: function for function in (rollout, step)}


def read_flags() -> argparse.Namespace:
    """The command and its flags."""
    parser = env.parser("{step,rollout} [flags]", __doc__)
    add = parser.add_argument
    add("command", choices=COMMANDS)
    add("--model", choices=SIZES, default="7b", metavar="SIZE", help=f"{', '.join(SIZES)} "
        "(default: 7b)")
    add("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64, 256],
        metavar="N,N", help="rollout: sequences decoded at a time (default: 1,8,32,64,256)")
    add("--prompt", type=number(int, "[1, 1e6]"), default=256, metavar="N", help="rollout: tokens "
        "per prompt (default: 256)")
    add("--new", type=number(int, "[2, 1e6]"), metavar="N", help="tokens per answer (default: "
        "512 for rollout, 50 to 1,024 for step)")
    add("--prompts", type=number(int, "[1, 1e6]"), default=16, metavar="N",
        help="step: problems per step (default: 16)")
    add("--kv-gib", type=number(float, "(0, 1e9]"), metavar="X", help="size of the KV cache, in "
        "GiB (default: memory plan for step; as needed, at most half the free memory, for rollout)")
    for name, default in dict(base="nvfp4", lora_rank=32, kernels=None, group_size=8,
                              max_rows=None, memory_gib=None, micro_batch_tokens=None).items():
        add_flag(parser, name, default)          # step uses all of them, rollout the first three
    return parser.parse_args()


def main() -> None:
    args = read_flags()
    with env.one_line():
        choose_device("cuda", args.model, args.kernels)
        say(json.dumps(vars(args) | env.provenance(torch.cuda.get_device_name())))
        for figures in COMMANDS[args.command](args):
            say(json.dumps(figures))


if __name__ == "__main__":
    main()
