"""
The learning rule: from the rewards of a group of answers to the loss of every token.

    group_advantages    was an answer better or worse than the others to the same problem?
    token_weights       how much does one token of an answer count in the loss of a whole update?
    policy_loss         puts both together with the tokens' log-probs: the loss to differentiate

GRPO (2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783) and GSPO (2507.18071) differ in their
divisor, their clip and whether the ratio belongs to a token or to a row: each is a row of LOSSES.

By default the learner sees each answer once, in one update. Then the gradient is that of

    loss = -sum over the tokens of weight * correction * advantage * log policy

policy is the probability that the learner gives the token, and correction a factor near 1 that
makes up for the sampler having given it another one. The rest of this text derives this line, and
says what changes with several updates on the same answers.

Shapes. P problems get G answers each. An answer is a row, so there are B = P * G rows, and rows
[p * G, (p + 1) * G) answer problem p. The loss sees the T tokens of all rows laid end to end:

    problem            0            1          P = 2, G = 2
    row                0     1      2     3    B = 4: rewards, advantages, weights are (B,)
    token              a b   c d e  f     g h  T = 8: log-probs are (T,)
    row_of_token       0 0   1 1 1  2     3 3  (T,), so that weights[row_of_token] is (T,)

A *step* is one round of sampling, scoring and training; an *update* is one step of the optimizer. A
*pass* is one time that the learner trains on a row; --epochs N makes N passes. Three policies give
each token a probability, and two ratios compare these:

     sampler  ------ correction ------>  proximal  ---------- rho ---------->  policy
     drew the answer, with noise         the learner, without noise, at        the learner in this
     on its norms; its log-probs         its own first pass over the row,      pass: the only one
     were written down then              kept for the later passes             with a gradient

    rho = policy / proximal: how far updates have moved the learner since its first pass.
    correction = min(proximal / sampler, 2): how much more (or less) the token must
        count because another policy than the learner drew it. Without the cap, one token that
        the sampler almost never draws could outweigh all others (truncated importance sampling,
        TIS: Yao et al. 2025).

The loss, where weight and advantage are those of the token's row and k3 estimates the KL
divergence from the base model (only with kl_beta > 0):

    objective = min(rho * advantage, clip(rho, 1 - clip_low, 1 + clip_high) * advantage)
    loss = sum over the tokens of weight * (kl_beta * k3 - correction * objective)

By default a step makes one update, in one pass over the answers. Then policy and proximal are the
same numbers, and rho is 1: nothing is clipped. Its gradient is not 0, but that of log policy, which
gives the line at the top.

What follows about the clip matters only where there are several updates on the same answers, or
with the correction "ppo".

Why two ratios? PPO has one, policy / sampler, which does two jobs: it corrects for the answers
having been drawn by another policy, and its clip bounds how far one batch may move the policy. Here
the sampler differs from the learner even before the first update, by AQN's noise and by rounding.
If the clip compared the policy with the sampler, noise alone could carry a token beyond it,
although no update has moved it. Such a clip drops the blame of a token that the noise made likely,
and keeps its praise. So the learner is drawn towards what this step's noise happens to like. (With
a sigma of 5e-2 a 0.5B ended 6 percentage points lower: study/planned.md.) So each job has a ratio
of its own (decoupled PPO: Hilton et al. 2110.00641), and noise only changes how much a token
counts.

What the two cover depends on Loss.correction, and on whether this is the learner's first pass over
the row (with --epochs 2 there are two):

    Loss.correction   correction covers            rho covers
    "truncate"        noise, rounding and          updates since the row's first pass, so it is 1
                      updates before the row's     in that pass and nothing is clipped there
                      first pass
    "off"             nothing, it is 1             as with "truncate"
    "ppo"             nothing, it is 1             noise, rounding and all updates, in every pass:
                                                   the sampler takes the proximal policy's place

Can there be updates before a row's first pass? With --updates-per-rollout 2 the second half of the
rows has its first pass after the first update, which has moved the learner already.

The proximal policy costs no forward pass, because pass 1 computes it anyway; one fp32 number a
token is kept. (verl computes it for all rows before the first update of a step instead, which is
one more forward pass over the batch. There rho covers all updates of the step.)

A weight is 1 / divisor, where the divisor counts rows or tokens of the whole update and is
known before the first backward pass. So gradients are simply added up, over micro-batches and over
ranks, and cutting up the rows in another way changes their sum by rounding alone. Rows outside the
loss (loss_mask: unscorable ones, and with --overlong mask those that were cut off at the length
limit) count in neither the sum nor the divisor. Groups of equal rewards have advantages of 0, so
that only a KL term can teach anything there; they still count in the divisor, as in the authors'
code (NVlabs/QeRL).

Not here: a critic and an entropy bonus (the QeRL paper has neither), the overlong penalty
(rewards.py), DAPO's dynamic sampling. That goes on sampling until enough groups hold right and
wrong answers; a larger --prompts-per-step costs as much and gives as many.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Every log-ratio is clamped to +-20 before exp(). So ratios are at most 4.9e8, and they, their
# squares and their sums over a step are finite in fp32.
LOG_RATIO_LIMIT = 20.0
SCALES = ("group", "none")


class Correction(NamedTuple):
    """How a loss corrects for the answers having been drawn by another policy than the learner."""
    anchor: str                                  # "old" or "rollout": ratio = policy / anchor
    cap: float | None                            # importance weight = min(anchor / rollout, cap)


# Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
# (fengyao.notion.site/off-policy-rl), truncate importance weights at a small constant. 2 is the
# usual one, also where the sampler is quantized (verl, ms-swift). Without a cap the weight is 1.
CORRECTIONS = {"truncate": Correction("old", 2.0),
               "ppo": Correction("rollout", None),
               "off": Correction("old", None)}


@dataclass(frozen=True)
class Loss:
    """What tells one loss from another: a divisor, a clip, and how it corrects for the sampler.

    correction says what is done about the answers having been drawn by another policy than the
    learner (see the table at the top):
        "truncate"  correction = min(proximal / sampler, 2)
        "ppo"       the sampler takes the proximal policy's place, so the clip acts on noise and
                    rounding too (QeRL, Eq. 3, where the old policy is the noisy one)
        "off"       nothing, which leaves the gradient biased; the authors' code does the same
    """
    # divisor(rows, tokens, lengths, limit) -> what the sum over a row's tokens is divided by, one
    # number () or one for each row (B,). The arguments are tensors, except the last:
    #   rows ()       how many rows are in the loss of the whole update
    #   tokens ()     how many tokens these rows have together
    #   lengths (B,)  how many tokens each row has
    #   limit         the most tokens that an answer may have (--max-new-tokens)
    divisor: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    # Both widths are those of QeRL, Table 4, which has them for all its losses. That clip_high is
    # larger than clip_low is DAPO's Clip-Higher (2503.14476, section 3.1).
    clip_low: float = 0.2
    clip_high: float = 0.28
    sequence_level: bool = False                 # one ratio for a row: exp of the mean log-ratio
    correction: str = "truncate"
    kl_beta: float = 0.0                         # how much the KL divergence from the base counts

    def __post_init__(self):
        assert self.correction in CORRECTIONS, \
            f"{self.correction!r} is not one of {(*CORRECTIONS,)}"
        assert self.kl_beta >= 0, f"kl_beta {self.kl_beta} is negative"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a KL term, which needs the base model's log-probs."""
        return self.kl_beta > 0

    @property
    def acts_on_all_rows(self) -> bool:
        """Whether rows whose advantage is 0 are trained on too: only a KL term can teach them."""
        return self.needs_reference


