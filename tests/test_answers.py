r"""
Equality of answers, against Python's fractions and verdicts worked out by hand (answers.txt). golds.json has 211 gold
answers of MATH, GSM8K, AMC, AIME, OlympiadBench and DeepMath, chosen for variety.

python -m pytest tests/test_answers.py -q
"""
import random
import time
from fractions import Fraction

import pytest
from fuzz_rewards import GOLDS
from helpers import ANSWERS, pairs

from grader.answers import MAX_WORK, can_read, is_equal
from rewards import extract


def boxed(answer):
    return "so it is \\boxed{" + answer + "}."


# gold answers ---------------------------------------------------------------------------------------------------------

def test_gold_answers_equal_themselves_in_every_spelling():
    for gold in GOLDS:
        assert is_equal(gold, gold), gold
        assert is_equal(extract(boxed(gold)).answer, gold), gold
        for respelled in (f"${gold}$", f" {gold} ", gold.replace("\\frac", "\\dfrac"), f"\\displaystyle {gold}"):
            assert is_equal(respelled, gold), (respelled, gold)


def test_no_gold_answer_equals_an_unrelated_number():
    assert [gold for gold in GOLDS if is_equal("123456789", gold)] == []


# equality, worked out by hand ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("a,b", pairs("equal"))
def test_equal(a, b):
    assert is_equal(a, b) and is_equal(b, a) and is_equal(extract(boxed(a)).answer, b)


@pytest.mark.parametrize("a,b", pairs("different"))
def test_different(a, b):
    assert not is_equal(a, b) and not is_equal(b, a) and not is_equal(extract(boxed(a)).answer, b)


# Families of similar answers: pairs that must differ and pairs that must be equal.

@pytest.mark.parametrize("family", [name.partition(": ")[2] for name in ANSWERS if name.startswith("equal: ")])
def test_family(family):
    for a, b in pairs(f"different: {family}"):
        for respelled in (a, f"${a}$", f"\\boxed{{{a}}}"):
            assert not is_equal(respelled, b) and not is_equal(b, respelled), (respelled, b)
    for a, b in pairs(f"equal: {family}"):
        assert is_equal(a, b) and is_equal(b, a), (a, b)


def test_long_integers_are_exact():
    long = "123456789" * 9
    assert is_equal(long + ".0", long) and is_equal("-0" + long, "-" + long) and not is_equal(long, long[:-1] + "8")
    assert is_equal("2^{1000}", str(2**1000))


def test_nothing_equals_the_empty_answer():
    for a in ("", " ", "$$", "0", r"\emptyset"):
        assert not is_equal(a, "") and not is_equal("", a), a


# equality, against fractions ------------------------------------------------------------------------------------------

def spellings(x):
    """One fraction written in several ways."""
    n, d = x.numerator, x.denominator
    yield f"{n}/{d}"
    yield f"\\frac{{{3 * n}}}{{{3 * d}}}"
    yield f"{'-' if n < 0 else ''}\\dfrac{{{abs(n)}}}{{{d}}}"
    if abs(n) > d > 1:
        yield f"{'-' if n < 0 else ''}{abs(n) // d}\\frac{{{abs(n) % d}}}{{{d}}}"
    if d in (1, 2, 4, 5, 8):
        yield str(n / d)                                       # repr is exact for these denominators


def test_rational_numbers_agree_with_fraction():
    rng = random.Random(0)
    for _ in range(120):
        x = Fraction(rng.randint(-60, 60), rng.randint(1, 9))
        y = x if rng.random() < 0.5 else x + Fraction(rng.choice((-1, 1)), rng.randint(1, 9))
        for a in spellings(x):
            for b in spellings(y):
                assert is_equal(a, b) == (x == y), (a, b)


# limits ---------------------------------------------------------------------------------------------------------------

def test_a_comparison_stops_at_its_work_limit():
    many = "+".join(f"\\sqrt{{x+{k}}}" for k in range(200))
    assert not is_equal(",".join([many] * 3), ",".join([many + "+1"] * 3)) and MAX_WORK < 100_000


@pytest.mark.parametrize("huge", [
    r"10^{10^{20}}", r"\sin(10^{10^{20}})", r"\binom{10^{10^{20}}}{2.5}", r"((10^{10^{20}})^{6600})^{6600}+1",
    r"\gcd(10^{10^{20}},3)", r"\pm 10^{10^{20}}", r"2^{2^{2^{2^{2^{2}}}}}", r"\arctan(10^{24}i)", "(2999.5)!",
    f"{'9' * 3000}^{{{'9' * 2900}}}"])
def test_huge_numbers_are_fast_and_equal_nothing_small(huge):
    start = time.process_time()
    assert not is_equal(huge, "1") and not is_equal(huge, huge + "+1") and time.process_time() - start < 1


def test_can_read():
    assert can_read(r"\frac{1}{2}") and can_read("Evelyn") and can_read(r"(-\infty,3]")
    assert not can_read("") and not can_read(r"2^{\aleph_0}") and not can_read("\\boxed{")
