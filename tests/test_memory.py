"""
The division of a GPU's memory, on a GPU that is not there: do its sizes add up, and what gives way where they do not
fit?

python -m pytest tests/test_memory.py -v
"""
import copy
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import attach_to_some

import grpo
import nvfp4
from files import UserError
from harness import memory, setup
from harness.config import Rollout, read_settings
from harness.memory import GIB, Limits, Plan
from learner import AdamW, Learner
from lora import attach
from model import ModelConfig, load
from sampler import Sampler

ROOT = Path(__file__).parent.parent
TINY = json.loads((ROOT / "tiny" / "config.json").read_text())
SIZES = {  # D, F, layers, H, KV, V, tied: config.json of Qwen2.5-*-Instruct
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False), "32b": (5120, 27648, 64, 40, 8, 152064, False)}
# Every plan here is for 8 sequences of 96 tokens: prompts of 32, answers of 64.
PROMPT, NEW, ROWS = 32, 64, 8


class FakeGpu:
    """80 GiB, 2 of them held by weights and adapter. The learner's 200 tokens take 4 GiB while no layer keeps its
    activations, and 1 more for each layer that does."""
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

    def memory_allocated(self):
        return self.held + self.peak

    def token_logprobs(self, rows, starts, kept_layers=0, **others):
        if torch.is_grad_enabled():
            self.peak = sum(map(len, rows)) * (4 + kept_layers) * self.token_bytes
            if self.held + self.peak > self.total:
                raise torch.OutOfMemoryError
        return torch.zeros(1, requires_grad=True), None

    def plan(self, memory_gib=None, kv_gib=None, tokens=None, rows=ROWS, model=None,
             with_reference=False):
        limits = Limits(memory_gib, kv_gib, tokens)
        return Plan(model or self.model, limits, PROMPT, NEW, rows, with_reference)


@pytest.fixture(scope="module")
def loaded():
    """The tiny model as loaded; a test that changes it takes a copy. To quantize it takes longer than most tests."""
    return load(ROOT / "tiny", "nvfp4", "cpu")


@pytest.fixture
def gpu(monkeypatch, loaded):
    gpu, model = FakeGpu(), copy.deepcopy(loaded)
    monkeypatch.setattr(memory.torch, "cuda", gpu)
    monkeypatch.setattr(model, "token_logprobs", gpu.token_logprobs)
    gpu.model, gpu.adapter = model, attach(model, rank=4)
    return gpu


def test_the_memory_table_adds_up_to_the_limit_and_measuring_leaves_no_gradient(gpu, capsys):
    plan = gpu.plan(48.0, tokens=200)
    *parts, together = [float(size) for size in re.findall(r"([\d.]+) GiB", capsys.readouterr().out)]
    assert together == 48.0 == pytest.approx(sum(parts), abs=0.04)         # two decimals each
    assert plan.measured[200] == 4 * GIB
    assert plan.free / GIB == pytest.approx(48 - 2 - 0.6 - 0.03 * 48, abs=0.02)
    assert not gpu.adapter.master.grad.any()


@pytest.mark.parametrize("base,expands", [("bf16", False), ("nvfp4", True), ("mxfp4", True), ("nf4", True)])
def test_the_plan_counts_the_largest_w_that_a_decode_step_expands(gpu, monkeypatch, base, expands):
    # Where no kernel reads the packed weight a step decodes gate|up, in 16 bits, which a bf16 base has already.
    free = []
    for name in ("bf16", base):
        model = load(ROOT / "tiny", name, "cpu", torch.bfloat16)
        monkeypatch.setattr(model, "token_logprobs", gpu.token_logprobs)
        attach(model, rank=4)
        free.append(gpu.plan(48.0, tokens=200, model=model).free)
    assert free[0] - free[1] == expands * 2 * 2 * TINY["intermediate_size"] * TINY["hidden_size"]


