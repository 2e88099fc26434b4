"""
Full fine-tuning: gradients against float64 autograd, the sampler's weights, saved models, killed runs, wrong flags.

python -m pytest tests/test_full.py -v
"""
import dataclasses
import functools
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, read_rows
from test_learner import ANY_NORM, TEMPERATURE, plain_gradient, some_batch
from tiny_qwen2 import held_by
from trained_runs import BY_LENGTH, RESUME, kill_in

import evaluate
import full
import grpo
import model as model_py
from fast import backward
from files import UserError
from harness.config import read_settings
from learner import Batch, Learner
from loading import load
from sampler import Sampler, Sampling
from tools import convert
from weights import Shards

FAMILIES = ["tied", "untied", "qwen3-tied", "qwen3-untied"]


def some_model(case):
    model = load(case.folder, "bf16", "cpu")
    return model, full.attach(model)


def some_learner(model, **changes):
    return Learner(model, dataclasses.replace(grpo.LOSSES["dapo"], **changes), TEMPERATURE, ANY_NORM)


# -----------------------------------------------------------------------------
# The gradient

@pytest.mark.parametrize("shape", FAMILIES)
def test_gradient_matches_float64_autograd(both, tiny, shape, monkeypatch):
    monkeypatch.setattr(model_py, "LOGITS", 7 * 101)                             # several chunks, the last one smaller
    monkeypatch.setattr(backward, "LOGIT_ROWS", 7)
    case = tiny[shape]
    model, weights = some_model(case)
    learner = some_learner(model, correction="ppo")
    learner.micro_batch_tokens, learner.kept_layers = 40, 1                      # several, which add up
    batch, loss_weights = some_batch(learner)
    want, _, ratios = plain_gradient(case, case.tensors, batch, "dapo", learner.loss, lambda _, leaves: leaves)
    assert ((ratios < 1 - learner.loss.clip_low) | (ratios > 1 + learner.loss.clip_high)).any()
    update = learner.update(batch, loss_weights, lr=0.0)
    got = {name: piece for part, view in zip(weights.parts, weights.unflatten(weights.master.grad))
           for name, piece in zip(part.names, view.split(part.rows))}
    assert got.keys() == want.keys() == case.tensors.keys()
    # fp32 sums, as in test_learner.py. Cancellation makes the relative error larger where the gradient is small.
    for name, gradient in want.items():
        off = (got[name].flatten().double() - gradient.flatten()).norm() / gradient.norm()
        assert off < 1e-4, (name, off)
    norm = torch.cat([t.flatten() for t in want.values()]).norm().item()
    assert update.grad_norm == pytest.approx(norm, rel=1e-4)              # a CPU adds fp32 squares in SIMD lanes


# -----------------------------------------------------------------------------
# Weights

@pytest.mark.parametrize("shape", ["tied", "qwen3-untied"])
def test_sampler_follows_learner_and_saved_model_reloads(tiny, shape, tmp_path):
    case = tiny[shape]
    model, weights = some_model(case)
    learner = some_learner(model)
    sampler = Sampler(model, 64)                             # made first, like the graphs on a GPU
    addresses = [t.data_ptr() for t in (weights.working, model.embed, model.layers[0].qkv.weight.tensors[0])]
    before = {name: t.clone() for name, t in weights.tensors(weights.master.data)}
    for name, t in before.items():
        assert torch.equal(t, case.tensors[name].to(t.dtype)), name
    for seed in range(5):
        rollouts = sampler.generate([[1, 2, 3], [4, 5]], 4, Sampling(12, temperature=TEMPERATURE, seed=seed))
        with torch.no_grad():
            now, _ = model.token_logprobs([row.prompt + row.completion for row in rollouts.rows],
                                          [len(row.prompt) for row in rollouts.rows], TEMPERATURE)
        drawn = torch.cat([row.logprobs for row in rollouts.rows])
        torch.testing.assert_close(drawn, now, rtol=0, atol=5e-5)         # FP32 in helpers.py
        batch = Batch(rollouts.rows, grpo.group_advantages(torch.arange(8.0), 4, "group"))
        assert learner.update(batch, grpo.loss_weights(rollouts.sampled(), learner.loss, 12), lr=1e-2).grad_norm > 0
    assert addresses == [t.data_ptr() for t in (weights.working, model.embed, model.layers[0].qkv.weight.tensors[0])]
    assert all(not torch.equal(t, before[name]) for name, t in weights.tensors(weights.master.data))
    assert torch.equal(weights.working, weights.working.bfloat16().float())

    full.save(model, weights.master.data.clone(), tmp_path / "model")
    half_read = Shards(tmp_path / "model")
    full.save(model, weights.master.data.clone(), tmp_path / "model")     # replaces the first
    with pytest.raises(UserError, match="replaced"):
        half_read.get("model.norm.weight")
    again = load(tmp_path / "model", "bf16", "cpu")
    held = held_by(again)
    assert all(torch.equal(t, held[name]) for name, t in held_by(model).items())
    assert again.folder.choose_base(None) == "bf16" and [path.name for path in tmp_path.iterdir()] == ["model"]


# -----------------------------------------------------------------------------
# A run

FLAGS = *"--train full --steps 5 --save-every 2 --max-new-tokens 12 --overlong keep --temperature 2".split(), *BY_LENGTH


def test_killed_run_resumes_bit_for_bit_and_evaluates(runs, monkeypatch, tmp_path):
    tiny = ROOT / "tiny"
    runs.run("full", *FLAGS, model=tiny)
    kills = {"in step 2": ("harness.folder", "append_lines", 5, False),
             "before the new model takes the old one's place": ("full", "save_model", 2, True),
             "between the old model and the new one": ("pathlib", "Path.rename", 4, False)}
    for n, kill in enumerate(kills.values()):
        runs.run("cut", *(RESUME if n else FLAGS), model=tiny, code=-signal.SIGKILL,
                 fault=functools.partial(kill_in, *kill))
    assert not (runs.folder / "cut" / "model").exists()
    runs.run("cut", *RESUME)
    assert runs.same("full", "cut", "model/model-00001-of-00001.safetensors")

    # With the run's folder, evaluate.py gives the answers of the run's last evaluation.
    monkeypatch.chdir(runs.folder)
    flags = "--device", "cpu", "--reward", "none", "--out", str(tmp_path / "rows.jsonl")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "full", *flags])
    evaluate.main()
    last, rows = runs.rows("full", "held_out.jsonl")[-4:], read_rows(tmp_path / "rows.jsonl")
    assert [row["completion"] for row in rows] == [row["completion"] for row in last]
    assert [row["mean_logprob"] for row in rows] == [row["mean_logprob"] for row in last]
    with pytest.raises(UserError, match="--train full"):                 # no adapter to merge
        convert.write_merged(SimpleNamespace(source="full", out=tmp_path / "merged", device="cpu"))


@pytest.mark.parametrize("flags,named", [
    ("--base nvfp4", "--base"), ("--kl-beta 0.1", "--kl-beta"), ("--base bf16 --calibrate 8", "--calibrate 8"),
    (f"--adapter {ROOT}/tests/peft_adapter", "--adapter")])
def test_incompatible_flag_is_rejected(flags, named):
    with pytest.raises(UserError, match=named):
        read_settings(["--train", "full", *flags.split()])
