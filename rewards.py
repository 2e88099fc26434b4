r"""
Rewards from text: finds the answer in a completion, compares it with the data set's gold answer
(grader/answers.py), and scores the format. There is no judge model.

    extract(r"so \boxed{\frac12}")    ->  Extraction(answer=r"\frac12", rule="box")
    grade(r"\boxed{\frac12}", "0.5")  ->  Grade(correct=1, format=1, rule="box", answer=r"\frac12")
    grade(r"\boxed{3+4}", "7").correct  ->  0: the model has to compute the 7 itself

The first of these rules that applies gives the answer:

    box          the last \boxed{...}; neighbors such as "\boxed{2} and \boxed{3}" are one list
    tag          the last <answer>...</answer>
    marker       what follows the last "answer is", "answer:" or "####" in its sentence, without
                 a subject: "answer: the sum is 5" gives 5

Only the text after the last </think> of the first turn is graded. Everything in the box, tag or
sentence is part of the answer: "5 apples" is 5, but "5 or 6", "not 5", "more than 5" and "5
million" aren't. The right value alone may earn nothing, for example if arithmetic is left undone
(grader/forms.py).

Grading takes time linear in the length of the text, so there's no time limit.
"""
import math
import re
from typing import Callable, NamedTuple

from grader.answers import DOUBT, clean, is_equal
from grader.boxes import last_box
from grader.forms import is_copied, is_padded, is_unfinished

MAX_TAIL = 20_000      # tags and markers count only in the last characters, boxes anywhere


# -----------------------------------------------------------------------------
# Completion -> answer

class Extraction(NamedTuple):
    """An answer and the rule that found it."""
    answer: str | None
    rule: str          # box, tag, marker, none or unclosed (a <think> that never ends)


def extract(text: str) -> Extraction:
    """Finds the answer in a completion by the rules at the top of this file. Never raises."""
    turns = filter(str.strip, END_OF_TURN.split(text))
    text = next(turns, "").rpartition("</think>")[2]
    if "<think>" in text:
        return Extraction(None, "unclosed")
    tail = text[-MAX_TAIL:]
    tagged = [answer.strip() for answer in TAG.findall(tail) if answer.strip()]
    found = {"box": last_box(text), "tag": tagged[-1] if tagged else "",
             "marker": last_marker(tail)}
    for rule, answer in found.items():
        if answer:
            return Extraction(answer, rule)
    return Extraction(None, "none")


# -----------------------------------------------------------------------------
# Completion, gold answer -> reward

class Grade(NamedTuple):
    """The verdict on one completion."""
    correct: int           # 1 if the answer equals the gold answer and is written out, else 0
    format: int            # 1 if the answer has the form that the prompt asked for, else 0
    rule: str              # the one that found the answer, see Extraction
    answer: str | None     # as written in the completion


def grade(completion: str, gold: str, question: str = "", style: str = "boxed") -> Grade:
    """Scores one completion. Unfinished arithmetic and copies of a formula in the question are
    wrong, even if they equal the gold answer.

    style: the form that the prompt asked for, "boxed" or "tags".
    """
    answer, rule = extract(completion)
    correct = answer is not None and is_equal(answer, gold)
    if correct and clean(answer) != clean(gold):     # a gold answer may be a formula itself
        correct = not (is_unfinished(answer, gold) or is_copied(answer, question, gold)
                       or is_padded(answer, question, gold))
    well_formed = format_tags(completion) if style == "tags" else int(rule == "box")
    return Grade(int(correct), well_formed, rule, answer)


def format_tags(text: str) -> int:
    """1 if a text has the paper's form, <think>...</think> <answer>...</answer>, with each tag once
    and nothing around them; else 0.
    """
    text = END_OF_TURN.split(text.strip(), maxsplit=1)[0].strip()
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return 0
    return int(bool(re.fullmatch(r"<think>.*</think>\s*<answer>.*</answer>", text, re.DOTALL)))


def grade_rows(tokenizer: "prompts.Tokenizer", problems: list,  # noqa: F821
               rows: "list[sampler.Row]", style: str = "boxed",  # noqa: F821
               plug_in: Callable | None = None) -> list[dict]:
    """One dict per row: the problem, the prompt as the model saw it, the completion, the answer
    found in it, the verdict, and the reward.

    rows: groups of equal size, one per problem.
    plug_in: a tasks.plugin.Reward. Without one, `reward` is 1 for a correct answer, else 0. With
    one, it is the sum of the parts that the plug-in returns, except `shaping`, which
    grpo.group_advantages takes separately. A NaN in any part makes `reward` NaN. A part called
    `correct` replaces the verdict: 1 is right, anything else is wrong.
    """
    group_size = len(rows) // max(len(problems), 1)  # a rank may have no problems
    completions = [tokenizer.decode(row.completion) for row in rows]
    # `opened` is the <think> at the end of the prompt. Answers that never close it are "unclosed".
    texts = [tokenizer.opened + completion for completion in completions]
    graded = []
    for i, (row, text) in enumerate(zip(rows, texts)):
        problem = problems[i // group_size]
        verdict = grade(text, problem.answer, problem.question, style)
        found = {
            "id": problem.id, "question": problem.question, "answer": problem.answer,
            "prompt": tokenizer.decode(row.prompt), "completion": completions[i],
            "extracted": verdict.answer, "rule": verdict.rule,
            "correct": float(verdict.correct), "format": float(verdict.format),
            "length": int(row.mask.sum()), "finished": row.finished,
            "mean_logprob": row.logprobs[row.mask].mean().item(),
            "reward": float(verdict.correct), "shaping": 0.0,
        }
        if plug_in:
            first = i - i % group_size
            parts = plug_in(text, problem, group=texts[first:first + group_size],
                            length=found["length"], finished=found["finished"])
            found |= {"parts": parts, "shaping": parts.get("shaping", 0.0)}
            found["reward"] = sum(value for name, value in parts.items() if name != "shaping")
            if "correct" in parts:
                found["correct"] = float(parts["correct"] == 1)
            if math.isnan(found["shaping"]):
                found["reward"] = math.nan       # as with NaN in any other part
        graded.append(found)
    return graded


# -----------------------------------------------------------------------------
# The patterns that find an answer

END_OF_TURN = re.compile(r"<\|(?:im_end|im_start|endoftext|end_of_text|eot_id|eom_id|start_header_id)"
                         r"\|>|</s>")
# No <answer> inside an answer, or each of 10,000 unclosed tags would be scanned to the end.
TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# "answer is", "Answer:" or "**Answer**:", but not "answer isn't" or "answers".
MARKER = re.compile(
    r"answer\s*(?:(?:\*\*|__)\s*)?(?:is(?![a-z'’])\s*:?|:|=)|####", re.IGNORECASE)
# In "The answer is 3.5. It is correct." the sentence ends after the 5; reasons don't belong to it.
SENTENCE_END = re.compile(r"\n|(?<=[^\s.])\.(?:\s|$)|。|,?\s(?:because|since)\b")


# -----------------------------------------------------------------------------
# Answers without a box

def last_marker(text: str) -> str:
    """What follows the last "answer is", "answer:" or "####" in its sentence, without a subject
    such as "The largest n is"; "" if nothing does.
    """
    for marker in reversed(list(MARKER.finditer(text))):
        rest = text[marker.end():].lstrip(" \t*_:\n")
        sentence = SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *_`")
        if sentence:
            subject, _, value = sentence.rpartition(" is ")
            is_plain = not re.search("[0-9]", subject) and not DOUBT.search(sentence)
            return value if is_plain else sentence           # "Answer: The largest n is 34."
    return ""
