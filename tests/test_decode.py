"""
The decode step's kernels against float64 torch, and complete steps against sampler.TorchEngine.

On a GPU everything runs. Without one, some tests run in Triton's interpreter (conftest.py), in fp32 and fp16, and the
kernels of a step are compiled for several GPUs exactly as they would be launched there.

python -m pytest tests/test_decode.py -v
"""
import functools
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from races import races
from tiny_qwen2 import LLAMA3
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.language import constexpr as const

import lora
import marlin_fp4
import model as model_module
import nvfp4
import sampler
from aqn import noisy_norms
from fast import backward, decode, hopper_fp4, kernels, register  # noqa: F401
from files import UserError
from ops import mm_fp32
from sampler import DecodeBatch, Sampling
from scheduler import KV_BLOCK

GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.skipif(not GPU, reason="CUDA graphs, or sizes that only a GPU can do")
runs_kernels = pytest.mark.skipif(not (GPU or INTERPRETED), reason="without a GPU kernels run in Triton's interpreter: "
                                  "TRITON_INTERPRET=1 pytest -n 0 FILE -k NAME")

# The dtypes and matmuls that every test with `gen` runs in. The interpreter computes with numpy, which has no bf16, so
# fp16 takes its place there.
SETTINGS = {"fp32": (torch.float32, None), "fp16": (torch.float16, None)}
if GPU:
    SETTINGS = {f"bf16-{matmul}": (torch.bfloat16, matmul)
                for matmul in (["hopper"] if torch.cuda.get_device_capability()[0] == 9 else []) + ["portable"]}
DTYPE, MATMUL = next(iter(SETTINGS.values()))
in_one_setting = pytest.mark.parametrize("gen", [next(iter(SETTINGS))], indirect=True)

ROWS = 4                                                             # rows per program of an elementwise kernel
HEADS_EPS = 5.0                                                     # for heads' norms: as large as a head's mean square


@pytest.fixture(params=SETTINGS)
def gen(request, monkeypatch):
    """A random generator. Runs the test once per entry of SETTINGS, with DTYPE and MATMUL set to it."""
    dtype, matmul = SETTINGS[request.param]
    monkeypatch.setitem(globals(), "DTYPE", dtype)
    monkeypatch.setitem(globals(), "MATMUL", matmul)
    return torch.Generator(DEVICE).manual_seed(0)


def rounding():
    """The largest relative error of rounding to DTYPE."""
    return 2.0**-12 if DTYPE == torch.float16 else 2.0**-9


