"""
The page of runs: what is on it, that it needs nothing but itself, and one line for a folder that cannot be read. Where
a Chromium is installed, also what a reader sees.

python -m pytest tests/test_report.py -v
"""
import base64
import gzip
import json
import re
import shutil
import subprocess
import sys

import pytest

from tools import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NASTY = "a\u2028</script><script>alert(1)</script><!-- & \x1b[2J"


def sample(step, problem, reward, rule="box", completion="so \\boxed{7}", **more):
    return dict(step=step, advantage=2 * reward - 1, id=problem, question=f"What is {problem}?", answer="7",
                completion=completion, extracted="7", rule=rule, correct=float(reward > 0), format=1.0, length=4,
                finished=True, mean_logprob=-0.25, reward=reward, **more)


SAMPLES = [sample(step, f"p-{k}", float(k % 2), "box" if k else "none", f"step {step} says {k}")
           for step in range(40) for k in range(4)] + [sample(40, "odd", 0.25, "tag", NASTY, parts={"length": 0.5})]


def write_run(folder, samples=SAMPLES, **flags):
    folder.mkdir(parents=True)
    metrics = [{"step": step, "reward": step / 40, "sigma": 0.01 * (step > 3), "own": 1.0, "kl": float("nan")}
               for step in range(41)]
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"model": "tiny", "lr": 1e-3, **flags}))
    return folder


def run(monkeypatch, *arguments):
    """report.main() with these arguments; returns None, or the message that it stopped with."""
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    try:
        return report.main()
    except SystemExit as stop:
        return stop.code


