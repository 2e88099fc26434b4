r"""
What does the paper's clip do if noise alone separates the sampler from the learner? No training.

    python -m study.clip --model M --data gsm8k_train.jsonl --problems 48

Samples answers with noise on the norms, rates them, and computes for each token what one update
would do to the entropy of the learner's next token at that place, for four ways to treat the ratio
learner / sampler: --correction off, truncate and ppo, and ppo with a clip so wide that it holds
nothing.

The loss pushes the log-prob of token a by some c, which is the advantage times what the correction
makes of the ratio; a token that the clip holds has c = 0. If every place had logits z of its own,
an update would move them by dz = c * (onehot(a) - p). The entropy H = -sum of p * log p then
changes, to first order, by

    dH = -sum over b of p_b * (log p_b + H) * dz_b
       = -c * (p_a * (log p_a + H) - sum over b of p_b^2 * (log p_b + H))

So making a likely token likelier lowers the entropy, and so does making an unlikely token rarer.
The real places share one model, so this says in which direction each way pulls, and not how far. c
comes from grpo.policy_loss itself, by differentiating it.
"""
import argparse
import dataclasses
from pathlib import Path

from harness import process  # isort: skip; it makes settings that torch reads when imported
import torch
from torch import Tensor
from tqdm import tqdm

import aqn
import grpo
import model as qwen
import nvfp4
import rewards
from harness import data, hf
from harness.config import LongHelp
from harness.device import choose_device
from sampler import Rollouts, Sampler, Sampling, engine_for

LOSS = grpo.LOSSES["dapo"]
WAYS = {"off": dataclasses.replace(LOSS, correction="off"),
        "truncate": dataclasses.replace(LOSS, correction="truncate"),
        "ppo": dataclasses.replace(LOSS, correction="ppo"),
        "ppo without its clip": dataclasses.replace(LOSS, correction="ppo", clip_low=1 - 1e-9,
                                                    clip_high=1e9)}


def pushes(policy: Tensor, sampler: Tensor, advantages: Tensor, loss: grpo.Loss) -> Tensor:
    """c of every token: log-probs and advantages (T,) -> (T,), 0 where the clip holds the token."""
    policy = policy.detach().requires_grad_()
    logprobs = grpo.LogProbs(policy, sampler, proximal=policy.detach())
    each = torch.arange(len(policy), device=policy.device)       # each token is a row of its own
    value, _ = grpo.policy_loss(logprobs, advantages, each, torch.ones_like(advantages), loss)
    return -torch.autograd.grad(value, policy)[0]


def entropy_changes(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """logits (T, V) and the tokens (T,) that were drawn -> their log-probs, and dH for c = 1, (T,)
    each.
    """
    logp = logits.log_softmax(1)
    p = logp.exp()
    surprise = logp - (p * logp).sum(1, keepdim=True)                       # log p_b + H
    drawn = tokens[:, None]
    at_drawn = (p * surprise).gather(1, drawn)[:, 0]
    return logp.gather(1, drawn)[:, 0], (p.square() * surprise).sum(1) - at_drawn


@torch.no_grad()
def measure(model: qwen.Qwen, rollouts: Rollouts, rows: list[int],
            advantages: Tensor) -> dict[str, Tensor]:
    """policy, sampler (log-probs), advantage and change (dH for c = 1) of the rows' tokens."""
    found = {"policy": [], "sampler": [], "advantage": [], "change": []}
    for b in tqdm(rows, unit="row", leave=False, disable=None):
        prompt, completion = rollouts.prompts[b], rollouts.completions[b]
        ids = torch.tensor([prompt + completion], device=model.device)
        logits = model(ids)[0, len(prompt) - 1:-1, :model.live_vocab]
        policy, change = entropy_changes(logits, ids[0, len(prompt):])
        found["policy"].append(policy)
        found["change"].append(change)
        found["sampler"].append(rollouts.logprobs[b].to(policy))
        found["advantage"].append(advantages[b].to(policy).expand_as(policy))
    return {name: torch.cat(parts) for name, parts in found.items()}


def report(found: dict[str, Tensor]) -> None:
    """Prints what the clip holds, and what each way would do to the entropy."""
    policy, sampler, advantage, change = (found[name] for name in
                                          ("policy", "sampler", "advantage", "change"))
    c = {way: pushes(policy, sampler, advantage, loss) for way, loss in WAYS.items()}
    held = (c["ppo"] == 0) & (c["ppo without its clip"] != 0)
    print("| tokens | share, % | median probability |")
    print("|---|---|---|")
    for name, which in (("all", torch.ones_like(held)), ("clipped low", held & (advantage < 0)),
                        ("clipped high", held & (advantage > 0))):
        median = f"{policy[which].exp().median():.2f}" if which.any() else ""
        print(f"| {name} | {100 * which.double().mean():.2f} | {median} |")
    print("\n| correction | change of the entropy, 1e-3 nats a token for a step of 1 "
          "| of it by tokens that ppo clips |")
    print("|---|---|---|")
    for way, pushed in c.items():
        total, by_held = (1e3 * (pushed * change * which).double().mean()
                          for which in (torch.ones_like(held), held))
        print(f"| {way} | {total:+.2f} | {by_held:+.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="study.clip", description=__doc__.strip(),
                                     allow_abbrev=False, formatter_class=LongHelp)
    parser.add_argument("--model", required=True, help="folder, name or id, as in train.py")
    parser.add_argument("--base", default="nvfp4", choices=list(nvfp4.FORMATS),
                        help="format of the frozen weights")
    parser.add_argument("--data", required=True, help="problems, as in train.py")
    parser.add_argument("--problems", type=int, default=48, help="the first so many")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    parser.add_argument("--sigma", type=float, default=5e-2, help="of the noise on the norms")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    args = parser.parse_args()
    with process.one_line("study.clip"):
        device, kernels = choose_device(args.device, "auto", args.model)
        folder = Path(hf.resolve(args.model))
        tokenizer = data.Tokenizer(folder)
        problems = data.load_problems(args.data, "train")[:args.problems]
        problems = data.encode_prompts(tokenizer, problems, "boxed")
        model = qwen.load(folder, args.base, device, live_vocab=tokenizer.vocab_size)
        longest = max(len(problem.prompt) for problem in problems) + args.max_new_tokens
        sampler = Sampler(engine_for(kernels), model, longest, len(problems) * args.samples)
        sampling = Sampling(args.max_new_tokens, tokenizer.end_ids, temperature=1.0, seed=0)
        with aqn.noisy_norms(model, args.sigma, seed=0, step=0):
            rollouts = sampler.generate([problem.prompt for problem in problems], args.samples,
                                        sampling, range(len(problems)))
        graded = rewards.grade_rollouts(tokenizer, problems, rollouts)
        right = torch.tensor([row["correct"] for row in graded])
        advantages = grpo.group_advantages(right, args.samples)
        rows = advantages.nonzero()[:, 0].tolist()
        if not rows:
            raise ValueError("no problem has both right and wrong answers, so nothing is trained "
                             f"on: --problems {args.problems}, --samples {args.samples}")
        found = measure(model, rollouts, rows, advantages)
        ratio = found["policy"] - found["sampler"]
        print(f"{len(rows)} answers with an advantage, {len(ratio):,} tokens; KL(sampler || "
              f"learner) {grpo.k3(ratio).mean():.4f} nats a token; {100 * right.mean():.1f} % of "
              "all answers right\n")
        report(found)


if __name__ == "__main__":
    main()
