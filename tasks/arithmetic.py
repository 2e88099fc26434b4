"""
Word problems of one or two steps with integers, which the bundled model learns offline.

    problems = arithmetic("train")               tuples (id, question, answer)

No question is in both splits: a hash of its text decides which one it belongs to.
"""
import random
import zlib

NAMES = "Tom Ann Sam Mia Ben Eva Max Zoe Leo Ida".split()
THINGS = "pens books cards coins shells apples stamps stones cups balls".split()
KINDS = (                                        # text, and the operations on a, b, c in turn
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have?", "+"),
    ("{name} finds {a} {things} on Monday and {b} on Friday. How many {things} is that?", "+"),
    ("{name} has {a} red, {b} blue and {c} green {things}. "
     "How many {things} does {name} have?", "++"),
    ("{name} has {a} {things} and gives {b} away. How many {things} are left?", "-"),
    ("{name} has {a} {things} and {friend} has {b}. "
     "How many more {things} does {name} have?", "-"),
    ("{name} has {a} {things}, loses {b} and buys {c} more. "
     "How many {things} does {name} have?", "-+"),
    ("{name} has {a} {things}, finds {b} and sells {c}. How many {things} are left?", "+-"),
    ("{name} has {a} boxes with {b} {things} each. How many {things} is that?", "*"),
    ("{name} has {a} boxes with {b} {things} each and finds {c} more. "
     "How many {things} is that?", "*+"),
    ("{name} has {a} boxes with {b} {things} each and sells {c}. "
     "How many {things} are left?", "*-"),
)
COUNTS = {"train": 4096, "test": 1024}           # problems of each split
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def word_problem(rng):
    """-> question, steps (left, op, right, result); the last result is the answer, all are > 0."""
    text, ops = rng.choice(KINDS)
    most = 9 if "*" in ops else 20
    while True:
        numbers = [rng.randint(2, most) for _ in range(len(ops) + 1)]
        steps = []
        left = numbers[0]
        for op, right in zip(ops, numbers[1:]):
            steps.append((left, op, right, OPERATIONS[op](left, right)))
            left = steps[-1][3]
        if all(result > 0 for *_, result in steps):
            name, friend = rng.sample(NAMES, 2)
            words = dict(name=name, friend=friend, things=rng.choice(THINGS))
            return text.format(**words, **dict(zip("abc", numbers))), steps


def is_held_out(question):
    """One in eight is in the test split, by a hash of its text, so no seed can mix the splits."""
    return zlib.crc32(question.encode()) % 8 == 0


def arithmetic(split, count=None, seed=0):
    """`count` different problems from a split (default: COUNTS), the same on every machine."""
    count = count or COUNTS[split]
    rng = random.Random(f"arithmetic/{seed}")
    problems = {}
    while len(problems) < count:
        question, steps = word_problem(rng)
        if is_held_out(question) == (split == "test") and question not in problems:
            name = f"arithmetic-{split}-{len(problems)}"
            problems[question] = name, question, str(steps[-1][3])
    return list(problems.values())
