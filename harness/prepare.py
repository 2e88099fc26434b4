"""
From flags to a run that can begin.

    run = prepare(args, before)
    progress = begin(run)                        # at step 0, or at the checkpoint it goes on from

Everything that can be wrong is found out here, before the first step; what is cheap to check comes
first, before downloads, tokens and weights.
"""
import argparse
import dataclasses
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import calibrate
import grpo
import lora
import model as qwen
from fast import memory
from harness import data, hf, plugin, process
from harness.checkpoints import Folder
from harness.config import check_flags
from harness.files import read_json
from harness.ranks import RANK, WORLD, choose_device, gather, join, say, settle_cpu
from harness.trackers import Tracker
from learner import Learner
from sampler import BLOCK, Sampler, engine_for


@dataclass(frozen=True)
class Progress:
    """Where a run stands: a new one for every step."""
    step: int = 0                                # whole steps done
    cursor: int = 0                              # problems taken so far
    tokens: int = 0                              # completion tokens sampled so far
    best: float = -1e9                           # held-out accuracy, or mean of --reward


@dataclass
class Run:
    """What all steps share; where it stands is in Progress."""
    args: argparse.Namespace
    tokenizer: data.Tokenizer
    problems: list                               # of data.Problem; held_out likewise
    held_out: list
    misses: torch.Tensor                         # of each problem: see train.remember
    plug_in: plugin.Reward                       # --reward's, or None
    model: qwen.Qwen2
    learner: Learner
    sampler: Sampler
    folder: Folder
    tracker: Tracker
    bar: tqdm                                    # off where there is no terminal


def prepare(args, before):
    """-> Run. ValueError for what a flag, a file or the machine does not allow.

    For run.json it sets in args: the rank of --adapter, the device, the problems' digest.
    """
    if args.adapter and not args.resume:
        config, _ = hf.read_peft(args.adapter)
        args.lora_rank = config["r"]
        args.lora_alpha = config["lora_alpha"]
        args.train_norms = bool(config.get("modules_to_save"))
    check_flags(args, before)
    device = choose_device(args)
    plug_in = plugin.Reward(args.reward) if args.reward else None
    tokenizer, problems, held_out = read_problems(args)
    if device.type == "cuda":
        memory.bound(args.memory_gib, device)
    join(device)
    model = read_model(args, tokenizer, problems, device)
    learner = Learner(model, loss_of(args), args.temperature, args.max_grad_norm, args.weight_decay)
    sampler = divide_memory(args, model, learner, len(held_out))

    def write_adapter(tensors, folder):
        lora.save_adapter(model, folder, tensors["master"])

    misses = torch.zeros(len(problems), dtype=torch.int32)
    folder = Folder(Path(args.out), learner.tensors() | {"misses": misses}, write_adapter)
    tracker = Tracker(args.report_to, Path(args.out), vars(args))
    no_bar = RANK > 0 or not sys.stderr.isatty()
    bar = tqdm(total=args.steps, unit="step", dynamic_ncols=True, smoothing=0, disable=no_bar)
    return Run(args, tokenizer, problems, held_out, misses, plug_in, model, learner, sampler,
               folder, tracker, bar)


def read_problems(args):
    """-> tokenizer, problems to train on, problems held out. A resumed run's must be the same."""
    data.style_of(args.prompt_style)
    data.check_source(args.data)
    data.check_source(args.eval_data or args.data)
    folder = hf.resolve(args.model, weights=False)
    hf.check_lengths(folder, args.max_prompt_tokens + args.max_new_tokens, args.lora_rank)
    tokenizer = data.Tokenizer(folder)
    problems, held_out = data.split_problems(args, tokenizer)
    known = str([(p.id, p.prompt, p.answer) for p in problems + held_out])
    args.problems_sha256 = hashlib.sha256(known.encode()).hexdigest()    # stays in run.json
    had = read_json(Path(args.out) / "run.json") if args.resume else {}
    if had.get("problems_sha256", args.problems_sha256) != args.problems_sha256:
        raise ValueError(f"--resume: --data {args.data}, --eval-data {args.eval_data}: other "
                         "problems or prompts than when the run began")
    return tokenizer, problems, held_out


