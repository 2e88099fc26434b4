"""
The noise schedule against tables and figures of the paper and its release, the noise on the norms of two layers.

python -m pytest tests/test_aqn.py -v
"""
import math
from types import SimpleNamespace

import pytest
import torch

from aqn import SCHEDULES, draw_z, noisy_norms, sigma_at
from model import RMSNorm

# sigma of stages 0..9. Algorithm 1: 1e-2 * 0.05^((k - 1) / 9); NVlabs/QeRL: 1e-2 * 0.01^((k - 1) / 8).
ALGORITHM_1 = [0, 1.0e-2, 7.17e-3, 5.14e-3, 3.68e-3, 2.64e-3, 1.89e-3, 1.36e-3, 9.73e-4, 6.97e-4]
RELEASE = [0, 1.0e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1.00e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1.00e-4]


def some_model(num_layers=2, D=24):
    """The parts of a model that noisy_norms uses, and the final norm, which stays clean."""
    def norm():
        return RMSNorm(torch.linspace(0.5, 2.0, D), 1e-6, torch.float32)
    return SimpleNamespace(layers=[SimpleNamespace(input_norm=norm(), post_norm=norm()) for _ in range(num_layers)],
                           final_norm=norm())


def norms_of(model):
    return [norm for layer in model.layers for norm in (layer.input_norm, layer.post_norm)]


@pytest.mark.parametrize("table,sigma_end", [(ALGORITHM_1, 5e-4), (RELEASE, 5.62e-5)])
def test_sigma_follows_the_published_stage_table(table, sigma_end):
    # The release ends at 1e-4. An end of 5.62e-5 = 1e-2 * 0.01^(9 / 8) makes Algorithm 1 reproduce its table.
    for stage, want in enumerate(table):
        for step in (60 * stage, 60 * stage + 59):                        # first and last step of the stage
            got = sigma_at(step, 600, 1e-2, sigma_end, 10)
            assert got == pytest.approx(want, rel=4e-3), (step, got)      # half a unit in the third digit of 1.36


@pytest.mark.parametrize("total_steps,num_stages", [(600, 10), (607, 10), (100, 7), (3, 10), (1, 1), (9, 2), (5, 1)])
def test_steps_agree_with_algorithm_1(total_steps, num_stages):
    for step in range(total_steps):
        k = (step + 1 - 1) // (total_steps // num_stages) if total_steps >= num_stages else step
        k = min(k, num_stages - 1)                                        # of 607 steps the last stage takes the rest
        want = 0 if k == 0 else 1e-2 * 0.05 ** ((k - 1) / (num_stages - 1))
        assert sigma_at(step, total_steps, 1e-2, 5e-4, num_stages) == pytest.approx(want, rel=1e-12)


# Sigma in each of five stages from 1 to 0.01: a clean one, then t = 0, 1/4, 2/4 and 3/4.
STAGES = {"exponential": [0, 1, 0.1**.5, 0.1, 0.1**1.5], "linear": [0, 1, .7525, .505, .2575],
          "cosine": [0, 1, .505 + .495 * .5**.5, .505, .505 - .495 * .5**.5],
          "log": [0] + [1 - .99 * math.log10(x) for x in (1, 3.25, 5.5, 7.75)]}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_by_hand(schedule):
    assert schedule in STAGES, f"add the sigmas of {schedule!r} to STAGES"
    got = [sigma_at(step, 5, 1.0, 0.01, 5, schedule) for step in range(5)]
    assert got == pytest.approx(STAGES[schedule], rel=1e-12)


def test_zero_start_is_clean_and_bad_ranges_stop():
    assert sigma_at(500, 600, 0, 5e-4, 10) == 0
    assert sigma_at(500, 600, 1e-2, 1e-2, 10) == pytest.approx(1e-2)      # constant noise is allowed
    for bad in (dict(sigma_start=1e-4, sigma_end=1e-2), dict(sigma_start=1e-2, sigma_end=0)):
        with pytest.raises(AssertionError, match="sigma_end"):
            sigma_at(0, 600, num_stages=10, **bad)
    with pytest.raises(AssertionError, match="'cubic'"):
        sigma_at(0, 600, 1e-2, 5e-4, 10, schedule="cubic")


def test_noise_is_added_in_place_to_block_norms_only():
    model = some_model()
    addresses = [norm.noise.data_ptr() for norm in norms_of(model)]
    with noisy_norms(model, 1e-2, seed=1, step=5):
        assert [norm.noise.data_ptr() for norm in norms_of(model)] == addresses
        for n, norm in enumerate(norms_of(model)):
            assert torch.equal(norm.noise, 1e-2 * draw_z(1, 5, n // 2, n % 2, 24))
        assert not model.final_norm.noise.any()


def test_noise_is_removed_even_after_an_exception():
    model, x = some_model(), torch.randn(3, 24)
    before = [norm(x)[0] for norm in norms_of(model)]
    for step in range(3):
        with pytest.raises(KeyboardInterrupt):
            with noisy_norms(model, 1e-2, seed=0, step=step):
                assert not torch.equal(norms_of(model)[3](x)[0], before[3])
                raise KeyboardInterrupt
        assert all(torch.equal(norm(x)[0], want) for norm, want in zip(norms_of(model), before))


def test_noise_depends_only_on_seed_step_layer_and_norm():
    def noise(seed, step, num_layers=2):
        model = some_model(num_layers)
        torch.manual_seed(num_layers)                                     # other random draws make no difference
        with noisy_norms(model, 1.0, seed, step):
            return [norm.noise.clone() for norm in norms_of(model)]

    assert all(torch.equal(a, b) for a, b in zip(noise(3, 7), noise(3, 7, num_layers=5)))
    # A generator that kept only 32 bits of its seed would give step 2^32 the noise of step 0.
    vectors = [z for seed, step in ((0, 0), (0, 1), (1, 0), (0, 2**32), (2**32, 0)) for z in noise(seed, step)]
    assert len(vectors) == 20
    assert torch.cat(vectors).unique().numel() == 20 * 24                 # nor is one a shifted copy of another


def test_noise_keeps_its_values_between_versions():
    want = [[-0.1334, 0.2883, -1.0463, 1.6296], [-1.2655, -0.8308, 0.9867, 0.2156]]
    for (layer, which), z in zip([(0, 0), (5, 1)], want):
        assert draw_z(3, 7, layer, which, 24)[:4].tolist() == pytest.approx(z, abs=5e-5)


def test_nested_noise_and_shared_buffers_stop():
    model = some_model()
    with noisy_norms(model, 1e-2, seed=0, step=0):
        with pytest.raises(AssertionError, match="nest"):
            with noisy_norms(model, 1e-2, seed=0, step=1):
                pass
    model.layers[1].post_norm = model.layers[1].input_norm                # two norms share a buffer
    with pytest.raises(AssertionError, match="noise hit 3 norms of 2 layers"):
        with noisy_norms(model, 1e-2, seed=0, step=0):
            pass
    assert not any(norm.noise.any() for norm in norms_of(model))
