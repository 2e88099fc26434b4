"""
Adaptive quantization noise (AQN; QeRL, section 3.3): Gaussian noise on the norms while sampling,
for exploration.

    norm(x) = (w + noise) * x / rms(x),   noise = sigma * z,   z ~ N(0, 1), (D,), one draw per step

For the linears after a norm this is the same as multiplying column i of their weight matrix by
1 + noise_i / w_i (Appendix G), so D numbers perturb an entire matrix without touching the 4-bit
kernels. q, k and v share input_norm's z, gate and up share post_norm's; o, down and lm_head get no
noise. The noise doesn't scale with w: in relative terms, a channel with w = 0.1 moves ten times as
far as one with w = 1.

Despite its name AQN isn't adaptive: sigma follows a fixed schedule. It is 0 in the first of K
stages, when rounding to 4 bits is noise enough, and then falls from sigma_start towards sigma_end,
which it doesn't quite reach.

Only rollouts are noisy. The learner and evaluations aren't; grpo.py corrects for the difference.

Not here: noise in the learner, noise in proportion to each weight, one z per answer
(docs/forking.md), a sigma controlled by a target KL divergence.
"""
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from model import Transformer

# Each is a function of sigma_start, sigma_end and t, which is 0 in the first noisy stage and
# (K - 2) / (K - 1) in the last. The paper's default is exponential; the others are in its Figures 9
# and 15.
SCHEDULES = {
    "exponential": lambda start, end, t: start * (end / start) ** t,
    "linear": lambda start, end, t: end + (start - end) * (1 - t),
    "cosine": lambda start, end, t: end + (start - end) * ((1 + math.cos(math.pi * t)) / 2),
    "log": lambda start, end, t: end + (start - end) * (1 - math.log10(1 + 9 * t)),
}


def sigma_at(step: int, total_steps: int, sigma_start: float, sigma_end: float, num_stages: int,
             schedule: str = "exponential") -> float:
    """The standard deviation of a step's noise (Eq. 8, Algorithm 1). A run of M = total_steps is
    divided into K = num_stages stages of floor(M / K) steps; the last also gets the remainder.

        k     = min(floor(step / max(floor(M / K), 1)), K - 1)            step counts from 0
        sigma = 0                                             k = 0
        sigma = start * (end / start)^((k - 1) / (K - 1))     k >= 1

    sigma_at(60, 600, 1e-2, 5e-4, 10) == 1e-2. sigma_start 0 or a single stage means no noise. With
    fewer steps than stages, each step is a stage and the last stages are never reached. The other
    SCHEDULES replace the power.
    """
    assert schedule in SCHEDULES, f"{schedule!r} is not one of {list(SCHEDULES)}"
    assert 0 <= step and total_steps >= 1 and num_stages >= 1, (step, total_steps, num_stages)
    assert sigma_start == 0 or 0 < sigma_end <= sigma_start, \
        f"need 0 < {sigma_end=} <= {sigma_start=}, or start 0"
    stage = min(step // max(total_steps // num_stages, 1), num_stages - 1)
    if stage == 0 or sigma_start == 0:
        return 0.0
    # The authors' code divides by K - 2, so its last stage reaches `end`. To reproduce its scripts'
    # schedule (1e-2 to 1e-4, K = 10), set `end` to 5.62e-5.
    t = (stage - 1) / (num_stages - 1)
    return SCHEDULES[schedule](sigma_start, sigma_end, t)


def draw_z(seed: int, step: int, layer: int, which: int, size: int) -> torch.Tensor:
    """The z of one norm: (size,) fp32, standard normal. which: 0 before attention, 1 before the
    MLP.

    It depends only on these arguments, not on device, rank or earlier draws, so all ranks sample
    from one policy and a resumed run draws the same noise as an uninterrupted one.
    """
    # Philox computes its output from a key and a counter of four words, lowest first. layer and
    # which are the highest two, so no two norms' streams overlap. (A torch.Generator is worse: on a
    # CPU it keeps only 32 bits of its seed.)
    philox = np.random.Philox(key=[seed, step], counter=[0, 0, layer, which])
    return torch.from_numpy(np.random.Generator(philox).standard_normal(size, dtype=np.float32))


@contextmanager
def noisy_norms(model: Transformer, sigma: float, seed: int, step: int) -> Iterator[None]:
    """A context for rollouts, in which every layer's input_norm and post_norm have noise.

    Don't use anything computed inside, such as a KV cache, afterwards. These contexts don't nest.
    """
    norms = [(i, which, norm) for i, layer in enumerate(model.layers)
             for which, norm in enumerate((layer.input_norm, layer.post_norm))]
    assert not any(norm.noise.any() for _, _, norm in norms), \
        "a norm is already noisy: noisy_norms does not nest"
    try:
        if sigma > 0:
            # One z per step, as in the authors' code. With one per forward pass (the paper, above
            # Eq. 7) the tokens of one answer would come from different policies.
            for i, which, norm in norms:
                # In place, because captured CUDA graphs read this address; in an fp32 buffer,
                # because bf16 weights would round most small noise away.
                norm.noise.copy_(sigma * draw_z(seed, step, i, which, len(norm.noise)))
            # Make sure noise hit both norms of every layer. The authors' code looks for Hugging
            # Face's norm classes in vLLM's model, finds none, and silently adds no noise.
            hit = len({norm.noise.data_ptr() for _, _, norm in norms if norm.noise.any()})
            assert hit == 2 * len(model.layers) > 0, \
                f"noise hit {hit} norms of {len(model.layers)} layers"
        yield
    finally:
        for _, _, norm in norms:
            norm.noise.zero_()
