"""
train.py as users run it: flags, and complete CPU runs of the bundled model that learn, stop, resume and fail.
test_process.py tests wrong input.

trained_runs.py starts the runs. Those that must agree are compared bit for bit, except for times.

python -m pytest tests/test_train.py -v
"""
import dataclasses
import functools
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import MODEL_CHANGES, ROOT, TEMPLATES, edit, read_rows, settings_of, thinking_tiny, write_rows
from safetensors.torch import load_file
from trained_runs import ADAPTER, BY_LENGTH, RESUME, TIMES, files_of, free_port, kill_in

import train as train_py
from aqn import draw_z
from grpo import LOSSES, rollout_sums
from harness import setup
from harness.folder import RunFolder
from learner import Update
from loading import load
from lora import attach
from sampler import Rollouts, Row
from weights import NVFP4_CONFIG, ModelFolder, Shards

SIX_STEPS = *"--steps 6 --max-new-tokens 12 --overlong keep --temperature 2".split(), *BY_LENGTH


@pytest.fixture(scope="module")
def whole(runs):
    """The uninterrupted run of 6 steps that others must equal."""
    runs.run("whole", *SIX_STEPS, "--save-every", "3")
    assert all(row[name] > 0 for row in runs.rows("whole", "metrics.jsonl") for name in ("grad_norm", *TIMES))
    return "whole"


@pytest.fixture(scope="module")
def longer(runs, whole):
    """The complete run moved to another folder, resumed once as it is and once for a seventh step."""
    out = "elsewhere/longer"
    shutil.copytree(runs.folder / whole, runs.folder / out)
    before = files_of(runs.folder / out)
    runs.run(out, *RESUME)
    assert files_of(runs.folder / out) == before
    runs.run(out, *RESUME, "--steps", "7")
    flags = json.loads((runs.folder / out / "run.json").read_text())
    assert flags["steps"] == 7 and Path(flags["model"]).is_absolute() and Path(flags["data"]).is_absolute()
    assert [m["step"] for m in runs.metrics(out)] == [*range(7)]
    return out


# -----------------------------------------------------------------------------
# The parts of a step

def test_learning_rate_by_hand():
    cosine, wsd = (settings_of("--lr", "2", "--warmup", "0.1", "--lr-schedule", name) for name in ("cosine", "wsd"))
    for optim in (cosine, wsd):
        assert [train_py.learning_rate(optim, x) for x in (0, 0.025, 0.05)] == pytest.approx([0, 0.5, 1])
    assert [train_py.learning_rate(cosine, x) for x in (0.1, 0.55, 0.775, 1)] == pytest.approx(
        [2, 1, 1 + math.cos(0.75 * math.pi), 0])
    assert [train_py.learning_rate(wsd, x) for x in (0.1, 0.5, 0.75, 0.875, 1)] == pytest.approx([2, 2, 2, 1, 0])
    slow = dataclasses.replace(wsd, warmup=1.0)                      # rises until it meets the fall: x = 4 (1 - x)
    assert [train_py.learning_rate(slow, x) for x in (0.4, 0.8, 0.9, 1)] == pytest.approx([0.8, 1.6, 0.8, 0])
    middles = 0.4125, 0.4375, 0.4625, 0.4875                         # of the four updates of the fifth of ten steps
    rates = [1 + math.cos(math.pi * (x - 0.1) / 0.9) for x in middles]
    assert train_py.learning_rates(cosine, 4, 10, 4) == pytest.approx(rates)


def some_update(ratio, grad_norm):
    """An update of two tokens, one of which became `ratio` times as likely."""
    d = torch.tensor([0.0, math.log(ratio)])
    sums = rollout_sums(d) | {"clip_ratio_high": torch.tensor(grad_norm * 2), "entropy": torch.tensor(grad_norm * 6)}
    return Update(sums, grad_norm, lr=0.1)


def test_updates_take_disjoint_groups_and_epochs_repeat_them():
    settings = settings_of("--group-size", "2", "--updates-per-rollout", "2", "--epochs", "2", "--overlong", "mask")
    rollouts = Rollouts([Row([1], [2] * 4, torch.zeros(4), b != 1, graded=dict(reward=1.0, finished=b != 1))
                         for b in range(4)])                              # row 1 was truncated
    weights = train_py.plan_updates(rollouts, LOSSES["dapo"], settings)
    by_hand = [0.25, 0, 0, 0], [0, 0, 0.125, 0.125]                       # for each of a row's four tokens
    assert [w.T.tolist() for w in weights] == [[row] * 4 for row in by_hand] * 2


