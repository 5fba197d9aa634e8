"""The reward of a completion, part by part.

The built-in stack is that of the tutorials: the answer (`answer`), the tags exactly in format
(`exact_format`) and each tag on its own (`partial_format`). A user's functions replace the parts, one part
per function; whether an answer is correct and its format exact is always the built-in judgement, so that
evaluation means the same in every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from burnish.rewards import check
from burnish.rewards.check import Match
from burnish.rewards.extract import Tags, extract_answer, format_is_exact, tag_counts
from burnish.rewards.pool import WorkerPool
from burnish.rewards.types import RewardError, RewardItem, Score, ScoreStatus
from burnish.rewards.user import ARGUMENTS, describe
from burnish.rewards.worker import UserRole


@dataclass(frozen=True)
class RewardOptions:
    """The reward options, by their names on the command line.

    A right answer earns `reward_exact_answer` when it is the gold string or equal to it in value, and
    `reward_white_space_format_match` when it is the gold string but for white space; never both. Penalties
    are added as they are, so they are at most 0. `math_verify_timeout` is in seconds: for one answer, and
    for one call of a user's function on a batch."""

    reward_exact_answer: float = 1.0
    reward_white_space_format_match: float = 1.0
    reward_exact_format_match: float = 0.1
    reward_partial_format_match: float = 0.0
    penalty_incorrect_format: float = 0.0  # per tag that is not there exactly once
    penalty_incorrect_answer: float = 0.0
    reward_gate_on_correctness: bool = False  # format parts count only where the answer is right
    reasoning_start_token: str = "<reasoning>"
    reasoning_end_token: str = "</reasoning>"
    solution_start_token: str = "<answer>"
    solution_end_token: str = "</answer>"
    reward_functions_path: str | None = None
    reward_functions: tuple[str, ...] | None = None
    math_verify_timeout: float = 120.0
    math_verify_num_procs: int | None = None  # None: one per usable CPU
    max_failed_scores_fraction: float = 0.5  # more of a batch that cannot be scored ends the run

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("penalty_") and value > 0:
                raise RewardError(f"{field.name}={value} would be a reward: penalties are added, so give {-value}.")
        if self.math_verify_timeout <= 0:
            raise RewardError(f"math_verify_timeout={self.math_verify_timeout} has to be above 0 seconds.")
        if self.math_verify_num_procs is not None and self.math_verify_num_procs < 1:
            raise RewardError(f"math_verify_num_procs={self.math_verify_num_procs} has to be 1 or more, or null.")
        if not 0 <= self.max_failed_scores_fraction <= 1:
            raise RewardError(
                f"max_failed_scores_fraction={self.max_failed_scores_fraction} has to lie between 0 and 1."
            )
        if bool(self.reward_functions_path) != bool(self.reward_functions):
            raise RewardError(
                "reward_functions_path and reward_functions go together: the file, and the names to call in"
                f" it; given are {self.reward_functions_path!r} and {self.reward_functions!r}."
            )
        for name in self.reward_functions or ():
            if (self.reward_functions or ()).count(name) > 1:
                raise RewardError(f"reward_functions names {name!r} twice; each function is one part of the reward.")
        if self.reward_functions_path:
            if not Path(self.reward_functions_path).is_file():
                raise RewardError(f"reward_functions_path={self.reward_functions_path}: there is no such file.")
            if self.reward_gate_on_correctness:
                raise RewardError(
                    "reward_gate_on_correctness gates the built-in format rewards, which reward_functions"
                    " replace; leave one of them out."
                )
        self.tags  # noqa: B018 -- checks the tags

    @property
    def tags(self) -> Tags:
        return Tags(
            self.reasoning_start_token,
            self.reasoning_end_token,
            self.solution_start_token,
            self.solution_end_token,
        )


@dataclass(frozen=True)
class Verdict:
    """The built-in judgement on one completion, before any weights."""

    status: ScoreStatus  # whether the answer could be checked
    match: Match  # never UNDECIDED where the status is SCORED
    partially_correct: bool
    format_ok: bool
    tag_counts: tuple[int, int, int, int]
    extracted: str | None
    detail: str

    @property
    def correct(self) -> bool:
        return self.match in (Match.EXACT, Match.WHITE_SPACE, Match.EQUAL)


