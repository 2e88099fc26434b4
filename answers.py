r"""
Are two answers equal? is_equal(r"\frac12", "0.5") is True. can_read(gold): can it be compared?

An answer is a function of its variables. The reader computes while it parses, at given values of
the variables, so there is no syntax tree. Answers are equal if their readings are, at each of six
fixed points (at one, if they have no variables). A reading is

    Number               complex, in 100 digits; equal if 50 agree, so that nothing is ever close
    Group(kind, items)   tuples, intervals, lists, sets, unions; also 50% and 3 mod 7
    Relation             x = 5 or 0 < x <= 1: operators and sides, with the tokens of each side

A wrong answer accepted is the worst error: it trains the wrong thing. So a decimal equals a
fraction only if it has six digits and rounds to it, several answers never equal one of them, and no
answer is the empty string.

Counters bound the work, not clocks; an answer that runs into a limit still equals itself. Only the
standard library, so no computer algebra: sums and integrals are compared as text.

Choices where graders disagree: 50% is 0.5 and also 50; lists and sets have no order, tuples do; 52
stands for 52_8; a chain of equations with two different numbers (x = 41 = 42) is wrong; 32, 349 is
two numbers; units are dropped unless both sides have one of a kind and they differ; 2:3 is 2/3; a
row is no column; 10 mod 7 is 3.
"""
import math
import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation, Underflow, localcontext
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

MAX_ANSWER = 6_000     # characters that are parsed; a longer answer equals only itself
MAX_WORK = 4_000       # operands and comparisons, about 5 us each


# -----------------------------------------------------------------------------
# 1. Clean-up: answer text -> plain text that the tokenizer reads

def pairs(text: str) -> dict:
    r"""'≤ \le  ≥ \ge' -> {'≤': '\le ', '≥': '\ge '}; the space keeps x\cdot y apart."""
    words = text.split()
    return {spelling: plain + " " for spelling, plain in zip(words[::2], words[1::2])}


END_OF_TURN = re.compile(r"<\|im_end\|>|<\|endoftext\|>|<\|im_start\|>|<\|eot_id\|>|</s>")
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
LOWERED = "₀₁₂₃₄₅₆₇₈₉"
SCRIPTS = re.compile(f"([{RAISED}]+)|[{LOWERED}]+")
# Not NFKC: that would read 4² as 42. Digits of other scripts are left alone: they never equal 0-9.
UNICODE = str.maketrans({
    **pairs(r"""÷ /  √ \sqrt  ∛ \sqrt[3]  π \pi  ∞ \infty  º °  ≤ <=  ≥ >=  ⩽ <=  ⩾ >=
≠ !=  ∪ \cup  ∈ \in  ∅ \emptyset  θ \theta  α \alpha  β \beta  λ \lambda  、 ,
⟨ \langle  ⟩ \rangle  ⌊ \lfloor  ⌋ \rfloor  ⌈ \lceil  ⌉ \rceil  ± \pm  ∓ \mp
½ \frac{1}{2}  ⅓ \frac{1}{3}  ⅔ \frac{2}{3}  ¼ \frac{1}{4}  ¾ \frac{3}{4}"""),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63", "-"),
    **dict.fromkeys("\u00b7\u00d7\u2217\u2219\u22c5", "*"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\u2061\u2062\ufeff€£¥₹", ""),
    **dict(zip(RAISED + LOWERED, "0123456789+-n0123456789")),
    **{0xFF01 + i: chr(0x21 + i) for i in range(94)},  # full-width
    **{0x1D7CE + digit: str(digit % 10) for digit in range(50)},  # bold, double-struck, ...
})
RENAME = pairs(r"""dfrac \frac  tfrac \frac  cfrac \frac  dbinom \binom  tbinom \binom  lt <  gt >
le <=  leq <=  leqslant <=  ge >=  geq >=  geqslant >=  ne !=  neq !=  in =  equiv =  approx ≈
sim ≈  simeq ≈  cdot *  times *  ast *  div /  lvert |  rvert |  vert |  mid |  lbrace \{
rbrace \}  lbrack [  rbrack ]  lparen (  rparen )  colon :  varnothing \emptyset  ldots ...
dots ...  cdots ...  degree °  bmod \mod  pmod \mod  varphi \phi  vartheta \theta
varepsilon \epsilon""")

TRIG = frozenset("sin cos tan cot sec csc".split())
FUNCTIONS = TRIG | frozenset("""arcsin arccos arctan arccot sinh cosh tanh arcsinh arccosh arctanh
ln log lg exp sqrt max min gcd lcm floor ceil abs""".split())
INVERSE = {a + name: "arc" + name  # asin, arsinh -> arcsin
           for a in ("a", "ar") for name in "sin cos tan sinh cosh tanh".split()}


def unwrap_text(match: re.Match) -> str:
    r"""A formula, a function's name, "and" and "or" lose \text{ }; the rest is «words»."""
    word = match[1].strip(" .")
    is_formula = re.fullmatch(r"(?is).?|\d.*|.*\\.*|[^a-z]*|[ ,;]*(and|or)[ ,;]*", word)
    if is_formula or INVERSE.get(word, word) in (*FUNCTIONS, "mod") and word != "min":  # minutes
        return f" {word} "
    return f" «{word}» "


TEXT = (r"\\(?:text(?:bf|rm|it|tt|normal)?|math(?:rm|bf|it|sf|cal)|[mh]box|emph|operatorname|bm)\*?"
        r"\s*\{([^{}]*)\}")
NO_LETTER = "(?![A-Za-z])"
REWRITES = [  # in this order
    (r"[^\S\n]", " "),
    (r"(?<!\\)\\\\(?=[A-Za-z]{2})(?!.*\\end\b)", r"\\"),  # a doubly escaped \\frac
    (r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=[0-9]{3})|\{,\}|,\s*\\!\s*(?=[0-9]{3})", ","),  # 1{,}234
    (r"\\(?:[()$]|(?=%))|(?<!\\)\\(?:[\[\],!]|(?=\|))", ""),
    (r"\\m?(?:left|right)" + NO_LETTER + r"\.?", ""),
    (r"\\(?:[bB]igg?[lrm]?|(?:display|text)style|boxed|fbox|(?:no)?limits|bf|rm|it|boldsymbol"
     r"|(?:measured)?angle)" + NO_LETTER, ""),
    (r"\{([^{}\\]{1,40})\\choose" + NO_LETTER + r"([^{}\\]{1,40})\}", r"\\binom{\1}{\2}"),
    (r"(?<!\\)\\[;: ]|\\q?quad|\\(?:thin|med|en)space" + NO_LETTER, " "),
    (r"\\([A-Za-z]+)", lambda match: RENAME.get(match[1], match[0])),
    (r"\\mathbb\s*\{?\s*R\b\s*\}?", r"(-\\infty,\\infty)"),
    (r"\\begin\s*\{(?:[pbB]|small)?(matrix|cases|array)\}((?<=y\})\s*\{[^{}]*\})?", r"\\\1 "),
    (r"\\end\s*\{[A-Za-z]*\}", r"\\end "),
    (TEXT, unwrap_text),
    (TEXT, unwrap_text),  # \text{\textbf{...}}
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\circ" + NO_LETTER, "°"),
    (r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s*\{([0-9]{1,20})\}",  # 80 digits of it
     lambda match: f"{match[1] or 0}.{match[2]}{(match[3] * 80)[:80]} "),
    (r"[$~]", ""),
    # {x | x > 3}
    (r"^\s*\\\{\s*[A-Za-z]\s*(?:=\s*\(-\\infty,\\infty\)\s*)?[|:](.*)\\\}[\s.]*$", r"\1"),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"(?i)\(\s*\\?mod" + NO_LETTER + r"\s*([^()]{1,20})\)", r"\\mod{\1}"),  # (mod 7)
    (r"(?i)(\^(?:\{[^{}]{1,20}\}|[0-9a-z]))(_(?:\{[^{}]{1,20}\}|[0-9a-z]))", r"\2\1"),  # x^2_1
    (r"(?i)(?<=[0-9])\s*\^\s*\{?\s*«(?:st|nd|rd|th)»\s*\}?", ""),
    (r"(?i)(?<=1)st$|(?<=2)nd$|(?<=3)rd$|(?<=[0-9])th$", ""),
    (r"(?i)^\s*«?(?:option|choice|answer)[\s:»]*(?=[«(]*[a-z][)»]*\s*$)", ""),
    (r"(?i)(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup "),
    (r"(?i)(?<![a-z])([ap])\.\s?m\.?(?![a-z])", r"\1m"),
    (r"(?<![0-9.,/^_}])(?<![/^] )([0-9]{1,9})\s+([0-9]{1,9})\s*/\s*([0-9]{1,9})(?![0-9.])",
     r"(\1+\2/\3)"),  # 1 1/2
    (r"(?i)^\s*(?:(?:USD|US|EUR|GBP|INR|CNY|Rs)\.?"
     r"|«(?:the |final |answer |is |are |about |:)*(?:is|are|about|:)»)\s*(?=[-+0-9.\\(])", ""),
    (r"(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9]|/)",
     lambda match: match[0].replace(" ", "")),  # 1 000
    (r"(?i)(?<![a-z\\])(?:and|or)(?![a-z])", " , "),
    (r"\*\*", "^"),
]
REWRITES = [(re.compile(pattern), to) for pattern, to in REWRITES]
DEEP = re.compile(r"(\{{6,}|\({6,})([^{}()]*)([})]{6,})")  # a known attack on parsers
COUNT = "zero one two three four five six seven eight nine ten eleven twelve".split()
SPELLED = {word: str(number) for number, word in enumerate(COUNT)}
SPELLED["all real numbers"] = r"(-\infty,\infty)"
SPELLED["no solution"] = SPELLED["no solutions"] = r"\emptyset"


