"""What a run says while it goes: one line per step, under a header that names the columns.

In a terminal a bar below the lines shows how far sampling has come and when the run will end; without one
(or with NO_COLOR or CI set) there are plain lines only. A terminal that is too narrow loses the less
important columns.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from burnish.observe.summary import duration

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """One column: `priority` 0 is never dropped, higher numbers go first when the terminal is narrow."""

    title: str
    width: int
    priority: int
    show: Callable[[Metrics], str | None]  # None where the step has no such figure


def _number(name: str, form: str, scale: float = 1.0) -> Callable[[Metrics], str | None]:
    return lambda metrics: format(scale * metrics[name], form) if name in metrics else None


COLUMNS = (
    Column("reward", 7, 0, _number("reward/mean", "+.3f")),
    Column("acc%", 6, 0, _number("accuracy", ".1f", 100)),
    Column("fmt%", 6, 1, _number("format_accuracy", ".1f", 100)),
    Column("len", 6, 1, _number("completion_length/mean", ".1f")),
    Column("cut%", 5, 4, _number("truncated_fraction", ".0f", 100)),
    Column("entropy", 7, 2, _number("entropy", ".3f")),
    Column("kl", 7, 3, _number("kl", ".4f")),
    Column("|Δlogp|", 7, 2, _number("logprob_difference/mean", ".0e")),
    Column("lr", 7, 4, _number("learning_rate", ".1e")),
    Column("sample", 7, 1, _number("seconds/sampling", ".2f")),
    Column("score", 6, 3, _number("seconds/reward", ".2f")),
    Column("update", 7, 1, _number("seconds/update", ".2f")),
    Column("tok/s", 7, 1, _number("tokens_per_second/sampling", ".0f")),
)
LEGEND = (
    "reward: mean; acc/fmt: right answer, right format; len: tokens a completion; cut: stopped by the length limit; "
    "entropy, kl: nats a token; |Δlogp|: sampler against trainer; sample, score, update: seconds; tok/s: sampled"
)


class StepPrinter:
    """Prints the lines of a run of `num_steps` steps.

    Use as a context manager: the bar must be taken down before anything else is printed. `start_step` is
    the last step that is already done (0 for a new run); the ETA counts the steps done here only.
    """

    def __init__(self, num_steps: int, start_step: int = 0, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._start_step = start_step
        self._console = console or Console()
        self._width = self._console.width if self._console.is_terminal else None
        self._progress: Progress | None = None
        if self._console.is_terminal and not os.environ.get("NO_COLOR") and not os.environ.get("CI"):
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[detail]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=1, detail="")
        self._started = 0.0
        self._eta = ""
        self._columns: tuple[Column, ...] | None = None

    def __enter__(self) -> "StepPrinter":
        self._started = time.monotonic()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def note(self, text: str) -> None:
        """Prints a message above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, step: int, name: str) -> None:
        """Shows what step `step` is at ("update", "checkpoint", ...): in the bar only."""
        self._show(step, name, 0, None, "")

    def sampling(self, step: int, done: int, total: int, tokens: int) -> None:
        """Shows how many of the step's completions are finished: in the bar only."""
        self._show(step, "sampling", done, total, f"{done}/{total} completions, {tokens} tokens")

    def step(self, step: int, metrics: Metrics) -> None:
        """Prints the line of a finished step; the first one decides the columns and prints the header.

        `metrics` are those of burnish.observe.metrics; columns without a figure in the first step are left
        out.
        """
        if self._columns is None:
            self._columns = _fitting([c for c in COLUMNS if c.show(metrics) is not None], self._room())
            titles = "".join(f" {c.title:>{c.width}}" for c in self._columns)
            self.note(LEGEND)
            self.note(f"{'step':>{self._step_width()}}{titles} {'eta':>11}")
        done_here = step - self._start_step
        elapsed = time.monotonic() - self._started
        left = self._num_steps - step
        self._eta = duration(elapsed / done_here * left) if left > 0 and done_here > 0 else "done"
        values = "".join(f" {c.show(metrics) or '-':>{c.width}}" for c in self._columns)
        self.note(f"{f'{step}/{self._num_steps}':>{self._step_width()}}{values} {self._eta:>11}")

    def _step_width(self) -> int:
        return 2 * len(str(self._num_steps)) + 1

    def _room(self) -> int | None:
        """Characters for the columns between step and ETA; None for as many as are wanted."""
        return None if self._width is None else self._width - self._step_width() - 12

    def _show(self, step: int, name: str, done: int, total: int | None, detail: str) -> None:
        if self._progress is not None:
            eta = f"   run done in {self._eta}" if self._eta else ""
            self._progress.update(
                self._task,
                description=f"step {step}/{self._num_steps} {name}",
                completed=done,
                total=total,
                detail=detail + eta,
            )


def _fitting(columns: list[Column], room: int | None) -> tuple[Column, ...]:
    """The columns that fit, the least important dropped first and the rightmost among equals."""
    kept = list(columns)
    while room is not None and sum(c.width + 1 for c in kept) > room:
        least = max(kept, key=lambda c: (c.priority, columns.index(c)))
        if least.priority == 0:
            break
        kept.remove(least)
    return tuple(kept)
