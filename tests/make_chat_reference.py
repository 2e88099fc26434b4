"""
Renders the conversations in chat_reference.json again, with Qwen's own chat templates and thinking on and off, and
writes the texts there. test_prompts.py compares prompts.py with them.

    pip install -r requirements.txt
    pip download --no-deps trl==1.16.0 unsloth==2026.10.9
    python tests/make_chat_reference.py trl-1.16.0-*.whl unsloth-2026.10.9-*.whl

The templates are read from the two packages, which are not run or installed (both are Apache-2.0, like the models):

    qwen2.5     trl/chat_templates/qwen2_5.jinja, from Qwen2.5-7B-Instruct
    qwen3       trl/chat_templates/qwen3.jinja, from Qwen3-8B and its other sizes
    instruct    trl/chat_templates/qwen3_instruct_2507.jinja, from Qwen3-4B-Instruct-2507
    thinking    qwen3_thinking_template in unsloth/chat_templates.py, from Qwen3-4B-Thinking-2507. The model's own file
                writes the line breaks of the last text as "\\n"; real ones, as here, mean the same

jinja2 renders them as transformers does, with trim_blocks and lstrip_blocks. The tests use stand-ins for the templates
(helpers.py).
"""
import ast
import hashlib
import json
import sys
import zipfile
from pathlib import Path

import jinja2

FILES = {"qwen2.5": "qwen2_5", "qwen3": "qwen3", "instruct": "qwen3_instruct_2507"}
MODES = {"qwen2.5": ["off"], "qwen3": ["off", "on"], "instruct": ["off"], "thinking": ["on"]}
FILE = Path(__file__).with_name("chat_reference.json")


def templates(trl, unsloth):
    """-> name -> template."""
    with zipfile.ZipFile(trl) as wheel:
        found = {name: wheel.read(f"trl/chat_templates/{file}.jinja").decode() for name, file in FILES.items()}
    with zipfile.ZipFile(unsloth) as wheel:
        tree = ast.parse(wheel.read("unsloth/chat_templates.py"))
    found["thinking"], = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
                          and ast.unparse(node.targets[0]) == "qwen3_thinking_template")
    return found


if __name__ == "__main__":
    found, environment = templates(*sys.argv[1:]), jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    reference = json.loads(FILE.read_text(encoding="utf-8"))
    reference["templates_sha256"] = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in found.items()}
    reference["texts"] = {f"{name} {thinking}": [
        environment.from_string(text).render(messages=messages, add_generation_prompt=True,
                                             enable_thinking=thinking == "on")
        for messages in reference["conversations"]] for name, text in found.items() for thinking in MODES[name]}
    FILE.write_text(json.dumps(reference, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
