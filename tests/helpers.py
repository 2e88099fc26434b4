"""
Shared by several test files: problems, answers judged by hand, tokenizers, chat templates, tiny models and adapters.
"""
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from tiny_qwen2 import GROUPS, plain_logits, random_adapter, set_adapter

import nvfp4
from harness.config import read_settings
from loading import load
from lora import attach
from weights import nvfp4_tensors

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tiny"
HERE = ROOT / "tests"
# For logits, which reach 12. A sum of up to 192 fp32 terms is off by sqrt(192) * 2^-24 = 8e-7 of its size, and 20 such
# sums in a row by 4e-5 if the errors add as noise. In practice: 1e-5.
FP32 = 5e-5


def run_main(monkeypatch, program, *arguments):
    """Runs the main() of an imported program with these arguments. -> what it returns, or its exit code or message."""
    monkeypatch.setattr(sys, "argv", [program.__file__, *map(str, arguments)])
    try:
        return program.main()
    except SystemExit as stop:
        return stop.code


def settings_of(*flags):
    """train.py's settings."""
    return read_settings(list(flags))[0]


def write_rows(path, rows):
    """Writes a JSONL file. -> its path as text"""
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_sums(path, numbers):
    """Writes one problem per number, i + 1. -> the file's path as text"""
    return write_rows(path, [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in numbers])


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# Section -> its text.
ANSWERS = dict(part.split("\n", 1) for part in (HERE / "answers.txt").read_text("utf-8").split("\n# ")[1:])


def cells(section):
    return re.split(r" {2,}|\n", ANSWERS[section].strip())


def pairs(section):
    """The cells "left == right" -> [(left, right)]"""
    return [tuple(cell.split(" == ")) for cell in cells(section)]


def edit(file, **changes):
    """Changes a JSON file's keys. None: null; ...: the key goes."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def change_weights(folder):
    file = folder / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight_packed"][-1, -1] += 1
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, file)


def add_token(folder):
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder / "tokenizer.json", added_tokens=[*tokens, tokens[0] | {"id": 463, "content": "<|new|>"}])


# What conditions call it -> changes a model folder.
MODEL_CHANGES = {"weights": change_weights, "tokenizer": add_token,
                 "rope theta": lambda folder: edit(folder / "config.json", rope_theta=2e4),
                 "eps": lambda folder: edit(folder / "config.json", rms_norm_eps=1e-5)}


def same_bytes(a, b):
    """Equal shapes and bits: -0 differs from 0."""
    return a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def plain(case, tokens):
    """Float64 logits of every row of tokens (B, T)."""
    return torch.stack([plain_logits(case.raw, case.tensors, row) for row in tokens])


def adapted(case, rank=4, alpha=6, base="bf16", seed=2, **kwargs):
    """-> the tiny model with a nonzero adapter, and the adapter's tensors by PEFT's names."""
    model = load(case.folder, base=base, device="cpu", **kwargs)
    attach(model, rank=rank, alpha=alpha)
    tensors = random_adapter(case.raw, rank, seed=seed)
    set_adapter(model, tensors)
    return model, tensors


def with_acting_adapter(model, std=1.0):
    """The model with a rank-4 adapter and a random B. With std 1, its effect on ../tiny far exceeds rounding."""
    adapter = attach(model, rank=4, alpha=4)
    adapter.master.data[adapter.b_start:].normal_(0, std, generator=torch.Generator().manual_seed(0))
    adapter.sync()
    return model


def attach_to_some(model, linears, rank=4):
    """Gives an adapter to only these linears, as a fork may. attach() covers every linear."""
    model.adapter = attach(SimpleNamespace(modules=lambda: linears, dtype=model.dtype), rank)


def quantized(case, kept=()):
    """The checkpoint as compressed-tensors stores it: q, k and v share a global scale, so do gate and up. kept: linears
    that stay in 16 bits.
    """
    tensors = dict(case.tensors)
    for i in range(case.raw["num_hidden_layers"]):
        for group in GROUPS:
            names = [name for name in (f"model.layers.{i}.{target}" for target in group) if name not in kept]
            weights = [tensors.pop(f"{name}.weight") for name in names]
            scale = nvfp4.global_scale_for(*weights) if weights else None
            for name, w in zip(names, weights):
                tensors |= dict(nvfp4_tensors(name, *nvfp4.quantize(w, scale)))
    return tensors


def tokens_of(case, *shape):
    return torch.randint(case.raw["vocab_size"], shape, generator=torch.Generator().manual_seed(8))


def save_tokenizer(folder, template=None, thinks=False, control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
                   **named):
    """A byte-level tokenizer without merges: ids 0-255 are bytes, those from 256 on control tokens. thinks: add <think>
    and </think> as ordinary tokens 259 and 260, as Qwen3 does. named: more of tokenizer_config.json.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    file = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.add_special_tokens([AddedToken(t, special=True) for t in control])
    if thinks:
        file.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    file.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **named}))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt_of(tokenizer, text, system=None):
    """The prompt of a question; system None: with the template's own system message, if any."""
    return tokenizer.turns([("system", system)] * bool(system) + [("user", text)])


# Chat templates that write the same text as the models' own; for Qwen's, chat_reference.json has that text.
TEMPLATES = {path.stem: path.read_text() for path in (HERE / "templates").glob("*.jinja")}


def thinking_tiny(folder, template):
    """The tiny model with this template, and with <think> and </think> as two of its tokenizer's spare ids."""
    shutil.copytree(TINY, folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    first = 1 + max([*raw["model"]["vocab"].values(), *(token["id"] for token in raw["added_tokens"])])
    raw["added_tokens"] += [raw["added_tokens"][0] | {"id": first + i, "content": tag, "special": False}
                            for i, tag in enumerate(("<think>", "</think>"))]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "chat_template.jinja").write_text(template)
    return folder
