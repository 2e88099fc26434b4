"""
The settings of a run: what each is called, what it defaults to, and where that default comes from.

Every field of the dataclasses below is a flag of train.py: `Rollout.group_size` is `--group-size`.
The field holds the flag's default, its help text and the values that it may have, so this file is
the one place to look up or to change a setting. A setting is added by adding a field.

    settings, before = read_settings()           # from sys.argv; before: the run that is resumed
    settings.rollout.group_size                  # 8

Settings are made once and never change. run.json holds them flat, flag name -> value, and
`--resume` and `--like` read them back from there. check_settings() rejects invalid values with a
one-line error before anything expensive starts.

The defaults are those of the first recipe in docs/recipes.md, for 200 steps. Some defaults of the
bundled tiny model are its own, TINY_DEFAULTS. --preset replaces the defaults by a
row of PRESETS; read_settings() has the order of all sources. The help texts say where a value comes
from: "study" is study/README.md, "Table 4" and sections are those of the paper (QeRL, arXiv
2510.11696), and "release" is the authors' code (NVlabs/QeRL).
"""
import argparse
import dataclasses
import importlib.util
import re
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path

import aqn
import grpo
import nvfp4
from files import read_json, short_repr
from prompts import STYLES
from ranks import RANK, say
from tasks.problems import SUFFIXES
from weights import other_conditions, read_peft_config

TINY_MODEL = Path(__file__).parent.parent / "tiny"


def setting(default, text: str, allowed: str = "", choices=None, place: bool = False):
    """One setting, as a dataclass field.

    allowed: an interval as in mathematics, "(0, 1]"; choices: the values that are allowed. place:
    the setting belongs to the machine or the folder in which a run takes place and not to the run
    itself, so `--resume` and `--like` do not take it over.
    """
    about = {"help": text, "allowed": allowed, "choices": choices, "place": place}
    return dataclasses.field(default=default, metadata=about)


KERNELS = "hopper", "portable"                   # --kernels, besides auto
AT_LEAST_1 = "[1, 2e9]"
MAX_ROWS = "[1, 32768]"                          # kernels count row * width in 32 bits

# --preset: the values of all flags that are not given. Values that equal a default are listed too,
# so that a preset does not change when a default does.
PRESETS = {
    # Table 4 (GSM8K). Its codes are rounded to nearest; here a search chooses the block scales.
    "paper": dict(steps=600, prompts_per_step=16, group_size=8, epochs=4, updates_per_rollout=1,
                  lr=1e-5, max_new_tokens=4096, temperature=1.0, overlong="mask", calibrate=0,
                  sigma_start=1e-2, sigma_end=5e-4, noise_stages=10, noise_schedule="exponential",
                  advantage_scale="group", lr_schedule="cosine", loss="dapo", lora_rank=32,
                  lora_alpha=32.0),
}

# -----------------------------------------------------------------------------
# The settings. Each class is a section of --help; its docstring is the section's title.

@dataclass(frozen=True)
class General:
    """what most runs set"""
    preset: str | None = setting(None, "paper: the values of the paper's Table 4 for all flags "
                                 "that are not given (no run with them was completed here)",
                                 choices=tuple(PRESETS), place=True)
    steps: int = setting(200, "training steps, a batch of rollouts each; may grow with --resume "
                         "(study: 200 at 0.5B and 1.5B)", AT_LEAST_1)
    seed: int = setting(0, "random seed of the adapter, the order of problems, sampling and noise",
                        "[0, 2e18]")
    out: str | None = setting(None, "run folder (default: runs/MODEL-BASE-DATA-SEED)", place=True)
    resume: bool = setting(False, "continue from the newest intact checkpoint in --out", place=True)
    like: str | None = setting(None, "folder of another run, whose flags become the defaults",
                               place=True)


