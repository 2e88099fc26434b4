"""
The plan of the house: imports go down and in no circle, Triton stays behind one door, a machine without Triton trains.

It looks at the files that git tracks and at what these import; a file of your own beside them has to please you alone
until you commit it.
"""
import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NEEDS_TRITON

ROOT = Path(__file__).parent.parent
OPTIONAL = {"matplotlib", "pyarrow"}             # not in requirements.txt: who needs one is told by the program

# Who may import whom: a module imports its own row and the rows above it. What is not named here is the method.
BOTTOM = ["env", "files", "ranks"]
ROWS = [BOTTOM, ["tasks"], ["METHOD", "weights", "prompts"], ["fast"], ["harness"], ["train", "evaluate"],
        ["tools", "study"]]
# The two imports that wait: `import fast` needs Triton, so it comes once a GPU is chosen; Hopper's kernel needs Gluon.
DOORS = {("harness.setup", "load_kernels"): "fast", ("fast.decode", "decode_matmul_for"): "fast.hopper_fp4"}


def assert_none(problems):
    """Ends a test with these messages alone: they say what to do, and a traceback would bury them."""
    if problems:
        pytest.fail("\n".join(sorted(set(problems))), pytrace=False)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def tracked():
    """The files of the project, as paths relative to its root."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    if "train.py" not in names:                  # no git: an unpacked archive
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")
                 if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    return sorted(names)


def module(name):
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# tiny/make.py made the bundled model once, and stands alone.
FILES = {module(name): name for name in tracked()
         if name.endswith(".py") and not name.startswith(("tests/", "examples/", "tiny/make"))}
TREES = {name: ast.parse(text_of(file), file) for name, file in FILES.items()}
PROGRAMS = [name for name, file in FILES.items() if '__name__ == "__main__"' in text_of(file)]


def imported(node):
    """The full names that an import statement may be asking for: `from fast import kernels` may mean a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


@functools.cache                              
def imports(name):
    """All (imported name, name of the outermost function that imports it or None) of a module."""
    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield from ((other, function) for other in imported(child))
            elif not isinstance(child, ast.expr):                     # most of a tree, and no place for an import
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                # twin_in_kernels imports in the wrapper that it returns: the outermost name is what readers know
                yield from walk(child, function or (child.name if inside else None))
    return tuple(walk(TREES[name], None))


def of_project(name, late=False):
    """The project's own modules that a module imports at its top (late: inside functions)."""
    return {other for other, function in imports(name) if other in FILES and other != name and bool(function) == late
            and not name.startswith(f"{other}.")}


def reached(name):
    """A module and all of the project's that come with it at its import."""
    seen, waiting = set(), {name}
    while waiting:
        seen |= waiting
        waiting = {other for here in waiting for other in of_project(here)} - seen
    return seen


def libraries(name):
    """Top-level packages outside the project that a module imports, anywhere."""
    ours = {other.split(".")[0] for other in FILES} | {"tiny", "tests"}
    return {other.split(".")[0] for other, _ in imports(name)} - ours - {""}


def row_of(name):
    top = name.split(".")[0]
    return next((i for i, row in enumerate(ROWS) if top in row), 2)


def test_imports_go_in_no_circle():
    def below(name):
        """All modules that a module imports, at its top or inside its functions, and those that these import."""
        seen, waiting = set(), {name}
        while waiting:
            waiting = {other for here in waiting for late in (False, True) for other in of_project(here, late)} - seen
            seen |= waiting
        return seen

    assert_none([f"{FILES[name]} imports what imports it again" for name in FILES if name in below(name)])


def test_imports_go_down():
    assert_none([f"{FILES[name]} imports {FILES[other]}, which stands above it: move what both need further down"
                 for name in FILES for other in of_project(name) | of_project(name, late=True)
                 if row_of(other) > row_of(name)])


def test_only_the_doors_import_inside_a_function():
    # A tool may open Triton's files late: its other commands run on any machine.
    late = {(name, function): other for name in FILES if not name.startswith(("tools", "study"))
            for other, function in imports(name) if function and other in FILES}
    assert_none([f"{FILES[name]}: {function}() imports {other}; import it at the top of the file"
                 for (name, function), other in late.items() if DOORS.get((name, function)) != other])


def needs_triton(name):
    return name == "marlin_fp4" or name.split(".")[0] == "fast"


