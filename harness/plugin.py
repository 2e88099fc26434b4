"""
Functions of the user's: --reward module:function, --prompt-style module:function.

What is wrong with one is said in one line, with the place in the user's file; it is imported as any
module is, from the working directory first.
"""
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache

from harness.process import Stopped, first_line


class Reward:
    """--reward module:function, called as function(completion, problem), and with the group's
    completions as well if it takes a third argument. `problem` is a dict: every field of its row,
    with id, question and answer. Returns a number, or a dict of numbers that are summed.
    """

    def __init__(self, spec):
        self.name = f"--reward {spec}"
        self.function = load_function(spec, "--reward")
        try:
            taken = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):          # of a builtin, which tells nothing
            taken = ()
        positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.arguments = 3 if len(positional) > 2 else 2

    def __call__(self, completion, problem, group):
        """-> {part: number}; a NaN is a number, and a row of it is left out."""
        about = f"problem {problem.id}, completion {completion[:80]!r}"
        given = (completion, problem.fields(), group)[:self.arguments]
        value = call(self.name, self.function, about, *given)
        parts = value if isinstance(value, dict) else {"reward": value}
        try:
            if any(isinstance(part, (str, bytes)) for part in parts.values()):
                raise TypeError
            return {str(name): float(part) for name, part in parts.items()}
        except (TypeError, ValueError, OverflowError):
            raise Stopped(f"{self.name}: returned {repr(value)[:80]}, expected a number or a dict "
                          f"of numbers ({about})") from None


def call(name, function, about, *arguments):
    """A user's function. What it raises ends the program in one line that names it and its line."""
    here = os.getcwd()
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise Stopped(f"{name}: {type(error).__name__}: {first_line(error)} at {at.filename}:"
                      f"{at.lineno} ({about})") from None
    finally:
        os.chdir(here)                           # our paths are relative


def load_function(spec: str, flag: str) -> Callable:
    """"module:function" -> the function, from a file in the working directory or any module."""
    module_name, _, name = spec.partition(":")
    if not (module_name and name):
        raise ValueError(f"{flag} takes module:function, got {spec!r}")
    path = os.path.join(os.getcwd(), *module_name.split(".")) + ".py"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())             # last: what that file imports, never ours
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
    return function


@cache
def load_file(name: str, path: str):
    """A module from its file, in sys.modules, where a dataclass looks for it; not under `name`,
    which may be one of ours that is imported later.
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