@dataclass(frozen=True)
class Model:
    """model and adapter"""
    model: str = setting(str(TINY_MODEL), "folder, Hugging Face id, or a name such as qwen2.5-7b; "
                         "tiny: the bundled model, which has defaults of its own, unless a folder "
                         "here has that name (default: tiny)")
    base: str = setting("nvfp4", "format of the frozen linears", choices=nvfp4.FORMATS)
    calibrate: int | None = setting(
        None, "choose the NVFP4 codes by the model's own answers to this many training problems; "
        "takes about a minute and writes the new weights to OUT/base; 0: off (default: 128 where "
        "a 16-bit model becomes NVFP4 on a GPU, else 0; study/first.md: in greedy answers a 0.5B "
        "ends 3.5 points higher than with codes rounded to nearest)", "[0, 1e5]")
    dtype: str | None = setting(
        None, "type of the inputs of matmuls; with float16 sampler and learner differ 8 times less "
        "(default: bfloat16 on a GPU, float32 on a CPU)", choices=("bfloat16", "float16"))
    lora_rank: int = setting(32, "rank of every LoRA adapter (paper 4.1)", AT_LEAST_1)
    lora_alpha: float = setting(32, "the adapter is scaled by alpha / rank (release: alpha = rank)",
                                "(0, 1e9]")
    train_norms: bool = setting(False, "also train the two norms of each layer (release)")
    adapter: str | None = setting(None, "PEFT folder to start from; the run takes over its rank, "
                                  "alpha and norms")


@dataclass(frozen=True)
class Data:
    """problems and prompts"""
    data: str = setting("gsm8k", "gsm8k, math, arithmetic, a .jsonl, .json or .parquet file, or a "
                        "Hugging Face id")
    eval_data: str | None = setting(None, "held-out problems (default: the test split of --data, "
                                    "or the end of a file)")
    eval_problems: int = setting(256, "how many held-out problems; 0: all of them", "[0, 2e9]")
    prompt_style: str = setting("boxed", f"{', '.join(STYLES)}, or module:function; "
                                "boxed is Qwen's request for maths, tags is the paper's format")
    thinking: str = setting("off", "whether a model that can do both, such as Qwen3, thinks before "
                            "it answers; a thinking answer needs more --max-new-tokens",
                            choices=("on", "off"))
    max_prompt_tokens: int = setting(512, "longer prompts are left out (release: 256)", AT_LEAST_1)
    reward: str | None = setting(None, "module:function that scores answers in place of the "
                                 "built-in grader")


@dataclass(frozen=True)
class Rollout:
    """rollouts"""
    prompts_per_step: int = setting(64, "problems in a training step (study: 64 x 8 answers in "
                                    "every good run; Table 4: a batch of 128)", AT_LEAST_1)
    group_size: int = setting(8, "answers to each problem (study; Table 4: 8, on BigMath 16)",
                              "[2, 1e6]")
    max_new_tokens: int = setting(512, "longest answer in tokens; harder problems than GSM8K's "
                                  "need more (study: 512, which cut off 1 to 7 %% of the answers; "
                                  "Table 4: 4096, on BigMath 8192)", AT_LEAST_1)
    temperature: float = setting(1.0, "softmax temperature of sampling and of every log-prob "
                                 "(Table 4)", "(0, 1000]")
    max_rows: int = setting(256, "most answers that are decoded at a time", MAX_ROWS)


@dataclass(frozen=True)
class Noise:
    """adaptive quantization noise (AQN)"""
    sigma_start: float = setting(0.0, "the noise's standard deviation (sigma) in the first noisy "
                                 "stage; 0: no noise (study: 1e-2 is too small to have an effect, "
                                 "5e-2 does not help by a point; Table 4: 1e-2)", "[0, 10]")
    sigma_end: float = setting(5e-4, "the sigma to which the schedule decays (Table 4)", "[0, 10]")
    noise_stages: int = setting(10, "K of Algorithm 1; the first stage has no noise (Table 4)",
                                AT_LEAST_1)
    noise_schedule: str = setting("exponential", "how sigma decays (Fig. 9)", choices=aqn.SCHEDULES)


