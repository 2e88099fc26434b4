"""
QeRL in one script: GRPO/DAPO of a Qwen2.5 model with frozen 4-bit weights, LoRA and adaptive quantization noise.

    python train.py                            a tiny model that ships with the repository: CPU, no network, minutes
    python train.py --model qwen2.5-7b         Qwen2.5-7B-Instruct on GSM8K, the paper's settings, one GPU
    python train.py --resume --out runs/x      go on where runs/x stopped, with its flags
    torchrun --nproc-per-node 8 train.py ...   the same run on 8 GPUs, each with its share of a step's prompts

One step: sample a group of answers to each problem with noise on the norms, score them, turn scores into advantages,
update the adapter, report. The old policy of the ratio is what the sampler wrote down while sampling.

A run folder holds run.json (the flags), metrics.jsonl (one object a step), samples.jsonl (every completion with its
verdict), adapter/ (PEFT format) and checkpoints/ (the last two).

Not here: a critic, a reference model (the adapter switched off is one), a learned reward, a config file.
"""
import argparse
import functools
import hashlib
import json
import math
import operator
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import aqn
import data
import grpo
import lora
import memory
import model as qwen
import rewards
from checkpoint import Checkpoints
from process import (LOCAL_RANK, RANK, WORLD, Stopped, all_sum, ending_with, from_rank_0, gather, join, say, share,
                     signals_wait)
from sampler import BLOCK, Sampler, quantize_head

TINY = Path(__file__).parent / "tiny"
# What changes when no --model is given: the embedded model, and sizes that two CPU cores can do in minutes.
TINY_DEFAULTS = dict(model=str(TINY), data="arithmetic", steps=80, max_prompt_tokens=64, max_new_tokens=48,
                     lr=5e-4, updates_per_rollout=1, eval_every=20, eval_problems=256, save_every=20)

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], usage="train.py [flags], --help lists them",
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
# model
add("--model", help="folder, Hugging Face id or name such as qwen2.5-7b (default: the embedded tiny model)")
add("--base", default="nvfp4", choices=["nvfp4", "bf16", "mxfp4", "nf4"], help="format of the frozen linears")
add("--head", default="bf16", choices=["bf16", "nvfp4"],
    help="format of lm_head (bf16: 16 bits of --dtype); nvfp4 moves log-probs by 0.05 nats on average (0.5B), rollouts "
         "of few rows are faster")
add("--dtype", choices=["bfloat16", "float16"],
    help="what inputs of matmuls are rounded to; float16 brings sampler and learner 8 times closer (default: bfloat16 "
         "on a GPU, float32 on a CPU, where either of the two is emulated)")
