"""
A two-turn conversation: a wrong answer gets "Try again.", and then only the second one counts.

    python -m examples.try_again --lr 1e-3 --steps 24 --max-new-tokens 96 --out runs/try-again

    The answer is \\boxed{24}.<|im_end|> | \\n<|im_start|>user\\nTry again.<|im_end|>\\n... | Step by ...
               sampled                                  the user                          sampled

The user's turn has mask 0: the model reads it without being trained on it. Both answers are trained
on, with the second one's advantage. Other environments pass Conversation another `reply`.
"""
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))            # for python examples/try_again.py
import train
from harness.setup import Run
from prompts import Tokenizer
from ranks import say
from sampler import Rollouts, Row, Sampler, Sampling
from tasks.problems import Problem


def reply(problem: Problem, graded: dict) -> str | None:
    """What the user replies to an answer, or None to end the conversation. graded: a line of
    samples.jsonl.
    """
    return None if graded["correct"] else "Try again."


class Conversation:
    """The functions that sample and grade answers in two turns."""

    def __init__(self, run: Run, reply: Callable = reply):
        self.tokenizer: Tokenizer = run.tokenizer
        self.grade_one = run.grade
        self.reply = reply
        if self.tokenizer.format.moves_system:
            say("a system text stays in the first turn, though this model's template would move it "
                "to the second")

    def sample(self, sampler: Sampler, problems: list, group_size: int, sampling: Sampling,
               places: range | list) -> Rollouts:
        """Like train.sample_answers. The first answer gets half of the tokens, the second one the
        rest; a conversation without room for a second answer ends with the first.
        """
        limit = sampling.max_new_tokens
        prompts = [problem.prompt for problem in problems]
        first = sampler.generate(prompts, group_size,
                                 sampling._replace(max_new_tokens=max(limit // 2, 1)), places)
        rows = first.rows
        asked = {}                               # row number -> the row and the user's reply
        for i, graded in enumerate(self.grade_one(problems, rows)):
            said = self.reply(problems[i // group_size], graded)
            if said is not None and rows[i].completion[-1] == self.tokenizer.stop:
                longer = rows[i].with_text(self.tokenizer.user_turn(said))
                if len(longer.completion) < limit:
                    asked[i] = longer
        if not asked:
            return first
        second = sampler.extend(list(asked.values()), sampling)
        for i, row in zip(asked, second.rows):
            rows[i] = row
        return Rollouts(rows, first.seconds + second.seconds, first.computed + second.computed)

    def grade(self, problems: list, rows: list[Row]) -> list[dict]:
        """Like Run.grade, which stops at a row's first end of turn, but grades the last answer. Adds
        `first`: whether the first one was right.
        """
        lasts = self.grade_one(problems, [last_answer(row) for row in rows])
        verdict = {"extracted", "rule", "correct", "format", "reward", "shaping", "parts"}
        return [whole | {name: last[name] for name in verdict & last.keys()}
                | {"first": whole["correct"]}
                for whole, last in zip(self.grade_one(problems, rows), lasts)]


def last_answer(row: Row) -> Row:
    """The part of a row after the last token that was not sampled."""
    unsampled = (~row.mask).nonzero()
    start = int(unsampled[-1]) + 1 if len(unsampled) else 0
    return Row(row.prompt, row.completion[start:], row.logprobs[start:], row.finished)


def two_turns(run: Run) -> tuple:
    conversation = Conversation(run)
    return dataclasses.replace(run, grade=conversation.grade), conversation.sample


if __name__ == "__main__":
    train.main(change=two_turns)
