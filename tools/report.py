"""
One HTML page for reading runs: curves, settings, and every answer that the model wrote.

    python -m tools.report runs/x                writes runs/x/report.html
    python -m tools.report runs/x runs/y         compares two: writes runs/x/report-with-y.html

The page is a single file that opens offline in any browser from 2023 on:

    at the top   held-out accuracy before and after, duration, hardware
    curves       of metrics.jsonl; click one to see the answers of that step
    flags        of run.json, where the runs differ
    answers      of samples.jsonl and held_out.jsonl, with filters and sorting; open one to see the
                 prompt and the text, with the answer that the grader read marked
    problems     hardest first; open one to see its answers side by side, from two runs or from the
                 start and the end of one

Filters and order are kept in the page's address, so a view can be shared:
report.html#from=40&most=0 shows the wrong answers from step 40 on.

Text from models and data sets is always shown as text, never as HTML. The page is
tools/report.html with gzipped data inside, about half the size of samples.jsonl.
"""
import argparse
import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import env  # isort: skip; its settings come before torch

from files import UserError, read_json, read_log, write_atomically

MOST_CHARACTERS = 500e6             # Chromium refuses strings of more than 2^29 characters
PROBLEM = "id", "question", "answer", "prompt"      # what answers to one problem have in common

# The panels of the page, in its order:
# key in metrics.jsonl -> title, vertical axis: "share" goes from 0 to 1, "log" is logarithmic,
# "free" spans the values. docs/metrics.md defines every key.
PANELS = dict(
    reward=("mean reward of the answers", "free"),
    accuracy=("share of answers that are right", "share"),
    eval_accuracy=("accuracy on held-out problems", "share"),
    informative=("share of groups that teach", "share"),
    truncated=("share of answers that were cut off", "share"),
    length=("length of an answer, tokens", "free"),
    sampler_entropy=("entropy of the sampler, nats per token", "free"),
    entropy=("entropy of the learner where groups teach, nats per token", "free"),
    sigma=("sigma of the noise on the norms", "log"),
    grad_norm=("norm of the gradient before clipping", "free"),
    rollout_logp_diff=("learner and rollout differ by, mean |log ratio|", "free"),
    kl=("KL to the base model, nats per token", "free"),
    tokens_per_s=("sampled tokens a second", "free"),
)


