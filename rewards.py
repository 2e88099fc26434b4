r"""
Rewards from text: finds the answer in a completion, compares it with the gold answer (the one in
the data set, by tasks/answers.py), and scores the format. No model judges.

    extract(r"so \boxed{\frac12}")    ->  Extraction(answer=r"\frac12", rule="box")
    grade(r"\boxed{\frac12}", "0.5")  ->  Grade(correct=1, format=1, rule="box", answer=r"\frac12")
    grade(r"\boxed{3+4}", "7", "What is $3+4$?").correct  ->  0: copied from the question

The first of these rules that applies gives the answer:

    box          the last \boxed{...}; neighbors such as "\boxed{2} and \boxed{3}" are one list
    tag          the last <answer>...</answer>
    marker       what follows the last "answer is", "answer:" or "####" in its sentence

Only the first turn counts, after its last </think>. A hedged number is not an answer: "5 or 6",
"not 5", "more than 5", "between 5 and 6" and "5 million" are not 5.

Time is linear in the length of the text, so there is no time limit.
"""
import math
import re
from typing import Callable, NamedTuple

from tasks.answers import FUNCTIONS, MULTIPLES, clean, is_equal
from tasks.boxes import last_box

MAX_TAIL = 20_000      # last characters, where tags and markers count; boxes do anywhere


# -----------------------------------------------------------------------------
# Completion -> answer

class Extraction(NamedTuple):
    """An answer and the rule that found it."""
    answer: str | None
    rule: str          # box, tag, marker, none or truncated (an unclosed <think>)


def extract(text: str) -> Extraction:
    """Finds the answer in a completion by the rules at the top of this file. Never raises."""
    turns = filter(str.strip, END_OF_TURN.split(text))
    text = next(turns, "").rpartition("</think>")[2]
    if "<think>" in text:
        return Extraction(None, "truncated")
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
    correct: int           # 1 if the answer equals the gold answer and is not copied, else 0
    format: int            # 1 if the answer has the form that the prompt asked for, else 0
    rule: str              # that found the answer, see Extraction
    answer: str | None     # as written in the completion


def grade(completion: str, gold: str, question: str = "", style: str = "boxed") -> Grade:
    """Scores one completion. An answer that only copies a formula from the question is wrong.

    style: the form that the prompt asked for, "boxed" or "tags".
    """
    answer, rule = extract(completion)
    correct = int(answer is not None and is_equal(answer, gold)
                  and not is_copied(answer, question, gold))
    well_formed = format_tags(completion) if style == "tags" else int(rule == "box")
    return Grade(correct, well_formed, rule, answer)


def is_copied(answer: str, question: str, gold: str) -> bool:
    r"""True if the answer only restates a formula of the question, with an operator, and the gold
    answer is not written that way: \boxed{\binom{18}{12}} equals 18564, but nothing was computed.

    The formula is in the question if some part has the same symbols, in any order, and equals the
    gold answer: 7+12 is 12+7, but 7/2 is not 2/7. A policy can still write X + 0 for a formula X,
    and a formula that the question has only in words, such as 7*9-8.
    """
    formulas = [sorted(symbols(side)) for side in sides(answer) if OPERATOR.search(side)]
    if not formulas or any(sorted(symbols(side)) in formulas for side in sides(gold)):
        return False
    question = clean(question)
    text = symbols(question)
    places = list(SYMBOL.finditer(question))
    parts = {question[places[i].start():places[i + len(formula) - 1].end()]
             for formula in formulas for i in range(len(text) - len(formula) + 1)
             if sorted(text[i:i + len(formula)]) == formula}
    return any(is_equal(with_brackets(part), gold) for part in parts)


def sides(answer: str) -> list[str]:
    """The cleaned answer, and only its last side: the 5 in x = 2 + 3 = 5."""
    answer = clean(answer)
    return [answer, answer.partition("≈")[0].rpartition("=")[2]]