def clean(s: str) -> str:
    """Spelling variants out, meaning kept: unicode, styling, spacing, text wrappers, "and"."""
    s = s.replace("\f", "\\f").replace("\b", "\\b").strip()  # "\frac", unescaped once
    deep = DEEP.fullmatch(s)
    if deep and len(deep[1]) == len(deep[3]):
        s = deep[2].strip()
    if len(s) > 2 * MAX_ANSWER:
        return s
    s = END_OF_TURN.sub("", s).strip()
    s = SCRIPTS.sub(lambda match: "^_"[not match[1]] + f"{{{match[0]}}}", s)  # x⁻² is x^{-2}
    s = s.translate(UNICODE)
    if s.lstrip("-").isdecimal():  # most answers
        return s
    if len(s) > 2 and s[0] in "*`_" and s[-1] in "*`_":  # Markdown
        s = s.strip("*`_")
    for pattern, to in REWRITES:
        s = pattern.sub(to, s)
    s = s.strip(" \n,;")
    if not s.endswith(".."):
        s = s.rstrip(".:\\ \n")
    return SPELLED.get(s.strip("« »").lower(), s)


# Synonyms are joined by "=". Two units of one family, the last one apart, make two answers.
FAMILIES = (
    "mm=millimeter cm=centimeter=centimetre dm m=meter=metre km=kilometer=kilometre inch=in=inches "
    "foot=feet=ft yard=yd mile=mi",
    "second=sec=s minute=min hour=hr=h day week month year",
    "dollar=usd cent euro pound rupee yuan yen",
    "am pm",
    "mg g=gram kg=kilogram lb ounce=oz ton",
    "liter=litre ml gallon quart",
    "mph kmh m/s",
    "degree=deg radian=rad",
    "unit square cubic sq cu per people student way point time",
)
UNIT = {}  # word, in singular or plural -> (family, name)
for family, units in enumerate(FAMILIES):
    for names in (unit.split("=") for unit in units.split()):
        for word in names:
            UNIT[word] = UNIT[word + "s" * (len(word) > 1)] = (family, names[0])
NOT_UNITS = frozenset("""and or is not but if no to than more less none either neither nor where for
with mod thousand million hundred billion dozen half squared cubed over pi sqrt sin cos tan log ln
exp most least plus minus negative factorial""".split())
MULTIPLIER = pairs("""thousand *10^3  million *10^6  billion *10^9  trillion *10^12
percent %  pct %  percentage %""")
WORDS = r"(?:[A-Za-z]{2,}\.?(?:/[A-Za-z]+)?\s+){0,3}(?:[A-Za-z]{2,}(?:/[A-Za-z]+)?\.?|m/s)"
UNIT_END = re.compile(
    rf"(?:«([^«»]*)»|(?:(?<=[0-9)}}%])\s*|\s)({WORDS}))(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?\s*\.?$")
BARE_NUMBER = re.compile(r"[-+]?[0-9.,/\s]*(\\frac\s*\{[0-9]+\}\s*\{[0-9]+\})?[%°]?")