@dataclass(frozen=True)
class Objective:
    """what is optimised"""
    loss: str = setting(
        "dapo", "which policy loss; dapo: the mean over all tokens of an update (paper, Table 2); "
        "grpo: the mean over answers of their means over tokens (paper, Table 1); dr_grpo: divided "
        "by a constant; gspo: as grpo, with one ratio for a whole answer, clipped at 1 - 3e-4 and "
        "1 + 4e-4", choices=grpo.LOSSES)
    clip_low: float | None = setting(None, "the ratio is clipped at 1 - this (default: the loss's "
                                     "own)", "(0, 1]")
    clip_high: float | None = setting(None, "the ratio is clipped at 1 + this (default: the loss's "
                                      "own)", "(0, 1e9]")
    correction: str | None = setting(
        None, "how the loss makes up for the difference between sampler and learner, from noise "
        "and rounding; truncate: importance weights of at most 2; ppo: clips the ratio of policy "
        "to sampler (paper; study: with a sigma of 5e-2 it costs 6 points); off: not at all "
        "(release) (default: the loss's own, truncate)",
        choices=grpo.CORRECTIONS)
    advantage_scale: str = setting("none", "group: centred rewards are divided by the standard "
                                   "deviation of their group (paper); none: they are not (Dr. "
                                   "GRPO; study: neither is shown to be better, none minus group is "
                                   "+0.4 points [-0.9, +1.7])", choices=grpo.SCALES)
    kl_beta: float | None = setting(None, "weight of the KL term towards the model without its "
                                    "adapter (default: the loss's own, 0)", "[0, 1e9]")
    format_weight: float = setting(0.0, "added to the reward of an answer in the requested format "
                                   "(release: 0.1 of the reward of a right answer)", "[0, 1e9]")
    overlong: str = setting("keep", "answers cut off at --max-new-tokens; keep: graded like any "
                            "other, so nearly always as wrong (study); mask: left out of the loss "
                            "(release; study: answers then get longer)", choices=("mask", "keep"))
    overlong_buffer: int = setting(0, "tokens of DAPO's soft length penalty, with --overlong keep; "
                                   "unlike in DAPO it acts only in groups whose answers differ "
                                   "without it, and is not divided; 0: none")


@dataclass(frozen=True)
class Optim:
    """optimizer"""
    lr: float = setting(1e-4, "peak learning rate (study: 1e-4 was good at 0.5B and 1.5B; 2e-4 "
                        "was better in 16 bits, and in 4 bits better at 1.5B on MATH and no better "
                        "at 0.5B; 4e-4 bad; Table 4: 1e-5, for bf16 LoRA 5e-6)", "(0, 10]")
    lr_schedule: str = setting(
        "constant", "after the warm-up: constant with a linear end over the last quarter, or half "
        "a cosine down to 0 (release); the study has both and cannot tell them apart",
        choices=("cosine", "constant"))
    warmup: float = setting(0.1, "share of the run in which the rate rises (release)", "[0, 1]")
    epochs: int = setting(1, "passes over each batch of rollouts (study; Table 4: 4 updates)",
                          AT_LEAST_1)
    updates_per_rollout: int = setting(1, "disjoint parts of a batch, each with an optimizer step "
                                       "of its own", AT_LEAST_1)
    max_grad_norm: float = setting(0.2, "bound of the global gradient norm (release)", "(0, 1e9]")
    weight_decay: float = setting(0.0, "weight decay of the adapter's A and B, decoupled from the "
                                  "gradient (release: 0.1)", "[0, 1e9]")


@dataclass(frozen=True)
class Memory:
    """device and memory"""
    device: str | None = setting(None, "cpu, cuda or cuda:N (default: a GPU if there is one)",
                                 place=True)
    kernels: str = setting("auto", "which kernels multiply 4-bit weights while decoding; auto: by "
                           "the GPU", choices=("auto", *KERNELS), place=True)
    memory_gib: float | None = setting(None, "GiB of the GPU's memory that the process may take "
                                       "(default: what is free)", "(0, 1e9]", place=True)
    kv_gib: float | None = setting(None, "GiB of the KV cache (default: what is needed, as far as "
                                   "the memory allows)", "(0, 1e9]", place=True)
    micro_batch_tokens: int | None = setting(None, "tokens in one forward and backward (default: "
                                             "as the memory allows)", AT_LEAST_1)


