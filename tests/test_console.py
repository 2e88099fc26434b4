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
from types import SimpleNamespace

import pytest
import torch

from harness import console as console_py
from harness.config import Settings
from harness.console import SHOWN, SOURCE, Console, Phases, Watch, cannot_learn, command, may_not_learn

HEALTHY = dict(accuracy=0.3, reward=0.3, groups=9, length=280.0, truncated=0.04, entropy=0.2)
RUNS = sorted((Path(__file__).parent.parent / "study" / "runs").glob("*.jsonl"))


def settings(**changes):
    flags = dict(lr=1e-3, overlong="mask", max_new_tokens=512, prompts_per_step=64, data="gsm8k")
    return Settings.of(flags | changes)


def step(**changes):
    """A step's metrics; entropy=None: nothing was trained on."""
    return {k: v for k, v in (HEALTHY | changes).items() if v is not None}


@pytest.mark.parametrize("changes,flags,level,said", [
    ({}, {}, 0.3, ""),
    (dict(groups=0, truncated=1, accuracy=0), {}, 0.3,
     "cut and left out of the loss: --max-new-tokens 512 may be too few"),
    (dict(truncated=1, accuracy=0.1), dict(overlong="keep"), 0.3, ""),
    (dict(length=1.2), {}, 0.3, "answers had one token: --lr 0.001 may be too high"),
    (dict(length=1, truncated=1), dict(overlong="keep", max_new_tokens=1), 0.3, ""),    # one token is all they may have
    (dict(accuracy=0), {}, 0.26, "no answer was right, where 26% had been: --lr 0.001"),
    (dict(accuracy=0), {}, 0.05, ""),                                     # not a good level: no collapse
    (dict(accuracy=0), dict(reward="mine:f"), 0.26, ""),                  # a reward of one's own means something else
    (dict(groups=0, accuracy=0), {}, 0.0, ""),
    (dict(groups=0), dict(reward="mine:f"), 0.3, ""),
    (dict(groups=0, accuracy=0.94), {}, 0.9, ""),
    (dict(entropy=1e-9, groups=0), dict(temperature=0.1), 0.9, "")])
def test_what_cannot_learn_is_named_with_the_flag_that_is_the_likely_cause(changes, flags, level, said):
    found = cannot_learn(step(**changes), settings(**flags), level, False)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("changes,flags,level,said", [
    ({}, {}, 0.3, ""),
    (dict(groups=1, accuracy=0.001), {}, 0.0, ""),                        # hard, but one group teaches
    (dict(groups=0), {}, 0.3, "all right or all wrong, which teaches nothing (30% were right)"),
    (dict(groups=0, accuracy=0.99), {}, 0.9, "99% of the answers were right and no group of them taught anything"),
    (dict(groups=0, accuracy=0), {}, 0.0, "no answer was right so far: --data gsm8k may be too hard"),
    (dict(groups=0, reward=1.0), dict(reward="mine:f"), 0.3,
     "--reward mine:f gave all answers to a problem the same, 1 on"),
    (dict(entropy=0.004), {}, 0.3, "its entropy was 0.004 nats a token: --temperature 1.0 may be too low"),
    (dict(entropy=0.004, accuracy=0.99), {}, 0.99, ""), (dict(entropy=None), {}, 0.3, "")])
def test_what_may_be_trouble_is_named_too(changes, flags, level, said):
    found = may_not_learn(step(**changes), settings(**flags), level)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("prompts,patience", [(64, 10), (16, 13), (1, 200)])
def test_training_stops_after_ten_sick_steps_in_a_row_of_at_least_200_groups(prompts, patience):
    watch, sick = Watch(settings(prompts_per_step=prompts)), step(length=1.0)
    for metrics in [step()] * 3 + [sick] * (patience - 1) + [step()] + [sick] * (patience - 1):
        watch.see(metrics)
        assert not watch.verdict
    watch.see(sick)
    assert watch.verdict.startswith(f"for {patience} steps answers had one token")


