"""
Curves of one or several runs: python -m study.plot runs/x [runs/y ...] [--out curves.svg]

Reads <run>/metrics.jsonl, or such a file of any name; docs/metrics.md defines every number. One
panel a metric, one colour a run: raw values faint, on top of them a moving mean. A metric that no
run has gets no panel. Needs matplotlib, which is not in requirements.txt.
"""
import argparse
import colorsys
import math
from pathlib import Path

from harness import process  # isort: skip; before torch
from harness.files import read_log

PANELS = dict(                                   # key -> title, axis: 0..1, logarithmic from 1e-4 on, free
    reward=("reward, mean of the rollouts", "free"),
    accuracy=("share of correct rollouts", "share"),
    eval_accuracy=("held-out accuracy", "share"),
    informative=("share of groups that teach", "share"),
    truncated=("share of rollouts cut off", "share"),
    length=("completion length, tokens", "free"),
    entropy=("entropy, nats a token", "free"),
    sigma=("sigma of the norm noise", "log"),
    grad_norm=("gradient norm before clipping", "free"),
    mismatch_abs=("sampler against learner, mean |log r|", "free"),
    kl=("KL to the base, nats a token", "free"),
    tokens_per_s=("sampled tokens a second", "free"),
)
# Okabe-Ito: safe for the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def rows_of(path):
    """-> the objects of metrics.jsonl or samples.jsonl; ValueError if there are none yet."""
    rows = [row for row, _ in read_log(path)]
    if not rows:
        raise ValueError(f"{path}: no complete line yet")
    return rows


def series(rows, key):
    """-> steps, ascending, and values of one metric. Of a step written twice the last counts."""
    points = {row["step"]: row[key] for row in rows if isinstance(row.get(key), (int, float))}
    steps = [step for step in sorted(points) if math.isfinite(points[step])]
    return steps, [points[step] for step in steps]


def smooth(values, window):
    """Centred moving mean, near the ends over what there is: it neither lags nor bends to 0."""
    half = window // 2
    near = [values[max(i - half, 0):i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def colours_of(n):
    """n colours: Okabe-Ito's, then hues a golden angle apart, light and dark in turn."""
    more = [colorsys.hls_to_rgb(i * 0.618 % 1, (0.35, 0.6)[i % 2], 0.6) for i in range(n)]
    return [*COLOURS, *more][:n]


def draw(axis, steps, values, key, colour):
    if PANELS[key][1] == "share":
        axis.set_ylim(-0.02, 1.02)
    if PANELS[key][1] == "log":
        axis.set_yscale("symlog", linthresh=1e-4)        # the first stage, or all of a run, may be 0
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
        raise ValueError(f"nothing to draw: none of {', '.join(PANELS)} in {', '.join(runs)}")
    colours = colours_of(len(runs))
    fig, axes = plt.subplots(3, 4, layout="constrained", figsize=(14.4, 8.6))
    for axis in axes.flat[len(keys):]:
        axis.set_axis_off()
    for axis, key in zip(axes.flat, keys):
        for rows, colour in zip(runs.values(), colours):
            draw(axis, *series(rows, key), key, colour)
        axis.set_title(PANELS[key][0], fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.set_xlabel("step", fontsize=8)
    handles = [plt.Line2D([], [], color=c, label=name) for name, c in zip(runs, colours)]
    fig.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=9, frameon=False)
    return fig


def main():
    parser = argparse.ArgumentParser(description="Draw the curves of runs.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train.py wrote, or their metrics.jsonl")
    parser.add_argument("--out", type=Path, help=".png, .svg or .pdf (default: RUN/curves.png)")
    args = parser.parse_args()
    logs = [run if run.suffix == ".jsonl" else run / "metrics.jsonl" for run in args.runs]
    out = args.out or logs[0].parent / "curves.png"
    with process.one_line("plot"):
        if out.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--out {out}: must end in .png, .svg or .pdf")
        runs = {str(run): rows_of(log) for run, log in zip(args.runs, logs)}
        try:
            from matplotlib import pyplot as plt
        except ImportError:
            raise ValueError("needs pip install matplotlib, not in requirements.txt") from None
        plt.switch_backend("Agg")                # files only: no display needed
        fig = figure(runs, plt)
        out.parent.mkdir(parents=True, exist_ok=True)
        new = out.with_name(f".{out.name}{out.suffix}")          # a full disk leaves the old curves
        fig.savefig(new, dpi=150)
        new.replace(out)
    print(out)


if __name__ == "__main__":
    main()
