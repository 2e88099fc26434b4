"""
Measures a model's accuracy, with or without an adapter, with the sampler and grader of training.

    python evaluate.py runs/x                        a run, with its flags, on the problems that it
                                                     held out; --limit 0: on all of the test split
    python evaluate.py --model qwen2.5-7b --adapter runs/x/adapter --data gsm8k --out after.jsonl
    python evaluate.py ... --against before.jsonl    compared with that evaluation, by problem

Answers are greedy by default. With --samples N each problem gets N sampled answers, for pass@k and
maj@k (harness/figures.py). The figures are printed, and docs/metrics.md defines them. If stdout is
no terminal but a file or a pipe, its last line is a JSON object of all of them. --out grows with
each problem that is done. Ctrl-C ends the sampling, and the figures of the problems that are done
are printed. If a full disk cuts --out short, the figures still count all answers.

Not here: few-shot prompts.
"""
import argparse
import dataclasses
import os
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness import process  # before torch
import torch
from tqdm import tqdm

import lora
import model as qwen
import nvfp4
import rewards
from answers import can_read
from harness import config, data, hf, peft, plugin
from harness.config import MAX_ROWS, Settings, setting
from harness.device import KERNELS, choose_device, configure_cpu, refuse_large_rank
from harness.figures import evaluation_figures, paired_figures, sampler_entropy
from harness.files import errors_name_file, json_line, read_json, read_rows, write_atomically
from harness.ranks import say
from sampler import Sampler, Sampling, Sequence, engine_for, rollouts_of


@dataclass(frozen=True)
class Which:
    """which model"""
    model: str | None = setting(None, "folder, Hugging Face id or a name such as qwen2.5-7b")
    adapter: str | None = setting(None, "PEFT folder, such as runs/x/adapter; none: the model "
                                  "without an adapter")
    base: str | None = setting(None, "format of the linears (default: nvfp4, or bf16 for a folder "
                               "of tools.convert merge)", choices=nvfp4.FORMATS)
    dtype: str | None = setting(None, "type of the inputs of matmuls, as in train.py",
                                choices=("bfloat16", "float16"))
    device: str | None = setting(None, "cpu, cuda or cuda:N (default: a GPU if there is one)")
    kernels: str = setting("auto", "as in train.py", choices=("auto", *KERNELS))


@dataclass(frozen=True)
class Evaluation:
    """which problems, and how they are answered"""
    data: str | None = setting(None, "as in train.py: a file, or the test split of gsm8k or an id "
                               "(default: what the run holds out)")
    limit: int | None = setting(None, "only the first LIMIT problems; 0: all (default: those that "
                                "the run held out, or all of --data)", "[0, 2e9]")
    prompt_style: str = setting("boxed", "as in train.py")
    thinking: str = setting("off", "as in train.py", choices=("on", "off"))
    reward: str | None = setting(None, "module:function, as in train.py: its mean is among the "
                                 "figures")
    samples: int = setting(1, "answers to each problem", "[1, 1e5]")
    temperature: float | None = setting(None, "0: greedy (default: 0; with several samples 0.6, as "
                                        "in the paper)", "[0, 1000]")
    top_p: float = setting(0.95, "nucleus of sampled answers (paper)", "(0, 1]")
    top_k: int = setting(0, "sample only from the TOP_K likeliest tokens; 0: from all", "[0, 2e9]")
    max_new_tokens: int | None = setting(None, "longest answer in tokens (default: the paper's "
                                         "4096, or fewer if the model has too few positions)",
                                         "[1, 2e9]")
    max_rows: int = setting(256, "most answers that are decoded at a time", MAX_ROWS)
    seed: int = setting(0, "random seed of sampling", "[0, 2e18]")
    out: str | None = setting(None, "new .jsonl file for every answer with its verdict")
    against: str | None = setting(None, "the --out of another evaluation, to compare with problem "
                                  "by problem")


