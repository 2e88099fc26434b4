"""
Logits against Qwen2, Qwen3, Llama and Mistral in plain float64 (tiny_qwen2.py) and against numbers stored from
transformers (make_reference.py). test_learner.py tests log-probs and gradients, test_weights.py how folders are read.

python -m pytest tests/test_model.py -v
"""

import pytest
import torch
from helpers import FP32, HERE, plain, tokens_of
from safetensors.torch import load_file
from tiny_qwen2 import SHAPES

import lora
from loading import load
from model import RMSNorm, split_qkv

REFERENCE = load_file(HERE / "qwen2_reference.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_factors_multiply_to_rmsnorm(dtype):
    torch.manual_seed(0)
    x, weight, eps = 0.3 * torch.randn(5, 64), torch.rand(64) + 0.5, 0.1            # eps is as large as x's mean square
    xw, rstd = RMSNorm(weight, eps, dtype)(x)
    want = x.double() * weight / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    assert xw.dtype == dtype and rstd.dtype == torch.float32
    assert ((xw.double() * rstd - want).abs() <= 1.01 * torch.finfo(dtype).eps * want.abs() + 1e-7).all()


def test_head_norms_by_hand():
    torch.manual_seed(0)
    eps, H, KV, d = 0.1, 4, 2, 16                                         # eps is as large as a head's mean square
    y, rstd, gains = 0.3 * torch.randn(5, (H + 2 * KV) * d), torch.rand(5, 1) + 0.5, torch.rand(2, d) + 0.5
    unturned = torch.ones(5, 1, d // 2), torch.zeros(5, 1, d // 2)        # cosine and sine
    q, k, v = split_qkv(y, rstd, None, gains, eps, *unturned, KV, torch.float32)
    heads = (y * rstd).double().view(5, -1, d)
    normed = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(q.double(), normed[:, :H] * gains[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(k.double(), normed[:, H:-KV] * gains[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(v.double(), heads[:, -KV:], rtol=0, atol=1e-6)


# -----------------------------------------------------------------------------
# Logits


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_match_transformers(tiny, shape):
    case = tiny[shape]
    checksum = sum(t.double().abs().sum() for t in case.tensors.values())
    assert abs(checksum / REFERENCE[f"{shape}.checksum"] - 1) < 1e-12, "not the weights that make_reference.py saw"
    tokens, want = REFERENCE[f"{shape}.tokens"], REFERENCE[f"{shape}.logits"]
    with torch.no_grad():
        got = load(case.folder, base="bf16", device="cpu")(tokens)
    assert (got - want).abs().max() < FP32                                # transformers ran in fp32 too
    assert (plain(case, tokens) - want).abs().max() < FP32


@pytest.mark.parametrize("shape", ["untied", "qwen3-untied"])
def test_bf16_costs_no_more_than_its_rounding(tiny, shape):
    case, tokens = tiny[shape], tokens_of(tiny[shape], 2, 20)
    with torch.no_grad():
        got = load(case.folder, base="bf16", device="cpu", dtype=torch.bfloat16)(tokens)
    want = plain(case, tokens)
    # A token passes about 14 matmuls, whose inputs are each off by 2^-9 / sqrt(3), as noise: 0.4 % of the spread.
    assert (got - want).std() < 0.01 * want.std()
    assert (got - want).std() > 0.001 * want.std()                        # it does round


# -----------------------------------------------------------------------------
# Log-probs without the (T, V) tensor


def test_all_but_the_last_layers_are_recomputed(tiny):
    """test_learner.py compares the gradients."""
    model, runs = load(tiny["untied"].folder, base="nvfp4", device="cpu"), []
    rows = [t.tolist() for t in tokens_of(tiny["untied"], 56).split([7, 2, 33, 2, 12])]
    lora.attach(model, rank=4, alpha=8)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, _: runs.append(layer))
    for kept in (0, 1, 2):
        runs.clear()
        model.token_logprobs(rows, [1] * len(rows), kept_layers=kept)[0].sum().backward()
        assert [runs.count(layer) for layer in model.layers] == [2 - (kept == 2), 2 - (kept > 0)]
    assert model.embed.grad is None and model.final_norm.weight.grad is None


def test_row_without_prompt_or_completion_is_refused(tiny):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    for start in (0, 3):
        with pytest.raises(AssertionError, match="a prompt token and a scored token"):
            model.token_logprobs([[1, 2, 3]], [start])
    with pytest.raises(AssertionError, match="temperature"):
        model.token_logprobs([[1, 2, 3]], [1], temperature=0)
