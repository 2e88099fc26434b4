"""
The picture of runs' curves: which panels it has, how it draws them, and what cannot be drawn.

python -m pytest tests/test_curves.py -v
"""
import json
import sys
from pathlib import Path

import pytest

from study import curves
from tools.report import PANELS

ROOT = Path(__file__).parent.parent


def metrics(num_steps):
    return [dict(step=s, reward=s / 10, sigma=0 if s < 3 else 1e-2, rollout_logp_diff=1e-3, eval_accuracy=[0.5, None][s % 2])
            for s in range(num_steps)]


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def draw(monkeypatch, *arguments):
    """curves.main() with these arguments; returns None, or the message that it stopped with (exit code 1)."""
    monkeypatch.setattr(sys, "argv", ["study.curves", *map(str, arguments)])
    try:
        return curves.main()
    except SystemExit as stop:
        return stop.code


def test_curves_that_cannot_be_drawn_stop_in_one_line_that_names_the_cause(tmp_path, monkeypatch):
    good = write(tmp_path / "good", metrics(4))
    monkeypatch.setitem(sys.modules, "matplotlib", None)                  # as if it were not installed

    def said(folder, out=tmp_path / "x.png"):
        return draw(monkeypatch, folder, "--out", out)

    assert "pip install matplotlib" in said(good)
    assert "nowhere" in said(tmp_path / "nowhere")
    assert "x.gif" in said(good, "x.gif")
    assert "no complete line" in said(write(tmp_path / "new", []))
    for step in (None, True, 1.5):
        odd = write(tmp_path / "odd", [dict(step=0), dict(step=step), dict(step=2)])
        assert "metrics.jsonl:2: no line of a run" in said(odd)


@pytest.mark.parametrize("suffix,magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_curves_of_two_runs_become_a_picture_that_a_full_disk_does_not_destroy(tmp_path, monkeypatch, suffix, magic):
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    runs = [write(tmp_path / name, metrics(n)) for name, n in (("long", 40), ("short", 1))]
    out = tmp_path / "new" / f"curves.{suffix}"
    assert draw(monkeypatch, *runs, "--out", out) is None
    assert out.read_bytes().startswith(magic)
    log = runs[0] / "metrics.jsonl"
    assert draw(monkeypatch, log, "--out", tmp_path / "one.pdf") is None and (tmp_path / "one.pdf").exists()
    assert draw(monkeypatch, "bf16-s0", "--runs", ROOT / "study" / "runs", "--out", tmp_path / "s.pdf") is None
    assert str(log) in draw(monkeypatch, *runs, "--out", log / f"x.{suffix}")

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    assert "No space left" in draw(monkeypatch, *runs, "--out", out)
    assert out.read_bytes().startswith(magic)


def test_the_panels_are_the_metrics_that_some_run_has():
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is optional")
    picture = curves.draw_panels({"x": metrics(5), "y": [dict(step=0, length=3)]}, plt)
    titles = {axis.get_title("left") for axis in picture.axes} - {""}
    assert titles == {PANELS[key][0] for key in ("reward", "sigma", "rollout_logp_diff", "eval_accuracy", "length")}
    with pytest.raises(ValueError, match="nothing to draw"):
        curves.draw_panels({"x": [dict(step=0)]}, plt)


def test_shares_have_axes_of_0_to_1_and_no_two_of_many_runs_one_colour():
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is optional")
    shares = "accuracy eval_accuracy informative truncated".split()
    rows = [{"step": s, "grad_norm": 0.5, "kl": 0.1, "reward": 0.4 + s / 100, **dict.fromkeys(shares, 0.4)}
            for s in range(3)]
    picture = curves.draw_panels({f"run {i}": rows for i in range(20)}, plt)
    axes = {axis.get_title("left"): axis for axis in picture.axes}
    for key in (*shares, "grad_norm", "kl", "reward"):
        low, high = axes[PANELS[key][0]].get_ylim()
        assert (low < 0 and 1 < high < 1.1) == (key in shares), key
    drawn = [line.get_color() for line in axes[PANELS["eval_accuracy"][0]].lines]
    assert len(drawn) == 20 and len(set(map(str, drawn))) == 20
