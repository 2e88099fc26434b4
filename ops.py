"""
Where plain torch hands over to the GPU kernels, and two operations whose backward is written by
hand because autograd would keep, or move, gigabytes:

    mlp              down(silu(gate) * up), with 16-bit gradients between its matmuls
    token_logprobs   log softmax at the sampled tokens, without the (T, V) tensor of all logits

Attention's backward is in attention.py, a linear's in lora.py.

The door. A function marked `twin_in_kernels` is plain torch and complete: it is what to read, and
what runs on a CPU. Where its first tensor is on a GPU, the function of the same name in
fast/kernels.py runs instead, Triton kernels that read and write each number once. That import
happens on the first call: a machine without Triton never opens that file.

Shapes: T tokens, D width, F feed-forward, V vocabulary, M rows, N out_features, K in_features, c
rows of a chunk.
"""
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def twin_in_kernels(reference: Callable) -> Callable:
    """Make a function run its twin in fast/kernels.py on a GPU; `.reference` stays the function."""
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
def elementwise(function: Callable, x: Tensor, *rest: object) -> Tensor | tuple[Tensor, ...]:
    """function(x, *rest). On a GPU, where a gradient is wanted, it is compiled into one kernel."""
    return function(x, *rest)


def mm_fp32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N) of equal dtype -> fp32 (M, N), or into `out`.

    The products of 16-bit inputs are summed in fp32 anyway. Rounding the sums to 16 bits as well
    would put sampler and learner, which sum in different orders, twice as far apart.
    """
    assert a.dtype == b.dtype, f"{a.dtype} @ {b.dtype}"          # a GPU refuses it, a CPU would not
    if not a.is_cuda or a.dtype == torch.float32:
        return torch.mm(a.float(), b.float(), out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) @ b (K, N), summed in fp32 and rounded once to their dtype."""
    return torch.mm(a, b) if a.is_cuda else mm_fp32(a, b).to(a.dtype)


# -----------------------------------------------------------------------------
# The MLP

@twin_in_kernels
def swiglu(y: Tensor, rstd: Tensor, h: Tensor, keep: bool = True) -> Tensor | None:
    """Write silu(gate) * up into h (T, F), whose rows may have any stride; gate|up = y * rstd.

    y (T, 2F) fp32 is gate_up's result, rstd (T, 1) the norm's 1/rms. -> y rounded to h's dtype, as
    the backward takes it; on a GPU None if not keep.
    """
    gate, up = (y * rstd).chunk(2, dim=-1)
    h.copy_(F.silu(gate) * up)
    return y.to(h.dtype)


@twin_in_kernels
def swiglu_backward(y: Tensor, rstd: Tensor, dh: Tensor, dy: Tensor) -> Tensor:
    """Write dL/dy into dy (T, 2F), whose rows may have any stride; -> dL/drstd (T, 1).

    y and rstd as in swiglu, dh (T, F) = dL/dh. With z = y * rstd and s = sigmoid(gate):
    d silu(gate) / d gate = s + gate * s * (1 - s).
    """
    gate, up = (y * rstd).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    silu = gate * s
    dz = torch.cat([dh * up * (s + silu * (1 - s)), dh * silu], dim=-1)
    dy.copy_(dz * rstd)
    return (dz * y).sum(-1, keepdim=True, dtype=rstd.dtype)


class _MlpArguments(NamedTuple):
    """One slot for each argument of _Mlp.apply, used for three things in the same order: the
    arguments, whether autograd needs a gradient of each, and these gradients. So nobody has to
    count places.

    A and B are None without an adapter. The products read the adapter's working copies instead of
    them; they are arguments because autograd gives gradients to arguments alone.
    """
    x: Tensor | None
    rstd: Tensor | None
    gate_up: torch.nn.Module | None              # the two lora.Linears have no gradient themselves
    down: torch.nn.Module | None
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    grad_enabled: bool | None                    # at the call; forward() itself runs with it off


