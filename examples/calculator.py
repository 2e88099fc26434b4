"""
Tool use inside an answer: the model calls a calculator by writing an expression and a =.

    python -m examples.calculator --lr 1e-3 --steps 24 --out runs/calculator

The model writes an answer in turns, each ending at "=". The result is then appended with mask 0, so
the model reads it without being trained on it, and continues:

    Step by step: 7*9= | 15 | , 15-8= | 19 | . The answer is \\boxed{19}.
             sampled   tool  sampled   tool  sampled

The bundled model knows small sums by heart. To make the tool necessary, results (and the known
answers) wrap around like afternoon hours, from 13 to 24. For an ordinary calculator, let `clock`
return its argument and choose another --model and --data.
"""
import json
import math
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))            # for python examples/calculator.py
import train
from files import read_log
from sampler import Rollouts, Row, Sampler, Sampling
from tasks.arithmetic import arithmetic
from tasks.problems import Problem


def clock(number: int) -> int:
    """Always two digits: after a single digit the model tends to append another."""
    return (number - 1) % 12 + 13


def calculate(text: str, problem: Problem | None = None) -> str:
    """A tool: the result of the expression before the = that ends a text; "" if there is none. It
    doesn't need `problem`.
    """
    call = re.search(r"(?<!\d)\d{1,9}([-+*]\d{1,9})+=$", text)
    if not call:
        return ""
    # Not eval(): the model wrote this. A term is a sign and numbers to multiply.
    terms = re.findall(r"([-+]?)([\d*]+)", call[0])
    return str(clock(sum(int(f"{sign}1") * math.prod(map(int, numbers.split("*")))
                         for sign, numbers in terms)))


class Turns:
    """Replaces train.sample_answers, for answers in several turns."""

    def __init__(self, tokenizer, tool=calculate, calls=("=", " =")):
        """tool(the answer so far, its problem) -> the text to append. calls: texts whose last token
        ends a turn, but not control tokens: for <|im_end|>, see try_again.py.
        """
        self.tokenizer = tokenizer
        self.tool = tool
        assert not tokenizer.control.keys() & set(calls), f"encode() spells {calls} out"
        self.calls = {tokenizer.encode(text)[-1] for text in calls}

    def __call__(self, sampler: Sampler, problems: list, group_size: int, sampling: Sampling,
                 places: range | list) -> Rollouts:
        limit = sampling.max_new_tokens
        turn = sampling._replace(end_ids=(*sampling.end_ids, *self.calls))
        prompts = [problem.prompt for problem in problems]
        done = sampler.generate(prompts, group_size, turn, places)
        rows = done.rows
        asking = [problem for problem in problems for _ in range(group_size)]    # one per row
        open_rows = range(len(rows))             # those that may continue after a call
        while calling := [i for i in open_rows if rows[i].completion[-1] in self.calls]:
            longer = {i: self.with_result(rows[i], asking[i]) for i in calling}
            open_rows = [i for i in calling if len(longer[i].completion) < limit]
            if not open_rows:
                break
            more = sampler.extend([longer[i] for i in open_rows], turn)
            for i, row in zip(open_rows, more.rows):
                rows[i] = row
            done = Rollouts(rows, done.seconds + more.seconds, done.computed + more.computed)
        for row in rows:                         # a call without room for its result was cut off
            row.finished = row.completion[-1] in sampling.end_ids
        return done

    def with_result(self, row: Row, problem: Problem) -> Row:
        """A row that ends with a call, with the tool's result appended."""
        result = self.tool(self.tokenizer.decode(row.completion), problem)
        return row.with_text(self.tokenizer.encode(result))


def main() -> None:
    problems = Path("runs/clock.jsonl")
    problems.parent.mkdir(exist_ok=True)
    rows = [{"question": question, "answer": str(clock(int(answer)))}
            for _, question, answer in arithmetic("train")]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train.main(["--data", str(problems), *sys.argv[1:]],
                     lambda run: (run, Turns(run.tokenizer)))
    answers = [answer for answer, _ in read_log(run.folder.path / "samples.jsonl")]
    for step in (0, run.settings.steps - 1):
        calls = ["=" in answer["completion"] for answer in answers if answer["step"] == step]
        print(f"step {step + 1}: {sum(calls) / len(calls):.0%} of answers use the calculator")


if __name__ == "__main__":
    main()
