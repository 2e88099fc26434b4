"""
How several processes train one adapter.

Started by hand, a program is one process. Started by torchrun, WORLD processes run the same script
at the same time, each with the whole model and a GPU of its own. RANK is the number of this one:

    problems = share(problems)         each rank takes its part of the list
    rows = gather(rows)                each rank gets everybody's rows, in the order of the ranks
    all_sum(gradient)                  each rank gets the sum of all gradients, with the same bits

With one process these three are the identity, so the code that calls them does not ask. Rank 0
alone prints and writes files.

Why there are two ways of talking. Lists travel over gloo, which uses sockets; gradients on GPUs
travel over NCCL, which uses kernels. They differ in what happens when a rank dies:

    gloo     the dead rank's socket closes, and the others' calls fail at once
    NCCL     a kernel that waits for the dead rank spins until a timeout, and nothing can stop it

So a gather() comes right before every all_sum(). If a rank died since the last meeting, the gather
fails and raises Stopped, the others save their work, and nobody enters the all_sum alone.

How ranks wait. torch waits in C++, where Python cannot handle signals. So collective() lets another
thread wait there. The main thread still handles signals, and prints which ranks it waits for. It
learns this from the store through which the ranks found each other, over a second connection: each
rank writes there how many meetings it has come to.

Not here: model parallelism, elastic restarts.
"""
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from files import GO_ON, Stopped, first_line


def read_environment() -> tuple[int, int, int]:
    """-> what torchrun says in the environment: RANK, WORLD_SIZE, LOCAL_RANK. Stopped if these
    cannot be right: with a RANK and no WORLD_SIZE, say, a process might print and write nothing.
    """
    values = {}
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if not re.fullmatch("[0-9]{1,6}", text):
            raise Stopped(f"{name}={text}: expected a whole number; torchrun sets it")
        values[name] = int(text)
    rank, world = values["RANK"], values["WORLD_SIZE"]
    if rank >= world:
        raise Stopped(f"RANK={rank}, WORLD_SIZE={world}: the first must be below the second; "
                      "torchrun sets both")
    return tuple(values.values())


# This process among all, how many there are, and this one among those of its machine.
RANK, WORLD, LOCAL_RANK = read_environment()


def say(text: str) -> None:
    """Prints a line above the progress bar, on rank 0 alone."""
    if RANK == 0:
        tqdm.write(text)


# The timeout of a meeting. It must exceed the longest wait in a run: one rank may sample long
# answers for half an hour after another is done with its short ones.
TIMEOUT = timedelta(minutes=30)
PATIENCE = 30.0                                  # seconds of waiting after which a line says so


def join_ranks(device: torch.device) -> None:
    """Meets the other ranks; afterwards all of them can talk. ValueError if the environment does
    not say where, Stopped if they cannot meet there.
    """
    if WORLD == 1:
        return
    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT", "")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise ValueError(f"the environment has WORLD_SIZE={WORLD}, MASTER_ADDR={host} and "
                         f"MASTER_PORT={port or None}: start several ranks with torchrun")
    roll.place = f"{host}:{port}"
    try:
        interruptible(connect, host, int(port), device)
    except RuntimeError as error:
        raise Stopped(f"the ranks cannot meet at {roll.place} ({first_line(error)})") from None


def connect(host: str, port: int, device: torch.device) -> None:
    # torchrun's agent runs the store already; without torchrun rank 0 runs it.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    group, notes = (dist.TCPStore(host, port, WORLD, here, TIMEOUT, wait_for_workers=False,
                                  multi_tenant=True)
                    for here in (RANK == 0 and not agent, False))
    # A connection serves one call at a time. That of the group may be waiting, this one never.
    notes.set_timeout(timedelta(seconds=10))
    roll.store = notes
    roll.arrive()
    if device.type == "cuda":
        torch.cuda.set_device(device)            # each thread has a current device of its own
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", group), rank=RANK,
                            world_size=WORLD, timeout=TIMEOUT)


