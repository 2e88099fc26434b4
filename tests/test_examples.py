"""The examples run unmodified."""
import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import FP32, ROOT, TINY, prompt_of

from examples import calculator, try_again
from loading import load
from prompts import Tokenizer
from rewards import grade, grade_rows
from sampler import Rollouts, Row, Sampler, Sampling
from tasks.arithmetic import arithmetic
from tasks.plugin import Reward
from tasks.problems import Problem

PROBLEM = Problem("p", "What is 2 + 3?", "5")
RIGHT, BARE, WRONG = r"So it is \boxed{5}.", "The answer is 5", r"So it is \boxed{6}."


@pytest.fixture
def score(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    reward = Reward("my_reward:score")
    return lambda text, length: reward(text, PROBLEM, length=length)


@pytest.mark.parametrize("text,length,correct,shaping", [
    (RIGHT, 9, 1, 0.1), (BARE, 9, 1, 0), (WRONG, 9, 0, 0.1), ("I give up", 9, 0, 0), (RIGHT, 384, 1, 0.1),
    (RIGHT, 448, 1, 0.1 - 0.25), (BARE, 512, 1, -0.5), (BARE, 5000, 1, -0.5)])
def test_my_reward_by_hand(score, text, length, correct, shaping):
    assert score(text, length) == {"correct": correct, "shaping": pytest.approx(shaping)}


@torch.no_grad()
def assert_logprobs_are_one_forwards(model, rows):
    """Of the tokens that were sampled."""
    whole, _ = model.token_logprobs([row.prompt + row.completion for row in rows], [len(row.prompt) for row in rows])
    mask = torch.cat([row.mask for row in rows])
    assert (torch.cat([row.logprobs for row in rows]) - whole)[mask].abs().max() < FP32


# -----------------------------------------------------------------------------
# calculator.py

@pytest.mark.parametrize("text,result", [
    ("7*9=", 15), ("so 2+3*4=", 14), ("7*9=15, 15-8=", 19), ("12-14=", 22), ("007+8=", 15), ("=", ""),
    ("5=", ""), ("a+b=", ""), ("7*9= ", ""), ("2*3*4-5+6=", 13), (f"{10**12}+1=", "")])
def test_calculator_by_hand(text, result):
    assert calculator.calculate(text) == str(result)


def test_calculator_turns_match_one_forward_and_mask_tool_output():
    model, tokenizer = load(TINY, "bf16", "cpu"), Tokenizer(TINY)
    sampler = Sampler(model, 160)
    prompts = [prompt_of(tokenizer, f"Tom has {n} boxes with 8 cards each and sells 4. How many cards are left?")
               + tokenizer.encode("Step by step: ") for n in (6, 7)]
    sampling = Sampling(40, tokenizer.end_ids, 1.0, seed=3)
    problems = [Problem("", "", "", prompt) for prompt in prompts]
    turns = calculator.Turns(tokenizer)
    rollouts = turns(sampler, problems, 4, sampling, [5, 6])
    rows = rollouts.rows
    assert [row.prompt for row in rows] == [prompt for prompt in prompts for _ in range(4)]
    for row in rows:
        text, replayed = tokenizer.decode(row.completion), ""
        for token, sampled in zip(row.completion, row.mask.tolist()):      # the mask covers exactly the tool's results
            if sampled:
                replayed += tokenizer.decode([token])
            elif replayed.endswith("="):
                result = calculator.calculate(replayed)
                replayed += result
            else:
                assert replayed.endswith(result)
        assert replayed == text and len(row.completion) <= 40
        assert row.finished == (row.completion[-1] in tokenizer.end_ids)
    assert sum(not row.mask.all() for row in rows) >= 6                    # the calculator is used
    assert_logprobs_are_one_forwards(model, rows)
    # The second problem samples the same answers without the first.
    alone = turns(sampler, problems[1:], 4, sampling, [6]).rows
    assert [row.completion for row in alone] == [row.completion for row in rows[4:]]


def test_call_without_room_for_its_result_is_truncated():
    tokenizer = Tokenizer(TINY)
    call, used = Row([1], tokenizer.encode("7*9="), torch.zeros(4), finished=True), []
    once = SimpleNamespace(generate=lambda *_: Rollouts([call]))
    turns = calculator.Turns(tokenizer, lambda text, problem: used.append((text, problem.id)) or "63")
    row, = turns(once, [Problem("a", "", "", [1])], 1, Sampling(6, tokenizer.end_ids), [0]).rows
    assert (row.completion, row.finished) == (tokenizer.encode("7*9="), False)
    assert used == [("7*9=", "a")]                                        # once per call


# -----------------------------------------------------------------------------
# try_again.py

def test_second_answer_follows_a_wrong_first_one_and_counts():
    model, tokenizer = load(TINY, "bf16", "cpu"), Tokenizer(TINY)
    problems = [Problem(name, question, answer, prompt_of(tokenizer, question))
                for name, question, answer in itertools.islice(arithmetic("train"), 4)]
    conversation = try_again.Conversation(SimpleNamespace(
        tokenizer=tokenizer, grade=lambda problems, rows: grade_rows(tokenizer, problems, rows)))
    sampling = Sampling(80, tokenizer.end_ids, 1.0, seed=3)
    rows = conversation.sample(Sampler(model, 160), problems, 4, sampling, range(4)).rows
    twice = 0
    for i, (row, graded) in enumerate(zip(rows, conversation.grade(problems, rows))):
        problem = problems[i // 4]
        text = tokenizer.decode(row.completion)
        first, _, second = text.partition("<|im_end|>\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n")
        assert graded["first"] == grade(first, problem.answer, problem.question).correct
        assert graded["correct"] == grade(second or first, problem.answer, problem.question).correct
        assert bool(second) == (not graded["first"])                       # all first answers end before the limit
        if second:
            twice += 1
            asked = [("user", problem.question), ("assistant", first), ("user", "Try again.")]
            sampled = row.mask.nonzero()[-1].item() + 1 - len(tokenizer.encode(second)) - row.finished
            assert row.prompt + row.completion[:sampled] == tokenizer.turns(asked)
    assert 0 < twice < 16
    assert_logprobs_are_one_forwards(model, rows)
