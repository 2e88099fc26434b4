"""
The decode step on a GPU, one new token for every live row, and short prefills as CUDA graphs:
sampler.TorchEngine, the same numbers.

Why: at 7B a step is 4.9 GB of memory traffic, about 1.1 ms, in 260 launches. Python needs 10 us
for a launch and a pass over an activation 3 us, so launches are recorded once and everything
between two matmuls is one kernel of kernels.py:

    embed           residual = embed[token]
    per layer       qkv matmul -> heads_kernel: sum, adapter, 1/rms, bias, rotary, KV cache
                    attention_kernel -> o matmul -> residual_kernel: sum, adapter, residual, norm
                    gate_up matmul -> swiglu_kernel -> down matmul -> residual_kernel
    head            matmul -> chunk_kernel, pick_kernel: softmax, draw, the row's state advances

A row's state lives on the GPU and the last kernel of a step advances it: the host launches a window
of steps and looks afterwards.
Adapters, norms and their noise are read where they are: an optimizer step needs no new capture.

Shapes: n rows (M of a matmul), K in_features, R LoRA rank, V vocabulary, D width, F feed-forward, H
query heads, KV key-value heads, d head size.
"""
import functools

import torch
import triton
from triton.language import constexpr

import marlin_fp4
import portable_fp4
from attention import Spans, attend_spans
from fast import kernels
from fast.kernels import Cache, Logits, Norm, Partial, Runs, Shape, Squares, State
from harness.ranks import capability, kernels_for
from model import FP16_SHIFT
from ops import mm_fp32
from portable_fp4 import shared_memory
from sampler import KV_BLOCK, TorchEngine, fill_cache, filter_logits

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)  # rows of a graph
WINDOW = 8              # steps between two looks of the host
TILE = 128              # columns of a matmul's tile
CHUNK = 2048            # vocabulary entries of one program of the softmax
GROUP = 16              # queries of a tile of attention_kernel
MAX_ENDS = 16           # end ids of a tokenizer
PREFILL_SIZES = (64, 128, 256, 512, 1024)  # tokens of prefills as graphs
MATMULS = {"hopper": marlin_fp4.decode_matmul, "portable": portable_fp4.decode_matmul}
# n up to -> columns of an elementwise program; (rows, warps) of heads_, residual_, swiglu_kernel's.
# With 128 columns a number costs half as many instructions, up to 16 rows too few programs result.
PROGRAMS = {
    4: (64, (1, 4), (1, 1), (1, 1)),
    16: (64, (4, 4), (4, 4), (8, 4)),
    64: (128, (4, 4), (4, 8), (16, 4)),
    512: (128, (8, 8), (4, 4), (16, 8)),
}


def attention_shape(pairs, most_siblings, room):
    """(row, key-value head) pairs of a step -> Shape.

    A step of 128 tokens with heads of 128 takes 128 KiB of shared memory; room: whether they fit.

    A row is cut up only where there are too few of them for 132 multiprocessors: a join costs 2 us,
    programs that find nothing to do 3. A prefix read once for its siblings pays where the L2
    cannot keep up, from 512 pairs on (32B, 64 rows: 30 -> 28 us).
    """
    if pairs <= 64:
        splits = min(64, triton.next_power_of_2(triton.cdiv(132, pairs)))
        return Shape(splits, 1, 4, 32 if room else 16)
    if pairs <= 132 and room:
        return Shape(1, 1, 8, 16)
    if pairs <= 264:
        return Shape(1, 1, 4, 16)
    return Shape(1, most_siblings, 4, 16)


def partial(linear, x, matmul):
    """The linear's matmul of x (n, K), for a kernel to finish; `matmul`: of a packed weight."""
    R = linear.rank
    a = linear.working_a if R else None
    packed = isinstance(linear.weight, marlin_fp4.PackedWeight)
    if not packed or linear.weight.expands(len(x)):
        matmul = marlin_fp4.expanded_matmul
    slabs = matmul(x, linear.weight, a)
    return Partial(slabs.sums, slabs.scale, linear.working_b if R else slabs.scale, linear.weight.N,
                   slabs.sums.shape[2], slabs.KB, slabs.L, constexpr(max(slabs.most)), constexpr(R))


class Graphs(dict):
    """key -> the replay of a CUDA graph, all made for the same `settings`: what they captured must
    stay where it is.
    """
    settings = None
    pool = None  # of activations: graphs never run at once

    def get_for(self, settings, key, launch):
        if settings != self.settings:
            self.clear()
            self.pool = None  # without graphs it cannot be used again
            self.settings = settings
        if key not in self:
            self[key] = self.capture(launch)
        return self[key]

    def capture(self, launch):
        """-> what replays launch(); what that returns lives as long as its graph."""
        if not torch.cuda.is_available():  # Triton's interpreter
            return launch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # compiles, wakes cuBLAS
            stream.wait_stream(torch.cuda.default_stream())
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            graph.kept = launch()
        return graph.replay


