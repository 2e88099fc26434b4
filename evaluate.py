"""
Accuracy of a model, with or without an adapter, on a file of problems: the same sampler and grader as training.

    python evaluate.py --model qwen2.5-7b --base nvfp4 --adapter runs/x/adapter --data gsm8k

Not here: few-shot prompts, and engines other than our own.
"""
import torch

import rewards


def score(tokenizer, problems, rollouts, style="boxed"):
    """Rollouts of P problems -> one dict a row: what was said, what was read out of it, and the verdict."""
    group_size = len(rollouts.completions) // len(problems)
    rows = []
    for i, completion in enumerate(rollouts.completions):
        problem, text = problems[i // group_size], tokenizer.decode(completion)
        verdict = rewards.grade(text, problem.answer, "tags" if style == "tags" else "boxed")
        rows.append({"id": problem.id, "question": problem.question, "answer": problem.answer, "completion": text,
                     "extracted": verdict.answer, "rule": verdict.rule, "correct": float(verdict.correct),
                     "format": float(verdict.format), "length": len(completion), "finished": rollouts.finished[i],
                     "mean_logprob": rollouts.logprobs[i].mean().item()})
    return rows


def greedy_accuracy(sampler, tokenizer, problems, prompts, max_new_tokens):
    """Share of problems solved by greedy decoding, and the rows of score()."""
    rollouts = sampler.generate(prompts, 1, max_new_tokens, tokenizer.end_ids, temperature=0.0)
    rows = score(tokenizer, problems, rollouts)
    return sum(row["correct"] for row in rows) / len(rows), rows
