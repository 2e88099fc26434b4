"""
Talk to a model through the sampler that trains it.

    python -m tools.chat runs/x                        a run: its model, base, adapter, prompt style
    python -m tools.chat runs/x --question "2+3*4?"    one answer on stdout
    python -m tools.chat --model qwen2.5-7b --adapter runs/x/adapter

A conversation goes on from line to line in the model's chat format; an empty line begins a new one,
Ctrl-D ends. The arrow keys edit the line and bring back earlier ones. An answer appears as it is
sampled: token by token on a CPU, eight at a time on a GPU. Each turn computes the whole
conversation again.
"""
import argparse
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass

import env  # isort: skip; its settings come before torch

from tokenizers.decoders import DecodeStream

from evaluate import Which, load_model, open_model, parse
from files import first_line
from harness import config
from harness.config import setting
from prompts import prompt_function
from sampler import Sampler, Sampling, engine_for
from tasks.problems import Problem
from weights import check_model

LENGTH = 8192                                    # tokens of a conversation, if the model takes them


@dataclass(frozen=True)
class Conversation:
    """how it answers"""
    prompt_style: str = setting("plain", "as in train.py")
    thinking: str = setting("off", "as in train.py", choices=("on", "off"))
    question: str | None = setting(None, "answer this one and end")
    temperature: float = setting(0.0, "0: greedy", "[0, 1000]")
    max_new_tokens: int = setting(1024, "longest answer", "[1, 2e9]")
    seed: int = setting(0, "random seed of sampling", "[0, 2e18]")


class Chat:
    """A conversation. said: its turns of (role, text)."""

    def __init__(self, tokenizer, sampler, style, sampling):
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.style = style
        self.sampling = sampling
        self.said = []

    def print_new(self, made, sequences):
        """Prints the text of an answer's `made` new tokens, control characters as codes."""
        sequence, = sequences
        for token in sequence.completion[-made:]:
            if token not in self.tokenizer.end_ids:
                text = self.stream.step(self.tokenizer.file, token) or ""  # None: half a character
                safe = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
                print("".join(safe), end="", flush=True)

    def ask(self, question):
        """Prints the answer. ValueError if the conversation leaves no room for one."""
        tokenizer = self.tokenizer
        problem = Problem("chat", question.encode(errors="replace").decode(), "")
        turns = prompt_function(self.style)(problem)
        if self.said:
            turns = [*self.said, turns[-1]]      # one system message
        prompt = tokenizer.turns(turns)
        most = min(self.sampling.max_new_tokens, self.sampler.max_length - len(prompt))
        if most < 1:
            raise ValueError(f"{len(prompt)} tokens leave no room for an answer, the longest "
                             f"conversation has {self.sampler.max_length}")
        self.stream = DecodeStream(skip_special_tokens=False)
        sampling = self.sampling._replace(max_new_tokens=most)
        answer = self.sampler.generate([prompt], 1, sampling, [len(prompt)], self.print_new)
        print()
        completion, = answer.completions
        if not answer.finished[0]:
            print(f"(cut off at {most} tokens)", file=sys.stderr)
        text = tokenizer.opened + tokenizer.decode(completion)
        if tokenizer.thinks and "<think>" in text.rpartition("</think>")[2]:
            text = text[:text.rindex("<think>")]         # cut off while it thought
        self.said = [*turns, ("assistant", text)]


def read_chat_flags() -> tuple[Which, Conversation]:
    """The command line. If it names a run, the run's settings are the defaults."""
    parser = argparse.ArgumentParser(usage="chat [run] [flags], --help lists them",
                                     description="Talk to a model.", allow_abbrev=False,
                                     formatter_class=config.Help)
    args, _ = parse(parser, [Which, Conversation])
    wanted = config.section_of(Conversation, args)
    config.check_ranges(wanted)
    if args.model is None:
        raise ValueError("needs the folder of a run, or --model")
    prompt_function(wanted.prompt_style)
    check_model(args.model)
    return config.section_of(Which, args), wanted


def talk(chat):
    """Answers each line of stdin until it ends."""
    if sys.stdin.isatty():
        with suppress(ImportError):              # Windows has none; its terminal edits lines itself
            import readline  # noqa: F401        # input() then edits lines and remembers them
    print("an empty line begins a new conversation, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            question = input("> ").strip()
            if question:
                chat.ask(question)
            else:
                chat.said = []
        except ValueError as error:
            print(f"({first_line(error)})", file=sys.stderr)
        except EOFError:
            return


def main():
    with env.one_line("chat"):
        which, wanted = read_chat_flags()
        with redirect_stdout(sys.stderr):        # stdout has the answers alone
            which, device, kernels, folder, tokenizer = open_model(which, wanted.prompt_style,
                                                                   wanted.thinking)
            model = load_model(which, device, folder, tokenizer)
        length = min(folder.max_positions, LENGTH)
        sampler = Sampler(engine_for(kernels), model, length, max_rows=1)
        sampling = Sampling(wanted.max_new_tokens, tokenizer.end_ids, wanted.temperature,
                            seed=wanted.seed)
        chat = Chat(tokenizer, sampler, wanted.prompt_style, sampling)
        if wanted.question is None:
            talk(chat)
        else:
            chat.ask(wanted.question)


if __name__ == "__main__":
    main()
