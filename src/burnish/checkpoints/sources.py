"""Opens whatever a path names as a source of tensors: a Hugging Face checkpoint, one of MaxText, a training checkpoint.

Whichever it is, its tensors have their Hugging Face names and there is a config.json, with which names and shapes have
been compared before anything is read. targets.py writes such a source as whatever was asked for; what a run starts from
goes into memory here.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from etils import epath

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_export import SOURCE_FILE, write_json
from burnish.checkpoints.hf_import import (
    BUILTIN,
    check_buffer,
    check_tensors,
    check_tied_head,
    read_config,
    read_json,
    resolve,
)
from burnish.checkpoints.hf_rows import RowReader
from burnish.checkpoints.hub import hub_id
from burnish.checkpoints.maxtext import check_leaves, find_items, open_maxtext
from burnish.checkpoints.maxtext_map import family_of, hf_tensors, leaves
from burnish.checkpoints.preemption import unwinding_on_signals
from burnish.checkpoints.safetensors_file import StoredTensor, list_tensors
from burnish.checkpoints.shards import Shards
from burnish.checkpoints.store import find_checkpoint, hf_source_files
from burnish.checkpoints.transfer import HfSource, MaxTextSource, OnProgress, Source, counted, transfer
from burnish.checkpoints.trees import TreeSource
from burnish.models.errors import ModelError
from burnish.models.families import (
    is_buffer,
    is_left_out,
    resolve_config,
    spec_from_hf,
    tensor_map,
    text_name,
    text_only_config,
    tied_head_copy,
)
from burnish.models.params import Params
from burnish.models.spec import ModelSpec

Kind = Literal["hf", "maxtext", "training"]

KIND_WORDS: dict[Kind, str] = {
    "hf": "Hugging Face checkpoint",
    "maxtext": "MaxText checkpoint",
    "training": "training checkpoint of burnish",
}


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
    spec = _spec(config)
    if spec is None:
        return hf_tensors(leaves(family_of(config), scanned=False))
    return {m.name: m.hf_shape for m in tensor_map(spec)}


def _spec(config: Mapping[str, Any]) -> ModelSpec | None:
    """None where only MaxText's tables know the model."""
    try:
        return spec_from_hf(config)
    except ModelError:
        return None


def _check_stored(
    directory: Path,
    stored: list[StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
) -> list[StoredTensor]:
    """The tensors to convert, in file order; names, shapes and dtypes are those that config.json asks for. A tied
    head that the file holds although it is the embeddings is among them, saved rotary frequencies are not."""
    tied = _tied_head(config)
    heads = {head: expected[embeddings] for head, embeddings in tied.items()}
    check_tensors(directory, stored, expected, heads, is_buffer)
    tensors = {t.name: t for t in stored if t.name in expected or t.name in heads}
    spec = _spec(config)
    with RowReader(stored) as reader:
        for head, embeddings in tied.items():
            if head in tensors:
                check_tied_head(reader, tensors[embeddings], tensors[head], 0, expected[embeddings][0])
        for buffer in stored:
            if spec is not None and is_buffer(buffer.name):
                check_buffer(spec, reader, buffer)
    return list(tensors.values())


def _tied_head(config: Mapping[str, Any]) -> dict[str, str]:
    """Where the output projection is the embeddings: its name, under which a file may hold them again, and theirs."""
    spec = _spec(config)
    if spec is None or (head := tied_head_copy(spec)) is None:
        return {}
    return {head.name: next(m.name for m in tensor_map(spec) if m.path == head.path)}


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
    transfer(source, sink, counted(total, on_progress or (lambda done, of: None)))
    return sink.finish()
