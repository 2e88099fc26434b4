"""
What the paper's clip holds, and what that does to the entropy: against finite differences and by hand.

python -m pytest tests/test_clip.py -v
"""
import re
import sys
from pathlib import Path

import pytest
import torch

from study import clip

TINY = Path(__file__).parent.parent / "tiny"


def entropy(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def kl(noisy, learner):
    """KL(noisy || learner)."""
    return (noisy.softmax(-1) * (noisy.log_softmax(-1) - learner.log_softmax(-1))).sum(-1)


def test_the_changes_are_those_of_a_small_step_on_the_logits():
    generator = torch.Generator().manual_seed(0)
    learner, noisy = 2 * torch.randn(2, 20, 7, generator=generator, dtype=torch.float64)
    tokens = torch.randint(7, (20,), generator=generator)
    logp, of_entropy, of_distance = clip.changes(learner, noisy, tokens)
    torch.testing.assert_close(logp, learner.log_softmax(1)[range(20), tokens])
    step = 1e-5 * (torch.eye(7, dtype=torch.float64)[tokens] - learner.softmax(1))       # along the gradient of logp
    for change, measure in (of_entropy, entropy), (of_distance, lambda logits: kl(noisy, logits)):
        found = (measure(learner + step) - measure(learner - step)) / 2e-5               # its error is of second order
        torch.testing.assert_close(change, found, rtol=0, atol=1e-8)


def test_what_pushes_a_token_is_its_advantage_times_what_the_correction_makes_of_the_ratio():
    #                       in between           far above           far below
    ratio = torch.tensor([1.1, 1.1,            3.0, 3.0,            0.5, 0.5])
    advantage = torch.tensor([1.0, -1.0] * 3)
    sampler = torch.full((6,), -2.0)
    by_hand = {"off": [1, 1, 1, 1, 1, 1], "truncate": [1.1, 1.1, 2, 2, 0.5, 0.5],
               "ppo": [1.1, 1.1, 0, 3, 0.5, 0], "ppo without its clip": [1.1, 1.1, 3, 3, 0.5, 0.5]}
    for way, loss in clip.WAYS.items():
        pushed = clip.pushes(sampler + ratio.log(), sampler, advantage, loss)
        torch.testing.assert_close(pushed, torch.tensor(by_hand[way]) * advantage)


def test_the_tables_of_five_tokens_by_hand(capsys):
    """One token in each of the five groups; their c without the clip is -0.5, 1.5, 0.5, -1.5 and 1."""
    ratio = torch.tensor([0.5, 1.5, 0.5, 1.5, 1.0])
    clip.print_pulls(clip.Tokens(policy=torch.tensor([0.1, 0.3, 0.2, 0.6, 0.9]).log(),
                            sampler=torch.tensor([0.1, 0.3, 0.2, 0.6, 0.9]).log() - ratio.log(),
                            advantage=torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0]),
                            entropy=torch.tensor([0.4, -0.2, 0.3, -0.1, -0.5]),
                            distance=torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0])))
    said = [line.strip("| ").split(" | ")[1:] for line in capsys.readouterr().out.splitlines()]
    assert said[2:7] == [["20.00", "0.10", "-40.00", "+0.00"], ["20.00", "0.30", "-60.00", "+30.00"],
                         ["20.00", "0.20", "+30.00", "+0.00"], ["20.00", "0.60", "+30.00", "-60.00"],
                         ["20.00", "0.90", "-100.00", "+0.00"]]
    # c is (-0.5, 1.5, 0.5, -1.5, 1), (0, 0, 0.5, -1.5, 1), (-1, 1, 1, -1, 1) and as in the table above.
    assert said[10:] == [["-140.00", "-30.00"], ["-40.00", "-60.00"], ["-140.00", "-20.00"], ["-140.00", "-30.00"],
                         ["-100.00", "+0.00"]]


def test_the_program_measures_answers_of_a_model_with_noise(monkeypatch, capsys):
    zs, noisy = [], clip.aqn.noisy_norms
    monkeypatch.setattr(clip.aqn, "noisy_norms", lambda *args, **also: zs.append(args[1]) or noisy(*args, **also))
    arguments = ["--model", str(TINY), "--data", "arithmetic", "--problems", "6", "--max-new-tokens", "24", "--device",
                 "cpu", "--sigma", "0.5"]
    monkeypatch.setattr(sys, "argv", ["clip", *arguments])
    clip.main()
    said = capsys.readouterr().out.splitlines()
    assert set(zs) == {0.5} and said[0].startswith(f"{len(zs) - 1} answers with an advantage, ")     # and each again
    shares = [float(line.split(" | ")[1]) for line in said[5:10]]
    assert sum(shares) == pytest.approx(100, abs=0.03) and shares[-1] < 100               # rounded to 0.01 each
    assert [line.split(" | ")[0].strip("| ") for line in said[13:17]] == list(clip.WAYS)


def test_problems_that_teach_nothing_are_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["clip", "--model", str(TINY), "--data", "arithmetic", "--problems", "1",
                                      "--samples", "2", "--max-new-tokens", "4", "--device", "cpu"])
    with pytest.raises(SystemExit, match="no problem has both right and wrong answers"):
        clip.main()


@pytest.mark.parametrize("flag,value,allowed", [("--problems", "0", "[1, 1e6]"), ("--samples", "1", "[2, 1e4]"),
                                                ("--sigma", "0", "(0, 10]"), ("--max-new-tokens", "0", "[1, 1e6]")])
def test_a_flag_outside_of_its_range_is_one_line(monkeypatch, flag, value, allowed):
    monkeypatch.setattr(sys, "argv", ["clip", "--model", str(TINY), "--data", "arithmetic", flag, value])
    with pytest.raises(SystemExit, match=re.escape(f"study.clip: {flag} must lie in {allowed}, got {value}")):
        clip.main()
