"""Any checkpoint to any other, as rows of Hugging Face tensors that flow from a source to a sink.

A source says which tensors it has and yields work: something to read, and the pieces of tensors that come
out of it. A sink says into which multiples of rows a tensor may be cut and takes pieces in any order. Every
value is checked to be finite on the way, so memory holds a few pieces and at most one stacked leaf.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from burnish.checkpoints.blocks import cast, is_finite, to_hf, to_leaf
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_rows import RowReader, RowTensor, RowWriter
from burnish.checkpoints.maxtext import (
    MaxTextCheckpoint,
    chunk_shape,
    reads_by_member,
    region,
    rows_per_chunk,
)
from burnish.checkpoints.maxtext_map import Leaf
from burnish.checkpoints.orbax_files import ArraySpec, OrbaxWriter
from burnish.checkpoints.safetensors_file import DTYPES, StoredTensor
from burnish.checkpoints.stream import Stream

PIECE_BYTES = 4 << 20
WORKING_BYTES = 72 << 20  # for pieces on their way, three copies of each at most
SMALL_LEAF_BYTES = 1 << 20  # a leaf up to this size is put together in memory and written as one chunk

OnProgress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True)
class Piece:
    """Rows of a Hugging Face tensor from `start`; with `half`, of each row that half of the second axis."""

    tensor: str
    start: int
    rows: np.ndarray
    half: int | None = None


@dataclass(frozen=True)
class Work:
    """Something to read, and what becomes of it; `nbytes` is what it holds in memory at most."""

    nbytes: int
    read: Callable[[], Any]
    parts: Sequence[Callable[[Any], Piece]]


class Source(Protocol):
    """Where tensors come from."""

    tensors: dict[str, RowTensor]

    def place(self, tensor: str) -> str:
        """The file or directory that holds a tensor, for messages."""

    def work(self, sink: "Sink") -> Iterator[Work]:
        """All pieces of all tensors, cut as the sink wants them."""

    def largest_work(self, sink: "Sink") -> int:
        """The most bytes that must be in memory at once."""


class Sink(Protocol):
    """Where tensors go."""

    takes_halves: bool

    def unit(self, tensor: str) -> int:
        """Pieces start at and have a multiple of this many rows (the last one may be shorter)."""

    def write(self, piece: Piece) -> None:
        """Called from several threads, once for each part of each tensor."""


def transfer(source: Source, sink: Sink, on_bytes: Callable[[int], None], num_threads: int | None = None) -> None:
    """Move every tensor. Raises CheckpointError naming the tensor that holds NaN or infinity and where it lies, and
    what reading and writing raise."""
    # More than there are processors: some wait for the disk.
    threads = num_threads or min(8, 2 + (os.cpu_count() or 1))

    def move(part: Callable[[Any], Piece], shared: Any) -> None:
        piece = part(shared)
        if not is_finite(piece.rows):
            raise CheckpointError(
                f"{source.place(piece.tensor)}: {piece.tensor} holds NaN or infinity; this checkpoint is damaged or "
                "its training diverged"
            )
        sink.write(piece)
        on_bytes(piece.rows.nbytes)

    with Stream(threads, max(WORKING_BYTES, source.largest_work(sink))) as stream:
        for work in source.work(sink):
            stream.run(work.nbytes, work.read, [partial(move, part) for part in work.parts])


def counted(total: int, on_progress: OnProgress) -> Callable[[int], None]:
    """What adds up the bytes that `transfer` says are done and tells them, from several threads."""
    done = 0
    lock = threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            on_progress(done, total)

    return count


def pieces(num_rows: int, unit: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces that are multiples of `unit` rows and of about PIECE_BYTES."""
    step = unit * max(1, PIECE_BYTES // (unit * row_bytes))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def narrowed(piece: Piece, dtype: np.dtype) -> np.ndarray:
    """The rows in a sink's dtype, checked where the cast can overflow."""
    rows = cast(piece.rows, dtype)
    if dtype != piece.rows.dtype and not is_finite(rows):
        raise CheckpointError(f"{piece.tensor} overflows {dtype}; choose another weight_dtype")
    return rows


class HfSource:
    """A Hugging Face directory."""

    def __init__(self, stored: Sequence[StoredTensor]) -> None:
        self.tensors = {t.name: RowTensor(t.name, t.dtype, t.shape) for t in stored}
        self.reader = RowReader(stored)
        self._files = {t.name: t.file for t in stored}

    def place(self, tensor: str) -> str:
        return str(self._files[tensor])

    def work(self, sink: Sink) -> Iterator[Work]:
        for name, tensor in self.tensors.items():
            for start, stop in pieces(tensor.shape[0], sink.unit(name), tensor.row_bytes):

                def read(name: str = name, start: int = start, stop: int = stop) -> Piece:
                    return Piece(name, start, self.reader.rows(name, start, stop))

                yield Work(3 * (stop - start) * tensor.row_bytes, read, [lambda piece: piece])

    def largest_work(self, sink: Sink) -> int:
        sizes = [min(sink.unit(n), t.shape[0]) * t.row_bytes if t.row_bytes else 0 for n, t in self.tensors.items()]
        return 3 * max(sizes)


class HfSink:
    """The weight files of a Hugging Face directory."""

    takes_halves = True

    def __init__(self, writer: RowWriter, copies: Mapping[str, str]) -> None:
        """`copies`: tensors that are written with the values of another one."""
        self.writer = writer
        self._written = {name: [name] for name in writer.tensors if name not in copies}
        for copy, name in copies.items():
            self._written[name].append(copy)

    def unit(self, tensor: str) -> int:
        return 1

    def write(self, piece: Piece) -> None:
        for name in self._written[piece.tensor]:
            rows = narrowed(piece, DTYPES[self.writer.tensors[name].dtype])
            self.writer.write(name, piece.start, rows, piece.half)


@dataclass(frozen=True)
class _Use:
    """One leaf that a tensor goes into."""

    leaf: Leaf
    index: tuple[int, ...]


def _uses(found: Sequence[Leaf]) -> dict[str, list[_Use]]:
    uses: dict[str, list[_Use]] = {}
    for leaf in found:
        for member in leaf.members:
            uses.setdefault(member.tensor, []).append(_Use(leaf, member.index))
    return uses


class MaxTextSource:
    """An opened MaxText checkpoint whose leaves were compared with config.json."""

    def __init__(
        self,
        checkpoint: MaxTextCheckpoint,
        found: Sequence[Leaf],
        rows: Callable[[str], tuple[int, int]] | None = None,
    ) -> None:
        """`rows(tensor)` are the rows that are wanted: only chunks that hold some of them are read, and each tensor
        comes in one piece, which may be empty. None: all rows of all tensors."""
        self.checkpoint = checkpoint
        self._rows = rows
        self._leaves = list(found)
        self._arrays = {leaf.name: checkpoint.array(leaf.name) for leaf in found}
        self._uses = _uses(found)
        self.tensors = {}
        for leaf in found:
            for member in leaf.members:
                dtype = _safetensors_name(self._arrays[leaf.name].dtype, leaf.name)
                self.tensors[member.tensor] = RowTensor(member.tensor, dtype, leaf.item.hf_shape)

    def place(self, tensor: str) -> str:
        return str(self.checkpoint.directory)

    def work(self, sink: Sink) -> Iterator[Work]:
        for group in self._groups(sink):
            if self._by_member(group):
                yield from self._work_by_member(group, sink)
            else:
                yield self._work_of_whole(group, sink)

    def largest_work(self, sink: Sink) -> int:
        whole = [
            sum(self._arrays[leaf.name].nbytes for leaf in g) for g in self._groups(sink) if not self._by_member(g)
        ]
        return max(whole, default=0) + WORKING_BYTES // 2

    def _groups(self, sink: Sink) -> list[list[Leaf]]:
        """Leaves that must be read together: the two halves of fused tensors, for a sink that wants them
        whole."""
        if sink.takes_halves:
            return [[leaf] for leaf in self._leaves]
        groups: dict[tuple[str, ...], list[Leaf]] = {}
        for leaf in self._leaves:
            groups.setdefault(tuple(m.tensor for m in leaf.members), []).append(leaf)
        return list(groups.values())

    def _by_member(self, group: Sequence[Leaf]) -> bool:
        return all(reads_by_member(leaf, self._arrays[leaf.name].chunks) for leaf in group)

    def wanted(self, tensor: str) -> tuple[int, int]:
        """The rows of a tensor that are read: those asked for, in whole indices of the leaf."""
        if self._rows is None:
            return 0, self.tensors[tensor].shape[0]
        start, stop = self._rows(tensor)
        unit = math.lcm(*(use.leaf.item.rows_per_index for use in self._uses[tensor]))
        return start // unit * unit, -(-stop // unit) * unit

    def _cuts(self, leaf: Leaf, tensor: str, unit: int) -> Iterator[tuple[int, int]]:
        if self._rows is not None:
            return iter([self.wanted(tensor)])
        shape = leaf.item.hf_shape
        row_bytes = math.prod(shape[1:]) * self._arrays[leaf.name].dtype.itemsize
        return pieces(shape[0], min(unit, shape[0]), row_bytes)

    def _work_by_member(self, group: Sequence[Leaf], sink: Sink) -> Iterator[Work]:
        first = group[0]
        for member in first.members:
            chunk = math.lcm(*(rows_per_chunk(leaf, self._arrays[leaf.name].chunks) for leaf in group))
            for start, stop in self._cuts(first, member.tensor, math.lcm(chunk, sink.unit(member.tensor))):

                def read(
                    index: tuple[int, ...] = member.index, start: int = start, stop: int = stop
                ) -> list[np.ndarray]:
                    if start == stop:
                        return []
                    return [
                        self.checkpoint.reader.read(self.checkpoint.stored[leaf.name], region(leaf, index, start, stop))
                        for leaf in group
                    ]

                def part(parts: list[np.ndarray], tensor: str = member.tensor, start: int = start) -> Piece:
                    return _piece(group, parts, tensor, start) if parts else self._nothing(tensor, parts)

                row_bytes = self.tensors[member.tensor].row_bytes
                yield Work(3 * (stop - start) * row_bytes, read, [part])

    def _work_of_whole(self, group: Sequence[Leaf], sink: Sink) -> Work:
        """Chunks of these leaves span several tensors: the box around all that is wanted of them is read at once."""
        members = group[0].members
        wanted = [(member.index, rows) for member in members if (rows := self.wanted(member.tensor))[0] < rows[1]]
        if not wanted:
            return Work(0, list, [partial(self._nothing, member.tensor) for member in members])
        indices = np.array([index for index, _ in wanted])
        low, high = indices.min(axis=0), indices.max(axis=0) + 1
        first, last = min(start for _, (start, _) in wanted), max(stop for _, (_, stop) in wanted)
        box = [slice(int(a), int(b)) for a, b in zip(low, high, strict=True)]

        def read() -> list[np.ndarray]:
            reader, stored = self.checkpoint.reader, self.checkpoint.stored
            return [reader.read(stored[leaf.name], region(leaf, box, first, last)) for leaf in group]

        parts = []
        for member in members:
            for start, stop in self._cuts(group[0], member.tensor, self._whole_unit(group[0], member.tensor, sink)):

                def part(
                    arrays: list[np.ndarray],
                    member: Any = member,
                    start: int = start,
                    stop: int = stop,
                ) -> Piece:
                    if start == stop:
                        return self._nothing(member.tensor, arrays)
                    index = [i - by for i, by in zip(member.index, low, strict=True)]
                    regions = [
                        a[region(leaf, index, start - first, stop - first)]
                        for leaf, a in zip(group, arrays, strict=True)
                    ]
                    return _piece(group, regions, member.tensor, start)

                parts.append(part)
        share = math.prod(high - low) * (last - first) / (len(members) * group[0].item.hf_shape[0])
        nbytes = int(share * sum(self._arrays[leaf.name].nbytes for leaf in group))
        return Work(nbytes + min(nbytes, WORKING_BYTES // 2), read, parts)

    def _nothing(self, tensor: str, _: list[np.ndarray]) -> Piece:
        """The piece of a tensor of which no row is wanted, whatever was read."""
        described = self.tensors[tensor]
        return Piece(tensor, 0, np.empty((0, *described.shape[1:]), DTYPES[described.dtype]))

    def _whole_unit(self, leaf: Leaf, tensor: str, sink: Sink) -> int:
        return math.lcm(leaf.item.rows_per_index, sink.unit(tensor))


def _piece(group: Sequence[Leaf], regions: Sequence[np.ndarray], tensor: str, start: int) -> Piece:
    rows = [to_hf(leaf.item, np.ascontiguousarray(a)) for leaf, a in zip(group, regions, strict=True)]
    if len(rows) > 1:
        return Piece(tensor, start, np.concatenate(rows, axis=1))
    return Piece(tensor, start, rows[0], group[0].item.half)


class MaxTextSink:
    """The items of a MaxText checkpoint."""

    takes_halves = True

    def __init__(
        self,
        writer_of: Callable[[list[ArraySpec]], OrbaxWriter],
        found: Sequence[Leaf],
        dtypes: Mapping[str, np.dtype],
        prefix: str,
    ) -> None:
        """`dtypes` has the dtype of each leaf; arrays are named prefix + leaf."""
        self._uses = _uses(found)
        self._dtypes, self._prefix = dtypes, prefix
        self._small: dict[str, np.ndarray] = {}
        self._missing: dict[str, int] = {}
        self._lock = threading.Lock()
        arrays = []
        self._chunks: dict[str, tuple[int, ...]] = {}
        for leaf in found:
            array = ArraySpec(prefix + leaf.name, leaf.shape, dtypes[leaf.name], leaf.shape)
            if array.nbytes <= SMALL_LEAF_BYTES:
                self._small[leaf.name] = np.empty(leaf.shape, array.dtype)
                self._missing[leaf.name] = self._small[leaf.name].size
                self._chunks[leaf.name] = leaf.shape
            else:
                self._chunks[leaf.name] = chunk_shape(leaf, array.dtype.itemsize, PIECE_BYTES)
            arrays.append(ArraySpec(array.name, leaf.shape, array.dtype, self._chunks[leaf.name]))
        self.arrays = arrays
        self.writer = writer_of(arrays)

    def unit(self, tensor: str) -> int:
        return math.lcm(*(self._unit(use.leaf) for use in self._uses[tensor]))

    def _unit(self, leaf: Leaf) -> int:
        if leaf.name in self._small:
            return leaf.item.rows_per_index
        return rows_per_chunk(leaf, self._chunks[leaf.name])

    def write(self, piece: Piece) -> None:
        for use in self._uses[piece.tensor]:
            item = use.leaf.item
            if piece.half not in (None, item.half):
                continue
            rows = piece.rows
            if item.half is not None and piece.half is None:
                rows = np.split(rows, 2, axis=1)[item.half]
            values = to_leaf(item, rows)
            values = narrowed(Piece(piece.tensor, piece.start, values), self._dtypes[use.leaf.name])
            where = region(use.leaf, use.index, piece.start, piece.start + len(piece.rows))
            self._put(use.leaf.name, where, values)

    def _put(self, leaf: str, where: tuple[int | slice, ...], values: np.ndarray) -> None:
        if leaf not in self._small:
            self.writer.write(self._prefix + leaf, where, values)
            return
        with self._lock:
            self._small[leaf][where] = values
            self._missing[leaf] -= values.size
            complete = self._missing[leaf] == 0
        if complete:
            self.writer.write(self._prefix + leaf, (), self._small[leaf])


def _safetensors_name(dtype: np.dtype, leaf: str) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise CheckpointError(f"{leaf} is {dtype}; {', '.join(str(d) for d in DTYPES.values())} are read")
