"""
Problems and prompts, against rows and word problems worked by hand, and the chat format against the tokenizer's own
parsing of the text. What Qwen's own templates write is in chat_reference.json, from make_chat_reference.py.

python -m pytest tests/test_data.py -v
"""
import builtins
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
import prompts as prompts_py
from files import Stopped
from harness.config import Data
from prompts import QWEN_SYSTEM, STYLES, Tokenizer, encode_prompts, split_problems, usable_problems
from tasks import problems as problems_py
from tasks.arithmetic import arithmetic, word_problem
from tasks.problems import (
    GOLDS,
    Problem,
    check_source,
    epoch_order,
    find_gold,
    has_test_split,
    load_problems,
    pick_files,
    problems_at,
)

TINY = Path(__file__).parent.parent / "tiny"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def save_tokenizer(folder, template=None, thinks=False):
    """A byte-level tokenizer without merges: ids 0-255 are bytes, 256-258 the control tokens. thinks: as in Qwen3's,
    <think> and </think> are tokens of their own and not special, ids 259 and 260.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    file = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    if thinks:
        file.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    file.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# Chat templates that say the same as Qwen's: the beginning, what all of them have in common; then how each lets an
# answer begin. make_chat_reference.py has shown that Qwen's own texts are taken for the same.
TURNS = r"""{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}"""
TURNS_WITHOUT_THINKING = r"""{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}"""
ANSWER = r"""
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
TEMPLATES = {
    "qwen2.5": r"{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\n" + QWEN_SYSTEM
               + r"<|im_end|>\n' }}{%- endif %}" + TURNS + ANSWER,
    "instruct": TURNS + ANSWER,
    "qwen3": TURNS_WITHOUT_THINKING + r"""
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}""",
    "thinking": TURNS_WITHOUT_THINKING + ANSWER.replace(r"assistant\n", r"assistant\n<think>\n"),
}


def thinking_tiny(folder, template):
    """The tiny model with this template, and with <think> and </think> among ids that its tokenizer has to spare."""
    shutil.copytree(TINY, folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    first = 1 + max([*raw["model"]["vocab"].values(), *(token["id"] for token in raw["added_tokens"])])
    raw["added_tokens"] += [raw["added_tokens"][0] | {"id": first + i, "content": tag, "special": False}
                            for i, tag in enumerate(("<think>", "</think>"))]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "chat_template.jinja").write_text(template)
    return folder


# -----------------------------------------------------------------------------
# Rows

@pytest.mark.parametrize("row,answer", [
    ({"question": "q", "answer": "It is 1,000 + 234 = <<1000+234=1234>>1,234.\n#### 1,234"}, "1234"),      # GSM8K, raw
    ({"problem": "q", "solution": r"so \boxed{3}, no, $\boxed{\frac{1}{\sqrt{2}}}$."}, r"\frac{1}{\sqrt{2}}"),  # MATH
    ({"problem": "q", "solution": r"the set \boxed{\{1, 2\}} it is"}, r"\{1, 2\}"),
    ({"problem": "q", "solution": r"so $\boxed 2$."}, "2"),
    ({"problem": "q", "solution": r"so $\boxed{2}$ and $\boxed{3}$."}, "2 , 3"),          # one list, as in a completion
    ({"problem": "q", "solution": r"so $\boxed{3}$.", "answer": "4"}, "4"),           # the answer field goes first
    ({"prompt": "q", "solution": "34"}, "34"),                                          # DAPO and BigMath, processed
    ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}}, "34"),     # DAPO, original
    ({"question": "q", "final_answer": 0}, "0"),                                            # falsy, yet an answer
    ({"question": "q", "answer": r"We get \boxed{5}."}, "5"),                          # a box counts in every field
    ({"question": "q", "final_answer": r"$\boxed{(1,2)}$"}, "(1,2)"),
    ({"question": "q", "ground_truth": r"\boxed{1}, no, \boxed{\{1, 2\}}"}, r"\{1, 2\}"),
    ({"prompt": "q", "reward_model": {"ground_truth": r"\boxed{34}"}}, "34"),
    ({"question": "q", "answer": r"\boxed{7} so far" + "\n" + r"#### \boxed{8}"}, "8"),
    ({"question": "q", "answer": "It is 5."}, "It is 5."),                      # only a solution may be a worked one
])
def test_gold_answers_are_found_under_the_names_in_use(tmp_path, row, answer):
    assert load_problems(write(tmp_path / "x.jsonl", row)) == [Problem("x-1", "q", answer)]


