"""
The decode matmul for any NVIDIA GPU from Ampere (sm_80) on, in plain Triton: y = x @ [W; A].T.

The kernel to read first. marlin_fp4.py has the layout of W, its decoding in registers and the
schedule; and the same product for Hopper, where a warp only copies, 1.05 to 1.3 times as fast.

A program walks L consecutive blocks (128, 128) of the weight stream, along K inside a row of tiles,
then to the next row of tiles (stream-K): all programs do the same work whatever N and K, and fill
the chip once. Where it ends a tile or its own share, it stores the sum as piece number `piece` of
that tile, counted from the program that started the tile. The first programs do x @ A.T instead.

The sum is transposed, (128, BM): W is the tensor cores' first operand and M their short side, so
that 1 row wastes 7 of 8 columns and not 15 of 16 rows. Each warp has a group of W's rows of its
own, a batch to Triton: no weight is decoded twice, and the product is mma.sync, which all GPUs
have. On Hopper, where `--kernels auto` takes the other kernel anyway, all warps share a plain
product from 17 rows on, which is wgmma there and reads x from shared memory by itself: 84 us a
layer of 7B at 64 rows, not 110; at 16 it would be 54, not 55.

Shapes: M rows, N out_features, K in_features, R rows of LoRA's A, S slabs, BM rows of a tile.
"""
from typing import NamedTuple

import triton
import triton.language as tl

from harness.ranks import capability
from marlin_fp4 import TILE, Slabs, a_blocks, launch_plan, planes_of, scales_of, spread


class Inputs(NamedTuple):
    x: tl.tensor            # bf16 or fp16 (M, K)
    x_stride: tl.tensor     # of its rows
    codes: tl.tensor        # int16 (N/128, K/128, 128, 32)
    scales: tl.tensor       # int32 (N/128, K/128, 128, 2)
    a: tl.tensor            # as x (R, K), LoRA's A; anything where R is 0
    N: tl.tensor
    K: tl.tensor
    R: tl.tensor


@triton.jit
def tile_of(ptr, stride, row, rows, k, K, WHOLE_K: tl.constexpr):
    """A tile of a matrix of so many rows; past them its last, for what nobody will store."""
    at = ptr + tl.minimum(row, rows - 1)[:, None] * stride + k[None, :]
    if WHOLE_K:
        return tl.load(at)
    return tl.load(at, mask=(k < K)[None, :], other=0.0)


