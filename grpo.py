"""
The learning rule: rewards -> advantages -> token weights -> loss, for GRPO, DAPO, Dr. GRPO and GSPO.

    P prompts, G samples each: B = P * G rows; rows [p * G, (p + 1) * G) answer prompt p
    T completion tokens of all rows laid end to end, no padding; row (T,) says which row a token belongs to

    loss = sum_t weight[row_t] * (-min(r_t A, clip(r_t, 1 - low, 1 + high) A) + beta * k3_t),   A = advantage[row_t]
    r_t  = exp(logprobs_t - old_logprobs_t)

    loss      weight of each token of row b             clip
    grpo      1 / (rows * length_b)                     0.2 / 0.28   (the paper uses these for GRPO and DAPO alike)
    dapo      1 / tokens of the step                    0.2 / 0.28
    dr_grpo   1 / (rows * max_new_tokens)               0.2 / 0.28
    gspo      as grpo; r is one number a row,           3e-4 / 4e-4  (GSPO paper; narrower than the noise's effect on r:
              the geometric mean of its tokens' r                    widen it with AQN on, by clip_low and clip_high)

The old policy is what the sampler wrote down, AQN noise and temperature included: no second forward pass, and the ratio
holds everything that separates the two policies: noise, kernels, and earlier updates on the same rollout.

Divisors are those of the whole optimizer step, over all micro-batches and ranks, known before the first backward. So
gradients are summed, over micro-batches and over ranks alike, and no split of the rows changes them. Rows that are not
live (cut at the length limit, unscorable) leave numerator and divisor. Groups whose rewards are all equal stay in the
divisor though they add no gradient, as in the release; dynamic sampling takes them out.

Not here: a critic, an entropy bonus (neither in the paper), the soft overlong penalty (a reward: rewards.py).
"""
from itertools import groupby

import torch

CLIP = dict(grpo=(0.2, 0.28), dapo=(0.2, 0.28), dr_grpo=(0.2, 0.28), gspo=(3e-4, 4e-4))  # loss -> (low, high)
SCALES = ("group", "batch", "none")
FIRST_LOSS_SCALE, GOOD_UPDATES = 2.0**14, 500                              # of next_loss_scale
CORRECTIONS = ("truncate", "mask", "off")


def keep_informative(rewards, group_size):
    """(B,) rewards -> (P,) bool: groups whose scorable rewards differ; only these can teach anything."""
    grouped = rewards.view(-1, group_size)                                # (P, G)
    top = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    return top > grouped.nan_to_num(nan=torch.inf).amin(dim=1)            # a group of NaN: -inf > inf


def group_advantages(rewards, group_size, scale="group"):
    """(B,) rewards -> (B,) fp32 advantages: distance from the mean of the row's group, over a standard deviation.

    scale: "group" divides by the group's std, "batch" by that of all B rewards, "none" not at all (Dr. GRPO). NaN means
    unscorable: outside every mean and std, advantage 0. Equal rewards get exactly 0: asked of the rewards themselves,
    since the fp32 mean of eight 0.1 need not be 0.1. Rewards must be those of the whole step for "batch".
    """
    assert scale in SCALES, f"{scale!r} is not one of {SCALES}"
    grouped = rewards.float().view(-1, group_size)                        # (P, G)
    scorable = ~grouped.isnan()
    mean = grouped.nanmean(dim=1, keepdim=True)
    centred = torch.where(scorable, grouped - mean, 0.0)
    if scale == "group":                                                  # sample std (n - 1) and 1e-4: as NVlabs/QeRL
        n = scorable.sum(dim=1, keepdim=True)
        centred = centred / ((centred.square().sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)).sqrt() + 1e-4)
    elif scale == "batch" and scorable.sum() > 1:
        centred = centred / (grouped[scorable].std() + 1e-4)
    return torch.where(keep_informative(rewards, group_size)[:, None], centred, 0.0).view(-1)


def live_rows(rewards, finished, group_size, mask_cut=True, dynamic=False):
    """(B,) bool: the rows that enter the loss. Cut rows still count in their group's mean, as in the release.

    mask_cut drops rows that hit the length limit (finished False); dynamic drops groups with equal rewards.
    """
    live = ~rewards.isnan()
    if mask_cut:
        live = live & finished
    if dynamic:
        live = live & keep_informative(rewards, group_size).repeat_interleave(group_size)
    return live


