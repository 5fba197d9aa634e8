"""A plan for people and for programs: tables in the terminal, JSON, and one HTML page with nothing outside it."""

import dataclasses
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burnish import __version__
from burnish.observe.terminal import PLAIN_WIDTH
from burnish.plan.result import Plan, size_words
from burnish.plan.search import Search, words

_ACCOUNT = "Memory and exchange are by the compiler's account, times are estimates; no such device confirmed them."


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading with a table; the first column is text, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(plan: Plan) -> list[Section]:
    """All tables of a plan, the same for terminal and page."""
    tables = [_memory(plan), _exchange(plan)]
    if plan.estimate:
        tables.append(_times(plan))
    return tables


def _memory(plan: Plan) -> Section:
    """Kinds of bytes by what goes on."""
    kinds = dict.fromkeys(kind for m in plan.moments for kind, size in m.kinds.items() if size)
    several = len(plan.sides) > 1
    small = max(m.total for m in plan.moments) < 0.1 * 2**30
    unit, scale = ("MiB", 2**20) if small else ("GiB", 2**30)

    def row(name: str, cells: Iterable[int]) -> tuple[str, ...]:
        return (name, *(f"{size / scale:.2f}" if size else "" for size in cells))

    rows = [row(kind, (m.kinds.get(kind, 0) for m in plan.moments)) for kind in kinds]
    rows.append(row("together", (m.total for m in plan.moments)))
    if any(m.failure for m in plan.moments):
        rows.append(("too large to compile", *("yes" if m.failure else "" for m in plan.moments)))
    of = f", of {size_words(plan.memory)} usable" if plan.memory else ""
    names = (f"{m.side}: {m.name}" if several else m.name for m in plan.moments)
    return Section(f"Memory of one device, {unit}{of}", ("", *names), tuple(rows))


def _exchange(plan: Plan) -> Section:
    """Collectives that matter: with a thousandth of a step's bytes, or of its collectives."""
    found = [
        (f"{p.name}: {kind} over {' × '.join(axes) or 'other groups'}", count, sent, p.per_step)
        for p in plan.programs
        for (kind, axes), (sent, count) in p.exchanged().items()
    ]
    every_byte = sum(sent * times for _, _, sent, times in found)
    every_one = sum(count * times for _, count, _, times in found)
    rows = [
        (name, f"{count:,.0f}", _size(sent), f"{times:,.0f}", _size(sent * times))
        for name, count, sent, times in found
        if sent * times >= every_byte / 1000 or count * times >= every_one / 1000
    ]
    columns = ("program, collective and axis", "collectives", "sent per device", "runs per step", "sent per step")
    return Section("Exchange between devices", columns, tuple(rows))


def _times(plan: Plan) -> Section:
    estimate = plan.estimate
    assert estimate is not None
    rows = [
        (
            p.name,
            _seconds(p.seconds),
            _seconds(p.at_best),
            _figure(p.model_flops / 1e12),
            _size(p.read),
            _size(p.sent),
            p.bound_by,
        )
        for p in estimate.phases
    ]
    total = sum(p.model_flops for p in estimate.phases) / 1e12
    rows.append(("step", _seconds(estimate.step), _seconds(estimate.step_at_best), _figure(total), "", "", ""))
    columns = ("phase", "estimate", "at best", "model TFLOP", "read per device", "sent per device", "mostly")
    return Section("Time of a step, estimated", columns, tuple(rows))


def _size(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} B"


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{_figure(seconds / scale)} {unit}"
    return f"{_figure(seconds * 1e6)} µs"


