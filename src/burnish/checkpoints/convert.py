"""Opens whatever a path names as a source of tensors, and writes tensors as whatever was asked for.

Sources and destinations meet only in the tensors' Hugging Face names, so each kind is read and written in
one place. Everything that can be refused is refused before the first byte is written: sizes that disagree
with config.json, an output directory that is not empty, a disk or a memory that is too small.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

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
from burnish.checkpoints.hf_import import BUILTIN, check_tensors, check_tied_head, read_config, read_json, resolve
from burnish.checkpoints.hf_rows import RowReader, RowTensor, RowWriter
from burnish.checkpoints.hub import hub_id
from burnish.checkpoints.maxtext import (
    HF_SOURCE,
    check_leaves,
    find_items,
    open_maxtext,
    write_checkpoint_metadata,
)
from burnish.checkpoints.maxtext_map import family_of, hf_tensors, leaves
from burnish.checkpoints.orbax_files import ArraySpec, OrbaxWriter
from burnish.checkpoints.preemption import unwinding_on_signals
from burnish.checkpoints.safetensors_file import DTYPES, StoredTensor, list_tensors
from burnish.checkpoints.shards import Shards
from burnish.checkpoints.staging import check_destination, staged, uploaded
from burnish.checkpoints.store import (
    HF_SOURCE as TRAINING_HF_SOURCE,
)
from burnish.checkpoints.store import MODEL_PARAMS, complete_imported, find_checkpoint, hf_source_files
from burnish.checkpoints.transfer import (
    WORKING_BYTES,
    HfSink,
    HfSource,
    MaxTextSink,
    MaxTextSource,
    Sink,
    Source,
    transfer,
)
from burnish.checkpoints.trees import TreeSink, TreeSource
from burnish.checkpoints.verify import check_written, compare_values
from burnish.models.errors import ModelError
from burnish.models.families import (
    is_left_out,
    resolve_config,
    spec_from_hf,
    tensor_map,
    text_name,
    text_only_config,
    tied_head_copy,
)
from burnish.models.params import Params
from burnish.observe.files import is_local

Kind = Literal["hf", "maxtext", "training"]

KIND_WORDS: dict[Kind, str] = {
    "hf": "Hugging Face checkpoint",
    "maxtext": "MaxText checkpoint",
    "training": "training checkpoint of burnish",
}

OnProgress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True)
class OpenSource:
    """A checkpoint that was found, compared with its config.json, and can be read.

    Of a multimodal one it is the text part: `config` and the names of tensors are those of a checkpoint of that
    alone, and `left_out` names the rest. `side` is a local directory with the source's own config.json and whatever
    else an export starts from. `source_dtypes` has the tensors of the Hugging Face checkpoint that it comes from, in
    their order there. Close it, or use `open_source` in a with statement.
    """

    kind: Kind
    path: str
    source: Source
    config: dict[str, Any]
    side: Path
    source_dtypes: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    details: str = ""

    @property
    def copies(self) -> dict[str, str]:
        """Of `source_dtypes` the tensors that only repeat another one, and that other one: tied heads."""
        return {name: of for name, of in _tied_head(self.config).items() if name in self.source_dtypes}

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.source.tensors.values())


def kind_of(path: str) -> Kind:
    """What a path names. A path that is not there counts as a hub id."""
    if path == BUILTIN:
        return "hf"
    if find_checkpoint(path) is not None:
        return "training"
    if find_items(path) is not None:
        return "maxtext"
    return "hf"


def own_config(path: str) -> str | None:
    """The directory or hub id whose config.json describes the checkpoint at `path`; None for a MaxText
    checkpoint that came without."""
    if kind_of(path) == "hf":
        return path
    saved = hf_source_files(path) if find_checkpoint(path) is not None else open_maxtext(path).hf_source()
    return None if saved is None else str(saved)


@contextmanager
def open_source(
    path: str, *, model_name: str | None = None, hf_model_path: str | None = None, token: str | None = None
) -> Iterator[OpenSource]:
    """Open any checkpoint. `model_name` is compared with config.json (None compares nothing);
    `hf_model_path` gives config.json and tokenizer where the checkpoint has none. As long as it is open, a process that
    is told to end removes what it has half done.

    Raises CheckpointError or ModelError saying what is wrong with it.
    """
    kind = kind_of(path)
    with ExitStack() as stack:
        stack.enter_context(unwinding_on_signals())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="burnish-source-")))
        if kind == "hf":
            yield _open_hf(path, model_name, token, stack)
        elif kind == "maxtext":
            yield _open_maxtext(path, model_name, hf_model_path, token, scratch)
        else:
            yield _open_training(path, model_name, scratch)


def _open_hf(path: str, model_name: str | None, token: str | None, stack: ExitStack) -> OpenSource:
    directory = resolve(path, token)
    own, config = _configs(directory, model_name)
    expected = _expected(config)
    stored = list_tensors(directory)
    left_out = [t.name for t in stored if is_left_out(str(own["model_type"]), t.name)]
    stored = [replace(t, name=text_name(own, t.name)) for t in stored if t.name not in set(left_out)]
    tensors = _check_stored(directory, stored, expected, config)
    source = HfSource([t for t in tensors if t.name in expected])
    stack.callback(source.reader.close)
    dtypes = {t.name: t.dtype for t in tensors}
    return OpenSource("hf", str(directory), source, config, directory, dtypes, left_out)


def _expected(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a config.json asks for: as this program's decoder reads them, or
    as MaxText's tables have them where only those know the model."""
    try:
        return {m.name: m.hf_shape for m in tensor_map(spec_from_hf(config))}
    except ModelError:
        return hf_tensors(leaves(family_of(config), scanned=False))


