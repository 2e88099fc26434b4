"""
Adapters in the folders of the library PEFT, and what each adapter was trained with.

    runs/x/adapter/adapter_config.json           PEFT's: rank, alpha, the names of the linears
                  /adapter_model.safetensors     PEFT's: A and B of each linear; norms, if trained
                  /trained_with.json             ours: base, calibration, prompt style, --thinking

    write_peft(folder, tensors, "tiny", rank=32, alpha=32, norms=False)
    adapter, tensors = read_peft(folder)         rank, alpha and norms; the tensors
    adapter, shapes = read_peft_header(folder)   with the shapes of the tensors alone
    adapter = read_peft_config(folder)           without the tensors

    write_conditions(folder, training_conditions(...))
    tell_other_conditions(folder, conditions)    says how they differ from those of the training

A plain LoRA adapter on every linear is read, and nothing else: PEFT has variants that compute
something else from the same tensors. Whatever is wrong with a file is a ValueError that names it.

Not here: the library itself, which no program of this project needs; which matrix of a model each
tensor belongs to (lora.py).
"""
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from harness.files import (check_keys, equal_to, positive_number, read_bytes, read_json,
                           whole_number, write_atomically, write_json)
from harness.hf import NORMS, TARGETS, read_config
from harness.process import short_repr
from harness.ranks import say


# -----------------------------------------------------------------------------
# Writing

def write_peft(folder: str | Path, tensors: dict[str, torch.Tensor], model_name: str, rank: int,
               alpha: float, norms: bool) -> None:
    """Writes an adapter as PEFT does. OSError if the disk is full.

    tensors: by PEFT's names, on the CPU. norms: those of the layers are among them.
    adapter_config.json names the linears that the tensors are for, which need not be all TARGETS:
    a fork that trains only some linears saves what it trained.
    """
    folder = Path(folder)
    parts = {name.split(".")[-3] for name in tensors if name.endswith(".lora_A.weight")}
    targets = [target for target in TARGETS if target in parts] + sorted(parts - set(TARGETS))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": str(model_name), "r": rank, "lora_alpha": alpha,
              "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
              "modules_to_save": list(NORMS) if norms else None, "fan_in_fan_out": False,
              "init_lora_weights": True, "inference_mode": True}
    folder.mkdir(parents=True, exist_ok=True)
    data = save(tensors, metadata={"format": "pt"})
    write_atomically(folder / "adapter_model.safetensors", data)
    write_json(folder / "adapter_config.json", config)


# -----------------------------------------------------------------------------
# Reading

class AdapterShape(NamedTuple):
    """What adapter_config.json says of an adapter, by the names of train.py's settings."""
    lora_rank: int
    lora_alpha: float
    train_norms: bool


def read_peft(folder: str | Path) -> tuple[AdapterShape, dict[str, torch.Tensor]]:
    """The shape and the tensors of an adapter. ValueError if read_peft_header() refuses it, or if a
    number in it is not finite.
    """
    adapter, _ = read_peft_header(folder)
    file = Path(folder) / "adapter_model.safetensors"
    try:
        tensors = load(read_bytes(file))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read as an adapter ({error})") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{file}: {name} is {tensor.dtype}, expected floating-point numbers")
        if not tensor.float().isfinite().all():
            raise ValueError(f"{file}: {name} holds NaN or infinity")
    return adapter, tensors


def read_peft_header(folder: str | Path) -> tuple[AdapterShape, dict[str, tuple[int, ...]]]:
    """The shape of an adapter, and that of each of its tensors by name. No tensor is read, so a
    small file that claims to hold large ones takes no memory.

    ValueError unless read_peft_config() takes adapter_config.json, there is an A for each of
    TARGETS, and every A and B has the rank r of that file, which may not exceed the columns of A.
    """
    adapter = read_peft_config(folder)
    file = Path(folder) / "adapter_model.safetensors"
    try:
        if not file.is_file():                   # opening a pipe would wait for ever
            raise OSError("no regular file" if file.exists() else "No such file")
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read as an adapter ({error})") from None
    rank = adapter.lora_rank
    for name, shape in shapes.items():
        for part, axis in (("lora_A.weight", 0), ("lora_B.weight", 1)):  # A is (r, K), B is (N, r)
            if name.endswith(part) and (len(shape) != 2 or shape[axis] != rank):
                raise ValueError(f"{file}: {name} has shape {shape}, adapter_config.json says r is "
                                 f"{rank}")
        if name.endswith("lora_A.weight") and rank > shape[1]:
            raise ValueError(f"{file}: r is {rank}, more than the {shape[1]} columns of {name}")
    for target in TARGETS:
        if not any(name.endswith(f".{target}.lora_A.weight") for name in shapes):
            raise ValueError(f"{file}: has no lora_A.weight of any {target}: no adapter on "
                             f"{', '.join(TARGETS)}")
    return adapter, shapes


