"""
marlin_fp4: the packed layout by hand and bit by bit; every product, Hopper's included, against float64 with the decoded
weight.

test_portable_kernel.py and test_hopper_fp4.py check what the compilers make of the kernels.

python -m pytest tests/test_marlin_fp4.py -v
"""
import re

import pytest
import torch

import marlin_fp4
from fast.hopper_fp4 import HOPPER_CONFIGS, hopper_config, hopper_matmul
from marlin_fp4 import capability, expanded_matmul, pack, plan_stripes, portable_matmul
from nvfp4 import freeze

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
hopper = pytest.mark.skipif(not (torch.cuda.is_available() and capability(torch.device("cuda", 0))[0] == 9),
                            reason="needs a Hopper GPU")


def portable_with(name, value):
    """portable_matmul as on a GPU for which this function of marlin_fp4 gives this value."""
    def matmul(*arguments, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(marlin_fp4, name, lambda _: value)
            return portable_matmul(*arguments, **options)
    return matmul


# 99 KiB of shared memory per program; an A100 or B200, with mma.sync even where Hopper would use wgmma.
ours = pytest.mark.parametrize("matmul", [pytest.param(hopper_matmul, marks=hopper), portable_matmul,
                                          portable_with("shared_memory_kib", 99), portable_with("capability", (8, 0))],
                               ids=["hopper", "portable", "portable_99", "portable_sm_80"])
GRID = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def random_weight(N, K, device="cpu", seed=0, global_scale=2.0 ** -7):
    """Random codes under random nonnegative E4M3 scales -> PackedWeight, its float64 value (N, K)."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(0, 127, (N, K // 16), dtype=torch.uint8, generator=g).view(torch.float8_e4m3fn)
    global_scale = torch.as_tensor(global_scale)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    w = GRID.double()[codes] * scale.double().repeat_interleave(16, dim=1) * global_scale.double().reshape(-1, 1)
    return pack(packed.to(device), scale.to(device), global_scale.to(device)), w.to(device)


def values(weight):
    """The packed words decoded in plain torch -> (N, K) float64: code * scale * row_scale."""
    word = weight.scales.long() & 0xFFFFFFFF
    word = word >> marlin_fp4.ROTATION | (word << (32 - marlin_fp4.ROTATION)) & 0xFFFFFFFF
    u = torch.stack([word >> shift & 255 for shift in (0, 16, 24, 8)], dim=-2).flatten(-2)
    scale = torch.where(u > 0, torch.ldexp(1 + (u & 7).double() / 8, (u >> 3) - marlin_fp4.EXPONENT_BIAS), 0.0)
    codes = marlin_fp4._unpack_words(weight.codes)
    w = GRID.double()[codes] * scale.repeat_interleave(16, dim=-1)   # (N/128, K/128, 128, 128)
    w = w.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:weight.N, :weight.K]
    return w * weight.row_scale.double()[:, None]


def test_word_holds_four_planes_of_a_column():
    packed = torch.zeros(128, 64, dtype=torch.uint8)
    packed[3, 2] = 0x0F                                              # k = 4, plane 0, code 15: s0 e0 e0 m0
    packed[3, 18] = 0x02                                             # k = 36, plane 1, code 2: the low exponent bit
    packed[3, 34] = 0x08                                             # k = 68, plane 2, code 8: the sign
    packed[3, 50] = 0x0B                                             # k = 100, plane 3, code 11: sign, low exponent, m
    word = pack(packed, torch.ones(128, 8).to(torch.float8_e4m3fn), torch.tensor(1.0)).codes[0, 0, 3, 4]
    # bit: s0 15, e0 8 and 7, m0 6 | low e1 4 | s2 9 | s3 13, low e3 10, m3 14
    want = 1 << 15 | 3 << 7 | 1 << 6 | 1 << 4 | 1 << 9 | 1 << 13 | 1 << 10 | 1 << 14
    assert int(word) & 0xFFFF == want


def test_scale_word_is_four_rotated_e5m3_bytes():
    scale = torch.ones(128, 8)
    scale[5, 0], scale[5, 2], scale[5, 4], scale[5, 6] = 1.0, 2.0, 4.0, 448.0     # k = 0, 32, 64, 96: half 0
    weight = pack(torch.zeros(128, 64, dtype=torch.uint8), scale.to(torch.float8_e4m3fn), torch.tensor(1.0))
    u0, u1, u2, u3 = 10 << 3, 11 << 3, 12 << 3, 18 << 3 | 6          # bias 10; 448 = 2^8 * 1.75
    plain = u0 | u3 << 8 | u1 << 16 | u2 << 24
    assert int(weight.scales[0, 0, 5, 0]) & 0xFFFFFFFF == (plain << 4 | plain >> 28) & 0xFFFFFFFF


def every_scale_times_every_code(device="cpu"):
    """-> a PackedWeight with one row per scale and one column per code, its value in fp32."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    weight = pack(packed.to(device), scale.to(device), torch.tensor(1.0, device=device))
    return weight, (GRID[None, :] * scale.float()).to(device)


def test_packing_keeps_every_scale_times_every_code():
    weight, want = every_scale_times_every_code()
    assert torch.equal(values(weight), want.double())


@pytest.mark.parametrize("N,K", [(128, 128), (1, 16), (130, 48), (300, 272)])
def test_packing_keeps_every_value(N, K):
    weight, w = random_weight(N, K)
    assert torch.equal(values(weight), w)


def test_weight_is_exact_only_for_powers_of_two():
    def exact(row_scale):
        scale = torch.ones(2, 1).to(torch.float8_e4m3fn)
        return pack(torch.zeros(2, 8, dtype=torch.uint8), scale, torch.tensor(row_scale)).exact

    assert exact([2.0**108, 1.0]) and exact([2.0**-140, 1.0]) and not exact([1.0, 0.3])
    with pytest.raises(AssertionError, match="below 6.49037e.32, got 6.49037"):       # or out_scale would be inf
        exact([2.0**109, 1.0])


def test_zero_scale_clears_its_codes():
    packed = torch.full((128, 64), 0x77, dtype=torch.uint8)
    weight = pack(packed, torch.zeros(128, 8).to(torch.float8_e4m3fn), torch.tensor(1.0))
    assert weight.codes.count_nonzero() == 0 and values(weight).count_nonzero() == 0


def test_bad_operands_are_named():
    packed, one = torch.zeros(4, 16, dtype=torch.uint8), torch.tensor(1.0)
    scale = torch.ones(4, 2).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="-1"):
        pack(packed, (-scale.float()).to(torch.float8_e4m3fn), one)
    with pytest.raises(AssertionError, match="nan"):
        pack(packed, (scale.float() * float("nan")).to(torch.float8_e4m3fn), one)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(AssertionError, match=f"global_scale must be above 0 and below .*, got {bad}"):
            pack(packed, scale, torch.tensor(bad))


