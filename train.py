"""
QeRL's training loop: GRPO/DAPO with frozen 4-bit weights, LoRA and AQN.

    python train.py                            the bundled tiny model: CPU, offline, 2 minutes
    python train.py --model qwen2.5-7b         a real model on GSM8K, one GPU
    python train.py --config recipes/paper.json              most of the paper's Table 4 settings
    python train.py --resume --out runs/x      continue the run in runs/x, with its settings
    torchrun --nproc-per-node 8 train.py ...   the same; each GPU answers an eighth of the problems

AQN (adaptive quantization noise) adds Gaussian noise to the norm weights while sampling; it's off
by default (--sigma-start). Each step of train() has four parts:

    sample    a group of G answers to each of P problems, with noise if AQN is on
    score     grade each answer and compare it with the rest of its group
    update    the adapter, to make the better answers in each group more likely
    report    log metrics and answers; every so often, evaluate and save a checkpoint

P problems x G answers make B rows, and rows [p * G, (p + 1) * G) answer problem p. The sampler
records the log-prob of every token it draws; grpo.py explains how the loss uses it. With several
GPUs ("ranks"), each samples and grades its share of the problems. Then every rank gets all rows, so
advantages and weights don't depend on the number of ranks.

A run folder has run.json (settings, library versions, machine), metrics.jsonl (one line per step),
samples.jsonl and held_out.jsonl (every graded answer from training and evaluations), adapter/ (in
PEFT's format; model/ with --train full), base/ (the 4-bit model, if the run calibrated it) and
checkpoints/ (the last two).

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
from harness import console, tracker
from harness.config import Optim, Settings, read_settings
from harness.folder import signals_wait
from harness.setup import Progress, Run, begin, prepare
from learner import Batch, Update
from ranks import gather, say, share
from sampler import Rollouts, Row, Sampler, Sampling
from tasks.figures import sampler_entropy
from tasks.problems import choose_problems, requeue

# -----------------------------------------------------------------------------
# The loop: sample, score, update, report

def sample_answers(sampler: Sampler, problems: list, group_size: int, sampling: Sampling,
                   places: range | list) -> Rollouts:
    """Samples group_size answers to each problem. places: see Sampler.generate."""
    prompts = [problem.prompt for problem in problems]
    return sampler.generate(prompts, group_size, sampling, places)


def train(run: Run, sample: Callable = sample_answers) -> None:
    """Runs all steps, starting at step 0 or from the checkpoint.

    sample: a function like sample_answers, for example one that takes turns with a tool.
    """
    settings = run.settings
    steps, seed, G = settings.steps, settings.seed, settings.group_size
    sampling = Sampling(settings.max_new_tokens, run.tokenizer.end_ids, settings.temperature,
                        seed=seed)
    progress = begin(run)
    if progress.step == 0:                       # a run killed before its first save starts over
        before = evaluate(run, sample, 0)
    for step in range(progress.step, steps):
        # 1) Sample answers to this rank's share of the step's problems.
        began = time.perf_counter()
        again, new = choose_problems(len(run.problems), seed, size=settings.prompts_per_step,
                                     next_new=progress.next_new, queue=progress.queue, step=step,
                                     replay=settings.replay)
        next_cursor = progress.cursor + settings.prompts_per_step
        places = share(range(progress.cursor, next_cursor))
        problems = [run.problems[number] for number in share(again + new)]
        sigma = aqn.sigma_at(step, steps, settings.sigma_start, settings.sigma_end,
                             settings.noise_stages, settings.noise_schedule)
        with aqn.noisy_norms(run.model, sigma, seed, step):      # everything else is noise-free
            local = sample(run.sampler, problems, G, sampling, places)

        # 2) Score. Then every rank gets all rows, in the same order.
        scored = score(run.grade, problems, local)
        rollouts = functools.reduce(operator.add, gather([scored]))
        advantages = grpo.group_advantages(column(rollouts.rows, "reward"), G,
                                           settings.advantage_scale,
                                           column(rollouts.rows, "shaping"))

        # 3) Update the adapter.
        updating = time.perf_counter()
        loss_weights = plan_updates(rollouts, run.learner.loss, settings)    # of each update
        rates = learning_rates(settings, step, steps, len(loss_weights))
        batch = Batch(rollouts.rows, advantages)
        if len(loss_weights) > 1:                # else old and policy are the same
            one_pass = loss_weights[:settings.updates_per_rollout]
            run.learner.compute_old_logprobs(batch, one_pass)
        updates = [run.learner.update(batch, weights, lr)
                   for weights, lr in zip(loss_weights, rates)]
        done = time.perf_counter()

        # 4) Report.
        tokens = progress.tokens + rollouts.num_tokens
        skipped = progress.skipped + sum(bool(update.failure) for update in updates)
        metrics = {"step": step, "sigma": sigma, "tokens": tokens, "seconds": done - began,
                   "seconds_sample": updating - began, "seconds_update": done - updating}
        metrics |= report(rollouts, batch.has_advantage(), loss_weights, updates, G)
        queue, of_replay = replay(settings, progress, again, new, rollouts.rows)
        metrics |= of_replay | {"skipped": skipped}
        if step == 0:
            metrics |= {f"{key}_before": value for key, value in before.items()}
        console.tell(settings, metrics, updates)
        progress = Progress(step + 1, next_cursor, tokens, skipped,
                            progress.replayed + len(again), queue)
        if progress.step == steps or progress.step % settings.eval_every == 0:
            metrics |= evaluate(run, sample, progress.step)
        record(run, progress, metrics, batch)
        run.watch.see(metrics, updates)          # may end the run


# -----------------------------------------------------------------------------
# Score

def score(grade: Callable, problems: list, rollouts: Rollouts) -> Rollouts:
    """Fills in each row's `graded`, its line in samples.jsonl, and returns the rollouts.

    grade() returns a dict for each row (rewards.grade_rows). `reward` is 1 or 0, or with --reward
    the sum of the user's `parts` except `shaping`; `format` tells whether the answer has the form
    the prompt asked for, `finished` whether it ended before --max-new-tokens.
    """
    for row, graded in zip(rollouts.rows, grade(problems, rollouts.rows), strict=True):
        row.graded = graded
    return rollouts


def column(rows: list[Row], key: str) -> torch.Tensor:
    """One field of every graded row: (B,), with Python's precision (float64, int64 or bool)."""
    return torch.from_numpy(np.array([row.graded[key] for row in rows]))