def test_linears_that_the_adapter_leaves_out_are_expanded_and_counted_too(gpu, monkeypatch):
    # The adapter covers o alone, which is smaller than gate|up.
    free = []
    for base in ("bf16", "nvfp4"):
        model = load(ROOT / "tiny", base, "cpu", torch.bfloat16)
        monkeypatch.setattr(model, "token_logprobs", gpu.token_logprobs)
        attach_to_some(model, [layer.o for layer in model.layers])
        free.append(gpu.plan(48.0, tokens=200, model=model).free)
    gate_up = 2 * TINY["intermediate_size"] * TINY["hidden_size"]
    assert free[0] - free[1] == 2 * gate_up                                # 16 bits each, expanded in a decode step
    assert len(model.layers[0].gate_up.scratch.flat) == gate_up            # the learner's buffer


@pytest.mark.parametrize("pool,kept", [(20, 3), (68.5, 3), (69, 2), (71, 0)])
def test_layers_keep_their_activations_where_the_kv_pool_leaves_memory_for_them(gpu, pool, kept):
    # Of 80 GiB 71.6 are left: 2 are held, 4 for the micro-batch, 2.4 for fragments. A layer takes 1.
    plan = gpu.plan(kv_gib=pool, tokens=200)
    assert (plan.pool, plan.kept_layers) == (pool * GIB, kept)
    gpu.held += plan.pool
    assert plan.dry_step().kept_layers == kept


