"""
The picture of accuracies: its numbers, intervals and places against a study of ten problems that is known by hand.

python -m pytest tests/test_bars.py -v
"""
import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from study import bars
from study.results import SeedVariance, difference_interval

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def runs(tmp_path):
    right = {"a": "1100000000", "a-s0": "1111000000", "a-s1": "1111110000", "b": "0000000000", "b-s0": "1111111100"}
    for name in right:
        if "-" in name:
            (tmp_path / f"{name}.jsonl").write_text('{"step": 0, "accuracy": 0.5}\n')
    (tmp_path / "held_out.json").write_text(json.dumps(right))
    sampled = {"a": "8800000000", "a-s0": "8888000000", "a-s1": "4444000000"}
    (tmp_path / "sampled.json").write_text(json.dumps(
        {name: {"right": digits, "sampler_entropy": 0.5} for name, digits in sampled.items()}))
    return tmp_path


def draw(monkeypatch, runs, *arguments):
    monkeypatch.setattr(sys, "argv", ["bars", *arguments, "--runs", str(runs), "--out", str(runs / "x.svg")])
    try:
        bars.main()
    except SystemExit as stop:
        return str(stop.code)
    return (runs / "x.svg").read_text()


def test_the_picture_has_the_accuracies_and_their_intervals_where_the_axis_says(runs, monkeypatch):
    root = ElementTree.fromstring(draw(monkeypatch, runs, "a=16 bits & <more>", "b"))
    words = [node.text for node in root.iter(SVG + "text")]
    # a: 2 of 10 before, (4 + 6) / 20 after; b: 0 and 8 of 10.
    assert {"16 bits & <more>", "b", "20.0", "50.0", "0.0", "80.0", "0 %"} <= set(words)
    marks = {int(text.text[:-2]): float(text.get("x")) for text in root.iter(SVG + "text") if text.text[-2:] == " %"}
    share = np.polynomial.Polynomial.fit(list(marks.values()), list(marks), 1)         # of a place on the axis
    circles = [round(share(float(circle.get("cx"))), 1) for circle in root.iter(SVG + "circle")]
    assert circles == [20, 50, 0, 80]
    # The interval is that of the tables, with the variance of the one arm that has two seeds.
    after = np.array([[1] * 4 + [0] * 6, [1] * 6 + [0] * 4], float)
    residual = after - after.mean(1, keepdims=True) - after.mean(0) + after.mean()
    seen, noise = after.mean(1).var(ddof=1), (residual**2).sum() / 9 / 10
    mean, half = difference_interval(after, SeedVariance(seen - noise, seen, 1), 1)
    thick = [line for line in root.iter(SVG + "line") if line.get("stroke-width") == "4"]
    ends = [round(share(float(thick[0].get(end))), 1) for end in ("x1", "x2")]
    assert mean == 0.5 and ends == [round(100 * (0.5 - half), 1), round(100 * (0.5 + half), 1)]
    described = f"16 bits & <more>: 20.0 before, 50.0 after, plus or minus {100 * half:.1f}"
    assert root.find(SVG + "desc").text.startswith(described)


def test_sampled_answers_count_by_eighths_and_what_cannot_be_drawn_is_one_line(runs, monkeypatch):
    text = draw(monkeypatch, runs, "a", "--kind", "sampled", "--title", "T < U")
    assert re.findall(r"<desc>a: 20.0 before, 30.0 after", text) and "<title>T &lt; U</title>" in text
    assert "mean of 2 runs each" in text
    refused = "study.bars: b: has no answers at temperature 1"
    assert draw(monkeypatch, runs, "b", "--kind", "sampled").startswith(refused)
    assert "no runs c-sSEED.jsonl" in draw(monkeypatch, runs, "c")
    monkeypatch.setattr(sys, "argv", ["bars", "a", "--runs", str(runs), "--out", "x.png"])
    with pytest.raises(SystemExit, match="--out x.png: must end in .svg"):
        bars.main()


def test_the_studys_picture_is_what_the_command_beside_it_draws(tmp_path, monkeypatch):
    page = (ROOT / "study" / "methods.md").read_text().replace("\\\n", "")
    command = shlex.split(re.search(r"^python -m (study\.bars .*)$", page, re.M)[1])
    out = command[command.index("--out") + 1]
    command[command.index(out)] = str(tmp_path / "x.svg")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", command)
    bars.main()
    assert (tmp_path / "x.svg").read_text() == (ROOT / out).read_text()
