"""
Accuracy of a model, with or without an adapter: the same sampler and grader as training.

    python evaluate.py --model qwen2.5-7b --adapter runs/x/adapter --data gsm8k --out after.jsonl
    python evaluate.py ... --against before.jsonl    compared with that run, problem by problem

Greedy by default; --samples N draws N answers a problem. For c of its n answers right
    pass@k = 1 - C(n - c, k) / C(n, k)      chance that k of the n hold a right one
    maj@k  is the commonest of k answers right? Mean over the n // k blocks of k in order of
           drawing. Equal answers vote together, none is no vote, a tie counts as its right share.
Each is a mean over problems with the 95 % interval of such a mean over problems like these.

Golds that the grader cannot read are counted and stay in. The lenient figure also takes the last
number where nothing says which is meant. The last line on stdout is one JSON object.

Not here: few-shot prompts, engines other than our own.
"""
import argparse
import json
import math
import shlex
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from tqdm import tqdm

import data
import hf
import lora
import model as qwen
import nvfp4
import rewards
from run import write_atomically
from sampler import Sampling, TorchEngine, sampler_for

Z = 1.959964                                     # 95 % of a normal lies within +-Z

# -------------------------------------------------------------------------------------------------
# Figures

def mean(values):
    return sum(values) / len(values)


def pass_at_k(n, c, k):
    """The unbiased estimate (Chen et al. 2021); integers until the one division."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def ballots(answers):
    """Extracted answers -> for each the first one equal to it; None stays None."""
    vote = {None: None}
    for answer in answers:
        if answer not in vote:
            equal = (v for v in dict.fromkeys(vote.values()) if rewards.is_equal(answer, v))
            vote[answer] = next(equal, answer)
    return [vote[answer] for answer in answers]


def maj_at_k(votes, correct, k):
    """ballots() of one problem's n answers and their verdicts -> mean over n // k blocks."""
    right = dict(zip(reversed(votes), reversed(correct)))        # the first of equal ones decides
    scores = []
    for i in range(0, len(votes) - k + 1, k):
        count = Counter(vote for vote in votes[i:i + k] if vote is not None)
        tied = [vote for vote in count if count[vote] == max(count.values())]
        scores.append(sum(right[vote] for vote in tied) / max(len(tied), 1))
    return mean(scores)


def interval(values, samples=1):
    """A value in [0, 1] for each problem, from `samples` answers -> [mean, low, high] at 95 %.

    Wilson's interval at the effective sample size mean (1 - mean) / var(mean): the number of
    problems if all values are 0 or 1, the textbook's interval, and never more than that of
    answers. It has a width at 0 and 1 too.
    """
    count = len(values)
    p = mean(values)
    spread = p * (1 - p)
    variance = sum((v - p) ** 2 for v in values) / count**2
    n = count
    if spread:
        n = spread / max(variance, spread / (count * samples))
    centre = p + Z * Z / (2 * n)
    half = Z * math.sqrt(spread / n + (Z / (2 * n)) ** 2)
    scale = 1 + Z * Z / n
    return [p, max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)]


