"""
Adapters come back as they were written, agree with PEFT's own, say what they were trained with, and what is wrong with
one is one line that names the file.

PEFT 0.21.2 with transformers 5.23.0 made the stored logits and the folders peft_adapter/ (of a Qwen2) and
peft_adapter_qwen3/ (make_reference.py), fp32. Our folder in PEFT, and PEFT's folder here,
give logits up to 12 that differ by at most 1.4e-5.

python -m pytest tests/test_peft.py -v
"""
import contextlib
import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora import FP32, adapted, attach_to_some
from tiny_qwen2 import SHAPES, config_json

from lora import Linear, attach, load_adapter, save_adapter
from model import load
from weights import (
    TARGETS,
    TRAINED_WITH,
    check_lengths,
    read_conditions,
    read_peft,
    tell_other_conditions,
    training_conditions,
    write_conditions,
)

HERE = Path(__file__).parent
REFERENCE = load_file(HERE / "qwen2_reference.safetensors")


# -----------------------------------------------------------------------------
# Folders of ours and of PEFT

def test_a_saved_adapter_has_pefts_names_and_our_values(tiny, tmp_path):
    model, adapter = adapted(tiny["tied"])
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    assert all(torch.equal(saved[name], adapter[name]) for name in adapter)


def test_the_saved_configuration_names_the_linears_that_the_adapter_is_on(tiny, tmp_path):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    attach_to_some(model, [linear for layer in model.layers for linear in (layer.down, layer.qkv)])
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "down_proj"]


@pytest.mark.parametrize("shape", ["tied", "qwen3-tied"])
def test_peft_computes_the_same_from_our_folder(tiny, shape):
    model, _ = adapted(tiny[shape], rank=4, alpha=6, seed=2)           # as make_reference.py gave to PEFT
    with torch.no_grad():
        got = model(REFERENCE[f"{shape}.tokens"])
    assert (got - REFERENCE[f"{shape}.ours_in_peft"]).abs().max() < FP32
    assert (got - REFERENCE[f"{shape}.logits"]).abs().max() > 1                      # the adapter matters


@pytest.mark.parametrize("shape,folder", [("tied", "peft_adapter"), ("qwen3-tied", "peft_adapter_qwen3")])
def test_pefts_own_folder_computes_the_same_here(tiny, shape, folder):
    model = load(tiny[shape].folder, base="bf16", device="cpu")
    load_adapter(model, HERE / folder)
    assert model.adapter.rank == 3 and model.adapter.alpha == 5
    with torch.no_grad():
        got = model(REFERENCE[f"{shape}.tokens"])
    assert (got - REFERENCE[f"{shape}.peft_adapter"]).abs().max() < FP32


@pytest.mark.parametrize("shape", SHAPES)
def test_an_adapter_of_the_largest_rank_that_a_run_may_have_is_read_again(tiny, tmp_path, shape):
    # A larger one would be saved, and then refused by every program that reads it.
    model = load(tiny[shape].folder, base="bf16", device="cpu")
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    most = min(linear.weight.K for linear in linears)
    check_lengths(tiny[shape].folder, 2, most)
    name = "num_attention_heads x head_dim" if most < model.config.width else "hidden_size"
    with pytest.raises(ValueError, match=f"--lora-rank {most + 1} exceeds {name}, which is {most} in .*config.json"):
        check_lengths(tiny[shape].folder, 2, most + 1)
    for rank, kept in ((most, True), (most + 1, False)):
        again = copy.deepcopy(model)
        attach(model, rank=rank)
        save_adapter(model, tmp_path)
        with contextlib.nullcontext() if kept else pytest.raises(ValueError, match=f"r is {most + 1}, more than"):
            assert load_adapter(again, tmp_path).rank == most


# -----------------------------------------------------------------------------
# Bad input: one ValueError that names the file

