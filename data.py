"""
Problems and prompts: a file, a data set's name or a generator in, token ids out.

    problems, unreadable = load_problems("gsm8k", "train", is_readable)
    problems, too_long = encode_prompts(Tokenizer(folder), problems, "boxed", max_tokens=512)
    for i in step_indices(len(problems), seed, cursor, 16): ...      # then cursor += 16

A row without an answer ends the load with its file and line: skipped, it would make a different
data set. Golds that the grader cannot read and prompts over the limit are left out and counted.
The chat format is Qwen's ChatML written as ids: a problem's text never becomes a control token.
"""
import json
import os
import random
import re
import urllib.request
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from tokenizers import Tokenizer as TokenizerFile

from hf import read_json
from rewards import last_box
from tiny.arithmetic import arithmetic


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str                                  # the gold
    prompt: list = None                          # ids, from encode_prompts


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


class NoSplit(ValueError):
    """A data set on the hub without files of that split."""


def load_problems(source, split="train", is_readable=None):
    """-> problems, number of golds refused by is_readable(answer).

    source: a file (one split by itself), "arithmetic", a name in KNOWN, or a data set on the hub,
    owner/name, with :folder where it has several configurations.
    """
    assert split in ("train", "test"), split
    if source == "arithmetic":
        problems = [Problem(*fields) for fields in arithmetic(split)]
    elif str(source).endswith(SUFFIXES):
        problems = read_problems(Path(source))
    elif source in KNOWN or re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w./-]+)?", source):
        problems = [p for path in fetch(source, split) for p in read_problems(path)]
    else:
        raise ValueError(f"unknown data {source!r}: give a file ending in {', '.join(SUFFIXES)}, a "
                         f"hub id owner/name, arithmetic, or one of {', '.join(KNOWN)}")
    readable = [p for p in problems if is_readable is None or is_readable(p.answer)]
    return readable, len(problems) - len(readable)


def has_test_split(source):
    """Whether a data set holds out problems itself; a file of one's own does not."""
    if str(source).endswith(SUFFIXES):
        return False
    try:
        return source == "arithmetic" or bool(fetch(source, "test"))
    except NoSplit:
        return False


def fetch(source, split):
    """One split in the Hugging Face cache, downloaded if need be -> local paths."""
    where = KNOWN.get(source, source)
    repo, _, folder = where.partition(":")
    patterns = [f"{folder}*{suffix}" for suffix in SUFFIXES]
    try:
        if repo == "https":
            return [download(where.format(split=split), f"{source}_{split}.jsonl")]
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
    if not folders:
        raise NoSplit(f"{where} has no {split} files")
    if len(folders) > 1:
        raise ValueError(f"{where} has several configurations, add one of :{', :'.join(folders)}")
    (files,) = folders.values()
    suffix = next(s for s in SUFFIXES if any(name.endswith(s) for name in files))
    return [name for name in files if name.endswith(suffix)]


def read_problems(path):
    problems = [to_problem(row, path, number) for number, row in read_rows(path)]
    if not problems:
        raise ValueError(f"{path}: holds no problems")
    return problems


