"""
Ranks share lists in order and wait for each other. test_train.py runs several ranks.

python -m pytest tests/test_ranks.py -v
"""
import os
import signal
import threading

import pytest
import torch

import ranks
from files import Stopped, UserError


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shares_are_in_order_and_even(monkeypatch, world):
    monkeypatch.setattr(ranks, "WORLD", world)
    for n in (0, 1, 2, 7, 16, 17):
        shares = []
        for rank in range(world):
            monkeypatch.setattr(ranks, "RANK", rank)
            shares.append(ranks.share(list(range(n))))
        assert sum(shares, []) == list(range(n))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_failed_collective_means_a_lost_rank(monkeypatch):
    def peer_closed(*_, **__):
        raise RuntimeError("Connection closed by peer\nand a page of C++")

    monkeypatch.setattr(ranks, "WORLD", 2)
    for name in ("all_gather_object", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, peer_closed)
    one = torch.ones(1)
    for meet in (lambda: ranks.gather([]), lambda: ranks.all_sum(one)):
        with pytest.raises(Stopped, match="Connection closed by peer") as stopped:
            meet()
        assert "C++" not in str(stopped.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_interrupts_a_blocking_wait(number):
    def stop(*_):
        raise Stopped("asked to")

    before, end = signal.signal(number, stop), threading.Event()
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        with pytest.raises(Stopped, match="asked to"):
            ranks.interruptible(end.wait)
    finally:
        end.set()
        signal.signal(number, before)


def test_error_in_a_wait_is_raised_in_the_caller():
    with pytest.raises(ZeroDivisionError):
        ranks.interruptible(lambda: 1 / 0)


@pytest.mark.parametrize("address,port", [("", ""), ("unknown.invalid", "29500"), ("localhost", "abc")])
def test_unusable_rendezvous_is_named(monkeypatch, address, port):
    monkeypatch.setattr(ranks, "WORLD", 2)
    for name, value in dict(MASTER_ADDR=address, MASTER_PORT=port, RANK="1", WORLD_SIZE="2").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"MASTER_ADDR={address}, MASTER_PORT={port}: .* torchrun"):
        ranks.join_ranks(torch.device("cpu"))
