"""
Weight-only NVFP4 matmul for Hopper: y = x @ W.T, W in 4.5 bits a weight, x in bf16 or fp16, sums in fp32.

Why: sm_90 has no FP4 tensor cores, so FP4 can only save memory traffic. Decoding a token is bound by reading weights,
and at 4 TB/s an H200 has 4.4 issue slots per weight: the layout below exists to spend 2.5 of them. From a few hundred
rows on the tensor cores are the bound; there W is expanded once into x's type and cuBLAS does the rest.

Value of a weight; both scales multiply:
    W[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * row_scale[n]
row_scale is the tensor's global scale; a fused matrix (q|k|v, gate|up) may have a different one per part.

Layout ("planes"). W is cut into tiles of 128 x 128 (ragged edges padded with zeros), each one contiguous run of bytes:
    codes    int16 (N/128, K/128, 128, 32)    the word at [n, c] holds the codes of k = c, 32 + c, 64 + c, 96 + c
    scales   int32 (N/128, K/128, 128, 2)     eight bytes, one per 16 consecutive k
Bits of a word, s e e m being a code's sign, exponent and mantissa bits, the digit its plane (plane p is k = 32 p + c).
There are two orders, and pack() is told for which type of x:
    bit    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    bf16   s0 m3 s3 s1 e3 e3 s2 e0 e0 m0 e1 e1 m1 e2 e2 m2
    fp16   s0 s2 s3 s1 e0 e0 m0 e1 e1 m1 e2 e2 m2 e3 e3 m3

bf16. word & 0x81C0, (word << 3) & 0x81C0 and (word << 6) & 0x81C0 are planes 0..2 as bf16 numbers worth code * 2^-126
(E2M1's subnormal 0.5 becomes a bf16 subnormal). Plane 3 lies in the bits that are left: multiplying them by
1 + 2^5 + 2^10 puts all four where they belong at once. A plane meets a contiguous slice of x, so nothing is ever
interleaved, and two neighbouring words are one register of two numbers.
A scale v becomes the byte u = ((floor(log2 v) + 10) << 3) | 3 mantissa bits (E5M3 without sign), which holds every E4M3
value, subnormal ones included, as a normal number; u = 0 for v = 0, whose codes are cleared. 0x7000 | u << 4 is
v * 2^107 as a bf16 number, and code * 2^-126 * v * 2^107 = code * v * 2^-19 is exact in bf16 (6 significant bits).
Scale word h serves k in [32 p + 16 h, 32 p + 16 h + 16) of every plane p with u_p, and is the 32-bit number
u0 | u3 << 8 | u1 << 16 | u2 << 24 rotated left by 4: one AND-OR puts u0 and u1 in place as a bf16x2 register and, after
a rotation by 8, another does u2 and u3.

fp16. word & 0x8E00 and (word << 3) & 0x8E00 are planes 0 and 1, worth code * 2^-14 (0.5 a subnormal again; tensor cores
and multipliers take those at full speed). In planes 2 and 3 sign and digits have different ways to go, and one product
takes both: (word & 0x4038) * (2^1 + 2^6) and (word & 0x2007) * (2^2 + 2^9), & 0x8E00. What a product pushes into the
word above stays below bit 9. As many instructions as for bf16.
u = ((floor(log2 v) + 22) << 3) | 3 mantissa bits, the scale word is rotated left by 7, and u << 7 is v * 2^7 as it
stands; so code * 2^-14 * v * 2^7 = code * v * 2^-7 is at most 21 and a multiple of 2^-17: exact in fp16.

Who multiplies by what: decode_matmul leaves sums of code * v * 2^-19 * x (fp16: 2^-7), to be multiplied by
weight.out_scale (N,), which is row_scale * 2^19 (2^7). dequantize restores that power, and row_scale too where it is a
power of two (exact; in fp16 but for numbers below 2^-14, whose last bit is worth 2^-24); elsewhere weight.late_scale
says what is missing.

Not here: quantization and files (nvfp4.py), the LoRA product x @ A.T @ B.T (lora.py; decode_matmul only does x @ A.T),
a gradient for W (the base is frozen), 4-bit activations.

Shapes: M rows, N out_features, K in_features, R rows of LoRA's A, S split-K slabs, BM rows of x in a tile.
"""
from dataclasses import dataclass, replace
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

BLOCK = 16                                      # weights per scale
TILE = 128                                      # side of a packed tile
ROWS_256B = tl.constexpr(gl.NVMMASharedLayout(128, 16))              # in shared memory: rows of x and of A,
ROWS_64B = tl.constexpr(gl.NVMMASharedLayout(64, 16))                # of codes, swizzled against bank conflicts,
FLAT = tl.constexpr(gl.NVMMASharedLayout(0, 32))                     # scales,
SUMS = tl.constexpr(gl.NVMMASharedLayout(128, 32, rank=3))           # fp32 sums on their way out
SCALED = tl.constexpr(gl.DistributedLinearLayout(    # (128, 2, 16) in registers: scales beside the weights they serve
    [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [64, 0, 0]], [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[16, 0, 0], [32, 0, 0]], [], [128, 2, 16]))
