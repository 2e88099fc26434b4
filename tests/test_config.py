"""
Settings: every field is a flag, values that make no sense are refused in one line, run.json gives them back.

python -m pytest tests/test_config.py -v
"""
import dataclasses
import json
import re

import pytest
import torch

from harness.config import (
    FIELDS,
    PRESETS,
    TINY_DEFAULTS,
    TINY_MODEL,
    Settings,
    check_settings,
    option,
    read_run_json,
    read_settings,
    settings_of_run,
    type_of,
    without_places,
)
from weights import TARGETS, TRAINED_WITH, write_conditions, write_peft


def settings_of(*flags):
    """As train.py reads them, the sizes for two CPU cores included."""
    return read_settings(list(flags))[0]


def test_the_defaults_pass_their_own_check():
    assert check_settings(settings_of(), None) is None             # it raises or says nothing
    assert check_settings(settings_of("--model", "qwen2.5-7b"), None) is None


@pytest.mark.parametrize("flag,values", [
    *((flag, ("0", "-1")) for flag in ("--lora-rank", "--steps", "--prompts-per-step", "--max-prompt-tokens",
                                       "--max-new-tokens", "--max-rows", "--noise-stages", "--updates-per-rollout",
                                       "--epochs", "--micro-batch-tokens", "--eval-every", "--save-every")),
    *((flag, ("0", "-1", "nan", "inf")) for flag in ("--lr", "--max-grad-norm", "--temperature", "--kv-gib",
                                                     "--memory-gib", "--lora-alpha", "--sigma-end", "--clip-high")),
    *((flag, ("-0.1", "nan", "inf")) for flag in ("--weight-decay", "--kl-beta", "--format-weight", "--sigma-start")),
    ("--eval-problems", ("-3",)), ("--seed", ("-1",)), ("--group-size", ("1", "0", "-4")),
    ("--warmup", ("-0.1", "1.5", "nan")), ("--clip-low", ("0", "-0.2", "1.5", "nan")),
    ("--overlong-buffer", ("-1", "100000")), ("--updates-per-rollout", ("17",))])
def test_a_value_outside_of_its_range_is_refused_with_flag_and_value(flag, values):
    for value in values:
        settings = settings_of(f"{flag}={value}")
        with pytest.raises(ValueError) as error:
            check_settings(settings, None)
        said, got = str(error.value), settings.flat()[flag[2:].replace("-", "_")]
        assert said.startswith(f"{flag} must lie in ") and said.endswith(f", got {got}") and "\n" not in said


@pytest.mark.parametrize("flags", [
    "--warmup 0", "--warmup 1", "--sigma-start 0", "--sigma-start 0 --sigma-end 0",
    "--weight-decay 0.1 --kl-beta 0.001", "--eval-problems 0",
    "--seed 0", "--clip-low 1 --clip-high 1e9", "--group-size 2",
    "--overlong-buffer 48 --overlong keep", "--updates-per-rollout 16"])
def test_a_value_on_the_edge_of_its_range_is_taken(flags):
    assert check_settings(settings_of(*flags.split()), None) is None


@pytest.mark.parametrize("flags,words", [
    ("--sigma-start 1e-4 --sigma-end 1e-2", r"--sigma-end must lie in \(0, 0.0001\], the --sigma-start, got 0.01"),
    ("--overlong-buffer 8", "--overlong-buffer 8: --overlong mask leaves out"),
    ("--sigma-start 5e-2 --noise-stages 1", "--noise-stages 1: the first stage has no noise, so --sigma-start 0.05"),
    ("--temperature 1e-4", "--temperature 0.0001: the likeliest token would always be drawn, take at least 0.001"),
    ("--lr-schedule constant --warmup 0.8", "--warmup 0.8: with --lr-schedule constant the rate falls from three"),
    ("--lr 2 --weight-decay 0.5", "--weight-decay 0.5 x --lr 2.0 must be below 1"),
    ("--prompts-per-step 600000", "--prompts-per-step 600000 x --group-size 8 is more than a step can hold"),
    ("--calibrate 8 --base nf4", "--calibrate 8 is for NVFP4, --base is nf4")])
