r"""
The grader against arithmetic done elsewhere: Python's Fraction and integer convolution, facts worked by hand, golds of
public data sets (golds.json: 211 answers of MATH, GSM8K, AMC, AIME, OlympiadBench and DeepMath, chosen for variety).

python -m pytest tests/test_rewards.py -q
"""
import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

import fuzz_rewards
from rewards import (MAX_WORK, can_read, extract, extract_answer, format_tags, grade, is_equal, load_reward,
                     overlong_penalty)

GOLDS = json.loads((Path(__file__).parent / "golds.json").read_text())


def boxed(answer):
    return "so it is \\boxed{" + answer + "}."


# golds ----------------------------------------------------------------------------------------------------------------

def test_every_gold_equals_itself_bare_boxed_and_respelled():
    for gold in GOLDS:
        assert is_equal(gold, gold), gold
        assert is_equal(extract_answer(boxed(gold)), gold), gold
        for respelled in (f"${gold}$", f" {gold} ", gold.replace("\\frac", "\\dfrac"), f"\\displaystyle {gold}"):
            assert is_equal(respelled, gold), (respelled, gold)


def test_no_gold_equals_an_unrelated_number():
    assert [gold for gold in GOLDS if is_equal("123456789", gold)] == []


def test_golds_of_different_value_differ():
    """Pairs of plain integers and fractions, with Fraction as the judge."""
    values = [(gold, Fraction(gold)) for gold in GOLDS if gold.replace("/", "").replace("-", "").isdecimal()]
    values += [(f"\\frac{{{n}}}{{{d}}}", Fraction(n, d)) for n in range(-5, 6) for d in range(1, 6)]
    for a, x in values:
        for b, y in values:
            assert is_equal(a, b) == (x == y), (a, b)


# equality, by hand ----------------------------------------------------------------------------------------------------

