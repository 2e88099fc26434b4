"""
QeRL's loop: GRPO/DAPO of a Qwen2.5 model with frozen 4-bit weights, LoRA and AQN.

    python train.py                            a tiny model that ships here: CPU, offline, minutes
    python train.py --model qwen2.5-7b         the 7B on GSM8K, the paper's settings, one GPU
    python train.py --resume --out runs/x      go on where runs/x stopped, with its flags
    torchrun --nproc-per-node 8 train.py ...   the same run on 8 GPUs, a share of the problems each

A training step is the four acts of train(), at the end of this file:

    sample    a group of G answers to each of P problems, with noise on the norms of the model
    score     is each answer right? How much better is it than the others of its group?
    update    the adapter, so that the better answers of a group become likelier
    report    the step's numbers, the answers, now and then an evaluation and a checkpoint

The sampler writes down the log-prob that it drew each token with; grpo.py says what the loss makes
of them. P problems x G answers are B rows, and rows [p * G, (p + 1) * G) answer problem p. With
several GPUs ("ranks") each samples and scores the answers to its share of the problems. Then all
ranks hold all rows, so advantages and weights do not depend on how many ranks there are.

A run folder holds run.json (the settings and what ran them), metrics.jsonl (one object a step),
samples.jsonl (every answer with its verdict), adapter/ (in PEFT's format) and checkpoints/ (the
last two). Training stops by itself when nothing is being learned (harness/console.py) and keeps the
best adapter in adapters/last_good.

Not here: what a run is set up from (harness/prepare.py), the settings (harness/config.py), a
learned reward.
"""
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

from harness import process  # isort: skip; before torch
import torch

import aqn
import grpo
import rewards
from harness import data
from harness.checkpoints import claimed, ending_with, signals_wait
from harness.config import Objective, Optim, Rollout, read_settings
from harness.console import Watch
from harness.prepare import Progress, Run, begin, prepare
from harness.ranks import gather, say, share
from learner import Batch, Learner, Update
from model import Qwen2
from sampler import Rollouts, Sampler, Sampling

# -----------------------------------------------------------------------------
# Sample

def sample(model: Qwen2, sampler: Sampler, problems: list, group_size: int, sampling: Sampling,
           places: list, sigma: float, step: int) -> Rollouts:
    """G answers to each problem, drawn while the norms carry this step's noise.

    places: the place of each problem in the run. A sample's randomness follows from the seed, its
    problem's place and its number in the group, so it does not depend on the number of ranks.
    """
    prompts = [problem.prompt for problem in problems]
    with aqn.noisy_norms(model, sigma, sampling.seed, step):     # the only place with noise
        return sampler.generate(prompts, group_size, sampling, places)


# -----------------------------------------------------------------------------
# Score

def score(grade: Callable, problems: list, rollouts: Rollouts, objective: Objective,
          max_new_tokens: int) -> list[dict]:
    """-> a row for each answer: what it says, the verdict, and its reward.

    `task` is 1 for a right answer and 0 for a wrong one, or what the user's --reward gives. `reward`
    adds what format and length are worth; it is what is optimised.
    """
    rows = grade(problems, rollouts)
    for row in rows:
        row["reward"] = row["task"] + objective.format_weight * row["format"]
        if objective.overlong_buffer:
            row["reward"] += rewards.overlong_penalty(row["length"], max_new_tokens,
                                                      objective.overlong_buffer)
    return rows


def refuse_unscorable(rows: list[dict], reward: str | None) -> None:
    """Ends a run whose --reward can score none of a step's answers."""
    if all(math.isnan(row["task"]) for row in rows):
        raise process.Stopped(f"--reward {reward}: nan for each of {len(rows)} answers")


def column(rows: list[dict], key: str) -> torch.Tensor:
    """One value of each row, (B,)."""
    return torch.tensor([row[key] for row in rows])


def compare(rows: list[dict], group_size: int, scale: str) -> torch.Tensor:
    """-> advantages (B,): how much better each answer is than the others to its problem.

    scale: --advantage-scale. What format and length add to the reward counts only where the answers
    of a group differ in `task`: grpo.group_advantages says why.
    """
    task = column(rows, "task")
    shaping = torch.tensor([row["reward"] - row["task"] for row in rows])
    return grpo.group_advantages(task, group_size, scale, shaping)


# -----------------------------------------------------------------------------
# Update

