"""The training store: `<directory>/<step>` holds weights, optimizer state and all that a run resumes from.

A checkpoint is written under a temporary name, read back and compared with what is in memory, synced,
marked complete and only then renamed to its step (an object store has no atomic rename: there it is written
in place and the marker alone makes it count). Older checkpoints are pruned after that. Nothing without its
marker is ever listed, so a crash at any moment leaves the previous checkpoint usable. Of several processes each
writes and reads the parts of arrays that its devices hold; the first one does everything else, and what fails in
one fails in all. They need a directory that all of them see.

    <step>/complete                 marker, written last; holds the checksum of train_state.json
    <step>/train_state.json         step, the run's own state (`extra`), a record of every array
    <step>/model_params/            parameters (Orbax)
    <step>/optimizer_state/         optimizer state (Orbax)
    <step>/hf_source/               config, tokenizer and templates of the source checkpoint, for the export
"""

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from etils import epath

from burnish.checkpoints.arrays import (
    LeafRecord,
    Region,
    array_of,
    checksum,
    index_of,
    named_leaves,
    nested,
    overlap,
    own_checksums,
    regions_of,
    write_arrays,
)
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.orbax_files import OrbaxReader
from burnish.errors import BurnishError
from burnish.observe.files import is_local, write_whole
from burnish.parallel import processes

MODEL_PARAMS = "model_params"
OPTIMIZER_STATE = "optimizer_state"
TRAIN_STATE = "train_state.json"
HF_SOURCE = "hf_source"
COMPLETE = "complete"

FORMAT_VERSION = 1
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".npz"})
SPARE_BYTES = 16 << 20  # file-system overhead that the space check allows for


class StoreError(BurnishError):
    """A checkpoint could not be written, is not there, is damaged or does not fit this run."""


class _DamagedError(Exception):
    """Why a checkpoint that is marked complete cannot be used; becomes a StoreError with the way out."""


@dataclass(frozen=True)
class _TrainState:
    """train_state.json: records per tree ({"model_params": {leaf name: record}, ...}) and the run's own
    state.
    """

    step: int
    records: dict[str, dict[str, LeafRecord]]
    extra: dict[str, Any]


