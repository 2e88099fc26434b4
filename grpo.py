"""
The learning rule: from the rewards of a group of answers to the loss of every token.

    group_advantages    was an answer better or worse than the others to the same problem?
    token_weights       what share of the whole step's loss is one token of that answer?
    policy_loss         both, with the token's log-probs -> the loss that is differentiated

GRPO (2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783) and GSPO (2507.18071) differ in their
divisor, their clip and whether the ratio belongs to a token or to a row: four rows of LOSSES.

    P prompts, G samples each: B = P * G rows; rows [p * G, (p + 1) * G) answer prompt p
    T completion tokens of all rows laid end to end; row (T,) says which row a token belongs to

The loss, with advantage_t and weight_t those of the token's row:

    loss = sum_t weight_t * (kl_beta * k3_t  -  w_t * min(rho_t * advantage_t,
                                        clip(rho_t, 1 - clip_low, 1 + clip_high) * advantage_t))

Three policies, two ratios. PPO's one ratio, policy / sampler, does two jobs: it corrects for the
answers having been drawn by another policy, and its clip bounds how far one batch may move the
policy. Here the sampler differs from the learner even before the first update (AQN's noise, other
rounding), and a clip around it would take the gradient from tokens that nothing has moved yet. So
the jobs are parted (decoupled PPO: Hilton et al. 2110.00641):

     sampler  ----------- w ---------->  proximal  ----------- rho ---------->  policy
     drew the answer, with noise         the learner, without noise, at         the learner in this
     on its norms; its log-probs         its own first pass over the row,       pass: the only one
     were written down then              kept for the later passes              with a gradient

                                  what it corrects                        pass 1   pass 2 and later
     w   = proximal / sampler     noise and rounding; also what earlier   any      as in pass 1
                                  disjoint updates of the step moved
     rho = policy / proximal      updates since the row's first pass      1        moves; is clipped

w is at most IMPORTANCE_CAP (truncated importance sampling, TIS: Yao et al. 2025). So noise costs no
token its gradient, it only changes the token's weight. The proximal policy costs no forward pass:
pass 1 computes it anyway, and one fp32 a token is kept. (verl takes it before the first update of
a step instead, which is one more forward pass over the batch; then rho and not w covers what
earlier disjoint updates moved.)

Divisors are those of the whole optimizer step, known before the first backward pass. So gradients
are just summed, over micro-batches and over ranks, and no way of cutting up the rows changes them.
Rows outside the loss mask (cut off at the length limit, or unscorable) count in neither numerator
nor divisor. Groups of equal rewards add no gradient and still count in the divisor, as in the
release (NVlabs/QeRL).

Not here: a critic, an entropy bonus (neither is in the paper), the overlong penalty (rewards.py),
DAPO's dynamic sampling: to sample until N groups can teach costs what more prompts per step cost.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Bound of w. Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
# Training" (fengyao.notion.site/off-policy-rl), truncate it at a small constant; 2 is the usual
# one, also where the sampler is quantized (verl, ms-swift).
IMPORTANCE_CAP = 2.0
LOG_RATIO_LIMIT = 20.0                           # of every log-ratio: its exp stays finite in fp32


@dataclass(frozen=True)
class Loss:
    """What tells one loss from another: a divisor, a clip, and how it corrects for the sampler.

    divisor(rows, tokens, lengths, limit): how many rows and tokens the step's loss has, the length
    of each row (B,), the length limit -> one number, or one for each row (B,).

    correction, for the sampler being another policy than the learner:
        "truncate"  w = min(proximal / sampler, IMPORTANCE_CAP)
        "ppo"       the sampler takes the proximal policy's place, so w = 1 and the clip acts on
                    noise and rounding too (QeRL, Eq. 3, where the old policy is the noisy one)
        "off"       w = 1: no correction, and a biased gradient, as NVlabs/QeRL
    """
    divisor: Callable
    clip_low: float = 0.2                        # QeRL, Table 4, for every loss; clip_high above
    clip_high: float = 0.28                      # clip_low is DAPO's Clip-Higher (section 3.1)
    sequence_level: bool = False                 # rho and w: one a row, exp of the mean of the logs
    correction: str = "truncate"
    kl_beta: float = 0.0                         # weight of k3 towards the base without adapter


LOSSES = {
    # Every row has the same say, however long it is (2402.03300, Eq. 3).
    "grpo": Loss(lambda rows, tokens, lengths, limit: rows * lengths),
    # Every token of the step has the same say: section 3.3, token-level loss.
    "dapo": Loss(lambda rows, tokens, lengths, limit: tokens),
    # A constant in the place of the length: to divide by it favours long wrong answers (3.1).
    # Dr. GRPO also divides by no standard deviation: --advantage-scale none.
    "dr_grpo": Loss(lambda rows, tokens, lengths, limit: rows * limit),
    # One ratio a row, and the narrow clip of section 5.1. With correction="ppo" AQN's noise alone
    # moves that ratio beyond this clip.
    "gspo": Loss(lambda rows, tokens, lengths, limit: rows * lengths, 3e-4, 4e-4,
                 sequence_level=True),
}
SCALES = ("group", "none")
CORRECTIONS = ("truncate", "ppo", "off")


# -----------------------------------------------------------------------------
# Rewards -> advantages and weights

def informative_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Which groups can teach: (B,) rewards -> (P,) bool, where a group's rewards differ.

    Unscorable rows (NaN) do not count; a group that has no other row is not informative.
    """
    grouped = rewards.view(-1, group_size)                                  # (P, G)
    highest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return highest > lowest                      # of NaN alone: -inf > inf, which is False


