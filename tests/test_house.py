"""
What readers may rely on: imports go down, Triton stays where it belongs, a name means one thing, and the documents name
what is there and nothing else. No test here limits the size of anything.

It looks at the files that git tracks, and at what these import. A reward function or a data file of your own beside
them changes nothing until you commit it; then a line in README.md, section "The files", is all that it needs. Where you
add something else that readers must be told of, the message says which document needs a line.

python -m pytest tests/test_house.py -v
"""
import ast
import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import FIELDS, Settings, option
from harness.console import SHOWN

ROOT = Path(__file__).parent.parent
# Without git, as in an unpacked archive: these folders are searched, and at the root the files that the README lists.
FOLDERS = "fast harness tools study tiny tests docs".split()

# The doors: at four places plain torch hands over to Triton, and behind them is one to Hopper's kernel. Each imports
# inside a function, so that a machine without Triton (or without a Hopper GPU) never opens the file.
# (module, function) -> module that it imports.
DOORS = {("ops", "twin_in_kernels"): "fast.kernels", ("nvfp4", "fuse"): "marlin_fp4",
         ("sampler", "engine_for"): "fast.decode", ("harness.device", "refuse_large_rank"): "fast.decode",
         ("fast.decode", "decode_matmul_for"): "fast.hopper_fp4"}
# Names that stand in two files though ops.twin_in_kernels does not tie them together, and why.
TWINS = {
    "main": "every program has one",
}
OPTIONAL = {"matplotlib", "pyarrow"}  # not in requirements.txt: who needs one is told by a line of the program
# Commit ids belong to docs/log.md and to the tables of study/methods.md that say what was run with which code.
HISTORY = "docs/log.md"


def assert_none(problems):
    """Ends a test with these messages alone: they say what to do, and a traceback would bury them."""
    if problems:
        pytest.fail("\n".join(sorted(set(problems))), pytrace=False)


# -----------------------------------------------------------------------------
# The files, and what each imports

def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def the_map(readme):
    """Title and text of the README's section that lists the files."""
    for word in "map", "files":
        found = re.search(rf"^##+ (.*\b{word}\b.*)\n((?:.*\n)*?)(?=^## |\Z)", readme + "\n", re.M | re.I)
        if found:
            return found[1], found[2]
    return pytest.fail("README.md: add a section '## The map' with a line for each file and folder", pytrace=False)


def files_of_the_map(readme):
    """What the map lists: `train.py` and the like, `harness/`."""
    return set(re.findall(r"(?<![\w/.])\w+(?:\.py\b|/(?=[\s`,;:)\]]))", the_map(readme)[1]))


def tracked():
    """The files of the project, as paths relative to its root."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
        names = [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    except OSError:
        names = []
    if "train.py" in names:                     # else git is absent, or another repository holds this folder
        return sorted(names)
    names = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*")
             if path.is_file() and "__pycache__" not in path.parts]
    at_root = {"README.md", "LICENSE", "requirements.txt", *files_of_the_map(text_of("README.md"))}
    return sorted(names + [name for name in at_root if (ROOT / name).is_file()])


def module(name):
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def parse(name):
    return ast.parse(text_of(name), name)


TRACKED = tracked()
# Of tiny/, what training reads: make.py made the model once and stands alone. Tests are no part of the program.
FILES = {module(name): name for name in TRACKED
         if name.endswith(".py") and not name.startswith("tests/") and name != "tiny/make.py"}
TREES = {name: parse(file) for name, file in FILES.items()}


def imported(node):
    """The full names that an import statement may be asking for: `from fast import kernels` may mean a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


@functools.cache                                # the questions below ask it of a module thousands of times
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


def take_in_what_is_imported():
    """A module that was added and that git does not track yet belongs to the program once the program imports it."""
    waiting = list(FILES)
    while waiting:
        for other, _ in imports(waiting.pop()):
            file = other.replace(".", "/") + ".py"
            if other and other not in FILES and not file.startswith("tests/") and (ROOT / file).is_file():
                FILES[other], TREES[other] = file, parse(file)
                waiting.append(other)


take_in_what_is_imported()
PROGRAMS = [name for name, file in FILES.items() if '__name__ == "__main__"' in text_of(file)]


