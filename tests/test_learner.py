"""
The learner: its gradient against float64 autograd of the textbook losses on the complete batch, its step against AdamW
by hand and torch's own, skipped updates, and how rows are packed into micro-batches and dealt to ranks.

python -m pytest tests/test_learner.py -v
"""
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import adapted
from tiny_qwen2 import merged, plain_logits

import grpo
from learner import AdamW, Batch, Learner, micro_batches, share_of_rank
from sampler import Rollouts, Row

RANK, ALPHA, TEMPERATURE, LIMIT = 4, 6, 0.9, 20
ANY_NORM = 1e9                                                            # a --max-grad-norm that never clips


def some_rollouts(model, noise, groups=4, group_size=4, seed=0):
    """Ragged random rows whose log-probs differ from the model's by about `noise`."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(groups):
        prompt = torch.randint(101, (int(torch.randint(1, 9, (), generator=g)),), generator=g).tolist()
        for _ in range(group_size):
            completion = torch.randint(101, (int(torch.randint(1, LIMIT, (), generator=g)),), generator=g).tolist()
            rows.append(Row(prompt, completion, None, finished=True))
            rows[-1].logprobs = logprobs_of(model, rows[-1:]) + noise * torch.randn(len(completion), generator=g)
    return Rollouts(rows)


@torch.no_grad()
def logprobs_of(model, rows):
    return model.token_logprobs([row.prompt + row.completion for row in rows], [len(row.prompt) for row in rows],
                                TEMPERATURE)[0]


def some_step(tiny, loss="dapo", noise=0.15, base="bf16", dtype=None, max_grad_norm=ANY_NORM,
              shape="untied", **changes):
    """-> a learner, its adapter's tensors by PEFT's names, a Batch, weights (B, L) that leave out row 5."""
    model, tensors = adapted(tiny[shape], rank=RANK, alpha=ALPHA, base=base, dtype=dtype)
    learner = Learner(model, dataclasses.replace(grpo.LOSSES[loss], **changes), TEMPERATURE, max_grad_norm)
    return learner, tensors, *some_batch(learner, noise)


def some_batch(learner, noise=0.15):
    """-> a Batch, weights (B, L) that leave out row 5."""
    rollouts = some_rollouts(learner.model, noise)
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 2, 1, 3])   # the third group has no advantage
    weights = grpo.loss_weights(rollouts.sampled() & (torch.arange(16) != 5)[:, None], learner.loss, LIMIT)
    return Batch(rollouts.rows, grpo.group_advantages(rewards, 4, "group")), weights


def with_adapter(case, leaves):
    return merged(case.tensors, leaves, ALPHA / RANK)


def plain_gradient(case, tensors, batch, name, loss, weights_of=with_adapter):
    """The textbook objectives, row by row through a plain float64 model; row 5 is left out.

    -> the gradients of A and B by PEFT's names, the loss, every ratio policy / old. The divisors do not come from grpo:
    grpo takes the mean over a row's tokens, then over rows; dapo takes it over all tokens; dr_grpo divides by rows x
    limit; gspo is grpo with one ratio per row.

    weights_of: (case, tensors) -> the model's weights. name: a loss in grpo.LOSSES. A new one fails here until
    `divisor` has an entry for it and, if its formula differs, the objective has a branch.
    """
    rows, advantages = batch.rows, batch.advantages
    leaves = {name: t.double().requires_grad_() for name, t in tensors.items()}
    weights = weights_of(case, leaves)
    reference = {name: t.double() for name, t in case.tensors.items()}
    kept = [b for b in range(len(rows)) if b != 5 and rows[b].mask.any()]
    tokens = sum(int(rows[b].mask.sum()) for b in kept)
    total, ratios = 0.0, []
    for b in kept:
        prompt, completion = rows[b].prompt, rows[b].completion

        def logprobs(w):
            logits = plain_logits(case.raw, w, prompt + completion)[len(prompt) - 1:-1] / TEMPERATURE
            return logits.log_softmax(-1)[range(len(completion)), completion][rows[b].mask]

        rollout = rows[b].logprobs.double()[rows[b].mask]
        old = batch.old[b].double()[rows[b].mask] if batch.old else rollout
        now, advantage, n = logprobs(weights), advantages[b].double(), len(rollout)
        moved, gap = now - old, old - rollout
        ratio, importance = ((t.mean().expand(n) if loss.sequence_level else t).exp() for t in (moved, gap))
        ratios.append(ratio.detach())
        clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        importance = importance.clamp(max=grpo.CORRECTIONS["truncate"].cap)
        objective = torch.minimum(ratio * advantage, clipped * advantage) * importance
        if loss.kl_beta:
            d = logprobs(reference).detach() - now
            objective = objective - loss.kl_beta * (d.exp() - 1 - d)
        divisor = {"grpo": len(kept) * n, "dapo": tokens, "dr_grpo": len(kept) * LIMIT, "gspo": len(kept) * n}
        assert name in divisor, f"test_learner.plain_gradient has no divisor for the loss {name!r} of grpo.LOSSES"
        total = total - objective.sum() / divisor[name]
    ratios = torch.cat(ratios)
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, gradients)), total.item(), ratios


def difference(adapter, want):
    """|gradient - want| / |want| over all of the adapter's tensors."""
    got = dict(adapter.peft_tensors(adapter.master.grad))
    assert got.keys() == want.keys()
    off = sum((got[name].double() - want[name]).square().sum() for name in want)
    return (off / sum(t.square().sum() for t in want.values())).sqrt().item()


