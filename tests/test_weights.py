"""
Model folders load as they were written; folders that would compute something else are rejected.

python -m pytest tests/test_weights.py -v
"""
import json
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers import FP32, ROOT, edit, plain, quantized, tokens_of
from safetensors.torch import load_file, save_file
from tiny_qwen2 import GROUPS, LLAMA3, SHAPES, TARGETS, write_folder

import nvfp4
from files import UserError
from loading import load, model_tensors
from model import ModelConfig
from weights import NVFP4_CONFIG, ModelFolder, hub_id, in_16_bits, read_config, resolve, save_model


def write_nvfp4(case, out, kept=()):
    return write_folder(out, case.raw | {"quantization_config": NVFP4_CONFIG}, quantized(case, kept))


# -----------------------------------------------------------------------------
# A model as a folder

@pytest.mark.parametrize("shape", SHAPES)
def test_loaded_model_yields_its_folders_tensors(tiny, shape):
    got = dict(model_tensors(load(tiny[shape].folder, base="bf16", device="cpu")))
    assert got.keys() == tiny[shape].tensors.keys()
    for name, want in tiny[shape].tensors.items():
        assert torch.equal(got[name], want.float()), name


def test_qwen3_config_from_transformers_is_read(tiny, tmp_path):
    case, written = tiny["qwen3-tied"], read_config(ROOT / "tests/qwen3_config.json")
    assert ModelConfig.from_json(written) == ModelConfig.from_json(read_config(case.folder / "config.json"))
    source = write_folder(tmp_path / "source", written, case.tensors)
    save_model(case.tensors.items(), source, tmp_path / "out")         # written in bf16
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["torch_dtype"] == "bfloat16" and "dtype" not in saved and saved["head_dim"] == 32


# -----------------------------------------------------------------------------
# NVFP4 folders as models

def test_nvfp4_folder_with_a_global_scale_per_matrix_loads(tiny, tmp_path):
    """Other quantizers store max / 2688, so q, k and v differ and none is a power of two."""
    case = tiny["untied"]
    stored, replaced = dict(case.tensors), dict(case.tensors)
    for name in [n for n in case.tensors if any(n.endswith(f"{t}.weight") for t in TARGETS)]:
        w = stored.pop(name)
        inverse = 2688 / w.float().abs().max()
        packed, scale, g = nvfp4.quantize(w, 1 / inverse)
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale,
                   f"{stem}.weight_global_scale": inverse.reshape(1)}
        replaced[name] = nvfp4.dequantize(packed, scale, g, torch.float32)
    folder = write_folder(tmp_path / "foreign", case.raw | {"quantization_config": NVFP4_CONFIG}, stored)
    model, tokens = load(folder, base="nvfp4", device="cpu"), tokens_of(case, 2, 15)
    with torch.no_grad():
        assert (model(tokens) - plain(case._replace(tensors=replaced), tokens)).abs().max() < FP32


def test_ignored_linears_of_nvfp4_folder_stay_in_16_bits(tiny, tmp_path):
    """They are listed in compressed-tensors' `ignore`: here the last layer's down and the first layer's q, k and v."""
    case = tiny["untied"]
    kept = ["model.layers.1.mlp.down_proj", *(f"model.layers.0.{name}" for name in GROUPS[0])]
    raw = case.raw | {"quantization_config": NVFP4_CONFIG | {"ignore": ["lm_head", *kept]}}
    model = load(write_folder(tmp_path / "mixed", raw, quantized(case, kept)), base="nvfp4", device="cpu")
    held, rounded = (dict(model_tensors(m)) for m in (model, load(case.folder, base="nvfp4", device="cpu")))
    for name, want in held.items():
        exact = name.removesuffix(".weight") in kept
        assert torch.equal(want, case.tensors[name].float() if exact else rounded[name]), name
    part = quantized(case, kept=["model.layers.0.self_attn.v_proj"])     # q, k, v are one matrix here and in vLLM
    with pytest.raises(UserError, match="no tensor model.layers.0.self_attn.v_proj.weight_packed"):
        load(write_folder(tmp_path / "part", raw, part), base="nvfp4", device="cpu")


