r"""
What does the paper's clip do if noise alone separates the sampler from the learner? No training.

    python -m study.clip --model M --data gsm8k_train.jsonl --problems 32

Samples answers with noise on the norms, rates them, and computes for each token what one update
would do at that place to two things: the entropy of the learner, and how far it is from the noisy
sampler that drew the token, KL(sampler || learner). So it tells which tokens make the learner more
certain, and which make it imitate the noise.

The loss pushes the log-prob of token a by some c, which is the advantage times what --correction
makes of the ratio learner / sampler; c is 0 where the clip holds the token. If every place had
logits z of its own, an update would move them by dz = c * (onehot(a) - p). With p the learner's
probabilities and q the sampler's, to first order,

    the entropy -sum of p log p changes by
        -sum over b of p_b (log p_b + H) dz_b
            = -c * (p_a (log p_a + H) - sum over b of p_b^2 (log p_b + H))
    KL(q || p) changes by
        sum over b of (p_b - q_b) dz_b = c * (p_a - q_a - sum over b of p_b (p_b - q_b))

The real places share one model. So this says in which direction the tokens pull, and not how far:
only signs and proportions mean something. c comes from grpo.policy_loss itself, by differentiating
it.
"""
import argparse
import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import env  # isort: skip; its settings come before torch

import torch
from torch import Tensor
from tqdm import tqdm

import aqn
import grpo
import model as qwen
import nvfp4
import rewards
from harness import config
from harness.config import setting
from harness.setup import choose_device
from prompts import Tokenizer, encode_prompts
from sampler import Rollouts, Sampler, Sampling, engine_for
from tasks.problems import load_problems
from weights import resolve

LOSS = grpo.LOSSES["dapo"]
UNCLIPPED = "ppo without its clip"
WAYS = {way: dataclasses.replace(LOSS, correction=way) for way in grpo.CORRECTIONS}
WAYS[UNCLIPPED] = dataclasses.replace(LOSS, correction="ppo", clip_low=1 - 1e-9, clip_high=1e9)


@dataclass(frozen=True)
class Measured:
    """what is measured"""
    problems: int = setting(32, "the first so many", "[1, 1e6]")
    samples: int = setting(8, "answers to each", "[2, 1e4]")
    sigma: float = setting(5e-2, "of the noise on the norms", "(0, 10]")
    max_new_tokens: int = setting(512, "longest answer", "[1, 1e6]")
    base: str = setting("nvfp4", "format of the frozen weights", choices=nvfp4.FORMATS)
    device: str | None = setting(None, "cpu, cuda or cuda:N (default: a GPU if there is one)")


def pushes(policy: Tensor, rollout: Tensor, advantages: Tensor, loss: grpo.Loss) -> Tensor:
    """c of every token: log-probs and advantages (T,) -> (T,), 0 where the clip holds the token."""
    policy = policy.detach().requires_grad_()
    logprobs = grpo.LogProbs(policy, rollout, old=policy.detach())
    each = torch.arange(len(policy), device=policy.device)       # each token is a row of its own
    value, _ = grpo.policy_loss(logprobs, advantages, each, torch.ones_like(advantages), loss)
    return -torch.autograd.grad(value, policy)[0]


class Tokens(NamedTuple):
    """What print_pulls() needs of the T tokens of all rows, (T,) each."""
    policy: Tensor                               # log-probs under the learner
    sampler: Tensor                              # and under the sampler that drew them
    advantage: Tensor
    entropy: Tensor                              # how the entropy changes for c = 1
    distance: Tensor                             # how KL(sampler || learner) changes for c = 1


