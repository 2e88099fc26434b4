"""
Measure the accuracy of a model or a run, using training's sampler and grader.

    python evaluate.py runs/x                   a run, on its held-out problems
    python evaluate.py runs/x --limit 0         ... on the full test split
    python evaluate.py --model qwen2.5-7b --data gsm8k --base bf16

Answers are greedy by default; --samples N draws N per problem, for pass@k.
docs/metrics.md defines the figures. If stdout is a file or a pipe, the last
line is a JSON object with all of them.
"""
import argparse
import sys
import time
from pathlib import Path

import env  # isort: skip; its settings come before torch

import torch
from tqdm import tqdm

import rewards
from adapters import read_peft_config
from files import UserError, counted, first_line, json_line, read_run_json, write_atomically
from harness import config, console, memory
from harness.config import add_flag, number
from harness.setup import choose_device, open_model
from prompts import (
    Tokenizer,
    digest_of,
    encode_prompts,
    prompt_function,
    readable_problems,
    split_problems,
)
from ranks import WORLD, say
from sampler import Row, Sampler, Sampling
from tasks import plugin
from tasks.figures import evaluation_figures, sampler_entropy
from tasks.problems import has_test_split, load_problems
from weights import ModelFolder

# -----------------------------------------------------------------------------
# Flags

def model_parser(text: str, style: str) -> argparse.ArgumentParser:
    """The parser of evaluate.py and tools.chat, with the flags that both have. text: its --help;
    style: the default of --prompt-style.
    """
    parser = env.parser("[run] [flags]", text)
    add = parser.add_argument
    add("run", nargs="?", help="run folder; its settings become the defaults")
    add_flag(parser, "model", None, "folder, Hugging Face id, or a name such as qwen2.5-7b")
    add("--adapter", help="PEFT folder, such as runs/x/adapter; none: the model alone")
    add_flag(parser, "base", None, "format of the linear layers (default: nvfp4; bf16 for a folder "
             "from tools.convert merge)")
    add_flag(parser, "prompt_style", style, f"as in train.py (default: {style})")
    add("--temperature", type=number(float, "[0, 1000]"), metavar="X",
        help="0: greedy (default: 0)")
    for name, default in dict(thinking="off", device=None, kernels=None, memory_gib=None).items():
        add_flag(parser, name, default)
    add_flag(parser, "seed", 0, "random seed for sampling (default: 0)")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """-> the flags; `run` is the run's Settings, which are the defaults of the flags that exist
    here too, or None.
    """
    args = parser.parse_args()
    if WORLD > 1:
        raise UserError(f"runs as one process, not as {WORLD} ranks: start it without torchrun")
    if args.run:
        if Path(args.run, "config.json").exists():
            raise UserError(f"{args.run} is a model, not a run folder: use --model {args.run}")
        run = config.settings_of_run(args.run)
        names = "model", "base", "thinking", "kernels", "max_new_tokens", "prompt_style", "reward"
        # A run that trained all weights has no adapter.
        adapter = str(Path(args.run) / "adapter") if run.train == "lora" else None
        parser.set_defaults(adapter=adapter, **{name: getattr(run, name) for name in names})
        args = argparse.Namespace(**vars(parser.parse_args()) | {"run": run})
    if args.model is None:
        raise UserError("give a run folder or --model")
    if args.adapter == "none":
        args.adapter = None
    return args