# What adapter_config.json must say, as files.check_keys() takes it.
PEFT_RULES = {
    "peft_type": (*equal_to("LORA"), True),
    "r": (*whole_number(1, 2**16), True),
    "lora_alpha": (*positive_number(1e9), True),
    "bias": (*equal_to("none"), False),
    # PiSSA and OLoRA take a part out of the base's weights: their adapters fit only what is left.
    "init_lora_weights": ("one that keeps the base's weights",
                          lambda value: value in (True, False, "gaussian", "eva"), False),
    "modules_to_save": (f"null or {list(NORMS)}",
                        lambda value: value == [] or value in (list(NORMS), list(NORMS)[::-1]),
                        False)}
# PEFT's variants of LoRA, each of which computes something else than lora.py does.
VARIANTS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern",
            "fan_in_fan_out", "layers_to_transform", "layer_replication",
            "alora_invocation_tokens")


def read_peft_config(folder: str | Path) -> AdapterShape:
    """The shape of an adapter. ValueError unless its adapter_config.json is that of a plain LoRA
    adapter on every linear.
    """
    path = Path(folder) / "adapter_config.json"
    config = read_json(path)
    check_keys(path, config, PEFT_RULES)
    variants = [key for key in VARIANTS if config.get(key)]
    targets = config.get("target_modules")
    if variants or not isinstance(targets, list) or {*map(str, targets)} != set(TARGETS):
        raise ValueError(f"{folder}: need a plain LoRA adapter on {', '.join(TARGETS)}, "
                         f"got one on {short_repr(targets)} {' '.join(variants)}")
    return AdapterShape(config["r"], config["lora_alpha"], bool(config.get("modules_to_save")))


# -----------------------------------------------------------------------------
# What an adapter was trained with

TRAINED_WITH = "trained_with.json"               # beside PEFT's files; other programs pass over it
TRAINED_WITH_RULES = {
    key: ("text", lambda value: isinstance(value, str), needed)
    for key, needed in (("base", True), ("prompt_style", True), ("thinking", True),
                        ("calibration", False))}


def training_conditions(folder: Path, base: str, prompt_style: str,
                        thinking: str) -> dict[str, str | None]:
    """What an adapter depends on besides the model's name: the format of the frozen weights, how
    their codes were calibrated (None: they were not), the prompts, and --thinking.

    folder: of the model.
    """
    calibration = read_config(folder / "config.json").get("calibration")
    return {"base": base, "calibration": calibration, "prompt_style": prompt_style,
            "thinking": thinking}


def write_conditions(adapter: str | Path, conditions: dict[str, str | None]) -> None:
    """Writes training_conditions() into an adapter's folder."""
    write_json(Path(adapter) / TRAINED_WITH, conditions)


def tell_other_conditions(adapter: str | Path, conditions: dict[str, str | None]) -> None:
    """Says what differs from an adapter's training. That may be intended, but costs accuracy."""
    for difference in other_conditions(adapter, conditions):
        say(difference)


def other_conditions(adapter: str | Path, conditions: dict[str, str | None]) -> list[str]:
    """-> a sentence for each condition that differs from those of the adapter's training.

    conditions: all or some of training_conditions().
    """
    def told(value):
        return "none" if value is None else short_repr(value)

    trained = read_conditions(adapter)
    return [f"{adapter} was trained with {key.replace('_', ' ')} {told(trained[key])}, not "
            f"{told(value)}"
            for key, value in conditions.items() if trained.get(key, value) != value]


def read_conditions(adapter: str | Path) -> dict[str, str | None]:
    """What write_conditions() wrote; {} if the file is absent, as beside an adapter that another
    program made. ValueError if the file is not one that write_conditions() can have written.
    """
    path = Path(adapter) / TRAINED_WITH
    if not path.exists():
        return {}
    held = read_json(path)
    check_keys(path, held, TRAINED_WITH_RULES)
    return {key: held.get(key) for key in TRAINED_WITH_RULES}
