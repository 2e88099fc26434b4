"""
What a resumed run needs, in memory and on disk.

    live    tensors and counters that training changes in place, in the middle of steps
    kept    a copy on the host, as of the end of the last whole step: 50 ms a step for 7B at rank 32 (1 GB, pinned)

A checkpoint is always written from `kept`. So whatever ends a run, wherever in a step, rank 0 can save the last whole
step alone, without a word to the other ranks or to a GPU that may be stuck.

    checkpoints/step_000040/state.safetensors     the tensors
                           /state.json            the counters, and a SHA-256 of both files' content

Written into a temporary folder that is flushed, renamed and flushed again: a crash leaves all of it or nothing. The
last two stay. Noise, order and sampling are functions of the seed and the counters: there is no generator to save.

Not here: the adapter for other programs (lora.save_adapter), the log files (train.py trims them to the checkpoint).
"""
import hashlib
import json
import os
import shutil
import time

import torch
from safetensors.torch import load, save

from lora import write_atomically


def digest(tensors, counters):
    return hashlib.sha256(tensors + json.dumps(counters, sort_keys=True).encode()).hexdigest()


def flush(folder):
    """Make the names in a folder durable: without it a rename may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class Checkpoints:
    """live: name -> tensor, counters: name -> number; both are changed in place by whoever trains."""

    def __init__(self, folder, live, counters):
        self.folder, self.live, self.counters = folder, live, counters
        self.kept = {name: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for name, t in live.items()}
        self.kept_counters = {}
        self.keep()

    def keep(self):
        """The step is whole."""
        for name, t in self.live.items():
            self.kept[name].copy_(t)
        self.kept_counters.update(self.counters)

    def restore(self):
        """Back to the last whole step."""
        for name, t in self.live.items():
            t.copy_(self.kept[name])
        self.counters.update(self.kept_counters)

    def save(self):
        """Raises OSError with the earlier checkpoints untouched and the space given back."""
        final, temporary = self.folder / f"step_{self.kept_counters['step']:06d}", self.folder / ".writing"
        if final.exists():
            return                                                   # load() has seen it whole, or this run wrote it
        tensors = save(self.kept)
        record = {**self.kept_counters, "sha256": digest(tensors, self.kept_counters)}
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            write_atomically(temporary / "state.safetensors", tensors)
            write_atomically(temporary / "state.json", json.dumps(record).encode())
            flush(temporary)
            os.replace(temporary, final)
            flush(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in sorted(self.folder.glob("step_*"))[:-2]:
            shutil.rmtree(old)

    def load(self):
        """`kept` from the newest whole checkpoint -> lines to print. Damaged ones are renamed out of the way."""
        lines = []
        for folder in sorted(self.folder.glob("step_*"), reverse=True):
            try:
                counters = json.loads((folder / "state.json").read_text())
                tensors = (folder / "state.safetensors").read_bytes()
                if counters.pop("sha256") != digest(tensors, counters):
                    raise ValueError("its checksum does not match")
            except (OSError, ValueError, KeyError) as error:
                lines.append(f"{folder}: damaged checkpoint passed over: {error}")
                folder.rename(folder.with_name(f"damaged_{folder.name}_{time.time_ns()}"))
                continue
            for name, t in load(tensors).items():
                self.kept[name].copy_(t)
            self.kept_counters.update(counters)
            return lines + [f"{folder}: going on from here"]
        return lines + [f"{self.folder}: no whole checkpoint, starting from step 0"]
