"""
Calls the user's functions: --reward module:function and --prompt-style module:function.

    reward = Reward("my_rewards:length")         # my_rewards.py in the working directory
    reward("the answer is 5", problem)           # {"reward": 15.0}

Any error in the user's file, from a syntax error to a division by zero at step 400, becomes one
line with the flag, the file and the line number.

The module must be a file in the working directory or in examples/, never a package or an installed
module: `sympy:sympify` would evaluate text written by a model. Nor may it be in a run folder, since
someone else's run.json could name a file next to it.
"""
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from files import Stopped, UserError, first_line, short_repr

EXAMPLES = Path(__file__).parent.parent / "examples"
# The largest absolute reward. Advantages can be as large, gradients grow with them, and squared
# gradients must stay below 3.4e38, the largest fp32 number.
LARGEST_REWARD = 1e15
# Parameters that a reward may have besides the first two: def reward(completion, problem, length);
# **kwargs gets them all.
# group: the group's completions. length: the completion's tokens, including its end token.
# finished: it wasn't cut off.
ASKED_BY_NAME = "group", "length", "finished"
SHA256 = {}                                      # module:function -> digest of its file when loaded


class Reward:
    """--reward module:function, called as function(completion, problem) for every completion.

    `completion` is the answer's text; it begins with <think> if the prompt ended with it. `problem`
    is a dict of all fields in the problem's row, plus id, question and answer. Parameters named in
    ASKED_BY_NAME get those values. The function returns a number, or a dict of numbers to be
    summed; rewards.grade_rows explains the part `shaping`. NaN leaves the completion out of
    training. No number or sum may exceed LARGEST_REWARD. UserError if the function has other
    parameters without a default.
    """

    def __init__(self, spec: str):
        self.name = f"--reward {spec}"
        self.function = load_function(spec, "--reward")
        signature = inspect.signature(self.function)
        takes_all = inspect.Parameter.VAR_KEYWORD in (
            one.kind for one in signature.parameters.values())               # **kwargs
        self.asked = [name for name in ASKED_BY_NAME
                      if takes_all or name in signature.parameters]
        try:
            signature.bind(None, None, **dict.fromkeys(self.asked))
        except TypeError as error:
            raise UserError(f"{self.name} is called as function(completion, problem), and with "
                            f"{', '.join(ASKED_BY_NAME)} if it has parameters of these names: "
                            f"{error}") from None

    def __call__(self, completion: str, problem, **about: object) -> dict[str, float]:
        """The reward of one completion: its parts by name.

        problem: a problems.Problem. about: a value for each name in ASKED_BY_NAME.
        Raises Stopped if the function fails or returns something that can't be trained on.
        """
        what = f"problem {problem.id}, completion {completion[:80]!r}"
        asked = {name: about[name] for name in self.asked}
        value = call_users(self.name, self.function, what, completion, problem.fields(), **asked)
        parts = value if isinstance(value, dict) else {"reward": value}
        try:
            numbers = {str(name): float(part) for name, part in parts.items()
                       if not isinstance(part, (str, bytes))}
        except (TypeError, ValueError, OverflowError):
            numbers = {}
        if len(numbers) < len(parts) or set(numbers) <= {"shaping"} or any(
                abs(number) > LARGEST_REWARD
                for number in (*numbers.values(), sum(numbers.values()))):
            raise Stopped(f"{self.name} returned {short_repr(value)}, expected a number or a dict "
                          "of numbers (not only `shaping`), each and their sum in "
                          f"[-{LARGEST_REWARD:g}, {LARGEST_REWARD:g}], or NaN for an answer that "
                          f"can't be scored ({what})")
        return numbers


def call_users(name: str, function: Callable, what: str, *arguments: object,
               **named: object) -> object:
    """Calls a user's function. Its exceptions become Stopped, with the line in the user's file.

    name, what: the flag and the problem, for messages. A call that never returns isn't interrupted.
    """
    try:
        with forks_end_here():
            return function(*arguments, **named)
    except (KeyboardInterrupt, Stopped):         # a signal during the call
        raise
    except BaseException as error:               # asyncio.CancelledError is not an Exception
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise Stopped(f"{name}: {type(error).__name__}: {first_line(error)} at {at.filename}:"
                      f"{at.lineno} ({what})") from None


@contextmanager
def forks_end_here() -> Iterator[None]:
    """A context for users' code. A process that this code forks ends where it would leave the
    context, instead of training on or saving: with the code of its sys.exit(), with 0 if it
    returns, or with 1 after a traceback.
    """
    parent = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != parent:
            error = sys.exc_info()[1]
            code = error.code if isinstance(error, SystemExit) else error
            if not isinstance(code, int | None):
                traceback.print_exc()
                code = 1
            os._exit(code or 0)                  # the exit handlers are the parent's


def load_function(spec: str, flag: str) -> Callable:
    """The function named by "module:function". UserError naming `flag` if there is none."""
    module_name, _, name = spec.partition(":")
    if not (module_name.isidentifier() and name.isidentifier()):
        raise UserError(f"{flag} takes module:function, such as my_rewards:score, got "
                        f"{short_repr(spec)}")
    places = [folder / f"{module_name}.py" for folder in (Path.cwd(), EXAMPLES)]
    path = next(filter(Path.is_file, places), None)
    if path is None:
        raise UserError(f"{flag} {spec}: no {module_name}.py in {Path.cwd()} or {EXAMPLES}")
    for parent in (*path.parents, *path.resolve().parents):      # for a link, both ends
        if (parent / "run.json").exists():
            raise UserError(f"{flag} {spec}: {path} is in a run folder ({parent} has a run.json), "
                            "and code is never loaded from there: copy it elsewhere")
    if str(path.parent) not in sys.path:
        # Lets the user's file import its neighbors. It goes last, so a learner.py or model.py there
        # never replaces ours.
        sys.path.append(str(path.parent))
    SHA256[spec] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    try:
        module = load_file(module_name, path)
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag} {spec}: cannot import {path} ({type(error).__name__}: {error})"
                        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{flag} {spec}: {path} has no function {name!r}")
    return function


def digests(flags) -> dict[str, str | None]:
    """reward_sha256 and prompt_style_sha256, for run.json: digests of the files that the functions
    came from, which may change between a run's starts. None: it isn't the user's, or not loaded.

    flags: has --reward and --prompt-style as `reward` and `prompt_style`, or lacks one.
    """
    return {f"{name}_sha256": SHA256.get(getattr(flags, name, None))
            for name in ("reward", "prompt_style")}


@cache
def load_file(name: str, path: Path) -> ModuleType:
    """Imports a module from its file. Cached, so two flags with the same module share its globals.

    dataclasses look it up in sys.modules, where it is called "user's NAME" because NAME may also be
    one of our own modules, imported later.
    """
    spec = importlib.util.spec_from_file_location(f"user's {name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with forks_end_here():
        spec.loader.exec_module(module)
    return module
