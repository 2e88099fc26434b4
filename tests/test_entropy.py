"""
The study's measure of the sampler's entropy: by hand, and against the entropy of a known policy.

python -m pytest tests/test_entropy.py -v
"""
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from study import entropy, results

TINY = Path(__file__).parent.parent / "tiny"


def sampled(answers, samples):
    return results.sampled_setting(dict(name="x", noise="none", sigma=0.0, samples=samples, problems_a_draw=50,
                                        answers=answers))


def error(values):
    """The standard error of their mean."""
    return values.std(ddof=1) / len(values) ** 0.5


def test_the_figures_are_what_two_problems_give_by_hand():
    answers = [[1, 1, 2, -1.0], [0, 1, 4, -2.0], [1, 0, 6, -6.0], [0, 1, 8, -8.0]]       # two answers to each of two
    found = sampled(answers, samples=2)
    assert found.entropy.mean() == pytest.approx(17 / 20) and found.accuracy.mean() == 0.5
    assert found.length.mean() == 5
    # Per problem, sum of -log p minus entropy times tokens: 3 - 0.85 * 6 = -2.1 and 14 - 0.85 * 14 = 2.1.
    deviation = torch.tensor([-2.1, 2.1]).std().item()
    assert error(found.entropy) == pytest.approx(deviation * 2**0.5 / 20)


def test_the_estimate_is_the_entropy_of_the_policy_that_is_drawn_from():
    p = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    drawn = torch.multinomial(p, 40_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = sampled([[0, 1, 1, p[token].log().item()] for token in drawn.tolist()], samples=1).entropy
    exact = -(p * p.log()).sum().item()
    assert abs(found.mean() - exact) < 4 * error(found)                   # 4 standard errors: 6e-5 by chance
    spread = (p * (-p.log() - exact) ** 2).sum().sqrt().item() / 200      # of one draw, over the root of 40,000
    assert error(found) == pytest.approx(spread, rel=0.02)


def test_every_sigma_becomes_a_line_of_its_answers_and_says_its_means(tmp_path, monkeypatch, capsys):
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) + "\n"
                                                 for i in range(3)))
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["entropy", "--model", str(TINY), "--data", str(tmp_path / "sums.jsonl"), "--name",
                                      "search", "--out", str(out), "--samples", "2", "--max-new-tokens", "8",
                                      "--device", "cpu", "--problems-a-draw", "2"])
    zs, noisy = [], entropy.aqn.noisy_norms
    monkeypatch.setattr(entropy.aqn, "noisy_norms", lambda *args: zs.append(args[1:4]) or noisy(*args))
    entropy.main()
    assert zs[:3] == [(0.0, 0, 0), (1e-2, 0, 0), (1e-2, 0, 1)]            # three problems: two draws of every noise
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["noise"], line["sigma"]) for line in lines] == [("none", 0), ("aqn", 1e-2), ("aqn", 5e-2),
                                                                  ("aqn", 8e-2)]
    assert [line["problems_a_draw"] for line in lines] == [50, 2, 2, 2]
    said = capsys.readouterr().out.splitlines()
    for line, text in zip(lines, said, strict=True):
        assert len(line["answers"]) == 6
        tokens, logprobs = (sum(answer[i] for answer in line["answers"]) for i in (2, 3))
        assert f"entropy {-logprobs / tokens:.4f} nats a token" in text and f", {tokens / 6:.0f} tokens an" in text
    assert said[0].startswith("search, none: ") and said[3].startswith("search, aqn 0.08: ")
    assert lines[0]["answers"] != lines[3]["answers"]                     # sigma 8e-2 changes what is drawn


@pytest.mark.parametrize("flag,allowed", [("--problems", "[1, 1e6]"), ("--problems-a-draw", "[1, 1e6]")])
def test_a_flag_outside_of_its_range_is_one_line(monkeypatch, tmp_path, flag, allowed):
    monkeypatch.setattr(sys, "argv", ["entropy", "--model", str(TINY), "--data", "arithmetic", "--name", "x", "--out",
                                      str(tmp_path / "x.jsonl"), flag, "0"])
    with pytest.raises(SystemExit, match=re.escape(f"study.entropy: {flag} must lie in {allowed}, got 0")):
        entropy.main()
