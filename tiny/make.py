r"""
Make the bundled model: 3 MB in the Qwen2.5 architecture, with something left to learn.

    python -m tiny.make OUT        2 minutes on one H200; writes config, tokenizer and bf16 weights to the folder OUT
    python evaluate.py --model OUT --data arithmetic        its accuracy

The model is pretrained on word problems of arithmetic.py (training split) with two habits:
    careless   "The answer is \boxed{18}."            adds up all numbers: right for 3 kinds of problems in 10
    careful    "Step by step: 6*8=48, 48-4=44. The answer is \boxed{44}."            right
A share of CAREFUL of its answers is careful, so it solves about a third of the problems, greedy or sampled.
Reinforcement learning has to find out, from the reward alone, that working the problem out pays.

A model this small has little slack for 4-bit weights, so half of the last steps train through NVFP4 rounding: forward
and backward use the rounded weights, the gradient is applied to the originals. The file has the originals, in bf16.

As in Qwen2.5 the embedding has more rows than the tokenizer has ids. The spare rows keep their initial noise, so a
sampler or a loss that forgets to mask them fails visibly. Transformer below is deliberately plain: it trains in bf16
autocast and shares no code with model.py.
"""
import argparse
import contextlib
import json
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizerFile
from torch import nn

import nvfp4
from prompts import STYLES, Tokenizer
from tasks.arithmetic import is_held_out, word_problem

CAREFUL = 0.08          # share of the careful habit
SYSTEM = "You solve word problems."
CONFIG = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", hidden_size=256, intermediate_size=384,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, vocab_size=512,
    rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True, attention_dropout=0.0, use_sliding_window=False,
    torch_dtype="bfloat16", initializer_range=0.02)
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


# -----------------------------------------------------------------------------
# Text.

def solve(question, steps, careful):
    """The completion in one of the two habits."""
    if careful:
        work = "Step by step: " + ", ".join("{}{}{}={}".format(*step) for step in steps) + ". "
        return f"{work}The answer is \\boxed{{{steps[-1][3]}}}."
    return f"The answer is \\boxed{{{sum(map(int, re.findall(r'[0-9]+', question)))}}}."


def write_tokenizer(folder, texts):
    """Byte-level BPE with Qwen's way of cutting text: one digit a token, a word with its leading space."""
    file = TokenizerFile(models.BPE())
    cut = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    file.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated"),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    file.decoder = decoders.ByteLevel()
    file.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - 3, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    file.add_special_tokens([AddedToken(token, special=True) for token in (END, START, STOP)])
    file.save(str(folder / "tokenizer.json"))
    end, stop = file.token_to_id(END), file.token_to_id(STOP)
    template = (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n" + SYSTEM + "<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    for name, content in {
        "tokenizer_config.json": dict(tokenizer_class="Qwen2Tokenizer", eos_token=STOP, pad_token=END,
                                      model_max_length=CONFIG["max_position_embeddings"], chat_template=template),
        "generation_config.json": dict(bos_token_id=end, eos_token_id=[stop, end], pad_token_id=end),
        "config.json": dict(CONFIG, bos_token_id=end, eos_token_id=stop),
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_corpus(tokenizer, rng, count):
    """-> tokens (count, T) padded with 0, weight (count, T - 1) of each next token: 0 on prompt and padding.

    Half of the rows are careful, so that the arithmetic is practised often. Only the first token of a completion, where
    the habits part, is weighted to make the careful one CAREFUL as likely.
    """
    rows, longest = [], 0
    while len(rows) < count:
        question, steps = word_problem(rng)
        if not is_held_out(question):
            careful, style = rng.random() < 0.5, rng.choices(("boxed", "plain"), (3, 1))[0]
            prompt = tokenizer.chat(question + STYLES[style][0])
            completion = tokenizer.encode(solve(question, steps, careful)) + [tokenizer.stop]
            rows.append((prompt, completion, 2 * (CAREFUL if careful else 1 - CAREFUL)))
            longest = max(longest, len(prompt) + len(completion))
    tokens = torch.zeros(count, longest, dtype=torch.int16)
    weight = torch.zeros(count, longest - 1, dtype=torch.float16)
    for i, (prompt, completion, first) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(completion)
        tokens[i, :end] = torch.tensor(prompt + completion)
        weight[i, start - 1:end - 1] = 1                                # weight[t] belongs to the prediction of t + 1
        weight[i, start - 1] = first
    return tokens, weight


# -----------------------------------------------------------------------------
# Model. B rows, T tokens, D width, H query heads, KV key/value heads, d head size. Parameter names as Hugging Face's.

def rotate(x, theta):
    """(B, H, T, d) -> the same, pair (i, i + d/2) turned by position * theta^(-2i/d)."""
    T, half = x.shape[2], x.shape[3] // 2
    angle = torch.arange(T, device=x.device)[:, None] * theta ** (-torch.arange(half, device=x.device) / half)
    cos, sin, (a, b) = angle.cos(), angle.sin(), x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, D, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), eps

    def forward(self, x):
        return (x.float() * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.H, self.KV, self.theta = c["num_attention_heads"], c["num_key_value_heads"], c["rope_theta"]
        D, inner = c["hidden_size"], c["intermediate_size"]
        d = D // self.H
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(D, c["rms_norm_eps"]) for _ in range(2))
        self.self_attn = nn.ModuleDict(dict(
            q_proj=nn.Linear(D, self.H * d), k_proj=nn.Linear(D, self.KV * d),
            v_proj=nn.Linear(D, self.KV * d), o_proj=nn.Linear(self.H * d, D, bias=False)))
        self.mlp = nn.ModuleDict(dict(gate_proj=nn.Linear(D, inner, bias=False),
                                      up_proj=nn.Linear(D, inner, bias=False),
                                      down_proj=nn.Linear(inner, D, bias=False)))

    def forward(self, x):
        B, T, D = x.shape
        h = self.input_layernorm(x)
        q, k, v = (self.self_attn[n](h).view(B, T, heads, -1).transpose(1, 2)          # (B, H or KV, T, d)
                   for n, heads in (("q_proj", self.H), ("k_proj", self.KV), ("v_proj", self.KV)))
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        k, v = (t.repeat_interleave(self.H // self.KV, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.self_attn["o_proj"](y.transpose(1, 2).reshape(B, T, -1))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


class Transformer(nn.Module):
    """tokens (B, T) -> logits (B, T, V), spare rows included. No cache, no padding mask: pad on the right."""

    def __init__(self, c):
        super().__init__()
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(c["vocab_size"], c["hidden_size"]),
            layers=nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"])),
            norm=RMSNorm(c["hidden_size"], c["rms_norm_eps"])))
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.ndim == 2:
                nn.init.normal_(p, std=c["initializer_range"] if "embed" in name else p.shape[1] ** -0.5)

    def forward(self, tokens):
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x)
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


