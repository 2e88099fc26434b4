"""
Frozen NVFP4 weights on a GPU: their packed layout, and the matmul that decodes it, y = x @ W.T.

Sampling a token reads every weight once. With few rows of x that read is the bottleneck, and at 4.5
bits per weight it is 3.6 times as fast as at 16. Tensor cores can't multiply a 4-bit weight by a
16-bit x, so the kernel decodes each weight to bf16 in registers and feeds those to the tensor
cores. At full memory speed, an H200 can issue about four instructions per weight (docs/kernels.md),
and the layout below makes decoding that cheap.

With many rows of x, multiplying takes longer than reading. Above MAX_DECODE_ROWS rows, W is
expanded to bf16 in memory and cuBLAS multiplies (`expanded_matmul`). The learner and the sampler's
prefills always expand W, with `PackedWeight.dequantize`.

The parts of this file:

    1  the packed layout for x in bf16: tiles, code words, scale words, and one weight by hand
    2  packing a weight, in plain torch
    3  decoding in registers; `dequantize_kernel`, which expands W
    4  the schedule: which program walks which tiles, and where its sums go
    5  the kernel in plain Triton, for every NVIDIA GPU from Ampere (sm_80) on
    6  how that kernel is launched
    7  the same product with W expanded first

fast/hopper_fp4.py has faster versions of parts 5 and 6 for Hopper.

The name and the idea of cutting one weight stream into equal stripes come from Marlin (Frantar et
al. 2024, arXiv 2408.11743, github.com/IST-DASLab/marlin). The order of the bits is our own.

Not here: choosing a weight's code (nvfp4.py), the product with LoRA's B (fast/kernels.py), 4-bit
activations.

Shapes: M rows of x, N out_features, K in_features, R rows of LoRA's A, S slabs, BM rows of x that
one program multiplies.
"""
import itertools
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nvfp4 import SCALE_BLOCK, WEIGHTS_AT_A_TIME, Weight
from ops import mm_fp32


def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability: (9, 0) for an H200 (sm_90), (0, 0) on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


# A tile of W is 128 x 128 weights. Not a setting: the kernels hard-code the numbers that follow
# from it (128, 32, 4096, 256).
TILE_SIDE = 128
# A tile of LoRA's A is 64 x 64 numbers of 16 bits: 8 KiB, like the codes of a tile of W, so either
# fits the same slot in shared memory. The kernels hard-code this 64 too.
A_TILE = 64
# The most rows of x for which a decode step decodes W in registers instead of expanding it. Beyond
# 256 rows, mma.sync, which we use except on Hopper, loses to expanding W (docs/kernels.md).
MAX_DECODE_ROWS_HOPPER = 512
MAX_DECODE_ROWS = 256


