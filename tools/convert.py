"""
A trained run as an ordinary model: python merge.py runs/x OUT

Adds the run's adapter to the weights it was trained on, 4-bit ones decoded, and writes a bf16 Hugging Face folder that
any engine loads: python evaluate.py --model OUT --base bf16 measures it. Weights are rounded to bf16 once more, so
log-probs move a little and greedy answers may part where two tokens were nearly tied. lm_head is the checkpoint's own,
also of a run with --head nvfp4.

Another adapter than the run's own: lora.load_adapter and lora.merge are the two calls. Not here: merging into 4 bits
(python nvfp4.py does that to the result, and its rounding error is larger than most adapters).
"""
import argparse
import json
import sys
from pathlib import Path

import lora
import model as qwen


def main():
    parser = argparse.ArgumentParser(description="Write a run's model with its adapter merged, as a bf16 folder.")
    parser.add_argument("run", type=Path, help="folder that train.py wrote")
    parser.add_argument("out", type=Path, help="folder to make; must not exist, or be empty")
    args = parser.parse_args()
    try:
        flags = json.loads((args.run / "run.json").read_text())
        if args.out.exists() and any(args.out.iterdir()):
            raise ValueError(f"{args.out}: exists and is not an empty folder")
        model = qwen.load(flags["model"], flags["base"])
        lora.load_adapter(model, args.run / "adapter")
        lora.merge(model, args.out)
    except (ValueError, OSError) as error:
        sys.exit(f"merge.py: {str(error).splitlines()[0]}")
    print(f"{args.out}: {flags['model']} as {flags['base']}, with {args.run / 'adapter'}, in bf16")


if __name__ == "__main__":
    main()
