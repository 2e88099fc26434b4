"""
evaluate.py on the tiny model: figures, flags, run folders, rejected input.

python -m pytest tests/test_evaluate.py -v
"""
import functools
import hashlib
import itertools
import json
import signal
import sys
from pathlib import Path

import pytest
from helpers import TEMPLATES, TINY, prompt_of, read_rows, thinking_tiny, with_acting_adapter, write_rows, write_sums
from trained_runs import kill_in

import adapters
import evaluate
import prompts
import rewards
import tasks.problems
from loading import load
from prompts import Tokenizer, digest_of, split_problems
from tasks.figures import mean

BASIC = ["--data", "arithmetic", "--prompt-style", "plain", "--max-new-tokens", "40"]


@pytest.fixture(autouse=True, scope="module")
def few_of_arithmetic():
    """Cuts --data arithmetic to 200 problems, which load faster."""
    with pytest.MonkeyPatch.context() as patch:
        few = functools.partial(tasks.problems.arithmetic, count=200)
        patch.setattr(tasks.problems, "arithmetic", functools.cache(few))
        yield


@pytest.fixture
def run(capsys, monkeypatch, tmp_path, tiny_nvfp4):
    """A function that runs evaluate.py in an empty folder. -> the JSON object of its last line. The default --model is
    the tiny model.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        model = [] if arguments[0] == "run" or "--model" in arguments else ["--model", tiny_nvfp4]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--device", "cpu", *map(str, [*model, *arguments])])
        evaluate.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


# -----------------------------------------------------------------------------
# Figures

def test_greedy_figures_match_written_rows(run):
    figures = run(*BASIC, "--limit", 40, "--out", "new/a.jsonl")
    written = read_rows("new/a.jsonl")
    assert [row["id"] for row in written] == [f"arithmetic-test-{i}" for i in range(40)] and figures["n"] == 40
    assert figures["pass@1"][0] == mean([row["correct"] for row in written]) and 0 < figures["pass@1"][0] < 1
    assert figures["length"] == mean([row["length"] for row in written]) == figures["tokens"] / 40
    assert figures["truncated"] == mean([not row["finished"] for row in written]) and "sampler_entropy" not in figures
    assert figures["tokens_per_s"] == pytest.approx(figures["tokens"] / figures["seconds_sample"])
    assert sum(figures["rules"].values()) == 40 and not any(name.startswith("maj") for name in figures)
    assert figures["command"].endswith(f" {' '.join(BASIC)} --limit 40 --out new/a.jsonl")
    for row in written:                                    # the tiny model boxes integers: comparing text is enough
        assert row["correct"] == float(f"\\boxed{{{row['answer']}}}" in row["completion"])


@pytest.mark.parametrize("call,kept", [(6, 10), (1, 0)])
def test_interrupted_evaluation_keeps_the_first_problems(call, kept, run, monkeypatch, capsys):
    flags = *BASIC, "--limit", 12, "--samples", 2, "--max-rows", 6, "--out"
    run(*flags, "whole.jsonl")
    monkeypatch.setattr(rewards, "grade_rows", rewards.grade_rows)         # restored after the test
    kill_in("rewards", "grade_rows", call, False, signal.SIGINT)
    with pytest.raises(SystemExit, match="stopped by SIGINT"):
        run(*flags, "part.jsonl")
    assert f"{kept // 2} of 12 problems" in capsys.readouterr().err
    assert Path("part.jsonl").exists() == bool(kept)
    assert not kept or read_rows("part.jsonl") == read_rows("whole.jsonl")[:kept]


def test_pass_at_k_matches_written_rows(run):
    figures = run(*BASIC, "--limit", 6, "--samples", 5, "--temperature", 1, "--out", "s.jsonl")
    groups = [list(group) for _, group in itertools.groupby(read_rows("s.jsonl"), key=lambda row: row["id"])]
    assert [[row["sample"] for row in group] for group in groups] == [[0, 1, 2, 3, 4]] * 6
    share = [mean([row["correct"] for row in group]) for group in groups]
    assert figures["pass@1"][0] == pytest.approx(mean(share))
    assert figures["pass@5"][0] == pytest.approx(mean([float(s > 0) for s in share]))
    assert [name for name in figures if "@" in name] == ["pass@1", "pass@2", "pass@4", "pass@5"]


def test_top_k_and_top_p_reach_the_sampler(run):
    """High-temperature sampling with top_k=1 or a tiny top_p is greedy."""
    basic = [*BASIC, "--max-new-tokens", 20]
    hot = [*basic, "--limit", 3, "--samples", 2, "--temperature", 3]
    twice = 2 * run(*basic, "--limit", 3)["tokens"]
    assert run(*hot, "--top-k", 1)["tokens"] == run(*hot, "--top-p", 1e-6)["tokens"] == twice
    assert run(*hot)["tokens"] != twice


def test_ids_beyond_the_tokenizer_are_never_sampled(run, monkeypatch):
    highest, grade_rows = [], rewards.grade_rows

    def look(tokenizer, problems, rows, *more):
        highest.extend(max(row.completion) - tokenizer.vocab_size for row in rows)
        return grade_rows(tokenizer, problems, rows, *more)

    monkeypatch.setattr(rewards, "grade_rows", look)
    run(*BASIC, "--limit", 8, "--samples", 4, "--temperature", 1000, "--top-p", 1, "--max-new-tokens", 12)
    assert len(highest) == 32 and max(highest) < 0


@pytest.mark.parametrize("name,rules", [("thinking", {"unclosed": 20}), ("qwen3", {"box": 20})])
def test_unclosed_thinking_is_wrong(name, rules, tmp_path, run):
    # The tiny model never thinks: it boxes a number at once.
    model = thinking_tiny(tmp_path / "model", TEMPLATES[name])
    figures = run(*BASIC, "--model", model, "--base", "bf16", "--thinking", "on", "--limit", 20, "--out", "a")
    assert figures["rules"] == rules
    right = mean([float(f"\\boxed{{{row['answer']}}}" in row["completion"]) for row in read_rows("a")])
    assert right > 0 and figures["format"] == (name == "qwen3")
    assert figures["pass@1"][0] == (right if name == "qwen3" else 0)


def test_unreadable_golds_are_left_out(tmp_path, run):
    """Even those that a run with its own reward never had to read."""
    rows = [{"question": f"{i} + 1?", "answer": gold} for i, gold in enumerate(["7", r"2^{\aleph_0}"] * 30)]
    write_rows("sums.jsonl", rows)
    write_rows("none.jsonl", rows[1::2])
    figures = run(*BASIC, "--data", "sums.jsonl", "--limit", 2, "--out", "a.jsonl")
    assert figures["n"] == 2 and [row["id"] for row in read_rows("a.jsonl")] == ["sums-1", "sums-3"]
    run_folder(tmp_path / "run", data=str(tmp_path / "sums.jsonl"), reward="mine:length")
    assert asked(run, "--reward", "none") == ["sums-57", "sums-59"]
    with pytest.raises(SystemExit, match="none.jsonl: has no problem"):
        run(*BASIC, "--data", "none.jsonl")


# -----------------------------------------------------------------------------
# --reward

def test_nan_reward_becomes_null(run):
    Path("odd.py").write_text("def score(completion, problem):\n"
                              "    return 20_000_001 if problem['id'].endswith('-0') else float('nan')\n")
    figures = run(*BASIC, "--limit", 3, "--reward", "odd:score", "--out", "a.jsonl")
    assert figures["mean_reward"] == 20_000_001         # in fp32 it would be even
    assert [row["reward"] for row in read_rows("a.jsonl")] == [20_000_001, None, None]


# -----------------------------------------------------------------------------
# The folder of a run

def run_folder(folder, **flags):
    """A run's folder as train.py leaves it, without an adapter."""
    held = dict(model=str(TINY), base="bf16", prompt_style="plain", thinking="off", data="arithmetic", eval_data=None,
                reward=None, max_new_tokens=20, eval_problems=4, max_prompt_tokens=64) | flags
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(held))
    data = evaluate.config.settings_of_run(folder)
    digest = digest_of(sum(split_problems(data, Tokenizer(held["model"], held["thinking"])), []))
    (folder / "run.json").write_text(json.dumps(held | {"problems_sha256": digest}))
    return folder