def test_flags_that_contradict_each_other_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        check_settings(settings_of(*flags.split()), None)


@pytest.mark.parametrize("name,value", [
    ("lr", "1e-3"), ("steps", 2.5), ("steps", True), ("epochs", None), ("train_norms", 1), ("base", "int3"),
    ("model", ["tiny"]), ("reward", 3)])
def test_a_run_json_with_a_value_that_its_flag_cannot_have_names_file_and_flag(tmp_path, name, value):
    held = settings_of().flat()
    (tmp_path / "run.json").write_text(json.dumps(held))
    assert read_run_json(tmp_path / "run.json")["lr"] == held["lr"]
    (tmp_path / "run.json").write_text(json.dumps(held | {name: value}))
    flag = option(name)
    with pytest.raises(ValueError, match=re.escape(f"run.json: {name} is {value!r}, which {flag} cannot be")):
        read_run_json(tmp_path / "run.json")


@pytest.mark.parametrize("name", ["reward", "prompt_style"])
@pytest.mark.parametrize("value", ["{}/evil:f", ".evil:f", "builtins:exec", "evil.f"])
def test_a_run_json_that_names_a_path_is_refused_and_runs_nothing(tmp_path, name, value):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n\n\ndef f(*_):\n    return 1.0\n")
    held = settings_of().flat() | {name: value.format(tmp_path)}
    (tmp_path / "run.json").write_text(json.dumps(held))
    if ":" in value:
        with pytest.raises(ValueError, match=f"run.json: {option(name)} .*(takes module:function|of Python's own)"):
            read_run_json(tmp_path / "run.json")
    else:
        assert read_run_json(tmp_path / "run.json")[name] == value        # refused as a style and as a function
    assert not (tmp_path / "ran").exists()


def test_the_functions_that_a_run_json_names_are_told_with_their_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(*_):\n    return 1.0\n")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text(json.dumps(settings_of("--reward", "mine:f", "--out", "x").flat()))
    told = f"x/run.json: --reward mine:f, from {tmp_path}/mine.py\n"
    for flags in (["--resume", "--out", "x"], ["--like", "x"]):
        capsys.readouterr()
        settings_of(*flags)
        assert capsys.readouterr().err == told
    settings_of("--like", "x", "--reward", "other:f")                     # the user's own flag
    assert capsys.readouterr().err == ""


def test_a_preset_fills_in_what_is_not_given_and_the_run_holds_the_values(tmp_path):
    plain, paper = settings_of("--model", "x"), settings_of("--model", "x", "--preset", "paper", "--lr", "3e-5")
    assert paper.flat() == plain.flat() | PRESETS["paper"] | {"preset": "paper", "lr": 3e-5}
    assert (paper.rollout.prompts_per_step, paper.optim.epochs, paper.general.steps) == (16, 4, 600)
    (tmp_path / "run.json").write_text(json.dumps(paper.flat()))
    again, before = read_settings(["--resume", "--out", str(tmp_path)])
    assert again.replace(resume=False, out=None, preset="paper") == paper.replace(out=None)
    assert again.flat().items() >= without_places(before.flat()).items()
    for flags in (["--resume", "--out", str(tmp_path)], ["--like", str(tmp_path)]):
        with pytest.raises(ValueError, match="--preset paper: --resume and --like take the values of another run"):
            settings_of(*flags, "--preset", "paper")


def test_every_preset_is_of_flags_and_of_values_that_they_may_have(tmp_path):
    for name, values in PRESETS.items():
        settings = settings_of("--model", "x", "--preset", name)
        assert check_settings(settings, None) is None
        (tmp_path / "run.json").write_text(json.dumps(settings.flat()))
        assert read_run_json(tmp_path / "run.json").items() >= values.items()


def test_without_a_model_the_sizes_are_those_of_the_tiny_one():
    assert {name: settings_of().flat()[name] for name in TINY_DEFAULTS} == TINY_DEFAULTS
    assert settings_of().objective.overlong == "mask" and settings_of("--model", "x").objective.overlong == "keep"