def read_rows(path):
    """-> [(number, row)]: of a line, or of a row in a list or in parquet, counted from 1."""
    if not path.is_file():
        raise FileNotFoundError(f"no data file {path}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f"{path}: reading parquet needs pip install pyarrow") from None
        return list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
    rows = []
    number = 1
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            return list(enumerate(json.loads(text), 1))
        for number, line in enumerate(text.split("\n"), 1):  # splitlines() also cuts at U+2028
            if line.strip():
                rows.append((number, json.loads(line)))
    except ValueError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    return rows


def to_problem(row, path, number):
    """A row under any of the field names in use: GSM8K, MATH, DAPO, BigMath and their copies."""
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: not an object but {type(row).__name__}")
    question = row.get("question") or row.get("problem") or row.get("prompt")
    if isinstance(question, list) and isinstance(question[-1], dict):
        question = question[-1].get("content")   # DAPO's original: a chat, the user's turn last
    answer = gold(row)
    for what, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{path}:{number}: has no {what} (its fields: {', '.join(row)})")
    names = row.get("id"), row.get("unique_id"), f"{path.stem}-{number}"
    name = next(name for name in names if name is not None)
    return Problem(str(name), question.strip(), answer)


def gold(row):
    """The gold as text, or None: what follows GSM8K's ####, the last box of a MATH solution."""
    reward = row.get("reward_model")             # DAPO's original keeps the gold in there
    fields = {**row, **reward} if isinstance(reward, dict) else row
    for field in ("answer", "final_answer", "ground_truth", "solution"):
        value = fields.get(field)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            continue
        text = str(value).strip()
        if "####" in text:
            text = text.rsplit("####", 1)[1].strip().replace(",", "")
        elif field == "solution":                # the hub's DAPO and BigMath: a bare gold
            worked = len(text) > 100 or "\n" in text
            text = last_box(text) or ("" if worked else text)
        if text:
            return text


# -------------------------------------------------------------------------------------------------
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
        try:
            self.file = TokenizerFile.from_file(str(path))
        except Exception as error:               # the library has no narrower class
            raise ValueError(f"{path}: cannot be read as a tokenizer ({error})") from None
        self.file.encode_special_tokens = True   # <|im_end|> in a text stays text; see chat()
        vocab = self.file.get_vocab()            # with the added tokens
        self.vocab_size = max(vocab.values()) + 1        # Qwen2.5: 151,665
        if not {"<|im_start|>", "<|im_end|>"} <= vocab.keys():
            raise ValueError(f"{path}: lacks <|im_start|> or <|im_end|>: not Qwen's chat format")
        self.start = vocab["<|im_start|>"]
        self.stop = vocab["<|im_end|>"]
        end_ids = {self.stop, vocab.get("<|endoftext|>", self.stop)}
        for name in ("generation_config.json", "config.json"):
            eos = read_if_there(path.with_name(name)).get("eos_token_id")
            end_ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
        self.end_ids = sorted(end_ids)           # Qwen2.5: 151643 and 151645
        self.system = default_system(path.parent)

    def encode(self, text):
        return self.file.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Text of a completion without its end token; any other control token stays visible."""
        if ids and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return self.file.decode(ids, skip_special_tokens=False)

    def chat(self, text, system=None):
        """Ids of a system message, the model's own by default, a user's turn, an answer's begin."""
        system = system or self.system
        turns = [f"system\n{system}"] if system else []
        ids = []
        for turn in [*turns, f"user\n{text}"]:
            ids += [self.start, *self.encode(turn), self.stop, *self.encode("\n")]
        return ids + [self.start, *self.encode("assistant\n")]


def read_if_there(path):
    return read_json(path) if path.is_file() else {}


def default_system(folder):
    """The system message that the chat template adds, or None; Qwen's if there is no template."""
    template = read_if_there(folder / "tokenizer_config.json").get("chat_template")
    file = folder / "chat_template.jinja"        # where transformers >= 4.52 saves it
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    if template is None:
        return QWEN_SYSTEM
    # A jinja string: newline and backslash are escaped. {{ }} or a quote would mean a variable.
    text = re.search(r"<\|im_start\|>system(?:\\n|\n)([^'\"<]+)<\|im_end\|>", template)
    return text and text[1].replace("\\n", "\n").replace("\\\\", "\\")


def encode_prompts(tokenizer, problems, style, max_tokens):
    """-> problems with their prompts, number left out for a prompt of more than max_tokens."""
    request, system = STYLES[style]
    encoded = [replace(p, prompt=tokenizer.chat(p.question + request, system)) for p in problems]
    kept = [p for p in encoded if len(p.prompt) <= max_tokens]
    return kept, len(encoded) - len(kept)


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
