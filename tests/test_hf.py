"""
Model folders come back as they were written, and what is wrong with one is one line that names the file.

python -m pytest tests/test_hf.py -v
"""
import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from test_lora import FP32, adapted, tokens_of
from tiny_qwen2 import SHAPES, TARGETS, config_json, merged, plain_logits, random_tensors, write_folder

import nvfp4
import weights as weights_py
from calibrate import source_of, to_nvfp4
from model import ModelConfig, load
from weights import (
    NVFP4_CONFIG,
    NVFP4_WEIGHTS,
    Shards,
    check_lengths,
    check_model,
    hub_id,
    load_nvfp4,
    model_tensors,
    nvfp4_tensors,
    read_config,
    resolve,
    save_model,
)

HERE = Path(__file__).parent
GROUPS = TARGETS[:3], TARGETS[3:4], TARGETS[4:6], TARGETS[6:]          # fused linears: one tensor scale each


def same_bytes(a, b):
    return a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def plain(case, tokens):
    """Float64 logits of every row of tokens (B, T)."""
    return torch.stack([plain_logits(case.raw, case.tensors, row) for row in tokens])


# -----------------------------------------------------------------------------
# Tensors in and out

def quantized(case):
    """The checkpoint as compressed-tensors stores it: one global scale for q, k, v and one for gate, up."""
    tensors = dict(case.tensors)
    for i in range(case.raw["num_hidden_layers"]):
        for group in GROUPS:
            names = [f"model.layers.{i}.{target}" for target in group]
            weights = [tensors.pop(f"{name}.weight") for name in names]
            scale = nvfp4.global_scale_for(*weights)
            for name, w in zip(names, weights):
                tensors |= dict(nvfp4_tensors(name, *nvfp4.quantize(w, scale)))
    return tensors


def write_nvfp4(case, out):
    save_model(quantized(case).items(), case.folder, out, {"quantization_config": NVFP4_CONFIG})
    return out


@pytest.mark.parametrize("files", [1, 3])
def test_every_tensor_of_a_folder_comes_as_it_was_written(tiny, tmp_path, files):
    case = tiny["untied"]
    shards = Shards(write_folder(tmp_path / "model", case.raw, case.tensors, files))
    assert shards.names.keys() == case.tensors.keys() and len(set(shards.names.values())) == files
    for name, want in case.tensors.items():
        assert torch.equal(shards.get(name), want)


def test_an_index_without_a_weight_map_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ValueError, match=r"index.json: weight_map is \[\], expected an object"):
        Shards(tmp_path)


def test_a_single_safetensors_file_needs_no_index(tmp_path):
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    shards = Shards(tmp_path)
    assert list(shards.names) == ["a"] and torch.equal(shards.get("a"), torch.arange(6.0).view(2, 3))


def test_a_written_nvfp4_linear_is_read_back_as_quantized_in_memory(tiny, tmp_path):
    case = tiny["untied"]
    (case.folder / "tokenizer.json").write_text("{}")
    shards = Shards(write_nvfp4(case, tmp_path / "out"))
    for i in range(case.raw["num_hidden_layers"]):
        for group in GROUPS:
            names = [f"model.layers.{i}.{target}" for target in group]
            weights = [case.tensors[f"{name}.weight"] for name in names]
            scale = nvfp4.global_scale_for(*weights)
            for name, w in zip(names, weights):
                assert f"{name}.weight" not in shards.names
                assert shards.get(f"{name}.weight_global_scale").tolist() == [1 / scale.item()]
                for got, want in zip(load_nvfp4(shards, name), nvfp4.quantize(w, scale), strict=True):
                    assert same_bytes(got, want)
    linears = [f"{name}.weight" for name in TARGETS]
    for name, want in case.tensors.items():
        if not any(name.endswith(linear) for linear in linears):
            assert torch.equal(shards.get(name), want), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 128 and config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]          # the temporary folder is gone


