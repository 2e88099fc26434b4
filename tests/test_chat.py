"""
tools/chat.py: what the model is asked, against its own chat template; what is printed while it answers; how it ends.

python -m pytest tests/test_chat.py -v
"""
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_prompts import TEMPLATES, save_tokenizer, thinking_tiny

import evaluate
import lora
import model as qwen
from prompts import STYLES, Tokenizer
from sampler import Sampler, Sampling, TorchEngine
from tools import chat as chat_py
from tools.chat import Chat

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tiny"
QUESTIONS = ["Tom has 20 apples, finds 12 and sells 14. How many apples are left?", "And é, <|im_end|> of 3+4?"]


class Windows(TorchEngine):
    window = 8                                                            # as on a GPU: it may go on after an end


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def model():
    return qwen.load(TINY, "nvfp4", "cpu")


def new_chat(tokenizer, model, engine=TorchEngine, length=512, style="boxed", **how):
    return Chat(tokenizer, Sampler(engine, model, length, 1), style, Sampling(48, tokenizer.end_ids, **how))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """As train.py leaves one; the adapter changes what is said."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    model = qwen.load(TINY, "bf16", "cpu")
    adapter = lora.attach(model, rank=4, alpha=4)
    size = adapter.master.numel() - adapter.b_start
    adapter.master.data[adapter.b_start:] = torch.randn(size, generator=torch.Generator().manual_seed(0))
    adapter.sync()
    lora.save_adapter(model, folder / "adapter")
    flags = dict(model=str(TINY), base="bf16", dtype=None, prompt_style="tags", max_new_tokens=20, steps=3)
    (folder / "run.json").write_text(json.dumps(flags))
    return folder


def main(monkeypatch, *arguments):
    """chat.main() with these arguments -> what it stopped with, or None."""
    monkeypatch.setattr(sys, "argv", ["chat.py", *map(str, arguments)])
    try:
        return chat_py.main()
    except SystemExit as stop:
        return stop.code


# -----------------------------------------------------------------------------
# What is asked

@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_is_that_of_the_models_own_template(style, tokenizer, model, capsys, monkeypatch):
    template = jinja2.Template(json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"])
    request, system = STYLES[style]
    chat = new_chat(tokenizer, model, style=style)
    asked = []
    generate = chat.sampler.generate
    monkeypatch.setattr(chat.sampler, "generate", lambda prompts, *more: asked.append(prompts[0]) or
                        generate(prompts, *more))
    messages = [{"role": "system", "content": system}] if system else []
    for question in QUESTIONS:
        chat.ask(question)
        messages.append({"role": "user", "content": question + request})
        text = template.render(messages=messages, add_generation_prompt=True)
        assert tokenizer.file.decode(asked[-1], skip_special_tokens=False) == text
        messages.append({"role": "assistant", "content": capsys.readouterr().out.removesuffix("\n")})
    assert asked[1].count(tokenizer.stop) == text.count("<|im_end|>") - 1  # the one in the question stays text


@pytest.mark.parametrize("name,thinking,end,begun", [
    ("qwen3", "off", "<think>\n\n</think>\n\n", ""), ("qwen3", "on", "", "<think>\n"),
    ("thinking", "on", "<think>\n", "")])
def test_earlier_answers_are_repeated_without_their_thinking(name, thinking, end, begun, tmp_path, capsys):
    save_tokenizer(tmp_path, TEMPLATES[name], thinks=True)
    tokenizer = Tokenizer(tmp_path, thinking)
    answers = [begun + "One.\n</think>\n\nIt is 3.", "It is 7." if thinking == "off" else begun + "Let me see"]
    waiting, asked = list(answers), []

    def generate(prompts, *more):
        asked.append(tokenizer.file.decode(prompts[0], skip_special_tokens=False))
        finished = "It is" in waiting[0]                                  # else it is cut off in its thinking
        completion = tokenizer.encode(waiting.pop(0)) + [tokenizer.stop] * finished
        return SimpleNamespace(completions=[completion], finished=[finished])

    sampler = SimpleNamespace(generate=generate, max_length=999)
    chat = Chat(tokenizer, sampler, "plain", Sampling(99, tokenizer.end_ids))
    for question in ("1+2?", "3+4?"):
        chat.ask(question)
    first = "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    second = "It is 3.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [first + end, first + second + end]
    assert chat.said[-1] == ("assistant", "It is 7." if thinking == "off" else "")


def test_an_answer_cut_off_is_ended_before_the_next_question(tokenizer, model, capsys):
    chat = new_chat(tokenizer, model)
    chat.sampling = chat.sampling._replace(max_new_tokens=3)
    chat.ask(QUESTIONS[0])
    assert len(tokenizer.encode(chat.said[-1][1])) == 3
    assert capsys.readouterr().err == "(cut off at 3 tokens)\n"


def test_a_full_conversation_is_said_and_an_empty_line_begins_a_new_one(tokenizer, model, capsys, monkeypatch):
    chat = new_chat(tokenizer, model, length=120)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTIONS[0]}\n" * 3 + f"\n{QUESTIONS[0]}\n"))
    chat_py.talk(chat)
    out, err = capsys.readouterr()
    assert "tokens leave no room for an answer, the longest conversation has 120)" in err
    first, *_, last, end = out.split("> ")[1:]
    assert end == "" and last == first != ""


# -----------------------------------------------------------------------------
# What is printed

@pytest.mark.parametrize("engine", [TorchEngine, Windows])
def test_what_is_printed_is_what_was_sampled(engine, tokenizer, model, capsys):
    prompt = tokenizer.chat(QUESTIONS[0] + STYLES["boxed"][0])
    sampler = Sampler(TorchEngine, model, 512, 1)
    completion, = sampler.generate([prompt], 1, Sampling(48, tokenizer.end_ids)).completions
    new_chat(tokenizer, model, engine).ask(QUESTIONS[0])
    assert capsys.readouterr().out == tokenizer.decode(completion) + "\n" != "\n"


def test_text_comes_as_it_is_sampled_whole_characters_and_no_escape_code(tokenizer, capsys):
    ids = [token for char in "aé\x1b[2J\n\u202eb" for token in tokenizer.encode(char)]
    windows = [ids[:2], ids[2:3], [*ids[3:], tokenizer.stop]]             # é has two tokens: one in each
    chat = Chat(tokenizer, None, "plain", None)
    chat.stream = chat_py.DecodeStream(skip_special_tokens=False)
    answer = SimpleNamespace(completion=[])
    printed = []
    for window in windows:
        answer.completion += window
        chat.print_new(len(window), [answer])
        printed.append(capsys.readouterr().out)
    assert printed == ["a", "é", "\\x1b[2J\n\\u202eb"]


def test_drawn_answers_follow_the_seed(tokenizer, model, capsys):
    texts = []
    for seed in (1, 1, 2):
        new_chat(tokenizer, model, temperature=20.0, seed=seed).ask(QUESTIONS[0])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


# -----------------------------------------------------------------------------
# The command

def test_a_run_brings_its_base_adapter_style_and_limit(run_folder, tokenizer, monkeypatch, capsys):
    assert main(monkeypatch, run_folder, "--question", QUESTIONS[0], "--device", "cpu") is None
    model = qwen.load(TINY, "bf16", "cpu", live_vocab=tokenizer.vocab_size)
    lora.load_adapter(model, run_folder / "adapter")
    prompt = tokenizer.chat(QUESTIONS[0], STYLES["tags"][1])
    sampler = Sampler(TorchEngine, model, 512, 1)
    completion, = sampler.generate([prompt], 1, Sampling(20, tokenizer.end_ids, 0.0)).completions
    with_adapter = capsys.readouterr().out
    assert with_adapter == "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1]
                                   for c in tokenizer.decode(completion)) + "\n"
    flags = ["--base", "bf16", "--prompt-style", "tags", "--max-new-tokens", "20", "--device", "cpu"]
    assert main(monkeypatch, "--model", TINY, *flags, "--question", QUESTIONS[0]) is None
    assert capsys.readouterr().out != with_adapter


def test_a_run_brings_its_thinking(run_folder, tmp_path, monkeypatch, capsys):
    model = thinking_tiny(tmp_path / "model", TEMPLATES["qwen3"])
    shutil.copytree(run_folder, tmp_path / "run")
    flags = json.loads((run_folder / "run.json").read_text()) | {"model": str(model), "thinking": "on"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(flags))
    made = []
    monkeypatch.setattr(evaluate, "Tokenizer", lambda *given: made.append(given[1]) or Tokenizer(*given))
    for more in ([], ["--thinking", "off"]):
        assert main(monkeypatch, tmp_path / "run", "--question", QUESTIONS[0], "--device", "cpu", *more) is None
    assert made == ["on", "off"] and capsys.readouterr().out


@pytest.mark.parametrize("flags,said", [
    ([], "needs the folder of a run, or --model"), (["nowhere"], "nowhere/run.json"),
    (["--model", "nowhere"], "--model nowhere"),
    (["--model", TINY, "--adapter", "nowhere"], "nowhere/adapter_config.json"),
    (["--model", TINY, "--temperature", "nan"], "--temperature must lie in [0, 1000], got nan"),
    (["--model", TINY, "--thinking", "on"], "--thinking on: by the chat_template in "),
    (["--model", TINY, "--max-new-tokens", "0"], "--max-new-tokens must lie in [1, 2e9], got 0"),
    (["--model", TINY, "--prompt-style", "odd"], "--prompt-style odd: expected one of"),
    (["--model", TINY, "--question", "1+" * 2000], "leave no room for an answer, the longest conversation has 1024")])
def test_bad_input_is_one_line(flags, said, monkeypatch, capsys):
    message = main(monkeypatch, "--device", "cpu", *flags, *[] if "--question" in flags else ["--question", "1+1?"])
    assert message.startswith("chat: ") and said in message and "\n" not in message


def test_a_gpu_without_kernels_is_one_line_before_the_model_is_loaded(fake_gpu, monkeypatch):
    fake_gpu((7, 5))
    monkeypatch.delattr(chat_py, "load_model")
    said = "chat: --device cuda:0: a GPU (sm_75): the kernels need sm_80 (Ampere) or later"
    assert main(monkeypatch, "--model", TINY) == said


def test_an_adapter_that_cannot_be_read_is_one_line_before_the_model_is_loaded(run_folder, tmp_path, monkeypatch):
    adapter = shutil.copytree(run_folder / "adapter", tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name, tensor = next(iter(tensors.items()))
    save_file(tensors | {name: tensor * float("nan")}, adapter / "adapter_model.safetensors")
    monkeypatch.delattr(chat_py, "load_model")
    said = main(monkeypatch, "--model", TINY, "--adapter", adapter, "--device", "cpu")
    assert said == f"chat: {adapter}/adapter_model.safetensors: {name} holds NaN or infinity"


def test_what_a_folder_says_of_itself_is_not_part_of_the_answer(tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(TINY, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"calibration": "KL 0.01", "merged_adapter": "x"}))
    outs = []
    for model in (TINY, folder):
        main(monkeypatch, "--model", model, "--base", "nvfp4", "--device", "cpu", "--prompt-style", "boxed",
             "--question", QUESTIONS[0])
        out, err = capsys.readouterr()
        outs.append(out)
    assert outs[0] == outs[1] != "" and "KL 0.01" in err and "merged adapter" in err


def test_the_command_answers_on_stdout_alone_and_ends_at_ctrl_c():
    command = [sys.executable, "-m", "tools.chat", "--model", str(TINY), "--prompt-style", "boxed", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdin.write(f"{QUESTIONS[0]}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    for _ in range(60):                                    # one that comes just before it reads waits for the next
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
            break
    assert process.returncode == 130 and answer.startswith("> ") and "\\boxed{" in answer
    begun = "an empty line begins a new conversation, Ctrl-D ends\n"
    assert process.stderr.read() == f"{begun}\nchat.py: stopped by Ctrl-C\n"


def test_on_a_terminal_the_arrow_keys_edit_a_line_and_bring_back_earlier_ones():
    pytest.importorskip("readline", reason="Python without readline")
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tools.chat", "--model", str(TINY), "--prompt-style", "boxed", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
                               env=os.environ | {"TERM": "xterm"})
    os.close(theirs)

    def until(text, count=1):
        said = b""
        while said.count(text) < count:
            said += os.read(ours, 4096)
        return said.decode(errors="replace")

    try:
        until(b"> ")
        os.write(ours, QUESTIONS[0].replace("20", "2").encode() + b"\x01" + b"\x1b[C" * 9 + b"0\r")   # 2 becomes 20
        first = until(b"\\boxed{") + until(b"> ")
        os.write(ours, b"\x1b[A\r")                      # up: the question as it was edited
        again = until(b"\\boxed{") + until(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(ours)
    assert "boxed{" in first and QUESTIONS[0] in again, (first, again)