EQUAL = r"""
0.5 == \frac12                     -\frac{3}{4} == -.75             1\frac{1}{2} == 3/2               2 1/3 == 7/3
1,234 == 1234                      1{,}234 == 1234                  32,\!348 == \$32348               1 000 == 1000
18.00 == 18                         +7 == 7
0.\overline{3} == 1/3               0.1\overline{6} == 1/6
3 \times 10^{4} == 30000            2^{-3} == 0.125
\sqrt{72} == 6\sqrt2                \sqrt[3]{-27} == -3
\frac{1}{\sqrt2} == \sqrt{2}/2     \sqrt{3+2\sqrt2} == 1+\sqrt2     3\pi/6 == \frac{\pi}{2}           e^{i\pi} == -1
(2+i)(2-i) == 5                    \frac{1+i}{1-i} == i             \log_2 32 == 5                    \ln e^3 == 3
\sin 30^\circ == 1/2               \binom{6}{2} == 15               5! == 120                         |{-3}| == 3
\lfloor 2.9 \rfloor == 2           2^{70} == 1180591620717411303424  10^{30} == 1000000000000000000000000000000
0.333333 == 1/3                    4.123105625617661 == \sqrt{17}   50\% == 0.5                       50\% == 50
90^\circ == 90                      12\text{ cm}^2 == 12
7 dollars == \$7                    3\text{ hours} == 3 hours
5 million == 5000000               \text{(B)} == B                  \text{Even} == even               52_{8} == 52_8
(x+1)^2 == x^2+2x+1                 \frac{x^2-1}{x-1} == x+1
\sin 2x == 2\sin x\cos x            \tan^2 y+1 == \sec^2 y
\binom{n}{2} == \frac{n(n-1)}{2}    x^{2/3} == \sqrt[3]{x}^2
\sqrt{x^2} == |x|                   a_1 b_2 == b_{2}a_{1}
x = 5 == 5                          k=5 == x=5
f(x)=x^2 == x^2                     \sqrt2 \approx 1.41 == \sqrt2
y=2x+3 == 2x-y+3=0                 x^2/4+y^2/3=1 == 3x^2+4y^2=12    x \ge 5 == 5 \le x                2x<6 == 3>x
0<x\le1 == (0,1]                    x>3 == (3,\infty)
x \in [1,2] == 1 \le x \le 2        x\ne0 == (-\infty,0)\cup(0,\infty)
1,2,3 == 3,2,1                     \{1,2\} == 2 \text{ and } 1      x=1,y=2 == (1,2)                  y=2,x=1 == x=1,y=2
1\pm\sqrt5 == 1-\sqrt5,1+\sqrt5    (1,2),(3,4) == (3,4),(1,2)       (0;1) == (0,1)                    7:32 == 7 : 32
2:3 == \frac23                      1,5 == 1.5                          (1,2)+t(3,4) == (1+3t,4t+2)
\begin{pmatrix}1\\2\end{pmatrix} == \langle 1,2\rangle
2\begin{pmatrix}1&2\end{pmatrix} == \begin{bmatrix}2 & 4\end{bmatrix}
４２ == 42                         4² == 16                         −5 == -5                          ½ == 0.5
x\equiv3\pmod 7 == 3               10\bmod 7 == 3 (mod 7)           2y-2y+x == x                      \frac{xy}{y} == x
\{x \mid 1<x\le2\} == (1,2]        \operatorname{asin}1 == \pi/2      \gcd(-8,12) == 4                  \max(1) == 1
10^{30} \bmod 7 == 1                -7 \bmod 3 == 2                  2.5 \bmod 1 == 0.5                abs(-3) == 3
(-oo,0)U(1,inf) == (-\infty,0)\cup(1,\infty)       0.\bar{3} == 1/3        Option C == C             3rd == 3
\text{all real numbers} == \mathbb{R}                30 m/s == 30           no solution == \emptyset
\sin 10^{20} == -\sin(-10^{20})    x^{2004}-1 == -1+x^{2004}    \arcsin\frac12 == \pi/6    \sinh 1 == \frac{e-1/e}{2}
0.30000000000000004 == 0.3    \ln(2+\sqrt3) == -\ln(2-\sqrt3)
\cos\frac{\pi}{12} == \frac{\sqrt6+\sqrt2}{4}    \arctan\frac12+\arctan\frac13 == \frac\pi4    \log_4 8 == 1.5
\tan 75^\circ == 2+\sqrt3
((1,2)\cup(3,4))\cup(5,6) == (5,6)\cup(1,2)\cup(3,4)
[[1,2],[3,4]] == \begin{pmatrix}1&2\\3&4\end{pmatrix}                {16 \choose 2} == 120
\begin{cases}x=1\\y=2\end{cases} == x=1,y=2       x=1,y=2 or x=3,y=4 == (3,4),(1,2)
a^2_1 == a_1^2                     14 {, }916 == 14916              \text{five} == 5                  (C) Alina == C
6:30 p.m. == 6:30\text{ PM}         5^\text{th} == 5     5 men == 5             \text{12 cm} == 12
"""
DIFFERENT = r"""
0.33 == 1/3                        0.3333 == 1/3                    2.23 == 2.232                     3.14 == \pi
11/2 == 1 1/2                      12,34 == 1234                    32, 349 == 32349                  1,234 == 1.234
0.5 == 50                          50\% == 5                        5\text{ cm} == 5\text{ m}         5 million == 5
\frac{1}{2^{99}} == \frac{1}{2^{98}}  10^{20}+1 == 10^{20}
\sqrt{10^{40}+1} == 10^{20}         e^{-100} == e^{-101}
9007199254740993 == 9007199254740992      0.0000001 == 0.0000002    1.0000001 == 1                    2^{3^2} == 64
\frac{1}{1000001} == \frac{1}{1000000}    1-1/e == 1+1/e            i == -i                           2+3i == 2-3i
x == -x                             \sqrt{x^2} == x
x+1 == t+1                          \sin x^2 == \sin^2 x
ab == a                            6x == 6                          5m == 5                           x^2+1 == x^2+1=0
41 = 42 == 42                      x=41=42 == 42                    x=y == x=z                        2x+z=1 == 1
x<3 == x>3                         x<3 == x\le3                     f(2)<f(1) == f(4)<f(2)            y=2x == y=3x
5 == 5,6                           5 == 5 or 6                      \pm5 == 5                         1,-2 == 1,-3
(1,2) == (2,1)                     (0,1) == [0,1]                   (1,2) == (1,2,3)                  x=5,y=7 == x=7,y=5
-2,2 == [-2,2]                     \{1,3\} == (3,1)                 12:00 == 1:00                     52_8 == 42
\begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix}1&2\end{pmatrix}  A == B                            east == west
4² == 42                           ٤٢ == 42                         1_000 == 1000                     nan == 0
0.999... == 0.999                  42? == 42                        not 5 == 5                        \ne 5 == 5
1/0 == 2/0                         5 6 == 56                        3!! == 720                        inf == 1e400
6xy == 6                           4ac == 4                         12 xy == 12                       5 factorial == 5
5st == 5                           xU(1,2) == x(1,2)                f' == f
\sin 10^{20} == 42                 \tan 10^{30} == 7                  \cos(10^{14}) == 0.3             \ln 10^{20} == 46
\ln 0 == 0    \ln\ln 1 == 1    \tan 10^{-30} == \tan 10^{-29}    \tan\frac\pi2 == 5
\arctan 10^{20} == \pi/2    \ln(10^{12}-1) == \ln 10^{12}    9.717778751048 == 9.717778757048
\cos 1 == \cos 1+10^{-12}
\sqrt{x}+10^{20} == 10^{20}    \sqrt x+10^{-12} == \sqrt x    \sin(10^{14}x) == x    x^{2004}-1 == x^{2004}+1
3\pmod7 == 3\pmod8                 x\equiv3\pmod7 == 4              x+y-z == x                        6:30 am == 6:30 pm
(A) or (B) == A                    (C) Alina == D                   x=1,y=2 or x=3,y=4 == (1,3),(2,4)
\sin(5,3) == 1                     (-\infty,1)\cup(1,\infty) == y=2,x=1                                1:2:3 == 1/6
"""


