"""
The parts of tools/bench.py that run without a GPU: models, workloads, a step, flags.

python -m pytest tests/test_bench.py -v
"""
import sys

import pytest
import torch

from tools import bench

FLAGS = {"step": ["--prompts", 3, "--group-size", 2, "--micro-batch-tokens", 2048],
         "rollout": ["--prompt", 8, "--new", 4, "--batch", "1,2,8"]}


@pytest.fixture
def measured(monkeypatch):
    """A function that runs a command with FLAGS and these flags, on a toy model and a CPU, with short completions and
    stubs for a GPU's clock and memory. -> its figures
    """
    monkeypatch.setitem(bench.SIZES, "toy", (64, 128, 2, 4, 2, 200, True))
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench, "drawn_lengths", lambda count, *_: [3 + i % 17 for i in range(count)])
    monkeypatch.setattr(bench.memory, "bound", lambda gib, device: None)
    for name, answer in dict(synchronize=None, set_device=None, reset_peak_memory_stats=None, max_memory_allocated=0,
                             max_memory_reserved=0, get_device_name="NVIDIA H200").items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)

    def figures(command, *flags):
        monkeypatch.setattr(sys, "argv", ["bench.py", command, "--model", "toy", "--lora-rank", "2",
                                          *map(str, [*FLAGS[command], *flags])])
        return list(bench.COMMANDS[command](bench.read_flags()))[-1]
    return figures


def test_sizes_match_published_parameter_counts():
    """Billions of parameters from the model cards; for Qwen3-0.6B, from its safetensors files."""
    for size, billions in (("7b", 7.61), ("0.5b", 0.49), ("72b", 72.7), ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.2),
                           ("llama3.1-8b", 8.03)):
        bf16_bytes, _ = bench.memory.model_bytes(bench.ModelConfig(*bench.SIZES[size]), "bf16", rank=0)
        assert bf16_bytes / 2e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("low,high,mean", [(50, 1024, 300), (50, 1024, 200), (256, 1024, 512)])
def test_drawn_lengths_have_given_mean_and_long_tail(low, high, mean):
    lengths = bench.drawn_lengths(512, low, high, mean)
    assert low <= min(lengths) and max(lengths) == high
    assert sum(lengths) / 512 == pytest.approx(mean, rel=0.01)
    assert lengths == bench.drawn_lengths(512, low, high, mean)


def test_step_samples_drawn_lengths_and_trains_on_every_row(measured, monkeypatch):
    updates = []
    update = bench.Learner.update

    def look(learner, batch, *more, lr):
        before = learner.adapter.master.detach().clone()
        updates.append((batch.rows, update(learner, batch, *more, lr=lr)))
        assert 0 < (learner.adapter.master - before).abs().max() < 1e-5                 # lr 1e-6
        return updates[-1][1]

    monkeypatch.setattr(bench.Learner, "update", look)
    figures = measured("step")
    assert figures["micro_batch"] == 2048 and figures["samples"] == 6 and len(updates) == 2
    for rows, done in updates:
        assert [len(row.completion) for row in rows] == bench.drawn_lengths(6)
        assert done.sums["tokens"] == sum(bench.drawn_lengths(6)) == figures["tokens"]


def test_rollout_keeps_to_its_kv_cache_and_step_to_a_fixed_length(measured):
    assert measured("step", "--new", "40")["tokens"] == 6 * 40
    gib = 12 * 2 * 2 * 2 * 32 * 16 * 2 / 2**30             # 12 blocks: keys and values, 2 layers, 2 heads of 16, bf16
    figures = measured("rollout", "--kv-gib", gib, "--new", 60)
    assert figures["batch"] == 8 and figures["tokens_s"] > 0 and 0 < figures["kv_gib"] <= gib


@pytest.mark.parametrize("flags,name", [
    (["step"], "GPU"), (["step", "--mod", "7b"], "--mod"), (["step", "--kv-gib", "0"], "--kv-gib"),
    (["step", "--group-size", "1"], "--group-size"),
    (["rollout", "--new", "1"], "--new"), (["rollout", "--model", "8b"], "--model"), (["tail"], "tail")])
def test_missing_gpu_or_bad_flag_is_named(flags, name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert name in str(stop.value.code) + capsys.readouterr().err
