"""
When a run is ended because it learns nothing, and what it prints; test_train.py ends a real run by it.

python -m pytest tests/test_console.py -v
"""
import json
import re
import sys
from types import SimpleNamespace

import pytest

from files import Stopped
from harness import console as console_py
from harness.config import Settings
from harness.console import PATIENCE, Console, Phases, Watch, command, duration

METRICS = dict(step=0, accuracy=0.3, reward=0.35, groups=9, length=280.0, truncated=0.04, informative=0.25,
               tokens_per_s=2553.0, seconds=61.0)


def settings(**changes):
    return Settings.of(dict(lr=1e-3, steps=4, data="gsm8k") | changes)


def update(failure=""):
    return SimpleNamespace(failure=failure)


def test_a_run_ends_by_itself_only_when_all_updates_of_the_last_steps_were_skipped():
    watch, skipped = Watch(settings()), [update("a gradient was not finite")] * 2
    for _ in range(PATIENCE - 1):
        watch.see(METRICS, skipped)
    watch.see(METRICS, [skipped[0], update()])                            # one that was made
    for _ in range(PATIENCE - 1):
        watch.see(METRICS, skipped)
    with pytest.raises(Stopped, match="a gradient was not finite.*--lr 0.001") as stop:
        watch.see(METRICS, skipped)
    assert stop.value.then == ""


@pytest.mark.parametrize("changes", [dict(accuracy=0), dict(accuracy=1.0), dict(truncated=1.0), dict(reward=float("nan"))])
def test_steps_that_teach_nothing_are_warned_of_and_end_nothing(changes, capsys):
    watch = Watch(settings())
    for _ in range(3 * PATIENCE):
        watch.see(METRICS | changes | dict(groups=0), [update()])
    assert capsys.readouterr().out.count("no group of answers taught anything") == 3
    for _ in range(PATIENCE):
        watch.see(METRICS | changes, [update()])
    assert capsys.readouterr().out == ""


def told(console, capsys, steps, **changes):
    console.start_at(0)
    for step in range(steps):
        console.tell(METRICS | changes | dict(step=step), [update()])
    console.bar.close()
    return capsys.readouterr()


def test_a_line_holds_every_figure_the_seconds_and_the_time_left(capsys):
    lines = told(Console(settings()), capsys, 4).out.splitlines()
    assert lines[1] == ("step 2/4: accuracy 0.300, length 280, informative 0.25, 2,553 tokens/s, 61.0 s, "
                        "2 min to go")
    assert "reward 0.35" in told(Console(settings(reward="mine:f")), capsys, 1).out


def test_the_bar_fits_80_columns_with_reward_accuracy_and_length_in_it(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console_py, "tqdm", lambda **how: console_py_tqdm(**how | dict(dynamic_ncols=False, ncols=80)))
    said = told(Console(settings(reward="mine:f", steps=10_000)), capsys, 1, reward=-0.123)
    bars = [part for part in re.split("[\r\n]", said.err) if "tokens" in part]
    assert bars and all("reward -0.123, right 30%, 280 tokens" in bar and len(bar) <= 80 for bar in bars)
    assert "step 1/" not in said.out


console_py_tqdm = console_py.tqdm


def test_an_update_that_is_skipped_is_told_under_the_number_of_its_steps_line(capsys):
    console = Console(settings())
    console.start_at(0)
    console.tell(METRICS | dict(step=2), [update(), update("inf")])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 3", "step 3/4"]


@pytest.mark.parametrize("flags,key,shown", [({}, "eval_accuracy", "held-out accuracy 0.250 -> 0.750"),
                                             ({"reward": "mine:f"}, "eval_reward", "held-out reward 0.250 -> 0.750")])
def test_the_end_says_what_the_run_changed_and_what_comes_next(tmp_path, capsys, flags, key, shown):
    rows = [{"step": 0, key: 0.25, "seconds": 100}, {"step": 1, key: None, "seconds": 50}, {"step": 2, key: 0.75,
                                                                                            "seconds": 50}]
    out = tmp_path / "my run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Console(settings(**flags)).farewell(out)
    first, *commands = capsys.readouterr().out.splitlines()
    assert first == f"{out}: 3 steps in 3 min; {shown}"
    assert len(commands) == 4 and all(f"'{out}'" in line for line in commands)


def test_phases_are_told_with_their_times(capsys):
    phases = Phases()
    with phases("weights"):
        pass
    phases.tell()
    assert re.fullmatch(r"ready after [\d.]+ s: weights [\d.]+ s\n", capsys.readouterr().out)


def test_a_command_is_quoted_and_a_time_is_short():
    assert command("evaluate.py", "my run") == "python evaluate.py 'my run'"
    assert command("tools.report", "x") == "python -m tools.report x"
    assert [duration(s) for s in (89, 720, 11_100)] == ["89 s", "12 min", "3 h 5 min"]
