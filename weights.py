"""
The folders of models, as Hugging Face has them: 16-bit weights, or NVFP4 of compressed-tensors.

    files = ModelFolder(resolve("qwen2.5-7b"), "nvfp4", device, torch.bfloat16)
    files.read("model.norm.weight", 3584)              one tensor, with the shape it must have
    files.frozen(names, parts, k)                      linears, as one nvfp4.Weight
    save_model(tensors, source, out)                   a new folder, shard by shard

A model may be larger than the host's memory. So tensors are read one at a time, and written as
they are made, with one shard of a file in memory.

Whatever is wrong with a file is a ValueError that names it. Headers, shapes, types and NaNs are
checked before they can become a wrong number in training. Nothing is unpickled.

Adapters, in the folders of the library PEFT, and what each was trained with:

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
something else from the same tensors.

Not here: what the numbers mean (nvfp4.py, model.py, lora.py), how files are written whole (files.py).
"""
import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

import nvfp4
from files import (
    check_keys,
    equal_to,
    errors_name_file,
    first_line,
    new_folder,
    positive_number,
    read_json,
    short_repr,
    whole_number,
    write_atomically,
    write_json,
)
from ranks import say

# -----------------------------------------------------------------------------
# Finding a model

# The models that short names can mean: family -> sizes.
SHORT_NAMES = {
    "qwen2.5": ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"),
    "qwen2.5-coder": ("0.5b", "1.5b", "3b", "7b", "14b", "32b"),
    "qwen2.5-math": ("1.5b", "7b", "72b"),
    "qwen3": ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "4b-instruct-2507", "4b-thinking-2507"),
}


