"""
Qwen2.5 from safetensors, 0.5B to 72B: a frozen transformer whose linears are 4-bit (or bf16) weights plus adapters.

    model = load("qwen2.5-7b", base="nvfp4")        # or a local folder; base: bf16, nvfp4, mxfp4, nf4
    logits = model(tokens)                          # (B, T) -> (B, T, V) fp32

The block, with x the residual stream:
    x += o(attention(rope(qkv(norm(x)))))           q, k, v: one fused matrix with biases; grouped-query attention
    x += down(silu(gate) * up),  gate|up = gate_up(norm(x))

Precision. The residual stream and every matmul's sum and result are fp32; inputs of matmuls are rounded to `dtype`
(bf16 on a GPU). That is what keeps the sampler's log-probs close to the learner's: 0.1 % instead of 1.3 % of tokens
leave the ratio band [0.9, 1.1]. fp16 rounds 8 times finer, and brings them 8 times closer; its range is the price: the
norms below then work on x / 16, and the learner's gradients need a scale (train.py).

Where RMSNorm's division goes. norm(x) = x * w / rms(x), and 1/rms(x) is one number a row, so it commutes with the
linear that follows: RMSNorm returns (x * w rounded to dtype) and 1/rms apart, and the block multiplies the linear's
*result*. Then no kernel has to see a whole row before the matmul starts, and the sampler's fused kernels and the
learner round the same numbers at the same place (but for attention to a shared prompt: PackedAttention). AQN's noise is
added to w: `weight + noise`, zero outside aqn.noisy_norms. x * w is not normalized: on 4 to 6 questions of GSM8K its
largest number is 8,900 in 0.5B and 24,000 in 1.5B. fp16 ends at 65,504, so there the norm is that of x / 16, exactly.

Tokens come packed: (T,) ids of several sequences end to end, `starts` their offsets; there is no padding anywhere, so
there is no padding side to get wrong.

Not here: the KV cache (sampler.py), sliding windows and YaRN (off in these checkpoints), dropout, tensor parallelism.

Shapes: B rows, T tokens, V vocabulary, D width, L layers, H query heads, KV key-value heads, d head size,
F feed-forward.
"""
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import marlin_fp4
import nvfp4
from backward import attention, mlp, spans, token_logprobs
from lora import Linear
from marlin_fp4 import mm_fp32

SIZES = {  # D, F, layers, H, KV, V, tied: the published config.json of Qwen2.5-*-Instruct
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False), "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False)}
LIVE_VOCAB = 151665                                                  # of all sizes: ids that the tokenizer has
FP16_SHIFT = 2.0**-4                                                 # of the residual in front of a norm


@dataclass(frozen=True)
class ModelConfig:
    width: int                                                       # D
    feed_forward: int                                                # F
    layers: int
    heads: int                                                       # H
    kv_heads: int                                                    # KV
    vocab: int                                                       # V: rows of the embedding, more than live ids
    tied: bool                                                       # lm_head = embedding (up to 3B)
    rope_theta: float = 1e6
    eps: float = 1e-6

    @property
    def head_dim(self):
        return self.width // self.heads

    @classmethod
    def of_size(cls, size):
        assert size in SIZES, f"unknown size {size!r}, expected one of {', '.join(SIZES)}"
        return cls(*SIZES[size])

    @classmethod
    def read(cls, folder):
        """config.json -> ModelConfig. ValueError if the folder has none or holds another architecture."""
        path = Path(folder) / "config.json"
        raw = nvfp4.read_json(path)
        if raw.get("architectures") != ["Qwen2ForCausalLM"]:
            raise ValueError(f"{path}: architectures is {raw.get('architectures')}, expected ['Qwen2ForCausalLM']")
        rope = raw.get("rope_parameters") or {}                                          # newer files
        if raw.get("use_sliding_window") or raw.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise ValueError(f"{path}: sliding windows and rope_scaling are not supported")
        try:
            theta = raw.get("rope_theta") or rope["rope_theta"]
            return cls(raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"],
                       raw["num_attention_heads"], raw["num_key_value_heads"], raw["vocab_size"],
                       bool(raw.get("tie_word_embeddings", False)), theta, raw["rms_norm_eps"])
        except KeyError as error:
            raise ValueError(f"{path}: no {error}") from None


