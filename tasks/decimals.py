"""
Arithmetic for the grader: complex numbers of 100 decimal digits, and the functions of school
mathematics on them.

Floats cannot decide whether two answers are equal: e^(pi*sqrt(163)) and 262537412640768744 agree in
30 digits and differ. Here every number has 100 digits, and two numbers are equal if 50 of them
agree. The other 50 leave room for rounding errors, so answers are never merely "close".

Three rules keep that true:

    integers        They are exact up to 1,000 digits, so 2^{2008} - 2 is not 2^{2008}.
    lost digits     10^60 + 1 would keep the 1, 10^60 * pi + 1 would not keep enough of it. A sum
                    whose smaller term has lost its digits has no value instead of a wrong one.
    unknowns        A constant with too many digits, such as 2^(2^2001), is replaced by a number
                    made from the text of the operation, which equals practically only itself.

Work is bounded: exponents and factorials have limits, and no series has more than 85 terms. The
functions expect the decimal context to be CONTEXT (`with localcontext(CONTEXT)`). They raise
ArithmeticError where there is no value, as for 1/0 and ln 0.
"""
import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation, Underflow
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

CONTEXT = Context(prec=100, Emax=MAX_EMAX, Emin=MIN_EMIN)
CONTEXT.traps[Underflow] = True  # else 2^{-2^{40}} would quietly become 0

ROUNDING = Decimal("1e-50")      # relative: a smaller difference is nothing but rounding
LOST = Decimal("1e-45")          # a term this much smaller than the other has lost its digits
MAX_WHOLE = 10 ** 45             # the largest integer whose last digit can be trusted
ZERO = Decimal(0)
TURN = Decimal("6.28318530717958647692528676655900576839433879875021164194988918461563281257241799"
               "72560696506842341359642961730265646132941876892")  # 2 pi


class Number(NamedTuple):
    """A complex number. `digits` is how many digits a decimal was written with, counted from the
    first that is not 0; 0 for integers and for results of arithmetic, -1 for infinity.
    """
    re: Decimal
    im: Decimal = ZERO
    digits: int = 0

    kind = "number"            # answers.py asks every reading for its kind
    __hash__ = tuple.__hash__  # of the digits; lru_cache needs it

    def __eq__(self, other: "Number") -> bool:
        """Equal up to rounding. Integers are exact, so they are compared exactly."""
        if self.is_whole() and other.is_whole():
            return self.re == other.re
        apart = max(abs(self.re - other.re), abs(self.im - other.im))
        return apart <= ROUNDING * max(self.size(), other.size())

    def __add__(self, other: "Number") -> "Number":
        """The sum; ArithmeticError if the smaller term has lost its digits."""
        total = Number(self.re + other.re, self.im + other.im)
        small, large = sorted((self.size(), other.size()))
        if 0 < small < LOST * large:
            raise ArithmeticError("digits are lost")
        return settle(*total[:2]) if total.size() > ROUNDING * large else Number(ZERO)

    def __mul__(self, other: "Number") -> "Number":
        re = self.re * other.re - self.im * other.im
        return settle(re, self.re * other.im + self.im * other.re)

    def __truediv__(self, other: "Number") -> "Number":
        norm = other.re * other.re + other.im * other.im
        return self * Number(other.re / norm, -other.im / norm)

    def __neg__(self) -> "Number":
        return Number(self.re.copy_negate(), -self.im, self.digits)  # im never becomes -0, for ln

    def __sub__(self, other: "Number") -> "Number":
        return self + -other

    def __abs__(self) -> "Number":
        return settle((self.re * self.re + self.im * self.im).sqrt(), ZERO)

    def size(self) -> Decimal:
        """The larger of |re| and |im|: as good as the length to compare magnitudes, and cheap."""
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


def settle(re: Decimal, im: Decimal) -> Number:
    """A Number without the dust of rounding: 3 + 1e-99 becomes 3, and 5 + 1e-99 i becomes 5."""
    dust = ROUNDING * max(abs(re), abs(im))
    whole = re.to_integral_value()
    return Number(whole if abs(re - whole) <= dust else re, im if abs(im) > dust else ZERO)


def unknown(*key) -> Number:
    """A number between 4096 and 8192, made from `key`, for one that is too large to compute."""
    texts = [f"{x.re:.40e} {x.im:.40e}" if isinstance(x, Number) else repr(x) for x in key]
    return Number(Decimal(2 ** 32 + crc32(" ".join(texts).encode("utf-8", "replace"))) / 2 ** 20)


# -----------------------------------------------------------------------------
# Powers, exponentials, logarithms

def power(x: Number, n: Number) -> Number:
    """x to the n, roots included. An odd root of a negative number is the real one taught at
    school, so (-8)^{1/3} = -2, although exp(n ln x) would be complex.
    """
    if x.im == n.im == 0 <= x.re and not 0 < n.size() < LOST:
        return settle(x.re.sqrt() if n == HALF else x.re ** n.re, ZERO)
    for degree in range(1, 20, 2):  # is n a fraction with this odd denominator?
        times = n * Number(Decimal(degree))
        if x.im == 0 and times.is_whole():
            root = power(-x, n)
            return -root if times.re % 2 else root
    return exp(n * ln(x))