@triton.constexpr_function
def shape_of_sum(n, BM, GROUPS):
    """Of n rows of W: each group a warp's own, or one of all warps."""
    return (GROUPS, n // GROUPS, BM) if GROUPS > 1 else (n, BM)


@triton.jit
def product(acc, w, x):
    """acc, of shape_of_sum, + w (n, k) @ x (BM, k).T."""
    if len(acc.shape) == 3:
        groups: tl.constexpr = acc.shape[0]
        w = tl.reshape(w, (groups, w.shape[0] // groups, w.shape[1]))
        xt = tl.broadcast_to(tl.permute(x, (1, 0))[None], (groups, x.shape[1], x.shape[0]))
        acc = tl.dot(w, xt, acc)
    else:
        acc = tl.dot(w, tl.permute(x, (1, 0)), acc)
        # wgmma still reads w's registers when the next plane is decoded: a use of its sum makes
        # the compiler wait.
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32,
                                        is_pure=False, pack=1)
    return acc


@triton.jit
def store(acc, out_ptr, width, n, columns, m, M):
    """acc, of shape_of_sum -> out[m, n], as much of it as lies below M and `columns`."""
    acc = tl.reshape(acc, (n.shape[0], m.shape[0]))
    mask = (m < M)[None, :] & (n < columns)[:, None]
    tl.store(out_ptr + m[None, :] * width + n[:, None], acc, mask=mask)


@triton.jit(do_not_specialize=["M", "KB", "L", "a_programs"])
def portable_kernel(
    of: Inputs,
    slabs_ptr,         # fp32 (S, M, width)     A's columns are N .. N + R
    M, width,
    KB,                # blocks of 128 along K
    L,                 # blocks that one program walks
    a_programs,        # of the grid's first axis, the first ones do x @ A.T
    BM: tl.constexpr, STAGES: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE_K: tl.constexpr, # 128 divides K
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = of.x.dtype.element_ty
    pid = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    slab = M.to(tl.int64) * width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if pid < a_programs:
        share = a_blocks(KB, L)
        pieces = tl.cdiv(KB, share)
        piece = pid % pieces
        r = pid // pieces * 64 + tl.arange(0, 64)
        k = tl.arange(0, 64)  # half a block: 8 KB of A, as a block of codes
        last = tl.minimum(piece * share + share, KB)
        acc = tl.zeros(shape_of_sum(64, BM, GROUPS), tl.float32)
        for half in tl.range(2 * piece * share, 2 * last, num_stages=STAGES):
            a = tile_of(of.a, of.K, r, of.R, half * 64 + k, of.K, WHOLE_K)
            x = tile_of(of.x, of.x_stride, m, M, half * 64 + k, of.K, WHOLE_K)
            acc = product(acc, a, x)
        store(acc, slabs_ptr + piece * slab + of.N, width, r, of.R, m, M)
        return
    pid -= a_programs
    n = tl.arange(0, 128)
    c = tl.arange(0, 32)
    h = tl.arange(0, 2)
    block = pid * L
    last = tl.minimum(block + L, tl.cdiv(of.N, 128) * KB)
    while block < last:
        tile = block // KB
        end = tl.minimum(last, tile * KB + KB)
        first = (tile * KB).to(tl.int64)
        codes = of.codes + first * 4096 + n[:, None] * 32 + c[None, :]
        scales = of.scales + first * 256 + n[:, None] * 2 + h[None, :]
        acc = tl.zeros(shape_of_sum(128, BM, GROUPS), tl.float32)
        for kb in tl.range(block - tile * KB, end - tile * KB, num_stages=STAGES):
            words = tl.load(codes + kb * 4096)
            planes = planes_of(words, 0, dtype) + planes_of(words, 2, dtype)
            of_plane = scales_of(tl.load(scales + kb * 256), dtype)
            k = kb * 128 + c
            xs = ()
            for p in tl.static_range(4):
                xs += (tile_of(of.x, of.x_stride, m, M, k + 32 * p, of.K, WHOLE_K),)
            for p in tl.static_range(4):
                acc = product(acc, planes[p] * spread(of_plane[p]), xs[p])
        piece = pid - tile * KB // L
        store(acc, slabs_ptr + piece * slab, width, tile * 128 + n, of.N, m, M)
        block = end


class Config(NamedTuple):
    BM: int                 # rows of x in a tile
    num_stages: int         # blocks under way, and the one that is multiplied
    per_sm: int             # programs on a multiprocessor
    num_warps: int
    groups: int             # of W's rows: one for each warp, or 1 for all


def shared_memory(sm):
    """KiB that a program may take; a multiprocessor has 1 more, and keeps 1 for each program."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(sm, 99)


# M at most -> Config: by mma.sync the fastest on an H200, of all and of what fits into 99 KiB. Two
# warps read x from shared memory half as often as four: that pays at 32 rows; at 64 registers do
# not suffice.
TILES = {8: Config(8, 3, 4, 4, 4), 16: Config(16, 3, 4, 4, 4), 32: Config(32, 3, 4, 2, 2),
         256: Config(64, 3, 2, 4, 4)}
TILES_99 = {8: Config(8, 3, 4, 4, 4), 16: Config(16, 3, 3, 4, 4), 32: Config(32, 2, 4, 2, 2),
            256: Config(64, 2, 2, 4, 4)}
# By wgmma; with Triton 3.6 registers do not suffice for a fourth program at 32 rows.
TILES_HOPPER = TILES | {32: Config(32, 3, 3, 4, 1), 256: Config(64, 3, 2, 4, 1)}


def decode_config(M, sm):
    """sm: (9, 0) of an sm_90."""
    if shared_memory(sm) <= 99:
        tiles = TILES_99
    elif sm[0] == 9:
        tiles = TILES_HOPPER
    else:
        tiles = TILES
    return next((config for rows, config in tiles.items() if M <= rows), tiles[256])


def decode_matmul(x, weight, lora_a=None, slabs=None, pdl=False):
    """As marlin_fp4.decode_matmul. pdl, which needs sm_90, hides the launch alone."""
    M, K = x.shape
    config = decode_config(M, capability(weight.device))
    R, plan, slabs = launch_plan(x, weight, lora_a, slabs, config)
    a = lora_a if R else x
    inputs = Inputs(x, x.stride(0), weight.codes, weight.scales, a, weight.N, K, R)
    portable_kernel[plan.programs, triton.cdiv(M, config.BM)](
        inputs, slabs, M, slabs.shape[2], plan.KB, plan.L, plan.a_programs, config.BM,
        config.num_stages, config.groups, K % TILE == 0, pdl, num_warps=config.num_warps,
        launch_pdl=pdl)
    return Slabs(slabs, weight.out_scale, plan.KB, plan.L)
