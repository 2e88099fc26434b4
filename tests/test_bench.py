"""
What of tools/bench.py runs without a GPU: its models, its loads, its step and its one line.

python -m pytest tests/test_bench.py -v
"""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvfp4 import FORMATS
from tools import bench

ROOT = Path(__file__).parent.parent
FLAGS = {"step": ["--prompts", 3, "--group-size", 2, "--micro-batch-tokens", 2048],
         "rollout": ["--prompt", 8, "--new", 4, "--batch", "1,2,8"],
         "update": ["--prompts", 2, "--prompt", 8, "--new", 40, "--micro-batch-tokens", 200]}


@pytest.fixture
def measured(on_cpu, monkeypatch):
    """A function: the figures of a command on the toy model; flags: besides FLAGS."""
    def figures(command, *flags):
        monkeypatch.setattr(sys, "argv", ["bench.py", command, "--model", "random:toy", "--lora-rank", "2",
                                          *map(str, [*FLAGS[command], *flags])])
        function, args = bench.read_flags()
        return function(args)
    return figures


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
    model = bench.random_model("toy", base, lora_rank=0)
    assert (model.config.width, len(model.layers), model.live_vocab) == (64, 2, 200)
    with torch.no_grad():
        logits = model(torch.arange(12).view(1, 12))
    assert logits.shape == (1, 12, 200) and logits.isfinite().all() and logits.std() > 0.1
    again = bench.random_model("toy", base, lora_rank=0)
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
    model = bench.random_model("toy", "nvfp4", lora_rank=2)
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


@pytest.mark.parametrize("command,keys", [
    ("step", {"seconds", "rollout", "update", "tokens", "learner_tokens", "learner_computed", "idle", "micro_batch",
              "kept", "kv_gib", "peak_gib", "reserved_gib", "gpus", "samples", "rollout_logp_diff"}),
    ("rollout", {"weight_gb", "kv_gib", "batch"}),
    ("update", {"seconds", "tokens_s", "tflop_s", "floor", "floor_of_seconds", "micro_batches", "kept",
                "reserved_gib"})])
def test_what_a_command_measures(measured, command, keys):
    figures = measured(command)
    assert keys <= figures.keys()
    if command == "rollout":
        assert figures["batch"][8].keys() == {"tokens_s", "step_ms", "floor_ms", "floor_of_step", "prefill_ms",
                                              "preempted"}


@pytest.mark.parametrize("card", ["NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA A10"])
def test_a_card_that_is_no_h200_is_not_held_to_its_floors(measured, monkeypatch, card):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card)
    assert measured("rollout")["batch"][8].keys() == {"tokens_s", "step_ms", "prefill_ms", "preempted"}


def test_a_kv_cache_that_is_too_small_makes_rows_wait(measured):
    block = 2 * 2 * 2 * 32 * 16 * 2                        # bytes: keys and values of 2 layers, 2 heads of 16, in bf16
    assert measured("rollout", "--kv-gib", 12 * block / 2**30, "--new", 60)["batch"][8]["preempted"] > 0
    assert measured("rollout", "--new", 60)["batch"][8]["preempted"] == 0


def test_the_keys_and_values_of_a_step_are_counted_by_hand():
    c = bench.qwen.ModelConfig(*bench.SIZES["7b"])
    token = 28 * 2 * 4 * 128 * 2                                           # 56 KiB: docs/gpus.md
    assert token == 56 * 1024
    assert bench.kv_read(c, 64, 256, 2048) == (8 * 256 + 64 * 2048) * token              # groups of eight
    assert bench.kv_read(c, 1, 256, 0) == 256 * token


def test_the_matmuls_of_an_update_are_counted_as_by_torch(on_cpu):
    """torch counts the products of a forward and backward; attention in plain torch multiplies the masked half too, so
    it is left out by answers and prompts of one token. An answer's last token is predicted and not computed."""
    from torch.utils.flop_counter import FlopCounterMode
    model = bench.random_model("toy", "bf16", lora_rank=1)
    rows = [[i, i + 1] for i in range(20)]
    linears = [(linear.weight.N, linear.weight.K) for linear in model.adapter.linears]
    for kept in (0, 1, 2):
        with FlopCounterMode(display=False) as counter:
            model.token_logprobs(rows, [1] * 20, kept_layers=kept)[0].sum().backward()
        wanted = bench.update_flops(model.config, 20, 20, pairs=0, kept_layers=kept)
        # Of rank 1: up to three columns and rows more, of each linear in three passes, and the gradients of A and B.
        adapter = sum(2 * 20 * 3 * (n + k) * 4 for n, k in linears)
        assert wanted < counter.get_total_flops() < wanted + adapter


def test_an_update_trains_on_all_answers_and_counts_their_micro_batches(measured, monkeypatch):
    sums, update = [], bench.Learner.update
    monkeypatch.setattr(bench.Learner, "update", lambda *a, **k: sums.append(update(*a, **k)) or sums[-1])
    figures = measured("update")
    assert [int(done.sums["tokens"]) for done in sums] == [2 * 8 * 40] * 2
    assert figures["micro_batches"] == 4 and figures["micro_batch"] == 200                   # 4 rows: 8 + 4 x 40 of 200
    assert figures["floor_of_seconds"] == pytest.approx(figures["floor"] / figures["seconds"])


def test_the_card_is_said_first_and_the_line_to_send_back_has_its_sizes(fake_gpu, monkeypatch, capsys):
    sizes = dict(major=8, minor=6, multi_processor_count=84, shared_memory_per_block_optin=101376, L2_cache_size=2**22)
    fake_gpu((8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(**sizes))
    monkeypatch.setattr(bench, "decode_figures", lambda shapes, M, rank, kernels: {"rows": M, "rank": rank})
    monkeypatch.setattr(sys, "argv", ["bench.py", "linears", "--rows", "1", "64"])
    bench.main()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "on a GPU"
    said = json.loads(last)
    assert said["model"] == "7b" and said["kernels"] is None
    assert said["decode"] == {"1": {"rows": 1, "rank": 0}, "64": {"rows": 64, "rank": 0}}
    assert said["gpu"] == sizes | {"shared_memory_per_multiprocessor": None}                 # this torch lacks it


@pytest.mark.parametrize("flags,name", [
    (["linears"], "GPU"), (["step", "--mod", "7b"], "--mod"), (["step", "--kv-gib", "0"], "--kv-gib"),
    (["update", "--lora-rank", "0"], "--lora-rank 0"), (["step", "--group-size", "1"], "--group-size"),
    (["rollout", "--new", "1"], "--new"), (["rollout", "--model", "8b"], "--model"), (["tail"], "tail")])
def test_a_machine_without_gpu_and_a_bad_flag_get_one_line(flags, name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert name in str(stop.value.code) + capsys.readouterr().err
