"""
The formats against hand-worked numbers and against other people's bytes (make_fixtures_nvfp4.py made those, once, with
compressed-tensors and bitsandbytes), and the folders against what was put into them.

python -m pytest tests/test_nvfp4.py -v
"""
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
import nvfp4
from nvfp4 import FORMATS, Shards, convert, dequantize, global_scale_for, load_linear, quantize

REFERENCE = load_file(Path(__file__).parent / "nvfp4_reference.safetensors")
CASES = sorted({name.split(".")[0] for name in REFERENCE})
BASES = ["bf16", "nvfp4", "mxfp4", "nf4"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the GPU with the CPU")


def same_bytes(a, b):
    return a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


# -----------------------------------------------------------------------------
# Against the outside world

@pytest.mark.parametrize("case", CASES)
def test_bytes_and_decoded_values_are_those_of_compressed_tensors_and_bitsandbytes(case):
    want = {part: REFERENCE[f"{case}.{part}"] for part in ("w", "packed", "scale", "decoded")}
    base = case.split("_")[0]
    if base == "nvfp4":
        tensors = quantize(want["w"], 1 / REFERENCE[f"{case}.inverse"].reshape(()))
    else:
        tensors = FORMATS[base][0](want["w"])
    assert same_bytes(tensors[0], want["packed"])
    assert same_bytes(tensors[1], want["scale"])
    assert torch.equal(FORMATS[base][1](*tensors), want["decoded"].bfloat16())


def test_nf4_levels_are_normal_quantiles():
    # QLoRA, appendix E: 8 quantiles above 0 and 7 below, evenly spaced in probability, scaled to +-1. The outermost
    # probability is 1 less the mean of 1 / 32 and 1 / 30: half a step of 16 levels and of 15.
    quantile, outer = statistics.NormalDist().inv_cdf, 1 - (1 / 32 + 1 / 30) / 2
    upper = [quantile(outer + (0.5 - outer) * i / 8) for i in range(8)]
    lower = [-quantile(outer + (0.5 - outer) * i / 7) for i in range(7)]
    levels = torch.tensor(sorted(lower + [0.0] + upper)) / upper[0]
    assert torch.allclose(nvfp4.NF4, levels, atol=1e-5), (nvfp4.NF4 - levels).abs().max()


@needs_gpu
@pytest.mark.parametrize("base", BASES)
def test_gpu_and_cpu_give_the_same_bytes(base):
    torch.manual_seed(0)
    w = torch.randn(65, 192).bfloat16()
    encode, decode = FORMATS[base]
    there, here = encode(w.cuda()), encode(w)
    assert all(same_bytes(a.cpu(), b) for a, b in zip(there, here))
    assert torch.equal(decode(*there).cpu(), decode(*here))
    if base != "nvfp4":
        wide = torch.zeros(65, 200, device="cuda", dtype=torch.bfloat16)
        decode(*there, out=wide[:, :192])
        assert torch.equal(wide[:, :192].cpu(), decode(*here)) and not wide[:, 192:].any()


# -----------------------------------------------------------------------------
# NVFP4 by hand

def e2m1(code):
    """The standard's reading of a code: sign, 2 exponent bits with bias 1, 1 mantissa bit, subnormals at exponent 0."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e4m3(byte):
    """The same for a block scale: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    return (-1) ** sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@pytest.mark.parametrize("exponent", [-20, 0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_16_codes_under_all_254_block_scales_decode_exactly(dtype, exponent):
    scales = [byte for byte in range(256) if byte & 127 != 127]                 # 127 and 255 are NaN
    packed = torch.tensor([c | c + 1 << 4 for c in range(0, 16, 2)], dtype=torch.uint8).repeat(len(scales), 1)
    block_scale = torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    want = torch.tensor([[e2m1(c) * e4m3(s) * 2.0**exponent for c in range(16)] for s in scales], dtype=torch.float64)
    got = dequantize(packed, block_scale, torch.tensor(2.0**exponent), dtype)
    assert got.dtype == dtype and torch.equal(got.double(), want)


def test_even_k_sits_in_the_low_nibble():
    w = torch.zeros(1, 16)
    w[0, :3] = torch.tensor([6.0, 1.0, -0.5])              # codes 7, 2 and 9
    packed, block_scale, global_scale = quantize(w, torch.tensor(1.0))
    assert packed[0].tolist() == [0x27, 0x09, 0, 0, 0, 0, 0, 0] and block_scale.item() == 1.0
    assert dequantize(packed, block_scale, global_scale)[0, :3].tolist() == [6.0, 1.0, -0.5]


def test_both_scales_multiply():
    packed, ones = torch.full((1, 8), 0x22, dtype=torch.uint8), torch.ones(1, 1)    # all codes 2 = 1.0
    assert dequantize(packed, (ones * 3).to(torch.float8_e4m3fn), torch.tensor(0.25)).unique().item() == 0.75


def test_ties_go_to_the_even_code():
    w = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]])
    half = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert dequantize(*quantize(w, torch.tensor(1.0)))[0].tolist() == half + [-x for x in half]


