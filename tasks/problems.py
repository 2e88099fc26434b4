"""
Problems from a file, a data set or a generator.

    problems = load_problems("gsm8k", "train")
    chosen = problems_at(problems, seed, range(0, 16))       # then range(16, 32), and so on

A row without a question or an answer is an error that names the file and line, because skipping it
would silently train on a different data set.
"""
import math
import os
import random
import re
import urllib.request
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, lru_cache
from http.client import HTTPException
from itertools import compress
from pathlib import Path

from huggingface_hub import constants

import hub
from files import UserError, first_line, parse_lines, read_rows, short_repr, write_atomically
from grader.boxes import last_box
from tasks.arithmetic import arithmetic


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str                                  # the gold answer; may be "" with a --reward
    prompt: list[int] | None = None              # token ids, once encode_prompts has made them
    row: dict | None = field(default=None, compare=False)        # all fields, as in the file
    system: str | None = None                    # the system message, if the row has one

    def fields(self) -> dict:
        """All fields of the row plus these three, as a user's function gets them."""
        return (self.row or {}) | {"id": self.id, "question": self.question, "answer": self.answer}


# -----------------------------------------------------------------------------
# Where problems come from

# If a data set on the hub has several kinds of files, the first of these is read, since .parquet
# needs pyarrow.
SUFFIXES = (".jsonl", ".json", ".parquet")
# Short names for a URL or for owner/name[:folder] on the Hugging Face hub, which has GSM8K only as
# parquet.
KNOWN = {
    "gsm8k": "https://raw.githubusercontent.com/openai/grade-school-math/master/"
             "grade_school_math/data/{split}.jsonl",
    "math": "nlile/hendrycks-MATH-benchmark",    # train 12,000 problems, test MATH-500
}
HUB_ID = r"[\w.-]+/[\w.-]+(:[\w./-]+)?"
TIMEOUT = 60                                     # seconds without data from the server


def check_source(source: str) -> None:
    """UserError for an invalid --data. Downloads nothing."""
    if names_a_file(source):
        if not Path(source).is_file():
            raise UserError(f"data file {source} does not exist")
    elif source not in ("arithmetic", *KNOWN):
        if Path(source).is_file() or not re.fullmatch(HUB_ID, source):
            raise UserError(f"unknown data {source}: give a file ending in {', '.join(SUFFIXES)}, "
                            f"a hub id owner/name, arithmetic, or one of {', '.join(KNOWN)}")


def load_problems(source: str, split: str = "train", needs_gold: bool = True) -> list[Problem]:
    """The problems of --data, without prompts.

    source: a file, which has only one split; "arithmetic", the generator; a name in KNOWN; or
    owner/name of a data set on the hub, plus :folder if several folders have its files.
    """
    assert split in ("train", "test"), split
    check_source(source)
    if source == "arithmetic":
        return [Problem(*fields) for fields in arithmetic(split)]
    paths = [Path(source)] if names_a_file(source) else fetch_split(source, split)
    problems = [to_problem(row, path, number, needs_gold)
                for path in paths for number, row in read_rows(path)]
    if not problems:
        raise UserError(f"{source} has no {split} problems")
    return problems


def names_a_file(source: str) -> bool:
    return str(source).endswith(SUFFIXES)


def has_test_split(source: str) -> bool:
    """Does a data set have a test split? A file never does."""
    if names_a_file(source):
        return False
    return source == "arithmetic" or fetch_split(source, "test") != []


def fetch_split(source: str, split: str) -> list[Path]:
    """The local files of one split, downloaded if necessary; [] if the data set has no such split.

    On the hub, file names begin with the split: main/train-00000-of-00002.parquet. UserError if
    several folders have such files.
    """
    where = KNOWN.get(source, source).format(split=split)
    repository, _, folder = where.partition(":")
    if repository == "https":
        return [download(where, f"{source}_{split}.jsonl")]
    root = hub_files(repository, folder)
    files = sorted(path for path in (root / folder).rglob(f"{split}*")
                   if names_a_file(path) and re.match(rf"{split}(?![a-z])", path.name))
    folders = sorted({path.parent.relative_to(root).as_posix() for path in files})
    if len(folders) > 1:
        choices = " or ".join(f"{repository}:{folder}" for folder in folders)
        raise UserError(f"{where} has {split} files in several folders: give {choices}")
    kinds = [[path for path in files if path.suffix == suffix] for suffix in SUFFIXES]
    chosen = next(filter(None, kinds), [])
    for path in chosen:                          # train-00000-of-00002.parquet
        count = re.search(r"-of-(\d+)\.", path.name)
        if count and len(chosen) != int(count[1]):
            raise UserError(f"{where} has {len(chosen)} {split} files, but {path.name} is one of "
                            f"{int(count[1])}")
    return chosen


