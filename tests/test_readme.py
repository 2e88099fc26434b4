"""
The README's file tree is the disk's, and files keep their opening docstring.

python -m pytest tests/test_readme.py -v
"""
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_tree_names_every_root_file_and_no_other():
    tree = re.search(r"## Files.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    named = {line.split()[0] for line in tree.strip().splitlines()}
    on_disk = {path.name for path in ROOT.glob("*.py")} | {"tiny/", "tests/", "docs/"}
    assert named == on_disk, named ^ on_disk


def test_every_root_file_opens_with_a_docstring_and_stays_within_120_columns():
    for path in ROOT.glob("*.py"):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), path.name
        wide = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 120]
        assert not wide, f"{path.name}: lines {wide}"


def test_the_readme_stays_within_120_columns():
    assert max(map(len, (ROOT / "README.md").read_text().splitlines())) <= 120
