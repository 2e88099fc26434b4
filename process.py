"""
One process of a run among others: ranks and signals.

Started by torchrun, WORLD processes run the same script, each with a GPU of its own and the whole model; RANK is this
one's number. Started by hand there is one, and torch.distributed stays out of it: every function below is then the
identity. Rank 0 alone prints and writes.

    share(items)     this rank's part of a list that all ranks have
    gather(items)    all ranks' lists as one, and where this rank's part is in it
    all_sum(t)       sum over ranks

Ends. A signal raises Stopped at once, wherever the step is: a cluster may give 30 seconds, a step may take longer. A
rank that dies makes the next gather() of the others raise Stopped; torchrun sends SIGTERM as well. Lists travel by
gloo, also on GPUs: a gloo call fails as soon as a peer's socket closes, while an NCCL kernel waits for the dead until a
timeout. So an all_sum() of a big GPU tensor comes right after a gather().

Not here: model or pipeline parallelism, elastic restarts.
"""
import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from tqdm import tqdm

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
SIGNALS = signal.SIGTERM, signal.SIGINT

say = tqdm.write if RANK == 0 else lambda text: None                 # prints above the progress bar


class Stopped(BaseException):
    """The run ends though it did nothing wrong. Not an Exception: no library on the way shall swallow it."""


# -----------------------------------------------------------------------------
# Ranks

def join(device):
    """Meet the other ranks. 30 minutes: the longest that one rank may sample after another is done."""
    if WORLD > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))


def collective(operation, *arguments):
    try:
        operation(*arguments)
    except RuntimeError as error:
        raise Stopped(f"another rank was lost ({str(error).splitlines()[0]})") from None


def share(items):
    """Consecutive, sizes differ by one at most, the same places for all lists of one length."""
    return items[len(items) * RANK // WORLD:len(items) * (RANK + 1) // WORLD]


def gather(items):
    """-> the items of all ranks in order, the slice of them that is this rank's. Tensors must be on the CPU."""
    parts = [items]
    if WORLD > 1:
        collective(dist.all_gather_object, parts := [None] * WORLD, items)
    start = sum(map(len, parts[:RANK]))
    return [item for part in parts for item in part], slice(start, start + len(items))


def all_sum(tensor):
    """In place; the same bits on every rank. Waits in Python: in CUDA's own wait no signal would get through."""
    if WORLD > 1:
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            time.sleep(1e-4)
        collective(work.wait)
    return tensor


def from_rank_0(tensor):
    """In place."""
    if WORLD > 1:
        collective(dist.broadcast, tensor, 0)


# -----------------------------------------------------------------------------
# Signals

def stop(number, _=None):
    hint = " (asked to, or because a rank died: see torchrun's report)" if WORLD > 1 else ""
    raise Stopped(f"stopped by {signal.Signals(number).name}{hint}")


@contextmanager
def signals_wait():
    """Within, files and memory change together; a signal takes effect at the end."""
    came = []
    before = [signal.signal(number, lambda n, _: came.append(n)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before):
            signal.signal(number, handler)
    if came:
        stop(came[0])


@contextmanager
def ending_with(save, advice):
    """However the block ends early, save() has been called. What is no fault of the code ends in one line, code 1."""
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        yield
    except BaseException as error:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)                    # torchrun repeats it; SIGKILL after 30 s
        try:
            saved = save()
        except OSError as failure:
            saved = f"the last step cannot be saved ({failure}), earlier checkpoints are whole"
        if not isinstance(error, (Stopped, OSError, torch.OutOfMemoryError)):
            raise
        if RANK == 0:
            print(f"train.py: {str(error).splitlines()[0]}; {saved}; {advice}", file=sys.stderr, flush=True)
        if WORLD > 1:
            os._exit(1)                                              # NCCL's farewell waits for ranks that are gone
        sys.exit(1)