def parse(parser: argparse.ArgumentParser, sections: list) -> tuple[argparse.Namespace,
                                                                    Settings | None]:
    """-> the flags of these sections, and the settings of the run that is named, if one is.

    If a run is named, its settings are the defaults of the flags that it shares with the sections.
    """
    parser.add_argument("run", nargs="?", help="folder of a run, whose flags are the defaults")
    for section in sections:
        config.add_section(parser, section)
    args = parser.parse_args()
    run = None
    if args.run:
        run = config.settings_of_run(args.run)
        names = "model", "base", "dtype", "prompt_style", "thinking", "reward", "max_new_tokens"
        parser.set_defaults(adapter=str(Path(args.run) / "adapter"),
                            **{name: run.flat()[name] for name in names})
        args = parser.parse_args()
        config.tell_functions(args.run, vars(args))
    if args.adapter == "none":
        args.adapter = None
    return args, run


def read_flags() -> tuple[Which, Evaluation, Settings | None]:
    """The command line. ValueError for what can be refused before anything is loaded."""
    parser = argparse.ArgumentParser(usage="evaluate.py [run] [flags], --help lists them",
                                     description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=config.Help)
    args, run = parse(parser, [Which, Evaluation])
    which = config.section_of(Which, args)
    wanted = config.section_of(Evaluation, args)
    if which.model is None or not (wanted.data or run):
        raise ValueError("needs the folder of a run, or --model and --data")
    hf.check_model(which.model)
    if wanted.temperature is None:
        wanted = dataclasses.replace(wanted, temperature=0.0 if wanted.samples == 1 else 0.6)
    config.check_ranges(wanted)
    if wanted.samples > 1 and wanted.temperature == 0:
        raise ValueError(f"--samples {wanted.samples} needs a --temperature above 0")
    if wanted.out and Path(wanted.out).exists():
        raise ValueError(f"--out {wanted.out} exists and is not overwritten")
    if wanted.out:                               # an hour of sampling later would be too late
        Path(wanted.out).parent.mkdir(parents=True, exist_ok=True)
        open(wanted.out, "x").close()
        os.remove(wanted.out)
    if wanted.temperature == 0:                  # greedy ignores the two: the figures say so
        wanted = dataclasses.replace(wanted, top_p=1.0, top_k=0)
    data.prompt_function(wanted.prompt_style)
    if wanted.data:
        data.check_source(wanted.data)
    return which, wanted, run


def open_model(which: Which, prompt_style: str, thinking: str
               ) -> tuple[Which, torch.device, str | None, data.Tokenizer]:
    """-> the flags with --base and --device decided; the device, and which kernels decode there;
    the tokenizer.

    ValueError for all that can be wrong with the device, the adapter or the model, except for its
    weights: load_model() may take an hour to download them. What differs from the adapter's
    training is printed.
    """
    device, kernels = choose_device(which.device, which.kernels, which.model)
    if kernels:
        say(f"decode kernels: {kernels}, on {torch.cuda.get_device_name(device)}")
    if which.adapter:
        rank = peft.read_peft_config(which.adapter).lora_rank
        refuse_large_rank(rank, device, f"--adapter {which.adapter}: its rank of {rank}")
        peft.read_peft(which.adapter)
    folder = hf.resolve(which.model, weights=False)
    base = hf.base_of(folder, which.base)
    if which.adapter:
        conditions = peft.training_conditions(folder, base, prompt_style, thinking)
        peft.tell_other_conditions(which.adapter, conditions)
    tokenizer = data.Tokenizer(folder, thinking)
    return dataclasses.replace(which, base=base, device=device.type), device, kernels, tokenizer


def load_model(which: Which, device: torch.device, tokenizer: data.Tokenizer) -> qwen.Qwen:
    """What open_model() returned -> the model, held as --base and --dtype say, with --adapter."""
    model = qwen.load(hf.resolve(which.model), which.base, device, which.dtype,
                      tokenizer.vocab_size)
    configure_cpu(model)
    if which.adapter:
        lora.load_adapter(model, which.adapter)
    return model


def read_results(path: str) -> list[dict]:
    """Rows of another evaluation's --out. ValueError names the line that is not one."""
    rows = []
    for number, row in read_rows(Path(path)):
        known = isinstance(row, dict) and row.get("correct") in (0, 1)
        if not (known and isinstance(row.get("id"), str) and isinstance(row.get("question"), str)):
            raise ValueError(f"--against {path}:{number}: needs id, question, correct")
        rows.append(row)
    return rows


