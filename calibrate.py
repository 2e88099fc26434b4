"""
Chooses NVFP4 codes by data: GPTQ (arXiv 2210.17323), layer by layer, in the memory of one layer.

    python -m tools.convert nvfp4 SRC OUT --calibrate 128      makes a folder
    python train.py --calibrate 128                            trains on one that it makes

What for. Rounding to nearest makes the error of the weights small. What the policy feels is the
error of the outputs, x @ (W - W4).T. Let H = X.T @ X / T, where X are the inputs of W for the T
tokens of some texts. Then the squared error of a token's outputs is on average
    tr((W - W4) H (W - W4).T)
which is small where the errors of correlated inputs cancel.

GPTQ, for one row w of W (rows do not affect each other, and go together). Go through the columns
from left to right:
    1. round w[i] to a code; e = w[i] - its value
    2. for every column j > i, not rounded yet:   w[j] -= e * U[i, j] / U[i, i]
where U is upper triangular and U.T @ U = H^-1. Step 2 is the change of the columns to come that
makes up for e best: where inputs i and j are correlated, w[j] takes over what w[i] got wrong. What
no change can make up for is (e / U[i, i])^2, the cost of this rounding.

Block scales. The 16 columns of a scale_block are rounded with each scale of nvfp4's search, every
time through steps 1 and 2, and the scale of the least total cost stays. Format, kernels and the
power-of-two tensor scale are those of nvfp4.py: only codes and block scales come out differently.

The order of the work, for speed. Step 2 on all columns to come would be a small operation on a
large matrix, for every column. So corrections are held back and applied together:

    columns of W     rounded   | 16 | 16 | 16 | ... | 16 |   all columns after
                               |<-- a panel of 128 -->|

    what is corrected          when
    the rest of the 16         after each column, for every scale that is tried
    the rest of the panel      after each scale_block
    all columns after it       after each panel: one matmul with 128 columns of errors

The texts are the model's own answers to training problems, written with codes that were found by
search, and never answers to problems that measure it. Two streams of hidden states go through the
layers together: `exact` through the 16-bit layers, where it also gives H; `coded` through the new
ones. At the end both predict the tokens of the last eighth of the texts, which no H has seen. KL(16
bits || 4 bits) of these predictions, in nats a token, is the measure of a folder.

Not here: act-order (the layout has no g_idx), Hadamard rotations (blocks of 16 leave little to
equalise), AWQ (it would move the norms, which AQN perturbs).

Shapes: T tokens of all texts, D width, N out_features, K in_features, C candidates of a scale.
"""
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import model as qwen
import nvfp4
from attention import PackedAttention, lay_out
from files import UserError, counted
from lora import Linear, Scratch
from ops import mm_fp32
from prompts import Tokenizer
from sampler import Sampler, Sampling, engine_for
from tasks.problems import Problem, problems_at
from weights import (
    NVFP4_CONFIG,
    TARGETS,
    ModelFolder,
    WeightReader,
    files_to_copy,
    nvfp4_tensors,
    save_model,
)

DAMPING = 0.02                                   # x the mean of H's diagonal, added to the diagonal
PANEL = 128                                      # columns between two updates of all that follow
# A wider H is treated as several, without the correlations between them: a float64 inverse factor
# of the down of 7B, which has 18,944 columns, would be 2.9 GB.
LARGEST_HESSIAN = 8192
HESSIAN_TILE = 2048                              # rows of H that one product adds to
CHUNK_TOKENS = 8192                              # tokens of texts in one forward

LEVELS = nvfp4.E2M1_SIGNED.unique()              # the 15 values from -6 to 6, in order
LEVEL_EDGES = (LEVELS[1:] + LEVELS[:-1]) / 2


# -----------------------------------------------------------------------------
# One linear

Nvfp4Tensors = tuple[Tensor, Tensor, Tensor]    # as nvfp4.quantize returns them


def gptq(w: Tensor, hessian: Tensor, global_scale: Tensor) -> Nvfp4Tensors:
    """Quantize w (N, K) fp32 for inputs whose H is `hessian` (K, K) fp32.

    K is a multiple of 16. It returns what nvfp4.quantize returns, though that function does not
    know the inputs. torch.linalg.LinAlgError if the damped H is not positive definite.
    """
    pieces = []
    code_block = recorded(gptq_block, torch.ones(16, len(w), device=w.device),
                          torch.eye(16, device=w.device), global_scale)
    for start in range(0, w.shape[1], LARGEST_HESSIAN):
        piece = slice(start, start + LARGEST_HESSIAN)
        columns = w[:, piece].T.clone(memory_format=torch.contiguous_format)
        pieces.append(gptq_columns(columns, hessian[piece, piece], global_scale, code_block))
    codes, scales = (torch.cat(part).T.contiguous() for part in zip(*pieces))
    return nvfp4.pack_pairs(codes), scales.view(torch.float8_e4m3fn), global_scale


