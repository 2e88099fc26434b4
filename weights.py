"""
Model folders in Hugging Face's layout: 16-bit weights, or NVFP4 from compressed-tensors or
ModelOpt.

    folder = ModelFolder("qwen2.5-7b")                 config.json, read once
    files = WeightReader(folder, "nvfp4", device, torch.bfloat16)
    files.read("model.norm.weight", 3584)              one tensor, with the shape it must have
    files.frozen(names, parts, k)                      linears, as one nvfp4.Weight
    files.refuse_unread()                              after the last: UserError if one was ignored
    save_model(tensors, source, out)                   a new folder, shard by shard

A model may be larger than host memory, so tensors are read one at a time and written as they are
made, with one shard in memory. Nothing is unpickled.

Anything that would silently train wrong is a UserError that names the file: an architecture or a
4-bit format that model.py doesn't implement, a tensor that it would ignore, a wrong shape, a NaN.

Not here: what the numbers mean (nvfp4.py, model.py), adapters (adapters.py), atomic writes
(files.py).
"""
import hashlib
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import hub
import nvfp4
from files import (
    UserError,
    counted,
    new_folder,
    read_json,
    short_repr,
    write_json,
)
from ranks import say

# -----------------------------------------------------------------------------
# Finding a model

# Short names, as regular expressions, and what they stand for on the hub.
SHORT_NAMES = {
    r"qwen(2\.5(?:-coder|-math)?-[\d.]+b)": "Qwen/Qwen{}-Instruct",
    r"qwen(3-[\d.]+b(?:-(?:instruct|thinking)-2507)?)": "Qwen/Qwen{}",
    r"llama(3\.[1-3]-\d+b)": "meta-llama/Llama-{}-Instruct",
    r"smollm2-([\d.]+[mb])": "HuggingFaceTB/SmolLM2-{}-Instruct",
    r"mistral-(7b)-v0\.3": "mistralai/Mistral-{}-Instruct-v0.3"}


def hub_id(name: str) -> str:
    """--model -> its Hugging Face id. UserError if it can't be one; nothing is looked up online.

    Short names mean the instruction-tuned models: qwen2.5-7b is Qwen/Qwen2.5-7B-Instruct. They must
    be lower case, because on the hub Qwen2.5-7B is a base model, so that name without its owner
    could mean either.
    """
    for pattern, on_the_hub in SHORT_NAMES.items():
        short = re.fullmatch(pattern, name)
        if short:
            return on_the_hub.format(short[1].title())
    if not re.fullmatch(r"[\w-]+/[\w.-]+", name):
        raise UserError(f"--model {name}: not a folder, or a name such as qwen2.5-7b, llama3.1-8b "
                        "or Qwen/Qwen2.5-7B-Instruct")
    return name


