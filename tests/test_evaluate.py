"""
evaluate.py on the tiny model: its figures, its flags, what it refuses.

python -m pytest tests/test_evaluate.py -v
"""
import functools
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_figures import rows
from test_prompts import TEMPLATES, thinking_tiny

import evaluate
import lora
import model as qwen
from harness.config import Settings
from harness.setup import device_of
from sampler import Sampler, TorchEngine
from tasks.figures import confidence_interval, mean

ROOT = Path(__file__).parent.parent
BASIC = ["--model", str(ROOT / "tiny"), "--data", "arithmetic", "--prompt-style", "plain", "--max-new-tokens", "40",
         "--device", "cpu"]


@pytest.fixture(autouse=True, scope="module")
def arithmetic_once():
    """The 4,096 word problems of --data arithmetic take longer than most evaluations of a few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.data, "arithmetic", functools.cache(evaluate.data.arithmetic))
        yield


# -----------------------------------------------------------------------------
# The command.

def run(capsys, monkeypatch, *arguments):
    """evaluate.main() with these flags -> the JSON object of its last line."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, *map(str, arguments)])
    evaluate.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_greedy_figures_are_those_of_the_rows_written(tmp_path, capsys, monkeypatch):
    figures = run(capsys, monkeypatch, "--limit", 40, "--out", tmp_path / "new" / "a.jsonl")
    written = read(tmp_path / "new" / "a.jsonl")
    assert len(written) == len({row["id"] for row in written}) == figures["n"] == 40
    assert figures["pass@1"][0] == mean([row["correct"] for row in written]) and 0 < figures["pass@1"][0] < 1
    assert figures["length"] == mean([row["length"] for row in written]) == figures["tokens"] / 40
    assert figures["truncated"] == mean([not row["finished"] for row in written])
    assert sum(figures["rules"].values()) == 40 and not any(name.startswith("maj") for name in figures)
    assert figures["command"] == f"python evaluate.py {' '.join(BASIC)} --limit 40 --out {tmp_path}/new/a.jsonl"
    for row in written:                                    # the tiny model boxes whole numbers: text comparison will do
        assert row["correct"] == float(f"\\boxed{{{row['answer']}}}" in row["completion"])


def test_a_share_is_printed_in_percent_with_its_interval(capsys, monkeypatch):
    """confidence_interval of 0, 0, 0 and 1: by hand, Wilson's [0.0456, 0.6994]."""
    figures = {"pass@1": confidence_interval([0, 0, 0, 1]), "length": 10.0, "truncated": 0.25,
               "rules": {"box": 3, "none": 1}, "pairs": 4}
    evaluate.print_result(figures, {}, None, torch.device("cpu"))
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == ["pass@1          25.0 % [4.6, 69.9]    right answers, with a 95 % interval",
                     "length          10                    tokens in an answer, mean",
                     "truncated       25.0 %                of the answers were cut at --max-new-tokens",
                     "rules           box 3, none 1         how the answer was found in the text, and how often",
                     "pairs           4"]
    assert json.loads(last)["pass@1"] == figures["pass@1"]
    # A person at a terminal does not have to look at the JSON.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    evaluate.print_result(figures, {}, None, torch.device("cpu"))
    assert capsys.readouterr().out.splitlines() == lines


def test_samples_are_figured_per_problem_and_compared_with_another_run(tmp_path, capsys, monkeypatch):
    run(capsys, monkeypatch, "--limit", 8, "--out", tmp_path / "greedy.jsonl")
    figures = run(capsys, monkeypatch, "--limit", 6, "--samples", 5, "--temperature", 1, "--out", tmp_path / "s.jsonl",
                  "--against", tmp_path / "greedy.jsonl")
    groups = [list(group) for _, group in itertools.groupby(read(tmp_path / "s.jsonl"), key=lambda row: row["id"])]
    assert [[row["sample"] for row in group] for group in groups] == [[0, 1, 2, 3, 4]] * 6
    share = [mean([row["correct"] for row in group]) for group in groups]
    assert figures["pass@1"][0] == pytest.approx(mean(share))
    assert figures["pass@5"][0] == pytest.approx(mean([float(s > 0) for s in share]))
    assert figures["pass@1_lenient"][0] == pytest.approx(mean([row["lenient"] for row in sum(groups, [])]))
    assert [name for name in figures if "@" in name] == ["pass@1", "pass@2", "pass@4", "pass@5", "maj@2", "maj@4",
                                                         "maj@5", "pass@1_lenient"]
    greedy = [row["correct"] for row in read(tmp_path / "greedy.jsonl")]
    assert figures["difference"][0] == pytest.approx(mean(share) - mean(greedy[:6]))
    assert (figures["pairs"], figures["unpaired"]) == (6, 2)
    defined = (ROOT / "docs" / "metrics.md").read_text()
    flags = {"run", *vars(evaluate.Which()), *vars(evaluate.Evaluation())}
    assert [key for key in figures if key not in flags and f"`{key.split('@')[0]}" not in defined] == []


