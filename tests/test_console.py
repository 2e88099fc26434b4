"""
When a run is ended because it learns nothing, and what it prints; test_train.py ends real runs by it.

python -m pytest tests/test_console.py -v
"""
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import torch

from harness.config import Settings
from harness.console import SOURCE, Console, Watch, command, symptom

HEALTHY = dict(accuracy=0.3, reward=0.3, groups=9, length=280.0, truncated=0.04, entropy=0.2)
RUNS = sorted((Path(__file__).parent.parent / "study" / "runs").glob("*.jsonl"))


def settings(**changes):
    flags = dict(lr=1e-3, overlong="mask", max_new_tokens=512, prompts_per_step=64, data="gsm8k")
    return Settings.of(flags | changes)


def step(**changes):
    """A step's metrics; entropy=None: nothing was trained on."""
    return {k: v for k, v in (HEALTHY | changes).items() if v is not None}


@pytest.mark.parametrize("changes,flags,best,said", [
    ({}, {}, 0.3, ""),
    (dict(groups=0, truncated=1, accuracy=0), {}, 0.3, "cut and left out of the loss: --max-new-tokens 512 may be too few"),
    (dict(truncated=1, accuracy=0.1), dict(overlong="keep"), 0.3, ""),
    (dict(length=1.2), {}, 0.3, "answers had one token: --lr 0.001 may be too high"),
    (dict(accuracy=0), {}, 0.26, "no answer was right, where 26% had been: --lr 0.001"),
    (dict(accuracy=0), {}, 0.0, ""),                                      # hard problems, but format or parts teach
    (dict(accuracy=0), dict(reward="mine:f"), 0.26, ""),                  # a reward of one's own means something else
    (dict(groups=0), {}, 0.3, ""),                                        # a step of equal groups happens to healthy runs
    (dict(groups=0, accuracy=0), {}, 0.0, "no answer was right so far: --data gsm8k may be too hard"),
    (dict(groups=0), dict(reward="mine:f"), 0.3, "--reward mine:f gave all answers to a problem the same"),
    (dict(groups=0, accuracy=0.99), dict(reward="mine:f"), 0.9, ""),      # solved
    (dict(groups=0, accuracy=0.99), {}, 0.9, "")])
def test_a_sick_step_is_named_with_the_flag_that_is_the_likely_cause(changes, flags, best, said):
    found = symptom(step(**changes), settings(**flags), best)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("prompts,patience", [(64, 10), (16, 13), (1, 200)])
def test_training_stops_after_ten_sick_steps_in_a_row_of_at_least_200_groups(prompts, patience):
    watch, sick = Watch(settings(prompts_per_step=prompts)), step(length=1.0)
    for metrics in [step()] * 3 + [sick] * (patience - 1) + [step()] + [sick] * (patience - 1):
        watch.see(metrics)
        assert not watch.verdict
    watch.see(sick)
    assert watch.verdict.startswith(f"for {patience} steps answers had one token")


def test_the_best_steps_are_those_of_the_highest_mean():
    # Ten steps are too few to tell. 0.36, their mean, is beaten by one of 0.1 and nine of 0.4.
    watch = Watch(settings())
    accuracies = [0.9] + [0.3] * 9 + [0.4] * 4 + [0.1] * 10 + [0.4] * 10
    better = [watch.see(step(accuracy=a)) for a in accuracies]
    assert better == [True] * 10 + [False] * 22 + [True] * 2
    assert watch.best == pytest.approx(0.4)
    watch = Watch(settings(reward="mine:f"))
    assert [watch.see(step(reward=r)) for r in [-2.0] * 10 + [-1.0, -3.0]] == [True] * 11 + [False]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_of_the_runs_on_record_one_is_dead(path):
    watch = Watch(settings(prompts_per_step=16, overlong="keep"))
    for line in path.read_text().splitlines():
        metrics = json.loads(line)
        watch.see(metrics | {"groups": round(16 * metrics["informative"])})
        assert not watch.verdict or path.stem == "16x8-lr1e-3-penalty-s0", (path, metrics)
    assert RUNS and len(watch.recent) == watch.patience
    assert bool(watch.verdict) == (path.stem == "16x8-lr1e-3-penalty-s0")


# -----------------------------------------------------------------------------
# What a run says

