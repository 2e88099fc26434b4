"""
Settings: every field is a flag and a key of run.json, later sources override earlier ones, bad values are rejected.

python -m pytest tests/test_config.py -v
"""
import dataclasses
import json
import re
from pathlib import Path

import pytest
from helpers import ROOT, settings_of

from files import UserError
from harness import config
from harness.config import FIELDS, TINY_DEFAULTS, TINY_MODEL, Settings, option, read_settings, settings_of_run, type_of

RECIPES = sorted(ROOT.glob("recipes/*.json"))
NOTES = dict(about={}, memory_plan={}, problems_sha256="0", weights_sha256="0")


def write(path, values):
    path.write_text(json.dumps(values))
    return str(path)


@pytest.fixture
def run(tmp_path):
    """A function that takes flags -> a run folder with only the run.json that they give."""
    def begun(*flags, **changes):
        held = config.without_local(vars(settings_of(*flags))) | NOTES | changes
        (tmp_path / "run").mkdir(exist_ok=True)
        write(tmp_path / "run" / "run.json", held)
        return str(tmp_path / "run")
    return begun


# -----------------------------------------------------------------------------
# Values

@pytest.mark.parametrize("flag,wrong,edges", [
    *((flag, "0 -1", "1") for flag in ("--lora-rank", "--steps", "--prompts-per-step", "--max-prompt-tokens",
                                       "--max-new-tokens", "--max-rows", "--updates-per-rollout", "--epochs",
                                       "--micro-batch-tokens", "--eval-every", "--save-every", "--keep")),
    *((flag, "0 -1 nan inf", "") for flag in ("--lr", "--max-grad-norm", "--temperature", "--memory-gib",
                                              "--lora-alpha", "--clip-high")),
    *((flag, "-0.1 nan inf", "0") for flag in ("--weight-decay", "--kl-beta")),
    ("--sigma-start", "-0.1 nan inf", "0.01"), ("--noise-stages", "1 -1", "2"),
    ("--sigma-end", "0 -1 nan inf 1e-50", "1e-9 0.01"), ("--eval-problems", "-3", "0"), ("--seed", "-1", "0"),
    ("--group-size", "1 0 -4", "2"), ("--warmup", "-0.1 1.5 nan", "0 1"), ("--clip-low", "0 -0.2 1.5 nan", "1")])
def test_values_have_a_range(flag, wrong, edges, capsys):
    for value in wrong.split():
        with pytest.raises(SystemExit):
            settings_of("--sigma-start=0.01", f"{flag}={value}")
        error = capsys.readouterr().err
        assert f"argument {flag}: must be in" in error and f"got {value}" in error
    for value in edges.split():
        assert vars(settings_of("--sigma-start=0.01", flag, value))[flag[2:].replace("-", "_")] == float(value)


@pytest.mark.parametrize("flags", [
    "--sigma-end 1e-2 --sigma-start 1e-4", "--updates-per-rollout 17 --prompts-per-step 16",
    "--calibrate 8 --base bf16", "--noise-schedule cosine --sigma-start 0", "--noise-stages 4 --sigma-start 0",
    "--sigma-end 1e-4 --sigma-start 0", "--lora-rank 8 --train full", "--lora-alpha 8 --train full", "--resume",
    "--resume --config a.json --out x"])
def test_contradicting_flags_are_rejected(flags):
    flag = flags.split()[0]
    with pytest.raises(UserError, match=f"^{flag} "):
        settings_of(*flags.split())


def test_every_number_has_a_range():
    numbers = {name for name, field in FIELDS.items() if type_of(field) in (int, float)}
    assert numbers == {name for name, field in FIELDS.items() if field.metadata["allowed"]}


# -----------------------------------------------------------------------------
# Sources