def panels_for(keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """PANELS, and after `reward` those of a --reward function: each part, and the held-out mean.

    keys: all that the runs have logged.
    """
    own = {key: (f"own reward, part {key.removeprefix('reward_')}", "free")
           for key in sorted(keys) if key.startswith("reward_")}
    if list(own) == ["reward_reward"]:           # a function that returns one number: `reward`
        own = {}
    own["eval_reward"] = ("own reward on held-out problems", "free")
    return {"reward": PANELS["reward"]} | own | PANELS


# -----------------------------------------------------------------------------
# Reading a run

def series(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """One metric's curve: the steps in ascending order, and the value at each.

    Steps without a value are left out.
    """
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: list[float], window: int) -> list[float]:
    """Centred moving mean. Near the ends it averages what there is, so it does not bend to 0."""
    half = window // 2
    near = [values[max(i - half, 0):i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def evaluations(rows: list[dict]) -> list[dict]:
    """The figures of evaluations in the rows of metrics.jsonl, each as a row of its own, in the
    order of `step`, here the number of steps done: 0 before training.
    """
    found = []
    for row in rows:
        for key in [key for key in row if key.startswith("eval_")]:
            step = 0 if key.endswith("_before") else row["step"] + 1
            found.append({"step": step, key.removesuffix("_before"): row[key]})
    return sorted(found, key=lambda row: row["step"])


def flat(flags: dict, prefix: str = "") -> dict:
    """run.json without nesting: {"about": {"commit": "abc"}} becomes {"about.commit": "abc"}."""
    names = {}
    for name, value in flags.items():
        if isinstance(value, dict):
            names |= flat(value, f"{prefix}{name}.")
        else:
            names[prefix + name] = value
    return names


def read_answers(path: Path, problems: dict, group_size: int, every: int = 1) -> list[dict]:
    """The answers of samples.jsonl or held_out.jsonl of every `every`-th step; [] without the file.
    In those of held_out.jsonl `step` becomes the number of steps done, as in evaluations().

    A problem comes up again and again, at least for each answer of its group, and prompts are
    long. So `id`, `question`, `answer` and `prompt` become `problem`, the number of the problem.
    problems: those four -> number; the new ones are added. `group` is the place of the answer's
    group in its step: its answers stand side by side.
    """
    answers = []
    count = Counter()                            # answers of each step so far
    for row, _ in read_log(path) if path.exists() else ():
        row["step"] = row.pop("steps_done", row["step"])
        group = count[row["step"]] // group_size
        count[row["step"]] += 1
        if row["step"] % every == 0:
            known = tuple(row.pop(key) for key in PROBLEM)
            number = problems.setdefault(known, len(problems))
            answers.append(row | {"problem": number, "group": group})
    return answers


def read_run(folder: Path, every: int = 1) -> dict:
    """What the page shows of one run, with the answers of every `every`-th step.

    Raises OSError, UserError or Stopped, with a message that names the file.
    """
    flags = read_json(folder / "run.json")
    metrics = [row for row, _ in read_log(folder / "metrics.jsonl")]
    if not metrics:
        raise UserError(f"{folder / 'metrics.jsonl'}: no complete line yet")
    problems = {}
    samples = read_answers(folder / "samples.jsonl", problems, flags["group_size"], every)
    held_out = read_answers(folder / "held_out.jsonl", problems, 1)        # of a few steps anyway
    # The panels' keys first, in their order; then all others that the run has logged.
    evaluated = evaluations(metrics)
    keys = dict.fromkeys(PANELS) | dict.fromkeys(key for row in metrics + evaluated for key in row)
    del keys["step"]
    curves = {}                                  # key -> steps, values, their moving mean
    for key in keys:
        steps, values = series(evaluated if key.startswith("eval_") else metrics, key)
        if steps:
            curves[key] = steps, values, smooth(values, len(values) // 15)
    return {"name": str(folder), "flags": flat(flags), "curves": curves,
            "problems": [dict(zip(PROBLEM, known)) for known in problems],
            "samples": samples, "held_out": held_out}


# -----------------------------------------------------------------------------
# Writing the page

def page(runs: list[dict]) -> str:
    """The HTML of the page for what read_run() gave for each run. UserError if there is more text
    than a browser reads.
    """
    panels = panels_for({key for run in runs for key in run["curves"]})
    data = json.dumps({"panels": panels, "runs": runs}, separators=(",", ":"), allow_nan=False)
    if len(data) > MOST_CHARACTERS:
        raise UserError(f"{len(data) / 1e6:.0f} MB of text are too much for a browser: --every 10 "
                        "keeps the answers of every 10th step")
    # Base64 has none of the characters that end a script element, whatever a model wrote.
    packed = base64.b64encode(gzip.compress(data.encode(), 6, mtime=0)).decode()
    return Path(__file__).with_name("report.html").read_text("utf-8").replace("{DATA}", packed)


def main() -> None:
    parser = argparse.ArgumentParser(
        usage="report RUN [RUN ...] [flags], --help lists them", allow_abbrev=False,
        description="Write an HTML page with the curves, settings and answers of runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, help="page to write (default: report.html in the run; "
                        "for several runs, report-with-y.html in the first)")
    parser.add_argument("--every", type=int, default=1, metavar="N",
                        help="keep the answers of every Nth step only (default: 1)")
    args = parser.parse_args()
    others = "-".join(["-with", *(run.resolve().name for run in args.runs[1:])])
    out = args.out or args.runs[0] / f"report{others if args.runs[1:] else ''}.html"
    with env.one_line("report"):
        if args.every < 1:
            raise UserError(f"--every must be at least 1, got {args.every}")
        if out.suffix != ".html":                # --out runs/x/metrics.jsonl would overwrite it
            raise UserError(f"--out {out}: must end in .html")
        html = page([read_run(run, args.every) for run in args.runs])
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, html.encode())
        print(f"{out}: {len(html) / 1e6:.3g} MB")


if __name__ == "__main__":
    main()
