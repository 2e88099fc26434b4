"""
The decode step on a GPU: one new token for every live row, as one CUDA graph per batch size. Short prefills likewise.

    engine = GraphEngine(model, kv, max_rows)                        # interface and numbers of sampler.TorchEngine
    tokens, logprobs, made = engine.decode(rows, steps, temperature, end_ids, top_k, top_p)

Why: at 7B a step is 4.9 GB of memory traffic, about 1.1 ms, in 260 launches. Python needs 10 us for a launch and a pass
over an activation 3 us, so launches are recorded once and everything between two matmuls is one kernel:

    embed           residual = embed[token]
    per layer       qkv matmul       -> heads_kernel: sum, adapter, 1/rms, bias, rotary, keys and values into the cache
                    attention_kernel -> o matmul        -> residual_kernel: sum, adapter, residual, next norm
                    gate_up matmul   -> swiglu_kernel   -> down matmul -> residual_kernel
    head            matmul -> chunk_kernel, pick_kernel: softmax, draw, and the row's state advances

"sum": matmuls leave slabs of split-K partial sums (marlin_fp4.Slabs), columns N.. being x @ A.T of the adapter. Whoever
reads them adds those that hold something, in order, and finishes the linear: the result is deterministic, fp32 until
its one rounding, and rounded where model.py rounds it. 1/rms of a row needs the whole row, which no program sees:
programs leave sums of squares of their columns, and the reader of the next matmul's result adds those up (model.py says
why it may).

A row's state (token, position, random key, alive, ...) lives on the GPU and the last kernel of a step advances it: the
host launches a window of steps and looks at the results afterwards. Adapters, norms and their noise are read where they
are, so an optimizer step needs no new capture.

Programmatic dependent launch. A kernel lets the next one start at once (overlap) and loads what no earlier kernel of
the step writes, weights and the rows' state, before it waits for the one before it (wait). This and smaller tiles took
a step of 7B with 1 row from 2.9 to 2.2 ms.

Not here: scheduling and what a prefill does (sampler.py), the 4-bit matmul (marlin_fp4.py).

Shapes: n rows (M of a matmul), N out_features, K in_features, R LoRA rank, P parts of a fused linear, S slabs,
V vocabulary, D width, F feed-forward, H query heads, KV key-value heads, d head size.
"""
import torch
import triton
import triton.language as tl

import lora
import marlin_fp4
import model as qwen
from backward import Spans, attention
from marlin_fp4 import PackedWeight, a_pieces, mm_fp32, pieces, runs_on
from sampler import BLOCK, PREFILL_SIZES, WINDOW, TorchEngine, filter_logits, prefill

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)      # batch sizes with a graph of their own
TILE = 128                                     # columns of a matmul's tile; an elementwise program takes those or half
CHUNK = 2048                                   # vocabulary entries of one program of the softmax
HEAD_ROWS = 64                                 # up to so many rows a 4-bit head is read as such, else its 16-bit copy
AT_ONCE = tl.constexpr(4)                      # runs of attention_kernel joined at a time
FP16_SHIFT = tl.constexpr(qwen.FP16_SHIFT)     # of the residual in front of a norm
GROUP = 16                                     # query heads of a key-value head, of several rows if they share a prefix
MAX_ENDS = 16                                  # end ids of a tokenizer
LOG2_E = 1.4426950408889634
# n up to -> columns of an elementwise program, (rows, warps) of heads_kernel, residual_kernel, swiglu_kernel, found in
# whole steps. With 128 columns a number costs half as many instructions; up to 16 rows there are too few such programs.
PROGRAMS = {4: (64, (1, 4), (1, 1), (1, 1)), 16: (64, (4, 4), (4, 4), (8, 4)), 64: (128, (4, 4), (4, 8), (16, 4)),
            512: (128, (8, 8), (4, 4), (16, 8))}
FIELDS = ("token", "pos", "prefix", "share", "limit", "key", "alive", "made", "step")
# Of the state, int64 (9, max_rows).
TOKEN, POS, PREFIX, SHARE, LIMIT, KEY, ALIVE, MADE, STEP = map(tl.constexpr, range(len(FIELDS)))


# -----------------------------------------------------------------------------
# Kernels. Row-major and contiguous unless a stride is passed. A program's rows may run past M: those are masked.

@triton.jit
def linear_weights(scale_ptr, b_ptr, first, BN: tl.constexpr, KB, L, R: tl.constexpr, RP: tl.constexpr):
    """What finishes a linear and no matmul makes: columns (BN,), scale (BN,), b (RP, BN), slabs to add up.

    The BN columns from `first` on lie in one tile of the matmul.
    """
    col, r = first + tl.arange(0, BN), tl.arange(0, RP)
    b = tl.load(b_ptr + col[None, :] * R + r[:, None], mask=(r < R)[:, None], other=0.0)
    return col, tl.load(scale_ptr + col), b, pieces(first, KB, L)


