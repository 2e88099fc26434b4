"""
Two simulations behind the learning rule, with the figures of docs/log.md: what a length penalty teaches, and what a
memory of problems that taught nothing is worth. Run by hand: python tests/simulate_rule.py
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from grpo import group_advantages, informative_groups                       # noqa: E402
from rewards import overlong_penalty                                      # noqa: E402

G, LIMIT, BUFFER = 8, 512, 128


def pass_rates(n, a, b, g):
    """n draws of Beta(a, b)."""
    x, y = (torch._standard_gamma(torch.full((n,), shape), generator=g) for shape in (a, b))
    return (x / (x + y)).clamp(1e-6, 1 - 1e-6)


def summed(task, penalty):
    return group_advantages(task + penalty, G)


def summed_where_mixed(task, penalty):
    return torch.where(informative_groups(task, G).repeat_interleave(G), summed(task, penalty), 0.0)


def apart(task, penalty):
    return group_advantages(task, G, shaping=penalty)


def without(task, penalty):
    return group_advantages(task, G)


def learn(rule, seed, steps=150, problems=64, lr=0.02):
    """A policy of two numbers, skill and length: a longer answer is right more often, one beyond the limit never.
    -> accuracy, length, share cut, of the last 20 of 150 steps of Adam on 64 x 8 samples.
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
        A = rule(task.flatten(), penalty).view(problems, G)
        gradient = torch.stack([(A * (right - chance)).mean(), (A * z).mean()])
        m = 0.9 * m + 0.1 * gradient
        v = 0.99 * v + 0.01 * gradient.square()
        w = w + lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-10)
        last.append((task.mean().item(), length.mean().item(), (length >= LIMIT).float().mean().item()))
    return torch.tensor(last[-20:]).mean(0)


def visits(revisit, a, b, gain, problems=7473, count=64, epochs=5):
    """Share of informative groups in each fifth of so many epochs' steps; gain: of the logits, on the way."""
    g = torch.Generator().manual_seed(0)
    logits = torch.logit(pass_rates(problems, a, b, g))
    misses = torch.zeros(problems, dtype=torch.long)
    steps = epochs * problems // count
    place, shares = 0, []
    for t in range(steps):
        chosen = []
        while len(chosen) < count:
            if place % problems == 0:
                order = torch.randperm(problems, generator=g).tolist()
            i = order[place % problems]
            place += 1
            if torch.rand(1, generator=g).item() < revisit ** misses[i].item():
                chosen.append(i)
        chance = torch.sigmoid(logits[chosen] + gain * t / steps)[:, None]
        useful = informative_groups((torch.rand(count, G, generator=g) < chance).float().flatten(), G)
        misses[chosen] = torch.where(useful, 0, (misses[chosen] + 1).clamp(max=3))
        shares.append(useful.float().mean())
    return [torch.stack(shares[e * steps // epochs:(e + 1) * steps // epochs]).mean().item() for e in range(epochs)]


if __name__ == "__main__":
    for rule in (summed, summed_where_mixed, apart, without):
        runs = torch.stack([learn(rule, seed) for seed in range(8)])
        print(f"{rule.__name__:20} accuracy {runs[:, 0].mean():.3f} +- {runs[:, 0].std() / 8**0.5:.3f}, "
              f"length {runs[:, 1].mean():.0f}, cut {runs[:, 2].mean():.3f}")
    for name, a, b, gain in (("0.5B", 0.22, 0.8, 0.8), ("1.5B", 0.6, 0.4, 0.8)):
        for revisit in (1.0, 0.5, 0.25):
            print(f"{name} --revisit {revisit}:", *(f"{share:.2f}" for share in visits(revisit, a, b, gain)))
