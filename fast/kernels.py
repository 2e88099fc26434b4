"""
Every Triton kernel but the 4-bit matmul's (portable_fp4.py, marlin_fp4.py).

    the decode step        all between two matmuls, attention to the cache, the draw: see decode.py
    the learner's twins    of what ops.py, attention.py and nvfp4.py mark twin_in_kernels

Finishing a linear. A matmul leaves slabs of split-K partial sums (marlin_fp4.Slabs), columns N..
being x @ A.T of the adapter. Whoever reads them adds those that hold something, in order, and
rounds where model.py does. 1/rms needs a whole row, which no program sees: programs leave sums of
squares of their columns, for the reader of the next matmul (model.py says why it may).

Programmatic dependent launch. A kernel lets the next one start at once (overlap) and loads what
no earlier kernel of the step writes, weights and the rows' state, before it waits for the one
before it (wait): from sm_90 on. This and smaller tiles took a step of 7B with 1 row from 2.9 to
2.2 ms.

Tensors are row-major, contiguous unless a stride is named. Rows past M are masked.

Shapes: M rows, N out_features, R LoRA rank, S slabs, D width, F feed-forward, V vocabulary, H
query heads, KV key-value heads, d head size, T tokens.
"""
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from marlin_fp4 import a_pieces, pieces
from nvfp4 import byte_table

INF = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-1e30)  # below all logits, and finite: no inf - inf
LOG2_E = tl.constexpr(1.4426950408889634)  # attention's softmax is in base 2
AT_ONCE = tl.constexpr(4)  # runs of attention_kernel joined at a time


# -----------------------------------------------------------------------------
# What travels together

class Partial(NamedTuple):
    """A linear as its matmul left it, and what finishes it."""
    sums: tl.tensor         # fp32 (S, M, width)    columns N.. are x @ A.T
    scale: tl.tensor        # fp32 (N,)
    b: tl.tensor            # (N, R)                alpha / rank included
    N: tl.tensor
    width: tl.tensor
    KB: tl.tensor           # blocks along K,
    L: tl.tensor            # of a program: marlin_fp4.pieces
    S: tl.constexpr         # slabs of a column, at most
    R: tl.constexpr         # 0: no adapter


class Squares(NamedTuple):
    """What 1/rms of the residual's rows is made of."""
    sums: tl.tensor         # fp32 (M, TILES)       of squares, each program's
    eps: tl.tensor
    D: tl.tensor
    TILES: tl.constexpr


class Norm(NamedTuple):
    """The norm in front of the next matmul, and where its two results go."""
    weight: tl.tensor       # fp32 (D,)
    noise: tl.tensor        # fp32 (D,)             AQN's
    xw: tl.tensor           # (M, D)                x * (weight + noise), rounded
    squares: Squares        # takes them
    SHIFT: tl.constexpr     # of x before all this: model.FP16_SHIFT, or 1


class State(NamedTuple):
    """Of each row, int64 (M,): sampler.Rows, and what pick_kernel counts."""
    token: tl.tensor
    pos: tl.tensor
    prefix: tl.tensor
    siblings: tl.tensor
    limit: tl.tensor
    key: tl.tensor
    alive: tl.tensor        # 0: repeats its step, which counts for nothing
    made: tl.tensor         # tokens that count, in this window
    step: tl.tensor         # of this window


class Cache(NamedTuple):
    """One layer's keys and values, and which blocks are whose."""
    kv: tl.tensor           # (2, blocks, KV, BLOCK, d)
    plane: tl.tensor        # elements from keys to values
    table: tl.tensor        # int64 (M, width)      a row's blocks
    width: tl.tensor
    KV: tl.constexpr
    BLOCK: tl.constexpr
    d: tl.constexpr


class Shape(NamedTuple):
    """How attention_kernel cuts its work up: decode.attention_shape."""
    SPLITS: int             # programs of a row, at most
    SIBLINGS: int           # rows of a program, at most
    W: int                  # warps of a program
    T: int                  # tokens of a warp's step


class Runs(NamedTuple):
    """What the programs of one row leave for the last of them."""
    acc: tl.tensor          # fp32 (M, H, SPLITS, d)   unscaled sums
    tops: tl.tensor         # fp32 (M, H, SPLITS)      largest logits
    masses: tl.tensor       # fp32 (M, H, SPLITS)      sums of 2^(logit - largest)
    counters: tl.tensor     # int32 (M, KV)            how many are done; left at 0