def test_tiny_is_the_bundled_model_with_its_defaults_unless_another_folder_has_that_name(tmp_path, monkeypatch):
    bundled = settings_of()
    monkeypatch.chdir(tmp_path)
    assert settings_of("--model", "tiny") == bundled
    assert settings_of("--model", str(TINY_MODEL)).rollout == settings_of("--model", "x").rollout         # a path
    (tmp_path / "tiny").mkdir()
    other = settings_of("--model", "tiny")
    assert other.flat() == settings_of("--model", "x").flat() | {
        "model": str(tmp_path / "tiny"), "out": "runs/tiny-nvfp4-gsm8k-0"}
    monkeypatch.chdir(TINY_MODEL.parent)                                  # whose folder tiny is the bundled one
    assert settings_of("--model", "tiny") == bundled


def test_a_setting_has_the_value_of_the_last_source_that_holds_it(tmp_path):
    def lr(*flags):
        return settings_of(*flags).optim.lr

    (tmp_path / "run.json").write_text(json.dumps(settings_of("--model", "x", "--lr", "3e-5").flat()))
    assert lr("--model", "x") == Settings().optim.lr != lr() == TINY_DEFAULTS["lr"]
    assert lr("--preset", "paper") == PRESETS["paper"]["lr"] != lr()
    assert lr("--like", str(tmp_path)) == lr("--resume", "--out", str(tmp_path)) == 3e-5
    for source in ([], ["--preset", "paper"], ["--like", str(tmp_path)], ["--resume", "--out", str(tmp_path)]):
        assert lr(*source, "--lr", "0.5") == 0.5


def test_a_run_that_an_earlier_version_began_goes_on_with_what_a_new_one_may_not_have(tmp_path):
    flags = ["--sigma-start", "5e-2", "--noise-stages", "1"], ["--warmup", "0.9", "--lr-schedule", "constant"], [
        "--temperature", "1e-4"], ["--sigma-start", "0", "--noise-stages", "10"]
    for given in flags:
        held = settings_of("--model", "x", "--sigma-start", "1e-2").replace(sigma_start=0.0) if given[1] == "0" \
            else settings_of("--model", "x", *given)
        (tmp_path / "run.json").write_text(json.dumps(held.flat()))
        assert check_settings(*read_settings(["--resume", "--out", str(tmp_path), *given])) is None


@pytest.mark.parametrize("how", ["--like", "--resume --out"])
def test_a_run_with_a_setting_that_is_gone_goes_on_only_if_it_had_what_this_version_does(tmp_path, how):
    held = settings_of("--model", "x", "--sigma-start", "1e-2").flat()
    for gone in {"noise_kind": "absolute"}, {"noise_kind": "absolute", "noise_draws": "step"}:
        (tmp_path / "run.json").write_text(json.dumps(held | gone))
        assert settings_of(*how.split(), str(tmp_path)).noise.sigma_start == 1e-2
    for gone in {"noise_kind": "gain"}, {"noise_draws": "sample"}:
        (tmp_path / "run.json").write_text(json.dumps(held | gone))
        with pytest.raises(ValueError, match="noise_(kind is 'gain'|draws is 'sample'), which this version does not"):
            settings_of(*how.split(), str(tmp_path))
    # A fork's own setting; what else a run notes down is none.
    for noted in {"about": {}, "memory_plan": {}, "ended": "today", "resumed": "today", "calibrate_by_default": False,
                  "problems_sha256": "0", "weights_sha256": "0"}, {"entropy_coef": 0.1}:
        (tmp_path / "run.json").write_text(json.dumps(held | noted))
        if "entropy_coef" not in noted:
            assert settings_of(*how.split(), str(tmp_path)).noise.sigma_start == 1e-2
            continue
        with pytest.raises(ValueError, match="entropy_coef is 0.1, which this version does not have"):
            settings_of(*how.split(), str(tmp_path))


