"""
A custom reward: the built-in grader, plus a small bonus for format and a penalty for length.

    python train.py --model qwen2.5-1.5b --reward my_reward:score

`correct` is the task. `shaping` counts only in groups with both right and wrong answers, and can't
outweigh the task: it is in [-0.5, 0.1], so the worst right answer gets 0.5 and the best wrong one
0.1. train.py logs both, as reward_correct and reward_shaping.
"""
import rewards

LONGEST = 512                                    # your --max-new-tokens: set both together
BUFFER = 128                                     # the last tokens, which are penalized
FORM = 0.1                                       # bonus for the requested format
TOO_LONG = 0.5                                   # penalty at LONGEST tokens


def score(completion: str, problem: dict, *, length: int) -> dict[str, float]:
    """length: tokens of the completion."""
    verdict = rewards.grade(completion, problem["answer"], problem["question"])
    shaping = FORM * verdict.format - TOO_LONG * overlong(length)
    return {"correct": float(verdict.correct), "shaping": shaping}


def overlong(length: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to LONGEST - BUFFER
    tokens, then rising linearly to 1 at LONGEST.
    """
    return min(1.0, max(0.0, (length - (LONGEST - BUFFER)) / BUFFER))
