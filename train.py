"""
QeRL's training loop: GRPO/DAPO of Qwen2.5 and Qwen3 with frozen 4-bit weights, LoRA and AQN.

    python train.py                            a tiny model that ships here: CPU, offline, 2 minutes
    python train.py --model qwen2.5-7b         a real model on GSM8K, one GPU
    python train.py --config recipes/paper.json              most settings of the paper's Table 4
    python train.py --resume --out runs/x      continue the run in runs/x, with its settings
    torchrun --nproc-per-node 8 train.py ...   the same; each GPU answers an eighth of the problems

AQN, adaptive quantization noise, is Gaussian noise on the weights of the norms while sampling, off
by default (--sigma-start). A training step has four parts, in train() at the end of this file:

    sample    a group of G answers to each of P problems, with AQN's noise if it is on
    score     grade each answer, and compare it with the others of its group
    update    the adapter, so that the better answers of a group become more probable
    report    the step's numbers and answers; at intervals also an evaluation and a checkpoint

P problems x G answers are B rows, and rows [p * G, (p + 1) * G) answer problem p. The sampler
records the log-probability of every token that it draws; grpo.py explains how the loss uses it.
With several GPUs ("ranks") each samples and grades its share of the problems. Then every rank gets
all rows, so advantages and weights do not depend on the number of ranks.

A run folder has run.json (settings, library versions, machine), metrics.jsonl (one line per step),
samples.jsonl and held_out.jsonl (every answer with its verdict, from training and evaluations),
adapter/ (in PEFT's format; model/ with --train full) and checkpoints/ (the last two).

Not here: setup (harness/setup.py), settings (harness/config.py).
"""
import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable

import env  # isort: skip; its settings come before torch

import numpy as np
import torch

import aqn
import grpo
from files import counted
from harness import console
from harness.config import Optim, Settings, read_settings
from harness.folder import ending_with, signals_wait
from harness.setup import Progress, Run, begin, prepare
from learner import Batch, Update
from ranks import gather, say, share
from sampler import Rollouts, Row, Sampler, Sampling
from tasks.figures import sampler_entropy
from tasks.problems import problems_at

# -----------------------------------------------------------------------------
# Score

def score(grade: Callable, problems: list, rollouts: Rollouts) -> Rollouts:
    """The same rollouts, with `graded` filled in for each row: what samples.jsonl records of it.

    grade() returns a dict for each row. `task` is the reward: 1 or 0, or with --reward the sum of
    the user's `parts` except `shaping`. `format` is whether the answer has the form that the
    prompt asked for, `finished` whether it ended before --max-new-tokens.
    Adds `shaping`, that part or 0, and `reward`, task + shaping, which is only logged, since
    grpo.group_advantages takes the two separately.
    """
    for row, found in zip(rollouts.rows, grade(problems, rollouts.rows), strict=True):
        shaping = found.get("parts", {}).get("shaping", 0.0)
        row.graded = found | {"shaping": shaping, "reward": found["task"] + shaping}
    return rollouts


def column(rows: list[Row], key: str) -> torch.Tensor:
    """One value of each graded row, (B,): float64, int64 or bool, as precise as Python's own."""
    return torch.from_numpy(np.array([row.graded[key] for row in rows]))


# -----------------------------------------------------------------------------
# Update

def plan_updates(rollouts: Rollouts, loss: grpo.Loss, settings: Settings) -> list[torch.Tensor]:
    """-> one tensor (B, L) per update on this batch: the weight of each token in its loss, 0 for
    tokens outside the loss.

    Two flags make several updates of one batch. With 4 groups of answers, a b c d:

        --updates-per-rollout 2     [a b] [c d]             each row is trained on once
        --epochs 2                  [a b c d] [a b c d]     each row is trained on twice
        both                        [a b] [c d] [a b] [c d]

    With --overlong mask, answers cut off at --max-new-tokens get weight 0.
    """
    rows = rollouts.rows
    mask = grpo.loss_mask(rollouts.sampled(), column(rows, "task"), column(rows, "finished"),
                          settings.overlong == "mask")
    one_pass = [grpo.token_weights(minibatch, loss, settings.max_new_tokens) for minibatch in
                grpo.minibatches(mask, settings.group_size, settings.updates_per_rollout)]
    return one_pass * settings.epochs            # the same list for every pass


def learning_rates(optim: Optim, step: int, steps: int, count: int) -> list[float]:
    """The rates of the `count` optimizer steps of training step `step`, of `steps` in the run."""
    # + 0.5: the rate at an update's midpoint, so that a warm-up does not start at 0.
    return [learning_rate(optim, (step + (u + 0.5) / count) / steps) for u in range(count)]


