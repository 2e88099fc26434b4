"""
Four-bit weight formats: real values <-> codes and scales, and the safetensors folders that hold them.

    python nvfp4.py SRC OUT        bf16 Qwen2.5 folder of any size -> compressed-tensors NVFP4 folder, layer by layer

Why: the frozen linears are most of a model and decoding is bound by reading them, so 4.5 bits a weight instead of 16
pays for the sampler; and their rounding error is the "quantization noise" that QeRL explores with.

    N  out_features      K  in_features      block  16 consecutive k of one row (MXFP4 32, NF4 64)

NVFP4: one (N, K) weight is three tensors, 4 + 8 / 16 bits a weight
    packed        uint8  (N, K // 2)     two E2M1 codes a byte along K: even k in the LOW nibble, sign in its bit 3
    block_scale   e4m3   (N, K // 16)    one per block
    global_scale  fp32   ()              one per weight
Both scales multiply (|e2m1| is 0, .5, 1, 1.5, 2, 3, 4 or 6):
    w[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * global_scale

Rounding and bytes are those of compressed-tensors (0.11 and 0.20 agree) for the same tensor scale, which its files hold
as the reciprocal: weight_global_scale = 1 / global_scale, shape [1].

The tensor scale itself differs, by choice: a power of two, where theirs is max|w| / 2688. A code has 2 significant bits
and a block scale 4, so code * block_scale * 2^n is exact in bf16: a trainer that dequantizes and a sampler that
multiplies later see the same weights, bit for bit. It costs next to nothing: on Qwen2.5-Coder-0.5B a relative error of
0.09352 against 0.09347 (MXFP4 0.1163, NF4 0.0935). q, k, v share one tensor scale and gate, up another, because engines
fuse those matrices and keep a single scale for the result.

MXFP4 and NF4 are the paper's comparison bases. FORMATS holds all bases behind one pair of functions.

Length: three formats, a reader, a writer and a converter are in one file because each knows the layout above.
Not here: calibration (AWQ, GPTQ: everything rounds to nearest), 4-bit activations, ragged K, NF4's double quantization,
the layout that the GPU kernel reads (marlin_fp4.py).
"""
import argparse
import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

CHUNK = 2**22          # weights encoded or decoded at a time: bounds the fp32 temporaries to ~100 MB for any matrix
SHARD_BYTES = 2**31    # of an output file, which is held in memory until it is written
# The quantized linears of a Qwen2 layer; those in one tuple share a tensor scale. All else stays bf16.
LINEARS = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
           ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_SIGNED = torch.cat([E2M1, -E2M1])                             # code 0..15 -> value; code 8 is -0
# Lower edge of magnitudes 1..7; x > edge decides, so a tie goes down. But ties belong to the even code: the edges below
# even codes (.75, 1.75, 3.5) move one fp32 step towards zero, so that there a tie goes up.
E2M1_EDGES = (E2M1[1:] + E2M1[:-1]) / 2
E2M1_EDGES[1::2] = torch.nextafter(E2M1_EDGES[1::2], torch.zeros(3))

# The 16 NormalFloat levels (QLoRA, arXiv 2305.14314, appendix E): quantiles of N(0, 1) scaled to [-1, 1], 0 among them.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])
NF4_EDGES = (NF4[1:] + NF4[:-1]) / 2


# -----------------------------------------------------------------------------
# What the formats share

def row_chunks(N, K, block):
    """Slices of rows of about CHUNK weights each; refuses a K that ends inside a block."""
    if K % block:
        raise ValueError(f"K={K} (in_features) is not a multiple of the block of {block} weights")
    step = max(1, CHUNK // K)
    return [slice(n, n + step) for n in range(0, N, step)]


def encode(w, block, rule):
    """rule: blocks (n, K // block, block) -> uint8 codes alike, scale (n, K // block). Here: packed (N, K // 2), scale.

    Even k goes to the low nibble of its byte.
    """
    packed, scales = [], []
    for rows in row_chunks(*w.shape, block):
        codes, scale = rule(w[rows].unflatten(1, (-1, block)))
        packed.append(codes[..., 0::2].flatten(1) | codes[..., 1::2].flatten(1) << 4)
        scales.append(scale)
    return torch.cat(packed), torch.cat(scales)


@cache
def byte_table(levels, device):
    """(256, 2): both codes of a byte decoded. One look-up a byte costs less than splitting the nibbles first.

    Kept, because a CUDA graph that captures a decode may not copy from the CPU.
    """
    byte = torch.arange(256)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1).to(device)


