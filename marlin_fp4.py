"""
Weight-only NVFP4 matmul for Hopper: y = x @ W.T, W in 4.5 bits a weight, x in bf16 or fp16.

Why: sm_90 has no FP4 tensor cores, so FP4 can only save memory traffic. Decoding a token is bound
by reading weights, and at 4 TB/s an H200 has 4.4 issue slots per weight: the layout below exists
to spend 2.5 of them. From a few hundred rows on the tensor cores are the bound: W is expanded.

Value of a weight; both scales multiply:
    W[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * row_scale[n]
row_scale is the tensor's global scale; the parts of a fused matrix (q|k|v, gate|up) may differ.

Layout ("planes"). Tiles of 128 x 128 (ragged edges padded with zeros), each contiguous bytes:
    codes    int16 (N/128, K/128, 128, 32)   [n, c]: the codes of k = c, 32 + c, 64 + c, 96 + c
    scales   int32 (N/128, K/128, 128, 2)    eight bytes, one per 16 consecutive k
Bits of a word, s e e m being a code's, the digit its plane (plane p is k = 32 p + c), in two
orders, one for each type of x:
    bit    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    bf16   s0 m3 s3 s1 e3 e3 s2 e0 e0 m0 e1 e1 m1 e2 e2 m2
    fp16   s0 s2 s3 s1 e0 e0 m0 e1 e1 m1 e2 e2 m2 e3 e3 m3

bf16. word & 0x81C0, (word << 3) & 0x81C0 and (word << 6) & 0x81C0 are planes 0..2 as bf16 numbers
worth code * 2^-126 (E2M1's subnormal 0.5 becomes a bf16 subnormal). Plane 3 lies in the bits that
are left: times 1 + 2^5 + 2^10 all four are where they belong at once. A plane meets a contiguous
slice of x, so nothing is interleaved; two neighbouring words are one register of two numbers.

A scale v becomes the byte u = ((floor(log2 v) + 10) << 3) | 3 mantissa bits (E5M3 without sign),
which holds every E4M3 value, subnormal ones included, as a normal number; u = 0 for v = 0, whose
codes are cleared. 0x7000 | u << 4 is v * 2^107 as a bf16 number, and code * 2^-126 * v * 2^107 =
code * v * 2^-19 is exact in bf16 (6 significant bits). Scale word h serves k in [32 p + 16 h,
32 p + 16 h + 16) of every plane p with u_p, and is the 32-bit number u0 | u3 << 8 | u1 << 16 |
u2 << 24 rotated left by 4: one AND-OR puts u0 and u1 in place as a bf16x2 register and, after a
rotation by 8, another does u2 and u3.

fp16. word & 0x8E00 and (word << 3) & 0x8E00 are planes 0 and 1, worth code * 2^-14 (0.5 a subnormal
again; tensor cores and multipliers take those at full speed). In planes 2 and 3 sign and digits
have different ways to go, and one product takes both: (word & 0x4038) * (2^1 + 2^6) and
(word & 0x2007) * (2^2 + 2^9), & 0x8E00. What a product pushes into the word above stays below bit
9. u = ((floor(log2 v) + 22) << 3) | 3 mantissa bits, the scale word is rotated left by 7, and
u << 7 is v * 2^7; so code * v * 2^-7 is at most 21 and a multiple of 2^-17: exact in fp16.

decode_matmul leaves sums of code * v * 2^-19 * x (fp16: 2^-7), to be multiplied by out_scale (N,),
which is row_scale * 2^19 (2^7). dequantize() includes it: exactly where row_scale is a power of two
(in fp16 down to 2^-14; below, the last bit is worth 2^-24), elsewhere in fp32, rounded once.

Not here: quantization (nvfp4.py), the product with LoRA's B (kernels.py), 4-bit activations; the
same product in plain Triton, for every other GPU, to be read before this one (portable_fp4.py).

Shapes: M rows, N out_features, K in_features, R rows of LoRA's A, S slabs, BM rows of a tile.
"""
from functools import cache, cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from harness.ranks import capability
from nvfp4 import Weight
from ops import mm_fp32

BLOCK = 16                          # weights per scale
TILE = 128                          # side of a packed tile
CROSSOVER = 256                     # rows up to which the decode kernel beats expanding W
A_SIDE = tl.constexpr(64)           # side of a tile of LoRA's A: the bytes of a tile of codes
SENT_ROWS = tl.constexpr(64)        # rows of x up to which a sum has room in shared memory

