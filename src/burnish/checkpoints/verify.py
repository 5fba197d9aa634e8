"""Is an exported directory the checkpoint that it was made from? Checked on the files as they lie on disk: names,
shapes, dtypes and config.json, then every value, streamed from the source a second time and compared bit by bit.

No logits are computed. Names and layouts are the family's table read in both directions, so a forward pass over the
same values could only show that the table is wrong for the family, which the tests do against transformers for each.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import read_json
from burnish.checkpoints.hf_rows import RowReader, RowTensor
from burnish.checkpoints.safetensors_file import DTYPES, few, list_tensors
from burnish.checkpoints.transfer import Piece, Source, narrowed, transfer


def check_written(directory: Path, tensors: Sequence[RowTensor], config: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless the files hold `tensors` and config.json is `config`, its dtype excepted."""
    found = {t.name: (t.dtype, t.shape) for t in list_tensors(directory)}
    wanted = {t.name: (t.dtype, t.shape) for t in tensors}
    if differ := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        raise CheckpointError(f"{directory} does not read back as it was written: {few(differ)}")
    written = read_json(directory / "config.json")
    fields = sorted((written.keys() | config.keys()) - {"torch_dtype", "dtype"})
    if differ := [field for field in fields if written.get(field) != config.get(field)]:
        raise CheckpointError(f"{directory / 'config.json'} differs from the source's in {few(differ)}")


def compare_values(directory: Path, source: Source, copies: Mapping[str, str], on_bytes: Callable[[int], None]) -> None:
    """Raises CheckpointError naming the tensor whose values are not the source's, rounded to the dtype of the file.
    `copies`: tensors that have the values of another one."""
    stored = list_tensors(directory)
    with RowReader(stored) as reader:
        sink = _Check(reader, {t.name: DTYPES[t.dtype] for t in stored}, copies, directory)
        transfer(source, sink, on_bytes)


class _Check:
    """Compares pieces with the rows of a Hugging Face directory."""

    takes_halves = True

    def __init__(
        self, reader: RowReader, dtypes: Mapping[str, np.dtype], copies: Mapping[str, str], directory: Path
    ) -> None:
        self._reader, self._dtypes, self._copies, self._directory = reader, dtypes, copies, directory

    def unit(self, tensor: str) -> int:
        return 1

    def write(self, piece: Piece) -> None:
        for name in (piece.tensor, *(copy for copy, of in self._copies.items() if of == piece.tensor)):
            want = narrowed(piece, self._dtypes[name])
            found = self._reader.rows(name, piece.start, piece.start + len(want))
            if piece.half is not None:
                found = np.split(found, 2, axis=1)[piece.half]
            if found.tobytes() != want.tobytes():
                worst = np.abs(found.astype(np.float32) - want.astype(np.float32)).max()
                raise CheckpointError(
                    f"{self._directory}: {name} differs from the source by up to {worst:.3g} although it was just "
                    "written: this disk or memory cannot be relied on"
                )
