r"""
How an equal answer may be written. These have the gold answer's value but earn nothing:

    is_unfinished("48+48/2", "72")                    True: it leaves the computing to the grader
    is_copied("7+12+0", "What is $7+12$?", "19")      True: it is the question's own formula
    is_padded("(B) 5", "Is it (A) 4 or (B) 7?", "B")  True: choice B is 7
"""
import re
from collections import Counter
from collections.abc import Iterator
from math import lcm
from typing import NamedTuple

from grader import answers
from grader.answers import Reading, clean, is_equal, number
from grader.decimals import Number, Value, divide, settle

# -----------------------------------------------------------------------------
# Unfinished arithmetic

class Form(NamedTuple):
    r"""How a number was written, as far as later arithmetic with it depends on that."""
    kind: str = ""         # of a rational number: "number" 2, "fraction" 1/2, "10^" or "computed"
    terms: tuple = ()      # the values of a sum's terms; else the number's own
    factor: Value = 0      # the rational number in a product, 6 in 6\pi; 0 if there is none
    marks: frozenset = frozenset()     # arithmetic left undone; "free" if there are variables


COMPUTED = ("10^", "computed")
MANY = lcm(*range(1, 60)) * 10 ** 4  # a multiple of most denominators


def is_rational(x: Value) -> bool:
    return isinstance(x, int) or isinstance(settle(x * MANY), int)


def form_of(x: Number) -> Form:
    """The form of a literal, which has no other, is "number"; that of pi, e and i is ""."""
    is_literal = isinstance(x.value, int) or x.digits > 0
    return x.form or Form("number" * is_literal, (x.value,), x.value * is_literal)


class Inspector(answers.Point):
    """A point that computes as all do, and notes on each number how it was written."""

    def variable(self, name: str) -> Number:
        x = super().variable(name)
        return x._replace(form=Form("", (x.value,), 0, frozenset({"free"})))

    def apply(self, name: str, *args: Reading, work: int = 60) -> Number:
        found = super().apply(name, *args, work=work)
        values = [number(x).value for x in args] + [found.value]
        forms = [form_of(number(x)) for x in args]
        kinds = [form.kind for form in forms]
        marks = frozenset().union(*(form.marks for form in forms))
        kind = ""
        if name in ("+", "*", "/", "mixed") and all(kinds) or is_rational(found.value):
            is_fraction = name in ("/", "mixed") and not {*kinds} & {*COMPUTED}
            kind = "fraction" if is_fraction else "10^" if name == "^" and values[0] == 10 \
                else "computed"
        terms, factor = (found.value,), found.value if kind else 0
        if name in ("+", "*", "/", "^"):
            x, y = forms
            self.spend(len(x.terms))  # as many divisions
            if kind and not all(kinds) or is_undone(name, x, y, *values):  # \sqrt2\sqrt8 is 4
                marks |= {"sum"}
            terms = x.terms + y.terms if name == "+" else terms
            factor = factor or name == "*" and (x.factor or y.factor)
        elif name in ("factorial", "binom", "mixed"):  # (3!)!
            marks |= {"sum"} if {*kinds} & {*COMPUTED} else set()
        elif name == r"\mod":  # 3 mod 7 is done, 10 mod 7 is not
            marks |= {"mod"} if values[0] != values[2] else set()
        elif name != "exp" and "free" not in marks:  # \sin x computes nothing
            is_angle = name.removeprefix("arc") in answers.TRIG
            marks |= {"trig" if is_angle else name.replace("ln", "log")}
        return found._replace(form=Form(kind, terms, factor, marks))


def is_undone(op: str, x: Form, y: Form, first: Value, second: Value, value: Value) -> bool:
    r"""Does `first op second` leave arithmetic undone? A fraction, 3*10^4, and a power, root,
    factorial or binomial of numbers, by itself or as one side of a fraction, is done.
    """
    computed = [form.kind in COMPUTED for form in (x, y)]
    if value == first:  # x + 0, x * 1, x / 1, x^1
        return True
    if op == "+":  # terms whose quotient is rational could be one: 2 + 3, 2x + 3 + 5, x + 2x
        return value == second or all((x.kind, y.kind)) or any(computed) or any(
            is_rational(divide(a, b)) for a in x.terms for b in y.terms)
    if op == "*":
        if (x.kind, y.kind) == ("number", "10^"):
            return False
        return value in (second, -first, -second) or any(computed) or x.factor and y.factor
    if op == "/":  # 144/2, 12\pi/2, 1/2/3, 4!/2^5; but 4!/7 is done
        return y.kind and x.factor and isinstance(settle(divide(x.factor, second)), int) \
            or all(computed) or all((x.kind, y.kind)) and "fraction" in (x.kind, y.kind)
    return any(computed) or value == 1