@triton.jit
def slab_sums(slab_ptr, slab, tiles, a_tiles, S: tl.constexpr, SA: tl.constexpr):
    """Of every tile (at, live, count): the sum over s < count of slab_ptr[s * slab + at], in a fixed order.

    S, SA: the most slabs of x @ W.T (tiles) and of x @ A.T (a_tiles). With few elements the slabs lie side by side in
    one tensor, so that all threads load: 2.1 and not 2.5 ms a step at 1 row. With many that would spill registers: 3.9
    and not 4.2 ms at 64 rows (7B, H200). There a loop, not static_range: unrolled before layouts are assigned, each
    slab would be moved into the layout of linear_tile's dot by itself, through shared memory: 74 barriers a program
    instead of 14, 6.7 us instead of 3.5 (residual_kernel, 32 rows). All tiles end in one loop: a sum that were done
    before the others would be moved there and then, and their loads would wait behind its barrier.
    """
    sums, all_tiles = (), tiles + a_tiles
    COMMON: tl.constexpr = min(S, SA)
    for t in tl.static_range(len(all_tiles)):
        at, live, count = all_tiles[t]
        if at.shape[0] <= 2:
            s = tl.arange(0, triton.next_power_of_2(S if t < len(tiles) else SA))[:, None, None]
            side_by_side = tl.load(slab_ptr + s * slab + at[None], mask=(s < count) & live[None], other=0.0)
            sums += (tl.sum(side_by_side, axis=0),)
        else:
            y = tl.zeros(at.shape, tl.float32)
            for s in range((S if t < len(tiles) else SA) - COMMON):  # not count: so that loads are issued together
                y += tl.load(slab_ptr + s * slab + at, mask=live & (s < count), other=0.0)
            sums += (y,)
    if tiles[0][0].shape[0] > 2:
        for s in range(COMMON):
            longer = ()
            for t in tl.static_range(len(all_tiles)):
                at, live, count = all_tiles[t]
                i = s + ((S if t < len(tiles) else SA) - COMMON)
                longer += (sums[t] + tl.load(slab_ptr + i * slab + at, mask=live & (i < count), other=0.0),)
            sums = longer
    return sums


@triton.jit
def linear_part(weights, row, M, width):
    """The tile y[row, columns] of a linear, for slab_sums."""
    col, _, _, count = weights
    return row[:, None] * width + col[None, :], (row < M)[:, None], count


@triton.jit
def adapter_part(row, part, M, N, width, KB, L, R: tl.constexpr, RP: tl.constexpr):
    """x @ A.T (rows, RP), the part'th R columns after N, for slab_sums."""
    r = tl.arange(0, RP)[None, :]
    return row[:, None] * width + N + part * R + r, (row < M)[:, None] & (r < R), a_pieces(KB, L)


@triton.jit
def linear_tile(sums, xa, weights, R: tl.constexpr):
    """Finish a linear, fp32: sums * scale + (x @ A.T rounded to b's type) @ b.T; R = 0: no adapter."""
    _, scale, b, _ = weights
    scale = tl.broadcast_to(scale[None, :], sums.shape)
    if R > 0:
        return tl.fma(sums, scale, tl.dot(xa.to(b.dtype), b, input_precision="ieee"))
    return sums * scale


@triton.jit
def overlap(PDL: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernel before is done. Only what no earlier kernel of the step writes may be read before."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def squares_tile(squares_ptr, row, M, TILES: tl.constexpr, TILES_P: tl.constexpr):
    """Each row's TILES partial sums of squares (rows, TILES_P)."""
    t = tl.arange(0, TILES_P)
    live = (row < M)[:, None] & (t < TILES)[None, :]
    return tl.load(squares_ptr + row[:, None] * TILES + t[None, :], mask=live, other=0.0)


@triton.jit
def norm_tile(x, w, row, col, tile, xw_ptr, squares_ptr, M, D, TILES):
    """The next matmul's input x * w, rounded, and this tile's share of the row's sum of squares; fp16: of x / 16."""
    if xw_ptr.dtype.element_ty == tl.float16:
        x *= FP16_SHIFT
    xw = (x * w[None, :]).to(xw_ptr.dtype.element_ty)
    tl.store(xw_ptr + row[:, None] * D + col[None, :], xw, mask=(row < M)[:, None])
    tl.store(squares_ptr + row * TILES + tile, tl.sum(x * x, axis=1), mask=row < M)


@triton.jit(do_not_specialize=["M"])
def embed_kernel(state_ptr, stride, embed_ptr, freq_ptr, resid_ptr, cos_ptr, sin_ptr, weight_ptr, noise_ptr, xw_ptr,
                 squares_ptr, M, D, TILES, TILE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
                 PDL: tl.constexpr):
    """Residual (M, D) = embed[token], normed for the first matmul; the rotary table cos, sin (M, HALF) of this step."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    col = tile * TILE + tl.arange(0, TILE)
    live = (row < M)[:, None]
    overlap(PDL)
    token = tl.load(state_ptr + TOKEN * stride + row, mask=row < M, other=0)
    x = tl.load(embed_ptr + token[:, None] * D + col[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(resid_ptr + row[:, None] * D + col[None, :], x, mask=live)
    w = tl.load(weight_ptr + col) + tl.load(noise_ptr + col)
    norm_tile(x, w, row, col, tile, xw_ptr, squares_ptr, M, D, TILES)
    if tile == 0:
        i = tl.arange(0, HALF)
        pos = tl.load(state_ptr + POS * stride + row, mask=row < M, other=0).to(tl.float32)
        angle = pos[:, None] * tl.load(freq_ptr + i)[None, :]
        tl.store(cos_ptr + row[:, None] * HALF + i[None, :], tl.cos(angle), mask=live)
        tl.store(sin_ptr + row[:, None] * HALF + i[None, :], tl.sin(angle), mask=live)


@triton.jit(do_not_specialize=["M"])
def heads_kernel(slab_ptr, scale_ptr, b_ptr, M, N, width, KB, L, S: tl.constexpr, SA: tl.constexpr,
                 R: tl.constexpr, RP: tl.constexpr, squares_ptr, eps, D, TILES: tl.constexpr, TILES_P: tl.constexpr,
                 bias_ptr, cos_ptr, sin_ptr, q_ptr, kv_ptr, plane, state_ptr, stride, table_ptr, table_width,
                 H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 PDL: tl.constexpr):
    """One head of q, k or v for ROWS rows: linear, 1/rms, bias, rotary; q (M, H, d), k and v into the row's KV block.

    kv: this layer's (2, blocks, KV, BLOCK, d), `plane` elements from keys to values.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    first = head * 2 * HALF + i                                      # rotary pairs element i with i + d/2
    second = first + HALF
    part = tl.where(head < H, 0, tl.where(head < H + KV, 1, 2))
    live = (row < M)[:, None]
    overlap(PDL)
    weights_a = linear_weights(scale_ptr, b_ptr, head * 2 * HALF, HALF, KB, L, R, RP)
    weights_b = linear_weights(scale_ptr, b_ptr, head * 2 * HALF + HALF, HALF, KB, L, R, RP)
    bias_a, bias_b = tl.load(bias_ptr + first)[None, :], tl.load(bias_ptr + second)[None, :]
    pos = tl.load(state_ptr + POS * stride + row, mask=row < M, other=0)
    prefix = tl.load(state_ptr + PREFIX * stride + row, mask=row < M, other=0)
    slot = (prefix + BLOCK - 1) // BLOCK * BLOCK + pos - prefix      # sampler.CachedAttention: own tokens start a block
    block = tl.load(table_ptr + row * table_width + slot // BLOCK, mask=row < M, other=0)
    wait(PDL)
    squares = squares_tile(squares_ptr, row, M, TILES, TILES_P)
    tiles = linear_part(weights_a, row, M, width), linear_part(weights_b, row, M, width)
    a_tiles = (adapter_part(row, part, M, N, width, KB, L, R, RP),)
    a, b, xa = slab_sums(slab_ptr, M.to(tl.int64) * width, tiles, a_tiles, S, SA)
    turned = live & (head < H + KV)                                  # values are not: an angle of 0
    cos = tl.load(cos_ptr + row[:, None] * HALF + i[None, :], mask=turned, other=1.0)
    sin = tl.load(sin_ptr + row[:, None] * HALF + i[None, :], mask=turned, other=0.0)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    a = linear_tile(a, xa, weights_a, R) * rstd + bias_a
    b = linear_tile(b, xa, weights_b, R) * rstd + bias_b
    a, b = (a * cos - b * sin).to(q_ptr.dtype.element_ty), (b * cos + a * sin).to(q_ptr.dtype.element_ty)
    if head < H:
        out = q_ptr + row[:, None] * (2 * HALF * H) + first[None, :]
        tl.store(out, a, mask=live)
        tl.store(out + HALF, b, mask=live)
    else:
        kv_head = head - H - (part - 1) * KV
        at = (part - 1) * plane + ((block * KV + kv_head) * BLOCK + slot % BLOCK) * (2 * HALF)
        out = kv_ptr + at[:, None] + i[None, :]
        tl.store(out, a, mask=live)
        tl.store(out + HALF, b, mask=live)


@triton.jit
def add_halves(x):
    """x (2 W, J, d) -> (W, J, d): x[w] + x[W + w]. tl.sum over what lies in several warps takes 10 times the code."""
    halves = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2]))
    a, b = tl.split(tl.permute(halves, (1, 2, 3, 0)))
    return a + b


