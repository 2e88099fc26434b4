"""
Accuracy of a model, with or without an adapter: the same sampler and grader as training.

    python evaluate.py runs/x                        a run, with its flags, on its held-out problems
    python evaluate.py --model qwen2.5-7b --adapter runs/x/adapter --data gsm8k --out after.jsonl
    python evaluate.py ... --against before.jsonl    compared with that run, problem by problem

Greedy by default; --samples N draws N answers a problem, for pass@k and maj@k (figures.py). The last
line on stdout is a JSON object, whose keys docs/metrics.md defines. --out grows by each problem that
is done; Ctrl-C ends with the figures of these. Not here: few-shot prompts.
"""
import argparse
import os
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from harness import process  # before torch
import torch
from tqdm import tqdm

import lora
import model as qwen
import nvfp4
import rewards
from answers import can_read
from harness import config, data, hf, plugin
from harness.figures import evaluation_figures, paired_figures
from harness.files import errors_name_file, json_line, read_rows, write_atomically
from harness.ranks import KERNELS, choose_device, configure_cpu
from sampler import Sampler, Sampling, engine_for, rollouts_of


def new_parser(description):
    """-> parser of the flags that say which model."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=config.Help)
    add = parser.add_argument
    add("run", nargs="?", help="folder of train.py, whose flags are the defaults here")
    add("--model", help="folder, Hugging Face id or name such as qwen2.5-7b")
    add("--adapter", help="PEFT folder, such as train.py's runs/x/adapter; none: the model alone")
    add("--base", choices=list(nvfp4.FORMATS),
        help="format of the linears (default: nvfp4, of a merged folder bf16)")
    add("--dtype", choices=["bfloat16", "float16"], help="of matmul inputs, as of train.py")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--kernels", default="auto", choices=["auto", *KERNELS], help="as of train.py")
    return parser


def parse(parser):
    """-> flags; those of the run that is named, some of which are defaults."""
    args = parser.parse_args()
    of_run = {}
    if args.run:
        of_run = config.of_run(args.run)
        names = "model", "base", "dtype", "prompt_style", "reward", "max_new_tokens"
        parser.set_defaults(adapter=str(Path(args.run) / "adapter"),
                            **{name: of_run[name] for name in names if name in of_run})
        args = parser.parse_args()
    if args.adapter == "none":
        args.adapter = None
    return args, of_run


def parse_args():
    parser = new_parser(__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--data", help="as of train.py: gsm8k, a file, an id, ... (default: the run's held-out)")
    add("--split", default="test", choices=["train", "test"], help="of a data set, not of a file")
    add("--limit", type=int, default=0, help="only the first so many problems; 0: all")
    add("--prompt-style", default="boxed", help="as of train.py")
    add("--reward", help="module:function, as of train.py: its mean is among the figures")
    add("--samples", type=int, default=1, help="answers a problem")
    add("--temperature", type=float, help="0: greedy (default: 0; for several samples 0.6)")
    add("--top-p", type=float, default=0.95, help="nucleus of sampled answers (paper)")
    add("--top-k", type=int, default=0, help="sample from the likeliest so many only; 0: all")
    add("--max-new-tokens", type=int,
        help="longest completion (default: the paper's 4096, or what the model has positions for)")
    add("--max-rows", type=int, default=256, help="most sequences decoded at a time")
    add("--seed", type=int, default=0, help="of sampling")
    add("--out", help="new .jsonl file for every completion with its verdict")
    add("--against", help="another run's --out, to compare with problem by problem")
    return parse(parser)


RANGES = config.RANGES | {"samples": "[1, 1e5]", "limit": "[0, 2e9]", "temperature": "[0, 1000]",
                         "top_k": "[0, 2e9]", "top_p": "(0, 1]"}


def check(args, of_run):
    """ValueError for flags that can be refused before anything is loaded."""
    if args.model is None or not (args.data or of_run):
        raise ValueError("needs the folder of a run, or --model and --data")
    if args.temperature is None:
        args.temperature = 0.0 if args.samples == 1 else 0.6
    config.check_ranges(args, RANGES)
    if args.samples > 1 and args.temperature == 0:
        raise ValueError(f"--samples {args.samples} needs a --temperature above 0")
    if args.out and Path(args.out).exists():
        raise ValueError(f"--out {args.out} exists and is not overwritten")
    if args.out:                                 # an hour of sampling later would be too late
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        open(args.out, "x").close()
        os.remove(args.out)
    if args.temperature == 0:                    # greedy ignores the two: say so in the figures
        args.top_p = 1.0
        args.top_k = 0
    data.prompt_function(args.prompt_style)
    if args.data:
        data.check_source(args.data)


def load_model(args, folder, device, tokenizer):
    """-> the model of --base and --dtype, with --adapter."""
    args.base = hf.base_of(folder, args.base)
    model = qwen.load(folder, args.base, device, args.dtype, tokenizer.vocab_size)
    configure_cpu(model)
    if args.adapter:
        lora.load_adapter(model, args.adapter)
    return model


def read_results(path):
    """Rows of another run's --out. ValueError names the line that is not one."""
    rows = []
    for number, row in read_rows(Path(path)):
        known = isinstance(row, dict) and row.get("correct") in (0, 1)
        if not (known and isinstance(row.get("id"), str) and isinstance(row.get("question"), str)):
            raise ValueError(f"--against {path}:{number}: needs id, question, correct")
        rows.append(row)
    return rows


