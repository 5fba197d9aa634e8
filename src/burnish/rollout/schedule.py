"""Which completion sits in which slot, and how large the decode batch is: plain Python, no arrays.

The batch is a grid of lanes × slots; a lane works for one prompt until that prompt's completions are done, so
a freed slot goes to another completion of the same prompt at once and to another prompt when the whole lane
is free. Sizes come from few buckets, because every new size is a compilation. On a mesh the lanes are dealt out to
shards of equal size: lanes and rows of a shard are next to each other, and none ever moves to another shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_WIDTH = 8
"""Slots of a lane at most: more share a prompt's keys, but also wait longer for the last of them."""

MIN_ROWS = 8
"""A shard is not cut below this: reading the weights dominates there, so fewer rows take as long."""


def bucket(size: int, smallest: int, halves: bool = False) -> int:
    """The least power of two ≥ size (with `halves` also 3·2ⁿ) that is at least `smallest`."""
    power = smallest
    while power < size:
        power *= 2
    middle = power // 4 * 3
    return middle if halves and middle >= max(size, smallest) else power


@dataclass(frozen=True)
class Slot:
    """A completion being sampled: the `completion`-th of prompt `group`."""

    group: int
    completion: int


@dataclass(frozen=True)
class Admission:
    """What is new in the grid: prompts to prefill into lanes, completions to start in rows."""

    lanes: tuple[tuple[int, int], ...]  # (lane, group)
    rows: tuple[tuple[int, Slot], ...]  # (row, slot)


@dataclass(frozen=True)
class Cut:
    """A smaller grid: where each of its lanes and rows was before, counted from the first of its shard."""

    lanes: tuple[int, ...]
    rows: tuple[int, ...]


class Schedule:
    """The grid's occupation. Changes only through `admit`, `release` and `cut`. `shards` splits the grid; it may have
    more than `max_slots` slots where that is too few for one lane a shard."""

    def __init__(self, group_sizes: Sequence[int], max_slots: int, shards: int = 1) -> None:
        largest, total = max(group_sizes), sum(group_sizes)
        if total <= max_slots:
            # Everything starts at once: a group fills one lane, or several of equal width.
            lanes_a_group = -(-largest // MAX_WIDTH)
            width = -(-largest // lanes_a_group)
        else:
            # Slots are refilled: a quarter of a group side by side keeps a lane's slots busy until the group is
            # nearly done. Simulated with lengths as on GSM8K, wider and narrower lanes are both slower.
            width = min(MAX_WIDTH, max(1, largest // 4))
        # Few completions on many shards: narrower lanes, so that every shard has one.
        self.width = max(1, min(width, max_slots // shards, total // shards))
        lanes_wanted = sum(-(-size // self.width) for size in group_sizes)
        lanes_a_shard = -(-bucket(lanes_wanted, 1, halves=True) // shards)
        self.shards = shards
        self.num_lanes = shards * min(lanes_a_shard, max(1, max_slots // self.width // shards))
        self.slots: list[Slot | None] = [None] * (self.num_lanes * self.width)
        self._sizes = list(group_sizes)
        self._started = [0] * len(group_sizes)
        self._waiting = total
        self._unseen = 0  # groups from here on have no lane yet; earlier ones that wait have one
        self._lanes: list[int | None] = [None] * self.num_lanes

    @property
    def active(self) -> list[int]:
        """Rows that hold a completion."""
        return [row for row, slot in enumerate(self.slots) if slot is not None]

    @property
    def waiting(self) -> int:
        """Completions not yet started."""
        return self._waiting

    def admit(self) -> Admission:
        """Start waiting completions in free slots: first those whose prompt is in the slot's lane already,
        then new prompts in free lanes, in order; a lane left over helps the prompt with most completions
        waiting."""
        lanes: list[tuple[int, int]] = []
        rows: list[tuple[int, Slot]] = []
        for lane in range(self.num_lanes):
            rows += self._fill(lane)
        per_shard = self.num_lanes // self.shards
        for lane in (shard * per_shard + i for i in range(per_shard) for shard in range(self.shards)):
            if self.waiting and not any(self._slots_of(lane)):
                group = self._next_group()
                self._lanes[lane] = group
                lanes.append((lane, group))
                rows += self._fill(lane)
        return Admission(tuple(lanes), tuple(rows))

    def release(self, row: int) -> None:
        self.slots[row] = None

    def cut(self) -> Cut | None:
        """Move the last completions to a smaller grid, one slot a lane, when nothing waits and it is
        smaller."""
        active = self.active
        if self.waiting or not active:
            return None
        before = len(self.slots) // self.shards
        kept = [[row for row in active if row // before == shard] for shard in range(self.shards)]
        after = bucket(max(len(rows) for rows in kept), MIN_ROWS)
        if after > before * 3 // 4:
            return None
        # A free row is a copy of any other row of its shard.
        rows = [
            row
            for shard, of_shard in enumerate(kept)
            for row in of_shard + [*of_shard, shard * before][:1] * (after - len(of_shard))
        ]
        self.slots = [
            slot
            for of_shard in kept
            for slot in [*(self.slots[row] for row in of_shard), *[None] * (after - len(of_shard))]
        ]
        self._lanes = [self._lanes[row // self.width] for row in rows]
        local = tuple(row % before for row in rows)
        cut = Cut(tuple(row // self.width for row in local), local)
        self.num_lanes, self.width = len(rows), 1
        return cut

    def _slots_of(self, lane: int) -> list[Slot | None]:
        return self.slots[lane * self.width : (lane + 1) * self.width]

    def _next_group(self) -> int:
        if self._unseen < len(self._sizes):
            self._unseen += 1
            return self._unseen - 1
        return max(range(len(self._sizes)), key=lambda group: self._sizes[group] - self._started[group])

    def _fill(self, lane: int) -> list[tuple[int, Slot]]:
        group = self._lanes[lane]
        filled: list[tuple[int, Slot]] = []
        if group is None:
            return filled
        for row in range(lane * self.width, (lane + 1) * self.width):
            if self.slots[row] is None and self._started[group] < self._sizes[group]:
                slot = Slot(group, self._started[group])
                self._started[group] += 1
                self._waiting -= 1
                self.slots[row] = slot
                filled.append((row, slot))
        return filled
