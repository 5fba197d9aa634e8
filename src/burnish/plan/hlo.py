"""What a compiled program sends between devices, read from its text: every collective with bytes, axis and count.

The compiler's own cost analysis counts the body of a loop once; here a collective counts as often as the loops around
it turn. On TPU a reduce-scatter has no instruction of that name: it is an all-reduce inside a fusion that keeps one
part. On GPU every collective is a pair that starts and ends it, often of several arrays together. Which mesh axis a
collective runs along follows from its groups of devices. Nothing here imports JAX.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=\s)([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)|\b(?:branch_computations|called_computations)="
    r"\{([^}]*)\}"
)
_WHILE = re.compile(r"\bcondition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Collective:
    """One collective instruction; bytes are those of one device and one execution."""

    kind: str
    size: int  # bytes of the whole array: gathered, reduced or moved
    axes: tuple[str, ...]  # mesh axes along which devices exchange; () where the groups are of no axes of the mesh
    group: int  # devices that exchange with one another
    trips: float  # executions in one run of the program
    source: str  # the operation of the model that it belongs to, as JAX named it

    @property
    def sent(self) -> float:
        """Bytes that one device sends in one execution, by the ring algorithms (Patarasuk & Yuan 2009)."""
        share = (self.group - 1) / self.group if self.group else 0.0
        if self.kind == "collective-permute":
            return float(self.size)
        return self.size * share * (2 if self.kind == "all-reduce" else 1)


@dataclass
class _Instruction:
    name: str
    shape: str
    opcode: str
    line: str
    root: bool


@dataclass
class _Module:
    computations: dict[str, list[_Instruction]] = field(default_factory=dict)
    entry: str = ""


def _parse(text: str) -> _Module:
    module = _Module()
    current: list[_Instruction] = []
    for line in text.splitlines():
        # A computation goes on to the next one's first line: the text of a kernel may have lines like its last.
        if header := _COMPUTATION.match(line):
            current = module.computations[header[2]] = []
            if header[1]:
                module.entry = header[2]
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        rest = f" {found[3]}"
        if opcode := _OPCODE.search(rest):
            current.append(_Instruction(found[2], rest[: opcode.start()], opcode[1], line, bool(found[1])))
    return module


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def shape_bytes(shape: str) -> list[int]:
    """Bytes of each array in an HLO shape, "(f32[2,3]{1,0}, s32[])" -> [24, 4]."""
    return [
        math.prod(int(n) for n in dims.split(",") if n) * _bits(dtype) // 8 for dtype, dims in _SHAPE.findall(shape)
    ]


def _elements(shape: str) -> list[str]:
    """The elements of a tuple's shape, "((f32[2], s32[]), f32[4]{0})" -> ["(f32[2], s32[])", "f32[4]{0}"]; an array's
    shape is its only one."""
    shape = shape.strip()
    if not shape.startswith("("):
        return [shape]
    elements, depth, start = [], 0, 1
    for place, char in enumerate(shape):
        if (char in ")]}" and (depth := depth - 1) == 0) or (char == "," and depth == 1):
            elements.append(shape[start:place].strip())
            start = place + 1
        elif char in "([{":
            depth += 1
    return elements


def _trip_count(module: _Module, instruction: _Instruction, condition: str, body: str) -> int | None:
    """How often a loop turns: what the compiler notes, or else what follows from the constant that a counter from 0 is
    compared with and the one that is added to it."""
    if known := _KNOWN_TRIPS.search(instruction.line):
        return int(known[1])
    tested = {i.name: i for i in module.computations.get(condition, [])}
    for i in tested.values():
        if not (i.root and i.opcode == "compare" and "direction=LT" in i.line):
            continue
        counter, limit = (tested.get(name) for name in _operands(i))
        end = None if limit is None else _constant(limit)
        if end is None:
            return None
        place = re.search(r"index=(\d+)", counter.line) if counter else None
        step = _step(module.computations.get(body, []), int(place[1])) if place else 1
        return -(-end // step)
    return None


def _step(body: list[_Instruction], place: int) -> int:
    """What a loop's body adds to its counter, which is at `place` of the tuple that it carries; 1 where that is not an
    addition of a constant."""
    by_name = {i.name: i for i in body}
    result = next((i for i in body if i.root and i.opcode == "tuple"), None)
    following = by_name.get(_operands(result)[place]) if result else None
    if following is None or following.opcode != "add":
        return 1
    added = [value for name in _operands(following) if name in by_name and (value := _constant(by_name[name]))]
    return added[0] if added else 1


def _operands(i: _Instruction) -> list[str]:
    """Names of what an instruction is applied to."""
    return re.findall(r"%([\w.\-]+)", i.line.split(f" {i.opcode}(", 1)[1].split(")", 1)[0])


def _constant(i: _Instruction) -> int | None:
    value = re.search(r" constant\((\d+)\)", i.line)
    return int(value[1]) if value else None


def collectives(
    text: str, mesh: Mapping[str, int], unknown_trips: Callable[[int], float] = lambda depth: 1.0
) -> list[Collective]:
    """All collectives of an optimised HLO module that runs on a mesh of these axis sizes.

    unknown_trips(depth): how often a loop turns whose count is data, at the given depth of loops (0: outermost).
    """
    module = _parse(text)
    found: list[Collective] = []

    def walk(name: str, trips: float, depth: int) -> None:
        for i in module.computations.get(name, []):
            kind = i.opcode.removesuffix("-start")
            if kind in _KINDS:
                made = _collective(kind, i, name, mesh, trips)
                if made.group != 1:
                    found.append(made)
            elif i.opcode == "while" and (loop := _WHILE.search(i.line)):
                count = _trip_count(module, i, loop[1], loop[2])
                turns = unknown_trips(depth) if count is None else count
                walk(loop[2], trips * turns, depth + 1)
            elif i.opcode in ("fusion", "call", "async-start", "conditional"):
                for called in _called(i.line):
                    walk(called, trips, depth)

    walk(module.entry, 1.0, 0)
    return found


def _called(line: str) -> Iterator[str]:
    for single, several in _CALLED.findall(line):
        yield from [single] if single else (name.strip().lstrip("%") for name in several.split(","))


def _collective(kind: str, i: _Instruction, computation: str, mesh: Mapping[str, int], trips: float) -> Collective:
    shape, started = i.shape, i.opcode.endswith("-start")
    if started and kind != "all-reduce" and len(parts := _elements(shape)) > 1:
        # What starts one has operands, results and sometimes counters; one may exchange several arrays at a time.
        shape = parts[0] if kind == "reduce-scatter" else parts[1]
    size = sum(shape_bytes(shape))
    if kind == "collective-permute":
        axes = permute_axes(i.line, tuple(mesh.items()))
        group = 2
    else:
        groups = replica_groups(i.line, math.prod(mesh.values()))
        axes = axes_of(groups, tuple(mesh.items()))
        group = len(groups[0]) if groups else 0
    if kind == "reduce-scatter" and not started:
        size *= max(group, 1)
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind = "reduce-scatter"
    name = re.search(r'op_name="([^"]*)"', i.line)
    return Collective(kind, size, axes, group, trips, name[1] if name else "")


Groups = tuple[tuple[int, ...], ...]


def replica_groups(line: str, num_devices: int) -> Groups:
    """The groups of an instruction, in any of the three ways to write them; () where there are none to be read."""
    if found := re.search(r"replica_groups=\{(\{[\d, {}]*\})\}", line):
        return tuple(tuple(int(n) for n in g.split(",")) for g in re.findall(r"\{([\d, ]+)\}", found[1]))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        flat, width = _iota(_numbers(found[2]), found[3] and _numbers(found[3])), _numbers(found[1])[-1]
        return tuple(flat[i : i + width] for i in range(0, len(flat), width))
    if found := _MESH_GROUPS.search(line):
        named, source, order, along = found.groups()
        sizes = tuple((name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", named))
        groups = _groups_along(*_split_axes(sizes, along))
        if source is None:
            return groups
        flat = _iota(_numbers(source), order and _numbers(order))
        return tuple(tuple(flat[place] for place in group) for group in groups)
    if "replica_groups={}" in line:
        return (tuple(range(num_devices)),)
    return ()


_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _split_axes(sizes: tuple[tuple[str, int], ...], along: str) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """A mesh and names of its axes, 'a' or a part of one, 'a':(before)size: the mesh with such axes cut in three."""
    wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along)
    parts = {name: (int(before), int(size)) for name, before, size in wanted if size}
    cut: list[tuple[str, int]] = []
    for name, whole in sizes:
        if name in parts:
            before, size = parts[name]
            cut += [(f"{name}<", before), (name, size), (f"{name}>", whole // before // size)]
        else:
            cut.append((name, whole))
    return tuple(cut), tuple(name for name, _, _ in wanted)


@cache
def _iota(source: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The numbers 0, 1, … laid out in the shape `source`, its axes reordered, one after the other."""
    strides = [math.prod(source[a + 1 :]) for a in range(len(source))]
    order = order or tuple(range(len(source)))
    return tuple(
        sum(i * strides[a] for i, a in zip(index, order, strict=True))
        for index in itertools.product(*(range(source[a]) for a in order))
    )


