"""
The report: its data, a self-contained page without HTML injection, one-line errors. One test needs Chromium.

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
NASTY = "a\u2028</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- & \x1b[2J"


def answer(step, problem, task, rule="box", completion="so \\boxed{7}", **more):
    return dict(step=step, id=problem, question=f"What is {problem}?", answer="7", prompt="", completion=completion,
                extracted="7", rule=rule, correct=float(task > 0), format=1.0, length=4, finished=True,
                mean_logprob=-0.25, task=task) | more


def sample(step, problem, reward, *names, **more):
    """A line of samples.jsonl. held_out.jsonl has no advantage and reward."""
    return answer(step, problem, reward, *names, advantage=2 * reward - 1, reward=reward, **more)


SAMPLES = [sample(step, f"p-{k}", float(k % 2), "box" if k else "none", f"step {step} says {k}")
           for step in range(40) for k in range(4)] + [sample(40, "odd", 0.25, "tag", NASTY, parts={"length": 0.5})]


# Evaluations before training and after 1, 21 and 41 steps: p-1 is learned, p-2 is not.
PROMPT = "<|im_start|>system\nbe brief<|im_end|>\nWhat is p-%d?"
HELD_OUT = [answer(step, f"p-{k}", float(k == 1 and done > 0), completion=f"held {k} at {done}: \\boxed{{7}}",
                   prompt=PROMPT % k, steps_done=done)
            for step, done in ((0, 0), (0, 1), (20, 21), (40, 41)) for k in (1, 2)]


def write_run(folder, samples=SAMPLES, held_out=(), **flags):
    folder.mkdir(parents=True)
    metrics = [{"step": step, "reward": step / 40, "sigma": 0.01 * (step > 3), "own": 1.0, "kl": None}
               for step in range(41)]
    for row in metrics[::20] if held_out else ():
        row["eval_accuracy"] = 0.5
    if held_out:
        metrics[0]["eval_accuracy_before"] = 0.0
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples), ("held_out.jsonl", held_out)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"model": "tiny", "lr": 1e-3, "group_size": 2, **flags}))
    return folder


def run(monkeypatch, *arguments):
    """Runs report.main(). -> None, or its error message."""
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    try:
        return report.main()
    except SystemExit as stop:
        return stop.code


def data_of(path):
    packed = re.search(r'<script type="application/gzip" id="data">([\w+/=]*)</script>', path.read_text("utf-8"))[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_page_contains_curves_flags_and_answers(tmp_path, monkeypatch, capsys):
    half = [sample(0, "half", 1.0, completion="half of a pair: \ud800")]
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", half, HELD_OUT, lr=2e-3,
                                                                about={"commit": "abc", "versions": {"torch": "2.13"}})
    assert run(monkeypatch, a, b) is None
    page = a / "report-with-b.html"
    assert capsys.readouterr().out.startswith(f"{page}: ")
    data = data_of(page)
    assert data["panels"].items() >= {key: list(panel) for key, panel in report.PANELS.items()}.items()
    first, second = data["runs"]
    assert (first["name"], second["name"]) == (str(a), str(b))
    assert answers(first, "samples") == SAMPLES and first["held_out"] == []
    assert [row["group"] for row in first["samples"]] == [0, 0, 1, 1] * 40 + [0]
    assert answers(second, "samples") == half
    assert answers(second, "held_out") == [
        {key: value for key, value in (row | {"step": row["steps_done"]}).items() if key != "steps_done"}
        for row in HELD_OUT]
    assert len(first["problems"]) == 5 and len(second["problems"]) == 3   # each stored once, with its texts
    assert (first["flags"]["lr"], second["flags"]["lr"]) == (1e-3, 2e-3)
    assert second["flags"]["about.commit"] == "abc" and second["flags"]["about.versions.torch"] == "2.13"
    assert first["curves"].keys() == {"reward", "sigma", "own"}           # kl was never a number
    steps, values, mean = first["curves"]["reward"]
    assert (steps, values) == (list(range(41)), [s / 40 for s in range(41)]) and mean == report.smooth(values, 41 // 15)
    assert second["curves"]["eval_accuracy"][:2] == [[0, 1, 21, 41], [0.0, 0.5, 0.5, 0.5]]    # x is steps done
    assert "eval_accuracy_before" not in second["curves"]


def answers(run, name):
    """A log's rows, rebuilt from the page's data."""
    return [{key: value for key, value in (row | run["problems"][row["problem"]]).items()
             if key not in ("problem", "group")} for row in run[name]]


def test_page_is_self_contained(tmp_path, monkeypatch):
    assert run(monkeypatch, write_run(tmp_path / "a"), "--out", tmp_path / "new" / "page.html") is None
    html = (tmp_path / "new" / "page.html").read_text("utf-8")
    html = html.replace("http://www.w3.org/2000/svg", "", 1)              # a name that is never fetched
    assert "content=\"default-src 'none'; " in html                       # the browser fetches nothing
    assert not re.search(r"https?:|//\w+\.|\bsrc=|<link|@import|fetch\(|XMLHttp", html)
    assert html.count("</script>") == 2 and "alert(1)" not in html
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", html)


def test_every_nth_step_and_size_limit(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    assert run(monkeypatch, folder, "--every", 10) is None
    assert {row["step"] for row in data_of(folder / "report.html")["runs"][0]["samples"]} == {0, 10, 20, 30, 40}
    monkeypatch.setattr(report, "MOST_CHARACTERS", 20_000)
    assert "--every 10 keeps" in run(monkeypatch, folder)
    assert run(monkeypatch, folder, "--every", 10) is None


def test_run_without_answers_has_curves(tmp_path, monkeypatch):
    write_run(tmp_path / "a", samples=())                                 # as after a kill in the first step
    (tmp_path / "a" / "held_out.jsonl").unlink()
    assert run(monkeypatch, tmp_path / "a") is None
    shown = data_of(tmp_path / "a" / "report.html")["runs"][0]
    assert shown["samples"] == shown["held_out"] == shown["problems"] == []


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

# Runs `acts` in the page and appends what they put into `found` to the page, as JSON.
HAND = """<script>
const wait = ms => new Promise(done => setTimeout(done, ms))
const all = selector => [...document.querySelectorAll(selector)]
const texts = selector => all(selector).map(node => node.textContent)
async function acts() { const found = {}; %s; return found }
const at = setInterval(() => {
  if (!one(".rows .row")) return
  clearInterval(at)
  acts().catch(error => ({ error: String(error) })).then(found => {
    const packed = btoa(unescape(encodeURIComponent(JSON.stringify(found))))
    document.body.append(make("output", { id: "found" }, packed))
  })
}, 50)
</script>
"""


def played(acts, page):
    """Runs the script `acts` in a copy of the page. -> its `found`"""
    copy = page.with_name("played.html")
    copy.write_text(page.read_text("utf-8") + HAND % acts, "utf-8")
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000",
                           "--window-size=1400,900", f"--user-data-dir={page.with_name('profile')}", "--dump-dom",
                           f"file://{copy}"], capture_output=True, text=True, timeout=120)
    packed = re.search(r'id="found">([\w+/=]*)<', done.stdout)
    return json.loads(base64.b64decode(packed[1]))


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_html_in_run_files_stays_text(tmp_path, monkeypatch):
    """Every text field contains an HTML injection."""
    row = sample(0, NASTY, 1.0, NASTY, NASTY, prompt=NASTY, parts={NASTY: 0.5, "__proto__": 1.0})
    row |= {"question": NASTY, "answer": NASTY, "extracted": NASTY, NASTY: NASTY}
    held = {key: value for key, value in row.items() if key not in ("reward", "advantage")}
    folder = write_run(tmp_path / "a", [row], [held], **{key: NASTY for key in (NASTY, "model", "base", "data", "steps",
                                                        "prompt_style", "about.date", "about.hardware")})
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward": 1.0, f"reward_{NASTY}": 1.0, NASTY: 2.0}))
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write("\n")
    assert run(monkeypatch, folder, folder, "--out", tmp_path / "page.html") is None
    found = played("""
        for (const view of ["answers", "problems"]) for (const set of ["", "held-out"]) {
          only({ view: view === "answers" ? "" : view, set, text: "img" }); await wait(200)
          all(".rows .row")[0].click()
          found[view + set] = one(".detail").textContent.includes("<img src=x onerror=alert(1)>")
        }
        found.title = one("h1").textContent
        found.foreign = all("img, script:not([id])").length
    """, tmp_path / "page.html")
    assert found.pop("foreign") == 2                                       # the page's script and HAND
    assert found.pop("title") == f"{folder}, {folder}"
    assert list(found.values()) == [True] * 4
