"""
The division of a GPU's memory, on a GPU that is not there: do its sizes add up, and what gives way where they do not
fit?

python -m pytest tests/test_memory.py -v
"""
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fast import memory
from fast.memory import GIB, Plan
from harness.config import Memory
from lora import attach
from model import load

ROOT = Path(__file__).parent.parent
TINY = json.loads((ROOT / "tiny" / "config.json").read_text())
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

    def token_logprobs(self, rows, starts, kept_layers=0):
        if torch.is_grad_enabled():
            self.peak = sum(map(len, rows)) * (4 + kept_layers) * self.token_bytes
            if self.held + self.peak > self.total:
                raise torch.OutOfMemoryError
        return torch.zeros(1, requires_grad=True), None

    def plan(self, memory_gib=None, kv_gib=None, tokens=None, rows=ROWS, model=None):
        wanted = Memory(memory_gib=memory_gib, kv_gib=kv_gib, micro_batch_tokens=tokens)
        return Plan(model or self.model, wanted, PROMPT, NEW, rows, self.lines.append)


@pytest.fixture
def gpu(monkeypatch):
    gpu, model = FakeGpu(), load(ROOT / "tiny", "nvfp4", "cpu")
    monkeypatch.setattr(memory.torch, "cuda", gpu)
    monkeypatch.setattr(model, "token_logprobs", gpu.token_logprobs)
    gpu.model, gpu.adapter, gpu.lines = model, attach(model, rank=4), []
    return gpu


def test_the_memory_table_adds_up_to_the_limit_and_measuring_leaves_no_gradient(gpu):
    gpu.plan(48.0, tokens=200)
    sizes = {line[:22].strip(): float(line[22:].split()[0]) for line in gpu.lines}
    assert sizes.pop("together") == 48.0 == pytest.approx(sum(sizes.values()), abs=0.04)           # two decimals each
    assert sizes["longest micro-batch"] == 4
    assert sizes["activations"] + sizes["KV pool"] == pytest.approx(48 - 2 - 4 - 0.6 - 0.03 * 48, abs=0.02)
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
    free = [gpu.plan(48, tokens=200, rows=rows).free for rows in (8, 1008)]
    assert free[0] - free[1] == pytest.approx(1000 * 3 * 4 * TINY["vocab_size"], abs=1)


def test_the_dry_step_lets_layers_that_do_not_fit_drop_their_activations(gpu):
    plan = gpu.plan(kv_gib=69, tokens=200)
    gpu.held = 74.5 * GIB                                                 # 2 + 69, and somebody took 3.5
    assert plan.kept_layers == 2 and plan.dry_step().kept_layers == 1


def test_micro_batches_shrink_until_the_kv_pool_fits(gpu):
    # 4 GiB for 200 tokens: 4096 and more take 81, 2048 take 40, of 75. The tiny model's own pool is 1 MB.
    plan = gpu.plan()
    assert (plan.micro_batch_tokens, plan.kept_layers) == (2048, 3)
    with pytest.raises(ValueError, match="--kv-gib 50: only 3.* GiB are left"):
        gpu.plan(kv_gib=50)


@pytest.mark.parametrize("held", [60, 38])                                # not even the micro-batch; nothing beside it
def test_where_nothing_fits_the_error_names_the_rows_what_is_held_and_the_flags(gpu, held):
    gpu.held = held * GIB
    with pytest.raises(ValueError, match=f"rows of 96 tokens do not fit beside {held}.0 GiB of weights and adapter: "
                                         r"lower --max-new-tokens or --micro-batch-tokens \(2048\)"):
        gpu.plan()


@pytest.mark.parametrize("width,largest", [(896, 32768), (1536, 16384), (3584, 8192), (8192, 8192)])
def test_a_small_model_gets_larger_micro_batches(gpu, monkeypatch, width, largest):
    gpu.token_bytes = 2**10                                               # memory for any of them
    monkeypatch.setattr(gpu.model, "config", dataclasses.replace(gpu.model.config, width=width))
    assert gpu.plan().micro_batch_tokens == largest