def mcnemar(won, lost):
    """Exact two-sided p of so uneven a split of the problems that one of two runs solved."""
    tail = sum(math.comb(won + lost, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def by_problem(rows):
    verdicts = defaultdict(list)
    for row in rows:
        verdicts[row["id"], row["question"]].append(row["correct"])
    return verdicts


def paired(rows, others):
    """Accuracy of rows minus others on the problems of both; ValueError if there are none.

    The interval is normal over problems with one won and one lost added (Bonett and Price 2012):
    runs that agree everywhere get a width. McNemar's p, else None, is for one answer a problem.
    """
    mine = by_problem(rows)
    theirs = by_problem(others)
    both = [(mine[key], theirs[key]) for key in mine if key in theirs]
    if not both:
        raise ValueError(f"--against: none of its {len(theirs)} problems is among the {len(mine)} "
                         "here")
    gaps = [mean(a) - mean(b) for a, b in both]
    n = len(gaps) + 2
    centre = sum(gaps) / n
    half = Z * math.sqrt(((sum(gap**2 for gap in gaps) + 2) / n - centre**2) / n)
    won = sum(gap > 0 for gap in gaps)
    lost = sum(gap < 0 for gap in gaps)
    single = all(len(a) == len(b) == 1 for a, b in both)
    return {"pairs": len(both), "unpaired": len(mine) + len(theirs) - 2 * len(both), "won": won,
            "lost": lost, "difference": [mean(gaps), centre - half, centre + half],
            "mcnemar_p": mcnemar(won, lost) if single else None}


def summarize(rows, samples):
    """Rows of judge(), `samples` a problem -> figures; lists are [mean, low, high]."""
    groups = [rows[i:i + samples] for i in range(0, len(rows), samples)]
    correct = [[int(row["correct"]) for row in group] for group in groups]
    votes = [ballots([row["extracted"] for row in group]) for group in groups]
    ks = sorted({samples, *(2**i for i in range(samples.bit_length()))})         # 1, 2, 4, ..., N
    values = {f"pass@{k}": [pass_at_k(samples, sum(c), k) for c in correct] for k in ks}
    for k in ks[1:]:
        values[f"maj@{k}"] = [maj_at_k(v, c, k) for v, c in zip(votes, correct)]
    values["pass@1_lenient"] = [mean([row["lenient"] for row in group]) for group in groups]
    figures = {name: interval(of_problem, samples) for name, of_problem in values.items()}
    figures |= {key: mean([row[key] for row in rows]) for key in ("format", "length")}
    figures["truncated"] = mean([not row["finished"] for row in rows])
    return figures | {"rules": dict(Counter(row["rule"] for row in rows).most_common())}


# -------------------------------------------------------------------------------------------------
# The command

def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder, Hugging Face id or name such as qwen2.5-7b")
    add("--adapter", help="PEFT folder, such as train.py's runs/x/adapter")
    add("--base", default="nvfp4", choices=list(nvfp4.FORMATS), help="format of the linears")
    add("--dtype", choices=["bfloat16", "float16"], help="of matmul inputs, as of train.py")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    add("--data", required=True, help="as of train.py: gsm8k, a file, a Hugging Face id, ...")
    add("--split", default="test", choices=["train", "test"], help="of a data set, not of a file")
    add("--limit", type=int, default=0, help="only the first so many problems; 0: all")
    add("--prompt-style", default="boxed", choices=sorted(data.STYLES),
        help="boxed: Qwen's; tags: the paper's")
    add("--samples", type=int, default=1, help="answers a problem")
    add("--temperature", type=float,
        help="0: greedy. Default: 0 for one sample, the paper's 0.6 for several")
    add("--top-p", type=float, default=0.95, help="nucleus of sampled answers (paper)")
    add("--top-k", type=int, default=0, help="sample from the likeliest so many only; 0: all")
    add("--max-new-tokens", type=int, default=4096, help="longest completion (paper)")
    add("--max-rows", type=int, default=256, help="most sequences decoded at a time")
    add("--seed", type=int, default=0, help="of sampling")
    add("--out", help="new .jsonl file for every completion with its verdict")
    add("--against", help="another run's --out, to compare with problem by problem")
    args = parser.parse_args()
    if args.temperature is None:
        args.temperature = 0.0 if args.samples == 1 else 0.6
    return args


def check(args):
    """ValueError for flags that can be refused before anything is loaded."""
    least = {"samples": 1, "max_new_tokens": 1, "max_rows": 1, "limit": 0, "top_k": 0}
    for name, low in least.items():
        value = getattr(args, name)
        if value < low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise ValueError("need a --temperature >= 0 and 0 < --top-p <= 1, got "
                         f"{args.temperature} and {args.top_p}")
    if args.samples > 1 and args.temperature == 0:
        raise ValueError(f"--samples {args.samples} needs a --temperature above 0: greedy answers "
                         "are all the same")
    if args.out and Path(args.out).exists():
        raise ValueError(f"--out {args.out} exists and is not overwritten: choose another name")
    if args.temperature == 0:                    # greedy ignores the two: say so in the figures
        args.top_p = 1.0
        args.top_k = 0


def select_device(name):
    """-> torch.device; a GPU becomes the current one, on which Triton launches."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device.index or 0)
    return device


def read_results(path):
    """Rows of another run's --out. ValueError names the line that is not one."""
    if not Path(path).is_file():
        raise ValueError(f"--against {path}: no such file")
    kinds = {"id": str, "question": str, "correct": (int, float)}
    rows = data.read_rows(Path(path))
    for number, row in rows:
        if not (isinstance(row, dict) and
                all(isinstance(row.get(key), kind) for key, kind in kinds.items())):
            raise ValueError(f"--against {path}:{number}: needs {', '.join(kinds)}, so --out did "
                             "not write it")
    return [row for _, row in rows]


def prove_adapter(model, sampler, prompt, max_new_tokens):
    """-> mean change of a probe's log-probs by the adapter. ValueError if the sampler's lack it.

    Loaded but not applied, an adapter scores like the base and nothing tells (the release's GSM8K
    evaluation, for one).
    """
    if not any(linear.b.any() for linear in model.adapter.linears):
        print("the adapter's B is zero in every layer: its linears are the base's")
        return 0.0
    probe = sampler.generate([prompt], 2, Sampling(min(32, max_new_tokens)))
    tokens = [prompt + completion for completion in probe.completions]
    starts = [len(prompt)] * 2
    with torch.no_grad():
        on, _ = model.token_logprobs(tokens, starts)
        with model.adapter.off():
            off, _ = model.token_logprobs(tokens, starts)
    sampled = torch.cat(probe.logprobs).to(on.device)
    shift = (on - off).abs().mean().item()
    to_on = (sampled - on).abs().mean().item()
    to_off = (sampled - off).abs().mean().item()
    distances = (f"moves log-probs by {shift:.1e}, the sampler is {to_on:.1e} from that and "
                 f"{to_off:.1e} from the base")
    if shift == 0 or to_off < shift / 2:         # half: to_off is rounding alone if not applied
        raise ValueError(f"--adapter has no effect: it {distances}")
    print(f"adapter active: it {distances}")
    return shift


def prepare(args):
    """-> tokenizer, problems, sampler, rows of --against, adapter's shift.

    Whatever can be wrong is found out here, before the first token.
    """
    check(args)
    device = select_device(args.device)
    problems, _ = data.load_problems(args.data, args.split)
    problems = problems[:args.limit or None]
    others = None
    if args.against:
        others = read_results(args.against)
        paired([{**vars(p), "correct": 0.0} for p in problems], others)
    folder = hf.resolve(args.model)
    tokenizer = data.Tokenizer(folder)
    problems, _ = data.encode_prompts(tokenizer, problems, args.prompt_style, math.inf)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    model = qwen.load(folder, args.base, device, args.dtype, tokenizer.vocab_size)
    if args.adapter:
        lora.load_adapter(model, args.adapter)
    engine = TorchEngine
    if device.type == "cuda":
        from decode import GraphEngine as engine                 # the engine room: Triton
    longest = max(len(p.prompt) for p in problems) + args.max_new_tokens
    rows = min(args.max_rows, len(problems) * args.samples)
    sampler = sampler_for(engine, model, longest, rows)
    shift = None
    if args.adapter:
        shift = prove_adapter(model, sampler, problems[0].prompt, args.max_new_tokens)
    return tokenizer, problems, sampler, others, shift


def judge(args, tokenizer, problems, rollouts):
    """-> rows of rewards.score() with `sample`, its number, and `lenient`, right by any reading."""
    rows = rewards.score(tokenizer, problems, rollouts, args.prompt_style)
    for i, row in enumerate(rows):
        row["sample"] = i % args.samples
        row["lenient"] = row["correct"]
        if row["rule"] == "none":
            verdict = rewards.grade(row["completion"], row["answer"], last_number=True)
            row["lenient"] = float(verdict.correct)
    return rows


def main():
    args = parse_args()
    began = time.perf_counter()
    try:
        tokenizer, problems, sampler, others, shift = prepare(args)
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: {str(error).splitlines()[0]}")
    except RuntimeError as error:
        if "allocate" not in str(error):         # of a GPU or the host; the host has no class
            raise
        sys.exit(f"evaluate.py: not enough memory: {str(error).splitlines()[0]}")
    sampling = Sampling(args.max_new_tokens, tokenizer.end_ids, args.temperature, args.top_k,
                        args.top_p, args.seed)
    prompts = [p.prompt for p in problems]
    name = f"{len(prompts)} x {args.samples} answers"
    with tqdm(desc=name, unit=" tokens", unit_scale=True) as bar:
        rollouts = sampler.generate(prompts, args.samples, sampling, progress=bar.update)
    rows = judge(args, tokenizer, problems, rollouts)
    if args.out:
        write_atomically(args.out, "".join(json.dumps(row) + "\n" for row in rows).encode())
    figures = summarize(rows, args.samples)
    if others:
        figures |= paired(rows, others)
    figures |= {"n": len(problems),
                "unreadable": sum(not rewards.can_read(p.answer) for p in problems),
                "tokens": rollouts.num_tokens,
                "tokens_per_s": rollouts.num_tokens / rollouts.seconds,
                "idle": rollouts.idle, "seconds_sample": rollouts.seconds,
                "seconds": time.perf_counter() - began}
    for name, value in figures.items():
        values = value if isinstance(value, list) else [value]
        print(f"{name:15}", *(f"{v:.4g}" if isinstance(v, float) else v for v in values))
    hardware = args.device
    if hardware.startswith("cuda"):
        hardware = torch.cuda.get_device_name()
    print(json.dumps({**vars(args), **figures, "adapter_shift": shift, "hardware": hardware,
                      "command": f"python {shlex.join(sys.argv)}"}))


if __name__ == "__main__":
    main()
