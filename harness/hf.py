"""
Other programs' folders: Hugging Face models, compressed-tensors NVFP4 weights, PEFT adapters.

    shards = Shards(resolve("qwen2.5-7b"))
    shards.get("model.norm.weight", device="cuda")     read one tensor at a time
    save_model(tensors, source, out)                   write a new folder, shard by shard

What can be wrong with a file is a ValueError that names it. Nothing is unpickled.

Not here: what the numbers mean (nvfp4.py, model.py), atomic files (run.py).
"""
import math
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

import nvfp4
from harness.files import (check, exactly, new_folder, number, read_bytes, read_json, whole,
                           write_atomically, write_json)
from harness.process import first_line, short
from harness.ranks import say

SHARD_BYTES = 2**31                              # of an output file, in memory until written


def resolve(name, weights=True):
    """A folder, a name such as qwen2.5-7b or a Hugging Face id -> a folder; what is not here is
    downloaded. Without weights it is a matter of seconds, enough to find out what is wrong.
    """
    if Path(name).is_dir():
        return Path(name)
    name = str(name)
    alias = re.fullmatch(r"qwen2\.5(-coder|-math)?-(0\.5|1\.5|3|7|14|32|72)b", name.lower())
    if alias:
        name = f"Qwen/Qwen2.5{(alias[1] or '').title()}-{alias[2]}B-Instruct"
    if "/" not in name or Path(name).is_absolute():
        raise ValueError(f"--model {name}: neither a folder nor a name such as qwen2.5-7b "
                         "or Qwen/Qwen2.5-7B-Instruct")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"--model {name}: not downloadable ({first_line(error)})") from None


# -----------------------------------------------------------------------------
# Weights in

class Shards:
    """The tensors of a folder: model.safetensors, or what model.safetensors.index.json names.

    Opening checks every file's header: a missing or cut-off one is found before any work is done.
    get() maps the file for that tensor only and lets go of it with the tensor.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            only = self.folder / "model.safetensors"
            self.names = dict.fromkeys(self._open(only).keys(), only)
            return
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: weight_map is {short(weight_map)}, no object")
        for name, file in weight_map.items():
            if not (isinstance(file, str) and re.fullmatch(r"[\w.-]+\.safetensors", file)):
                raise ValueError(f"{index}: places {short(name)} in {short(file)}, which is no "
                                 "safetensors file of this folder")
        self.names = {name: self.folder / file for name, file in weight_map.items()}
        held = {file: self._open(file).keys() for file in sorted(set(self.names.values()))}
        for name, file in self.names.items():
            if name not in held[file]:
                raise ValueError(f"{file}: no tensor {name}, which {index.name} places there")

    def _open(self, path):
        if not path.is_file():                                   # a pipe would be waited for
            raise ValueError(f"{path}: {'no regular file' if path.exists() else 'missing'}")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:                        # also if header and size disagree
            raise ValueError(f"{path}: cut off, or not a safetensors file ({error})") from None

    def _file_of(self, name):
        if name not in self.names:
            raise ValueError(f"{self.folder}: no tensor {name} in its safetensors files")
        return self._open(self.names[name])

    def get(self, name, device="cpu"):
        return self._file_of(name).get_tensor(name).to(device)

    def check(self, name, shape, dtypes=("BF16", "F16", "F32", "F64")):
        found = self._file_of(name).get_slice(name)
        held = tuple(found.get_shape())
        if shape and held != shape:
            raise ValueError(f"{self.folder}: {name} has shape {held}, config.json says {shape}")
        if found.get_dtype() not in dtypes:
            raise ValueError(f"{self.names[name]}: {name} is {found.get_dtype()}, expected "
                             f"{' or '.join(dtypes)}")


# A tensor of a Qwen2.5, and its layer.
NAME = re.compile(r"""
      (?:lm_head | model\.embed_tokens | model\.norm)\.weight
    | model\.layers\.(\d+)\.
      (?: (?:input | post_attention)_layernorm\.weight
        | self_attn\.[qkv]_proj\.bias
        | (?:self_attn\.[qkvo] | mlp\.gate | mlp\.up | mlp\.down)_proj
          \.weight(?:_packed | _scale | _global_scale)? )
    | .*(?:rotary_emb\.inv_freq | input_global_scale)""", re.VERBOSE)


class Checkpoint(Shards):
    """A Qwen2.5 folder, bf16 or NVFP4, its linears to be held as `base`."""

    def __init__(self, folder, base, device, dtype):
        self.config = read_qwen2(folder / "config.json")
        super().__init__(folder)
        section = self.config.get("quantization_config")
        if section or any(name.endswith(".weight_packed") for name in self.names):
            check_nvfp4(section, folder / "config.json")
        if "calibration" in self.config:
            say(f"{folder}: {short(self.config['calibration'])}")
        matches = {name: NAME.fullmatch(name) for name in self.names}
        unused = [name for name, match in matches.items()        # a layer that somebody counts on
                  if not match or int(match[1] or 0) >= self.config["num_hidden_layers"]]
        if unused:
            raise ValueError(f"{folder}: {len(unused)} tensors that config.json does not account "
                             f"for, first {min(unused)}")
        self.base = base
        self.device = device
        self.dtype = dtype

    def read(self, name, *shape):
        self.check(name, shape)
        tensor = self.get(name, self.device)
        if not all(part.isfinite().all() for part in tensor.split(2**16)):
            raise ValueError(f"{self.names[name]}: {name} holds NaN or infinity")
        return tensor

    def frozen(self, names, parts, k):
        """The linears `names` of parts[i] rows and k columns -> one nvfp4.Weight."""
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
        except ValueError as error:              # a K that ends inside a block, an infinite weight
            raise ValueError(f"{self.folder}: {names[0]}: {error}") from None


CONFIG = {
    "architectures": (*exactly(["Qwen2ForCausalLM"]), True),
    **{key: (*whole(1, 2**24), True) for key in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "vocab_size")},
    "num_hidden_layers": (*whole(1, 1000), True),
    "max_position_embeddings": (*whole(1, 2**31), False),
    "rms_norm_eps": (*number(0.1), True),
    "rope_theta": (*number(1e12), True),
    "hidden_act": (*exactly("silu"), False),
    "tie_word_embeddings": ("true or false", lambda value: isinstance(value, bool), False),
    "use_sliding_window": ("false: sliding windows are not supported", lambda v: v is False, False),
    "rope_scaling": ("null: rope_scaling is not supported", lambda v: not v, False),
    "quantization_config": ("an object", lambda value: isinstance(value, dict), False)}


def read_qwen2(path):
    """config.json; ValueError unless it is a model that this project computes."""
    config = read_json(path)
    rope = config.get("rope_parameters") or {}                                  # newer files
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_parameters is {short(rope)}: only the default is supported")
    config["rope_theta"] = config.get("rope_theta") or rope.get("rope_theta")
    check(path, config, CONFIG)
    D = config["hidden_size"]
    H = config["num_attention_heads"]
    KV = config["num_key_value_heads"]
    if D % (2 * H) or H % KV or config.get("head_dim", D // H) != D // H:
        raise ValueError(f"{path}: hidden_size is {D}, num_attention_heads {H}, num_key_value_heads"
                         f" {KV}, head_dim {config.get('head_dim')}: heads do not divide")
    return config


def max_positions(folder):
    """How many tokens a model's sequences may have."""
    return read_qwen2(folder / "config.json").get("max_position_embeddings") or math.inf


