"""
docs/walkthrough.md and its drawings show what tools/walkthrough.py prints.

python -m pytest tests/test_walkthrough.py -v
python tests/test_walkthrough.py                 runs the script and updates the page
"""
import contextlib
import io
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGE, SCRIPT = ROOT / "docs" / "walkthrough.md", ROOT / "tools" / "walkthrough.py"
SECTION = re.compile(r"^## (\d+\. [^\n]*)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"```text\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?%?")
DRAWINGS = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text(encoding="utf-8"))


def run(source):
    """Runs the script. -> section title -> what it prints"""
    modes = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, SCRIPT, "exec"), {"__name__": "__main__"})
    finally:
        torch.set_deterministic_debug_mode(modes[0])
        torch.utils.deterministic.fill_uninitialized_memory = modes[1]
    parts = re.split(r"^(\d+\. .*)\n-+\n", out.getvalue(), flags=re.MULTILINE)
    return {title: body.strip("\n") for title, body in zip(parts[1::2], parts[2::2])}


def shown(page):
    """-> section title -> its output block, for sections that have one"""
    return {title: BLOCK.search(body)[1].strip("\n") for title, body in SECTION.findall(page) if BLOCK.search(body)}


def differences(printed, expected):
    """-> pairs of lines that differ by more than rounding: machines may add in different orders.

    Text and integers must be equal, decimals within one unit of their last digit, percentages within 0.1.
    """
    def value(number):
        return float(number.rstrip("%").replace(",", ""))

    def rounding(number):
        mantissa, _, exponent = number.partition("e")
        digits = len(mantissa.partition(".")[2].rstrip("%"))
        return 0.1 if number.endswith("%") else 10.0 ** (int(exponent or 0) - digits) if digits else 0

    def same(a, b):
        return NUMBER.sub("#", a) == NUMBER.sub("#", b) and all(
            abs(value(x) - value(y)) <= 1.01 * rounding(x) for x, y in zip(NUMBER.findall(a), NUMBER.findall(b)))

    a, b = printed.splitlines(), expected.splitlines()
    assert len(a) == len(b), f"{len(a)} lines are printed, {len(b)} are on the page"
    return [(x, y) for x, y in zip(a, b) if not same(x, y)]


def test_page_shows_script_output():
    sections, page = run(SCRIPT.read_text(encoding="utf-8")), shown(PAGE.read_text(encoding="utf-8"))
    assert list(page) == list(sections)
    for title in sections:
        assert not differences(sections[title], page[title]), \
            f"{title}: `python tests/test_walkthrough.py` updates the page"


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_numbers_appear_on_page(name):
    page = "\n".join(shown(PAGE.read_text(encoding="utf-8")).values())
    drawn = "\n".join(ET.parse(PAGE.parent / name).getroot().itertext())
    assert not [number for number in re.findall(r"\b\d\.\d{4,5}\b", drawn) if number not in page]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    printed = run(SCRIPT.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    for found in SECTION.finditer(text):
        if found[1] in printed:
            filled = BLOCK.sub(lambda _: f"```text\n{printed[found[1]]}\n```", found[2], count=1)
            text = text.replace(found[2], filled)
    PAGE.write_text(text, encoding="utf-8")
