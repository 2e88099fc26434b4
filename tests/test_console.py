"""
When a run stops because it cannot learn, and what it prints. test_train.py stops a real run this way.

python -m pytest tests/test_console.py -v
"""
import json
from types import SimpleNamespace

import pytest

from files import Stopped
from harness.config import Settings
from harness.console import PATIENCE, Watch, farewell

METRICS = dict(step=0, accuracy=0.3, reward=0.35, groups=9, length=280.0, truncated=0.04, informative=0.25,
               tokens_per_s=2553.0, seconds=61.0)


def settings(**changes):
    return Settings.of(dict(lr=1e-3, steps=4, data="gsm8k") | changes)


def update(failure=""):
    return SimpleNamespace(failure=failure)


def test_run_stops_only_if_all_recent_updates_were_skipped():
    watch, skipped = Watch(settings()), [update("a gradient was not finite")] * 2
    for _ in range(PATIENCE - 1):
        watch.see(METRICS, skipped)
    watch.see(METRICS, [skipped[0], update()])                            # one update is not skipped
    for _ in range(PATIENCE - 1):
        watch.see(METRICS, skipped)
    with pytest.raises(Stopped, match="a gradient was not finite.*--lr 0.001") as stop:
        watch.see(METRICS, skipped)
    assert stop.value.then == ""


@pytest.mark.parametrize("changes", [dict(accuracy=0), dict(truncated=1.0), dict(reward=float("nan"))])
def test_uninformative_steps_warn_without_stopping(changes, capsys):
    watch = Watch(settings())
    for _ in range(3 * PATIENCE):
        watch.see(METRICS | changes | dict(groups=0), [update()])
    assert capsys.readouterr().out.count("nothing to learn for") == 3
    for _ in range(PATIENCE):
        watch.see(METRICS | changes, [update()])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flags,key,shown", [({}, "eval_accuracy", "held-out accuracy 0.250 -> 0.750"),
                                             ({"reward": "mine:f"}, "eval_reward", "held-out reward 0.250 -> 0.750")])
def test_farewell_reports_change_and_next_commands(tmp_path, capsys, monkeypatch, flags, key, shown):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)  # earlier tests may have used it
    rows = [{"step": 0, f"{key}_before": 0.25, key: 0.5, "seconds": 100}, {"step": 1, key: 0.75, "seconds": 50},
            {"step": 2, key: None, "seconds": 50}]
    out = tmp_path / "my run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    farewell(settings(out=str(out), **flags))
    first, following = capsys.readouterr().out.splitlines()
    assert first == f"{out}: 3 steps in 3 min; {shown}"
    assert f"evaluate.py {out}" in following and f"tools.report {out}" in following