def make_useful(gpu, monkeypatch, gib):
    """Give the model so many heads that 8 sequences of 96 tokens take `gib` GiB of KV cache."""
    c = gpu.model.config
    one_head = ROWS * (PROMPT + NEW) * 2 * c.layers * c.head_dim * 4
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(c, kv_heads=gib * GIB // one_head))


@pytest.mark.parametrize("limit,pool,kept", [(60, 40, 3), *((limit, None, 3) for limit in range(33, 48)), (30, 20, 2),
                                             (25, None, 0)])
def test_a_pool_of_half_its_use_comes_before_activations_and_the_other_half_after(gpu, monkeypatch, limit, pool, kept):
    # 40 GiB are of use to 8 sequences of 96 tokens. None: what three layers of 1 GiB leave, all of it without a layer.
    make_useful(gpu, monkeypatch, 40)
    plan = gpu.plan(limit, tokens=200)
    left = plan.free - 4 * GIB
    assert plan.pool == pytest.approx(pool * GIB if pool else left - kept * GIB, rel=1e-4)
    assert plan.kept_layers == kept                              # 3 of 3 where 3 / 1 comes out as 2.9999


def test_the_largest_micro_batch_that_leaves_a_quarter_of_the_pool_wins_where_no_layer_keeps_anything(gpu, monkeypatch):
    # Of 24 GiB 20.7 are left; 16384 tokens take 16 of them, 8192 take 8. A quarter of 40 is 10.
    make_useful(gpu, monkeypatch, 40)
    gpu.token_bytes = GIB / 4096
    plan = gpu.plan(24)
    assert (plan.micro_batch_tokens, plan.kept_layers) == (8192, 0)


def test_the_buffer_of_an_expanded_weight_is_there_before_micro_batches_are_measured(gpu, monkeypatch):
    # 3 GiB that the learner's first linear takes for good. Of 25 GiB 18.7 are left; 16384 tokens take 16, 8192 take 8.
    make_useful(gpu, monkeypatch, 40)
    gpu.token_bytes = GIB / 4096
    scratch = gpu.model.layers[0].down.scratch
    reserved, peak, learn = gpu.memory_reserved, gpu.max_memory_reserved, gpu.model.token_logprobs
    monkeypatch.setattr(gpu, "memory_reserved", lambda: reserved() + 3 * GIB * (scratch.flat is not None))
    monkeypatch.setattr(gpu, "max_memory_reserved", lambda: peak() + 3 * GIB * (scratch.flat is not None))
    monkeypatch.setattr(gpu.model, "token_logprobs", lambda *rows, **options:
                        gpu.model.layers[0].down.wide_weight() is None or learn(*rows, **options))
    plans = [gpu.plan(25, tokens=tokens) for tokens in (None, 8192)]
    assert scratch.flat is not None and [plan.micro_batch_tokens for plan in plans] == [8192, 8192]
    assert plans[0].pool == plans[1].pool == pytest.approx((25 - 2 - 3 - 0.6 - 0.75 - 8) * GIB, rel=1e-3)


def test_a_row_more_takes_three_times_its_logits_from_the_rest(gpu):
    free = [gpu.plan(48, tokens=200, rows=rows).free for rows in (8, 500)]
    assert free[0] - free[1] == pytest.approx(492 * 3 * 4 * TINY["vocab_size"], abs=1)


@pytest.mark.parametrize("gib,kv_gib,answers,rows", [
    (80, None, 512, 512), (80, None, 600, 512), (80, None, 300, 300), (80, None, 40, 40), (80, 33, 512, 512),
    (43.2, None, 512, 512), (42.6, None, 512, 256), (28, None, 512, 256), (80, 20, 512, 256), (80, None, 256, 256)])
def test_512_rows_are_decoded_where_they_take_nothing_from_the_learner(gpu, monkeypatch, gib, kv_gib, answers, rows):
    # 512 sequences of 96 tokens take 32 GiB, and 256 of them 16. Three layers take 3 GiB, the micro-batch 4; 0.6, 2 and
    # 3 % are gone: 42.9 GiB hold it all.
    c = gpu.model.config
    one_head = 512 * (PROMPT + NEW) * 2 * c.layers * c.head_dim * 4
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(c, kv_heads=32 * GIB // one_head))
    plan = gpu.plan(gib, kv_gib, tokens=200, rows=answers)
    assert plan.max_rows == rows
    monkeypatch.setattr(memory, "MAX_ROWS", (256,))                       # without the choice
    fewer = gpu.plan(gib, kv_gib, tokens=200, rows=answers)
    assert fewer.max_rows == min(256, answers) and plan.kept_layers >= fewer.kept_layers and plan.pool >= fewer.pool


def test_rows_that_are_named_are_taken(gpu):
    for rows in (7, 300, 1000):
        limits = Limits(48, None, 200, rows)
        assert Plan(gpu.model, limits, PROMPT, NEW, 800).max_rows == min(rows, 800)


def test_a_reference_pass_is_measured_while_the_activations_are_held(gpu, monkeypatch):
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


def test_the_dry_step_lets_layers_that_do_not_fit_drop_their_activations(gpu):
    plan = gpu.plan(kv_gib=69, tokens=200)
    gpu.held = 74.5 * GIB                                                 # 2 + 69, and somebody took 3.5
    assert plan.kept_layers == 2 and plan.dry_step().kept_layers == 1


def test_the_dry_step_drops_no_more_layers_than_are_too_many(gpu, monkeypatch):
    # 28 layers and the micro-batch take 32 GiB of 32.1 (80 less 2, 2.4 and the pool), and half a GiB more in truth.
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(gpu.model.config, layers=28))
    plan = gpu.plan(kv_gib=43.5, tokens=200)
    worst_case = plan.worst_case
    monkeypatch.setattr(plan, "worst_case", lambda *sizes: worst_case(*sizes) + GIB / 2)
    assert plan.kept_layers == 28 and plan.dry_step().kept_layers == 27


def test_a_kept_layer_saves_its_share_of_a_forward(gpu, monkeypatch):
    # 4,096 tokens take 4 GiB and a layer of them 1. Of 4.8 GiB the pool gets 0.5: no layer is kept; with micro-batches
    # of 2,048 tokens four of 28 were, but W would be expanded twice as often.
    gpu.token_bytes = GIB / 4096
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(gpu.model.config, layers=28))
    plan = gpu.plan(7.65, kv_gib=0.5)
    assert (plan.micro_batch_tokens, plan.kept_layers) == (4096, 0)
    plan = gpu.plan(7.65, kv_gib=0.5, tokens=2048)
    assert (plan.micro_batch_tokens, plan.kept_layers) == (2048, 4)


@pytest.mark.parametrize("held_out,max_rows,ranks,rows", [
    (3, 256, 1, 6), (40, 256, 1, 40), (40, 32, 1, 32), (0, 4, 1, 4), (999, None, 1, 256), (0, None, 2, 4),
    (41, 256, 2, 21)])
def test_the_sampler_has_room_for_a_ranks_share_of_the_answers(loaded, monkeypatch, held_out, max_rows, ranks, rows):
    monkeypatch.setattr(setup, "WORLD", ranks)
    model = copy.deepcopy(loaded)
    attach(model, rank=4)
    sizes = Rollout(prompts_per_step=3, group_size=2, max_new_tokens=8, max_rows=max_rows)
    sampler = setup.divide_memory(Learner(model, grpo.LOSSES["dapo"]), Limits(), sizes, 8, held_out)
    assert sampler.max_rows == rows


