"""
Writes a model folder of random weights in a published shape, to try a size without its download.

    python -m tools.random_model qwen2.5-7b OUT --tokenizer QWEN      15 GB in 13 files
    python -m tools.random_model qwen2.5-32b OUT --base nvfp4         21 GB; 65 GB without --base
    python train.py --model OUT --data arithmetic --reward tools.random_model:coin --steps 3

All programs accept the folder: they read, calibrate, sample, train and convert it like the real
model of that shape, with the same times and memory. The text that it writes means nothing. Three
things are like a real model's, because times or memory depend on them:

- Answers come to an end. The head's rows of the end tokens point in a direction that all hidden
  states share, so an answer ends with the same probability at every token. Lengths are then
  geometric: short ones are the commonest, and a few are several times the mean, --answer-tokens.
  Greedy answers do not end: the likeliest token is never an end token.
- Logits are finite, and not so large that one token always wins: at temperature 1 they have a
  standard deviation of 2.
- The inputs of each linear are correlated and its channels differ in size. So GPTQ has errors to
  make up for, and calibration does all its work.

No answer of such a model is ever right, and if all answers to a problem get the same reward there
is nothing to train on. So coin() below is a --reward that gives half of all answers 1.

One --seed gives the same weights again on one device, and other weights on another device. They are
made on the GPU if there is one, a file of at most 2 GiB at a time.

Not here: models in the GPU's memory alone, which tools/bench.py makes for itself.
"""
import argparse
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

import env  # isort: skip; its settings come before torch

import torch

import model as qwen
import nvfp4
from files import must_be_new, new_folder, write_json
from harness import config
from harness.config import TINY_MODEL, setting
from harness.setup import device_of
from prompts import Tokenizer
from tools.bench import SIZES
from tools.convert import tell_what_was_written
from weights import NVFP4_CONFIG, ModelFolder, files_to_copy, nvfp4_tensors, save_shards

SHAPE_NAMES = [size if size.startswith("qwen") else f"qwen2.5-{size}" for size in SIZES]
SPREAD = 2.0                                     # standard deviation of the logits
COMMON = 2.0                                     # of all embeddings, beside 1 of each token's own
# The share of a normalised hidden state at the last layer that all tokens have in common, which is
# 2 / sqrt(4 + 1 + 0.58). Under the root are the squares of the common part, of the token's own part
# and of what attention and MLP of all layers add.
END_SHARE = 0.85


@dataclass(frozen=True)
class Wanted:
    """flags"""
    tokenizer: str = setting(str(TINY_MODEL), "folder whose tokenizer.json, templates and the like "
                             "are copied (default: the tiny model's, of 463 tokens)")
    base: str = setting("bf16", "what the linears are written as", choices=("bf16", "nvfp4"))
    answer_tokens: int = setting(300, "mean length of an answer at temperature 1; if it is far "
                                 "above --max-new-tokens, all answers reach that", "[2, 1e9]")
    seed: int = setting(0, "random seed of the weights", "[0, 2e9]")
    device: str | None = setting(None, "where they are made: cpu, cuda or cuda:N (default: a GPU if "
                                 "there is one)")


def coin(completion: str, problem: dict) -> float:
    """A --reward for models that are never right: 1 for one half of all texts, 0 for the other."""
    return float(zlib.crc32(completion.encode()) % 2)


