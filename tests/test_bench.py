"""
What of tools/bench.py runs without a GPU: its models, its loads, its step and its one line.

python -m pytest tests/test_bench.py -v
"""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvfp4 import FORMATS
from tools import bench

ROOT = Path(__file__).parent.parent
MODEL = dict(model="toy", base="nvfp4", kernels="auto", dtype="bfloat16", lora_rank=2)
FLAGS = {"step": MODEL | dict(prompts=3, group_size=2, memory_gib=None, kv_gib=None, micro_batch_tokens=2048),
         "rollout": MODEL | dict(prompt=8, new=4, batch=[1, 2, 8])}


@pytest.fixture
def on_cpu(monkeypatch):
    """bench on a toy size, short completions and a CPU; what asks a GPU for its clock or memory is answered."""
    monkeypatch.setitem(bench.SIZES, "toy", (64, 128, 2, 4, 2, 200, True))
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench, "drawn_lengths", lambda count, *_: [3 + i % 17 for i in range(count)])
    monkeypatch.setattr(bench.memory, "bound", lambda gib, device: None)
    for name, answer in dict(synchronize=None, set_device=None, reset_peak_memory_stats=None, max_memory_allocated=0,
                             max_memory_reserved=0, get_device_name="NVIDIA H200",
                             get_device_properties=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.parametrize("base", FORMATS)
def test_random_model_of_a_published_size_runs(on_cpu, base):
    model = bench.random_model("toy", base, torch.float32, lora_rank=0)
    assert (model.config.width, len(model.layers), model.live_vocab) == (64, 2, 200)
    with torch.no_grad():
        logits = model(torch.arange(12).view(1, 12))
    assert logits.shape == (1, 12, 200) and logits.isfinite().all() and logits.std() > 0.1
    again = bench.random_model("toy", base, torch.float32, lora_rank=0)
    assert torch.equal(model.layers[1].down.weight.dequantize(), again.layers[1].down.weight.dequantize())


def test_sizes_are_those_of_the_published_models():
    """Parameters as the model cards count them, in billions; Qwen3-0.6B's as its safetensors files do."""
    for size, billions in (("7b", 7.61), ("0.5b", 0.49), ("72b", 72.7), ("qwen3-0.6b", 0.596), ("qwen3-4b", 4.02),
                           ("qwen3-8b", 8.2), ("qwen3-14b", 14.8), ("qwen3-32b", 32.8)):
        c = bench.qwen.ModelConfig(*bench.SIZES[size])
        linears = sum(N * K for N, K in bench.fused_shapes(size).values())
        assert (c.layers * linears + (2 - c.tied) * c.vocab * c.width) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_random_qwen3_has_its_own_heads_norms_and_vocabulary(on_cpu, monkeypatch):
    monkeypatch.setitem(bench.SIZES, "toy", (64, 128, 2, 4, 2, 151936, True, 32, False, True))
    model = bench.random_model("toy", "nvfp4", torch.float32, lora_rank=2)
    layer = model.layers[0]
    assert model.live_vocab == bench.LIVE_VOCAB_QWEN3 and layer.qkv_bias is None and layer.qk_gains.shape == (2, 32)
    assert bench.fused_shapes("toy") == {name: (getattr(layer, name).weight.N, getattr(layer, name).weight.K)
                                         for name in ("qkv", "o", "gate_up", "down")}
    with torch.no_grad():
        assert model(torch.arange(12).view(1, 12)).isfinite().all()


@pytest.mark.parametrize("low,high,mean", [(50, 1024, 300), (50, 1024, 200), (256, 1024, 512)])
def test_drawn_lengths_have_the_mean_asked_for_and_a_long_tail(low, high, mean):
    lengths = bench.drawn_lengths(512, low, high, mean)
    assert low <= min(lengths) and max(lengths) == high
    assert sum(lengths) / 512 == pytest.approx(mean, rel=0.01)
    assert lengths == bench.drawn_lengths(512, low, high, mean)


def test_a_step_samples_the_lengths_it_draws_and_trains_on_every_row(on_cpu, monkeypatch):
    updates = []
    update = bench.Learner.update

    def look(learner, batch, *more, lr):
        before = learner.adapter.master.detach().clone()
        updates.append((batch.rollouts, update(learner, batch, *more, lr=lr)))
        assert 0 < (learner.adapter.master - before).abs().max() < 1e-5                 # lr 1e-6
        return updates[-1][1]

    monkeypatch.setattr(bench.Learner, "update", look)
    figures = bench.training_step(**FLAGS["step"])
    assert figures["micro_batch"] == 2048 and figures["samples"] == 6 and len(updates) == 2
    for rollouts, done in updates:
        assert [len(c) for c in rollouts.completions] == bench.drawn_lengths(6)
        assert done.sums["tokens"] == rollouts.num_tokens == figures["tokens"]       # no group of equal rewards


@pytest.mark.parametrize("command,keys", [
    ("step", {"seconds", "rollout", "update", "tokens", "learner_tokens", "learner_computed", "idle", "micro_batch",
              "kept", "kv_gib", "peak_gib", "reserved_gib", "gpus", "samples", "mismatch_abs"}),
    ("rollout", {"model", "base", "dtype", "lora_rank", "prompt", "new", "hardware", "commit", "weight_gb", "batch"})])
def test_commands_end_with_one_line_of_json(on_cpu, capsys, command, keys):
    bench.measure(command, "auto", FLAGS[command])
    *_, last = capsys.readouterr().out.splitlines()
    assert keys <= json.loads(last).keys()
    if command == "rollout":
        assert json.loads(last)["batch"]["8"].keys() == {"tokens_s", "step_ms", "floor_ms", "floor_of_step",
                                                         "prefill_ms"}


@pytest.mark.parametrize("card", ["NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA A10"])
def test_a_card_that_is_no_h200_is_not_held_to_its_floors(on_cpu, monkeypatch, card):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card)
    assert bench.rollout(**FLAGS["rollout"])["batch"][8].keys() == {"tokens_s", "step_ms", "prefill_ms"}


