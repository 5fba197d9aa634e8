"""The probe finds what a reward pays to completions that solve nothing."""

from dataclasses import dataclass

import pytest

from burnish.rewards.probe import probe
from burnish.rewards.stack import RewardOptions, RewardStack
from burnish.rewards.types import RewardError


@dataclass(frozen=True)
class Asked:
    text: str
    question: str
    answer: str


PROMPTS = [
    Asked(f"Reason in <reasoning></reasoning>, answer in <answer></answer>. {n}+{n}?", f"{n}+{n}?", str(2 * n))
    for n in (1, 4, 21)
] + [Asked("Simplify. Answer like <answer>7</answer>.", "Simplify x+x.", "2x")]


def test_the_built_in_rewards_pay_for_format_alone_a_tenth_and_for_nothing_else():
    with RewardStack(RewardOptions()) as stack:
        report = probe(stack, PROMPTS)
    rewards = {row.kind: row.mean_reward for row in report.rows}
    assert rewards.pop("right answer in format") == pytest.approx(1.1)
    assert max(rewards.values()) == pytest.approx(0.1)
    assert all(row.correct_fraction == 0 for row in report.rows[1:])
    assert report.warnings == ()
    assert 2 <= len(report.lines()) <= 4
    assert len(report.table().splitlines()) == 1 + len(report.rows)


def test_a_format_weight_that_rivals_the_answer_is_a_warning():
    with RewardStack(RewardOptions(reward_exact_format_match=1.0)) as stack:
        report = probe(stack, PROMPTS)
    assert "'wrong answer in format' scores 50% of a right completion" in report.warnings
    assert 2 <= len(report.lines()) <= 4


def test_a_users_reward_that_looks_for_the_gold_anywhere_is_found_out(tmp_path):
    path = tmp_path / "lax.py"
    path.write_text("def lax(completions, answer, **kw): return [a in c for c, a in zip(completions, answer)]")
    with RewardStack(RewardOptions(reward_functions_path=str(path), reward_functions=("lax",))) as stack:
        report = probe(stack, PROMPTS)
    assert any("gold only in reasoning" in warning for warning in report.warnings)


def test_gold_answers_that_are_never_recognised_are_a_warning():
    with RewardStack(RewardOptions()) as stack:
        report = probe(stack, [Asked("q", "q", ""), Asked("q", "q", "4")])
    assert any("1 of 2 gold answers" in warning for warning in report.warnings)


def test_a_reward_that_refuses_to_judge_junk_can_be_probed_and_one_that_raises_on_it_cannot(tmp_path):
    path = tmp_path / "picky.py"
    path.write_text(
        "def refuses(completions, **kw): return [1.0 if 'Step' in c else None for c in completions]\n"
        "def raises(completions, **kw): return [1.0 / len(c) for c in completions]\n"
    )
    with RewardStack(RewardOptions(reward_functions_path=str(path), reward_functions=("refuses",))) as stack:
        rewards = {row.kind: row.mean_reward for row in probe(stack, PROMPTS).rows}
    assert (rewards["right answer in format"], rewards["empty"]) == (1.0, 0.0)
    with (
        RewardStack(RewardOptions(reward_functions_path=str(path), reward_functions=("raises",))) as stack,
        pytest.raises(RewardError, match="ZeroDivisionError"),
    ):
        probe(stack, PROMPTS)
