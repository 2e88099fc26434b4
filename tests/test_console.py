"""
When a run stops or warns because it can't learn. test_train.py stops a real run this way.

python -m pytest tests/test_console.py -v
"""
from types import SimpleNamespace

import pytest

from files import Stopped
from harness.config import Settings
from harness.console import PATIENCE, Watch, duration

METRICS = dict(step=0, sigma=0.0, accuracy=0.3, reward=0.35, groups=9, length=280.0, truncated=0.04, informative=0.25,
               tokens_per_s=2553.0, seconds=61.0)


def settings(**changes):
    return Settings(**dict(lr=1e-3, steps=4, data="gsm8k") | changes)


def update(failure="", rows=3):
    return SimpleNamespace(failure=failure, sums={"tokens": rows} if rows else {})


def test_run_stops_only_if_all_recent_updates_were_skipped():
    watch, skipped = Watch(settings()), [update("a gradient was not finite")] * 2
    for _ in range(PATIENCE - 1):
        watch.see(METRICS, skipped)
    watch.see(METRICS, [skipped[0], update()])                            # one update is not skipped
    for _ in range(PATIENCE - 1):
        watch.see(METRICS, [skipped[0], update(rows=0)])                  # an empty minibatch says nothing,
        watch.see(METRICS, [update(rows=0)])                              # nor does a step with nothing to learn
    with pytest.raises(Stopped, match="a gradient was not finite.*--lr 0.001") as stop:
        watch.see(METRICS, skipped)
    assert stop.value.then == ""


@pytest.mark.parametrize("changes", [dict(accuracy=0), dict(truncated=1.0), dict(reward=float("nan"))])
def test_uninformative_steps_warn_without_stopping(changes, capsys):
    watch = Watch(settings())
    for _ in range(3 * PATIENCE):
        watch.see(METRICS | changes | dict(groups=0), [update()])
    said = capsys.readouterr().out
    assert said.count("nothing to learn for") == 3 and ("NaN" in said) == ("reward" in changes)
    for _ in range(PATIENCE):
        watch.see(METRICS | changes, [update()])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("sigma,drift,warnings", [(0.0, 0.3, 1), (0.0, 0.01, 0), (0.01, 0.3, 0)])
def test_sampler_that_disagrees_with_learner_warns_once(sigma, drift, warnings, capsys):
    watch = Watch(settings())
    for _ in range(3):
        watch.see(METRICS | dict(sigma=sigma, rollout_logp_diff=drift), [update()])
    assert capsys.readouterr().out.count("sampler and learner disagree") == warnings


def test_durations():
    assert [duration(seconds) for seconds in (80, 700, 11_100)] == ["80 s", "12 min", "3 h 5 min"]
