"""
Draws what training gave: the accuracy of each arm before and after training, with 95 % intervals.

    python -m study.bars "bf16=16 bits" "nearest=NVFP4, rounded to nearest" --out bars.svg

An arm is a name of study/runs (see study/results.py); what follows `=` is written beside its line.
The intervals answer the same question as those of `study.results tables`: where would this accuracy
lie with other seeds and other problems? Two arms can differ although their intervals overlap: both
answer the same problems, so their difference varies less. `study.results tables` prints the
intervals of differences.

The picture is plain SVG, so nothing beyond requirements.txt is needed.
"""
import argparse
from html import escape
from pathlib import Path
from typing import NamedTuple

import env  # isort: skip; its settings come before torch

from files import write_atomically
from study.results import RUNS, Arm, difference_interval, pool

WIDTH = 760                                      # of the picture
LEFT, RIGHT = 300, 730                           # where the axis begins and ends
TOP, LINE = 64, 46                               # above the first arm; from one arm to the next
GREY, BLUE, INK = "#8a8a8a", "#2f6db5", "#222222"


class Bar(NamedTuple):
    """One arm, in shares of right answers. half: half the width of the 95 % interval of `after`."""
    label: str
    before: float
    after: float
    half: float
    seeds: int


def bar_of(arm: Arm, label: str, kind: str, folder: Path) -> Bar:
    """kind: greedy or sampled. folder: the runs from which it is known how much seeds differ."""
    verdicts = getattr(arm, kind)
    if verdicts is None:
        raise ValueError(f"{arm.name}: has no answers at temperature 1 in sampled.json")
    spread = pool(folder, kind, verdicts.after.shape[1])
    mean, half = difference_interval(verdicts.after, spread, 1)
    return Bar(label, float(verdicts.before.mean()), mean, half, len(arm.seeds))


def picture(title: str, bars: list[Bar]) -> str:
    """-> SVG. An open circle is the accuracy before, a full one after training."""
    lowest = min(min(bar.before, bar.after - bar.half) for bar in bars)
    highest = max(max(bar.before, bar.after + bar.half) for bar in bars)
    first, last = int(lowest * 20) * 5, -int(-highest * 20 // 1) * 5         # per cent, in fives
    bottom = TOP + LINE * len(bars) - 14

    def x(share):
        return f"{LEFT + (100 * share - first) / (last - first) * (RIGHT - LEFT):.1f}"

    def text(at, y, words, fill=INK, size=14, anchor="start", weight="normal"):
        return (f'<text x="{at}" y="{y}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" '
                f'font-weight="{weight}">{escape(words)}</text>')

    def line(x1, y1, x2, y2, stroke, width):
        return (f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{stroke}" '
                f'stroke-width="{width}"/>')

    described = "; ".join(f"{bar.label}: {100 * bar.before:.1f} before, {100 * bar.after:.1f} "
                          f"after, plus or minus {100 * bar.half:.1f}" for bar in bars)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 56}" '
             f'width="{WIDTH}" height="{bottom + 56}" font-family="Helvetica, Arial, sans-serif" '
             f'role="img">', f"<title>{escape(title)}</title>", f"<desc>{escape(described)}</desc>",
             f'<rect width="{WIDTH}" height="{bottom + 56}" fill="white"/>',
             text(16, 28, title, size=16, weight="bold")]
    for mark in range(first, last + 1, 5):
        at = x(mark / 100)
        parts += [line(at, TOP - 18, at, bottom, "#dddddd", 1),
                  text(at, bottom + 18, f"{mark} %", GREY, 12, "middle")]
    for number, bar in enumerate(bars):
        y = TOP + LINE * number
        ends = x(bar.after - bar.half), x(bar.after + bar.half)
        parts += [text(16, y + 5, bar.label), line(x(bar.before), y, x(bar.after), y, "#cccccc", 2),
                  line(ends[0], y, ends[1], y, BLUE, 4),
                  f'<circle cx="{x(bar.before)}" cy="{y}" r="5" fill="white" stroke="{GREY}" '
                  f'stroke-width="2"/>',
                  f'<circle cx="{x(bar.after)}" cy="{y}" r="6" fill="{BLUE}"/>',
                  text(x(bar.before), y - 11, f"{100 * bar.before:.1f}", GREY, 12, "middle"),
                  text(x(bar.after), y - 11, f"{100 * bar.after:.1f}", BLUE, 13, "middle", "bold")]
    counts = [bar.seeds for bar in bars]
    runs = "-".join(map(str, sorted({min(counts), max(counts)})))            # "3", or "2-3"
    parts += [text(16, bottom + 42, f"open: before training; full: after it, mean of {runs} runs "
                   "each; thick line: 95 % interval over seeds and problems", GREY, 12), "</svg>"]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="study.bars", description=__doc__.strip(),
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="ARM=LABEL")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"(default: {RUNS})")
    parser.add_argument("--kind", choices=("greedy", "sampled"), default="greedy",
                        help="greedy answers to the test problems, or 8 at temperature 1 to each "
                        "(default: greedy)")
    parser.add_argument("--title", default="Right answers to the test of GSM8K",
                        help="above the picture (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="an .svg")
    args = parser.parse_args()
    with env.one_line("study.bars"):
        if args.out.suffix != ".svg":
            raise ValueError(f"--out {args.out}: must end in .svg")
        named = [word.partition("=") for word in args.arms]
        bars = [bar_of(Arm(args.runs, name), label or name, args.kind, args.runs)
                for name, _, label in named]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, picture(args.title, bars).encode())
        print(args.out)


if __name__ == "__main__":
    main()
