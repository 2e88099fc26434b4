"""
Triton kernels: everything between the matmuls of a decode step, and the learner's.

    the decode step        from the embedding to the draw; decode.py lists the kernels in order
    the learner's          GPU versions of the functions marked @replaced_on_gpu in backward.py and
                           ops.py, which are the reference, in plain torch

The matmuls themselves are in marlin_fp4.py and hopper_fp4.py.

Finishing a linear. A matmul leaves slabs: split-K partial sums, with the adapter's x @ A.T in the
columns from N on. The kernel that reads them finishes the linear:

    y = (sum of W's slabs) * scale  +  round(sum of A's slabs) @ b.T

It adds up the slabs that were written, in order, and rounds where model.py rounds.

RMSNorm without a pass over the row. 1/rms needs a complete row, and no program here sees one, so
each norm is split in two (see model.py). The kernel before a matmul writes x * w and the sum of
squares of its own columns; the kernel after it adds up those sums and multiplies by 1/rms.

Programmatic dependent launch (PDL, from sm_90 on). Many of these kernels run for less time than
they take to launch. So each one first lets the next one launch. Then, before waiting for the
previous one to end, it loads what no kernel of the step writes: weights and the rows' state.

    kernel 1   [let_next_kernel_start | load weights | wait | work .......... ]
    kernel 2             [let_next_kernel_start | load weights | wait ........ | work ...... ]

Two rules keep this correct. Before its wait, a kernel loads nothing that an earlier kernel of the
step writes. And every kernel waits, even if it reads none of the previous one's output, so once a
kernel is past its wait, all earlier ones have ended. embed_kernel starts the chain; it is launched
without PDL, after the entire previous step.

Tensors are row-major, and contiguous unless a stride is given. Rows past M are masked.

Shapes: M rows, N out_features, R LoRA rank, S slabs, D hidden size, F intermediate size, V
vocabulary, H query heads, KV key-value heads, d head size, T tokens.
"""
from functools import cache
from typing import Callable, NamedTuple

import torch
import triton
import triton.language as tl

from fast.backward import Spans
from marlin_fp4 import w_pieces

INF = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-1e30)  # below every logit, and finite: -inf - -inf would be NaN
LOG2_E = tl.constexpr(1.4426950408889634)  # attention's softmax is in base 2
SPLITS_AT_ONCE = tl.constexpr(4)  # splits of a row that join_splits loads together


# -----------------------------------------------------------------------------
# Arguments that travel together

class UnfinishedLinear(NamedTuple):
    """A linear's matmul result (marlin_fp4.MatmulSlabs), and what it takes to finish it."""
    sums: tl.tensor         # fp32 (S, M, width)    columns from N on: x @ A.T
    scale: tl.tensor        # fp32 (N,)
    b: tl.tensor            # (N, R)                LoRA's B, times alpha / rank
    N: tl.tensor
    width: tl.tensor        # columns of a slab: N + R, rounded up
    k_tiles: tl.tensor      # these two determine how many slabs have a piece of a column of W:
    stripe: tl.tensor       # marlin_fp4.w_pieces
    a_pieces: tl.tensor     # slabs that have a piece of x @ A.T
    S: tl.constexpr
    R: tl.constexpr         # 0: no adapter


class RowSquares(NamedTuple):
    """Sums of squares of the residual's rows, from which the reader computes 1/rms."""
    sums: tl.tensor         # fp32 (M, TILES)       one per row and program
    eps: tl.tensor
    D: tl.tensor
    TILES: tl.constexpr


class NextNorm(NamedTuple):
    """The norm before the next matmul, and where its two results go."""
    weight: tl.tensor       # fp32 (D,)
    noise: tl.tensor        # fp32 (D,)             AQN's
    xw: tl.tensor           # (M, D)                output: x * (weight + noise), rounded
    squares: RowSquares     # output: sums of x^2


class HeadTerms(NamedTuple):
    """Biases of q, k and v, or norms of q's and k's heads. A model has one or the other."""
    bias: tl.tensor         # fp32 (N,), or None
    gains: tl.tensor        # fp32 (2, d): weights of the norms of q's and k's heads, or None
    EPS: tl.constexpr       # the norms'


class RotaryTable(NamedTuple):
    """This step's rotary angles."""
    cos: tl.tensor          # fp32 (M, d / 2)
    sin: tl.tensor


class RowState(NamedTuple):
    """Each row's state, int64 (M,): sampler.DecodeBatch without its table and with siblings in
    place of groups, plus pick_kernel's counters.
    """
    token: tl.tensor        # the next input
    pos: tl.tensor          # its position
    prefix: tl.tensor       # tokens of the row's prefix
    siblings: tl.tensor     # neighbors that share a prefix form chunks of at most the plan's
                            # SIBLINGS; the first row has the chunk's size, the others 0.
                            # 8 rows in chunks of 3: 3 0 0 3 0 0 2 0
    limit: tl.tensor        # the last position
    key: tl.tensor          # seeds the row's random numbers
    alive: tl.tensor        # 0: the row has ended and repeats its last step, without effect
    made: tl.tensor         # valid tokens in this window
    step: tl.tensor         # index within this window


class LayerCache(NamedTuple):
    """One layer's keys and values, and the table of which row uses which KV blocks."""
    kv: tl.tensor           # (2, blocks, KV, KV_BLOCK, d)
    plane: tl.tensor        # offset from a key to its value
    table: tl.tensor        # int64 (M, width)      each row's KV blocks: its prefix's, then its own
    width: tl.tensor
    KV: tl.constexpr
    KV_BLOCK: tl.constexpr
    d: tl.constexpr


