"""
The door to the GPU kernels, and two operations whose backward is written by hand (attention's is in
attention.py, a linear's in lora.py): autograd would keep or move gigabytes.

    mlp              down(silu(gate) * up): gradients between its matmuls are 16-bit
    token_logprobs   log softmax at the sampled tokens, without the (T, V) tensor

The door. A function marked `twin_in_kernels` is plain torch and complete. Where its first tensor is
on a GPU, the function of the same name in kernels.py runs instead: Triton kernels that move each
number once. A machine without Triton never opens that file.

Shapes: T tokens, D width, F feed-forward, V vocabulary, M rows, N out_features, K in_features.
"""
import functools

import torch
import torch.nn.functional as F


def twin_in_kernels(reference):
    """The door; `.reference` is the torch function."""
    @functools.wraps(reference)
    def either(*arguments, **options):
        tensor = next(a for a in arguments if isinstance(a, torch.Tensor))
        if not tensor.is_cuda:
            return reference(*arguments, **options)
        from fast import kernels
        return getattr(kernels, reference.__name__)(*arguments, **options)
    either.reference = reference
    return either


@twin_in_kernels
def elementwise(function, x, *rest):
    """function(x, *rest); on a GPU compiled into one kernel, where a gradient is wanted."""
    return function(x, *rest)


def mm_fp32(a, b, out=None):
    """a (M, K) @ b (K, N) -> fp32: in 16 bits sampler and learner would be twice as far apart."""
    assert a.dtype == b.dtype, f"{a.dtype} @ {b.dtype}"          # GPUs refuse it
    if not a.is_cuda or a.dtype == torch.float32:
        return torch.mm(a.float(), b.float(), out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def mm(a, b):
    """a @ b with fp32 sums, rounded once to their dtype."""
    return torch.mm(a, b) if a.is_cuda else mm_fp32(a, b).to(a.dtype)


# -----------------------------------------------------------------------------
# The MLP

@twin_in_kernels
def swiglu(y, rstd, h, keep=True):
    """y (T, 2F) fp32, gate|up's result, and rstd (T, 1) 1/rms -> y in h's dtype, if kept.

    Writes silu(gate) * up into h (T, F), rows of any stride.
    """
    gate, up = (y * rstd).chunk(2, dim=-1)
    h.copy_(F.silu(gate) * up)
    return y.to(h.dtype)


@twin_in_kernels
def swiglu_backward(y, rstd, dh, dy):
    """dh (T, F): dL/dh. Writes dL/dy into dy (T, 2F), rows of any stride; -> dL/drstd (T, 1)."""
    gate, up = (y * rstd).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    silu = gate * s
    dz = torch.cat([dh * up * (s + silu * (1 - s)), dh * silu], dim=-1)
    dy.copy_(dz * rstd)
    return (dz * y).sum(-1, keepdim=True, dtype=rstd.dtype)


class _Mlp(torch.autograd.Function):
    """One function, not three: the gradients between them would be fp32, and h would be copied to
    stand beside h @ A.T. The backward reads y rounded: half of what a layer has to keep.
    """

    @staticmethod
    def forward(ctx, x, rstd, gate_up, down, *_):
        xa = gate_up.widened(x)
        y = gate_up.product(xa)
        ha = down.empty_wide(len(x), down.weight.K)
        y = swiglu(y, rstd, ha[:, :down.weight.K], keep=ctx.needs_input_grad[0])
        ctx.linears = gate_up, down
        ctx.save_for_backward(xa, y, rstd, ha)
        return down.product(ha)

    @staticmethod
    def backward(ctx, dout):
        xa, y, rstd, ha = ctx.saved_tensors
        gate_up, down = ctx.linears
        *_, needs_gate_up, _, needs_down, _ = ctx.needs_input_grad
        dh, *of_down = down.product_backward(ha, down.widened(dout), needs_down)
        dy = gate_up.empty_wide(*y.shape)
        drstd = swiglu_backward(y, rstd, dh, dy[:, :y.shape[1]])
        dx, *of_gate_up = gate_up.product_backward(xa, dy, needs_gate_up)
        return dx, drstd, None, None, *of_gate_up, *of_down


def mlp(gate_up, down, x, rstd):
    """down(silu(gate) * up), gate|up = gate_up(x) * rstd; x (T, D), rstd (T, 1) -> (T, D) fp32."""
    return _Mlp.apply(x, rstd, gate_up, down, *gate_up.trained(), *down.trained())


# -----------------------------------------------------------------------------
# Log-probs

@twin_in_kernels
def softmax_at(products, scale, targets, live, dtype=None):
    """Softmax of logits = products[:, :live] * scale at `targets`; overwrites products.

    products (c, V) fp32, scale (c, 1), targets (c,) -> sums: (target's logit, log-sum-exp, mean
    logit under the softmax), each (c,); and the log-prob's gradient by the logits, onehot(targets)
    - softmax (c, V) in `dtype`, zeros from `live` on, or None without dtype.
    """
    logits = products[:, :live].mul_(scale)
    picked = logits.gather(1, targets[:, None])
    lse = logits.logsumexp(1, keepdim=True)
    p = torch.exp(logits - lse)
    sums = picked[:, 0], lse[:, 0], torch.linalg.vecdot(p, logits)
    if dtype is None:
        return sums, None
    dlogits = p.neg_().scatter_add_(1, targets[:, None], torch.ones_like(picked))
    return sums, F.pad(dlogits, (0, products.shape[1] - live)).to(dtype)


class _TokenLogprobs(torch.autograd.Function):
    """A log-prob's gradient is one row, (onehot - p) @ head * scale, computed while the chunk's
    logits are at hand: the backward is one multiplication, and logits are computed once.
    """
    CHUNK = 512                                  # rows: 0.3 GB of fp32 logits at V = 152k

    @staticmethod
    def forward(ctx, x, rstd, head, targets, live, temperature):
        n = x.shape[0]
        logprobs, entropy = torch.empty(2, n, device=x.device)
        dx = drstd = dtype = None
        if any(ctx.needs_input_grad[:2]):
            dx = torch.empty(x.shape, device=x.device)
            drstd = torch.empty_like(rstd)
            dtype = x.dtype
        for i in range(0, n, _TokenLogprobs.CHUNK):
            s = slice(i, i + _TokenLogprobs.CHUNK)
            scale = rstd[s] / temperature                                       # (c, 1)
            products = mm_fp32(x[s], head.T)                                    # (c, V)
            sums, dlogits = softmax_at(products, scale, targets[s], live, dtype)
            picked, lse, mean_logit = sums
            logprobs[s] = picked - lse
            entropy[s] = lse - mean_logit
            if dtype:
                drstd[s] = (picked - mean_logit)[:, None] / rstd[s]
                dx[s] = mm_fp32(dlogits, head).mul_(scale)
        ctx.save_for_backward(dx, drstd)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _):
        dx, drstd = ctx.saved_tensors
        upstream = dlogprobs[:, None]
        return (dx * upstream).to(ctx.dtype), drstd * upstream, None, None, None, None


def token_logprobs(x, rstd, head, targets, live, temperature):
    """log softmax(x @ head[:live].T * rstd / temperature) at `targets`, with a gradient, and the
    softmax's entropy, without: (T,) fp32 each. x (T, D), rstd (T, 1), head (V, D), targets (T,).
    Rows from `live` on are multiplied too: 151,665 columns keep cuBLAS off its aligned kernels.
    """
    return _TokenLogprobs.apply(x, rstd, head, targets, live, temperature)
