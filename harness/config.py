"""
The settings of a run: names, defaults, allowed values, and where each default comes from.

Every field of the dataclasses below is a flag of train.py: `Rollout.group_size` is `--group-size`.
To add a setting, add a field. The other programs take their flags from here too (add_flag).

    settings, earlier = read_settings()          # from sys.argv; earlier: a resumed run's run.json
    settings.group_size                          # 8

Settings are immutable. A settings file is JSON, flag name -> value: a recipe (recipes/paper.json)
or the run.json that a run writes. If several of these set a value, the last one wins:

    the field's default
    FULL_DEFAULTS                   with --train full
    TINY_DEFAULTS                   with the bundled model
    --config FILE, or --resume      a recipe or another run's run.json; the run.json in --out
    the command line

Invalid values are rejected, wherever they come from. Settings of the machine and the folder
(`local`) are never taken from a file.

The help texts also give the defaults of two others: "paper" is QeRL (arXiv 2510.11696; Table 4,
GSM8K), "release" is the authors' code (NVlabs/QeRL).
"""
import argparse
import dataclasses
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aqn
import env
import grpo
from adapters import read_peft_config
from files import UserError, read_json, read_run_json, tell_unfinished
from prompts import STYLES
from tasks.problems import SUFFIXES

TINY_MODEL = Path(__file__).parent.parent / "tiny"


def setting(default, text: str, allowed: str = "", choices=None, local: bool = False):
    """One setting, as a dataclass field.

    allowed: an interval in mathematical notation, "(0, 1]"; choices: the allowed values. local: the
    setting belongs to the machine or the run folder, so it is never read from a file.
    """
    if default is not None and "(default:" not in text:
        text += f" (default: {default})"
    about = {"help": text, "allowed": allowed, "choices": choices, "local": local}
    return dataclasses.field(default=default, metadata=about)


AT_LEAST_1 = "[1, 2e9]"
ROWS_DECODED = "[1, 32768]"                      # kernels count row * width in 32 bits

# -----------------------------------------------------------------------------
# The settings. Each class is a section of --help; its docstring is the section's title.

@dataclass(frozen=True)
class General:
    """the run"""
    steps: int = setting(200, "training steps (paper: 600); --resume can raise it",
                         AT_LEAST_1)
    seed: int = setting(0, "random seed for adapter, problem order, sampling and noise",
                        "[0, 2e18]")
    out: str | None = setting(None, "run folder (default: runs/MODEL-BASE-DATA-SEED)", local=True)


@dataclass(frozen=True)
class Model:
    """model and adapter"""
    model: str = setting(str(TINY_MODEL), "folder, Hugging Face id, or a name such as qwen2.5-7b "
                         "(default: the bundled model, which has its own defaults: see the end)")
    train: str = setting("lora", "what to train; lora: an adapter on frozen weights; full: all "
                         "weights, by default with --base bf16 and --lr 3e-6 (the bundled model "
                         "keeps its own --lr)",
                         choices=("lora", "full"))
    base: str = setting("nvfp4", "format of the frozen linear layers", choices=("nvfp4", "bf16"))
    calibrate: int | None = setting(
        None, "choose the NVFP4 codes with GPTQ on the model's answers to N training problems, and "
        "save the weights in OUT/base; 0: off (default: 128 if a 16-bit model is converted to "
        "NVFP4 on a GPU, else 0)", "[0, 1e5]")
    lora_rank: int = setting(32, "rank of the LoRA adapter", "[1, 65536]")
    lora_alpha: float = setting(32.0, "LoRA alpha; scales the adapter by alpha / rank", "(0, 1e9]")
    adapter: str | None = setting(None, "PEFT folder to start from; sets rank and alpha")


