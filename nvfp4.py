"""
Four-bit weight formats: real values <-> codes and scales, and the frozen weight made of them.

Why: decoding is bound by reading the frozen linears, so 4.5 bits a weight instead of 16 pay for the
sampler; and their rounding error is the "quantization noise" that QeRL explores with.

NVFP4: one weight (N out_features, K in_features) is three tensors, 4 + 8 / 16 bits a weight
    packed        uint8  (N, K // 2)     two E2M1 codes a byte along K: even k in the LOW nibble
    block_scale   e4m3   (N, K // 16)    one per block of 16 consecutive k (MXFP4 32, NF4 64)
    global_scale  fp32   () or (N,)      the tensor scale (one per row where parts are fused)
Both scales multiply; |e2m1| is 0, .5, 1, 1.5, 2, 3, 4 or 6, the sign is bit 3 of a code:
    w[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * global_scale

The tensor scale is a power of two (compressed-tensors: max|w| / 2688): a code has 2 significant
bits and a block scale 4, so code * block_scale * 2^n is exact in bf16, and a learner that
dequantizes and a sampler that multiplies later see the same weights, bit for bit. q, k, v share one
tensor scale and gate, up another: engines fuse them and keep one for the result.

Which block scale? The usual one takes the largest weight to the largest code. A finer one that
clips it, or a coarser one, often fits the other 15 better: each format tries the scales of its
`offsets` and keeps the one of least squared error. The usual one alone, offset 0, gives the bytes
of compressed-tensors and bitsandbytes.

Not here: codes chosen from data (calibrate.py), 4-bit activations, NF4's double quantization.
"""
import math
from functools import cache
from typing import Callable, NamedTuple

import torch

from ops import twin_in_kernels

CHUNK = 2**22                                    # weights at a time: 100 MB of fp32 temporaries

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_SIGNED = torch.cat([E2M1, -E2M1])           # code 0..15 -> value; code 8 is -0
# Lower edge of magnitudes 1..7; x > edge decides, so a tie goes down. But ties belong to the even
# code: the edges below even codes (.75, 1.75, 3.5) move one fp32 step towards zero.
E2M1_EDGES = (E2M1[1:] + E2M1[:-1]) / 2
E2M1_EDGES[1::2] = torch.nextafter(E2M1_EDGES[1::2], torch.zeros(3))

OFFSETS = sorted(range(-4, 7), key=abs)          # E4M3 codes tried, the usual first

# The 16 NormalFloat levels (QLoRA, arXiv 2305.14314, appendix E): quantiles of N(0, 1) in [-1, 1].
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])
NF4_EDGES = (NF4[1:] + NF4[:-1]) / 2


