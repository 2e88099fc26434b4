"""
QeRL in one script: GRPO/DAPO of a Qwen2.5 model with frozen 4-bit weights, LoRA adapters and adaptive quantization noise.

    python train.py                            a tiny model that ships with the repository: CPU, no network, minutes
    python train.py --model qwen2.5-7b         Qwen2.5-7B-Instruct on GSM8K, the paper's settings, one GPU
    python train.py --resume --out runs/x      go on where runs/x stopped

One step: sample a group of answers to each problem with noise on the norms, score them, turn scores into advantages,
update the adapter, report. The old policy of the ratio is what the sampler wrote down while sampling.

A run folder holds run.json (the flags), metrics.jsonl (one object a step), samples.jsonl (every completion with its
verdict), adapter/ (PEFT format) and checkpoints/ (the last two).

Not here: a critic, a reference model (the adapter switched off is one), a learned reward, a config file.
"""
import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tqdm import tqdm

import aqn
import data
import evaluate
import grpo
import lora
import model as qwen
import rewards
from sampler import Sampler

TINY = Path(__file__).parent / "tiny"
# What changes when no --model is given: the embedded model, and sizes that two CPU cores can do in minutes.
TINY_DEFAULTS = dict(model=str(TINY), data="arithmetic", steps=80, max_new_tokens=48, lr=5e-4, updates_per_rollout=1,
                     eval_every=20, eval_problems=256, save_every=20)

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
# model
add("--model", help="folder, Hugging Face id or name such as qwen2.5-7b (default: the embedded tiny model)")
add("--base", default="nvfp4", choices=["nvfp4", "bf16", "mxfp4", "nf4"], help="format of the frozen linears")
add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
add("--lora-rank", type=int, default=32, help="rank of every adapter (paper 4.1)")
add("--lora-alpha", type=float, default=32, help="adapter scale is alpha / rank (release: alpha = rank)")
add("--train-norms", action="store_true", help="also train the two norms of each block (release: ln=True; not in the paper)")
# data and reward
add("--data", default="gsm8k", help="gsm8k, math, arithmetic, a .jsonl/.json/.parquet file or a Hugging Face id")
add("--eval-data", help="held-out problems; default: the test split, or the end of a file")
add("--prompt-style", default="boxed", choices=sorted(data.STYLES), help="boxed: Qwen's; tags: the paper's think/answer")
add("--max-prompt-tokens", type=int, default=512, help="longer prompts are dropped and counted (release: 256)")
add("--reward", help="module:function to use instead of the built-in grader")
add("--format-weight", type=float, default=0.0, help="added for a well-formed answer (release: 0.1 of the correctness reward)")
# rollouts
add("--steps", type=int, default=600, help="rollout batches (paper: about 600 on GSM8K)")
add("--prompts-per-step", type=int, default=16, help="problems a step; 16 x 8 = Table 4's batch of 128")
add("--group-size", type=int, default=8, help="samples a problem (Table 4: 8 on GSM8K, 16 on BigMath)")
add("--max-new-tokens", type=int, default=4096, help="longest completion (Table 4: 4096 on GSM8K, 8192 on BigMath)")
add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob (Table 4)")
add("--max-rows", type=int, default=256, help="most sequences decoded at a time")
add("--kv-gib", type=float, help="memory for the KV cache (default: what is needed, at most half of what is free)")
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
add("--advantage-scale", default="group", choices=grpo.SCALES, help="divide centred rewards by which standard deviation")
add("--kl-beta", type=float, default=0.0, help="weight of a k3 KL term to the base without adapter (paper: none)")
add("--overlong", default="mask", choices=["mask", "keep"], help="completions cut at the limit: out of the loss (release) or in it")
add("--overlong-buffer", type=int, default=0, help="soft penalty over the last so many tokens (DAPO); 0: none")
add("--dynamic-sampling", action="store_true", help="replace groups of equal rewards, up to two more rounds (DAPO)")
add("--updates-per-rollout", type=int, default=4, help="optimizer steps on each rollout batch (Table 4: 4 on GSM8K, 1 on BigMath)")
add("--lr", type=float, default=1e-5, help="peak learning rate (Table 4: 1e-5; bf16 LoRA 5e-6)")
add("--warmup", type=float, default=0.1, help="share of the run with rising rate, then cosine to 0 (release)")
add("--max-grad-norm", type=float, default=0.2, help="clip of the global gradient norm (release)")
add("--weight-decay", type=float, default=0.0, help="decoupled, on the adapter (release: 0.1, which at 1e-5 moves nothing)")
add("--micro-batch-tokens", type=int, default=16384, help="tokens in one forward and backward of the learner")
# the run
add("--out", help="run folder (default: runs/MODEL-BASE)")
add("--eval-every", type=int, default=20, help="steps between evaluations; also before the first step and after the last")
add("--eval-problems", type=int, default=256, help="held-out problems of an evaluation, greedy; 0: all")
add("--save-every", type=int, default=20, help="steps between checkpoints")
add("--resume", action="store_true", help="go on from the newest intact checkpoint in --out")
add("--seed", type=int, default=0, help="of adapter, order of problems, sampling and noise")
if not any(a.split("=")[0] == "--model" for a in sys.argv[1:]):
    parser.set_defaults(**TINY_DEFAULTS)
