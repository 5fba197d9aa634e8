"""Finds the final answer in a completion and says whether its tags are in the asked form.

The answer is what stands in the last answer tag; only where there is no answer tag, the last `\\boxed{…}`,
and only where there is none of those either, what follows the last `####`. What the model wrote while
reasoning never counts beside an answer tag. Nothing here compares: see `check`."""

import re
from dataclasses import dataclass, fields

from burnish.rewards.types import RewardError

# `#### 42 is the answer because …`: the number that opens the line, where prose or the line's end follows.
_NUMBER = r"[-+−]?\s*\\?[$€£]?\s*[-+−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?\s*\\?%?"
_OPENING_NUMBER = re.compile(rf"\s*({_NUMBER})\s*(?:$|[.,;:!?)\]*](?:\s|$)|[A-Za-z]{{2,}})")
_LONG_LINE = 80  # no answer of the `####` form is longer; the rest of such a line is talk


@dataclass(frozen=True)
class Tags:
    """The four tags of the tutorials' format: reasoning first, then the answer (the "solution")."""

    reasoning_start: str = "<reasoning>"
    reasoning_end: str = "</reasoning>"
    solution_start: str = "<answer>"
    solution_end: str = "</answer>"

    def __post_init__(self) -> None:
        values = self.all
        for field, value in zip(fields(self), values, strict=True):
            if not value.strip():
                raise RewardError(f"{field.name}_token is empty; it must be a tag such as {field.default!r}.")
        if len(set(values)) != len(values):
            raise RewardError(f"the reasoning and solution tags must be four different strings, not {values}.")

    @property
    def all(self) -> tuple[str, str, str, str]:
        return (self.reasoning_start, self.reasoning_end, self.solution_start, self.solution_end)


def extract_answer(completion: str, tags: Tags) -> str | None:
    """The answer as written, white space included; None where there is none. An answer tag that is opened
    and never closed (a completion cut at its token limit) is no answer, and hides everything before it."""
    if tags.solution_start in completion:
        end = completion.rfind(tags.solution_end)
        start = completion.rfind(tags.solution_start, 0, end) if end >= 0 else -1
        return _unwrap(completion[start + len(tags.solution_start) : end]) if start >= 0 else None
    after_reasoning = completion.rpartition(tags.reasoning_end)[2]
    for region in (after_reasoning, completion):
        for find in (last_boxed, _after_hashes):
            if (found := find(region)) is not None:
                return found
    return None


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` whose braces balance."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0) if text[position - 1] != "\\" else 0
            if depth == 0:
                return text[match.end() : position]
    return None


def format_is_exact(completion: str, tags: Tags) -> bool:
    """Whether each tag occurs exactly once, in order, with something other than white space in the
    reasoning and in the answer. Text outside the tags is allowed, as in the tutorials."""
    if any(count != 1 for count in tag_counts(completion, tags)):
        return False
    reasoning_start, reasoning_end, solution_start, solution_end = (completion.index(tag) for tag in tags.all)
    reasoning_from = reasoning_start + len(tags.reasoning_start)
    solution_from = solution_start + len(tags.solution_start)
    in_order = reasoning_from <= reasoning_end < solution_start and solution_from <= solution_end
    return in_order and bool(
        completion[reasoning_from:reasoning_end].strip() and completion[solution_from:solution_end].strip()
    )


def tag_counts(completion: str, tags: Tags) -> tuple[int, int, int, int]:
    """How often each of the four tags occurs, in the order of `tags.all`."""
    first, second, third, fourth = (completion.count(tag) for tag in tags.all)
    return first, second, third, fourth


def _unwrap(content: str) -> str:
    """An answer tag may itself hold `\\boxed{42}` or `#### 42`."""
    for find in (last_boxed, _after_hashes):
        if (found := find(content)) is not None:
            return found
    return content


def _after_hashes(text: str) -> str | None:
    if "####" not in text:
        return None
    line = text.rpartition("####")[2].lstrip().split("\n", 1)[0]
    opening = _OPENING_NUMBER.match(line)
    if opening is None and len(line) > _LONG_LINE:
        opening = re.match(rf"\s*({_NUMBER})", line)
    return opening.group(1).strip() if opening else line.strip()
