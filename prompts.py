"""
Prompts: a model's tokenizer and chat format, and the problems of a run with their prompts.

    tokenizer = Tokenizer(folder)
    problems = encode_prompts(tokenizer, load_problems("gsm8k", "train"), "boxed", max_tokens=512)
Complete problems that a run cannot use are left out and counted: the grader cannot read the answer,
or the prompt is too long.
"""
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer as TokenizerFile

from files import first_line, read_json, read_text, short_repr
from ranks import say
from tasks.answers import can_read
from tasks.plugin import call_users, load_function
from tasks.problems import Problem, has_test_split, load_problems

# -----------------------------------------------------------------------------
# The tokenizer and its chat format

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class Tokenizer:
    """The tokenizer.json of a model's folder, with Qwen's chat format.

    thinking: "on" or "off", as --thinking; ValueError for what the model's chat template rules out.

    end_ids: the tokens that end a completion. vocab_size: how many ids mean something; a model's
    embedding may have more rows. thinks: whether the model can think before it answers. opened:
    "<think>\\n" if the prompt itself ends with it, else "". The completion then lacks this text,
    so code that looks for the answer in a completion puts `opened` in front of it.
    """

    def __init__(self, folder: str | Path, thinking: str = "off"):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        text = read_text(path)
        try:
            self.file = TokenizerFile.from_str(text)
        except BaseException as error:           # a panic in the library's Rust is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"{path}: cannot be read as a tokenizer "
                             f"({first_line(error)})") from None
        self.file.encode_special_tokens = True   # "<|im_end|>" in a text stays text: see turns()
        self.file.no_truncation()                # the file keeps what its last user had set
        self.file.no_padding()
        vocab = self.file.get_vocab()            # with the added tokens
        if not {"<|im_start|>", "<|im_end|>"} <= vocab.keys():
            raise ValueError(f"{path}: lacks <|im_start|> or <|im_end|>, which Qwen's chat "
                             "format needs")
        # If the file's id of an added token leaves a gap, the library silently gives the token the
        # next free id instead. But the model was trained with the file's id.
        for token in json.loads(text).get("added_tokens", ()):
            if vocab[token["content"]] != token["id"]:
                raise ValueError(f"{path}: added_tokens: the id of {token['content']} is "
                                 f"{token['id']}, no id after those of the vocabulary")
        self.vocab_size = max(vocab.values()) + 1        # Qwen2.5: 151,665
        self.start = vocab["<|im_start|>"]
        self.stop = vocab["<|im_end|>"]
        # Both, as in every Qwen2.5's and Qwen3's generation_config.json. The temperature, top_p and
        # top_k in that file are for chatting with the model. They are never read: training samples
        # from the model's own distribution.
        self.end_ids = sorted({self.stop, vocab.get("<|endoftext|>", self.stop)})
        template, where = chat_template(self.folder)
        if template is None and "<think>" in vocab:
            raise ValueError(f"{where}: has no chat_template, and with <think> in {path.name} the "
                             "model's chat format is not Qwen2.5's")
        self.system = default_system(template)
        begins = answer_begins(template, where)
        if thinking not in begins:
            why = "always thinks" if thinking == "off" else "has no thinking"
            raise ValueError(f"--thinking {thinking}: by the chat_template in {where} the model "
                             f"{why}: take --thinking {next(iter(begins))}")
        self.thinks = "on" in begins
        # In the model's file the two are tokens, but no control tokens: encode() finds them.
        if self.thinks and [len(self.encode(tag)) for tag in ("<think>", "</think>")] != [1, 1]:
            raise ValueError(f"{path}: lacks <think> or </think> as a token that is not special, "
                             f"which the chat_template in {where} needs")
        begin = begins[thinking]
        self.opened = "" if "</think>" in begin else begin
        self.answer_start = [self.start, *self.encode(f"assistant\n{begin}")]

    def encode(self, text: str) -> list[int]:
        return self.file.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of a completion without its end token. Any other control token stays visible,
        so that a reader and the grader see what the model really wrote.
        """
        if ids and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return self.file.decode(ids, skip_special_tokens=False)

    def chat(self, text: str, system: str | None = None) -> list[int]:
        """The prompt of a question; system None: with the model's own system message, if any."""
        system = system or self.system
        turns = [("system", system)] if system else []
        return self.turns([*turns, ("user", text)])

    def turns(self, turns: list[tuple[str, str]]) -> list[int]:
        """The prompt of a conversation of (role, text):

            <|im_start|>  system \\n You are Qwen, ...   <|im_end|>  \\n
            <|im_start|>  user \\n 2+3*4?                <|im_end|>  \\n
            <|im_start|>  assistant \\n                  the model goes on from here

        After the last line comes what the chat template puts there about thinking: see THINKING.

        The two control tokens are put in as ids, and only texts are encoded, as plain text. A chat
        template would paste everything into one text and encode that: a question that contains
        "<|im_end|>\\n<|im_start|>assistant" could then speak for the model. The ids are otherwise
        the same, since a tokenizer cuts its text at control tokens before anything else.
        """
        return [token for turn in turns for token in self.turn(*turn)] + self.answer_start

    def turn(self, role: str, text: str) -> list[int]:
        """A turn that has been said. An answer of a model that thinks is repeated to it without the
        thinking, as in its chat template.
        """
        if role == "assistant" and self.thinks and "</think>" in text:
            text = text.rpartition("</think>")[2].lstrip("\n")
        return [self.start, *self.encode(f"{role}\n{text}"), self.stop, *self.encode("\n")]


