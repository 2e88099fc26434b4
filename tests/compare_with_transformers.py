"""
Loads this project's output with PEFT, transformers and compressed-tensors, and compares results. docs/formats.md lists
the figures it printed.

    pip install -r requirements.txt transformers==5.23.0 peft==0.21.2 compressed-tensors==0.20.0 accelerate
    python tests/compare_with_transformers.py MODEL RUN --answers 128

MODEL: a 16-bit Qwen2.5 folder. RUN: a run of train.py on MODEL with --base nvfp4 and without --calibrate.

Everything is computed in fp32 on a CPU from the same weights, so programs differ only by rounding. "without" shows what
a mistake would look like: how much the logits change without the adapter, or without 4-bit rounding.
"""
import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tiny_qwen2 import TARGETS, held_by

from adapters import load_adapter
from loading import load
from prompts import Tokenizer, encode_prompts
from sampler import Sampler, Sampling
from tasks.problems import load_problems


def convert(*arguments):
    """Runs tools.convert as a user would."""
    subprocess.run([sys.executable, "-m", "tools.convert", *map(str, arguments)], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)


def transformers_model(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                **options).eval()


@torch.no_grad()
def compare(name, ours, theirs, texts, without=None):
    """Prints how far two programs' logits differ. Exits if rounding cannot explain it. -> our logits (tokens, V)"""
    tokens = [torch.tensor([text]) for text in texts]
    mine = torch.cat([ours(text)[0] for text in tokens])
    other = torch.cat([theirs(text).logits[0] for text in tokens])
    off = (mine - other).abs().max().item()
    print(f"{name}: logits up to {other.abs().max():.1f} differ by at most {off:.1e}", flush=True)
    if without is not None:
        print(f"    without: {(mine - without).square().mean().sqrt():.1e} (rms)")
    if not off < 1e-5 * other.abs().max():        # tests/helpers.py: FP32
        sys.exit(f"{name}: more than rounding")
    return mine


@torch.no_grad()
def compare_answers(name, ours, theirs, prompts, end_ids, length=48):
    """Prints how many greedy answers are equal token by token."""
    mine = Sampler(ours, max(map(len, prompts)) + length).generate(
        prompts, 1, Sampling(length, tuple(end_ids), temperature=0)).completions
    equal = 0
    for prompt, completion in zip(prompts, mine):
        tokens = torch.tensor([prompt])
        out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=length,
                              repetition_penalty=1.0, eos_token_id=list(end_ids), pad_token_id=end_ids[0])
        equal += out[0, len(prompt):].tolist() == completion
    print(f"{name}: {equal} of {len(prompts)} greedy answers equal, token by token", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--answers", type=int, default=8, help="problems to answer greedily")
    args = parser.parse_args()
    disable_progress_bar()
    tokenizer = Tokenizer(args.model)
    problems = encode_prompts(tokenizer, load_problems("arithmetic", "test"), "boxed")
    prompts = [p.prompt for p in problems[:args.answers]]
    texts = [p.prompt + tokenizer.encode(f"The answer is {p.answer}.") for p in problems[:4]]
    exact = compare("16 bits", load(args.model, base="bf16", device="cpu"), transformers_model(args.model), texts)
    with tempfile.TemporaryDirectory() as scratch:
        folder, merged = Path(scratch, "nvfp4"), Path(scratch, "merged")
        convert("nvfp4", args.model, folder)
        theirs = transformers_model(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
        ours = load(folder, base="nvfp4", device="cpu")
        weights, decoded = theirs.state_dict(), held_by(ours)
        linears = [name for name in decoded if name.removesuffix(".weight").endswith(TARGETS)]
        different = sum((decoded[name] != weights[name]).sum().item() for name in linears)
        print(f"NVFP4: {sum(weights[name].numel() for name in linears):,} weights of linears, {different} differ")
        coded = compare("NVFP4", ours, theirs, texts, exact)

        load_adapter(ours, args.run / "adapter")
        theirs = PeftModel.from_pretrained(theirs, args.run / "adapter")
        compare("adapter in PEFT", ours, theirs, texts, coded)
        compare_answers("adapter in PEFT", ours, theirs, prompts, tokenizer.end_ids)

        convert("merge", args.run, merged)
        ours, theirs = load(merged, base="bf16", device="cpu"), transformers_model(merged)
        compare("merged", ours, theirs, texts, coded)
        compare_answers("merged", ours, theirs, prompts, tokenizer.end_ids)


if __name__ == "__main__":
    main()
