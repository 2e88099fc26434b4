"""
The learner's kernels against the plain torch that they replace: kernels.NAME and the function's .reference.

On a GPU everything runs; without one, Triton's interpreter runs what it can (conftest.py). test_decode.py tests the
decode step's kernels.

python -m pytest tests/test_kernels.py -v
"""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_decode
import torch
import triton
from races import races
from test_decode import DEVICE, GPU, INTERPRETED, runs_kernels

import model
import ops
from fast import backward, kernels

gpu = pytest.mark.skipif(not GPU, reason="torch.compile's kernels need a GPU")
HALVES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU     # numpy has no bf16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def there(*tensors):
    """Copies of the tensors on the device where the kernels run."""
    return [t.to(DEVICE, copy=True) for t in tensors]


@pytest.mark.skipif(GPU or INTERPRETED, reason="with a GPU they run directly")
def test_kernels_pass_in_tritons_interpreter():
    """In a process of its own, because Triton chooses between GPU and interpreter when it is imported."""
    least = {"test_decode.py": 38, "test_kernels.py": 10, "test_portable_kernel.py": 9}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-rpfE", "-k", "not compile",
               *(str(Path(__file__).with_name(name)) for name in least)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{(done.stdout + done.stderr)[-6000:]}\nTRITON_INTERPRET=1 pytest -n 0", pytrace=False)
    for name, count in least.items():
        assert len(re.findall(rf"^PASSED .*{name}::", done.stdout, re.M)) >= count, name


@pytest.mark.skipif(GPU or INTERPRETED, reason="with a GPU the other tests compile them")
@pytest.mark.parametrize("sm,dtype,heads", [
    (80, torch.bfloat16, (28, 128)), (86, torch.float16, (4, 16)), (90, torch.bfloat16, (28, 128)),
    (120, torch.bfloat16, (28, 128))])