class AttentionPlan(NamedTuple):
    """How attention_kernel divides its work, as chosen by decode.attention_plan."""
    SPLITS: int             # maximum programs that share a row's context
    SIBLINGS: int           # maximum rows with the same prefix that a program handles together
    WARPS: int              # per program
    TOKENS: int             # per warp and step, all from one KV block


class SplitSoftmaxes(NamedTuple):
    """Where programs that share a row leave their softmaxes for the last one to join."""
    acc: tl.tensor          # fp32 (M, H, SPLITS, d)   sums of 2^(logit - largest) * value
    tops: tl.tensor         # fp32 (M, H, SPLITS)      largest logits
    masses: tl.tensor       # fp32 (M, H, SPLITS)      sums of 2^(logit - largest)
    counters: tl.tensor     # int32 (M, KV)            programs that are done; reset to 0


class LogitChunks(NamedTuple):
    """The logits to draw tokens from, and a summary of each chunk of a row."""
    x: tl.tensor            # fp32 (M, stride)
    stride: tl.tensor
    V: tl.tensor            # columns that are tokens
    squares: RowSquares     # of the final norm
    inv_temperature: tl.tensor  # fp32 ()
    tops: tl.tensor         # fp32 (M, chunks)      largest logit
    masses: tl.tensor       # fp32 (M, chunks)      sum of exp(logit - the chunk's largest)
    SCALED: tl.constexpr    # x is already divided by rms and temperature
    CHUNK: tl.constexpr     # columns per chunk


# -----------------------------------------------------------------------------
# The end of a linear

@triton.jit
def load_linear(y: UnfinishedLinear, first, BN: tl.constexpr):
    """Loads what finishes BN columns from `first` on, all in one band of the matmul -> the columns,
    their scale, b (R padded to a power of two, BN), and how many slabs have a piece of them.

    A step writes none of this, so kernels call it before they wait.
    """
    col = first + tl.arange(0, BN)
    r = tl.arange(0, max(16, triton.next_power_of_2(y.R)))  # tl.dot sums over 16 or more
    b = tl.load(y.b + col[None, :] * y.R + r[:, None], mask=(r < y.R)[:, None], other=0.0)
    return col, tl.load(y.scale + col), b, w_pieces(first, y.k_tiles, y.stripe)


@triton.jit
def slab_sums(y: UnfinishedLinear, M, tiles):
    """For each tile (at, live, count), the sum of its first `count` slabs, in order.

    at: places of the tile's elements in a slab; live: which of them are wanted.
    """
    # The sum runs to S, a compile-time constant, and `count` masks the loads, so the compiler can
    # issue the loads of several slabs together.
    slab = M.to(tl.int64) * y.width
    sums = ()
    if tiles[0][0].shape[0] <= 2:
        # Few elements: load all slabs side by side and reduce that axis, so every thread has
        # something to load. With many elements, that tensor would spill registers.
        s = tl.arange(0, triton.next_power_of_2(y.S))[:, None, None]
        for t in tl.static_range(len(tiles)):
            at, live, count = tiles[t]
            mask = (s < count) & live[None]
            side_by_side = tl.load(y.sums + s * slab + at[None], mask=mask, other=0.0)
            sums += (tl.sum(side_by_side, axis=0),)
    else:
        # Two traps. With one loop per tile, the second loop's loads would wait behind the barrier
        # at the end of the first. With static_range over slabs, the unrolled loads would take on
        # the layout of the following dot, through shared memory.
        for t in tl.static_range(len(tiles)):
            sums += (tl.zeros(tiles[t][0].shape, tl.float32),)
        for s in range(y.S):
            longer = ()
            for t in tl.static_range(len(tiles)):
                at, live, count = tiles[t]
                x = tl.load(y.sums + s * slab + at, mask=live & (s < count), other=0.0)
                longer += (sums[t] + x,)
            sums = longer
    return sums


@triton.jit
def finish_linear(y: UnfinishedLinear, M, row, loaded, parts):
    """-> tiles (rows, BN) of the linear in fp32, one for each of `loaded` (load_linear).

    parts: the part of the fused matrix (q|k|v, gate|up) that each tile, or all of them, belongs to.
    Each part has its own R columns of x @ A.T.
    """
    live = (row < M)[:, None]
    r = tl.arange(0, max(16, triton.next_power_of_2(y.R)))[None, :]
    tiles = ()
    for t in tl.static_range(len(loaded)):
        col, _, _, count = loaded[t]
        tiles += ((row[:, None] * y.width + col[None, :], live, count),)
    for p in tl.static_range(len(parts)):
        at = row[:, None] * y.width + y.N + parts[p] * y.R + r
        tiles += ((at, live & (r < y.R), y.a_pieces),)
    sums = slab_sums(y, M, tiles)
    finished = ()
    for t in tl.static_range(len(loaded)):
        _, scale, b, _ = loaded[t]
        scale = tl.broadcast_to(scale[None, :], sums[t].shape)
        if y.R > 0:
            # Rounded like the learner's x @ A.T, to the dtype of the next matmul's input.
            xa = sums[len(loaded) + min(t, len(parts) - 1)].to(b.dtype)
            finished += (tl.fma(sums[t], scale, tl.dot(xa, b, input_precision="ieee")),)
        else:
            finished += (sums[t] * scale,)
    return finished


@triton.jit
def row_rstd(squares: RowSquares, row, live):
    """1/rms of rows. row and live are (rows, 1) and the result (rows,), or all are scalars."""
    t = tl.arange(0, triton.next_power_of_2(squares.TILES))
    mask = live & (t < squares.TILES)
    sums = tl.load(squares.sums + row * squares.TILES + t, mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(sums, axis=-1) / squares.D + squares.eps)