def read_flags() -> argparse.Namespace:
    """The command line. UserError for anything that can be rejected before loading."""
    parser = model_parser(__doc__, "boxed")
    add = parser.add_argument
    add_flag(parser, "data", None, "as in train.py, but uses the test split (default: the problems "
             "that the run held out)")
    add("--limit", type=number(int, "[0, 2e9]"), metavar="N", help="only the first N problems; "
        "0: all (default: as many as the run held out, or all of --data)")
    add_flag(parser, "reward", None, "module:function, as in train.py, to report its mean too; "
             "none: ignore the run's")
    add("--samples", type=number(int, "[1, 1e5]"), default=1, metavar="N", help="answers per "
        "problem; above 1, --temperature defaults to 0.6 (default: 1)")
    add("--top-p", type=number(float, "(0, 1]"), default=0.95, metavar="X", help="nucleus "
        "sampling: probability mass to draw from; 1: all (default: 0.95)")
    add("--top-k", type=number(int, "[0, 2e9]"), default=0, metavar="N", help="number of most "
        "likely tokens to draw from; 0: all (default: 0)")
    add_flag(parser, "max_new_tokens", None, "longest answer, in tokens (default: 4096, or what "
             "fits the model's context)")
    add_flag(parser, "max_rows", 256, "maximum number of answers decoded at once (default: 256)")
    add("--out", metavar="FILE", help="new .jsonl file for every answer and its verdict")
    args = parse(parser)
    if args.reward == "none":
        args.reward = None
    if not (args.data or args.run):
        raise UserError("give a run folder or --data")
    if args.temperature is None:
        args.temperature = 0.0 if args.samples == 1 else 0.6         # 0.6: as in the paper
    if args.temperature == 0:
        if args.samples > 1:
            raise UserError(f"--samples {args.samples} needs a --temperature above 0")
        args.top_p, args.top_k = 1.0, 0          # so greedy log-probs are the model's
    if args.out:
        if Path(args.out).exists():
            raise UserError(f"--out {args.out} already exists: give a new file")
        try:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(args.out, b"")      # now, not after an hour of sampling
            Path(args.out).unlink()
        except OSError as error:
            raise UserError(f"--out {args.out}: cannot be written ({first_line(error)})") from None
        args.out = str(Path(args.out).absolute())        # a --reward may change the folder
    return args


# -----------------------------------------------------------------------------
# The model, and the problems

def check_model(args: argparse.Namespace) -> tuple[ModelFolder, Tokenizer, torch.device]:
    """-> the model's folder, its tokenizer and the device. Sets args.base. Loads --prompt-style and
    compares the user's functions with the run's; --reward must be loaded.

    UserError for anything wrong with the device, the adapter or the model, except for its weights:
    setup.open_model() may take an hour to download them.
    """
    prompt_function(args.prompt_style)
    if args.run:
        tell_changed_functions(args, args.run)
    device = choose_device(args.device, args.model, args.kernels)
    memory.bound(args.memory_gib, device)
    if args.adapter:
        read_peft_config(args.adapter)
    folder = ModelFolder(args.model)
    args.base = folder.choose_base(args.base)
    return folder, Tokenizer(folder.path, args.thinking), device


def tell_changed_functions(args: argparse.Namespace, run: config.Settings) -> None:
    """Prints which of the run's functions, --reward and --prompt-style, come from another file than
    at the run's last start.
    """
    run_json = read_run_json(run.out)
    was = [run_json.get("about", {}), *run_json.get("resumed", [])][-1]
    for key, now in plugin.digests(args).items():
        name = key.removesuffix("_sha256")
        spec = getattr(run, name)
        if now and getattr(args, name) == spec and was.get(key, now) != now:
            say(f"{config.option(name)} {spec}: {spec.partition(':')[0]}.py differs from the one "
                f"that {run.out} was trained with")


def problems_of(args: argparse.Namespace, tokenizer: Tokenizer) -> list:
    """The problems, with prompts: those of --data, or those that the run held out; with --limit,
    the test split of the run's data if it has one. Sets args.data to where they come from.

    Without --reward, problems whose answer the grader can't read are left out and counted, as in
    training. UserError if none is left, or if the run's data has changed, since what is now the end
    of a file may be what the run was trained on.
    """
    run = args.run
    if not args.data and args.limit is not None and (run.eval_data or has_test_split(run.data)):
        args.data = run.eval_data or run.data
    if args.data:
        problems = load_problems(args.data, "test", needs_gold=not args.reward)
    else:
        args.data = run.eval_data or run.data
        # With the run's --thinking, which affects which prompts were too long for it.
        trained_on, problems = split_problems(run, Tokenizer(tokenizer.folder, run.thinking))
        before = read_run_json(run.out).get("problems_sha256")
        if before != digest_of(trained_on + problems):
            raise UserError(f"{run.out} was trained on other problems or prompts than those of "
                            f"{args.data}: choose problems with --data")
    problems = readable_problems(problems, args.data, args.reward)[:args.limit or None]
    if not problems:
        raise UserError(f"{args.data}: has no problem whose answer the grader can read")
    say(f"{counted(len(problems), 'problem')} of {args.data}")
    return encode_prompts(tokenizer, problems, args.prompt_style)


# -----------------------------------------------------------------------------
# Answers

