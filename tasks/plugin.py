"""
Calls functions that the user wrote: --reward module:function and --prompt-style module:function.

    reward = Reward("my_rewards:length")         # my_rewards.py in the working directory
    reward("the answer is 5", problem, group)    # {"reward": 15.0}

The file belongs to the user, so its errors do too. Whatever it does wrong, from a syntax error to
a division by zero at step 400, becomes one line that names the flag, the file and the line in it.
"""
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import ModuleType

from files import Stopped, first_line, short_repr

# The largest reward, either way. Undivided advantages are as large as rewards, gradients grow with
# them, and the squares of gradients must stay below 3.4e38, where fp32 ends.
LARGEST_REWARD = 1e15
# What a reward may ask for as a keyword parameter: def reward(completion, problem, *, length).
# length: tokens of the completion, its end token included. finished: it was not cut off.
ASKED_BY_NAME = "length", "finished"


class Reward:
    """--reward module:function, called as function(completion, problem) for every completion.

    `problem` is a dict: every field of the problem's row, with id, question and answer. A function
    whose third parameter has no default is given the completions of the whole group as well, and
    one with keyword parameters of these names is given what ASKED_BY_NAME holds. It returns a
    number, or a dict of numbers that are summed; rewards.grade_rollouts says what the part
    `shaping` is. A NaN leaves the completion out of training. No number, and no sum of them, may be
    infinite or beyond LARGEST_REWARD. ValueError for a function that cannot be called so.
    """

    def __init__(self, spec: str):
        self.name = f"--reward {spec}"
        self.function = load_function(spec, "--reward")
        self.num_arguments, self.asked = 2, []
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):          # a builtin may not tell its signature
            return
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
            raise ValueError(f"{self.name}: is called as function(completion, problem); it may "
                             "have a third parameter, for the completions of the group, and the "
                             f"keyword parameters {' and '.join(ASKED_BY_NAME)}: {error}") from None

    def __call__(self, completion: str, problem, group: list[str], **about: object
                 ) -> dict[str, float]:
        """The parts of one completion's reward by name; `problem` is a data.Problem.

        about: what ASKED_BY_NAME names, of this completion.
        Stopped if the function fails or returns anything but numbers that can be trained on.
        """
        what = f"problem {problem.id}, completion {completion[:80]!r}"
        arguments = (completion, problem.fields(), group)[:self.num_arguments]
        function = functools.partial(self.function, **{name: about[name] for name in self.asked})
        value = call_users(self.name, function, what, *arguments)
        parts = value if isinstance(value, dict) else {"reward": value}
        try:
            if any(isinstance(part, (str, bytes)) for part in parts.values()):
                raise TypeError                  # float("3") would accept it
            numbers = {str(name): float(part) for name, part in parts.items()}
        except OverflowError:                    # an int beyond float's 1.8e308
            numbers = {"reward": math.inf}
        except Exception:                        # float() of an object of the user's may raise any
            numbers = {}
        if not numbers:
            raise Stopped(f"{self.name}: returned {shown(value)}, expected a number or a dict of "
                          f"numbers ({what})")
        if set(numbers) == {"shaping"}:
            raise Stopped(f"{self.name}: returned {shown(value)}: shaping is added to another "
                          f"part, and there is none ({what})")
        most = LARGEST_REWARD
        if any(abs(number) > most for number in (*numbers.values(), sum(numbers.values()))):
            raise Stopped(f"{self.name}: returned {shown(value)}, expected a number (or a sum) in "
                          f"[-{most:g}, {most:g}], or nan for what cannot be scored ({what})")
        return numbers


def shown(value: object) -> str:
    """What a user's function returned, for a message. An object's own repr() may raise."""
    try:
        return short_repr(value).replace("\n", " ")
    except Exception:                            # repr() of an int of 5,000 digits raises too
        return f"an object of type {type(value).__name__}"


def call_users(name: str, function: Callable, what: str, *arguments: object) -> object:
    """Calls a user's function; if it raises, Stopped says where in the user's file.

    name: the flag; what: the problem that it was called for; both are for the message.
    """
    folder = os.getcwd()
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise Stopped(f"{name}: {type(error).__name__}: {first_line(error)} at {at.filename}:"
                      f"{at.lineno} ({what})") from None
    finally:
        os.chdir(folder)                         # the function may have left it; --out is relative


def split_names(spec: str, flag: str) -> tuple[str, str]:
    """"package.module:function" -> its two names. ValueError, which names `flag`, for all else.

    A run's run.json holds such names too, and a run may come from somebody else. So a module is
    never a path: "/tmp/x", ".x" or "../x" are no names, and what is named lies in the working
    directory or among the installed modules. Python's own modules are refused: none of them scores
    an answer, and `builtins:exec` would run what a model has written.
    """
    module_name, _, name = spec.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise ValueError(f"{flag} takes module:function, names such as my_rewards:score, got "
                         f"{short_repr(spec)}")
    if is_pythons_own(module_name) and not os.path.isfile(path_of(module_name)):
        raise ValueError(f"{flag} {spec}: {module_name} is a module of Python's own; name one that "
                         "was written for this")
    return module_name, name


def is_pythons_own(module_name: str) -> bool:
    return module_name.partition(".")[0] in sys.stdlib_module_names


def path_of(module_name: str) -> str:
    """Where a module's file is if it lies in the working directory."""
    return os.path.join(os.getcwd(), *module_name.split(".")) + ".py"


def home_of(spec: str) -> str:
    """Where the function "module:function" would come from, for a message. Imports nothing."""
    name = spec.partition(":")[0]
    if os.path.isfile(path_of(name)):
        return path_of(name)
    try:
        found = importlib.util.find_spec(name.partition(".")[0])     # of a package it imports none
    except (ImportError, ValueError):
        found = None
    if found is None:
        return "nowhere: there is no such module"
    return found.origin or "the installed modules"                   # a folder without __init__.py


def load_function(spec: str, flag: str) -> Callable:
    """Returns the function of "module:function", from the working directory or any installed
    module. ValueError, which names `flag`, if there is none.
    """
    module_name, name = split_names(spec, flag)
    path = path_of(module_name)
    if module_name.endswith(".py") and not os.path.isfile(path):
        raise ValueError(f"{flag} {spec}: name the module without .py: "
                         f"{module_name.removesuffix('.py')}:{name}")
    if os.getcwd() not in sys.path:
        # For what the user's file itself imports. Last, so that a file called data.py or model.py
        # in the working directory never takes the place of one of ours.
        sys.path.append(os.getcwd())
    try:
        if os.path.isfile(path):
            module = load_file(module_name, path)
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{flag} {spec}: cannot import {module_name!r} ({type(error).__name__}: "
                         f"{error})") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{flag} {spec}: {module_name!r} has no function {name!r}")
    imported = inspect.isroutine(function) or inspect.isclass(function)
    if imported and is_pythons_own(str(function.__module__)) and not os.path.isfile(path):
        raise ValueError(f"{flag} {spec}: {name} is a function of Python's own module "
                         f"{function.__module__}; name one that was written for this")
    return function


@cache
def load_file(name: str, path: str) -> ModuleType:
    """Imports a module from its file. Cached: two flags that name it share its global variables.

    sys.modules holds it as "user's NAME". It has to be there, since dataclasses look their module
    up. It cannot be there as NAME, which may be one of our own modules that is imported only later.
    """
    name = f"user's {name}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