@triton.jit
def store_normed(norm: NextNorm, x, w, row, col, tile, M):
    """Stores what the next matmul and its reader need of x, a tile (rows, columns) of the residual:
    x * w, rounded, and the sum of squares of its columns.
    """
    squares = norm.squares
    at = norm.xw + row[:, None] * squares.D + col[None, :]
    tl.store(at, x * w[None, :], mask=(row < M)[:, None])
    tl.store(squares.sums + row * squares.TILES + tile, tl.sum(x * x, axis=1), mask=row < M)


@triton.jit
def let_next_kernel_start(PDL: tl.constexpr):
    """Lets the next kernel launch once every program of this one has reached this point."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Waits until the previous kernel has ended and everything it wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


# -----------------------------------------------------------------------------
# The step, from the embedding to the head

@triton.jit(do_not_specialize=["M"])
def embed_kernel(
    state: RowState,
    embed_ptr,         # (V, D)
    freq_ptr,          # fp32 (HALF,)      rotary frequencies
    resid_ptr,         # fp32 (M, D)       output: the residual stream
    cos_ptr, sin_ptr,  # fp32 (M, HALF)    output: this step's rotary table
    norm: NextNorm,
    M, TILE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):
    """residual = embed[token], normed for the first matmul; a program per row and TILE columns."""
    # No wait: launched without PDL, this starts after the previous step, so the rows' state is
    # final for all kernels of this step.
    row = tl.program_id(0) + tl.arange(0, 1)
    tile = tl.program_id(1)
    D = norm.squares.D
    col = tile * TILE + tl.arange(0, TILE)
    let_next_kernel_start(PDL)
    token = tl.load(state.token + row)
    x = tl.load(embed_ptr + token[:, None] * D + col[None, :]).to(tl.float32)
    tl.store(resid_ptr + row[:, None] * D + col[None, :], x)
    w = tl.load(norm.weight + col) + tl.load(norm.noise + col)
    store_normed(norm, x, w, row, col, tile, M)
    if tile == 0:
        i = tl.arange(0, HALF)
        angle = tl.load(state.pos + row).to(tl.float32)[:, None] * tl.load(freq_ptr + i)[None, :]
        tl.store(cos_ptr + row[:, None] * HALF + i[None, :], tl.cos(angle))
        tl.store(sin_ptr + row[:, None] * HALF + i[None, :], tl.sin(angle))


# A row's slots. Keys and values are in slots, KV_BLOCK of them per KV block, and the row's line of
# the table says which block of the cache each KV block is. All rows of a group share the prefix, so
# a row's own tokens can't go into the prefix's last block: they start a new one, and the slots in
# between stay empty. With KV_BLOCK 32 and a prefix of 40 tokens, this is the token at position 45:
#
#     slot       0                31  32     39  40     63  64     69  70      95
#               +--------------------+----------+----------+----------+-----------+
#               |    the prefix's 40 tokens     |  empty   |   own    |   free    |
#               +--------------------+----------+----------+----------+-----------+
#     position   0                           39             40 .. 45
#     table     |      block 7       |       block 3       |       block 12       |
#                     shared by all rows of the group           this row's own
#
#     slot = prefix rounded up to whole blocks + pos - prefix = 64 + 45 - 40 = 69

@triton.jit(do_not_specialize=["M"])
def heads_kernel(
    y: UnfinishedLinear,  # qkv's
    M, squares: RowSquares,
    terms: HeadTerms, rotary: RotaryTable,
    q_ptr,             # (M, H, d)         output: the queries
    cache: LayerCache, state: RowState,
    H: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """Finishes qkv for one head of ROWS rows: slabs, adapter, 1/rms, bias, the head's norm, rotary
    embedding.

    The first H heads are queries and go to q; the next KV are keys and the last KV values, and both
    go to the cache. All three run the same code, but values aren't normed and their angle is 0.
    """
    HALF: tl.constexpr = cache.d // 2
    KV_BLOCK: tl.constexpr = cache.KV_BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    first = head * 2 * HALF + i  # the rotary embedding pairs element i with i + d/2: tiles a and b
    part = tl.where(head < H, 0, tl.where(head < H + cache.KV, 1, 2))  # q, k or v
    live = (row < M)[:, None]
    let_next_kernel_start(PDL)
    loaded_a = load_linear(y, head * 2 * HALF, HALF)
    loaded_b = load_linear(y, head * 2 * HALF + HALF, HALF)
    if terms.bias is not None:
        bias_a = tl.load(terms.bias + first)[None, :]
        bias_b = tl.load(terms.bias + first + HALF)[None, :]
    if terms.gains is not None:
        at_gain = terms.gains + tl.minimum(part, 1) * 2 * HALF + i  # unused for values (part 2)
        gain_a = tl.load(at_gain)[None, :]
        gain_b = tl.load(at_gain + HALF)[None, :]
    pos = tl.load(state.pos + row, mask=row < M, other=0)
    prefix = tl.load(state.prefix + row, mask=row < M, other=0)
    slot = (prefix + KV_BLOCK - 1) // KV_BLOCK * KV_BLOCK + pos - prefix
    block = tl.load(cache.table + row * cache.width + slot // KV_BLOCK, mask=row < M, other=0)
    wait_for_previous_kernel(PDL)
    rstd = row_rstd(squares, row[:, None], live)[:, None]
    a, b = finish_linear(y, M, row, (loaded_a, loaded_b), (part,))
    a = a * rstd
    b = b * rstd
    if terms.bias is not None:
        a += bias_a
        b += bias_b
    if terms.gains is not None:
        squares_of_head = tl.sum(a * a + b * b, axis=1)[:, None]
        head_rstd = tl.rsqrt(squares_of_head / cache.d + terms.EPS)
        a = tl.where(part < 2, a * head_rstd * gain_a, a)
        b = tl.where(part < 2, b * head_rstd * gain_b, b)
    turned = live & (head < H + cache.KV)  # values aren't rotated: cos 1, sin 0
    cos = tl.load(rotary.cos + row[:, None] * HALF + i[None, :], mask=turned, other=1.0)
    sin = tl.load(rotary.sin + row[:, None] * HALF + i[None, :], mask=turned, other=0.0)
    turned_a = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    if head < H:
        out = q_ptr + row[:, None] * (2 * HALF * H) + first[None, :]
        tl.store(out, turned_a, mask=live)
        tl.store(out + HALF, turned_b, mask=live)
    else:
        kv_head = head - H - (part - 1) * cache.KV
        at = ((block * cache.KV + kv_head) * KV_BLOCK + slot % KV_BLOCK) * (2 * HALF)
        out = cache.kv + ((part - 1) * cache.plane + at)[:, None] + i[None, :]
        tl.store(out, turned_a, mask=live)
        tl.store(out + HALF, turned_b, mask=live)


# -----------------------------------------------------------------------------
# Attention of one new token to its row's context
#
# A context has two parts, the prefix and the row's own tokens (see the slots above), and
# attention_kernel walks through it in steps. In a step, each of the W warps in each of the row's
# `count` programs reads T tokens. With 2 programs of 4 warps and T = 16, a step is 128 tokens:
#
#                     <------------- step 0 --------------> <-- step 1 ...
#     tokens          0   16   32   48   64   80   96   112  128
#     program, warp   0,0  0,1  0,2  0,3  1,0  1,1  1,2  1,3  0,0  ...
#
# Steps never straddle the two parts: the last step of the prefix is masked at its end, and the
# row's own tokens start a new step. T divides KV_BLOCK, so a warp's T tokens are in one KV block.
#
# Each warp keeps its own softmax over the tokens it has seen, as three numbers per query: the
# largest logit (top), the sum of 2^(logit - top) (mass), and that sum weighted by the values (acc).
# Inside the loop, no warp waits for another. At the end, a program joins its warps' softmaxes
# (join_warps). If several programs share a row (flash decoding), each then stores its softmax and
# bumps a counter, and the last one to do so joins them all in order (join_splits), so the result
# doesn't depend on which one that is.
#
# Siblings (FlashInfer's cascade). The rows of a group are neighbors and share a prefix. With
# SIBLINGS > 1, the first one's program handles up to SIBLINGS rows and reads their prefix once;
# the others' programs exit right away. The steps go through the prefix, then each sibling's own
# tokens, which the other siblings' queries don't see. With 3 siblings:
#
#     steps    | prefix          | own of row 0 | own of row 1     | own of row 2 |
#     seen by  | all             | row 0        | row 1            | row 2        |
#              0              ends[0]        ends[1]            ends[2]        ends[3]
#
# A program's queries form one tile. Query j is head j % G of row j // G, where G = H / KV query
# heads share a key-value head. A row sees the same tokens in the same warps and order as it would
# alone, so its result has the same bits. (Provided all values are finite: unseen ones get a weight
# of 0, and 0 * inf is NaN.)

class Walk(NamedTuple):
    """One program's steps: through the prefix, then through each sibling's own tokens."""
    row: tl.tensor          # the first sibling's
    prefix: tl.tensor       # number of its tokens
    own: tl.tuple           # number of each sibling's own tokens
    ends: tl.tuple          # steps up to the end of the prefix and of each sibling's own tokens
    step: tl.tensor         # tokens per step, over all warps and programs of the row
    offset: tl.tensor       # (W,) each warp's first token in a step


@triton.jit
def plan_walk(state: RowState, row, prefix, siblings, split, count, SIBLINGS: tl.constexpr,
              W: tl.constexpr, T: tl.constexpr):
    """The walk of program `split` of the `count` that share a row, or through `siblings` rows."""
    step = W * T * count
    own, ends = (), (tl.cdiv(prefix, step),)
    for m in tl.static_range(SIBLINGS):
        pos = tl.load(state.pos + row + m, mask=m < siblings, other=0).to(tl.int32)
        own += (tl.where(m < siblings, pos + 1 - prefix, 0),)
        ends += (ends[m] + tl.cdiv(own[m], step),)
    offset = (split * W + tl.arange(0, W)) * T
    return Walk(row, prefix, own, ends, step, offset)


@triton.jit
def part_of_step(walk, t):
    """-> whose own tokens step t reads (-1: the prefix, which everyone shares), and that part's
    first step and number of tokens.
    """
    whose = -1
    start = 0
    tokens = walk.prefix
    for m in tl.static_range(len(walk.own)):
        whose = tl.where(t >= walk.ends[m], m, whose)
        start = tl.where(t >= walk.ends[m], walk.ends[m], start)
        tokens = tl.where(t >= walk.ends[m], walk.own[m], tokens)
    return whose, start, tokens


@triton.jit
def load_step(cache: LayerCache, block_ptr, token, tokens, T: tl.constexpr):
    """Each warp's T keys and values in a step (W, T, d), and which of them exist (W, T)."""
    slot = tl.arange(0, T)
    within = slot[None, :, None] * cache.d + tl.arange(0, cache.d)[None, None, :]
    valid = token[:, None] + slot[None, :] < tokens
    k = tl.load(block_ptr[:, None, None] + within, mask=valid[:, :, None], other=0.0)
    block_ptr += cache.plane
    v = tl.load(block_ptr[:, None, None] + within, mask=valid[:, :, None], other=0.0)
    return k, v, valid


