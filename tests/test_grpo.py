"""
Advantages, weights, losses and metrics against numbers by hand. test_learner.py compares complete losses with float64
autograd of the textbook formulas.

python -m pytest tests/test_grpo.py -v
"""
import dataclasses
import itertools
import math

import pytest
import torch

import grpo
from grpo import LOSSES, LogProbs, add_sums, group_advantages, loss_weights, policy_loss, summarize

NAN = float("nan")


def loss_of(name, **changes):
    return dataclasses.replace(LOSSES[name], **changes)


def one_token(ratio, advantage, gap=1.0, loss="dapo", dtype=torch.float64, ref_logprobs=None, **changes):
    """-> the loss of one token of weight 1, its derivative by the token's log-prob, the sums.

    ratio: policy / old. gap: old / rollout.
    """
    logprobs = torch.tensor([math.log(ratio) - 1], dtype=dtype, requires_grad=True)
    old, advantages = torch.tensor([-1.0], dtype=dtype), torch.tensor([advantage], dtype=dtype)
    value, sums = policy_loss(LogProbs(logprobs, old - math.log(gap), old, ref_logprobs), advantages,
                              torch.zeros(1, dtype=torch.int64), torch.ones(1), loss_of(loss, **changes))
    value.backward()
    return value.item(), logprobs.grad.item(), sums


# -- advantages ---------------------------------------------------------------------------------------------------

# For each --advantage-scale the advantages of rewards (1, 0, NaN, 1, 0) by hand, without the shaping (-1, 0, 5, 0, -1).
# The mean reward is 1/2 and each squared difference 1/4, so the variance is 1 / (n - 1) = 1/3. Shaping has a mean of
# -1/2.
BY_HAND = {"group": [x / (3**-0.5 + 1e-4) for x in (.5, -.5, 0, .5, -.5)], "none": [.5, -.5, 0, .5, -.5]}


@pytest.mark.parametrize("scale", grpo.SCALES)
def test_each_scale_by_hand(scale):
    assert scale in BY_HAND, f"add the advantages of {scale!r} to BY_HAND"
    got = group_advantages(torch.tensor([1, 0, NAN, 1, 0]), 5, scale, torch.tensor([-1.0, 0, 5, 0, -1]))
    summed = [x + y for x, y in zip(BY_HAND[scale], (-.5, .5, 0, .5, -.5), strict=True)]
    assert got.tolist() == pytest.approx(summed, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("scale", grpo.SCALES)
def test_equal_rewards_give_exactly_zero_advantage(scale):
    # The mean of equal numbers can be off by rounding, which division by std + 1e-4 would turn into an advantage.
    for value in (0.0, 0.1, 1.2, 2.2):
        rewards = torch.tensor([value] * 7 + [0, 1, 0, 1, 0, 1, 1])
        assert group_advantages(rewards, 7, scale)[:7].tolist() == [0] * 7


def test_large_rewards_differ_and_rounding_does_not():
    # fp32 has no number between 20,000,000 and 20,000,002, and 0.1 + 0.2 is 0.30000000000000004.
    large = torch.tensor([2e7, 2e7 + 1, 2e7 + 2, 2e7 + 3], dtype=torch.float64)
    assert group_advantages(large, 4, "none").tolist() == [-1.5, -0.5, 0.5, 1.5]
    rounded = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert grpo.informative_groups(torch.tensor([1.0, 1.0 + 1e-8, 1.0, 1.0], dtype=torch.float64), 4).item()
    shaping = torch.tensor([1.0, 0, 0, 0])
    assert group_advantages(rounded, 4, "group", shaping).tolist() == [0] * 4


def test_unscorable_rows_are_not_in_mean_or_std():
    got = group_advantages(torch.tensor([1.0, NAN, 0, 0, 0] + [NAN] * 4 + [3.0]), 5, "group")
    alone = group_advantages(torch.tensor([1.0, 0, 0, 0]), 4, "group")
    assert got[[0, 2, 3, 4]].tolist() == alone.tolist()
    assert got[[1, 5, 6, 7, 8, 9]].tolist() == [0] * 6                    # the NaNs, and a group with one scorable row


def test_informative_groups_are_those_with_spread():
    rewards = torch.tensor([0, 0, 1, 1, 0, 1, NAN, 1, NAN, NAN, .1, .1 + 1e-6])
    assert grpo.informative_groups(rewards, 2).tolist() == [False, False, True, False, False, True]


def test_groups_worth_asking_again_differ_by_more_than_half_of_the_batch():
    right_or_wrong = torch.tensor([0, 0, 1, 1, 0, 1, NAN, 1, NAN, NAN])
    assert grpo.worth_asking_again(right_or_wrong, 2).tolist() == [False, False, True, False, False]
    shaped = torch.tensor([0, 0.1, 1.1, 0, -0.1, 0.4, 1, 1.1])                # a range of 1.2
    assert grpo.worth_asking_again(shaped, 2).tolist() == [False, True, False, False]
    assert not grpo.worth_asking_again(torch.zeros(4), 2).any()


def test_loss_mask_drops_unscorable_and_overlong_rows():
    rewards, finished = torch.tensor([1, 0, NAN, 1, 1, 1.0]), torch.tensor([True, False, True, True, True, False])
    sampled = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]]).bool()
    for overlong, rows in ((True, [1, 0, 0, 1, 1, 0]), (False, [1, 1, 0, 1, 1, 1])):
        mask = grpo.loss_mask(sampled, rewards, finished, mask_overlong=overlong)
        assert mask.tolist() == (sampled & torch.tensor(rows).bool()[:, None]).tolist()