def test_top_k_and_top_p_reach_the_sampler(tmp_path, capsys, monkeypatch):
    """Sampling hot from the one likeliest token, or from the least mass that it alone fills, is greedy."""
    hot = ["--limit", 3, "--samples", 2, "--temperature", 3]
    twice = 2 * run(capsys, monkeypatch, "--limit", 3)["tokens"]
    assert run(capsys, monkeypatch, *hot, "--top-k", 1)["tokens"] == twice
    assert run(capsys, monkeypatch, *hot, "--top-p", 1e-6)["tokens"] == twice
    assert run(capsys, monkeypatch, *hot)["tokens"] != twice


def test_the_cache_is_for_as_many_rows_as_there_are_answers_and_threads_are_few(capsys, monkeypatch):
    asked, threads = [], []
    sampler = evaluate.Sampler
    monkeypatch.setattr(evaluate, "Sampler", lambda *given: asked.append(given[3]) or sampler(*given))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    run(capsys, monkeypatch, "--limit", 3, "--samples", 2)
    assert (asked, threads) == ([6], [2])


def test_ids_that_the_tokenizer_lacks_are_never_drawn(capsys, monkeypatch):
    highest = []
    score = evaluate.rewards.grade_rollouts

    def look(tokenizer, problems, rollouts, *more):
        highest.extend(max(completion) - tokenizer.vocab_size for completion in rollouts.completions)
        return score(tokenizer, problems, rollouts, *more)

    monkeypatch.setattr(evaluate.rewards, "grade_rollouts", look)
    run(capsys, monkeypatch, "--limit", 8, "--samples", 4, "--temperature", 1000, "--top-p", 1)
    assert len(highest) == 32 and max(highest) < 0


def test_lenient_counts_the_last_number_of_answers_out_of_form(capsys, monkeypatch):
    """A tokenizer that drops the box turns every right answer into one that is right only leniently."""
    decode = evaluate.data.Tokenizer.decode
    strict = run(capsys, monkeypatch, "--limit", 20)
    monkeypatch.setattr(evaluate.data.Tokenizer, "decode",
                        lambda self, ids: decode(self, ids).replace("The answer is \\boxed{", "").replace("}.", ""))
    loose = run(capsys, monkeypatch, "--limit", 20)
    assert loose["pass@1"][0] == loose["format"] == 0 and loose["rules"] == {"none": 20}
    assert loose["pass@1_lenient"] == strict["pass@1"]


@pytest.fixture
def adapted():
    """The tiny model with an adapter whose B is random and large, so that its effect is far from rounding."""
    model = qwen.load(ROOT / "tiny", "nvfp4", "cpu")
    adapter = lora.attach(model, rank=4, alpha=4)
    adapter.master.data[adapter.b_start:] = torch.randn(adapter.master.numel() - adapter.b_start,
                                                        generator=torch.Generator().manual_seed(0))
    adapter.sync()
    return model


def test_an_adapter_is_applied_and_proven_so(adapted, tmp_path, capsys, monkeypatch):
    lora.save_adapter(adapted, tmp_path / "adapter")
    base = run(capsys, monkeypatch, "--limit", 8, "--out", tmp_path / "a.jsonl")
    figures = run(capsys, monkeypatch, "--limit", 8, "--out", tmp_path / "b.jsonl", "--adapter", tmp_path / "adapter")
    assert base["adapter_shift"] is None and figures["adapter_shift"] > 0.1
    without, within = ([row["mean_logprob"] for row in read(tmp_path / name)] for name in ("a.jsonl", "b.jsonl"))
    assert all(a != b for a, b in zip(without, within, strict=True))