def problems_of(wanted: Evaluation, run: Settings | None, tokenizer: data.Tokenizer
                ) -> tuple[list, str]:
    """-> problems with prompts, of --data or what the run holds out; where they come from.

    For a run without --limit these are its --eval-problems, which its own evaluations used. With
    --limit there may be more if they come from a test split. If they are the end of the run's
    training data there are no more: the run was trained on all others. ValueError if that data has
    changed, since its end may then be what the run was trained on.
    """
    source = wanted.data
    by_run = ""
    if source:
        problems = data.load_problems(source, "test", needs_gold=not wanted.reward)
    else:
        held = run.data
        source = held.eval_data or held.data
        ends_training_data = not held.eval_data and not data.has_test_split(held.data)
        if wanted.limit is not None and not ends_training_data:
            held = dataclasses.replace(held, eval_problems=0)
        # Prompts that were too long for the run are not among its problems. So lengths are measured
        # with the run's --thinking, which changes them.
        asked = tokenizer if held.thinking == wanted.thinking else \
            data.Tokenizer(tokenizer.folder, held.thinking)
        trained_on, problems = data.split_problems(held, asked)
        before = read_json(Path(run.general.out) / "run.json").get("problems_sha256")
        now = data.digest_of(trained_on + problems, held.reward)
        if ends_training_data and before not in (None, now):
            raise ValueError(f"{run.general.out} was trained on other problems or prompts than "
                             f"{source} has now, perhaps on those at its end: name problems with "
                             "--data")
        by_run = f" that {run.general.out} did not train on"
        if wanted.limit is None and not ends_training_data:
            by_run += " (--limit 0: all of the test split)"
    problems = problems[:wanted.limit or None]
    say(f"{len(problems):,} problems of {source}{by_run}")
    return data.encode_prompts(tokenizer, problems, wanted.prompt_style), source


def prove_adapter(model: qwen.Qwen, sampler: Sampler, prompt: list, max_new_tokens: int) -> float:
    """-> by how much the adapter changes the log-probs of a probe, on average, in nats.

    ValueError if the sampler ignores the adapter. In NVlabs/QeRL's GSM8K evaluation the sampler did
    so, unnoticed. The sampler's log-probs are compared with those that the model computes with the
    adapter (`on`) and without (`off`). They differ from the right ones by rounding alone, and from
    the others by what the adapter does; if that is not more than rounding, nothing is proved.
    """
    if not any(linear.b.any() for linear in model.adapter.linears):
        print("the adapter's B is zero in every layer: the linears compute what the base's do")
        return 0.0
    probe = sampler.generate([prompt], 2, Sampling(min(32, max_new_tokens)))
    rows = [prompt + completion for completion in probe.completions]
    starts = [len(prompt)] * 2
    with torch.no_grad():
        on, _ = model.token_logprobs(rows, starts)
        with model.adapter.off(norms=False):     # a sampler that ignores A and B still has these
            off, _ = model.token_logprobs(rows, starts)
    sampled = torch.cat(probe.logprobs).to(on.device)
    shift = (on - off).abs().mean().item()
    to_on, to_off = ((sampled - one).abs().mean().item() for one in (on, off))
    changes = f"changes the log-probabilities of a short probe by {shift:.2g} nats a token"
    if to_on > 2 * to_off:
        raise ValueError(f"--adapter has no effect: it {changes}, and the sampler's are "
                         f"{to_off:.1e} from those without it")
    if to_off > 2 * to_on:
        print(f"the adapter is applied: it {changes}")
    else:
        print(f"the adapter {changes}: too little to tell from rounding ({to_on:.1e}) whether the "
              "sampler applies it")
    return shift


def grade_problem(wanted: Evaluation, tokenizer: data.Tokenizer, problem: data.Problem,
                  answers: list[Sequence], plug_in: plugin.Reward | None) -> list[dict]:
    """-> a row for each answer to one problem, in their order."""
    answers = sorted(answers, key=lambda one: one.row)
    rows = rewards.grade_rollouts(tokenizer, [problem], rollouts_of(answers), wanted.prompt_style,
                                  plug_in)
    for sample, row in enumerate(rows):
        lenient = rewards.grade(tokenizer.opened + row["completion"], row["answer"],
                                row["question"], last_number=True)
        row |= {"sample": sample, "lenient": float(lenient.correct)}
    return rows


