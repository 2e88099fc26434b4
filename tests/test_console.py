"""
What is said of a run's metrics, table by table; test_train.py ends a real run by it.

python -m pytest tests/test_watch.py -v
"""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.console import Watch, symptom

HEALTHY = dict(accuracy=0.3, reward=0.3, groups=9, length=280.0, truncated=0.04, entropy=0.2)
RUNS = sorted((Path(__file__).parent.parent / "docs" / "runs").glob("*.jsonl"))


def args(**changes):
    flags = dict(lr=1e-3, overlong="mask", overlong_buffer=0, max_new_tokens=512, prompts_per_step=64, reward=None,
                 data="gsm8k")
    return SimpleNamespace(**flags | changes)


def step(**changes):
    """A step's metrics; entropy=None: nothing was trained on."""
    return {k: v for k, v in (HEALTHY | changes).items() if v is not None}


@pytest.mark.parametrize("changes,flags,best,said", [
    ({}, {}, 0.3, ""),
    (dict(groups=0, truncated=1, entropy=None, accuracy=0), {}, 0.3, "cut and masked: --max-new-tokens 512 is too few"),
    (dict(truncated=1, accuracy=0.1), dict(overlong="keep"), 0.3, ""),
    (dict(length=1.2), {}, 0.3, "answers had one token: --lr 0.001 may be too high"),
    (dict(length=1.2), dict(overlong_buffer=128, overlong="keep"), 0.3, "or --overlong-buffer 128 too much"),
    (dict(entropy=9e-4), {}, 0.3, "entropy was zero: --lr 0.001"),
    (dict(accuracy=0), {}, 0.26, "no answer was right, where 26% had been: --lr 0.001"),
    (dict(accuracy=0), {}, 0.0, ""),                                      # hard problems, but format or parts teach
    (dict(accuracy=0), dict(reward="mine:f"), 0.26, ""),                  # a reward of one's own means something else
    (dict(groups=0, entropy=None), {}, 0.3, "no group of answers had anything to teach: --lr"),
    (dict(groups=0, entropy=None, accuracy=0), {}, 0.0, "no answer was right so far: --data gsm8k is too hard"),
    (dict(groups=0, entropy=None), dict(reward="mine:f"), 0.3, "--reward mine:f gave all answers to a problem"),
    (dict(groups=0, entropy=0, accuracy=0.99), {}, 0.9, "")])             # solved
def test_symptoms(changes, flags, best, said):
    got = symptom(step(**changes), args(**flags), best)
    assert said in got and bool(said) == bool(got)


@pytest.mark.parametrize("prompts,patience", [(64, 10), (16, 13), (1, 200)])
def test_a_death_is_ten_sick_steps_in_a_row_of_200_groups_at_least(prompts, patience):
    watch, dead = Watch(args(prompts_per_step=prompts)), step(groups=0, entropy=None)
    for metrics in [step()] * 3 + [dead] * (patience - 1) + [step()] + [dead] * (patience - 1):
        watch.see(metrics)
        assert not watch.verdict
    watch.see(dead)
    assert watch.verdict.startswith(f"for {patience} steps no group of answers")


def test_the_best_steps_are_those_of_the_highest_mean():
    # Ten steps are too few to tell. 0.36, their mean, is beaten by one of 0.1 and nine of 0.4.
    watch = Watch(args())
    accuracies = [0.9] + [0.3] * 9 + [0.4] * 4 + [0.1] * 10 + [0.4] * 10
    better = [watch.see(step(accuracy=a)) for a in accuracies]
    assert better == [True] * 10 + [False] * 22 + [True] * 2
    assert watch.best == pytest.approx(0.4)
    watch = Watch(args(reward="mine:f"))
    assert [watch.see(step(reward=r)) for r in [-2.0] * 10 + [-1.0, -3.0]] == [True] * 11 + [False]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_of_the_runs_on_record_one_is_dead(path):
    watch = Watch(args(prompts_per_step=16, overlong="keep"))
    for line in path.read_text().splitlines():
        metrics = json.loads(line)
        watch.see(metrics | {"groups": round(16 * metrics["informative"])})
        assert not watch.verdict or path.stem == "16x8-lr1e-3-penalty-s0", (path, metrics)
    assert RUNS and len(watch.recent) == watch.patience
    assert bool(watch.verdict) == (path.stem == "16x8-lr1e-3-penalty-s0")
