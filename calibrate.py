"""
NVFP4 codes chosen from data: GPTQ (arXiv 2210.17323), layer by layer, in the memory of one layer.

    python -m tools.convert nvfp4 SRC OUT --calibrate 128      the folder; train.py --calibrate too

Rounding to nearest makes the error of the *weights* small. What the policy feels is the error of
the *outputs*, x @ (W - W4).T: with H = X.T @ X / T of the inputs of some texts (T tokens),
    error = tr((W - W4) H (W - W4).T)
GPTQ rounds one column of W after the other and moves what it got wrong onto the columns to come,
as far as the inputs are correlated. Of each block of 16 weights every scale of the search is taken
all the way, and the one of least error stays. Only codes and block scales differ: format, kernels
and the power-of-two tensor scale are those of nvfp4.py.

Texts are the model's own answers to training problems, never to those that measure it. Two streams
of hidden states go through the layers: `exact` through the 16-bit ones, which also gives H; `coded`
through the new ones. At the end their log-probs are compared on the last eighth of the texts, which
no H has seen: KL(16 bits || 4 bits), nats a token, is the quality of a folder.

Not here: act-order (the layout has no g_idx), Hadamard rotations (blocks of 16 leave little to
equalise), AWQ (it would move the norms, which AQN perturbs).

Shapes: T tokens of all texts, D width, N out_features, K in_features, C candidates of a scale.
"""
import gc
import math
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from tqdm import tqdm

import model as qwen
import nvfp4
from attention import PackedAttention, lay_out
from harness import hf
from lora import Scratch
from ops import mm_fp32
from sampler import Sampler, Sampling, engine_for

DAMPING = 0.02                                   # of the mean diagonal of H, added to all of it
COLUMNS = 128                                    # between two updates of all columns to come
LARGEST = 8192                                   # columns in one H: the down of 7B has 18,944
TILE = 2048                                      # rows of H in one product
TOKENS = 8192                                    # of texts in one forward

LEVELS = nvfp4.E2M1_SIGNED.unique()              # -6 .. 6, one 0
EDGES = (LEVELS[1:] + LEVELS[:-1]) / 2


# -----------------------------------------------------------------------------
# One linear

def gptq(w, hessian, global_scale):
    """w (N, K), hessian (K, K) fp32 -> quantize's three tensors."""
    pieces = []
    code_block = recorded(gptq_block, torch.ones(16, len(w), device=w.device),
                          torch.eye(16, device=w.device), global_scale)
    for start in range(0, w.shape[1], LARGEST):
        some = slice(start, start + LARGEST)
        columns = w[:, some].T.clone(memory_format=torch.contiguous_format)
        pieces.append(gptq_columns(columns, hessian[some, some], global_scale, code_block))
    codes, scales = (torch.cat(part).T.contiguous() for part in zip(*pieces))
    return nvfp4.pack_pairs(codes), scales.view(torch.float8_e4m3fn), global_scale


def recorded(step, *inputs):
    """-> step for inputs of these shapes; on a GPU as a CUDA graph, whose results the next call
    overwrites. gptq_block is some 125 launches, which took Python 3 ms, 5.5 s a layer of 7B (H200).
    """
    if not inputs[0].is_cuda:
        return step
    held = [x.clone() for x in inputs]
    step(*held)                                  # loads kernels and constants: a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*held)

    def replay(*inputs):
        for mine, given in zip(held, inputs):
            mine.copy_(given)
        graph.replay()
        return results

    return replay


def gptq_columns(w, hessian, global_scale, code_block):
    """w (K, N): a column of W is a row here, so that what is read together lies together.

    -> codes uint8 (K, N), E4M3 codes of the block scales uint8 (K // 16, N); w is overwritten.
    """
    U = inverse_factor(hessian)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = codes.new_empty(len(w) // 16, w.shape[1])
    for start in range(0, len(w), COLUMNS):
        end = min(start + COLUMNS, len(w))
        errors = torch.empty_like(w[start:end])
        for i in range(start, end, 16):
            block = slice(i, i + 16)
            codes[block], scales[i // 16], error = code_block(w[block], U[block, block],
                                                              global_scale)
            errors[i - start:i - start + 16] = error
            w[i + 16:end] -= U[block, i + 16:end].T @ error
        w[end:] -= U[start:end, end:].T @ errors
    return codes, scales


def inverse_factor(hessian):
    """U (K, K), upper triangular, U.T @ U = (H + damping)^-1, without computing an inverse: of H
    with rows and columns in reverse, L @ L.T, U is L^-1 in reverse. In float64: fp32 found the H of
    a 0.5B's down, of sums by bf16 matmuls, not positive.
    """
    damped = hessian.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=1e-10))
    L = torch.linalg.cholesky(damped.flip(0, 1))
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(0, 1).float()


