"""The part of a parameter tree that this process holds: which rows of a checkpoint it takes, and arrays made of them.

A device holds a region of each array. `Shards` knows the regions of this process's devices, says which rows of a
Hugging Face tensor they take, is given those rows in any order and from several threads, and makes jax arrays leaf by
leaf, so that a host never holds more than its part and what is being read. Without shardings it makes whole NumPy
arrays of the same rows.
"""

import threading
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from burnish.checkpoints.arrays import Region, array_of, regions_of
from burnish.checkpoints.blocks import cast
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.transfer import Piece
from burnish.models.families import TensorMapping, tensor_map
from burnish.models.params import Params, param_infos
from burnish.models.spec import ModelSpec


class Shards:
    """This process's part of a parameter tree of one dtype, filled from rows of Hugging Face tensors."""

    takes_halves = False  # a sink of checkpoints.transfer: fused tensors come whole

    def __init__(self, spec: ModelSpec, dtype: Any, shardings: Params | None = None) -> None:
        """`shardings` is a tree of NamedSharding; None makes NumPy arrays."""
        self._dtype = np.dtype(dtype)
        self._mappings = {m.name: m for m in tensor_map(spec)}
        self._infos, self._shardings = param_infos(spec), shardings
        self._missing: dict[tuple[str, ...], int] = {}  # tensors that have not come, by array
        for mapping in self._mappings.values():
            self._missing[mapping.path] = self._missing.get(mapping.path, 0) + 1
        self._regions = {path: regions_of(self._sharding(path), self._shape(path)) for path in self._missing}
        self._buffers: dict[tuple[str, ...], dict[Region, np.ndarray]] = {}
        self._arrays: dict[tuple[str, ...], Any] = {}
        self._lock = threading.Lock()

    def _shape(self, path: tuple[str, ...]) -> tuple[int, ...]:
        return _at(self._infos, path).shape

    def _sharding(self, path: tuple[str, ...]) -> NamedSharding | None:
        return None if self._shardings is None else _at(self._shardings, path)

    def rows(self, tensor: str) -> tuple[int, int]:
        """The rows of a tensor, from the first to the last, that this process's devices hold a part of."""
        mapping = self._mappings[tensor]
        found = [cut for region in self._regions[mapping.path] if (cut := _rows(mapping, region)) is not None]
        return (min(a for a, _ in found), max(b for _, b in found)) if found else (0, 0)

    def take(self, tensor: str, start: int, rows: np.ndarray) -> bool:
        """`rows(tensor)` of a tensor, or all of it, the first being row `start`; every tensor once. False where a value
        that is kept is not finite."""
        mapping = self._mappings[tensor]
        finite = True
        if len(rows):
            inner = mapping.hf_shape[0] // mapping.split[0]
            split = (len(rows) // inner, *mapping.split[1:])
            part, first, row_axis = rows.reshape(split).transpose(mapping.order), start // inner, mapping.order.index(0)
            for region, buffer in self._buffers_of(mapping.path).items():
                cut = _part(mapping, region)
                if cut is not None:
                    target, source = cut
                    shift = (first if axis == row_axis else 0 for axis in range(part.ndim))
                    index = tuple(slice(a - by, b - by) for (a, b), by in zip(source, shift, strict=True))
                    slot = buffer[target]
                    slot[...] = cast(part[index], self._dtype)
                    finite = finite and bool(np.isfinite(slot).all())
        with self._lock:
            self._missing[mapping.path] -= 1
            complete = self._missing[mapping.path] == 0
        if complete:
            buffers = self._buffers_of(mapping.path)
            self._arrays[mapping.path] = array_of(self._shape(mapping.path), self._sharding(mapping.path), buffers)
            del self._buffers[mapping.path]
        return finite

    def unit(self, tensor: str) -> int:
        return self._mappings[tensor].hf_shape[0]

    def write(self, piece: Piece) -> None:
        """A whole tensor that checkpoints.transfer brings."""
        if not self.take(piece.tensor, piece.start, piece.rows):
            raise CheckpointError(f"{piece.tensor} overflows {self._dtype}")

    def finish(self) -> Params:
        """The tree, once every tensor was taken."""
        assert not any(self._missing.values())
        return {key: self._tree(node, (key,)) for key, node in self._infos.items()}

    def _tree(self, node: Any, path: tuple[str, ...]) -> Any:
        if path in self._arrays:
            return self._arrays[path]
        return {key: self._tree(child, (*path, key)) for key, child in node.items()}

    def _buffers_of(self, path: tuple[str, ...]) -> dict[Region, np.ndarray]:
        with self._lock:
            if path not in self._buffers:
                self._buffers[path] = {
                    region: np.empty([b - a for a, b in region], self._dtype) for region in self._regions[path]
                }
            return self._buffers[path]


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _part(mapping: TensorMapping, region: Region) -> tuple[tuple[int | slice, ...], Region] | None:
    """Where a tensor's part of the tree goes in a buffer of `region`, and which region of that part; None where the
    region has nothing of the tensor."""
    target: list[int | slice] = []
    source: list[tuple[int, int]] = []
    for axis, (a, b) in enumerate(region):
        index = mapping.index[axis] if axis < len(mapping.index) else slice(None)
        if isinstance(index, slice):
            target.append(index)
            source.append((a, b))
        elif a <= index < b:
            target.append(index - a)
        else:
            return None
    return tuple(target), tuple(source)


def _rows(mapping: TensorMapping, region: Region) -> tuple[int, int] | None:
    """The rows of a tensor that a region takes."""
    cut = _part(mapping, region)
    if cut is None:
        return None
    inner = mapping.hf_shape[0] // mapping.split[0]
    first, last = cut[1][mapping.order.index(0)]
    return first * inner, last * inner
