"""
A linear of the network = one frozen weight + one low-rank adapter (LoRA, arXiv 2106.09685):

    y = x @ W.T + (x @ A.T) @ (s * B).T          s = alpha / rank

W is frozen and may live in 4 bits; only A and B are trained (and, if asked, the two RMSNorm weights of a block, as
NVlabs/QeRL does through PEFT's modules_to_save).

Fused linears. q|k|v and gate|up are one matrix each: their `parts` are consecutive rows of W. Every part has an adapter
of its own: `a` stacks the parts' A along rows, `b` has one row per output row, so part p computes
    y[:, rows of p] += (x @ a[p*R:(p+1)*R].T) @ (s * b[rows of p]).T

One flat buffer. All A, all B (and trained norms) are views into one fp32 vector `Adapter.master`, their gradients views
into another: the optimizer sees one tensor, ranks all-reduce one tensor, a checkpoint writes one tensor. The sampler
and the learner compute with working copies in the model's dtype (16 bits on a GPU), `a16` and `b16 = s * b`, which
`Adapter.sync()` rewrites in place: CUDA graphs that captured their addresses see an update without a new capture.

K-augmentation. The learner dequantizes W into a scratch with room to the right and below,
              K      P*R
    wide = [  W   |  s*B  ]  N          (s*B block diagonal: a part sees its own x @ A.T only)
           [  A   |       ]  P*R
so that forward [x | x@A.T] @ wide[:N].T and backward [dy | dy@sB] @ wide[:, :K] are one matmul each: the adapter costs
(P*R)/K more columns instead of another pass over y.

Not here: dropout (the paper uses none), DoRA and the like, quantized adapters.

Shapes: M rows (tokens), N out_features, K in_features, R LoRA rank, P parts of a fused linear.
"""
import json
import math
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import nvfp4
from marlin_fp4 import mm, mm_fp32

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
VARIANTS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern")    # PEFT's other formulas

scratch = {}                                   # device, dtype -> one flat buffer, reused by every linear in turn


def write_atomically(path, data):
    """bytes -> file: a temporary file beside it, flushed to disk, then renamed over it. A crash leaves old or new."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)                            # what a full disk cut off


class Linear(torch.nn.Module):
    """Frozen weight (anything with N, K and dequantize(out)) plus an optional adapter. x (M, K) -> y (M, N) fp32.

    names: the Hugging Face module names of the parts, e.g. model.layers.0.self_attn.q_proj; parts: their row counts.
    """

    def __init__(self, weight, names, parts):
        super().__init__()
        assert sum(parts) == weight.N, f"parts {parts} of {names} do not add up to N={weight.N}"
        self.weight, self.names, self.parts = weight, names, parts
        self.a = self.b = self.a16 = self.b16 = None                 # set by Adapter
        self.scale = 0.0
        self.enabled = True                                          # False: the reference policy of a KL term

    @property
    def rank(self):
        return 0 if self.a is None or not self.enabled else self.a.shape[0] // len(self.parts)

    def forward(self, x):
        """x (M, K) in the compute dtype -> (M, N) fp32; differentiable in x, A and B."""
        a, b = (self.a, self.b) if self.rank else (None, None)
        return _LoraMatmul.apply(x, a, b, self)

    def wide(self, dtype):
        """The K-augmented matrix (N + P*R, K + P*R) of the docstring, valid until the next linear asks for its own."""
        n, k, pr = self.weight.N, self.weight.K, self.rank * len(self.parts)
        device = self.weight.device
        size = (n + pr) * (k + pr)
        key = (device, dtype)
        if key not in scratch or scratch[key].numel() < size:
            scratch.pop(key, None)                                   # free the smaller one first
            scratch[key] = torch.empty(size, device=device, dtype=dtype)
        wide = scratch[key][:size].view(n + pr, k + pr)
        self.weight.dequantize(out=wide[:n, :k])
        if pr:
            wide[n:, :k] = self.a16
            wide[:n, k:] = 0
            late = self.weight.late_scale                            # see marlin_fp4: y is multiplied by it afterwards
            for p, rows in enumerate(self.part_rows()):
                b = self.b16[rows] if late is None else self.b16[rows] / late[rows, None]
                wide[rows, k + p * self.rank:k + (p + 1) * self.rank] = b
        return wide

    def merged(self):
        """W + s * B @ A in fp32, (N, K): what an exported checkpoint holds."""
        w = self.weight.dequantize().float()
        if self.weight.late_scale is not None:
            w *= self.weight.late_scale[:, None]
        for p, rows in enumerate(self.part_rows() if self.rank else ()):
            w[rows] += self.scale * self.b.data[rows] @ self.a.data[p * self.rank:(p + 1) * self.rank]
        return w

    def part_rows(self):
        ends = torch.tensor(self.parts).cumsum(0).tolist()
        return [slice(end - size, end) for size, end in zip(self.parts, ends)]


def with_room(M, linear, like):
    """(M, K + P*R) for an x (M, K) that matmul() need not copy to have x @ A.T beside it."""
    return like.new_empty(M, linear.weight.K + linear.rank * len(linear.parts))


def matmul(x, linear, xa=None):
    """x (M, K) -> y (M, N) fp32 and what the backward needs: x, with x @ A.T beside it if there is an adapter.

    xa: with_room() whose first columns x is.
    """
    n, k = linear.weight.N, linear.weight.K
    assert x.dim() == 2 and x.shape[1] == k, f"{linear.names[0]}: x {tuple(x.shape)} does not fit K={k}"
    wide = linear.wide(x.dtype)
    if linear.rank and xa is None:
        xa = with_room(len(x), linear, x)
        xa[:, :k] = x
    if linear.rank:                                                  # x @ A.T is rounded to x's dtype, as when sampling
        xa[:, k:] = mm_fp32(x, linear.a16.T)
    xa = x if xa is None else xa
    y = mm_fp32(xa, wide[:n].T)
    return (y if linear.weight.late_scale is None else y.mul_(linear.weight.late_scale)), xa


def gradient_buffer(xa, linear, rank):
    """Where dL/dy (M, N) goes, as the first columns of (M, N + P*R): the rest is matmul_backward's."""
    return torch.empty(xa.shape[0], linear.weight.N + rank * len(linear.parts), device=xa.device, dtype=xa.dtype)