def test_updates_that_are_not_finite_in_every_step_end_the_run():
    def seen(steps, **flags):
        watch = Watch(settings(**flags))
        for changes in steps:
            watch.see(step(**changes))
        return watch.verdict

    assert "was not finite and its update was skipped: --lr 0.001 may be too high" in seen(
        dict(skipped=n) for n in range(11))
    assert seen(dict(skipped=n) for n in range(10)) == ""                 # of the first step one does not know
    assert seen(dict(skipped=n // 2) for n in range(100)) == ""           # every other step
    assert seen(dict(skipped=40) for _ in range(100)) == ""               # long ago, in a run that was resumed
    causes = seen((dict(skipped=4 * n, loss_scale=1.0) for n in range(11)), reward="mine:f", dtype="float16")
    assert "or the values of --reward mine:f too large, or the range of --dtype float16 too small" in causes
    # The scale is still being found: it may be halved 14 times.
    assert seen((dict(skipped=n, loss_scale=2.0 ** (14 - n)) for n in range(15)), dtype="float16") == ""


def test_a_collapse_is_one_from_a_good_level_also_if_it_comes_early():
    def verdict(accuracies, **flags):
        watch = Watch(settings(prompts_per_step=16, **flags))
        for accuracy in accuracies:
            watch.see(step(accuracy=accuracy, groups=9 * (accuracy > 0)))
        return watch.verdict

    for good, level in ((4, 17), (7, 30), (50, 30)):
        assert verdict([0.3] * good + [0.0] * 12) == ""
        assert f"no answer was right, where {level}% had been" in verdict([0.3] * good + [0.0] * 20)
    assert verdict([0.09] * 50 + [0.0] * 500) == verdict([0.3] + [0.0] * 500) == ""
    assert verdict([0.3] * 50 + [0.0] * 500, reward="mine:f") == verdict([0.3] * 50 + [0.0] * 500, watch="off") == ""


def test_a_doubt_is_said_after_the_patience_and_then_ever_more_rarely_and_ends_nothing(capsys):
    watch = Watch(settings())
    for n in range(1, 101):
        watch.see(step(groups=0))
        said = capsys.readouterr().out
        assert bool(said) == (n in (10, 20, 40, 80)) and not watch.verdict
        assert not said or said.startswith(f"for {n} steps the answers to a problem were all right or all wrong")
    watch.see(step())                                                     # one step that teaches begins it anew
    for _ in range(9):
        watch.see(step(groups=0))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("sick", [dict(length=1.0), dict(truncated=1, groups=0), dict(groups=0), dict(entropy=0.0)])
def test_watch_off_neither_ends_nor_warns(sick, capsys):
    watch, other = Watch(settings(watch="off")), Watch(settings())
    for accuracy in [0.3] * 20 + [0.4] * 20:
        metrics = step(**sick, accuracy=accuracy)
        assert watch.see(metrics) == other.see(metrics)                   # the best steps are found all the same
    assert not watch.verdict and other.verdict + capsys.readouterr().out


@pytest.mark.parametrize("flags,metrics", [
    (dict(reward="mine:f"), dict(groups=0, accuracy=0, reward=1.0)),                 # all answers reach the maximum
    ({}, dict(groups=0, accuracy=0.94)),                                             # groups all right or all wrong
    (dict(temperature=0.1), dict(groups=0, accuracy=0.5, entropy=0.001)),
    ({}, dict(groups=0, accuracy=0)), (dict(overlong="keep"), dict(groups=0, truncated=1))])
def test_what_a_healthy_run_may_show_for_long_does_not_end_it(flags, metrics):
    watch = Watch(settings(prompts_per_step=16, **flags))
    for _ in range(1000):
        watch.see(step(**metrics))
    assert not watch.verdict


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.03, 0.1, 0.94])
@pytest.mark.parametrize("alike", [False, True], ids=["answers apart", "groups all right or all wrong"])
def test_of_1000_simulated_runs_of_100_steps_none_is_ended_at_any_rate_of_right_answers(rate, alike):
    gen = torch.Generator().manual_seed(0)
    right = torch.rand(1000, 100, 16, 1 if alike else 8, generator=gen) < rate
    accuracies = right.float().mean((2, 3)).tolist()
    groups = (right.any(3) & ~right.all(3)).sum(2).tolist()
    ended = 0
    flags = settings(prompts_per_step=16)
    for run in range(1000):
        watch = Watch(flags)
        for accuracy, taught in zip(accuracies[run], groups[run], strict=True):
            watch.see(step(accuracy=accuracy, groups=taught))
        ended += bool(watch.verdict)
    assert ended == 0


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
        "qwen2.5-7b, with frozen nvfp4 weights, learns gsm8k (7,473 problems, and 256 held-out ones): 600 steps of 64 "
        "problems x 8 answers on the CPU (torch sees no GPU); writes runs/x\n")