class TrainingStore:
    """The checkpoints of one run. Making one touches nothing; only `save` writes and deletes.

    One process saves at a time (RunDirectory.claim sees to that): `save` removes whatever unfinished saves of
    earlier processes left behind.
    """

    def __init__(self, directory: epath.PathLike, keep: int) -> None:
        """`keep`: how many complete checkpoints to leave in the directory, at least 1."""
        if keep < 1:
            raise StoreError(f"max_num_checkpoints_to_keep={keep}: keep at least 1, or set enable_checkpointing=false")
        self.directory = _absolute(directory)
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return _complete_steps(self.directory)

    def latest(self) -> int | None:
        """The newest complete step, None without one.

        Unfinished saves do not count. A complete checkpoint that is damaged does: falling back behind it
        would silently repeat training, so `restore` raises and names the step that still works.
        """
        steps = self.steps()
        return steps[-1] if steps else None

    def save(
        self,
        step: int,
        params: Any,
        optimizer_state: Any,
        extra: Mapping[str, Any],
        hf_source: epath.PathLike | None = None,
    ) -> None:
        """Writes checkpoint `step`, verifies it, then prunes all but the `keep` newest.

        `params` and `optimizer_state` are trees of arrays or scalars; `extra` is JSON-able and comes back
        equal from `restore`; `hf_source` is a directory whose top-level files, weights excepted, are
        copied. Raises StoreError when the step is not newer than the latest one, when the disk lacks space
        and when anything fails on the way; earlier checkpoints are untouched then.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            raise StoreError(
                f"{self.directory} already holds the checkpoint of step {latest}; step {step} is not newer"
            )
        trees = {MODEL_PARAMS: named_leaves(params), OPTIMIZER_STATE: named_leaves(optimizer_state)}
        source_files = [] if hf_source is None else _non_weight_files(epath.Path(hf_source))
        _check_json(extra)

        final = self.directory / str(step)
        # Without an atomic rename there is nothing to gain from a second name: the marker decides.
        temporary = processes.gather(uuid.uuid4().hex[:8])[0]
        staging = self.directory / (f"{step}.tmp-{temporary}" if is_local(self.directory) else str(step))

        def prepare() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.directory)
            _check_space(self.directory, trees, source_files)
            staging.mkdir()

        def describe() -> None:
            _copy_files(source_files, staging / HF_SOURCE)
            _write_train_state(staging, state)

        def publish() -> None:
            _sync(staging)
            _mark_complete(staging)
            _publish(staging, final)

        with _explained(f"checkpoint of step {step} was not saved in {self.directory}", latest):
            try:
                processes.by_first(prepare)
                state = _TrainState(step, {tree: _records(leaves) for tree, leaves in trees.items()}, dict(extra))
                for tree, leaves in trees.items():
                    _write_tree(staging / tree, leaves)
                processes.by_first(describe)
                processes.together(lambda: _verify(staging, state, jax.process_index(), jax.process_count()))
                processes.by_first(publish)
            except BaseException:
                if processes.is_first() and staging != final and staging.exists() and not final.exists():
                    _delete(staging)
                raise
        with _explained(f"checkpoint of step {step} is saved, but older ones could not be deleted", step):
            processes.by_first(lambda: _prune(self.directory, self.keep))

    def make_room(self, params: Any, optimizer_state: Any, hf_source: epath.PathLike) -> None:
        """For the start of a run: deletes what unfinished saves left, and raises StoreError where the disk has no
        room for one checkpoint. The trees may be of jax.ShapeDtypeStruct.
        """
        trees = {MODEL_PARAMS: named_leaves(params), OPTIMIZER_STATE: named_leaves(optimizer_state)}

        def check() -> None:
            if self.directory.exists():
                _remove_leftovers(self.directory)
            there = self.directory
            while is_local(there) and not there.exists():
                there = there.parent
            _check_space(there, trees, _non_weight_files(epath.Path(hf_source)))

        with _explained(f"no checkpoint could be saved in {self.directory}", self.latest()):
            processes.by_first(check)

    def restore(self, step: int, like_params: Any, like_optimizer_state: Any) -> tuple[Any, Any, dict[str, Any]]:
        """(params, optimizer_state, extra) of a checkpoint, bit for bit, in the structure of the `like`
        trees.

        Leaves of the `like` trees are arrays or jax.ShapeDtypeStruct: a jax.Array or a ShapeDtypeStruct is
        answered with a jax.Array (on its sharding, where it has one), a NumPy array with a NumPy array, a
        Python scalar with a Python scalar. Raises StoreError when the step is not there, when a leaf is
        missing, left over or of another shape or dtype (named), and when the checkpoint is damaged.
        """
        if step not in self.steps():
            raise StoreError(f"{self.directory} has no complete checkpoint of step {step}; it has {self.steps()}")
        path = self.directory / str(step)
        likes = {MODEL_PARAMS: like_params, OPTIMIZER_STATE: like_optimizer_state}
        try:
            state = _read_train_state(path)
            for tree, like in likes.items():
                _check_fit(f"checkpoint {path}: {tree}", state.records[tree], named_leaves(like))
            params, optimizer_state = (_restore_tree(path, tree, state, like) for tree, like in likes.items())
        except _DamagedError as e:
            _raise_damaged(path, e)
        return params, optimizer_state, state.extra


def find_checkpoint(path: epath.PathLike) -> epath.Path | None:
    """The complete checkpoint that `path` names (`<step>` or `<step>/model_params`), None when it names
    none. Raises StoreError for a run directory or a directory of checkpoints, naming the newest one.
    """
    candidate = _absolute(path)
    if candidate.name == MODEL_PARAMS:
        candidate = candidate.parent
    if (candidate / COMPLETE).exists() and (candidate / TRAIN_STATE).exists():
        return candidate
    for store in (candidate, candidate / "actor", candidate / "checkpoints" / "actor"):
        if steps := _complete_steps(store):
            raise StoreError(
                f"{path} is no checkpoint but holds some; name one of them: "
                f"the newest is {store / str(steps[-1]) / MODEL_PARAMS}"
            )
    return None


def load_model_params(path: epath.PathLike, dtype: Any = None, shardings: Any = None) -> dict[str, Any]:
    """The parameters of the checkpoint `<step>` or `<step>/model_params` as nested dicts: NumPy arrays, or jax arrays
    where there is a tree of `shardings`; of `dtype`, or as stored.

    Raises StoreError when the path is no complete checkpoint and when it is damaged.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise StoreError(
            f"{path} is no complete training checkpoint: expected .../checkpoints/actor/<step> or "
            f".../<step>/{MODEL_PARAMS} next to {TRAIN_STATE} and {COMPLETE}"
        )
    try:
        records = _read_train_state(checkpoint).records[MODEL_PARAMS]
        wanted = {name: None for name in records} if shardings is None else named_leaves(shardings)
        _check_names(f"checkpoint {checkpoint}: {MODEL_PARAMS}", records, wanted)
        return nested(dict(_checked_leaves(checkpoint, MODEL_PARAMS, records, wanted, dtype)))
    except _DamagedError as e:
        _raise_damaged(checkpoint, e)


