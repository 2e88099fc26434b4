"""
Follow one problem through one training step, from prompt to update.

    python -m tools.walkthrough     offline, on a CPU, in less than a minute

docs/walkthrough.md shows and explains the output. The script reads like a
notebook: each cell (# %%) is one part of a training step, and editors that
support cells can run them one by one. train.py calls the same functions, for
sixteen problems at once.
"""
import math
import sys

import env  # noqa: F401  isort: skip; its settings come before torch

import torch

import aqn
import grpo
import lora
import nvfp4
import rewards
from harness.config import TINY_MODEL
from harness.setup import configure_cpu
from learner import Batch, Learner
from loading import load
from prompts import Tokenizer, encode_prompts
from sampler import Sampler, Sampling
from tasks.problems import load_problems, problems_at
from weights import Shards

if {"-h", "--help"} & {*sys.argv[1:]}:
    print(__doc__.strip())
    sys.exit()

SEED = 0
STEPS = 48                                       # training steps of the run
STEP = 10                                        # the training step we look at
PLACE = 165                                      # our problem's place in the run: that step's sixth
GROUP_SIZE = 8
MAX_NEW_TOKENS = 48


def title(text):
    print(f"\n{text}\n{'-' * len(text)}")


# %% 1. The problem and its prompt
# Control tokens mark who is speaking. The text of a question can't produce them.
tokenizer = Tokenizer(TINY_MODEL)
problems = encode_prompts(tokenizer, load_problems("arithmetic"), "boxed")
problem, = problems_at(problems, SEED, range(PLACE, PLACE + 1))


def text_of(ids):
    """Token ids -> their text, control tokens included."""
    return tokenizer.file.decode(ids, skip_special_tokens=False)


title("1. The problem and its prompt")
print(f"question  {problem.question}")
print(f"answer    {problem.answer}\n")
print(text_of(problem.prompt))
print(f"{len(problem.prompt)} tokens; the first ten:")
for token in problem.prompt[:10]:
    print(f"{token:5}  {text_of([token])!r}")

# %% 2. A frozen weight: sixteen numbers that share a scale
# NVFP4 stores a 4-bit code for each weight, a one-byte scale for every 16 weights, and one scale
# for the matrix.
files = Shards(TINY_MODEL)
original = files.get("model.layers.0.self_attn.o_proj.weight").float()
packed, block_scale, global_scale = nvfp4.quantize(original)
decoded = nvfp4.dequantize(packed, block_scale, global_scale, torch.float32)

pairs = packed[0, :8]                            # row 0, columns 0 to 15: two codes per byte
codes = torch.stack([pairs & 15, pairs >> 4], dim=1).flatten().tolist()
unit = block_scale[0, 0].float() * global_scale

title("2. A frozen weight: sixteen numbers that share a scale")
print(f"global scale   2^{math.log2(global_scale):.0f}")
print(f"block scale    {block_scale[0, 0].float():.0f}")
print(f"their product  {unit:.4f}, the unit of this block\n")
print(" weight  in units  code  it means  decoded    error")
for weight, code, value in zip(original[0, :16], codes, decoded[0, :16]):
    print(f"{weight:7.4f}  {weight / unit:8.2f}  {code:04b}  {nvfp4.E2M1_SIGNED[code]:8.1f}  "
          f"{value:7.4f}  {value - weight:7.4f}")
error = decoded - original
exact = decoded.bfloat16().float() == decoded
print("\nthe whole matrix, 256 x 256:")
print(f"  root mean square of the weights         {original.square().mean().sqrt():.4f}")
print(f"  root mean square of the errors          {error.square().mean().sqrt():.4f}")
print(f"  decoded weights that fit in bfloat16    {exact.float().mean():.0%}")

# %% 3. The model, and noise on its norms
# All linears are frozen in NVFP4, and each gets a trainable adapter of rank 32. During sampling,
# noise sigma * z is added to the norms' weights.
model = load(TINY_MODEL, "nvfp4", torch.device("cpu"), live_vocab=tokenizer.vocab_size)
configure_cpu(model)
adapter = lora.attach(model, rank=32, alpha=32, seed=SEED)
sigmas = [aqn.sigma_at(step, STEPS, 1e-2, 5e-4, 10) for step in range(STEPS)]

