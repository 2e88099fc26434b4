"""
A linear of the network: a frozen weight W, in 4 or 16 bits, plus a trained product of two small
matrices (LoRA, arXiv 2106.09685):

    y = x @ W.T + (x @ A.T) @ (s * B).T          A (R, K), B (N, R), s = alpha / rank

    adapter = attach(model, rank=32, alpha=32)   # every Linear of the model gets its A and B
    adapters.save_adapter(model, folder)         # as PEFT writes it; load_adapter reads it

Only the adapter, A and B of every linear, is trained.

Fused linears. q|k|v are one matrix here, and so are gate|up; their `parts` are consecutive rows of
W. Every part has its own A and B. `a` stacks the parts' A, `b` has one row per output row:
    y[:, rows of part p] += (x @ a[p*R:(p+1)*R].T) @ (s * b[rows of part p]).T

One flat buffer. All A and all B are views into one fp32 vector, `master`, and their gradients are
views into another, so the optimizer, the sum over GPUs and checkpoints handle a single tensor.
The sampler and the learner compute with copies in the model's dtype (bf16 on a GPU), `working_a`
and `working_b` = s * b. sync() rewrites them in place, because CUDA graphs have captured their
addresses.

GPU versions: fast/backward.py for the learner (one product), launch_matmul() in fast/decode.py for
the sampler.

Shapes: M rows (tokens), N out_features, K in_features, R LoRA rank, P parts of a fused linear.
"""
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nvfp4 import Weight
from ops import mm_fp32, replaced_on_gpu, rounded

# -----------------------------------------------------------------------------
# A linear

class Linear(torch.nn.Module):
    """A frozen nvfp4.Weight plus, once a model has an adapter, this linear's A and B.

    names: Hugging Face's names of the parts, such as model.layers.0.self_attn.q_proj.
    parts: how many rows of W each part has.
    """

    def __init__(self, weight: Weight, names: list[str], parts: tuple[int, ...]):
        super().__init__()
        assert sum(parts) == weight.N, f"parts {parts} of {names} do not add up to N={weight.N}"
        self.weight = weight
        self.names = names
        self.parts = parts
        self.adapter = None                      # attach() sets these five:
        self.a = self.b = None                   # fp32 A (P*R, K) and B (N, R), trained; see .grad
        self.working_a = self.working_b = None   # A and s * B in the model's dtype

    @property
    def rank(self) -> int:
        """R, or 0 if there is no adapter or it is switched off."""
        return self.adapter.rank if self.adapter and self.adapter.enabled else 0

    def forward(self, x: Tensor) -> Tensor:
        """x (M, K) in the model's dtype -> y (M, N) fp32."""
        k = self.weight.K
        assert x.dim() == 2 and x.shape[1] == k, f"{self.names[0]}: x {tuple(x.shape)}, not K={k}"
        return linear(x, self)

    def matrix(self) -> Tensor:
        """W (N, K) in the model's dtype; full.Linear's gets a gradient."""
        return self.weight.dequantize()

    def merged(self) -> Tensor:
        """W + s * B @ A in fp32, (N, K), as in an exported checkpoint."""
        w = torch.empty(self.weight.N, self.weight.K, device=self.weight.device)
        self.weight.dequantize(out=w)
        self.weight.dense = None                 # drop the copy that a CPU keeps
        if self.rank:
            b = self.adapter.scale * self.b.data
            w += torch.block_diag(*b.split(self.parts)) @ self.a.data
        return w


@replaced_on_gpu
def linear(x: Tensor, layer: Linear) -> Tensor:
    """Linear.forward: y = x @ W.T + (x @ A.T) @ (s * B).T, part by part.

    x @ A.T is rounded to the dtype of x, as in the sampler's kernels.
    """
    y = mm_fp32(x, layer.matrix().T)
    if not layer.rank:
        return y
    # The values are the rounded copies, the gradients those of a and s * b.
    a = rounded(layer.a, layer.working_a)
    b = rounded(layer.b * layer.adapter.scale, layer.working_b)
    xa = mm_fp32(x, a.T).to(x.dtype)
    pairs = zip(xa.split(layer.rank, dim=1), b.split(layer.parts))
    return y + torch.cat([mm_fp32(part_xa, part_b.T) for part_xa, part_b in pairs], dim=1)