def split_unit(s: str) -> tuple[str, tuple | None]:
    """"12 cm" -> "12" and its unit: «text», a known unit, or any few words after a number.

    Words that change the value stay ("not", "half") or are applied: "5 million" -> 5*10^6.
    """
    end = UNIT_END.search(s) if s[-1:].isalpha() or s[-1:] in tuple("23}.»") else None
    if end is None:
        return s, None
    wrapped, plain = end.groups()
    value = s[:end.start()].strip()
    words = (wrapped or plain or "").lower().strip(" .").split()
    if plain and not all(word in UNIT for word in words):
        shortest = 3 if s[end.start(2) - 1].isspace() else 4  # not 6xy; 5 men
        if not BARE_NUMBER.fullmatch(value) or max(map(len, words)) < shortest:
            return s, None
    if words and words[0] in MULTIPLIER:
        value += MULTIPLIER[words.pop(0)].strip()
    if NOT_UNITS.intersection(words) or not re.search(r"[0-9A-Za-z})°%]$", value):
        return s, None
    return value, UNIT.get(" ".join(words))


# -----------------------------------------------------------------------------
# 2. Numbers: complex, in 100 digits

CONTEXT = Context(prec=100, Emax=MAX_EMAX, Emin=MIN_EMIN)
CONTEXT.traps[Underflow] = True
ROUNDING = Decimal("1e-50")    # a smaller difference, or part of a number, is rounding
LOST = Decimal("1e-45")        # a smaller term of a sum has lost its digits
MAX_WHOLE = 10 ** 45
TURN = Decimal("6.28318530717958647692528676655900576839433879875021164194988918461563281257241799"
               "72560696506842341359642961730265646132941876892")
ZERO = Decimal(0)


class Number(NamedTuple):
    re: Decimal
    im: Decimal = ZERO
    digits: int = 0        # of a decimal as it was written, from the first that is not 0

    kind = "number"
    __hash__ = tuple.__hash__  # of the digits, for the caches

    def __eq__(self, other):
        """But for rounding, which whole numbers have none of."""
        if self.is_whole() and other.is_whole():
            return self.re == other.re
        apart = max(abs(self.re - other.re), abs(self.im - other.im))
        return apart <= ROUNDING * max(self.size(), other.size())

    def __add__(self, other):
        """Where rounding would decide there is no value."""
        total = Number(self.re + other.re, self.im + other.im)
        small, large = sorted((self.size(), other.size()))
        if 0 < small < LOST * large:
            raise ArithmeticError("digits are lost")
        return settle(*total[:2]) if total.size() > ROUNDING * large else Number(ZERO)

    def __mul__(self, other):
        re = self.re * other.re - self.im * other.im
        return settle(re, self.re * other.im + self.im * other.re)

    def __truediv__(self, other):
        norm = other.re * other.re + other.im * other.im
        return self * Number(other.re / norm, -other.im / norm)

    def __neg__(self):
        return Number(self.re.copy_negate(), -self.im, self.digits)  # no -0, for ln

    def __sub__(self, other):
        return self + -other

    def __abs__(self):
        return settle((self.re * self.re + self.im * self.im).sqrt(), ZERO)

    def size(self) -> Decimal:
        return max(abs(self.re), abs(self.im))

    def real(self) -> Decimal:
        if self.im:
            raise ArithmeticError("complex numbers have no order")
        return self.re

    def is_whole(self) -> bool:
        return self.im == 0 and self.re == self.re.to_integral_value()

    def whole(self, limit: int = MAX_WHOLE) -> int:
        if not self.is_whole() or abs(self.re) > limit:
            raise ArithmeticError("not whole, or too large")
        return int(self.re)


class Group(NamedTuple):
    kind: str              # brackets such as "()" or "(]", "list", "set", "union", "%" or "mod"
    items: list            # a matrix is a tuple of its rows, a column the tuple of its cells


class Side(NamedTuple):
    value: object          # a reading
    tokens: list


class Relation(NamedTuple):
    kind: str              # "eq" for an equation, else "rel"
    ops: list              # "=", "<", "<=", "!=", "≈"; chains of > are turned round
    sides: list            # of Side, one more than ops


def settle(re: Decimal, im: Decimal) -> Number:
    """A result without what only rounding left."""
    rounding = ROUNDING * max(abs(re), abs(im))
    whole = re.to_integral_value()
    return Number(whole if abs(re - whole) <= rounding else re, im if abs(im) > rounding else ZERO)


def unknown(*key) -> Number:
    """Some number from 4096 to 8192 in place of one that is beyond us: it equals itself."""
    texts = [f"{x.re:.40e} {x.im:.40e}" if isinstance(x, Number) else repr(x) for x in key]
    return Number(Decimal(2 ** 32 + crc32(" ".join(texts).encode("utf-8", "replace"))) / 2 ** 20)


def number(x) -> Number:
    """50% is 1/2 and 10 mod 7 is 3 once something is computed with them."""
    if x.kind == "number":
        return x
    if x.kind == "%":
        return x.items[0] / HUNDRED
    if x.kind in ("eq", "rel"):
        raise SyntaxError("no number")
    return x.items[0] if x.kind == "mod" else unknown(x)


EXACT = {  # of whole numbers of up to 1,000 digits, if the result is one too
    "+": int.__add__,
    "*": int.__mul__,
    "/": lambda a, b: None if a % b else a // b,
    "^": lambda a, b: a ** b if 0 <= b * a.bit_length() <= 6_600 else None,  # 0^0 is 1
    r"\mod": int.__mod__,
}


def power(x: Number, n: Number) -> Number:
    """Roots are powers too: real ones for negative x and odd roots, as in school."""
    if x.im == n.im == 0 <= x.re and not 0 < n.size() < LOST:
        return settle(x.re.sqrt() if n == HALF else x.re ** n.re, ZERO)
    for degree in range(1, 20, 2):
        times = n * Number(Decimal(degree))
        if x.im == 0 and times.is_whole():
            root = power(-x, n)
            return -root if times.re % 2 else root
    return exp(n * ln(x))


def circle(angle: Decimal) -> list:
    """[cos, sin] by their series."""
    if abs(angle) > 10 ** 25:
        raise ArithmeticError("no angle")
    angle = angle.remainder_near(TURN)
    sums = [ZERO, ZERO]
    term = Decimal(1)
    for n in range(85):
        sums[n % 2] += term if n % 4 < 2 else -term
        term = term * angle / (n + 1)
    return sums


