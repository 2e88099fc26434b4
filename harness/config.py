"""
The flags of a run: what they are called, what they default to, which values can be meant.

parse_args() gives train.py its flags, those of run.json where a run is resumed; check_flags()
refuses in one line what cannot be meant, before anything dear is done.

Not here: what a flag does. Its help says where the value comes from: the paper's tables or the
release, NVlabs/QeRL.
"""
import argparse
import importlib.util
import re
from pathlib import Path

import aqn
import grpo
import nvfp4
from harness import data
from harness.files import read_json
from harness.process import short
from harness.ranks import KERNELS, say

# Defaults when no --model is given: the embedded model, and sizes for two CPU cores.
TINY = dict(model=str(Path(__file__).parent.parent / "tiny"), data="arithmetic", steps=80,
            max_prompt_tokens=64, max_new_tokens=48, lr=5e-4, epochs=1)


class Help(argparse.HelpFormatter):
    """Each default once: that of %(default)s, unless the text tells one itself."""

    def _get_help_string(self, action):
        told = action.default in (None, False, argparse.SUPPRESS) or "(default:" in action.help
        return action.help + ("" if told else " (default: %(default)s)")


parser = argparse.ArgumentParser(
    description="GRPO/DAPO of a Qwen2.5 model with frozen 4-bit weights, LoRA and AQN.",
    usage="train.py [flags], --help lists them", allow_abbrev=False, formatter_class=Help)
add = parser.add_argument_group("what most runs set").add_argument
add("--model", help="folder, Hugging Face id or name such as qwen2.5-7b (default: the tiny one)")
add("--data", default="gsm8k",
    help="gsm8k, math, arithmetic, a .jsonl/.json/.parquet file or a Hugging Face id")
add("--steps", type=int, default=600,
    help="rollout batches (paper: about 600 on GSM8K); may grow with --resume")
add("--lr", type=float, default=1e-5, help="peak learning rate (Table 4; bf16 LoRA 5e-6)")
add("--out", help="run folder (default: runs/MODEL-BASE-DATA-SEED)")
add("--resume", action="store_true", help="go on from the newest intact checkpoint in --out")
add("--like", help="folder of a run: its flags are the defaults of this one's")
add("--seed", type=int, default=0, help="of adapter, order of problems, sampling and noise")

add = parser.add_argument_group("model").add_argument
add("--base", default="nvfp4", choices=list(nvfp4.FORMATS), help="format of the frozen linears")
add("--calibrate", type=int, default=0, metavar="N",
    help="choose NVFP4 codes by the model's answers to N training problems; they stay in OUT/base")
add("--dtype", choices=["bfloat16", "float16"],
    help="of matmul inputs; float16 brings sampler and learner 8 times closer (default: bfloat16 "
         "on a GPU, float32 on a CPU, where either of the two is emulated)")
