"""
The GRPO family of losses: from the rewards of a group of answers to the loss of every token.

    group_advantages    how much better each answer is than the others to its problem
    loss_weights        how much each token counts in the loss of an update
    policy_loss         combines both with the tokens' log-probs into the loss to differentiate

A training step samples G answers to each of P problems. Each answer is one of B = P * G rows, and
rows [p * G, (p + 1) * G) answer problem p. The loss gets the T tokens of all rows end to end:

    problem            0            1          P = 2, G = 2
    row                0     1      2     3    B = 4: rewards and advantages are (B,)
    token              a b   c d e  f     g h  T = 8: log-probs and loss weights are (T,)
    row_of_token       0 0   1 1 1  2     3 3  (T,): each token has its row's advantage

Until the learner packs them, masks and loss weights are (B, L), where L is the length of the
longest completion. The mask is 0 for padding, tool output, unscorable rows and, with --overlong
mask, truncated rows.

Three policies give each token a probability:

    rollout    sampled it, with the sampler's kernels and AQN's noise; its log-probs were recorded
    old        the learner, without noise, before the step's first update
    policy     the learner now, the only one with a gradient; all three share the frozen weights

    importance weight = min(old / rollout, 2)    corrects for noise and rounding in the rollout
    ratio             = policy / old             how far updates have moved the learner; clipped

    objective = min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)
    loss      = -sum over the tokens of loss weight * importance weight * objective

By default a training step makes one update (optimizer step). The old policy is then the policy, so
the ratio is 1, nothing is clipped, and the gradient is that of

    loss      = -sum over the tokens of loss weight * importance weight * advantage * log policy

Two flags add updates: --epochs N trains on all rows N times, --updates-per-rollout N trains on one
Nth of the groups at a time. The old log-probs then take a forward pass of their own, before the
first update.

A token's loss weight is its share of the loss, 1 / divisor. The divisor counts rows or tokens of
the whole update and is known before the first backward pass, so the gradients of micro-batches and
ranks simply add up.

GRPO (2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783) and GSPO (2507.18071) differ in the
divisor, the clip, and whether the ratio is per token or per row; each has an entry in LOSSES. They
also differ in the scale of the advantages and the KL term; both are set by flags.
docs/walkthrough.md (section 7) explains why there are two ratios where PPO has one.

Not here: a critic and an entropy bonus (QeRL uses neither), a penalty for long answers
(examples/my_reward.py), DAPO's dynamic sampling (a larger --prompts-per-step costs the same and
yields as many informative groups).
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Log-ratios are clamped to +-20 before exp(), as in verl. Ratios then stay below 4.9e8, and their
# squares and sums over a step are finite in fp32.
LOG_RATIO_LIMIT = 20.0
SCALES = ("group", "none")


class Correction(NamedTuple):
    """How a loss corrects for answers sampled by a policy other than the learner:
    ratio = policy / proximal and importance weight = min(proximal / rollout, cap).
    """
    proximal: str                                # "old" or "rollout"
    cap: float | None                            # None: the importance weight is 1


CORRECTIONS = {
    # Decoupled PPO (2110.00641) with truncated importance sampling (TIS: Yao et al. 2025, "Your
    # Efficient RL Framework Secretly Brings You Off-Policy RL Training"). Without the cap, a token
    # that the rollout almost never samples could outweigh all others; 2 is the usual cap, for
    # quantized rollouts too (TRL uses 3).
    "truncate": Correction("old", 2.0),
    # PPO's single ratio (1707.06347; QeRL, Eq. 3), whose clip acts on noise and rounding too. A
    # token boosted by noise can have a ratio below 1 - clip_low. It then loses its gradient if its
    # advantage is negative but keeps it if positive, so the learner may imitate the noise.
    "ppo": Correction("rollout", None),
    # No correction, as in the authors' code. The gradient is biased.
    "off": Correction("old", None),
}


@dataclass(frozen=True)
class Loss:
    """A loss. correction is a key of CORRECTIONS.

    divisor(rows, tokens, lengths, limit) returns what to divide the sum over a row's tokens by: one
    number () or one per row (B,). All arguments but the last are tensors:
        rows ()       rows in the update's loss
        tokens ()     tokens in it
        lengths (B,)  tokens of each row in it
        limit         the maximum length of an answer (--max-new-tokens)
    """
    divisor: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    # QeRL uses both widths for all its losses (Table 4). The larger clip_high is DAPO's Clip-Higher
    # (2503.14476, section 3.1).
    clip_low: float = 0.2
    clip_high: float = 0.28
    sequence_level: bool = False                 # one ratio per row: exp of the mean log-ratio
    correction: str = "truncate"
    kl_beta: float = 0.0                         # coefficient of KL(policy || reference)

    def __post_init__(self):
        assert self.correction in CORRECTIONS, \
            f"{self.correction!r} is not one of {(*CORRECTIONS,)}"
        assert self.kl_beta >= 0, f"kl_beta {self.kl_beta} is negative"

    @property
    def needs_old(self) -> bool:
        """Whether the loss compares with the old policy."""
        return CORRECTIONS[self.correction].proximal == "old"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a KL term, which needs the reference log-probs."""
        return self.kl_beta > 0


