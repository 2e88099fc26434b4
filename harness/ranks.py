"""
Which device a process computes on, which kernels decode there, and how several processes work together.

Ranks. Started by torchrun, WORLD processes run the same script, each with a GPU of its own and
the whole model; RANK is this one's number. Started by hand there is one: share, gather and all_sum
are the identity. Rank 0 alone prints and writes.

A rank that dies makes the next gather() of the others raise Stopped. Lists travel by gloo,
also on GPUs: a gloo call fails as soon as a peer's socket closes, while an NCCL kernel waits for
the dead until a timeout. So an all_sum() of a big GPU tensor comes right after a gather().

Not here: model parallelism, elastic restarts.
"""
import importlib.util
import os
import re
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from harness.process import Stopped, first_line

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
KERNELS = "hopper", "portable"                   # --kernels


def device_of(name, model):
    """--device -> torch.device, of several ranks each its own GPU; ValueError if there is none. It
    becomes the current one, on which Triton launches.

    name None: a GPU if there is one, else the CPU for a model that is here already.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and not Path(model).is_dir():
            raise ValueError(f"--model {model}: torch sees no GPU; --device cpu runs it on the CPU")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not match:
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device(name)
    index = LOCAL_RANK if WORLD > 1 else int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def settle_cpu(model):
    """On a CPU: gradients of a prompt that answers share, which threads would add in any order, are
    added in one; and two threads for a small model, more wait for each other longer than they work.
    """
    if model.device.type == "cpu":
        torch.set_deterministic_debug_mode("error")              # imports less than its other name
        torch.utils.deterministic.fill_uninitialized_memory = False      # of torch.empty
        if model.config.width < 1024:
            torch.set_num_threads(min(2, torch.get_num_threads()))


def capability(device):
    """(8, 6) of an sm_86; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def kernels_for(device, wanted):
    """--kernels -> which 4-bit matmul decodes: "hopper" of fast/hopper_fp4.py, "portable" of
    marlin_fp4.py, None on a CPU. ValueError if the GPU cannot run it.
    """
    if device.type != "cuda":
        if wanted != "auto":
            raise ValueError(f"--kernels {wanted}: for a GPU, --device is {device}")
        return None
    if torch.version.hip:  # ROCm: an MI200 reports capability (9, 0), as if it were a Hopper
        raise ValueError(f"--device {device}: an AMD GPU; the kernels run on NVIDIA GPUs only")
    major, minor = capability(device)
    gpu = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if major < 8:
        raise ValueError(f"--device {device}: {gpu}: the kernels need sm_80 (Ampere) or later")
    if not importlib.util.find_spec("triton"):
        raise ValueError(f"--device {device}: a GPU needs Triton: pip install triton")
    if wanted == "hopper" and major != 9:
        raise ValueError(f"--kernels hopper: {gpu}: it needs sm_90")
    if wanted == "auto":
        return "hopper" if major == 9 else "portable"
    return wanted


def choose_device(args):
    """--device and --kernels of a program -> torch.device; says which kernels decode there."""
    device = device_of(args.device, args.model)
    args.device = args.device or device.type
    kernels = kernels_for(device, args.kernels)
    if kernels:
        say(f"decode kernels: {kernels}, on {torch.cuda.get_device_name(device)}")
    return device


def say(text):
    """Prints above the progress bar; rank 0 alone."""
    if RANK == 0:
        tqdm.write(text)


def join(device):
    """Meet the other ranks. 30 minutes: one rank may sample that long after another is done."""
    if WORLD > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))


def collective(operation, *arguments):
    try:
        operation(*arguments)
    except RuntimeError as error:
        raise Stopped(f"another rank was lost ({first_line(error)})") from None


def share(items):
    """This rank's part of a list that all have: consecutive, sizes differ by one at most."""
    return items[len(items) * RANK // WORLD:len(items) * (RANK + 1) // WORLD]


def gather(items):
    """-> all ranks' items as one list, in order of the ranks. CPU tensors."""
    parts = [items]
    if WORLD > 1:
        parts = [None] * WORLD
        collective(dist.all_gather_object, parts, items)
    return [item for part in parts for item in part]


def all_sum(tensor):
    """In place, the same bits on every rank. Waits in Python, where signals get through."""
    if WORLD > 1:
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            time.sleep(1e-4)
        collective(work.wait)
    return tensor