@dataclass(frozen=True)
class Watching:
    """watching and keeping"""
    eval_every: int = setting(20, "steps between evaluations on the held-out problems", AT_LEAST_1)
    save_every: int = setting(20, "steps between checkpoints", AT_LEAST_1)
    keep: int | None = setting(None, "keep the adapter of every so many steps, and the best one, "
                               "in OUT/adapters", AT_LEAST_1, place=True)
    show: int | None = setting(None, "print an answer every so many steps", AT_LEAST_1, place=True)
    watch: str = setting("on", "on ends a run that cannot learn any more and warns of what may be "
                         "wrong; off does neither", choices=("on", "off"), place=True)
    report_to: str | None = setting(
        None, "also send each step's metrics to this tracker; needs its Python package",
        choices=("trackio", "wandb"), place=True)


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""
    general: General = General()
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    noise: Noise = Noise()
    objective: Objective = Objective()
    optim: Optim = Optim()
    memory: Memory = Memory()
    watching: Watching = Watching()

    def flat(self) -> dict:
        """Name -> value of every setting, as run.json holds them."""
        return {name: value for section in dataclasses.fields(self)
                for name, value in vars(getattr(self, section.name)).items()}

    @classmethod
    def of(cls, values: dict) -> "Settings":
        """From names and values as flat() gives them; a name that is missing has its default."""
        def made(section):
            names = [field.name for field in dataclasses.fields(section)]
            return section(**{name: values[name] for name in names if name in values})
        return cls(*(made(field.type) for field in dataclasses.fields(cls)))

    def replace(self, **values) -> "Settings":
        """The same settings except for these."""
        return Settings.of(self.flat() | values)


FIELDS = {field.name: field for section in dataclasses.fields(Settings)
          for field in dataclasses.fields(section.type)}
assert len(FIELDS) == len(Settings().flat()), "two sections have a setting of the same name"


# The bundled tiny model, which is that of a run without --model, learns arithmetic, with sizes that
# suit two CPU cores. The noise, the divided advantages and the cosine are the paper's or its
# authors': a newcomer's first run and tools/walkthrough.py then go through every part of the
# method.
TINY_DEFAULTS = dict(data="arithmetic", steps=48, prompts_per_step=16, max_prompt_tokens=64,
                     max_new_tokens=48, lr=5e-4, overlong="mask", calibrate=0, sigma_start=1e-2,
                     advantage_scale="group", lr_schedule="cosine")


# -----------------------------------------------------------------------------
# From the command line and from run.json

class Help(argparse.HelpFormatter):
    """Adds each flag's default to its help, unless the text tells one itself."""

    def _get_help_string(self, action):
        # By identity: 0 is a default to tell, and equals False.
        no_default = any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS))
        told = no_default or not action.option_strings or "(default:" in action.help
        return action.help + ("" if told else " (default: %(default)s)")


class LongHelp(Help, argparse.RawDescriptionHelpFormatter):
    """The same for a program whose help begins with its docstring, which keeps its lines."""


def type_of(field: dataclasses.Field) -> type:
    """int of a field of type int, and of one of type int | None."""
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else [field.type]
    return kinds[0]


def new_parser() -> argparse.ArgumentParser:
    """-> the parser of train.py: a flag for every field of Settings."""
    parser = argparse.ArgumentParser(
        description="GRPO/DAPO of a Qwen2.5 or Qwen3 model: frozen 4-bit weights, LoRA, AQN.",
        usage="train.py [flags], --help lists them", allow_abbrev=False, formatter_class=Help,
        add_help=False)                          # the defaults that it shows follow from other flags
    parser.add_argument("-h", "--help", action="store_true",
                        help="show this help message and exit")
    for section in dataclasses.fields(Settings):
        add_section(parser, section.type)
    return parser


def add_section(parser: argparse.ArgumentParser, section: type) -> None:
    """A flag for every field of a dataclass of settings, under its docstring as a title."""
    group = parser.add_argument_group(section.__doc__)
    for field in dataclasses.fields(section):
        choices = field.metadata["choices"]
        how = {"action": "store_true"} if field.type is bool else {
            "type": type_of(field), "choices": choices and list(choices),
            "default": field.default}
        group.add_argument(option(field.name), help=field.metadata["help"], **how)


def section_of(section: type, args: argparse.Namespace):
    """What the flags of add_section() gave, as one object of that dataclass."""
    return section(**{field.name: getattr(args, field.name)
                      for field in dataclasses.fields(section)})


# Flags that do nothing where --sigma-start is 0.
NOISE_FLAGS = {field.name for field in dataclasses.fields(Noise)} - {"sigma_start"}

# Settings that a run.json may hold and this version lacks -> the only value that it
# accepts, which is what it does anyway.
GONE = {"noise_kind": "absolute", "noise_draws": "step"}
# What a run.json holds besides settings. A run that notes down something else cannot be resumed.
NO_SETTINGS = {"about", "resumed", "ended", "problems_sha256", "weights_sha256", "memory_plan",
               "calibrate_by_default"}

