"""
NVFP4 against numbers by hand and against compressed-tensors, a frozen weight against float64.

nvfp4_reference.safetensors has weights w, some with ties, saturation, both zeros or underflow, an `inverse` global
scale, and what compressed-tensors 0.20.0 makes of both: NVFP4PackedCompressor with calculate_qparams and NVFP4A16.

python -m pytest tests/test_nvfp4.py -v
"""

import pytest
import torch
from helpers import HERE, same_bytes
from safetensors.torch import load_file

import nvfp4
from nvfp4 import dequantize, freeze, fuse, global_scale_for, quantize

REFERENCE = load_file(HERE / "nvfp4_reference.safetensors")
CASES = sorted({name.split(".")[0] for name in REFERENCE})
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the GPU with the CPU")


# -----------------------------------------------------------------------------
# Against other implementations

@pytest.mark.parametrize("case", CASES)
def test_bytes_match_compressed_tensors(case):
    want = {part: REFERENCE[f"{case}.{part}"] for part in ("w", "inverse", "packed", "scale", "decoded")}
    tensors = quantize(want["w"], 1 / want["inverse"].reshape(()), offsets=[0])
    assert same_bytes(tensors[0], want["packed"])
    assert same_bytes(tensors[1], want["scale"])
    assert torch.equal(dequantize(*tensors), want["decoded"].bfloat16())


@needs_gpu
def test_gpu_and_cpu_give_the_same_bytes():
    torch.manual_seed(0)
    w = torch.randn(65, 192).bfloat16()
    there, here = quantize(w.cuda()), quantize(w)
    assert all(same_bytes(a.cpu(), b) for a, b in zip(there, here))
    assert torch.equal(dequantize(*there).cpu(), dequantize(*here))
    wide = torch.zeros(65, 200, device="cuda", dtype=torch.bfloat16)
    dequantize(*there, out=wide[:, :192])
    assert torch.equal(wide[:, :192].cpu(), dequantize(*here)) and not wide[:, 192:].any()


# -----------------------------------------------------------------------------
# By hand

def e2m1(code):
    """A code's value by the standard: sign, 2 exponent bits with bias 1, 1 mantissa bit, subnormal at exponent 0."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    return (-1) ** sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e4m3(byte):
    """A block scale's value: sign, 4 exponent bits with bias 7, 3 mantissa bits, subnormal at exponent 0."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    return (-1) ** sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@pytest.mark.parametrize("exponent", [-20, 0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_and_block_scale_decodes_exactly(dtype, exponent):
    scales = [byte for byte in range(256) if byte & 127 != 127]                 # 127 and 255 are NaN
    packed = torch.tensor([c | c + 1 << 4 for c in range(0, 16, 2)], dtype=torch.uint8).repeat(len(scales), 1)
    block_scale = torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    want = torch.tensor([[e2m1(c) * e4m3(s) * 2.0**exponent for c in range(16)] for s in scales], dtype=torch.float64)
    got = dequantize(packed, block_scale, torch.tensor(2.0**exponent), dtype)
    assert got.dtype == dtype and torch.equal(got.double(), want)


def test_ties_go_to_the_even_code():
    w = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]])
    half = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert dequantize(*quantize(w, torch.tensor(1.0), offsets=[0]))[0].tolist() == half + [-x for x in half]


@pytest.mark.parametrize("amax,scale", [(2688.0, 1.0), (2689.0, 2.0), (1344.0, 0.5), (1.0, 2.0**-11), (0.0, 1.0)])
def test_global_scale_is_the_smallest_unsaturated_power_of_two(amax, scale):
    w = torch.zeros(2, 16)                                 # 2688 = 6 * 448: the largest code and scale
    w[1, 5] = -amax
    assert global_scale_for(w).item() == global_scale_for(w / 64, w, w / 8).item() == scale       # of all parts
    packed, block_scale, global_scale = quantize(w)
    # The block's scale has 4 significant bits, so its largest weight comes back within 1/16.
    assert abs(dequantize(packed, block_scale, global_scale)[1, 5].item() + amax) <= amax / 16


@pytest.mark.parametrize("w,named", [
    (torch.full((1, 16), torch.nan), "contains nan"), (torch.full((1, 16), torch.inf), "contains inf"),
    (torch.zeros(2, 24), "K=24 .*16")])
def test_nonfinite_weights_and_a_ragged_k_are_refused(w, named):
    with pytest.raises(ValueError, match=named):
        quantize(w)


def test_quantizing_in_chunks_changes_nothing(monkeypatch):
    torch.manual_seed(0)
    w = torch.randn(13, 128)
    whole = quantize(w)
    decoded = dequantize(*whole)
    monkeypatch.setattr(nvfp4, "WEIGHTS_AT_A_TIME", 3 * 128)        # 3 rows at a time, 1 in the last chunk
    assert all(same_bytes(a, b) for a, b in zip(whole, quantize(w))) and torch.equal(decoded, dequantize(*whole))


