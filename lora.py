"""
A linear of the network = one frozen weight + one low-rank adapter (LoRA, arXiv 2106.09685):

    y = x @ W.T + (x @ A.T) @ (s * B).T          s = alpha / rank

W is frozen and may live in 4 bits; A and B are trained (and, if asked, the two norms of a layer:
PEFT's modules_to_save).

Fused linears. q|k|v and gate|up are one matrix each: their `parts` are consecutive rows of W. Every
part has an adapter of its own: `a` stacks the parts' A, `b` has one row per output row, so
    y[:, rows of p] += (x @ a[p*R:(p+1)*R].T) @ (s * b[rows of p]).T

One flat buffer. All A, all B (and trained norms) are views into one fp32 vector `master`, their
gradients into another: optimizer, ranks and checkpoints see one tensor. Sampler and learner compute
with copies in the model's dtype, `working_a` and `working_b` = s * b, which `sync()` rewrites in
place, where CUDA graphs captured them.

K-augmentation. The learner expands W into a buffer with room to the right and below,
              K      P*R
    wide = [  W   |  s*B  ]  N          (s*B block diagonal: a part sees its own x @ A.T only)
           [  A   |       ]  P*R
so that forward [x | x@A.T] @ wide[:N].T and backward [dy | dy@sB] @ wide[:, :K] are one matmul
each: the adapter costs (P*R)/K more columns instead of another pass over y.

Not here: the sampler's kernels, which compute the same (decode.partial).

Shapes: M rows (tokens), N out_features, K in_features, R LoRA rank, P parts of a fused linear.
"""
import math
from contextlib import contextmanager
from itertools import chain

import torch

from harness import hf
from ops import mm, mm_fp32


class Scratch:
    """One buffer for the expanded matrices of all linears of a model, one at a time."""

    def __init__(self):
        self.flat = None

    def view(self, rows, columns, dtype, device):
        """(rows, columns), holding anything; valid until the next linear asks."""
        size = rows * columns
        if self.flat is None or len(self.flat) < size or self.flat.dtype != dtype:
            self.flat = None                                     # free the smaller one first
            self.flat = torch.empty(size, dtype=dtype, device=device)
        return self.flat[:size].view(rows, columns)


class Linear(torch.nn.Module):
    """An nvfp4.Weight plus an optional adapter.

    names: Hugging Face's of the parts (model.layers.0.self_attn.q_proj); parts: their row counts.
    """

    def __init__(self, weight, names, parts, scratch=None):
        super().__init__()
        assert sum(parts) == weight.N, f"parts {parts} of {names} do not add up to N={weight.N}"
        self.weight = weight
        self.names = names
        self.parts = parts
        self.scratch = scratch or Scratch()
        self.adapter = None                      # Adapter sets this and its views:
        self.a = self.b = None                   # fp32 A (P*R, K), B (N, R), trained
        self.working_a = self.working_b = None   # in dtype, B times s

    @property
    def rank(self):
        """R, 0 without adapter."""
        return self.adapter.rank if self.adapter and self.adapter.enabled else 0

    def trained(self):
        """A and B, for autograd to hand gradients to."""
        return (self.a, self.b) if self.rank else (None, None)

    def forward(self, x):
        """x (M, K) in the compute dtype -> (M, N) fp32; differentiable in x, A and B."""
        k = self.weight.K
        assert x.dim() == 2 and x.shape[1] == k, f"{self.names[0]}: x {tuple(x.shape)}, not K={k}"
        return _Product.apply(x, *self.trained(), self)

    def wide(self):
        """The matrix (N + P*R, K + P*R) at the top of this file, in the shared buffer."""
        n = self.weight.N
        k = self.weight.K
        pr = self.rank * len(self.parts)
        wide = self.scratch.view(n + pr, k + pr, self.weight.dtype, self.weight.device)
        self.weight.dequantize(out=wide[:n, :k])
        if pr:
            wide[n:, :k] = self.working_a
            wide[:n, k:] = torch.block_diag(*self.working_b.split(self.parts))
        return wide

    def room(self, rows, columns):
        """Empty (rows, columns + P*R): x (M, K) or dL/dy (M, N) goes to the first columns."""
        columns += self.rank * len(self.parts)
        return torch.empty(rows, columns, dtype=self.weight.dtype, device=self.weight.device)

    def padded(self, x):
        """x, or dL/dy, rounded and in a room()."""
        if not self.rank:
            return x.to(self.weight.dtype)
        room = self.room(*x.shape)
        room[:, :x.shape[1]] = x
        return room

    def product(self, xa):
        """x (M, K) in a room() -> y (M, N) fp32. Writes x @ A.T beside x, for the backward too."""
        k = self.weight.K
        if self.rank:
            xa[:, k:] = mm_fp32(xa[:, :k], self.working_a.T)     # rounded, as when sampling
        return mm_fp32(xa, self.wide()[:self.weight.N].T)

    def product_backward(self, xa, dy, needs_ab):
        """xa of product(), dL/dy in a room() -> dL/dx (M, K), dL/dA, dL/dB fp32 or None.

        Expands W again rather than keep it alive since the forward.
        """
        n = self.weight.N
        k = self.weight.K
        wide = self.wide()
        assert xa.shape[1] == wide.shape[1], \
            f"{self.names[0]}: adapter switched between forward and backward"
        if self.rank:
            dy[:, n:] = mm_fp32(dy[:, :n], wide[:n, k:])         # dL/d(x @ A.T) (M, P*R)
        dx = mm(dy, wide[:, :k])
        if not (self.rank and needs_ab):
            return dx, None, None
        da = mm_fp32(dy[:, n:].T, xa[:, :k])                     # (P*R, K)
        of_parts = zip(dy[:, :n].split(self.parts, dim=1), xa[:, k:].split(self.rank, dim=1))
        db = torch.cat([mm_fp32(rows.T, own) for rows, own in of_parts])
        return dx, da, self.adapter.scale * db

    def merged(self):
        """W + s * B @ A in fp32, (N, K): what an exported checkpoint holds."""
        w = torch.empty(self.weight.N, self.weight.K, device=self.weight.device)
        self.weight.dequantize(out=w)
        self.weight.dense = None                 # used once here
        if self.rank:
            b = self.adapter.scale * self.b.data
            w += torch.block_diag(*b.split(self.parts)) @ self.a.data
        return w


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, linear):
        xa = linear.padded(x)
        ctx.linear = linear
        ctx.save_for_backward(xa)
        return linear.product(xa)

    @staticmethod
    def backward(ctx, dy):
        xa, = ctx.saved_tensors
        linear = ctx.linear
        needs_ab = ctx.needs_input_grad[1]
        return *linear.product_backward(xa, linear.padded(dy), needs_ab), None


