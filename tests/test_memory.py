"""
Memory planning on a simulated GPU: sizes add up, and what shrinks first.

python -m pytest tests/test_memory.py -v
"""
import copy
import dataclasses
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, attach_to_some, write_sums

import grpo
from fast import backward
from files import UserError
from harness import memory, setup
from harness.config import Rollout, read_settings
from harness.memory import GIB, Limits, Plan
from learner import AdamW, Learner
from loading import load
from lora import attach
from model import ModelConfig

TINY = json.loads((ROOT / "tiny" / "config.json").read_text())
SIZES = {  # D, F, layers, H, KV, V, tied: config.json of Qwen2.5-*-Instruct
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False), "32b": (5120, 27648, 64, 40, 8, 152064, False)}
# Unless noted, plans are for 8 sequences of 96 tokens: prompts of 32, answers of 64.
PROMPT, NEW, ROWS = 32, 64, 8


class FakeGpu:
    """80 GiB, 2 of them taken by weights and adapter. The learner needs 4 GiB for 200 tokens, plus 1 GiB for each layer
    that keeps its activations."""
    total = 80 * GIB
    token_bytes = GIB / 200

    def __init__(self, held=2):
        self.held, self.peak = held * GIB, 0

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self):
        self.peak = 0

    def memory_reserved(self):
        return self.held

    def mem_get_info(self):
        return self.total - self.held, self.total

    def max_memory_reserved(self):
        return self.held + self.peak

    memory_allocated = max_memory_reserved

    def token_logprobs(self, rows, starts, kept_layers=0, **others):
        if torch.is_grad_enabled():
            self.peak = sum(map(len, rows)) * (4 + kept_layers) * self.token_bytes
            if self.held + self.peak > self.total:
                raise torch.OutOfMemoryError
        return torch.zeros(1, requires_grad=True), None

    def plan(self, memory_gib=None, kv_gib=None, tokens=None, rows=ROWS, model=None, with_reference=False):
        limits = Limits(memory_gib, kv_gib, tokens)
        return Plan(model or self.model, limits, PROMPT, NEW, rows, with_reference)


@pytest.fixture(scope="module")
def loaded():
    """The tiny model, quantized once. Tests that change it must copy it."""
    return load(ROOT / "tiny", "nvfp4", "cpu")


@pytest.fixture
def gpu(monkeypatch, loaded):
    gpu, model = FakeGpu(), copy.deepcopy(loaded)
    monkeypatch.setattr(memory.torch, "cuda", gpu)
    monkeypatch.setattr(model, "token_logprobs", gpu.token_logprobs)
    gpu.model, gpu.adapter = model, attach(model, rank=4)
    return gpu


def test_plan_adds_up_to_limit_and_leaves_no_gradient(gpu, capsys, monkeypatch):
    gpu.adapter.master.grad.fill_(1)
    plan = gpu.plan(48.0, tokens=200)
    *parts, together = [float(size) for size in re.findall(r"([\d.]+) GiB", capsys.readouterr().out)]
    assert together == 48.0 == pytest.approx(sum(parts), abs=0.04)         # each has two decimals
    assert plan.measured[200] == 4 * GIB
    assert plan.free / GIB == pytest.approx(48 - 2 - 0.6 - 0.03 * 48, abs=0.02)
    assert not gpu.adapter.master.grad.any()
    monkeypatch.setattr(memory, "LARGEST_PREFILL", memory.LARGEST_PREFILL + 2**20)
    width, ffn = TINY["hidden_size"], TINY["intermediate_size"]
    assert plan.free - gpu.plan(48.0, tokens=200).free == 2**20 * (10 * ffn + 20 * width)


