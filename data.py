"""
Problems and prompts: a file, a data set's name or a generator in, token ids out. Text only: nothing here knows tensors.

    problems, unreadable = load_problems("gsm8k", "train", is_readable)
    tokenizer = Tokenizer(folder)
    problems, prompts, too_long = encode_prompts(tokenizer, problems, "boxed", max_tokens=512)
    for i in step_indices(len(problems), seed, cursor, 16): ...       # then cursor += 16

Every row becomes Problem(id, question, answer), where answer is the gold as text. A row without one ends the load with
its file and line: a silently skipped row is a different data set. What is left out on purpose is counted and returned:
golds that the grader cannot read (no completion could ever be right) and prompts over the limit. A prompt is never cut:
its end holds the question. The order is a function of (seed, epoch) alone, so a resumed run needs one integer, cursor.

The chat format is Qwen's ChatML written as ids, without jinja; of the template only its default system message is read.
Text of a problem never becomes a control token, even if it spells <|im_end|>.

Longer than its siblings because it holds four plain parts: sources, the generator, prompts with their tokenizer, order.
"""
import json
import os
import random
import re
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from tokenizers import Tokenizer as TokenizerFile

from rewards import last_box


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str


# -----------------------------------------------------------------------------
# Where rows come from.

SUFFIXES = (".jsonl", ".json", ".parquet")          # in order of preference: only the last needs pyarrow
# Where a bare name is fetched: owner/name[:folder] on the Hugging Face hub, or a URL. GSM8K's own repository has it as
# JSON lines; the hub only as parquet.
KNOWN = {
    "gsm8k": "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{split}.jsonl",
    "math": "nlile/hendrycks-MATH-benchmark",        # train 12,000, test = MATH-500
    "math500": "HuggingFaceH4/MATH-500",             # test only
    "dapo": "open-r1/DAPO-Math-17k-Processed:en",    # train only
    "bigmath": "open-r1/Big-Math-RL-Verified-Processed:level_3_4_5",
}


def load_problems(source, split="train", is_readable=None):
    """-> (problems, number of golds refused by is_readable(answer)).

    source: a .jsonl, .json or .parquet file (a file is one split by itself), "arithmetic", a name in KNOWN, or a
    Hugging Face data set "owner/name", with ":folder" where it has several configurations.
    """
    assert split in ("train", "test"), split
    if source == "arithmetic":
        problems = arithmetic(split)
    elif str(source).endswith(SUFFIXES):
        problems = read_file(Path(source))
    elif source in KNOWN or re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w./-]+)?", source):
        problems = [p for path in fetch(source, split) for p in read_file(path)]
    else:
        raise ValueError(f"unknown data {source!r}: give a file ending in {', '.join(SUFFIXES)}, a hub id owner/name, "
                         f"arithmetic, or one of {', '.join(KNOWN)}")
    readable = [p for p in problems if is_readable is None or is_readable(p.answer)]
    return readable, len(problems) - len(readable)


class NoSplit(ValueError):
    """A data set on the hub without files of that split."""


def has_test_split(source):
    """Whether a data set holds out problems itself; a file of one's own does not."""
    if str(source).endswith(SUFFIXES):
        return False
    if source in KNOWN or source == "arithmetic":
        return True
    try:
        return bool(fetch(source, "test"))
    except NoSplit:
        return False