def model_params_records(checkpoint: epath.Path) -> dict[str, LeafRecord]:
    """What is recorded of each parameter of a complete checkpoint, by name ("layers/q_proj"). Raises
    StoreError for a damaged record.
    """
    try:
        return _read_train_state(checkpoint).records[MODEL_PARAMS]
    except _DamagedError as e:
        _raise_damaged(checkpoint, e)


def complete_imported(
    checkpoint: epath.Path, step: int, records: Mapping[str, LeafRecord], extra: Mapping[str, Any]
) -> None:
    """Makes a directory whose model_params (and hf_source) were written by a conversion a complete
    checkpoint without optimizer state."""
    _write_train_state(checkpoint, _TrainState(step, {MODEL_PARAMS: dict(records), OPTIMIZER_STATE: {}}, dict(extra)))
    _mark_complete(checkpoint)


def hf_source_files(path: epath.PathLike) -> epath.Path | None:
    """The directory with the source checkpoint's own files that was saved with the checkpoint, None without
    one.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None or not (checkpoint / HF_SOURCE).exists():
        return None
    return checkpoint / HF_SOURCE


# ---- the phases of a save, in order ----


def _remove_leftovers(directory: epath.Path) -> None:
    """Deletes what unfinished saves and unfinished deletions left: temporary names and steps without
    marker.
    """
    for entry in directory.iterdir():
        step, _, temporary = entry.name.partition(".tmp-")
        if step.isdigit() and (temporary or not (entry / COMPLETE).exists()):
            _delete(entry)


def _check_space(directory: epath.Path, trees: Mapping[str, Mapping[str, Any]], source_files: list[epath.Path]) -> None:
    if not is_local(directory):
        return
    arrays = sum(_num_bytes(leaf) for leaves in trees.values() for leaf in leaves.values())
    needed = arrays + sum(f.stat().length for f in source_files) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StoreError(
            f"{needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free in {directory}; "
            "free some, lower max_num_checkpoints_to_keep or choose another base_output_directory"
        )


def _records(leaves: Mapping[str, Any]) -> dict[str, LeafRecord]:
    """A record of every array, from what each process has of it."""
    own = processes.together(lambda: {name: own_checksums(leaf) for name, leaf in leaves.items()})
    gathered = processes.gather(own)
    merged = {name: {r: c for found in gathered for r, c in found[name].items()} for name in leaves}
    return {name: LeafRecord.of_parts(*_shape_dtype(leaf), merged[name]) for name, leaf in leaves.items()}


def _write_tree(path: epath.Path, leaves: Mapping[str, Any]) -> None:
    write_arrays(path, leaves)


def _copy_files(files: list[epath.Path], target: epath.Path) -> None:
    if files:
        target.mkdir()
    for file in files:
        file.copy(target / file.name)


def _write_train_state(staging: epath.Path, state: _TrainState) -> None:
    content = {
        "format_version": FORMAT_VERSION,
        "step": state.step,
        "extra": state.extra,
        "arrays": {
            tree: {name: leaf.to_json() for name, leaf in records.items()} for tree, records in state.records.items()
        },
    }
    (staging / TRAIN_STATE).write_text(json.dumps(content, indent=1))


def _verify(staging: epath.Path, state: _TrainState, process: int = 0, processes: int = 1) -> None:
    """Reads everything back, or a process its share of it: arrays against the records taken from memory, the state
    for equality."""
    for tree, records in state.records.items():
        parts = [(name, *part) for name, leaf in records.items() for part in leaf.checksums]
        _check_parts(staging, tree, records, parts[process::processes])
    content = json.loads((staging / TRAIN_STATE).read_text())
    if content["extra"] != state.extra:
        raise _DamagedError(f"{TRAIN_STATE} does not read back as written")


def _sync(staging: epath.Path) -> None:
    """Forces files and directories to the disk, so that a power cut cannot undo what the marker promises."""
    if not is_local(staging):
        return
    for root, _, files in os.walk(staging):
        for path in [*(os.path.join(root, f) for f in files), root]:
            _sync_path(path)


def _mark_complete(staging: epath.Path) -> None:
    crc32 = zlib.crc32((staging / TRAIN_STATE).read_bytes())
    write_whole(staging / COMPLETE, json.dumps({"train_state_crc32": crc32}))
    if is_local(staging):
        _sync_path(staging)


def _publish(staging: epath.Path, final: epath.Path) -> None:
    if staging == final:
        return
    staging.rename(final)
    _sync_path(final.parent)


def _prune(directory: epath.Path, keep: int) -> None:
    for step in _complete_steps(directory)[:-keep]:
        _delete(directory / str(step))


# ---- reading ----


def _read_train_state(checkpoint: epath.Path) -> _TrainState:
    try:
        data = (checkpoint / TRAIN_STATE).read_bytes()
        marker = json.loads((checkpoint / COMPLETE).read_text())
        if zlib.crc32(data) != marker["train_state_crc32"]:
            raise _DamagedError(f"{TRAIN_STATE} is not the file that was written")
        content = json.loads(data)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise _DamagedError(f"{TRAIN_STATE} or its marker {COMPLETE} cannot be read ({e})") from e
    if content["format_version"] != FORMAT_VERSION:
        raise StoreError(
            f"checkpoint {checkpoint} has format {content['format_version']}; this version reads {FORMAT_VERSION}"
        )
    records = {
        tree: {name: LeafRecord.from_json(leaf) for name, leaf in leaves.items()}
        for tree, leaves in content["arrays"].items()
    }
    return _TrainState(content["step"], records, content["extra"])


@contextmanager
def _reader(checkpoint: epath.Path, tree: str) -> Iterator[Callable[[str, LeafRecord, Region, int], np.ndarray]]:
    """A function that reads a region of an array and compares it with its checksum."""
    opened: list[OrbaxReader] = []

    def read(name: str, leaf: LeafRecord, region: Region, crc32: int) -> np.ndarray:
        if not opened:
            opened.append(OrbaxReader(checkpoint / tree))
        stored = opened[0].array(name.replace("/", "."))
        if (stored.shape, str(stored.dtype)) != (leaf.shape, leaf.dtype):
            raise _DamagedError(f"{tree}: {name} reads back as {stored.dtype}{list(stored.shape)}, {leaf} was written")
        array = opened[0].read(name.replace("/", "."), index_of(region))
        if (found := checksum(array)) != crc32:
            raise _DamagedError(
                f"{tree}: {name} reads back as another array: its checksum is {found}, {crc32} was written"
            )
        return array

    try:
        yield read
    except (CheckpointError, OSError, ValueError, KeyError, TypeError) as e:
        # What TensorStore raises for missing, truncated and garbled files, down to broken JSON.
        raise _DamagedError(f"{tree} cannot be read ({_first_line(e)})") from e


def _check_parts(
    checkpoint: epath.Path, tree: str, records: Mapping[str, LeafRecord], parts: Sequence[tuple[str, Region, int]]
) -> None:
    with _reader(checkpoint, tree) as read:
        for name, region, crc32 in parts:
            read(name, records[name], region, crc32)


def _checked_leaves(
    checkpoint: epath.Path,
    tree: str,
    records: Mapping[str, LeafRecord],
    shardings: Mapping[str, jax.sharding.Sharding | None],
    dtype: Any = None,
) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
    """The arrays of a tree by name, each part that is read compared with its checksum. Of an array with a sharding the
    parts are read of which this process holds something; memory holds the array's share and one part more."""
    with _reader(checkpoint, tree) as read:
        for name, leaf in records.items():
            sharding, as_type = shardings[name], jax.numpy.dtype(dtype or leaf.dtype)
            regions = regions_of(sharding, leaf.shape)
            buffers: dict[Region, np.ndarray] = {}
            for part, crc32 in leaf.checksums:
                shared = {region: both for region in regions if (both := overlap(region, part)) or region == part}
                if not shared:
                    continue
                array = read(name, leaf, part, crc32).astype(as_type, copy=False)
                for region, both in shared.items():
                    if region == part:
                        buffers[region] = array
                        continue
                    if region not in buffers:
                        buffers[region] = np.empty([b - a for a, b in region], as_type)
                    buffers[region][index_of(both, region)] = array[index_of(both, part)]
            yield name, array_of(leaf.shape, sharding, buffers)