@pytest.mark.parametrize("base,some,expands", [("bf16", False, 0), ("nvfp4", False, 1), ("nvfp4", True, 1)])
def test_plan_counts_largest_expanded_weight(gpu, tiny, monkeypatch, base, some, expands):
    # Without a kernel for packed weights, a decode step expands gate|up to 16 bits, even if only o, which is smaller,
    # has an adapter. A bf16 base needs no copy.
    free, raw = [], tiny["tied"].raw
    for name in ("bf16", base):
        model = load(tiny["tied"].folder, name, "cpu", torch.bfloat16)
        monkeypatch.setattr(model, "token_logprobs", gpu.token_logprobs)
        attach_to_some(model, [layer.o for layer in model.layers]) if some else attach(model, rank=4)
        free.append(gpu.plan(48.0, tokens=200, model=model).free)
    assert free[0] - free[1] == expands * 2 * 2 * raw["intermediate_size"] * raw["hidden_size"]


def make_useful(gpu, monkeypatch, gib, rows=ROWS, **changes):
    """Gives the model enough heads for `rows` sequences of 96 tokens to need `gib` GiB of KV cache."""
    c = dataclasses.replace(gpu.model.config, **changes)
    one_head = rows * (PROMPT + NEW) * 2 * c.layers * c.head_dim * 4
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(c, kv_heads=gib * GIB // one_head))


@pytest.mark.parametrize("limit,pool,kept", [(60, 40, 3), (47, None, 3), (33, None, 3), (30, 20, 2), (25, None, 0)])
def test_first_half_of_kv_pool_outranks_activations(gpu, monkeypatch, limit, pool, kept):
    # 8 sequences of 96 tokens can use 40 GiB. None: the pool gets what the kept layers of 1 GiB leave.
    make_useful(gpu, monkeypatch, 40)
    plan = gpu.plan(limit, tokens=200)
    left = plan.free - 4 * GIB
    assert plan.pool == pytest.approx(pool * GIB if pool else left - kept * GIB, rel=1e-4)
    assert plan.kept_layers == kept


@pytest.mark.parametrize("limit,tokens", [(37.8, 8192), (24.3, 2048)])
def test_largest_micro_batch_leaves_a_quarter_of_the_pool(gpu, monkeypatch, limit, tokens):
    # 34 of 37.8 GiB are left. 16384 tokens need 16 and leave 18 for the pool, less than a quarter of 80; 8192 need 8.
    # Of 24.3 GiB 21 are left, and no size leaves a quarter: 4096 leave 17, 2048 leave 19, the most.
    make_useful(gpu, monkeypatch, 80)
    gpu.token_bytes = GIB / 4096
    plan = gpu.plan(limit)
    assert (plan.micro_batch_tokens, plan.kept_layers) == (tokens, 0)


def test_expanded_weight_buffer_exists_before_measuring(gpu, monkeypatch):
    # The learner's first linear allocates a 3 GiB buffer and keeps it. 18.7 of 25 GiB are left; 16384 tokens need 16,
    # 8192 need 8.
    make_useful(gpu, monkeypatch, 40)
    gpu.token_bytes = GIB / 4096
    reserved, peak, ran = gpu.memory_reserved, gpu.max_memory_reserved, []
    monkeypatch.setattr(gpu, "memory_reserved", lambda: reserved() + 3 * GIB * bool(ran))
    monkeypatch.setattr(gpu, "max_memory_reserved", lambda: peak() + 3 * GIB * bool(ran))
    monkeypatch.setattr(backward, "wide_weight", ran.append)
    plans = [gpu.plan(25, tokens=tokens) for tokens in (None, 8192)]
    assert ran and [plan.micro_batch_tokens for plan in plans] == [8192, 8192]
    assert plans[0].pool == plans[1].pool == pytest.approx((25 - 2 - 3 - 0.6 - 0.75 - 8) * GIB, rel=1e-3)


def test_each_row_reserves_three_times_its_logits(gpu):
    free = [gpu.plan(48, tokens=200, rows=rows).free for rows in (8, 500)]
    assert free[0] - free[1] == pytest.approx(492 * 3 * 4 * TINY["vocab_size"], abs=1)


@pytest.mark.parametrize("gib,kv_gib,answers,most,rows", [
    (80, None, 600, None, 512), (80, None, 300, None, 300), (80, 33, 512, None, 512), (43.2, None, 512, None, 512),
    (42.6, None, 512, None, 256), (28, None, 512, None, 256), (80, 20, 512, None, 256), (42.6, None, 800, 700, 700)])
def test_512_rows_only_if_all_of_it_fits_or_the_flag_asks(gpu, monkeypatch, gib, kv_gib, answers, most, rows):
    # 512 sequences of 96 tokens need 32 GiB. Three layers need 3 GiB, the micro-batch 4. With CUDA's 0.6, the weights'
    # 2 and 3 % fragmentation, 42.9 GiB hold everything.
    make_useful(gpu, monkeypatch, 32, rows=512)
    assert Plan(gpu.model, Limits(gib, kv_gib, 200, most), PROMPT, NEW, answers).max_rows == rows


def test_reference_pass_is_measured_with_activations(gpu, monkeypatch):
    calls = []

    def token_logprobs(rows, starts, kept_layers=0, **others):
        calls.append((torch.is_grad_enabled(), gpu.model.adapter.enabled, sum(map(len, rows))))
        return torch.zeros(1, requires_grad=True), None

    plans = [gpu.plan(48, tokens=200, with_reference=with_reference) for with_reference in (False, True)]
    monkeypatch.setattr(gpu.model, "token_logprobs", token_logprobs)
    for with_reference, plan in enumerate(plans):
        calls.clear()
        plan.worst_case(200)
        assert calls[:-1] == [(True, True, 200), (False, False, 200)][:1 + with_reference]


def test_dry_step_drops_only_as_many_layers_as_needed(gpu, monkeypatch):
    # 28 layers and the micro-batch are planned at 32 of 32.1 GiB (80 less 2, 2.4 and the pool) but need 0.5 more.
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(gpu.model.config, layers=28))
    plan = gpu.plan(kv_gib=43.5, tokens=200)
    worst_case = plan.worst_case
    monkeypatch.setattr(plan, "worst_case", lambda *sizes: worst_case(*sizes) + GIB / 2)
    assert plan.kept_layers == 28 and plan.dry_step().kept_layers == 27
    plan.kept_layers, plan.pool = 0, plan.free - 4.6 * GIB
    assert plan.dry_step() is plan                                        # 4 + 0.5 fit
    monkeypatch.setattr(plan, "worst_case", lambda *_: math.inf)          # out of memory
    with pytest.raises(UserError, match="200 tokens do not fit .* use --micro-batch-tokens 100"):
        plan.dry_step()
    plan = gpu.plan(kv_gib=35, tokens=200)                           # needs 32 of 40.6 GiB: too few to be tried
    monkeypatch.setattr(plan, "worst_case", None)
    assert plan.dry_step().kept_layers == 28