LOSSES = {
    # Every row counts the same, however long it is (2402.03300, Eq. 3). The paper also has a
    # symmetric clip and a KL term: --clip-high 0.2 --kl-beta 0.04.
    "grpo": Loss(lambda rows, tokens, lengths, limit: rows * lengths),
    # Every token of the update counts the same (2503.14476, section 3.3: token-level loss).
    "dapo": Loss(lambda rows, tokens, lengths, limit: tokens),
    # Divides by a constant, not by the row's length. With "grpo", each token of a wrong answer
    # costs less the longer the answer is, so wrong answers grow (2503.20783, section 3.1). Dr. GRPO
    # is this loss plus --advantage-scale none.
    "dr_grpo": Loss(lambda rows, tokens, lengths, limit: rows * limit),
    # One ratio per row, with the narrow clip of 2507.18071, section 5.1. With correction "ppo",
    # AQN's noise alone would push the ratio outside it.
    "gspo": Loss(lambda rows, tokens, lengths, limit: rows * lengths, 3e-4, 4e-4,
                 sequence_level=True),
}


# -----------------------------------------------------------------------------
# Rewards -> advantages

def informative_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Which groups have rewards that differ: (B,) rewards -> (P,) bool.

    Unscorable rows (NaN) don't count, and a group with no other rows isn't informative. Rewards
    that differ by at most 1e-9 of the largest are equal: in floats, 0.1 + 0.2 isn't 0.3.
    """
    grouped = rewards.double().view(-1, group_size)                         # (P, G)
    largest = grouped.nan_to_num(nan=0.0).abs().amax(dim=1)
    return spread(grouped) > 1e-9 * largest


def spread(grouped: Tensor) -> Tensor:
    """(P, G) rewards -> (P,), the highest minus the lowest of each group, without NaN; -inf if all
    are NaN.
    """
    highest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    return highest - grouped.nan_to_num(nan=torch.inf).amin(dim=1)


def worth_asking_again(rewards: Tensor, group_size: int) -> Tensor:
    """Which problems are worth asking again: (B,) rewards -> (P,) bool, True if the rewards of a
    group differ by more than half as much as those of the whole batch.

    With rewards of 0 and 1, these are the informative groups. With real-valued rewards (a length
    penalty, say) nearly every group is informative, and this leaves out those that differ little.
    """
    return informative_groups(rewards, group_size) & (
        spread(rewards.double().view(-1, group_size)) > spread(rewards.double()[None]) / 2)


def group_advantages(rewards: Tensor, group_size: int, scale: str,
                     shaping: Tensor | None = None) -> Tensor:
    """How much better each answer is than its group: (B,) rewards -> (B,) fp32 advantages.

    An advantage is the reward minus its group's mean. scale "group" divides it by the group's
    standard deviation (GRPO, DAPO); "none" doesn't (Dr. GRPO: 2503.20783, section 3.2). If a
    group's rewards are all equal, its advantages are 0. An unscorable row (NaN) is left out of the
    mean and gets an advantage of 0.

    shaping (B,) is an extra reward, for format or length say. Its group mean is subtracted too, but
    it is never divided, and it counts only in groups whose rewards differ.
    """
    assert scale in SCALES, f"{scale!r} is not one of {SCALES}"
    # float64, because fp32 can't tell a reward of 20,000,001 from one of 20,000,000.
    grouped = rewards.double().view(-1, group_size)                         # (P, G)
    scorable = ~grouped.isnan()
    mean = grouped.nanmean(dim=1, keepdim=True)
    centered = torch.where(scorable, grouped - mean, 0.0)
    if scale == "group":
        # Dividing by n - 1 and adding 1e-4 both follow the authors' code. n counts only scorable
        # answers, so it can be less than G.
        n = scorable.sum(dim=1, keepdim=True)
        variance = centered.square().sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + 1e-4)
    if shaping is not None:
        # As part of the reward it would be divided too. Among eight wrong answers, one penalized by
        # 0.05 for its length would then get an advantage of -2.5.
        shaping = torch.where(scorable, shaping.view(-1, group_size), torch.nan)
        centered = centered + (shaping - shaping.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    # Exactly 0, so that the learner skips these rows. The formula isn't exact: the mean of eight
    # equal numbers can be off by a rounding error, which would be divided by 0 + 1e-4.
    informative = informative_groups(rewards, group_size)
    return torch.where(informative[:, None], centered, 0.0).view(-1).float()


# -----------------------------------------------------------------------------
# Which tokens are in the loss, and how much each counts

def loss_mask(sampled: Tensor, rewards: Tensor, finished: Tensor, mask_overlong: bool) -> Tensor:
    """Which tokens are in the loss: sampled (B, L), rewards and finished (B,) -> (B, L) bool.

    sampled: the tokens that the policy wrote (Rollouts.sampled()). A row drops out of the loss if
    it's unscorable (NaN) or, with mask_overlong, truncated (finished is False), as in the authors'
    code and DAPO's overlong filtering (2503.14476, section 3.4). A truncated row's reward still
    counts in its group's mean.
    """
    rows = ~rewards.isnan()
    if mask_overlong:
        rows = rows & finished
    return sampled & rows[:, None]


def minibatches(mask: Tensor, group_size: int, count: int) -> list[Tensor]:
    """Splits a batch into minibatches, one per update: loss_mask (B, L) -> `count` disjoint masks
    (B, L).

    Groups stay whole and in order. Those with a token in the loss are divided evenly, give or take
    one; the others are in no minibatch. If there are fewer than `count`, some minibatches are
    empty, and the learner skips them.
    """
    groups = mask.any(dim=1).view(-1, group_size).any(dim=1)                # (P,)
    # (P,): each group's minibatch, 0..count - 1. For a group without a token in the loss the number
    # doesn't matter, since `mask` drops it.
    number = (groups.cumsum(0) - 1) * count // groups.sum().clamp(min=1)
    row_number = number.repeat_interleave(group_size)[:, None]              # (B, 1)
    return [mask & (row_number == u) for u in range(count)]


def loss_weights(mask: Tensor, loss: Loss, max_new_tokens: int) -> Tensor:
    """How much each token counts in the loss of an update: (B, L) fp32, 0 outside the mask.

    mask (B, L) bool covers the update on all ranks, since nothing else divides its loss. Lengths
    and the divisor count only tokens in the loss, so tool output doesn't dilute the answer's
    tokens. Rows without such tokens aren't counted.
    """
    lengths = mask.sum(dim=1)                                               # (B,)
    rows = (lengths > 0).sum()
    tokens = lengths.sum()
    divisor = loss.divisor(rows, tokens, lengths, max_new_tokens)           # () or (B,)
    return torch.where(mask, (1.0 / divisor.float()).view(-1, 1), 0.0)


# -----------------------------------------------------------------------------
# The loss

class LogProbs(NamedTuple):
    """Log-probs of the same T tokens under each policy (see top of file), (T,) fp32 each."""
    policy: Tensor                               # differentiable
    rollout: Tensor
    old: Tensor
    reference: Tensor | None = None              # the model without its adapter, for the KL term


def limited_exp(log_ratio: Tensor) -> Tensor:
    """exp() of log-ratios clamped to +-LOG_RATIO_LIMIT, with no gradient beyond."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """Estimates KL(p || q) per token from log_ratio = log q - log p on samples of p; >= 0.

    Schulman's k3 (joschu.net/blog/kl-approx.html). As a loss, with p = policy and q = reference, it
    pulls the policy towards the reference, as in GRPO; the simpler k1 = -log_ratio would have a
    mean gradient of 0.
    """
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() - 1 - log_ratio


def row_means(values: Tensor, row_of_token: Tensor) -> Tensor:
    """values (T,) -> (T,): every token gets its row's mean."""
    lengths = row_of_token.bincount()
    total = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    # Not index_add: on a GPU its order varies, and a resumed run would get different bits.
    total = total.index_put((row_of_token,), values, accumulate=True)
    return (total / lengths.clamp(min=1))[row_of_token]


