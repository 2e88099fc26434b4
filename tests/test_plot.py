"""
Reading of run folders by tools/plot.py, its panels, one line for a bad folder.

python -m pytest tests/test_plot.py -v
"""
import json
import os
import sys

import pytest

from harness.process import Stopped
from study.plot import rows_of, series, smooth
from study import plot


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


# -- reading ------------------------------------------------------------------------------------------------------

def test_line_cut_off_by_a_killed_run_is_dropped_but_a_bad_line_before_it_stops(tmp_path):
    rows = metrics(3)
    assert rows_of(write(tmp_path / "a", "metrics.jsonl", rows, tail='{"step": 3, "rew') / "metrics.jsonl") == rows
    with pytest.raises(Stopped, match="metrics.jsonl:4: no line of a run"):
        rows_of(write(tmp_path / "b", "metrics.jsonl", rows, tail='{"step": 3,\n{"step": 4}\n') / "metrics.jsonl")


def test_a_byte_order_mark_is_no_text_and_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'\xef\xbb\xbf{"step": 0}\n')
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 0}]
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(OSError, match="pipe.jsonl: no regular file"):
        rows_of(tmp_path / "pipe.jsonl")


def test_line_separators_inside_a_completion_do_not_end_the_line(tmp_path):
    # str.splitlines() would cut this record in four; json.dumps(ensure_ascii=False) leaves all three as they are.
    rows = [dict(step=0, completion="a\u2028b\x85c\u2029d")]
    assert rows_of(write(tmp_path, "samples.jsonl", rows) / "samples.jsonl") == rows


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
    for step in (None, True, 1.5):
        odd = write(tmp_path / "odd", "metrics.jsonl", [dict(step=0), dict(step=step), dict(step=2)])
        assert "metrics.jsonl:2: no line of a run (its step is no whole number)" in run(monkeypatch, plot, odd)


@pytest.mark.parametrize("suffix,magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_writes_a_picture_of_two_runs(tmp_path, monkeypatch, suffix, magic):
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    runs = [write(tmp_path / name, "metrics.jsonl", metrics(n)) for name, n in (("long", 40), ("short", 1))]
    out = tmp_path / "new" / f"curves.{suffix}"
    assert run(monkeypatch, plot, *runs, "--out", out) is None
    assert out.read_bytes().startswith(magic)
    log = runs[0] / "metrics.jsonl"
    assert run(monkeypatch, plot, log) is None and (runs[0] / "curves.png").exists()
    assert str(log) in run(monkeypatch, plot, *runs, "--out", log / f"x.{suffix}")

    def full_disk(_, path, **__):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full_disk)
    assert "No space left" in run(monkeypatch, plot, *runs, "--out", out)
    assert out.read_bytes().startswith(magic)


def test_panels_are_the_metrics_that_some_run_has():
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is optional")
    fig = plot.figure({"x": metrics(5), "y": [dict(step=0, length=3)]}, plt)
    titles = {axis.get_title("left") for axis in fig.axes} - {""}
    assert titles == {plot.PANELS[key][0] for key in ("reward", "sigma", "mismatch_abs", "eval_accuracy", "length")}
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.figure({"x": [dict(step=0)]}, plt)


def test_shares_have_axes_of_0_to_1_and_no_two_of_many_runs_one_colour():
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is optional")
    shares = "accuracy eval_accuracy informative truncated".split()
    rows = [{"step": s, "grad_norm": 0.5, "kl": 0.1, "reward": 0.4 + s / 100, **dict.fromkeys(shares, 0.4)}
            for s in range(3)]
    fig = plot.figure({f"run {i}": rows for i in range(20)}, plt)
    axes = {axis.get_title("left"): axis for axis in fig.axes}
    for key in (*shares, "grad_norm", "kl", "reward"):
        low, high = axes[plot.PANELS[key][0]].get_ylim()
        assert (low < 0 and 1 < high < 1.1) == (key in shares), key
    drawn = [line.get_color() for line in axes[plot.PANELS["eval_accuracy"][0]].lines]
    assert len(drawn) == 20 and len(set(map(str, drawn))) == 20
