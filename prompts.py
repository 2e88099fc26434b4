"""
Prompts: a model's tokenizer and chat template, and the problems of a run with their prompts.

    tokenizer = Tokenizer(folder)
    problems = encode_prompts(tokenizer, load_problems("gsm8k", "train"), "boxed", max_tokens=512)

Problems that a run can't use are skipped and counted: those with an answer the grader can't read,
and those with too long a prompt.
"""
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as TokenizerFile
from tokenizers.pre_tokenizers import Metaspace

from files import UserError, counted, first_line, read_json, read_text, short_repr
from grader.answers import can_read
from ranks import say
from tasks.plugin import call_users, load_function
from tasks.problems import Problem, has_test_split, load_problems

Turn = tuple[str, str]                           # role and text

# -----------------------------------------------------------------------------
# The chat template

class ChatFormat(NamedTuple):
    """The control tokens by which a chat format is known."""
    end: str                                     # ends an answer
    start: str                                   # opens an answer, perhaps followed by others
    moves_system: bool = False                   # a system text moves on to the last user's turn


FORMATS = [ChatFormat("<|im_end|>", "<|im_start|>"),             # ChatML: Qwen, SmolLM2
           ChatFormat("<|eot_id|>", "<|start_header_id|>"),      # Llama 3
           ChatFormat("</s>", "[/INST]", moves_system=True)]     # Mistral
# These end a completion in any format: they end a document, or <|eom_id|> a call of a tool.
ENDS = "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"


class ChatTemplate:
    """A model's chat template: a Jinja program that writes a conversation as text.

    It runs in the sandbox that transformers uses and gets only the conversation, bos_token and
    eos_token: no tools, no documents, no date, no files. path: the file with the template.
    formats: those that the tokenizer has tokens for.
    """

    def __init__(self, folder: Path, formats: list[ChatFormat]):
        self.formats = formats
        newer = folder / "chat_template.jinja"   # where transformers >= 4.52 puts it, and looks first
        self.path = folder / "tokenizer_config.json"
        is_newer = newer.exists()
        known = read_json(self.path) if self.path.exists() or not is_newer else {}
        self.text = known.get("chat_template")
        if is_newer:
            older, self.path, self.text = self.text, newer, read_text(newer)
            if older not in (None, self.text):
                say(f"{newer} is used; tokenizer_config.json has another chat_template")
        self.tokens = {}
        for key in ("bos_token", "eos_token"):
            match known.get(key):
                case str(token) | {"content": str(token)}:
                    self.tokens[key] = token
        if not isinstance(self.text, str):
            raise self.error(f"is {short_repr(self.text)}, expected text")

    def error(self, why: str) -> UserError:
        return UserError(f"{self.path}: chat_template {why}")

    @cached_property
    def program(self) -> jinja2.Template:
        return SANDBOX.from_string(self.text)

    def render(self, turns: list[Turn], thinking: str) -> str:
        """The text of a conversation, up to where the model's answer begins.

        UserError if the template fails, drops or changes a system's or a user's text, or writes
        none of the formats. It may shorten earlier answers: Qwen3's removes their thinking.
        """
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            written = self.program.render(messages=messages, tools=None, documents=None,
                                          add_generation_prompt=True, **self.tokens,
                                          enable_thinking=thinking == "on")
        except Exception as error:               # someone else's program may raise anything
            raise self.error(f"fails: {first_line(error)}") from None
        self.format_of(written)
        for role, text in turns:
            if role != "assistant" and text.strip() not in written:
                raise self.error(f"drops or changes what the {role} says: {short_repr(text)}")
        return written

    def format_of(self, written: str) -> ChatFormat:
        """The format of a prompt; UserError if it has none. A tokenizer may have several's tokens:
        models trained from Llama 3 often use ChatML.
        """
        for one in self.formats:
            if one.start in written.rpartition(one.end)[2]:
                return one
        starts = " or ".join(one.start for one in self.formats)
        raise self.error(f"does not start the answer with {starts}, as its tokenizer's format does")


class Undefined(jinja2.Undefined):
    """An undefined name. It is false, so a template can test for it, but it can't be printed: as ""
    it would silently change the prompt of a template that writes, say, the date.
    """
    __str__ = jinja2.Undefined._fail_with_undefined_error