@triton.jit
def join(tops_ptr, masses_ptr, acc_ptr, runs, live, d: tl.constexpr):
    """Runs of queries (J,), each at its pointer: largest logit, mass, unscaled sum -> mass (J,), sum (J, d) of all."""
    i = tl.arange(0, d)
    top = tl.full(live.shape, -float("inf"), tl.float32)
    mass = tl.zeros(live.shape, tl.float32)
    acc = tl.zeros((live.shape[0], d), tl.float32)
    for s0 in range(0, runs, AT_ONCE):
        tops, masses, accs = (), (), ()
        for s in tl.static_range(AT_ONCE):                           # loads that wait for each other cost 0.6 us a run
            left, at = live & (s0 + s < runs), s0 + s
            tops += (tl.load(tops_ptr + at, mask=left, other=-float("inf"), cache_modifier=".cg"),)
            masses += (tl.load(masses_ptr + at, mask=left, other=0.0, cache_modifier=".cg"),)
            accs += (tl.load(acc_ptr[:, None] + at * d + i[None, :], mask=left[:, None], other=0.0,
                             cache_modifier=".cg"),)
        for s in tl.static_range(AT_ONCE):
            new_top = tl.maximum(top, tops[s])                       # finite: every query has a token in its first run
            shrink, weight = tl.exp2(top - new_top), tl.exp2(tops[s] - new_top)
            mass = mass * shrink + weight * masses[s]
            acc = acc * shrink[:, None] + accs[s] * weight[:, None]
            top = new_top
    return mass, acc