class Adapter:
    """The LoRA matrices of every Linear of a model (with norms=True also its layers' norms).

    After each change of master call sync(). A starts uniform in +-1/sqrt(K) (PEFT's default), B at
    zero: the first forward equals the base but for the order of a matmul's sums.
    """

    def __init__(self, model, rank=32, alpha=32, norms=False, seed=0):
        assert rank >= 1, f"rank must be at least 1, got {rank}"
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank                                # s
        self.norms = norms
        self.enabled = True
        self.linears = [m for m in model.modules() if isinstance(m, Linear)]
        layers = model.layers if norms else []
        trained = [norm for layer in layers for norm in (layer.input_norm, layer.post_norm)]
        self.shapes = [(len(lin.parts) * rank, lin.weight.K) for lin in self.linears]   # every A,
        self.shapes += [(lin.weight.N, rank) for lin in self.linears]                   # every B,
        self.shapes += [norm.weight.shape for norm in trained]                          # norms
        self.offsets = [0]
        for shape in self.shapes:                # 256-byte aligned bf16 views, for 16-byte loads
            self.offsets.append(self.offsets[-1] + -(-math.prod(shape) // 128) * 128)
        self.b_start = self.offsets[len(self.linears)]
        self.norm_start = self.offsets[2 * len(self.linears)]
        device = self.linears[0].weight.device
        self.master = torch.nn.Parameter(torch.zeros(self.offsets[-1], device=device))
        self.master.grad = torch.zeros_like(self.master)
        self.working = torch.zeros_like(self.master.data, dtype=model.dtype)

        leaves = self.views(self.master.data)
        for leaf, gradient in zip(chain(*leaves), chain(*self.views(self.master.grad))):
            leaf.requires_grad_().grad = gradient
        generator = torch.Generator().manual_seed(seed)
        for lin, a, b, working_a, working_b in zip(self.linears, *leaves[:2],
                                                   *self.views(self.working)[:2]):
            lin.adapter = self
            lin.a = a
            lin.b = b
            lin.working_a = working_a
            lin.working_b = working_b
            bound = lin.weight.K ** -0.5
            a.data.copy_(torch.rand(a.shape, generator=generator) * 2 * bound - bound)
        for leaf, norm in zip(leaves[2], trained):
            leaf.data.copy_(norm.weight)
            norm.weight = torch.nn.Parameter(leaf)
            norm.weight.grad = leaf.grad
        model.adapter = self
        self.sync()

    def views(self, flat):
        """A flat vector like master -> views of every A, of every B, and of the trained norms."""
        n = len(self.linears)
        views = [flat[at:at + math.prod(shape)].view(shape)
                 for at, shape in zip(self.offsets, self.shapes)]
        return views[:n], views[n:2 * n], views[2 * n:]

    def sync(self):
        """master -> 16-bit working copies, in place: A as it is, B times alpha / rank."""
        with torch.no_grad():
            self.working[:self.b_start] = self.master[:self.b_start]
            b = slice(self.b_start, self.norm_start)
            self.working[b] = self.master[b] * self.scale

    @contextmanager
    def off(self):
        """Within: the base alone, the reference policy of a KL term. (Trained norms stay.)"""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def named(self, flat):
        """Yields (PEFT tensor name, view into a flat vector like master), part by part."""
        all_a, all_b, norms = self.views(flat)
        for lin, a, b in zip(self.linears, all_a, all_b):
            for name, part_a, part_b in zip(lin.names, a.split(self.rank), b.split(lin.parts)):
                yield f"base_model.model.{name}.lora_A.weight", part_a
                yield f"base_model.model.{name}.lora_B.weight", part_b
        for i, norm in enumerate(norms):
            yield f"base_model.model.model.layers.{i // 2}.{hf.NORMS[i % 2]}.weight", norm


def save_adapter(model, folder, master=None):
    """Write the adapter as PEFT does, fp32. master: a flat vector to write instead of its own."""
    adapter = model.adapter
    flat = adapter.master.data if master is None else master
    tensors = {name: view.cpu().contiguous() for name, view in adapter.named(flat)}
    hf.write_peft(folder, tensors, model.name, adapter.rank, adapter.alpha, adapter.norms)


def load_adapter(model, folder):
    """Attach the adapter in a PEFT folder. ValueError names what is missing or does not fit."""
    config, tensors = hf.read_peft(folder)
    Adapter(model, config["r"], config["lora_alpha"], norms=bool(config.get("modules_to_save")))
    hf.copy_into(dict(model.adapter.named(model.adapter.master.data)), tensors, folder)
    model.adapter.sync()
