"""
From settings to a run that is ready to start.

    run = prepare(settings, earlier)             # both from config.read_settings()
    progress = begin(run)                        # at step 0, or at the checkpoint of a resumed run

All checks happen here, before the first step, and the cheap ones before downloading, tokenizing
and loading weights.
"""
import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

import adapters
import calibrate
import env
import full
import grpo
import lora
import nvfp4
import rewards
from files import UserError, write_json
from harness import console, memory, tracker
from harness.config import MAY_CHANGE, Model, Objective, Rollout, Settings, without_local
from harness.console import Watch
from harness.folder import RunFolder, checkpoints_in, claim
from learner import Learner
from loading import load
from model import ModelConfig, Transformer
from ops import ON_GPU
from prompts import Tokenizer, digest_of, split_problems
from ranks import LOCAL_RANK, RANK, WORLD, gather, join_ranks, say
from sampler import Sampler, TorchEngine
from scheduler import KV_BLOCK
from tasks import plugin
from tasks.problems import most_again
from weights import ModelFolder


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Each step makes a new one."""
    step: int = 0                                # completed steps
    cursor: int = 0                              # groups sampled so far
    tokens: int = 0                              # completion tokens sampled so far
    skipped: int = 0                             # updates whose loss or gradient was not finite
    replayed: int = 0                            # how many of the groups answered a problem again
    queue: list = dataclasses.field(default_factory=list)    # of --replay: [step, problem's number]

    @property
    def next_new(self) -> int:
        """The index of the next new problem in the run's order."""
        return self.cursor - self.replayed


@dataclass(frozen=True)
class Run:
    """What all steps of a run share."""
    settings: Settings
    tokenizer: Tokenizer
    problems: list                               # of tasks.problems.Problem, to train on
    held_out: list                               # the same, to evaluate on
    grade: Callable                              # rewards.grade_rows(problems, rows)
    model: Transformer
    learner: Learner
    sampler: Sampler
    folder: RunFolder
    watch: Watch
    tracker: ModuleType | None                   # the library of --report-to
    flags: dict                                  # run.json without `about`
    digests: dict                                # plugin.digests() of the settings
    earlier: dict | None                         # the run.json of a resumed run

    def end(self, then: str) -> str:
        """Ends a run that fails or is stopped: RunFolder.end(), and only then the tracker."""
        saved = self.folder.end(then)
        if self.tracker:
            signal.signal(signal.SIGINT, signal.SIG_DFL)         # it may wait for the network
            with contextlib.suppress(Exception):                 # start() may not have been called
                say(f"{saved}; waiting for {self.tracker.__name__}")
                self.tracker.finish()
        return saved


def prepare(settings: Settings, earlier: dict | None) -> Run:
    """-> a Run. UserError if flags, files or the machine don't allow it.

    earlier: the content of run.json if the run is resumed, else None.
    """
    began = time.perf_counter()
    device = choose_device(settings.device, settings.model, settings.kernels)
    memory.bound(settings.memory_gib, device)
    if device.type == "cuda":                    # else the first forward would wait for it
        threading.Thread(target=import_compiler, daemon=True).start()
    plug_in = plugin.Reward(settings.reward) if settings.reward else None
    library = tracker.load(settings.report_to)
    out = Path(settings.out)
    folder = ModelFolder(settings.model)
    folder.check_length(settings.max_prompt_tokens + settings.max_new_tokens)
    tokenizer = Tokenizer(folder.path, settings.thinking)
    problems, held_out = split_problems(settings, tokenizer)
    size = settings.prompts_per_step
    if settings.replay and not most_again(len(problems), size, settings.replay):
        raise UserError(f"--replay {settings.replay}: with {size} of {len(problems)} problems per "
                        "step, none would be asked again")
    claim(out, earlier is not None)              # so no other run writes there
    console.greet(settings, problems, held_out, device)
    join_ranks(device)
    flags = without_local(vars(settings))
    flags["problems_sha256"] = digest_of(problems + held_out)
    check_same_on_all_ranks(flags)
    if device.type == "cuda":
        memory.check_size(settings, ModelConfig.from_json(folder.config),
                          memory.free_memory(settings.memory_gib))
    if earlier and earlier.get("problems_sha256") != flags["problems_sha256"]:
        raise UserError(f"--resume: --data {settings.data} or --eval-data: problems or prompts "
                        "differ from those the run started with")
    model, conditions = read_model(settings, folder, tokenizer, problems, device, earlier)
    check_same_on_all_ranks(conditions)
    flags["trained_with"] = conditions
    learner = Learner(model, loss_of(settings), settings.temperature, settings.max_grad_norm,
                      settings.weight_decay)
    # Everything that a checkpoint holds. Add a fork's tensors here, before memory is divided.
    state = learner.tensors()
    limits = memory.Limits(settings.memory_gib, None, settings.micro_batch_tokens)
    sampler = divide_memory(learner, limits, settings, settings.max_prompt_tokens,
                            len(held_out), limits_at_start(earlier, limits))
    flags["memory_plan"] = limits._asdict() | {
        "kv_gib": sampler.engine.kv.nbytes / 2**30, "max_rows": sampler.max_rows,
        "micro_batch_tokens": learner.micro_batch_tokens}
    grade = functools.partial(rewards.grade_rows, tokenizer, style=settings.prompt_style,
                              plug_in=plug_in)

    def write_adapter(tensors, folder):
        adapters.save_adapter(model, folder, tensors["master"])
        write_json(folder / adapters.TRAINED_WITH, conditions)

    def write_model(tensors, folder):
        full.save(model, tensors["master"].cpu(), folder)

    result = {"lora": (write_adapter, "adapter"), "full": (write_model, "model")}
    run_folder = RunFolder(out, state, *result[settings.train])
    say(f"ready after {time.perf_counter() - began:.1f} s")
    return Run(settings, tokenizer, problems, held_out, grade, model, learner, sampler, run_folder,
               Watch(settings), library, flags, plugin.digests(settings), earlier)


