"""
Problems: from a file, a data set's name or a generator.

    problems = load_problems("gsm8k", "train")
    chosen = problems_at(problems, seed, range(0, 16))           # next range(16, 32), and so on

A row without a question or an answer is an error that names its file and line. To skip the row
would mean to train on another data set than the one that was named.
"""
import math
import os
import random
import re
import urllib.request
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from files import read_rows, short_repr
from rewards import last_box
from tasks.arithmetic import arithmetic


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str                                  # the gold answer; "" where a --reward needs none
    prompt: list[int] | None = None              # token ids, once encode_prompts has made them
    row: dict | None = field(default=None, compare=False)        # every field as it is in the file
    system: str | None = None                    # the system message, where the row has one

    def fields(self) -> dict:
        """What a function of the user's is given: every field of the row, and these three."""
        return (self.row or {}) | {"id": self.id, "question": self.question, "answer": self.answer}


# -----------------------------------------------------------------------------
# Where problems come from

# Kinds of files that can be read. If a hub data set has several kinds, the first in this order is
# taken: .parquet needs pyarrow.
SUFFIXES = (".jsonl", ".json", ".parquet")
# Short names for owner/name[:folder] on the Hugging Face hub. GSM8K has a URL of its own, since the
# hub has it as parquet only.
KNOWN = {
    "gsm8k": "https://raw.githubusercontent.com/openai/grade-school-math/master/"
             "grade_school_math/data/{split}.jsonl",
    "math": "nlile/hendrycks-MATH-benchmark",    # train 12,000 problems, test MATH-500
    "math500": "HuggingFaceH4/MATH-500",         # test only
    "dapo": "open-r1/DAPO-Math-17k-Processed:en",            # train only
    "bigmath": "open-r1/Big-Math-RL-Verified-Processed:level_3_4_5",
}
HUB_ID = r"[\w.-]+/[\w.-]+(:[\w./-]+)?"


def check_source(source: str) -> None:
    """ValueError for a --data that cannot be meant; downloads nothing."""
    if names_a_file(source):
        if not Path(source).is_file():
            there = os.path.lexists(source)
            raise ValueError(f"{source} is no regular file" if there else
                             f"there is no data file {source}")
    elif source == "arithmetic" or source in KNOWN:
        return
    elif Path(source).is_file():
        raise ValueError(f"data file {source}: its name must end in {', '.join(SUFFIXES)}")
    elif not re.fullmatch(HUB_ID, source):
        raise ValueError(f"unknown data {source!r}: give a file ending in {', '.join(SUFFIXES)}, a "
                         f"hub id owner/name, arithmetic, or one of {', '.join(KNOWN)}")


def load_problems(source: str, split: str = "train", needs_gold: bool = True) -> list[Problem]:
    """The problems of --data, without prompts.

    source: a file, which is one split by itself; "arithmetic", the generator; a name in KNOWN; or
    owner/name of a data set on the hub, with :folder where its files are in several folders.
    """
    assert split in ("train", "test"), split
    check_source(source)
    if source == "arithmetic":
        return [Problem(*fields) for fields in arithmetic(split)]
    paths = [Path(source)] if names_a_file(source) else fetch_split(source, split)
    problems = [to_problem(row, path, number, needs_gold)
                for path in paths for number, row in read_rows(path)]
    if not problems:
        raise ValueError(f"{source}: holds no {split} problems")
    return problems


def names_a_file(source: str) -> bool:
    return str(source).endswith(SUFFIXES)


def has_test_split(source: str) -> bool:
    """Whether a data set holds out problems itself; a file of one's own does not."""
    if names_a_file(source):
        return False
    return source == "arithmetic" or fetch_split(source, "test") != []


def fetch_split(source: str, split: str) -> list[Path]:
    """The local files of one split, downloaded if need be; [] if the data set does not have it."""
    where = KNOWN.get(source, source).replace("{split}", split)
    repository, _, folder = where.partition(":")
    patterns = [f"{folder}/*{suffix}" if folder else f"*{suffix}" for suffix in SUFFIXES]
    try:
        if repository == "https":
            return [download(where, f"{source}_{split}.jsonl")]
        root = huggingface_hub.snapshot_download(repository, repo_type="dataset",
                                                 allow_patterns=patterns)
    except Exception as error:                   # the hub's, httpx's, urllib's: no common class
        raise ValueError(f"cannot fetch {where}: {type(error).__name__}: {error}") from error
    names = [path.relative_to(root).as_posix() for path in Path(root).rglob("*")]
    return [Path(root) / name for name in pick_files(names, where, split)]


def download(url: str, name: str) -> Path:
    path = Path(constants.HF_HOME) / "qerl" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part, _ = urllib.request.urlretrieve(url, f"{path}.{os.getpid()}.part")
        os.replace(part, path)                   # a download cut short never has the file's name
    return path