norm = model.layers[0].input_norm
W = model.layers[0].qkv.weight.dequantize()      # the linear after that norm
x = torch.ones(model.config.hidden)               # stands for x / rms(x)
with aqn.noisy_norms(model, sigmas[STEP], SEED, STEP):
    noise = norm.noise.clone()
    noisy_norm = W @ ((norm.weight + norm.noise) * x)
noisy_columns = (W * (1 + noise / norm.weight)) @ (norm.weight * x)

title("3. The model, and noise on its norms")
frozen = sum(linear.weight.N * linear.weight.K for linear in adapter.linears)
print(f"frozen numbers in its linears  {frozen:9,}")
print(f"numbers in A and B             {adapter.master.numel():9,}\n")
print(f"sigma in the ten stages of {STEPS} steps:")
print("  " + "  ".join(f"{sigma:.4f}" for sigma in dict.fromkeys(sigmas)))
print(f"\nthe first norm in step {STEP}, its first four numbers:")
for name, values in (("weight w", norm.weight), ("z", noise / sigmas[STEP]),
                     ("sigma * z", noise), ("1 + sigma * z / w", 1 + noise / norm.weight)):
    print(f"  {name:18}" + "  ".join(f"{value:7.4f}" for value in values[:4]))
print("\na noisy norm before W, and W with noisy columns, give the same: "
      f"{torch.allclose(noisy_norm, noisy_columns, atol=1e-5)}")

# %% 4. Eight answers
# The sampler draws each token and records its log-prob. The random number is a hash of (seed,
# place, index of the answer, position).
sampler = Sampler(model, max_length=128)
sampling = Sampling(MAX_NEW_TOKENS, tokenizer.end_ids, temperature=1.0, seed=SEED)
with aqn.noisy_norms(model, sigmas[STEP], SEED, STEP):
    rollouts = sampler.generate([problem.prompt], GROUP_SIZE, sampling, [PLACE])

title("4. Eight answers")
print("row  tokens  log-prob  probability")
for b, row in enumerate(rollouts.rows):
    logprob = row.logprobs.sum()
    print(f"{b:3}  {len(row.completion):6}  {logprob:8.2f}  {logprob.exp():11.1%}  "
          f"{tokenizer.decode(row.completion)}")
print("\nthe first four tokens of rows 4 and 5:")
for b in (4, 5):
    drawn = zip(rollouts.rows[b].completion[:4], rollouts.rows[b].logprobs.exp())
    print("  " + ", ".join(f"{text_of([token])!r} {p:.1%}" for token, p in drawn))

# %% 5. Their rewards
# rewards.py finds the answer in the text, and grader/answers.py decides whether it's the known one.
graded = rewards.grade_rows(tokenizer, [problem], rollouts.rows)
reward = torch.tensor([row["reward"] for row in graded])

title("5. Their rewards")
print("row  answer  found by  known  reward")
for b, row in enumerate(graded):
    print(f"{b:3}  {row['extracted']:>6}  {row['rule']:8}  {row['answer']:>5}  {row['reward']:6.0f}")

# %% 6. Their advantages
# How far is each answer above its group's mean?
by_hand = reward - reward.mean()
advantages = grpo.group_advantages(reward, GROUP_SIZE, "none")
divided = grpo.group_advantages(reward, GROUP_SIZE, "group")     # as in the paper

title("6. Their advantages")
print(f"mean {reward.mean():.2f}, standard deviation {reward.std():.3f}")
print("                  divided by the standard deviation")
print(f"right  1 - {reward.mean():.2f} = {by_hand.max():5.2f}  {divided.max():5.2f}")
print(f"wrong  0 - {reward.mean():.2f} = {by_hand.min():5.2f}  {divided.min():5.2f}")
print(f"grpo.group_advantages gives the same: {torch.allclose(by_hand, advantages)}")

