"""
merge.py against the model with its adapter switched on: the same rollouts, and one line where a run cannot be merged.

python -m pytest tests/test_merge.py -v
"""
import json
import sys
from pathlib import Path

import pytest
import torch

import lora
import merge
import model as qwen

TINY = Path(__file__).parent.parent / "tiny"


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


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["merge.py", *map(str, arguments)])
    try:
        return merge.main()
    except SystemExit as stop:
        return stop.code


def test_merged_folder_is_the_trained_model(trained, tmp_path, monkeypatch):
    """On the base that the run had: merged onto the bf16 original it would be another model."""
    assert run(monkeypatch, tmp_path / "run", tmp_path / "out") is None
    tokens = torch.randint(0, 460, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = trained(tokens).log_softmax(-1)
        with trained.adapter.off():
            base = trained(tokens).log_softmax(-1)
        got, wrong = (qwen.load(path, "bf16", "cpu")(tokens).log_softmax(-1) for path in (tmp_path / "out", TINY))
    off = (got - want).abs().mean()                        # bf16 keeps 9 bits of a weight
    assert off < 0.05 and off < 0.1 * (base - want).abs().mean() and off < 0.1 * (wrong - want).abs().mean(), off


def test_what_cannot_be_merged_is_one_line_and_nothing_is_overwritten(trained, tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    assert "taken: exists and is not an empty folder" in run(monkeypatch, tmp_path / "run", tmp_path / "taken")
    assert "run.json" in run(monkeypatch, tmp_path / "taken", tmp_path / "out")
    (tmp_path / "run" / "adapter" / "adapter_config.json").unlink()
    assert "not a readable PEFT adapter folder" in run(monkeypatch, tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists() and [p.name for p in (tmp_path / "taken").iterdir()] == ["notes.txt"]
