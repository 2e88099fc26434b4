"""
Logits and log-probs, on every base, against Qwen2 and Qwen3 in plain float64 (tiny_qwen2.py) and against numbers stored
from transformers (make_reference.py). test_weights.py tests how folders are read.

python -m pytest tests/test_model.py -v
QWEN05=<folder of Qwen2.5-Coder-0.5B-Instruct> python -m pytest tests/test_model.py -k half_b -v
"""
import os
from pathlib import Path

import pytest
import torch
from helpers import FP32, plain
from safetensors.torch import load_file
from tiny_qwen2 import GROUPS, SHAPES, merged, plain_logits, random_adapter, set_adapter, write_folder

import lora
import nvfp4
from loading import load
from model import RMSNorm, split_qkv

REFERENCE = load_file(Path(__file__).parent / "qwen2_reference.safetensors")


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


def some_tokens(tiny, *shape, seed=5):
    return torch.randint(tiny.raw["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def ragged_rows(tiny, lengths=(7, 2, 33, 2, 12)):
    flat = some_tokens(tiny, sum(lengths)).split(list(lengths))
    return [t.tolist() for t in flat]


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


@pytest.mark.skipif("QWEN05" not in os.environ, reason="QWEN05 does not name a folder of Qwen2.5-Coder-0.5B-Instruct")
def test_logits_of_the_real_half_b_match_transformers():
    model = load(os.environ["QWEN05"], base="bf16", device="cpu", dtype=torch.float32)
    tokens, columns = REFERENCE["qwen05.tokens"], REFERENCE["qwen05.columns"]
    with torch.no_grad():
        logits = model(tokens[None])[0]
        logprobs, _ = model.token_logprobs([tokens.tolist()], [1])
    assert (logits[:, columns] - REFERENCE["qwen05.logits"]).abs().max() < 1e-3          # 24 layers, logits up to 30
    assert (logprobs - REFERENCE["qwen05.logprobs"]).abs().max() < 1e-3


@pytest.mark.parametrize("shape,prompt,completions", [
    ("untied", 1, (3,)), ("tied", 5, (1, 7)), ("ragged", 2, (1, 1, 1)), ("untied", 9, (4, 1, 12, 3, 3)),
    ("tied", 1, (2, 9, 1, 5, 6, 2, 11, 3)), ("qwen3-tied", 9, (4, 1, 12, 3, 3)), ("qwen3-untied", 5, (1, 7)),
    ("llama-tied", 9, (4, 1, 12, 3, 3))])
def test_shared_prompt_gives_each_rows_own_logprobs(tiny, shape, prompt, completions):
    # Log-probs against a float64 forward of each row, gradients against rows that each compute their own prompt.
    case = tiny[shape]
    model, rows = load(case.folder, base="bf16", device="cpu"), []
    lora.attach(model, rank=4, alpha=8)
    set_adapter(model, random_adapter(case.raw, 4))
    sizes = [n for n in (*completions, 4, 6)]
    flat = some_tokens(case, prompt + 2 + sum(sizes)).tolist()
    first, other, flat = flat[:prompt], flat[prompt:prompt + 2], flat[prompt + 2:]
    for i, n in enumerate(sizes):                                         # then a second group, of two
        rows.append((first if i < len(completions) else other) + flat[:n])
        flat = flat[n:]
    starts = [prompt] * len(completions) + [2, 2]
    weights = torch.linspace(-1, 2, sum(sizes))
    logprobs, _ = model.token_logprobs(rows, starts, kept_layers=1)
    tensors = merged(case.tensors, random_adapter(case.raw, 4), 2)
    want = []
    for row, start in zip(rows, starts):
        log_p = plain_logits(case.raw, tensors, torch.tensor(row)).log_softmax(-1)
        want.append(log_p[range(start - 1, len(row) - 1), row[start:]])
    assert (logprobs - torch.cat(want)).abs().max() < FP32
    (logprobs * weights).sum().backward()
    together = model.adapter.master.grad.clone()
    model.adapter.master.grad.zero_()
    for row, start, w in zip(rows, starts, weights.split(sizes)):
        (model.token_logprobs([row], [start])[0] * w).sum().backward()
    # The same up to 60 fp32 terms in another order, each with a rounding error of 2^-24.
    assert (together - model.adapter.master.grad).norm() < 60 * 2**-24 * together.norm()


@pytest.mark.parametrize("shape", ["untied", "qwen3-untied"])
def test_bf16_costs_no_more_than_its_rounding(tiny, shape):
    case, tokens = tiny[shape], some_tokens(tiny[shape], 2, 20)
    with torch.no_grad():
        got = load(case.folder, base="bf16", device="cpu", dtype=torch.bfloat16)(tokens)
    want = plain(case, tokens)
    # A token passes about 14 matmuls, whose inputs are each off by 2^-9 / sqrt(3), as noise: 0.4 % of the spread.
    assert (got - want).std() < 0.01 * want.std()
    assert (got - want).std() > 0.001 * want.std()                        # it does round


# -----------------------------------------------------------------------------
# Bases

def dequantized(case, base):
    """The checkpoint with every linear replaced by its quantized and decoded weights, fp32."""
    tensors = dict(case.tensors)
    for i in range(case.raw["num_hidden_layers"]):
        for group in GROUPS:
            names = [f"model.layers.{i}.{target}.weight" for target in group]
            scale = nvfp4.global_scale_for(*(tensors[name] for name in names))
            for name in names:
                w = tensors[name]
                tensors[name] = w.bfloat16().float() if base == "bf16" else nvfp4.dequantize(
                    *nvfp4.quantize(w, scale), torch.float32)
    return case._replace(tensors=tensors)


@pytest.mark.parametrize("shape,base", [("ragged", "nvfp4"), ("qwen3-tied", "nvfp4"), ("tied", "nvfp4"),
                                        ("tied", "bf16")])
def test_quantized_model_matches_its_decoded_weights(tiny, tmp_path, shape, base):
    tokens, replaced = some_tokens(tiny[shape], 2, 15), dequantized(tiny[shape], base)
    with torch.no_grad():
        got = load(tiny[shape].folder, base=base, device="cpu")(tokens)
        assert (got - plain(replaced, tokens)).abs().max() < FP32
        assert base == "bf16" or (got - plain(tiny[shape], tokens)).abs().max() > 0.1
        folder = write_folder(tmp_path / "model", replaced.raw, replaced.tensors)
        assert torch.equal(got, load(folder, base="bf16", device="cpu")(tokens))


# -----------------------------------------------------------------------------
# Log-probs without the (T, V) tensor


def test_all_but_the_last_layers_are_recomputed(tiny):
    """test_learner.py compares the gradients."""
    model, rows, runs = load(tiny["untied"].folder, base="nvfp4", device="cpu"), ragged_rows(tiny["untied"]), []
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