def read_model(args, tokenizer, problems, device):
    """-> the model of --base, --calibrate and --dtype, with a new adapter or --adapter."""
    folder = hf.resolve(args.model)
    base = hf.base_of(folder, args.base)
    if args.calibrate:
        folder = calibrated(args, folder, tokenizer, problems, device)
    model = qwen.load(folder, base, device, args.dtype, tokenizer.vocab_size)
    settle_cpu(model)
    going_on = any(Path(args.out, "checkpoints").glob("step_*"))        # not if killed before one
    if args.adapter and not going_on:
        lora.load_adapter(model, args.adapter)
    else:
        lora.attach(model, args.lora_rank, args.lora_alpha, args.train_norms, args.seed)
    return model


def calibrated(args, source, tokenizer, problems, device):
    """-> --out/base, where rank 0 writes the model in NVFP4; a resumed run finds it there."""
    folder = Path(args.out) / "base"
    if RANK == 0 and not folder.exists():
        files = calibrate.source_of(source, device)
        some = data.step_indices(len(problems), args.seed, 0, min(args.calibrate, len(problems)))
        texts = calibrate.own_answers(source, tokenizer, [problems[i] for i in some], device,
                                      min(512, args.max_new_tokens), args.seed, args.kernels)
        calibrate.to_nvfp4(files, folder, "gptq", texts, tokenizer.vocab_size)
    gather([])                                   # the others wait
    return folder


def loss_of(args):
    loss = grpo.LOSSES[args.loss]
    return dataclasses.replace(
        loss, clip_low=args.clip_low or loss.clip_low, clip_high=args.clip_high or loss.clip_high,
        correction=args.correction, cap=args.correction_cap, kl_beta=args.kl_beta)


def divide_memory(args, model, learner, num_held_out):
    """-> the sampler, with its KV pool. Sets the learner's micro_batch_tokens and kept_layers."""
    longest = args.max_prompt_tokens + args.max_new_tokens
    rows = min(args.max_rows, max(args.prompts_per_step * args.group_size, num_held_out))
    tokens = args.micro_batch_tokens or learner.micro_batch_tokens
    kept_layers = len(model.layers) if model.config.width <= 256 else 0     # tiny/: 40 KB a token
    engine = engine_for(model.device, args.kernels)
    if model.device.type == "cuda":
        given = memory.Memory(args.memory_gib, args.kv_gib, args.micro_batch_tokens)
        plan = memory.Plan(model, given, args.max_prompt_tokens, args.max_new_tokens, rows, say)
        sampler = Sampler(engine, model, longest, rows, plan.pool / 2**30)
        tokens = plan.micro_batch_tokens
        kept_layers = plan.dry_step().kept_layers
    else:
        sampler = Sampler(engine, model, longest, rows, args.kv_gib)
    tokens = min(gather([tokens]))               # ranks deal out one list: all must cut it alike
    learner.micro_batch_tokens = tokens
    learner.kept_layers = kept_layers
    say(f"KV pool: {sampler.engine.kv.nbytes / 2**30:.2f} GiB, {len(sampler.pool) * BLOCK:,} "
        f"tokens; micro-batches of {tokens:,} tokens; {kept_layers} of {len(model.layers)} layers "
        "keep their activations")
    return sampler


def begin(run):
    """-> Progress, of the checkpoint that a resumed run goes on from."""
    args = run.args
    device = run.model.device
    cores = f"{os.cpu_count()} CPU cores"
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else cores
    about = {"about": process.about(f"{WORLD} x {hardware}")}
    counters = run.folder.start(vars(args) | about, args.resume)
    run.learner.restore(counters)
    mine = run.learner.tensors()["master"].cpu().numpy().tobytes()
    digests = gather([hashlib.sha256(mine).hexdigest()])
    assert len(set(digests)) == 1, "ranks start from different adapters"
    names = {field.name for field in dataclasses.fields(Progress)} & counters.keys()
    progress = Progress(**{name: counters[name] for name in names})
    if args.resume:
        run.folder.note(steps=args.steps, resumed=process.now())
    if progress.step >= args.steps:
        say(f"all {args.steps} steps of {args.out} are done: --resume --steps N does more")
    run.folder.snapshot(dataclasses.asdict(progress) | run.learner.counters())
    return progress