@triton.jit
def load_block_numbers(cache: LayerCache, walk, t):
    """The KV block of each warp's tokens in step t."""
    row, prefix, own, ends, step, offset = walk
    whose = row
    at = t * step
    for m in tl.static_range(len(ends) - 1):
        gap = tl.cdiv(prefix, cache.KV_BLOCK) * cache.KV_BLOCK  # own tokens start a block
        whose = tl.where(t >= ends[m], row + m, whose)
        at = tl.where(t >= ends[m], (t - ends[m]) * step + gap, at)
    kv_block = (at + offset) // cache.KV_BLOCK
    mask = (t < ends[len(ends) - 1]) & (kv_block < cache.width)
    return tl.load(cache.table + whose * cache.width + kv_block, mask=mask, other=0)


@triton.jit
def softmax_step(top, mass, acc, q, k, v, seen):
    """The softmaxes after T more tokens: top and mass (W, J), acc (W, J, d).

    q (W, J, d), k and v (W, T, d), seen (W, J, T): which tokens a query may see. When the largest
    logit rises, the earlier sums shrink by 2^(old - new).
    """
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
    """x (2 W, J, d) -> (W, J, d): x[w] + x[W + w]."""
    # tl.sum across warps takes 10 times as much code.
    halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2]))
    a, b = tl.split(tl.permute(halves, (1, 2, 3, 0)))
    return a + b