@pytest.mark.parametrize("flags", ["--noise-schedule cosine", "--noise-stages 4", "--sigma-end 1e-4"])
def test_a_flag_of_the_noise_is_refused_where_there_is_none(flags):
    with pytest.raises(ValueError, match=f"{flags.split()[0]} .*: --sigma-start is 0, so there is no noise$"):
        settings_of("--model", "x", *flags.split())             # no noise is the default of a real model
    settings_of("--model", "x", "--sigma-start", "1e-2", *flags.split())


def test_a_run_like_another_does_not_take_over_what_that_run_decided_for_its_own_model(tmp_path, capsys):
    """--calibrate depends on model and device: a run in 16 bits decides 0, which must not reach one in NVFP4."""
    flat = settings_of("--model", "x", "--base", "bf16").flat()
    for decided, given, want in ((0, [], None), (0, ["--calibrate", "8"], 8), (128, [], None)):
        (tmp_path / "run.json").write_text(json.dumps(flat | {"calibrate": decided, "calibrate_by_default": True}))
        assert settings_of("--like", str(tmp_path), "--base", "nvfp4", *given).model.calibrate == want
        said = f"--calibrate is decided anew, {tmp_path} had {decided}\n" in capsys.readouterr().out
        assert said == (want is None)
        assert settings_of("--resume", "--out", str(tmp_path), *given).model.calibrate == (want or decided)
    (tmp_path / "run.json").write_text(json.dumps(flat | {"calibrate": 64, "calibrate_by_default": False}))
    assert settings_of("--like", str(tmp_path), "--base", "nvfp4").model.calibrate == 64        # somebody gave it


@pytest.mark.parametrize("flags,want", [
    ([], TINY_DEFAULTS["lr"]), (["--model", "tiny"], TINY_DEFAULTS["lr"]), (["--model", "x"], Settings().optim.lr),
    (["--model", "x", "--preset", "paper"], PRESETS["paper"]["lr"]), (["--like", "RUN"], 3e-5),
    (["--lr", "0.5"], TINY_DEFAULTS["lr"])])
def test_help_shows_the_defaults_that_follow_from_the_other_flags(flags, want, tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps(settings_of("--model", "x", "--lr", "3e-5").flat()))
    with pytest.raises(SystemExit) as ended:
        settings_of(*(str(tmp_path) if flag == "RUN" else flag for flag in flags), "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert not ended.value.code and f"for bf16 LoRA 5e-6) (default: {want})" in said


def test_every_setting_that_is_a_number_has_a_range():
    numbers = {name for name, field in FIELDS.items() if type_of(field) in (int, float)}
    ranged = {name for name, field in FIELDS.items() if field.metadata["allowed"]}
    assert numbers - ranged == {"overlong_buffer"}                        # 0..--max-new-tokens
    assert ranged <= numbers


def test_every_setting_is_a_flag_and_a_key_of_run_json_and_comes_back_from_both():
    given = settings_of("--model", "x/qwen", "--lr", "0.5", "--train-norms", "--kv-gib", "2", "--seed", "7")
    assert (given.optim.lr, given.model.train_norms, given.memory.kv_gib, given.general.seed) == (0.5, True, 2.0, 7)
    assert given.flat().keys() == FIELDS.keys() and Settings.of(given.flat()) == given
    assert given.replace(lr=1e-3).optim.lr == 1e-3 and given.optim.lr == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.optim.lr = 1


def test_the_default_folder_carries_model_base_data_and_seed():
    named = settings_of("--model", "x/qwen", "--base", "nf4", "--data", "my/sums.jsonl", "--seed", "7")
    assert settings_of().general.out == "runs/tiny-nvfp4-arithmetic-0"
    assert named.general.out == "runs/qwen-nf4-sums-7"


