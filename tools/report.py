"""
Write an HTML page about runs: curves, settings, and every answer that the model wrote.

    python -m tools.report runs/x                writes runs/x/report.html
    python -m tools.report runs/x runs/y         compares two: writes runs/x/report-with-y.html

The page is a single file that opens offline in any browser released since 2023:

    curves       from metrics.jsonl; click one to see the answers of that step
    flags        from run.json, where the runs differ
    answers      from samples.jsonl and held_out.jsonl, filtered by step, verdict or text; open one
                 to see the prompt, the text and everything that was logged

Text from models and data sets is always shown as text, never as HTML. The page is
tools/report.html with gzipped data inside.
"""
import base64
import gzip
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))            # for python tools/report.py
import env  # isort: skip; its settings come before torch

from files import UserError, read_log, read_run_json, tell_unfinished, write_atomically

MOST_CHARACTERS = 500e6             # Chromium rejects strings of more than 2^29 characters

# The page's panels, in order: key in metrics.jsonl -> title, limits of the vertical axis (None: it
# spans the values). Other keys come below them. docs/metrics.md defines every key.
PANELS = dict(
    reward=("mean reward", None),
    accuracy=("share of right answers", [0, 1]),
    eval_accuracy=("accuracy on held-out problems", [0, 1]),
    eval_reward=("mean --reward on held-out problems", None),
    informative=("share of groups with different rewards", [0, 1]),
    truncated=("share of answers cut off", [0, 1]),
    length=("mean length of answers, tokens", None),
    sampler_entropy=("sampler entropy, nats per token", None),
    entropy=("learner entropy on trained tokens, nats per token", None),
    sigma=("sigma of the noise on the norms", None),
    grad_norm=("gradient norm before clipping", None),
    rollout_logp_diff=("learner against rollout, mean |log ratio|", None),
    kl=("KL to the base model, nats per token", None),
    tokens_per_s=("sampled tokens per second", None),
)


# -----------------------------------------------------------------------------
# Reading a run

def series(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """One metric's curve: the steps in ascending order, and the value at each.

    Steps without a value are left out.
    """
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: list[float], window: int) -> list[float]:
    """Centered moving mean. Near the ends it averages what there is, so it doesn't drop to 0."""
    half = window // 2
    near = [values[max(i - half, 0):i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def evaluations(rows: list[dict]) -> list[dict]:
    """The evaluation figures in the rows of metrics.jsonl, each in a row of its own, sorted by
    `step`, which here is the number of steps done (0 before training).
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


def read_answers(path: Path, every: int = 1) -> list[dict]:
    """The rows of samples.jsonl or held_out.jsonl for every `every`-th step; [] without the file.

    For held_out.jsonl, `step` becomes the number of steps done, as in evaluations().
    """
    answers = []
    for row, _ in read_log(path) if path.exists() else ():
        row["step"] = row.pop("steps_done", row["step"])
        if row["step"] % every == 0:
            answers.append(row)
    return answers


def read_run(folder: Path, every: int = 1) -> dict:
    """What the page shows about one run, with the sampled answers of every `every`-th step.

    Raises OSError or UserError, with a message that names the file.
    """
    flags = read_run_json(folder)
    tell_unfinished(folder, flags.get("steps", 0))
    metrics = [row for row, _ in read_log(folder / "metrics.jsonl")]
    if not metrics:
        raise UserError(f"{folder / 'metrics.jsonl'}: no complete line yet")
    evaluated = evaluations(metrics)
    curves = {}                                  # key -> steps, values, their moving mean
    for key in dict.fromkeys(key for row in metrics + evaluated for key in row if key != "step"):
        steps, values = series(evaluated if key.startswith("eval_") else metrics, key)
        if steps and (key != "sigma" or any(values)):        # 0: a run without noise
            curves[key] = steps, values, smooth(values, len(values) // 15)
    answers = {"training": read_answers(folder / "samples.jsonl", every),
               "evaluations": read_answers(folder / "held_out.jsonl")}       # few steps have any
    return {"name": str(folder), "flags": flat(flags), "curves": curves, "answers": answers}


# -----------------------------------------------------------------------------
# Writing the page

def page(runs: list[dict]) -> str:
    """The page's HTML, from what read_run() returned for each run. UserError if there is more text
    than a browser can read.
    """
    data = json.dumps({"panels": PANELS, "runs": runs}, separators=(",", ":"), allow_nan=False)
    if len(data) > MOST_CHARACTERS:
        raise UserError(f"{len(data) / 1e6:.0f} MB of text is too much for a browser: --every 10 "
                        "keeps only the answers of every 10th step")
    # Whatever a model wrote, Base64 has none of the characters that end a script element.
    packed = base64.b64encode(gzip.compress(data.encode(), 6, mtime=0)).decode()
    return Path(__file__).with_name("report.html").read_text("utf-8").replace("{DATA}", packed)


def main() -> None:
    parser = env.parser("RUN [RUN ...] [flags]", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, help="page to write (default: report.html in the run; "
                        "for several runs, report-with-y.html in the first)")
    parser.add_argument("--every", type=int, default=1, metavar="N",
                        help="keep only the answers of every Nth step (default: 1)")
    args = parser.parse_args()
    others = [run.resolve().name for run in args.runs[1:]]
    name = "-".join(["report-with", *others]) if others else "report"
    out = args.out or args.runs[0] / f"{name}.html"
    with env.one_line():
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
