"""
A faster version of marlin_fp4.py's decode matmul, for Hopper (sm_90) only.

Read marlin_fp4.py first. Layout, decoding, schedule and slabs are the same, and so is the result,
up to the order of fp32 sums. Hopper adds:

- A copy engine (TMA). One instruction copies a full tile to shared memory, and a barrier completes
  when its bytes have arrived. One warp of each program does nothing but request tiles.
- wgmma. The tensor cores compute a product while the four warps that started it carry on. W comes
  from registers, where it has just been decoded, and x from shared memory.
- Dependent launch. A kernel starts while the previous one is still running, and requests its first
  weights before the x they multiply exists.

In plain Triton the compiler decides which warp does what; in Gluon, one level lower, you do.

A program has two kinds of warps, which hand the slots of a ring in shared memory back and forth:

      one producer warp                                   four consumer warps
    +--> wait until slot is empty                 +--> wait until slot is full
    |    ask the copy engine for a tile of W,     |    read the codes, decode them in registers
    |    its scales, and 128 columns of x         |    multiply (wgmma), wait for the tensor cores
    |    (the slot's `full` completes by itself)  |    mark the slot empty
    +--- next step, next slot                     +--- next step, next slot

A step is one iteration of this loop, which handles a tile of W, or one of LoRA's A, half as wide.
Two to four programs share a multiprocessor and drift apart, so one decodes while another
multiplies.

Shapes: M rows of x, N out_features, K in_features, R rows of LoRA's A, S slabs, BM rows of x per
program.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from marlin_fp4 import (
    A_TILE,
    TILE_SIDE,
    MatmulSlabs,
    PackedWeight,
    capability,
    decode_planes,
    decode_scales,
    prepare_launch,
    side_by_side,
    spread_scales,
)

A_SIDE = tl.constexpr(A_TILE)
# Up to this many rows of x, the copy engine stores finished pieces from shared memory. Larger ones
# don't fit next to the ring and are stored from registers.
MAX_COPIED_ROWS = tl.constexpr(64)

# Layouts in shared memory, swizzled to avoid bank conflicts: rows of x and A (256 and 128 bytes),
# rows of codes (64 bytes), scales, finished fp32 sums.
ROWS_256B = tl.constexpr(gl.NVMMASharedLayout(128, 16))
ROWS_64B = tl.constexpr(gl.NVMMASharedLayout(64, 16))
FLAT = tl.constexpr(gl.NVMMASharedLayout(0, 32))
SUMS = tl.constexpr(gl.NVMMASharedLayout(128, 32, rank=3))
# A layout in registers for (128, 2, 16) scales: row, scale_block of a plane, column within it. Each
# scale is in the lane and register where wgmma wants the weights it multiplies, so spread_scales
# moves nothing between lanes. The lists give, for each bit of the register, lane and warp number,
# how far it moves along these three axes.
SCALED = tl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [64, 0, 0]],
    [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[16, 0, 0], [32, 0, 0]], [], [128, 2, 16]))


# -----------------------------------------------------------------------------
# Arguments that travel together

class TensorMaps(NamedTuple):
    """Tensor maps: each matrix's shape, and the box that one copy transfers."""
    x: tl.tensor            # bf16 (M, K)                            box (BM, 128)
    codes: tl.tensor        # int16 (N/128 * K/128 * 128, 32)        box (128, 32)
    scales: tl.tensor       # int32 (N/128 * K/128, 256)             box (1, 256)
    a: tl.tensor            # like x (R, K), LoRA's A, or None       box (64, 64)
    slabs: tl.tensor        # fp32 (S, M, N)                         box (1, BM, 128)


class Ring(NamedTuple):
    """STAGES slots in shared memory, each with the operands of one step."""
    x: tl.tensor            # (STAGES, BM, 128)
    codes: tl.tensor        # (STAGES, 128, 32); a step of x @ A.T keeps (64, 64) of A here
    scales: tl.tensor       # (STAGES, 1, 256)
    full: tl.tensor         # barriers: a slot's bytes have arrived
    empty: tl.tensor        # barriers: a slot has been multiplied


