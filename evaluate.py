"""
Accuracy of a model, with or without an adapter, on a file of problems: the same sampler and grader as training.

    python evaluate.py --model qwen2.5-7b --adapter runs/x/adapter --data gsm8k --out after.jsonl --against before.jsonl

Greedy by default; --samples N draws N answers a problem. For a problem with c of its n answers right
    pass@k = 1 - C(n - c, k) / C(n, k)      chance that k of the n answers, picked without return, hold a right one
    maj@k  is the commonest of k answers right?  Mean over the n // k disjoint blocks of k answers in order of drawing.
           Equal answers (rewards.is_equal) vote together, no answer is no vote, a tie counts as its right share.
Each is a mean over problems with the 95 % interval of such a mean over problems like these. --against compares two runs
problem by problem, which cancels what makes a problem hard for both.

No problem is left out: golds that the grader cannot read are counted and stay in. Correct means what it means in
training; the lenient figure also takes the last number where no box, tag or "answer is" says which is meant: the gap
between the two is form, not mathematics.
The last line on stdout is one JSON object. Not here: few-shot prompts, and engines other than our own.

Longer than planned because it has two halves that could live apart: figures (plain numbers), then the command.
"""
import argparse
import json
import math
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

import data
import lora
import model as qwen
import rewards
from sampler import Sampler, quantize_head

Z = 1.959964                                                         # 95 % of a normal lies within +-Z


# -----------------------------------------------------------------------------
# Figures.

def pass_at_k(n, c, k):
    """The unbiased estimate from c right answers of n (Chen et al. 2021); integers until the one division."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def ballots(answers):
    """Extracted answers -> for each the first one equal to it; None stays None."""
    vote = {None: None}
    for answer in answers:
        if answer not in vote:
            leaders = [a for a, leader in vote.items() if a is not None and a == leader]
            vote[answer] = next((a for a in leaders if rewards.is_equal(answer, a)), answer)
    return [vote[answer] for answer in answers]


def maj_at_k(votes, correct, k):
    """ballots() of one problem's n answers and their verdicts -> mean over n // k blocks (see the top)."""
    right = dict(zip(reversed(votes), reversed(correct)))            # reversed: the first of equal answers decides
    scores = []
    for i in range(0, len(votes) - k + 1, k):
        count = Counter(vote for vote in votes[i:i + k] if vote is not None)
        tied = [vote for vote in count if count[vote] == max(count.values())]
        scores.append(sum(right[vote] for vote in tied) / max(len(tied), 1))
    return sum(scores) / len(scores)


def interval(values, samples=1):
    """A value in [0, 1] for each problem, from `samples` answers -> [mean, low, high] at 95 %.

    Wilson's interval at the effective sample size mean (1 - mean) / var(mean): the number of problems if all values are
    0 or 1, which is the textbook's interval, and never more than the number of answers. It has a width at 0 and 1 too.
    """
    count, mean = len(values), sum(values) / len(values)
    spread, variance = mean * (1 - mean), sum((v - mean) ** 2 for v in values) / count**2
    n = spread / max(variance, spread / (count * samples)) if spread else count
    centre, half = mean + Z * Z / (2 * n), Z * math.sqrt(spread / n + (Z / (2 * n)) ** 2)
    return [mean, max(0.0, (centre - half) / (1 + Z * Z / n)), min(1.0, (centre + half) / (1 + Z * Z / n))]


