"""
NVFP4: quantize weights to 4-bit codes and scales, and decode them again.

NVFP4 takes 4.5 bits per weight, 28% of bf16. Sampling gets faster too, since with few answers at a
time it is limited by reading weights. The rounding error is the "quantization noise" that QeRL
(arXiv 2510.11696) uses for exploration. A model's `base` is the format of its frozen linears: nvfp4
or bf16.

A matrix W (N out_features, K in_features) in NVFP4 is three tensors:

    packed        uint8  (N, K // 2)     two E2M1 codes per byte along K: even k in the LOW nibble
    block_scale   e4m3   (N, K // 16)    one for each scale_block, 16 neighboring weights of a row
    global_scale  fp32   () or (N,)      one for the matrix; (N,) if matrices were fused along N

    W[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * global_scale

A code is a sign (bit 3) and one of the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 (bits 0 to 2).

A scale_block worked out by hand, with a global_scale of 2^-11 and all but four of its 16 weights 0:
    w                   0.30      0.245     -0.12     0.01

The usual scale maps the largest weight to 6, the largest magnitude: 0.30 / 6 = 0.05 = 102.4 *
2^-11. The nearest E4M3 number is 104, so this block's unit is 104 * 2^-11 = 0.0508:
    w / unit            5.91      4.82      -2.36     0.20
    nearest e2m1        6         4         -2        0
    decoded             0.305     0.203     -0.102    0           squared error 0.0022

Most of the error comes from 0.245, which falls between 4 and 6, where E2M1 is coarsest. quantize()
tries eleven E4M3 numbers around 104 (`offsets`). Of these, 160 fits best, with a unit of 0.0781:
    w / unit            3.84      3.14      -1.54     0.13
    nearest e2m1        4         3         -1.5      0
    decoded             0.3125    0.234     -0.117    0           squared error 0.0004
    code                6         5         11        0           11 = 8 (the sign) + 3
    packed              0x56                0x0B                  the first code in the low nibble
    block_scale         0x72                                      E4M3: 2^7 * (1 + 2/8) = 160

Each block keeps the scale with the smallest squared error. A smaller scale can win too: it clips
the largest weight but may fit the other 15 better. With only the usual scale (offset 0), codes and
scales equal those of compressed-tensors.

Our global scale is a power of two, so the learner and the sampler use the same W, bit for bit. A
code has 2 significant bits and a block scale 4, so their product is exact in bf16, and it doesn't
matter that the learner rounds W to bf16 or that the sampler multiplies by global_scale last. (Other
quantizers rarely use powers of two; the learner's W is then rounded.) q, k and v share a global
scale, and so do gate and up, because inference engines fuse them.

Not here: codes that compensate for each other's errors (calibrate.py), 4-bit activations.
"""
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from files import UserError
from ops import on_gpu

SCALE_BLOCK = 16                                 # weights of a row that share a block scale
WEIGHTS_AT_A_TIME = 2**22                        # bounds the fp32 temporaries to 100 MB

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_SIGNED = torch.cat([E2M1, -E2M1])           # code 0..15 -> value; code 8 is -0
# The code of |x| is the number of edges below |x|. An |x| on an edge is a tie and goes to the even
# code, as in IEEE arithmetic:
#     code        0      1      2      3      4      5      6      7
#     magnitude   0     .5      1     1.5     2      3      4      6
#     edge          .25    .75   1.25   1.75   2.5    3.5     5
#     tie goes     down    up    down    up    down    up    down
# `>` sends ties down. To send one up, its edge moves one fp32 number towards zero.
E2M1_EDGES = (E2M1[1:] + E2M1[:-1]) / 2
E2M1_EDGES[1::2] = torch.nextafter(E2M1_EDGES[1::2], torch.zeros(3))

# Block scales to try, as E4M3 codes relative to the usual one: about 0.7 to 1.7 times the usual
# scale, since 8 codes are a factor of 2. Sorted by distance, so that the nearest wins ties.
OFFSETS = sorted(range(-4, 7), key=abs)


# -----------------------------------------------------------------------------
# Quantizing

