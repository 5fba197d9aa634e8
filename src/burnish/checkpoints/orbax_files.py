"""One Orbax item on disk (a tree of arrays), read and written region by region.

Orbax itself reads and writes whole trees; a conversion must not hold one. The files are the same: both
storage forms (OCDBT or one directory per array), Zarr 2 and 3, and the metadata that Orbax and MaxText ask
for. TensorStore reads them, whatever wrote them. Arrays are written uncompressed (weights hardly compress, and
packing them costs more than copying), so that a chunk is its bytes and local files can be written directly.
"""

import base64
import itertools
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorstore as ts
from etils import epath

from burnish.checkpoints.direct_file import DirectFile
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.ocdbt_file import OcdbtFile, stored_bytes
from burnish.observe.files import is_local

METADATA = "_METADATA"
COMMIT_SUCCESS = "commit_success.txt"

# Chunks are read once and not kept; the nodes of an OCDBT tree are asked for with every chunk.
_CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#nodes": {"total_bytes_limit": 16 << 20},
    "file_io_concurrency": {"limit": 4},
}


@dataclass(frozen=True)
class ArraySpec:
    """One array of a tree: dotted name as Orbax stores it, shape, dtype, and the shape of its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        return int(np.prod(self.chunks, dtype=np.int64)) * self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))


class OrbaxReader:
    """The arrays of an item directory, by their keys joined with dots."""

    def __init__(self, directory: epath.PathLike) -> None:
        """Reads the metadata and opens every array. Raises CheckpointError for what is damaged or missing,
        naming the file or the array."""
        self.directory = epath.Path(directory)
        metadata = _read_metadata(self.directory)
        self.use_ocdbt, self.use_zarr3 = bool(metadata.get("use_ocdbt")), bool(metadata.get("use_zarr3"))
        self._kvstore = _kvstore(self.directory, self.use_ocdbt)
        # Where zeros were stored like any other value, a chunk that is not there is a loss.
        self._fills = not metadata.get("store_array_data_equal_to_fill_value", False)
        names = []
        try:
            for leaf in metadata["tree_metadata"].values():
                if not leaf["value_metadata"].get("skip_deserialize"):
                    names.append(".".join(key["key"] for key in leaf["key_metadata"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.directory / METADATA}: no readable tree ({error!r})") from error
        self._context = ts.Context(_CONTEXT)
        opening = {name: self._open(name) for name in names}
        self._stores = {name: self._opened(name, future) for name, future in opening.items()}

    def _open(self, name: str) -> Any:
        spec = {
            "driver": "zarr3" if self.use_zarr3 else "zarr",
            "kvstore": {**self._kvstore, "path": _array_path(self._kvstore, name)},
            "fill_missing_data_reads": self._fills,
        }
        return ts.open(spec, open=True, read=True, context=self._context)

    def _opened(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory}: array {name} cannot be opened ({_first_line(error)}); "
                "the checkpoint is incomplete or damaged: write or copy it again"
            ) from error

    def names(self) -> list[str]:
        return list(self._stores)

    def array(self, name: str) -> ArraySpec:
        store = self._stores[name]
        chunks = tuple(store.chunk_layout.read_chunk.shape or ())
        return ArraySpec(name, tuple(store.shape), np.dtype(store.dtype.numpy_dtype), chunks)

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """A part of an array. Raises CheckpointError where its data are missing or damaged."""
        store = self._stores[name]
        try:
            return np.asarray((store[index] if index else store).read().result())
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory}: array {name} cannot be read ({_first_line(error)}); "
                "the checkpoint is incomplete or damaged: write or copy it again"
            ) from error


class _Chunks(Protocol):
    """Where encoded chunks and metadata go, by their keys."""

    def put(self, key: str, value: np.ndarray) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


_REMOTE_BYTES = 64 << 20


class _PlainFiles:
    """A local file for each key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, key: str, value: np.ndarray) -> None:
        path = self._directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with DirectFile(path, len(value)) as file:
            file.write(value, 0)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Remote:
    """An object store, by TensorStore. Values wait for one another up to a number of bytes: a commit of OCDBT rewrites
    one object, which Google Cloud Storage allows once a second, and takes along all values that wait."""

    def __init__(self, kvstore: Mapping[str, Any]) -> None:
        self._store = ts.KvStore.open(dict(kvstore), context=ts.Context(_CONTEXT)).result()
        self._lock = threading.Lock()
        self._waiting: list[Any] = []
        self._bytes = 0

    def put(self, key: str, value: np.ndarray) -> None:
        full: list[Any] = []
        with self._lock:
            self._waiting.append(self._store.write(key, value.tobytes()))
            self._bytes += len(value)
            if self._bytes >= _REMOTE_BYTES:
                full, self._waiting, self._bytes = self._waiting, [], 0
        for write in full:
            write.result()

    def finish(self) -> None:
        for write in self._waiting:
            write.result()
        self._waiting = []

    def close(self) -> None:
        pass


