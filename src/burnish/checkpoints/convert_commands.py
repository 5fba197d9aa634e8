"""`burnish to-maxtext` and `burnish convert`: open the source, say what it is and what is needed, convert."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hub import hub_id
from burnish.checkpoints.safetensors_file import few
from burnish.checkpoints.sources import KIND_WORDS, OpenSource, open_source
from burnish.checkpoints.staging import check_destination
from burnish.checkpoints.targets import Needs, write_hf, write_maxtext, write_training
from burnish.checkpoints.transfer import OnProgress
from burnish.config.groups import ConversionOptions, HubOptions
from burnish.config.schema import ConvertConfig, ToMaxTextConfig
from burnish.observe.files import is_local

SAID_EVERY = 30.0
"""Seconds between two lines about a conversion where there is no bar."""


def to_maxtext(config: ToMaxTextConfig, console: Console | None = None) -> epath.Path:
    """Convert `hf_model_path` (or the hub's checkpoint of `model_name`) to `base_output_directory`/0/items,
    and return that path. Raises CheckpointError or ModelError; nothing is left behind then."""
    console = console or Console()
    source = config.hf_model_path or hub_id(config.model_name or "")
    out = destination(config.base_output_directory)
    with open_source(source, model_name=checked_name(config), token=token_of(config)) as opened:
        tell_source(opened, console)
        with conversion_progress(opened, console) as on_progress:
            items = write_maxtext(
                opened,
                out,
                scanned=config.scan_layers,
                use_zarr3=config.checkpoint_storage_use_zarr3,
                use_ocdbt=config.checkpoint_storage_use_ocdbt,
                weight_dtype=config.weight_dtype,
                on_needs=lambda needs: tell_needs(needs, console),
                on_progress=on_progress,
            )
    console.print(str(items), soft_wrap=True)
    return items


def convert(config: ConvertConfig, console: Console | None = None) -> epath.Path:
    """Convert `source` to `destination` and return the path that other commands take."""
    console = console or Console()
    out = destination(config.destination)
    with open_source(
        config.source,
        model_name=checked_name(config),
        hf_model_path=config.hf_model_path,
        token=token_of(config),
    ) as opened:
        tell_source(opened, console)

        def on_needs(needs: Needs) -> None:
            tell_needs(needs, console)

        with conversion_progress(opened, console) as on_progress:
            if config.to == "maxtext":
                out = write_maxtext(
                    opened,
                    out,
                    scanned=config.scan_layers,
                    use_zarr3=config.checkpoint_storage_use_zarr3,
                    use_ocdbt=config.checkpoint_storage_use_ocdbt,
                    weight_dtype=config.weight_dtype,
                    on_needs=on_needs,
                    on_progress=on_progress,
                )
            elif config.to == "hf":
                write_hf(opened, out, config.weight_dtype, on_needs, on_progress)
            else:
                write_training(opened, local(out), config.weight_dtype, on_needs, on_progress)
    console.print(str(out), soft_wrap=True)
    return out


def checked_name(config: ConversionOptions) -> str | None:
    """model_name, unless the checkpoint is to be believed whatever it says."""
    return None if config.override_model_architecture else config.model_name


def token_of(config: HubOptions) -> str | None:
    return None if config.hf_access_token is None else config.hf_access_token.get_secret_value()


def destination(path: str) -> epath.Path:
    """An absolute path, or one of an object store. Raises CheckpointError for one that cannot be written, before a
    source is looked for or downloaded."""
    directory = Path(path).expanduser().absolute() if is_local(path) else path.rstrip("/")
    check_destination(directory)
    return epath.Path(directory)


def local(path: epath.Path) -> Path:
    """The path as one of this machine. Raises CheckpointError for an object store."""
    if not is_local(path):
        raise CheckpointError(
            f"{path}: this kind of checkpoint is written to local directories only; give one, and copy it there "
            f"afterwards (gcloud storage cp -r <directory> {path})"
        )
    return Path(path)


def tell_source(opened: OpenSource, console: Console) -> None:
    """What was found and what of it stays behind."""
    details = f" ({opened.details})" if opened.details else ""
    console.print(
        f"Source: {KIND_WORDS[opened.kind]} {opened.path}{details}, {len(opened.source.tensors)} tensors, "
        f"{opened.num_bytes / 1e9:.2f} GB",
        soft_wrap=True,
    )
    if opened.left_out:
        console.print(
            f"Left out (image and audio parts): {len(opened.left_out)} tensors, {few(sorted(opened.left_out), 3)}",
            soft_wrap=True,
        )


def tell_needs(needs: Needs, console: Console) -> None:
    console.print(needs.words(), soft_wrap=True)


@contextmanager
def conversion_progress(opened: OpenSource, console: Console) -> Iterator[OnProgress]:
    """A bar in a terminal; elsewhere (a job's log) a line now and then."""
    columns = (TextColumn("Converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    started = said = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=opened.num_bytes)

        def on_progress(done: int, total: int) -> None:
            nonlocal said
            progress.update(task, completed=done, total=total)
            now = time.perf_counter()
            if progress.disable and now - said >= SAID_EVERY:
                said = now
                rate = done / (now - started)
                console.print(f"Converting: {done / 1e9:.2f} of {total / 1e9:.2f} GB ({rate / 1e9:.2f} GB/s)")

        yield on_progress
    seconds = time.perf_counter() - started
    gigabytes = opened.num_bytes / 1e9
    console.print(f"Converted {gigabytes:.2f} GB in {seconds:.1f} s ({gigabytes / seconds:.2f} GB/s)")