def import_compiler() -> None:
    """Imports torch's compiler, in a thread that doesn't hold up a start that fails meanwhile."""
    with contextlib.suppress(Exception):         # Python is ending
        importlib.import_module("torch._inductor.compile_fx")


CALIBRATION_PROBLEMS = 128                       # as in the study


def calibration_problems(wanted: Model, device: torch.device, config: dict) -> int:
    """--calibrate, whose default depends on model and device. config: the model's config.json."""
    if wanted.calibrate is not None:
        return wanted.calibrate
    becomes_nvfp4 = wanted.base == "nvfp4" and not config.get("quantization_config")
    return CALIBRATION_PROBLEMS if becomes_nvfp4 and device.type == "cuda" else 0


def check_same_on_all_ranks(flags: dict) -> None:
    """UserError if a rank was started with different flags or problems than rank 0, as can happen
    across hosts. Paths may differ, and so may micro-batches, since all ranks use the smallest.
    """
    mine = {name: value for name, value in flags.items()
            if name not in (*MAY_CHANGE, "adapter", "micro_batch_tokens")}
    first, *others = gather([mine])
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise UserError(f"{name}: rank {rank} has {other[name]!r}, rank 0 has {value!r}")


def read_model(settings: Settings, folder: ModelFolder, tokenizer: Tokenizer, problems: list,
               device: torch.device, earlier: dict | None) -> tuple[Transformer, dict]:
    """-> the model in the format of --base and --calibrate, with a new adapter, the one from
    --adapter, or all weights trainable; its training_conditions().
    """
    folder.choose_base(settings.base)            # warns if this would lose a merged adapter
    count = calibration_problems(settings, device, folder.config)
    calibrated = Path(settings.out) / "base"     # a resumed run may have one, whatever the default
    if not calibrated.exists():
        folder.download()                        # on every rank: waiting for rank 0 would time out
    if count or calibrated.exists():
        if RANK == 0 and not calibrated.exists():
            calibrate.write_calibrated(folder, calibrated, tokenizer, problems, count, device,
                                       settings.seed, min(512, settings.max_new_tokens))
        gather([])                               # the other ranks wait here
        folder = ModelFolder(calibrated)
    adapter = starting_adapter(settings)
    model, conditions = open_model(folder, tokenizer, device, settings, adapter)
    if earlier:
        adapters.compare_conditions(f"--resume: {settings.out}",
                                    adapters.conditions_of_run(earlier), conditions, model,
                                    refuse=True)
    if settings.train == "full":
        full.attach(model)
    elif not adapter:
        lora.attach(model, settings.lora_rank, settings.lora_alpha, settings.seed)
    return model, conditions


def open_model(folder: ModelFolder, tokenizer: Tokenizer, device: torch.device, wanted: Settings,
               adapter: str | Path | None, refuse: bool = False) -> tuple[Transformer, dict]:
    """-> a model, with an adapter if one is given; its training_conditions(). The one place where
    an adapter is put on weights: prints how they differ from those it was trained on or, with
    `refuse`, raises a UserError.

    wanted: settings or flags with --base, --prompt-style and --thinking.
    """
    model = load(folder, wanted.base, device, None, tokenizer.vocab_size)
    configure_cpu(model)
    conditions = adapters.training_conditions(model, tokenizer, wanted.base, wanted.prompt_style,
                                              wanted.thinking)
    if adapter:
        adapters.compare_conditions(adapter, adapters.conditions_in(adapter), conditions, model,
                                    refuse)
        adapters.load_adapter(model, adapter)
    return model, conditions