def edited(tmp_path, config=None, tensors=None, drop=()):
    """peft_adapter/ with some of its config and tensors changed."""
    folder = tmp_path / "adapter"
    shutil.copytree(HERE / "peft_adapter", folder)
    raw = json.loads((folder / "adapter_config.json").read_text()) | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in drop}))
    kept = {n: t for n, t in load_file(folder / "adapter_model.safetensors").items() if n not in drop}
    save_file(kept | (tensors or {}), folder / "adapter_model.safetensors")
    return folder


A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize("change,message", [
    (dict(config=dict(r=4)), r"lora_A.weight has shape \(3, \d+\), adapter_config.json says r is 4"),
    (dict(drop=(A,)), f"1 tensors .* first {A}"),
    (dict(tensors={A: torch.zeros(3, 65)}), f"1 tensors .* first {A}"),
    (dict(tensors={"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 64)}), "1 tensors .* first .*lm_head"),
    (dict(config=dict(target_modules=["q_proj", "v_proj"])), "need a plain LoRA adapter on q_proj, .* got one on"),
    (dict(config=dict(peft_type="IA3")), "peft_type is 'IA3', expected 'LORA'"),
    (dict(config=dict(use_dora=True)), "plain LoRA"),
    (dict(config=dict(use_rslora=True)), "use_rslora"),                   # its scale is alpha / sqrt(r)
    (dict(config=dict(alpha_pattern={"q_proj": 64})), "alpha_pattern"),
    (dict(config=dict(alora_invocation_tokens=[1])), "alora_invocation_tokens"),
    (dict(config=dict(layer_replication=[[0, 2]])), "layer_replication"),
    *((dict(config=dict(init_lora_weights=init)), f"init_lora_weights is '{init}', expected one that keeps the base")
      for init in ("pissa", "olora")),                                    # they take a part out of the base
    (dict(drop=("r",)), "adapter_config.json: lacks r, expected a whole number"),
    *((dict(config={key: value}), f"adapter_config.json: {key} is") for key, values in {
        "r": [True, "3", 2**40, -1, [3]], "lora_alpha": [0, -1, [], "x"],
        "modules_to_save": ["lm_head", ["lm_head"], {"a": 1}],
        "peft_type": [3, ["LORA"]]}.items() for value in values),
    (dict(config=dict(target_modules=[{"a": 1}])), "need a plain LoRA adapter"),
    (dict(tensors={A: torch.zeros(3, 64, dtype=torch.int8)}), f"{A} is torch.int8, expected floating-point numbers"),
    (dict(tensors={A: torch.full((3, 64), float("nan"))}), f"{A} holds NaN or infinity"),
    (dict(config=dict(r=0)), "adapter_config.json: r is 0"),
    (dict(tensors={A: torch.zeros(0)}), r"lora_A.weight has shape \(0,\), adapter_config.json says r is 3"),
    (dict(tensors={A.replace("_A", "_B"): torch.zeros(3, 128)}), "lora_B.weight has shape .3, 128., adapter_config"),
    (dict(config=dict(lora_alpha="16")), "adapter_config.json: lora_alpha is '16', expected a number above 0, at most"),
])
def test_an_adapter_that_would_compute_something_else_is_refused(tiny, tmp_path, change, message):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    with pytest.raises(ValueError, match=message):
        load_adapter(model, edited(tmp_path, **change))


@pytest.mark.parametrize("tensors,message", [
    ({}, "has no lora_A.weight of any q_proj"),
    ({f"base_model.model.model.layers.0.self_attn.{t}.lora_A.weight": torch.zeros(2**16, 1).expand(2**16, 2).clone()
      for t in TARGETS}, "r is 65536, more than the 2 columns of base_model"),
    ({f"base_model.model.model.layers.0.mlp.{t}.lora_B.weight": torch.zeros(1, 2**16) for t in TARGETS},
     "has no lora_A.weight of any q_proj")])
def test_an_adapter_that_claims_a_rank_of_65536_is_refused_before_anything_is_allocated(tiny, tmp_path, monkeypatch,
                                                                                       tensors, message):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    folder = edited(tmp_path, config={"r": 2**16})
    save_file(tensors, folder / "adapter_model.safetensors")
    monkeypatch.setattr("lora.attach", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, folder)
    with pytest.raises(ValueError, match=message):
        read_peft(folder)


def test_an_adapter_of_another_model_is_found_by_its_header_alone(tiny, tmp_path, monkeypatch):
    save_adapter(adapted(tiny["untied"])[0], tmp_path)
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    for name in ("lora.attach", "lora.peft.read_peft"):
        monkeypatch.setattr(name, lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match="of another shape, first base_model.model.model.layers.0"):
        load_adapter(model, tmp_path)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path), lambda path: None])