args = parser.parse_args()


# -----------------------------------------------------------------------------
# Set-up: everything that can be wrong is found out here, before the first step.

def load_problems(source, split):
    problems, unreadable = data.load_problems(source, split, is_readable=rewards.can_read)
    if unreadable:
        print(f"{source}: {unreadable} problems left out, their answers cannot be read")
    problems, prompts, long = data.encode_prompts(tokenizer, problems, args.prompt_style, args.max_prompt_tokens)
    if long:
        print(f"{source}: {long} prompts of more than {args.max_prompt_tokens} tokens left out")
    return problems, prompts


def prepare_folder(out):
    """An empty folder for a new run, or the one to resume; never another run's."""
    if args.resume:
        if not (out / "run.json").exists():
            raise ValueError(f"--resume: {out} holds no run")
        before = json.loads((out / "run.json").read_text())
        changed = [k for k, v in vars(args).items() if k not in ("resume", "out", "device") and before.get(k, v) != v]
        if changed:
            raise ValueError(f"--resume: --{changed[0].replace('_', '-')} is {getattr(args, changed[0])!r}, "
                             f"the run had {before[changed[0]]!r}")
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: choose another folder, or --resume it")
    else:
        out.mkdir(parents=True, exist_ok=True)
        lora.write_atomically(out / "run.json", json.dumps(vars(args), indent=2).encode())