# -----------------------------------------------------------------------------
# The gradient

# A clip that some ratios of the noisy rollout leave and others do not, for a loss whose own is much narrower.
CLIPS = {"gspo": dict(clip_low=0.05, clip_high=0.05)}


@pytest.mark.parametrize("loss,changes,shape", [
    *((loss, CLIPS.get(loss, {}), "untied") for loss in grpo.LOSSES),
    ("dapo", dict(kl_beta=0.3), "untied"), ("dapo", {}, "qwen3-tied"), ("dapo", {}, "qwen3-untied"),
    ("dapo", {}, "llama-tied")])
def test_gradient_matches_float64_autograd(both, tiny, loss, changes, shape):
    changes = changes | {"correction": "ppo"}                             # then the rollout's noise makes the clip bind
    learner, tensors, batch, weights = some_step(tiny, loss, shape=shape, **changes)
    want, value, ratios = plain_gradient(tiny[shape], tensors, batch, loss, learner.loss)
    low, high = 1 - learner.loss.clip_low, 1 + learner.loss.clip_high
    assert ((ratios < low) | (ratios > high)).any(), f"no ratio leaves the clip of {loss}: add a narrower one to CLIPS"
    for learner.micro_batch_tokens, learner.kept_layers in ((100_000, 2), (60, 1)):    # in one pack, or in several
        update = learner.update(Batch(batch.rows, batch.advantages), weights, lr=0.0)
        assert update.failure == ""
        # Two layers of fp32 sums of up to 192 terms, and log-probs of up to 12.
        assert difference(learner.adapter, want) < 1e-5, f"{loss}: if its formula differs, plain_gradient needs it too"
    norm = torch.cat([t.flatten() for t in want.values()]).norm().item()
    assert update.grad_norm == pytest.approx(norm, rel=1e-5)
    trained = [b for b in range(16) if b != 5 and (batch.advantages[b] != 0 or learner.loss.kl_beta)]
    assert update.sums["tokens"] == sum(len(batch.rows[b].completion) for b in trained)


