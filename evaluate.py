"""
Accuracy of a model, with or without an adapter: the same sampler and grader as training.

    python evaluate.py --model qwen2.5-7b --adapter runs/x/adapter --data gsm8k --out after.jsonl
    python evaluate.py ... --against before.jsonl    compared with that run, problem by problem

Greedy by default; --samples N draws N answers a problem. For c of its n answers right
    pass@k = 1 - C(n - c, k) / C(n, k)      chance that k of the n hold a right one
    maj@k  is the commonest of k answers right? Mean over the n // k blocks of k as drawn. Equal
           answers vote together, none is no vote, a tie counts as its right share.
Each is a mean over problems, with its 95 % interval. The last line on stdout is a JSON object,
whose keys the README defines. Not here: few-shot prompts.
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
from program import first_line
from run import device_of, write_atomically
from sampler import Sampling, TorchEngine, sampler_for

Z = 1.959964                                     # 95 % of a normal lies within +-Z


def mean(values):
    return sum(values) / len(values)


def pass_at_k(n, c, k):
    """The unbiased estimate (Chen et al. 2021)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def ballots(answers):
    """Extracted answers -> for each the first one equal to it; None stays None."""
    vote = {None: None}
    for answer in answers:
        if answer not in vote:
            equal = (v for v in vote.values() if rewards.is_equal(answer, v))
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

    Wilson's, at the effective sample size: the number of problems if all values are 0 or 1, and
    never more than that of answers.
    """
    n = len(values)
    p = mean(values)
    spread = p * (1 - p)
    if spread:
        variance = sum((v - p) ** 2 for v in values) / n**2
        n = spread / max(variance, spread / (n * samples))
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

    The interval is normal over problems with one won and one lost added (Bonett and Price 2012).
    McNemar's p is for one answer a problem, else None.
    """
    mine = by_problem(rows)
    theirs = by_problem(others)
    gaps = [mean(mine[key]) - mean(theirs[key]) for key in mine if key in theirs]
    if not gaps:
        raise ValueError(f"--against: none of its {len(theirs)} problems is among the {len(mine)} "
                         "here")
    n = len(gaps) + 2
    centre = sum(gaps) / n
    half = Z * math.sqrt(((sum(gap**2 for gap in gaps) + 2) / n - centre**2) / n)
    won = sum(gap > 0 for gap in gaps)
    lost = sum(gap < 0 for gap in gaps)
    single = len(rows) == len(mine) and len(others) == len(theirs)
    return {"pairs": len(gaps), "unpaired": len(mine) + len(theirs) - 2 * len(gaps), "won": won,
            "lost": lost, "difference": [mean(gaps), centre - half, centre + half],
            "mcnemar_p": mcnemar(won, lost) if single else None}


def summarize(rows, samples):
    """Rows as of --out, `samples` a problem -> figures; lists are [mean, low, high]."""
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


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder, Hugging Face id or name such as qwen2.5-7b")
    add("--adapter", help="PEFT folder, such as train.py's runs/x/adapter")
    add("--base", default="nvfp4", choices=list(nvfp4.FORMATS), help="format of the linears")
    add("--dtype", choices=["bfloat16", "float16"], help="of matmul inputs, as of train.py")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--data", required=True, help="as of train.py: gsm8k, a file, an id, ...")
    add("--split", default="test", choices=["train", "test"], help="of a data set, not of a file")
    add("--limit", type=int, default=0, help="only the first so many problems; 0: all")
    add("--prompt-style", default="boxed", choices=sorted(data.STYLES), help="as of train.py")
    add("--samples", type=int, default=1, help="answers a problem")
    add("--temperature", type=float, help="0: greedy (default: 0; for several samples 0.6)")
    add("--top-p", type=float, default=0.95, help="nucleus of sampled answers (paper)")
    add("--top-k", type=int, default=0, help="sample from the likeliest so many only; 0: all")
    add("--max-new-tokens", type=int, default=4096, help="longest completion (paper)")
    add("--max-rows", type=int, default=256, help="most sequences decoded at a time")
    add("--seed", type=int, default=0, help="of sampling")
    add("--out", help="new .jsonl file for every completion with its verdict")
    add("--against", help="another run's --out, to compare with problem by problem")
    return parser.parse_args()


def check(args):
    """ValueError for flags that can be refused before anything is loaded."""
    if args.temperature is None:
        args.temperature = 0.0 if args.samples == 1 else 0.6
    least = {"samples": 1, "max-new-tokens": 1, "max-rows": 1, "limit": 0, "top-k": 0}
    for flag, low in least.items():
        value = getattr(args, flag.replace("-", "_"))
        if value < low:
            raise ValueError(f"--{flag} must be at least {low}, got {value}")
    if not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise ValueError("need a --temperature >= 0 and 0 < --top-p <= 1, got "
                         f"{args.temperature} and {args.top_p}")
    if args.samples > 1 and args.temperature == 0:
        raise ValueError(f"--samples {args.samples} needs a --temperature above 0")
    if args.out and Path(args.out).exists():
        raise ValueError(f"--out {args.out} exists and is not overwritten")
    if args.temperature == 0:                    # greedy ignores the two: say so in the figures
        args.top_p = 1.0
        args.top_k = 0


def select_device(name, model):
    """-> torch.device; a GPU becomes the current one, on which Triton launches."""
    device = device_of(name, model)
    if device.type == "cuda":
        torch.cuda.set_device(device.index)
    return device


def read_results(path):
    """Rows of another run's --out. ValueError names the line that is not one."""
    rows = []
    for number, row in data.read_rows(Path(path)):
        known = isinstance(row, dict) and isinstance(row.get("correct"), (int, float))
        if not (known and isinstance(row.get("id"), str) and isinstance(row.get("question"), str)):
            raise ValueError(f"--against {path}:{number}: needs id, question, correct")
        rows.append(row)
    return rows


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


def prepare(args):
    """-> tokenizer, problems, sampler, rows of --against, adapter's shift; finds what is wrong."""
    check(args)
    device = select_device(args.device, args.model)
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


def main():
    args = parse_args()
    began = time.perf_counter()
    try:
        tokenizer, problems, sampler, others, shift = prepare(args)
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: {first_line(error)}")
    except RuntimeError as error:
        if "allocate" not in str(error):         # of a GPU or the host; the host has no class
            raise
        sys.exit(f"evaluate.py: not enough memory: {first_line(error)}")
    sampling = Sampling(args.max_new_tokens, tokenizer.end_ids, args.temperature, args.top_k,
                        args.top_p, args.seed)
    with tqdm(unit=" tokens", unit_scale=True) as bar:
        rollouts = sampler.generate([p.prompt for p in problems], args.samples, sampling,
                                    progress=bar.update)
    rows = rewards.score(tokenizer, problems, rollouts, args.prompt_style)
    for i, row in enumerate(rows):
        lenient = rewards.grade(row["completion"], row["answer"], last_number=True)
        row |= {"sample": i % args.samples, "lenient": float(lenient.correct)}
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
    on_gpu = args.device.startswith("cuda")
    print(json.dumps({**vars(args), **figures, "adapter_shift": shift,
                      "hardware": torch.cuda.get_device_name() if on_gpu else args.device,
                      "command": f"python {shlex.join(sys.argv)}"}))


if __name__ == "__main__":
    main()
