"""
The packed form of a frozen NVFP4 weight, and the matmul that decodes it: y = x @ W.T.

Why: writing one token means reading every weight once, and reading is what takes the time. A weight
of 4.5 bits is read 3.6 times as fast as one of 16. No tensor core multiplies a 4-bit weight by a
16-bit x, so the kernel expands W to 16 bits in registers, on its way to them. That must cost next
to nothing: in the time in which an H200 reads one weight (at 4 TB/s) all its lanes together issue
4.4 instructions. The layout in this file exists to spend 2.5 of them.

From a few hundred rows of x on the products take longer than the reading. Then W is expanded in
memory first, and cuBLAS multiplies (`expanded_matmul`).

    1  the packed layout: a tile, a word of codes, a word of scales       for x in bf16
    2  the same two words                                                for x in fp16
    3  packing, in plain torch
    4  decoding in registers; `dequantize_kernel`, which expands W
    5  the schedule: which program walks which tiles, and where its sums go
    6  the kernel in plain Triton, for every NVIDIA GPU from Ampere (sm_80) on
    7  its launch
    8  the same product of a W that is expanded first

fast/hopper_fp4.py is part 6 again for Hopper alone, 1.05 to 1.3 times as fast; read it after this.

The name and the idea of one weight stream cut into equal stripes are Marlin's (Frantar et al. 2024,
arXiv 2408.11743, github.com/IST-DASLab/marlin). The order of bits is this project's own.

Not here: which codes stand for a weight (nvfp4.py), the product with LoRA's B (fast/kernels.py),
4-bit activations.

Shapes: M rows of x, N out_features, K in_features, R rows of LoRA's A, S slabs, BM rows of x in a
tile of the product.
"""
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from harness.ranks import capability
from nvfp4 import Weight
from ops import mm_fp32

SCALE_BLOCK = 16                    # consecutive weights of a row that share a scale
TILE_SIDE = 128                     # a tile is 128 x 128 weights
A_TILE = 64                         # LoRA's A is read in tiles of 64 x 64: the bytes of W's codes
MAX_DECODE_ROWS = 256               # rows of x up to which decoding in registers beats expanding W


# -----------------------------------------------------------------------------
# 1. The packed layout, for x in bf16
#
# The value of a weight. Both scales multiply; e2m1 is one of 0, .5, 1, 1.5, 2, 3, 4, 6 with a sign:
#
#     W[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * row_scale[n]
#
# row_scale is the tensor's global scale. It is kept for each row, since the parts of a fused matrix
# (q|k|v, gate|up) may have different ones.
#
# A tile. W is cut into tiles of 128 x 128; ragged edges are padded with zeros. The codes of a tile
# are 8 KiB side by side in memory, its scales 1 KiB, and tiles follow each other along k:
#
#               k ->                          codes    int16 (N/128, K/128, 128, 32)
#          +--------+--------+--------+       scales   int32 (N/128, K/128, 128, 2)
#      n   | tile 0 | tile 1 | tile 2 |
#      |   +--------+--------+--------+       a "tile row": 128 rows of W, which give
#      v   | tile 3 | tile 4 | tile 5 |       128 columns of y
#          +--------+--------+--------+
#
# A row of a tile is 128 weights. They are cut into four planes of 32, and word c takes one code
# from each plane:
#
#      k = 0        31 32       63 64       95 96      127
#         +-----------+-----------+-----------+-----------+
#         |  plane 0  |  plane 1  |  plane 2  |  plane 3  |
#         +-----------+-----------+-----------+-----------+
#            k = c      k = 32+c    k = 64+c    k = 96+c        -> codes[..., n, c], 16 bits
#
# So plane p of 32 neighbouring words is W at 32 neighbouring k. It meets 32 neighbouring columns of
# x and nothing has to be interleaved. Two neighbouring words also fill one 32-bit register, and one
# instruction decodes both.
#
# A word. A code has a sign bit s, two exponent bits e and a mantissa bit m; the digit is the plane:
#
#     bit       15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
#     a word    s0 m3 s3 s1 e3 e3 s2 e0 e0 m0 e1 e1 m1 e2 e2 m2
#     a bf16     s  e  e  e  e  e  e  e  e  m  m  m  m  m  m  m
#
#     plane 0   s0  .  .  .  .  .  . e0 e0 m0  .  .  .  .  .  .      word       & 0x81C0
#     plane 1   s1  .  .  .  .  .  . e1 e1 m1  .  .  .  .  .  .     (word << 3) & 0x81C0
#     plane 2   s2  .  .  .  .  .  . e2 e2 m2  .  .  .  .  .  .     (word << 6) & 0x81C0
#
# What is left after the mask, read as a bf16 number, is the code's value times 2^-126. That holds
# for 0.5 as well: E2M1's subnormal number becomes a subnormal number of bf16.
#
# Plane 3 gets the bits that are left over. One product puts all four in their place at once,
# because x * (1 + 2^5 + 2^10) is three copies of x side by side, and from each copy the mask takes
# other bits:
#
#     bit                       16 15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
#     x = (word & 0x6C00) >> 8                                m3 s3  . e3 e3  .  .
#     x << 5                                   m3 s3  . e3 e3
#     x << 10                   m3 s3  . e3 e3
#     their sum & 0x81C0           s3  .  .  .  .  .  . e3 e3 m3  .  .  .  .  .  .
#
# A scale. E4M3's scale v >= 0 becomes a byte u of 5 exponent and 3 mantissa bits,
#
#     u = ((floor(log2 v) + 10) << 3) | mantissa         u = 0 for v = 0, whose codes are cleared
#
# which holds every value of E4M3, subnormal ones too, as a normal number. Then 0x7000 | (u << 4) is
# the bf16 number v * 2^107. A plane has two scale blocks, k = 32 p + [0, 16) and 32 p + [16, 32),
# so a row of a tile has two scale words, h = 0 and 1, each with one byte of every plane. A word is
# rotated to the left by 4, so that one AND-OR with 0x0FF00FF0 and 0x70007000 makes two scales:
#
#     bit           31    28 27        20 19        12 11         4 3     0
#                  | low u2 |     u1     |     u3     |     u0     | high u2 |
#     AND-OR                 -> scale of plane 1       -> scale of plane 0
#     rotated by 8 and AND-OR   the same for planes 3 and 2
#
# The product. code * 2^-126 times v * 2^107 is code * v * 2^-19, which is exact in bf16: it has 6
# significant bits. The kernels sum x * code * v * 2^-19, and whoever reads their sums multiplies by
# `out_scale` = row_scale * 2^19.