def check_lengths(folder, length, rank=1):
    """ValueError if a model has no positions for `length` tokens, or no room for such a rank."""
    path = folder / "config.json"
    most = max_positions(folder)
    if length > most:
        raise ValueError(f"{path}: max_position_embeddings is {most}, less than {length}, the "
                         "tokens of prompt and --max-new-tokens together")
    width = read_qwen2(path)["hidden_size"]
    if rank > width:
        raise ValueError(f"--lora-rank {rank} exceeds hidden_size, which is {width} in {path}")


# What compressed-tensors writes into config.json of NVFP4 weights, and the section around it.
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                 "symmetric": True}
NVFP4_CONFIG = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4_WEIGHTS,
                                  "input_activations": None, "output_activations": None}}}


def check_nvfp4(section, path):
    """Other conventions differ silently: ModelOpt's files hold the tensor scale, not 1 / it."""
    try:
        groups = section["config_groups"].values()
        known = groups and all(NVFP4_WEIGHTS.items() <= g["weights"].items() for g in groups)
        known = known and section["quant_method"] == "compressed-tensors"
    except (AttributeError, KeyError, TypeError):                # a part is missing or no object
        known = False
    if not known:
        raise ValueError(f"{path}: quantization_config is not that of compressed-tensors NVFP4 "
                         "weights")


def load_nvfp4(shards, name, device="cpu"):
    """nvfp4.quantize's three tensors of the linear "model.layers.0.mlp.up_proj", once checked."""
    packed, block_scale, inverse = (shards.get(f"{name}.weight_{part}", device)
                                    for part in ("packed", "scale", "global_scale"))
    where = f"{shards.folder}: {name}"
    if not (block_scale.float() >= 0).all():
        raise ValueError(f"{where}: a block scale is negative or NaN")
    global_scale = 1 / inverse.float().flatten()[0]
    if not (inverse.numel() == 1 and global_scale.isfinite() and global_scale > 0):
        raise ValueError(f"{where}: weight_global_scale is {inverse.tolist()}")
    return packed, block_scale, global_scale


# -----------------------------------------------------------------------------
# Weights out

def model_tensors(model):
    """Yields (Hugging Face name, tensor) of a model.Qwen2, its adapter merged in fp32."""
    yield "model.embed_tokens.weight", model.embed
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        yield prefix + "input_layernorm.weight", layer.input_norm.weight
        yield prefix + "post_attention_layernorm.weight", layer.post_norm.weight
        for name, bias in zip("qkv", layer.qkv_bias.split(layer.qkv.parts)):
            yield f"{prefix}self_attn.{name}_proj.bias", bias
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            for name, weight in zip(linear.names, linear.merged().split(linear.parts)):
                yield name + ".weight", weight
    yield "model.norm.weight", model.final_norm.weight
    if not model.config.tied:
        yield "lm_head.weight", model.lm_head