# -----------------------------------------------------------------------------
# Update

def plan_updates(rollouts: Rollouts, loss: grpo.Loss, settings: Settings) -> list[torch.Tensor]:
    """Returns a tensor (B, L) for each update: the loss weights of its tokens, 0 outside the loss.

    Two flags split training on a batch into several updates. With 4 groups of answers, a b c d:

        --updates-per-rollout 2     [a b] [c d]             each row is trained on once
        --epochs 2                  [a b c d] [a b c d]     each row is trained on twice
        both                        [a b] [c d] [a b] [c d]

    With --overlong mask, answers cut off at --max-new-tokens get loss weight 0.
    """
    rows = rollouts.rows
    mask = grpo.loss_mask(rollouts.sampled(), column(rows, "reward"), column(rows, "finished"),
                          settings.overlong == "mask")
    one_pass = [grpo.loss_weights(minibatch, loss, settings.max_new_tokens) for minibatch in
                grpo.minibatches(mask, settings.group_size, settings.updates_per_rollout)]
    return one_pass * settings.epochs            # the same list for every pass


def learning_rates(optim: Optim, step: int, steps: int, count: int) -> list[float]:
    """The learning rates of the `count` updates in training step `step` of `steps`."""
    # + 0.5 gives the rate at the update's midpoint, so that warm-up doesn't start at 0.
    return [learning_rate(optim, (step + (u + 0.5) / count) / steps) for u in range(count)]


def learning_rate(optim: Optim, fraction: float) -> float:
    """The learning rate this far into the run (0 to 1): warm-up, then --lr-schedule."""
    rising = optim.lr * fraction / optim.warmup if fraction < optim.warmup else optim.lr
    if optim.lr_schedule == "wsd":               # falls to 0 over the last quarter
        return min(rising, optim.lr * (4 * (1 - fraction)))
    if fraction < optim.warmup:
        return rising
    angle = math.pi * (fraction - optim.warmup) / (1 - optim.warmup)
    return optim.lr * (1 + math.cos(angle)) / 2


# -----------------------------------------------------------------------------
# Report

def report(rollouts: Rollouts, has_advantage: torch.Tensor, loss_weights: list[torch.Tensor],
           updates: list[Update], group_size: int) -> dict:
    """The step's metrics, defined in docs/metrics.md. has_advantage: from Batch.has_advantage();
    loss_weights: from plan_updates().

    Most are means over the B rows of all ranks; those that compare log-probs are means over the
    trained tokens. The loss isn't reported, because with centered advantages its value says nothing
    about progress.
    """
    rows = rollouts.rows
    graded = [row.graded for row in rows]

    def mean(key):
        return sum(one[key] for one in graded) / len(graded)

    metrics = {"reward": column(rows, "reward").nanmean().item()}
    if "parts" in graded[0]:
        names = dict.fromkeys(name for one in graded for name in one["parts"])   # each name once
        for name in names:
            part = torch.tensor([one["parts"].get(name, 0.0) for one in graded],
                                dtype=torch.float64)
            metrics[f"reward_{name}"] = part.nanmean().item()
    metrics |= {"accuracy": mean("correct"), "format": mean("format")}
    metrics |= {"length": mean("length"), "truncated": 1 - mean("finished")}
    metrics["sampler_entropy"] = sampler_entropy(graded)
    informative = grpo.informative_groups(column(rows, "reward"), group_size)
    in_some_update = (sum(loss_weights) > 0).any(dim=1)            # (B,)
    trained_rows = has_advantage & in_some_update
    metrics["informative"] = informative.double().mean().item()
    metrics["groups"] = int(trained_rows.view(-1, group_size).any(dim=1).sum())
    # Compare the learner with the sampler in the first update that trained a row, before the policy
    # has moved, and count clipped tokens in the last one, where it has moved most.
    trained = [one for one in updates if one.sums] or updates
    metrics |= grpo.summarize(trained[0].sums)
    last = grpo.summarize(trained[-1].sums)
    metrics |= {key: value for key, value in last.items() if key.startswith("clip_ratio")}
    metrics |= {"grad_norm": trained[-1].grad_norm, "lr": updates[-1].lr}
    seconds = rollouts.seconds or math.inf       # 0 if a user's sampling function didn't set it
    return metrics | {"idle": rollouts.idle, "tokens_per_s": rollouts.num_tokens / seconds}


