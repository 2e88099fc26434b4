r"""
Are two answers equal? is_equal(r"\frac12", "0.5") is True. can_read(gold) says whether a gold
answer can be compared at all.

An answer is a function of its variables; "5" has none. Two answers are equal if their values agree
at six fixed points. That takes neither computer algebra nor a syntax tree: the reader computes as
it parses, once per point. Each section of this file is one step:

    1. clean-up     "$\dfrac{1}{2}$ cm."   ->  r"\frac{1}{2}" and the unit {"cm"}
    2. numbers      the variables' values at a point, and arithmetic with them
                    (in 100 digits, by grader/decimals.py)
    3. reader       r"\frac{1}{2}"         ->  a Reading, here Number(0.5)
    4. comparison   two Readings           ->  True or False

A Reading is the value of an answer at one point:

    Number                  complex, in 100 digits; two are equal if 50 digits agree
    Group(kind, items)      a tuple, interval, list, set or union; also 1:2:3, and x = 5 or
                            0 < x <= 1, with the operators and the tokens of each side

The worst error is accepting a wrong answer, because training then rewards it. So a decimal equals a
fraction only if it has six digits and rounds correctly, a list never equals one of its members, and
nothing equals the empty answer. An answer that can't be read equals only its own text. Work is
limited by counters, not clocks or Python's stack, so a verdict is the same on every machine.

Graders disagree on these; this is what ours does:

    50% is 0.5 and also 50                      10 mod 7 is 3
    2:3 is 2/3, but 10:30 is a time             52 stands for 52_8
    5 cm is 5, but not 5 m or 5 cats            5 m is 5, but 5m is a product
    1,234 is one number, (1,234) is two         32, 349 and 1,5 are two: no decimal comma
    m + n = 116 is 116                          \log and \lg have base 10
    lists and sets have no order, tuples do     a row is not a column
    2x = 6 is not x = 3: it is not solved       x = 41 = 42 is wrong: two different numbers
    6e-10 has Euler's e: it is 6e - 10          1e5 is not read
    sums and integrals are compared as text
"""
import re
from functools import lru_cache
from typing import NamedTuple, Union
from zlib import crc32

from grader.decimals import CONSTANTS, INFINITY, Number, evaluate, is_rational, mp, settle, unknown

MAX_ANSWER = 6_000     # characters; a longer answer equals only itself
MAX_DEPTH = 60         # of nested operands: far less than Python's recursion limit allows
MAX_WORK = 4_000       # per is_equal, in units of about 5 us: reading an operand costs three


# -----------------------------------------------------------------------------
# 1. Clean-up: an answer -> plain text for the tokenizer, and a unit

def pairs(text: str) -> dict[str, str]:
    r"""'≤ \le  ≥ \ge' -> {'≤': '\le ', '≥': '\ge '}. The space separates \le from a letter."""
    words = text.split()
    return {spelling: plain + " " for spelling, plain in zip(words[::2], words[1::2])}


# Not NFKC, which turns 4² into 42. Digits of other scripts stay, so they never equal 0-9.
UNICODE = str.maketrans({
    **pairs(r"""÷ /  √ \sqrt  π \pi  ∞ \infty  ≤ <=  ≥ >=  ≠ !=  ∪ \cup  ∈ \in  ∅ \emptyset
    θ \theta  α \alpha  β \beta  ± \pm  ² ^{2}  ³ ^{3}  ⁴ ^{4}  ½ \frac{1}{2}
    ⅓ \frac{1}{3}  ⅔ \frac{2}{3}  ¼ \frac{1}{4}  ¾ \frac{3}{4}  ℝ \mathbb{R}"""),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63", "-"),
    "。": ".", "、": ",",
    **dict.fromkeys("\u00b7\u00d7\u2217\u2219\u22c5", "*"),
    **{0xFF01 + i: chr(0x21 + i) for i in range(94)},  # full-width
})
# Commands with a simpler spelling. \in and \equiv become "=" because what follows them is the
# answer and what precedes them only names it.
RENAME = pairs(r"""dfrac \frac  tfrac \frac  cfrac \frac  dbinom \binom  lt <  gt >  le <=  leq <=
    leqslant <=  ge >=  geq >=  geqslant >=  ne !=  neq !=  in =  equiv =  approx ≈  cdot *  times *
    ast *  div /  lvert |  rvert |  vert |  mid |  lbrace \{  rbrace \}  varnothing \emptyset
    ldots ...  dots ...  cdots ...  degree °  bmod \mod  pmod \mod  varphi \phi  lg \log""")
TRIG = {*"sin cos tan cot sec csc".split()}
FUNCTIONS = TRIG | {*"arcsin arccos arctan ln log exp sqrt max min gcd abs floor ceil".split()}


def unwrap_text(match: re.Match) -> str:
    r"""Removes the command from \text{...}. Formulas, single letters, functions, "and" and "or" are
    left bare; other words, such as units, are put between « and ».
    """
    word = match[1].strip().rstrip(". ")  # keeps the first point: \text{.5} is not 5
    is_formula = re.fullmatch(r"(?is).?|[-+]?[.\d].*|.*\\.*|[^a-z]*|[ ,;]*(and|or)[ ,;]*", word)
    is_bare = is_formula or word in FUNCTIONS - {"min"} or word == "mod"  # \text{ min} is minutes
    return f" {word} " if is_bare else f" «{word}» "


CURRENCY = {"\\$": "dollar", "$": "dollar", "€": "euro", "£": "pound"}
TEXT = (r"\\(?:text(?:bf|rm|it|tt|normal)?|math(?:rm|bf|it|sf|cal)|[mh]box|emph|operatorname|bm)\*?"
        r"\s*\{([^{}]*)\}")