def test_a_row_that_is_longer_than_a_micro_batch_counts_whole(gpu):
    # A row has 96 tokens: 1.92 GiB, and a layer keeps 0.48 GiB of it. If 48 tokens counted, 1.2 GiB would hold all
    # three layers.
    gpu.token_bytes = GIB / 200
    free = gpu.plan(tokens=48).free / GIB
    plan = gpu.plan(tokens=48, kv_gib=free - 1.92 - 1.2)
    assert (plan.kept_layers, plan.dry_step().kept_layers) == (2, 2)


def test_micro_batches_shrink_until_the_kv_pool_fits(gpu):
    # 4 GiB for 200 tokens: 4096 and more take 81, 2048 take 40, of 75. The tiny model's own pool is 1 MB.
    plan = gpu.plan()
    assert (plan.micro_batch_tokens, plan.kept_layers) == (2048, 3)
    with pytest.raises(UserError, match="do not fit"):
        gpu.plan(kv_gib=50)
    gpu.token_bytes = GIB / 400                                      # 4096 take 41 of 75, 2048 take 20
    plan = gpu.plan(kv_gib=54)                                       # does not fit beside 4096, but beside 2048
    assert plan.micro_batch_tokens == 2048 and plan.pool == 54 * GIB


@pytest.mark.parametrize("held", [60, 38])                                # of 80
def test_where_nothing_fits_the_error_tells_what_is_taken_and_the_flags_that_help(gpu, held):
    gpu.held = held * GIB
    with pytest.raises(UserError, match=rf"rows of 96 tokens .* 80.6 GiB weights {held}.0, adapter 0.0, graphs 0.0.*"
                                        "--micro-batch-tokens, --max-rows, --max-new-tokens or --lora-rank"):
        gpu.plan()


def test_a_pool_that_holds_no_row_of_full_length_is_refused_before_the_sampler_is_made(gpu, monkeypatch):
    # 8 sequences of 96 tokens take 40 GiB: one needs (3 + 2) x 32 tokens of these 768, so 8.3. The micro-batch takes 4.
    make_useful(gpu, monkeypatch, 40)
    assert gpu.plan(16.0, tokens=200).pool == pytest.approx((16 - 2 - 4 - 0.6 - 0.48) * GIB, rel=2e-3)
    with pytest.raises(UserError, match="do not fit"):
        gpu.plan(15.0, tokens=200)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("limit", [80, 8])
def test_a_pool_for_few_rows_holds_one_of_full_length(gpu, rows, limit):
    # It needs (3 + 2) x 32 tokens, which is more than one row of 96 and more than half of two or three. Of 8 GiB 1.2
    # are left, where three layers of 1 GiB want them all.
    plan = gpu.plan(limit, tokens=200, rows=rows)
    sampler = Sampler(gpu.model, PROMPT + NEW, rows, plan.pool / GIB)
    assert len(sampler.pool) >= 4                                         # without number 0
    assert plan.kept_layers == (3 if limit == 80 else 1)


# In GiB, as runs on an H200 printed: weights, with the buffer that expands one of them, and the adapter; a micro-batch,
# which is right for one row of 4,608 tokens and for 8,192 tokens of a 7B; what a layer keeps of a token.
CARDS = {
    "7b": (5.98 + 1.35, lambda tokens: 2.374 + 0.000438 * tokens, 0.000143),
    "14b": (10.29 + 2.31, lambda tokens: 4.208 + 0.000326 * tokens, 0.000115)}


@pytest.mark.parametrize("size,gib,tokens,pool,kept", [
    ("7b", 11.5, None, None, None), ("7b", 15.5, 4096, 2.2, 0), ("7b", 23.5, 8192, 8.4, 0), ("7b", 31.3, 4096, 15.8, 2),
    ("14b", 15.5, None, None, None), ("14b", 23.5, 4096, 3.4, 0), ("14b", 31.3, 4096, 11.0, 0)])