def problems_of(args, of_run, tokenizer):
    """-> problems with prompts: of --data, or what the run holds out."""
    if not args.data:
        like = config.parser.parse_args([])
        vars(like).update(of_run)
        args.data = like.eval_data or like.data
        if not args.data.endswith(data.SUFFIXES):
            like.eval_problems = 0               # all of a data set's own split
        _, problems = data.split_problems(like, tokenizer)       # by the run's own flags
    else:
        problems = data.load_problems(args.data, args.split, needs_gold=not args.reward)
    problems = problems[:args.limit or None]
    return data.encode_prompts(tokenizer, problems, args.prompt_style)


def prove_adapter(model, sampler, prompt, max_new_tokens):
    """-> mean change of a probe's log-probs by the adapter. ValueError if the sampler ignores it.

    The release's GSM8K evaluation did, and nothing told.
    """
    if not any(linear.b.any() for linear in model.adapter.linears):
        print("the adapter's B is zero in every layer: its linears are the base's")
        return 0.0
    probe = sampler.generate([prompt], 2, Sampling(min(32, max_new_tokens)))
    rows = [prompt + completion for completion in probe.completions]
    starts = [len(prompt)] * 2
    with torch.no_grad():
        on, _ = model.token_logprobs(rows, starts)
        with model.adapter.off():
            off, _ = model.token_logprobs(rows, starts)
    sampled = torch.cat(probe.logprobs).to(on.device)
    shift = (on - off).abs().mean().item()
    to_off = (sampled - off).abs().mean().item()
    effect = f"log-probs move by {shift:.1e}, the sampler's are {to_off:.1e} from the base's"
    if shift == 0 or to_off < shift / 2:         # half: to_off is rounding alone if not applied
        raise ValueError(f"--adapter has no effect: {effect}")
    print(f"adapter active: {effect}")
    return shift


def set_up(args, of_run):
    """-> tokenizer, problems, sampler, plug-in, rows of --against, adapter's shift."""
    device, _ = choose_device(args.device, args.kernels, args.model)
    args.device = args.device or device.type
    plug_in = plugin.Reward(args.reward) if args.reward else None
    others = read_results(args.against) if args.against else None
    if args.adapter:
        hf.read_peft(args.adapter)
    folder = hf.resolve(args.model, weights=False)
    tokenizer = data.Tokenizer(folder)
    problems = problems_of(args, of_run, tokenizer)
    if others is not None:
        paired_figures([{**vars(p), "correct": 0.0} for p in problems], others)
    longest = max(len(p.prompt) for p in problems)
    if args.max_new_tokens is None:
        args.max_new_tokens = max(1, min(4096, hf.max_positions(folder) - longest))
    hf.check_lengths(folder, longest + args.max_new_tokens)
    model = load_model(args, hf.resolve(args.model), device, tokenizer)
    rows = min(args.max_rows, len(problems) * args.samples)
    sampler = Sampler(engine_for(device, args.kernels), model, longest + args.max_new_tokens,
                          rows)
    shift = None
    if args.adapter:
        shift = prove_adapter(model, sampler, problems[0].prompt, args.max_new_tokens)
    return tokenizer, problems, sampler, plug_in, others, shift


