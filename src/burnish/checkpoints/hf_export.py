"""Parameter tree -> Hugging Face checkpoint, starting from the source's own files.

A snapshot of the source (its configs, tokenizer, licence, and which tensors it had in which dtype) travels
with every training checkpoint, so that an export needs nothing else and differs from the source in the
weights only. The new directory is written beside its place, verified, and renamed: it is there whole or
not at all.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import SIDE_FILES, Progress, read_config, read_json
from burnish.checkpoints.safetensors_file import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    few,
    list_tensors,
    write_file,
)
from burnish.checkpoints.staging import check_destination, staged
from burnish.checkpoints.verify import Verification, verify
from burnish.models.families import TensorMapping, spec_from_hf, tensor_map, tied_head_copy
from burnish.models.params import ParamInfo, Params, param_infos
from burnish.models.spec import ModelSpec

SOURCE_FILE = "burnish_source.json"
MAX_SHARD_BYTES = 5_000_000_000

WEIGHT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The values of weight_dtype and their safetensors names."""


def snapshot_source(src_dir: Path | str, dst_dir: Path | str, model_name: str | None = None) -> None:
    """Copy what an export needs from a Hugging Face directory, byte for byte, and note its tensors.

    `src_dir` may itself be a snapshot, or hold a config.json and tokenizer without weights (a model that
    is trained from scratch: its tensors will be float32). Where it has no config.json, that of the preset
    `model_name` is written. `dst_dir` is made, and must be empty.
    """
    src, dst = Path(src_dir), Path(dst_dir)
    config = read_config(src, model_name)
    spec = spec_from_hf(config)
    if (src / SOURCE_FILE).exists():
        tensors = read_json(src / SOURCE_FILE)["tensors"]
    elif any(src.glob("*.safetensors")):
        names = {m.name for m in _mappings(spec)}
        tensors = {t.name: t.dtype for t in list_tensors(src) if t.name in names}
    else:
        tensors = {m.name: "F32" for m in tensor_map(spec)}
    dst.mkdir(parents=True, exist_ok=True)
    if any(dst.iterdir()):
        raise CheckpointError(f"{dst} is not empty")
    for file in side_files(src):
        shutil.copyfile(file, dst / file.name)
    if not (dst / "config.json").exists():
        write_json(dst / "config.json", config)
    write_json(dst / SOURCE_FILE, {"tensors": tensors})


def side_files(directory: Path) -> list[Path]:
    """The files of a checkpoint directory that are neither weights nor an index: what an export copies."""
    files = {f for pattern in SIDE_FILES for f in directory.glob(pattern) if f.is_file()}
    return sorted(f for f in files if not f.name.endswith(".index.json") and f.name != SOURCE_FILE)


def write_json(file: Path, value: Any) -> None:
    """Write a JSON object as Hugging Face's libraries do."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _mappings(spec: ModelSpec) -> list[TensorMapping]:
    head = tied_head_copy(spec)
    return tensor_map(spec) + ([] if head is None else [head])


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of an export: what it is, its dtype in the file (safetensors name), and its shard."""

    mapping: TensorMapping
    dtype: str
    shard: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.mapping.hf_shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def plan_tensors(
    spec: ModelSpec, source_tensors: Mapping[str, str], weight_dtype: str | None, max_shard_bytes: int
) -> list[PlannedTensor]:
    """The source's tensors in the source's order, filled into shards of at most `max_shard_bytes`; a
    larger tensor has a shard of its own.
    """
    mappings = {m.name: m for m in _mappings(spec)}
    required = {m.name for m in tensor_map(spec)}
    wrong = (required - set(source_tensors)) | (set(source_tensors) - set(mappings))
    if wrong:
        raise CheckpointError(f"{SOURCE_FILE} and config.json disagree about the tensors {few(sorted(wrong))}")
    planned: list[PlannedTensor] = []
    shard = filled = 0
    for name, source_dtype in source_tensors.items():
        dtype = source_dtype if weight_dtype is None else WEIGHT_DTYPES[weight_dtype]
        tensor = PlannedTensor(mappings[name], dtype, 0)
        if filled and filled + tensor.nbytes > max_shard_bytes:
            shard, filled = shard + 1, 0
        filled += tensor.nbytes
        planned.append(PlannedTensor(mappings[name], dtype, shard))
    return planned