class BitOrder(NamedTuple):
    """Where the bits of four codes and of four scales lie in their words, for one type of x."""
    planes: tuple           # (take, shift, times) of each plane: ((word & take) << shift) * times
    mantissa_bit: int       # where a decoded code has its m; both e are above it, s is bit 15
    rotation: int           # of a scale word, to the left
    exponent_bias: int      # what is added to floor(log2 v) in a scale's byte
    scale_base: int         # bits that are set in every decoded scale
    power: int              # a decoded code times its decoded scale is code * v * 2^-power


BF16_ORDER = BitOrder(((0xFFFF, 0, 1), (0xFFFF, 3, 1), (0xFFFF, 6, 1), (0x6C00, -8, 1057)),
                      mantissa_bit=6, rotation=4, exponent_bias=10, scale_base=0x7000, power=19)


# -----------------------------------------------------------------------------
# 2. The same two words, for x in fp16
#
# fp16 has 5 exponent bits, not 8, so e, e, m belong to bits 11, 10, 9 and the mask is 0x8E00:
#
#     bit       15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
#     a word    s0 s2 s3 s1 e0 e0 m0 e1 e1 m1 e2 e2 m2 e3 e3 m3
#     a fp16     s  e  e  e  e  e  m  m  m  m  m  m  m  m  m  m
#
#     plane 0    word                            & 0x8E00
#     plane 1   (word << 3)                      & 0x8E00
#     plane 2   (word & 0x4038) * (2^1 + 2^6)    & 0x8E00       the sign goes up by 1, e e m by 6
#     plane 3   (word & 0x2007) * (2^2 + 2^9)    & 0x8E00       the sign goes up by 2, e e m by 9
#
# What is left is the code's value times 2^-14; 0.5 is a subnormal number again, which tensor cores
# and multipliers take at full speed. Two words share a register here as well, and the lower one's
# product reaches into the upper one, but only below bit 9: the mask removes that.
#
# A scale's byte is u = ((floor(log2 v) + 22) << 3) | mantissa; u << 7 is v * 2^7 as a fp16 number,
# and scale words are rotated by 7. The product code * v * 2^-7 is at most 21 and a multiple of
# 2^-17: exact in fp16.

FP16_ORDER = BitOrder(((0xFFFF, 0, 1), (0xFFFF, 3, 1), (0x4038, 0, 66), (0x2007, 0, 516)),
                      mantissa_bit=9, rotation=7, exponent_bias=22, scale_base=0, power=7)

BIT_ORDERS = {torch.bfloat16: BF16_ORDER, torch.float16: FP16_ORDER}
TRITON_BIT_ORDERS = {tl.bfloat16: BF16_ORDER, tl.float16: FP16_ORDER}


# -----------------------------------------------------------------------------
# 3. Packing. Plain torch, on any device.

def _unpack_words(words, order):
    """(..., C) int16 words -> (..., 4 C) codes 0..15 as int32, plane after plane.

    The kernels' arithmetic, word for word; everything else about codes follows from this function.
    """
    words = words.to(torch.int32) & 0xFFFF
    codes = []
    for take, shift, times in order.planes:
        number = (words & take) * times * 2**max(shift, 0) >> max(-shift, 0)
        codes.append(number >> 12 & 8 | number >> order.mantissa_bit & 7)
    return torch.cat(codes, dim=-1)