def matmul_backward(xa, dy, linear, rank, needs_ab):
    """xa of matmul(), gradient_buffer() with dL/dy filled in -> dL/dx (M, K) in x's dtype, dL/dA, dL/dB fp32 or None.

    Dequantizes W again rather than keep it alive since the forward.
    """
    assert rank == linear.rank, f"{linear.names[0]}: adapter switched between forward and backward"
    n, k, late = linear.weight.N, linear.weight.K, linear.weight.late_scale
    wide = linear.wide(xa.dtype)
    if late is not None:
        dy[:, :n] *= late
    if rank:
        dy[:, n:] = mm_fp32(dy[:, :n], wide[:n, k:])                 # dL/d(x @ A.T) (M, P*R)
    dx = mm(dy, wide[:, :k], xa.dtype)
    if not (rank and needs_ab):
        return dx, None, None
    da = mm_fp32(dy[:, n:].T, xa[:, :k])                             # (P*R, K)
    db = torch.empty_like(linear.b)
    for p, rows in enumerate(linear.part_rows()):
        db[rows] = linear.scale * mm_fp32(dy[:, rows].T, xa[:, k + p * rank:k + (p + 1) * rank])
    return dx, da, (db if late is None else db.div_(late[:, None]))


class _LoraMatmul(torch.autograd.Function):
    """y = x @ W.T + adapter."""

    @staticmethod
    def forward(ctx, x, a, b, linear):
        y, xa = matmul(x, linear)
        ctx.linear, ctx.rank = linear, linear.rank
        ctx.save_for_backward(xa)
        return y

    @staticmethod
    def backward(ctx, dy):
        xa, = ctx.saved_tensors
        buffer = gradient_buffer(xa, ctx.linear, ctx.rank)
        buffer[:, :dy.shape[1]] = dy
        return *matmul_backward(xa, buffer, ctx.linear, ctx.rank, ctx.needs_input_grad[1]), None