NO_LETTER = "(?![A-Za-z])"
REWRITES = [(re.compile(pattern), to) for pattern, to in [  # in this order
    # a box around the whole answer
    (r"(?s)^[$. ]*\\(?:boxed|fbox)\s*\{(.*)\}[$. ]*$", r"\1"),
    # money, \$32,\!348 or €5: the sign becomes a unit; but $5$ is a formula
    (r"^(\$(?=.*\$))?(?:\s*([-+]))?\s*(\\?\$|[€£])\s*"
     r"([-+]?(?:[0-9](?:(?:[0-9.,]|\\[!,]|\{,\})*[0-9])?|\.[0-9]+))(?(1)\s*\$)\.?$",
     lambda match: f"{match[2] or ''}{match[4]} «{CURRENCY[match[3]]}»"),
    # 5 m
    (r"^((\$)?[-+]?[0-9][0-9.,/]*(?(2)\$))\s+([mgshLNJWV])\.?$", r"\1 «\3»"),
    # 1,\!234 and 1{,}234 are one number, even in brackets
    (r"(?<=[0-9])(?<!\b0)(?:,\s*\\!|\s*\{\s*,\s*\})\s*(?=[0-9]{3}(?![0-9]))", ""),
    # \( \) \[ \], the backslash of \$ \% \|, and thin spaces
    (r"\\(?:[()$]|(?=%))|(?<!\\)\\(?:[\[\],!]|(?=\|))", ""),
    # styling: \left( \right. \mleft \big \displaystyle \boxed \bf \angle
    (r"\\(?:m?(?:left|right)|middle)" + NO_LETTER + r"\.?", ""),
    (r"\\(?:[bB]igg?[lrm]?|(?:display|text)style|boxed|fbox|(?:no)?limits|bf|rm|it|boldsymbol"
     r"|(?:measured)?angle)" + NO_LETTER, ""),
    # spaces: \; \quad
    (r"(?<!\\)\\[;: ]|\\q?quad|\\(?:thin|med|en)space" + NO_LETTER, " "),
    # \dfrac, \leq, \cdot: see RENAME
    (r"\\([A-Za-z]+)", lambda match: RENAME.get(match[1], match[0])),
    # \frac12, \frac1{72} and \log_23: the argument is one digit
    (r"(\\(?:frac|binom)|\\log\s*_)\s*([0-9])", r"\1{\2}"),
    (r"(\\(?:frac|binom)\s*\{[^{}]*\}\s*)([0-9])", r"\1{\2}"),
    # \mathbb{R}
    (r"\\mathbb\s*\{?\s*R\b\s*\}?", r"(-\\infty,\\infty)"),
    # \begin{pmatrix} ... \end{pmatrix}, or an array{cc} in brackets
    (r"\\begin\s*\{(?:(?:[pbB]|small)?matrix\}|array\}\s*\{[clr\s]*\})", r"\\matrix "),
    (r"\\end\s*\{[A-Za-z]*\}", r"\\end "),
    # 5\text{ m}, but not \log_2\text{N}
    (r"(?:(?<=[0-9)}])|(?<=\\pi))(?<!_[0-9])\s*\\(?:text|mathrm|mbox)\s*\{\s*([mgshLNJWV])\s*\}",
     r" «\1» "),
    # \text{...}
    (TEXT, unwrap_text),
    # 90^\circ and 90^{\circ} are 90°
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ" + NO_LETTER + r")|\\circ" + NO_LETTER, "°"),
    # 0.1\overline{6}: the repeating part is written out to 80 digits
    (r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s*\{([0-9]{1,20})\}",
     lambda match: f"{match[1] or 0}.{match[2]}{(match[3] * 80)[:80]} "),
    # 20 per cent is 20%, 45 «degrees» is 45°
    (r"(?i)(«?)(?<![a-z])(?:per ?cent|pct|percentage)(?![a-z])", r"%\1"),
    (r"(?<=[0-9})])\s*(?:«degrees?»|degrees?(?=\s*(?:$|[-+*/,)])))", "°"),
    # \{x \mid x < 3\}: only the condition counts
    (r"^\s*\\\{\s*([a-z])\s*(?:=\s*\(-\\infty,\\infty\)\s*)?[|:](?=.*\1)(?=.*(?:[<>]|!=|=\s*[(\[]))"
     r"(.*)\\\}\s*$", r"\2"),
    # 2x for all x > 0, but not 7 for all n, 8, 9
    (r"(?i)(?<=..)(?:(?<=\s)«?|,)(?:for (?:all|every|any|each)\b|\\forall)"
     r"(?!.*\b(?:but|except|or|and|else|otherwise|then|while)\b)"
     r"(?:[^,;0-9()<>=]|[<>=](?!\s*-?\s*[0-9])|[<>=]\s*-?\s*[0-9]+(?:\.[0-9]+)?|\([^()]*\)"
     r"|,\s*(?=[a-z]\b))*$", ""),
    # dollar signs around formulas, and currency signs inside larger ones
    (r"[$~€£]", ""),
    # 6:30 p.m.
    (r"(?i)(?<![a-z])([ap])\.\s?m\.?(?![a-z])", r"\1m"),
    # 1,234 is one number, but (100,200) is a point
    (r"(?<![0-9.,(\[])(?<!\\\{)(?<!langle)(?<!langle )(?<![0-9], )"
     r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])",
     lambda match: match[0].replace(",", "")),
    # 1 1/2, but not in 2^1 1/2 or 3/1 1/2
    (r"(?<![0-9.,/^_}])(?<![/^] )([0-9]{1,9})\s+([0-9]{1,9})\s*/\s*([0-9]{1,9})(?![0-9.])",
     r"\1\\frac{\2}{\3}"),
    # 1\frac12 is \frac32, but not in \sqrt2\frac12
    (r"(?<![0-9A-Za-z.,/^_}])(?<!sqrt )([0-9]{1,9})\s*\\frac\s*\{([0-9]{1,9})\}\s*\{([0-9]{1,9})\}",
     lambda match: f"\\frac{{{int(match[1]) * int(match[3]) + int(match[2])}}}{{{match[3]}}}"),
    # 5 or 6
    (r"(?i)(?<![a-z\\])(?:and|or)(?![a-z]|[^«»]*»)", " , "),
]]
COUNT = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen""".split()
COUNT += [f"{ten}-{one}".removesuffix("-zero") for ten in
          "twenty thirty forty fifty sixty seventy eighty ninety".split() for one in COUNT[:10]]
SPELLED = {"all-real-numbers": r"(-\infty,\infty)", "no-solution": r"\emptyset",
           **{word: str(number) for number, word in enumerate([*COUNT, "one-hundred"])}}


@lru_cache(1_000)  # a group of answers shares its gold answer and question
def clean(s: str) -> str:
    """Removes styling and normalizes spelling and spacing."""
    if len(s) > 2 * MAX_ANSWER or s.isascii() and s.isdigit():
        return s
    s = s.strip().translate(UNICODE)
    for pattern, to in REWRITES:
        s = pattern.sub(to, s)
    s = s.strip(" \n,;")
    if not s.endswith(".."):
        s = s.rstrip(".:\\ \n")
    return SPELLED.get(s.strip("« »").lower().replace(" ", "-"), s)


# A unit is a set of words: {"2", "mile", "hour"} for "5 square miles per hour". "=" joins synonyms;
# each word may have a plural s.
UNIT = {word + s: names.split("=")[0] for names in """mm=millimeter cm=centimeter m=meter=metre
    km=kilometer inch=in=inche foot=feet=ft yard=yd mile=mi mile/hour=mph unit second=sec=s
    minute=min hour=hr=h day week month year=yr am pm dollar=usd cent euro pound=lb mg g=gram
    kg=kilogram ounce=oz l=liter ml=milliliter gallon radian=rad celsius=c fahrenheit=f newton=n
    joule=j 2=square=sq=squared 3=cubic=cubed""".split()
    for word in names.split("=") for s in ("", "s")}
# Words that change the value before them ("5 hundredths") or show that more than a unit follows
# ("5 or less", "5 miles east").
NOT_UNITS = re.compile(r"""(?:hundred|thousand|[a-z]*illion|dozen|gross|score|lakh|crore|googol|ten
    |hal[fv]e?|third|over|plus|minus|mod|modulo|pi|factorial|sqrt|(?:[a-z]*(?:teen|tie|illion)|four
    |fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|thousand)th)s?
    |and|x?or|to|than|more|less|fewer|most|least|none|either|where|when|while|for|with(?:out)?
    |sin|cos|tan|log|ln|exp|below|above|under|before|after|ago|short|as|east|west|north|south|st|nd
    |rd|th|doubled|tripled|vs|versus|thr(?:o?ugh|u)|(?:un)?till?|else|otherwise|altern[a-z]+|instead
    |rather|respective(?:ly)?|also|sometimes|depending|probably|likely|divided|multiplied|negative
    |approx[a-z]*|roughly|about|around|nearly|almost|so|is|are|was|equals?|then|because|since
    |guess|think|etc|others|earliest|latest|est|ca""", re.VERBOSE)
# A word of a unit: no digits and no punctuation, so 12 «cats, 13 dogs» is not 12 of something.
UNIT_WORD = re.compile(r"[^\W\d_]+(?:[-'’.][^\W\d_]+)*\.?(?:\^?[23])?")
# Words that negate, hedge or alter an answer: "5 is wrong", "not x = 5", "twice x = 10".
DOUBT = re.compile(r"""(?i)(?<![a-z\\])(?:not|no(?:\ longer|(?=\ [a-z]\ *=))|never|cannot|neither
    |nor|but|if|except|unless|wrong|false|incorrect|untrue|invalid|impossible|mistaken|rejected
    |excluded|nope|unlikely|doubtful|maybe|perhaps|possibly|might|could|fails|[a-z]+n['’]t|isnt
    |minus|plus|twice|double|triple|half|negative|opposite)(?![a-z])""", re.VERBOSE)
WORDS = r"(?:[A-Za-z]{2,}\.?(?:/[A-Za-z]+)?\s+){0,3}(?:[A-Za-z]{2,}(?:/[A-Za-z]+)?\.?|m/s)"
RAISED_UNIT = r"(?:\s*\^\s*(?:[23]|\{\s*[23]\s*\}))?"
# «cm»^2 and «m»/«s»^2 after anything; cm after a digit or bracket; "square cm" after a space.
UNIT_END = re.compile(
    rf"(?:«([^«»]*)»|(?:(?<=[0-9)}}%])\s*|\s)({WORDS})){RAISED_UNIT}"
    rf"(?:\s*/\s*(?:«[^«»]*»|[A-Za-z]+){RAISED_UNIT})?\s*\.?$")
BARE_NUMBER = re.compile(r"[-+]?[0-9.,/:\s]*[%°]?")


def split_unit(s: str) -> tuple[str, set[str]]:
    """"12 cm" -> "12" and {"cm"}. A unit is «text», known words, or up to four words after a
    plain number. Words that change the value ("half", "or less") are left in place: without them the
    answer would mean something else.
    """
    end = UNIT_END.search(s) if s[-1:].isalpha() or s[-1:] in tuple("23}.»") else None
    unit = set()
    if end:
        wrapped, plain = end.groups()
        value = s[:end.start()].strip()
        words = (wrapped or plain or "").lower().strip(" .()").replace("/", " ").split()
        is_unit = not plain or all(word in UNIT for word in words) or (  # 5 men, but not 6xy
            s[end.start(2) - 1].isspace() and max(map(len, words)) > 2
            and BARE_NUMBER.fullmatch(value))
        is_changed = words[:1] in (["squared"], ["cubed"]) or any(  # but 5 feet squared
            NOT_UNITS.fullmatch(word.strip(".")) or word in SPELLED
            or not UNIT_WORD.fullmatch(word) for word in words)
        if is_unit and not is_changed and re.search(r"[0-9A-Za-z})°%]$", value):
            found = re.findall(r"[a-z]+|[23]", end[0].lower())
            unit = {part for word in found if word in UNIT for part in UNIT[word].split("/")}
            s, unit = value, unit or {"thing"}
    mark = {"%": {"%"}, "°": {"degree"}}.get(s[-1:])
    return s, unit - {"thing"} | mark if mark else unit


# -----------------------------------------------------------------------------
# 2. Numbers: the value of an answer at one point

class Group(NamedTuple):
    """Several readings: a collection, or the sides of a relation."""
    kind: str              # brackets such as "()" or "(]", "list", "set", "union" or ":"; of a
                           # relation "eq" for an equation, else "rel"
    items: list            # a matrix's rows, as tuples; a column's cells
    ops: tuple = ()        # of a relation: "=", "<", "<=", "!=" or "≈"; chains of > are reversed
    tokens: tuple = ()     # of each side, which show whether it is only a name


Reading = Union[Number, Group]
# The range of the variables at each point. Near 1 even x^{2004} keeps its digits; further away,
# functions that agree near 1 differ; at the last point 17 - e^x and |12 - x| have changed sign.
RANGES = ((0.96, 1), (0.96, 1), (1, 1.045), (2, 5), (2, 5), (13, 33))


class Point:
    """Values for the variables at point number `index`, and the work left for the comparison.

    One point is enough to tell polynomials apart, since different ones practically never agree to
    50 digits. But functions such as |x| and x agree wherever x is positive, so at points 1, 3 and 5
    some variables are negative, each (up to seven) with its own pattern of signs.
    """

    def __init__(self, names: set):
        self.names = sorted(names)
        self.work = MAX_WORK
        self.index = 0

    def spend(self, amount: int) -> None:
        """SyntaxError when no work is left: the answers are too long to compare."""
        self.work -= amount
        if self.work < 0:
            raise SyntaxError("too much work")

    def variable(self, name: str) -> Number:
        """A pseudorandom value, the same for each name and point."""
        seed = crc32(f"{self.index}:{name}".encode("utf-8", "replace"))
        low, high = RANGES[self.index]
        value = mp.mpf(low + (high - low) * seed / 2 ** 32)
        pattern = (3, 5, 6, 7, 1, 2, 4)[self.names.index(name) % 7]  # bits, for points 1, 3 and 5
        return Number(-value if self.index % 2 and pattern >> self.index // 2 & 1 else value)

    def compute(self, op: str, x: Reading, y: Reading) -> Reading:
        """x op y of two numbers, or of a tuple and a number."""
        if op == "-":
            return self.compute("+", x, negative(y))
        if y.kind == "()" and op == "*":
            x, y = y, x
        y = number(y)
        if x.kind == "()" and op in "*/":
            return Group("()", [self.compute(op, item, y) for item in x.items])
        return self.apply(op, x, y, work=20 if op == "^" else 5)

    def apply(self, name: str, *args: Reading, work: int = 60) -> Number:
        """A function of numbers. It costs as much as 20 operands."""
        numbers = [number(x) for x in args]
        if name in ("factorial", "binom"):
            work = int(min(abs(numbers[0].value), 3_000)) // 7 + 120
        self.spend(work)
        return evaluate(name, numbers)


def number(x: Reading) -> Number:
    """A reading as an operand. A set, a tuple or a relation becomes an unknown number, so that
    2\\{1,2\\} equals only itself.
    """
    return x if x.kind == "number" else Number(unknown(x))


def negative(x: Reading) -> Reading:
    return Group("()", [*map(negative, x.items)]) if x.kind == "()" else -number(x)


# -----------------------------------------------------------------------------
# 3. Reader: plain text -> tokens -> a reading

RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "≈")
# How tightly operators bind. "beside" is the product in 2x.
RELATION, RATIO, UNION, MOD, SUM, PRODUCT, POWER, POSTFIX = range(1, 9)
BINDING = {
    **dict.fromkeys(RELATIONS, RELATION), ":": RATIO, r"\cup": UNION, r"\setminus": UNION,
    r"\mod": MOD, "+": SUM, "-": SUM, **dict.fromkeys(("*", "/", "%", "beside"), PRODUCT),
    "^": POWER, "!": POSTFIX, "": 0}
CLOSERS = {  # half-open intervals mix round and square brackets
    "(": (")", "]"), "[": (")", "]"), "{": ("}",), r"\{": (r"\}",), r"\langle": (r"\rangle",),
    "|": ("|",), r"\lfloor": (r"\rfloor",), r"\lceil": (r"\rceil",)}
ENCLOSING = {"|": "abs", r"\lfloor": "floor", r"\lceil": "ceil"}
FUNCTION_COMMANDS = frozenset("\\" + name for name in FUNCTIONS)
# What can start an operand, and what ends an argument without brackets: \sin 2x \cos y.
STARTS = {*CLOSERS, *FUNCTION_COMMANDS, r"\matrix", r"\frac", r"\binom", r"\emptyset"}
BARE_STOPS = FUNCTION_COMMANDS | {"*", "/", "("}
WORD = re.compile("«[A-Za-z]{4}")
DIGITS = tuple("0123456789.")  # what a number begins with

FRAMES = "overline|overrightarrow|vec|hat|bar|widehat|tilde|underline|mathbb|mathcal|mathfrak"
GREEK = ("alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
         "|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell|hbar|pi|infty")
SUBSCRIPT = r"\s*_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[0-9]+|[A-Za-z])"
MARKS = rf"(?:{SUBSCRIPT})?(?:\s*')*"
TOKEN = re.compile(rf"""\s*(?:
      (?P<name> «[^«»]*»{MARKS}                                             # «blue»
        | [0-9]{{1,50}}(?:\.[0-9]{{1,50}})?{SUBSCRIPT}                      # 52_8
        | (?<![A-Za-z])[fghFG](?:\s*')*\s*\([^()]*\)                        # f'(2)
        | \\(?:{FRAMES}){NO_LETTER}\s*(?:\{{[^{{}}]*\}}|[A-Za-z0-9]){MARKS}  # \overline{{AB}}
        | \\(?:{GREEK}){NO_LETTER}{MARKS}                                   # \alpha_1
        | ° | (?:[A-Za-z]{{4,}}|[A-Za-z]){MARKS} )                          # blue, x_{{10}}, y'
    | [0-9]+(?:\.[0-9]+)? | \.[0-9]+ | \\[A-Za-z]+ | \\\\ | \\[{{}}] | !!(?!=) | [<>!]= | \S )""",
                   re.VERBOSE)
INFINITIES = ("inf", "infty", "oo", "infinity", "Infinity")
PLAIN_NAMES = sorted([*FUNCTIONS, "pi", "mod"], key=len, reverse=True)
PLAIN_FUNCTION = re.compile(
    rf"\\?(?<![A-Za-z])({'|'.join(PLAIN_NAMES)})(?=[A-Za-z]?{NO_LETTER})"
    rf"|(?<![A-Za-z\\])(?:{'|'.join(INFINITIES)}){NO_LETTER}")


def tokenize(s: str) -> list[str]:
    """Numbers, operators, commands, and names, which begin with "«": «x, «x_10, «f(2), «blue.

    Without backslashes, pi, inf, sinx and pix are read as in LaTeX. Other words are a product of
    their letters (xyz), or a name if they have four letters.
    """
    s = PLAIN_FUNCTION.sub(lambda match: f"\\{match[1] or 'infty'} ", s)
    if not re.search(r"\\(sin|cos|tan|cot|sec|csc)", s):
        s = s.replace("°", "")  # 30° is 30 where there is no sine
    return ["«" + re.sub(r"[\s{}«»]", "", match[0]) if match["name"] else match[0].strip()
            for match in TOKEN.finditer(s)]


class Reader:
    r"""Reads the tokens of one answer and computes its value at one point as it goes.

    Precedence climbing: expression() reads an operand, then each operator that binds tighter than
    its caller's. Where a parser would build a "+" node, infix() adds, so every method returns a
    Reading:

        1 + 2 x          expression(0)     1, then "+" binds tighter than nothing
              2 x          expression(SUM)   2, then "beside" binds tighter than "+": 2 times x
    """

    def __init__(self, tokens: list[str], point: Point):
        self.tokens = [*tokens, ""]  # "" marks the end
        self.point = point
        self.at = self.depth = 0
        self.stops = frozenset()     # tokens that end the current operand, such as the | after |x

    def peek(self) -> str:
        return self.tokens[self.at]

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def accept(self, *tokens: str) -> str:
        return self.take() if self.peek() in tokens else ""

    def rows(self, between: str, after: str, closers: tuple) -> list[list[Reading]]:
        r"""Rows of items up to a closer, as in "1,2;3,4)" or a matrix with & and \\."""
        rows = [[]]
        while True:
            self.accept("=", "≈")  # "= 5" is 5
            rows[-1].append(self.expression(stops=frozenset(closers)))
            separator = self.accept(between, after)
            while self.accept(between, after):  # clean-up turns ", and" into two commas
                pass
            if not separator or self.peek() in ("", *closers):
                if self.take() not in closers:
                    raise SyntaxError("unclosed")
                return rows
            if separator == after:
                rows.append([])

    def listing(self, closers: tuple) -> list[Reading]:
        return [item for row in self.rows(",", ";", closers) for item in row]

    def expression(self, floor: int = 0, stops: frozenset | None = None) -> Reading:
        """An operand, and all operators after it that bind tighter than `floor`."""
        self.point.spend(3)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SyntaxError("too deep")
        outer = self.stops
        self.stops = outer if stops is None else stops
        start = self.at
        sign = self.accept("+", "-")
        value = self.expression(max(floor, SUM)) if sign else self.primary()  # -2^2 is -4
        value = negative(value) if sign == "-" else value
        while BINDING[op := self.operator()] > floor:
            value = self.infix(value, op, start)
        self.stops = outer
        self.depth -= 1
        return value

    def operator(self) -> str:
        """The next operator or "". In 2x it is "beside"."""
        token = self.peek()
        before = self.tokens[self.at - 1]
        if token in self.stops:
            return ""
        if token in BINDING:
            return token
        if WORD.match(token) or WORD.match(before):
            return ""  # prose is no product: it would be 0 with a (0) in it
        return "beside" if token in STARTS or token[0] in ("«", *DIGITS) else ""

    def infix(self, left: Reading, op: str, start: int) -> Reading:
        """`left op right`. `start` is the index of the first token of `left`."""
        compute = self.point.compute
        if op in RELATIONS:
            return self.relation(left, start)
        if op == "beside":
            return compute("*", left, self.expression(PRODUCT))
        if op == ":":
            return self.ratio(left, start)
        self.take()
        if op == "!":
            return self.point.apply("factorial", left)
        if op == "%":  # applies to all of 3\frac14%
            return number(left).times(mp.mpf(1) / 100)._replace(mark="%")
        right = self.expression(BINDING[op] - (op == "^"))  # a^b^c is a^(b^c)
        if op == r"\setminus":  # only \mathbb{R}\setminus\{1\}
            if (left.kind, right.kind) != ("()", "set") or left.items != [-INFINITY, INFINITY]:
                raise SyntaxError("a difference of sets")
            return without(right.items)
        if op == r"\cup":
            return Group("union", [part for x in (left, right)
                                   for part in (x.items if x.kind in ("union", "set") else [x])])
        value = compute(op, left, right)
        return value._replace(mark=number(right).value) if op == r"\mod" else value

    def ratio(self, left: Reading, start: int) -> Reading:
        """2:3 is the number 2/3. Three parts are a group, and so are hours and minutes: 10:30 is
        neither 1/3 nor (10, 30).
        """
        items = [left]
        while self.accept(":"):
            items.append(self.expression(RATIO))
        written = "".join(self.tokens[start:self.at])
        if len(items) > 2 or re.fullmatch(r"(1?[0-9]|0[0-9]|2[0-4]):[0-5][0-9]", written):
            return Group(":", items)
        return self.point.compute("/", *items)

    def relation(self, left: Reading, start: int) -> Reading:
        """A chain of equalities becomes left = last value, or just the value if all sides are
        numbers. Approximations after a value are dropped. SyntaxError if numbers disagree: 41 = 42.
        """
        ops, items, tokens = [], [left], [self.tokens[start:self.at]]
        while self.peek() in RELATIONS:
            ops.append(self.take())
            start = self.at
            items.append(self.expression(RELATION))
            tokens.append(self.tokens[start:self.at])
        if ">" in ops[0]:
            ops = [op.translate(str.maketrans("<>", "><")) for op in reversed(ops)]
            items, tokens = items[::-1], tokens[::-1]
        if not set(ops) <= {"=", "≈"}:
            return Group("rel", items, ops, tokens)
        numbers = [x if x.kind == "number" and not names_in(written) else None
                   for x, written in zip(items, tokens)]
        for op, a, b in zip(ops, numbers, numbers[1:]):
            if a and b and not (same_number(a, b, self.point) if op == "=" else
                                abs(a.value - b.value) < (b.unit or 1)):
                raise SyntaxError("false equation")  # 41 = 42, and 12 ≈ 13 would be two answers
        if "≈" in ops and not label(tokens[ops.index("≈")]):
            items = items[:ops.index("≈") + 1]
        if len(items) == 1 or all(numbers):
            return items[-1]
        return Group("eq", [items[0], items[-1]], ["="], [tokens[0], tokens[len(items) - 1]])

    def primary(self) -> Reading:
        """A number, a name, or anything that begins with a bracket or a command."""
        token = self.take()
        if token[:1] in DIGITS:
            return self.literal(token)
        if token[:1] == "«":
            return CONSTANTS[token] if token in CONSTANTS else self.point.variable(token)
        if token in ENCLOSING:
            return self.function(ENCLOSING[token], token)
        if token in CLOSERS:
            return self.group(token)
        if token in (r"\frac", r"\binom"):
            op = "/" if token == r"\frac" else "binom"
            return self.point.compute(op, self.argument(), self.argument())
        if token == r"\matrix":
            rows = self.rows("&", r"\\", (r"\end",))
            is_column = len(rows) > 1 and max(map(len, rows)) == 1
            return Group("()", [row[0] if is_column else Group("()", row) for row in rows])
        if token == r"\emptyset":
            return Group("set", [])
        if token in FUNCTION_COMMANDS:
            return self.function(token[1:])
        raise SyntaxError(f"unexpected {token}")

    def literal(self, token: str) -> Number:
        decimals = token.partition(".")[2]
        if not decimals.isdigit():
            return Number(int(token))
        digits = len(token.replace(".", "").lstrip("0"))
        return Number(settle(mp.mpf(token)), digits, mp.mpf(10) ** -len(decimals))

    def group(self, opener: str) -> Reading:
        items = self.listing(CLOSERS[opener])
        closer = self.tokens[self.at - 1]
        kind = {"{": "list", r"\{": "set", r"\langle": "()"}.get(opener, opener + closer)
        return items[0] if len(items) == 1 and kind in ("()", "[]", "list") else Group(kind, items)

    def argument(self) -> Reading:
        r"""An argument as in LaTeX: a group or a single token."""
        return self.expression(POSTFIX)  # nothing binds tighter: one operand

    def function(self, name: str, opener: str = "") -> Reading:
        r"""\sin x, \log_2 8, \sin^2 x, \tan^{-1} x, |x|. The name or first | is already read."""
        if name == "sqrt":
            [degree] = self.listing(("]",)) if self.accept("[") else [Number(2)]
            exponent = self.point.compute("/", Number(1), degree)
            return self.point.compute("^", self.argument(), exponent)
        marks = {}  # base and exponent
        while mark := self.accept("_", "^"):
            marks[mark] = self.argument()
        exponent = marks.pop("^", Number(1))
        if exponent == Number(-1) and name in TRIG:
            name = "arc" + name
            exponent = Number(1)
        opener = opener or self.accept("(", "{", r"\{")
        arguments = self.listing(CLOSERS[opener]) if opener else \
            [self.expression(SUM, self.stops | BARE_STOPS)]
        value = self.point.apply(name, *arguments, *marks.values())
        return value if exponent == Number(1) else self.point.compute("^", value, exponent)


def without(points: list[Reading]) -> Group:
    """The real line without some points. Without 1 it is (-oo, 1) and (1, oo)."""
    ends = [-INFINITY, *sorted(points, key=lambda x: number(x).value), INFINITY]
    return Group("union", [Group("()", [*pair]) for pair in zip(ends, ends[1:])])


def branches(s: str) -> list[list[str]]:
    r"""The tokens of a cleaned answer; \pm makes two lists of them."""
    upper = s.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = s.replace(r"\pm", "-").replace(r"\mp", "+")
    return [tokenize(text) for text in dict.fromkeys((upper, lower))]


def read(answer: list[list[str]], point: Point) -> Reading:
    """The value at a point of an answer's branches."""
    items = []
    for tokens in answer:
        branch = Reader(tokens, point).listing(("",))
        items += [x for x in branch if not items or repr(x) not in map(repr, items)]  # 0, \pm 2
    return items[0] if len(items) == 1 else Group("list", items)


# -----------------------------------------------------------------------------
# 4. Comparison

BRACKETS = ("()", "[]", "(]", "[)")
LABEL_MARKS = {*"(){},*/:|", r"\frac", r"\langle", r"\rangle"}


def names_in(tokens: list[str]) -> set[str]:
    return {token for token in tokens if token[0] == "«" and token not in CONSTANTS}


def label(tokens: list[str]) -> tuple[str, ...]:
    """The tokens of a side that is only a name, such as x, f(x), AB, (x, y) or |AB|; else ()."""
    is_name = all(token in LABEL_MARKS or token[0] == "«" and token not in CONSTANTS
                  or token == "«e" for token in tokens)  # e may be a name, i and \pi may not
    return tuple(tokens) if is_name else ()


PLAIN = re.compile(rf"«(?:\\(?:{GREEK})|[A-Za-z])(?:\([a-z]\))?")  # x, \theta, f(x)


def may_rename(a: tuple, b: tuple) -> bool:
    """Can two labels name the same thing? x and k can; so can f(x) and y, or x_1 and x. But x_1 and
    x_2 are different things, and so are f(x) and f(y), y and y', AB and AC, (x, y) and (y, x).
    """
    x, y = "".join(a), "".join(b)
    arguments = {x.partition("(")[2], y.partition("(")[2]} - {""}
    are_plain = PLAIN.fullmatch(x) and PLAIN.fullmatch(y) and len(arguments) < 2
    return x == y or bool(are_plain) or x.partition("_")[0] == y or y.partition("_")[0] == x


def same_number(a: Number, b: Number, point: Point) -> bool:
    """50% is 0.5 and also 50, because the question often has the sign. But 0.5% is not 0.5, and
    2500% is not 25, since that could let an answer be wrong by a factor of 100. 3 mod 7 is 10 mod 7
    and 3.
    """
    if a.mark and b.mark and a.mark != b.mark:
        return False
    for one, other in ((a, b), (b, a)):
        if one.mark == "%" and not other.mark:
            if are_close(one.times(100), other):
                return abs(other.value) >= 1
            if abs(other.value) >= 2:
                return False
    return are_close(a, b)


def are_close(a: Number, b: Number) -> bool:
    """Equal, or a decimal of six digits or more and a value that rounds to it."""
    return a == b or any(x.digits >= 6 and settle(2 * abs(y.value - x.value) / x.unit) <= 1
                         for x, y in ((a, b), (b, a)))


def same(a: Reading, b: Reading, point: Point) -> bool:
    """Are two readings equal at this point? Symmetric in a and b."""
    point.spend(1)
    a, b = sorted((a, b), key=lambda x: RANKS[x.kind])
    return RULES[a.kind](a, b, point)


def in_order(a: list[Reading], b: list[Reading], point: Point) -> bool:
    return len(a) == len(b) and all(same(x, y, point) for x, y in zip(a, b))


def in_any_order(a: list[Reading], b: list[Reading], point: Point) -> bool:
    """Matches one to one: 2, 3, 3 is 3, 2, 3 but not 2, 2, 3."""
    left = list(b)
    for x in a:
        at = next((i for i, y in enumerate(left) if same(x, y, point)), None)
        if at is None:
            return False
        del left[at]
    return not left


# The functions in RULES: `a` has the kind of the rule, `b` the same kind or a later one.

def same_relation(a: Group, b: Reading, point: Point) -> bool:
    """Equations may differ by a factor or in the name of the unknown: x = 5, k = 5 and 5 = x are
    equal. Inequalities may differ in direction and by a positive factor. Longer chains are compared
    side by side.
    """
    if b.kind != a.kind:
        name, value = named(a)
        found = value if name else interval(a) if a.kind == "rel" else total(a)
        return found is not None and same(found, b, point)
    (name, value), (other, other_value) = named(a), named(b)
    return a.ops == b.ops and (
        name and other and may_rename(name, other) and same(value, other_value, point)
        or in_order(a.items, b.items, point)
        or len(a.ops) == 1 and proportional(a, b, point))


def proportional(a: Group, b: Group, point: Point) -> bool:
    """Is left - right of `a`, at this random point, a rational multiple of that of `b`, and for <
    and <= a positive one? So 2x + 2y = 6 is x + y = 3. But 2x = 6 is not x = 3: it is not solved.
    """
    names = [names_in(x.tokens[0] + x.tokens[1]) for x in (a, b)]
    if names[0] != names[1] or len(names[0]) < 2:
        return False
    x, y = [point.compute("-", *x.items) for x in (a, b)]
    q = point.compute("/", x, y).value  # no value where y = 0 holds
    is_reversed = a.ops[0] in ("<", "<=") and q < 0
    return q != 0 and not is_reversed and (is_rational(q) or is_rational(1 / mp.convert(q)))


def total(equation: Group) -> Reading | None:
    """m + n = 116 -> 116: problems ask for m + n. None if the left isn't a sum of names, and for
    x + y + z = 0, which is a plane.
    """
    left, right = equation.tokens
    names = [token for token in left if token not in ("+", "-")]
    is_sum = label(names) and len(names_in(names)) > 1 and left[0] == names[0]
    return equation.items[1] if is_sum and not names_in(right) and right != ["0"] else None


def interval(relation: Group) -> Group | None:
    r"""0 < x <= 1 -> (0, 1]; x > 3 -> (3, \infty); x != 3 -> a union. None for other relations."""
    _, items, ops, tokens = relation
    free = [i for i, side in enumerate(tokens) if len(side) == 1 and label(side)]
    if len(free) != 1 or ops != ["!="] and not set(ops) <= {"<", "<="}:
        return None
    at = free[0]
    if ops == ["!="]:
        return without([items[1 - at]])
    low, _, high = [-INFINITY, *items, INFINITY][at:at + 3]
    before, after = ["<", *ops, "<"][at:at + 2]
    return Group("[("[before == "<"] + "])"[after == "<"], [low, high])


def named(x: Reading) -> tuple[tuple, Reading]:
    """x = 5 and 5 = x -> the label ("«x",) and 5. Other readings have the label (), and an
    equation among them has no value: x + y = 5, x - y = 1 are not 5, 1.
    """
    if x.kind == "eq":
        for name, value in ((x.tokens[0], x.items[1]), (x.tokens[1], x.items[0])):
            if label(name) and x.tokens[0] != x.tokens[1]:  # y = y names nothing
                return label(name), value
        x = x._replace(kind="rel")
    return (), x


def same_collection(a: Group, b: Reading, point: Point) -> bool:
    """Lists and sets, with each other or with a tuple or a single value.

    Named values (x = 1, y = 2) match by name, or in order if the other names differ or are missing.
    Values of one name (x = 1, x = 2 or x_1, x_2) are compared like a list without names.
    """
    if b.kind == "union":  # x < 1 or x > 2
        return in_any_order(a.items, b.items, point)
    names, values = zip(*map(named, a.items)) if a.items else ((), ())
    if a.kind == "list" and b.kind == "()":
        return in_order(values, b.items, point)
    items = b.items if b.kind in ("list", "set") else [b]
    other_names, others = zip(*map(named, items)) if items else ((), ())
    if sorted(names) == sorted(other_names) and len({*names}) == len(names):
        found = dict(zip(other_names, others))
        return in_order(values, [found[name] for name in names], point)
    if () not in names + other_names and {*names} != {*other_names} and {*names} & {*other_names}:
        return False  # x = 1, y = 2 is not y = 1, z = 2
    families = [{"".join(name).partition("_")[0] for name in part} for part in (names, other_names)]
    is_ordered = any("" not in part and len(part) > 1 for part in families)
    return (in_order if is_ordered else in_any_order)(values, others, point)


def same_brackets(a: Group, b: Reading, point: Point) -> bool:
    """Unions, ratios, intervals and tuples. The kind of bracket matters, except around three values
    or more, which are always a tuple.
    """
    if a.kind == "union":
        return b.kind == "union" and in_any_order(a.items, b.items, point)
    are_alike = a.kind == b.kind or {a.kind, b.kind} <= {*BRACKETS} and len(a.items) > 2
    return are_alike and in_order(a.items, b.items, point)


RULES = {
    "eq": same_relation, "list": same_collection, "set": same_collection, "rel": same_relation,
    **dict.fromkeys(("union", ":", *BRACKETS), same_brackets), "number": same_number}
RANKS = {kind: i for i, kind in enumerate(RULES)}


def same_function(a: list[list[str]], b: list[list[str]]) -> bool:
    """Are they equal at six points? Points where one has no value (a pole, lost digits) are
    skipped, but at least three must remain.
    """
    point = Point(names_in(a[0] + b[0]))
    found = 0
    for point.index in range(len(RANGES) if point.names else 1):
        try:
            if not same(read(a, point), read(b, point), point):
                return False
            found += 1
        except (ArithmeticError, ValueError, TypeError):  # TypeError: complex numbers have no order
            pass
    return found >= (3 if point.names else 1)


# "(C) 12 apples", but not "(A) or (B)".
CHOSEN = re.compile(r"[«( ]*([A-H]) ?[).:][\s»]+((?:(?!\b[A-H]\b)[^,;])+)")
# SyntaxError: also too much work; RecursionError: too deep; TypeError: sin(1, 2); KeyError: arcsec
UNREADABLE = (SyntaxError, ArithmeticError, ValueError, RecursionError, TypeError, KeyError)
GAPS = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])|[«»]")