# In shared memory, swizzled against bank conflicts: rows of x and A, of codes; scales; fp32 sums
ROWS_256B = tl.constexpr(gl.NVMMASharedLayout(128, 16))
ROWS_64B = tl.constexpr(gl.NVMMASharedLayout(64, 16))
FLAT = tl.constexpr(gl.NVMMASharedLayout(0, 32))
SUMS = tl.constexpr(gl.NVMMASharedLayout(128, 32, rank=3))
# In registers: (128, 2, 16) scales beside the weights that they serve
SCALED = tl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [64, 0, 0]],
    [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[16, 0, 0], [32, 0, 0]], [], [128, 2, 16]))


class Order(NamedTuple):
    """How the two orders differ."""
    planes: tuple           # (take, shift, times) of each plane: ((word & take) << shift) * times
    low: int                # bit of a plane's mantissa: s is 15 and e, e, m are low + 2 .. low
    turn: int               # bits by which a scale word is rotated
    bias: int               # of the exponent in a scale's byte
    base: int               # bits that belong to every scale
    power: int              # the kernel multiplies x by code * v * 2^-power


ORDERS = {
    torch.bfloat16: Order(((0xFFFF, 0, 1), (0xFFFF, 3, 1), (0xFFFF, 6, 1), (0x6C00, -8, 1057)),
                          low=6, turn=4, bias=10, base=0x7000, power=19),
    torch.float16: Order(((0xFFFF, 0, 1), (0xFFFF, 3, 1), (0x4038, 0, 66), (0x2007, 0, 516)),
                         low=9, turn=7, bias=22, base=0, power=7),
}
ORDER_OF = {tl.bfloat16: ORDERS[torch.bfloat16], tl.float16: ORDERS[torch.float16]}


# -----------------------------------------------------------------------------
# Packing. Plain torch, any device.

def _to_codes(words, order):
    """(..., C) int16 words -> (..., 4 C) codes 0..15 as int32, plane after plane."""
    words = words.to(torch.int32) & 0xFFFF
    codes = []
    for take, shift, times in order.planes:
        plane = (words & take) * times * 2**max(shift, 0) >> max(-shift, 0)
        codes.append(plane >> 12 & 8 | plane >> order.low & 7)
    return torch.cat(codes, dim=-1)


@cache
def _word_table(order, device):
    """int16 (65536,): the word of four codes c0 | c1 << 4 | c2 << 8 | c3 << 12."""
    words = torch.arange(65536, device=device)
    c0, c1, c2, c3 = _to_codes(words[:, None], order).unbind(-1)
    table = torch.empty(65536, dtype=torch.int16, device=device)
    table[c0 | c1 << 4 | c2 << 8 | c3 << 12] = words.to(torch.int16)
    return table


def _to_words(codes, order):
    """Inverse of _to_codes: (..., 128) -> (..., 32)."""
    c0, c1, c2, c3 = codes.to(torch.int32).unflatten(-1, (4, 32)).unbind(-2)
    return _word_table(order, codes.device)[c0 | c1 << 4 | c2 << 8 | c3 << 12]


def _to_scale_words(scale, order):
    """(..., 8) fp32 E4M3 values >= 0 in the order of k -> (..., 2) int32, rotated words."""
    mantissa, exponent = torch.frexp(scale)  # v = mantissa * 2^exponent, from 0.5 on
    u = (exponent.long() - 1 + order.bias) << 3 | (mantissa * 16).long() & 7
    u0, u1, u2, u3 = torch.where(scale > 0, u, 0).unflatten(-1, (4, 2)).unbind(-2)
    word = u0 | u3 << 8 | u1 << 16 | u2 << 24  # int64 (..., 2)
    word = (word << order.turn) & 0xFFFFFFFF | word >> (32 - order.turn)
    return (word - ((word >> 31) << 32)).to(torch.int32)  # the same 32 bits, signed


def _tiles(t, columns):
    """(N, C) -> contiguous (N/128, C/columns, 128, columns), zero padded to whole tiles."""
    t = torch.nn.functional.pad(t, (0, -t.shape[1] % columns, 0, -t.shape[0] % TILE))
    return t.unflatten(0, (-1, TILE)).unflatten(2, (-1, columns)).transpose(1, 2).contiguous()