def learning_rate(optim: Optim, fraction: float) -> float:
    """The rate when this fraction of the run, 0 to 1, is done: a warm-up, then --lr-schedule."""
    rising = optim.lr * fraction / optim.warmup if fraction < optim.warmup else optim.lr
    if optim.lr_schedule == "wsd":               # falls to 0 over the last quarter
        return min(rising, optim.lr * (4 * (1 - fraction)))
    if fraction < optim.warmup:
        return rising
    angle = math.pi * (fraction - optim.warmup) / (1 - optim.warmup)
    return optim.lr * (1 + math.cos(angle)) / 2


# -----------------------------------------------------------------------------
# Report

def report(rollouts: Rollouts, advantages: torch.Tensor, weights: list[torch.Tensor],
           updates: list[Update], group_size: int) -> dict:
    """The step's metrics; docs/metrics.md defines each.

    Most are means over all B rows of all ranks; those that compare log-probabilities are means over
    the tokens that were trained on. The loss is not among them: advantages are centered, so its
    value shows no progress.
    """
    rows = rollouts.rows
    graded = [row.graded for row in rows]

    def mean(key):
        return sum(one[key] for one in graded) / len(graded)

    metrics = {"reward": column(rows, "reward").nanmean().item()}
    if "parts" in graded[0]:
        names = dict.fromkeys(name for one in graded for name in one["parts"])   # each name once
        for name in names:
            part = torch.tensor([one["parts"].get(name, 0.0) for one in graded])
            metrics[f"reward_{name}"] = part.nanmean().item()
    metrics |= {"accuracy": mean("correct"), "format": mean("format")}
    metrics |= {"length": mean("length"), "truncated": 1 - mean("finished")}
    metrics["sampler_entropy"] = sampler_entropy(graded)
    informative = grpo.informative_groups(column(rows, "task"), group_size)
    in_some_update = (sum(weights) > 0).any(dim=1)               # (B,)
    learned = (advantages != 0) & in_some_update
    metrics["informative"] = informative.float().mean().item()
    metrics["groups"] = int(learned.view(-1, group_size).any(dim=1).sum())
    # The distance between learner and sampler comes from the first update that trained a row, since
    # the policy has not moved yet; the clip ratios come from the last one, where it has moved most.
    trained = [one for one in updates if one.sums] or updates
    metrics |= grpo.summarize(trained[0].sums)
    last = grpo.summarize(trained[-1].sums)
    metrics |= {key: value for key, value in last.items() if key.startswith("clip_ratio")}
    metrics |= {"grad_norm": trained[-1].grad_norm, "lr": updates[-1].lr}
    seconds = rollouts.seconds or math.inf       # 0: a user's sampling function did not set it
    return metrics | {"idle": rollouts.idle, "tokens_per_s": rollouts.num_tokens / seconds}


def evaluate(run: Run, sample: Callable, steps_done: int) -> dict:
    """Answers the held-out problems greedily, without noise, and logs the answers in held_out.jsonl
    -> what this adds to the line in metrics.jsonl. sample: see train().
    """
    problems = share(run.held_out)
    places = share(range(len(run.held_out)))
    began = time.perf_counter()
    greedy = Sampling(run.settings.max_new_tokens, run.tokenizer.end_ids, temperature=0.0)
    rollouts = sample(run.sampler, problems, 1, greedy, places)
    graded = gather(run.grade(problems, rollouts.rows))
    metrics = {"eval_accuracy": sum(one["correct"] for one in graded) / len(graded)}
    if run.settings.reward:
        metrics["eval_reward"] = torch.tensor([one["task"] for one in graded],
                                              dtype=torch.float64).nanmean().item()
    text = ", ".join(f"{key.removeprefix('eval_')} {value:.3f}" for key, value in metrics.items())
    when = f"after {counted(steps_done, 'step')}" if steps_done else "before training"
    say(f"{when}: held-out {text}, in {time.perf_counter() - began:.1f} s")

    # `step`: the line of metrics.jsonl with this evaluation. --resume drops these answers if that
    # line is missing.
    place = {"step": max(steps_done - 1, 0), "steps_done": steps_done}
    run.folder.log("held_out.jsonl", [place | row for row in graded])
    return metrics


