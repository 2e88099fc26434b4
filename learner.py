"""
The learner: turns sampled answers and their advantages into optimizer steps on the adapter.

    learner = Learner(model, loss)
    batch = Batch(rows, advantages)                              # one per training step
    update = learner.update(batch, loss_weights, lr)             # one or more per batch

All trained parameters are views of one fp32 vector, adapter.master (lora.py). An update packs the
batch's rows into micro-batches that fit in memory, adds up their gradients, clips the sum, takes an
AdamW step, and rounds the new parameters into the working copies (bf16 on a GPU) that sampler and
learner compute with.

Not here: the loss (grpo.py), the model's forward and backward pass (model.py, ops.py).
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
from torch.optim.adamw import adamw

import grpo
from lora import Adapter
from model import Transformer
from ranks import RANK, WORLD, all_sum, gather
from sampler import Row


@dataclass
class Batch:
    """The answers of one training step, shared by all updates on them."""
    rows: list[Row]                              # B of them
    advantages: Tensor                           # (B,) fp32
    # For a process reward: one tensor (completion tokens,) fp32 per row, which is added to the
    # advantages of its tokens. None adds nothing.
    token_advantages: list[Tensor] | None = None
    # The old log-probs (grpo.py) of the rows that this rank trains on, by row number:
    # (completion tokens,) fp32, on the model's device. compute_old_logprobs() fills it.
    old: dict[int, Tensor] = field(default_factory=dict)
    updated: bool = False                        # whether an update has moved the policy

    def has_advantage(self) -> Tensor:
        """(B,) bool: True for rows with a token whose advantage isn't 0."""
        rows = self.advantages != 0
        if self.token_advantages:
            rows = rows | torch.tensor([bool(tokens.any()) for tokens in self.token_advantages])
        return rows


class Update(NamedTuple):
    """Result of update(). An update is skipped if the loss or gradient is not finite (`failure` is
    set, and the values are still reported), if no row was trained (`sums` is empty), or if the
    gradient consists only of rounding errors.
    """
    sums: dict[str, Tensor]                      # over the trained tokens, for grpo.summarize
    grad_norm: float                             # before clipping
    lr: float
    failure: str = ""                            # why the step was skipped


