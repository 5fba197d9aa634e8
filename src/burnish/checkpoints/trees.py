"""Training checkpoints as sources and sinks of rows.

The tree's stacked arrays are read and written leaf by leaf; what a Hugging Face tensor is of them says the
family's tensor map. A conversion writes no optimizer state: the result is something to start from.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from burnish.checkpoints.arrays import LeafRecord, nested, record
from burnish.checkpoints.blocks import cast, is_finite
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_rows import RowTensor
from burnish.checkpoints.orbax_files import ArraySpec, OrbaxReader, OrbaxWriter
from burnish.checkpoints.safetensors_file import DTYPES, few
from burnish.checkpoints.store import MODEL_PARAMS, model_params_records
from burnish.checkpoints.transfer import WORKING_BYTES, Piece, Sink, Work, pieces
from burnish.models.families import TensorMapping, tensor_map
from burnish.models.params import ParamInfo, Params, param_infos
from burnish.models.spec import ModelSpec


class TreeSource:
    """The parameters of a training checkpoint."""

    def __init__(self, checkpoint: epath.Path, spec: ModelSpec) -> None:
        self._records = model_params_records(checkpoint)
        self._reader = OrbaxReader(checkpoint / MODEL_PARAMS)
        self._checkpoint = checkpoint
        self._mappings: dict[str, list[TensorMapping]] = {}
        self.tensors = {}
        names = {str(dtype): name for name, dtype in DTYPES.items()}
        infos: dict[str, ParamInfo] = {}
        _named(param_infos(spec), "", infos)
        if self._records.keys() != infos.keys():
            differ = sorted(self._records.keys() ^ infos.keys())
            raise CheckpointError(f"{checkpoint} and its config.json disagree about the parameters {few(differ)}")
        for leaf, info in infos.items():
            found = self._records[leaf]
            if found.shape != info.shape or found.dtype not in names:
                raise CheckpointError(
                    f"{checkpoint}: {leaf} is {found.dtype}{list(found.shape)}; its config.json asks for "
                    f"{list(info.shape)}, of {', '.join(names)}"
                )
        for mapping in tensor_map(spec):
            leaf = "/".join(mapping.path)
            self._mappings.setdefault(leaf, []).append(mapping)
            self.tensors[mapping.name] = RowTensor(mapping.name, names[self._records[leaf].dtype], mapping.hf_shape)

    def place(self, tensor: str) -> str:
        return str(self._checkpoint)

    def work(self, sink: Sink) -> Iterator[Work]:
        for leaf, mappings in self._mappings.items():

            def read(leaf: str = leaf) -> Params:
                array = self._read(leaf.replace("/", "."))
                if record(array, self._records[leaf]) != self._records[leaf]:
                    raise CheckpointError(f"{self._checkpoint}: {leaf} is not what was written; it is damaged")
                return nested({leaf: array})

            parts = [part for mapping in mappings for part in self._parts(mapping, sink)]
            nbytes = self._records[leaf].num_bytes
            yield Work(nbytes + min(2 * nbytes, WORKING_BYTES // 2), read, parts)

    def _parts(self, mapping: TensorMapping, sink: Sink) -> Iterator[Callable[[Params], Piece]]:
        tensor = self.tensors[mapping.name]
        unit = min(math.lcm(mapping.row_unit, sink.unit(mapping.name)), tensor.shape[0])
        for start, stop in pieces(tensor.shape[0], unit, tensor.row_bytes):

            def part(tree: Params, start: int = start, stop: int = stop) -> Piece:
                rows = mapping.hf_rows(mapping.slot(tree), start, stop)
                return Piece(mapping.name, start, np.ascontiguousarray(rows))

            yield part

    def _read(self, name: str) -> np.ndarray:
        """A whole array, chunk by chunk: TensorStore holds all that it reads at once twice, packed and unpacked."""
        stored = self._reader.array(name)
        array = np.empty(stored.shape, stored.dtype)
        starts = (range(0, n, c) for n, c in zip(stored.shape, stored.chunks, strict=True))
        for corner in itertools.product(*starts):
            chunk = tuple(
                slice(at, min(at + c, n)) for at, c, n in zip(corner, stored.chunks, stored.shape, strict=True)
            )
            array[chunk] = self._reader.read(name, chunk)
        return array

    def largest_work(self, sink: Sink) -> int:
        return max(work.nbytes for work in self.work(sink))


class TreeSink:
    """The model_params of a training checkpoint, each array in the widest dtype of its tensors."""

    takes_halves = False

    def __init__(self, directory: epath.Path, spec: ModelSpec, dtypes: Mapping[str, np.dtype]) -> None:
        """`dtypes` has the dtype of each Hugging Face tensor."""
        self._mappings = {m.name: m for m in tensor_map(spec)}
        infos: dict[str, ParamInfo] = {}
        _named(param_infos(spec), "", infos)
        leaf_dtypes: dict[str, np.dtype] = {}
        for mapping in self._mappings.values():
            leaf, dtype = "/".join(mapping.path), dtypes[mapping.name]
            known = leaf_dtypes.get(leaf, dtype)
            leaf_dtypes[leaf] = dtype if dtype.itemsize > known.itemsize else known
        self._dtypes = leaf_dtypes
        chunks = {leaf: self._chunks(leaf, info.shape) for leaf, info in infos.items()}
        self.arrays = [
            ArraySpec(leaf.replace("/", "."), info.shape, leaf_dtypes[leaf], chunks[leaf])
            for leaf, info in infos.items()
        ]
        self._whole = {leaf: chunks[leaf] == info.shape for leaf, info in infos.items()}
        self._held = {
            leaf: np.empty(info.shape, leaf_dtypes[leaf])
            for leaf, info in infos.items()
            if chunks[leaf] == info.shape and len(self._of(leaf)) > 1
        }
        self._missing = {leaf: len(self._of(leaf)) for leaf in self._held}
        self._lock = threading.Lock()
        self._directory = directory
        self._writer = OrbaxWriter(directory, self.arrays, use_ocdbt=True, use_zarr3=True)

    def _of(self, leaf: str) -> list[TensorMapping]:
        return [m for m in self._mappings.values() if "/".join(m.path) == leaf]

    def _chunks(self, leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One chunk per tensor where tensors are whole indices of the first axes; else one for all."""
        indices = [m.slot(nested({leaf: _Shape()})).index for m in self._of(leaf)]
        depth = min(len(i) for i in indices)
        if depth == 0 or any(not isinstance(n, int) for index in indices for n in index):
            return shape
        return (1,) * depth + shape[depth:]

    def unit(self, tensor: str) -> int:
        return self._mappings[tensor].hf_shape[0]

    def write(self, piece: Piece) -> None:
        mapping = self._mappings[piece.tensor]
        leaf = "/".join(mapping.path)
        values = np.ascontiguousarray(mapping.to_tree(cast(piece.rows, self._dtypes[leaf])))
        if not is_finite(values):
            raise CheckpointError(f"{piece.tensor} overflows {self._dtypes[leaf]}; choose another weight_dtype")
        if leaf not in self._held:
            self._writer.write(leaf.replace("/", "."), mapping.slot(nested({leaf: _Shape()})).index, values)
            return
        with self._lock:
            mapping.slot(nested({leaf: self._held[leaf]}))[...] = values
            self._missing[leaf] -= 1
            complete = self._missing[leaf] == 0
        if complete:
            self._writer.write(leaf.replace("/", "."), (), self._held.pop(leaf))

    def finish(self) -> dict[str, LeafRecord]:
        """Write the metadata; returns a record of every array as it reads back."""
        self._writer.finish({a.name: tuple(a.name.split(".")) for a in self.arrays})
        reader = OrbaxReader(self._directory)
        return {a.name.replace(".", "/"): record(reader.read(a.name)) for a in self.arrays}

    def close(self) -> None:
        self._writer.close()


class _Shape:
    """Stands for an array and notes how a mapping indexes it."""

    def __init__(self, index: tuple[int | slice, ...] = ()) -> None:
        self.index = index

    def __getitem__(self, index: Any) -> "_Shape":
        return _Shape(index if isinstance(index, tuple) else (index,))


def _named(tree: Any, prefix: str, out: dict[str, ParamInfo]) -> None:
    if isinstance(tree, ParamInfo):
        out[prefix] = tree
        return
    for key, child in tree.items():
        _named(child, f"{prefix}/{key}" if prefix else key, out)