add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
add("--lora-rank", type=int, default=32, help="rank of every adapter (paper 4.1)")
add("--lora-alpha", type=float, default=32, help="adapter scale is alpha / rank (release: alpha = rank)")
add("--train-norms", action="store_true", help="also train each block's two norms (release: ln=True; not in the paper)")
# data and reward
add("--data", default="gsm8k", help="gsm8k, math, arithmetic, a .jsonl/.json/.parquet file or a Hugging Face id")
add("--eval-data", help="held-out problems; default: the test split, or the end of a file")
add("--prompt-style", default="boxed", choices=sorted(data.STYLES), help="boxed: Qwen's; tags: the paper's")
add("--max-prompt-tokens", type=int, default=512, help="longer prompts are dropped and counted (release: 256)")
add("--reward", help="module:function to use instead of the built-in grader")
add("--format-weight", type=float, default=0.0, help="added for a well-formed answer (release: 0.1 of a right one)")
# rollouts
add("--steps", type=int, default=600, help="rollout batches (paper: about 600 on GSM8K)")
add("--prompts-per-step", type=int, default=16, help="problems a step; 16 x 8 = Table 4's batch of 128")
add("--group-size", type=int, default=8, help="samples a problem (Table 4: 8 on GSM8K, 16 on BigMath)")
add("--max-new-tokens", type=int, default=4096, help="longest completion (Table 4: 4096 on GSM8K, 8192 on BigMath)")
add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob (Table 4)")
add("--max-rows", type=int, default=256, help="most sequences decoded at a time")
add("--kv-gib", type=float, help="memory for the KV cache (default: what is needed, at most what the rest leaves)")
# adaptive quantization noise
add("--sigma-start", type=float, default=1e-2, help="noise of the first noisy stage; 0 turns AQN off (Table 4)")
add("--sigma-end", type=float, default=5e-4, help="noise that the schedule decays to (Table 4)")
add("--noise-stages", type=int, default=10, help="stages K of Algorithm 1; the first is free of noise (Table 4)")
add("--noise-schedule", default="exponential", choices=aqn.SCHEDULES, help="decay between the stages (Fig. 9)")
add("--noise-exact-end", action="store_true", help="reach sigma-end in the last stage (release) instead of Algorithm 1")
# learning
add("--loss", default="dapo", choices=list(grpo.CLIP), help="see grpo.py (Table 1: grpo, Table 2: dapo)")
add("--clip-low", type=float, help="lower clip of the ratio (default: the loss's own, 0.2; Table 4)")
add("--clip-high", type=float, help="upper clip (default: the loss's own, 0.28; Table 4)")
add("--correction", default="truncate", choices=grpo.CORRECTIONS, help="what bounds the ratio beyond the clip")
add("--correction-cap", type=float, default=2.0, help="the bound C")
add("--advantage-scale", default="group", choices=grpo.SCALES, help="which standard deviation divides centred rewards")
add("--kl-beta", type=float, default=0.0, help="weight of a k3 KL term to the base without adapter (paper: none)")
add("--overlong", default="mask", choices=["mask", "keep"], help="keep: answers cut at the limit stay in the loss")
add("--overlong-buffer", type=int, default=0, help="soft penalty over the last so many tokens (DAPO); 0: none")
add("--dynamic-sampling", action="store_true", help="replace groups of equal unshaped rewards, at most twice (DAPO)")
add("--updates-per-rollout", type=int, default=4, help="optimizer steps on a rollout batch (Table 4: 4; BigMath: 1)")
add("--lr", type=float, default=1e-5, help="peak learning rate (Table 4: 1e-5; bf16 LoRA 5e-6)")
add("--warmup", type=float, default=0.1, help="share of the run with rising rate (release)")
add("--lr-schedule", default="cosine", choices=["cosine", "constant"],
    help="after the warm-up: half a cosine to 0 (release), or constant and linear to 0 over the last quarter")
add("--max-grad-norm", type=float, default=0.2, help="clip of the global gradient norm (release)")
add("--weight-decay", type=float, default=0.0, help="of A and B, decoupled (release: 0.1, which at 1e-5 moves nothing)")
add("--micro-batch-tokens", type=int, help="tokens in one forward and backward (default: what the memory allows)")
add("--memory-gib", type=float, help="bound of the whole process on a GPU (default: what is free)")
# the run
add("--out", help="run folder (default: runs/MODEL-BASE)")
add("--eval-every", type=int, default=20, help="steps between evaluations; also before the first and after the last")
add("--eval-problems", type=int, default=256, help="held-out problems of an evaluation, greedy; 0: all")
add("--save-every", type=int, default=20, help="steps between checkpoints")
add("--resume", action="store_true", help="go on from the newest intact checkpoint in --out")
add("--seed", type=int, default=0, help="of adapter, order of problems, sampling and noise")
if not any(a.split("=")[0] == "--model" for a in sys.argv[1:]):
    parser.set_defaults(**TINY_DEFAULTS)
args = parser.parse_args()
out = Path(args.out or f"runs/{Path(args.model).name}-{args.base}")
before = {}                                                          # --resume: the run's flags, as defaults
if args.resume:
    try:
        before = json.loads((out / "run.json").read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"train.py: --resume: {out} holds no run ({error})")
    parser.set_defaults(**{name: value for name, value in before.items() if name not in ("resume", "out")})
    args = parser.parse_args()