def of_project(name, late=False):
    """The project's own modules that a module imports at its top (late: inside functions)."""
    return {other for other, function in imports(name) if other in FILES and other != name and bool(function) == late}


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


# The parts that a program of the project is made of. A tracked file that no program imports (a reward of a fork's own)
# has to please its author alone.
PARTS = sorted({part for program in PROGRAMS for part in reached(program)} | {*DOORS.values()}
               | {part for door in DOORS.values() if door in FILES for part in reached(door)})


def test_the_files_named_here_exist():
    assert {"train", "evaluate", "harness.process", "fast.kernels"} <= FILES.keys()
    assert_none([f"tests/test_house.py, DOORS: there is no module {name}"
                 for name in DOORS.values() if name not in FILES])


def test_imports_go_in_no_circle():
    circles = [name for name in FILES if any(name in reached(other) for other in of_project(name))]
    assert_none([f"{FILES[name]} imports what imports it again: " + ", ".join(
        sorted(FILES[other] for other in of_project(name) if name in reached(other))) for name in circles])


def test_imports_go_down():
    # Programs and tools stand on the method, on harness/ and on fast/, never the other way round.
    def is_above(name):
        return name in PROGRAMS or name.split(".")[0] in ("tools", "study", "tests")

    assert_none([f"{FILES[name]} imports {FILES[other]}, which stands above it: "
                 "move what both need into a module of its own"
                 for name in FILES if not is_above(name)
                 for other in of_project(name) | of_project(name, late=True) if is_above(other)])


def test_the_tiny_models_problems_stand_on_nothing():
    assert not of_project("tiny.arithmetic") - {"tiny"}


def test_the_doors_alone_import_inside_a_function():
    # A tool may open Triton's files late: its other commands run on any machine.
    late = {(name, function): other for name in FILES if not name.startswith(("tools", "study"))
            for other, function in imports(name) if function and other in FILES and other not in ("fast", "harness")}
    assert_none([f"{FILES[name]}: {function}() imports {other}; import it at the top of the file "
                 "(only the doors to Triton may wait)"
                 for (name, function), other in late.items() if DOORS.get((name, function)) != other]
                + [f"tests/test_house.py, DOORS: {'.'.join(door)}() does not import {other}"
                   for door, other in DOORS.items() if late.get(door) != other])


def may_import_triton(name):
    return name == "marlin_fp4" or name.startswith("fast.")


def test_triton_is_imported_in_marlin_fp4_and_in_fast_alone():
    assert_none([f"{FILES[name]} imports triton: kernels belong to marlin_fp4.py and fast/"
                 for name in FILES if "triton" in libraries(name) and not may_import_triton(name)])


def test_the_method_and_the_harness_import_nothing_of_triton_on_the_way():
    with_triton = {name for name in FILES if "triton" in libraries(name)}
    assert_none([f"{FILES[name]} imports {FILES[other]}, and with it Triton: "
                 "every machine without Triton would stop there"
                 for name in FILES if not may_import_triton(name) and not name.startswith(("tools.", "study."))
                 for other in reached(name) & with_triton])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_imports_process_before_what_imports_torch(name):
    # harness/process.py holds settings that torch reads once, when it is imported.
    heavy = {"torch", "numpy", "tokenizers", "triton"}
    for other, function in imports(name):
        if other == "harness.process":
            break
        loaded = {library for part in (reached(other) if other in FILES else ()) for library in libraries(part)}
        if not function and (loaded | {other.split(".")[0]}) & heavy:
            assert_none([f"{FILES[name]}: `from harness import process` must come before the import of {other}"])


