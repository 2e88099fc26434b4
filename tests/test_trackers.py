"""
--report-to sends a service every number, and the failure of a service does nothing to the run.

python -m pytest tests/test_trackers.py -v
"""
import signal
import sys
from pathlib import Path

import pytest

from env import stop_on_signal
from files import Stopped
from harness import console
from harness.console import Tracker


class Service:
    """Stands in for trackio and wandb: keeps what it is told, and fails from one call on."""

    def __init__(self, monkeypatch, fails_at=99):
        self.told, self.fails_at = [], fails_at
        self.init = self.log = self.hear
        for name in ("trackio", "wandb"):
            monkeypatch.setitem(sys.modules, name, self)

    def hear(self, *args, **named):
        if len(self.told) == self.fails_at:
            raise ConnectionError("no route\nto host")
        self.told.append((*args, *named.values()))


STEPS = [{"step": 7, "reward": 0.5, "eval_accuracy": None}, {"step": 8, "reward": 0.75, "eval_accuracy": 1.0}]
TOLD = [("qerl", "x", {"lr": 1}), ({"reward": 0.5}, 7), ({"reward": 0.75, "eval_accuracy": 1.0}, 8)]


@pytest.mark.parametrize("name,rank,told", [("wandb", 0, TOLD), ("trackio", 0, TOLD), (None, 0, []), ("wandb", 1, [])])
def test_a_service_is_sent_the_numbers_of_every_step_by_rank_0(name, rank, told, monkeypatch):
    service = Service(monkeypatch)
    monkeypatch.setattr(console, "RANK", rank)
    tracker = Tracker(name, Path("runs/x"), {"lr": 1})
    assert service.told == []                                             # nothing is opened before there is a step
    for metrics in STEPS:
        tracker.log(metrics)
    assert service.told == told


@pytest.mark.parametrize("fails_at", [0, 2])                              # as it is opened; at the second step
def test_a_service_that_fails_is_reported_once_and_ends_nothing_else(fails_at, tmp_path, monkeypatch, capsys):
    service = Service(monkeypatch, fails_at)
    tracker = Tracker("wandb", tmp_path, {})
    for metrics in STEPS * 2:
        tracker.log(metrics)
    assert len(service.told) == fails_at
    assert capsys.readouterr().out.count("--report-to wandb") == 1


def test_a_signal_while_reporting_stops_the_run(tmp_path, monkeypatch):
    service = Service(monkeypatch)
    service.log = lambda metrics, step: stop_on_signal(signal.SIGTERM)
    with pytest.raises(Stopped):
        Tracker("wandb", tmp_path, {}).log(STEPS[0])