def encode(w, block, candidates, codes_of, levels, importance=None):
    """(N, K) -> packed uint8 (N, K // 2), scale fp32 (N, K // block): of least squared error.

    candidates: blocks (n, K // block, block) -> the scales to try, fp32 (n, K // block) each.
    codes_of: blocks / scale -> codes uint8, of `levels`. importance (K,) weighs squared errors.
    """
    K = w.shape[1]
    if K % block:
        raise ValueError(f"K={K} (in_features) is not a multiple of the block of {block} weights")
    packed = []
    scales = []
    levels = levels.to(w.device)
    weigh = 1.0 if importance is None else importance.view(-1, block)
    for rows in w.split(max(1, CHUNK // K)):
        blocks = rows.unflatten(1, (-1, block))
        tried = candidates(blocks)
        blocks = blocks.float()
        errors = []
        for scale in tried:
            values = levels[codes_of(blocks / scale[..., None]).int()] * scale[..., None]
            errors.append(((values - blocks).square() * weigh).sum(-1))
        best = torch.stack(errors).argmin(0, keepdim=True)       # of equal ones the first
        scale = torch.stack(tried).gather(0, best)[0]
        packed.append(pack_pairs(codes_of(blocks / scale[..., None]).flatten(1)))
        scales.append(scale)
    return torch.cat(packed), torch.cat(scales)


def pack_pairs(codes):
    """(N, K) codes -> uint8 (N, K // 2)."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


@cache
def byte_table(levels, device):
    """(256, 2): both codes of a byte decoded. Kept: a CUDA graph may not copy from the CPU."""
    byte = torch.arange(256)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], dim=1).to(device)


@twin_in_kernels
def dequantize_codes(packed, scale, levels, dtype, out=None):
    """packed, scale fp32 (N, K // block), levels (16,) -> levels[code] * scale in fp32, then
    `dtype`: (N, K), or into `out`, rows of any stride.
    """
    N, blocks = scale.shape
    K = 2 * packed.shape[1]
    pairs = byte_table(levels, packed.device)
    if out is None:
        out = torch.empty(N, K, dtype=dtype, device=packed.device)
    step = max(1, CHUNK // K)
    for codes, factor, rows in zip(packed.split(step), scale.split(step), out.split(step)):
        values = pairs[codes.int()].view(-1, blocks, K // blocks) * factor[..., None]
        rows.copy_(values.flatten(1).to(dtype))
    return out


def edges_below(x, edges):
    """-> uint8, how many edges are < x: on a CPU in half of bucketize's time."""
    return sum((x > edge).to(torch.uint8) for edge in edges.tolist())


def e2m1_codes(x):
    """fp32 in units of the block's scale -> codes; beyond 6 saturates."""
    return edges_below(x.abs(), E2M1_EDGES) | (x < 0).to(torch.uint8) << 3


# -----------------------------------------------------------------------------
# NVFP4

def global_scale_for(*weights):
    """The smallest power of two, fp32 (), that keeps every block scale of weights that share it
    within E4M3's 448: global_scale_for(q, k, v). All zeros give 1.
    """
    extremes = [extreme for w in weights for extreme in torch.aminmax(w)]
    amax = torch.stack(extremes).abs().max().item()
    if not math.isfinite(amax):
        raise ValueError(f"a weight matrix holds {amax}: no tensor scale fits")
    mantissa, exponent = math.frexp(amax / (6 * 448))     # mantissa .5: the power of two itself
    exponent = max(exponent - (mantissa == 0.5), -126)    # smaller ones have no reciprocal in fp32
    return torch.tensor(2.0**exponent, device=weights[0].device)


def quantize(w, global_scale=None, importance=None, offsets=OFFSETS):
    """(N, K) -> packed uint8 (N, K // 2), block_scale e4m3 (N, K // 16), global_scale fp32 ().

    importance (K,): what an input channel's squared error weighs; None: all the same. offsets: of
    the E4M3 codes to try from blockmax / 6, which is rounded to the dtype of w, as in
    compressed-tensors.
    """
    if global_scale is None:
        global_scale = global_scale_for(w)
    inverse = 1 / global_scale                                    # compressed-tensors' direction

    def candidates(blocks):
        first = e4m3_codes(blocks.abs().amax(-1) / 6, inverse)
        return [e4m3_value(first + offset) / inverse for offset in offsets]

    packed, scale = encode(w, 16, candidates, e2m1_codes, E2M1_SIGNED, importance)
    return packed, (scale * inverse).to(torch.float8_e4m3fn), global_scale


def e4m3_codes(scale, inverse):
    """Wanted block scale -> int16 codes of E4M3's positive numbers, which rise with the code."""
    scale = (scale.float() * inverse).clamp(max=448)              # not every cast saturates
    code = scale.to(torch.float8_e4m3fn).view(torch.uint8).short()
    return code.masked_fill(code == 0, 32)                        # 0.125 for zeros: all codes are 0


def e4m3_value(code):
    """Codes, clamped to the positive numbers: no 0, no NaN -> fp32."""
    return code.clamp(1, 126).byte().view(torch.float8_e4m3fn).float()


def dequantize(packed, block_scale, global_scale, dtype=torch.bfloat16, out=None):
    """quantize's tensors -> (N, K) in `dtype`; exact in bf16 if global_scale is a power of two."""
    scale = block_scale.float() * global_scale.reshape(-1, 1)
    return dequantize_codes(packed, scale, E2M1_SIGNED, dtype, out)


# -----------------------------------------------------------------------------
# The paper's other bases

def quantize_mxfp4(w, offsets=(0, -1, 1)):
    """(N, K) -> packed uint8 (N, K // 2), block_scale uint8 (N, K // 32): byte b is 2^(b - 127).

    offsets: of the bytes to try from the one that puts blockmax into [3.5, 7), whose upper end
    saturates, as in compressed-tensors (the OCP text's floor clips up to a quarter of a weight).
    """
    def candidates(blocks):
        mantissa, exponent = torch.frexp(blocks.abs().amax(-1).float())         # in [.5, 1)
        byte = exponent + (mantissa >= 0.875).int() - 3 + 127
        return [(byte + offset).clamp(0, 254).byte().view(torch.float8_e8m0fnu).float()
                for offset in offsets]                                          # 255 is NaN

    packed, scale = encode(w, 32, candidates, e2m1_codes, E2M1_SIGNED)
    return packed, scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def dequantize_mxfp4(packed, block_scale, dtype=torch.bfloat16, out=None):
    """-> (N, K) in `dtype`, exact in bf16."""
    scale = block_scale.view(torch.float8_e8m0fnu).float()
    return dequantize_codes(packed, scale, E2M1_SIGNED, dtype, out)


def quantize_nf4(w, offsets=range(0, -11, -1)):
    """(N, K) -> packed uint8 (N, K // 2), absmax fp32 (N, K // 64): the block's largest |w|, or
    what is tried below it, offsets in steps of 2 %.
    """
    def candidates(blocks):
        absmax = blocks.abs().amax(-1).float().clamp(min=2.0**-126)     # zeros get the level 0
        return [absmax * (1 + 0.02 * offset) for offset in offsets]

    return encode(w, 64, candidates, lambda x: edges_below(x, NF4_EDGES), NF4)


def dequantize_nf4(packed, absmax, dtype=torch.bfloat16, out=None):
    return dequantize_codes(packed, absmax, NF4, dtype, out)


def quantize_bf16(w):
    """16 bits, as they are: fp16 stays fp16."""
    return (w if w.dtype == torch.float16 else w.bfloat16(),)


def dequantize_bf16(w, dtype=torch.bfloat16, out=None):
    return w.to(dtype) if out is None else out.copy_(w)


class Format(NamedTuple):
    quantize: Callable                           # tensors = quantize(w)
    dequantize: Callable                         # w = dequantize(*tensors, dtype=..., out=...)


FORMATS = {
    "nvfp4": Format(quantize, dequantize),
    "bf16": Format(quantize_bf16, dequantize_bf16),
    "mxfp4": Format(quantize_mxfp4, dequantize_mxfp4),
    "nf4": Format(quantize_nf4, dequantize_nf4),
}


# -----------------------------------------------------------------------------
# A frozen weight

class Weight:
    """A frozen (N, K) weight; dtype: of matmul inputs. Its fast twin is marlin_fp4.PackedWeight."""

    def __init__(self, tensors, dequantize, shape, dtype):
        self.tensors = tensors
        self._dequantize = dequantize
        self.N, self.K = shape
        self.dtype = dtype
        self.device = tensors[0].device
        self.nbytes = sum(t.nbytes for t in tensors)
        self.dense = None                        # W, on a CPU

    def dequantize(self, out=None):
        """-> W (N, K) in dtype, not to be written to; or in `out`, rows of any stride."""
        if self.device.type != "cpu":
            return self._dequantize(*self.tensors, dtype=self.dtype, out=out)
        if self.dense is None:                   # kept: decoding takes longer than the product
            self.dense = self._dequantize(*self.tensors, dtype=self.dtype)
        return self.dense if out is None else out.copy_(self.dense)

    def expands(self, rows):
        """Whether a decode step of so many rows makes a 16-bit W first."""
        return self.tensors[0].dtype != self.dtype


def freeze(weights, base, dtype):
    """The parts (N_p, K) of a fused linear -> one Weight of their rows in format `base`."""
    if base == "nvfp4":
        scale = global_scale_for(*weights)
        return fuse([quantize(w, scale) for w in weights], dtype)
    w = torch.cat(weights).to(dtype)
    return Weight(FORMATS[base].quantize(w), FORMATS[base].dequantize, w.shape, dtype)


def fuse(parts, dtype):
    """quantize's three tensors of each part -> one NVFP4 Weight, its tensor scale one a row:
    other programs' parts may not share theirs.
    """
    packed = torch.cat([part[0] for part in parts])
    block_scale = torch.cat([part[1] for part in parts])
    row_scale = torch.cat([part[2].expand(len(part[0])) for part in parts])
    if packed.is_cuda:
        import marlin_fp4                        # the same weight, read by kernels
        return marlin_fp4.pack(packed, block_scale, row_scale, dtype)
    shape = len(packed), 2 * packed.shape[1]
    return Weight((packed, block_scale, row_scale), dequantize, shape, dtype)