SENT_ROWS = tl.constexpr(64)                    # rows of x up to which shared memory has room for a sum on its way out
A_SIDE = tl.constexpr(64)                       # side of a tile of LoRA's A: the bytes of a tile of codes
CROSSOVER = 256                                 # matmul: rows up to which the decode kernel beats expanding W
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Order(NamedTuple):
    """What the two orders at the top of the file do differently, apart from the bits of a word."""
    bias: int                                   # of the exponent in a scale's byte
    turn: int                                   # bits by which a scale word is rotated
    power: int                                  # the kernel multiplies x by code * v * 2^-power


ORDERS = {torch.bfloat16: Order(10, 4, 19), torch.float16: Order(22, 7, 7)}


# -----------------------------------------------------------------------------
# Format: nibbles <-> planes, E4M3 <-> E5M3. Plain torch, any device.

def _to_words(codes, dtype):
    """(..., 128) codes 0..15 as int32 -> (..., 32) int16 words in the bit order of the top of the file."""
    sign, eem = codes >> 3, codes & 7
    p0, p1, p2, p3 = ((sign << 15) | (eem << (9 if dtype == torch.float16 else 6))).unflatten(-1, (4, 32)).unbind(-2)
    if dtype == torch.float16:
        p2, p3 = ((p2 & 0x8000) >> 1) | ((p2 & 0x0E00) >> 6), ((p3 & 0x8000) >> 2) | ((p3 & 0x0E00) >> 9)
    else:
        p2, p3 = p2 >> 6, ((p3 & 0x8000) >> 2) | ((p3 & 0x0180) << 3) | ((p3 & 0x0040) << 8)
    return (p0 | (p1 >> 3) | p2 | p3).to(torch.int16)


def _to_codes(words, dtype):
    """Inverse of _to_words: (..., 32) int16 -> (..., 128) codes 0..15 as int32."""
    q = words.to(torch.int32)
    if dtype == torch.float16:
        placed = torch.cat([q, q << 3, (q & 0x4038) * (2**1 + 2**6), (q & 0x2007) * (2**2 + 2**9)], dim=-1)
        return ((placed >> 12) & 8) | ((placed >> 9) & 7)
    placed = torch.cat([q, q << 3, q << 6, ((q & 0x6C00) >> 8) * (1 + 2**5 + 2**10)], dim=-1)
    return ((placed >> 12) & 8) | ((placed >> 6) & 7)


def _to_scale_words(scale, order):
    """(..., 8) fp32 E4M3 values >= 0 in the order of k -> (..., 2) int32, the rotated words of the top of the file."""
    mantissa, exponent = torch.frexp(scale)                          # v = mantissa * 2^exponent, mantissa in [0.5, 1)
    u = ((exponent.long() - 1 + order.bias) << 3) | ((mantissa * 16).long() & 7)
    u0, u1, u2, u3 = torch.where(scale > 0, u, 0).unflatten(-1, (4, 2)).unbind(-2)
    word = u0 | u3 << 8 | u1 << 16 | u2 << 24                        # int64 (..., 2)
    word = ((word << order.turn) & 0xFFFFFFFF) | (word >> (32 - order.turn))
    return (word - ((word >> 31) << 32)).to(torch.int32)             # the same 32 bits, signed


def _from_scale_words(word, order):
    """Inverse of _to_scale_words: (..., 2) int32 -> (..., 8) fp32 values in the order of k."""
    word = word.long() & 0xFFFFFFFF
    word = (word >> order.turn) | ((word << (32 - order.turn)) & 0xFFFFFFFF)
    u = torch.stack([(word >> shift) & 255 for shift in (0, 16, 24, 8)], dim=-2).flatten(-2)
    return torch.where(u > 0, torch.ldexp(1 + (u & 7).float() / 8, (u >> 3) - order.bias), 0.0)


def _tiles(t, columns):
    """(N, C) -> contiguous (N/128, C/columns, 128, columns), zero padded to whole tiles."""
    t = torch.nn.functional.pad(t, (0, -t.shape[1] % columns, 0, -t.shape[0] % TILE))
    return t.unflatten(0, (-1, TILE)).unflatten(2, (-1, columns)).transpose(1, 2).contiguous()