# -----------------------------------------------------------------------------
# What a chat template says
#
# A template is a program in Jinja. It is never run, because nothing from a model's folder is ever
# run. Instead, what must be known about the template is looked up in its text.

# After "add_generation_prompt" a template says how an answer begins. A key of THINKING has the
# texts and conditions at that place, for a template whose thinking is known here. Its value says
# what the prompt has after "assistant\n", by --thinking.
NO_THOUGHT = "<think>\n\n</think>\n\n"
THINKING = {
    # Qwen3 opens its thinking itself, unless the prompt says that it has thought already.
    ("<|im_start|>assistant\n", "if enable_thinking is defined and enable_thinking is false",
     NO_THOUGHT): {"off": NO_THOUGHT, "on": ""},
    # Qwen3-Thinking-2507 always thinks: the prompt opens the thinking, the answer only closes it.
    ("<|im_start|>assistant\n<think>\n",): {"on": "<think>\n"},
}
TEXT_OR_CONDITION = re.compile(r"""'[^']*'|"[^"]*"|\b(?:el)?if\b.*?(?=\s*-?%})|\belse\b""")
# How these templates repeat an earlier answer: they cut its thinking off, and write what is left.
CUT = "content.split('</think>')[-1].lstrip('\n')"
WRITE = "message.role + '\n' + content"


def chat_template(folder: Path) -> tuple[str | None, Path]:
    """-> the text of a model's chat template, or None; the file that it is in, or belongs in.

    ValueError if it is not a template of Qwen's chat format.
    """
    path = folder / "tokenizer_config.json"
    there = path.exists() or path.is_symlink()   # a link to nothing is an error, not "no template"
    template = read_json(path).get("chat_template") if there else None
    if isinstance(template, list) and all(isinstance(one, dict) for one in template):
        by_name = {str(one.get("name")): one.get("template") for one in template}
        template = by_name.get("default")
    jinja = folder / "chat_template.jinja"       # where transformers >= 4.52 puts it
    if jinja.exists():
        path = jinja
        template = read_text(jinja)
    chatml = isinstance(template, str) and "<|im_start|>" in template
    if template is not None and not chatml:
        raise ValueError(f"{path}: chat_template is {short_repr(template)}, expected ChatML's text "
                         "or a list of texts with names")
    return template, path


def default_system(template: str | None) -> str | None:
    """The system message that a chat template adds to a conversation without one, or None if it
    adds none. Without a template it is Qwen's.
    """
    if template is None:
        return QWEN_SYSTEM
    # The message stands in the template between <|im_start|>system and <|im_end|>, as part of a
    # jinja string in which newline and backslash are escaped. The template may have another such
    # part, for the user's own system message. That one has a quote or {{ }} there.
    text = re.search(r"<\|im_start\|>system(?:\\n|\n)((?:(?!{{)[^'\"<])+)<\|im_end\|>", template)
    return text and text[1].replace("\\n", "\n").replace("\\\\", "\\")


def answer_begins(template: str | None, path: Path) -> dict[str, str]:
    """By --thinking: what a prompt has after "assistant\\n". The model cannot do what is missing.

    path: the template's file. ValueError if the template has a thinking that is not known here.
    """
    if template is None or not re.search("</?think>|enable_thinking", template):
        return {"off": ""}                       # Qwen2.5, Qwen3-Instruct-2507
    template = template.replace("\\n", "\n")     # a line break in a text, written in either way
    tail = template.rpartition("add_generation_prompt")[2]
    parts = tuple(part.strip("'\"") for part in TEXT_OR_CONDITION.findall(tail))
    if parts not in THINKING or not 0 <= template.find(CUT) < template.rfind(WRITE):
        raise ValueError(f"{path}: chat_template has a thinking that is not known here, expected "
                         "that of Qwen3 or of Qwen3-Thinking-2507")
    return THINKING[parts]


# -----------------------------------------------------------------------------
# Prompts

# --prompt-style -> what follows the question, and the system message (None: the model's own).
STYLES = {
    # Qwen2.5's own request for maths (model cards of Qwen2.5-Math)
    "boxed": ("\nPlease reason step by step, and put your final answer within \\boxed{}.", None),
    # the paper's format, in our words
    "tags": ("", "Think the problem through before you answer. Write your reasoning between "
                 "<think> and </think>, then only the final answer between <answer> and "
                 "</answer>."),
    "plain": ("", None),
}


