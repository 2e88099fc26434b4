"""
portable_fp4: in Triton's interpreter against float64, its assembly run in numpy; what the compiler makes of its loop.

On a GPU it runs through the tests of test_marlin_fp4.py and test_decode.py, beside Hopper's.

python -m pytest tests/test_portable_fp4.py -v
"""
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import marlin_fp4
import portable_fp4
from marlin_fp4 import schedule
from portable_fp4 import Inputs, decode_config, decode_matmul, portable_kernel
from test_decode import SHARED, Gpu
from test_marlin_fp4 import both, random_weight, run_assembly, total

GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
no_gpu = pytest.mark.skipif(GPU or INTERPRETED, reason="where there is a GPU the other tests compile and run it")


@no_gpu
def test_the_kernel_passes_in_tritons_interpreter(interpreted):
    assert interpreted(__file__) >= 35


class Results(list):
    get_result = list.__getitem__


def assembly_in_numpy(builder, text, constraints, values, types, is_pure, pack):
    """What InterpreterBuilder.create_inline_asm lacks: two int16 words, or one int32, to a register."""
    words = np.ascontiguousarray(values[0].data)
    registers = words.view(np.uint32).ravel().astype(np.int64)
    found = run_assembly(text, torch.from_numpy(registers))
    results = Results()
    for i in range(len(types)):
        bits = found[f"${i}"].numpy().astype(np.uint32 if pack == 2 else np.uint16)
        results.append(interpreter.TensorHandle(bits.view(np.float16).reshape(words.shape), tl.float16))
    return results


@pytest.mark.skipif(not INTERPRETED, reason="in a process of its own")
@pytest.mark.parametrize("M,N,K,R", [(1, 128, 128, 0), (5, 300, 272, 6), (33, 384, 640, 48), (70, 130, 400, 70)])
def test_the_product_matches_float64(M, N, K, R, monkeypatch):
    """fp16: numpy has no bf16. Ragged rows, columns and K; several pieces a tile; two tiles of A, of x."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", assembly_in_numpy)
    monkeypatch.setattr(tl.dtype, "value", property(lambda dtype: dtype), raising=False)   # there no constexpr
    monkeypatch.setattr(marlin_fp4, "multiprocessors_of", lambda device: 4)
    weight, w = random_weight(N, K, dtype=torch.float16)
    x, a = torch.randn(M, K).half(), torch.randn(R, K).half()
    slabs = torch.full_like(decode_matmul(x, weight, a if R else None).sums, torch.nan)
    y, xa = total(decode_matmul(x, weight, a if R else None, slabs), N, R)
    # fp32 accumulation: at most K roundings of 2^-24 of the magnitudes
    assert ((y - x.double() @ w.T).abs() <= K * 2**-23 * (x.double().abs() @ w.abs().T)).all()
    assert ((xa - x.double() @ a.double().T).abs() <= K * 2**-23 * (x.double().abs() @ a.double().abs().T)).all()


@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("M", [1, 16, 32, 64, 256])
def test_the_programs_that_the_schedule_counts_on_fit_a_multiprocessor(sm, M):
    """Together the chip holds them all: a second wave would double the time."""
    assert portable_fp4.shared_memory(divmod(sm, 10)) == SHARED[sm]
    config = decode_config(M, SHARED[sm])
    shared = (config.num_stages - 1) * (8192 + 1024 + 256 * config.BM)       # codes, scales and x of the blocks
    assert shared <= SHARED[sm] * 1024
    assert config.per_sm >= 1 and config.per_sm * (shared + 1024) <= (SHARED[sm] + 1) * 1024
    multiprocessors = 82
    plan = schedule(37888, 3584, M, 64, config, multiprocessors)
    assert plan.programs * -(-M // config.BM) <= multiprocessors * config.per_sm


# -----------------------------------------------------------------------------
# What the compiler made of it

def compiled_for(sm, config, dtype):
    """-> kernel, its instructions [(address, text)]."""
    of_x = torch.zeros(64, 3584, dtype=dtype)
    codes, scales = torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.int32)
    inputs = Inputs(of_x, 3584, codes, scales, of_x, 4608, 3584, 96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", Gpu(sm))
        kernel = portable_kernel.warmup(inputs, torch.zeros(1), 64, 4704, 28, 7, 8, config.BM, config.num_stages,
                                        config.num_warps, True, sm >= 90, grid=(1,), num_warps=config.num_warps,
                                        launch_pdl=sm >= 90)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "k.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        listing = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([^;]+?)\s*;", listing)
    return kernel, [(int(address, 16), text) for address, text in found]


def inner_loops(instructions):
    """Instructions between a jump backwards and its target, of loops without another inside."""
    at = {address: i for i, (address, _) in enumerate(instructions)}
    loops = []
    for i, (address, text) in enumerate(instructions):
        jump = re.match(r"BRA\S* (?:.*, )?`?\(?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            loops.append((at[int(jump[1], 16)], i))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[text for _, text in instructions[first:last + 1]] for first, last in inner]


def bank_conflicts(columns, vec, per_phase, max_phase):
    """Of ldmatrix: 16 bytes of 8 neighbouring rows of 16-bit elements, swizzled as Triton's layout says."""
    worst = 0
    for chunk in range(columns // 8):
        banks = [(row * columns // 8 + (chunk ^ (row // per_phase % max_phase) * vec // 8)) % 8 for row in range(8)]
        worst = max(worst, *(banks.count(bank) - 1 for bank in banks))
    return worst


@no_gpu
@both
@pytest.mark.parametrize("sm,M,most", [(80, 16, 2.8), (89, 64, 3.8)])
def test_the_loop_is_what_the_file_says(sm, M, most, dtype):
    kernel, instructions = compiled_for(sm, decode_config(M, SHARED[sm]), dtype)
    loop = max(inner_loops(instructions), key=len)
    counts = {name: sum(text.startswith(name) for text in loop) for name in
              ("LDGSTS.E.BYPASS.128", "HMMA.16816.F32", "LDSM.16.M88.4", "LDL", "STL", "PRMT", "LDG.")}
    config = decode_config(M, SHARED[sm])
    warps = config.num_warps
    assert counts["HMMA.16816.F32"] == 128 * 128 * config.BM // (16 * 16 * 8) // warps         # mma.sync, none twice
    assert counts["LDGSTS.E.BYPASS.128"] >= 8192 // 16 // (32 * warps)                         # codes, 16 bytes each
    assert counts["LDSM.16.M88.4"] >= 8192 // 512 // warps
    assert counts["LDL"] == counts["STL"] == counts["PRMT"] == counts["LDG."] == 0
    assert len(loop) * 32 * warps / 128**2 <= most, len(loop)        # instructions a weight
    codes = re.search(r"memdesc<\d+x128x32xi16, (#\w+),", kernel.asm["ttgir"])[1]
    swizzle = re.search(rf"{codes} = #ttg.swizzled_shared<{{vec = (\d+), perPhase = (\d+), maxPhase = (\d+)",
                        kernel.asm["ttgir"])
    assert bank_conflicts(32, *map(int, swizzle.groups())) == 0


def test_rows_without_a_swizzle_would_conflict():
    assert bank_conflicts(32, 1, 1, 1) == 3 and bank_conflicts(64, 8, 1, 8) == 0