def plan_updates(rows: list[dict], loss: grpo.Loss, rollout: Rollout, optim: Optim,
                 mask_overlong: bool) -> list[torch.Tensor]:
    """-> for each optimizer step on this batch, what a token of every row weighs in the loss (B,).

    Rows of weight 0 are left out of that step. Two flags make several steps of one batch, and they
    differ in what a step sees. With 4 groups of answers, a b c d:

        --updates-per-rollout 2             [a b] [c d]         each row is trained on once
        --epochs 2                          [a b c d] [a b c d] each row is trained on twice
        both                                [a b] [c d] [a b] [c d]

    mask_overlong: answers that were cut at --max-new-tokens are in no loss (--overlong mask).
    """
    mask = grpo.loss_mask(column(rows, "task"), column(rows, "finished"), mask_overlong)
    lengths = column(rows, "length")
    parts = grpo.minibatches(mask, rollout.group_size, optim.updates_per_rollout)
    return [grpo.token_weights(lengths, part, loss, rollout.max_new_tokens)
            for part in parts] * optim.epochs


def update(learner: Learner, batch: Batch, weights: list[torch.Tensor],
           rates: list[float]) -> list[Update]:
    """One optimizer step for each of plan_updates()'s weights, at its learning rate."""
    return [learner.update(batch, weight, lr) for weight, lr in zip(weights, rates, strict=True)]


def learning_rates(optim: Optim, step: int, steps: int, count: int) -> list[float]:
    """The rates of the `count` optimizer steps of one training step of the run."""
    return [learning_rate(optim, (step + (u + 0.5) / count) / steps) for u in range(count)]


def learning_rate(optim: Optim, progress: float) -> float:
    """The rate at a share `progress` in [0, 1] of the run: linear warm-up, then --lr-schedule."""
    if progress < optim.warmup:
        return optim.lr * progress / optim.warmup
    if optim.lr_schedule == "constant":          # but for the last quarter, which ends at 0
        return optim.lr * min(1.0, 4 * (1 - progress))
    angle = math.pi * (progress - optim.warmup) / (1 - optim.warmup)
    return optim.lr * (1 + math.cos(angle)) / 2


# -----------------------------------------------------------------------------
# Report

def report(rows: list[dict], advantages: torch.Tensor, weights: list[torch.Tensor],
           rollouts: Rollouts, updates: list[Update], group_size: int) -> dict:
    """The step's numbers; docs/metrics.md defines each. Means are over all B rows of all ranks.

    The loss is not among them: on advantages that are centred its value says nothing of learning.
    """
    def mean(key):
        return sum(row[key] for row in rows) / len(rows)

    metrics = {"reward": column(rows, "reward").nanmean().item()}
    for name in dict.fromkeys(name for row in rows for name in row.get("parts", ())):
        part = torch.tensor([row["parts"].get(name, 0.0) for row in rows])
        metrics[f"reward_{name}"] = part.nanmean().item()
    metrics |= {"accuracy": mean("correct"), "format": mean("format")}
    metrics |= {"length": mean("length"), "truncated": 1 - mean("finished")}
    informative = grpo.informative_groups(column(rows, "task"), group_size)
    learned = (advantages != 0) & (sum(weights) > 0)
    metrics["informative"] = informative.float().mean().item()
    metrics["groups"] = int(learned.view(-1, group_size).any(dim=1).sum())
    # Of the first update, before the policy has moved: sampler against learner. Of the last: the
    # clip, which acts on what the policy has moved by since.
    taught = [one for one in updates if one.sums] or updates
    metrics |= grpo.summarize(taught[0].sums)
    last = grpo.summarize(taught[-1].sums)
    metrics |= {key: value for key, value in last.items() if key.startswith("clip")}
    metrics |= {"grad_norm": taught[-1].grad_norm, "lr": updates[-1].lr}
    return metrics | {"idle": rollouts.idle, "tokens_per_s": rollouts.num_tokens / rollouts.seconds}


def evaluate(run: Run, sampling: Sampling, after: int) -> dict:
    """Greedy answers to the held-out problems, without noise -> metrics. after: steps done."""
    problems = share(run.held_out)
    with run.console.not_counted():
        rollouts = run.sampler.generate([problem.prompt for problem in problems], 1,
                                        sampling._replace(temperature=0.0))
        rows = gather(run.grade(problems, rollouts))
    metrics = {"eval_accuracy": sum(row["correct"] for row in rows) / len(rows)}
    if run.settings.data.reward:
        metrics["eval_reward"] = column(rows, "task").nanmean().item()
    told = ", ".join(f"{key.removeprefix('eval_')} {value:.3f}" for key, value in metrics.items())
    say(f"after {after} steps: held-out {told}")
    return metrics