# Flags that a resumed run does not take over, although they decide the order in which numbers are
# summed and with it their last digits.
OF_A_START = "kernels", "memory_gib", "kv_gib"


def read_settings(argv: list | None = None) -> tuple[Settings, Settings | None]:
    """-> the settings of a run, and those that it began with if it is resumed, else None.

    A setting has the value of the last of these sources that holds it: the field's default,
    TINY_DEFAULTS for the bundled model, --preset, the run.json of --like or --resume, and the
    command line. With --help all but the command line are shown as defaults, and the program ends.

    --calibrate may still be None, because it depends on model and device. prepare.prepare()
    decides it, and run.json holds what it decided.
    """
    parser = new_parser()
    given = given_flags(parser, argv)
    show_help = given.pop("help", False)
    check_sources(given)
    defaults = Settings().flat()
    if is_bundled(given.get("model")):
        defaults |= TINY_DEFAULTS
        if "model" in given:
            given["model"] = str(TINY_MODEL)
    defaults |= PRESETS.get(given.get("preset"), {})
    folder = given.get("like")
    if given.get("resume"):
        folder = given["out"] = str(run_folder(defaults | given))
    held = read_run_json(Path(folder) / "run.json") if folder else {}
    if folder:
        check_gone(folder)
    if given.get("resume"):
        check_can_resume(folder, held)
    defaults |= without_places(held)
    if given.get("like") and read_json(Path(folder) / "run.json").get("calibrate_by_default"):
        defaults["calibrate"] = None             # that run decided it for its model and device
    if show_help:
        parser.set_defaults(**defaults)
        parser.print_help()
        parser.exit()
    values = with_absolute_paths(defaults | given)
    values["out"] = str(run_folder(values))
    tell_differences(values, held)
    if values["adapter"] and not values["resume"]:
        check_shape_flags(values["adapter"], given)
    if not values["sigma_start"] and not values["resume"]:
        for name in sorted(NOISE_FLAGS & given.keys()):
            if given[name]:                      # --sigma-end 0 says the same as --sigma-start 0
                raise ValueError(f"{option(name)} {given[name]}: --sigma-start is 0, so there is "
                                 "no noise")
    if folder:
        tell_functions(folder, values)
    return Settings.of(values), Settings.of(held) if values["resume"] else None


def given_flags(parser: argparse.ArgumentParser, argv: list | None) -> dict:
    """Name and value of each flag that stands on the command line, without defaults."""
    absent = object()
    empty = argparse.Namespace(**dict.fromkeys(["help", *FIELDS], absent))
    values = vars(parser.parse_args(argv, empty))
    return {name: value for name, value in values.items() if value is not absent}


def is_bundled(model: str | None) -> bool:
    """Whether --model means the bundled model with its defaults: it does if it is absent, and as
    "tiny" unless the working directory has another folder of that name. A path, also that of the
    bundled model, is a folder like any other.
    """
    if model != "tiny":
        return model is None
    return not Path(model).is_dir() or Path(model).resolve() == TINY_MODEL.resolve()


def check_sources(given: dict) -> None:
    """ValueError for two flags that both give values to all others."""
    if given.get("resume") and given.get("like"):
        raise ValueError("--like begins a run and --resume continues one: give one of the two")
    if given.get("preset") and (given.get("resume") or given.get("like")):
        raise ValueError(f"--preset {given['preset']}: --resume and --like take the values of "
                         "another run, give one of the two")


def check_can_resume(folder: str, held: dict) -> None:
    """ValueError if the values of a run's run.json lack what a run is, or were edited."""
    if not {"model", "base", "data"} <= held.keys():
        raise ValueError(f"{Path(folder) / 'run.json'}: has no model, base or data")
    check_adapters_run(Path(folder), held)


def check_gone(folder: str) -> None:
    """ValueError if a run was made with a setting that is not here, by another version or a fork:
    this one would train on without it.
    """
    path = Path(folder) / "run.json"
    known = Settings().flat().keys() | NO_SETTINGS
    for name, value in read_json(path).items():
        if name not in known and (name not in GONE or value != GONE[name]):
            raise ValueError(f"{path}: {name} is {short_repr(value)}, which this version does not "
                             "have: go on with the version that began the run")