def resolve(name: str | Path, weights: bool = True) -> Path:
    """--model -> a local folder, downloaded from the hub if it isn't in the cache. UserError if
    that fails. weights False: only configuration and tokenizer.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        raise UserError(f"--model {name}: is a file, expected the model's folder")
    # Not *.safetensors: Mistral's consolidated.safetensors has the same weights once more.
    patterns = ["*.json", "*.jinja", *(["model*.safetensors"] if weights else [])]
    return hub.snapshot(f"--model {name}", hub_id(str(name)), patterns)


class ModelFolder:
    """A model's folder and its config.json. A program makes one and passes it around.

    name: --model. path: the folder. config: what read_config() returns.

    For a model on the hub, only configuration and tokenizer are downloaded at first. That takes
    seconds and catches most errors before download() fetches 15 GB.
    """

    def __init__(self, name: str | Path):
        self.name = str(name) if Path(name).is_dir() else hub_id(str(name))
        self.path = resolve(self.name, weights=False)
        if (self.path / "adapter_config.json").exists():
            raise UserError(f"{self.path}: contains an adapter: give the model's own folder, and "
                            "this one as --adapter")
        if (self.path / "run.json").exists():
            raise UserError(f"{self.path} is a run folder, not a model: python -m tools.convert "
                            "merge makes one")
        self.config = read_config(self.path / "config.json")

    def download(self) -> None:
        """Downloads the weights if they aren't here yet."""
        resolve(self.name)

    @property
    def max_positions(self) -> float:
        """How many tokens a sequence may have; infinity if config.json does not say."""
        return self.config.get("max_position_embeddings") or math.inf

    def check_length(self, length: int) -> None:
        """UserError if a prompt plus its answer, `length` tokens in all, is too long."""
        if length > self.max_positions:
            raise UserError(f"{self.path / 'config.json'}: max_position_embeddings is "
                            f"{self.max_positions}, less than the {length} tokens of the prompt "
                            "plus --max-new-tokens")

    def choose_base(self, base: str | None) -> str:
        """--base -> the format of the linears, by default NVFP4.

        base None means the user didn't choose. That gives 16 bits for a folder with an adapter
        merged by tools.convert, or written by --train full, since 4 bits round away most of what
        training changed. Asking for NVFP4, as train.py always does, prints a warning.
        """
        trained = self.config.get("merged_adapter") or self.config.get("trained_from")
        if self.config.get("quantization_config"):       # no 16 bits to keep
            trained = None
        if trained and base == "nvfp4":
            say(f"{self.path}: rounding to nvfp4 loses most of what training changed: use --base "
                "bf16")
        return base or ("bf16" if trained else "nvfp4")

    def old_sha256(self) -> str:
        """The `weights_sha256` in run.json of runs that don't have `trained_with`: a digest of the
        first 4,096 numbers of each tensor.
        """
        shards = Shards(self.path)
        digest = hashlib.sha256()
        for name in sorted(shards.names):
            some = shards.get(name).flatten()[:4096]
            digest.update(name.encode() + some.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


# -----------------------------------------------------------------------------
# What a model's config.json may say

# Keys that change what a model computes, and the values that model.py implements. If a key is
# absent, the first value applies.
COMPUTED = {"hidden_act": ["silu"], "partial_rotary_factor": [1], "layer_types": ["full_attention"],
            "no_rope_layers": [1], "rope_interleaved": [False], "rope_type": ["default", "llama3"],
            "tie_word_embeddings": [False, True], "attention_multiplier": [None],
            "embedding_multiplier": [1], "residual_multiplier": [1], "logits_scaling": [1],
            "logit_scale": [1]}
# The same for one family. Qwen's sliding_window has no effect without use_sliding_window.
FAMILIES = {
    "Qwen2ForCausalLM": {"use_sliding_window": [False]},         # Qwen2.5 too
    "Qwen3ForCausalLM": {"use_sliding_window": [False], "attention_bias": [False]},
    "LlamaForCausalLM": {"sliding_window": [None], "attention_bias": [False], "mlp_bias": [False]},
    "MistralForCausalLM": {"sliding_window": [None]}}
# What an absent key means, where it isn't what a null means.
ABSENT = {"MistralForCausalLM": {"sliding_window": 4096}}
# Numbers that a model needs, those that it may have, and those of Llama 3's rotary scaling.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size")
OPTIONAL_SIZES = "head_dim", "max_position_embeddings"
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(path: Path) -> dict:
    """A model's config.json, with `rope_theta` and `rope_scaling` filled in from newer files'
    `rope_parameters`. rope_scaling is None, or the numbers of SCALING if its type is llama3.
    UserError unless model.py implements this model.
    """
    config = read_json(path)
    other = path.with_name(MODELOPT_CONFIG)
    if other.exists():
        section = {"quant_method": "modelopt", **read_json(other).get("quantization", {})}
        known = config["quantization_config"] = config.get("quantization_config") or section
        if known.get("quant_algo") != section.get("quant_algo"):
            raise UserError(f"{path}: quant_algo is {short_repr(known.get('quant_algo'))}, but "
                            f"{short_repr(section.get('quant_algo'))} in {other.name}")
    family = next((name for name in FAMILIES if config.get("architectures") == [name]), None)
    if not family:
        raise UserError(f"{path}: architectures is {short_repr(config.get('architectures'))}, "
                        f"expected one of {', '.join(FAMILIES)}")
    rope = {}
    for source in ("rope_scaling", "rope_parameters"):           # the older and the newer key
        values = config.get(source) or {}
        if not isinstance(values, dict):
            raise UserError(f"{path}: {source} is {short_repr(values)}, expected an object")
        for key, value in values.items():        # programs disagree about which of two they take
            key = "rope_type" if key == "type" else key
            known = (config | rope).get(key)
            if known not in (None, value):
                raise UserError(f"{path}: {key} is {short_repr(known)}, but {short_repr(value)} in "
                                f"{source}")
            rope[key] = value
    flat = ABSENT.get(family, {}) | config | rope
    for key, allowed in (COMPUTED | FAMILIES[family]).items():
        values = allowed[0] if flat.get(key) is None else flat[key]
        for value in values if isinstance(values, list) else [values]:       # of each layer
            if value not in allowed:
                raise UserError(f"{path}: {key} is {short_repr(value)}, only "
                                f"{' or '.join(map(repr, allowed))} is implemented")
    for key in (*SIZES, *(key for key in OPTIONAL_SIZES if config.get(key) is not None)):
        positive(config, key, path)
    positive(config, "rms_norm_eps", path, float)
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise UserError(f"{path}: num_key_value_heads {config['num_key_value_heads']} must divide "
                        f"num_attention_heads {config['num_attention_heads']}")
    scaling = None
    if rope.get("rope_type") == "llama3":
        scaling = {key: positive(rope, key, path, float) for key in SCALING}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise UserError(f"{path}: low_freq_factor is {scaling['low_freq_factor']}, expected "
                            f"less than high_freq_factor, {scaling['high_freq_factor']}")
    return config | {"rope_theta": positive(flat, "rope_theta", path, float),
                     "rope_scaling": scaling}


def positive(values: dict, key: str, path: Path, kind: type = int, most: float = 1e12) -> float:
    """values[key], a number above 0 and up to `most`: whole, or with kind float any. UserError,
    naming the file that the values are from, if it isn't one.
    """
    value = values.get(key)
    if type(value) not in (int, kind) or not 0 < value <= most:
        raise UserError(f"{path}: {key} is {short_repr(value)}, expected "
                        f"{'an integer' if kind is int else 'a number'} in (0, {most:g}]")
    return value


# -----------------------------------------------------------------------------
# Weights in

def open_tensors(path: Path) -> safe_open:
    """Opens a safetensors file. UserError if it is missing or cut off."""
    if not path.exists():
        pickled = "; .bin files aren't read" if any(path.parent.glob("*.bin")) else ""
        raise UserError(f"{path}: is missing{pickled}")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:             # also if the header and the file's size disagree
        raise UserError(f"{path}: is cut off, or not a safetensors file ({error})") from None


def stamp(path: Path) -> tuple[int, int]:
    """A value that changes when a file is replaced or written to."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


INDEX = "model.safetensors.index.json"


class Shards:
    """A folder's tensors, from model.safetensors or from the files that
    model.safetensors.index.json names. names: tensor name -> file.

    Checks every file's header right away. UserError if one is missing or cut off, or if a tensor
    could be read from two files, or if index and files disagree.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = self.folder / INDEX
        files = {"model.safetensors"}
        if index.exists():
            mapped = read_json(index).get("weight_map")
            if not isinstance(mapped, dict) or not all(isinstance(f, str) for f in mapped.values()):
                raise UserError(f"{index}: weight_map is {short_repr(mapped)}, expected an object "
                                "that names each tensor's file")
            # Whatever an index says, only files in its own folder are read.
            mapped = {name: Path(file).name for name, file in mapped.items()}
            files = {*mapped.values()}
        held = [(name, file) for file in sorted(files)
                for name in open_tensors(self.folder / file).keys()]
        if index.exists() and {*held} != {*mapped.items()}:
            name, file = min({*held} ^ {*mapped.items()})
            raise UserError(f"{index}: index and files disagree whether {file} has {name}")
        others = {path.name for name in ("model.safetensors", "model-*-of-*.safetensors")
                  for path in self.folder.glob(name)} - files
        if others:
            raise UserError(f"{self.folder}: contains two saves of a model; {min(others)} is from "
                            "one of them: remove the older")
        self.names = {name: self.folder / file for name, file in held}
        self.stamps = {path: stamp(path) for path in self.names.values()}
        self.unread = set(self.names)
        self.opened = None, None                 # the latest file: its path, and the file

    def _file_with(self, name):
        if name not in self.names:
            raise UserError(f"{self.folder}: has no tensor {name} in its safetensors files")
        path = self.names[name]
        # --train full replaces its model folder, and half old, half new would be neither model.
        if stamp(path) != self.stamps[path]:
            raise UserError(f"{path}: was replaced while being read; try again")
        self.unread.discard(name)
        if self.opened[0] != path:               # opening takes longer than reading most tensors
            self.opened = path, open_tensors(path)
        return self.opened[1]

    def get(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """A tensor as stored. UserError if no file has it. One file at a time is memory-mapped."""
        return self._file_with(name).get_tensor(name).to(device)

    def check(self, name: str, shape: tuple,
              dtypes: Iterable[str] = ("BF16", "F16", "F32", "F64")) -> None:
        """UserError unless a tensor has this shape, () for any, and one of these types."""
        found = self._file_with(name).get_slice(name)
        held = tuple(found.get_shape())
        if shape and held != shape:
            raise UserError(f"{self.folder}: {name} has shape {held}, but config.json says {shape}")
        if found.get_dtype() not in dtypes:
            raise UserError(f"{self.names[name]}: {name} is {found.get_dtype()}, expected "
                            f"{' or '.join(dtypes)}")


# The names of a layer's linears in a checkpoint.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Tensors that need not be read: outside the layers (a tied head may be stored too), and what some
# programs write but nothing here needs.
OPTIONAL = re.compile(r"(lm_head|model\.embed_tokens|model\.norm)\.weight"
                      r"|.*(rotary_emb\.inv_freq|input_global_scale|input_scale"
                      r"|k_scale|v_scale)")


def fingerprint(tensor: torch.Tensor) -> bytes:
    """32 bytes that change with any of a tensor's bits, computed where the tensor is: a digest of
    integer sums over the rows and the columns of its bits, in blocks of 8 MB.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in tensor.flatten().view(torch.uint8).split(2**23):
        part = torch.nn.functional.pad(part, (0, -len(part) % 8192))
        words = part.view(torch.int64).view(-1, 1024)
        digest.update(torch.cat([words.sum(0), words.sum(1)]).cpu().numpy().tobytes())
    return digest.digest()


class WeightReader(Shards):
    """Reads the tensors of a model with 16-bit or NVFP4 weights, for linears in format `base`.

    UserError if they can't be converted to it or are in another 4-bit format.
    """

    def __init__(self, model: ModelFolder, base: str, device: torch.device, dtype: torch.dtype):
        super().__init__(model.path)
        self.config = model.config
        self.base = base
        self.device = device
        self.dtype = dtype
        self.fingerprints = {}                   # of the tensors read so far
        section = self.config.get("quantization_config")
        self.layout = None                       # of NVFP4 weights
        packed = any(name.endswith(("_packed", "_scale_2")) for name in self.names)
        if packed or section:
            self.layout = check_nvfp4(section, self.folder / "config.json")
            if not packed:
                raise UserError(f"{self.folder}: has quantization_config in config.json, but no "
                                "tensor in 4 bits")
            if base != "nvfp4":
                raise UserError(f"{self.folder} contains NVFP4 weights; --base {base} needs the "
                                "bf16 files")
            if any(name.endswith(("input_scale", "input_global_scale")) for name in self.names):
                say(f"{self.folder}: was made for 4-bit activations; here they have 16 bits")
        if "calibration" in self.config:
            say(f"{self.folder}: {short_repr(self.config['calibration'], 160)}")

    def get(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        tensor = super().get(name, device)
        self.fingerprints[name] = fingerprint(tensor)
        return tensor

    def digest(self) -> str:
        """A digest of all tensors read so far, whatever their files and device."""
        return hashlib.sha256(str(sorted(self.fingerprints.items())).encode()).hexdigest()[:16]

    def refuse_unread(self) -> None:
        """UserError if the layers, which have all been made, left a tensor unread, or if a tied
        head is stored too and differs from the embedding.
        """
        embed, head = "model.embed_tokens.weight", "lm_head.weight"
        if self.config.get("tie_word_embeddings") and head in self.names:
            self.check(head, self.get(embed).shape)
            if not (self.get(embed) == self.get(head)).all():
                raise UserError(f"{self.folder}: {head} differs from {embed}, but config.json says "
                                "that they are tied (tie_word_embeddings)")
        unread = [name for name in self.unread if not OPTIONAL.fullmatch(name)]
        if unread:
            raise UserError(f"{self.folder}: contains {counted(len(unread), 'tensor')} that the "
                            f"model would ignore, such as {min(unread)}")

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """A floating-point tensor of this shape (by default any), in its stored type. UserError if
        it has another shape or a number in it is not finite.
        """
        self.check(name, shape)
        tensor = self.get(name, self.device)
        # In parts, since isfinite() of a 32B's entire embedding would take another gigabyte.
        if not all(part.isfinite().all() for part in tensor.split(2**16)):
            raise UserError(f"{self.names[name]}: {name} contains NaN or infinity")
        return tensor

    def frozen(self, names: list[str], parts: list[int], k: int) -> nvfp4.Weight:
        """The linears `names`, with parts[i] rows and k columns each, fused into one weight.

        16-bit weights are quantized to `base`. An NVFP4 folder's are used as they are, including
        those it keeps in 16 bits (`ignore` in its config.json, ModelOpt's `exclude_modules`).
        UserError if only some of `names` are in 4 bits.
        """
        layout = self.layout
        if layout and any(f"{name}.{layout.global_scale}" in self.names for name in names):
            for name, n in zip(names, parts):
                self.check(f"{name}.{layout.packed}", (n, k // 2), ["U8"])
                self.check(f"{name}.weight_scale", (n, k // 16), layout.scale_dtypes)
            stored = [load_nvfp4(self, name, self.device, layout) for name in names]
            return nvfp4.fuse(stored, self.dtype)
        weights = [self.read(f"{name}.weight", n, k) for name, n in zip(names, parts)]
        return nvfp4.freeze(weights, "bf16" if layout else self.base, self.dtype)


# -----------------------------------------------------------------------------
# NVFP4 as compressed-tensors and ModelOpt store it
#
# Each linear of N rows and K columns is three tensors (nvfp4.py explains the format):
#
#     compressed-tensors         ModelOpt
#     NAME.weight_packed         NAME.weight            (N, K / 2)   uint8: two codes per byte
#     NAME.weight_scale          NAME.weight_scale      (N, K / 16)  float8_e4m3: block scales
#     NAME.weight_global_scale   NAME.weight_scale_2    one float32: the global scale; the former
#                                                       stores 1 / global_scale
# ModelOpt's input_scale, k_scale and v_scale are for activations and caches of fewer bits.

class Layout(NamedTuple):
    """The names of a linear's tensors in NVFP4."""
    packed: str
    global_scale: str
    scale_dtypes: list[str]                      # of weight_scale; U8 holds E4M3's bits
    inverse: bool                                # whether 1 / global_scale is stored


COMPRESSED_TENSORS = Layout("weight_packed", "weight_global_scale", ["F8_E4M3"], inverse=True)
MODELOPT = Layout("weight", "weight_scale_2", ["F8_E4M3", "U8"], inverse=False)
MODELOPT_CONFIG = "hf_quant_config.json"         # older ModelOpt folders have only this

# What config.json says about weights of compressed-tensors.
NVFP4_CONFIG = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                    "symmetric": True},
        "input_activations": None, "output_activations": None}}}