# -----------------------------------------------------------------------------
# 1. The packed layout, for x in bf16
#
# A weight is the value of its code times two scales:
#
#     W[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * row_scale[n]
#
# A code has 4 bits, s e e m: a sign, two exponent bits and a mantissa bit. e2m1(code) is 0, .5, 1,
# 1.5, 2, 3, 4 or 6, with that sign. row_scale is NVFP4's global_scale, one number per row, because
# q, k and v (or gate and up), which are fused along n, may have different ones.
#
# Tiles and bands. W is cut into tiles of 128 x 128, padded with zeros at its edges. A "band" is a
# row of tiles along k: 128 rows of W, which give 128 columns of y. Tiles are stored in the order
# numbered here:
#
#               k ->
#          +--------+--------+--------+
#      n   | tile 0 | tile 1 | tile 2 |    band 0
#      |   +--------+--------+--------+
#      v   | tile 3 | tile 4 | tile 5 |    band 1
#          +--------+--------+--------+
#
#     codes    int16 (N/128, K/128, 128, 32)    8 KiB a tile, side by side in memory
#     scales   int32 (N/128, K/128, 128, 2)     1 KiB a tile
#
# Code words. Each row of a tile has 128 weights, cut into four planes of 32, and is stored as 32
# code words of 16 bits. Code word c has code c of each plane:
#
#      k = 0        31 32       63 64       95 96      127
#         +-----------+-----------+-----------+-----------+
#         |  plane 0  |  plane 1  |  plane 2  |  plane 3  |
#         +-----------+-----------+-----------+-----------+
#            k = c      k = 32+c    k = 64+c    k = 96+c        -> codes[..., n, c], 16 bits
#
# So plane p of a row's 32 words is W at 32 neighboring k and multiplies 32 neighboring columns of
# x, without interleaving.
#
# The bits of a code word. The digit after s, e or m is the plane; the left of a plane's two e is
# the higher bit. The mask 0x81C0 keeps a bf16's sign, its two lowest exponent bits and its highest
# mantissa bit; a `.` is a bit that it clears:
#
#     bit            15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
#     a code word    s0 m3 s3 s1 e3 e3 s2 e0 e0 m0 e1 e1 m1 e2 e2 m2
#     a bf16          s  e  e  e  e  e  e  e  e  m  m  m  m  m  m  m
#
#     plane 0        s0  .  .  .  .  .  . e0 e0 m0  .  .  .  .  .  .     word        & 0x81C0
#     plane 1        s1  .  .  .  .  .  . e1 e1 m1  .  .  .  .  .  .     (word << 3) & 0x81C0
#     plane 2        s2  .  .  .  .  .  . e2 e2 m2  .  .  .  .  .  .     (word << 6) & 0x81C0
#
# The result, read as a bf16, is e2m1(code) * 2^-126: an exponent field of 1 means 2^-126 in bf16
# and 1 in E2M1. An exponent field of 0 is subnormal in both formats, so 0.5, E2M1's only subnormal,
# becomes 2^-127.
#
# Plane 3 gets the leftover bits, and one multiplication puts all four in place. Let t be plane 3's
# bits of the word, shifted down by 8. Then t * 1057 = t * (1 + 2^5 + 2^10) is three copies of t,
# and the mask keeps different bits of each:
#
#     bit                         16 15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
#     t = (word & 0x6C00) >> 8                                  m3 s3  . e3 e3  .  .
#     t << 5                                     m3 s3  . e3 e3
#     t << 10                     m3 s3  . e3 e3
#     t * 1057 & 0x81C0              s3  .  .  .  .  .  . e3 e3 m3  .  .  .  .  .  .
#
# The copies don't overlap, so the sum has no carries.
#
# Two words at once. A register has 32 bits, so one instruction decodes two neighboring words:
#
#     bit        31         16 15          0
#               |  word c + 1 |   word c    |     c even
#
# Both get the same mask (0x81C081C0), which drops the bits that overflow from word c into bits 0 to
# 5 of word c + 1. The right shift moves bits 10 and up by 8, so they stay in their word.
#
# Scales. A block_scale v > 0, an E4M3 number, becomes a byte u of 5 exponent and 3 mantissa bits,
#
#     u = ((floor(log2 v) + 10) << 3) | mantissa
#
# which represents every E4M3 value, even subnormals, as a normal number. Then 0x7000 | (u << 4) is
# the bf16 v * 2^107: its exponent field is 224 + floor(log2 v) + 10, and bf16's bias is 127. A
# scale of 0 gets the byte 0, which would decode to 2^97, so `pack` sets all codes under it to 0.
#
# Scale words. Plane p of a row has two scale_blocks: block 0 is k = 32 p + [0, 16), block 1 is
# k = 32 p + [16, 32). So a row of a tile has two scale words of 32 bits: word h has the bytes u0 to
# u3 of block h of planes 0 to 3. One AND and one OR decode two scales if each half of a register
# has a byte as u << 4, in bits 4 to 11. The four bytes are therefore stored rotated left by 4,
# which puts u0 and u1 in place; rotating by 8 more does the same for u2 and u3:
#
#     bit           31    24 23    16 15     8 7      0
#     four bytes   |   u2   |   u1   |   u3   |   u0   |
#
#     bit           31    28 27        20 19        12 11         4 3     0
#     stored       | low u2 |     u1     |     u3     |     u0     | high u2 |
#                  | high half of the register | low half of it              |
#
#     AND 0x0FF00FF0, OR 0x70007000                high half: scale of plane 1, low half: plane 0
#     rotated left by 8, then the same             high half: scale of plane 3, low half: plane 2
#
# AND and OR together are one instruction, the rotation is another.
#
# A code times its scale. e2m1(code) * 2^-126 times v * 2^107 is e2m1(code) * v * 2^-19. It has at
# most 6 significant bits, 2 from the code and 4 from the scale, so it is exact in bf16. The kernels
# sum x * e2m1(code) * v * 2^-19, and the kernel that adds up their sums multiplies by `out_scale` =
# row_scale * 2^19.
#
# One weight worked out by hand. Code 5 = 0b0101 has s = 0, e = 2 and m = 1 and means 3. It is in
# plane 3, with a scale of 1.5; the other codes in its word and scales in its scale word are 0:
#
#     code word                0x4800        m3 (bit 14) and the higher e3 (bit 11)
#     t                        0x48
#     t * 1057                 0x12948
#     t * 1057 & 0x81C0        0x0140        as bf16: 3 * 2^-126
#     u of the scale           0x54          (0 + 10) << 3 | 4, since 1.5 = 2^0 * (1 + 4/8)
#     four bytes               0x00005400
#     stored scale word        0x00054000    rotated left by 4
#     rotated by 8             0x05400000
#     after AND and OR         0x75407000    the high half, 0x7540, as bf16: 1.5 * 2^107
#     code times scale         0x3710        as bf16: 4.5 * 2^-19
#     times out_scale          4.5 * row_scale

# (take, shift, times) of each plane: a decoded code is ((word & take) << shift) * times, masked. A
# negative shift goes to the right.
PLANES = (0xFFFF, 0, 1), (0xFFFF, 3, 1), (0xFFFF, 6, 1), (0x6C00, -8, 1057)
MANTISSA_BIT = 6                    # m in a decoded code; both e are above it, s is bit 15
ROTATION = 4                        # of a scale word, to the left
EXPONENT_BIAS = 10                  # added to floor(log2 v) in a scale's byte
SCALE_BASE = 0x7000                 # bits that are set in every decoded scale
POWER = 19                          # a decoded code times its decoded scale is code * v * 2^-POWER


# -----------------------------------------------------------------------------
# 2. Packing. Plain torch, on any device.

