"""
Three things: the decorator that swaps plain torch for GPU kernels, matrix products with fp32 sums,
and two operations with a hand-written backward pass, which saves gigabytes over autograd's:

    mlp              down(silu(gate) * up), with 16-bit gradients between its matmuls
    token_logprobs   log softmax at the sampled tokens, without the (T, V) tensor of all logits

Attention's backward pass is in attention.py, a linear's in lora.py.

Twins. A function marked @twin_in_kernels is complete in plain torch: this version is the reference,
and it's what runs on a CPU. If its tensors are on a GPU, the function of the same name in
fast/kernels.py runs instead and moves each number through memory once or twice rather than once per
operation. Most are Triton kernels; attention is torch's FlashAttention. `import fast` registers
them, which a program does only once it has chosen a GPU, so a machine without Triton never opens
fast/. With --kernels torch it registers the plain functions instead.

Shapes: T tokens, D width, F feed-forward, V vocabulary; M rows, N columns and K summed terms of a
product; c rows of a chunk.
"""
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ON_GPU: dict[str, Callable] = {}                 # name -> what runs on a GPU; see load_kernels()
PLAIN: dict[str, Callable] = {}                  # name -> the plain function of every twin


def on_gpu(name: str) -> Callable:
    """The GPU version registered under this name. RuntimeError if there is none: tensors on a GPU
    never silently take the plain path.
    """
    if name not in ON_GPU:
        raise RuntimeError(f"{name} has no GPU version registered: run `import fast` first")
    return ON_GPU[name]


def twin_in_kernels(reference: Callable) -> Callable:
    """A decorator: on a GPU, the function's twin in fast/kernels.py runs in its place.

    The first tensor among the positional arguments decides, so at least one must be passed by
    position. The plain function is kept as `.reference`; tests compare the twin with it.
    """
    @functools.wraps(reference)
    def either(*arguments, **options):
        tensor = next(a for a in arguments if isinstance(a, torch.Tensor))
        function = on_gpu(reference.__name__) if tensor.is_cuda else reference
        return function(*arguments, **options)
    either.reference = reference
    PLAIN[reference.__name__] = reference
    return either


@twin_in_kernels
def elementwise(function: Callable, x: Tensor, *rest: object) -> Tensor | tuple[Tensor, ...]:
    """function(x, *rest), for a function that treats each element, or each row, independently.

    On a GPU, while gradients are enabled, torch.compile turns it into one kernel for the forward
    pass and one for the backward pass.
    """
    return function(x, *rest)


def mm_fp32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N) of equal dtype -> (M, N) fp32, written into `out` if that is given.

    GPUs sum products of 16-bit inputs in fp32 anyway; this just skips rounding the sums to 16 bits
    afterwards. Sampler and learner sum in different orders, and that rounding would turn last-bit
    differences into full 16-bit steps (see the top of model.py).
    """
    assert a.dtype == b.dtype, f"{a.dtype} @ {b.dtype}"          # a GPU refuses, a CPU wouldn't
    if not a.is_cuda or a.dtype == torch.float32:
        return torch.mm(a.float(), b.float(), out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) @ b (K, N) of equal dtype -> (M, N) in that dtype, summed in fp32, then rounded.

    Only for gradients. If cuBLAS splits K across programs, it may also round their partial sums to
    16 bits (torch allows that by default: allow_bf16_reduced_precision_reduction).
    """
    return torch.mm(a, b) if a.is_cuda else mm_fp32(a, b).to(a.dtype)


