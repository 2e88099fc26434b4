r"""
How an equal answer may be written. These have the gold answer's value but earn nothing:

    is_unfinished("48+48/2", "72")                    True: it leaves the computing to the grader
    is_copied("7+12+0", "What is $7+12$?", "19")      True: it is the question's own formula
    is_padded("(B) 5", "Is it (A) 4 or (B) 7?", "B")  True: choice B is 7
"""
import re
from collections import Counter

from grader import answers
from grader.answers import Reading, clean, is_equal, names_in
from grader.decimals import settle

# -----------------------------------------------------------------------------
# Unfinished arithmetic

# -5, .5, 50%, 1/2, \frac12 or 3\frac12, as tokens with spaces between
N = r"[-+(\[{ ]*[0-9.]+[ )\]}%°]*"
NUMBER = re.compile(rf"{N}(?:/ {N}|\\frac {N}{N})?|[-({{ ]*\\frac {N}{N}")
MULTIPLE = re.compile(r"[-(\\frac{ ]*([0-9]+) (?![!^])[^-+]*?(?<![.0-9])([0-9]+)[ )}]*")  # 12\pi / 3
MANY = 2 ** 20 * 3 ** 8 * 5 ** 8 * 7 ** 3 * 11 * 13  # a multiple of most denominators


class Inspector(answers.Reader):
    r"""A reader that notes the tokens where arithmetic is left undone: an operator between two
    numbers, as in 2+x+3 and 2\pi*3; + 0, * 1, / 1; a number made of parts that are none, such as
    \sqrt2\sqrt8; a quotient that is an integer.

    Counted as finished: a fraction, a mixed number, 3*10^4, and a power, root, factorial or binomial of numbers
    that is an item, or one side of a fraction, by itself.
    """

    def __init__(self, tokens: list[str], point: answers.Point):
        super().__init__(tokens, point)
        self.undone = []       # indices of tokens
        self.called = set()    # functions of numbers; those of a variable compute nothing
        self.spans = {}        # the end and value of each expression, by its start
        self.counts = {}       # numbers among the terms or factors so far, by the chain's start

    def kind(self, start: int, end: int, value: Reading) -> str:
        """A rational number is "number" as in 1/2, or "computed" as in 2^10; others are ""."""
        if value.kind not in answers.SCALAR or names_in(self.tokens[start:end]) \
                or not isinstance(settle(answers.number(value).value * MANY), int):
            return ""
        return "number" if NUMBER.fullmatch(" ".join(self.tokens[start:end])) else "computed"

    def expression(self, floor: int = 0, stops: frozenset | None = None) -> Reading:
        start = self.at
        self.last = super().expression(floor, stops)
        self.spans[start] = self.at, self.last
        side = "".join(self.tokens[start:self.at])
        if floor == answers.RELATION and self.tokens[start - 1] == "=" and re.search("[0-9]", side):
            self.undone = [i for i in self.undone if not self.chain <= i < start]  # 7+12=19 is 19
        return self.last

    def relation(self, left: Reading, start: int) -> Reading:
        self.chain = start
        return super().relation(left, start)

    def primary(self) -> Reading:
        at = self.at
        value = super().primary()
        if self.tokens[at] == r"\frac":
            middle, top = self.spans[at + 1]
            self.judge("/", at, (at + 1, middle, top), (middle, *self.spans[middle]), value)
        return value

    def function(self, name: str, opener: str = "") -> Reading:
        at = self.at
        value = super().function(name, opener)
        tokens = self.tokens[at:self.at]
        if name == "sqrt" and self.kind(at, self.at, self.last) and {*"^!", r"\sqrt"} & {*tokens}:
            self.undone.append(at)
        if name not in ("sqrt", "exp") and not names_in(tokens):
            is_angle = name.removeprefix("arc") in answers.TRIG
            self.called.add("trig" if is_angle else name.replace("ln", "log"))
        return value

    def infix(self, left: Reading, op: str, start: int) -> Reading:
        at = self.at
        value = super().infix(left, op, start)
        right = at + (op not in ("beside", "mixed"))
        if op in ("+", "-", "*", "/", "^", "beside") or op == "mixed" and at > start + 1:
            self.judge(op, at, (start, at, left), (right, self.at, self.last), value)
        elif op == "!" and self.kind(start, at, left) == "computed" \
                or op == ":" and value.kind == "number" and isinstance(value.value, int):
            self.undone.append(at)
        elif op == r"\mod" and value.kind == "mod" and value.items[0] != left:
            self.called.add("mod")
        return value

    def judge(self, op: str, at: int, first: tuple, second: tuple, value: Reading) -> None:
        """Notes token `at` if `first op second` is undone; each is a start, an end and a value."""
        start = min(at, first[0])
        whole = self.kind(start, self.at, value)
        parts = [self.kind(*first), self.kind(*second)]
        bare = ["".join(self.tokens[a:b]).strip("(){}[]+-") for a, b, _ in (first, second)]
        if op == "/":
            found = MULTIPLE.fullmatch(" ".join(self.tokens[start:self.at])) if parts[1] else None
            undone = "computed" in parts or found and int(found[1]) % int(found[2]) == 0
            if all(parts):
                undone = isinstance(value.value, int) or whole != "number" and len({*parts}) == 1
        elif op == "^":
            undone = "computed" in parts or bare[1] in ("0", "1")
        else:
            key = start, op in "+-"
            count = self.counts.get(key, parts[0] != "") + (parts[1] != "")
            self.counts[key] = count
            undone = "computed" in parts or count > 1 or ("0" if op in "+-" else "1") in bare
            if self.tokens[at:at + 3] == ["*", "10", "^"] and parts[0] == "number" and count == 2:
                undone = False
        if undone or whole and not all(parts) or op == "/" and bare[1] == "1":
            self.undone.append(at)


def undone(answer: str) -> tuple[int, set[str]]:
    """The number of items whose arithmetic is undone, and the functions applied to numbers."""
    s = clean(answer)
    choice = answers.CHOSEN.fullmatch(s)
    s = answers.split_unit(choice[2] if choice else s)[0]
    if re.fullmatch(r"(?:[A-Za-z] ?= ?)?[-+]?[0-9.]+", s):
        return 0, set()  # quickly, since most answers are
    try:
        read = answers.Answer(s)
        inspector = Inspector(read.branches[0], answers.Point(read.names))
        inspector.listing(("",))
    except answers.UNREADABLE:
        return 0, set()
    return len({sum(token in (",", ";", "&", r"\\") for token in inspector.tokens[:at])
                for at in inspector.undone}), inspector.called


def is_unfinished(answer: str, gold: str) -> bool:
    """Does an answer leave more arithmetic undone than the gold answer, as 48+24 does for 72?"""
    if clean(answer) == clean(gold):
        return False
    count, called = undone(answer)
    most, known = undone(gold) if count or called else (0, called)
    return count > most or not called <= known


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
