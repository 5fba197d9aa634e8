"""`burnish compare`: where two checkpoints differ, tensor by tensor, whatever kinds they are.

Both are read as Hugging Face tensors; one of them is looked up by rows, so the second one is converted to a
temporary Hugging Face directory first unless one of the two is such a directory. Types, shapes, config and values
are compared; of values it is said how many differ and by how much.
"""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from burnish.checkpoints.convert_commands import token_of
from burnish.checkpoints.hf_rows import RowReader
from burnish.checkpoints.safetensors_file import few, list_tensors
from burnish.checkpoints.sources import KIND_WORDS, OpenSource, open_source, own_config
from burnish.checkpoints.targets import write_hf
from burnish.checkpoints.transfer import HfSource, Piece, transfer
from burnish.config.schema import CompareConfig
from burnish.errors import BurnishError

SHOWN = 20


class CheckpointsDifferError(BurnishError):
    """The two checkpoints are not the same; where was printed before."""


@dataclass
class Difference:
    """How far a tensor of one checkpoint is from the other's."""

    values: int = 0  # of the tensor
    differing: int = 0
    largest: float = 0.0

    def words(self) -> str:
        share = self.differing / self.values
        return f"{self.differing:,} of {self.values:,} values ({share:.2%}), by up to {self.largest:.3g}"


class CompareSink:
    """Compares each piece with the rows of a Hugging Face checkpoint."""

    takes_halves = True

    def __init__(self, reader: RowReader, names: frozenset[str]) -> None:
        self._reader, self._names = reader, names
        self._lock = threading.Lock()
        self.differences: dict[str, Difference] = {}

    def unit(self, tensor: str) -> int:
        return 1

    def write(self, piece: Piece) -> None:
        if piece.tensor not in self._names:
            return
        other = self._reader.rows(piece.tensor, piece.start, piece.start + len(piece.rows))
        if piece.half is not None:
            other = np.split(other, 2, axis=1)[piece.half]
        a, b = piece.rows.astype(np.float32), other.astype(np.float32)
        apart = np.abs(a - b)
        with self._lock:
            difference = self.differences.setdefault(piece.tensor, Difference())
            difference.values += apart.size
            difference.differing += int(np.count_nonzero(apart))
            difference.largest = max(difference.largest, float(apart.max(initial=0.0)))


def compare(config: CompareConfig, console: Console | None = None) -> None:
    """Print where `first` and `second` differ. Raises CheckpointsDifferError where they do."""
    console = console or Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    paths = (config.first, config.second)
    described = [own_config(path) for path in paths]
    fallback = config.hf_model_path or next((d for d in described if d is not None), None)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                open_source(
                    path,
                    model_name=config.model_name,
                    hf_model_path=None if own is not None else fallback,
                    token=token_of(config),
                )
            )
            for path, own in zip(paths, described, strict=True)
        )
        for opened in (first, second):
            say(f"{KIND_WORDS[opened.kind]} {opened.path}")
        found = _headers(first, second)
        common = [n for n, t in first.source.tensors.items() if _shape(second, n) == t.shape]
        # Rows in any order are there without a copy only in a Hugging Face directory.
        streamed, looked_up = (second, first) if isinstance(first.source, HfSource) else (first, second)
        sink = CompareSink(stack.enter_context(_rows(looked_up)), frozenset(common))
        transfer(streamed.source, sink, lambda _: None)
    differing = {n: d for n, d in sink.differences.items() if d.differing}
    found += [f"{name}: {differing[name].words()}" for name in common if name in differing]
    for line in found[:SHOWN]:
        say(f"  {line}")
    if len(found) > SHOWN:
        say(f"  and {len(found) - SHOWN} more")
    if found:
        raise CheckpointsDifferError(f"the checkpoints differ in {len(found)} respects")
    say(f"The same: {len(common)} tensors")


def _headers(first: OpenSource, second: OpenSource) -> list[str]:
    """Differences that need no values: tensors, shapes, config."""
    found = []
    for a, b, who in ((first, second, "first"), (second, first, "second")):
        if only := [n for n in a.source.tensors if n not in b.source.tensors]:
            found.append(f"only the {who} has {few(only)}")
    dtypes: dict[tuple[str, str], list[str]] = {}
    for name, tensor in first.source.tensors.items():
        other = second.source.tensors.get(name)
        if other is not None and other.shape != tensor.shape:
            found.append(f"{name}: shape {tensor.shape} and {other.shape}")
        elif other is not None and other.dtype != tensor.dtype:
            dtypes.setdefault((tensor.dtype, other.dtype), []).append(name)
    found += [f"{a} and {b}: {few(names)}" for (a, b), names in dtypes.items()]
    fields = sorted(set(first.config) | set(second.config))
    if differ := [f for f in fields if first.config.get(f) != second.config.get(f)]:
        found.append(f"config.json: {few(differ)}")
    return found


def _shape(opened: OpenSource, name: str) -> tuple[int, ...] | None:
    tensor = opened.source.tensors.get(name)
    return None if tensor is None else tensor.shape


@contextmanager
def _rows(opened: OpenSource) -> Iterator[RowReader]:
    """Rows of its tensors in any order."""
    if isinstance(opened.source, HfSource):
        yield opened.source.reader
        return
    with tempfile.TemporaryDirectory(prefix="burnish-compare-") as scratch:
        write_hf(opened, Path(scratch) / "second", None, lambda _: None, lambda *_: None)
        with RowReader(list_tensors(Path(scratch) / "second")) as reader:
            yield reader