def test_the_kernels_are_said_first_and_the_line_to_send_back_has_the_cards_sizes(fake_gpu, monkeypatch, capsys):
    sizes = dict(major=8, minor=6, multi_processor_count=84, shared_memory_per_block_optin=101376, L2_cache_size=2**22)
    fake_gpu((8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(**sizes))
    monkeypatch.setitem(bench.MEASUREMENTS, "linears", lambda kernels, **_: {"decode": kernels})
    monkeypatch.setattr(sys, "argv", ["bench.py", "linears"])
    bench.main()
    first, last = capsys.readouterr().out.splitlines()
    assert first == "decode kernels: portable, on a GPU" and json.loads(last)["decode"] == "portable"
    assert json.loads(last)["gpu"] == sizes | {"shared_memory_per_multiprocessor": None}     # this torch lacks it


@pytest.mark.parametrize("flags,line", [
    (["linears"], "bench: measures a GPU and there is none"),
    (["step", "--mod", "7b"], "unrecognized arguments: --mod"),
    (["step", "--kv-gib", "0"], "bench: --kv-gib must lie in (0, 1e9], got 0.0"),
    (["step", "--group-size", "1"], "bench: --group-size must lie in [2, 1e6], got 1"),
    (["tune"], "invalid choice: 'tune'")])
def test_a_machine_without_gpu_and_a_bad_flag_get_one_line(flags, line, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert line in str(stop.value.code) + capsys.readouterr().err


ASK_EACH = """
import runpy, sys
sys.modules["triton"] = None
for tool in ("tools.bench", "tools.chat", "tools.convert", "tools.report", "study.results"):
    sys.argv = [tool, "--help"]
    try:
        runpy.run_module(tool, run_name="__main__")
    except SystemExit as stop:
        assert stop.code == 0, tool
"""


def test_every_tool_can_be_asked_for_its_flags_without_triton():
    done = subprocess.run([sys.executable, "-c", ASK_EACH], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.count("usage: ") == 5, done.stderr
