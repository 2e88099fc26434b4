"""
Calibrate NVFP4 codes with GPTQ (arXiv 2210.17323), with a few 16-bit layers in memory at a time.

    python -m tools.convert nvfp4 SRC OUT --calibrate 128      writes a calibrated folder
    python train.py --calibrate 128                            calibrates, then trains

Rounding to nearest minimizes the error in the weights, W - W4. But it's the error in the outputs,
x @ (W - W4).T, that changes the policy. Let X (T, K) be W's inputs for the tokens of some texts,
and H = X.T @ X / T. A token's mean squared output error is

    tr((W - W4) H (W - W4).T)

and GPTQ keeps it small by letting the errors of correlated inputs cancel. For each column i of a
row w of W, from left to right (all rows at once):

    1. round w[i] to a code's value; e = w[i] - that value
    2. for every column j > i, not rounded yet:   w[j] -= e * U[i, j] / U[i, i]

U is upper triangular with U.T @ U = H^-1. Step 2 lets the later columns cancel as much of e's
output error as they can: where inputs i and j are correlated, w[j] compensates for the error in
w[i]. What remains costs (e / U[i, i])^2.

Block scales. The 16 columns of a scale_block go through steps 1 and 2 once per scale in nvfp4's
search, and the scale with the lowest total cost wins. The global scale is nvfp4's.

Order. Before a column is rounded, it needs the corrections from all columns to its left. Correcting
all later columns after every column would be slow, so corrections are delayed:

    columns of W     rounded   | 16 | 16 | 16 | ... | 16 |   all columns after
                               |<-- a panel of 128 -->|

    what is corrected          when
    the rest of the 16         after each column, for every scale that is tried
    the rest of the panel      after each scale_block
    all columns after it       after each panel: one matmul with 128 columns of errors

The texts are the model's own answers to training problems, sampled in NVFP4 with nvfp4's codes.
Their hidden states go through the 16-bit layers, which yields H. (Published GPTQ takes H from the
new layers; ours makes each layer follow the 16-bit model, whatever happened in earlier layers.) The
last eighth of the texts is left out of H and also goes through the new layers, to measure the
result: KL(16 bits || 4 bits) of the next-token predictions, in nats per token.

Not here: act-order (the layout has no g_idx), Hadamard rotations (blocks of 16 leave little to
equalize), AWQ (it would change the norms, which AQN perturbs).

Shapes: T tokens of all texts, D hidden size, N out_features, K in_features, L layers that get their
codes at once, C scales to try.
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

import nvfp4
from attention import PackedAttention, lay_out
from files import UserError, counted
from loading import load
from lora import Linear
from model import Layer, ModelConfig, RMSNorm, rope_table
from ops import mm_fp32
from prompts import Tokenizer
from sampler import Sampler, Sampling
from scheduler import half_of_memory
from tasks.problems import Problem, problems_at
from weights import (
    NVFP4_CONFIG,
    TARGETS,
    ModelFolder,
    WeightReader,
    in_16_bits,
    nvfp4_tensors,
    save_model,
)

DAMPING = 0.02                                   # x the mean of H's diagonal, added to the diagonal
PANEL = 128                                      # columns per correction of all that follow
# A wider H is split along its diagonal, which drops the correlations between the parts: in float64,
# each factor for 18,944 columns (7B's down) would take 2.9 GB.
LARGEST_HESSIAN = 8192
CHUNK_TOKENS = 8192                              # tokens of texts in one forward

LEVELS = nvfp4.E2M1_SIGNED.unique()              # the 15 values from -6 to 6, in order
LEVEL_EDGES = (LEVELS[1:] + LEVELS[:-1]) / 2


# -----------------------------------------------------------------------------
# One linear

Nvfp4Tensors = tuple[Tensor, Tensor, Tensor]    # as nvfp4.quantize returns them


def gptq(weights: Sequence[Tensor], hessians: Sequence[Tensor],
         global_scales: Sequence[Tensor]) -> list[Nvfp4Tensors]:
    """Quantize L matrices (N, K) of equal shape, K a multiple of 16, for inputs whose H are
    `hessians` (K, K) fp32, independently but at once: a GPU takes longer to launch the many small
    steps than to do them.

    Returns tensors like nvfp4.quantize's for each. torch.linalg.LinAlgError if a damped H is not
    positive definite.
    """
    pieces = []
    scale = torch.stack([*global_scales])[:, None]
    for start in range(0, weights[0].shape[1], LARGEST_HESSIAN):
        piece = slice(start, start + LARGEST_HESSIAN)
        columns = torch.stack([w[:, piece].T for w in weights], dim=1)
        U = torch.stack([inverse_factor(hessian[piece, piece]) for hessian in hessians])
        pieces.append(gptq_columns(columns, U, scale))
    codes, scales = (torch.cat(part).permute(1, 2, 0).contiguous() for part in zip(*pieces))
    return [(nvfp4.pack_pairs(code), block_scale.view(torch.float8_e4m3fn), global_scale)
            for code, block_scale, global_scale in zip(codes, scales, global_scales)]


def gptq_columns(w: Tensor, U: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """GPTQ over the columns of L matrices W, in the order drawn at the top of this file.

    w (K, L, N) fp32: the W transposed, so that a column of all W is contiguous; it is overwritten.
    U (L, K, K), global_scale (L, 1). -> codes uint8 (K, L, N), E4M3 codes of the block scales uint8
    (K // 16, L, N).
    """
    def correct(later, U, errors):               # later (k, L, N), U (L, j, k), errors (j, L, N)
        later -= (U.mT @ errors.transpose(0, 1)).transpose(0, 1)

    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = codes.new_empty(len(w) // 16, *w.shape[1:])
    for start in range(0, len(w), PANEL):
        end = min(start + PANEL, len(w))
        errors = torch.empty_like(w[start:end])
        for i in range(start, end, 16):
            block = slice(i, i + 16)
            codes[block], scales[i // 16], error = gptq_block(w[block], U[:, block, block],
                                                              global_scale)
            errors[i - start:i - start + 16] = error
            correct(w[i + 16:end], U[:, block, i + 16:end], error)     # the rest of the panel
        correct(w[end:], U[:, start:end, end:], errors)          # all columns after it
    return codes, scales


def inverse_factor(hessian: Tensor) -> Tensor:
    """U (K, K) fp32, upper triangular, with U.T @ U = (H + damping)^-1."""
    # Inverting H would lose digits. Let P reverse the order of rows. Cholesky gives P H P =
    # L @ L.T. P is its own inverse, so H^-1 = (P L^-1 P).T @ (P L^-1 P), and U = P L^-1 P is upper
    # triangular. In float64, because in fp32 H might not be positive definite.
    damped = hessian.double()
    if not damped.isfinite().all():
        raise UserError("--calibrate: activations of the model are not finite; use --calibrate 0")
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=1e-10))
    L = torch.linalg.cholesky(damped.flip(0, 1))
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(0, 1).float()


@cache
def constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """LEVELS, LEVEL_EDGES and nvfp4.OFFSETS (C, 1, 1) on a device."""
    # Cached, because each copy from the CPU would wait for the GPU.
    offsets = torch.tensor(nvfp4.OFFSETS, device=device)[:, None, None]
    return LEVELS.to(device), LEVEL_EDGES.to(device), offsets


def gptq_block(w: Tensor, U: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One scale_block of every row: steps 1 and 2 with each scale, then each row's best.

    w (16, L, N): 16 columns of each W; U (L, 16, 16): their part of each U; global_scale (L, 1) ->
    codes uint8 (16, L, N), E4M3 codes of the scales (L, N), and e / U[i, i] (16, L, N), which
    corrects the later columns.
    """
    levels, edges, offsets = constants(w.device)
    usual = nvfp4.e4m3_codes(w.abs().amax(0) / 6, 1 / global_scale)
    tried = (usual + offsets).clamp(1, 126)                      # (C, L, N)
    scale = nvfp4.e4m3_value(tried) * global_scale
    U = U.movedim(0, -1)[..., None]                              # (16, 16, L, 1)
    diagonal = U.diagonal().movedim(-1, 0)                       # (16, L, 1)
    passed_on = (U / diagonal[:, None])[:, :, None]              # U[i, j] / U[i, i]
    rest = w[:, None].repeat(1, len(scale), 1, 1)                # (16, C, L, N): w for each scale
    values = torch.empty_like(rest)                              # decoded, in units of the scale
    errors = torch.empty_like(rest)
    columns = zip(rest.unbind(), values.unbind(), errors.unbind())
    for i, (column, value, error) in enumerate(columns):
        torch.take(levels, torch.bucketize(column / scale, edges), out=value)      # step 1
        torch.addcmul(column, value, scale, value=-1, out=error)                   # e
        rest[i + 1:].addcmul_(error, passed_on[i, i + 1:], value=-1)               # step 2
    errors /= diagonal[:, None]                                  # squared: the cost
    best = errors.square().sum(0).argmin(0)                      # (L, N); the first wins ties
    at = best.expand(16, 1, -1, -1)
    codes = nvfp4.e2m1_codes(values.gather(1, at)[:, 0])
    return codes, tried.gather(0, best[None])[0], errors.gather(1, at)[:, 0]


def output_error(w: Tensor, tensors: Nvfp4Tensors, hessian: Tensor) -> float:
    """A token's mean squared output error: tr((W - W4) H (W - W4).T)."""
    wrong = w.float() - nvfp4.dequantize(*tensors, dtype=torch.float32)
    return ((wrong @ hessian) * wrong).sum().clamp(min=0).item()


# -----------------------------------------------------------------------------
# A model, layer by layer

def write_calibrated(source: ModelFolder, out: Path, tokenizer: Tokenizer,
                     problems: list[Problem], count: int, device: torch.device, seed: int,
                     max_new_tokens: int = 512) -> None:
    """Write the 16-bit model in `source` to the new folder `out` in NVFP4, with codes calibrated on
    its own answers to `count` of the problems (all if there are fewer).

    seed: picks the problems and samples the answers. UserError for fewer than two problems or a
    quantized source.
    """
    files = source_of(source, device)            # refuses a bad source before sampling
    some = problems_at(problems, seed, range(min(count, len(problems))))
    texts = own_answers(source, tokenizer, some, device, max_new_tokens, seed)
    to_nvfp4(files, out, texts, tokenizer.vocab_size)


class Text(NamedTuple):
    """A prompt and the model's answer."""
    tokens: list[int]
    start: int                                   # where the answer begins


def own_answers(folder: ModelFolder, tokenizer: Tokenizer, problems: list[Problem],
                device: torch.device, max_new_tokens: int, seed: int) -> list[Text]:
    """The NVFP4 model's answers at temperature 1. UserError for fewer than two problems."""
    if len(problems) < 2:
        raise UserError(f"--calibrate needs at least 2 problems, one of them to measure with, "
                        f"got {len(problems)}")
    model = load(folder, "nvfp4", device, live_vocab=tokenizer.vocab_size)
    prompts = [p.prompt for p in problems]
    longest = max(map(len, prompts)) + max_new_tokens
    sampler = Sampler(model, longest, min(256, len(prompts)))
    # On a GPU, a graph for each smaller batch would take longer to capture than it saves here.
    sampler.engine.sizes = [sampler.max_rows]
    rollouts = sampler.generate(prompts, 1, Sampling(max_new_tokens, tokenizer.end_ids, seed=seed))
    del model, sampler
    gc.collect()                                 # an engine and its graphs refer to each other
    torch.cuda.empty_cache()                     # does nothing on a CPU
    return [Text(prompt + answer, len(prompt))
            for prompt, answer in zip(rollouts.prompts, rollouts.completions)]


class Chunk:
    """Some texts, packed like the learner's rows, on their way through the layers.

    exact (T, D) fp32: hidden states of the 16-bit model.
    """

    def __init__(self, texts: list[Text], embed: Tensor, config: ModelConfig):
        layout = lay_out(*zip(*texts))
        self.predictors = torch.tensor(layout.predictors, device=embed.device)
        self.attend = PackedAttention(layout.prefixes, embed.device, layout.suffixes)
        self.rope = rope_table(self.attend.positions, config)
        self.exact = embed[torch.tensor(layout.tokens, device=embed.device)].float()

    def through(self, layer: Layer, hidden: Tensor) -> Tensor:
        """Hidden states (T, D) after a model.Layer."""
        return layer(hidden, *self.rope, self.attend)


def chunks_of(texts: Sequence[Text], embed: Tensor, config: ModelConfig) -> list[Chunk]:
    """Texts, in order, as Chunks of at most CHUNK_TOKENS tokens; a longer text goes alone."""
    lists = []
    tokens = CHUNK_TOKENS                        # of the last list: the first text opens a new one
    for text in texts:
        if tokens + len(text.tokens) > CHUNK_TOKENS:
            lists.append([])
            tokens = 0
        lists[-1].append(text)
        tokens += len(text.tokens)
    return [Chunk(texts, embed, config) for texts in lists]


def linears_of(layer: Layer) -> tuple[Linear, Linear, Linear, Linear]:
    """The four linears, in the order the layer computes them."""
    return layer.qkv, layer.o, layer.gate_up, layer.down


@contextmanager
def listening(layer: Layer, hear: Callable[[Linear, Tensor], None]) -> Iterator[None]:
    """A context in which each linear of the layer calls hear(linear, x) on every input x (T, K)."""
    # qkv and gate_up multiply the norm's x * w, and the layer applies 1/rms afterwards (model.py).
    # H needs x * w / rms, so a hook on the norm keeps 1/rms.
    norm_before = {layer.qkv: layer.input_norm, layer.gate_up: layer.post_norm}
    rstd = {}                                                    # norm -> its latest 1/rms (T, 1)

    def keep_rstd(norm, _, output):
        _, rstd[norm] = output

    def hear_input(linear, arguments):
        x, = arguments
        if linear in norm_before:
            x = (x * rstd[norm_before[linear]]).to(x.dtype)
        hear(linear, x)

    hooks = [norm.register_forward_hook(keep_rstd) for norm in norm_before.values()]
    hooks += [linear.register_forward_pre_hook(hear_input) for linear in linears_of(layer)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def hessians(layer: Layer, chunks: Sequence[Chunk]) -> list[Tensor]:
    """Move the exact stream through a layer -> H (K, K) fp32 for each of linears_of(layer)."""
    sums = {linear: torch.zeros(linear.weight.K, linear.weight.K, device=linear.weight.device)
            for linear in linears_of(layer)}

    def add(linear, x):
        # In fp32, since on a GPU H from bf16 products isn't always positive definite.
        x = x.float()
        sums[linear].addmm_(x.T, x)

    with listening(layer, add):
        for chunk in chunks:
            chunk.exact = chunk.through(layer, chunk.exact)
    tokens = sum(len(chunk.exact) for chunk in chunks)
    for total in sums.values():
        total /= tokens
    return list(sums.values())


def best_codes(weights: Sequence[Tensor], hessians: Sequence[Tensor],
               scales: Sequence[Tensor]) -> list[Nvfp4Tensors]:
    """The codes of each matrix with the lowest output error: GPTQ's, the search's or those rounded
    to nearest. Arguments as for gptq().
    """
    # GPTQ can't revise a column, so it sometimes loses.
    best = []
    calibrated = gptq(weights, hessians, scales)
    for w, hessian, scale, tensors in zip(weights, hessians, scales, calibrated):
        found = [tensors, nvfp4.quantize(w, scale, hessian.diagonal()),
                 nvfp4.quantize(w, scale, offsets=[0])]
        best.append(min(found, key=lambda tensors: output_error(w, tensors, hessian)))
    return best


def layers_at_once(layer: Layer) -> int:
    """How many layers like this one get their codes at a time: as many as fit half of a GPU's free
    memory; on a CPU, which gains nothing from more, 1.
    """
    weights = [linear.weight for linear in linears_of(layer)]
    if weights[0].device.type != "cuda":
        return 1
    # Each H, and for one linear at a time U and W in fp32: twice all of them, to be safe.
    size = sum(2 * 4 * w.K * (w.K + w.N) for w in weights)
    return max(1, int(half_of_memory(weights[0].device) / size))


def source_of(folder: ModelFolder, device: torch.device) -> WeightReader:
    """Download and open a 16-bit model. UserError if it is quantized."""
    folder.download()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if folder.config.get("quantization_config"):
        raise UserError(f"{folder.path}/config.json: has a quantization_config, so the model is "
                        "already quantized")
    return WeightReader(folder, "bf16", device, dtype)


def to_nvfp4(files: WeightReader, out: Path, texts: Sequence[Text] = (),
             live_vocab: int | None = None) -> None:
    """Write source_of()'s model to the new folder `out` in compressed-tensors' NVFP4; lm_head and
    embedding stay bf16.

    texts: see coded_linears(). config.json gets the KL as `calibration`, which is printed whenever
    the folder is read.
    """
    about = {"quantization_config": NVFP4_CONFIG}
    linears = tuple(f"{name}.weight" for name in TARGETS)

    def tensors():
        for name, coded in coded_linears(files, texts, live_vocab, about):
            yield from nvfp4_tensors(name, *coded)
        files.refuse_unread()
        for name in files.names:
            if not name.endswith(linears):
                yield name, in_16_bits(files.read(name)).cpu()

    save_model(tensors(), files.folder, out, about)


@torch.no_grad()
def coded_linears(files: WeightReader, texts: Sequence[Text], live_vocab: int | None,
                  about: dict) -> Iterator[tuple[str, Nvfp4Tensors]]:
    """Quantize a model, some layers at a time; yields the name of each linear and its tensors.

    With texts, GPTQ chooses the codes, and the KL on the last eighth is printed and stored in
    about["calibration"]. Without texts, nvfp4's search chooses them.
    """
    config = ModelConfig.from_json(files.config)
    chunks = []
    measured = []
    if texts:
        embed = files.read("model.embed_tokens.weight", config.vocab, config.hidden).bfloat16()
        embed = embed.to(files.dtype)
        held_out = texts[-math.ceil(len(texts) / 8):]
        chunks = chunks_of(texts[:-len(held_out)], embed, config)
        measured = chunks_of(held_out, embed, config)
    coded = [chunk.exact for chunk in measured]  # hidden states of the model with new codes

    def read_layer(i):
        return Layer(config, i, files.read, files.frozen, files.dtype)

    at_once = layers_at_once(read_layer(0)) if texts else 1
    for first in tqdm(range(0, config.layers, at_once), unit=counted(at_once, "layer"),
                      disable=None):
        layers = [read_layer(i) for i in range(first, min(first + at_once, config.layers))]
        # 1) The exact stream goes through the 16-bit layers and gives H.
        layer_hessians = []
        for layer in layers:
            layer_hessians.append(hessians(layer, chunks) if texts else [None] * 4)
            for chunk in measured:
                chunk.exact = chunk.through(layer, chunk.exact)
        # 2) Each linear gets its codes, in all these layers at once.
        for linears, their_hessians in zip(zip(*map(linears_of, layers)), zip(*layer_hessians)):
            weights = [torch.cat([files.read(f"{name}.weight") for name in linear.names]).float()
                       for linear in linears]    # float16 is finer than the layer's bf16
            scales = [nvfp4.global_scale_for(w) for w in weights]
            found = (best_codes(weights, their_hessians, scales) if texts else
                     map(nvfp4.quantize, weights, scales))
            for linear, tensors in zip(linears, found):
                packed, block_scale, global_scale = tensors
                row_scale = global_scale.expand(len(packed))
                linear.weight = nvfp4.plain_weight(packed, block_scale, row_scale, files.dtype)
                unfused = zip(linear.names, packed.split(linear.parts),
                              block_scale.split(linear.parts))
                yield from ((name, (p, s, global_scale)) for name, p, s in unfused)
        # 3) The held-out texts go through the layers with the new codes too.
        for layer in layers:
            coded = [chunk.through(layer, hidden) for chunk, hidden in zip(measured, coded)]
    if texts:
        norm = RMSNorm(files.read("model.norm.weight", config.hidden), config.eps, files.dtype)
        head = embed
        if not config.tied:
            head = files.read("lm_head.weight", config.vocab, config.hidden).bfloat16()
            head = head.to(files.dtype)
        kl = torch.cat([token_divergence(chunk.exact[at], hidden[at], norm, head[:live_vocab])
                        for chunk, hidden in zip(measured, coded)
                        for at in chunk.predictors.split(512)])
        about["calibration"] = (f"KL(16 bits || 4 bits) {kl.mean():.3g} nats per token, on the "
                                f"{len(kl):,} tokens of {counted(len(held_out), 'answer')} held "
                                "out of calibration")
        tqdm.write(about["calibration"])


def token_divergence(exact: Tensor, coded: Tensor, norm: RMSNorm, head: Tensor) -> Tensor:
    """KL(exact || coded) of the next token, (n,), from hidden states (n, D) of both models: sum of
    p * (log p - log q).
    """
    logprobs = []
    for hidden in (exact, coded):
        xw, rstd = norm(hidden)
        logprobs.append((mm_fp32(xw, head.T) * rstd).log_softmax(-1))
    p, q = logprobs
    return (p.exp() * (p - q)).sum(-1)
