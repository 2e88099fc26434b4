"""
Writes nvfp4_reference.safetensors: small weights, quantized by other packages, for test_nvfp4.py.

    pip install torch compressed-tensors==0.20.0 bitsandbytes==0.50.2 && python tests/make_fixtures_nvfp4.py

The project and its tests need neither package. Each case has w (N, K) and its packed, scale and decoded tensors; NVFP4
cases also have `inverse`, the global scale as compressed-tensors stores it.
"""
from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file


def compressed_tensors_case(w, compressor, preset, block, inverse=None):
    scheme = QuantizationScheme(targets=["Linear"], **preset)
    blocks = w.unflatten(1, (-1, block))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=inverse)
    state = {"weight": w, "weight_scale": scale}
    if inverse is not None:
        state["weight_global_scale"] = inverse
    state = compressor.compress(state, scheme)
    decoded = compressor.decompress(state, scheme)["weight"]
    return dict(w=w, packed=state["weight_packed"], scale=state["weight_scale"], decoded=decoded.bfloat16())


def nvfp4_case(w, inverse):
    inverse = torch.tensor([inverse], dtype=torch.float32)
    return compressed_tensors_case(w, NVFP4PackedCompressor, NVFP4A16, 16, inverse) | {"inverse": inverse}


def nf4_case(w):
    packed, state = quantize_4bit(w, blocksize=64, quant_type="nf4")
    decoded = dequantize_4bit(packed, state)
    packed = packed.view(w.shape[0], -1)
    packed = packed >> 4 | packed << 4                              # bitsandbytes keeps even k in the HIGH nibble
    return dict(w=w, packed=packed, scale=state.absmax.view(w.shape[0], -1), decoded=decoded)


def corner_weights():
    """Ties, saturation, both zeros and blocks that underflow, with both signs, for global scale 1."""
    w = torch.zeros(8, 64)
    w[:4] = torch.arange(-128, 128).view(4, 64) / 16
    w[:4, ::16] = 6.0                                               # block scale 1 (first block of row 0: 8 / 6)
    w[4] = -0.0
    w[5, ::3] = -1e-7
    w[6] = torch.linspace(-5000, 5000, 64)                          # block scales beyond 448
    w[7, 16:32] = torch.linspace(-0.01, 0.01, 16)                   # a block scale among E4M3's subnormals
    return w


def every_bf16_maximum():
    """One block per bf16 in [1, 2). With the global scale below, 8 block scales depend on max / 6 being bf16."""
    w = torch.zeros(8, 256)
    w[:, ::16] = torch.arange(128, 256).view(8, 16) / 128
    return w.bfloat16()


if __name__ == "__main__":
    torch.manual_seed(0)
    w = torch.randn(8, 64) * torch.logspace(-3, 0, 8)[:, None]      # rows of very different magnitude
    cases = {
        "nvfp4_bf16": nvfp4_case(w.bfloat16(), 2.0**10),
        "nvfp4_fp32": nvfp4_case(w, 2.0**10),
        "nvfp4_corners_bf16": nvfp4_case(corner_weights().bfloat16(), 1.0),
        "nvfp4_corners_fp32": nvfp4_case(corner_weights(), 1.0),
        "nvfp4_amax": nvfp4_case(w.bfloat16(), 2688 / w.bfloat16().abs().max().item()),
        "nvfp4_maxima_bf16": nvfp4_case(every_bf16_maximum(), 2688 * 1024 / 2026),
        "mxfp4_bf16": compressed_tensors_case(w.bfloat16(), MXFP4PackedCompressor, MXFP4A16, 32),
        "nf4_bf16": nf4_case(w.bfloat16()),
    }
    tensors = {f"{case}.{part}": t.contiguous() for case, parts in cases.items() for part, t in parts.items()}
    save_file(tensors, Path(__file__).parent / "nvfp4_reference.safetensors")