class Logits(NamedTuple):
    """What is drawn from, and a summary of each row's chunks."""
    x: tl.tensor            # fp32 (M, stride)
    stride: tl.tensor
    V: tl.tensor            # live columns
    squares: Squares        # of the final norm
    inv_temperature: tl.tensor  # fp32 ()
    tops: tl.tensor         # fp32 (M, chunks)      largest logit,
    masses: tl.tensor       # fp32 (M, chunks)      sum of exp(logit - largest)
    SCALED: tl.constexpr    # x is divided by rms and temperature already
    CHUNK: tl.constexpr


# -----------------------------------------------------------------------------
# The end of a linear

@triton.jit
def linear_weights(y: Partial, first, BN: tl.constexpr):
    """Of BN columns in one tile of the matmul: columns, scale, b (R padded, BN), how many slabs."""
    col = first + tl.arange(0, BN)
    r = tl.arange(0, max(16, triton.next_power_of_2(y.R)))
    b = tl.load(y.b + col[None, :] * y.R + r[:, None], mask=(r < y.R)[:, None], other=0.0)
    return col, tl.load(y.scale + col), b, pieces(first, y.KB, y.L)


@triton.jit
def slab_sums(y: Partial, M, tiles):
    """Of every tile (at, live, count) the sum of its slabs, in order.

    Few elements: slabs lie side by side in one tensor, so that all threads load (2.1 and not 2.5 ms
    a step of 7B at 1 row). Many would spill registers that way (4.2 ms at 64 rows, not 3.9), so a
    loop, one for all tiles: the loads of others would wait behind the barrier of a sum that was
    done before. Unrolled by static_range, each slab would be moved through shared memory into the
    layout of the dot that follows: 6.7 us instead of 3.5 (residual_kernel, 32 rows).
    """
    slab = M.to(tl.int64) * y.width
    sums = ()
    if tiles[0][0].shape[0] <= 2:
        s = tl.arange(0, triton.next_power_of_2(y.S))[:, None, None]
        for t in tl.static_range(len(tiles)):
            at, live, count = tiles[t]
            mask = (s < count) & live[None]
            side_by_side = tl.load(y.sums + s * slab + at[None], mask=mask, other=0.0)
            sums += (tl.sum(side_by_side, axis=0),)
    else:
        for t in tl.static_range(len(tiles)):
            sums += (tl.zeros(tiles[t][0].shape, tl.float32),)
        for s in range(y.S):  # not up to `count`: so that loads are issued together
            longer = ()
            for t in tl.static_range(len(tiles)):
                at, live, count = tiles[t]
                x = tl.load(y.sums + s * slab + at, mask=live & (s < count), other=0.0)
                longer += (sums[t] + x,)
            sums = longer
    return sums


@triton.jit
def linear_tiles(y: Partial, M, row, weights, parts):
    """Tiles of a linear (rows, BN), fp32: sums * scale + (x @ A.T rounded to b's type) @ b.T.

    weights: of each, linear_weights; parts: which R columns of x @ A.T is its own, or one for all.
    """
    live = (row < M)[:, None]
    r = tl.arange(0, max(16, triton.next_power_of_2(y.R)))[None, :]
    tiles = ()
    for t in tl.static_range(len(weights)):
        col, _, _, count = weights[t]
        tiles += ((row[:, None] * y.width + col[None, :], live, count),)
    for p in tl.static_range(len(parts)):
        at = row[:, None] * y.width + y.N + parts[p] * y.R + r
        tiles += ((at, live & (r < y.R), a_pieces(y.KB, y.L)),)
    sums = slab_sums(y, M, tiles)
    finished = ()
    for t in tl.static_range(len(weights)):
        _, scale, b, _ = weights[t]
        scale = tl.broadcast_to(scale[None, :], sums[t].shape)
        if y.R > 0:
            xa = sums[len(weights) + min(t, len(parts) - 1)].to(b.dtype)
            finished += (tl.fma(sums[t], scale, tl.dot(xa, b, input_precision="ieee")),)
        else:
            finished += (sums[t] * scale,)
    return finished


@triton.jit
def rstd_of(squares: Squares, row, live):
    """1/rms of rows: row and live (rows, 1) -> (rows,); or of a single one."""
    t = tl.arange(0, triton.next_power_of_2(squares.TILES))
    mask = live & (t < squares.TILES)
    sums = tl.load(squares.sums + row * squares.TILES + t, mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(sums, axis=-1) / squares.D + squares.eps)


@triton.jit
def norm_tile(norm: Norm, x, w, row, col, tile, M):
    x *= norm.SHIFT
    squares = norm.squares
    at = norm.xw + row[:, None] * squares.D + col[None, :]
    tl.store(at, x * w[None, :], mask=(row < M)[:, None])
    tl.store(squares.sums + row * squares.TILES + tile, tl.sum(x * x, axis=1), mask=row < M)