def group_advantages(rewards: Tensor, group_size: int, scale: str = "group",
                     shaping: Tensor | None = None) -> Tensor:
    """How much better than its group each answer was: (B,) rewards -> (B,) fp32 advantages.

    The distance from the group's mean; scale "group" divides it by the group's standard deviation
    (GRPO, DAPO), "none" does not (Dr. GRPO, section 3.2). A reward of NaN means unscorable: the row
    is outside every mean and its advantage is 0.

    shaping (B,) is what else is wanted of an answer (format, length). Its distance from the group's
    mean is added undivided, and only in groups whose rewards differ. As part of the reward it
    would be blown up: seven wrong answers at 0 and one at -0.05, divided by their tiny standard
    deviation, would get +0.35 and -2.5, as much as right and wrong ones get.
    """
    assert scale in SCALES, f"{scale!r} is not one of {SCALES}"
    grouped = rewards.float().view(-1, group_size)                          # (P, G)
    scorable = ~grouped.isnan()
    mean = grouped.nanmean(dim=1, keepdim=True)
    centred = torch.where(scorable, grouped - mean, 0.0)
    if scale == "group":
        # The sample's deviation (n - 1) and 1e-4, as NVlabs/QeRL; n may be below G here.
        n = scorable.sum(dim=1, keepdim=True)
        variance = centred.square().sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-4)
    if shaping is not None:
        shaping = torch.where(scorable, shaping.view(-1, group_size), torch.nan)
        centred = centred + (shaping - shaping.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    # Groups of equal rewards get exactly 0, and are found by comparing the rewards themselves. The
    # formula alone would not do it: the fp32 mean of eight 0.1 need not be 0.1, and that rounding,
    # divided by 0 + 1e-4, would be learned from. Exactly 0 also lets the learner leave such rows
    # out of its forward and backward passes.
    informative = informative_groups(rewards, group_size)
    return torch.where(informative[:, None], centred, 0.0).view(-1)


def loss_mask(rewards: Tensor, finished: Tensor, mask_truncated: bool) -> Tensor:
    """Which rows enter the loss: rewards (B,), finished (B,) bool -> (B,) bool.

    Unscorable rows never do. mask_truncated also leaves out rows that hit the length limit
    (finished is False), as the release does and as DAPO's overlong filtering (section 3.4). A row
    that is left out here still counts in its group's mean reward.
    """
    scorable = ~rewards.isnan()
    return scorable & finished if mask_truncated else scorable


def minibatches(mask: Tensor, group_size: int, count: int) -> list[Tensor]:
    """Cuts a batch for `count` optimizer steps: loss_mask (B,) -> `count` disjoint parts of it.

    Groups stay whole and in order. Groups without a row in the loss do not count, so that each step
    gets the same number of the others, give or take one.
    """
    groups = mask.view(-1, group_size).any(dim=1)                           # (P,)
    part = (groups.cumsum(0) - 1) * count // groups.sum().clamp(min=1)      # (P,): 0..count - 1
    return [mask & (part == u).repeat_interleave(group_size) for u in range(count)]


def token_weights(lengths: Tensor, mask: Tensor, loss: Loss, max_new_tokens: int) -> Tensor:
    """What one token of each row counts for in the loss: (B,) fp32, 0 for rows outside the mask.

    lengths (B,) in tokens and mask (B,) bool are those of the whole optimizer step, all ranks
    together: its loss is divided once, here.
    """
    assert (lengths[mask] > 0).all(), "a row has no tokens; even '' has its end token"
    rows = mask.sum().clamp(min=1)               # at least 1: without any row all weights are 0,
    tokens = lengths[mask].sum().clamp(min=1)    # not 0 / 0
    divisor = loss.divisor(rows, tokens, lengths, max_new_tokens)
    return torch.where(mask, 1.0 / divisor.float(), 0.0)


# -----------------------------------------------------------------------------
# The loss

class LogProbs(NamedTuple):
    """Log-probs of the same T tokens under each policy (see the top), (T,) fp32 each."""
    policy: Tensor                               # differentiable
    sampler: Tensor
    proximal: Tensor
    reference: Tensor | None = None              # the base without adapter, for kl_beta


def k3(log_ratio: Tensor) -> Tensor:
    """Estimates KL(p || q) token by token from log_ratio = log q - log p, on samples of p; >= 0.

    Schulman's k3 (joschu.net/blog/kl-approx.html). As a loss with p = policy and q = reference, its
    gradient pulls the policy towards the reference; the gradient of the plainer k1 = -log_ratio
    would be zero on average.
    """
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() - 1 - log_ratio


def importance(log_w: Tensor, loss: Loss) -> Tensor:
    """log(proximal / sampler) (T,) -> w (T,), the factor that loss.correction makes of it."""
    if loss.correction != "truncate":
        return torch.ones_like(log_w)
    return log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=IMPORTANCE_CAP)