class Generation(jinja2.ext.Extension):
    """{% generation %}, which marks a model's own text for trainers, and writes just that text."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        text = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(text, lineno=line)


def raise_exception(message):
    raise jinja2.TemplateError(message)


def tojson(value, indent=None):
    return json.dumps(value, ensure_ascii=False, indent=indent)


# Jinja with the options and functions that transformers gives to a chat template.
SANDBOX = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=Undefined,
                                        extensions=["jinja2.ext.loopcontrols", Generation])
SANDBOX.globals["raise_exception"] = raise_exception
SANDBOX.filters["tojson"] = tojson


# -----------------------------------------------------------------------------
# The tokenizer

class Tokenizer:
    """A model's tokenizer.json and chat template.

    thinking: "on" or "off", as --thinking; UserError if the chat template rules it out.

    digest: of both files' texts. end_ids: the tokens that end a completion. format: the ChatFormat
    of its prompts. vocab_size: the number of ids that are tokens; a model's embedding may have more
    rows.
    opened: "<think>\\n" if the prompt itself ends with it, else "". The completion then lacks this
    text, so code that looks for an answer prepends `opened`.
    """

    def __init__(self, folder: str | Path, thinking: str = "off"):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        text = read_text(path)
        try:
            self.file = TokenizerFile.from_str(text)
        except Exception as error:               # the library has no error class for these
            raise UserError(f"{path}: not a valid tokenizer file ({first_line(error)})") from None
        self.file.encode_special_tokens = True   # "<|im_end|>" in a text stays text: see turns()
        self.file.no_truncation()                # the file may keep its last user's settings
        self.file.no_padding()
        # "first" prepends a space to the text's start, so not to each piece of it: see _pieces().
        self.space, scheme = None, self.file.pre_tokenizer
        if isinstance(scheme, Metaspace) and scheme.prepend_scheme == "first":
            scheme.prepend_scheme, self.space = "never", scheme.replacement
            self.file.pre_tokenizer = scheme
        vocab = self.file.get_vocab()            # with the added tokens
        added = json.loads(text).get("added_tokens", ())
        ids = [(token["content"], token["id"]) for token in added]
        if (self.folder / "tokenizer_config.json").exists():
            listed = read_json(self.folder / "tokenizer_config.json").get("added_tokens_decoder")
            ids += [(token["content"], int(i)) for i, token in (listed or {}).items()]
        for name, i in ids:                      # the library renumbers tokens after a gap
            if (self.file.token_to_id(name), self.file.id_to_token(i)) != (i, name):
                raise UserError(f"{path}: {name} has id {i} in added_tokens, there or in "
                                "tokenizer_config.json, but is read as "
                                f"{self.file.token_to_id(name)}: ids must have no gap")
        self.control = {token["content"]: token["id"] for token in added if token["special"]}
        formats = [one for one in FORMATS if {one.end, one.start} <= self.control.keys()]
        if not formats:
            raise UserError(f"{path}: has no chat format's special tokens: "
                            + ", or ".join(f"{one.start} and {one.end}" for one in FORMATS))
        self.control_token = re.compile(f"({'|'.join(map(re.escape, self.control))})")
        self.vocab_size = max(vocab.values()) + 1        # Qwen2.5: 151,665
        self.template = ChatTemplate(self.folder, formats)
        known = text + self.template.text + str(self.template.tokens)
        self.digest = hashlib.sha256(known.encode()).hexdigest()[:16]
        self.set_thinking(thinking)
        self.format = self.template.format_of(self.template.render([("user", "?")], thinking))
        self.stop = vocab[self.format.end]
        # As in the models' generation_config.json. Its temperature, top_p and top_k are for
        # chatting and aren't read: training samples from the model's own distribution.
        self.end_ids = sorted({self.stop, *(vocab[name] for name in ENDS if name in vocab)})

    def set_thinking(self, thinking: str) -> None:
        """Finds out what --thinking does by rendering a prompt with and without it:

            Qwen2.5, Qwen3-Instruct-2507    both end with "assistant\\n": it never thinks
            Qwen3                           on: "assistant\\n"; it writes <think> itself
                                            off: "assistant\\n<think>\\n\\n</think>\\n\\n"
            Qwen3-Thinking-2507             both: "assistant\\n<think>\\n"; it always thinks
        """
        turns = [("user", "What is 2 + 3?")]
        asked = {mode: self.template.render(turns, mode) for mode in ("off", "on")}
        opened = {mode: re.search(r"(<think>\s*)?\Z", text)[0] for mode, text in asked.items()}
        if asked["off"] == asked["on"]:
            del asked["off" if opened["on"] else "on"]
        if thinking not in asked:
            why = "always thinks" if thinking == "off" else "has no thinking"
            raise UserError(f"--thinking {thinking}: the chat_template in {self.template.path} "
                            f"says that the model {why}: use --thinking {next(iter(asked))}")
        self.thinking = thinking
        self.opened = opened[thinking]

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self.file.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of a completion without its end token. Other control tokens stay visible, so the
        reader and the grader see what the model really wrote.
        """
        if ids and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return self.file.decode(ids, skip_special_tokens=False)

    def user_turn(self, text: str) -> list[int]:
        """A user's turn: everything between the token that ends one answer and the next answer. A
        system text stays in the first turn, also where the template would move it to this one
        (ChatFormat.moves_system).
        """
        turns = [("user", "?"), ("assistant", "."), ("user", text)]
        earlier = self.turns(turns[:1]).count(self.stop)         # Mistral: none, only answers end
        ids = self.turns(turns)
        ends = [i for i, token in enumerate(ids) if token == self.stop]
        return ids[ends[earlier] + 1:]

    def turns(self, turns: list[Turn]) -> list[int]:
        """The prompt for a conversation that ends with the user's turn:

            <|im_start|>  system \\n You are Qwen, ...   <|im_end|>  \\n
            <|im_start|>  user \\n 2+3*4?                <|im_end|>  \\n
            <|im_start|>  assistant \\n                  the model continues from here

        Control tokens come only from the template. If a text spells one out, the template gets it
        with a mark inside, "<" + mark + "|im_end|>", and it is encoded as plain text without the
        mark, so no question can speak for the model. Apart from that, the ids are the same as for
        the text in one piece, since a tokenizer splits at control tokens before anything else.
        """
        return self.prompts([turns])[0]

    def prompts(self, conversations: Iterable[list[Turn]]) -> list[list[int]]:
        """turns() of many conversations. It encodes each text in them once, all at the same time,
        on all cores.
        """
        all_pieces = [self._pieces(turns) for turns in conversations]
        texts = list({piece for pieces in all_pieces for piece in pieces if isinstance(piece, str)})
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:      # of a terminal or pipe in another encoding
            around = error.object[max(0, error.start - 20):error.end]
            raise UserError(f"a prompt is not valid Unicode: {short_repr(around)}") from None
        encoded = self.file.encode_batch(texts, add_special_tokens=False)
        ids = {text: one.ids for text, one in zip(texts, encoded)}
        ids |= {control: [control] for control in self.control.values()}
        return [[i for piece in pieces for i in ids[piece]] for pieces in all_pieces]

    def _pieces(self, turns):
        """The text of a conversation, split at control tokens, which are ids."""
        known = "".join(map("".join, turns))
        mark = "\ue000" * (1 + known.count("\ue000"))             # longer than any run in them

        def hide(text):
            return self.control_token.sub(lambda name: f"{name[0][0]}{mark}{name[0][1:]}", text)

        text = self.template.render([(hide(role), hide(said)) for role, said in turns],
                                    self.thinking)
        if self.space and not text.startswith((" ", self.space, *self.control)):
            text = " " + text
        return [self.control.get(piece, piece.replace(mark, ""))
                for piece in self.control_token.split(text)]