def answer(args, tokenizer, problems, sampler, plug_in):
    """-> rows of the problems that were done, in their order; seconds; idle share, None if
    Ctrl-C came. Each problem's rows are in the file --out as soon as its answers are there.
    """
    waiting = defaultdict(list)
    done = {}

    def progress(made, ended):
        bar.update(made)
        for s in ended:
            i = s.row // args.samples
            waiting[i].append(s)
            if len(waiting[i]) == args.samples:
                finish(i, sorted(waiting.pop(i), key=lambda s: s.row))

    def finish(i, sequences):
        rows = rewards.score(tokenizer, [problems[i]], rollouts_of(sequences), args.prompt_style,
                             plug_in)
        for sample, row in enumerate(rows):
            lenient = rewards.grade(row["completion"], row["answer"], last_number=True)
            row |= {"sample": sample, "lenient": float(lenient.correct)}
        done[i] = rows                           # whole: Ctrl-C may have come in between
        out.writelines(map(json_line, rows))
        out.flush()

    sampling = Sampling(args.max_new_tokens, tokenizer.end_ids, args.temperature, args.top_k,
                        args.top_p, args.seed)
    began = time.perf_counter()
    idle = None
    file = open(args.out, "x") if args.out else open(os.devnull, "w")
    with errors_name_file(args.out), file as out, tqdm(unit=" tokens", unit_scale=True) as bar:
        with suppress(KeyboardInterrupt):
            idle = sampler.generate([p.prompt for p in problems], args.samples, sampling,
                                    progress=progress).idle
    seconds = time.perf_counter() - began
    rows = [row for i in sorted(done) for row in done[i]]
    if args.out:                                 # now in the problems' order
        write_atomically(args.out, "".join(map(json_line, rows)).encode())
    return rows, seconds, idle


def main():
    began = time.perf_counter()
    with process.one_line("evaluate.py"):
        args, of_run = parse_args()
        check(args, of_run)
        tokenizer, problems, sampler, plug_in, others, shift = set_up(args, of_run)
        rows, seconds, idle = answer(args, tokenizer, problems, sampler, plug_in)
    count = len(rows) // args.samples
    if rows:
        figures = evaluation_figures(rows, args.samples)
        if plug_in:
            figures["reward"] = torch.tensor([row["task"] for row in rows]).nanmean().item()
        if others is not None and idle is not None:
            figures |= paired_figures(rows, others)
        tokens = sum(row["length"] for row in rows)
        figures |= {"n": count,
                    "unreadable": sum(not can_read(p.answer) for p in problems),
                    "tokens": tokens, "tokens_per_s": tokens / seconds, "idle": idle,
                    "seconds_sample": seconds, "seconds": time.perf_counter() - began}
        show(args, figures, shift)
    if idle is None:
        print(f"evaluate.py: stopped by Ctrl-C: {count} of {len(problems)} problems are done",
              file=sys.stderr)
        sys.exit(130)


def show(args, figures, shift):
    for name, value in figures.items():
        values = value if isinstance(value, list) else [value]
        print(f"{name:15}", *(f"{v:.4g}" if isinstance(v, float) else v for v in values))
    hardware = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    about = process.provenance(hardware)
    print(json_line({**vars(args), **figures, "adapter_shift": shift, **about}), end="")


if __name__ == "__main__":
    main()
