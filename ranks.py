"""
How several processes train one adapter.

torchrun starts WORLD processes of the same script, each with a full copy of the model and its own
GPU. RANK is this one's number; without torchrun it is 0 of 1.

    problems = share(problems)         each rank takes its share of the list
    rows = gather(rows)                each rank gets everyone's rows, in rank order
    all_sum(gradient)                  each rank gets the sum of all gradients, with the same bits

With one process all three are no-ops. Only rank 0 prints and writes files.

Lists travel over gloo, which uses sockets, and gradients on GPUs over NCCL, which uses kernels. The
two differ in what happens when a rank dies:

    gloo     the dead rank's socket closes, and the others' calls fail at once
    NCCL     a kernel that waits for the dead rank spins until a timeout, and nothing can stop it

So every all_sum() comes right after a gather(). If a rank has died, the gather raises Stopped, the
others save their work, and none of them enters the all_sum.

Not here: model parallelism, elastic restarts.
"""
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

from env import LOCAL_RANK, RANK, WORLD  # noqa: F401
from files import CONTINUE, Stopped, UserError, first_line

# Must exceed the longest wait in a run, when one rank is still sampling long answers after another
# has finished its short ones, or while rank 0 calibrates a large model. A dead rank's socket
# closes, so only one that hangs makes the others wait this long.
TIMEOUT = timedelta(hours=6)
MEETING = timedelta(minutes=10)                  # from one rank's start to the last one's


def say(text: str) -> None:
    """Prints a line above the progress bar, on rank 0 only."""
    if RANK == 0:
        tqdm.write(text)


def join_ranks(device: torch.device) -> None:
    """Connects the ranks. UserError if that fails."""
    def meet():
        if device.type == "cuda":
            torch.cuda.set_device(device)        # each thread has its own current device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        socket.getaddrinfo(os.environ.get("MASTER_ADDR"), 0)     # torch would try until MEETING
        store, rank, world = next(dist.rendezvous("env://", timeout=MEETING))
        store.set_timeout(TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)

    if WORLD > 1:
        try:
            interruptible(meet)
        except (ValueError, RuntimeError, OSError) as error:
            names = "MASTER_ADDR", "MASTER_PORT"
            place = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
            raise UserError(f"{place}: the {WORLD} ranks cannot connect "
                            f"({first_line(error)}): start them with torchrun") from None


def interruptible(operation: Callable, *arguments: object) -> None:
    """Calls a function that may wait in C++ for other ranks, while still handling signals."""
    # Python handles signals only in the main thread, and only while it isn't in C++, so another
    # thread makes the call.
    done = threading.Event()
    failures = []

    def call():
        try:
            operation(*arguments)
        except BaseException as error:
            failures.append(error)
        done.set()

    # A daemon, so nobody waits for it when the main thread ends.
    threading.Thread(target=call, daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]


def share(items: list) -> list:
    """This rank's consecutive share of a list that all ranks have; sizes differ by at most one."""
    return items[len(items) * RANK // WORLD:len(items) * (RANK + 1) // WORLD]


def gather(items: list) -> list:
    """All ranks' items as one list, in rank order; undoes share().

    Tensors in them must be on the CPU. Stopped if a rank is lost. gather([]) is a barrier.
    """
    lists = [items]
    if WORLD > 1:
        lists = [None] * WORLD
        with a_lost_rank_ends_the_run():
            interruptible(dist.all_gather_object, lists, items)
    return [item for items in lists for item in items]


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums a tensor over the ranks, in place, with the same bits on every rank.

    Call it right after a gather() (see the top of this file). Stopped if a rank is lost.
    """
    if WORLD > 1:
        with a_lost_rank_ends_the_run():
            work = dist.all_reduce(tensor, async_op=True)
            # work.wait() alone would block in C++. After this loop it only makes this thread's CUDA
            # stream wait for the sum.
            while not work.is_completed():
                time.sleep(1e-4)
            work.wait()
    return tensor


@contextmanager
def a_lost_rank_ends_the_run() -> Iterator[None]:
    """A context in which an error in torch.distributed becomes a Stopped."""
    try:
        yield
    except RuntimeError as error:
        raise Stopped(f"another rank was lost ({first_line(error)})", CONTINUE) from None