@cache
def constants(device):
    """Levels, edges, offsets (C, 1). Kept: a CUDA graph may not copy from the CPU."""
    return LEVELS.to(device), EDGES.to(device), torch.tensor(nvfp4.OFFSETS, device=device)[:, None]


def gptq_block(w, U, global_scale):
    """16 columns w (16, N), their part of U -> codes (16, N), E4M3 codes (N,) of the best scales,
    errors (16, N) that the columns to come have to make up for.
    """
    levels, edges, offsets = constants(w.device)
    first = nvfp4.e4m3_codes(w.abs().amax(0) / 6, 1 / global_scale)
    tried = (first + offsets).clamp(1, 126)                      # (C, N)
    scale = nvfp4.e4m3_value(tried) * global_scale
    diagonal = U.diagonal()
    along = (U / diagonal[:, None])[..., None, None]
    rest = w[:, None].repeat(1, len(scale), 1)                   # (16, C, N)
    values = torch.empty_like(rest)                              # in units of the scale
    errors = torch.empty_like(rest)
    columns = zip(rest.unbind(), values.unbind(), errors.unbind())
    for i, (column, value, error) in enumerate(columns):
        torch.take(levels, torch.bucketize(column / scale, edges), out=value)
        torch.addcmul(column, value, scale, value=-1, out=error)
        rest[i + 1:].addcmul_(error, along[i, i + 1:], value=-1)
    errors /= diagonal[:, None, None]
    best = errors.square().sum(0).argmin(0)                      # of equal ones the first
    at = best.expand(16, 1, -1)
    codes = nvfp4.e2m1_codes(values.gather(1, at)[:, 0])
    return codes, tried.gather(0, best[None])[0], errors.gather(1, at)[:, 0]


def output_error(w, tensors, hessian):
    """tr((W - W4) H (W - W4).T), a float."""
    wrong = w.float() - nvfp4.dequantize(*tensors, dtype=torch.float32)
    return ((wrong @ hessian) * wrong).sum().clamp(min=0).item()


# -----------------------------------------------------------------------------
# A model, layer by layer

class Text(NamedTuple):
    tokens: list                                 # ids, of a prompt and an answer
    start: int                                   # of the answer


def own_answers(folder, tokenizer, problems, device, max_new_tokens=512, seed=0, kernels="auto"):
    """-> a Text for each data.Problem: what the model, rounded, answers at temperature 1."""
    if len(problems) < 2:
        raise ValueError(f"--calibrate takes at least 2 problems, one to measure by, "
                         f"got {len(problems)}")
    model = qwen.load(folder, "nvfp4", device, live_vocab=tokenizer.vocab_size)
    prompts = [p.prompt for p in problems]
    longest = max(map(len, prompts)) + max_new_tokens
    sampler = Sampler(engine_for(device, kernels), model, longest, min(256, len(prompts)))
    rollouts = sampler.generate(prompts, 1, Sampling(max_new_tokens, tokenizer.end_ids, seed=seed))
    del model, sampler
    gc.collect()                                 # an engine and its graphs are a circle
    return [Text(prompt + answer, len(prompt))
            for prompt, answer in zip(rollouts.prompts, rollouts.completions)]


class Chunk:
    """Some texts, laid out as the learner's rows, on their way through the layers.

    exact, coded (T, D) fp32: hidden states of the 16-bit model and of the one with new codes.
    """

    def __init__(self, texts, embed, config):
        self.texts = texts
        tokens, lengths, branches, predictors = lay_out(*zip(*texts))
        self.predictors = torch.tensor(predictors, device=embed.device)
        self.attend = PackedAttention(lengths, embed.device, branches)
        self.rope = qwen.rope_table(self.attend.positions, config)
        self.exact = embed[torch.tensor(tokens, device=embed.device)].float()
        self.coded = self.exact.clone()

    def through(self, layer, hidden):
        """What a model.Layer makes of hidden states (T, D)."""
        return layer(hidden, *self.rope, self.attend)