def test_a_sampler_that_ignores_the_adapter_is_refused(adapted):
    """The release's GSM8K evaluation never handed the adapter to its engine: it scored the base and did not notice."""
    class Deaf(Sampler):
        def generate(self, *args, **kwargs):
            with adapted.adapter.off():
                return super().generate(*args, **kwargs)

    sampler = Sampler(TorchEngine, adapted, 64, 2)
    assert evaluate.prove_adapter(adapted, sampler, [1, 2, 3], 40) > 0.1
    deaf = Deaf(TorchEngine, adapted, 64, 2)
    with pytest.raises(ValueError, match="--adapter has no effect"):
        evaluate.prove_adapter(adapted, deaf, [1, 2, 3], 40)


def test_an_adapter_that_does_less_than_rounding_is_not_said_to_be_applied(adapted, capsys):
    """As one of a first step at a tiny rate. Rounding is played: the sampler's log-probs are off by 0.01 either way."""
    adapted.adapter.master.data[adapted.adapter.b_start:] *= 1e-6
    adapted.adapter.sync()

    class Rounding(Sampler):
        def generate(self, *args, **kwargs):
            rollouts = super().generate(*args, **kwargs)
            for row in rollouts.logprobs:
                row += 0.01 * (-1) ** torch.arange(len(row))
            return rollouts

    assert evaluate.prove_adapter(adapted, Rounding(TorchEngine, adapted, 64, 2), [1, 2, 3], 40) < 1e-3
    said = capsys.readouterr().out
    assert "too little to tell from rounding (1.0e-02) whether the sampler applies it" in said