try:
    for name in ("lora_rank", "steps", "prompts_per_step", "group_size", "max_new_tokens", "updates_per_rollout", "eval_every",
                 "save_every", "micro_batch_tokens", "noise_stages"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.temperature <= 0:
        raise ValueError(f"--temperature must be above 0 to learn from samples, got {args.temperature}")
    aqn.sigma_at(0, args.steps, args.sigma_start, args.sigma_end, args.noise_stages)
    folder = qwen.resolve(args.model)
    tokenizer = data.Tokenizer(folder)
    train_problems, train_prompts = load_problems(args.data, "train")
    if args.eval_data or args.data in data.KNOWN or args.data == "arithmetic":
        eval_problems, eval_prompts = load_problems(args.eval_data or args.data, "test")
    else:                                                            # a file of one's own: its end is held out
        held = min(args.eval_problems or 256, len(train_problems) // 10)
        eval_problems, eval_prompts = train_problems[-held:], train_prompts[-held:]
        train_problems, train_prompts = train_problems[:-held], train_prompts[:-held]
    if args.eval_problems:
        eval_problems, eval_prompts = eval_problems[:args.eval_problems], eval_prompts[:args.eval_problems]
    plug_in = rewards.load_reward(args.reward) if args.reward else None
    out = Path(args.out or f"runs/{Path(args.model).name}-{args.base}")
    prepare_folder(out)
    model = qwen.load(folder, args.base, args.device)
    model.live_vocab = tokenizer.vocab_size
    adapter = lora.Adapter(model, args.lora_rank, args.lora_alpha, args.train_norms, args.seed)
    sampler = Sampler(model, args.max_prompt_tokens + args.max_new_tokens, args.max_rows, args.kv_gib)
except (ValueError, AssertionError, OSError, torch.OutOfMemoryError) as error:
    sys.exit(f"train.py: {str(error).splitlines()[0]}")

# betas: as the release. 8-bit moments would save 3 bytes of 8 for 0.5 % of the parameters: not worth a second optimizer.
optimizer = torch.optim.AdamW([adapter.master], betas=(0.9, 0.99), weight_decay=args.weight_decay, fused=True)
state = {"step": 0, "cursor": 0, "tokens": 0, "skipped": 0}          # with adapter and moments: all that a resumed run needs


# -----------------------------------------------------------------------------
# Checkpoints: state.safetensors (adapter and moments) and state.json (the rest, and the first one's checksum).

def save_checkpoint():
    """Into a temporary folder that is renamed when whole; the last two are kept."""
    moments = optimizer.state[adapter.master]
    tensors = save({"master": adapter.master.data.cpu(), "exp_avg": moments["exp_avg"].cpu(),
                    "exp_avg_sq": moments["exp_avg_sq"].cpu(), "step": moments["step"].cpu()} if moments else
                   {"master": adapter.master.data.cpu()})
    root, temporary = out / "checkpoints", out / "checkpoints" / ".writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    lora.write_atomically(temporary / "state.safetensors", tensors)
    lora.write_atomically(temporary / "state.json", json.dumps(
        {**state, "sha256": hashlib.sha256(tensors).hexdigest()}).encode())
    final = root / f"step_{state['step']:06d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in sorted(root.glob("step_*"))[:-2]:
        shutil.rmtree(old)
    lora.save_adapter(model, out / "adapter")


def load_checkpoint():
    """The newest checkpoint whose checksum holds; damaged ones are named and passed over."""
    for folder in sorted((out / "checkpoints").glob("step_*"), reverse=True):
        try:
            saved = json.loads((folder / "state.json").read_text())
            if hashlib.sha256((folder / "state.safetensors").read_bytes()).hexdigest() != saved.pop("sha256"):
                raise ValueError("its checksum does not match")
            tensors = load_file(folder / "state.safetensors")
        except (OSError, ValueError, KeyError) as error:
            print(f"{folder}: damaged checkpoint passed over ({error})")
            continue
        state.update(saved)
        adapter.master.data.copy_(tensors.pop("master"))
        adapter.sync()
        if tensors:
            optimizer.state[adapter.master] = {k: t if k == "step" else t.to(adapter.master.device) for k, t in tensors.items()}
        break
    else:
        print(f"{out}: no intact checkpoint, starting from step 0")
    for name in ("metrics.jsonl", "samples.jsonl"):                  # steps after the checkpoint will be done again
        lines = (out / name).read_text().splitlines(keepends=True) if (out / name).exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < state["step"]]
        lora.write_atomically(out / name, "".join(kept).encode())


# -----------------------------------------------------------------------------
# The four verbs of a step.

def sample(step, sigma, count):
    """The next `count` problems, G samples each -> problems, rollouts. Only here does the model carry noise."""
    cursor = state["cursor"]
    indices = data.step_indices(len(train_problems), args.seed, cursor, count)
    state["cursor"] += count
    with aqn.noisy_norms(model, sigma, args.seed, step):
        rollouts = sampler.generate([train_prompts[i] for i in indices], args.group_size, args.max_new_tokens, tokenizer.end_ids,
                                    args.temperature, args.seed, prompt_ids=range(cursor, cursor + count))
    return [train_problems[i] for i in indices], rollouts


def score(problems, rollouts):
    """-> rows of evaluate.score() with their `reward`: correctness, plus what the flags add or take away."""
    rows = evaluate.score(tokenizer, problems, rollouts, args.prompt_style)
    for row in rows:
        row["reward"] = row["correct"] + args.format_weight * row["format"]
        if args.reward:
            parts = plug_in(row["completion"], row["answer"])
            row["reward"] = sum(parts.values()) if isinstance(parts, dict) else float(parts)
        if args.overlong_buffer:
            row["reward"] += rewards.overlong_penalty(row["length"], args.max_new_tokens, args.overlong_buffer)
    return rows


def refill(step, sigma, rollouts, rows):
    """Dynamic sampling: groups of equal rewards make room for new problems, at most twice."""
    for _ in range(2):
        useful = grpo.keep_informative(torch.tensor([row["reward"] for row in rows]), args.group_size)
        missing = int((~useful).sum())
        if not missing:
            break
        problems, more = sample(step, sigma, missing)
        keep = [i for i in range(len(rows)) if useful[i // args.group_size]]
        rollouts, rows = rollouts.select(keep) + more, [rows[i] for i in keep] + score(problems, more)
    return rollouts, rows


def update(rollouts, advantages, weights, lr):
    """One optimizer step on the whole batch -> summed metrics of its trained tokens and the gradient norm.

    A NaN or infinity anywhere in loss or gradient skips the step, which is counted.
    """
    adapter.zero_grad()
    sums = {}
    trained = torch.nonzero((weights > 0) & ((advantages != 0) | (args.kl_beta > 0)))[:, 0].tolist()
    if not trained:
        return sums, 0.0                                             # nothing to learn from: no step, no momentum
    lengths = [len(rollouts.prompts[b]) + len(rollouts.completions[b]) for b in trained]
    for part in grpo.micro_batches(lengths, args.micro_batch_tokens):
        rows = [trained[i] for i in part]
        tokens = [rollouts.prompts[b] + rollouts.completions[b] for b in rows]
        starts = [len(rollouts.prompts[b]) for b in rows]
        logprobs, entropy = model.token_logprobs(tokens, starts, args.temperature)
        ref = None
        if args.kl_beta:
            with torch.no_grad(), adapter.off():
                ref, _ = model.token_logprobs(tokens, starts, args.temperature)
        old = torch.cat([rollouts.logprobs[b] for b in rows]).to(logprobs.device)
        row = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(rollouts.completions[b]) for b in rows]))
        loss, more = grpo.policy_loss(logprobs, old, advantages[rows].to(old.device), row.to(old.device),
                                      weights[rows].to(old.device), args.loss, args.clip_low, args.clip_high,
                                      args.correction, args.correction_cap, ref, args.kl_beta)
        loss.backward()
        sums = grpo.add_sums(sums, more | {"entropy": entropy.sum().double()})
    grad_norm = adapter.master.grad.norm().item()
    if not math.isfinite(grad_norm):
        print(f"\nstep {state['step']}: gradient norm is {grad_norm}, update skipped")
        state["skipped"] += 1
        return sums, grad_norm
    adapter.master.grad.mul_(min(1.0, args.max_grad_norm / (grad_norm + 1e-6)))
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    adapter.sync()
    return sums, grad_norm