def test_a_bounded_card_gets_the_plan_of_the_documents_or_is_told_what_helps(gpu, monkeypatch, size, gib, tokens, pool,
                                                                             kept):
    # Prompts of 512 and answers of 4,096 tokens, 128 at a time. A forward and backward takes what was measured.
    held, micro_batch, layer = CARDS[size]

    def token_logprobs(rows, starts, kept_layers=0, **others):
        if torch.is_grad_enabled():
            count = sum(map(len, rows))
            gpu.peak = (micro_batch(count) + kept_layers * layer * count) * GIB
        return torch.zeros(1, requires_grad=True), None

    monkeypatch.setattr(gpu.model, "config", ModelConfig(*SIZES[size]))
    monkeypatch.setattr(gpu.model, "dtype", torch.bfloat16)
    monkeypatch.setattr(gpu.model, "token_logprobs", token_logprobs)
    gpu.held = held * GIB
    limits = Limits(memory_gib=gib)
    if tokens:
        plan = Plan(gpu.model, limits, 512, 4096, 128)
        assert plan.micro_batch_tokens == tokens or plan.micro_batch_tokens < 4608 > tokens       # one row either way
        assert (plan.pool / GIB, plan.kept_layers) == (pytest.approx(pool, abs=0.06), kept)
        return
    with pytest.raises(UserError, match=f"rows of 4608 tokens do not fit: of {gib} GiB"):
        Plan(gpu.model, limits, 512, 4096, 128)


@pytest.mark.parametrize("free,pool,tokens", [(3.0, 3.0, 16384), (2.0, 1.5, 8192)])
def test_a_resumed_run_divides_the_memory_anew_only_if_what_it_had_does_not_fit(monkeypatch, capsys, free, pool,
                                                                                tokens):
    class Measured:
        def __init__(self, model, limits, *rest):
            self.pool, self.micro_batch_tokens, self.kept_layers, self.max_rows = 1.5 * GIB, 8192, 2, 8
            if limits.kv_gib:
                if limits.kv_gib > free:
                    raise UserError(f"a KV pool of {limits.kv_gib} GiB does not fit: only {free:.2f} GiB are left")
                self.pool, self.micro_batch_tokens = limits.kv_gib * GIB, limits.micro_batch_tokens

        def dry_step(self):
            return self

    def sampler(model, longest, rows, kv_gib):
        return SimpleNamespace(engine=SimpleNamespace(kv=SimpleNamespace(nbytes=kv_gib * GIB)), pool=range(9))

    monkeypatch.setattr(memory, "Plan", Measured)
    monkeypatch.setattr(setup, "Sampler", sampler)
    model = SimpleNamespace(device=torch.device("cuda"), layers=range(4))
    learner = SimpleNamespace(model=model, adapter=SimpleNamespace(master=torch.zeros(5)), loss=grpo.LOSSES["dapo"])
    began = Limits(kv_gib=3.0, micro_batch_tokens=16384)
    made = setup.divide_memory(learner, Limits(), Rollout(), 512, 0, began)
    assert (made.engine.kv.nbytes / GIB, learner.micro_batch_tokens) == (pool, tokens)
    said = capsys.readouterr().out
    assert ("memory plan that the run started with does not fit" in said) == (free < 3)
    if free < 3:
        with pytest.raises(UserError, match="only 2.00 GiB are left"):              # of a new run it ends the start
            setup.divide_memory(learner, began, Rollout(), 512, 0)


def test_a_resumed_run_begins_with_its_memory_plan_unless_memory_gib_is_new():
    plan = dict(memory_gib=8.0, kv_gib=3.0, micro_batch_tokens=4096, max_rows=64)
    before = {"memory_plan": plan | {"a_forks": 1}}
    assert setup.limits_at_start(before, Limits())._asdict() == plan | {"memory_gib": None}
    assert setup.limits_at_start(before, Limits(8.0)) == Limits(**plan)
    assert setup.limits_at_start(before, Limits(9.0)) is setup.limits_at_start(None, Limits()) is None


@pytest.mark.parametrize("base", nvfp4.FORMATS)
def test_the_bytes_of_a_model_by_arithmetic_are_those_that_it_takes(base):
    model = load(ROOT / "tiny", base, "cpu", torch.bfloat16)
    adapter = attach(model, rank=4)
    weights, in_training = memory.model_bytes(model.config, base, 4)
    held = sum(linear.weight.nbytes for linear in adapter.linears) + model.embed.nbytes
    rows = sum(linear.weight.N for linear in adapter.linears)
    assert held == weights + (4 * rows if base == "nvfp4" else 0)          # which has a scale for each row
    assert in_training == Learner.state_bytes(adapter.master.numel(), torch.bfloat16)


