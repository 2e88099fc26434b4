"""
hopper_fp4: the compiled hopper_kernel, which takes no GPU to check, and its tuned configs on one.

test_marlin_fp4.py tests its products along with the portable kernel's, and test_decode.py complete steps.

python -m pytest tests/test_hopper_fp4.py -v
"""
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from test_decode import instructions_of
from test_marlin_fp4 import cublas, hopper, total
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from fast.hopper_fp4 import FLAT, HOPPER_CONFIGS, ROWS_64B, ROWS_256B, SUMS, hopper_kernel, hopper_matmul
from marlin_fp4 import pack


@hopper
@pytest.mark.parametrize("M,N,K", [(8, 4608, 3584), (16, 3584, 3584), (32, 37888, 3584), (64, 3584, 18944)])
def test_linears_of_a_7b_match_cublas(M, N, K):
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, device="cuda")
    weight = pack(codes, torch.rand(N, K // 16, device="cuda").to(torch.float8_e4m3fn), torch.tensor(2.0**-12))
    # With pdl the kernel may read W and a, but not x, before the preceding kernel ends. So x is made last.
    a, x = torch.randn(64, K, device="cuda").bfloat16(), torch.randn(M - 1, K, device="cuda").bfloat16()
    y, xa = total(hopper_matmul(x, weight, a, pdl=True), N, 64)
    for got, w in ((y, weight.dequantize()), (xa, a)):               # fp32 sums: 2 sqrt(K) 2^-24 is 2e-5
        want = cublas(x, w)
        assert (got - want).norm() < 2e-5 * want.norm()


# -----------------------------------------------------------------------------
# What the compiler makes of hopper_kernel

def compiled_for_hopper(config):
    """Compiles hopper_kernel with an adapter and PDL -> ptxas's remarks, instructions [(address, text)]."""
    wide, narrow, flat = ROWS_256B.value, ROWS_64B.value, FLAT.value
    types = {"x_desc": f"tensordesc<bf16[{config.BM}, 128],{wide!r}>", "slabs_ptr": "*fp32",
             "codes_desc": f"tensordesc<i16[128, 32],{narrow!r}>", "scales_desc": f"tensordesc<i32[1, 256],{flat!r}>",
             "a_desc": f"tensordesc<bf16[64, 64],{wide!r}>",
             "slabs_desc": f"tensordesc<fp32[1, {config.out_rows}, 128],{SUMS.value!r}>"}
    constants = {"config": config, "PDL": True}
    names = hopper_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("slabs_ptr", "N")}
    source = GluonASTSource(hopper_kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                            options={"num_warps": 4, "maxnreg": config.maxnreg, "launch_pdl": True,
                                     "ptx_version": 86})       # whichever ptxas is found can read it
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(kernel.asm["ptx"])
        # Triton's own ptxas: another may be too old for this version of PTX.
        done = subprocess.run([knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", ptx, "-o", cubin], capture_output=True,
                              text=True)
        remarks = done.stdout + done.stderr
        assert done.returncode == 0, remarks
        return remarks, instructions_of(cubin.read_bytes())


def written_while_read(instructions):
    """The instructions that write a register from which an unfinished wgmma group may still read its A operand."""
    at = {address: i for i, (address, _) in enumerate(instructions)}
    found, todo, seen = [], [(0, ())], set()
    while todo:
        i, groups = todo.pop()
        reading = set()
        while i < len(instructions) and (i, groups) not in seen:
            seen.add((i, groups))
            address, text = instructions[i]
            if a := re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text):
                reading |= set(range(int(a[1]), int(a[1]) + 4))
                if "gsb0" in text:                                   # ends the group
                    groups, reading = groups + (frozenset(reading),), set()
            elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text):
                groups = groups[len(groups) - min(int(wait[1]), len(groups)):]
            elif (to := re.match(r"(\S+) R(\d+),", text)) and not to[1].startswith(("ST", "HGMMA")):
                count = 4 if to[1].endswith((".4", ".128")) else 2 if ".64" in to[1] or "WIDE" in to[1] else 1
                if set(range(int(to[2]), int(to[2]) + count)) & reading.union(*groups):
                    found.append((hex(address), text))
            elif jump := re.match(r"BRA\S* (?:.*, )?`?\(?0x([0-9a-f]+)", text):
                todo.append((at.get(int(jump[1], 16), len(instructions)), groups))
            i += 1
    return found


@pytest.mark.parametrize("config", HOPPER_CONFIGS.values())              # 2 s each
def test_compiled_kernel_leaves_operands_in_flight_alone(config):
    remarks, instructions = compiled_for_hopper(config)
    assert "C75" not in remarks, remarks                             # ptxas: wgmma serialized
    products = [i for i, (_, text) in enumerate(instructions) if re.match(r"HGMMA\S* R\d+, R\d+, gdesc", text)]
    loop = [text for _, text in instructions[products[0]:products[-1]]]
    assert not any(text.startswith(("STL", "LDL")) for text in loop)                     # registers spilled
    assert sum(text.startswith("HGMMA") for _, text in instructions) == 24        # 4 planes x 2 x 2, and A's 8
    assert written_while_read(instructions) == []
    if config.BM <= 64:                                              # how a sum leaves: store, fence, barrier, copy
        steps = {"STS": "s", "FENCE": "f", "BAR": "b", "UTMASTG": "c", "DEPBAR": "w"}    # w waits for the last copy
        order = "".join(steps.get(text.split(".")[0].split(" ")[0], "") for _, text in instructions)
        assert re.search("w+b+s+f+b+c+w", order) and "sc" not in order and "ws" not in order, order
    # One thread frees a slot, only after a barrier of all four warps, which comes only after the last read of the slot.
    # There are three: a tile of W and two halves of A.
    steps = {"LDS": "r", "LDSM": "r", "HGMMA": "r", "BAR": "b", "SYNCS.ARRIVE.TRANS64.A1T0": "a"}
    names = ["w" if text == "WARPGROUP.DEPBAR.LE gsb0, 0x0" else
             steps.get(text.split()[0], steps.get(text.split(".")[0].split()[0], "")) for _, text in instructions]
    assert re.findall("(..)a", "".join(names)) == ["wb"] * 3
    never = [(address, re.sub(r"gsb0, 0x\d$", "gsb0, 0x7", text)) for address, text in instructions]
    assert written_while_read(never)                                 # without the waits it would be a race
