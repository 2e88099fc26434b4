"""What the documents promise: links lead somewhere, and every command runs a program that has its flags."""
import contextlib
import functools
import io
import re
import runpy
import sys

import pytest
from test_house import PROGRAMS, ROOT, module, tracked

DOCS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("study/*.md")]}


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
    assert not wrong


def commands():
    """Yields (document, program's file, its arguments) of each command in the documents' blocks of code."""
    for name, text in DOCS.items():
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                # `torchrun --nproc-per-node 2 train.py ...` has flags of its own before the program's name
                found = re.search(r"(?:python3? (?:-m ([\w.]+)|([\w/]+\.py))|torchrun .*?([\w/]+\.py))\b(.*)",
                                  re.sub(r"(^|\s)#.*", "", line))
                if found:
                    file = found[2] or found[3] or found[1].replace(".", "/") + ".py"
                    yield name, file, found[4].split()


def test_every_command_of_the_documents_runs_a_file_that_is_there():
    known = {*tracked(), "pytest.py", "venv.py"}                           # python -m pytest, python -m venv
    inline = {(name, (module or file).replace(".", "/").removesuffix("/py") + ".py") for name, text in DOCS.items()
              for module, file in re.findall(r"`python3? (?:-m ([\w.]+)|([\w/]+\.py))", text)}
    assert not [(name, file) for name, file in {(name, file) for name, file, _ in commands()} | inline
                if file not in known]


@pytest.fixture
def help_of(tmp_path, monkeypatch):
    """A function of a program's file and its first argument: what it says to --help. They run in an empty folder: a
    program of a fork that takes no --help would do its work here.
    """
    monkeypatch.chdir(tmp_path)

    @functools.cache
    def said(file, word=""):
        monkeypatch.setattr(sys, "argv", [file, *([word] if word else []), "--help"])
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / file), run_name="__main__")
        return out.getvalue()

    return said


def flags_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))


def test_every_flag_in_a_command_of_the_documents_is_one_of_its_programs(help_of):
    wrong = set()
    for name, file, arguments in commands():
        if module(file) in PROGRAMS:
            command = arguments[0] if arguments and re.fullmatch("[a-z]+", arguments[0]) else ""
            known = flags_in(help_of(file) + help_of(file, command)) | {"--help"}
            wrong |= {f"{name}: {file} has no flag {flag}" for flag in flags_in(" ".join(arguments)) - known}
    assert not wrong
    assert "--steps" in flags_in(help_of("train.py"))
