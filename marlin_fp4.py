"""
Weight-only NVFP4 matmul for Hopper: y = x @ W.T, W in 4.5 bits a weight, x in bf16, sums in fp32.

Why: sm_90 has no FP4 tensor cores, so FP4 can only save memory traffic. Decoding a token is bound by reading weights,
and at 4 TB/s an H200 has 4.4 issue slots per weight: the layout below exists to spend 3 of them. From a few hundred
rows on the tensor cores are the bound; there W is expanded once into bf16 and cuBLAS does the rest.

Value of a weight; both scales multiply:
    W[n, k] = e2m1(code[n, k]) * block_scale[n, k // 16] * row_scale[n]
row_scale is the tensor's global scale; a fused matrix (q|k|v, gate|up) may have a different one per part.

Layout ("planes"). W is cut into tiles of 128 x 128 (ragged edges padded with zeros), each one contiguous run of bytes:
    codes    int16 (N/128, K/128, 128, 32)    the word at [n, c] holds the codes of k = c, 32 + c, 64 + c, 96 + c
    scales   int32 (N/128, K/128, 128, 2)     eight bytes, one per 16 consecutive k
Bits of a word, s e e m being a code's sign, exponent and mantissa bits, the digit its plane (plane p is k = 32 p + c):
    bit    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
           s0 m3 s3 s1 e3 e3 s2 e0 e0 m0 e1 e1 m1 e2 e2 m2
so that word & 0x81C0, (word << 3) & 0x81C0 and (word << 6) & 0x81C0 are planes 0..2 as bf16 numbers worth
code * 2^-126 (E2M1's subnormal 0.5 becomes a bf16 subnormal). Plane 3 lies in the bits that are left: multiplying them
by 1 + 2^5 + 2^10 puts all four where they belong at once. A plane meets a contiguous slice of x, so nothing is ever
interleaved, and two neighbouring words are one bf16x2 register.
A scale v becomes the byte u = ((floor(log2 v) + 10) << 3) | 3 mantissa bits (E5M3 without sign), which holds every E4M3
value, subnormal ones included, as a normal number; u = 0 for v = 0, whose codes are cleared. 0x7000 | u << 4 is
v * 2^107 as a bf16 number, and code * 2^-126 * v * 2^107 = code * v * 2^-19 is exact in bf16 (6 significant bits).
Scale word h serves k in [32 p + 16 h, 32 p + 16 h + 16) of every plane p with u_p, and is the 32-bit number
u0 | u3 << 8 | u1 << 16 | u2 << 24 rotated left by 4: one AND-OR puts u0 and u1 in place as a bf16x2 register and, after
a rotation by 8, another does u2 and u3.

Who multiplies by what: decode_matmul leaves sums of code * v * 2^-19 * x, to be multiplied by
weight.out_scale (N,), which is row_scale * 2^19. dequantize restores the 2^19, and row_scale too where it is a power
of two (exact); elsewhere weight.late_scale says what is missing.

Not here: quantization and files (nvfp4.py), the LoRA product x @ A.T @ B.T (lora.py; decode_matmul only does x @ A.T),
a gradient for W (the base is frozen), 4-bit activations.

Shapes: M rows, N out_features, K in_features, R rows of LoRA's A, S split-K slabs, BM/BN/BK tile sizes.
"""
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 16                                      # weights per scale
TILE = 128                                      # side of a packed tile
A_ROWS = 32                                     # rows of LoRA's A in a tile: in bf16 as many bytes as 128 rows of codes
PREFETCH = 2                                    # blocks of weights that a program asks for before its x is ready (pdl)
CROSSOVER = 256                                 # matmul: rows up to which the decode kernel beats expanding W
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# -----------------------------------------------------------------------------
# Format: nibbles <-> planes, E4M3 <-> E5M3. Plain torch, any device.

def _to_words(codes):
    """(..., 128) codes 0..15 as int32 -> (..., 32) int16 words in the bit order of the top of the file."""
    sign, eem = codes >> 3, codes & 7
    p0, p1, p2, p3 = ((sign << 15) | (eem << 6)).unflatten(-1, (4, 32)).unbind(-2)
    p3 = ((p3 & 0x8000) >> 2) | ((p3 & 0x0180) << 3) | ((p3 & 0x0040) << 8)
    return (p0 | (p1 >> 3) | (p2 >> 6) | p3).to(torch.int16)