def test_codes_are_the_nearest_ones():
    torch.manual_seed(0)
    w = torch.randn(64, 256)
    packed, block_scale, global_scale = quantize(w)
    scale = (block_scale.double() * global_scale.double()).repeat_interleave(16, dim=1)
    levels = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
    nearest = (w.double()[..., None] - scale[..., None] * levels).abs().amin(-1)
    error = (w.double() - dequantize(packed, block_scale, global_scale, torch.float32).double()).abs()
    # The codes are chosen in fp32, so next to a tie the other neighbour may win by 2^-23 of the weight.
    assert (error <= nearest + 2**-22 * w.double().abs()).all()


@pytest.mark.parametrize("amax,scale", [(2688.0, 1.0), (2689.0, 2.0), (1344.0, 0.5), (1.0, 2.0**-11), (0.0, 1.0)])
def test_tensor_scale_is_the_smallest_power_of_two_without_saturation(amax, scale):
    w = torch.zeros(2, 16)                                 # 2688 = 6 * 448, the largest code times the largest scale
    w[1, 5] = -amax
    assert global_scale_for(w).item() == scale
    packed, block_scale, global_scale = quantize(w)
    # The block's scale has 4 significant bits, so its maximum comes back within 1 part in 16.
    assert abs(dequantize(packed, block_scale, global_scale)[1, 5].item() + amax) <= amax / 16


def test_default_tensor_scale_makes_bf16_decoding_exact():
    torch.manual_seed(0)
    tensors = quantize(torch.randn(64, 256).bfloat16() * 0.02)
    assert torch.equal(dequantize(*tensors).float(), dequantize(*tensors, dtype=torch.float32))
    # It is the power of two that does it:
    packed, block_scale, _ = tensors
    assert not torch.equal(dequantize(packed, block_scale, torch.tensor(1 / 3)).float(),
                           dequantize(packed, block_scale, torch.tensor(1 / 3), torch.float32))


def test_shared_tensor_scale_is_the_largest_and_harms_no_part():
    torch.manual_seed(0)
    q, k, v = torch.randn(64, 64) * 3, torch.randn(16, 64) * 0.1, torch.randn(16, 64) * 0.02
    shared = global_scale_for(q, k, v)
    assert shared == global_scale_for(q) > global_scale_for(v)
    for w in (q, k, v):
        alone, together = ((w - dequantize(*quantize(w, scale))).norm() / w.norm() for scale in (None, shared))
        assert together < 1.01 * alone, (together, alone)


def test_weights_that_are_not_finite_are_refused():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"holds {bad}"):
            quantize(torch.full((1, 16), bad))


# -----------------------------------------------------------------------------
# All bases

