"""
The learner: rollouts and advantages -> one optimizer step on the adapter.

    learner = Learner(model, loss)
    update = learner.update(rollouts, advantages, weights, lr)

A batch is cut into micro-batches of whole rows; their gradients add up in adapter.master.grad, over
micro-batches and ranks. Then clip, AdamW, sync.

fp16. Its gradients are those of loss_scale * loss. The scale is a power of two, so that dividing by
it is exact: halved where a gradient was not finite, doubled after GOOD_UPDATES that were.

Not here: the loss (grpo.py), forward and backward (model.py, ops.py).
"""
import functools
import math
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch

import grpo
from harness.ranks import RANK, WORLD, all_sum, gather

FIRST_LOSS_SCALE = 2.0**14
GOOD_UPDATES = 500
ADAM_EPS = 1e-10                                 # dL/dA is 1e-8 to 1e-6 while B is small


class Update(NamedTuple):
    sums: dict                                   # of the trained tokens, for grpo.summarize
    grad_norm: float                             # before clipping
    lr: float
    failure: str = ""                            # why it was skipped


class Learner:
    """The optimizer of a model's adapter, and what else changes with every update.

    loss: a grpo.Loss; temperature: of sampling. skipped: updates that were not finite so far.
    micro_batch_tokens, kept_layers (that keep their activations): as the memory allows.
    """

    def __init__(self, model, loss, temperature=1.0, max_grad_norm=0.2, weight_decay=0.0):
        self.model = model
        self.adapter = model.adapter
        self.loss = loss
        self.temperature = temperature
        self.max_grad_norm = max_grad_norm
        self.weight_decay = weight_decay
        self.micro_batch_tokens = 8192
        self.kept_layers = 0
        self.skipped = 0
        self.good_updates = 0
        self.loss_scale = FIRST_LOSS_SCALE if model.dtype == torch.float16 else 1.0
        master = self.adapter.master
        self.moments = {"step": torch.zeros((), device=master.device),
                        "exp_avg": torch.zeros_like(master.data),
                        "exp_avg_sq": torch.zeros_like(master.data)}

    def tensors(self):
        """name -> tensor, changed in place by update()."""
        return {"master": self.adapter.master.data, **self.moments}

    def counters(self):
        scale = {"loss_scale": self.loss_scale, "good_updates": self.good_updates}
        return {"skipped": self.skipped} | (scale if self.model.dtype == torch.float16 else {})

    def metrics(self):
        """Of the counters, what a run logs."""
        return {name: n for name, n in self.counters().items() if name != "good_updates"}

    def restore(self, counters):
        """After tensors() were written: go on from there. counters: of a checkpoint, {} if none."""
        for name in self.counters().keys() & counters.keys():
            setattr(self, name, counters[name])
        self.adapter.sync()

    def update(self, rollouts, advantages, weights, lr):
        """One optimizer step on the B rows of all ranks, which every rank holds; those of weight
        0 are left out. The first update that trains a row writes down its proximal log-probs.

        A NaN or infinity in loss or gradient skips it, on every rank: all see the same sums. With
        fp16 a gradient beyond its range is one, and the loss scale follows.
        """
        adapter = self.adapter
        adapter.master.grad.zero_()
        parts = gather([self.gradient(rollouts, advantages, weights, RANK, WORLD)])
        parts = [sums for sums in parts if sums]
        if not parts:
            return Update({}, 0.0, lr)                           # nothing to learn from
        sums = functools.reduce(grpo.add_sums, parts)
        all_sum(adapter.master.grad).div_(self.loss_scale)
        loss = sums.pop("loss").item()
        grad_norm = adapter.master.grad.norm().item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if self.model.dtype == torch.float16 and math.isfinite(loss):
            self._next_loss_scale(finite)
        if not finite:
            self.skipped += 1
            return Update(sums, grad_norm, lr, f"loss {loss}, gradient norm {grad_norm}")
        adapter.master.grad.mul_(min(1.0, self.max_grad_norm / (grad_norm + 1e-6)))
        decayed = adapter.master.data[:adapter.norm_start]       # not the norms: they belong near 1
        decayed *= 1 - lr * self.weight_decay
        self._adamw(lr)
        adapter.sync()
        return Update(sums, grad_norm, lr)

    @torch.no_grad()
    def _adamw(self, lr):
        """torch.optim.AdamW's fused step; that class imports torch's compiler, 0.8 s and more."""
        m = self.moments
        m["step"] += 1
        torch._fused_adamw_(
            [self.adapter.master], [self.adapter.master.grad], [m["exp_avg"]], [m["exp_avg_sq"]],
            [], [m["step"]], lr=lr, beta1=0.9, beta2=0.99,       # as NVlabs/QeRL
            weight_decay=0.0, eps=ADAM_EPS, amsgrad=False, maximize=False)

    def gradient(self, rollouts, advantages, weights, rank, ranks):
        """Adds one rank's share of the gradient of loss_scale * loss to adapter.master.grad.

        -> sums over its trained tokens, {} if it has none. Micro-batches are those of the whole
        step, dealt to the ranks: with those of each rank's own rows, bf16 would round otherwise
        on two GPUs than on one, and 7B's gradient differ by 0.8 %.
        """
        teaches = (advantages != 0) | (self.loss.kl_beta > 0)
        trained = torch.nonzero((weights > 0) & teaches)[:, 0].tolist()
        prompts = [rollouts.prompts[b] for b in trained]
        completions = [rollouts.completions[b] for b in trained]
        sums = {}
        for part in micro_batches(prompts, completions, self.micro_batch_tokens, ranks, rank):
            rows = [trained[i] for i in part]
            loss, more = self._micro_batch(rollouts, rows, advantages[rows], weights[rows])
            (loss * self.loss_scale).backward()
            sums = grpo.add_sums(sums, more)
        return {name: value.cpu() for name, value in sums.items()}

    def _micro_batch(self, rollouts, rows, advantages, weights):
        """-> loss of the given rows, differentiable, and its sums."""
        model = self.model
        device = model.device
        tokens = [rollouts.prompts[b] + rollouts.completions[b] for b in rows]
        starts = [len(rollouts.prompts[b]) for b in rows]
        policy, entropy = model.token_logprobs(tokens, starts, self.temperature, self.kept_layers)
        reference = None
        if self.loss.kl_beta:
            with torch.no_grad(), self.adapter.off():
                reference, _ = model.token_logprobs(tokens, starts, self.temperature)
        sampler = torch.cat([rollouts.logprobs[b] for b in rows]).to(device)
        lengths = [len(rollouts.completions[b]) for b in rows]
        row = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)).to(device)
        proximal = [rollouts.proximal.setdefault(b, part)
                    for b, part in zip(rows, policy.detach().split(lengths))]
        logprobs = grpo.LogProbs(policy, sampler, torch.cat(proximal), reference)
        loss, sums = grpo.policy_loss(logprobs, advantages.to(device), row, weights.to(device),
                                      self.loss)
        sums["entropy"] = entropy.sum().double()
        sums["loss"] = loss.detach().double()
        return loss, sums

    def _next_loss_scale(self, finite):
        if not finite:
            self.loss_scale = max(self.loss_scale / 2, 1.0)
            self.good_updates = 0
            return
        self.good_updates += 1
        if self.good_updates == GOOD_UPDATES:
            self.loss_scale *= 2
            self.good_updates = 0