def _to_codes(words):
    """Inverse of _to_words: (..., 32) int16 -> (..., 128) codes 0..15 as int32."""
    q = words.to(torch.int32)
    p3 = (((q & 0x6C00) >> 8) * (1 + 2**5 + 2**10))
    placed = torch.cat([q & 0x81C0, (q << 3) & 0x81C0, (q << 6) & 0x81C0, p3 & 0x81C0], dim=-1)
    return ((placed >> 12) & 8) | ((placed >> 6) & 7)


def _to_scale_words(scale):
    """(..., 8) fp32 E4M3 values >= 0 in the order of k -> (..., 2) int32, the rotated words of the top of the file."""
    mantissa, exponent = torch.frexp(scale)                          # v = mantissa * 2^exponent, mantissa in [0.5, 1)
    u = ((exponent.long() - 1 + 10) << 3) | ((mantissa * 16).long() & 7)
    u0, u1, u2, u3 = torch.where(scale > 0, u, 0).unflatten(-1, (4, 2)).unbind(-2)
    word = u0 | u3 << 8 | u1 << 16 | u2 << 24                        # int64 (..., 2)
    word = ((word << 4) & 0xFFFFFFFF) | (word >> 28)
    return (word - ((word >> 31) << 32)).to(torch.int32)             # the same 32 bits, signed


def _from_scale_words(word):
    """Inverse of _to_scale_words: (..., 2) int32 -> (..., 8) fp32 values in the order of k."""
    word = word.long() & 0xFFFFFFFF
    word = (word >> 4) | ((word & 15) << 28)
    u = torch.stack([(word >> shift) & 255 for shift in (0, 16, 24, 8)], dim=-2).flatten(-2)
    return torch.where(u > 0, torch.ldexp(1 + (u & 7).float() / 8, (u >> 3) - 10), 0.0)


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
    out_scale: torch.Tensor                     # fp32 (N,) = row_scale * 2^19, what slabs are multiplied by
    power_of_two: bool                          # every row_scale is one: dequantize() then includes it, exactly

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
        codes = _untile(_to_codes(self.codes))[:self.N, :self.K]
        packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        block_scale = _untile(_from_scale_words(self.scales))[:self.N, :self.K // BLOCK].to(torch.float8_e4m3fn)
        return packed, block_scale, self.row_scale

    def dequantize(self, out=None, dtype=torch.bfloat16):
        """-> W (N, K), without late_scale. `out` may have any row stride: a column slice of a wider buffer is fine."""
        if out is None:
            out = torch.empty(self.N, self.K, dtype=dtype, device=self.device)
        assert out.shape == (self.N, self.K), f"out is {tuple(out.shape)}, the weight {(self.N, self.K)}"
        assert out.device == self.device, f"out on {out.device}, the weight on {self.device}"
        assert out.stride(1) == 1, f"out must have unit column stride, got strides {out.stride()}"
        if self.codes.is_cuda:
            _dequantize_gpu(self, out)
        else:
            out.copy_(self.dense)
        return out

    @cached_property
    def dense(self):
        """The fp32 W (N, K) without late_scale, kept: on a CPU speed matters more than memory."""
        codes = _untile(_to_codes(self.codes))
        value = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=self.device)[codes]
        w = value * _untile(_from_scale_words(self.scales)).repeat_interleave(BLOCK, dim=1)
        w = w[:self.N, :self.K]
        return w * self.row_scale[:, None] if self.power_of_two else w.contiguous()


def pack(packed, block_scale, global_scale):
    """nvfp4.quantize's packed uint8 (N, K // 2), block_scale e4m3 (N, K // 16) and global_scale fp32 () or (N,)."""
    N, K = packed.shape[0], packed.shape[1] * 2
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
        words[i] = _to_words(rows.masked_fill((scale[i] == 0).repeat_interleave(BLOCK, dim=-1), 0))
    return PackedWeight(N, K, words, _to_scale_words(scale), row_scale, row_scale * 2**19, power_of_two)


