"""
Reading of run folders by tools/plot.py and tools/samples.py, their filters, one line for a bad folder.

python -m pytest tests/test_plot.py -v
"""
import json
import sys

import pytest

from tools import plot, samples
from tools.plot import read_log, series, smooth


def write(folder, name, rows, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / name).write_text(text + tail, encoding="utf-8")
    return folder


def run(monkeypatch, module, *arguments):
    """module.main() with these arguments -> None, or the message that it stopped with (exit code 1)."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    try:
        return module.main()
    except SystemExit as stop:
        return stop.code


def metrics(num_steps):
    return [dict(step=s, reward=s / 10, sigma=0 if s < 3 else 1e-2, mismatch_abs=1e-3, eval_accuracy=[0.5, None][s % 2])
            for s in range(num_steps)]


def sample(step=0, reward=1.0, rule="number", **changes):
    return dict(step=step, id=f"p{step}", question="3 + 4?", completion="It is 7.", answer="7", extracted="7",
                rule=rule, reward=reward, correct=reward > 0, format=True, advantage=0.5, length=4, finished=True,
                mean_logprob=-0.25) | changes


# -- reading ------------------------------------------------------------------------------------------------------

def test_line_cut_off_by_a_killed_run_is_dropped_but_a_bad_line_before_it_stops(tmp_path):
    rows = metrics(3)
    assert read_log(write(tmp_path / "a", "metrics.jsonl", rows, tail='{"step": 3, "rew') / "metrics.jsonl") == rows
    with pytest.raises(SystemExit, match="line 4: not JSON"):
        read_log(write(tmp_path / "b", "metrics.jsonl", rows, tail='{"step": 3,\n{"step": 4}\n') / "metrics.jsonl")


def test_line_separators_inside_a_completion_do_not_end_the_line(tmp_path):
    # str.splitlines() would cut this record in four; json.dumps(ensure_ascii=False) leaves all three as they are.
    rows = [dict(step=0, completion="a\u2028b\x85c\u2029d")]
    assert read_log(write(tmp_path, "samples.jsonl", rows) / "samples.jsonl") == rows


def test_resumed_step_counts_once_and_gaps_are_skipped():
    rows = [dict(step=0, reward=1), dict(step=2, reward=3.5), dict(step=1, reward=9), dict(step=1, reward=2),
            dict(step=3, reward=None), dict(step=4, reward=float("nan")), dict(step=5)]
    assert series(rows, "reward") == ([0, 1, 2], [1, 2, 3.5])


def test_smoothing_by_hand():
    assert smooth([0, 3, 6, 9, 0], 3) == [1.5, 3, 6, 5, 4.5]              # means of 2, 3, 3, 3, 2 neighbours
    assert smooth([5, 1], 0) == [5, 1]


# -- plot.py ------------------------------------------------------------------------------------------------------

def test_plot_stops_in_one_line_that_names_the_cause(tmp_path, monkeypatch):
    good = write(tmp_path / "good", "metrics.jsonl", metrics(4))
    monkeypatch.setitem(sys.modules, "matplotlib", None)                  # as if it were not installed
    assert "pip install matplotlib" in run(monkeypatch, plot, good)
    assert "nowhere" in run(monkeypatch, plot, tmp_path / "nowhere")
    assert "x.gif" in run(monkeypatch, plot, good, "--out", "x.gif")
    assert "no complete line" in run(monkeypatch, plot, write(tmp_path / "new", "metrics.jsonl", []))
    odd = write(tmp_path / "odd", "metrics.jsonl", [dict(step=0), dict(step=None), dict(step=2)])
    assert "line 2: not an object with a whole step" in run(monkeypatch, plot, odd)


@pytest.mark.parametrize("suffix,magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_writes_a_picture_of_two_runs(tmp_path, monkeypatch, suffix, magic):
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    runs = [write(tmp_path / name, "metrics.jsonl", metrics(n)) for name, n in (("long", 40), ("short", 1))]
    out = tmp_path / "new" / f"curves.{suffix}"
    assert run(monkeypatch, plot, *runs, "--out", out) is None
    assert out.read_bytes().startswith(magic)
    assert f"{runs[0]}/metrics.jsonl/x.{suffix}" in run(monkeypatch, plot, *runs, "--out",
                                                        runs[0] / "metrics.jsonl" / f"x.{suffix}")     # no folder


def test_panels_are_the_metrics_that_some_run_has():
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is optional")
    fig = plot.figure({"x": metrics(5), "y": [dict(step=0, length=3)]}, plt)
    titles = {axis.get_title("left") for axis in fig.axes} - {""}
    assert titles == {plot.PANELS[key][0] for key in ("reward", "sigma", "mismatch_abs", "eval_accuracy", "length")}
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot.figure({"x": [dict(step=0)]}, plt)


# -- samples.py ---------------------------------------------------------------------------------------------------

def test_filters_select_by_step_reward_and_rule():
    rows = [sample(0, 0.0, "none"), sample(0, 1.2), sample(3, 0.2, "none"), sample(7, 1.0)]
    assert samples.select(rows) == rows
    assert samples.select(rows, step=0) == rows[:2] and samples.select(rows, step=-1) == rows[3:]
    assert samples.select(rows, step=-2) == rows[2:3]
    assert samples.select(rows, min_reward=0.2, max_reward=1.0) == rows[2:]
    assert samples.select(rows, rule="none", max_reward=0.1) == rows[:1]


def test_latest_completions_are_printed_and_counted(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, "samples.jsonl", [sample(s) for s in range(9)])
    assert run(monkeypatch, samples, folder, "--n", 2) is None
    text = capsys.readouterr().out
    assert "step 7 ·" in text and "step 8 ·" in text and "step 6 ·" not in text
    assert "2 of 9 that pass" in text


def test_shown_sample_has_every_part_and_no_escape_code():
    text = samples.show(sample(completion="so\n\n  \x1b[2Jseven", extracted=None, finished=False, reward=0.0), width=80)
    for part in ("reward 0.00", "advantage +0.50", "wrong", "format kept", "cut off", "-0.250", "None, gold 7"):
        assert part in text
    assert "  | so\n  | \n  |   \\x1b[2Jseven".replace("| \n", "|\n") in text.replace("| \n", "|\n")
    assert "\x1b" not in text and all(len(line) <= 80 for line in text.split("\n"))


def test_a_terminal_of_no_width_is_survived(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1")
    assert run(monkeypatch, samples, write(tmp_path, "samples.jsonl", [sample()])) is None
    assert "It is 7." in capsys.readouterr().out


def test_samples_stop_in_one_line_that_names_the_cause(tmp_path, monkeypatch):
    folder = write(tmp_path / "x", "samples.jsonl", [sample()])
    assert "rules number" in run(monkeypatch, samples, folder, "--rule", "fraction")
    assert "none of 1" in run(monkeypatch, samples, folder, "--step", -4)
    assert "--n 0" in run(monkeypatch, samples, folder, "--n", 0)
    assert "nowhere" in run(monkeypatch, samples, tmp_path / "nowhere")
    bad = sample()
    del bad["rule"], bad["reward"]
    assert "line 2: without rule, reward" in run(
        monkeypatch, samples, write(tmp_path / "y", "samples.jsonl", [sample(), bad]))