def undone(reading: Reading) -> Iterator[str]:
    """The marks of each number in a reading."""
    if reading.kind == "number":
        yield from form_of(reading).marks - {"free"}
    elif reading.kind in ("eq", "rel"):
        for side in reading.sides:
            yield from undone(side.value)
    else:
        for item in reading.items:
            yield from undone(item)


def inspect(answer: str) -> Counter:
    """Counts the items of an answer that leave a kind of arithmetic undone."""
    s = clean(answer)
    choice = answers.CHOSEN.fullmatch(s)
    s = answers.split_unit(choice[2] if choice else s)[0]
    if re.fullmatch(r"(?:[A-Za-z] ?= ?)?[-+]?[0-9.]+", s):
        return Counter()  # quickly, since most answers are
    try:
        read = answers.Answer(s)
        return Counter(undone(read.at(Inspector(read.names))))
    except answers.UNREADABLE:
        return Counter()


def is_unfinished(answer: str, gold: str) -> bool:
    """Does an answer leave more arithmetic undone than the gold answer, as 48+24 does for 72?"""
    if clean(answer) == clean(gold):
        return False
    found = inspect(answer)
    return bool(found and found - inspect(gold))


# -----------------------------------------------------------------------------
# Copies and choices

# 1,234.5 is one symbol, \frac12 is three.
SYMBOL = re.compile(r"\\[A-Za-z]+|(?<=\\frac|binom)\s*[0-9]"
                    r"|[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|\.[0-9]+|[^\s(){}+*,]")
# What makes values a formula; -5 and 2\pi have none. 60 decimals come from \overline.
OPERATOR = re.compile(rf"[^\s=(\[{{,<>]\s*-|[+*/^|:]|!(?!=)|\.[0-9]{{60}}"
                      rf"|\\(?:frac|binom|mod|lfloor|lceil|{'|'.join(answers.FUNCTIONS)})")
# The formulas of a question: between dollar signs, in \[ \] or \( \), or numbers with operators.
SPAN = re.compile(r"\$\$?((?:\\.|[^$\\])+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)"
                  r"|((?:[0-9.,]*[0-9]\s*[-+*/^:]\s*)+[0-9.,]*[0-9])", re.DOTALL)


def symbols(s: str) -> Counter:
    r"""All symbols but brackets, + and *; a number is one symbol. x+\frac12 and 1/2 + x have the
    same ones.
    """
    return Counter("/" if symbol == r"\frac" else symbol.strip().replace(",", "")
                   for symbol in SYMBOL.findall(s))


def is_copied(answer: str, question: str, gold: str) -> bool:
    r"""Does the answer only copy a formula of the question, as \binom{18}{12} for 18564 does? True
    if it has all symbols of a formula that equals the gold answer, which is written otherwise. More
    symbols, as in X + 0, don't help; nor does another order.
    """
    whole, known = answers.split_unit(clean(answer))[0], symbols(clean(gold))
    all_sides, last = symbols(whole), symbols(whole.partition("≈")[0].rpartition("=")[2])
    if not all_sides - known or not OPERATOR.search(whole):
        return False
    for match in SPAN.finditer(question):
        raw = "".join(filter(None, match.groups())).strip(" .,;?")
        if raw.isalnum():  # $x$ and $5$, most often
            continue
        formula = clean(raw)
        for part in {formula, *re.split("[=,;<>≈]", formula)}:
            copied = symbols(part)
            if not copied - (all_sides if "=" in part else last) and copied - known \
                    and OPERATOR.search(part) and is_equal(part, gold):
                return True
    return False


def is_padded(answer: str, question: str, gold: str) -> bool:
    """Is the answer a choice whose value isn't in the question, such as (B) 5 for (B) 7? Where the
    gold answer is only the letter, nothing else would check the value.
    """
    choice = answers.CHOSEN.fullmatch(clean(answer))
    letters = re.sub("[^0-9A-Za-z]", "", choice[0] if choice else "")
    return bool(choice) and answers.word_key(clean(gold)) == choice[1] \
        and letters not in re.sub("[^0-9A-Za-z]", "", clean(question))
