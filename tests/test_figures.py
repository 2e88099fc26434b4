"""
pass@k and intervals, against enumeration, published tables and hand calculation.

python -m pytest tests/test_figures.py -v
"""
import itertools

import pytest
import torch

from tasks.figures import confidence_interval, mean, pass_at_k, sampler_entropy


@pytest.mark.parametrize("n,c", [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (7, 3)])
def test_pass_at_k_matches_enumeration(n, c):
    answers = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        share = mean([any(subset) for subset in itertools.combinations(answers, k)])
        assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5                       # 3 of 6 pairs contain the one right answer
    assert pass_at_k(200, 1, 100) == 0.5                   # C(200, 100) has 59 digits and needs integers


def test_sampler_entropy_is_a_mean_over_tokens():
    rows = [{"length": 3, "mean_logprob": -0.5}, {"length": 1, "mean_logprob": -2.5}]
    assert sampler_entropy(rows) == pytest.approx((3 * 0.5 + 2.5) / 4)


@pytest.mark.parametrize("solved,n,low,high", [            # Newcombe 1998, table I, method 3
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_interval_matches_published_wilson_intervals(solved, n, low, high):
    verdicts = [1.0] * solved + [0.0] * (n - solved)
    assert confidence_interval(verdicts) == pytest.approx([solved / n, low, high], abs=6e-5)


@pytest.mark.parametrize("power,k", [(1.0, 1), (1.0, 2), (0.1, 1), (0.1, 4)])
def test_interval_covers_truth_95_percent_of_the_time(power, k):
    """60 problems, each solved with probability p = u^power, 4 samples each. E[1 - (1 - p)^k] is integrated exactly."""
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    truth = (1 - (1 - u**power) ** k).mean().item()
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1000, 60, 1, generator=generator) ** power
    c = (torch.rand(1000, 60, 4, generator=generator) < p).sum(-1).tolist()
    intervals = [confidence_interval([pass_at_k(4, x, k) for x in run], samples=4) for run in c]
    held = mean([low <= truth <= high for _, low, high in intervals])
    assert 0.93 <= held <= 0.985                           # 1000 trials have sd 0.007; Wilson errs on the wide side


def test_interval_is_not_narrower_than_for_independent_answers():
    """Ten problems with 2 of 4 answers right: no spread between problems, but still only 40 answers."""
    assert confidence_interval([0.5] * 10, samples=4) == pytest.approx(confidence_interval([0.0] * 20 + [1.0] * 20))
    assert confidence_interval([1.0] * 10, samples=4)[1] == pytest.approx(0.7225, abs=1e-4)        # Wilson, 10 of 10