def random_linear(M, N, k_tiles, stripe, parts, R, gen):
    """Random slabs in the layout that a matmul leaves -> kernels.UnfinishedLinear, its result (M, N) in float64.

    k_tiles, stripe: as in marlin_fp4.StripePlan. Where a slab has no piece of a column it holds NaN, because kernels
    must not read it.
    """
    counts = [(n * k_tiles + k_tiles - 1) // stripe - n * k_tiles // stripe + 1 for n in range(-(-N // 128))]
    a_count = -(-k_tiles // min(stripe, -(-k_tiles // 4)))
    slab = torch.randn(max(a_count, *counts), M, N + len(parts) * R, generator=gen, device=DEVICE)
    total = torch.zeros(M, slab.shape[2], device=DEVICE, dtype=torch.float64)
    for first, count in [(128 * n, c) for n, c in enumerate(counts)] + [(N, a_count)]:
        columns = slice(first, min(first + 128, N) if first < N else None)
        slab[count:, :, columns] = torch.nan
        total[:, columns] = slab[:count, :, columns].double().sum(0)
    scale = torch.rand(N, generator=gen, device=DEVICE) + 0.5
    b = torch.randn(N, max(R, 1), generator=gen, device=DEVICE).to(DTYPE)
    y = total[:, :N] * scale.double()
    rows = list(torch.arange(N).split(parts))
    for p, r in enumerate(rows if R else []):
        y[:, r] += total[:, N + p * R:N + (p + 1) * R].to(DTYPE).double() @ b[r].double().T
    return kernels.UnfinishedLinear(slab, scale, b, N, slab.shape[2], k_tiles, stripe, a_count, const(len(slab)),
                                    const(R)), y


def squares_of(M, tiles, D, gen):
    """Partial sums of squares for rows with an rms of about 1 -> kernels.RowSquares, 1/rms (M, 1) float64."""
    sums = torch.rand(M, tiles, generator=gen, device=DEVICE) * D
    squares = kernels.RowSquares(sums, 1e-6, D, const(tiles))
    return squares, torch.rsqrt(sums.double().sum(1, keepdim=True) / D + 1e-6)


class Gpu:
    """A stand-in for Triton's driver that reports a GPU of this sm. It compiles but launches nothing."""
    def __init__(self, sm):
        self.get_current_target = lambda: GPUTarget("cuda", sm, 32)
        self.get_current_device = lambda: sm                         # Triton caches compiled kernels per device

    is_active = staticmethod(lambda: True)
    get_current_stream = staticmethod(lambda device=None: 0)


def dumped(cubin, flag):
    """What cuobjdump prints about a cubin's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "k.cubin").write_bytes(cubin)
        return subprocess.run([knobs.nvidia.cuobjdump.path, flag, Path(folder, "k.cubin")], capture_output=True,
                              text=True, check=True).stdout


def resources(kernel):
    """A compiled kernel -> bytes of shared memory, registers per thread, bytes of stack that registers spill to."""
    listing = dumped(kernel.asm["cubin"], "-res-usage")
    return kernel.metadata.shared, *(int(re.search(rf"{name}:(\d+)", listing)[1]) for name in ("REG", "STACK"))


def instructions_of(cubin):
    """-> [(address, text)]"""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([^;]+?)\s*;", dumped(cubin, "-sass"))
    return [(int(address, 16), text) for address, text in found]


class Head(NamedTuple):
    """A model's query heads, key-value heads and head size. D and F, its width and feed-forward, are a Qwen3's."""
    H: int
    KV: int
    d: int
    D: int = 0
    F: int = 384


SMALL, HEADS_05B, HEADS_7B, HEADS_14B = Head(4, 2, 128), Head(14, 2, 64), Head(28, 4, 128), Head(40, 8, 128)
QWEN3 = {"0.6b": Head(16, 8, 128, 1024, 3072), "4b": Head(32, 8, 128, 2560, 9728),
         "8b": Head(32, 8, 128, 4096, 12288), "32b": Head(64, 8, 128, 5120, 25600)}


def blank(weights, base, dtype):
    """nvfp4.freeze as on a GPU: the same shapes, but every code is 0."""
    N, K = sum(map(len, weights)), weights[0].shape[1]
    tiles = -(-N // 128), -(-K // 128), 128
    codes, scales = torch.zeros(*tiles, 32, dtype=torch.int16), torch.zeros(*tiles, 2, dtype=torch.int32)
    return marlin_fp4.PackedWeight(N, K, codes, scales, torch.ones(N))


def compile_step(sm, matmul, n, head, rank, names):
    """Compiles a step of n rows as a GPU of this sm would launch it, and W's expansion for prefill and learner.

    -> {kernel: the maximum of each of its resources()}. names: compile only these kernels, or None. Patches this
    process, so run it in one of its own.
    """
    compiled, launch = [], triton.runtime.jit.JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        if names is None or kernel.__name__ in names:
            compiled.append((kernel.__name__, launch(kernel, *args, grid=grid, warmup=True, **options)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
        patch.setitem(globals(), "MATMUL", matmul)
        for module in (decode, marlin_fp4, hopper_fp4):
            patch.setattr(module, "capability", lambda device: divmod(sm, 10))
        patch.setattr(nvfp4, "freeze", blank)
        patch.setattr(torch, "randn", lambda *shape, generator, device: torch.zeros(*shape, device=device))
        gen = torch.Generator().manual_seed(0)
        size = head.D or head.H * head.d, head.F, 1, head.H, head.KV, 2432
        model, engine, width = small_engine("nvfp4", gen, rank, max(n, 64), size, BF16, head.d if head.D else None)
        engine.table = torch.zeros(max(n, 64), width, dtype=torch.int64)
        patch.setattr(triton.runtime.driver, "_active", Gpu(sm))
        with torch.no_grad():
            engine.step(n, sampling())
            weight = model.layers[0].qkv.weight
            for weight.exact in (True, False):
                weight.dequantize()
    found = {}
    for name, kernel in compiled:
        assert not races(kernel.asm["ptx"]), name
        found[name] = tuple(map(max, resources(kernel), found.get(name, (0, 0, 0))))
    return found


def target(sm, matmul, n, head, rank=32, names=None):
    """A step to compile: compile_step's arguments."""
    return sm, matmul, n, head, rank, names


BF16 = torch.bfloat16
STEP = ("embed_kernel", "heads_kernel", "attention_kernel", "residual_kernel", "swiglu_kernel", "chunk_kernel",
        "pick_kernel", "dequantize_kernel")
OF_HEADS = "heads_kernel", "attention_kernel"
FINISHING = "heads_kernel", "residual_kernel", "swiglu_kernel"       # they finish a linear, so they depend on the rank
# A full step, as in the first three, takes 7 s; a few of its kernels take 2 s. test_portable_kernel.py covers more row
# counts. TEST_ALL_TARGETS=1 compiles every combination.
TARGETS = [target(90, "hopper", 64, SMALL), target(86, "portable", 64, SMALL), target(120, "portable", 1, SMALL),
           target(86, "portable", 256, HEADS_7B, names=OF_HEADS),
           target(90, "hopper", 64, QWEN3["4b"], names=OF_HEADS),
           *(target(sm, "portable", 64, SMALL, rank, FINISHING) for sm, rank in ((86, 8), (86, 256), (90, 512)))]
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}      # KiB per program, from CUDA's table of capabilities
if os.environ.get("TEST_ALL_TARGETS"):
    steps = [*itertools.product(SHARED, ["portable"], (1, 16, 64), [SMALL]),
             *itertools.product(SHARED, ["portable"], (1, 64, 256), (HEADS_05B, HEADS_7B, HEADS_14B)),
             *itertools.product(SHARED, ["portable"], (1, 64), QWEN3.values()),
             *itertools.product([90], ["hopper"], (1, 16, 64), (SMALL, *QWEN3.values()))]
    ranks = itertools.product(SHARED, (8, 16, 64, 128, 256, 512), (1, 16, 64, 512))
    TARGETS = [*itertools.starmap(target, steps), *(target(sm, "portable", n, SMALL, rank, FINISHING)
                                                    for sm, rank, n in ranks if rank < 512 or SHARED[sm] > 99)]
# Bytes that a kernel may spill on an sm (0 if not listed), all outside of its inner loop. embed_kernel keeps 2 / pi
# there, for sines of large angles. Attention spills with heads of 128: at few rows on two of the GPUs, and at 256 rows
# where 8 siblings share a program, as in Qwen3-0.6B (on sm_120 in its loop, and only with Triton's line numbers). The
# product spills at 64 rows, and residual_kernel, which has no loop, one address in a 0.5B at 256 rows.
STACK = {(name, sm): stack for name, stack in (("embed_kernel", 32), ("attention_kernel", 8)) for sm in SHARED}
STACK |= {("attention_kernel", 120): 40, ("portable_kernel", 100): 40, ("residual_kernel", 90): 8}
# The same for swiglu_kernel, by (sm, rank): x @ A.T of its rows takes most of the registers.
SWIGLU_STACK = {(80, 512): 128, (90, 512): 160, (100, 512): 168, (100, 256): 8}
SCRATCH = 20 * 1024                      # bytes of shared memory that a FINISHING kernel may take whatever the rank is


@pytest.fixture(scope="module")
def compiled():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        yield [pool.submit(compile_step, *arguments) for arguments in TARGETS]


@pytest.mark.skipif(GPU or INTERPRETED, reason="with a GPU the other tests compile them")
@pytest.mark.parametrize("case", range(len(TARGETS)))
def test_step_kernels_compile_and_fit_the_gpu(case, compiled):
    sm, matmul, n, _, rank, names = TARGETS[case]
    found = compiled[case].result()
    assert set(found) == set(names or (*STEP, f"{matmul}_kernel"))
    tile = 64 if n <= 16 or decode.finishing_kib(rank, 128) > SHARED[sm] else 128
    assert decode.finishing_kib(rank, tile) <= SHARED[sm]
    for name, (shared, _, stack) in found.items():
        most = max(SCRATCH, decode.finishing_kib(rank, tile) * 1024) if name in FINISHING else SHARED[sm] * 1024
        assert shared <= most, f"{name}: {shared} bytes of shared memory"
        allowed = SWIGLU_STACK.get((sm, rank), 0) if name == "swiglu_kernel" else STACK.get((name, sm), 0)
        assert stack <= allowed, f"{name}: {stack} bytes of stack"


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
@pytest.mark.parametrize("sm,most", [(80, 512), (86, 256), (89, 256), (90, 512), (100, 512), (120, 256)])
def test_check_rank_refuses_what_exceeds_shared_memory(sm, most, monkeypatch):
    monkeypatch.setattr(decode, "capability", lambda device: divmod(sm, 10))
    gpu = torch.device("cuda")
    for rank in (1, 8, 192, 256, most - 1, most):
        decode.check_rank(rank, gpu)
    for rank in (most + 1, 2 * most):                                # both are padded to 2 * most
        with pytest.raises(UserError, match=f"rank {rank} .* fits is {most}$"):
            decode.check_rank(rank, gpu)
    assert 2 * 2 * (2 * most) * decode.NARROW_TILE > SHARED[sm] * 1024    # B of gate and of up, 2 bytes each
    with pytest.raises(UserError, match=f"rank {most + 1} "):
        small_engine("bf16", torch.Generator(DEVICE), most + 1, size=(1024, 128, 1, 8, 2, 128))


def close(got, want, ulps=1.0):
    """Whether 99.9 % of `got` is within one rounding of an fp32 value, plus the rounding of x @ A.T, which can go the
    other way because its terms are summed in another order.
    """
    bound = ulps * rounding() * 2 * want.abs() + 2e-2 * rounding() * want.abs().max() + 1e-5
    return ((got.double() - want).abs() <= bound).double().mean() > 0.999


@runs_kernels
@pytest.mark.parametrize("M,k_tiles,stripe,R", [(1, 1, 1, 0), (5, 13, 2, 32), (9, 3, 4, 8)])     # 1 to 9 blocks of rows
@pytest.mark.parametrize("ROWS", [1, 4])                             # sums slabs side by side, or one after the other
def test_residual_kernel_matches_float64(M, k_tiles, stripe, R, ROWS, gen):
    D, T = 256, marlin_fp4.TILE_SIDE
    linear, y = random_linear(M, D, k_tiles, stripe, [D], R, gen)
    resid = torch.randn(M, D, generator=gen, device=DEVICE)
    weight, noise = torch.randn(2, D, generator=gen, device=DEVICE)
    want = resid.double() + y
    xw = torch.full((M, D), torch.nan, device=DEVICE, dtype=DTYPE)
    squares = torch.full((M, D // T), torch.nan, device=DEVICE)
    norm = kernels.NextNorm(weight, noise, xw, kernels.RowSquares(squares, 1e-6, D, const(D // T)))
    kernels.residual_kernel[-(-M // ROWS), D // T](linear, M, resid, norm, T, ROWS, False)
    assert (resid - want).abs().max() < 1e-4 + 1e-2 * (R > 0)        # fp32, apart from flipped roundings of x @ A.T
    assert close(xw, resid.double() * (weight + noise).double())
    torch.testing.assert_close(squares.sum(1), resid.square().sum(1))


@runs_kernels
@pytest.mark.parametrize("M,k_tiles,stripe,R", [(1, 7, 2, 16), (9, 2, 3, 64)])
def test_swiglu_kernel_matches_float64(M, k_tiles, stripe, R, gen):
    D, F_ = 192, 384                                                 # 3 partial sums of squares, padded to 4
    linear, y = random_linear(M, 2 * F_, k_tiles, stripe, [F_, F_], R, gen)
    squares, rstd = squares_of(M, 3, D, gen)
    y *= rstd
    out = torch.full((M, F_), torch.nan, device=DEVICE, dtype=DTYPE)
    tile = marlin_fp4.TILE_SIDE
    kernels.swiglu_kernel[-(-M // ROWS), F_ // tile](linear, M, squares, out, tile, ROWS, False)
    assert close(out, F.silu(y[:, :F_]) * y[:, F_:])


def rows_state(prefix, pos, width, blocks, gen):
    """For rows at `pos` after a prefix of `prefix` tokens -> kernels.RowState, a table of distinct random blocks."""
    n = len(pos)
    state = kernels.RowState(*torch.zeros(len(kernels.RowState._fields), n, dtype=torch.int64, device=DEVICE))
    for name, values in dict(pos=pos, prefix=prefix, siblings=[1] * n).items():
        getattr(state, name).copy_(torch.tensor(values))
    return state, torch.randperm(blocks, generator=gen, device=DEVICE)[:n * width].view(n, width).contiguous()


@runs_kernels
@pytest.mark.parametrize("H,KV,d,family,ROWS", [
    (3, 2, 64, "qwen2", 4), (3, 2, 128, "qwen3", 4), (3, 2, 64, "llama", 4),
    *(pytest.param(*case, marks=gpu) for case in (
        (14, 2, 64, "qwen2", 4), (10, 2, 128, "qwen2", 4), (4, 2, 128, "qwen3", 1)))])    # 1 row: a step below has it
def test_heads_kernel_matches_float64(H, KV, d, family, ROWS, gen):
    prefix, pos, B = [0, 5, 32, 40, 64], [0, 9, 32, 90, 95], KV_BLOCK
    n, D, width = 5, 256, 5
    state, table = rows_state(prefix, pos, width, 40, gen)
    kv = torch.zeros(2, 40, KV, B, d, device=DEVICE, dtype=DTYPE)
    linear, y = random_linear(n, (H + 2 * KV) * d, 13, 3, [H * d, KV * d, KV * d], 16, gen)
    squares, rstd = squares_of(n, 4, D, gen)
    bias = gains = None
    if family == "qwen2":
        bias = torch.randn((H + 2 * KV) * d, generator=gen, device=DEVICE)
    if family == "qwen3":
        gains = torch.randn(2, d, generator=gen, device=DEVICE)
    config = model_module.ModelConfig(H * d, 0, 0, H, KV, 0, True)
    cos, sin = model_module.rope_table(state.pos, config)
    q = torch.full((n, H, d), torch.nan, device=DEVICE, dtype=DTYPE)
    cache = kernels.LayerCache(kv, kv.stride(0), table, width, const(KV), const(B), const(d))
    kernels.heads_kernel[-(-n // ROWS), H + 2 * KV](
        linear, n, squares, kernels.HeadTerms(bias, gains, const(HEADS_EPS)), kernels.RotaryTable(cos, sin), q, cache,
        state, H, ROWS, False)
    y = (y * rstd + (0 if bias is None else bias)).view(n, H + 2 * KV, d)
    if family == "qwen3":
        normed = y / (y.square().mean(-1, keepdim=True) + HEADS_EPS).sqrt()
        y = torch.cat([normed[:, :H] * gains[0], normed[:, H:H + KV] * gains[1], y[:, H + KV:]], dim=1)
    cos, sin = cos.double(), sin.double()
    assert close(q, model_module.rotate(y[:, :H], cos, sin))
    for row in range(n):                                             # own tokens start in the block after the prefix
        slot = -(-prefix[row] // B) * B + pos[row] - prefix[row]
        k, v = kv[:, table[row, slot // B], :, slot % B]
        assert close(k, model_module.rotate(y[:, H:H + KV], cos, sin)[row]) and close(v, y[row, H + KV:])
    assert (kv != 0).any(-1).sum() == 2 * n * KV                     # nothing else was written


@runs_kernels
@in_one_setting
@pytest.mark.parametrize("heads,plan", [*itertools.product(
    [(14, 2, 64), (28, 4, 128), (10, 2, 128)],
    [(1, True, 4, 16), (2, True, 8, 16), (16, False, 4, 32), (1, False, 8, 16), (4, False, 4, 16)])] if GPU else [
    ((14, 2, 64), (1, True, 4, 16)), ((7, 1, 64), (2, True, 8, 16)), ((7, 1, 64), (8, False, 4, 32))])
def test_attention_kernel_matches_float64(heads, plan, gen):
    (H, KV, d), (splits, together, W, T) = heads, plan
    far, B = 1000 if GPU else 240, 32
    prefix = [0, 0, 31, 32, 32, 100, far, far, far, 5]
    # With splits, row 5 takes more than 4 programs, so join_splits needs a second round.
    pos = [0, 63, 31, 32, 164, 2 * far + 147, far + 47, far, far + 200, 2 * far]
    most = decode.QUERY_TILE // (H // KV)                                 # 2 or 3
    groups = [2, 1, 2, 1, most, 4 - most]                            # consecutive rows that share a prefix
    n, width = len(pos), 70
    state, table = rows_state(prefix, pos, width, n * width, gen)
    leaders = torch.tensor(groups).cumsum(0) - torch.tensor(groups)
    state.siblings.zero_()
    state.siblings[leaders] = torch.tensor(groups, device=DEVICE)
    for leader, size in zip(leaders.tolist(), groups):
        for row in range(leader, leader + size):
            prefix[row] = prefix[leader]
            pos[row] = max(pos[row], prefix[row])
            table[row, :-(-prefix[row] // B)] = table[leader, :-(-prefix[row] // B)]
    state.pos.copy_(torch.tensor(pos))
    state.prefix.copy_(torch.tensor(prefix))
    kv = torch.randn(2, n * width, KV, B, d, generator=gen, device=DEVICE).to(DTYPE)
    q = torch.randn(n, H, d, generator=gen, device=DEVICE).to(DTYPE)
    acc = torch.full((n, H, splits, d), torch.nan, device=DEVICE)
    tops, masses = torch.full((2, n, H, splits), torch.nan, device=DEVICE)
    counters = torch.zeros(n * KV, dtype=torch.int32, device=DEVICE)
    cache = kernels.LayerCache(kv, kv.stride(0), table, width, const(KV), const(B), const(d))

    def run(siblings):
        out = torch.full_like(q, torch.nan)
        plan = kernels.AttentionPlan(splits, siblings, W, T)
        left = kernels.SplitSoftmaxes(acc, tops, masses, counters)
        kernels.attention_kernel[n, KV, splits](
            q, cache, state, out, left, H, decode.QUERY_TILE, plan, False, num_warps=W)
        return out

    out = run(most if together else 1)
    assert all(torch.equal(out, run(most if together else 1)) for _ in range(3 * GPU))   # whichever program joins
    if GPU and together and splits == 1:                             # numpy's matmul depends on a row's place
        assert torch.equal(out, run(1))                              # as without siblings
    assert not counters.any()                                        # reset for the next layer
    for row in range(n):
        start = -(-prefix[row] // B) * B
        slots = torch.tensor([*range(prefix[row]), *range(start, start + pos[row] - prefix[row] + 1)], device=DEVICE)
        k, v = (kv[i, table[row, slots // B], :, slots % B].double() for i in (0, 1))          # (T, KV, d)
        k, v = (t.repeat_interleave(H // KV, dim=1) for t in (k, v))                           # (T, H, d)
        p = (torch.einsum("hd,thd->ht", q[row].double(), k) * d ** -0.5).softmax(-1)
        want = torch.einsum("ht,thd->hd", p, v)
        # p is rounded for the second matmul, and the result is rounded once more.
        bound = rounding() * (torch.einsum("ht,thd->hd", p, v.abs()) + want.abs()) * 1.1 + 1e-6
        assert ((out[row].double() - want).abs() <= bound).all(), f"row {row}"


@pytest.mark.parametrize("wide_steps_fit", [True, False])
def test_attention_plans_divide_the_kv_block(wide_steps_fit):
    plans = {decode.attention_plan(pairs, 2, wide_steps_fit) for pairs in range(1, 2049)}
    assert len(plans) > 3 and all(KV_BLOCK % plan.TOKENS == 0 for plan in plans)


def small_engine(base, gen, rank=32, max_rows=9, size=(256, 384, 2, 4, 2, 2432), dtype=None, qwen3_head=None):
    """-> a small random model with a nonzero adapter, its engine over a random KV cache, the table's width.

    qwen3_head: the head size of a Qwen3; None makes a Qwen2.5, 0 a Llama. Rotary angles are scaled as in a Llama 3.
    """
    dtype = dtype or DTYPE
    config = model_module.ModelConfig(*size, False, qwen3_head or None, qkv_bias=qwen3_head is None,
                                      qk_norm=bool(qwen3_head), rope_scaling=LLAMA3)

    def get(name, *shape):
        if "norm" in name:
            return 1 + 0.1 * torch.randn(shape, generator=gen, device=DEVICE)
        scale = shape[-1] ** -0.5 * (2 if "lm_head" in name else 1)
        return (torch.randn(shape, generator=gen, device=DEVICE) * scale).to(dtype)

    def frozen(names, parts, k):
        return nvfp4.freeze([get(n, p, k) for n, p in zip(names, parts)], base, dtype)

    model = model_module.Transformer(config, get, frozen, dtype, "small")
    model.live_vocab = 2311
    if rank:
        adapter = lora.attach(model, rank=rank, alpha=rank)
        adapter.master.data[adapter.b_start:].normal_(0, 0.1, generator=gen)
        adapter.sync()
    width = 12
    shape = config.layers, 2, max_rows * width + 1, config.kv_heads, KV_BLOCK, config.head_dim
    kv = torch.randn(shape, generator=gen, device=DEVICE).to(dtype)
    return model, decode.GraphEngine(model, kv, max_rows, MATMUL), width


def random_rows(n, width, gen):
    pos = torch.randint(0, 250 if GPU else 160, (n,), generator=gen, device=DEVICE)
    return DecodeBatch(token=torch.randint(0, 2311, (n,), generator=gen, device=DEVICE), pos=pos,
                prefix=(torch.rand(n, generator=gen, device=DEVICE) * (pos + 1)).long(), limit=pos + 100,
                group=torch.arange(n, device=DEVICE),
                key=torch.randint(0, 2**62, (n,), generator=gen, device=DEVICE),
                table=1 + torch.randperm(n * width, generator=gen, device=DEVICE).view(n, width))


def sampling(temperature=1.0, end_ids=(), top_k=0, top_p=1.0):
    return Sampling(100, end_ids, temperature, top_k, top_p)


class As:
    """A frozen weight that claims another dtype, to which lora.Linear then rounds x and expands W."""

    def __init__(self, weight, dtype):
        self.weight = weight
        self.dtype = dtype

    def __getattr__(self, name):
        return getattr(self.weight, name)

    def dequantize(self, out=None):
        return self.weight.dequantize(out) if out is not None else self.weight.dequantize().to(self.dtype)


def in_fp32_and_16_bits(model):
    """Rounds the inputs of the model's matmuls to fp32, yields, then does the same for DTYPE, the original."""
    norms = [norm for layer in model.layers for norm in (layer.input_norm, layer.post_norm)] + [model.final_norm]
    linears = [m for m in model.modules() if isinstance(m, lora.Linear)]
    kept = [(linear.weight, *((linear.working_a, linear.working_b) if linear.rank else ())) for linear in linears]
    fast = backward.attend_spans                                          # takes 16-bit inputs only
    lm_head = model.lm_head
    try:
        for dtype in (torch.float32, DTYPE):
            backward.attend_spans = fast.reference if dtype == torch.float32 else fast
            model.lm_head = lm_head.to(dtype)
            for norm in norms:
                norm.dtype = dtype
            for linear, (weight, *adapter) in zip(linears, kept):   # DTYPE gets back the tensors that graphs captured
                linear.weight = weight if dtype == DTYPE else As(weight, dtype)
                if adapter:
                    linear.working_a, linear.working_b = (t.to(dtype) for t in adapter)
            yield dtype
    finally:
        backward.attend_spans = fast


def reference_logprobs(model, kv, rows, temperature):
    """A step as sampler.TorchEngine does it -> log-probs (n, V), the rms by which rounding moves them from fp32."""
    logprobs = []
    for dtype in in_fp32_and_16_bits(model):
        attend = sampler.attention_to_cache(kv.to(dtype, copy=True), rows.table, rows.prefix, rows.pos)
        xw, rstd = model.hidden(rows.token, attend, rows.pos)
        logits = mm_fp32(xw, model.lm_head[:model.live_vocab].T) * (rstd / (temperature or 1.0))
        logprobs.append(logits.log_softmax(-1))
    return logprobs[1], (logprobs[1] - logprobs[0]).square().mean().sqrt().item()


@runs_kernels
@pytest.mark.parametrize("base,rank,n,qwen3_head", [                 # 3 rows run as 4, 5 as 6 with larger programs
    ("bf16", 8, 3, None), ("nvfp4", 8, 5, 128), *(pytest.param(*case, marks=gpu) for case in (
        ("nvfp4", 32, 9, None), ("nvfp4", 0, 1, None), ("bf16", 16, 5, None),
        ("nvfp4", 32, 9, 128), ("bf16", 16, 5, 128), ("nvfp4", 32, 9, 0)))])
@pytest.mark.parametrize("sigma,temperature", [(0.05, 0.7), pytest.param(0, 0.0, marks=gpu)])
def test_step_matches_the_torch_engine(base, rank, n, qwen3_head, sigma, temperature, gen):
    if not GPU and (DTYPE == torch.float16) == bool(qwen3_head):
        pytest.skip("2 s each: the interpreter runs a Qwen2 in fp16 and a Qwen3 in fp32")
    layers = 2 if GPU or qwen3_head else 1
    assert_step_matches_torch_engine(base, rank, n, qwen3_head, sigma, temperature, gen, layers)


def assert_step_matches_torch_engine(base, rank, n, qwen3_head, sigma, temperature, gen, layers):
    size = 256, 384, layers, 4, 2, 2432
    model, engine, width = small_engine(base, gen, rank, max(n, 9) if GPU else n + 1, size, qwen3_head=qwen3_head)
    with torch.no_grad(), noisy_norms(model, sigma, seed=1, step=2):
        rows = random_rows(n, width, gen)
        want, rounding = reference_logprobs(model, engine.kv, rows, temperature)
        (token,), (logprob,), made = engine.decode(rows, 1, sampling(temperature, (7,)))
    assert made.tolist() == [1] * n
    # Both round at the same places, but they sum in different orders, which flips some roundings and then later ones.
    # Two such evaluations differ from each other by about as much as each does from fp32: 5 standard deviations for up
    # to 9 rows. fp32 itself is a few hundred roundings of 2^-24 on logits up to 10.
    tolerance = 5 * 2**0.5 * rounding if DTYPE != torch.float32 else 1e-4
    assert tolerance < 0.3, "the reference itself is too rough to test against"
    assert (logprob - want.gather(1, token[:, None])[:, 0]).abs().max() < tolerance
    if temperature:                                                  # u is in the token's interval of the CDF
        cdf = F.pad(want.double().exp().cumsum(1), (1, 0))           # (n, V + 1)
        u = sampler.uniforms(rows.key, rows.pos)
        below, above = (cdf.gather(1, token[:, None] + i)[:, 0] for i in (0, 1))
        assert ((below - tolerance < u) & (u < above + tolerance)).all()
    else:
        assert (logprob > want.max(1).values - tolerance).all()


@gpu
@in_one_setting
def test_step_with_narrow_programs_matches_the_torch_engine(gen, monkeypatch):
    """A large rank on a GPU with 99 KiB. Without a GPU, such a step is only compiled: see TARGETS."""
    monkeypatch.setattr(decode, "shared_memory_kib", lambda capability: 99)
    assert decode.finishing_kib(256, 128) > 99 > decode.finishing_kib(256, decode.NARROW_TILE)
    assert_step_matches_torch_engine("nvfp4", 256, 17, None, 0.05, 0.7, gen, layers=2)


def test_groups_are_cut_to_the_siblings_of_their_graph():
    """A row beyond its program's siblings would never be computed. With 8 key-value heads, a program takes 1 row in
    graphs of up to 32 rows, 2 in those of 48 and 64, 4 in those of 96 and 128, 8 in those of 192 to 256.
    """
    gen, size = torch.Generator(DEVICE).manual_seed(0), (1024, 128, 1, 16, 8, 128)
    _, engine, _ = small_engine("bf16", gen, 0, 256, size, BF16)
    for n, most in ((1, 1), (32, 1), (33, 2), (64, 2), (65, 4), (100, 4), (129, 8), (256, 8)):
        siblings = engine.siblings(torch.zeros(n))                   # all in one group
        assert siblings.max() == most == engine.attention_plan(engine.batch_size(n)).SIBLINGS and siblings.sum() == n


@gpu
@in_one_setting
def test_window_stops_rows_at_ends_and_limits(gen):
    model, engine, width = small_engine("nvfp4", gen)
    rows = random_rows(6, width, gen)
    rows = rows._replace(limit=rows.pos + torch.tensor([0, 1, 3, 8, 100, 100], device=DEVICE))
    free = engine.decode(rows, 8, sampling())
    assert free[2].tolist() == [0, 1, 3, 8, 8, 8]
    end = free[0][2, 4].item()                                       # the token that row 4 draws at its third step
    tokens, logprobs, made = engine.decode(rows, 8, sampling(end_ids=(end,)))
    stops = [(column == end).nonzero()[0].item() + 1 if (column == end).any() else 8 for column in free[0].T]
    assert made.tolist() == [min(a, b) for a, b in zip(free[2].tolist(), stops)]
    for row, m in enumerate(made.tolist()):                          # up to its end, a row is as it was without one
        assert torch.equal(tokens[:m, row], free[0][:m, row]) and torch.equal(logprobs[:m, row], free[1][:m, row])
    for step in range(1, 8):                                         # a window of 8 equals 8 windows of 1
        rows = rows._replace(token=free[0][step - 1], pos=rows.pos + (free[2] >= step))
        again = engine.decode(rows, 1, sampling())
        going = free[2] > step
        for window, single in zip(free[:2], again):
            assert torch.equal(single[0][going], window[step][going])


@gpu
@in_one_setting
def test_row_bits_do_not_depend_on_neighbors(gen):
    model, engine, width = small_engine("nvfp4", gen)
    rows = random_rows(7, width, gen)
    first = engine.decode(rows, 4, sampling())
    again = engine.decode(rows, 4, sampling())
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    order = torch.tensor([6, 2, 4, 0, 5], device=DEVICE)             # 5 rows and 7 rows both run as 8
    moved = engine.decode(DecodeBatch(*(t[order] for t in rows)), 4, sampling())
    assert torch.equal(first[1][:, order], moved[1]) and torch.equal(first[0][:, order], moved[0])


@gpu
@pytest.mark.parametrize("n", [8, 16, 32, 64, 96, 128, 256])
def test_7b_sized_steps_repeat_bit_for_bit(n, gen):
    """Overwriting tensor-core operands in flight shows only on a loaded multiprocessor, as runs that differ: each
    matmul can be right alone while full 7B steps at 64 rows give NaN (docs/kernels.md).
    """
    model, engine, width = small_engine("nvfp4", gen, max_rows=n, size=(3584, 18944, 4, 28, 4, 2432))
    rows = random_rows(n, width, gen)
    first_tokens, first_logprobs, _ = engine.decode(rows, decode.WINDOW, sampling())
    assert first_logprobs.isfinite().all()
    for _ in range(30):
        tokens, logprobs, _ = engine.decode(rows, decode.WINDOW, sampling())
        assert torch.equal(tokens, first_tokens) and torch.equal(logprobs, first_logprobs)


@gpu
@in_one_setting
@torch.no_grad()
def test_graphed_prefill_writes_what_an_eager_one_does(gen):
    model, engine, _ = small_engine("nvfp4", gen)
    blocks, block = engine.kv.shape[2], KV_BLOCK
    for _ in range(2):
        for lengths in [(5,), (33, 33, 1), (64,), (90,), (200, 90), (10,) * 14]:
            free = iter((torch.randperm(blocks - 1, generator=gen, device=DEVICE) + 1).cpu())
            of_token = torch.cat([torch.stack([next(free) for _ in range(0, n, block)]).repeat_interleave(block)[:n]
                                  for n in lengths])
            tokens = torch.randint(2311, (sum(lengths),), generator=gen, device=DEVICE).cpu()
            eager = engine.kv.fill_(777).clone()
            engine.prefill(tokens, of_token, lengths)
            sampler.TorchEngine(model, eager, 9).prefill(tokens, of_token, lengths)
            got, want = engine.kv[:, :, 1:], eager[:, :, 1:]         # block 0 takes the padding
            written = want != engine.kv.new_tensor(777)
            assert torch.equal(got != engine.kv.new_tensor(777), written)
            assert written.sum() == sum(lengths) * want[:, :, 0, :, 0].numel()
            # A few roundings, which differ where cuBLAS picks another kernel for the padded number of tokens.
            assert (got - want)[written].float().norm() < 4 * rounding() * want[written].float().norm()
        assert sorted(engine.prefills) == [64, 128, 512]
        model.adapter.master.mul_(1.5)                               # the replays of the second round must see this
        model.adapter.sync()
        model.layers[1].input_norm.noise.normal_(0, 0.1)


def test_engine_follows_the_device():
    assert sampler.engine_for(torch.device("cpu")) is sampler.TorchEngine
    assert sampler.engine_for(torch.device("cuda")) is decode.GraphEngine


@pytest.mark.parametrize("sm,kernels,want", [
    (90, None, "hopper"), (90, "portable", "portable"), (89, None, "portable"), (100, None, "portable")])
def test_decode_matmul_follows_the_gpu(sm, kernels, want, monkeypatch):
    monkeypatch.setattr(decode, "capability", lambda device: divmod(sm, 10))
    assert decode.decode_matmul_for(torch.device("cuda"), kernels).__name__ == f"{want}_matmul"


@gpu
# 9 rows at a time, or 120, where a group's rows read their prefix together.
@pytest.mark.parametrize("P,G,qwen3_head", [(6, 2, None), (20, 8, None), (20, 8, 128)])
@torch.no_grad()
def test_greedy_completions_match_full_forwards(P, G, qwen3_head, gen):
    """Prefill, shared blocks, windows, and rows that come and go, against one forward per complete sequence."""
    model, _, _ = small_engine("nvfp4", gen, size=(256, 384, 3, 4, 4, 2432), qwen3_head=qwen3_head)
    lengths = [(1, 2, 32, 33, 34, 150)[p % 6] for p in range(P)]     # a prefix is one token shorter, a block has 32
    prompts = [torch.randint(2311, (n,), generator=gen, device=DEVICE).tolist() for n in lengths]
    limits = torch.randint(10, 50, (P * G,), generator=gen, device=DEVICE).tolist()
    engine = functools.partial(decode.GraphEngine, kernels=MATMUL)
    rollouts = sampler.Sampler(model, 200, P * G * 3 // 4, engine=engine).generate(
        prompts, G, Sampling(limits, temperature=0.0))
    assert [len(completion) for completion in rollouts.completions] == limits
    same = 0
    for row in rollouts.rows:
        prompt, completion, logprobs = row.prompt, row.completion, row.logprobs
        tokens, token = (torch.tensor(t, device=DEVICE) for t in ([prompt + completion], completion))
        exact, want = (model(tokens)[0, len(prompt) - 1:-1, :2311].log_softmax(-1) for _ in in_fp32_and_16_bits(model))
        # As above, but 7 standard deviations, for the maximum over 160 rows of up to 50 tokens. Either of two best
        # tokens that close may be drawn; by induction over the tokens this is what a loop of full forwards generates.
        tolerance = 7 * 2**0.5 * (want - exact).square().mean().sqrt()
        best, drawn = want.max(-1).values, want.gather(1, token[:, None])[:, 0]
        assert (drawn >= best - tolerance).all() and (logprobs.cuda() - drawn).abs().max() < tolerance < 0.3
        same += (drawn == best).sum().item()
    assert same > 0.95 * sum(limits)


@gpu
@in_one_setting
@torch.no_grad()
def test_adapter_and_norm_updates_need_no_new_capture(gen):
    model, engine, width = small_engine("nvfp4", gen)
    rows = random_rows(4, width, gen)

    def best():
        want, rounding = reference_logprobs(model, engine.kv, rows, 0.0)
        got = engine.decode(rows, 1, sampling(0.0))[1][0]
        assert (got - want.max(1).values).abs().max() < 5 * 2**0.5 * rounding
        return got

    before, captured = best(), len(engine.graphs)
    model.adapter.master.mul_(1.5)
    model.adapter.sync()
    model.layers[1].post_norm.weight.mul_(1.2)
    after = best()
    assert len(engine.graphs) == captured and not torch.equal(before, after)
    with model.adapter.off():                                        # the base policy has a graph of its own
        assert not torch.equal(best(), after)


@gpu
def test_graphs_share_one_cublas_workspace():
    # A workspace takes 32 MiB on Hopper, in a segment of its own. With one each, eight more graphs would reserve
    # 480 MiB more; all they need here is eight matrices of half a MiB.
    x = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16)
    store, reserved = decode.GraphStore(), []
    for keys in (1, 9):
        for key in range(keys):
            store.get_for(None, key, lambda: x @ x)()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert len(store) == 9 and reserved[1] - reserved[0] < 32 * 2**20


@runs_kernels
@in_one_setting
@torch.no_grad()
def test_stale_graphs_are_dropped(gen):
    model, engine, width = small_engine("nvfp4", gen)
    engine.table = torch.zeros(9, width, dtype=torch.int64, device=DEVICE)
    kept = engine.graph(4, sampling())
    engine.graph(4, sampling(0.0))
    model.adapter.sync()
    assert engine.graph(4, sampling(0.7)) is kept and list(engine.graphs) == [(4, False), (4, True)]
    engine.graph(8, sampling(top_k=40))
    assert list(engine.graphs) == [(8, False)]
    filtered = sampling(top_k=40, top_p=0.9)
    before = engine.graph(4, filtered)
    assert list(engine.graphs) == [(4, False)]
    with model.adapter.off():
        assert engine.graph(4, filtered) is not before and list(engine.graphs) == [(4, False)]
    before = engine.graph(4, filtered)                               # the adapter is back
    model.live_vocab -= 1
    assert engine.graph(4, filtered) is not before
    for _ in range(3):                           # even if a new adapter gets the address of a freed one
        lora.attach(model, rank=8, alpha=8)
        replay = engine.graph(8, filtered)
        assert list(engine.graphs) == [(8, False)] and replay is not before
        before = replay


@pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
def test_running_sum_of_a_row_ignores_other_rows():
    rows = torch.rand(3, 151_665 if GPU else 30_000, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    want = sampler.running_sum(rows)
    torch.testing.assert_close(want.double(), rows.double().cumsum(-1), atol=0, rtol=rows.shape[1] * 2.0**-24)
    for _ in range(20 if GPU else 1):
        for row, sums in zip(rows, want):
            assert torch.equal(sampler.running_sum(row[None]), sums[None])


@runs_kernels
@in_one_setting
@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 40, 0.95), (0.0, 0, 1.0)])
def test_draw_matches_the_samplers_on_the_same_logits(temperature, top_k, top_p, gen):
    n, V = 64 if GPU else 5, 2311
    model, engine, width = small_engine("bf16", gen, rank=0, max_rows=n)
    xw = torch.randn(n, 256, generator=gen, device=DEVICE).to(DTYPE)
    squares, rstd = squares_of(n, 4, 256, gen)
    engine.rows.random_(0, 1000, generator=gen)
    engine.state.step.zero_()
    engine.inv_temperature.fill_(1 / (temperature or 1.0))
    key, pos = engine.state.key.clone(), engine.state.pos.clone()
    engine.sample(xw, squares, sampling(temperature, (), top_k, top_p))
    logits = mm_fp32(xw, model.lm_head.T)[:, :V] * (rstd / (temperature or 1.0)).float()
    u = sampler.uniforms(key, pos) if temperature else None
    token, logprob = sampler.draw_tokens(sampler.filter_logits(logits, top_k, top_p), u)
    # fp32 sums of 2,311 probabilities differ by 1e-6: the odds that a row's u lands between the two are 1e-4 in all.
    assert torch.equal(token, engine.tokens[0])
    torch.testing.assert_close(logprob, engine.logprobs[0], atol=1e-4, rtol=0)


@triton.jit
def two_draws_kernel(chunks_ptr, masses_ptr, targets_ptr, at_ptr, rest_ptr, N: tl.constexpr):
    """pick_kernel's two draws: a chunk, then a place in it with the rest of the target."""
    row = tl.program_id(0)
    i = tl.arange(0, N)
    chunk, rest = kernels.inverse_cdf(tl.load(chunks_ptr + row * N + i), i, tl.load(targets_ptr + row))
    inside, _ = kernels.inverse_cdf(tl.load(masses_ptr + row * N + i), i, rest)
    tl.store(at_ptr + row * 2, chunk)
    tl.store(at_ptr + row * 2 + 1, inside)
    tl.store(rest_ptr + row, rest)


@runs_kernels
@in_one_setting
def test_inverse_cdf_draws_no_place_without_mass(gen):
    # Each target is the sum of the first k chunks, so whether chunk k - 1 reaches it depends on the rounding of a scan,
    # and the rest of the target on the rounding of another sum. Chunks begin with places of mass 0, as after top-k.
    rows, N = 400 if GPU else 60, 64
    chunks = torch.rand(rows, N, generator=gen, device=DEVICE)
    masses = torch.rand(rows, N, generator=gen, device=DEVICE)
    masses[:, :5] = 0
    k = torch.randint(1, N, (rows,), generator=gen, device=DEVICE)
    targets = chunks.cumsum(1).gather(1, k[:, None] - 1)[:, 0]
    at = torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE)
    rest = torch.zeros(rows, device=DEVICE)
    two_draws_kernel[rows,](chunks, masses, targets, at, rest, N)
    assert (rest >= 0).all() and (masses.gather(1, at[:, 1:].long()) > 0).all()
    assert ((at[:, 0] - k).abs() <= 1).all() and (at[:, 0] == k).float().mean() > 0.5