def table(text):
    """[(left, right)] of a table of "left == right" cells, two or more spaces apart."""
    pairs = [tuple(cell.split(" == ")) for cell in re.split(r" {2,}|\n", text.strip()) if cell]
    assert all(len(pair) == 2 for pair in pairs), [pair for pair in pairs if len(pair) != 2]
    return pairs


@pytest.mark.parametrize("a,b", table(EQUAL))
def test_equal(a, b):
    assert is_equal(a, b) and is_equal(b, a) and is_equal(extract_answer(boxed(a)), b)


@pytest.mark.parametrize("a,b", table(DIFFERENT))
def test_different(a, b):
    assert not is_equal(a, b) and not is_equal(b, a) and not is_equal(extract_answer(boxed(a)), b)


# equality, against independent arithmetic -----------------------------------------------------------------------------

def spellings(x):
    """One fraction written in several ways."""
    n, d = x.numerator, x.denominator
    yield f"{n}/{d}"
    yield f"\\frac{{{3 * n}}}{{{3 * d}}}"
    yield f"{'-' if n < 0 else ''}\\dfrac{{{abs(n)}}}{{{d}}}"
    if abs(n) > d > 1:
        yield f"{'-' if n < 0 else ''}{abs(n) // d}\\frac{{{abs(n) % d}}}{{{d}}}"
    if d in (1, 2, 4, 5, 8):
        yield str(n / d)                                       # short binary or decimal fractions: repr is exact


def test_rational_numbers_agree_with_fraction():
    rng = random.Random(0)
    for _ in range(400):
        x = Fraction(rng.randint(-60, 60), rng.randint(1, 9))
        y = x if rng.random() < 0.5 else x + Fraction(rng.choice((-1, 1)), rng.randint(1, 9))
        for a in spellings(x):
            for b in spellings(y):
                assert is_equal(a, b) == (x == y), (a, b)


def test_factored_polynomials_agree_with_convolution():
    rng = random.Random(1)
    for _ in range(100):
        roots = [rng.randint(-9, 9) for _ in range(rng.randint(2, 5))]
        coefficients = [1]                                     # highest power first
        for r in roots:
            coefficients = [a - r * b for a, b in zip([*coefficients, 0], [0, *coefficients])]
        factored = "".join(f"(x-{r})" if r >= 0 else f"(x+{-r})" for r in roots)
        degree = len(roots)
        expanded = "+".join(f"({c})x^{{{degree - k}}}" for k, c in enumerate(coefficients))
        assert is_equal(factored, expanded), (factored, expanded)
        k = rng.randrange(degree + 1)
        coefficients[k] += 1
        wrong = "+".join(f"({c})x^{{{degree - k}}}" for k, c in enumerate(coefficients))
        assert not is_equal(factored, wrong), (factored, wrong)


