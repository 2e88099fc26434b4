"""
Problems: what is read from data files and data sets, and the order of a run.

python -m pytest tests/test_problems.py -v
"""
import json
import os
import random
import re

import huggingface_hub
import pytest
import torch
from helpers import write_rows

from files import UserError
from tasks import problems as problems_py
from tasks.arithmetic import arithmetic, word_problem
from tasks.problems import (
    GOLDS,
    Problem,
    check_source,
    choose_problems,
    epoch_order,
    has_test_split,
    load_problems,
    most_again,
    problems_at,
    requeue,
)

# -----------------------------------------------------------------------------
# Rows

@pytest.mark.parametrize("row,answer", [
    ({"question": "q", "answer": "It is 1,000 + 234 = <<1000+234=1234>>1,234.\n#### 1,234"}, "1234"),      # GSM8K, raw
    ({"problem": "q", "solution": r"so \boxed{3}, no, $\boxed{\frac{1}{\sqrt{2}}}$."}, r"\frac{1}{\sqrt{2}}"),  # MATH
    ({"problem": "q", "solution": r"so $\boxed{2}$ and $\boxed{3}$."}, "2 , 3"),          # a list, as in completions
    ({"problem": "q", "solution": r"so $\boxed{3}$.", "answer": "4"}, "4"),           # `answer` comes first
    ({"prompt": "q", "solution": "34"}, "34"),                                          # DAPO and BigMath, processed
    ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": r"\boxed{34}"}}, "34"),   # DAPO
    ({"question": "q", "final_answer": 0}, "0"),                                            # falsy, but an answer
    ({"question": "q", "answer": r"\boxed{7} so far" + "\n" + r"#### \boxed{8}"}, "8"),
    ({"question": "q", "answer": "It is 5."}, "It is 5."),                      # only `solution` may be a worked one
])
def test_gold_answers_are_found_in_common_formats(tmp_path, row, answer):
    assert load_problems(write_rows(tmp_path / "x.jsonl", [row])) == [Problem("x-1", "q", answer)]


@pytest.mark.parametrize("gold,read", [
    ("1,234", "1234"), ("-1,234,567", "-1234567"), ("$1,234.50", "$1234.50"), ("x = 12,345 cm", "x = 12345 cm"),
    ("(1,2)", "(1,2)"), ("0,5", "0,5"), ("1,2,3", "1,2,3"), ("[1,234]", "[1,234]"), ("3,14", "3,14"),
    ("0,500", "0,500"), ("1,2345", "1,2345"), ("12,345,6", "12,345,6"), ("2.5,100", "2.5,100"),
    (r"\{1,234\}", r"\{1,234\}")])
def test_after_hashes_only_commas_of_thousands_are_removed(gold, read):
    for name in GOLDS:
        assert problems_py.find_gold({name: f"so it is 1,000\n#### {gold}\n"}) == read


@pytest.mark.parametrize("value,text", [
    (0.00003, "0.00003"), (1e17, "1" + "0" * 17), (6.02e23, "602" + "0" * 21), (0.1 + 0.2, "0.3"), (3.0, "3"),
    (-0.0, "0"), (2 / 3, "0.666666666667"), (2.0**53 - 1, "9007199254740991"), (10**20, "1" + "0" * 20),
    (torch.tensor(0.1).item(), "0.1"), (1 / 2048, "0.00048828125")])
def test_gold_number_becomes_text_that_the_grader_reads(value, text):
    assert problems_py.find_gold({"answer": value}) == text