def with_tool_tokens(rollouts):
    """The rollouts as if a tool had written tokens 1, 4, 7 .. of each row and all of row 2; their log-probs are NaN."""
    rows = []
    for b, row in enumerate(rollouts.rows):
        mask = (torch.arange(len(row.completion)) % 3 != 1) & (b != 2)
        rows.append(dataclasses.replace(row, mask=mask, logprobs=torch.where(mask, row.logprobs, torch.nan)))
    return Rollouts(rows)


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_masked_tokens_are_context_only(tiny, loss):
    learner, tensors, batch, _ = some_step(tiny, loss, correction="ppo", kl_beta=0.3, **CLIPS.get(loss, {}))
    rollouts = with_tool_tokens(Rollouts(batch.rows))
    batch = Batch(rollouts.rows, batch.advantages)
    mask = rollouts.sampled() & (torch.arange(16) != 5)[:, None]
    weights = grpo.loss_weights(mask, learner.loss, LIMIT)
    want, _, _ = plain_gradient(tiny["untied"], tensors, batch, loss, learner.loss)
    sums = learner.update(batch, weights, lr=0.0).sums
    assert difference(learner.adapter, {name: want[name] for name in tensors}) < 1e-5
    assert sums["tokens"] == mask.sum() and all(value.isfinite() for value in sums.values())
    _, entropies = learner.model.token_logprobs([row.prompt + row.completion for row in rollouts.rows],
                                                [len(row.prompt) for row in rollouts.rows], TEMPERATURE)
    sampled = torch.cat([row_mask[:len(row.completion)] for row, row_mask in zip(rollouts.rows, mask)])
    assert sums["entropy"] == pytest.approx(entropies[sampled].sum().item(), rel=1e-5)
    # A different tool token changes the gradient of the tokens after it.
    gradient = learner.adapter.master.grad.clone()
    row = next(b for b, c in enumerate(rollouts.completions) if len(c) > 4 and mask[b].any())
    completion = rollouts.rows[row].completion
    completion[1] = (completion[1] + 1) % 101
    learner.update(Batch(rollouts.rows, batch.advantages), weights, lr=0.0)
    assert (learner.adapter.master.grad - gradient).norm() > 1e-3 * gradient.norm()


@pytest.mark.parametrize("loss,changes", [("dapo", {}), ("gspo", CLIPS["gspo"])])
def test_minibatches_share_the_first_old_policy(tiny, loss, changes):
    learner, _, batch, weights = some_step(tiny, loss, **changes)
    halves = [torch.where(half[:, None], weights, 0.0) for half in (torch.arange(16) < 8, torch.arange(16) >= 8)]
    learner.compute_old_logprobs(batch, halves)
    trained = [b for b in range(16) if weights[b].any() and batch.advantages[b] != 0]
    start = logprobs_of(learner.model, [batch.rows[b] for b in trained])
    torch.testing.assert_close(torch.cat([batch.old[b] for b in trained]), start, rtol=0, atol=1e-5)
    kept = {b: t.clone() for b, t in batch.old.items()}
    first = learner.update(batch, halves[0], lr=1e-2)
    assert first.sums["clip_ratio_low"] + first.sums["clip_ratio_high"] == 0
    moved = {name: t.clone() for name, t in learner.adapter.peft_tensors(learner.adapter.master.data)}
    second = learner.update(batch, halves[1], lr=0.0)
    assert second.sums["clip_ratio_low"] + second.sums["clip_ratio_high"] > 0
    assert all(torch.equal(batch.old[b], t) for b, t in kept.items())
    # The same as one update on all rows in which the first half has no advantage.
    late = dataclasses.replace(batch, advantages=torch.where(torch.arange(16) >= 8, batch.advantages, 0.0))
    late.old |= {b: batch.rows[b].logprobs for b in range(16) if b not in trained}
    want, _, _ = plain_gradient(tiny["untied"], moved, late, loss, learner.loss)
    assert difference(learner.adapter, {name: want[name] for name in moved}) < 1e-5


def test_second_update_needs_old_logprobs(tiny):
    learner, _, batch, weights = some_step(tiny)                          # without them, its ratio would always be 1
    learner.update(batch, weights, lr=1e-3)
    with pytest.raises(AssertionError, match="no old log-probs"):
        learner.update(batch, weights, lr=1e-3)


def test_token_advantages_add_to_the_rows(tiny):
    learner, _, batch, weights = some_step(tiny)

    def gradient(advantages, extra=None):
        learner.update(Batch(batch.rows, advantages, extra), weights, lr=0.0)
        return learner.adapter.master.grad.clone()

    want = gradient(batch.advantages)
    spread = [torch.full((len(row.completion),), a) for row, a in zip(batch.rows, batch.advantages)]
    assert torch.equal(gradient(torch.zeros(16), spread), want)           # each of a row's tokens has all of it
    spread[0] = torch.arange(len(spread[0])).float()
    changed = gradient(torch.zeros(16), spread)
    assert (changed - want).norm() > 1e-3 * want.norm()


# -----------------------------------------------------------------------------
# The step

def test_clip_adds_1e_6_to_the_norm_like_torch(tiny):
    learner, _, batch, weights = some_step(tiny, max_grad_norm=1e-6)
    norm = learner.update(batch, weights, lr=0.0).grad_norm
    learner.update(Batch(batch.rows, batch.advantages), weights * (4e-6 / norm), lr=0.0)
    assert learner.adapter.master.grad.norm().item() == pytest.approx(4 / 5 * 1e-6, rel=1e-3)