def _restore_tree(checkpoint: epath.Path, tree: str, state: _TrainState, like: Any) -> Any:
    likes = named_leaves(like)
    shardings = {name: _sharding_of(x) for name, x in likes.items()}
    leaves = {
        name: _in_kind_of(likes[name], array)
        for name, array in _checked_leaves(checkpoint, tree, state.records[tree], shardings)
    }
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in likes])


def _sharding_of(like: Any) -> jax.sharding.Sharding | None:
    """Where an array like this goes; None for what stays on the host."""
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return like.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return None


def _in_kind_of(like: Any, array: Any) -> Any:
    if isinstance(like, bool | int | float):
        return array.item()
    return array[()] if isinstance(like, np.generic) else array


def _check_fit(what: str, records: Mapping[str, LeafRecord], likes: Mapping[str, Any]) -> None:
    """Raises StoreError naming the leaves that checkpoint and run do not have in common."""
    problems = _names_that_differ(records, likes)
    for name in (n for n in likes if n in records):
        stored = (records[name].shape, records[name].dtype)
        wanted = _shape_dtype(likes[name])
        if stored != wanted:
            problems.append(
                f"{name} is {stored[1]}{list(stored[0])} there and {wanted[1]}{list(wanted[0])} in this run"
            )
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise StoreError(
            f"{what} do not fit this run: {shown}. A run resumes with the "
            "model_name, optimizer, weight_dtype and mu_dtype that it was started with"
        )


