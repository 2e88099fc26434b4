"""
QeRL's loop: GRPO/DAPO of a Qwen2.5 model with frozen 4-bit weights, LoRA and AQN.

    python train.py                            a tiny model that ships here: CPU, offline, minutes
    python train.py --model qwen2.5-7b         the 7B on GSM8K, the paper's settings, one GPU
    python train.py --resume --out runs/x      go on where runs/x stopped, with its flags
    torchrun --nproc-per-node 8 train.py ...   the same run on 8 GPUs, a share of the prompts each

One step: sample a group of answers to each problem with noise on the norms, score them, turn
scores into advantages, update the adapter, report. The sampler writes down the log-probs that it
drew with; grpo.py says what the loss makes of them.

A run folder holds run.json (the flags and what ran them), metrics.jsonl (one object a step),
samples.jsonl (every completion with its verdict), adapter/ (PEFT format) and checkpoints/ (the last
two). A run that learns nothing any more is ended (watch.py), with the adapter of its best steps in
adapters/last_good. --keep keeps others there.

Not here: what a run is set up from (prepare.py), a learned reward, a config file.
"""
import dataclasses
import math
import time
from pathlib import Path

from harness import process  # isort: skip; before torch
import torch

import aqn
import grpo
import rewards
from harness import data
from harness.checkpoints import claimed, ending_with, signals_wait
from harness.config import parse_args
from harness.console import Watch, farewell, greet, tell
from harness.prepare import Progress, begin, prepare
from harness.ranks import gather, say, share
from learner import Batch
from sampler import Sampling, row_key

# -----------------------------------------------------------------------------
# The verbs of a step

def choose(run, cursor):
    """-> a step's problems: their places in the run, from `cursor` on, and their indices.

    --revisit passes over those whose last groups were all right or all wrong (GRESO 2506.02177).
    """
    args = run.args
    chosen = {}
    while len(chosen) < args.prompts_per_step:
        i, = data.step_indices(len(run.problems), args.seed, cursor, 1)
        u = row_key(args.seed, cursor, args.group_size) / 2**63  # a key that no sample has
        if u < args.revisit ** run.misses[i].item():
            chosen[cursor] = i
        cursor += 1
    return list(chosen), list(chosen.values())


def sample(run, step, sigma, places, indices):
    """G samples of each chosen problem, each rank its share -> rollouts and rows of all ranks.

    Noise is here alone. A sample's randomness follows from its problem's place in the run: it does
    not depend on the number of ranks.
    """
    args = run.args
    sampling = Sampling(args.max_new_tokens, run.tokenizer.end_ids, args.temperature,
                        seed=args.seed)
    problems = [run.problems[i] for i in share(indices)]
    prompts = [p.prompt for p in problems]
    with aqn.noisy_norms(run.model, sigma, args.seed, step):
        rollouts = run.sampler.generate(prompts, args.group_size, sampling, share(places))
    rows = gather(score(run, problems, rollouts))
    first, *others = gather([rollouts])
    return sum(others, start=first), rows


def score(run, problems, rollouts):
    """-> rows of rewards.score(), each with its `reward`: `task` + what format and length add."""
    args = run.args
    rows = rewards.score(run.tokenizer, problems, rollouts, args.prompt_style, run.plug_in)
    for row in rows:
        row["reward"] = row["task"] + args.format_weight * row["format"]
        if args.overlong_buffer:
            row["reward"] += rewards.overlong_penalty(row["length"], args.max_new_tokens,
                                                      args.overlong_buffer)
    return rows


def column(rows, key):
    return torch.tensor([row[key] for row in rows])


def compare(run, rows):
    """Rows of all ranks -> advantages (B,), and token weights (B,) for each update of a pass."""
    args = run.args
    task = column(rows, "task")
    shaping = torch.tensor([row["reward"] - row["task"] for row in rows])
    if task.isnan().all():
        raise process.Stopped(f"--reward {args.reward}: nan for each of {len(rows)} completions")
    advantages = grpo.group_advantages(task, args.group_size, args.advantage_scale, shaping)
    mask = grpo.loss_mask(task, column(rows, "finished"), args.overlong == "mask")
    lengths = column(rows, "length")
    weights = [grpo.token_weights(lengths, part, run.learner.loss, args.max_new_tokens)
               for part in grpo.minibatches(mask, args.group_size, args.updates_per_rollout)]
    return advantages, weights


def remember(run, indices, rows):
    """Count a problem's groups in a row that taught nothing, for --revisit. Up to three: what is
    beyond the model today may not be for ever.
    """
    informative = grpo.informative_groups(column(rows, "task"), run.args.group_size)
    for i, taught in zip(indices, informative.tolist()):         # a small set may have one twice
        run.misses[i] = 0 if taught else min(3, run.misses[i] + 1)


def update(run, step, rollouts, advantages, weights):
    """weights: of one pass, as compare() gives them -> the Updates of all passes."""
    args = run.args
    weights = weights * args.epochs              # a list: pass after pass
    updates = []
    batch = Batch(rollouts, advantages)
    for u, weight in enumerate(weights):
        lr = lr_at(args, (step + (u + 0.5) / len(weights)) / args.steps)
        updates.append(run.learner.update(batch, weight, lr))
        if updates[-1].failure:
            say(f"step {step}: {updates[-1].failure}: update skipped")
    return updates


def lr_at(args, progress):
    """progress in [0, 1] of the run -> learning rate: linear warm-up, then --lr-schedule."""
    if progress < args.warmup:
        return args.lr * progress / args.warmup
    if args.lr_schedule == "constant":
        return args.lr * min(1.0, 4 * (1 - progress))
    angle = math.pi * (progress - args.warmup) / (1 - args.warmup)
    return args.lr * (1 + math.cos(angle)) / 2