def answer(wanted: Evaluation, tokenizer: data.Tokenizer, problems: list, sampler: Sampler,
           plug_in: plugin.Reward | None) -> tuple[list[dict], float, float | None, str]:
    """-> rows of the problems that were done, in their order; seconds; share of idle rows, or None
    if Ctrl-C came; why --out could not be written, or "".

    The rows of a problem are in the file --out as soon as its last answer is there. Where the file
    cannot be written, a full disk say, sampling goes on: the figures need no file.
    """
    waiting = defaultdict(list)                  # problem -> its answers so far
    done = {}                                    # problem -> its rows
    tokens = 0
    failure = ""

    def progress(made: int, sequences: list[Sequence]) -> None:
        nonlocal tokens, failure
        ended = [sequence for sequence in sequences if sequence.ended]
        tokens += made
        rate = tokens / (time.perf_counter() - began)
        bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        bar.update(len(ended))
        for sequence in ended:
            i = sequence.row // wanted.samples
            waiting[i].append(sequence)
            if len(waiting[i]) < wanted.samples:
                continue
            # done[i] is set when the rows are complete: Ctrl-C may come while they are graded.
            done[i] = grade_problem(wanted, tokenizer, problems[i], waiting.pop(i), plug_in)
            if wanted.out and not failure:
                failure = append_rows(wanted.out, done[i])
                if failure:
                    bar.write(f"{failure}: sampling goes on, the figures will be printed",
                              file=sys.stderr)

    sampling = Sampling(wanted.max_new_tokens, tokenizer.end_ids, wanted.temperature, wanted.top_k,
                        wanted.top_p, wanted.seed)
    prompts = [problem.prompt for problem in problems]
    began = time.perf_counter()
    idle = None
    if wanted.out:
        open(wanted.out, "x").close()
    # miniters=0: tokens/s is drawn anew while no answer comes to its end, too.
    try:
        with tqdm(total=len(prompts) * wanted.samples, unit=" answers", smoothing=0, miniters=0,
                  dynamic_ncols=True, bar_format=ANSWERS_BAR) as bar:
            with suppress(KeyboardInterrupt):
                idle = sampler.generate(prompts, wanted.samples, sampling, progress=progress).idle
    except BaseException:                        # an error of --reward, for instance
        remove_if_empty(wanted.out)
        raise
    seconds = time.perf_counter() - began
    rows = [row for i in sorted(done) for row in done[i]]
    if wanted.out:                               # at last in the order of the problems
        try:
            write_atomically(wanted.out, "".join(map(json_line, rows)).encode())
            failure = ""                         # the disk may have space again
        except OSError as error:
            failure = process.first_line(error)
        remove_if_empty(wanted.out)              # Ctrl-C before the first problem, or a full disk
    return rows, seconds, idle, failure


# The total, the time left and the speed first, in 80 columns; the bar itself has what remains.
ANSWERS_BAR = "{n_fmt}/{total_fmt}{unit} |{bar}| {elapsed}, {remaining} left{postfix}"


def remove_if_empty(path: str | None) -> None:
    """Removes a file without answers, which would be in the way of the next try."""
    with suppress(OSError):
        if path and not os.path.getsize(path):
            os.unlink(path)


def append_rows(path: str, rows: list[dict]) -> str:
    """Appends rows to a .jsonl -> "", or why that failed; the file then ends with a whole line."""
    before = None
    try:
        with errors_name_file(path):
            before = os.path.getsize(path)       # fails if the file is gone
            with open(path, "a") as file:
                file.writelines(map(json_line, rows))
    except OSError as error:
        if before is not None:
            with suppress(OSError):
                os.truncate(path, before)
        return process.first_line(error)
    return ""