def test_settings_round_trip_through_run_json(run):
    given = settings_of("--model", "x/qwen", "--lr", "0.5", "--memory-gib", "2", "--seed", "7")
    assert (given.lr, given.memory_gib, given.seed) == (0.5, 2.0, 7)
    assert vars(given).keys() == FIELDS.keys() and Settings(**vars(given)) == given
    folder = run("--model", "x/qwen", "--lr", "0.5", "--seed", "7")
    again, before = read_settings(["--resume", "--out", folder])
    assert again == Settings(**vars(given) | dict(memory_gib=None, out=folder))    # memory_gib belongs to the machine
    assert before == json.loads(Path(folder, "run.json").read_text())
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.lr = 1


def test_later_source_wins(run, tmp_path):
    def lr(*flags):
        return settings_of(*flags).lr

    recipe, folder = write(tmp_path / "mine.json", dict(lr=3, steps=5)), run("--model", "x", "--lr", "3e-5")
    assert (lr("--model", "x"), lr()) == (Settings().lr, TINY_DEFAULTS["lr"])
    assert lr("--config", recipe) == lr("--config", recipe, "--model", "x") == 3
    assert lr("--config", f"{folder}/run.json") == lr("--resume", "--out", folder) == 3e-5
    for source in ([], ["--config", recipe], ["--config", f"{folder}/run.json"]):
        assert lr(*source, "--lr", "0.5") == 0.5
    assert settings_of("--config", recipe).data == "arithmetic"      # the bundled model's


def test_bundled_model_has_its_own_defaults(tmp_path):
    bundled = settings_of()
    assert {name: vars(bundled)[name] for name in TINY_DEFAULTS} == TINY_DEFAULTS
    assert bundled.model == str(TINY_MODEL) and bundled.out == str(Path("runs/tiny-nvfp4-arithmetic-0").absolute())
    assert settings_of("--model", str(TINY_MODEL)) == bundled
    recipe = write(tmp_path / "mine.json", dict(model="x"))
    assert settings_of("--config", recipe).max_new_tokens == settings_of("--model", "x").max_new_tokens
    named = settings_of("--model", "x/qwen", "--base", "bf16", "--data", "my/sums.jsonl", "--seed", "7")
    assert Path(named.out).name == "qwen-bf16-sums-7"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid(recipe):
    values = json.loads(recipe.read_text())
    plain, custom = settings_of("--model", "x"), settings_of("--model", "x", "--config", str(recipe))
    assert vars(custom) == vars(plain) | {name: values[name] for name in values.keys() - {"about", "model"}}


def test_paper_recipe_matches_table_4():
    paper = settings_of("--model", "x", "--config", str(ROOT / "recipes/paper.json"))
    assert (paper.prompts_per_step, paper.group_size, paper.epochs, paper.steps) == (16, 8, 4, 600)
    assert (paper.lr, paper.max_new_tokens, paper.sigma_start, paper.sigma_end) == (1e-5, 4096, 1e-2, 5e-4)


def test_config_does_not_copy_an_automatic_calibrate(run):
    """The default of --calibrate depends on model and device."""
    for given, want in ((None, None), (64, 64)):
        folder = run("--model", "x", "--base", "bf16", calibrate=given)
        assert settings_of("--config", f"{folder}/run.json", "--base", "nvfp4").calibrate == want


# -----------------------------------------------------------------------------
# Wrong files and flags

@pytest.mark.parametrize("name,value", [
    ("lr", "fast"), ("lr", 12), ("lr", -1), ("steps", 2.5), ("steps", True), ("epochs", [2]), ("epochs", 0),
    ("base", "int3"), ("warmup", 2), ("lora_rank", 10**12),      # bad values
    ("train_norms", False), ("preset", "paper"), ("entropy_coef", 0.1), ("Lr", 0.1), ("", 1), ("help", 1),
    ("lora_ran", 8), ("config", "x"),                            # not settings
    ("out", "x"), ("device", "cpu"), ("memory_gib", 3)])        # not stored in files