class AdamW:
    """AdamW (1711.05101) on the adapter's flat vector of parameters.

    To try another optimizer, assign a subclass to Learner.OPTIMIZER; checkpoints, --resume and the
    memory plan (harness/memory.py) use only state_bytes() and tensors().
    """
    MOMENTS = "exp_avg", "exp_avg_sq"            # as torch.optim names them
    BETAS = 0.9, 0.99                            # as in the authors' code (NVlabs/QeRL)
    # torch's 1e-8 would damp the updates of LoRA's A, whose gradient is only 1e-8 to 1e-6 while B
    # is still small.
    EPS = 1e-10

    def __init__(self, adapter: Adapter, weight_decay: float = 0.0):
        master = adapter.master
        self.adapter = adapter
        self.weight_decay = weight_decay
        self.state = {"step": torch.zeros((), device=master.device)}
        self.state |= {name: torch.zeros_like(master.data) for name in self.MOMENTS}

    @classmethod
    def state_bytes(cls, parameters: int) -> int:
        """Bytes of fp32 optimizer state for this many parameters."""
        return 4 * len(cls.MOMENTS) * parameters

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by name, for checkpoints; step() changes it in place."""
        return self.state

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Takes an AdamW step on adapter.master, in place, with adapter.master.grad.

        Call adapter.sync() afterwards to rewrite the working copies.
        """
        master = self.adapter.master
        state = self.state
        # The function behind torch.optim.AdamW(fused=True): one kernel for the entire vector. The
        # class itself imports torch's compiler, which would add seconds to every start.
        adamw([master], [master.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [],
              [state["step"]], fused=True, lr=lr, beta1=self.BETAS[0], beta2=self.BETAS[1],
              weight_decay=self.weight_decay, eps=self.EPS, amsgrad=False, maximize=False)


class Learner:
    """Trains a model's adapter; owns all state that updates change.

    temperature: the sampler's. The learner divides its logits by it too, so that both have the same
    distribution.

    Two attributes can be set to what fits in memory: micro_batch_tokens, and kept_layers, the
    number of layers that keep their activations for the backward pass (the others recompute them:
    activation checkpointing).
    """
    OPTIMIZER = AdamW

    def __init__(self, model: Transformer, loss: grpo.Loss, temperature: float = 1.0,
                 max_grad_norm: float = 0.2, weight_decay: float = 0.0):
        self.model = model
        self.adapter = model.adapter
        self.loss = loss
        self.temperature = temperature
        self.max_grad_norm = max_grad_norm
        self.optimizer = self.OPTIMIZER(self.adapter, weight_decay)
        self.micro_batch_tokens = 8192
        self.kept_layers = 0

    @classmethod
    def state_bytes(cls, parameters: int, dtype: torch.dtype) -> int:
        """Bytes of training state for this many parameters: fp32 values and gradients, working
        copies in the model's dtype, and the optimizer's state.
        """
        return (4 + 4 + dtype.itemsize) * parameters + cls.OPTIMIZER.state_bytes(parameters)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by name; update() changes them in place."""
        return {"master": self.adapter.master.data, **self.optimizer.tensors()}

    @torch.enable_grad()                         # a --reward may have disabled it
    def update(self, batch: Batch, loss_weights: Tensor, lr: float) -> Update:
        """Takes one optimizer step on the batch's tokens with a loss weight above 0.

        Every rank gets the full batch (the B rows of all ranks) and loss_weights (B, L) fp32 from
        grpo.loss_weights, and computes its share. Update says when no step is taken.
        """
        adapter = self.adapter
        adapter.master.grad.zero_()
        local_sums = self.accumulate_gradient(batch, loss_weights, RANK, WORLD)
        of_ranks = [sums for sums in gather([local_sums]) if sums]
        if not of_ranks:
            return Update({}, 0.0, lr)
        sums = functools.reduce(grpo.add_sums, of_ranks)
        all_sum(adapter.master.grad)
        loss = sums.pop("loss").item()
        grad_norm = adapter.master.grad.norm().item()
        # Every rank sees the same sums, so all of them agree.
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return Update(sums, grad_norm, lr, f"loss {loss}, gradient norm {grad_norm}")
        # Otherwise momentum would still move the adapter, and AdamW's normalization would turn
        # rounding errors into full-size steps.
        if grad_norm == 0 or self._only_rounding(batch, loss_weights, sums):
            return Update(sums, 0.0, lr)
        adapter.master.grad.mul_(min(1.0, self.max_grad_norm / (grad_norm + 1e-6)))
        self.optimizer.step(lr)
        adapter.sync()
        batch.updated = True
        return Update(sums, grad_norm, lr)

    def accumulate_gradient(self, batch: Batch, loss_weights: Tensor, rank: int,
                            ranks: int) -> dict[str, Tensor]:
        """Adds one rank's share of the gradient to adapter.master.grad.

        Returns the sums over the tokens this rank trained on, on the CPU; {} if there are none.
        """
        trained = self._trained(batch, loss_weights)
        total = {}
        for indices in self._share(batch, trained, rank, ranks):
            loss, sums = self._micro_batch(batch, indices, loss_weights)
            loss.backward()
            total = grpo.add_sums(total, sums)
        return {name: value.cpu() for name, value in total.items()}

    @torch.no_grad()
    def compute_old_logprobs(self, batch: Batch, loss_weights: list[Tensor]) -> None:
        """Fills batch.old with a forward pass. Call it before the first of several updates, because
        the later ones need the policy as it was then. (In a single update, the old policy equals
        the policy.)

        loss_weights: those of one pass over the batch, in which each row is in a single update.
        """
        if not self.loss.needs_old:
            return
        for weights in loss_weights:             # dealt to the ranks as in the update
            for indices in self._share(batch, self._trained(batch, weights), RANK, WORLD):
                tokens, starts, lengths = as_tokens([batch.rows[b] for b in indices])
                old, _ = self.model.token_logprobs(tokens, starts, self.temperature)
                batch.old.update(zip(indices, old.split(lengths)))

    def _only_rounding(self, batch: Batch, loss_weights: Tensor, sums: dict[str, Tensor]) -> bool:
        """True if a KL-only gradient is rounding noise: no token has an advantage, and the policy
        is still the reference (B is 0, or the mean KL is below 1e-8).
        """
        # The size of the gradient doesn't show it, because genuine gradients of A can be as small
        # as 1e-8. Nor does the KL alone: with B at 0, a GPU still rounds the policy and the
        # reference differently, by up to 1e-4.
        if not self.loss.needs_reference:
            return False
        has_advantage = batch.has_advantage() & (loss_weights > 0).any(dim=1)
        b = self.adapter.master[self.adapter.b_start:]
        at_reference = sums["kl"] < 1e-8 * sums["tokens"] or not b.any()
        return at_reference and not has_advantage.any()

    def _trained(self, batch: Batch, loss_weights: Tensor) -> list[int]:
        """The indices of the rows that an update trains on."""
        # At an advantage of 0 only a KL term has a gradient. Without one the row is skipped, but it
        # still counts in the divisor.
        has_gradient = batch.has_advantage() | self.loss.needs_reference
        return torch.nonzero((loss_weights > 0).any(dim=1) & has_gradient)[:, 0].tolist()

    def _share(self, batch: Batch, trained: list[int], rank: int, ranks: int) -> list[list[int]]:
        """One rank's micro-batches, as lists of row indices."""
        prompts = [batch.rows[b].prompt for b in trained]
        completions = [batch.rows[b].completion for b in trained]
        share = share_of_rank(prompts, completions, self.micro_batch_tokens, rank, ranks)
        return [[trained[i] for i in rows] for _, rows in share]

    def _micro_batch(self, batch, indices, loss_weights):
        """The differentiable loss of the rows with these indices, and their sums."""
        device = self.model.device
        logprobs, entropy = self._logprobs(batch, indices)
        # Each token's advantage, row and loss weight, of all rows end to end.
        lengths = [len(batch.rows[b].completion) for b in indices]
        row_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        advantages = batch.advantages[indices][row_of_token]
        if batch.token_advantages:
            advantages = advantages + torch.cat([batch.token_advantages[b] for b in indices])
        weights = torch.cat([loss_weights[b, :n] for b, n in zip(indices, lengths)])
        # Tokens outside the loss, such as a tool's, are dropped only now: others attend to them.
        in_loss = weights.nonzero()[:, 0]
        advantages, row_of_token, weights = (
            t[in_loss].to(device) for t in (advantages, row_of_token, weights))
        in_loss = in_loss.to(device)
        logprobs = grpo.LogProbs(*(None if t is None else t[in_loss] for t in logprobs))
        loss, sums = grpo.policy_loss(logprobs, advantages, row_of_token, weights, self.loss)
        sums["entropy"] = entropy[in_loss].detach().sum().double()
        sums["loss"] = loss.detach().double()
        return loss, sums

    def _logprobs(self, batch, indices):
        """The log-probs of all completion tokens of these rows, and the learner's entropy there."""
        rows = [batch.rows[b] for b in indices]
        tokens, starts, _ = as_tokens(rows)
        policy, entropy = self.model.token_logprobs(tokens, starts, self.temperature,
                                                    self.kept_layers)
        reference = None
        if self.loss.needs_reference:
            with torch.no_grad(), self.adapter.off():
                reference, _ = self.model.token_logprobs(tokens, starts, self.temperature)
        rollout = torch.cat([row.logprobs for row in rows]).to(policy.device)
        # A rank has old log-probs only for its own rows. That's enough, because every epoch deals
        # the same rows to the same ranks.
        assert batch.old or not (batch.updated and self.loss.needs_old), "no old log-probs"
        old = torch.cat([batch.old[b] for b in indices]) if batch.old else policy.detach()
        return grpo.LogProbs(policy, rollout, old, reference), entropy


def as_tokens(rows: list[Row]) -> tuple[list[list[int]], list[int], list[int]]:
    """Each row's token ids, where its completion starts, and how long its completion is."""
    return ([row.prompt + row.completion for row in rows], [len(row.prompt) for row in rows],
            [len(row.completion) for row in rows])


# -----------------------------------------------------------------------------
# Micro-batches

class MicroBatch(NamedTuple):
    """Rows that are computed together."""
    tokens: int
    rows: list[int]


def micro_batches(prompts: Sequence, completions: Sequence, token_budget: int) -> list[MicroBatch]:
    """Packs the rows of a batch into micro-batches of at most token_budget tokens, largest first.

    prompts and completions are B lists of token ids each. The rows of a group are neighbors, and
    the learner computes their prompt once, so it counts once. A row longer than the budget gets its
    own micro-batch.

    With a budget of 10 tokens, three rows that answer prompt a (2 tokens) and one that answers
    prompt b (1 token):

        row               0        1        2        3
        prompt, answer    a + 3    a + 3    a + 6    b + 1   tokens

        1) pieces         [a + 3 + 3] = 8        [a + 6] = 8        [b + 1] = 2
                          rows of one prompt; a group that exceeds the budget is split, and its
                          prompt counts in each piece

        2) micro-batches  [a + 3 + 3, b + 1] = 10                   [a + 6] = 8
                          longest piece first, each into the first micro-batch with room for it

    The largest micro-batch comes first, so a run that doesn't fit in memory fails right away.
    """
    assert token_budget > 0, token_budget

    # 1) Pieces, [tokens, rows] each.
    pieces = []
    for _, group in groupby(range(len(prompts)), prompts.__getitem__):
        piece = None
        for b in group:
            if piece is None or piece[0] + len(completions[b]) > token_budget:
                piece = [len(prompts[b]), []]
                pieces.append(piece)
            piece[0] += len(completions[b])
            piece[1].append(b)

    # 2) Micro-batches, [tokens, rows] each. A piece that fits in none opens a new one.
    packed = []
    for tokens, rows in sorted(pieces, key=itemgetter(0), reverse=True):
        micro_batch = next((m for m in packed if m[0] + tokens <= token_budget), None)
        if micro_batch is None:
            micro_batch = [0, []]
            packed.append(micro_batch)
        micro_batch[0] += tokens
        micro_batch[1] += rows
    return [MicroBatch(*m) for m in sorted(packed, key=itemgetter(0), reverse=True)]


# -----------------------------------------------------------------------------
# Several GPUs

# The token budget is lowered until each rank gets at least about this many micro-batches, because a
# few large ones can't be dealt out evenly.
MICRO_BATCHES_PER_RANK = 4


def share_of_rank(prompts: Sequence, completions: Sequence, token_budget: int, rank: int,
                  ranks: int) -> list[MicroBatch]:
    """One rank's share of the micro_batches() of the full batch. They are dealt out largest first,
    each to the rank with the fewest tokens so far.

    Every rank packs the full batch. If each packed only its own rows, micro-batches would depend on
    the number of GPUs, and bf16 rounds differently in a different micro-batch. (With many ranks and
    a small batch they still do, through the lower budget.)
    """
    if ranks > 1:
        tokens = sum(map(len, completions)) + sum(len(prompt) for prompt, _ in groupby(prompts))
        token_budget = min(token_budget, tokens // (MICRO_BATCHES_PER_RANK * ranks) + 1)
    shares = [[] for _ in range(ranks)]
    dealt = [0] * ranks                          # tokens of each rank
    for micro_batch in micro_batches(prompts, completions, token_budget):
        least = dealt.index(min(dealt))
        dealt[least] += micro_batch.tokens
        shares[least].append(micro_batch)
    return shares[rank]
