"""
What of tools/bench.py runs without a GPU: its models, its loads, its step and its one line.

python -m pytest tests/test_bench.py -v
"""
import json
import sys
from pathlib import Path

import pytest
import torch

from nvfp4 import FORMATS
from tools import bench

ROOT = Path(__file__).parent.parent
FLAGS = {"step": ["--prompts", 3, "--group-size", 2, "--micro-batch-tokens", 2048],
         "rollout": ["--prompt", 8, "--new", 4, "--batch", "1,2,8"]}


@pytest.fixture
def measured(on_cpu, monkeypatch):
    """A function: the figures of a command on the toy model; flags: besides FLAGS."""
    def figures(command, *flags):
        monkeypatch.setattr(sys, "argv", ["bench.py", command, "--model", "random:toy", "--lora-rank", "2",
                                          *map(str, [*FLAGS[command], *flags])])
        return list(bench.COMMANDS[command](bench.read_flags()))[-1]
    return figures


@pytest.fixture
def on_cpu(monkeypatch):
    """bench on a toy size, short completions and a CPU; what asks a GPU for its clock or memory is answered."""
    monkeypatch.setitem(bench.SIZES, "toy", (64, 128, 2, 4, 2, 200, True))
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench, "drawn_lengths", lambda count, *_: [3 + i % 17 for i in range(count)])
    monkeypatch.setattr(bench.memory, "bound", lambda gib, device: None)
    for name, answer in dict(synchronize=None, set_device=None, reset_peak_memory_stats=None, max_memory_allocated=0,
                             max_memory_reserved=0, get_device_name="NVIDIA H200").items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.parametrize("base", FORMATS)
def test_random_model_of_a_published_size_runs(on_cpu, base):
    model = bench.random_model("toy", base, lora_rank=0)
    assert (model.config.width, len(model.layers), model.live_vocab) == (64, 2, 200)
    with torch.no_grad():
        logits = model(torch.arange(12).view(1, 12))
    assert logits.shape == (1, 12, 200) and logits.isfinite().all() and logits.std() > 0.1
    again = bench.random_model("toy", base, lora_rank=0)
    assert torch.equal(model.layers[1].down.weight.dequantize(), again.layers[1].down.weight.dequantize())


def test_sizes_are_those_of_the_published_models():
    """Parameters as the model cards count them, in billions; Qwen3-0.6B's as its safetensors files do."""
    for size, billions in (("7b", 7.61), ("0.5b", 0.49), ("72b", 72.7), ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.2)):
        c = bench.qwen.ModelConfig(*bench.SIZES[size])
        linears = sum(N * K for N, K in bench.fused_shapes(size).values())
        assert (c.layers * linears + (2 - c.tied) * c.vocab * c.width) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_random_qwen3_has_its_own_heads_norms_and_vocabulary(on_cpu, monkeypatch):
    monkeypatch.setitem(bench.SIZES, "toy", (64, 128, 2, 4, 2, 151936, True, 32, False, True))
    model = bench.random_model("toy", "nvfp4", lora_rank=2)
    layer = model.layers[0]
    assert model.live_vocab == bench.LIVE_VOCAB_QWEN3 and layer.qkv_bias is None and layer.qk_gains.shape == (2, 32)
    assert bench.fused_shapes("toy") == {name: (getattr(layer, name).weight.N, getattr(layer, name).weight.K)
                                         for name in ("qkv", "o", "gate_up", "down")}
    with torch.no_grad():
        assert model(torch.arange(12).view(1, 12)).isfinite().all()


def test_a_step_on_several_gpus_plans_memory_for_the_whole_steps_prompts(measured, monkeypatch):
    """divide_memory gives each rank its share of them."""
    def divide(learner, plan, sizes, **more):
        raise InterruptedError(f"{sizes.prompts_per_step} prompts")

    monkeypatch.setattr(bench, "divide_memory", divide)
    monkeypatch.setattr(bench, "share", lambda items: items[:1])
    with pytest.raises(InterruptedError, match="^3 prompts"):
        measured("step")


@pytest.mark.parametrize("low,high,mean", [(50, 1024, 300), (50, 1024, 200), (256, 1024, 512)])
def test_drawn_lengths_have_the_mean_asked_for_and_a_long_tail(low, high, mean):
    lengths = bench.drawn_lengths(512, low, high, mean)
    assert low <= min(lengths) and max(lengths) == high
    assert sum(lengths) / 512 == pytest.approx(mean, rel=0.01)
    assert lengths == bench.drawn_lengths(512, low, high, mean)


def test_a_step_samples_the_lengths_it_draws_and_trains_on_every_row(measured, monkeypatch):
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
        assert done.sums["tokens"] == sum(bench.drawn_lengths(6)) == figures["tokens"]       # no group of equal rewards


def test_a_kv_cache_that_is_too_small_makes_rows_wait(measured):
    block = 2 * 2 * 2 * 32 * 16 * 2                        # bytes: keys and values of 2 layers, 2 heads of 16, in bf16
    assert measured("rollout", "--batch", 8, "--kv-gib", 12 * block / 2**30, "--new", 60)["preempted"] > 0
    assert measured("rollout", "--batch", 8, "--new", 60)["preempted"] == 0


def test_a_step_may_have_answers_of_one_length(measured):
    assert measured("step", "--new", "40")["tokens"] == 6 * 40


def test_the_first_line_says_what_ran_and_each_other_has_a_case(fake_gpu, monkeypatch, capsys):
    fake_gpu((8, 6))
    monkeypatch.setattr(bench, "decode_figures", lambda shapes, M, rank, kernels: {"rows": M, "rank": rank})
    monkeypatch.setattr(sys, "argv", ["bench.py", "linears", "--rows", "1", "64"])
    bench.main()
    first, *cases = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["model"], first["hardware"]) == ("7b", "a GPU")
    assert cases == [{"rows": 1, "rank": 32}, {"rows": 64, "rank": 32}]


@pytest.mark.parametrize("flags,name", [
    (["linears"], "GPU"), (["step", "--mod", "7b"], "--mod"), (["step", "--kv-gib", "0"], "--kv-gib"),
    (["step", "--group-size", "1"], "--group-size"),
    (["rollout", "--new", "1"], "--new"), (["rollout", "--model", "8b"], "--model"), (["tail"], "tail")])
def test_a_machine_without_gpu_and_a_bad_flag_get_one_line(flags, name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert name in str(stop.value.code) + capsys.readouterr().err