def _untile(t):
    """Inverse of _tiles, padding included."""
    return t.transpose(1, 2).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One frozen (N, K) NVFP4 weight in the layout above. Made by pack()."""
    N: int
    K: int
    codes: torch.Tensor                         # int16 (N/128, K/128, 128, 32)
    scales: torch.Tensor                        # int32 (N/128, K/128, 128, 2)
    row_scale: torch.Tensor                     # fp32 (N,)
    out_scale: torch.Tensor                     # fp32 (N,) = row_scale * 2^19 or 2^7, what slabs are multiplied by
    power_of_two: bool                          # every row_scale is one: dequantize() then includes it, exactly
    dtype: torch.dtype                          # of the x that decode_matmul takes: the order of codes and scales

    @property
    def device(self):
        return self.codes.device

    @property
    def late_scale(self):
        """What a product with dequantize() must still be multiplied by, per row: None or fp32 (N,)."""
        return None if self.power_of_two else self.row_scale

    def to(self, device):
        moved = {name: getattr(self, name).to(device) for name in ("codes", "scales", "row_scale", "out_scale")}
        return replace(self, **moved)

    def unpack(self):
        """-> packed uint8 (N, K // 2), block_scale e4m3 (N, K // 16), row_scale fp32 (N,): what pack() was given.

        Codes under a zero scale come back as zeros.
        """
        codes = _untile(_to_codes(self.codes, self.dtype))[:self.N, :self.K]
        packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        scale = _untile(_from_scale_words(self.scales, ORDERS[self.dtype]))[:self.N, :self.K // BLOCK]
        return packed, scale.to(torch.float8_e4m3fn), self.row_scale

    def dequantize(self, out=None, dtype=None):
        """-> W (N, K), without late_scale. `out` may have any row stride: a column slice of a wider buffer is fine."""
        if out is None:
            out = torch.empty(self.N, self.K, dtype=dtype or self.dtype, device=self.device)
        assert out.shape == (self.N, self.K), f"out is {tuple(out.shape)}, the weight {(self.N, self.K)}"
        assert out.device == self.device, f"out on {out.device}, the weight on {self.device}"
        assert out.stride(1) == 1, f"out must have unit column stride, got strides {out.stride()}"
        if self.codes.is_cuda:
            _dequantize_gpu(self, out)
        else:
            out.copy_(self.dense)
        return out

    @cached_property
    def tiles(self):
        """Tensor maps of codes and scales, one tile a copy."""
        return (TensorDescriptor.from_tensor(self.codes.view(-1, TILE // 4), [TILE, TILE // 4], ROWS_64B.value),
                TensorDescriptor.from_tensor(self.scales.view(-1, 2 * TILE), [1, 2 * TILE], FLAT.value))

    @cached_property
    def dense(self):
        """The fp32 W (N, K) without late_scale, kept: on a CPU speed matters more than memory."""
        codes = _untile(_to_codes(self.codes, self.dtype))
        value = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=self.device)[codes]
        scale = _untile(_from_scale_words(self.scales, ORDERS[self.dtype]))
        w = (value * scale.repeat_interleave(BLOCK, dim=1))[:self.N, :self.K]
        return w * self.row_scale[:, None] if self.power_of_two else w.contiguous()


def pack(packed, block_scale, global_scale, dtype=torch.bfloat16):
    """nvfp4.quantize's packed uint8 (N, K // 2), block_scale e4m3 (N, K // 16) and global_scale fp32 () or (N,).

    dtype: of the x to come. fp32 is a CPU's, which reads either order.
    """
    N, K = packed.shape[0], packed.shape[1] * 2
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    assert dtype in ORDERS, f"dtype must be bf16, fp16 or fp32, got {dtype}"
    assert packed.dtype == torch.uint8, f"packed must be uint8, got {packed.dtype}"
    assert K % BLOCK == 0, f"{K=} must be a multiple of {BLOCK}, the weights of one scale ({N=})"
    assert block_scale.dtype == torch.float8_e4m3fn, f"block_scale must be float8_e4m3fn, got {block_scale.dtype}"
    assert block_scale.shape == (N, K // BLOCK), f"block_scale is {tuple(block_scale.shape)}, not {(N, K // BLOCK)}"
    assert global_scale.dtype == torch.float32, f"global_scale must be fp32, got {global_scale.dtype}"
    assert global_scale.numel() in (1, N), f"global_scale must be () or {(N,)}, got {tuple(global_scale.shape)}"
    worst = block_scale.float().min() if not block_scale.float().isnan().any() else float("nan")
    assert worst >= 0, f"block scales must be >= 0 and finite, got {worst}"
    row_scale = global_scale.to(packed.device).reshape(-1).expand(N).contiguous()
    good = row_scale.isfinite() & (row_scale > 0)
    assert good.all(), f"global_scale must be finite and above 0, got {row_scale[~good][0]}"
    power_of_two = bool((torch.frexp(row_scale).mantissa.abs() == 0.5).all())

    scale = _tiles(block_scale.float(), TILE // BLOCK)               # e4m3 values; padding and true zeros are 0
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    words = torch.empty(*scale.shape[:3], TILE // 4, dtype=torch.int16, device=packed.device)
    for i in range(scale.shape[0]):                                  # a row of tiles at a time: codes are 8x as big
        rows = _tiles(codes[i * TILE:(i + 1) * TILE], TILE)[0].to(torch.int32)
        words[i] = _to_words(rows.masked_fill((scale[i] == 0).repeat_interleave(BLOCK, dim=-1), 0), dtype)
    order = ORDERS[dtype]
    return PackedWeight(N, K, words, _to_scale_words(scale, order), row_scale, row_scale * 2**order.power, power_of_two,
                        dtype)


# -----------------------------------------------------------------------------
# Kernels. Inline assembly where it saves instructions that the compiler would spend on 16-bit lanes.

@triton.jit
def _front_planes(words, dtype: tl.constexpr):
    """int16 words -> planes 0 and 1 of the same shape, code * 2^-126 (fp16: 2^-14): 3 instructions per 4 weights."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise("""
        {
        .reg .b32 t;
        and.b32 $0, $2, 0x8E008E00;
        shl.b32 t, $2, 3;
        and.b32 $1, t, 0x8E008E00;
        }""", "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise("""
        {
        .reg .b32 t;
        and.b32 $0, $2, 0x81C081C0;
        shl.b32 t, $2, 3;
        and.b32 $1, t, 0x81C081C0;
        }""", "=&r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@triton.jit
def _back_planes(words, dtype: tl.constexpr):
    """int16 words -> planes 2 and 3: 6 instructions per 4 weights."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise("""
        {
        .reg .b32 t;
        and.b32 t, $2, 0x40384038;
        mul.lo.u32 t, t, 66;
        and.b32 $0, t, 0x8E008E00;
        and.b32 t, $2, 0x20072007;
        mul.lo.u32 t, t, 516;
        and.b32 $1, t, 0x8E008E00;
        }""", "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise("""
        {
        .reg .b32 t;
        shl.b32 t, $2, 6;
        and.b32 $0, t, 0x81C081C0;
        and.b32 t, $2, 0x6C006C00;
        shr.u32 t, t, 8;
        mul.lo.u32 t, t, 1057;
        and.b32 $1, t, 0x81C081C0;
        }""", "=&r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@triton.jit
def _scales(word, dtype: tl.constexpr):
    """int32 scale words -> four tensors of the same shape, one a plane, v * 2^107 (fp16: 2^7): 3 instructions per 4."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise("""
        {
        .reg .b32 t;
        and.b32 t, $4, 0x7F807F80;
        mov.b32 {$0, $1}, t;
        shf.l.wrap.b32 t, $4, $4, 8;
        and.b32 t, t, 0x7F807F80;
        mov.b32 {$2, $3}, t;
        }""", "=h,=h,=h,=h,r", [word], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("""
        {
        .reg .b32 t;
        lop3.b32 t, $4, 0x0FF00FF0, 0x70007000, 0xEA;
        mov.b32 {$0, $1}, t;
        shf.l.wrap.b32 t, $4, $4, 8;
        lop3.b32 t, t, 0x0FF00FF0, 0x70007000, 0xEA;
        mov.b32 {$2, $3}, t;
        }""", "=h,=h,=h,=h,r", [word], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=1)


@triton.jit
def _scaled(plane, scale):
    """(128, 32) codes times (128, 2) scales -> (128, 32) code * v * 2^-19 (fp16: 2^-7), exact."""
    return plane * tl.broadcast_to(scale[:, :, None], (128, 2, 16)).reshape(128, 32)


@triton.jit
def _side_by_side(a, b):
    """(128, C), (128, C) -> (128, 2 C); only renames registers."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def dequantize_kernel(
    codes_ptr,         # int16 (N/128, K/128, 128, 32)
    scales_ptr,        # int32 (N/128, K/128, 128, 2)
    out_scale_ptr,     # fp32  (N,)            2^POWER * row_scale; read only if ROW_SCALE
    out_ptr,           # bf16, fp16 or fp32 (N, K)   row stride out_stride
    N, K, out_stride,
    ROW_SCALE: tl.constexpr, FP16: tl.constexpr, POWER: tl.constexpr,
):
    """One program expands one 128 x 128 tile. Exact: row_scale is a power of two where ROW_SCALE, else left out."""
    dtype: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    tile_k, tile_n = tl.program_id(0), tl.program_id(1)
    tile = (tile_n * tl.num_programs(0) + tile_k).to(tl.int64)
    row, c, h, k = tl.arange(0, 128), tl.arange(0, 32), tl.arange(0, 2), tile_k * 128 + tl.arange(0, 128)
    n = tile_n * 128 + row
    words = tl.load(codes_ptr + tile * 4096 + row[:, None] * 32 + c[None, :])
    w0, w1 = _front_planes(words, dtype)
    w2, w3 = _back_planes(words, dtype)
    s = _scales(tl.load(scales_ptr + tile * 256 + row[:, None] * 2 + h[None, :]), dtype)
    # whole rows of 256 bytes rather than 64 bytes a plane: see docs/kernel_log.md
    front = _side_by_side(_scaled(w0, s[0]), _scaled(w1, s[1]))
    back = _side_by_side(_scaled(w2, s[2]), _scaled(w3, s[3]))
    value = _side_by_side(front, back)
    if FP16 and out_ptr.dtype.element_ty != dtype:
        value = value.to(tl.float32)                                 # whose range has room for any row_scale
    if ROW_SCALE:
        factor = tl.load(out_scale_ptr + n, mask=n < N, other=0.0).to(value.dtype)
    else:
        factor = tl.full((128,), 2.0**POWER, dtype=value.dtype)
    value = value * factor[:, None]
    out = out_ptr + n[:, None].to(tl.int64) * out_stride + k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def _dequantize_gpu(weight, out):
    grid = weight.codes.shape[1], weight.codes.shape[0]
    with torch.cuda.device(out.device):
        dequantize_kernel[grid](weight.codes, weight.scales, weight.out_scale, out, weight.N, weight.K, out.stride(0),
                                ROW_SCALE=weight.power_of_two, FP16=weight.dtype == torch.float16,
                                POWER=ORDERS[weight.dtype].power, num_warps=8)


