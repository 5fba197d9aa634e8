"""The safetensors files of a checkpoint directory: what they hold, reading and writing one tensor at a time.

Headers are read here, so that a damaged file is explained by the tensors it lost; the data is read by the
library. Writing is ours because the library's writer wants a whole file in memory.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from burnish.checkpoints.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DATA_ALIGNMENT = 4096  # data start at a block, for files that are written or mapped by blocks

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The weight dtypes that are read and written, by their safetensors names."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as its file's header describes it; `start` and `end` are bytes after the header."""

    file: Path
    name: str
    dtype: str  # safetensors name; may be one that is not in DTYPES
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file in the order they lie in it. Raises CheckpointError when the file is
    damaged, naming the tensors that are cut off where the header still tells.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        raw = f.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
        if not 0 < length <= size - 8:
            raise CheckpointError(
                f"{file}: no complete safetensors header in {size} bytes; the file is truncated or is something else"
            )
        try:
            header: dict[str, Any] = json.loads(f.read(length))
            header.pop("__metadata__", None)
            tensors = [
                StoredTensor(file, name, info["dtype"], tuple(info["shape"]), *info["data_offsets"])
                for name, info in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: its safetensors header cannot be read: {error}") from error
    tensors.sort(key=lambda t: t.start)
    cut = [t.name for t in tensors if t.end > size - 8 - length]
    if cut:
        raise CheckpointError(
            f"{file} is truncated: {size} bytes, {8 + length + max(t.end for t in tensors)} are needed; "
            f"incomplete tensors: {few(cut)}"
        )
    return tensors


def list_tensors(directory: Path) -> list[StoredTensor]:
    """Every tensor of a checkpoint directory, in file order. Raises CheckpointError when there is no
    safetensors file, and when the index and the shards do not list the same tensors.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(f"{directory} has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is stale")
    if single.exists():
        return read_header(single)
    if not index.exists():
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        has = f" (it has {few(others)})" if others else ""
        raise CheckpointError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{has}; weights are read from safetensors only"
        )
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: no readable weight_map: {error!r}") from error
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {tensor} is in {name!r}, which is not a file name")
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (directory / name).exists()]
    if absent:
        lost = [name for name, file in weight_map.items() if file in absent]
        raise CheckpointError(f"{directory}: shards are missing: {few(absent)}, with the tensors {few(lost)}")
    tensors = [t for name in files for t in read_header(directory / name)]
    held = {(t.name, t.file.name) for t in tensors}
    ghosts = [f"{name} in {file}" for name, file in weight_map.items() if (name, file) not in held]
    if ghosts:
        raise CheckpointError(f"{index} lists tensors that are not in the shard it names: {few(ghosts)}")
    unlisted = [f"{t.name} in {t.file.name}" for t in tensors if weight_map.get(t.name) != t.file.name]
    if unlisted:
        raise CheckpointError(f"{index} does not list tensors that its shards hold: {few(unlisted)}")
    return tensors


def few(names: Sequence[str], shown: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


@contextmanager
def open_file(file: Path) -> Iterator[Callable[[str], np.ndarray]]:
    """A function from a tensor's name to its array, copied out of the mapped file when it is called."""
    try:
        with safe_open(file, framework="numpy") as f:
            yield f.get_tensor
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from error


def iterate(tensors: Sequence[StoredTensor]) -> Iterator[tuple[StoredTensor, np.ndarray]]:
    """Each tensor with its array, one in memory at a time, files opened once when `tensors` is in file
    order.
    """
    i = 0
    while i < len(tensors):
        file = tensors[i].file
        with open_file(file) as get:
            while i < len(tensors) and tensors[i].file == file:
                yield tensors[i], get(tensors[i].name)
                i += 1


def encode_header(layout: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """What a file of these tensors (name, safetensors dtype, shape), in this order, begins with, and where
    in the file each tensor's data starts. Wider dtypes must come first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers wants to be told "pt"
    starts = {}
    end = 0
    for name, dtype, shape in layout:
        starts[name] = start = end
        end += int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + start for name, start in starts.items()}


def data_start(file: Path) -> int:
    """Where the data of a file begin, in bytes; the header must have been read before."""
    with file.open("rb") as f:
        return 8 + int(struct.unpack("<Q", f.read(8))[0])


def write_file(
    file: Path, layout: Sequence[tuple[str, str, tuple[int, ...]]], array_of: Callable[[str], np.ndarray]
) -> None:
    """Write (name, safetensors dtype, shape) in this order, asking `array_of` for one array at a time.

    Wider dtypes go first, as the library orders them, so that every tensor is aligned. The file is on disk
    (fsync) when this returns.
    """
    layout = sorted(layout, key=lambda entry: -DTYPES[entry[1]].itemsize)
    head, _ = encode_header(layout)
    with file.open("wb") as f:
        f.write(head)
        for name, dtype, shape in layout:
            array = np.ascontiguousarray(array_of(name))
            if array.dtype != DTYPES[dtype] or array.shape != shape:
                raise ValueError(f"{name}: got {array.dtype}{array.shape}, the header says {dtype}{shape}")
            f.write(array.reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
