"""
Matrix products with fp32 sums, a decorator that swaps in a GPU's version of a function, and a
straight-through rounding op.

Plain first. Every function of the method is complete in plain torch, and autograd computes its
gradients. That version is the reference, and it's what runs on a CPU. Some are marked:

    @replaced_on_gpu             # on a GPU, fast/'s function of the same name runs instead
    def linear(x, layer): ...

fast/backward.py saves memory, fast/kernels.py memory bandwidth. Results differ only by rounding. To
train on a GPU with a plain version that you have changed, remove its decorator. Decode steps have
kernels of their own (a table in docs/forking.md).

Shapes: M rows, N columns and K summed terms of a product.
"""
import functools
from collections.abc import Callable

import torch
from torch import Tensor

ON_GPU: dict[str, Callable] = {}                 # name -> its GPU version; see load_kernels()
PLAIN: dict[str, Callable] = {}                  # name -> the marked function, for CPU tensors


def on_gpu(name: str) -> Callable:
    """The GPU version registered under this name. RuntimeError if there is none: tensors on a GPU
    never silently take the plain path.
    """
    if name not in ON_GPU:
        raise RuntimeError(f"{name} has no GPU version registered: run `import fast.register` "
                           "first")
    return ON_GPU[name]


def replaced_on_gpu(plain: Callable) -> Callable:
    """A decorator: for tensors on a GPU, the function of the same name in fast/ runs instead.

    The first tensor among the positional arguments decides, so at least one must be passed by
    position. The plain function is kept as `.reference`; tests compare its replacement with it.
    """
    name = plain.__name__

    @functools.wraps(plain)
    def either(*arguments, **options):
        tensor = next(a for a in arguments if isinstance(a, torch.Tensor))
        return (on_gpu(name) if tensor.is_cuda else PLAIN[name])(*arguments, **options)
    either.reference = plain
    PLAIN[name] = plain
    return either


@replaced_on_gpu
def elementwise(function: Callable, x: Tensor, *rest: object) -> Tensor | tuple[Tensor, ...]:
    """function(x, *rest), for a function that treats each element, or each row, independently.

    On a GPU, while gradients are enabled, torch.compile turns it into one kernel for the forward
    pass and one for the backward pass.
    """
    return function(x, *rest)


def mm_fp32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N) of equal dtype -> (M, N) fp32, written into `out` if that is given.

    GPUs sum products of 16-bit inputs in fp32 anyway; this just skips rounding the sums to 16 bits
    afterwards. The sampler and the learner sum in different orders, and that rounding would turn
    differences in the last bit into full 16-bit steps (see the top of model.py).
    """
    assert a.dtype == b.dtype, f"{a.dtype} @ {b.dtype}"          # a GPU refuses, a CPU wouldn't
    differentiable = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if not a.is_cuda or a.dtype == torch.float32 or differentiable:      # out_dtype isn't
        return torch.mm(a.float(), b.float(), out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def rounded(exact: Tensor, copy: Tensor) -> Tensor:
    """A straight-through estimator: the values of `copy`, which are those of the trained tensor
    `exact` rounded to 16 bits, with the gradient for `exact`, as if nothing had been rounded.
    """
    # It takes the copy instead of rounding here, because the sampler uses the copy too. So the two
    # agree, and a forgotten sync() shows on a CPU.
    if not torch.is_grad_enabled():
        return copy
    return copy + (exact - exact.detach()).to(copy.dtype)        # + 0
