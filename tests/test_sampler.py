"""
The sampler: its tokens against plain float64 forwards of complete sequences, its randomness against SplitMix64's
published numbers, its bookkeeping (kv_blocks, groups, preemption) against a simple loop without any, on 1,000 requests.

python -m pytest tests/test_sampler.py -v
"""
import os
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import FP32, TINY, adapted
from tiny_qwen2 import held_by, merged, plain_logits

import sampler as sampler_py
from aqn import noisy_norms
from files import Stopped, UserError
from loading import load
from sampler import Rollouts, Row, Sampler, Sampling, TorchEngine, filter_logits, row_key, uniforms
from scheduler import KV_BLOCK, Scheduler

LENGTHS = (1, 2, 5, 31, 32, 33, 34, 63, 64, 65)                           # of prompts; a prefix is one token shorter


class WindowEngine(TorchEngine):
    window = 8                                                            # rows may end inside it, as on a GPU


def prompts_of(vocab, lengths=LENGTHS, seed=3):
    flat = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return [t.tolist() for t in flat.split(list(lengths))]


def splitmix64(seed, number=1):
    """SplitMix64's output of this number, counted from 1."""
    z = (seed + number * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def plain_uniform(key, position):
    """(x + 1/2) / 2^23, where x is the upper 23 bits of output number position + 1 of SplitMix64 with seed `key`."""
    return (splitmix64(key, position + 1) // 2**41 + 0.5) / 2**23


def distributions(case, tensors, rollouts, temperature, live_vocab):
    """Yields each row's float64 log-probs (T, V), from which its completion should have been drawn."""
    for prompt, completion in zip(rollouts.prompts, rollouts.completions):
        logits = plain_logits(case.raw, tensors, prompt + completion)[len(prompt) - 1:-1, :live_vocab]
        yield (logits / temperature).log_softmax(-1)


def generate(sampler, prompts, group_size=1, max_new_tokens=16, places=None, **how):
    return sampler.generate(prompts, group_size, Sampling(max_new_tokens, **how), places)


def finished(rollouts):
    return [row.finished for row in rollouts.rows]


def minimal_gib(model, max_length, extra=0):
    """The memory of the smallest pool that Sampler accepts, plus `extra` kv_blocks."""
    c = model.config
    block_bytes = c.layers * 2 * c.kv_heads * KV_BLOCK * c.head_dim * model.dtype.itemsize
    return (-(-max_length // KV_BLOCK) + 2 + extra + 0.5) * block_bytes / 2**30


# -----------------------------------------------------------------------------
# Tokens and log-probs

@pytest.mark.parametrize("policy,shape,engine", [
    ("base", "untied", TorchEngine), ("adapter", "untied", WindowEngine), ("noise", "untied", TorchEngine),
    ("adapter", "qwen3-tied", WindowEngine), ("noise", "qwen3-untied", TorchEngine), ("adapter", "llama", WindowEngine),
    ("base", "mistral", TorchEngine)])
def test_greedy_tokens_match_full_forwards(tiny, policy, shape, engine):
    case = tiny[shape]
    model, tensors = load(case.folder, base="bf16", device="cpu"), dict(case.tensors)
    if policy == "adapter":
        model, adapter = adapted(case, rank=4, alpha=6)
        tensors = merged(case.tensors, adapter, 6 / 4)
    with noisy_norms(model, 0.1 if policy == "noise" else 0.0, seed=1, step=3):
        for i, layer in enumerate(model.layers):
            for name, norm in (("input", layer.input_norm), ("post_attention", layer.post_norm)):
                tensors[f"model.layers.{i}.{name}_layernorm.weight"] = norm.weight.double() + norm.noise
        sampler = Sampler(model, max_length=110, max_rows=7, engine=engine)
        rollouts = generate(sampler, prompts_of(101), max_new_tokens=45, temperature=0)
    assert [len(c) for c in rollouts.completions] == [45] * len(LENGTHS) and not any(finished(rollouts))
    # By induction over the tokens, this is what a loop of full forwards generates.
    for row, want in zip(rollouts.rows, distributions(case, tensors, rollouts, 1.0, model.live_vocab)):
        completion, got = row.completion, row.logprobs
        assert completion == want.argmax(-1).tolist()
        assert got.dtype == torch.float32 and (got - want.amax(-1)).abs().max() < FP32


@pytest.mark.parametrize("base,temperature", [("bf16", 0.5), ("nvfp4", 1.0), ("bf16", 1.6)])
def test_tokens_are_the_inverse_cdf_at_their_uniforms(tiny, base, temperature):
    case, seed = tiny["tied"], 11
    model = load(case.folder, base=base, device="cpu")
    model.live_vocab = 90
    with torch.no_grad(), noisy_norms(model, 0.05, seed=1, step=3):
        sampler = Sampler(model, max_length=100, max_rows=8, engine=WindowEngine)
        rollouts = generate(sampler, prompts_of(90), 3, max_new_tokens=35, temperature=temperature, seed=seed)
        rows = [p + c for p, c in zip(rollouts.prompts, rollouts.completions)]
        learner, _ = model.token_logprobs(rows, [len(p) for p in rollouts.prompts], temperature)
        clean = held_by(model)                                            # with nvfp4 the decoded weights
        for i, layer in enumerate(model.layers):
            for name, norm in (("input", layer.input_norm), ("post_attention", layer.post_norm)):
                clean[f"model.layers.{i}.{name}_layernorm.weight"] = norm.weight.double() + norm.noise
    assert (torch.cat([row.logprobs for row in rollouts.rows]) - learner).abs().max() < FP32 / temperature
    for b, log_p in enumerate(distributions(case, clean, rollouts, temperature, 90)):
        prompt, completion = rollouts.prompts[b], rollouts.completions[b]
        cdf = torch.cat([log_p.new_zeros(len(completion), 1), log_p.exp().cumsum(-1)], dim=1)
        key = row_key(seed, b // 3, b % 3)
        for t, token in enumerate(completion):
            u = plain_uniform(key, len(prompt) - 1 + t)                   # at the position of the input token
            assert cdf[t, token] - FP32 <= u <= cdf[t, token + 1] + FP32
        want = log_p[range(len(completion)), completion]
        assert (rollouts.rows[b].logprobs - want).abs().max() < FP32 / temperature


def test_preemption_and_batching_change_no_token(tiny):
    """With a model's numbers. The tests of bookkeeping below compare 1,000 requests with a loop without any."""
    model = load(tiny["untied"].folder, base="bf16", device="cpu")
    prompts = prompts_of(101, (1, 5, 32, 33, 64, 65))
    roomy = AuditedSampler(model, 110)
    want = generate(roomy, prompts, 3, 45, end_ids=(3, 17), temperature=1.3, seed=5)
    assert 0 < sum(finished(want)) < len(want.rows) and roomy.preempted == 0
    for extra in (0, 7):
        small = AuditedSampler(model, 110, kv_gib=minimal_gib(model, 110, extra), engine=WindowEngine)
        got = generate(small, prompts, 3, 45, end_ids=(3, 17), temperature=1.3, seed=5)
        assert got.completions == want.completions and finished(got) == finished(want)
        assert small.preempted > 0 or not extra                          # recomputed
        gap = torch.cat([row.logprobs for row in got.rows]) - torch.cat([row.logprobs for row in want.rows])
        assert gap.abs().max() < FP32
    alone = generate(roomy, prompts[4:5], 2, 45, [4], end_ids=(3, 17), temperature=1.3, seed=5)
    assert alone.completions == want.completions[12:14]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks for a GPU's memory")
def test_default_pool_takes_half_of_the_process_limit():
    model = load(TINY, "nvfp4", "cuda")
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        assert 2**26 < Sampler(model, 1000, 4096).engine.kv.nbytes <= 2**27
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("top_k,top_p,temperature", [(5, 1.0, 0), (8, 0.8, 1.4)])
def test_filtered_logprobs_cover_only_the_kept_tokens(tiny, top_k, top_p, temperature):
    case = tiny["tied"]
    model = load(case.folder, base="bf16", device="cpu")
    sampler = Sampler(model, max_length=40, max_rows=64)
    rollouts = generate(sampler, prompts_of(101, (3, 8)), 12, 20, temperature=temperature, top_k=top_k, top_p=top_p)
    sizes = set()
    for b, log_p in enumerate(distributions(case, case.tensors, rollouts, temperature or 1.0, 101)):
        for t, (token, row) in enumerate(zip(rollouts.completions[b], log_p)):
            ranked = row.argsort(descending=True)[:top_k or None]
            before = row[ranked].softmax(-1).cumsum(-1) - row[ranked].softmax(-1)
            kept = ranked[before < top_p]
            assert token in kept.tolist()
            sizes.add(len(kept))
            assert abs(rollouts.rows[b].logprobs[t] - (row[token] - row[kept].logsumexp(-1))) < FP32
    assert len(sizes) > 1 or top_p == 1.0


def test_filter_logits_by_hand():
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    kept = lambda **kwargs: (filter_logits(p.log(), **kwargs) > -torch.inf)[0].tolist()
    assert kept(top_k=2) == [False, True, False, True]
    assert kept(top_p=0.6) == [False, True, False, True]                  # 0.4 alone is not enough
    assert kept(top_p=0.39) == [False, True, False, False]
    assert kept(top_p=0.95) == [True, True, True, True]
    assert kept(top_k=2, top_p=0.5) == [False, True, False, False]        # 0.4 is 0.57 of the 0.7 that top-k keeps
    assert kept(top_k=9) == kept() == [True] * 4
    assert (filter_logits(torch.zeros(1, 4), top_p=0.5) == 0).sum() == 2  # exactly half is enough
    for wrong in ({"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):          # top_p=0 would make every log-prob NaN
        with pytest.raises(AssertionError):
            filter_logits(torch.zeros(1, 4), **wrong)


# -----------------------------------------------------------------------------
# Randomness

def test_uniforms_are_splitmix64():
    # The first outputs for seed 1234567, as published with the reference code.
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
                 16408922859458223821)
    got = uniforms(torch.full((5,), 1234567), torch.arange(5))
    assert got.dtype == torch.float32
    assert got.tolist() == [((z >> 41) + 0.5) / 2**23 for z in published]
    keys = [0, 1, 2**63 - 1, row_key(0, 0, 0), row_key(2**40, 7, 3)]
    for position in (0, 1, 255, 40_000):
        got = uniforms(torch.tensor(keys), torch.full((len(keys),), position))
        assert got.tolist() == [plain_uniform(key, position) for key in keys]
    assert row_key(7, 5, 3) == splitmix64(splitmix64(splitmix64(7) + 5) + 3) // 2
    assert row_key(-1, 0, 0) == row_key(2**64 - 1, 0, 0) < 2**63


@pytest.mark.parametrize("u", [2.0**-24, 0.5, 1 - 2.0**-24])
def test_extreme_uniforms_draw_no_impossible_token(u):
    # 2^-24 and 1 - 2^-24 are the smallest and the largest uniform. The fp32 sum of p is off from 1 by about 1e-6.
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 3000)
    logits[:, :700] = logits[:, 2000:] = -torch.inf
    token, logprob = sampler_py.draw_tokens(logits, torch.full((50,), u))
    assert ((700 <= token) & (token < 2000)).all() and logprob.isfinite().all()


def test_a_rounded_sum_draws_no_impossible_token(monkeypatch):
    # A GPU's sum in blocks can move by an ulp: here it rises at token 1 and falls at 3, which have no probability.
    monkeypatch.setattr(sampler_py, "running_sum", lambda p: torch.tensor([[0.25, 0.26, 0.75, 0.74, 1.0]]))
    logits = torch.tensor([[0.25, 0, 0.5, 0, 0.25]]).log()
    drawn = {u: sampler_py.draw_tokens(logits, torch.tensor([u]))[0].item() for u in (0.24, 0.25, 0.745, 0.76)}
    assert drawn == {0.24: 0, 0.25: 2, 0.745: 2, 0.76: 4}                 # 0.25 does not exceed the first token's sum


# -----------------------------------------------------------------------------
# Bookkeeping, with a model that costs nothing. A token's "key" is its id, its "value" is its position, and the next
# token is a hash of the complete context, read back through the table of kv_blocks. A kv_block that is wrong, stale or
# owned twice changes every token that follows.

VOCAB, ENDS = 40, (0, 1)


def scramble(x):
    """A 64-bit hash step, on Python ints below 2^64 or on numpy uint64."""
    x = x * 0xD1342543DE82EF95 & sampler_py.MASK64 if isinstance(x, int) else x * np.uint64(0xD1342543DE82EF95)
    return x ^ x >> (32 if isinstance(x, int) else np.uint64(32))


def plain_completion(prompt, key, max_new_tokens, ends=ENDS):
    """The reference, without a cache or batches. The context's hash is a sum over (token, position) pairs."""
    context = sum(scramble((token << 32) + p) for p, token in enumerate(prompt)) & sampler_py.MASK64
    completion = []
    while len(completion) < max_new_tokens and not (completion and completion[-1] in ends):
        completion.append(scramble(scramble(context ^ key)) % VOCAB)
        context = context + scramble((completion[-1] << 32) + len(prompt) + len(completion) - 1) & sampler_py.MASK64
    return completion


class HashModel:
    config, layers = SimpleNamespace(layers=1, kv_heads=1, head_dim=1), [None]
    dtype, device = torch.float64, torch.device("cpu")

    def hidden(self, tokens, attend, positions):
        ids, positions = tokens.double().view(-1, 1, 1), positions.double().view(-1, 1, 1)
        attend[0](ids, ids, positions)


class HashEngine(TorchEngine):
    window, ahead = 8, 5

    def __init__(self, model, kv, max_rows):
        super().__init__(model, kv, max_rows)
        self.keys, self.values = kv[0].view(2, -1, KV_BLOCK).numpy()

    def prefill_early(self, prefixes, waiting, room):
        room, along = min(room, self.ahead - sum(len(prefix.blocks) for prefix in prefixes)), []
        for prefix in (s.prefix for s in waiting):
            if prefix.missing and prefix not in along:
                room -= prefix.missing
                if room < 0:
                    break
                along.append(prefix)
        return along

    def decode(self, rows, steps, sampling):
        r = {name: t.numpy() for name, t in rows._asdict().items()}
        token, pos, alive = r["token"].copy(), r["pos"].copy(), r["limit"] > r["pos"]
        start, n = -(-r["prefix"] // KV_BLOCK) * KV_BLOCK, np.arange(len(token))
        made, tokens = np.zeros_like(pos), []
        for _ in range(steps):
            p = np.arange(pos.max() + 1)[None]                            # the token at position p is in this slot:
            slot = np.where(p < r["prefix"][:, None], p, start[:, None] + p - r["prefix"][:, None])
            block, offset = np.take_along_axis(r["table"], slot // KV_BLOCK, axis=1), slot % KV_BLOCK
            self.keys[block[n, pos], offset[n, pos]] = np.where(alive, token, -1)        # rows that ended write too
            self.values[block[n, pos], offset[n, pos]] = pos
            valid = (p <= pos[:, None]) & alive[:, None]
            ids, positions = self.keys[block, offset], self.values[block, offset]
            assert (block[valid] > 0).all(), "a running row read the scratch block"
            assert (positions == p)[valid].all(), "a slot holds another position's token"
            terms = scramble(np.where(valid, ids, 0).astype(np.uint64) << np.uint64(32) | p.astype(np.uint64))
            context = np.where(valid, terms, np.uint64(0)).sum(axis=1)
            picked = (scramble(scramble(context ^ r["key"].astype(np.uint64))) % np.uint64(VOCAB)).astype(np.int64)
            tokens.append(picked)
            made += alive
            token, pos = np.where(alive, picked, token), pos + alive
            alive = alive & ~np.isin(picked, sampling.end_ids) & (pos < r["limit"])
        tokens = torch.from_numpy(np.stack(tokens))
        return tokens, tokens.float(), torch.from_numpy(made)


class RecordingEngine(HashEngine):
    """Records the lengths and tokens of every prefill."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.prefills, self.prefilled = [], []

    def prefill(self, tokens, blocks, lengths):
        self.prefills.append(lengths)
        self.prefilled += tokens.tolist()
        super().prefill(tokens, blocks, lengths)


class AuditedScheduler(Scheduler):
    """Checks before every window that each kv_block is either free or owned by exactly one prefix or row."""

    def __init__(self, sampler, *arguments):
        super().__init__(*arguments)
        self.sampler, self.kv_blocks = sampler, arguments[2]

    def grow(self):
        running = super().grow()
        users = Counter(s.prefix for s in [*self.waiting, *running])
        prefixes, in_use = [*users], {s.prefix for s in running}
        self.sampler.waited += any(prefix.blocks and prefix not in in_use for prefix in prefixes)
        blocks = self.pool.free_blocks + [b for s in running for b in s.blocks]
        blocks += [b for prefix in prefixes for b in prefix.blocks]
        assert sorted(blocks) == list(range(1, self.kv_blocks)), "a block is lost or has two owners"
        assert len(set(map(id, running))) == len(running) <= self.max_rows
        for s in running:                                                 # a row owns no more than it needs by now
            own = min(s.pos + self.engine.window, s.limit) - len(s.prefix.tokens)
            assert len(s.blocks) * KV_BLOCK - own in range(KV_BLOCK), (len(s.blocks), own)
        for prefix in prefixes:
            assert prefix.users == users[prefix]
        assert not any(prefix.missing for prefix in in_use)
        return running

    def _release(self, s):
        self.sampler.preempted += not s.ended
        super()._release(s)


class AuditedSampler(Sampler):
    preempted = waited = 0                                                # waited: windows with a prefix without rows

    def generate(self, *arguments, **options):
        def audited(*arguments):
            self.scheduler = AuditedScheduler(self, *arguments)
            return self.scheduler
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler_py, "Scheduler", audited)
            return super().generate(*arguments, **options)


def test_random_requests_match_a_plain_loop():
    rng, model = random.Random(0), HashModel()
    requests = preempted = stopped = shared = waited = 0
    while requests < 1_000:
        max_length = rng.randint(2, 200)
        max_rows = rng.choice([1, 3, 7, 24, 64])
        extra = rng.choice([0, 3, 10, 20, 1000])                          # room for one sequence, or for plenty
        sampler = AuditedSampler(model, max_length, max_rows, minimal_gib(model, max_length, extra), engine=HashEngine)
        for call in range(2):                                             # the second starts from what the first left
            longest = rng.randint(1, max(1, max_length // rng.choice([2, 8])))
            lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 12))]
            prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
            group_size = rng.choice([1, 2, 5, 16])
            limits = [rng.randint(1, max_length - longest) for _ in range(len(prompts) * group_size)]
            places, ends, reported, oldest = rng.sample(range(1000), len(prompts)), rng.choice([ENDS, ()]), [], []
            begun = set()                                                 # sequences that began and have not ended

            def progress(made, sequences):
                reported.append((made, [s.row for s in sequences if s.ended]))
                assert not oldest or oldest[0] is sequences[0], "the oldest row was preempted"
                oldest[:] = [s for s in sequences if not s.ended]
                assert begun <= {*sequences} or {*sequences} <= begun, "a new row came before a preempted one"
                begun.update(sequences)
                begun.difference_update([s for s in begun if s.ended])

            rollouts = sampler.generate(prompts, group_size, Sampling(limits, ends, seed=call), places, progress)
            assert len(rollouts.completions) == len(prompts) * group_size
            for b, (prompt, completion) in enumerate(zip(rollouts.prompts, rollouts.completions)):
                assert prompt is prompts[b // group_size]
                want = plain_completion(prompt, row_key(call, places[b // group_size], b % group_size), limits[b], ends)
                assert completion == want, (requests, b)
                assert rollouts.rows[b].finished == (want[-1] in ends)
                assert rollouts.rows[b].logprobs.tolist() == want              # the engine's "log-prob" is the token
            made, ended = zip(*reported)
            assert sum(made) == rollouts.num_tokens and sorted(sum(ended, [])) == [*range(len(limits))]
            assert 0 <= rollouts.idle < 1
            assert sorted(sampler.scheduler.pool.free_blocks) == list(range(1, sampler.engine.kv.shape[2]))
            requests += len(rollouts.completions)
            stopped, shared = stopped + sum(finished(rollouts)), shared + (group_size > 1)
        preempted, waited = preempted + sampler.preempted, waited + sampler.waited
    assert preempted > 30 and stopped > 300 and shared > 8 and waited > 150      # the interesting cases did occur


def test_pool_too_small_for_a_sequence_or_too_large_is_refused(monkeypatch):
    smallest = minimal_gib(HashModel(), 97)
    Sampler(HashModel(), 97, kv_gib=smallest, engine=HashEngine)
    monkeypatch.setattr(os, "sysconf", lambda name: 2**40)
    for rows, kv_gib, named in ((8, minimal_gib(HashModel(), 97, extra=-1), "sequence of 97"), (8, 0, "sequence of 97"),
                                (10**15, 2**50, f"{10**15} sequences of 97"), (10**15, None, f"{10**15} sequences")):
        with pytest.raises(UserError, match=named):
            Sampler(HashModel(), 97, max_rows=rows, kv_gib=kv_gib, engine=HashEngine)


def test_bad_requests_stop():
    sampler = Sampler(HashModel(), 50, engine=HashEngine)
    for prompts, limits in (([[5] * 30], 21), ([[5], []], 2), ([[5]], 0), ([[5]] * 2, [3, 0]), ([[5]] * 2, [3])):
        with pytest.raises(AssertionError):
            generate(sampler, prompts, max_new_tokens=limits)
    for places in ([1], []):                                              # an empty list is not the default
        with pytest.raises(ValueError):
            generate(sampler, [[5], [6]], max_new_tokens=2, places=places)
    nothing = generate(sampler, [], max_new_tokens=2)
    assert nothing.completions == [] and nothing.idle == 0


def test_interrupt_frees_the_pool():
    sampler = Sampler(HashModel(), 70, 1, engine=HashEngine)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            sampler.generate([[5] * 40], 2, Sampling(30), progress=lambda made, sequences: 1 / 0)
    assert len(generate(sampler, [[5] * 40], 2, max_new_tokens=30).completions) == 2


@pytest.mark.parametrize("step,stops", [(1, True), (2, False)])
def test_nonfinite_logprob_of_a_counted_token_stops(step, stops):
    class Broken(HashEngine):
        def decode(self, rows, steps, sampling):
            tokens, logprobs, made = super().decode(rows, steps, sampling)
            assert made.tolist() == [2, 8]                                # row 0 ends inside the window
            logprobs[step, 0] = torch.nan
            return tokens, logprobs, made

    sampler = Sampler(HashModel(), 50, engine=Broken)
    if stops:
        with pytest.raises(Stopped, match="log-prob is not finite"):
            sampler.generate([[5]], 2, Sampling([2, 8]))
    else:
        assert sampler.generate([[5]], 2, Sampling([2, 8])).num_tokens == 10


def test_long_prefills_are_split_into_batches(monkeypatch):
    monkeypatch.setattr(sampler_py, "PREFILL_TOKENS", 70)
    sampler = Sampler(HashModel(), 120, engine=RecordingEngine)
    prompts = [[3] * n for n in (31, 41, 1, 91, 11)]                      # prefixes of 30, 40, 0, 90 and 10 tokens
    generate(sampler, prompts, 2, 3)
    assert sampler.engine.prefills == [[30, 40], [90], [10]]


def test_window_ends_with_its_last_row():
    sampler = Sampler(HashModel(), 50, engine=HashEngine)                        # windows of 8
    assert generate(sampler, [[5], [6]], 1, 3).computed == 2 * 3
    assert sampler.generate([[5]], 2, Sampling([2, 11])).computed == 2 * 8 + 3


def test_row_waits_until_live_rows_can_grow():
    # Five kv_blocks. Each of the three rows takes one for its prefix of 32 tokens and one for its own 20 tokens.
    sampler = AuditedSampler(HashModel(), 97, kv_gib=minimal_gib(HashModel(), 97), engine=RecordingEngine)
    generate(sampler, [[token] * 33 for token in (3, 4, 5)], 1, 20)
    assert sampler.engine.prefills == [[32, 32], [32]] and sampler.preempted == 0


@pytest.mark.parametrize("max_rows", [1, 3, 4, 6, 12, 64])
@pytest.mark.parametrize("ahead", [0, 5])
def test_prefix_is_prefilled_once_for_any_max_rows(max_rows, ahead):
    sampler = AuditedSampler(HashModel(), 200, max_rows, engine=RecordingEngine)
    sampler.engine.ahead = ahead
    prompts = [[3 + n] * 41 for n in range(8)]                            # prefixes of 40 tokens
    sampler.generate(prompts, 8, Sampling([1 + n % 20 for n in range(64)]))
    assert sorted(sampler.engine.prefilled) == [3 + n for n in range(8) for _ in range(40)] and sampler.preempted == 0


def test_later_turns_have_the_next_seed_and_a_place_per_answer():
    sampler = Sampler(HashModel(), 100, 8, engine=HashEngine)
    first = sampler.generate([[3, 4], [5]], 3, Sampling(10, ENDS, seed=6), places=[7, 9]).rows
    rows = sampler.extend([row.with_text([8, 9]) for row in first], Sampling(16, ENDS, seed=6)).rows
    for b, (row, before) in enumerate(zip(rows, first)):
        context = before.completion + [8, 9]
        more = plain_completion(row.prompt + context, row_key(7, 3 * [7, 9][b // 3] + b % 3, 0), 16 - len(context))
        assert row.completion == context + more and row.finished == (more[-1] in ENDS)
        assert row.mask.tolist() == [True] * len(before.completion) + [False] * 2 + [True] * len(more)
        assert row.logprobs.tolist() == before.logprobs.tolist() + [0] * 2 + [float(token) for token in more]


def test_rollouts_add_and_mask_tool_tokens():
    a = Rollouts([Row([1], [2], torch.zeros(1), True), Row([1], [3, 4], torch.zeros(2), False)], 1.0, 6)
    b = Rollouts([Row([9], [8, 7, 6], torch.ones(3), True, torch.tensor([True, False, True]))], 3.0, 4)
    both = a + b
    assert both.completions == [[2], [3, 4], [8, 7, 6]] and finished(both) == [True, False, True]
    assert both.sampled().tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert (a.num_tokens, b.num_tokens, both.num_tokens, both.seconds) == (3, 2, 5, 3.0)
    assert (a.idle, both.idle) == pytest.approx((0.5, 0.5))
