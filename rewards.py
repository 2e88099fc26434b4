r"""
Rewards from text: get the answer out of a completion, decide whether it equals the gold, score the format.

    extract_answer(r"so \boxed{\frac12}")  ->  r"\frac12"      extract(...) also says which rule fired
    is_equal(r"\frac12", "0.5")            ->  True            symmetric, never raises
    grade(completion, gold)                ->  Grade(correct=1, format=1, rule="box", answer=r"\frac12")

The reward is the objective: a wrong verdict trains the wrong thing. So numbers are compared exactly (fractions, never
floats of integers), a decimal equals a fraction only if it has six digits and rounds to it, several answers never equal
one of them, and no answer is the empty string. Expressions in variables are compared at fixed sample points.

Everything runs on counters, not clocks: text length, tokens, nesting, digits and evaluation steps have limits, and what
runs into one is refused (it still equals itself). No threads and no signals, so it is safe in any worker; no eval; the
standard library only, so no computer algebra: sums, integrals and cases are compared as text.

Choices where graders disagree: 50% is 0.5 and also 50; lists and sets have no order, tuples do; 2/4 is 1/2; 52 stands
for 52_8; a chain of equations with two different numbers (x = 41 = 42) is wrong; "32, 349" is two numbers; degrees and
units are dropped unless both sides have one and they differ.

Longer than the other files (the budget was 150 lines) because an answer can be written in so many ways: 1 extraction,
2 clean-up, 3 parser, 4 values, 5 comparison, 6 scores for training. Each section uses only those above it.
"""
import cmath
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple
from zlib import crc32

MAX_TAIL = 20_000      # characters of a completion searched for markers and numbers; boxes are found anywhere
MAX_ANSWER = 6_000     # characters of an answer that is parsed; longer ones equal only themselves
MAX_TOKENS = 2_000
MAX_DEPTH = 40         # nested groups; each costs about 10 Python frames, and the caller's stack counts too
MAX_BITS = 8_000       # of an exact integer
MAX_WORK = 30_000      # evaluated nodes per comparison, about 1 us each


class Refuse(Exception):
    """The text is not something we evaluate, or a limit was reached. Never leaves this file."""


# ---------------------------------------------------------------------------------------------------------------------
# 1. Extraction: completion -> answer text

class Extraction(NamedTuple):
    answer: str | None
    rule: str          # box, tag, marker, last_number, none or truncated (a <think> that never closes)


END_OF_TURN = re.compile(r"<\|im_end\|>|<\|endoftext\|>|<\|im_start\|>|<\|eot_id\|>|</s>")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
SPACES, BRACES, BARE = re.compile(r"\s*"), re.compile(r"[{}]"), re.compile(r"[-\w.,/]*\w")
# What may stand between two boxes that are one answer, as in "\boxed{2} and $y=\boxed{3}$". Prose, a full stop or a
# line break make the last box the answer.
JOINER = re.compile(r"""(?:[ ,;$&] | \\q?quad | \\[,;:!\ ()\[\]] | and | or
    | \\(?:text|mbox|textrm)\s*\{[\s,]*(?:and|or)?[\s,]*\} | [A-Za-z](?:_\{?\w{1,3}\}?)?\s*=)*""", re.VERBOSE)
# A digit at both ends (a lone comma is no number), a sign only where it is no hyphen, then perhaps /7 or %.
NUMBER = re.compile(r"""(?<![A-Za-z0-9.]) (?:(?<![\w)])-)? (?:\\?\$)?
    (?:[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?|\.[0-9]+) (?:/[0-9]+(?![\w/]))? (?:\s?\\?%)?""", re.VERBOSE)
MARKER = re.compile(r"answer\s*(?:(?:\*\*|__)\s*)?(?:is\s*:?|:|=)|####", re.IGNORECASE)
# No span may hold another opening delimiter: 10,000 unclosed ones would each be scanned for 2,000 characters.
MATH_SPAN = re.compile(r"""\$\$([^$]{1,2000})\$\$ | (?<!\\)\$((?:\\.|[^$\\\n]){1,2000})\$
    | \\\(((?:(?!\\[()]).){1,2000})\\\) | \\\[((?:(?!\\[\[\]]).){1,2000})\\\]""", re.DOTALL | re.VERBOSE)