def config_of(name: str) -> dict:
    """qwen2.5-7b, qwen3-8b, or a folder -> the config.json of a model of that shape. ValueError if
    there is no such shape.
    """
    if Path(name).is_dir():
        raw = ModelFolder(name).config           # refuses what model.py does not compute
        raw.pop("quantization_config", None)
        return raw
    size = name.lower().removeprefix("qwen2.5-")
    if size not in SIZES:
        raise ValueError(f"{name}: expected a folder, or one of " + ", ".join(SHAPE_NAMES))
    c = qwen.ModelConfig(*SIZES[size])
    family = "Qwen3" if c.qk_norm else "Qwen2"   # config.json's name of Qwen2.5
    return {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(),
            "hidden_act": "silu", "head_dim": c.head_dim, "attention_bias": c.qkv_bias,
            "hidden_size": c.width, "intermediate_size": c.feed_forward,
            "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads, "vocab_size": c.vocab, "rms_norm_eps": c.eps,
            "rope_theta": c.rope_theta, "tie_word_embeddings": c.tied,
            "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}


def tensor_shapes(shape: qwen.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that model.py reads for a model of this shape. To
    find out, the model is built on torch's meta device, which holds shapes and no numbers.
    """
    shapes = {}

    def get(name, *size):
        shapes[name] = size
        return torch.empty(size, device="meta", dtype=torch.bfloat16)

    def frozen(names, parts, k):
        weights = [get(f"{name}.weight", n, k) for name, n in zip(names, parts)]
        return nvfp4.freeze(weights, "bf16", torch.bfloat16)

    qwen.Qwen(shape, get, frozen, torch.bfloat16, "random")
    return shapes


def random_tensors(shape: qwen.ModelConfig, wanted: Wanted, tokenizer: Tokenizer,
                   device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of every tensor of the folder, linears as --base says.

    With D the width, an embedding is SPREAD / sqrt(D) * (COMMON * u + z): u is the same for all
    tokens, each number 1 or -1, and z normal. The head of an untied model is of z alone. What all
    layers add to that is made about as large as a token's own part. The last norm's gains are 1 or
    -1: with gains of 1 a tied head would make the token that was read last the likeliest by far.
    """
    generator = torch.Generator(device).manual_seed(wanted.seed)

    def normal(*size):
        return torch.randn(size, generator=generator, device=device)

    D = shape.width
    unit = SPREAD / math.sqrt(D)
    u = normal(D).sign()
    signs = normal(D).sign()
    for name, size in tensor_shapes(shape).items():
        if name == "model.norm.weight":
            yield name, signs.bfloat16().cpu()
        elif name.endswith("norm.weight"):       # channels of different size
            yield name, (normal(*size) / 2).exp().bfloat16().cpu()
        elif name.endswith("bias"):
            yield name, (normal(*size) / 2).bfloat16().cpu()
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            common = COMMON * unit * u * (name == "model.embed_tokens.weight")
            w = unit * normal(*size) + common
            if shape.tied or name == "lm_head.weight":
                w[tokenizer.end_ids] = common + end_row(u * signs, wanted.answer_tokens, tokenizer)
            yield name, w.bfloat16().cpu()
        else:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            gain = unit / math.sqrt(2 * shape.layers) if small else 1.0
            w = (normal(*size) * gain / math.sqrt(size[1])).bfloat16()
            if wanted.base == "nvfp4":
                coded = nvfp4.quantize(w, offsets=[0])
                yield from nvfp4_tensors(name.removesuffix(".weight"), *coded)
            else:
                yield name, w.cpu()


def end_row(common: torch.Tensor, answer_tokens: int, tokenizer: Tokenizer) -> torch.Tensor:
    """The head's row (D,) for each end token, so that answers have `answer_tokens` on average.

    common (D,), each number 1 or -1: all of the head's inputs have END_SHARE of it in common. The
    other V logits are normal with the standard deviation SPREAD, so their logsumexp is
    log V + SPREAD^2 / 2. Next to them, all end tokens together shall have the probability
    1 / answer_tokens.
    """
    others = math.log(tokenizer.vocab_size) + SPREAD**2 / 2
    logit = others - math.log(answer_tokens - 1) - math.log(len(tokenizer.end_ids))
    return logit / (len(common) * END_SHARE) * common


def write_random_model(name: str, out: Path, wanted: Wanted) -> None:
    """Writes the folder `out`. ValueError for a shape or tokenizer that no program here accepts."""
    raw = config_of(name)
    shape = qwen.ModelConfig.from_json(raw)
    source = Path(wanted.tokenizer)
    tokenizer = Tokenizer(source)
    if tokenizer.vocab_size > shape.vocab:
        raise ValueError(f"--tokenizer {source}: has {tokenizer.vocab_size} tokens, {name} "
                         f"{shape.vocab}")
    device = device_of(wanted.device, source)
    raw |= {"bos_token_id": tokenizer.end_ids[0], "eos_token_id": tokenizer.stop}
    if wanted.base == "nvfp4":
        raw["quantization_config"] = NVFP4_CONFIG
    companions = files_to_copy(source)
    with new_folder(out) as folder:
        for file in companions:
            copy(file, folder)
        save_shards(random_tensors(shape, wanted, tokenizer, device), folder)
        write_json(folder / "config.json", raw)


def main() -> None:
    parser = argparse.ArgumentParser(usage="random_model shape out [flags], --help lists them",
                                     description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=config.LongHelp)
    parser.add_argument("shape", help="qwen2.5-7b, qwen3-8b and the like, or a folder with such a "
                        "config.json")
    parser.add_argument("out", type=Path, help="new folder; if it exists, it must be empty")
    config.add_section(parser, Wanted)
    args = parser.parse_args()
    with env.one_line("random_model"):
        wanted = config.section_of(Wanted, args)
        config.check_ranges(wanted)
        must_be_new(args.out)
        write_random_model(args.shape, args.out, wanted)
        tell_what_was_written(args.out, f"random weights in the shape of {args.shape}",
                              "--model", args.out, "--data", "arithmetic")


if __name__ == "__main__":
    main()