def report(step, sigma, lr, rows, reward, rollouts, updates):
    """The step's numbers; the README defines each. Means over all B rows, entropy and mismatch over trained tokens."""
    def mean(key):
        return sum(row[key] for row in rows) / len(rows)
    first, last = (grpo.summarize(updates[i][0]) for i in (0, -1))
    return {"reward": reward.nanmean().item(), "accuracy": mean("correct"), "format": mean("format"), "sigma": sigma, "lr": lr,
            "length": mean("length"), "truncated": 1 - mean("finished"), "idle": rollouts.idle,
            "informative": grpo.keep_informative(reward, args.group_size).float().mean().item(),
            **first, **{k: v for k, v in last.items() if k.startswith("clip")},
            "grad_norm": updates[-1][1], "skipped": state["skipped"], "tokens": state["tokens"],
            "tokens_per_s": rollouts.num_tokens / rollouts.seconds}


def lr_at(progress):
    """progress in [0, 1] of the run -> learning rate: linear warm-up, then half a cosine to 0."""
    if progress < args.warmup:
        return args.lr * progress / args.warmup
    return args.lr * (1 + math.cos(math.pi * (progress - args.warmup) / (1 - args.warmup))) / 2


def append(name, objects):
    with open(out / name, "a") as f:
        f.write("".join(json.dumps(o) + "\n" for o in objects))


