r"""
Rewards from text: find the answer in a completion, ask whether it is the gold, score the format.

    extract(r"so \boxed{\frac12}")    ->  Extraction(answer=r"\frac12", rule="box")
    grade(r"\boxed{\frac12}", "0.5")  ->  Grade(correct=1, format=1, rule="box", answer=r"\frac12")

The rules, in order: the last box, the last <answer> tag, what follows the last "answer is" or
"####" and, if the caller allows, the last formula or number. Only the first turn counts, and in it
what comes after the last </think>. Alternatives ("5 or 6") never become one of them.

Work is linear in the length of the text. Not here: time limits, threads, a judge model.
"""
import re
from typing import NamedTuple

from answers import END_OF_TURN, is_equal

MAX_TAIL = 20_000      # characters searched for tags, markers and numbers; boxes are found anywhere


# -----------------------------------------------------------------------------
# Extraction: completion -> answer text

class Extraction(NamedTuple):
    answer: str | None
    rule: str          # box, tag, marker, last_number, none or truncated (an unclosed <think>)


BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
BOX_OR_BRACES = re.compile(BOX + r"|\{+|\}+")
ESCAPED = re.compile(r"\\\\(?!boxed|fbox)|\\[{}]")  # braces that are text, but not \\boxed
BARE_WORD = re.compile(r"[-\w.,/]*\w")
# What may stand between two boxes that are one answer, as in "\boxed{2} and $y=\boxed{3}$".
# Prose, a full stop or a line break make the last box the answer.
JOINER = re.compile(r"""(?: [ ,;$&] | \\q?quad | \\[,;:!\ ()\[\]] | and | or
    | \\(?:text|mbox|textrm)\s*\{[\s,]*(?:and|or)?[\s,]*\}
    | [A-Za-z](?:_\{?\w{1,3}\}?)?\s*= )*""", re.VERBOSE)
# No answer may hold another opening tag: 10,000 unclosed ones would each be scanned to the end.
TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MARKER = re.compile(r"answer\s*(?:(?:\*\*|__)\s*)?(?:is\s*:?|:|=)|####", re.IGNORECASE)
SENTENCE_END = re.compile(r"\n|(?<=[^\s.])\.(?:\s|$)|I hope it is")
# A digit at both ends (a lone comma is no number), a sign only where it is no hyphen; then /7 or %.
NUMBER = re.compile(r"""(?<![A-Za-z0-9.]) ( (?:(?<![\w)])-)? (?:\\?\$)?
    (?: [0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)? | \.[0-9]+ )
    (?:/[0-9]+(?![\w/]))? (?:\s?\\?%)? )""", re.VERBOSE)
MATH_SPAN = re.compile(r"""
      \$\$([^$]{1,2000})\$\$
    | (?<!\\)\$((?:\\.|[^$\\\n]){1,2000})\$
    | \\\(((?:(?!\\[()]).){1,2000})\\\)
    | \\\[((?:(?!\\[\[\]]).){1,2000})\\\]""", re.DOTALL | re.VERBOSE)
