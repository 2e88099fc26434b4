"""
Writes qwen2_reference.safetensors, peft_adapter/, peft_adapter_qwen3/ and qwen3_config.json with transformers and PEFT,
from tiny_qwen2.py's checkpoints, for test_model.py, test_weights.py and test_peft.py.

    pip install -r requirements.txt transformers==5.23.0 peft==0.21.2
    python tests/make_reference.py

The project and its tests need neither package. Everything is computed in fp32. The file contains, for every tiny shape,
a checksum of its weights, tokens (2, T) and logits (2, T, V); for "tied" and "qwen3-tied" also the logits of
    ours_in_peft    the folder that save_adapter wrote, loaded by PEFT
    peft_adapter    an adapter that PEFT made, saved to peft_adapter/ or peft_adapter_qwen3/
qwen3_config.json is from a Qwen3 folder that transformers wrote. compare_with_transformers.py compares a real model.
"""
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny_qwen2 import SHAPES, TARGETS, config_json, random_adapter, random_tensors, set_adapter, write_folder

from adapters import save_adapter
from loading import load
from lora import attach

HERE = Path(__file__).parent
PEFT_FOLDERS = {"tied": "peft_adapter", "qwen3-tied": "peft_adapter_qwen3"}


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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tensors = {name: t.clone() for name, t in tiny_cases(Path(scratch))}
    save_file(tensors, HERE / "qwen2_reference.safetensors")
