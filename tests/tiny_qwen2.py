"""
Reference Qwen2, Qwen3, Llama and Mistral in float64, one sequence at a time, and tiny random checkpoints.

Weights are computed from a seed with integers and one division, so every version of torch gives the same bits:
make_reference.py and the tests build the same checkpoint, and only its logits are stored.

This file imports nothing from the project.
"""
import json
import math

import torch
from safetensors.torch import save_file

# D, F, layers, H, KV, V, tied. The K of all linears is a multiple of 64 in the first two, of only 16 in the third.
SHAPES = {"tied": (64, 192, 2, 4, 2, 101, True), "untied": (128, 192, 2, 4, 1, 101, False),
          "ragged": (80, 176, 3, 5, 5, 77, False)}
# Qwen3 adds head_dim. H x d is larger than D in the first, smaller in the second.
QWEN3_SHAPES = {"qwen3-tied": (64, 192, 2, 4, 2, 101, True, 32), "qwen3-untied": (128, 192, 3, 4, 1, 101, False, 16)}
# 19 tokens are more than Llama's original context: its scaling is written under the older key in the first, under the
# newer in the second.
LLAMA_SHAPES = {"llama": (128, 192, 2, 4, 1, 101, False), "llama-tied": (64, 192, 2, 4, 2, 101, True, 32)}
SHAPES |= QWEN3_SHAPES | LLAMA_SHAPES | {"mistral": (64, 192, 2, 4, 2, 101, False, 32)}
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
TARGETS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
GROUPS = TARGETS[:3], TARGETS[3:4], TARGETS[4:6], TARGETS[6:]          # fused linears, with one global scale each
NORMS = ("input_layernorm", "post_attention_layernorm")
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def config_json(shape):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size", "tie_word_embeddings")
    raw = dict(zip(keys, SHAPES[shape]), architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu",
               rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512, use_sliding_window=False)
    if shape in QWEN3_SHAPES:
        raw |= dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3",
                    attention_bias=False, sliding_window=None)
    if shape in LLAMA_SHAPES:
        raw |= dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False,
                    rope_scaling=LLAMA3)
    if shape == "llama-tied":
        theta = raw.pop("rope_theta")
        raw |= dict(rope_scaling=None, rope_parameters=LLAMA3 | dict(rope_theta=theta))
    if shape == "mistral":
        raw |= dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
    if len(SHAPES[shape]) > 7:
        raw["head_dim"] = SHAPES[shape][7]
    return raw


def head_size(raw):
    return raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]


def shapes_of(raw):
    """Hugging Face name -> shape, for every tensor of the checkpoint."""
    D, F, V = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    q, kv = (head_size(raw) * raw[key] for key in ("num_attention_heads", "num_key_value_heads"))
    sizes = dict(zip(TARGETS, ((q, D), (kv, D), (kv, D), (D, q), (F, D), (F, D), (D, F))))
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(raw["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": size for name, size in sizes.items()}
        if raw["model_type"] == "qwen3":
            shapes |= {f"model.layers.{i}.{name}.weight": (head_size(raw),) for name in QK_NORMS}
        if raw["model_type"] == "qwen2":
            shapes |= {f"model.layers.{i}.{name}.bias": sizes[name][:1] for name in TARGETS[:3]}
        shapes |= {f"model.layers.{i}.{name}.weight": (D,) for name in NORMS}
    return shapes if raw["tie_word_embeddings"] else shapes | {"lm_head.weight": (V, D)}


def noise(shape, generator, std):
    """Roughly normal numbers: sums of four uniform integers, scaled to `std`."""
    return torch.randint(-128, 128, (4, *shape), generator=generator).sum(0).float() / 148.0 * std


def random_tensors(raw, seed=0):
    """bf16 tensors of a checkpoint whose logits have a standard deviation of a few units."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in sorted(shapes_of(raw).items()):
        if name.endswith("norm.weight"):
            w = 1 + noise(shape, generator, 0.25)
        elif name.endswith("bias"):
            w = noise(shape, generator, 0.5)
        else:
            gain = 1.0 if ".layers." in name else 2.5
            w = noise(shape, generator, gain / math.sqrt(shape[1]))
        tensors[name] = w.bfloat16()
    return tensors


def random_adapter(raw, rank, seed=0):
    """PEFT's tensor names -> fp32 A and B, both nonzero."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in sorted(shapes_of(raw).items()):
        module = "base_model.model." + name.removesuffix(".weight")
        if any(f".{target}.weight" in name for target in TARGETS):
            tensors[f"{module}.lora_A.weight"] = noise((rank, shape[1]), generator, shape[1] ** -0.5)
            tensors[f"{module}.lora_B.weight"] = noise((shape[0], rank), generator, 0.3)
    return tensors


def merged(tensors, adapter, scale):
    """The checkpoint merged with the adapter, in float64: W + scale * B @ A."""
    out = {name: t.double() for name, t in tensors.items()}
    for name, t in adapter.items():
        module = name.removeprefix("base_model.model.")
        if module.endswith("lora_A.weight"):
            b = adapter[name.replace("lora_A", "lora_B")]
            out[module.replace("lora_A.", "")] += scale * b.double() @ t.double()
    return out


def write_folder(folder, raw, tensors, files=1):
    """Writes config.json and the tensors, in one safetensors file or in several with an index. -> folder"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def frequencies(raw):
    """-> (d / 2,) float64. Llama 3's scaling goes by wavelength, as in its own code."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    d, theta = head_size(raw), raw.get("rope_theta") or rope["rope_theta"]
    f = theta ** (-torch.arange(0, d, 2).double() / d)
    if rope:
        length, low, high = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor",
                                                   "high_freq_factor"))
        wave = 2 * math.pi / f
        smooth = (length / wave - low) / (high - low)
        between = (1 - smooth) * f / rope["factor"] + smooth * f
        f = torch.where(wave > length / low, f / rope["factor"], torch.where(wave < length / high, f, between))
    return f


