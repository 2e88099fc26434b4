"""
The learning rule: rewards -> advantages -> token weights -> loss, for GRPO, DAPO, Dr. GRPO, GSPO.

    P prompts, G samples each: B = P * G rows; rows [p * G, (p + 1) * G) answer prompt p
    T completion tokens of all rows laid end to end; row (T,) says which row a token belongs to

    loss = sum_t weight[row_t] * (-min(r_t A, clip(r_t, 1 - low, 1 + high) A) + beta * k3_t)
    A    = advantage[row_t],    r_t = exp(logprobs_t - old_logprobs_t)

The old policy is what the sampler wrote down, noise and temperature included: the ratio holds all
that separates the two policies, and there is no second forward pass.

Divisors are those of the whole optimizer step, known before the first backward. So gradients are
summed, over micro-batches and ranks alike, and no split of the rows changes them. Rows that are not
live (cut at the length limit, unscorable) leave numerator and divisor. Groups of equal rewards stay
in the divisor though they add no gradient, as in the release; dynamic sampling takes them out.

Not here: a critic, an entropy bonus (neither in the paper), the overlong penalty (rewards.py).
"""
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch


@dataclass(frozen=True)
class Loss:
    """What a token weighs, and what bounds the ratio r.

    correction bounds r where the clip does not (A < 0, r > 1 + high). "truncate": the gradient
    beyond the cap is cap * A * dlogp, alive but bounded. "mask": tokens with r outside
    [1 / cap, cap] add nothing. "off": plain PPO.
    """
    divisor: Callable                            # of (rows, tokens, lengths, limit)
    clip_low: float = 0.2                        # Table 4, for every loss
    clip_high: float = 0.28
    of_rows: bool = False                        # r is one number a row: the mean of its logs
    correction: str = "truncate"
    cap: float = 2.0                             # C of the correction
    kl_beta: float = 0.0                         # weight of k3 to the base without adapter


LOSSES = {
    "grpo": Loss(lambda rows, tokens, lengths, limit: rows * lengths),
    "dapo": Loss(lambda rows, tokens, lengths, limit: tokens),
    "dr_grpo": Loss(lambda rows, tokens, lengths, limit: rows * limit),
    # The GSPO paper's clip, narrower than the noise's effect on r: widen it with AQN on.
    "gspo": Loss(lambda rows, tokens, lengths, limit: rows * lengths, 3e-4, 4e-4, of_rows=True),
}
SCALES = ("group", "batch", "none")
CORRECTIONS = ("truncate", "mask", "off")


# -------------------------------------------------------------------------------------------------
# Rewards -> advantages and weights

def keep_informative(rewards, group_size):
    """(B,) rewards -> (P,) bool: groups whose scorable rewards differ; only these can teach."""
    grouped = rewards.view(-1, group_size)                                  # (P, G)
    top = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    return top > grouped.nan_to_num(nan=torch.inf).amin(dim=1)              # of NaN: -inf > inf


def group_advantages(rewards, group_size, scale="group"):
    """(B,) rewards -> (B,) fp32 advantages: distance from the group's mean, over a deviation.

    scale: of the group, of all B rewards ("batch"), or 1 ("none", Dr. GRPO). NaN means unscorable:
    outside every mean, advantage 0. Equal rewards get exactly 0: asked of the rewards themselves,
    since the fp32 mean of eight 0.1 need not be 0.1.
    """
    assert scale in SCALES, f"{scale!r} is not one of {SCALES}"
    grouped = rewards.float().view(-1, group_size)                          # (P, G)
    scorable = ~grouped.isnan()
    mean = grouped.nanmean(dim=1, keepdim=True)
    centred = torch.where(scorable, grouped - mean, 0.0)
    if scale == "group":                         # sample std (n - 1) and 1e-4: as NVlabs/QeRL
        n = scorable.sum(dim=1, keepdim=True)
        variance = centred.square().sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-4)
    elif scale == "batch" and scorable.sum() > 1:
        centred = centred / (grouped[scorable].std() + 1e-4)
    informative = keep_informative(rewards, group_size)
    return torch.where(informative[:, None], centred, 0.0).view(-1)


def live_rows(rewards, finished, group_size, mask_cut=True, dynamic=False):
    """(B,) bool: the rows that enter the loss. Cut rows still count in their group's mean.

    mask_cut drops rows that hit the length limit (finished False), as the release does; dynamic
    drops groups with equal rewards.
    """
    live = ~rewards.isnan()
    if mask_cut:
        live = live & finished
    if dynamic:
        live = live & keep_informative(rewards, group_size).repeat_interleave(group_size)
    return live


def token_weights(lengths, live, loss, max_new_tokens):
    """lengths, live (B,) of the whole step -> (B,) fp32: what a token of row b weighs."""
    assert (lengths[live] > 0).all(), "a live row has no tokens; even '' has its end token"
    rows = live.sum().clamp(min=1)                                          # no live row: all 0
    tokens = lengths[live].sum().clamp(min=1)
    divisor = loss.divisor(rows, tokens, lengths, max_new_tokens)
    return torch.where(live, 1.0 / torch.as_tensor(divisor).clamp(min=1).float(), 0.0)