def test_minibatches_split_the_groups_in_the_loss():
    rows = torch.tensor([1, 1, 0, 0, 0, 1, 1, 0, 1, 1]).bool()            # groups of 2, the second without a row
    mask = rows[:, None] & torch.tensor([True, False, True])

    def rows_of(count):
        return [minibatch.any(dim=1).nonzero()[:, 0].tolist() for minibatch in grpo.minibatches(mask, 2, count)]

    assert rows_of(2) == [[0, 1, 5], [6, 8, 9]] and rows_of(3) == [[0, 1, 5], [6], [8, 9]]
    for count in (1, 3, 7):                                               # 7 is more than there are groups
        assert torch.equal(sum(m.int() for m in grpo.minibatches(mask, 2, count)), mask.int())
    assert not torch.stack(grpo.minibatches(mask & False, 2, 3)).any()


# -- weights ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("loss,want", [("grpo", [1 / 4, 0, 1 / 12]), ("gspo", [1 / 4, 0, 1 / 12]),
                                       ("dapo", [1 / 8, 0, 1 / 8]), ("dr_grpo", [1 / 20, 0, 1 / 20])])
def test_loss_weights_by_hand(loss, want):
    # Rows of 2 and 6 tokens in the loss, with a tool's tokens between them; the row in the middle is not in the loss.
    mask = torch.tensor([[1, 0, 1, 0, 0, 0, 0, 0, 0], [0] * 9, [1, 1, 0, 0, 1, 1, 0, 1, 1]]).bool()
    got = loss_weights(mask, LOSSES[loss], max_new_tokens=10)
    torch.testing.assert_close(got, mask * torch.tensor(want)[:, None])


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_without_rows_are_zero_not_nan(loss):
    assert loss_weights(torch.zeros(2, 3, dtype=torch.bool), LOSSES[loss], 10).tolist() == [[0] * 3] * 2


# -- the loss -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ratio,advantage,want", [
    (1.00, +1.5, -1.50),       # on policy: -advantage
    (1.27, +1.0, -1.27),       # inside the clip: -ratio * advantage
    (1.29, +1.0, 0.0),         # above 1.28, positive advantage: clipped
    (1.29, -1.0, +1.29),       # above 1.28, negative advantage: not clipped
    (0.79, -1.0, 0.0),         # below 0.8, negative advantage: clipped
    (0.79, +1.0, -0.79),       # below 0.8, positive advantage: not clipped
    (5.00, -1.0, +5.00),       # PPO has no upper bound here
    (5.00, +1.0, 0.0),
])
@pytest.mark.parametrize("gap", [1.0, 0.6, 1.9])
def test_gradient_of_one_token(ratio, advantage, want, gap):
    value, grad, sums = one_token(ratio, advantage, gap, clip_low=0.2, clip_high=0.28)
    assert grad == pytest.approx(gap * want, abs=1e-12)
    objective = gap * min(ratio * advantage, min(max(ratio, .8), 1.28) * advantage)
    assert value == pytest.approx(-objective)
    binds = want == 0
    assert (sums["clip_ratio_low"].item(), sums["clip_ratio_high"].item()) == (binds and ratio < 1, binds and ratio > 1)