def policy_loss(logprobs: LogProbs, advantages: Tensor, row_of_token: Tensor,
                loss_weights: Tensor, loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, differentiable in logprobs.policy, and sums for summarize().

    advantages, row_of_token (int64) and loss_weights are (T,), for the T tokens in the loss only.
    Losses and sums of micro-batches add up to those of the update (add_sums).
    """
    policy, rollout, old, reference = logprobs
    tensors = advantages, row_of_token, loss_weights, *logprobs
    shapes = [tuple(t.shape) for t in tensors if t is not None]
    assert len(set(shapes)) == 1, f"not one number per token: {shapes}"
    assert reference is not None or not loss.needs_reference, f"{loss.kl_beta=} needs a reference"
    assert policy.dtype in (torch.float32, torch.float64), \
        f"{policy.dtype}: differences of log-probs need fp32"
    correction = CORRECTIONS[loss.correction]
    proximal = rollout if correction.proximal == "rollout" else old

    log_ratio = policy - proximal                                           # (T,)
    log_weight = proximal - rollout                                         # (T,)
    if loss.sequence_level:
        # The value is the row's ratio, the gradient goes through this token's log-prob only. The
        # mean's 1 / length is already in the loss weights (2507.18071, section 4.3:
        # GSPO-token).
        row_mean = row_means(log_ratio.detach(), row_of_token)
        log_ratio = row_mean + policy - policy.detach()
        log_weight = row_means(log_weight, row_of_token)
    ratio = limited_exp(log_ratio)
    importance_weight = (1.0 if correction.cap is None
                         else limited_exp(log_weight).clamp(max=correction.cap))
    # The importance weight is positive, so it can go inside min().
    weighted_advantage = advantages * importance_weight                     # (T,)

    #                            ratio < 1 - clip_low    in between    ratio > 1 + clip_high
    #     advantage > 0          gradient                gradient      clipped: likely enough
    #     advantage < 0          clipped: rare enough    gradient      gradient
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    per_token = -torch.min(ratio * weighted_advantage, clipped * weighted_advantage)

    sums = rollout_sums(policy.detach() - rollout)
    clipped_low = (weighted_advantage < 0) & (ratio < 1 - loss.clip_low)
    clipped_high = (weighted_advantage > 0) & (ratio > 1 + loss.clip_high)
    sums["clip_ratio_low"] = clipped_low.double().sum()
    sums["clip_ratio_high"] = clipped_high.double().sum()
    if reference is not None:
        # This has no importance weight, so noisy rollouts bias it slightly.
        kl = k3(reference - policy)
        per_token = per_token + loss.kl_beta * kl
        sums["kl"] = kl.detach().double().sum()
    return (loss_weights * per_token).sum(), sums


# -----------------------------------------------------------------------------
# Metrics: sums over the trained tokens of an update, then means

def rollout_sums(d: Tensor) -> dict[str, Tensor]:
    """How far the learner is from the rollout: d (T,) = log policy - log rollout -> float64 sums
    over the tokens, except rollout_is_max, a maximum. docs/metrics.md defines them.

    The ratio here, exp(d) = policy / rollout, is neither clipped nor truncated.
    """
    d = d.double()                               # keeps counts exact
    ratio = limited_exp(d)
    statistics = {
        "tokens": torch.ones_like(d),
        "rollout_logp_diff": d.abs(),
        "rollout_kl": k3(d),                     # an estimate of KL(rollout || learner)
        "rollout_is_max": torch.cat([ratio, ratio.new_zeros(1)]).amax(),     # 0 without tokens
        "rollout_is": ratio,                     # summarize() turns both into rollout_is_ess
        "rollout_is_squared": ratio.square(),
    }
    return {name: values.double().sum() for name, values in statistics.items()}


def add_sums(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the sums of two micro-batches, or of two ranks; a may be {}, the empty sum."""
    if not a:
        return b
    return {name: a[name] + b[name] for name in a} | {
        "rollout_is_max": torch.maximum(a["rollout_is_max"], b["rollout_is_max"])}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """The sums of an update -> means over its tokens, for the log; {} if it trained no row.

    rollout_is_ess, the effective sample size, is (sum of ratio)^2 / (T * sum of ratio^2).
    """
    if not sums or sums["tokens"] == 0:
        return {}
    sums = {name: value.item() for name, value in sums.items()}
    tokens = sums.pop("tokens")
    ratio = sums.pop("rollout_is")
    ess = ratio**2 / (tokens * sums.pop("rollout_is_squared"))
    means = {name: value / tokens for name, value in sums.items()}
    return means | {"rollout_is_max": sums["rollout_is_max"], "rollout_is_ess": ess}
