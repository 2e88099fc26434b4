"""
Arithmetic for the grader: exact integers, and complex numbers of 100 digits by mpmath.

Floats cannot decide whether two answers are equal: e^(pi*sqrt(163)) and 262537412640768744 agree in
30 digits and differ. Here two numbers are equal if 50 digits agree. The other 50 leave room for
rounding errors, so answers are never merely "close".

Two rules keep that true:

    integers        They are exact up to 1,000 digits, so 2^{2008} - 2 is not 2^{2008}.
    lost digits     10^60 + 1 would keep the 1, 10^60 * pi + 1 would not keep enough of it. A sum
                    whose smaller term has lost its digits has no value instead of a wrong one.

Work is bounded: exponents, factorials and the arguments of functions have limits.
"""
import math
from collections.abc import Callable
from typing import NamedTuple, Union
from zlib import crc32

from mpmath import MPContext, mpc, mpf

mp = MPContext()                 # not mpmath's own, whose precision others may change
mp.dps = 100
Value = Union[int, mpf, mpc]     # an int if it is whole

ROUNDING = mp.mpf("1e-50")       # relative: a smaller difference is nothing but rounding
LOST = mp.mpf("1e-45")           # a term this much smaller than the other has lost its digits
MAX_WHOLE = 10 ** 45             # the largest integer whose last digit can be trusted
MAX_BITS = 6_600                 # of a power of integers: 2,000 digits
MAX_FACTORIAL = 3_000
MAX_ARGUMENT = 10 ** 25          # of a function: a full turn leaves enough digits of such an angle


class Number(NamedTuple):
    """A number in an answer. Of a decimal: how many `digits` it was written with, counted from the
    first that is not 0, and the `unit` of the last one; 0 for whatever else. digits -1: infinity.
    """
    value: Value
    digits: int = 0
    unit: Value = 0

    kind = "number"              # answers.py asks every reading for its kind

    def __eq__(self, other: "Number") -> bool:
        """Equal up to rounding, integers exactly."""
        x, y = self.value, other.value
        if isinstance(x, int) and isinstance(y, int):
            return x == y
        return abs(x - y) <= ROUNDING * max(abs(x), abs(y))

    def __neg__(self) -> "Number":
        return self._replace(value=-self.value)

    def size(self) -> Value:
        return abs(self.value)

    def real(self) -> Value:
        if isinstance(self.value, mp.mpc):
            raise ArithmeticError("complex numbers have no order")
        return self.value


def settle(z: Value) -> Value:
    """The value without the dust of rounding: 3 + 1e-99 becomes 3, and 5 + 1e-99 i becomes 5."""
    if isinstance(z, int):
        return z
    if not mp.isfinite(z):
        raise ZeroDivisionError("no value")
    dust = ROUNDING * abs(z)
    if abs(z.imag) > dust:
        return z
    is_long = abs(z.real) > 10 ** (mp.dps - 5)
    return z.real if is_long or abs(z.real - mp.nint(z.real)) > dust else int(mp.nint(z.real))


def unknown(*key) -> Value:
    """A number between 4096 and 8192, made from `key`, for what has no value to compute with."""
    texts = [mp.nstr(x, 40) if isinstance(x, (mp.mpf, mp.mpc)) else repr(x) for x in key]
    text = " ".join(texts)
    return mp.mpf(2 ** 32 + crc32(text.encode("utf-8", "replace"))) / 2 ** 20


# -----------------------------------------------------------------------------
# Functions by name

def add(x: Value, y: Value) -> Value:
    """The sum; ArithmeticError if the smaller term has lost its digits."""
    if isinstance(x, int) and isinstance(y, int):
        return x + y
    small, large = sorted((abs(x), abs(y)))
    if 0 < small < LOST * large:
        raise ArithmeticError("digits are lost")
    return x + y if abs(x + y) > ROUNDING * large else 0


def divide(x: Value, y: Value) -> Value:
    if isinstance(x, int) and isinstance(y, int):
        return x // y if x % y == 0 else mp.mpf(x) / y
    return x / y


def limited(function: Callable, least: Value = 0) -> Callable:
    """`function` of arguments that keep enough digits: the cosine of 1e-60 would be 1. A value of
    less than `least` is 0.
    """
    def checked(z):
        if z and not LOST <= abs(z) <= MAX_ARGUMENT:
            raise ArithmeticError("digits are lost")
        value = function(z)
        return value if abs(value) >= least else 0
    return checked