# -----------------------------------------------------------------------------
# The adapter

class Adapter:
    """All trained parameters in one flat fp32 vector; attach() makes one for a model.

    master           all A, then all B; fp32; its .grad has the same layout
    working          the copies in `dtype` that the sampler and the learner use; same layout

        |  A of linear 0  |  A of 1  | ... |  B of 0  |  B of 1  | ... |
        0                                  b_start

    Call sync() after changing master. Clear the gradients with master.grad.zero_(). The zero_grad()
    of an optimizer or a module would drop the tensor while the linears keep adding to it, and their
    gradients would be lost.
    """

    def __init__(self, linears: list[Linear], rank: int, alpha: float, dtype: torch.dtype):
        assert rank >= 1, f"rank must be at least 1, got {rank}"
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank                                # s
        self.enabled = True                                      # see off()
        self.linears = linears
        self.shapes = [(len(linear.parts) * rank, linear.weight.K) for linear in linears]
        self.shapes += [(linear.weight.N, rank) for linear in linears]
        self.offsets = [0]
        for shape in self.shapes:
            # Each view starts at a multiple of 128 numbers (256 bytes in bf16), because kernels
            # load 16 bytes at a time, from aligned addresses only.
            self.offsets.append(self.offsets[-1] + -(-math.prod(shape) // 128) * 128)
        self.b_start = self.offsets[len(linears)]
        device = linears[0].weight.device
        self.master = torch.nn.Parameter(torch.zeros(self.offsets[-1], device=device))
        self.master.grad = torch.zeros_like(self.master)
        self.working = torch.zeros_like(self.master.data, dtype=dtype)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """A vector laid out like master -> views of every A, then of every B."""
        return [flat[at:at + math.prod(shape)].view(shape)
                for at, shape in zip(self.offsets, self.shapes)]

    @torch.no_grad()
    def sync(self, master: Tensor | None = None) -> None:
        """Rewrites the working copies from master, in place: A unchanged, B times alpha / rank.

        master: another parameter vector (older weights, an average) to sample, train and evaluate
        with instead, until the next sync().
        """
        master = self.master if master is None else master
        self.working[:self.b_start] = master[:self.b_start]
        self.working[self.b_start:] = master[self.b_start:] * self.scale

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which the model computes without A and B, as the KL term's reference."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def peft_tensors(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A vector laid out like master -> (PEFT's name, view) of each part's A and B."""
        views = self.unflatten(flat)
        for linear, a, b in zip(self.linears, views, views[len(self.linears):]):
            for name, part_a, part_b in zip(linear.names, a.split(self.rank),
                                            b.split(linear.parts)):
                yield f"base_model.model.{name}.lora_A.weight", part_a
                yield f"base_model.model.{name}.lora_B.weight", part_b


def attach(model: torch.nn.Module, rank: int = 32, alpha: float = 32, seed: int = 0) -> Adapter:
    """Gives every Linear of a model its A and B, as model.adapter.

    Any previous adapter is dropped. An existing Sampler uses the new one; an existing Learner
    doesn't, so make another. A starts uniform in +-1/sqrt(K), as in PEFT, drawn from `seed`. B
    starts at zero, so the first forward pass equals the base model's, up to summation order.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    adapter = Adapter(linears, rank, alpha, model.dtype)

    leaves = adapter.unflatten(adapter.master.data)
    for leaf, gradient in zip(leaves, adapter.unflatten(adapter.master.grad)):
        leaf.requires_grad_().grad = gradient    # autograd adds to it in place
    copies = adapter.unflatten(adapter.working)
    n = len(linears)
    generator = torch.Generator().manual_seed(seed)
    for i, linear in enumerate(linears):
        linear.adapter = adapter
        linear.a, linear.b = leaves[i], leaves[n + i]
        linear.working_a, linear.working_b = copies[i], copies[n + i]
        bound = linear.weight.K ** -0.5
        uniform = torch.rand(linear.a.shape, generator=generator) * 2 * bound - bound
        linear.a.data.copy_(uniform)
    model.adapter = adapter
    adapter.sync()
    return adapter
