"""
tools/convert.py: NVFP4 folders against quantizing in memory, merged folders against model + adapter, one-line errors.

python -m pytest tests/test_convert.py -v
"""
import json

import pytest
import torch
from helpers import TINY, edit, prompt_of, quantized, run_main, same_bytes, with_acting_adapter, write_sums
from safetensors.torch import load_file, save_file
from tiny_qwen2 import write_folder

import adapters
import calibrate
import weights
from loading import load
from prompts import STYLES
from tasks.problems import epoch_order
from tools import convert
from weights import ModelFolder, Shards


def run(monkeypatch, *arguments):
    return run_main(monkeypatch, convert, "--device", "cpu", *arguments)


# -----------------------------------------------------------------------------
# nvfp4

@pytest.fixture
def bf16(tiny, tmp_path):
    """A checkpoint in two shards, with a tokenizer, as published ones are."""
    case = tiny["untied"]
    folder = write_folder(tmp_path / "bf16", case.raw, case.tensors, files=2)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_converted_folder_equals_quantizing_in_memory(bf16, tiny, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "nvfp4", bf16, tmp_path / "out") is None
    assert capsys.readouterr().out.startswith(f"{tmp_path}/out: ")
    want, after = quantized(tiny["untied"]), Shards(tmp_path / "out")
    assert after.names.keys() == want.keys()
    assert all(same_bytes(after.get(name), tensor) for name, tensor in want.items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "out"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_converted_folder_computes_what_quantizing_on_load_does(tiny, tmp_path, monkeypatch, dtype):
    case = tiny["untied"]                        # norms and biases stay finer than bf16, matrices never are
    tensors = {name: (t.float() * 1.001).to(dtype) for name, t in case.tensors.items()}
    source = write_folder(tmp_path / "source", case.raw, tensors)
    assert run(monkeypatch, "nvfp4", source, tmp_path / "out") is None
    tokens = torch.arange(24).view(2, 12) * 4
    with torch.no_grad():
        assert torch.equal(*(load(path, "nvfp4", "cpu")(tokens) for path in (source, tmp_path / "out")))


def test_calibration_uses_its_flags(tmp_path, monkeypatch):
    write_sums(tmp_path / "sums.jsonl", range(9))
    asked = []
    monkeypatch.setattr(calibrate, "own_answers", lambda *a: asked.append(a))
    monkeypatch.setattr(calibrate, "to_nvfp4", lambda *a: None)
    for n, count in (("4", 4), ("100", 9)):                # capped at the number of problems
        assert run(monkeypatch, "nvfp4", TINY, tmp_path / "out", "--calibrate", n, "--data", tmp_path / "sums.jsonl",
                   "--prompt-style", "tags", "--seed", "5") is None
        _, tokenizer, some, *_, seed = asked[-1]
        questions = [f"{i} + 1?" for i in epoch_order(9, 5, 0)[:count]]
        request, system = STYLES["tags"]
        assert [p.prompt for p in some] == [prompt_of(tokenizer, q + request, system) for q in questions] and seed == 5


def already_quantized(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "awq"})


def nan_in_the_last_layer(folder):                         # found after most is written
    name = "model.layers.1.mlp.down_proj.weight"
    file = Shards(folder).names[name]
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name] * float("nan")}, file)


def foreign_tensor(folder):
    save_file({"model.layers.1.self_attn.k_norm.weight": torch.ones(64)}, folder / "more.safetensors")
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=names | {"model.layers.1.self_attn.k_norm.weight": "more.safetensors"})


def full_disk(folder):                                     # fails when weights are written
    def save_file(*_, **__):
        raise weights.SafetensorError("I/O error: No space left on device (os error 28)\n")
    weights.save_file = save_file


@pytest.mark.parametrize("damage,words", [
    (already_quantized, ["config.json", "already quantized"]),
    (nan_in_the_last_layer, ["model.layers.1.mlp.down_proj.weight"]),
    (foreign_tensor, ["1 tensor that", "model.layers.1.self_attn.k_norm.weight"]),
    (full_disk, ["/.out.", "No space left on device"])])
def test_bad_source_leaves_nothing_behind(bf16, tmp_path, monkeypatch, damage, words):
    monkeypatch.setattr(weights, "save_file", weights.save_file)     # restored after the test
    damage(bf16)
    line = run(monkeypatch, "nvfp4", bf16, tmp_path / "out")
    assert line.startswith("python -m tools.convert: ") and "\n" not in line
    assert all(word in line for word in words), line
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


@pytest.fixture
def trained(tmp_path, tiny_nvfp4):
    """A run's folder as train.py leaves it, with a nonzero adapter. -> its model"""
    model = with_acting_adapter(load(tiny_nvfp4, "nvfp4", "cpu"), std=0.02)
    adapters.save_adapter(model, tmp_path / "run" / "adapter")
    held = {"model": str(TINY), "base": "nvfp4", "kernels": "portable"}        # which no CPU has
    (tmp_path / "run" / "run.json").write_text(json.dumps(held))
    return model


def test_symlinked_files_are_copied_and_folders_skipped(tmp_path, monkeypatch):
    model = tmp_path / "model"                             # as in the hub's cache
    (model / "LICENSES").mkdir(parents=True)
    (model / "gone.txt").symlink_to("nowhere")
    for file in TINY.iterdir():
        (model / file.name).symlink_to(file)
    assert run(monkeypatch, "nvfp4", model, tmp_path / "out") is None
    held = {path.name for path in (tmp_path / "out").iterdir() if path.is_file() and not path.is_symlink()}
    assert "tokenizer.json" in held and not held & {"LICENSES", "gone.txt"}


# -----------------------------------------------------------------------------
# merge

def test_unusable_run_or_folder_is_named(trained, tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    assert "taken" in run(monkeypatch, "merge", tmp_path / "run", tmp_path / "taken")
    (tmp_path / "run" / "adapter" / "adapter_config.json").unlink()
    assert "run/adapter/adapter_config.json" in run(monkeypatch, "merge", tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists() and [p.name for p in (tmp_path / "taken").iterdir()] == ["notes.txt"]


def test_merged_folder_equals_trained_model(trained, tmp_path, monkeypatch, capsys):
    """The adapter is merged into the base it was trained on, not into the bf16 original."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 200_000)
    assert run(monkeypatch, "merge", tmp_path / "run", tmp_path / "out") is None
    capsys.readouterr()
    assert [ModelFolder(path).choose_base(None) for path in (tmp_path / "out", TINY)] == ["bf16", "nvfp4"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert run(monkeypatch, "nvfp4", tmp_path / "out", tmp_path / "rounded") is None
    assert "out: rounding to nvfp4 loses most" in capsys.readouterr().out
    assert ModelFolder(tmp_path / "rounded").choose_base(None) == "nvfp4"
    tokens = torch.randint(0, 460, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = trained(tokens).log_softmax(-1)
        with trained.adapter.off():
            base = trained(tokens).log_softmax(-1)
        got, wrong = (load(path, "bf16", "cpu")(tokens).log_softmax(-1) for path in (tmp_path / "out", TINY))
    off = (got - want).abs().mean()                        # bf16 keeps 8 significant bits
    assert off < 0.05 and off < 0.1 * (base - want).abs().mean() and off < 0.1 * (wrong - want).abs().mean(), off