def micro_batches(prompts, completions, token_budget, ranks=1, rank=0):
    """B prompts and completions (lists of ids) -> lists of row indices, at most token_budget each.

    Rows of one prompt that follow each other stay together: the learner computes their prompt once,
    so a group counts it once. A group beyond the budget is cut, a row beyond it stands alone. First
    fit, longest first: what does not fit in memory fails at once. Several ranks have about four or
    more each, dealt largest first to the rank with least: in turns, one would have 10 % too much.
    """
    assert token_budget > 0, token_budget
    if ranks > 1:
        tokens = sum(map(len, completions)) + sum(len(prompt) for prompt, _ in groupby(prompts))
        token_budget = min(token_budget, tokens // (4 * ranks) + 1)
    pieces = []                                                  # [tokens, [row, ...]]
    for _, group in groupby(range(len(prompts)), prompts.__getitem__):
        piece = None
        for b in group:
            if piece is None or piece[0] + len(completions[b]) > token_budget:
                piece = [len(prompts[b]), []]
                pieces.append(piece)
            piece[0] += len(completions[b])
            piece[1].append(b)
    batches = []
    for tokens, rows in sorted(pieces, key=itemgetter(0), reverse=True):
        batch = next((b for b in batches if b[0] + tokens <= token_budget), None)
        if batch is None:
            batch = [0, []]
            batches.append(batch)
        batch[0] += tokens
        batch[1] += rows
    shares = [[0, []] for _ in range(ranks)]
    for tokens, rows in sorted(batches, key=itemgetter(0), reverse=True):
        least = min(shares, key=lambda share: share[0])
        least[0] += tokens
        least[1].append(rows)
    return shares[rank][1]