def recorded(function: Callable, *inputs: Tensor) -> Callable:
    """On a GPU, record a function of tensors as a CUDA graph; on a CPU return it as it is.

    inputs: tensors of the shapes that it will be called with. The graph's results are overwritten
    by the next call. gptq_block is about 125 launches, for which Python needs 3 ms: without a graph
    they take 5.5 s of each layer of Qwen2.5-7B (H200).
    """
    if not inputs[0].is_cuda:
        return function
    held = [x.clone() for x in inputs]
    function(*held)                      # loads kernels and constants, which a capture may not do
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(*held)

    def replay(*inputs):
        for recorded_input, new in zip(held, inputs):
            recorded_input.copy_(new)
        graph.replay()
        return results

    return replay


def gptq_columns(w: Tensor, hessian: Tensor, global_scale: Tensor,
                 code_block: Callable) -> tuple[Tensor, Tensor]:
    """GPTQ's walk over the columns of W, in the order drawn at the top of this file.

    w (K, N) is W transposed: what is read together, a column of W, lies together in memory. It is
    overwritten. code_block: gptq_block. -> codes uint8 (K, N), E4M3 codes of the block scales uint8
    (K // 16, N).
    """
    U = inverse_factor(hessian)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = codes.new_empty(len(w) // 16, w.shape[1])
    for start in range(0, len(w), PANEL):
        end = min(start + PANEL, len(w))
        errors = torch.empty_like(w[start:end])
        for i in range(start, end, 16):
            block = slice(i, i + 16)
            codes[block], scales[i // 16], error = code_block(w[block], U[block, block],
                                                              global_scale)
            errors[i - start:i - start + 16] = error
            w[i + 16:end] -= U[block, i + 16:end].T @ error      # the rest of the panel
        w[end:] -= U[start:end, end:].T @ errors                 # all columns after it
    return codes, scales


def inverse_factor(hessian: Tensor) -> Tensor:
    """U (K, K) fp32, upper triangular, with U.T @ U = (H + damping)^-1.

    No inverse is computed, which would lose digits. Let P reverse the order of rows. Cholesky gives
    P H P = L @ L.T, so H^-1 = (P L^-1 P).T @ (P L^-1 P), and P L^-1 P is upper triangular: it is U.
    In float64, and of an H that was summed in fp32: summed by bf16 matmuls and factored in fp32,
    the H of a 0.5B's down was not positive.
    """
    damped = hessian.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=1e-10))
    L = torch.linalg.cholesky(damped.flip(0, 1))
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(0, 1).float()


@cache
def constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """LEVELS, LEVEL_EDGES and nvfp4.OFFSETS (C, 1) on a device.

    They are made once, because a CUDA graph may not copy them from the CPU.
    """
    offsets = torch.tensor(nvfp4.OFFSETS, device=device)[:, None]
    return LEVELS.to(device), LEVEL_EDGES.to(device), offsets


