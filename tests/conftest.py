"""Puts the repository's root on the import path, so that a bare `pytest` finds the modules; the tiny checkpoints."""
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, as program.py
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: two threads on a busy machine take 12 times longer
from tiny_qwen2 import SHAPES, config_json, random_tensors, write_folder


class Tiny(NamedTuple):
    folder: Path
    raw: dict                                   # of config.json
    tensors: dict                               # Hugging Face name -> bf16


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """shape name -> its checkpoint on disk and in memory."""
    made = {}
    for shape in SHAPES:
        raw = config_json(shape)
        tensors = random_tensors(raw)
        made[shape] = Tiny(write_folder(tmp_path_factory.mktemp(shape), raw, tensors), raw, tensors)
    return made