LATEX = re.compile(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
# Prose is a word that is no function, or two letters of another script (Greek and 𝑥 are formulas).
PROSE = re.compile(r"""
    (?<![\\A-Za-z]) (?: (?!(?:and|sqrt|sin|cos|tan|log|exp|inf)\b)[A-Za-z]{3,}
                      | (?:so|is|it|we|to|of)\b )
    | [^\W\d_A-Za-zª-ϿⅠ-ↈ𝐀-𝟿]{2}""", re.VERBOSE)
CHOICE = re.compile(r"\(([A-Z])\)|([A-Z])(?=[.:,;)]|\s*$)|([B-H])(?=\s+[a-z]{2})")
BARE_NAME = re.compile(r"\\?[A-Za-z]+(_\w+|\([a-z]\))?")


def extract_answer(text: str, last_number: bool = True) -> str | None:
    """The answer alone, for scripts of one's own."""
    return extract(text, last_number).answer


def extract(text: str, last_number: bool = True) -> Extraction:
    """The answer and the rule that found it (see the top). Never raises.

    Turn `last_number` off where a box or tag was asked for: else a model may learn to leave it out.
    """
    turns = filter(str.strip, END_OF_TURN.split(text))
    text = next(turns, "").rpartition("</think>")[2]
    if "<think>" in text:
        return Extraction(None, "truncated")
    boxed = last_box(text)
    if boxed:
        return Extraction(boxed, "box")
    tail = text[-MAX_TAIL:]
    tagged = [answer.strip() for answer in TAG.findall(tail) if answer.strip()]
    if tagged:
        return Extraction(tagged[-1], "tag")
    marked = last_marker(tail)
    if marked:
        return Extraction(marked, "marker")
    # A box that is empty or never closes is a failed answer, often the copied prompt.
    if last_number and not re.search(BOX, text) and "<answer>" not in tail:
        value = value_in(tail.strip())
        if value:
            return Extraction(value, "last_number")
    return Extraction(None, "none")


def last_box(text: str) -> str | None:
    """Content of the last complete, non-empty box; neighbouring boxes become one list."""
    found = []  # contents and what joins them, from the right
    begin = None  # of the box to the right
    for start, inside, inside_end, end in sorted(complete_boxes(text), reverse=True):
        if begin is not None:
            between = text[end:begin]
            if end > begin or len(between) > 80 or not JOINER.fullmatch(between):
                break
            either = re.search(r"(?<![a-z])or(?![a-z])", between)
            found.append(" or " if either else " , ")
        elif not text[inside:inside_end].strip():
            continue
        found.append(text[inside:inside_end])
        begin = start
    if len(set(found[::2])) == 1:
        return found[0].strip()
    return "".join(reversed(found)).strip()


def complete_boxes(text: str) -> list:
    r"""(start, start and end of the content, end) of each box that closes, "\boxed 5" among them.

    One pass, over runs of braces: 100,000 nested ones are a known attack.
    """
    found = []
    opened = []  # boxes: braces outside, start, start of the content
    depth = 0
    masked = ESCAPED.sub("##", text)
    first = re.search(BOX, text)
    for part in BOX_OR_BRACES.finditer(masked, first.start() if first else len(text)):
        start, end = part.span()
        if part[0][0] == "{":
            depth += end - start
        elif part[0][0] == "}":
            depth -= end - start
            while opened and opened[-1][0] >= depth:
                outside, box, inside = opened.pop()
                close = end - 1 - (outside - depth)
                found.append((box, inside, close, close + 1))
        elif masked.startswith("{", end):
            opened.append((depth, start, end + 1))
        elif part[0][-1].isspace():
            word = BARE_WORD.match(text, end)
            if word:
                found.append((start, *word.span(), word.end()))
    return found


def last_marker(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####" in its sentence or line."""
    for marker in reversed(list(MARKER.finditer(text))):
        rest = text[marker.end():].lstrip(" \t*_:\n")
        display = MATH_SPAN.match(rest)
        if display and rest.startswith(("$$", "\\[")):
            return inside(display)
        line = SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *_`")
        if line:
            return value_in(line, marked=True)
    return None


def has_prose(text: str) -> bool:
    return PROSE.search(LATEX.sub("", text)) is not None


def inside(match: re.Match) -> str:
    """The group that took part in the match."""
    return next(filter(None, match.groups())).strip()


def value_in(text: str, marked: bool = False) -> str | None:
    """The value in a text: all of it if it is no prose, else its last formula or number.

    A `marked` text is the line after "answer is": there a leading number or choice letter counts,
    and what cannot be taken apart is the answer as a whole. Elsewhere alternatives are no answer.
    """
    whole = MATH_SPAN.fullmatch(text)
    if whole:
        return inside(whole)
    if len(text) < 400 and re.search(r"\w", text) and not has_prose(text):
        return text
    choice = CHOICE.match(text)
    if marked and choice:
        return inside(choice)
    # In "$5 and $10" the dollars are money: what stands between them is prose.
    spans = [span for span in MATH_SPAN.finditer(text) if not has_prose(span.group())]
    numbers = list(NUMBER.finditer(text, spans[-1].end() if spans else 0))
    found = (spans[-1:] + numbers[-1:] or [None])[-1]
    if marked and spans and not BARE_NAME.fullmatch(inside(spans[-1])):
        found = spans[-1]  # but "the largest $n$ is 34" goes on
    elif marked and numbers and numbers[0].start() == 0:
        found = numbers[0]  # "18 eggs because 16 + 2 = 18"
    if found is None or re.search(r"[0-9$]\s+or\s+$", text[:found.start()][-40:]):
        return text if marked else None
    if marked and not spans and "\\" in text:  # "\frac{1}{2} dollars"
        return text
    return inside(found)


# -----------------------------------------------------------------------------
# Scores for training

class Grade(NamedTuple):
    """One completion's reward in parts: learning the format is not learning mathematics."""
    correct: int           # 1 if the extracted answer equals the gold
    format: int            # 1 if the answer came in the form that the prompt asked for
    rule: str              # how the answer was found, see Extraction
    answer: str | None


def grade(completion: str, gold: str, style: str = "boxed", last_number: bool = False) -> Grade:
    """Score one completion. `style` is what the prompt asked for: "boxed" or "tags"."""
    assert style in ("boxed", "tags"), f"{style!r} is neither 'boxed' nor 'tags'"
    answer, rule = extract(completion, last_number)
    correct = int(answer is not None and is_equal(answer, gold))
    well_formed = format_tags(completion) if style == "tags" else int(rule == "box")
    return Grade(correct, well_formed, rule, answer)


def format_tags(text: str) -> int:
    """The paper's form: <think>...</think> <answer>...</answer>, each tag once, nothing around."""
    text = END_OF_TURN.split(text.strip(), maxsplit=1)[0].strip()
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return 0
    return int(bool(re.fullmatch(r"<think>.*</think>\s*<answer>.*</answer>", text, re.DOTALL)))


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft ramp in tokens: 0 up to max_length - buffer, -1 at max_length and beyond."""
    over = (length - (max_length - buffer)) / buffer
    return -min(1.0, max(0.0, over))


def score(tokenizer, problems, rollouts, style="boxed", plug_in=None):
    """Rollouts of P problems -> one dict a row: what was said, what was read, the verdict, and
    `task`, the grader's reward or the plug-in's, with the latter's `parts`.
    """
    group_size = len(rollouts.completions) // max(len(problems), 1)      # a rank may have none
    texts = [tokenizer.decode(completion) for completion in rollouts.completions]
    rows = []
    for i, text in enumerate(texts):
        problem = problems[i // group_size]
        verdict = grade(text, problem.answer, "tags" if style == "tags" else "boxed")
        row = {
            "id": problem.id, "question": problem.question, "answer": problem.answer,
            "completion": text, "extracted": verdict.answer, "rule": verdict.rule,
            "correct": float(verdict.correct), "format": float(verdict.format),
            "length": len(rollouts.completions[i]), "finished": rollouts.finished[i],
            "mean_logprob": rollouts.logprobs[i].mean().item(), "task": float(verdict.correct),
        }
        if plug_in:
            first = i - i % group_size
            row["parts"] = plug_in(text, problem, texts[first:first + group_size])
            row["task"] = sum(row["parts"].values())
        rows.append(row)
    return rows
