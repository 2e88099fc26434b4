"""
Draws the curves of runs: the panels of tools/report.py as a picture.

    python -m study.curves bf16-s0 bf16-s1 --out curves.png

A run is a name of study/runs (see study/results.py), a folder that train.py wrote, or a .jsonl with
metrics. This needs matplotlib, which is not in requirements.txt; `python -m tools.report` shows the
same curves of any run without it.
"""
import argparse
import colorsys
import io
import math
from pathlib import Path

import env  # isort: skip; its settings come before torch

from files import write_atomically
from study.results import RUNS, metrics_rows
from tools.report import PANELS, series, smooth

# Colours of Okabe and Ito, which colour-blind readers can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def distinct_colours(n: int) -> list:
    """n colours: the seven above, then hues a golden angle apart, light and dark in turn."""
    more = [colorsys.hls_to_rgb(i * 0.618 % 1, (0.35, 0.6)[i % 2], 0.6) for i in range(n)]
    return [*COLOURS, *more][:n]


def draw_curve(axis, steps: list[int], values: list[float], key: str, colour):
    """One run's curve: raw values faint, on top of them a moving mean."""
    if PANELS[key][1] == "share":
        axis.set_ylim(-0.02, 1.02)
    if PANELS[key][1] == "log":
        axis.set_yscale("symlog", linthresh=1e-4)        # plain log cannot show a sigma of 0
        axis.plot(steps, values, color=colour, linewidth=1.3, drawstyle="steps-post")
    elif key == "eval_accuracy":
        axis.plot(steps, values, color=colour, linewidth=1.6, marker="o", markersize=3)
    else:
        axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        axis.plot(steps, smooth(values, len(values) // 15), color=colour, linewidth=1.6)


def draw_panels(runs: dict[str, list[dict]], plt):
    """{name: rows} -> a matplotlib figure with every panel for which some run has values."""
    keys = [key for key in PANELS if any(series(rows, key)[0] for rows in runs.values())]
    if not keys:
        raise ValueError(f"nothing to draw: none of {', '.join(PANELS)} in {', '.join(runs)}")
    colours = distinct_colours(len(runs))
    lines = math.ceil(len(keys) / 4)
    figure, axes = plt.subplots(lines, 4, layout="constrained", squeeze=False,
                                figsize=(14.4, 2.8 * lines + 0.4))
    for axis in axes.flat[len(keys):]:
        axis.set_axis_off()
    for axis, key in zip(axes.flat, keys):
        for rows, colour in zip(runs.values(), colours):
            draw_curve(axis, *series(rows, key), key, colour)
        axis.set_title(PANELS[key][0], fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.set_xlabel("step", fontsize=8)
    handles = [plt.Line2D([], [], color=c, label=name) for name, c in zip(runs, colours)]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=9, frameon=False)
    return figure


def metrics_file(run: str, folder: Path) -> Path:
    """A file, a folder that train.py wrote, or the name of a run in `folder` -> its metrics."""
    if run.endswith(".jsonl"):
        return Path(run)
    named = folder / f"{run}.jsonl"
    return named if named.exists() else Path(run) / "metrics.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(prog="study.curves", description=__doc__.strip(),
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="RUN")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"(default: {RUNS})")
    parser.add_argument("--out", type=Path, required=True, help="a .png, .svg or .pdf")
    args = parser.parse_args()
    with env.one_line("study.curves"):
        if args.out.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--out {args.out}: must end in .png, .svg or .pdf")
        runs = {name: metrics_rows(metrics_file(name, args.runs)) for name in args.names}
        try:
            from matplotlib import pyplot as plt
        except ImportError:
            raise ValueError("curves need pip install matplotlib, which is not in "
                             "requirements.txt") from None
        plt.switch_backend("Agg")                # draws into files, so no display is needed
        drawn = io.BytesIO()
        draw_panels(runs, plt).savefig(drawn, format=args.out.suffix[1:], dpi=150)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, drawn.getvalue())
        print(args.out)


if __name__ == "__main__":
    main()