def test_16_bit_weights_are_saved_without_the_sources_quantization_config(tiny, tmp_path):
    source = write_nvfp4(tiny["tied"], tmp_path / "four")
    save_model(tiny["tied"].tensors.items(), source, tmp_path / "sixteen")
    config = json.loads((tmp_path / "sixteen" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    tokens = tokens_of(tiny["tied"], 2, 9)
    with torch.no_grad():
        got, want = (load(folder, "bf16", "cpu")(tokens) for folder in (tmp_path / "sixteen", tiny["tied"].folder))
    assert torch.equal(got, want)


def test_output_is_split_into_shards_that_the_index_lists(tiny, tmp_path, monkeypatch):
    write_nvfp4(tiny["tied"], tmp_path / "one")
    monkeypatch.setattr(weights_py, "SHARD_BYTES", 10_000)
    write_nvfp4(tiny["tied"], tmp_path / "many")
    one, many = Shards(tmp_path / "one"), Shards(tmp_path / "many")
    assert len(set(one.names.values())) == 1 and len(set(many.names.values())) > 2
    assert one.names.keys() == many.names.keys()
    assert all(same_bytes(one.get(name), many.get(name)) for name in one.names)
    largest = max(one.get(name).nbytes for name in one.names)
    assert max(file.stat().st_size for file in many.names.values()) < max(10_000, largest) + 4_000      # of header
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(one.get(name).nbytes for name in one.names)


def test_an_out_that_holds_something_is_refused_and_kept(tiny, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_nvfp4(tiny["tied"], out)                                        # empty: allowed
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match="out: exists and is not an empty folder"):
        write_nvfp4(tiny["tied"], out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_model_that_fails_half_way_leaves_no_folder_behind(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(weights_py, "SHARD_BYTES", 10_000)

    def tensors():
        yield from list(tiny["tied"].tensors.items())[:9]
        raise ValueError("the tenth is bad")

    with pytest.raises(ValueError, match="the tenth is bad"):
        save_model(tensors(), tiny["tied"].folder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# NVFP4 folders as models

def test_an_nvfp4_folder_computes_the_bits_of_quantizing_on_load(tiny, tmp_path):
    for shape in SHAPES:
        tokens = tokens_of(tiny[shape], 2, 15)
        write_nvfp4(tiny[shape], tmp_path / shape)
        with torch.no_grad():
            want = load(tiny[shape].folder, base="nvfp4", device="cpu")(tokens)
            assert torch.equal(load(tmp_path / shape, base="nvfp4", device="cpu")(tokens), want)
    with pytest.raises(ValueError, match="holds NVFP4 weights: --base mxfp4"):
        load(tmp_path / "tied", base="mxfp4", device="cpu")


def foreign_nvfp4_folder(case, folder):
    """As other quantizers write it: a global scale for each matrix, max / 2688: q, k and v differ and none is 2^n."""
    stored, replaced = dict(case.tensors), dict(case.tensors)
    for name in [n for n in case.tensors if any(n.endswith(f"{t}.weight") for t in TARGETS)]:
        w = stored.pop(name)
        inverse = 2688 / w.float().abs().max()
        packed, scale, g = nvfp4.quantize(w, 1 / inverse)
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale,
                   f"{stem}.weight_global_scale": inverse.reshape(1)}
        replaced[name] = nvfp4.dequantize(packed, scale, g, torch.float32)
    write_folder(folder, case.raw | {"quantization_config": NVFP4_CONFIG}, stored)
    return folder, case._replace(tensors=replaced)


def test_an_nvfp4_folder_with_a_global_scale_for_each_matrix_loads(tiny, tmp_path):
    folder, replaced = foreign_nvfp4_folder(tiny["untied"], tmp_path / "foreign")
    model, tokens = load(folder, base="nvfp4", device="cpu"), tokens_of(tiny["untied"], 2, 15)
    with torch.no_grad():
        assert (model(tokens) - plain(replaced, tokens)).abs().max() < FP32


@pytest.mark.parametrize("change", [
    dict(quant_method="modelopt"),                                        # stores the scale, not its reciprocal
    dict(config_groups={}), None,
    dict(config_groups={"group_0": {"weights": NVFP4_WEIGHTS | {"group_size": 32}}}),
    dict(config_groups={"group_0": {"weights": NVFP4_WEIGHTS | {"num_bits": 8}}})])
def test_other_four_bit_checkpoints_are_not_read_as_ours(tiny, tmp_path, change):
    out = write_nvfp4(tiny["tied"], tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    if change is None:
        del config["quantization_config"]                                 # a config that says nothing of it
    else:
        config["quantization_config"] |= change
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json: quantization_config is not that of compressed-tensors NVFP4"):
        load(out, "nvfp4", "cpu")


@pytest.mark.parametrize("part,value,words", [
    ("weight_scale", torch.full((64, 4), -1.0).to(torch.float8_e4m3fn), "a block scale is negative or NaN"),
    ("weight_scale", torch.full((64, 4), float("nan")).to(torch.float8_e4m3fn), "a block scale is negative or NaN"),
    ("weight_scale", torch.ones(64, 4), "is F32, expected F8_E4M3"),
    ("weight_packed", torch.zeros(64, 32), "is F32, expected U8"),
    ("weight_packed", torch.zeros(64, 16, dtype=torch.uint8), r"shape \(64, 16\), config.json says \(64, 32\)"),
    ("weight_global_scale", torch.zeros(0), r"weight_global_scale has shape \(0,\), expected one number"),
    ("weight_global_scale", torch.ones(2), r"weight_global_scale has shape \(2,\), expected one number"),
    ("weight_scale", torch.zeros(0).to(torch.float8_e4m3fn), r"weight_scale has shape \(0,\)"),
    ("weight_packed", torch.zeros(0, dtype=torch.uint8), r"weight_packed has shape \(0,\)"),
    ("weight_global_scale", torch.zeros(1), r"weight_global_scale is \[0.0\]"),
    ("weight_global_scale", torch.full((1,), -3.0), r"weight_global_scale is \[-3.0\]"),
    ("weight_global_scale", torch.full((1,), float("nan")), r"weight_global_scale is \[nan\]")])
def test_an_nvfp4_linear_that_decodes_to_nonsense_is_refused_by_name(tiny, tmp_path, part, value, words):
    name = "model.layers.1.self_attn.o_proj"
    tensors = quantized(tiny["tied"]) | {f"{name}.{part}": value}
    folder = write_folder(tmp_path / "bad", tiny["tied"].raw | {"quantization_config": NVFP4_CONFIG}, tensors)
    with pytest.raises(ValueError, match=f"bad.*: .*{name}.*{words}"):
        load(folder, "nvfp4", "cpu")


# -----------------------------------------------------------------------------
# A model as a folder

@pytest.mark.parametrize("shape", SHAPES)
def test_a_loaded_model_yields_the_tensors_of_its_folder(tiny, shape):
    got = dict(model_tensors(load(tiny[shape].folder, base="bf16", device="cpu")))
    assert got.keys() == tiny[shape].tensors.keys()
    for name, want in tiny[shape].tensors.items():
        assert torch.equal(got[name], want.float()), name


@pytest.mark.parametrize("shape", ["tied", "untied", "qwen3-tied"])
@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
def test_a_merged_folder_is_a_bf16_model_with_the_same_logits(tiny, tmp_path, monkeypatch, shape, base):
    case, tokens = tiny[shape], tokens_of(tiny[shape], 2, 13)
    model, adapter = adapted(case, base=base)
    monkeypatch.setattr(weights_py, "SHARD_BYTES", 20_000)                       # several shards
    tensors = ((name, t.detach().bfloat16()) for name, t in model_tensors(model))
    save_model(tensors, case.folder, tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    again = load(tmp_path / "merged", base="bf16", device="cpu")
    for name, got in model_tensors(again):
        assert torch.equal(got.bfloat16().float(), got.float()), f"{name} is not bf16"
    if base == "bf16":
        for name, exact in merged(case.tensors, adapter, 6 / 4).items():
            got = dict(model_tensors(again))[name].double()
            assert ((got - exact).abs() <= 2.0**-8 * exact.abs() + 1e-7).all(), name
    with torch.no_grad():
        want, got = model(tokens), again(tokens)
    # A weight is off by 2^-9 / sqrt(3) of itself, as noise, in ~14 matrices on a token's way: 0.4 % of the spread. The
    # adapter, large beside W, makes the blocks amplify it: seen 1.0 %.
    assert (got - want).std() < 0.02 * want.std()


# -----------------------------------------------------------------------------
# Bad input: one ValueError that names the file or tensor

def broken(tiny, folder, config=None, tensors=None, files=1, shape="tied"):
    return write_folder(folder, tiny[shape].raw | (config or {}), tiny[shape].tensors | (tensors or {}), files)


@pytest.mark.parametrize("config,message", [
    (dict(architectures=["LlamaForCausalLM"]), r"config.json: architectures is \['LlamaForCausalLM'\]"),
    (dict(use_sliding_window=True), "config.json: use_sliding_window is True"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "config.json: rope_scaling is .*yarn"),
    (dict(rope_theta=None, rope_parameters=dict(rope_type="yarn", rope_theta=1e6)),
     "config.json: rope_parameters is .*yarn"),
    *((dict([(key, value)]), f"config.json: {key} is ") for key, values in {
        "hidden_act": ["gelu", 3], "num_hidden_layers": [0, -1, 2.0, "2", True, 10**9], "vocab_size": [[101], 0],
        "rms_norm_eps": [-1e-6, 0, "1e-6"], "rope_theta": [-1, "x"], "tie_word_embeddings": ["yes", 1],
        "max_position_embeddings": [0, "512"], "num_key_value_heads": [0, {}], "architectures": ["Qwen2ForCausalLM", 1],
        "quantization_config": [[], "x"]}.items() for value in values),
    (dict(num_key_value_heads=3), "expected an even head_dim"), (dict(head_dim=31), "expected an even head_dim"),
    (dict(num_attention_heads=64), "expected an even head_dim"), (dict(hidden_size=66), "expected an even head_dim"),
    (dict(num_attention_heads=256), "expected an even head_dim"),
    (dict(head_dim=32), r"q_proj.bias has shape \(64,\), config.json says \(128,\)"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "config.json: layer_types is .*sliding"),
    (dict(layer_types="full_attention"), "config.json: layer_types is 'full_attention'"),
    (dict(num_hidden_layers=1), "12 tensors that config.json does not account for, first model.layers.1"),
    (dict(hidden_size=128), r"layers.0.self_attn.q_proj.bias has shape \(64,\), config.json says \(128,\)"),
    (dict(num_hidden_layers=3), "no tensor model.layers.2"),
    (dict(tie_word_embeddings=False), "no tensor lm_head.weight"),
])
def test_a_config_that_does_not_fit_model_or_tensors_is_refused(tiny, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load(broken(tiny, tmp_path / "model", config), base="nvfp4", device="cpu")


@pytest.mark.parametrize("config,message", [
    (dict(architectures=["Qwen3MoeForCausalLM"]),
     r"architectures is .*expected one of Qwen2ForCausalLM, Qwen3ForCausalLM"),
    (dict(attention_bias=True), "config.json: attention_bias is True, expected false: a Qwen3 with biases"),
    (dict(head_dim=None), "config.json: lacks head_dim, expected a whole number"),
    (dict(head_dim=16), r"q_norm.weight has shape \(32,\), config.json says \(16,\)"),
    (dict(head_dim=33), "expected an even head_dim"), (dict(head_dim=-32), "config.json: head_dim is -32"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "config.json: rope_scaling is .*yarn"),
    (dict(architectures=["Qwen2ForCausalLM"]),
     r"4 tensors .* does not account for, first model.layers.0.self_attn.k_norm"),
])
def test_a_qwen3_that_model_py_would_compute_otherwise_is_refused(tiny, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load(broken(tiny, tmp_path / "model", config, shape="qwen3-tied"), base="nvfp4", device="cpu")


def test_a_qwen3_with_biases_of_q_k_or_v_and_one_without_its_norms_are_refused(tiny, tmp_path):
    bias = {"model.layers.1.self_attn.v_proj.bias": torch.zeros(64)}
    with pytest.raises(ValueError, match="1 tensors .* account for, first model.layers.1.self_attn.v_proj.bias"):
        load(broken(tiny, tmp_path / "bias", tensors=bias, shape="qwen3-tied"), device="cpu")
    case = tiny["qwen3-tied"]
    tensors = {name: t for name, t in case.tensors.items() if name != "model.layers.1.self_attn.k_norm.weight"}
    with pytest.raises(ValueError, match="no tensor model.layers.1.self_attn.k_norm.weight"):
        load(write_folder(tmp_path / "lacks", case.raw, tensors), device="cpu")


def test_the_config_that_transformers_writes_for_a_qwen3_is_read(tiny, tmp_path):
    case = tiny["qwen3-tied"]
    written = read_config(HERE / "qwen3_config.json")
    assert "rope_theta" in written["rope_parameters"] and set(written["layer_types"]) == {"full_attention"}
    config = ModelConfig.from_json(written)
    assert config == ModelConfig.from_json(read_config(case.folder / "config.json"))
    assert (config.head_dim, config.qkv_bias, config.qk_norm, config.rope_theta) == (32, False, True, 1e4)
    source = write_folder(tmp_path / "source", written, case.tensors)
    save_model(case.tensors.items(), source, tmp_path / "out")         # what is written in bf16 says nothing else
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["torch_dtype"] == "bfloat16" and "dtype" not in saved and saved["head_dim"] == 32


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.uint8])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_weights_of_an_integer_type_are_refused(tiny, tmp_path, name, dtype):
    value = tiny["tied"].tensors[name].to(dtype)
    with pytest.raises(ValueError, match=f"model.safetensors: {name} is .*, expected BF16 or F16 or F32"):
        load(broken(tiny, tmp_path / "model", tensors={name: value}), base="nvfp4", device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight",
                                  "model.layers.1.self_attn.k_proj.bias",
                                  "model.layers.0.post_attention_layernorm.weight",
                                  "model.layers.0.mlp.up_proj.weight"])
def test_a_number_that_is_not_finite_is_refused_by_name(tiny, tmp_path, name, value):
    tensor = tiny["tied"].tensors[name].clone()
    tensor.view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"model.safetensors: {name} holds NaN or infinity"):
        load(broken(tiny, tmp_path / "model", tensors={name: tensor}), base="bf16", device="cpu")


def test_an_unused_tensor_is_refused_but_a_copy_of_tied_weights_is_not(tiny, tmp_path):
    extra = {"lm_head.weight": tiny["tied"].tensors["model.embed_tokens.weight"].clone()}
    load(broken(tiny, tmp_path / "copy", tensors=extra), base="bf16", device="cpu")
    with pytest.raises(ValueError, match="1 tensors that config.json does not account for, first model.layers.9.x"):
        load(broken(tiny, tmp_path / "model", tensors={"model.layers.9.x": torch.zeros(2)}), base="bf16", device="cpu")


def test_a_weight_that_is_there_in_4_bits_and_in_16_is_refused(tmp_path):
    folder = shutil.copytree(Path(weights_py.__file__).parent / "tiny", tmp_path / "model")
    to_nvfp4(source_of(folder, torch.device("cpu")), tmp_path / "4bit", "search")
    file = next(path for path in sorted((tmp_path / "4bit").glob("*.safetensors")))
    tensors = load_file(file)
    packed = next(name for name in sorted(tensors) if name.endswith(".weight_packed"))
    weight = packed.removesuffix("_packed")
    save_file(tensors | {weight: torch.zeros(2, 2)}, file)
    for index in (tmp_path / "4bit").glob("*.index.json"):
        names = json.loads(index.read_text())
        names["weight_map"][weight] = file.name
        index.write_text(json.dumps(names))
    with pytest.raises(ValueError, match=f"holds {weight} in 16 bits and in 4"):
        load(tmp_path / "4bit", base="nvfp4", device="cpu")


@pytest.mark.parametrize("file", ["../x.safetensors", "/tmp/x.safetensors", "a/x.safetensors", "..", "x.bin", 3, []])
def test_an_index_names_files_of_its_folder_alone(tiny, tmp_path, file):
    folder = broken(tiny, tmp_path / "model", files=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index.json: places 'model.norm.weight' in .* no safetensors file"):
        load(folder, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_not_waited_for(tiny, tmp_path, name, make):
    folder = broken(tiny, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(ValueError, match=f"{name}: .*no regular file"):
        load(folder, device="cpu")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": NaN}', '"a text"', "", "\xff", "null"])
def test_a_config_that_is_no_json_object_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="config.json: (cannot be read|holds no JSON object)") as error:
        read_config(tmp_path / "config.json")
    assert "\n" not in str(error.value)


def test_ids_beyond_the_embedding_are_refused(tiny):
    load(tiny["tied"].folder, device="cpu", live_vocab=tiny["tied"].raw["vocab_size"])
    with pytest.raises(ValueError, match="tokenizer.json has ids up to .*, the embedding in config.json .* rows"):
        load(tiny["tied"].folder, device="cpu", live_vocab=tiny["tied"].raw["vocab_size"] + 1)


def test_lengths_and_ranks_beyond_the_model_are_refused(tiny):
    check_lengths(tiny["tied"].folder, 512, 64)
    with pytest.raises(ValueError, match="max_position_embeddings is 512, less than 513, .*--max-new-tokens"):
        check_lengths(tiny["tied"].folder, 513)
    with pytest.raises(ValueError, match="--lora-rank 100000 exceeds hidden_size, which is 64 in .*config.json"):
        check_lengths(tiny["tied"].folder, 2, 100000)


def test_a_config_that_lacks_a_key_or_is_cut_off_is_refused(tiny, tmp_path):
    folder = broken(tiny, tmp_path / "model")
    raw = config_json("tied")
    del raw["hidden_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="config.json: lacks hidden_size, expected a whole number"):
        load(folder, device="cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: cannot be read as JSON"):
        load(folder, device="cpu")


def test_newer_configs_keep_theta_in_rope_parameters(tiny, tmp_path):
    raw = config_json("tied")
    raw["rope_parameters"] = dict(rope_theta=raw.pop("rope_theta"), rope_type="default")
    read = read_config(write_folder(tmp_path / "model", raw, {}) / "config.json")
    assert ModelConfig.from_json(read).rope_theta == 1e4


def test_a_tensor_of_the_wrong_shape_is_refused_by_name(tiny, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = broken(tiny, tmp_path / "model", tensors={name: torch.zeros(191, 64)})
    with pytest.raises(ValueError, match=rf"{name} has shape \(191, 64\), config.json says \(192, 64\)"):
        load(folder, device="cpu")


def remove_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


def cut_shard(folder):
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_header(folder):
    file = folder / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def lose_tensor(folder):
    file = Shards(folder).names["model.norm.weight"]
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


def list_in_index(folder):
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize("damage,words", [
    (remove_shard, ["model-00002-of-00003.safetensors", "missing"]),
    (cut_shard, ["model-00002-of-00003.safetensors", "cut off"]),
    (cut_header, ["model-00001-of-00003.safetensors", "cut off"]),
    (lose_tensor, [".safetensors", "no tensor model.norm.weight", "index.json places there"]),
    (lose_tensor_and_its_index_entry, ["no tensor model.layers.1.mlp.up_proj.weight"]),
    (break_index, ["model.safetensors.index.json", "JSON"]),
    (list_in_index, ["model.safetensors.index.json", "no JSON object"]),
])
def test_a_damaged_folder_is_one_line_that_names_the_file(tiny, tmp_path, damage, words):
    folder = broken(tiny, tmp_path / "model", files=3)
    damage(folder)
    with pytest.raises(ValueError) as error:
        load(folder, base="nvfp4", device="cpu")
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("base,block", [("nf4", 64), ("mxfp4", 32), ("nvfp4", 16)])
def test_a_matrix_whose_columns_end_inside_a_scale_block_is_refused_by_name(tiny, tmp_path, base, block):
    folder, K = tiny["ragged"].folder, 80
    if base == "nvfp4":
        raw = tiny["tied"].raw | dict(hidden_size=72)                     # 4 heads of 18
        folder, K = write_folder(tmp_path / "model", raw, random_tensors(raw)), 72
    with pytest.raises(ValueError, match=f"layers.0.self_attn.q_proj: K={K} .* not a multiple of .* {block} weights"):
        load(folder, base=base, device="cpu")


def test_weight_that_is_not_finite_is_refused_by_name(tiny, tmp_path):
    name = "model.layers.1.mlp.down_proj"
    w = tiny["tied"].tensors[f"{name}.weight"].clone()
    w[3, 5] = torch.inf
    with pytest.raises(ValueError, match=f"{name}.weight holds NaN or infinity"):
        load(broken(tiny, tmp_path / "model", tensors={f"{name}.weight": w}), base="nvfp4", device="cpu")


@pytest.mark.parametrize("name,hub_id", [
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"), ("qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"),
    ("Qwen2.5-Coder-0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct"), ("qwen2.5-math-72b", "Qwen/Qwen2.5-Math-72B-Instruct"),
    ("qwen3-8b", "Qwen/Qwen3-8B"), ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ("qwen3-4b-thinking-2507", "Qwen/Qwen3-4B-Thinking-2507"),
    ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"), ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("qwen2.5-coder-3b-instruct", "Qwen/Qwen2.5-Coder-3B-Instruct"), ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
    ("somebody/else", "somebody/else")])
def test_short_names_and_hub_ids_are_downloaded(monkeypatch, name, hub_id):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, allow_patterns: f"cache/{hub_id}")
    assert resolve(name) == Path("cache") / hub_id


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen2.5-0.5B", "Qwen2.5-Coder-32B", "Qwen2.5-Math-1.5B"])
def test_the_hubs_name_of_a_base_model_is_neither_it_nor_the_instruct_model(name):
    said = f"--model {name}: say Qwen/{name} for the base model, or {name.lower()} for Qwen/{name}-Instruct"
    for refuses in (resolve, check_model):
        with pytest.raises(ValueError) as error:
            refuses(name)
        assert str(error.value) == said
    assert hub_id(name.lower()) == hub_id(f"{name}-Instruct") == f"Qwen/{name}-Instruct"


def test_names_that_lead_nowhere_are_refused(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("no such snapshot in the cache\nand no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert resolve(tmp_path) == tmp_path
    folders = str(tmp_path / "nothing"), "./my-model", "../x", "~/x", "a/b/c", "my-model/"
    for name, said in (
            ("llama-7b", "neither a folder nor a name such as qwen2.5-7b, qwen3-8b or "),
            ("qwen2.5-1.5", "neither a folder nor one of qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, "),
            ("Qwen2.5-8B", "neither a folder nor one of qwen2.5-0.5b, "),
            ("qwen2.5-coder-72b", "neither a folder nor one of qwen2.5-coder-0.5b, "),
            ("qwen2.5-math-3b", "neither a folder nor one of qwen2.5-math-1.5b, qwen2.5-math-7b, qwen2.5-math-72b"),
            ("qwen3-9b", "neither a folder nor one of qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, "),
            ("qwen3-14b-instruct-2507", "neither a folder nor one of qwen3-0.6b, "),
            *((name, "there is no such folder") for name in folders)):
        for refuses in (resolve, check_model):
            with pytest.raises(ValueError) as error:
                refuses(name)
            assert str(error.value).startswith(f"--model {name}: {said}")
    check_model(tmp_path)                               # a folder, or what can be an id: nothing is downloaded
    check_model("somebody/else")
    with pytest.raises(ValueError, match=r"--model somebody/else: cannot be downloaded \(no such snapshot"):
        resolve("somebody/else")
