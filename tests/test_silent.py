"""
Inputs that once gave a wrong result without a word. Each row is one example of its kind.

python -m pytest tests/test_silent.py -v
"""
import dataclasses
import json
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from helpers import ROOT, TEMPLATES, run_main, save_tokenizer, with_acting_adapter
from safetensors.torch import load_file, save_file
from test_learner import some_batch
from tiny_qwen2 import LLAMA3, write_folder

import evaluate
import grpo
from adapters import read_peft_config, save_adapter
from files import Stopped, UserError, tell_unfinished, write_json
from harness.config import read_settings, settings_of_run
from harness.folder import RunFolder
from harness.setup import begin, open_model
from learner import Batch, Learner
from loading import load
from lora import attach
from prompts import Tokenizer, readable_problems
from tasks.plugin import Reward
from tasks.problems import Problem, find_gold, load_problems
from tools import chat, convert
from weights import NVFP4_CONFIG, ModelFolder, read_config

UP = "model.layers.1.mlp.up_proj.weight"


def edit(file, **changes):
    """Changes a JSON file's keys. None: null; ...: the key goes."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


# -----------------------------------------------------------------------------
# A number from a file meets the range of its flag, and a key of config.json that is needed is there

@pytest.mark.parametrize("key,value", [
    *(("lora_alpha", value) for value in (0, -32, None, "auto", [32], True, 1e10, ...)),
    *(("r", value) for value in (0, -1, 32.0, "8", True, None, ...)),
    *(("target_modules", value) for value in ("all-linear", ".*_proj", None, [["q_proj"]]))])
def test_adapter_numbers_and_targets(tmp_path, key, value):
    folder = shutil.copytree(ROOT / "tests/peft_adapter", tmp_path / "adapter")
    edit(folder / "adapter_config.json", **{key: value})
    with pytest.raises(UserError, match=f"adapter_config.json: {key} is "):
        read_peft_config(folder)


ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA = {"architectures": ["LlamaForCausalLM"], "use_sliding_window": ..., "rope_scaling": LLAMA3}


@pytest.mark.parametrize("changes,key", [
    *(({key: value}, key) for key in ("rms_norm_eps", "num_key_value_heads", "vocab_size", "hidden_size")
      for value in (..., "64", 0, -1, True)),
    *(({"rope_theta": value}, "rope_theta") for value in (..., "10000.0", 0, [1e4])),
    *(({"max_position_embeddings": value}, "max_position_embeddings") for value in ("512", -1, 0, 512.0)),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings"), ({"head_dim": "16"}, "head_dim"),
    ({"rope_parameters": "default"}, "rope_parameters"), ({"num_key_value_heads": 3}, "num_key_value_heads 3 must"),
    ({"rope_parameters": ROPE}, "rope_theta"),                                           # beside 1e4
    ({"rope_theta": ..., "rope_parameters": {"full_attention": ROPE}}, "rope_theta"),
    ({"rope_theta": ..., "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_theta": ..., "rope_parameters": {"type": "linear", "rope_theta": 1e4}}, "rope_type"),
    *((LLAMA | changes, key) for changes, key in [
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor"), ({"rope_scaling": 8.0}, "rope_scaling"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_parameters": LLAMA3 | {"factor": 32.0}}, "factor"),                      # beside 8.0 in rope_scaling
        ({"rope_parameters": LLAMA3 | {"type": "yarn"}}, "rope_type"),
        ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"), ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"rope_interleaved": True}, "rope_interleaved"), ({"sliding_window": 8}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window"),                   # 4,096 in transformers
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        *(({"architectures": [name]}, "architectures") for name in (
            "SmolLM3ForCausalLM", "GraniteForCausalLM", "Phi3ForCausalLM", "Olmo3ForCausalLM", "Gemma3ForCausalLM",
            "GptOssForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM", "Ministral3ForCausalLM",
            "Llama4ForCausalLM"))])])
def test_config_of_a_model(tiny, tmp_path, changes, key):
    (tmp_path / "config.json").write_text(json.dumps(tiny["tied"].raw))
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=f"config.json: {key} "):
        read_config(tmp_path / "config.json")


# -----------------------------------------------------------------------------
# Two sources of truth that disagree

def sharded(case, folder):
    """-> the folder's index, what it says, and the file that doesn't have UP."""
    index = write_folder(folder, case.raw, case.tensors, files=2) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    return index, weight_map, next(file for file in weight_map.values() if file != weight_map[UP])


def second_copy(case, folder):
    _, _, other = sharded(case, folder)
    save_file(load_file(folder / other) | {UP: case.tensors[UP] + 1}, folder / other)


def other_file(case, folder):
    index, weight_map, other = sharded(case, folder)
    edit(index, weight_map=weight_map | {UP: other})


def unlisted(case, folder):
    index, weight_map, _ = sharded(case, folder)
    del weight_map[UP]
    edit(index, weight_map=weight_map)


def beside_shards(name):
    def write(case, folder):
        sharded(case, folder)
        save_file(case.tensors, folder / name)
    return write


def without_index(case, folder):
    beside_shards("model.safetensors")(case, folder)
    (folder / "model.safetensors.index.json").unlink()


def untied_head(case, folder):
    write_folder(folder, case.raw, case.tensors | {"lm_head.weight": case.tensors["model.embed_tokens.weight"] * 2})


def not_packed(case, folder):
    write_folder(folder, case.raw | {"quantization_config": NVFP4_CONFIG}, case.tensors)


def with_adapter(case, folder):
    shutil.copy(ROOT / "tests/peft_adapter/adapter_config.json", write_folder(folder, case.raw, case.tensors))


def transformed(case, folder):
    section = NVFP4_CONFIG | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}
    write_folder(folder, case.raw | {"quantization_config": section}, case.tensors)


@pytest.mark.parametrize("write,named", [
    (second_copy, UP), (other_file, UP), (unlisted, UP), (beside_shards("model.safetensors"), "two saves"),
    (beside_shards("model-00001-of-00003.safetensors"), "two saves"), (without_index, "two saves"),
    (untied_head, "lm_head.weight differs"), (transformed, "transform_config"), (not_packed, "no tensor in 4 bits"),
    (with_adapter, "contains an adapter")])
def test_model_folders(tiny, tmp_path, write, named):
    write(tiny["tied"], tmp_path / "model")
    with pytest.raises(UserError, match=f"model.*{named}"):
        load(tmp_path / "model", "nvfp4", "cpu")


@pytest.mark.parametrize("change", [
    lambda added: [token for token in added if token["content"] != "<|endoftext|>"],           # leaves a gap
    lambda added: [token | {"id": token["id"] + 5} for token in added],
    lambda added: [token | {"id": 7} if token["content"] == "<|im_end|>" else token for token in added],
    None])
def test_tokenizer_ids(tmp_path, change):
    save_tokenizer(tmp_path, TEMPLATES["instruct"])
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    Tokenizer(tmp_path)
    if change:
        edit(tmp_path / "tokenizer.json", added_tokens=change(added))
    else:                                        # transformers reads this list too
        edit(tmp_path / "tokenizer_config.json", added_tokens_decoder={258: added[1]})
    with pytest.raises(UserError, match="tokenizer.json: "):
        Tokenizer(tmp_path)


# -----------------------------------------------------------------------------
# One path rounds, its twin does not

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_converted_folder_computes_what_quantizing_on_load_does(tiny, tmp_path, monkeypatch, dtype):
    case = tiny["untied"]                        # norms and biases stay finer than bf16, matrices never are
    tensors = {name: (t.float() * 1.001).to(dtype) for name, t in case.tensors.items()}
    source = write_folder(tmp_path / "source", case.raw, tensors)
    assert run_main(monkeypatch, convert, "nvfp4", source, tmp_path / "out", "--device", "cpu") is None
    tokens = torch.arange(24).view(2, 12) * 4
    with torch.no_grad():
        assert torch.equal(*(load(path, "nvfp4", "cpu")(tokens) for path in (source, tmp_path / "out")))


# -----------------------------------------------------------------------------
# A value's text reaches a reader with another grammar

@pytest.mark.parametrize("value,text", [
    (0.00003, "0.00003"), (1e17, "1" + "0" * 17), (6.02e23, "602" + "0" * 21), (0.1 + 0.2, "0.3"), (3.0, "3"),
    (-0.0, "0"), (2 / 3, "0.666666666667"), (2.0**53 - 1, "9007199254740991"), (10**20, "1" + "0" * 20),
    (torch.tensor(0.1).item(), "0.1"), (1 / 2048, "0.00048828125")])
def test_gold_numbers(value, text):
    assert find_gold({"answer": value}) == text


@pytest.mark.parametrize("text", ["3e-05", "1E17", "-2.e+3", "(1, 2e-7)", "nan", "NaN", "None", "null"])
def test_golds_that_were_numbers_are_skipped_and_counted(text, capsys):
    problems = [Problem(answer, "q", answer) for answer in (text, "2e", "3e^{-5}", "7")]
    assert readable_problems(problems, "x.jsonl", None) == problems[1:]
    assert "1 problem skipped" in capsys.readouterr().out and readable_problems(problems, "", "mine:f") == problems


def test_rewards_parts_are_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(completion, problem):\n    return {'a': b'3'}\n")
    with pytest.raises(Stopped, match="--reward mine:f returned"):
        Reward("mine:f")("", Problem("1", "q", "2"))


# -----------------------------------------------------------------------------
# A field that can't be used, and one that is there twice

TURNS = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize("row,named", [
    *((f'{{"question": "q", "answer": {value}, "solution": "3"}}', "answer")
      for value in ("false", "true", "[3]", "[]", '{"value": 3}', "1e999", "-1e999")),
    ('{"question": "q", "reward_model": {"ground_truth": [3]}, "solution": "3"}', "ground_truth"),
    *((json.dumps({"question": value, "problem": "q", "answer": "3"}), "question")
      for value in (0, False, [], {}, json.dumps(TURNS), repr(TURNS), json.dumps(TURNS[0]),
                    '[{"from": "human", "value": "1+1?"}]', "<|im_start|>user\n1+1?<|im_end|>")),
    ('{"question": "q", "answer": "3", "answer": "4"}', "answer.*twice"),
    ('{"question": "q", "answer": "3", "more": {"a": 1, "a": 2}}', "a.*twice")])
def test_rows(tmp_path, row, named):
    (tmp_path / "x.jsonl").write_text(row)
    with pytest.raises(UserError, match=f"x.jsonl:1: .*{named}"):
        load_problems(str(tmp_path / "x.jsonl"))


@pytest.mark.parametrize("text,named", [
    ('{"steps": 3, "steps": 4}', "steps.*twice"), ('{"group-size": 4, "group_size": 8}', "group-size.*twice"),
    ('{"eval_data": ""}', "eval_data.*empty"), ('{"group-size": 4, "adapter": ""}', "adapter.*empty")])
def test_configs(tmp_path, text, named):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=f"x.json: .*{named}"):
        read_settings(["--config", str(tmp_path / "x.json")])


# -----------------------------------------------------------------------------
# The folder of a run

def test_renamed_checkpoint(tmp_path):
    def folder():
        return RunFolder(tmp_path, {"master": torch.zeros(2)}, None)

    written = folder()
    written.snapshot({"step": 2})
    written.save_checkpoint()
    (tmp_path / "checkpoints/step_000002").rename(tmp_path / "checkpoints/step_000009")
    with pytest.raises(Stopped, match="step_000009 was renamed: .* step 2"):
        folder().load()


@pytest.mark.parametrize("counters", [{"step": 2}, {"step": 2, "cursor": 4, "tokens": 9, "skipped": 0, "seen": 1}])
def test_counters_of_another_program(counters):
    run = MagicMock(earlier={"about": {}})
    run.folder.start.return_value = counters
    with pytest.raises(UserError, match="state.json has .*step"):
        begin(run)


@pytest.mark.parametrize("row", ["5", '{"reward": 1}', "[]", "null"])
def test_log_rows_without_a_step(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{row}\n')
    with pytest.raises(UserError, match="metrics.jsonl:2: has no step"):
        tell_unfinished(tmp_path, 3)


@pytest.mark.parametrize("text", ["{}", '{"steps": 3}'])
def test_run_json_of_nobody(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match="run.json: has no `model`"):
        settings_of_run(tmp_path)


def test_reward_with_any_keywords_gets_them_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def g(completion, problem, **more):\n    return more['length']\n")
    about = dict(group=[], length=3, finished=True)
    assert Reward("mine:g")("", Problem("1", "q", "2"), **about) == {"reward": 3.0}


# -----------------------------------------------------------------------------
# A gradient that is 0 only in theory

def test_no_step_on_rounding_errors(tiny):
    model = load(tiny["untied"].folder, "bf16", "cpu")
    attach(model, 4, 4)
    learner = Learner(model, dataclasses.replace(grpo.LOSSES["grpo"], kl_beta=0.04))
    batch, weights = some_batch(learner)
    before, alike = model.adapter.master.clone(), Batch(batch.rows, batch.advantages * 0)
    update = learner.update(alike, weights, lr=1e-3)
    assert torch.equal(model.adapter.master, before) and update.grad_norm == 0 and update.sums["tokens"] > 0
    for step in batch, alike:                    # from the first real step on, the KL term has a gradient
        assert learner.update(step, weights, lr=1e-3).grad_norm > 0
        assert not torch.equal(model.adapter.master, before)
        before = model.adapter.master.clone()


# -----------------------------------------------------------------------------
# An identity that only one of its readers checks

def change_weights(folder):
    file = folder / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight_packed"][-1, -1] += 1
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, file)


def add_token(folder):
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder / "tokenizer.json", added_tokens=[*tokens, tokens[0] | {"id": 463, "content": "<|new|>"}])


# What conditions call it -> changes a model folder.
MODEL_CHANGES = {"weights": change_weights, "tokenizer": add_token,
                 "rope theta": lambda folder: edit(folder / "config.json", rope_theta=2e4),
                 "eps": lambda folder: edit(folder / "config.json", rms_norm_eps=1e-5)}


@pytest.mark.parametrize("named", [None, *MODEL_CHANGES, "weights sha256"])
def test_readers_of_an_adapter(tiny_nvfp4, tmp_path, monkeypatch, capsys, named):
    source, run = shutil.copytree(tiny_nvfp4, tmp_path / "model"), tmp_path / "run"
    as_trained = SimpleNamespace(base="nvfp4", prompt_style="plain", thinking="off")
    model, conditions = open_model(ModelFolder(source), Tokenizer(source), torch.device("cpu"), as_trained, None)
    save_adapter(with_acting_adapter(model), run / "adapter")
    run_json = vars(as_trained) | {"model": str(source), "data": "arithmetic", "max_new_tokens": 8}
    if named == "weights sha256":                # a run that didn't record more
        conditions = {"base": "nvfp4"}
        run_json["weights_sha256"] = ModelFolder(source).old_sha256()
    write_json(run / "run.json", run_json)
    write_json(run / "adapter" / "trained_with.json", conditions)
    if named:
        MODEL_CHANGES[named.removesuffix(" sha256")](source)
    (tmp_path / "one.jsonl").write_text('{"question": "1+1?", "answer": "2"}')
    device, data, text = ("--device", "cpu"), ("--data", tmp_path / "one.jsonl"), f"adapter was trained with {named} "
    for program, flags in ((evaluate, data), (chat, ("--question", "1+1?"))):
        assert run_main(monkeypatch, program, run, *flags, *device) is None
        shown = "".join(capsys.readouterr())
        assert text in shown if named else "was trained" not in shown
    assert run_main(monkeypatch, evaluate, run, "--adapter", "none", *data, *device) is None
    assert "was trained" not in "".join(capsys.readouterr())
    line = run_main(monkeypatch, convert, "merge", run, tmp_path / "out", *device)
    assert text in line if named else line is None