# -----------------------------------------------------------------------------
# The search for a block's scale

def squared_errors(w, weigh, **options):
    """The weighed squared error of each scale_block, float64."""
    decoded = dequantize(*quantize(w, **options), torch.float32).double()
    return ((w.double() - decoded).square() * weigh).unflatten(1, (-1, 16)).sum(-1)


def test_search_finds_the_best_scale_by_importance():
    torch.manual_seed(0)
    w, importance = torch.randn(64, 128), torch.rand(128) ** 4
    for given, weigh in ((None, torch.ones(128)), (importance, importance)):
        found = squared_errors(w, weigh.double(), importance=given)
        best = torch.stack([squared_errors(w, weigh.double(), offsets=[o]) for o in range(-4, 7)]).amin(0)
        # Errors are compared in fp32, so of two that differ by 2^-20 either may win.
        assert ((found - best).abs() <= 2**-20 * best).all()
    assert found.sum() < 0.95 * squared_errors(w, importance.double()).sum()


@pytest.mark.parametrize("amax", [1.0, 1.9, 2688.0])
def test_relatively_tiny_blocks_become_zeros(amax):
    w = torch.zeros(3, 16)
    w[0, 0], w[1], w[2, 0] = amax, amax * 2**-19, amax * 2**-17
    packed, block_scale, global_scale = quantize(w)
    assert block_scale[1].item() == 0.125 and not dequantize(packed, block_scale, global_scale)[1].any()
    assert block_scale[2].item() > 0 and dequantize(packed, block_scale, global_scale)[2].any()


# -----------------------------------------------------------------------------
# A frozen weight

def exact(tensors):
    """A weight's tensors decoded by the standards' formulas -> (N, K) float64."""
    if len(tensors) == 1:
        return tensors[0].double()
    packed, block_scale, row_scale = tensors
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()           # even k in the low nibble
    values = torch.tensor([e2m1(c) for c in range(16)], dtype=torch.float64)[codes]
    scales = torch.tensor([e4m3(b) for b in range(256)], dtype=torch.float64)[block_scale.view(torch.uint8).long()]
    return values * scales.repeat_interleave(16, dim=1) * row_scale.double()[:, None]


def some_parts(K=128, sizes=(40, 24, 9)):
    torch.manual_seed(0)
    return [torch.randn(n, K) * std for n, std in zip(sizes, (0.1, 0.02, 0.3))]


def foreign_parts(K=128, sizes=(40, 24, 9)):
    """As other quantizers store them: each part has its own global scale, max / 2688, which is no power of two."""
    parts = [quantize(w, w.abs().max() / 2688) for w in some_parts(K, sizes)]
    assert all(torch.frexp(part[2]).mantissa != 0.5 for part in parts)
    return parts


UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}       # one rounding, relative


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("base", ["nvfp4", "bf16", "foreign"])
def test_weight_decodes_into_rows_of_any_stride(base, dtype):
    weight = fuse(foreign_parts(), dtype) if base == "foreign" else freeze(some_parts(), base, dtype)
    want = exact(weight.tensors)
    assert (weight.N, weight.K, weight.dtype, weight.device.type) == (73, 128, dtype, "cpu")
    w = weight.dequantize()
    assert w.shape == (73, 128) and w.dtype == dtype
    # One rounding to dtype, and up to two of 2^-24 in a product of two or three fp32 factors.
    bound = (1.001 * UNIT[dtype] + 2**-23) * want.abs()
    assert ((w.double() - want).abs() <= bound).all()
    if base == "nvfp4":                                                   # exact: the global scale is a power of two
        assert torch.equal(w.double(), want)
    for columns, step in ((128, 1), (200, 1), (400, 2)):                 # contiguous, with a margin, every other column
        wider = torch.full((80, columns), 7.0, dtype=dtype)
        out = wider[3:76, :128 * step:step]
        weight.dequantize(out=out)
        assert torch.equal(out, w)
        out.fill_(7.0)
        assert (wider == 7).all()
    into = torch.empty(73, 128)                                           # as for Linear.merged: rounded to dtype first
    assert torch.equal(weight.dequantize(out=into), w.float())


def test_freeze_shares_one_power_of_two_between_parts():
    parts = some_parts()
    packed, block_scale, row_scale = freeze(parts, "nvfp4", torch.float32).tensors
    scale, = row_scale.unique()
    assert scale == global_scale_for(*parts) and torch.frexp(scale).mantissa == 0.5
    alone = [quantize(w, scale) for w in parts]
    assert same_bytes(packed, torch.cat([t[0] for t in alone]))
    assert same_bytes(block_scale, torch.cat([t[1] for t in alone]))


def test_bf16_base_rounds_other_dtypes_to_bf16():
    w = torch.randn(3, 64).half()
    assert torch.equal(freeze([w], "bf16", torch.float32).dequantize(), w.bfloat16().float())