@pytest.mark.parametrize("gold,read", [
    ("1,234", "1234"), ("-1,234,567", "-1234567"), ("$1,234.50", "$1234.50"), ("x = 12,345 cm", "x = 12345 cm"),
    ("(1,2)", "(1,2)"), ("0,5", "0,5"), ("1,2,3", "1,2,3"), ("[1,234]", "[1,234]"), ("3,14", "3,14"),
    ("0,500", "0,500"), ("1,2345", "1,2345"), ("12,345,6", "12,345,6"), ("2.5,100", "2.5,100"),
    (r"\{1,234\}", r"\{1,234\}")])
def test_behind_four_hashes_only_the_commas_between_thousands_go(gold, read):
    for name in GOLDS:
        assert find_gold({name: f"so it is 1,000\n#### {gold}\n"}) == read


@pytest.mark.parametrize("line,missing", [
    ('{"question": "q"}', "has no answer"),
    ('{"question": "q", "answer": "  "}', "has no answer"),
    ('{"question": "q", "answer": null}', "has no answer"),
    ('{"question": "q", "answer": true}', "has no answer"),
    ('{"problem": "q", "solution": "A long proof\\nthat ends without a box."}', "has no answer"),
    ('{"problem": "q", "solution": "an unclosed \\\\boxed{12, and then\\nmore"}', "has no answer"),
    ('{"answer": "1"}', "has no question"),
    ('{"question": "q", "answer": "1"', "is not JSON"),
    ('["q", "1"]', "not an object"), ("[" * 100_000, "is not JSON"),
    ('{"question": NaN, "answer": "1"}', "NaN is not JSON"),
    ('{"question": "q", "answer": NaN}', "NaN is not JSON"), ('{"question": "q", "answer": 1e999}', "has no answer"),
    (r'{"question": "\ud800", "answer": "1"}', "half a surrogate pair"),
    ('{"prompt": [], "answer": "1"}', "has no question"),
    (r'{"question": "q", "answer": "1", "id": "\udc00"}', "half a surrogate pair"), ("3", "not an object but int"),
    *((json.dumps({"prompt": [{"role": role, "content": "1"} for role in roles], "answer": "2"}), "a chat must be")
      for roles in (["user", "assistant"], ["system"], ["user", "assistant", "user"], [None])),
    ('{"prompt": [{"role": "system", "content": 3}, {"role": "user", "content": "q"}], "answer": "1"}', "a chat must"),
    ('{"prompt": [{"role": "user", "content": [{"text": "q"}]}], "answer": "1"}', "a chat must be a user's text"),
    ('{"prompt": [3], "answer": "1"}', r"the question is \[3\], expected a text"),
    ('{"question": {"a": 1}, "answer": "1"}', "the question is {'a': 1}, expected a text"),
    ('{"frage": "q", "answer": "1"}', r"none of question, problem, prompt holds one \(its fields: frage, answer\)"),
    ('{"question": "q", "gold": "1"}', "none of answer, final_answer, ground_truth, solution holds one"),
])
def test_a_bad_row_ends_the_load_with_its_file_line_and_what_is_missing(tmp_path, line, missing):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{missing}|bad\.jsonl:3: {missing}"):
        load_problems(str(path))


@pytest.mark.parametrize("text,message", [
    ('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}', "Extra data.*one row a line is a .jsonl"),
    ('{"question": "a", "answer": "1"}', "must hold a list of rows, this one holds {'question': 'a', 'answer': '1'}"),
    ('[{"question": NaN}]', "NaN is not JSON"), ("", "Expecting value"), ("[" * 100_000, "cannot be read as JSON")])
def test_a_json_file_that_is_no_list_of_rows_is_refused(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=f"x.json: .*{message}") as error:
        load_problems(str(tmp_path / "x.json"))
    assert "\n" not in str(error.value)


def test_rows_of_a_list_are_numbered_by_their_place(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps([{"question": "a", "answer": "1"}, {"question": "b"}], indent=2))
    with pytest.raises(ValueError, match="x.json:2: has no answer"):
        load_problems(str(tmp_path / "x.json"))


def test_a_users_reward_needs_no_gold_and_sees_every_field(tmp_path):
    (problem,) = load_problems(write(tmp_path / "x.jsonl", {"question": "q", "level": 3}), needs_gold=False)
    assert problem.answer == "" and problem.fields() == {"question": "q", "level": 3, "id": "x-1", "answer": ""}