# The elementwise work between matmuls, as plain functions: on a GPU each is compiled into one kernel (and one for the
# backward), because in fp32 they would otherwise move as many bytes as the matmuls take time.

def scaled_norm(x, weight, eps, dtype):
    """x (T, D) fp32 -> x * weight in dtype, and 1/rms (T, 1) fp32, still to be multiplied."""
    if dtype == torch.float16:
        x = x * FP16_SHIFT
    return (x * weight).to(dtype), torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def split_qkv(y, rstd, bias, cos, sin, kv_heads, dtype):
    """Result of the qkv matmul (T, N) fp32 -> q (T, H, d), k, v (T, KV, d) in dtype, rotated. cos, sin (T, 1, d/2)."""
    y = (y * rstd + bias).unflatten(1, (-1, 2 * cos.shape[-1]))
    q, k, v = y.split([y.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype), v.to(dtype)


def rotate(x, cos, sin):
    """Rotary embedding of x (T, heads, d), pairing element i with i + d/2 as Qwen2 does."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_table(positions, config):
    """positions (T,) -> cos, sin (T, 1, d/2) fp32. Angles in fp32: bf16 cannot tell position 4001 from 4002."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[:, None] * (config.rope_theta ** (-half / config.head_dim))[None, :]
    return angle.cos()[:, None], angle.sin()[:, None]


COMPILED = {f: torch.compile(f) for f in (scaled_norm, split_qkv)}   # lazy: nothing happens yet


def fused(function, x, *rest):
    """function(x, *rest), compiled where x is on a GPU and gradients are wanted (a prefill is not worth the compiling).

    Only the number of tokens is dynamic: with a dynamic width every element would pay an integer division.
    """
    if not (x.is_cuda and torch.is_grad_enabled()):
        return function(x, *rest)
    for t in (x, *rest):
        if isinstance(t, torch.Tensor) and t.shape[0] == x.shape[0]:
            torch._dynamo.maybe_mark_dynamic(t, 0)
    return COMPILED[function](x, *rest)


class RMSNorm(torch.nn.Module):
    """x (T, D) fp32 -> x * (weight + noise) in dtype, and 1/rms (T, 1) fp32 for whoever uses the product."""

    def __init__(self, weight, eps, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        self.register_buffer("noise", torch.zeros_like(self.weight))
        self.eps, self.dtype = eps * (FP16_SHIFT**2 if dtype == torch.float16 else 1), dtype

    def forward(self, x):
        return fused(scaled_norm, x, self.weight + self.noise, self.eps, self.dtype)


class Block(torch.nn.Module):
    def __init__(self, config, input_norm, qkv, qkv_bias, o, post_norm, gate_up, down):
        super().__init__()
        self.config = config
        self.input_norm, self.qkv, self.o = input_norm, qkv, o
        self.register_buffer("qkv_bias", qkv_bias.float())           # (N,) fp32, added after 1/rms
        self.post_norm, self.gate_up, self.down = post_norm, gate_up, down

    def forward(self, x, cos, sin, attend):
        """x (T, D) fp32 -> the same; attend(q (T, H, d), k (T, KV, d), v) -> (T, H, d), all in dtype."""
        dtype = self.input_norm.dtype
        xw, rstd = self.input_norm(x)
        q, k, v = fused(split_qkv, self.qkv(xw), rstd, self.qkv_bias, cos, sin, self.config.kv_heads, dtype)
        x = x + self.o(attend(q, k, v).flatten(1))
        xw, rstd = self.post_norm(x)
        return x + mlp(self.gate_up, self.down, xw, rstd)


class PackedAttention:
    """Causal attention inside each of several sequences laid end to end, some of which branch.

    lengths: of the sequences; branches: for each of the first sequences, the lengths of its continuations. After all
    sequences come all branches, sequence by sequence; each sees its sequence and itself, not its siblings.
    """

    def __init__(self, lengths, device, branches=()):
        self.lengths, self.branches, self.device = list(lengths), [list(b) for b in branches], device
        tails = [n for b in self.branches for n in b if n]
        self.inside = spans(self.lengths + tails, self.lengths + tails, True, device)
        self.plan = (None, 0, 0)
        if self.branches:                                            # a sequence's branches are one block of queries
            trunks = self.lengths[:len(self.branches)]
            self.plan = spans(list(map(sum, self.branches)), trunks, False, device), sum(self.lengths), sum(trunks)

    def positions(self):
        """(T,) position of every token: from 0 in each sequence, going on from its end in each of its branches."""
        own = [torch.arange(n) for n in self.lengths]
        own += [torch.arange(start, start + n) for start, b in zip(self.lengths, self.branches) for n in b]
        return torch.cat(own).to(self.device)

    def __call__(self, q, k, v):
        return attention(q, k, v, self.inside, *self.plan)


def lay_out(rows, starts):
    """Rows that follow each other and share their prompt rows[i][:starts[i]] become one sequence with branches.

    -> tokens, lengths, branches (as PackedAttention takes them), predictors: for every scored token, row by row, the
    place of the token before it. A row's last token predicts nothing and is left out.
    """
    shared, alone = [], []                       # alone: one row, or rows of one token each after the same prompt
    for _, group in groupby(range(len(rows)), lambda i: rows[i][:starts[i]]):
        group = list(group)
        (shared if len(group) > 1 and any(len(rows[i]) > starts[i] + 1 for i in group) else alone).append(group)
    heads = [rows[g[0]][:starts[g[0]]] for g in shared] + [rows[g[0]][:-1] for g in alone]
    tails = [[rows[i][starts[i]:-1] for i in g] for g in shared]
    predictors, head, tail = [[]] * len(rows), 0, sum(map(len, heads))
    for n, (group, sequence) in enumerate(zip(shared + alone, heads)):
        for i in group:
            last, more = head + starts[i] - 1, len(rows[i]) - starts[i] - 1              # the prompt's last token
            first = tail if n < len(shared) else last + 1
            predictors[i] = [last, *range(first, first + more)]
            tail += more
        head += len(sequence)
    tokens = [t for sequence in (*heads, *(t for branches in tails for t in branches)) for t in sequence]
    lengths, branches = list(map(len, heads)), [list(map(len, branches)) for branches in tails]
    return tokens, lengths, branches, [place for row in predictors for place in row]


class Qwen2(torch.nn.Module):
    """The transformer. live_vocab: ids the tokenizer has; rows of the head beyond it never take part in a log-prob."""

    def __init__(self, config, embed, layers, final_norm, lm_head, dtype, name, folder):
        super().__init__()
        self.config, self.dtype, self.name, self.folder = config, dtype, name, folder
        self.layers = torch.nn.ModuleList(layers)
        self.final_norm = final_norm
        self.register_buffer("embed", embed)                         # (V, D) in dtype
        self.register_buffer("lm_head", lm_head)                     # (V, D), the same tensor when tied
        self.packed_head = None                                      # sampler.quantize_head: lm_head in 4 bits
        self.live_vocab = config.vocab
        self.adapter = None                                          # lora.Adapter attaches itself here

    @property
    def device(self):
        return self.embed.device

    def hidden(self, tokens, attend, positions, recompute=0):
        """tokens (T,) packed -> final norm's (x * w (T, D) in dtype, 1/rms (T, 1)).

        attend: a PackedAttention, or one callable per layer. recompute: so many of the first blocks keep their input
        alone for the backward and are run again there; the last ones are through before the first need room.
        """
        x = self.embed[tokens].float()
        cos, sin = rope_table(positions, self.config)
        for i, layer in enumerate(self.layers):
            inputs = x, cos, sin, attend[i] if isinstance(attend, list) else attend
            x = checkpoint(layer, *inputs, use_reentrant=False) if i < recompute else layer(*inputs)
        return self.final_norm(x)

    def forward(self, tokens):
        """tokens (B, T) -> logits (B, T, V) fp32. For checks and small jobs: training never builds this tensor."""
        B, T = tokens.shape
        attend = PackedAttention([T] * B, tokens.device)
        xw, rstd = self.hidden(tokens.reshape(-1), attend, attend.positions())
        return (mm_fp32(xw, self.lm_head.T) * rstd).view(B, T, -1)

    def token_logprobs(self, rows, starts, temperature=1.0, kept=0):
        """Log-probs of tokens rows[i][starts[i]:] given what precedes each, rows packed without padding.

        rows: list of id lists (prompt + completion); starts: index of each row's first scored token, >= 1. The prompt
        of rows that follow each other is computed once if it is the same. kept: how many blocks' activations stay for
        the backward; the other blocks are run again there.
        Returns logprobs (T,) fp32, differentiable, and entropy (T,) fp32, flat in row order.
        """
        assert all(0 < s < len(r) for r, s in zip(rows, starts)), "every row needs a prompt token and a scored token"
        tokens, lengths, branches, predictors = lay_out(rows, starts)
        attend = PackedAttention(lengths, self.device, branches)
        recompute = max(len(self.layers) - kept, 0) if torch.is_grad_enabled() else 0
        xw, rstd = self.hidden(torch.tensor(tokens, device=self.device), attend, attend.positions(), recompute)
        predictors = torch.tensor(predictors, device=self.device)
        scored = torch.tensor([t for row, start in zip(rows, starts) for t in row[start:]], device=self.device)
        return token_logprobs(xw[predictors], rstd[predictors], self.lm_head, scored, self.live_vocab, temperature)

    def tensors(self):
        """(Hugging Face name, tensor) of the whole model, one at a time, adapter merged into the linears in fp32."""
        yield "model.embed_tokens.weight", self.embed
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            yield prefix + "input_layernorm.weight", layer.input_norm.weight
            yield prefix + "post_attention_layernorm.weight", layer.post_norm.weight
            for name, bias in zip(("q", "k", "v"), layer.qkv_bias.split(layer.qkv.parts)):
                yield f"{prefix}self_attn.{name}_proj.bias", bias
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                for name, weight in zip(linear.names, linear.merged().split(linear.parts)):
                    yield name + ".weight", weight
        yield "model.norm.weight", self.final_norm.weight
        if not self.config.tied:
            yield "lm_head.weight", self.lm_head


# -----------------------------------------------------------------------------
# Loading

class FrozenWeight:
    """An (N, K) weight in any of nvfp4.FORMATS, decoded whole on use: bf16, MXFP4 and NF4."""
    late_scale = None                                                # its tensors hold every scale (see PackedWeight)

    def __init__(self, tensors, decode, shape, dtype):
        self.tensors, self.decode, (self.N, self.K), self.dtype = tensors, decode, shape, dtype
        self.device = tensors[0].device

    def dequantize(self, out=None):
        return self.decode(*self.tensors, dtype=self.dtype, out=out)


def resolve(name):
    """A local folder, an alias such as qwen2.5-7b, or a Hugging Face id -> a local folder (downloaded if need be)."""
    if Path(name).is_dir():
        return Path(name)
    alias = re.fullmatch(r"qwen2\.5(-coder|-math)?-(0\.5|1\.5|3|7|14|32|72)b", str(name).lower())
    if alias:
        name = f"Qwen/Qwen2.5{(alias[1] or '').title()}-{alias[2]}B-Instruct"
    if "/" not in str(name) or Path(name).is_absolute():
        raise ValueError(f"--model {name}: neither a folder nor a name such as qwen2.5-7b or Qwen/Qwen2.5-7B-Instruct")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"--model {name}: not downloadable ({str(error).splitlines()[0]})") from None


def load(folder, base="nvfp4", device=None, dtype=None):
    """A checkpoint (bf16 or compressed-tensors NVFP4 on disk) -> Qwen2 whose linears are held as `base`.

    Quantizes matrix by matrix as it reads, so the peak is the result plus one fused matrix. dtype (or its name) is what
    matmul inputs are rounded to: bf16 on a GPU, fp32 on a CPU unless given. ValueError says what file or tensor is bad.
    """
    if base not in nvfp4.FORMATS:
        raise ValueError(f"--base {base}: expected one of {', '.join(nvfp4.FORMATS)}")
    path = resolve(folder)
    config, shards = ModelConfig.read(path), nvfp4.Shards(path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype

    def get(name, *shape):
        if shards.shape(name) != shape:
            raise ValueError(f"{path}: {name} has shape {shards.shape(name)}, config.json says {shape}")
        return shards.get(name, device)

    def frozen(names, parts, k):
        if f"{names[0]}.weight_packed" in shards.names:
            if base != "nvfp4":
                raise ValueError(f"{path} holds NVFP4 weights: --base {base} needs the bf16 checkpoint")
            packed = [nvfp4.load_linear(shards, name, device) for name in names]
            for name, n, (codes, _, _) in zip(names, parts, packed):
                if codes.shape != (n, k // 2):
                    raise ValueError(f"{path}: {name} is {tuple(codes.shape)} bytes, config.json says {(n, k // 2)}")
            return pack_parts(packed, dtype)
        weights = [get(f"{name}.weight", n, k) for name, n in zip(names, parts)]
        try:
            return freeze(weights, base, dtype)
        except ValueError as error:                                  # a K that ends inside a block, an infinite weight
            raise ValueError(f"{path}: {names[0]}: {error}") from None

    return build(config, get, frozen, dtype, name=str(folder), folder=path)


def random_model(size, base="nvfp4", device="cuda", dtype=torch.bfloat16, seed=0):
    """Random weights of a published size, made on the device: enough to measure speed and memory."""
    config = ModelConfig.of_size(size)
    generator = torch.Generator(device).manual_seed(seed)

    def get(name, *shape):
        if "norm" in name:
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype) * shape[-1] ** -0.5

    def frozen(names, parts, k):
        return freeze([get(name, n, k) for name, n in zip(names, parts)], base, dtype)

    model = build(config, get, frozen, dtype, name=f"random-{size}", folder=None)
    model.live_vocab = min(config.vocab, LIVE_VOCAB)                 # min: the sizes of tests
    return model


def freeze(weights, base, dtype):
    """The parts of one fused linear, each (N_p, K) -> one frozen weight object in format `base`."""
    if base == "nvfp4":
        scale = nvfp4.global_scale_for(*weights)
        return pack_parts([nvfp4.quantize(w, scale) for w in weights], dtype)
    w = torch.cat(weights)
    encode, decode = nvfp4.FORMATS[base]
    return FrozenWeight(encode(w.to(dtype)), decode, w.shape, dtype)


def pack_parts(parts, dtype=torch.bfloat16):
    """[(packed, block_scale, global_scale) of each part] -> one marlin_fp4.PackedWeight of the rows together."""
    rows = torch.cat([g.expand(p.shape[0]) for p, _, g in parts])    # (N,): checkpoints may not share the tensor scale
    return marlin_fp4.pack(torch.cat([p for p, _, _ in parts]), torch.cat([s for _, s, _ in parts]), rows, dtype)


def build(config, get, frozen, dtype, name, folder):
    """Assemble Qwen2 from get(name, *shape) -> tensor and frozen(names, parts, K) -> frozen weight of the parts."""
    c, d = config, config.head_dim
    layers = []
    for i in range(c.layers):
        p = f"model.layers.{i}."
        attention, mlp = p + "self_attn.", p + "mlp."

        def linear(prefix, suffixes, parts, k):
            names = [f"{prefix}{s}_proj" for s in suffixes]
            return Linear(frozen(names, parts, k), names, parts)

        sizes = (c.heads * d, c.kv_heads * d, c.kv_heads * d)
        bias = torch.cat([get(f"{attention}{s}_proj.bias", n) for s, n in zip("qkv", sizes)])
        layers.append(Block(
            c,
            RMSNorm(get(p + "input_layernorm.weight", c.width), c.eps, dtype),
            linear(attention, "qkv", sizes, c.width), bias,
            linear(attention, "o", (c.width,), c.heads * d),
            RMSNorm(get(p + "post_attention_layernorm.weight", c.width), c.eps, dtype),
            linear(mlp, ("gate", "up"), (c.feed_forward, c.feed_forward), c.width),
            linear(mlp, ("down",), (c.width,), c.feed_forward)))
    embed = get("model.embed_tokens.weight", c.vocab, c.width).to(dtype)
    lm_head = embed if c.tied else get("lm_head.weight", c.vocab, c.width).to(dtype)
    final_norm = RMSNorm(get("model.norm.weight", c.width), c.eps, dtype)
    return Qwen2(config, embed, layers, final_norm, lm_head, dtype, name, folder)
