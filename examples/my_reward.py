"""
A reward of your own: the built-in grader, plus a little for the form and against length.

    python train.py --model qwen2.5-1.5b --reward my_reward:score

`correct` is the task. `shaping` counts only between the answers of a group in which some are right
and some are wrong, and here it can never outvote the task: it lies in [-0.5, 0.1], so the worst
right answer has 0.5 and the best wrong one 0.1. train.py logs both, as reward_correct and
reward_shaping.
"""
import rewards

LONGEST = 512                                    # --max-new-tokens
BUFFER = 128                                     # the last so many of them cost something
FORM = 0.1                                       # for an answer in the form that was asked for
TOO_LONG = 0.5                                   # against one of LONGEST tokens


def score(completion: str, problem: dict, *, length: int) -> dict[str, float]:
    """length: tokens of the completion."""
    verdict = rewards.grade(completion, problem["answer"], problem["question"])
    shaping = FORM * verdict.format - TOO_LONG * overlong(length)
    return {"correct": float(verdict.correct), "shaping": shaping}


def overlong(length: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13): 0 up to LONGEST - BUFFER tokens, from
    there a straight line up to 1 at LONGEST.
    """
    return min(1.0, max(0.0, (length - (LONGEST - BUFFER)) / BUFFER))
