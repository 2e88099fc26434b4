"""
The learning rule: rewards -> advantages -> token weights -> loss, for GRPO, DAPO, Dr. GRPO, GSPO.

    P prompts, G samples each: B = P * G rows; rows [p * G, (p + 1) * G) answer prompt p
    T completion tokens of all rows laid end to end; row (T,) says which row a token belongs to

    loss  = sum_t weight[row_t] * (-w_t min(rho_t A, clip(rho_t, 1 - low, 1 + high) A) + beta k3_t)
    A     = advantage[row_t]
    rho_t = policy / proximal policy             the clip holds the policy near the proximal one
    w_t   = min(proximal policy / sampler, C)    truncated importance sampling

The sampler's log-probs are those it wrote down, noise and temperature included. The proximal policy
is the learner at its own first pass over a row (decoupled PPO: Hilton et al. 2110.00641; TIS: Yao
et al. 2025): noise and rounding then cost no token its gradient, only its weight. No second forward
pass is needed: at the first pass rho = 1, later ones read one stored fp32 a token. So where a batch
is split into disjoint updates, w covers what earlier ones moved and the clip never acts; verl takes
its proximal policy before the first update instead, for one more forward pass.

Divisors are those of the whole optimizer step, known before the first backward. So gradients are
summed, over micro-batches and ranks alike, and no split of the rows changes them. Rows outside the
loss mask (cut at the limit, unscorable) leave numerator and divisor. Groups of equal rewards stay
in the divisor though they add no gradient, as in the release (NVlabs/QeRL).

Not here: a critic, an entropy bonus (neither in the paper), the overlong penalty (rewards.py),
DAPO's dynamic sampling: sampling until N groups teach costs what larger --prompts-per-step do.
"""
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch


@dataclass(frozen=True)
class Loss:
    """A loss: its divisor, its clip, and how it corrects for the sampler being another policy.

    correction: "truncate": w is at most the cap. "mask": tokens with w outside [1 / cap, cap] add
    nothing. "off": w = 1, biased, as NVlabs/QeRL. "ppo": the sampler is the proximal policy, so
    that w = 1 and the clip acts on noise and rounding too (the paper's Eq. 3).
    """
    divisor: Callable                            # of (rows, tokens, lengths, limit)
    clip_low: float = 0.2                        # Table 4, for every loss
    clip_high: float = 0.28
    sequence_level: bool = False                 # rho, w: one a row, exp of the mean of the logs
    correction: str = "truncate"
    cap: float = 2.0                             # C of the correction
    kl_beta: float = 0.0                         # weight of k3 to the base without adapter


LOSSES = {
    "grpo": Loss(lambda rows, tokens, lengths, limit: rows * lengths),
    "dapo": Loss(lambda rows, tokens, lengths, limit: tokens),
    "dr_grpo": Loss(lambda rows, tokens, lengths, limit: rows * limit),
    # The GSPO paper's clip: with correction="ppo" the noise's effect on rho is beyond it.
    "gspo": Loss(lambda rows, tokens, lengths, limit: rows * lengths, 3e-4, 4e-4,
                 sequence_level=True),
}
SCALES = ("group", "none")
CORRECTIONS = ("truncate", "mask", "off", "ppo")


# -----------------------------------------------------------------------------
# Rewards -> advantages and weights

def informative_groups(rewards, group_size):
    """(B,) rewards -> (P,) bool: groups whose scorable rewards differ; only these can teach."""
    grouped = rewards.view(-1, group_size)                                  # (P, G)
    top = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    return top > grouped.nan_to_num(nan=torch.inf).amin(dim=1)              # of NaN: -inf > inf


