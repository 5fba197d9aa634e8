"""Writes an opened source as a checkpoint of any kind: Hugging Face, MaxText, training.

Sources and targets meet only in the tensors' Hugging Face names, so each kind is read and written in one place.
Everything that can be refused is refused before the first byte is written: an output directory that is not empty, a
disk or a memory that is too small.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_export import (
    MAX_SHARD_BYTES,
    SOURCE_FILE,
    WEIGHT_DTYPES,
    export_files,
    set_dtype,
    side_files,
    write_json,
)
from burnish.checkpoints.hf_rows import RowTensor, RowWriter
from burnish.checkpoints.maxtext import HF_SOURCE, write_checkpoint_metadata
from burnish.checkpoints.maxtext_map import family_of, leaves
from burnish.checkpoints.orbax_files import ArraySpec, OrbaxWriter
from burnish.checkpoints.safetensors_file import DTYPES
from burnish.checkpoints.sources import OpenSource
from burnish.checkpoints.staging import check_destination, staged, uploaded
from burnish.checkpoints.store import HF_SOURCE as TRAINING_HF_SOURCE
from burnish.checkpoints.store import MODEL_PARAMS, complete_imported
from burnish.checkpoints.transfer import WORKING_BYTES, HfSink, MaxTextSink, OnProgress, Sink, Source, counted, transfer
from burnish.checkpoints.trees import TreeSink
from burnish.checkpoints.verify import check_written, compare_values
from burnish.models.families import spec_from_hf
from burnish.observe.files import is_local


@dataclass(frozen=True)
class Needs:
    """What a conversion needs, in bytes."""

    disk: int
    memory: int
    free_disk: int
    free_memory: int | None

    def words(self) -> str:
        memory = "" if self.free_memory is None else f" ({self.free_memory / 1e9:.1f} GB available)"
        return (
            f"Needs {self.disk / 1e9:.2f} GB of disk ({self.free_disk / 1e9:.1f} GB free) and about "
            f"{self.memory / 1e9:.2f} GB of memory{memory}"
        )


def _needs(source: Source, sink: Sink, disk: int, out: Path) -> Needs:
    place = next(p for p in (out, *out.parents) if p.exists())
    memory = max(WORKING_BYTES, source.largest_work(sink)) + (100 << 20)
    return Needs(disk, memory, shutil.disk_usage(place).free, _available_memory())


def _available_memory() -> int | None:
    """Bytes that Linux says can be had without swapping; None elsewhere."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _check_memory(needs: Needs) -> None:
    if needs.free_memory is not None and needs.memory > needs.free_memory:
        raise CheckpointError(
            f"the conversion needs {needs.memory / 1e9:.2f} GB of memory and {needs.free_memory / 1e9:.2f} GB are "
            "available: its largest stacked array has to be held; use a machine with more memory"
        )


def row_tensors(opened: OpenSource, weight_dtype: str | None) -> list[RowTensor]:
    """The tensors of a Hugging Face export in the source's order, each with its dtype there or the one
    that was asked for."""
    tensors = []
    for name, dtype in opened.source_dtypes.items():
        written = dtype if weight_dtype is None else WEIGHT_DTYPES[weight_dtype]
        tensors.append(RowTensor(name, written, opened.source.tensors[opened.copies.get(name, name)].shape))
    return tensors


def write_hf(
    opened: OpenSource,
    out: epath.PathLike,
    weight_dtype: str | None,
    on_needs: Callable[[Needs], None],
    on_progress: OnProgress,
    *,
    verify: bool = False,
) -> None:
    """Write a Hugging Face directory with the source's own files; with `verify`, read every value of it back and
    compare it with the source's. Raises CheckpointError, leaving nothing behind (on an object store: nothing with a
    config.json)."""
    tensors = row_tensors(opened, weight_dtype)
    files = export_files(opened.side, opened.config)
    disk = sum(t.nbytes for t in tensors) + sum(f.stat().st_size for f in files) + 2**20
    check_destination(out)
    place = Path(out) if is_local(out) else Path(tempfile.gettempdir())
    needs = _needs(opened.source, _Rows(), disk, place)
    on_needs(needs)
    _check_memory(needs)
    with staged(place, disk) if is_local(out) else uploaded(out, disk, "config.json") as partial:
        for file in files:
            shutil.copyfile(file, partial / file.name)
        if not (partial / "config.json").exists():
            write_json(partial / "config.json", opened.config)
        if weight_dtype is not None:
            set_dtype(partial / "config.json", weight_dtype)
        count = counted(opened.num_bytes * (1 + verify), on_progress)
        with closing(RowWriter(partial, tensors, MAX_SHARD_BYTES)) as writer:
            transfer(opened.source, HfSink(writer, opened.copies), count)
        check_written(partial, tensors, opened.config)
        if verify:
            compare_values(partial, opened.source, opened.copies, count)


