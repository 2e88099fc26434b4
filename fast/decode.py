"""
The sampler's fast engine: decode steps and short prefills as CUDA graphs, on a GPU.

It replaces sampler.TorchEngine and returns the same numbers, up to the order of fp32 sums.

A decode step of a 7B launches about 260 kernels, and Python takes longer to launch them than the
GPU to run them. So they are captured once, as a graph, and everything between two matmuls is fused
into one kernel from kernels.py, or two around attention:

    embed_kernel                     residual = embed[token]; the first norm
    in every layer
        qkv matmul
        heads_kernel                 slabs, adapter, 1/rms, bias or q/k norms, rotary;
                                     writes the queries and the KV cache
        attention_kernel             the new token's attention to its row's context
        o matmul
        residual_kernel              slabs, adapter, residual += o; the next norm
        gate|up matmul
        swiglu_kernel                slabs, adapter, 1/rms, silu(gate) * up
        down matmul
        residual_kernel              slabs, adapter, residual += down; the next norm
    lm_head matmul
    chunk_kernel, pick_kernel        softmax, the draw; the row's state advances

The rows' state (kernels.RowState) lives on the GPU and is advanced by the last kernel of a step, so
the host reads tokens only once per window of 8 steps.

A graph contains addresses, not values. Adapters, norms and their noise are read in place, so an
optimizer step doesn't require a new capture.

Shapes: n rows (a matmul's M), K in_features, R LoRA rank, V vocabulary, D hidden size, F
intermediate size, H query heads, KV key-value heads, d head size.
"""
import functools
from typing import Callable, Hashable, Iterable

import torch
import triton
from triton.language import constexpr

from fast import kernels
from fast.backward import Spans, attend_spans, scratch_on
from fast.kernels import (
    AttentionPlan,
    LayerCache,
    LogitChunks,
    NextNorm,
    RowSquares,
    RowState,
    SplitSoftmaxes,
    UnfinishedLinear,
)
from files import UserError
from lora import Adapter, Linear
from marlin_fp4 import (
    TILE_SIDE,
    PackedWeight,
    capability,
    expanded_matmul,
    portable_matmul,
    shared_memory_kib,
)
from model import Transformer, rope_frequencies
from ops import PLAIN, mm_fp32
from sampler import DecodeBatch, Sampling, TorchEngine, fill_cache, filter_logits
from scheduler import KV_BLOCK, Prefix, Sequence

# The batch sizes that have a graph, captured when first needed. Other steps get spare rows.
GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 224, 256, 320, 384, 512)
WINDOW = 8              # steps between the host's reads
VOCAB_CHUNK = 2048      # logits per program of chunk_kernel
QUERY_TILE = 16         # queries per program of attention_kernel: the side of an mma.sync
MAX_END_IDS = 16
PREFILL_SIZES = (64, 128, 256, 512, 1024)  # token counts of the prefill graphs
# How much each program of the elementwise kernels does, by the maximum number of rows in the step.
# `columns` doesn't apply to heads_kernel, whose programs take one head each. 128 columns take half
# as many instructions per number as 64, but with 16 rows or fewer they leave too few programs.
PROGRAM_SIZES = {
    # rows: columns, heads (rows, warps), residual (rows, warps), swiglu (rows, warps)
    4: (64, (1, 4), (1, 1), (1, 1)),
    16: (64, (4, 4), (4, 4), (8, 4)),
    64: (128, (4, 4), (4, 8), (16, 4)),
    512: (128, (8, 8), (4, 4), (16, 8)),
}
NARROW_TILE = 64        # columns per program if the rank is too large for 128
assert [*RowState._fields[:6]] == ["siblings" if name == "group" else name
                                   for name in DecodeBatch._fields[:-1]]  # for decode()


def decode_matmul_for(device: torch.device, kernels: str | None = None) -> Callable:
    """The 4-bit matmul for decode steps. kernels: "portable", or None for the faster one here."""
    if kernels == "portable" or capability(device)[0] != 9:
        return portable_matmul
    from fast.hopper_fp4 import hopper_matmul  # Gluon, which no other GPU needs
    return hopper_matmul


def finishing_kib(rank: int, columns: int) -> float:
    """KiB of shared memory that a program of swiglu_kernel needs to finish `columns` of gate|up.

    Gate and up each take a tile of B (R, columns) and 16 rows of x @ A.T, in 16 bits, with R padded
    to a power of two. No other kernel's need grows faster with the rank.
    """
    R = max(16, triton.next_power_of_2(rank))
    return 2 * 2 * R * (columns + 16) / 1024