def test_help_shows_every_default_once_under_the_title_of_its_section(capsys):
    with pytest.raises(SystemExit):
        settings_of("--model", "x", "--help")
    log = capsys.readouterr().out
    said = [" ".join(part.split()) for part in re.split("\n  (?=--)", log)]
    (codes,), (data_flag,) = ([part for part in said if part.startswith(flag)] for flag in ("--calibrate ", "--data "))
    assert "(default: 128 where" in codes and "(default: gsm8k)" in data_flag
    assert all(part.count("(default: ") <= 1 for part in said)
    titles = re.findall(r"^(\w.*):$", log, re.M)
    assert titles == ["options", *(section.type.__doc__ for section in dataclasses.fields(Settings))]


# -----------------------------------------------------------------------------
# Adapters and edited run folders

@pytest.fixture
def run_folder(tmp_path):
    """A run as train.py leaves it, as far as its settings go: an adapter of rank 4, without norms."""
    adapter = tmp_path / "x" / "adapter"
    tensors = {f"base_model.model.model.layers.0.{target}.lora_A.weight": torch.zeros(4, 8) for target in TARGETS}
    write_peft(adapter, tensors, "tiny", 4, 32)
    write_conditions(adapter, {"base": "nvfp4", "calibration": None, "prompt_style": "boxed",
                                    "thinking": "off"})
    (tmp_path / "x" / "run.json").write_text(json.dumps(settings_of("--out", "x", "--lora-rank", "4").flat()))
    return tmp_path / "x"


def edit(folder, **changes):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("flags,said", [
    ("--lora-rank 8", "--lora-rank is 8, --adapter {a} has 4: a run takes over its adapter's rank and alpha"),
    ("--lora-alpha 8", "--lora-alpha is 8.0, --adapter {a} has 32: "),
    ("--train-norms", "--train-norms is True, --adapter {a} has False: "),
    ("--lora-rank 4", ""), ("--lora-alpha 32", ""), ("--lora-rank 4 --lora-alpha 32", ""), ("", "")])
def test_a_flag_for_another_adapter_than_that_to_start_from_is_refused(run_folder, flags, said):
    adapter = str(run_folder / "adapter")
    if not said:
        assert settings_of("--adapter", adapter, *flags.split()).model.adapter == adapter
        return
    with pytest.raises(ValueError) as error:
        settings_of("--adapter", adapter, *flags.split())
    assert str(error.value).startswith(said.format(a=adapter))


def test_a_default_or_the_flags_of_another_run_are_no_flag_for_another_adapter(run_folder, capsys):
    edit(run_folder, lora_rank=16, train_norms=True)
    settings = settings_of("--like", str(run_folder), "--adapter", str(run_folder / "adapter"), "--out", "y")
    assert settings.model.lora_rank == 16                                 # prepare() takes over the adapter's
    with pytest.raises(ValueError, match="--lora-rank is 9"):
        settings_of("--like", str(run_folder), "--adapter", str(run_folder / "adapter"), "--lora-rank", "9")


@pytest.mark.parametrize("changes,said", [
    (dict(base="bf16"), "run.json was edited: {a} was trained with base 'nvfp4', not 'bf16'"),
    (dict(prompt_style="tags"), "run.json was edited: {a} was trained with prompt style 'boxed', not 'tags'")])
def test_a_run_json_that_contradicts_its_adapter_is_refused_by_every_program(run_folder, changes, said):
    flags = ["--resume", "--out", str(run_folder)]
    assert read_settings(flags)[1] and settings_of_run(run_folder)
    edit(run_folder, **changes)
    for read in (lambda: read_settings(flags), lambda: settings_of_run(run_folder)):
        with pytest.raises(ValueError) as error:
            read()
        assert str(error.value) == f"{run_folder}/{said.format(a=run_folder / 'adapter')}"
    (run_folder / "adapter" / TRAINED_WITH).unlink()                 # a folder of before that file was written
    assert read_settings(flags)[1] and settings_of_run(run_folder)


@pytest.mark.parametrize("lost", ["model", "base", "data"])
def test_a_run_json_without_what_a_run_is_does_not_go_on_with_defaults(run_folder, lost):
    held = json.loads((run_folder / "run.json").read_text())
    del held[lost]
    (run_folder / "run.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match="/x/run.json: has no model, base or data$"):
        read_settings(["--resume", "--out", str(run_folder)])