@cache
def hub_files(repository: str, folder: str) -> Path:
    """The local copy of a data set on the hub. Cached, since it has both splits."""
    patterns = [os.path.join(folder, f"*{suffix}") for suffix in SUFFIXES]
    return hub.snapshot(f"--data {repository}", repository, patterns, "dataset")


def download(url: str, name: str) -> Path:
    """The local copy of a file with a row per line, downloaded if necessary."""
    path = Path(constants.HF_HOME) / "qerl" / name
    if not path.exists():
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                data = response.read()           # IncompleteRead if the connection breaks off
            text = data.decode("utf-8-sig")
        except (OSError, HTTPException, ValueError) as error:
            raise UserError(f"{url}: cannot be downloaded ({first_line(error)})") from None
        # Not all servers say how long a file is, and a proxy may answer with a page of its own.
        for number, row in parse_lines(text, url) or [(1, None)]:
            to_problem(row, url, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return path


# -----------------------------------------------------------------------------
# Rows

# The names of these fields in data sets. The first nonempty one counts.
QUESTIONS = "question", "problem", "prompt"
GOLDS = "answer", "final_answer", "ground_truth", "solution"
# A conversation as text: JSON, Python's repr of it, or a chat template's output.
CHAT_AS_TEXT = re.compile(r"""\s*(<\|(im_start|begin_of_text|start_header_id)\|>|(<s>)?\s*\[INST\]"""
                          r"""|\[?\s*\{\s*["'](role|content|from|value)["']\s*:)""")
# A number whose commas separate thousands, such as 1,234,567 or 1,234.5, but not 0,5 or 1,2.
GROUPED_DIGITS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")


def to_problem(row: object, path: str | Path, number: int, needs_gold: bool = True) -> Problem:
    """The problem in a row of GSM8K, MATH, DAPO, BigMath or any file with the same field names.

    path, number: file and line, for messages. UserError if the row can't be used.
    """
    where = f"{path}:{number}"
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {short_repr(row)}")
    system = None
    match next((row[name] for name in QUESTIONS if row.get(name) not in (None, "")), ""):
        case str(text) if CHAT_AS_TEXT.match(text):
            raise UserError(f"{where}: the question is a conversation in the form of text: expected "
                            f"its words, or a list of turns, got {short_repr(text)}")
        case str(text) | [{"role": "user", "content": str(text)}]:
            question = text.strip()
        case [{"role": "system", "content": str(first)}, {"role": "user", "content": str(text)}]:
            system, question = first, text.strip()
        case other:
            raise UserError(f"{where}: the question must be text, or a chat with one user turn "
                            f"after at most one system turn, got {short_repr(other)}")
    answer = find_gold(row, where, needs_gold)
    for what, value, names in ("question", question, QUESTIONS), ("answer", answer, GOLDS):
        if not value and (what == "question" or needs_gold):
            held = {name: row[name] for name in names if name in row} or list(row)
            raise UserError(f"{where}: no {what}: expected it in {' or '.join(names)}, but the row "
                            f"has {short_repr(held)}")
    try:
        (question + (answer or "") + (system or "")).encode()
    except UnicodeEncodeError as error:          # JSON allows "\ud800", half of a pair
        raise UserError(f"{where}: not valid Unicode ({error})") from None
    names = row.get("id"), row.get("unique_id"), f"{Path(path).stem}-{number}"
    name = next(str(name) for name in names if name is not None)
    return Problem(name, question, answer or "", row=row, system=system)


def find_gold(row: dict, where: str = "", needed: bool = False) -> str | None:
    """The gold answer of a row as text, or None.

    In GSM8K it follows #### in a worked solution, in MATH it is in the solution's last box. The
    first field of GOLDS with an answer counts. needed: UserError, naming `where`, if an earlier
    field has a value of another type.
    """
    reward = row.get("reward_model")             # has the gold answer in the original DAPO
    fields = {**row, **reward} if isinstance(reward, dict) else row
    for name in GOLDS:
        value = fields.get(name)
        if value is None or value != value:      # in a table, NaN stands for an empty cell
            continue
        if type(value) not in (str, int, float) or value in (math.inf, -math.inf):
            if needed:
                raise UserError(f"{where}: {name} must be text or a number, got "
                                f"{short_repr(value)}")
            continue
        text = (plain_number(value) if isinstance(value, float) else str(value)).strip()
        marked = "####" in text
        if marked:
            text = text.rsplit("####", 1)[1].strip()
        boxed = last_box(text)
        if boxed:
            text = boxed
        elif marked and not re.search(r"[(\[{]", text):         # (1,234) is a pair, not a number
            text = GROUPED_DIGITS.sub(lambda number: number[0].replace(",", ""), text)
        elif name == "solution" and not marked and (len(text) > 100 or "\n" in text):
            # DAPO and BigMath on the hub have just the gold answer here. A long text without a box
            # is a worked solution whose answer can't be found.
            continue
        if text:
            return text


def plain_number(value: float) -> str:
    """A float without an exponent, rounded to 12 digits unless it is an integer. str() writes
    3e-05, which as math is 3 times e, minus 5, and 0.30000000000000004, which isn't 0.3.
    """
    if value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    rounded = Decimal(f"{value:.12g}")
    if float(rounded) != value == c_float(value).value:          # a table's fp32 has 7 digits
        rounded = Decimal(f"{value:.7g}")
    return f"{rounded:f}"


# -----------------------------------------------------------------------------
# Which problems a step asks

WAIT = 8                                         # steps until a problem is asked again


def choose_problems(n: int, seed: int, size: int, next_new: int, queue: list, step: int,
                    replay: float) -> tuple[list[int], list[int]]:
    """A step's `size` problems, as numbers below n: those asked again, and new ones, which begin at
    place next_new of the run's order.

    replay: the largest share that is asked again. These problems come from `queue`: those asked
    WAIT or more steps ago, the earliest first. Their answers earned different rewards and often do
    so again; answers with equal rewards would have advantages of 0.
    """
    new = problems_at(range(n), seed, range(next_new, next_new + size))
    again = [number for asked, number in queue if asked <= step - WAIT and number not in new]
    again = again[:most_again(n, size, replay)]
    return again, new[:size - len(again)]


def most_again(n: int, size: int, replay: float) -> int:
    """How many of a step's `size` problems out of n may be asked again. 0 if all n come as new ones
    within WAIT steps or so, which leaves none to ask again.
    """
    return min(int(size * replay + 1e-9), size - 1) if n > WAIT // 2 * size else 0


def requeue(queue: list, chosen: list[int], split: list[bool], step: int, size: int) -> list:
    """The queue of choose_problems() after a step that asked `chosen`: [step, number] each, the
    earliest first. split: whether the rewards of each differed. It keeps the last WAIT * size: the
    others wait for the next epoch.
    """
    waiting = [one for one in queue if one[1] not in chosen]
    waiting += [[step, number] for number in dict.fromkeys(compress(chosen, split))]
    return waiting[-WAIT * size:]


def problems_at(problems: Sequence, seed: int, places: range) -> list:
    """The problems at these places in a run's order, which begins at place 0.

    Each epoch takes every problem once, in its own order. A step that crosses into the next epoch
    may have a problem twice.
    """
    n = len(problems)
    return [problems[epoch_order(n, seed, place // n)[place % n]] for place in places]


@lru_cache(2)                                    # a step may cross from one epoch into the next
def epoch_order(n: int, seed: int, epoch: int) -> list[int]:
    """An epoch's order, a permutation of range(n). It depends only on the arguments, so a resumed
    run needs to know only its next place.
    """
    indices = list(range(n))
    random.Random(f"order/{seed}/{epoch}").shuffle(indices)
    return indices
