"""
One HTML page to read runs: their curves, the flags where they differ, and what the model wrote.

    python -m tools.report runs/x [runs/y ...] [--out page.html]

The page is one file that any browser from 2023 on opens without a server and without a network.
It shows the curves of metrics.jsonl, the flags of run.json, and all answers of samples.jsonl in a
table that can be filtered and sorted; a click on an answer shows its problem, the known answer,
the verdict and the advantage. The filter is kept in the page's address, so that a view can be sent
to somebody: page.html#from=40&most=0 shows the wrong answers from step 40 on.

The page is tools/report.html with the data put into it, compressed with gzip: 50,000 answers of
200 random words, which are 79 MB of samples.jsonl, become a page of 31 MB.
"""
import argparse
import base64
import gzip
import json
import math
from pathlib import Path

from harness import process  # isort: skip; before torch
from harness.files import read_json, read_log, write_atomically

MOST_CHARACTERS = 500e6             # Chromium refuses strings of more than 2^29 characters

# The panels of the page, in its order; study/results.py draws the same ones into a picture.
# key in metrics.jsonl -> title, vertical axis: "share" goes from 0 to 1, "log" is logarithmic,
# "free" spans the values. docs/metrics.md defines every key.
PANELS = dict(
    reward=("mean reward of the answers", "free"),
    accuracy=("share of answers that are right", "share"),
    eval_accuracy=("accuracy on held-out problems", "share"),
    informative=("share of groups that teach", "share"),
    truncated=("share of answers that were cut off", "share"),
    length=("length of an answer, tokens", "free"),
    sampler_entropy=("entropy of the sampler, nats a token", "free"),
    entropy=("entropy of the learner where groups teach, nats a token", "free"),
    sigma=("sigma of the noise on the norms", "log"),
    grad_norm=("norm of the gradient before clipping", "free"),
    mismatch_abs=("learner and sampler differ by, mean |log ratio|", "free"),
    kl=("KL to the base model, nats a token", "free"),
    tokens_per_s=("sampled tokens a second", "free"),
)


# -----------------------------------------------------------------------------
# Reading a run

def log_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl or samples.jsonl; ValueError if it has none yet."""
    rows = [row for row, _ in read_log(path)]
    if not rows:
        raise ValueError(f"{path}: no complete line yet")
    return rows


def series(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """One metric's curve: the steps in ascending order, and the value at each.

    Steps without a finite value are left out. A resumed run may have written a step twice; its
    last row counts.
    """
    points = {row["step"]: row[key] for row in rows if isinstance(row.get(key), (int, float))}
    steps = [step for step in sorted(points) if math.isfinite(points[step])]
    return steps, [points[step] for step in steps]


def smooth(values: list[float], window: int) -> list[float]:
    """Centred moving mean. Near the ends it averages what there is, so it does not bend to 0."""
    half = window // 2
    near = [values[max(i - half, 0):i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def flat(flags: dict, prefix: str = "") -> dict:
    """run.json without nesting: {"about": {"commit": "abc"}} becomes {"about.commit": "abc"}."""
    names = {}
    for name, value in flags.items():
        if isinstance(value, dict):
            names |= flat(value, f"{prefix}{name}.")
        else:
            names[prefix + name] = value
    return names


def read_run(folder: Path, every: int = 1) -> dict:
    """What the page shows of one run, with the answers of every `every`-th step.

    Raises OSError, ValueError or Stopped, with a message that names the file.
    """
    path = folder / "samples.jsonl"
    samples = log_rows(path) if path.exists() else []
    for number, row in enumerate(samples, 1):
        for key in ("id", "question", "completion", "rule"):
            if not isinstance(row.get(key), str):
                raise ValueError(f"{path}:{number}: {key} is no text")
    metrics = log_rows(folder / "metrics.jsonl")
    # The panels' keys first, in their order; then all others that the run has logged.
    keys = dict.fromkeys(PANELS) | dict.fromkeys(key for row in metrics for key in row)
    del keys["step"]
    curves = {}                                  # key -> steps, values, their moving mean
    for key in keys:
        steps, values = series(metrics, key)
        if steps:
            curves[key] = steps, values, smooth(values, len(values) // 15)
    return {"name": str(folder), "flags": flat(read_json(folder / "run.json")), "curves": curves,
            "samples": [row for row in samples if row["step"] % every == 0]}


# -----------------------------------------------------------------------------
# Writing the page

def page(runs: list[dict]) -> str:
    """The HTML of the page for what read_run() gave for each run.

    ValueError if a number is not finite, or if there is more text than a browser reads.
    """
    try:
        data = json.dumps({"panels": PANELS, "runs": runs}, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ValueError(f"runs hold a number that JSON lacks: {error}") from None
    if len(data) > MOST_CHARACTERS:
        raise ValueError(f"{len(data) / 1e6:.0f} MB of text are more than a browser reads: --every "
                         "10 keeps the answers of every 10th step")
    # Base64 has none of the characters that end a script element, whatever a model wrote.
    packed = base64.b64encode(gzip.compress(data.encode(), 6, mtime=0)).decode()
    return Path(__file__).with_name("report.html").read_text("utf-8").replace("{DATA}", packed)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(
        "Write one HTML page that shows the curves, flags and answers of runs."))
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py wrote")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the first run)")
    parser.add_argument("--every", type=int, default=1, metavar="N",
                        help="only the answers of every Nth step (default: 1, all of them)")
    args = parser.parse_args()
    out = args.out or args.runs[0] / "report.html"
    with process.one_line("report"):
        if args.every < 1:
            raise ValueError(f"--every must be at least 1, got {args.every}")
        if out.suffix != ".html":                # --out runs/x/metrics.jsonl would overwrite it
            raise ValueError(f"--out {out}: must end in .html")
        html = page([read_run(run, args.every) for run in args.runs])
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, html.encode())
    print(f"{out}: {len(html) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
