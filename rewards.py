r"""
Rewards from text: get the answer out of a completion, decide whether it equals the gold, score the format.

    extract_answer(r"so \boxed{\frac12}")  ->  r"\frac12"      extract(...) also says which rule fired
    is_equal(r"\frac12", "0.5")            ->  True            symmetric, never raises
    grade(completion, gold)                ->  Grade(correct=1, format=1, rule="box", answer=r"\frac12")

The reward is the objective: a wrong verdict trains the wrong thing. So numbers are compared exactly (fractions, never
floats of integers), a decimal equals a fraction only if it has six digits and rounds to it, several answers never equal
one of them, and no answer is the empty string. Expressions in variables are compared at fixed sample points.

Longer than its neighbours because an answer can be written in so many ways. Six sections, in the order a text runs
through them: 1 extraction, 2 clean-up (most spelling variants end here), 3 parser (precedence climbing), 4 values (one
evaluator: exact, then real, then complex), 5 comparison (one rule per kind of answer), 6 scores for training.

Everything runs on counters, not clocks (the limits below), and what runs into one is refused: it still equals itself.
No threads and no signals, so it is safe in any worker; no eval; the standard library only, so no computer algebra:
sums and integrals are compared as text.

Choices where graders disagree: 50% is 0.5 and also 50; lists and sets have no order, tuples do; 2/4 is 1/2; 52 stands
for 52_8; a chain of equations with two different numbers (x = 41 = 42) is wrong; "32, 349" is two numbers; degrees and
units are dropped unless both sides have one and they differ; 2:3 is 2/3; a row is no column; 10 mod 7 is 3.
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
MAX_DEPTH = 100        # nested operands; each costs up to five Python frames, and the caller's stack counts too
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
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BRACES, BARE = re.compile(r"\{+|\}+"), re.compile(r"[-\w.,/]*\w")
# What may stand between two boxes that are one answer, as in "\boxed{2} and $y=\boxed{3}$". Prose, a full stop or a
# line break make the last box the answer.
JOINER = re.compile(r"""(?:[ ,;$&] | \\q?quad | \\[,;:!\ ()\[\]] | and | or
    | \\(?:text|mbox|textrm)\s*\{[\s,]*(?:and|or)?[\s,]*\} | [A-Za-z](?:_\{?\w{1,3}\}?)?\s*=)*""", re.VERBOSE)
# No answer may hold another opening tag: 10,000 unclosed ones would each be scanned to the end.
TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# A digit at both ends (a lone comma is no number), a sign only where it is no hyphen, then perhaps /7 or %.
NUMBER = re.compile(r"""(?<![A-Za-z0-9.]) ((?:(?<![\w)])-)? (?:\\?\$)?
    (?:[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?|\.[0-9]+) (?:/[0-9]+(?![\w/]))? (?:\s?\\?%)?)""", re.VERBOSE)
MARKER = re.compile(r"answer\s*(?:(?:\*\*|__)\s*)?(?:is\s*:?|:|=)|####", re.IGNORECASE)
MATH_SPAN = re.compile(r"""\$\$([^$]{1,2000})\$\$ | (?<!\\)\$((?:\\.|[^$\\\n]){1,2000})\$
    | \\\(((?:(?!\\[()]).){1,2000})\\\) | \\\[((?:(?!\\[\[\]]).){1,2000})\\\]""", re.DOTALL | re.VERBOSE)
LATEX = re.compile(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
WORD = re.compile(r"(?<![\\A-Za-z])(?:(?!(?:and|sqrt|sin|cos|tan|log|exp|inf)\b)[A-Za-z]{3,}|(?:so|is|it|we|to|of)\b)"
                  r"|[^\W\d_A-Za-zª-ϿⅠ-ↈ𝐀-𝟿]{2}")     # two letters of another script; Greek and 𝑥 may be mathematics
CHOICE = re.compile(r"\(([A-Z])\)|([A-Z])(?=[.:,;)]|\s*$)|([B-H])(?=\s+[a-z]{2})")


def extract_answer(text: str, last_number: bool = True) -> str | None:
    """The answer of a completion, or None. Turn `last_number` off where a box or tag was asked for (MATH): with it on
    a model may learn to leave them out."""
    return extract(text, last_number).answer


def extract(text: str, last_number: bool = True) -> Extraction:
    """Box, tag, marker, then the last formula or number; only text after the last </think> and in the first turn."""
    if not isinstance(text, str):
        return Extraction(None, "none")
    text = next(filter(str.strip, END_OF_TURN.split(text)), "").rpartition("</think>")[2]
    if "<think>" in text:
        return Extraction(None, "truncated")
    if boxed := last_box(text):
        return Extraction(boxed, "box")
    tail = text[-MAX_TAIL:]
    if tagged := next(filter(None, map(str.strip, reversed(TAG.findall(tail)))), None):
        return Extraction(tagged, "tag")
    if marked := last_marker(tail):
        return Extraction(marked, "marker")
    # A box that is empty or never closes is a failed answer, often the copied prompt: no number may replace it.
    if last_number and not BOX.search(text) and "<answer>" not in tail and (answer := value_in(tail.strip())):
        return Extraction(answer, "last_number")
    return Extraction(None, "none")


def last_box(text: str) -> str | None:
    """Content of the last complete, non-empty box; neighbouring boxes become one comma-separated list.

    Linear: a box that never closes also keeps every box around it open, so earlier scans stop where it begins.
    """
    masked = text.replace("\\\\", "  ").replace("\\{", "  ").replace("\\}", "  ")
    limit, found, begin = len(text), [], None
    for box in reversed(list(BOX.finditer(text))):
        at, close = box.end(), -1
        if text[at:at + 1] == "{":
            at, close = at + 1, closing_brace(masked, at, limit)
            end = close + 1
        elif text[at - 1].isspace() and (word := BARE.match(text, at, limit)):             # "\boxed 5"
            close = end = word.end()
        if close < 0:
            limit = box.start()
            continue
        if begin is not None:
            between = text[end:begin]
            if end > begin or len(between) > 80 or not JOINER.fullmatch(between):
                break
            found.append(" or " if re.search(r"(?<![a-z])or(?![a-z])", between) else " , ")
        elif not text[at:close].strip():
            continue
        found.append(text[at:close])
        begin = box.start()
        if len(found) > 100:
            break
    return found[0].strip() if len(set(found[::2])) == 1 else "".join(reversed(found)).strip()


def closing_brace(masked: str, at: int, limit: int) -> int:
    """Where the group that opens at `at` closes, -1 if it does not before `limit`; escaped braces are masked out."""
    if masked.find("}", at, limit) < 0:
        return -1
    depth = 0
    for run in BRACES.finditer(masked, at, limit):            # runs, since 100,000 nested braces are a known attack
        size = run.end() - run.start()
        if masked[run.start()] == "{":
            depth += size
        elif size >= depth:
            return run.start() + depth - 1
        else:
            depth -= size
    return -1


def last_marker(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####", to the end of its sentence or line."""
    for marker in reversed(list(MARKER.finditer(text))):
        rest = text[marker.end():].lstrip(" \t*_:\n")
        if rest.startswith(("$$", "\\[")) and (display := MATH_SPAN.match(rest)):
            return inside(display)
        line = re.split(r"\n|(?<=[^\s.])\.(?:\s|$)|I hope it is", rest, maxsplit=1)[0].strip(" *_`")
        if line:
            return value_in(line, marked=True)
    return None


def has_prose(text: str) -> bool:
    return WORD.search(LATEX.sub("", text)) is not None


def inside(match: re.Match) -> str:
    """The group that took part in the match."""
    return next(filter(None, match.groups())).strip()