class _Rows:
    """Cuts as small as a sink may ask for, to reckon with before there is a sink."""

    takes_halves = True

    def unit(self, tensor: str) -> int:
        return 1

    def write(self, piece: Any) -> None:
        raise AssertionError("nothing is written while needs are reckoned")


def write_maxtext(
    opened: OpenSource,
    out: epath.Path,
    *,
    scanned: bool,
    use_zarr3: bool,
    use_ocdbt: bool,
    weight_dtype: str | None,
    on_needs: Callable[[Needs], None],
    on_progress: OnProgress,
) -> epath.Path:
    """Write `<out>/0/items` and, beside it, the source's own files; returns the items' path. Raises
    CheckpointError, leaving nothing behind (on an object store: nothing that is marked complete)."""
    found = leaves(family_of(opened.config), scanned)
    dtypes = {}
    for leaf in found:
        widest = max((opened.source.tensors[m.tensor].dtype for m in leaf.members), key=lambda d: DTYPES[d].itemsize)
        dtypes[leaf.name] = DTYPES[widest if weight_dtype is None else WEIGHT_DTYPES[weight_dtype]]
    step = ArraySpec("step", (), np.dtype(np.int64), ())

    def write(directory: epath.Path) -> None:
        started = time.time_ns()
        sink = MaxTextSink(
            lambda arrays: OrbaxWriter(
                directory / "0" / "items", [*arrays, step], use_ocdbt=use_ocdbt, use_zarr3=use_zarr3
            ),
            found,
            dtypes,
            "params.params.",
        )
        with closing(sink.writer) as writer:
            transfer(opened.source, sink, counted(opened.num_bytes, on_progress))
            writer.write("step", (), np.zeros((), np.int64))
            names = [a.name for a in (*sink.arrays, step)]
            writer.finish({name: tuple(name.split(".")) for name in names}, empty=("opt_state",))
        _write_source_files(opened, directory / HF_SOURCE)
        write_checkpoint_metadata(directory / "0", scanned, started, time.time_ns())

    disk = sum(int(np.prod(leaf.shape)) * dtypes[leaf.name].itemsize for leaf in found) + (16 << 20)
    if not is_local(out):
        check_destination(out)
        write(out)
        return out / "0" / "items"
    check_destination(Path(out))
    needs = _needs(opened.source, _Rows(), disk, Path(out))
    on_needs(needs)
    _check_memory(needs)
    with staged(Path(out), disk) as partial:
        write(epath.Path(partial))
    return out / "0" / "items"


def _write_source_files(opened: OpenSource, directory: epath.Path) -> None:
    """config.json, tokenizer and the rest, and which dtype each tensor has in the source."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in side_files(opened.side):
        (directory / file.name).write_bytes(file.read_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in (("config.json", opened.config), (SOURCE_FILE, {"tensors": opened.source_dtypes})):
            if not (directory / name).exists():
                write_json(Path(scratch) / name, content)
                (directory / name).write_bytes((Path(scratch) / name).read_bytes())


def write_training(
    opened: OpenSource,
    out: Path,
    weight_dtype: str | None,
    on_needs: Callable[[Needs], None],
    on_progress: OnProgress,
) -> None:
    """Write `out` as a training checkpoint without optimizer state, to start runs from."""
    spec = spec_from_hf(opened.config)
    dtypes = {
        name: DTYPES[dtype if weight_dtype is None else WEIGHT_DTYPES[weight_dtype]]
        for name, dtype in opened.source_dtypes.items()
    }
    disk = sum(int(np.prod(t.shape)) * dtypes[n].itemsize for n, t in opened.source.tensors.items()) + (16 << 20)
    check_destination(out)
    needs = _needs(opened.source, _Rows(), disk, out)
    on_needs(needs)
    _check_memory(needs)
    with staged(out, disk) as partial:
        checkpoint = epath.Path(partial)
        with closing(TreeSink(checkpoint / MODEL_PARAMS, spec, dtypes)) as sink:
            transfer(opened.source, sink, counted(opened.num_bytes, on_progress))
            records = sink.finish()
        _write_source_files(opened, checkpoint / TRAINING_HF_SOURCE)
        complete_imported(checkpoint, 0, records, {})
