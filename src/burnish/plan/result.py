"""What a plan says, as plain data: bytes by kind at every moment of a step, programs with what they exchange, times."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from burnish.plan.chips import Topology
from burnish.plan.estimate import Estimate
from burnish.plan.hlo import Collective
from burnish.plan.workload import Workload

Side = Literal["trainer", "sampler", "all devices"]

TIGHT = 0.1
"""Share of the memory that should be left over when temporaries come from the fast optimisation level."""


@dataclass(frozen=True)
class Memory:
    """A compiled program's bytes on one device, as the compiler accounts for them."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take the place of arguments
    temporaries: int
    code: int


@dataclass(frozen=True)
class Program:
    """One compiled function. Where it does not fit the device by itself, `memory` is None and `failure` says what the
    compiler said."""

    name: str
    side: Side
    per_step: float  # executions
    memory: Memory | None
    collectives: tuple[Collective, ...]
    seconds: float  # of compiling
    failure: str = ""

    def exchanged(self) -> dict[tuple[str, tuple[str, ...]], tuple[float, float]]:
        """(kind, axes) -> (bytes that one device sends, collectives), of one execution."""
        sums: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
        for c in self.collectives:
            sent, count = sums.get((c.kind, c.axes), (0.0, 0.0))
            sums[c.kind, c.axes] = (sent + c.sent * c.trips, count + c.trips)
        return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


@dataclass(frozen=True)
class Moment:
    """What lies in the memory of one device at one time of a step, by kind, in bytes."""

    name: str
    side: Side
    kinds: Mapping[str, int]
    failure: str = ""

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def largest(self) -> tuple[str, int]:
        return max(self.kinds.items(), key=lambda item: item[1])


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it runs."""

    model: str
    num_params: int
    topology: Topology
    meshes: Mapping[str, Mapping[str, int]]  # side -> axis -> devices
    workload: Workload  # as times are estimated
    longest: Workload  # as memory is planned
    options: Mapping[str, Any]
    exact: bool
    programs: tuple[Program, ...]
    moments: tuple[Moment, ...]
    estimate: Estimate | None
    assumptions: tuple[str, ...]
    advice: tuple[str, ...]  # what would make it faster
    chip_hours: float | None
    price: float | None
    seconds: float  # that planning took

    @property
    def memory(self) -> int | None:
        return self.topology.chip.memory

    def peak(self, side: Side) -> Moment:
        return max((m for m in self.moments if m.side == side), key=lambda m: (bool(m.failure), m.total))

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(dict.fromkeys(m.side for m in self.moments))

    @property
    def fits(self) -> bool | None:
        """Whether every moment fits the device; None where its memory is not known."""
        if any(m.failure for m in self.moments):
            return False
        if self.memory is None:
            return None
        return all(m.total <= self.memory for m in self.moments)

    @property
    def tight(self) -> bool:
        """Whether it fits by so little that the default optimisation level may not."""
        return bool(self.fits) and any(m.total > (1 - TIGHT) * (self.memory or 0) for m in self.moments)

    def verdict(self) -> str:
        """One sentence: fits or not, what the peak is and what dominates it."""
        parts = []
        for side in self.sides:
            peak = self.peak(side)
            kind, size = peak.largest
            of = f" of {size_words(self.memory)}" if self.memory else ""
            where = "each device" if side == "all devices" else f"each device of the {side}"
            if peak.failure:
                parts.append(f"{where}: {peak.name} alone: {peak.failure}")
            else:
                parts.append(
                    f"{where} needs at most {size_words(peak.total)}{of}, in {peak.name}, where {kind} are "
                    f"the largest part ({size_words(size)})"
                )
        word = {True: "Fits", False: "Does not fit", None: "Compiled"}[self.fits]
        if self.tight and not self.exact:
            parts.append(
                "that is tight: temporaries of the default optimisation level are larger, check with exact=true"
            )
        return f"{word}: {'; '.join(parts)}."


def size_words(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.2f} MiB"