stopping = []                                                        # signals received; the step in hand is finished first
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda n, _: (stopping.append(n), signal.signal(n, signal.SIG_DFL)))

# -----------------------------------------------------------------------------
# The loop: sample, score, update, report.

if args.resume:
    load_checkpoint()
batch = args.prompts_per_step * args.group_size
print(f"{args.model} as {args.base} on {args.device}: {adapter.master.numel():,} trained parameters; {len(train_problems)} problems, "
      f"{len(eval_problems)} held out; {args.prompts_per_step} x {args.group_size} = {batch} samples a step, {out}")
bar = tqdm(total=args.steps, initial=state["step"], unit="step", dynamic_ncols=True)
for step in range(state["step"], args.steps):
    began = time.perf_counter()
    metrics = {"step": step}
    if step == 0:                                                    # the row of step 0 has the accuracy before training
        metrics["eval_accuracy"], _ = evaluate.greedy_accuracy(sampler, tokenizer, eval_problems, eval_prompts, args.max_new_tokens)

    # 1) Sample. Only rollouts see the noise: the update below runs on the clean norms.
    sigma = aqn.sigma_at(step, args.steps, args.sigma_start, args.sigma_end, args.noise_stages, args.noise_schedule,
                         args.noise_exact_end)
    sampling = time.perf_counter()
    problems, rollouts = sample(step, sigma, args.prompts_per_step)

    # 2) Score.
    rows = score(problems, rollouts)
    if args.dynamic_sampling:
        rollouts, rows = refill(step, sigma, rollouts, rows)
    reward = torch.tensor([row["reward"] for row in rows])                                   # (B,)
    advantages = grpo.group_advantages(reward, args.group_size, args.advantage_scale)        # (B,)
    live = grpo.live_rows(reward, torch.tensor(rollouts.finished), args.group_size, args.overlong == "mask", args.dynamic_sampling)
    lengths = torch.tensor([row["length"] for row in rows])
    weights = grpo.token_weights(lengths, live, args.loss, args.max_new_tokens)              # (B,)

    # 3) Update. The first update's sums measure sampler against learner; on later ones the policy has moved as well.
    updating = time.perf_counter()
    updates = []
    for u in range(args.updates_per_rollout):
        lr = lr_at((step + (u + 0.5) / args.updates_per_rollout) / args.steps)
        updates.append(update(rollouts, advantages, weights, lr))
    done = time.perf_counter()

    # 4) Report. Not the loss: on centred advantages its value says nothing about learning.
    state["step"], state["tokens"] = step + 1, state["tokens"] + rollouts.num_tokens
    metrics |= report(step, sigma, lr, rows, reward, rollouts, updates)
    metrics |= {"seconds": done - began, "seconds_sample": updating - sampling, "seconds_update": done - updating}
    if (step + 1) % args.eval_every == 0 and step > 0 or step + 1 == args.steps:
        metrics["eval_accuracy"], _ = evaluate.greedy_accuracy(sampler, tokenizer, eval_problems, eval_prompts, args.max_new_tokens)
        tqdm.write(f"step {step + 1}: held-out accuracy {metrics['eval_accuracy']:.3f}")
    append("metrics.jsonl", [metrics])
    append("samples.jsonl", [{"step": step, "advantage": a, **row} for a, row in zip(advantages.tolist(), rows)])
    bar.set_postfix(reward=f"{metrics['reward']:.3f}", tok_s=f"{metrics['tokens_per_s']:.0f}", length=f"{metrics['length']:.0f}")
    bar.update()
    if stopping or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
        save_checkpoint()
    if stopping:
        sys.exit(f"train.py: stopped by {signal.Signals(stopping[0]).name} after step {step + 1}; go on with --resume --out {out}")