@triton.jit
def a_blocks(KB, L):
    """Blocks of A to a program: a block of A is more to read than one of W, so a quarter of K at the most."""
    return tl.minimum(L, tl.cdiv(KB, 4))


@gluon.jit
def _fetch_weights(codes_desc, scales_desc, a_desc, codes, scales, full, slot, step, first, KB, is_a, BM: gl.constexpr,
                   HAS_A: gl.constexpr):
    """Start the copy of a step's weights to place `slot`: a block (128, 128), or half a block of A, (64, 64)."""
    bar = full.index(slot)
    if HAS_A and is_a:
        mbarrier.expect(bar, A_SIDE * A_SIDE * 2 + BM * 256)         # x included
        a = codes._reinterpret(a_desc.dtype, [codes.shape[0], A_SIDE, A_SIDE], ROWS_256B)
        k = (first + step // 2) % KB * 128 + step % 2 * A_SIDE
        tma.async_copy_global_to_shared(a_desc, [first // KB * A_SIDE, k], bar, a.index(slot))
    else:
        mbarrier.expect(bar, 128 * 64 + 128 * 8 + BM * 256)
        tma.async_copy_global_to_shared(codes_desc, [(first + step) * 128, 0], bar, codes.index(slot))
        tma.async_copy_global_to_shared(scales_desc, [first + step, 0], bar, scales.index(slot))


@gluon.jit
def _fetch_x(x_desc, x, full, slot, step, first, KB, halves, m0):
    """Start the copy of the x that a step multiplies."""
    tma.async_copy_global_to_shared(x_desc, [m0, (first + step // halves) % KB * 128], full.index(slot), x.index(slot))


@gluon.jit
def _produce(x_desc, codes_desc, scales_desc, a_desc, x, codes, scales, full, empty, m0, first, steps, KB, is_a, halves,
             BM: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, HAS_A: gl.constexpr):
    """Keeps the ring full from step AHEAD on."""
    for step in range(AHEAD, steps):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
        _fetch_weights(codes_desc, scales_desc, a_desc, codes, scales, full, slot, step, first, KB, is_a, BM, HAS_A)
        _fetch_x(x_desc, x, full, slot, step, first, KB, halves, m0)


@gluon.jit
def _times(plane, scale, W: gl.constexpr):
    """As _scaled, in Gluon, where the layout of W in registers is ours to say."""
    wide, _ = gl.broadcast(gl.expand_dims(scale, 2), gl.zeros([128, 2, 16], plane.dtype, SCALED))
    return plane * gl.convert_layout(gl.reshape(wide, [128, 32]), W, assert_trivial=True)


@gluon.jit
def _pair(a, b, W: gl.constexpr):
    """(128, 32), (128, 32) -> (128, 64), side by side; only renames registers."""
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [128, 64]), W, assert_trivial=True)


@gluon.jit
def _multiply(acc, words, word, xs, W: gl.constexpr):
    """acc + the product of a block, its last planes still under way: they are multiplied while the next are decoded.

    A plane keeps 16 registers until it has been multiplied. Where they suffice two planes make one product, which saves
    5 % of the instructions; else never more than two are in the tensor cores.
    """
    s0, s1, s2, s3 = _scales(word, xs.dtype)
    w0, w1 = _front_planes(words, xs.dtype)
    w2, w3 = _back_planes(words, xs.dtype)
    if acc.shape[1] == 32 or acc.shape[1] == 64:
        front, back = _pair(_times(w0, s0, W), _times(w1, s1, W), W), _pair(_times(w2, s2, W), _times(w3, s3, W), W)
        acc = warpgroup_mma(front, xs.slice(0, 64, 1).permute((1, 0)), acc, is_async=True)
        return warpgroup_mma(back, xs.slice(64, 64, 1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(_times(w0, s0, W), xs.slice(0, 32, 1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(_times(w1, s1, W), xs.slice(32, 32, 1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    acc = warpgroup_mma(_times(w2, s2, W), xs.slice(64, 32, 1).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    return warpgroup_mma(_times(w3, s3, W), xs.slice(96, 32, 1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _store_piece(acc, slabs_ptr, piece, row, rows, column, m0, M, row_stride, MMA: gl.constexpr):
    """acc (C, BM) -> slabs[piece, m0:, column + row:], as much of it as lies below `rows` and M."""
    n = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, MMA))
    m = m0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, MMA))
    out = slabs_ptr + piece * M * row_stride + column
    gl.store(out + m[None, :] * row_stride + n[:, None], acc, mask=(m < M)[None, :] & (n < rows)[:, None])


@gluon.jit
def _send_piece(acc, out, slabs_desc, piece, row, m0):
    """acc (128, BM) -> slabs[piece, m0:, row:] by shared memory; the copy engine drops what lies past N and M."""
    tma.store_wait(0)                                                # the piece before has left
    out.store(acc.permute((1, 0)).reshape(1, acc.shape[1], 128))
    fence_async_shared()
    tma.async_copy_shared_to_global(slabs_desc, [piece, m0, row], out)


@gluon.jit
def _consume(x, codes, scales, out, full, empty, slabs_desc, slabs_ptr, m0, pid, first, last, M, N, R, row_stride,
             KB, L, is_a, BM: gl.constexpr, STAGES: gl.constexpr, HAS_A: gl.constexpr):
    """Blocks first..last; a piece is stored wherever a tile of W ends."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if HAS_A and is_a:
        a = codes._reinterpret(x.dtype, [STAGES, A_SIDE, A_SIDE], ROWS_256B)
        acc = gl.zeros([A_SIDE, BM], gl.float32, MMA)
        for i in range(0, 2 * (last - first), 2):
            for half in gl.static_range(2):
                slot = (i + half) % STAGES
                mbarrier.wait(full.index(slot), (i + half) // STAGES & 1)
                xs = x.index(slot).slice(half * A_SIDE, A_SIDE, 1).permute((1, 0))
                acc = warpgroup_mma(a.index(slot), xs, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(slot), count=1)
        piece = first % KB // a_blocks(KB, L)
        _store_piece(acc, slabs_ptr, piece, first // KB * A_SIDE, R, N, m0, M, row_stride, MMA)
    else:
        i = 0
        block = first
        while block < last:
            tile = block // KB
            end = gl.minimum(last, tile * KB + KB)
            acc = gl.zeros([128, BM], gl.float32, MMA)
            for _ in range(block, end):
                slot = i % STAGES
                mbarrier.wait(full.index(slot), i // STAGES & 1)
                word = scales.index(slot).reshape([128, 2]).load(gl.SliceLayout(2, SCALED))
                acc = _multiply(acc, codes.index(slot).load(W), word, x.index(slot), W)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(slot), count=1)
                i += 1
            piece = pid - tile * KB // L
            if BM <= SENT_ROWS:
                _send_piece(acc, out, slabs_desc, piece, tile * 128, m0)
            else:
                _store_piece(acc, slabs_ptr, piece, tile * 128, N, 0, m0, M, row_stride, MMA)
            block = end
        tma.store_wait(0)                                            # what is being sent must stay till it is


@gluon.jit(do_not_specialize=["M", "KB", "L", "a_programs", "total"])
def decode_kernel(
    x_desc,            # bf16 or fp16 (M, K)          tensor maps: a copy brings (BM, 128),
    codes_desc,        # int16 (N/128 * K/128 * 128, 32)                         (128, 32),
    scales_desc,       # int32 (N/128 * K/128, 256)                              (1, 256),
    a_desc,            # as x  (R, K)                                            (64, 64) of LoRA's A, if HAS_A
    slabs_desc,        # fp32  (S, M, N)              and takes                  (1, BM, 128) away
    slabs_ptr,         # fp32  (S, M, row_stride)     the same, and A's columns N.. N + R
    M, N, R, row_stride,
    KB,                # blocks of 128 along K
    L,                 # blocks that one program walks
    a_programs,        # of the grid's first axis, the first ones do x @ A.T
    total,             # blocks of W: (N/128) * KB
    BM: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, HAS_A: gl.constexpr, PDL: gl.constexpr,
):
    """Partial sums of x @ W.T: a program walks L consecutive blocks of the weight stream, (128, 128) weights each.

    The stream runs along K inside a row of tiles, then to the next row of tiles, and all programs do the same work
    whatever N and K (stream-K). Where it ends a tile or its own share, it stores the sum as piece number `piece` of
    that tile, counted from the program that started the tile; `pieces` says how many there are. The sum is transposed,
    (128, BM): W is the register operand of the tensor cores and M their short side, so that 1 row wastes 7 of 8
    columns and not 63 of 64 rows.

    A program is a warp group that decodes and multiplies, and one warp that keeps a ring of STAGES blocks in shared
    memory full: full[slot] completes when a block's bytes have arrived, empty[slot] when it has been multiplied. It
    does not stop between two tiles. The weights of the first AHEAD blocks are asked for before x exists (PDL); more of
    them would stand in front of x in the queue to memory. Programs that share a multiprocessor drift apart: one decodes
    while another keeps the tensor cores busy.
    """
    pid = gl.program_id(0)
    m0 = gl.program_id(1) * BM
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, 128], ROWS_256B)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, 128, 32], ROWS_64B)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 256], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    out = gl.allocate_shared_memory(gl.float32, [1, BM if BM <= SENT_ROWS else 8, 128], SUMS)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    if PDL:                                                          # let the next kernel's programs take freed places
        tl.extra.cuda.gdc_launch_dependents()
    is_a = pid < a_programs
    first, end, share, halves = (pid - a_programs) * L, total, L, 1  # halves: steps to a block
    if HAS_A and is_a:
        share, halves = a_blocks(KB, L), 2
        pieces_a = gl.cdiv(KB, share)
        first, end = pid // pieces_a * KB + pid % pieces_a * share, pid // pieces_a * KB + KB
    last = gl.minimum(first + share, end)
    pid -= a_programs
    steps = (last - first) * halves
    for step in gl.static_range(AHEAD):
        if step < steps:
            _fetch_weights(codes_desc, scales_desc, a_desc, codes, scales, full, step, step, first, KB, is_a, BM, HAS_A)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in gl.static_range(AHEAD):
        if step < steps:
            _fetch_x(x_desc, x, full, step, step, first, KB, halves, m0)
    gl.warp_specialize([
        (_consume, (x, codes, scales, out, full, empty, slabs_desc, slabs_ptr, m0, pid, first, last, M, N, R,
                    row_stride, KB, L, is_a, BM, STAGES, HAS_A)),
        (_produce, (x_desc, codes_desc, scales_desc, a_desc, x, codes, scales, full, empty, m0, first, steps, KB, is_a,
                    halves, BM, STAGES, AHEAD, HAS_A)),
    ], [1], [24])                                                    # warps and registers of the producer


@triton.jit
def a_pieces(KB, L):
    """How many slabs hold a part of x @ A.T."""
    return tl.cdiv(KB, a_blocks(KB, L))


@triton.jit
def pieces(column, KB, L):
    """How many slabs hold a part of this column of x @ W.T. Of x @ A.T: a_pieces."""
    first = column // 128 * KB
    return (first + KB - 1) // L - first // L + 1


@triton.jit(do_not_specialize=["M", "KB", "L"])
def finish_kernel(
    slabs_ptr,         # fp32 (S, M, row_stride)
    scale_ptr,         # fp32 (N,)
    out_ptr,           # (M, N)
    M, N, row_stride, KB, L, BM: tl.constexpr,
):
    """out = the sum of the slabs * scale, for BM rows and 128 columns."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * 128 + tl.arange(0, 128)
    live = (m < M)[:, None] & (n < N)[None, :]
    y = tl.zeros((BM, 128), tl.float32)
    for s in range(pieces(tl.program_id(1) * 128, KB, L)):
        y += tl.load(slabs_ptr + s * M * row_stride + m[:, None] * row_stride + n[None, :], mask=live, other=0.0)
    y *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=live)


# -----------------------------------------------------------------------------
# Host side of the decode kernel: which tile for which M, who walks which blocks.

class Config(NamedTuple):
    """How decode_kernel is launched."""
    BM: int                                     # rows of x in a tile
    num_stages: int                             # blocks in the ring
    per_sm: int                                 # programs on a multiprocessor
    ahead: int                                  # blocks asked for before the kernel before is done

    @property
    def sent(self):
        """Rows of a sum that a program has room for on its way out; 8 where it has not and stores it directly."""
        return self.BM if self.BM <= SENT_ROWS.value else 8

    @property
    def maxnreg(self):
        """Registers of a thread at launch. Then the producer's 4 warps keep 24 each, the consumer's take the rest."""
        return 65536 // (256 * self.per_sm) // 8 * 8


# M at most -> Config; TUNED: (M at most, N, K) -> Config of a linear that another one suits better, by 1 us a layer of
# a decode step and a chain of linears together: lines of `python bench.py tune`, seen in two runs.
DEFAULTS = {
    8: Config(8, 4, 4, 4),
    16: Config(16, 3, 4, 2),
    32: Config(32, 3, 3, 1),
    64: Config(64, 3, 2, 1),
    128: Config(128, 2, 2, 1),
    256: Config(128, 2, 2, 1),
}
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
    KB: int                                     # blocks of a row of tiles
    L: int                                      # blocks per program
    a_programs: int                             # programs that do x @ A.T
    programs: int                               # all of them
    S: int                                      # slabs


@cache
def schedule(N, K, M, R, config, multiprocessors):
    """Cuts the weight stream into equal shares, so many that they fill the chip once."""
    KB, tiles = triton.cdiv(K, TILE), triton.cdiv(N, TILE)
    room = max(1, multiprocessors * config.per_sm // triton.cdiv(M, config.BM))
    L = max(1, tiles * KB // room)
    while True:
        pieces_a = Slabs(None, KB, L).most[1]
        a_programs = triton.cdiv(R, A_SIDE.value) * pieces_a
        programs = a_programs + triton.cdiv(tiles * KB, L)
        if programs <= room or L >= KB * tiles:
            break
        L += 1
    S = max((t * KB + KB - 1) // L - t * KB // L + 1 for t in range(tiles))
    return Schedule(KB, L, a_programs, programs, max(S, pieces_a if R else 0))


@cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def runs_on(device):
    """Whether decode_kernel does: it is written for Hopper's wgmma and copy engine. Elsewhere W is expanded."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


class Slabs(NamedTuple):
    """Partial sums of a linear: the sum of the first pieces(n, KB, L) slabs is column n of x @ W.T / out_scale, that of
    the first a_pieces(KB, L) column N + r of x @ lora_a.T. Slabs past those hold anything."""
    sums: torch.Tensor                          # fp32 (S, M, at least N + R)
    KB: int
    L: int

    @property
    def most(self):
        """Slabs that any column of x @ W.T has at most, and all of x @ A.T have: pieces and a_pieces, on the host."""
        return (self.KB + self.L - 2) // self.L + 1, triton.cdiv(self.KB, min(self.L, triton.cdiv(self.KB, 4)))


def decode_matmul(x, weight, lora_a=None, slabs=None, pdl=False, config=None):
    """x (M, K) of the weight's dtype, M <= 256 or so, and lora_a (R, K) of it or None -> Slabs.

    A row's bits do not depend on the other rows; nothing is allocated if slabs is given: (S, M, N + R), rows
    rounded up to whole 16 bytes.
    pdl (programmatic dependent launch): start while the kernel before on the stream still runs, fetch weights and A,
    which that kernel must not write, and wait for its end before reading x. A kernel after it may do the same, launched
    with launch_pdl=True, if it calls tl.extra.cuda.gdc_wait() before it touches slabs; every kernel of such a chain
    must call it.
    """
    (M, K), N = x.shape, weight.N
    R = 0 if lora_a is None else lora_a.shape[0]
    assert runs_on(weight.device), f"decode_matmul needs a Hopper GPU, the weight is on {weight.device}"
    assert x.dtype == weight.dtype, f"x must be {weight.dtype}, as the weight was packed for, got {x.dtype}"
    assert x.device == weight.device, f"x is on {x.device}, the weight on {weight.device}"
    assert K == weight.K, f"x has {K=}, the weight N={N}, K={weight.K}"
    assert x.stride(1) == 1 and x.stride(0) % 8 == 0, f"x rows must be contiguous and 16-byte aligned: {x.stride()}"
    if lora_a is not None:
        assert lora_a.dtype == x.dtype and lora_a.shape[1] == K, (lora_a.dtype, tuple(lora_a.shape), K)
        assert lora_a.is_contiguous() and lora_a.device == x.device, (lora_a.stride(), lora_a.device)
    config = config or decode_config(N, K, M)
    plan = schedule(N, K, M, R, config, _multiprocessors(weight.device))
    width = triton.cdiv(N + R, 4) * 4                                # rows of whole 16 bytes, as the copy engine wants
    if slabs is None:
        slabs = torch.empty(plan.S, M, width, dtype=torch.float32, device=x.device)
    assert slabs.dtype == torch.float32 and slabs.is_contiguous(), (slabs.dtype, slabs.stride())
    assert slabs.shape == (plan.S, M, width), f"slabs must be {(plan.S, M, width)}, got {tuple(slabs.shape)}"
    a_tiles = TensorDescriptor.from_tensor(lora_a if R else x, [A_SIDE.value] * 2, ROWS_256B.value)
    out_tiles = TensorDescriptor.from_tensor(slabs[:, :, :N], [1, config.sent, TILE], SUMS.value)
    x_tiles = TensorDescriptor.from_tensor(x, [config.BM, TILE], ROWS_256B.value)
    decode_kernel[(plan.programs, triton.cdiv(M, config.BM))](
        x_tiles, *weight.tiles, a_tiles, out_tiles, slabs, M, N, R, slabs.shape[2], plan.KB, plan.L, plan.a_programs,
        weight.codes.shape[0] * plan.KB, BM=config.BM, STAGES=config.num_stages, AHEAD=config.ahead, HAS_A=R > 0,
        PDL=pdl, num_warps=4, maxnreg=config.maxnreg, launch_pdl=pdl)
    return Slabs(slabs, plan.KB, plan.L)


def finish(slabs, scale, out_dtype=torch.float32):
    """Slabs and scale (N,) fp32 -> x @ W.T (M, N), the adapter's columns left out."""
    (_, M, row_stride), N, BM = slabs.sums.shape, len(scale), 4
    out = torch.empty(M, N, dtype=out_dtype, device=scale.device)
    grid = triton.cdiv(M, BM), triton.cdiv(N, TILE)
    finish_kernel[grid](slabs.sums, scale, out, M, N, row_stride, slabs.KB, slabs.L, BM)
    return out


# -----------------------------------------------------------------------------
# The product on its own, differentiable in x, for any M. The network goes through lora.matmul, which adds the adapter.

def mm(a, b, out_dtype):
    """a @ b with fp32 sums, rounded once to out_dtype."""
    if not a.is_cuda or a.dtype == torch.float32:
        return (a.float() @ b.float()).to(out_dtype)
    return torch.mm(a, b) if out_dtype == a.dtype else torch.mm(a, b, out_dtype=out_dtype)


def mm_fp32(a, b):
    """a (M, K) @ b (K, N) -> fp32: rounded, it would double how far sampler and learner drift apart."""
    return mm(a, b, torch.float32)


def matmul(x, weight, out_dtype=torch.float32):
    """x (..., K) -> x @ W.T (..., N), differentiable in x: of the weight's dtype; on a CPU fp32 will do."""
    assert x.shape[-1] == weight.K, f"x has K={x.shape[-1]}, the weight N={weight.N}, K={weight.K}"
    assert x.device == weight.device, f"x is on {x.device}, the weight on {weight.device}"
    allowed = (weight.dtype,) if x.is_cuda else (*ORDERS, torch.float32)
    assert x.dtype in allowed, f"x must be one of {allowed} on {x.device.type}, got {x.dtype}"
    return _Matmul.apply(x, weight, out_dtype)


class _Matmul(torch.autograd.Function):
    """Expands W for the call, and again in the backward: 2.5 bytes of traffic a weight instead of 2 bytes kept."""

    @staticmethod
    def forward(ctx, x, weight, out_dtype):
        ctx.weight, ctx.x_dtype = weight, x.dtype
        rows = x.reshape(-1, weight.K)
        if rows.shape[0] <= CROSSOVER and runs_on(x.device):
            y = finish(decode_matmul(rows.contiguous(), weight), weight.out_scale, out_dtype)
        elif weight.late_scale is None:
            y = mm(rows, _dense(weight).T, out_dtype)
        else:
            y = (mm_fp32(rows, _dense(weight).T) * weight.late_scale).to(out_dtype)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        weight = ctx.weight
        rows = dy.reshape(-1, weight.N)
        if weight.late_scale is not None:
            rows = rows * weight.late_scale
        dx = mm(rows.to(ctx.x_dtype), _dense(weight), ctx.x_dtype)
        return dx.unflatten(0, dy.shape[:-1]), None, None


def _dense(weight):
    """W for one product: a temporary of the caching allocator on a GPU, the kept fp32 matrix on a CPU."""
    return weight.dequantize() if weight.codes.is_cuda else weight.dense
