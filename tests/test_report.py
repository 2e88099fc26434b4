"""
The report: its data, a self-contained page without HTML injection, one-line errors. Two tests need Chromium.

python -m pytest tests/test_report.py -v
"""
import base64
import gzip
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from helpers import run_main

from tools import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NASTY = "a\u2028</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- & \x1b[2J"


def answer(step, problem, correct, completion="so \\boxed{7}", **more):
    return dict(step=step, id=problem, question=f"What is {problem}?", answer="7", prompt="", completion=completion,
                extracted="7", rule="box", correct=correct, length=4, reward=correct) | more


SAMPLES = [answer(step, f"p-{k}", float(k % 2), f"step {step} says {k}", advantage=k - 0.5)
           for step in range(40) for k in range(4)]
# Evaluations before training and after 1, 21 and 41 steps.
HELD_OUT = [answer(step, f"q-{k}", float(k == 1 and done > 0), f"held {k} at {done}", steps_done=done)
            for step, done in ((0, 0), (0, 1), (20, 21), (40, 41)) for k in (1, 2)]


def write_run(folder, samples=SAMPLES, held_out=(), **flags):
    folder.mkdir(parents=True)
    metrics = [{"step": step, "reward": step / 40, "own": 1.0, "kl": None} for step in range(41)]
    if held_out:
        metrics[0]["eval_accuracy_before"] = 0.0
        for row in metrics[::20]:
            row["eval_accuracy"] = 0.5
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples), ("held_out.jsonl", held_out)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"model": "tiny", "lr": 1e-3, **flags}))
    return folder


def run(monkeypatch, *arguments):
    return run_main(monkeypatch, report, *arguments)