def export(
    spec: ModelSpec,
    params: Params,
    source_snapshot: Path | str,
    out_dir: Path | str,
    weight_dtype: str | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Progress | None = None,
) -> Verification:
    """Write `params` as a Hugging Face checkpoint with the files of `source_snapshot`, and verify it.

    Every tensor has its source's name and dtype; `weight_dtype` ("float32", "float16", "bfloat16"; None
    keeps) gives all of them another one, and config.json says so. Raises CheckpointError before anything
    is written when the output directory is not empty, the disk is too full, or the parameters are not
    those of `spec`; and, leaving nothing behind, when a weight is NaN or overflows the dtype, or the
    verification fails.
    """
    snapshot, out = Path(source_snapshot), Path(out_dir).absolute()
    if weight_dtype is not None and weight_dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"weight_dtype is {weight_dtype!r}; {', '.join(WEIGHT_DTYPES)} are possible")
    check_destination(out)
    if not (snapshot / SOURCE_FILE).exists():
        raise CheckpointError(f"{snapshot} has no {SOURCE_FILE}; an export starts from a snapshot of the source")
    if spec_from_hf(read_config(snapshot)) != spec:
        raise CheckpointError(f"{snapshot / 'config.json'} describes another model than the weights to export")
    _check_tree(spec, params)
    planned = plan_tensors(spec, read_json(snapshot / SOURCE_FILE)["tensors"], weight_dtype, max_shard_bytes)

    files = side_files(snapshot)
    needed = sum(t.nbytes for t in planned) + sum(f.stat().st_size for f in files) + 2**20
    with staged(out, needed) as partial:
        for file in files:
            shutil.copyfile(file, partial / file.name)
        if weight_dtype is not None:
            set_dtype(partial / "config.json", weight_dtype)
        _write_weights(params, planned, partial, on_progress)
        return verify(partial, spec, params, snapshot / "config.json", {t.mapping.name: t.dtype for t in planned})


def _check_tree(spec: ModelSpec, params: Params) -> None:
    def walk(info: Any, value: Any, path: str) -> None:
        if isinstance(info, ParamInfo):
            if tuple(np.shape(value)) != info.shape:
                raise CheckpointError(f"parameter {path} has shape {np.shape(value)}, {info.shape} is right")
            return
        if not isinstance(value, Mapping) or set(value) != set(info):
            found = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise CheckpointError(f"parameters at {path or 'the root'} are {found}, {sorted(info)} are right")
        for key in info:
            walk(info[key], value[key], f"{path}.{key}".lstrip("."))

    walk(param_infos(spec), params, "")


def _write_weights(params: Params, planned: list[PlannedTensor], directory: Path, on_progress: Progress | None) -> None:
    by_name = {t.mapping.name: t for t in planned}
    total, done = sum(t.nbytes for t in planned), 0

    def array_of(name: str) -> np.ndarray:
        nonlocal done
        array = stored_array(params, by_name[name].mapping, by_name[name].dtype)
        done += array.nbytes
        if on_progress is not None:
            on_progress(name, done, total)
        return array

    count = planned[-1].shard + 1
    files = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        layout = [(t.mapping.name, t.dtype, t.mapping.hf_shape) for t in planned if t.shard == i]
        write_file(directory / file, layout, array_of)
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {t.mapping.name: files[t.shard] for t in planned},
        }
        write_json(directory / INDEX_FILE, index)


def stored_array(params: Params, mapping: TensorMapping, dtype: str) -> np.ndarray:
    """A parameter as the file has it. Raises CheckpointError when it is not finite in that dtype."""
    array = np.asarray(mapping.slot(params))
    with np.errstate(over="ignore"):
        stored = mapping.to_hf(array).astype(DTYPES[dtype])
    if not np.isfinite(stored).all():
        why = f"overflows {dtype}; choose another weight_dtype" if np.isfinite(array).all() else "holds NaN or infinity"
        raise CheckpointError(f"{mapping.name} ({'.'.join(mapping.path)} of the parameters) {why}")
    return stored


def set_dtype(config_file: Path, weight_dtype: str) -> None:
    """Name the new dtype where config.json names one (transformers 4: torch_dtype, 5: dtype); leave the
    file alone when it says so already.
    """
    config = read_json(config_file)
    fields = [f for f in ("torch_dtype", "dtype") if f in config] or ["torch_dtype"]
    if any(config.get(f) != weight_dtype for f in fields):
        write_json(config_file, config | dict.fromkeys(fields, weight_dtype))
