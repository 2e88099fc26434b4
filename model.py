"""
Qwen2.5, 0.5B to 72B: a frozen transformer whose linears are 4-bit (or bf16) weights plus adapters.

    model = load("qwen2.5-7b", base="nvfp4")     # or a local folder; base: see nvfp4.FORMATS
    logits = model(tokens)                       # (B, T) -> (B, T, V) fp32

A layer, with x the residual stream:
    x += o(attention(rope(qkv(norm(x)))))        q, k, v: one fused matrix with biases
    x += down(silu(gate) * up)                   gate|up = gate_up(norm(x))

Precision. The residual stream and every matmul's sum and result are fp32; inputs of matmuls are
rounded to `dtype` (bf16 on a GPU). That keeps the sampler's log-probs close to the learner's: 0.1
instead of 1.3 % of tokens leave the ratio band [0.9, 1.1]. fp16 rounds 8 times finer, but ends at
65,504: the learner's loss needs a scale (learner.py), and x * w below, not normalized and up to
24,000 on the 1.5B, is made of x / 16, which is exact.

Where RMSNorm's division goes. norm(x) = x * w / rms(x), and 1/rms(x) is one number a row, so it
commutes with the linear that follows: RMSNorm returns (x * w rounded to dtype) and 1/rms apart,
and the layer multiplies the linear's *result*. Then no kernel has to see a whole row before the
matmul starts, and sampler and learner round the same numbers at the same place (but for attention
to a shared prompt: attention.py). AQN's noise is added to w.

Not here: the KV cache (sampler.py), sliding windows and YaRN (off in these checkpoints).

Shapes: B rows, T tokens, V vocabulary, D width, H query heads, KV key-value heads, d head size,
F feed-forward.
"""
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from attention import PackedAttention, lay_out
from harness import hf
from lora import Linear, Scratch
from ops import elementwise, mlp, mm_fp32, token_logprobs

FP16_SHIFT = 2.0**-4                             # of the residual in front of a norm


@dataclass(frozen=True)
class ModelConfig:
    width: int                                   # D
    feed_forward: int                            # F
    layers: int                                  # L
    heads: int                                   # H
    kv_heads: int                                # KV
    vocab: int                                   # V: rows of the embedding, more than live ids
    tied: bool                                   # lm_head = embedding (up to 3B)
    rope_theta: float = 1e6
    eps: float = 1e-6

    @property
    def head_dim(self):
        return self.width // self.heads

    @classmethod
    def from_json(cls, raw):
        """raw: config.json, as hf.read_qwen2 returns it."""
        return cls(raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"],
                   raw["num_attention_heads"], raw["num_key_value_heads"], raw["vocab_size"],
                   raw.get("tie_word_embeddings", False), raw["rope_theta"], raw["rms_norm_eps"])


# -----------------------------------------------------------------------------
# The elementwise work between matmuls, as plain functions (see ops.elementwise)