def main() -> None:
    began = time.perf_counter()
    with process.one_line("evaluate.py"):
        which, wanted, run = read_flags()
        plug_in = plugin.Reward(wanted.reward) if wanted.reward else None
        others = read_results(wanted.against) if wanted.against else None
        which, device, kernels, tokenizer = open_model(which, wanted.prompt_style,
                                                       wanted.thinking)
        folder = tokenizer.folder
        problems, source = problems_of(wanted, run, tokenizer)
        if others is not None:                   # ValueError if no problem is in both
            paired_figures([{**vars(problem), "correct": 0.0} for problem in problems], others)
        longest = max(len(problem.prompt) for problem in problems)
        new_tokens = wanted.max_new_tokens
        if new_tokens is None:
            new_tokens = max(1, min(4096, hf.max_positions(folder) - longest))
        wanted = dataclasses.replace(wanted, data=source, max_new_tokens=new_tokens)
        hf.check_lengths(folder, longest + new_tokens)
        model = load_model(which, device, tokenizer)
        rows_at_once = min(wanted.max_rows, len(problems) * wanted.samples)
        sampler = Sampler(engine_for(kernels), model, longest + new_tokens, rows_at_once)
        shift = None
        if which.adapter:
            shift = prove_adapter(model, sampler, problems[0].prompt, new_tokens)
        rows, seconds, idle, failure = answer(wanted, tokenizer, problems, sampler, plug_in)
    count = len(rows) // wanted.samples
    if rows:
        figures = evaluation_figures(rows, wanted.samples)
        if wanted.temperature > 0:
            figures["sampler_entropy"] = sampler_entropy(rows)
        if plug_in:
            figures["mean_reward"] = torch.tensor([row["task"] for row in rows]).nanmean().item()
        if others is not None and idle is not None:
            figures |= paired_figures(rows, others)
        tokens = sum(row["length"] for row in rows)
        figures |= {"n": count,
                    "unreadable": sum(not can_read(problem.answer) for problem in problems),
                    "tokens": tokens, "tokens_per_s": tokens / seconds, "idle": idle,
                    "seconds_sample": seconds, "seconds": time.perf_counter() - began}
        flags = {"run": run and run.general.out, **vars(which), **vars(wanted)}
        print_result(figures, flags, shift, device)
    if idle is None:
        print(f"evaluate.py: stopped by Ctrl-C: {count} of {len(problems)} problems are done",
              file=sys.stderr)
    if failure:
        print(f"evaluate.py: {failure}: --out lacks some answers, the figures above count all",
              file=sys.stderr)
    if failure or idle is None:
        sys.exit(130 if idle is None else 1)


# What a person reads beside a figure; docs/metrics.md has the definitions.
MEANINGS = {
    "pass@1": "right answers, with a 95 % interval",
    "pass@1_lenient": "the same, if the last number counts where no answer is marked",
    "format": "of the answers have the form that was asked for",
    "length": "tokens in an answer, mean",
    "truncated": "of the answers were cut at --max-new-tokens",
    "rules": "how the answer was found in the text, and how often",
    "n": "problems",
    "unreadable": "problems whose known answer cannot be read, only compared letter by letter",
    "idle": "of the computed rows gave no token",
}


def print_result(figures: dict, flags: dict, shift: float | None, device: torch.device) -> None:
    """Prints the figures, a line each, and then all that is known as one JSON object, unless it
    would only fill a terminal.

    A share of the answers with its interval is a list in the JSON, and here "25.0 % [11.2, 46.9]".
    """
    for name, value in figures.items():
        if value is None:                        # `idle`, if Ctrl-C came
            continue
        if isinstance(value, list):
            mean, low, high = (100 * share for share in value)
            value = f"{mean:.1f} % [{low:.1f}, {high:.1f}]"
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {count:,}" for key, count in value.items())
        elif name in ("format", "truncated", "idle"):
            value = f"{100 * value:.1f} %"
        elif isinstance(value, float):
            value = f"{value:.4g}"
        print(f"{name:15} {value!s:21} {MEANINGS.get(name, '')}".rstrip())
    if sys.stdout.isatty():
        return
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = process.provenance(hardware)
    print(json_line({**flags, **figures, "adapter_shift": shift, **about}), end="")


if __name__ == "__main__":
    main()
