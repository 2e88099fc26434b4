"""
Writes nvfp4_reference.safetensors: small weights, quantized by compressed-tensors, for test_nvfp4.py.

    pip install torch compressed-tensors==0.20.0 && python tests/make_fixtures_nvfp4.py

The project and its tests do not need that package. Each case has w (N, K), its packed, scale and decoded tensors, and
`inverse`, the global scale as compressed-tensors stores it.
"""
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file


def case(w, inverse):
    inverse = torch.tensor([inverse], dtype=torch.float32)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    blocks = w.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=inverse)
    state = {"weight": w, "weight_scale": scale, "weight_global_scale": inverse}
    state = NVFP4PackedCompressor.compress(state, scheme)
    decoded = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
    return dict(w=w, inverse=inverse, packed=state["weight_packed"], scale=state["weight_scale"],
                decoded=decoded.bfloat16())


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
        "bf16": case(w.bfloat16(), 2.0**10),
        "fp32": case(w, 2.0**10),
        "corners_bf16": case(corner_weights().bfloat16(), 1.0),
        "corners_fp32": case(corner_weights(), 1.0),
        "amax": case(w.bfloat16(), 2688 / w.bfloat16().abs().max().item()),
        "maxima_bf16": case(every_bf16_maximum(), 2688 * 1024 / 2026),
    }
    tensors = {f"{name}.{part}": t.contiguous() for name, parts in cases.items() for part, t in parts.items()}
    save_file(tensors, Path(__file__).parent / "nvfp4_reference.safetensors")
