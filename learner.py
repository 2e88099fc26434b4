"""
The learner: turns a rollout and its advantages into optimizer steps on the adapter.

    learner = Learner(model, loss)
    batch = Batch(rollouts, advantages)          # one for each rollout
    update = learner.update(batch, weights, lr)  # one or more for each batch

An update cuts the batch's rows into micro-batches that fit in memory and adds up their gradients in
adapter.master.grad, over micro-batches and ranks. Then it clips the gradient, takes an AdamW step
and rewrites the adapter's working copies.

float16. Its smallest number is 6e-8, and the gradients of activations are often smaller. So the
backward pass runs on loss_scale * loss, and the gradient is divided by loss_scale in fp32, exactly,
because the scale is a power of two. A scale that is too large shows as a gradient that is infinite
or NaN: that update is skipped and the scale halved. After GOOD_UPDATES finite ones it is doubled.

Not here: the loss (grpo.py), forward and backward of the model (model.py, ops.py).
"""
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

import grpo
from harness.ranks import RANK, WORLD, all_sum, gather
from lora import Adapter
from model import Qwen2
from sampler import Rollouts

FIRST_LOSS_SCALE = 2.0**14
GOOD_UPDATES = 500
MICRO_BATCHES_PER_RANK = 4                       # at least about so many, where there are ranks


@dataclass
class Batch:
    """One rollout as the learner sees it: made once, and given to every update on that rollout.

    advantages (B,) fp32, of the rollout's rows. proximal holds the proximal policy (grpo.py): for
    each row that was trained on so far, the learner's log-probs (t,) at its first pass over it.
    """
    rollouts: Rollouts
    advantages: Tensor
    proximal: dict[int, Tensor] = field(default_factory=dict)


class Update(NamedTuple):
    """What an optimizer step did."""
    sums: dict[str, Tensor]                      # over the trained tokens, for grpo.summarize
    grad_norm: float                             # before clipping
    lr: float
    failure: str = ""                            # why the step was skipped


class AdamW:
    """The optimizer of an adapter: AdamW (1711.05101) on its one flat vector of parameters.

    To try another optimizer, write a class with these four methods and use it in Learner:
    checkpoints, resumed runs and memory.py's plan follow from state_bytes() and tensors().
    """
    MOMENTS = "exp_avg", "exp_avg_sq"            # as torch.optim names them
    BETAS = 0.9, 0.99                            # as NVlabs/QeRL
    EPS = 1e-10                                  # dL/dA is 1e-8 to 1e-6 while B is still small

    def __init__(self, adapter: Adapter, weight_decay: float = 0.0):
        master = adapter.master
        self.adapter = adapter
        self.weight_decay = weight_decay
        self.moments = {"step": torch.zeros((), device=master.device)}
        self.moments |= {name: torch.zeros_like(master.data) for name in self.MOMENTS}

    @classmethod
    def state_bytes(cls, adapter: Adapter) -> int:
        """How much memory this optimizer adds to an adapter and its gradient."""
        return len(cls.MOMENTS) * adapter.master.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by name, as checkpoints hold it; step() changes it in place."""
        return self.moments

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Moves adapter.master along adapter.master.grad, in place; sync() is the caller's."""
        adapter = self.adapter
        decayed = adapter.master.data[:adapter.norm_start]       # A and B; norms belong near 1
        decayed *= 1 - lr * self.weight_decay
        m = self.moments
        m["step"] += 1
        # One kernel for the whole vector: what torch.optim.AdamW(fused=True) calls. That class is
        # not used because it imports torch's compiler, which takes 0.8 s and more at every start.
        # This function is private. torch 2.11 to 2.13 have it with these arguments, and
        # test_learner.py compares it with the class and with the formula in float64.
        torch._fused_adamw_(
            [adapter.master], [adapter.master.grad], [m["exp_avg"]], [m["exp_avg_sq"]],
            [], [m["step"]], lr=lr, beta1=self.BETAS[0], beta2=self.BETAS[1],
            weight_decay=0.0, eps=self.EPS, amsgrad=False, maximize=False)