class _Mlp(torch.autograd.Function):
    """Both linears and what lies between them as one step of autograd.

        x_wide -- gate_up.product --> y -- swiglu --> h_wide -- down.product --> out
               [x | x@A.T]          (T, 2F) fp32    [h | h@A.T]                (T, D) fp32

    As three steps it would cost more memory traffic, in three places:
    - Autograd wants the gradient of an fp32 tensor in fp32. Inside one step dL/dh and dL/dy are
      16-bit, and dL/dy is written straight to where gate_up's backward multiplies it.
    - swiglu writes h to its place in h_wide. From a step of its own it would be copied there.
    - Only y rounded to 16 bits has to live until the backward: half the bytes of fp32.
    """

    @staticmethod
    def forward(ctx, *arguments):
        x, rstd, gate_up, down, *_, grad_enabled = arguments
        # A and B "need a gradient" under torch.no_grad() too, where no backward will ask for y.
        keep = grad_enabled and any(ctx.needs_input_grad)
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
        needs = _MlpArguments(*ctx.needs_input_grad)
        dh, down_da, down_db = down.product_backward(h_wide, down.widened(dout), needs.down_a)
        dy_wide = gate_up.empty_wide(*y.shape)
        drstd = swiglu_backward(y, rstd, dh, dy_wide[:, :y.shape[1]])
        dx, gate_up_da, gate_up_db = gate_up.product_backward(x_wide, dy_wide, needs.gate_up_a)
        return _MlpArguments(x=dx, rstd=drstd, gate_up=None, down=None, gate_up_a=gate_up_da,
                             gate_up_b=gate_up_db, down_a=down_da, down_b=down_db,
                             grad_enabled=None)


def mlp(gate_up: torch.nn.Module, down: torch.nn.Module, x: Tensor, rstd: Tensor) -> Tensor:
    """The MLP of a layer: down(silu(gate) * up), where gate|up = gate_up(x) * rstd.

    gate_up, down: lora.Linears; x (T, D) in the model's dtype, rstd (T, 1) -> (T, D) fp32.
    """
    return _Mlp.apply(*_MlpArguments(x, rstd, gate_up, down, *gate_up.trained(), *down.trained(),
                                     torch.is_grad_enabled()))


# -----------------------------------------------------------------------------
# Log-probs

@twin_in_kernels
def softmax_at(products: Tensor, scale: Tensor, targets: Tensor, live: int,
               dtype: torch.dtype | None = None) -> tuple:
    """Softmax of logits = products[:, :live] * scale, read at `targets`. Overwrites products.

    products (c, V) fp32, scale (c, 1), targets (c,) -> (logit of the target, log-sum-exp, mean
    logit under the softmax), each (c,); and the gradient of the target's log-prob by the logits,
    onehot(target) - softmax, (c, V) in `dtype`, with zeros from column `live` on (None if no dtype
    is given).
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
    """Log-probs in chunks of rows, and their gradient already in the forward.

    The log-prob of row t depends on row t of x alone, so its gradient is one row too, up to the one
    number dL/dlogprob[t] which only the backward knows:
        dx[t] = dL/dlogprob[t] * (onehot(target) - softmax) @ head * scale
    The forward computes all of it but that number while it has the chunk's logits, then drops them.
    The backward is one multiplication. Otherwise it would need all (T, V) logits, 5 GB of fp32 for
    8,192 tokens of a vocabulary of 152k, or the product with `head` a second time.
    """
    CHUNK = 512                                  # rows: 0.3 GB of fp32 logits at V = 152k

    @staticmethod
    def forward(ctx, x, rstd, head, targets, live, temperature):
        n = x.shape[0]
        logprobs, entropy = torch.empty(2, n, device=x.device)
        needs_x, needs_rstd, *_ = ctx.needs_input_grad
        dx = drstd = dtype = None
        if needs_x or needs_rstd:
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
            entropy[s] = lse - mean_logit        # -sum of p * (logit - lse)
            if dtype:
                # A logit is proportional to rstd: its derivative is logit / rstd.
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


def token_logprobs(x: Tensor, rstd: Tensor, head: Tensor, targets: Tensor, live: int,
                   temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(x @ head[:live].T * rstd / temperature) at `targets`, differentiable in x and
    rstd, and the entropy of that softmax, not differentiable: (T,) fp32 each.

    x (T, D), rstd (T, 1), head (V, D), targets (T,). live: rows of `head` that stand for a token;
    Qwen2.5 pads the rest. All V are multiplied and the rest left out afterwards, because
    live = 151,665 columns, an odd number, would keep cuBLAS off its aligned kernels.
    """
    return _TokenLogprobs.apply(x, rstd, head, targets, live, temperature)
