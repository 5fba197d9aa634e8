"""`burnish to-huggingface`: any checkpoint becomes a Hugging Face directory that is compared with it, value by value,
and is uploaded to the hub if asked. The conversion is that of `burnish convert`: never the whole model in memory.
"""

from pathlib import Path

from etils import epath
from rich.console import Console

from burnish.checkpoints.convert_commands import (
    checked_name,
    conversion_progress,
    destination,
    tell_needs,
    tell_source,
    token_of,
)
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_import import read_config
from burnish.checkpoints.hub import model_card, push, run_of
from burnish.checkpoints.maxtext import open_maxtext
from burnish.checkpoints.sources import kind_of, open_source
from burnish.checkpoints.store import find_checkpoint
from burnish.checkpoints.targets import write_hf
from burnish.config.schema import ExportConfig
from burnish.observe.files import is_local


def to_huggingface(config: ExportConfig, console: Console | None = None) -> epath.Path:
    """Export `load_parameters_path` to `base_output_directory` and return that directory.

    Raises ModelError, CheckpointError or StoreError saying what is wrong with the source, the destination
    or the result; nothing is left at the destination then.
    """
    console = console or Console()
    if config.push_to_hub is not None and not is_local(config.base_output_directory):
        raise CheckpointError(
            f"push_to_hub uploads from this machine, and base_output_directory={config.base_output_directory} is not: "
            "give a local directory, or leave push_to_hub out"
        )
    out = destination(config.base_output_directory)
    path = config.load_parameters_path
    _check_layers(path, config.scan_layers)
    with open_source(
        path, model_name=checked_name(config), hf_model_path=config.hf_model_path, token=token_of(config)
    ) as opened:
        tell_source(opened, console)
        if not any((opened.side / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            console.print("No tokenizer is written: none lies with the source; give hf_model_path to have one")
        with conversion_progress(opened, console) as on_progress:
            write_hf(
                opened, out, config.weight_dtype, lambda needs: tell_needs(needs, console), on_progress, verify=True
            )
        console.print(f"Verified: all {len(opened.source_dtypes)} tensors have the values of the source")
    if config.push_to_hub is not None:
        checkpoint = find_checkpoint(path)
        run, step = (None, "") if checkpoint is None else (run_of(checkpoint), checkpoint.name)
        card = model_card(read_config(Path(out)), run, step)
        console.print(f"Uploading to {config.push_to_hub}")
        console.print(push(Path(out), config.push_to_hub, token_of(config), config.hub_private, card), soft_wrap=True)
    console.print(str(out), soft_wrap=True)
    return out


def _check_layers(path: str, scanned: bool | None) -> None:
    """Raises CheckpointError where scan_layers contradicts the checkpoint; only MaxText's has layers either way."""
    if scanned is not None and kind_of(path) == "maxtext" and scanned != open_maxtext(path).scanned:
        raise CheckpointError(
            f"scan_layers={str(scanned).lower()}, but the layers of {path} are "
            f"{'one by one' if scanned else 'stacked'}; leave scan_layers out to go by the checkpoint"
        )