class OrbaxWriter:
    """Writes an item directory: arrays are announced first, filled by regions, then `finish` makes the
    directory one that Orbax reads. Close it in any case."""

    def __init__(
        self, directory: epath.PathLike, arrays: Sequence[ArraySpec], *, use_ocdbt: bool, use_zarr3: bool
    ) -> None:
        """Raises CheckpointError when the disk is too full."""
        self.directory = epath.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._arrays, self._use_ocdbt, self._use_zarr3 = {a.name: a for a in arrays}, use_ocdbt, use_zarr3
        metadata = {
            f"{a.name}/zarr.json" if use_zarr3 else f"{a.name}/.zarray": _bytes(_zarr3(a) if use_zarr3 else _zarr2(a))
            for a in arrays
        }
        self._chunks: _Chunks
        if not is_local(self.directory):
            self._chunks = _Remote(_kvstore(self.directory, use_ocdbt))
        elif use_ocdbt:
            capacity = sum(stored_bytes(len(m)) for m in metadata.values())
            capacity += sum(stored_bytes(a.chunk_bytes) * a.num_chunks for a in arrays)
            self._chunks = OcdbtFile(Path(self.directory), capacity)
        else:
            self._chunks = _PlainFiles(Path(self.directory))
        for key, value in metadata.items():
            self._chunks.put(key, value)

    def write(self, name: str, index: tuple[int | slice, ...], values: np.ndarray) -> None:
        """Fill a region of whole chunks (cut off only where the array ends) with values of the array's dtype.
        Called from several threads."""
        array = self._arrays[name]
        bounds = _bounds(array.shape, index)
        values = values.reshape([stop - start for start, stop in bounds])
        if values.dtype != array.dtype or any(
            start % chunk or (stop % chunk and stop < size)
            for (start, stop), chunk, size in zip(bounds, array.chunks, array.shape, strict=True)
        ):
            raise ValueError(f"{name}: {values.dtype} for {bounds} of {array}")
        grid = [range(start // n, -(-stop // n)) for (start, stop), n in zip(bounds, array.chunks, strict=True)]
        for place in itertools.product(*grid):
            part = values[
                tuple(
                    slice(i * n - start, (i + 1) * n - start)
                    for i, n, (start, _) in zip(place, array.chunks, bounds, strict=True)
                )
            ]
            if part.shape != array.chunks:  # stored chunks are whole
                whole = np.zeros(array.chunks, array.dtype)
                whole[tuple(slice(n) for n in part.shape)] = part
                part = whole
            numbers = [str(i) for i in place]
            key = "/".join(["c", *numbers]) if self._use_zarr3 else ".".join(numbers) or "0"
            self._chunks.put(f"{name}/{key}", np.ascontiguousarray(part).reshape(-1).view(np.uint8))

    def finish(self, tree: Mapping[str, tuple[str, ...]], empty: Sequence[str] = ()) -> None:
        """Write the metadata. `tree` has each array's keys (their types are dict keys), `empty` the keys of
        empty dicts at the root."""
        self._chunks.finish()
        scalars = {a.name for a in self._arrays.values() if not a.shape}
        entries: dict[str, Any] = {}
        for array in self._arrays.values():
            keys = tree[array.name]
            value: dict[str, Any] = {"value_type": "scalar", "skip_deserialize": False}
            if array.name not in scalars:
                value = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(array.shape)}
            entries[str(keys)] = {
                "key_metadata": [{"key": key, "key_type": 2} for key in keys],
                "value_metadata": value,
            }
        for key in empty:
            entries[str((key,))] = {
                "key_metadata": [{"key": key, "key_type": 2}],
                "value_metadata": {"value_type": "Dict", "skip_deserialize": True},
            }
        metadata = {
            "tree_metadata": entries,
            "use_ocdbt": self._use_ocdbt,
            "use_zarr3": self._use_zarr3,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (self.directory / METADATA).write_text(json.dumps(metadata))
        # Where no sharding is asked for, Orbax puts arrays where the file says: on one device.
        sharding = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": "TFRT_CPU_0"})
        names = {base64.b64encode(a.name.encode()).decode(): sharding for a in self._arrays.values() if a.shape}
        (self.directory / "_sharding").write_text(json.dumps(names))
        arrays = [
            {
                "array_metadata": {
                    "param_name": a.name,
                    "write_shape": list(a.shape),
                    "chunk_shape": list(a.chunks),
                    "ext_metadata": None,
                }
            }
            for a in self._arrays.values()
            if a.shape
        ]
        (self.directory / "array_metadatas").mkdir(parents=True, exist_ok=True)
        (self.directory / "array_metadatas" / "process_0").write_text(json.dumps({"array_metadatas": arrays}))
        (self.directory / COMMIT_SUCCESS).write_text("Checkpoint commit was successful")

    def close(self) -> None:
        self._chunks.close()


def _read_metadata(directory: epath.Path) -> dict[str, Any]:
    try:
        metadata = json.loads((directory / METADATA).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {METADATA}: it is no Orbax checkpoint item") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / METADATA} cannot be read: {_first_line(error)}") from error
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{directory / METADATA} holds {type(metadata).__name__}, an object is needed")
    return metadata


def _kvstore(directory: epath.Path, use_ocdbt: bool) -> dict[str, Any]:
    if not is_local(directory):
        url = str(directory).rstrip("/") + "/"
        if use_ocdbt:
            return {"driver": "ocdbt", "base": url, "cache_pool": "cache_pool#nodes"}
        bucket, _, path = url.removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": path}
    path = os.path.abspath(directory) + "/"
    if use_ocdbt:
        base = {"driver": "file", "path": path}
        return {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#nodes"}
    return {"driver": "file", "path": path}


def _array_path(kvstore: Mapping[str, Any], name: str) -> str:
    return f"{kvstore.get('path', '')}{name}/"


def _dtype_name(dtype: np.dtype) -> str:
    return str(dtype)


def _zarr3(array: ArraySpec) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": _dtype_name(array.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunks)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": 0 if array.dtype.kind == "i" else 0.0,
    }


def _zarr2(array: ArraySpec) -> dict[str, Any]:
    dtype = _dtype_name(array.dtype)
    return {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(array.chunks),
        "dtype": dtype if dtype == "bfloat16" else array.dtype.newbyteorder("<").str,
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "dimension_separator": ".",
    }


def _bytes(metadata: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(json.dumps(metadata).encode(), np.uint8)


def _bounds(shape: Sequence[int], index: Sequence[int | slice]) -> list[tuple[int, int]]:
    """(start, stop) on each axis of a region; axes that the index does not name are whole."""
    rest = [slice(None)] * (len(shape) - len(index))
    return [
        (i, i + 1) if isinstance(i, int) else i.indices(size)[:2]
        for i, size in zip((*index, *rest), shape, strict=True)
    ]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