@cache
def _word_table(order, device):
    """int16 (65536,): the word that holds four codes, at index c0 | c1 << 4 | c2 << 8 | c3 << 12.

    Found by unpacking all 65,536 words, so packing cannot disagree with unpacking.
    """
    words = torch.arange(65536, device=device)
    c0, c1, c2, c3 = _unpack_words(words[:, None], order).unbind(-1)
    table = torch.empty(65536, dtype=torch.int16, device=device)
    table[c0 | c1 << 4 | c2 << 8 | c3 << 12] = words.to(torch.int16)
    return table


def _pack_words(codes, order):
    """The inverse of _unpack_words, a row of a tile at a time: (..., 128) -> (..., 32)."""
    c0, c1, c2, c3 = codes.to(torch.int32).unflatten(-1, (4, 32)).unbind(-2)
    return _word_table(order, codes.device)[c0 | c1 << 4 | c2 << 8 | c3 << 12]


def _pack_scales(scale, order):
    """(..., 8) fp32 E4M3 values >= 0 in the order of k -> (..., 2) int32, the two rotated words."""
    mantissa, exponent = torch.frexp(scale)  # v = mantissa * 2^exponent with mantissa in [0.5, 1)
    u = (exponent.long() - 1 + order.exponent_bias) << 3 | (mantissa * 16).long() & 7
    u0, u1, u2, u3 = torch.where(scale > 0, u, 0).unflatten(-1, (4, 2)).unbind(-2)
    word = u0 | u3 << 8 | u1 << 16 | u2 << 24  # (..., 2) int64: torch shifts no unsigned 32 bits
    word = (word << order.rotation) & 0xFFFFFFFF | word >> (32 - order.rotation)
    return (word - ((word >> 31) << 32)).to(torch.int32)  # the same 32 bits as a signed number


def _cut_into_tiles(t, columns):
    """(N, C) -> contiguous (N/128, C/columns, 128, columns), padded with zeros to whole tiles."""
    t = torch.nn.functional.pad(t, (0, -t.shape[1] % columns, 0, -t.shape[0] % TILE_SIDE))
    return t.unflatten(0, (-1, TILE_SIDE)).unflatten(2, (-1, columns)).transpose(1, 2).contiguous()


