"""
Model folders for other programs.

    python -m tools.convert nvfp4 SRC OUT        a bf16 Qwen2.5 folder as NVFP4, for vLLM and others
    python -m tools.convert merge RUN OUT        a run of train.py as an ordinary bf16 model

nvfp4 writes compressed-tensors files, one matrix at a time, and prints |w - decoded| / |w| of
each layer; lm_head and embedding stay bf16. merge adds a run's adapter to the weights it was
trained on, 4-bit ones decoded: python evaluate.py --model OUT --base bf16 measures the result. The
sum is rounded to bf16, so log-probs move a little.

Not here: calibration, and merging into 4 bits, whose rounding error is larger than most adapters.
"""
import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import hf
import lora
import model as qwen
import nvfp4
from run import first_line

GROUPS = (                                       # of a layer: engines fuse the matrices of each
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))


def to_nvfp4(src, out, device):
    """ValueError, and nothing written, if it cannot be."""
    config = hf.read_qwen2(src / "config.json")
    if config.get("quantization_config"):
        raise ValueError(f"{src}/config.json: has a quantization_config: it is quantized already")
    layers = [[[f"model.layers.{i}.{name}" for name in group] for group in GROUPS]
              for i in range(config["num_hidden_layers"])]
    shards = hf.Shards(src)
    linears = [f"{name}.weight" for layer in layers for group in layer for name in group]
    for name in linears:
        K = shards.shape(name)[1]
        if K % 16:
            raise ValueError(f"{shards.names[name]}: {name} has {K=}, not a multiple of 16")
    others = [name for name in shards.names if name not in linears]
    hf.save_model(nvfp4_tensors(shards, layers, others, device), src, out, hf.NVFP4_CONFIG)


def nvfp4_tensors(shards, layers, others, device):
    """Yields (name, tensor) of the new folder; prints the error of each layer."""
    for name in others:
        yield name, shards.get(name).bfloat16()
    errors = []
    for i, layer in enumerate(tqdm(layers, unit="layer")):
        of_layer = torch.zeros(2, dtype=torch.float64)
        for group in layer:
            weights = [shards.get(f"{name}.weight", device) for name in group]
            try:
                scale = nvfp4.global_scale_for(*weights)
            except ValueError as error:
                raise ValueError(f"{', '.join(group)}: {error}") from None
            for name, w in zip(group, weights):
                tensors = nvfp4.quantize(w, scale)
                yield from hf.nvfp4_files(name, *tensors)
                of_layer += squared_error(w, tensors)
        errors.append(of_layer)
        say_error(f"layer {i:2d}", of_layer)
    say_error(f"all {len(layers)} layers", sum(errors))


def squared_error(w, tensors):
    """-> (2,) float64: sum of (w - decoded)^2, sum of w^2."""
    decoded = nvfp4.dequantize(*tensors)
    sums = torch.zeros(2, dtype=torch.float64)
    for rows in nvfp4.row_chunks(*w.shape, 16):
        exact = w[rows].float()
        sums[0] += (exact - decoded[rows].float()).square().sum().item()
        sums[1] += exact.square().sum().item()
    return sums


def say_error(what, sums):
    tqdm.write(f"{what}  relative error {(sums[0] / sums[1]).sqrt():.4f}")


def merge(run, out):
    flags = hf.read_json(run / "run.json")
    if out.exists() and any(out.iterdir()):      # asked before the model is loaded
        raise ValueError(f"{out}: exists and is not an empty folder")
    model = qwen.load(flags["model"], flags["base"])
    lora.load_adapter(model, run / "adapter")
    tensors = ((name, t.detach().bfloat16().cpu()) for name, t in hf.model_tensors(model))
    hf.save_model(tensors, model.folder, out)
    print(f"{out}: {flags['model']} as {flags['base']}, with {run / 'adapter'}, in bf16")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["nvfp4", "merge"])
    parser.add_argument("source", type=Path, help="bf16 Qwen2.5 folder; folder of train.py")
    parser.add_argument("out", type=Path, help="folder to make; must not exist, or be empty")
    args = parser.parse_args()
    try:
        if args.command == "merge":
            merge(args.source, args.out)
        else:
            to_nvfp4(args.source, args.out, "cuda" if torch.cuda.is_available() else "cpu")
    except (ValueError, OSError) as error:
        sys.exit(f"convert {args.command}: {first_line(error)}")


if __name__ == "__main__":
    main()