LATEX = re.compile(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
WORD = re.compile(r"(?<![\\A-Za-z])(?:(?!(?:and|sqrt|sin|cos|tan|log|exp|inf)\b)[A-Za-z]{3,}|(?:so|is|it|we|to|of)\b)")
CHOICE = re.compile(r"\(([A-Z])\)|([A-Z])(?=[.:,;)]|\s*$)|([B-H])(?=\s+[a-z]{2})")


def extract_answer(text: str, last_number: bool = True) -> str | None:
    """The answer of a completion, or None. Turn `last_number` off where a box or tag was asked for (MATH): with it on
    a model may learn to leave them out."""
    return extract(text, last_number).answer


def extract(text: str, last_number: bool = True) -> Extraction:
    """Box, tag, marker, then the last formula or number; only text after the last </think> and in the first turn."""
    if not isinstance(text, str):
        return Extraction(None, "none")
    begin = 0
    for token in END_OF_TURN.finditer(text):                  # the turn ends at the first token after some text
        if not text[begin:token.start()].isspace() and begin < token.start():
            text = text[:token.start()]
            break
        begin = token.end()
    text = text[begin:]
    if "</think>" in text:
        text = text[text.rfind("</think>") + len("</think>"):]
    if "<think>" in text:
        return Extraction(None, "truncated")
    if boxed := last_box(text):
        return Extraction(boxed, "box")
    tail = text[-MAX_TAIL:]
    if tagged := last_tag(tail):
        return Extraction(tagged, "tag")
    if marked := last_marker(tail):
        return Extraction(marked, "marker")
    # A box that is empty or never closes is a failed answer, often the copied prompt: no number may replace it.
    if last_number and not BOX.search(text) and "<answer>" not in tail and (found := last_value(tail)):
        return Extraction(found, "last_number")
    return Extraction(None, "none")


def last_box(text: str) -> str | None:
    """Content of the last complete, non-empty box; neighbouring boxes become one comma-separated list.

    Linear: a box that never closes also keeps every box around it open, so earlier scans stop where it begins.
    """
    starts = [m.span() for m in BOX.finditer(text)]
    if not starts:
        return None
    masked = text.replace("\\\\", "  ").replace("\\{", "  ").replace("\\}", "  ")
    limit, found, begin, last_close = len(text), [], None, masked.rfind("}")
    for start, after in reversed(starts):
        content = None
        if after < last_close or text[after:after + 1].isspace():
            content, end = box_content(text, masked, after, limit)
        if content is None:
            limit = start
            continue
        if begin is not None:
            between = text[end:begin]
            if end > begin or len(between) > 80 or not JOINER.fullmatch(between):
                break
            found.append(" or " if re.search(r"(?<![a-z])or(?![a-z])", between) else " , ")
        elif not content.strip():
            continue
        found.append(content)
        begin = start
        if len(found) > 100:
            break
    if len(set(found[::2])) == 1:
        return found[0].strip()
    return "".join(reversed(found)).strip() or None


def box_content(text: str, masked: str, at: int, limit: int) -> tuple[str | None, int]:
    """What follows `\\boxed` at `at`: a braced group that closes before `limit`, or one word ("\\boxed 5").

    `masked` is the text with escaped braces blanked out.
    """
    spaces = SPACES.match(text, at, limit).end()
    if spaces == limit or text[spaces] != "{":
        word = BARE.match(text, spaces, limit) if spaces > at else None
        return (word.group(), word.end()) if word else (None, at)
    depth, position = 0, spaces
    while position < limit:
        chunk = min(position + 2_000, limit)
        closing = masked.count("}", position, chunk)
        if closing < depth:                                   # the group cannot close in this chunk
            depth += masked.count("{", position, chunk) - closing
            position = chunk
            continue
        for brace in BRACES.finditer(masked, position, chunk):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                return text[spaces + 1:brace.start()], brace.end()
        position = chunk
    return None, at


def last_tag(text: str) -> str | None:
    """The last non-empty <answer>...</answer>."""
    close = text.rfind("</answer>")
    while close >= 0:
        start = text.rfind("<answer>", 0, close)
        if start < 0:
            return None
        if content := text[start + len("<answer>"):close].strip():
            return content
        close = text.rfind("</answer>", 0, start)
    return None


def last_marker(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####", to the end of its sentence or line."""
    for marker in reversed(list(MARKER.finditer(text))):
        rest = text[marker.end():].lstrip(" \t*_:\n" if marker.group() != "####" else " \t*_:")
        line = rest.split("\n", 1)[0]
        if rest.startswith(("$$", "\\[")) and (display := MATH_SPAN.match(rest)):
            return next(filter(None, display.groups())).strip() or None
        line = re.split(r"(?<=[^\s.])\.(?:\s|$)|I hope it is", line, maxsplit=1)[0].strip(" *_`")
        if line:
            return value_in(line)
    return None


def has_prose(text: str) -> bool:
    return WORD.search(LATEX.sub("", text)) is not None


def formulas(text: str) -> list[re.Match]:
    """$...$ and the like; "$5 and she has $" between two prices is prose."""
    return [m for m in MATH_SPAN.finditer(text) if not has_prose(m.group())]


def value_in(line: str) -> str:
    """The value in a short sentence: its last formula, else its only or leading number, else all of it."""
    spans = formulas(line)
    if spans and not any(w in line for w in (" or ", " and ")):
        inner = next(filter(None, spans[-1].groups())).strip()
        after = NUMBER.findall(line, spans[-1].end())         # "the largest $n$ is 34"
        return after[-1] if after and re.fullmatch(r"\\?[A-Za-z]+(_\w+|\([a-z]\))?", inner) else inner
    if choice := CHOICE.match(line):
        return next(filter(None, choice.groups()))
    if WORD.search(line) and not re.search(r"\\|\b(?:or|and)\b", line):
        numbers = list(NUMBER.finditer(line))
        if len(numbers) == 1 or numbers and re.match(rf"{NUMBER.pattern}\s+[a-z]{{2}}", line, re.VERBOSE):
            return numbers[0].group()
        if numbers and re.search(r"(?:is|are|=|:)\s*$", line[:numbers[-1].start()]):
            return numbers[-1].group()
    return line


def last_value(text: str) -> str | None:
    """The last formula or number of free text; None for alternatives such as "5 or 6"."""
    text = text.strip()
    if (whole := MATH_SPAN.match(text)) and whole.end() == len(text):
        return text
    if len(text) < 400 and re.search(r"\w", text) and not has_prose(text):
        only_numbers = not NUMBER.sub("", text).replace("or", "").strip(" ,.")
        return None if only_numbers and "or" in text else text
    spans = formulas(text)
    numbers = list(NUMBER.finditer(text, spans[-1].end() if spans else 0))
    if not numbers:
        return next(filter(None, spans[-1].groups())).strip() or None if spans else None
    if re.search(r"[0-9$]\s+or\s+\$?$", text[:numbers[-1].start()][-40:]):
        return None
    return numbers[-1].group()


# ---------------------------------------------------------------------------------------------------------------------
# 2. Clean-up: answer text -> plain text the tokenizer reads

def _spread(pairs: str) -> dict:
    r"""'≤ \le' lines -> {'≤': '\le '}: a command needs a space after it."""
    return {c: to + " " * to[-1].isalpha() for c, to in (pair.split() for pair in re.split("  |\n", pairs))}


# One table, not NFKC: that would read 4² as 42. Digits of other scripts are left alone, so they never equal 0-9.
UNICODE = str.maketrans({
    **_spread(r"""÷ /  √ \sqrt  ∛ \sqrt[3]  π \pi  ∞ \infty  º °  ≤ \le  ≥ \ge  ⩽ \le  ⩾ \ge  ≠ \ne  ≈ \approx  ∪ \cup
∈ \in  ± \pm  ∓ \mp  ∅ \emptyset  θ \theta  α \alpha  β \beta  λ \lambda  ⟨ \langle  ⟩ \rangle  ⌊ \lfloor  ⌋ \rfloor
⌈ \lceil  ⌉ \rceil  ½ \frac{1}{2}  ⅓ \frac{1}{3}  ⅔ \frac{2}{3}  ¼ \frac{1}{4}  ¾ \frac{3}{4}  ⅕ \frac{1}{5}
⅛ \frac{1}{8}  ％ %  ＝ =  （ (  ） )  ， ,  、 ,  ； ;  ： :  ． .  ＋ +"""),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00b7\u00d7\u2217\u2219\u22c5", "*"),
    **dict.fromkeys("\u2044\u2215\uff0f", "/"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\u2061\u2062\ufeff€£¥₹", ""),
    **{0xFF10 + d: str(d) for d in range(10)}, **{0x1D7CE + d: str(d % 10) for d in range(50)},
})
SUPERSCRIPTS, SUBSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"
SUPERSCRIPT, SUBSCRIPT = re.compile(f"[{SUPERSCRIPTS}]+"), re.compile(f"[{SUBSCRIPTS}]+")
TO_ASCII = str.maketrans(SUPERSCRIPTS + SUBSCRIPTS, "0123456789+-n0123456789")

STYLE = re.compile(r"\\(?:display|text)style(?![A-Za-z])|\\m?(?:left|right)(?![A-Za-z])\.?|\\[bB]igg?[lrm]?(?![A-Za-z])"
                   r"|\\(?:(?:no)?limits|bf|rm|it|boldsymbol)(?![A-Za-z])")
SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad|~|\\(?:thin|med|en)space(?![A-Za-z])|\\(?:hspace|phantom)\{[^{}]*\}")
DOUBLED = re.compile(r"(?<!\\)\\\\(?!\\)(?=(?:[dtc]?frac|sqrt|pi|left|right|text|cdot|times|begin|end|infty|boxed|pm"
                     r"|cup|[lg]eq?|in|neq?|circ|mathrm|sin|cos|tan|log|ln|theta|alpha|beta)(?![a-z]))")
TEXT = re.compile(r"\\(?:text(?:bf|rm|it|tt|normal)?|math(?:rm|bf|it|sf|cal)|[mh]box|emph|operatorname|bm)\*?"
                  r"\s*\{([^{}]*)\}")
COMMAND = re.compile(r"\\([A-Za-z]+)")
RENAME = dict(pair.split(" ") for pair in r"""
dfrac frac,tfrac frac,cfrac frac,dbinom binom,tbinom binom,leq le,leqslant le,geq ge,geqslant ge,neq ne,lt <,gt >,cdot *
times *,ast *,div /,lvert |,rvert |,vert |,mid |,lbrace \{,rbrace \},lbrack [,rbrack ],lparen (,rparen ),colon :
varnothing emptyset,implies Rightarrow,sim approx,simeq approx,approxeq approx,ldots ...,dots ...,cdots ...,degree °
varphi phi,vartheta theta,varepsilon epsilon""".strip().replace("\n", ",").split(","))
DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\circ(?![A-Za-z])")
LEAD = re.compile(r"^(?:(?:USD|US|EUR|GBP|INR|CNY|Rs)\.?|«(?:the |final |answer |is |are |about |:|\s)+»)"
                  r"\s*(?=[-+0-9.\\(])", re.IGNORECASE)
AND = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
SPACED = re.compile(r"(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9]|/)")
REPEATING = re.compile(r"([0-9]{0,20})\.([0-9]{0,20})\\overline\s*\{([0-9]{1,20})\}")
MIXED = re.compile(r"(?<![0-9.,/^_}])(?<![/^] )([0-9]{1,9})\s+([0-9]{1,9})\s*/\s*([0-9]{1,9})(?![0-9.])")


def clean(s: str) -> str:
    """Spelling variants out, meaning kept: unicode, styling, spacing, doubled backslashes, text wrappers, "and"."""
    if "<" in s:
        s = END_OF_TURN.sub("", s)
    if not s.isascii():
        s = SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(TO_ASCII) + "}", s)
        s = SUBSCRIPT.sub(lambda m: "_{" + m.group().translate(TO_ASCII) + "}", s).translate(UNICODE)
    s = s.strip()
    if len(s) > 2 and s[0] in "*`_" and s[-1] in "*`_":
        s = s.strip("*`_")
    if "\\" in s:
        s = DOUBLED.sub(r"\\", s)
        s = s.replace("\\(", "").replace("\\)", "").replace("\\$", "").replace("\\%", "%")
        s = re.sub(r"(?<!\\)\\[\[\]]", "", s)
        s = BOX.sub("", STYLE.sub("", s))
        s = re.sub(r",\s*\\!\s*(?=[0-9]{3})", ",", s)
        s = SPACING.sub(lambda m: "" if m.group() in ("\\!", "\\,") else " ", s)
        s = COMMAND.sub(_rename, s)
        for _ in range(3):                                    # \text{\textbf{...}} nests, rarely deeper
            s, n = TEXT.subn(_text, s)
            if not n:
                break
        s = DEGREES.sub("°", s)
        s = REPEATING.sub(_repeating, s)
    s = s.replace("$", "").replace("{,}", ",")
    s = MIXED.sub(r"(\1+\2/\3)", s)
    s = AND.sub(" , ", LEAD.sub("", s.strip())).strip(" \t\r\n,;")
    s = s if s.endswith("..") else s.rstrip(".:\\ \n").strip()
    return strip_pairs(s)


def _rename(match: re.Match) -> str:
    name = RENAME.get(match.group(1))
    if name is None:
        return match.group()
    return f"\\{name} " if name.isalpha() else name


def _text(match: re.Match) -> str:
    r"""\text{ and } becomes a comma, one letter or a function name is mathematics, other words become «words»."""
    content = match.group(1)
    word = content.strip()
    if word.lower() in ("and", "or", ", and", ", or", ",", "and,", ";"):
        return " , "
    if word in FUNCTIONS and word != "min":                   # 40 \text{ min} are minutes
        return f"\\{word} "
    return f" {content} " if len(word) <= 1 or "\\" in word or not re.search("[A-Za-z]", word) else f" «{content}» "


def _repeating(match: re.Match) -> str:
    r"""0.1\overline{6} = (16 - 1) / 90."""
    whole, fixed, cycle = match.groups()
    top = int((whole or "0") + fixed + cycle) - int((whole or "0") + fixed)
    return f"\\frac{{{top}}}{{{(10 ** len(cycle) - 1) * 10 ** len(fixed)}}} "


def strip_pairs(s: str) -> str:
    """Drop the braces that enclose all of `s`, in linear time however many there are."""
    n = min(len(s) - len(s.lstrip("{")), len(s) - len(s.rstrip("}")))
    if n == 0 or s.endswith("\\}") or len(s) - 2 * n > 2 * MAX_ANSWER:
        return s
    depth = low = n
    for brace in re.compile(r"\\.|\{+|\}+").finditer(s, n, len(s) - n):
        run = brace.group()
        depth += len(run) if run[0] == "{" else -len(run) if run[0] == "}" else 0
        low = min(low, depth)
    return s[low:len(s) - low].strip() if low > 0 else s


FAMILIES = (  # two different units of one of the first three families make two different answers
    "mm cm dm m km inch foot yard yd mile mi meter metre centimeter centimetre millimeter kilometer kilometre",
    "second sec s minute min hour hr h day week month year",
    "dollar usd cent euro pound rupee yuan yen",
    "degree deg radian rad unit mph kmh kg g mg gram kilogram lb ounce oz ton liter litre ml gallon quart square cubic "
    "sq cu per people student way point time")
UNIT = {word: family for family, words in enumerate(FAMILIES) for word in words.split()}
PLURAL = {"inches": "inch", "in": "inch", "feet": "foot", "ft": "foot", "s": "second", "people": "people"}
SAME_UNIT = dict(meter="m", metre="m", centimeter="cm", centimetre="cm", kilometer="km", kilometre="km",
                 millimeter="mm", sec="second", minute="min", hr="hour", h="hour", usd="dollar", mile="mi", yard="yd")
NOT_UNITS = frozenset("and or is not but if no to than more less none either neither nor where for with mod "
                      "thousand million hundred billion dozen half squared cubed over pi sqrt sin cos "
                      "tan log ln exp".split())
MULTIPLIER = {"thousand": "10^3", "million": "10^6", "billion": "10^9", "trillion": "10^12"}
PERCENT = frozenset(("percent", "pct", "percentage"))
POWER = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
TEXT_UNIT = re.compile(rf"«([^«»]*)»{POWER}\s*\.?$")
WORDS = r"((?:[A-Za-z]{2,}\.?(?:/[A-Za-z]+)?\s+){0,3}[A-Za-z]{2,}(?:/[A-Za-z]+)?\.?)"
WORD_UNIT = re.compile(rf"(?:(?<=[0-9)}}%])\s*|\s){WORDS}{POWER}$")
BARE_NUMBER = re.compile(r"[-+]?[0-9.,/\s]*(\\frac\s*\{[0-9]+\}\s*\{[0-9]+\})?[%°]?")


def base_unit(word: str) -> str:
    word = PLURAL.get(word) or (word[:-1] if len(word) > 2 and word.endswith("s") else word)
    return SAME_UNIT.get(word, word)


def split_unit(s: str) -> tuple[str, str]:
    """"12 cm^2" -> ("12", "cm ^2"): trailing «text», a known unit, or any few words after a number ("12 red balls").

    Words that change the value stay ("not", "half") or are applied: "5 million" -> 5*10^6, "5 percent" -> 5%.
    """
    end = TEXT_UNIT.search(s)
    if end is None and (s[-1:].isalpha() or s[-1:] in "23}."):
        end = WORD_UNIT.search(s)
        known = end and all(base_unit(word) in UNIT for word in end.group(1).lower().split())
        if end and (s[end.start(1) - 1] == "\\" or not known and not BARE_NUMBER.fullmatch(s, 0, end.start())):
            end = None
    if end is None:
        return s, ""
    value, words = s[:end.start()].strip(), end.group(1).lower().strip(" .").split()
    if words and words[0] in MULTIPLIER:
        value, words = f"{value}*{MULTIPLIER[words[0]]}", words[1:]
    if PERCENT.intersection(words):
        return value + "%", ""
    if NOT_UNITS.intersection(words) or not re.search(r"[0-9A-Za-z})°%]$", value):
        return s, ""
    return value, " ".join([*words, *(["^" + end.group(2)] if end.group(2) else [])])


def units_clash(a: str, b: str) -> bool:
    """Two units of one family (both lengths, both times, both money) that differ: 5 cm is not 5 m."""
    a, b = base_unit(a), base_unit(b)
    return a != b and UNIT.get(a, -1) == UNIT.get(b, -2) < len(FAMILIES) - 1


# ---------------------------------------------------------------------------------------------------------------------
# 3. Parser: plain text -> nodes, tuples whose first item is the kind
#
#    values      ("num", Fraction, decimals or None)  ("name", str)  ("sum", [node])  ("neg", node)
#                ("prod", [(node, +1 or -1)])  ("pow", base, exponent)  ("fn", name, [node])  ("base", digits, base)
#    structures  ("seq", open, close, [node])  ("set", [node])  ("list", [node])  ("union", [node])
#                ("matrix", [[node]])  ("rel", [side], [op])  ("pct", node)  ("ratio", [node])

TOKEN = re.compile(r"""\s*(?:
    (?P<num>[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?|\.[0-9]+)
    |(?P<op>\\\\|\\[{}|]|<=|>=|!=|\*\*|[-+*/^_=<>!(){}\[\]|,;:&%°'])
    |(?P<cmd>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|«(?P<text>[^«»]*)»)""", re.VERBOSE)
RELATIONS = {"=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", r"\le": "<=", r"\ge": ">=", r"\ne": "!=",
             r"\in": "in", r"\approx": "~", r"\equiv": "="}
GREEK = frozenset("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi "
                  "omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar".split())
TRIG = frozenset("sin cos tan cot sec csc".split())
FUNCTIONS = TRIG | frozenset("arcsin arccos arctan arccot arcsec arccsc asin acos atan sinh cosh tanh coth sech csch "
                             "arcsinh arccosh arctanh ln log lg exp sqrt cbrt abs floor ceil max min gcd lcm binom "
                             "factorial".split())
FRAMES = frozenset("overline overrightarrow vec hat bar widehat tilde underline mathbb mathcal mathfrak".split())
SKIP = frozenset((r"\angle", r"\triangle", r"\measuredangle", r"\operatorname"))
NAMES = GREEK | {"pi", "infty"}
INFINITY = ("name", "infty")
STARTS = frozenset((*r"( [ { \{ \frac \binom \lfloor \lceil \langle \begin \emptyset".split(), *SKIP,
                    *("\\" + name for name in FUNCTIONS | NAMES | FRAMES)))


def tokenize(s: str) -> list[tuple[str, str]]:
    """[(kind, text)] with kinds num, op, cmd (also functions in plain letters), word and text."""
    tokens, at, s = [], 0, s.rstrip()
    while at < len(s):
        match = TOKEN.match(s, at)
        if match is None or len(tokens) > MAX_TOKENS:
            raise Refuse(f"no token at {at}")
        at, kind = match.end(), match.lastgroup
        text = match.group(kind)
        if kind == "word" and text not in FUNCTIONS:
            tokens += split_word(text)
        elif kind == "word":
            tokens.append(("cmd", "\\" + text))
        else:
            tokens.append((kind, text))
    return tokens


def split_word(word: str) -> list[tuple[str, str]]:
    """Plain letters: pi, inf, sinx and pix are read as in LaTeX, up to three letters are a product, more are a name."""
    if word in ("inf", "infinity", "Infinity", "oo"):
        return [("cmd", r"\infty")]
    if word == "pi" or len(word) == 3 and word.startswith("pi"):
        return [("cmd", r"\pi"), *(("word", c) for c in word[2:])]
    if word[:-1] in FUNCTIONS:
        return [("cmd", "\\" + word[:-1]), ("word", word[-1])]
    return [("word", c) for c in word] if len(word) <= 3 else [("word", word)]


class Parser:
    """Recursive descent over the tokens of one answer. `parse(text)` is the entrance."""

    def __init__(self, tokens):
        self.tokens, self.at, self.depth, self.bars, self.trig = tokens, 0, 0, 0, 0
        self.pm, self.saw_pm = 1, False

    def peek(self) -> str:
        """The next operator or command, "" before anything else."""
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")
        return text if kind in ("op", "cmd") else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    def take(self) -> str:
        if self.at >= len(self.tokens):
            raise Refuse("ends early")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def accept(self, *texts) -> str:
        return self.take() if self.peek() in texts else ""

    def expect(self, text: str):
        if self.peek() != text:
            raise Refuse(f"{text} missing")
        self.at += 1

    def deeper(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refuse("too deep")

    # structures ---------------------------------------------------------------------------------------------------

    def listing(self, *closers, expand: bool = False) -> list:
        """Items up to a closer, separated by commas or semicolons; "a,b;c,d" is a list of two lists."""
        bars, self.bars = self.bars, 0
        self.deeper()
        groups = [[]]
        while True:
            groups[-1] += self.item() if expand else [self.relation()]
            separator = self.accept(",", ";")
            while separator and self.accept(",", ";"):      # "(1,2), and (3,4)" has two commas after clean-up
                pass
            if not separator or self.peek() in closers or self.kind() == "end":
                break
            if separator == ";":
                groups.append([])
        self.depth -= 1
        self.bars = bars
        if len(groups) > 1 and max(map(len, groups)) > 1:
            return [g[0] if len(g) == 1 else ("list", g) for g in groups]
        return [node for g in groups for node in g]

    def item(self) -> list:
        """One relation, or two when it holds a plus-minus sign (read once with each sign)."""
        start, outer, self.saw_pm = self.at, self.saw_pm, False
        nodes = [self.relation()]
        if self.saw_pm and self.pm == 1:
            self.at, self.pm = start, -1
            nodes.append(self.relation())
            self.pm, self.saw_pm = 1, False
        self.saw_pm = outer or self.saw_pm                   # inside a second reading the flag belongs to the outside
        return nodes

    def relation(self):
        sides, ops = [], []
        if self.accept(r"\approx", "="):                     # "= 5" and "\approx 5" are 5
            pass
        while True:
            sides.append(self.ratio())
            if self.peek() not in RELATIONS:
                break
            ops.append(RELATIONS[self.take()])
            if self.accept("="):                             # "> =" or "=="
                ops[-1] = ops[-1] if "=" in ops[-1] else ops[-1] + "="
        return ("rel", sides, ops) if ops else sides[0]

    def ratio(self):
        return self.parts("ratio", ":", self.union)

    def union(self):
        return self.parts("union", r"\cup", self.sum)

    def parts(self, kind: str, separator: str, read):
        nodes = [read()]
        while self.accept(separator):
            nodes.append(read())
        return (kind, nodes) if len(nodes) > 1 else nodes[0]

    # arithmetic ---------------------------------------------------------------------------------------------------

    def sum(self):
        terms = []
        while True:
            sign = 1
            signed = False
            while op := self.accept("+", "-", r"\pm", r"\mp"):
                signed = True
                if op in (r"\pm", r"\mp"):
                    self.saw_pm = True
                    sign *= self.pm if op == r"\pm" else -self.pm
                elif op == "-":
                    sign = -sign
            if terms and not signed:
                break
            term = self.product()
            terms.append(term if sign > 0 else ("neg", term))
        return terms[0] if len(terms) == 1 else ("sum", terms)

    def product(self):
        factors = [(self.power(), 1)]
        while True:
            if self.at_unit():                                 # "3 cm, 4 cm"
                self.take()
                if self.accept("^"):
                    self.exponent()
            elif self.accept("%"):                             # of all so far: 3\frac14%
                factors = [(("pct", factors[0][0] if len(factors) == 1 else ("prod", factors)), 1)]
            elif self.accept("*", "**"):
                factors.append((self.signed(), 1))
            elif self.accept("/"):
                factors.append((self.signed(), -1))
            elif self.starts_factor():
                before = self.tokens[self.at - 1][0]
                after_number = before == "num"
                if self.kind() == "num" and before in ("num", "word"):
                    raise Refuse("5 6 or x2")
                fraction, factor = self.peek() == r"\frac", self.power()
                whole = factors[-1]
                if fraction and after_number and is_proper(factor) and whole[0][0] == "num" and whole[0][2] is None:
                    factors[-1] = (("sum", [whole[0], factor]), whole[1])      # 1\frac{1}{2} is a mixed number
                else:
                    factors.append((factor, 1))
            else:
                return factors[0][0] if len(factors) == 1 else ("prod", factors)

    def at_unit(self) -> bool:
        """At words that only say what is counted: \\text{...} after a value, a long bare word after a number."""
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")
        noun = kind == "text" or kind == "word" and len(text) > 3 and self.tokens[self.at - 1][0] == "num"
        return noun and not NOT_UNITS.intersection(text.lower().split())

    def starts_factor(self) -> bool:
        kind, text = self.kind(), self.peek()
        if kind in ("num", "word", "text"):
            return True
        if text == "|":
            return self.bars == 0
        return text in STARTS

    def signed(self):
        if self.accept("-"):
            return ("neg", self.power())
        self.accept("+")
        return self.power()

    def power(self):
        node = self.postfix(self.primary())
        while self.accept("^", "**"):
            node = self.postfix(("pow", node, self.exponent()))
        return node

    def exponent(self):
        self.deeper()
        node = self.signed() if self.peek() != "{" else self.braced()
        self.depth -= 1
        return node

    def postfix(self, node):
        marks = 0
        while mark := self.accept("!", "°", "'"):
            if mark == "!":
                marks += 1
                if marks > 3:
                    raise Refuse("factorial tower")
                double = self.accept("!")
                node = ("fn", "double factorial" if double else "factorial", [node])
            elif mark == "°" and self.tokens[self.at:self.at + 1] in ([("word", "C")], [("word", "F")]):
                self.at += 1
            elif mark == "°" and self.trig:
                node = ("prod", [(node, 1), (("name", "pi"), 1), (("num", Fraction(180), None), -1)])
            elif mark == "'":
                node = ("name", str(node[1]) + "'")
        return node

    # primaries ----------------------------------------------------------------------------------------------------

    def primary(self):
        kind = self.kind()
        text = self.take()
        if kind == "num":
            return self.number(text)
        if kind in ("word", "text"):
            return self.name(text)
        if text in ("(", "[", r"\langle"):
            return self.bracketed(text)
        if text == "{":
            self.at -= 1
            return self.braced()
        if text == r"\{":
            items = [] if self.peek() == r"\}" else self.listing(r"\}", expand=True)
            self.expect(r"\}")
            return ("set", items)
        if text in ("|", r"\|"):
            return self.enclosed("abs", text)
        if text in (r"\lfloor", r"\lceil"):
            return self.enclosed("floor" if text == r"\lfloor" else "ceil", text.replace(r"\l", r"\r"))
        if text in (r"\frac", r"\binom"):
            top, bottom = self.argument(), self.argument()
            return ("prod", [(top, 1), (bottom, -1)]) if text == r"\frac" else ("fn", "binom", [top, bottom])
        if text == r"\begin":
            return self.matrix()
        if text == r"\emptyset":
            return ("set", [])
        if text in SKIP:
            return self.primary()
        command = text[1:]
        if command in FUNCTIONS:
            return self.function(command)
        if command in FRAMES:
            return self.frame(command)
        if command in NAMES:
            return self.name(command)
        raise Refuse(f"unexpected {text}")

    def number(self, text: str):
        if self.accept("_"):                                  # 52_8: the digits and the base
            start = self.at
            base = self.argument()
            if base[0] != "num" or self.at == start:
                raise Refuse("base")
            return ("base", text.lstrip("0") or "0", base[1])
        if len(text) > 1_000:
            raise Refuse("too many digits")
        return ("num", Fraction(text), len(text.split(".")[1]) if "." in text and "e" not in text.lower() else None)

    def name(self, text: str):
        if self.accept("_"):
            text += "_" + self.raw_group()
        while self.accept("'"):
            text += "'"
        if text in ("f", "g", "h", "F", "G") and self.peek() == "(":        # f(x) is a call, not f times x
            text += self.raw_group()
        return ("name", text)

    def raw_group(self) -> str:
        """The text of the next token or bracketed group, as part of a name: x_{10}, f(2)."""
        closer = {"{": "}", "(": ")"}.get(self.peek())
        if closer is None:
            return self.take()
        opener, depth, parts = self.peek(), 0, []
        while True:
            text = self.take()
            depth += (text == opener) - (text == closer)
            if depth == 0:
                break
            parts.append(text)
        inner = "".join(parts[1:])
        return f"({inner})" if opener == "(" else inner

    def bracketed(self, opener: str):
        items = self.listing(")", "]", r"\rangle")
        closer = self.accept(")", "]", r"\rangle")
        if not closer:
            raise Refuse("bracket missing")
        if len(items) == 1 and (opener, closer) in (("(", ")"), ("[", "]")):
            return items[0]
        opener, closer = ("(", ")") if opener == r"\langle" else (opener, closer)
        return ("seq", opener, closer, items)

    def braced(self):
        self.expect("{")
        if self.peek() == "}":
            raise Refuse("empty group")
        items = self.listing("}")
        self.expect("}")
        return items[0] if len(items) == 1 else ("list", items)

    def argument(self):
        """A LaTeX argument: a group, or one digit or token (\\frac12, \\frac1{72})."""
        if self.peek() == "{":
            return self.braced()
        if self.kind() == "num" and len(text := self.tokens[self.at][1]) > 1 and text.isdigit():
            self.tokens = [*self.tokens[:self.at], ("num", text[0]), ("num", text[1:]), *self.tokens[self.at + 1:]]
            self.at += 1
            return ("num", Fraction(text[0]), None)
        return self.primary()

    def enclosed(self, function: str, closer: str):
        self.bars += closer == "|"
        self.deeper()
        node = self.sum()
        self.depth -= 1
        self.bars -= closer == "|"
        self.expect(closer)
        return ("fn", function, [node])

    def frame(self, command: str):
        """\\overline{AB} is one name; \\mathbb{R} is the interval of all reals."""
        inner = self.raw_group()
        if command == "mathbb" and inner == "R":
            return ("seq", "(", ")", [("neg", INFINITY), INFINITY])
        return ("name", inner if command == "mathbb" else f"{command}({inner})")

    def function(self, name: str):
        if name in ("sqrt", "cbrt"):
            index = ("num", Fraction(2 if name == "sqrt" else 3), None)
            if self.accept("["):
                index = self.sum()
                self.expect("]")
            argument = self.braced() if self.peek() == "{" else self.primary()
            return ("fn", "root", [argument, index])
        base = power = None
        while mark := self.accept("_", "^"):
            if mark == "_":
                base = self.argument()
            else:
                power = self.exponent()
        name = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name)
        if power == ("neg", ("num", Fraction(1), None)) and name in TRIG:
            name, power = "arc" + name, None
        self.trig += name in TRIG
        arguments = self.call_arguments()
        self.trig -= name in TRIG
        node = ("fn", name, arguments if base is None else [*arguments, base])
        return node if power is None else ("pow", node, power)

    def call_arguments(self) -> list:
        """f(x, y), f{x}, or the product that follows up to a sign or another function: \\sin 2x \\cos y."""
        if self.peek() in ("(", "{"):
            closer = ")" if self.take() == "(" else "}"
            items = self.listing(closer)
            self.expect(closer)
            return items
        self.deeper()
        factors = [(self.signed(), 1)]
        while self.starts_factor() and self.peek()[1:] not in FUNCTIONS and self.peek() != "(":
            factors.append((self.power(), 1))
        if self.trig and self.peek() == "/" and [kind for kind, _ in self.tokens[self.at + 1:self.at + 2]] == ["num"]:
            self.take()                                        # \cos\pi/3
            factors.append((self.power(), -1))
        self.depth -= 1
        return [factors[0][0] if len(factors) == 1 else ("prod", factors)]

    def matrix(self):
        name = self.raw_group()
        if name not in ("pmatrix", "bmatrix", "vmatrix", "matrix", "array", "Bmatrix", "smallmatrix"):
            raise Refuse(name)
        if name == "array" and self.peek() == "{":
            self.raw_group()
        self.deeper()
        rows = [[]]
        while not self.accept(r"\end"):
            if self.accept(r"\\"):
                rows.append([])
            elif not self.accept("&"):
                rows[-1].append(self.relation())
        self.raw_group()
        self.depth -= 1
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) > 1 or name == "vmatrix":
            raise Refuse("ragged matrix")
        return ("matrix", rows)


def is_proper(node) -> bool:
    """A fraction of two plain integers below 1."""
    if node[0] != "prod" or len(node[1]) != 2:
        return False
    (top, _), (bottom, sign) = node[1]
    return sign < 0 and top[0] == bottom[0] == "num" and top[2] is bottom[2] is None and 0 < top[1] < bottom[1]


def parse(s: str, thousands: bool = True):
    """One answer -> node, or None where it is not an expression. `thousands`: read 1,234 as one number, not two."""
    if thousands:
        s = THOUSANDS.sub(lambda m: m.group().replace(",", ""), s)
        s = SPACED.sub(lambda m: m.group().replace(" ", ""), s)
    s = re.sub(r"^\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*=", "", s)                  # "x, y = 1, 2"
    if builder := re.fullmatch(r"\\\{\s*[a-z]\s*(?:\\in\s*(?:\\mathbb\s*)?\{?\s*R\s*\}?\s*)?[|:]\s*(.+)\\\}", s):
        s = builder.group(1)                                                    # {x | x > 2}
    try:
        parser = Parser(tokenize(s))
        items = parser.listing(expand=True)
        if parser.at < len(parser.tokens):
            return None
    except Refuse:
        return None
    return items[0] if len(items) == 1 else ("list", items)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Values: the same tree in three kinds of numbers, tried in this order

class Inexact(Exception):
    """This kind of number cannot hold the value; try the next kind."""


DIGITS = Context(prec=90)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
CONSTANTS = frozenset(("pi", "e", "i"))
COMPLEX = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan,
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
    "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "arcsinh": cmath.asinh, "arccosh": cmath.acosh,
    "arctanh": cmath.atanh, "exp": cmath.exp, "cot": lambda z: 1 / cmath.tan(z), "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z), "coth": lambda z: 1 / cmath.tanh(z), "sech": lambda z: 1 / cmath.cosh(z),
    "csch": lambda z: 1 / cmath.sinh(z), "arccot": lambda z: cmath.pi / 2 - cmath.atan(z),
    "arcsec": lambda z: cmath.acos(1 / z), "arccsc": lambda z: cmath.asin(1 / z)}