def plain_logits(raw, tensors, tokens):
    """tokens (T,) of one sequence -> logits (T, V) float64. Rotary pairs are complex numbers times e^(i angle)."""
    w = {name: t.double() for name, t in tensors.items()}
    T, H, KV = len(tokens), raw["num_attention_heads"], raw["num_key_value_heads"]
    d = head_size(raw)
    angle = torch.arange(T).double()[:, None] * frequencies(raw)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]           # (T, 1, d / 2)
    future = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + raw["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def rotated(x, name):
        x = x.unflatten(1, (-1, d))                                      # (T, heads, d)
        if raw["model_type"] == "qwen3":
            x = norm(x, name)
        z = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat([z.real, z.imag], dim=-1)

    x = w["model.embed_tokens.weight"][torch.as_tensor(tokens)]
    for i in range(raw["num_hidden_layers"]):
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm")
        q, k = (rotated(linear(y, f"{p}self_attn.{s}_proj"), f"{p}self_attn.{s}_norm") for s in "qk")
        v = linear(y, p + "self_attn.v_proj").unflatten(1, (-1, d))
        k, v = k.repeat_interleave(H // KV, 1), v.repeat_interleave(H // KV, 1)
        weight = (torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d) + future).softmax(-1)
        x = x + linear(torch.einsum("hij,jhd->ihd", weight, v).flatten(1), p + "self_attn.o_proj")
        y = norm(x, p + "post_attention_layernorm")
        gate = linear(y, p + "mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(y, p + "mlp.up_proj"), p + "mlp.down_proj")
    head = w["model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


def set_adapter(model, tensors):
    """Copies random_adapter's tensors into the model's Adapter, through the linears' views."""
    prefix = "base_model.model."
    for linear in model.adapter.linears:
        start = 0
        for p, (name, rows) in enumerate(zip(linear.names, linear.parts)):
            a, b = (tensors[f"{prefix}{name}.lora_{x}.weight"] for x in "AB")
            linear.a.data[p * len(a):(p + 1) * len(a)] = a
            linear.b.data[start:start + rows] = b
            start += rows
    model.adapter.sync()


def held_by(model):
    """Hugging Face name -> a model's tensor, without the adapter. Frozen linears are decoded to fp32."""
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm.weight.data}
    for i, layer in enumerate(model.layers):
        for name, norm in zip(NORMS, (layer.input_norm, layer.post_norm)):
            tensors[f"model.layers.{i}.{name}.weight"] = norm.weight.data
        if layer.qkv_bias is not None:
            for name, bias in zip(TARGETS[:3], layer.qkv_bias.split(layer.qkv.parts)):
                tensors[f"model.layers.{i}.{name}.bias"] = bias
        if layer.qk_gains is not None:
            tensors |= {f"model.layers.{i}.{name}.weight": gain for name, gain in zip(QK_NORMS, layer.qk_gains)}
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            w = linear.weight.dequantize().float()
            tensors |= {f"{name}.weight": part for name, part in zip(linear.names, w.split(linear.parts))}
    return tensors if model.config.tied else tensors | {"lm_head.weight": model.lm_head}