@dataclass(frozen=True)
class Data:
    """problems and prompts"""
    data: str = setting("gsm8k", "gsm8k, math, arithmetic, a Hugging Face id, or a .jsonl, .json "
                        "or .parquet file")
    eval_data: str | None = setting(None, "held-out problems (default: the test split of --data, "
                                    "or the end of a file)")
    eval_problems: int = setting(256, "number of held-out problems; 0: all of a test split",
                                 "[0, 2e9]")
    prompt_style: str = setting("boxed", f"{', '.join(STYLES)}, or module:function; "
                                "boxed is Qwen's prompt for math, tags the paper's")
    thinking: str = setting("off", "let models such as Qwen3 think first; needs a larger "
                            "--max-new-tokens",
                            choices=("on", "off"))
    max_prompt_tokens: int = setting(512, "skip problems with longer prompts (release: 256)",
                                     AT_LEAST_1)
    reward: str | None = setting(None, "module:function that scores answers, instead of the "
                                 "built-in grader")


@dataclass(frozen=True)
class Rollout:
    """rollouts"""
    prompts_per_step: int = setting(64, "problems per step (paper: 16)", AT_LEAST_1)
    group_size: int = setting(8, "answers per problem", "[2, 1e6]")
    replay: float = setting(0.0, "largest share of a step's problems that are asked again, because "
                            "their answers' rewards differed", "[0, 1)")
    max_new_tokens: int = setting(512, "longest answer, in tokens; problems harder than GSM8K "
                                  "need more (paper: 4096)", AT_LEAST_1)
    temperature: float = setting(1.0, "softmax temperature of sampling and all log-probs "
                                 "(as in the paper)", "[0.001, 1000]")
    max_rows: int | None = setting(None, "maximum number of answers decoded at once "
                                   "(default: 512 if they fit, else 256)", ROWS_DECODED)


@dataclass(frozen=True)
class Noise:
    """adaptive quantization noise (AQN)"""
    sigma_start: float = setting(0.0, "standard deviation of the noise (sigma) in the first noisy "
                                 "stage; 0: no noise (paper: 1e-2)", "[0, 10]")
    # A sigma of 1e-46 would be 0 in fp32.
    sigma_end: float = setting(5e-4, "sigma that the schedule decays towards", "[1e-9, 10]")
    noise_stages: int = setting(10, "stages of the schedule; the first has no noise (as in "
                                "the paper)", "[2, 2e9]")
    noise_schedule: str = setting("exponential", "how sigma decays", choices=aqn.SCHEDULES)


@dataclass(frozen=True)
class Objective:
    """objective"""
    loss: str = setting(
        "dapo", "dapo: mean over all tokens of an update; grpo: mean over answers of each answer's "
        "token mean; dr_grpo: sum over tokens divided by a constant; gspo: grpo with one ratio per "
        "answer, clipped at 1 - 3e-4 and 1 + 4e-4", choices=grpo.LOSSES)
    clip_low: float | None = setting(None, "clip the ratio below 1 - X (default: the loss's own)",
                                     "(0, 1]")
    clip_high: float | None = setting(None, "clip the ratio above 1 + X (default: the loss's own)",
                                      "(0, 1e9]")
    correction: str | None = setting(
        None, "correction for noise and rounding in the rollout; truncate: multiply by the "
        "importance weight min(old / rollout, 2); ppo: clip policy / rollout, as in the paper; "
        "off: no correction, as in the release (default: the "
        "loss's own, truncate)",
        choices=grpo.CORRECTIONS)
    advantage_scale: str = setting("none", "divisor of the advantages; group: standard deviation "
                                   "of the group's rewards (paper); none: 1 (Dr. GRPO)",
                                   choices=grpo.SCALES)
    kl_beta: float | None = setting(None, "coefficient of the KL to the model without its adapter "
                                    "(default: the loss's own, 0)",
                                    "[0, 1e9]")
    overlong: str = setting("keep", "answers cut off at --max-new-tokens; keep: grade them like "
                            "others; mask: leave them out of the loss (release), which lets "
                            "answers grow", choices=("mask", "keep"))


