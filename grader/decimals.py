"""
Arithmetic for the grader: exact integers, and complex numbers in 100 digits with mpmath.

Floats can't tell whether two answers are equal: e^(pi*sqrt(163)) and 262537412640768744 differ but
agree to 30 digits. Here two numbers are equal if 50 digits agree; the other 50 absorb rounding
errors. Two rules keep this sound:

    integers        are exact up to 1,000 digits, so 2^{2008} - 2 is not 2^{2008}
    lost digits     10^60 * pi + 1 would keep too few digits of the 1. Such a sum has no value
                    rather than a wrong one

Exponents, factorials and function arguments have limits, so work is bounded.
"""
import math
from collections.abc import Callable
from typing import NamedTuple, Union
from zlib import crc32

from mpmath import MPContext, mpc, mpf

mp = MPContext()                 # our own: other code may change the precision of mpmath.mp
mp.dps = 100
Value = Union[int, mpf, mpc]     # integers are always int

ROUNDING = mp.mpf("1e-50")       # relative; smaller differences are rounding errors
PRECISION = 166                  # the same in bits
LOST = mp.mpf("1e-45")           # relative; a smaller term of a sum has lost its digits
MANY = math.lcm(*range(1, 60)) * 10 ** 4  # a multiple of most denominators
MAX_BITS = 6_600                 # of a power of integers: 2,000 digits
MAX_FACTORIAL = 3_000
MAX_ARGUMENT = 10 ** 25          # of a function: such an angle still has enough digits mod 2 pi


class Number(NamedTuple):
    """A number in an answer. A decimal also has its count of significant `digits` and the `unit` of
    the last one, 0.01 in 3.14. Both are 0 for other numbers; infinity has digits -1.
    """
    value: Value
    digits: int = 0
    unit: Value = 0
    mark: Union[str, Value] = ""  # "%", or 7 in 3 mod 7
    form: tuple = ()             # how it was written, if forms.py asks

    kind = "number"              # as every reading in answers.py has

    def __eq__(self, other: "Number") -> bool:
        """Equal up to rounding errors; integers are compared exactly."""
        x, y = self.value, other.value
        error = 0 if isinstance(x, int) and isinstance(y, int) else ROUNDING
        return abs(x - y) <= error * max(abs(x), abs(y))

    def times(self, factor: Value) -> "Number":
        return self._replace(value=settle(factor * self.value), unit=abs(factor) * self.unit)

    def __neg__(self) -> "Number":
        return self._replace(value=-self.value)


def settle(z: Value) -> Value:
    """Removes rounding errors: 3 + 1e-99 becomes 3, and 5 + 1e-99 i becomes 5."""
    if isinstance(z, int):
        return z
    if not mp.isfinite(z):
        raise ZeroDivisionError("no value")
    size = mp.mag(z)             # bits before the point
    if mp.mag(z.imag) > size - PRECISION or size > mp.prec - 16:
        return z
    near = mp.nint(z.real)
    return int(near) if mp.mag(z.real - near) <= size - PRECISION else z.real


def is_rational(x: Value) -> bool:
    return isinstance(x, int) or isinstance(settle(x * MANY), int)


def unknown(*key) -> Value:
    """A number between 4096 and 8192 that depends on `key`, for things without a value."""
    text = " ".join(mp.nstr(x, 40) if isinstance(x, (mp.mpf, mp.mpc)) else repr(x) for x in key)
    return mp.mpf(2 ** 32 + crc32(text.encode("utf-8", "replace"))) / 2 ** 20


# -----------------------------------------------------------------------------
# Functions by name

def add(x: Value, y: Value) -> Value:
    """x + y. ArithmeticError if the smaller term has lost its digits."""
    if isinstance(x, int) and isinstance(y, int):
        return x + y
    small, large = sorted((abs(x), abs(y)))
    if 0 < small < LOST * large:
        raise ArithmeticError("digits are lost")
    return x + y if abs(x + y) > ROUNDING * large else 0


def divide(x: Value, y: Value) -> Value:
    is_whole = isinstance(x, int) and isinstance(y, int) and x % y == 0
    return x // y if is_whole else mp.convert(x) / y


def limited(function: Callable, least: Value = 0) -> Callable:
    """`function`, but with ArithmeticError for arguments that lose digits: cos(1e-60) would be 1.
    Values below `least` become 0, as sin(pi) must; those above 1 / least are poles.
    """
    def checked(z):
        if z and not LOST <= abs(z) <= MAX_ARGUMENT:
            raise ArithmeticError("digits are lost")
        value = function(z)
        if least * abs(value) > 1:
            raise ArithmeticError("a pole")
        return value if abs(value) >= least else 0
    return checked


exp = limited(mp.exp)


def power(x: Value, n: Value) -> Value:
    """x to the n, including roots."""
    if isinstance(n, int) and abs(n) <= MAX_BITS:
        is_exact = isinstance(x, int) and 0 <= n * x.bit_length() <= MAX_BITS  # 0^0 is 1
        return x ** n if is_exact else mp.convert(x) ** n
    if x == 0:
        return 0 if n > 0 else divide(1, 0)
    return exp(n * mp.log(x))


def factorial(n: Value) -> Value:
    """n!, or the gamma function of n + 1 if n is not an integer."""
    if abs(n) > MAX_FACTORIAL:
        raise ArithmeticError("too large")
    return math.factorial(n) if isinstance(n, int) and n >= 0 else mp.factorial(n)


FORMULAS = {
    "+": add, "*": lambda x, y: x * y, "/": divide, "^": power,
    r"\mod": lambda x, n: x % n if isinstance(x, int) and isinstance(n, int) else unknown(x, n),
    "exp": exp, "ln": mp.log, "log": lambda x, base=10: divide(mp.log(x), settle(mp.log(base))),
    **{name: limited(getattr(mp, name.replace("arc", "a")), ROUNDING)
       for name in "sin cos tan cot sec csc arcsin arccos arctan".split()},
    "abs": abs, "factorial": factorial, "max": lambda *xs: max(xs), "min": lambda *xs: min(xs),
    "gcd": lambda *xs: unknown("gcd", *sorted(xs, key=abs)),
    "binom": lambda n, k: divide(factorial(n), factorial(k) * factorial(add(n, -k))),
    # Six points are too few to tell floors apart, so floor(x) only equals floor(x).
    "floor": lambda x: unknown("floor", x), "ceil": lambda x: -unknown("floor", -x),
}

INFINITY = Number(unknown("infinity"), digits=-1)  # equals only itself; no arithmetic with it
CONSTANTS = {"«e": Number(mp.exp(1)), "«i": Number(mp.mpc(0, 1)), r"«\pi": Number(mp.pi + 0),
             "«°": Number(mp.pi / 180), r"«\infty": INFINITY}  # as tokens of answers.py


def evaluate(name: str, args: list[Number]) -> Number:
    """FORMULAS[name] of `args`, exact for integers of up to 1,000 digits. ArithmeticError if there
    is no value or it is too large to compute, KeyError for unknown names, TypeError for the order
    of complex numbers.
    """
    if any(x.digits < 0 for x in args):
        raise ArithmeticError("infinity is not a number")
    values = [mp.mpf(x.value) if isinstance(x.value, int) and x.value.bit_length() > 3_330
              else x.value for x in args]
    return Number(settle(FORMULAS[name](*values)))