@triton.jit
def attend(q, kv_ptr, plane, table_ptr, width, block, row, kv_head, prefix, own, ends, gap, offset, STEP, scale,
           G: tl.constexpr, KV: tl.constexpr, BLOCK: tl.constexpr, MEMBERS: tl.constexpr, T: tl.constexpr):
    """Queries q (W, J, d), warp w over tokens offset[w].. of every step: largest logit, mass (J,), unscaled sum (J, d).

    Steps [0, ends[0]) are the prefix, those up to ends[m + 1] the own[m] tokens of row + m, from slot `gap` on of its
    blocks. block (W,): those of the first step.
    """
    W: tl.constexpr = q.shape[0]
    J: tl.constexpr = q.shape[1]
    d: tl.constexpr = q.shape[2]
    j, slot = tl.arange(0, J), tl.arange(0, T)
    within = slot[None, :, None] * d + tl.arange(0, d)[None, None, :]
    top = tl.full((W, J), -float("inf"), tl.float32)
    mass = tl.zeros((W, J), tl.float32)
    acc = tl.zeros((W, J, d), tl.float32)
    for t in range(0, ends[MEMBERS]):
        of, start, tokens = -1, 0, prefix                            # whose tokens this step has; -1: everybody's
        next_row, next_at = row, (t + 1) * STEP
        for m in tl.static_range(MEMBERS):
            of, start = tl.where(t >= ends[m], m, of), tl.where(t >= ends[m], ends[m], start)
            tokens = tl.where(t >= ends[m], own[m], tokens)
            next_row = tl.where(t + 1 >= ends[m], row + m, next_row)
            next_at = tl.where(t + 1 >= ends[m], (t + 1 - ends[m]) * STEP + gap, next_at)
        token = (t - start) * STEP + offset
        page_ptr = kv_ptr + ((block * KV + kv_head) * BLOCK + token % BLOCK) * d
        # One step early: if keys and values waited for this load, the compiler would keep a single buffer for them.
        page = (next_at + offset) // BLOCK
        block = tl.load(table_ptr + next_row * width + page, mask=(t + 1 < ends[MEMBERS]) & (page < width), other=0)
        valid = token[:, None] + slot[None, :] < tokens              # (W, T)
        k = tl.load(page_ptr[:, None, None] + within, mask=valid[:, :, None], other=0.0)
        v = tl.load(page_ptr[:, None, None] + plane + within, mask=valid[:, :, None], other=0.0)
        seen = valid[:, None, :] & ((of < 0) | (j // G == of))[None, :, None]
        logit = tl.where(seen, tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(logit, axis=2))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)      # a warp may have seen nothing yet: no inf - inf
        p = tl.exp2(logit - base[:, :, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(p, axis=2)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, :, None], input_precision="ieee")
        top = new_top
    highest = tl.max(top, axis=0)
    weight = tl.exp2(top - tl.where(highest == -float("inf"), 0.0, highest)[None, :])
    mass = tl.sum(mass * weight, axis=0)
    acc *= weight[:, :, None]
    if W == 8:
        acc = add_halves(acc)
    return highest, mass, tl.reshape(add_halves(add_halves(acc)), (J, d))


@triton.jit
def attention_kernel(q_ptr, kv_ptr, plane, state_ptr, stride, table_ptr, width, out_ptr, acc_ptr, stats_ptr,
                     counter_ptr, scale, H: tl.constexpr, KV: tl.constexpr, d: tl.constexpr, BLOCK: tl.constexpr,
                     J: tl.constexpr, SPLITS: tl.constexpr, MEMBERS: tl.constexpr, W: tl.constexpr,
                     T: tl.constexpr, PDL: tl.constexpr):
    """One key-value head, the H/KV query heads that share it, the context of one row or one program's part of it.

    A step takes T tokens for each of W warps of each of a row's programs, prefix first, then own tokens. A warp keeps a
    softmax of its own, joined with the others' at the end: nothing in the loop waits for another warp. A row by itself
    has as many programs as have a step to do, at most SPLITS.

    MEMBERS > 1: of up to so many neighbours with one prefix, at the first of them. Query j of the tile is head
    j % (H/KV) of row + j // (H/KV); the prefix is read once, then each member's own tokens, hidden from the others. A
    row meets the same tokens in the same warps as it would alone, and gets the same bits.

    Programs of one row leave an unscaled sum, their largest logit and their mass; the last to arrive joins them in
    order, so the result does not depend on who that is. Softmax in base 2: scale = log2(e) / sqrt(d).
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // KV
    overlap(PDL)
    prefix = tl.load(state_ptr + PREFIX * stride + row).to(tl.int32)
    members, runs = 1, SPLITS
    if MEMBERS > 1:
        members = tl.load(state_ptr + SHARE * stride + row).to(tl.int32)
    elif SPLITS > 1:
        runs = tl.minimum(tl.cdiv(tl.load(state_ptr + POS * stride + row).to(tl.int32) + 1, W * T), SPLITS)
    if (members == 0) | (split >= runs):
        return
    STEP = W * T * runs                                              # tokens
    own, ends = (), (tl.cdiv(prefix, STEP),)
    for m in tl.static_range(MEMBERS):
        pos = tl.load(state_ptr + POS * stride + row + m, mask=m < members, other=0).to(tl.int32)
        own += (tl.where(m < members, pos + 1 - prefix, 0),)
        ends += (ends[m] + tl.cdiv(own[m], STEP),)
    gap = tl.cdiv(prefix, BLOCK) * BLOCK                             # sampler.CachedAttention: own tokens start a block
    offset = (split * W + tl.arange(0, W)) * T
    page = (tl.where(prefix > 0, 0, gap) + offset) // BLOCK
    block = tl.load(table_ptr + row * width + page, mask=page < width, other=0)
    wait(PDL)
    j, i = tl.arange(0, J), tl.arange(0, d)
    live = j < members * G
    head = (row + j // G) * H + kv_head * G + j % G                  # of the n * H query heads
    at_q = head[:, None] * d + i[None, :]
    q = tl.load(q_ptr + at_q, mask=live[:, None], other=0.0)
    q = tl.broadcast_to(q[None], (W, J, d))
    top, mass, acc = attend(q, kv_ptr, plane, table_ptr, width, block, row, kv_head, prefix, own, ends, gap, offset,
                            STEP, scale, G, KV, BLOCK, MEMBERS, T)
    if SPLITS > 1:
        if runs > 1:
            first = head * SPLITS                                    # of (n, H, SPLITS): tops, then masses
            masses_ptr = stats_ptr + tl.num_programs(0) * H * SPLITS
            tl.store(stats_ptr + first + split, top, mask=live)
            tl.store(masses_ptr + first + split, mass, mask=live)
            tl.store(acc_ptr + (first + split)[:, None] * d + i[None, :], acc, mask=live[:, None])
            tl.debug_barrier()                                       # all threads' stores come before the count
            counter_ptr += row * KV + kv_head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < runs - 1:
                return
            tl.store(counter_ptr, 0)                                 # for the next layer
            mass, acc = join(stats_ptr + first, masses_ptr + first, acc_ptr + first * d, runs, live, d)
    tl.store(out_ptr + at_q, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["M"])
def residual_kernel(slab_ptr, scale_ptr, b_ptr, M, N, width, KB, L, S: tl.constexpr, SA: tl.constexpr,
                    R: tl.constexpr, RP: tl.constexpr, resid_ptr, weight_ptr, noise_ptr, xw_ptr, squares_ptr, TILES,
                    TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """residual += linear, and the norm that follows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    col = tile * TILE + tl.arange(0, TILE)
    at = row[:, None] * N + col[None, :]
    overlap(PDL)
    weights = linear_weights(scale_ptr, b_ptr, tile * TILE, TILE, KB, L, R, RP)
    w = tl.load(weight_ptr + col) + tl.load(noise_ptr + col)
    wait(PDL)
    x = tl.load(resid_ptr + at, mask=(row < M)[:, None], other=0.0)
    tiles, a_tiles = (linear_part(weights, row, M, width),), (adapter_part(row, 0, M, N, width, KB, L, R, RP),)
    sums, xa = slab_sums(slab_ptr, M.to(tl.int64) * width, tiles, a_tiles, S, SA)
    x += linear_tile(sums, xa, weights, R)
    tl.store(resid_ptr + at, x, mask=(row < M)[:, None])
    norm_tile(x, w, row, col, tile, xw_ptr, squares_ptr, M, N, TILES)


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(slab_ptr, scale_ptr, b_ptr, M, N, width, KB, L, S: tl.constexpr, SA: tl.constexpr,
                  R: tl.constexpr, RP: tl.constexpr, squares_ptr, eps, D, TILES: tl.constexpr, TILES_P: tl.constexpr,
                  out_ptr, TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """out (M, F) = silu(gate) * up, gate | up = linear / rms; N = 2 F."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * TILE
    col = first + tl.arange(0, TILE)
    overlap(PDL)
    of_gate = linear_weights(scale_ptr, b_ptr, first, TILE, KB, L, R, RP)
    of_up = linear_weights(scale_ptr, b_ptr, first + N // 2, TILE, KB, L, R, RP)
    wait(PDL)
    squares = squares_tile(squares_ptr, row, M, TILES, TILES_P)
    tiles = linear_part(of_gate, row, M, width), linear_part(of_up, row, M, width)
    a_tiles = adapter_part(row, 0, M, N, width, KB, L, R, RP), adapter_part(row, 1, M, N, width, KB, L, R, RP)
    gate, up, gate_xa, up_xa = slab_sums(slab_ptr, M.to(tl.int64) * width, tiles, a_tiles, S, SA)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    gate = linear_tile(gate, gate_xa, of_gate, R) * rstd
    up = linear_tile(up, up_xa, of_up, R) * rstd
    root = tl.rsqrt(1 + tl.exp(-gate))                               # of sigmoid(gate); a division takes longer
    y = gate * root * root * up
    tl.store(out_ptr + row[:, None] * (N // 2) + col[None, :], y.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None])


@triton.jit
def logit_scale(squares_ptr, row, inv_temperature_ptr, D, eps, TILES: tl.constexpr, TILES_P: tl.constexpr,
                SCALED: tl.constexpr):
    """1 / (rms * temperature) of one row; 1 if its logits are SCALED already."""
    if SCALED:
        return 1.0
    t = tl.arange(0, TILES_P)
    squares = tl.load(squares_ptr + row * TILES + t, mask=t < TILES, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=0) / D + eps) * tl.load(inv_temperature_ptr)


@triton.jit
def head_tile(slab_ptr, scale_ptr, at, column, live, slab, KB, L, SLABS: tl.constexpr, PACKED: tl.constexpr):
    """Logits of one row's columns, -inf where not live: slabs and scale of a PACKED head, else they are there."""
    if not PACKED:
        return tl.load(slab_ptr + at + column, mask=live, other=-float("inf"))
    x = tl.load(slab_ptr + at + column, mask=live, other=0.0)
    for s in tl.static_range(1, SLABS):
        x += tl.load(slab_ptr + s * slab + at + column, mask=live & (s < pieces(column, KB, L)), other=0.0)
    return tl.where(live, x * tl.load(scale_ptr + column, mask=live, other=0.0), -float("inf"))


@triton.jit
def chunk_kernel(slab_ptr, scale_ptr, slab, row_stride, KB, L, SLABS: tl.constexpr, PACKED: tl.constexpr, V,
                 squares_ptr, inv_temperature_ptr, D, eps, TILES: tl.constexpr, TILES_P: tl.constexpr,
                 SCALED: tl.constexpr, tops_ptr, masses_ptr, picks_ptr, CHUNK: tl.constexpr):
    """Largest scaled logit of one chunk of a row's vocabulary, the sum of exp(logit - largest), and where it is."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = head_tile(slab_ptr, scale_ptr, row.to(tl.int64) * row_stride, i, i < V, slab, KB, L, SLABS, PACKED)
    x *= logit_scale(squares_ptr, row, inv_temperature_ptr, D, eps, TILES, TILES_P, SCALED)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(tops_ptr + at, top)
    tl.store(masses_ptr + at, tl.sum(tl.exp(x - tl.maximum(top, -1e30)), axis=0))    # a chunk may be all -inf
    tl.store(picks_ptr + at, chunk * CHUNK + tl.argmax(x, axis=0))


@triton.jit
def uniform(key, pos):
    """sampler.uniforms, bit for bit: key, pos int64 -> fp32 in (0, 1)."""
    z = key.to(tl.uint64) + (pos + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z >> 41).to(tl.float32) + 0.5) * 1.1920928955078125e-07               # 2^-23


@triton.jit
def pick_kernel(slab_ptr, scale_ptr, slab, row_stride, KB, L, SLABS: tl.constexpr, PACKED: tl.constexpr, V, squares_ptr,
                inv_temperature_ptr, D, eps, TILES: tl.constexpr, TILES_P: tl.constexpr, SCALED: tl.constexpr, tops_ptr,
                masses_ptr, picks_ptr, CHUNK: tl.constexpr, chunks, CHUNKS_P: tl.constexpr, state_ptr, stride, ends_ptr,
                tokens_ptr, logprobs_ptr, GREEDY: tl.constexpr, ENDS: tl.constexpr):
    """Draw a row's token (inverse CDF in vocabulary order: chunk, then inside it), write it down, advance the row."""
    row = tl.program_id(0)
    c = tl.arange(0, CHUNKS_P)
    tops = tl.load(tops_ptr + row * chunks + c, mask=c < chunks, other=-float("inf"))
    top = tl.max(tops, axis=0)
    masses = tl.load(masses_ptr + row * chunks + c, mask=c < chunks, other=0.0) * tl.exp(tops - top)
    mass = tl.sum(masses, axis=0)
    field = state_ptr + row
    pos = tl.load(field + POS * stride)
    at = row.to(tl.int64) * row_stride
    scale = logit_scale(squares_ptr, row, inv_temperature_ptr, D, eps, TILES, TILES_P, SCALED)
    if GREEDY:
        token = tl.load(picks_ptr + row * chunks + tl.argmax(tops, axis=0))
    else:
        target = uniform(tl.load(field + KEY * stride), pos) * mass
        chunk = tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)
        chunk = tl.minimum(chunk, tl.max(tl.where(masses > 0, c, 0), axis=0))      # sums round: target may exceed them
        target -= tl.sum(tl.where(c < chunk, masses, 0.0), axis=0)
        i = tl.arange(0, CHUNK)
        column = chunk * CHUNK + i
        x = head_tile(slab_ptr, scale_ptr, at, column, column < V, slab, KB, L, SLABS, PACKED) * scale
        p = tl.exp(x - top)
        inside = tl.sum((tl.cumsum(p, axis=0) <= target).to(tl.int32), axis=0)
        token = chunk * CHUNK + tl.minimum(inside, tl.max(tl.where(p > 0, i, 0), axis=0))
    logit = head_tile(slab_ptr, scale_ptr, at, token, token < V, slab, KB, L, SLABS, PACKED) * scale
    logprob = logit - top - tl.log(mass)
    step = tl.load(field + STEP * stride)
    tl.store(tokens_ptr + step * stride + row, token.to(tl.int64))
    tl.store(logprobs_ptr + step * stride + row, logprob)
    # The row's next state: sampler.TorchEngine's last four lines. A row that is not alive repeats its step.
    alive = tl.load(field + ALIVE * stride)
    ended = tl.max((tl.load(ends_ptr + tl.arange(0, ENDS)) == token).to(tl.int32), axis=0)
    tl.store(field + TOKEN * stride, tl.where(alive > 0, token, tl.load(field + TOKEN * stride)))
    tl.store(field + MADE * stride, tl.load(field + MADE * stride) + alive)
    tl.store(field + POS * stride, pos + alive)
    goes_on = (ended == 0) & (pos + alive < tl.load(field + LIMIT * stride))
    tl.store(field + ALIVE * stride, tl.where(goes_on, alive, 0))
    tl.store(field + STEP * stride, step + 1)


# -----------------------------------------------------------------------------
# The step

def partial_sums(linear, x, ones):
    """x (n, K) -> Slabs, their sums (S, n, N + P*R), and scale (N,): what finishes a linear. ones: (>= N,) fp32."""
    weight, a = linear.weight, linear.a16 if linear.rank else None
    if isinstance(weight, PackedWeight) and x.shape[0] <= marlin_fp4.CROSSOVER and runs_on(x.device):
        return marlin_fp4.decode_matmul(x, weight, a, pdl=True), weight.out_scale
    w, N = weight.dequantize(), weight.N                             # bf16: the tensor itself; else bitsandbytes' way
    slabs = torch.empty(1, x.shape[0], N + (0 if a is None else a.shape[0]), device=x.device)
    for rows, out in [(w, slabs[0, :, :N])] + ([] if a is None else [(a, slabs[0, :, N:])]):
        if x.is_cuda:
            torch.mm(x, rows.T, out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), rows.float().T, out=out)
    return marlin_fp4.Slabs(slabs, KB=1, L=1), ones[:N] if weight.late_scale is None else weight.late_scale


