"""
Loads this project's output with PEFT, transformers and compressed-tensors, and compares results. docs/formats.md lists
the figures it printed.

    pip install -r requirements.txt transformers==5.23.0 peft==0.21.2 compressed-tensors==0.20.0 accelerate
    python tests/compare_with_transformers.py MODEL RUN --answers 128

MODEL: a 16-bit Qwen2.5 folder. RUN: a run of train.py on MODEL with --base nvfp4 and without --calibrate.

Everything is computed in fp32 on a CPU from the same weights, so programs differ only by rounding. tiny_qwen2.py
computes the same logits in float64. Our root mean square distance from them may be at most twice transformers'. "left
out" shows what a mistake would look like: how much the logits change without the adapter, or without 4-bit rounding.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tiny_qwen2 import TARGETS, merged, plain_logits

from adapters import load_adapter
from loading import load
from prompts import Tokenizer, encode_prompts
from sampler import Sampler, Sampling
from tasks.problems import load_problems

TEXTS = 4                                         # problems whose logits are compared


def convert(*arguments):
    """Runs tools.convert as a user would."""
    subprocess.run([sys.executable, "-m", "tools.convert", *map(str, arguments)], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)


def transformers_model(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                **options).eval()


def weights_of(model):
    """A transformers model's tensors by their names in a checkpoint, without a tied lm_head."""
    tied = model.config.tie_word_embeddings
    return {name: t.detach() for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}


@torch.no_grad()
def logits_of(model, texts):
    """Logits of all texts, computed one text at a time: (total tokens, V) fp32."""
    outputs = [model(torch.tensor([text])) for text in texts]
    return torch.cat([getattr(out, "logits", out)[0].float() for out in outputs])


def compare(name, ours, theirs, exact, without=None):
    """Prints how far two programs' logits differ. Exits if rounding cannot explain it."""
    error, their_error = ((t - exact).square().mean().sqrt().item() for t in (ours, theirs))
    line = (f"{name}: logits up to {exact.abs().max():.1f}; ours and theirs at most {(ours - theirs).abs().max():.1e} "
            f"apart; root mean square distance from float64 {error:.1e}, theirs {their_error:.1e}")
    if without is not None:
        line += f"; left out: {(ours - without).square().mean().sqrt():.1e}"
    print(line, flush=True)
    if not error <= 2 * their_error:
        sys.exit(f"{name}: more than rounding")


@torch.no_grad()
def compare_answers(name, ours, theirs, prompts, end_ids, length):
    """Prints how many greedy answers of our sampler equal those of transformers' generate()."""
    sampler = Sampler(ours, max_length=max(map(len, prompts)) + length, kv_gib=1)
    mine = sampler.generate(prompts, 1, Sampling(length, tuple(end_ids), temperature=0)).completions
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
    raw = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    problems = encode_prompts(tokenizer, load_problems("arithmetic", "test"), "boxed")
    prompts = [p.prompt for p in problems[:max(args.answers, TEXTS)]]
    texts = [p.prompt + tokenizer.encode(f"The answer is {p.answer}.") for p in problems[:TEXTS]]
    adapter = load_file(args.run / "adapter/adapter_model.safetensors")
    settings = json.loads((args.run / "adapter/adapter_config.json").read_text(encoding="utf-8"))

    def exact_logits(tensors):
        return torch.cat([plain_logits(raw, tensors, torch.tensor(text)) for text in texts])

    theirs = transformers_model(args.model)
    ours = load(args.model, base="bf16", device="cpu")
    sixteen_bits = logits_of(ours, texts)
    compare("16 bits", sixteen_bits, logits_of(theirs, texts), exact_logits(weights_of(theirs)))

    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        convert("nvfp4", args.model, scratch / "nvfp4")
        theirs = transformers_model(scratch / "nvfp4", quantization_config=CompressedTensorsConfig(dequantize=True))
        ours = load(scratch / "nvfp4", base="nvfp4", device="cpu")
        weights = weights_of(theirs)
        linears = {f"model.layers.{i}.{name}.weight" for i in range(raw["num_hidden_layers"]) for name in TARGETS}
        decoded = {}
        for layer in ours.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                w = torch.empty(linear.weight.N, linear.weight.K)
                linear.weight.dequantize(out=w)
                decoded |= zip([f"{name}.weight" for name in linear.names], w.split(linear.parts))
        different = sum((decoded[name] != weights[name]).sum().item() for name in linears)
        print(f"NVFP4: {sum(weights[name].numel() for name in linears):,} weights of linears, {different} differ")
        exact = exact_logits(weights)
        four_bits = logits_of(ours, texts)
        compare("NVFP4, expanded", four_bits, logits_of(theirs, texts), exact, without=sixteen_bits)

        # A run that starts from 16-bit files has the codes that `convert nvfp4` writes.
        ours = load(args.model, base="nvfp4", device="cpu")
        load_adapter(ours, args.run / "adapter")
        theirs = PeftModel.from_pretrained(theirs, args.run / "adapter")
        exact = exact_logits(merged(weights, adapter, settings["lora_alpha"] / settings["r"]))
        compare("adapter in PEFT", logits_of(ours, texts), logits_of(theirs, texts), exact, without=four_bits)
        compare_answers("adapter in PEFT", ours, theirs, prompts, tokenizer.end_ids, 48)

        convert("merge", args.run, scratch / "merged")
        theirs = transformers_model(scratch / "merged")
        ours = load(scratch / "merged", base="bf16", device="cpu")
        compare("merged", logits_of(ours, texts), logits_of(theirs, texts), exact_logits(weights_of(theirs)),
                without=four_bits)
        compare_answers("merged", ours, theirs, prompts, tokenizer.end_ids, 48)


if __name__ == "__main__":
    main()