@pytest.mark.parametrize("held_out,max_rows,ranks,rows", [
    (3, 256, 1, 6), (40, 256, 1, 40), (40, 32, 1, 32), (0, 4, 1, 4), (999, None, 1, 256), (0, None, 2, 4),
    (41, 256, 2, 21)])
def test_sampler_rows_fit_a_ranks_share(loaded, monkeypatch, held_out, max_rows, ranks, rows):
    monkeypatch.setattr(setup, "WORLD", ranks)
    model = copy.deepcopy(loaded)
    attach(model, rank=4)
    sizes = Rollout(prompts_per_step=3, group_size=2, max_new_tokens=8, max_rows=max_rows)
    sampler = setup.divide_memory(Learner(model, grpo.LOSSES["dapo"]), Limits(), sizes, 8, held_out)
    assert sampler.max_rows == rows


def test_row_longer_than_micro_batch_counts_fully(gpu):
    # A row of 96 tokens needs 1.92 GiB, and 0.48 for each kept layer. For 48 tokens, 1.2 GiB would keep all layers.
    gpu.token_bytes = GIB / 200
    free = gpu.plan(tokens=48).free / GIB
    plan = gpu.plan(tokens=48, kv_gib=free - 1.92 - 1.2)
    assert (plan.kept_layers, plan.dry_step().kept_layers) == (2, 2)