@pytest.mark.parametrize("section", [
    {"quantization_config": NVFP4_CONFIG | change} for change in (
        dict(quant_method="modelopt"),                                    # stores the scale, not its reciprocal
        dict(format="mxfp4-pack-quantized"), dict(format=None),
        dict(transform_config={"config_groups": {"u": {"type": "hadamard"}}}))]
    + [{"quantization_config": {"quant_method": "fp8"}}, {}])
def test_other_4_bit_format_is_rejected(tiny, tmp_path, section):
    with pytest.raises(UserError, match="config.json: .*quantization_config"):
        load(write_folder(tmp_path, tiny["tied"].raw | section, quantized(tiny["tied"])), "nvfp4", "cpu")


MODELOPT = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                             "exclude_modules": ["lm_head"]}}             # hf_quant_config.json


def write_modelopt(case, out, kept=(), quant=MODELOPT, **section):
    """The checkpoint as ModelOpt stores it, with block scales of v as bytes. section: of config.json, if any."""
    tensors = {name.replace("weight_packed", "weight").replace("global_scale", "scale_2"):
               1 / t.reshape(()) if name.endswith("global_scale") else t for name, t in quantized(case, kept).items()}
    for name in [name for name in tensors if name.endswith("weight_scale_2")]:
        tensors[name.replace("weight_scale_2", "input_scale")] = torch.tensor(0.1)
    for name in [name for name in tensors if name.endswith("v_proj.weight_scale")]:
        tensors |= {name: tensors[name].view(torch.uint8), name.replace("weight", "v"): torch.tensor(1.0)}
    raw = case.raw | ({"quantization_config": {"quant_method": "modelopt"} | section} if section else {})
    write_folder(out, raw, tensors)
    if quant:
        (out / "hf_quant_config.json").write_text(json.dumps(quant))
    return out


@pytest.mark.parametrize("shape,how", [("tied", {}), ("llama", {"quant": None, "quant_algo": "NVFP4"}),
                                       ("untied", {"kept": ["model.layers.1.mlp.down_proj"]})])