class Roll:
    """Who has come to the meetings of the ranks so far. All ranks have the same meetings in the
    same order.
    """

    def __init__(self):
        self.place = ""                          # host:port of the store
        self.store = None                        # once this rank is connected
        self.meetings = 0                        # that this rank has come to

    def arrive(self) -> None:
        """Writes down that this rank has come to the next meeting."""
        self.meetings += 1
        with suppress(RuntimeError):             # without the store a run only says less
            if self.store:
                self.store.set(f"meetings of {RANK}", str(self.meetings))

    def missing(self) -> list[int]:
        """The ranks that have not come to this rank's meeting yet."""
        def came(rank):
            key = f"meetings of {rank}"
            return int(self.store.get(key)) if self.store.check([key]) else 0
        others = (rank for rank in range(WORLD) if rank != RANK)
        return [rank for rank in others if came(rank) < self.meetings]

    def awaited(self) -> str:
        """Whom this rank waits for; "" if another rank says so: only the first of those that wait
        does.
        """
        if self.store is None:                   # rank 0 has it
            return f"rank 0 at {self.place}"
        try:
            missing = self.missing()
        except RuntimeError as error:
            return f"the other ranks, and for the store at {self.place} ({first_line(error)})"
        if RANK != min(set(range(WORLD)) - set(missing)):
            return ""
        if not missing:
            return "an answer of the other ranks, which are all there"
        return f"rank{'s' if missing[1:] else ''} {', '.join(map(str, missing))}"


roll = Roll()


def interruptible(operation: Callable, *arguments: object) -> None:
    """Calls a function that may wait in C++ for other ranks. Signals are handled meanwhile, and a
    line says who is awaited: after PATIENCE, and again each time that the wait has doubled.
    """
    done = threading.Event()
    failures = []

    def call():
        try:
            operation(*arguments)
        except BaseException as error:
            failures.append(error)
        done.set()

    began = time.monotonic()
    # A daemon: if the main thread ends, nobody waits for this one.
    threading.Thread(target=call, daemon=True).start()
    due = PATIENCE
    while not done.wait(max(0.0, began + due - time.monotonic())):
        awaited = roll.awaited()
        if awaited:
            tqdm.write(f"rank {RANK} has waited {due:g} s for {awaited}")
            sys.stdout.flush()
        due *= 2
    if failures:
        raise failures[0]


def share(items: list) -> list:
    """This rank's consecutive part of a list that all ranks have. Parts differ by one at most."""
    return items[len(items) * RANK // WORLD:len(items) * (RANK + 1) // WORLD]


def gather(items: list) -> list:
    """The items of all ranks as one list, in the order of the ranks; share() undone.

    Tensors in them must be on the CPU. Stopped if a rank is gone. gather([]) makes ranks wait for
    each other.
    """
    parts = [items]
    if WORLD > 1:
        parts = [None] * WORLD
        collective(dist.all_gather_object, parts, items)
    return [item for part in parts for item in part]


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums a tensor over the ranks, in place. Every rank gets the same bits.

    Call it right after a gather(): see the top of this file.
    """
    if WORLD > 1:
        with a_lost_rank_ends_the_run():
            work = dist.all_reduce(tensor, async_op=True)
            # work.wait() at once would wait in C++. After this loop it does not wait any more: it
            # makes this thread's CUDA stream see the sum.
            while not work.is_completed():
                time.sleep(1e-4)
            work.wait()
    return tensor


def collective(operation: Callable, *arguments: object) -> None:
    """Calls a function of torch.distributed in which all ranks meet. If it fails, Stopped says that
    a rank is lost.
    """
    roll.arrive()
    with a_lost_rank_ends_the_run():
        interruptible(operation, *arguments)


@contextmanager
def a_lost_rank_ends_the_run() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Stopped(f"another rank was lost ({first_line(error)})", GO_ON) from None