@dataclass(frozen=True)
class Optim:
    """optimizer"""
    lr: float = setting(1e-4, "peak learning rate (paper: 1e-5)", "(0, 10]")
    lr_schedule: str = setting(
        "wsd", "learning rate after warm-up; wsd (warmup-stable-decay): constant, then linear to 0 "
        "over the last quarter; cosine: half a cosine to 0 (release)", choices=("cosine", "wsd"))
    warmup: float = setting(0.1, "fraction of the run spent on warm-up", "[0, 1]")
    epochs: int = setting(1, "passes over each batch of rollouts (paper: 4)",
                          AT_LEAST_1)
    updates_per_rollout: int = setting(1, "minibatches per batch, with one optimizer step each",
                                       AT_LEAST_1)
    max_grad_norm: float = setting(0.2, "clip the gradient to this norm", "(0, 1e9]")
    weight_decay: float = setting(0.0, "weight decay of AdamW (release: 0.1)",
                                  "[0, 1]")


@dataclass(frozen=True)
class Memory:
    """device and memory"""
    device: str | None = setting(None, "cpu, cuda or cuda:N (default: a GPU if there is one)",
                                 local=True)
    memory_gib: float | None = setting(None, "GPU memory for this process, in GiB (default: all "
                                       "that's free)", "(0, 1e9]", local=True)
    kernels: str | None = setting(
        None, "decode kernels on a GPU; portable: those for any NVIDIA GPU, even on Hopper; torch: "
        "plain PyTorch, far slower, for models or cards that the kernels don't support (default: "
        "the fastest)",
        choices=("portable", "torch"))
    micro_batch_tokens: int | None = setting(None, "tokens per forward and backward pass (default: "
                                             "as memory allows)", AT_LEAST_1)


@dataclass(frozen=True)
class Watching:
    """evaluation and checkpoints"""
    eval_every: int = setting(20, "steps between evaluations on held-out problems", AT_LEAST_1)
    save_every: int = setting(20, "steps between checkpoints", AT_LEAST_1)
    keep: int | None = setting(None, "keep the adapter of every Nth step in OUT/adapters",
                               AT_LEAST_1)
    report_to: str = setting("none", "also show the metrics in a tracker, installed with pip",
                             choices=("none", "trackio", "wandb"))


SECTIONS = General, Model, Data, Rollout, Noise, Objective, Optim, Memory, Watching


@dataclass(frozen=True)
class Settings(*reversed(SECTIONS)):             # reversed, to keep the fields in this order
    """All settings of a run. A function that needs only one section takes only that section."""


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
assert len(FIELDS) == sum(len(dataclasses.fields(section)) for section in SECTIONS), \
    "two sections have a setting of the same name"


# Defaults of the bundled model: arithmetic, with sizes and a learning rate for two CPU cores.
TINY_DEFAULTS = dict(data="arithmetic", steps=48, prompts_per_step=16, max_prompt_tokens=64,
                     max_new_tokens=48, lr=5e-4)


# Defaults of --train full, which needs a much lower learning rate than an adapter.
FULL_DEFAULTS = dict(base="bf16", lr=3e-6)


# -----------------------------------------------------------------------------
# Reading the command line and files

def number(kind: type, interval: str) -> Callable[[str], float]:
    """-> an argparse type: an int or a float in an interval such as "(0, 1]"."""
    low, high = map(float, interval[1:-1].split(","))

    def read(text):
        value = kind(text)
        inside = low < value < high or (value == low and interval[0] == "[") \
            or (value == high and interval[-1] == "]")
        if not inside:                           # NaN never is
            raise argparse.ArgumentTypeError(f"must be in {interval}, got {text}")
        return value
    read.__name__ = kind.__name__                # argparse says "invalid int value"
    return read


def type_of(field: dataclasses.Field) -> type:
    """int for a field of type int or int | None."""
    return (*typing.get_args(field.type), field.type)[0]


def add_flag(parser: argparse.ArgumentParser, name: str, default: object = argparse.SUPPRESS,
             text: str | None = None) -> None:
    """Adds a setting's flag, with its type, range and choices. Programs may set their own default
    and help text. SUPPRESS: the parser returns the flag only if it is given.
    """
    field = FIELDS[name]
    about, kind = field.metadata, type_of(field)
    metavar = {int: "N", float: "X"}.get(kind, name.split("_")[-1].upper())
    parser.add_argument(option(name), default=default, help=text or about["help"],
                        type=number(kind, about["allowed"]) if about["allowed"] else kind,
                        choices=about["choices"] and list(about["choices"]),
                        metavar=None if about["choices"] else metavar)


