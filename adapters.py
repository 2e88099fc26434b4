"""
Adapters on disk, in PEFT's layout, with a record of what each was trained with.

    runs/x/adapter/adapter_config.json           PEFT's: rank, alpha, the names of the linears
                  /adapter_model.safetensors     PEFT's: A and B of each linear
                  /trained_with.json             ours: model, base, calibration, prompts, --thinking

    write_peft(folder, tensors, "tiny", rank=32, alpha=32)
    adapter, tensors = read_peft(folder)         rank and alpha; the tensors
    adapter = read_peft_config(folder)           without the tensors

    write_json(folder / TRAINED_WITH, training_conditions(...))
    compare_conditions(folder, conditions_in(folder), conditions, model)     prints differences

Only plain LoRA on every linear can be read, because other PEFT variants compute something else from
the same tensors.

Not here: what an adapter computes (lora.py), the folders of models (weights.py).
"""
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from files import UserError, read_json, short_repr, write_atomically, write_json
from lora import Adapter, Linear, attach
from ranks import say
from weights import TARGETS, open_tensors, positive

# -----------------------------------------------------------------------------
# An adapter of a model

def save_adapter(model: torch.nn.Module, folder: str | Path, master: Tensor | None = None) -> None:
    """Write the adapter in fp32, in PEFT's format. master: a vector with the same layout to write
    instead of the adapter's own (an older one, or one on the CPU).
    """
    adapter = model.adapter
    flat = adapter.master.data if master is None else master
    tensors = {name: view.cpu().contiguous() for name, view in adapter.peft_tensors(flat)}
    write_peft(folder, tensors, model.name, adapter.rank, adapter.alpha)