@lru_cache(1_000)
def exp(z: Number) -> Number:
    if 0 < z.size() < LOST:
        raise ArithmeticError("hardly 1")
    length = z.re.exp()
    cos, sin = circle(z.im)
    return settle(length * cos, length * sin)


@lru_cache(1_000)
def ln(z: Number) -> Number:
    """The angle by Newton's method from a float: 16, 48, 144 digits."""
    if z.im == 0 and z.re > 0:
        return settle(z.re.ln(), ZERO)
    length = abs(z).re
    angle = Decimal(math.atan2(z.im / length, z.re / length))
    for _ in range(2):
        cos, sin = circle(angle)
        angle += (z.im * cos - z.re * sin) / length
    return settle(length.ln(), angle)


def floor(x: Number) -> Number:
    if abs(x.real()) > MAX_WHOLE:
        raise ArithmeticError("digits are lost")
    return Number(Decimal(math.floor(x.re)))


def step(x: Number) -> Number:
    """For floor of what varies, which has too few values: x less some function of x mod 1."""
    part = (x - floor(x)).real()
    return x - unknown(f"{part:.6f}") / Number(Decimal(2 ** 14)) if part else x


ONE, TWO, TEN, HUNDRED, HALF = (Number(Decimal(text)) for text in "1 2 10 100 0.5".split())
I = Number(ZERO, Decimal(1))
PI = Number(CONTEXT.divide(TURN, 2))
E = Number(CONTEXT.exp(Decimal(1)))
FORMULAS = {
    "+": Number.__add__,
    "*": Number.__mul__,
    "/": Number.__truediv__,
    "^": power,
    r"\mod": lambda x, n: x - n * floor(x / n),
    "exp": exp,
    "ln": ln,
    "log": lambda z, base=E: ln(z) / ln(base),
    "lg": lambda z, base=TEN: ln(z) / ln(base),
    "sinh": lambda z: (exp(z) - exp(-z)) / TWO,
    "cosh": lambda z: (exp(z) + exp(-z)) / TWO,
    "tanh": lambda z: ONE - TWO / (exp(z + z) + ONE),
    "arcsinh": lambda z: ln(z + power(z * z + ONE, HALF)),
    "arccosh": lambda z: ln(z + power(z - ONE, HALF) * power(z + ONE, HALF)),
    "arctanh": lambda z: ln((ONE + z) / (ONE - z)) / TWO,
    "sin": lambda z: FORMULAS["sinh"](I * z) / I,
    "cos": lambda z: FORMULAS["cosh"](I * z),
    "tan": lambda z: FORMULAS["tanh"](I * z) / I,
    "cot": lambda z: FORMULAS["tan"](PI / TWO - z),
    "sec": lambda z: ONE / FORMULAS["cos"](z),
    "csc": lambda z: ONE / FORMULAS["sin"](z),
    "arcsin": lambda z: FORMULAS["arcsinh"](I * z) / I,
    "arccos": lambda z: PI / TWO - FORMULAS["arcsin"](z),
    "arctan": lambda z: FORMULAS["arctanh"](I * z) / I,
    "arccot": lambda z: PI / TWO - FORMULAS["arctan"](z),
    "abs": abs,
    "max": lambda *args: max(args, key=Number.real),
    "min": lambda *args: min(args, key=Number.real),
    "floor": floor,
    "ceil": lambda x: -floor(-x),
    "floor of a variable": step,
    "ceil of a variable": lambda x: -step(-x),
    "factorial": lambda n: math.factorial(n.whole(3_000)),
    "binom": lambda n, k: math.comb(n.whole(3_000), k.whole()),
    "gcd": lambda *args: math.gcd(*map(Number.whole, args)),
    "lcm": lambda *args: math.lcm(*map(Number.whole, args)),
}
RANGES = ((0.96, 1), (0.96, 1), (1, 1.045), (2, 5), (2, 5), (13, 33))


class Point:
    """Values of the variables at one point; and the budget of the whole comparison."""

    def __init__(self, names):
        # In which of the points 1, 3, 5 a name is negative, as bits; two names differ somewhere.
        self.signs = {name: (3, 5, 6, 7, 1, 2, 4)[i % 7] for i, name in enumerate(sorted(names))}
        self.work = MAX_WORK
        self.factors = {}  # between equations, see proportional()
        self.index = 0
        self.met_complex = False  # were complex numbers compared?

    def spend(self, amount: int):
        self.work -= amount
        if self.work < 0:
            raise SyntaxError("work")

    def variable(self, name: str) -> Number:
        """Near 1, so that x^{2004} keeps its digits, then larger, then whole, for factorials."""
        seed = crc32(f"{self.index}:{name}".encode("utf-8", "replace"))
        if self.index >= len(RANGES):
            return Number(Decimal(1 + seed % 15))
        low, high = RANGES[self.index]
        value = Number(Decimal(low + (high - low) * seed / 2 ** 32))
        negative = self.index % 2 and self.signs.get(name, 0) >> self.index // 2 & 1
        return -value if negative else value

    def compute(self, op: str, x, y):
        """Numbers, two tuples of one length, a tuple by a number."""
        if op == "-":
            return self.compute("+", x, self.compute("*", y, -ONE))
        if x.kind == y.kind == "()" and op == "+" and len(x.items) == len(y.items):
            return Group("()", [self.compute("+", a, b) for a, b in zip(x.items, y.items)])
        if y.kind == "()" and op == "*":
            x, y = y, x
        y = number(y)
        if x.kind == "()" and op in "*/":
            return Group("()", [self.compute(op, item, y) for item in x.items])
        x = number(x)
        is_root = op == "^" and not (x.im == 0 and (y + y).is_whole())
        return self.apply(op, x, y, work=50 if is_root else 2)

    def apply(self, name: str, *args, work=60) -> Number:
        """A value; where nothing varies, what needs more digits is unknown, unlike 1/0."""
        self.spend(work)
        args = [number(x) for x in args]
        if name in EXACT and all(x.is_whole() and x.re.adjusted() <= 1_000 for x in args):
            value = EXACT[name](*(int(x.re) for x in args))
            if value is not None:
                return Number(Decimal(value))
        try:
            value = FORMULAS[name](*(x._replace(re=+x.re) for x in args))  # in 100 digits
        except ArithmeticError as error:
            if self.signs or isinstance(error, (ZeroDivisionError, InvalidOperation)):
                raise
            return unknown(name, *(sorted(args) if name == "+" else args))
        if isinstance(value, int):
            value = Number(Decimal(value))
            if self.signs and value.size() == 0:  # n over k for any k > n
                raise ArithmeticError("says nothing")
        return value