class Stripe(NamedTuple):
    """One program's share: tiles `first` to `end` - 1 of the weight stream, or of A's bands."""
    is_a: tl.tensor
    pid: tl.tensor          # the program's index among those of W
    m0: tl.tensor           # its first row of x
    first: tl.tensor
    end: tl.tensor
    halves: tl.tensor       # steps per tile: 1, or 2 for A, whose tiles are half as wide
    k_tiles: tl.tensor      # the StripePlan's
    length: tl.tensor       # the StripePlan's stripe or a_stripe


# -----------------------------------------------------------------------------
# The producer

@gluon.jit
def _fetch_weights(maps: TensorMaps, ring: Ring, stripe: Stripe, slot, step):
    """Requests a step's weights for `slot`: a tile of W, or (64, 64) of A.

    The barrier also expects x's bytes, so it completes only after _fetch_x.
    """
    HAS_A: gl.constexpr = maps.a is not None
    X_BYTES: gl.constexpr = ring.x.shape[1] * 256
    bar = ring.full.index(slot)
    if HAS_A and stripe.is_a:
        mbarrier.expect(bar, A_SIDE * A_SIDE * 2 + X_BYTES)
        a = ring.codes._reinterpret(maps.a.dtype, [ring.x.shape[0], A_SIDE, A_SIDE], ROWS_256B)
        row = stripe.first // stripe.k_tiles * A_SIDE
        k = (stripe.first + step // 2) % stripe.k_tiles * 128 + step % 2 * A_SIDE
        tma.async_copy_global_to_shared(maps.a, [row, k], bar, a.index(slot))
    else:
        mbarrier.expect(bar, 128 * 64 + 128 * 8 + X_BYTES)
        tile = stripe.first + step
        tma.async_copy_global_to_shared(maps.codes, [tile * 128, 0], bar, ring.codes.index(slot))
        tma.async_copy_global_to_shared(maps.scales, [tile, 0], bar, ring.scales.index(slot))


@gluon.jit
def _fetch_x(maps: TensorMaps, ring: Ring, stripe: Stripe, slot, step):
    """Requests the 128 columns of x that a step multiplies."""
    k = (stripe.first + step // stripe.halves) % stripe.k_tiles * 128
    bar = ring.full.index(slot)
    tma.async_copy_global_to_shared(maps.x, [stripe.m0, k], bar, ring.x.index(slot))


@gluon.jit
def _produce(maps: TensorMaps, ring: Ring, stripe: Stripe, steps, AHEAD: gl.constexpr):
    """The producer warp: keeps the ring full from step AHEAD on, even from band to band."""
    # A barrier counts its rounds modulo 2, and wait(bar, p) returns once a round of parity p is
    # over. The producer waits for the previous round, hence the opposite parity. On a new barrier,
    # round -1 counts as over:
    #     round of a slot, step // STAGES      0  1  2  3
    #     the consumers wait for full with     0  1  0  1
    #     the producer waits for empty with    1  0  1  0    the first passes at once
    STAGES: gl.constexpr = ring.x.shape[0]
    for step in range(AHEAD, steps):
        slot = step % STAGES
        mbarrier.wait(ring.empty.index(slot), (step // STAGES & 1) ^ 1)
        _fetch_weights(maps, ring, stripe, slot, step)
        _fetch_x(maps, ring, stripe, slot, step)


# -----------------------------------------------------------------------------
# The consumers

@gluon.jit
def _times(plane, scale, W: gl.constexpr):
    """A plane times its scales in W, the register layout of wgmma's first operand."""
    return plane * gl.convert_layout(spread_scales(scale), W, assert_trivial=True)


@gluon.jit
def _begin_product(acc, w, xs, k: gl.constexpr):
    """Starts acc + w @ xs[:, k:k + columns of w].T; the tensor cores run asynchronously."""
    xs = xs.slice(k, w.shape[1], 1).permute((1, 0))
    return warpgroup_mma(w, xs, acc, is_async=True)


@gluon.jit
def _multiply_tile(acc, words, word, xs, W: gl.constexpr):
    """acc + a tile's product; its last planes are still being multiplied on return."""
    # A plane occupies 16 registers until the tensor cores have read it. With 32 or 64 rows of x
    # there are enough registers for all four planes, so two planes form one product, which takes
    # fewer instructions. Otherwise the waits keep at most two products in flight.
    s0, s1, s2, s3 = decode_scales(word, xs.dtype)
    w0, w1 = decode_planes(words, 0, xs.dtype)
    w2, w3 = decode_planes(words, 2, xs.dtype)
    if acc.shape[1] == 32 or acc.shape[1] == 64:
        front = side_by_side(_times(w0, s0, W), _times(w1, s1, W))
        back = side_by_side(_times(w2, s2, W), _times(w3, s3, W))
        acc = _begin_product(acc, gl.convert_layout(front, W, assert_trivial=True), xs, 0)
        return _begin_product(acc, gl.convert_layout(back, W, assert_trivial=True), xs, 64)
    acc = _begin_product(acc, _times(w0, s0, W), xs, 0)
    acc = _begin_product(acc, _times(w1, s1, W), xs, 32)
    acc = warpgroup_mma_wait(1, deps=[acc])
    acc = _begin_product(acc, _times(w2, s2, W), xs, 64)
    acc = warpgroup_mma_wait(1, deps=[acc])
    return _begin_product(acc, _times(w3, s3, W), xs, 96)


@gluon.jit
def _store_from_registers(acc, slabs_ptr, maps: TensorMaps, piece, row, rows, column, m0):
    """acc (C, BM) -> slabs[piece, m0:, column + row:], up to `rows` and M."""
    M = maps.x.shape[0]
    stride = maps.slabs.strides[1].to(gl.int32)
    n = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    m = m0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    out = slabs_ptr + piece * M * stride + column
    mask = (m < M)[None, :] & (n < rows)[:, None]
    gl.store(out + m[None, :] * stride + n[:, None], acc, mask=mask)


@gluon.jit
def _consume(maps: TensorMaps, ring: Ring, stripe: Stripe, out, slabs_ptr, N):
    """The consumer warps: multiply the stripe's tiles and store a piece at the end of each band.

    out: shared memory from which a piece is stored.
    """
    HAS_A: gl.constexpr = maps.a is not None
    STAGES: gl.constexpr = ring.x.shape[0]
    BM: gl.constexpr = ring.x.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    k_tiles = stripe.k_tiles
    if HAS_A and stripe.is_a:
        a = ring.codes._reinterpret(ring.x.dtype, [STAGES, A_SIDE, A_SIDE], ROWS_256B)
        acc = gl.zeros([A_SIDE, BM], gl.float32, MMA)
        for i in range(0, 2 * (stripe.end - stripe.first), 2):
            for half in gl.static_range(2):
                slot = (i + half) % STAGES
                mbarrier.wait(ring.full.index(slot), (i + half) // STAGES & 1)
                xs = ring.x.index(slot).slice(half * A_SIDE, A_SIDE, 1).permute((1, 0))
                acc = warpgroup_mma(a.index(slot), xs, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                # A trap: one thread frees the slot for all four warps. They have all read it only
                # because Triton puts a barrier before this, here and below; a test looks for it in
                # the compiled kernel.
                mbarrier.arrive(ring.empty.index(slot), count=1)
        piece = stripe.first % k_tiles // stripe.length
        row = stripe.first // k_tiles * A_SIDE
        _store_from_registers(acc, slabs_ptr, maps, piece, row, maps.a.shape[0], N, stripe.m0)
    else:
        i = 0
        tile = stripe.first
        while tile < stripe.end:
            band = tile // k_tiles
            end = gl.minimum(stripe.end, band * k_tiles + k_tiles)
            acc = gl.zeros([128, BM], gl.float32, MMA)
            for _ in range(tile, end):
                slot = i % STAGES
                mbarrier.wait(ring.full.index(slot), i // STAGES & 1)
                word = ring.scales.index(slot).reshape([128, 2]).load(gl.SliceLayout(2, SCALED))
                words = ring.codes.index(slot).load(W)
                acc = _multiply_tile(acc, words, word, ring.x.index(slot), W)
                # All products must have read their planes before the next tile is decoded into the
                # same registers, and x before the slot is freed.
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(ring.empty.index(slot), count=1)
                i += 1
            piece = stripe.pid - band * k_tiles // stripe.length
            if BM <= MAX_COPIED_ROWS:
                tma.store_wait(0)  # the previous piece has left `out`
                out.store(acc.permute((1, 0)).reshape(1, BM, 128))
                fence_async_shared()  # makes the warps' writes visible to the copy engine
                # The copy engine drops rows past M and columns past N.
                tma.async_copy_shared_to_global(
                    maps.slabs, [piece, stripe.m0, band * 128], out)
            else:
                _store_from_registers(
                    acc, slabs_ptr, maps, piece, band * 128, N, 0, stripe.m0)
            tile = end
        tma.store_wait(0)  # shared memory must outlive the last copy from it


# -----------------------------------------------------------------------------
# The kernel

@gluon.jit(do_not_specialize=["k_tiles", "stripe_length", "a_stripe", "a_programs"])
def hopper_kernel(
    x_desc, codes_desc, scales_desc, a_desc, slabs_desc,  # TensorMaps; a_desc None: no adapter
    slabs_ptr,         # fp32 (S, M, width)    columns N .. N + R are x @ A.T
    N,                 # specialized: if 16 divides it, neighboring rows of W share a mask
    k_tiles, stripe_length, a_stripe, a_programs,  # the StripePlan's
    config: gl.constexpr,  # HopperConfig
    PDL: gl.constexpr,
):
    """x @ [W; A].T as pieces in slabs. Grid axis 0: programs; axis 1: BM rows of x each."""
    BM: gl.constexpr = config.BM
    STAGES: gl.constexpr = config.num_stages
    AHEAD: gl.constexpr = config.ahead
    HAS_A: gl.constexpr = a_desc is not None
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, 128], ROWS_256B)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, 128, 32], ROWS_64B)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 256], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    out = gl.allocate_shared_memory(gl.float32, [1, config.out_rows, 128], SUMS)
    maps = TensorMaps(x_desc, codes_desc, scales_desc, a_desc, slabs_desc)
    ring = Ring(x, codes, scales, full, empty)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    # This program's tiles: `length` of them from `first` on, but only those below `limit`.
    pid = gl.program_id(0)
    is_a = pid < a_programs
    first = (pid - a_programs) * stripe_length
    limit = gl.cdiv(N, 128) * k_tiles
    length = stripe_length
    halves = 1
    if HAS_A and is_a:
        length = a_stripe
        halves = 2
        pieces_a = gl.cdiv(k_tiles, length)
        first = pid // pieces_a * k_tiles + pid % pieces_a * length
        limit = pid // pieces_a * k_tiles + k_tiles
    end = gl.minimum(first + length, limit)
    m0 = gl.program_id(1) * BM
    stripe = Stripe(is_a, pid - a_programs, m0, first, end, halves, k_tiles, length)
    steps = (end - first) * halves

    # Request the weights of the first AHEAD steps before the kernel that computes x has ended. Any
    # more would be ahead of x in the queue to memory.
    for step in gl.static_range(AHEAD):
        if step < steps:
            _fetch_weights(maps, ring, stripe, step, step)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in gl.static_range(AHEAD):
        if step < steps:
            _fetch_x(maps, ring, stripe, step, step)
    gl.warp_specialize([
        (_consume, (maps, ring, stripe, out, slabs_ptr, N)),
        (_produce, (maps, ring, stripe, steps, AHEAD)),
    ], [1], [24])  # warps and registers of the producer


# -----------------------------------------------------------------------------
# Its launch

class HopperConfig(NamedTuple):
    """How hopper_kernel is launched for a given number of rows of x."""
    BM: int                 # rows of x per program
    num_stages: int         # slots in the ring
    programs_per_sm: int    # programs that fit on a multiprocessor at once
    ahead: int              # steps whose weights are requested before x is ready

    @property
    def out_rows(self) -> int:
        """Rows of `out` in shared memory; 8 unused ones if pieces are stored from registers."""
        return self.BM if self.BM <= MAX_COPIED_ROWS.value else 8

    @property
    def maxnreg(self) -> int:
        """Registers per thread at launch; the producer's warp group then keeps 24 of them."""
        return 65536 // (256 * self.programs_per_sm) // 8 * 8


# Maximum rows of x -> HopperConfig(BM, num_stages, programs_per_sm, ahead)
HOPPER_CONFIGS = {
    8: HopperConfig(8, 4, 4, 4),
    16: HopperConfig(16, 3, 4, 2),
    32: HopperConfig(32, 3, 3, 1),
    64: HopperConfig(64, 3, 2, 1),
    256: HopperConfig(128, 2, 2, 1),
}


def hopper_config(M: int) -> HopperConfig:
    """The config for M rows of x."""
    bucket = next((m for m in HOPPER_CONFIGS if M <= m), max(HOPPER_CONFIGS))
    return HOPPER_CONFIGS[bucket]


def hopper_matmul(x: torch.Tensor, weight: PackedWeight, lora_a: torch.Tensor | None = None,
                  pdl: bool = False) -> MatmulSlabs:
    """The fast twin of marlin_fp4.portable_matmul: same arguments, same result. AssertionError on
    other GPUs.

    pdl: requests the first weights and A, which no kernel of the chain may write, while the
    previous kernel is still running, and waits for it to end before reading x. fast/kernels.py
    has the rules.
    """
    M, K = x.shape
    N = weight.N
    device = weight.device
    assert capability(device)[0] == 9, f"needs a Hopper GPU, the weight is on {device}"
    config = hopper_config(M)
    R, plan, slabs = prepare_launch(x, weight, lora_a, config)
    # Made at every launch, but there is only one: decode steps are CUDA graphs.
    codes_map = TensorDescriptor.from_tensor(
        weight.codes.view(-1, TILE_SIDE // 4), [TILE_SIDE, TILE_SIDE // 4], ROWS_64B.value)
    scales_map = TensorDescriptor.from_tensor(
        weight.scales.view(-1, 2 * TILE_SIDE), [1, 2 * TILE_SIDE], FLAT.value)
    a_map = None
    if R:
        a_map = TensorDescriptor.from_tensor(lora_a, [A_TILE] * 2, ROWS_256B.value)
    x_map = TensorDescriptor.from_tensor(x, [config.BM, TILE_SIDE], ROWS_256B.value)
    out_map = TensorDescriptor.from_tensor(
        slabs[:, :, :N], [1, config.out_rows, TILE_SIDE], SUMS.value)
    hopper_kernel[plan.programs, triton.cdiv(M, config.BM)](
        x_map, codes_map, scales_map, a_map, out_map, slabs, N, plan.k_tiles, plan.stripe,
        plan.a_stripe, plan.a_programs, config, PDL=pdl, num_warps=4, maxnreg=config.maxnreg,
        launch_pdl=pdl)
    return plan.result(slabs, weight)
