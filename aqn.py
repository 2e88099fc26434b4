"""
Adaptive quantization noise (AQN): decaying Gaussian noise on the sampler's norms, for exploration.
Real models are trained without it by default, since no gain was measured (study/README.md); the
tiny run of `python train.py` has it. The name is the paper's. The noise adapts to nothing: its size
follows a schedule that is fixed before the run, and it comes on top of what quantization does to
the weights.

Why: rounding the frozen weights to 4 bits makes the policy a little more random, and the paper
finds that this helps it to explore (QeRL, section 3.2). But that noise is fixed. AQN (section 3.3)
adds noise whose size can be chosen. The two norms of every layer compute with (Eq. 10)

    w + noise,     noise = sigma * z,     z ~ N(0, 1) of shape (D,), drawn anew for every step

Let x_hat = x / rms(x). The linears after the norm see (w + noise) * x_hat, which is
(1 + noise / w) * (w * x_hat). So column i of their matrix W (N, D) is in effect multiplied by
1 + noise_i / w_i (Appendix G; its W is the transpose of this one, so it speaks of rows). Noise on D
numbers stands in for noise on a whole matrix. q, k and v share one z, gate and up another; o and
down have none.

Mind the units: noise is added to w, whatever the size of w. A channel with w = 0.1 is moved ten
times as far, in proportion, as one with w = 1. So small weights are hit hardest: those of the first
layer's input norm are 0.07 in the median in a real 0.5B, where other norms have 0.9 to 4.1.

The schedule (Eq. 8, Algorithm 1) cuts the M steps of a run into K stages of floor(M / K) steps; the
steps that are left over join the last stage. Step `step`, counted from 0, is in stage k:

    k     = min(floor(step / max(floor(M / K), 1)), K - 1)
    sigma = 0                                             k = 0: quantization's own noise alone
    sigma = start * (end / start)^((k - 1) / (K - 1))     k >= 1; the last stage stays above `end`

The authors' code (NVlabs/QeRL) has K - 2 in that exponent, so its last stage reaches `end`. Its
scripts have 1e-2, 1e-4 and K = 10; an `end` of 5.62e-5 gives their schedule here.

Where noise acts. Only rollouts run inside noisy_norms(). Evaluation and learner are clean, and
the sampler writes down the log-probs of the tokens that it drew with noise, by which grpo.py can
correct for the difference.

How many z a step? One for the whole step, as in the authors' code. One for each forward pass is
what the paper says above Eq. 7; but then the tokens of one answer would come from different
policies, and attend to keys and values that yet others have computed.

With one z a step all answers to a problem come from the same noisy model. If this z helps, it
raises all their rewards alike, and with them the mean that an advantage subtracts. So training
never learns which z was good. With one z for each answer of a group it could (elsewhere noise on
parameters is drawn once an episode: Plappert et al. 2018, 1706.01905). That takes G runs of the
sampler a step, since the norms hold one z at a time, and did not help in three seeds
(study/planned.md).

Why noise is an fp32 buffer beside the weight, and is not added to a bf16 weight: rounding would
swallow it. At sigma 1e-3 the sum would differ from the weight in 5 % of the channels with weights
near 0.75, and in 0.01 % of those near 1.5. Of the nine noisy stages from 1e-2 to 5e-4, the last
three would move less than 1 % of the channels near 1.5.

Not here: noise on the final norm (the paper leaves lm_head clean); noise in the learner too, which
did not pay in one run (docs/log.md); noise in proportion to each weight, sigma * w * z, which did
not help in five seeds (study/planned.md); a sigma that is steered to a given KL divergence.
"""
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from model import Qwen

# The schedules of the paper's Figures 9 and 15 beside the exponential one: t in [0, 1) -> which
# share of (start - end) is left. With ten stages t is 0 in the second, the first noisy one, then
# 1/9, 2/9, ... and 8/9 in the last. It never reaches 1, and may miss 0.5, say. A shape that must
# hit such a point belongs in sigma_at, which has stage and num_stages, and not in this table.
REMAINING = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "log": lambda t: 1 - math.log10(1 + 9 * t),
}
SCHEDULES = ("exponential", *REMAINING)


