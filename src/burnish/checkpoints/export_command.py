"""`burnish to-huggingface`: a training checkpoint, or any Hugging Face checkpoint, becomes a verified
Hugging Face directory. What it reads: the weights, and the source's own files that lie beside them.
"""

import tempfile
from pathlib import Path

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_export import SOURCE_FILE, export, snapshot_source
from burnish.checkpoints.hf_import import load_params, read_config, resolve
from burnish.checkpoints.store import find_checkpoint, hf_source_files, load_model_params
from burnish.config.schema import ExportConfig
from burnish.models.families import spec_from_hf
from burnish.models.params import Params, num_params
from burnish.models.spec import ModelSpec


def to_huggingface(config: ExportConfig, console: Console | None = None) -> Path:
    """Export `load_parameters_path` to `base_output_directory` and return that directory, verified.

    Raises ModelError, CheckpointError or StoreError saying what is wrong with the source, the destination
    or the result; nothing is left at the destination then.
    """
    console = console or Console()
    out = Path(config.base_output_directory).expanduser()
    # The checkpoint describes itself; model_name only checks it, unless it is told not to.
    model_name = None if config.override_model_architecture else config.model_name
    with tempfile.TemporaryDirectory(prefix="burnish-export-") as scratch:
        snapshot = Path(scratch) / "source"
        console.print(f"Reading {config.load_parameters_path}")
        spec, params = _read_source(config, model_name, snapshot)
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
    console.print(str(out), soft_wrap=True)
    return out


def _read_source(config: ExportConfig, model_name: str | None, snapshot: Path) -> tuple[ModelSpec, Params]:
    """The weights, with the source's files copied to `snapshot`."""
    path = config.load_parameters_path
    if find_checkpoint(path) is None:
        token = None if config.hf_access_token is None else config.hf_access_token.get_secret_value()
        directory = resolve(path, token)
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