def word_key(s: str) -> str:
    """The letters of an answer in words, or of a choice: "(c)" -> "C". Empty for other answers.
    Ignores case in long words and initials, but not in short names: r is not R, AB is not ab.
    """
    bare = re.sub(r"[«»\s(){}.\"]", "", s)
    if not bare.isalpha():
        return ""
    if len(bare) == 1:  # (c) is a choice
        return bare.upper() if ")" in s and bare in "abcdefgh" else bare
    return bare.casefold() if len(bare) > 3 else bare[0].lower() + bare[1:]


def is_equal(pred: str, gold: str) -> bool:
    """Is the answer `pred` equal to the answer `gold`? Symmetric, bounded in time, never raises.

    An answer that can't be read equals only its own text. Nothing equals an empty answer.
    """
    if pred == gold:
        return pred.strip() != ""
    try:
        return same_answer(*map(clean, sorted((pred, gold))))  # sorted: the order cannot matter
    except UNREADABLE:
        return False


def same_answer(a: str, b: str) -> bool:
    """Compares two cleaned answers: as text, as words, then as functions of their variables."""
    if not a or not b or max(len(a), len(b)) > MAX_ANSWER:
        return a == b != ""
    if GAPS.sub("", a) == GAPS.sub("", b):
        return True
    words = [word_key(a), word_key(b)]
    if DOUBT.search(a) or DOUBT.search(b):
        return words[0] == words[1] != ""
    for one, other, letter in ((a, b, words[1]), (b, a, words[0])):
        choice = CHOSEN.fullmatch(one)
        if choice and not CHOSEN.fullmatch(other):
            return choice[1] == letter if letter in [*"ABCDEFGH"] else same_answer(choice[2], other)
        based = re.fullmatch(r"([0-9]+)\s*_\s*\{?\s*([0-9]+)\s*\}?", one)
        if based and based[1] == other and int(max(other)) < int(based[2]):
            return True  # 52_8 = 52: the question often has the base; but 4_2 is no number
    if all(words):
        return words[0] == words[1]
    (a, unit), (b, other_unit) = split_unit(a), split_unit(b)
    # 5 cm is 5 but not 5 m; 5 people is 5 students but not 5 cm; 10:30 am is not 10:30
    if unit != other_unit and (unit and other_unit or ":" in a):
        return False
    return same_function(branches(a), branches(b))


def can_read(gold: str) -> bool:
    """Can this gold answer be compared with other spellings of itself? prompts.py skips problems
    whose answer equals only its own text.
    """
    try:
        s = clean(gold)
        if 0 < len(s) <= MAX_ANSWER and not word_key(s):
            answer = branches(split_unit(s)[0])
            read(answer, Point(names_in(answer[0])))
        return 0 < len(s) <= MAX_ANSWER
    except UNREADABLE as error:
        return isinstance(error, ArithmeticError)  # readable, but this point is a pole
