"""
The adapter against autograd through an explicit W + s * B @ A in float64, and its files against PEFT.

PEFT 0.21.2 with transformers 5.23.0 made the stored logits and the folder peft_adapter/ (make_reference.py), fp32, with
trained block norms. Our folder in PEFT, and PEFT's folder here, give logits up to 12 that differ by at most 1.2e-5.

python -m pytest tests/test_lora.py -v
"""
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import grpo
import nvfp4
from lora import Adapter, Linear, load_adapter, merge, save_adapter, write_atomically
from model import FrozenWeight, freeze, load, pack_parts
from tiny_qwen2 import SHAPES, merged, plain_logits, random_adapter, set_adapter

HERE = Path(__file__).parent
REFERENCE = load_file(HERE / "qwen2_reference.safetensors")
FP32 = 5e-5                                                               # on logits: as in test_model.py


def adapted(case, rank=4, alpha=6, norms=False, base="bf16", seed=2, **kwargs):
    """The tiny model with a nonzero adapter, and that adapter's tensors by PEFT's names."""
    model = load(case.folder, base=base, device="cpu", **kwargs)
    Adapter(model, rank=rank, alpha=alpha, norms=norms)
    tensors = random_adapter(case.raw, rank, seed=seed, norms=norms)
    set_adapter(model, tensors)
    return model, tensors


def tokens_of(case, *shape):
    return torch.randint(case.raw["vocab_size"], shape, generator=torch.Generator().manual_seed(8))


def plain(case, adapter, scale, tokens):
    weights = merged(case.tensors, adapter, scale)
    return torch.stack([plain_logits(case.raw, weights, row) for row in tokens])


# -----------------------------------------------------------------------------
# What it computes