@triton.jit
def store_split(splits: SplitSoftmaxes, at, top, mass, acc, live):
    """Stores a program's softmax at index `at` (J,), one per query, for the last one to join."""
    d: tl.constexpr = acc.shape[1]
    tl.store(splits.tops + at, top, mask=live)
    tl.store(splits.masses + at, mass, mask=live)
    at_acc = at[:, None] * d + tl.arange(0, d)[None, :]
    tl.store(splits.acc + at_acc, acc, mask=live[:, None])
    tl.debug_barrier()  # all threads must have stored before one counts the program as done


@triton.jit
def join_splits(splits: SplitSoftmaxes, first, count, live, d: tl.constexpr):
    """Joins `count` softmaxes per query, from index `first` (J,) on -> mass (J,), acc (J, d)."""
    # Loaded SPLITS_AT_ONCE at a time, so the loads don't wait for each other. ".cg" reads from the
    # L2, because the L1 doesn't see what other multiprocessors wrote.
    i = tl.arange(0, d)
    top = tl.full(live.shape, LOWEST, tl.float32)
    mass = tl.zeros(live.shape, tl.float32)
    acc = tl.zeros((live.shape[0], d), tl.float32)
    for s0 in range(0, count, SPLITS_AT_ONCE):
        tops, masses, accs = (), (), ()
        for s in tl.static_range(SPLITS_AT_ONCE):
            left = live & (s0 + s < count)
            at = first + s0 + s
            tops += (tl.load(splits.tops + at, mask=left, other=LOWEST, cache_modifier=".cg"),)
            masses += (tl.load(splits.masses + at, mask=left, other=0.0, cache_modifier=".cg"),)
            at_acc = splits.acc + at[:, None] * d + i[None, :]
            accs += (tl.load(at_acc, mask=left[:, None], other=0.0, cache_modifier=".cg"),)
        for s in tl.static_range(SPLITS_AT_ONCE):
            new_top = tl.maximum(top, tops[s])
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(tops[s] - new_top)
            mass = mass * shrink + weight * masses[s]
            acc = acc * shrink[:, None] + accs[s] * weight[:, None]
            top = new_top
    return mass, acc


@triton.jit
def join_warps(top, mass, acc):
    """top and mass (W, J), acc (W, J, d) of W warps -> one softmax: (J,), (J,), (J, d)."""
    highest = tl.max(top, axis=0)
    weight = tl.exp2(top - highest[None, :])  # 0 for a warp that saw no token
    mass = tl.sum(mass * weight, axis=0)
    acc *= weight[:, :, None]
    if acc.shape[0] == 8:
        acc = add_halves(acc)
    acc = add_halves(add_halves(acc))
    return highest, mass, tl.reshape(acc, (acc.shape[1], acc.shape[2]))