def add_flags(parser: argparse.ArgumentParser, local: bool) -> None:
    """Adds the flags of all settings, each class under its docstring as a title. local: include
    the `local` settings.
    """
    for section in SECTIONS:
        group = parser.add_argument_group(section.__doc__)
        for field in dataclasses.fields(section):
            if local or not field.metadata["local"]:
                add_flag(group, field.name)


def new_parser() -> argparse.ArgumentParser:
    """The parser of train.py: --config, --resume and a flag for every setting."""
    tiny = ", ".join(f"{option(name)} {value}" for name, value in TINY_DEFAULTS.items())
    parser = env.parser("[flags]", "Train a model with GRPO/DAPO: frozen 4-bit weights, "
                        "LoRA, AQN.\nBelow, paper means arXiv 2510.11696 and release its authors' "
                        "code.")
    parser.epilog = f"Defaults of the bundled model: {tiny}."
    parser.add_argument("--config", metavar="FILE", help=".json file whose settings become the "
                        "defaults, such as recipes/paper.json or another run's run.json")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its "
                        "newest checkpoint, with its settings")
    add_flags(parser, local=True)
    return parser


# Keys of run.json that aren't settings.
NO_SETTINGS = {"about", "problems_sha256", "weights_sha256", "trained_with", "memory_plan",
               "resumed", "logs", "tracked_as"}
# What may change when a run is resumed. problems_sha256 and trained_with compare paths' contents.
MAY_CHANGE = "model", "data", "eval_data", "report_to"


def read_settings(argv: list | None = None) -> tuple[Settings, dict | None]:
    """-> a run's settings, and the content of its run.json if it is resumed, else None.

    UserError for an invalid setting.
    """
    given = vars(new_parser().parse_args(argv))
    path, resume = given.pop("config"), given.pop("resume")
    if resume and (path or "out" not in given):
        raise UserError("--resume uses the settings of the run in --out: give --out, but no "
                        "--config")
    if resume:
        path = Path(given["out"]) / "run.json"
        file = read_run_json(given["out"])
    else:
        file = read_json(path) if path else {}
    held = settings_in(file, path)
    given = with_absolute_paths(given)
    if resume:
        check_resumed(given, held, file["about"])
    named = held | given
    values = dict(vars(Settings()))
    if named.get("train") == "full":
        values |= FULL_DEFAULTS
    if Path(named.get("model", TINY_MODEL)).resolve() == TINY_MODEL.resolve():
        values |= TINY_DEFAULTS
    values |= named
    if values["adapter"] and not resume:
        values |= shape_of(values["adapter"], given)
    idle = {}                                    # flag -> why it would have no effect
    if not values["sigma_start"]:
        idle |= dict.fromkeys(("sigma_end", "noise_stages", "noise_schedule"),
                              "noise is off, set --sigma-start")
    if values["train"] == "full":
        idle |= dict.fromkeys(("lora_rank", "lora_alpha"), "--train full has no adapter")
    for name in sorted(idle.keys() & given.keys()) if not resume else ():
        raise UserError(f"{option(name)} {given[name]} has no effect: {idle[name]}")
    # Absolute, since a user's function may change the working directory.
    settings = Settings(**values | {"out": str(run_folder(values).absolute())})
    check_together(settings)
    return settings, file if resume else None


class FileParser(argparse.ArgumentParser):
    """Reads a file's settings as if they were flags."""

    def error(self, message):
        raise UserError(f"{self.prog}: {message}")


def settings_in(file: dict, path: str | Path | None) -> dict:
    """The settings in a file's content. UserError for a key that isn't a setting or a value that
    its flag doesn't allow.
    """
    parser = FileParser(prog=str(path), add_help=False, allow_abbrev=False)
    add_flags(parser, local=False)
    for name, value in file.items():
        if value == "":
            parser.error(f"{name}: the value is empty")
        if "-" in name and name.replace("-", "_") in file:
            parser.error(f"{name}: is there twice, also as {name.replace('-', '_')}")
    flags = [f"{option(name)}={value}" for name, value in file.items()
             if name not in NO_SETTINGS and value is not None]
    return with_absolute_paths(vars(parser.parse_args(flags)))