def test_report_combines_a_steps_updates():
    graded = [dict(reward=r, correct=r, format=1, length=2, finished=ends, mean_logprob=-0.5, completion="1")
              for r, ends in ((1.0, True), (0.0, True), (1.0, False), (0.0, True))]
    rows = [Row([1], [2, 3], torch.full((2,), -0.5), True, graded=found | {"parts": {"big": 20_000_001.0}})
            for found in graded]
    rollouts = Rollouts(rows, seconds=2.0, computed=10)
    nothing = Update({}, 0.0, lr=0.2)
    updates = [nothing, some_update(2.0, 1.0), some_update(4.0, 3.0), nothing]
    weights = [torch.tensor([[0.5, 0.5], *[[0.0, 0.0]] * 3]), torch.zeros(4, 2)]   # the second group is masked
    metrics = train_py.report(rollouts, torch.ones(4).bool(), weights, updates, group_size=2)
    assert metrics["rollout_is_max"] == pytest.approx(2) and metrics["entropy"] == 3
    assert (metrics["clip_ratio_high"], metrics["grad_norm"], metrics["lr"]) == (3, 3, 0.2)
    assert (metrics["groups"], metrics["informative"], metrics["tokens_per_s"]) == (1, 1, 4)
    assert metrics["reward_big"] == 20_000_001                          # in fp32 it would be even
    assert metrics["truncated"] == 0.25 and metrics["idle"] == pytest.approx(0.2)       # 10 computed, 8 kept
    assert metrics["sampler_entropy"] == 0.5                            # over all rows, even uninformative ones
    unmeasured = train_py.report(Rollouts(rows), torch.ones(4).bool(), weights, updates, group_size=2)
    assert unmeasured["tokens_per_s"] == 0  # a user's sampling function may not measure time


def test_loss_flags_override_the_losss_own_values(monkeypatch):
    own = dataclasses.replace(LOSSES["gspo"], correction="ppo", kl_beta=0.04)
    monkeypatch.setitem(LOSSES, "gspo", own)
    for flag, name, value in (("", "kl_beta", 0.04), ("--kl-beta 0", "kl_beta", 0), ("--clip-low 0.1", "clip_low", 0.1),
                              ("--clip-high 0.5", "clip_high", 0.5), ("--correction off", "correction", "off")):
        loss = setup.loss_of(settings_of("--loss", "gspo", *flag.split()))
        assert loss == dataclasses.replace(own, **{name: value})


def test_16_bit_model_is_calibrated_on_gpu_only():
    def decided(device, *flags, **config):
        return setup.calibration_problems(settings_of(*flags), torch.device(device), config)

    assert decided("cuda", "--model", "x") == 128
    assert decided("cpu", "--model", "x") == 0 == decided("cuda", "--model", "x", quantization_config=NVFP4_CONFIG)
    assert decided("cuda", "--model", "x", "--base", "bf16") == 0
    assert decided("cuda", "--model", "x", "--calibrate", "16") == 16
    assert decided("cuda", "--model", "x", "--calibrate", "0") == 0


def record_sampler_calls():
    from sampler import Sampler
    generate = Sampler.generate

    def noted(self, prompts, group_size, sampling, places=(), **rest):
        noise = self.engine.model.layers[1].post_norm.noise
        with open("calls.jsonl", "a") as f:
            print(json.dumps([group_size, sampling.temperature, sampling.seed, list(places), noise.tolist()]), file=f)
        return generate(self, prompts, group_size, sampling, places or None, **rest)
    Sampler.generate = noted


def test_seed_determines_noise_sampling_and_adapter(runs):
    flags = "--steps 3 --seed 7 --lr 1e-9 --temperature 1 --noise-stages 3 --sigma-start 0.1 --sigma-end 0.01"
    runs.run("seeded", *flags.split(), fault=record_sampler_calls)
    calls = read_rows(runs.folder / "calls.jsonl")
    training, held_out = ([call for call in calls if call[0] == size] for size in (4, 1))
    assert [call[1:4] for call in training] == [[1.0, 7, places] for places in ([0, 1], [2, 3], [4, 5])]
    sigmas = [metrics["sigma"] for metrics in runs.metrics("seeded")]
    assert sigmas == [0, 0.1, pytest.approx(0.1 * 0.1**0.5)]
    for step, (sigma, call) in enumerate(zip(sigmas, training)):
        noise = torch.tensor(call[4])
        assert torch.equal(noise, sigma * draw_z(7, step, 1, 1, len(noise)))
    assert len(held_out) == 2                                             # greedy and without noise
    assert all(temperature == 0 and not any(noise) for _, temperature, _, _, noise in held_out)
    start = attach(load(ROOT / "tiny", "nvfp4", "cpu"), rank=32, alpha=32, seed=7).master.data
    torch.testing.assert_close(runs.state("seeded", 3)["master"], start, atol=1e-8, rtol=0)


