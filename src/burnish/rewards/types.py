"""What the rewards room takes and hands back."""

from dataclasses import dataclass
from enum import StrEnum

from burnish.errors import BurnishError


class RewardError(BurnishError):
    """Rewards cannot be had: options that contradict each other, a user's reward file that is wrong, or too
    many completions that could not be scored."""


@dataclass(frozen=True)
class RewardItem:
    """One completion to score, as text."""

    prompt: str
    completion: str
    question: str
    answer: str


class ScoreStatus(StrEnum):
    SCORED = "scored"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True)
class Score:
    """The reward of one completion. `total` is the sum of `parts`; both are 0 where the status is not
    SCORED and such a completion is left out of its group's statistics."""

    total: float
    parts: dict[str, float]
    status: ScoreStatus
    correct: bool  # the extracted answer equals the gold answer
    partially_correct: bool  # numeric answer within 10 % of the gold one (correct implies it)
    format_ok: bool  # the tags appear exactly in the asked form
    extracted: str | None  # the answer that was found in the completion