def answer(args: argparse.Namespace, tokenizer: Tokenizer, problems: list, sampler: Sampler,
           reward: plugin.Reward | None) -> list[dict]:
    """-> the graded rows of all answers, in the order of the problems. --out gets them too, also
    when the program is interrupted: then those of the problems before the first unfinished one.
    """
    sampling = Sampling(args.max_new_tokens, tokenizer.end_ids, args.temperature, args.top_k,
                        args.top_p, args.seed)
    prompts = [problem.prompt for problem in problems]
    graded, ended = [], {}                       # dicts in order; Rows by their number

    def grade_ended(_, sequences):
        ended.update((s.row, Row(s.prompt, s.completion, torch.tensor(s.logprobs), s.finished))
                     for s in sequences if s.ended)
        bar.update(len(ended) - bar.n)
        while all(len(graded) + i in ended for i in range(args.samples)):
            group = [ended[len(graded) + i] for i in range(args.samples)]
            found = rewards.grade_rows(tokenizer, [problems[len(graded) // args.samples]], group,
                                       args.prompt_style, reward)
            graded.extend(row | {"sample": i} for i, row in enumerate(found))

    try:
        # disable=None: no bar in a file.
        with tqdm(total=len(prompts) * args.samples, unit=" answers", smoothing=0,
                  dynamic_ncols=True, disable=None) as bar:
            sampler.generate(prompts, args.samples, sampling, progress=grade_ended)
    finally:
        done = len(graded) // args.samples
        if args.out and done:
            write_atomically(args.out, "".join(map(json_line, graded)).encode())
        if args.out and done < len(problems):
            kept = f"the first {done:,}" if done else "not written, 0"
            print(f"{console.shown(args.out)}: {kept} of {counted(len(problems), 'problem')} "
                  "answered", file=sys.stderr)
    return graded


# -----------------------------------------------------------------------------

def figures_of(args: argparse.Namespace, rows: list[dict]) -> dict:
    """Name -> figure."""
    figures = evaluation_figures(rows, args.samples)
    if args.temperature > 0:
        figures["sampler_entropy"] = sampler_entropy(rows)
    if args.reward:
        figures["mean_reward"] = torch.tensor([row["reward"] for row in rows],
                                              dtype=torch.float64).nanmean().item()
    return figures | {"n": len(rows) // args.samples,
                      "tokens": sum(row["length"] for row in rows)}


def print_result(args: argparse.Namespace, figures: dict, device: torch.device) -> None:
    """Prints the figures, one per line, then flags and figures as one JSON object unless stdout is
    a terminal.

    A mean with its interval is a list in the JSON, and "25.0% [11.2, 46.9]" in the lines.
    """
    for name, value in figures.items():
        if isinstance(value, list):
            mean, low, high = (100 * share for share in value)
            value = f"{mean:.1f}% [{low:.1f}, {high:.1f}]"
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {count:,}" for key, count in value.items())
        elif isinstance(value, float):
            share = "@" in name or name in ("format", "truncated")
            value = f"{100 * value:.1f}%" if share else f"{value:.4g}"
        print(f"{name:15} {value}")
    if not sys.stdout.isatty():
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        flags = vars(args) | {"run": args.run and args.run.out}
        print(json_line({**flags, **figures, **env.provenance(hardware)}), end="")


def main() -> None:
    with env.one_line():
        args = read_flags()
        reward = plugin.Reward(args.reward) if args.reward else None
        folder, tokenizer, device = check_model(args)
        problems = problems_of(args, tokenizer)
        longest = max(len(problem.prompt) for problem in problems)
        if args.max_new_tokens is None:
            args.max_new_tokens = max(1, min(4096, folder.max_positions - longest))
        folder.check_length(longest + args.max_new_tokens)
        model, _ = open_model(folder, tokenizer, device, args, args.adapter)
        sampler = Sampler(model, longest + args.max_new_tokens,
                          min(args.max_rows, len(problems) * args.samples))
        before = time.perf_counter()
        rows = answer(args, tokenizer, problems, sampler, reward)
        seconds = time.perf_counter() - before
        figures = figures_of(args, rows) | {"seconds_sample": seconds}
        figures["tokens_per_s"] = figures["tokens"] / seconds
        print_result(args, figures, device)


if __name__ == "__main__":
    main()