def sigma_at(step: int, total_steps: int, sigma_start: float, sigma_end: float, num_stages: int,
             schedule: str = "exponential") -> float:
    """The standard deviation of a step's noise: sigma_at(60, 600, 1e-2, 5e-4, 10) == 1e-2.

    step counts from 0 here, from 1 in the paper; total_steps is M and num_stages K of the formula
    above. sigma_start 0 is no noise. One stage is no noise at all, two are a clean one and a noisy
    one at sigma_start. With fewer steps than stages each step is a stage, and the last stages never
    come. A run that is resumed with more steps has a longer M, so its stages move.
    """
    assert schedule in SCHEDULES, f"{schedule!r} is not one of {SCHEDULES}"
    assert 0 <= step and total_steps >= 1 and num_stages >= 1, (step, total_steps, num_stages)
    assert sigma_start == 0 or 0 < sigma_end <= sigma_start, \
        f"need 0 < {sigma_end=} <= {sigma_start=}, or start 0"
    stage = min(step // max(total_steps // num_stages, 1), num_stages - 1)
    if stage == 0 or sigma_start == 0:
        return 0.0
    t = (stage - 1) / (num_stages - 1)
    if schedule == "exponential":
        return sigma_start * (sigma_end / sigma_start) ** t
    return sigma_end + (sigma_start - sigma_end) * REMAINING[schedule](t)


def draw_z(seed: int, step: int, layer: int, which: int, size: int) -> torch.Tensor:
    """The noise of one norm at sigma 1: (size,) fp32. which: 0 = before attention, 1 = before MLP.

    It depends on these numbers alone, not on device, rank, or what was drawn before. So all ranks
    sample from one policy, and a resumed run draws the noise of an uninterrupted one. (numpy does
    not promise that another version of it turns Philox's bits into the same normal numbers.)

    Philox computes its n-th output directly from a key, here (seed, step), and n, a counter of four
    words, lowest first. layer and which are the two highest, so no two norms share any part of a
    stream. (A torch.Generator seeded by a hash of the four numbers would not do: on a CPU it keeps
    32 bits of its seed, too few to keep the many draws of a run apart.)
    """
    philox = np.random.Philox(key=[seed, step], counter=[0, 0, layer, which])
    return torch.from_numpy(np.random.Generator(philox).standard_normal(size, dtype=np.float32))


@contextmanager
def noisy_norms(model: Qwen, sigma: float, seed: int, step: int) -> Iterator[None]:
    """A context in which input_norm and post_norm of every layer have noise: for rollouts.

    The noise is written into the norms' buffers in place, because captured CUDA graphs read their
    addresses. At the end it is set to 0, also where an exception ends the context. Nothing that
    was computed inside, such as a KV cache, may be used outside.
    """
    norms = [(i, which, norm) for i, layer in enumerate(model.layers)
             for which, norm in enumerate((layer.input_norm, layer.post_norm))]
    assert not any(norm.noise.any() for _, _, norm in norms), \
        "a norm is noisy already: noisy_norms does not nest"
    try:
        if sigma > 0:
            for i, which, norm in norms:
                norm.noise.copy_(sigma * draw_z(seed, step, i, which, len(norm.noise)))
            # Is every norm reached, each with a buffer of its own? The authors' code looks for
            # Hugging Face's norm classes in vLLM's model, finds none, and adds its noise to nothing
            # without a word.
            hit = len({norm.noise.data_ptr() for _, _, norm in norms if norm.noise.any()})
            assert hit == 2 * len(model.layers) > 0, \
                f"noise hit {hit} norms of {len(model.layers)} layers"
        yield
    finally:
        for _, _, norm in norms:
            norm.noise.zero_()