# %% 7. The loss of a token
# The learner recomputes the log-probs of the same tokens, without noise. Before the first update,
# policy and old policy are the same.
loss = grpo.LOSSES["dapo"]
lengths = torch.tensor([len(completion) for completion in rollouts.completions])
finished = torch.tensor([row.finished for row in rollouts.rows])
in_loss = grpo.loss_mask(rollouts.sampled(), reward, finished, mask_overlong=False)
loss_weights = grpo.loss_weights(in_loss, loss, MAX_NEW_TOKENS)  # (rows, tokens of the longest row)
loss_weight = loss_weights[in_loss]                              # no answer was cut off
row_of_token = torch.arange(GROUP_SIZE).repeat_interleave(lengths)
rollout_logprobs = torch.cat([row.logprobs for row in rollouts.rows])


def learner_logprobs():
    """Log-probs of all sampled tokens, row after row, under the current model, without noise."""
    tokens = [problem.prompt + completion for completion in rollouts.completions]
    starts = [len(problem.prompt)] * GROUP_SIZE
    return model.token_logprobs(tokens, starts)[0].detach()


def of_rows(logprobs):
    """Splits the log-probs of all tokens into rows."""
    return logprobs.split(lengths.tolist())


def show_losses(policy):
    """Computes the loss by hand and prints the first two tokens of rows 4 and 5."""
    cap = grpo.CORRECTIONS[loss.correction].cap
    importance_weight = (old - rollout_logprobs).exp().clamp(max=cap)
    ratio = (policy - old).exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    advantage = advantages[row_of_token]
    objective = torch.min(ratio * advantage, clipped * advantage)
    losses = -loss_weight * importance_weight * objective
    print("row  token      rollout       old   policy   IS weight   ratio  advantage     loss")
    for b in (4, 5):
        for t in range(2):
            i = lengths[:b].sum() + t            # the token's index among those of all rows
            print(f"{b:3}  {text_of([rollouts.completions[b][t]])!r:9}"
                  f"{rollout_logprobs[i].exp():9.5f}{old[i].exp():10.5f}{policy[i].exp():9.5f}"
                  f"{importance_weight[i]:12.4f}{ratio[i]:8.4f}{advantages[b]:11.2f}"
                  f"{losses[i]:9.4f}")
    same = grpo.LogProbs(policy, rollout_logprobs, old)
    total, _ = grpo.policy_loss(same, advantages[row_of_token], row_of_token, loss_weight, loss)
    print(f"sum over all tokens {losses.sum():.4f}, grpo.policy_loss {total:.4f}")


title("7. The loss of a token")
print(f"tokens in all answers {lengths.sum()}, so each weighs {loss_weight[0]:.2f}\n")
old = learner_logprobs()
show_losses(old)

# %% 8. One update
# A backward pass and an AdamW step on all A and B.
learner = Learner(model, loss)
batch = Batch(rollouts.rows, advantages)
start = adapter.master.detach().clone()
update = learner.update(batch, loss_weights, lr=5e-4)

title("8. One update")
print(f"norm of the gradient {update.grad_norm:.3f}\n")
print("        numbers  moved  by how much  gradient: median  largest")
moves = adapter.unflatten((adapter.master.detach() - start).abs())
gradients = adapter.unflatten(adapter.master.grad.abs())
n = len(adapter.linears)
for name, part in [("all A", slice(n)), ("all B", slice(n, None))]:
    moved = torch.cat([view.flatten() for view in moves[part]])
    gradient = torch.cat([view.flatten() for view in gradients[part]])
    print(f"{name}  {len(moved):8,}  {(moved > 0).float().mean():5.0%}  {moved.mean():11.4f}  "
          f"{gradient.median():16.1e}  {gradient.max():7.1e}")

# %% 9. The same problem again
# The update has moved the policy away from the old one, so in a second pass over the same answers
# (--epochs 2) the ratio differs from 1.
policy = learner_logprobs()

title("9. The same problem again")
print("row  reward  probability before  after")
for b, (before, after) in enumerate(zip(of_rows(old), of_rows(policy))):
    print(f"{b:3}  {reward[b]:6.0f}  {before.sum().exp():18.1%}  {after.sum().exp():5.1%}")
print("\na second pass over the same answers:")
show_losses(policy)
