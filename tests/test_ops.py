"""
Log-probs, by autograd and by hand, against float64 autograd on full tensors; matmuls; how ops picks a kernel.

python -m pytest tests/test_ops.py -v
"""

import pytest
import torch

import model as model_py
import ops
from fast import backward
from model import token_logprobs
from ops import elementwise, mm_fp32, replaced_on_gpu

# -----------------------------------------------------------------------------
# Which twin runs

class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""
    is_cuda = True


def on_gpu(*shape):
    return torch.zeros(shape).as_subclass(OnGpu)


@replaced_on_gpu
def halve(x, by=2.0):
    """x / by."""
    return "reference", x, by


@pytest.fixture
def registered(monkeypatch):
    """An empty dict in place of what `import fast` registers."""
    monkeypatch.setattr(ops, "ON_GPU", {})
    return ops.ON_GPU


def test_first_tensor_argument_decides_which_twin_runs(registered):
    x = torch.zeros(3)
    assert halve(x) == ("reference", x, 2.0) and halve(x, by=5) == ("reference", x, 5)
    assert halve.__name__ == "halve" and halve.__doc__ == "x / by."
    with pytest.raises(RuntimeError, match="import fast"):
        halve(on_gpu(3))
    registered["halve"] = lambda *a, **o: ("twin", len(a), o)
    assert halve(on_gpu(3), by=5) == ("twin", 1, {"by": 5}) and halve.reference(on_gpu(3))[0] == "reference"
    registered["elementwise"] = lambda f, x, *rest: ("twin", f, rest)
    assert elementwise(torch.add, torch.ones(2), torch.ones(2)).tolist() == [2, 2]
    assert elementwise(torch.add, on_gpu(2), 3)[2] == (3,)


# -----------------------------------------------------------------------------
# Matmuls

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("M,K,N", [(1, 5, 3), (7, 300, 11)])
def test_matmuls_sum_in_fp32_and_round_once(dtype, M, K, N):
    torch.manual_seed(0)
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    want, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    wider = torch.full((M, N + 3), 7.0)
    into = mm_fp32(a, b, out=wider[:, :N])                                 # some columns of a wider matrix
    assert into.data_ptr() == wider.data_ptr() and (wider[:, N:] == 7).all()
    for got, out_dtype in ((mm_fp32(a, b), torch.float32), (into, torch.float32), (backward.mm(a, b), dtype)):
        u = torch.finfo(out_dtype).eps / 2
        assert got.dtype == out_dtype
        assert ((got.double() - want).abs() <= 1.01 * u * want.abs() + K * 2.0**-24 * scale).all()


# -----------------------------------------------------------------------------
# Log-probs

@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_logprob_gradient_matches_autograd(both, monkeypatch, chunk):
    monkeypatch.setattr(model_py, "LOGITS", 50 * chunk)
    monkeypatch.setattr(backward, "LOGIT_ROWS", chunk)
    torch.manual_seed(0)
    n, D, V, padding, temperature = 17, 32, 50, 11, 0.7
    x, head, targets = torch.randn(n, D), torch.randn(V, D) / 3, torch.randint(V, (n,))
    rstd, upstream = torch.rand(n, 1) + 0.5, torch.randn(n)
    x64, rstd64 = x.double().requires_grad_(), rstd.double().requires_grad_()
    log_p = (x64 @ head.double().T * rstd64 / temperature).log_softmax(-1)
    want = log_p[torch.arange(n), targets]
    want.backward(upstream.double())
    x, rstd = x.requires_grad_(), rstd.requires_grad_()
    padded = torch.cat([head, 30 * torch.randn(padding, D)])              # rows without a token may be large
    got, entropy = token_logprobs(x, rstd / temperature, padded, targets, V)
    got.backward(upstream)
    # 50 fp32 terms of about 3: 50 * 3 * 2^-24 = 1e-5.
    for a, b in ((got, want), (entropy, -(log_p.exp() * log_p).sum(-1)), (x.grad, x64.grad), (rstd.grad, rstd64.grad)):
        assert (a - b).abs().max() < 1e-5