def test_modelopt_folder(tiny, tmp_path, capsys, shape, how):
    """Tensors equal to those of modelopt 0.47 by name and type: weight_scale_2 multiplies."""
    case, tokens = tiny[shape], tokens_of(tiny[shape], 2, 15)
    folder = write_modelopt(case, tmp_path / "modelopt", **how)
    want = write_nvfp4(case, tmp_path / "other", how.get("kept", ()))
    with torch.no_grad():
        model = load(folder, "nvfp4", "cpu")
        assert torch.equal(model(tokens), load(want, "nvfp4", "cpu")(tokens))
        assert capsys.readouterr().out.count("4-bit activations") == 1
        save_model(((name, in_16_bits(t)) for name, t in model_tensors(model)), folder, tmp_path / "merged")
        merged = load(tmp_path / "merged", "bf16", "cpu")
        assert torch.equal(merged(tokens), model(tokens))    # global scales are powers of two, so bf16 is exact
    assert not (tmp_path / "merged" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("quant,section,named", [
    (None, {}, "quantization_config is None"), (None, {"quant_algo": "NVFP4_AWQ"}, "quantization_config.*NVFP4_AWQ"),
    ({"quantization": {"quant_algo": "FP8"}}, {}, "quantization_config.*FP8"),
    (MODELOPT, {"quant_algo": "FP8"}, "quant_algo is 'FP8', but 'NVFP4'"),
    (None, {"quant_algo": "NVFP4", "transform_config": {"u": "hadamard"}}, "transform_config")])
def test_other_modelopt_folder_is_rejected(tiny, tmp_path, quant, section, named):
    with pytest.raises(UserError, match=f"config.json: {named}"):
        load(write_modelopt(tiny["tied"], tmp_path, quant=quant, **section), "nvfp4", "cpu")


@pytest.mark.parametrize("part,value", [
    ("weight_scale", torch.full((64, 4), -1.0).to(torch.float8_e4m3fn)),
    ("weight_scale", torch.full((64, 4), float("nan")).to(torch.float8_e4m3fn)),
    ("weight_scale", torch.ones(64, 4)), ("weight_scale", torch.zeros(0).to(torch.float8_e4m3fn)),
    ("weight_packed", torch.zeros(64, 32)), ("weight_packed", torch.zeros(64, 16, dtype=torch.uint8)),
    *(("weight_global_scale", torch.tensor(value)) for value in ([], [1.0, 1], [0.0], [-3.0], [torch.nan], [torch.inf]))
])
def test_nvfp4_linear_that_decodes_to_nonsense_is_rejected(tiny, tmp_path, part, value):
    name = "model.layers.1.self_attn.o_proj"
    tensors = quantized(tiny["tied"]) | {f"{name}.{part}": value}
    folder = write_folder(tmp_path / "bad", tiny["tied"].raw | {"quantization_config": NVFP4_CONFIG}, tensors)
    with pytest.raises(UserError, match=f"bad.*{name}"):
        load(folder, "nvfp4", "cpu")


# -----------------------------------------------------------------------------
# Wrong folders: a UserError that names the file or the tensor

ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA = {"architectures": ["LlamaForCausalLM"], "use_sliding_window": ..., "rope_scaling": LLAMA3}


@pytest.mark.parametrize("changes,key", [
    *(({key: value}, key) for key in ("rms_norm_eps", "num_key_value_heads", "vocab_size", "hidden_size")
      for value in (..., "64", 0, -1, True)),
    *(({"rope_theta": value}, "rope_theta") for value in (..., "10000.0", 0, [1e4])),
    *(({"max_position_embeddings": value}, "max_position_embeddings") for value in ("512", -1, 0, 512.0)),
    *(({"layer_types": value}, "layer_types") for value in (["full_attention", "sliding_attention"], 3)),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    *(({"rope_theta": ..., key: ROPE | {"rope_type": "yarn"}}, "rope_type is 'yarn'")
      for key in ("rope_scaling", "rope_parameters")),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings"), ({"head_dim": "16"}, "head_dim"),
    ({"rope_parameters": "default"}, "rope_parameters"), ({"num_key_value_heads": 3}, "num_key_value_heads 3 must"),
    ({"rope_parameters": ROPE}, "rope_theta"),                                           # beside 1e4
    ({"rope_theta": ..., "rope_parameters": {"full_attention": ROPE}}, "rope_theta"),
    ({"rope_theta": ..., "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_theta": ..., "rope_parameters": {"type": "linear", "rope_theta": 1e4}}, "rope_type"),
    *((LLAMA | changes, key) for changes, key in [
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor"), ({"rope_scaling": 8.0}, "rope_scaling"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_parameters": LLAMA3 | {"factor": 32.0}}, "factor"),                      # beside 8.0 in rope_scaling
        ({"rope_parameters": LLAMA3 | {"type": "yarn"}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"), ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"rope_interleaved": True}, "rope_interleaved"), ({"sliding_window": 8}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window"),                   # 4,096 in transformers
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        *(({"architectures": [name]}, "architectures") for name in (
            "SmolLM3ForCausalLM", "GraniteForCausalLM", "Phi3ForCausalLM", "Olmo3ForCausalLM", "Gemma3ForCausalLM",
            "GptOssForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM", "Ministral3ForCausalLM",
            "Llama4ForCausalLM"))])])
def test_config_that_would_compute_something_else_is_rejected(tiny, tmp_path, changes, key):
    (tmp_path / "config.json").write_text(json.dumps(tiny["tied"].raw))
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=f"config.json: {key}.? "):
        read_config(tmp_path / "config.json")


def drop(case, ending):
    return {name: t for name, t in case.tensors.items() if not name.endswith(ending)}


def with_value(case, name, value):
    tensor = case.tensors[name].clone()
    tensor.view(-1)[-1] = value
    return case.tensors | {name: tensor}


L1 = "model.layers.1."