@triton.jit
def attention_kernel(
    q_ptr,             # (M, H, d)
    cache: LayerCache, state: RowState,
    out_ptr,           # (M, H, d)         output
    splits: SplitSoftmaxes,
    H: tl.constexpr,
    J: tl.constexpr,   # queries per tile; those past siblings * G are computed but not stored
    plan: tl.constexpr,  # AttentionPlan
    PDL: tl.constexpr,
):
    """Attention of a row's new token, and its siblings', to their contexts; one key-value head.

    The grid is (rows, KV, SPLITS). The comment above draws a program's walk.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    SIBLINGS: tl.constexpr = plan.SIBLINGS
    W: tl.constexpr = plan.WARPS
    T: tl.constexpr = plan.TOKENS
    G: tl.constexpr = H // cache.KV
    # A warp looks up a single block number for T tokens. If they straddled two KV blocks, it would
    # read the next head's keys.
    tl.static_assert(cache.KV_BLOCK % T == 0, "TOKENS of an AttentionPlan must divide KV_BLOCK")
    let_next_kernel_start(PDL)

    # The steps depend on the rows' state, which may be read before the wait.
    prefix = tl.load(state.prefix + row).to(tl.int32)
    siblings, count = 1, plan.SPLITS
    if SIBLINGS > 1:
        siblings = tl.load(state.siblings + row).to(tl.int32)  # 0: an earlier row includes it
    elif plan.SPLITS > 1:  # a short context needs fewer programs
        steps = tl.cdiv(tl.load(state.pos + row).to(tl.int32) + 1, W * T)
        count = tl.minimum(steps, plan.SPLITS)
    if (siblings == 0) | (split >= count):
        return
    walk = plan_walk(state, row, prefix, siblings, split, count, SIBLINGS, W, T)
    block = load_block_numbers(cache, walk, 0)
    wait_for_previous_kernel(PDL)

    # The queries, the same for every warp: (W, J, d)
    j = tl.arange(0, J)
    i = tl.arange(0, cache.d)
    live = j < siblings * G
    head = (row + j // G) * H + kv_head * G + j % G  # among the M * H query heads
    at_q = head[:, None] * cache.d + i[None, :]
    q = tl.load(q_ptr + at_q, mask=live[:, None], other=0.0)
    q = tl.broadcast_to(q[None], (W, J, cache.d))

    top = tl.full((W, J), LOWEST, tl.float32)
    mass = tl.zeros((W, J), tl.float32)
    acc = tl.zeros((W, J, cache.d), tl.float32)
    for t in range(0, walk.ends[SIBLINGS]):
        whose, start, tokens = part_of_step(walk, t)
        token = (t - start) * walk.step + walk.offset  # each warp's first one, within its part
        at = (block * cache.KV + kv_head) * cache.KV_BLOCK + token % cache.KV_BLOCK
        block_ptr = cache.kv + at * cache.d
        # Load the next step's block number a step early: if keys and values had to wait for it, the
        # compiler would give them a single buffer and nothing would overlap.
        block = load_block_numbers(cache, walk, t + 1)
        k, v, valid = load_step(cache, block_ptr, token, tokens, T)
        seen = valid[:, None, :] & ((whose < 0) | (j // G == whose))[None, :, None]
        top, mass, acc = softmax_step(top, mass, acc, q, k, v, seen)
    top, mass, acc = join_warps(top, mass, acc)

    if count > 1:
        first = head * plan.SPLITS  # in (M, H, SPLITS)
        store_split(splits, first + split, top, mass, acc, live)
        counter_ptr = splits.counters + row * cache.KV + kv_head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < count - 1:
            return
        tl.store(counter_ptr, 0)  # for the next layer
        mass, acc = join_splits(splits, first, count, live, cache.d)
    tl.store(out_ptr + at_q, acc / mass[:, None], mask=live[:, None])


# -----------------------------------------------------------------------------
# After attention, and the MLP

@triton.jit(do_not_specialize=["M"])
def residual_kernel(
    y: UnfinishedLinear, M,  # o's or down's
    resid_ptr,         # fp32 (M, D)
    norm: NextNorm,
    TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """residual += linear, then the residual is normed for the next matmul."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    col = tile * TILE + tl.arange(0, TILE)
    at = row[:, None] * norm.squares.D + col[None, :]
    let_next_kernel_start(PDL)
    loaded = load_linear(y, tile * TILE, TILE)
    w = tl.load(norm.weight + col) + tl.load(norm.noise + col)
    wait_for_previous_kernel(PDL)
    x = tl.load(resid_ptr + at, mask=(row < M)[:, None], other=0.0)
    x += finish_linear(y, M, row, (loaded,), (0,))[0]
    tl.store(resid_ptr + at, x, mask=(row < M)[:, None])
    store_normed(norm, x, w, row, col, tile, M)


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(
    y: UnfinishedLinear,  # gate|up's: N = 2 F
    M, squares: RowSquares,
    out_ptr,           # (M, F)            output
    TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """out = silu(gate) * up, where gate | up = linear / rms."""
    F = y.N // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * TILE
    col = first + tl.arange(0, TILE)
    let_next_kernel_start(PDL)
    loaded_gate = load_linear(y, first, TILE)
    loaded_up = load_linear(y, first + F, TILE)
    wait_for_previous_kernel(PDL)
    rstd = row_rstd(squares, row[:, None], (row < M)[:, None])[:, None]
    gate, up = finish_linear(y, M, row, (loaded_gate, loaded_up), (0, 1))
    gate *= rstd
    up *= rstd
    # silu(gate) = gate * sigmoid(gate), and sigmoid(gate) = root * root. rsqrt is one instruction,
    # a division many.
    root = tl.rsqrt(1 + tl.exp(-gate))
    out = out_ptr + row[:, None] * F + col[None, :]
    tl.store(out, gate * root * root * up, mask=(row < M)[:, None])


# -----------------------------------------------------------------------------
# The draw
#
# A token is drawn by inverting the softmax's CDF at a uniform number u: it is the first token, in
# vocabulary order, at which the probabilities add up to more than u. A row has 152 thousand logits,
# so this takes two kernels. chunk_kernel, with one program per chunk of 2,048 logits, writes the
# chunk's largest logit and mass. pick_kernel, with one program per row, then finds the chunk and
# the token in it:
#
#     masses of the chunks   | 0.1 | 0.4 |   0.3   | 0.2 |          they add up to 1.0; u = 0.62
#                            0    0.1   0.5   ^    0.8    1
#     in the third chunk     target 0.62 - 0.5 = 0.12: the token where its own terms exceed 0.12
#
# So only one chunk of logits is read twice. sampler.draw_tokens does the same on the full row.

@triton.jit
def logit_scale(logits: LogitChunks, row):
    """1 / (rms * temperature) of one row: the factor that its logits still lack."""
    if logits.SCALED:
        return 1.0
    return row_rstd(logits.squares, row, True) * tl.load(logits.inv_temperature)


@triton.jit
def load_logits(logits: LogitChunks, row, column):
    """One row's unscaled logits; -inf where the column isn't a token."""
    at = row.to(tl.int64) * logits.stride + column
    return tl.load(logits.x + at, mask=column < logits.V, other=-INF)


@triton.jit
def chunk_kernel(logits: LogitChunks):
    """The largest logit and the mass of one chunk of a row."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    i = chunk * logits.CHUNK + tl.arange(0, logits.CHUNK)
    x = load_logits(logits, row, i) * logit_scale(logits, row)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(logits.tops + at, top)
    # top-k and top-p may leave only -inf in a chunk; its mass must then be 0, not NaN.
    mass = tl.sum(tl.exp(x - tl.maximum(top, LOWEST)), axis=0)
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
    """-> the first i that has mass and at which masses (of places i) add up to more than target,
    and the target minus everything before that place, at least 0.
    """
    # Sums are computed in blocks and round differently: from one place to the next they can drop by
    # an ulp, and the remaining target can come out slightly negative.
    has_mass = masses > 0
    last = tl.max(tl.where(has_mass, i, 0), axis=0)  # in case the target is never reached
    reached = has_mass & (tl.cumsum(masses, axis=0) > target)
    at = tl.min(tl.where(reached, i, last), axis=0)
    return at, tl.maximum(target - tl.sum(tl.where(i < at, masses, 0.0), axis=0), 0.0)


@triton.jit
def pick_kernel(
    logits: LogitChunks, chunks,
    state: RowState,
    ends_ptr,          # int64 (ENDS,)          end ids, padded with -1
    tokens_ptr,        # int64 (WINDOW, stride) output: tokens
    logprobs_ptr,      # fp32 (WINDOW, stride)  output: their log-probs
    stride,
    GREEDY: tl.constexpr, CHUNKS_P: tl.constexpr, ENDS: tl.constexpr,
):
    """Draws one row's token, records its log-prob and advances the row's state.

    CHUNKS_P: `chunks` rounded up to a power of two.
    """
    row = tl.program_id(0)
    c = tl.arange(0, CHUNKS_P)
    tops = tl.load(logits.tops + row * chunks + c, mask=c < chunks, other=-INF)
    top = tl.max(tops, axis=0)
    masses = tl.load(logits.masses + row * chunks + c, mask=c < chunks, other=0.0)
    masses *= tl.exp(tops - top)  # all relative to the row's largest logit
    mass = tl.sum(masses, axis=0)
    pos = tl.load(state.pos + row)
    scale = logit_scale(logits, row)
    target = uniform(tl.load(state.key + row), pos) * mass
    if GREEDY:
        chunk = tl.argmax(tops, axis=0)
    else:
        chunk, target = inverse_cdf(masses, c, target)
    i = tl.arange(0, logits.CHUNK)
    x = load_logits(logits, row, chunk * logits.CHUNK + i) * scale
    if GREEDY:
        inside = tl.argmax(x, axis=0)
    else:
        inside, _ = inverse_cdf(tl.exp(x - top), i, target)
    token = tl.minimum(chunk * logits.CHUNK + inside, logits.V - 1)  # in range even for NaN logits
    logprob = load_logits(logits, row, token) * scale - top - tl.log(mass)
    step = tl.load(state.step + row)
    tl.store(tokens_ptr + step * stride + row, token.to(tl.int64))
    tl.store(logprobs_ptr + step * stride + row, logprob)
    # Like the last lines of sampler.TorchEngine.decode. For a row that isn't alive, only `step`
    # changes.
    alive = tl.load(state.alive + row)
    ended = tl.max((tl.load(ends_ptr + tl.arange(0, ENDS)) == token).to(tl.int32), axis=0)
    goes_on = (ended == 0) & (pos + alive < tl.load(state.limit + row))
    kept = tl.load(state.token + row)
    made = tl.load(state.made + row)
    tl.debug_barrier()  # every thread must have loaded before one overwrites
    tl.store(state.token + row, tl.where(alive > 0, token, kept))
    tl.store(state.made + row, made + alive)
    tl.store(state.pos + row, pos + alive)
    tl.store(state.alive + row, tl.where(goes_on, alive, 0))
    tl.store(state.step + row, step + 1)


# -----------------------------------------------------------------------------
# The learner's kernels
#
# Each has the name and arguments of the function it replaces. That function's docstring says what
# it computes; these say what makes it fast.

@cache
def compiled(function: Callable) -> Callable:
    """torch.compile, without choosing block sizes by timing."""
    # For a kernel with a sum, it would try two sizes and keep the faster one. They add in different
    # orders, so a resumed run or another rank could get different bits.
    return torch.compile(function, options={"dynamic_scale_rblock": False})


def elementwise(function: Callable, x: torch.Tensor, *rest: object) -> torch.Tensor:
    """Replaces ops.elementwise: one kernel for the forward and one for the backward."""
    if not torch.is_grad_enabled():  # not worth compiling for a prefill's few passes
        return function(x, *rest)
    # Only the number of tokens is dynamic: a dynamic width would cost every element an integer
    # division.
    for t in (x, *rest):                         # a weight (D,) may happen to be as long as x
        if isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[0] == x.shape[0]:
            torch._dynamo.maybe_mark_dynamic(t, 0)
    return compiled(function)(x, *rest)


def attend_spans(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces backward.attend_spans: torch's variable-length FlashAttention."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, spans.q_starts, spans.k_starts, spans.longest_q, spans.longest_k, 0.0,
        spans.causal, False)[:2]


def attend_spans_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                          out: torch.Tensor, lse: torch.Tensor, spans: Spans) -> tuple:
    """Replaces backward.attend_spans_backward: FlashAttention's, bit-identical in every run."""
    # By default it sums dq with atomics, in arbitrary order. Only torch's global switch for
    # deterministic algorithms fixes the order, so that is set around the call. The switch would
    # also fill every new tensor with NaN, which takes time, hence the second one.
    unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # dropout's seed and offset
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


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor,
          other_lse: torch.Tensor) -> None:
    """Replaces backward.merge: one program per token, in one pass over `out`."""
    T, H, d = out.shape
    merge_kernel[T,](out, lse, lse.stride(0), other, other_lse, other_lse.stride(0), H, d,
                     BLOCK_H=triton.next_power_of_2(H), BLOCK_D=triton.next_power_of_2(d))