def test_the_first_line_says_what_is_learnt_from_what_and_where(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    console = Console(settings(model="qwen2.5-7b", steps=600, out="runs/x"))
    console.greet([None] * 7473, [None] * 256, torch.device("cpu"))
    assert capsys.readouterr().out == (
        "qwen2.5-7b, with frozen nvfp4 weights, learns gsm8k (7,473 problems, 256 held out): 600 steps of 64 problems x 8 "
        "answers on 1 x cpu (torch sees no GPU); writes runs/x\n")


def test_an_answer_that_is_shown_brings_no_control_codes(capsys):
    console = Console(settings(steps=4, show=2))
    console.start_at(0)
    row = dict(question="2+3?", id="q-1", reward=1.0, completion="\x1b[2J5\r\nyes")
    metrics = dict(step=1, reward=1.0, accuracy=1.0, length=3.0, tokens_per_s=10.0, seconds=1.0)
    console.tell(metrics, [row], [])
    said = capsys.readouterr().out
    assert "step 2, q-1, reward 1:\n2+3?\n-> \\x1b[2J5\\r\nyes" in said and "\x1b" not in said


def told(step, seconds=1.0, **figures):
    return dict(step=step, reward=0.5, accuracy=0.5, length=30.0, tokens_per_s=900.0, seconds=seconds) | figures


def test_the_bar_fits_80_columns_with_every_figure_in_it(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console = Console(settings(steps=1200))
    with console:
        console.start_at(988)
        console.bar.dynamic_ncols = lambda file: (80, 25)         # as of a terminal
        console.bar.start_t -= 120                          # the time left is hours
        console.tell(told(988, reward=-0.525, accuracy=1.0, length=4096.0), [], [])
        console.bar.refresh()
    last = capsys.readouterr().err.rstrip().split("\r")[-1]
    assert len(last) <= 80
    assert re.fullmatch(r"989/1200 \|.+\| \d+:\d\d:\d\d left, [\d.]+s/step, reward -0.525, right 100%, 4096 tokens *", last)


def test_after_ten_steps_the_time_left_is_told_anew_without_the_slow_first_step(capsys, monkeypatch):
    console = Console(settings(steps=111))
    console.start_at(0)
    for step in range(12):
        console.tell(told(step, 100.0 if step == 0 else 12.0), [], [])
    lines = [line for line in capsys.readouterr().out.splitlines() if "to go" in line]
    assert lines == ["a step takes 100.0 s: 3 h 3 min to go, without evaluations",
                     "after 10 steps: a step takes 12.0 s, not 100.0 s as the first did: 20 min to go, without evaluations"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Console(settings(steps=111)) as console:           # the bar's own estimate likewise
        console.start_at(0)
        console.bar.start_t -= 100 + 9 * 12                 # as if the steps had taken their time
        for step in range(10):
            console.tell(told(step, 100.0 if step == 0 else 12.0), [], [])
        assert console.bar.format_dict["elapsed"] == pytest.approx(10 * 12, abs=2)


def test_a_run_of_ten_steps_has_nothing_left_to_correct(capsys):
    console = Console(settings(steps=10))
    console.start_at(0)
    for step in range(10):
        console.tell(told(step), [], [])
    assert sum("to go" in line for line in capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("program", ["evaluate.py", "tools.report"])
def test_a_command_can_be_pasted_where_the_user_stands(program, tmp_path, monkeypatch):
    monkeypatch.chdir(SOURCE)
    words = shlex.split(command(program, "my runs/it's x"))
    assert words[1:] == (["evaluate.py"] if program == "evaluate.py" else ["-m", program]) + ["my runs/it's x"]
    monkeypatch.chdir(tmp_path)
    line = command(program, "my runs/it's x")
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "my runs/it's x/" in done.stderr and "No such file" in done.stderr
    assert len(done.stderr.splitlines()) == 1               # the program was found, and the run was not


def test_the_closing_commands_name_the_run_in_quotes(tmp_path, capsys):
    folder = tmp_path / "two words"
    folder.mkdir()
    rows = [told(0, eval_accuracy=0.25), told(1, eval_accuracy=0.5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Console(settings(steps=2)).farewell(folder, 64)
    first, *commands = capsys.readouterr().out.splitlines()
    assert "2 steps in 2 s; held-out accuracy 25.0% [" in first and "before, 50.0% [" in first
    assert [shlex.split(line.removeprefix("next:"))[-1] for line in commands] == [str(folder)] * 3 + [f"{folder}-merged"]