@pytest.mark.parametrize("shape,change,named", [
    ("tied", dict(hidden_size=128), r"q_proj.bias has shape \(64,\)"),
    ("tied", dict(head_dim=32), r"q_proj.bias has shape \(64,\)"),
    ("tied", dict(num_attention_heads=64), r"k_proj.bias has shape"),
    ("tied", dict(quantization_config=NVFP4_CONFIG), "no tensor in 4 bits"),
    ("tied", dict(num_hidden_layers=1), "such as model.layers.1"),
    ("tied", dict(num_hidden_layers=3), "no tensor model.layers.2"),
    ("tied", dict(tie_word_embeddings=False), "no tensor lm_head.weight"),
    ("qwen3-tied", dict(head_dim=16), r"q_norm.weight has shape \(32,\)"),
    ("qwen3-tied", dict(head_dim=None), r"q_norm.weight has shape \(32,\)"),
    ("qwen3-tied", dict(architectures=["Qwen2ForCausalLM"]), "no tensor model.layers.0.self_attn.q_proj.bias"),
    ("tied", lambda c: c.tensors | {"model.layers.9.x": torch.zeros(2)}, "such as model.layers.9.x"),
    ("qwen3-tied", lambda c: c.tensors | {L1 + "self_attn.v_proj.bias": torch.zeros(64)}, "v_proj.bias"),
    ("tied", lambda c: c.tensors | {L1 + "self_attn.k_norm.weight": torch.zeros(16)}, "such as .*k_norm.weight"),
    ("qwen3-tied", lambda c: drop(c, "1.self_attn.k_norm.weight"), "no tensor model.layers.1.self_attn.k_norm"),
    ("tied", lambda c: c.tensors | {"lm_head.weight": c.tensors["model.embed_tokens.weight"] * 2}, "lm_head.* differs"),
    ("tied", lambda c: drop(c, L1 + "mlp.up_proj.weight"), "no tensor model.layers.1.mlp.up_proj.weight"),
    ("tied", lambda c: c.tensors | {L1 + "mlp.up_proj.weight": torch.zeros(191, 64)}, r"up_proj.* \(191, 64\)"),
    ("tied", lambda c: c.tensors | {L1 + "mlp.up_proj.weight": torch.zeros(192, 64, dtype=torch.int8)}, "up_proj"),
    *(("tied", lambda c, name=name, value=value: with_value(c, name, value), f"{name} contains NaN")
      for name in ("model.norm.weight", "model.embed_tokens.weight", L1 + "self_attn.k_proj.bias",
                   L1 + "mlp.up_proj.weight") for value in (torch.nan, -torch.inf)),
    ("tied", lambda c: quantized(c) | {L1 + "mlp.down_proj.weight": torch.zeros(2)}, "such as .*down_proj.weight"),
])
def test_tensors_that_do_not_match_config_are_rejected(tiny, tmp_path, shape, change, named):
    """change: of config.json, or a function that returns other tensors."""
    case = tiny[shape]
    config, tensors = ({}, change(case)) if callable(change) else (change, case.tensors)
    if any(name.endswith("_packed") for name in tensors):
        config = {"quantization_config": NVFP4_CONFIG}
    with pytest.raises(UserError, match=named):
        load(write_folder(tmp_path / "model", case.raw | config, tensors), base="nvfp4", device="cpu")


def test_stored_copy_of_tied_head_is_accepted(tiny, tmp_path):
    case = tiny["tied"]
    copy = {"lm_head.weight": case.tensors["model.embed_tokens.weight"].clone()}
    model = load(write_folder(tmp_path / "model", case.raw, case.tensors | copy), base="bf16", device="cpu")
    assert (model.embed == case.tensors["model.embed_tokens.weight"]).all()


def cut(file, length):
    os.truncate(file, file.stat().st_size + length if length < 0 else length)


def lose_tensor(file):
    save_file(dict(list(load_file(file).items())[1:]), file)


@pytest.mark.parametrize("name,damage", [
    ("model-00002-of-00003.safetensors", Path.unlink),
    ("model-00002-of-00003.safetensors", lambda file: cut(file, -1)),
    ("model-00001-of-00003.safetensors", lambda file: cut(file, 100)),
    ("whether model-00001-of-00003.safetensors has",
     lambda _: lose_tensor(_.with_name("model-00001-of-00003.safetensors"))),
    ("model.safetensors.index.json", lambda file: file.write_text('{"weight_map": ')),
    ("model.safetensors.index.json", lambda file: file.write_text('{"weight_map": {"a": "x", "b": 3}}')),
    ("passwd.safetensors", lambda _: _.with_name("model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../passwd.safetensors"}}')),
    ("config.json", lambda file: file.write_text("[]")), ("config.json", lambda file: file.write_text("{")),
    ("config.json", Path.unlink)])
def test_damaged_file_is_named(tiny, tmp_path, name, damage):
    save_file({"a": torch.zeros(2)}, tmp_path / "passwd.safetensors")
    folder = write_folder(tmp_path / "a" / "model", tiny["tied"].raw, tiny["tied"].tensors, files=3)
    damage(folder / name)
    with pytest.raises((ValueError, OSError)) as error:
        load(folder, base="nvfp4", device="cpu")
    assert "\n" not in str(error.value) and name in str(error.value), error.value