@triton.jit
def overlap(PDL: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


# -----------------------------------------------------------------------------
# The step, from the embedding to the head

@triton.jit(do_not_specialize=["M"])
def embed_kernel(
    state: State,
    embed_ptr,         # (V, D)
    freq_ptr,          # fp32 (HALF,)      rotary frequencies
    resid_ptr,         # fp32 (M, D)       the residual stream
    cos_ptr, sin_ptr,  # fp32 (M, HALF)    the rotary table of this step
    norm: Norm,        # the first
    M, TILE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    tile = tl.program_id(1)
    D = norm.squares.D
    col = tile * TILE + tl.arange(0, TILE)
    overlap(PDL)
    token = tl.load(state.token + row)
    x = tl.load(embed_ptr + token[:, None] * D + col[None, :]).to(tl.float32)
    tl.store(resid_ptr + row[:, None] * D + col[None, :], x)
    w = tl.load(norm.weight + col) + tl.load(norm.noise + col)
    norm_tile(norm, x, w, row, col, tile, M)
    if tile == 0:
        i = tl.arange(0, HALF)
        angle = tl.load(state.pos + row).to(tl.float32)[:, None] * tl.load(freq_ptr + i)[None, :]
        tl.store(cos_ptr + row[:, None] * HALF + i[None, :], tl.cos(angle))
        tl.store(sin_ptr + row[:, None] * HALF + i[None, :], tl.sin(angle))


@triton.jit(do_not_specialize=["M"])
def heads_kernel(
    y: Partial,        # of qkv
    M, squares: Squares,
    bias_ptr,          # fp32 (N,)
    cos_ptr, sin_ptr,  # fp32 (M, d / 2)
    q_ptr,             # (M, H, d)
    cache: Cache, state: State,
    H: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """One head: the end of the linear, 1/rms, bias, rotary; to q, or to the cache."""
    HALF: tl.constexpr = cache.d // 2
    BLOCK: tl.constexpr = cache.BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    first = head * 2 * HALF + i  # rotary pairs element i with i + d/2
    part = tl.where(head < H, 0, tl.where(head < H + cache.KV, 1, 2))
    live = (row < M)[:, None]
    overlap(PDL)
    weights_a = linear_weights(y, head * 2 * HALF, HALF)
    weights_b = linear_weights(y, head * 2 * HALF + HALF, HALF)
    bias_a = tl.load(bias_ptr + first)[None, :]
    bias_b = tl.load(bias_ptr + first + HALF)[None, :]
    pos = tl.load(state.pos + row, mask=row < M, other=0)
    prefix = tl.load(state.prefix + row, mask=row < M, other=0)
    slot = (prefix + BLOCK - 1) // BLOCK * BLOCK + pos - prefix  # own tokens start a block
    block = tl.load(cache.table + row * cache.width + slot // BLOCK, mask=row < M, other=0)
    wait(PDL)
    rstd = rstd_of(squares, row[:, None], live)[:, None]
    a, b = linear_tiles(y, M, row, (weights_a, weights_b), (part,))
    a = a * rstd + bias_a
    b = b * rstd + bias_b
    turned = live & (head < H + cache.KV)  # values are not: an angle of 0
    cos = tl.load(cos_ptr + row[:, None] * HALF + i[None, :], mask=turned, other=1.0)
    sin = tl.load(sin_ptr + row[:, None] * HALF + i[None, :], mask=turned, other=0.0)
    turned_a = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    if head < H:
        out = q_ptr + row[:, None] * (2 * HALF * H) + first[None, :]
        tl.store(out, turned_a, mask=live)
        tl.store(out + HALF, turned_b, mask=live)
    else:
        kv_head = head - H - (part - 1) * cache.KV
        at = ((block * cache.KV + kv_head) * BLOCK + slot % BLOCK) * (2 * HALF)
        out = cache.kv + ((part - 1) * cache.plane + at)[:, None] + i[None, :]
        tl.store(out, turned_a, mask=live)
        tl.store(out + HALF, turned_b, mask=live)


@triton.jit
def block_of(cache: Cache, t, step, row, prefix, ends, offset):
    """Of each warp the block of the cache that holds its tokens of step t."""
    whose = row
    at = t * step
    for m in tl.static_range(len(ends) - 1):
        gap = tl.cdiv(prefix, cache.BLOCK) * cache.BLOCK  # own tokens start a block
        whose = tl.where(t >= ends[m], row + m, whose)
        at = tl.where(t >= ends[m], (t - ends[m]) * step + gap, at)
    page = (at + offset) // cache.BLOCK
    mask = (t < ends[len(ends) - 1]) & (page < cache.width)
    return tl.load(cache.table + whose * cache.width + page, mask=mask, other=0)


@triton.jit
def softmax_step(top, mass, acc, q, k, v, seen):
    """Largest logit, mass (W, J), unscaled sum (W, J, d) so far -> with T tokens k, v (W, T, d)."""
    SCALE: tl.constexpr = LOG2_E * q.shape[2] ** -0.5
    logit = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee") * SCALE
    logit = tl.where(seen, logit, LOWEST)
    new_top = tl.maximum(top, tl.max(logit, axis=2))
    p = tl.exp2(logit - new_top[:, :, None])
    shrink = tl.exp2(top - new_top)
    mass = mass * shrink + tl.sum(p, axis=2)
    acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, :, None], input_precision="ieee")
    return new_top, mass, acc


@triton.jit
def add_halves(x):
    """x (2 W, J, d) -> (W, J, d): x[w] + x[W + w]. tl.sum across warps takes 10 times the code."""
    halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2]))
    a, b = tl.split(tl.permute(halves, (1, 2, 3, 0)))
    return a + b