def token_weights(lengths, live, loss, max_new_tokens):
    """lengths, live (B,) of the whole step, all ranks -> (B,) fp32: what one token of row b weighs (table above)."""
    assert loss in CLIP, f"{loss!r} is not one of {tuple(CLIP)}"
    assert (lengths[live] > 0).all(), "a live row has no tokens; even an empty answer has its end token"
    rows, tokens = live.sum().clamp(min=1), lengths[live].sum().clamp(min=1)     # no live row: all weights are 0
    divisor = dict(grpo=rows * lengths, gspo=rows * lengths, dapo=tokens, dr_grpo=rows * max_new_tokens)[loss]
    return torch.where(live, 1.0 / divisor.clamp(min=1).float(), 0.0)


def k3(log_ratio):
    """Schulman's estimate of KL(p || q) from log_ratio = log q - log p on samples of p: never negative, low variance.

    As a loss with p = policy, its gradient is the pull of KL(q || p); k1 = -log_ratio would have none on average.
    """
    log_ratio = log_ratio.clamp(-20, 20)                                  # e^20: one odd token must not be inf
    return log_ratio.exp() - 1 - log_ratio


def policy_loss(logprobs, old_logprobs, advantages, row, weights, loss, clip_low=None, clip_high=None,
                correction="truncate", cap=2.0, ref_logprobs=None, kl_beta=0.0):
    """Loss of one micro-batch of whole rows, to be summed over micro-batches, and sums for summarize().

    logprobs, old_logprobs, ref_logprobs (T,) fp32 of policy, sampler, adapter-off policy; row (T,) int64 indexes
    advantages and weights (B,), which may be the whole step's or this micro-batch's. clip None: the loss's own.

    correction bounds r where the clip does not (A < 0, r > 1 + high). "truncate": the gradient beyond the cap is
    cap * A * dlogp, alive but bounded. "mask": tokens with r outside [1 / cap, cap] add nothing. "off": plain PPO.
    """
    assert loss in CLIP and correction in CORRECTIONS, (loss, correction)
    assert cap >= 1 and (ref_logprobs is not None or kl_beta == 0), (cap, kl_beta)
    assert logprobs.shape == old_logprobs.shape == row.shape, (logprobs.shape, old_logprobs.shape, row.shape)
    assert logprobs.dtype in (torch.float32, torch.float64), f"{logprobs.dtype}: differences of log-probs need fp32"
    low, high = CLIP[loss][0] if clip_low is None else clip_low, CLIP[loss][1] if clip_high is None else clip_high
    A = advantages[row]                                                   # (T,)
    gap = logprobs.detach() - old_logprobs                                # (T,) log r
    sums = mismatch_sums(gap)

    if loss == "gspo":
        total = torch.zeros_like(weights, dtype=gap.dtype).index_add(0, row, gap)
        gap = (total / row.bincount(minlength=len(weights)).clamp(min=1))[row]
    ratio = gap.clamp(-20, 20).exp()
    if correction == "mask":
        A = torch.where((ratio <= cap) & (ratio >= 1 / cap), A, 0.0)
    clip_lows, clip_highs = (A < 0) & (ratio < 1 - low), (A > 0) & (ratio > 1 + high)
    coef = ratio.clamp(max=cap) if correction == "truncate" else ratio
    # The last factor is 1 with gradient dlogp, so the gradient is coef * A * dlogp. For gspo too: d(A * s) is the sum
    # over tokens of A * s / length * dlogp, and 1 / length is in the weight. Where the clip binds nothing flows.
    surrogate = A * coef * (logprobs - logprobs.detach()).exp()
    per_token = -torch.where(clip_lows | clip_highs, A * ratio.clamp(1 - low, 1 + high), surrogate)
    sums |= dict(clip_low=clip_lows.sum().double(), clip_high=clip_highs.sum().double())
    if ref_logprobs is not None:
        kl = k3(ref_logprobs - logprobs)
        per_token = per_token + kl_beta * kl
        sums["kl"] = kl.detach().sum().double()
    return (weights[row] * per_token).sum(), sums


