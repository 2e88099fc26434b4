"""
tools/chat.py: prompts against the model's own chat template, output, wrong input.

python -m pytest tests/test_chat.py -v
"""
import io
import json
import shutil
import sys
from pathlib import Path

import jinja2
import pytest
from helpers import TINY, edit, prompt_of, run_main, with_acting_adapter

import adapters
from loading import load
from prompts import STYLES, Tokenizer
from sampler import Sampler, Sampling
from tools import chat as chat_py
from tools.chat import Chat

QUESTIONS = ["Tom has 20 apples, finds 12 and sells 14. How many apples are left?", "And é, <|im_end|> of 3+4?"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def model(tiny_nvfp4):
    return load(tiny_nvfp4, "nvfp4", "cpu")


def new_chat(tokenizer, model, length=512, style="boxed", new=48):
    return Chat(tokenizer, Sampler(model, length, 1), style, Sampling(new, tokenizer.end_ids, 0.0))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run's folder as train.py leaves it, with an adapter that changes the answers."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    adapters.save_adapter(with_acting_adapter(load(TINY, "bf16", "cpu")), folder / "adapter")
    flags = dict(model=str(TINY), base="bf16", prompt_style="tags", max_new_tokens=20, steps=3)
    (folder / "run.json").write_text(json.dumps(flags))
    return folder


def main(monkeypatch, *arguments):
    return run_main(monkeypatch, chat_py, "--device", "cpu", *arguments)


@pytest.mark.parametrize("style", STYLES)
def test_conversation_matches_chat_template(style, tokenizer, model, monkeypatch):
    template = jinja2.Template(json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"])
    request, system = STYLES[style]
    chat = new_chat(tokenizer, model, style=style)
    asked = []
    generate = chat.sampler.generate
    monkeypatch.setattr(chat.sampler, "generate", lambda prompts, *more: asked.append(prompts[0]) or
                        generate(prompts, *more))
    messages = [{"role": "system", "content": system}] if system else []
    for question in QUESTIONS:
        answer = chat.ask(question)
        messages.append({"role": "user", "content": question + request})
        text = template.render(messages=messages, add_generation_prompt=True)
        assert tokenizer.file.decode(asked[-1], skip_special_tokens=False) == text
        messages.append({"role": "assistant", "content": answer})
    assert asked[1].count(tokenizer.stop) == text.count("<|im_end|>") - 1  # the question's own stays text


def test_full_conversation_is_reported_and_empty_line_restarts(tokenizer, model, capsys, monkeypatch):
    chat = new_chat(tokenizer, model, length=120)
    answers, ask = [], chat.ask
    monkeypatch.setattr(chat, "ask", lambda question: answers.append(ask(question)) or answers[-1])
    typed = f"{QUESTIONS[0]}\n" * 3 + f"\n{QUESTIONS[0]}\n\ncaf\xe9\n{QUESTIONS[0]}\n"      # é isn't UTF-8
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode("latin-1")), encoding="utf-8"))
    chat_py.talk(chat)
    out, err = capsys.readouterr()
    assert "no room" in err and "120" in err and "not valid Unicode" in err
    assert out == "".join(chat_py.printable(answer) + "\n" for answer in answers)       # and nothing else
    assert answers[0] == answers[-1] != ""


def test_run_sets_base_adapter_style_and_limit(run_folder, tokenizer, monkeypatch, capsys):
    assert main(monkeypatch, run_folder, "--question", QUESTIONS[0]) is None
    model = load(TINY, "bf16", "cpu", live_vocab=tokenizer.vocab_size)
    adapters.load_adapter(model, run_folder / "adapter")
    prompt = prompt_of(tokenizer, QUESTIONS[0], STYLES["tags"][1])
    sampler = Sampler(model, 512, 1)
    completion, = sampler.generate([prompt], 1, Sampling(20, tokenizer.end_ids, 0.0)).completions
    with_adapter, said = capsys.readouterr()
    assert f"{run_folder} is unfinished: 0 of 3 steps" in said
    assert with_adapter == chat_py.printable(tokenizer.decode(completion)) + "\n"
    assert ("(cut off at 20 tokens)" in said) == (completion[-1] not in tokenizer.end_ids)
    for changed in (("--adapter", "none"), ("--temperature", "5")):
        assert main(monkeypatch, run_folder, "--question", QUESTIONS[0], *changed) is None
        assert capsys.readouterr().out != with_adapter


def test_run_folder_may_not_name_code(run_folder, tmp_path, monkeypatch):
    edit(Path(shutil.copytree(run_folder, tmp_path / "stolen")) / "run.json", prompt_style="evil:f")
    error = main(monkeypatch, tmp_path / "stolen", "--question", "1+1?")
    assert error.startswith("python -m tools.chat: ") and "--prompt-style evil:f" in error and "\n" not in error


def test_changed_prompt_function_of_a_run_is_named(run_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("def ask(problem):\n    return problem['question']\n")
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(run_folder, tmp_path / "run"))
    edit(folder / "run.json", prompt_style="mine:ask", about=dict(prompt_style_sha256="0"))
    assert main(monkeypatch, folder, "--question", "1+1?") is None
    assert "--prompt-style mine:ask: mine.py differs" in capsys.readouterr().err