@pytest.mark.parametrize("base,block", [("nvfp4", 16), ("mxfp4", 32), ("nf4", 64)])
def test_ragged_k_is_refused_with_its_value(base, block):
    with pytest.raises(ValueError, match=f"K={3 * block // 2} .*{block}"):
        FORMATS[base][0](torch.zeros(2, 3 * block // 2))


@pytest.mark.parametrize("base,lo,hi", [
    ("bf16", 0.0, 0.0), ("nvfp4", 0.08, 0.1), ("mxfp4", 0.1, 0.12), ("nf4", 0.08, 0.1)])
def test_relative_error_on_normal_weights(base, lo, hi):
    torch.manual_seed(0)
    w = torch.randn(128, 512).bfloat16() * 0.02
    encode, decode = FORMATS[base]
    error = ((decode(*encode(w)).float() - w.float()).norm() / w.float().norm()).item()
    assert lo <= error <= hi, error


@pytest.mark.parametrize("base", BASES)
def test_zeros_stay_zeros(base):
    encode, decode = FORMATS[base]
    assert not decode(*encode(torch.zeros(3, 64))).any()


@pytest.mark.parametrize("base", BASES)
def test_working_in_chunks_changes_nothing(base, monkeypatch):
    torch.manual_seed(0)
    w = torch.randn(13, 128)
    encode, decode = FORMATS[base]
    whole = encode(w)
    monkeypatch.setattr(nvfp4, "CHUNK", 3 * 128)           # 3 rows at a time: the last chunk is ragged
    chunked = encode(w)
    assert all(same_bytes(a, b) for a, b in zip(whole, chunked)) and torch.equal(decode(*whole), decode(*chunked))


def test_mxfp4_scale_moves_up_where_the_largest_weight_would_round_to_8():
    w = torch.zeros(2, 32)
    w[:, 0] = torch.tensor([6.99, 7.0])
    w[:, 1] = 0.5
    packed, block_scale = nvfp4.quantize_mxfp4(w)
    assert block_scale.flatten().tolist() == [127, 128]                         # 2^0 and 2^1
    assert nvfp4.dequantize_mxfp4(packed, block_scale)[:, :2].tolist() == [[6.0, 0.5], [8.0, 0.0]]


# -----------------------------------------------------------------------------
# Folders

LAYERS, WIDTH, KV_WIDTH, FFN = 2, 64, 32, 96


@pytest.fixture
def bf16_folder(tmp_path):
    """A random Qwen2-shaped folder in two shards, as published checkpoints come."""
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(50, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for i in range(LAYERS):
        shapes = {"self_attn.q_proj.weight": (WIDTH, WIDTH), "self_attn.k_proj.weight": (KV_WIDTH, WIDTH),
                  "self_attn.v_proj.weight": (KV_WIDTH, WIDTH), "self_attn.o_proj.weight": (WIDTH, WIDTH),
                  "mlp.gate_proj.weight": (FFN, WIDTH), "mlp.up_proj.weight": (FFN, WIDTH),
                  "mlp.down_proj.weight": (WIDTH, FFN), "self_attn.q_proj.bias": (WIDTH,),
                  "input_layernorm.weight": (WIDTH,)}
        for n, (name, shape) in enumerate(shapes.items()):                      # k and up outweigh their fellows
            tensors[f"model.layers.{i}.{name}"] = torch.randn(shape) * (0.1 if n % 2 else 0.01)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    folder = tmp_path / "bf16"
    folder.mkdir()
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(
        {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": WIDTH}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run_cli(src, out):
    script = Path(nvfp4.__file__)
    return subprocess.run([sys.executable, script, src, out], capture_output=True, text=True)


def test_converted_folder_loads_back_as_quantized_in_memory(bf16_folder, tmp_path):
    out = tmp_path / "out"
    done = run_cli(bf16_folder, out)
    assert done.returncode == 0, done.stderr
    assert [line.split("relative error")[0].strip() for line in done.stdout.splitlines()] == [
        "layer  0", "layer  1", "all 2 layers"]
    before, after = Shards(bf16_folder), Shards(out)
    linears = {f"model.layers.{i}.{name}" for i in range(LAYERS) for group in nvfp4.LINEARS for name in group}
    for name in before.names:
        if name.removesuffix(".weight") not in linears:
            assert torch.equal(after.get(name), before.get(name)), name
    for i in range(LAYERS):
        for group in nvfp4.LINEARS:
            names = [f"model.layers.{i}.{name}" for name in group]
            weights = [before.get(f"{name}.weight") for name in names]
            scale = global_scale_for(*weights)                                  # one for q, k, v and one for gate, up
            for name, w in zip(names, weights):
                assert f"{name}.weight" not in after.names
                assert after.get(f"{name}.weight_global_scale").tolist() == [1 / scale.item()]
                assert all(same_bytes(a, b) for a, b in zip(load_linear(after, name), quantize(w, scale)))
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_size"] == WIDTH and config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert (out / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "out"]  # the temporary folder is gone


def test_output_is_split_into_shards_that_the_index_lists(bf16_folder, tmp_path, monkeypatch):
    convert(bf16_folder, tmp_path / "one", "cpu")
    monkeypatch.setattr(nvfp4, "SHARD_BYTES", 10_000)
    convert(bf16_folder, tmp_path / "many", "cpu")
    one, many = Shards(tmp_path / "one"), Shards(tmp_path / "many")
    assert len(set(one.names.values())) == 1 and len(set(many.names.values())) > 2
    assert one.names.keys() == many.names.keys()
    assert all(same_bytes(one.get(name), many.get(name)) for name in one.names)
    assert max(file.stat().st_size for file in many.names.values()) < 10_000 + 4_000        # 4,000: headers


def test_single_file_folder_needs_no_index(tmp_path):
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    shards = Shards(tmp_path)
    assert list(shards.names) == ["a"] and shards.shape("a") == (2, 3) and shards.get("a").sum() == 15


def remove_shard(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_shard(folder):
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_header(folder):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def lose_tensor(folder):
    file = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)


def lose_tensor_and_its_index_entry(folder):
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))


def break_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')


def other_architecture(folder):
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}))


