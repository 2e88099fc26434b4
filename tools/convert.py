"""
Writes model folders for other programs.

    python -m tools.convert nvfp4 SRC OUT        a bf16 model's folder as NVFP4, for vLLM and others
    python -m tools.convert merge RUN OUT        a run of train.py as an ordinary bf16 model

nvfp4 writes compressed-tensors files, layer by layer. With --calibrate N it chooses the codes by
GPTQ and prints how far the 4-bit model is from the 16-bit one, in nats a token (calibrate.py).

merge adds a run's adapter to the weights that it was trained on; 4-bit ones are decoded first. Then
`python evaluate.py RUN --model OUT --base bf16 --adapter none` measures the result, in 16 bits. The
sum is rounded to bf16, so the log-probs move a little.

Not here: merging into 4 bits, whose rounding error is larger than most adapters. To serve 4 bits,
convert the model with nvfp4 and put the run's adapter beside it.
"""
import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import env  # isort: skip; its settings come before torch

import calibrate
import lora
import model as qwen
from calibrate import CODES
from files import must_be_new
from harness import config
from harness.config import setting
from harness.console import command
from harness.setup import device_of, kernels_for
from prompts import STYLES, Tokenizer, encode_prompts
from tasks.problems import check_source, load_problems
from weights import ModelFolder, files_to_copy, model_tensors, read_peft, save_model


@dataclass(frozen=True)
class Conversion:
    """flags"""
    calibrate: int = setting(0, "choose the codes by the model's answers to this many training "
                             "problems", "[0, 1e5]")
    codes: str | None = setting(None, "how the codes are chosen (default: gptq with --calibrate, "
                                "search without)", choices=CODES)
    data: str = setting("gsm8k", "the problems, as in train.py")
    prompt_style: str = setting("boxed", "what the prompt asks for", choices=sorted(STYLES))
    thinking: str = setting("off", "as in train.py", choices=("on", "off"))
    seed: int = setting(0, "random seed of the choice of problems and of the answers", "[0, 2e18]")
    device: str | None = setting(None, "cpu, cuda or cuda:N (default: a GPU if there is one)")


FOR_CALIBRATION = "data", "prompt_style", "thinking", "seed"


def convert_to_nvfp4(source: str, out: Path, wanted: Conversion) -> None:
    """A 16-bit model -> the new folder `out` in NVFP4."""
    check_source(wanted.data)
    folder = ModelFolder(source)
    device = device_of(wanted.device, folder.path)
    codes = wanted.codes or ("gptq" if wanted.calibrate else "search")
    if codes in ("gptq", "weighted") and not wanted.calibrate:
        raise ValueError(f"--codes {codes} needs --calibrate N")
    folder.choose_base("nvfp4")                  # says what is lost of a merged adapter
    if not wanted.calibrate:
        calibrate.to_nvfp4(calibrate.source_of(folder, device), out, codes)
        tell_what_was_written(out, f"{source} in NVFP4, codes by {codes}",
                              "--model", out, "--data", wanted.data)
        return
    kernels = kernels_for(device, "auto")
    tokenizer = Tokenizer(folder.path, wanted.thinking)
    problems = load_problems(wanted.data, "train")
    problems = encode_prompts(tokenizer, problems, wanted.prompt_style)
    count = calibrate.write_calibrated(folder, out, tokenizer, problems, wanted.calibrate, device,
                                       kernels, codes, seed=wanted.seed)
    tell_what_was_written(out, f"{source} in NVFP4, codes by {codes} from answers to {count} "
                          f"problems of {wanted.data}", "--model", out, "--data", wanted.data,
                          *(["--thinking", "on"] if wanted.thinking == "on" else []))


def write_merged(run: str, out: Path, device: str | None) -> None:
    """A run's model and adapter -> the new folder `out` in bf16."""
    trained = config.settings_of_run(run).model
    device = device_of(device, run)
    if trained.base != "bf16":
        kernels_for(device, "auto")              # refuses a GPU that has none
    adapter = Path(run) / "adapter"
    read_peft(adapter)
    folder = ModelFolder(trained.model)
    files_to_copy(folder.path)                   # refuses a link out of it before any work
    model = qwen.load(folder, trained.base, device)
    lora.load_adapter(model, adapter)
    tensors = ((name, t.detach().bfloat16().cpu()) for name, t in model_tensors(model))
    save_model(tensors, folder.path, out, {"merged_adapter": str(adapter)})
    # With the run's folder it is measured on what the run held out, in the run's prompts.
    tell_what_was_written(out, f"{trained.model} as {trained.base}, with {adapter}, in bf16",
                          run, "--model", out, "--base", "bf16", "--adapter", "none")


def tell_what_was_written(out: Path, what: str, *measured_with: object) -> None:
    """What the new folder holds and how large it is, and the evaluation that measures it."""
    files = [path for path in out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    amount = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
    print(f"{out}: {what}; {amount} in {len(files)} files\n"
          f"next: {command('evaluate.py', *measured_with)}")


def main() -> None:
    parser = argparse.ArgumentParser(usage="convert {nvfp4,merge} source out [flags], --help lists "
                                     "them", description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=config.LongHelp)
    parser.add_argument("command", choices=["nvfp4", "merge"])
    parser.add_argument("source", help="bf16 model's folder, name or id; for merge a run's folder")
    parser.add_argument("out", type=Path, help="new folder; if it exists, it must be empty")
    config.add_section(parser, Conversion)
    args = parser.parse_args()
    with env.one_line(f"convert {args.command}"):
        wanted = config.section_of(Conversion, args)
        config.check_ranges(wanted)
        changed = [field.name for field in dataclasses.fields(wanted)
                   if field.name != "device" and getattr(wanted, field.name) != field.default]
        if args.command == "nvfp4" and wanted.calibrate:
            changed = []
        wrong = [name for name in changed if args.command == "merge" or name in FOR_CALIBRATION]
        if wrong:
            needs = " with --calibrate N" if wrong[0] in FOR_CALIBRATION else ""
            raise ValueError(f"{config.option(wrong[0])} is for nvfp4{needs}")
        must_be_new(args.out)
        if args.command == "merge":
            write_merged(args.source, args.out, wanted.device)
        else:
            convert_to_nvfp4(args.source, args.out, wanted)


if __name__ == "__main__":
    main()
