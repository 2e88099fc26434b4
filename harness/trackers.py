"""
--report-to: each step's numbers to trackio, wandb or tensorboard as well.
"""
import importlib

from harness.process import first_line
from harness.ranks import RANK, say



def open_tracker(name, folder, flags):
    """-> function(numbers, step) of trackio, wandb or tensorboard."""
    if name != "tensorboard":
        package = importlib.import_module(name)
        package.init(project="qerl", name=folder.name, config=flags)
        return package.log
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(metrics, step):
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)
        writer.flush()
    return log


class Tracker:
    """--report-to: opened with the first step's metrics, on rank 0. A failure of it is said once
    and ends the tracking, not the run: metrics.jsonl has every number.
    """

    def __init__(self, name, folder, flags):
        self.name = name if RANK == 0 else None
        self.about = folder, flags
        self.write = None

    def log(self, metrics):
        if self.name is None:
            return
        try:
            self.write = self.write or open_tracker(self.name, *self.about)
            numbers = {k: v for k, v in metrics.items() if k != "step" and v is not None}
            self.write(numbers, step=metrics["step"])
        except Exception as error:               # of a network, a login, a service: anything
            say(f"--report-to {self.name} stops here: {first_line(error)}")
            self.name = None