def test_ids_and_lengths_beyond_the_model_are_rejected(tiny):
    folder, vocab = tiny["tied"].folder, tiny["tied"].raw["vocab_size"]
    load(folder, device="cpu", live_vocab=vocab)
    with pytest.raises(ValueError, match="tokenizer.json"):
        load(folder, device="cpu", live_vocab=vocab + 1)
    ModelFolder(folder).check_length(512)
    with pytest.raises(UserError, match="config.json: max_position_embeddings is 512, less than the 513"):
        ModelFolder(folder).check_length(513)


# -----------------------------------------------------------------------------
# A folder whose files disagree

UP = L1 + "mlp.up_proj.weight"


def two_versions(case, folder, how):
    """Writes the model in two shards and spoils it. how: a case below, or a second save's file"""
    index = write_folder(folder, case.raw, case.tensors, files=2) / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    other = next(file for file in files.values() if file != files[UP])
    if how == "a second copy":
        save_file(load_file(folder / other) | {UP: case.tensors[UP] + 1}, folder / other)
    elif how == "another file":
        edit(index, weight_map=files | {UP: other})
    elif how == "unlisted":
        edit(index, weight_map={name: file for name, file in files.items() if name != UP})
    elif how == "an adapter":
        shutil.copy(ROOT / "tests/peft_adapter/adapter_config.json", folder)
    else:
        save_file(case.tensors, folder / how)
        if how == "model.safetensors":
            index.unlink()


@pytest.mark.parametrize("how,named", [
    ("a second copy", UP), ("another file", UP), ("unlisted", UP), ("an adapter", "contains an adapter"),
    *((name, "two saves") for name in ("model.safetensors", "model-00001-of-00003.safetensors"))])
def test_folder_with_two_versions_of_a_model_is_rejected(tiny, tmp_path, how, named):
    two_versions(tiny["tied"], tmp_path / "model", how)
    with pytest.raises(UserError, match=f"model.*{named}"):
        load(tmp_path / "model", "nvfp4", "cpu")


# -----------------------------------------------------------------------------
# Which model

def test_digest_distinguishes_weights_but_not_shards(tiny, tmp_path):
    case = tiny["untied"]
    swapped = {name: t.flip(0) if name.endswith("down_proj.weight") else t for name, t in case.tensors.items()}
    folders = [case.folder, write_folder(tmp_path / "sharded", case.raw, case.tensors, files=3),
               write_nvfp4(case, tmp_path / "four"), write_folder(tmp_path / "swapped", case.raw, swapped)]
    name = "model.layers.1.mlp.down_proj.weight"           # 24,576 numbers
    for i in (-1, 5000):
        last = case.tensors[name].clone()
        last.view(-1)[i] *= 1.01
        folders.append(write_folder(tmp_path / str(i), case.raw, case.tensors | {name: last}))
    first, same, *others = (load(folder, device="cpu").digest for folder in folders)
    assert first == same and len({first, *others}) == 5


@pytest.mark.parametrize("name,hub", [
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"), ("qwen2.5-coder-0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    ("qwen2.5-math-72b", "Qwen/Qwen2.5-Math-72B-Instruct"), ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    ("qwen3-4b-instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"), ("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
    ("llama3.2-1b", "meta-llama/Llama-3.2-1B-Instruct"), ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("mistral-7b-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"), ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
    ("somebody/else", "somebody/else")])
def test_short_names_and_hub_ids_resolve(monkeypatch, name, hub):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, repo_type, allow_patterns:
                        asked.extend(allow_patterns) or f"cache/{hub_id}")
    assert resolve(name) == Path("cache") / hub
    there = "model.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors"
    assert [any(fnmatch(file, pattern) for pattern in asked) for file in there] == [True, True, False]


@pytest.mark.parametrize("name", ["llama-7b", "llama3.1-8B", "qwen2.5-7b-instruct-2507", "Qwen2.5-7B",
                                  "Qwen2.5-7B-Instruct", "/no/folder", "./my-model", "../x", "~/x", "a/b/c",
                                  "my-model/"])
def test_unknown_model_name_is_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for refuses in (hub_id, resolve, ModelFolder):
        with pytest.raises(UserError, match=f"^--model {name}: "):
            refuses(name)