# extraction -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text,answer,rule", [
    (r"first \boxed{1}, no: \boxed{\frac{1}{2}} indeed", r"\frac{1}{2}", "box"),
    (r"\fbox{7}", "7", "box"), (r"\boxed   {7}", "7", "box"), (r"so \boxed 7$", "7", "box"),
    (r"\boxed{3} and then \boxed{4", "3", "box"),              # an unclosed box is no answer, an earlier one counts
    (r"\boxed{3} or not, \boxed{}", "3", "box"),
    (r"\boxed{2}, \boxed{3}", "2 , 3", "box"), (r"$\boxed{2}$ and $x=\boxed{3}$", "2 , 3", "box"),
    (r"\boxed{5} or \boxed{5}", "5", "box"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}", "box"),
    ("<think>\\boxed{1}</think>\\boxed{2}<|im_end|>\\boxed{3}", "2", "box"),
    ("<think>let me see \\boxed{42}", None, "truncated"),      # the thought was cut off
    ("<think>\\boxed{42}</think> no idea", None, "none"),
    ("<answer>41</answer> <answer> 42 </answer><answer></answer>", "42", "tag"),
    ("#### 1,234\nmore\n#### 72", "72", "marker"),
    ("The answer is 3. Wait, the answer is $4$.", "4", "marker"),
    ("The final answer is $x=\\frac12$. I hope it is correct.", "x=\\frac12", "marker"),
    ("**Answer:** B", "B", "marker"), ("Final answer: The largest $n$ is 34.", "34", "marker"),
    ("The answer is 18 eggs because 16 + 2 = 18.", "18", "marker"),
    ("He pays 3 + 4 = $7.50 in all.", "$7.50", "last_number"), ("It fell to -3 degrees", "-3", "last_number"),
    ("pages 10-25", "25", "last_number"), ("it is either 5 or 6", None, "none"),
    ("code AZYUK2A", None, "none"), ("", None, "none"), ("一共有3 + 10 = 13只鸟。", "13", "last_number"),
    # a copied prompt: the empty box of the instruction must not let a number of the question count
    ("Put your answer in \\boxed{}. What is 6*7? 42", None, "none"),
])
def test_extraction(text, answer, rule):
    assert extract(text) == (answer, rule)


def test_last_number_can_be_turned_off():
    assert extract("we get 42", last_number=False) == (None, "none")
    assert extract_answer("we get 42") == "42"


@pytest.mark.parametrize("text", [
    "5 or 6", "The answer is 5 or 6.", "it is $5$ or $6$", "The answer is either 5 or 6.", "The answer is $5$ or $6$",
    r"\boxed{5} or \boxed{6}", r"\boxed{5 \text{ or } 6}", r"\boxed{5, 6}", r"\boxed{\pm 5}", r"\boxed{5}, \boxed{6}"])
def test_several_answers_never_equal_one_of_them(text):
    """Listing every option once earned full marks elsewhere: one answer must not be a member of the list."""
    for gold in ("5", "6"):
        assert grade(text, gold, last_number=True).correct == 0


def test_gsm8k_answers():
    for text in ("... #### 1,234", "The answer is $1,234.00.", "So she earns $1234.",
                 r"\boxed{1{,}234 \text{ dollars}}", "<answer>1234.0</answer>", "in total 1,234 dollars"):
        assert grade(text, "1234", last_number=True).correct == 1, text
    assert grade("They have ,", "1", last_number=True).answer is None


# limits ---------------------------------------------------------------------------------------------------------------

ADVERSARIAL = [  # text, gold, right verdict
    ("\\boxed{42 " * 20_000, "42", 0), ("\\boxed{7}" + "\\boxed{42 " * 20_000, "7", 1),
    (boxed("{" * 100_000 + "42" + "}" * 100_000), "42", 1), ("\\boxed{" + "{" * 100_000 + "42", "42", 0),
    (boxed("{a" * 50_000 + "}" * 50_000), "42", 0), (boxed("(" * 50_000 + "42" + ")" * 50_000), "42", 1),
    (boxed("9^{9^{9^{9}}}"), "9^{9^{9^{8}}}", 0), (boxed("2^{10^{10}}"), "2^{10^{10}}", 1),
    (boxed("2**999999999"), "2", 0),
    (boxed("((((100!)!)!)!)!"), "1", 0), (boxed("3!!!!!!!"), "720", 0), (boxed("99999999!"), "1", 0),
    (boxed("1" * 5_000), "1" * 5_000, 1), (boxed("1" * 5_000), "1" * 4_999 + "2", 0),
    (boxed("1" * 5_000 + "/3"), "1", 0),
    (boxed("\\frac{1}{" * 5_000 + "2" + "}" * 5_000), "2", 0), (boxed("\\{\\pm" * 200 + "1" + "\\}" * 200), "1", 0),
    (boxed("1" + "+1" * 3_000), "1", 0), (boxed(",".join(map(str, range(1_500)))), "1", 0),
    (boxed("|" * 1_999), "1", 0),
    ("$" * 100_000, "42", 0), ("answer is " * 20_000, "42", 0), ("<answer>" * 20_000, "42", 0),
    ("1," * 100_000, "42", 0), (",".join(["27", "5"] * 40) + "x", "42", 0),
    (boxed("\\lfloor e^{10^6}\\rfloor"), "1", 0), (boxed("\\lfloor 10^6!^2\\rfloor"), "\\pi^2", 0),         # once 42 s
    (boxed("(1,2)" * 900), "(1,2)" * 899 + "(1,3)", 0),
    (boxed("\\sqrt{" * 60 + "1" + "(1,2)}" * 60), "1", 0),   # once hours
    (boxed("3^{10^6} \\bmod 7"), "4", 0), (boxed("option " + " " * 5_000 + "ab"), "1", 0),
    # each of these made a regular expression quadratic or worse in an earlier version
    (",".join(["27", "5", "108"] * 30), "42", 0), ("answer" + " " * 20_000, "42", 0), ("\\(" * 10_000, "42", 0),
    ("\\$" * 10_000, "42", 0), (boxed("1" + " " * 5_000 + "«"), "42", 0), ("<|im_start|>" * 50_000, "42", 0),
    ("x" * 1_000_000 + "\\boxed{42}", "42", 1), (boxed("\ud800"), "42", 0), (boxed("__import__('os')"), "0", 0),
]