def resolve(name: str | Path, weights: bool = True) -> Path:
    """--model -> a local folder. A Hugging Face id, or a short name such as qwen2.5-7b or qwen3-8b,
    is downloaded if it is not in the cache. ValueError if that fails.

    weights False: only configuration and tokenizer. That takes seconds, and they are enough to find
    most errors of a run before 15 GB are downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    name = hub_id(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"--model {name}: cannot be downloaded ({first_line(error)})") from None


def hub_id(name: str | Path) -> str:
    """--model -> its Hugging Face id. ValueError if it cannot be one; nothing is looked up there.

    Short names mean the models that follow instructions: qwen2.5-7b is Qwen2.5-7B-Instruct, and
    qwen3-8b is Qwen3-8B, which the hub calls so. The hub's Qwen2.5-7B is a base model. That name
    differs from the short one by its capitals alone, so it is refused: either could be meant.
    """
    name = str(name)
    only_a_folder = name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1
    if only_a_folder or Path(name).is_absolute():
        raise ValueError(f"--model {name}: there is no such folder")
    if "/" in name:
        return name
    short = name.lower()
    family = re.match(r"qwen2\.5(-coder|-math)?|qwen3", short)
    if not family:
        raise ValueError(f"--model {name}: neither a folder nor a name such as qwen2.5-7b, "
                         "qwen3-8b or Qwen/Qwen2.5-7B-Instruct")
    if family[0] != "qwen3":
        short = short.removesuffix("-instruct")
    known = [f"{family[0]}-{size}" for size in SHORT_NAMES[family[0]]]
    if short not in known:
        raise ValueError(f"--model {name}: neither a folder nor one of {', '.join(known)}")
    hubs = short.title()                         # Qwen2.5-Coder-7B, Qwen3-4B-Instruct-2507
    if family[0] == "qwen3":
        return f"Qwen/{hubs}"
    if name == hubs:
        raise ValueError(f"--model {name}: say Qwen/{hubs} for the base model, or {short} for "
                         f"Qwen/{hubs}-Instruct")
    return f"Qwen/{hubs}-Instruct"


def check_model(name: str | Path) -> None:
    """ValueError unless --model is a folder, or can be an id of the Hugging Face hub."""
    if not Path(name).is_dir():
        hub_id(name)


def sampled_digest(folder: Path) -> str:
    """SHA-256 of a sample of a model's weights, by which other weights of the same shapes are
    noticed: of each of its files the name, the size, the first MiB, and 64 blocks of 4 KiB that lie
    evenly over it. To read a 7B whole would take a minute.
    """
    digest = hashlib.sha256()
    for path in sorted(set(Shards(folder).names.values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with errors_name_file(path), open(path, "rb") as file:
            digest.update(file.read(2**20))
            for i in range(64):
                file.seek(size * i // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# What a model's config.json may say

# Model families: the architecture in config.json -> the tensors that the attention of a layer has
# besides its four matrices.
FAMILIES = {"Qwen2ForCausalLM": r"[qkv]_proj\.bias",              # Qwen2.5
            "Qwen3ForCausalLM": r"[qk]_norm\.weight"}

# Keys that change what the model computes, and the values that model.py implements.
CONFIG_RULES = {
    "architectures": (f"one of {', '.join(FAMILIES)}, in a list",
                      lambda value: value in [[name] for name in FAMILIES], True),
    **{key: (*whole_number(1, 2**24), True) for key in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "vocab_size")},
    "head_dim": (*whole_number(1, 2**24), False),
    "num_hidden_layers": (*whole_number(1, 1000), True),
    "max_position_embeddings": (*whole_number(1, 2**31), False),
    "rms_norm_eps": (*positive_number(0.1), True),
    "rope_theta": (*positive_number(1e12), True),
    "hidden_act": (*equal_to("silu"), False),
    "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool), False),
    "use_sliding_window": ("false: sliding windows are not supported", lambda v: v is False, False),
    "layer_types": ("full_attention in every layer: sliding windows are not supported",
                    lambda v: isinstance(v, list) and {*map(str, v)} == {"full_attention"}, False),
    "rope_scaling": ("null: rope_scaling is not supported", lambda v: not v, False),
    "quantization_config": ("an object", lambda value: isinstance(value, dict), False)}
# head_dim is required: where a Qwen3 lacks it, transformers takes 128 and not D / H.
QWEN3_RULES = {"head_dim": (*whole_number(1, 2**24), True),
               "attention_bias": ("false: a Qwen3 with biases is not supported",
                                  lambda value: value is False, False)}


def read_config(path: Path) -> dict:
    """The config.json of a model, with `rope_theta` where newer files have `rope_parameters`.
    ValueError unless model.py computes this model.
    """
    config = read_json(path)
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_parameters is {short_repr(rope)}: only the default is "
                         "supported")
    config["rope_theta"] = config.get("rope_theta") or rope.get("rope_theta")
    check_keys(path, config, CONFIG_RULES)
    if config["architectures"] == ["Qwen3ForCausalLM"]:
        check_keys(path, config, QWEN3_RULES)
    D = config["hidden_size"]                    # D wide, H query heads, KV key and value heads
    H = config["num_attention_heads"]
    KV = config["num_key_value_heads"]
    if (config.get("head_dim") or D / H) % 2 or H % KV:
        raise ValueError(f"{path}: hidden_size is {D}, num_attention_heads {H}, num_key_value_heads"
                         f" {KV}, head_dim {config.get('head_dim')}; expected an even head_dim, "
                         "which is hidden_size / num_attention_heads unless it is given, and as "
                         "many query heads for each key-value head")
    return config


def max_positions(folder: Path) -> float:
    """How many tokens a model's sequences may have; infinity if it does not say."""
    return read_config(folder / "config.json").get("max_position_embeddings") or math.inf


def check_lengths(folder: Path, length: int, rank: int = 1) -> None:
    """ValueError if a prompt and its answer, `length` tokens together, are too long for a model, or
    if `rank` exceeds the columns of one of its linears: peft.read_peft_header() refuses such an
    adapter.
    """
    path = folder / "config.json"
    most = max_positions(folder)
    if length > most:
        raise ValueError(f"{path}: max_position_embeddings is {most}, less than {length}, the "
                         "tokens of prompt and --max-new-tokens together")
    config = read_config(path)
    for name, columns in linear_columns(config).items():
        if rank > columns:
            raise ValueError(f"--lora-rank {rank} exceeds {name}, which is {columns} in {path}")