def group_advantages(rewards, group_size, scale="group", shaping=None):
    """(B,) rewards -> (B,) fp32 advantages: distance from the group's mean, over its deviation.

    scale: "group" divides by the group's standard deviation, "none" does not (Dr. GRPO). NaN means
    unscorable: outside every mean, advantage 0. Groups of equal rewards get exactly 0 by comparing
    the rewards themselves: the fp32 mean of eight 0.1 need not be 0.1.

    shaping (B,): what else is wanted of a row (format, length). Its distance from the group's mean
    is added undivided, and only where rewards differ: within the sum, one wrong answer 0.05 below
    seven others would get -2.5, and the seven +0.35.
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
    if shaping is not None:
        shaping = torch.where(scorable, shaping.view(-1, group_size), torch.nan)
        centred = centred + (shaping - shaping.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    informative = informative_groups(rewards, group_size)
    return torch.where(informative[:, None], centred, 0.0).view(-1)


def loss_mask(rewards, finished, mask_truncated):
    """(B,) bool: the rows that enter the loss. Cut rows still count in their group's mean.

    mask_truncated drops rows that hit the length limit (finished False), as the release does.
    """
    scorable = ~rewards.isnan()
    return scorable & finished if mask_truncated else scorable


def minibatches(mask, group_size, count):
    """loss_mask (B,) -> `count` masks (B,), disjoint parts of it: whole groups, in order, shared
    out evenly; groups without a row in the loss do not count.
    """
    groups = mask.view(-1, group_size).any(dim=1)
    part = (groups.cumsum(0) - 1) * count // groups.sum().clamp(min=1)
    return [mask & (part == u).repeat_interleave(group_size) for u in range(count)]


def token_weights(lengths, mask, loss, max_new_tokens):
    """lengths, mask (B,) of the whole step -> (B,) fp32: what a token of row b weighs."""
    assert (lengths[mask] > 0).all(), "a row has no tokens; even '' has its end token"
    rows = mask.sum().clamp(min=1)                                          # no row: all weigh 0
    tokens = lengths[mask].sum().clamp(min=1)
    divisor = loss.divisor(rows, tokens, lengths, max_new_tokens)
    return torch.where(mask, 1.0 / divisor.float(), 0.0)


# -----------------------------------------------------------------------------
# The loss

def k3(log_ratio):
    """Schulman's estimate of KL(p || q) from log_ratio = log q - log p on samples of p: >= 0.

    As a loss with p = policy, its gradient is the pull of KL(q || p); k1 = -log_ratio would have
    none on average.
    """
    log_ratio = log_ratio.clamp(-20, 20)                                    # one odd token: no inf
    return log_ratio.exp() - 1 - log_ratio


class LogProbs(NamedTuple):
    """(T,) fp32 each, of the same tokens."""
    policy: torch.Tensor                         # differentiable
    sampler: torch.Tensor
    proximal: torch.Tensor                       # the learner's at its first pass
    reference: torch.Tensor = None               # without adapter, for kl_beta


def importance(log_w, loss):
    """log_w (T,) = log(proximal / sampler) -> w (T,), bounded as loss.correction says."""
    w = log_w.clamp(-20, 20).exp()
    if loss.correction == "truncate":
        return w.clamp(max=loss.cap)
    if loss.correction == "mask":
        return torch.where((w <= loss.cap) & (w >= 1 / loss.cap), w, 0.0)
    return torch.ones_like(w)


def policy_loss(logprobs, advantages, row, weights, loss):
    """-> loss of a micro-batch of whole rows, and sums for summarize(); both add up (add_sums).

    logprobs: LogProbs; row (T,) int64 indexes advantages and weights (B,).
    """
    assert loss.correction in CORRECTIONS and loss.cap >= 1, (loss.correction, loss.cap)
    policy, sampler, proximal, reference = logprobs
    assert reference is not None or loss.kl_beta == 0, f"{loss.kl_beta=} needs a reference"
    assert all(t is None or t.shape == row.shape for t in logprobs), [row.shape, *logprobs]
    assert policy.dtype in (torch.float32, torch.float64), \
        f"{policy.dtype}: differences of log-probs need fp32"
    fixed = policy.detach()
    sums = mismatch_sums(fixed - sampler)
    if loss.correction == "ppo":
        proximal = sampler
    log_rho = fixed - proximal                                              # (T,)
    log_w = proximal - sampler                                              # (T,)
    if loss.sequence_level:
        log_rho = row_means(log_rho, row, len(weights))
        log_w = row_means(log_w, row, len(weights))
    rho = log_rho.clamp(-20, 20).exp()
    A = advantages[row] * importance(log_w, loss)                           # (T,)
    clip_low = (A < 0) & (rho < 1 - loss.clip_low)
    clip_high = (A > 0) & (rho > 1 + loss.clip_high)
    # The last factor is 1 with gradient dlogp: the gradient is A * rho * dlogp. For gspo too:
    # d(A * rho) is the sum over tokens of A * rho / length * dlogp; 1 / length is in the weight.
    surrogate = A * rho * (policy - fixed).exp()
    clipped = A * rho.clamp(1 - loss.clip_low, 1 + loss.clip_high)        # no gradient
    per_token = -torch.where(clip_low | clip_high, clipped, surrogate)
    sums["clip_low"] = clip_low.sum().double()
    sums["clip_high"] = clip_high.sum().double()
    if reference is not None:
        kl = k3(reference - policy)
        per_token = per_token + loss.kl_beta * kl
        sums["kl"] = kl.detach().sum().double()
    return (weights[row] * per_token).sum(), sums


def row_means(values, row, rows):
    """values (T,) -> (T,): each token has the mean of its row."""
    total = torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row, values)
    return (total / row.bincount(minlength=rows).clamp(min=1))[row]


# -----------------------------------------------------------------------------
# Metrics: sums over the trained tokens of a step, then means

def mismatch_sums(d):
    """d (T,) = learner's log-prob - sampler's -> name -> sum of all tokens, of ratio_max the
    largest; float64: counts stay exact, and a step adds many.

    Their ratio is not the rho of the loss, which is policy / proximal policy.
    """
    d = d.double()
    ratio = d.clamp(-20, 20).exp()
    of_tokens = {
        "tokens": torch.ones_like(d),
        "mismatch_abs": d.abs(),
        "mismatch_within": d.abs() <= 0.01,
        "mismatch_k3": k3(d),                    # an estimate of KL(sampler || learner)
        "ratio_outside": (ratio < 0.9) | (ratio > 1.1),
        "ratio_max": torch.cat([ratio, ratio.new_zeros(1)]).amax(),
        "ratio": ratio,                          # these two become ess
        "ratio_squared": ratio.square(),
    }
    return {name: values.double().sum() for name, values in of_tokens.items()}


def add_sums(a, b):
    """Sums of two micro-batches, or ranks; a may be {}."""
    if not a:
        return b
    return {name: a[name] + b[name] for name in a} | {
        "ratio_max": torch.maximum(a["ratio_max"], b["ratio_max"])}


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
    means = {name: value / tokens for name, value in sums.items()}
    return means | {"ratio_max": sums["ratio_max"], "ess": ess}