def mcnemar(won, lost):
    """Exact two-sided p of a split as uneven as this of the problems that only one of two runs solved."""
    tail = sum(math.comb(won + lost, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def paired(rows, others):
    """Accuracy of rows minus others on the problems (id and question) of both -> figures; ValueError if there are none.

    The interval is normal over problems with one won and one lost added (Bonett and Price 2012), so that runs which
    agree everywhere get a width. McNemar's p needs one answer a problem on both sides; else it is None.
    """
    mine, theirs = {}, {}
    for side, side_rows in ((mine, rows), (theirs, others)):
        for row in side_rows:
            side.setdefault((row["id"], row["question"]), []).append(row["correct"])
    pairs = [(mine[key], theirs[key]) for key in mine if key in theirs]
    if not pairs:
        raise ValueError(f"--against: none of its {len(theirs)} problems is among the {len(mine)} here")
    gaps = [sum(a) / len(a) - sum(b) / len(b) for a, b in pairs]
    n, total = len(gaps) + 2, sum(gaps)
    half = Z * math.sqrt(((sum(g * g for g in gaps) + 2) / n - (total / n) ** 2) / n)
    won, lost = sum(g > 0 for g in gaps), sum(g < 0 for g in gaps)
    single = all(len(a) == len(b) == 1 for a, b in pairs)
    return {"pairs": len(pairs), "unpaired": len(mine) + len(theirs) - 2 * len(pairs), "won": won, "lost": lost,
            "difference": [total / len(gaps), total / n - half, total / n + half],
            "mcnemar_p": mcnemar(won, lost) if single else None}


def summarize(rows, samples):
    """Rows of rewards.score() with `lenient`, `samples` of them a problem -> figures; lists are [mean, low, high]."""
    groups = [rows[i:i + samples] for i in range(0, len(rows), samples)]
    correct = [[int(row["correct"]) for row in group] for group in groups]
    votes = [ballots([row["extracted"] for row in group]) for group in groups]
    ks = sorted({samples, *(2**i for i in range(samples.bit_length()))})                 # 1, 2, 4, ... and N
    figures = {f"pass@{k}": interval([pass_at_k(samples, sum(c), k) for c in correct], samples) for k in ks}
    figures |= {f"maj@{k}": interval([maj_at_k(v, c, k) for v, c in zip(votes, correct)], samples) for k in ks[1:]}
    figures["pass@1_lenient"] = interval([sum(row["lenient"] for row in group) / samples for group in groups], samples)
    figures |= {key: sum(row[key] for row in rows) / len(rows) for key in ("format", "length")}
    return figures | {"truncated": sum(not row["finished"] for row in rows) / len(rows),
                      "rules": dict(Counter(row["rule"] for row in rows).most_common())}


# -----------------------------------------------------------------------------
# The command.

def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder, Hugging Face id or name such as qwen2.5-7b")
    add("--adapter", help="PEFT folder, such as train.py's runs/x/adapter")
    add("--base", default="nvfp4", choices=["nvfp4", "bf16", "mxfp4", "nf4"], help="format of the frozen linears")
    add("--head", default="bf16", choices=["bf16", "nvfp4"], help="format of lm_head, as of train.py")
    add("--dtype", choices=["bfloat16", "float16"], help="what inputs of matmuls are rounded to, as of train.py")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
    add("--data", required=True, help="gsm8k, math, arithmetic, a .jsonl/.json/.parquet file or a Hugging Face id")
    add("--split", default="test", choices=["train", "test"], help="part of a named data set (a file is one part)")
    add("--limit", type=int, default=0, help="only the first so many problems; 0: all")
    add("--prompt-style", default="boxed", choices=sorted(data.STYLES), help="boxed: Qwen's; tags: the paper's")
    add("--samples", type=int, default=1, help="answers a problem")
    add("--temperature", type=float, help="0: greedy. Default: 0 for one sample, the paper's 0.6 for several")
    add("--top-p", type=float, default=0.95, help="nucleus of sampled answers (paper); greedy ignores it")
    add("--top-k", type=int, default=0, help="sample from the likeliest so many tokens only; 0: all")
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
    for name, least in {"samples": 1, "max_new_tokens": 1, "max_rows": 1, "limit": 0, "top_k": 0}.items():
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise ValueError(f"need a --temperature >= 0 and 0 < --top-p <= 1, got {args.temperature} and {args.top_p}")
    if args.samples > 1 and args.temperature == 0:
        raise ValueError(f"--samples {args.samples} needs a --temperature above 0: greedy answers are all the same")
    if args.out and Path(args.out).exists():
        raise ValueError(f"--out {args.out} exists and is not overwritten: choose another name")


def read_results(path):
    """Rows of another run's --out. ValueError names the line that is not one."""
    if not Path(path).is_file():
        raise ValueError(f"--against {path}: no such file")
    kinds, rows = {"id": str, "question": str, "correct": (int, float)}, []
    for number, row in data.read_json(Path(path)):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), kind) for key, kind in kinds.items()):
            raise ValueError(f"--against {path}:{number}: needs {', '.join(kinds)}, so --out did not write it")
        rows.append(row)
    return rows


