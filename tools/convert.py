"""
Write model folders for other programs.

    python -m tools.convert nvfp4 SRC OUT        a 16-bit model in NVFP4, for vLLM and transformers
    python -m tools.convert merge RUN OUT        the trained model of a run in bf16

nvfp4 writes the format of compressed-tensors, layer by layer. With --calibrate N the codes are
chosen by GPTQ on the model's own answers, and the KL divergence from the 16-bit model is printed
(calibrate.py).

merge adds a run's adapter to the weights it was trained on, decoded if they are 4-bit, and rounds
the sum to bf16, so log-probs change slightly. To measure the result:
python evaluate.py RUN --model OUT --base bf16 --adapter none

Merging into 4 bits is not offered: the rounding error exceeds most adapters. To serve 4-bit
weights, convert the model with nvfp4 and load the run's adapter on top.
"""
import argparse
import glob
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("env") is None:                     # as python tools/convert.py, where no import works
    sys.exit("convert.py: run it from the project's folder, as python -m tools.convert")

import env  # isort: skip; its settings come before torch

import calibrate
import lora
import model as qwen
from evaluate import within
from files import UserError, must_be_new
from harness import config
from harness.console import command
from harness.setup import choose_device
from prompts import STYLES, Tokenizer, encode_prompts
from tasks.problems import check_source, load_problems
from weights import ModelFolder, files_to_copy, model_tensors, read_peft, save_model


def convert_to_nvfp4(args: argparse.Namespace) -> None:
    """A 16-bit model -> the new folder args.out in NVFP4."""
    codes = args.codes or ("gptq" if args.calibrate else "search")
    if codes in ("gptq", "weighted") and not args.calibrate:
        raise UserError(f"--codes {codes} needs --calibrate N")
    check_source(args.data)
    folder = ModelFolder(args.source)
    device = choose_device(args.device, folder.path)
    folder.choose_base("nvfp4")                  # says what is lost of a merged adapter
    what = f"{args.source} in NVFP4, codes by {codes}"
    if not args.calibrate:
        calibrate.to_nvfp4(calibrate.source_of(folder, device), args.out, codes)
        tell(args.out, what)
        return
    tokenizer = Tokenizer(folder.path, args.thinking)
    problems = encode_prompts(tokenizer, load_problems(args.data, "train"), args.prompt_style)
    count = calibrate.write_calibrated(folder, args.out, tokenizer, problems, args.calibrate,
                                       device, codes, args.seed)
    tell(args.out, f"{what} from answers to {count} problems of {args.data}",
         "--model", args.out, "--data", args.data,
         *(["--thinking", "on"] if args.thinking == "on" else []))


def write_merged(args: argparse.Namespace) -> None:
    """A run's model and adapter -> the new folder args.out in bf16."""
    trained = config.settings_of_run(args.source).model
    if trained.train == "full":
        raise UserError(f"{args.source}: was trained with --train full, so there is no adapter to "
                        f"merge; the model is {Path(args.source) / 'model'}")
    device = choose_device(args.device, args.source)
    adapter = Path(args.source) / "adapter"
    read_peft(adapter)
    folder = ModelFolder(trained.model)
    files_to_copy(folder.path)                   # refuses a link out of it before any work
    model = qwen.load(folder, trained.base, device)
    lora.load_adapter(model, adapter)
    tensors = ((name, t.detach().bfloat16().cpu()) for name, t in model_tensors(model))
    save_model(tensors, folder.path, args.out, {"merged_adapter": str(adapter)})
    # With the run's folder it is measured on what the run held out, in the run's prompts.
    tell(args.out, f"{trained.model} as {trained.base}, with {adapter}, in bf16",
         args.source, "--model", args.out, "--base", "bf16", "--adapter", "none")


def tell(out: Path, what: str, *measured_with: object) -> None:
    """Prints what the new folder contains, its size, and the command that evaluates it."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {what}; {size / 1e6:,.1f} MB")
    if measured_with:
        print(f"next: {command('evaluate.py', *measured_with)}")


def main() -> None:
    parser = argparse.ArgumentParser(usage="convert {nvfp4,merge} source out [flags], --help lists "
                                     "them", description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=("nvfp4", "merge"))
    add("source", help="nvfp4: folder, name or id of a 16-bit model; merge: folder of a run")
    add("out", type=Path, help="new or empty folder")
    add("--calibrate", type=within(int, 2, 1e5), help="choose the codes by GPTQ on answers to this "
        "many training problems; the last eighth is held out to measure the KL divergence")
    add("--codes", choices=calibrate.CODES, help="how the codes are chosen (default: gptq with "
        "--calibrate, search without)")
    add("--data", default="gsm8k", help="problems to calibrate on, as in train.py (default: gsm8k)")
    add("--prompt-style", default="boxed", choices=STYLES, help="as in train.py (default: boxed)")
    add("--thinking", default="off", choices=("on", "off"), help="as in train.py (default: off)")
    add("--seed", type=within(int, 0, 2e18), default=0, help="random seed: choice of problems, "
        "answers (default: 0)")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    args = parser.parse_args()
    with env.one_line(f"convert {args.command}"):
        must_be_new(args.out)
        for folder in args.out.parent.glob(f".{glob.escape(args.out.name)}.????????"):
            print(f"{folder}: left by a conversion to {args.out} that was killed; remove it unless "
                  "one is still running")
        if args.command == "nvfp4":
            convert_to_nvfp4(args)
        elif args.calibrate or args.codes:
            raise UserError("--calibrate and --codes are for nvfp4")
        else:
            write_merged(args)


if __name__ == "__main__":
    main()
