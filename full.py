"""
Full fine-tuning: train every weight instead of an adapter. It's the paper's baseline, not part of
QeRL.

    weights = attach(model)                      # a model loaded with base="bf16"
    learner = Learner(model, loss)               # as with an adapter
    save(model, weights.master.cpu(), folder)    # a model folder

Weights has the interface of lora.Adapter, so learner, sampler and checkpoints accept either. AdamW
updates `master` in fp32. The model computes with matrices rounded to bf16, which sync() writes to
where the sampler's CUDA graphs read them; norms and biases are small and stay fp32. A CPU computes
in fp32 with the same bf16 numbers. A saved folder is therefore the model that sampled, bit for bit.

Norms and biases get their gradients from autograd as they are, matrices through rounded(). (On a
GPU, fast/backward.py adds the matrices' in place.)

Memory: 18 bytes per parameter (master, gradient and two moments in fp32, the bf16 copy).

Not here: 4-bit weights, whose grid is coarser than any update; a KL term, which needs a second
copy of the model; sharding (each GPU has a full copy).

Shapes: T tokens, D hidden size, V vocabulary; M rows, N out_features and K in_features of a linear.
"""
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

import lora
from loading import parts_of
from model import Transformer, token_logprobs
from nvfp4 import Weight
from ops import replaced_on_gpu, rounded
from weights import save_model

# -----------------------------------------------------------------------------
# The weights

class Weights:
    """All trained parameters in one flat fp32 vector; attach() makes one for a model.

    master and master.grad    all parts, one after the other
    working                   the matrices, as the model computes with them

    Call sync() after changing master.
    """
    rank = 0                                     # no A and B for the sampler's kernels to apply
    enabled = True

    def __init__(self, model: Transformer):
        self.parts = list(parts_of(model))
        self.offsets = [0]
        for part in self.parts:                  # aligned as in lora.Adapter
            self.offsets.append(self.offsets[-1] + -(-math.prod(part.shape) // 128) * 128)
        matrices = sum(part.is_matrix for part in self.parts)
        self.master = Parameter(torch.zeros(self.offsets[-1], device=model.device))
        self.master.grad = torch.zeros_like(self.master)
        self.working = torch.zeros(self.offsets[matrices], dtype=model.dtype, device=model.device)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """A vector with the layout of master or working -> a view of each part."""
        return [flat[at:at + math.prod(part.shape)].view(part.shape)
                for at, part in zip(self.offsets, self.parts) if at < len(flat)]

    @torch.no_grad()
    def sync(self, master: Tensor | None = None) -> None:
        """Round master's matrices into the working copies, in place and one at a time, because
        rounding takes temporary memory. Unlike an adapter's, it takes no other master.
        """
        assert master is None, "norms and biases have no copies: change master itself"
        for copy, exact in zip(self.unflatten(self.working), self.unflatten(self.master)):
            copy.copy_(exact.bfloat16())

    def tensors(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A vector laid out like master -> (Hugging Face's name, tensor) of all parts: matrices in
        bf16, as the model computes with them, norms and biases in fp32.
        """
        for part, view in zip(self.parts, self.unflatten(flat)):
            for name, piece in part.split(view):
                yield name, piece.bfloat16() if part.is_matrix else piece


def attach(model: Transformer) -> Weights:
    """Make all weights of a model trainable, as model.adapter. Existing Samplers and Learners don't
    use them, so make new ones.

    model: loaded with base bf16, without an adapter.
    """
    weights = Weights(model)
    leaves = [Parameter(view) for view in weights.unflatten(weights.master.data)]
    gradients = weights.unflatten(weights.master.grad)
    copies = weights.unflatten(weights.working)
    for i, (part, leaf) in enumerate(zip(weights.parts, leaves)):
        leaf.grad = gradients[i]
        held = getattr(part.owner, part.attribute)
        if isinstance(held, lora.Linear):
            leaf.data.copy_(held.weight.dequantize())
            setattr(part.owner, part.attribute, Linear(held.names, held.parts, leaf, copies[i]))
        else:
            leaf.data.copy_(held)
            setattr(part.owner, part.attribute, copies[i] if part.is_matrix else leaf)
    embedding, head = leaves[0], leaves[1]
    if model.config.tied:
        model.lm_head, head = model.embed, embedding
    model.embedded = lambda tokens: look_up(embedding, tokens, model.embed)
    model.head_logprobs = lambda x, scale, targets: head_logprobs(
        x, scale, head, model.lm_head, targets, model.live_vocab)
    model.adapter = weights
    weights.sync()
    return weights


def save(model: Transformer, master: Tensor, folder: Path) -> None:
    """Write a model folder, replacing an existing one. master: laid out like Weights.master, on the
    CPU. OSError if the disk is full, which leaves the old folder as it was.
    """
    for left in folder.parent.glob(f".{folder.name}.*"):         # left behind by a kill
        shutil.rmtree(left)
    new = folder.with_name(f".{folder.name}.new")
    save_model(model.adapter.tensors(master), model.folder.path, new,
               {"trained_from": model.folder.name})
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# -----------------------------------------------------------------------------
# The model's parts with a trained W

class Linear(lora.Linear):
    """A linear whose W is trained. leaf: W in fp32, a view of Weights.master, whose .grad gets dW;
    copy: W in the model's dtype.
    """

    def __init__(self, names: list[str], parts: tuple[int, ...], leaf: Parameter, copy: Tensor):
        super().__init__(Weight((copy,), copy.shape, copy.dtype), names, parts)
        self.leaf = leaf

    def matrix(self) -> Tensor:
        return rounded(self.leaf, self.weight.dequantize())


@replaced_on_gpu
def look_up(leaf: Tensor, tokens: Tensor, copy: Tensor) -> Tensor:
    """The rows of the embedding: tokens (T,) -> (T, D) fp32."""
    return rounded(leaf, copy)[tokens].float()


@replaced_on_gpu
def head_logprobs(x: Tensor, scale: Tensor, leaf: Tensor, copy: Tensor, targets: Tensor,
                  live: int) -> tuple[Tensor, Tensor]:
    """model.token_logprobs with a trained head."""
    return token_logprobs(x, scale, rounded(leaf, copy), targets, live)
