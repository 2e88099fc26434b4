"""In the documents, links lead somewhere, and commands name existing programs and flags."""
import contextlib
import functools
import io
import re
import runpy
import sys

import pytest
from helpers import ROOT
from test_house import PROGRAMS, module, tracked

DOCS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("study/*.md")]}


def test_links_lead_somewhere():
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
    """Yields (document, program's file, arguments) for each command in the documents' code blocks."""
    for name, text in DOCS.items():
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                # `torchrun --nproc-per-node 2 train.py ...`: flags before the program's name are torchrun's
                found = re.search(r"(?:python3? (?:-m ([\w.]+)|([\w/]+\.py))|torchrun .*?([\w/]+\.py))\b(.*)",
                                  re.sub(r"(^|\s)#.*", "", line))
                if found:
                    file = found[2] or found[3] or found[1].replace(".", "/") + ".py"
                    yield name, file, found[4].split()


def test_commands_name_existing_files():
    known = {*tracked(), "pytest.py", "venv.py"}                           # python -m pytest, python -m venv
    inline = {(name, (module or file).replace(".", "/").removesuffix("/py") + ".py") for name, text in DOCS.items()
              for module, file in re.findall(r"`python3? (?:-m ([\w.]+)|([\w/]+\.py))", text)}
    assert not [(name, file) for name, file in {(name, file) for name, file, _ in commands()} | inline
                if file not in known]


@pytest.fixture
def help_of(tmp_path, monkeypatch):
    """A function (program's file, first argument) -> its --help. Runs in an empty folder, in case a fork's program
    ignores --help and does its work.
    """
    monkeypatch.chdir(tmp_path)

    @functools.cache
    def help_text(file, word=""):
        monkeypatch.setattr(sys, "argv", [file, *([word] if word else []), "--help"])
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / file), run_name="__main__")
        return out.getvalue()

    return help_text


def flags_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))


def test_commands_use_existing_flags(help_of):
    wrong = set()
    for name, file, arguments in commands():
        if module(file) in PROGRAMS:
            command = arguments[0] if arguments and re.fullmatch("[a-z]+", arguments[0]) else ""
            known = flags_in(help_of(file) + help_of(file, command)) | {"--help"}
            wrong |= {f"{name}: {file} has no flag {flag}" for flag in flags_in(" ".join(arguments)) - known}
    assert not wrong
    assert "--steps" in flags_in(help_of("train.py"))