def nvfp4_tensors(name, packed, block_scale, global_scale):
    """Yields (tensor name, tensor) of a linear as compressed-tensors stores it."""
    yield f"{name}.weight_packed", packed.cpu()
    yield f"{name}.weight_scale", block_scale.cpu()
    yield f"{name}.weight_global_scale", (1 / global_scale).reshape(1).cpu()


def base_of(folder, base):
    """The format to hold a folder's linears in: --base, or by default NVFP4, but 16 bits where
    tools.convert merged an adapter: 4 bits round away most of what training changed.
    """
    merged = read_qwen2(folder / "config.json").get("merged_adapter")
    if merged and base not in (None, "bf16"):
        say(f"{folder}: rounded to {base}, the merged adapter {short(merged)} is mostly lost: keep "
            "--base bf16, or take the model it was trained on with --adapter")
    return base or ("bf16" if merged else "nvfp4")


def save_model(tensors, source, out, about=None):
    """An iterable of (name, tensor) -> the new model folder `out`, all else copied from `source`.

    about: keys of config.json that tell what the tensors are, read when all have been written;
    without quantization_config they are 16-bit ones.
    """
    config = read_json(source / "config.json")
    for key in ("quantization_config", "calibration"):
        config.pop(key, None)
    with new_folder(out) as folder:
        for pattern in ("*.json", "*.txt", "*.jinja", "LICENSE*"):             # tokenizer and kin
            for file in source.glob(pattern):
                if file.name not in ("config.json", "model.safetensors.index.json"):
                    shutil.copy(file, folder)
        save_shards(tensors, folder)
        config |= {"torch_dtype": "bfloat16", **(about or {})}
        write_json(folder / "config.json", config)


def save_shards(tensors, folder):
    """-> model-0000i-of-0000n.safetensors and their index; holds one shard at a time."""
    parts = []                                   # names of each file
    shard = {}
    total = 0

    def flush():
        try:
            save_file(shard, folder / f"{len(parts)}.part", metadata={"format": "pt"})
        except SafetensorError as error:         # of a full disk
            raise OSError(f"{folder}: {error}") from None
        parts.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
    flush()
    weight_map = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


# -----------------------------------------------------------------------------
# PEFT adapters

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
VARIANTS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern",
            "fan_in_fan_out", "layers_to_transform", "layer_replication",
            "alora_invocation_tokens")                                          # not computed


def write_peft(folder, tensors, model_name, rank, alpha, norms):
    """norms: whether they are trained as well."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": str(model_name), "r": rank, "lora_alpha": alpha,
              "lora_dropout": 0.0, "bias": "none", "target_modules": TARGETS,
              "modules_to_save": NORMS if norms else None, "fan_in_fan_out": False,
              "init_lora_weights": True, "inference_mode": True}
    data = save(tensors, metadata={"format": "pt"})
    write_atomically(folder / "adapter_model.safetensors", data)
    write_json(folder / "adapter_config.json", config)


PEFT = {"peft_type": (*exactly("LORA"), True),
        "r": (*whole(1, 2**16), True),
        "lora_alpha": (*number(1e9), True),
        "bias": (*exactly("none"), False),
        "init_lora_weights": ("one that keeps the base's weights",
                              lambda value: value in (True, False, "gaussian", "eva"), False),
        "modules_to_save": (f"null or {list(NORMS)}",
                            lambda value: value == [] or value in (list(NORMS), list(NORMS)[::-1]),
                            False)}


def read_peft(folder):
    """-> adapter_config.json and the tensors of a plain LoRA adapter on every linear."""
    path = Path(folder) / "adapter_config.json"
    file = Path(folder) / "adapter_model.safetensors"
    config = read_json(path)
    check(path, config, PEFT)
    variants = [key for key in VARIANTS if config.get(key)]
    targets = config.get("target_modules")
    if variants or not isinstance(targets, list) or {*map(str, targets)} != set(TARGETS):
        raise ValueError(f"{folder}: need a plain LoRA adapter on {', '.join(TARGETS)}, "
                         f"got one on {short(targets)} {' '.join(variants)}")
    try:
        tensors = load(read_bytes(file))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: not a readable PEFT adapter ({error})") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise ValueError(f"{file}: {name} is {tensor.dtype}, or holds NaN or infinity")
        if name.endswith("lora_A.weight") and tensor.shape[:1] != (config["r"],):
            raise ValueError(f"{file}: {name} has shape {tuple(tensor.shape)}, {path.name} says "
                             f"r is {config['r']}")
    return config, tensors


def fill(folder, views, tensors):
    """Copy an adapter's tensors into the views of those names; ValueError if they differ."""
    wrong = sorted(views.keys() ^ tensors.keys())
    wrong += [n for n in views if n in tensors and views[n].shape != tensors[n].shape]
    if wrong:
        raise ValueError(f"{folder}: {len(wrong)} tensors are missing, unknown or of another "
                         f"shape, first {wrong[0]}")
    for name, view in views.items():
        view.copy_(tensors[name])
