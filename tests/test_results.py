"""
tools/study.py on runs whose numbers are known by hand.

python -m pytest tests/test_study.py -v
"""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from study.results import Arm, interval
from study import results as study

ROOT = Path(__file__).parent.parent


@pytest.fixture
def runs(tmp_path):
    """Arms a and b, seeds 0 and 1 (b also 2), six steps each (b-s2 seven); ten problems."""
    right = {"a": "1100000000", "a-s0": "1111000000", "a-s1": "1111110000",
             "b": "1000000000", "b-s0": "1111100000", "b-s1": "1111111000", "b-s2": "0000000000"}
    for name in right:
        if "-" in name:
            steps = [{"step": i, "entropy": 0.6 - i / 10, "accuracy": i / 10, "length": 100 - i, "seconds": 2.0}
                     for i in range(6)]
            del steps[5]["entropy"]                        # a step in which no row could teach anything
            steps += [{"step": 6}] * (name == "b-s2")
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    (tmp_path / "a-extra.jsonl").write_text("not a run of a\n")
    (tmp_path / "held_out.json").write_text(json.dumps(right))
    return tmp_path


def test_an_arm_is_its_seeds(runs):
    a = Arm(runs, "a")
    assert a.seeds == ["0", "1"] and a.before.sum() == 2 and a.after.sum(axis=1).tolist() == [4, 6]
    assert a.mean("accuracy", None, 5) == pytest.approx(0.2) and a.mean("accuracy", -5, None) == pytest.approx(0.3)
    assert a.mean("entropy", -5, None) == pytest.approx((0.5 + 0.4 + 0.3 + 0.2) / 4)


def test_the_interval_holds_both_spreads():
    # One seed: the error of a mean of 0s and 1s. Seeds that disagree, problems that do not: their spread alone.
    one = np.repeat([[1, 0]], 200, axis=0).reshape(1, 400)
    mean, low, high = interval(one)
    assert mean == 50 and high - low == pytest.approx(2 * 196 * (0.25 / 400) ** 0.5, rel=0.1)
    mean, low, high = interval(np.array([[0] * 50, [1] * 50]))
    assert (mean, low, high) == (50, 0, 100)


def test_the_tables_say_what_the_files_hold(runs):
    done = subprocess.run([sys.executable, "-m", "study.results", "a", "b", "--runs", runs], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| a | 6 | 20.0 | **50.0** | 40.0 / 60.0 | +30.0 [")
    assert "| 0.400 -> 0.350 | 0.200 -> 0.300 | 98 -> 97 | 2.0 |" in lines[2]
    assert lines[3].startswith("| b | 6-7 | 10.0 | **40.0** | 50.0 / 70.0 / 0.0 | +30.0 [")
    assert lines[-1].startswith("| b - a | -10.0 [") and "| +10.0 [" in lines[-1] and lines[-1].endswith("| 0, 1 |")


def test_the_mean_of_some_steps_includes_the_last(runs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["study", "a", "--runs", str(runs), *"--mean accuracy --first 2 --last 4".split()])
    study.main()
    assert capsys.readouterr().out == "a 0.3\n"


@pytest.mark.parametrize("arms,held_out,said", [
    ("c", {}, "no runs c-sSEED.jsonl that held_out.json knows"),
    ("/a", {}, "no runs /a-sSEED.jsonl that held_out.json knows"),
    ("a", [], "held_out.json: holds no JSON object"),
    ("a", {"a-s1": "11"}, "held_out.json: a-s1 is '11', expected 0 or 1 for each problem"),
    ("a", {"a": 1100}, "held_out.json: a-s0 is '1111000000', expected 0 or 1 for each problem"),
    ("a", {"a": "2100000000"}, "held_out.json: a is '2100000000', expected 0 or 1 for each problem"),
    ("a b", {"b": "1", "b-s0": "1", "b-s1": "1", "b-s2": "1"}, "a and b have no seed in common, or other problems")])
def test_what_cannot_be_compared_is_one_line(runs, monkeypatch, arms, held_out, said):
    path = runs / "held_out.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | held_out if isinstance(held_out, dict) else held_out))
    monkeypatch.setattr(sys, "argv", ["study", *arms.split(), "--runs", str(runs)])
    with pytest.raises(SystemExit) as stop:
        study.main()
    assert stop.value.code.startswith("study: ") and said in stop.value.code and "\n" not in stop.value.code