class GraphEngine(TorchEngine):
    """TorchEngine in graphs, made as needed."""
    window = WINDOW

    def __init__(self, model, kv, max_rows, kernels="auto"):
        c = model.config
        if c.head_dim not in (64, 128):
            raise ValueError(f"heads of size {c.head_dim}: the GPU's kernels take 64 and 128")
        if c.width % TILE or c.feed_forward % TILE:
            raise ValueError(f"{c.width=}, {c.feed_forward=}: no multiples of {TILE}")
        if c.heads // c.kv_heads > GROUP:
            raise ValueError(f"{c.heads} query heads on {c.kv_heads}: more than {GROUP} on each")
        super().__init__(model, kv, max_rows)
        self.max_rows = max_rows
        self.most_siblings = GROUP // (c.heads // c.kv_heads)
        self.buckets = [size for size in BUCKETS if size < max_rows] + [max_rows]
        pdl = capability(kv.device) >= (9, 0)
        self.room = c.head_dim == 64 or shared_memory(capability(kv.device)) > 128
        self.pdl = dict(PDL=True, launch_pdl=True) if pdl else dict(PDL=False)
        matmul = MATMULS.get(kernels_for(kv.device, kernels))  # None: a CPU packs nothing
        self.matmul = functools.partial(matmul, pdl=pdl) if matmul else None

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(shape, dtype=dtype, device=kv.device)

        self.rows = zeros(len(State._fields), max_rows)
        self.state = State(*self.rows)
        self.nobody = zeros(len(State._fields), 1)  # a row that reads and writes block 0
        self.nobody[State._fields.index("siblings")] = 1
        self.table = None  # (max_rows, width), from the first call on
        self.ends = zeros(MAX_ENDS)
        self.inv_temperature = zeros(dtype=torch.float32)
        self.tokens = zeros(WINDOW, max_rows)
        self.logprobs = zeros(WINDOW, max_rows, dtype=torch.float32)
        self.counters = zeros(max_rows * c.kv_heads, dtype=torch.int32)
        half = torch.arange(0, c.head_dim, 2, device=kv.device, dtype=torch.float32)
        self.freq = c.rope_theta ** (-half / c.head_dim)  # as model.rope_table
        self.packed = zeros(3, PREFILL_SIZES[-1])  # of a prefill: tokens, blocks, positions,
        self.starts = zeros(PREFILL_SIZES[-1] // KV_BLOCK + 1, dtype=torch.int32)  # where each begins
        self.graphs = Graphs()  # of (rows, greedy)
        self.prefills = Graphs()  # of tokens

    def batch_size(self, n):
        return next(size for size in self.buckets if size >= n)

    @torch.no_grad()
    def decode(self, rows, steps, sampling):
        n = len(rows.pos)
        ends = sorted(sampling.end_ids)
        assert len(ends) <= MAX_ENDS, f"{len(ends)} end ids, at most {MAX_ENDS}"
        if self.table is None:
            self.table = self.rows.new_zeros(self.max_rows, rows.table.shape[1])
        size = self.batch_size(n)
        run = self.graph(size, sampling)
        self.rows[:len(rows) - 1, :n] = torch.stack(rows[:-1])  # State begins as Rows, no table
        self.state.alive[:n] = rows.limit > rows.pos
        self.table[:n] = rows.table
        self.ends.copy_(torch.tensor(ends + [-1] * (MAX_ENDS - len(ends))))
        self.inv_temperature.fill_(1 / (sampling.temperature or 1.0))
        for _ in range(steps):
            run()
        tokens = self.tokens[:steps, :n].clone()
        return tokens, self.logprobs[:steps, :n].clone(), self.state.made[:n].clone()

    @torch.no_grad()
    def prefill(self, tokens, blocks, lengths):
        """A short one is a graph: the host takes 2 ms a layer to launch its 90 kernels.

        Padded by one more prefix, which goes to block 0, and by empty ones: room for size / 32,
        since FlashAttention launches programs for those too.
        """
        T = len(tokens)
        n = len(lengths)
        size = next((s for s in PREFILL_SIZES if T <= s and n < s // KV_BLOCK), None)
        if size is None or not self.kv.is_cuda:
            return super().prefill(tokens, blocks, lengths)
        packed = torch.zeros(3, size, dtype=torch.int64)
        packed[0, :T] = tokens
        packed[1, :T] = blocks
        packed[2] = torch.cat([torch.arange(length) for length in (*lengths, size - T)])
        starts = torch.full((size // KV_BLOCK + 1,), size)
        starts[:n + 1] = torch.tensor([0, *lengths]).cumsum(0)
        inputs = self.packed[:, :size]
        inputs.copy_(packed)
        at = self.starts[:len(starts)]
        at.copy_(starts)
        spans = Spans(at, at, size, size, causal=True)

        def launch():
            fill_cache(self.model, self.kv, *inputs,
                       lambda q, k, v: attend_spans(q, k, v, spans)[0])
            return self.model.layers[0].qkv.scratch.flat  # where every W is expanded

        self.prefills.get_for(self.adapter(), size, launch)()

    def graph(self, size, sampling):
        """-> what runs one step of `size` rows, so far nobody's: to make it takes a step, too."""
        self.rows[:, :size] = self.nobody
        self.table[:size] = 0
        settings = self.adapter(), sampling.top_k, sampling.top_p, self.model.live_vocab
        run = self.graphs.get_for(settings, (size, not sampling.temperature),
                                  lambda: self.step(size, sampling))
        self.state.step.zero_()
        return run

    def adapter(self):
        """Whose addresses a graph captured."""
        adapter = self.model.adapter
        live = adapter is not None and adapter.enabled
        return (adapter.working.data_ptr(), adapter.rank) if live else None

    def step(self, n, sampling):
        """Launch one step of rows [0, n)."""
        model = self.model
        pdl = self.pdl
        c = model.config
        D, F, H, KV, d = c.width, c.feed_forward, c.heads, c.kv_heads, c.head_dim
        bucket = next((m for m in PROGRAMS if n <= m), max(PROGRAMS))
        tile, of_heads, of_residual, of_swiglu = PROGRAMS[bucket]
        tiles = D // tile
        shape = attention_shape(n * KV, self.most_siblings, self.room)

        def new(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device=self.kv.device)

        resid = new(n, D)
        xw = new(n, D, dtype=model.dtype)  # inputs of matmuls: qkv, gate|up, head;
        context = new(n, H * d, dtype=model.dtype)  # o;
        hidden = new(n, F, dtype=model.dtype)  # down
        q = new(n, H, d, dtype=model.dtype)
        cos, sin = new(2, n, d // 2)
        of_runs = n, H, shape.SPLITS
        runs = Runs(new(*of_runs, d), new(*of_runs), new(*of_runs), self.counters)
        squares = Squares(new(n, tiles), model.final_norm.eps, D, constexpr(tiles))
        shift = constexpr(FP16_SHIFT if model.dtype == torch.float16 else 1.0)

        def into(norm):
            return Norm(norm.weight, norm.noise, xw, squares, shift)

        def residual(linear, x, norm):
            rows, warps = of_residual
            kernels.residual_kernel[triton.cdiv(n, rows), tiles](
                partial(linear, x, self.matmul), n, resid, into(norm), tile, rows,
                num_warps=warps, **pdl)

        # Launched without pdl, after the step before: all others may read the state early.
        norms = [layer.input_norm for layer in model.layers] + [model.final_norm]
        kernels.embed_kernel[n, tiles](
            self.state, model.embed, self.freq, resid, cos, sin, into(norms[0]), n, tile, d // 2,
            pdl["PDL"], num_warps=1)
        for layer, kv, next_norm in zip(model.layers, self.kv, norms[1:]):
            cache = Cache(kv, kv.stride(0), self.table, self.table.shape[1],
                          *map(constexpr, (KV, KV_BLOCK, d)))
            rows, num_warps = of_heads
            kernels.heads_kernel[triton.cdiv(n, rows), H + 2 * KV](
                partial(layer.qkv, xw, self.matmul), n, squares, layer.qkv_bias, cos, sin, q, cache,
                self.state, H, rows, num_warps=num_warps, **pdl)
            kernels.attention_kernel[n, KV, shape.SPLITS](
                q, cache, self.state, context, runs, H, GROUP, shape, num_warps=shape.W,
                num_stages=4 if shape.SIBLINGS > 1 else 3, **pdl)
            residual(layer.o, context, layer.post_norm)
            rows, num_warps = of_swiglu
            kernels.swiglu_kernel[triton.cdiv(n, rows), F // tile](
                partial(layer.gate_up, xw, self.matmul), n, squares, hidden, tile, rows,
                num_warps=num_warps, **pdl)
            residual(layer.down, hidden, next_norm)
        self.sample(xw, squares, sampling)

    def sample(self, xw, squares, sampling):
        """The head and the draw, from the final norm's xw (n, D) and squares."""
        n = len(xw)
        V = self.model.live_vocab
        # All of the head: 151,665 columns of fp32 would leave cuBLAS unaligned rows.
        logits = mm_fp32(xw, self.model.lm_head.T)  # (n, V padded)
        filtered = bool(sampling.top_k or sampling.top_p < 1.0)
        if filtered:
            rstd = torch.rsqrt(squares.sums.sum(1, keepdim=True) / squares.D + squares.eps)
            logits *= rstd * self.inv_temperature
            filter_logits(logits[:, :V], sampling.top_k, sampling.top_p)
        chunks = triton.cdiv(V, CHUNK)
        logits = Logits(logits, logits.stride(0), V, squares, self.inv_temperature,
                        logits.new_empty(n, chunks), logits.new_empty(n, chunks),
                        constexpr(filtered), constexpr(CHUNK))
        kernels.chunk_kernel[n, chunks](logits)
        kernels.pick_kernel[n,](logits, chunks, self.state, self.ends, self.tokens, self.logprobs,
                                self.max_rows, not sampling.temperature,
                                triton.next_power_of_2(chunks), MAX_ENDS)