def gptq_block(w: Tensor, U: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One scale_block of every row: try all its scales, keep each row's best.

    w (16, N): 16 columns of W; U (16, 16): their part of U -> codes uint8 (16, N), E4M3 codes of
    the scales (N,), and e / U[i, i] (16, N), from which the columns to come are corrected.
    """
    levels, edges, offsets = constants(w.device)
    usual = nvfp4.e4m3_codes(w.abs().amax(0) / 6, 1 / global_scale)
    tried = (usual + offsets).clamp(1, 126)                      # (C, N)
    scale = nvfp4.e4m3_value(tried) * global_scale
    diagonal = U.diagonal()
    passed_on = (U / diagonal[:, None])[..., None, None]         # U[i, j] / U[i, i]
    rest = w[:, None].repeat(1, len(scale), 1)                   # (16, C, N): a copy for each scale
    values = torch.empty_like(rest)                              # decoded, in units of the scale
    errors = torch.empty_like(rest)
    columns = zip(rest.unbind(), values.unbind(), errors.unbind())
    for i, (column, value, error) in enumerate(columns):
        torch.take(levels, torch.bucketize(column / scale, edges), out=value)      # step 1
        torch.addcmul(column, value, scale, value=-1, out=error)                   # e
        rest[i + 1:].addcmul_(error, passed_on[i, i + 1:], value=-1)               # step 2
    errors /= diagonal[:, None, None]                            # squared: the cost of a rounding
    best = errors.square().sum(0).argmin(0)                      # (N,); of equal ones the first
    at = best.expand(16, 1, -1)
    codes = nvfp4.e2m1_codes(values.gather(1, at)[:, 0])
    return codes, tried.gather(0, best[None])[0], errors.gather(1, at)[:, 0]


def output_error(w: Tensor, tensors: Nvfp4Tensors, hessian: Tensor) -> float:
    """The squared error of a token's outputs, on average: tr((W - W4) H (W - W4).T)."""
    wrong = w.float() - nvfp4.dequantize(*tensors, dtype=torch.float32)
    return ((wrong @ hessian) * wrong).sum().clamp(min=0).item()


# -----------------------------------------------------------------------------
# A model, layer by layer

def write_calibrated(source: ModelFolder, out: Path, tokenizer: Tokenizer,
                     problems: list[Problem], count: int, device: torch.device,
                     kernels: str | None, codes: str = "gptq", max_new_tokens: int = 512,
                     seed: int = 0) -> int:
    """Write the 16-bit model in `source` to the new folder `out` in NVFP4, with codes chosen by its
    own answers to `count` of the problems, or to all if they are fewer -> how many it answered.

    device, kernels: what harness.setup.choose_device returned. codes: a name in CODES. seed: of
    the choice of problems and of the answers.
    """
    files = source_of(source, device)            # refuses what cannot be written before any answer
    some = problems_at(problems, seed, range(min(count, len(problems))))
    texts = own_answers(source, tokenizer, some, device, kernels, max_new_tokens, seed)
    to_nvfp4(files, out, codes, texts, tokenizer.vocab_size)
    return len(some)


class Text(NamedTuple):
    """A prompt and the model's answer."""
    tokens: list[int]
    start: int                                   # where the answer begins


def own_answers(folder: ModelFolder, tokenizer: Tokenizer, problems: list[Problem],
                device: torch.device, kernels: str | None, max_new_tokens: int, seed: int
                ) -> list[Text]:
    """Texts to calibrate by: the answers, at temperature 1, of the model rounded to NVFP4.

    UserError for fewer than two problems.
    """
    if len(problems) < 2:
        raise UserError(f"--calibrate takes at least 2 problems, one to measure by, "
                        f"got {len(problems)}")
    model = qwen.load(folder, "nvfp4", device, live_vocab=tokenizer.vocab_size)
    prompts = [p.prompt for p in problems]
    longest = max(map(len, prompts)) + max_new_tokens
    sampler = Sampler(engine_for(kernels), model, longest, min(256, len(prompts)))
    rollouts = sampler.generate(prompts, 1, Sampling(max_new_tokens, tokenizer.end_ids, seed=seed))
    del model, sampler
    gc.collect()                                 # an engine and its graphs refer to each other
    return [Text(prompt + answer, len(prompt))
            for prompt, answer in zip(rollouts.prompts, rollouts.completions)]


class Chunk:
    """Some texts, packed as the learner packs rows, on their way through the layers.

    exact, coded (T, D) fp32: hidden states in the 16-bit model and in the one with new codes.
    """

    def __init__(self, texts: list[Text], embed: Tensor, config: qwen.ModelConfig):
        self.texts = texts
        tokens, lengths, branches, predictors = lay_out(*zip(*texts))
        self.predictors = torch.tensor(predictors, device=embed.device)
        self.attend = PackedAttention(lengths, embed.device, branches)
        self.rope = qwen.rope_table(self.attend.positions, config)
        self.exact = embed[torch.tensor(tokens, device=embed.device)].float()
        self.coded = self.exact.clone()

    def through(self, layer: qwen.Layer, hidden: Tensor) -> Tensor:
        """What a model.Layer makes of hidden states (T, D)."""
        return layer(hidden, *self.rope, self.attend)


def chunks_of(texts: Sequence[Text], embed: Tensor, config: qwen.ModelConfig) -> list[Chunk]:
    """Texts in their order as Chunks of at most CHUNK_TOKENS tokens; a longer text is one alone."""
    parts = []
    tokens_left = 0
    for text in texts:
        tokens_left -= len(text.tokens)
        if tokens_left < 0 or not parts:
            parts.append([])
            tokens_left = CHUNK_TOKENS - len(text.tokens)
        parts[-1].append(text)
    return [Chunk(part, embed, config) for part in parts]


def linears_of(layer: qwen.Layer) -> tuple[Linear, Linear, Linear, Linear]:
    """The four linears, in the order in which the layer computes them."""
    return layer.qkv, layer.o, layer.gate_up, layer.down


@contextmanager
def listening(layer: qwen.Layer, hear: Callable[[Linear, Tensor], None]) -> Iterator[None]:
    """Within: hear(linear, x) for each linear of a model.Layer whenever it multiplies an x (T, K).

    qkv and gate_up are given x * w of the norm before them, and the layer multiplies their result
    by 1/rms (see model.py). The errors of W are multiplied by it too, so hear() is given x with its
    1/rms. A forward hook on the norm keeps that factor until the linear is computed.

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


def hessians(layer: qwen.Layer, chunks: Sequence[Chunk]) -> list[Tensor]:
    """Move the exact stream through a layer -> H (K, K) fp32 of each of linears_of(layer)."""
    sums = {linear: torch.zeros(linear.weight.K, linear.weight.K, device=linear.weight.device)
            for linear in linears_of(layer)}
    with listening(layer, lambda linear, x: add_upper(sums[linear], x.float())):   # not in bf16
        for chunk in chunks:
            chunk.exact = chunk.through(layer, chunk.exact)
    tokens = sum(len(chunk.exact) for chunk in chunks)
    for total in sums.values():
        total /= tokens
        for i in range(0, len(total), HESSIAN_TILE):             # the lower triangle is its mirror
            end = i + HESSIAN_TILE
            total[end:, i:end] = total[i:end, end:].T
    return list(sums.values())


def add_upper(total: Tensor, x: Tensor) -> None:
    """total (K, K) += x.T @ x for x (T, K) fp32, except for tiles below the diagonal.

    They hold the same numbers, and all of x.T @ x is 32 TFLOP of fp32 for the down of one layer of
    Qwen2.5-7B and 45,000 tokens.
    """
    for i in range(0, len(total), HESSIAN_TILE):
        end = i + HESSIAN_TILE
        total[i:end, i:].addmm_(x[:, i:end].T, x[:, i:])


def best_codes(w: Tensor, hessian: Tensor, scale: Tensor) -> Nvfp4Tensors:
    """The codes of least output error: GPTQ's, the search's or those of rounding to nearest.

    GPTQ decides column after column and cannot go back, so in rare cases it loses.
    """
    found = [gptq(w, hessian, scale), nvfp4.quantize(w, scale, hessian.diagonal()),
             nvfp4.quantize(w, scale, offsets=[0])]
    return min(found, key=lambda tensors: output_error(w, tensors, hessian))


CODES = {                                        # by --codes of tools/convert.py
    "gptq": best_codes,
    "weighted": lambda w, hessian, scale: nvfp4.quantize(w, scale, hessian.diagonal()),
    "search": lambda w, hessian, scale: nvfp4.quantize(w, scale),
    "nearest": lambda w, hessian, scale: nvfp4.quantize(w, scale, offsets=[0]),
}


def source_of(folder: ModelFolder, device: torch.device) -> WeightReader:
    """Open a folder of a 16-bit model. UserError if it is quantized, or if a file beside the
    weights cannot be copied.
    """
    folder.download()
    files_to_copy(folder.path)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if folder.config.get("quantization_config"):
        raise UserError(f"{folder.path}/config.json: has a quantization_config: it is quantized "
                        "already")
    files = WeightReader(folder, "bf16", device, dtype)
    c = qwen.ModelConfig.from_json(files.config)
    files.check("model.embed_tokens.weight", (c.vocab, c.width))     # no layer reads these three
    files.check("model.norm.weight", (c.width,))
    if not c.tied:
        files.check("lm_head.weight", (c.vocab, c.width))
    return files


def to_nvfp4(files: WeightReader, out: Path, codes: str = "search", texts: Sequence[Text] = (),
             live_vocab: int | None = None) -> None:
    """Write source_of()'s model to the new folder `out` as compressed-tensors writes NVFP4.

    lm_head and embedding stay bf16. codes, texts: see coded_linears(). The KL that the texts
    measure goes into config.json as `calibration`, and is printed whenever the folder is read.
    """
    about = {"quantization_config": NVFP4_CONFIG}
    linears = tuple(f"{name}.weight" for name in TARGETS)

    def tensors():
        for name in files.names:
            if not name.endswith(linears):
                yield name, files.read(name).bfloat16().cpu()
        for name, coded in coded_linears(files, codes, texts, live_vocab, about):
            yield from nvfp4_tensors(name, *coded)

    save_model(tensors(), files.folder, out, about)


@torch.no_grad()
def coded_linears(files: WeightReader, codes: str, texts: Sequence[Text], live_vocab: int | None,
                  about: dict) -> Iterator[tuple[str, Nvfp4Tensors]]:
    """Quantize a model layer by layer: yields the name of each linear and its tensors.

    codes: a name in CODES; "search" and "nearest" do without texts. The last eighth of the texts
    gives no H, but measures: the KL is printed and written to about["calibration"].
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
    for i in tqdm(range(config.layers), unit="layer", disable=None):
        layer = qwen.Layer(config, i, files.read, files.frozen, files.dtype, scratch)
        weights = [torch.cat([files.read(f"{name}.weight") for name in linear.names]).float()
                   for linear in linears_of(layer)]   # a float16 file's are finer than the layer's
        # 1) The exact stream moves through the 16-bit layer, and gives H on its way.
        layer_hessians = hessians(layer, chunks) if texts else [None] * 4
        for chunk in measured:
            chunk.exact = chunk.through(layer, chunk.exact)
        # 2) Each linear gets its codes.
        for linear, w, hessian in zip(linears_of(layer), weights, layer_hessians):
            tensors = CODES[codes](w, hessian, nvfp4.global_scale_for(w))
            linear.weight = nvfp4.fuse([tensors], files.dtype)
            packed, block_scale, global_scale = tensors
            parts = zip(linear.names, packed.split(linear.parts), block_scale.split(linear.parts))
            yield from ((name, (p, s, global_scale)) for name, p, s in parts)
        # 3) The coded stream moves through the layer with the new codes.
        for chunk in [*chunks, *measured]:
            chunk.coded = chunk.through(layer, chunk.coded)
    if texts:
        norm = qwen.RMSNorm(files.read("model.norm.weight", config.width), config.eps, files.dtype)
        head = embed
        if not config.tied:
            head = files.read("lm_head.weight", config.vocab, config.width).to(files.dtype)
        kl, error, tokens = divergence(measured, norm, head[:live_vocab])
        plus_minus = f" +- {error:.2g}" if len(held_out) > 1 else ""
        about["calibration"] = (f"KL(16 bits || {codes}) {kl:.3g}{plus_minus} nats a token, on "
                                f"the {tokens:,} tokens of {counted(len(held_out), 'answer')} by "
                                "which no code was chosen")
        tqdm.write(about["calibration"])


def divergence(chunks: Sequence[Chunk], norm: qwen.RMSNorm, head: Tensor) -> tuple:
    """How far the coded model's predictions are from the 16-bit model's: -> KL(exact || coded) in
    nats a token of the answers, its standard error, how many tokens.

    Tokens of one answer resemble each other, so the error counts answers: it is that of a ratio,
    the answers' sums of KL over their lengths.
    """
    sums = []                                    # of each answer: KL of its tokens, their number
    for chunk in chunks:
        per_token = torch.cat([token_divergence(chunk, part, norm, head)
                               for part in chunk.predictors.split(512)])
        sizes = [len(text.tokens) - text.start for text in chunk.texts]
        sums += [(part.sum().item(), len(part)) for part in per_token.split(sizes)]
    total, tokens = (sum(column) for column in zip(*sums))
    kl = total / tokens
    n = len(sums)
    variance = sum((part - kl * size) ** 2 for part, size in sums) * n / max(n - 1, 1)
    return kl, variance ** 0.5 / tokens, tokens


def token_divergence(chunk: Chunk, at: Tensor, norm: qwen.RMSNorm, head: Tensor) -> Tensor:
    """At each place `at` (n,), KL of the next token: sum over v of p(v) * (log p(v) - log q(v))."""
    logprobs = []
    for hidden in (chunk.exact, chunk.coded):
        xw, rstd = norm(hidden[at])
        logprobs.append((mm_fp32(xw, head.T) * rstd).log_softmax(-1))
    exact, coded = logprobs
    return (exact.exp() * (exact - coded)).sum(-1)