def attention_shape(pairs, shared):
    """(row, key-value head) pairs of a step, rows that may share -> SPLITS, MEMBERS, W, T of attention_kernel.

    A row is cut up only where there are too few of them for 132 multiprocessors: a join costs 2 us, programs that find
    nothing to do 3. A shared prefix pays from 512 pairs on, where the L2 cannot keep up (32B, 64 rows: 30 -> 28 us).
    """
    if pairs <= 64:
        return min(64, triton.next_power_of_2(triton.cdiv(132, pairs))), 1, 4, 32
    if pairs <= 264:
        return 1, 1, 8 if pairs <= 132 else 4, 16
    return 1, shared, 4, 16


class GraphEngine:
    """CUDA graphs of decode steps and short prefills over model and kv (L, 2, blocks, KV, BLOCK, d), made as needed."""
    window = WINDOW

    def __init__(self, model, kv, max_rows):
        c, device = model.config, kv.device
        assert c.head_dim in (64, 128), f"attention_kernel's tiles are 64 or 128 wide, got head size {c.head_dim}"
        assert c.width % TILE == 0 == c.feed_forward % TILE, f"{c.width=}, {c.feed_forward=}: no multiples of {TILE}"
        assert c.heads // c.kv_heads <= GROUP, f"{c.heads} query heads on {c.kv_heads}: more than {GROUP} on each"
        assert model.dtype == kv.dtype, f"KV cache in {kv.dtype}, model in {model.dtype}"
        self.model, self.kv, self.max_rows = model, kv, max_rows
        self.shared = GROUP // (c.heads // c.kv_heads)               # rows that read a prefix together
        self.buckets = [b for b in BUCKETS if b < max_rows] + [max_rows]
        self.state = torch.zeros(len(FIELDS), max_rows, dtype=torch.int64, device=device)
        self.nobody = torch.zeros(len(FIELDS), 1, dtype=torch.int64, device=device)
        self.nobody[FIELDS.index("share")] = 1
        self.table = None                                            # (max_rows, width), from the first call on
        self.ends = torch.full((MAX_ENDS,), -1, dtype=torch.int64, device=device)
        self.inv_temperature = torch.ones((), device=device)
        self.tokens = torch.zeros(WINDOW, max_rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(WINDOW, max_rows, device=device)
        self.counters = torch.zeros(max_rows * c.kv_heads, dtype=torch.int32, device=device)
        half = torch.arange(0, c.head_dim, 2, device=device, dtype=torch.float32)
        widest = max(linear.weight.N for linear in (model.layers[0].qkv, model.layers[0].gate_up))
        self.ones = torch.ones(widest, device=device)                # the scale of linears that have none
        self.freq = c.rope_theta ** (-half / c.head_dim)             # as model.rope_table
        self.packed = torch.zeros(3, PREFILL_SIZES[-1], dtype=torch.int64, device=device)    # tokens, blocks, positions
        self.starts = torch.zeros(PREFILL_SIZES[-1] // BLOCK + 1, dtype=torch.int32, device=device)
        self.graphs, self.pool = {}, None

    def batch_size(self, n):
        """The rows that a step of n live rows computes."""
        return next(b for b in self.buckets if b >= n)

    @torch.no_grad()
    def decode(self, rows, steps, temperature, end_ids, top_k, top_p):
        """See sampler.TorchEngine.decode; steps <= WINDOW."""
        n = len(rows["pos"])
        assert n <= self.max_rows and steps <= WINDOW, f"{n} rows, {steps} steps: made for {self.max_rows} and {WINDOW}"
        assert len(end_ids) <= MAX_ENDS, f"{len(end_ids)} end ids, at most {MAX_ENDS}"
        if self.table is None:
            self.table = torch.zeros(self.max_rows, rows["table"].shape[1], dtype=torch.int64, device=self.kv.device)
        size = self.batch_size(n)
        run = self.graph(size, not temperature, top_k, top_p)
        self.state[:, :size] = self.nobody                           # rows past n read and write block 0
        self.table[:size] = 0
        self.state[:6, :n] = torch.stack([rows[name] for name in FIELDS[:6]])
        self.state[FIELDS.index("alive"), :n] = rows["limit"] > rows["pos"]
        self.table[:n] = rows["table"]
        self.ends.copy_(torch.tensor(sorted(end_ids) + [-1] * (MAX_ENDS - len(end_ids))))
        self.inv_temperature.fill_(1 / (temperature or 1.0))
        for _ in range(steps):
            run()
        made = self.state[FIELDS.index("made"), :n]
        return self.tokens[:steps, :n].clone(), self.logprobs[:steps, :n].clone(), made.clone()

    @torch.no_grad()
    def prefill(self, tokens, blocks, lengths):
        """See sampler.TorchEngine.prefill. A short one is a graph: the host takes 2 ms a layer to launch 90 kernels.

        It is padded by one more prefix, whose keys and values go to block 0, and by empty ones.
        """
        T, n = len(tokens), len(lengths)
        # Room for size / 32 prefixes: FlashAttention launches programs for each, also for those that are empty.
        size = next((size for size in PREFILL_SIZES if T <= size and n < size // BLOCK), None)
        if size is None or not self.kv.is_cuda:
            return TorchEngine.prefill(self, tokens, blocks, lengths)
        packed, starts = torch.zeros(3, size, dtype=torch.int64), torch.full((size // BLOCK + 1,), size)
        starts[:n + 1] = torch.tensor([0, *lengths]).cumsum(0)
        packed[0, :T], packed[1, :T] = tokens, blocks
        packed[2] = torch.cat([torch.arange(length) for length in (*lengths, size - T)])
        inputs, at = self.packed[:, :size], self.starts[:len(starts)]
        inputs.copy_(packed)
        at.copy_(starts)

        def attend(q, k, v):
            return attention(q, k, v, Spans(at, at, size, size, causal=True))
        self.captured(("prefill", size), lambda: prefill(self.model, self.kv, *inputs, attend))()

    def graph(self, size, greedy, top_k, top_p):
        """-> a function that runs one step of `size` rows."""
        def step():
            self.step(size, greedy, top_k, top_p)
        if not self.kv.is_cuda:
            return step                                              # Triton's interpreter
        return self.captured((size, greedy, top_k, top_p, self.model.live_vocab, self.model.packed_head is None), step)

    def captured(self, key, launch):
        """-> the CUDA graph of launch(), which only launches kernels, made when `key` and adapter are first seen."""
        adapter = self.model.adapter
        live = adapter is not None and adapter.linears[0].enabled
        key += (adapter.working.data_ptr(), adapter.rank) if live else (0, 0)
        if key not in self.graphs:
            for t in (self.state, self.table):                       # a step that is not captured is nobody's
                if t is not None:
                    t.zero_()
            with torch.cuda.stream(stream := torch.cuda.Stream()):   # not captured: compiles kernels, wakes cuBLAS
                stream.wait_stream(torch.cuda.default_stream())
                launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            self.pool = self.pool or torch.cuda.graph_pool_handle()  # graphs never run at once: they share activations
            with torch.cuda.graph(graph, pool=self.pool):
                launch()
            self.graphs[key] = graph.replay, lora.scratch.copy()     # where W is expanded: must outlive the graph
        return self.graphs[key][0]

    def step(self, n, greedy, top_k, top_p):
        """Launch one step of rows [0, n)."""
        model, c = self.model, self.model.config
        D, F, H, KV, d = c.width, c.feed_forward, c.heads, c.kv_heads, c.head_dim
        new = torch.empty((), device=self.kv.device).new_empty
        resid, xw, q, context, hidden = new(n, D), *(new(n, w, dtype=model.dtype) for w in (D, H * d, H * d, F))
        tile, per_heads, per_residual, per_swiglu = PROGRAMS[next((m for m in PROGRAMS if n <= m), max(PROGRAMS))]
        tiles = D // tile
        squares, cos, sin = new(n, tiles), new(n, d // 2), new(n, d // 2)
        state = (self.state, self.max_rows)
        norms = (squares, model.final_norm.eps, D, tiles, triton.next_power_of_2(tiles))
        pdl = dict(PDL=True, launch_pdl=True) if runs_on(self.kv.device) else dict(PDL=False)

        def linear_args(linear, x):
            (slabs, scale), R = partial_sums(linear, x, self.ones), linear.rank
            return (slabs.sums, scale, linear.b16 if R else scale, n, linear.weight.N, slabs.sums.shape[2], slabs.KB,
                    slabs.L, *slabs.most, R, max(16, triton.next_power_of_2(R)))

        def norm_args(norm):
            return norm.weight, norm.noise, xw, squares

        def heads(layer, cache):
            rows, warps = per_heads
            heads_kernel[triton.cdiv(n, rows), H + 2 * KV](
                *linear_args(layer.qkv, xw), *norms, layer.qkv_bias, cos, sin, q, *cache, H, KV, d // 2, BLOCK, rows,
                num_warps=warps, **pdl)

        def attention(cache):
            shape = splits, members, warps, _ = attention_shape(n * KV, self.shared)
            acc, stats = new(n, H, splits, d), new(2, n, H, splits)
            attention_kernel[n, KV, splits](
                q, *cache, context, acc, stats, self.counters, d ** -0.5 * LOG2_E, H, KV, d, BLOCK, GROUP, *shape,
                num_warps=warps, num_stages=4 if members > 1 else 3, **pdl)

        def residual(linear, x, norm):
            rows, warps = per_residual
            residual_kernel[triton.cdiv(n, rows), tiles](
                *linear_args(linear, x), resid, *norm_args(norm), tiles, tile, rows, num_warps=warps, **pdl)

        def swiglu(layer):
            rows, warps = per_swiglu
            swiglu_kernel[triton.cdiv(n, rows), F // tile](
                *linear_args(layer.gate_up, xw), *norms, hidden, tile, rows, num_warps=warps, **pdl)

        # The first kernel starts when the step before is done, so all others may read the rows' state early.
        embed_kernel[n, tiles](*state, model.embed, self.freq, resid, cos, sin, *norm_args(model.layers[0].input_norm),
                               n, D, tiles, tile, 1, d // 2, PDL=pdl["PDL"], num_warps=1)
        following = [layer.input_norm for layer in model.layers][1:] + [model.final_norm]
        for layer, kv, next_norm in zip(model.layers, self.kv, following):
            cache = (kv, kv.stride(0), *state, self.table, self.table.shape[1])
            heads(layer, cache)
            attention(cache)
            residual(layer.o, context, layer.post_norm)
            swiglu(layer)
            residual(layer.down, hidden, next_norm)
        self.sample(n, xw, squares, greedy, top_k, top_p)

    def sample(self, n, xw, squares, greedy, top_k, top_p):
        """The head and the draw: xw (n, D) and sums of squares of the final norm -> next token of every row."""
        c, V, packed = self.model.config, self.model.live_vocab, self.model.packed_head
        eps = self.model.final_norm.eps
        if packed is None or n > HEAD_ROWS or not runs_on(xw.device):
            # All rows of the head, not the live ones: 151,665 columns of fp32 would leave cuBLAS unaligned rows.
            logits = mm_fp32(xw, self.model.lm_head.T)               # (n, V padded)
            slabs, scale = marlin_fp4.Slabs(logits[None], KB=1, L=1), None
        else:
            slabs, scale = marlin_fp4.decode_matmul(xw, packed), packed.out_scale
        filtered = bool(top_k or top_p < 1.0)
        if filtered:
            logits = slabs.sums[0] if scale is None else marlin_fp4.finish(slabs, scale)
            logits *= torch.rsqrt(squares.sum(1, keepdim=True) / c.width + eps) * self.inv_temperature
            filter_logits(logits[:, :V], top_k, top_p)
            slabs, scale = marlin_fp4.Slabs(logits[None], KB=1, L=1), None
        logits = slabs.sums
        chunks, tiles = triton.cdiv(V, CHUNK), squares.shape[1]
        tops, masses, picks = logits.new_empty(n, chunks), logits.new_empty(n, chunks), self.tokens.new_empty(n, chunks)
        softmax = (logits, logits if scale is None else scale, *logits.stride()[:2], slabs.KB, slabs.L, len(logits),
                   scale is not None, V, squares, self.inv_temperature, c.width, eps, tiles,
                   triton.next_power_of_2(tiles), filtered, tops, masses, picks, CHUNK)
        chunk_kernel[n, chunks](*softmax)
        pick_kernel[n,](*softmax, chunks, triton.next_power_of_2(chunks), self.state, self.max_rows, self.ends,
                        self.tokens, self.logprobs, greedy, MAX_ENDS)
