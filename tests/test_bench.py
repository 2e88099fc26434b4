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
MODEL = dict(model="toy", base="nvfp4", kernels=None, dtype="bfloat16", lora_rank=2)
FLAGS = {"step": MODEL | dict(prompts=3, group_size=2, memory_gib=None, kv_gib=None, micro_batch_tokens=2048),
         "rollout": MODEL | dict(prompt=8, new=4, batch=[1, 2, 8], kv_gib=None),
         "decode": MODEL | dict(prompt=40, new=[64, 200], batch=[1, 8], kv_gib=None),
         "tail": MODEL | dict(prompt=8, answers=16, new=64, lengths=None, max_rows=8, kv_gib=None),
         "update": MODEL | dict(prompts=2, prompt=8, new=40, memory_gib=None, kv_gib=None, micro_batch_tokens=200)}


def arguments(command, **other):
    return bench.grouped(FLAGS[command] | other)


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
    figures = bench.training_step(**arguments("step"))
    assert figures["micro_batch"] == 2048 and figures["samples"] == 6 and len(updates) == 2
    for rollouts, done in updates:
        assert [len(c) for c in rollouts.completions] == bench.drawn_lengths(6)
        assert done.sums["tokens"] == rollouts.num_tokens == figures["tokens"]       # no group of equal rewards


@pytest.mark.parametrize("command,keys", [
    ("step", {"seconds", "rollout", "update", "tokens", "learner_tokens", "learner_computed", "idle", "micro_batch",
              "kept", "kv_gib", "peak_gib", "reserved_gib", "gpus", "samples", "rollout_logp_diff"}),
    ("rollout", {"model", "base", "dtype", "lora_rank", "prompt", "new", "hardware", "commit", "weight_gb", "batch"}),
    ("decode", {"weight_gb", "steps"}), ("tail", {"tokens", "longest", "mean", "orders"}),
    ("update", {"seconds", "tokens_s", "tflop_s", "floor", "floor_of_seconds", "micro_batches", "kept",
                "reserved_gib"})])
def test_commands_end_with_one_line_of_json(on_cpu, capsys, command, keys):
    bench.measure(command, FLAGS[command])
    *_, last = capsys.readouterr().out.splitlines()
    assert keys <= json.loads(last).keys()
    if command == "rollout":
        assert json.loads(last)["batch"]["8"].keys() == {"tokens_s", "step_ms", "floor_ms", "floor_of_step",
                                                         "prefill_ms", "preempted"}


@pytest.mark.parametrize("card", ["NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA A10"])
def test_a_card_that_is_no_h200_is_not_held_to_its_floors(on_cpu, monkeypatch, card):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card)
    figures = bench.rollout(**arguments("rollout"))["batch"][8]
    assert figures.keys() == {"tokens_s", "step_ms", "prefill_ms", "preempted"}


def test_rows_half_way_are_those_that_the_sampler_has_there(on_cpu):
    """The same window of the same rows, and the same numbers in the cache: the next token is the same."""
    model = bench.random_model("toy", "nvfp4", torch.float32, lora_rank=2)
    sampler = bench.Sampler(bench.engine_for(None), model, 128, 8)
    seen, decode = [], sampler.engine.decode

    def look(rows, steps, sampling):
        seen.append((rows, decode(rows, steps, sampling)[0]))
        return decode(rows, steps, sampling)

    sampler.engine.decode = look
    torch.manual_seed(0)
    rollouts = sampler.generate(bench.random_prompts(model, [40]), 8, bench.Sampling(60))
    torch.manual_seed(0)                                                   # the same prompts again
    rows = bench.rows_half_way(sampler, model, 8, 40, 20)
    real, drawn = seen[20]                                                 # 20 tokens written, the 21st comes
    assert torch.equal(rows.pos, real.pos) and torch.equal(rows.prefix, real.prefix)
    assert torch.equal(rows.siblings, real.siblings) and torch.equal(rows.key, real.key)
    last = torch.tensor([completion[19] for completion in rollouts.completions])
    again = decode(rows._replace(token=last, table=seen[-1][0].table), 1, bench.Sampling(60))[0]
    assert torch.equal(again, drawn)
    used = rows.table[:, :2 + 1]                                           # 39 tokens of the prompt; 20 + 1 of its own
    assert (used[:, :2] == used[0, :2]).all() and len(set(used[:, 2].tolist()) | set(used[0].tolist())) == 2 + 8
    small = bench.Sampler(bench.engine_for(None), model, 128, 8, 9 * 16384 / 2**30)      # a block has 16 KiB
    assert bench.rows_half_way(small, model, 8, 40, 20) is None and bench.rows_half_way(small, model, 1, 40, 20)