def check_rank(rank: int, device: torch.device) -> None:
    """UserError if the adapter's rank is too large for the GPU's shared memory."""
    has = shared_memory_kib(capability(device))
    needs = finishing_kib(rank, NARROW_TILE)
    if needs > has:
        fits = max(2**i for i in range(20) if finishing_kib(2**i, NARROW_TILE) <= has)
        raise UserError(f"an adapter of rank {rank} needs {needs:,.0f} KiB of shared memory, but "
                        f"this GPU has {has} KiB: the largest rank that fits is {fits}")


def attention_plan(pairs: int, tile_siblings: int, wide_steps_fit: bool) -> AttentionPlan:
    """How attention_kernel divides a step of `pairs` = rows * key-value heads.

    tile_siblings: how many rows' queries fit in a program's tile. wide_steps_fit: whether a step of
    128 tokens, which takes 128 KiB with heads of size 128, fits in shared memory.
    """
    # 64 pairs or fewer can't occupy an H200's 132 multiprocessors, so several programs share a row.
    # With more pairs, joining their results and idle programs cost more than sharing saves.
    if pairs <= 64:
        splits = min(64, triton.next_power_of_2(triton.cdiv(132, pairs)))
        return AttentionPlan(splits, 1, 4, 32 if wide_steps_fit else 16)
    if pairs <= 132 and wide_steps_fit:
        return AttentionPlan(1, 1, 8, 16)
    if pairs <= 264:
        return AttentionPlan(1, 1, 4, 16)
    # Siblings read their prefix together (FlashInfer's cascade), which pays off once the L2 can't
    # keep up. But each makes its program longer, and two programs per multiprocessor must remain.
    siblings = min(tile_siblings, triton.next_power_of_2(triton.cdiv(pairs, 264)))
    return AttentionPlan(1, siblings, 4, 16)


def launch_matmul(linear: Linear, x: torch.Tensor, decode_matmul: Callable) -> UnfinishedLinear:
    """Launches the linear's matmul with x (n, K), which a kernel in kernels.py finishes.

    decode_matmul: used for few rows and a PackedWeight; everything else uses expanded_matmul.
    """
    R = linear.rank
    a = linear.working_a if R else None
    packed = isinstance(linear.weight, PackedWeight)
    if not packed or linear.weight.expands(len(x)):
        decode_matmul = expanded_matmul
    slabs = decode_matmul(x, linear.weight, a)
    b = linear.working_b if R else slabs.scale  # never read without an adapter
    return UnfinishedLinear(
        slabs.sums, slabs.scale, b, linear.weight.N, slabs.sums.shape[2], slabs.k_tiles,
        slabs.stripe, slabs.a_pieces, constexpr(slabs.sums.shape[0]), constexpr(R))


class GraphStore(dict):
    """key -> a function that replays a CUDA graph.

    All graphs are captured under the same `settings`, which is everything they depend on besides
    the key. When the settings change, they are all dropped.
    """
    settings = None
    pool = None  # memory for activations: one pool for all graphs, since no two run at once
    stream = None  # for captures: one for all graphs, since cuBLAS keeps 32 MiB per stream

    def get_for(self, settings: Hashable, key: Hashable, launch: Callable) -> Callable:
        """The replay of graph `key`, which is captured from launch() if it doesn't exist yet."""
        if settings != self.settings:
            self.clear()
            self.pool = None  # a pool without graphs can't be reused
            self.settings = settings
        if key not in self:
            self[key] = self.capture(launch)
        return self[key]

    def capture(self, launch: Callable) -> Callable:
        """Captures launch() -> the graph's replay. The graph keeps what launch() returns alive:
        tensors that it writes to and nothing else references.
        """
        if not torch.cuda.is_available():  # in Triton's interpreter
            return launch
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())  # which has written launch()'s inputs
        with torch.cuda.stream(self.stream):  # warm-up: compiles kernels, starts cuBLAS
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            graph.kept = launch()
        return graph.replay