def decode(packed, scale, levels, dtype, out=None):
    """packed uint8 (N, K // 2), scale fp32 (N, K // block) -> (N, K): levels[code] * scale in fp32, then `dtype`.

    out: where to, rows of any stride.
    """
    N, K, block = packed.shape[0], 2 * packed.shape[1], 2 * packed.shape[1] // scale.shape[1]
    pairs = byte_table(levels, packed.device)
    w = torch.empty(N, K, dtype=dtype, device=packed.device) if out is None else out
    if packed.is_cuda:
        _decode_kernel[(N, triton.cdiv(K, 4096))](packed, scale.contiguous(), pairs, w, w.stride(0), K // 2, block // 2,
                                                  BYTES=2048, num_warps=8)
        return w
    for rows in row_chunks(N, K, block):
        blocks = pairs[packed[rows].int()].view(-1, K // block, block)
        w[rows] = (blocks * scale[rows][..., None]).flatten(1).to(dtype)
    return w


@triton.jit
def _decode_kernel(packed_ptr, scale_ptr, pairs_ptr, w_ptr, w_stride, K_BYTES, block_bytes, BYTES: tl.constexpr):
    """BYTES bytes of one row of decode(): without it, a comparison with NF4 would be one with torch's temporaries."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    live = at < K_BYTES
    byte = tl.load(packed_ptr + row * K_BYTES + at, mask=live, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + row * (K_BYTES // block_bytes) + at // block_bytes, mask=live, other=0.0)
    pair = tl.interleave(tl.load(pairs_ptr + 2 * byte) * scale, tl.load(pairs_ptr + 2 * byte + 1) * scale)
    k = tl.program_id(1) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(w_ptr + row * w_stride + k, pair.to(w_ptr.dtype.element_ty), mask=k < 2 * K_BYTES)


def edges_below(x, edges):
    """How many of the edges are < x, as uint8. On a CPU these 7 or 15 compares are 2-3 times as fast as bucketize."""
    count = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for edge in edges.tolist():
        count += x > edge
    return count


def e2m1_codes(x):
    """fp32 in units of its block's scale -> uint8 codes; beyond 6 saturates; -0.0 is code 0, a tiny negative code 8."""
    return edges_below(x.abs(), E2M1_EDGES) | (x < 0).to(torch.uint8) << 3


# -----------------------------------------------------------------------------
# NVFP4

def global_scale_for(*weights):
    """The smallest power of two, fp32 (), with which no block scale of any of these weights exceeds E4M3's 448.

    Several weights share it: global_scale_for(q, k, v). All zeros give 1.
    """
    amax = torch.stack([torch.stack(torch.aminmax(w)).abs().max() for w in weights]).max().double()
    if not torch.isfinite(amax):
        raise ValueError(f"a weight matrix holds {amax.item()}: no tensor scale fits")
    mantissa, exponent = torch.frexp(amax / (6 * 448))                  # mantissa in [.5, 1): .5 is the power itself
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=-126)     # below, the reciprocal would overflow
    return torch.ldexp(torch.ones_like(amax), exponent).float()


def quantize(w, global_scale=None):
    """(N, K) -> packed uint8 (N, K // 2), block_scale e4m3 (N, K // 16), global_scale fp32 (). CPU or CUDA.

    As in compressed-tensors, blockmax / 6 is rounded to the dtype of w: a bf16 weight and its fp32 copy can differ in
    a block scale, though only under a tensor scale that is no power of two.
    """
    global_scale = global_scale_for(w) if global_scale is None else global_scale
    inverse = 1 / global_scale                                          # compressed-tensors' direction, see the top

    def rule(blocks):
        scale = (blocks.abs().amax(-1) / 6).float() * inverse
        scale = scale.clamp(max=448).to(torch.float8_e4m3fn).float()    # not every torch's cast saturates by itself
        scale = scale.where(scale != 0, 0.125)                          # zero or underflowed block: all codes are 0
        return e2m1_codes(blocks.float() / (scale / inverse)[..., None]), scale.to(torch.float8_e4m3fn)

    return *encode(w, 16, rule), global_scale


def dequantize(packed, block_scale, global_scale, dtype=torch.bfloat16):
    """The inverse of quantize: (N, K) in `dtype`; with a power-of-two global_scale exact in bf16."""
    return decode(packed, block_scale.float() * global_scale, E2M1_SIGNED, dtype)


# -----------------------------------------------------------------------------
# The paper's other bases

def quantize_mxfp4(w):
    """(N, K) -> packed uint8 (N, K // 2), block_scale uint8 (N, K // 32) holding E8M0: byte b scales by 2^(b - 127).

    The scale puts blockmax into [3.5, 7): what E2M1 would round to 8 moves up a scale, what rounds to 6 stays and
    saturates, as in compressed-tensors (the OCP text's floor keeps [4, 8) and clips up to a quarter of a weight).
    """
    def rule(blocks):
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1).float())         # mantissa in [.5, 1)
        byte = (exponent + (mantissa >= 0.875).int() - 3 + 127).clamp(0, 254).to(torch.uint8)     # 255 is NaN
        return e2m1_codes(blocks.float() / byte.view(torch.float8_e8m0fnu).float()[..., None]), byte

    return encode(w, 32, rule)