def pick_files(names: list[str], where: str, split: str) -> list[str]:
    """The files of owner/name or owner/name:folder that belong to a split: their names begin with
    it, as in main/train-00000-of-00002.parquet. ValueError if several folders have such files.
    """
    repository, _, folder = where.partition(":")
    files = [name for name in sorted(names)
             if name.startswith(f"{folder}/" if folder else "") and names_a_file(name)
             and re.match(rf"{split}(?![a-z])", Path(name).name)]
    folders = sorted({Path(name).parent.as_posix() for name in files})
    if len(folders) > 1:
        choices = " or ".join(f"{repository}:{folder}" for folder in folders)
        raise ValueError(f"{where} has {split} files in several folders: give {choices}")
    by_suffix = [[name for name in files if name.endswith(suffix)] for suffix in SUFFIXES]
    return next(filter(None, by_suffix), [])


# -----------------------------------------------------------------------------
# Rows

# What data sets call these fields. The first one that holds something counts.
QUESTIONS = "question", "problem", "prompt"
GOLDS = "answer", "final_answer", "ground_truth", "solution"
# A number whose commas separate thousands, as 1,234,567 and 1,234.5. Not 0,5 and not 1,2.
GROUPED_DIGITS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")


def to_problem(row: object, path: Path, number: int, needs_gold: bool = True) -> Problem:
    """A row of GSM8K, MATH, DAPO, BigMath or any file whose fields are called like theirs.

    path, number: the row's place, for messages. ValueError if it cannot be used.
    """
    where = f"{path}:{number}"
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object but {type(row).__name__}")
    question = next((row[name] for name in QUESTIONS if row.get(name)), None)
    system = None
    if isinstance(question, list) and all(isinstance(turn, dict) for turn in question):
        turns = [(turn.get("role"), type(turn.get("content"))) for turn in question]
        if turns not in ([("user", str)], [("system", str), ("user", str)]):
            raise ValueError(f"{where}: has no question: a chat must be a user's text, or a "
                             f"system's and a user's; this one is {short_repr(question)}")
        system = question[0]["content"] if turns[1:] else None
        question = question[-1]["content"]
    answer = find_gold(row)
    for what, names, value in (("question", QUESTIONS, question), ("answer", GOLDS, answer)):
        needed = what == "question" or needs_gold
        if needed and value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: the {what} is {short_repr(value)}, expected a text")
        if needed and not (value and value.strip()):
            raise ValueError(f"{where}: has no {what}: none of {', '.join(names)} holds one (its "
                             f"fields: {', '.join(row)})")
    names = row.get("id"), row.get("unique_id"), f"{path.stem}-{number}"
    name = next(str(name) for name in names if name is not None)
    try:
        "".join([name, question, answer or "", str(system)]).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: holds half a surrogate pair, which is no character") from None
    return Problem(name, question.strip(), answer or "", row=row, system=system)


def find_gold(row: dict) -> str | None:
    """The gold answer of a row as text, or None.

    GSM8K's is what follows #### in a worked solution; MATH's is in the solution's last box. Of the
    fields in GOLDS, the first one that holds an answer counts.
    """
    reward = row.get("reward_model")             # the original DAPO keeps the gold in there
    fields = {**row, **reward} if isinstance(reward, dict) else row
    for name in GOLDS:
        value = fields.get(name)
        if type(value) not in (str, int, float):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            continue
        text = str(value).strip()
        marked = "####" in text
        if marked:
            text = text.rsplit("####", 1)[1].strip()
        boxed = last_box(text)
        if boxed:
            text = boxed
        elif marked and not re.search(r"[(\[{]", text):         # (1,234) is a pair, not a number
            text = GROUPED_DIGITS.sub(lambda number: number[0].replace(",", ""), text)
        elif name == "solution" and not marked:
            # The hub's DAPO and BigMath have the bare gold here. A long text without a box is a
            # worked solution whose answer cannot be found.
            worked = len(text) > 100 or "\n" in text
            text = "" if worked else text
        if text:
            return text


# -----------------------------------------------------------------------------
# The order in which a run takes problems

def problems_at(problems: list[Problem], seed: int, places: range) -> list[Problem]:
    """The problems at these places in the order of a run; place 0 is that of the first one.

    Each epoch takes every problem once, in an order of its own. A step at the end of an epoch goes
    on into the next.
    """
    n = len(problems)
    return [problems[epoch_order(n, seed, place // n)[place % n]] for place in places]


@lru_cache(2)                                    # a step may end one epoch and begin the next
def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """The permutation of range(n) that an epoch follows. It follows from the seed and the epoch
    alone: a resumed run needs its next place and nothing else.
    """
    indices = list(range(n))
    random.Random(f"order/{seed}/{epoch}").shuffle(indices)
    return indices
