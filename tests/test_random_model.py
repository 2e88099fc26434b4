"""
tools/random_model.py: folders of random weights that every program reads, whose answers end, and whose linears give
calibration something to do.

python -m pytest tests/test_random_model.py -v
"""
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import calibrate
import model as qwen
import nvfp4
import weights
from prompts import Tokenizer
from sampler import Sampler, Sampling, TorchEngine
from tools import bench, random_model
from weights import ModelFolder, Shards, load_nvfp4

ROOT = Path(__file__).parent.parent
SMALL = dict(json.loads((ROOT / "tiny" / "config.json").read_text()), hidden_size=128, intermediate_size=192,
             num_hidden_layers=2)


def write(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["random_model.py", *map(str, arguments), "--device", "cpu"])
    random_model.main()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each way of writing the small shape, in files of at most 100 KB: tied, untied, untied in NVFP4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "SHARD_BYTES", 10**5)
        made = {}
        for name, tied, base in ("tied", True, "bf16"), ("untied", False, "bf16"), ("nvfp4", False, "nvfp4"):
            shape = tmp_path_factory.mktemp("shape")
            (shape / "config.json").write_text(json.dumps(dict(SMALL, tie_word_embeddings=tied)))
            made[name] = shape / "model"
            write(patch, shape, made[name], "--base", base, "--answer-tokens", 20)
    return made


def test_its_tensors_are_those_of_a_model_of_that_shape():
    with safe_open(ROOT / "tiny" / "model.safetensors", "pt") as file:
        held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    raw = json.loads((ROOT / "tiny" / "config.json").read_text())
    assert random_model.tensor_shapes(qwen.ModelConfig.from_json(raw)) == held


@pytest.mark.parametrize("name,billions", [("qwen2.5-0.5b", 0.494), ("Qwen2.5-7B", 7.616), ("qwen2.5-32b", 32.76),
                                           ("qwen3-8b", 8.191)])
def test_a_published_name_has_as_many_parameters_as_its_model_card_says(name, billions):
    shapes = random_model.tensor_shapes(qwen.ModelConfig.from_json(random_model.config_of(name)))
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_published_shape_becomes_a_config_that_reads_back_as_that_shape(tmp_path):
    for name, sizes in zip(random_model.SHAPE_NAMES, bench.SIZES.values(), strict=True):
        raw = random_model.config_of(name)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        ModelFolder(tmp_path).check_length(32768)                        # its rules hold
        assert qwen.ModelConfig.from_json(raw) == qwen.ModelConfig(*sizes)


@pytest.mark.parametrize("name", ["tied", "untied", "nvfp4"])
def test_a_folder_of_several_files_is_read_and_its_logits_have_the_deviation_that_was_asked_for(folders, name):
    folder = folders[name]
    assert len(list(folder.glob("*.safetensors"))) > 2
    tokenizer = Tokenizer(folder)
    model = qwen.load(folder, "nvfp4", "cpu", live_vocab=tokenizer.vocab_size)
    assert model.config.tied == (name == "tied")
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode("How many books are left? " * 20)]))[..., :tokenizer.vocab_size]
    assert logits.isfinite().all()
    # 461 numbers of deviation 2 and two of the end tokens: each row's own deviation is within 4 / sqrt(2 x 461) of it
    # nearly always, and their mean is closer.
    assert logits.std(-1).mean() == pytest.approx(random_model.SPREAD, rel=0.1)


def test_nvfp4_holds_the_same_weights_rounded_to_nearest(folders):
    whole = Shards(folders["untied"])
    coded = Shards(folders["nvfp4"])
    linears = [name for name in whole.names if name.endswith("_proj.weight")]
    assert len(linears) == 2 * 7
    for name in whole.names:
        if name in linears:
            wanted = nvfp4.quantize(whole.get(name), offsets=[0])
            found = load_nvfp4(coded, name.removesuffix(".weight"))
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, wanted, strict=True))
        else:
            assert torch.equal(whole.get(name), coded.get(name))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_answers_end_after_about_as_many_tokens_as_was_asked_for(folders, name):
    tokenizer = Tokenizer(folders[name])
    model = qwen.load(folders[name], "bf16", "cpu", live_vocab=tokenizer.vocab_size)
    prompts = [tokenizer.chat(f"{i} + {i}?") for i in range(8)]
    sampler = Sampler(TorchEngine, model, max(map(len, prompts)) + 200, 128)
    rollouts = sampler.generate(prompts, 16, Sampling(200, tuple(tokenizer.end_ids)))
    lengths = [len(completion) for completion in rollouts.completions]
    # A mean of 128 geometric lengths has an error of 9 %. The end tokens' logit is 7.6 x what a hidden state has in
    # common; 5 % more or less of that, which END_SHARE may be wrong by, are 38 % of the length.
    assert 20 / 1.6 < sum(lengths) / len(lengths) < 20 * 1.6
    assert min(lengths) < 5 and max(lengths) > 40
    assert len({token for completion in rollouts.completions for token in completion}) > 200


def test_calibration_finds_errors_to_make_up_for(folders):
    files = calibrate.source_of(ModelFolder(folders["untied"]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    texts = [calibrate.Text(torch.randint(400, (60,), generator=generator).tolist(), 10) for _ in range(8)]

    def divergence(codes):
        about = {}
        for _ in calibrate.coded_linears(files, codes, texts, 463, about):
            pass
        return float(about["calibration"].split(") ")[1].split()[0])

    assert 0 < divergence("gptq") < divergence("nearest") / 5


def test_the_coin_gives_half_of_the_texts_1_and_each_text_always_the_same():
    rewards = [random_model.coin(f"answer {i}", {}) for i in range(1000)]
    assert set(rewards) == {0.0, 1.0}
    assert 440 < sum(rewards) < 560                                        # 500 +- 3.8 standard deviations
    assert rewards == [random_model.coin(f"answer {i}", {"id": "other"}) for i in range(1000)]


@pytest.mark.parametrize("arguments,line", [
    (["qwen2.5-8b", "new"], "qwen2.5-8b: expected a folder, or one of qwen2.5-0.5b, qwen2.5-1.5b,"),
    (["qwen2.5-7b", "full"], "full: exists and is not an empty folder"),
    (["qwen2.5-7b", "new", "--tokenizer", "full"], "full/tokenizer.json"),
    (["qwen2.5-7b", "new", "--answer-tokens", "1"], "--answer-tokens must lie in [2, 1e9], got 1"),
    (["full", "new"], "--tokenizer "),                                     # 463 tokens, and 100 rows
])
def test_what_cannot_be_made_is_refused_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text(json.dumps(dict(SMALL, vocab_size=100)))
    with pytest.raises(SystemExit) as stop:
        write(monkeypatch, *arguments)
    assert line in stop.value.code and "\n" not in stop.value.code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
