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
from pathlib import Path

import pytest

from rewards import extract
from tools import report

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NASTY = "a\u2028</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- & \x1b[2J"


def answer(step, problem, task, rule="box", completion="so \\boxed{7}", **more):
    return dict(step=step, id=problem, question=f"What is {problem}?", answer="7", prompt="", completion=completion,
                extracted="7", rule=rule, correct=float(task > 0), format=1.0, length=4, finished=True,
                mean_logprob=-0.25, task=task) | more


def sample(step, problem, reward, *names, **more):
    """An answer as samples.jsonl has it; held_out.jsonl has it without these two."""
    return answer(step, problem, reward, *names, advantage=2 * reward - 1, reward=reward, **more)


SAMPLES = [sample(step, f"p-{k}", float(k % 2), "box" if k else "none", f"step {step} says {k}")
           for step in range(40) for k in range(4)] + [sample(40, "odd", 0.25, "tag", NASTY, parts={"length": 0.5})]


# The evaluations before training and after 1, 21 and 41 steps: p-1 is learned, p-2 never.
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
    assert len(first["problems"]) == 5 and len(second["problems"]) == 3   # each one once, with its texts
    assert (first["flags"]["lr"], second["flags"]["lr"]) == (1e-3, 2e-3)
    assert second["flags"]["about.commit"] == "abc" and second["flags"]["about.versions.torch"] == "2.13"
    assert first["curves"].keys() == {"reward", "sigma", "own"}           # kl was never a number
    steps, values, mean = first["curves"]["reward"]
    assert (steps, values) == (list(range(41)), [s / 40 for s in range(41)]) and mean == report.smooth(values, 41 // 15)
    assert second["curves"]["eval_accuracy"][:2] == [[0, 1, 21, 41], [0.0, 0.5, 0.5, 0.5]]    # steps done
    assert "eval_accuracy_before" not in second["curves"]


def answers(run, name):
    """The rows of a log again, of what the page has of a run."""
    return [{key: value for key, value in (row | run["problems"][row["problem"]]).items()
             if key not in ("problem", "group")} for row in run[name]]


def test_a_page_of_several_runs_leaves_the_page_of_each_alone(tmp_path, monkeypatch):
    a, b, c = (write_run(tmp_path / name) for name in "abc")
    for folders in ([a], [a, b], [a, b, c]):
        assert run(monkeypatch, *folders) is None
    assert sorted(path.name for path in a.glob("*.html")) == ["report-with-b-c.html", "report-with-b.html",
                                                              "report.html"]
    assert len(data_of(a / "report.html")["runs"]) == 1


def test_the_page_needs_nothing_but_itself(tmp_path, monkeypatch):
    assert run(monkeypatch, write_run(tmp_path / "a"), "--out", tmp_path / "new" / "page.html") is None
    html = (tmp_path / "new" / "page.html").read_text("utf-8")
    html = html.replace("http://www.w3.org/2000/svg", "", 1)              # a name, which is never fetched
    assert "content=\"default-src 'none'; " in html                       # the browser would fetch nothing else either
    assert not re.search(r"https?:|//\w+\.|\bsrc=|<link|@import|fetch\(|XMLHttp", html)
    assert html.count("</script>") == 2 and "alert(1)" not in html
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\(", html)


def test_answers_can_be_those_of_every_nth_step_and_must_fit_into_a_browser(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    assert run(monkeypatch, folder, "--every", 10) is None
    assert {row["step"] for row in data_of(folder / "report.html")["runs"][0]["samples"]} == {0, 10, 20, 30, 40}
    monkeypatch.setattr(report, "MOST_CHARACTERS", 20_000)
    assert "--every 10 keeps" in run(monkeypatch, folder)
    assert run(monkeypatch, folder, "--every", 10) is None


def test_a_run_without_answers_has_its_curves(tmp_path, monkeypatch):
    write_run(tmp_path / "a", samples=())                                 # empty: the run was killed in its first step
    (tmp_path / "a" / "held_out.jsonl").unlink()
    assert run(monkeypatch, tmp_path / "a") is None
    shown = data_of(tmp_path / "a" / "report.html")["runs"][0]
    assert shown["samples"] == shown["held_out"] == shown["problems"] == []


@pytest.mark.parametrize("name,text", [
    ("metrics.jsonl", None), ("metrics.jsonl", ""), ("samples.jsonl", '{"step": 0\n{"step": 1}\n'),
    ("held_out.jsonl", '{"step": 0, "id": "1"}\n'), ("run.json", "["), ("run.json", None)])
def test_a_file_that_cannot_be_read_is_one_line_and_leaves_no_page(name, text, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    message = run(monkeypatch, folder)
    assert name in message and "\n" not in message and not (folder / "report.html").exists()


def test_a_bad_flag_or_place_is_one_line(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a")
    assert "--every" in run(monkeypatch, folder, "--every", 0)
    assert "metrics.jsonl" in run(monkeypatch, folder, "--out", folder / "metrics.jsonl" / "page.html")
    before = (folder / "metrics.jsonl").read_bytes()
    assert "metrics.jsonl" in run(monkeypatch, folder, "--out", folder / "metrics.jsonl")
    assert (folder / "metrics.jsonl").read_bytes() == before


# -----------------------------------------------------------------------------
# In a browser

in_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs a Chromium to look at the page")


def drawn(page, address="", width=1400):
    """The page's DOM after its scripts have run."""
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000",
                           f"--window-size={width},900", f"--user-data-dir={page.with_name('profile')}", "--dump-dom",
                           f"file://{page}{address}"], capture_output=True, text=True, timeout=120)
    assert "</html>" in done.stdout, done.stderr
    return done.stdout


# A hand for the page: it does what `acts` says, and leaves what it has said as JSON at the end of the page.
HAND = """<script>
const wait = ms => new Promise(done => setTimeout(done, ms))
const all = selector => [...document.querySelectorAll(selector)]
const texts = selector => all(selector).map(node => node.textContent)
async function acts() { const said = {}; %s; return said }
const at = setInterval(() => {
  if (!one(".rows .row")) return
  clearInterval(at)
  acts().catch(error => ({ error: String(error) })).then(said => {
    const packed = btoa(unescape(encodeURIComponent(JSON.stringify(said))))
    document.body.append(make("output", { id: "said" }, packed))
  })
}, 50)
</script>
"""


def played(acts, page, address="", width=1400):
    """What a script of acts has put into `said` after it has been played on a copy of the page."""
    copy = page.with_name("played.html")
    copy.write_text(page.read_text("utf-8") + HAND % acts, "utf-8")
    packed = re.search(r'id="said">([\w+/=]*)<', drawn(copy, address, width))
    return json.loads(base64.b64decode(packed[1]))


@in_chromium
@pytest.mark.parametrize("address,count,problems", [
    ("", "161 of 161, mean reward 0.498, 50.3 % right", None),            # 80 ones and a 0.25, all of them right
    ("#from=10&to=11&most=0", "4 of 161, mean reward 0.000, 0.0 % right", ["p-0", "p-2"] * 2),
    ("#problem=p-3&text=STEP+7+SAYS", "1 of 161, mean reward 1.000, 100.0 % right", ["p-3"]),
    ("#text=%3C%2Fscript", "1 of 161, mean reward 0.250, 100.0 % right", ["odd"]),
    ("#least=2", "0 of 161", [])])
def test_a_reader_sees_the_answers_that_pass_the_filter(address, count, problems, tmp_path, monkeypatch):
    assert run(monkeypatch, write_run(tmp_path / "a"), "--out", tmp_path / "page.html") is None
    shown = drawn(tmp_path / "page.html", address)
    assert f'role="status">{count}</p>' in shown
    rows = re.findall(r'<div class="row"[^>]*><span[^>]*>[^<]*</span><span[^>]*>([^<]*)</span>', shown)
    assert rows == problems if problems is not None else 10 < len(rows) < 161
    assert shown.count("<figure>") == 3


@in_chromium
def test_what_was_read_is_marked_where_the_rule_reads_it(tmp_path, monkeypatch):
    cases = [("box", "7", "so \\boxed{7}, no: $\\boxed{7}$", ["\\boxed{7}"]),
             ("box", "2 , 3", "\\boxed{3}? \\boxed{2} and $y=\\boxed{3}$ \\boxed{}", ["\\boxed{2}", "\\boxed{3}"]),
             ("box", "\\frac{1}{2}", "is \\fbox{ \\frac{1}{2} } {", ["\\fbox{ \\frac{1}{2} }"]),
             ("box", "\\{1\\}", "\\boxed{\\{1\\}}", ["\\boxed{\\{1\\}}"]), ("box", "5", "\\boxed 5.", ["\\boxed 5"]),
             ("tag", "7", "<answer>7</answer>", ["7"]), ("marker", "7", "17 or 7, the answer is 7. 7 it is", ["7"]),
             ("none", None, "7", [])]
    assert all(extract(text, last_number=False) == (found, rule) for rule, found, text, _ in cases)
    rows = [sample(k, "p", 1.0, rule, text) | {"extracted": found} for k, (rule, found, text, _) in enumerate(cases)]
    assert run(monkeypatch, write_run(tmp_path / "a", rows), "--out", tmp_path / "page.html") is None
    said = played("said.marks = samples.map(row => [...read(row)].sort((a, b) => a.start - b.start)"
                  ".map(({ start, end }) => [start, row.completion.slice(start, end)]))", tmp_path / "page.html")
    assert [[text for _, text in spans] for spans in said["marks"]] == [wanted for *_, wanted in cases]
    assert said["marks"][0][0][0] == 19 and said["marks"][6][0][0] == 23  # the last box; behind "answer is"


@in_chromium
def test_no_text_of_a_run_becomes_an_element_of_the_page(tmp_path, monkeypatch):
    """Each text that a run folder holds is <img onerror=...>, as a model, a data set or a stranger may have it."""
    row = sample(0, NASTY, 1.0, NASTY, NASTY, prompt=NASTY, parts={NASTY: 0.5, "__proto__": 1.0})
    row |= {"question": NASTY, "answer": NASTY, "extracted": NASTY, NASTY: NASTY}
    held = {key: value for key, value in row.items() if key not in ("reward", "advantage")}
    folder = write_run(tmp_path / "a", [row], [held], **{key: NASTY for key in (NASTY, "model", "base", "data", "steps",
                                                        "prompt_style", "about.date", "about.hardware")})
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward": 1.0, f"reward_{NASTY}": 1.0, NASTY: 2.0}))
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write("\n")
    assert run(monkeypatch, folder, folder, "--out", tmp_path / "page.html") is None
    said = played("""
        for (const view of ["answers", "problems"]) for (const set of ["", "held-out"]) {
          only({ view: view === "answers" ? "" : view, set, text: "img" }); await wait(200)
          all(".rows .row")[0].click()
          said[view + set] = one(".detail").textContent.includes("<img src=x onerror=alert(1)>")
        }
        said.title = one("h1").textContent
        said.foreign = all("img, script:not([id])").length
    """, tmp_path / "page.html")
    assert said.pop("foreign") == 2                                       # the page's own script, and HAND
    assert said.pop("title") == f"{folder}, {folder}"
    assert list(said.values()) == [True] * 4