@triton.jit
def merge_kernel(
    out_ptr,           # (T, H, D)      overwritten with the result, as lse is
    lse_ptr,           # fp32 (H, T)    its row stride is lse_stride
    lse_stride,
    other_ptr,         # like out_ptr
    other_lse_ptr,     # like lse_ptr
    other_stride, H, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Joins two softmaxes of one token over two sets of keys, weighted by their mass."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    col = tl.arange(0, BLOCK_D)
    a = tl.load(lse_ptr + head * lse_stride + token, mask=head < H, other=0.0)
    b = tl.load(other_lse_ptr + head * other_stride + token, mask=head < H, other=0.0)
    top = tl.maximum(a, b)
    both = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
    at = token * H * D + head[:, None] * D + col[None, :]
    live = (head < H)[:, None] & (col < D)[None, :]
    out = tl.load(out_ptr + at, mask=live, other=0.0).to(tl.float32) * tl.exp(a - both)[:, None]
    other = tl.load(other_ptr + at, mask=live, other=0.0).to(tl.float32) * tl.exp(b - both)[:, None]
    # Each warp loads the lse of the heads whose `out` it computes, and a single warp stores all of
    # them. Without this barrier, a slower warp could load what has already been overwritten.
    tl.debug_barrier()
    tl.store(out_ptr + at, out + other, mask=live)
    tl.store(lse_ptr + head * lse_stride + token, both, mask=head < H)


def swiglu(y: torch.Tensor, rstd: torch.Tensor, h: torch.Tensor,
           keep: bool = True) -> torch.Tensor | None:
    """Replaces backward.swiglu: reads y once, with one program per 1,024 columns of a row."""
    F = h.shape[1]
    rounded = torch.empty_like(y, dtype=h.dtype) if keep else None
    swiglu_forward_kernel[y.shape[0], triton.cdiv(F, 1024)](
        y, rstd, h, h.stride(0), rounded, F, BLOCK=1024, num_warps=8)
    return rounded


@triton.jit
def swiglu_forward_kernel(
    y_ptr,             # fp32 (T, 2 F)     gate | up
    rstd_ptr,          # fp32 (T, 1)
    h_ptr, h_stride,   # (T, F)            output; its row stride
    rounded_ptr,       # (T, 2 F)          output: y in h's dtype; or None
    F, BLOCK: tl.constexpr,
):
    """h = silu(gate * rstd) * (up * rstd), and y rounded for the backward."""
    row = tl.program_id(0).to(tl.int64)  # row * 2F exceeds 2^31 at 57 thousand tokens of a 7B
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


def swiglu_backward(y: torch.Tensor, rstd: torch.Tensor, dh: torch.Tensor,
                    dy: torch.Tensor) -> torch.Tensor:
    """Replaces backward.swiglu_backward: reads y and dh once and writes dy once, with one program
    per row, since drstd is a sum over it.
    """
    drstd = torch.empty_like(rstd)
    swiglu_backward_kernel[y.shape[0],](y, rstd, dh.contiguous(), dy, dy.stride(0), drstd,
                                        dh.shape[1], BLOCK=2048, num_warps=8)
    return drstd


@triton.jit
def swiglu_backward_kernel(
    y_ptr,             # (T, 2 F)          fp32, or what swiglu() kept
    rstd_ptr,          # fp32 (T, 1)
    dh_ptr,            # (T, F)
    dy_ptr, dy_stride,  # (T, 2 F)          output: dL/dy; its row stride
    drstd_ptr,         # fp32 (T, 1)       output: dL/drstd
    F, BLOCK: tl.constexpr,
):
    """With g = gate * rstd, u = up * rstd and s = sigmoid(g): h = g s u, so dL/dg is
    dh u (s + g s (1 - s)), dL/du is dh g s, and both times rstd are the two halves of dy.
    """
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


def softmax_at(products: torch.Tensor, scale: torch.Tensor, targets: torch.Tensor, live: int,
               dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces backward.softmax_at: one program per row of logits, which it reads twice."""
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
    sums_ptr,          # fp32 (3, c)       output: the target's logit, log-sum-exp, mean logit
    ahead_ptr,         # (c, V)            output: onehot - softmax; or None
    c, V, live, BLOCK: tl.constexpr,
):
    """One row, in two passes. The first keeps a running softmax in each of BLOCK lanes, where lane
    i sees columns i, i + BLOCK and so on, and joins the lanes at the end. The second writes the
    gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    target = tl.load(targets_ptr + row)
    products_ptr += row * V
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, live, BLOCK):
        col = start + tl.arange(0, BLOCK)
        # Masked by V, not by `live`, because that is odd (151,665) and would split 16-byte loads
        # into 4-byte ones. The next line removes what is past `live`.
        logit = tl.load(products_ptr + col, mask=col < V, other=0.0) * scale
        logit = tl.where(col < live, logit, LOWEST)
        higher = tl.maximum(top, logit)
        old = tl.exp(top - higher)
        new = tl.exp(logit - higher)
        mass = mass * old + new
        mean = mean * old + new * logit
        top = higher
    highest = tl.max(top, 0)
    weight = tl.exp(top - highest)  # 0 for a lane that saw no column
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