@cache
def _groups_along(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> Groups:
    """The devices of a mesh, numbered in row-major order, that differ only along `axes`."""
    rest: dict[tuple[int, ...], list[int]] = {}
    for number, index in enumerate(itertools.product(*(range(size) for _, size in mesh))):
        key = tuple(i for i, (name, _) in zip(index, mesh, strict=True) if name not in axes)
        rest.setdefault(key, []).append(number)
    return tuple(map(tuple, rest.values()))


@cache
def axes_of(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The axes along which these groups lie; () where no set of axes makes them."""
    asked = {frozenset(g) for g in groups}
    used = [name for name, size in mesh if size > 1]
    for count in range(1, len(used) + 1):
        for axes in itertools.combinations(used, count):
            if {frozenset(g) for g in _groups_along(mesh, axes)} == asked:
                return axes
    return ()


def permute_axes(line: str, mesh: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The axes along which the pairs of a collective-permute differ."""
    found = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    if found is None:
        return ()
    sizes = [size for _, size in mesh]

    def coordinates(number: int) -> tuple[int, ...]:
        index = []
        for size in reversed(sizes):
            number, rest = divmod(number, size)
            index.append(rest)
        return tuple(reversed(index))

    differ: set[str] = set()
    for a, b in re.findall(r"\{(\d+),\s*(\d+)", "{" + found[1].lstrip("{")):
        for x, y, (name, _) in zip(coordinates(int(a)), coordinates(int(b)), mesh, strict=True):
            if x != y:
                differ.add(name)
    return tuple(name for name, _ in mesh if name in differ)