def dequantize_mxfp4(packed, block_scale, dtype=torch.bfloat16, out=None):
    """The inverse of quantize_mxfp4: (N, K) in `dtype`, exact in bf16."""
    return decode(packed, block_scale.view(torch.float8_e8m0fnu).float(), E2M1_SIGNED, dtype, out)


def quantize_nf4(w):
    """(N, K) -> packed uint8 (N, K // 2), absmax fp32 (N, K // 64): the block's largest magnitude is the scale."""
    def rule(blocks):
        absmax = blocks.abs().amax(-1).float()
        # A zero block divides by the smallest normal number instead: its weights get the level that is exactly 0.
        return edges_below(blocks / absmax.clamp(min=2.0**-126)[..., None], NF4_EDGES), absmax

    return encode(w, 64, rule)


def dequantize_nf4(packed, absmax, dtype=torch.bfloat16, out=None):
    """The inverse of quantize_nf4: (N, K) in `dtype`."""
    return decode(packed, absmax, NF4, dtype, out)


def dequantize_bf16(w, dtype=torch.bfloat16, out=None):
    return w.to(dtype) if out is None else out.copy_(w)


# base -> (quantize, dequantize): tensors = quantize(w), w = dequantize(*tensors, dtype=...)
FORMATS = {
    "bf16": (lambda w: (w if w.dtype == torch.float16 else w.bfloat16(),), dequantize_bf16),     # 16 bits as they are
    "nvfp4": (quantize, dequantize),
    "mxfp4": (quantize_mxfp4, dequantize_mxfp4),
    "nf4": (quantize_nf4, dequantize_nf4),
}


# -----------------------------------------------------------------------------
# Folders: reading

def read_json(path):
    """The JSON object in a file, or a ValueError that names the file."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


class Shards:
    """The tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json names.

        shards = Shards(folder);  "lm_head.weight" in shards.names;  shards.get("model.norm.weight", device="cuda")

    Opening checks every file, headers only: a missing or cut-off one is a ValueError before any work is done. get()
    maps the file for that tensor only and lets go of it with the tensor, so memory holds what the caller keeps.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            files = read_json(index).get("weight_map", {})
        else:
            files = dict.fromkeys(self._open(self.folder / "model.safetensors").keys(), "model.safetensors")
        self.names = {name: self.folder / file for name, file in files.items()}            # tensor -> its file
        held = {file: set(self._open(file).keys()) for file in sorted(set(self.names.values()))}
        for name, file in self.names.items():
            if name not in held[file]:
                raise ValueError(f"{file}: no tensor {name}, which {index.name} places there")

    def _open(self, path):
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ValueError(f"{path}: missing") from None
        except SafetensorError as error:                                # also if header and file size disagree
            raise ValueError(f"{path}: cut off, or not a safetensors file ({error})") from None

    def _file_of(self, name):
        if name not in self.names:
            raise ValueError(f"{self.folder}: no tensor {name} in its safetensors files")
        return self._open(self.names[name])

    def shape(self, name):
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def get(self, name, device="cpu"):
        return self._file_of(name).get_tensor(name).to(device)