TURNS = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize("line,said", [
    *((f'{{"question": "q", "answer": {value}, "solution": "3"}}', "answer")
      for value in ("false", "true", "[3]", "[]", '{"value": 3}', "1e999", "-1e999")),
    ('{"question": "q", "reward_model": {"ground_truth": [3]}, "solution": "3"}', "ground_truth"),
    *((json.dumps({"question": value, "problem": "q", "answer": "3"}), "question")
      for value in (0, False, [], {}, json.dumps(TURNS), repr(TURNS), json.dumps(TURNS[0]),
                    '[{"from": "human", "value": "1+1?"}]', "<|im_start|>user\n1+1?<|im_end|>")),
    ('{"question": "q", "answer": "3", "answer": "4"}', "answer.*twice"),
    ('{"question": "q", "answer": "3", "more": {"a": 1, "a": 2}}', "a.*twice"),
    ('{"question": "q"}', "answer"),
    ('{"question": "q", "answer": "  "}', "answer"),
    ('{"problem": "q", "solution": "A long proof\\nthat ends without a box."}', "answer"),
    ('{"question": "q", "gold": "1"}', "answer.*gold"),
    ('{"answer": "1"}', "question"), ('{"question": " ", "answer": "1"}', "question"),
    ('{"prompt": [], "answer": "1"}', "question"),
    ('{"question": {"a": 1}, "answer": "1"}', "question.*'a': 1"),
    ('{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "1"}], "answer": 1}', "question"),
    ('{"question": "q", "answer": "1"', "JSON"), ('["q", "1"]', "object"), ("[" * 100_000, "JSON"),
    ('{"question": "q", "answer": NaN}', "NaN"), (r'{"question": "q \ud800", "answer": "1"}', "Unicode"),
])
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{said}"):
        load_problems(str(path))


@pytest.mark.parametrize("text", ['{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}',
                                  '{"question": "a", "answer": "1"}', "", "[" * 100_000, '[{"question": "a"}]'])
def test_a_json_file_must_be_a_list_of_rows(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="x.json:"):
        load_problems(str(tmp_path / "x.json"))


ROWS = [{"id": 7, "question": "a\u2028b", "answer": "1"}, {"question": "b", "answer": "2"}]   # U+2028 ends no line
PROBLEMS = [Problem("7", "a\u2028b", "1"), Problem("x-2", "b", "2")]


def test_jsonl_and_json_give_the_same_problems(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(ROWS, indent=2))
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8")
    assert load_problems(str(tmp_path / "x.json")) == load_problems(str(tmp_path / "x.jsonl")) == PROBLEMS


def test_parquet_gives_the_same_problems(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    import pyarrow.parquet  # noqa: F811
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    assert load_problems(str(tmp_path / "x.parquet")) == PROBLEMS
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-50])
    with pytest.raises(UserError, match="cut.parquet"):
        load_problems(str(tmp_path / "cut.parquet"))


def test_a_reward_needs_no_gold_answer_and_sees_every_field(tmp_path):
    (problem,) = load_problems(write_rows(tmp_path / "x.jsonl", [{"question": "q", "level": 3}]), needs_gold=False)
    assert problem.answer == "" and problem.fields() == {"question": "q", "level": 3, "id": "x-1", "answer": ""}


# -----------------------------------------------------------------------------
# Sources. A local folder stands in for the hub.