def read_file(path):
    """All problems of one file; line numbers (rows in a list or parquet) start at 1, as editors count."""
    if not path.is_file():
        raise FileNotFoundError(f"no data file {path}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f"{path}: reading parquet needs pyarrow (pip install pyarrow), or convert it to .jsonl")
        rows = enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
    else:
        rows = read_json(path)
    problems = [to_problem(row, path, number) for number, row in rows]
    if not problems:
        raise ValueError(f"{path}: holds no problems")
    return problems


def read_json(path):
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            yield from enumerate(json.loads(text), 1)
            return
    except ValueError as error:                      # of UTF-8 and of JSON alike
        raise ValueError(f"{path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): it also cuts at U+2028 inside a string
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None


def to_problem(row, path, number):
    """One row under any of the field names in use (GSM8K, MATH, DAPO, BigMath and their copies)."""
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: not an object but {type(row).__name__}")
    question = next((row[f] for f in ("question", "problem", "prompt") if row.get(f)), None)
    if isinstance(question, list):                   # DAPO's original: a chat; its last turn is the user's
        question = question[-1].get("content") if isinstance(question[-1], dict) else None
    answer = gold(row)
    for what, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{path}:{number}: has no {what} (its fields: {', '.join(map(str, row))})")
    name = next((row[f] for f in ("id", "unique_id") if row.get(f) is not None), f"{path.stem}-{number}")
    return Problem(str(name), question.strip(), answer)


def gold(row):
    """The gold of a row as text, or None. "... #### 1,234" (GSM8K) -> "1234"; a MATH solution -> its last box.

    The box is read as in a completion, so a solution scores against itself: \\boxed{2} and \\boxed{3} are one list.
    """
    reward = row.get("reward_model")                 # DAPO's original keeps the gold in there
    fields = {**row, **reward} if isinstance(reward, dict) else row
    for field in ("answer", "final_answer", "ground_truth", "solution"):
        value = fields.get(field)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            continue
        text = str(value).strip()
        if "####" in text:
            text = text.rsplit("####", 1)[1].strip().replace(",", "")
        elif field == "solution":
            # The hub's processed DAPO and BigMath call a bare gold "solution". Worked text without a box is no gold.
            text = last_box(text) or (text if len(text) <= 100 and "\n" not in text else "")
        if text:
            return text


def fetch(source, split):
    """Download one split into the Hugging Face cache (or find it there) -> local paths."""
    where = KNOWN.get(source, source)
    try:
        if where.startswith("https://"):
            path = Path(constants.HF_HOME) / "qerl" / f"{source}_{split}.jsonl"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                part, _ = urllib.request.urlretrieve(where.format(split=split), f"{path}.{os.getpid()}.part")
                os.replace(part, path)               # a download cut short never looks like a whole file
            return [path]
        repo, _, folder = where.partition(":")
        root = Path(huggingface_hub.snapshot_download(repo, repo_type="dataset",
                                                      allow_patterns=[f"{folder}*{s}" for s in SUFFIXES]))
    except Exception as error:                       # the hub's, httpx's and urllib's errors share no narrower class
        raise ValueError(f"cannot fetch {where}: {type(error).__name__}: {error}") from error
    return [root / name for name in pick_files([str(p.relative_to(root)) for p in root.rglob("*")], where, split)]


def pick_files(names, where, split):
    """The files of one split of "owner/name:folder"; as on the hub, a file that names no split is training data."""
    folders = {}
    for name in sorted(names):
        marks = re.findall(r"(?:^|[/_.-])(train|test|validation|valid|dev)(?=[/_.-])", name)
        if (name.startswith(where.partition(":")[2]) and name.endswith(SUFFIXES) and "dataset_info" not in name
                and (marks[-1] if marks else "train") == split):
            folders.setdefault(str(Path(name).parent), []).append(name)
    if not folders:
        raise NoSplit(f"{where} has no {split} files")
    if len(folders) > 1:
        raise ValueError(f"{where} has several configurations, add one of :{', :'.join(folders)}")
    (files,) = folders.values()
    return next(chosen for s in SUFFIXES if (chosen := [n for n in files if n.endswith(s)]))


# -----------------------------------------------------------------------------
# The built-in generator: word problems of one or two steps with whole numbers, for a run without network or GPU.

NAMES = "Tom Ann Sam Mia Ben Eva Max Zoe Leo Ida".split()
THINGS = "pens books cards coins shells apples stamps stones cups balls".split()
KINDS = (                                            # text, and the operations on a, b, c from left to right
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have?", "+"),
    ("{name} finds {a} {things} on Monday and {b} on Friday. How many {things} is that?", "+"),
    ("{name} has {a} red, {b} blue and {c} green {things}. How many {things} does {name} have?", "++"),
    ("{name} has {a} {things} and gives {b} away. How many {things} are left?", "-"),
    ("{name} has {a} {things} and {friend} has {b}. How many more {things} does {name} have?", "-"),
    ("{name} has {a} {things}, loses {b} and buys {c} more. How many {things} does {name} have?", "-+"),
    ("{name} has {a} {things}, finds {b} and sells {c}. How many {things} are left?", "+-"),
    ("{name} has {a} boxes with {b} {things} each. How many {things} is that?", "*"),
    ("{name} has {a} boxes with {b} {things} each and finds {c} more. How many {things} is that?", "*+"),
    ("{name} has {a} boxes with {b} {things} each and sells {c}. How many {things} are left?", "*-"),
)


def word_problem(rng):
    """-> question, steps. Steps are (left, op, right, result); the last result is the answer, none is below 1."""
    text, ops = rng.choice(KINDS)
    while True:
        numbers = [rng.randint(2, 9 if "*" in ops else 20) for _ in range(len(ops) + 1)]
        steps, total = [], numbers[0]
        for op, right in zip(ops, numbers[1:]):
            left, total = total, {"+": total + right, "-": total - right, "*": total * right}[op]
            steps.append((left, op, right, total))
        if all(step[3] >= 1 for step in steps):
            name, friend = rng.sample(NAMES, 2)
            values = dict(zip("abc", numbers), name=name, friend=friend, things=rng.choice(THINGS))
            return text.format(**values), steps


def is_held_out(question):
    """One question in eight belongs to the test split, by a hash of its text: no seed can mix the splits."""
    return zlib.crc32(question.encode()) % 8 == 0


def arithmetic(split, count=4096, seed=0):
    """`count` different problems of one split, the same on every machine."""
    rng, problems = random.Random(f"arithmetic/{seed}"), {}
    while len(problems) < count:
        question, steps = word_problem(rng)
        if is_held_out(question) == (split == "test") and question not in problems:
            problems[question] = Problem(f"arithmetic-{split}-{len(problems)}", question, str(steps[-1][3]))
    return list(problems.values())


# -----------------------------------------------------------------------------
# Prompt styles: question -> chat messages. Without a system message the model's own default is used.

def boxed(question):
    """Qwen2.5's own request for maths (model cards of Qwen2.5-Math)."""
    return [{"role": "user", "content": f"{question}\nPlease reason step by step, "
                                        "and put your final answer within \\boxed{}."}]


def tags(question):
    """The paper's format (<think>, then <answer>), in our words."""
    return [{"role": "system", "content": "Think the problem through before you answer. Write your reasoning between "
                                          "<think> and </think>, then only the final answer between <answer> and "
                                          "</answer>."},
            {"role": "user", "content": question}]


def plain(question):
    return [{"role": "user", "content": question}]


STYLES = {style.__name__: style for style in (boxed, tags, plain)}


# -----------------------------------------------------------------------------
# Token ids.

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


class Tokenizer:
    """tokenizer.json of a model folder. end_ids: all that end a completion; vocab_size: ids that mean something."""

    def __init__(self, folder):
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}")
        self.file = TokenizerFile.from_file(str(folder / "tokenizer.json"))
        self.file.encode_special_tokens = True       # text spelling <|im_end|> stays text; chat() adds the real ones
        vocab = self.file.get_vocab()                # with the added tokens
        self.vocab_size = max(vocab.values()) + 1    # Qwen2.5: 151,665; the embedding has 151,936 or 152,064 rows
        for token in ("<|im_start|>", "<|im_end|>"):
            assert token in vocab, f"{folder}: its tokenizer has no {token}, so its chat format is not ChatML"
        self.start, self.stop = vocab["<|im_start|>"], vocab["<|im_end|>"]
        end_ids = {self.stop} | ({vocab["<|endoftext|>"]} if "<|endoftext|>" in vocab else set())
        for name in ("generation_config.json", "config.json"):
            eos = read_config(folder / name).get("eos_token_id")
            end_ids |= set(eos if isinstance(eos, list) else [eos] if eos is not None else [])
        self.end_ids = sorted(end_ids)               # Qwen2.5: 151643 <|endoftext|> and 151645 <|im_end|>
        self.system = default_system(folder)

    def encode(self, text):
        return self.file.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Text of a completion, without the end token it stopped on; any other control token stays visible."""
        ids = list(ids)
        return self.file.decode(ids[:-1] if ids and ids[-1] in self.end_ids else ids, skip_special_tokens=False)

    def chat(self, messages):
        """Messages -> ids of <|im_start|>role\\ncontent<|im_end|>\\n ..., ending where the assistant begins."""
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}] + messages
        ids, newline = [], self.encode("\n")
        for message in messages:
            ids += [self.start] + self.encode(f"{message['role']}\n{message['content']}") + [self.stop] + newline
        return ids + [self.start] + self.encode("assistant\n")


def read_config(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def default_system(folder):
    """The system message that the chat template adds by itself; None if none, Qwen's if there is no template."""
    file = folder / "chat_template.jinja"            # where transformers >= 4.52 saves it
    template = (file.read_text(encoding="utf-8") if file.is_file() else
                read_config(folder / "tokenizer_config.json").get("chat_template"))
    if template is None:
        return QWEN_SYSTEM
    # A jinja string: its newline and backslash are still escaped. {{ }} or a quote would mean a variable, not a text.
    found = re.search(r"<\|im_start\|>system(?:\\n|\n)([^'\"<]+)<\|im_end\|>", template)
    return found[1].replace("\\n", "\n").replace("\\\\", "\\") if found else None


def encode_prompts(tokenizer, problems, style, max_tokens):
    """-> problems kept, their prompt ids, number dropped because the prompt has more than max_tokens tokens."""
    prompts = [tokenizer.chat(STYLES[style](problem.question)) for problem in problems]
    kept = [i for i, ids in enumerate(prompts) if len(ids) <= max_tokens]
    return [problems[i] for i in kept], [prompts[i] for i in kept], len(prompts) - len(kept)


# -----------------------------------------------------------------------------
# Order.

def order(n, seed, epoch):
    """The permutation of range(n) that epoch follows."""
    indices = list(range(n))
    random.Random(f"order/{seed}/{epoch}").shuffle(indices)
    return indices


def step_indices(n, seed, cursor, count):
    """The next `count` of n problems after `cursor` were taken, running on into the next epoch: nothing is skipped."""
    assert n > 0, n
    epochs = {e: order(n, seed, e) for e in range(cursor // n, (cursor + count - 1) // n + 1)}
    return [epochs[i // n][i % n] for i in range(cursor, cursor + count)]