class PackedWeight(Weight):
    """One frozen (N, K) NVFP4 weight in the layout above, on a GPU. Made by pack()."""

    def __init__(self, N, K, codes, scales, row_scale, dtype):
        super().__init__((codes, scales, row_scale), None, (N, K), dtype)
        self.codes = codes  # int16 (N/128, K/128, 128, 32)
        self.scales = scales  # int32 (N/128, K/128, 128, 2)
        self.row_scale = row_scale  # fp32 (N,)
        self.out_scale = row_scale * 2**ORDERS[dtype].power  # fp32 (N,)
        self.exact = bool((torch.frexp(row_scale).mantissa == 0.5).all())  # powers of two

    def dequantize(self, out=None):
        """-> W (N, K) in dtype, or in out's, whose rows may have any stride."""
        if out is None:
            out = torch.empty(self.N, self.K, dtype=self.dtype, device=self.device)
        assert out.shape == (self.N, self.K) and out.stride(1) == 1, (out.shape, out.stride())
        dequantize_kernel[self.codes.shape[1], self.codes.shape[0]](
            self.codes, self.scales, self.out_scale, out, self.N, self.K, out.stride(0),
            EXACT=self.exact and out.dtype == self.dtype, FP16=self.dtype == torch.float16,
            num_warps=8)
        return out

    def expands(self, rows):
        return rows > CROSSOVER

    @cached_property
    def maps(self):
        """Tensor maps of codes and scales, one tile a copy."""
        codes = self.codes.view(-1, TILE // 4)
        scales = self.scales.view(-1, 2 * TILE)
        return (TensorDescriptor.from_tensor(codes, [TILE, TILE // 4], ROWS_64B.value),
                TensorDescriptor.from_tensor(scales, [1, 2 * TILE], FLAT.value))


def pack(packed, block_scale, global_scale, dtype=torch.bfloat16):
    """nvfp4.quantize's three tensors, global_scale () or (N,) -> PackedWeight for x of dtype."""
    N, K = packed.shape[0], packed.shape[1] * 2
    assert dtype in ORDERS, f"dtype must be bf16 or fp16, got {dtype}"
    assert K % BLOCK == 0, f"{K=} must be a multiple of {BLOCK}, the weights of one scale ({N=})"
    dtypes = packed.dtype, block_scale.dtype, global_scale.dtype
    assert dtypes == (torch.uint8, torch.float8_e4m3fn, torch.float32), dtypes
    assert block_scale.shape == (N, K // BLOCK), (
        f"block_scale is {tuple(block_scale.shape)}, not {(N, K // BLOCK)}")
    scale = block_scale.float()
    bad = scale[~(scale >= 0)]  # NaN too
    assert not len(bad), f"block scales must be >= 0 and finite, got {bad[0]}"
    row_scale = global_scale.to(packed.device).reshape(-1).expand(N).contiguous()
    bad = row_scale[~(row_scale.isfinite() & (row_scale > 0))]
    assert not len(bad), f"global_scale must be finite and above 0, got {bad[0]}"

    order = ORDERS[dtype]
    scale = _tiles(scale, TILE // BLOCK)  # padding and true zeros are 0
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    words = torch.empty(*scale.shape[:3], TILE // 4, dtype=torch.int16, device=packed.device)
    for i in range(scale.shape[0]):  # a row of tiles at a time: codes are 8x as big
        rows = _tiles(codes[i * TILE:(i + 1) * TILE], TILE)[0]
        empty = (scale[i] == 0).repeat_interleave(BLOCK, dim=-1)
        words[i] = _to_words(rows.masked_fill(empty, 0), order)
    return PackedWeight(N, K, words, _to_scale_words(scale, order), row_scale, dtype)


# -----------------------------------------------------------------------------
# Decoding in registers: assembly where the compiler would spend instructions on 16-bit lanes

@triton.constexpr_function
def _planes_asm(dtype, first):
    """PTX: two words in register $2 -> planes `first` and the next in $0 and $1."""
    order = ORDER_OF[dtype]
    mask = (0x8000 | 7 << order.low) * 0x10001
    lines = []
    for i in range(2):
        take, shift, times = order.planes[first + i]
        word = "$2"
        steps = (("and.b32", take * 0x10001, 0xFFFFFFFF), ("shl.b32", max(shift, 0), 0),
                 ("shr.u32", max(-shift, 0), 0), ("mul.lo.u32", times, 1))
        for op, operand, nothing in steps:
            if operand != nothing:
                lines.append(f"{op} t, {word}, {operand:#x};")
                word = "t"
        lines.append(f"and.b32 ${i}, {word}, {mask:#x};")
    return "{ .reg .b32 t;\n" + "\n".join(lines) + " }"


@triton.constexpr_function
def _scales_asm(dtype):
    """PTX: a scale word in register $4 -> the scales of planes 0..3 in $0..$3."""
    order = ORDER_OF[dtype]
    take_and_or = f"{(0xFF << order.turn) * 0x10001:#x}, {order.base * 0x10001:#x}, 0xEA"
    return f"""{{ .reg .b32 t;
        lop3.b32 t, $4, {take_and_or};
        mov.b32 {{$0, $1}}, t;
        shf.l.wrap.b32 t, $4, $4, 8;
        lop3.b32 t, t, {take_and_or};
        mov.b32 {{$2, $3}}, t; }}"""


@triton.jit
def planes_of(words, first: tl.constexpr, dtype: tl.constexpr):
    """int16 words -> planes `first` and the next: 3 instructions for 4 weights, from 2 on 6."""
    return tl.inline_asm_elementwise(_planes_asm(dtype, first), "=&r,=r,r", [words],
                                     dtype=(dtype.value, dtype.value), is_pure=True, pack=2)


@triton.jit
def scales_of(word, dtype: tl.constexpr):
    """int32 scale words -> four tensors of scales, one a plane."""
    return tl.inline_asm_elementwise(_scales_asm(dtype), "=h,=h,=h,=h,r", [word],
                                     dtype=(dtype.value,) * 4, is_pure=True, pack=1)


@triton.jit
def spread(scale):
    """(128, 2) scales -> (128, 32), each beside its codes: their product is exact."""
    return tl.broadcast_to(scale[:, :, None], (128, 2, 16)).reshape(128, 32)


@triton.jit
def side_by_side(a, b):
    """(128, C), (128, C) -> (128, 2 C); only renames registers."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def dequantize_kernel(
    codes_ptr,         # int16 (N/128, K/128, 128, 32)
    scales_ptr,        # int32 (N/128, K/128, 128, 2)
    out_scale_ptr,     # fp32  (N,)
    out_ptr,           # bf16, fp16 or fp32 (N, K)   row stride out_stride
    N, K, out_stride,
    EXACT: tl.constexpr, # out_scale: powers of two, so that 16 bits hold the product
    FP16: tl.constexpr,  # the order of codes and scales
):
    """One program expands one 128 x 128 tile."""
    dtype: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    tile_k = tl.program_id(0)
    tile_n = tl.program_id(1)
    tile = (tile_n * tl.num_programs(0) + tile_k).to(tl.int64)
    row = tl.arange(0, 128)
    k = tile_k * 128 + row
    n = tile_n * 128 + row
    words = tl.load(codes_ptr + tile * 4096 + row[:, None] * 32 + tl.arange(0, 32)[None, :])
    word = tl.load(scales_ptr + tile * 256 + row[:, None] * 2 + tl.arange(0, 2)[None, :])
    w0, w1 = planes_of(words, 0, dtype)
    w2, w3 = planes_of(words, 2, dtype)
    s0, s1, s2, s3 = scales_of(word, dtype)
    # whole rows of 256 bytes rather than 64 bytes a plane: see docs/kernels.md
    front = side_by_side(w0 * spread(s0), w1 * spread(s1))
    value = side_by_side(front, side_by_side(w2 * spread(s2), w3 * spread(s3)))
    if not EXACT:
        value = value.to(tl.float32)
    value *= tl.load(out_scale_ptr + n, mask=n < N, other=0.0).to(value.dtype)[:, None]
    out = out_ptr + n[:, None].to(tl.int64) * out_stride + k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


# -----------------------------------------------------------------------------
# The decode kernel

class Maps(NamedTuple):
    """Tensor maps: a copy by the copy engine takes one tile of a matrix."""
    x: tl.tensor            # bf16 or fp16 (M, K)                    (BM, 128)
    codes: tl.tensor        # int16 (N/128 * K/128 * 128, 32)        (128, 32)
    scales: tl.tensor       # int32 (N/128 * K/128, 256)             (1, 256)
    a: tl.tensor            # as x (R, K), LoRA's A, or None         (64, 64)
    slabs: tl.tensor        # fp32 (S, M, N)                         (1, BM, 128)


class Ring(NamedTuple):
    """Blocks in shared memory, STAGES places of each."""
    x: tl.tensor            # (STAGES, BM, 128)
    codes: tl.tensor        # (STAGES, 128, 32); of A (64, 64) instead
    scales: tl.tensor       # (STAGES, 1, 256)
    full: tl.tensor         # barriers: completes when a block's bytes have arrived,
    empty: tl.tensor        # when it has been multiplied


class Share(NamedTuple):
    """What a program walks: blocks first .. last of W, or of A."""
    is_a: tl.tensor
    pid: tl.tensor          # among those of W
    m0: tl.tensor           # first row of x
    first: tl.tensor
    last: tl.tensor
    halves: tl.tensor       # steps to a block
    KB: tl.tensor
    L: tl.tensor


@triton.jit
def a_blocks(KB, L):
    """Of a program: each is more to read than one of W, so at most a quarter of K."""
    return tl.minimum(L, tl.cdiv(KB, 4))


@triton.jit
def a_pieces(KB, L):
    """How many slabs hold a part of x @ A.T."""
    return tl.cdiv(KB, a_blocks(KB, L))


@triton.jit
def pieces(column, KB, L):
    """How many slabs hold a part of this column of x @ W.T."""
    first = column // 128 * KB
    return (first + KB - 1) // L - first // L + 1


@gluon.jit
def _fetch_weights(maps: Maps, ring: Ring, share: Share, slot, step):
    """Start the copy of a step's weights to place `slot`: a block (128, 128), or (64, 64) of A."""
    HAS_A: gl.constexpr = maps.a is not None
    X_BYTES: gl.constexpr = ring.x.shape[1] * 256
    bar = ring.full.index(slot)
    if HAS_A and share.is_a:
        mbarrier.expect(bar, A_SIDE * A_SIDE * 2 + X_BYTES)
        a = ring.codes._reinterpret(maps.a.dtype, [ring.x.shape[0], A_SIDE, A_SIDE], ROWS_256B)
        row = share.first // share.KB * A_SIDE
        k = (share.first + step // 2) % share.KB * 128 + step % 2 * A_SIDE
        tma.async_copy_global_to_shared(maps.a, [row, k], bar, a.index(slot))
    else:
        mbarrier.expect(bar, 128 * 64 + 128 * 8 + X_BYTES)
        block = share.first + step
        tma.async_copy_global_to_shared(maps.codes, [block * 128, 0], bar, ring.codes.index(slot))
        tma.async_copy_global_to_shared(maps.scales, [block, 0], bar, ring.scales.index(slot))


@gluon.jit
def _fetch_x(maps: Maps, ring: Ring, share: Share, slot, step):
    """Start the copy of the x that a step multiplies."""
    k = (share.first + step // share.halves) % share.KB * 128
    bar = ring.full.index(slot)
    tma.async_copy_global_to_shared(maps.x, [share.m0, k], bar, ring.x.index(slot))


@gluon.jit
def _produce(maps: Maps, ring: Ring, share: Share, steps, AHEAD: gl.constexpr):
    """Keeps the ring full from step AHEAD on."""
    STAGES: gl.constexpr = ring.x.shape[0]
    for step in range(AHEAD, steps):
        slot = step % STAGES
        mbarrier.wait(ring.empty.index(slot), (step // STAGES & 1) ^ 1)
        _fetch_weights(maps, ring, share, slot, step)
        _fetch_x(maps, ring, share, slot, step)


@gluon.jit
def _times(plane, scale, W: gl.constexpr):
    """Times its scales, in the layout W of registers."""
    return plane * gl.convert_layout(spread(scale), W, assert_trivial=True)


@gluon.jit
def _product(acc, w, xs, k: gl.constexpr):
    """acc + w @ xs[:, k:k + columns of w].T, begun."""
    xs = xs.slice(k, w.shape[1], 1).permute((1, 0))
    return warpgroup_mma(w, xs, acc, is_async=True)


@gluon.jit
def _multiply(acc, words, word, xs, W: gl.constexpr):
    """acc + the product of a block, its last planes still under way.

    A plane keeps 16 registers until it has been multiplied. Where they suffice two planes make one
    product, which saves 5 % of the instructions; else never more than two are in the tensor cores.
    """
    s0, s1, s2, s3 = scales_of(word, xs.dtype)
    w0, w1 = planes_of(words, 0, xs.dtype)
    w2, w3 = planes_of(words, 2, xs.dtype)
    if acc.shape[1] == 32 or acc.shape[1] == 64:
        front = side_by_side(_times(w0, s0, W), _times(w1, s1, W))
        back = side_by_side(_times(w2, s2, W), _times(w3, s3, W))
        acc = _product(acc, gl.convert_layout(front, W, assert_trivial=True), xs, 0)
        return _product(acc, gl.convert_layout(back, W, assert_trivial=True), xs, 64)
    acc = _product(acc, _times(w0, s0, W), xs, 0)
    acc = _product(acc, _times(w1, s1, W), xs, 32)
    acc = warpgroup_mma_wait(1, deps=[acc])
    acc = _product(acc, _times(w2, s2, W), xs, 64)
    acc = warpgroup_mma_wait(1, deps=[acc])
    return _product(acc, _times(w3, s3, W), xs, 96)


@gluon.jit
def _store_piece(acc, slabs_ptr, maps: Maps, piece, row, rows, column, m0):
    """acc (C, BM) -> slabs[piece, m0:, column + row:], as much of it as lies below `rows` and M."""
    M = maps.x.shape[0]
    stride = maps.slabs.strides[1].to(gl.int32)
    n = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    m = m0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    out = slabs_ptr + piece * M * stride + column
    mask = (m < M)[None, :] & (n < rows)[:, None]
    gl.store(out + m[None, :] * stride + n[:, None], acc, mask=mask)


@gluon.jit
def _consume(maps: Maps, ring: Ring, share: Share, out, slabs_ptr, N):
    """Multiplies the share's blocks; a piece is stored wherever a tile of W ends."""
    HAS_A: gl.constexpr = maps.a is not None
    STAGES: gl.constexpr = ring.x.shape[0]
    BM: gl.constexpr = ring.x.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    KB = share.KB
    if HAS_A and share.is_a:
        a = ring.codes._reinterpret(ring.x.dtype, [STAGES, A_SIDE, A_SIDE], ROWS_256B)
        acc = gl.zeros([A_SIDE, BM], gl.float32, MMA)
        for i in range(0, 2 * (share.last - share.first), 2):
            for half in gl.static_range(2):
                slot = (i + half) % STAGES
                mbarrier.wait(ring.full.index(slot), (i + half) // STAGES & 1)
                xs = ring.x.index(slot).slice(half * A_SIDE, A_SIDE, 1).permute((1, 0))
                acc = warpgroup_mma(a.index(slot), xs, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(ring.empty.index(slot), count=1)
        piece = share.first % KB // a_blocks(KB, share.L)
        row = share.first // KB * A_SIDE
        _store_piece(acc, slabs_ptr, maps, piece, row, maps.a.shape[0], N, share.m0)
    else:
        i = 0
        block = share.first
        while block < share.last:
            tile = block // KB
            end = gl.minimum(share.last, tile * KB + KB)
            acc = gl.zeros([128, BM], gl.float32, MMA)
            for _ in range(block, end):
                slot = i % STAGES
                mbarrier.wait(ring.full.index(slot), i // STAGES & 1)
                word = ring.scales.index(slot).reshape([128, 2]).load(gl.SliceLayout(2, SCALED))
                acc = _multiply(acc, ring.codes.index(slot).load(W), word, ring.x.index(slot), W)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(ring.empty.index(slot), count=1)
                i += 1
            piece = share.pid - tile * KB // share.L
            if BM <= SENT_ROWS:
                tma.store_wait(0)  # the piece before has left
                out.store(acc.permute((1, 0)).reshape(1, BM, 128))
                fence_async_shared()  # what lies past N and M the copy engine drops
                tma.async_copy_shared_to_global(maps.slabs, [piece, share.m0, tile * 128], out)
            else:
                _store_piece(acc, slabs_ptr, maps, piece, tile * 128, N, 0, share.m0)
            block = end
        tma.store_wait(0)  # what is being sent must stay till it is


@gluon.jit(do_not_specialize=["KB", "L", "a_programs"])
def decode_kernel(
    x_desc, codes_desc, scales_desc, a_desc, slabs_desc,  # Maps; a_desc None: no adapter
    slabs_ptr,         # fp32 (S, M, width)    A's columns are N .. N + R
    N,                 # specialized: if 16 divides it, neighbouring rows of W share a mask
    KB,                # blocks of 128 along K
    L,                 # blocks that one program walks
    a_programs,        # of the grid's first axis, the first ones do x @ A.T
    config: gl.constexpr, # Config
    PDL: gl.constexpr,
):
    """Partial sums of x @ W.T, walked, transposed and stored as portable_fp4.py says at its top; W
    is the register operand of wgmma.

    A program is a warp group that decodes and multiplies, and one warp that keeps a ring of
    STAGES blocks in shared memory full, also between two tiles. The weights of the first AHEAD
    blocks are asked for before x exists (PDL); more would stand in front of x in the queue to
    memory. Programs that share a multiprocessor drift apart: one decodes while another multiplies.
    """
    BM: gl.constexpr = config.BM
    STAGES: gl.constexpr = config.num_stages
    AHEAD: gl.constexpr = config.ahead
    HAS_A: gl.constexpr = a_desc is not None
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, 128], ROWS_256B)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, 128, 32], ROWS_64B)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 256], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    out = gl.allocate_shared_memory(gl.float32, [1, config.sent, 128], SUMS)
    maps = Maps(x_desc, codes_desc, scales_desc, a_desc, slabs_desc)
    ring = Ring(x, codes, scales, full, empty)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = gl.program_id(0)
    is_a = pid < a_programs
    first = (pid - a_programs) * L
    end = gl.cdiv(N, 128) * KB
    length = L
    halves = 1
    if HAS_A and is_a:
        length = a_blocks(KB, L)
        halves = 2
        pieces_a = gl.cdiv(KB, length)
        first = pid // pieces_a * KB + pid % pieces_a * length
        end = pid // pieces_a * KB + KB
    last = gl.minimum(first + length, end)
    share = Share(is_a, pid - a_programs, gl.program_id(1) * BM, first, last, halves, KB, L)
    steps = (last - first) * halves
    for step in gl.static_range(AHEAD):
        if step < steps:
            _fetch_weights(maps, ring, share, step, step)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in gl.static_range(AHEAD):
        if step < steps:
            _fetch_x(maps, ring, share, step, step)
    gl.warp_specialize([
        (_consume, (maps, ring, share, out, slabs_ptr, N)),
        (_produce, (maps, ring, share, steps, AHEAD)),
    ], [1], [24])  # warps and registers of the producer


# -----------------------------------------------------------------------------
# Its launch: which tile for which M, who walks which blocks

class Slabs(NamedTuple):
    """x @ [W; A].T as split-K partial sums: whoever reads them adds up and finishes the linear.

    Column n < N of the product is scale[n] times its sum; columns N.. are x @ A.T, unscaled.
    pieces() tells from KB and L which slabs hold a part; the others hold anything.
    """
    sums: torch.Tensor      # fp32 (S, M, at least N + R)
    scale: torch.Tensor     # fp32 (N,)
    KB: int = 1             # blocks of 128 along K
    L: int = 1              # blocks that one program walked

    @property
    def most(self):
        """The most slabs of any column of x @ W.T, and those of x @ A.T."""
        blocks_of_a = min(self.L, -(-self.KB // 4))
        return (self.KB + self.L - 2) // self.L + 1, -(-self.KB // blocks_of_a)


class Config(NamedTuple):
    BM: int                 # rows of x in a tile
    num_stages: int         # blocks in the ring
    per_sm: int             # programs on a multiprocessor
    ahead: int              # blocks asked for before the kernel before is done

    @property
    def sent(self):
        """Rows of a sum in shared memory on its way out; 8 where it is stored directly."""
        return self.BM if self.BM <= SENT_ROWS.value else 8

    @property
    def maxnreg(self):
        """Registers of a thread at launch. The producer's 4 warps then keep 24 of them."""
        return 65536 // (256 * self.per_sm) // 8 * 8


# M at most -> Config
DEFAULTS = {
    8: Config(8, 4, 4, 4),
    16: Config(16, 3, 4, 2),
    32: Config(32, 3, 3, 1),
    64: Config(64, 3, 2, 1),
    256: Config(128, 2, 2, 1),
}
# (M at most, N, K) -> Config of a linear that another one suits better, by 1 us a layer of a decode
# step and a chain of linears together, in two runs on an H200: what `python bench.py tune` of
# commit 2c47a35 printed. The tuner was removed after 5814e75.
TUNED = {
    (8, 17920, 1536): Config(8, 6, 3, 2),
    (16, 1536, 8960): Config(16, 4, 3, 1),
    (32, 1536, 1536): Config(32, 5, 2, 2),
    (32, 1536, 8960): Config(32, 4, 2, 2),
    (8, 22016, 2048): Config(8, 4, 4, 2),
    (8, 2048, 11008): Config(8, 4, 3, 2),
    (32, 2560, 2048): Config(32, 5, 2, 2),
    (32, 2048, 11008): Config(32, 4, 2, 2),
    (16, 4608, 3584): Config(16, 4, 3, 1),
    (32, 3584, 3584): Config(32, 4, 2, 2),
    (32, 37888, 3584): Config(32, 5, 2, 2),
    (8, 7168, 5120): Config(8, 4, 3, 2),
    (16, 7168, 5120): Config(16, 4, 3, 2),
    (8, 5120, 5120): Config(8, 4, 3, 2),
    (16, 5120, 5120): Config(16, 5, 3, 2),
    (8, 55296, 5120): Config(8, 4, 3, 3),
}


def decode_config(N, K, M):
    bucket = next((m for m in DEFAULTS if M <= m), max(DEFAULTS))
    return TUNED.get((bucket, N, K), DEFAULTS[bucket])


class Schedule(NamedTuple):
    KB: int                 # blocks of a row of tiles
    L: int                  # blocks per program
    a_programs: int         # programs that do x @ A.T
    programs: int           # all of them
    S: int                  # slabs


@cache
def schedule(N, K, M, R, config, multiprocessors):
    """Cuts the weight stream into equal shares, so many that they fill the chip once."""
    KB = triton.cdiv(K, TILE)
    tiles = triton.cdiv(N, TILE)
    room = max(1, multiprocessors * config.per_sm // triton.cdiv(M, config.BM))
    for L in range(max(1, tiles * KB // room), tiles * KB + 1):
        pieces_a = Slabs(None, None, KB, L).most[1]
        a_programs = triton.cdiv(R, A_SIDE.value) * pieces_a
        programs = a_programs + triton.cdiv(tiles * KB, L)
        if programs <= room:
            break
    S = max((t * KB + KB - 1) // L - t * KB // L + 1 for t in range(tiles))
    return Schedule(KB, L, a_programs, programs, max(S, pieces_a if R else 0))


@cache
def multiprocessors_of(device):
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_plan(x, weight, lora_a, slabs, config):
    """Of a decode matmul, whose operands it checks -> R, Schedule, fp32 slabs (made if None)."""
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
    plan = schedule(weight.N, K, M, R, config, multiprocessors_of(weight.device))
    # rows of whole 16 bytes, as the copy engine wants
    shape = plan.S, M, triton.cdiv(weight.N + R, 4) * 4
    if slabs is None:
        slabs = torch.empty(shape, device=x.device)
    assert slabs.shape == shape, f"slabs must be {shape}: {slabs.shape}"
    return R, plan, slabs


def decode_matmul(x, weight, lora_a=None, slabs=None, pdl=False):
    """x (M, K) and lora_a (R, K) of the weight's dtype, M <= 256 or so -> Slabs, in `slabs` if
    given: (S, M, N + R), rows rounded up to whole 16 bytes. No row's bits depend on other rows.

    pdl (programmatic dependent launch): start while the kernel before still runs, fetch weights and
    A, which that kernel must not write, and wait for its end before reading x. The next kernel may
    do the same if it calls gdc_wait() before it touches slabs; all of such a chain must call it.
    """
    M, K = x.shape
    N = weight.N
    device = weight.device
    assert capability(device)[0] == 9, f"needs a Hopper GPU, the weight is on {device}"
    config = decode_config(N, K, M)
    R, plan, slabs = launch_plan(x, weight, lora_a, slabs, config)
    a_map = None
    if R:
        a_map = TensorDescriptor.from_tensor(lora_a, [A_SIDE.value] * 2, ROWS_256B.value)
    x_map = TensorDescriptor.from_tensor(x, [config.BM, TILE], ROWS_256B.value)
    out_map = TensorDescriptor.from_tensor(slabs[:, :, :N], [1, config.sent, TILE], SUMS.value)
    decode_kernel[plan.programs, triton.cdiv(M, config.BM)](
        x_map, *weight.maps, a_map, out_map, slabs, N, plan.KB, plan.L, plan.a_programs,
        config, PDL=pdl, num_warps=4, maxnreg=config.maxnreg, launch_pdl=pdl)
    return Slabs(slabs, weight.out_scale, plan.KB, plan.L)


@cache
def ones(n, device):
    return torch.ones(n, device=device)


def expanded_matmul(x, weight, lora_a=None):
    """As decode_matmul, for more rows and other formats: of the 16-bit W, in one slab."""
    N = weight.N
    R = 0 if lora_a is None else len(lora_a)
    slabs = torch.empty(1, len(x), N + R, device=x.device)
    mm_fp32(x, weight.dequantize().T, out=slabs[0, :, :N])
    if R:
        mm_fp32(x, lora_a.T, out=slabs[0, :, N:])
    return Slabs(slabs, ones(N, x.device))
