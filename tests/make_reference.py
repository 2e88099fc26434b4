"""
Writes qwen2_reference.safetensors, peft_adapter/, peft_adapter_qwen3/ and qwen3_config.json with transformers and PEFT,
from tiny_qwen2.py's checkpoints and a real one, for test_model.py, test_lora.py and test_peft.py.

    pip install -r requirements.txt transformers==5.23.0 peft==0.21.2
    python tests/make_reference.py [FOLDER]      FOLDER: Qwen2.5-Coder-0.5B-Instruct; without it, its numbers are kept

The project and its tests need neither package. Everything is computed in fp32. The file contains, for every tiny shape,
a checksum of its weights, tokens (2, T) and logits (2, T, V); for "tied" and "qwen3-tied" also the logits of
    ours_in_peft    the folder that save_adapter wrote, loaded by PEFT
    peft_adapter    an adapter that PEFT made, saved to peft_adapter/ or peft_adapter_qwen3/
For the real model it contains the tokens (T,) of one text, the logits (T, C) of C columns and the T - 1 next tokens'
log-probs. qwen3_config.json is from a Qwen3 folder that transformers wrote.
"""
import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny_qwen2 import SHAPES, TARGETS, config_json, random_adapter, random_tensors, set_adapter, write_folder

from adapters import save_adapter
from loading import load
from lora import attach

HERE = Path(__file__).parent
PEFT_FOLDERS = {"tied": "peft_adapter", "qwen3-tied": "peft_adapter_qwen3"}
TEXT = ("<|im_start|>user\nA box holds 12 rows of 7 pens. How many pens are in 3 boxes?<|im_end|>\n"
        "<|im_start|>assistant\nOne box holds 12 * 7 = 84 pens, so 3 boxes hold 3 * 84 = 252 pens.<|im_end|>")


def transformers_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def tiny_cases(scratch):
    for shape in SHAPES:
        raw = config_json(shape)
        tensors = random_tensors(raw)
        folder = write_folder(scratch / shape, raw, tensors)
        tokens = torch.randint(raw["vocab_size"], (2, 19), generator=torch.Generator().manual_seed(1))
        yield f"{shape}.checksum", sum(t.double().abs().sum() for t in tensors.values())
        yield f"{shape}.tokens", tokens
        theirs = transformers_model(folder)
        yield f"{shape}.logits", theirs(tokens).logits
        written = scratch / f"{shape}-written"
        theirs.save_pretrained(written)
        off = (load(written, base="bf16", device="cpu")(tokens) - theirs(tokens).logits).abs().max().item()
        print(f"{shape}, the folder that transformers wrote: logits differ by at most", off)
        if shape == "qwen3-tied":
            shutil.copy(written / "config.json", HERE / "qwen3_config.json")
        if shape not in PEFT_FOLDERS:
            continue
        ours = load(folder, base="bf16", device="cpu")
        attach(ours, rank=4, alpha=6)
        set_adapter(ours, random_adapter(raw, 4, seed=2))
        save_adapter(ours, scratch / f"{shape}-ours")
        logits = PeftModel.from_pretrained(transformers_model(folder), scratch / f"{shape}-ours")(tokens).logits
        print("our adapter, in PEFT and here: logits differ by at most", (logits - ours(tokens)).abs().max().item())
        yield f"{shape}.ours_in_peft", logits
        theirs = peft_adapter(transformers_model(folder), random_adapter(raw, 3, seed=3),
                              HERE / PEFT_FOLDERS[shape])
        yield f"{shape}.peft_adapter", theirs(tokens).logits


def peft_adapter(model, values, folder):
    """Wraps the model with a PEFT adapter of rank 3 on all linears, and saves it to `folder`. -> the wrapped model"""
    names = [target.split(".")[1] for target in TARGETS]
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_modules=names,
                                             task_type="CAUSAL_LM", lora_dropout=0.0, bias="none"))
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        parameters[name.removesuffix(".weight") + ".default.weight"].copy_(value)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()                                       # a model card
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "tiny"                            # not the temporary folder's path
    config["target_modules"].sort()                                       # a set: its order varies
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return model.eval()


@torch.no_grad()
def real_case(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = torch.tensor(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    logits = transformers_model(folder)(tokens[None]).logits[0]
    columns = torch.arange(8) * 21700 + 17                                # no token uses the last one
    yield "qwen05.tokens", tokens
    yield "qwen05.columns", columns
    yield "qwen05.logits", logits[:, columns]
    yield "qwen05.logprobs", logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="Qwen2.5-Coder-0.5B-Instruct, with its tokenizer.json")
    args = parser.parse_args()
    file = HERE / "qwen2_reference.safetensors"
    real = {name: t for name, t in load_file(file).items() if name.startswith("qwen05.")}
    if args.folder:
        real = dict(real_case(args.folder))
    with tempfile.TemporaryDirectory() as scratch:
        tensors = dict(tiny_cases(Path(scratch))) | real
    save_file({name: t.clone() for name, t in tensors.items()}, file)


if __name__ == "__main__":
    main()