def value_in(text: str, marked: bool = False) -> str | None:
    """The value in a text: all of it if it is no prose, else its last formula or number.

    A `marked` text is the line after "answer is": a leading number or choice letter counts, and what cannot be taken
    apart is the answer as a whole. Elsewhere alternatives ("5 or 6") are no answer.
    """
    if whole := MATH_SPAN.fullmatch(text):
        return inside(whole)
    if len(text) < 400 and re.search(r"\w", text) and not has_prose(text):
        return text
    if marked and (choice := CHOICE.match(text)):
        return inside(choice)
    spans = [m for m in MATH_SPAN.finditer(text) if not has_prose(m.group())]   # in "$5 and $10" the dollars are money
    numbers = list(NUMBER.finditer(text, spans[-1].end() if spans else 0))
    found = numbers[-1] if numbers else spans[-1] if spans else None
    if marked and spans and not re.fullmatch(r"\\?[A-Za-z]+(_\w+|\([a-z]\))?", inside(spans[-1])):
        found = spans[-1]                                     # but "the largest $n$ is 34" goes on to the number
    elif marked and numbers and numbers[0].start() == 0:
        found = numbers[0]                                    # "18 eggs because 16 + 2 = 18"
    unclear = found is None or re.search(r"[0-9$]\s+or\s+$", text[:found.start()][-40:])
    if unclear or marked and not spans and "\\" in text:      # "\frac{1}{2} dollars"
        return text if marked else None
    return inside(found)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Clean-up: answer text -> plain text the tokenizer reads

def _pairs(text: str) -> dict:
    r"""'≤ \le  ≥ \ge' -> {'≤': '\le ', '≥': '\ge '}: two spaces or a line break apart, and commands end in a space."""
    return {a: b + " " * b[-1].isalpha() for a, b in (pair.split() for pair in re.split("  |\n", text))}


RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"
SCRIPTS = re.compile(f"([{RAISED}]+)|[{LOWERED}]+")
TO_ASCII = str.maketrans(RAISED + LOWERED, "0123456789+-n0123456789")
# One table, not NFKC: that would read 4² as 42. Digits of other scripts are left alone, so they never equal 0-9.
UNICODE = str.maketrans({
    **_pairs(r"""÷ /  √ \sqrt  ∛ \sqrt[3]  π \pi  ∞ \infty  º °  ≤ \le  ≥ \ge  ⩽ \le  ⩾ \ge  ≠ \ne  ≈ \approx  ∪ \cup
∈ \in  ± \pm  ∓ \mp  ∅ \emptyset  θ \theta  α \alpha  β \beta  λ \lambda  ⟨ \langle  ⟩ \rangle  ⌊ \lfloor  ⌋ \rfloor
⌈ \lceil  ⌉ \rceil  ½ \frac{1}{2}  ⅓ \frac{1}{3}  ⅔ \frac{2}{3}  ¼ \frac{1}{4}  ¾ \frac{3}{4}  ％ %  ＝ =  （ (  ） )
， ,  、 ,  ； ;  ： :  ． .  ＋ +"""),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00b7\u00d7\u2217\u2219\u22c5", "*"),
    **dict.fromkeys("\u2044\u2215\uff0f", "/"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\u2061\u2062\ufeff€£¥₹", ""),
    **{0xFF10 + d: str(d) for d in range(10)}, **{0x1D7CE + d: str(d % 10) for d in range(50)},
})
RENAME = _pairs(r"""dfrac \frac  tfrac \frac  cfrac \frac  dbinom \binom  tbinom \binom  leq \le  leqslant \le  geq \ge
geqslant \ge  neq \ne  lt <  gt >  cdot *  times *  ast *  div /  lvert |  rvert |  vert |  mid |  lbrace \{  rbrace \}
lbrack [  rbrack ]  lparen (  rparen )  colon :  varnothing \emptyset  implies \Rightarrow  sim \approx  simeq \approx
ldots ...  dots ...  cdots ...  degree °  bmod \mod  pmod \mod  varphi \phi  vartheta \theta  varepsilon \epsilon""")


def _text(match: re.Match) -> str:
    r"""\text{ and } becomes a comma, one letter or a function name is mathematics, other words become «words»."""
    word = match[1].strip(" .")
    if word.strip(" ,;").lower() in ("and", "or", ""):
        return " , " if word else " "
    if INVERSE.get(word, word) in (*FUNCTIONS, "mod") and word != "min":                 # 40 \text{ min} are minutes
        return f"\\{word} "
    plain = len(word) == 1 or "\\" in word or word[0].isdigit() or not re.search("[A-Za-z]", word)
    return f" {word} " if plain else f" «{word}» "


def _repeating(match: re.Match) -> str:
    r"""0.1\overline{6} = (16 - 1) / 90."""
    whole, fixed, cycle = match.groups()
    top = int(whole + fixed + cycle) - int((whole + fixed) or "0")
    return f"\\frac{{{top}}}{{{(10 ** len(cycle) - 1) * 10 ** len(fixed)}}} "


TEXT = (re.compile(r"\\(?:text(?:bf|rm|it|tt|normal)?|math(?:rm|bf|it|sf|cal)|[mh]box|emph|operatorname|bm)\*?"
                   r"\s*\{([^{}]*)\}"), _text)
LATEX_REWRITES = [(re.compile(pattern), to) for pattern, to in (          # in this order
    (r"(?<!\\)\\\\(?=[A-Za-z]{2})(?!.*\\end\b)", r"\\"),                    # "\\frac" of a doubly escaped answer
    (r"\\[()$]|(?<!\\)\\[\[\]]|\\m?(?:left|right)(?![A-Za-z])\.?|\\(?:[bB]igg?[lrm]?|(?:display|text)style|boxed|fbox"
     r"|(?:no)?limits|bf|rm|it|boldsymbol|(?:measured)?angle)(?![A-Za-z])", ""),
    (r"\\%", "%"),
    (r",\s*\\!\s*(?=[0-9]{3})", ","),
    (r"\{([^{}\\]{1,40})\\choose(?![A-Za-z])([^{}\\]{1,40})\}", r"\\binom{\1}{\2}"),
    (r"(?<!\\)\\[,!]", ""),
    (r"(?<!\\)\\[;: ]|\\q?quad|\\(?:thin|med|en)space(?![A-Za-z])|\\(?:hspace|phantom)\{[^{}]*\}", " "),
    (r"\\([A-Za-z]+)", lambda m: RENAME.get(m[1]) or m[0]),
    (r"\\mathbb\s*\{?\s*R\b\s*\}?", r"(-\\infty,\\infty)"),
    TEXT, TEXT,                                                           # \text{\textbf{...}} nests, rarely deeper
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\circ(?![A-Za-z])", "°"),
    (r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s*\{([0-9]{1,20})\}", _repeating))]
REWRITES = [(re.compile(pattern, re.IGNORECASE), to) for pattern, to in (
    (r"[$~]", ""), (r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=[0-9]{3})|\{,\}", ","),
    (r"^\s*\\\{\s*([a-z])\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?[|:](.*)\\\}[\s.]*$", r"\2"),              # {x | x > 3}
    (r"\(\s*\\?mod(?![A-Za-z])\s*([^()]{1,20})\)", r"\\mod{\1}"),                                         # (mod 7)
    (r"(\^(?:\{[^{}]{1,20}\}|[0-9a-z]))(_(?:\{[^{}]{1,20}\}|[0-9a-z]))", r"\2\1"),                        # x^2_1
    (r"(?<=[0-9])\s*\^\s*\{?\s*«(?:st|nd|rd|th)»\s*\}?|(?<=1)st$|(?<=2)nd$|(?<=3)rd$|(?<=[0-9])th$", ""),
    (r"^\s*«?(?:option|choice|answer)[\s:»]*(?=[«(]*[a-z][)»]*\s*$)", ""),
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup "), (r"(?<![a-z])([ap])\.\s?m\.?(?![a-z])", r"\1m"),
    (r"(?<![0-9.,/^_}])(?<![/^] )([0-9]{1,9})\s+([0-9]{1,9})\s*/\s*([0-9]{1,9})(?![0-9.])", r"(\1+\2/\3)"),   # 1 1/2
    (r"^\s*(?:(?:USD|US|EUR|GBP|INR|CNY|Rs)\.?|«(?:the |final |answer |is |are |about |:)*(?:is|are|about|:)»)"
     r"\s*(?=[-+0-9.\\(])", ""),
    (r"(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9]|/)", lambda m: m[0].replace(" ", "")),   # 1 000
    (r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", " , "))]


def clean(s: str) -> str:
    """Spelling variants out, meaning kept: unicode, styling, spacing, doubled backslashes, text wrappers, "and"."""
    s = strip_pairs(s.replace("\f", "\\f").replace("\b", "\\b").strip())       # "\frac" that was unescaped once
    if len(s) > 2 * MAX_ANSWER:
        return s
    s = END_OF_TURN.sub("", s).strip()
    if not s.isascii():
        s = SCRIPTS.sub(lambda m: ("^{" if m[1] else "_{") + m[0].translate(TO_ASCII) + "}", s).translate(UNICODE)
    if len(s) > 2 and s[0] in "*`_" and s[-1] in "*`_":
        s = s.strip("*`_")
    for pattern, to in LATEX_REWRITES if "\\" in s else ():
        s = pattern.sub(to, s)
    for pattern, to in REWRITES:
        s = pattern.sub(to, s)
    s = s.strip(" \t\r\n,;")
    s = s if s.endswith("..") else s.rstrip(".:\\ \n").strip()
    return SPELLED.get(s.strip("« »").lower(), s)


def strip_pairs(s: str) -> str:
    """Drop a deep run of braces or parentheses around one value: a known attack on recursive parsers."""
    n = len(s) - len(s.lstrip(s[:1]))
    if n > 5 and s[0] in "{(" and s.endswith(("}" if s[0] == "{" else ")") * n) and not re.search(r"[{}()]", s[n:-n]):
        return s[n:-n].strip()
    return s


# Synonyms are joined by "=". Two different units of one family, the last one apart, make two different answers.
FAMILIES = (
    "mm=millimeter cm=centimeter=centimetre dm m=meter=metre km=kilometer=kilometre inch=in=inches foot=feet=ft "
    "yard=yd mile=mi",
    "second=sec=s minute=min hour=hr=h day week month year",
    "dollar=usd cent euro pound rupee yuan yen",
    "am pm",
    "degree deg radian rad unit mph kmh m/s kg g mg gram kilogram lb ounce oz ton liter litre ml gallon quart square "
    "cubic sq cu per people student way point time")
UNIT = {word: (family, synonyms.split("=")[0]) for family, units in enumerate(FAMILIES)
        for synonyms in units.split() for word in synonyms.split("=")}
NOT_UNITS = frozenset("and or is not but if no to than more less none either neither nor where for with mod thousand "
                      "million hundred billion dozen half squared cubed over pi sqrt sin cos tan log ln exp most least "
                      "plus minus negative factorial".split())
SPELLED = {"all real numbers": r"(-\infty,\infty)", "no solution": r"\emptyset", "no solutions": r"\emptyset",
           **{word: str(n) for n, word in enumerate("zero one two three four five six seven eight nine ten eleven "
                                                    "twelve".split())}}
MULTIPLIER = {"thousand": "*10^3", "million": "*10^6", "billion": "*10^9", "trillion": "*10^12",
              "percent": "%", "pct": "%", "percentage": "%"}
WORDS = r"(?:[A-Za-z]{2,}\.?(?:/[A-Za-z]+)?\s+){0,3}(?:[A-Za-z]{2,}(?:/[A-Za-z]+)?\.?|m/s)"
UNIT_END = re.compile(rf"(?:«([^«»]*)»|(?:(?<=[0-9)}}%])\s*|\s)({WORDS}))(?:\s*\^\s*\{{?\s*([23])\s*\}}?)?\s*\.?$")
BARE_NUMBER = re.compile(r"[-+]?[0-9.,/\s]*(\\frac\s*\{[0-9]+\}\s*\{[0-9]+\})?[%°]?")


def unit_of(word: str) -> tuple[int, str] | None:
    """(family, name) of a unit in singular or plural."""
    return UNIT.get(word) or (UNIT.get(word[:-1]) if len(word) > 2 and word[-1] == "s" else None)


def split_unit(s: str) -> tuple[str, str]:
    """"12 cm^2" -> ("12", "cm 2"): trailing «text», a known unit, or any few words after a number ("12 red balls").

    Words that change the value stay ("not", "half") or are applied: "5 million" -> 5*10^6, "5 percent" -> 5%.
    """
    end = UNIT_END.search(s) if s[-1:].isalpha() or s[-1:] in ("2", "3", "}", ".", "»") else None
    if end is None:
        return s, ""
    value, words = s[:end.start()].strip(), (end[1] or end[2] or "").lower().strip(" .").split()
    if end[2] and (s[end.start(2) - 1] == "\\" or not all(map(unit_of, words))):
        shortest = 3 if s[end.start(2) - 1].isspace() else 4                  # 6xy and 4ac are products, 5 men are men
        if not BARE_NUMBER.fullmatch(value) or max(map(len, words)) < shortest:
            return s, ""
    if words and words[0] in MULTIPLIER:
        value, words = value + MULTIPLIER[words[0]], words[1:]
    if NOT_UNITS.intersection(words) or not re.search(r"[0-9A-Za-z})°%]$", value):
        return s, ""
    return value, " ".join(words + [end[3]] * bool(end[3]))


def units_clash(a: str, b: str) -> bool:
    """Two units of one family (both lengths, both times, both money) that differ: 5 cm is not 5 m."""
    (family, name), (other_family, other) = unit_of(a) or (-1, a), unit_of(b) or (-2, b)
    return family == other_family < len(FAMILIES) - 1 and name != other


# ---------------------------------------------------------------------------------------------------------------------
# 3. Parser: plain text -> nodes
#
#    values      ("num", number, decimals or None)  ("name", text)  and, with nodes as the rest: ("+", ...)  ("*", ...)
#                ("-", x)  ("inv", x) = 1/x  ("^", x, n)  ("%", x)  ("mod", x, n)  (a name of FUNCTIONS, ...)
#    structures  (kind, [node]) with kind in list, set, union, () [] (] [); ("rel", [side], [operator]); a matrix is
#                a tuple of its rows, a column the tuple of its cells

TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?|\.[0-9]+|\\[A-Za-z]+|\\\\|\\[{}|]"
                   r"|<=|>=|!=|\*\*|[A-Za-z]+|«[^«»]*»|\S)")
RELATIONS = {"=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", r"\le": "<=", r"\ge": ">=", r"\ne": "!=",
             r"\in": "in", r"\approx": "~", r"\equiv": "="}
FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
RELATION, RATIO, UNION, MOD, SUM, PRODUCT, MIXED, POWER, POSTFIX = range(1, 10)
BINDING = {**dict.fromkeys(RELATIONS, RELATION), ":": RATIO, r"\cup": UNION, r"\mod": MOD, "+": SUM, "-": SUM,
           "*": PRODUCT, "/": PRODUCT, "%": PRODUCT, "beside": PRODUCT, "mixed": MIXED, "^": POWER, "**": POWER,
           "!": POSTFIX, "°": POSTFIX}
MATRICES = frozenset("pmatrix bmatrix matrix array Bmatrix smallmatrix cases".split())
CLOSERS = {"(": (")", "]"), "[": (")", "]"), "{": ("}",), r"\{": (r"\}",), r"\langle": (r"\rangle",)}
ENCLOSING = {"|": ("abs", "|"), r"\|": ("abs", r"\|"),
             r"\lfloor": ("floor", r"\rfloor"), r"\lceil": ("ceil", r"\rceil")}
BRACKETS = ("()", "[]", "(]", "[)")
STRUCTURES = frozenset((*BRACKETS, "list", "set", "rel", "union", "eq"))
TRIG = frozenset("sin cos tan cot sec csc".split())
FUNCTIONS = TRIG | frozenset("arcsin arccos arctan arccot sinh cosh tanh arcsinh arccosh arctanh ln log lg exp sqrt "
                             "max min gcd lcm floor ceil abs".split())
INVERSE = {prefix + name: "arc" + name for name in "sin cos tan sinh cosh tanh".split() for prefix in ("a", "ar")}
FRAMES = frozenset("overline overrightarrow vec hat bar widehat tilde underline mathbb mathcal mathfrak".split())
NAMES = FRAMES | frozenset("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi "
                           "chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar pi infty".split())
STARTS = frozenset((*CLOSERS, *ENCLOSING, *r"\frac \binom \begin \emptyset".split(),
                    *("\\" + name for name in FUNCTIONS | NAMES))) - {r"\|"}
INFINITY, MINUS_ONE = ("name", "infty"), ("-", ("num", 1, None))
HALF_TURN = ("*", ("name", "pi"), ("inv", ("num", 180, None)))


def tokenize(s: str) -> list[str]:
    """Numbers, operators, commands, «words» and letters. In plain letters pi, inf, sinx and pix are read as in LaTeX,
    other words of up to three letters are a product, longer ones a name."""
    tokens = []
    for token in TOKEN.findall(s):
        token = r"\mod" if token == "mod" else INVERSE.get(token.lstrip("\\"), token)
        head = next((t for t in (token, token[:-1]) if t in FUNCTIONS or t == "pi"), "")
        if head or token in ("inf", "oo", "infinity", "Infinity"):
            tokens += ["\\" + head, *token[len(head):]] if head else [r"\infty"]
        else:
            tokens += token if token.isalpha() and len(token) <= 3 else [token]
    if len(tokens) > MAX_TOKENS:
        raise Refuse("too many tokens")
    return tokens


def is_number(token: str) -> bool:
    return token[:1] in tuple("0123456789.")


class Parser:
    """Precedence climbing over the tokens of one answer. `parse(text)` is the entrance."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.at = [*tokens, ""], 0               # "" marks the end
        self.depth = self.trig = 0
        self.bars = self.bare = False                         # inside |...|; in an argument without parentheses

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self, *allowed) -> str:
        token = self.tokens[self.at]
        if token == "" or allowed and token not in allowed:
            raise Refuse(f"unexpected {token}")
        self.at += 1
        return token

    def accept(self, *texts) -> str:
        return self.take() if self.tokens[self.at] in texts else ""

    def scoped(self, read, *arguments, bars=False, bare=False):
        outer, self.bars, self.bare = (self.bars, self.bare), bars, bare
        result = read(*arguments)
        self.bars, self.bare = outer
        return result

    def listing(self, *closers) -> list:
        """Items up to a closer, separated by commas; semicolons separate lists of them: "a,b;c,d"."""
        groups, separator = [[]], ","
        while separator:
            self.accept("=", r"\approx")                      # "= 5" is 5
            groups[-1].append(self.scoped(self.expression))
            separator = self.accept(",", ";")
            while self.accept(",", ";"):                      # "(1,2), and (3,4)" has two commas after clean-up
                pass
            if self.peek() in ("", *closers):
                break
            groups += [[]] * (separator == ";")
        if max(map(len, groups)) > 1 < len(groups):
            return [g[0] if len(g) == 1 else ("list", g) for g in groups]
        return [node for g in groups for node in g]

    def expression(self, floor: int = 0):
        """One operand and every operator after it that binds tighter than `floor`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refuse("too deep")
        minus = signs = 0
        while sign := self.accept("+", "-"):
            minus, signs = minus + (sign == "-"), signs + 1
        node = self.expression(max(floor, SUM)) if signs else self.primary()
        node = negative(node) if minus % 2 else node
        while (op := self.operator()) and BINDING[op] > floor:
            node = self.infix(node, op)
        self.depth -= 1
        return node

    def operator(self) -> str:
        r"""The operator at hand, "" for none; "beside" and "mixed" are the invisible ones of 2x and of 1\frac12."""
        token, before = self.peek(), self.tokens[self.at - 1]
        if token in BINDING:
            return "" if self.bare and token in ("*", "/") else token
        if token == "|" and self.bars or self.bare and (token == "(" or token[1:] in FUNCTIONS):
            return ""
        if token == r"\frac" and is_number(before):
            return "mixed"
        if is_number(token):
            return "" if is_number(before) or before.isalpha() else "beside"          # neither "5 6" nor "x2"
        return "beside" if token in STARTS or token[:1].isalpha() or token[:1] == "«" else ""

    def infix(self, node, op: str):
        if op in ("beside", "mixed"):
            right = self.expression(BINDING[op])
            if op == "mixed" and is_mixed(node, right):
                return ("+", node, right)
            return combine("*", node, right)
        if op in RELATIONS or op in (":", r"\cup"):
            sides, ops = [node], []
            while self.peek() in (RELATIONS if op in RELATIONS else (op,)):
                ops.append(RELATIONS.get(self.take()))
                sides.append(self.expression(BINDING[op]))
            if op == ":":
                return ("*", node, ("inv", sides[1])) if len(sides) == 2 else ("()", sides)
            if op == r"\cup":
                return ("union", [part for side in sides for part in (side[1] if side[0] == "union" else [side])])
            if ">" in ops[0]:                                 # chains of inequalities start with < or <=
                sides, ops = sides[::-1], [FLIP.get(op, op) for op in ops[::-1]]
            return ("rel", sides, ops)
        self.take()
        if op in ("^", "**"):
            return ("^", node, self.primary() if self.peek() == "{" else self.expression(POWER - 1))
        if op == "!":
            if self.peek() == "!":
                raise Refuse("!!")
            return ("factorial", node)
        if op == "%":                                         # of all so far: 3\frac14%
            return ("%", node)
        if op == "°":
            self.accept("C", "F")
            return ("*", node, HALF_TURN) if self.trig else node
        right = self.expression(BINDING[op])
        if op == r"\mod":
            return ("mod", node, right)
        right = negative(right) if op == "-" else ("inv", right) if op == "/" else right
        return combine("*" if op in "*/" else "+", node, right)

    def primary(self):
        token = self.take()
        if is_number(token):
            return self.number(token)
        if token[0].isalpha() or token[0] == "«" or token[1:] in NAMES:
            return self.name(token.strip("\\«»"))
        if token in CLOSERS:
            items = [] if token == r"\{" and self.peek() == r"\}" else self.listing(*CLOSERS[token])
            kind = {"{": "list", r"\{": "set", r"\langle": "()"}.get(token, token + self.peek())
            self.take(*CLOSERS[token])
            if kind == "[]" and all(item[0] == "[]" for item in items):                     # [[1, 2], [3, 4]]
                kind, items = "()", [("()", row) for _, row in items]
            return items[0] if len(items) == 1 and kind in ("()", "[]", "list") else (kind, items)
        if token in ENCLOSING:
            function, closer = ENCLOSING[token]
            node = self.scoped(self.expression, SUM - 1, bars=closer == "|")
            self.take(closer)
            return (function, node)
        if token in (r"\frac", r"\binom"):
            top, bottom = self.argument(), self.argument()
            return ("*", top, ("inv", bottom)) if token == r"\frac" else ("binom", top, bottom)
        if token == r"\begin":
            return self.matrix()
        if token == r"\emptyset":
            return ("set", [])
        if token[1:] in FUNCTIONS:
            return self.function(token[1:])
        raise Refuse(f"unexpected {token}")

    def number(self, text: str):
        if self.peek() == "_":                                # 52_8
            return self.name(text)
        if len(text) > 1_000:
            raise Refuse("too many digits")
        if text.isdigit():
            return ("num", int(text), None)
        return ("num", Fraction(text), len(text.split(".")[1]) if "." in text and "e" not in text.lower() else None)

    def name(self, text: str):
        if text in FRAMES:                                    # \overline{AB} is one name
            text += " " + self.raw_group()
        if self.accept("_"):
            text += "_" + self.raw_group()
        while self.accept("'"):
            text += "'"
        if text.rstrip("'") in ("f", "g", "h", "F", "G") and self.peek() == "(":   # f(x) is a call, not f times x
            text += f"({self.raw_group()})"
        return ("name", text)

    def raw_group(self) -> str:
        """The text of the next token or bracketed group, as part of a name: x_{10}, f(2)."""
        closer = {"{": "}", "(": ")"}.get(self.peek())
        opener, depth, parts = self.take(), 1, []
        while closer and depth:
            parts.append(self.take())
            depth += (parts[-1] == opener) - (parts[-1] == closer)
        return "".join(parts[:-1]) if closer else opener

    def argument(self):
        r"""A LaTeX argument: a group, or one digit or token (\frac12, \frac1{72})."""
        token = self.peek()
        if len(token) > 1 and token.isdigit():
            self.tokens[self.at] = token[1:]
            return ("num", int(token[0]), None)
        return self.expression(POSTFIX)                       # nothing binds tighter: one primary

    def function(self, name: str):
        if name == "sqrt":
            index = ("num", 2, None)
            if self.accept("["):
                index = self.expression()
                self.take("]")
            return ("^", self.expression(POSTFIX), ("inv", index))
        base, power = [], None
        while mark := self.accept("_", "^"):
            if mark == "_":
                base = [self.argument()]
            else:
                power = self.argument() if self.peek() != "-" else self.expression(POWER)
        if power == MINUS_ONE and name in TRIG:
            name, power = "arc" + name, None
        self.trig += name in TRIG
        if opener := self.accept("(", "{"):
            arguments = self.listing(*CLOSERS[opener])
            self.take(*CLOSERS[opener])
        else:                                                 # up to a sign or another function: \sin 2x \cos y
            arguments = [self.scoped(self.expression, SUM, bars=self.bars, bare=True)]
        self.trig -= name in TRIG
        node = (name, *arguments, *base)
        return node if power is None else ("^", node, power)

    def matrix(self):
        if (name := self.raw_group()) not in MATRICES:
            raise Refuse(name)
        if name == "array":
            self.raw_group()                                  # {cc}
        rows = [[]]
        while not self.accept(r"\end"):
            if self.accept(r"\\"):
                rows.append([])
            elif not self.accept("&"):
                rows[-1].append(self.scoped(self.expression))
        self.raw_group()
        rows = [row for row in rows if row]
        if len({len(row) for row in rows}) != 1:
            raise Refuse("ragged matrix")
        if name == "cases":                                   # a system of equations, or values with their conditions
            return ("list", [row[0] if len(row) == 1 else ("list", row) for row in rows])
        return ("()", [row[0] if len(row) == 1 < len(rows) else ("()", row) for row in rows])


def combine(op: str, a, b):
    """a + b or a * b as one flat node (long sums would nest too deep). Vectors: number * tuple and tuple + tuple."""
    if a[0] == b[0] == "()" and op == "+" and len(a[1]) == len(b[1]):
        return ("()", [combine(op, x, y) for x, y in zip(a[1], b[1])])
    for x, y in ((a, b), (b, a)):
        if x[0] == "()" and op == "*" and is_scalar(y):       # else (1,2)(3,4)(5,6)... doubles with every other factor
            return ("()", [combine(op, y, cell) for cell in x[1]])
    return (*a, b) if a[0] == op else (op, a, b)


def is_scalar(node) -> bool:
    return node[0] in ("num", "name") or node[0] not in STRUCTURES and all(map(is_scalar, node[1:]))


def negative(node):
    return combine("*", MINUS_ONE, node) if node[0] == "()" else ("-", node)


def is_mixed(whole, fraction) -> bool:
    r"""1\frac{1}{2}: plain integers and a fraction below 1."""
    if fraction[0] != "*" or fraction[2][0] != "inv":
        return False
    numbers = (whole, fraction[1], fraction[2][1])
    return all(x[0] == "num" and x[2] is None for x in numbers) and 0 < numbers[1][1] < numbers[2][1]


THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
PLUS_MINUS = re.compile(r"\\([pm])[pm](?![A-Za-z])")


def parse(s: str, thousands: bool = True):
    """One answer -> node, or None where it is not an expression. `thousands`: read 1,234 as one number, not two."""
    if thousands:
        s = THOUSANDS.sub(lambda m: m[0].replace(",", ""), s)
    if PLUS_MINUS.search(s):                                  # the upper signs, then the lower ones: a list
        both = [parse(PLUS_MINUS.sub(lambda m: "+" if m[1] == upper else "-", s), False) for upper in "pm"]
        if None in both:
            return None
        kind = "set" if both[0][0] == both[1][0] == "set" else "list"
        return (kind, [item for node in both for item in (node[1] if node[0] == kind else [node])])
    try:
        parser = Parser(tokenize(s))
        items = parser.listing()
    except Refuse:
        return None
    return None if parser.peek() else items[0] if len(items) == 1 else ("list", items)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Values: exact (int, Fraction) as long as possible, then real (Decimal, 90 digits), then complex floats

DIGITS = Context(prec=90)
CONSTANTS = {"pi": Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899863"),
             "e": DIGITS.exp(Decimal(1)), "i": 1j}
TURN = DIGITS.multiply(CONSTANTS["pi"], 2)
TOLERANCE = {Decimal: (Decimal("1e-75"), Decimal("1e-80")), complex: (1e-9, 1e-13)}   # of the value, the largest term


def is_rational(x) -> bool:
    return isinstance(x, (int, Fraction))


def floor(x) -> int:
    """Refuse where 90 digits do not reach the units; that integer could be e^(10^6), of 434,295 digits."""
    if isinstance(x, Decimal) and x.adjusted() > 80:
        raise Refuse("floor")
    return math.floor(x)


def taylor(x, n):
    """sin x for n = 1, cos x for n = 0, |x| < 2 pi."""
    term = total = x if n else Decimal(1)
    while abs(term) > NOTHING:
        n += 2
        term *= -x * x / (n * (n - 1))
        total += term
    return total


def arctan(x):
    for _ in range(4):                                        # half the angle, to a tangent below 0.1
        x = x / (1 + (1 + x * x).sqrt())
    power, total, n = x, x, 1
    while abs(power) > NOTHING:
        power, n = -power * x * x, n + 2
        total += power / n
    return 16 * total


def inverse(x):
    if abs(x) < Decimal("1e-75"):
        raise Refuse("pole")
    return 1 / x


NOTHING = Decimal("1e-95")
SIN, COS = lambda x: taylor(x % TURN, 1), lambda x: taylor(x % TURN, 0)
REAL = {  # functions of Decimals; an ArithmeticError leaves the reals
    "sin": SIN, "cos": COS, "tan": lambda x: SIN(x) * inverse(COS(x)), "cot": lambda x: COS(x) * inverse(SIN(x)),
    "sec": lambda x: inverse(COS(x)), "csc": lambda x: inverse(SIN(x)),
    "arcsin": lambda x: x * TURN / 4 if abs(x) == 1 else arctan(x / (1 - x * x).sqrt()),
    "arccos": lambda x: TURN / 4 - REAL["arcsin"](x), "arctan": arctan, "arccot": lambda x: TURN / 4 - arctan(x),
    "exp": Decimal.exp, "ln": Decimal.ln, "lg": Decimal.log10, "log": lambda x, b=CONSTANTS["e"]: x.ln() / b.ln(),
    "sinh": lambda x: (x.exp() - (-x).exp()) / 2, "cosh": lambda x: (x.exp() + (-x).exp()) / 2,
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1), "arcsinh": lambda x: (x + (x * x + 1).sqrt()).ln(),
    "arccosh": lambda x: (x + (x * x - 1).sqrt()).ln(), "arctanh": lambda x: ((1 + x) / (1 - x)).ln() / 2}
ANY = {  # functions of complex numbers, the last resort
    **{name: getattr(cmath, name) for name in "sin cos tan sinh cosh tanh exp".split()},
    **{"arc" + name: getattr(cmath, "a" + name) for name in "sin cos tan sinh cosh tanh".split()},
    "sec": lambda z: 1 / cmath.cos(z), "csc": lambda z: 1 / cmath.sin(z), "cot": lambda z: 1 / cmath.tan(z),
    "arccot": lambda z: cmath.pi / 2 - cmath.atan(z), "ln": cmath.log, "lg": cmath.log10,
    "log": lambda z, base=cmath.e: cmath.log(z) / cmath.log(base), "abs": lambda z: complex(abs(z)),
    "factorial": lambda z: complex(math.gamma(z.real + 1)),           # at sample points, as in n!/(n-1)! = n
    "binom": lambda n, k: math.gamma(n.real + 1) / math.gamma(k.real + 1) / complex(math.gamma((n - k).real + 1))}
ORDERED = {"abs": abs, "floor": floor, "ceil": lambda x: -floor(-x),
           "max": lambda *x: max(x), "min": lambda *x: min(x),
           "mod": lambda x, n: x % n if is_rational(x) else x - n * floor(x / n)}
WHOLE = {"factorial": math.factorial, "binom": math.comb, "gcd": math.gcd, "lcm": math.lcm}


def bits(x) -> int:
    return x.numerator.bit_length() + x.denominator.bit_length()


class Evaluator:
    """Values of nodes under one budget of work; a comparison that uses it up is refused.

    `env` maps variables to numbers. `scale` is the largest term that met its opposite in each kind of inexact number:
    what such terms leave behind is rounding error of that size.
    """

    def __init__(self):
        self.left, self.env, self.scale = MAX_WORK, {}, {Decimal: Decimal(0), complex: 0.0}

    def spend(self, amount: int):
        self.left -= amount
        if self.left < 0:
            raise Refuse("work")

    def inexact(self, x, kind=Decimal):
        """As a Decimal, or as a complex number at sample points, where 90 digits are too slow."""
        kind = complex if self.env or isinstance(x, complex) else kind
        if isinstance(x, kind):
            return x
        return complex(x) if kind is complex else Decimal(x.numerator) / Decimal(x.denominator)

    def alike(self, *xs) -> list:
        """All as the widest kind among them."""
        if all(map(is_rational, xs)):
            return list(xs)
        kind = complex if any(isinstance(x, complex) for x in xs) else Decimal
        return [self.inexact(x, kind) for x in xs]

    def value(self, node):
        self.spend(1)
        op = node[0]
        if op == "num":
            return node[1]
        if op == "name":
            return self.env[node[1]] if node[1] not in CONSTANTS else self.inexact(CONSTANTS[node[1]])
        if op in STRUCTURES:
            raise Refuse(op)
        x, *rest = args = [self.value(arg) for arg in node[1:]]
        if op == "-":
            return 0 - x                        # not -x: a complex -0.0 lands on the wrong side of a branch cut
        if op == "inv":
            return Fraction(1) / x if is_rational(x) else 1 / x
        if op == "^":
            return self.power(*args)
        if op not in ("+", "*", "%"):
            return self.function(op, args)
        for y in rest if op != "%" else [Fraction(1, 100)]:
            x, y = (x, y) if type(x) is type(y) else self.alike(x, y)
            if op == "+" and not is_rational(x):
                self.weigh(x, y)
            x = x + y if op == "+" else x * y
            if is_rational(x):
                self.spend(bits(x) >> 8)
                x = x if bits(x) <= 2 * MAX_BITS else self.inexact(x)
        return x

    def weigh(self, x, y):
        """Before two inexact terms are added: no verdict if one is lost in the other, as in sqrt(x) + 10^20.

        What earlier terms left behind when they cancelled may be lost: it is rounding error.
        """
        relative, absolute = TOLERANCE[type(x)]
        small, large = sorted((abs(x), abs(y)))
        if absolute * self.scale[type(x)] < small < 10 * relative * large:
            raise ArithmeticError("a term is lost")
        if abs(x + y) < large / 1000:
            self.scale[type(x)] = max(self.scale[type(x)], large)

    def power(self, x, n):
        """Roots are powers too: real ones for negative x and odd roots, as in school."""
        if is_rational(n) and n.denominator == 1 and is_rational(x) and abs(n) * (bits(x) - 2) <= MAX_BITS:
            self.spend(abs(n) * (bits(x) - 2) >> 6)
            return x ** n if n >= 0 else Fraction(x) ** n
        if is_rational(n) and n.denominator % 2 and n.denominator > 1 and not complex(x).imag and complex(x).real < 0:
            return self.power(0 - x, n) * (-1) ** (n.numerator % 2)
        half = n == Fraction(1, 2)
        self.spend(20 if half or self.env else 150)
        x, n = self.alike(self.inexact(x), n)
        if isinstance(x, Decimal) and (x >= 0 or n == n.to_integral_value()):
            return x.sqrt() if half else x ** n
        x, n = complex(x), complex(n)
        return x ** (int(n.real) if n.imag == 0 and n.real.is_integer() and abs(n) < 1e6 else n)

    def function(self, name: str, args: list):
        self.spend(30)
        args = self.alike(*args)
        x = args[0]
        if name in WHOLE and all(is_rational(a) and a.denominator == 1 and abs(a) < 10 ** 30 for a in args):
            if 0 <= x <= 500 or name in ("gcd", "lcm"):
                return WHOLE[name](*map(int, args))
        if name in ORDERED and not isinstance(x, complex):
            return ORDERED[name](*args)
        if name not in ANY or name in WHOLE and not self.env:
            raise Refuse(name)
        if name in REAL and not self.env and not isinstance(x, complex) and (name not in TRIG or abs(x) < 10 ** 60):
            self.spend(100)
            try:
                value = REAL[name](*map(self.inexact, args))
                if abs(value) * 1000 < abs(x):                # sin pi and ln(ln e): what is left is rounding error
                    self.scale[Decimal] = max(self.scale[Decimal], Decimal(1))
                if value.is_finite():
                    return value
            except ArithmeticError:                           # ln(-1), arcsin 2
                pass
        args = [complex(a) for a in args]
        if name in TRIG and abs(args[0]) > 10 ** 4:           # a float of 10^20 is no angle any more
            raise ArithmeticError(name)
        self.scale[complex] = max([self.scale[complex], 1.0, *(map(abs, args) if name in TRIG else ())])
        return ANY[name](*args)


def names_of(node, ev: Evaluator) -> set:
    """Free variables of a value; Refuse for structures."""
    ev.spend(1)
    if node[0] in STRUCTURES:
        raise Refuse(node[0])
    if node[0] == "name":
        return {node[1]} - CONSTANTS.keys()
    return set() if node[0] == "num" else set().union(*(names_of(x, ev) for x in node[1:]))


# ---------------------------------------------------------------------------------------------------------------------
# 5. Comparison

POINTS = 8             # sample points; three usable ones decide


def close(x, y, scale: dict) -> bool:
    """Equal but for rounding: relative to the values, plus what cancelling terms of size `scale` may leave."""
    if is_rational(x):
        return x == y
    finite = Decimal.is_finite if isinstance(x, Decimal) else cmath.isfinite
    if not (finite(x) and finite(y)):
        return False
    relative, absolute = TOLERANCE[type(x)]
    return abs(x - y) <= relative * max(abs(x), abs(y)) + absolute * scale.get(type(x), 0)


def rounds_to(node, x, other) -> bool:
    """A written decimal of six or more digits stands for the value x that it rounds (or, from ten on, truncates).

    `other` is the node of x: two long decimals are equal only if one rounds the other.
    """
    if written_digits(node) < 6 or isinstance(x, complex) and abs(x.imag) > 1e-12 * abs(x):
        return False
    sign, (_, value, decimals) = (-1, node[1]) if node[0] == "-" else (1, node)
    value, x = sign * value, x.real if isinstance(x, complex) else x
    if not abs(value) <= 2 * abs(x) <= 4 * abs(value):                   # before Fraction(x): Decimals may be huge
        return False
    error, long = abs(Fraction(x) - value), written_digits(node) >= 10 > written_digits(other)
    return error * 2 * 10 ** decimals <= 1 or long and error <= abs(value) / 10 ** 9


def written_digits(node) -> int:
    """Of a decimal as it was written, 0 for anything else."""
    node = node[1] if node[0] == "-" else node
    return len(str(int(node[1] * 10 ** node[2]))) if node[0] == "num" and node[2] is not None else 0


def samples(a, b, names: set, ev: Evaluator):
    """Yield values of a and b at fixed points; poles and overflows are skipped.

    Coordinates are fractions between 2/3 and 5/3 (5 in the last points) with small terms, so that high powers stay
    cheap and finite; in every second point they are of mixed sign.
    """
    for point in range(POINTS):
        hashes = {name: crc32(f"{point}:{name}".encode()) for name in names}
        ev.env = {name: Fraction(67 + h % 101, 101 if point < 6 else 34) * (-1 if point % 2 and h >> 16 & 1 else 1)
                  for name, h in hashes.items()}
        ev.scale[complex] = 0.0
        try:
            x, y = ev.alike(ev.value(a), ev.value(b))
        except (ArithmeticError, ValueError):
            continue
        finally:
            ev.env = {}
        if is_rational(x) or cmath.isfinite(x) and cmath.isfinite(y):
            yield x, y


def same_value(a, b, ev: Evaluator) -> bool:
    if not (names := names_of(a, ev) | names_of(b, ev)):      # all of them: 2y - 2y is 0
        x, y = ev.alike(ev.value(a), ev.value(b))
        return close(x, y, ev.scale) or rounds_to(a, y, b) or rounds_to(b, x, a)
    verdicts = {True: [], False: []}            # log x^2 and 2 log x agree where both are real: those points decide
    for x, y in samples(a, b, names, ev):
        real = is_rational(x) or abs(x.imag) + abs(y.imag) <= 1e-9 * (abs(x) + abs(y))
        verdicts[real].append(close(x, y, ev.scale))
        if real and not verdicts[real][-1]:
            return False
    if len(verdicts[True]) >= 3 and "('name', 'i')" not in repr((a, b)):
        return True
    if len(verdicts[True] + verdicts[False]) < 3:             # x^2004 - 1 lies beyond floats
        return ordered(a) == ordered(b)
    return all(verdicts[False])


def ordered(node):
    """The same value with terms and factors in one order."""
    if node[0] in ("num", "name"):
        return node
    parts = [ordered(x) for x in node[1:]]
    return (node[0], *(sorted(parts, key=repr) if node[0] in ("+", "*") else parts))


def proportional(a: list, b: list, positive: bool, ev: Evaluator) -> bool:
    """left - right of a = c * (left - right of b) at all points for one constant c != 0 (c > 0 for inequalities)."""
    if any(side[0] in STRUCTURES for side in a + b):
        return False
    a, b = (("+", left, ("-", right)) for left, right in (a, b))
    names = names_of(a, ev)
    if not names or names != names_of(b, ev):
        return False
    ratios = []
    for x, y in samples(a, b, names, ev):
        zeros = [abs(v) <= 1e-13 * ev.scale[complex] for v in (x, y)]
        if any(zeros) != all(zeros):
            return False
        if not all(zeros):
            ratios.append(Fraction(x) / y if is_rational(x) else x / y)
    return len(ratios) >= 3 and all(close(r, ratios[0], {}) for r in ratios) \
        and not (positive and complex(ratios[0]).real <= 0)


def is_label(node) -> bool:
    r"""A left side that only names the answer: x, f(x), AB, (x, y), |AB|, A:B, \frac{NO}{BO}, \tan A."""
    if node[0] == "name":
        return node[1] not in ("infty", "pi", "i")
    if node[0] in ("()", "list"):
        return all(map(is_label, node[1]))
    return node[0] in ("*", "inv", "abs", *TRIG) and all(map(is_label, node[1:]))


def reduce(node, ev: Evaluator):
    """A chain of equalities -> ("eq", [left, value]), or its value if every side is one; other nodes unchanged.

    The value is the last side before an approximation. Raises Refuse when two numeric sides disagree: 41 = 42.
    """
    if node[0] != "rel" or not set(node[2]) <= {"=", "~", "in"}:
        return node
    sides = node[1]
    if "~" in node[2] and not is_label(sides[node[2].index("~")]):
        sides = sides[:node[2].index("~") + 1]
    numeric = [side for side in sides if side[0] not in STRUCTURES and not names_of(side, ev)]
    if not all(same_value(x, y, ev) for x, y in zip(numeric, numeric[1:])):
        raise Refuse("false equation")
    return sides[-1] if len(numeric) == len(sides) or len(sides) == 1 else ("eq", [sides[0], sides[-1]])


def unlabelled(node, ev: Evaluator):
    """x = 5 -> 5, 5 = x -> 5; other nodes unchanged."""
    node = reduce(node, ev)
    if node[0] != "eq":
        return node
    left, right = node[1]
    return right if is_label(left) else left if is_label(right) else node


def same(a, b, ev: Evaluator) -> bool:
    """Are two nodes the same answer? Symmetric in a and b."""
    ev.spend(5)
    if a == b and a[0] != "rel":
        return True
    a, b = reduce(a, ev), reduce(b, ev)
    for kind, rule in RULES.items():
        if kind in (a[0], b[0]):
            return rule(a, b, ev) if a[0] == kind else rule(b, a, ev)
    return same_value(a, b, ev)


def same_items(a: list, b: list, ev: Evaluator) -> bool:
    return len(a) == len(b) and all(same(x, y, ev) for x, y in zip(a, b))


def unordered(a: list, b: list, ev: Evaluator) -> bool:
    return all(any(same(x, y, ev) for y in b) for x in a) and all(any(same(x, y, ev) for x in a) for y in b)


def solutions(node, ev: Evaluator):
    """x = 1, y = 2, x = 3, y = 4 -> a list of two lists: a name that comes again begins the next solution."""
    labels = [x[1][0] if x[0] == "eq" else None for x in (reduce(x, ev) for x in node[1])] if node[0] == "list" else []
    size = labels.index(labels[0], 1) if labels and labels[0] in labels[1:] else 0
    if size < 2 or labels[0] is None or labels != labels[:size] * (len(labels) // size):
        return node
    return ("list", [("list", node[1][i:i + size]) for i in range(0, len(labels), size)])


# The rules of RULES: `a` is of the rule's kind, `b` of the same or of a later one.

def same_equation(a, b, ev: Evaluator) -> bool:
    """Equations up to a factor, or up to the name of what is found: x = 5, k = 5, 5 = x and 5 are one answer."""
    if b[0] != "eq":
        a = unlabelled(a, ev)
        return a[0] != "eq" and same(a, b, ev)
    (left, right), (other, value) = a[1], b[1]
    renamed = is_label(left) and is_label(other) and not (is_label(right) and is_label(value))
    if (left == other or renamed) and same(right, value, ev):
        return True
    return proportional(a[1], b[1], False, ev)


def same_inequality(a, b, ev: Evaluator) -> bool:
    """Up to direction, and a single one up to a positive factor; longer chains side by side."""
    if b[0] != "rel":
        return b[0] in ("union", *BRACKETS) and (a := interval(a)) is not None and same(a, b, ev)
    (_, sides, ops), (_, others, other_ops) = a, b
    if ops != other_ops:
        return False
    return same_items(sides, others, ev) if len(ops) > 1 else proportional(sides, others, ops != ["!="], ev)


def interval(node):
    r"""0 < x <= 1 -> the node of (0, 1]; x > 3 -> (3, \infty); x != 3 -> a union. None for other relations."""
    _, sides, ops = node
    free = [at for at, side in enumerate(sides) if side[0] == "name" and is_label(side)]
    if len(free) != 1:
        return None
    if ops == ["!="]:
        bound = sides[1 - free[0]]
        return ("union", [("()", [("-", INFINITY), bound]), ("()", [bound, INFINITY])])
    if len(ops) == 1:
        sides, ops = ([("-", INFINITY), *sides], ["<", *ops]) if free == [0] else ([*sides, INFINITY], [*ops, "<"])
    if len(ops) != 2 or sides[1][0] != "name" or not set(ops) <= {"<", "<="}:
        return None
    return ("[("[ops[0] == "<"] + "])"[ops[1] == "<"], sides[::2])


def same_percent(a, b, ev: Evaluator) -> bool:
    """50% is 50%, 0.5, 1/2 and also 50: the sign is often in the question."""
    return b[0] not in STRUCTURES and (same_value(a, b, ev) or b[0] != "%" and same_value(a[1], b, ev))


def same_residue(a, b, ev: Evaluator) -> bool:
    """3 mod 7 is 10 mod 7 and 3, not 3 mod 8."""
    return b[0] not in STRUCTURES and (b[0] != "mod" or same(a[2], b[2], ev)) and same_value(a, b, ev)


def same_collection(a, b, ev: Evaluator) -> bool:
    """Lists and sets, against each other or against one answer of several parts.

    Named values (x = 1, y = 2) match by name, or in order against other names or none.
    """
    if b[0] == "union":                                       # x < 1 or x > 2
        return unordered(a[1], b[1], ev)
    a, b = solutions(a, ev), solutions(b, ev)
    values = [unlabelled(x, ev) for x in a[1]]
    if b[0] in BRACKETS and a[0] == "list" and len(values) == len(b[1]) and (b[0] == "()" or len(values) > 2):
        return same_items(values, b[1], ev)                   # not [1, 2]: that is an interval
    if b[0] not in ("list", "set"):
        return len(values) > 0 and all(same(x, b, ev) for x in values)
    named = []
    for items in (a[1], b[1]):
        pairs = [x[1] for x in (reduce(x, ev) for x in items) if x[0] == "eq" and is_label(x[1][0])]
        names = {repr(name): value for name, value in pairs}
        named.append(names if len(names) == len(items) > 1 else {})
    if named[0] and named[0].keys() == named[1].keys():
        return all(same(value, named[1][name], ev) for name, value in named[0].items())
    families = [{re.sub(r"_\w*", "", name) for name in names} for names in named]           # x_1, x_2 are one family
    match = same_items if max(map(len, families)) > 1 else unordered
    return match(values, [unlabelled(x, ev) for x in b[1]], ev)


def same_brackets(a, b, ev: Evaluator) -> bool:
    """Unions, intervals and tuples: the brackets count, except round or square ones around three values or more."""
    if a[0] == "union":
        return b[0] == "union" and unordered(a[1], b[1], ev)
    return b[0] in BRACKETS and (a[0] == b[0] or len(a[1]) > 2) and same_items(a[1], b[1], ev)


RULES = {"eq": same_equation, "list": same_collection, "set": same_collection, "rel": same_inequality,
         "%": same_percent, "mod": same_residue, **dict.fromkeys(("union", *BRACKETS), same_brackets)}
CHOSEN = re.compile(r"[«(]*([A-H])[).:][\s»]+(?:(?!\b[A-H]\b)[^,;])+")             # "(C) 12 apples", not "(A) or (B)"
GAPS = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])|[«»]")


def word_key(s: str) -> str:
    """Letters of an answer in words or of a choice, "(C)" -> "c"; empty for anything else."""
    bare = re.sub(r"[«»\s(){}.\"]|'(?=[a-z])|(?<=[a-z])-", "", s)
    return bare.casefold() if bare.isalpha() else ""


def is_equal(pred: str, gold: str) -> bool:
    """Is the answer `pred` the answer `gold`? Symmetric, bounded in time, never raises; False where unreadable."""
    if not isinstance(pred, str) or not isinstance(gold, str):
        return False
    if pred == gold:
        return True
    try:
        with localcontext(DIGITS):                            # sorted, so that the verdict cannot depend on the order
            return compare(*map(clean, sorted((pred, gold))))
    except (Refuse, ArithmeticError, ValueError, RecursionError, TypeError):      # TypeError: \sin(5, 3)
        return False


def compare(pred: str, gold: str) -> bool:
    """Of two clean texts: as text, as words, then as parsed nodes."""
    if not pred or not gold or max(len(pred), len(gold)) > MAX_ANSWER:
        return pred == gold != ""
    if GAPS.sub("", pred) == GAPS.sub("", gold):
        return True
    words = word_key(pred), word_key(gold)
    if all(words) and (words[0] == words[1] or min(map(len, words)) > 3):
        return words[0] == words[1]
    for comma, point in ((pred, gold), (gold, pred)):         # 1,5 is 1.5
        if len(letter := word_key(point)) == 1 and (choice := CHOSEN.fullmatch(comma)):
            return choice[1].lower() == letter
        if re.fullmatch(r"[-+]?[0-9]+,[0-9]+", comma) and re.fullmatch(r"[-+]?[0-9]*\.[0-9]+", point):
            return not THOUSANDS.search(comma) and Fraction(comma.replace(",", ".")) == Fraction(point)
        if (based := re.fullmatch(r"([0-9]+)\s*_\s*\{?\s*[0-9]+\s*\}?", comma)) and point.isdigit():
            return based[1] == point                          # 52_8 = 52, the base being in the question
    (pred, unit), (gold, other_unit) = split_unit(pred), split_unit(gold)
    a, b = parse(pred), parse(gold)
    if units_clash(unit, other_unit) or a is None or b is None:
        return False
    ev = Evaluator()
    if same(a, b, ev):
        return True
    for text, node, other in ((pred, a, b), (gold, b, a)):    # "1,234" against a list or tuple is two numbers
        if other[0] in ("list", "set", *BRACKETS) and THOUSANDS.search(text):
            split = parse(text, thousands=False)
            return split is not None and same(split, other, ev)
    return False


def can_read(gold: str) -> bool:
    """False for a gold that could only be matched letter by letter (data.py drops and counts those)."""
    try:
        s = clean(gold)
        return 0 < len(s) <= MAX_ANSWER and (word_key(s) != "" or parse(split_unit(s)[0]) is not None)
    except (ValueError, RecursionError):
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


def score(tokenizer, problems, rollouts, style="boxed"):
    """Rollouts of P problems -> one dict a row: what was said, what was read out of it, and the verdict."""
    group_size = len(rollouts.completions) // len(problems)
    rows = []
    for i, completion in enumerate(rollouts.completions):
        problem, text = problems[i // group_size], tokenizer.decode(completion)
        verdict = grade(text, problem.answer, "tags" if style == "tags" else "boxed")
        rows.append({"id": problem.id, "question": problem.question, "answer": problem.answer, "completion": text,
                     "extracted": verdict.answer, "rule": verdict.rule, "correct": float(verdict.correct),
                     "format": float(verdict.format), "length": len(completion), "finished": rollouts.finished[i],
                     "mean_logprob": rollouts.logprobs[i].mean().item()})
    return rows


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
