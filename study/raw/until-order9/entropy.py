r"""
How random is the policy that samples, and what do 4-bit codes and noise add to that? No training.

    python -m study.entropy --model M --base nvfp4 --data gsm8k_test.jsonl --name nearest \
        --out sampler.jsonl

Answers the same problems at temperature 1, without noise on the norms and with three sigmas of it.
The sampler's entropy is estimated by minus the mean log-probability of all sampled tokens, in nats
a token: the expected value of -log p under p is the entropy.

Each setting becomes one line of --out, which holds [correct, finished, tokens, sum of log-probs] of
every answer; all figures follow from these. Every --problems-a-draw problems get a new draw z of
the noise. Single draws differ much in their effect, so more draws make the mean surer. But each
draw needs its own run of the sampler, which takes nearly as long for few rows as for many.
`python -m study.results sampler FILE` compares the lines of one or several such files.
"""
import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import env  # isort: skip; its settings come before torch

import aqn
import model as qwen
import nvfp4
import rewards
from files import append_lines
from harness import config
from harness.config import setting
from harness.setup import choose_device
from prompts import Tokenizer, encode_prompts
from sampler import Sampler, Sampling, engine_for
from study.results import sampled_setting
from tasks.problems import load_problems
from weights import resolve

PROBLEMS_AT_ONCE = 50                            # where there is no noise to draw
SIGMAS = 0.0, 1e-2, 5e-2, 8e-2                   # of the noise on the norms


@dataclass(frozen=True)
class SampledAnswers:
    """which answers"""
    problems: int = setting(500, "the first so many", "[1, 1e6]")
    samples: int = setting(8, "answers to each", "[1, 1e4]")
    problems_a_draw: int = setting(10, "answered with one z", "[1, 1e6]")
    max_new_tokens: int = setting(512, "longest answer", "[1, 1e6]")
    base: str = setting("nvfp4", "format of the frozen weights", choices=nvfp4.FORMATS)
    device: str | None = setting(None, "cpu, cuda or cuda:N (default: a GPU if there is one)")


def sample_all(model: qwen.Qwen, sampler: Sampler, tokenizer: Tokenizer, problems: list,
               samples: int, sampling: Sampling, sigma: float, problems_a_draw: int) -> list[list]:
    """-> [correct, finished, tokens, sum of log-probs] of every answer, problem by problem. Each
    problems_a_draw problems in a row get one draw z of the noise.
    """
    answers = []
    for number, start in enumerate(range(0, len(problems), problems_a_draw)):
        part = problems[start:start + problems_a_draw]
        with aqn.noisy_norms(model, sigma, sampling.seed, number):
            rollouts = sampler.generate([problem.prompt for problem in part], samples, sampling,
                                        range(start, start + len(part)))
        rows = rewards.grade_rollouts(tokenizer, part, rollouts)
        answers += [[int(row["correct"]), int(row["finished"]), len(logprobs),
                     round(logprobs.sum().item(), 4)]
                    for row, logprobs in zip(rows, rollouts.logprobs, strict=True)]
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(prog="study.entropy", description=__doc__.strip(),
                                     allow_abbrev=False, formatter_class=config.LongHelp)
    parser.add_argument("--model", required=True, help="folder, name or id, as in train.py")
    parser.add_argument("--data", required=True, help="problems, as in train.py")
    parser.add_argument("--name", required=True, help="what these weights are called in --out")
    parser.add_argument("--out", required=True, type=Path, help=".jsonl file that grows")
    config.add_section(parser, SampledAnswers)
    args = parser.parse_args()
    with env.one_line("study.entropy"):
        wanted = config.section_of(SampledAnswers, args)
        config.check_ranges(wanted)
        device, kernels = choose_device(wanted.device, "auto", args.model)
        folder = resolve(args.model)
        tokenizer = Tokenizer(folder)
        problems = load_problems(args.data, "test")[:wanted.problems]
        problems = encode_prompts(tokenizer, problems, "boxed")
        model = qwen.load(folder, wanted.base, device, live_vocab=tokenizer.vocab_size)
        longest = max(len(problem.prompt) for problem in problems) + wanted.max_new_tokens
        rows = max(PROBLEMS_AT_ONCE, wanted.problems_a_draw) * wanted.samples
        sampler = Sampler(engine_for(kernels), model, longest, rows)
        sampling = Sampling(wanted.max_new_tokens, tokenizer.end_ids, temperature=1.0, seed=0)
        for sigma in SIGMAS:
            began = time.perf_counter()
            a_draw = wanted.problems_a_draw if sigma else PROBLEMS_AT_ONCE
            answers = sample_all(model, sampler, tokenizer, problems, wanted.samples, sampling, sigma,
                                 a_draw)
            line = {"name": args.name, "noise": "aqn" if sigma else "none", "sigma": sigma,
                    "samples": wanted.samples, "problems_a_draw": a_draw, "answers": answers}
            append_lines(args.out, [line])
            found = sampled_setting(line)
            print(f"{found.name}, {found.noise}: entropy {found.entropy.mean():.4f} nats a token, "
                  f"{100 * found.accuracy.mean():.1f} % right, {found.length.mean():.0f} tokens "
                  f"an answer, {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