def _check_stored(
    directory: Path,
    stored: list[StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> list[StoredTensor]:
    """The tensors to convert, in file order; names, shapes and dtypes are those that config.json asks for. A tied
    head that the file holds although it is the embeddings is among them."""
    tied = _tied_head(config)
    heads = {head: expected[embeddings] for head, embeddings in tied.items()}
    check_tensors(directory, stored, expected, heads, lambda name: name.endswith("rotary_emb.inv_freq"))
    tensors = {t.name: t for t in stored if t.name in expected or t.name in heads}
    for head, embeddings in tied.items():
        if head in tensors:
            with RowReader([tensors[embeddings], tensors[head]]) as reader:
                check_tied_head(reader, tensors[embeddings], tensors[head], 0, expected[embeddings][0])
    return list(tensors.values())


def _tied_head(config: Mapping[str, Any]) -> dict[str, str]:
    """Where the output projection is the embeddings: its name, under which a file may hold them again, and theirs."""
    try:
        spec = spec_from_hf(config)
    except ModelError:
        return {}
    head = tied_head_copy(spec)
    return {} if head is None else {head.name: next(m.name for m in tensor_map(spec) if m.path == head.path)}


def _open_maxtext(
    path: str, model_name: str | None, hf_model_path: str | None, token: str | None, scratch: Path
) -> OpenSource:
    checkpoint = open_maxtext(path)
    saved = checkpoint.hf_source()
    if hf_model_path is not None:
        side = resolve(hf_model_path, token)
    elif saved is not None:
        side = _local_copy(saved, scratch / "saved")
    elif model_name is not None:
        side = scratch / "preset"
        side.mkdir()
        write_json(side / "config.json", resolve_config(model_name, None, path))
    else:
        raise CheckpointError(
            f"{path} is a MaxText checkpoint without its source's files: give the Hugging Face directory or hub id of "
            "the model with hf_model_path (config.json, tokenizer), or its model_name (config.json only)"
        )
    own, config = _configs(side, model_name)
    found = check_leaves(checkpoint, family_of(config))
    source = MaxTextSource(checkpoint, found)
    storage = f"{'OCDBT' if checkpoint.reader.use_ocdbt else 'one directory per array'}, "
    storage += "Zarr 3" if checkpoint.reader.use_zarr3 else "Zarr 2"
    details = f"layers {'stacked (scanned)' if checkpoint.scanned else 'one by one (unscanned)'}; {storage}"
    return OpenSource(
        "maxtext",
        str(checkpoint.directory),
        source,
        config,
        side,
        _source_dtypes(side, source, own),
        checkpoint.left_out(),
        details,
    )


def _open_training(path: str, model_name: str | None, scratch: Path) -> OpenSource:
    checkpoint = find_checkpoint(path)
    saved = hf_source_files(path)
    if checkpoint is None or saved is None:
        raise CheckpointError(f"{path} was saved without its source's files (config.json, tokenizer)")
    side = _local_copy(saved, scratch / "saved")
    own, config = _configs(side, model_name)
    source = TreeSource(checkpoint, spec_from_hf(config))
    return OpenSource("training", str(checkpoint), source, config, side, _source_dtypes(side, source, own))


def _local_copy(source: epath.Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def _configs(directory: Path, model_name: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json as it is there, and that of its text part alone."""
    own = read_config(directory, model_name)
    return own, text_only_config(own)


def _source_dtypes(side: Path, source: Source, own: Mapping[str, Any]) -> dict[str, str]:
    """The tensors of the Hugging Face checkpoint that a source comes from, with their dtypes, where they were noted."""
    if (side / SOURCE_FILE).exists():
        noted: dict[str, str] = read_json(side / SOURCE_FILE)["tensors"]
        noted = {text_name(own, name): dtype for name, dtype in noted.items()}
        known = source.tensors.keys() | _tied_head(text_only_config(own)).keys()
        if source.tensors.keys() <= noted.keys() <= known:
            return noted
    return {name: tensor.dtype for name, tensor in source.tensors.items()}


# ---- reading into memory ----


def maxtext_config_directory(
    path: str, tokenizer_path: str | None, model_name: str | None, token: str | None
) -> epath.Path:
    """The directory with config.json and tokenizer of a MaxText checkpoint: what burnish saved with it, else
    that of `tokenizer_path`, else the hub's of `model_name`. Raises CheckpointError saying what to give.
    """
    saved = open_maxtext(path).hf_source()
    if saved is not None:
        return saved
    if tokenizer_path is not None:
        directory = resolve(tokenizer_path, token, weights=False)
        if (directory / "config.json").exists() or model_name is not None:
            return epath.Path(directory)
    elif model_name is not None:
        return epath.Path(resolve(hub_id(model_name), token, weights=False))
    raise CheckpointError(
        f"{path} is a MaxText checkpoint without its source's files: give the model's Hugging Face directory or hub "
        "id with tokenizer_path, or its model_name"
    )


def load_maxtext(
    path: str,
    config: Mapping[str, Any],
    dtype: Any,
    on_progress: OnProgress | None = None,
    shardings: Params | None = None,
) -> Params:
    """The parameter tree in `dtype` of a MaxText checkpoint that `config` (its config.json) describes: jax arrays where
    there is a tree of `shardings`, of which only what this process's devices hold is read; else NumPy arrays. Raises
    CheckpointError naming the leaf that does not fit."""
    checkpoint = open_maxtext(path)
    sink = Shards(spec_from_hf(config), dtype, shardings)
    source = MaxTextSource(checkpoint, check_leaves(checkpoint, family_of(config)), sink.rows)
    wanted = [(tensor.row_bytes, *source.wanted(name)) for name, tensor in source.tensors.items()]
    total = sum(row_bytes * (stop - start) for row_bytes, start, stop in wanted)
    transfer(source, sink, _counted(total, on_progress or (lambda done, of: None)))
    return sink.finish()


# ---- writing ----


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
        count = _counted(opened.num_bytes * (1 + verify), on_progress)
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


def _counted(total: int, on_progress: OnProgress) -> Callable[[int], None]:
    done = 0
    lock = threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            on_progress(done, total)

    return count


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
            transfer(opened.source, sink, _counted(opened.num_bytes, on_progress))
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
            transfer(opened.source, sink, _counted(opened.num_bytes, on_progress))
            records = sink.finish()
        _write_source_files(opened, checkpoint / TRAINING_HF_SOURCE)
        complete_imported(checkpoint, 0, records, {})