def prompt_function(style: str) -> Callable[[Tokenizer, Problem], list[int]]:
    """--prompt-style -> the function that makes a problem's prompt. ValueError if there is none.

    "module:function" is the user's. It is given a problem's fields, and returns the user's turn as
    text, or a whole conversation as a list of {"role", "content"} that ends with the user's.
    """
    if style in STYLES:
        request, system = STYLES[style]

        def ask(tokenizer, problem):
            systems = filter(None, (problem.system, system))
            return tokenizer.chat(problem.question + request, "\n\n".join(systems))
        return ask
    if ":" not in style:
        raise ValueError(f"--prompt-style {style}: expected one of {', '.join(STYLES)}, or "
                         "module:function")
    function = load_function(style, "--prompt-style")

    def call(fields):
        said = function(fields)
        return list(said) if isinstance(said, Iterator) else said        # a generator runs here

    def ask_users(tokenizer, problem):
        said = call_users(f"--prompt-style {style}", call, f"problem {problem.id}",
                          problem.fields())
        try:
            if isinstance(said, str) and said.strip():
                return tokenizer.chat(said)
            turns = [(turn["role"], turn["content"]) for turn in said]
            if {type(part) for turn in turns for part in turn} != {str} or turns[-1][0] != "user":
                raise TypeError
            return tokenizer.turns(turns)
        except (TypeError, KeyError, UnicodeError):
            raise ValueError(f"--prompt-style {style}: expected text or a list of objects with "
                             "role and content that ends with the user's, for problem "
                             f"{problem.id}, got {short_repr(said)}") from None
    return ask_users


def encode_prompts(tokenizer: Tokenizer, problems: list[Problem], style: str,
                   max_tokens: float = math.inf) -> list[Problem]:
    """The problems with their prompts, without those whose prompt has more than max_tokens."""
    ask = prompt_function(style)
    encoded = [replace(p, prompt=ask(tokenizer, p)) for p in problems]
    return [p for p in encoded if len(p.prompt) <= max_tokens]


def usable_problems(settings, tokenizer: Tokenizer, source: str, split: str) -> list[Problem]:
    """The problems of a source that a run can use, with prompts; says how many are left out.

    settings has --prompt-style, --max-prompt-tokens and --reward under these names (config.Data).
    With a --reward a problem needs no gold answer. ValueError if fewer than two problems are left.
    """
    loaded = load_problems(source, split, not settings.reward)
    readable = [p for p in loaded if settings.reward or can_read(p.answer)]
    unreadable = len(loaded) - len(readable)
    if unreadable:
        example = next(p.answer for p in loaded if not can_read(p.answer))
        say(f"{source}: {unreadable} problems left out, their answers cannot be read, such as "
            f"{example[:60]!r}")
    problems = encode_prompts(tokenizer, readable, settings.prompt_style,
                              settings.max_prompt_tokens)
    long = len(readable) - len(problems)
    if long:
        say(f"{source}: {long} prompts of more than --max-prompt-tokens {settings.max_prompt_tokens} "
            "tokens left out")
    least = 2 if split == "train" else 1         # one to learn from, and one that is held out
    if len(problems) < least:
        raise ValueError(f"{source}: {len(problems)} problems can be used, a run needs at least "
                         f"{least}")
    return problems


def split_problems(settings, tokenizer: Tokenizer) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and the problems held out, all with prompts.

    Held out are the problems of --eval-data; without that flag, the data set's test split; if it
    has none, the end of the training data. settings also has --data, --eval-data and
    --eval-problems (config.Data).
    """
    problems = usable_problems(settings, tokenizer, settings.data, "train")
    most = settings.eval_problems or None
    if settings.eval_data or has_test_split(settings.data):
        source = settings.eval_data or settings.data
        held_out = usable_problems(settings, tokenizer, source, "test")[:most]
    else:
        source = settings.data
        held = max(1, min(most or 256, len(problems) // 10))
        if held != most:
            rule = "at least one" if len(problems) < 10 else "at most a tenth of them"
            if not most and held == 256:         # --eval-problems 0 asks for all
                rule = "at most 256 of them"
            say(f"{source}: holds out the last {held} of {len(problems):,} problems: {rule}, not "
                f"--eval-problems {settings.eval_problems}; --eval-data takes another file")
        held_out = problems[-held:]
        problems = problems[:-held]
    trained = {tuple(problem.prompt) for problem in problems}
    known = sum(tuple(problem.prompt) in trained for problem in held_out)
    if known:
        say(f"{source}: {known} of the {len(held_out)} held-out problems are also trained on: the "
            "held-out accuracy counts them")
    return problems, held_out


def digest_of(problems: list[Problem], reward: str | None = None) -> str:
    """SHA-256 of what a run is trained and evaluated on, which stays in its run.json.

    With a --reward every field of a row counts, since the user's function may read it.
    """
    known = str([(p.id, p.prompt, p.answer, *([p.row] if reward else [])) for p in problems])
    return hashlib.sha256(known.encode()).hexdigest()