def record(run: Run, progress: Progress, metrics: dict, rows: list[dict],
           advantages: torch.Tensor, is_best: bool) -> None:
    """Writes the step's files and sends its metrics to the tracker.

    A signal waits meanwhile: files and memory always belong to the same step.
    """
    watching = run.settings.watching
    samples = [{"step": metrics["step"], "advantage": advantage, **row}
               for advantage, row in zip(advantages.tolist(), rows)]
    with signals_wait():
        run.folder.log("metrics.jsonl", [metrics])
        run.folder.log("samples.jsonl", samples)
        run.folder.snapshot(dataclasses.asdict(progress) | run.learner.counters())
        last = progress.step == run.settings.general.steps
        if last or progress.step % watching.save_every == 0:
            run.folder.save()
        if watching.keep and progress.step % watching.keep == 0:
            run.folder.keep_adapter(f"step_{progress.step:06d}")
        if watching.keep and is_best:
            run.folder.keep_adapter("best")
    run.tracker.log(metrics)


# -----------------------------------------------------------------------------
# The loop: sample, score, update, report

def train(run: Run) -> None:
    """All steps of a run, from step 0 or from where its checkpoint stands."""
    settings = run.settings
    rollout, noise, objective, optim = (settings.rollout, settings.noise, settings.objective,
                                        settings.optim)
    steps, G = settings.general.steps, rollout.group_size
    sampling = Sampling(rollout.max_new_tokens, run.tokenizer.end_ids, rollout.temperature,
                        seed=settings.general.seed)
    progress = begin(run)
    run.console.start_at(progress.step)
    watch = Watch(settings)
    for step in range(progress.step, steps):
        metrics = {"step": step}
        if step == 0:                                            # accuracy before training
            metrics |= evaluate(run, sampling, 0)

        # 1) Sample. Of the step's problems, by their places in the run, this rank takes its share.
        began = time.perf_counter()
        end = progress.cursor + rollout.prompts_per_step
        places = share(range(progress.cursor, end))
        problems = data.problems_at(run.problems, sampling.seed, places)
        sigma = aqn.sigma_at(step, steps, noise.sigma_start, noise.sigma_end, noise.noise_stages,
                             noise.noise_schedule)
        mine = sample(run.model, run.sampler, problems, G, sampling, places, sigma, step)

        # 2) Score. From here on every rank holds the rows of all.
        rows = gather(score(run.grade, problems, mine, objective, rollout.max_new_tokens))
        first, *others = gather([mine])
        rollouts = sum(others, start=first)
        refuse_unscorable(rows, settings.data.reward)
        advantages = compare(rows, G, objective.advantage_scale)

        # 3) Update the adapter.
        updating = time.perf_counter()
        weights = plan_updates(rows, run.learner.loss, rollout, optim, objective.overlong == "mask")
        rates = learning_rates(optim, step, steps, len(weights))
        updates = update(run.learner, Batch(rollouts, advantages), weights, rates)
        done = time.perf_counter()

        # 4) Report.
        metrics |= report(rows, advantages, weights, rollouts, updates, G)
        metrics |= run.learner.metrics()
        metrics |= {"sigma": sigma, "tokens": progress.tokens + rollouts.num_tokens,
                    "seconds": done - began, "seconds_sample": updating - began,
                    "seconds_update": done - updating}
        best = progress.best
        due = step + 1 == steps or (step + 1) % settings.watching.eval_every == 0
        if due and "eval_accuracy" not in metrics:
            metrics |= evaluate(run, sampling, step + 1)
            best = max(best, metrics.get("eval_reward", metrics["eval_accuracy"]))
        is_best = best > progress.best
        progress = Progress(step + 1, end, metrics["tokens"], best)
        record(run, progress, metrics, rows, advantages, is_best)
        run.console.tell(metrics, rows, updates)
        if watch.see(metrics):
            good = progress.step, run.folder.checkpoints.tensors["master"].clone()
        if watch.verdict:
            give_up(run, watch.verdict, *good)
    run.folder.note(ended=process.now())


def give_up(run: Run, verdict: str, step: int, master: torch.Tensor) -> None:
    """Ends a run that learns nothing, with the adapter of its best steps in adapters/last_good."""
    run.folder.keep_adapter("last_good", {"master": master})
    gather([])                                   # torchrun ends all ranks when one has ended
    raise process.Stopped(f"{verdict}; adapters/last_good is that of step {step}")


def main() -> None:
    with process.one_line("train.py"):
        settings, before = read_settings()
        general = settings.general
        with claimed(Path(general.out), general.resume):
            run = prepare(settings, before)
    with ending_with(run.folder.save, f"go on with --resume --out {run.folder.path}"):
        with run.console:
            train(run)
        run.console.farewell(run.folder.path, len(run.held_out))


if __name__ == "__main__":
    main()
