"""
Curves of one or several runs, one figure: python plot.py runs/x [runs/y ...] [--out curves.svg]

Reads <run>/metrics.jsonl, one JSON object a step, written by train.py; the README defines every number. One panel a
metric, one colour a run: the raw values faint, on top of them a centred moving mean over a fifteenth of the run. Drawn
as they are: held-out accuracy, which is sparse, and sigma and mismatch, which move in stages. A metric that no run has
gets no panel.

matplotlib draws it and is not in requirements.txt: pip install matplotlib.
"""
import argparse
import json
import math
import sys
from pathlib import Path

PANELS = dict(  # key in metrics.jsonl -> title, logarithmic axis
    reward=("reward, mean of the rollouts", False),
    accuracy=("share of correct rollouts", False),
    eval_accuracy=("held-out accuracy", False),
    entropy=("entropy, nats a token", False),
    sigma=("sigma of the norm noise", True),
    length=("completion length, tokens", False),
    mismatch_abs=("sampler against learner, mean |log r|", True),
    tokens_per_s=("sampled tokens a second", False),
)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito: colour-blind safe
FORMATS = (".png", ".svg", ".pdf")


def read_jsonl(path):
    """Lines of a JSONL file -> dicts. A last line cut off by a killed run is dropped, any other bad line stops."""
    if not path.is_file():
        sys.exit(f"{path}: no such file; expected the folder of a run of train.py")
    # Not splitlines(): it also splits at U+2028 and others, which JSON leaves unescaped inside a completion.
    rows, lines = [], path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            sys.exit(f"{path}, line {number}: not JSON ({error.msg})")
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            sys.exit(f"{path}, line {number}: not an object with a whole step")
        rows.append(row)
    if not rows:
        sys.exit(f"{path}: no complete line yet")
    return rows


def series(rows, key):
    """Rows -> steps and values of one metric, ascending. Of a step written twice (resumed run) the last counts."""
    points = {row["step"]: row[key] for row in rows if isinstance(row.get(key), (int, float))}
    points = {step: value for step, value in points.items() if math.isfinite(value)}
    return sorted(points), [points[step] for step in sorted(points)]


def smooth(values, window):
    """Centred moving mean; near the ends over the values there are, so that it neither lags nor bends to 0."""
    half, out = window // 2, []
    for i in range(len(values)):
        near = values[max(i - half, 0):i + half + 1]
        out.append(sum(near) / len(near))
    return out


def draw(axis, steps, values, key, colour):
    """One run's line in one panel."""
    if PANELS[key][1]:
        if any(v > 0 for v in values):                                    # a run without noise stays at 0, linear
            axis.set_yscale("log")
            values = [v if v > 0 else math.nan for v in values]           # sigma is 0 in the first stage: a gap
        axis.plot(steps, values, color=colour, linewidth=1.3, drawstyle="steps-post")
    elif key == "eval_accuracy":
        axis.plot(steps, values, color=colour, linewidth=1.6, marker="o", markersize=3)
    else:
        axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        axis.plot(steps, smooth(values, len(values) // 15), color=colour, linewidth=1.6)


def figure(runs, plt):
    """{name: rows} -> matplotlib figure of every panel that some run has values for."""
    keys = [key for key in PANELS if any(series(rows, key)[0] for rows in runs.values())]
    if not keys:
        sys.exit(f"nothing to draw: none of {', '.join(PANELS)} in {', '.join(runs)}")
    columns = min(len(keys), 4)
    fig, axes = plt.subplots(math.ceil(len(keys) / columns), columns, squeeze=False, layout="constrained",
                             figsize=(3.6 * columns, 2.7 * math.ceil(len(keys) / columns) + 0.4))
    for axis in axes.flat[len(keys):]:
        axis.set_axis_off()
    last = max(row["step"] for rows in runs.values() for row in rows)     # one x axis for all: panels can be compared
    for axis, key in zip(axes.flat, keys):
        for n, rows in enumerate(runs.values()):
            draw(axis, *series(rows, key), key, COLOURS[n % len(COLOURS)])
        axis.set_title(PANELS[key][0], fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.tick_params(which="both", labelsize=8)
        axis.set_xlim(-0.02 * last - 0.5, 1.02 * last + 0.5)
        axis.set_xlabel("step", fontsize=8)
    handles = [plt.Line2D([], [], color=COLOURS[n % len(COLOURS)], label=name) for n, name in enumerate(runs)]
    fig.legend(handles=handles, loc="outside upper left", ncols=min(len(runs), 4), fontsize=9, frameon=False)
    return fig


def main():
    parser = argparse.ArgumentParser(description="Draw the curves of one or several runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py wrote")
    parser.add_argument("--out", type=Path, help=".png, .svg or .pdf to write; default: curves.png in the first run")
    args = parser.parse_args()
    out = args.out or args.runs[0] / "curves.png"
    if out.suffix.lower() not in FORMATS:
        sys.exit(f"--out {out}: must end in one of {' '.join(FORMATS)}")
    short = len({run.resolve().name for run in args.runs}) == len(args.runs)
    runs = {run.resolve().name if short else str(run): read_jsonl(run / "metrics.jsonl") for run in args.runs}
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot.py needs matplotlib, which requirements.txt leaves out: pip install matplotlib")
    matplotlib.use("Agg")                                                 # files only: no display needed
    from matplotlib import pyplot as plt
    fig = figure(runs, plt)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(out, dpi=150)
    except OSError as error:
        sys.exit(f"--out {out}: {error}")
    print(out)


if __name__ == "__main__":
    main()