LOSSES = {
    # Every row has the same say, however long it is (2402.03300, Eq. 3). That paper has one width
    # for both sides of the clip and a KL term: add --clip-high 0.2 --kl-beta 0.04 for these.
    "grpo": Loss(lambda rows, tokens, lengths, limit: rows * lengths),
    # Every token of the update has the same say (2503.14476, section 3.3: token-level loss).
    "dapo": Loss(lambda rows, tokens, lengths, limit: tokens),
    # Divides by the same constant where "grpo" divides by the row's length. A division by the
    # length makes each token of a wrong answer cost less the longer the answer is, so wrong answers
    # grow (2503.20783, section 3.1). Dr. GRPO also leaves out the division by the standard
    # deviation: it is this loss together with --advantage-scale none.
    "dr_grpo": Loss(lambda rows, tokens, lengths, limit: rows * limit),
    # One ratio for a row, and the narrow clip of 2507.18071, section 5.1. With correction "ppo"
    # AQN's noise alone moves that ratio out of this clip.
    "gspo": Loss(lambda rows, tokens, lengths, limit: rows * lengths, 3e-4, 4e-4,
                 sequence_level=True),
}


# -----------------------------------------------------------------------------
# Rewards -> advantages and weights

def informative_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Which groups can teach: (B,) rewards -> (P,) bool, where a group's rewards differ.

    Unscorable rows (NaN) do not count; a group that has no other row is not informative. Rewards
    that differ by a billionth of their size do so by rounding: 0.1 + 0.2 is not 0.3.
    """
    grouped = rewards.double().view(-1, group_size)                         # (P, G)
    highest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    largest = grouped.nan_to_num(nan=0.0).abs().amax(dim=1)
    return highest - lowest > 1e-9 * largest     # a group of NaN only: -inf > 0 is False


def group_advantages(rewards: Tensor, group_size: int, scale: str = "group",
                     extra: Tensor | None = None) -> Tensor:
    """How much better than its group each answer was: (B,) rewards -> (B,) fp32 advantages.

    An advantage is the reward's distance from the mean of its group. It is computed in float64:
    fp32 cannot tell a reward of 20,000,001 from one of 20,000,000. scale "group" divides it by the
    group's standard deviation (GRPO, DAPO), "none" does not (Dr. GRPO: 2503.20783, section 3.2),
    which is the default of train.py with a --model. A reward of NaN means that the answer is
    unscorable: it is in no mean, and its advantage is 0.

    extra (B,) is what else an answer is worth (its format, its length). Its distance from the
    group's mean is added undivided, and only in groups whose rewards differ. If it were part of the
    reward, the division could blow it up. Take eight wrong answers, seven with a reward of 0 and
    one with -0.05 because it is long: their standard deviation is 0.018, so the seven would get
    +0.35 and the long one -2.5, advantages as large as those that tell right answers from wrong.
    """
    assert scale in SCALES, f"{scale!r} is not one of {SCALES}"
    grouped = rewards.double().view(-1, group_size)                         # (P, G)
    scorable = ~grouped.isnan()
    mean = grouped.nanmean(dim=1, keepdim=True)
    centred = torch.where(scorable, grouped - mean, 0.0)
    if scale == "group":
        # The squares are divided by n - 1 and 1e-4 is added to the root, both as in the authors'
        # code. n counts the scorable answers, so it can be below G.
        n = scorable.sum(dim=1, keepdim=True)
        variance = centred.square().sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-4)
    if extra is not None:
        extra = torch.where(scorable, extra.view(-1, group_size), torch.nan)
        centred = centred + (extra - extra.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)
    # Groups of equal rewards must get exactly 0, so they are found by comparing the rewards. The
    # formula alone would not do: the mean of eight equal numbers need not be that number, and of
    # large ones the rounding error, divided by 0 + 1e-4, would be learned from. Exactly 0 also lets
    # the learner leave these rows out of its forward and backward passes.
    informative = informative_groups(rewards, group_size)
    return torch.where(informative[:, None], centred, 0.0).view(-1).float()


def loss_mask(rewards: Tensor, finished: Tensor, mask_overlong: bool) -> Tensor:
    """Which rows enter the loss: rewards (B,), finished (B,) bool -> (B,) bool.

    True means that the row is in the loss. Unscorable rows (NaN) never are. mask_overlong also
    leaves out rows that were cut off at the length limit (finished is False), as do the authors'
    code and DAPO's overlong filtering (2503.14476, section 3.4). The reward of a row that was
    cut off still counts in the mean of its group; that of an unscorable row counts nowhere.
    """
    scorable = ~rewards.isnan()
    return scorable & finished if mask_overlong else scorable


def minibatches(mask: Tensor, group_size: int, count: int) -> list[Tensor]:
    """Cuts a batch for `count` updates: loss_mask (B,) -> `count` disjoint parts of it.

    Groups stay whole and in order. Groups without a row in the loss are not counted, so every
    update gets the same number of the others, give or take one. With fewer of them than `count`,
    some parts are empty, and the learner skips these.
    """
    groups = mask.view(-1, group_size).any(dim=1)                           # (P,)
    # (P,): which part a group belongs to, 0..count - 1. Groups without a row in the loss get the
    # part of the group before them, or -1 at the beginning; `mask` keeps their rows out either way.
    part = (groups.cumsum(0) - 1) * count // groups.sum().clamp(min=1)
    return [mask & (part == u).repeat_interleave(group_size) for u in range(count)]


def token_weights(lengths: Tensor, mask: Tensor, loss: Loss, max_new_tokens: int) -> Tensor:
    """How much one token of each row counts in the loss: (B,) fp32, 0 for rows outside the mask.

    lengths (B,) in tokens and mask (B,) bool belong to the whole update, all ranks
    together, because this is the only place where its loss is divided by anything.
    """
    assert (lengths[mask] > 0).all(), "a row has no tokens; even '' has its end token"
    # At least 1, so that nothing is divided by 0 in an update without any row.
    rows = mask.sum().clamp(min=1)
    tokens = lengths[mask].sum().clamp(min=1)
    divisor = loss.divisor(rows, tokens, lengths, max_new_tokens)
    return torch.where(mask, 1.0 / divisor.float(), 0.0)


# -----------------------------------------------------------------------------
# The loss

class LogProbs(NamedTuple):
    """Log-probs of the same T tokens under each policy (see the top), (T,) fp32 each."""
    policy: Tensor                               # differentiable
    sampler: Tensor
    proximal: Tensor
    reference: Tensor | None = None              # the base without its adapter, for the KL term


def k3(log_ratio: Tensor) -> Tensor:
    """Estimates KL(p || q) token by token from log_ratio = log q - log p, on samples of p; >= 0.

    Schulman's k3 (joschu.net/blog/kl-approx.html). As a loss with p = policy and q = reference, its
    gradient pulls the policy towards the reference; the gradient of the plainer k1 = -log_ratio
    would be zero on average. (On average it is the gradient of KL(reference || policy), although
    the value estimates KL(policy || reference). GRPO's loss has the same.)

    The loss's KL term takes the tokens as samples of the policy. They are the noisy sampler's, and
    no correction is applied to this term, so there it is an approximation.
    """
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() - 1 - log_ratio


def limited_exp(log_ratio: Tensor) -> Tensor:
    """exp() of log-ratios clamped to +-LOG_RATIO_LIMIT; beyond it there is no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_loss(logprobs: LogProbs, advantages: Tensor, row_of_token: Tensor, weights: Tensor,
                loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, differentiable in logprobs.policy, and sums for summarize().

    The micro-batch has b whole rows: advantages and weights (b,) are theirs, and row_of_token (T,)
    int64 says which of them a token belongs to. The losses of several micro-batches add up to that
    of the update, and so do their sums (add_sums).
    """
    policy, sampler, proximal, reference = logprobs
    shapes = [tuple(t.shape) for t in (row_of_token, *logprobs) if t is not None]
    assert len(set(shapes)) == 1, f"row_of_token and log-probs have the shapes {shapes}"
    assert reference is not None or not loss.needs_reference, f"{loss.kl_beta=} needs a reference"
    assert policy.dtype in (torch.float32, torch.float64), \
        f"{policy.dtype}: differences of log-probs need fp32"
    sums = mismatch_sums(policy.detach() - sampler)
    correction = CORRECTIONS[loss.correction]
    anchor = sampler if correction.anchor == "rollout" else proximal
    log_ratio = policy - anchor                                             # (T,)
    log_weight = anchor - sampler                                           # (T,)
    if loss.sequence_level:
        # All tokens of a row have the ratio of their mean, and each gets the gradient of its own
        # log-prob: 1 / length is in the weights (GSPO-token: 2507.18071, section 4.3).
        log_ratio = (row_means(log_ratio.detach(), row_of_token, len(weights))
                     + policy - policy.detach())
        log_weight = row_means(log_weight, row_of_token, len(weights))
    ratio = limited_exp(log_ratio)
    importance_weight = (1.0 if correction.cap is None
                         else limited_exp(log_weight).clamp(max=correction.cap))
    # The importance weight is positive, so it may stand inside of min() as well as before it.
    A = advantages[row_of_token] * importance_weight                        # (T,)
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    per_token = -torch.min(ratio * A, clipped * A)
    sums["clip_low"] = ((A < 0) & (ratio < 1 - loss.clip_low)).sum().double()
    sums["clip_high"] = ((A > 0) & (ratio > 1 + loss.clip_high)).sum().double()
    if reference is not None:
        kl = k3(reference - policy)
        per_token = per_token + loss.kl_beta * kl
        sums["kl"] = kl.detach().sum().double()
    return (weights[row_of_token] * per_token).sum(), sums


def row_means(values: Tensor, row_of_token: Tensor, rows: int) -> Tensor:
    """values (T,) -> (T,): every token gets the mean over the tokens of its row."""
    total = torch.zeros(rows, dtype=values.dtype, device=values.device)
    # Not index_add: on a GPU it adds in any order, and a resumed run would get other bits.
    total = total.index_put((row_of_token,), values, accumulate=True)
    return (total / row_of_token.bincount(minlength=rows).clamp(min=1))[row_of_token]


# -----------------------------------------------------------------------------
# Metrics: sums over the trained tokens of an update, then means

def mismatch_sums(d: Tensor) -> dict[str, Tensor]:
    """How far the learner is from the sampler: d (T,) = log policy - log sampler -> sums.

    Each is a sum over the tokens, except ratio_max, which is the largest ratio. They are float64,
    so that counts stay exact however many are added. The ratio here, exp(d) = policy / sampler, is
    the product of a token's policy / proximal and proximal / sampler, before any cap. So it is
    neither of the loss's two ratios alone, except with correction "ppo", where it is rho.
    """
    d = d.double()
    ratio = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    statistics = {
        "tokens": torch.ones_like(d),
        "mismatch_abs": d.abs(),
        "mismatch_within": d.abs() <= 0.01,
        "mismatch_k3": k3(d),                    # an estimate of KL(sampler || learner)
        "ratio_outside": (ratio < 0.9) | (ratio > 1.1),
        "ratio_max": torch.cat([ratio, ratio.new_zeros(1)]).amax(),          # 0 without tokens
        "ratio": ratio,                          # summarize() makes ess of these two
        "ratio_squared": ratio.square(),
    }
    return {name: values.double().sum() for name, values in statistics.items()}


def add_sums(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the sums of two micro-batches, or of two ranks; a may be {}, the sums of nothing."""
    if not a:
        return b
    return {name: a[name] + b[name] for name in a} | {
        "ratio_max": torch.maximum(a["ratio_max"], b["ratio_max"])}


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """The sums of a whole update -> means over its tokens, for the log; {} if it trained no row.

    ess = (sum of ratio)^2 / (T * sum of ratio^2) is the effective sample size as a share of the T
    tokens: 1 where sampler and learner agree. At the first update of a training step these numbers
    measure the sampler's noise and rounding; at later ones the policy has moved as well.
    """
    if not sums or sums["tokens"] == 0:
        return {}
    sums = {name: value.item() for name, value in sums.items()}
    tokens = sums.pop("tokens")
    ratio = sums.pop("ratio")
    ess = ratio**2 / (tokens * sums.pop("ratio_squared"))
    means = {name: value / tokens for name, value in sums.items()}
    return means | {"ratio_max": sums["ratio_max"], "ess": ess}