# -----------------------------------------------------------------------------
# 3. Reader: plain text -> tokens -> reading

RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "≈")
RELATION, RATIO, UNION, MOD, SUM, PRODUCT, MIXED, POWER, POSTFIX = range(1, 10)
BINDING = {
    **dict.fromkeys(RELATIONS, RELATION), ":": RATIO, r"\cup": UNION, r"\mod": MOD,
    "+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "%": PRODUCT, "beside": PRODUCT,
    "mixed": MIXED, "^": POWER, "!": POSTFIX, "°": POSTFIX, "": 0,
}
MATRICES = (r"\matrix", r"\array", r"\cases")
CLOSERS = {
    "(": (")", "]"), "[": (")", "]"), "{": ("}",), r"\{": (r"\}",), r"\langle": (r"\rangle",),
    "|": ("|",), r"\lfloor": (r"\rfloor",), r"\lceil": (r"\rceil",),
}
ENCLOSING = {"|": "abs", r"\lfloor": "floor", r"\lceil": "ceil"}
COMMANDS = frozenset("\\" + name for name in FUNCTIONS)
STARTS = {*CLOSERS, *COMMANDS, *MATRICES, r"\frac", r"\binom", r"\emptyset"}
BARE_STOPS = COMMANDS | {"*", "/", "("}  # \sin 2x \cos y
INFINITY = unknown("infinity")
CONSTANTS = {"«e": E, "«i": I, r"«\pi": PI, r"«\infty": INFINITY}

FRAMES = "overline|overrightarrow|vec|hat|bar|widehat|tilde|underline|mathbb|mathcal|mathfrak"
GREEK = ("alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
         "|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell|hbar|pi|infty")
SUBSCRIPT = r"\s*_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[0-9]+|[A-Za-z])"
MARKS = rf"(?:{SUBSCRIPT})?(?:\s*')*"
TOKEN = re.compile(rf"""\s*(?:
      (?P<name> «[^«»]*»{MARKS}
        | [0-9]{{1,50}}(?:\.[0-9]{{1,50}})?{SUBSCRIPT}
        | (?<![A-Za-z])[fghFG](?:\s*')*\s*\([^()]*\)
        | \\(?:{FRAMES}){NO_LETTER}\s*(?:\{{[^{{}}]*\}}|[A-Za-z0-9]){MARKS}
        | \\(?:{GREEK}){NO_LETTER}{MARKS}
        | (?:[A-Za-z]{{4,}}|[A-Za-z]){MARKS} )
    | [0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}}(?![0-9A-Za-z]))? | \.[0-9]+
    | \\[A-Za-z]+ | \\\\ | \\[{{}}]
    | !!(?!=) | [<>!]= | \S )""", re.VERBOSE)
PLAIN_NAMES = sorted([*FUNCTIONS, *INVERSE, "pi", "mod"], key=len, reverse=True)
PLAIN_FUNCTION = re.compile(
    rf"\\?(?<![A-Za-z])({'|'.join(PLAIN_NAMES)})(?=[A-Za-z]?{NO_LETTER})"
    rf"|(?<![A-Za-z\\])(?:inf|infty|oo|infinity|Infinity){NO_LETTER}")
DIGITS = tuple("0123456789.")  # what a number begins with


def tokenize(s: str) -> list[str]:
    """Numbers, operators, commands, and names, which begin with "«": «x, «x_10, «f(2), «blue.

    In plain letters pi, inf, sinx and pix are read as in LaTeX, other words of up to three letters
    are a product, longer ones a name.
    """
    s = PLAIN_FUNCTION.sub(lambda match: f"\\{INVERSE.get(match[1], match[1] or 'infty')} ", s)
    return ["«" + re.sub(r"[\s{}«»]", "", match[0]) if match["name"] else match[0].strip()
            for match in TOKEN.finditer(s)]


