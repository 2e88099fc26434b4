"""
Adapters load as they were written and agree with PEFT; wrong adapters and adapters of other models are rejected.

make_reference.py made the stored logits and the folders peft_adapter/ (Qwen2) and peft_adapter_qwen3/, in fp32, with
PEFT 0.21.2 and transformers 5.23.0. Logits go up to 12 and differ by at most 1.4e-5, both ways.

python -m pytest tests/test_peft.py -v
"""
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import FP32, HERE, MODEL_CHANGES, adapted, attach_to_some, edit, run_main, with_acting_adapter
from safetensors.torch import load_file, save_file

import evaluate
from adapters import TRAINED_WITH, compare_conditions, conditions_in, load_adapter, save_adapter, training_conditions
from files import UserError, write_json
from harness.setup import open_model
from loading import load
from lora import attach
from prompts import Tokenizer
from tools import chat, convert
from weights import ModelFolder

REFERENCE = load_file(HERE / "qwen2_reference.safetensors")


# -----------------------------------------------------------------------------
# Folders of ours and of PEFT

def test_saved_adapter_has_pefts_names_and_our_values(tiny, tmp_path, capsys):
    model, adapter = adapted(tiny["tied"], rank=200)                      # larger than the linears
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    assert all(torch.equal(saved[name], adapter[name]) for name in adapter)
    again = load(tiny["tied"].folder, base="bf16", device="cpu")
    assert load_adapter(again, tmp_path).rank == 200 and "every B is 0" not in capsys.readouterr().out
    attach(again, rank=4)
    save_adapter(again, tmp_path)
    load_adapter(again, tmp_path)
    assert "every B is 0" in capsys.readouterr().out


def test_saved_config_names_adapted_linears(tiny, tmp_path):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    attach_to_some(model, [linear for layer in model.layers for linear in (layer.down, layer.qkv)])
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "down_proj"}


@pytest.mark.parametrize("shape,folder", [("tied", "peft_adapter"), ("qwen3-tied", "peft_adapter_qwen3")])
def test_logits_match_pefts(tiny, shape, folder):
    """Of our adapter in PEFT, and of PEFT's adapter here."""
    ours, _ = adapted(tiny[shape], rank=4, alpha=6, seed=2)                          # as in make_reference.py
    theirs = load(tiny[shape].folder, base="bf16", device="cpu")
    load_adapter(theirs, HERE / folder)
    assert theirs.adapter.rank == 3 and theirs.adapter.alpha == 5
    for model, name in ((ours, "ours_in_peft"), (theirs, "peft_adapter")):
        with torch.no_grad():
            got = model(REFERENCE[f"{shape}.tokens"])
        assert (got - REFERENCE[f"{shape}.{name}"]).abs().max() < FP32
        assert (got - REFERENCE[f"{shape}.logits"]).abs().max() > 0.1                # the adapter matters


# -----------------------------------------------------------------------------
# Wrong adapters: a UserError that names the file or the tensor

def edited(tmp_path, config=None, tensors=None, drop=(), damage=None):
    """peft_adapter/ with some of its config and tensors changed, or one of its files damaged."""
    folder = tmp_path / "adapter"
    shutil.copytree(HERE / "peft_adapter", folder)
    edit(folder / "adapter_config.json", **(config or {}), **dict.fromkeys(drop, ...))
    kept = {n: t for n, t in load_file(folder / "adapter_model.safetensors").items() if n not in drop}
    save_file(kept | (tensors or {}), folder / "adapter_model.safetensors")
    if damage:
        damage(folder)
    return folder


