"""
calibrate.py: GPTQ against a naive one in float64, its inputs against the model's own, the KL that it prints against the
logits of two complete models.

python -m pytest tests/test_calibrate.py -v
"""
import json
import re
import shutil

import pytest
import torch
from helpers import TINY, same_bytes
from tiny_qwen2 import held_by, plain_logits

import calibrate
import nvfp4
from calibrate import Chunk, Text, output_error
from files import UserError
from loading import load
from model import Layer, ModelConfig
from prompts import Tokenizer, encode_prompts
from tasks.problems import Problem
from weights import ModelFolder, Shards, WeightReader, load_nvfp4

CPU = torch.device("cpu")
EPS = 2.0**-24                                             # one rounding to fp32


def linear(N, K, T=400, seed=0):
    """-> w (N, K), and H (K, K) of inputs that are correlated and unequal in size, like those of a network."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K // 4, generator=generator) @ torch.randn(K // 4, K, generator=generator)
    x = (x / K**0.5 + 0.1 * torch.randn(T, K, generator=generator)) * torch.logspace(-0.5, 0.5, K)
    return torch.randn(N, K, generator=generator) / K**0.5, x.T @ x / T


def gptq(w, hessian, scale):
    """-> calibrate.gptq's tensors for one matrix."""
    return calibrate.gptq([w], [hessian], [scale])[0]


def decoded(tensors):
    return nvfp4.dequantize(*tensors, dtype=torch.float32).double()


# -----------------------------------------------------------------------------
# One linear


def inverses(hessian):
    """Eliminates the damped H's columns one by one, in float64. For each column i, yields the diagonal element of the
    inverse of H without the columns before it, and row i divided by that element.
    """
    damped = hessian.double()
    inverse = torch.linalg.inv(damped + 0.02 * damped.diagonal().mean() * torch.eye(len(damped)))
    for i in range(len(damped)):
        yield inverse[i, i].item(), inverse[i] / inverse[i, i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]


def test_overflowing_activations_are_one_line():
    with pytest.raises(UserError, match="--calibrate"):
        calibrate.inverse_factor(torch.full((16, 16), torch.inf))