class Reader:
    """Precedence climbing over the tokens of one answer, which computes as it goes."""

    def __init__(self, tokens: list[str], point: Point):
        self.tokens = [*tokens, ""]  # "" marks the end
        self.point = point
        self.at = 0
        self.trig = 0  # inside so many arguments of sin, cos, ...
        self.stops = frozenset()  # tokens that end the operand at hand: the second | of |x|

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self, *allowed) -> str:
        token = self.peek()
        if allowed and token not in allowed:
            raise SyntaxError(f"unexpected {token}")
        self.at += 1
        return token

    def accept(self, *tokens) -> str:
        return self.take() if self.peek() in tokens else ""

    def rows(self, between: str, after: str, closers: tuple) -> list:
        """Rows of items up to a closer: "1,2;3,4", or a matrix with & and two backslashes."""
        rows = [[]]
        while True:
            self.accept("=", "≈")  # "= 5" is 5
            rows[-1].append(self.expression(stops=frozenset(closers)))
            separator = self.accept(between, after)
            while self.accept(between, after):  # "(1,2), and (3,4)" after clean-up
                pass
            if not separator or self.peek() in ("", *closers):
                self.take(*closers)
                return rows
            if separator == after:
                rows.append([])

    def listing(self, closers: tuple) -> list:
        rows = self.rows(",", ";", closers)
        if len(rows) > 1 and max(map(len, rows)) > 1:
            return [one_or_list(row) for row in rows]
        return [item for row in rows for item in row]

    def expression(self, floor: int = 0, stops=None):
        """One operand and every operator after it that binds tighter than `floor`."""
        self.point.spend(1)
        outer = self.stops
        self.stops = outer if stops is None else stops
        start = self.at
        while self.peek() in ("+", "-"):
            self.at += 1
        signs = self.tokens[start:self.at]
        value = self.expression(max(floor, SUM)) if signs else self.primary()
        if signs.count("-") % 2:
            value = -value if value.kind == "number" else self.point.compute("*", value, -ONE)
        while BINDING[op := self.operator()] > floor:
            value = self.infix(value, op, start)
        self.stops = outer
        return value

    def operator(self) -> str:
        r"""The operator at hand, "" for none; those of 2x and 1\frac12 are "beside" and "mixed"."""
        token = self.peek()
        before = self.tokens[self.at - 1]
        if token in self.stops:
            return ""
        if token in BINDING:
            return token
        if token == r"\frac" and before[0] in DIGITS:
            return "mixed"
        if token[0] in DIGITS and before[0] in ("«", *DIGITS):
            return ""  # neither "5 6" nor "x2"
        return "beside" if token in STARTS or token[0] in ("«", *DIGITS) else ""

    def infix(self, left, op: str, start: int):
        """`left op right`; `start` is the token that `left` begins with."""
        compute = self.point.compute
        if op in RELATIONS:
            return self.relation(left, start)
        if op in ("beside", "mixed"):
            before = self.tokens[self.at - 1]
            right = self.expression(BINDING[op])
            is_mixed = op == "mixed" and left == self.literal(before) and 0 < number(right).re < 1
            return compute("+" if is_mixed else "*", left, right)
        self.take()
        if op == "^":
            right = self.primary() if self.peek() == "{" else self.expression(POWER - 1)
            return compute("^", left, right)
        if op == "!":
            return self.point.apply("factorial", left)
        if op == "%":  # of all so far: 3\frac14%
            return Group("%", [number(left)])
        if op == "°":
            self.accept("«C", "«F")
            return compute("*", left, PI / Number(Decimal(180))) if self.trig else left
        right = self.expression(BINDING[op])
        if op == r"\cup":
            parts = [x.items if x.kind == "union" else [x] for x in (left, right)]
            return Group("union", parts[0] + parts[1])
        if op == ":" and (self.peek() == ":" or right == Number(ZERO)):  # 1:2:3, 5:00, not 2:3
            items = [left, right]
            while self.accept(":"):
                items.append(self.expression(RATIO))
            return Group("()", items)
        value = compute("/" if op == ":" else op, left, right)
        return Group("mod", [value, right]) if op == r"\mod" else value

    def relation(self, left, start: int):
        """A chain of equalities is left = value, or its value if every side is a number: the last
        before an approximation. Two that disagree, 41 = 42, have none.
        """
        ops = []
        sides = [Side(left, self.tokens[start:self.at])]
        while self.peek() in RELATIONS:
            ops.append(self.take())
            start = self.at
            value = self.expression(RELATION)
            sides.append(Side(value, self.tokens[start:self.at]))
        if ">" in ops[0]:
            ops = [op.translate(str.maketrans("<>", "><")) for op in reversed(ops)]
            sides.reverse()
        if not set(ops) <= {"=", "≈"}:
            return Relation("rel", ops, sides)
        if "≈" in ops and not label(sides[ops.index("≈")].tokens):
            sides = sides[:ops.index("≈") + 1]
        numbers = [x.value for x in sides if x.value.kind in SCALAR and not names_in(x.tokens)]
        if not all(same_number(a, b, self.point) for a, b in zip(numbers, numbers[1:])):
            raise SyntaxError("false equation")
        if len(sides) in (1, len(numbers)):
            return sides[-1].value
        return Relation("eq", ["="], [sides[0], sides[-1]])

    def primary(self):
        token = self.take()
        if token[:1] in DIGITS:
            return self.literal(token)
        if token[:1] == "«":
            return CONSTANTS[token] if token in CONSTANTS else self.point.variable(token)
        if token in ENCLOSING:
            return self.function(ENCLOSING[token], token)
        if token in CLOSERS:
            return self.group(token)
        if token == r"\frac":
            return self.point.compute("/", self.argument(), self.argument())
        if token == r"\binom":
            return self.point.apply("binom", self.argument(), self.argument())
        if token in MATRICES:
            return self.matrix(token)
        if token == r"\emptyset":
            return Group("set", [])
        if token in COMMANDS:
            return self.function(token[1:])
        raise SyntaxError(f"unexpected {token}")

    def literal(self, token: str):
        value = Decimal(token)
        is_decimal = token.partition(".")[2].isdigit()
        return Number(value, ZERO, len(value.as_tuple().digits) if is_decimal else 0)

    def group(self, opener: str):
        items = self.listing(CLOSERS[opener])
        closer = self.tokens[self.at - 1]
        kind = {"{": "list", r"\{": "set", r"\langle": "()"}.get(opener, opener + closer)
        if kind == "[]" and all(item.kind == "[]" for item in items):  # [[1, 2], [3, 4]]
            return Group("()", [Group("()", row.items) for row in items])
        return items[0] if len(items) == 1 and kind in ("()", "[]", "list") else Group(kind, items)

    def argument(self):
        r"""A LaTeX argument: a group, or one digit or token (\frac12, \frac1{72})."""
        token = self.peek()
        if len(token) > 1 and token.isdigit():
            self.tokens[self.at] = token[1:]
            return self.literal(token[0])
        return self.expression(POSTFIX)  # nothing binds tighter: one primary

    def function(self, name: str, opener: str = ""):
        if name == "sqrt":
            [degree] = self.listing(("]",)) if self.accept("[") else [TWO]
            return self.point.compute("^", self.expression(POSTFIX), ONE / number(degree))
        marks = {}  # base and exponent
        while mark := self.accept("_", "^"):
            marks[mark] = self.argument()
        exponent = marks.pop("^", ONE)
        if exponent == -ONE and name in TRIG:
            name = "arc" + name
            exponent = ONE
        self.trig += name in TRIG
        start = self.at
        if opener := opener or self.accept("(", "{", r"\{"):
            arguments = self.listing(CLOSERS[opener])
        else:
            arguments = [self.expression(SUM, self.stops | BARE_STOPS)]
        self.trig -= name in TRIG
        if name in ("floor", "ceil") and names_in(self.tokens[start:self.at]):
            name += " of a variable"
        value = self.point.apply(name, *arguments, *marks.values())
        return value if exponent == ONE else self.point.compute("^", value, exponent)

    def matrix(self, token: str):
        rows = self.rows("&", r"\\", (r"\end",))
        if token == r"\cases":  # a system, or values and conditions
            return Group("list", [one_or_list(row) for row in rows])
        is_column = len(rows) > 1 and max(map(len, rows)) == 1
        return Group("()", [row[0] if is_column else Group("()", row) for row in rows])


def one_or_list(items: list):
    return items[0] if len(items) == 1 else Group("list", items)


THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")