def test_an_adapter_file_that_is_no_file_is_one_line(tmp_path, make):
    file = edited(tmp_path) / "adapter_model.safetensors"
    file.unlink()
    make(file)
    said = "adapter_model.safetensors: cannot be read as an adapter .(no regular|No such)"
    with pytest.raises(ValueError, match=said):
        read_peft(file.parent)


def test_a_folder_without_a_readable_adapter_is_refused(tiny, tmp_path):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    with pytest.raises(ValueError, match="nothing/adapter_config.json: cannot be read .No such file"):
        load_adapter(model, tmp_path / "nothing")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="adapter_config.json: holds no JSON object"):
        load_adapter(model, tmp_path / "list")
    file = edited(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="adapter_model.safetensors: cannot be read as an adapter"):
        load_adapter(model, file.parent)


# -----------------------------------------------------------------------------
# What an adapter was trained with

def test_an_adapter_says_in_which_conditions_it_was_trained_and_a_foreign_one_says_nothing(tiny, tmp_path, capsys):
    trained = {"base": "nvfp4", "calibration": None, "prompt_style": "boxed", "thinking": "off"}
    folder = tiny["untied"].folder
    assert training_conditions(folder, "nvfp4", "boxed", "off") == trained
    save_adapter(adapted(tiny["untied"])[0], tmp_path)
    other = {"base": "bf16", "calibration": "KL 0.01", "prompt_style": "tags", "thinking": "on"}
    tell_other_conditions(tmp_path, other)
    assert capsys.readouterr().out == ""
    write_conditions(tmp_path, trained)
    tell_other_conditions(tmp_path, trained)
    assert capsys.readouterr().out == ""
    tell_other_conditions(tmp_path, other)
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path} was trained with {what}" for what in (
        "base 'nvfp4', not 'bf16'", "calibration none, not 'KL 0.01'", "prompt style 'boxed', not 'tags'",
        "thinking 'off', not 'on'")]
    load_adapter(load(folder, "nvfp4", "cpu"), tmp_path)                  # the file is in nobody's way


def test_the_calibration_of_a_model_is_among_an_adapters_conditions(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json("tied") | {"calibration": "KL 0.01"}))
    assert training_conditions(tmp_path, "nvfp4", "plain", "off")["calibration"] == "KL 0.01"


@pytest.mark.parametrize("text,said", [
    ("x", "cannot be read as JSON"), ("[]", "holds no JSON object"), ("{}", "lacks base, expected text"),
    ('{"base": 4, "prompt_style": "boxed"}', "base is 4, expected text"),
    ('{"base": "nvfp4"}', "lacks prompt_style"), ('{"base": "nvfp4", "prompt_style": "boxed"}', "lacks thinking"),
    ('{"base": "nvfp4", "prompt_style": "boxed", "thinking": "off", "calibration": []}',
     r"calibration is \[\], expected text")])
def test_conditions_that_no_run_wrote_are_named(tmp_path, text, said):
    (tmp_path / TRAINED_WITH).write_text(text)
    with pytest.raises(ValueError, match=f"trained_with.json: {said}"):
        read_conditions(tmp_path)