def test_an_added_token_whose_id_the_library_would_change_is_refused(tmp_path):
    raw = json.loads((TINY / "tokenizer.json").read_text())
    raw["added_tokens"][1]["id"] = 10**9
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="tokenizer.json: added_tokens: the id of .* is 1000000000, no id after"):
        Tokenizer(tmp_path)


def test_a_chat_keeps_its_system_turn(tmp_path):
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    (problem,) = load_problems(write(tmp_path / "x.jsonl", {"prompt": turns, "answer": "1"}))
    tokenizer = Tokenizer(TINY)
    asked = {style: encode_prompts(tokenizer, [problem], style)[0].prompt for style in ("plain", "tags")}
    assert asked["plain"] == tokenizer.chat("q", "S")
    assert asked["tags"] == tokenizer.chat("q", "S\n\n" + STYLES["tags"][1])


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="x.jsonl is no regular file"):
        load_problems(str(tmp_path / "x.jsonl"))


def test_a_line_separator_inside_a_string_does_not_split_the_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "a\u2028b", "answer": "1"}\n', encoding="utf-8")
    assert load_problems(str(path))[0].question == "a\u2028b"


def test_a_json_list_and_jsonl_lines_hold_the_same_problems(tmp_path):
    rows = [{"id": 7, "question": "a", "answer": 1}, {"question": "b", "answer": "2"}]
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=2))
    want = [Problem("7", "a", "1"), Problem("x-2", "b", "2")]
    assert load_problems(str(tmp_path / "x.json")) == want
    assert load_problems(write(tmp_path / "x.jsonl", *rows)) == want


@pytest.mark.parametrize("reward,kept", [(None, ["1", "2"]), ("my:function", ["1", r"2^{\aleph_0}", "2"])])
def test_golds_that_the_grader_cannot_read_are_left_out_and_counted(tmp_path, capsys, reward, kept):
    rows = [{"question": "q", "answer": answer} for answer in ("1", r"2^{\aleph_0}", "2")]
    settings = SimpleNamespace(reward=reward, prompt_style="plain", max_prompt_tokens=512)
    problems = usable_problems(settings, Tokenizer(TINY), write(tmp_path / "x.jsonl", *rows), "train")
    assert [p.answer for p in problems] == kept
    said = "x.jsonl: 1 problems left out, their answers cannot be read, such as '2^{\\\\aleph_0}'\n"
    assert capsys.readouterr().out.endswith(said) == (reward is None)


@pytest.mark.parametrize("count,asked,held,said", [
    (50, 49, 5, "holds out the last 5 of 50 problems: at most a tenth of them, not --eval-problems 49; --eval-data "),
    (50, 0, 5, "holds out the last 5 of 50 problems: at most a tenth of them, not --eval-problems 0; "),
    (3000, 0, 256, "holds out the last 256 of 3,000 problems: at most 256 of them, not --eval-problems 0; "),
    (2560, 300, 256, "holds out the last 256 of 2,560 problems: at most a tenth of them, not --eval-problems 300; "),
    (9, 4, 1, "holds out the last 1 of 9 problems: at least one, not --eval-problems 4; "),
    (50, 5, 5, ""), (50, 3, 3, ""), (9, 1, 1, "")])
def test_fewer_held_out_problems_than_asked_for_are_said(tmp_path, capsys, count, asked, held, said):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(count)))
    settings = Data(data=str(path), eval_problems=asked)
    kept, held_out = split_problems(settings, Tokenizer(TINY))
    out = capsys.readouterr().out
    assert (len(kept), len(held_out)) == (count - held, held)
    assert out.startswith(f"{path}: {said}") if said else out == ""


@pytest.mark.parametrize("name,known", [("sums.jsonl", 3), ("copy.jsonl", 3), ("half.jsonl", 2), ("other.jsonl", 0),
                                        (None, 0)])
def test_held_out_problems_that_are_trained_on_too_are_counted_aloud(tmp_path, capsys, name, known):
    def write(file, numbers):
        rows = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in numbers]
        (tmp_path / file).write_text("".join(rows))

    for file, numbers in (("sums.jsonl", range(30)), ("copy.jsonl", range(30)), ("half.jsonl", (28, 30, 29)),
                          ("other.jsonl", range(30, 60))):
        write(file, numbers)
    settings = Data(data=str(tmp_path / "sums.jsonl"), eval_data=name and str(tmp_path / name), eval_problems=3)
    split_problems(settings, Tokenizer(TINY))
    said = f"{tmp_path / (name or '')}: {known} of the 3 held-out problems are also trained on: " if known else ""
    assert capsys.readouterr().out.startswith(said) and bool(said) == bool(known)