def changes(learner: Tensor, noisy: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of learner and noisy sampler (T, V), and the tokens (T,) that were drawn -> their
    log-probs under the learner, and how entropy and distance change for c = 1, (T,) each.
    """
    drawn = tokens[:, None]
    logp = learner.log_softmax(1)
    p = logp.exp()
    surprise = logp - (p * logp).sum(1, keepdim=True)                       # log p_b + H
    excess = p - noisy.softmax(1)                                           # p_b - q_b
    entropy = (p.square() * surprise).sum(1) - (p * surprise).gather(1, drawn)[:, 0]
    distance = excess.gather(1, drawn)[:, 0] - (p * excess).sum(1)
    return logp.gather(1, drawn)[:, 0], entropy, distance


@torch.no_grad()
def tokens_of(model: qwen.Qwen, rollouts: Rollouts, rows: list[int], advantages: Tensor,
              noise: Callable[[], AbstractContextManager]) -> Tokens:
    """noise: the context in which the rollouts were sampled."""
    found = []
    for b in tqdm(rows, unit="row", leave=False, disable=None):
        prompt, completion = rollouts.prompts[b], rollouts.completions[b]
        ids = torch.tensor([prompt + completion], device=model.device)
        predictors = slice(len(prompt) - 1, -1)  # the place before each token of the completion
        learner = model(ids)[0, predictors, :model.live_vocab]
        with noise():
            noisy = model(ids)[0, predictors, :model.live_vocab]
        policy, entropy, distance = changes(learner, noisy, ids[0, len(prompt):])
        found.append((policy, rollouts.logprobs[b].to(policy),
                      advantages[b].to(policy).expand_as(policy), entropy, distance))
    return Tokens(*map(torch.cat, zip(*found)))


def print_pulls(tokens: Tokens) -> None:
    """Prints what the tokens at each side of the clip do, and what each way makes of all."""
    def pulls(pushed, which):
        """Two cells: what the tokens that `which` holds do to entropy and distance."""
        return " | ".join(f"{1e3 * (pushed * change * which).double().mean():+.2f}"
                          for change in (tokens.entropy, tokens.distance))

    c = {way: pushes(tokens.policy, tokens.sampler, tokens.advantage, loss)
         for way, loss in WAYS.items()}
    ratio = (tokens.policy - tokens.sampler).exp()
    worse, low, high = tokens.advantage < 0, ratio < 1 - LOSS.clip_low, ratio > 1 + LOSS.clip_high
    groups = {"worse than their group, ratio below 0.8: clipped": worse & low,
              "better, ratio above 1.28: clipped": ~worse & high,
              "better, ratio below 0.8": ~worse & low,
              "worse, ratio above 1.28": worse & high,
              "ratio in between": ~(low | high)}
    pulled = "the learner's entropy | KL (minus: imitates) |"
    print(f"| tokens of answers | share, % | median probability | {pulled}")
    print("|---|---|---|---|---|")
    for name, which in groups.items():
        median = f"{tokens.policy[which].exp().median():.2f}" if which.any() else ""
        print(f"| {name} | {100 * which.double().mean():.2f} | {median} "
              f"| {pulls(c[UNCLIPPED], which)} |")
    print(f"\n| `--correction` | {pulled}")
    print("|---|---|---|")
    everything = torch.ones_like(worse)
    for way, pushed in c.items():
        print(f"| {way} | {pulls(pushed, everything)} |")
    print(f"| {UNCLIPPED}, no token outside 0.8 to 1.28 "
          f"| {pulls(c[UNCLIPPED], groups['ratio in between'])} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="study.clip", description=__doc__.strip(),
                                     allow_abbrev=False, formatter_class=config.LongHelp)
    parser.add_argument("--model", required=True, help="folder, name or id, as in train.py")
    parser.add_argument("--data", required=True, help="problems, as in train.py")
    config.add_section(parser, Measured)
    args = parser.parse_args()
    with env.one_line("study.clip"):
        wanted = config.section_of(Measured, args)
        config.check_ranges(wanted)
        device, kernels = choose_device(wanted.device, "auto", args.model)
        folder = resolve(args.model)
        tokenizer = Tokenizer(folder)
        problems = load_problems(args.data, "train")[:wanted.problems]
        problems = encode_prompts(tokenizer, problems, "boxed")
        model = qwen.load(folder, wanted.base, device, live_vocab=tokenizer.vocab_size)
        longest = max(len(problem.prompt) for problem in problems) + wanted.max_new_tokens
        sampler = Sampler(engine_for(kernels), model, longest, len(problems) * wanted.samples)
        sampling = Sampling(wanted.max_new_tokens, tokenizer.end_ids, temperature=1.0, seed=0)
        noise = functools.partial(aqn.noisy_norms, model, wanted.sigma, seed=0, step=0)
        with noise():
            rollouts = sampler.generate([problem.prompt for problem in problems], wanted.samples,
                                        sampling, range(len(problems)))
        graded = rewards.grade_rollouts(tokenizer, problems, rollouts)
        right = torch.tensor([row["correct"] for row in graded])
        advantages = grpo.group_advantages(right, wanted.samples)
        rows = advantages.nonzero()[:, 0].tolist()
        if not rows:
            raise ValueError("no problem has both right and wrong answers, so nothing is trained "
                             f"on: --problems {wanted.problems}, --samples {wanted.samples}")
        tokens = tokens_of(model, rollouts, rows, advantages, noise)
        log_ratio = tokens.policy - tokens.sampler
        print(f"{len(rows)} answers with an advantage, {len(log_ratio):,} tokens; KL(sampler || "
              f"learner) {grpo.k3(log_ratio).mean():.4f} nats a token; {100 * right.mean():.1f} % "
              "of all answers right\nChanges of entropy and KL in 1e-3 nats a token, if logits move "
              "by dz. First the tokens, without a clip:\n")
        print_pulls(tokens)


if __name__ == "__main__":
    main()