def already_quantized(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))


def edit_weight(folder, edit):
    name = "model.layers.1.mlp.down_proj.weight"
    file = Shards(folder).names[name]
    tensors = load_file(file)
    tensors[name] = edit(tensors[name])
    save_file(tensors, file)


def ragged_k(folder):
    edit_weight(folder, lambda w: w[:, :88].contiguous())


def nan_in_the_last_layer(folder):                                              # found only after much has been written
    edit_weight(folder, lambda w: w * float("nan"))


@pytest.mark.parametrize("damage,words", [
    (remove_shard, ["model-00002-of-00002.safetensors", "missing"]),
    (cut_shard, ["model-00002-of-00002.safetensors", "cut off"]),
    (cut_header, ["model-00001-of-00002.safetensors", "cut off"]),
    (lose_tensor, ["model-00002-of-00002.safetensors", "model.norm.weight"]),
    (lose_tensor_and_its_index_entry, ["model.layers.1.mlp.up_proj.weight"]),
    (break_index, ["model.safetensors.index.json", "JSON"]),
    (other_architecture, ["config.json", "LlamaForCausalLM"]),
    (already_quantized, ["config.json", "quantized already"]),
    (ragged_k, ["model.layers.1.mlp.down_proj.weight", "K=88", "16"]),
    (nan_in_the_last_layer, ["model.layers.1.mlp.down_proj", "nan"]),
])
def test_bad_source_is_one_clear_line_and_leaves_nothing_behind(bf16_folder, tmp_path, damage, words):
    damage(bf16_folder)
    with pytest.raises(ValueError) as error:
        convert(bf16_folder, tmp_path / "out", "cpu")
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


def test_cli_ends_with_one_line_and_an_error_code(bf16_folder, tmp_path):
    cut_shard(bf16_folder)
    done = run_cli(bf16_folder, tmp_path / "out")
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "model-00002-of-00002.safetensors" in done.stderr


def test_an_out_that_holds_something_is_refused_and_kept(bf16_folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    convert(bf16_folder, out, "cpu")                                            # empty: allowed
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match="not an empty folder"):
        convert(bf16_folder, out, "cpu")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_other_four_bit_checkpoints_are_not_read_as_ours(bf16_folder, tmp_path):
    out = tmp_path / "out"
    convert(bf16_folder, out, "cpu")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "modelopt"                  # stores the scale, not its reciprocal
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config"):
        load_linear(Shards(out), "model.layers.0.mlp.up_proj")
    shutil.copy(bf16_folder / "config.json", out)                               # and a config that says nothing of it
    with pytest.raises(ValueError, match="quantization_config"):
        load_linear(Shards(out), "model.layers.0.mlp.up_proj")
