"""
marlin_fp4.portable_kernel: in Triton's interpreter, with its assembly run in numpy, against float64; and as compiled.

On a GPU, test_marlin_fp4.py and test_decode.py run it along with Hopper's kernel.

python -m pytest tests/test_portable_kernel.py -v
"""
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from test_decode import GPU, INTERPRETED, SHARED, STACK, Gpu, instructions_of, resources
from test_hopper_fp4 import written_while_read
from test_marlin_fp4 import random_weight, run_assembly, total
from triton.runtime import interpreter

import marlin_fp4
from marlin_fp4 import MatmulInputs, plan_stripes, portable_config, portable_kernel, portable_matmul

no_gpu = pytest.mark.skipif(GPU or INTERPRETED, reason="with a GPU the other tests compile and run it")
interpreter_alone = pytest.mark.skipif(not INTERPRETED, reason="runs only in Triton's interpreter: TRITON_INTERPRET=1 "
                                       "pytest -n 0 tests/test_portable_kernel.py -k NAME")


class Results(list):
    get_result = list.__getitem__


def assembly_in_numpy(builder, text, constraints, values, types, is_pure, pack):
    """Inline assembly, which Triton's interpreter lacks. A register takes two int16 words or one int32."""
    if text == "mov.b32 $0, $1;":
        return Results(values)
    words = np.ascontiguousarray(values[0].data)
    registers = words.view(np.uint32).ravel().astype(np.int64)
    found = run_assembly(text, torch.from_numpy(registers))
    results = Results()
    for i in range(len(types)):
        bits = found[f"${i}"].numpy().astype(np.uint32 if pack == 2 else np.uint16).view(np.uint16)
        numbers = (bits.astype(np.uint32) << 16).view(np.float32)       # a bf16 as the fp32 of the same value
        results.append(interpreter.TensorHandle(numbers.reshape(words.shape), tl.float32))
    return results


@interpreter_alone
@pytest.mark.parametrize("sm,M,N,K,R", [(86, 1, 128, 128, 0), (86, 5, 300, 272, 6), (90, 33, 384, 640, 48),
                                         (86, 70, 130, 400, 70), (90, 70, 130, 400, 70)])
def test_product_matches_float64(sm, M, N, K, R, monkeypatch):
    """numpy has no bf16, so x and the decoded weights are bf16 numbers in fp32. The cases cover ragged rows, columns
    and K, several pieces per band, two tiles of A, and two tiles of x.
    """
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", assembly_in_numpy)
    monkeypatch.setattr(tl.dtype, "value", property(lambda dtype: dtype), raising=False)   # which is no constexpr here
    monkeypatch.setattr(marlin_fp4, "multiprocessors_on", lambda device: 4)
    monkeypatch.setattr(marlin_fp4, "capability", lambda device: divmod(sm, 10))
    weight, w = random_weight(N, K)
    weight.dtype = torch.float32
    x, a = torch.randn(M, K).bfloat16().float(), torch.randn(R, K).bfloat16().float()
    with monkeypatch.context() as unwritten:
        unwritten.setattr(torch, "empty", lambda shape, device: torch.full(shape, torch.nan))
        y, xa = total(portable_matmul(x, weight, a if R else None), N, R)
    # fp32 accumulation: at most K roundings of 2^-24 of the magnitudes.
    assert ((y - x.double() @ w.T).abs() <= K * 2**-23 * (x.double().abs() @ w.abs().T)).all()
    assert ((xa - x.double() @ a.double().T).abs() <= K * 2**-23 * (x.double().abs() @ a.double().abs().T)).all()


@interpreter_alone
@pytest.mark.parametrize("global_scale", [2.0**-7, 2.0**9, 2.0**-33, 0.3])
def test_expanded_weight_equals_the_fp32_product(global_scale, monkeypatch):
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", assembly_in_numpy)
    monkeypatch.setattr(tl.dtype, "value", property(lambda dtype: dtype), raising=False)
    weight, w = random_weight(130, 144, global_scale=global_scale)
    assert (w == 0).any() and weight.exact == (global_scale != 0.3)
    assert torch.equal(weight.dequantize(torch.empty(130, 144)), w.float())


@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("M", [1, 16, 32, 64, 256])
def test_schedule_fits_in_one_wave(sm, M):
    """A second wave of programs would double the time of a step."""
    assert marlin_fp4.shared_memory_kib(divmod(sm, 10)) == SHARED[sm]
    config = portable_config(M, divmod(sm, 10))
    multiprocessors = 82
    plan = plan_stripes(37888, 3584, M, 64, config, multiprocessors)
    assert plan.programs * -(-M // config.BM) <= multiprocessors * config.programs_per_sm


# -----------------------------------------------------------------------------
# What the compiler makes of the kernel

# Some use mma.sync, some wgmma (test_decode.py has more). A case that Triton has not cached takes about 3 s.
# TEST_ALL_TARGETS=1 compiles every combination.
CASES = [(86, 16), (86, 64), (90, 1), (90, 64), (100, 64)]
if os.environ.get("TEST_ALL_TARGETS"):
    CASES = list(itertools.product(SHARED, (1, 16, 32, 64)))
WGMMA = [case for case in CASES if portable_config(case[1], divmod(case[0], 10)).batch == 1]


def compile_for(sm, M):
    """-> its resources(), instructions_of(). Patches this process, so run it in one of its own."""
    config = portable_config(M, divmod(sm, 10))
    of_x = torch.zeros(64, 3584, dtype=torch.bfloat16)
    codes, scales = torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.int32)
    inputs = MatmulInputs(of_x, 3584, codes, scales, of_x, 4608, 3584, 96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", Gpu(sm))
        kernel = portable_kernel.warmup(inputs, torch.zeros(1), M, 4704, 28, 7, 7, 8, config, True, sm >= 90,
                                        grid=(1,), num_warps=config.num_warps, launch_pdl=sm >= 90)
    return resources(kernel), instructions_of(kernel.asm["cubin"])


@pytest.fixture(scope="module")
def compiled():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        yield {case: pool.submit(compile_for, *case) for case in CASES}


@no_gpu
@pytest.mark.parametrize("sm,M", CASES)
def test_compiled_programs_fit_a_multiprocessor(sm, M, compiled):
    config = portable_config(M, divmod(sm, 10))
    (shared, registers, stack), _ = compiled[sm, M].result()
    assert shared <= SHARED[sm] * 1024
    assert config.programs_per_sm * (shared + 1024) <= (SHARED[sm] + 1) * 1024
    of_warp = -(-registers // 8) * 8 * 32                      # a thread gets a multiple of eight
    assert config.programs_per_sm >= 1 and 65536 // (of_warp * config.num_warps) >= config.programs_per_sm
    assert stack <= STACK.get(("portable_kernel", sm), 0)


@no_gpu
@pytest.mark.parametrize("sm,M", WGMMA)
def test_hopper_decodes_a_block_only_after_the_last_was_read(sm, M, compiled):
    _, instructions = compiled[sm, M].result()
    assert sm == 90 and M in (32, 64) and written_while_read(instructions) == []
    never = [(address, text.replace("gsb0, 0x0", "gsb0, 0x7")) for address, text in instructions]
    assert written_while_read(never)                                 # without the waits it would be a race