# -------------------------------------------------------------------------------------------------
# The loss

def k3(log_ratio):
    """Schulman's estimate of KL(p || q) from log_ratio = log q - log p on samples of p: >= 0.

    As a loss with p = policy, its gradient is the pull of KL(q || p); k1 = -log_ratio would have
    none on average.
    """
    log_ratio = log_ratio.clamp(-20, 20)                                    # one odd token: no inf
    return log_ratio.exp() - 1 - log_ratio


def policy_loss(logprobs, old_logprobs, advantages, row, weights, loss, ref_logprobs=None):
    """-> loss of a micro-batch of whole rows, sums of METRICS; both to be added to other ones'.

    logprobs, old_logprobs, ref_logprobs (T,) fp32 of policy, sampler, adapter-off policy; row (T,)
    int64 indexes advantages and weights (B,).
    """
    assert loss.correction in CORRECTIONS and loss.cap >= 1, (loss.correction, loss.cap)
    assert ref_logprobs is not None or loss.kl_beta == 0, f"{loss.kl_beta=} needs a reference"
    assert logprobs.shape == old_logprobs.shape == row.shape, \
        (logprobs.shape, old_logprobs.shape, row.shape)
    assert logprobs.dtype in (torch.float32, torch.float64), \
        f"{logprobs.dtype}: differences of log-probs need fp32"
    A = advantages[row]                                                     # (T,)
    gap = logprobs.detach() - old_logprobs                                  # (T,) log r
    sums = mismatch_sums(gap)

    if loss.of_rows:
        total = torch.zeros_like(weights, dtype=gap.dtype).index_add(0, row, gap)
        gap = (total / row.bincount(minlength=len(weights)).clamp(min=1))[row]
    ratio = gap.clamp(-20, 20).exp()
    if loss.correction == "mask":
        A = torch.where((ratio <= loss.cap) & (ratio >= 1 / loss.cap), A, 0.0)
    clip_low = (A < 0) & (ratio < 1 - loss.clip_low)
    clip_high = (A > 0) & (ratio > 1 + loss.clip_high)
    coef = ratio.clamp(max=loss.cap) if loss.correction == "truncate" else ratio
    # The last factor is 1 with gradient dlogp: the gradient is coef * A * dlogp. For gspo too:
    # d(A * r) is the sum over tokens of A * r / length * dlogp, and 1 / length is in the weight.
    surrogate = A * coef * (logprobs - logprobs.detach()).exp()
    clipped = A * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)        # no gradient
    per_token = -torch.where(clip_low | clip_high, clipped, surrogate)
    sums["clip_low"] = clip_low.sum().double()
    sums["clip_high"] = clip_high.sum().double()
    if ref_logprobs is not None:
        kl = k3(ref_logprobs - logprobs)
        per_token = per_token + loss.kl_beta * kl
        sums["kl"] = kl.detach().sum().double()
    return (weights[row] * per_token).sum(), sums


# -------------------------------------------------------------------------------------------------
# Metrics: sums over the trained tokens of a step, then means

class Metric(NamedTuple):
    """of_token(d, r): d = log r = learner's log-prob - sampler's (T,), r the ratio (T,)."""
    of_token: Callable
    largest: bool = False                        # of all tokens, instead of their sum


METRICS = {
    "mismatch_abs": Metric(lambda d, r: d.abs()),
    "mismatch_within": Metric(lambda d, r: d.abs() <= 0.01),
    "mismatch_k3": Metric(lambda d, r: k3(d)),               # an estimate of KL(sampler || learner)
    "ratio_outside": Metric(lambda d, r: (r < 0.9) | (r > 1.1)),
    "ratio_max": Metric(lambda d, r: r, largest=True),
    "ratio": Metric(lambda d, r: r),                         # these two become ess
    "ratio_squared": Metric(lambda d, r: r.square()),
}


def mismatch_sums(gap):
    """gap (T,) -> name -> sum, float64: counts stay exact, and a step adds many."""
    d = gap.detach().double()
    r = d.clamp(-20, 20).exp()
    sums = {"tokens": torch.ones_like(d).sum()}
    for name, metric in METRICS.items():
        values = metric.of_token(d, r).double()
        sums[name] = values.max() if metric.largest and len(d) else values.sum()
    return sums


def add_sums(a, b):
    """Sums of two micro-batches, or ranks; a may be {}."""
    if not a:
        return b
    largest = [name for name, metric in METRICS.items() if metric.largest]
    return {name: torch.maximum(a[name], b[name]) if name in largest else a[name] + b[name]
            for name in a}


def summarize(sums):
    """Added sums -> means, ess = (sum r)^2 / (T sum r^2); {} if no row was trained on.

    On the first update of a rollout they measure the sampler's noise and rounding; on later ones
    the policy has moved as well.
    """
    if not sums or sums["tokens"] == 0:
        return {}
    sums = {name: value.item() for name, value in sums.items()}
    tokens = sums.pop("tokens")
    ratio = sums.pop("ratio")
    ess = ratio**2 / (tokens * sums.pop("ratio_squared"))
    means = {name: value if name in METRICS and METRICS[name].largest else value / tokens
             for name, value in sums.items()}
    return means | {"ess": ess}