@pytest.mark.parametrize("case", range(len(ADVERSARIAL)))
def test_adversarial_texts_get_the_right_verdict_in_50_ms(case):
    text, gold, want = ADVERSARIAL[case]
    seconds = []
    for _ in range(3):                                         # CPU time, best of 3: the machine may be shared
        start = time.process_time()
        assert grade(text, gold, last_number=True).correct == want
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05, seconds


def test_a_comparison_stops_at_its_work_limit():
    many = "+".join(f"\\sqrt{{x+{k}}}" for k in range(200))
    assert not is_equal(",".join([many] * 3), ",".join([many + "+1"] * 3)) and MAX_WORK < 100_000


def test_fuzz_no_exception_reflexive_symmetric_and_fast():
    """15,000 random strings and mutated golds; python tests/fuzz_rewards.py 1000000 runs more of them."""
    assert fuzz_rewards.run(15_000)["failures"] == []


# scores ---------------------------------------------------------------------------------------------------------------

def test_grade_keeps_correctness_and_format_apart():
    assert grade(r"\boxed{5}", "5") == (1, 1, "box", "5")
    assert grade(r"\boxed{4}", "5") == (0, 1, "box", "4")
    assert grade("The answer is 5.", "5") == (1, 0, "marker", "5")
    tags = "<think>2+3</think>\n<answer>5</answer>"
    assert grade(tags, "5", style="tags") == (1, 1, "tag", "5")
    assert grade(tags + " and more", "5", style="tags") == (1, 0, "tag", "5")
    assert grade("", "5") == (0, 0, "none", None)
    with pytest.raises(AssertionError, match="xml"):
        grade(tags, "5", style="xml")


def test_format_tags_wants_each_tag_once_and_in_order():
    assert format_tags("<think>a</think><answer>b</answer><|im_end|>") == 1
    for text in ("<answer>b</answer><think>a</think>", "<think>a</think>", "x<think>a</think><answer>b</answer>",
                 "<think>a</think> hm <answer>b</answer>", "<think>a</think><answer>b</answer><answer>c</answer>"):
        assert format_tags(text) == 0, text


def test_unreadable_golds_are_found():
    assert can_read(r"\frac{1}{2}") and can_read("Evelyn") and can_read(r"(-\infty,3]")
    assert not can_read("") and not can_read(r"2^{\aleph_0}") and not can_read("\\boxed{")


def test_overlong_penalty_is_a_ramp():
    """1,000 tokens allowed, the last 200 are the buffer: halfway through it costs a half."""
    assert [overlong_penalty(n, 1_000, 200) for n in (0, 800, 900, 1_000, 5_000)] == [0, 0, -0.5, -1, -1]


def test_load_reward(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def length(completion, gold):\n    return len(completion)\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    assert load_reward("mine:length")("abc", "x") == 3
    wrong = {"mine": "module:function", "mine:number": "no function", "absent_module:f": "cannot import"}
    for spec, message in wrong.items():
        with pytest.raises((AssertionError, ValueError), match=message):
            load_reward(spec)
