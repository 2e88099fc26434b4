"""
Ranks share lists in order and wait for each other. Runs on several ranks are in test_train.py.

python -m pytest tests/test_ranks.py -v
"""
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ranks
from files import Stopped


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_ranks_shares_make_up_the_list_in_order_and_differ_by_one_at_most(monkeypatch, world):
    monkeypatch.setattr(ranks, "WORLD", world)
    for n in (0, 1, 2, 7, 16, 17):
        shares = []
        for rank in range(world):
            monkeypatch.setattr(ranks, "RANK", rank)
            shares.append(ranks.share(list(range(n))))
        assert sum(shares, []) == list(range(n))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_with_one_process_sharing_and_gathering_change_nothing():
    tensor = torch.ones(3)
    assert ranks.gather(["a", "b"]) == ["a", "b"] and ranks.all_sum(tensor) is tensor
    ranks.join_ranks(torch.device("cpu"))
    assert tensor.tolist() == [1, 1, 1] and not torch.distributed.is_initialized()


def test_a_collective_that_fails_means_a_lost_rank():
    def peer_closed():
        raise RuntimeError("Connection closed by peer\nand a page of C++")

    with pytest.raises(Stopped, match=r"^another rank was lost \(Connection closed by peer\)$"):
        ranks.collective(peer_closed)


# -----------------------------------------------------------------------------
# How ranks wait

class Store:
    """As torch's: the meetings that each rank has come to, by rank."""

    def __init__(self, *meetings):
        self.values = {f"meetings of {rank}": str(n).encode() for rank, n in enumerate(meetings) if n is not None}

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


class LostStore:
    def check(self, keys):
        raise RuntimeError("Connection reset by peer\nand a page of C++")


@pytest.mark.parametrize("rank,meetings,said", [
    (0, (3, 2), "rank 1"), (0, (3, None, 3, 2), "ranks 1, 3"), (2, (3, None, 3, 2), ""), (2, (2, 2, 3), "ranks 0, 1"),
    (0, (3, 3), "an answer of the other ranks, which are all there"), (1, (3, 4), ""), (0, (2, 3), "an answer of")])
def test_the_first_rank_that_waits_names_those_that_are_not_there(monkeypatch, rank, meetings, said):
    monkeypatch.setattr(ranks, "WORLD", len(meetings))
    monkeypatch.setattr(ranks, "RANK", rank)
    roll = ranks.Roll()
    roll.meetings, roll.store = 3, Store(*meetings)                       # what it has written of itself may be lost
    assert roll.awaited().startswith(said) and bool(roll.awaited()) == bool(said)


def test_without_a_store_a_rank_waits_for_the_one_that_has_it(monkeypatch):
    roll = ranks.Roll()
    roll.place = "host:29500"
    assert roll.awaited() == "rank 0 at host:29500"
    monkeypatch.setattr(ranks, "WORLD", 2)
    roll.store = LostStore()
    assert roll.awaited() == "the other ranks, and for the store at host:29500 (Connection reset by peer)"


def test_a_waiting_rank_says_so_each_time_that_its_wait_has_doubled(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    told, end = [], threading.Event()
    monkeypatch.setattr(ranks.roll, "awaited",
                        lambda: told.append(1) or ("rank 7" if len(told) < 4 else end.set() or ""))
    ranks.interruptible(end.wait)
    assert capsys.readouterr().out.splitlines() == [f"rank 0 has waited {s:g} s for rank 7" for s in (0.05, 0.1, 0.2)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_wait_that_itself_heeds_none(number, ctrl_c_interrupts):
    def stop(*_):
        raise Stopped("told to")

    before, end = signal.signal(number, stop), threading.Event()
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        with pytest.raises(Stopped, match="told to"):
            ranks.interruptible(end.wait)
    finally:
        end.set()
        signal.signal(number, before)


def test_what_fails_in_a_wait_is_raised_where_it_was_asked_for():
    with pytest.raises(ZeroDivisionError):
        ranks.interruptible(lambda: 1 / 0)


@pytest.mark.parametrize("environment,said", [
    ({"RANK": "abc"}, "^RANK=abc: expected a whole number; torchrun sets it$"), ({"RANK": "-1"}, "^RANK=-1: expected"),
    ({"WORLD_SIZE": ""}, "^WORLD_SIZE=: expected"), ({"LOCAL_RANK": "1.5"}, "^LOCAL_RANK=1.5: expected"),
    ({"LOCAL_RANK": "\u00b2"}, "^LOCAL_RANK=\u00b2: expected"),
    ({"RANK": "1"}, "^RANK=1, WORLD_SIZE=1: the first must be"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "below the second; torchrun sets both$"), ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0")])
def test_an_environment_that_cannot_be_torchruns_is_refused(monkeypatch, environment, said):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.read_environment() == (0, 1, 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Stopped, match=said):
        ranks.read_environment()


def test_a_wrong_rank_ends_a_program_in_one_line():
    done = subprocess.run([sys.executable, "-c", "import ranks"], capture_output=True, text=True,
                          cwd=Path(ranks.__file__).parent.parent, env=os.environ | {"RANK": "1"})
    assert done.returncode == 1 and done.stderr.startswith("-c: RANK=1, WORLD_SIZE=1: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("host,port", [(None, "29500"), ("", "29500"), ("here", None), ("here", "x"), ("here", "0"),
                                       ("here", "65536"), ("here", "-1")])
def test_ranks_that_do_not_know_where_to_meet_are_told_to_use_torchrun(monkeypatch, host, port):
    monkeypatch.setattr(ranks, "WORLD", 2)
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE=2, .*: start several ranks with torchrun"):
        ranks.join_ranks(torch.device("cpu"))
