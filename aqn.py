"""
Adaptive quantization noise (AQN): decaying Gaussian noise on the norms of the sampler (QeRL, 3.3).

Why: rounding the frozen weights to 4 bits makes the policy a little more random, and the paper
finds that this helps exploration. AQN adds noise whose size is under control: the two norms of
every layer compute with weight + noise,
    noise = sigma * z,   z ~ N(0, 1) of shape (D,), fresh every step.
The linears behind a norm see (w + noise) * x_hat = (1 + noise / w) * (w * x_hat): column i of
their W is in effect multiplied by 1 + noise_i / w_i. q, k, v share one z, gate and up
another; o and down have none.

    stage k = min(floor(step / floor(M / K)), K - 1)        M steps in K equal stages
    sigma   = 0                                             k = 0: quantization noise alone
    sigma   = start * (end / start)^((k - 1) / (K - 1))     k >= 1, Algorithm 1; never reaches `end`

noise is an fp32 buffer of each norm, whatever the base: bf16 weights near 0.75 move in 5 % of
channels at sigma 1e-3, those near 1.5 in none, and half of the schedule would do nothing. Only
rollouts run inside noisy_norms(): evaluation and learner are clean, and grpo.py weighs the learner
against the noisy log-probs that the sampler wrote down.

Not here: noise on the final norm (the paper leaves lm_head clean); noise in proportion to the
weight and in the learner too, which did not pay in one run (docs/log.md); a sigma steered to a KL;
a new z for every forward pass (Eq. 7), under which the tokens of one completion would come from
different policies; a z for each sample of a group (the norm kernels would have to read one a row).
"""
import math
from contextlib import contextmanager

import numpy as np
import torch

# Share of sigma_start - sigma_end that is left at t in [0, 1].
REMAINING = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "log": lambda t: 1 - math.log10(1 + 9 * t),  # the paper's Fig. 15: .050 .035 .026 .020 ...
}
SCHEDULES = ("exponential", *REMAINING)


def sigma_at(step, total_steps, sigma_start, sigma_end, num_stages, schedule="exponential",
             exact_end=False):
    """sigma of a step from 0 on (the paper: from 1): sigma_at(60, 600, 1e-2, 5e-4, 10) == 1e-2.

    exact_end spreads the K - 1 noisy stages over start..end inclusive, as NVlabs/QeRL does. One
    stage is no noise, two are one noisy stage at sigma_start; with fewer steps than stages each
    step is a stage and the last ones never come.
    """
    assert schedule in SCHEDULES, f"{schedule!r} is not one of {SCHEDULES}"
    assert 0 <= step and total_steps >= 1 and num_stages >= 1, (step, total_steps, num_stages)
    assert sigma_start == 0 or 0 < sigma_end <= sigma_start, \
        f"need 0 < {sigma_end=} <= {sigma_start=}, or start 0"
    stage = min(step // max(total_steps // num_stages, 1), num_stages - 1)
    if stage == 0 or sigma_start == 0:
        return 0.0
    t = (stage - 1) / max(num_stages - (2 if exact_end else 1), 1)
    if schedule == "exponential":
        return sigma_start * (sigma_end / sigma_start) ** t
    return sigma_end + (sigma_start - sigma_end) * REMAINING[schedule](t)


def draw_z(seed, step, layer, which, size):
    """z (size,) fp32 of one norm; which: 0 = before attention, 1 = before the MLP.

    Philox is counter-based: (seed, step) is its key and (layer, which) the high words of its
    counter, so no two streams meet and none depends on device, rank or call order. A
    torch.Generator keeps only 32 bits of its seed: among the 33,600 norms of 600 steps of a 7B
    model two would share their z with odds of 12 %.
    """
    philox = np.random.Philox(key=[seed, step], counter=[0, 0, layer, which])
    return torch.from_numpy(np.random.Generator(philox).standard_normal(size, dtype=np.float32))


@contextmanager
def noisy_norms(model, sigma, seed, step):
    """Within, the input_norm and post_norm of every layer carry sigma * z, afterwards 0.

    Written in place, because captured CUDA graphs read these addresses.
    """
    norms = [(i, j, norm) for i, layer in enumerate(model.layers)
             for j, norm in enumerate((layer.input_norm, layer.post_norm))]
    assert not any(n.noise.any() for _, _, n in norms), \
        "a norm is noisy already: noisy_norms does not nest"
    try:
        if sigma > 0:
            for i, j, norm in norms:
                norm.noise.copy_(sigma * draw_z(seed, step, i, j, len(norm.noise)))
            hit = len({n.noise.data_ptr() for _, _, n in norms if n.noise.any()})
            assert hit == 2 * len(model.layers) > 0, \
                f"noise hit {hit} norms of {len(model.layers)} layers"
        yield
    finally:
        for _, _, norm in norms:
            norm.noise.zero_()