def data_of(path):
    packed = re.search(r'<script type="application/gzip" id="data">([\w+/=]*)</script>', path.read_text("utf-8"))[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_page_contains_curves_flags_and_answers(tmp_path, monkeypatch, capsys):
    half = [answer(0, "half", 1.0, "half of a pair: \ud800")]
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", half, HELD_OUT, lr=2e-3, about={"commit": "abc", "versions": {"torch": "2.13"}})
    assert run(monkeypatch, a, b) is None
    page = a / "report-with-b.html"
    assert capsys.readouterr().out.startswith(f"{page}: ")
    first, second = data_of(page)["runs"]
    assert (first["name"], second["name"]) == (str(a), str(b))
    assert first["answers"] == {"training": SAMPLES, "evaluations": []}
    assert second["answers"]["training"] == half
    assert [(row["step"], row["id"]) for row in second["answers"]["evaluations"]] == [
        (done, f"q-{k}") for done in (0, 1, 21, 41) for k in (1, 2)]
    assert (first["flags"]["lr"], second["flags"]["lr"]) == (1e-3, 2e-3)
    assert second["flags"]["about.commit"] == "abc" and second["flags"]["about.versions.torch"] == "2.13"
    assert first["curves"].keys() == {"reward", "own"}                    # kl was never a number
    steps, values, mean = first["curves"]["reward"]
    assert (steps, values) == (list(range(41)), [s / 40 for s in range(41)])
    assert mean[1:-1] == pytest.approx(values[1:-1]) and mean[0] == (values[0] + values[1]) / 2   # a mean of three
    assert second["curves"]["eval_accuracy"][:2] == [[0, 1, 21, 41], [0.0, 0.5, 0.5, 0.5]]    # x is steps done
    assert "eval_accuracy_before" not in second["curves"]


def test_page_is_self_contained(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a", [answer(0, NASTY, 1.0, NASTY)])
    assert run(monkeypatch, folder, "--out", tmp_path / "new" / "page.html") is None
    html = (tmp_path / "new" / "page.html").read_text("utf-8")
    html = html.replace("http://www.w3.org/2000/svg", "", 1)              # a name that is never fetched
    assert "content=\"default-src 'none'; " in html                       # the browser fetches nothing
    assert not re.search(r"https?:|//\w+\.|\bsrc=|<link|@import|fetch\(|XMLHttp", html)
    assert html.count("</script>") == 2 and "alert(1)" not in html
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", html)


def test_every_nth_step_and_size_limit(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "a", steps=50)
    assert run(monkeypatch, folder, "--every", 10) is None and "unfinished: 41 of 50 steps" in capsys.readouterr().err
    assert {row["step"] for row in data_of(folder / "report.html")["runs"][0]["answers"]["training"]} == {0, 10, 20, 30}
    monkeypatch.setattr(report, "MOST_CHARACTERS", 20_000)
    assert "--every 10 keeps" in run(monkeypatch, folder)
    assert run(monkeypatch, folder, "--every", 10) is None


def test_run_without_answers_has_curves(tmp_path, monkeypatch):
    write_run(tmp_path / "a", samples=())                                 # as after a kill in the first step
    (tmp_path / "a" / "held_out.jsonl").unlink()
    assert run(monkeypatch, tmp_path / "a") is None
    shown = data_of(tmp_path / "a" / "report.html")["runs"][0]
    assert shown["answers"] == {"training": [], "evaluations": []} and "reward" in shown["curves"]


@pytest.mark.parametrize("name,text", [
    ("metrics.jsonl", None), ("metrics.jsonl", ""), ("samples.jsonl", '{"step": 0\n{"step": 1}\n'),
    ("run.json", "["), ("run.json", None)])
def test_unreadable_file_is_named_and_leaves_no_page(name, text, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    message = run(monkeypatch, folder)
    assert name in message and "\n" not in message and not (folder / "report.html").exists()


def test_bad_flag_or_path_is_named(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    assert "--every" in run(monkeypatch, folder, "--every", 0)
    assert "metrics.jsonl" in run(monkeypatch, folder, "--out", folder / "metrics.jsonl" / "page.html")
    before = (folder / "metrics.jsonl").read_bytes()
    assert "metrics.jsonl" in run(monkeypatch, folder, "--out", folder / "metrics.jsonl")
    assert (folder / "metrics.jsonl").read_bytes() == before


# -----------------------------------------------------------------------------
# In a browser

class Page(HTMLParser):
    """The page after `script` has run in it: the names of its elements and all its text."""
    def __init__(self, path, script=""):
        super().__init__()
        self.tags, self.text = [], ""
        script = f"const drawn = setInterval(() => {{ if (found.length) {{ clearInterval(drawn); {script} }} }}, 50)"
        copy = path.with_name("played.html")
        copy.write_text(f"{path.read_text('utf-8')}<script>{script}</script>", "utf-8")
        done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000",
                               f"--user-data-dir={path.with_name('profile')}", "--dump-dom", f"file://{copy}"],
                              capture_output=True, encoding="utf-8", timeout=120)
        self.feed(done.stdout)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_html_in_run_files_stays_text(tmp_path, monkeypatch):
    row = answer(0, NASTY, 1.0, NASTY, question=NASTY, prompt=NASTY, answer=NASTY, extracted=NASTY,
                 parts={NASTY: 0.5, "__proto__": 1.0}) | {NASTY: NASTY}
    folder = write_run(tmp_path / "a", [row], **{NASTY: NASTY, "model": NASTY})
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward": 1.0, NASTY: 2.0}) + "\n")
    assert run(monkeypatch, folder, folder, "--out", tmp_path / "page.html") is None
    page = Page(tmp_path / "page.html")
    assert page.tags.count("img") == 0 and page.tags.count("script") == 2            # one is this test's
    # Flags: a name and two values. Answer: three cells of its line, prompt, text, five cells and a part of the table.
    assert page.text.count("<img src=x onerror=alert(1)>") >= 12


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_filters_and_click_on_a_curve(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a", SAMPLES, HELD_OUT)
    assert run(monkeypatch, folder) is None
    page = Page(folder / "report.html", """
        const counts = []
        const choose = (name, value) => {
          one("form").elements[name].value = value
          one("form").dispatchEvent(new Event("change"))
          counts.push(found.length)
        }
        choose("from", 10); choose("to", 19); choose("correct", 0); choose("text", "SAYS 2")
        one("#all").click()
        counts.push(found.length)
        const drawing = one("#panels [aria-label='accuracy on held-out problems']")
        const { left, width } = drawing.getBoundingClientRect()
        drawing.onclick({ clientX: left + width / 2 })
        counts.push(found.length, found[0].step)
        document.body.append(`COUNTS ${JSON.stringify(counts)}`)
    """)
    counts = json.loads(re.search(r"COUNTS (\[[\d,]*\])", page.text)[1])
    assert counts == [120, 40, 20, 10, 160, 2, 21]