def _figure(value: float) -> str:
    """With about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"


def opening(plan: Plan) -> list[str]:
    """What is planned, a sentence a line."""
    w = plan.workload
    meshes = [
        f"{side}: {' × '.join(f'{axis} {n}' for axis, n in mesh.items() if n > 1) or 'one device'}"
        for side, mesh in plan.meshes.items()
    ]
    passes = w.micro_batches * w.iterations
    return [
        f"{plan.model}, {_parameters(plan.num_params)} parameters, on {plan.topology.describe()}",
        f"Mesh of the {'; '.join(meshes)}",
        f"A step: {w.prompts} × {w.completions} completions of {w.completion_tokens} tokens after prompts of "
        f"{w.prompt_tokens}; {w.slots} at a time; {passes} forward and backward pass{'' if passes == 1 else 'es'} over "
        f"{w.rows} × {w.row_length} tokens ({w.row_tokens / (w.micro_batches * w.rows * w.row_length):.0%} filled)",
    ]


def closing(plan: Plan) -> list[str]:
    """What it comes to, a sentence a line."""
    lines = []
    if plan.estimate:
        e = plan.estimate
        lines.append(
            f"Estimated: {_seconds(e.step)} per step, {e.tokens_per_second:,.0f} sampled tokens/s, "
            f"{e.share_of_peak:.1%} of peak; {plan.workload.steps} steps and the evaluations take {duration(e.run)}"
        )
        hours = plan.chip_hours or 0.0
        lines.append(
            f"That is {f'{hours:.2f}' if hours >= 0.01 else 'less than 0.01'} chip-hours"
            + ("" if plan.price is None else f", which cost {plan.price:,.2f}")
            + f" (at best {duration(e.step_at_best * plan.workload.steps)} for the steps)"
        )
    else:
        lines.append("No times are estimated: the rates of these devices are not known")
    lines.append(plan.verdict())
    lines += [f"{advice}." for advice in plan.advice]
    lines.append(_ACCOUNT)
    return lines


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else _seconds(seconds)
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """The plan as tables in the terminal."""
    console = console or _console()
    for line in opening(plan):
        _print(console, line)
    for section in sections(plan):
        console.print()
        console.print(_laid_out(section, console.width), crop=False)
    if plan.assumptions:
        _print(console, "\nAssumed:", "bold")
        for line in plan.assumptions:
            _print(console, f"- {line}", "dim")
    console.print()
    for line in closing(plan):
        _print(console, line, "bold" if line == plan.verdict() else "")


def _console() -> Console:
    """The terminal; where there is none, tables get a log's width."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _print(console: Console, line: str, style: str = "") -> None:
    """A sentence; one that goes to a file or a program stays one line."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def _laid_out(section: Section, width: int) -> Table:
    """Lines are broken between words, never in a figure; where that takes more than `width`, the table is wider."""
    table = Table(title=section.title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    columns = [(column, *(row[i] for row in section.rows)) for i, column in enumerate(section.columns)]
    texts = [i == 0 or column == "mostly" for i, column in enumerate(section.columns)]
    whole = [max(map(len, cells)) for cells in columns]
    least = [
        max(len(word) for cell in cells for word in (cell.split() if text or cell == cells[0] else [cell]) or [""])
        for text, cells in zip(texts, columns, strict=True)
    ]
    if sum(whole) + len(whole) > width:
        whole = [max(least[0], width - sum(least[1:]) - len(least)), *least[1:]]
    for column, text, size in zip(section.columns, texts, whole, strict=True):
        table.add_column(column, justify="left" if text else "right", header_style="dim", overflow="fold", width=size)
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-able values; bytes are those of one device."""
    return {
        "burnish": __version__,
        "model": plan.model,
        "parameters": plan.num_params,
        "topology": {
            "name": plan.topology.name,
            "chips": plan.topology.num_chips,
            "devices": plan.topology.num_devices,
            "slices": plan.topology.num_slices,
            "memory_bytes": plan.memory,
        },
        "meshes": {side: dict(mesh) for side, mesh in plan.meshes.items()},
        "fits": plan.fits,
        "verdict": plan.verdict(),
        "account": _ACCOUNT,
        "exact": plan.exact,
        "workload": dataclasses.asdict(plan.workload),
        "memory": [
            {"while": m.name, "side": m.side, "bytes": dict(m.kinds), "total": m.total, "failure": m.failure}
            for m in plan.moments
        ],
        "programs": [
            {
                "name": p.name,
                "side": p.side,
                "runs_per_step": p.per_step,
                "memory": None if p.memory is None else dataclasses.asdict(p.memory),
                "failure": p.failure,
                "compile_seconds": round(p.seconds, 2),
                "collectives": [
                    {"kind": kind, "axes": list(axes), "sent_bytes": round(sent), "count": count}
                    for (kind, axes), (sent, count) in p.exchanged().items()
                ],
            }
            for p in plan.programs
        ],
        "estimate": None if plan.estimate is None else dataclasses.asdict(plan.estimate)
        | {"tokens_per_second": plan.estimate.tokens_per_second},
        "assumptions": list(plan.assumptions),
        "advice": list(plan.advice),
        "chip_hours": plan.chip_hours,
        "price": plan.price,
        "options": dict(plan.options),
        "planning_seconds": round(plan.seconds, 2),
    }  # fmt: skip


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430; }
table { border-collapse: collapse; margin: .5rem 0 2rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #dde2ea; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { color: #5b6575; font-weight: 600; }
.bar { display: flex; height: 1.4rem; width: 100%; background: #eef1f5; margin: .2rem 0 .8rem; position: relative; }
.bar span { height: 100%; }
.limit { position: absolute; top: -3px; bottom: -3px; border-left: 2px solid #b00020; }
.verdict { font-weight: 600; }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""
_COLOURS = ("#3b6ea5", "#e08e45", "#6a9f58", "#a55d8f", "#c9a227", "#5fa8a0", "#8c6d5a", "#97a0af", "#444f63")


def as_html(plan: Plan) -> str:
    """The plan as one page: sentences, memory as bars, and the tables."""
    parts = [f"<h1>{html.escape(plan.model)} on {html.escape(plan.topology.describe())}</h1>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in opening(plan)]
    parts += [f'<p class="verdict">{html.escape(line)}</p>' for line in closing(plan)]
    parts.append(_bars(plan))
    for section in sections(plan):
        parts.append(f"<h2>{html.escape(section.title)}</h2>{_table(section.columns, section.rows)}")
    if plan.assumptions:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in plan.assumptions)
        parts.append(f"<h2>Assumed</h2><ul>{lines}</ul>")
    options = tuple((k, str(v)) for k, v in plan.options.items())
    parts.append(f"<h2>Options that were given</h2>{_table(('option', 'value'), options)}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>burnish plan</title><style>{_STYLE}</style>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _bars(plan: Plan) -> str:
    """Each moment's memory as a bar whose parts are kinds, with the device's limit."""
    kinds = list(dict.fromkeys(k for m in plan.moments for k in m.kinds if m.kinds[k]))
    colour = {kind: _COLOURS[i % len(_COLOURS)] for i, kind in enumerate(kinds)}
    widest = max([m.total for m in plan.moments] + [plan.memory or 0, 1])
    key = "".join(f'<span style="background:{colour[k]}"></span>{html.escape(k)}' for k in kinds)
    lines = [f'<p class="key">{key}</p>']
    for m in plan.moments:
        spans = "".join(
            f'<span style="width:{100 * size / widest:.2f}%;background:{colour[kind]}" title="{html.escape(kind)} '
            f'{size_words(size)}"></span>'
            for kind, size in m.kinds.items()
            if size
        )
        limit = f'<i class="limit" style="left:{100 * plan.memory / widest:.2f}%"></i>' if plan.memory else ""
        label = html.escape(f"{m.side}: {m.name}: {m.failure or size_words(m.total)}")
        lines.append(f'<div>{label}<div class="bar">{spans}{limit}</div></div>')
    return "".join(lines)


def json_text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def print_search(search: Search, console: Console | None = None) -> None:
    """What the search for settings that fit has come to."""
    console = console or _console()
    console.print()
    for line in _search_lines(search):
        _print(console, line)
    if search.found is not None:
        for line in closing(search.found):
            _print(console, line)


def _search_lines(search: Search) -> list[str]:
    lines = [f"Search: {search.considered} settings reckoned, {len(search.tried)} compiled"]
    lines += [f"- {words(t.changes)}: {'fits' if t.fits else 'does not fit'}" for t in search.tried]
    if search.found is not None:
        lines.append(f"Nearest settings that fit: {words(search.changes)}")
    elif search.out_of_time:
        lines.append("None found in the time given: search_seconds gives more")
    else:
        lines.append("None found: these devices are too few or too small for the model")
    return lines


def search_json(search: Search) -> dict[str, Any]:
    """The same as JSON-able values."""
    return {
        "considered": search.considered,
        "tried": [dataclasses.asdict(t) for t in search.tried],
        "changes": search.changes,
        "found": None if search.found is None else as_json(search.found),
        "out_of_time": search.out_of_time,
    }