def test_learner_kernels_compile_without_races(sm, dtype, heads, monkeypatch):
    compiled, launch = {}, triton.runtime.jit.JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        compiled[kernel.__name__] = launch(kernel, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", test_decode.Gpu(sm))
    y, rstd, h = torch.zeros(3, 64), torch.zeros(3, 1), torch.zeros(3, 32, dtype=dtype)
    kept = kernels.swiglu(y, rstd, h)
    kernels.swiglu_backward(kept, rstd, h, torch.zeros_like(kept))
    kernels.softmax_at(y, rstd, torch.zeros(3, dtype=torch.int64), 60, dtype)
    out, lse = torch.zeros(3, *heads, dtype=dtype), torch.zeros(heads[0], 3)
    kernels.merge(out, lse, out, lse)
    assert {name for name, f in vars(kernels).items() if isinstance(f, triton.JITFunction)} >= set(compiled)
    assert len(compiled) == 4
    for kernel in compiled.values():
        shared, _, stack = test_decode.resources(kernel)
        assert shared <= test_decode.SHARED[sm] * 1024 and stack == 0
        assert not races(kernel.asm["ptx"])
    unguarded = [line for line in compiled["merge_kernel"].asm["ptx"].splitlines() if "bar.sync" not in line]
    assert races("\n".join(unguarded))                              # without its barrier it has one


# -----------------------------------------------------------------------------
# The MLP

@runs_kernels
@pytest.mark.parametrize("M,width", [(1, 16), (5, 1000), (3, 4864)])      # less than a block, about one, several
def test_swiglu_and_its_backward_equal_plain_torch(M, width):
    y, rstd, dh = 2 * torch.randn(M, 2 * width), torch.rand(M, 1) + 0.5, torch.randn(M, width)
    want = torch.empty(M, width)
    kept = backward.swiglu.reference(y, rstd, want)
    for dtype in HALVES:
        wide = torch.full((M, width + 8), 7.0, device=DEVICE, dtype=dtype)                # a row stride
        rounded = kernels.swiglu(*there(y, rstd), wide[:, :width])
        assert rounded.dtype == dtype and torch.equal(rounded.cpu(), kept.to(dtype))
        assert (wide[:, width:] == 7).all()
        error = (wide[:, :width].cpu().float() - want).abs()
        # The GPU's exp is within 2^-22 relative, on results of up to 100. One rounding follows.
        assert (error <= 1e-4 + (dtype != torch.float32) * 2.0**-8 * want.abs()).all()
    alone = torch.empty(M, width, device=DEVICE)
    assert kernels.swiglu(*there(y, rstd), alone, keep=False) is None
    assert (alone.cpu() - want).abs().max() < 1e-4
    want = torch.empty(M, 2 * width)
    want_drstd = backward.swiglu_backward.reference(y, rstd, dh, want)
    wide = torch.full((M, 2 * width + 8), 7.0, device=DEVICE)                             # a row stride
    drstd = kernels.swiglu_backward(*there(y, rstd, dh), wide[:, :2 * width])
    assert (wide[:, :2 * width].cpu() - want).abs().max() < 1e-4
    assert (wide[:, 2 * width:] == 7).all()
    assert (drstd.cpu() - want_drstd).abs().max() < 1e-6 * width + 1e-4


# -----------------------------------------------------------------------------
# Log-probs

@runs_kernels
@pytest.mark.parametrize("c,V,live", [(1, 5, 5), (7, 4096, 4096), (3, 10001, 9000), (2, 8208, 4095)])    # 1 to 3 blocks
def test_scores_equal_plain_torch(c, V, live):
    products, scale, targets = 9 * torch.randn(c, V), torch.rand(c, 1) + 0.5, torch.randint(live, (c,))
    products[:, live:] = 1e30                                             # e^1e30 is inf
    for dtype in (None, *HALVES):
        got, got_ahead = kernels.softmax_at(*there(products, scale, targets), live, dtype)
        want, ahead = backward.softmax_at.reference(products.clone(), scale, targets, live, dtype)
        assert (got.cpu() - torch.stack(want)).abs().max() < 1e-4         # a few times 2^-23 of logits of up to 50
        assert (got_ahead is None) == (ahead is None) == (dtype is None)
        if dtype:
            error = (got_ahead.cpu().float() - ahead.float()).abs().max()
            assert error < (1e-5 if dtype == torch.float32 else 2**-8)
            assert not got_ahead[:, live:].any() and not ahead[:, live:].any()


# -----------------------------------------------------------------------------
# Attention

@runs_kernels
@pytest.mark.parametrize("H,d", [(28, 128), (14, 64), (40, 128)])
def test_merge_equals_plain_torch(H, d):
    (out, other), (lse, other_lse) = torch.randn(2, 9, H, d), 9 * torch.randn(2, H, 9)
    got, got_lse = out.to(DEVICE, copy=True), torch.cat([lse, lse], 1).to(DEVICE)[:, :9]  # a row stride
    kernels.merge(got, got_lse, *there(other, other_lse))
    backward.merge.reference(out, lse, other, other_lse)
    assert (got.cpu() - out).abs().max() < 1e-5 and (got_lse.cpu() - lse).abs().max() < 1e-5


# -----------------------------------------------------------------------------
# Elementwise work

def half_plus(x, y, scale):
    return x * scale + y


@gpu
def test_compiled_elementwise_equals_plain_torch():
    for n in (2, 300, 17):
        x, y = torch.randn(2, n, 64, device="cuda", requires_grad=True)
        got, want = kernels.elementwise(half_plus, x, y, 0.5), half_plus(x, y, 0.5)
        assert torch.equal(got, want) or (got - want).abs().max() < 1e-6
        assert torch.equal(*(torch.autograd.grad(t.sum(), x)[0] for t in (got, want)))


@gpu
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_compiled_heads_and_gradients_equal_plain_torch(family):
    H, KV, d, gains, bias = 4, 2, 128, None, None
    if family == "qwen2":
        bias = torch.randn((H + 2 * KV) * d, device=DEVICE)
    else:
        gains = torch.rand(2, d, device=DEVICE) + 0.5
    for T in (5, 70):
        y, rstd = torch.randn(T, (H + 2 * KV) * d, device=DEVICE), torch.rand(T, 1, device=DEVICE) + 0.5
        angle = torch.randn(T, 1, d // 2, device=DEVICE)
        results = []
        for function in (ops.elementwise, ops.elementwise.reference):
            leaves = [t.clone().requires_grad_() for t in (y, rstd)]
            heads = function(model.split_qkv, *leaves, bias, gains, 1e-6, angle.cos(), angle.sin(), KV, torch.float32)
            total = sum((x * (i + 1 + x.detach().cos())).sum() for i, x in enumerate(heads))
            results.append([*heads, *torch.autograd.grad(total, leaves)])
        for got, want in zip(*results):              # fp32 sums of up to 1,024 terms, in another order
            assert (got - want).abs().max() < 1e-5 * want.abs().max()
        # If the function rounded between two operations, the compiler might drop that rounding, and half of the numbers
        # would differ. The last rounding flips only where an fp32 error of 1e-6 is next to a tie: one in a thousand.
        heads = [function(model.split_qkv, *leaves, bias, gains, 1e-6, angle.cos(), angle.sin(), KV, torch.bfloat16)
                 for function in (ops.elementwise, ops.elementwise.reference)]
        assert all((got != want).float().mean() < 0.01 for got, want in zip(*heads))