def prove_adapter(sampler, prompt, max_new_tokens):
    """-> mean absolute change that the adapter makes to a probe's log-probs. ValueError if the sampler's lack it.

    Loaded but not applied, an adapter scores like the base and nothing tells (the release's GSM8K evaluation, for one).
    """
    model = sampler.model
    if not any(linear.b.any() for linear in model.adapter.linears):
        print("the adapter's B is zero in every layer: its linears are the base's")
        return 0.0
    probe = sampler.generate([prompt], 2, min(32, max_new_tokens))
    tokens, starts = [prompt + completion for completion in probe.completions], [len(prompt)] * 2
    with torch.no_grad():
        on, _ = model.token_logprobs(tokens, starts)
        with model.adapter.off():
            off, _ = model.token_logprobs(tokens, starts)
    sampled = torch.cat(probe.logprobs).to(on.device)
    shift, to_on, to_off = ((a - b).abs().mean().item() for a, b in ((on, off), (sampled, on), (sampled, off)))
    distances = f"moves log-probs by {shift:.1e}, the sampler is {to_on:.1e} from that and {to_off:.1e} from the base"
    # Not applied, to_off is mere rounding. Half the shift: one that itself drowns in rounding raises no false alarm.
    if shift == 0 or to_off < shift / 2:
        raise ValueError(f"--adapter has no effect: it {distances}")
    print(f"adapter active: it {distances}")
    return shift


def prepare(args):
    """Load all there is; whatever can be wrong is found out here, before the first token."""
    check(args)
    others = read_results(args.against) if args.against else None
    problems = data.load_problems(args.data, args.split)[0][:args.limit or None]
    if others is not None:
        paired([{**vars(p), "correct": 0.0} for p in problems], others)
    folder = qwen.resolve(args.model)
    tokenizer = data.Tokenizer(folder)
    problems, prompts, _ = data.encode_prompts(tokenizer, problems, args.prompt_style, max_tokens=math.inf)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    model = qwen.load(folder, args.base, args.device, args.dtype)
    model.live_vocab = tokenizer.vocab_size
    if args.head == "nvfp4":
        quantize_head(model)
    if args.adapter:
        lora.load_adapter(model, args.adapter)
    rows = min(args.max_rows, len(prompts) * args.samples)
    sampler = Sampler(model, max(map(len, prompts)) + args.max_new_tokens, rows)
    shift = prove_adapter(sampler, prompts[0], args.max_new_tokens) if args.adapter else None
    return tokenizer, sampler, problems, prompts, others, shift


def main():
    args, began = parse_args(), time.perf_counter()
    try:
        tokenizer, sampler, problems, prompts, others, shift = prepare(args)
    except (ValueError, AssertionError, OSError, RuntimeError) as error:
        sys.exit(f"evaluate.py: {(str(error) or repr(error)).splitlines()[0]}")
    top_p, top_k = (args.top_p, args.top_k) if args.temperature else (1.0, 0)
    with tqdm(desc=f"{len(prompts)} x {args.samples} answers", unit=" tokens", unit_scale=True) as bar:
        rollouts = sampler.generate(prompts, args.samples, args.max_new_tokens, tokenizer.end_ids, args.temperature,
                                    args.seed, top_k=top_k, top_p=top_p, progress=bar.update)
    rows = rewards.score(tokenizer, problems, rollouts, args.prompt_style)
    for i, row in enumerate(rows):
        fallback = row["rule"] == "none" and rewards.grade(row["completion"], row["answer"], last_number=True).correct
        row |= {"sample": i % args.samples, "lenient": float(row["correct"] or fallback)}
    if args.out:
        lora.write_atomically(args.out, "".join(json.dumps(row) + "\n" for row in rows).encode())
    figures = {**summarize(rows, args.samples), **(paired(rows, others) if others else {}), "n": len(problems),
               "unreadable": sum(not rewards.can_read(p.answer) for p in problems), "tokens": rollouts.num_tokens,
               "tokens_per_s": rollouts.num_tokens / rollouts.seconds, "idle": rollouts.idle,
               "seconds_sample": rollouts.seconds, "seconds": time.perf_counter() - began}
    for name, value in figures.items():
        print(f"{name:15}", "{:.4f} [{:.4f}, {:.4f}]".format(*value) if isinstance(value, list) else
              f"{value:.4g}" if isinstance(value, float) else value)
    hardware = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else args.device
    print(json.dumps({**vars(args), "top_p": top_p, "top_k": top_k, **figures, "adapter_shift": shift,
                      "hardware": hardware, "command": f"python {shlex.join(sys.argv)}"}))


if __name__ == "__main__":
    main()
