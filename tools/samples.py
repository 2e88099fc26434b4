"""
What the model wrote: python -m tools.samples runs/x [--step 40] [--max-reward 0] [--rule NAME]

Reads <run>/samples.jsonl, one JSON object a completion, and prints the latest that pass every
filter, oldest first. Reading ten of these after a jump of the reward shows whether the model
learnt the maths, the format, or a hole in the grader.
"""
import argparse
import shutil
import signal
import sys
import textwrap
from pathlib import Path

from tools.plot import read_log


KEYS = ("step", "id", "question", "completion", "answer", "extracted", "rule", "reward", "correct",
        "format", "advantage", "length", "finished", "mean_logprob")


def printable(text):
    """Safe for a terminal: control characters, escape codes too, are shown, not obeyed."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def block(text, width):
    """Wrapped to the width behind a bar; blank lines and indentation stay."""
    lines = []
    for line in printable(text).strip("\n").split("\n"):
        wrapped = textwrap.wrap(line, width - 4, drop_whitespace=False, break_on_hyphens=False)
        lines += wrapped or [""]
    return "\n".join("  | " + line.rstrip() for line in lines)


def show(sample, width):
    """One record of samples.jsonl -> the text to print."""
    parts = [f"step {sample['step']}", f"problem {sample['id']}",
             f"reward {sample['reward']:.2f}", f"advantage {sample['advantage']:+.2f}",
             "right" if sample["correct"] else "wrong",
             "format kept" if sample["format"] else "format broken", f"rule {sample['rule']}",
             f"{sample['length']} tokens" + ("" if sample["finished"] else ", cut off"),
             f"mean log-prob {sample['mean_logprob']:.3f}"]
    head = textwrap.fill(" · ".join(parts), width, break_long_words=False)
    return "\n".join([
        "-" * width, printable(head), "  question", block(sample["question"], width),
        "  completion", block(sample["completion"], width),
        f"  extracted {printable(sample['extracted'])}, gold {printable(sample['answer'])}"])


def select(samples, step=None, min_reward=None, max_reward=None, rule=None):
    """The samples that pass every given filter; step -1 is the last one, -2 the one before it."""
    steps = sorted({s["step"] for s in samples})
    if step is not None and -len(steps) <= step < 0:
        step = steps[step]
    return [s for s in samples
            if (step is None or s["step"] == step)
            and (min_reward is None or s["reward"] >= min_reward)
            and (max_reward is None or s["reward"] <= max_reward)
            and (rule is None or str(s["rule"]) == rule)]


def main():
    parser = argparse.ArgumentParser(description="Print completions.", allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="folder that train.py wrote")
    add("--step", type=int, help="only this step; -1 is the last one")
    add("--min-reward", type=float, help="only rewards of at least this")
    add("--max-reward", type=float, help="only rewards of at most this")
    add("--rule", help="only verdicts that this rule of the grader gave")
    add("--n", type=int, default=5, help="how many completions, the latest ones")
    args = parser.parse_args()
    if args.n < 1:
        sys.exit(f"--n {args.n}: must be at least 1")
    path = args.run / "samples.jsonl"
    samples = read_log(path)
    for number, sample in enumerate(samples, 1):
        missing = [key for key in KEYS if key not in sample]
        if missing:
            sys.exit(f"{path}, line {number}: without {', '.join(missing)}")
    found = select(samples, args.step, args.min_reward, args.max_reward, args.rule)
    if not found:
        rules = sorted({str(s["rule"]) for s in samples})
        sys.exit(f"{path}: none of {len(samples)} completions passes; steps "
                 f"{samples[0]['step']} to {samples[-1]['step']}, rules {', '.join(rules)}")
    width = max(20, min(shutil.get_terminal_size((100, 24)).columns, 120))
    for sample in found[-args.n:]:
        print(show(sample, width))
    print("-" * width)
    print(f"{min(args.n, len(found))} of {len(found)} that pass, of {len(samples)} in {path}")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):               # `| head` ends it quietly; not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