def test_a_reward_that_fails_at_once_leaves_no_file(tmp_path, capsys, monkeypatch):
    """The same command can be given again when the function is mended."""
    (tmp_path / "odd.py").write_text("def broken(completion, problem):\n    return {}['x']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, *"--limit 2 --reward odd:broken --out a.jsonl".split()])
    with pytest.raises(BaseException, match="odd:broken"):
        evaluate.main()
    assert not Path("a.jsonl").exists()


def test_a_fresh_adapter_is_said_to_be_the_base(tmp_path, capsys, monkeypatch):
    model = qwen.load(ROOT / "tiny", "nvfp4", "cpu")
    lora.attach(model, rank=4)
    lora.save_adapter(model, tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--limit", "2", "--adapter", str(tmp_path)])
    evaluate.main()
    out = capsys.readouterr().out
    assert "B is zero in every layer" in out and json.loads(out.splitlines()[-1])["adapter_shift"] == 0.0


@pytest.mark.parametrize("flags,message", [
    (["--samples", "0"], "--samples must lie in [1, 1e5], got 0"),
    (["--limit", "-1"], "--limit must lie in [0, 2e9], got -1"),
    (["--samples", "4", "--temperature", "0"], "--samples 4 needs a --temperature above 0"),
    (["--max-new-tokens", "1020"], "max_position_embeddings is 1024, less than"),
    (["--temperature", "nan"], "--temperature must lie in [0, 1000], got nan"),
    (["--top-p", "0"], "--top-p must lie in (0, 1], got 0.0"),
    (["--model", "nowhere"], "--model nowhere: neither a folder nor a name"),
    (["--adapter", "nowhere"], "nowhere/adapter_config.json: cannot be read (No such file"),
    (["--data", "nowhere.jsonl"], "no data file nowhere.jsonl"),
    (["--device", "abacus"], "--device abacus: expected cpu, cuda or cuda:N"),
    (["--device", "cuda:9"], "--device cuda:9: torch sees"),
    (["--out", "taken.jsonl"], "--out taken.jsonl exists and is not overwritten"),
    (["--against", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
    (["--against", "taken.jsonl"], "--against taken.jsonl:2: needs id, question, correct"),
    (["--against", "other.jsonl"], "none of its 2 problems is among the 3 here"),
    (["--against", "seven.jsonl"], "--against seven.jsonl:2: needs id, question, correct"),
    (["--against", "empty.jsonl"], "none of its 0 problems is among the 3 here")])
def test_bad_input_is_one_clear_line(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("taken.jsonl").write_text(json.dumps(rows([1])[0]) + '\n{"id": "p1", "correct": 1}\n')
    Path("other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows([1, 0])))
    Path("empty.jsonl").write_text("")
    Path("seven.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows([1, 7])))
    before = Path("taken.jsonl").read_bytes()
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--limit", "3", *flags])
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    assert stop.value.code.startswith("evaluate.py: ") and message in stop.value.code and "\n" not in stop.value.code
    assert Path("taken.jsonl").read_bytes() == before


def test_memory_for_no_answer_is_one_line_without_a_flag_of_another_program(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 512)                   # 512 pages of 512 bytes
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--limit", "1"])
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    assert re.fullmatch(r"evaluate.py: KV pool of 0.0001221 GiB holds less than one sequence of \d+ tokens, which "
                        r"takes 0.\d+ GiB: more memory or shorter sequences are needed", stop.value.code)


@pytest.mark.parametrize("flags", [["--samples", "2", "--temperature", "1e-45"], ["--adapter", "large"]])
def test_log_probs_that_are_not_finite_are_one_line(adapted, flags, tmp_path, monkeypatch):
    adapted.adapter.master.data[adapted.adapter.b_start:] = 1e30
    monkeypatch.chdir(tmp_path)
    lora.save_adapter(adapted, "large")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--limit", "1", *flags])
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    said = "evaluate.py: a sampled token's log-prob is not finite: the temperature is too low"
    assert stop.value.code.startswith(said)


@pytest.mark.parametrize("most", [1, 1500])
def test_a_full_disk_is_one_line_that_names_the_file_and_loses_no_figures(most, tmp_path, capsys, monkeypatch):
    whole = run(capsys, monkeypatch, "--limit", 9)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--limit", "9", "--out", f"{tmp_path}/a.jsonl"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))          # Python ignores SIGXFSZ
    try:
        with pytest.raises(SystemExit) as stop:
            evaluate.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = capsys.readouterr()
    failure = f"[Errno 27] File too large: '{tmp_path}/a.jsonl'"
    assert stop.value.code == 1 and err.count(f"{failure}: sampling goes on") == 1
    assert err.endswith(f"evaluate.py: {failure}: --out lacks some answers, the figures above count all\n")
    figures = json.loads(out.splitlines()[-1])
    assert all(figures[key] == whole[key] for key in ("n", "pass@1", "length", "rules")) and figures["n"] == 9
    # Whole rows, none of them cut; no empty file, which would be in the way of the next try.
    assert {path.name: len(read(path)) for path in tmp_path.iterdir()} == ({} if most == 1 else {"a.jsonl": 2})


def test_a_disk_that_has_space_again_at_the_end_has_all_answers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "append_rows", lambda *_: "the disk is full")
    assert run(capsys, monkeypatch, "--limit", 3, "--out", tmp_path / "a.jsonl")["n"] == 3
    assert len(read(tmp_path / "a.jsonl")) == 3


def test_a_file_that_is_gone_does_not_cost_the_figures(tmp_path, capsys, monkeypatch):
    append = evaluate.append_rows

    def lose(path, rows):
        Path(path).unlink(missing_ok=True)
        return append(path, rows)

    monkeypatch.setattr(evaluate, "append_rows", lose)
    assert run(capsys, monkeypatch, "--limit", 3, "--out", tmp_path / "a.jsonl")["n"] == 3
    assert len(read(tmp_path / "a.jsonl")) == 3             # written anew at the end


def test_a_flag_cut_short_is_not_guessed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--sample", "4"])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "unrecognized arguments: --sample" in capsys.readouterr().err


def test_the_gpu_named_is_the_one_that_triton_launches_on(monkeypatch):
    """--device cuda:1 used to leave cuda:0 the current device: kernels there met tensors of another GPU."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [device_of(name, '.').type for name in ("cuda:1", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert chosen == [1, 0]


@pytest.mark.parametrize("lenient", [False, True])
def test_ctrl_c_ends_with_the_figures_and_rows_of_the_problems_that_are_done(tmp_path, capsys, monkeypatch, lenient):
    """Also where one's rows have their score and not yet all of their keys."""
    score, grade = evaluate.rewards.grade_rollouts, evaluate.rewards.grade

    def interrupt(*arguments):
        if len(scored) == 3:
            monkeypatch.setattr(evaluate.rewards, "grade", cut)
        else:
            scored.append(arguments[1][0].id)
        return score(*arguments)

    def cut(*arguments, last_number=False):
        if last_number == lenient:
            raise KeyboardInterrupt
        return grade(*arguments)

    scored, out = [], tmp_path / "a.jsonl"
    monkeypatch.setattr(evaluate.rewards, "grade_rollouts", interrupt)
    with pytest.raises(SystemExit) as stop:
        run(capsys, monkeypatch, "--limit", 8, "--samples", 2, "--temperature", 1, "--out", out)
    said = capsys.readouterr()
    assert stop.value.code == 130 and said.err.endswith("evaluate.py: stopped by Ctrl-C: 3 of 8 problems are done\n")
    figures = json.loads(said.out.splitlines()[-1])
    assert figures["n"] == 3 and figures["idle"] is None and len(read(out)) == 6
    assert {row["id"] for row in read(out)} == set(scored)
    assert figures["pass@1"][0] == mean([row["correct"] for row in read(out)])


def test_ctrl_c_before_the_first_problem_is_done_leaves_no_file(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate.rewards, "grade_rollouts", interrupt)
    with pytest.raises(SystemExit):
        run(capsys, monkeypatch, "--limit", 4, "--out", tmp_path / "a.jsonl")
    assert not list(tmp_path.iterdir()) and "0 of 4 problems are done" in capsys.readouterr().err


def test_a_reward_of_nan_is_null_and_the_rows_can_be_compared_with(tmp_path, capsys, monkeypatch):
    (tmp_path / "odd.py").write_text("def nan(completion, problem):\n    return float('nan')\n"
                                     "def two(completion, problem):\n"
                                     "    return 2 if problem['id'].endswith('-0') else float('nan')\n")
    monkeypatch.chdir(tmp_path)
    figures = run(capsys, monkeypatch, "--limit", 2, "--reward", "odd:nan", "--out", "a.jsonl")
    assert figures["mean_reward"] is None and [row["task"] for row in read(Path("a.jsonl"))] == [None, None]
    assert run(capsys, monkeypatch, "--limit", 2, "--against", "a.jsonl")["pairs"] == 2      # NaN, it was no JSON
    assert run(capsys, monkeypatch, "--limit", 2, "--reward", "odd:two")["mean_reward"] == 2


def test_rows_are_in_the_file_before_the_end(tmp_path, capsys, monkeypatch):
    score, seen, out = evaluate.rewards.grade_rollouts, [], tmp_path / "a.jsonl"

    def look(*arguments):
        seen.append(len(read(out)))
        return score(*arguments)

    monkeypatch.setattr(evaluate.rewards, "grade_rollouts", look)
    run(capsys, monkeypatch, "--limit", 4, "--out", out)
    assert seen == [0, 1, 2, 3]
    assert [row["id"] for row in read(out)] == [f"arithmetic-test-{i}" for i in range(4)]


@pytest.mark.parametrize("out", ["file/a.jsonl", ".", "/proc/none/a.jsonl"])
def test_an_out_that_cannot_be_written_ends_before_the_model_is_loaded(out, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate.qwen, "load", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--out", out])
    with pytest.raises(SystemExit) as stop:
        evaluate.main()
    assert stop.value.code.startswith("evaluate.py: ") and "\n" not in stop.value.code


@pytest.mark.parametrize("name,thinking,rules", [("thinking", "on", {"truncated": 20}), ("qwen3", "on", {"box": 20}),
                                                 ("qwen3", "off", {"box": 20})])
def test_an_answer_that_never_closes_the_thinking_of_its_prompt_is_cut_strict_and_lenient(
        name, thinking, rules, tmp_path, capsys, monkeypatch):
    # The tiny model knows nothing of thinking: it boxes a number at once.
    model = thinking_tiny(tmp_path / "model", TEMPLATES[name])
    figures = run(capsys, monkeypatch, "--model", model, "--thinking", thinking, "--limit", 20, "--out", tmp_path / "a")
    assert figures["rules"] == rules and figures["thinking"] == thinking
    right = mean([float(f"\\boxed{{{row['answer']}}}" in row["completion"]) for row in read(tmp_path / "a")])
    assert right > 0 and figures["format"] == (name == "qwen3")
    assert figures["pass@1"][0] == figures["pass@1_lenient"][0] == (right if name == "qwen3" else 0)


def test_what_fails_while_loading_leaves_no_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--adapter", "nowhere", "--out", f"{tmp_path}/a"])
    with pytest.raises(SystemExit, match="nowhere/adapter_config.json"):
        evaluate.main()
    assert not list(tmp_path.iterdir())


def test_a_run_is_evaluated_with_its_flags_on_what_it_held_out(adapted, tmp_path, capsys, monkeypatch):
    lora.save_adapter(adapted, tmp_path / "run" / "adapter")
    (tmp_path / "rewards_here.py").write_text("def length(completion, problem):\n    return len(completion)\n")
    lines = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    flags = dict(model=str(ROOT / "tiny"), base="bf16", dtype=None, data=str(tmp_path / "sums.jsonl"),
                 prompt_style="plain", max_new_tokens=20, reward="rewards_here:length",
                 eval_problems=256, max_prompt_tokens=64)
    (tmp_path / "run" / "run.json").write_text(json.dumps(flags))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "run", "--device", "cpu", "--out", "a.jsonl"])
    evaluate.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["id"] for row in read(tmp_path / "a.jsonl")] == [f"sums-{i}" for i in range(37, 41)]
    assert figures["base"] == "bf16" and figures["adapter_shift"] > 0 and figures["max_new_tokens"] == 20
    assert figures["mean_reward"] == mean([len(row["completion"]) for row in read(tmp_path / "a.jsonl")])
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "run", "--device", "cpu", "--adapter", "none"])
    evaluate.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["adapter_shift"] is None


def held_out_by(folder, data, **flags):
    """The settings of a run that evaluate.problems_of() reads, and its tokenizer; the run lies in `folder`."""
    run = Settings.of(dict(data=str(data), eval_problems=4, max_prompt_tokens=64, out=str(folder)) | flags)
    tokenizer = evaluate.data.Tokenizer(ROOT / "tiny")
    digest = evaluate.data.digest_of(sum(evaluate.data.split_problems(run.data, tokenizer), []))
    (folder / "run.json").write_text(json.dumps({"problems_sha256": digest}))
    return run, tokenizer


@pytest.mark.parametrize("limit,want", [(None, 4), (0, 4096), (6, 6), (2, 2)])
def test_of_a_test_split_what_the_run_held_out_is_taken_and_with_limit_more_or_fewer(limit, want, tmp_path, capsys):
    run, tokenizer = held_out_by(tmp_path, "arithmetic")
    capsys.readouterr()
    wanted = evaluate.Evaluation(prompt_style="plain", limit=limit)
    problems, source = evaluate.problems_of(wanted, run, tokenizer)
    assert len(problems) == want and source == "arithmetic"
    assert [problem.id for problem in problems[:2]] == ["arithmetic-test-0", "arithmetic-test-1"]
    said = capsys.readouterr().out
    assert said.startswith(f"{want:,} problems of arithmetic that {tmp_path}")
    assert ("(--limit 0: all of the test split)" in said) == (limit is None)


def sums(file, count):
    rows_of_file = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))
    return file