def record(run: Run, progress: Progress, metrics: dict, batch: Batch) -> None:
    """Writes the step's files. progress: after this step.

    A signal such as Ctrl-C is held back until all files of the step are written. snapshot() copies
    the step's state; a run that is stopped before the next step is recorded saves this copy.
    """
    settings = run.settings
    samples = [{"step": metrics["step"], "advantage": advantage, **row.graded}
               for advantage, row in zip(batch.advantages.tolist(), batch.rows, strict=True)]
    with signals_wait():
        run.folder.log("metrics.jsonl", [metrics])
        run.folder.log("samples.jsonl", samples)
        # Before snapshot(): a run that dies here repeats the step and this file.
        if settings.keep and progress.step % settings.keep == 0:
            run.folder.keep_adapter(f"step_{progress.step:06d}")
        run.folder.snapshot(dataclasses.asdict(progress))       # in memory
        last = progress.step == settings.steps
        if last or progress.step % settings.save_every == 0:
            run.folder.save()                                                            # to disk


# -----------------------------------------------------------------------------
# The loop: sample, score, update, report

def sample_answers(sampler: Sampler, problems: list, group_size: int, sampling: Sampling,
                   places: range | list) -> Rollouts:
    """group_size answers to each problem. places: see Sampler.generate."""
    prompts = [problem.prompt for problem in problems]
    return sampler.generate(prompts, group_size, sampling, places)


def train(run: Run, sample: Callable = sample_answers) -> None:
    """All steps of a run, starting at step 0 or at its checkpoint.

    sample: a function like sample_answers, for example one that answers in turns and calls a tool.
    """
    settings = run.settings
    steps, seed, G = settings.steps, settings.seed, settings.group_size
    sampling = Sampling(settings.max_new_tokens, run.tokenizer.end_ids, settings.temperature,
                        seed=seed)
    progress = begin(run)
    if progress.step == 0:                       # repeated if the run dies before its first save
        before = evaluate(run, sample, 0)
    for step in range(progress.step, steps):
        # 1) Sample answers to this rank's share of the step's problems.
        began = time.perf_counter()
        next_cursor = progress.cursor + settings.prompts_per_step
        places = share(range(progress.cursor, next_cursor))
        problems = problems_at(run.problems, seed, places)
        sigma = aqn.sigma_at(step, steps, settings.sigma_start, settings.sigma_end,
                             settings.noise_stages, settings.noise_schedule)
        with aqn.noisy_norms(run.model, sigma, seed, step):      # nothing else has noise
            local = sample(run.sampler, problems, G, sampling, places)

        # 2) Score. Then every rank gets all rows, in the same order.
        scored = score(run.grade, problems, local)
        rollouts = functools.reduce(operator.add, gather([scored]))
        advantages = grpo.group_advantages(column(rollouts.rows, "task"), G,
                                           settings.advantage_scale,
                                           column(rollouts.rows, "shaping"))

        # 3) Update the adapter.
        updating = time.perf_counter()
        weights = plan_updates(rollouts, run.learner.loss, settings)
        rates = learning_rates(settings, step, steps, len(weights))
        batch = Batch(rollouts.rows, advantages)
        if settings.updates_per_rollout > 1:     # else the first update computes them anyway
            run.learner.compute_old_logprobs(batch, weights[:settings.updates_per_rollout])
        updates = [run.learner.update(batch, weight, lr) for weight, lr in zip(weights, rates)]
        done = time.perf_counter()

        # 4) Report.
        tokens = progress.tokens + rollouts.num_tokens
        skipped = progress.skipped + sum(bool(update.failure) for update in updates)
        metrics = {"step": step, "sigma": sigma, "tokens": tokens, "seconds": done - began,
                   "seconds_sample": updating - began, "seconds_update": done - updating}
        metrics |= report(rollouts, advantages, weights, updates, G) | {"skipped": skipped}
        if step == 0:
            metrics |= {f"{key}_before": value for key, value in before.items()}
        console.tell(settings, metrics, updates)
        progress = Progress(step + 1, next_cursor, tokens, skipped)
        if progress.step == steps or progress.step % settings.eval_every == 0:
            metrics |= evaluate(run, sample, progress.step)
        record(run, progress, metrics, batch)
        run.watch.see(metrics, updates)          # it may end the run


def main(arguments: list[str] | None = None,
         change: Callable | None = None) -> Run:
    """Runs a training run. arguments: the command line, by default sys.argv's.

    change(run) -> the run, perhaps with another `grade`, and the function that samples: see
    examples/calculator.py and examples/try_again.py.
    """
    with env.one_line():                         # a user error ends in one line, not a traceback
        settings, earlier = read_settings(arguments)
        run, sample = prepare(settings, earlier), sample_answers
        if change:
            run, sample = change(run)
    # If training ends early, the last complete step is saved first.
    with ending_with(run.folder.save, run.folder.advice):
        train(run, sample)
        console.farewell(settings, evaluable=change is None)
    return run


if __name__ == "__main__":
    main()