class Answer:
    """A clean text as a function of its variables. `thousands`: 1,234 is one number, not two."""

    def __init__(self, s: str, thousands: bool = True):
        if thousands:
            s = THOUSANDS.sub(lambda match: match[0].replace(",", ""), s)
        upper = s.replace(r"\pm", "+").replace(r"\mp", "-")
        lower = s.replace(r"\pm", "-").replace(r"\mp", "+")
        self.branches = [tokenize(text) for text in dict.fromkeys((upper, lower))]
        # A name on the left of x = 5 need not vary: six times faster, and such answers are many.
        tokens = self.branches[0]
        start = tokens.index("=") + 1 if "=" in tokens else 0
        self.names = names_in(tokens[start:] if label(tokens[:start - 1]) else tokens)

    def at(self, point: Point):
        items = []
        for tokens in self.branches:
            items += Reader(tokens, point).listing(("",))
        if all(item.kind == "set" for item in items):
            return Group("set", [x for item in items for x in item.items])
        return one_or_list(items)


# -----------------------------------------------------------------------------
# 4. Comparison

SCALAR = ("number", "%", "mod")
BRACKETS = ("()", "[]", "(]", "[)")
LABEL_MARKS = {*"(){},*/:|", r"\frac", r"\langle", r"\rangle", *("\\" + f for f in TRIG)}


def names_in(tokens: list) -> set:
    return {token for token in tokens if token[0] == "«" and token not in CONSTANTS}


def label(tokens: list) -> str:
    r"""The text of a side that only names the answer: x, f(x), AB, (x, y), |AB|, \tan A; or ""."""
    for token in tokens:
        if token not in LABEL_MARKS and (token[0] != "«" or token in (r"«\infty", r"«\pi", "«i")):
            return ""
    return "".join(tokens)


def may_rename(a: str, b: str) -> bool:
    """Of two labels: x = 5 and k = 5 are one answer, f(1) = 0 and f(0) = 0 are not."""
    places = [re.findall(r"«.\((.*?[0-9].*?)\)", x) for x in (a, b)]
    return bool(a and b) and ([] in places or places[0] == places[1])


def same_number(a, b, point) -> bool:
    """50% is 50%, 0.5 and also 50: the sign is often in the question. 3 mod 7 is 10 mod 7 and 3."""
    if a.kind == b.kind == "mod" and not same(a.items[1], b.items[1], point):
        return False
    for one, other in ((a, b), (b, a)):
        if one.kind == "%" != other.kind and same_number(one.items[0], other, point):
            return True
    x = number(a)
    y = number(b)
    point.met_complex |= bool(x.im or y.im)
    return x == y or rounds_to(x, y) or rounds_to(y, x)


def rounds_to(decimal: Number, x: Number) -> bool:
    """A written decimal of six or more digits stands for the value x that it rounds. From ten
    digits on it may also truncate x, unless that is such a decimal too.
    """
    if not 6 <= decimal.digits <= 50 or x.im:  # more digits are as good as all
        return False
    error = abs(x.re - decimal.re)
    if decimal.digits >= 10 > x.digits:
        return error <= abs(decimal.re) / 10 ** 9
    return 2 * error <= ONE.re.scaleb(decimal.re.as_tuple().exponent)


def same(a, b, point) -> bool:
    """Are two readings the same answer at this point? Symmetric in a and b."""
    point.spend(1)
    a, b = sorted((a, b), key=lambda x: list(RULES).index(x.kind))
    return RULES[a.kind](a, b, point)


def in_order(a: list, b: list, point) -> bool:
    return len(a) == len(b) and all(same(x, y, point) for x, y in zip(a, b))


def in_any_order(a: list, b: list, point) -> bool:
    found = all(any(same(x, y, point) for y in b) for x in a)
    return found and all(any(same(x, y, point) for x in a) for y in b)


# The rules of RULES: `a` is of the rule's kind, `b` of the same or of a later one.

def same_relation(a, b, point) -> bool:
    """Up to a factor, or up to the name of what is found: x = 5, k = 5, 5 = x and 5 are one.
    Inequalities up to direction; longer chains side by side.
    """
    if b.kind != a.kind:
        name, value = named(a)
        found = value if name else interval(a) if a.kind == "rel" else None
        return found is not None and same(found, b, point)
    if a.ops != b.ops:
        return False
    if len(a.ops) > 1:
        return in_order([side.value for side in a.sides], [side.value for side in b.sides], point)
    sides = a.sides + b.sides
    labels = [label(side.tokens) for side in sides]
    renamed = may_rename(labels[0], labels[2]) and not (labels[1] and labels[3])
    if a.kind == "eq" and (renamed or sides[0].tokens == sides[2].tokens):
        if same(sides[1].value, sides[3].value, point):
            return True
    return proportional(sides, a.ops[0], point)


def proportional(sides, op, point) -> bool:
    """Sides 0 - 1 are c times sides 2 - 3, for one c at all points; positive for < and <=."""
    names = [names_in(side.tokens) for side in sides]
    are_scalar = all(side.value.kind in SCALAR for side in sides)
    if not (are_scalar and point.signs and names[0] | names[1] == names[2] | names[3]):
        return False
    x = point.compute("-", sides[0].value, sides[1].value)
    y = point.compute("-", sides[2].value, sides[3].value)
    quotient = point.compute("/", x, y)  # no value where y = 0 holds
    if quotient.size() == 0 or op in ("<", "<=") and quotient.real() < 0:
        return False
    key = repr([side.tokens for side in sides])
    return quotient == point.factors.setdefault(key, quotient)  # that of the first point


def interval(relation: Relation):
    r"""0 < x <= 1 -> (0, 1]; x > 3 -> (3, \infty); x != 3 -> a union. None for other relations."""
    _, ops, sides = relation
    free = [i for i, side in enumerate(sides) if len(side.tokens) == 1 and label(side.tokens)]
    if len(free) != 1 or ops != ["!="] and not set(ops) <= {"<", "<="}:
        return None
    at = free[0]
    if ops == ["!="]:
        bound = sides[1 - at].value
        return Group("union", [Group("()", [-INFINITY, bound]), Group("()", [bound, INFINITY])])
    low, _, high = [-INFINITY, *(side.value for side in sides), INFINITY][at:at + 3]
    before, after = ["<", *ops, "<"][at:at + 2]
    return Group("[("[before == "<"] + "])"[after == "<"], [low, high])


def named(x) -> tuple:
    """x = 5 and 5 = x -> ("«x", 5); other readings have the name ""."""
    if x.kind == "eq":
        for side, other in (x.sides, reversed(x.sides)):
            if label(side.tokens):
                return label(side.tokens), other.value
    return "", x