class Adapter:
    """The LoRA matrices of every Linear of a model (and, with norms=True, its block norms) as one flat fp32 vector.

    master: Parameter (n,), what the optimizer steps; master.grad: its flat gradient, zeroed with `zero_grad()`.
    After each change of master call `sync()`: the sampler and the learner read 16-bit copies.
    A starts uniform in +-1/sqrt(K) (PEFT's Kaiming default), B at zero: the first forward equals the base bit for bit.
    """

    def __init__(self, model, rank=32, alpha=32, norms=False, seed=0):
        assert rank >= 1, f"rank must be at least 1, got {rank}"
        self.rank, self.alpha, self.norms = rank, alpha, norms
        self.linears = [m for m in model.modules() if isinstance(m, Linear)]
        trained = [norm for layer in model.layers for norm in (layer.input_norm, layer.post_norm)] if norms else []
        device = self.linears[0].weight.device
        shapes = [(len(lin.parts) * rank, lin.weight.K) for lin in self.linears]            # every A
        shapes += [(lin.weight.N, rank) for lin in self.linears]                            # then every B
        shapes += [tuple(norm.weight.shape) for norm in trained]                            # then norms
        offsets, n = [], 0
        for shape in shapes:
            offsets.append(n)
            n += -(-math.prod(shape) // 128) * 128                   # 256-byte aligned bf16 views, for 16-byte loads
        self.master = torch.nn.Parameter(torch.zeros(n, device=device))
        self.master.grad = torch.zeros_like(self.master)
        self.working = torch.zeros(n, device=device, dtype=model.dtype)
        self.b_start, self.norm_start = offsets[len(self.linears)], (offsets + [n])[2 * len(self.linears)]

        def view(flat, i):
            return flat[offsets[i]:offsets[i] + math.prod(shapes[i])].view(shapes[i])

        def leaf(i):                                                 # its storage and .grad live in the flat vectors
            t = view(self.master.data, i).requires_grad_()
            t.grad = view(self.master.grad, i)
            return t

        generator = torch.Generator().manual_seed(seed)
        for i, lin in enumerate(self.linears):
            lin.a, lin.b, lin.scale = leaf(i), leaf(i + len(self.linears)), alpha / rank
            lin.a16, lin.b16 = view(self.working, i), view(self.working, i + len(self.linears))
            bound = lin.weight.K ** -0.5
            lin.a.data.copy_(torch.rand(lin.a.shape, generator=generator) * 2 * bound - bound)
        for i, norm in enumerate(trained, 2 * len(self.linears)):
            view(self.master.data, i).copy_(norm.weight)
            norm.weight = torch.nn.Parameter(leaf(i))
            norm.weight.grad = view(self.master.grad, i)
        model.adapter = self
        self.sync()

    def sync(self):
        """master -> 16-bit working copies, in place: A as it is, B times alpha / rank."""
        with torch.no_grad():
            self.working[:self.b_start] = self.master[:self.b_start]
            b = slice(self.b_start, self.norm_start)
            self.working[b] = self.master[b] * (self.alpha / self.rank)

    def zero_grad(self):
        self.master.grad.zero_()

    @contextmanager
    def off(self):
        """Within: the base alone, the reference policy of the KL term. (Trained norms stay as they are.)"""
        for lin in self.linears:
            lin.enabled = False
        try:
            yield
        finally:
            for lin in self.linears:
                lin.enabled = True


def _named_views(model):
    """(PEFT tensor name, view into the fp32 master) of everything that is trained, part by part."""
    adapter = model.adapter
    for lin in adapter.linears:
        for p, (name, rows) in enumerate(zip(lin.names, lin.part_rows())):
            yield f"base_model.model.{name}.lora_A.weight", lin.a.data[p * adapter.rank:(p + 1) * adapter.rank]
            yield f"base_model.model.{name}.lora_B.weight", lin.b.data[rows]
    if adapter.norms:
        for i, layer in enumerate(model.layers):
            for name, norm in zip(NORMS, (layer.input_norm, layer.post_norm)):
                yield f"base_model.model.model.layers.{i}.{name}.weight", norm.weight.data


def save_adapter(model, folder):
    """Write the adapter as PEFT does: adapter_config.json and adapter_model.safetensors (fp32), each atomically."""
    adapter, folder = model.adapter, Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model.name),
              "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0, "bias": "none",
              "target_modules": list(TARGETS),
              "modules_to_save": list(NORMS) if adapter.norms else None, "fan_in_fan_out": False,
              "init_lora_weights": True, "inference_mode": True}
    tensors = {name: view.cpu().contiguous() for name, view in _named_views(model)}
    write_atomically(folder / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / "adapter_config.json", json.dumps(config, indent=2).encode())


def merge(model, folder):
    """Write the model with its adapter merged as a bf16 Hugging Face folder (new or empty), shard by shard."""
    assert model.folder is not None, f"{model.name}: random weights have no config and tokenizer to copy"
    with nvfp4.new_folder(folder) as new:
        nvfp4.save_shards(((name, t.detach().bfloat16().cpu()) for name, t in model.tensors()), new)
        config = nvfp4.read_json(model.folder / "config.json") | {"torch_dtype": "bfloat16"}
        config.pop("quantization_config", None)
        nvfp4.write_json(new / "config.json", config)
        nvfp4.copy_companions(model.folder, new)


def load_adapter(model, folder):
    """Attach the adapter in a PEFT folder. ValueError names what is missing, left over or of another shape."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: not a readable PEFT adapter folder ({error})") from None
    variants = [key for key in VARIANTS if config.get(key)]
    if config.get("peft_type") != "LORA" or variants or set(config.get("target_modules") or ()) != set(TARGETS):
        raise ValueError(f"{folder}: need a plain LoRA adapter on {', '.join(TARGETS)}, got "
                         f"{config.get('peft_type')} on {config.get('target_modules')} {' '.join(variants)}")
    if not {"r", "lora_alpha"} <= config.keys():
        raise ValueError(f"{folder}/adapter_config.json: needs r and lora_alpha, has {', '.join(config)}")
    Adapter(model, config["r"], config["lora_alpha"], norms=bool(config.get("modules_to_save")))
    views = dict(_named_views(model))
    wrong = sorted(set(views) ^ set(tensors))
    wrong += [n for n in views if n in tensors and views[n].shape != tensors[n].shape]
    if wrong:
        raise ValueError(f"{folder}: {len(wrong)} tensors are missing, unknown or of another shape, first {wrong[0]}")
    for name, view in views.items():
        view.copy_(tensors[name])
    model.adapter.sync()