class Work:
    """Counts evaluated nodes; a comparison that uses up its budget is refused."""

    def __init__(self):
        self.left = MAX_WORK

    def spend(self, amount: int):
        self.left -= amount
        if self.left < 0:
            raise Refuse("work")


def integer_root(n: int, degree: int) -> int:
    """floor(n ** (1 / degree)) by Newton's method on integers."""
    if degree == 2 or n < 2:
        return math.isqrt(n) if degree == 2 else n
    x = 1 << -(-n.bit_length() // degree)
    while (y := ((degree - 1) * x + n // x ** (degree - 1)) // degree) < x:
        x = y
    return x


class Numbers:
    """Evaluates nodes; subclasses say what a number is. `scale` is the largest term met: it bounds rounding errors."""

    def __init__(self, work: Work, env: dict):
        self.work, self.env, self.scale = work, env, 0

    def value(self, node):
        self.work.spend(1)
        kind = node[0]
        if kind == "num":
            return self.number(node[1])
        if kind == "name":
            return self.constant(node[1]) if node[1] in CONSTANTS else self.number(self.env[node[1]])
        if kind == "neg":
            return 0 - self.value(node[1])      # not -x: a complex -0.0 lands on the wrong side of a branch cut
        if kind == "sum":
            total = self.number(Fraction(0))
            for term in node[1]:
                term = self.value(term)
                self.seen(term)
                total = self.checked(total + term)
            return total
        if kind == "prod":
            total = self.number(Fraction(1))
            for factor, sign in node[1]:
                factor = self.value(factor)
                total = self.checked(total * factor if sign > 0 else total / factor)
            return total
        if kind == "pow":
            return self.power(self.value(node[1]), self.value(node[2]))
        if kind == "fn":
            return self.function(node[1], [self.value(argument) for argument in node[2]])
        if kind == "pct":
            return self.value(node[1]) / self.number(Fraction(100))
        raise Refuse(kind)

    def seen(self, x):
        self.scale = max(self.scale, abs(x))

    def checked(self, x):
        return x

    def integer(self, x, most: int) -> int:
        if x != x.__floor__() or not 0 <= x <= most:
            raise Inexact
        return int(x)

    def combinatorial(self, name: str, args: list):
        """Functions of whole numbers and order, the same for exact and decimal numbers."""
        if name == "factorial":
            return math.factorial(self.integer(args[0], 500))
        if name == "double factorial":
            return math.prod(range(self.integer(args[0], 500), 1, -2))
        if name == "binom":
            return math.comb(self.integer(args[0], 2_000), self.integer(args[1], 2_000))
        if name in ("gcd", "lcm"):
            return getattr(math, name)(*(self.integer(x, 10 ** 30) for x in args))
        if name in ("max", "min"):
            return (max if name == "max" else min)(args)
        if name in ("floor", "ceil") and len(args) == 1:
            return args[0].__floor__() if name == "floor" else args[0].__ceil__()
        raise Inexact


class Exact(Numbers):
    """Fractions: + - * /, whole powers, and roots that come out."""

    def number(self, x: Fraction) -> Fraction:
        return x

    def constant(self, name):
        raise Inexact

    def checked(self, x: Fraction) -> Fraction:
        bits = x.numerator.bit_length() + x.denominator.bit_length()
        self.work.spend(bits >> 8)
        if bits > 2 * MAX_BITS:
            raise Inexact
        return x

    def seen(self, x):
        pass

    def power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            return self.power(self.root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
        n = exponent.numerator
        if abs(n) * (base.numerator.bit_length() + base.denominator.bit_length() - 2) > MAX_BITS and abs(base) != 1:
            raise Inexact
        return base ** (n if abs(base) != 1 else n % 2)

    def root(self, x: Fraction, degree: Fraction) -> Fraction:
        n = degree.numerator
        if degree.denominator != 1 or not 1 <= n <= 64:
            raise Inexact
        if x < 0:
            if n % 2 == 0:
                raise Inexact
            return -self.root(-x, degree)
        self.work.spend(1 + (x.numerator.bit_length() + x.denominator.bit_length() >> 5))
        top, bottom = integer_root(x.numerator, n), integer_root(x.denominator, n)
        if top ** n != x.numerator or bottom ** n != x.denominator:
            raise Inexact
        return Fraction(top, bottom)

    def function(self, name: str, args: list) -> Fraction:
        if name == "root":
            return self.root(*args)
        if name == "abs":
            return abs(args[0])
        return self.checked(Fraction(self.combinatorial(name, args)))


class Digits90(Numbers):
    """Real numbers with 90 digits: roots, pi, e, exp and logarithms."""

    def number(self, x: Fraction) -> Decimal:
        return DIGITS.divide(Decimal(x.numerator), Decimal(x.denominator))

    def constant(self, name: str) -> Decimal:
        if name == "i":
            raise Inexact
        return PI if name == "pi" else Decimal(1).exp()

    def power(self, base: Decimal, exponent: Decimal) -> Decimal:
        if base < 0 and exponent != int(exponent):
            raise Inexact
        self.work.spend(20)
        return base ** exponent

    def function(self, name: str, args: list) -> Decimal:
        self.work.spend(30)
        x = args[0]
        if name == "root":
            if x < 0 and (args[1] != int(args[1]) or args[1] % 2 == 0):
                raise Inexact
            if args[1] == 2:
                return x.sqrt()
            return -((-x) ** (1 / args[1])) if x < 0 else x ** (1 / args[1])
        if name == "abs":
            return abs(x)
        if name == "exp":
            return x.exp()
        if name in ("ln", "log", "lg"):
            if x <= 0 or len(args) > 1 and args[1] <= 0:
                raise Inexact
            return x.ln() / args[1].ln() if len(args) > 1 else x.ln() / Decimal(10).ln() if name == "lg" else x.ln()
        return Decimal(self.combinatorial(name, args))


class Floats(Numbers):
    """Complex floats: everything else."""

    def number(self, x: Fraction) -> complex:
        return complex(float(x))

    def constant(self, name: str) -> complex:
        return 1j if name == "i" else complex(math.pi if name == "pi" else math.e)

    def power(self, base: complex, exponent: complex) -> complex:
        whole = exponent.imag == 0 and exponent.real.is_integer() and abs(exponent) < 1e6
        return base ** (int(exponent.real) if whole else exponent)

    def function(self, name: str, args: list) -> complex:
        x = args[0]
        self.scale = max([self.scale, 1.0, *(abs(a) for a in args)])
        if name == "root":
            degree = args[1].real
            if x.imag == 0 and x.real < 0 and degree % 2 == 1:
                return -((-x) ** (1 / degree))
            return cmath.sqrt(x) if degree == 2 else x ** (1 / args[1])
        if name == "abs":
            return complex(abs(x))
        if name in ("ln", "log", "lg"):
            return cmath.log(x) / cmath.log(args[1] if len(args) > 1 else 10 if name == "lg" else math.e)
        if name in COMPLEX and len(args) == 1:
            return COMPLEX[name](x)
        if any(a.imag for a in args):
            raise Refuse(name)
        if name == "factorial":
            return complex(math.gamma(x.real + 1))
        if name == "binom":
            n, k = x.real, args[1].real
            return complex(math.gamma(n + 1) / math.gamma(k + 1) / math.gamma(n - k + 1))
        try:
            return complex(self.combinatorial(name, [a.real for a in args]))
        except Inexact:
            raise Refuse(name) from None


def names_of(node, work: Work) -> set:
    """Free variables of a scalar node; Refuse for structures."""
    work.spend(1)
    kind = node[0]
    if kind == "num":
        return set()
    if kind == "name":
        return set() if node[1] in CONSTANTS else {node[1]}
    if kind in ("neg", "pct"):
        return names_of(node[1], work)
    if kind == "sum":
        return set().union(*(names_of(term, work) for term in node[1]))
    if kind == "prod":
        return set().union(*(names_of(factor, work) for factor, _ in node[1]))
    if kind == "pow":
        return names_of(node[1], work) | names_of(node[2], work)
    if kind == "fn":
        return set().union(*(names_of(argument, work) for argument in node[2]))
    raise Refuse(kind)


def uses_i(node) -> bool:
    return "('name', 'i')" in repr(node)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Comparison

SCALARS = frozenset(("num", "name", "sum", "neg", "prod", "pow", "fn", "pct"))
POINTS = 8             # sample points; three usable ones decide


def close(x, y, scale) -> bool:
    """Equal but for rounding: relative to the values, plus what cancelling terms of size `scale` may leave."""
    if isinstance(x, Fraction):
        return x == y
    if isinstance(x, Decimal):
        return abs(x - y) <= Decimal("1e-75") * max(abs(x), abs(y)) + Decimal("1e-80") * scale
    return abs(x - y) <= 1e-9 * max(abs(x), abs(y)) + 1e-13 * scale


def values(a, b, env: dict, work: Work, kinds=(Exact, Digits90, Floats)):
    """(value of a, value of b, scale) in the first kind of number that holds both."""
    for kind in kinds:
        try:
            with localcontext(DIGITS):
                numbers = kind(work, env)
                return numbers.value(a), numbers.value(b), numbers.scale
        except Inexact:
            continue
    raise Refuse("no kind of number")


def literal(node) -> tuple[Fraction, int] | None:
    """(value, decimals) of a written decimal such as -0.333333."""
    if node[0] == "neg" and (inner := literal(node[1])):
        return -inner[0], inner[1]
    return (node[1], node[2]) if node[0] == "num" and node[2] is not None else None


def rounds_to(written: tuple[Fraction, int], x) -> bool:
    """A decimal of six or more digits stands for the value that it rounds (or, from ten digits on, truncates)."""
    value, decimals = written
    digits = len(str(abs(int(value * 10 ** decimals))))
    if digits < 6 or isinstance(x, complex) and abs(x.imag) > 1e-12 * abs(x):
        return False
    if not abs(value) <= 2 * abs(x) <= 4 * abs(value):         # before Fraction(x): a Decimal may have 10^6 digits
        return False
    x = Fraction(x.real if isinstance(x, complex) else x)
    error = abs(x - value)
    return error * 2 * 10 ** decimals <= 1 or digits >= 10 and error <= abs(x) / 10 ** 9


def same_number(a, b, work: Work) -> bool:
    x, y, scale = values(a, b, {}, work)
    if close(x, y, scale):
        return True
    written_a, written_b = literal(a), literal(b)
    if written_a and written_b:
        coarse, fine = sorted((written_a, written_b), key=lambda w: w[1])
        return coarse[1] >= 6 and rounds_to(coarse, fine[0])
    return bool(written_a and rounds_to(written_a, y) or written_b and rounds_to(written_b, x))


def samples(a, b, names: set, work: Work):
    """Yield (value of a, value of b, scale) at fixed points; poles and overflows are skipped.

    Coordinates are fractions between 2/3 and 5/3 (5 in the last points) with small terms, so that high powers stay
    cheap and finite; in every second point they are of mixed sign.
    """
    kinds = (Exact, Floats)
    for point in range(POINTS):
        env = {}
        for name in names:
            h = crc32(f"{point}:{name}".encode())
            env[name] = Fraction(67 + h % 101, 101 if point < 6 else 34) * (-1 if point % 2 and h >> 16 & 1 else 1)
        try:
            x, y, scale = values(a, b, env, work, kinds)
        except (ArithmeticError, ValueError):
            continue
        if isinstance(x, complex):
            kinds = (Floats,)
            if not (cmath.isfinite(x) and cmath.isfinite(y)):
                continue
        yield x, y, scale


def same_scalar(a, b, work: Work) -> bool:
    names = names_of(a, work)
    if names != names_of(b, work):
        return False
    if not names:
        return same_number(a, b, work)
    real, other, differs = 0, 0, False
    for x, y, scale in samples(a, b, names, work):
        equal = close(x, y, scale)
        if isinstance(x, complex) and abs(x.imag) + abs(y.imag) > 1e-9 * (abs(x) + abs(y)):
            other += 1                     # log x^2 and 2 log x, x^{2/3} and \sqrt[3]{x}^2 agree where both are real
            differs = differs or not equal
        elif not equal:
            return False
        else:
            real += 1
    if real >= 3 and (not differs or not (uses_i(a) or uses_i(b))):
        return True
    return not differs and real + other >= 3


def proportional(a, b, work: Work, positive: bool) -> bool:
    """a = c * b at all sample points for one constant c != 0 (c > 0 for inequalities)."""
    names = names_of(a, work)
    if not names or names != names_of(b, work):
        return False
    factor = None
    for x, y, scale in samples(a, b, names, work):
        if abs(x) <= 1e-13 * scale and abs(y) <= 1e-13 * scale:
            continue
        if abs(x) <= 1e-13 * scale or abs(y) <= 1e-13 * scale:
            return False
        ratio = x / y
        if factor is None:
            factor, count = ratio, 0
        if not close(ratio, factor, 0) or positive and complex(ratio).real <= 0:
            return False
        count += 1
    return factor is not None and count >= 3


def is_label(node) -> bool:
    """A left side that only names the answer: x, f(x), AB, (x, y), |AB|, A:B, \\frac{NO}{BO}, \\tan A."""
    kind = node[0]
    if kind == "name":
        return node[1] not in ("infty", "pi", "i")
    if kind in ("seq", "ratio", "list"):
        return all(is_label(item) for item in node[-1])
    if kind == "prod":
        return all(is_label(factor) for factor, _ in node[1])
    if kind == "fn" and node[1] in ("abs", *TRIG):
        return is_label(node[2][0])
    return False


def reduce(node, work: Work):
    """A chain of equalities -> ("eq", left, value), or its value if every side is one; other nodes unchanged.

    The value is the last side before an approximation. Raises Refuse when two numeric sides disagree: 41 = 42.
    """
    if node[0] != "rel" or not set(node[2]) <= {"=", "~", "in"}:
        return node
    sides = node[1]
    if "~" in node[2] and not is_label(sides[node[2].index("~")]):
        sides = sides[:node[2].index("~") + 1]
    numeric = [side for side in sides if side[0] in SCALARS and not names_of(side, work)]
    for x, y in zip(numeric, numeric[1:]):
        if not same_number(x, y, work):
            raise Refuse("false equation")
    if len(numeric) == len(sides) or len(sides) == 1:
        return sides[-1]
    return ("eq", sides[0], sides[-1])


def assigned(node, work: Work):
    """(label or None, value) of an item of a list."""
    node = reduce(node, work)
    if node[0] == "eq" and is_label(node[1]):
        return repr(node[1]), node[2]
    return None, node


def same(a, b, work: Work) -> bool:
    """Are two nodes the same answer? Symmetric in a and b."""
    work.spend(5)
    if a == b and a[0] != "rel":
        return True
    a, b = reduce(a, work), reduce(b, work)
    if "eq" in (a[0], b[0]):
        return same_equation(a, b, work)
    if a[0] == b[0] == "rel":
        return same_inequality(a, b, work)
    if "rel" in (a[0], b[0]):
        a, b = (interval(node) or node if node[0] == "rel" else node for node in (a, b))
        return "rel" not in (a[0], b[0]) and same(a, b, work)
    if "pct" in (a[0], b[0]):
        return same_percent(a, b, work)
    if "base" in (a[0], b[0]):
        return same_base(a, b)
    if a[0] in SCALARS and b[0] in SCALARS and not (has_matrix(a) or has_matrix(b)):
        return same_scalar(a, b, work)
    return same_structure(a, b, work)


def same_equation(a, b, work: Work) -> bool:
    """Equations up to a factor, or up to the name of what is found: x = 5, k = 5, 5 = x and 5 are one answer."""
    if a[0] == b[0] == "eq":
        if a[1] == b[1] and same(a[2], b[2], work):
            return True
        if is_label(a[1]) and is_label(b[1]) and not (is_label(a[2]) and is_label(b[2])) and same(a[2], b[2], work):
            return True
        sides = [*a[1:], *b[1:]]
        if any(side[0] not in SCALARS or has_matrix(side) for side in sides):
            return False
        return proportional(difference(*a[1:]), difference(*b[1:]), work, positive=False)
    if a[0] != "eq":
        a, b = b, a
    if is_label(a[1]):
        return same(a[2], b, work)
    return is_label(a[2]) and same(a[1], b, work)


def difference(a, b):
    return ("sum", [a, ("neg", b)])


FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "=", "~": "~"}


def same_inequality(a, b, work: Work) -> bool:
    """Inequalities up to direction and a positive factor; chains side by side; one variable as intervals."""
    (_, sides, ops), (_, others, other_ops) = a, b
    if any(op not in FLIP for op in ops + other_ops):
        return False
    if interval(a) and interval(b):
        return variable(a) == variable(b) and same(interval(a), interval(b), work)
    if len(ops) == len(other_ops) == 1:
        if "<" in ops[0]:
            sides, ops = sides[::-1], [FLIP[ops[0]]]
        if "<" in other_ops[0]:
            others, other_ops = others[::-1], [FLIP[other_ops[0]]]
        if any(side[0] not in SCALARS for side in sides + others) or ops != other_ops:
            return False
        return proportional(difference(*sides), difference(*others), work, positive=ops != ["!="])
    if ops != other_ops:
        others, other_ops = others[::-1], [FLIP[op] for op in other_ops[::-1]]
    return ops == other_ops and len(sides) == len(others) and all(same(x, y, work) for x, y in zip(sides, others))


def variable(node):
    """The node of the lone name in an inequality such as 0 < x < 1; None if there is none or more than one."""
    labels = [side for side in node[1] if side[0] == "name" and is_label(side)]
    return labels[0] if len(labels) == 1 else None


def interval(node):
    """0 < x <= 1 -> the node of (0, 1]; x > 3 -> (3, \\infty); x != 3 -> a union. None for anything else."""
    _, sides, ops = node
    name = variable(node)
    if name is None or any(side[0] not in SCALARS for side in sides):
        return None
    at = sides.index(name)
    if len(ops) == 1:
        op, bound = (ops[0] if at == 0 else FLIP.get(ops[0])), sides[1 - at]
        if op in ("<", "<="):
            return ("seq", "(", "]" if "=" in op else ")", [("neg", INFINITY), bound])
        if op in (">", ">="):
            return ("seq", "[" if "=" in op else "(", ")", [bound, INFINITY])
        below, above = ("seq", "(", ")", [("neg", INFINITY), bound]), ("seq", "(", ")", [bound, INFINITY])
        return ("union", [below, above]) if op == "!=" else None
    if len(ops) != 2 or at != 1:
        return None
    if ops[0] in (">", ">=") and ops[1] in (">", ">="):
        sides, ops = sides[::-1], [FLIP[ops[1]], FLIP[ops[0]]]
    if not set(ops) <= {"<", "<="}:
        return None
    return ("seq", "[" if "=" in ops[0] else "(", "]" if "=" in ops[1] else ")", [sides[0], sides[2]])


def same_percent(a, b, work: Work) -> bool:
    """50% is 50%, 0.5, 1/2 and also 50: the sign is often in the question."""
    if a[0] == b[0]:
        return same(a[1], b[1], work)
    percent, other = (a, b) if a[0] == "pct" else (b, a)
    if other[0] not in SCALARS:
        return other[0] in ("list", "set") and same_structure(percent, other, work)
    hundredth = ("prod", [(percent[1], 1), (("num", Fraction(100), None), -1)])
    return same(percent[1], other, work) or same(hundredth, other, work)


def same_base(a, b) -> bool:
    """52_8 equals itself and, the base being in the question, a bare 52."""
    if a[0] == b[0]:
        return a == b
    based, other = (a, b) if a[0] == "base" else (b, a)
    return other[0] == "num" and other[2] is None and len(based[1]) < 1_000 and other[1] == int(based[1])


def has_matrix(node) -> bool:
    if node[0] == "matrix":
        return True
    if node[0] == "neg":
        return has_matrix(node[1])
    if node[0] == "sum":
        return any(has_matrix(term) for term in node[1])
    return node[0] == "prod" and any(has_matrix(factor) for factor, _ in node[1])


def as_matrix(node, work: Work):
    """Rows of a matrix expression (sums, scalar multiples and products written out); None for a scalar."""
    work.spend(1)
    kind = node[0]
    if kind == "matrix":
        return node[1]
    if not has_matrix(node):
        return None
    if kind == "neg":
        return [[("neg", x) for x in row] for row in as_matrix(node[1], work)]
    if kind == "sum":
        terms = [as_matrix(term, work) for term in node[1]]
        if None in terms or len({(len(t), len(t[0])) for t in terms}) > 1:
            raise Refuse("shapes")
        return [[("sum", list(cells)) for cells in zip(*rows)] for rows in zip(*terms)]
    total = None
    scalars = [(factor, sign) for factor, sign in node[1] if not has_matrix(factor)]
    for factor in (as_matrix(f, work) for f, _ in node[1] if has_matrix(f)):
        if total is not None:
            if len(total[0]) != len(factor) or len(total) * len(factor) * len(factor[0]) > 500:
                raise Refuse("shapes")
            factor = [[("sum", [("prod", [(x, 1), (row[k], 1)]) for x, row in zip(left, factor)])
                       for k in range(len(factor[0]))] for left in total]
        total = factor
    return [[("prod", [(x, 1), *scalars]) for x in row] for row in total] if scalars else total


def same_structure(a, b, work: Work) -> bool:
    kinds = {a[0], b[0]}
    if has_matrix(a) or has_matrix(b):
        rows = [as_matrix(x, work) or as_rows(x) for x in (a, b)]
        if None in rows:
            return False
        if [1, 1] != [has_matrix(a), has_matrix(b)]:         # a column or row against (1, 2)
            rows = [[[x for row in r for x in row]] if 1 in (len(r), len(r[0])) else r for r in rows]
        return [len(r) for r in rows[0]] == [len(r) for r in rows[1]] and len(rows[0]) == len(rows[1]) and \
            all(same(x, y, work) for r, s in zip(*rows) for x, y in zip(r, s))
    if kinds == {"ratio"}:
        return same_items(a[1], b[1], work)
    if "ratio" in kinds:
        ratio, other = (a, b) if a[0] == "ratio" else (b, a)
        return len(ratio[1]) == 2 and other[0] == "prod" and same(("prod", list(zip(ratio[1], (1, -1)))), other, work)
    if kinds == {"seq"}:
        brackets = a[1:3] == b[1:3] or len(a[3]) > 2 and {a[1:3], b[1:3]} == {("(", ")"), ("[", "]")}
        return brackets and same_items(a[3], b[3], work)
    if kinds == {"list", "seq"}:
        listed, seq = (a, b) if a[0] == "list" else (b, a)
        if len(listed[1]) == len(seq[3]) and (seq[1:3] == ("(", ")") or len(seq[3]) > 2):   # [1, 2] is an interval
            return same_items([assigned(x, work)[1] for x in listed[1]], seq[3], work)
        return all(same(x, seq, work) for x in listed[1])
    if kinds <= {"list", "set"}:
        return same_collection(a[1], b[1], work)
    if "list" in kinds and "union" in kinds:
        listed, union = (a, b) if a[0] == "list" else (b, a)
        parts = [interval(x) if x[0] == "rel" else None for x in listed[1]]
        return None not in parts and unordered(parts, union[1], work)
    if kinds == {"union"}:
        return unordered(a[1], b[1], work)
    if kinds & {"list", "set"}:
        many, one = (a, b) if a[0] in ("list", "set") else (b, a)
        return len(many[1]) > 0 and all(same(assigned(x, work)[1], one, work) for x in many[1])
    return False


def as_rows(node):
    """[[1, 2], [3, 4]] or (1, 2) as matrix rows."""
    if node[0] not in ("seq", "list") or not node[-1]:
        return None
    if all(x[0] == "seq" for x in node[-1]) and len({len(x[-1]) for x in node[-1]}) == 1:
        return [list(x[-1]) for x in node[-1]]
    return [list(node[-1])]


def same_items(a, b, work: Work) -> bool:
    return len(a) == len(b) and all(same(x, y, work) for x, y in zip(a, b))


def same_collection(a, b, work: Work) -> bool:
    """Lists and sets. Named values (x = 1, y = 2) match by name, or in order against other names or none."""
    if len(a) * len(b) > MAX_WORK:
        return all(x[0] == "num" for x in a + b) and {x[1] for x in a} == {x[1] for x in b}
    a, b = [assigned(x, work) for x in a], [assigned(x, work) for x in b]
    labels = [[label for label, _ in items if label] for items in (a, b)]
    named = [len(names) == len(set(names)) == len(items) > 1 for names, items in zip(labels, (a, b))]
    if all(named) and set(labels[0]) == set(labels[1]):
        return all(same(value, dict(b)[label], work) for label, value in a)
    x, y = [value for _, value in a], [value for _, value in b]
    families = [{re.sub(r"_\w*", "", label) for label in names} for names in labels]
    if any(flag and len(family) > 1 for flag, family in zip(named, families)):
        return same_items(x, y, work)
    return unordered(x, y, work)


def unordered(a, b, work: Work) -> bool:
    return all(any(same(x, y, work) for y in b) for x in a) and all(any(same(x, y, work) for x in a) for y in b)


INTEGER = re.compile(r"[-+]?[0-9]+(?:,[0-9]{3})*\.?0*")
DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")
DECIMAL_POINT = re.compile(r"[-+]?[0-9]*\.[0-9]+")
GAPS = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])|[«»]|(?<=m)\.(?=»$)")


def integer_key(s: str) -> str:
    """Sign and digits of a whole number of any length, without int(): Python refuses above 4,300 digits."""
    digits = s.replace(",", "").lstrip("+-").split(".")[0].lstrip("0") or "0"
    return "-" + digits if s[0] == "-" and digits != "0" else digits


def word_key(s: str) -> str:
    """Letters of an answer in words or of a choice, "(C)" -> "c"; empty for anything else."""
    bare = re.sub(r"[«»\s(){}.'\"]|(?<=[a-z])-", "", s)
    return bare.casefold() if bare.isalpha() else ""


def is_equal(pred: str, gold: str) -> bool:
    """Is the answer `pred` the answer `gold`? Symmetric, bounded in time, never raises; False where unreadable."""
    if not isinstance(pred, str) or not isinstance(gold, str):
        return False
    if pred == gold:
        return True
    pred, gold = sorted((pred, gold))                         # one order, so that the verdict cannot depend on it
    try:
        return compare(pred, gold)
    except (Refuse, Inexact, ArithmeticError, ValueError, RecursionError):
        return False


def compare(pred: str, gold: str) -> bool:
    pred, gold = shorten(pred), shorten(gold)
    if not pred or not gold:
        return False
    if INTEGER.fullmatch(pred) and INTEGER.fullmatch(gold):
        thousands = [re.fullmatch(r"[^,]*|[-+]?[1-9][0-9]{0,2}(,[0-9]{3})+\.?0*", s) for s in (pred, gold)]
        if all(thousands):
            return integer_key(pred) == integer_key(gold)
    if max(len(pred), len(gold)) > MAX_ANSWER:
        return pred == gold
    if GAPS.sub("", pred) == GAPS.sub("", gold):
        return True
    words = word_key(pred), word_key(gold)
    if words[0] and words[0] == words[1]:
        return True
    if all(words) and min(map(len, words)) > 3:
        return False
    for comma, point in ((pred, gold), (gold, pred)):
        if DECIMAL_COMMA.fullmatch(comma) and DECIMAL_POINT.fullmatch(point):
            return not THOUSANDS.fullmatch(comma.lstrip("+-")) and Fraction(comma.replace(",", ".")) == Fraction(point)
    (pred, unit), (gold, other_unit) = split_unit(pred), split_unit(gold)
    if units_clash(unit, other_unit):
        return False
    return compare_parsed(pred, gold)


def compare_parsed(pred: str, gold: str) -> bool:
    nodes = [parse(pred), parse(gold)]
    if None in nodes:
        return False
    work = Work()
    if same(*nodes, work):
        return True
    for i, text in ((0, pred), (1, gold)):                    # "1,234" against a list or tuple is two numbers
        if THOUSANDS.search(text) and nodes[1 - i][0] in ("list", "seq", "set"):
            other = list(nodes)
            other[i] = parse(text, thousands=False)
            if other[i] is not None and same(*other, work):
                return True
    return False


def shorten(s: str) -> str:
    """clean(), with a linear way out for very long texts and very deep parentheses."""
    s = strip_pairs(s.strip())
    depth = min(len(s) - len(s.lstrip("(")), len(s) - len(s.rstrip(")")))
    if depth > 5 and not re.search(r"[()]", s[depth:-depth]):
        s = s[depth:-depth]
    return clean(s) if len(s) <= 2 * MAX_ANSWER else s


def can_read(gold: str) -> bool:
    """False for a gold that could only be matched letter by letter (data.py drops and counts those)."""
    try:
        s = shorten(gold)
        if not s or len(s) > MAX_ANSWER:
            return False
        return bool(word_key(s)) or parse(split_unit(s)[0]) is not None
    except (Refuse, ArithmeticError, ValueError, RecursionError):
        return False


# ---------------------------------------------------------------------------------------------------------------------
# 6. Scores for training

class Grade(NamedTuple):
    """Parts of one completion's reward, logged apart so that learning the format is not taken for learning maths."""
    correct: int           # 1 if the extracted answer equals the gold
    format: int            # 1 if the answer came in the form that the prompt asked for
    rule: str              # how the answer was found, see Extraction
    answer: str | None


def format_tags(text: str) -> int:
    """The paper's form: <think>...</think> <answer>...</answer>, each tag once and nothing around them."""
    text = END_OF_TURN.split(text.strip(), maxsplit=1)[0].strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags) or not text.startswith(tags[0]) or not text.endswith(tags[3]):
        return 0
    at = [text.index(tag) for tag in tags]
    return int(at == sorted(at) and not text[at[1] + len(tags[1]):at[2]].strip())


