"""
A simulation behind the learning rule: what a length penalty teaches, depending on how it enters the advantage.
docs/log.md has the figures. pytest does not run this:

python tests/simulate_rule.py
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from grpo import group_advantages, informative_groups  # noqa: E402
from rewards import overlong_penalty

G, LIMIT, BUFFER = 8, 512, 128


def pass_rates(n, a, b, g):
    """n problems' chances of a right answer: draws of Beta(a, b)."""
    x, y = (torch._standard_gamma(torch.full((n,), shape), generator=g) for shape in (a, b))
    return (x / (x + y)).clamp(1e-6, 1 - 1e-6)


# Four rules: rewards (B,) and penalties (B,) -> advantages (B,).

def summed(task, penalty):
    return group_advantages(task + penalty, G)


def summed_where_mixed(task, penalty):
    return torch.where(informative_groups(task, G).repeat_interleave(G), summed(task, penalty), 0.0)


def apart(task, penalty):
    return group_advantages(task, G, extra=penalty)


def without(task, penalty):
    return group_advantages(task, G)


def learn(rule, seed, steps=150, problems=64, lr=0.02):
    """A policy of two numbers, skill and length, trained by Adam for 150 steps on 64 x 8 answers. A longer answer is
    right more often, one beyond the limit never.

    Returns accuracy, length and the share of answers beyond the limit, each the mean of the last 20 steps.
    """
    g = torch.Generator().manual_seed(seed)
    w, m, v = torch.zeros(3, 2)
    last = []
    for t in range(1, steps + 1):
        p = pass_rates(problems, 0.6, 1.9, g)
        z = torch.randn(problems, G, generator=g)
        length = (270 + 50 * torch.randn(problems, 1, generator=g) + 70 * (w[1] + z)).clamp(20, 700)
        chance = torch.sigmoid(torch.logit(p)[:, None] + w[0] + 1.2 * (length / 270).log())
        right = (torch.rand(problems, G, generator=g) < chance).float()
        task = torch.where(length < LIMIT, right, 0.0)
        penalty = torch.tensor([overlong_penalty(n, LIMIT, BUFFER) for n in length.flatten().tolist()])
        advantage = rule(task.flatten(), penalty).view(problems, G)
        gradient = torch.stack([(advantage * (right - chance)).mean(), (advantage * z).mean()])
        m = 0.9 * m + 0.1 * gradient
        v = 0.99 * v + 0.01 * gradient.square()
        w = w + lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-10)
        last.append((task.mean().item(), length.mean().item(), (length >= LIMIT).float().mean().item()))
    return torch.tensor(last[-20:]).mean(0)


if __name__ == "__main__":
    for rule in (summed, summed_where_mixed, apart, without):
        runs = torch.stack([learn(rule, seed) for seed in range(8)])
        print(f"{rule.__name__:20} accuracy {runs[:, 0].mean():.3f} +- {runs[:, 0].std() / 8**0.5:.3f}, "
              f"length {runs[:, 1].mean():.0f}, cut {runs[:, 2].mean():.3f}")