def solutions(x) -> tuple:
    """Names and values of the items; x = 1, y = 2, x = 3, y = 4 are two lists without a name."""
    items = x.items if x.kind in ("list", "set") else [x]
    names = [named(item)[0] for item in items]
    count = len(set(names))
    if all(names) and 1 < count < len(names) and names == names[:count] * (len(names) // count):
        items = [Group("list", items[i:i + count]) for i in range(0, len(names), count)]
    return [named(item)[0] for item in items], [named(item)[1] for item in items]


def same_collection(a, b, point) -> bool:
    """Lists and sets, against each other or against one answer of several parts.

    Named values (x = 1, y = 2) match by name, or in order against other names or none.
    """
    if b.kind == "union":  # x < 1 or x > 2
        return in_any_order(a.items, b.items, point)
    names, values = solutions(a)
    is_tuple = b.kind == "()" or b.kind in BRACKETS and len(b.items) > 2  # [1, 2] is an interval
    if a.kind == "list" and is_tuple:
        return in_order(values, b.items, point)
    other_names, others = solutions(b)
    if "" not in names + other_names and len(set(names)) == len(names) == len(others):
        if set(names) == set(other_names):
            others = [others[other_names.index(name)] for name in names]
            return in_order(values, others, point)
        if not all(may_rename(*pair) for pair in zip(names, other_names)):
            return False
    # Names that are not all x_1, x_2, ... of one family: their order counts.
    families = [{re.sub(r"_\w*", "", x) for x in part} for part in (names, other_names)]
    if any("" not in part and len(part) > 1 for part in families):
        return in_order(values, others, point)
    return in_any_order(values, others, point)


def same_brackets(a, b, point) -> bool:
    """Unions, intervals, tuples: brackets count, but round is square for three values or more."""
    if a.kind == "union":
        return b.kind == "union" and in_any_order(a.items, b.items, point)
    are_alike = a.kind == b.kind or b.kind in BRACKETS and len(a.items) > 2
    return are_alike and in_order(a.items, b.items, point)


RULES = {
    "eq": same_relation, "list": same_collection, "set": same_collection, "rel": same_relation,
    **dict.fromkeys(("union", *BRACKETS), same_brackets), **dict.fromkeys(SCALAR, same_number),
}


def same_function(a: Answer, b: Answer) -> bool:
    """Equal at the points where both have a value, of which there must be three.

    log x^2 and 2 log x agree where both are real: those points decide, if there are three.
    """
    if a.branches == b.branches:
        return True
    names = a.names | b.names
    point = Point(names)
    if not names:
        return same(a.at(point), b.at(point), point)
    verdicts = []  # (equal, with complex numbers?)
    while point.index < 20 and len(verdicts) < 6 and (False, False) not in verdicts:
        point.met_complex = False
        try:
            verdicts.append((same(a.at(point), b.at(point), point), point.met_complex))
        except (ArithmeticError, ValueError):  # a pole, lost digits
            pass
        point.index += 1
    if len(verdicts) < 3 or (False, False) in verdicts:
        return False
    are_real = verdicts.count((True, False)) >= 3 and "«i" not in a.branches[0] + b.branches[0]
    return are_real or all(equal for equal, _ in verdicts)


# "(C) 12 apples", not "(A) or (B)".
CHOSEN = re.compile(r"[«(]*([A-H])[).:][\s»]+(?:(?!\b[A-H]\b)[^,;])+")
# SyntaxError: also too much work; RecursionError: too deep; KeyError: arcsec; TypeError: sin(1, 2)
UNREADABLE = (SyntaxError, ArithmeticError, ValueError, RecursionError, KeyError, TypeError)
GAPS = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])|[«»]")


def word_key(s: str) -> str:
    """Letters of an answer in words or of a choice, "(C)" -> "c"; empty for anything else."""
    bare = re.sub(r"[«»\s(){}.\"]|'(?=[a-z])|(?<=[a-z])-", "", s)
    return bare.casefold() if bare.isalpha() else ""


def is_equal(pred: str, gold: str) -> bool:
    """Is the answer `pred` the answer `gold`? Symmetric, bounded in time, never raises.

    False where one cannot be read, unless both are the same text. Nothing equals an empty answer.
    """
    if pred == gold:
        return pred.strip() != ""
    try:
        a, b = map(clean, sorted((pred, gold)))  # so that the order cannot matter
        with localcontext(CONTEXT):
            return compare(a, b)
    except UNREADABLE:
        return False


def compare(a: str, b: str) -> bool:
    """Of two clean texts: as text, as words, then as functions of their variables."""
    if not a or not b or max(len(a), len(b)) > MAX_ANSWER:
        return a == b != ""
    if GAPS.sub("", a) == GAPS.sub("", b):
        return True
    words = [word_key(a), word_key(b)]
    if all(words) and (words[0] == words[1] or min(map(len, words)) > 3):
        return words[0] == words[1]
    for one, other in ((a, b), (b, a)):
        choice = CHOSEN.fullmatch(one)
        if choice and len(word_key(other)) == 1:
            return choice[1].lower() == word_key(other)
        if re.fullmatch(r"[-+]?[0-9]+,[0-9]+", one) and re.fullmatch(r"[-+]?[0-9]*\.[0-9]+", other):
            return not THOUSANDS.search(one) and Decimal(one.replace(",", ".")) == Decimal(other)
        based = re.fullmatch(r"([0-9]+)\s*_\s*\{?\s*[0-9]+\s*\}?", one)
        if based and based[1] == other:
            return True  # 52_8 = 52, the base being in the question
    a, unit = split_unit(a)
    b, other_unit = split_unit(b)
    if unit and other_unit and unit[0] == other_unit[0] < len(FAMILIES) - 1 and unit != other_unit:
        return False
    if same_function(Answer(a), Answer(b)):
        return True
    for one, other in ((a, b), (b, a)):  # beside a tuple 1,234 is two numbers
        pair = "," in other and not THOUSANDS.search(other) and not re.search(",0[0-9]", one)
        if THOUSANDS.search(one) and pair:
            return same_function(Answer(one, thousands=False), Answer(other))
    return False


def can_read(gold: str) -> bool:
    """False for a gold that could only be matched letter by letter (data.py drops these)."""
    try:
        s = clean(gold)
        if 0 < len(s) <= MAX_ANSWER and not word_key(s):
            answer = Answer(split_unit(s)[0])
            with localcontext(CONTEXT):
                answer.at(Point(answer.names))
        return 0 < len(s) <= MAX_ANSWER
    except UNREADABLE as error:
        return isinstance(error, ArithmeticError)  # no value at this point
