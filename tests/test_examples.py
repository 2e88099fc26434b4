"""examples/: what a fork begins with runs as it stands."""
import itertools
from pathlib import Path

import pytest
import torch

import train
from sampler import Rollouts, Row
from tasks.plugin import Reward
from tasks.problems import Problem

EXAMPLES = Path(__file__).parent.parent / "examples"
PROBLEM = Problem("p", "What is 2 + 3?", "5")
RIGHT, BARE, WRONG = r"So it is \boxed{5}.", "The answer is 5", r"So it is \boxed{6}."


@pytest.fixture
def score(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    reward = Reward("my_reward:score")
    return lambda text, length: reward(text, PROBLEM, [text], length=length)


@pytest.mark.parametrize("text,length,correct,shaping", [
    (RIGHT, 9, 1, 0.1), (BARE, 9, 1, 0), (WRONG, 9, 0, 0.1), ("I give up", 9, 0, 0), (RIGHT, 384, 1, 0.1),
    (RIGHT, 448, 1, 0.1 - 0.25), (BARE, 512, 1, -0.5), (BARE, 5000, 1, -0.5)])
def test_my_reward_grades_and_shapes(score, text, length, correct, shaping):
    assert score(text, length) == {"correct": correct, "shaping": pytest.approx(shaping)}


def test_the_shaping_of_my_reward_never_outvotes_the_task(score):
    right, wrong = ([score(text, length) for text in texts for length in (1, 400, 512, 10**6)]
                    for texts in ((RIGHT, BARE), (WRONG, "")))
    for better, worse in itertools.product(right, wrong):
        graded = [dict(parts=parts, task=parts["correct"]) for parts in (better, worse)]
        answers = Rollouts([Row([1], [2], torch.zeros(1), finished=True) for _ in graded])
        rows = train.score(lambda *_: graded, [], answers).rows
        first, second = train.compare(rows, 2, "none").tolist()
        assert first > 0 > second
