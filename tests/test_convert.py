"""
tools/convert.py: the NVFP4 folder against weights quantized in memory, the merged one against the
model with its adapter switched on; one line where something cannot be converted.

python -m pytest tests/test_convert.py -v
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf
import lora
import model as qwen
import nvfp4
from tiny_qwen2 import write_folder
from tools import convert

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tiny"


def run(monkeypatch, *arguments):
    """convert.main() with these arguments -> None, or the message that it stopped with."""
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    try:
        return convert.main()
    except SystemExit as stop:
        return stop.code


def same_bytes(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# -------------------------------------------------------------------------------------------------
# nvfp4

@pytest.fixture
def bf16(tiny, tmp_path):
    """A checkpoint in two shards, as published ones come, with a tokenizer beside it."""
    case = tiny["untied"]
    folder = write_folder(tmp_path / "bf16", case.raw, case.tensors, files=2)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_converted_folder_loads_back_as_quantized_in_memory(bf16, tiny, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "nvfp4", bf16, tmp_path / "out") is None
    lines = [line.split("relative error") for line in capsys.readouterr().out.splitlines()]
    assert [name.strip() for name, _ in lines] == ["layer  0", "layer  1", "all 2 layers"]
    assert all(0.08 < float(error) < 0.11 for _, error in lines)       # 0.095 of normal weights
    tensors = dict(tiny["untied"].tensors)
    after = hf.Shards(tmp_path / "out")
    for i in range(2):
        for group in ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj",
                      "mlp.gate_proj mlp.up_proj", "mlp.down_proj"):   # one tensor scale for each
            names = [f"model.layers.{i}.{name}" for name in group.split()]
            weights = [tensors.pop(f"{name}.weight") for name in names]
            scale = nvfp4.global_scale_for(*weights)
            for name, w in zip(names, weights):
                got = hf.load_nvfp4(after, name)
                want = nvfp4.quantize(w, scale)
                assert all(same_bytes(a.reshape(-1), b.reshape(-1)) for a, b in zip(got, want)), name
                assert f"{name}.weight" not in after.names
    assert all(torch.equal(after.get(name), tensor) for name, tensor in tensors.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 128 and config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "out"]


def test_a_converted_model_is_the_one_quantized_while_loading(tmp_path, monkeypatch):
    assert run(monkeypatch, "nvfp4", TINY, tmp_path / "out") is None
    tokens = torch.arange(24).view(2, 12) * 17
    with torch.no_grad():
        a, b = (qwen.load(path, "nvfp4", "cpu")(tokens) for path in (TINY, tmp_path / "out"))
    assert torch.equal(a, b)


def already_quantized(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))


def other_architecture(folder):
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))


def edit_weight(folder, edit):
    name = "model.layers.1.mlp.down_proj.weight"
    file = hf.Shards(folder).names[name]
    tensors = load_file(file)
    tensors[name] = edit(tensors[name])
    save_file(tensors, file)


def ragged_k(folder):
    edit_weight(folder, lambda w: w[:, :88].contiguous())


def nan_in_the_last_layer(folder):                         # found only after much has been written
    edit_weight(folder, lambda w: w * float("nan"))


def cut_shard(folder):
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage,words", [
    (already_quantized, ["config.json", "quantized already"]),
    (other_architecture, ["config.json", "LlamaForCausalLM"]),
    (ragged_k, ["model.layers.1.mlp.down_proj.weight", "K=88", "16"]),
    (nan_in_the_last_layer, ["model.layers.1.mlp.down_proj", "nan"]),
    (cut_shard, ["model-00002-of-00002.safetensors", "cut off"])])
def test_a_bad_source_is_one_clear_line_and_leaves_nothing_behind(bf16, tmp_path, monkeypatch, damage, words):
    damage(bf16)
    line = run(monkeypatch, "nvfp4", bf16, tmp_path / "out")
    assert line.startswith("convert nvfp4: ") and "\n" not in line
    assert all(word in line for word in words), line
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


def test_the_command_runs_without_triton(bf16, tmp_path):
    code = ("import runpy, sys; sys.modules['triton'] = None; "
            "runpy.run_module('tools.convert', run_name='__main__', alter_sys=True)")
    done = subprocess.run([sys.executable, "-c", code, "nvfp4", bf16, tmp_path / "out"], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and (tmp_path / "out" / "config.json").exists(), done.stderr


# -------------------------------------------------------------------------------------------------
# merge

@pytest.fixture
def trained(tmp_path):
    """A run folder as train.py leaves it, with an adapter that acts -> its model."""
    model = qwen.load(TINY, "nvfp4", "cpu")
    adapter = lora.Adapter(model, rank=4, alpha=4)
    b = adapter.master.data[adapter.b_start:]
    b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(0)) / 50)
    adapter.sync()
    lora.save_adapter(model, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"model": str(TINY), "base": "nvfp4", "steps": 1}))
    return model


def test_merged_folder_is_the_trained_model(trained, tmp_path, monkeypatch):
    """On the base that the run had: merged onto the bf16 original it would be another model."""
    assert run(monkeypatch, "merge", tmp_path / "run", tmp_path / "out") is None
    tokens = torch.randint(0, 460, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = trained(tokens).log_softmax(-1)
        with trained.adapter.off():
            base = trained(tokens).log_softmax(-1)
        got, wrong = (qwen.load(path, "bf16", "cpu")(tokens).log_softmax(-1) for path in (tmp_path / "out", TINY))
    off = (got - want).abs().mean()                        # bf16 keeps 9 bits of a weight
    assert off < 0.05 and off < 0.1 * (base - want).abs().mean() and off < 0.1 * (wrong - want).abs().mean(), off


def test_what_cannot_be_merged_is_one_line_and_nothing_is_overwritten(trained, tmp_path, monkeypatch):
    run_folder = tmp_path / "run"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    line = run(monkeypatch, "merge", run_folder, tmp_path / "taken")
    assert line == f"convert merge: {tmp_path}/taken: exists and is not an empty folder"
    assert "run.json" in run(monkeypatch, "merge", tmp_path / "taken", tmp_path / "out")
    (run_folder / "adapter" / "adapter_config.json").unlink()
    assert "adapter_config.json: cannot be read" in run(monkeypatch, "merge", run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and [p.name for p in (tmp_path / "taken").iterdir()] == ["notes.txt"]
