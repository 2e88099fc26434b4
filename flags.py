"""
The flags of a run: what they are called, what they default to, which values can be meant.

parse_args() gives train.py its flags, those of run.json where a run is resumed; check_flags()
refuses in one line what cannot be meant, before anything dear is done.

Not here: what a flag does. Its help says where the value comes from: the paper's tables or the
release, NVlabs/QeRL.
"""
import argparse
import importlib.util
from pathlib import Path

import torch

import aqn
import data
import grpo
import hf
import nvfp4

# What changes when no --model is given: the embedded model, and sizes for two CPU cores.
TINY = dict(model=str(Path(__file__).parent / "tiny"), data="arithmetic", steps=80,
            max_prompt_tokens=64, max_new_tokens=48, lr=5e-4, epochs=1, eval_every=20,
            eval_problems=256, save_every=20)

parser = argparse.ArgumentParser(
    description="GRPO/DAPO of a Qwen2.5 model with frozen 4-bit weights, LoRA and AQN.",
    usage="train.py [flags], --help lists them", allow_abbrev=False,
    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
add = parser.add_argument
# model
add("--model", help="folder, Hugging Face id or name such as qwen2.5-7b (default: the tiny one)")
add("--base", default="nvfp4", choices=list(nvfp4.FORMATS), help="format of the frozen linears")
add("--dtype", choices=["bfloat16", "float16"],
    help="of matmul inputs; float16 brings sampler and learner 8 times closer (default: bfloat16 "
         "on a GPU, float32 on a CPU, where either of the two is emulated)")
add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run")
add("--lora-rank", type=int, default=32, help="rank of every adapter (paper 4.1)")
add("--lora-alpha", type=float, default=32, help="adapter scale is alpha / rank (release: rank)")
add("--train-norms", action="store_true", help="also train each block's two norms (release)")
# data and reward
add("--data", default="gsm8k",
    help="gsm8k, math, arithmetic, a .jsonl/.json/.parquet file or a Hugging Face id")
add("--eval-data", help="held-out problems; default: the test split, or the end of a file")
add("--prompt-style", default="boxed", choices=sorted(data.STYLES),
    help="boxed: Qwen's; tags: the paper's")
add("--max-prompt-tokens", type=int, default=512, help="longer prompts are dropped (release: 256)")
add("--reward", help="module:function to use instead of the built-in grader")
add("--format-weight", type=float, default=0.0,
    help="added for a well-formed answer (release: 0.1 of a right one)")
# rollouts
add("--steps", type=int, default=600, help="rollout batches (paper: about 600 on GSM8K)")
add("--prompts-per-step", type=int, default=16, help="problems; 16 x 8 = Table 4's batch of 128")
add("--group-size", type=int, default=8, help="samples a problem (Table 4: 8, BigMath 16)")
add("--oversample", type=float, default=1.0,
    help="times --prompts-per-step are sampled; above 1, the first so many problems with right and "
         "wrong answers are learned from (DAPO's dynamic sampling in one go)")
add("--max-new-tokens", type=int, default=4096, help="longest completion (Table 4; BigMath 8192)")
add("--temperature", type=float, default=1.0, help="of sampling and every log-prob (Table 4)")
add("--max-rows", type=int, default=256, help="most sequences decoded at a time")
add("--kv-gib", type=float, help="memory of the KV cache (default: what is needed and left)")
# adaptive quantization noise
add("--sigma-start", type=float, default=1e-2, help="of the first noisy stage; 0: no AQN (Table 4)")
add("--sigma-end", type=float, default=5e-4, help="what the schedule decays to (Table 4)")
add("--noise-stages", type=int, default=10, help="K of Algorithm 1; the first is clean (Table 4)")
add("--noise-schedule", default="exponential", choices=aqn.SCHEDULES, help="decay (Fig. 9)")
add("--noise-exact-end", action="store_true", help="reach sigma-end in the last stage (release)")
add("--noise-relative", action="store_true", help="sigma times the norm's own weight")
add("--noise-learner", action="store_true", help="updates run under the noise of their rollouts")
add("--noise-kl", type=float,
    help="nats a token between sampler and learner that sigma is steered to, from sigma-start on, "
         "instead of the schedule")
# learning
add("--loss", default="dapo", choices=list(grpo.LOSSES), help="Table 1: grpo, Table 2: dapo")
add("--clip-low", type=float, help="lower clip of the ratio (default: the loss's own)")
add("--clip-high", type=float, help="upper clip (default: the loss's own)")
add("--correction", default="truncate", choices=grpo.CORRECTIONS,
    help="bound of learner / sampler, a token's importance; off: 1 (release); ppo: the clip is "
         "around the sampler (paper)")
add("--correction-cap", type=float, default=2.0, help="the bound C")
add("--advantage-scale", default="group", choices=grpo.SCALES,
    help="which standard deviation divides centred rewards")
add("--kl-beta", type=float, default=0.0, help="weight of KL to the base without adapter")
add("--overlong", default="mask", choices=["mask", "keep"],
    help="keep: answers cut at the limit stay in the loss")
add("--overlong-buffer", type=int, default=0,
    help="tokens of DAPO's soft penalty, with --overlong keep; 0: none")
add("--updates-per-rollout", type=int, default=1,
    help="disjoint parts of a batch, an optimizer step each")
add("--epochs", type=int, default=4, help="passes over a batch (Table 4: 4 updates)")
add("--lr", type=float, default=1e-5, help="peak learning rate (Table 4; bf16 LoRA 5e-6)")
add("--lr-schedule", default="cosine", choices=["cosine", "constant"],
    help="after the warm-up: half a cosine to 0 (release), or constant, linear in the last quarter")
add("--warmup", type=float, default=0.1, help="share of the run with rising rate (release)")
add("--max-grad-norm", type=float, default=0.2, help="clip of the global gradient norm (release)")
add("--weight-decay", type=float, default=0.0, help="of A and B, decoupled (release: 0.1)")
add("--micro-batch-tokens", type=int, help="in one forward and backward (default: by the memory)")
add("--memory-gib", type=float, help="bound of the process on a GPU (default: what is free)")
# the run
add("--out", help="run folder (default: runs/MODEL-BASE)")
add("--eval-every", type=int, default=20, help="steps between evaluations, first and last included")
add("--eval-problems", type=int, default=256, help="held-out problems, greedy; 0: all")
add("--save-every", type=int, default=20, help="steps between checkpoints")
add("--report-to", choices=["trackio", "wandb", "tensorboard"],
    help="also send each step's metrics there; needs that package")
add("--resume", action="store_true", help="go on from the newest intact checkpoint in --out")
add("--seed", type=int, default=0, help="of adapter, order of problems, sampling and noise")

COUNTS = ("lora_rank steps prompts_per_step max_prompt_tokens max_new_tokens max_rows noise_stages "
          "updates_per_rollout epochs micro_batch_tokens eval_every save_every").split()
POSITIVE = "lora_alpha temperature kv_gib memory_gib lr max_grad_norm clip_high noise_kl".split()
NOT_NEGATIVE = "format_weight sigma_start sigma_end kl_beta weight_decay eval_problems seed".split()
RANGES = {**dict.fromkeys(COUNTS, "[1, inf)"), **dict.fromkeys(POSITIVE, "(0, inf)"),
          **dict.fromkeys(NOT_NEGATIVE, "[0, inf)"), "group_size": "[2, inf)", "warmup": "[0, 1]",
          "clip_low": "(0, 1]", "correction_cap": "[1, inf)", "oversample": "[1, inf)"}


def parse_args():
    """The flags; of a resumed run its own, which are the defaults of what is not given again."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model")
    if first.parse_known_args()[0].model is None:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if not args.resume:
        return args, None
    before = hf.read_json(out_folder(args) / "run.json")
    parser.set_defaults(**{k: v for k, v in before.items() if k not in ("resume", "out")})
    return parser.parse_args(), before


def out_folder(args):
    return Path(args.out or f"runs/{Path(args.model).name}-{args.base}")


def inside(value, interval):
    """interval as in mathematics: "(0, 1]". A NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    return low < value < high or (value == low and interval[0] == "[") \
        or (value == high and interval[-1] == "]")


def check_flags(args, before):
    """ValueError names the first flag whose value cannot be meant; before: a resumed run's."""
    for name, interval in RANGES.items():
        value = getattr(args, name)
        if value is not None and not inside(value, interval):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must lie in {interval}, got {value}")
    if args.sigma_start and not 0 < args.sigma_end <= args.sigma_start:
        raise ValueError(f"--sigma-end must lie in (0, {args.sigma_start}], the --sigma-start, "
                         f"got {args.sigma_end}")
    if args.noise_kl and (args.noise_learner or not args.sigma_start):
        raise ValueError(f"--noise-kl {args.noise_kl} needs a --sigma-start, and a learner without "
                         "noise to measure against: no --noise-learner")
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
    if args.memory_gib and not args.device.startswith("cuda"):
        raise ValueError(f"--memory-gib bounds the memory of a GPU, --device is {args.device}")
    if args.report_to and importlib.util.find_spec(args.report_to) is None:
        raise ValueError(f"--report-to {args.report_to} needs pip install {args.report_to}")
    if before and before.get("head", "bf16") != "bf16":          # of runs before 4f149d8
        raise ValueError(f"--resume: the run had --head {before['head']}, which is gone")
    if before and "epochs" not in before:
        raise ValueError("--resume: the run is older than --epochs: it had another learning rule")
    free = {"resume", "out", "head", "device", "memory_gib", "kv_gib", "report_to"}
    for name in vars(args).keys() - free if before else ():
        had = before.get(name, parser.get_default(name))         # a flag younger than the run
        if getattr(args, name) != had:
            flag = name.replace("_", "-")
            raise ValueError(f"--resume: --{flag} is {getattr(args, name)!r}, the run had {had!r}")
