"""`burnish to-huggingface`: a training checkpoint, a MaxText checkpoint or any Hugging Face checkpoint becomes
a Hugging Face directory, and is uploaded to the hub if asked. What it reads: the weights, and the source's own
files that lie beside them.
"""

import tempfile
from pathlib import Path

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from burnish.checkpoints.convert import kind_of, open_source, write_hf
from burnish.checkpoints.convert_commands import (
    checked_name,
    conversion_progress,
    destination,
    local,
    tell_needs,
    tell_source,
    token_of,
)
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_export import SOURCE_FILE, export, snapshot_source
from burnish.checkpoints.hf_import import load_params, read_config, resolve
from burnish.checkpoints.hub import model_card, push, run_of
from burnish.checkpoints.maxtext import open_maxtext
from burnish.checkpoints.store import find_checkpoint, hf_source_files, load_model_params
from burnish.config.schema import ExportConfig
from burnish.models.families import spec_from_hf
from burnish.models.params import Params, num_params
from burnish.models.spec import ModelSpec


def to_huggingface(config: ExportConfig, console: Console | None = None) -> Path:
    """Export `load_parameters_path` to `base_output_directory` and return that directory.

    Raises ModelError, CheckpointError or StoreError saying what is wrong with the source, the destination
    or the result; nothing is left at the destination then.
    """
    console = console or Console()
    out = local(destination(config.base_output_directory))
    if kind_of(config.load_parameters_path) == "maxtext":
        _export_maxtext(config, out, console)
    else:
        _export_tree(config, out, console)
    if config.push_to_hub is not None:
        checkpoint = find_checkpoint(config.load_parameters_path)
        run, step = (None, "") if checkpoint is None else (run_of(checkpoint), checkpoint.name)
        card = model_card(read_config(out), run, step)
        console.print(f"Uploading to {config.push_to_hub}")
        console.print(push(out, config.push_to_hub, token_of(config), config.hub_private, card), soft_wrap=True)
    console.print(str(out), soft_wrap=True)
    return out


def _export_maxtext(config: ExportConfig, out: Path, console: Console) -> None:
    """Streamed: tensor by tensor, never the whole model."""
    path = config.load_parameters_path
    if config.scan_layers is not None and config.scan_layers != open_maxtext(path).scanned:
        raise CheckpointError(
            f"scan_layers={str(config.scan_layers).lower()}, but the layers of {path} are "
            f"{'one by one' if config.scan_layers else 'stacked'}; leave scan_layers out to go by the checkpoint"
        )
    with open_source(
        path, model_name=checked_name(config), hf_model_path=config.hf_model_path, token=token_of(config)
    ) as opened:
        tell_source(opened, console)
        if not any((opened.side / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            console.print("No tokenizer is written: none lies with the source; give hf_model_path to have one")
        with conversion_progress(opened, console) as on_progress:
            write_hf(opened, out, config.weight_dtype, lambda needs: tell_needs(needs, console), on_progress)


def _export_tree(config: ExportConfig, out: Path, console: Console) -> None:
    """Held in memory and verified bit by bit and by its logits."""
    with tempfile.TemporaryDirectory(prefix="burnish-export-") as scratch:
        snapshot = Path(scratch) / "source"
        console.print(f"Reading {config.load_parameters_path}")
        spec, params = _read_source(config, checked_name(config), snapshot)
        columns = (TextColumn("Writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("Writing", total=None)
            verified = export(
                spec,
                params,
                snapshot,
                out,
                config.weight_dtype,
                on_progress=lambda _, done, total: progress.update(task, completed=done, total=total),
            )
    size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    console.print(
        f"Exported and verified: {verified.num_tensors} tensors, {num_params(spec):,} parameters, "
        f"{size / 1e9:.2f} GB, {config.weight_dtype or 'the dtypes of the source'}"
    )
    if verified.rounding_error:
        console.print(f"Rounding the weights changed the logits by {verified.rounding_error:.2%} (relative)")


def _read_source(config: ExportConfig, model_name: str | None, snapshot: Path) -> tuple[ModelSpec, Params]:
    """The weights, with the source's files copied to `snapshot`."""
    path = config.load_parameters_path
    if find_checkpoint(path) is None:
        directory = resolve(path, token_of(config))
        snapshot_source(directory, snapshot, model_name)
        return load_params(directory, model_name)

    source = hf_source_files(path)
    if source is None or not (source / SOURCE_FILE).exists():
        raise CheckpointError(
            f"{path} was saved without its source's files ({SOURCE_FILE}), which an export starts from"
        )
    with tempfile.TemporaryDirectory(prefix="burnish-source-") as local:
        for file in source.iterdir():
            (epath.Path(local) / file.name).write_bytes(file.read_bytes())
        snapshot_source(local, snapshot)
    return spec_from_hf(read_config(snapshot, model_name)), load_model_params(path)