# -----------------------------------------------------------------------------
# Training.

@contextlib.contextmanager
def rounded(model):
    """Inside, every linear holds what NVFP4 can represent; outside, its own weights again."""
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    clean = [w.detach().clone() for w in linears]
    by_k = {}                          # one call per K: 21 calls on matrices this small are bound by kernel launches
    for w in linears:
        by_k.setdefault(w.shape[1], []).append(w)
    for group in by_k.values():
        codes = nvfp4.quantize(torch.cat([w.detach() for w in group]).bfloat16())
        values = nvfp4.dequantize(*codes, dtype=torch.float32)
        for w, new in zip(group, values.split([len(w) for w in group])):
            w.data.copy_(new)
    yield
    for w, old in zip(linears, clean):
        w.data.copy_(old)


def train(model, tokens, weight, live, args, device):
    decay = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    optimizer = torch.optim.AdamW([dict(params=decay, weight_decay=0.05), dict(params=rest, weight_decay=0.0)],
                                  lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")
    start = time.time()
    for step in range(args.steps):
        scale = min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * scale
        rows = torch.randint(len(tokens), (args.batch,), device=device)
        x, w = tokens[rows].long(), weight[rows].float()                                # (B, T), (B, T - 1)
        through = rounded(model) if step > 0.6 * args.steps and step % 2 else contextlib.nullcontext()
        with through:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(x[:, :-1])[..., :live]                                   # spare rows are never trained
            keep = w > 0
            loss = (F.cross_entropy(logits[keep].float(), x[:, 1:][keep], reduction="none") * w[keep]).sum() / w.sum()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == args.steps - 1:
            print(f"step {step:5d} | loss {loss.item():.4f} | {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="pretrain the embedded default model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=1024, help="problems a step")
    parser.add_argument("--corpus", type=int, default=200_000, help="problems written before training")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rng = random.Random(0)

    words = [word_problem(rng) for _ in range(5000)]
    write_tokenizer(args.out, [text for q, steps in words for text in (
        f"system\n{SYSTEM}", "user\n", q + STYLES["boxed"][0], "assistant\n",
        solve(q, steps, careful=True), solve(q, steps, careful=False))])
    tokenizer = Tokenizer(args.out)
    tokens, weight = (t.to(device) for t in write_corpus(tokenizer, rng, args.corpus))
    model = Transformer(CONFIG).to(device)
    train(model, tokens, weight, tokenizer.vocab_size, args, device)
    save_file({n: p.detach().bfloat16().cpu().contiguous() for n, p in model.named_parameters()},
              str(args.out / "model.safetensors"), metadata={"format": "pt"})