@triton.jit
def leave(runs: Runs, at, top, mass, acc, live):
    """Run number `at` (J,) of each query, for the last program of a row to join."""
    d: tl.constexpr = acc.shape[1]
    tl.store(runs.tops + at, top, mask=live)
    tl.store(runs.masses + at, mass, mask=live)
    at_acc = at[:, None] * d + tl.arange(0, d)[None, :]
    tl.store(runs.acc + at_acc, acc, mask=live[:, None])
    tl.debug_barrier()  # all threads' stores come before the count


@triton.jit
def join(runs: Runs, first, count, live, d: tl.constexpr):
    """`count` runs of each query from number `first` (J,) on -> mass (J,), unscaled sum (J, d)."""
    i = tl.arange(0, d)
    top = tl.full(live.shape, LOWEST, tl.float32)
    mass = tl.zeros(live.shape, tl.float32)
    acc = tl.zeros((live.shape[0], d), tl.float32)
    for s0 in range(0, count, AT_ONCE):
        tops, masses, accs = (), (), ()
        for s in tl.static_range(AT_ONCE):  # loads that wait for each other cost 0.6 us a run
            left = live & (s0 + s < count)
            at = first + s0 + s
            tops += (tl.load(runs.tops + at, mask=left, other=LOWEST, cache_modifier=".cg"),)
            masses += (tl.load(runs.masses + at, mask=left, other=0.0, cache_modifier=".cg"),)
            at_acc = runs.acc + at[:, None] * d + i[None, :]
            accs += (tl.load(at_acc, mask=left[:, None], other=0.0, cache_modifier=".cg"),)
        for s in tl.static_range(AT_ONCE):
            new_top = tl.maximum(top, tops[s])
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(tops[s] - new_top)
            mass = mass * shrink + weight * masses[s]
            acc = acc * shrink[:, None] + accs[s] * weight[:, None]
            top = new_top
    return mass, acc


@triton.jit
def join_warps(top, mass, acc):
    """Largest logit, mass (W, J) and unscaled sum (W, J, d) of W warps -> the same of all."""
    highest = tl.max(top, axis=0)
    weight = tl.exp2(top - highest[None, :])  # 0 for a warp that saw nothing
    mass = tl.sum(mass * weight, axis=0)
    acc *= weight[:, :, None]
    if acc.shape[0] == 8:
        acc = add_halves(acc)
    acc = add_halves(add_halves(acc))
    return highest, mass, tl.reshape(acc, (acc.shape[1], acc.shape[2]))