class GraphEngine(TorchEngine):
    """sampler.TorchEngine's fast twin. kernels: see decode_matmul_for. UserError if the kernels
    don't support the model's sizes.
    """
    window = WINDOW

    def __init__(
        self, model: Transformer, kv: torch.Tensor, max_rows: int, kernels: str | None = None
    ):
        c = model.config
        if c.head_dim not in (64, 128):
            raise UserError(f"heads of size {c.head_dim}: the GPU kernels support only 64 and 128")
        sizes = c.hidden, c.intermediate, c.heads * c.head_dim
        if any(size % TILE_SIDE for size in sizes):
            raise UserError(f"width, feed-forward and heads x head size are {sizes}: the GPU "
                            f"kernels support only multiples of {TILE_SIDE}")
        if c.heads // c.kv_heads > QUERY_TILE:
            raise UserError(f"{c.heads} query heads for {c.kv_heads} key-value heads: the GPU "
                            f"kernels support at most {QUERY_TILE} for each")
        if model.adapter:
            check_rank(model.adapter.rank, kv.device)
        super().__init__(model, kv, max_rows)
        self.max_rows = max_rows
        self.tile_siblings = QUERY_TILE // (c.heads // c.kv_heads)
        self.sizes = [size for size in GRAPH_ROWS if size < max_rows] + [max_rows]
        pdl = capability(kv.device) >= (9, 0)
        self.pdl = dict(PDL=True, launch_pdl=True) if pdl else dict(PDL=False)
        self.shared_memory = shared_memory_kib(capability(kv.device))
        self.wide_steps_fit = c.head_dim == 64 or self.shared_memory > 128
        self.matmul = functools.partial(decode_matmul_for(kv.device, kernels), pdl=pdl)

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(shape, dtype=dtype, device=kv.device)

        # Graphs read and write these tensors between steps, so their addresses must not change.
        self.rows = zeros(len(RowState._fields), max_rows)
        self.state = RowState(*self.rows)
        self.nobody = zeros(len(RowState._fields), 1)  # a spare row, which reads and writes block 0
        self.nobody[RowState._fields.index("siblings")] = 1
        self.table = None  # (max_rows, width), made at the first call, once the width is known
        self.ends = zeros(MAX_END_IDS)
        self.inv_temperature = zeros(dtype=torch.float32)
        self.tokens = zeros(WINDOW, max_rows)
        self.logprobs = zeros(WINDOW, max_rows, dtype=torch.float32)
        self.counters = zeros(max_rows * c.kv_heads, dtype=torch.int32)
        self.freq = rope_frequencies(c, kv.device)
        self.prefill_inputs = zeros(3, PREFILL_SIZES[-1])  # tokens, blocks, positions
        self.prefill_starts = zeros(PREFILL_SIZES[-1] // KV_BLOCK + 1, dtype=torch.int32)
        self.graphs = GraphStore()  # keys: (rows, greedy)
        self.prefills = GraphStore()  # keys: tokens

    def batch_size(self, n: int) -> int:
        """The rows that a step computes for n running ones: the next larger graph's."""
        return next(size for size in self.sizes if size >= n)

    def attention_plan(self, size: int) -> AttentionPlan:
        """The AttentionPlan for the graph of `size` rows."""
        pairs = size * self.model.config.kv_heads
        return attention_plan(pairs, self.tile_siblings, self.wide_steps_fit)

    def siblings(self, group: torch.Tensor) -> torch.Tensor:
        """RowState.siblings of rows with these group numbers (DecodeBatch), on the CPU."""
        group = group.tolist()
        # Based on the graph's rows, not the running ones: a program computes none past its share.
        most = self.attention_plan(self.batch_size(len(group))).SIBLINGS
        counts = [0] * len(group)
        first = 0
        for row, number in enumerate(group):
            if number != group[first] or row - first == most:
                first = row
            counts[first] += 1
        return torch.tensor(counts)

    def prefill_early(self, prefixes: list[Prefix], waiting: Iterable[Sequence],
                      room: int) -> list[Prefix]:
        """Like TorchEngine.prefill_early: as many as fit into the largest graph, because a GPU
        reads all weights in every prefill, however short.
        """
        # - 1: a graph's spare tokens are a prefix.
        room = min(room, PREFILL_SIZES[-1] // KV_BLOCK - 1 - sum(len(p.blocks) for p in prefixes))
        early = []
        for prefix in (sequence.prefix for sequence in waiting):
            if prefix.missing and prefix not in early:
                room -= prefix.missing
                if room < 0:
                    break
                early.append(prefix)
        return early

    @torch.no_grad()
    def decode(self, batch: DecodeBatch, steps: int,
               sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Like TorchEngine.decode, for at most WINDOW steps."""
        n = len(batch.pos)
        ends = sorted(sampling.end_ids)
        assert len(ends) <= MAX_END_IDS, f"{len(ends)} end ids, at most {MAX_END_IDS}"
        if self.table is None:
            self.table = self.rows.new_zeros(self.max_rows, batch.table.shape[1])
        run = self.graph(self.batch_size(n), sampling)
        batch = batch._replace(group=self.siblings(batch.group).to(batch.group.device))
        columns = len(batch) - 1  # all but the table: see the top
        # One copy to the GPU: each takes longer than this concatenation.
        packed = torch.cat([torch.stack(batch[:-1], dim=1), batch.table], dim=1).to(self.rows)
        self.rows[:columns, :n] = packed[:, :columns].T
        self.table[:n] = packed[:, columns:]
        self.state.alive[:n] = self.state.limit[:n] > self.state.pos[:n]
        self.ends.copy_(torch.tensor(ends + [-1] * (MAX_END_IDS - len(ends))))
        self.inv_temperature.fill_(1 / (sampling.temperature or 1.0))
        for _ in range(steps):
            run()
        tokens = self.tokens[:steps, :n].clone()
        return tokens, self.logprobs[:steps, :n].clone(), self.state.made[:n].clone()

    @torch.no_grad()
    def prefill(self, tokens: torch.Tensor, blocks: torch.Tensor, lengths: list[int]) -> None:
        """Like TorchEngine.prefill. Short prefills are graphs, because launching their 90 kernels
        per layer from Python takes longer than running them.
        """
        # A graph has a fixed number of tokens and prefixes. Spare tokens form one more prefix,
        # which goes to block 0; spare prefixes are empty. The total is only size / 32 prefixes,
        # because FlashAttention launches programs for empty ones too.
        T = len(tokens)
        n = len(lengths)
        size = next((s for s in PREFILL_SIZES if T <= s and n < s // KV_BLOCK), None)
        if size is None or not self.kv.is_cuda or "attend_packed" not in PLAIN:
            return super().prefill(tokens, blocks, lengths)
        packed = torch.zeros(3, size, dtype=torch.int64)
        packed[0, :T] = tokens
        packed[1, :T] = blocks
        packed[2] = torch.cat([torch.arange(length) for length in (*lengths, size - T)])
        starts = torch.full((size // KV_BLOCK + 1,), size)
        starts[:n + 1] = torch.tensor([0, *lengths]).cumsum(0)
        inputs = self.prefill_inputs[:, :size]
        inputs.copy_(packed)
        at = self.prefill_starts[:len(starts)]
        at.copy_(starts)
        spans = Spans(at, at, size, size, causal=True)

        def launch():
            fill_cache(self.model, self.kv, *inputs,
                       lambda q, k, v: attend_spans(q, k, v, spans)[0])
            return scratch_on(self.kv.device).flat  # kept alive: every W is expanded into it

        self.prefills.get_for(self.adapter_key(), size, launch)()

    def graph(self, size: int, sampling: Sampling) -> Callable:
        """The function that runs one step of `size` rows."""
        # Until decode() fills them in, all are spare rows, because capturing a graph runs a step,
        # which must not touch a running row's cache.
        self.rows[:, :size] = self.nobody
        self.table[:size] = 0
        settings = self.adapter_key(), sampling.top_k, sampling.top_p, self.model.live_vocab
        run = self.graphs.get_for(settings, (size, not sampling.temperature),
                                  lambda: self.step(size, sampling))
        self.state.step.zero_()
        return run

    def adapter_key(self) -> Adapter | None:
        """The adapter whose addresses a graph contains, or None if no adapter is on."""
        # Not its address, which another adapter may reuse once this one is freed.
        adapter = self.model.adapter
        return adapter if adapter is not None and adapter.enabled else None

    def step(self, n: int, sampling: Sampling) -> None:
        """Launches the kernels listed at the top of this file: one step of rows [0, n)."""
        model = self.model
        pdl = self.pdl
        c = model.config
        D, F, H, KV, d = c.hidden, c.intermediate, c.heads, c.kv_heads, c.head_dim
        bucket = next((rows for rows in PROGRAM_SIZES if n <= rows), max(PROGRAM_SIZES))
        tile, heads_size, residual_size, swiglu_size = PROGRAM_SIZES[bucket]
        if finishing_kib(model.layers[0].qkv.rank, tile) > self.shared_memory:
            tile = NARROW_TILE
        tiles = D // tile
        plan = self.attention_plan(n)

        def new(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device=self.kv.device)

        resid = new(n, D)
        xw = new(n, D, dtype=model.dtype)  # input of qkv, gate|up and lm_head
        context = new(n, H * d, dtype=model.dtype)  # input of o
        hidden = new(n, F, dtype=model.dtype)  # input of down
        q = new(n, H, d, dtype=model.dtype)
        cos, sin = new(2, n, d // 2)
        per_split = n, H, plan.SPLITS
        splits = SplitSoftmaxes(new(*per_split, d), new(*per_split), new(*per_split), self.counters)
        squares = RowSquares(new(n, tiles), model.final_norm.eps, D, constexpr(tiles))

        def into(norm):
            return NextNorm(norm.weight, norm.noise, xw, squares)

        def add_to_residual(linear, x, norm):
            rows, warps = residual_size
            kernels.residual_kernel[triton.cdiv(n, rows), tiles](
                launch_matmul(linear, x, self.matmul), n, resid, into(norm), tile, rows,
                num_warps=warps, **pdl)

        # Launched without launch_pdl, this kernel starts after the entire previous step. It begins
        # the chain described in kernels.py, in which any kernel may read the rows' state before
        # its wait.
        norms = [layer.input_norm for layer in model.layers] + [model.final_norm]
        kernels.embed_kernel[n, tiles](
            self.state, model.embed, self.freq, resid, cos, sin, into(norms[0]), n, tile, d // 2,
            pdl["PDL"], num_warps=1)
        for layer, kv, next_norm in zip(model.layers, self.kv, norms[1:]):
            cache = LayerCache(kv, kv.stride(0), self.table, self.table.shape[1],
                               *map(constexpr, (KV, KV_BLOCK, d)))
            rows, num_warps = heads_size
            kernels.heads_kernel[triton.cdiv(n, rows), H + 2 * KV](
                launch_matmul(layer.qkv, xw, self.matmul), n, squares,
                kernels.HeadTerms(layer.qkv_bias, layer.qk_gains, constexpr(c.eps)),
                kernels.RotaryTable(cos, sin), q, cache, self.state, H, rows,
                num_warps=num_warps, **pdl)
            kernels.attention_kernel[n, KV, plan.SPLITS](
                q, cache, self.state, context, splits, H, QUERY_TILE, plan, num_warps=plan.WARPS,
                num_stages=4 if plan.SIBLINGS > 1 else 3, **pdl)
            add_to_residual(layer.o, context, layer.post_norm)
            rows, num_warps = swiglu_size
            kernels.swiglu_kernel[triton.cdiv(n, rows), F // tile](
                launch_matmul(layer.gate_up, xw, self.matmul), n, squares, hidden, tile, rows,
                num_warps=num_warps, **pdl)
            add_to_residual(layer.down, hidden, next_norm)
        self.sample(xw, squares, sampling)

    def sample(self, xw: torch.Tensor, squares: RowSquares, sampling: Sampling) -> None:
        """Launches the LM head and the draw. xw: the final norm's x * w (n, D)."""
        n = len(xw)
        V = self.model.live_vocab
        # The full head, although only V of its rows are tokens: cuBLAS couldn't align rows of
        # 151,665 fp32 numbers.
        logits = mm_fp32(xw, self.model.lm_head.T)
        filtered = bool(sampling.top_k or sampling.top_p < 1.0)
        if filtered:  # top-p needs real probabilities, so the scale is applied here
            rstd = torch.rsqrt(squares.sums.sum(1, keepdim=True) / squares.D + squares.eps)
            logits *= rstd * self.inv_temperature
            filter_logits(logits[:, :V], sampling.top_k, sampling.top_p)
        chunks = triton.cdiv(V, VOCAB_CHUNK)
        logits = LogitChunks(logits, logits.stride(0), V, squares, self.inv_temperature,
                             logits.new_empty(n, chunks), logits.new_empty(n, chunks),
                             constexpr(filtered), constexpr(VOCAB_CHUNK))
        kernels.chunk_kernel[n, chunks](logits)
        kernels.pick_kernel[n,](logits, chunks, self.state, self.ends, self.tokens, self.logprobs,
                                self.max_rows, not sampling.temperature,
                                triton.next_power_of_2(chunks), MAX_END_IDS)