class Learner:
    """Trains a model's adapter; holds all that changes from one update to the next.

    temperature is that of sampling: the log-probs of both must be of the same distribution.
    micro_batch_tokens and kept_layers (how many layers keep their activations for the backward
    pass, the others compute them again) may be set to what the memory allows. skipped counts the
    updates so far whose gradient was not finite.
    """

    def __init__(self, model: Qwen2, loss: grpo.Loss, temperature: float = 1.0,
                 max_grad_norm: float = 0.2, weight_decay: float = 0.0):
        self.model = model
        self.adapter = model.adapter
        self.loss = loss
        self.temperature = temperature
        self.max_grad_norm = max_grad_norm
        self.optimizer = AdamW(self.adapter, weight_decay)
        self.micro_batch_tokens = 8192
        self.kept_layers = 0
        self.skipped = 0
        self.good_updates = 0                    # with float16: finite ones in a row, see the top
        self.loss_scale = FIRST_LOSS_SCALE if model.dtype == torch.float16 else 1.0

    @staticmethod
    def state_bytes(adapter: Adapter) -> int:
        """How much memory an adapter takes in training: fp32 parameters and their gradient, the
        copies in the model's dtype that are computed with, the optimizer's state.
        """
        return 2 * adapter.master.nbytes + adapter.working.nbytes + AdamW.state_bytes(adapter)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by name; update() changes it in place."""
        return {"master": self.adapter.master.data, **self.optimizer.tensors()}

    def counters(self) -> dict[str, float]:
        """The numbers that a checkpoint must hold beside tensors()."""
        scale = {"loss_scale": self.loss_scale, "good_updates": self.good_updates}
        return {"skipped": self.skipped} | (scale if self.model.dtype == torch.float16 else {})

    def metrics(self) -> dict[str, float]:
        """The counters that a run logs."""
        return {name: n for name, n in self.counters().items() if name != "good_updates"}

    def restore(self, counters: dict) -> None:
        """Goes on from a checkpoint whose tensors have been written into tensors() already.

        counters: the checkpoint's, which may hold other numbers too; {} for a new run.
        """
        for name in self.counters().keys() & counters.keys():
            setattr(self, name, counters[name])
        self.adapter.sync()

    def update(self, batch: Batch, weights: Tensor, lr: float) -> Update:
        """One optimizer step on those rows of the batch whose weight is above 0.

        Every rank holds the whole batch, the B rows of all ranks, and weights (B,) fp32 as
        grpo.token_weights gives them; each computes its share. A loss or gradient that is infinite
        or NaN skips the step, on every rank alike, because all see the same sums. Where nothing can
        be learned (all advantages 0) there is no step either, and no momentum acts.
        """
        adapter = self.adapter
        adapter.master.grad.zero_()
        parts = gather([self.gradient(batch, weights, RANK, WORLD)])
        parts = [sums for sums in parts if sums]
        if not parts:
            return Update({}, 0.0, lr)
        sums = functools.reduce(grpo.add_sums, parts)
        all_sum(adapter.master.grad).div_(self.loss_scale)
        loss = sums.pop("loss").item()
        grad_norm = adapter.master.grad.norm().item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # The loss itself is fp32 and not scaled. Where it is not finite, a reward or a log-prob is
        # at fault, and another loss scale would not help.
        if self.model.dtype == torch.float16 and math.isfinite(loss):
            self._next_loss_scale(finite)
        if not finite:
            self.skipped += 1
            return Update(sums, grad_norm, lr, f"loss {loss}, gradient norm {grad_norm}")
        adapter.master.grad.mul_(min(1.0, self.max_grad_norm / (grad_norm + 1e-6)))
        self.optimizer.step(lr)
        adapter.sync()
        return Update(sums, grad_norm, lr)

    def gradient(self, batch: Batch, weights: Tensor, rank: int, ranks: int) -> dict[str, Tensor]:
        """Adds one rank's share of the gradient of loss_scale * loss to adapter.master.grad.

        Returns the sums over the tokens that it trained on, on the CPU; {} if it has none.
        """
        # Rows of advantage 0 have no gradient (but for a KL term): they are left out, and cost
        # nothing but their place in the divisor, which is in the weights already.
        teaches = (batch.advantages != 0) | (self.loss.kl_beta > 0)
        trained = torch.nonzero((weights > 0) & teaches)[:, 0].tolist()
        prompts = [batch.rollouts.prompts[b] for b in trained]
        completions = [batch.rollouts.completions[b] for b in trained]
        sums = {}
        # Cut from the whole step, then dealt to the ranks. If each rank cut its own rows, bf16
        # rounding would depend on the number of GPUs (0.8 % of a 7B's gradient).
        for part in micro_batches(prompts, completions, self.micro_batch_tokens, ranks, rank):
            loss, more = self._micro_batch(batch, [trained[i] for i in part], weights)
            (loss * self.loss_scale).backward()
            sums = grpo.add_sums(sums, more)
        return {name: value.cpu() for name, value in sums.items()}

    def _micro_batch(self, batch, rows, weights):
        """The given rows of a batch -> their loss, differentiable, and their sums."""
        model = self.model
        device = model.device
        rollouts = batch.rollouts
        tokens = [rollouts.prompts[b] + rollouts.completions[b] for b in rows]
        starts = [len(rollouts.prompts[b]) for b in rows]
        lengths = [len(rollouts.completions[b]) for b in rows]
        policy, entropy = model.token_logprobs(tokens, starts, self.temperature, self.kept_layers)
        reference = None
        if self.loss.kl_beta:
            with torch.no_grad(), self.adapter.off():
                reference, _ = model.token_logprobs(tokens, starts, self.temperature)
        sampler = torch.cat([rollouts.logprobs[b] for b in rows]).to(device)
        # At a row's first pass its proximal policy is this very pass, so rho is exactly 1; later
        # passes find what the first one left.
        proximal = [batch.proximal.setdefault(b, part)
                    for b, part in zip(rows, policy.detach().split(lengths))]
        row = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)).to(device)
        logprobs = grpo.LogProbs(policy, sampler, torch.cat(proximal), reference)
        loss, sums = grpo.policy_loss(logprobs, batch.advantages[rows].to(device), row,
                                      weights[rows].to(device), self.loss)
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


# -----------------------------------------------------------------------------
# Micro-batches

def micro_batches(prompts: Sequence, completions: Sequence, token_budget: int,
                  ranks: int = 1, rank: int = 0) -> list[list[int]]:
    """Which rows one rank computes together: lists of row indices of at most token_budget tokens.

    prompts and completions are lists of token ids, B each; the rows of a group stand next to each
    other, and the learner then computes their prompt once, so that it counts once. Three packings
    follow one another. Here with a budget of 10 tokens, the prompts a (2 tokens) and b (1), and
    answers of 3, 3, 6 and 1 tokens:

        rows          0: a 3    1: a 3    2: a 6    3: b 1

        1) pieces     [a  3  3] = 8       [a  6] = 8       [b  1] = 2
                      rows of one prompt; a group beyond the budget is cut, its prompt counts again

        2) micro-     [a  3  3 | b  1] = 10                [a  6] = 8
           batches    first fit, longest piece first

        3) ranks      rank 0: [0, 1, 3]                    rank 1: [2]
                      largest first, each to the rank that has least so far

    A row beyond the budget stands alone. The longest come first, so what does not fit in memory
    fails at once and not after an hour. A few large micro-batches cannot be dealt out evenly, so
    for several ranks the budget shrinks first, until there are about MICRO_BATCHES_PER_RANK for
    each (the drawing leaves that out). Dealt in turns, one rank would still have 10 % too much.
    """
    assert token_budget > 0, token_budget
    if ranks > 1:
        tokens = sum(map(len, completions)) + sum(len(prompt) for prompt, _ in groupby(prompts))
        token_budget = min(token_budget, tokens // (MICRO_BATCHES_PER_RANK * ranks) + 1)

    # 1) Pieces: [tokens, rows], as in all three.
    pieces = []
    for _, group in groupby(range(len(prompts)), prompts.__getitem__):
        piece = None
        for b in group:
            if piece is None or piece[0] + len(completions[b]) > token_budget:
                piece = [len(prompts[b]), []]
                pieces.append(piece)
            piece[0] += len(completions[b])
            piece[1].append(b)

    # 2) Micro-batches: each piece goes to the first one that has space for it, or opens a new one.
    packed = []
    for tokens, rows in sorted(pieces, key=itemgetter(0), reverse=True):
        micro_batch = next((m for m in packed if m[0] + tokens <= token_budget), None)
        if micro_batch is None:
            micro_batch = [0, []]
            packed.append(micro_batch)
        micro_batch[0] += tokens
        micro_batch[1] += rows

    # 3) Ranks: [tokens, micro-batches] each. Every rank computes all of this and takes its own.
    shares = [[0, []] for _ in range(ranks)]
    for tokens, rows in sorted(packed, key=itemgetter(0), reverse=True):
        least = min(shares, key=itemgetter(0))
        least[0] += tokens
        least[1].append(rows)
    return shares[rank][1]
