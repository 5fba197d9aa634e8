"""What a run says while it goes: one line per step, under a header that names the columns.

In a terminal a bar below the lines shows how far sampling has come and when the run will end; without one
(or with NO_COLOR or CI set) there are plain lines only. A terminal that is too narrow loses the less
important columns.
"""

import os
import textwrap
from collections import deque
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
    meaning: str


def _number(name: str, form: str, scale: float = 1.0) -> Callable[[Metrics], str | None]:
    return lambda metrics: format(scale * metrics[name], form) if name in metrics else None


def _loss(metrics: Metrics) -> str | None:
    """The loss of supervised training; that of reinforcement learning is near 0 and says nothing."""
    return None if "reward/mean" in metrics else _number("loss", ".4f")(metrics)


COLUMNS = (
    Column("loss", 7, 0, _loss, "cross-entropy, nats a token"),
    Column("reward", 7, 0, _number("reward/mean", "+.3f"), "mean reward"),
    Column("acc%", 6, 0, _number("accuracy", ".1f", 100), "right answers"),
    Column("fmt%", 6, 1, _number("format_accuracy", ".1f", 100), "right format"),
    Column("len", 6, 1, _number("completion_length/mean", ".1f"), "tokens a completion"),
    Column("cut%", 5, 4, _number("truncated_fraction", ".0f", 100), "cut by the length limit"),
    Column("entropy", 7, 2, _number("entropy", ".3f"), "nats a token"),
    Column("kl", 7, 3, _number("kl", ".4f"), "nats a token from the reference"),
    Column("|Δlogp|", 7, 2, _number("logprob_difference/mean", ".0e"), "sampler against trainer"),
    Column("lr", 7, 4, _number("learning_rate", ".1e"), "learning rate"),
    Column("sample", 7, 1, _number("seconds/sampling", ".2f"), "seconds"),
    Column("score", 6, 3, _number("seconds/reward", ".2f"), "seconds"),
    Column("update", 7, 1, _number("seconds/update", ".2f"), "seconds"),
    Column("tok/s", 7, 1, _number("tokens_per_second/sampling", ".0f"), "sampled tokens a second"),
    Column("train/s", 7, 3, _number("tokens_per_second/update", ".0f"), "trained tokens a second"),
)
ETA_STEPS = 8
PLAIN_WIDTH = 110  # the legend is wrapped here where there is no terminal


class StepPrinter:
    """Prints the lines of a run of `num_steps` steps.

    Use as a context manager: the bar must be taken down before anything else is printed. The ETA is that of
    the steps to come at the mean time of the last few, evaluations not included.
    """

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
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
        self._recent: deque[float] = deque(maxlen=ETA_STEPS)  # seconds of the last steps
        self._eta = ""
        self._columns: tuple[Column, ...] | None = None

    def __enter__(self) -> "StepPrinter":
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

    def phase(self, what: str) -> None:
        """Shows what the run is at ("step 3: update"), in the bar only."""
        self._show(what, 0, None, "")

    def sampling(self, what: str, done: int, total: int, tokens: int) -> None:
        """Shows how many completions of `what` ("step 3", "evaluation before") are finished, in the bar
        only.
        """
        self._show(what, done, total, f"{done}/{total} completions, {tokens} tokens")

    def step(self, step: int, metrics: Metrics) -> None:
        """Prints the line of a finished step; the first one decides the columns and prints the header.

        `metrics` are those of burnish.observe.metrics; columns without a figure in the first step are left
        out.
        """
        if self._columns is None:
            self._columns = _fitting([c for c in COLUMNS if c.show(metrics) is not None], self._room())
            titles = "".join(f" {c.title:>{c.width}}" for c in self._columns)
            legend = "; ".join(f"{c.title}: {c.meaning}" for c in self._columns)
            for line in textwrap.wrap(legend, self._width or PLAIN_WIDTH):
                self.note(line)
            self.note(f"{'step':>{self._step_width()}}{titles} {'eta':>12}")
        if "seconds/step" in metrics:
            self._recent.append(metrics["seconds/step"])
        if self._recent:
            self._eta = duration((self._num_steps - step) * sum(self._recent) / len(self._recent))
        values = "".join(f" {c.show(metrics) or '-':>{c.width}}" for c in self._columns)
        self.note(f"{f'{step}/{self._num_steps}':>{self._step_width()}}{values} {self._eta or '-':>12}")

    def _step_width(self) -> int:
        return max(len("step"), 2 * len(str(self._num_steps)) + 1)

    def _room(self) -> int | None:
        """Characters for the columns between step and ETA; None for as many as are wanted."""
        return None if self._width is None else self._width - self._step_width() - 13

    def _show(self, what: str, done: int, total: int | None, detail: str) -> None:
        if self._progress is not None:
            eta = f"   run done in {self._eta}" if self._eta else ""
            self._progress.update(self._task, description=what, completed=done, total=total, detail=detail + eta)


def _fitting(columns: list[Column], room: int | None) -> tuple[Column, ...]:
    """The columns that fit, the least important dropped first and the rightmost among equals."""
    kept = list(columns)
    while room is not None and sum(c.width + 1 for c in kept) > room:
        least = max(kept, key=lambda c: (c.priority, columns.index(c)))
        if least.priority == 0:
            break
        kept.remove(least)
    return tuple(kept)
