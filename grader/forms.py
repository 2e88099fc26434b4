r"""
How an equal answer may be written. These have the gold answer's value but earn nothing:

    is_unfinished("48+48/2", "72")                    True: it leaves the computing to the grader
    is_copied("7+12+0", "What is $7+12$?", "19")      True: it is the question's own formula
    is_padded("(B) 5", "Is it (A) 4 or (B) 7?", "B")  True: choice B is 7
"""
import re
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from grader import answers
from grader.answers import Reading, clean, is_equal, number
from grader.decimals import Number, Value, divide, is_rational, settle

# -----------------------------------------------------------------------------
# Unfinished arithmetic

class Form(NamedTuple):
    r"""How a number was written, as far as arithmetic with it depends on that."""
    kind: str = ""         # of a rational number: "number" 2, "fraction" 1/2, "10^" or "computed"
    terms: tuple = ()      # a sum's terms without variables, or the number itself
    factor: Value = 0      # the rational factor of a product, 6 in 6\pi, or the number itself
    marks: frozenset = frozenset()     # what is undone: "sums", functions; "free": has variables


SUMS = ("+", "*", "/", "^", r"\mod", "factorial", "binom", "exp")
FAMILIES = {"ln": "log", **{arc + name: "trig" for name in answers.TRIG for arc in ("", "arc")}}
COMPUTED = {"10^", "computed"}


def formed(x: Reading) -> Number:
    """A reading as an operand with a form: integers and decimals are rational, pi, e and i not."""
    x = number(x)
    is_literal = isinstance(x.value, int) or x.digits > 0
    literal = Form("number", (x.value,), x.value) if is_literal else Form(terms=(x.value,))
    return x._replace(form=x.form or literal)


class Inspector(answers.Point):
    """A point that computes as all do, and notes on each number how it was written."""

    def variable(self, name: str) -> Number:
        return super().variable(name)._replace(form=Form(marks=frozenset({"free"})))

    def compute(self, op: str, x: Reading, y: Reading) -> Reading:
        if "()" in (x.kind, y.kind):
            return x if x.kind == "()" else y  # a number may stand before a matrix
        return super().compute(op, x, y)

    def apply(self, name: str, *args: Reading, work: int = 60) -> Number:
        result = super().apply(name, *args, work=work)
        numbers = [formed(x) for x in args]
        x, y = numbers[0], numbers[-1]
        marks = frozenset().union(*(x.form.marks for x in numbers))
        kind, factor = "", 0
        terms = () if "free" in marks else (result.value,)
        are_rational = bool(x.form.kind and y.form.kind)
        if name in ("+", "*", "/") and are_rational or is_rational(result.value):
            is_fraction = name == "/" and not {x.form.kind, y.form.kind} & COMPUTED
            is_power = name == "^" and x.value == 10
            kind = "fraction" if is_fraction else "10^" if is_power else "computed"
            factor = result.value
        if name == "+":
            terms = x.form.terms + y.form.terms
            self.spend(len(terms))
        elif name == "*":
            factor = factor or x.form.factor or y.form.factor
        if name in SUMS and (kind and not are_rational or is_undone(name, x, y, result.value)):
            marks |= {"sums"}  # \sqrt2\sqrt8 = 4, 2 + 2
        elif name not in SUMS and "free" not in marks:  # \sin x computes nothing
            marks |= {FAMILIES.get(name, name)}
        return result._replace(form=Form(kind, terms, factor, marks))


def is_undone(op: str, x: Number, y: Number, result: Value) -> bool:
    r"""Does `x op y` leave arithmetic undone? A fraction, 3*10^4, and a power, root, factorial or
    binomial of numbers, by itself or as one side of a fraction, is done.
    """
    kinds = [x.form.kind, y.form.kind]
    computed = [kind in COMPUTED for kind in kinds]
    if op == r"\mod":  # 3 mod 7 is done
        return result != x.value
    if op in ("factorial", "binom", "exp"):  # (3!)!
        return any(computed)
    if op == "/":  # 144/2, 12\pi/2, x/1, 1/2/3, 4!/2^5; but 4!/7 is done
        is_whole = x.form.factor and y.form.kind and isinstance(
            settle(divide(x.form.factor, y.value)), int)
        return is_whole or result == x.value or all(computed) or all(kinds) and "fraction" in kinds
    if op == "^":
        return any(computed) or y.value in (0, 1)
    if op == "*" and kinds == ["number", "10^"]:
        return False
    if any(computed) or result in (x.value, y.value, -x.value, -y.value):  # x + 0, -1 * x
        return True
    if op == "*":  # 2\pi * 3
        return bool(x.form.factor and y.form.factor)
    return all(kinds) or any(  # 2 + 3, x + 3 + 2, \sqrt2 + 3\sqrt2
        is_rational(divide(a, b)) for a in x.form.terms for b in y.form.terms)