def shape_of(adapter: str, given: dict) -> dict:
    """Rank and alpha of --adapter, which become the run's. UserError if a flag contradicts them."""
    shape = read_peft_config(adapter)._asdict()
    for name, value in shape.items():
        if given.get(name, value) != value:
            raise UserError(f"{option(name)} {given[name]}: --adapter {adapter} has {value}, and "
                            "the run takes its rank and alpha from there")
    return shape


def option(name: str) -> str:
    """"group_size" -> "--group-size"."""
    return "--" + name.replace("_", "-")


def without_local(values: dict) -> dict:
    """Drops the settings of the machine and the folder."""
    return {name: value for name, value in values.items() if not FIELDS[name].metadata["local"]}


def with_absolute_paths(values: dict) -> dict:
    """Makes paths to a run's inputs absolute, so it can be resumed from another folder."""
    folders = [name for name in ("model", "adapter") if Path(values.get(name) or "?").is_dir()]
    files = [name for name in ("data", "eval_data") if (values.get(name) or "?").endswith(SUFFIXES)]
    return values | {name: str(Path(values[name]).absolute()) for name in folders + files}


def settings_of_run(folder: str | Path) -> Settings:
    """The settings of a run, and a line if it is unfinished. `model` points to the weights to load:
    OUT/base if the run calibrated, OUT/model if it trained all weights.
    """
    path = Path(folder) / "run.json"
    held = settings_in(read_run_json(folder), path)
    if path.with_name("base").exists():
        held["model"] = str(path.with_name("base"))
    if held.get("train") == "full":
        held["model"] = str(path.with_name("model"))
    settings = Settings(**held | {"out": str(folder)})
    tell_unfinished(folder, settings.steps)
    return settings


def run_folder(values: dict) -> Path:
    """--out, or runs/MODEL-BASE-DATA-SEED. values: all settings by name."""
    parts = [Path(values["model"]).name, values["base"], Path(values["data"]).stem,
             str(values["seed"])]
    return Path(values["out"] or "runs/" + re.sub(r"[^\w.-]+", "-", "-".join(parts)))


def check_together(settings: Settings) -> None:
    """UserError for settings that can't be combined."""
    if 0 < settings.sigma_start < settings.sigma_end:
        raise UserError(f"--sigma-end must be at most --sigma-start {settings.sigma_start}, got "
                        f"{settings.sigma_end}")
    if settings.updates_per_rollout > settings.prompts_per_step:
        raise UserError("--updates-per-rollout must be at most --prompts-per-step "
                        f"{settings.prompts_per_step}, got {settings.updates_per_rollout}")
    if settings.calibrate and settings.base != "nvfp4":
        raise UserError(f"--calibrate {settings.calibrate} needs --base nvfp4, got "
                        f"{settings.base}")
    if settings.train == "full" and (settings.base != "bf16" or settings.adapter
                                     or settings.kl_beta):
        raise UserError("--train full trains the 16-bit weights in place and keeps no copy, so it "
                        "can't be combined with a 4-bit --base, --kl-beta or --adapter (merge the "
                        "adapter first, with tools.convert)")


def check_resumed(given: dict, held: dict, about: dict) -> None:
    """UserError if a flag contradicts run.json or another program started the run. --steps may grow
    and MAY_CHANGE may differ. held, about: the settings and `about` in run.json.
    """
    now = env.program()
    was = about.get("program", now)
    if was != now:                               # it may sample, grade or optimize differently
        raise UserError(f"--resume: {given['out']} was started by {was}: resume it with {was}, or, "
                        f"if that is now called {now}, change \"program\" in its run.json")
    for name, value in without_local(given).items():
        had = held.get(name)
        grows = name == "steps" and value > had
        if value != had and not grows and name not in MAY_CHANGE:
            more = "; it can only be raised" if name == "steps" else ""
            raise UserError(f"--resume: {option(name)} is {value!r}, but the run had {had!r}{more}")