def test_triton_is_imported_in_marlin_fp4_and_in_fast_alone():
    assert_none([f"{FILES[name]} imports triton: kernels belong to marlin_fp4.py and fast/"
                 for name in FILES if "triton" in libraries(name) and not needs_triton(name)]
                + [f"{FILES[name]} imports {FILES[other]}, and with it Triton"
                   for name in FILES if not needs_triton(name)
                   for other in reached(name) if needs_triton(other)])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_imports_env_before_torch(name):
    # env.py holds settings that torch reads once, when it is imported.
    heavy = {"torch", "numpy", "tokenizers", "triton"}
    for other, function in imports(name):
        if other == "env":
            break
        loaded = {library for part in (reached(other) if other in FILES else ()) for library in libraries(part)}
        if not function and (loaded | {other.split(".")[0]}) & heavy:
            assert_none([f"{FILES[name]}: `import env` must come before the import of {other}"])


# -----------------------------------------------------------------------------
# Twins

def twins():
    """Yields (module, function) of each function that has a twin in fast/kernels.py."""
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                if any(ast.unparse(d).endswith("twin_in_kernels") for d in node.decorator_list):
                    yield name, node


def signature(function):
    a = function.args
    return [arg.arg for arg in a.posonlyargs + a.args + a.kwonlyargs], [ast.dump(d) for d in a.defaults], bool(a.vararg)


def test_every_twin_has_its_references_name_and_signature():
    registered = set(re.findall(r"kernels\.(\w+)", text_of("fast/__init__.py")))
    kernels = {node.name: node for node in TREES["fast.kernels"].body if isinstance(node, ast.FunctionDef)}
    pairs = list(twins())
    assert len(pairs) >= 8
    assert_none([f"fast/kernels.py: add {node.name}(), the twin of {FILES[name]}'s"
                 for name, node in pairs if node.name not in kernels]
                + [f"fast/__init__.py: register kernels.{node.name}" for _, node in pairs
                   if node.name not in registered]
                + [f"fast/kernels.py: {node.name}() has other arguments or defaults than {FILES[name]}'s"
                   for name, node in pairs
                   if node.name in kernels and signature(kernels[node.name]) != signature(node)])


def test_requirements_name_what_is_imported():
    needed = {library: name for name in FILES for library in libraries(name)}
    named = set(re.findall(r"^[\w-]+", text_of("requirements.txt"), re.M))
    assert_none([f"requirements.txt: add {library}, which {FILES[name]} imports" for library, name in needed.items()
                 if library not in named | OPTIONAL | sys.stdlib_module_names]
                + [f"requirements.txt: nothing imports {library}"
                   for library in named - needed.keys() - {"pytest", "pytest-xdist"}])


# -----------------------------------------------------------------------------
# A machine without Triton

BLOCKED = """
import asyncio, os, runpy, signal, sys   # asyncio, which torch imports, asks a Linux for os.sysconf from Python 3.12 on
sys.argv = ARGV
sys.path.insert(0, ROOT)

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def fsync(handle, real=os.fsync):
    assert not os.path.isdir(f"/proc/self/fd/{handle}"), "Windows opens no folder"
    real(handle)

sys.meta_path.insert(0, NoTriton())
sys.modules.pop("fcntl", None)
for name in ("O_DIRECTORY", "sysconf", "fork", "killpg"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "pause"):
    if hasattr(signal, name):
        delattr(signal, name)
os.fsync = fsync
runpy.run_path(sys.argv[0], run_name="__main__")
loaded = FORBIDDEN & sys.modules.keys()
assert not loaded, loaded
"""


def test_the_tiny_model_trains_without_triton_and_without_what_windows_lacks(tmp_path):
    rows = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) for i in range(12)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    flags = ("--steps 1 --data sums.jsonl --prompts-per-step 2 --max-new-tokens 16 --eval-problems 2 --device cpu "
             "--kl-beta 0.01 --reward mine:length --out run").split()
    (tmp_path / "mine.py").write_text("def length(completion, problem):\n    return len(completion)\n")
    code = BLOCKED
    forbidden = {"triton", *(name for name in FILES if "triton" in libraries(name))}
    for word, value in dict(ARGV=[str(ROOT / "train.py"), *flags], ROOT=str(ROOT), FORBIDDEN=forbidden).items():
        code = code.replace(word, repr(value))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert metrics["grad_norm"] > 0 and metrics["tokens"] > 0
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()


def test_conftest_leaves_out_the_tests_that_need_triton_and_no_others():
    paths = {path.stem: path for path in Path(__file__).parent.glob("test_*.py")}

    def needs(name):
        at_top = [other for node in ast.parse(paths[name].read_text(encoding="utf-8")).body
                  if isinstance(node, (ast.Import, ast.ImportFrom)) for other in imported(node)]
        return any(other.split(".")[0] == "triton" or other in paths and needs(other)
                   or other in FILES and any(map(needs_triton, reached(other))) for other in at_top)

    assert_none([f"tests/{name}.py: conftest.NEEDS_TRITON has to find the import that needs Triton, and no other"
                 for name, path in paths.items()
                 if needs(name) != bool(NEEDS_TRITON.search(path.read_text(encoding="utf-8")))])