@triton.jit
def attention_kernel(
    q_ptr,             # (M, H, d)
    cache: Cache, state: State,
    out_ptr,           # (M, H, d)
    runs: Runs,
    H: tl.constexpr,
    J: tl.constexpr,   # queries of a tile
    shape: tl.constexpr,  # Shape
    PDL: tl.constexpr,
):
    """A key-value head, the H/KV query heads that share it, a program's part of a row's context.

    A step takes T tokens for each of W warps of each of a row's programs, of the prefix first, then
    of the row's own. A warp keeps a softmax of its own: nothing in the loop waits for another. The
    last program to arrive joins what they leave in order: the result does not depend on who it is.

    SIBLINGS > 1: of up to so many neighbours with one prefix, at the first of them. Query j of the
    tile is head j % G of row + j // G; the prefix is read once, then each sibling's own tokens,
    hidden from the others. A row gets the same tokens in the same warps as alone: the same bits.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    SIBLINGS: tl.constexpr = shape.SIBLINGS
    W: tl.constexpr = shape.W
    G: tl.constexpr = H // cache.KV
    overlap(PDL)
    prefix = tl.load(state.prefix + row).to(tl.int32)
    siblings, count = 1, shape.SPLITS
    if SIBLINGS > 1:
        siblings = tl.load(state.siblings + row).to(tl.int32)
    elif shape.SPLITS > 1:
        steps = tl.cdiv(tl.load(state.pos + row).to(tl.int32) + 1, W * shape.T)
        count = tl.minimum(steps, shape.SPLITS)
    if (siblings == 0) | (split >= count):
        return
    step = W * shape.T * count  # tokens
    own, ends = (), (tl.cdiv(prefix, step),)  # each sibling's tokens; steps up to their last
    for m in tl.static_range(SIBLINGS):
        pos = tl.load(state.pos + row + m, mask=m < siblings, other=0).to(tl.int32)
        own += (tl.where(m < siblings, pos + 1 - prefix, 0),)
        ends += (ends[m] + tl.cdiv(own[m], step),)
    offset = (split * W + tl.arange(0, W)) * shape.T  # of each warp's first token in a step
    block = block_of(cache, 0, step, row, prefix, ends, offset)
    wait(PDL)
    j = tl.arange(0, J)
    i = tl.arange(0, cache.d)
    live = j < siblings * G
    head = (row + j // G) * H + kv_head * G + j % G  # of the M * H query heads
    at_q = head[:, None] * cache.d + i[None, :]
    q = tl.load(q_ptr + at_q, mask=live[:, None], other=0.0)
    q = tl.broadcast_to(q[None], (W, J, cache.d))

    slot = tl.arange(0, shape.T)
    within = slot[None, :, None] * cache.d + i[None, None, :]
    top = tl.full((W, J), LOWEST, tl.float32)
    mass = tl.zeros((W, J), tl.float32)
    acc = tl.zeros((W, J, cache.d), tl.float32)
    for t in range(0, ends[SIBLINGS]):
        of = -1  # whose tokens this step has; -1: everybody's
        start = 0
        tokens = prefix
        for m in tl.static_range(SIBLINGS):
            of = tl.where(t >= ends[m], m, of)
            start = tl.where(t >= ends[m], ends[m], start)
            tokens = tl.where(t >= ends[m], own[m], tokens)
        token = (t - start) * step + offset
        at = (block * cache.KV + kv_head) * cache.BLOCK + token % cache.BLOCK
        page_ptr = cache.kv + at * cache.d
        # One step early: if keys and values waited for this load, the compiler would keep a single
        # buffer for them.
        block = block_of(cache, t + 1, step, row, prefix, ends, offset)
        valid = token[:, None] + slot[None, :] < tokens  # (W, T)
        k = tl.load(page_ptr[:, None, None] + within, mask=valid[:, :, None], other=0.0)
        page_ptr += cache.plane
        v = tl.load(page_ptr[:, None, None] + within, mask=valid[:, :, None], other=0.0)
        seen = valid[:, None, :] & ((of < 0) | (j // G == of))[None, :, None]
        top, mass, acc = softmax_step(top, mass, acc, q, k, v, seen)
    top, mass, acc = join_warps(top, mass, acc)

    if count > 1:
        first = head * shape.SPLITS  # of (M, H, SPLITS)
        leave(runs, first + split, top, mass, acc, live)
        counter_ptr = runs.counters + row * cache.KV + kv_head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < count - 1:
            return
        tl.store(counter_ptr, 0)  # for the next layer
        mass, acc = join(runs, first, count, live, cache.d)
    tl.store(out_ptr + at_q, acc / mass[:, None], mask=live[:, None])


@triton.jit(do_not_specialize=["M"])
def residual_kernel(
    y: Partial, M,     # of o or down
    resid_ptr,         # fp32 (M, D)
    norm: Norm,        # that follows
    TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """residual += linear, normed for the next matmul."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    col = tile * TILE + tl.arange(0, TILE)
    at = row[:, None] * norm.squares.D + col[None, :]
    overlap(PDL)
    weights = linear_weights(y, tile * TILE, TILE)
    w = tl.load(norm.weight + col) + tl.load(norm.noise + col)
    wait(PDL)
    x = tl.load(resid_ptr + at, mask=(row < M)[:, None], other=0.0)
    x += linear_tiles(y, M, row, (weights,), (0,))[0]
    tl.store(resid_ptr + at, x, mask=(row < M)[:, None])
    norm_tile(norm, x, w, row, col, tile, M)


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(
    y: Partial,        # of gate|up: N = 2 F
    M, squares: Squares,
    out_ptr,           # (M, F)
    TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """out = silu(gate) * up, gate | up = linear / rms."""
    F = y.N // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * TILE
    col = first + tl.arange(0, TILE)
    overlap(PDL)
    of_gate = linear_weights(y, first, TILE)
    of_up = linear_weights(y, first + F, TILE)
    wait(PDL)
    rstd = rstd_of(squares, row[:, None], (row < M)[:, None])[:, None]
    gate, up = linear_tiles(y, M, row, (of_gate, of_up), (0, 1))
    gate *= rstd
    up *= rstd
    root = tl.rsqrt(1 + tl.exp(-gate))  # of sigmoid(gate); a division takes longer
    out = out_ptr + row[:, None] * F + col[None, :]
    tl.store(out, gate * root * root * up, mask=(row < M)[:, None])


# -----------------------------------------------------------------------------
# The draw

@triton.jit
def logit_scale(logits: Logits, row):
    """1 / (rms * temperature) of one row."""
    if logits.SCALED:
        return 1.0
    return rstd_of(logits.squares, row, True) * tl.load(logits.inv_temperature)


@triton.jit
def logits_at(logits: Logits, row, column):
    """One row's unscaled logits; -inf past the live ones."""
    at = row.to(tl.int64) * logits.stride + column
    return tl.load(logits.x + at, mask=column < logits.V, other=-INF)


@triton.jit
def chunk_kernel(logits: Logits):
    """Top and mass of one chunk of a row."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    i = chunk * logits.CHUNK + tl.arange(0, logits.CHUNK)
    x = logits_at(logits, row, i) * logit_scale(logits, row)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(logits.tops + at, top)
    mass = tl.sum(tl.exp(x - tl.maximum(top, LOWEST)), axis=0)  # a chunk may be all -inf
    tl.store(logits.masses + at, mass)


@triton.jit
def uniform(key, pos):
    """sampler.uniforms, bit for bit: key, pos int64 -> fp32 in (0, 1)."""
    z = key.to(tl.uint64) + (pos + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z >> 41).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23


@triton.jit
def inverse_cdf(masses, i, target):
    """-> the first i where masses add up to more than target; what of it those before leave."""
    at = tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)
    at = tl.minimum(at, tl.max(tl.where(masses > 0, i, 0), axis=0))  # sums round
    return at, target - tl.sum(tl.where(i < at, masses, 0.0), axis=0)


@triton.jit
def pick_kernel(
    logits: Logits, chunks,
    state: State,
    ends_ptr,          # int64 (ENDS,)          end ids, padded with -1
    tokens_ptr,        # int64 (WINDOW, stride)
    logprobs_ptr,      # fp32 (WINDOW, stride)
    stride,
    GREEDY: tl.constexpr, CHUNKS_P: tl.constexpr, ENDS: tl.constexpr,
):
    """The inverse CDF in vocabulary order, first the chunk, then inside it; advances the row."""
    row = tl.program_id(0)
    c = tl.arange(0, CHUNKS_P)
    tops = tl.load(logits.tops + row * chunks + c, mask=c < chunks, other=-INF)
    top = tl.max(tops, axis=0)
    masses = tl.load(logits.masses + row * chunks + c, mask=c < chunks, other=0.0)
    masses *= tl.exp(tops - top)
    mass = tl.sum(masses, axis=0)
    pos = tl.load(state.pos + row)
    scale = logit_scale(logits, row)
    target = uniform(tl.load(state.key + row), pos) * mass
    if GREEDY:
        chunk = tl.argmax(tops, axis=0)
    else:
        chunk, target = inverse_cdf(masses, c, target)
    i = tl.arange(0, logits.CHUNK)
    x = logits_at(logits, row, chunk * logits.CHUNK + i) * scale
    if GREEDY:
        inside = tl.argmax(x, axis=0)
    else:
        inside, _ = inverse_cdf(tl.exp(x - top), i, target)
    token = tl.minimum(chunk * logits.CHUNK + inside, logits.V - 1)  # of a row of NaN, too
    logprob = logits_at(logits, row, token) * scale - top - tl.log(mass)
    step = tl.load(state.step + row)
    tl.store(tokens_ptr + step * stride + row, token.to(tl.int64))
    tl.store(logprobs_ptr + step * stride + row, logprob)
    # sampler.TorchEngine's last lines. A row that is not alive repeats its step.
    alive = tl.load(state.alive + row)
    ended = tl.max((tl.load(ends_ptr + tl.arange(0, ENDS)) == token).to(tl.int32), axis=0)
    goes_on = (ended == 0) & (pos + alive < tl.load(state.limit + row))
    tl.store(state.token + row, tl.where(alive > 0, token, tl.load(state.token + row)))
    tl.store(state.made + row, tl.load(state.made + row) + alive)
    tl.store(state.pos + row, pos + alive)
    tl.store(state.alive + row, tl.where(goes_on, alive, 0))
    tl.store(state.step + row, step + 1)


# -----------------------------------------------------------------------------
# The learner's twins

compiled = cache(torch.compile)


def elementwise(function, x, *rest):
    """One kernel, and one for the backward."""
    if not torch.is_grad_enabled():  # a prefill is not worth the compiling
        return function(x, *rest)
    for t in (x, *rest):  # a dynamic width would cost every element an integer division
        if isinstance(t, torch.Tensor) and t.shape[0] == x.shape[0]:
            torch._dynamo.maybe_mark_dynamic(t, 0)
    return compiled(function)(x, *rest)


def attend_spans(q, k, v, spans):
    return torch.ops.aten._flash_attention_forward(
        q, k, v, spans.q_starts, spans.k_starts, spans.longest_q, spans.longest_k, 0.0,
        spans.causal, False)[:2]


def attend_spans_backward(dout, q, k, v, out, lse, spans):
    """FlashAttention's adds up dq by atomics, in any order, but for a global switch."""
    unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # of dropout
    switch = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, spans.q_starts, spans.k_starts, spans.longest_q,
            spans.longest_k, 0.0, spans.causal, *unused)
    finally:
        torch.set_deterministic_debug_mode(switch)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def merge(out, lse, other, other_lse):
    """A program does one token; the reference takes a dozen passes over out."""
    T, H, d = out.shape
    merge_kernel[T,](out, lse, lse.stride(0), other, other_lse, other_lse.stride(0), H, d,
                     BLOCK_H=triton.next_power_of_2(H), BLOCK_D=triton.next_power_of_2(d))


