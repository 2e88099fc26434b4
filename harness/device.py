"""
Where a process computes, and which kernels decode there.

    device, kernels = choose_device(None, "auto", "qwen2.5-7b")       cuda:0, "hopper" on an H200
    refuse_large_rank(1024, device, "--lora-rank 1024")               ValueError on any GPU

Under torchrun each rank has a GPU of its own. Whatever this machine does not have is a ValueError
that names the flag.
"""
import importlib.util
import re
from pathlib import Path

import torch

from harness.ranks import LOCAL_RANK, WORLD

KERNELS = "hopper", "portable"                   # --kernels, besides auto


def choose_device(name: str | None, kernels: str, model: str | Path
                  ) -> tuple[torch.device, str | None]:
    """--device, --kernels and --model of a program -> the device, and which kernels decode there,
    None on a CPU. ValueError for what this machine does not have.
    """
    device = device_of(name, model)
    return device, kernels_for(device, kernels)


def device_of(name: str | None, model: str | Path) -> torch.device:
    """--device -> the device, which becomes torch's current one: Triton launches there. ValueError
    if there is no such device. Under torchrun it is the GPU of this rank.

    Without a name it is a GPU if there is one, else the CPU. But a model that is not on this
    machine yet is downloaded to run on a CPU only if --device cpu asks for that.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and not Path(model).is_dir():
            raise ValueError(f"--model {model}: there is no such folder; to download a model, torch "
                             "has to see a GPU (--device cpu runs it on the CPU, far too slowly to "
                             "train)")
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


def kernels_for(device: torch.device, wanted: str) -> str | None:
    """--kernels -> which 4-bit matmul decodes, of KERNELS; None on a CPU. ValueError if the GPU
    cannot run it.
    """
    if device.type != "cuda":
        if wanted != "auto":
            raise ValueError(f"--kernels {wanted} is for a GPU, --device is {device}")
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


def refuse_large_rank(rank: int, device: torch.device, what: str) -> None:
    """ValueError if a GPU cannot decode with an adapter of this rank. The sampler's engine says so
    too, but only once the model is loaded.

    what: names the adapter in the message, for example "--lora-rank 1024".
    """
    if device.type == "cuda":
        from fast.decode import check_rank
        check_rank(rank, device, what)


def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability: (9, 0) of an H200, which is sm_90. (0, 0) on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def configure_cpu(model) -> None:
    """On a CPU, makes runs with one seed equal bit for bit, and small models fast.

    The answers to one problem share its prompt, so their gradients are added up in the prompt's
    rows. torch's threads would add them in whatever order they get there; in deterministic mode
    the order is always the same.

    Two threads for a small model: with more, each matmul is so short that they spend longer
    waiting for each other than computing.
    """
    if model.device.type == "cpu":
        # torch.use_deterministic_algorithms(True) does the same, but imports the compiler as well.
        torch.set_deterministic_debug_mode("error")
        # The mode would also fill every torch.empty() with NaN, for debugging.
        torch.utils.deterministic.fill_uninitialized_memory = False
        if model.config.width < 1024:
            torch.set_num_threads(min(2, torch.get_num_threads()))
