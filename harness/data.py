"""
Problems and prompts: a file, a data set's name or a generator in, token ids out.

    problems = load_problems("gsm8k", "train")
    problems = encode_prompts(Tokenizer(folder), problems, "boxed", max_tokens=512)
    for i in step_indices(len(problems), seed, cursor, 16): ...      # then cursor += 16

A row without an answer ends the load with its file and line: skipped, it would make a different
data set. Golds that the grader cannot read and prompts over the limit are left out and counted.
The chat format is Qwen's ChatML written as ids: a problem's text never becomes a control token.
"""
import json
import math
import os
import random
import re
import urllib.request
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from tokenizers import Tokenizer as TokenizerFile

from answers import can_read
from harness.files import read_json, read_rows, read_text
from harness.plugin import call, load_function
from harness.process import first_line, short
from harness.ranks import say
from rewards import last_box
from tiny.arithmetic import arithmetic


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str                                  # the gold, "" where a reward needs none
    prompt: list = None                          # ids, from encode_prompts
    row: dict = field(default=None, compare=False)               # as it is in the file
    system: str = None                           # message of a question that is a chat

    def fields(self):
        """What a function of the user's is told: every field of the row, and these three."""
        return (self.row or {}) | {"id": self.id, "question": self.question, "answer": self.answer}


SUFFIXES = (".jsonl", ".json", ".parquet")       # in order of preference: the last needs pyarrow
# owner/name[:folder] on the Hugging Face hub, or a URL: the hub has GSM8K only as parquet.
KNOWN = {
    "gsm8k": "https://raw.githubusercontent.com/openai/grade-school-math/master/"
             "grade_school_math/data/{split}.jsonl",
    "math": "nlile/hendrycks-MATH-benchmark",    # train 12,000, test = MATH-500
    "math500": "HuggingFaceH4/MATH-500",         # test only
    "dapo": "open-r1/DAPO-Math-17k-Processed:en",            # train only
    "bigmath": "open-r1/Big-Math-RL-Verified-Processed:level_3_4_5",
}
HUB_ID = r"[\w.-]+/[\w.-]+(:[\w./-]+)?"


def check_source(source):
    """ValueError for a --data that is neither here nor anywhere; nothing is downloaded."""
    if str(source).endswith(SUFFIXES):
        if not Path(source).is_file():
            raise ValueError(f"no data file {source}")
    elif source != "arithmetic" and source not in KNOWN and not re.fullmatch(HUB_ID, source):
        raise ValueError(f"unknown data {source!r}: give a file ending in {', '.join(SUFFIXES)}, a "
                         f"hub id owner/name, arithmetic, or one of {', '.join(KNOWN)}")


def load_problems(source, split="train", needs_gold=True):
    """source: a file (one split by itself), "arithmetic", a name in KNOWN, or owner/name of a data
    set on the hub, with :folder where it has several configurations.
    """
    assert split in ("train", "test"), split
    check_source(source)
    if source == "arithmetic":
        return [Problem(*fields) for fields in arithmetic(split)]
    here = str(source).endswith(SUFFIXES)
    paths = [Path(source)] if here else fetch(source, split)
    problems = [to_problem(row, path, number, needs_gold)
                for path in paths for number, row in read_rows(path)]
    if not problems:
        raise ValueError(f"{source}: holds no {split} problems")
    return problems


def has_test_split(source):
    """Whether a data set holds out problems itself; a file of one's own does not."""
    if str(source).endswith(SUFFIXES):
        return False
    return source == "arithmetic" or fetch(source, "test") != []


def fetch(source, split):
    """One split in the Hugging Face cache, fetched if need be -> local paths, [] if it has none."""
    where = KNOWN.get(source, source).replace("{split}", split)
    repo, _, folder = where.partition(":")
    patterns = [f"{folder}*{suffix}" for suffix in SUFFIXES]
    try:
        if repo == "https":
            return [download(where, f"{source}_{split}.jsonl")]
        root = huggingface_hub.snapshot_download(repo, repo_type="dataset", allow_patterns=patterns)
    except Exception as error:                   # the hub's, httpx's, urllib's: no narrower class
        raise ValueError(f"cannot fetch {where}: {type(error).__name__}: {error}") from error
    names = [str(path.relative_to(root)) for path in Path(root).rglob("*")]
    return [Path(root) / name for name in pick_files(names, where, split)]


def download(url, name):
    path = Path(constants.HF_HOME) / "qerl" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part, _ = urllib.request.urlretrieve(url, f"{path}.{os.getpid()}.part")
        os.replace(part, path)                   # one cut short never looks like a whole file
    return path


def pick_files(names, where, split):
    """The files of one split of owner/name:folder; as on the hub, "train" if the name says none."""
    folders = {}
    for name in sorted(names):
        marks = re.findall(r"(?:^|[/_.-])(train|test|validation|valid|dev)(?=[/_.-])", name)
        inside = name.startswith(where.partition(":")[2]) and "dataset_info" not in name
        if inside and name.endswith(SUFFIXES) and (marks or ["train"])[-1] == split:
            folders.setdefault(str(Path(name).parent), []).append(name)
    if len(folders) > 1:
        raise ValueError(f"{where} has several configurations, add one of :{', :'.join(folders)}")
    files = sum(folders.values(), [])
    by_suffix = [[name for name in files if name.endswith(suffix)] for suffix in SUFFIXES]
    return next(filter(None, by_suffix), [])