def grade(completion: str, gold: str, style: str = "boxed", last_number: bool = False) -> Grade:
    """Score one completion; always returns one Grade. `style` is what the prompt asked for: "boxed" or "tags"."""
    assert style in ("boxed", "tags"), f"{style!r} is neither 'boxed' nor 'tags'"
    answer, rule = extract(completion, last_number)
    correct = int(answer is not None and is_equal(answer, gold))
    return Grade(correct, int(rule == "box") if style == "boxed" else format_tags(completion), rule, answer)


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft ramp in tokens: 0 up to max_length - buffer, down to -1 at max_length, -1 beyond."""
    assert 0 < buffer <= max_length, f"{buffer=} must lie in 1..{max_length=}"
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))


def load_reward(spec: str) -> Callable:
    """"module:function" -> the function, from a file in the working directory or any importable module.

    It is called as function(completion, gold) and returns a number or a dict of numbers (the parts, which are summed).
    """
    module_name, colon, name = spec.partition(":")
    assert colon and module_name and name, f"--reward takes module:function, got {spec!r}"
    path = os.path.join(os.getcwd(), *module_name.split(".")) + ".py"
    try:
        if os.path.exists(path):
            module_spec = importlib.util.spec_from_file_location(module_name, path)
            module = importlib.util.module_from_spec(module_spec)
            module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--reward {spec}: cannot import {module_name!r} ({error})") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--reward {spec}: {module_name!r} has no function {name!r}")
    return function