@pytest.mark.parametrize("size,base,gib,fits", [
    ("7b", "nvfp4", 7.5, True), ("7b", "nvfp4", 7.3, False), ("14b", "nvfp4", 15.5, True),
    ("14b", "nvfp4", 11.5, False), ("32b", "nvfp4", 23.5, False), ("32b", "nvfp4", 31.3, True),
    ("7b", "bf16", 15.5, False), ("7b", "bf16", 23.5, True)])
def test_a_model_that_exceeds_the_card_is_refused_by_arithmetic(monkeypatch, size, base, gib, fits):
    monkeypatch.setattr(Learner, "OPTIMIZER", AdamW)
    # docs/hardware.md: 5.4 + 1.4 GiB of the 7B, 9.8 + 2.3 of the 14B, 19.2 + 4.5 of the 32B; 14.2 + 1.4 in bf16.
    # CUDA: 0.6.
    config = ModelConfig(*SIZES[size])
    wanted = SimpleNamespace(model=size, base=base, lora_rank=32, train="lora")
    if fits:
        memory.check_size(wanted, config, gib * GIB)
        return
    with pytest.raises(UserError, match=f"--model {size} .* {gib} GiB .*its {base} weights .*--base nvfp4"):
        memory.check_size(wanted, config, gib * GIB)


@pytest.mark.parametrize("gib,fits", [(8.9, True), (8.8, False)])
def test_full_fine_tuning_takes_18_bytes_a_parameter(monkeypatch, gib, fits):
    monkeypatch.setattr(Learner, "OPTIMIZER", AdamW)
    # 0.494 billion of them, without norms and biases: 8.28 GiB; CUDA: 0.6.
    wanted = SimpleNamespace(model="0.5b", base="bf16", lora_rank=32, train="full")
    limit = gib * GIB
    if fits:
        memory.check_size(wanted, ModelConfig(*SIZES["0.5b"]), limit)
        return
    with pytest.raises(UserError, match="all weights in training 8.3"):
        memory.check_size(wanted, ModelConfig(*SIZES["0.5b"]), limit)


@pytest.mark.parametrize("width,largest", [(896, 32768), (1536, 32768), (3584, 16384), (8192, 16384)])
def test_where_all_layers_keep_their_activations_a_narrow_model_gets_larger_micro_batches(gpu, monkeypatch, width,
                                                                                          largest):
    gpu.token_bytes = 2**10                                               # memory for any of them
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(gpu.model.config, width=width))
    assert gpu.plan().micro_batch_tokens == largest


@pytest.mark.parametrize("gib,largest", [(30, 8192), (48, 16384)])
def test_larger_micro_batches_leave_the_kv_pool_whole(gpu, monkeypatch, gib, largest):
    # 256 sequences take 16 GiB. Micro-batch and 3 layers take 7 GiB with 8,192 tokens and 14 with 16,384; 0.6, 2 and
    # 3 % are gone.
    gpu.token_bytes = GIB / 8192
    c = gpu.model.config
    one_head = 256 * (PROMPT + NEW) * 2 * c.layers * c.head_dim * 4
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(c, width=3584, kv_heads=16 * GIB // one_head))
    plan = gpu.plan(gib, rows=256)
    assert plan.micro_batch_tokens == largest and plan.pool == pytest.approx(16 * GIB, rel=1e-3)


def test_a_run_that_exceeds_the_card_is_refused_before_its_weights_are_read(fake_gpu, monkeypatch, tmp_path):
    fake_gpu((9, 0))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda *_: 0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (2**20, 2**34))             # 1 MiB is free
    monkeypatch.setattr(setup, "read_model", lambda *_: pytest.fail("weights were read"))
    (tmp_path / "sums.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 4)
    settings, _ = read_settings(["--lora-rank", "64", "--out", str(tmp_path / "run"), "--data",
                                 str(tmp_path / "sums.jsonl")])
    with pytest.raises(UserError, match=r"--model .*tiny needs more than the 0.6 GiB .*an adapter of rank 64"):
        setup.prepare(settings, None)