def names_in(body):
    """The names that the statements of a module or class define, imports included."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
            yield from (leaf.attr for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Attribute))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from names_in(node.body)
            yield from names_in(getattr(node, "orelse", ()))
            yield from (name for handler in getattr(node, "handlers", ()) for name in names_in(handler.body))


NAMES = {name: set(names_in(tree.body)) for name, tree in TREES.items()}


def has(name, what):
    """Whether a module has a name; `fast` has `kernels`, a module."""
    return what in NAMES[name] or f"{name}.{what}" in FILES


def asked(tree):
    """Yields (module, name) of each `from module import name` and of each module.name in a file."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in FILES:
            yield from ((node.module, alias.name) for alias in node.names)
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
                        if f"{node.module}.{alias.name}" in FILES}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in FILES}
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        own = {leaf.id for leaf in ast.walk(function) if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)}
        own |= {arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in modules.keys() - own:
                    yield modules[node.value.id], node.attr


def test_what_a_file_asks_of_another_is_there():
    # What one flag's branch alone calls can go lost in a merge without any other test noticing.
    assert_none({f"{FILES[name]} asks {FILES[other]} for {what}, which it has not"
                 for name, tree in TREES.items() for other, what in asked(tree) if not has(other, what)})


# -----------------------------------------------------------------------------
# What each module owes its readers

def test_every_module_says_what_it_is_for():
    assert_none([f"{FILES[name]}: begin it with a docstring that says what it is for"
                 for name in PARTS if not ast.get_docstring(TREES[name])])


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
    kernels = {node.name: node for node in TREES["fast.kernels"].body if isinstance(node, ast.FunctionDef)}
    pairs = list(twins())
    assert len(pairs) >= 8
    assert_none([f"fast/kernels.py: add {node.name}(), the twin of {FILES[name]}'s"
                 for name, node in pairs if node.name not in kernels]
                + [f"fast/kernels.py: {node.name}() has other arguments or defaults than {FILES[name]}'s"
                   for name, node in pairs
                   if node.name in kernels and signature(kernels[node.name]) != signature(node)])


def test_a_name_stands_in_one_file_alone_or_in_that_of_its_twin():
    # A reader who greps for a name finds one thing.
    where = {}
    for name in PARTS:
        defined = [node for node in TREES[name].body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Try))]
        for what in set(names_in(defined)):
            where.setdefault(what, []).append(FILES[name])
    allowed = {node.name for _, node in twins()} | TWINS.keys()
    assert_none([f"{what} is defined in {' and '.join(files)}: rename one" for what, files in where.items()
                 if len(files) > 1 and what not in allowed and not what.startswith("__")]
                + [f"tests/test_house.py, TWINS: {what} does not stand in two files" for what in TWINS
                   if len(where.get(what, ())) < 2])


def lacking_hints(function, is_method):
    a = function.args
    named = a.posonlyargs + a.args
    named = named[1:] if is_method and not any(ast.unparse(d) == "staticmethod" for d in function.decorator_list) \
        else named
    named = named + a.kwonlyargs + [arg for arg in (a.vararg, a.kwarg) if arg]
    return [arg.arg for arg in named if not arg.annotation] + ["its result"] * (not function.returns)


def public_functions(name):
    """Yields (function, whether it is a method) of a module, but for what Triton compiles: that takes pointers."""
    for node in TREES[name].body:
        for function in node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                if not any(re.search("jit|constexpr", ast.unparse(d)) for d in function.decorator_list):
                    yield function, function is not node


def test_public_functions_of_the_method_and_of_fast_have_type_hints():
    assert_none([f"{FILES[name]}:{function.lineno}: {function.name}() lacks type hints of {', '.join(lacking)}"
                 for name in PARTS if "." not in name or name.startswith("fast.")
                 for function, is_method in public_functions(name) if (lacking := lacking_hints(function, is_method))])


def test_requirements_name_what_is_imported_and_the_license_is_there():
    needed = {library: name for name in FILES for library in libraries(name)}
    named = set(re.findall(r"^[\w-]+", text_of("requirements.txt"), re.M))
    assert_none([f"requirements.txt: add {library}, which {FILES[name]} imports" for library, name in needed.items()
                 if library not in named | OPTIONAL | sys.stdlib_module_names]
                + [f"requirements.txt: nothing imports {library}"
                   for library in named - needed.keys() - {"pytest", "pytest-xdist"}])
    assert "Apache License" in text_of("LICENSE") and "LICENSE" in text_of("README.md")


# -----------------------------------------------------------------------------
# The settings

