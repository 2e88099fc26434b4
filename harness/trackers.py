"""
Sends each step's numbers to a tracking service as well: --report-to trackio, wandb, tensorboard.

metrics.jsonl in the run's folder has every number with or without a tracker. So a service that
fails costs a run its curves there and nothing else.
"""
import importlib
from collections.abc import Callable
from pathlib import Path

from harness.process import first_line
from harness.ranks import RANK, say


class Tracker:
    """Reports the metrics of each step from rank 0; name None: reports nothing.

    The service is opened with the first step's metrics, so a run that cannot begin leaves no
    empty run there. The first failure is printed and ends the tracking, not the training.
    """

    def __init__(self, name: str | None, folder: Path, flags: dict):
        self.name = name if RANK == 0 else None
        self.folder = folder
        self.flags = flags
        self.write = None                        # function(numbers, step), once it is open

    def log(self, metrics: dict) -> None:
        if self.name is None:
            return
        try:
            self.write = self.write or open_tracker(self.name, self.folder, self.flags)
            numbers = {k: v for k, v in metrics.items() if k != "step" and v is not None}
            self.write(numbers, step=metrics["step"])
        except Exception as error:               # of a network, a login, a service: anything
            say(f"--report-to {self.name} stops here: {first_line(error)}")
            self.name = None


def open_tracker(name: str, folder: Path, flags: dict) -> Callable:
    """Opens a run at the service and returns its function(numbers, step)."""
    if name != "tensorboard":                    # trackio has the functions of wandb
        package = importlib.import_module(name)
        package.init(project="qerl", name=folder.name, config=flags)
        return package.log
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(numbers, step):
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()
    return log