@pytest.mark.parametrize("capability,most", [((8, 6), 256), ((9, 0), 512), ((12, 0), 256)])
def test_weight_expands_beyond_most_rows(monkeypatch, capability, most):
    weight, _ = random_weight(300, 256)
    monkeypatch.setattr(marlin_fp4, "capability", lambda device: capability)
    assert not weight.expands(most) and weight.expands(most + 1)


@pytest.mark.parametrize("base", ["bf16", "nvfp4", "packed"])
@pytest.mark.parametrize("M,R", [(1, 0), (5, 8), (33, 3)])
def test_expanded_matmul_matches_float64(monkeypatch, base, M, R):
    dtype = torch.bfloat16
    torch.manual_seed(1)
    if base == "packed":
        weight, w = random_weight(300, 256)
        w = w.to(dtype)
        monkeypatch.setattr(weight, "dequantize", lambda: w)          # the real one needs a GPU
    else:
        weight = freeze([torch.randn(40, 256), torch.randn(9, 256)], base, dtype)
    x, a = torch.randn(M, 256).to(dtype), torch.randn(R, 256).to(dtype) if R else None
    slabs = expanded_matmul(x, weight, a)
    N = weight.N
    assert slabs.sums.shape == (1, M, N + R) and slabs.sums.dtype == torch.float32
    assert (slabs.k_tiles, slabs.stripe, slabs.a_pieces) == (1, 1, 1)
    got = slabs.sums[0].double()
    got[:, :N] *= slabs.scale.double()
    whole = torch.cat([weight.dequantize().double(), *([a.double()] if R else [])])
    # fp32 sums of 256 terms, in any order.
    assert ((got - x.double() @ whole.T).abs() <= 256 * 2**-24 * (x.double().abs() @ whole.T.abs())).all()


@pytest.mark.parametrize("N,K,M,R", [(4608, 3584, 1, 96), (3584, 18944, 16, 32), (37888, 3584, 64, 64),
                                     (128, 128, 8, 0), (1152, 896, 33, 48), (384, 128, 250, 16)])
