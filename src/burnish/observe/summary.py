"""How a run ended: summary.json for programs, a short table for the person at the terminal."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath
from rich.console import Console
from rich.table import Table

from burnish.observe.files import write_whole


@dataclass(frozen=True)
class BeforeAfter:
    """One figure of the evaluation before and after training; `percent` says how it is shown."""

    name: str
    before: float
    after: float
    percent: bool = True


def write_summary(path: epath.PathLike, summary: Mapping[str, Any]) -> None:
    """Writes the summary as JSON, whole or not at all; NaN and infinities become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
    write_whole(path, json.dumps(finite, indent=2, allow_nan=False) + "\n")


def print_final(
    figures: list[BeforeAfter],
    seconds: float,
    places: Mapping[str, epath.PathLike],
    console: Console | None = None,
) -> None:
    """Prints before, after and change of each figure, the time, and where things lie ({"model": path, ...}).

    Plain columns where the output is no terminal.
    """
    console = console or Console()
    rows = [(f.name, *(_shown(x, f.percent) for x in (f.before, f.after)), _change(f)) for f in figures]
    if rows and console.is_terminal:
        table = Table(title="Result", title_justify="left", title_style="bold")
        table.add_column("")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for name, before, after, change in rows:
            color = "green" if change.startswith("+") else "red" if change.startswith("-") else ""
            table.add_row(name, before, after, f"[{color}]{change}[/{color}]" if color else change)
        console.print(table)
    elif rows:
        width = max(len(name) for name, *_ in rows)
        _plain(console, f"{'':{width}}  {'before':>8}  {'after':>8}  {'change':>8}")
        for name, before, after, change in rows:
            _plain(console, f"{name:{width}}  {before:>8}  {after:>8}  {change:>8}")
    lines = {"time": duration(seconds), **{name: str(path) for name, path in places.items()}}
    width = max(map(len, lines))
    for name, value in lines.items():
        _plain(console, f"{name:{width}}  {value}")


def duration(seconds: float) -> str:
    """Seconds in words: 2 h 05 min, 3 min 20 s, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _shown(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.3f}"


def _change(figure: BeforeAfter) -> str:
    change = figure.after - figure.before
    return f"{100 * change:+.1f}" if figure.percent else f"{change:+.3f}"


def _plain(console: Console, text: str) -> None:
    """Paths are printed as they are: no markup, no wrapping, so that they can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