QUESTIONS = "question", "problem", "prompt"
GOLDS = "answer", "final_answer", "ground_truth", "solution"


def to_problem(row, path, number, needs_gold=True):
    """A row under any of the field names in use: GSM8K, MATH, DAPO, BigMath and their copies."""
    where = f"{path}:{number}"
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object but {type(row).__name__}")
    question = next((row[name] for name in QUESTIONS if row.get(name)), None)
    system = None
    if isinstance(question, list) and all(isinstance(turn, dict) for turn in question):
        turns = [(turn.get("role"), type(turn.get("content"))) for turn in question]
        if turns not in ([("user", str)], [("system", str), ("user", str)]):
            raise ValueError(f"{where}: has no question: {short(question)} is no chat of a user's "
                             "text, before it perhaps a system's")
        system = question[0]["content"] if turns[1:] else None
        question = question[-1]["content"]
    answer = gold(row)
    for what, names, value in (("question", QUESTIONS, question), ("answer", GOLDS, answer)):
        needed = what == "question" or needs_gold
        if needed and not (isinstance(value, str) and value.strip()):
            raise ValueError(f"{where}: has no {what}: none of {', '.join(names)} holds one (its "
                             f"fields: {', '.join(row)})")
    names = row.get("id"), row.get("unique_id"), f"{path.stem}-{number}"
    name = next(str(name) for name in names if name is not None)
    try:
        "".join([name, question, answer or "", str(system)]).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: holds half a surrogate pair, which is no character") from None
    return Problem(name, question.strip(), answer or "", row=row, system=system)


def gold(row):
    """The gold as text, or None: what follows GSM8K's ####, the last box of a MATH solution."""
    reward = row.get("reward_model")             # DAPO's original keeps the gold in there
    fields = {**row, **reward} if isinstance(reward, dict) else row
    for name in GOLDS:
        value = fields.get(name)
        if type(value) not in (str, int, float):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            continue
        text = str(value).strip()
        if "####" in text:
            text = text.rsplit("####", 1)[1].strip().replace(",", "")
        elif name == "solution":                 # the hub's DAPO and BigMath: a bare gold
            worked = len(text) > 100 or "\n" in text
            text = last_box(text) or ("" if worked else text)
        if text:
            return text


# -----------------------------------------------------------------------------
# Prompts and token ids