@pytest.mark.parametrize("correction,want", [("truncate", [0.3, 1.9, 2.0]), ("off", [1, 1, 1])])
def test_correction_bounds_a_tokens_weight(correction, want):
    # old / rollout is 0.3, 1.9 or 5. The policy has not moved, so no token is clipped.
    for gap, weight in zip([0.3, 1.9, 5.0], want):
        for advantage in (-1.0, 1.5):
            value, grad, sums = one_token(1.0, advantage, gap, correction=correction)
            assert (value, grad) == pytest.approx((-weight * advantage,) * 2)
            assert (sums["clip_ratio_low"].item(), sums["clip_ratio_high"].item()) == (0, 0)
            assert sums["rollout_is_max"] == pytest.approx(gap)                # the metric is not truncated


def test_ratio_beyond_fp32_stays_finite():
    for ratio in (1e-40, 1e40):                                             # fp32's exp overflows at 3e38
        for correction, gap in itertools.product(grpo.CORRECTIONS, (1e-38, 1e38)):
            value, grad, sums = one_token(ratio, -1.0, gap, dtype=torch.float32, correction=correction, kl_beta=0.1,
                                          ref_logprobs=torch.zeros(1))
            assert math.isfinite(value) and math.isfinite(grad)
            assert all(math.isfinite(v) for v in summarize(sums).values())


def test_ratio_is_constant_beyond_its_limit():
    for ratio, gradient in ((math.exp(19.9), math.exp(19.9)), (math.exp(20.1), 0)):
        value, grad, _ = one_token(ratio, -1.0)
        assert (value, grad) == pytest.approx((min(ratio, math.exp(20)), gradient))


def test_gspo_has_its_own_narrow_clip():
    assert one_token(1.0003, 1.0, loss="gspo")[1] == pytest.approx(-1.0003)
    assert one_token(1.0005, 1.0, loss="gspo")[1] == 0
    assert one_token(1.0005, 1.0, loss="gspo", clip_high=.28)[1] == pytest.approx(-1.0005)


def test_empty_micro_batch_adds_nothing():
    empty, row = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    for loss in LOSSES.values():
        value, sums = policy_loss(LogProbs(empty, empty, empty), empty.detach(), row, empty, loss)
        assert value == 0 and summarize(sums) == {} and sums["rollout_is"] == 0


# -- metrics ------------------------------------------------------------------------------------------------------

def test_metrics_by_hand():
    # Ratios 1, 1.25, 0.5 and 1; each token has log-prob -2 in the rollout and -3 in the reference.
    ratio = torch.tensor([1, 1.25, 0.5, 1]).double()
    row, advantages = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    rollout = torch.full((4,), -2.0).double()
    _, sums = policy_loss(LogProbs(ratio.log() - 2, rollout, rollout, rollout - 1), advantages, row, torch.ones(4),
                          loss_of("dapo", clip_high=.2))
    got, want = summarize(sums), dict(
        rollout_logp_diff=(math.log(1.25) + math.log(2)) / 4,
        rollout_kl=(.25 - math.log(1.25) - .5 + math.log(2)) / 4,
        rollout_is_max=1.25, clip_ratio_low=1 / 4, clip_ratio_high=1 / 4,
        rollout_is_ess=3.75**2 / (4 * (1 + 1.5625 + .25 + 1)),
        kl=(math.exp(-1) * (1 + .8 + 2 + 1) + math.log(1.25) + math.log(.5)) / 4)
    assert {name: got[name] for name in want} == pytest.approx(want)       # a fork may have more


def test_add_sums_keeps_the_largest_ratio():
    a, b = one_token(1.5, 0.0)[2], one_token(1.25, 0.0)[2]
    for sums in (add_sums(a, b), add_sums(b, a)):
        assert summarize(sums)["rollout_is_max"] == pytest.approx(1.5)
    assert add_sums({}, a) is a and summarize({}) == {}
    assert a["clip_ratio_high"] == one_token(0.5, 0.0)[2]["clip_ratio_low"] == 0      # without advantage, no clip


def test_impossible_settings_stop():
    for wrong, named in ((dict(dtype=torch.bfloat16), "bfloat16"), (dict(correction="no such"), "no such"),
                         (dict(kl_beta=0.1), "kl_beta"), (dict(kl_beta=-0.1), "kl_beta")):
        with pytest.raises(AssertionError, match=named):
            one_token(1.0, 1.0, **wrong)