def asked(run, *flags):
    """Runs `evaluate.py run --adapter none`. -> the ids of its problems"""
    Path("asked.jsonl").unlink(missing_ok=True)
    run("run", "--adapter", "none", "--out", "asked.jsonl", *flags)
    return [row["id"] for row in read_rows("asked.jsonl")]


def test_run_sets_flags_and_adapter(tiny_nvfp4, tmp_path, run):
    run_folder(tmp_path / "run", data=write_sums(tmp_path / "sums.jsonl", range(60)))
    adapters.save_adapter(with_acting_adapter(load(tiny_nvfp4, "nvfp4", "cpu")), tmp_path / "run" / "adapter")
    figures = run("run", "--out", "a.jsonl")
    assert figures["base"] == "bf16" and figures["max_new_tokens"] == 20 and figures["adapter"] == "run/adapter"
    assert figures["data"] == str(tmp_path / "sums.jsonl")
    assert [row["id"] for row in read_rows("a.jsonl")] == [f"sums-{i}" for i in range(57, 61)]
    other = [row["mean_logprob"] for row in read_rows("a.jsonl")]
    asked(run)
    assert all(row["mean_logprob"] != logprob for row, logprob in zip(read_rows("asked.jsonl"), other, strict=True))


def test_changed_functions_of_a_run_are_named(tmp_path, run, monkeypatch):
    text = "def f(completion, problem):\n    return 1\n\ndef ask(problem):\n    return problem['question']\n"
    for name in ("mine", "other"):
        Path(f"{name}.py").write_text(text)
    now = dict.fromkeys(("reward_sha256", "prompt_style_sha256"), hashlib.sha256(text.encode()).hexdigest()[:16])
    old = dict.fromkeys(now, "0")
    lines = []
    monkeypatch.setattr(evaluate, "say", lines.append)

    def told(*flags, about=old, **more):
        run_folder(tmp_path / "run", reward="mine:f", prompt_style="mine:ask", about=about, **more)
        lines.clear()
        asked(run, "--limit", 1, *flags)
        return [line.partition(" differs")[0] for line in lines if "differs" in line]

    both = ["--reward mine:f: mine.py", "--prompt-style mine:ask: mine.py"]
    assert told() == both and told(about={}) == told(about=now) == []
    assert told("--reward", "other:f") == both[1:] and told("--reward", "none", "--prompt-style", "plain") == []
    assert told(resumed=[now]) == [] and told(about=now, resumed=[old, now | {"reward_sha256": "0"}]) == both[:1]