def chunks_of(texts, embed, config):
    """-> Chunks of at most TOKENS tokens, or of one text."""
    parts = []
    room = 0
    for text in texts:
        room -= len(text.tokens)
        if room < 0 or not parts:
            parts.append([])
            room = TOKENS - len(text.tokens)
        parts[-1].append(text)
    return [Chunk(part, embed, config) for part in parts]


def linears_of(layer):
    return layer.qkv, layer.o, layer.gate_up, layer.down


@contextmanager
def listening(layer, hear):
    """Within: hear(linear, x) for each linear of a model.Layer whenever it multiplies an x (T, K).

    qkv and gate_up are given x * w of the norm before them, and the layer multiplies their result
    by 1/rms(x) (see model.py). As an error of W counts in that result, x comes here with its 1/rms:
    the norm's forward hook keeps the factor, which is at hand when the linear's turn comes.

    Torch's own hooks would not do for the linears: ops.mlp calls product() of gate_up and down, not
    their forward(). Hence Linear.on_input, which sits in product().
    """
    norm_before = {layer.qkv: layer.input_norm, layer.gate_up: layer.post_norm}
    rstd = {}                                                    # norm -> its latest 1/rms (T, 1)

    def keep_rstd(norm, _, output):
        _, rstd[norm] = output

    def listener(linear):
        def on_input(x):
            if linear in norm_before:
                x = (x * rstd[norm_before[linear]]).to(x.dtype)
            hear(linear, x)
        return on_input

    hooks = [norm.register_forward_hook(keep_rstd) for norm in norm_before.values()]
    for linear in linears_of(layer):
        linear.on_input = listener(linear)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for linear in linears_of(layer):
            linear.on_input = None


def hessians(layer, chunks):
    """Moves the exact stream through a layer -> H (K, K) fp32 of each of its four linears."""
    sums = {linear: torch.zeros(linear.weight.K, linear.weight.K, device=linear.weight.device)
            for linear in linears_of(layer)}
    with listening(layer, lambda linear, x: add_upper(sums[linear], x.float())):
        for chunk in chunks:
            chunk.exact = chunk.through(layer, chunk.exact)
    tokens = sum(len(chunk.exact) for chunk in chunks)
    for total in sums.values():
        total /= tokens
        for i in range(0, len(total), TILE):
            total[i + TILE:, i:i + TILE] = total[i:i + TILE, i + TILE:].T
    return list(sums.values())


def add_upper(total, x):
    """total (K, K) += x.T @ x, x (T, K), but for the tiles below the diagonal: with them it is
    32 TFLOP of fp32 for the down of one layer of 7B and 45,000 tokens.
    """
    for i in range(0, len(total), TILE):
        total[i:i + TILE, i:].addmm_(x[:, i:i + TILE].T, x[:, i:])


def best_codes(w, hessian, scale):
    """GPTQ's, where they beat the search's and rounding to nearest on the outputs."""
    found = [gptq(w, hessian, scale), nvfp4.quantize(w, scale, hessian.diagonal()),
             nvfp4.quantize(w, scale, offsets=[0])]
    return min(found, key=lambda tensors: output_error(w, tensors, hessian))


CODES = {
    "gptq": best_codes,
    "weighted": lambda w, hessian, scale: nvfp4.quantize(w, scale, hessian.diagonal()),
    "search": lambda w, hessian, scale: nvfp4.quantize(w, scale),
    "nearest": lambda w, hessian, scale: nvfp4.quantize(w, scale, offsets=[0]),
}