def test_pool_too_small_for_one_full_row_is_rejected(gpu, monkeypatch):
    # 8 sequences of 96 tokens need 40 GiB. One needs (3 + 2) x 32 of these 768 tokens: 8.3 GiB. A micro-batch needs 4.
    make_useful(gpu, monkeypatch, 40)
    assert gpu.plan(16.0, tokens=200).pool == pytest.approx((16 - 2 - 4 - 0.6 - 0.48) * GIB, rel=2e-3)
    with pytest.raises(UserError, match="do not fit"):
        gpu.plan(15.0, tokens=200)


@pytest.mark.parametrize("free,pool,tokens", [(3.0, 3.0, 16384), (2.0, 1.5, 8192)])
def test_resume_replans_only_if_old_plan_does_not_fit(monkeypatch, capsys, free, pool, tokens):
    def measured(model, limits, *rest):
        if (limits.kv_gib or 0) > free:
            raise UserError(f"only {free:.2f} GiB are left")
        plan = SimpleNamespace(pool=(limits.kv_gib or 1.5) * GIB, micro_batch_tokens=limits.micro_batch_tokens or 8192,
                               kept_layers=2, max_rows=8)
        plan.dry_step = lambda: plan
        return plan

    def sampler(model, longest, rows, kv_gib):
        return SimpleNamespace(engine=SimpleNamespace(kv=SimpleNamespace(nbytes=kv_gib * GIB)), kv_blocks=10)

    monkeypatch.setattr(memory, "Plan", measured)
    monkeypatch.setattr(setup, "Sampler", sampler)
    model = SimpleNamespace(device=torch.device("cuda"), layers=range(4))
    learner = SimpleNamespace(model=model, adapter=SimpleNamespace(master=torch.zeros(5)), loss=grpo.LOSSES["dapo"])
    began = Limits(kv_gib=3.0, micro_batch_tokens=16384)
    made = setup.divide_memory(learner, Limits(), Rollout(), 512, 0, began)
    assert (made.engine.kv.nbytes / GIB, learner.micro_batch_tokens) == (pool, tokens)
    output = capsys.readouterr().out
    assert ("memory plan that the run started with does not fit" in output) == (free < 3)
    if free < 3:
        with pytest.raises(UserError, match="only 2.00 GiB are left"):              # a new run does not start
            setup.divide_memory(learner, began, Rollout(), 512, 0)


def test_resume_reuses_plan_unless_memory_gib_changes():
    plan = dict(memory_gib=8.0, kv_gib=3.0, micro_batch_tokens=4096, max_rows=64)
    before = {"memory_plan": plan}
    assert setup.limits_at_start(before, Limits())._asdict() == plan | {"memory_gib": None}
    assert setup.limits_at_start(before, Limits(8.0)) == Limits(**plan)
    assert setup.limits_at_start(before, Limits(9.0)) is setup.limits_at_start(None, Limits()) is None


@pytest.mark.parametrize("base", memory.BITS)
def test_estimated_model_bytes_match_allocation(tiny, base):
    model = load(tiny["tied"].folder, base, "cpu", torch.bfloat16)
    adapter = attach(model, rank=4)
    weights, in_training = memory.model_bytes(model.config, base, 4)
    held = sum(t.nbytes for linear in adapter.linears for t in linear.weight.tensors) + model.embed.nbytes
    rows = sum(linear.weight.N for linear in adapter.linears)
    assert held == weights + (4 * rows if base == "nvfp4" else 0)          # which has a scale per row
    assert in_training == Learner.state_bytes(adapter.master.numel(), torch.bfloat16)