def load_adapter(model: torch.nn.Module, folder: str | Path) -> Adapter:
    """Attach the adapter in a PEFT folder. UserError, before anything is allocated, if its tensors
    don't fit this model.
    """
    (rank, alpha), tensors = read_peft(folder)
    held = {(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    wanted = peft_shapes(model, rank)
    if held != wanted:
        raise UserError(f"{folder}: not an adapter for this model: has "
                        f"{sorted(held - wanted)[:1]}, expected {sorted(wanted - held)[:1]}")
    adapter = attach(model, rank, alpha)
    for name, view in adapter.peft_tensors(adapter.master.data):
        view.copy_(tensors[name])
    adapter.sync()
    return adapter


def peft_shapes(model: torch.nn.Module, rank: int) -> set[tuple[str, tuple[int, ...]]]:
    """(PEFT's name, shape) of each tensor in an adapter of this rank for a model."""
    shapes = set()
    for linear in model.modules():
        if isinstance(linear, Linear):
            for name, rows in zip(linear.names, linear.parts):
                shapes.add((f"base_model.model.{name}.lora_A.weight", (rank, linear.weight.K)))
                shapes.add((f"base_model.model.{name}.lora_B.weight", (rows, rank)))
    return shapes


# -----------------------------------------------------------------------------
# PEFT's files

class AdapterShape(NamedTuple):
    """An adapter's rank and alpha from adapter_config.json, named like train.py's settings."""
    lora_rank: int
    lora_alpha: float


def write_peft(folder: str | Path, tensors: dict[str, torch.Tensor], model_name: str, rank: int,
               alpha: float) -> None:
    """Writes an adapter in PEFT's layout. OSError if the disk is full.

    tensors: by PEFT's names, on the CPU. adapter_config.json lists their linears, which may be
    fewer than TARGETS: a fork that trains only some linears saves only those.
    """
    folder = Path(folder)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": model_name, "r": rank, "lora_alpha": alpha,
              "lora_dropout": 0.0, "bias": "none",
              "target_modules": sorted({name.split(".")[-3] for name in tensors
                                        if ".lora_A." in name}),
              "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}
    folder.mkdir(parents=True, exist_ok=True)
    data = save(tensors, metadata={"format": "pt"})
    write_atomically(folder / "adapter_model.safetensors", data)
    write_json(folder / "adapter_config.json", config)


# Allowed values for some keys of adapter_config.json, and other keys that a plain LoRA adapter may
# have. Each PEFT variant sets a key that isn't here: use_rslora, modules_to_save, ...
PLAIN = {"peft_type": ["LORA"], "bias": ["none"],
         # PiSSA and OLoRA subtract part of the base weights, so their adapters fit only the rest.
         "init_lora_weights": [True, "gaussian", "eva"]}
OTHERS = {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
          "exclude_modules", "inference_mode", "lora_alpha", "lora_dropout", "megatron_core",
          "peft_version", "qalora_group_size", "r", "revision", "target_modules", "task_type"}


def read_peft_config(folder: str | Path) -> AdapterShape:
    """An adapter's shape. UserError unless adapter_config.json describes plain LoRA on every
    linear.
    """
    path = Path(folder) / "adapter_config.json"
    inside = Path(folder) / "adapter"
    if inside.is_dir() and not path.exists():
        raise UserError(f"{folder}: is a run folder: use its adapter, {inside}")
    config = read_json(path)
    for key, value in config.items():
        if value and key not in OTHERS and value not in PLAIN.get(key, []):
            raise UserError(f"{path}: {key} is {short_repr(value)}: only plain LoRA adapters can "
                            "be read")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or sorted(map(str, targets)) != sorted(TARGETS):
        raise UserError(f"{path}: target_modules is {short_repr(targets)}, expected the list "
                        f"{', '.join(TARGETS)}")
    return AdapterShape(positive(config, "r", path, most=65536),
                        float(positive(config, "lora_alpha", path, float, 1e9)))


def read_peft(folder: str | Path) -> tuple[AdapterShape, dict[str, torch.Tensor]]:
    """An adapter's shape and tensors. UserError if read_peft_config() refuses it or a number in it
    is not finite.
    """
    adapter = read_peft_config(folder)
    file = Path(folder) / "adapter_model.safetensors"
    opened = open_tensors(file)
    tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise UserError(f"{file}: {name} is {tensor.dtype}, or contains NaN or infinity")
    if not any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name):
        say(f"{folder}: every B is 0, so this adapter changes nothing")
    return adapter, tensors


# -----------------------------------------------------------------------------
# What an adapter was trained with

TRAINED_WITH = "trained_with.json"               # next to PEFT's files; other programs ignore it


def training_conditions(model: torch.nn.Module, tokenizer, base: str, prompt_style: str,
                        thinking: str) -> dict:
    """What a run's numbers depend on, apart from its other settings and its problems: the weights,
    what config.json says about them, the tokenizer, the format of the frozen weights, how their
    codes were calibrated (None if they weren't), the prompts and --thinking.

    model: what loading.load() returned; tokenizer: a prompts.Tokenizer. The model's name, only
    its last part since models get copied, is for adapters that don't say more.
    """
    return {"model": Path(model.folder.name).name, "weights": model.digest,
            "tokenizer": tokenizer.digest, "base": base,
            "calibration": model.folder.config.get("calibration"), "prompt_style": prompt_style,
            "thinking": thinking, **asdict(model.config)}


def conditions_in(adapter: str | Path) -> dict:
    """What an adapter says about its training: all, some or none of training_conditions()."""
    adapter = Path(adapter)
    named = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    trained = {"model": Path(named).name} if named else {}
    if (adapter / TRAINED_WITH).exists():        # absent from another program's adapter
        trained |= read_json(adapter / TRAINED_WITH)
    for run in adapter.absolute().parents[:2]:   # runs/x/adapter, runs/x/adapters/step_000020
        if "weights" not in trained and (run / "run.json").exists():
            trained |= conditions_of_run(read_json(run / "run.json"))
    return trained


def conditions_of_run(run_json: dict) -> dict:
    """What a run.json says about training_conditions()."""
    old = {name: run_json[name] for name in ("weights_sha256",) if name in run_json}
    return old | run_json.get("trained_with", {})


def compare_conditions(what: str | Path, trained: dict, conditions: dict, model,
                       refuse: bool = False) -> None:
    """Prints how the conditions of `what`, an adapter or a run, differ from its training: it may be
    intended, but costs accuracy. UserError instead if `refuse`.

    trained: from conditions_in() or conditions_of_run(); conditions: from training_conditions().
    """
    if "weights_sha256" in trained:
        conditions = conditions | {"weights_sha256": model.folder.old_sha256()}
    same = trained.get("weights") == conditions["weights"]       # whatever they are called
    for key, value in conditions.items():
        if trained.get(key, value) != value and not (same and key in ("model", "calibration")):
            line = (f"{what} was trained with {key.replace('_', ' ')} {short_repr(trained[key])}, "
                    f"not {short_repr(value)}")
            if refuse and key not in ("model", "calibration"):
                raise UserError(f"{line}, as in {model.folder.path}")
            say(line)
