"""Rows of the tensors of a safetensors checkpoint, read and written in any order from several threads.

Files are neither mapped nor read whole, so memory holds only the rows that are asked for. The writer lays
out and reserves all files first: what does not fit on the disk fails before anything is converted.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from burnish.checkpoints.direct_file import DirectFile
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.safetensors_file import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    data_start,
    encode_header,
)


@dataclass(frozen=True)
class RowTensor:
    """A tensor of a checkpoint: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0]


class RowReader:
    """Rows of stored tensors. Close it, or use it in a with statement."""

    def __init__(self, stored: Sequence[StoredTensor]) -> None:
        files = {t.file for t in stored}
        starts = {file: data_start(file) for file in files}
        self._files = {file: os.open(file, os.O_RDONLY) for file in files}
        self._stored = {t.name: t for t in stored}
        self._at = {t.name: starts[t.file] + t.start for t in stored}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor. Raises CheckpointError where the file ends before them."""
        stored = self._stored[name]
        dtype = DTYPES[stored.dtype]
        row_bytes = (stored.end - stored.start) // stored.shape[0]
        out = np.empty((stop - start, *stored.shape[1:]), dtype)
        view = out.reshape(-1).view(np.uint8).data
        done, at = 0, self._at[name] + start * row_bytes
        while done < len(view):
            count = os.preadv(self._files[stored.file], [view[done:]], at + done)
            if count == 0:
                raise CheckpointError(f"{stored.file} ended while {name} was read; was it written to meanwhile?")
            done += count
        return out

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)

    def __enter__(self) -> "RowReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RowWriter:
    """The safetensors files of a checkpoint directory, filled in any order."""

    def __init__(self, directory: Path, tensors: Sequence[RowTensor], max_shard_bytes: int) -> None:
        """Makes the files at their full size. Raises CheckpointError when the disk is too full."""
        shards: list[list[RowTensor]] = [[]]
        filled = 0
        for tensor in tensors:
            if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += tensor.nbytes
        count = len(shards)
        names = [SINGLE_FILE if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self.directory = directory
        self.tensors = {t.name: t for t in tensors}
        self._files: list[DirectFile] = []
        self._place: dict[str, tuple[DirectFile, int]] = {}
        for name, shard in zip(names, shards, strict=True):
            layout = sorted(shard, key=lambda t: -DTYPES[t.dtype].itemsize)
            head, starts = encode_header([(t.name, t.dtype, t.shape) for t in layout])
            file = DirectFile(directory / name, len(head) + sum(t.nbytes for t in shard))
            self._files.append(file)
            file.write(np.frombuffer(head, np.uint8), 0)
            self._place |= {t.name: (file, starts[t.name]) for t in shard}
        if count > 1:
            index = {
                "metadata": {"total_size": sum(t.nbytes for t in tensors)},
                "weight_map": {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard},
            }
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, start: int, rows: np.ndarray, half: int | None = None) -> None:
        """Rows of a tensor from `start`; with `half`, only that half of each row's second axis."""
        file, at = self._place[name]
        tensor = self.tensors[name]
        if rows.dtype != DTYPES[tensor.dtype]:
            raise ValueError(f"{name}: rows of {rows.dtype} for a tensor of {tensor.dtype}")
        data = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
        at += start * tensor.row_bytes
        if half is None:
            file.write(data.reshape(-1), at)
            return
        for i, row in enumerate(data):
            file.write(row, at + i * tensor.row_bytes + half * row.nbytes)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []
