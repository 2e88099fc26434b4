"""
Qwen2.5, dense Qwen3, Llama 3.x and their like, up to 72B: a frozen transformer whose linears are
4-bit (or bf16) weights plus adapters.

    model = loading.load("qwen2.5-7b", base="nvfp4")     # or a local folder; base: nvfp4 or bf16
    logits = model(tokens)                       # (B, T) -> (B, T, V) fp32

A layer, with x the residual stream:
    x += o(attention(rope(qkv(norm(x)))))        q, k, v: one fused matrix
    x += down(silu(gate) * up)                   gate|up = gate_up(norm(x))
In Qwen2.5, q, k and v have biases. In Qwen3, each head of q and k is normed before the rotary
embedding. Llama, SmolLM2 and Mistral have neither.

Precision. GRPO divides the learner's probability of a token by the sampler's, so the two must agree
even though they sum in different orders. That's why the residual stream, sums and results of
linears are fp32. Matmul inputs are rounded to `dtype` (bf16 on a GPU, fp32 on a CPU): x * w after a
norm; q, k and v; attention's output; silu(gate) * up; an adapter's x @ A.T. A GPU's backward pass
rounds in a few more places (fast/backward.py).

Where RMSNorm divides. norm(x) = x * w / rms(x), and 1/rms(x) is one number per row, so it can
multiply the result of the next linear instead. A bias is added after that:

    textbook    norm: x * w / rms  ->  dtype  ->  @ W.T              ->  + bias  ->  y
    here        norm: x * w        ->  dtype  ->  @ W.T  -> * 1/rms  ->  + bias  ->  y
                      1/rms  -------------------------------^

This way, a decode step's matmul doesn't have to wait for the sum over the row. The learner does the
same because it must round where the sampler does: in the textbook form, every normed input would
differ from the sampler's by one rounding step. AQN's noise is added to w. 1/rms is called rstd, as
in other libraries: rms(x) = sqrt(mean(x^2) + eps), and no mean is subtracted.

Not here: the KV cache (scheduler.py); which models compute this (weights.COMPUTED, FAMILIES).

Shapes: B rows, T tokens, V vocabulary, D hidden size, H query heads, KV key-value heads, d head
size (not always D / H), F intermediate size.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import PackedAttention, lay_out
from lora import Linear
from ops import elementwise, mm_fp32, replaced_on_gpu
from weights import SCALING


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes, with the letters that docstrings use for them."""
    hidden: int                                  # D
    intermediate: int                            # F
    layers: int                                  # L
    heads: int                                   # H
    kv_heads: int                                # KV
    vocab: int                                   # V: rows of the embedding; Qwen pads the last ones
    tied: bool                                   # lm_head = embedding (up to 4B)
    head_dim: int | None = None                  # d; None: D / H
    qkv_bias: bool = True                        # q, k and v have biases: Qwen2.5
    qk_norm: bool = False                        # each head of q and k is normed: Qwen3
    rope_theta: float = 1e6
    eps: float = 1e-6
    rope_scaling: dict | None = None             # Llama 3's: see rope_frequencies

    def __post_init__(self):
        if self.head_dim is None:                # setattr, because the dataclass is frozen
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @classmethod
    def from_json(cls, raw: dict) -> "ModelConfig":
        """raw: the content of config.json, as weights.read_config returns it."""
        family, = raw["architectures"]
        return cls(raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"],
                   raw["num_attention_heads"], raw["num_key_value_heads"], raw["vocab_size"],
                   raw.get("tie_word_embeddings", False), raw.get("head_dim"),
                   family == "Qwen2ForCausalLM", family == "Qwen3ForCausalLM",
                   raw["rope_theta"], raw["rms_norm_eps"], raw["rope_scaling"])


# -----------------------------------------------------------------------------
# The elementwise work between matmuls, as plain functions (see ops.elementwise)

def scaled_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The two factors of a normalized x (T, D) fp32: x * weight (T, D) in dtype, and 1/rms (T, 1)
    in fp32. weight (D,) fp32.
    """
    return (x * weight).to(dtype), torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def split_qkv(y: Tensor, rstd: Tensor, bias: Tensor | None, gains: Tensor | None, eps: float,
              cos: Tensor, sin: Tensor, kv_heads: int,
              dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Turns the result of the qkv linear into attention's inputs: multiplies by 1/rms, adds the
    bias, norms the heads of q and k, applies the rotary embedding, and rounds to dtype.

    y (T, N) with N = (H + 2 KV) * d, rstd = 1/rms (T, 1), bias (N,), gains (2, d): the weights of
    the norms of q and k; cos and sin (T, 1, d/2) from rope_table; all fp32. bias and gains are None
    in models without them. -> q (T, H, d), k and v (T, KV, d) in dtype.
    """
    y = y * rstd
    if bias is not None:
        y = y + bias
    y = y.unflatten(1, (-1, 2 * cos.shape[-1]))
    q, k, v = y.split([y.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if gains is not None:
        q, k = head_norm(q, gains[0], eps), head_norm(k, gains[1], eps)
    return rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype), v.to(dtype)


def head_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head: x (T, heads, d), gain (d,) -> (T, heads, d), all fp32.

    No linear follows directly, so 1/rms is applied here, and AQN adds no noise to the gain.
    """
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotates each pair of numbers (i, i + d/2) of x (T, heads, d) by its angle.

    cos and sin (T, 1, d/2): of the d/2 angles of each token, the same for all heads. Files in
    Hugging Face's layout pair i with i + d/2; others pair neighbors.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_table(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's d/2 angles: positions (T,) -> (T, 1, d/2) fp32 each.

    In fp32, because bf16 can't tell position 4001 from 4002.
    """
    angle = positions.float()[:, None] * rope_frequencies(config, positions.device)
    return angle.cos()[:, None], angle.sin()[:, None]


def rope_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """By how much each of the d/2 angles grows from one position to the next: (d/2,) fp32.

    Llama 3 scales these frequencies for long contexts: an angle that makes at most low_freq_factor
    turns in the original context grows `factor` times slower, one that makes at least
    high_freq_factor turns is kept, and between the two the frequency is interpolated.
    """
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    if config.rope_scaling is None:
        return frequency
    factor, low, high, length = (config.rope_scaling[key] for key in SCALING)
    turns = length * frequency / (2 * torch.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


# -----------------------------------------------------------------------------
# The MLP and the log-probs

@replaced_on_gpu
def mlp(gate_up: Linear, down: Linear, x: Tensor, rstd: Tensor) -> Tensor:
    """The MLP of a layer: down(silu(gate) * up), where gate|up = gate_up(x) * rstd.

    x (T, D) in the model's dtype, rstd (T, 1) -> (T, D) fp32.
    """
    gate, up = (gate_up(x) * rstd).chunk(2, dim=-1)
    return down((F.silu(gate) * up).to(x.dtype))


LOGITS = 2**24                                   # in memory at a time: 64 MB in fp32


@replaced_on_gpu
def token_logprobs(x: Tensor, scale: Tensor, head: Tensor, targets: Tensor,
                   live: int) -> tuple[Tensor, Tensor]:
    """log softmax(logits) at each target, differentiable, and the softmax's entropy, which isn't:
    (T,) fp32 each, in nats. logits = x @ head[:live].T * scale.

    x (T, D) and head (V, D) in the model's dtype, scale (T, 1) = 1/(rms * temperature) fp32,
    targets (T,) int64. live: how many rows of `head` are tokens; the rest is padding.
    """
    def some(x, scale, targets):
        logits = mm_fp32(x, head[:live].T) * scale
        lse = logits.logsumexp(-1)               # as in the sampler; log_softmax rounds differently
        with torch.no_grad():
            entropy = lse - (logits.softmax(-1) * logits).sum(-1)
        return logits.gather(1, targets[:, None])[:, 0] - lse, entropy

    rows = max(1, LOGITS // live)
    chunks = [*zip(*(t.split(rows) for t in (x, scale, targets)))]
    if len(chunks) == 1:
        return some(*chunks[0])
    # checkpoint() drops a chunk's logits and computes them again in the backward pass.
    results = [checkpoint(some, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*results)
    return torch.cat(logprobs), torch.cat(entropies)


# -----------------------------------------------------------------------------
# The network

class RMSNorm(torch.nn.Module):
    """A norm as two factors (see the top of this file), with AQN's noise added to its weight.

    noise (D,) is zero except within aqn.noisy_norms.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        self.register_buffer("noise", torch.zeros_like(self.weight))
        self.eps = eps
        self.dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, D) fp32 -> x * (weight + noise) (T, D) in dtype, 1/rms (T, 1) fp32."""
        return elementwise(scaled_norm, x, self.weight + self.noise, self.eps, self.dtype)


class Layer(torch.nn.Module):
    """Layer i: attention and MLP, each after a norm, each added to the residual stream.

    get(name, *shape) returns a tensor. frozen(names, parts, K) returns the nvfp4.Weight of a fused
    linear whose part names[j] has parts[j] rows. Both may read a checkpoint or, in tests and
    benchmarks, make up numbers.
    """

    def __init__(self, config: ModelConfig, i: int, get: Callable, frozen: Callable,
                 dtype: torch.dtype):
        super().__init__()
        c = config
        prefix = f"model.layers.{i}"
        self.config = config
        q_width = c.heads * c.head_dim
        kv_width = c.kv_heads * c.head_dim
        widths = q_width, kv_width, kv_width                     # of q, k, v
        self.qkv_bias = self.qk_gains = None
        if c.qkv_bias:                                           # (N,), added after 1/rms
            bias = [get(f"{prefix}.self_attn.{s}_proj.bias", n) for s, n in zip("qkv", widths)]
            self.qkv_bias = torch.cat(bias).float()
        if c.qk_norm:                                            # (2, d), see split_qkv
            gains = [get(f"{prefix}.self_attn.{s}_norm.weight", c.head_dim) for s in "qk"]
            self.qk_gains = torch.stack(gains).float()

        def norm(name):
            return RMSNorm(get(f"{prefix}.{name}.weight", c.hidden), c.eps, dtype)

        def linear(names, parts, k):
            names = [f"{prefix}.{name}_proj" for name in names]
            return Linear(frozen(names, parts, k), names, parts)

        self.input_norm = norm("input_layernorm")
        self.qkv = linear([f"self_attn.{s}" for s in "qkv"], widths, c.hidden)
        self.o = linear(["self_attn.o"], (c.hidden,), q_width)
        self.post_norm = norm("post_attention_layernorm")
        self.gate_up = linear(["mlp.gate", "mlp.up"], (c.intermediate,) * 2, c.hidden)
        self.down = linear(["mlp.down"], (c.hidden,), c.intermediate)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable) -> Tensor:
        """The residual stream after the layer: x (T, D) -> (T, D), fp32.

        cos, sin (T, 1, d/2) fp32: see rope_table.
        attend(q (T, H, d), k (T, KV, d), v (T, KV, d)) -> (T, H, d), all in the model's dtype,
        decides which token sees which: attention.PackedAttention for the learner, the KV cache for
        the sampler.
        """
        # A trap: on a GPU, decode steps don't run this code. GraphEngine.step in fast/decode.py
        # launches kernels for the same layer, so change both.
        xw, rstd = self.input_norm(x)
        c = self.config
        q, k, v = elementwise(split_qkv, self.qkv(xw), rstd, self.qkv_bias, self.qk_gains, c.eps,
                              cos, sin, c.kv_heads, self.input_norm.dtype)
        x = x + self.o(attend(q, k, v).flatten(1))
        xw, rstd = self.post_norm(x)
        return x + mlp(self.gate_up, self.down, xw, rstd)


class Transformer(torch.nn.Module):
    """The model. get and frozen read its tensors (see Layer); load() reads a folder.

    live_vocab: how many ids the tokenizer has. Rows of the head beyond it are padding, which
    log-probs ignore. adapter: None until lora.attach(). name: the folder or hub id, which exported
    adapters give as their base model.

    A model stays on the device and in the dtype it was loaded with. Don't call .to(), .half() or
    .cuda(): they would move only the norms. The embedding, the head, the biases of q, k and v and
    the frozen weights are plain attributes, not parameters or buffers, and would stay behind.
    """

    def __init__(self, config: ModelConfig, get: Callable, frozen: Callable, dtype: torch.dtype,
                 name: str):
        super().__init__()
        c = config
        self.config = c
        self.dtype = dtype
        self.name = name
        self.live_vocab = c.vocab
        self.adapter = None
        self.folder = self.digest = None         # load() sets them; digest: of all tensors
        self.layers = torch.nn.ModuleList(
            Layer(c, i, get, frozen, dtype) for i in range(c.layers))
        self.embed = get("model.embed_tokens.weight", c.vocab, c.hidden).bfloat16().to(dtype)
        self.device = self.embed.device
        self.lm_head = self.embed                                # (V, D) both
        if not c.tied:
            self.lm_head = get("lm_head.weight", c.vocab, c.hidden).bfloat16().to(dtype)
        self.final_norm = RMSNorm(get("model.norm.weight", c.hidden), c.eps, dtype)

    def hidden(self, tokens: Tensor, attends: Sequence[Callable], positions: Tensor,
               kept_layers: int | None = None) -> tuple[Tensor, Tensor]:
        """Runs all layers and the final norm: packed tokens (T,) -> x * w (T, D), 1/rms (T, 1).

        attends: one per layer, see Layer.forward. kept_layers: how many layers, counted from the
        last, keep their activations for the backward pass; the others keep only their input and are
        recomputed. None: all of them. Without gradients nothing is kept.
        """
        layers = len(self.layers)
        kept_layers = layers if kept_layers is None else kept_layers
        assert 0 <= kept_layers <= layers, f"kept_layers {kept_layers}, of {layers} layers"
        x = self.embedded(tokens)
        if self.adapter:                         # a GPU's linears need it (fast/backward.py)
            x.requires_grad_()
        cos, sin = rope_table(positions, self.config)
        first_kept = layers - kept_layers if torch.is_grad_enabled() else 0
        for i, (layer, attend) in enumerate(zip(self.layers, attends)):
            if i < first_kept:
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.final_norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> logits (B, T, V) fp32. For checks: training never builds this tensor.

        The last V - live_vocab columns aren't tokens: drop them, logits[..., :live_vocab], before
        a softmax or an argmax.
        """
        B, T = tokens.shape
        attend = PackedAttention([T] * B, tokens.device)
        attends = [attend] * len(self.layers)
        xw, rstd = self.hidden(tokens.reshape(-1), attends, attend.positions)
        return (mm_fp32(xw, self.lm_head.T) * rstd).view(B, T, -1)

    def token_logprobs(self, rows: list[list[int]], starts: list[int], temperature: float = 1.0,
                       kept_layers: int | None = None) -> tuple[Tensor, Tensor]:
        """The log-prob of each completion token (differentiable) and the entropy of its softmax
        (not), in nats.

        rows: lists of ids, each a prompt and its completion; starts[i]: where row i's completion
        begins. -> (C,) fp32 each, for the C completion tokens of all rows in order. Neighbors with
        the same prompt compute it once.
        temperature > 0 divides the logits (the sampler's 0 is greedy, with log-probs at temperature
        1). kept_layers: see hidden().
        """
        assert temperature > 0, f"temperature must be above 0, got {temperature}"
        assert all(0 < s < len(r) for r, s in zip(rows, starts)), \
            "every row needs a prompt token and a scored token"
        layout = lay_out(rows, starts)
        attend = PackedAttention(layout.prefixes, self.device, layout.suffixes)
        attends = [attend] * len(self.layers)
        tokens = torch.tensor(layout.tokens, device=self.device)
        xw, rstd = self.hidden(tokens, attends, attend.positions, kept_layers)
        at = torch.tensor(layout.predictors, device=self.device)
        completions = [t for row, start in zip(rows, starts) for t in row[start:]]
        targets = torch.tensor(completions, device=self.device)
        return self.head_logprobs(xw[at], rstd[at] / temperature, targets)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The residual stream before the first layer: tokens (T,) -> (T, D) fp32."""
        return self.embed[tokens].float()

    def head_logprobs(self, x: Tensor, scale: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """token_logprobs() with this model's head."""
        return token_logprobs(x, scale, self.lm_head, targets, self.live_vocab)