@pytest.mark.parametrize("resume", [False, True])
def test_wrong_entry_in_file_is_named(run, name, value, resume):
    folder = run("--model", "x", **{name: value})
    with pytest.raises(UserError, match=re.escape(name) + "|" + re.escape(option(name))):
        settings_of(*(["--resume", "--out", folder] if resume else ["--config", f"{folder}/run.json"]))


@pytest.mark.parametrize("text,named", [
    ('{"steps": 3, "steps": 4}', "steps.*twice"), ('{"group-size": 4, "group_size": 8}', "group-size.*twice"),
    ('{"eval_data": ""}', "eval_data.*empty"), ('{"group-size": 4, "adapter": ""}', "adapter.*empty")])
def test_repeated_or_empty_entry_is_named(tmp_path, text, named):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=f"x.json: .*{named}"):
        settings_of("--config", str(tmp_path / "x.json"))


@pytest.mark.parametrize("flags,named", [
    ("--mod qwen2.5-7b", "--mod"), ("--resum --out x", "--resum"), ("--step=3", "--step=3"), ("--loss ppo", "--loss"),
    ("--lr fast", "--lr"), ("--steps 1.5", "--steps"), ("runs/x", "runs/x")])
def test_unknown_flag_or_bad_value_is_named(flags, named, capsys):
    # Abbreviations are off: --mod qwen2.5-7b would train the 7B with the tiny model's defaults.
    with pytest.raises(SystemExit) as stop:
        settings_of(*flags.split())
    assert stop.value.code == 2 and named in capsys.readouterr().err.splitlines()[-1]


# -----------------------------------------------------------------------------
# --resume and --adapter

def test_resume_rejects_changed_settings_and_another_program(run):
    begun = "--model x --base nvfp4 --lr 3e-5 --steps 40 --seed 0 --eval-every 20 --sigma-start 0".split()
    folder = run(*begun)
    for flags in ("--lr 3e-5 --steps 41 --model y --data b.jsonl", "--eval-data c.jsonl --device cpu --memory-gib 3"):
        settings_of("--resume", "--out", folder, *flags.split())
    for flags in ("--lr 1e-3", "--seed 1", "--base bf16", "--steps 30", "--reward a:f", "--micro-batch-tokens 9",
                  "--eval-every 3", "--keep 4", "--sigma-start 1e-2"):
        with pytest.raises(UserError, match=f"--resume: {flags.split()[0]} is"):
            settings_of("--resume", "--out", folder, *flags.split())
    run(*begun, about={"program": "python -m examples.calculator"})
    with pytest.raises(UserError, match="resume it with python -m examples.calculator"):
        settings_of("--resume", "--out", folder)


def test_adapter_sets_rank_and_alpha(tmp_path, run):
    adapter = str(ROOT / "tests/peft_adapter")                            # has rank 3 and alpha 5
    other = run("--model", "x", "--lora-rank", "16")
    for flags in ("", "--lora-rank 3", "--lora-alpha 5", f"--config {other}/run.json"):
        found = settings_of("--adapter", adapter, *flags.split())
        assert (found.adapter, found.lora_rank, found.lora_alpha) == (adapter, 3, 5)
    for flags in ("--lora-rank 8", "--lora-alpha 8"):
        with pytest.raises(UserError, match=f"{flags.split()[0]} 8"):
            settings_of("--adapter", adapter, *flags.split())
    with pytest.raises(UserError, match=str(tmp_path)):
        settings_of("--adapter", str(tmp_path))


def test_calibrated_run_uses_its_own_base(run):
    folder = Path(run("--model", "x"))
    assert settings_of_run(folder).model == "x"
    (folder / "base").mkdir()
    found = settings_of_run(folder)
    assert (found.model, found.out) == (f"{folder}/base", str(folder))
    for text in ("{}", '{"steps": 3}'):                                   # of another program
        (folder / "run.json").write_text(text)
        with pytest.raises(UserError, match="run.json: has no `model`"):
            settings_of_run(folder)