def policy_loss(logprobs: LogProbs, advantages: Tensor, row: Tensor, weights: Tensor,
                loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, differentiable in logprobs.policy, and sums for summarize().

    The micro-batch has whole rows: advantages and weights (b,) are theirs, row (T,) int64 says
    which of them a token belongs to. Losses and sums of several micro-batches add up (add_sums).
    """
    assert loss.correction in CORRECTIONS, f"{loss.correction!r} is not one of {CORRECTIONS}"
    policy, sampler, proximal, reference = logprobs
    assert reference is not None or loss.kl_beta == 0, f"{loss.kl_beta=} needs a reference"
    assert all(t is None or t.shape == row.shape for t in logprobs), [row.shape, *logprobs]
    assert policy.dtype in (torch.float32, torch.float64), \
        f"{policy.dtype}: differences of log-probs need fp32"
    fixed = policy.detach()                      # the policy's log-probs as plain numbers
    sums = mismatch_sums(fixed - sampler)
    if loss.correction == "ppo":
        proximal = sampler

    # 1) The two ratios, as plain numbers: no gradient flows through either.
    log_rho = fixed - proximal                                              # (T,)
    log_w = proximal - sampler                                              # (T,)
    if loss.sequence_level:
        log_rho = row_means(log_rho, row, len(weights))
        log_w = row_means(log_w, row, len(weights))
    rho = log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    w = importance(log_w, loss)                                             # (T,)
    # w is positive, so it can go into the advantage before min() and clip as well as after them.
    advantage = advantages[row] * w                                         # (T,)

    # 2) The clip. Of min(rho * advantage, clip(rho) * advantage) the second is the smaller one
    # where the policy has gone far enough the way that the advantage asks for: it already gives a
    # good token more than 1 + clip_high times its proximal probability, or a bad one less than
    # 1 - clip_low times. The second has no gradient: such a token is left alone.
    clip_low = (advantage < 0) & (rho < 1 - loss.clip_low)
    clip_high = (advantage > 0) & (rho > 1 + loss.clip_high)

    # 3) Why multiply by (policy - fixed).exp()? Its value is exp(0) = 1, and its gradient is that
    # of `policy`, dlogp. So the surrogate's value is advantage * rho, and its gradient is
    # advantage * rho * dlogp: just what d(advantage * rho) is for the ratio of one token, though
    # rho here is a plain number. It holds for the ratio of a whole row too (GSPO-token,
    # 2507.18071, section 4.3): there d(advantage * rho) is the sum over the row's tokens of
    # advantage * rho / length * dlogp, and the 1 / length is in their weights.
    surrogate = advantage * rho * (policy - fixed).exp()
    clipped = advantage * rho.clamp(1 - loss.clip_low, 1 + loss.clip_high)  # no gradient
    per_token = -torch.where(clip_low | clip_high, clipped, surrogate)
    sums["clip_low"] = clip_low.sum().double()
    sums["clip_high"] = clip_high.sum().double()
    if reference is not None:
        kl = k3(reference - policy)
        per_token = per_token + loss.kl_beta * kl
        sums["kl"] = kl.detach().sum().double()
    return (weights[row] * per_token).sum(), sums


def row_means(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """values (T,) -> (T,): every token gets the mean over the tokens of its row."""
    total = torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row, values)
    return (total / row.bincount(minlength=rows).clamp(min=1))[row]


# -----------------------------------------------------------------------------
# Metrics: sums over the trained tokens of a step, then means

def mismatch_sums(d: Tensor) -> dict[str, Tensor]:
    """How far the learner is from the sampler: d (T,), log-prob now - the sampler's -> sums.

    Each is a sum over the tokens, ratio_max their maximum. They are float64, so that counts stay
    exact however many are added. exp(d) = policy / sampler = rho * w (with w before its bound):
    neither of the loss's two ratios alone.
    """
    d = d.double()
    ratio = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    per_token = {
        "tokens": torch.ones_like(d),
        "mismatch_abs": d.abs(),
        "mismatch_within": d.abs() <= 0.01,
        "mismatch_k3": k3(d),                    # an estimate of KL(sampler || learner)
        "ratio_outside": (ratio < 0.9) | (ratio > 1.1),
        "ratio_max": torch.cat([ratio, ratio.new_zeros(1)]).amax(),
        "ratio": ratio,                          # these two become the effective sample size
        "ratio_squared": ratio.square(),
    }
    return {name: values.double().sum() for name, values in per_token.items()}


def add_sums(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the sums of two micro-batches, or of two ranks; a may be {}, the sums of nothing."""
    if not a:
        return b
    return {name: a[name] + b[name] for name in a} | {
        "ratio_max": torch.maximum(a["ratio_max"], b["ratio_max"])}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """The sums of a whole update -> means over its tokens, for the log; {} if it trained no row.

    ess = (sum r)^2 / (T * sum r^2), the effective sample size as a share of T: 1 where sampler and
    learner agree. At the first update of a rollout these numbers measure the sampler's noise and
    rounding; at later ones the policy has moved as well.
    """
    if not sums or sums["tokens"] == 0:
        return {}
    sums = {name: value.item() for name, value in sums.items()}
    tokens = sums.pop("tokens")
    ratio = sums.pop("ratio")
    ess = ratio**2 / (tokens * sums.pop("ratio_squared"))
    means = {name: value / tokens for name, value in sums.items()}
    return means | {"ratio_max": sums["ratio_max"], "ess": ess}