def mismatch_sums(gap):
    """Sums over tokens of gap = learner's log-prob - sampler's. Float64: counts stay exact, and a step adds many."""
    gap = gap.detach().double()
    ratio = gap.clamp(-20, 20).exp()
    return dict(tokens=torch.ones_like(gap).sum(), mismatch_abs=gap.abs().sum(), mismatch_k3=k3(gap).sum(),
                mismatch_within=(gap.abs() <= 0.01).sum().double(),
                ratio=ratio.sum(), ratio_squared=ratio.square().sum(),
                ratio_outside=((ratio < 0.9) | (ratio > 1.1)).sum().double(),
                ratio_max=ratio.max() if len(gap) else gap.new_zeros(()))


def add_sums(a, b):
    """Sums of two micro-batches; a may be {}. ratio_max takes the larger, the others add; ranks: the same rule."""
    if not a:
        return b
    return {name: torch.maximum(a[name], b[name]) if name == "ratio_max" else a[name] + b[name] for name in a}


def summarize(sums):
    """Added sums -> metrics, floats, all but ratio_max per token; {} of a step in which no row was trained on.

    mismatch_abs = mean |log r|, mismatch_within = share of |log r| <= 0.01, mismatch_k3 = KL(sampler || learner),
    ratio_outside = share of r outside [0.9, 1.1], ess = (sum r)^2 / (T sum r^2), 1 when all r are equal. On the first
    update of a rollout these measure the sampler's noise and rounding; on later ones the policy has moved as well.
    """
    if not sums or sums["tokens"] == 0:
        return {}
    sums = {name: value.item() for name, value in sums.items()}
    tokens, ratio, squared = (sums.pop(name) for name in ("tokens", "ratio", "ratio_squared"))
    mean = {name: value if name == "ratio_max" else value / tokens for name, value in sums.items()}
    return mean | dict(ess=ratio**2 / (tokens * squared))


def next_loss_scale(loss_scale, good_updates, finite):
    """fp16's gradients are those of loss_scale * loss -> what it is next, and how many updates in a row were finite.

    Half after an update that was not, down to 1; twice as much after GOOD_UPDATES that were. A power of two: dividing
    the gradient by it is exact. A long run finds the top of fp16's range, and then loses one update in 500.
    """
    if not finite:
        return dict(loss_scale=max(loss_scale / 2, 1.0), good_updates=0)
    if good_updates + 1 == GOOD_UPDATES:
        return dict(loss_scale=loss_scale * 2, good_updates=0)
    return dict(loss_scale=loss_scale, good_updates=good_updates + 1)


def micro_batches(prompts, completions, token_budget, ranks=1, rank=0):
    """B prompts and completions (lists of ids) -> lists of row indices, each of at most token_budget tokens.

    For several ranks, smaller ones if there would be less than about four for each; `rank` gets its share of them. They
    are dealt largest first, to whom has least: in turns, the busiest of 4 ranks would have a tenth too much.

    Rows of one prompt that follow each other stay next to each other: the learner computes their prompt once. So a
    group counts its prompt once; one beyond the budget is cut, and a row beyond it stands alone. First fit, longest
    first: the largest micro-batch comes first, so what does not fit in memory fails at once.
    """
    assert token_budget > 0, token_budget
    if ranks > 1:
        tokens = sum(map(len, completions)) + sum(len(prompt) for prompt, _ in groupby(prompts))
        token_budget = min(token_budget, tokens // (4 * ranks) + 1)
    pieces = []                                                           # [tokens, [row, ...]]: a group, or part of it
    for _, group in groupby(range(len(prompts)), prompts.__getitem__):
        rows = None
        for b in group:
            if rows is None or pieces[-1][0] + len(completions[b]) > token_budget:
                pieces.append([len(prompts[b]), rows := []])
            pieces[-1][0] += len(completions[b])
            rows.append(b)
    batches = []
    for tokens, rows in sorted(pieces, key=lambda piece: -piece[0]):
        for batch in batches:
            if batch[0] + tokens <= token_budget:
                batch[0] += tokens
                batch[1] += rows
                break
        else:
            batches.append([tokens, rows])
    if ranks == 1:
        return [rows for _, rows in batches]
    shares = [[0, []] for _ in range(ranks)]
    for tokens, rows in sorted(batches, key=lambda batch: -batch[0]):
        least = min(shares, key=lambda share: share[0])
        least[0] += tokens
        least[1].append(rows)
    return shares[rank][1]