def add_mm(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """total (M, N) fp32 += scale * a (M, K) @ b (K, N), in place, summed as in mm_fp32."""
    if not a.is_cuda or a.dtype == torch.float32:
        total += scale * mm_fp32(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, alpha=scale, out=total)


# -----------------------------------------------------------------------------
# The MLP

@twin_in_kernels
def swiglu(y: Tensor, rstd: Tensor, h: Tensor, keep: bool = True) -> Tensor | None:
    """Write silu(gate) * up into h (T, F), whose rows may have any stride; gate|up = y * rstd.

    y (T, 2F) fp32 is gate_up's result, rstd (T, 1) fp32 the norm's 1/rms. Returns y rounded to h's
    dtype, for swiglu_backward. keep: whether there will be a backward pass. If not, ignore the
    result, which is None on a GPU.
    """
    gate, up = (y * rstd).chunk(2, dim=-1)
    h.copy_(F.silu(gate) * up)
    return y.to(h.dtype)


@twin_in_kernels
def swiglu_backward(y: Tensor, rstd: Tensor, dh: Tensor, dy: Tensor) -> Tensor:
    """Write dL/dy into dy (T, 2F), whose rows may have any stride; -> dL/drstd (T, 1) fp32.

    y (T, 2F) as swiglu returned it, the same rstd (T, 1), dh (T, F) = dL/dh. With z = y * rstd, the
    gate|up of swiglu, dL/dy = dL/dz * rstd and dL/drstd = sum of dL/dz * y over the row. With
    s = sigmoid(gate), d silu(gate) / d gate = s + gate * s * (1 - s).
    """
    gate, up = (y * rstd).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    silu = gate * s
    dz = torch.cat([dh * up * (s + silu * (1 - s)), dh * silu], dim=-1)
    dy.copy_(dz * rstd)
    return (dz * y).sum(-1, keepdim=True, dtype=rstd.dtype)


class _Mlp(torch.autograd.Function):
    """Both linears and everything between them as one autograd function. lora.py explains the wide
    inputs, with x @ A.T to the right of x.

        x_wide   [x | x @ A.T]   in 16 bits on a GPU; A is gate_up's
          |  gate_up.product
        y        (T, 2F)         fp32
          |  swiglu
        h_wide   [h | h @ A.T]   A is down's; swiglu writes h, down.product the columns after it
          |  down.product
        result   (T, D)          fp32

    Three separate functions would move more bytes, in three places:
    - Autograd wants the gradient of an fp32 tensor in fp32. Inside one function, dL/dh and dL/dy
      are 16-bit, and dL/dy is written straight to where gate_up's backward pass multiplies it.
    - swiglu writes h to its place in h_wide. A separate function's result would be copied there.
    - Only y rounded to 16 bits has to live until the backward pass: half the bytes of fp32.
    """

    @staticmethod
    def forward(ctx, x, rstd, gate_up, down, keep):
        x_wide = gate_up.widened(x)
        y = gate_up.product(x_wide)
        h_wide = down.empty_wide(len(x), down.weight.K)
        y = swiglu(y, rstd, h_wide[:, :down.weight.K], keep=keep)
        ctx.linears = gate_up, down
        ctx.save_for_backward(x_wide, y, rstd, h_wide)
        return down.product(h_wide)

    @staticmethod
    def backward(ctx, dout):
        x_wide, y, rstd, h_wide = ctx.saved_tensors
        gate_up, down = ctx.linears
        dh = down.product_backward(h_wide, down.widened(dout))
        dy_wide = gate_up.empty_wide(*y.shape)
        drstd = swiglu_backward(y, rstd, dh, dy_wide[:, :y.shape[1]])
        return gate_up.product_backward(x_wide, dy_wide), drstd, None, None, None


def mlp(gate_up: torch.nn.Module, down: torch.nn.Module, x: Tensor, rstd: Tensor) -> Tensor:
    """The MLP of a layer: down(silu(gate) * up), where gate|up = gate_up(x) * rstd.

    gate_up, down: lora.Linears, whose adapters get their gradients as in Linear.forward; x (T, D)
    in the model's dtype, rstd (T, 1) -> (T, D) fp32.
    """
    return _Mlp.apply(x, rstd, gate_up, down, torch.is_grad_enabled() and x.requires_grad)


# -----------------------------------------------------------------------------
# Log-probs

@twin_in_kernels
def softmax_at(products: Tensor, scale: Tensor, targets: Tensor, live: int,
               dtype: torch.dtype | None = None) -> tuple:
    """What the loss needs from the softmax of logits = products[:, :live] * scale, row by row.

    products (c, V) fp32, which may be overwritten; scale (c, 1) fp32; targets (c,) int64, below
    `live`. Returns two things:
    - a triple of (c,) fp32: the target's logit, the log-sum-exp of the logits, and their mean,
      weighted by probability;
    - the gradient of the target's log-prob with respect to the logits, onehot(target) - softmax:
      (c, V) in `dtype`, zero from column `live` on. None if `dtype` is None.
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


# Rows whose logits are in memory at a time: 0.3 GB in fp32 with a vocabulary of 152k.
LOGIT_ROWS = 512


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs in chunks of rows, with the gradient already computed in the forward pass.

    The log-prob of row t depends only on row t of x, so its gradient is one row too:

        dL/dx[t] = dL/dlogprob[t] * ((onehot(target) - softmax) @ head * scale)[t]

    The forward pass computes the second factor while it has the chunk's logits, keeps it in fp32
    and drops the logits; the backward pass multiplies it by dL/dlogprob. Keeping the logits of
    8,192 tokens would take 5 GB with a vocabulary of 152k.
    """
    @staticmethod
    def forward(ctx, x, scale, head, targets, live):
        n = x.shape[0]
        logprobs, entropy = torch.empty(2, n, device=x.device)
        needs_x, needs_scale, *_ = ctx.needs_input_grad
        dx = dscale = dtype = None
        if needs_x or needs_scale:
            dx = torch.empty(x.shape, device=x.device)
            dscale = torch.empty_like(scale)
            dtype = x.dtype
        for i in range(0, n, LOGIT_ROWS):
            s = slice(i, i + LOGIT_ROWS)
            products = mm_fp32(x[s], head.T)                                    # (c, V)
            sums, dlogits = softmax_at(products, scale[s], targets[s], live, dtype)
            picked, lse, mean_logit = sums
            logprobs[s] = picked - lse
            entropy[s] = lse - mean_logit        # -sum of p log p, where log p = logit - lse
            if dtype:
                # A logit is proportional to scale, so d logit / d scale = logit / scale.
                dscale[s] = (picked - mean_logit)[:, None] / scale[s]
                dx[s] = mm_fp32(dlogits, head).mul_(scale[s])
        ctx.save_for_backward(dx, dscale)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _):
        dx, dscale = ctx.saved_tensors
        upstream = dlogprobs[:, None]
        return (dx * upstream).to(ctx.dtype), dscale * upstream, None, None, None


def token_logprobs(x: Tensor, scale: Tensor, head: Tensor, targets: Tensor,
                   live: int) -> tuple[Tensor, Tensor]:
    """The log-prob of each target, and the entropy of its softmax.

    logits = x @ head[:live].T * scale; -> log softmax(logits) at `targets`, which is differentiable
    in x and scale, and the entropy, which isn't: (T,) fp32 each, in nats.

    T is the number of targets here: Qwen.token_logprobs, which takes full rows, has already picked
    the packed tokens that predict one.

    x (T, D) and head (V, D) in the model's dtype, scale (T, 1) = 1/(rms * temperature) fp32,
    targets (T,) int64. `head` gets no gradient. live: how many rows of `head` are tokens; the rest
    is padding. All V rows are multiplied and the padding is dropped afterwards, because Qwen2.5's
    live, 151,665, is odd and cuBLAS has no aligned kernel for odd widths.
    """
    return _TokenLogprobs.apply(x, scale, head, targets, live)