@triton.jit
def merge_kernel(
    out_ptr,           # (T, H, d)      takes the result, as does lse
    lse_ptr,           # fp32 (H, T)    row stride lse_stride
    lse_stride,
    other_ptr,         # as out_ptr
    other_lse_ptr,     # as lse_ptr
    other_stride, H, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    col = tl.arange(0, BLOCK_D)
    a = tl.load(lse_ptr + head * lse_stride + token, mask=head < H, other=0.0)
    b = tl.load(other_lse_ptr + head * other_stride + token, mask=head < H, other=0.0)
    top = tl.maximum(a, b)
    both = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
    at = token * H * D + head[:, None] * D + col[None, :]
    live = (head < H)[:, None] & (col < D)[None, :]
    mine = tl.load(out_ptr + at, mask=live, other=0.0).to(tl.float32) * tl.exp(a - both)[:, None]
    its = tl.load(other_ptr + at, mask=live, other=0.0).to(tl.float32) * tl.exp(b - both)[:, None]
    tl.store(out_ptr + at, mine + its, mask=live)
    tl.store(lse_ptr + head * lse_stride + token, both, mask=head < H)


def swiglu(y, rstd, h, keep=True):
    """Reads y once; a program does 1024 columns of one row."""
    F = h.shape[1]
    rounded = torch.empty_like(y, dtype=h.dtype) if keep else None
    swiglu_forward_kernel[y.shape[0], triton.cdiv(F, 1024)](
        y, rstd, h, h.stride(0), rounded, F, BLOCK=1024, num_warps=8)
    return rounded


@triton.jit
def swiglu_forward_kernel(
    y_ptr,             # fp32 (T, 2 F)     gate | up
    rstd_ptr,          # fp32 (T, 1)
    h_ptr, h_stride,   # (T, F)            its row stride
    rounded_ptr,       # (T, 2 F)          takes y in h's dtype; or None
    F, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row * 2F passes 2^31 from 57k tokens of 7B on
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < F
    rstd = tl.load(rstd_ptr + row)
    gate = tl.load(y_ptr + row * 2 * F + col, mask=live, other=0.0)
    up = tl.load(y_ptr + row * 2 * F + F + col, mask=live, other=0.0)
    if rounded_ptr is not None:
        rounded = rounded_ptr + row * 2 * F + col
        tl.store(rounded, gate, mask=live)
        tl.store(rounded + F, up, mask=live)
    gate *= rstd
    up *= rstd
    tl.store(h_ptr + row * h_stride + col, gate * tl.sigmoid(gate) * up, mask=live)


def swiglu_backward(y, rstd, dh, dy):
    """Reads y and dh once, writes dy once; a program does one row."""
    drstd = torch.empty_like(rstd)
    swiglu_backward_kernel[y.shape[0],](y, rstd, dh.contiguous(), dy, dy.stride(0), drstd,
                                        dh.shape[1], BLOCK=2048, num_warps=8)
    return drstd


@triton.jit
def swiglu_backward_kernel(
    y_ptr,             # (T, 2 F)          fp32, or as swiglu() kept it
    rstd_ptr,          # fp32 (T, 1)
    dh_ptr,            # (T, F)
    dy_ptr, dy_stride,  # (T, 2 F)          its row stride
    drstd_ptr,         # fp32 (T, 1)
    F, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        col = start + tl.arange(0, BLOCK)
        live = col < F
        y_gate = tl.load(y_ptr + row * 2 * F + col, mask=live, other=0.0).to(tl.float32)
        y_up = tl.load(y_ptr + row * 2 * F + F + col, mask=live, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + row * F + col, mask=live, other=0.0).to(tl.float32)
        gate = y_gate * rstd
        up = y_up * rstd
        s = tl.sigmoid(gate)
        silu = gate * s
        dgate = dh * up * (s + silu * (1 - s))
        dup = dh * silu
        total += dgate * y_gate + dup * y_up
        dy = dy_ptr + row * dy_stride + col
        tl.store(dy, dgate * rstd, mask=live)
        tl.store(dy + F, dup * rstd, mask=live)
    tl.store(drstd_ptr + row, tl.sum(total))


def softmax_at(products, scale, targets, live, dtype=None):
    """A program reads one row twice, where the reference moves it twenty times."""
    c, V = products.shape
    sums = products.new_empty(3, c)
    ahead = products.new_empty(c, V, dtype=dtype) if dtype else None
    softmax_at_kernel[c,](
        products, scale, targets, sums, ahead, c, V, live, BLOCK=4096, num_warps=8)
    return sums, ahead


@triton.jit
def softmax_at_kernel(
    products_ptr,      # fp32 (c, V)
    scale_ptr,         # fp32 (c, 1)
    targets_ptr,       # int64 (c,)
    sums_ptr,          # fp32 (3, c)       the target's logit, log-sum-exp, mean under softmax
    ahead_ptr,         # (c, V)            onehot - softmax, or None
    c, V, live, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    target = tl.load(targets_ptr + row)
    products_ptr += row * V
    top = tl.full((BLOCK,), LOWEST, tl.float32)  # each lane's own: one reduction at the end
    mass = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, live, BLOCK):
        col = start + tl.arange(0, BLOCK)
        # not col < live, which is odd: that would be loads of 4 bytes
        logit = tl.load(products_ptr + col, mask=col < V, other=0.0) * scale
        logit = tl.where(col < live, logit, LOWEST)
        higher = tl.maximum(top, logit)
        old = tl.exp(top - higher)
        new = tl.exp(logit - higher)
        mass = mass * old + new
        mean = mean * old + new * logit
        top = higher
    highest = tl.max(top, 0)
    weight = tl.exp(top - highest)  # 0 for a lane that saw nothing
    total = tl.sum(mass * weight, 0)
    lse = highest + tl.log(total)
    tl.store(sums_ptr + row, tl.load(products_ptr + target) * scale)
    tl.store(sums_ptr + c + row, lse)
    tl.store(sums_ptr + 2 * c + row, tl.sum(mean * weight, 0) / total)
    if ahead_ptr is not None:
        for start in range(0, V, BLOCK):
            col = start + tl.arange(0, BLOCK)
            p = tl.exp(tl.load(products_ptr + col, mask=col < V, other=0.0) * scale - lse)
            value = tl.where(col == target, 1.0, 0.0) - tl.where(col < live, p, 0.0)
            tl.store(ahead_ptr + row * V + col, value, mask=col < V)


def dequantize_codes(packed, scale, levels, dtype, out=None):
    """MXFP4 and NF4: without it, a comparison with them would be one with torch's temporaries."""
    N, K_bytes = packed.shape
    if out is None:
        out = torch.empty(N, 2 * K_bytes, dtype=dtype, device=packed.device)
    look_up_kernel[N, triton.cdiv(K_bytes, 2048)](
        packed, scale.contiguous(), byte_table(levels, packed.device), out, out.stride(0), K_bytes,
        K_bytes // scale.shape[1], BYTES=2048, num_warps=8)
    return out


@triton.jit
def look_up_kernel(
    packed_ptr,        # uint8 (N, K_BYTES)
    scale_ptr,         # fp32 (N, K_BYTES / block_bytes)
    pairs_ptr,         # fp32 (256, 2)     both codes of a byte
    w_ptr,             # (N, K)            row stride w_stride
    w_stride, K_BYTES, block_bytes, BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    live = at < K_BYTES
    byte = tl.load(packed_ptr + row * K_BYTES + at, mask=live, other=0).to(tl.int32)
    scale_at = row * (K_BYTES // block_bytes) + at // block_bytes
    scale = tl.load(scale_ptr + scale_at, mask=live, other=0.0)
    even = tl.load(pairs_ptr + 2 * byte) * scale
    odd = tl.load(pairs_ptr + 2 * byte + 1) * scale
    k = tl.program_id(1) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(w_ptr + row * w_stride + k, tl.interleave(even, odd), mask=k < 2 * K_BYTES)