@pytest.mark.parametrize("source", ["gsm9k", "nowhere.jsonl", "data/x.csv", "empty.jsonl", "pipe.jsonl"])
def test_unknown_sources_are_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.csv").touch()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "gsm8k").touch()                            # the name of a data set wins
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=source):
        load_problems(source)
    assert check_source("gsm8k") is None


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that puts files on the hub, each with one problem named after the file."""
    def has(*files):
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            write_rows(tmp_path / file, [{"problem": file, "answer": "1"}])
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
        problems_py.hub_files.cache_clear()
    return has


@pytest.mark.parametrize("files,train,test", [
    ("data/train-00000.jsonl data/train-00001.jsonl data/test-0.jsonl README.md", 2, 1),
    ("train.jsonl training.jsonl latest.jsonl validation.jsonl problems.jsonl", 1, 0),
    ("train.jsonl train.parquet", 1, 0)])                   # works without pyarrow
def test_the_names_of_a_splits_files_begin_with_it(hub, files, train, test):
    hub(*files.split())
    assert len(load_problems("some/set", "train")) == train
    assert has_test_split("some/set") == has_test_split("math") == bool(test)
    if not test:
        with pytest.raises(UserError, match="test"):
            load_problems("some/set", "test")


def test_all_files_of_a_split_must_be_there(hub):
    hub("data/train-00000-of-00003.jsonl", "data/train-00002-of-00003.jsonl")
    with pytest.raises(UserError, match="2 train files, but train-00000-of-00003.jsonl is one of 3"):
        load_problems("some/set")


def test_the_folder_must_be_named_if_several_have_the_split(hub):
    hub("main/train-0.jsonl", "main_2/train-0.jsonl", "other/test-0.jsonl")
    with pytest.raises(UserError, match="give some/set:main or some/set:main_2"):
        load_problems("some/set")
    assert [p.question for p in load_problems("some/set:main")] == ["main/train-0.jsonl"]
    assert not has_test_split("some/set:main") and has_test_split("some/set")


# -----------------------------------------------------------------------------
# The generator

def test_generated_problems_have_the_right_answers():
    rng = random.Random(0)
    seen = set()
    for _ in range(2000):
        question, steps = word_problem(rng)
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        expression = str(numbers[0])
        for number, (left, op, right, result) in zip(numbers[1:], steps, strict=True):
            assert (left, right) == (eval(expression), number), (question, steps)
            expression = f"({expression}){op}{right}"
            assert result == eval(expression) >= 1, (question, steps)
        seen.add("".join(op for _, op, _, _ in steps))
    assert seen == {"+", "++", "-", "-+", "+-", "*", "*+", "*-"}


def test_a_known_problem_never_changes():
    # random.Random seeds strings by SHA-512: the same on every machine and Python since 3.2.
    first, *_ = load_problems("arithmetic", "train")
    assert first == Problem("arithmetic-train-0",
                            "Mia has 6 boxes with 8 cards each and sells 4. How many cards are left?", "44")


def test_arithmetic_splits_share_no_question():
    train = {p for seed in (0, 1) for _, p, _ in arithmetic("train", 2000, seed)}
    test = {p for seed in (0, 1) for _, p, _ in arithmetic("test", 2000, seed)}
    assert not train & test
    assert len({name for name, _, _ in arithmetic("test", 2000)}) == 2000


# -----------------------------------------------------------------------------
# The order of problems

def test_a_step_depends_only_on_its_places():
    steps = [problems_at(range(10), 0, range(first, first + 4)) for first in range(0, 40, 4)]
    walk = sum(steps, [])
    assert all(sorted(walk[e:e + 10]) == list(range(10)) for e in range(0, 40, 10))
    assert len({tuple(epoch_order(100, *which)) for which in ((3, 0), (3, 1), (4, 0))}) == 3    # seed, epoch
    problems_py.epoch_order.cache_clear()
    assert problems_at(range(10), 0, range(7, 23)) == walk[7:23]          # of a resumed run, or of one rank
    assert problems_at(range(3), 0, range(0, 8))[3:6] != []               # problems repeat if a step needs more


def test_replay_by_hand():
    order = problems_at(range(20), 0, range(40))
    asked = [order[0], order[2], order[5]]
    queue = [[1, asked[0]], [2, asked[1]], [2, asked[2]], [3, order[9]]]      # at step 10, that of step 3 still waits
    upcoming = order[19:23]                                                   # crosses into the second epoch
    ready = [number for number in asked if number not in upcoming][:2]
    assert choose_problems(20, 0, 4, 19, queue, 10, 0.5) == (ready, upcoming[:4 - len(ready)])
    assert choose_problems(20, 0, 4, 19, queue, 10, 0.0) == ([], upcoming)
    cases = (16, 4, 0.5), (17, 4, 0.5), (900, 100, 0.29), (900, 4, 1 - 1e-10)
    assert [most_again(*case) for case in cases] == [0, 2, 29, 3]
    assert requeue([[1, 6], [2, 3]], [6, 7, 8, 8], [True, False, True, True], 10, 4) == [[2, 3], [10, 6], [10, 8]]
    assert requeue([[0, n] for n in range(16)], [20], [True], 9, 2) == [[0, n] for n in range(1, 16)] + [[9, 20]]