def starting_adapter(settings: Settings) -> str | None:
    """--adapter, or None once the run has a checkpoint, which replaces it."""
    # A run that was killed before its first checkpoint starts from --adapter again.
    saved = checkpoints_in(Path(settings.out, "checkpoints"))
    return None if saved else settings.adapter


def loss_of(objective: Objective) -> grpo.Loss:
    """The loss of --loss, with the fields that a flag of the same name overrides."""
    names = [field.name for field in dataclasses.fields(grpo.Loss)]
    given = {name: getattr(objective, name) for name in names
             if getattr(objective, name, None) is not None}
    return dataclasses.replace(grpo.LOSSES[objective.loss], **given)


def limits_at_start(earlier: dict | None, limits: memory.Limits) -> memory.Limits | None:
    """The KV pool, rows and micro-batches that a resumed run started with; None for a new run, or
    if --memory-gib has a new value.
    """
    # They decide which answers are decoded together and in which order gradients are summed, and
    # thus the last digits. Measuring again could give another plan, as only the first start
    # calibrates, which leaves memory in a different state.
    if earlier is None or limits.memory_gib not in (None, earlier["memory_plan"]["memory_gib"]):
        return None
    return memory.Limits(**earlier["memory_plan"])._replace(memory_gib=limits.memory_gib)


def divide_memory(learner: Learner, limits: memory.Limits, rollout: Rollout,
                  max_prompt_tokens: int, num_held_out: int,
                  first_limits: memory.Limits | None = None) -> Sampler:
    """-> the sampler of the learner's model, with its KV pool. Sets the learner's
    micro_batch_tokens and kept_layers. first_limits: see limits_at_start; replaces `limits` if it
    fits.
    """
    model = learner.model
    longest = max_prompt_tokens + rollout.max_new_tokens
    limits = limits._replace(max_rows=rollout.max_rows)
    # Each rank gets its share of a step's answers and of the held-out problems.
    answers = max(math.ceil(rollout.prompts_per_step / WORLD) * rollout.group_size,
                  math.ceil(num_held_out / WORLD))
    if model.device.type == "cuda":
        def plan_of(limits):
            return memory.Plan(model, limits, max_prompt_tokens, rollout.max_new_tokens, answers,
                               learner.loss.needs_reference)
        try:
            plan = plan_of(first_limits or limits)
        except UserError as error:
            if not first_limits:
                raise
            say(f"the memory plan that the run started with does not fit ({error}); with a new "
                "one, results may differ in the last digits from an uninterrupted run")
            plan = plan_of(limits)
        plan.pool = min(gather([plan.pool]))     # run.json has one pool size for all ranks,
        rows = min(gather([plan.max_rows]))      # and one number of rows
        sampler = Sampler(model, longest, rows, plan.pool / 2**30)
        tokens = plan.micro_batch_tokens
        kept_layers = plan.dry_step().kept_layers
    else:
        rows = min((first_limits or limits).max_rows or memory.MAX_ROWS[0], answers)
        sampler = Sampler(model, longest, rows, (first_limits or limits).kv_gib)
        tokens = (first_limits or limits).micro_batch_tokens or learner.micro_batch_tokens
        # A small model's activations are cheaper to keep than to recompute.
        kept_layers = len(model.layers) if model.config.hidden <= 256 else 0
    tokens = min(gather([tokens]))               # ranks share one list and must all cut it alike
    learner.micro_batch_tokens = tokens
    learner.kept_layers = kept_layers
    say(f"{learner.adapter.master.numel():,} trained parameters; KV pool of "
        f"{sampler.engine.kv.nbytes / 2**30:.2f} GiB, "
        f"{(sampler.kv_blocks - 1) * KV_BLOCK:,} tokens; "
        f"micro-batches of {tokens:,} tokens; {kept_layers} of {len(model.layers)} layers keep "
        "their activations")
    return sampler