# style -> what follows the question, the system message (None: the model's own).
STYLES = {
    # Qwen2.5's own request for maths (model cards of Qwen2.5-Math)
    "boxed": ("\nPlease reason step by step, and put your final answer within \\boxed{}.", None),
    # the paper's format, in our words
    "tags": ("", "Think the problem through before you answer. Write your reasoning between "
                 "<think> and </think>, then only the final answer between <answer> and "
                 "</answer>."),
    "plain": ("", None),
}
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class Tokenizer:
    """tokenizer.json of a folder. end_ids end a completion; vocab_size: ids that mean something."""

    def __init__(self, folder):
        path = Path(folder) / "tokenizer.json"
        text = read_text(path)
        try:
            self.file = TokenizerFile.from_str(text)
        except BaseException as error:           # of the library's Rust, a panic too
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"{path}: cannot be read as a tokenizer "
                             f"({first_line(error)})") from None
        self.file.encode_special_tokens = True   # <|im_end|> in a text stays text; see chat()
        self.file.no_truncation()                # settings of whoever saved the file last
        self.file.no_padding()
        vocab = self.file.get_vocab()            # with the added tokens
        if not {"<|im_start|>", "<|im_end|>"} <= vocab.keys():
            raise ValueError(f"{path}: lacks <|im_start|> or <|im_end|>: not Qwen's chat format")
        # The library would number them anew.
        for token in json.loads(text).get("added_tokens", ()):
            if vocab[token["content"]] != token["id"]:
                raise ValueError(f"{path}: added_tokens: the id of {token['content']} is "
                                 f"{token['id']}, no id after those of the vocabulary")
        self.vocab_size = max(vocab.values()) + 1        # Qwen2.5: 151,665
        self.start = vocab["<|im_start|>"]
        self.stop = vocab["<|im_end|>"]
        # Those of every Qwen2.5's generation_config.json.
        self.end_ids = sorted({self.stop, vocab.get("<|endoftext|>", self.stop)})
        self.system = default_system(path.parent)

    def encode(self, text):
        return self.file.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Text of a completion without its end token; any other control token stays visible."""
        if ids and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return self.file.decode(ids, skip_special_tokens=False)

    def chat(self, text, system=None):
        """Ids of a system message (or the model's), a user's turn, the generation prompt."""
        system = system or self.system
        turns = [("system", system)] if system else []
        return self.turns([*turns, ("user", text)])

    def turns(self, turns):
        """(role, text) of each turn -> ids, and of the generation prompt."""
        ids = []
        for role, text in turns:
            ids += [self.start, *self.encode(f"{role}\n{text}"), self.stop, *self.encode("\n")]
        return ids + [self.start, *self.encode("assistant\n")]


def default_system(folder):
    """The system message that the chat template adds, or None; Qwen's if there is no template."""
    path = folder / "tokenizer_config.json"
    there = path.exists() or path.is_symlink()   # a link to nothing is refused
    template = read_json(path).get("chat_template") if there else None
    if isinstance(template, list) and all(isinstance(one, dict) for one in template):
        named = {str(one.get("name")): one.get("template") for one in template}
        template = named.get("default")
    jinja = folder / "chat_template.jinja"                       # where transformers >= 4.52 has it
    if jinja.exists():
        path = jinja
        template = read_text(jinja)
    if template is None:
        return QWEN_SYSTEM
    if not isinstance(template, str) or "<|im_start|>" not in template:
        raise ValueError(f"{path}: chat_template is {short(template)}, expected ChatML's text or a "
                         "list of texts with names")
    # A jinja string: newline and backslash are escaped. {{ }} or a quote would mean a variable.
    text = re.search(r"<\|im_start\|>system(?:\\n|\n)([^'\"<]+)<\|im_end\|>", template)
    return text and text[1].replace("\\n", "\n").replace("\\\\", "\\")


def style_of(name):
    """--prompt-style -> a function (tokenizer, problem) -> ids. "module:function" is the user's: it
    gets a problem's fields and returns the user's turn, or a list of {"role", "content"}.
    """
    if name in STYLES:
        request, system = STYLES[name]

        def ask(tokenizer, problem):
            systems = filter(None, (problem.system, system))
            return tokenizer.chat(problem.question + request, "\n\n".join(systems))
        return ask
    if ":" not in name:
        raise ValueError(f"--prompt-style {name}: expected one of {', '.join(STYLES)}, or "
                         "module:function")
    function = load_function(name, "--prompt-style")

    def ask_users(tokenizer, problem):
        said = call(f"--prompt-style {name}", function, f"problem {problem.id}", problem.fields())
        try:
            if isinstance(said, str) and said.strip():
                return tokenizer.chat(said)
            turns = [(turn["role"], turn["content"]) for turn in said]
            if {type(part) for turn in turns for part in turn} != {str} or turns[-1][0] != "user":
                raise TypeError
            return tokenizer.turns(turns)
        except (TypeError, KeyError, UnicodeError):
            raise ValueError(f"--prompt-style {name}: expected text or a list of objects with role "
                             "and content that ends with the user's, for problem "
                             f"{problem.id}, got {short(said)}") from None
    return ask_users


def encode_prompts(tokenizer, problems, style, max_tokens=math.inf):
    """-> problems with their prompts, but those of more than max_tokens."""
    ask = style_of(style)
    encoded = [replace(p, prompt=ask(tokenizer, p)) for p in problems]
    return [p for p in encoded if len(p.prompt) <= max_tokens]


def encoded_problems(settings, tokenizer, source, split):
    """-> the problems that can be used, with prompts; says how many are left out."""
    loaded = load_problems(source, split, not settings.reward)       # a reward needs no gold
    readable = [p for p in loaded if settings.reward or can_read(p.answer)]
    unreadable = len(loaded) - len(readable)
    if unreadable:
        say(f"{source}: {unreadable} problems left out, their answers cannot be read")
    problems = encode_prompts(tokenizer, readable, settings.prompt_style, settings.max_prompt_tokens)
    long = len(readable) - len(problems)
    if long:
        say(f"{source}: {long} prompts of more than {settings.max_prompt_tokens} tokens left out")
    if len(problems) < 2:
        raise ValueError(f"{source}: {len(problems)} problems are left, need 2")
    return problems


def split_problems(settings, tokenizer):
    """-> problems to train on, problems held out, with prompts; settings: config.Data."""
    problems = encoded_problems(settings, tokenizer, settings.data, "train")
    most = settings.eval_problems or None
    if settings.eval_data or has_test_split(settings.data):
        held_out = encoded_problems(settings, tokenizer, settings.eval_data or settings.data, "test")
        return problems, held_out[:most]
    held = max(1, min(most or 256, len(problems) // 10))         # the end of a file of one's own
    return problems[:-held], problems[-held:]


@lru_cache(2)
def order(n, seed, epoch):
    """The permutation of range(n) that an epoch follows: to resume, the cursor is enough."""
    indices = list(range(n))
    random.Random(f"order/{seed}/{epoch}").shuffle(indices)
    return indices


def step_indices(n, seed, cursor, count):
    """The `count` of n problems after the first `cursor`, running on into the next epoch."""
    assert n > 0, n
    return [order(n, seed, i // n)[i % n] for i in range(cursor, cursor + count)]


def problems_at(problems: list, seed: int, places: range) -> list:
    """The problems at these places of a run, which follow each other."""
    return [problems[i] for i in step_indices(len(problems), seed, places.start, len(places))]