@pytest.mark.parametrize("limit", [None, 0, 3])
@pytest.mark.parametrize("hub", [False, True])
def test_of_training_data_no_problem_is_taken_that_the_run_has_trained_on(limit, hub, tmp_path, monkeypatch, capsys):
    """hub: the data set has a short name and no test split."""
    data = sums(tmp_path / "sums.jsonl", 60)
    if hub:
        monkeypatch.setattr(evaluate.data, "has_test_split", lambda source: False)
        load = evaluate.data.load_problems
        monkeypatch.setattr(evaluate.data, "load_problems", lambda _, *more, **flags: load(str(data), *more, **flags))
    run, tokenizer = held_out_by(tmp_path, "dapo" if hub else data)
    wanted = evaluate.Evaluation(prompt_style="plain", limit=limit)
    problems, _ = evaluate.problems_of(wanted, run, tokenizer)
    assert [problem.id for problem in problems] == [f"sums-{i}" for i in range(57, 61)][:limit or 4]
    assert "all of the test split" not in capsys.readouterr().out


def test_a_training_file_that_has_changed_since_the_run_is_not_taken(tmp_path):
    run, tokenizer = held_out_by(tmp_path, sums(tmp_path / "sums.jsonl", 60))
    sums(tmp_path / "sums.jsonl", 40)
    with pytest.raises(ValueError, match="sums.jsonl has now, .*: name problems with --data"):
        evaluate.problems_of(evaluate.Evaluation(prompt_style="plain"), run, tokenizer)