def scaled_norm(x, weight, eps, dtype):
    """x (T, D) fp32 -> x * weight in dtype, and 1/rms (T, 1) fp32."""
    if dtype == torch.float16:
        x = x * FP16_SHIFT
    return (x * weight).to(dtype), torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def split_qkv(y, rstd, bias, cos, sin, kv_heads, dtype):
    """qkv's result y (T, N), 1/rms (T, 1), bias (N,) fp32 -> q (T, H, d), k, v (T, KV, d)."""
    y = (y * rstd + bias).unflatten(1, (-1, 2 * cos.shape[-1]))
    q, k, v = y.split([y.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype), v.to(dtype)


def rotate(x, cos, sin):
    """Rotary embedding of x (T, heads, d), pairing element i with i + d/2 as Qwen2 does."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_table(positions, config):
    """positions (T,) -> cos, sin (T, 1, d/2) fp32: bf16 cannot tell position 4001 from 4002."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    angle = positions.float()[:, None] * frequency[None, :]
    return angle.cos()[:, None], angle.sin()[:, None]


# -----------------------------------------------------------------------------
# The network

class RMSNorm(torch.nn.Module):
    """scaled_norm with weight + noise."""

    def __init__(self, weight, eps, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        self.register_buffer("noise", torch.zeros_like(self.weight))
        self.eps = eps * FP16_SHIFT**2 if dtype == torch.float16 else eps
        self.dtype = dtype

    def forward(self, x):
        return elementwise(scaled_norm, x, self.weight + self.noise, self.eps, self.dtype)


class Layer(torch.nn.Module):
    """Layer i. get(name, *shape) -> tensor and frozen(names, parts, K) -> nvfp4.Weight read it.

    parts: rows of the matrices that a fused linear is made of; scratch: shared by all layers.
    """

    def __init__(self, config, i, get, frozen, dtype, scratch):
        super().__init__()
        c = config
        prefix = f"model.layers.{i}"
        self.config = config
        kv_width = c.kv_heads * c.head_dim
        widths = c.width, kv_width, kv_width                     # of q, k, v
        bias = [get(f"{prefix}.self_attn.{s}_proj.bias", n) for s, n in zip("qkv", widths)]

        def norm(name):
            return RMSNorm(get(f"{prefix}.{name}.weight", c.width), c.eps, dtype)

        def linear(names, parts, k):
            names = [f"{prefix}.{name}_proj" for name in names]
            return Linear(frozen(names, parts, k), names, parts, scratch)

        self.input_norm = norm("input_layernorm")
        self.qkv = linear([f"self_attn.{s}" for s in "qkv"], widths, c.width)
        self.qkv_bias = torch.cat(bias).float()                  # (N,), added after 1/rms
        self.o = linear(["self_attn.o"], (c.width,), c.width)
        self.post_norm = norm("post_attention_layernorm")
        self.gate_up = linear(["mlp.gate", "mlp.up"], (c.feed_forward,) * 2, c.width)
        self.down = linear(["mlp.down"], (c.width,), c.feed_forward)

    def forward(self, x, cos, sin, attend):
        """x (T, D) fp32 -> the same; attend(q (T, H, d), k (T, KV, d), v) -> (T, H, d)."""
        xw, rstd = self.input_norm(x)
        q, k, v = elementwise(split_qkv, self.qkv(xw), rstd, self.qkv_bias, cos, sin,
                              self.config.kv_heads, self.input_norm.dtype)
        x = x + self.o(attend(q, k, v).flatten(1))
        xw, rstd = self.post_norm(x)
        return x + mlp(self.gate_up, self.down, xw, rstd)


class Qwen2(torch.nn.Module):
    """get and frozen: as Layer takes them.

    live_vocab: ids that the tokenizer has; no log-prob sees rows of the head beyond them.
    """

    def __init__(self, config, get, frozen, dtype, name):
        super().__init__()
        c = config
        self.config = c
        self.dtype = dtype
        self.name = name
        self.live_vocab = c.vocab
        self.adapter = None                                      # lora.Adapter sets it
        scratch = Scratch()
        self.layers = torch.nn.ModuleList(
            Layer(c, i, get, frozen, dtype, scratch) for i in range(c.layers))
        self.embed = get("model.embed_tokens.weight", c.vocab, c.width).to(dtype)
        self.device = self.embed.device
        self.lm_head = self.embed                                # (V, D) both
        if not c.tied:
            self.lm_head = get("lm_head.weight", c.vocab, c.width).to(dtype)
        self.final_norm = RMSNorm(get("model.norm.weight", c.width), c.eps, dtype)

    def hidden(self, tokens, attends, positions, kept_layers=None):
        """tokens (T,) packed -> final norm's (x * w (T, D) in dtype, 1/rms (T, 1)).

        attends: what each layer attends by, see Layer.forward. kept_layers: so many, the last
        ones, keep their activations (None: all); others run again in the backward.
        """
        x = self.embed[tokens].float()
        cos, sin = rope_table(positions, self.config)
        first_kept = 0
        if kept_layers is not None and torch.is_grad_enabled():
            first_kept = len(self.layers) - kept_layers
        for i, (layer, attend) in enumerate(zip(self.layers, attends)):
            if i < first_kept:
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.final_norm(x)

    def forward(self, tokens):
        """tokens (B, T) -> logits (B, T, V) fp32. For checks: training never builds this tensor."""
        B, T = tokens.shape
        attend = PackedAttention([T] * B, tokens.device)
        attends = [attend] * len(self.layers)
        xw, rstd = self.hidden(tokens.reshape(-1), attends, attend.positions)
        return (mm_fp32(xw, self.lm_head.T) * rstd).view(B, T, -1)

    def token_logprobs(self, rows, starts, temperature=1.0, kept_layers=0):
        """-> log-probs of tokens rows[i][starts[i]:], (T,) fp32 flat in row order, differentiable,
        and entropy (T,) fp32, not.

        rows: lists of ids, prompt and completion; starts: of the completions. Rows that follow
        each other share the work on the same prompt. kept_layers: as hidden() takes it.
        """
        assert all(0 < s < len(r) for r, s in zip(rows, starts)), \
            "every row needs a prompt token and a scored token"
        tokens, lengths, branches, predictors = lay_out(rows, starts)
        attend = PackedAttention(lengths, self.device, branches)
        attends = [attend] * len(self.layers)
        tokens = torch.tensor(tokens, device=self.device)
        xw, rstd = self.hidden(tokens, attends, attend.positions, kept_layers)
        at = torch.tensor(predictors, device=self.device)
        scored = [t for row, start in zip(rows, starts) for t in row[start:]]
        targets = torch.tensor(scored, device=self.device)
        return token_logprobs(xw[at], rstd[at], self.lm_head, targets, self.live_vocab, temperature)


# -----------------------------------------------------------------------------
# Loading

def load(folder, base="nvfp4", device=None, dtype=None, live_vocab=None):
    """A checkpoint (bf16 or compressed-tensors NVFP4 files) -> Qwen2, its linears held as `base`.

    Quantizes matrix by matrix as it reads: the peak is the result plus one fused matrix. dtype (or
    its name): of matmul inputs. ValueError says which file or tensor is bad.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    files = hf.ModelFolder(hf.resolve(folder), base, device, dtype)
    config = ModelConfig.from_json(files.config)
    if (live_vocab or 0) > config.vocab:
        raise ValueError(f"{files.folder}: tokenizer.json has ids up to {live_vocab - 1}, the "
                         f"embedding in config.json {config.vocab} rows (vocab_size)")
    model = Qwen2(config, files.read, files.frozen, dtype, str(folder))
    model.live_vocab = live_vocab or config.vocab
    return model
