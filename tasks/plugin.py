"""
Calls functions that the user wrote: --reward module:function and --prompt-style module:function.

    reward = Reward("my_rewards:length")         # my_rewards.py in the working directory
    reward("the answer is 5", problem, group)    # {"reward": 15.0}

The file belongs to the user, so its errors do too. Whatever it does wrong, from a syntax error to
a division by zero at step 400, becomes one line that names the flag, the file and the line in it.

Where a function may come from. A run.json names functions too, and a run may come from somebody
else, with files beside it. So a module is a file of the working directory or of examples/, never a
package or an installed module: `sympy:sympify` would evaluate what a model has written. And it is
never a file of a folder that holds a run, whether the folder is named or is the working directory.
"""
import functools
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from tqdm import tqdm

from files import Stopped, UserError, first_line, short_repr

EXAMPLES = Path(__file__).parent.parent / "examples"
# The largest reward, either way. Undivided advantages are as large as rewards, gradients grow with
# them, and the squares of gradients must stay below 3.4e38, where fp32 ends.
LARGEST_REWARD = 1e15
SLOW = 60.0                                      # seconds until a line says that a call is slow
# What a reward may ask for as a keyword parameter: def reward(completion, problem, *, length).
# length: tokens of the completion, its end token included. finished: it was not cut off.
ASKED_BY_NAME = "length", "finished"


class Reward:
    """--reward module:function, called as function(completion, problem) for every completion.

    `problem` is a dict: every field of the problem's row, with id, question and answer. A function
    whose third parameter has no default is given the completions of the whole group as well, and
    one with keyword parameters of these names is given what ASKED_BY_NAME holds. It returns a
    number, or a dict of numbers that are summed; rewards.grade_rows says what the part
    `shaping` is. A NaN leaves the completion out of training. No number, and no sum of them, may be
    infinite or beyond LARGEST_REWARD. UserError for a function that cannot be called so.
    """

    def __init__(self, spec: str):
        self.name = f"--reward {spec}"
        self.function = load_function(spec, "--reward")
        signature = inspect.signature(self.function)
        needed = [p for p in signature.parameters.values()
                  if p.default is p.empty]       # not a weight=0.1 of the user's
        positional = [p for p in needed
                      if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.num_arguments = 3 if len(positional) > 2 else 2
        self.asked = [p.name for p in needed
                      if p.kind is p.KEYWORD_ONLY and p.name in ASKED_BY_NAME]
        try:
            signature.bind(*[None] * self.num_arguments, **dict.fromkeys(self.asked))
        except TypeError as error:
            raise UserError(f"{self.name}: is called as function(completion, problem); it may "
                            "have a third parameter, for the completions of the group, and the "
                            f"keyword parameters {' and '.join(ASKED_BY_NAME)}: {error}") from None

    def __call__(self, completion: str, problem, group: list[str], **about: object
                 ) -> dict[str, float]:
        """The parts of one completion's reward by name; `problem` is a problems.Problem.

        about: what ASKED_BY_NAME names, of this completion.
        Stopped if the function fails or returns anything but numbers that can be trained on.
        """
        what = f"problem {problem.id}, completion {completion[:80]!r}"
        arguments = (completion, problem.fields(), group)[:self.num_arguments]
        function = functools.partial(self.function, **{name: about[name] for name in self.asked})
        value = call_users(self.name, function, what, *arguments)
        parts = value if isinstance(value, dict) else {"reward": value}
        try:
            numbers = {str(name): float(part) for name, part in parts.items()
                       if not isinstance(part, str)}
        except (TypeError, ValueError, OverflowError):
            numbers = {}
        if len(numbers) < len(parts) or set(numbers) <= {"shaping"} or any(
                abs(number) > LARGEST_REWARD
                for number in (*numbers.values(), sum(numbers.values()))):
            raise Stopped(f"{self.name}: returned {short_repr(value)}, expected a number, or a "
                          "dict of numbers with one beside `shaping`, and a sum in "
                          f"[-{LARGEST_REWARD:g}, {LARGEST_REWARD:g}], or nan for what cannot be "
                          f"scored ({what})")
        return numbers


def call_users(name: str, function: Callable, what: str, *arguments: object) -> object:
    """Calls a user's function; if it raises, Stopped says where in the user's file.

    name: the flag; what: the problem that it was called for; both are for messages. A call that
    does not return is never ended, since nobody knows how long it may take, but tell_if_slow() says
    so.
    """
    folder = os.getcwd()
    returned = threading.Event()
    threading.Thread(target=tell_if_slow, args=(name, what, returned), daemon=True).start()
    try:
        return function(*arguments)
    except (KeyboardInterrupt, Stopped):         # a signal that came meanwhile
        raise
    except BaseException as error:               # asyncio.CancelledError is not an Exception
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise Stopped(f"{name}: {type(error).__name__}: {first_line(error)} at {at.filename}:"
                      f"{at.lineno} ({what})") from None
    finally:
        returned.set()
        os.chdir(folder)                         # the function may have left it; --out is relative


def tell_if_slow(name: str, what: str, returned: threading.Event) -> None:
    """Says after 1, 3, 7, 15, ... minutes that a call has not returned. On each rank: the others
    wait for this one.
    """
    waited, wait = 0.0, SLOW
    while not returned.wait(wait):
        waited += wait
        tqdm.write(f"{name}: has not returned for {waited:.0f} s ({what})", sys.stderr)
        wait *= 2


def load_function(spec: str, flag: str) -> Callable:
    """-> the function of "module:function". UserError, which names `flag`, if there is none."""
    module_name, _, name = spec.partition(":")
    if not (module_name.isidentifier() and name.isidentifier()):
        raise UserError(f"{flag} takes module:function, names such as my_rewards:score, got "
                        f"{short_repr(spec)}")
    path = find_module(module_name, f"{flag} {spec}")
    if str(path.parent) not in sys.path:
        # For what the user's file itself imports. Last, so that a file called learner.py or model.py
        # beside it never takes the place of one of ours.
        sys.path.append(str(path.parent))
    try:
        module = load_file(module_name, path)
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag} {spec}: cannot import {path} ({type(error).__name__}: {error})"
                        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{flag} {spec}: {path} has no function {name!r}")
    return function


def find_module(name: str, what: str) -> Path:
    """-> the file of a module, from the working directory or examples/. UserError, which begins
    with `what`, if there is none, or if it lies in or below the folder of a run.
    """
    for folder in (Path.cwd(), EXAMPLES):
        path = folder / f"{name}.py"
        if path.is_file():
            for parent in (*path.parents, *path.resolve().parents):          # a link's both places
                if (parent / "run.json").exists():
                    raise UserError(f"{what}: {path} lies in a folder with a run.json: code is not "
                                    "taken from a run; copy it to a folder of your own, and start "
                                    "there")
            return path
    raise UserError(f"{what}: there is no {name}.py in {Path.cwd()} or {EXAMPLES}")


@cache
def load_file(name: str, path: Path) -> ModuleType:
    """Imports a module from its file. Cached: two flags that name it share its global variables.

    sys.modules holds it as "user's NAME". It has to be there, since dataclasses look their module
    up. It cannot be there as NAME, which may be one of our own modules that is imported only later.
    """
    spec = importlib.util.spec_from_file_location(f"user's {name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
