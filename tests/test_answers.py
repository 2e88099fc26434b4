r"""
Equality of answers, against independent arithmetic (Fraction, integer convolution) and verdicts worked out by hand.
golds.json has 211 gold answers of MATH, GSM8K, AMC, AIME, OlympiadBench and DeepMath, chosen for variety.

python -m pytest tests/test_answers.py -q
"""
import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

from grader.answers import MAX_WORK, can_read, is_equal
from rewards import extract

GOLDS = json.loads((Path(__file__).parent / "golds.json").read_text())


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

EQUAL = r"""
0.5 == \frac12    -\frac{3}{4} == -.75    1\frac{1}{2} == 3/2    2 1/3 == 7/3    1,234 == 1234    1{,}234 == 1234
32,\!348 == \$32348    18.00 == 18    +7 == 7    0.\overline{3} == 1/3    0.1\overline{6} == 1/6
3 \times 10^{4} == 30000    2^{-3} == 0.125    \sqrt{72} == 6\sqrt2
\frac{1}{\sqrt2} == \sqrt{2}/2    \sqrt{3+2\sqrt2} == 1+\sqrt2    3\pi/6 == \frac{\pi}{2}    e^{i\pi} == -1
(2+i)(2-i) == 5    \frac{1+i}{1-i} == i    \log_2 32 == 5    \ln e^3 == 3    \sin 30^\circ == 1/2
\binom{6}{2} == 15    5! == 120    |{-3}| == 3    2^{70} == 1180591620717411303424
0.333333 == 1/3    4.123105625617661 == \sqrt{17}    50\% == 0.5    50\% == 50    90^\circ == 90
12\text{ cm}^2 == 12    7 dollars == \$7    \text{(B)} == B    \text{Even} == even    52_{8} == 52_8
(x+1)^2 == x^2+2x+1    \frac{x^2-1}{x-1} == x+1    \sin 2x == 2\sin x\cos x    \tan^2 y+1 == \sec^2 y
\binom{n}{2} == \frac{n(n-1)}{2}    x^{2/3} == \sqrt[3]{x}^2    \sqrt{x^2} == |x|    a_1 b_2 == b_{2}a_{1}
x = 5 == 5    k=5 == x=5    f(x)=x^2 == x^2    \sqrt2 \approx 1.41 == \sqrt2    y=2x+3 == 2x-y+3=0
x^2/4+y^2/3=1 == 3x^2+4y^2=12    x \ge 5 == 5 \le x    x<3 == 3>x    0<x\le1 == (0,1]    x>3 == (3,\infty)
x \in [1,2] == 1 \le x \le 2    x\ne0 == (-\infty,0)\cup(0,\infty)    1,2,3 == 3,2,1    \{1,2\} == 2 \text{ and } 1
x=1,y=2 == (1,2)    y=2,x=1 == x=1,y=2    1\pm\sqrt5 == 1-\sqrt5,1+\sqrt5    (1,2),(3,4) == (3,4),(1,2)
(0;1) == (0,1)    2:3 == \frac23    \begin{pmatrix}1\\2\end{pmatrix} == \langle 1,2\rangle
2\begin{pmatrix}1&2\end{pmatrix} == \begin{bmatrix}2 & 4\end{bmatrix}    ４２ == 42    4² == 16    −5 == -5    ½ == 0.5
x\equiv3\pmod 7 == 3    10\bmod 7 == 3\pmod7    2y-2y+x == x    \frac{xy}{y} == x
10^{30} \bmod 7 == 1    -7 \bmod 3 == 2    abs(-3) == 3
(-oo,0)\cup(1,inf) == (-\infty,0)\cup(1,\infty)    0.\bar{3} == 1/3    \text{all real numbers} == \mathbb{R}
30 m/s == 30    no solution == \emptyset    \sin 10^{20} == -\sin(-10^{20})    x^{2004}-1 == -1+x^{2004}
\arcsin\frac12 == \pi/6    \ln(2+\sqrt3) == -\ln(2-\sqrt3)    \cos\frac{\pi}{12} == \frac{\sqrt6+\sqrt2}{4}
\arctan\frac12+\arctan\frac13 == \frac\pi4    \log_4 8 == 1.5    \tan 75^\circ == 2+\sqrt3
((1,2)\cup(3,4))\cup(5,6) == (5,6)\cup(1,2)\cup(3,4)    \text{five} == 5    (C) Alina == C
6:30 p.m. == 6:30\text{ PM}    5 men == 5    \text{12 cm} == 12    \|x\| == |x|
floor(n/2) == \lfloor\frac n2\rfloor    |5 \bmod 3| == 2    x!\neq1 == x! \ne 1    (2-\sqrt3)^4 == 97-56\sqrt3
\sin\pi == 0    e^{i\pi}+1 == 0    \sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt6} == 0
\left(\frac{1+i\sqrt3}{2}\right)^{3} == -1    3^{50}\sqrt2 == \sqrt{2}\cdot3^{50}
2^{10^{10}}x == x\cdot 2^{10^{10}}    \cos 90^\circ == 0    \sqrt0 == 0
\lfloor\frac{2n}{4}\rfloor == \lfloor\frac n2\rfloor    5:00 == 05:00    |a|b == b\cdot|a|
2\frac{x}{3} == \frac{2x}{3}
\operatorname{arctan}x == \arctan x    10\text{ mod }7 == 3    -50\% == -50    \sqrt2\frac12 == \frac{\sqrt2}2
"""
DIFFERENT = r"""
0.33 == 1/3    2.23 == 2.232    3.14 == \pi    11/2 == 1 1/2    1,234 == 1.234    1,5 == 1.5    0.5 == 50    50\% == 5
5\text{ cm} == 5\text{ m}    5 million == 5    \frac{1}{2^{99}} == \frac{1}{2^{98}}    10^{20}+1 == 10^{20}
\sqrt{10^{40}+1} == 10^{20}    e^{-100} == e^{-101}    0.0000001 == 0.0000002    1.0000001 == 1    2^{3^2} == 64
1-1/e == 1+1/e    i == -i    2+3i == 2-3i    x == -x    \sqrt{x^2} == x    x+1 == t+1    \sin x^2 == \sin^2 x
ab == a    6x == 6    x^2+1 == x^2+1=0    41 = 42 == 42    x=41=42 == 42    x=y == x=z    2x+z=1 == 1    x<3 == x>3
x<3 == x\le3    f(2)<f(1) == f(4)<f(2)    y=2x == y=3x    5 == 5 or 6    \pm5 == 5    1,-2 == 1,-3    (1,2) == (2,1)
(0,1) == [0,1]    x=5,y=7 == x=7,y=5    -2,2 == [-2,2]    \{1,3\} == (3,1)    12:00 == 1:00    52_8 == 42
\begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix}1&2\end{pmatrix}    east == west    4² == 42    ٤٢ == 42
1_000 == 1000    nan == 0    0.999... == 0.999    42? == 42    not 5 == 5    \ne 5 == 5    1/0 == 2/0    5 6 == 56
inf == 1e400    4ac == 4    12 xy == 12    5 factorial == 5    apple(0) == 0    We first find f^{-1}(0) == 0
xU(1,2) == x(1,2)    f' == f    \sin 10^{20} == 42    \tan 10^{30} == 7    \cos(10^{14}) == 0.3    \ln 10^{20} == 46
\ln 0 == 0    \ln\ln 1 == 1    \tan 10^{-30} == \tan 10^{-29}    \tan\frac\pi2 == 5
\arctan 10^{20} == \pi/2    \ln(10^{12}-1) == \ln 10^{12}    \cos 1 == \cos 1+10^{-12}    \sqrt{x}+10^{20} == 10^{20}
\sqrt x+10^{-12} == \sqrt x    \sin(10^{14}x) == x    x^{2004}-1 == x^{2004}+1    3\pmod7 == 3\pmod8
x\equiv3\pmod7 == 4    x+y-z == x    6:30 am == 6:30 pm    (A) or (B) == A    (C) Alina == D
x=1,y=2 or x=3,y=4 == (1,3),(2,4)    \sin(5,3) == 1    (-\infty,1)\cup(1,\infty) == y=2,x=1    1:2:3 == 1/6
2^{-2^{40}} == 0    10^{-10^9} == 0    e^{-1000} == 0    5+2^{-2^{40}} == 5    \sec^{-1}2 == 5
\sec^{-1}2 == \frac{\pi}{3}    \textcolor{red}{5} == 6    \sqrt{2} == 1.41422
\sqrt{2} == 1.4142135723    \frac{1}{2^{99}}\sqrt2 == \frac{1}{2^{98}}\sqrt2    10^{20}+\sqrt2 == 10^{20}
10^{20}\pi+\sqrt2 == 10^{20}\pi+\sqrt3    \pi == \frac{22}{7}    \pi == \frac{355}{113}
e^{\pi\sqrt{163}} == 262537412640768744    e^{\pi\sqrt{163}}-262537412640768744 == 0
e^{\pi\sqrt{67}} == 147197952744    \sqrt{10^{12}+1}-10^6 == 0    \sqrt{2}+\sqrt{3} == \sqrt{9.8989795}
\sqrt{10^{40}+1} == \sqrt{10^{40}+2}    (10^{20}+1)\sqrt x == (10^{20}+2)\sqrt x    2^{10^{-20}} == 1
2^{10^{-60}} == 1    e^{10^{-60}} == 1    \sin 10^{-60} == 0    \tanh 20 == 1    \cos 10^{-8} == 1
\ln(10^{12}-1) == \ln(10^{12}+1)    \lfloor\sqrt{10^{30}-1}\rfloor == 10^{15}    \arctan(10^{10}\pi) == \frac\pi2
\arctan e^{100} == 0    \ln(\pi^{60}) == 0    |12-y| == 12-y    |17-e^y| == 17-e^y    \sqrt{(\ln y)^2} == \ln y
\sqrt{(12/x+10)^2} == 12/x+10    \lfloor\frac{2n-1}{5}\rfloor == \lfloor\sqrt{n-1}\rfloor
\lfloor\sqrt n-0.5\rfloor == \lfloor\sqrt n-0.2\rfloor    \sin(4^{-1.3}/10^6-1) == \sin(4^{-1.3001}/10^6-1)
32, 349 == 32349    x+y+z=0 == 0    \log_0 5 == 0    2\frac{x}{3} == 2+\frac{x}{3}
"""


