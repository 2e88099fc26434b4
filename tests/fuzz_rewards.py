r"""
Fuzzes the grader with grown, mutated and random answers: python tests/fuzz_rewards.py [CASES] [SEED]

For all texts a and b: is_equal and grade never raise, is_equal(a, b) == is_equal(b, a), a equals itself unless it is
blank, and all calls together take less than 100 ms of CPU time. tests/test_rewards.py runs 700 cases.
"""
import functools
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from grader.answers import can_read, is_equal
from rewards import grade

GOLDS = json.loads((Path(__file__).parent / "golds.json").read_text())
LIMIT = 0.1                                                # seconds, times slowness()
PIECES = [*"{}()[]^_|+-*/=<>,;:%!'&$~# \n\t.xyifCe01279½²−∞４é只«»\x00\x0c\u200b\ud800", r"\text{ and }",
          "</answer>", "!!", "answer is", " or ", "10^{10}", "999999999", "1,234", "0.333333", "mod", "cm", " dollars",
          *r"""\frac \sqrt \{ \} \pm \le \boxed{ \\ \cup \in \infty \sin \log_ \binom \lfloor \rfloor \overline{ \left(
          \right] \begin{pmatrix} \end{pmatrix} \begin{cases} \choose \pmod \approx \ne \gcd( \mathbb{R} \% \text{ \(
          f( ^{-1} \circ #### \) \pi ^{2} }{ e^{ sqrt( inf nan 1e9 \exp( x_1 = <think> <answer>""".split()]
LEAVES = r"""x y x_1 n i e \pi \theta 0 1 2 3 7 12 -1 0.5 .25 1.333333 1,234 1\frac12 50\% 10^6 \infty 3\pm1
             5\text{ cm}""".split()
NODES = [r"\frac{A}{B}", "A+B", "A-B", "AB", "(A)(B)", r"A \cdot B", "A/B", "A^{B}", r"\sqrt{A}", r"\sqrt[3]{A}",
         r"\left|A\right|", "(A)^2", r"\sin(A)", r"\log_{2} A", r"\binom{A}{B}", "A!", r"\lfloor A\rfloor", "-A", "(A)",
         "{A}", r"A \bmod B"]
TOPS = ["(A,B)", "[A,B)", r"\{A,B,C\}", "A,B", r"A \text{ or } B", "x=A", "x=A,y=B", "A<x", r"A \le x < B", "A=B",
        r"A \approx B", r"\begin{pmatrix}A&B\\C&A\end{pmatrix}", r"(A,B]\cup[C,\infty)", "$A$", r"\text{A}", "f(x)=A",
        r"A \text{ dollars}", r"\begin{cases}x=A\\y=B\end{cases}", r"x \equiv A \pmod{B}", r"\{x \mid x>A\}",
        "[[A,B],[C,A]]"]


def grown(rng, depth):
    """A well-formed expression: a random tree of NODES over LEAVES, sometimes inside one of TOPS."""
    if depth <= 0 or rng.random() < 0.15:
        return rng.choice(LEAVES)
    text = rng.choice(TOPS if depth > 3 and rng.random() < 0.5 else NODES)
    return "".join(grown(rng, depth - 1) if c in "ABC" else c for c in text)


def mutated(rng):
    """A grown expression, a gold answer or either with one to four edits, random pieces, one piece repeated many times,
    or random characters.
    """
    kind = rng.random()
    if kind < 0.4:
        return grown(rng, rng.randint(0, 5))
    if kind < 0.75:
        text = list(rng.choice(GOLDS) if kind < 0.6 else grown(rng, 3))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text) + 1)
            text[at:at + rng.randint(0, 1)] = rng.choice(PIECES)
        return "".join(text)
    if kind < 0.92:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 20)))
    if kind < 0.96:
        middle = rng.choice(PIECES) * rng.randint(2, 3_000 if kind < 0.923 else 300)   # a regex may backtrack
        return rng.choice(PIECES) + middle + rng.choice(PIECES)
    return "".join(chr(rng.randrange(rng.choice((127, 0x3000, 0x110000)))) for _ in range(rng.randint(0, 20)))


@functools.cache
def slowness():
    """How much slower a Python loop is here than on the machine where the limit was set; at least 1."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        for i in range(1_000_000):
            i * i
        seconds.append(time.process_time() - start)
    return max(1.0, min(seconds) / 0.028)


def examine(a, b):
    """Returns the errors in the verdicts on a and b, and the CPU time in seconds."""
    start = time.process_time()
    can_read(a)
    grade(f"Answer: {a}", b)
    boxed = grade(f"so \\boxed{{{a}}} it is", b, f"What is ${b}$?").rule
    wrong = {"not symmetric": is_equal(a, b) != is_equal(b, a), "not reflexive": is_equal(a, a) != (a.strip() != ""),
             "unclosed": boxed == "unclosed" and "<think>" not in a}
    return [what for what in wrong if wrong[what]], time.process_time() - start


def run(cases, seed=0):
    """Returns the failures (what, a, b)."""
    rng, before, failures, limit = random.Random(seed), "1", [], LIMIT * slowness()
    for _ in range(cases):
        a, b = mutated(rng), rng.choice((before, rng.choice(GOLDS)))
        if rng.random() < 0.2:                             # otherwise almost no pair would be equal
            b = f" {a.replace('frac', 'dfrac')}."
        before = a
        try:
            wrong, seconds = examine(a, b)
            if seconds > limit:                            # the machine may have been busy
                seconds = min(seconds, examine(a, b)[1])
        except Exception as error:                         # any exception is a failure
            failures.append((repr(error), a, b))
            continue
        failures += [(what, a, b) for what in wrong + [f"{seconds:.3f} s"] * (seconds > limit)]
    return failures


if __name__ == "__main__":
    for failure in (found := run(*map(int, sys.argv[1:] or [8_000]))):
        print(*map(ascii, failure), sep="\n    ")
    print(f"{len(found)} failures")