def replay(settings: Settings, progress: Progress, again: list[int], new: list[int],
           rows: list[Row]) -> tuple[list, dict]:
    """Returns the queue of --replay after a step that asked the problems `again` and `new`, and its
    metrics.
    """
    if not settings.replay:
        return [], {}
    split = grpo.worth_asking_again(column(rows, "reward"), settings.group_size).tolist()
    queue = requeue(progress.queue, again + new, split, progress.step, settings.prompts_per_step)
    of_new = [row.graded["correct"] for row in rows[len(again) * settings.group_size:]]
    return queue, {"replayed": len(again), "accuracy_new": sum(of_new) / len(of_new)}


def evaluate(run: Run, sample: Callable, steps_done: int) -> dict:
    """Answers the held-out problems greedily, without noise, and logs them in held_out.jsonl.

    Returns the metrics to add to the step's line in metrics.jsonl. sample: see train().
    """
    problems = share(run.held_out)
    places = share(range(len(run.held_out)))
    began = time.perf_counter()
    greedy = Sampling(run.settings.max_new_tokens, run.tokenizer.end_ids, temperature=0.0)
    rollouts = sample(run.sampler, problems, 1, greedy, places)
    graded = gather(run.grade(problems, rollouts.rows))
    metrics = {"eval_accuracy": sum(one["correct"] for one in graded) / len(graded)}
    if run.settings.reward:
        metrics["eval_reward"] = torch.tensor([one["reward"] for one in graded],
                                              dtype=torch.float64).nanmean().item()
    text = ", ".join(f"{key.removeprefix('eval_')} {value:.3f}" for key, value in metrics.items())
    when = f"after {counted(steps_done, 'step')}" if steps_done else "before training"
    say(f"{when}: held-out {text}, in {time.perf_counter() - began:.1f} s")

    # `step` is the line in metrics.jsonl that has this evaluation. If that line is missing,
    # --resume drops these answers.
    place = {"step": max(steps_done - 1, 0), "steps_done": steps_done}
    run.folder.log("held_out.jsonl", [place | row for row in graded])
    return metrics


def record(run: Run, progress: Progress, metrics: dict, batch: Batch) -> None:
    """Writes the step's files. progress: after this step.

    Ctrl-C and other signals wait until they're all written. snapshot() copies the state in memory;
    a run stopped before it records the next step saves that copy.
    """
    settings = run.settings
    samples = [{"step": metrics["step"], "advantage": advantage, **row.graded}
               for advantage, row in zip(batch.advantages.tolist(), batch.rows, strict=True)]
    with signals_wait():
        run.folder.log("metrics.jsonl", [metrics])
        run.folder.log("samples.jsonl", samples)
        # Before snapshot(): a run that dies here redoes the step and this file.
        if settings.keep and progress.step % settings.keep == 0:
            run.folder.keep_adapter(f"step_{progress.step:06d}")
        run.folder.snapshot(dataclasses.asdict(progress))       # in memory
        last = progress.step == settings.steps
        if last or progress.step % settings.save_every == 0:
            run.folder.save()                                                            # to disk
        tracker.log(run.tracker, metrics)


# -----------------------------------------------------------------------------
# The program

def main(arguments: list[str] | None = None,
         change: Callable | None = None) -> Run:
    """Trains a model. arguments: the command line, by default sys.argv's.

    change(run) returns the run, perhaps with another `grade`, and the sampling function; see
    examples/calculator.py and examples/try_again.py.
    """
    with env.one_line():                         # user errors: one line, no traceback
        settings, earlier = read_settings(arguments)
        run, sample = prepare(settings, earlier), sample_answers
        if change:
            run, sample = change(run)
    with env.one_line(run.end):                  # saves the last complete step first
        train(run, sample)
        console.farewell(settings, evaluable=change is None)
        tracker.finish(run.tracker)
    return run


if __name__ == "__main__":
    main()
