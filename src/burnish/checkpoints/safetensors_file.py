"""The safetensors files of a checkpoint directory: what their headers say, and headers of new files.

Headers are read here, so that a damaged file is explained by the tensors it lost; the library has the last word on
whether a header and its file belong together. Data are rows of hf_rows.py.
"""

import json
import struct
from collections.abc import Sequence
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
    """The tensors of one file in the order they lie in it. Raises CheckpointError when the file cannot be read or is
    damaged, naming the tensors that are cut off where the header still tells: every tensor has the bytes that its shape
    and dtype take, and they lie one after another.
    """
    try:
        tensors = _parsed_header(file)
        with safe_open(file, framework="numpy"):  # the library knows best whether a header and its file belong together
            return tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}; the file is damaged: get it again") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def _parsed_header(file: Path) -> list[StoredTensor]:
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
            tensors = [
                StoredTensor(file, name, info["dtype"], tuple(info["shape"]), *map(int, info["data_offsets"]))
                for name, info in header.items()
                if name != "__metadata__"
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