def test_a_run_brings_its_thinking_and_its_held_out_problems_stay_the_same_without_it(tmp_path, monkeypatch):
    # Thinking off makes a prompt longer by an empty block, and one problem then too long for the run.
    model = thinking_tiny(tmp_path / "model", TEMPLATES["qwen3"])
    rows_of_file = [{"question": "1" * n, "answer": "1"} for n in range(40, 60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_file))
    tokenizers = {thinking: evaluate.data.Tokenizer(model, thinking) for thinking in ("off", "on")}
    longest = len(tokenizers["on"].chat("1" * 59))
    assert longest < len(tokenizers["off"].chat("1" * 59))
    held = dict(model=str(model), base="bf16", data=str(tmp_path / "sums.jsonl"), prompt_style="plain", thinking="on",
                max_new_tokens=4, eval_problems=256, max_prompt_tokens=longest)
    (tmp_path / "run.json").write_text(json.dumps(held))
    for more, thinking in (([], "on"), (["--thinking", "off"], "off")):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", str(tmp_path), *more])
        _, wanted, of_run = evaluate.read_flags()
        problems, _ = evaluate.problems_of(wanted, of_run, tokenizers[thinking])
        assert wanted.thinking == thinking and [problem.id for problem in problems] == ["sums-19", "sums-20"]
        assert problems[1].prompt == tokenizers[thinking].chat("1" * 59)


