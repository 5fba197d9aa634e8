"""`burnish inspect`: what a checkpoint holds, from its headers and metadata alone.

Any kind of checkpoint is shown, also one whose model is not known here; nothing is compared or verified.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath
from rich.console import Console

from burnish.checkpoints.convert_commands import token_of
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import read_json, resolve
from burnish.checkpoints.hub import run_of
from burnish.checkpoints.maxtext import CHECKPOINT_METADATA, HF_SOURCE, find_items
from burnish.checkpoints.orbax_files import OrbaxReader
from burnish.checkpoints.safetensors_file import list_tensors
from burnish.checkpoints.sources import KIND_WORDS, kind_of
from burnish.checkpoints.store import MODEL_PARAMS, find_checkpoint, hf_source_files, model_params_records
from burnish.config.schema import InspectConfig


@dataclass(frozen=True)
class Entry:
    """One array: name, shape, dtype, bytes; `where` is its file, or its chunk shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: str


def inspect(config: InspectConfig, console: Console | None = None) -> None:
    """Print kind, facts, the tree and totals of the checkpoint at `path`."""
    console = console or Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    kind = kind_of(config.path)
    if kind == "training":
        facts, entries, model = _training(config.path)
    elif kind == "maxtext":
        facts, entries, model = _orbax(config.path)
    else:
        facts, entries, model = _hf(config.path, token_of(config))
    say(KIND_WORDS[kind] if not (kind == "maxtext" and "tree" in facts) else "Orbax checkpoint")
    for name, value in facts.items():
        say(f"  {name}: {value}")
    if model is not None:
        say("Config")
        for name, value in _short(model).items():
            say(f"  {name}: {value}")
    elif config.model_name is not None:
        say(f"No config.json lies with it; model_name={config.model_name} says nothing of the checkpoint itself")
    say("Arrays")
    width = max((len(e.name) for e in entries), default=0)
    for e in entries:
        say(f"  {e.name:{width}}  {e.dtype}{list(e.shape)}  {_bytes(e.nbytes)}  {e.where}")
    values = sum(math.prod(e.shape) for e in entries)
    say(f"{len(entries)} arrays, {values:,} values, {_bytes(sum(e.nbytes for e in entries))}")


def _hf(path: str, token: str | None) -> tuple[dict[str, Any], list[Entry], dict[str, Any] | None]:
    directory = resolve(path, token)
    stored = list_tensors(directory)
    entries = [Entry(t.name, t.shape, t.dtype, t.end - t.start, t.file.name) for t in stored]
    config = directory / "config.json"
    facts = {"directory": directory, "weight files": len({t.file for t in stored})}
    return facts, entries, read_json(config) if config.exists() else None


def _orbax(path: str) -> tuple[dict[str, Any], list[Entry], dict[str, Any] | None]:
    items = find_items(path)
    if items is None:
        raise CheckpointError(f"{path} holds no checkpoint")
    reader = OrbaxReader(items)
    facts: dict[str, Any] = {
        "directory": items,
        "storage": ("OCDBT" if reader.use_ocdbt else "one directory per array")
        + (", Zarr 3" if reader.use_zarr3 else ", Zarr 2"),
    }
    names = reader.names()
    if any(".layers_0." in n for n in names):
        facts["layers"] = "one by one (unscanned)"
    elif any(".layers." in n or ".scanned_blocks." in n for n in names):
        facts["layers"] = "stacked (scanned)"
    else:
        facts["tree"] = "not one of MaxText's"
    if any(n.startswith("base.") for n in names):
        facts["origin"] = "reinforcement learning with MaxText (tree base.….value)"
    facts |= _custom_metadata(items)
    model = None
    for parent in (items.parent, items.parent.parent):
        if (parent / HF_SOURCE / "config.json").exists():
            facts["source files"] = parent / HF_SOURCE
            model = json.loads((parent / HF_SOURCE / "config.json").read_text())
            break
    return facts, _arrays(reader), model


def _custom_metadata(items: epath.Path) -> dict[str, Any]:
    file = items.parent / CHECKPOINT_METADATA
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text()).get("custom_metadata") or {})
    except (ValueError, AttributeError):
        return {CHECKPOINT_METADATA: "cannot be read"}


def _training(path: str) -> tuple[dict[str, Any], list[Entry], dict[str, Any] | None]:
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no checkpoint")
    facts: dict[str, Any] = {"directory": checkpoint, "parameters recorded": len(model_params_records(checkpoint))}
    run = run_of(checkpoint)
    if run is not None:
        facts["run"] = run.path
    model = None
    source = hf_source_files(path)
    if source is not None:
        facts["source files"] = source
        if (source / "config.json").exists():
            model = json.loads((source / "config.json").read_text())
    return facts, _arrays(OrbaxReader(checkpoint / MODEL_PARAMS)), model


def _arrays(reader: OrbaxReader) -> list[Entry]:
    arrays = [reader.array(name) for name in sorted(reader.names())]
    return [Entry(a.name, a.shape, str(a.dtype), a.nbytes, f"chunks {list(a.chunks)}") for a in arrays]


def _short(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json; a long list is cut."""
    shown = {}
    for name, value in config.items():
        text = json.dumps(value) if isinstance(value, Mapping | Sequence) and not isinstance(value, str) else str(value)
        shown[name] = text if len(text) <= 200 else text[:200] + " …"
    return shown


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