def pack_mxfp4(packed, block_scale):
    """MXFP4 (32 weights a scale, uint8 E8M0: 2^(byte - 127)) in the same layout: each scale twice.

    The 18 powers of two from 2^-9 to 2^8 that E5M3 holds must span the tensor's scales.
    """
    assert block_scale.dtype == torch.uint8, f"MXFP4 scales must be uint8 exponents, got {block_scale.dtype}"
    exponent = block_scale.int() - 127
    shift = int(exponent.max()) - 8
    spread = int(exponent.max() - exponent.min())
    assert spread <= 17, f"MXFP4 scales span {spread} binades; E5M3 bytes hold 17"
    scale = torch.exp2((exponent - shift).float()).to(torch.float8_e4m3fn).repeat_interleave(2, dim=1)
    return pack(packed, scale, torch.tensor(2.0 ** shift))


# -----------------------------------------------------------------------------
# Kernels. Inline assembly where it saves instructions that the compiler would spend on 16-bit lanes.

@triton.jit
def _planes(words):
    """int16 words -> four bf16 tensors of the same shape, plane p = code * 2^-126: 9 instructions per 8 weights."""
    return tl.inline_asm_elementwise("""
        {
        .reg .b32 t;
        and.b32 $0, $4, 0x81C081C0;
        shl.b32 t, $4, 3;
        and.b32 $1, t, 0x81C081C0;
        shl.b32 t, $4, 6;
        and.b32 $2, t, 0x81C081C0;
        and.b32 t, $4, 0x6C006C00;
        shr.u32 t, t, 8;
        mul.lo.u32 t, t, 1057;
        and.b32 $3, t, 0x81C081C0;
        }""", "=&r,=&r,=&r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2)


@triton.jit
def _scales(word):
    """int32 scale words -> four bf16 tensors of the same shape, one per plane, v * 2^107: 3 instructions per 4."""
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
def _scaled(plane, scale, BN: tl.constexpr):
    """(BN, 32) code * 2^-126 times (BN, 2) v * 2^107 -> (BN, 32) code * v * 2^-19, exact."""
    return plane * tl.broadcast_to(scale[:, :, None], (BN, 2, 16)).reshape(BN, 32)


@triton.jit
def _side_by_side(a, b):
    """(BN, C), (BN, C) -> (BN, 2 C); only renames registers."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def dequantize_kernel(
    codes_ptr,         # int16 (N/128, K/128, 128, 32)
    scales_ptr,        # int32 (N/128, K/128, 128, 2)
    out_scale_ptr,     # fp32  (N,)            2^19 * row_scale; read only if ROW_SCALE
    out_ptr,           # bf16 or fp32 (N, K)   row stride out_stride
    N, K, out_stride,
    ROW_SCALE: tl.constexpr,
):
    """One program expands one 128 x 128 tile. Exact: row_scale is a power of two where ROW_SCALE, else left out."""
    tile_k, tile_n = tl.program_id(0), tl.program_id(1)
    tile = (tile_n * tl.num_programs(0) + tile_k).to(tl.int64)
    row, c, h, k = tl.arange(0, 128), tl.arange(0, 32), tl.arange(0, 2), tile_k * 128 + tl.arange(0, 128)
    n = tile_n * 128 + row
    w = _planes(tl.load(codes_ptr + tile * 4096 + row[:, None] * 32 + c[None, :]))
    s = _scales(tl.load(scales_ptr + tile * 256 + row[:, None] * 2 + h[None, :]))
    # whole rows of 256 bytes rather than 64 bytes a plane: see docs/kernel_log.md
    front = _side_by_side(_scaled(w[0], s[0], 128), _scaled(w[1], s[1], 128))
    back = _side_by_side(_scaled(w[2], s[2], 128), _scaled(w[3], s[3], 128))
    if ROW_SCALE:
        factor = tl.load(out_scale_ptr + n, mask=n < N, other=0.0).to(tl.bfloat16)
    else:
        factor = tl.full((128,), 524288.0, dtype=tl.bfloat16)        # 2^19
    value = _side_by_side(front, back) * factor[:, None]
    out = out_ptr + n[:, None].to(tl.int64) * out_stride + k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _prefetch(ptr, size):
    """Asks for `size` bytes from ptr on to be brought into the L2; one thread of the program asks."""
    tl.inline_asm_elementwise("""
        {
        .reg .pred first;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 first, t, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, t;
        }""", "=r,l,r", [ptr, size], dtype=tl.int32, is_pure=False, pack=1)


def _dequantize_gpu(weight, out):
    grid = weight.codes.shape[1], weight.codes.shape[0]
    with torch.cuda.device(out.device):
        dequantize_kernel[grid](weight.codes, weight.scales, weight.out_scale, out, weight.N, weight.K, out.stride(0),
                                ROW_SCALE=weight.power_of_two, num_warps=4)


@triton.jit
def _shrink(x_ptr, a_ptr, slabs_ptr, pid, m, M, N, K, x_stride, R, S, KB, L,
            BM: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr):
    """Piece number `pid % pieces` of x @ A.T, for BR rows of A: columns N + r of the slabs."""
    pieces = (KB + L - 1) // L
    piece = pid % pieces
    r, k = (pid // pieces) * BR + tl.arange(0, BR), tl.arange(0, 128)
    row_stride = N + R
    acc = tl.zeros((BR, BM), dtype=tl.float32)
    for kb in tl.range(piece * L, min(piece * L + L, KB), num_stages=STAGES):
        k_ok = (kb * 128 + k < K)[None, :]
        a = tl.load(a_ptr + r[:, None] * K + kb * 128 + k[None, :], mask=(r < R)[:, None] & k_ok, other=0.0)
        x_block = x_ptr + m[:, None] * x_stride + kb * 128 + k[None, :]
        x = tl.load(x_block, mask=(m < M)[:, None] & k_ok, other=0.0)
        acc = tl.dot(a, x.T, acc)
    out = slabs_ptr + m[None, :] * row_stride + N + r[:, None]
    ok = (m < M)[None, :] & (r < R)[:, None]
    tl.store(out + piece * M * row_stride, acc, mask=ok)
    if piece == pieces - 1:                                          # A has fewer pieces than some tiles of W
        for s in range(pieces, S):
            tl.store(out + s * M * row_stride, tl.zeros((BR, BM), dtype=tl.float32), mask=ok)


@triton.jit
def _settled(acc):
    """acc itself, once the tensor cores are done with it (ptxas drops the move).

    Triton 3.6 lets 7 of the 8 wgmma groups of a K = 128 dot run on into the next loop iteration, and ptxas gives the
    next block's decoded weights the registers that those groups still read (SASS, 2026-11-21; the likely cause of NaN
    seen in whole decode steps of 7B at 64 rows). A use of acc makes the compiler wait for all of them first.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["M", "S", "KB", "L", "a_programs", "total"])