# -----------------------------------------------------------------------------
# Learning

def test_bundled_model_learns(runs):
    # With three seeds, rewards were 0.28 to 0.41 over the first three steps and 0.73 to 0.83 over the last three, and
    # held-out accuracy went from 0.44 to 0.94.
    runs.run("learns", *("--data more.jsonl --steps 8 --prompts-per-step 8 --group-size 6 --max-new-tokens 32 "
                         "--lr 4e-3 --eval-problems 16 --eval-every 99").split())
    metrics = runs.metrics("learns")
    rewards = [m["reward"] for m in metrics]
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 > 0.65, rewards
    assert metrics[0]["eval_accuracy_before"] < 0.5 and metrics[-1]["eval_accuracy"] > 0.8


def only_the_base_has_weights():
    import weights
    weights.ModelFolder.download = lambda folder: folder.path.name == "base" or 1 / 0


def test_calibrated_run_keeps_and_resumes_its_own_base(runs):
    flags = "--steps 2 --save-every 1 --reward my_rewards:by_length".split()
    log = runs.run("calibrated", *flags, "--calibrate", "4")
    base, files = runs.folder / "calibrated/base", Shards(runs.folder / "calibrated/base")
    assert log.count("KL(16 bits || 4 bits)") == 2           # after calibrating, and after loading
    assert json.loads((base / "config.json").read_text())["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert "model.layers.2.mlp.down_proj.weight_packed" in files.names
    adapter = json.loads((runs.folder / "calibrated/adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(base)
    runs.run("onbase", *flags, model=base)                 # a run with that folder as its model
    assert runs.metrics("calibrated") == runs.metrics("onbase") and runs.rows("calibrated") == runs.rows("onbase")
    written = {path: path.stat().st_mtime_ns for path in (base, *base.iterdir())}
    whole = runs.metrics("calibrated")
    shutil.rmtree(runs.folder / "calibrated/checkpoints/step_000002")
    log = runs.run("calibrated", "--resume", "--reward", "my_rewards:by_length", fault=only_the_base_has_weights)
    assert log.count("KL(") == 1 and runs.metrics("calibrated") == whole
    assert written == {path: path.stat().st_mtime_ns for path in (base, *base.iterdir())}


def skip_and_give_up_after_three_steps():
    grpo = importlib.import_module("grpo")                  # a rank reimports the project's modules
    real = grpo.group_advantages
    grpo.group_advantages = lambda *a, **k: torch.where(real(*a, **k) > 0, torch.inf, 0.0)
    importlib.import_module("harness.console").PATIENCE = 3


def test_ranks_skip_infinite_losses_and_stop(runs):
    flags = "--steps 8 --eval-every 99 --overlong keep --temperature 2 --max-new-tokens 24".split()
    runs.run_ranks("skips", *flags, *BY_LENGTH, code=1, fault=skip_and_give_up_after_three_steps)
    last = runs.log("skips").strip().splitlines()[-1]
    assert last.startswith("train.py: ") and "step 3 is saved" in last
    assert [m["skipped"] for m in runs.metrics("skips")] == [1, 2, 3]
    state = runs.state("skips", 3)
    assert state["master"].isfinite().all() and not state["exp_avg"].any() and state["step"] == 0


# -----------------------------------------------------------------------------
# Output, adapters, moved folders

def test_resume_rejects_another_model_and_accepts_a_moved_one(runs, tmp_path):
    """The model's folder may have been replaced by another fine-tune or another 4-bit conversion."""
    model = shutil.copytree(runs.folder / "tiny", tmp_path / "model")
    flags = "--save-every", "1", "--prompts-per-step", "1"
    runs.run("frozen", "--steps", "1", *flags, model=model)
    moved = model.rename(tmp_path / "moved")
    run_json = runs.folder / "frozen" / "run.json"
    kept = json.loads(run_json.read_text())

    def resume(model, code):
        return runs.run("frozen", "--resume", "--steps", "2", "--model", str(model), code=code).splitlines()[-1]

    for word, change in MODEL_CHANGES.items():
        change(shutil.copytree(moved, tmp_path / word))
        assert f"frozen was trained with {word} " in resume(tmp_path / word, 1)
    # A run that recorded only the digest of each tensor's beginning.
    edit(run_json, trained_with=..., weights_sha256=ModelFolder(moved).old_sha256())
    assert "was trained with weights sha256" in resume(tmp_path / "weights", 1)
    resume(moved, 0)
    held = json.loads(run_json.read_text())
    assert held["model"] == str(moved) and held["trained_with"] == kept["trained_with"] | {"model": "moved"}


def test_resume_writes_the_kept_adapter_that_failed(runs):
    """A step counts only once its adapters are written. Otherwise a full disk could lose them."""
    flags = "--save-every", "1", "--keep", "1"
    runs.run("keeping", "--steps", "1", *flags)
    kept = runs.folder / "keeping" / "adapters"
    shutil.rmtree(kept)
    kept.touch()                                                         # a file in the way makes writing fail
    log = runs.run("keeping", "--resume", "--steps", "2", code=1)
    assert "step 1 is saved" in log.splitlines()[-1]
    kept.unlink()
    runs.run("keeping", "--resume", "--steps", "2")
    assert [path.name for path in kept.iterdir()] == ["step_000002"]
    assert (kept / "step_000002/adapter_model.safetensors").read_bytes() == (
        runs.folder / "keeping" / ADAPTER).read_bytes()


def test_evaluation_before_training_at_intervals_and_at_the_end(runs):
    log = runs.run("evaluated", *"--steps 3 --eval-every 2 --lr 0.05 --temperature 2".split(), *BY_LENGTH)
    rows, metrics = runs.rows("evaluated", "held_out.jsonl"), runs.metrics("evaluated")
    assert [(row["steps_done"], row["step"]) for row in rows] == [*[(0, 0)] * 4, *[(2, 1)] * 4, *[(3, 2)] * 4]
    before, middle, after = (sum(row["reward"] for row in rows[i:i + 4]) / 4 for i in (0, 4, 8))
    assert [m.get("eval_reward_before") for m in metrics] == [pytest.approx(before), None, None]
    assert [m.get("eval_reward") for m in metrics] == [None, pytest.approx(middle), pytest.approx(after)]
    assert f"held-out reward {before:.3f} -> {after:.3f}" in log
    assert all(row["mean_logprob"] != later["mean_logprob"] for row, later in zip(rows, rows[8:]))   # with the adapter


def test_run_from_adapter_reports_differences_and_resumes_after_early_kill(runs):
    runs.run("given", *"--steps 1 --seed 1 --lora-rank 4 --lora-alpha 6".split(), *BY_LENGTH)
    flags = *"--steps 1 --adapter given/adapter --base bf16 --prompt-style plain".split(), *BY_LENGTH
    log = runs.run("from-given", *flags)
    assert "trained with base 'nvfp4', not 'bf16'" in log and "trained with prompt style 'boxed', not 'plain'" in log
    held = json.loads((runs.folder / "from-given" / "run.json").read_text())
    assert (held["lora_rank"], held["lora_alpha"]) == (4, 6)
    before, after = (load_file(runs.folder / path / "adapter_model.safetensors")
                     for path in ("given/adapter", "from-given/adapter"))
    for name, value in before.items():                                    # one step moves them by --lr, 1e-3
        torch.testing.assert_close(after[name], value, atol=1.1e-3, rtol=0)
    # It must not silently continue from a new adapter, whose B is zero.
    kill = functools.partial(kill_in, "harness.folder", "RunFolder.save_checkpoint", 1, False)
    runs.run("killed-early", *flags, code=-signal.SIGKILL, fault=kill)
    assert len(runs.lines("killed-early")) == 1 and not (runs.folder / "killed-early" / "checkpoints").exists()
    runs.run("killed-early", *RESUME)
    assert runs.same("killed-early", "from-given")
    (runs.folder / "given").rename(runs.folder / "moved")                 # its checkpoint replaces it
    runs.run("killed-early", *RESUME)


def test_second_run_in_the_same_folder_exits(runs):
    process = runs.start("taken", "--steps", "999")
    runs.wait(process, lambda: runs.lines("taken"))
    for flags in (["--resume"], []):
        assert f"--out {runs.folder / 'taken'}: another process is writing there" in runs.run("taken", *flags, code=1)
    assert process.is_alive()
    process.kill()
    process.join()


def test_reward_error_is_one_line_and_run_is_saved(runs):
    log = runs.run("breaks", "--steps", "4", "--reward", "my_rewards:breaks_later", code=1)
    last = log.strip().splitlines()[-1]
    assert last.startswith("train.py: --reward my_rewards:breaks_later: ZeroDivisionError") and "my_rewards.py:" in last
    assert last.endswith(f"--resume --out {runs.folder / 'breaks'}")
    assert "step 2 is saved" in last and "Traceback" not in log


LEVELS = [{"question": f"{i}?", "level": i % 3, "target": "" if i % 2 else "x"} for i in range(40)]
CUSTOM = "--data", "levels.jsonl", "--prompt-style", "my_rewards:ask"


def test_custom_reward_sees_all_fields_and_needs_no_gold(runs):
    write_rows(runs.folder / "levels.jsonl", LEVELS)
    levels = "--reward", "my_rewards:levels"
    runs.run("levels", *CUSTOM, *levels, "--steps", "1", "--prompts-per-step", "8")
    samples, (metrics,) = runs.rows("levels"), runs.metrics("levels")
    about = json.loads((runs.folder / "levels" / "run.json").read_text())["about"]
    assert about["prompt_style_sha256"] == about["reward_sha256"] is not None            # of the same file
    for row in samples:
        i = int(row["question"][:-1])
        assert row["parts"] == {"level": i % 3, "group": 4, "correct": i % 2}      # every answer ends with ""
        assert row["reward"] == sum(row["parts"].values()) and row["correct"] == i % 2
    for part in ("level", "group", "correct"):
        assert metrics[f"reward_{part}"] == sum(row["parts"][part] for row in samples) / 32
    assert metrics["accuracy"] == metrics["reward_correct"] and 1 <= metrics["eval_reward"] <= 4
    write_rows(runs.folder / "levels.jsonl", [row | {"target": "y"} for row in LEVELS])
    log = runs.run("levels", "--resume", *levels, "--steps", "2", code=1)
    assert "levels.jsonl or --eval-data: problems" in log.splitlines()[-1]


def test_rewards_that_are_nan_are_left_out(runs):
    write_rows(runs.folder / "levels.jsonl", LEVELS)
    runs.run("sometimes", *CUSTOM, *"--reward my_rewards:sometimes_unscorable --steps 2 --eval-problems 8".split())
    assert all(1 < metrics["eval_reward"] < 2 and metrics["accuracy"] == 0 for metrics in runs.metrics("sometimes")[1:])
    levels = [row["reward"] for row in runs.rows("sometimes")]
    assert None in levels[:8] and {1, 2} & set(levels[:8])                # one group in three has no reward
    for metrics in runs.metrics("sometimes"):
        numbers = [level for level in levels[8 * metrics["step"]:][:8] if level]
        assert metrics["reward"] == metrics["reward_reward"] == sum(numbers) / len(numbers)


# -----------------------------------------------------------------------------
# Kills, signals, full disks, resume

# Where a run is killed: module, function, number of the call, and whether the function returns first.
KILLS = {
    "sampling": ("sampler", "Sampler.generate", 2, False),
    "after an update": ("learner", "Learner.update", 1, True),
    "before the answers of the evaluation": ("harness.folder", "append_lines", 1, False),
    "after them": ("harness.folder", "append_lines", 1, True),
    "between the logs of a step that saves": ("harness.folder", "append_lines", 5, False),
    "before the save": ("harness.folder", "RunFolder.save_checkpoint", 1, False),
    "before the rename": ("pathlib", "Path.rename", 1, False),
    "after the rename": ("pathlib", "Path.rename", 1, True),
    "in the adapter": ("adapters", "write_json", 1, False),
    "after the adapter": ("harness.folder", "RunFolder.save", 2, True)}


def test_killed_run_resumes_bit_for_bit(runs, whole):
    for n, how in enumerate(KILLS.values()):
        flags = RESUME if n else (*SIX_STEPS, "--save-every", "2")
        runs.run("killed", *flags, code=-signal.SIGKILL, fault=functools.partial(kill_in, *how))
    runs.run("killed", *RESUME)
    assert runs.same("killed", whole)


@pytest.mark.parametrize("number,where", [
    ("SIGTERM", ("harness.folder", "append_lines", 5, False)),            # between the logs of step 2: held back
    ("SIGINT", ("sampler", "Sampler.generate", 4, False)), ("SIGHUP", ("learner", "Learner.update", 3, True))])
def test_signal_saves_last_step_and_run_resumes(runs, whole, number, where):
    stop = functools.partial(kill_in, *where, number=getattr(signal, number))
    log = runs.run(number, *SIX_STEPS, "--save-every", "100", code=1, fault=stop)
    checkpoint, = (runs.folder / number / "checkpoints").iterdir()
    assert checkpoint.name == "step_000002" and len(runs.lines(number)) == 2
    assert f"stopped by {number}; step 2 is saved; continue with --resume --out {runs.folder / number}" in log
    if number == "SIGTERM":
        runs.run(number, *RESUME)
        assert runs.same(number, whole)


@pytest.mark.parametrize("flags,call,expected", [
    ("", "RunFolder.load", "stopped by SIGTERM; nothing was changed; continue"),
    ("", "trim_log", "stopped by SIGTERM; step 6 is saved; continue"),    # the checkpoint is read, not yet applied
    ("--lr 0.5", None, "--lr is 0.5"), ("--data more.jsonl", None, "more.jsonl")])
def test_resume_that_fails_changes_nothing(runs, whole, flags, call, expected):
    # The trained adapter must not be replaced by the initial one, whose B is zero.
    before = files_of(runs.folder / whole)
    stop = functools.partial(kill_in, "harness.folder", call, 1, False, signal.SIGTERM) if call else None
    last = runs.run(whole, *RESUME, *flags.split(), code=1, fault=stop).splitlines()[-1]
    assert last.startswith("train.py: ") and expected in last and files_of(runs.folder / whole) == before


def test_log_of_a_fork_is_cut_on_resume(runs, whole):
    folder = RunFolder(shutil.copytree(runs.folder / whole, runs.folder / "logs"), {}, None)
    folder.run_json = json.loads((folder.path / "run.json").read_text())
    folder.log("mine.jsonl", [{"step": 5}, {"step": 6}])                  # the checkpoint has steps 0 to 5
    runs.run("logs", *RESUME)
    assert (folder.path / "mine.jsonl").read_text() == '{"step": 5}\n'
    edit(folder.path / "checkpoints/step_000006/state.json", cursor=...)  # it would start again from 0
    assert "state.json has " in runs.run("logs", *RESUME, code=1).splitlines()[-1]


WANDB = """
import json
calls = open("tracked.jsonl", "a", 1)
def init(**named): print(json.dumps(["init", named]), file=calls)
def log(metrics, step): print(json.dumps(["log", step, metrics]), file=calls); step or 1 / 0
def finish(): print(json.dumps(["finish"]), file=calls); raise BrokenPipeError(32, "Broken pipe")
"""


def with_trackers(folder, then=None):
    sys.path.insert(0, str(folder))
    if then:
        then()


def test_tracker_gets_every_step_of_one_run_and_is_finished(runs, tmp_path):
    (tmp_path / "trackio.py").touch()                                     # not the package
    (tmp_path / "wandb.py").write_text(WANDB)
    fault = functools.partial(with_trackers, tmp_path)
    log = runs.run("none", "--report-to", "trackio", code=1, fault=fault)
    assert "--report-to trackio: needs pip install trackio (module 'trackio' has no" in log
    assert log.count("\n") == 1 and not (runs.folder / "none").exists()
    stop = functools.partial(kill_in, "harness.setup", "RunFolder.snapshot", 3, True, signal.SIGINT)
    flags = "--steps", "3", "--report-to", "wandb"
    log = runs.run("tracked", *flags, code=1, fault=functools.partial(fault, stop))
    assert "--report-to wandb: division by zero" in log and "stopped by SIGINT; step 2 is saved" in log
    assert "waiting for wandb\ntrain.py: stopped" in log                  # also if finish() hangs
    assert "--report-to wandb: Broken pipe" in runs.run("tracked", "--resume", fault=fault)
    calls = read_rows(runs.folder / "tracked.jsonl")
    assert [call[0] for call in calls] == ["init", "log", "log", "finish", "init", "log", "finish"]
    first, again = (named for name, *(named,) in (calls[0], calls[4]))
    assert [first[key] for key in ("id", "name", "project")] == [again[key] for key in ("id", "name", "project")]
    assert again["resume"] == "allow" and first["config"]["steps"] == 3
    assert [call[1:] for call in (calls[1], calls[2], calls[5])] == [
        list(pair) for pair in enumerate(runs.rows("tracked", "metrics.jsonl"))]
    runs.run("tracked", "--resume", "--steps", "4", "--report-to", "none")
    assert read_rows(runs.folder / "tracked.jsonl") == calls


def test_full_disk_keeps_earlier_checkpoints(runs, whole, longer):
    # state.safetensors takes 4.3 MB. At most 2 MB per file is enough for everything but a checkpoint.
    shutil.copytree(runs.folder / whole, runs.folder / "full")
    before = files_of(runs.folder / "full" / "checkpoints")
    fill = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
    log = runs.run("full", *RESUME, "--steps", "7", code=1, fault=fill)
    assert "File too large" in log and "earlier checkpoints are intact" in log and "Traceback" not in log
    assert files_of(runs.folder / "full" / "checkpoints") == before
    runs.run("full", *RESUME)
    assert runs.same("full", longer)


def test_thinking_flag_reaches_prompts(runs, tmp_path):
    model = thinking_tiny(tmp_path / "model", TEMPLATES["qwen3"])
    runs.run("thinks", *"--steps 1 --base bf16 --thinking on".split(), model=model)
    assert json.loads((runs.folder / "thinks" / "run.json").read_text())["thinking"] == "on"
    assert "<think>\n\n</think>" not in runs.rows("thinks")[0]["prompt"]


def test_resume_keeps_memory_plan_and_reports_other_hardware(runs):
    def pool(log):
        return re.search(r"KV pool of .*?micro-batches of [\d,]+ tokens", log)[0]

    assert pool(runs.run("divided", "--steps", "1", "--micro-batch-tokens", "512")).endswith("of 512 tokens")
    path = runs.folder / "divided" / "run.json"
    had = json.loads(path.read_text())
    had["memory_plan"]["kv_gib"] = 0.002                                  # as if the first start had less memory
    had["about"] |= {"hardware": "2 x 64 CPU cores, 32 threads", "reward_sha256": "0", "commit": "another"}
    path.write_text(json.dumps(had))
    log = runs.run("divided", "--resume", "--steps", "2")
    assert "KV pool of 0.00 GiB" in pool(log) and pool(log).endswith("of 512 tokens")
    assert "32 threads" in log and "reward_sha256 was 0, is now" in log and "commit was another" in log
    entry, = json.loads(path.read_text())["resumed"]
    assert entry["step"] == 1 and entry["hardware"] in log
    assert " was " not in runs.run("divided", "--resume", "--steps", "3").replace("--steps was", "")


# -----------------------------------------------------------------------------
# Ranks

def test_two_ranks_equal_one(runs):
    """Of 5 problems, the second rank gets 2 and trains on one row per micro-batch.

    Completions are equal. Gradients differ by the order of fp32 sums over some hundred tokens and by rounding in other
    batch sizes: 1e-4 is 5 times the difference seen. The temperature makes every group informative, so the test fails
    if the ranks split rows differently.
    """
    flags = ("--steps 1 --prompts-per-step 5 --save-every 1 --updates-per-rollout 2 --epochs 2 --temperature 2 "
             "--reward my_rewards:by_length --max-grad-norm 1e9").split()
    runs.run("one", *flags)
    runs.run_ranks("two", *flags, rank_flags=[(), ("--micro-batch-tokens", "1")])
    one, two = (sorted([row[k] for k in ("step", "id", "completion", "reward")] for row in runs.rows(o))
                for o in ("one", "two"))
    assert one == two
    for a, b in zip(runs.metrics("one"), runs.metrics("two"), strict=True):
        assert a.keys() == b.keys()
        assert b == pytest.approx({**a, "idle": b["idle"]}, rel=1e-3, abs=1e-5), (a, b)
    assert runs.metrics("one")[0]["rollout_logp_diff"] < 1e-4             # sampler and learner use one temperature
    one, two = runs.state("one", 1), runs.state("two", 1)
    assert one["step"] == two["step"] == 4                                # of Adam: 2 epochs of 2 disjoint updates
    assert (one["exp_avg"] - two["exp_avg"]).norm() < 1e-4 * one["exp_avg"].norm()
    # Adam divides by the gradient's size. Where the gradient is only rounding, each of 4 updates may differ by 2 x lr.
    assert (one["master"] - two["master"]).abs().max() < 4 * 2 * 1e-3


def test_replay_asks_again_resumes_and_is_shared(runs):
    flags = *"--steps 12 --replay 0.5 --prompts-per-step 4 --max-new-tokens 12".split(), \
        *"--temperature 2 --eval-every 5 --save-every 4".split()
    runs.run("replays", *flags)
    rows = runs.rows("replays")
    for step, metrics in enumerate(runs.metrics("replays")):
        asked = [row["id"] for row in rows if row["step"] == step][::4]
        before = {row["id"] for row in rows if row["step"] <= step - 8}
        assert len({*asked}) == 4
        assert [name in before for name in asked] == [n < metrics["replayed"] for n in range(4)]
        correct = [row["correct"] for row in rows if row["step"] == step][4 * metrics["replayed"]:]
        assert metrics["accuracy_new"] == sum(correct) / len(correct)
    assert metrics["replayed"] == 2
    shutil.copytree(runs.folder / "replays", runs.folder / "replays2")
    shutil.rmtree(runs.folder / "replays2/checkpoints/step_000012")
    runs.run("replays2", "--resume")
    assert runs.same("replays", "replays2")
    runs.run_ranks("replays3", *flags)
    assert [(row["id"], row["completion"]) for row in runs.rows("replays3")] == \
        [(row["id"], row["completion"]) for row in rows]


def test_run_from_before_replay_resumes_at_its_own_problem(runs, whole):
    shutil.copytree(runs.folder / whole, runs.folder / "before")
    shutil.rmtree(runs.folder / "before/checkpoints/step_000006")
    state = runs.folder / "before/checkpoints/step_000003/state.json"
    counters = json.loads(state.read_text())
    state.write_text(json.dumps({name: counters[name] for name in ("step", "cursor", "tokens", "skipped")}))
    runs.run("before", *RESUME)
    assert runs.same(whole, "before")


def test_rank_without_a_problem(runs):
    runs.run_ranks("idle", *"--steps 1 --prompts-per-step 1".split())
    assert len(runs.metrics("idle")) == 1 and len(runs.rows("idle")) == 4


def rank_1_finds_a_broken_file():
    import lora

    def attach(*_, **__):
        raise importlib.import_module("files").UserError("folder/adapter.bin: bad\nsecond line")   # reimported

    if os.environ["RANK"] == "1":
        lora.attach = attach


def test_rank_that_cannot_start_ends_the_others(runs):
    runs.run_ranks("lame", code=1, fault=rank_1_finds_a_broken_file)
    assert not any("Traceback" in runs.log("lame", rank) for rank in (0, 1))
    assert "another rank was lost" in runs.log("lame")
    assert runs.log("lame", 1).splitlines()[-1] == "train.py: rank 1: folder/adapter.bin: bad"


def test_waiting_rank_exits_on_sigterm(runs):
    env = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0")
    process = runs.start("lonely", env=env)
    runs.wait(process, lambda: "sums.jsonl" in runs.log("lonely"))        # next it waits for rank 1
    time.sleep(1)
    process.terminate()
    process.join(20)
    assert process.exitcode == 1 and runs.log("lonely").splitlines()[-1] == "train.py: stopped by SIGTERM"


def test_rank_waiting_for_a_hung_one_saves_on_sigterm(runs):
    zero, one = runs.start_ranks("awaits", "--steps", "200")
    runs.wait(zero, lambda: len(runs.lines("awaits")) >= 2)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        time.sleep(2)                                                     # ten times as long as a step
        done = len(runs.lines("awaits"))
        zero.terminate()
        zero.join(20)
    finally:
        one.kill()
        zero.kill()
    again = f"step {done} is saved; continue with --resume --out {runs.folder / 'awaits'}"
    assert zero.exitcode == 1 and again in runs.log("awaits")
    assert len(runs.lines("awaits")) == done and (runs.folder / f"awaits/checkpoints/step_{done:06d}").is_dir()


def test_ranks_with_different_problems_are_rejected(runs):
    runs.run_ranks("unlike", "--steps", "1", rank_flags=[(), ("--data", "more.jsonl")], code=1)
    for rank in (0, 1):
        assert "problems_sha256: rank 1 has " in runs.log("unlike", rank).splitlines()[-1]


def rank_1_dies():
    if os.environ["RANK"] == "1":
        kill_in("sampler", "Sampler.generate", 4, False)                  # in step 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lost_rank_ends_run_with_checkpoint(runs, whole, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU for each of two ranks")
    out = f"lost-{device}"
    zero, one = runs.start_ranks(out, "--steps", "3", "--save-every", "100", "--device", device, fault=rank_1_dies)
    zero.join(60)
    assert zero.exitcode == 1 and one.exitcode == -signal.SIGKILL
    assert "another rank was lost" in runs.log(out) and "step 2 is saved" in runs.log(out)
    runs.run(out, "--resume")  # one rank rounds differently, but has the same problems
    assert [row["id"] for row in runs.rows(out)] == [row["id"] for row in runs.rows(whole)][:3 * 8]
