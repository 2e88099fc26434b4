"""
--report-to: a run's metrics in trackio or wandb, which show them in a browser.

    library = tracker.load("trackio")            # UserError if it isn't installed
    tracker.start(library, folder)               # a resumed run continues its curves
    tracker.log(library, metrics)
    tracker.finish(library)

Both libraries have the same init(), log() and finish(). Only rank 0 reports. Once a run has
started, an error in a library is printed and doesn't end it.
"""
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from files import UserError, first_line
from harness.folder import RunFolder
from ranks import RANK, say


def load(name: str) -> ModuleType | None:
    """-> the library of --report-to; None if that is "none", and on other ranks."""
    if name == "none" or RANK > 0:
        return None
    try:
        library = importlib.import_module(name)
        library.init                             # a folder of this name is a module too
    except Exception as error:                   # installed, it may lack or dislike another package
        raise UserError(f"--report-to {name}: needs pip install {name} "
                        f"({first_line(error)})") from None
    return library


def start(library: ModuleType, folder: RunFolder) -> None:
    """Opens the run under a name that run.json keeps: its folder's and a random key. trackio finds
    a resumed run by its name, wandb by its id, the key. UserError if the library refuses.
    """
    run = folder.run_json.get("tracked_as") or f"{folder.path.name}-{os.urandom(4).hex()}"
    wandb = dict(id=run.rpartition("-")[2], dir=str(folder.path))
    more = wandb if library.__name__ == "wandb" else {}
    try:
        library.init(project="qerl", name=run, config=folder.run_json, resume="allow", **more)
    except Exception as error:
        raise UserError(f"--report-to {library.__name__}: {first_line(error)}") from None
    folder.note(tracked_as=run)


def log(library: ModuleType | None, metrics: dict) -> None:
    """Reports a step's line of metrics.jsonl."""
    if library:
        with errors_printed(library):
            library.log(metrics, step=metrics["step"])


def finish(library: ModuleType | None) -> None:
    """Ends the report."""
    if library:
        with errors_printed(library):
            library.finish()


@contextmanager
def errors_printed(library: ModuleType) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        say(f"--report-to {library.__name__}: {first_line(error)}")