def _unpack_words(words):
    """(..., C) int16 words -> (..., 4 C) codes 0..15 as int32, plane after plane."""
    # The kernels' arithmetic, except that they shift right first, which gives the same bits.
    words = words.to(torch.int32) & 0xFFFF
    codes = []
    for take, shift, times in PLANES:
        number = ((words & take) * times * 2**max(shift, 0)) >> max(-shift, 0)
        codes.append(((number >> 12) & 8) | ((number >> MANTISSA_BIT) & 7))
    return torch.cat(codes, dim=-1)


@cache
def _word_table(device):
    """int16 (65536,): the word of four codes, at index c0 | c1 << 4 | c2 << 8 | c3 << 12."""
    # Made by unpacking all 65,536 words, so packing can't disagree with unpacking.
    words = torch.arange(65536, device=device)
    c0, c1, c2, c3 = _unpack_words(words[:, None]).unbind(-1)
    table = torch.empty(65536, dtype=torch.int16, device=device)
    table[c0 | c1 << 4 | c2 << 8 | c3 << 12] = words.to(torch.int16)
    return table


def _pack_words(codes):
    """The inverse of _unpack_words for rows of a tile: codes (..., 128) -> words (..., 32)."""
    c0, c1, c2, c3 = codes.to(torch.int32).unflatten(-1, (4, 32)).unbind(-2)
    return _word_table(codes.device)[c0 | c1 << 4 | c2 << 8 | c3 << 12]


def _pack_scales(scale):
    """Scale words of rows of a tile: (..., 8) E4M3 values >= 0 in fp32, along k -> (..., 2) int32.
    """
    mantissa, exponent = torch.frexp(scale)  # v = mantissa * 2^exponent with mantissa in [0.5, 1)
    u = ((exponent.long() - 1 + EXPONENT_BIAS) << 3) | ((mantissa * 16).long() & 7)
    u0, u1, u2, u3 = torch.where(scale > 0, u, 0).unflatten(-1, (4, 2)).unbind(-2)
    word = u0 | u3 << 8 | u1 << 16 | u2 << 24  # (..., 2) int64: torch shifts no unsigned 32 bits
    word = ((word << ROTATION) & 0xFFFFFFFF) | (word >> (32 - ROTATION))
    return (word - ((word >> 31) << 32)).to(torch.int32)  # the same 32 bits as a signed number


def _cut_into_tiles(t, columns):
    """(N, C) -> contiguous (N/128, C/columns, 128, columns), padded with zeros to whole tiles."""
    t = torch.nn.functional.pad(t, (0, -t.shape[1] % columns, 0, -t.shape[0] % TILE_SIDE))
    return t.unflatten(0, (-1, TILE_SIDE)).unflatten(2, (-1, columns)).transpose(1, 2).contiguous()


