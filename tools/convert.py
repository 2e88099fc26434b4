"""
Write model folders for other programs.

    python -m tools.convert nvfp4 SRC OUT     a 16-bit model in NVFP4
    python -m tools.convert merge RUN OUT     a run's trained model in bf16

nvfp4 writes the compressed-tensors format, which vLLM and transformers read.
With --calibrate N, GPTQ chooses the codes based on the model's own answers, and
the KL divergence from the 16-bit model is printed.

merge adds a run's adapter to the weights it was trained on, decoded if they
are 4-bit, and rounds the sum to bf16, so log-probs change slightly. To measure
it: python evaluate.py RUN --model OUT --base bf16 --adapter none

There is no merging into 4 bits, because rounding errors exceed most adapters.
To serve 4-bit weights, convert the model and load the run's adapter on top.
"""
import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))            # for python tools/convert.py
import env  # isort: skip; its settings come before torch

import calibrate
from files import UserError, must_be_new
from harness import config
from harness.config import add_flag, number, option
from harness.setup import choose_device, open_model
from loading import model_tensors
from prompts import Tokenizer, encode_prompts
from tasks.problems import load_problems
from weights import ModelFolder, in_16_bits, save_model


def convert_to_nvfp4(args: argparse.Namespace) -> None:
    """A 16-bit model -> the new folder args.out in NVFP4."""
    folder = ModelFolder(args.source)
    device = choose_device(args.device, folder.path)
    folder.choose_base("nvfp4")                  # warns if this would lose a merged adapter
    if args.calibrate:
        tokenizer = Tokenizer(folder.path, args.thinking)
        problems = encode_prompts(tokenizer, load_problems(args.data, "train"), args.prompt_style)
        calibrate.write_calibrated(folder, args.out, tokenizer, problems, args.calibrate, device,
                                   args.seed)
    else:
        calibrate.to_nvfp4(calibrate.source_of(folder, device), args.out)
    print(f"{args.out}: {args.source} in NVFP4")


def write_merged(args: argparse.Namespace) -> None:
    """A run's model and adapter -> the new folder args.out in bf16."""
    settings = config.settings_of_run(args.source)
    if settings.train == "full":
        raise UserError(f"{args.source} was trained with --train full, so there is no adapter to "
                        f"merge; its model is {Path(args.source) / 'model'}")
    # Merging samples nothing, so of the run's --kernels only torch matters: the card may not
    # support the others.
    kernels = "torch" if settings.kernels == "torch" else None
    device = choose_device(args.device, args.source, kernels)
    adapter = Path(args.source) / "adapter"
    folder = ModelFolder(settings.model)
    tokenizer = Tokenizer(folder.path, settings.thinking)
    model, _ = open_model(folder, tokenizer, device, settings, adapter, refuse=True)
    tensors = ((name, in_16_bits(t.detach()).cpu()) for name, t in model_tensors(model))
    save_model(tensors, folder.path, args.out, {"merged_adapter": str(adapter)})
    print(f"{args.out}: {settings.model} ({settings.base}) with {adapter}, in bf16")


# Flags of nvfp4 --calibrate alone, with their defaults.
CALIBRATION = dict(calibrate=None, data="gsm8k", prompt_style="boxed", thinking="off", seed=0)


def main() -> None:
    parser = env.parser("{nvfp4,merge} source out [flags]", __doc__)
    add = parser.add_argument
    add("command", choices=("nvfp4", "merge"))
    add("source", help="nvfp4: folder, name or id of a 16-bit model; merge: run folder")
    add("out", type=Path, help="new or empty folder")
    add("--calibrate", type=number(int, "[2, 1e5]"), metavar="N", default=argparse.SUPPRESS,
        help="nvfp4: choose the codes with GPTQ on answers to N training problems; the last eighth "
             "is held out to measure the KL divergence")
    add_flag(parser, "device", None)
    for name in ("data", "prompt_style", "thinking", "seed"):
        add_flag(parser, name)
    args = parser.parse_args()
    with env.one_line():
        must_be_new(args.out)
        given = vars(args).keys() & CALIBRATION.keys()
        if given and (args.command == "merge" or "calibrate" not in given):
            raise UserError(f"{option(min(given))} is only for nvfp4 --calibrate")
        args = argparse.Namespace(**CALIBRATION | vars(args))
        if args.command == "nvfp4":
            convert_to_nvfp4(args)
        else:
            write_merged(args)


if __name__ == "__main__":
    main()