def test_the_keys_and_values_of_a_step_are_counted_by_hand():
    c = bench.qwen.ModelConfig(*bench.SIZES["7b"])
    token = 28 * 2 * 4 * 128 * 2                                           # 56 KiB: docs/gpus.md
    assert token == 56 * 1024
    assert bench.kv_read(c, 64, 256, 2048) == (8 * 256 + 64 * 2048) * token              # groups of eight
    assert bench.kv_read(c, 1, 256, 0) == 256 * token


def test_decode_reports_the_lengths_that_fit_and_says_which_do_not(on_cpu, capsys):
    figures = bench.decode(**arguments("decode"))["steps"]
    assert figures.keys() == {"1 x 64", "1 x 200", "8 x 64", "8 x 200"}
    assert figures["8 x 200"]["kv_at_the_end_gib"] == 4 * 2 * 2 * 16 * (40 + 8 * 200) / 2**30
    assert figures["8 x 64"]["tokens_s"] == pytest.approx(8e3 / figures["8 x 64"]["step_ms"])
    block = 2 * 2 * 2 * 32 * 16 * 4                                        # bytes, of fp32
    few = bench.decode(**arguments("decode", batch=[8], kv_gib=20 * block / 2**30, dtype="float32"))["steps"]
    assert few.keys() == {"8 x 64"} and "B=8 N=200: the KV pool is too small" in capsys.readouterr().out
    none = bench.decode(**arguments("decode", batch=[8], kv_gib=9 * block / 2**30, dtype="float32"))["steps"]
    assert none == {} and "B=8 N=64: the KV pool is too small" in capsys.readouterr().out


def test_a_tail_samples_the_given_lengths_in_each_order(on_cpu, monkeypatch, tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps({"length": 60 if i == 5 else 3 + 7 * i % 41}) + "\n" for i in range(20)))
    wanted, seen = bench.lengths_of(str(file), 16), []
    generate = bench.Sampler.generate

    def look(sampler, prompts, group_size, sampling, **more):
        rollouts = generate(sampler, prompts, group_size, sampling, **more)
        seen.append([len(completion) for completion in rollouts.completions])
        return rollouts

    monkeypatch.setattr(bench.Sampler, "generate", look)
    figures = bench.tail(**arguments("tail", lengths=str(file)))
    mean = round(sum(wanted) / 16)
    assert sorted(map(len, seen[:8])) == list(range(1, 9))       # captures the graph of every number of rows
    assert seen[8:] == [[mean] * 16, wanted, sorted(wanted, reverse=True), sorted(wanted)]
    assert list(figures["orders"]) == ["equal lengths", "as they come", "longest first", "shortest first"]
    assert figures["orders"]["equal lengths"]["few"] == 0 < figures["orders"]["as they come"]["few"] < 1
    for lines, message in ((3, "has 3 answers, --answers is 16"), (0, "has 0 answers")):
        file.write_text('{"length": 3}\n' * lines)
        with pytest.raises(ValueError, match=message):
            bench.lengths_of(str(file), 16)
    file.write_text('{"length": 3}\n{"size": 4}\n')
    with pytest.raises(ValueError, match="samples.jsonl:2: needs a length, got None"):
        bench.lengths_of(str(file), 16)


def test_the_matmuls_of_an_update_are_counted_as_by_torch(on_cpu):
    """torch counts the products of a forward and backward; attention in plain torch multiplies the masked half too, so
    it is left out by answers and prompts of one token. An answer's last token is predicted and not computed."""
    from torch.utils.flop_counter import FlopCounterMode
    model = bench.random_model("toy", "bf16", torch.float32, lora_rank=1)
    rows = [[i, i + 1] for i in range(20)]
    linears = [(linear.weight.N, linear.weight.K) for linear in model.adapter.linears]
    for kept in (0, 1, 2):
        with FlopCounterMode(display=False) as counter:
            model.token_logprobs(rows, [1] * 20, kept_layers=kept)[0].sum().backward()
        wanted = bench.update_flops(model.config, 20, 20, pairs=0, kept_layers=kept)
        # Of rank 1: up to three columns and rows more, of each linear in three passes, and the gradients of A and B.
        adapter = sum(2 * 20 * 3 * (n + k) * 4 for n, k in linears)
        assert wanted < counter.get_total_flops() < wanted + adapter


def test_an_update_trains_on_all_answers_and_counts_their_micro_batches(on_cpu, monkeypatch):
    sums, update = [], bench.Learner.update
    monkeypatch.setattr(bench.Learner, "update", lambda *a, **k: sums.append(update(*a, **k)) or sums[-1])
    figures = bench.learner_update(**arguments("update"))
    assert [int(done.sums["tokens"]) for done in sums] == [2 * 8 * 40] * 2
    assert figures["micro_batches"] == 4 and figures["micro_batch"] == 200                   # 4 rows: 8 + 4 x 40 of 200
    assert figures["floor_of_seconds"] == pytest.approx(figures["floor"] / figures["seconds"])


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
    (["update", "--lora-rank", "0"], "bench: --lora-rank 0: the learner trains an adapter"),
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