def source_of(folder, device):
    """A 16-bit Qwen2.5 folder -> hf.ModelFolder. ValueError if it cannot be held as NVFP4."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if hf.read_qwen2(folder / "config.json").get("quantization_config"):
        raise ValueError(f"{folder}/config.json: has a quantization_config: it is quantized "
                         "already")
    files = hf.ModelFolder(folder, "bf16", device, dtype)
    for key in ("hidden_size", "intermediate_size"):
        if files.config[key] % 16:
            raise ValueError(f"{folder}/config.json: {key} is {files.config[key]}, not a multiple "
                             "of 16")
    c = qwen.ModelConfig.from_json(files.config)
    files.check("model.embed_tokens.weight", (c.vocab, c.width))     # those that no layer reads
    files.check("model.norm.weight", (c.width,))
    if not c.tied:
        files.check("lm_head.weight", (c.vocab, c.width))
    return files


def to_nvfp4(files, out, codes="search", texts=(), live_vocab=None):
    """source_of() -> the new folder `out` as compressed-tensors writes NVFP4; lm_head and embedding
    stay bf16. codes, texts: of coded_linears(). What they measure stays in config.json, as
    `calibration`, and is said again where the folder is read.
    """
    about = {"quantization_config": hf.NVFP4_CONFIG}
    linears = tuple(f"{name}.weight" for name in hf.TARGETS)

    def tensors():
        for name in files.names:
            if not name.endswith(linears):
                yield name, files.read(name).bfloat16().cpu()
        for name, coded in coded_linears(files, codes, texts, live_vocab, about):
            yield from hf.nvfp4_tensors(name, *coded)

    hf.save_model(tensors(), files.folder, out, about)


@torch.no_grad()
def coded_linears(files, codes, texts, live_vocab, about):
    """Yields (name of a linear, quantize's tensors) of a 16-bit hf.ModelFolder, layer by layer.

    codes: of CODES. texts: of Text; without them "search" and "nearest" alone have what they need.
    Their last eighth measures: its KL is said and becomes about["calibration"].
    """
    config = qwen.ModelConfig.from_json(files.config)
    chunks = []
    measured = []
    if texts:
        embed = files.read("model.embed_tokens.weight", config.vocab, config.width).to(files.dtype)
        held_out = texts[-math.ceil(len(texts) / 8):]
        chunks = chunks_of(texts[:-len(held_out)], embed, config)
        measured = chunks_of(held_out, embed, config)
    scratch = Scratch()
    for i in tqdm(range(config.layers), unit="layer"):
        layer = qwen.Layer(config, i, files.read, files.frozen, files.dtype, scratch)
        weights = [torch.cat([files.read(f"{name}.weight") for name in linear.names]).float()
                   for linear in linears_of(layer)]   # a float16 file's are finer than the layer's
        of_inputs = hessians(layer, chunks) if texts else [None] * 4
        for chunk in measured:
            chunk.exact = chunk.through(layer, chunk.exact)
        for linear, w, hessian in zip(linears_of(layer), weights, of_inputs):
            tensors = CODES[codes](w, hessian, nvfp4.global_scale_for(w))
            linear.weight = nvfp4.fuse([tensors], files.dtype)
            packed, block_scale, global_scale = tensors
            parts = zip(linear.names, packed.split(linear.parts), block_scale.split(linear.parts))
            yield from ((name, (p, s, global_scale)) for name, p, s in parts)
        for chunk in [*chunks, *measured]:
            chunk.coded = chunk.through(layer, chunk.coded)
    if texts:
        norm = qwen.RMSNorm(files.read("model.norm.weight", config.width), config.eps, files.dtype)
        head = embed
        if not config.tied:
            head = files.read("lm_head.weight", config.vocab, config.width).to(files.dtype)
        kl, error, tokens = divergence(measured, norm, head[:live_vocab])
        about["calibration"] = (f"KL(16 bits || {codes}) {kl:.3g} +- {error:.2g} nats a token, "
                                f"{len(held_out)} answers of {tokens:,} tokens that no code was "
                                "chosen by")
        tqdm.write(about["calibration"])


def divergence(chunks, norm, head):
    """-> KL(exact || coded), nats a token of the answers; its standard error; how many tokens."""
    sums = []
    for chunk in chunks:
        of_token = torch.cat([token_divergence(chunk, part, norm, head)
                              for part in chunk.predictors.split(512)])
        sizes = [len(text.tokens) - text.start for text in chunk.texts]
        sums += [(part.sum().item(), len(part)) for part in of_token.split(sizes)]
    total, tokens = (sum(column) for column in zip(*sums))
    kl = total / tokens
    n = len(sums)
    variance = sum((part - kl * size) ** 2 for part, size in sums) * n / max(n - 1, 1)
    return kl, variance ** 0.5 / tokens, tokens


def token_divergence(chunk, at, norm, head):
    logprobs = []
    for hidden in (chunk.exact, chunk.coded):
        xw, rstd = norm(hidden[at])
        logprobs.append((mm_fp32(xw, head.T) * rstd).log_softmax(-1))
    exact, coded = logprobs
    return (exact.exp() * (exact - coded)).sum(-1)
