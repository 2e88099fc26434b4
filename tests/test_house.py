"""
Imports follow the layers, without cycles.
Only marlin_fp4 and fast/ import Triton, and training on a CPU runs without it.

Untracked files are not checked.
"""
import ast
import functools
import inspect
import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT, write_sums

import attention
import full
import lora
import model
import ops
from fast import backward

# The layers: a module may import its own row and the rows above it. Any other module belongs to METHOD, or, if it has
# an `if __name__ == "__main__"`, is a program, which may import everything.
ROWS = [["env", "files", "ranks", "hub"], ["grader"], ["tasks"], ["METHOD", "weights", "prompts"], ["fast"],
        ["harness"], ["train", "evaluate"], ["tools", "study"]]


def tracked():
    """The project's files, relative to its root."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    if "train.py" not in names:                  # no git, as in an unpacked archive
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")
                 if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    return sorted(names)


def module(name):
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


SOURCES = {module(name): (ROOT / name).read_text(encoding="utf-8") for name in tracked()
           if name.endswith(".py") and not name.startswith(("tests/", "examples/"))}
MODULES = set(SOURCES)
PROGRAMS = [name for name, text in SOURCES.items() if re.search(r"^if __name__ ?== ?['\"]__main__", text, re.M)]


@functools.cache
def imports(name, late=True):
    """The full names that a module imports, in order. late: include imports inside functions."""
    tree = ast.parse(SOURCES[name])
    return [*imported_names(ast.walk(tree) if late else tree.body)]


def imported_names(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):   # `from fast import kernels` may import a module
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def dependencies(name, late=True):
    """The project's modules that a module imports, directly or not. late: include imports inside functions."""
    seen, waiting = set(), {name}
    while waiting:
        waiting = {other for here in waiting for other in imports(here, late)
                   if other in MODULES and not f"{here}.".startswith(f"{other}.")} - seen
        seen |= waiting
    return seen


def row_of(name):
    otherwise = len(ROWS) if name in PROGRAMS else 3
    return next((i for i, row in enumerate(ROWS) if name.split(".")[0] in row), otherwise)


def needs_triton(name):
    return name == "marlin_fp4" or name.split(".")[0] == "fast" and name not in ("fast", "fast.backward")


def test_imports_follow_layers_without_cycles():
    assert not [name for name in MODULES if name in dependencies(name)]
    assert not [(name, other) for name in MODULES for other in {*imports(name)} & MODULES
                if row_of(other) > row_of(name)]


def test_only_marlin_fp4_and_fast_import_triton():
    for name in MODULES:
        if not needs_triton(name):
            assert "triton" not in imports(name) and not [*filter(needs_triton, dependencies(name, late=False))], name


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_import_env_before_torch(name):
    """env.py sets variables that torch reads only on import."""
    ours = [other for other in imports(name, late=False) if other in MODULES or other == "torch"]
    torch = next((i for i, other in enumerate(ours) if other == "torch" or any(
        "torch" in imports(part) for part in {other} | dependencies(other, late=False))), None)
    assert torch is None or "env" in ours[:torch]


def test_kernel_signatures_match_references():
    fast = {node.name: node for name in ("fast.backward", "fast.kernels") for node in ast.parse(SOURCES[name]).body
            if isinstance(node, ast.FunctionDef)}
    twins = [function for home in (attention, full, lora, model, ops, backward) for function in vars(home).values()
             if hasattr(function, "reference") and function.__module__ == home.__name__]
    assert len(twins) >= 6                       # a fork may remove some decorators
    for twin in twins:
        wanted, = ast.parse(inspect.getsource(twin.reference)).body
        got, want = (([a.arg for a in f.args.args], [*map(ast.unparse, f.args.defaults)], f.args.vararg is None)
                     for f in (fast[twin.__name__], wanted))
        assert got == want, twin.__name__


def test_training_runs_without_triton_or_file_locks(tmp_path):
    """As on Windows and macOS. None in sys.modules makes an import fail."""
    write_sums(tmp_path / "sums.jsonl", range(12))
    (tmp_path / "mine.py").write_text("def length(completion, problem):\n    return len(completion)\n")
    code = (f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules |= dict(triton=None, fcntl=None); "
            "runpy.run_module('train', run_name='__main__', alter_sys=True)")
    flags = ("--steps 1 --data sums.jsonl --prompts-per-step 2 --max-new-tokens 8 --eval-problems 2 --device cpu "
             "--kl-beta 0.01 --reward mine:length --out run").split()
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert metrics["grad_norm"] > 0 and (tmp_path / "run/adapter/adapter_model.safetensors").exists()
