"""
From a model folder to a Transformer, and from a Transformer to its tensors by name.

    model = load("qwen2.5-7b", base="nvfp4")     # or a local folder; base: nvfp4 or bf16
    for name, tensor in model_tensors(model):    # to merge and save; full.py trains parts_of(model)

Not here: the files themselves (weights.py).
"""
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from files import UserError
from model import ModelConfig, Transformer
from weights import ModelFolder, WeightReader


def load(folder: str | Path | ModelFolder, base: str = "nvfp4",
         device: torch.device | str | None = None, dtype: torch.dtype | None = None,
         live_vocab: int | None = None) -> Transformer:
    """Load a checkpoint in 16 bits or NVFP4, with its linears in format `base`.

    Matrices are quantized one by one as they are read, so peak memory is the result plus one fused
    matrix. folder: may also be a name on the hub, to be downloaded. device: such as "cpu" or
    "cuda:1"; None: the current GPU, or the CPU if torch sees no GPU. dtype: of matmul inputs; None:
    bf16 on a GPU, fp32 on a CPU. live_vocab: see Transformer; None: all V ids are tokens. UserError
    names the bad file or tensor.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if not isinstance(folder, ModelFolder):
        folder = ModelFolder(folder)
    folder.download()
    files = WeightReader(folder, base, device, dtype)
    config = ModelConfig.from_json(files.config)
    if (live_vocab or 0) > config.vocab:
        raise UserError(f"{files.folder}: tokenizer.json has ids up to {live_vocab - 1}, but the "
                        f"embedding has {config.vocab} rows (vocab_size in config.json)")
    model = Transformer(config, files.read, files.frozen, dtype, folder.name)
    model.folder, model.digest = folder, files.digest()
    files.refuse_unread()
    model.live_vocab = live_vocab or config.vocab
    return model


# -----------------------------------------------------------------------------
# All tensors, by name

class Part(NamedTuple):
    """One tensor of the model, which may fuse several of Hugging Face's."""
    owner: torch.nn.Module                       # the tensor is getattr(owner, attribute)
    attribute: str
    names: list[str]                             # Hugging Face's
    rows: tuple[int, ...]                        # of each of these
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        return self.attribute != "qk_gains" and len(self.shape) == 2

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor of this shape -> (Hugging Face's name, tensor) for each one fused in it."""
        for name, piece in zip(self.names, tensor.split(self.rows)):
            yield name, piece if self.is_matrix else piece.flatten()


def parts_of(model: Transformer) -> Iterator[Part]:
    """All weights of a model: first the matrices, then norms and biases."""
    c = model.config
    yield Part(model, "embed", ["model.embed_tokens.weight"], (c.vocab,), (c.vocab, c.hidden))
    if not c.tied:
        yield Part(model, "lm_head", ["lm_head.weight"], (c.vocab,), (c.vocab, c.hidden))
    for layer in model.layers:
        for attribute in ("qkv", "o", "gate_up", "down"):
            linear = getattr(layer, attribute)
            names = [f"{name}.weight" for name in linear.names]
            yield Part(layer, attribute, names, linear.parts, (linear.weight.N, linear.weight.K))
    yield Part(model.final_norm, "weight", ["model.norm.weight"], (c.hidden,), (c.hidden,))
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}"
        for norm, name in ((layer.input_norm, "input"), (layer.post_norm, "post_attention")):
            yield Part(norm, "weight", [f"{prefix}.{name}_layernorm.weight"], (c.hidden,),
                       (c.hidden,))
        if layer.qkv_bias is not None:
            names = [f"{prefix}.self_attn.{s}_proj.bias" for s in "qkv"]
            yield Part(layer, "qkv_bias", names, layer.qkv.parts, (sum(layer.qkv.parts),))
        if layer.qk_gains is not None:
            names = [f"{prefix}.self_attn.{s}_norm.weight" for s in "qk"]
            yield Part(layer, "qk_gains", names, (1, 1), (2, c.head_dim))


def model_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, tensor) of a model, with its adapter merged in fp32."""
    for part in parts_of(model):
        held = getattr(part.owner, part.attribute)
        yield from part.split(held if isinstance(held, Tensor) else held.merged())