@pytest.mark.parametrize("flags", ["--prompt-style boxed", "--reward rewards_here:length"])
def test_what_a_run_held_out_stays_so_under_another_prompt_or_reward(flags, tmp_path, capsys, monkeypatch):
    # Of 40 problems the run left out ten without a gold that can be read and held out three; asked in longer prompts,
    # or without need of golds, they would be split elsewhere: what it had trained on would count as held out.
    (tmp_path / "rewards_here.py").write_text("def length(completion, problem):\n    return len(completion)\n")
    golds = [r"2^{\aleph_0}"] * 10 + ["7"] * 30
    lines = [json.dumps({"question": f"{i}?" + " + 1" * (9 * (i > 36)), "answer": gold}) + "\n"
             for i, gold in enumerate(golds, 1)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    held = dict(model=str(ROOT / "tiny"), base="bf16", dtype=None, data=str(tmp_path / "sums.jsonl"),
                prompt_style="plain", max_new_tokens=4, eval_problems=256, max_prompt_tokens=64)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(held))
    monkeypatch.chdir(tmp_path)
    for more in ([], flags.split()):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "run", "--adapter", "none", "--device", "cpu", "--out",
                                          f"{len(more)}.jsonl", *more])
        evaluate.main()
        assert [row["id"] for row in read(tmp_path / f"{len(more)}.jsonl")] == ["sums-38", "sums-39", "sums-40"]


def test_a_merged_folder_stays_in_16_bits_unless_told_otherwise(tmp_path, capsys, monkeypatch):
    config = json.loads((ROOT / "tiny" / "config.json").read_text()) | {"merged_adapter": "runs/x/adapter"}
    shutil.copytree(ROOT / "tiny", tmp_path / "merged")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config))
    assert run(capsys, monkeypatch, "--model", tmp_path / "merged", "--limit", 2)["base"] == "bf16"
    argv = ["evaluate.py", *BASIC, "--model", str(tmp_path / "merged"), "--limit", "2", "--base", "nvfp4"]
    monkeypatch.setattr(sys, "argv", argv)
    evaluate.main()
    assert "rounded to nvfp4, the merged adapter 'runs/x/adapter' is mostly lost" in capsys.readouterr().out


@pytest.mark.parametrize("error,line", [
    (RuntimeError("CUDA out of memory. Tried to allocate 9 GiB\nadvice"),
     "evaluate.py: not enough memory: CUDA out of memory. Tried to allocate 9 GiB"),
    (OSError("disk gone"), "evaluate.py: disk gone"), (RuntimeError("mat1 and mat2"), None), (AssertionError(), None)])
def test_a_bug_keeps_its_traceback_and_what_is_none_is_one_line(error, line, monkeypatch):
    def load(*args):
        raise error
    monkeypatch.setattr(evaluate.qwen, "load", load)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *BASIC, "--limit", "3"])
    with pytest.raises(SystemExit if line else type(error)) as stop:
        evaluate.main()
    assert not line or stop.value.code == line


def test_the_command_ends_with_json_on_stdout_and_shows_progress_on_stderr(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "evaluate.py"), *BASIC, "--limit", "3"], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["n"] == 3, done.stderr
    last = done.stderr.split("\r")[-1]
    assert re.search(r"3/3 answers \|.*\| \d\d:\d\d, 00:00 left, [\d,]+ tokens/s", last), last
    assert max(map(len, done.stderr.splitlines()[-1].split("\r"))) <= 80