class PackedWeight(Weight):
    """A frozen NVFP4 weight (N, K) in the layout above, on a GPU; `pack` makes it.

    The fast twin of nvfp4.Weight. `dtype` is the type of the x that it multiplies.
    """

    def __init__(self, N: int, K: int, codes: torch.Tensor, scales: torch.Tensor,
                 row_scale: torch.Tensor, dtype: torch.dtype):
        super().__init__((codes, scales, row_scale), None, (N, K), dtype)
        self.codes = codes          # int16 (N/128, K/128, 128, 32)
        self.scales = scales        # int32 (N/128, K/128, 128, 2)
        self.row_scale = row_scale  # fp32 (N,)
        self.out_scale = row_scale * 2**BIT_ORDERS[dtype].power  # fp32 (N,)
        # Whether every row_scale is a power of two. Then 16 bits hold code * v * row_scale.
        self.exact = bool((torch.frexp(row_scale).mantissa == 0.5).all())

    def dequantize(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """-> W (N, K) in `dtype`, or in the type of `out`, whose rows may have any stride.

        Exact where every row_scale is a power of two (in fp16 down to 2^-14: below that the last
        bit is worth 2^-24). Elsewhere the product is made in fp32 and rounded once.
        """
        if out is None:
            out = torch.empty(self.N, self.K, dtype=self.dtype, device=self.device)
        assert out.shape == (self.N, self.K) and out.stride(1) == 1, (out.shape, out.stride())
        dequantize_kernel[self.codes.shape[1], self.codes.shape[0]](
            self.codes, self.scales, self.out_scale, out, self.N, self.K, out.stride(0),
            EXACT=self.exact and out.dtype == self.dtype, FP16=self.dtype == torch.float16,
            num_warps=8)
        return out

    def expands(self, rows: int) -> bool:
        return rows > MAX_DECODE_ROWS


def pack(packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor,
         dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """Packs the three tensors of nvfp4.quantize for x of `dtype`.

    packed uint8 (N, K // 2), block_scale E4M3 (N, K // 16), global_scale fp32 () or (N,). An
    AssertionError names what does not fit.
    """
    N, K = packed.shape[0], packed.shape[1] * 2
    assert dtype in BIT_ORDERS, f"dtype must be bf16 or fp16, got {dtype}"
    assert K % SCALE_BLOCK == 0, (
        f"{K=} must be a multiple of {SCALE_BLOCK}, the weights of one scale ({N=})")
    dtypes = packed.dtype, block_scale.dtype, global_scale.dtype
    assert dtypes == (torch.uint8, torch.float8_e4m3fn, torch.float32), dtypes
    assert block_scale.shape == (N, K // SCALE_BLOCK), (
        f"block_scale is {tuple(block_scale.shape)}, not {(N, K // SCALE_BLOCK)}")
    scale = block_scale.float()
    bad = scale[~(scale >= 0)]  # written this way round it finds NaN too
    assert not len(bad), f"block scales must be >= 0 and finite, got {bad[0]}"
    row_scale = global_scale.to(packed.device).reshape(-1).expand(N).contiguous()
    bad = row_scale[~(row_scale.isfinite() & (row_scale > 0))]
    assert not len(bad), f"global_scale must be finite and above 0, got {bad[0]}"

    order = BIT_ORDERS[dtype]
    scale = _cut_into_tiles(scale, TILE_SIDE // SCALE_BLOCK)  # 0 in the padding
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    words = torch.empty(*scale.shape[:3], TILE_SIDE // 4, dtype=torch.int16, device=packed.device)
    for i in range(scale.shape[0]):  # one tile row at a time: int32 codes take 8 times their memory
        row = _cut_into_tiles(codes[i * TILE_SIDE:(i + 1) * TILE_SIDE], TILE_SIDE)[0]
        # The byte 0 of a zero scale decodes to a number that is not zero (2^97 in bf16), so the
        # codes under it have to be zero.
        empty = (scale[i] == 0).repeat_interleave(SCALE_BLOCK, dim=-1)
        words[i] = _pack_words(row.masked_fill(empty, 0), order)
    return PackedWeight(N, K, words, _pack_scales(scale, order), row_scale, dtype)


# -----------------------------------------------------------------------------
# 4. Decoding in registers
#
# In assembly, because the compiler would spend instructions on every 16-bit word by itself. Here
# one instruction works on a register with two words.

@triton.constexpr_function
def _decode_planes_asm(dtype, first):
    """PTX: two words in register $2 -> planes `first` and first + 1 of both, in $0 and $1."""
    order = TRITON_BIT_ORDERS[dtype]
    mask = (0x8000 | 7 << order.mantissa_bit) * 0x10001  # times 0x10001: the same for both words
    lines = []
    for i in range(2):
        take, shift, times = order.planes[first + i]
        word = "$2"
        steps = (("and.b32", take * 0x10001, 0xFFFFFFFF), ("shl.b32", max(shift, 0), 0),
                 ("shr.u32", max(-shift, 0), 0), ("mul.lo.u32", times, 1))
        for op, operand, changes_nothing in steps:
            if operand != changes_nothing:
                lines.append(f"{op} t, {word}, {operand:#x};")
                word = "t"
        lines.append(f"and.b32 ${i}, {word}, {mask:#x};")
    return "{ .reg .b32 t;\n" + "\n".join(lines) + " }"


@triton.constexpr_function
def _decode_scales_asm(dtype):
    """PTX: a scale word in register $4 -> the scales of planes 0, 1, 2, 3 in $0, $1, $2, $3."""
    order = TRITON_BIT_ORDERS[dtype]
    # lop3 with the table 0xEA is (a & b) | c.
    take_and_or = f"{(0xFF << order.rotation) * 0x10001:#x}, {order.scale_base * 0x10001:#x}, 0xEA"
    return f"""{{ .reg .b32 t;
        lop3.b32 t, $4, {take_and_or};
        mov.b32 {{$0, $1}}, t;
        shf.l.wrap.b32 t, $4, $4, 8;
        lop3.b32 t, t, {take_and_or};
        mov.b32 {{$2, $3}}, t; }}"""


@triton.jit
def decode_planes(words, first: tl.constexpr, dtype: tl.constexpr):
    """int16 words -> planes `first` (0 or 2) and first + 1, each of the shape of `words`.

    In bf16 planes 0 and 1 take 3 instructions for 4 weights, planes 2 and 3 take 6.
    """
    return tl.inline_asm_elementwise(_decode_planes_asm(dtype, first), "=&r,=r,r", [words],
                                     dtype=(dtype.value, dtype.value), is_pure=True, pack=2)


@triton.jit
def decode_scales(word, dtype: tl.constexpr):
    """int32 scale words -> four tensors of scales, one for each plane."""
    return tl.inline_asm_elementwise(_decode_scales_asm(dtype), "=h,=h,=h,=h,r", [word],
                                     dtype=(dtype.value,) * 4, is_pure=True, pack=1)


@triton.jit
def spread_scales(scale):
    """(128, 2) scales of a plane -> (128, 32), each beside the 16 codes that it multiplies."""
    return tl.broadcast_to(scale[:, :, None], (128, 2, 16)).reshape(128, 32)


@triton.jit
def side_by_side(a, b):
    """(128, C) and (128, C) -> (128, 2 C). Only names registers anew; nothing is moved."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def dequantize_kernel(
    codes_ptr,         # int16 (N/128, K/128, 128, 32)
    scales_ptr,        # int32 (N/128, K/128, 128, 2)
    out_scale_ptr,     # fp32  (N,)
    out_ptr,           # bf16, fp16 or fp32 (N, K), its row stride is out_stride
    N, K, out_stride,
    EXACT: tl.constexpr, # every out_scale is a power of two, so that 16 bits hold the product
    FP16: tl.constexpr,  # which order of bits the weight is packed in
):
    """Expands W. One program does one 128 x 128 tile."""
    dtype: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    tile_k = tl.program_id(0)
    tile_n = tl.program_id(1)
    tile = (tile_n * tl.num_programs(0) + tile_k).to(tl.int64)
    row = tl.arange(0, 128)
    k = tile_k * 128 + row
    n = tile_n * 128 + row
    words = tl.load(codes_ptr + tile * 4096 + row[:, None] * 32 + tl.arange(0, 32)[None, :])
    word = tl.load(scales_ptr + tile * 256 + row[:, None] * 2 + tl.arange(0, 2)[None, :])
    w0, w1 = decode_planes(words, 0, dtype)
    w2, w3 = decode_planes(words, 2, dtype)
    s0, s1, s2, s3 = decode_scales(word, dtype)
    # The planes are put side by side first, so that a row is stored as 256 bytes in one go and not
    # as four times 64.
    front = side_by_side(w0 * spread_scales(s0), w1 * spread_scales(s1))
    back = side_by_side(w2 * spread_scales(s2), w3 * spread_scales(s3))
    value = side_by_side(front, back)
    if not EXACT:
        value = value.to(tl.float32)
    value *= tl.load(out_scale_ptr + n, mask=n < N, other=0.0).to(value.dtype)[:, None]
    out = out_ptr + n[:, None].to(tl.int64) * out_stride + k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


# -----------------------------------------------------------------------------
# 5. The schedule of the weight stream
#
# The tiles of W in memory order, along k and then down the tile rows, are one stream. It is cut
# into stripes of equal length, and each program walks one stripe (stream-K; Marlin's stripes). So
# every program has the same work whatever N and K are, and there are as many programs as the GPU
# can hold at once: they all start together and end together.
#
# A stripe may begin and end in the middle of a tile row. Here W has 3 tile rows of 5 tiles, and a
# stripe has 3 tiles; a digit is the number of the program that walks the tile:
#
#                      k ->                      slab 0       slab 1       slab 2
#     tile row 0   0  0  0 | 1  1               program 0    program 1       -
#     tile row 1   1 | 2  2  2 | 3              program 1    program 2    program 3
#     tile row 2   3  3 | 4  4  4               program 3    program 4       -
#
# Where a program comes to the end of a tile row, or of its stripe, it stores what it has summed: a
# "piece" of that tile row's 128 columns of y. The pieces of a tile row are numbered from 0, in the
# order of their programs, and piece p goes into slab p, which is a whole matrix (M, N + R). Nobody
# adds them up here and nothing is set to zero first: the kernel that reads y next knows from
# `w_pieces` how many slabs hold something of a column, and adds those in order ("-" above may hold
# anything, even NaN). So the result has the same bits in every run, which atomic additions would
# not give.
#
# LoRA's A rides along: columns N .. N + R of the slabs are x @ A.T. The first programs of the grid
# do nothing else. A is in 16 bits: 64 rows of it at the width of a tile are 16 KiB to read, a tile
# of W is 9. So these programs get at most a quarter of K each, in order not to be the last to
# finish.

@triton.jit
def a_stripe(k_tiles, stripe):
    """How many tiles' width of K a program of x @ A.T walks."""
    return tl.minimum(stripe, tl.cdiv(k_tiles, 4))


@triton.jit
def a_pieces(k_tiles, stripe):
    """How many slabs hold a piece of x @ A.T."""
    return tl.cdiv(k_tiles, a_stripe(k_tiles, stripe))


@triton.jit
def w_pieces(column, k_tiles, stripe):
    """How many slabs hold a piece of this column of x @ W.T."""
    first = column // 128 * k_tiles
    return (first + k_tiles - 1) // stripe - first // stripe + 1


def most_pieces(k_tiles: int, stripe: int) -> tuple[int, int]:
    """The most slabs that hold a piece of any column of x @ W.T, and those of x @ A.T."""
    a_tiles = min(stripe, -(-k_tiles // 4))  # as a_stripe
    return (k_tiles + stripe - 2) // stripe + 1, -(-k_tiles // a_tiles)


class StripePlan(NamedTuple):
    """How one launch cuts up x @ [W; A].T."""
    k_tiles: int            # tiles in a tile row
    stripe: int             # consecutive tiles that one program walks
    a_programs: int         # programs that do x @ A.T; those of W come after them
    programs: int           # all of them
    slabs: int              # S


@cache
def plan_stripes(N: int, K: int, M: int, R: int, config: tuple, multiprocessors: int) -> StripePlan:
    """The shortest stripe whose programs all fit on the GPU at once, as a second wave of programs
    would double the time. config: PortableConfig, or Hopper's.
    """
    k_tiles = triton.cdiv(K, TILE_SIDE)
    tile_rows = triton.cdiv(N, TILE_SIDE)
    tiles = tile_rows * k_tiles
    # Each BM rows of x take a whole set of programs.
    places = max(1, multiprocessors * config.programs_per_sm // triton.cdiv(M, config.BM))
    for stripe in range(max(1, tiles // places), tiles + 1):
        pieces_of_a = most_pieces(k_tiles, stripe)[1]
        a_programs = triton.cdiv(R, A_TILE) * pieces_of_a
        programs = a_programs + triton.cdiv(tiles, stripe)
        if programs <= places:
            break
    slabs = max((row * k_tiles + k_tiles - 1) // stripe - row * k_tiles // stripe + 1  # w_pieces
                for row in range(tile_rows))
    return StripePlan(k_tiles, stripe, a_programs, programs, max(slabs, pieces_of_a if R else 0))


class MatmulSlabs(NamedTuple):
    """What a decode matmul leaves: partial sums, still to be added up and scaled.

    Column n of x @ W.T is scale[n] times the sum of sums[:w_pieces(n), :, n]; x @ A.T is the sum of
    sums[:a_pieces(), :, N:N + R]. fast/kernels.py does that where it reads them.
    """
    sums: torch.Tensor      # fp32 (S, M, at least N + R)
    scale: torch.Tensor     # fp32 (N,)
    k_tiles: int = 1        # these two, of the StripePlan, tell how many slabs hold a piece
    stripe: int = 1


# -----------------------------------------------------------------------------
# 6. The kernel, in plain Triton
#
# The sum is kept transposed, (128 columns of y, BM rows of x): W is the tensor cores' first
# operand, whose side is 16 or 64 long, and x the second, whose side may be 8. A single row of x
# then wastes 7 of 8 columns; the other way round it would waste 15 of 16 rows.
#
# Each warp has a band of the tile's 128 rows of its own, which Triton sees as a batch (BANDS > 1).
# No weight is decoded twice, and the product is mma.sync, which all GPUs have. On Hopper all warps
# share one product from 17 rows on (BANDS = 1), which Triton makes a wgmma that reads x from shared
# memory by itself: 84 instead of 110 us a layer of 7B at 64 rows on an H200. (`--kernels auto`
# takes fast/hopper_fp4.py there anyway.)

class MatmulInputs(NamedTuple):
    """What portable_kernel reads."""
    x: tl.tensor            # bf16 or fp16 (M, K)
    x_stride: tl.tensor     # from one of its rows to the next
    codes: tl.tensor        # int16 (N/128, K/128, 128, 32)
    scales: tl.tensor       # int32 (N/128, K/128, 128, 2)
    a: tl.tensor            # as x (R, K), LoRA's A; never read where R is 0
    N: tl.tensor
    K: tl.tensor
    R: tl.tensor


@triton.jit
def load_rows(ptr, stride, row, rows, k, K, WHOLE_K: tl.constexpr):
    """Rows `row` of a matrix that has `rows` of them, at columns `k` of K.

    A row past the end is read as the last one: that needs no mask, and its result is never stored.
    Columns past the end must be zeros, since they are summed.
    """
    at = ptr + tl.minimum(row, rows - 1)[:, None] * stride + k[None, :]
    if WHOLE_K:
        return tl.load(at)
    return tl.load(at, mask=(k < K)[None, :], other=0.0)


@triton.constexpr_function
def sum_shape(n, BM, BANDS):
    """Shape of the sums of n rows of W with BM rows of x: a band for each warp, or one for all."""
    return (BANDS, n // BANDS, BM) if BANDS > 1 else (n, BM)


@triton.jit
def add_product(acc, w, x):
    """acc (of sum_shape) + w (n, k) @ x (BM, k).T."""
    if len(acc.shape) == 3:
        bands: tl.constexpr = acc.shape[0]
        w = tl.reshape(w, (bands, w.shape[0] // bands, w.shape[1]))
        xt = tl.broadcast_to(tl.permute(x, (1, 0))[None], (bands, x.shape[1], x.shape[0]))
        acc = tl.dot(w, xt, acc)
    else:
        acc = tl.dot(w, tl.permute(x, (1, 0)), acc)
        # A trap: wgmma runs on its own and still reads w's registers while the next plane is
        # decoded into them. A use of its sum, which this "mov" is, makes the compiler wait for it.
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32,
                                        is_pure=False, pack=1)
    return acc


@triton.jit
def store_piece(acc, out_ptr, width, n, columns, m, M):
    """acc (of sum_shape) -> out[m, n], as much of it as lies below M and `columns`."""
    acc = tl.reshape(acc, (n.shape[0], m.shape[0]))
    mask = (m < M)[None, :] & (n < columns)[:, None]
    tl.store(out_ptr + m[None, :] * width + n[:, None], acc, mask=mask)


@triton.jit(do_not_specialize=["M", "k_tiles", "stripe", "a_programs"])
def portable_kernel(
    inputs: MatmulInputs,
    slabs_ptr,         # fp32 (S, M, width)     columns N .. N + R are x @ A.T
    M, width,
    k_tiles, stripe, a_programs,  # of the StripePlan
    BM: tl.constexpr, STAGES: tl.constexpr, BANDS: tl.constexpr,
    WHOLE_K: tl.constexpr, # K is a multiple of 128
    PDL: tl.constexpr,
):
    """x @ [W; A].T as pieces in slabs. Axis 0 of the grid: programs; axis 1: BM rows of x each."""
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    pid = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    slab = M.to(tl.int64) * width  # elements of a slab
    if PDL:  # see fast/kernels.py
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if pid < a_programs:  # a program of x @ A.T: one tile of 64 rows, a_stripe tiles' width of K
        share = a_stripe(k_tiles, stripe)
        pieces = tl.cdiv(k_tiles, share)
        piece = pid % pieces
        r = pid // pieces * 64 + tl.arange(0, 64)
        k = tl.arange(0, 64)  # half of a tile's width: 8 KiB of A, as many as the codes of a tile
        last = tl.minimum(piece * share + share, k_tiles)
        acc = tl.zeros(sum_shape(64, BM, BANDS), tl.float32)
        for half in tl.range(2 * piece * share, 2 * last, num_stages=STAGES):
            a = load_rows(inputs.a, inputs.K, r, inputs.R, half * 64 + k, inputs.K, WHOLE_K)
            x = load_rows(inputs.x, inputs.x_stride, m, M, half * 64 + k, inputs.K, WHOLE_K)
            acc = add_product(acc, a, x)
        store_piece(acc, slabs_ptr + piece * slab + inputs.N, width, r, inputs.R, m, M)
        return

    pid -= a_programs  # a program of x @ W.T: its stripe
    n = tl.arange(0, 128)
    c = tl.arange(0, 32)
    h = tl.arange(0, 2)
    tile = pid * stripe
    last = tl.minimum(tile + stripe, tl.cdiv(inputs.N, 128) * k_tiles)
    while tile < last:  # once for every tile row that the stripe touches
        tile_row = tile // k_tiles
        end = tl.minimum(last, tile_row * k_tiles + k_tiles)
        first = (tile_row * k_tiles).to(tl.int64)
        codes = inputs.codes + first * 4096 + n[:, None] * 32 + c[None, :]
        scales = inputs.scales + first * 256 + n[:, None] * 2 + h[None, :]
        acc = tl.zeros(sum_shape(128, BM, BANDS), tl.float32)
        for kt in tl.range(tile - tile_row * k_tiles, end - tile_row * k_tiles, num_stages=STAGES):
            words = tl.load(codes + kt * 4096)
            planes = decode_planes(words, 0, dtype) + decode_planes(words, 2, dtype)
            plane_scales = decode_scales(tl.load(scales + kt * 256), dtype)
            k = kt * 128 + c
            xs = ()
            for p in tl.static_range(4):
                xs += (load_rows(inputs.x, inputs.x_stride, m, M, k + 32 * p, inputs.K, WHOLE_K),)
            for p in tl.static_range(4):
                acc = add_product(acc, planes[p] * spread_scales(plane_scales[p]), xs[p])
        piece = pid - tile_row * k_tiles // stripe  # counted from the program that began the row
        store_piece(acc, slabs_ptr + piece * slab, width, tile_row * 128 + n, inputs.N, m, M)
        tile = end


# -----------------------------------------------------------------------------
# 7. Its launch

class PortableConfig(NamedTuple):
    """How portable_kernel is launched for some number of rows of x."""
    BM: int                 # rows of x in a tile of the product
    num_stages: int         # tiles of W under way, with the one that is multiplied
    programs_per_sm: int    # programs that a multiprocessor holds at once
    num_warps: int
    bands: int              # of a tile's rows: one for each warp, or 1 for all


# M at most -> the config that was fastest on an H200, of all that use mma.sync. Two warps read x
# from shared memory half as often as four do. That pays at 32 rows; at 64, registers do not suffice
# for it.
PORTABLE_CONFIGS = {8: PortableConfig(8, 3, 4, 4, 4), 16: PortableConfig(16, 3, 4, 4, 4),
                    32: PortableConfig(32, 3, 4, 2, 2), 256: PortableConfig(64, 3, 2, 4, 4)}
# The same for GPUs with 99 KiB of shared memory: consumer cards, where fewer stages fit.
CONFIGS_99_KIB = {8: PortableConfig(8, 3, 4, 4, 4), 16: PortableConfig(16, 3, 3, 4, 4),
                  32: PortableConfig(32, 2, 4, 2, 2), 256: PortableConfig(64, 2, 2, 4, 4)}
# By wgmma. With Triton 3.6 registers do not suffice for a fourth program at 32 rows.
CONFIGS_WGMMA = PORTABLE_CONFIGS | {32: PortableConfig(32, 3, 3, 4, 1),
                                    256: PortableConfig(64, 3, 2, 4, 1)}


def shared_memory_kib(sm: tuple[int, int]) -> int:
    """KiB of shared memory that one program may take on a GPU of compute capability `sm`.

    A multiprocessor has 1 KiB more, and keeps 1 KiB for each of its programs.
    """
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(sm, 99)


def portable_config(M: int, sm: tuple[int, int]) -> PortableConfig:
    """The config for M rows of x on a GPU of compute capability `sm`, which is (9, 0) for sm_90."""
    if shared_memory_kib(sm) <= 99:
        configs = CONFIGS_99_KIB
    elif sm[0] == 9:
        configs = CONFIGS_WGMMA
    else:
        configs = PORTABLE_CONFIGS
    return next((config for rows, config in configs.items() if M <= rows), configs[256])


@cache
def multiprocessors_on(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H200's, for tests that compile without one
    return torch.cuda.get_device_properties(device).multi_processor_count


def prepare_launch(
        x: torch.Tensor, weight: PackedWeight, lora_a: torch.Tensor | None,
        slabs: torch.Tensor | None, config: tuple) -> tuple[int, StripePlan, torch.Tensor]:
    """Checks the operands of a decode matmul -> R, its StripePlan, its slabs (made if None)."""
    M, K = x.shape
    R = 0
    assert x.dtype == weight.dtype, f"the weight was packed for {weight.dtype}, got {x.dtype}"
    assert x.device == weight.device, f"x is on {x.device}, the weight on {weight.device}"
    assert K == weight.K, f"x has {K=}, the weight N={weight.N}, K={weight.K}"
    assert x.stride(1) == 1 and x.stride(0) % 8 == 0, f"x: contiguous rows, not {x.stride()}"
    if lora_a is not None:
        assert lora_a.dtype == x.dtype and lora_a.shape[1] == K, (lora_a.dtype, lora_a.shape, K)
        assert lora_a.is_contiguous(), lora_a.stride()
        R = len(lora_a)
    plan = plan_stripes(weight.N, K, M, R, config, multiprocessors_on(weight.device))
    # Rows of whole 16 bytes, which Hopper's copy engine asks for.
    shape = plan.slabs, M, triton.cdiv(weight.N + R, 4) * 4
    if slabs is None:
        slabs = torch.empty(shape, device=x.device)
    assert slabs.shape == shape, f"slabs must be {shape}: {slabs.shape}"
    return R, plan, slabs


def portable_matmul(x: torch.Tensor, weight: PackedWeight, lora_a: torch.Tensor | None = None,
                    slabs: torch.Tensor | None = None, pdl: bool = False) -> MatmulSlabs:
    """x (M, K) @ [W; lora_a].T, as partial sums in slabs (S, M, N + R rounded up to 4).

    x and lora_a (R, K) have the weight's dtype, M is 256 or so at most. No row's bits depend on
    what the other rows hold. slabs: an earlier result's `sums` to be overwritten. pdl: launch while
    the kernel before still runs (from sm_90 on). This kernel waits for that one before it reads
    anything, so only the launch is hidden; hopper_matmul hides more.
    """
    M, K = x.shape
    config = portable_config(M, capability(weight.device))
    R, plan, slabs = prepare_launch(x, weight, lora_a, slabs, config)
    a = lora_a if R else x
    inputs = MatmulInputs(x, x.stride(0), weight.codes, weight.scales, a, weight.N, K, R)
    portable_kernel[plan.programs, triton.cdiv(M, config.BM)](
        inputs, slabs, M, slabs.shape[2], plan.k_tiles, plan.stripe, plan.a_programs, config.BM,
        config.num_stages, config.bands, K % TILE_SIDE == 0, pdl, num_warps=config.num_warps,
        launch_pdl=pdl)
    return MatmulSlabs(slabs, weight.out_scale, plan.k_tiles, plan.stripe)


# -----------------------------------------------------------------------------
# 8. The same product of a W that is expanded first

@cache
def unit_scale(n: int, device: torch.device) -> torch.Tensor:
    """n ones, made once: inside a CUDA graph they would be filled in again at every step."""
    return torch.ones(n, device=device)


def expanded_matmul(x: torch.Tensor, weight: Weight,
                    lora_a: torch.Tensor | None = None) -> MatmulSlabs:
    """As portable_matmul, for many rows and for every other format: W in 16 bits, one slab."""
    N = weight.N
    R = 0 if lora_a is None else len(lora_a)
    slabs = torch.empty(1, len(x), N + R, device=x.device)
    mm_fp32(x, weight.dequantize().T, out=slabs[0, :, :N])
    if R:
        mm_fp32(x, lora_a.T, out=slabs[0, :, N:])
    return MatmulSlabs(slabs, unit_scale(N, x.device))