def report(run, rows, advantages, weights, rollouts, updates):
    """The step's numbers; docs/metrics.md defines each. Means over all B rows of all ranks."""
    G = run.args.group_size

    def mean(key):
        return sum(row[key] for row in rows) / len(rows)

    names = dict.fromkeys(name for row in rows for name in row.get("parts", ()))
    metrics = {"reward": column(rows, "reward").nanmean().item()}
    for name in names:
        part = torch.tensor([row["parts"].get(name, 0.0) for row in rows])
        metrics[f"reward_{name}"] = part.nanmean().item()
    metrics |= {"accuracy": mean("correct"), "format": mean("format")}
    metrics |= {"length": mean("length"), "truncated": 1 - mean("finished")}
    informative = grpo.informative_groups(column(rows, "task"), G)
    learned = (advantages != 0) & (sum(weights) > 0)
    metrics["informative"] = informative.float().mean().item()
    metrics["groups"] = int(learned.view(-1, G).any(dim=1).sum())
    taught = [update for update in updates if update.sums] or updates
    metrics |= grpo.summarize(taught[0].sums)    # of the first: before the policy has moved
    last = grpo.summarize(taught[-1].sums)
    metrics |= {key: value for key, value in last.items() if key.startswith("clip")}
    metrics |= {"grad_norm": taught[-1].grad_norm, "lr": updates[-1].lr, **run.learner.metrics()}
    metrics |= {"idle": rollouts.idle, "tokens_per_s": rollouts.num_tokens / rollouts.seconds}
    return metrics


def evaluate_held_out(run, step):
    """Greedy answers to the held-out problems, each rank its share, without noise -> metrics."""
    began = time.time()
    args = run.args
    problems = share(run.held_out)
    greedy = Sampling(args.max_new_tokens, run.tokenizer.end_ids, temperature=0.0)
    rollouts = run.sampler.generate([p.prompt for p in problems], 1, greedy)
    rows = gather(rewards.score(run.tokenizer, problems, rollouts, args.prompt_style, run.plug_in))
    metrics = {"eval_accuracy": sum(row["correct"] for row in rows) / len(rows)}
    if run.plug_in:
        metrics["eval_reward"] = column(rows, "task").nanmean().item()
    said = ", ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in metrics.items())
    say(f"after {step} steps: held-out {said}")
    if not run.bar.disable:
        run.bar.start_t += time.time() - began   # its steps per second leave this out
    return metrics


def give_up(run, verdict, step, master):
    run.folder.keep_adapter("last_good", {"master": master})
    gather([])                                   # torchrun ends all ranks when one has ended
    raise process.Stopped(f"{verdict}; adapters/last_good is that of step {step}")


# -----------------------------------------------------------------------------
# The loop: sample, compare, update, report

def train(run):
    args = run.args
    progress = begin(run)
    run.bar.initial = run.bar.n = progress.step
    watch = Watch(args)
    for step in range(progress.step, args.steps):
        metrics = {"step": step}
        if step == 0:                                            # accuracy before training
            metrics |= evaluate_held_out(run, 0)

        # 1) Sample, and score each answer.
        began = time.perf_counter()
        sigma = aqn.sigma_at(step, args.steps, args.sigma_start, args.sigma_end,
                             args.noise_stages, args.noise_schedule)
        places, indices = choose(run, progress.cursor)
        rollouts, rows = sample(run, step, sigma, places, indices)
        remember(run, indices, rows)

        # 2) Compare the answers to each problem with each other.
        advantages, weights = compare(run, rows)

        # 3) Update the adapter.
        updating = time.perf_counter()
        updates = update(run, step, rollouts, advantages, weights)
        done = time.perf_counter()

        # 4) Report. Not the loss: on centred advantages its value says nothing about learning.
        metrics |= report(run, rows, advantages, weights, rollouts, updates)
        metrics["passed_over"] = places[-1] + 1 - progress.cursor - len(places)
        metrics |= {"sigma": sigma, "tokens": progress.tokens + rollouts.num_tokens,
                    "seconds": done - began, "seconds_sample": updating - began,
                    "seconds_update": done - updating}
        last = step + 1 == args.steps
        best = progress.best
        if "eval_accuracy" not in metrics and (last or (step + 1) % args.eval_every == 0):
            metrics |= evaluate_held_out(run, step + 1)
            best = max(best, metrics.get("eval_reward", metrics["eval_accuracy"]))
        better = best > progress.best
        progress = Progress(step + 1, places[-1] + 1, metrics["tokens"], best)
        samples = [{"step": step, "advantage": a, **row}
                   for a, row in zip(advantages.tolist(), rows)]
        with signals_wait():
            run.folder.log("metrics.jsonl", [metrics])
            run.folder.log("samples.jsonl", samples)
            run.folder.snapshot(dataclasses.asdict(progress) | run.learner.counters())
            if last or progress.step % args.save_every == 0:
                run.folder.save()
            if args.keep and progress.step % args.keep == 0:
                run.folder.keep_adapter(f"step_{progress.step:06d}")
            if args.keep and better:
                run.folder.keep_adapter("best")
        run.tracker.log(metrics)
        tell(run, metrics, rows)
        if watch.see(metrics):
            good = progress.step, run.folder.checkpoints.tensors["master"].clone()
        if watch.verdict:
            give_up(run, watch.verdict, *good)
    run.folder.note(ended=process.now())


def main():
    with process.one_line("train.py"):
        args, before = parse_args()
        with claimed(Path(args.out), args.resume):
            run = prepare(args, before)
    with ending_with(run.folder.save, f"go on with --resume --out {run.folder.path}"), run.bar:
        greet(run)
        train(run)
        run.bar.close()
        farewell(run)


if __name__ == "__main__":
    main()