def tell_differences(values: dict, held: dict) -> None:
    """Says which settings differ from those of the run that is resumed or that --like names.

    held: the values in its run.json, {} if there is none. A resumed run is told of OF_A_START
    alone: check_settings() refuses any other difference.
    """
    if values["resume"]:
        for name in OF_A_START:
            # A memory flag that is not given leaves the run what it had: prepare.memory_at_start.
            given = name == "kernels" or values[name] is not None
            if given and name in held and values[name] != held[name]:
                say(f"{option(name)} is {values[name]!r}, the run had {held[name]!r}: its last "
                    "digits can differ from those of a run that was not interrupted")
        return
    for name, value in without_places(held).items():
        if name == "calibrate" and values[name] is None:
            say(f"--calibrate is decided anew, {values['like']} had {value}")
        elif values[name] != value:
            say(f"{option(name)} is {values[name]!r}, {values['like']} had {value!r}")


def check_shape_flags(adapter: str, given: dict) -> None:
    """ValueError for a flag that gives a run another adapter than --adapter names."""
    for name, value in read_peft_config(adapter)._asdict().items():
        if name in given and given[name] != value:
            raise ValueError(f"{option(name)} is {given[name]}, --adapter {adapter} has {value}: a "
                             "run takes over its adapter's rank and alpha")


def option(name: str) -> str:
    """"group_size" -> "--group-size"."""
    return "--" + name.replace("_", "-")


def without_places(values: dict) -> dict:
    """Without what belongs to the machine or folder of a run."""
    return {name: value for name, value in values.items() if not FIELDS[name].metadata["place"]}


def with_absolute_paths(values: dict) -> dict:
    """The inputs of a run by their absolute paths, so that it can go on from another folder."""
    folders = [name for name in ("model", "adapter") if Path(values.get(name) or "?").is_dir()]
    files = [name for name in ("data", "eval_data") if (values.get(name) or "?").endswith(SUFFIXES)]
    return values | {name: str(Path(values[name]).absolute()) for name in folders + files}


def read_run_json(path: Path) -> dict:
    """A run.json -> name and value of each setting in it. Its other keys are left out.

    ValueError names a setting whose value is none that its flag could give.
    """
    held = read_json(path)
    for name in FIELDS.keys() & held.keys():
        if not can_hold(FIELDS[name], held[name]):
            raise ValueError(f"{path}: {name} is {short_repr(held[name])}, which {option(name)} "
                             "cannot be")
    return with_absolute_paths({name: held[name] for name in FIELDS if name in held})


def check_adapters_run(folder: Path, held: dict) -> None:
    """ValueError if a run.json differs from what the run's adapter was trained with: somebody has
    edited it.
    """
    told = {name: held[name] for name in ("base", "prompt_style", "thinking") if name in held}
    for difference in other_conditions(folder / "adapter", told):
        raise ValueError(f"{folder / 'run.json'} was edited: {difference}")


# The settings that may name a function of the user's.
NAME_FUNCTIONS = "prompt_style", "reward"


def tell_functions(folder: str | Path, values: dict) -> None:
    """Says which functions a program is about to import because a run's run.json names them.

    values: the program's settings. On stderr: the stdout of tools.chat is the answer alone.
    """
    held = read_json(Path(folder) / "run.json")
    for name in NAME_FUNCTIONS:
        value = values.get(name) or ""
        if RANK == 0 and ":" in value and value == held.get(name):
            print(f"{Path(folder) / 'run.json'}: {option(name)} {value}", file=sys.stderr,
                  flush=True)


def can_hold(field: dataclasses.Field, value) -> bool:
    """Whether a setting can have this value from a JSON file. Ranges are not checked here."""
    if value is None:
        return field.default is None
    kind = type_of(field)
    choices = field.metadata["choices"]
    return type(value) in ((int, float) if kind is float else (kind,)) \
        and (not choices or value in choices)


def settings_of_run(folder: str | Path) -> Settings:
    """The settings of a run; `model` is the one that its adapter belongs to, which is OUT/base if
    the run calibrated its own weights.
    """
    path = Path(folder) / "run.json"
    held = read_run_json(path)
    if not {"model", "base"} <= held.keys():
        raise ValueError(f"{path}: has no model or no base")
    check_adapters_run(path.parent, held)
    if held.get("calibrate"):
        held["model"] = str(path.with_name("base"))
    return Settings.of(held | {"out": str(folder)})