add("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
add("--kernels", default="auto", choices=["auto", *KERNELS],
    help="of the 4-bit matmul that decodes; auto: by the GPU")
add("--lora-rank", type=int, default=32, help="rank of every adapter (paper 4.1)")
add("--lora-alpha", type=float, default=32, help="adapter scale is alpha / rank (release: rank)")
add("--train-norms", action="store_true", help="also train each layer's two norms (release)")
add("--adapter", help="PEFT folder to start from; its rank, alpha and norms are the run's")

add = parser.add_argument_group("data and reward").add_argument
add("--eval-data", help="held-out problems; default: the test split, or the end of a file")
add("--prompt-style", default="boxed",
    help=f"{', '.join(data.STYLES)}, or module:function; boxed: Qwen's; tags: the paper's")
add("--max-prompt-tokens", type=int, default=512, help="longer prompts are dropped (release: 256)")
add("--reward", help="module:function to use instead of the built-in grader")
add("--format-weight", type=float, default=0.0,
    help="added for a well-formed answer (release: 0.1 of a right one)")

add = parser.add_argument_group("rollouts").add_argument
add("--prompts-per-step", type=int, default=16, help="problems; 16 x 8 = Table 4's batch of 128")
add("--group-size", type=int, default=8, help="samples a problem (Table 4: 8, BigMath 16)")
add("--revisit", type=float, default=1.0,
    help="chance to take a problem again for each of its last groups that were all right or all "
         "wrong (GRESO: 0.5)")
add("--max-new-tokens", type=int, default=4096, help="longest completion (Table 4; BigMath 8192)")
add("--temperature", type=float, default=1.0, help="of sampling and every log-prob (Table 4)")
add("--max-rows", type=int, default=256, help="most sequences decoded at a time")
add("--kv-gib", type=float, help="memory of the KV cache (default: what is needed and left)")

add = parser.add_argument_group("adaptive quantization noise").add_argument
add("--sigma-start", type=float, default=1e-2, help="of the first noisy stage; 0: no AQN (Table 4)")
add("--sigma-end", type=float, default=5e-4, help="what the schedule decays to (Table 4)")
add("--noise-stages", type=int, default=10, help="K of Algorithm 1; the first is clean (Table 4)")
add("--noise-schedule", default="exponential", choices=aqn.SCHEDULES, help="decay (Fig. 9)")

add = parser.add_argument_group("learning").add_argument
add("--loss", default="dapo", choices=list(grpo.LOSSES), help="Table 1: grpo, Table 2: dapo")
add("--clip-low", type=float, help="lower clip of the ratio (default: the loss's own)")
add("--clip-high", type=float, help="upper clip (default: the loss's own)")
add("--correction", default="truncate", choices=grpo.CORRECTIONS,
    help="how a token's weight corrects for the sampler's noise: first pass / sampler, at most 2; "
         "ppo: the clip is around the sampler (paper); off: not at all (release)")
add("--advantage-scale", default="group", choices=grpo.SCALES,
    help="what divides centred rewards: the group's standard deviation, or nothing (Dr. GRPO)")
add("--kl-beta", type=float, default=0.0, help="weight of KL to the base without adapter")
add("--overlong", default="mask", choices=["mask", "keep"],
    help="keep: answers cut at the limit stay in the loss")
add("--overlong-buffer", type=int, default=0,
    help="tokens of DAPO's soft penalty, with --overlong keep; 0: none")
add("--updates-per-rollout", type=int, default=1,
    help="disjoint parts of a batch, an optimizer step each")
add("--epochs", type=int, default=4, help="passes over a batch (Table 4: 4 updates)")
add("--lr-schedule", default="cosine", choices=["cosine", "constant"],
    help="after the warm-up: half a cosine to 0 (release), or constant, linear in the last quarter")
add("--warmup", type=float, default=0.1, help="share of the run with rising rate (release)")
add("--max-grad-norm", type=float, default=0.2, help="clip of the global gradient norm (release)")
add("--weight-decay", type=float, default=0.0, help="of A and B, decoupled (release: 0.1)")
add("--micro-batch-tokens", type=int, help="in one forward and backward (default: by the memory)")
add("--memory-gib", type=float, help="bound of the process on a GPU (default: what is free)")

add = parser.add_argument_group("watching and keeping").add_argument
add("--eval-every", type=int, default=20, help="steps between evaluations, first and last included")
add("--eval-problems", type=int, default=256, help="held-out problems, greedy; 0: all")
add("--save-every", type=int, default=20, help="steps between checkpoints")
add("--report-to", choices=["trackio", "wandb", "tensorboard"],
    help="also send each step's metrics there; needs that package")
add("--keep", type=int, help="keep the adapter of every so many steps, and the best, in adapters/")
add("--show", type=int, help="print a completion every so many steps")

COUNTS = ("lora_rank steps prompts_per_step max_prompt_tokens max_new_tokens max_rows noise_stages "
          "updates_per_rollout epochs micro_batch_tokens eval_every save_every keep show").split()
POSITIVE = "lora_alpha kv_gib memory_gib max_grad_norm clip_high".split()
NOT_NEGATIVE = "format_weight kl_beta weight_decay".split()
RANGES = {**dict.fromkeys(COUNTS, "[1, 2e9]"), **dict.fromkeys(POSITIVE, "(0, 1e9]"),
          **dict.fromkeys(NOT_NEGATIVE, "[0, 1e9]"), "group_size": "[2, 1e6]", "warmup": "[0, 1]",
          "clip_low": "(0, 1]", "lr": "(0, 10]",
          "temperature": "(0, 1000]", "sigma_start": "[0, 10]", "sigma_end": "[0, 10]",
          "eval_problems": "[0, 2e9]", "seed": "[0, 2e18]", "revisit": "[0.1, 1]",
          "calibrate": "[0, 1e5]"}
# Flags of a place, not of a run: --resume and --like do not take them over.
PLACES = {"resume", "like", "out", "device", "kernels", "memory_gib", "kv_gib", "show", "keep",
          "report_to"}


def parse_args():
    """-> the flags, and those of the run that is resumed, or None.

    A resumed run's own flags, or those of --like, are the defaults of what is not given again.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model")                # --help shows the defaults that follow from it
    first.add_argument("--like")
    known = first.parse_known_args()[0]
    if known.model is None:
        parser.set_defaults(**TINY)
    like = {}
    if known.like:
        like = without_places(flags_of(Path(known.like) / "run.json"))
        parser.set_defaults(**like)
    args = parser.parse_args()
    before = None
    if args.resume and args.like:
        raise ValueError("--like begins a run, --resume goes on with one: give one of the two")
    if args.resume:
        before = flags_of(out_folder(args) / "run.json")
        parser.set_defaults(**without_places(before))
        args = parser.parse_args()
    args.out = str(out_folder(args))
    vars(args).update(from_anywhere(vars(args)))
    for name, value in like.items():
        if getattr(args, name) != value:
            say(f"{option(name)} is {getattr(args, name)!r}, {args.like} had {value!r}")
    return args, before


def option(name):
    return "--" + name.replace("_", "-")


def without_places(flags):
    return {name: value for name, value in flags.items() if name not in PLACES}


def from_anywhere(flags):
    """Paths of a run's inputs as absolute ones: a run can go on from another folder."""
    paths = [name for name in ("model", "adapter") if Path(flags.get(name) or "?").is_dir()]
    paths += [name for name in ("data", "eval_data")
              if (flags.get(name) or "?").endswith(data.SUFFIXES)]
    return flags | {name: str(Path(flags[name]).absolute()) for name in paths}


def flags_of(path):
    """A run.json -> the flags in it. ValueError names one whose value its flag cannot have."""
    held = read_json(path)
    flags = {}
    for action in parser._actions:
        if action.dest in held:
            flags[action.dest] = value = held[action.dest]
            if not can_hold(action, value):
                raise ValueError(f"{path}: {action.dest} is {short(value)}, which "
                                 f"{action.option_strings[0]} cannot be")
    return from_anywhere(flags)


def of_run(folder):
    """The flags of a run; `model` is what its adapter belongs to: a calibrated one's own base."""
    path = Path(folder) / "run.json"
    held = flags_of(path)
    if not {"model", "base"} <= held.keys():
        raise ValueError(f"{path}: has no model or no base")
    return held | ({"model": str(path.with_name("base"))} if held.get("calibrate") else {})


def can_hold(action, value):
    if value is None:
        return action.default is None
    if isinstance(action.default, bool):
        return isinstance(value, bool)
    kinds = {int: (int,), float: (int, float)}.get(action.type, (str,))
    return type(value) in kinds and (action.choices is None or value in action.choices)


def out_folder(args):
    parts = Path(args.model).name, args.base, Path(args.data).stem, str(args.seed)
    return Path(args.out or "runs/" + re.sub(r"[^\w.-]+", "-", "-".join(parts)))


def inside(value, interval):
    """interval as in mathematics: "(0, 1]". A NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    return low < value < high or (value == low and interval[0] == "[") \
        or (value == high and interval[-1] == "]")


def check_ranges(args, ranges=RANGES):
    for name, value in vars(args).items():
        if value is not None and name in ranges and not inside(value, ranges[name]):
            raise ValueError(f"{option(name)} must lie in {ranges[name]}, got {value}")


def check_flags(args, before):
    """ValueError names the first flag whose value cannot be meant; before: a resumed run's."""
    check_ranges(args)
    if args.sigma_start and not 0 < args.sigma_end <= args.sigma_start:
        raise ValueError(f"--sigma-end must lie in (0, {args.sigma_start}], the --sigma-start, "
                         f"got {args.sigma_end}")
    if args.lr * args.weight_decay >= 1:
        raise ValueError(f"--weight-decay {args.weight_decay} x --lr {args.lr} must be below 1: "
                         "an update takes that share of a weight away")
    if args.prompts_per_step * args.group_size > 2**20:
        raise ValueError(f"--prompts-per-step {args.prompts_per_step} x --group-size "
                         f"{args.group_size} is more than a step can hold ({2**20})")
    if args.train_norms and args.kl_beta:
        raise ValueError(f"--kl-beta {args.kl_beta}: --train-norms moves the reference's norms")
    if not 0 <= args.overlong_buffer <= args.max_new_tokens:
        raise ValueError("--overlong-buffer must lie in 0..--max-new-tokens, got "
                         f"{args.overlong_buffer}")
    if args.overlong_buffer and args.overlong == "mask":
        raise ValueError(f"--overlong-buffer {args.overlong_buffer}: --overlong mask leaves out "
                         "the rows that it punishes most, take --overlong keep")
    if args.updates_per_rollout > args.prompts_per_step:
        raise ValueError("--updates-per-rollout must lie in 1..--prompts-per-step, got "
                         f"{args.updates_per_rollout}")
    if args.calibrate and args.base != "nvfp4":
        raise ValueError(f"--calibrate {args.calibrate} is for NVFP4, --base is {args.base}")
    if args.memory_gib and not (args.device or "cuda").startswith("cuda"):
        raise ValueError(f"--memory-gib bounds the memory of a GPU, --device is {args.device}")
    if args.report_to and importlib.util.find_spec(args.report_to) is None:
        raise ValueError(f"--report-to {args.report_to} needs pip install {args.report_to}")
    if before:
        check_resumed(args, before)


def check_resumed(args, before):
    for name, value in without_places(vars(args)).items():
        had = before.get(name, parser.get_default(name))         # a flag younger than the run
        grows = name == "steps" and value > had
        if value != had and not grows:
            raise ValueError(f"--resume: {option(name)} is {value!r}, the run had {had!r}")