@pytest.mark.parametrize("base", nvfp4.FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_with_b_zero_leaves_every_bit_of_the_logits(tiny, base, dtype):
    model, tokens = load(tiny["tied"].folder, base=base, device="cpu", dtype=dtype), tokens_of(tiny["tied"], 2, 13)
    with torch.no_grad():
        before = model(tokens)
        Adapter(model, rank=8, alpha=16, norms=True)
        assert torch.equal(model(tokens), before)
    assert all(lin.a.abs().sum() > 0 and not lin.b.any() for lin in model.adapter.linears)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norms", [False, True])
def test_logits_are_those_of_the_merged_weights(tiny, shape, norms):
    case = tiny[shape]
    (model, adapter), tokens = adapted(case, norms=norms), tokens_of(case, 2, 13)
    with torch.no_grad():
        assert (model(tokens) - plain(case, adapter, 6 / 4, tokens)).abs().max() < FP32


def test_each_linear_adds_the_adapter_of_its_own_module(tiny):
    # One module's adapter at a time: a part of a fused linear must not see its neighbour's.
    case, tokens = tiny["untied"], tokens_of(tiny["untied"], 1, 9)
    model, adapter = adapted(case)
    for linear in model.layers[1].qkv, model.layers[1].o, model.layers[1].gate_up, model.layers[1].down:
        for name in linear.names:
            only = {n: t if name in n else torch.zeros_like(t) for n, t in adapter.items()}
            set_adapter(model, only)
            with torch.no_grad():
                assert (model(tokens) - plain(case, only, 6 / 4, tokens)).abs().max() < FP32, name


def test_off_gives_the_base_bit_for_bit_and_back(tiny):
    tokens, base = tokens_of(tiny["tied"], 2, 13), load(tiny["tied"].folder, base="nvfp4", device="cpu")
    model, _ = adapted(tiny["tied"], base="nvfp4")
    with torch.no_grad():
        want, on = base(tokens), model(tokens)
        with pytest.raises(KeyboardInterrupt):
            with model.adapter.off():
                assert torch.equal(model(tokens), want)
                raise KeyboardInterrupt
        assert torch.equal(model(tokens), on) and not torch.equal(on, want)


def test_working_copies_stay_where_they_are(tiny):
    # CUDA graphs hold these addresses.
    model, _ = adapted(tiny["tied"])
    addresses = [(lin.a16.data_ptr(), lin.b16.data_ptr()) for lin in model.adapter.linears]
    with torch.no_grad():
        model.adapter.master.mul_(3)
    model.adapter.sync()
    assert addresses == [(lin.a16.data_ptr(), lin.b16.data_ptr()) for lin in model.adapter.linears]
    for lin in model.adapter.linears:
        assert torch.equal(lin.a16, lin.a) and torch.equal(lin.b16, lin.b * 1.5)
        assert lin.a16.data_ptr() % 16 == 0 and lin.b16.data_ptr() % 16 == 0


# -----------------------------------------------------------------------------
# Gradients

def frozen_weight(kind, parts, K):
    """A frozen (N, K) and the float64 matrix it stands for."""
    weights = [torch.randn(n, K) * 0.1 for n in parts]
    if kind == "late":                                                    # a tensor scale per part, none a power of two
        tensors = [nvfp4.quantize(w, w.abs().max() / 2688) for w in weights]
        weight = pack_parts(tensors)
        assert weight.late_scale is not None
        return weight, torch.cat([nvfp4.dequantize(*t, torch.float64) for t in tensors])
    weight = freeze(weights, kind, torch.float32)
    return weight, weight.dequantize().double() if kind != "bf16" else torch.cat(weights).bfloat16().double()


class OneLinear(torch.nn.Module):
    """As much of a model as Adapter looks at."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.layers, self.dtype = linear, [], torch.float32


@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "late", "nf4"])
@pytest.mark.parametrize("parts", [(48,), (64, 16, 16), (40, 24)])
def test_gradients_equal_autograd_through_the_merged_matrix(kind, parts):
    torch.manual_seed(0)
    M, K, R, alpha = 11, 128, 4, 10
    weight, w = frozen_weight(kind, parts, K)
    linear = Linear(weight, [f"part{p}" for p in range(len(parts))], parts)
    adapter = Adapter(OneLinear(linear), rank=R, alpha=alpha)
    with torch.no_grad():
        linear.b.normal_()
    adapter.sync()
    x, upstream = torch.randn(M, K, requires_grad=True), torch.randn(M, sum(parts))
    y = linear(x)
    y.backward(upstream)

    a, b, x64 = (t.detach().double().requires_grad_() for t in (linear.a, linear.b, x))
    delta = torch.cat([rows @ a_p for rows, a_p in zip(b.split(parts), a.split(R))])
    want = x64 @ (w + alpha / R * delta).T
    want.backward(upstream.double())
    # Up to 128 fp32 terms: a result is off by about sqrt(128) * 2^-24 = 7e-7 of its scale; twice in a row for x and A.
    results = dict(y=(y, want), x=(x.grad, x64.grad), a=(linear.a.grad, a.grad), b=(linear.b.grad, b.grad),
                   merged=(linear.merged(), w + alpha / R * delta))
    for name, (got, exact) in results.items():
        assert (got - exact).abs().max() < 5e-6 * exact.abs().max(), name
    # Both land in the flat vector that the optimizer steps, at the place the docstring gives them.
    n = linear.a.numel()
    assert torch.equal(adapter.master.grad[:n].view_as(linear.a), linear.a.grad)
    assert adapter.master.grad.count_nonzero() == linear.a.numel() + linear.b.numel()


@pytest.mark.parametrize("loss", grpo.CLIP)
def test_micro_batches_of_1_4_and_16_rows_sum_to_the_whole_gradient(tiny, loss):
    case, group_size, rows = tiny["untied"], 4, 16
    model, _ = adapted(case, base="nvfp4", norms=True)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (rows,), generator=generator)
    prompt = torch.randint(1, 9, (rows,), generator=generator)
    prompt_lengths, stream = prompt.tolist(), tokens_of(case, 60)
    sequences = [stream[i:i + p + n].tolist() for i, (p, n) in enumerate(zip(prompt_lengths, lengths.tolist()))]
    advantages = grpo.group_advantages(torch.randint(0, 2, (rows,), generator=generator).float(), group_size)
    weights = grpo.token_weights(lengths, torch.ones(rows, dtype=torch.bool), loss, max_new_tokens=20)
    with torch.no_grad():
        old = [model.token_logprobs([s], [p])[0] + 0.1 * torch.randn(n, generator=generator)
               for s, p, n in zip(sequences, prompt_lengths, lengths.tolist())]
    gradients = {}
    for size in (16, 4, 1):
        model.adapter.zero_grad()
        for batch in torch.arange(rows).split(size):
            picked = batch.tolist()
            logprobs, _ = model.token_logprobs([sequences[i] for i in picked], prompt[batch].tolist(), temperature=0.9)
            row = torch.arange(size).repeat_interleave(lengths[batch])
            value, _ = grpo.policy_loss(logprobs, torch.cat([old[i] for i in picked]), advantages[batch], row,
                                        weights[batch], loss, clip_low=0.5, clip_high=0.5)
            value.backward()
        gradients[size] = model.adapter.master.grad.clone()
    # The same products in another order: fp32 rounding of sums over up to 300 tokens.
    assert gradients[16].norm() > 0
    for size in (4, 1):
        assert (gradients[size] - gradients[16]).norm() < 3e-6 * gradients[16].norm(), size


def test_whole_model_gradient_equals_float64_finite_differences(tiny, tmp_path):
    # Not autograd: central differences of the float64 forward along three directions of the whole adapter, norms too.
    case, scale, step = tiny["ragged"], 6 / 4, 1e-5
    model, adapter = adapted(case, norms=True)
    row = tokens_of(case, 14).tolist()
    model.adapter.zero_grad()
    model.token_logprobs([row], [5])[0].sum().backward()

    def value(tensors):
        log_p = plain_logits(case.raw, merged(case.tensors, tensors, scale), row).log_softmax(-1)
        return log_p[range(4, 13), row[5:]].sum()

    # The gradient by PEFT's names: save_adapter writes whatever the master vector holds.
    model.adapter.master.data.copy_(model.adapter.master.grad)
    save_adapter(model, tmp_path)
    gradient = {name: t.double() for name, t in load_file(tmp_path / "adapter_model.safetensors").items()}
    for seed in range(3):
        direction = {n: t.double() for n, t in random_adapter(case.raw, 4, seed=10 + seed, norms=True).items()}
        up, down = ({n: t.double() + sign * step * direction[n] for n, t in adapter.items()} for sign in (1, -1))
        want = (value(up) - value(down)) / (2 * step)
        got = sum((gradient[n] * direction[n]).sum() for n in direction)
        assert abs(got - want) < 1e-4 * max(abs(want), 1), (got, want)


# -----------------------------------------------------------------------------
# Files

@pytest.mark.parametrize("norms", [False, True])
def test_adapter_comes_back_from_its_folder_bit_for_bit(tiny, tmp_path, norms):
    case = tiny["untied"]
    model, _ = adapted(case, base="nvfp4", norms=norms)
    save_adapter(model, tmp_path / "adapter")
    again = load(case.folder, base="nvfp4", device="cpu")
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again.adapter.master, model.adapter.master)
    tokens = tokens_of(case, 2, 13)
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_saved_tensors_bear_pefts_names_and_values(tiny, tmp_path):
    model, adapter = adapted(tiny["tied"], norms=True)
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    assert all(torch.equal(saved[name], adapter[name]) for name in adapter)


def test_peft_computes_the_same_from_our_folder(tiny):
    model, _ = adapted(tiny["tied"], rank=4, alpha=6, norms=True, seed=2)          # as make_reference.py gave to PEFT
    with torch.no_grad():
        got = model(REFERENCE["tied.tokens"])
    assert (got - REFERENCE["tied.ours_in_peft"]).abs().max() < FP32
    assert (got - REFERENCE["tied.logits"]).abs().max() > 1                          # the adapter matters


def test_pefts_own_folder_computes_the_same_here(tiny):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    load_adapter(model, HERE / "peft_adapter")
    assert model.adapter.rank == 3 and model.adapter.alpha == 5 and model.adapter.norms
    with torch.no_grad():
        got = model(REFERENCE["tied.tokens"])
    assert (got - REFERENCE["tied.peft_adapter"]).abs().max() < FP32


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize("base", ["bf16", "nvfp4"])
def test_merged_folder_is_a_bf16_checkpoint_with_the_same_logits(tiny, tmp_path, monkeypatch, shape, base):
    case, tokens = tiny[shape], tokens_of(tiny[shape], 2, 13)
    model, adapter = adapted(case, norms=True, base=base)
    monkeypatch.setattr(nvfp4, "SHARD_BYTES", 20_000)                    # several shards
    merge(model, tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    again = load(tmp_path / "merged", base="bf16", device="cpu")
    for name, got in again.tensors():
        assert torch.equal(got.bfloat16().float(), got.float()), f"{name} is not bf16"
    if base == "bf16":
        for name, exact in merged(case.tensors, adapter, 6 / 4).items():
            got = dict(again.tensors())[name].double()
            assert ((got - exact).abs() <= 2.0**-8 * exact.abs() + 1e-7).all(), name
    with torch.no_grad():
        want, got = model(tokens), again(tokens)
    # A weight is off by 2^-9 / sqrt(3) of itself, as noise, in ~14 matrices on a token's way: 0.4 % of the spread. The
    # adapter, large beside W, makes the blocks amplify it: seen 1.0 %.
    assert (got - want).std() < 0.02 * want.std()


def test_merge_does_not_write_into_a_folder_that_holds_something(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        merge(adapted(tiny["tied"])[0], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "adapter.bin"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"


# -----------------------------------------------------------------------------
# Bad folders

def edited(tmp_path, config=None, tensors=None, drop=()):
    """peft_adapter/ with some of its config and tensors changed."""
    folder = tmp_path / "adapter"
    shutil.copytree(HERE / "peft_adapter", folder)
    raw = json.loads((folder / "adapter_config.json").read_text()) | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in drop}))
    kept = {n: t for n, t in load_file(folder / "adapter_model.safetensors").items() if n not in drop}
    save_file(kept | (tensors or {}), folder / "adapter_model.safetensors")
    return folder


A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize("change,message", [
    (dict(config=dict(r=4)), "tensors are missing, unknown or of another shape, first base_model.model.model.layers.0"),
    (dict(drop=(A,)), f"1 tensors .* first {A}"),
    (dict(tensors={A: torch.zeros(3, 65)}), f"1 tensors .* first {A}"),
    (dict(tensors={"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 64)}), "1 tensors .* first .*lm_head"),
    (dict(config=dict(target_modules=["q_proj", "v_proj"])), "need a plain LoRA adapter on q_proj, .* got LORA on"),
    (dict(config=dict(peft_type="IA3")), "got IA3"),
    (dict(config=dict(use_dora=True)), "plain LoRA"),
    (dict(config=dict(use_rslora=True)), "use_rslora"),                   # its scale is alpha / sqrt(r)
    (dict(config=dict(alpha_pattern={"q_proj": 64})), "alpha_pattern"),
    (dict(drop=("r",)), "adapter_config.json: needs r and lora_alpha"),
])
def test_adapter_that_would_compute_something_else_is_refused(tiny, tmp_path, change, message):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    with pytest.raises(ValueError, match=message):
        load_adapter(model, edited(tmp_path, **change))


def test_folder_without_a_readable_adapter_is_refused(tiny, tmp_path):
    model = load(tiny["tied"].folder, base="bf16", device="cpu")
    with pytest.raises(ValueError, match="nothing: not a readable PEFT adapter folder"):
        load_adapter(model, tmp_path / "nothing")
    file = edited(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a readable PEFT adapter folder"):
        load_adapter(model, file.parent)


def test_adapter_of_another_model_is_refused(tiny, tmp_path):
    save_adapter(adapted(tiny["untied"])[0], tmp_path)
    with pytest.raises(ValueError, match="of another shape, first base_model.model.model.layers.0"):
        load_adapter(load(tiny["tied"].folder, base="bf16", device="cpu"), tmp_path)


def test_misfits_stop(tiny):
    with pytest.raises(AssertionError, match="rank must be at least 1, got 0"):
        Adapter(load(tiny["tied"].folder, base="bf16", device="cpu"), rank=0)
    model, _ = adapted(tiny["tied"])
    with pytest.raises(AssertionError, match=r"q_proj: x \(3, 65\) does not fit K=64"):
        model.layers[0].qkv(torch.zeros(3, 65))
    y = model.layers[0].o(torch.zeros(3, 64, requires_grad=True))
    with model.adapter.off(), pytest.raises(AssertionError, match="switched between forward and backward"):
        y.sum().backward()
    with pytest.raises(AssertionError, match="do not add up to N=64"):
        weight = FrozenWeight((torch.zeros(64, 64),), None, (64, 64), torch.float32)
        Linear(weight, ["a", "b"], (32, 16))


def test_a_scratch_that_found_no_room_is_asked_for_again(tiny, monkeypatch):
    # memory.Plan tries a large micro-batch, runs out of memory and goes on with a smaller one.
    model, _ = adapted(tiny["tied"])
    monkeypatch.setattr("lora.scratch", {(torch.device("cpu"), torch.float32): torch.empty(1)})

    def no_room(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
        full.setattr(torch, "empty", no_room)
        model.layers[0].qkv.wide(torch.float32)
    assert model.layers[0].qkv.wide(torch.float32).shape == (128 + 12, 64 + 12)