@pytest.mark.parametrize("size,base,train,gib,fits", [
    ("7b", "nvfp4", "lora", 7.5, True), ("7b", "nvfp4", "lora", 7.3, False), ("14b", "nvfp4", "lora", 15.5, True),
    ("14b", "nvfp4", "lora", 11.5, False), ("32b", "nvfp4", "lora", 23.5, False), ("32b", "nvfp4", "lora", 31.3, True),
    ("7b", "bf16", "lora", 15.5, False), ("7b", "bf16", "lora", 23.5, True), ("0.5b", "bf16", "full", 8.9, True),
    ("0.5b", "bf16", "full", 8.8, False)])
def test_model_larger_than_the_card_is_rejected(monkeypatch, size, base, train, gib, fits):
    monkeypatch.setattr(Learner, "OPTIMIZER", AdamW)
    # docs/hardware.md, weights + adapter in GiB: 7B 5.4 + 1.4, 14B 9.8 + 2.3, 32B 19.2 + 4.5, 7B in bf16 14.2 + 1.4.
    # Full: 18 bytes for each of 0.494 billion parameters, norms and biases not counted, 8.28 GiB. CUDA: 0.6.
    config = ModelConfig(*SIZES[size])
    wanted = SimpleNamespace(model=size, base=base, lora_rank=32, train=train)
    if fits:
        memory.check_size(wanted, config, gib * GIB)
        return
    with pytest.raises(UserError, match=f"--model {size} .* {gib} GiB "):
        memory.check_size(wanted, config, gib * GIB)


# Seconds of an update with 128 answers on an H200, by tokens of a micro-batch, with 28, 17 and none of 28 layers that
# keep their activations. A 7B:
#   16384: 2.34 2.73 3.35     8192: 2.50 2.91 3.59     4096: 2.80 3.52 4.29     2048: 4.27 5.66 6.85
# and a 1.5B:
#   16384: 0.75 0.86 1.04     8192: 1.27 1.46 1.52     4096: 2.43 2.78 4.02     2048: 4.93 5.42 5.50
@pytest.mark.parametrize("width,kib,limit,tokens,kept", [
    (3584, 176, 23, 8192, 7), (3584, 176, 24, 4096, 20), (3584, 176, 39, 4096, 28), (3584, 176, 40, 8192, 19),
    (3584, 176, 97, 8192, 28), (3584, 176, 98, 16384, 28), (1536, 81, 8, 8192, 0), (1536, 81, 14, 16384, 1),
    (1536, 81, 140, 32768, 28)])
def test_smaller_micro_batch_may_keep_more_layers(gpu, monkeypatch, width, kib, limit, tokens, kept):
    # A layer keeps so many KiB per token. 8 sequences can use 8 GiB of KV cache, of which half has precedence.
    make_useful(gpu, monkeypatch, 8, hidden=width, layers=28)
    gpu.token_bytes, gpu.total = kib * 2**10, 141 * GIB
    plan = gpu.plan(limit)
    assert (plan.micro_batch_tokens, plan.kept_layers) == (tokens, kept)


def test_size_is_checked_before_weights_are_read(fake_gpu, monkeypatch, tmp_path):
    fake_gpu((9, 0))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda *_: 0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (2**20, 2**34))             # 1 MiB free
    monkeypatch.setattr(setup, "read_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("importlib.import_module", lambda *_: None)                       # torch's compiler
    settings, _ = read_settings(["--lora-rank", "64", "--out", str(tmp_path / "run"), "--data",
                                 write_sums(tmp_path / "sums.jsonl", range(4))])
    with pytest.raises(UserError, match=r"--model .*tiny needs more than the 0.6 GiB .*an adapter of rank 64"):
        setup.prepare(settings, None)