# -----------------------------------------------------------------------------
# Prompts

# --prompt-style -> the text after the question, and the system message (None: the model's own).
STYLES = {
    # Qwen2.5's own request for math (model cards of Qwen2.5-Math)
    "boxed": ("\nPlease reason step by step, and put your final answer within \\boxed{}.", None),
    # the paper's format, in our words
    "tags": ("", "Think the problem through before you answer. Write your reasoning between "
                 "<think> and </think>, then only the final answer between <answer> and "
                 "</answer>."),
    "plain": ("", None),
}


def prompt_function(style: str) -> Callable[[Problem], list[Turn]]:
    """--prompt-style -> the function that turns a problem into a conversation. UserError if there
    is none of that name.

    "module:function" is the user's own. It gets a problem's fields and returns the user's turn as
    text, or a conversation as a list of {"role", "content"} that ends with the user's turn.
    """
    if style in STYLES:
        request, style_system = STYLES[style]

        def ask(problem):
            system = "\n\n".join(filter(None, (problem.system, style_system)))
            return [("system", system)] * bool(system) + [("user", problem.question + request)]
        return ask
    if ":" not in style:
        raise UserError(f"--prompt-style {style}: expected one of {', '.join(STYLES)}, or "
                        "module:function")
    function = load_function(style, "--prompt-style")

    def ask_users(problem):
        flag, what = f"--prompt-style {style}", f"problem {problem.id}"
        said = call_users(flag, function, what, problem.fields())
        match said:
            case str() if said.strip():
                return [("user", said)]
            case [*_, {"role": "user"}] if all(map(is_turn, said)):
                return [(turn["role"], turn["content"]) for turn in said]
        raise UserError(f"{flag}: expected text, or a list of objects with role (system, user or "
                        f"assistant) and content (text), the user's last; for {what} got "
                        f"{short_repr(said)}")
    return ask_users


