"""Evaluation figures from scores: accuracy as the tutorials count it, pass@k and maj@k.

Every prompt and every completion stays in its denominator: one that timed out or failed counts as wrong.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from burnish.rewards.check import vote_key
from burnish.rewards.types import Score, ScoreStatus

EvalMode = Literal["pass", "maj", "pass_at_1"]


@dataclass(frozen=True)
class EvalStats:
    """`corr` of `total` were right; accuracies in per cent of `total`; mean_reward is over all
    completions."""

    corr: int
    total: int
    accuracy: float
    partial_accuracy: float
    format_accuracy: float
    mean_reward: float
    num_timed_out: int
    num_failed: int


def evaluation_stats(groups: Sequence[Sequence[Score]], mode: EvalMode) -> EvalStats:
    """Figures over prompts with K scored completions each.

    pass: a prompt counts when any of its K completions is correct (and likewise for partly correct and
    format). maj: it counts when its most frequent answer is correct. pass_at_1: every completion counts on
    its own, so total is prompts × K. Raises ValueError when there is nothing to count."""
    scores = [score for group in groups for score in group]
    if not scores or any(not group for group in groups):
        raise ValueError("an evaluation needs at least one completion of every prompt")
    if mode == "pass":
        units = [tuple(group) for group in groups]
    elif mode == "maj":
        units = [majority(group) for group in groups]
    else:
        units = [(score,) for score in scores]

    def percent(attribute: str) -> float:
        return 100.0 * sum(any(getattr(score, attribute) for score in unit) for unit in units) / len(units)

    return EvalStats(
        corr=sum(any(score.correct for score in unit) for unit in units),
        total=len(units),
        accuracy=percent("correct"),
        partial_accuracy=percent("partially_correct"),
        format_accuracy=percent("format_ok"),
        mean_reward=sum(score.total for score in scores) / len(scores),
        num_timed_out=sum(score.status is ScoreStatus.TIMED_OUT for score in scores),
        num_failed=sum(score.status is ScoreStatus.FAILED for score in scores),
    )


def majority(group: Sequence[Score]) -> tuple[Score, ...]:
    """The completions that gave a prompt's most frequent answer; of answers with equally many votes, the
    one that came first. Equal values are one answer, and so are all correct ones, however they are written.
    A completion without an answer does not vote; where none votes, all are returned: they agree on no
    answer."""
    votes = [_vote(score) for score in group]
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return tuple(group)
    winner, _ = counts.most_common(1)[0]  # insertion order among equals
    return tuple(score for score, vote in zip(group, votes, strict=True) if vote == winner)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct, from `num_correct` of
    `num_samples`: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1)."""
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    none_correct = 1.0
    for i in range(k):
        none_correct *= max(0, num_samples - num_correct - i) / (num_samples - i)
    return 1.0 - none_correct


def mean_pass_at_k(groups: Sequence[Sequence[Score]], k: int) -> float:
    """pass@k averaged over prompts."""
    return sum(pass_at_k(len(group), sum(score.correct for score in group), k) for group in groups) / len(groups)


def format_eval_line(title: str, stats: EvalStats) -> str:
    """The evaluation line of the tutorials, e.g. `Pre RL Training: corr=3, total=10, accuracy=30.0%, …`."""
    accuracy, partial_accuracy, format_accuracy, mean_reward = (
        round(value, 4) for value in (stats.accuracy, stats.partial_accuracy, stats.format_accuracy, stats.mean_reward)
    )
    return (
        f"{title}: corr={stats.corr}, total={stats.total}, {accuracy=}%, {partial_accuracy=}%,"
        f" {format_accuracy=}%, {mean_reward=}"
    )


def _vote(score: Score) -> str | None:
    if score.correct:
        return "\0correct"  # no answer's key
    if not score.extracted:
        return None
    return vote_key(score.extracted)