class PackedWeight(Weight):
    """A frozen NVFP4 weight (N, K) in the layout above, for x in bf16, made by `pack`. The fast
    twin of nvfp4.Weight.
    """

    def __init__(self, N: int, K: int, codes: torch.Tensor, scales: torch.Tensor,
                 row_scale: torch.Tensor):
        super().__init__((codes, scales, row_scale), (N, K), torch.bfloat16)
        self.codes = codes          # int16 (N/128, K/128, 128, 32)
        self.scales = scales        # int32 (N/128, K/128, 128, 2)
        self.row_scale = row_scale  # fp32 (N,)
        self.out_scale = row_scale * 2**POWER  # fp32 (N,), for the kernels' sums: undoes 2^-POWER
        # If all are powers of two, dequantize() may multiply by out_scale in bf16.
        self.exact = bool((torch.frexp(self.out_scale).mantissa == 0.5).all())

    def dequantize(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """W (N, K) in bf16, or in `out` (fp32 or bf16, any row stride).

        Each weight is e2m1(code) * block_scale * row_scale in fp32, rounded once; exact in bf16 if
        row_scale is a power of two.
        """
        if out is None:
            out = torch.empty(self.N, self.K, dtype=self.dtype, device=self.device)
        assert out.shape == (self.N, self.K) and out.stride(1) == 1, (out.shape, out.stride())
        dequantize_kernel[self.codes.shape[1], self.codes.shape[0]](
            self.codes, self.scales, self.out_scale, out, self.N, self.K, out.stride(0),
            EXACT=self.exact and out.dtype == self.dtype, num_warps=8)
        return out

    def expands(self, rows: int) -> bool:
        """Whether a decode step of `rows` rows uses expanded_matmul."""
        hopper = capability(self.device)[0] == 9
        return rows > (MAX_DECODE_ROWS_HOPPER if hopper else MAX_DECODE_ROWS)


def pack(packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor,
         dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """Packs the three tensors of nvfp4.quantize: packed uint8 (N, K // 2), block_scale E4M3
    (N, K // 16), global_scale fp32 () or (N,). dtype: of x, always bf16. AssertionError if a type,
    a shape or a scale does not fit.
    """
    N, K = packed.shape[0], packed.shape[1] * 2
    assert dtype == torch.bfloat16, f"dtype must be bf16, got {dtype}"
    assert K % SCALE_BLOCK == 0, (
        f"{K=} must be a multiple of {SCALE_BLOCK}, the weights per scale ({N=})")
    dtypes = packed.dtype, block_scale.dtype, global_scale.dtype
    assert dtypes == (torch.uint8, torch.float8_e4m3fn, torch.float32), dtypes
    assert block_scale.shape == (N, K // SCALE_BLOCK), (
        f"block_scale is {tuple(block_scale.shape)}, not {(N, K // SCALE_BLOCK)}")
    scale = block_scale.float()
    bad = scale[~(scale >= 0)]  # finds NaN too
    assert not len(bad), f"block scales must be >= 0 and finite, got {bad[0]}"
    row_scale = global_scale.to(packed.device).reshape(-1).expand(N).contiguous()
    limit = 2.0**(128 - POWER)  # here out_scale would become inf
    bad = row_scale[~((row_scale > 0) & (row_scale < limit))]
    assert not len(bad), f"global_scale must be above 0 and below {limit:g}, got {bad[0]}"

    scale = _cut_into_tiles(scale, TILE_SIDE // SCALE_BLOCK)  # 0 in the padding
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    words = torch.empty(*scale.shape[:3], TILE_SIDE // 4, dtype=torch.int16, device=packed.device)
    # Some bands at a time, because the codes become int32 on the way, 8 times `packed`'s bytes.
    n = max(1, WEIGHTS_AT_A_TIME // (TILE_SIDE * K))
    rows = codes.split(n * TILE_SIDE)
    for some_rows, some_scales, some_words in zip(rows, scale.split(n), words.split(n)):
        bands = _cut_into_tiles(some_rows, TILE_SIDE)
        # A scale of 0 decodes to 2^97 (see part 1), so the codes under it must be 0.
        under_zero = (some_scales == 0).repeat_interleave(SCALE_BLOCK, dim=-1)
        some_words.copy_(_pack_words(bands.masked_fill(under_zero, 0)))
    return PackedWeight(N, K, words, _pack_scales(scale), row_scale)


# -----------------------------------------------------------------------------
# 3. Decoding in registers
#
# Part 1's arithmetic is in PTX, NVIDIA's assembly, so that one instruction works on two code words;
# the compiler would spend one on each.
#
# Triton's inline assembly numbers the results first, then the argument. For planes 2 and 3, the
# first function below generates this, with two code words in $2:
#
#     { .reg .b32 t;
#     shl.b32 t, $2, 0x6;
#     and.b32 $0, t, 0x81c081c0;
#     and.b32 t, $2, 0x6c006c00;
#     shr.u32 t, t, 0x8;
#     mul.lo.u32 t, t, 0x421;
#     and.b32 $1, t, 0x81c081c0; }
#
# That's 6 instructions for 4 weights; planes 0 and 1 take 3. A scale word takes 3 for 4 scales of
# 16 weights each.

@triton.constexpr_function
def _decode_planes_asm(first_plane):
    """PTX: two code words in register $2 -> plane `first_plane` of both in $0, the next in $1."""
    mask = (0x8000 | 7 << MANTISSA_BIT) * 0x10001  # times 0x10001: the same for both words
    lines = []
    for i in range(2):
        take, shift, times = PLANES[first_plane + i]
        word = "$2"
        # (operation, operand, the operand with which it does nothing and is left out)
        operations = (("and.b32", take * 0x10001, 0xFFFFFFFF), ("shl.b32", max(shift, 0), 0),
                      ("shr.u32", max(-shift, 0), 0), ("mul.lo.u32", times, 1))
        for op, operand, changes_nothing in operations:
            if operand != changes_nothing:
                lines.append(f"{op} t, {word}, {operand:#x};")
                word = "t"
        lines.append(f"and.b32 ${i}, {word}, {mask:#x};")
    return "{ .reg .b32 t;\n" + "\n".join(lines) + " }"


@triton.constexpr_function
def _decode_scales_asm():
    """PTX: a scale word in register $4 -> the scales of planes 0, 1, 2, 3 in $0, $1, $2, $3."""
    # lop3 with the table 0xEA is (a & b) | c. The movs only name halves of a register, at no cost.
    take_and_or = f"{(0xFF << ROTATION) * 0x10001:#x}, {SCALE_BASE * 0x10001:#x}, 0xEA"
    return f"""{{ .reg .b32 t;
        lop3.b32 t, $4, {take_and_or};
        mov.b32 {{$0, $1}}, t;
        shf.l.wrap.b32 t, $4, $4, 8;
        lop3.b32 t, t, {take_and_or};
        mov.b32 {{$2, $3}}, t; }}"""


# In the strings below "r" is a 32-bit register, "h" a 16-bit one, and "=" marks a result. "=&r" is
# written while the argument is still needed, so it gets its own register. pack=2 puts two
# neighboring words into one register.

@triton.jit
def decode_planes(words, first_plane: tl.constexpr, dtype: tl.constexpr):
    """int16 code words -> planes `first_plane` (0 or 2) and the next, each shaped like `words`."""
    return tl.inline_asm_elementwise(_decode_planes_asm(first_plane), "=&r,=r,r", [words],
                                     dtype=(dtype.value, dtype.value), is_pure=True, pack=2)


@triton.jit
def decode_scales(word, dtype: tl.constexpr):
    """int32 scale words -> the scales of planes 0 to 3, each shaped like `word`."""
    return tl.inline_asm_elementwise(_decode_scales_asm(), "=h,=h,=h,=h,r", [word],
                                     dtype=(dtype.value,) * 4, is_pure=True, pack=1)


@triton.jit
def spread_scales(scale):
    """(128, 2) scales of a plane -> (128, 32), one per code."""
    return tl.broadcast_to(scale[:, :, None], (128, 2, 16)).reshape(128, 32)


@triton.jit
def side_by_side(a, b):
    """(128, C) and (128, C) -> (128, 2 C). Renames registers; moves nothing."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def dequantize_kernel(
    codes_ptr,         # int16 (N/128, K/128, 128, 32)
    scales_ptr,        # int32 (N/128, K/128, 128, 2)
    out_scale_ptr,     # fp32  (N,)
    out_ptr,           # bf16 or fp32 (N, K), its row stride is out_stride
    N, K, out_stride,
    EXACT: tl.constexpr,  # PackedWeight.exact: multiply by out_scale in bf16, else in fp32
):
    """Expands W, one tile per program."""
    dtype: tl.constexpr = tl.bfloat16
    tile_k = tl.program_id(0)
    tile_n = tl.program_id(1)
    tile = (tile_n * tl.num_programs(0) + tile_k).to(tl.int64)
    i = tl.arange(0, 128)
    k = tile_k * 128 + i
    n = tile_n * 128 + i
    words = tl.load(codes_ptr + tile * 4096 + i[:, None] * 32 + tl.arange(0, 32)[None, :])
    word = tl.load(scales_ptr + tile * 256 + i[:, None] * 2 + tl.arange(0, 2)[None, :])
    w0, w1 = decode_planes(words, 0, dtype)
    w2, w3 = decode_planes(words, 2, dtype)
    s0, s1, s2, s3 = decode_scales(word, dtype)
    # Side by side, so that a row is one store of 256 bytes instead of four of 64.
    front = side_by_side(w0 * spread_scales(s0), w1 * spread_scales(s1))
    back = side_by_side(w2 * spread_scales(s2), w3 * spread_scales(s3))
    value = side_by_side(front, back)
    if not EXACT:
        value = value.to(tl.float32)
    value *= tl.load(out_scale_ptr + n, mask=n < N, other=0.0).to(value.dtype)[:, None]
    out = out_ptr + n[:, None].to(tl.int64) * out_stride + k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


# -----------------------------------------------------------------------------
# 4. The schedule of the weight stream
#
# In memory order, along k and then band by band, W's tiles form one stream. It is cut into stripes
# of equal length, one per program (stream-K; Marlin's stripes), so all programs have the same work
# whatever N and K are; only the last stripe may be shorter. `plan_stripes` picks the shortest
# stripe whose programs all fit on the GPU at once, so that they start and end together.
#
# A stripe may begin and end inside a band. Here W has 3 bands of 5 tiles and a stripe has 3 tiles;
# each digit is the program that walks the tile:
#
#               k ->
#     band 0    0  0  0 | 1  1
#     band 1    1 | 2  2  2 | 3
#     band 2    3  3 | 4  4  4
#
# At the end of a band, or of its stripe, a program stores its sums: a "piece" of that band's 128
# columns of y. A band's pieces are numbered from 0 in program order, and piece p goes into slab p,
# where a "slab" is a full (M, N + R) matrix. For the W above, each digit is the program that stores
# the piece:
#
#                columns of
#                band 0    band 1    band 2    LoRA's A (N .. N + R)
#     slab 0     0         1         3         A0
#     slab 1     1         2         4         A1
#     slab 2     -         3         -         A2
#
# The next kernel, which reads y, adds up the slabs. `w_pieces` tells it how many have a piece of a
# column, and it adds those in order, so every run gives the same bits (atomic adds wouldn't). Slabs
# are never zeroed: a "-" may contain anything, even NaN.
#
# LoRA's A rides along: columns N .. N + R of the slabs are x @ A.T. The first programs of the grid
# do nothing else; A0 to A2 above each walk a part of K for up to 64 rows of A. If x has more than
# BM rows, axis 1 of the grid repeats all of this for the next BM rows:
#
#                  axis 0 ->
#     rows 0 .. BM         A0  A1  A2   0   1   2   3   4
#     rows BM .. 2 BM      A0  A1  A2   0   1   2   3   4
#
# A program of A walks as many tiles of K as a stripe has, but at most one part of K (parts_of_k).
# Without this limit, a stripe longer than a band would leave all of K to one program, which would
# finish last.

def parts_of_k(M: int) -> int:
    """The minimum number of parts into which x @ A.T's programs cut K, with M rows of x."""
    # Above 32 rows products are the bottleneck, and a tile of A costs half a tile of W. Two parts
    # also match the two slabs of most of W's columns; four would double the loop that adds them.
    return 4 if M <= 32 else 2


@triton.jit
def w_pieces(column, k_tiles, stripe):
    """How many slabs have a piece of this column of x @ W.T."""
    first_tile = column // 128 * k_tiles
    return (first_tile + k_tiles - 1) // stripe - first_tile // stripe + 1


class StripePlan(NamedTuple):
    """How one launch cuts up x @ [W; A].T."""
    k_tiles: int            # tiles in a band
    stripe: int             # consecutive tiles that one program walks
    a_stripe: int           # tiles of K that a program of x @ A.T walks
    a_programs: int         # programs that do x @ A.T; those of W come after them
    programs: int           # all of them: axis 0 of the grid
    slabs: int              # S: the most pieces of any column of this W, or of A

    def result(self, sums: torch.Tensor, weight: PackedWeight) -> "MatmulSlabs":
        """The result of a decode matmul with this plan."""
        a_pieces = triton.cdiv(self.k_tiles, self.a_stripe)
        return MatmulSlabs(sums, weight.out_scale, self.k_tiles, self.stripe, a_pieces)


@cache
def plan_stripes(N: int, K: int, M: int, R: int, config: tuple, multiprocessors: int) -> StripePlan:
    """The plan with the shortest stripe whose programs all fit on the GPU at once, in one wave.
    More waves are allowed if A's programs would take over half of it (a large R on a small GPU).

    config: a PortableConfig or a HopperConfig.
    """
    k_tiles = triton.cdiv(K, TILE_SIDE)
    bands = triton.cdiv(N, TILE_SIDE)
    tiles = bands * k_tiles

    def programs(stripe: int) -> tuple[int, int, int, int]:
        """-> A's stripe, the number of pieces it cuts A into, A's programs, W's programs."""
        a_stripe = min(stripe, triton.cdiv(k_tiles, parts_of_k(M)))
        pieces_of_a = triton.cdiv(k_tiles, a_stripe) if R else 0
        return (a_stripe, pieces_of_a, triton.cdiv(R, A_TILE) * pieces_of_a,
                triton.cdiv(tiles, stripe))

    # Every BM rows of x take a full set of programs, axis 0 of the grid.
    places = max(1, multiprocessors * config.programs_per_sm // triton.cdiv(M, config.BM))
    for waves in itertools.count(1):
        fit = waves * places
        stripe = next((stripe for stripe in range(max(1, tiles // fit), tiles)
                       if sum(programs(stripe)[2:]) <= fit), tiles)
        a_stripe, pieces_of_a, a_programs, w_programs = programs(stripe)
        if 2 * w_programs >= min(places, tiles):
            break
    # w_pieces.fn is the Python function under @triton.jit.
    pieces_of_w = max(w_pieces.fn(band * TILE_SIDE, k_tiles, stripe) for band in range(bands))
    slabs = max(pieces_of_w, pieces_of_a)
    return StripePlan(k_tiles, stripe, a_stripe, a_programs, a_programs + w_programs, slabs)


class MatmulSlabs(NamedTuple):
    """The result of a decode matmul: partial sums that the next kernel adds up as it reads them.

        (x @ W.T)[:, n] = scale[n] * sums[:w_pieces(n, k_tiles, stripe), :, n].sum(0)
        x @ A.T         = sums[:a_pieces, :, N:N + R].sum(0)
    """
    sums: torch.Tensor      # fp32 (S, M, at least N + R)
    scale: torch.Tensor     # fp32 (N,)
    k_tiles: int            # this and `stripe` as in StripePlan
    stripe: int
    a_pieces: int           # slabs that have a piece of x @ A.T


# -----------------------------------------------------------------------------
# 5. The kernel, in plain Triton
#
# A tensor core multiplies at least 16 rows of its first operand by at least 8 columns of its
# second. W is the first and x.T the second, so sums are transposed: 128 columns of y by BM rows of
# x. A single row of x wastes 7 of 8 columns; the other way round it would waste 15 of 16 rows.
#
# The warps divide up a tile's 128 rows. To Triton that's a batch of products (batch > 1): each warp
# multiplies its own rows by all of x, so no weight is decoded twice, and the product is mma.sync,
# which all GPUs have. On Hopper, from 17 rows of x up, all warps do one product (batch 1), which
# Triton turns into a wgmma. That's faster, since it reads x straight from shared memory.

class MatmulInputs(NamedTuple):
    """The inputs of portable_kernel."""
    x: tl.tensor            # bf16 (M, K)
    x_stride: tl.tensor     # from one of its rows to the next
    codes: tl.tensor        # int16 (N/128, K/128, 128, 32)
    scales: tl.tensor       # int32 (N/128, K/128, 128, 2)
    a: tl.tensor            # bf16 (R, K), LoRA's A; never read if R is 0
    N: tl.tensor
    K: tl.tensor
    R: tl.tensor


@triton.jit
def load_rows(ptr, stride, row, rows, k, K, WHOLE_K: tl.constexpr):
    """Rows `row` and columns `k` of a matrix (rows, K). Both may run past its end, but `k` only if
    WHOLE_K is False.
    """
    # A row past the end reads the last row instead, which needs no mask, and its result is never
    # stored. A column past the end reads zeros, because it is summed.
    at = ptr + tl.minimum(row, rows - 1)[:, None] * stride + k[None, :]
    if WHOLE_K:
        return tl.load(at)
    return tl.load(at, mask=(k < K)[None, :], other=0.0)


@triton.constexpr_function
def sum_shape(n, BM, BATCH):
    """Shape of n rows of W or A times BM rows of x, cut into BATCH products."""
    return (BATCH, n // BATCH, BM) if BATCH > 1 else (n, BM)


@triton.jit
def add_product(acc, w, x):
    """acc (of sum_shape) + w (n, k) @ x (BM, k).T."""
    if len(acc.shape) == 3:
        batch: tl.constexpr = acc.shape[0]
        w = tl.reshape(w, (batch, w.shape[0] // batch, w.shape[1]))
        xt = tl.broadcast_to(tl.permute(x, (1, 0))[None], (batch, x.shape[1], x.shape[0]))
        acc = tl.dot(w, xt, acc)
    else:
        acc = tl.dot(w, tl.permute(x, (1, 0)), acc)
        # A trap: wgmma is asynchronous. Without this "mov", which waits for the sum, the compiler
        # may decode the next plane into w's registers before they've been read.
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32,
                                        is_pure=False, pack=1)
    return acc


@triton.jit
def store_piece(acc, out_ptr, width, n, columns, m, M):
    """acc (of sum_shape) -> out[m, n], where m and n are below M and `columns`."""
    acc = tl.reshape(acc, (n.shape[0], m.shape[0]))
    mask = (m < M)[None, :] & (n < columns)[:, None]
    tl.store(out_ptr + m[None, :] * width + n[:, None], acc, mask=mask)


@triton.jit(do_not_specialize=["M", "k_tiles", "stripe", "a_stripe", "a_programs"])
def portable_kernel(
    inputs: MatmulInputs,
    slabs_ptr,         # fp32 (S, M, width)     columns N .. N + R are x @ A.T
    M, width,
    k_tiles, stripe, a_stripe, a_programs,  # of the StripePlan
    config: tl.constexpr,   # PortableConfig
    WHOLE_K: tl.constexpr,  # K is a multiple of 128
    PDL: tl.constexpr,      # a programmatic dependent launch, see fast/kernels.py
):
    """x @ [W; A].T as pieces in slabs. Axis 0 of the grid: programs; axis 1: BM rows of x each."""
    BM: tl.constexpr = config.BM
    STAGES: tl.constexpr = config.num_stages
    BATCH: tl.constexpr = config.batch
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    pid = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    slab = M.to(tl.int64) * width  # elements of a slab
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # A program of x @ A.T: 64 rows of A, along a_stripe tiles of K. It counts in half tiles, since
    # a tile of A is half as wide as one of W.
    if pid < a_programs:
        pieces = tl.cdiv(k_tiles, a_stripe)
        piece = pid % pieces
        r = pid // pieces * 64 + tl.arange(0, 64)
        k = tl.arange(0, 64)
        end = tl.minimum(piece * a_stripe + a_stripe, k_tiles)
        acc = tl.zeros(sum_shape(64, BM, BATCH), tl.float32)
        for half_tile in tl.range(2 * piece * a_stripe, 2 * end, num_stages=STAGES):
            a = load_rows(inputs.a, inputs.K, r, inputs.R, half_tile * 64 + k, inputs.K, WHOLE_K)
            x = load_rows(inputs.x, inputs.x_stride, m, M, half_tile * 64 + k, inputs.K, WHOLE_K)
            acc = add_product(acc, a, x)
        store_piece(acc, slabs_ptr + piece * slab + inputs.N, width, r, inputs.R, m, M)
        return

    # A program of x @ W.T: its stripe, band by band.
    pid -= a_programs
    n = tl.arange(0, 128)
    c = tl.arange(0, 32)
    h = tl.arange(0, 2)
    tile = pid * stripe
    stripe_end = tl.minimum(tile + stripe, tl.cdiv(inputs.N, 128) * k_tiles)
    while tile < stripe_end:
        band = tile // k_tiles
        end = tl.minimum(stripe_end, band * k_tiles + k_tiles)  # where the stripe leaves the band
        band_start = (band * k_tiles).to(tl.int64)
        codes = inputs.codes + band_start * 4096 + n[:, None] * 32 + c[None, :]
        scales = inputs.scales + band_start * 256 + n[:, None] * 2 + h[None, :]
        acc = tl.zeros(sum_shape(128, BM, BATCH), tl.float32)
        for kt in tl.range(tile - band * k_tiles, end - band * k_tiles, num_stages=STAGES):
            words = tl.load(codes + kt * 4096)
            w0, w1 = decode_planes(words, 0, dtype)
            w2, w3 = decode_planes(words, 2, dtype)
            planes = (w0, w1, w2, w3)
            plane_scales = decode_scales(tl.load(scales + kt * 256), dtype)
            k = kt * 128 + c
            xs = ()
            for p in tl.static_range(4):
                xs += (load_rows(inputs.x, inputs.x_stride, m, M, k + 32 * p, inputs.K, WHOLE_K),)
            for p in tl.static_range(4):
                acc = add_product(acc, planes[p] * spread_scales(plane_scales[p]), xs[p])
        piece = pid - (band * k_tiles) // stripe  # counted from the band's first program
        store_piece(acc, slabs_ptr + piece * slab, width, band * 128 + n, inputs.N, m, M)
        tile = end


# -----------------------------------------------------------------------------
# 6. How that kernel is launched

class PortableConfig(NamedTuple):
    """How portable_kernel is launched for some number of rows of x."""
    BM: int                 # rows of x that one program multiplies
    num_stages: int         # tiles of W in shared memory: the one in use and those being loaded
    programs_per_sm: int    # programs that fit on a multiprocessor at once
    num_warps: int
    batch: int              # products that a tile is cut into: one per warp, or 1


# Maximum rows of x -> the fastest config on an H200: BM, num_stages, programs_per_sm, num_warps,
# batch.
PORTABLE_CONFIGS = {  # by mma.sync
    8: PortableConfig(8, 3, 4, 4, 4),
    16: PortableConfig(16, 3, 4, 4, 4),
    32: PortableConfig(32, 3, 4, 2, 2),  # two warps read x half as often as four do
    256: PortableConfig(64, 3, 2, 4, 4),  # two warps would have too few registers
}
CONFIGS_99_KIB = {  # consumer cards: fewer stages fit in 99 KiB of shared memory
    8: PortableConfig(8, 3, 4, 4, 4),
    16: PortableConfig(16, 3, 3, 4, 4),
    32: PortableConfig(32, 2, 4, 2, 2),
    256: PortableConfig(64, 2, 2, 4, 4),
}
CONFIGS_WGMMA = {  # on Hopper
    8: PORTABLE_CONFIGS[8],
    16: PORTABLE_CONFIGS[16],
    32: PortableConfig(32, 3, 3, 4, 1),  # Triton 3.6 has too few registers for a fourth program
    256: PortableConfig(64, 3, 2, 4, 1),
}


def shared_memory_kib(sm: tuple[int, int]) -> int:
    """KiB of shared memory that one program may use on a GPU of compute capability `sm`."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(sm, 99)


def portable_config(M: int, sm: tuple[int, int]) -> PortableConfig:
    """The config for M rows of x on a GPU of compute capability `sm`."""
    if shared_memory_kib(sm) <= 99:
        configs = CONFIGS_99_KIB
    elif sm[0] == 9:
        configs = CONFIGS_WGMMA
    else:
        configs = PORTABLE_CONFIGS
    return next((config for rows, config in configs.items() if M <= rows), configs[256])


@cache
def multiprocessors_on(device: torch.device) -> int:
    """How many multiprocessors a GPU has; on a CPU, an H200's 132, for tests that compile."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_operands(x, weight, lora_a):
    """AssertionError if x, W and A don't fit together."""
    K = x.shape[1]
    assert x.dtype == weight.dtype, f"the weight is for x in {weight.dtype}, got {x.dtype}"
    assert x.device == weight.device, f"x is on {x.device}, the weight on {weight.device}"
    assert K == weight.K, f"x has {K=}, the weight N={weight.N}, K={weight.K}"
    if lora_a is not None:
        assert lora_a.dtype == x.dtype and lora_a.shape[1] == K, (lora_a.dtype, lora_a.shape, K)


def prepare_launch(
        x: torch.Tensor, weight: PackedWeight, lora_a: torch.Tensor | None,
        config: tuple) -> tuple[int, StripePlan, torch.Tensor]:
    """Checks the operands of a decode matmul -> R, its StripePlan, its slabs."""
    _check_operands(x, weight, lora_a)
    M, K = x.shape
    R = 0
    assert x.stride(1) == 1 and x.stride(0) % 8 == 0, f"x needs strides (8 n, 1), got {x.stride()}"
    if lora_a is not None:
        assert lora_a.is_contiguous(), lora_a.stride()
        R = len(lora_a)
    plan = plan_stripes(weight.N, K, M, R, config, multiprocessors_on(weight.device))
    # Rows are a multiple of 16 bytes, as Hopper's copy engine requires.
    shape = plan.slabs, M, triton.cdiv(weight.N + R, 4) * 4
    return R, plan, torch.empty(shape, device=x.device)


def portable_matmul(x: torch.Tensor, weight: PackedWeight, lora_a: torch.Tensor | None = None,
                    pdl: bool = False) -> MatmulSlabs:
    """x (M, K) @ [W; lora_a].T, as partial sums in slabs (S, M, N + R rounded up to 4).

    x and lora_a (R, K) are in bf16. A row's bits depend on M, which determines BM and the stripe,
    but not on the other rows. pdl (sm_90 and later): a programmatic dependent launch, see
    fast/kernels.py; nothing is read before the previous kernel has ended. AssertionError if the
    operands don't fit.
    """
    M, K = x.shape
    config = portable_config(M, capability(weight.device))
    R, plan, slabs = prepare_launch(x, weight, lora_a, config)
    a = lora_a if R else x  # without an adapter any pointer will do: nothing is read from it
    inputs = MatmulInputs(x, x.stride(0), weight.codes, weight.scales, a, weight.N, K, R)
    portable_kernel[plan.programs, triton.cdiv(M, config.BM)](
        inputs, slabs, M, slabs.shape[2], plan.k_tiles, plan.stripe, plan.a_stripe, plan.a_programs,
        config, K % TILE_SIDE == 0, pdl, num_warps=config.num_warps, launch_pdl=pdl)
    return plan.result(slabs, weight)


# -----------------------------------------------------------------------------
# 7. The same product with W expanded first

@cache
def unit_scale(n: int, device: torch.device) -> torch.Tensor:
    """n ones: the `scale` for a W that was expanded together with its scales."""
    # Cached, or every replay of a CUDA graph would fill them in again.
    return torch.ones(n, device=device)


def expanded_matmul(x: torch.Tensor, weight: Weight,
                    lora_a: torch.Tensor | None = None) -> MatmulSlabs:
    """portable_matmul with W expanded first, for many rows or a W in bf16. One slab, S = 1."""
    _check_operands(x, weight, lora_a)
    N = weight.N
    R = 0 if lora_a is None else len(lora_a)
    slabs = torch.empty(1, len(x), N + R, device=x.device)
    mm_fp32(x, weight.dequantize().T, out=slabs[0, :, :N])
    if R:
        mm_fp32(x, lora_a.T, out=slabs[0, :, N:])
    # As if K were one tile wide and a stripe one tile long: every column has one piece.
    return MatmulSlabs(slabs, unit_scale(N, x.device), k_tiles=1, stripe=1, a_pieces=1)
