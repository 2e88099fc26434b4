"""
A page to read runs: python -m tools.report runs/x [runs/y ...] [--out page.html]

Writes one HTML file, opened in any browser from 2023 on, that asks for no server and no network:
the curves of metrics.jsonl, the flags where the runs differ, and every completion of samples.jsonl
in a table that filters, sorts and opens one with its prompt, gold, verdict and advantage. Its
address keeps the filter: page.html#from=40&most=0 shows the wrong answers since step 40.

The page is tools/report.html with the data in it, gzipped: 50,000 completions of 200 random words,
79 MB of samples.jsonl, are a page of 31 MB.
"""
import argparse
import base64
import gzip
import json
from pathlib import Path

from harness import process  # isort: skip; before torch
from harness.files import read_json
from harness.files import write_atomically
from study.plot import PANELS, rows_of, series, smooth

BROWSER = 500e6                                  # characters in one string, 2^29 in Chromium


def flat(flags, prefix=""):
    """run.json with what lies in its objects under dotted names: about.versions.torch."""
    names = {}
    for name, value in flags.items():
        if isinstance(value, dict):
            names |= flat(value, f"{prefix}{name}.")
        else:
            names[prefix + name] = value
    return names


def read_run(folder, every=1):
    """A run's folder -> what the page knows of it: completions of every so many steps.

    OSError or ValueError names a bad file.
    """
    path = folder / "samples.jsonl"
    samples = rows_of(path) if path.exists() else []
    for number, row in enumerate(samples, 1):
        for key in ("id", "question", "completion", "rule"):
            if not isinstance(row.get(key), str):
                raise ValueError(f"{path}:{number}: {key} is no text")
    metrics = rows_of(folder / "metrics.jsonl")
    keys = dict.fromkeys(PANELS) | dict.fromkeys(key for row in metrics for key in row)
    del keys["step"]
    curves = {}                                  # steps, values and their moving mean, in this order
    for key in keys:
        steps, values = series(metrics, key)
        if steps:
            curves[key] = steps, values, smooth(values, len(values) // 15)
    return {"name": str(folder), "flags": flat(read_json(folder / "run.json")), "curves": curves,
            "samples": [row for row in samples if row["step"] % every == 0]}


def page(runs):
    """Of read_run() of each -> the HTML. ValueError for a number that JSON lacks."""
    try:
        data = json.dumps({"panels": PANELS, "runs": runs}, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ValueError(f"runs hold a number that JSON lacks: {error}") from None
    if len(data) > BROWSER:
        raise ValueError(f"{len(data) / 1e6:.0f} MB of text are more than a browser reads: --every "
                         "10 keeps the completions of every 10th step")
    packed = base64.b64encode(gzip.compress(data.encode(), 6, mtime=0)).decode()
    return Path(__file__).with_name("report.html").read_text("utf-8").replace("{DATA}", packed)


def main():
    parser = argparse.ArgumentParser(description="One HTML page of runs.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py wrote")
    parser.add_argument("--out", type=Path, help="the page (default: RUN/report.html)")
    parser.add_argument("--every", type=int, default=1, help="completions of every so many steps")
    args = parser.parse_args()
    out = args.out or args.runs[0] / "report.html"
    with process.one_line("report"):
        if args.every < 1:
            raise ValueError(f"--every must be at least 1, got {args.every}")
        if out.suffix != ".html":                # not --out runs/x/metrics.jsonl
            raise ValueError(f"--out {out}: must end in .html")
        html = page([read_run(run, args.every) for run in args.runs])
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, html.encode())
    print(f"{out}: {len(html) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