def _names_that_differ(records: Mapping[str, LeafRecord], likes: Mapping[str, Any]) -> list[str]:
    problems = []
    if missing := [n for n in likes if n not in records]:
        problems.append(f"this run has {_some(missing)}, the checkpoint has not")
    if left_over := [n for n in records if n not in likes]:
        problems.append(f"the checkpoint has {_some(left_over)}, this run has not")
    return problems


def _check_names(what: str, records: Mapping[str, LeafRecord], likes: Mapping[str, Any]) -> None:
    if problems := _names_that_differ(records, likes):
        raise StoreError(f"{what} do not fit this model: {'; '.join(problems)}")


def _raise_damaged(checkpoint: epath.Path, cause: _DamagedError) -> NoReturn:
    """Raises StoreError for a damaged checkpoint, naming the newest older one that reads back whole."""
    steps = _complete_steps(checkpoint.parent) if checkpoint.name.isdigit() else []
    older = [s for s in reversed(steps) if s < int(checkpoint.name)]
    usable = next((s for s in older if _is_whole(checkpoint.parent / str(s))), None)
    if usable is None:
        way_out = "no older checkpoint next to it is usable"
    else:
        way_out = (
            f"step {usable} next to it is usable: delete {checkpoint} to resume from there, "
            f"or give load_parameters_path={checkpoint.parent / str(usable)}"
        )
    raise StoreError(f"checkpoint {checkpoint} is damaged: {cause}; {way_out}") from cause


def _is_whole(checkpoint: epath.Path) -> bool:
    try:
        _verify(checkpoint, _read_train_state(checkpoint))
    except (_DamagedError, StoreError):
        return False
    return True


# ---- small parts ----


def _absolute(path: epath.PathLike) -> epath.Path:
    """An absolute path without trailing slash; Orbax refuses relative ones."""
    text = os.fspath(path)
    return epath.Path(os.path.abspath(os.path.expanduser(text)) if is_local(text) else text.rstrip("/"))


def _complete_steps(directory: epath.Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(e.name) for e in directory.iterdir() if e.name.isdigit() and (e / COMPLETE).exists())


def _delete(path: epath.Path) -> None:
    """Deletes a checkpoint, its marker first: a deletion that is cut short must not leave a hollow
    checkpoint.
    """
    (path / COMPLETE).unlink(missing_ok=True)
    path.rmtree()


def _non_weight_files(source: epath.Path) -> list[epath.Path]:
    """The files of a model directory that an export starts from: all but weights, their index and hidden
    files.
    """
    return sorted(
        f
        for f in source.iterdir()
        if f.is_file()
        and f.suffix not in WEIGHT_SUFFIXES
        and not f.name.endswith(".index.json")
        and not f.name.startswith(".")
    )


def _check_json(extra: Mapping[str, Any]) -> None:
    """`extra` must survive JSON as it is: tuples, integer keys and NaN do not."""
    try:
        same = json.loads(json.dumps(extra, allow_nan=False)) == extra
    except (TypeError, ValueError) as e:
        raise StoreError(f"extra state is not JSON-able: {e}") from e
    if not same:
        raise StoreError("extra state changes when written as JSON (tuples or keys that are no strings)")


def _sync_path(path: epath.PathLike) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _num_bytes(leaf: Any) -> int:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return array.size * array.dtype.itemsize


def _shape_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return tuple(array.shape), str(array.dtype)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _explained(what: str, previous: int | None) -> Iterator[None]:
    """Turns a failure inside into a StoreError that says what is still there."""
    kept = "there is no earlier one" if previous is None else f"step {previous} is intact"
    try:
        yield
    except Exception as e:
        raise StoreError(f"{what} ({kept}): {_first_line(e)}") from e