def check_nvfp4(section: object, path: Path) -> Layout:
    """How NVFP4 weights are stored, according to quantization_config in config.json. UserError
    unless it is one of the layouts above: other programs' files look the same but mean something
    else, and only this section tells them apart.
    """
    match section:
        case {"transform_config": transforms} if transforms:
            raise UserError(f"{path}: transform_config in quantization_config: transformed "
                            "weights (Hadamard rotations, say) can't be read")
        case {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}:
            return COMPRESSED_TENSORS
        case {"quant_method": "modelopt", "quant_algo": "NVFP4" | "W4A16_NVFP4"}:
            return MODELOPT
    raise UserError(f"{path}: quantization_config is {short_repr(section)}: not NVFP4 from "
                    "compressed-tensors or ModelOpt, the only 4-bit formats that can be read")


def load_nvfp4(shards: Shards, name: str, device: str | torch.device = "cpu",
               layout: Layout = COMPRESSED_TENSORS
               ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A linear such as "model.layers.0.mlp.up_proj" as nvfp4.quantize returns it: codes, block
    scales, global scale. UserError if they would decode to NaN or to weights of the wrong sign.
    """
    parts = layout.packed, "weight_scale", layout.global_scale
    packed, block_scale, scale = (shards.get(f"{name}.{part}", device) for part in parts)
    block_scale = block_scale.view(torch.float8_e4m3fn) if layout is MODELOPT else block_scale
    if scale.numel() != 1 or not 0 < scale < math.inf or not (block_scale.float() >= 0).all():
        raise UserError(f"{shards.folder}: a weight_scale of {name} is negative or NaN, or its "
                        f"{layout.global_scale} is not a number above 0: {scale.tolist()}")
    scale = scale.float().reshape(())
    return packed, block_scale, 1 / scale if layout.inverse else scale


def nvfp4_tensors(name: str, packed: torch.Tensor, block_scale: torch.Tensor,
                  global_scale: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (tensor name, tensor): nvfp4.quantize's result for a linear, as it is stored."""
    yield f"{name}.weight_packed", packed.cpu()
    yield f"{name}.weight_scale", block_scale.cpu()
    yield f"{name}.weight_global_scale", (1 / global_scale).reshape(1).cpu()


# -----------------------------------------------------------------------------
# Weights out

SHARD_BYTES = 2**31                              # per output file, in memory until written


def in_16_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a 16-bit folder stores it: in bf16; norms and biases only if that changes none of
    their numbers, since models compute with them in fp32.
    """
    rounded = tensor.bfloat16()
    keep = tensor.dim() == 1 and not torch.equal(rounded.to(tensor.dtype), tensor)
    return tensor if keep else rounded


def save_model(tensors: Iterable[tuple[str, torch.Tensor]], source: Path, out: Path,
               notes: dict | None = None) -> None:
    """Writes (name, tensor) pairs to the new model folder `out`, with the tokenizer and the rest
    copied from `source`. UserError if `out` is not empty.

    notes: keys of config.json that describe the tensors; without quantization_config they are
    16-bit. The notes are read after the last tensor, so the generator of the tensors may add to
    them.
    """
    config = read_json(source / "config.json")
    # These describe the source's tensors. transformers 5 writes dtype instead of torch_dtype.
    for key in ("quantization_config", "calibration", "dtype"):
        config.pop(key, None)
    with new_folder(out) as folder:
        for pattern in ("*.json", "*.txt", "*.jinja", "LICENSE*"):
            for file in source.glob(pattern):
                if file.is_file() and file.name not in (INDEX, MODELOPT_CONFIG):
                    shutil.copy(file, folder)
        save_shards(tensors, folder)
        config |= {"torch_dtype": "bfloat16", **(notes or {})}
        write_json(folder / "config.json", config)


def save_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Writes model-0000i-of-0000n.safetensors and their index, with one shard in memory at a time.
    OSError if the disk is full.

    n is only known at the end, so until then the shards are called 0.part, 1.part, ...
    """
    parts = []                                   # the names of the tensors in each file
    shard = {}
    total = 0

    def write_shard():
        try:
            save_file(shard, folder / f"{len(parts)}.part", metadata={"format": "pt"})
        except SafetensorError as error:         # the library's error for a full disk
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
    write_json(folder / INDEX, index)