def load_linear(shards, name, device="cpu"):
    """quantize's three tensors of the linear `name` ("model.layers.0.mlp.up_proj") from a compressed-tensors folder."""
    check_nvfp4(shards.folder)
    packed, block_scale, inverse = (
        shards.get(f"{name}.{part}", device) for part in ("weight_packed", "weight_scale", "weight_global_scale"))
    N, K = packed.shape[0], 2 * packed.shape[1]
    if packed.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn or block_scale.shape != (N, K // 16):
        raise ValueError(f"{shards.folder}: {name} is no NVFP4 weight: {packed.dtype} {tuple(packed.shape)}, "
                         f"{block_scale.dtype} {tuple(block_scale.shape)}")
    return packed, block_scale, 1 / inverse.float().reshape(())


# What a compressed-tensors config.json says of NVFP4 weights, and the whole section as this file writes it.
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
QUANTIZATION_CONFIG = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": NVFP4_WEIGHTS, "input_activations": None, "output_activations": None}}}


def check_nvfp4(folder):
    """ValueError unless config.json announces compressed-tensors' NVFP4 weights.

    Other conventions differ silently: ModelOpt's files hold the tensor scale itself, not its reciprocal.
    """
    config = read_json(Path(folder) / "config.json").get("quantization_config") or {}
    groups = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
    if config.get("quant_method") != "compressed-tensors" or not groups or any(
            weights.get(key) != value for weights in groups for key, value in NVFP4_WEIGHTS.items()):
        raise ValueError(f"{folder}/config.json: quantization_config is not that of compressed-tensors NVFP4 weights")


# -----------------------------------------------------------------------------
# Folders: writing

@contextmanager
def new_folder(out):
    """A temporary folder beside `out`: becomes `out`, synced to disk, if the block ends well, and else is removed."""
    out = Path(out).absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        for path in (*folder.iterdir(), folder):
            path.chmod(0o755 if path.is_dir() else 0o644)               # mkdtemp and safetensors 0.8 let only us read
            sync(path)
        folder.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def save_shards(tensors, folder):
    """An iterable of (name, tensor) -> model-0000i-of-0000n.safetensors and their index; holds one shard at a time."""
    parts, shard, total = [], {}, 0

    def flush():
        save_file(shard, folder / f"{len(parts)}.part", metadata={"format": "pt"})
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
        weight_map.update(dict.fromkeys(names, file))
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy_companions(src, folder):
    """The tokenizer and its kin: all small files of a model folder but config.json and the index."""
    for pattern in ("*.json", "*.txt", "*.jinja", "LICENSE*"):
        for file in Path(src).glob(pattern):
            if file.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copy(file, folder)


def squared_error(w, *tensors):
    """(sum of (w - decoded)^2, sum of w^2), chunk by chunk."""
    decoded = dequantize(*tensors)
    error = norm = 0.0
    for rows in row_chunks(*w.shape, 16):
        exact = w[rows].float()
        error += (exact - decoded[rows].float()).square().sum().item()
        norm += exact.square().sum().item()
    return error, norm


def nvfp4_tensors(shards, layers, device):
    """Yields (name, tensor) of the NVFP4 folder, one matrix at a time; prints |w - decoded| / |w| of each layer."""
    linear = {f"{name}.weight" for groups in layers for group in groups for name in group}
    yield from ((name, shards.get(name).bfloat16()) for name in shards.names if name not in linear)
    total_error = total_norm = 0.0
    for i, groups in enumerate(tqdm(layers, unit="layer")):
        error = norm = 0.0
        for group in groups:
            weights = [shards.get(f"{name}.weight", device) for name in group]
            try:
                global_scale = global_scale_for(*weights)
            except ValueError as error:
                raise ValueError(f"{', '.join(group)}: {error}") from None
            for name, w in zip(group, weights):
                packed, block_scale, _ = quantize(w, global_scale)
                yield f"{name}.weight_packed", packed.cpu()
                yield f"{name}.weight_scale", block_scale.cpu()
                yield f"{name}.weight_global_scale", (1 / global_scale).reshape(1).cpu()
                e, n = squared_error(w, packed, block_scale, global_scale)
                error, norm = error + e, norm + n
        tqdm.write(f"layer {i:2d}  relative error {(error / norm) ** 0.5:.4f}")
        total_error, total_norm = total_error + error, total_norm + norm
    tqdm.write(f"all {len(layers)} layers  relative error {(total_error / total_norm) ** 0.5:.4f}")


def convert(src, out, device):
    """The bf16 Qwen2.5 folder `src` -> the NVFP4 folder `out`; ValueError, and nothing written, if it cannot be."""
    src = Path(src)
    config = read_json(src / "config.json")
    if config.get("architectures") != ["Qwen2ForCausalLM"]:
        raise ValueError(f"{src}/config.json: architectures is {config.get('architectures')}, not ['Qwen2ForCausalLM']")
    if config.get("quantization_config"):
        raise ValueError(f"{src}/config.json: has a quantization_config, so it is quantized already")
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        raise ValueError(f"{src}/config.json: num_hidden_layers is {num_layers}")
    layers = [[[f"model.layers.{i}.{name}" for name in group] for group in LINEARS] for i in range(num_layers)]
    shards = Shards(src)
    for name in (f"{name}.weight" for groups in layers for group in groups for name in group):
        if shards.shape(name)[1] % 16:
            raise ValueError(f"{shards.names[name]}: {name} has K={shards.shape(name)[1]}, not a multiple of 16")
    with new_folder(out) as folder:
        save_shards(nvfp4_tensors(shards, layers, device), folder)
        write_json(folder / "config.json",
                   config | {"torch_dtype": "bfloat16", "quantization_config": QUANTIZATION_CONFIG})
        copy_companions(src, folder)


def main():
    parser = argparse.ArgumentParser(description="bf16 Qwen2.5 folder -> compressed-tensors NVFP4 folder")
    parser.add_argument("src", help="folder with config.json and model.safetensors, or shards with their index")
    parser.add_argument("out", help="folder to make; must not exist, or be empty")
    args = parser.parse_args()
    try:
        convert(args.src, args.out, "cuda" if torch.cuda.is_available() else "cpu")
    except (ValueError, OSError, SafetensorError) as error:
        sys.exit(f"nvfp4.py: {error}")


if __name__ == "__main__":
    main()