@pytest.mark.parametrize("limit,want", [((), 4), (("--limit", 6), 6), (("--limit", 2), 2)])
def test_limit_on_a_test_split(limit, want, tmp_path, run):
    run_folder(tmp_path / "run")
    assert asked(run, *limit) == [f"arithmetic-test-{i}" for i in range(want)]
    write_sums("held.jsonl", range(30))
    run_folder(tmp_path / "run", data=write_sums("sums.jsonl", range(60)), eval_data="held.jsonl")
    assert asked(run, *limit) == [f"held-{i + 1}" for i in range(want)]


@pytest.mark.parametrize("limit,count,hub", [((), 4, True), (("--limit", 0), 4, False), (("--limit", 3), 3, False)])
def test_limit_on_training_data_never_exceeds_held_out(limit, count, hub, tmp_path, run, monkeypatch):
    """hub: a data set with a short name and no test split."""
    data = write_sums(tmp_path / "sums.jsonl", range(60))
    if hub:
        load = tasks.problems.load_problems
        for module in (prompts, evaluate):
            monkeypatch.setattr(module, "has_test_split", lambda source: False)
            monkeypatch.setattr(module, "load_problems", lambda _, *more, **flags: load(data, *more, **flags))
    run_folder(tmp_path / "run", data="dapo" if hub else data)
    assert asked(run, *limit) == [f"sums-{i}" for i in range(57, 61)][:count]
    write_sums(data, range(40))                            # the training file has changed
    with pytest.raises(SystemExit, match="--data"):
        asked(run)


def test_run_sets_thinking_and_keeps_its_held_out_split(tmp_path, run):
    # Without thinking, prompts are longer by an empty block, and one problem exceeds the run's limit.
    model = thinking_tiny(tmp_path / "model", TEMPLATES["qwen3"])
    data = write_rows(tmp_path / "sums.jsonl", [{"question": "1" * n, "answer": "1"} for n in range(40, 60)])
    longest = len(prompt_of(Tokenizer(model, "on"), "1" * 59))
    assert longest < len(prompt_of(Tokenizer(model, "off"), "1" * 59))
    run_folder(tmp_path / "run", model=str(model), data=data, thinking="on", max_new_tokens=4, eval_problems=256,
               max_prompt_tokens=longest)
    for more in ([], ["--thinking", "off"]):
        assert asked(run, *more) == ["sums-19", "sums-20"]
        prompt = prompt_of(Tokenizer(model, "off" if more else "on"), "1" * 59)
        assert read_rows("asked.jsonl")[1]["prompt"] == Tokenizer(model).decode(prompt)


@pytest.mark.parametrize("flags", ["--prompt-style boxed", "--reward mine:length"])
def test_held_out_split_ignores_prompt_style_and_reward(flags, tmp_path, run):
    # Of 40 problems, the run dropped ten with unreadable golds and held out three. Splitting again with longer prompts,
    # or without needing golds, would count training problems as held out.
    Path("mine.py").write_text("def length(completion, problem):\n    return len(completion)\n")
    golds = [r"2^{\aleph_0}"] * 10 + ["7"] * 30
    rows = [{"question": f"{i}?" + " + 1" * (9 * (i > 36)), "answer": gold} for i, gold in enumerate(golds, 1)]
    run_folder(tmp_path / "run", data=write_rows(tmp_path / "sums.jsonl", rows), max_new_tokens=4,
               eval_problems=256)
    assert asked(run) == asked(run, *flags.split()) == ["sums-38", "sums-39", "sums-40"]