# -----------------------------------------------------------------------------
# Set-up: everything that can be wrong is found out here, before the first step.

def check_flags():
    for name in ("lora_rank", "steps", "prompts_per_step", "max_prompt_tokens", "max_new_tokens", "max_rows",
                 "noise_stages", "updates_per_rollout", "micro_batch_tokens", "eval_every", "save_every",
                 "correction_cap"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.group_size < 2:
        raise ValueError(f"--group-size must be at least 2: samples of a problem are compared, got {args.group_size}")
    if args.temperature <= 0:
        raise ValueError(f"--temperature must be above 0 to learn from samples, got {args.temperature}")
    if not 0 <= args.warmup <= 1:
        raise ValueError(f"--warmup is a share of the run, 0..1, got {args.warmup}")
    if args.train_norms and args.kl_beta:
        raise ValueError(f"--kl-beta {args.kl_beta} needs the base as reference, --train-norms moves its norms")
    if not 0 <= args.overlong_buffer <= args.max_new_tokens:
        raise ValueError(f"--overlong-buffer must lie in 0..--max-new-tokens, got {args.overlong_buffer}")
    if args.memory_gib and not args.device.startswith("cuda"):
        raise ValueError(f"--memory-gib bounds the memory of a GPU, --device is {args.device}")
    aqn.sigma_at(0, args.steps, args.sigma_start, args.sigma_end, args.noise_stages)


def check_folder():
    """An empty folder for a new run, or the one to resume with its own flags; never another run's."""
    free = {"resume", "out", "device", "memory_gib", "kv_gib"}       # where, and within what memory, may change
    for name in vars(args).keys() - free if before else ():
        had = before.get(name, parser.get_default(name))             # a flag younger than the run
        if (value := getattr(args, name)) != had:
            raise ValueError(f"--resume: --{name.replace('_', '-')} is {value!r}, the run had {had!r}")
    if RANK == 0 and not args.resume and out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: choose another folder, or --resume it")
    out.mkdir(parents=True, exist_ok=True)


def load_problems(source, split):
    problems, unreadable = data.load_problems(source, split, is_readable=rewards.can_read)
    if unreadable:
        say(f"{source}: {unreadable} problems left out, their answers cannot be read")
    problems, prompts, long = data.encode_prompts(tokenizer, problems, args.prompt_style, args.max_prompt_tokens)
    if long:
        say(f"{source}: {long} prompts of more than {args.max_prompt_tokens} tokens left out")
    if len(problems) < 2:
        raise ValueError(f"{source}: {len(problems)} problems are left, need 2")
    return problems, prompts


def make_sampler():
    """-> sampler, tokens of a micro-batch, blocks whose activations stay; on a GPU, what the memory allows."""
    prompt, new, tokens, kept = args.max_prompt_tokens, args.max_new_tokens, args.micro_batch_tokens, 0
    if device.type == "cuda":
        plan = memory.Plan(model, adapter, prompt, new, tokens, args.max_rows, args.kv_gib, args.memory_gib, say)
        sampler = Sampler(model, prompt + new, args.max_rows, plan.pool / 2**30)
        tokens, kept = plan.micro_batch_tokens, plan.dry_step().kept
    else:
        sampler = Sampler(model, prompt + new, args.max_rows, args.kv_gib)
    # Ranks take turns at one list of micro-batches, so all must cut it alike: as small as the fullest GPU needs it.
    tokens = min(gather([tokens or memory.MICRO_BATCH_TOKENS[0]])[0])
    say(f"KV pool: {sampler.kv.nbytes / 2**30:.2f} GiB, {len(sampler.free) * BLOCK:,} tokens; "
        f"micro-batches of {tokens:,} tokens; {kept} of {len(model.layers)} blocks keep their activations")
    return sampler, tokens, kept


try:
    check_flags()
    folder = qwen.resolve(args.model)
    tokenizer = data.Tokenizer(folder)
    train_problems, train_prompts = load_problems(args.data, "train")
    if args.eval_data or args.data in data.KNOWN or args.data == "arithmetic":
        eval_problems, eval_prompts = load_problems(args.eval_data or args.data, "test")
    else:                                                            # a file of one's own: its end is held out
        held = max(1, min(args.eval_problems or 256, len(train_problems) // 10))
        eval_problems, eval_prompts = train_problems[-held:], train_prompts[-held:]
        train_problems, train_prompts = train_problems[:-held], train_prompts[:-held]
    if args.eval_problems:
        eval_problems, eval_prompts = eval_problems[:args.eval_problems], eval_prompts[:args.eval_problems]
    plug_in = rewards.load_reward(args.reward) if args.reward else None
    check_folder()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", LOCAL_RANK if WORLD > 1 else device.index or 0)
        memory.bound(args.memory_gib, device)
        torch.cuda.set_device(device)                                # Triton launches on the current one
    join(device)
    model = qwen.load(folder, args.base, device, args.dtype)
    model.live_vocab = tokenizer.vocab_size
    if args.head == "nvfp4":                                         # now: the plan of the memory counts it
        quantize_head(model)
    adapter = lora.Adapter(model, args.lora_rank, args.lora_alpha, args.train_norms, args.seed)
    # betas: as the release. 8-bit moments would save 6 bytes of 18 for 1 % of the parameters: no second optimizer.
    optimizer = torch.optim.AdamW([adapter.master], betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    moments = {"step": torch.zeros((), device=device), "exp_avg": torch.zeros_like(adapter.master.data),
               "exp_avg_sq": torch.zeros_like(adapter.master.data)}
    optimizer.state[adapter.master] = moments                        # now: later steps must not need more memory
    sampler, micro_batch_tokens, kept_blocks = make_sampler()
except (ValueError, AssertionError, OSError, Stopped) as error:
    sys.exit(f"train.py: {str(error).splitlines()[0]}")
except RuntimeError as error:
    if "allocate" not in str(error):                                 # of a GPU or the host; the host has no error class
        raise
    sys.exit(f"train.py: not enough memory: {str(error).splitlines()[0]}")

# With the adapter and its moments, all that a resumed run needs. cursor: problems taken so far; skipped: updates.
state = {"step": 0, "cursor": 0, "tokens": 0, "skipped": 0}
if model.dtype == torch.float16:
    state |= {"loss_scale": grpo.FIRST_LOSS_SCALE, "good_updates": 0}          # see grpo.next_loss_scale
checkpoints = Checkpoints(out / "checkpoints", {"master": adapter.master.data, **moments}, state)


def begin():
    """Rank 0 reads the checkpoint to resume, or writes run.json before all else; every rank starts from its state."""
    if RANK == 0 and args.resume:
        for line in checkpoints.load():
            say(line)
        for name in ("metrics.jsonl", "samples.jsonl"):              # steps after the checkpoint will be done again
            trim(out / name, checkpoints.kept_counters["step"])
    elif RANK == 0:
        lora.write_atomically(out / "run.json", json.dumps(vars(args), indent=2).encode())
    for t in checkpoints.kept.values():
        from_rank_0(t)
    checkpoints.kept_counters.update(gather([checkpoints.kept_counters])[0][0])
    checkpoints.restore()
    adapter.sync()
    if state["step"]:
        save()                                                       # adapter/, in case the end came between the two
    mine = hashlib.sha256(adapter.master.data.cpu().numpy().tobytes()).hexdigest()
    assert len(set(gather([mine])[0])) == 1, "ranks start from different adapters"


def trim(path, step):
    """Keep the lines of a log that belong to steps before `step`."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] < step]
    if len(whole) < len(lines):
        os.truncate(path, sum(map(len, whole)))


def save():
    """Checkpoint and adapter/ of the last whole step -> what there is to say. In mid-step `live` has moved past it."""
    if RANK == 0:
        checkpoints.save()
        checkpoints.restore()
        adapter.sync()
        lora.save_adapter(model, out / "adapter")
    return f"step {checkpoints.kept_counters['step']} is saved"


# -----------------------------------------------------------------------------
# The four verbs of a step.

def sample(step, sigma, count):
    """The next `count` problems, G samples each -> this rank's share of the problems and rollouts. Only here is noise.

    A sample's randomness follows from its problem's place in the run: it does not depend on the number of ranks.
    """
    places = range(state["cursor"], state["cursor"] + count)
    indices = share(data.step_indices(len(train_problems), args.seed, state["cursor"], count))
    state["cursor"] += count
    with aqn.noisy_norms(model, sigma, args.seed, step):
        rollouts = sampler.generate([train_prompts[i] for i in indices], args.group_size, args.max_new_tokens,
                                    tokenizer.end_ids, args.temperature, args.seed, prompt_ids=share(places))
    return [train_problems[i] for i in indices], rollouts


def score(problems, rollouts):
    """-> rows of rewards.score() with `task`, the grader's or the plug-in's reward, and `reward`: that and shaping."""
    rows = rewards.score(tokenizer, problems, rollouts, args.prompt_style) if problems else []
    for row in rows:
        row["task"], row["reward"] = row["correct"], row["correct"] + args.format_weight * row["format"]
        if args.reward:
            parts = plug_in(row["completion"], row["answer"])
            row["task"] = row["reward"] = sum(parts.values()) if isinstance(parts, dict) else float(parts)
        if args.overlong_buffer:
            row["reward"] += rewards.overlong_penalty(row["length"], args.max_new_tokens, args.overlong_buffer)
    return rows


def refill(step, sigma, rollouts, rows):
    """Dynamic sampling: groups of equal task rewards make room for new problems, at most twice.

    DAPO asks for right and wrong answers in a group: under a penalty of the length, two rewards are hardly ever equal.
    """
    for _ in range(2):
        task = torch.tensor([row["task"] for row in rows])
        useful = grpo.keep_informative(task, args.group_size) if rows else torch.zeros(0, dtype=torch.bool)
        missing = int(all_sum((~useful).sum().to(device)))
        if not missing:
            break
        problems, more = sample(step, sigma, missing)                # which may leave a rank without rows
        keep = [i for i in range(len(rows)) if useful[i // args.group_size]]
        rollouts, rows = rollouts.select(keep) + more, [rows[i] for i in keep] + score(problems, more)
    return rollouts, rows


def backward(rollouts, advantages, weights):
    """Adds this rank's gradient to adapter.master.grad -> sums over its trained tokens, {} if it has none.

    Micro-batches are those of the whole step, dealt to the ranks: with those of each rank's own rows, bf16 would round
    otherwise on two GPUs than on one, and 7B's gradient differ by 0.8 %. (Only a step of few micro-batches is cut finer
    for many ranks than for one.) With fp16 the gradient is that of loss_scale * loss.
    """
    sums = {}
    trained = torch.nonzero((weights > 0) & ((advantages != 0) | (args.kl_beta > 0)))[:, 0].tolist()
    pairs = ([column[b] for b in trained] for column in (rollouts.prompts, rollouts.completions))
    for part in grpo.micro_batches(*pairs, micro_batch_tokens, WORLD, RANK):
        rows = [trained[i] for i in part]
        tokens = [rollouts.prompts[b] + rollouts.completions[b] for b in rows]
        starts = [len(rollouts.prompts[b]) for b in rows]
        logprobs, entropy = model.token_logprobs(tokens, starts, args.temperature, kept_blocks)
        ref = None
        if args.kl_beta:
            with torch.no_grad(), adapter.off():
                ref, _ = model.token_logprobs(tokens, starts, args.temperature)
        old = torch.cat([rollouts.logprobs[b] for b in rows]).to(device)
        row = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(rollouts.completions[b]) for b in rows]))
        loss, more = grpo.policy_loss(logprobs, old, advantages[rows].to(device), row.to(device),
                                      weights[rows].to(device), args.loss, args.clip_low, args.clip_high,
                                      args.correction, args.correction_cap, ref, args.kl_beta)
        (loss * state.get("loss_scale", 1)).backward()
        sums = grpo.add_sums(sums, more | {"entropy": entropy.sum().double(), "loss": loss.detach().double()})
    return {name: value.cpu() for name, value in sums.items()}


def update(rollouts, advantages, weights, lr):
    """One optimizer step on the rows of all ranks -> summed metrics of their trained tokens, and the gradient norm.

    A NaN or infinity in loss or gradient skips the step, said and counted, on every rank: all see the same sums. With
    fp16 a gradient beyond its range is one, and the loss scale follows; it has no part in the loss's own.
    """
    adapter.zero_grad()
    parts = [sums for sums in gather([backward(rollouts, advantages, weights)])[0] if sums]
    if not parts:
        return {}, 0.0                                               # nothing to learn from: no step, no momentum
    sums = functools.reduce(grpo.add_sums, parts)
    all_sum(adapter.master.grad).div_(state.get("loss_scale", 1))
    loss, grad_norm = sums.pop("loss").item(), adapter.master.grad.norm().item()
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if "loss_scale" in state and math.isfinite(loss):
        state.update(grpo.next_loss_scale(state["loss_scale"], state["good_updates"], finite))
    if not finite:
        say(f"step {state['step']}: loss {loss}, gradient norm {grad_norm}: update skipped")
        state["skipped"] += 1
        return sums, grad_norm
    adapter.master.grad.mul_(min(1.0, args.max_grad_norm / (grad_norm + 1e-6)))
    optimizer.param_groups[0]["lr"] = lr
    adapter.master.data[:adapter.norm_start] *= 1 - lr * args.weight_decay       # AdamW's, but norms belong near 1
    optimizer.step()
    adapter.sync()
    return sums, grad_norm


def report(step, sigma, lr, rows, reward, rollouts, updates):
    """The step's numbers; the README defines each. Means over all B rows, entropy and mismatch over trained tokens."""
    def mean(key):
        return sum(row[key] for row in rows) / len(rows)
    first, last = (grpo.summarize(updates[i][0]) for i in (0, -1))
    seconds, idle, made = zip(*gather([(rollouts.seconds, rollouts.idle, rollouts.num_tokens)])[0])
    tokens = sum(made)
    state["step"], state["tokens"] = step + 1, state["tokens"] + tokens
    return {"reward": reward.nanmean().item(), "accuracy": mean("correct"), "format": mean("format"),
            "sigma": sigma, "lr": lr, "length": mean("length"), "truncated": 1 - mean("finished"),
            "idle": sum(idle) / WORLD,
            "informative": grpo.keep_informative(reward, args.group_size).float().mean().item(),
            **first, **{k: v for k, v in last.items() if k.startswith("clip")},
            "grad_norm": updates[-1][1], "skipped": state["skipped"], "tokens": state["tokens"],
            "tokens_per_s": tokens / max(seconds), **{k: v for k, v in state.items() if k == "loss_scale"}}


def held_out_accuracy():
    """Greedy answers to the held-out problems, each rank its share, without noise."""
    problems = share(eval_problems)
    rollouts = sampler.generate(share(eval_prompts), 1, args.max_new_tokens, tokenizer.end_ids, temperature=0.0)
    rows, _ = gather(rewards.score(tokenizer, problems, rollouts, args.prompt_style) if problems else [])
    accuracy = sum(row["correct"] for row in rows) / len(rows)
    say(f"after {state['step']} steps: held-out accuracy {accuracy:.3f}")
    return accuracy


def lr_at(progress):
    """progress in [0, 1] of the run -> learning rate: linear warm-up, then what --lr-schedule says."""
    if progress < args.warmup:
        return args.lr * progress / args.warmup
    if args.lr_schedule == "constant":
        return args.lr * min(1.0, 4 * (1 - progress))
    return args.lr * (1 + math.cos(math.pi * (progress - args.warmup) / (1 - args.warmup))) / 2


def append(name, objects):
    """To disk before any checkpoint that counts on it."""
    if RANK == 0:
        with open(out / name, "a") as f:
            f.write("".join(json.dumps(o) + "\n" for o in objects))
            f.flush()
            os.fsync(f.fileno())


# -----------------------------------------------------------------------------
# The loop: sample, score, update, report.

bar = tqdm(total=args.steps, unit="step", dynamic_ncols=True, disable=RANK > 0)
with ending_with(save, f"go on with --resume --out {out}"), bar:
    begin()
    bar.initial = bar.n = state["step"]
    say(f"{args.model} as {args.base} on {WORLD} x {device}: {adapter.master.numel():,} trained parameters; "
        f"{len(train_problems)} problems, {len(eval_problems)} held out; {args.prompts_per_step} x {args.group_size}")
    for step in range(state["step"], args.steps):
        metrics = {"step": step}
        if step == 0:                                                # its row has the accuracy before training
            metrics["eval_accuracy"] = held_out_accuracy()

        # 1) Sample. Only rollouts see the noise: the update below runs on the clean norms.
        sigma = aqn.sigma_at(step, args.steps, args.sigma_start, args.sigma_end, args.noise_stages, args.noise_schedule,
                             args.noise_exact_end)
        began = time.perf_counter()
        problems, rollouts = sample(step, sigma, args.prompts_per_step)

        # 2) Score. From gather() on, rows and what is made of them are those of the whole step.
        rows = score(problems, rollouts)
        if args.dynamic_sampling:
            rollouts, rows = refill(step, sigma, rollouts, rows)
        rows, _ = gather(rows)
        everybody = functools.reduce(operator.add, gather([rollouts])[0])
        reward, task = (torch.tensor([row[key] for row in rows]) for key in ("reward", "task"))          # (B,) each
        if reward.isnan().all():
            raise Stopped(f"--reward {args.reward}: nan for each of the {len(rows)} completions of step {step}")
        finished, lengths = torch.tensor([(row["finished"], row["length"]) for row in rows]).T
        advantages = grpo.group_advantages(reward, args.group_size, args.advantage_scale)    # (B,)
        live = grpo.live_rows(task, finished.bool(), args.group_size, args.overlong == "mask", args.dynamic_sampling)
        weights = grpo.token_weights(lengths, live, args.loss, args.max_new_tokens)          # (B,)

        # 3) Update. The first one's sums measure sampler against learner; on later ones the policy has moved as well.
        updating = time.perf_counter()
        updates = []
        for u in range(args.updates_per_rollout):
            lr = lr_at((step + (u + 0.5) / args.updates_per_rollout) / args.steps)
            updates.append(update(everybody, advantages, weights, lr))
        done = time.perf_counter()

        # 4) Report. Not the loss: on centred advantages its value says nothing about learning.
        metrics |= report(step, sigma, lr, rows, reward, rollouts, updates)
        metrics |= {"seconds": done - began, "seconds_sample": updating - began, "seconds_update": done - updating}
        last = step + 1 == args.steps
        if last or step > 0 and (step + 1) % args.eval_every == 0:
            metrics.setdefault("eval_accuracy", held_out_accuracy())             # a run of one step keeps the first
        with signals_wait():
            append("metrics.jsonl", [metrics])
            append("samples.jsonl", [{"step": step, "advantage": a, **r} for a, r in zip(advantages.tolist(), rows)])
            checkpoints.keep()
            if last or (step + 1) % args.save_every == 0:
                save()
        bar.set_postfix({name: f"{metrics[name]:.3g}" for name in ("reward", "length", "tokens_per_s")})
        bar.update()