def test_optimizer_matches_torchs_adamw_and_the_formula():
    g = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(100, generator=g), 1e-3 * torch.randn(20, 100, generator=g)
    gradients[:, :2] = 0                                                  # two parameters never get a gradient
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizer = AdamW(SimpleNamespace(master=mine), weight_decay=0.1)
    b1, b2 = AdamW.BETAS
    how = dict(lr=1.0, betas=(b1, b2), eps=AdamW.EPS, weight_decay=0.1)
    fused = torch.optim.AdamW([theirs], fused=True, **how)
    exact = start.double()
    m, v = torch.zeros(2, 100, dtype=torch.float64)
    for t, gradient in enumerate(gradients.double(), start=1):
        lr = 1e-2 / t
        mine.grad, theirs.grad = gradient.float(), gradient.float()
        fused.param_groups[0]["lr"] = lr
        optimizer.step(lr)
        fused.step()
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient.square()
        exact = exact * (1 - lr * 0.1) - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + AdamW.EPS)
        # Each of 20 steps rounds a number of about 3 by some 2^-24.
        torch.testing.assert_close(mine.data.double(), exact, rtol=0, atol=2e-6)
        assert torch.equal(mine.data, theirs.data)
    assert optimizer.tensors()["step"] == 20 and (exact - start).abs().mean() > 1e-2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_state_bytes_counts_all_training_state(tiny, dtype):
    learner, *_ = some_step(tiny, dtype=dtype)
    adapter = learner.adapter
    held = [adapter.master.grad, adapter.working, *learner.tensors().values()]
    state = Learner.state_bytes(adapter.master.numel(), learner.model.dtype)
    assert sum(t.nbytes for t in held if t.dim()) == state                # all but the step count


def test_optimizer_can_be_replaced(tiny):
    class Descent(AdamW):
        MOMENTS = ()

        def step(self, lr):
            self.state["step"] += 1
            self.adapter.master.data -= lr * self.adapter.master.grad

    learner, _, *step = some_step(tiny)
    Other = type("Other", (Learner,), {"OPTIMIZER": Descent})
    learner = Other(learner.model, learner.loss, TEMPERATURE, ANY_NORM)
    before = learner.adapter.master.data.clone()
    learner.update(*step, lr=0.5)
    assert torch.equal(learner.adapter.master.data, before - 0.5 * learner.adapter.master.grad)
    assert learner.tensors().keys() == {"master", "step"}
    assert Other.state_bytes(100, torch.bfloat16) == 1000       # 4 + 4 + 2 bytes each


def test_no_step_without_advantage_or_weight(tiny):
    learner, _, batch, weights = some_step(tiny)
    learner.update(batch, weights, lr=1e-3)                               # builds up momentum that could act
    before = {name: t.clone() for name, t in learner.tensors().items()}
    no_advantage = Batch(batch.rows, batch.advantages * 0)
    for b, w in ((no_advantage, weights), (batch, weights * 0)):
        assert learner.update(b, w, lr=1e-3) == ({}, 0.0, 1e-3, "")
    assert all(torch.equal(t, before[name]) for name, t in learner.tensors().items())


def test_no_step_on_a_kl_terms_rounding_errors(tiny):
    """The first step's KL gradient is 0 only in theory."""
    learner, _, batch, weights = some_step(tiny, "grpo", kl_beta=0.04)
    learner.adapter.master.data[learner.adapter.b_start:] = 0
    learner.adapter.sync()
    alike, start = Batch(batch.rows, batch.advantages * 0), learner.adapter.master.clone()
    update = learner.update(alike, weights, lr=1e-3)
    assert torch.equal(learner.adapter.master, start) and update.grad_norm == 0 and update.sums["tokens"] > 0
    learner.update(batch, weights, lr=1e-3)
    assert learner.update(alike, weights, lr=1e-3).grad_norm > 0          # once the policy has moved


