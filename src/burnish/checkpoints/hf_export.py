"""What an export to Hugging Face's layout takes over from its source: configs, tokenizer, licence, and which tensors
the source had in which dtype.

A snapshot of them travels with every training checkpoint, so that an export needs nothing else and differs from the
source in the weights only.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import SIDE_FILES, read_config, read_json
from burnish.checkpoints.safetensors_file import list_tensors
from burnish.models.families import spec_from_hf, tensor_map, tied_head_copy

SOURCE_FILE = "burnish_source.json"
MAX_SHARD_BYTES = 5_000_000_000

WEIGHT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The values of weight_dtype and their safetensors names."""

_OF_OTHER_MODALITIES = {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}


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
        head = tied_head_copy(spec)
        names = {m.name for m in (*tensor_map(spec), *([] if head is None else [head]))}
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


def export_files(side: Path, config: Mapping[str, Any]) -> list[Path]:
    """The files of `side` that an export with this config.json copies: not those that describe what is left out."""
    files = side_files(side)
    if any(f.name == "config.json" and read_json(f) != config for f in files):
        files = [f for f in files if f.name != "config.json" and f.name not in _OF_OTHER_MODALITIES]
    return files


def set_dtype(config_file: Path, weight_dtype: str) -> None:
    """Name the new dtype where config.json names one (transformers 4: torch_dtype, 5: dtype); leave the
    file alone when it says so already.
    """
    config = read_json(config_file)
    fields = [f for f in ("torch_dtype", "dtype") if f in config] or ["torch_dtype"]
    if any(config.get(f) != weight_dtype for f in fields):
        write_json(config_file, config | dict.fromkeys(fields, weight_dtype))