def circle(angle: Decimal) -> list[Decimal]:
    """[cos, sin] of an angle, by their power series: 85 terms give 100 digits for |angle| <= pi."""
    if abs(angle) > 10 ** 25:
        raise ArithmeticError("the angle has lost the digits that a full turn leaves")
    angle = angle.remainder_near(TURN)
    sums = [ZERO, ZERO]
    term = Decimal(1)
    for n in range(85):
        sums[n % 2] += term if n % 4 < 2 else -term  # signs: + + - - + + - -
        term = term * angle / (n + 1)
    return sums


@lru_cache(1_000)
def exp(z: Number) -> Number:
    if 0 < z.size() < LOST:
        raise ArithmeticError("the result hardly differs from 1")
    length = z.re.exp()
    cos, sin = circle(z.im)
    return settle(length * cos, length * sin)


@lru_cache(1_000)
def ln(z: Number) -> Number:
    """The principal logarithm. Decimal has no arctangent, so the angle of a complex z starts as a
    float, and each of Newton's steps triples its digits: 16, 48, 144.
    """
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
    r"""Replaces floor(x) where x varies: x minus some function of its fraction.

    Floor itself takes too few values to tell \lfloor\sqrt n - 0.5\rfloor from
    \lfloor\sqrt n - 0.2\rfloor at six points. This takes as many values as x, and still
    floor(x + 1) = floor(x) + 1, and floor(x) = x for an integer x.
    """
    part = (x - floor(x)).real()
    return x - unknown(f"{part:.6f}") / Number(Decimal(2 ** 14)) if part else x


# -----------------------------------------------------------------------------
# Functions by name

ONE, TWO, TEN, HUNDRED, HALF = (Number(Decimal(text)) for text in "1 2 10 100 0.5".split())
I = Number(ZERO, Decimal(1))
PI = Number(CONTEXT.divide(TURN, 2))
E = Number(CONTEXT.exp(Decimal(1)))
DEGREE = Number(CONTEXT.divide(PI.re, 180))
INFINITY = unknown("infinity")._replace(digits=-1)  # equals itself; nothing is computed with it

EXACT = {  # of integers; None where the result is not an integer, or a power of over 2,000 digits
    "+": int.__add__,
    "*": int.__mul__,
    "/": lambda a, b: None if a % b else a // b,
    "^": lambda a, b: a ** b if 0 <= b * a.bit_length() <= 6_600 else None,  # 0^0 is 1
    r"\mod": int.__mod__,
}
FORMULAS = {
    "+": Number.__add__,
    "*": Number.__mul__,
    "/": Number.__truediv__,
    "^": power,
    r"\mod": lambda x, n: x - n * floor(x / n),
    "exp": exp,
    "ln": ln,
    "log": lambda z, base: ln(z) / ln(base),
    "sinh": lambda z: (exp(z) - exp(-z)) / TWO,
    "cosh": lambda z: (exp(z) + exp(-z)) / TWO,
    "tanh": lambda z: ONE - TWO / (exp(z + z) + ONE),
    "sin": lambda z: FORMULAS["sinh"](I * z) / I,
    "cos": lambda z: FORMULAS["cosh"](I * z),
    "tan": lambda z: FORMULAS["tanh"](I * z) / I,
    "cot": lambda z: FORMULAS["tan"](PI / TWO - z),
    "sec": lambda z: ONE / FORMULAS["cos"](z),
    "csc": lambda z: ONE / FORMULAS["sin"](z),
    "arcsin": lambda z: ln(I * z + power(ONE - z * z, HALF)) / I,
    "arccos": lambda z: PI / TWO - FORMULAS["arcsin"](z),
    "arctan": lambda z: ln((ONE + I * z) / (ONE - I * z)) / (I + I),
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
}


def apply_function(name: str, args: list[Number], varies: bool) -> Number:
    """FORMULAS[name] of `args`, exact for integers of up to 1,000 digits.

    varies: the arguments depend on variables. A value that is too large to compute is then an
    ArithmeticError, and the caller tries another point. A constant has no other point, so it
    becomes an unknown number. 1/0 and ln 0, which have no value, raise in both cases.
    """
    if name not in FORMULAS:  # arcsec
        raise SyntaxError(f"no function {name}")
    if INFINITY.digits in [x.digits for x in args]:
        raise InvalidOperation("infinity is not a number")
    if name in EXACT and all(x.is_whole() and x.re.adjusted() <= 1_000 for x in args):
        value = EXACT[name](*(int(x.re) for x in args))
        if value is not None:
            return Number(Decimal(value))
    try:
        value = FORMULAS[name](*(x._replace(re=+x.re) for x in args))  # + rounds to 100 digits
    except ArithmeticError as error:
        if varies or isinstance(error, (ZeroDivisionError, InvalidOperation)):
            raise
        return unknown(name, *(sorted(args) if name == "+" else args))
    return Number(Decimal(value)) if isinstance(value, int) else value