def data_of(path):
    packed = re.search(r'<script type="application/gzip" id="data">([\w+/=]*)</script>', path.read_text("utf-8"))[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_page_holds_curves_flags_and_every_answer_as_written(tmp_path, monkeypatch, capsys):
    half = [sample(0, "half", 1.0, completion="half of a pair: \ud800")]
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", half, lr=2e-3,
                                                                about={"commit": "abc", "versions": {"torch": "2.13"}})
    assert run(monkeypatch, a, b) is None
    assert capsys.readouterr().out.startswith(f"{a / 'report.html'}: ")
    data = data_of(a / "report.html")
    assert data["panels"] == {key: list(panel) for key, panel in report.PANELS.items()}
    first, second = data["runs"]
    assert (first["name"], second["name"]) == (str(a), str(b))
    assert first["samples"] == SAMPLES and second["samples"] == half
    assert (first["flags"]["lr"], second["flags"]["lr"]) == (1e-3, 2e-3)
    assert second["flags"]["about.commit"] == "abc" and second["flags"]["about.versions.torch"] == "2.13"
    assert first["curves"].keys() == {"reward", "sigma", "own"}           # kl was never a number
    steps, values, mean = first["curves"]["reward"]
    assert (steps, values) == (list(range(41)), [s / 40 for s in range(41)]) and mean == report.smooth(values, 41 // 15)


def test_the_page_needs_nothing_but_itself(tmp_path, monkeypatch):
    assert run(monkeypatch, write_run(tmp_path / "a"), "--out", tmp_path / "new" / "page.html") is None
    html = (tmp_path / "new" / "page.html").read_text("utf-8")
    assert not re.search(r"https?:|//\w+\.|\bsrc=|<link|@import|fetch\(|XMLHttp", html)
    assert html.count("</script>") == 2 and "alert(1)" not in html


def test_answers_can_be_those_of_every_nth_step_and_must_fit_into_a_browser(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    assert run(monkeypatch, folder, "--every", 10) is None
    assert {row["step"] for row in data_of(folder / "report.html")["runs"][0]["samples"]} == {0, 10, 20, 30, 40}
    monkeypatch.setattr(report, "MOST_CHARACTERS", 20_000)
    assert "more than a browser reads: --every 10 keeps" in run(monkeypatch, folder)
    assert run(monkeypatch, folder, "--every", 10) is None


def test_a_run_without_answers_has_its_curves(tmp_path, monkeypatch):
    (write_run(tmp_path / "a") / "samples.jsonl").unlink()
    assert run(monkeypatch, tmp_path / "a") is None
    assert data_of(tmp_path / "a" / "report.html")["runs"][0]["samples"] == []


@pytest.mark.parametrize("name,text,said", [
    ("metrics.jsonl", None, "/metrics.jsonl'"), ("metrics.jsonl", "", "metrics.jsonl: no complete line"),
    ("samples.jsonl", '{"step": 0\n{"step": 1}\n', "samples.jsonl:1: no line of a run"),
    ("samples.jsonl", json.dumps(sample(0, "p", 1.0)).replace("-0.25", "1e999") + "\n", "a number that JSON lacks"),
    ("samples.jsonl", json.dumps(sample(0, "p", 1.0, rule=None)) + "\n", "samples.jsonl:1: rule is no text"),
    ("samples.jsonl", "[" * 99999 + "\n\n", "samples.jsonl:1: no line of a run"),
    ("metrics.jsonl", '{"step": 0, "x": ' + "[" * 99999 + "\n{}\n", "metrics.jsonl:1: no line of a run"),
    ("run.json", "[", "run.json"), ("run.json", None, "run.json")])
def test_a_file_that_cannot_be_read_is_one_line_and_leaves_no_page(name, text, said, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    message = run(monkeypatch, folder)
    assert said in message and "\n" not in message and not (folder / "report.html").exists()


def test_a_bad_flag_or_place_is_one_line(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    assert run(monkeypatch, folder, "--every", 0) == "report: --every must be at least 1, got 0"
    assert "metrics.jsonl" in run(monkeypatch, folder, "--out", folder / "metrics.jsonl" / "page.html")
    before = (folder / "metrics.jsonl").read_bytes()
    assert "metrics.jsonl: must end in .html" in run(monkeypatch, folder, "--out", folder / "metrics.jsonl")
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.skipif(not CHROMIUM, reason="needs a Chromium to look at the page")
@pytest.mark.parametrize("address,count,problems", [
    ("", "161 of 161, mean reward 0.498, 50.3 % right", None),            # 80 ones and a 0.25, all of them right
    ("#from=10&to=11&most=0", "4 of 161, mean reward 0.000, 0.0 % right", ["p-0", "p-2"] * 2),
    ("#rule=none&to=1", "2 of 161, mean reward 0.000, 0.0 % right", ["p-0"] * 2),
    ("#problem=p-3&text=STEP+7+SAYS", "1 of 161, mean reward 1.000, 100.0 % right", ["p-3"]),
    ("#problem=what+is+odd", "1 of 161, mean reward 0.250, 100.0 % right", ["odd"]),
    ("#text=%3C%2Fscript", "1 of 161, mean reward 0.250, 100.0 % right", ["odd"]),
    ("#least=2", "0 of 161", [])])
def test_a_reader_sees_the_answers_that_pass_the_filter(address, count, problems, tmp_path, monkeypatch):
    assert run(monkeypatch, write_run(tmp_path / "a"), "--out", tmp_path / "page.html") is None
    shown = drawn(tmp_path / "page.html", address)
    assert f'id="count">{count}</p>' in shown
    rows = re.findall(r'<div class="row"><span>[^<]*</span><span>([^<]*)</span>', shown)
    assert rows == problems if problems is not None else 10 < len(rows) < 161
    assert shown.count("<figure>") == 3


def drawn(page, address=""):
    """The page's DOM after its scripts have run."""
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000",
                           f"--user-data-dir={page.with_name('profile')}", "--dump-dom", f"file://{page}{address}"],
                          capture_output=True, text=True, timeout=120)
    assert "</html>" in done.stdout, done.stderr
    return done.stdout


HAND = """<script>
const at = setInterval(() => {
  if (!one(".rows .row")) return
  clearInterval(at)
  one("[name=text]").value = "says 3"
  one("form").dispatchEvent(new Event("input"))
  setTimeout(() => one(".rows").children[7].click(), 1000)
}, 50)
</script>
"""


@pytest.mark.skipif(not CHROMIUM, reason="needs a Chromium to look at the page")
def test_typing_filters_and_a_click_opens_an_answer_beside_another_runs_flags(tmp_path, monkeypatch):
    pair = write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=2e-3)
    assert run(monkeypatch, *pair, "--out", tmp_path / "page.html") is None
    with open(tmp_path / "page.html", "a") as page:
        page.write(HAND)
    shown = drawn(tmp_path / "page.html")
    assert 'id="count">80 of 322, mean reward 1.000, 100.0 % right</p>' in shown
    detail = shown[shown.index('<div class="detail">'):]
    assert "step 7, problem p-3, " in detail and "reward 1, advantage 1 <button>all answers of its group" in detail
    for title, text in (("Problem", "What is p-3?"), ("What the model wrote", "step 7 says 3"), ("Known answer", "7")):
        assert f"<b>{title}</b><pre>{text}</pre>" in detail
    differing = shown[shown.index('<div id="differing">'):shown.index('id="flags"')]
    assert re.findall(r"<tr><th>(\w+)</th>|<td>([^<]*)</td>", differing) == [("lr", ""), ("", "0.001"), ("", "0.002")]