def is_turn(value: object) -> bool:
    match value:
        case {"role": "system" | "user" | "assistant", "content": str()}:
            return True
    return False


def encode_prompts(tokenizer: Tokenizer, problems: list[Problem], style: str,
                   max_tokens: float = math.inf) -> list[Problem]:
    """The problems with their prompts, except those whose prompt exceeds max_tokens."""
    ask = prompt_function(style)
    prompts = tokenizer.prompts(map(ask, problems))
    return [replace(p, prompt=prompt) for p, prompt in zip(problems, prompts)
            if len(prompt) <= max_tokens]


# Text that may have been a number: programs write 0.00003 as 3e-05, which as math is 3 times e,
# minus 5. nan is an empty cell of a table.
NO_MATH = re.compile(r".*\d\.?[eE][-+]?\d.*|nan|NaN|None|null", re.DOTALL)


def readable_problems(problems: list[Problem], source: str, reward: str | None) -> list[Problem]:
    """The problems whose answer the grader can read, or all with --reward; prints how many are
    skipped.
    """
    readable, unreadable = [], []
    readable_once = cache(can_read)              # GSM8K's 7,473 answers are 866 numbers
    for p in problems:
        is_readable = reward or not NO_MATH.fullmatch(p.answer) and readable_once(p.answer)
        (readable if is_readable else unreadable).append(p)
    if unreadable:
        say(f"{source}: {counted(len(unreadable), 'problem')} skipped because the grader can't read "
            f"answers such as {unreadable[0].answer[:60]!r}")
    return readable


def usable_problems(settings, tokenizer: Tokenizer, source: str, split: str) -> list[Problem]:
    """The problems of a source that a run can use, with prompts; prints how many are skipped.

    settings has --prompt-style, --max-prompt-tokens and --reward under these names (config.Data).
    With --reward, problems need no gold answer. UserError if too few problems are left.
    """
    loaded = load_problems(source, split, not settings.reward)
    readable = readable_problems(loaded, source, settings.reward)
    most = settings.max_prompt_tokens
    problems = encode_prompts(tokenizer, readable, settings.prompt_style, most)
    long = len(readable) - len(problems)
    if long:
        say(f"{source}: {counted(long, 'prompt')} skipped, longer than --max-prompt-tokens {most}")
    least = 2 if split == "train" else 1         # one to train on and one to hold out
    if len(problems) < least:
        longer = f"; a larger --max-prompt-tokens than {most} skips fewer" if long else ""
        raise UserError(f"{source}: {counted(len(problems), 'usable problem')}, but a run needs at "
                        f"least {least}{longer}")
    return problems


def split_problems(settings, tokenizer: Tokenizer) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and the held-out problems, all with prompts.

    Held-out problems come from --eval-data, or else from the data set's test split, or else from
    the end of the training data. settings also has --data, --eval-data and --eval-problems
    (config.Data).
    """
    source = settings.eval_data or settings.data
    problems = usable_problems(settings, tokenizer, settings.data, "train")
    most = settings.eval_problems or None        # 0 asks for all
    if settings.eval_data or has_test_split(source):
        held_out = usable_problems(settings, tokenizer, source, "test")[:most]
    else:
        held = max(1, min(most or 256, len(problems) // 10))
        say(f"{source}: the last {held:,} of {counted(len(problems), 'problem')} are held out; "
            "use --eval-data to choose others")
        held_out = problems[-held:]
        problems = problems[:-held]
    trained = {tuple(problem.prompt) for problem in problems}
    known = sum(tuple(problem.prompt) in trained for problem in held_out)
    if known:
        say(f"{source}: {known:,} of {len(held_out):,} held-out problems are also trained on and "
            "count towards the held-out accuracy")
    return problems, held_out


def digest_of(problems: list[Problem]) -> str:
    """SHA-256 of what a run is trained and evaluated on, for its run.json. Every field of a row
    counts, since a reward or a tool may read it.
    """
    known = str([(p.id, p.prompt, p.answer, p.row) for p in problems])
    return hashlib.sha256(known.encode()).hexdigest()
