"""Evaluation figures against brute force."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.rewards.metrics import (
    EvalStats,
    evaluation_stats,
    format_eval_line,
    majority,
    mean_pass_at_k,
    pass_at_k,
)
from burnish.rewards.types import Score, ScoreStatus

GOLD = "7"


def score(answer: str | None, *, status: ScoreStatus = ScoreStatus.SCORED, near: bool = False, fmt: bool = True):
    correct = answer == GOLD and status is ScoreStatus.SCORED
    total = 1.0 if correct else 0.0
    return Score(total, {"answer": total}, status, correct, correct or near, fmt, answer)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_k_subsets_that_hold_a_correct_sample(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(itertools.combinations(correct, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(expected)


def test_pass_at_k_of_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def test_mean_pass_at_k_averages_over_prompts():
    groups = [[score("7"), score("1")], [score("1"), score("2")]]
    assert mean_pass_at_k(groups, 1) == pytest.approx(0.25)
    assert mean_pass_at_k(groups, 2) == pytest.approx(0.5)


answers = st.sampled_from(["7", "8", "9", "1/2", None])


@given(st.lists(st.lists(answers, min_size=1, max_size=7), min_size=1, max_size=6))
def test_figures_of_all_modes_equal_brute_force(answer_groups):
    groups = [[score(answer) for answer in group] for group in answer_groups]

    def top(group):
        votes = Counter(answer for answer in group if answer is not None)
        most = max(votes.values(), default=0)
        return next((answer for answer in group if answer is not None and votes[answer] == most), None)

    expected = {
        "pass": (sum(GOLD in group for group in answer_groups), len(answer_groups)),
        "maj": (sum(top(group) == GOLD for group in answer_groups), len(answer_groups)),
        "pass_at_1": (
            sum(group.count(GOLD) for group in answer_groups),
            sum(len(group) for group in answer_groups),
        ),
    }
    for mode, (corr, total) in expected.items():
        stats = evaluation_stats(groups, mode)
        assert (stats.corr, stats.total) == (corr, total)
        assert stats.accuracy == pytest.approx(100 * corr / total)
    with_k_1 = [[group[0]] for group in groups]
    assert len({evaluation_stats(with_k_1, mode) for mode in expected}) == 1


def test_items_that_timed_out_or_failed_stay_in_every_denominator():
    timed_out = score(GOLD, status=ScoreStatus.TIMED_OUT)
    failed = score(GOLD, status=ScoreStatus.FAILED)
    items = [score(GOLD), timed_out, failed, *(score("1") for _ in range(7))]
    batches = [items[:4], items[4:8], items[8:]]  # 10 items in batches of 4: the tail counts too
    groups = [[one] for batch in batches for one in batch]
    for mode in ("pass", "maj", "pass_at_1"):
        stats = evaluation_stats(groups, mode)
        assert (stats.corr, stats.total, stats.accuracy, stats.mean_reward) == (1, 10, 10.0, 0.1)
        assert (stats.num_timed_out, stats.num_failed) == (1, 1)


def test_equal_values_vote_together_and_completions_without_answer_do_not_vote():
    group = [score("1/2"), score(None), score("0.5"), score(None), score(None), score("8")]
    assert [member.extracted for member in majority(group)] == ["1/2", "0.5"]
    assert len(majority([score(None), score("")])) == 2


def test_of_answers_with_equally_many_votes_the_first_wins():
    assert majority([score("8"), score("7"), score("7"), score("8")])[0].extracted == "8"


def test_a_correct_completion_counts_in_pass_mode_however_later_ones_are_formatted():
    stats = evaluation_stats([[score("7", fmt=False), score("1", fmt=True)]], "pass")
    assert (stats.accuracy, stats.format_accuracy) == (100.0, 100.0)


def test_an_evaluation_of_nothing_is_refused():
    for groups in ([], [[]], [[score("7")], []]):
        with pytest.raises(ValueError, match="at least one"):
            evaluation_stats(groups, "pass")


def test_the_evaluation_line_reads_as_in_the_tutorials():
    stats = EvalStats(3, 10, 30.0, 40.0, 100 / 3, 0.4333333333, 0, 0)
    assert format_eval_line("Pre RL Training", stats) == (
        "Pre RL Training: corr=3, total=10, accuracy=30.0%, partial_accuracy=40.0%, format_accuracy=33.3333%,"
        " mean_reward=0.4333"
    )