def begin(run: Run) -> Progress:
    """Writes run.json, or reads a resumed run's checkpoint -> its Progress."""
    earlier, device = run.earlier, run.model.device
    cores = f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else cores
    hardware = f"{WORLD} x {processor}"
    about = env.provenance(hardware) | run.digests
    counters = run.folder.start(earlier or run.flags | {"about": about}, earlier is not None)
    run.learner.adapter.sync()                   # the checkpoint's tensors are in place
    names = {field.name for field in dataclasses.fields(Progress)}
    if counters:                                 # of a run before --replay existed
        counters = {"replayed": 0, "queue": []} | counters
    if counters and counters.keys() != names:    # a missing one would start again from 0
        raise UserError(f"{run.folder.checkpoints}: state.json has {', '.join(counters)}, expected "
                        f"{', '.join(sorted(names))}")
    progress = Progress(**counters)
    if earlier:
        changes = {name: run.flags[name] for name in (*MAY_CHANGE, "steps", "trained_with")
                   if run.flags[name] != earlier.get(name)}
        resumed = earlier.get("resumed", [])
        if tell_other_machine([earlier["about"], *resumed][-1], about):
            changes["resumed"] = [*resumed, {"step": progress.step} | about]
        if changes:
            run.folder.note(**changes)
        if "steps" in changes:
            say(f"--steps was {earlier['steps']}, is now {changes['steps']}: the learning rate and "
                "noise schedules stretch, so both may rise again")
    run.folder.snapshot(dataclasses.asdict(progress))
    if run.tracker:
        tracker.start(run.tracker, run.folder)
    if device.type == "cuda":                    # console.farewell() prints training's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return progress


def tell_other_machine(was: dict, now: dict) -> bool:
    """Prints what differs between two `about` of run.json, if anything does: code, libraries or
    hardware. -> whether it does.
    """
    flat = [about | about["versions"] for about in (was, now)]
    changed = [f"{key} was {flat[0][key]}, is now {value}" for key, value in flat[1].items()
               if key not in ("versions", "program", "command", "date")
               and flat[0].get(key, value) != value]
    if changed:
        say(f"{'; '.join(changed)}: results may differ from an uninterrupted run")
    return bool(changed)


# -----------------------------------------------------------------------------
# The device

def choose_device(name: str | None, model: str | Path, kernels: str | None = None) -> torch.device:
    """--device and --kernels -> the device, made torch's current one because Triton launches there.
    Under torchrun it is this rank's GPU; without a name, a GPU if there is one, else the CPU.

    UserError if there is no such device, if the kernels don't run on it, if one GPU is named under
    torchrun, or if a model would be downloaded for a CPU without an explicit --device cpu.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and not Path(model).is_dir():
            raise UserError(f"--model {model}: there is no such folder, and models are downloaded "
                            "only if torch sees a GPU (--device cpu runs them on the CPU, far too "
                            "slowly to train)")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not match:
        raise UserError(f"--device {name}: expected cpu, cuda or cuda:N")
    if name == "cpu":
        if kernels == "portable":
            raise UserError(f"--kernels {kernels} needs a GPU, but the device is cpu")
        return torch.device(name)
    if WORLD > 1 and match[1]:
        raise UserError(f"--device {name}: under torchrun each rank takes its own GPU: use "
                        "--device cuda")
    index = LOCAL_RANK if WORLD > 1 else int(match[1] or 0)
    if index >= torch.cuda.device_count():
        raise UserError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    load_kernels(device, kernels)
    return device


def load_kernels(device: torch.device, kernels: str | None = None) -> None:
    """Registers the functions for this GPU: plain ones for kernels "torch", else those in fast/.
    UserError if those don't run there.
    """
    if kernels == "torch":
        from fast import backward  # late: a CPU doesn't need it
        ON_GPU.update(backward.gpu_versions(), pack=nvfp4.plain_weight, GraphEngine=TorchEngine)
        return
    instead = "; try --kernels torch (untested there)"
    if torch.version.hip:  # ROCm: an MI200 reports capability (9, 0), as if it were a Hopper
        raise UserError(f"--device {device}: an AMD GPU, but the kernels run only on NVIDIA GPUs"
                        f"{instead}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise UserError(f"--device {device}: {torch.cuda.get_device_name(device)} "
                        f"(sm_{major}{minor}): the kernels need sm_80 (Ampere) or later{instead}")
    if not importlib.util.find_spec("triton"):
        raise UserError(f"--device {device}: the kernels need Triton: pip install triton, or use "
                        "--kernels torch")
    import fast.register  # late: it needs Triton
    if kernels:
        ON_GPU["GraphEngine"] = functools.partial(fast.decode.GraphEngine, kernels=kernels)


def configure_cpu(model) -> None:
    """On a CPU, makes runs with the same seed bit-identical, and small models fast."""
    # Answers to one problem share its prompt, whose gradients torch's threads add up in arbitrary
    # order. Deterministic mode fixes the order.
    if model.device.type == "cpu":
        # torch.use_deterministic_algorithms(True) does the same, but also imports the compiler.
        torch.set_deterministic_debug_mode("error")
        # The mode would also fill every torch.empty() with NaN, for debugging.
        torch.utils.deterministic.fill_uninitialized_memory = False
        # More threads would spend longer waiting for each other than computing.
        if model.config.hidden < 1024:
            torch.set_num_threads(min(2, torch.get_num_threads()))