exp = limited(mp.exp)
sin = limited(mp.sin, ROUNDING)  # the sine of pi is a rounding error
cos = limited(mp.cos, ROUNDING)


def ln(z: Value) -> Value:
    if z == 0:                   # mpmath's is -infinity, by which one could go on to divide
        raise ZeroDivisionError("no value")
    return mp.log(z)


def power(x: Value, n: Value) -> Value:
    """x to the n, roots included. An odd root of a negative number is the real one taught at
    school, so (-8)^{1/3} = -2, although exp(n ln x) would be complex.
    """
    if isinstance(n, int) and abs(n) <= MAX_BITS:
        is_exact = isinstance(x, int) and 0 <= n * x.bit_length() <= MAX_BITS  # 0^0 is 1
        return x ** n if is_exact else mp.convert(x) ** n
    if x == 0:
        return 0 if n > 0 else divide(1, 0)
    is_negative = not isinstance(x, mp.mpc) and x < 0
    for degree in range(1, 20, 2) if is_negative else ():  # has n this odd denominator?
        times = settle(n * degree)
        if isinstance(times, int):
            root = power(-x, n)
            return -root if times % 2 else root
    return exp(n * ln(x))


def floor(x: Value) -> int:
    if abs(Number(x).real()) > MAX_WHOLE:
        raise ArithmeticError("digits are lost")
    return int(mp.floor(x))


def modulo(x: Value, n: Value) -> Value:
    if isinstance(x, int) and isinstance(n, int):
        return x % n
    return add(x, -n * floor(divide(x, n)))


def factorial(n: Value) -> Value:
    """n!, which the gamma function continues to numbers that are not whole."""
    if abs(Number(n).real()) > MAX_FACTORIAL:
        raise ArithmeticError("too large")
    return math.factorial(n) if isinstance(n, int) and n >= 0 else mp.factorial(n)


def gcd(*numbers: Value) -> Value:
    """Numbers that are not integers have an unknown gcd, which equals only itself."""
    if all(isinstance(x, int) for x in numbers):
        return math.gcd(*numbers)
    return unknown("gcd", *sorted(numbers, key=abs))


FORMULAS = {
    "+": add,
    "*": lambda x, y: x * y,
    "/": divide,
    "^": power,
    r"\mod": modulo,
    "ln": ln,
    "log": lambda x, base: ln(x) / ln(base),
    "exp": exp,
    "sin": sin,
    "cos": cos,
    "tan": lambda x: divide(sin(x), cos(x)),
    "cot": lambda x: divide(cos(x), sin(x)),
    "sec": lambda x: divide(1, cos(x)),
    "csc": lambda x: divide(1, sin(x)),
    "arcsin": limited(mp.asin),
    "arccos": limited(mp.acos),
    "arctan": limited(mp.atan),
    "abs": abs,
    "max": lambda *args: max(args, key=lambda x: Number(x).real()),
    "min": lambda *args: min(args, key=lambda x: Number(x).real()),
    "floor": floor,
    "ceil": lambda x: -floor(-x),
    # floor itself takes too few values to tell functions apart at six points
    "floor of a variable": lambda x: unknown("floor", x),
    "ceil of a variable": lambda x: -unknown("floor", -x),
    "factorial": factorial,
    "binom": lambda n, k: divide(factorial(n), factorial(k) * factorial(add(n, -k))),
    "gcd": gcd,
}

ONE, TWO, TEN = map(Number, (1, 2, 10))
I = Number(mp.mpc(0, 1))
PI = Number(mp.pi + 0)
E = Number(mp.exp(1))
INFINITY = Number(unknown("infinity"), digits=-1)  # equals itself; nothing is computed with it


def apply_function(name: str, args: list[Number]) -> Number:
    """FORMULAS[name] of `args`, exact for integers of up to 1,000 digits. ArithmeticError if it has
    no value, or one that is too large to compute.
    """
    if name not in FORMULAS:  # arcsec
        raise SyntaxError(f"no function {name}")
    if any(x.digits < 0 for x in args):
        raise ArithmeticError("infinity is not a number")
    values = [mp.mpf(x.value) if isinstance(x.value, int) and x.value.bit_length() > 3_330
              else x.value for x in args]
    return Number(settle(FORMULAS[name](*values)))