def global_scale_for(*weights: Tensor) -> Tensor:
    """The global scale, fp32 (), for weights to share: global_scale_for(q, k, v).

    The smallest power of two for which no block scale exceeds 448, E4M3's largest number; 1 if all
    weights are 0. UserError if a weight is not finite.
    """
    extremes = [extreme for w in weights for extreme in torch.aminmax(w)]
    amax = torch.stack(extremes).abs().max().item()
    if not math.isfinite(amax):
        raise UserError(f"a weight matrix contains {amax}, so it has no global scale")
    # amax / 2688 = mantissa * 2^exponent, mantissa in [.5, 1), so 2^exponent is the next power of
    # two, unless it's already a power of two (mantissa .5). Below 2^-126 a GPU may flush to 0.
    mantissa, exponent = math.frexp(amax / (6 * 448))
    exponent = max(exponent - (mantissa == 0.5), -126)
    return torch.tensor(2.0**exponent, device=weights[0].device)


def quantize(w: Tensor, global_scale: Tensor | None = None, importance: Tensor | None = None,
             offsets: Iterable[int] = OFFSETS) -> tuple[Tensor, Tensor, Tensor]:
    """(N, K) -> packed uint8 (N, K // 2), block_scale e4m3 (N, K // 16), global_scale ().

    The usual block scale is the block's largest |w| / 6, rounded to the dtype of w as in
    compressed-tensors. offsets: the E4M3 codes to try, counted from that one. importance (K,): how
    much the squared error of each input channel counts; None: all equally. global_scale: None means
    global_scale_for(w). UserError if K is not a multiple of 16 or, without a global_scale, a weight
    is not finite.
    """
    K = w.shape[1]
    if K % SCALE_BLOCK:
        raise UserError(f"K={K} (in_features) is not a multiple of {SCALE_BLOCK}, the size of a "
                        "scale_block")
    if global_scale is None:
        global_scale = global_scale_for(w)
    inverse = 1 / global_scale                   # compressed-tensors stores and multiplies by this
    importance = 1.0 if importance is None else importance.view(-1, SCALE_BLOCK)
    levels = E2M1_SIGNED.to(w.device)
    packed = []
    block_scales = []
    for rows in w.split(max(1, WEIGHTS_AT_A_TIME // K)):
        blocks = rows.unflatten(1, (-1, SCALE_BLOCK))
        usual = e4m3_codes(blocks.abs().amax(-1) / 6, inverse)
        blocks = blocks.float()
        tried = torch.stack([(usual + offset).clamp(1, 126) for offset in offsets])  # > 0, not NaN
        errors = []
        for code in tried:
            scale = (e4m3_value(code) / inverse)[..., None]
            values = levels[e2m1_codes(blocks / scale).int()] * scale
            errors.append(((values - blocks).square() * importance).sum(-1))
        best = torch.stack(errors).argmin(0, keepdim=True)       # the first wins ties
        block_scale = e4m3_value(tried.gather(0, best)[0])
        scale = (block_scale / inverse)[..., None]
        packed.append(pack_pairs(e2m1_codes(blocks / scale).flatten(1)))
        block_scales.append(block_scale.to(torch.float8_e4m3fn))
    return torch.cat(packed), torch.cat(block_scales), global_scale


def e4m3_codes(scale: Tensor, inverse: Tensor) -> Tensor:
    """The int16 E4M3 codes nearest to scale * inverse, where inverse = 1 / global_scale.

    code + 1 stands for the next larger number. A scale of 0 becomes 0.125, so none is 0.
    """
    scale = (scale.float() * inverse).clamp(max=448)              # not every cast saturates
    code = scale.to(torch.float8_e4m3fn).view(torch.uint8).short()
    # Code 0 comes from blocks of zeros, or of weights below about 2^-18 of the matrix's largest. At
    # 0.125 all of them round to 0.
    return code.masked_fill(code == 0, 32)


def e4m3_value(code: Tensor) -> Tensor:
    """The values of E4M3 codes, fp32."""
    return code.byte().view(torch.float8_e4m3fn).float()


def e2m1_codes(x: Tensor) -> Tensor:
    """The uint8 E2M1 codes nearest to x, in units of the scale; |x| above 6 saturates."""
    # The number of edges below |x|. torch.bucketize is one launch on a GPU, but twice as slow on a
    # CPU.
    magnitude = x.abs()
    if x.is_cuda:
        edges = E2M1_EDGES.to(x.device, non_blocking=True)       # else the copy waits for the GPU
        code = torch.bucketize(magnitude, edges, out_int32=True).byte()
    else:
        code = sum((magnitude > edge).to(torch.uint8) for edge in E2M1_EDGES.tolist())
    return code | (x < 0).to(torch.uint8) << 3


def pack_pairs(codes: Tensor) -> Tensor:
    """Two codes per byte, even k in the low nibble: (N, K) uint8 -> (N, K // 2) uint8."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


# -----------------------------------------------------------------------------
# Decoding

# The values of a byte's two codes, fp32 (256, 2).
BYTE_VALUES = torch.cartesian_prod(E2M1_SIGNED, E2M1_SIGNED).flip(1)


def dequantize(packed: Tensor, block_scale: Tensor, global_scale: Tensor,
               dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """W (N, K), multiplied in fp32 and rounded once to `dtype`: exact in bf16 if global_scale is a
    power of two. out: a tensor to write it to, with any row stride.
    """
    N, K = len(packed), 2 * packed.shape[1]
    if out is None:
        out = torch.empty(N, K, dtype=dtype, device=packed.device)
    scale = block_scale.float() * global_scale.reshape(-1, 1)
    pairs = BYTE_VALUES.to(packed.device)
    n = max(1, WEIGHTS_AT_A_TIME // K)           # rows at a time
    for some_bytes, some_scales, some_out in zip(packed.split(n), scale.split(n), out.split(n)):
        values = pairs[some_bytes.int()].view(-1, K // SCALE_BLOCK, SCALE_BLOCK)
        some_out.copy_((values * some_scales[..., None]).flatten(1).to(dtype))
    return out


# -----------------------------------------------------------------------------
# A frozen weight

class Weight:
    """A frozen weight W (N, K), in bf16 or NVFP4; NVFP4 on a GPU is a marlin_fp4.PackedWeight.

    tensors: W alone in bf16, or NVFP4's three. dtype: of the decoded W and of x.
    """

    def __init__(self, tensors: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype):
        self.tensors = tensors
        self.N, self.K = shape
        self.dtype = dtype
        self.device = tensors[0].device
        self.dense = None                        # W decoded, kept on a CPU

    def dequantize(self, out: Tensor | None = None) -> Tensor:
        """W (N, K) in self.dtype, read-only; or written to `out` (any row stride)."""
        if self.device.type != "cpu":
            return self._decode(out)
        if self.dense is None:                   # on a CPU, decoding W takes longer than a matmul
            self.dense = self._decode()
        return self.dense if out is None else out.copy_(self.dense)

    def _decode(self, out=None):
        if len(self.tensors) == 3:
            return dequantize(*self.tensors, self.dtype, out)
        w, = self.tensors
        return w.to(self.dtype) if out is None else out.copy_(w)

    def expands(self, rows: int) -> bool:
        """Whether a decode step of `rows` rows first dequantizes all of W. An NVFP4 Weight always
        does, a PackedWeight only with many rows.
        """
        return self.tensors[0].dtype != self.dtype


def freeze(weights: list[Tensor], base: str, dtype: torch.dtype) -> Weight:
    """Quantizes the matrices (N_i, K) of a fused linear, such as [q, k, v], to one Weight (sum of
    N_i, K) in the format `base`.
    """
    if base == "bf16":
        w = torch.cat(weights).bfloat16()
        return Weight((w,), w.shape, dtype)
    assert base == "nvfp4", base
    # Don't convert to `dtype` first: quantize() rounds the usual scale to the checkpoint's dtype.
    scale = global_scale_for(*weights)
    return fuse([quantize(w, scale) for w in weights], dtype)


def fuse(parts: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype) -> Weight:
    """Concatenates NVFP4 matrices along N into one Weight; on a GPU, a marlin_fp4.PackedWeight.

    parts: for each matrix, the three tensors that quantize() returns. The global scale becomes
    (N,), because another program may have given each matrix its own.
    """
    packed = torch.cat([part[0] for part in parts])
    block_scale = torch.cat([part[1] for part in parts])
    row_scale = torch.cat([part[2].expand(len(part[0])) for part in parts])
    make = on_gpu("pack") if packed.is_cuda else plain_weight
    return make(packed, block_scale, row_scale, dtype)


def plain_weight(packed: Tensor, block_scale: Tensor, row_scale: Tensor,
                 dtype: torch.dtype) -> Weight:
    """A Weight from an NVFP4 matrix (N, K) with a global scale for each row."""
    shape = len(packed), 2 * packed.shape[1]
    return Weight((packed, block_scale, row_scale), shape, dtype)