def last_name(node):
    """"optim" of `optim`, of `settings.optim` and of `run.settings.optim`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def setting_reads(name, sections):
    """Yields (section, field) of each `SECTION.field` in a module, as in `settings.optim.lr`.

    A section may have another name there: `wanted = settings.memory`, or a parameter `wanted: Memory`. A parameter
    without a type may be any of them: harness/data.py has such, since config.py imports it.
    """
    meant = {section: {section} for section in sections}
    of_type = {kind: section for section, kind in sections.items()}
    for node in ast.walk(TREES[name]):
        pairs = []
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            pairs = zip(getattr(node.targets[0], "elts", ()), node.value.elts)
        elif isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            typed = last_name(node.annotation)
            meant.setdefault(node.arg, set()).update(
                [of_type[typed]] if typed in of_type else [] if node.annotation else sections)
        for target, value in pairs:
            if isinstance(value, ast.Attribute) and value.attr in sections:
                meant.setdefault(last_name(target), set()).add(value.attr)
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield from ((section, node.attr) for section in meant.get(last_name(node.value), ()))


def test_every_setting_is_read_by_what_trains():
    # A field that prepare.py or train.py does not pass on is a flag that everybody may give and that does nothing.
    sections = {section.name: section.type for section in dataclasses.fields(Settings)}
    files = (reached("train") | {*DOORS.values()}) & FILES.keys() - {"harness.config"}
    found = {read for name in files
             for read in setting_reads(name, {section: kind.__name__ for section, kind in sections.items()})}
    assert_none([f"{option(field.name)} reaches nothing: pass `settings.{section}.{field.name}` on, in "
                 "harness/prepare.py or train.py, or take the field out of harness/config.py"
                 for section, kind in sections.items() for field in dataclasses.fields(kind)
                 if (section, field.name) not in found])


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


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of one step of the tiny model in a process without Triton and without what Windows lacks."""
    out = tmp_path_factory.mktemp("house") / "run"
    # Some numbers are logged only with a flag, such as `kl`.
    flags = ["--steps", "1", "--prompts-per-step", "4", "--eval-problems", "4", "--device", "cpu", "--out", str(out),
             "--kl-beta", "0.01"]
    forbidden = {"triton", *(name for name in FILES if "triton" in libraries(name))}
    code = BLOCKED
    for word, value in dict(ARGV=[str(ROOT / "train.py"), *flags], ROOT=str(ROOT), FORBIDDEN=forbidden).items():
        code = code.replace(word, repr(value))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=out.parent, timeout=240)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def metrics(run_folder):
    line, = (run_folder / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


def test_the_tiny_model_trains_where_triton_cannot_be_imported(run_folder, metrics):
    assert metrics["step"] == 0 and metrics["grad_norm"] > 0 and metrics["tokens"] >= 32
    assert (run_folder / "adapter" / "adapter_model.safetensors").exists()


def test_the_tests_can_be_collected_where_triton_cannot_be_imported():
    argv = ["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", str(ROOT / "tests")]
    code = f"import sys\nsys.modules['triton'] = None\nimport pytest\nsys.exit(pytest.main({argv}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/test_train.py::" in done.stdout and "tests/test_decode.py::" not in done.stdout


# -----------------------------------------------------------------------------
# The documents

DOCS = {name: text_of(name) for name in TRACKED
        if name.endswith(".md") and name.startswith(("README.md", "study/", "docs/"))}
TIMELESS = {name: text for name, text in DOCS.items() if name != HISTORY}     # they speak of the tree as it is
README = DOCS["README.md"]


def test_the_readmes_map_names_every_module_of_the_root_and_every_folder():
    title, _ = the_map(README)
    at_root = {name for name in FILES.values() if "/" not in name}
    folders = {f"{name.split('/')[0]}/" for name in TRACKED if "/" in name and not name.startswith(".")}
    listed = files_of_the_map(README)
    every = {Path(name).name for name in TRACKED}
    assert_none([f"README.md, section '{title}': add a line for {name}" for name in (at_root | folders) - listed]
                + [f"README.md, section '{title}': {name} is not there; take it out" for name in listed - folders
                   if name not in every and not (ROOT / name).exists()])


def test_every_page_and_every_program_is_named_where_readers_look():
    words = " ".join(DOCS.values())
    pages = [name for name in DOCS if name != "README.md"]
    assert_none([f"README.md: add a link to {name}; no page leads there" for name in pages
                 if not any(name in text or (Path(at).parent == Path(name).parent and f"]({Path(name).name}" in text)
                            for at, text in DOCS.items() if at != name)]
                + [f"README.md, or a page of docs/: say what {FILES[name]} is for and how to start it"
                   for name in PROGRAMS if FILES[name] not in words and name not in words])


def test_every_table_is_whole():
    """An empty line in the middle leaves the rows below it without a header."""
    assert_none([f"{name}: put a header above the row {rows[0][:60]}, or join it to the table above"
                 for name, text in DOCS.items()
                 for rows in [block.splitlines() for block in
                              re.findall(r"(?:^ *\|.*\|\n)+", re.sub(r"```.*?```", "", text, flags=re.S), re.M)]
                 if len(rows) < 2 or not re.fullmatch(r" *\|(?: *:?-+:? *\|)+", rows[1])])


def test_every_link_leads_somewhere():
    def anchors(text):
        titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    wrong = []
    for name, text in DOCS.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (ROOT / name).parent / path if path else ROOT / name
            if "://" in link:
                continue
            if not target.exists():
                wrong.append(f"{name}: the link to {link} leads nowhere")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
                wrong.append(f"{name}: {path or name} has no heading for the link to #{anchor}")
    assert_none(wrong)


def test_every_python_file_that_a_document_names_is_there():
    known = {*TRACKED, *(Path(name).name for name in TRACKED), *FILES.values()}
    assert_none({f"{name} names {word}, which is not there" for name, text in TIMELESS.items()
                 for word in re.findall(r"(?<![\w/.:-])[\w/]+\.py\b", re.sub(r"https?://\S+", "", text))
                 if word not in known and not {"my", "mine"} & {*re.split(r"[_.]", Path(word).name)}})    # an example


def commands():
    """Yields (document, program's file, its arguments) of each command in the documents' blocks of code."""
    for name, text in TIMELESS.items():
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                # `torchrun --nproc-per-node 2 train.py ...` has flags of its own before the program's name
                found = re.search(r"(?:python3? (?:-m ([\w.]+)|([\w/]+\.py))|torchrun .*?([\w/]+\.py))\b(.*)",
                                  re.sub(r"(^|\s)#.*", "", line))
                if found:
                    file = found[2] or found[3] or found[1].replace(".", "/") + ".py"
                    yield name, file, found[4].split()


def test_every_command_of_the_documents_runs_a_file_that_is_there():
    known = {*TRACKED, *FILES.values(), "pytest.py", "venv.py"}              # python -m pytest, python -m venv
    inline = {(name, (module or file).replace(".", "/").removesuffix("/py") + ".py") for name, text in TIMELESS.items()
              for module, file in re.findall(r"`python3? (?:-m ([\w.]+)|([\w/]+\.py))", text)}
    assert_none([f"{name}: a command runs {file}, which is not there"
                       for name, file in {(name, file) for name, file, _ in commands()} | inline if file not in known])


HELP = """
import contextlib, io, json, runpy, sys
root = sys.argv.pop()
sys.path.insert(0, root)
said = {}
for file, word in json.loads(sys.argv.pop()):
    sys.argv = [file, *([word] if word else []), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_path(f"{root}/{file}", run_name="__main__")
    said[f"{file} {word}"] = out.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def help_of(tmp_path_factory):
    """A function of a program's file and its first argument: what it says to --help. They run in an empty folder: a
    program of a fork that takes no --help would do its work here.
    """
    programs = {FILES[name] for name in PROGRAMS}
    words = {(file, arguments[0]) for _, file, arguments in commands()
             if file in programs and arguments and re.fullmatch("[a-z]+", arguments[0])}
    asked = sorted(words | {(file, "") for file in programs})
    done = subprocess.run([sys.executable, "-c", HELP, json.dumps(asked), ROOT], cwd=tmp_path_factory.mktemp("help"),
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout.splitlines()[-1])
    return lambda file, word="": texts.get(f"{file} {word}", "") + texts.get(f"{file} ", "")


TORCHRUN = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr"}


def flags_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))


def test_every_flag_in_a_command_of_the_documents_is_one_of_its_programs(help_of):
    wrong = set()
    for name, file, arguments in commands():
        if module(file) in PROGRAMS and name != "study/methods.md":  # which has the flags that its runs were made with
            known = flags_in(help_of(file, arguments[0] if arguments else "")) | {"--help"}
            wrong |= {f"{name}: {file} has no flag {flag}" for flag in flags_in(" ".join(arguments)) - known}
    assert_none(wrong)
    assert "--steps" in flags_in(help_of("train.py"))


def blocks_of_python():
    """Yields (document, syntax tree) of each block of code that is Python."""
    for name, text in TIMELESS.items():
        for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
            yield name, ast.parse(block)


def test_what_the_documents_import_is_there():
    assert_none({f"{name} imports {what} from {FILES[other]}, which has no such name"
                 for name, tree in blocks_of_python() for other, what in asked(tree) if not has(other, what)})


@functools.cache
def classes():
    """Name of a class -> its members."""
    found = {}
    for node in (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        inner = [s for f in node.body if isinstance(f, ast.FunctionDef) for s in ast.walk(f)]
        members = {*names_in(node.body), *names_in(s for s in inner if isinstance(s, (ast.Assign, ast.AnnAssign)))}
        found.setdefault(node.name, set()).update(members)
    return found


def is_there(word):
    """Whether `nvfp4.quantize`, `Learner.update`, `harness.hf.Checkpoint.frozen`, `hf.load` and the like exist."""
    first, *rest = word.split(".")
    if first in classes():
        return rest[0] in classes()[first]
    for name in FILES:
        for prefix in {name, name.split(".")[-1]}:                              # `kernels.attend` is fast.kernels'
            if word == prefix:
                return True
            if word.startswith(f"{prefix}."):
                what, *member = word.removeprefix(f"{prefix}.").split(".")
                if has(name, what) and (not member or member[0] in classes().get(what, member)):
                    return True
    return False


def test_every_dotted_name_in_the_documents_is_in_the_code():
    known = classes().keys() | {part for name in FILES for part in (name.split(".")[0], name.split(".")[-1])}
    assert_none({f"{name} names `{word}`, which the code has not" for name, text in TIMELESS.items()
                 for word in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?`", text)
                 if word.split(".")[0] in known and not is_there(word)
                 and not re.search(r"\.(py|jsonl?|md|html|parquet|safetensors|png)$", word)})


def test_no_document_but_the_log_has_commit_ids():
    wrong = []
    for name, text in TIMELESS.items():
        if name == "study/methods.md":                        # its tables say which code made which run
            text = re.sub(r"^\|.*$", "", text, flags=re.M)
        # `NVlabs/QeRL as of commit 0123abc` names another repository's
        text = re.sub(r"\b\w+/[\w-]+(?:@|(?:\s+(?:at|as|of|commit))+\s+)[0-9a-f]+\b", "", text)
        ids = re.findall(r"(?<![\w/.#-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}(?![\w-])", text)
        if ids:
            wrong.append(f"{name}: take out what looks like commit ids (they belong to {HISTORY}): " + ", ".join(ids))
    assert_none(wrong)


def test_the_documents_name_the_fields_of_a_problem():
    fields = {node.targets[0].id: ast.literal_eval(node.value) for node in TREES["harness.data"].body
              if isinstance(node, ast.Assign) and node.targets[0].id in ("QUESTIONS", "GOLDS")}
    assert len(fields) == 2, "harness/data.py lists the names of fields that it reads in QUESTIONS and GOLDS"
    assert_none([f"docs/flags.md, at --data: name the field `{name}`, which harness/data.py reads"
                 for names in fields.values() for name in names
                 if not any(f"`{name}`" in text for text in TIMELESS.values())])


def test_the_page_on_flags_names_flags_that_there_are_and_every_value_of_those_of_training(help_of):
    """A flag of training of which there is no more to say than its line of --help may be absent there."""
    page = DOCS["docs/flags.md"]
    known = {flag for name in PROGRAMS for flag in flags_in(help_of(FILES[name]))} | TORCHRUN
    parts = re.split(r"\n(?=\||- )|\n\n", page)                                # rows of tables, points, paragraphs

    def names(flag, value):
        return any(flag in flags_in(part) and (f"`{value}`" in part or re.search(rf"`{flag} {value}\b", part))
                   for part in parts)

    # The values of --kernels are those of the machine that a run happens to have.
    values = [(option(name), value) for name, field in FIELDS.items() if name != "kernels"
              for value in field.metadata["choices"] or () if {*field.metadata["choices"]} != {"on", "off"}]
    assert ("--loss", "dapo") in values and ("--correction", "off") in values
    assert_none([f"docs/flags.md: no program has the flag {flag}" for flag in flags_in(page) - known]
                + [f"docs/flags.md, at `{flag}`: name the value `{value}`" for flag, value in values
                   if flag in flags_in(page) and not names(flag, value)])


def test_the_table_of_gpu_memory_is_that_of_the_published_sizes():
    """Linears have 4.5 or 16 bits, embeddings and head 16; an adapter of rank 32 takes 18 bytes a parameter; in GiB."""
    found = [line.strip("| ").split(" | ") for text in TIMELESS.values() for line in text.splitlines()
             if re.match(r"\| (NVFP4|bf16) \+|\| KV c", line)]
    sizes = [ast.literal_eval(node.value) for tree in TREES.values() for node in tree.body
             if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SIZES"]
    assert len(found) == 6 and len(sizes) == 1, "docs/gpus.md has two such tables, tools/bench.py the SIZES"
    tables = [(found[:3], [size for name, size in sizes[0].items() if not name.startswith("qwen3-")]),
              (found[3:], [size for name, size in sizes[0].items() if name.startswith("qwen3-")])]
    for found, column, size in [(table, at, size) for table, of in tables for at, size in enumerate(of, 1)]:
        width, forward, layers, heads, kv_heads, vocab, tied, *_ = size
        d = size[7] if len(size) > 7 else width // heads
        q, kv = heads * d, kv_heads * d
        shapes = [(width, q)] * 2 + [(width, kv)] * 2 + [(width, forward)] * 3
        linears = layers * sum(k * n for k, n in shapes)
        adapter = layers * sum(32 * (k + n) for k, n in shapes) * 18 / 2**30
        others = vocab * width * (1 if tied else 2) * 2
        for row, bits in ((0, 4.5), (1, 16)):
            weights = (linears * bits / 8 + others) / 2**30
            written = [float(number) for number in found[row][column].split(" + ")]
            assert written == pytest.approx([weights, adapter], abs=0.06), (found[row][0], column)
        assert float(found[2][column]) == layers * 2 * kv * 2 / 1024


# -----------------------------------------------------------------------------
# The logged numbers

def defined():
    """Key -> meaning, of the first table of docs/metrics.md, which is that of metrics.jsonl."""
    table = re.search(r"\| key \| meaning \|\n\|[-| ]+\|\n(.*?)\n\n", DOCS["docs/metrics.md"], re.S)[1]
    rows = [line.strip("|").split("|", 1) for line in table.splitlines()]
    return {key: meaning for keys, meaning in rows for key in re.findall(r"`(\w+)`", keys)}


def test_every_logged_number_is_defined_and_every_defined_number_is_logged(metrics):
    meanings = defined()
    # What a flag alone turns on is absent from the run above; the code must still have a word for it.
    words = {leaf.value for tree in TREES.values() for leaf in ast.walk(tree)
             if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)}
    words |= {leaf.arg for tree in TREES.values() for leaf in ast.walk(tree) if isinstance(leaf, ast.keyword)}
    assert_none([f"docs/metrics.md, table of metrics.jsonl: add a row for `{key}`"
                 for key in metrics.keys() - meanings.keys()]
                + [f"docs/metrics.md, table of metrics.jsonl: nothing logs `{key}`; take it out, or say "
                   "with which `--flag`"
                   for key, meaning in meanings.items() if key not in metrics
                   and not ("with `--" in meaning and key.replace("PART", "") in words)])


def test_every_key_of_a_logged_sample_is_defined(run_folder):
    sample = json.loads((run_folder / "samples.jsonl").read_text().splitlines()[0])
    assert_none([f"docs/metrics.md, on samples.jsonl: say what `{key}` is" for key in sample
                 if f"`{key}`" not in DOCS["docs/metrics.md"]])


def test_the_terminal_shows_numbers_that_are_logged():
    # A key that is absent from a step is left out there, so a wrong one would never be seen.
    assert_none([f"harness/console.py, SHOWN: docs/metrics.md has no row for `{key}`"
                 for key, *_ in SHOWN
                 if key not in defined() and not key.startswith("reward_")])      # a part of --reward's