def run_folder(values: dict) -> Path:
    """--out, or runs/MODEL-BASE-DATA-SEED. values: of all settings, by their names."""
    parts = [Path(values["model"]).name, values["base"], Path(values["data"]).stem,
             str(values["seed"])]
    return Path(values["out"] or "runs/" + re.sub(r"[^\w.-]+", "-", "-".join(parts)))


# -----------------------------------------------------------------------------
# Which values are allowed

def lies_in(value: float, interval: str) -> bool:
    """interval: as in mathematics, "(0, 1]". A NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    return low < value < high or (value == low and interval[0] == "[") \
        or (value == high and interval[-1] == "]")


def check_ranges(section) -> None:
    """ValueError names the first setting of a dataclass that lies outside of its interval."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        allowed = field.metadata["allowed"]
        if value is not None and allowed and not lies_in(value, allowed):
            raise ValueError(f"{option(field.name)} must lie in {allowed}, got {value}")


def check_settings(settings: Settings, before: Settings | None) -> None:
    """ValueError names the first setting that is not allowed, alone or beside another one.

    before: those of the run that is resumed.
    """
    for section in dataclasses.fields(settings):
        check_ranges(getattr(settings, section.name))
    model, rollout, noise = settings.model, settings.rollout, settings.noise
    objective, optim = settings.objective, settings.optim
    if noise.sigma_start and not 0 < noise.sigma_end <= noise.sigma_start:
        raise ValueError(f"--sigma-end must lie in (0, {noise.sigma_start}], the --sigma-start, "
                         f"got {noise.sigma_end}")
    if optim.lr * optim.weight_decay >= 1:
        raise ValueError(f"--weight-decay {optim.weight_decay} x --lr {optim.lr} must be below 1: "
                         "an update takes that share of a weight away")
    if rollout.prompts_per_step * rollout.group_size > 2**20:
        raise ValueError(f"--prompts-per-step {rollout.prompts_per_step} x --group-size "
                         f"{rollout.group_size} is more than a step can hold ({2**20})")
    if not 0 <= objective.overlong_buffer <= rollout.max_new_tokens:
        raise ValueError("--overlong-buffer must lie in 0..--max-new-tokens, got "
                         f"{objective.overlong_buffer}")
    if objective.overlong_buffer and objective.overlong == "mask":
        raise ValueError(f"--overlong-buffer {objective.overlong_buffer}: --overlong mask leaves "
                         "out the answers that it punishes most, take --overlong keep")
    if optim.updates_per_rollout > rollout.prompts_per_step:
        raise ValueError("--updates-per-rollout must lie in 1..--prompts-per-step, which is "
                         f"{rollout.prompts_per_step}, got {optim.updates_per_rollout}")
    if model.calibrate and model.base != "nvfp4":
        raise ValueError(f"--calibrate {model.calibrate} is for NVFP4, --base is {model.base}")
    tracker = settings.watching.report_to
    if tracker and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--report-to {tracker} needs pip install {tracker}")
    if before:
        check_resumed(settings, before)
    else:
        check_new(settings)


def check_new(settings: Settings) -> None:
    """ValueError for what makes no sense, but which a run that began with an earlier version may
    have: that one goes on.
    """
    noise, optim, temperature = settings.noise, settings.optim, settings.rollout.temperature
    if noise.sigma_start and noise.noise_stages == 1:
        raise ValueError("--noise-stages 1: the first stage has no noise, so --sigma-start "
                         f"{noise.sigma_start} would have no effect")
    if optim.lr_schedule == "constant" and optim.warmup > 0.75:
        raise ValueError(f"--warmup {optim.warmup}: with --lr-schedule constant the rate falls from "
                         "three quarters of the run on, take at most 0.75")
    if temperature < 1e-3:
        raise ValueError(f"--temperature {temperature}: the likeliest token would always be drawn, "
                         "take at least 0.001")


MAY_MOVE = ("model", "data", "eval_data")


def check_resumed(settings: Settings, before: Settings) -> None:
    """A resumed run keeps its settings; only its number of steps may grow. Model and data may have
    been moved: that they hold the same is checked by weights_sha256 and problems_sha256.
    """
    had = before.flat()
    for name, value in without_places(settings.flat()).items():
        grows = name == "steps" and value > (had[name] or 0)
        if value != had[name] and not grows and name not in MAY_MOVE:
            raise ValueError(f"--resume: {option(name)} is {value!r}, the run had {had[name]!r}")
