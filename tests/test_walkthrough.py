"""
docs/walkthrough.md shows what tools/walkthrough.py prints, and every drawing that it names.

python -m pytest tests/test_walkthrough.py -v
python tests/test_walkthrough.py                 runs the script and writes what it prints into the page
"""
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough.md"
SECTION = re.compile(r"^## (\d+\. [^\n]*)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"```text\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?%?")
DRAWINGS = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text(encoding="utf-8"))


def run():
    """-> what the script prints in each section, by its title, and the seconds of CPU time it took."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "tools.walkthrough"], cwd=ROOT, capture_output=True, text=True,
                          encoding="utf-8")
    after = os.times()                                                   # of the children that have ended
    seconds = after.children_user - before.children_user + after.children_system - before.children_system
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^(\d+\. .*)\n-+\n", done.stdout, flags=re.MULTILINE)
    return {title: body.strip("\n") for title, body in zip(parts[1::2], parts[2::2])}, seconds


def shown(page):
    """-> what the page shows in each section that has a block of output, by its title."""
    return {title: BLOCK.search(body)[1].strip("\n") for title, body in SECTION.findall(page) if BLOCK.search(body)}


def differences(printed, expected, points):
    """-> pairs of lines that differ by more than rounding: another machine may add in another order.

    Text and whole numbers must be equal, decimals up to one unit of their last digit, percentages up to `points`.
    """
    def same(a, b):
        if NUMBER.sub("#", a) != NUMBER.sub("#", b):
            return False
        return all(close(x, y) for x, y in zip(NUMBER.findall(a), NUMBER.findall(b)))

    def close(x, y):
        digits = len(x.partition("e")[0].partition(".")[2].rstrip("%"))
        exponent = int(x.partition("e")[2] or 0)
        within = points if x.endswith("%") else 10.0**(exponent - digits) if digits else 0
        a, b = (float(n.rstrip("%").replace(",", "")) for n in (x, y))
        return abs(a - b) <= within * 1.01

    a, b = printed.splitlines(), expected.splitlines()
    assert len(a) == len(b), f"{len(a)} lines are printed, {len(b)} are on the page"
    return [(x, y) for x, y in zip(a, b) if not same(x, y)]


@pytest.fixture(scope="module")
def script():
    return run()


def test_the_page_shows_what_the_script_prints(script):
    sections, _ = script
    page = shown(PAGE.read_text(encoding="utf-8"))
    assert list(page) == list(sections)
    for title, printed in sections.items():
        points = 3 if title.startswith("10.") else 0.1                   # thirty updates add up rounding
        assert not differences(printed, page[title], points), title


def test_the_script_ends_in_under_a_minute(script):
    assert script[1] < 60                                                # CPU time: the machine may be busy


def test_a_changed_figure_would_be_noticed():
    assert differences("loss -0.3239", "loss -0.3241", 0) and not differences("loss -0.3239", "loss -0.3240", 0)
    assert differences("5 tokens", "6 tokens", 0) and differences("2.5e-03", "2.7e-03", 0)
    assert differences("right 95%", "right 99%", 3) and not differences("a -0.0000", "a 0.0000", 0)


def test_the_page_names_four_drawings():
    assert len(DRAWINGS) == 4


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_can_be_read_on_any_page(name):
    svg = ET.parse(PAGE.parent / name).getroot()
    kind = "{http://www.w3.org/2000/svg}"
    width, height = svg.get("viewBox").split()[2:]
    ground = svg.find(f"{kind}rect")                                     # the first: it lies under all others
    assert (ground.get("width"), ground.get("height"), ground.get("fill")) == (width, height, "white")
    assert "sans-serif" in svg.get("font-family") and svg.find(f"{kind}title").text
    sizes = [int(node.get("font-size", svg.get("font-size"))) for node in svg.iter(f"{kind}text")]
    assert min(sizes) >= 13


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_figures_in_a_drawing_are_those_of_the_page(name):
    page = "\n".join(shown(PAGE.read_text(encoding="utf-8")).values())
    drawn = "\n".join(ET.parse(PAGE.parent / name).getroot().itertext())
    assert not [number for number in re.findall(r"\b\d\.\d{4,5}\b", drawn) if number not in page]


if __name__ == "__main__":
    printed, _ = run()
    text = PAGE.read_text(encoding="utf-8")
    for found in SECTION.finditer(text):
        if found[1] in printed:
            filled = BLOCK.sub(lambda _: f"```text\n{printed[found[1]]}\n```", found[2], count=1)
            text = text.replace(found[2], filled)
    PAGE.write_text(text, encoding="utf-8")