def naive_gptq(w, hessian, global_scale):
    """Optimal brain quantization, column by column, carrying every scale it tries through the block -> (N, K)."""
    steps = list(inverses(hessian))
    e4m3 = torch.arange(127).byte().view(torch.float8_e4m3fn).double()
    levels = torch.tensor([-6, -4, -3, -2, -1.5, -1, -.5, 0, .5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    out = torch.empty_like(w, dtype=torch.float64)
    for row, result in zip(w.double(), out):
        for start in range(0, len(row), 16):
            wanted = row[start:start + 16].abs().max() / 6 / global_scale.double()
            first = (e4m3 - wanted).abs().argmin().item()
            tried = []
            for code in range(max(1, first - 4), min(126, first + 6) + 1):
                scale = e4m3[code] * global_scale.double()
                rest, values, cost = row.clone(), [], 0.0
                for i in range(start, start + 16):
                    variance, effect = steps[i]
                    values.append(levels[(levels * scale - rest[i]).abs().argmin()] * scale)
                    wrong = rest[i] - values[-1]
                    cost += wrong**2 / variance
                    rest -= wrong * effect
                tried.append((cost, abs(code - first), torch.stack(values), rest))
            _, _, result[start:start + 16], row = min(tried, key=lambda t: t[:2])
    return out


@pytest.mark.parametrize("largest", [8192, 64])            # 160 columns exceed a PANEL; or 64 + 64 + 32
def test_gptq_matches_a_naive_one_in_float64(largest, monkeypatch):
    monkeypatch.setattr(calibrate, "LARGEST_HESSIAN", largest)
    w, hessian = linear(6, 160)
    w[2, 32:48] = 0
    scale = nvfp4.global_scale_for(w)
    got = decoded(gptq(w, hessian, scale))
    parts = [slice(i, i + largest) for i in range(0, 160, largest)]
    want = torch.cat([naive_gptq(w[:, part], hessian[part, part], scale) for part in parts], dim=1)
    # fp32 is off by about 1e-5 of a step, so one in 1e5 roundings goes the other way, and the rest of its row with it.
    # There are 960 roundings, so the odds of two such rows in six are below one in a thousand.
    differ = (got != want).any(1)
    assert differ.sum() <= 1
    wrong = torch.stack([w - got, w - want]).double()
    errors = ((wrong @ hessian.double()) * wrong).sum((1, 2))
    assert abs(errors[0] / errors[1] - 1) < 0.1            # one row in six changes by less than half
    if not differ.any():
        assert errors[0] == errors[1]


def test_output_error_is_the_squared_error_of_outputs():
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    w, _ = linear(4, 32)
    tensors = nvfp4.quantize(w)
    want = (x.double() @ (w.double() - decoded(tensors)).T).square().sum() / 50
    assert output_error(w, tensors, x.T @ x / 50) == pytest.approx(want.item(), rel=50 * 32 * EPS)


def test_best_codes_keeps_the_smallest_error():
    # One row with nearly white inputs, so that GPTQ, which is greedy, sometimes loses, and nearest sometimes wins.
    won = [0, 0, 0]
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.randn(64, 32, generator=generator), torch.randn(1, 32, generator=generator)
        hessian, scale = x.T @ x / 64, nvfp4.global_scale_for(w)
        errors = [output_error(w, tensors, hessian) for tensors in (
            gptq(w, hessian, scale), nvfp4.quantize(w, scale, hessian.diagonal()),
            nvfp4.quantize(w, scale, offsets=[0]), *calibrate.best_codes([w], [hessian], [scale]))]
        assert errors[3] == min(errors[:3])
        won[errors.index(errors[3])] += 1
    assert min(won) > 0


def test_gptq_handles_zeros_and_dead_channels():
    w, hessian = linear(4, 64)
    dead = [5, 6, 7, *range(16, 32)]                       # includes a complete block
    alive = hessian.clone()
    hessian[dead] = 0
    hessian[:, dead] = 0
    w[1] = 0
    w[3, 32:48] = 0
    scale = nvfp4.global_scale_for(w)
    got = decoded(gptq(w, hessian, scale))
    assert got.isfinite().all() and not got[1].any()
    step = nvfp4.quantize(w, scale)[1].float().repeat_interleave(16, 1) * scale
    assert ((got - w).abs()[:, 16:32] <= 2 * step[:, 16:32]).all()     # no error is moved onto a dead channel
    for nothing in (torch.zeros(64, 64), alive * 1e-30):
        assert decoded(gptq(w, nothing, scale)).isfinite().all()
    assert not decoded(gptq(torch.zeros(2, 64), alive, torch.tensor(1.0))).any()


# -----------------------------------------------------------------------------
# A layer

def texts_of(case, *sizes, seed=0):
    """Random texts of these sizes (prompt, answer)."""
    generator = torch.Generator().manual_seed(seed)
    return [Text(torch.randint(case.raw["vocab_size"], (sum(size),), generator=generator).tolist(), size[0])
            for size in sizes]


@pytest.fixture
def some_layer(tiny):
    """-> a layer of the 16-bit model, the model's embedding and config."""
    files = WeightReader(ModelFolder(tiny["untied"].folder), "bf16", CPU, torch.float32)
    config = ModelConfig.from_json(files.config)
    embed = files.read("model.embed_tokens.weight", config.vocab, config.hidden).float()
    layer = Layer(config, 1, files.read, files.frozen, files.dtype)
    return layer.requires_grad_(False), embed, config


def heard(layer, chunk):
    """Runs the exact stream through a layer -> each linear's input as calibrate sees it, and the layer's result."""
    inputs = {}
    with calibrate.listening(layer, inputs.__setitem__):
        result = chunk.through(layer, chunk.exact)
    return [inputs[linear] for linear in calibrate.linears_of(layer)], result


@torch.no_grad()
def test_listener_hears_inputs_and_changes_no_result(both, tiny, some_layer):
    layer, embed, config = some_layer
    chunk = Chunk(texts_of(tiny["untied"], (3, 9), (5, 1)), embed, config)
    want = layer(chunk.exact, *chunk.rope, chunk.attend)
    (qkv, o, gate_up, down), got = heard(layer, chunk)
    assert torch.equal(got, want)
    # The layer in float64, from each linear's input. Sums of up to 192 fp32 terms of size 1 are off by 1e-6.
    exact = {linear: linear.weight.dequantize().double() for linear in calibrate.linears_of(layer)}
    middle = chunk.exact + layer.o(o)
    for x, norm, given in ((chunk.exact, layer.input_norm, qkv), (middle, layer.post_norm, gate_up)):
        x = x.double()
        normed = x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * norm.weight.double()
        # The sum of D squares, whose error the root halves, and a few more roundings.
        assert ((given - normed).abs() <= (config.hidden / 2 + 6) * EPS * normed.abs()).all()
    gate, up = (gate_up.double() @ exact[layer.gate_up].T).chunk(2, dim=-1)
    assert torch.allclose(down.double(), torch.nn.functional.silu(gate) * up, rtol=0, atol=1e-5)
    assert torch.allclose(got.double(), middle.double() + down.double() @ exact[layer.down].T, rtol=0, atol=1e-5)
    assert torch.allclose(middle.double(), chunk.exact.double() + o.double() @ exact[layer.o].T, rtol=0, atol=1e-5)


@torch.no_grad()
def test_hessians_are_means_over_all_tokens(both, tiny, some_layer, monkeypatch):
    monkeypatch.setattr(calibrate, "CHUNK_TOKENS", 16)
    layer, embed, config = some_layer
    chunks = calibrate.chunks_of(texts_of(tiny["untied"], (3, 9), (5, 1), (2, 11)), embed, config)
    inputs = [heard(layer, chunk)[0] for chunk in chunks]
    moved = [layer(chunk.exact, *chunk.rope, chunk.attend) for chunk in chunks]
    got = calibrate.hessians(layer, chunks)
    assert len(chunks) == 3 and all(torch.equal(c.exact, x) for c, x in zip(chunks, moved))
    for hessian, parts in zip(got, zip(*inputs)):
        x = torch.cat(parts).double()
        assert len(x) == 28 and hessian.dtype == torch.float32            # an answer's last token is no input
        assert ((hessian - x.T @ x / 28).abs() <= (28 + 2) * EPS * (x.abs().T @ x.abs() / 28)).all()


# -----------------------------------------------------------------------------
# A model

@torch.no_grad()
@pytest.mark.parametrize("shape,live", [("tied", 90), ("untied", None), ("qwen3-tied", 90)])
def test_printed_kl_matches_the_logits_of_both_models(tiny, tmp_path, monkeypatch, capsys, shape, live):
    case = tiny[shape]
    monkeypatch.setattr(calibrate, "CHUNK_TOKENS", 30)           # several chunks of several texts each
    texts = texts_of(case, *((3 + i % 4, 5 + i) for i in range(18)))
    calibrate.to_nvfp4(calibrate.source_of(ModelFolder(case.folder), CPU), tmp_path / "out", texts, live)
    models = load(case.folder, "bf16", "cpu"), load(tmp_path / "out", "nvfp4", "cpu")
    sums, off, ratio = [], 0.0, 0.0
    for tokens, start in texts[-3:]:                       # an eighth, rounded up
        exact, coded = (plain_logits(case.raw, held_by(model), tokens)[start - 1:-1, :live] for model in models)
        for model, want in zip(models, (exact, coded)):
            got = model(torch.tensor([tokens]))[0, start - 1:-1, :live]
            off = max(off, (got - want).abs().max().item())
        p, q = exact.log_softmax(-1), coded.log_softmax(-1)
        ratio = max(ratio, (p - q).abs().max().item())
        sums.append(((p.exp() * (p - q)).sum().item(), len(p)))
    total, count = map(sum, zip(*sums))
    said, _ = capsys.readouterr().out.splitlines()         # the last line is load's
    assert json.loads((tmp_path / "out" / "config.json").read_text())["calibration"] == said
    found = re.fullmatch(r"KL\(16 bits \|\| 4 bits\) (\S+) nats per token, on the 63 tokens of 3 answers .*", said)
    kl = float(found[1])
    # Logits that are off by `off` move a log-prob by up to 2 * off and p by a factor of about 1 + 2 * off.
    slack = 2 * 2 * off + 2 * off * ratio + 0.005 * kl     # it is printed with three digits
    assert count == 20 + 21 + 22 and slack < 1e-3
    assert kl == pytest.approx(total / count, abs=slack) and kl > 10 * slack


def test_folder_has_the_codes_that_were_found(tiny, tmp_path, monkeypatch, capsys):
    case, found = tiny["untied"], {}
    coded_linears = calibrate.coded_linears

    def kept(*arguments):
        for name, tensors in coded_linears(*arguments):
            found[name] = tensors
            yield name, tensors

    monkeypatch.setattr(calibrate, "coded_linears", kept)
    out, texts = tmp_path / "out", texts_of(case, *[(4, 12)] * 8)
    for last, at_once in ((texts[0], 1), (texts[7], 2)):   # the last only measures the KL, so it must change no code
        before = dict(found)
        monkeypatch.setattr(calibrate, "layers_at_once", lambda *_: at_once)
        shutil.rmtree(out, ignore_errors=True)
        calibrate.to_nvfp4(calibrate.source_of(ModelFolder(case.folder), CPU), out, [*texts[:7], last])
    assert before and all(same_bytes(t[0], before[name][0]) for name, t in found.items())
    tensors, files = dict(case.tensors), Shards(out)
    for name, want in found.items():
        del tensors[f"{name}.weight"]
        got = load_nvfp4(files, name)
        assert all(same_bytes(a.reshape(-1), b.reshape(-1)) for a, b in zip(got, want)), name
    assert len(found) == 7 * 2 and not any("_proj.weight" in name for name in tensors)
    assert all(torch.equal(files.get(name), tensor) for name, tensor in tensors.items())
    names = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
    scale = nvfp4.global_scale_for(*(case.tensors[f"{name}.weight"] for name in names))
    assert all(found[name][2] == scale for name in names)              # shared, as inference engines require
    loaded = held_by(load(out, "nvfp4", "cpu"))
    assert all(torch.equal(loaded[f"{name}.weight"], decoded(t).float()) for name, t in found.items())


def test_own_answers_follow_the_seed(tiny_nvfp4):
    tokenizer = Tokenizer(TINY)
    problems = [Problem(f"p{i}", f"What is {i} + 2?", f"{i + 2}") for i in range(4)]
    problems = encode_prompts(tokenizer, problems, "boxed", 99)
    texts, again, other = (calibrate.own_answers(tiny_nvfp4, tokenizer, problems, CPU, 12, seed) for seed in (0, 0, 1))
    assert texts == again != other and len(texts) == 4
    for text, problem in zip(texts, problems):
        answer = text.tokens[text.start:]
        assert text.tokens[:text.start] == problem.prompt
        assert 1 <= len(answer) <= 12 and (len(answer) == 12 or answer[-1] in tokenizer.end_ids)
    with pytest.raises(ValueError, match="--calibrate needs at least 2 problems, .*, got 1"):
        calibrate.own_answers(tiny_nvfp4, tokenizer, problems[:1], CPU, 12, 0)