def table(text):
    """Pairs (left, right) from a table of cells "left == right", separated by two or more spaces."""
    pairs = [tuple(cell.split(" == ")) for cell in re.split(r" {2,}|\n", text.strip()) if cell]
    assert all(len(pair) == 2 for pair in pairs), [pair for pair in pairs if len(pair) != 2]
    return pairs


@pytest.mark.parametrize("a,b", table(EQUAL))
def test_equal(a, b):
    assert is_equal(a, b) and is_equal(b, a) and is_equal(extract(boxed(a)).answer, b)


@pytest.mark.parametrize("a,b", table(DIFFERENT))
def test_different(a, b):
    assert not is_equal(a, b) and not is_equal(b, a) and not is_equal(extract(boxed(a)).answer, b)


# Families of similar answers: first pairs that must differ, then pairs that must be equal.

FAMILIES = {
    "repeats count in lists, not in sets": (r"""
2,3,3 == 2,2,3    2,3,3 == 2,3    x=1,x=1,x=2 == x=1,x=2,x=2    5,5 == 5    (1,2),(1,2),(3,4) == (1,2),(3,4),(3,4)
\{1,2,2\} == 1,1,2
""", r"""
2,3,3 == 3,2,3    3\pm0 == 3    0,\pm2 == 0,2,-2    p=\pm q == \pm q
"""),
    "words, Roman numerals and sequences are not products of their letters": (r"""
\text{IX} == XI    bca == acb    was == saw    two == tow    AB == A    not == ton    A, B == A, C
""", r"""
ab == a\cdot b    2ab == 2ba    no == No    pi == \pi    BCA == \text{BCA}
AB=12 == \boxed{AB=12}    2AB+C == C+2AB
"""),
    "the name of an unknown is free, unless order or function matters": (r"""
(x,y)=(1,2) == (y,x)=(1,2)    (a,b,c)=(1,2,3) == (c,b,a)=(1,2,3)    x:y=2:3 == y:x=2:3    a:b:c=1:2:3 == c:b:a=1:2:3
x/y=2 == y/x=2    \cos A=.5 == \sin A=.5    \sin A=.5 == A=.5    |x|=5 == x=5    P(A)=.5 == P(B)=.5
\overline{z}=1+i == z=1+i    x=1,y=2 == y=1,x=2    x=1,y=2 == y=1,z=2    x=y == y=y    f(x)=ax == f(y)=ax
f(y)=1,f(x)=2 == f(x)=1,f(x)=2
\frac{dy}{dx}=2x == y=2x
\frac{x}{y}=2 == \frac{y}{x}=2    x<y == y<x    \tan A=2 == 2    \ln x=2 == 2    r == R
ab == AB    \pi r^2 == \pi R^2
""", r"""
(x,y)=(1,2) == (1,2)    (x,y)=(1,2),(3,4) == (3,4),(1,2)    x:y=2:3 == 2/3    x_1=5 == x=5    x:y=4:6 == x/y=2/3
\frac{x}{y}=2 == x/y=2    k=5 == x=5    f(x)=x^2 == y=x^2    \cos A=.5 == \cos A=\frac12    x_1=1,x_2=2 == x=2,x=1
AB=5 == 5    \frac{dy}{dx}=2x == 2x    \theta=\pi == x=\pi    y'=2x == y'=x+x
"""),
    "different units clash, and so do their powers": (r"""
5\text{ cm}^3 == 5\text{ cm}^2    5 cm == 5 cm^2    5 units == 5 square units    5 m^2 == 5 ft^2
50^\circ\text{F} == 50^\circ\text{C}    50^\circ == 50 radians    \$5 == €5    5\% == \$5
5 minutes before noon == 5 minutes after noon    \$.50 == 50    60 mph == 60 kmh    3 degrees == 3 rad
""", r"""
5 centimeters squared == 5 cm^2    5\text{ cm}^3 == 5\text{ cubic cm}    60 mph == 60 miles per hour
60 mph == 60\text{ mi/h}    60 km/h == 60    9.8\text{ m/s}^2 == 9.8    60 m/s == 60\text{ meters per second}
50^\circ\text{C} == 50°C    \$18.90 == 18.9    $5$ == \$5    €5 == 5 euros    20 percent == 0.2
20\,\mathrm{N} == 20    5 N == 5 newtons    ⅓ == 1/3    5 kg == 5 kilograms    90 == 90 degrees
"""),
    "a long decimal equals only the exact value that rounds to it": (r"""
12345678905.0 == 12345678900    1234567890.9 == 1234567890    $12,345,678,905.00 == 12345678900    0.9999999999 == 1
-1.0000000001 == -1    3.1415926566 == \pi    0.3333333334 == 1/3    -0.3333333334 == -1/3    0.300000000000004 == 0.3
0.333333333333 == -1/3    0.30000000000000004 == -0.3
""", r"""
0.333333333333 == 1/3    -0.333333333333 == -1/3    3.14159265359 == \pi    3.141593 == \pi    1.4142135624 == \sqrt2
10^{10}/3 == 3333333333.333333    2.0000000000 == 2
"""),
    "a single letter is a unit in \\text, or after a number and a space": (r"""
5 m == 5m^2    5\text{ m} == 5\text{ cm}    5\text{ s} == 5\text{ h}    5\text{ m} == 5\text{ m}^2
5\text{ N} == 5\text{ J}    5\text{ m} == 5m^2    5\text{ A} == 5    x\text{ m} == x    40^\circ\text{N} == 40
\log_2\text{N} == \log_2    5 m, 6 == 5, 6    5\text{ m}+1 == 5    5\text{ m} == 6    5\text{ m} == \text{m}
(A) 5 m == B    2^{\text{m}} == 2    x_{\text{m}} == x    5 m h == 5    5 million == 5 m    5 half == 5 h
\$5 m == 5    €5 m == 5
""", r"""
20\,\mathrm{g} == 20    144 \mbox{ m}^3 == 144    70\sqrt{2} == 70\sqrt2\text{ m}    12\pi\text{ m}^2 == 12\pi
\frac{3}{4}\text{ h} == 0.75    (1+\sqrt2)\mathrm{ m} == 1+\sqrt2    2.5 h == 2\frac12    1,000 m == 1000
-3 m == -3    5 m == 5m    5 m == 5.0\text{ m}    5\text{ m} == 5.0\text{ meters}    $20$ m == 20
3\text{ m}+1 == 1+3m    60 km / h == 60    x = 5\text{ m} == 5    (\text{A}) == A    60\text{ km}/\text{h} == 60 km/h
"""),
    "short units": (r"""
x mg == x    2mg == 2 grams
""", r"""
2 am == 2    2 mg == 2    10:30am == 10:30 am    6:30am == 6:30\text{ a.m.}
5 matrices == 5    3 \times 4\text{ cm} == 12    250 ml == 250
"""),
    "log without a base has base 10": (r"""
\log 2 == 0.693147    \log 8 == 3    \lg x == \ln x    \lg e == 1    \log x == \log_2 x    \log x == x
\log^2 100 == 2    3\log 5 == 3\ln 5
""", r"""
\log(1000) == 3    \log 2 == 0.301030    \lg x == \log x    \log x == \log_{10} x    \log_e 2 == \ln 2
\log 2 == \frac{\ln 2}{\ln 10}    \log^2 100 == 4    \frac{\log 8}{\log 2} == 3    2 lg == 2gl    \lg^2 100 == 4
x = \log 1000 == 3    \log 10x == 1+\log x
"""),
    "a comma may group thousands, but separates items in brackets": (r"""
[100,200] == 100200    \langle 100,200\rangle == 100200    \gcd(830,450) == 830450    \{100,200\} == 100200
1,00 == 100    ((1,200),3) == (1200,3)    1,000 == 1,0
""", r"""
12,345 == 12345.0    1,234.5 == 1234.5    -1,234 == -1234    x=1,234 == 1234    1,000\pi == 1000\pi
\{100,200\} == \{200,100\}    \frac{1,000}{3} == \frac{1000}{3}
(1,\!000, 2) == (1000,2)
"""),
    "50% is 0.5 and 50, but 200% or more needs its sign": (r"""
2500\% == 25    300\% == 3    0.25\% == 25    0.5\% == 0.5    100\sqrt{5}\% == \sqrt5    40 percent of them == 0.04
5\% == 5 cm
""", r"""
25\% == 25    100\% == 1    2500\% == 2500    0.5\% == 0.005    \frac{25}{2}\% == \frac18
12\text{ per cent} == 12\%    40 percent of them == 0.4    33\frac13\% == \frac13
20\text{ percent of the class} == 20\%
"""),
    "binomials, gcd and infinity": (r"""
\binom{2}{n} == \frac{2}{n}    \binom{n}{4} == 0    \gcd(a,b) == 1    \gcd(k,p-11) == \gcd(k,p-1)
\gcd(n,6) == \gcd(n,3)    (n-1)! == n!    \gcd(n,7) == 1    0\cdot\infty == 0    2\infty == \infty
\frac{1}{\infty} == 0    \infty == -\infty
""", r"""
\binom{n}{3} == \frac{n(n-1)(n-2)}{6}    \binom{5}{k} == \binom{5}{5-k}
\binom{n+1}{k} == \binom{n}{k}+\binom{n}{k-1}    \binom{2n}{n} == \frac{(2n)!}{n!^2}    n(n-1)! == n!
\infty == +\infty    (-\infty,\infty) == \mathbb{R}
"""),
    "unsolved equations are not solutions, but lines and sums have many forms": (r"""
x=3x-6 == x=3    x>6-x == x>3    (-x)=5 == 5    2x=6 == x=3    3x-1=8 == x=3    \frac{x}{2}=7 == x=14    x+5>8 == x>3
2x<6 == 3>x    -x>2 == x<-2    x+5>8 == (3,\infty)    x+1=7 == 7    x^2=9 == 9    m+n=116 == 115    x+y=3 == x-y=3
x-y=1 == y-x=1    m+n = 100+17 = 116 == 116    m+n=n == n    x+y=5,x-y=1 == (5,1)
""", r"""
2x+3y\le6 == 6\ge3y+2x    x=3 == 3=x    x-y=1 == y-x=-1    m+n = 27+64 = 91 == 91    p-q=4 == 4    AB+BC=10 == 10
r+s+t=-\frac72 == -3.5    m+n=\boxed{116} == 116
"""),
    "words after a number name things or change its value": (r"""
5\text{ sixteenths} == 5    3 quadrillion == 3    5 wrong == 5    10:30\text{ at night} == 10:30
15\text{ dogs} == 15\text{ m}    40 books == \$40    10:30 pm == 10:30    4:15\text{ p.m.} == 4:15
""", r"""
5 months == 5    5 paths == 5    15 cats == 15 dogs    24\text{ students} == 24    7:45 am == 7:45\text{ a.m.}
False == \text{false}
"""),
    "a choice equals its letter and its value, unless it is doubted": (r"""
\textbf{(B)}\ 12 == C    \textbf{(B)}\ 12 == 13    \textbf{(B)}\ 12 == \textbf{(C)}\ 12    (B) is wrong == B
(B) 12 or (C) 15 == B    (B) 12 or (C) 15 == 12
""", r"""
\textbf{(B)}\ 12 == B    \textbf{(B)}\ 12 == 12    \textbf{(E)} \ 2\sqrt3 == 2\sqrt3    \mathrm{(A)}\ 4 == A
(b) == B    B. 12 == B
"""),
    "bases and numbers in words": (r"""
4_2 == 4    7_3 == 7    1011_{\text{two}} == 1011_3    twenty-five == 20    fifteen == 50
""", r"""
212_3 == 212    \text{twenty-five} == 25    Forty Two == 42    ninety-nine == 99    thirteen == 13
"""),
    "conditions, unions and differences of sets": (r"""
\{x \mid x<3\} == (3,\infty)    \{n \mid n \ge 3\} == \{3\}    \mathbb{R}\setminus\{1\} == \mathbb{R}\setminus\{2\}
\mathbb{R}\setminus\{(1,2)\} == \mathbb{R}    \mathbb{R}\setminus(0,1) == \mathbb{R}    \{1,3\}\cup\{2,4\} == \{1,3\}
\{1,2\}\cup\{3\} == \{1,2\},\{3\}    \{1\}\cap\{1,2\} == \{1,2\}
""", r"""
\{x \mid x<3\} == (-\infty,3)    \{x : x \ge -2\} == [-2,\infty)    \{x\mid x>5\} == x>5
\{x \in \mathbb{R} \mid 1<x\le4\} == (1,4]    \left\{x \,\middle|\, x>\frac12\right\} == (\frac12,\infty)
\{x \mid x\ne2\} == (-\infty,2)\cup(2,\infty)    \{x \mid x \in (0,1)\} == (0,1)
\mathbb{R}\setminus\{1\} == (-\infty,1)\cup(1,\infty)
\mathbb{R}\setminus\{2,-2\} == (-\infty,-2)\cup(-2,2)\cup(2,\infty)    \{1,3\}\cup\{2,4\} == \{1,2,3,4\}
[0,1]\cup\{3\} == \{3\}\cup[0,1]
"""),
    "space between rows, binomials with indices, degrees in words, for all": (r"""
\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix} == \begin{pmatrix}1&2\\3&5\end{pmatrix}    {}_8C_4 == 84    x_8C_4 == 70
{}_8P_4 == 70    \sin 30 == \frac12    45\text{ degrees} == 45\text{ radians}    f(x)=2x\text{ for all }x == 3x
2x\text{ for all }x\text{ but }0 == 2x
""", r"""
\sin 30\text{ degrees} == \frac12    \cos 60 degrees == 0.5
45\text{ degrees} == 45^\circ    f(x)=2x\text{ for all }x == 2x    x^2, \forall x == x^2
x^2+1\quad\text{for all } x \in \mathbb{R} == x^2+1
"""),
    "percent in words, matrices as arrays": (r"""
12 per cent == 0.012    \left(\begin{array}{cc}1&2\\3&4\end{array}\right) == \begin{pmatrix}1&3\\2&4\end{pmatrix}
\left(\begin{array}{cc|c}1&2&3\end{array}\right) == (1,2,3)
\left(\begin{array}{c}1\\2\end{array}\right) == \begin{pmatrix}1&2\end{pmatrix}
\left|\begin{array}{cc}1&2\\3&4\end{array}\right| == \begin{pmatrix}1&2\\3&4\end{pmatrix}
""", r"""
12 per cent == 12\%    12\text{ per cent} == 0.12
\left(\begin{array}{cc}1&2\\3&4\end{array}\right) == \begin{pmatrix}1&2\\3&4\end{pmatrix}
\left[\begin{array}{rr} 1 & -2 \\ 3 & 4 \end{array}\right] == \begin{bmatrix}1&-2\\3&4\end{bmatrix}
"""),
    "times, dates, telephone numbers and ranges are not arithmetic": (r"""
10:30 == 1/3    10:30 == (10,30)    12:30 == 2/5    6:15 == 0.4    5:00 == 5    10:30 am == 1/3    10:30 == 1:03
1:2:3 == (1,2,3)
""", r"""
10:30 == \text{10:30}    10:30 am == 10:30\text{ a.m.}    2:3 == 4:6    3:4 == 0.75    10-3 == 7    x-1 == -1+x
"""),
    "points, signs and words that change the value are kept": (r"""
\text{-5} == 5    \text{.5 cm} == 5 cm    \boxed{.5} == 5    5 tenths == 5    5 squared == 5    >5 == 5
5 and a half == 5    5 to 6 == 5    between 5 and 6 == 5,6    5th place == 5    \{x : x>3\} == \{x : x>2\}
""", r"""
\text{.5} == 1/2    \text{-5} == -5    \text{5 cm} == 5    5 apples == 5    5\text{ ways} == 5
"""),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    wrong, right = map(table, FAMILIES[family])
    for a, b in wrong:
        for respelled in (a, f"${a}$", f"\\boxed{{{a}}}"):
            assert not is_equal(respelled, b) and not is_equal(b, respelled), (respelled, b)
    for a, b in right:
        assert is_equal(a, b) and is_equal(b, a), (a, b)


def test_huge_integers_are_exact_and_no_value_equals_nothing():
    assert is_equal(r"2^{2008}-2", r"-2+2^{2008}") and not is_equal("2^{2008}-2", "2^{2008}-3")
    assert is_equal(r"\frac{2014!}{2013!}", "2014") and is_equal(r"\binom{1/2}{3}+1", r"1+\binom{1/2}{3}")
    long = "123456789" * 9
    assert is_equal(long + ".0", long) and is_equal("-0" + long, "-" + long) and not is_equal(long, long[:-1] + "8")
    for a, b in (("2^{1000}", str(2**1000)), ("2(2^{2007}-1)", "2^{2008}-2"), (r"2^{2014} \bmod 7", "2"), ("0^0", "1"),
                 (r"\frac{101!}{101}", "100!"), (r"(\sqrt2)^{400}", "2^{200}")):
        assert is_equal(a, b), (a, b)                      # exact to 1,000 digits
    assert not is_equal("2^{2008}", "2^{2008}-2") and not is_equal("2^{1000}", "-2^{1000}")
    for a, b in ((r"0\cdot\frac10", "0"), (r"\frac10-\frac10", "0"), (r"\ln 0", r"\ln 0 + 0"), ("x/0", "y/0")):
        assert not is_equal(a, b), (a, b)


def test_nothing_equals_the_empty_answer():
    for a in ("", " ", "$$", "0", r"\emptyset"):
        assert not is_equal(a, "") and not is_equal("", a), a


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
        yield str(n / d)                                       # repr is exact for these denominators


def test_rational_numbers_agree_with_fraction():
    rng = random.Random(0)
    for _ in range(120):
        x = Fraction(rng.randint(-60, 60), rng.randint(1, 9))
        y = x if rng.random() < 0.5 else x + Fraction(rng.choice((-1, 1)), rng.randint(1, 9))
        for a in spellings(x):
            for b in spellings(y):
                assert is_equal(a, b) == (x == y), (a, b)


def test_factored_polynomials_agree_with_convolution():
    rng = random.Random(1)
    for _ in range(40):
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
