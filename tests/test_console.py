"""
When a run is ended because it learns nothing, and what it prints; test_train.py ends real runs by it.

python -m pytest tests/test_console.py -v
"""
import json
from pathlib import Path

import pytest

import torch

from harness.config import Settings
from harness.console import Console, Watch, symptom

HEALTHY = dict(accuracy=0.3, reward=0.3, groups=9, length=280.0, truncated=0.04, entropy=0.2)
RUNS = sorted((Path(__file__).parent.parent / "study" / "runs").glob("*.jsonl"))


def settings(**changes):
    flags = dict(lr=1e-3, overlong="mask", max_new_tokens=512, prompts_per_step=64, data="gsm8k")
    return Settings.of(flags | changes)


def step(**changes):
    """A step's metrics; entropy=None: nothing was trained on."""
    return {k: v for k, v in (HEALTHY | changes).items() if v is not None}


@pytest.mark.parametrize("changes,flags,best,said", [
    ({}, {}, 0.3, ""),
    (dict(groups=0, truncated=1, accuracy=0), {}, 0.3, "cut and left out of the loss: --max-new-tokens 512 may be too few"),
    (dict(truncated=1, accuracy=0.1), dict(overlong="keep"), 0.3, ""),
    (dict(length=1.2), {}, 0.3, "answers had one token: --lr 0.001 may be too high"),
    (dict(accuracy=0), {}, 0.26, "no answer was right, where 26% had been: --lr 0.001"),
    (dict(accuracy=0), {}, 0.0, ""),                                      # hard problems, but format or parts teach
    (dict(accuracy=0), dict(reward="mine:f"), 0.26, ""),                  # a reward of one's own means something else
    (dict(groups=0), {}, 0.3, ""),                                        # a step of equal groups happens to healthy runs
    (dict(groups=0, accuracy=0), {}, 0.0, "no answer was right so far: --data gsm8k may be too hard"),
    (dict(groups=0), dict(reward="mine:f"), 0.3, "--reward mine:f gave all answers to a problem the same"),
    (dict(groups=0, accuracy=0.99), dict(reward="mine:f"), 0.9, ""),      # solved
    (dict(groups=0, accuracy=0.99), {}, 0.9, "")])
def test_a_sick_step_is_named_with_the_flag_that_is_the_likely_cause(changes, flags, best, said):
    found = symptom(step(**changes), settings(**flags), best)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("prompts,patience", [(64, 10), (16, 13), (1, 200)])
def test_training_stops_after_ten_sick_steps_in_a_row_of_at_least_200_groups(prompts, patience):
    watch, sick = Watch(settings(prompts_per_step=prompts)), step(length=1.0)
    for metrics in [step()] * 3 + [sick] * (patience - 1) + [step()] + [sick] * (patience - 1):
        watch.see(metrics)
        assert not watch.verdict
    watch.see(sick)
    assert watch.verdict.startswith(f"for {patience} steps answers had one token")


def test_the_best_steps_are_those_of_the_highest_mean():
    # Ten steps are too few to tell. 0.36, their mean, is beaten by one of 0.1 and nine of 0.4.
    watch = Watch(settings())
    accuracies = [0.9] + [0.3] * 9 + [0.4] * 4 + [0.1] * 10 + [0.4] * 10
    better = [watch.see(step(accuracy=a)) for a in accuracies]
    assert better == [True] * 10 + [False] * 22 + [True] * 2
    assert watch.best == pytest.approx(0.4)
    watch = Watch(settings(reward="mine:f"))
    assert [watch.see(step(reward=r)) for r in [-2.0] * 10 + [-1.0, -3.0]] == [True] * 11 + [False]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_of_the_runs_on_record_one_is_dead(path):
    watch = Watch(settings(prompts_per_step=16, overlong="keep"))
    for line in path.read_text().splitlines():
        metrics = json.loads(line)
        watch.see(metrics | {"groups": round(16 * metrics["informative"])})
        assert not watch.verdict or path.stem == "16x8-lr1e-3-penalty-s0", (path, metrics)
    assert RUNS and len(watch.recent) == watch.patience
    assert bool(watch.verdict) == (path.stem == "16x8-lr1e-3-penalty-s0")


# -----------------------------------------------------------------------------
# What a run says

def test_the_first_line_says_what_is_learnt_from_what_and_where(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    console = Console(settings(model="qwen2.5-7b", steps=600, out="runs/x"))
    console.greet([None] * 7473, [None] * 256, torch.device("cpu"))
    assert capsys.readouterr().out == (
        "qwen2.5-7b, with frozen nvfp4 weights, learns gsm8k (7,473 problems, 256 held out): 600 steps of 64 problems x 8 "
        "answers on 1 x cpu (torch sees no GPU); writes runs/x\n")


def test_an_answer_that_is_shown_brings_no_control_codes(capsys):
    console = Console(settings(steps=4, show=2))
    console.start_at(0)
    row = dict(question="2+3?", id="q-1", reward=1.0, completion="\x1b[2J5\r\nyes")
    metrics = dict(step=1, reward=1.0, accuracy=1.0, length=3.0, tokens_per_s=10.0, seconds=1.0)
    console.tell(metrics, [row], [])
    said = capsys.readouterr().out
    assert "step 2, q-1, reward 1:\n2+3?\n-> \\x1b[2J5\\r\nyes" in said and "\x1b" not in said
