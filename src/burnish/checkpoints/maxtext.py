"""MaxText checkpoints: finding one, naming its leaves, and which Hugging Face rows each region of it holds.

A checkpoint is recognised by its tree: `to_maxtext`'s items (`params.params.…`, scanned or not) and what an
RL run leaves as model_params (`base.….value`). RNG states, the step and the optimizer are left alone. Sizes
come from config.json and are compared with the arrays; nothing is taken from a table.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from etils import epath

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.maxtext_map import Family, Leaf, leaves
from burnish.checkpoints.orbax_files import METADATA, ArraySpec, OrbaxReader
from burnish.checkpoints.safetensors_file import few

HF_SOURCE = "hf_source"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"

_TREES = (re.compile(r"params\.params\.(.+)"), re.compile(r"params\.(.+)"), re.compile(r"base\.(.+)\.value"))
_NO_PARAMETER = re.compile(r"(.*\.)?rngs\..*|step|opt_state\..*")
_OTHER_MODALITIES = ("vision_encoder.", "audio_encoder.")


@dataclass(frozen=True)
class MaxTextCheckpoint:
    """An opened item directory: the stored name of every parameter leaf by its name below `params`."""

    reader: OrbaxReader
    stored: dict[str, str]
    scanned: bool

    @property
    def directory(self) -> epath.Path:
        return self.reader.directory

    def array(self, leaf: str) -> ArraySpec:
        return self.reader.array(self.stored[leaf])

    def hf_source(self) -> epath.Path | None:
        """The directory with the source's own files that burnish wrote beside the checkpoint."""
        for parent in (self.directory, self.directory.parent, self.directory.parent.parent):
            if (parent / HF_SOURCE / "config.json").exists():
                return parent / HF_SOURCE
        return None

    def left_out(self) -> list[str]:
        """Leaves of image and audio parts."""
        return [name for name in self.stored if name.startswith(_OTHER_MODALITIES)]


def find_items(path: epath.PathLike) -> epath.Path | None:
    """The item directory of the MaxText (or other Orbax) checkpoint that a path names: the directory
    itself, its items, those of its only step, or an RL step's model_params. None where there is none."""
    root = epath.Path(path)
    if "://" not in str(root):
        root = root.expanduser()
    for candidate in (root, root / "items", root / "model_params"):
        if (candidate / METADATA).exists():
            return candidate
    if not root.is_dir():
        return None
    steps = [entry for entry in root.iterdir() if entry.name.isdigit() and (entry / "items" / METADATA).exists()]
    if len(steps) > 1:
        names = sorted((s.name for s in steps), key=int)
        raise CheckpointError(f"{root} holds the steps {few(names)}; say which one, e.g. {root / names[-1] / 'items'}")
    return steps[0] / "items" if steps else None


def open_maxtext(path: epath.PathLike) -> MaxTextCheckpoint:
    """Raises CheckpointError when the path holds no MaxText checkpoint, or one with damaged metadata."""
    items = find_items(path)
    if items is None:
        raise CheckpointError(f"{path} holds no MaxText checkpoint (a directory with {METADATA})")
    reader = OrbaxReader(items)
    stored = {}
    for name in reader.names():
        match = next((m for m in (tree.fullmatch(name) for tree in _TREES) if m), None)
        if match and not _NO_PARAMETER.fullmatch(name):
            stored[match[1]] = name
    if "token_embedder.embedding" not in stored:
        raise CheckpointError(
            f"{items} is no MaxText checkpoint: its tree has no token_embedder.embedding; it has {few(reader.names())}"
        )
    unscanned = any(re.match(r"decoder\.layers_\d+\.", name) for name in stored)
    return MaxTextCheckpoint(reader, stored, not unscanned)


def check_leaves(checkpoint: MaxTextCheckpoint, family: Family) -> list[Leaf]:
    """The leaves of the checkpoint, compared with what config.json asks for. Raises CheckpointError naming
    those that are missing, left over or of another shape."""
    expected = {leaf.name: leaf for leaf in leaves(family, checkpoint.scanned)}
    where = checkpoint.directory
    if missing := [name for name in expected if name not in checkpoint.stored]:
        raise CheckpointError(f"{where}: leaves are missing that config.json asks for: {few(missing)}")
    other = set(checkpoint.left_out())
    if extra := [name for name in checkpoint.stored if name not in expected and name not in other]:
        raise CheckpointError(f"{where}: leaves that config.json has no place for: {few(extra)}")
    wrong = [
        f"{name} is {checkpoint.array(name).shape} and should be {leaf.shape}"
        for name, leaf in expected.items()
        if checkpoint.array(name).shape != leaf.shape
    ]
    if wrong:
        raise CheckpointError(f"{where} does not fit config.json: {few(wrong)}")
    return list(expected.values())


def reads_by_member(leaf: Leaf, chunks: Sequence[int]) -> bool:
    """Whether one tensor of a leaf can be read without reading its neighbours: no chunk spans two."""
    return all(chunks[axis] == 1 for axis in leaf.stacked)


def rows_per_chunk(leaf: Leaf, chunks: Sequence[int]) -> int:
    """Rows of a tensor in one chunk along the leaf's row axis."""
    extent = min(chunks[leaf.row_axis], leaf.shape[leaf.row_axis])
    return extent * leaf.item.rows_per_index


def region(leaf: Leaf, index: Sequence[int | slice], start: int, stop: int) -> tuple[int | slice, ...]:
    """The part of a leaf that holds rows [start, stop) of one tensor, or of those in a range on each stacked axis."""
    unit = leaf.item.rows_per_index
    where: list[int | slice] = [slice(None)] * len(leaf.shape)
    for axis, i in zip(leaf.stacked, index, strict=True):
        where[axis] = i
    where[leaf.row_axis] = slice(start // unit, stop // unit)
    return tuple(where)


def chunk_shape(leaf: Leaf, itemsize: int, piece_bytes: int) -> tuple[int, ...]:
    """Chunks that one piece of one tensor fills: single on stacked axes, and as many indices of the row axis
    as fit `piece_bytes`, spread evenly because the last chunk is stored as large as the others."""
    one_row = math.prod(n for a, n in enumerate(leaf.shape) if a not in leaf.stacked and a != leaf.row_axis)
    rows = leaf.shape[leaf.row_axis]
    num_chunks = -(-rows // max(1, piece_bytes // (one_row * itemsize)))
    count = -(-rows // num_chunks)
    return tuple(1 if a in leaf.stacked else count if a == leaf.row_axis else n for a, n in enumerate(leaf.shape))


def write_checkpoint_metadata(directory: epath.Path, scanned: bool, started_ns: int, done_ns: int) -> None:
    """The file that makes `<step>` a whole checkpoint for Orbax and tells MaxText about scanning."""
    metadata = {
        "item_handlers": {"items": "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started_ns,
        "commit_timestamp_nsecs": done_ns,
        "custom_metadata": {"scan_layers": scanned},
    }
    (directory / CHECKPOINT_METADATA).write_text(json.dumps(metadata))
    (directory / "commit_success.txt").write_text("Checkpoint commit was successful")