def test_no_step_where_every_token_is_clipped(tiny):
    learner, _, batch, weights = some_step(tiny)
    learner.compute_old_logprobs(batch, [weights])
    learner.update(batch, weights, lr=1e-3)
    for b, old in batch.old.items():            # as if the policy had moved far in the direction of its advantages
        old -= 5 * batch.advantages[b].sign()
    before = {name: t.clone() for name, t in learner.tensors().items()}
    update = learner.update(batch, weights, lr=1e-3)
    assert update.grad_norm == 0 and update.failure == ""
    assert update.sums["clip_ratio_low"] + update.sums["clip_ratio_high"] == update.sums["tokens"] > 0
    assert all(torch.equal(t, before[name]) for name, t in learner.tensors().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_gradient_is_skipped(tiny, monkeypatch, value):
    learner, _, batch, weights = some_step(tiny)
    learner.compute_old_logprobs(batch, [weights])
    learner.update(batch, weights, lr=1e-3)
    before = {name: t.clone() for name, t in learner.tensors().items()}
    real = learner.accumulate_gradient

    def accumulate_gradient(*arguments):
        sums = real(*arguments)
        learner.adapter.master.grad[7] = value
        return sums

    monkeypatch.setattr(learner, "accumulate_gradient", accumulate_gradient)
    assert "gradient norm" in learner.update(batch, weights, lr=1e-3).failure
    assert all(torch.equal(t, before[name]) for name, t in learner.tensors().items())


# -----------------------------------------------------------------------------
# Micro-batches

def packed(prompts, completions, budget):
    return [m.rows for m in micro_batches(prompts, completions, budget)]


def dealt(prompts, completions, budget, ranks):
    """The rows of the micro-batches of each rank."""
    return [[m.rows for m in share_of_rank(prompts, completions, budget, rank, ranks)] for rank in range(ranks)]


def test_micro_batches_by_hand():
    # The drawing in micro_batches' docstring.
    a, b, drawn = [1, 2], [3], [[0] * n for n in (3, 3, 6, 1)]
    assert micro_batches([a, a, a, b], drawn, 10) == [(10, [0, 1, 3]), (8, [2])]
    # Two groups, with prompts a (2 tokens) and b (1), and a budget of 8. Longest first: a's row of 9 alone, then
    # 2 + 3 + 3 of a, which leaves no room for b's 1 + 4 + 2.
    a, b, rows = [1, 2], [3], [[0] * n for n in (3, 3, 9, 4, 2)]
    assert packed([a, a, a, b, b], rows, 8) == [[2], [0, 1], [3, 4]]
    assert packed([a, a, a, b, b], rows, 17) == [[0, 1, 2], [3, 4]]
    assert packed([a, a, a, b, b], rows, 24) == [[0, 1, 2, 3, 4]]
    assert packed([a, a, b, a], rows[:4], 1) == [[2], [3], [0], [1]]
    assert packed([], [], 8) == []
    # Two ranks: 21 tokens of completions and 3 of prompts, an eighth of which is 3, so each row gets a batch of its
    # own: 11, 5, 5, 5 and 3 tokens.
    assert dealt([a, a, a, b, b], rows, 24, ranks=2) == [[[2], [4]], [[0], [1], [3]]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_a_step_evenly(ranks):
    lengths = (50 + torch.empty(128).exponential_(1 / 250, generator=torch.Generator().manual_seed(0))).int().tolist()
    prompts, completions = [[b // 8] * 150 for b in range(128)], [[0] * n for n in lengths]
    shares = dealt(prompts, completions, 4096, ranks)
    assert sorted(b for share in shares for rows in share for b in rows) == list(range(128))
    sizes = [[sum(lengths[b] for b in rows) + 150 * len({b // 8 for b in rows}) for rows in share] for share in shares]
    assert max(map(max, sizes)) <= 4096
    loads = [*map(sum, sizes)]
    assert sum(loads) / ranks > 0.95 * max(loads)                         # dealt in turn it would be 0.75 to 0.98


def test_step_is_packed_alike_on_any_number_of_ranks():
    prompts, completions = [[b // 8] * 100 for b in range(64)], [[0] * 400] * 64      # 26,400 tokens

    def cuts(budget, ranks):
        return sorted(rows for share in dealt(prompts, completions, budget, ranks) for rows in share)

    assert cuts(1000, 1) == cuts(1000, 2) == cuts(1000, 6)                # 26,400 / 4 / 6 = 1,100
    assert [len(cuts(10_000, ranks)) for ranks in (1, 2, 8)] == [3, 8, 64]  # lowered to 3,301 and 826 tokens
    assert [len(cuts(1000, ranks)) for ranks in (6, 8)] == [32, 64]