def test_schedule_covers_every_tile_once(N, K, M, R):
    k_tiles, stripe, a_stripe, a_programs, programs, slabs = plan_stripes(N, K, M, R, hopper_config(M), 132)
    bands = -(-N // 128)
    owners = [[tile // stripe for tile in range(band * k_tiles, band * k_tiles + k_tiles)] for band in range(bands)]
    assert k_tiles == -(-K // 128) and max(max(o) for o in owners) == programs - a_programs - 1
    assert all(set(o) == set(range(o[0], o[-1] + 1)) for o in owners)             # no gaps in the numbers of pieces
    assert [len(set(o)) for o in owners] == [pieces(128 * band, k_tiles, stripe) for band in range(bands)]
    # A's programs walk at most a quarter of K, or half of it if x has more than 32 rows.
    assert a_stripe == min(stripe, -(-k_tiles // (4 if M <= 32 else 2)))
    a_pieces = -(-k_tiles // a_stripe) if R else 0
    assert a_programs == -(-R // 64) * a_pieces and slabs == max(a_pieces, *(len(set(o)) for o in owners))


def test_schedule_by_hand():
    """3 bands of 5 tiles in stripes of 3, and LoRA's A, on 8 multiprocessors with one program each."""
    config = marlin_fp4.PortableConfig(8, 3, 1, 4, 4)
    plan = plan_stripes(3 * 128, 5 * 128, 1, 32, config, 8)
    assert plan == marlin_fp4.StripePlan(k_tiles=5, stripe=3, a_stripe=2, a_programs=3, programs=8, slabs=3)
    # An A of 6 x 64 rows takes 6 x 3 programs, so W gets half of the first wave in a third one: 24 places.
    plan = plan_stripes(3 * 128, 5 * 128, 1, 384, config, 8)
    assert plan == marlin_fp4.StripePlan(k_tiles=5, stripe=3, a_stripe=2, a_programs=18, programs=23, slabs=3)
    plan = plan_stripes(128, 8 * 128, 1, 0, config, 8)                # no A: a tile for each multiprocessor
    assert plan == marlin_fp4.StripePlan(k_tiles=8, stripe=1, a_stripe=1, a_programs=0, programs=8, slabs=8)


def pieces(column, k_tiles, stripe):
    """marlin_fp4.w_pieces in Python."""
    first = column // 128 * k_tiles
    return (first + k_tiles - 1) // stripe - first // stripe + 1


def total(slabs, N, R=0):
    """The sums of a product's slabs, float64: x @ W.T (M, N), x @ A.T (M, R).

    Where a slab has no piece of a column it may hold NaN, which is not read.
    """
    sums, scale, k_tiles, stripe, a_pieces = slabs
    y = []
    for n in range(0, N, 128):
        y.append(sums[:pieces(n, k_tiles, stripe), :, n:min(n + 128, N)].double().sum(0))
    return torch.cat(y, dim=1) * scale, sums[:a_pieces, :, N:N + R].double().sum(0)


def cublas(x, w):
    return torch.mm(x, w.T, out_dtype=torch.float32).double()


# -----------------------------------------------------------------------------
# On the GPU

@gpu
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_gpu_decodes_every_scale_times_every_code(out):
    weight, want = every_scale_times_every_code("cuda")
    got = weight.dequantize(torch.empty(want.shape, dtype=out, device="cuda"))
    assert torch.equal(got.float(), want)


@gpu
@pytest.mark.parametrize("global_scale", [2.0 ** -7, 2.0 ** -16, 2.0 ** 9, 2.0 ** -33, 0.3,
                                          torch.tensor([0.5, 0.3]).repeat_interleave(150)])
def test_dequantize_fills_only_its_slice(global_scale):
    weight, w = random_weight(300, 272, "cuda", global_scale=global_scale)
    wide = torch.full((300, 272 + 64), 7.0, device="cuda", dtype=torch.bfloat16)
    weight.dequantize(out=wide[:, :272])
    assert torch.equal(wide[:, :272], w.float().bfloat16())
    assert (wide[:, 272:] == 7).all()


@gpu
@pytest.mark.parametrize("N,K,R", [(128, 128, 0), (300, 272, 6), (1152, 896, 48), (896, 4864, 32), (4608, 3584, 96)])
@pytest.mark.parametrize("M", [1, 5, 16, 31, 64, 100, 256, 300])
@ours
def test_decode_matmul_matches_float64_and_repeats(monkeypatch, matmul, M, N, K, R):
    weight, w = random_weight(N, K, "cuda")
    x, a = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(R, K, device="cuda").bfloat16()
    empty, first = torch.empty, None
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: empty(*shape, **kind).fill_(float("nan")))
    for pdl in (False, capability(x.device) >= (9, 0)):
        y, xa = total(matmul(x, weight, a if R else None, pdl=pdl), N, R)
        assert first is None or torch.equal(first, y)
        first = y
        # fp32 accumulation: at most K roundings of 2^-24 of the magnitudes, in practice far fewer.
        assert ((y - x.double() @ w.T).abs() <= K * 2 ** -23 * (x.double().abs() @ w.abs().T)).all()
        assert ((xa - x.double() @ a.double().T).abs() <= K * 2 ** -23 * (x.double().abs() @ a.double().abs().T)).all()
        error = (cublas(x, weight.dequantize()) - x.double() @ w.T).norm()
        assert (y - x.double() @ w.T).norm() <= 1.5 * error + 1e-7 * y.norm()


@gpu
@pytest.mark.parametrize("bucket", HOPPER_CONFIGS)
@ours
def test_row_bits_do_not_depend_on_other_rows(matmul, bucket):
    weight, _ = random_weight(4608, 3584, "cuda")
    x = torch.randn(bucket, 3584, device="cuda").bfloat16()
    first, _ = total(matmul(x, weight), 4608)
    x[1:] = torch.randn_like(x[1:]) * 100
    again, _ = total(matmul(x, weight), 4608)
    assert torch.equal(first[0], again[0])


def number(bits):
    """The float64 value of the 16 bits of a bf16."""
    return ((bits + 32768) % 65536 - 32768).to(torch.int16).view(torch.bfloat16).double()


def run_assembly(text, argument):
    """Runs inline assembly on uint32 values, held in int64 -> {register: result}."""
    count = max(int(digit) for digit in re.findall(r"\$(\d)", text))
    registers = {f"${count}": argument}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for line in text.split(";"):
        op, *names = re.sub(r"[{},]", " ", line).split() or [".reg"]
        if op == ".reg":
            continue
        if op == "mov.b32":                                          # {low half, high half}, t
            registers[names[0]], registers[names[1]] = value(names[2]) & 0xFFFF, value(names[2]) >> 16
            continue
        out, args = names[0], [value(name) for name in names[1:]]
        if op == "lop3.b32":
            assert args[3] == 0xEA, "of its 256 functions only (a & b) | c is used"
            registers[out] = (args[0] & args[1]) | args[2]
        elif op == "shf.l.wrap.b32":
            registers[out] = (args[1] << args[2] | args[0] >> (32 - args[2])) & 0xFFFFFFFF
        else:
            registers[out] = {"and.b32": lambda a, b: a & b, "shl.b32": lambda a, b: a << b,
                              "shr.u32": lambda a, b: a >> b, "mul.lo.u32": lambda a, b: a * b}[op](*args) & 0xFFFFFFFF
    return registers


def test_assembly_decodes_every_code_and_scale():
    codes = torch.cartesian_prod(*[torch.arange(16, dtype=torch.int32)] * 4)        # (65536, 4): one code a plane
    words = marlin_fp4._pack_words(codes.repeat_interleave(32, dim=1))[:, 0].long() & 0xFFFF
    assert torch.equal(words.sort().values, torch.arange(65536))     # every bit is used
    for other in (words.flip(0), words.roll(12345), torch.full_like(words, 0xFFFF), torch.zeros_like(words)):
        pairs = words | other << 16                                  # a register takes two neighboring words
        front, back = (run_assembly(marlin_fp4._decode_planes_asm(first), pairs) for first in (0, 2))
        of_other = marlin_fp4._unpack_words(other.to(torch.int16)[:, None])
        for plane, register in enumerate((front["$0"], front["$1"], back["$0"], back["$1"])):
            for half, want in ((register & 0xFFFF, codes[:, plane]), (register >> 16, of_other[:, plane])):
                assert torch.equal(number(half), GRID[want.long()].double() * 2.0**-126), plane
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # every nonnegative one
    scale = torch.stack([values.roll(7 * i) for i in range(8)], dim=1)               # (127, 8) in the order of k
    for half in range(2):
        word = marlin_fp4._pack_scales(scale)[:, half].long() & 0xFFFFFFFF
        found = run_assembly(marlin_fp4._decode_scales_asm(), word)
        for plane in range(4):
            got, want = number(found[f"${plane}"]), scale[:, 2 * plane + half].double() * 2.0**107
            assert torch.equal(got[want > 0], want[want > 0]), (half, plane)
            assert got[want == 0].isfinite().all()                   # 0 need not decode to 0: pack() clears its codes