def symbols(s: str) -> list[str]:
    r"""The symbols except brackets, + and *; a number is one symbol. x+\frac12 and 1/2 + x have the
    same ones.
    """
    return ["/" if symbol == r"\frac" else symbol.strip().replace(",", "")
            for symbol in SYMBOL.findall(s)]


def with_brackets(part: str) -> str:
    r"""Adds the brackets that a part of a formula lacks: x)/(y becomes (x)/(y). Empty if a brace
    closes that the part doesn't open, as in the 1}{2 of \frac{1}{2}.
    """
    before = after = ""  # the missing brackets
    for character in part:
        if character in "({":
            after = (")" if character == "(" else "}") + after
        elif character == after[:1]:
            after = after[1:]
        elif character == ")":
            before += "("
        elif character == "}":
            return ""
    return before + part + after


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
    found in it, the verdict, and the reward `task`.

    rows: groups of equal size, one per problem.
    plug_in: a tasks.plugin.Reward. Without one, `task` is 1 for a correct answer, else 0. With one,
    it is the sum of the parts that the plug-in returns, except `shaping`, which train.score adds
    separately. A NaN in any part makes `task` NaN. A part called `correct` replaces the verdict: 1
    is right, anything else is wrong.
    """
    group_size = len(rows) // max(len(problems), 1)  # a rank may have no problems
    texts = [tokenizer.decode(row.completion) for row in rows]
    graded = []
    for i, (row, text) in enumerate(zip(rows, texts)):
        problem = problems[i // group_size]
        # `opened` is the <think> at the end of the prompt. An answer that never closes it is
        # "truncated".
        verdict = grade(tokenizer.opened + text, problem.answer, problem.question, style)
        found = {
            "id": problem.id, "question": problem.question, "answer": problem.answer,
            "prompt": tokenizer.decode(row.prompt), "completion": text,
            "extracted": verdict.answer, "rule": verdict.rule,
            "correct": float(verdict.correct), "format": float(verdict.format),
            "length": int(row.mask.sum()), "finished": row.finished,
            "mean_logprob": row.logprobs[row.mask].mean().item(),
            "task": float(verdict.correct),
        }
        if plug_in:
            first = i - i % group_size
            parts = plug_in(text, problem, group=texts[first:first + group_size],
                            length=found["length"], finished=found["finished"])
            found["parts"] = parts
            found["task"] = sum(value for name, value in parts.items() if name != "shaping")
            if "correct" in parts:
                found["correct"] = float(parts["correct"] == 1)
            if math.isnan(parts.get("shaping", 0.0)):
                found["task"] = math.nan         # as with NaN in any other part
        graded.append(found)
    return graded


# -----------------------------------------------------------------------------
# The patterns that find an answer

END_OF_TURN = re.compile(r"<\|im_end\|>|<\|endoftext\|>|<\|im_start\|>|<\|eot_id\|>|</s>")
# No <answer> inside an answer: each of 10,000 unclosed tags would be scanned to the end.
TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# "answer is", "Answer:" or "**Answer**:", but not "answer isn't" or "answers".
MARKER = re.compile(
    r"answer\s*(?:(?:\*\*|__)\s*)?(?:is(?![a-z'’])\s*:?|:|=)|####", re.IGNORECASE)
# In "The answer is 3.5. I hope it is correct." the sentence ends after the 5.
SENTENCE_END = re.compile(r"\n|(?<=[^\s.])\.(?:\s|$)|I hope it is")
# Begins and ends with a digit; may have a sign (not a hyphen), a dollar, a denominator or a percent
# sign. The 2 in x_2, x^2 or B2 is not a number.
NUMBER = re.compile(r"""(?<![A-Za-z0-9.^])(?<![A-Za-z0-9)}]_) ( (?:(?<![\w)])-)? (?:\\?\$)?
    (?: [0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)? | \.[0-9]+ )
    (?:/[0-9]+(?![\w/]))? (?:\s?\\?%)? )""", re.VERBOSE)
# $$...$$, $...$, \(...\) or \[...\]. The limit prevents quadratic time if thousands never close.
MATH_SPAN = re.compile(r"""
      \$\$([^$]{1,2000})\$\$
    | (?<!\\)\$((?:\\.|[^$\\\n]){1,2000})\$
    | \\\(((?:(?!\\[()]).){1,2000})\\\)
    | \\\[((?:(?!\\[\[\]]).){1,2000})\\\]""", re.DOTALL | re.VERBOSE)
LATEX = re.compile(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
# A word of three letters or more, except "and" and functions; or so, is, it, we, to, of; or two
# letters of another script. Greek and 𝑥 are formulas.
PROSE = re.compile(r"""
    (?<![\\A-Za-z]) (?: (?!(?:and|sqrt|sin|cos|tan|log|exp|inf)\b)[A-Za-z]{3,}
                      | (?:so|is|it|we|to|of)\b )
    | [^\W\d_A-Za-zª-ϿⅠ-ↈ𝐀-𝟿]{2}""", re.VERBOSE)
CHOICE = re.compile(r"\(([A-Z])\)|([A-Z])(?=[.:,;)]|\s*$)|([B-H])(?=\s+[a-z]{2})")
BARE_NAME = re.compile(r"\\?[A-Za-z]+(_\w+|\([a-z]\))?")
# A value right after one of these is not the answer.
BEFORE = re.compile(r"""(?:
    (?: \b(?:not|never|cannot|neither|nor|than|without|except|exceeds?|unlike|under|over|below|above
          |almost|nearly|at\ least|at\ most|up\ to|no\ longer|might|maybe|perhaps|possibly
          |could(?=\ be|\ also)) | n['’]t )
      (?: \s+ (?!but\b|is\b|are\b|was\b) [a-z]+ ){0,2} \s+ (?:equal\ to\ )?  # "is not 5", "than 5"
    | \b(?:between|either)                                                # "between 5 and 6"
      (?: \s+ (?!is\b|are\b|was\b|were\b|equals?\b) [^\s.:;=]+ ){0,5} \s+
    | \b(?:negative|plus|minus|times|twice|double|triple|half|square|cube|root|multiple|factor
         |divisor|power|multiplied\ by|divided\ by|divisible\ by) \s+ (?:of\s+)?  # "minus 5"
    | [0-9%$)] \s* (?: \b(?:or|and|to|through)\b | [,;&] ) \s*            # "5 to 6", "5, 6"
    | [0-9] \s+ | [0-9)] \s* [x*] \s*                                     # "5 1/2", "3 * 5"
    | [0-9A-Za-z)}$] \s* (?: [+/^×÷<≤≥≠] | (?<![-=])> | [<>!]= ) \s*      # "3 + 5", "x > 5"
    | (?: [0-9)}$] | \b[a-z] ) \s* [-−] \s+                               # "8 - 5"
    | [±√] \s* | \\(?:neq?|leq?|geq?|lt|gt|times|cdot|pm|sqrt) \s*
    ) [$(]* $""", re.VERBOSE | re.IGNORECASE)
# Nor is a value right before one of these. A $ or ) may end its formula first.
AFTER = re.compile(rf"""[$)]* (?:
    \s* (?: or\b | unless\b | (?:and|to|through|but|although|though) \s+          # "5 and a half"
        (?:an?\b|one\b|half\b|[$(]*[0-9])
      | [,;]\s* (?:(?:and|or|but|although|though)\s+)? [$(]*[0-9]               # "5, 6"
      | [+/^<>≤≥≠×÷±√π] | \*\s*[0-9] | -\s*[0-9] | :[0-9] | [0-9]               # "5 + 6 = 11"
      | \\(?:sqrt|pi|frac|cdot|times|pm|leq?|geq?|lt|gt|neq?)
      | -? (?:{MULTIPLES}|squared|cubed|times) \b                                # "5 million"
      | ,?\s* \(? (?:(?:but|although|though|and|or)\s+)? (?:it\s+)?            # "5 but could be 6"
        (?:could|might|may(?:\s+also)?\s+be|perhaps|maybe|possibly|alternatively)\b
      | ,?\s* (?:which\s+|that\s+)? (?:is|are|was|were|seems|can)               # "5 is wrong"
        (?: n['’]t | not | \s+ (?:not|wrong|incorrect|impossible|too) ) \b )
    | (?: st | nd | rd | th | [a-z] | e[0-9]+ | sqrt | pi ) (?![a-z]) )         # "5th", "5x"
    """, re.VERBOSE | re.IGNORECASE)
# 1,234.5 is one symbol, \frac12 is three.
SYMBOL = re.compile(r"\\[A-Za-z]+|(?<=\\frac|binom)\s*[0-9]"
                    r"|[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+|[^\s(){}+*,]")
# Makes a formula out of values; -5 and 2\pi have none. 60 decimals come from \overline.
OPERATOR = re.compile(rf"[^\s=(\[{{,<>]\s*-|[+*/^|:]|!(?!=)|\.[0-9]{{60}}"
                      rf"|\\(?:frac|binom|mod|lfloor|lceil|{'|'.join(FUNCTIONS)})")
# "5 apples and 6 pears", but not "18 eggs because 9 and 9 is 18".
MORE = re.compile(r"(?:(?!\b(?:because|since|as)\b)[^,;.=])*\b(?:and|or)\s+[$(]*[0-9]")


# -----------------------------------------------------------------------------
# Answers without a box: markers and values

def last_marker(text: str) -> str | None:
    """The value after the last "answer is", "answer:" or "####", up to the end of the sentence."""
    for marker in reversed(list(MARKER.finditer(text))):
        rest = text[marker.end():].lstrip(" \t*_:\n")
        display = MATH_SPAN.match(rest)
        if display and rest.startswith(("$$", "\\[")):  # it may have several lines
            return inside(display)
        line = SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *_`")
        if line:
            return value_in(line)
    return None


def has_prose(text: str) -> bool:
    """Does a text contain words besides formulas?"""
    return PROSE.search(LATEX.sub("", text)) is not None


def inside(match: re.Match) -> str:
    """The group that matched."""
    return next(filter(None, match.groups())).strip()


def stands_alone(found: re.Match) -> bool:
    """Does a value in a text stand for itself, not changed by the words around it?"""
    before = found.string[max(0, found.start() - 60):found.start()]
    after = found.string[found.end():found.end() + 60]
    return not BEFORE.search(before) and not AFTER.match(after)


def value_in(text: str) -> str:
    """The value in a text that follows "answer is": all of it if it has no prose, else a number or
    choice letter at its beginning, else its last formula or number. A value that the words around
    it change is returned with them: "not 5" equals no gold answer.
    """
    whole = MATH_SPAN.fullmatch(text)
    if whole:
        return inside(whole)
    if re.search(r"\w", text) and not has_prose(text):
        return text
    choice = CHOICE.match(text)
    if choice:
        is_one = not re.match(r"\)?,?\s*(?:or\b|and\b|\(?[A-H]\b)", text[choice.end():])
        return inside(choice) if is_one and stands_alone(choice) else text
    # "$5 and $10" is money: the text between the dollar signs is prose.
    spans = [span for span in MATH_SPAN.finditer(text) if not has_prose(span.group())]
    numbers = list(NUMBER.finditer(text, spans[-1].end() if spans else 0))
    found = [None, *spans, *numbers][-1]
    if spans and not BARE_NAME.fullmatch(inside(spans[-1])):
        # "$5$, not $6$". In "the largest $n$ is 34" the answer is the number.
        found = next(filter(stands_alone, spans[:-10:-1]), spans[-1])
    elif numbers and numbers[0].start() == 0:
        found = numbers[0]  # "18 eggs because 16 + 2 = 18"
        if MORE.match(text, found.end()):
            return text
    if found is None or not stands_alone(found) or not spans and "\\" in text:
        return text  # also "\frac{1}{2} dollars"
    return inside(found)