def linear_columns(config: dict) -> dict[str, int]:
    """The columns of a model's linears, by what config.json calls them: those of q, k, v, gate and
    up; of o; and of down.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return {"hidden_size": width,
            "num_attention_heads x head_dim": heads * (config.get("head_dim") or width // heads),
            "intermediate_size": config["intermediate_size"]}


def base_of(folder: Path, base: str | None) -> str:
    """--base -> the format in which to hold a model's linears; by default it is NVFP4.

    A folder into which tools.convert merged an adapter defaults to 16 bits: 4 bits round away most
    of what training changed. If 4 bits are asked for, a line says so.
    """
    config = read_config(folder / "config.json")
    # Weights that were rounded already have no 16 bits to keep.
    merged = None if config.get("quantization_config") else config.get("merged_adapter")
    if merged and base not in (None, "bf16"):
        say(f"{folder}: rounded to {base}, the merged adapter {short_repr(merged)} is mostly lost: "
            "keep --base bf16, or take the model it was trained on with --adapter")
    return base or ("bf16" if merged else "nvfp4")


# -----------------------------------------------------------------------------
# Weights in

class Shards:
    """The tensors of a folder: of model.safetensors, or of the files that
    model.safetensors.index.json names. names: tensor name -> file.

    The header of every file is checked at once: ValueError if one is missing or cut off.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            only = self.folder / "model.safetensors"
            self.names = dict.fromkeys(self._open(only).keys(), only)
            return
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: weight_map is {short_repr(weight_map)}, expected an object")
        for name, file in weight_map.items():
            if not (isinstance(file, str) and re.fullmatch(r"[\w.-]+\.safetensors", file)):
                raise ValueError(f"{index}: places {short_repr(name)} in {short_repr(file)}, which "
                                 "is no safetensors file of this folder")
        self.names = {name: self.folder / file for name, file in weight_map.items()}
        held = {file: self._open(file).keys() for file in sorted(set(self.names.values()))}
        for name, file in self.names.items():
            if name not in held[file]:
                raise ValueError(f"{file}: has no tensor {name}, which {index.name} places there")

    def _open(self, path):
        if not path.is_file():                   # opening a pipe would wait for ever
            raise ValueError(f"{path}: {'no regular file' if path.exists() else 'is missing'}")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:         # also if the header and the file's size disagree
            raise ValueError(f"{path}: is cut off, or not a safetensors file ({error})") from None

    def _file_with(self, name):
        if name not in self.names:
            raise ValueError(f"{self.folder}: has no tensor {name} in its safetensors files")
        return self._open(self.names[name])

    def get(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """A tensor as it is stored. ValueError if no file has it. Its file is mapped into memory
        for this tensor alone.
        """
        return self._file_with(name).get_tensor(name).to(device)

    def check(self, name: str, shape: tuple,
              dtypes: Iterable[str] = ("BF16", "F16", "F32", "F64")) -> None:
        """ValueError unless a tensor has this shape, () for any, and one of these types."""
        found = self._file_with(name).get_slice(name)
        held = tuple(found.get_shape())
        if shape and held != shape:
            raise ValueError(f"{self.folder}: {name} has shape {held}, config.json says {shape}")
        if found.get_dtype() not in dtypes:
            raise ValueError(f"{self.names[name]}: {name} is {found.get_dtype()}, expected "
                             f"{' or '.join(dtypes)}")


# The linears and the norms of a layer, as the names of their tensors call them.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def tensor_name(architecture: str) -> re.Pattern:
    """Matches the name of every tensor that a model of this family may have; the regex group is the
    number of its layer. The last line has tensors that some programs write and nothing here needs.
    """
    return re.compile(rf"""
          (?:lm_head | model\.embed_tokens | model\.norm)\.weight
        | model\.layers\.(\d+)\.
          (?: (?:input | post_attention)_layernorm\.weight
            | self_attn\.{FAMILIES[architecture]}
            | (?:self_attn\.[qkvo] | mlp\.gate | mlp\.up | mlp\.down)_proj
              \.weight(?:_packed | _scale | _global_scale)? )
        | .*(?:rotary_emb\.inv_freq | input_global_scale)""", re.VERBOSE)


class ModelFolder(Shards):
    """A folder of a model with 16-bit or NVFP4 weights, whose linears are to be held as `base`.

    ValueError if model.py would compute something else from it than the model's makers do: if it
    has another architecture or 4-bit format, or tensors that model.py would leave out.
    config: what read_config() returns.
    """

    def __init__(self, folder: Path, base: str, device: torch.device, dtype: torch.dtype):
        self.config = read_config(folder / "config.json")
        super().__init__(folder)
        section = self.config.get("quantization_config")
        if section or any(name.endswith(".weight_packed") for name in self.names):
            check_nvfp4(section, folder / "config.json")
        if "calibration" in self.config:
            say(f"{folder}: {short_repr(self.config['calibration'], 160)}")
        known = tensor_name(self.config["architectures"][0])
        matches = {name: known.fullmatch(name) for name in self.names}
        unused = [name for name, match in matches.items()
                  if not match or int(match[1] or 0) >= self.config["num_hidden_layers"]]
        if unused:
            raise ValueError(f"{folder}: holds {len(unused)} tensors that config.json does not "
                             f"account for, first {min(unused)}")
        twice = [name for name in self.names if f"{name}_packed" in self.names]
        if twice:
            raise ValueError(f"{folder}: holds {min(twice)} in 16 bits and in 4")
        self.base = base
        self.device = device
        self.dtype = dtype

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """A floating-point tensor of this shape, in the type that it is stored in. ValueError if it
        has another shape, or if a number in it is not finite. No shape: it may have any.
        """
        self.check(name, shape)
        tensor = self.get(name, self.device)
        # In parts: isfinite() of a whole 32B embedding would take a gigabyte more.
        if not all(part.isfinite().all() for part in tensor.split(2**16)):
            raise ValueError(f"{self.names[name]}: {name} holds NaN or infinity")
        return tensor

    def frozen(self, names: list[str], parts: list[int], k: int) -> nvfp4.Weight:
        """The linears `names`, of parts[i] rows and k columns each, fused into one weight.

        NVFP4 in the folder is taken as it is; 16-bit weights are quantized to `base`. ValueError if
        the folder's weights cannot be held as `base`.
        """
        if f"{names[0]}.weight_packed" in self.names:
            if self.base != "nvfp4":
                raise ValueError(f"{self.folder} holds NVFP4 weights: --base {self.base} needs "
                                 "the bf16 files")
            for name, n in zip(names, parts):
                self.check(f"{name}.weight_packed", (n, k // 2), ["U8"])
                self.check(f"{name}.weight_scale", (n, k // 16), ["F8_E4M3"])
            stored = [load_nvfp4(self, name, self.device) for name in names]
            return nvfp4.fuse(stored, self.dtype)
        weights = [self.read(f"{name}.weight", n, k) for name, n in zip(names, parts)]
        try:
            return nvfp4.freeze(weights, self.base, self.dtype)
        except ValueError as error:              # K ends inside a scale block, or a weight is inf
            raise ValueError(f"{self.folder}: {names[0]}: {error}") from None


# -----------------------------------------------------------------------------
# NVFP4 as compressed-tensors stores it
#
# Each linear of N rows and K columns is three tensors (nvfp4.py has the format itself):
#
#     NAME.weight_packed        (N, K / 2)   uint8: two 4-bit codes a byte
#     NAME.weight_scale         (N, K / 16)  float8_e4m3: one scale for each scale_block of 16
#     NAME.weight_global_scale  (1,)         float32: a divisor, 1 / nvfp4.py's global_scale

# What config.json says of such weights, and the section around it.
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                 "symmetric": True}
NVFP4_CONFIG = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4_WEIGHTS,
                                  "input_activations": None, "output_activations": None}}}


def check_nvfp4(section: object, path: Path) -> None:
    """ValueError unless config.json says that the weights are stored as above.

    Other programs' files look the same and mean something else: ModelOpt's hold the global scale
    itself and not its inverse. Only this section of config.json tells them apart.
    """
    try:
        groups = section["config_groups"].values()
        known = groups and all(NVFP4_WEIGHTS.items() <= g["weights"].items() for g in groups)
        known = known and section["quant_method"] == "compressed-tensors"
    except (AttributeError, KeyError, TypeError):                # a part is missing or no object
        known = False
    if not known:
        raise ValueError(f"{path}: quantization_config is not that of compressed-tensors NVFP4 "
                         "weights, the only 4-bit ones that can be read")


def load_nvfp4(shards: Shards, name: str, device: str | torch.device = "cpu"
               ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A linear such as "model.layers.0.mlp.up_proj" as nvfp4.quantize returns it: codes, block
    scales, global scale. ValueError if they would decode to NaN or to weights of the wrong sign.
    """
    packed, block_scale, inverse = (shards.get(f"{name}.weight_{part}", device)
                                    for part in ("packed", "scale", "global_scale"))
    where = f"{shards.folder}: {name}"
    if not (block_scale.float() >= 0).all():
        raise ValueError(f"{where}: a block scale is negative or NaN")
    if inverse.numel() != 1:
        raise ValueError(f"{where}: weight_global_scale has shape {tuple(inverse.shape)}, expected "
                         "one number")
    global_scale = 1 / inverse.float().flatten()[0]
    if not (global_scale.isfinite() and global_scale > 0):
        raise ValueError(f"{where}: weight_global_scale is {inverse.tolist()}")
    return packed, block_scale, global_scale


def nvfp4_tensors(name: str, packed: torch.Tensor, block_scale: torch.Tensor,
                  global_scale: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (tensor name, tensor): what nvfp4.quantize returned for a linear, as it is stored."""
    yield f"{name}.weight_packed", packed.cpu()
    yield f"{name}.weight_scale", block_scale.cpu()
    yield f"{name}.weight_global_scale", (1 / global_scale).reshape(1).cpu()


# -----------------------------------------------------------------------------
# Weights out

SHARD_BYTES = 2**31                              # of one output file, in memory until written


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, tensor) of a model.Qwen, with its adapter merged in fp32."""
    yield "model.embed_tokens.weight", model.embed
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        yield prefix + "input_layernorm.weight", layer.input_norm.weight
        yield prefix + "post_attention_layernorm.weight", layer.post_norm.weight
        if layer.qkv_bias is not None:
            for name, bias in zip("qkv", layer.qkv_bias.split(layer.qkv.parts)):
                yield f"{prefix}self_attn.{name}_proj.bias", bias
        if layer.qk_gains is not None:
            for name, gain in zip("qk", layer.qk_gains):
                yield f"{prefix}self_attn.{name}_norm.weight", gain
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            for name, weight in zip(linear.names, linear.merged().split(linear.parts)):
                yield name + ".weight", weight
    yield "model.norm.weight", model.final_norm.weight
    if not model.config.tied:
        yield "lm_head.weight", model.lm_head


def save_model(tensors: Iterable[tuple[str, torch.Tensor]], source: Path, out: Path,
               notes: dict | None = None) -> None:
    """Writes (name, tensor) pairs as the new model folder `out`; tokenizer and the rest are copied
    from `source`. ValueError if `out` holds something already.

    notes: keys of config.json that say what the tensors are. Without quantization_config they are
    16-bit ones. The notes are read after the last tensor, so whoever yields the tensors may still
    add to them.
    """
    config = read_json(source / "config.json")
    # What the source says of its own tensors. transformers 5 writes dtype for torch_dtype.
    for key in ("quantization_config", "calibration", "dtype"):
        config.pop(key, None)
    companions = files_to_copy(source)
    with new_folder(out) as folder:
        for file in companions:
            shutil.copy(file, folder)
        save_shards(tensors, folder)
        config |= {"torch_dtype": "bfloat16", **(notes or {})}
        write_json(folder / "config.json", config)


def files_to_copy(source: Path) -> list[Path]:
    """The files that a model made from `source` takes over: tokenizer, templates, license.

    ValueError for a link that leads out of the folder. A model folder may come from anybody, and
    its "notes.txt" may be a link to a private file: a copy of that file would be in the new folder,
    and might be published with it. In the hub's cache every file is a link to one in blobs/; these
    links are allowed.
    """
    homes = [Path(os.path.realpath(source))]
    if homes[0].parent.name == "snapshots":      # models--NAME/snapshots/COMMIT
        homes.append(homes[0].parent.parent / "blobs")
    files = []
    for pattern in ("*.json", "*.txt", "*.jinja", "LICENSE*"):
        for file in sorted(source.glob(pattern)):
            if file.name in ("config.json", "model.safetensors.index.json") or not file.is_file():
                continue                         # a folder called LICENSES, a link to nothing
            true = Path(os.path.realpath(file))
            if not any(true.is_relative_to(home) for home in homes):
                raise ValueError(f"{file}: is a link to {true}, outside of the model's folder, "
                                 "and is not copied: put the file itself there, or remove it")
            files.append(file)
    return files


def save_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Writes model-0000i-of-0000n.safetensors and their index, with one shard in memory at a time.
    OSError if the disk is full.

    n is known at the end only, so the shards are called 0.part, 1.part, ... until then.
    """
    parts = []                                   # the names of the tensors in each file
    shard = {}
    total = 0

    def write_shard():
        try:
            save_file(shard, folder / f"{len(parts)}.part", metadata={"format": "pt"})
        except SafetensorError as error:         # the library's own error of a full disk
            raise OSError(f"{folder}: {error}") from None
        parts.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            write_shard()
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
    write_shard()
    weight_map = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


# -----------------------------------------------------------------------------
# Adapters: writing

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
# Adapters: reading

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
        tensors = load(file.read_bytes())
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
# Adapters: what one was trained with

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
