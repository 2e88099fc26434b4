"""
Chat with a model or a run, using training's sampler.

    python -m tools.chat runs/x                        a run, with its prompt
    python -m tools.chat runs/x --question "2+3*4?"    one answer on stdout
    python -m tools.chat --model qwen2.5-7b --adapter runs/x/adapter

Each line continues the conversation, an empty line starts a new one, Ctrl-D
quits. Each turn prefills the whole conversation again.
"""
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))            # for python tools/chat.py
import env  # isort: skip; its settings come before torch

from evaluate import check_model, model_parser, parse
from files import UserError, first_line
from harness.config import add_flag
from harness.setup import open_model
from prompts import prompt_function
from sampler import Sampler, Sampling
from tasks.problems import Problem

LENGTH = 8192                                    # tokens in a conversation, if the model allows it


class Chat:
    """A conversation, stored as (role, text) per turn."""

    def __init__(self, tokenizer, sampler: Sampler, style: str, sampling: Sampling):
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.style = style
        self.sampling = sampling
        self.turns = []

    def ask(self, question: str) -> str:
        """The answer. UserError if the conversation leaves no room for one."""
        turns = prompt_function(self.style)(Problem("chat", question, ""))
        if self.turns:
            turns = [*self.turns, turns[-1]]     # only one system message
        prompt = self.tokenizer.turns(turns)
        most = min(self.sampling.max_new_tokens, self.sampler.max_length - len(prompt))
        if most < 1:
            raise UserError(f"{len(prompt)} tokens leave no room for an answer: a conversation "
                            f"can have at most {self.sampler.max_length}")
        sampling = self.sampling._replace(max_new_tokens=most)
        answer, = self.sampler.generate([prompt], 1, sampling, [len(prompt)]).rows
        if not answer.finished:
            print(f"(cut off at {most} tokens)", file=sys.stderr)
        text = self.tokenizer.decode(answer.completion)
        self.turns = [*turns, ("assistant", self.tokenizer.opened + text)]
        return text


def printable(text: str) -> str:
    """Escapes control characters, so an answer can't control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def talk(chat: Chat) -> None:
    """Answers each line of stdin until it ends."""
    if not sys.stdin:
        raise UserError("stdin is closed: ask with --question")
    with suppress(AttributeError):               # so a line in another encoding isn't the last
        sys.stdin.reconfigure(errors="surrogateescape")
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):              # Windows has none; its terminal edits lines itself
            import readline  # noqa: F401        # arrow keys edit a line and recall earlier ones
    print("an empty line starts a new conversation, Ctrl-D quits", file=sys.stderr)
    while True:
        try:
            question = input("> " if typed else "").strip()
            if question:
                print(printable(chat.ask(question)), flush=True)
            else:
                chat.turns = []
        except UserError as error:
            print(f"({first_line(error)})", file=sys.stderr)
        except EOFError:
            return


def main() -> None:
    parser = model_parser(__doc__, "plain")
    parser.add_argument("--question", help="answer this question and quit")
    add_flag(parser, "max_new_tokens", 1024, "longest answer, in tokens (default: 1024)")
    with env.one_line():
        args = parse(parser)
        with redirect_stdout(sys.stderr):        # only answers go to stdout
            folder, tokenizer, device = check_model(args)
            model, _ = open_model(folder, tokenizer, device, args, args.adapter)
        length = min(folder.max_positions, LENGTH)
        sampler = Sampler(model, length, max_rows=1)
        sampling = Sampling(args.max_new_tokens, tokenizer.end_ids, args.temperature or 0.0,
                            seed=args.seed)
        chat = Chat(tokenizer, sampler, args.prompt_style, sampling)
        if args.question is None:
            talk(chat)
        else:
            print(printable(chat.ask(args.question)))


if __name__ == "__main__":
    main()