def decode_kernel(
    x_ptr,             # bf16  (M, K)                 row stride x_stride
    codes_ptr,         # int16 (N/128, K/128, 128, 32)
    scales_ptr,        # int32 (N/128, K/128, 128, 2)
    a_ptr,             # bf16  (R, K)                 LoRA's A, if R > 0
    slabs_ptr,         # fp32  (S, M, N + R)
    M, N, K, x_stride, R, S,
    KB,                # blocks of 128 along K
    L,                 # blocks that one program walks
    a_programs,        # of the grid's first axis, the first ones do x @ A.T
    total,             # blocks of W: (N/BN) * KB
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
    RAGGED_K: tl.constexpr, HAS_A: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):
    """Partial sums of x @ W.T: a program walks L consecutive blocks of the weight stream, (BN, 128) weights each.

    The stream runs along K inside a row of tiles, then to the next row of tiles, so a program's bytes are contiguous
    and all programs do the same work whatever N and K (stream-K). Where it ends a tile or its own share, it stores the
    sum as piece number `piece` of that tile, counted from the program that started the tile; the tile's last piece also
    zeroes the slabs that no program wrote. The sum is transposed, (BN, BM): W is the register operand of the tensor
    cores and M their short side, so 1 row wastes 7 of 8 columns and not 63 of 64 rows.

    One dot of K = 128 per block, not one per plane: Triton 3.6 splits it into 8 wgmma groups, so the later planes are
    decoded while the first are multiplied; for four dots it would wait after each.
    """
    pid = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    m_ok = m < M
    row_stride = N + R
    if PDL:                                                          # let the next kernel's programs take freed places
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_A and pid < a_programs:
        if PDL:
            tl.extra.cuda.gdc_wait()
        _shrink(x_ptr, a_ptr, slabs_ptr, pid, m, M, N, K, x_stride, R, S, KB, L, BM, BR, STAGES)
    else:
        pid -= a_programs
        n, c, h, k = tl.arange(0, BN), tl.arange(0, 32), tl.arange(0, 2), tl.arange(0, 128)
        x_off = m[:, None] * x_stride + k[None, :]
        tile_words = ((n // 128) * KB * 4096 + (n % 128) * 32)[:, None] + c[None, :]
        tile_scales = ((n // 128) * KB * 256 + (n % 128) * 2)[:, None] + h[None, :]
        block, last = pid * L, min(pid * L + L, total)
        if PDL:                                                      # the weights need not wait for x
            for half in tl.static_range(BN // 128):
                first = (block // KB * (BN // 128) + half) * KB + block % KB
                blocks = min(min(KB - block % KB, last - block), PREFETCH)
                _prefetch(codes_ptr + first.to(tl.int64) * 4096, blocks * 8192)
                _prefetch(scales_ptr + first * 256, blocks * 1024)
            tl.extra.cuda.gdc_wait()
        while block < last:
            tile = block // KB
            k0 = block - tile * KB
            k1 = min(KB, k0 + last - block)
            words_ptr = codes_ptr + (tile * (BN // 128) * KB).to(tl.int64) * 4096 + tile_words
            scale_ptr = scales_ptr + tile * (BN // 128) * KB * 256 + tile_scales
            acc = tl.zeros((BN, BM), dtype=tl.float32)
            for kb in tl.range(k0, k1, num_stages=STAGES):
                w = _planes(tl.load(words_ptr + kb * 4096))
                s = _scales(tl.load(scale_ptr + kb * 256))
                x_ok = m_ok[:, None]
                if RAGGED_K:
                    x_ok = x_ok & (kb * 128 + k < K)[None, :]
                x = tl.load(x_ptr + kb * 128 + x_off, mask=x_ok, other=0.0)
                front = _side_by_side(_scaled(w[0], s[0], BN), _scaled(w[1], s[1], BN))
                back = _side_by_side(_scaled(w[2], s[2], BN), _scaled(w[3], s[3], BN))
                acc = _settled(tl.dot(_side_by_side(front, back), x.T, acc))
            piece = pid - (tile * KB) // L
            rows = tile * BN + n
            out = slabs_ptr + piece * M * row_stride + m[None, :] * row_stride + rows[:, None]
            tl.store(out, acc, mask=m_ok[None, :] & (rows < N)[:, None])
            if k1 == KB:                                             # row by row: a tile of addresses would spill
                first_row = tl.program_id(1) * BM
                for s in range(piece + 1, S):
                    for i in range(first_row, min(first_row + BM, M)):
                        out_row = slabs_ptr + (s * M + i) * row_stride + rows
                        tl.store(out_row, tl.zeros((BN,), dtype=tl.float32), mask=rows < N)
            block += k1 - k0


# -----------------------------------------------------------------------------
# Host side of the decode kernel: which tile for which M, who walks which blocks.

class Config(NamedTuple):
    """How decode_kernel is launched: tile sides, warps, pipeline stages, programs resident on a multiprocessor."""
    BM: int
    BN: int
    num_warps: int
    num_stages: int
    per_sm: int
    maxnreg: int | None = None                  # registers a thread may use, where that admits another program


# (M at most, N, K) -> Config; `python bench.py tune` prints these lines. Shapes not listed take DEFAULTS[M at most].
# Made before _settled was added: to be made again.
# per_sm is what a multiprocessor can hold: with pdl, places left empty would be filled by the next kernel, unevenly.
DEFAULTS = {
    8: Config(8, 128, 4, 3, 4),
    16: Config(16, 128, 4, 4, 3),
    32: Config(32, 128, 4, 4, 2),
    64: Config(64, 128, 4, 4, 2),
    128: Config(128, 128, 8, 3, 1),
    256: Config(128, 128, 8, 3, 1),
}
TUNED = {
    (64, 896, 896): Config(64, 128, 8, 4, 1),
    (128, 896, 896): Config(64, 128, 4, 3, 2),
    (128, 896, 4864): Config(64, 128, 4, 3, 2),
    (64, 1152, 896): Config(64, 128, 8, 4, 1),
    (128, 1152, 896): Config(64, 128, 4, 3, 2),
    (64, 1536, 1536): Config(64, 128, 8, 4, 1),
    (128, 1536, 1536): Config(64, 128, 4, 3, 2),
    (16, 1536, 8960): Config(16, 128, 4, 4, 4, 128),
    (64, 1536, 8960): Config(64, 128, 8, 4, 1),
    (32, 2048, 1536): Config(32, 128, 4, 3, 3, 168),
    (64, 2048, 1536): Config(64, 128, 8, 4, 1),
    (128, 2048, 1536): Config(64, 128, 4, 3, 2),
    (16, 2048, 2048): Config(16, 256, 8, 4, 1),
    (64, 2048, 2048): Config(64, 128, 8, 4, 1),
    (64, 2048, 11008): Config(64, 128, 8, 4, 1),
    (64, 2560, 2048): Config(64, 128, 4, 3, 2),
    (128, 2560, 2048): Config(64, 128, 4, 3, 2),
    (32, 3584, 3584): Config(32, 128, 4, 3, 3, 168),
    (64, 3584, 3584): Config(64, 128, 8, 4, 1),
    (128, 3584, 3584): Config(64, 128, 4, 3, 2),
    (16, 4608, 3584): Config(16, 256, 8, 4, 1),
    (64, 4608, 3584): Config(64, 128, 8, 3, 2, 128),
    (32, 5120, 5120): Config(32, 128, 4, 3, 3, 168),
    (64, 5120, 5120): Config(64, 128, 8, 4, 1),
    (256, 5120, 27648): Config(256, 128, 8, 3, 1),
    (64, 7168, 5120): Config(64, 128, 8, 4, 1),
    (8, 8192, 8192): Config(8, 128, 4, 4, 4),
    (16, 8192, 8192): Config(16, 128, 4, 4, 4, 128),
    (256, 8192, 8192): Config(256, 128, 8, 3, 1),
    (256, 8192, 29568): Config(256, 128, 8, 3, 1),
    (8, 9728, 896): Config(8, 256, 4, 3, 3),
    (64, 9728, 896): Config(64, 128, 8, 4, 1),
    (256, 10240, 8192): Config(256, 128, 8, 3, 1),
    (16, 17920, 1536): Config(16, 128, 4, 3, 4, 128),
    (64, 17920, 1536): Config(64, 128, 8, 4, 1),
    (256, 27648, 5120): Config(256, 128, 8, 3, 1),
    (256, 37888, 3584): Config(256, 128, 8, 3, 1),
    (256, 55296, 5120): Config(256, 128, 8, 3, 1),
    (128, 59136, 8192): Config(128, 256, 8, 3, 1),
    (256, 59136, 8192): Config(256, 128, 8, 3, 1),
}


def decode_config(N, K, M):
    bucket = next((m for m in DEFAULTS if M <= m), max(DEFAULTS))
    config = TUNED.get((bucket, N, K), DEFAULTS[bucket])
    odd = triton.cdiv(N, TILE) % 2 == 1
    return config._replace(BN=128) if odd and config.BN > 128 else config


class Schedule(NamedTuple):
    L: int                                      # blocks per program
    a_programs: int                             # programs that do x @ A.T
    programs: int                               # all of them
    S: int                                      # slabs


@cache
def schedule(N, K, M, R, config, multiprocessors):
    """Cuts the weight stream into equal shares, so many that they fill the chip once."""
    KB, tiles = triton.cdiv(K, TILE), triton.cdiv(N, TILE) * TILE // config.BN
    room = multiprocessors * config.per_sm // triton.cdiv(M, config.BM)
    L = max(1, tiles * KB // room)
    while True:
        a_programs = triton.cdiv(R, A_ROWS) * triton.cdiv(KB, L)
        programs = a_programs + triton.cdiv(tiles * KB, L)
        if programs <= room or L >= KB * tiles:
            break
        L += 1
    S = max((t * KB + KB - 1) // L - t * KB // L + 1 for t in range(tiles))
    return Schedule(L, a_programs, programs, S)


def slab_count(weight, M, R=0):
    """S of the slabs (S, M, N + R) that decode_matmul fills for this weight, M and R rows of A."""
    return _schedule(weight, M, R).S


def _schedule(weight, M, R):
    return schedule(weight.N, weight.K, M, R, decode_config(weight.N, weight.K, M), _multiprocessors(weight.device))


@cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def decode_matmul(x, weight, lora_a=None, slabs=None, pdl=False, config=None):
    """x (M, K) bf16 -> slabs (S, M, N + R) fp32, whose sum over S is x @ W.T / out_scale, then x @ lora_a.T.

    So y = slabs.sum(0)[:, :N] * weight.out_scale, and columns N.. are the LoRA shrink as it is. Every element is
    written; a row's bits do not depend on the other rows; nothing is allocated if slabs is given.
    pdl (programmatic dependent launch): start while the kernel before on the stream still runs, fetch weights, and wait
    for its end before reading x. A kernel after it may do the same, launched with launch_pdl=True, if it calls
    tl.extra.cuda.gdc_wait() before it touches slabs; every kernel of such a chain must call it.
    """
    (M, K), N = x.shape, weight.N
    R = 0 if lora_a is None else lora_a.shape[0]
    assert weight.codes.is_cuda, f"decode_matmul needs a GPU, the weight is on {weight.device}"
    assert x.dtype == torch.bfloat16, f"x must be bf16, got {x.dtype}"
    assert x.device == weight.device, f"x is on {x.device}, the weight on {weight.device}"
    assert K == weight.K, f"x has {K=}, the weight N={N}, K={weight.K}"
    assert x.stride(1) == 1 and x.stride(0) % 8 == 0, f"x rows must be contiguous and 16-byte aligned: {x.stride()}"
    if lora_a is not None:
        assert lora_a.dtype == torch.bfloat16 and lora_a.shape[1] == K, (lora_a.dtype, tuple(lora_a.shape), K)
        assert lora_a.is_contiguous() and lora_a.device == x.device, (lora_a.stride(), lora_a.device)
    config = config or decode_config(N, K, M)
    plan = schedule(N, K, M, R, config, _multiprocessors(weight.device))
    if slabs is None:
        slabs = torch.empty(plan.S, M, N + R, dtype=torch.float32, device=x.device)
    assert slabs.dtype == torch.float32 and slabs.is_contiguous(), (slabs.dtype, slabs.stride())
    assert slabs.shape == (plan.S, M, N + R), f"slabs must be {(plan.S, M, N + R)}, got {tuple(slabs.shape)}"
    KB = weight.codes.shape[1]
    decode_kernel[(plan.programs, triton.cdiv(M, config.BM))](
        x, weight.codes, weight.scales, lora_a if R else x, slabs, M, N, K, x.stride(0), R, plan.S, KB, plan.L,
        plan.a_programs, weight.codes.shape[0] * TILE // config.BN * KB,
        BM=config.BM, BN=config.BN, BR=A_ROWS, STAGES=config.num_stages, RAGGED_K=K % TILE != 0, HAS_A=R > 0, PDL=pdl,
        PREFETCH=PREFETCH, num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=config.maxnreg, launch_pdl=pdl)
    return slabs


# -----------------------------------------------------------------------------
# The product on its own, differentiable in x, for any M. The network goes through lora.matmul, which adds the adapter.

def mm(a, b, out_dtype):
    """a @ b with fp32 sums, rounded once to out_dtype."""
    if not a.is_cuda or a.dtype == torch.float32:
        return (a.float() @ b.float()).to(out_dtype)
    return torch.mm(a, b) if out_dtype == a.dtype else torch.mm(a, b, out_dtype=out_dtype)


def mm_fp32(a, b):
    """a (M, K) @ b (K, N) -> fp32: a bf16 result would double how far sampler and learner drift apart."""
    return mm(a, b, torch.float32)


def matmul(x, weight, out_dtype=torch.float32):
    """x (..., K) -> x @ W.T (..., N), differentiable in x. bf16 x on a GPU; bf16 or fp32 x on a CPU."""
    assert x.shape[-1] == weight.K, f"x has K={x.shape[-1]}, the weight N={weight.N}, K={weight.K}"
    assert x.device == weight.device, f"x is on {x.device}, the weight on {weight.device}"
    allowed = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    assert x.dtype in allowed, f"x must be one of {allowed} on {x.device.type}, got {x.dtype}"
    return _Matmul.apply(x, weight, out_dtype)


class _Matmul(torch.autograd.Function):
    """Expands W for the call, and again in the backward: 2.5 bytes of traffic a weight instead of 2 bytes kept."""

    @staticmethod
    def forward(ctx, x, weight, out_dtype):
        ctx.weight, ctx.x_dtype = weight, x.dtype
        rows = x.reshape(-1, weight.K)
        if x.is_cuda and rows.shape[0] <= CROSSOVER:
            y = (decode_matmul(rows.contiguous(), weight).sum(0) * weight.out_scale).to(out_dtype)
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