class RewardStack:
    """Scores batches of completions. A context manager: workers that are up end with it."""

    def __init__(self, options: RewardOptions) -> None:
        self.options = options
        self._checkers = WorkerPool(
            ("check",), timeout=options.math_verify_timeout, num_procs=options.math_verify_num_procs
        )
        self._user_worker: WorkerPool | None = None
        if options.reward_functions_path and options.reward_functions:
            path = str(Path(options.reward_functions_path).resolve())
            role: UserRole = ("user", path, tuple(options.reward_functions))
            self._user_worker = WorkerPool(role, timeout=options.math_verify_timeout, num_procs=1)

    def __enter__(self) -> "RewardStack":
        """Loads the user's reward file, so that an error in it shows before anything else is done."""
        if self._user_worker is not None:
            self._user_worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._checkers.close()
        if self._user_worker is not None:
            self._user_worker.close()

    def score(
        self,
        items: Sequence[RewardItem],
        *,
        tolerate_none: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> list[Score]:
        """One Score per item, in order. Raises RewardError when a user's function returns something
        unusable, or when more than max_failed_scores_fraction of the items cannot be scored for a reason
        that is not the completion's own; the message holds the first cause. With `tolerate_none`, items for
        which a user's function returns None do not count towards that. `on_wait` is called again and again
        while workers are waited for, and ends the scoring by raising."""
        if not items:
            return []
        verdicts = self._judge(items, on_wait)
        if self._user_worker is not None:
            return self._score_by_user(items, verdicts, self._user_worker, tolerate_none, on_wait)
        failures = [verdict.detail for verdict in verdicts if verdict.status is ScoreStatus.FAILED]
        self._stop_on_too_many(failures, len(items))
        return [built_in_score(verdict, self.options) for verdict in verdicts]

    def _judge(self, items: Sequence[RewardItem], on_wait: Callable[[], None] | None) -> list[Verdict]:
        tags = self.options.tags
        answers = [extract_answer(item.completion, tags) for item in items]
        matches = [check.compare(item.answer, answer or "") for item, answer in zip(items, answers, strict=True)]
        # The same question is asked once: completions of a group often share their answer.
        undecided = sorted(
            {
                (item.answer, answer)
                for item, answer, match in zip(items, answers, matches, strict=True)
                if match is Match.UNDECIDED and answer is not None
            }
        )
        asked = dict(zip(undecided, self._checkers.run(undecided, on_wait), strict=True))
        verdicts = []
        for item, answer, match in zip(items, answers, matches, strict=True):
            status, detail = ScoreStatus.SCORED, ""
            if match is Match.UNDECIDED and answer is not None:
                result = asked[item.answer, answer]
                status, detail = result.status, result.detail
                if status is ScoreStatus.SCORED:
                    match = Match.EQUAL if result.value else Match.WRONG
            is_right = match not in (Match.WRONG, Match.UNDECIDED)
            verdicts.append(
                Verdict(
                    status=status,
                    match=match,
                    partially_correct=is_right or (answer is not None and check.is_near(item.answer, answer)),
                    format_ok=format_is_exact(item.completion, tags),
                    tag_counts=tag_counts(item.completion, tags),
                    extracted=answer.strip() if answer is not None else None,
                    detail=detail,
                )
            )
        return verdicts

    def _score_by_user(
        self,
        items: Sequence[RewardItem],
        verdicts: Sequence[Verdict],
        worker: WorkerPool,
        tolerate_none: bool,
        on_wait: Callable[[], None] | None,
    ) -> list[Score]:
        names, path = self.options.reward_functions or (), self.options.reward_functions_path or ""
        prompts, completions, answers, questions = (
            [getattr(item, field) for item in items] for field in ("prompt", "completion", "answer", "question")
        )
        columns = dict(zip(ARGUMENTS, (prompts, completions, answers, questions), strict=True))
        parts: list[dict[str, float]] = [{} for _ in items]
        statuses = [ScoreStatus.SCORED] * len(items)
        failures: dict[int, str] = {}  # the first cause of each item that counts as failed
        for name, result in zip(names, worker.run([(name, columns) for name in names], on_wait), strict=True):
            function = describe(name, path)
            if result.status is not ScoreStatus.SCORED:  # it raised, hung or died: none of the batch is scored
                cause = f"{function} failed: {result.detail}"
                if result.status is ScoreStatus.TIMED_OUT:
                    cause += "; the deadline of a call is math_verify_timeout"
                for index in range(len(items)):
                    statuses[index] = result.status
                    failures.setdefault(index, cause)
                continue
            if len(result.value) != len(items):
                raise RewardError(f"{function}: {len(result.value)} scores came back for {len(items)} completions.")
            for index, value in enumerate(result.value):
                if value is not None:
                    parts[index][name] = value
                    continue
                statuses[index] = ScoreStatus.FAILED
                if not tolerate_none:
                    failures.setdefault(index, f"{function} returned None")
        self._stop_on_too_many(list(failures.values()), len(items))
        return [
            _score(verdict, status, part if status is ScoreStatus.SCORED else dict.fromkeys(names, 0.0))
            for verdict, status, part in zip(verdicts, statuses, parts, strict=True)
        ]

    def _stop_on_too_many(self, causes: Sequence[str], num_items: int) -> None:
        if len(causes) > self.options.max_failed_scores_fraction * num_items:
            raise RewardError(
                f"{len(causes)} of {num_items} completions could not be scored, more than"
                f" max_failed_scores_fraction={self.options.max_failed_scores_fraction:g} allows."
                f" The first cause: {causes[0]}"
            )


def built_in_score(verdict: Verdict, options: RewardOptions) -> Score:
    """Weights applied to a verdict. All parts are 0 where the answer could not be checked."""
    if verdict.status is not ScoreStatus.SCORED:
        return _score(verdict, verdict.status, {"answer": 0.0, "exact_format": 0.0, "partial_format": 0.0})
    match verdict.match:
        case Match.EXACT | Match.EQUAL:
            answer = options.reward_exact_answer
        case Match.WHITE_SPACE:
            answer = options.reward_white_space_format_match
        case _:
            answer = options.penalty_incorrect_answer
    exact_format = options.reward_exact_format_match if verdict.format_ok else 0.0
    partial_format = sum(
        options.reward_partial_format_match if count == 1 else options.penalty_incorrect_format
        for count in verdict.tag_counts
    )
    if options.reward_gate_on_correctness and not verdict.correct:
        exact_format = partial_format = 0.0
    return _score(
        verdict,
        ScoreStatus.SCORED,
        {"answer": answer, "exact_format": exact_format, "partial_format": float(partial_format)},
    )


def _score(verdict: Verdict, status: ScoreStatus, parts: dict[str, float]) -> Score:
    return Score(
        total=sum(parts.values()),
        parts=parts,
        status=status,
        correct=verdict.correct,
        partially_correct=verdict.partially_correct,
        format_ok=verdict.format_ok,
        extracted=verdict.extracted,
    )