A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize("change,named", [
    *((dict(config={key: value}), f"adapter_config.json: {key}") for key, value in {
        "peft_type": "IA3", "use_dora": True, "use_rslora": True,         # rsLoRA's scale is alpha / sqrt(r)
        "alpha_pattern": {"q_proj": 64}, "alora_invocation_tokens": [1], "layer_replication": [[0, 2]],
        "modules_to_save": ["input_layernorm", "post_attention_layernorm"], "kasa_config": {"svd_rank": 8},
        "a_variant_to_come": 1, "bias": "all", "init_lora_weights": "pissa"}.items()),
    (dict(config={"target_modules": ["q_proj", "v_proj"]}), "adapter_config.json: .*target_modules"),
    *((dict(config={key: value}), f"adapter_config.json: {key} is ") for key, values in {
        "lora_alpha": (0, -32, None, "auto", [32], True, 1e10), "r": (0, -1, 32.0, "8", True, None),
        "target_modules": ("all-linear", ".*_proj", None, [["q_proj"]])}.items() for value in values),
    *((dict(drop=(key,)), f"adapter_config.json: {key} is ") for key in ("r", "lora_alpha")),
    (dict(config=dict(r=4)), r"lora_A.weight', \(3, 192\)\)\], expected .*lora_A.weight', \(4, 192\)"),
    (dict(drop=(A,)), rf"has \[\], expected .*{A}"),
    (dict(tensors={A: torch.zeros(3, 65)}), rf"{A}', \(3, 65\).*{A}', \(3, 64\)"),
    (dict(tensors={"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 64)}), "has .*lm_head"),
    (dict(tensors={A.removeprefix("base_model."): torch.zeros(3, 64)}, drop=(A,)), f"has .*'model.*expected .*{A}"),
    *((dict(tensors={A: value}), A) for value in (torch.full((3, 64), torch.nan), torch.ones(3, 64).char())),
    *((dict(damage=lambda folder, name=name: (folder / name).unlink()), name)
      for name in ("adapter_config.json", "adapter_model.safetensors")),
    *((dict(damage=lambda folder, name=name: (folder / name).write_text("[]")), name)
      for name in ("adapter_config.json", "adapter_model.safetensors")),
])
def test_wrong_adapter_is_rejected(tiny, tmp_path, change, named):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    with pytest.raises((UserError, OSError), match=f"^[^\n]*{named}[^\n]*$"):
        load_adapter(model, edited(tmp_path, **change))


# -----------------------------------------------------------------------------
# What an adapter was trained with

def test_adapter_reports_different_training_conditions(tiny, tmp_path, capsys):
    model = adapted(tiny["untied"])[0]
    trained = training_conditions(model, SimpleNamespace(digest="t"), "nvfp4", "boxed", "off")
    save_adapter(model, tmp_path)
    write_json(tmp_path / TRAINED_WITH, trained)
    compare_conditions(tmp_path, conditions_in(tmp_path), trained | {"model": "copy"}, model)
    assert capsys.readouterr().out == ""
    other = {"model": "another", "weights": "w", "tokenizer": "u", "base": "bf16", "calibration": "KL 0.01",
             "prompt_style": "tags", "thinking": "on", "rope_theta": 1e6}
    compare_conditions(tmp_path, conditions_in(tmp_path), trained | other, model)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(str(tmp_path) in line for line in lines)
    (tmp_path / TRAINED_WITH).unlink()                    # PEFT's file has only the model
    compare_conditions(tmp_path, conditions_in(tmp_path), trained | other, model)
    assert "model 'untied" in capsys.readouterr().out


@pytest.mark.parametrize("named", [None, *MODEL_CHANGES, "weights sha256"])
def test_programs_tell_of_another_base(tiny_nvfp4, tmp_path, monkeypatch, capsys, named):
    source, run = shutil.copytree(tiny_nvfp4, tmp_path / "model"), tmp_path / "run"
    as_trained = SimpleNamespace(base="nvfp4", prompt_style="plain", thinking="off")
    model, conditions = open_model(ModelFolder(source), Tokenizer(source), torch.device("cpu"), as_trained, None)
    save_adapter(with_acting_adapter(model), run / "adapter")
    run_json = vars(as_trained) | {"model": str(source), "data": "arithmetic", "max_new_tokens": 8}
    if named == "weights sha256":                # a run that didn't record more
        conditions = {"base": "nvfp4"}
        run_json["weights_sha256"] = ModelFolder(source).old_sha256()
    write_json(run / "run.json", run_json)
    write_json(run / "adapter" / "trained_with.json", conditions)
    if named:
        MODEL_CHANGES[named.removesuffix(" sha256")](source)
    (tmp_path / "one.jsonl").write_text('{"question": "1+1?", "answer": "2"}')
    device, data, text = ("--device", "cpu"), ("--data", tmp_path / "one.jsonl"), f"adapter was trained with {named} "
    for program, flags in ((evaluate, data), (chat, ("--question", "1+1?"))):
        assert run_main(monkeypatch, program, run, *flags, *device) is None
        shown = "".join(capsys.readouterr())
        assert text in shown if named else "was trained" not in shown
    assert run_main(monkeypatch, evaluate, run, "--adapter", "none", *data, *device) is None
    assert "was trained" not in "".join(capsys.readouterr())
    line = run_main(monkeypatch, convert, "merge", run, tmp_path / "out", *device)
    assert text in line if named else line is None