def undone(reading: Reading) -> list[str]:
    """The marks of all numbers in a reading."""
    if isinstance(reading, Number):
        return [*formed(reading).form.marks - {"free"}]
    return [mark for item in reading.items for mark in undone(item)]


def inspect(answer: str) -> Counter:
    """Counts the items of an answer that leave a kind of arithmetic undone."""
    s = clean(answer)
    choice = answers.CHOSEN.fullmatch(s)
    s = answers.split_unit(choice[2] if choice else s)[0]
    if re.fullmatch("(?:[A-Za-z] ?= ?)?[-+]?[0-9.]+", s):
        return Counter()  # quickly, since most answers are
    try:
        read = answers.branches(s)
        return Counter(undone(answers.read(read, Inspector(answers.names_in(read[0])))))
    except answers.UNREADABLE:
        return Counter()


def is_unfinished(answer: str, gold: str) -> bool:
    """Does an answer leave more arithmetic undone than the gold answer, as 48+24 does for 72?"""
    found = inspect(answer)
    return bool(found and found - inspect(gold))


# -----------------------------------------------------------------------------
# Copies and choices

# What makes values a formula; -5 and 2\pi have none. 60 decimals come from \overline.
OPERATOR = re.compile(rf"[^\s=(\[{{,<>]\s*-|[+*/^|:]|!(?!=)|\.[0-9]{{60}}"
                      rf"|\\(?:frac|binom|mod|lfloor|lceil|{'|'.join(answers.FUNCTIONS)})")
# The formulas of a question: between dollar signs, in \[ \] or \( \), or numbers with operators.
SPAN = re.compile(r"\$\$?((?:\\.|[^$\\])+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)"
                  r"|((?:[0-9.,]*[0-9]\s*[-+*/^:]\s*)+[0-9.,]*[0-9])", re.DOTALL)


def symbols(s: str) -> Counter:
    r"""All tokens but brackets, + and *. x+\frac12 and 1/2 + x have the same ones."""
    tokens = answers.tokenize(s.replace(r"\frac", "/"))
    return Counter(token for token in tokens if token not in (*r"(){}+*,", r"\{", r"\}"))


@lru_cache(1_000)  # a group of answers shares its question
def formulas(question: str) -> list[tuple[str, Counter]]:
    """The formulas of a question and each of their sides, with their symbols."""
    spans = [clean("".join(filter(None, match.groups())).strip(" .,;?"))
             for match in SPAN.finditer(question)]
    parts = dict.fromkeys(part for span in spans for part in (span, *re.split("[=,;<>≈]", span)))
    return [(part, symbols(part)) for part in parts if OPERATOR.search(part)]


def is_copied(answer: str, question: str, gold: str) -> bool:
    r"""Does the answer only copy a formula of the question, as \binom{18}{12} for 18564 does? True
    if it has all symbols of a formula that equals the gold answer, which is written otherwise. More
    symbols, as in X + 0, don't help; nor does another order.
    """
    whole = answers.split_unit(clean(answer))[0]
    if not OPERATOR.search(whole):
        return False
    known, all_sides = symbols(clean(gold)), symbols(whole)
    last = symbols(whole.partition("≈")[0].rpartition("=")[2])
    return any(not copied - (all_sides if "=" in formula else last)  # 7+12=19 is no copy
               and copied - known and is_equal(formula, gold)
               for formula, copied in formulas(question))


def is_padded(answer: str, question: str, gold: str) -> bool:
    """Is the answer a choice whose value isn't in the question, such as (B) 5 for (B) 7? Where the
    gold answer is only the letter, nothing else would check the value.
    """
    choice = answers.CHOSEN.fullmatch(clean(answer))
    letters = re.sub("[^0-9A-Za-z]", "", choice[0] if choice else "")
    return bool(choice) and answers.word_key(clean(gold)) == choice[1] \
        and letters not in re.sub("[^0-9A-Za-z]", "", clean(question))