def test_a_run_in_which_nothing_was_learned_says_so_at_its_end(tmp_path, capsys):
    console = Console(settings(steps=2))
    for norm, said in ((0.0, True), (0.1, False)):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(told(step, grad_norm=norm * step)) + "\n"
                                                        for step in (0, 1)))
        console.farewell(tmp_path, 4)
        assert ("nothing was learned: the gradient of every step was 0" in capsys.readouterr().out.splitlines()) == said


def test_a_run_whose_first_evaluation_was_lost_does_not_take_a_later_one_for_it(tmp_path, capsys):
    rows = [told(0, groups=1), told(1, groups=1, eval_accuracy=0.5), told(2, groups=1, eval_accuracy=0.75)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Console(settings(steps=3)).farewell(tmp_path, 4)
    assert re.search(r"held-out accuracy unknown before, 75.0% \[.*%\] after, on 4 problems", capsys.readouterr().out)


def test_a_run_whose_held_out_answers_could_not_be_scored_ends_in_a_line(tmp_path, capsys):
    rows = [told(0, eval_accuracy=0.5, eval_reward=None), told(1, eval_accuracy=0.5, eval_reward=0.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Console(settings(steps=2, reward="my:reward")).farewell(tmp_path, 4)
    assert "held-out reward nan before, 0 after; accuracy 50.0%" in capsys.readouterr().out


def test_what_there_is_one_of_is_said_in_the_singular(tmp_path, capsys):
    console = Console(settings(steps=1, prompts_per_step=1, group_size=2))
    console.greet([None], [None], torch.device("cpu"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(told(0, eval_accuracy=1.0)) + "\n")
    console.farewell(tmp_path, 1)
    first, last = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert ": 1 step of 1 problem x 2 answers on the CPU" in first
    assert f"{tmp_path}: 1 step in 1 s; held-out accuracy 100.0% [" in last and last.endswith(" before, on 1 problem")


def test_an_answer_that_is_shown_brings_no_control_codes(capsys):
    console = Console(settings(steps=4, show=2))
    console.start_at(0)
    row = dict(question="2+3?", id="q-1", reward=1.0, completion="\x1b[2J5\r\nyes")
    console.tell(told(1), [row], [])
    said = capsys.readouterr().out
    assert "step 2, q-1, reward 1:\n2+3?\n-> \\x1b[2J5\\r\nyes" in said and "\x1b" not in said


def test_an_update_that_is_skipped_is_told_under_the_number_of_its_steps_line(capsys):
    console = Console(settings(steps=4))
    console.start_at(0)
    console.tell(told(1), [], [SimpleNamespace(failure=None), SimpleNamespace(failure="the loss is nan")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert lines[0] == "step 2: the loss is nan: this update was skipped"
    assert len(lines) == 2 and lines[1].startswith("step 2/4: ")


def told(step, seconds=1.0, **figures):
    """A step's metrics with every number that the terminal shows."""
    every = dict.fromkeys((key for key, *_ in SHOWN), 0.5)
    return every | dict(step=step, length=30.0, tokens_per_s=900.0, seconds=seconds) | figures


def bar_of(metrics, monkeypatch, capsys, **changes):
    """What a terminal of 80 columns shows after step 989 of 1,200, of a run whose reward counts the format too."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Console(settings(**{"steps": 1200, "format_weight": 0.5} | changes)) as console:
        console.start_at(988)
        console.bar.dynamic_ncols = lambda file: (80, 25)         # as of a terminal
        console.bar.start_t -= 120                          # the time left is hours
        console.tell(metrics, [], [])
        console.bar.refresh()
    return capsys.readouterr().err.rstrip().split("\r")[-1]


def test_the_bar_fits_80_columns_with_reward_accuracy_and_length_in_it(capsys, monkeypatch):
    # They fill it where a step takes minutes. What a fork adds behind them may be cut off there.
    last = bar_of(told(988, reward=-0.525, accuracy=1.0, length=4096.0), monkeypatch, capsys)
    assert len(last) <= 80
    assert re.fullmatch(
        r"989/1200 \|.+\| \d+:\d\d:\d\d left, [\d.]+s/step, reward -0.525, right 100%, 4096 tokens\b.*", last)
    assert len(SHOWN) > 4 or last.rstrip().endswith("4096 tokens")


def test_a_line_holds_every_figure_and_the_seconds(capsys):
    console = Console(settings(steps=1200, format_weight=0.5))
    console.start_at(988)
    console.tell(told(988, reward=-0.525, accuracy=1.0, length=4096.0), [], [])
    line, time_left = capsys.readouterr().out.splitlines()[-2:]
    assert time_left.startswith("the first step took 1.0 s: ")
    begin, *figures, seconds = re.split("[:,] ", line)
    assert (begin, seconds) == ("step 989/1200", "1.0 s") and len(figures) == sum(text != "" for _, _, text in SHOWN)
    ours = ["reward -0.525", "accuracy 1.000", "length 4096", "informative 0.50", "900 tokens/s"]
    assert [text for text in figures if text in ours] == ours       # among those of a fork


def test_one_row_of_the_table_adds_a_figure_to_the_bar_and_to_the_line(capsys, monkeypatch):
    rows = *SHOWN[:1], ("clip_high", "clip {:.0%}", "clip_high {:.3g}")
    monkeypatch.setattr(console_py, "SHOWN", rows)
    clipped, untrained = told(988, reward=0.2, clip_high=0.25), told(988, reward=0.2)    # no row of the second taught
    console = Console(settings(steps=1200, format_weight=0.5))
    console.start_at(988)
    console.tell(clipped, [], [])
    console.tell(untrained, [], [])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert lines == ["step 989/1200: reward 0.2, clip_high 0.25, 1.0 s", "step 989/1200: reward 0.2, 1.0 s"]
    assert bar_of(clipped, monkeypatch, capsys).rstrip().endswith("step, reward 0.2, clip 25%")
    assert bar_of(untrained, monkeypatch, capsys).rstrip().endswith("step, reward 0.2")


def test_a_reward_that_is_the_accuracy_is_not_told_twice(capsys, monkeypatch):
    assert ", right 50%, 30 tokens" in bar_of(told(988), monkeypatch, capsys, format_weight=0.0)
    for other in (dict(format_weight=0.5), dict(reward="mine:f"), dict(overlong_buffer=8)):
        changes = dict(format_weight=0.0) | other
        assert ", reward 0.5, right 50%, " in bar_of(told(988), monkeypatch, capsys, **changes)  # also where they agree


def test_after_ten_steps_the_time_left_is_told_anew_without_the_slow_first_step(capsys, monkeypatch):
    console = Console(settings(steps=111))
    console.start_at(0)
    for step in range(12):
        console.tell(told(step, 100.0 if step == 0 else 12.0), [], [])
    lines = [line for line in capsys.readouterr().out.splitlines() if "to go" in line]
    assert lines == ["the first step took 100.0 s: 3 h 3 min to go at this speed, which changes with the length "
                     "of the answers, and without evaluations",
                     "after 10 steps: 20 min to go at 12.0 s a step (it was 100.0 s), without evaluations"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Console(settings(steps=111)) as console:           # the bar's own estimate likewise
        console.start_at(0)
        console.bar.start_t -= 100 + 9 * 12                 # as if the steps had taken their time
        for step in range(10):
            console.tell(told(step, 100.0 if step == 0 else 12.0), [], [])
        assert console.bar.format_dict["elapsed"] == pytest.approx(10 * 12, abs=2)


@pytest.mark.parametrize("first,others,said", [
    (1.3, 1.32, ""), (1.3, 1.17, ""), (12.0, 13.1, ""),     # by a tenth or less
    (0.24, 0.16, ""),                                       # both are printed as 0.2
    (1.3, 1.1, "at 1.1 s a step (it was 1.3 s)"),
    (10.0, 11.2, "at 11.2 s a step (it was 10.0 s)")])
def test_the_time_left_is_told_anew_only_if_steps_take_another_time_than_the_first(capsys, first, others, said):
    console = Console(settings(steps=111))
    console.start_at(0)
    for step in range(12):
        console.tell(told(step, others if step else first), [], [])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("after 10 steps: ")]
    assert len(lines) == bool(said) and all(said in line for line in lines)


def test_steps_that_get_slower_later_are_told_too(capsys):
    """Their answers get longer, say. After a fourth more it is told, and then counted from there."""
    console = Console(settings(steps=111))
    console.start_at(0)
    for step in range(50):
        console.tell(told(step, [2.0, 2.4, 2.6, 2.6, 3.5][step // 10]), [], [])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("after")]
    assert lines == ["after 30 steps: 4 min to go at 2.6 s a step (it was 2.0 s), without evaluations",
                     "after 50 steps: 4 min to go at 3.5 s a step (it was 2.6 s), without evaluations"]


def test_on_a_terminal_the_bar_alone_tells_that_steps_get_slower(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Console(settings(steps=111)) as console:
        console.start_at(0)
        for step in range(50):
            console.tell(told(step, [2.0, 2.4, 2.6, 2.6, 3.5][step // 10]), [], [])
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("after")]


class Gpu:
    """Of torch.cuda, what tells of memory: 2 GiB are held, and what is used beside them is free again in between."""
    held = peak = 2 * 2**30

    def is_initialized(self):
        return True

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self):
        self.peak = self.held

    def max_memory_reserved(self):
        return self.peak

    def use(self, gib):
        self.peak = max(self.peak, self.held + gib * 2**30)


def test_a_run_says_how_long_each_part_before_the_first_step_took_and_how_much_memory(capsys, monkeypatch):
    clock, gpu = [1000.0], Gpu()
    monkeypatch.setattr("harness.console.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("harness.console.torch.cuda", gpu)
    phases = Phases()
    for name, seconds, gib in (("problems", 2.5, 0), ("download", 0.01, 0), ("weights", 130, 6.25),
                               ("memory plan", 14, 12)):
        with phases(name):
            gpu.use(gib)
            clock[0] += seconds
    clock[0] += 1
    phases.tell()
    assert capsys.readouterr().out == (
        "ready after 148 s: problems 2.5 s (2.0 GiB), weights 130 s (8.2 GiB), memory plan 14 s (14.0 GiB)\n")
    run = Console(settings(steps=3))
    run.start_at(0)                                         # the memory of the preparation is not the steps'
    gpu.use(5)
    run.tell(told(0, 4.0), [], [])
    said = capsys.readouterr().out
    assert "the first step took 4.0 s, at most 7.0 GiB of GPU memory: 8 s to go at this speed" in said


def test_a_run_of_ten_steps_has_nothing_left_to_correct(capsys):
    console = Console(settings(steps=10))
    console.start_at(0)
    for step in range(10):
        console.tell(told(step), [], [])
    assert sum("to go" in line for line in capsys.readouterr().out.splitlines()) == 1
    console = Console(settings(steps=1))
    console.start_at(0)
    console.tell(told(0, 4.0), [], [])
    assert "the first step took 4.0 s\n" in capsys.readouterr().out


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
    assert [shlex.split(line.removeprefix("next:"))[-1] for line in commands] == [
        str(folder), str(folder), str(folder), f"{folder}-merged"]
