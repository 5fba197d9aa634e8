"""One Orbax item on disk (a tree of arrays), read and written region by region with TensorStore.

Orbax itself reads and writes whole trees; a conversion must not hold one. The files are the same: both
storage forms (OCDBT or one directory per array), Zarr 2 and 3, and the metadata that Orbax and MaxText ask
for. Arrays are written uncompressed: weights hardly compress, and packing them costs more than copying.
"""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from burnish.checkpoints.errors import CheckpointError
from burnish.observe.files import is_local

METADATA = "_METADATA"
COMMIT_SUCCESS = "commit_success.txt"

# Files are synced once, when a whole checkpoint is there.
_CONTEXT = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": 4}, "file_io_sync": False}


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


class OrbaxWriter:
    """Writes an item directory: arrays are announced first, filled by regions, then `finish` makes the
    directory one that Orbax reads."""

    def __init__(
        self, directory: epath.PathLike, arrays: Sequence[ArraySpec], *, use_ocdbt: bool, use_zarr3: bool
    ) -> None:
        self.directory = epath.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._arrays, self._use_ocdbt, self._use_zarr3 = list(arrays), use_ocdbt, use_zarr3
        kvstore = _kvstore(self.directory, use_ocdbt)
        context = ts.Context(_CONTEXT)
        opening = {}
        for array in arrays:
            spec = {
                "driver": "zarr3" if use_zarr3 else "zarr",
                "kvstore": {**kvstore, "path": _array_path(kvstore, array.name)},
                "metadata": _zarr3(array) if use_zarr3 else _zarr2(array),
                "store_data_equal_to_fill_value": True,
            }
            opening[array.name] = ts.open(spec, create=True, open=True, write=True, context=context)
        self._stores = {name: future.result() for name, future in opening.items()}

    def write(self, name: str, index: tuple[int | slice, ...], values: np.ndarray) -> None:
        """Fill a region; returns when it is on its way to the disk. Regions of whole chunks may be written
        from several threads."""
        store = self._stores[name]
        (store[index] if index else store).write(values, can_reference_source_data_indefinitely=True).result()

    def finish(self, tree: Mapping[str, tuple[str, ...]], empty: Sequence[str] = ()) -> None:
        """Write the metadata. `tree` has each array's keys (their types are dict keys), `empty` the keys of
        empty dicts at the root."""
        scalars = {a.name for a in self._arrays if not a.shape}
        entries: dict[str, Any] = {}
        for array in self._arrays:
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
        names = {base64.b64encode(a.name.encode()).decode(): sharding for a in self._arrays if a.shape}
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
            for a in self._arrays
            if a.shape
        ]
        (self.directory / "array_metadatas").mkdir(parents=True, exist_ok=True)
        (self.directory / "array_metadatas" / "process_0").write_text(json.dumps({"array_metadatas": arrays}))
        (self.directory / COMMIT_SUCCESS).write_text("Checkpoint commit was successful")


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
            return {"driver": "ocdbt", "base": url}
        bucket, _, path = url.removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": path}
    path = os.path.abspath(directory) + "/"
    if use_ocdbt:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": path}}
    return {"driver": "file", "path": path}


def _array_path(kvstore: Mapping[str, Any], name: str) -> str:
    return f"{kvstore.get('path', '')}{name}/"


def _dtype_name(dtype: np.dtype) -> str:
    return str(dtype)


def _zarr3(array: ArraySpec) -> dict[str, Any]:
    return {
        "shape": list(array.shape),
        "data_type": _dtype_name(array.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.chunks)}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }


def _zarr2(array: ArraySpec) -> dict[str, Any]:
    dtype = _dtype_name(array.dtype)
    return {
        "shape": list(array.shape),
        "chunks": list(array.chunks),
        "dtype": dtype if dtype == "bfloat16" else array.dtype.newbyteorder("<").str,
        "compressor": None,
        "dimension_separator": ".",
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
