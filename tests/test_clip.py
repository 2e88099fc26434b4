"""
What the paper's clip holds, and what that does to the entropy: against finite differences and by hand.

python -m pytest tests/test_clip.py -v
"""
import sys
from pathlib import Path

import pytest
import torch

from study import clip

TINY = Path(__file__).parent.parent / "tiny"


def entropy(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def test_the_change_of_the_entropy_is_that_of_a_small_step_on_the_logits():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20, 7, generator=generator, dtype=torch.float64)
    tokens = torch.randint(7, (20,), generator=generator)
    logp, change = clip.entropy_changes(logits, tokens)
    torch.testing.assert_close(logp, logits.log_softmax(1)[range(20), tokens])
    step = 1e-5 * (torch.eye(7, dtype=torch.float64)[tokens] - logits.softmax(1))        # along the gradient of logp
    found = (entropy(logits + step) - entropy(logits - step)) / 2e-5                     # its error is of second order
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


def test_the_report_of_four_tokens_by_hand(capsys):
    """Two right and two wrong tokens, of which the clip holds one each."""
    found = {"policy": torch.tensor([0.6, 0.3, 0.1, 0.8]).log(), "sampler": torch.tensor([0.6, 0.2, 0.2, 0.8]).log(),
             "advantage": torch.tensor([1.0, 1.0, -1.0, -1.0]), "change": torch.tensor([-0.2, -0.1, 0.4, -0.3])}
    clip.report(found)
    said = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert said[2:5] == [["all", "100.00", "0.30"], ["clipped low", "25.00", "0.10"], ["clipped high", "25.00", "0.30"]]
    # c is (1, 1, -1, -1), (1, 1.5, -0.5, -1), (1, 0, 0, -1) and (1, 1.5, -0.5, -1).
    assert said[8:] == [["off", "-100.00", "-125.00"], ["truncate", "-62.50", "-87.50"], ["ppo", "+25.00", "+0.00"],
                        ["ppo without its clip", "-62.50", "-87.50"]]


def test_the_program_measures_answers_of_a_model_with_noise(monkeypatch, capsys):
    zs, noisy = [], clip.aqn.noisy_norms
    monkeypatch.setattr(clip.aqn, "noisy_norms", lambda *args, **also: zs.append(args[1]) or noisy(*args, **also))
    arguments = ["--model", str(TINY), "--data", "arithmetic", "--problems", "6", "--max-new-tokens", "24", "--device",
                 "cpu", "--sigma", "0.5"]
    monkeypatch.setattr(sys, "argv", ["clip", *arguments])
    clip.main()
    said = capsys.readouterr().out.splitlines()
    assert zs == [0.5] and " answers with an advantage, " in said[0]
    assert [line.split(" |")[0] for line in said[2:7]] == ["| tokens", "|---|---|---|", "| all", "| clipped low",
                                                           "| clipped high"]
    assert any(float(line.split(" | ")[1]) > 0 for line in said[5:7])     # so much noise moves tokens beyond the clip
    assert [line.split(" | ")[0].strip("| ") for line in said[10:]] == list(clip.WAYS)


def test_problems_that_teach_nothing_are_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["clip", "--model", str(TINY), "--data", "arithmetic", "--problems", "1",
                                      "--samples", "1", "--max-new-tokens", "4", "--device", "cpu"])
    with pytest.raises(SystemExit, match="no problem has both right and wrong answers"):
        clip.main()