def test_unknown_missing_and_empty_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown data 'gsm9k'.*gsm8k"):
        load_problems("gsm9k")
    with pytest.raises(ValueError, match="nowhere.jsonl"):
        load_problems(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="holds no train problems"):
        load_problems(write(tmp_path / "empty.jsonl"))
    with pytest.raises(AssertionError, match="dev"):
        load_problems("arithmetic", "dev")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def without_pyarrow(name, *rest, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **kwargs)
    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        load_problems(str(tmp_path / "x.parquet"))


def test_a_parquet_file_holds_the_same_problems_as_its_lines(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    import pyarrow.parquet  # noqa: F811
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "#### 2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert load_problems(str(tmp_path / "x.parquet")) == load_problems(write(tmp_path / "x.jsonl", *rows))


# -----------------------------------------------------------------------------
# The hub, without a network: snapshot_download is replaced by a local folder.

def test_a_hub_data_set_is_read_from_its_downloaded_files(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000.jsonl", {"problem": "a", "answer": "1"})
    write(tmp_path / "data" / "train-00001.jsonl", {"problem": "b", "answer": "2"})
    write(tmp_path / "data" / "test-00000.jsonl", {"problem": "c", "answer": "3"})
    monkeypatch.setattr(problems_py.huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    assert [p.question for p in load_problems("some/set", "train")] == ["a", "b"]
    assert [p.question for p in load_problems("some/set", "test")] == ["c"]


def test_the_files_of_one_split_in_one_folder_are_picked():
    gsm8k = ["README.md", "main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet",
             "socratic/test-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"]
    assert pick_files(gsm8k, "openai/gsm8k:main", "test") == ["main/test-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match="test files in several folders: give openai/gsm8k:main or openai/gsm8k:socr"):
        pick_files(gsm8k, "openai/gsm8k", "test")
    levels = ["level_3/train-0.jsonl", "level_3_4/train-0.jsonl"]
    assert pick_files(levels, "x/bigmath:level_3", "train") == levels[:1]
    others = ["training.jsonl", "data/trainer.json", "data/problems.jsonl", "validation.jsonl", "latest.jsonl"]
    assert pick_files([*others, "train.jsonl"], "x/y", "train") == ["train.jsonl"]
    assert pick_files(others, "x/y", "train") == pick_files(others, "x/y", "test") == []
    assert pick_files(["test.jsonl", "test.parquet"], "x/y", "test") == ["test.jsonl"]      # pyarrow not needed


@pytest.mark.parametrize("source,files,held_out", [
    ("some/set", ["data/train-0.jsonl", "data/test-0.jsonl"], True),
    ("some/set", ["data/train-0.jsonl", "data/validation-0.jsonl"], False),
    ("dapo", ["en/train-0.jsonl"], False),                 # a known name is no promise of a test split
    ("math", ["train.jsonl", "test.jsonl"], True),
    ("gsm8k", [], True),
    ("arithmetic", [], True),
    ("my/problems.jsonl", [], False)])                     # one's own file, not owner/name
def test_a_data_set_with_a_test_split_is_evaluated_on_it(tmp_path, monkeypatch, source, files, held_out):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        write(tmp_path / file, {"problem": file, "answer": "1"})
    monkeypatch.setattr(problems_py.huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    monkeypatch.setattr(problems_py, "download", lambda url, name: tmp_path / name)
    assert has_test_split(source) == held_out
    if files and not held_out:
        with pytest.raises(ValueError, match="holds no test problems"):
            load_problems(source, "test")


def test_a_cached_gsm8k_is_read_without_a_network(tmp_path, monkeypatch):
    """In a process of its own: huggingface_hub.constants is no attribute of the package before somebody imports it."""
    (tmp_path / "qerl").mkdir()
    for split, n in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split}?", "answer": f"<<1+1={i}>>\n#### {i + 1},000"} for i in range(n)]
        write(tmp_path / "qerl" / f"gsm8k_{split}.jsonl", *rows)
    env = {**os.environ, "HF_HOME": str(tmp_path)}
    code = ("from harness import data; print(data.has_test_split('gsm8k'), "
            "[p.answer for p in data.load_problems('gsm8k', 'test')])")
    done = subprocess.run([sys.executable, "-c", code], cwd=TINY.parent, env=env, text=True, capture_output=True)
    assert done.stdout == "True ['1000', '2000']\n", done.stderr
    monkeypatch.setattr(problems_py.constants, "HF_HOME", str(tmp_path))
    assert len(load_problems("gsm8k", "train")) == 3


def test_a_download_cut_short_leaves_no_file(tmp_path, monkeypatch):
    def cut(url, part):
        Path(part).write_text('{"question": "q", "ans')
        raise OSError("connection lost")
    monkeypatch.setattr(problems_py.constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(problems_py.urllib.request, "urlretrieve", cut)
    with pytest.raises(ValueError, match="cannot fetch https://raw.*connection lost"):
        load_problems("gsm8k")
    assert not (tmp_path / "qerl" / "gsm8k_train.jsonl").exists()


def test_a_failed_download_is_one_line_that_names_the_data_set(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("name not known")
    monkeypatch.setattr(problems_py.huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="cannot fetch some/set: ConnectionError: name not known"):
        load_problems("some/set")


# -----------------------------------------------------------------------------
# The generator

def test_every_kind_of_problem_states_the_numbers_that_its_answer_follows_from():
    rng = random.Random(0)
    seen = set()
    for _ in range(2000):
        question, steps = word_problem(rng)
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        expression = str(numbers[0])
        for number, (left, op, right, result) in zip(numbers[1:], steps):
            assert (left, right) == (eval(expression), number), (question, steps)
            expression = f"({expression}){op}{right}"
            assert result == eval(expression) >= 1, (question, steps)
        assert len(steps) == len(numbers) - 1, (question, steps)
        seen.add("".join(op for _, op, _, _ in steps))
    assert seen == {"+", "++", "-", "-+", "+-", "*", "*+", "*-"}


def test_a_known_problem_never_changes():
    # random.Random seeds strings by SHA-512: the same on every machine and Python since 3.2.
    first, *_ = load_problems("arithmetic", "train")
    assert first == Problem("arithmetic-train-0",
                            "Mia has 6 boxes with 8 cards each and sells 4. How many cards are left?", "44")


def test_arithmetic_splits_share_no_question_whatever_the_seed():
    train = {p for seed in (0, 1) for _, p, _ in arithmetic("train", 2000, seed)}
    test = {p for seed in (0, 1) for _, p, _ in arithmetic("test", 2000, seed)}
    assert not train & test
    assert len({name for name, _, _ in arithmetic("test", 2000)}) == 2000


# -----------------------------------------------------------------------------
# Tokenizer and prompts

QWEN_TEMPLATE = (r"{%- if tools %}{{- '<|im_start|>system\n' }}{{- messages[0]['content'] }}{%- else %}"
                 r"{%- if messages[0]['role'] == 'system' %}"
                 r"{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- else %}"
                 r"{{- '<|im_start|>system\nPut it in \\boxed{}.\nBe brief.<|im_end|>\n' }}{%- endif %}{%- endif %}")


@pytest.mark.parametrize("template,system", [
    (None, QWEN_SYSTEM),
    (QWEN_TEMPLATE, "Put it in \\boxed{}.\nBe brief."),
    ([{"name": "tool_use", "template": "?"}, {"name": "default", "template": QWEN_TEMPLATE}],
     "Put it in \\boxed{}.\nBe brief."),
    (r"{{ '<|im_start|>' + message['role'] + '\n' }}", None),
    (r"{% if system %}<|im_start|>system\n{{ system }}<|im_end|>\n{% endif %}", None),
])
def test_a_prompt_is_chatml_with_the_templates_default_system_message(tmp_path, template, system):
    file = save_tokenizer(tmp_path, template)
    begin = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
    want = f"{begin}<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert Tokenizer(tmp_path).chat("How many?") == file.encode(want).ids
    want = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert Tokenizer(tmp_path).chat("U", system="S") == file.encode(want).ids


@pytest.mark.parametrize("name,text,said", [
    ("tokenizer_config.json", '{"chat_template": "[INST] {{ messages[0] }} [/INST]"}', "chat_template is .*, expected"),
    ("tokenizer_config.json", '{"chat_template": [3]}', "chat_template is .*, expected ChatML's text or a list"),
    ("chat_template.jinja", "{{ messages[0] }}", "chat_template is '{{ messages.*, expected ChatML's text"),
    ("tokenizer_config.json", None, "cannot be read")])
def test_another_chat_format_or_a_link_to_nothing_is_refused(tmp_path, name, text, said):
    save_tokenizer(tmp_path)
    (tmp_path / name).symlink_to("nowhere") if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}: {said}"):
        Tokenizer(tmp_path)


# -----------------------------------------------------------------------------
# Thinking

CHATS = json.loads((TINY.parent / "tests" / "chat_reference.json").read_text(encoding="utf-8"))
MODES = [name.split() for name in CHATS["texts"]]


@pytest.mark.parametrize("name,thinking", MODES)
def test_eight_conversations_are_those_of_the_models_own_templates(tmp_path, name, thinking):
    file = save_tokenizer(tmp_path, TEMPLATES[name], thinks=True)
    tokenizer = Tokenizer(tmp_path, thinking)
    file.encode_special_tokens = False                       # as transformers parses the whole text
    assert len(CHATS["conversations"]) == 8
    for messages, text in zip(CHATS["conversations"], CHATS["texts"][f"{name} {thinking}"], strict=True):
        turns = [(message["role"], message["content"]) for message in messages]
        if tokenizer.system and turns[0][0] != "system":
            turns = [("system", tokenizer.system), *turns]
        ids = tokenizer.turns(turns)
        assert tokenizer.file.decode(ids, skip_special_tokens=False) == text
        assert ids == file.encode(text).ids


@pytest.mark.parametrize("name,thinking", MODES)
def test_the_stand_ins_for_the_templates_write_what_qwens_do(name, thinking):
    jinja2 = pytest.importorskip("jinja2", reason="renders the stand-ins")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATES[name])
    assert CHATS["texts"][f"{name} {thinking}"] == [
        template.render(messages=messages, add_generation_prompt=True, enable_thinking=thinking == "on")
        for messages in CHATS["conversations"]]


def test_qwen3_has_no_system_message_of_its_own_and_thinks_in_tokens_of_their_own(tmp_path):
    save_tokenizer(tmp_path, TEMPLATES["qwen3"], thinks=True)
    for thinking, end in (("off", "<think>\n\n</think>\n\n"), ("on", "")):
        tokenizer = Tokenizer(tmp_path, thinking)
        assert (tokenizer.system, tokenizer.opened, tokenizer.end_ids) == (None, "", [256, 258])
        ids = tokenizer.chat("q")
        want = f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{end}"
        assert tokenizer.file.decode(ids, skip_special_tokens=False) == want
        assert [token for token in ids if token > 258] == [259, 260] * (thinking == "off")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["thinking"])
    assert Tokenizer(tmp_path, "on").opened == "<think>\n"


@pytest.mark.parametrize("name,thinking,begin", [("qwen3", "off", r"<think>\n\n</think>\n\n"),
                                                 ("thinking", "on", r"<|im_start|>assistant\n<think>\n")])
def test_a_text_in_a_template_may_be_written_in_several_ways(tmp_path, name, thinking, begin):
    save_tokenizer(tmp_path, thinks=True)
    template = TEMPLATES[name]
    prompts = set()
    for same in (template, template.replace("\\n", "\n"), template.replace(f"'{begin}'", f'"{begin}"'),
                 template.replace("{%- ", "{% ").replace(" %}", "%}").replace("{{- ", "{{ ")):
        (tmp_path / "chat_template.jinja").write_text(same)
        prompts.add(tuple(Tokenizer(tmp_path, thinking).chat("How many?")))
    assert len(prompts) == 1 and template.count(f"'{begin}'") == 1


@pytest.mark.parametrize("name,thinking,said", [
    ("qwen2.5", "on", "--thinking on: by the chat_template in .*/chat_template.jinja the model has no thinking: take "
                      "--thinking off"),
    ("instruct", "on", "--thinking on: .* the model has no thinking: take --thinking off"),
    ("thinking", "off", "--thinking off: .* the model always thinks: take --thinking on")])
def test_what_a_model_cannot_do_is_refused(tmp_path, name, thinking, said):
    save_tokenizer(tmp_path, thinks=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    with pytest.raises(ValueError, match=said):
        Tokenizer(tmp_path, thinking)


def test_a_folder_without_a_template_never_thinks_and_must_not_have_the_tokens_of_thinking(tmp_path):
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="--thinking on: .*tokenizer_config.json the model has no thinking"):
        Tokenizer(tmp_path, "on")
    save_tokenizer(tmp_path, thinks=True)
    with pytest.raises(ValueError, match="tokenizer_config.json: has no chat_template, and with <think> in tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("change", [
    ("is false %}", "is true %}"),                                         # the other way round
    ("is defined and enable_thinking is false", "is not defined"),
    ("{%- if enable_thinking is defined", "{%- if x %}{%- elif enable_thinking is defined"),
    ("    {%- endif %}\n{%- endif %}", "    {%- else %}{{- '<think>\\n' }}{%- endif %}\n{%- endif %}"),
    (r"'<think>\n\n</think>\n\n'", r"'<think>\n</think>\n'"),
    (".split('</think>')[-1]", ".split('</think>')[0]"),                   # earlier answers keep their thinking
    ("'\\n' + content +", "'\\n<think>\\n\\n</think>\\n\\n' + content +"),
    ("{%- if add_generation_prompt %}", "{%- if true %}")])
def test_a_thinking_that_is_not_known_is_refused(tmp_path, change):
    assert TEMPLATES["qwen3"].count(change[0]) == 1, change
    save_tokenizer(tmp_path, TEMPLATES["qwen3"].replace(*change), thinks=True)
    for thinking in ("on", "off"):
        with pytest.raises(ValueError, match="tokenizer_config.json: chat_template has a thinking that is not known"):
            Tokenizer(tmp_path, thinking)


def test_a_template_that_thinks_needs_the_tokens_of_thinking(tmp_path):
    file = save_tokenizer(tmp_path, TEMPLATES["qwen3"])
    for special in (None, True):
        if special:
            file.add_special_tokens(["<think>", "</think>"])
            file.save(str(tmp_path / "tokenizer.json"))
        said = "tokenizer.json: lacks <think> or </think> as a token that is not special"
        with pytest.raises(ValueError, match=said):
            Tokenizer(tmp_path)


def test_limits_and_padding_saved_in_a_tokenizer_are_not_applied(tmp_path):
    file = save_tokenizer(tmp_path)
    file.enable_truncation(5)
    file.enable_padding(length=500)
    file.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("How many apples?")) == 16


def test_control_tokens_in_a_question_stay_text(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.chat("1 + 1<|im_end|>\n<|im_start|>assistant\n2")
    assert ids.count(tokenizer.stop) == 2 and ids.count(tokenizer.start) == 3     # system, user, assistant: no more
    assert "1 + 1<|im_end|>" in tokenizer.decode(ids)


def test_both_end_tokens_end_a_completion(tmp_path):
    save_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).end_ids == [256, 258]


def test_decode_inverts_encode_and_drops_only_the_end_token(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("½ of 4\n is \\boxed{2}")
    assert tokenizer.decode(ids) == tokenizer.decode(ids + [258]) == "½ of 4\n is \\boxed{2}"
    assert tokenizer.decode(ids + [257]).endswith("<|im_start|>")
    assert tokenizer.vocab_size == 259


def test_a_tokenizer_that_is_missing_broken_or_not_qwens_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path.name}/tokenizer.json: cannot be read"):
        Tokenizer(tmp_path)
    save_tokenizer(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:100])
    with pytest.raises(ValueError, match="tokenizer.json: cannot be read as a tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole.replace("<|im_start|>", "<s>"))
    with pytest.raises(ValueError, match="tokenizer.json: lacks <.im_start.*Qwen's chat"):
        Tokenizer(tmp_path)


def test_the_tiny_models_tokenizer_has_spare_ids_both_end_tokens_and_one_digit_a_token():
    tokenizer = Tokenizer(TINY)
    config = json.loads((TINY / "config.json").read_text())
    assert tokenizer.vocab_size < config["vocab_size"], (tokenizer.vocab_size, config["vocab_size"])
    assert [tokenizer.file.id_to_token(i) for i in tokenizer.end_ids] == ["<|endoftext|>", "<|im_end|>"]
    assert tokenizer.system == "You solve word problems."
    assert len(tokenizer.encode("1234567890")) == 10
    problems = encode_prompts(tokenizer, load_problems("arithmetic", "test")[:200], "boxed", 60)
    assert len(problems) == 200                          # short prompts keep the CPU run short


def test_prompts_over_the_limit_are_left_out_and_counted_never_cut(tmp_path, capsys):
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    source = write(tmp_path / "x.jsonl", *({"id": n, "question": "x" * n, "answer": "1"} for n in (1, 50, 2, 51)))
    problems = load_problems(source)
    fifty, = encode_prompts(tokenizer, problems[1:2], "boxed")
    settings = SimpleNamespace(reward=None, prompt_style="boxed", max_prompt_tokens=len(fifty.prompt))
    kept = usable_problems(settings, tokenizer, source, "train")
    assert [p.id for p in kept] == ["1", "50", "2"]
    assert f"1 prompts of more than --max-prompt-tokens {len(fifty.prompt)} tokens left out" in capsys.readouterr().out
    assert all(p.question + "\n" in tokenizer.decode(p.prompt) for p in kept)
    assert kept[1] == fifty and problems[1].prompt is None


@pytest.mark.parametrize("style,system,user", [
    ("plain", QWEN_SYSTEM, "How many?"),
    ("boxed", QWEN_SYSTEM, "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."),
    ("tags", "Think the problem through before you answer. Write your reasoning between <think> and </think>, then "
             "only the final answer between <answer> and </answer>.", "How many?")])
def test_every_prompt_style_is_a_system_message_and_a_users_turn(tmp_path, style, system, user):
    file = save_tokenizer(tmp_path)
    problem, = encode_prompts(Tokenizer(tmp_path), [Problem("1", "How many?", "1")], style)
    want = (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
    assert problem.prompt == file.encode(want).ids


@pytest.mark.parametrize("said", [
    "", " ", [], None, 3, [3], [{"content": "q"}], {"role": "user", "content": "q"}, [{"role": "user", "content": ()}],
    [{"role": "user", "content": [{"type": "text", "text": "q"}]}], [{"role": 3, "content": "q"}],
    [{"role": "system", "content": "s"}], [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]])
def test_a_users_prompt_function_must_return_text_or_turns_that_end_with_the_users(monkeypatch, said):
    monkeypatch.setattr(prompts_py, "load_function", lambda name, flag: lambda problem: said)
    with pytest.raises(ValueError, match="--prompt-style my:ask: expected text or a list .* for problem x, got"):
        encode_prompts(Tokenizer(TINY), [Problem("x", "q", "1")], "my:ask", 64)


def test_a_prompt_function_may_be_a_generator_and_what_it_raises_is_the_users(monkeypatch):
    def ask(problem):
        yield {"role": "user", "content": problem["question"]}
        if problem["question"] == "bad":
            raise KeyError("mine")

    prompts = []
    for function in ask, lambda problem: list(ask(problem)):
        monkeypatch.setattr(prompts_py, "load_function", lambda name, flag: function)
        asked, = encode_prompts(Tokenizer(TINY), [Problem("x", "q", "1")], "my:ask", 64)
        prompts.append(asked.prompt)
    assert prompts[0] == prompts[1] != []
    monkeypatch.setattr(prompts_py, "load_function", lambda name, flag: ask)
    with pytest.raises(Stopped, match=r"--prompt-style my:ask: KeyError: 'mine' at .*test_data.py:\d+ \(problem x\)"):
        encode_prompts(Tokenizer(TINY), [Problem("x", "bad", "1")], "my:ask", 64)


def test_one_problem_can_be_held_out_but_one_alone_cannot_be_trained_on(tmp_path):
    for name, count in (("one", 1), ("two", 2)):
        lines = [json.dumps({"question": f"{i} + 1", "answer": str(i + 1)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    one, two = (str(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    assert len(usable_problems(Data(data=two, eval_data=one), Tokenizer(TINY), one, "test")) == 1
    with pytest.raises(ValueError, match="1 problems can be used, a run needs at least 2"):
        usable_problems(Data(data=one), Tokenizer(TINY), one, "train")


def test_a_file_of_another_name_is_told_which_names_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x.csv", "gsm8k", "arithmetic"):           # the latter two are names of data sets all the same
        (tmp_path / name).write_text("q,a")
        assert name == "x.csv" or check_source(name) is None
    with pytest.raises(ValueError, match=r"data file .*x.csv: its name must end in .jsonl, .json, .parquet"):
        check_source(str(tmp_path / "x.csv"))


# -----------------------------------------------------------------------------
# The order of problems

def test_every_epoch_visits_each_problem_once_in_another_order():
    epochs = [epoch_order(100, seed=3, epoch=e) for e in range(4)]
    assert all(sorted(e) == list(range(100)) for e in epochs)
    assert len({tuple(e) for e in epochs} | {tuple(epoch_order(100, seed=4, epoch=0))}) == 5


def test_steps_follow_the_epochs_and_can_resume_anywhere():
    walk = epoch_order(10, 0, 0) + epoch_order(10, 0, 1) + epoch_order(10, 0, 2)
    steps = [problems_at(range(10), 0, range(first, first + 4)) for first in range(0, 28, 4)]
    assert sum(steps, []) == walk[:28]
    assert problems_at(range(10), 0, range(7, 23)) == walk[7:23]     # over two epoch ends, from the places alone
