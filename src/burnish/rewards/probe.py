"""What a reward pays to completions that solve nothing, found out before training and not after.

Policy gradient finds every completion that pays without solving the problem. The probe scores a handful of
such completions on real prompts and compares them with a right one in the asked format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from burnish.rewards.extract import Tags
from burnish.rewards.stack import RewardStack
from burnish.rewards.types import RewardItem, Score

_WARN_SHARE = 0.25  # of a right completion's reward


class ProbePrompt(Protocol):
    """What the probe needs of a prompt."""

    @property
    def text(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def answer(self) -> str: ...


@dataclass(frozen=True)
class ProbeRow:
    """One kind of completion: its mean reward, the mean of each part, how often it was judged correct."""

    kind: str
    mean_reward: float
    mean_parts: dict[str, float]
    correct_fraction: float


@dataclass(frozen=True)
class ProbeReport:
    """`rows[0]` is the right answer in the asked format; the others solve nothing."""

    num_prompts: int
    rows: tuple[ProbeRow, ...]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report for the terminal in two or three lines: rewards by kind, then what to worry about."""
        right = self.rows[0]
        others = ", ".join(f"{row.kind} {row.mean_reward:.3g}" for row in self.rows[1:])
        return [
            f"Reward probe on {self.num_prompts} prompts: {right.kind} {right.mean_reward:.3g}",
            f"  of completions that solve nothing: {others}",
            *([f"  WARNING: {'; '.join(self.warnings)}"] if self.warnings else []),
        ]

    def table(self) -> str:
        """All rows with their parts, as aligned text."""
        parts = list(self.rows[0].mean_parts)
        header = ["completion", "reward", *parts, "judged correct"]
        body = [
            [
                row.kind,
                f"{row.mean_reward:.3f}",
                *(f"{row.mean_parts[part]:.3f}" for part in parts),
                f"{row.correct_fraction:.0%}",
            ]
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [header, *body]
        )


_RIGHT = "right answer in format"
_FORMAT_ONLY = "wrong answer in format"


def probe_completions(tags: Tags) -> dict[str, Callable[[ProbePrompt], str]]:
    """The kinds of completion, each as a function of the prompt."""

    def tagged(reasoning: str, answer: str) -> str:
        return (
            f"{tags.reasoning_start}{reasoning}{tags.reasoning_end}\n{tags.solution_start}{answer}{tags.solution_end}"
        )

    return {
        _RIGHT: lambda prompt: tagged("Step by step.", prompt.answer),
        _FORMAT_ONLY: lambda prompt: tagged("Step by step.", f"not {prompt.answer}"),
        "junk between tags": lambda prompt: tagged("lorem ipsum", "dolor sit"),
        "only tags": lambda prompt: tagged("", ""),
        "empty": lambda prompt: "",
        "gold only in reasoning": lambda prompt: tagged(f"It is \\boxed{{{prompt.answer}}}.", "unknown"),
        "many answers in one tag": lambda prompt: tagged("Any of these.", f"0, 1, 2, {prompt.answer}"),
        "prompt echo": lambda prompt: prompt.text,
    }


def probe(stack: RewardStack, prompts: Sequence[ProbePrompt], on_wait: Callable[[], None] | None = None) -> ProbeReport:
    """Score every kind of probe completion on every prompt, in one batch. Raises RewardError as
    `stack.score` does; `on_wait` is the stack's, too."""
    if not prompts:
        raise ValueError("the reward probe needs at least one prompt")
    kinds = probe_completions(stack.options.tags)
    items = [
        RewardItem(prompt.text, complete(prompt), prompt.question, prompt.answer)
        for complete in kinds.values()
        for prompt in prompts
    ]
    scores = stack.score(items, tolerate_none=True, on_wait=on_wait)  # a reward may well refuse to judge junk
    n = len(prompts)
    rows = tuple(_row(kind, scores[i * n : (i + 1) * n]) for i, kind in enumerate(kinds))
    return ProbeReport(num_prompts=n, rows=rows, warnings=tuple(_warnings(rows, n)))


def _row(kind: str, scores: Sequence[Score]) -> ProbeRow:
    n = len(scores)
    return ProbeRow(
        kind=kind,
        mean_reward=sum(score.total for score in scores) / n,
        mean_parts={part: sum(score.parts[part] for score in scores) / n for part in scores[0].parts},
        correct_fraction=sum(score.correct for score in scores) / n,
    )


def _warnings(rows: Sequence[ProbeRow], num_prompts: int) -> list[str]:
    right, others = rows[0], rows[1:]
    warnings = []
    if right.correct_fraction < 1:
        unread = round((1 - right.correct_fraction) * num_prompts)
        warnings.append(f"{unread} of {num_prompts} gold answers are not recognised even when given verbatim")
    if right.mean_reward <= 0:
        warnings.append(f"a right answer in format is worth {right.mean_reward:.3g}: nothing to learn from")
        return warnings
    for row in others:
        share = row.mean_reward / right.mean_reward
        if share >= _WARN_SHARE:
            warnings.append(f"{row.kind!r} scores {share:.0%} of a right completion")
        if row.correct_fraction > 0:
            warnings.append(f"{row.kind!r} is judged correct on {row.correct_fraction:.0%} of the prompts")
    return warnings
