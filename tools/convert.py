"""
Model folders for other programs.

    python -m tools.convert nvfp4 SRC OUT        a bf16 Qwen2.5 folder as NVFP4, for vLLM and others
    python -m tools.convert merge RUN OUT        a run of train.py as an ordinary bf16 model

nvfp4 writes compressed-tensors files, layer by layer. With --calibrate N the codes are GPTQ's, and
it says how far they are from the 16-bit model, in nats a token (calibrate.py). merge adds a run's
adapter to the weights it was trained on, 4-bit ones decoded: python evaluate.py --model OUT
measures the result, in 16 bits. The sum is rounded to bf16, so log-probs move a little.

Not here: merging into 4 bits, whose rounding error is larger than most adapters. To serve 4 bits:
nvfp4 of the model, and the run's adapter beside it.
"""
import argparse
from pathlib import Path

from harness import process  # before torch
import calibrate
import lora
import model as qwen
from harness import config, data, hf
from harness.files import must_be_new
from harness.ranks import device_of, kernels_for


def quantize(args):
    config.check_ranges(args)
    data.check_source(args.data)
    src = hf.resolve(args.source, weights=False)
    device = device_of(args.device, src)
    codes = args.codes or ("gptq" if args.calibrate else "search")
    if codes in ("gptq", "weighted") and not args.calibrate:
        raise ValueError(f"--codes {codes} needs --calibrate N")
    hf.base_of(src, "nvfp4")                     # says what is lost of a merged adapter
    if args.calibrate:
        kernels_for(device, "auto")              # refuses a GPU that has none
        tokenizer = data.Tokenizer(src)
        problems = data.load_problems(args.data, "train")
        problems = data.encode_prompts(tokenizer, problems, args.prompt_style)
        some = data.step_indices(len(problems), args.seed, 0, min(args.calibrate, len(problems)))
    src = hf.resolve(args.source)
    files = calibrate.source_of(src, device)
    if not args.calibrate:
        calibrate.to_nvfp4(files, args.out, codes)
        return
    texts = calibrate.own_answers(src, tokenizer, [problems[i] for i in some], device,
                                  seed=args.seed)
    calibrate.to_nvfp4(files, args.out, codes, texts, tokenizer.vocab_size)


def merge(args):
    held = config.of_run(args.source)
    device = device_of(args.device, args.source)
    if held["base"] != "bf16":
        kernels_for(device, "auto")
    adapter = Path(args.source) / "adapter"
    hf.read_peft(adapter)
    folder = hf.resolve(held["model"])
    model = qwen.load(folder, held["base"], device)
    lora.load_adapter(model, adapter)
    tensors = ((name, t.detach().bfloat16().cpu()) for name, t in hf.model_tensors(model))
    hf.save_model(tensors, folder, args.out, {"merged_adapter": str(adapter)})
    print(f"{args.out}: {held['model']} as {held['base']}, with {adapter}, in bf16")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip(), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["nvfp4", "merge"])
    parser.add_argument("source", help="bf16 Qwen2.5 folder, name or id; folder of train.py")
    parser.add_argument("out", type=Path, help="folder to make; must not exist, or be empty")
    parser.add_argument("--calibrate", type=int, default=0, metavar="N",
                        help="choose codes by the model's answers to N training problems")
    parser.add_argument("--codes", choices=list(calibrate.CODES),
                        help="how (default: gptq with --calibrate, search without)")
    parser.add_argument("--data", default="gsm8k", help="the problems, as train.py's --data")
    parser.add_argument("--prompt-style", default="boxed", choices=sorted(data.STYLES))
    parser.add_argument("--seed", type=int, default=0, help="which problems, which answers")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    args = parser.parse_args()
    with process.one_line(f"convert {args.command}"):
        given = [name for name in ("calibrate", "codes", "data", "prompt_style", "seed")
                 if getattr(args, name) != parser.get_default(name)]
        if given and (args.command == "merge" or given[0] in ("data", "prompt_style", "seed")):
            raise ValueError(f"{config.option(given[0])} is for nvfp4 with --calibrate N")
        must_be_new(args.out)
        merge(args) if args.command == "merge" else quantize(args)


if __name__ == "__main__":
    main()
