"""A directory that is there whole or not at all: written under a hidden name beside its place, then renamed.

What a killed process left beside a place is removed by the next one that writes there. Local directories
only: an object store has no rename.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.checkpoints.errors import CheckpointError


def check_destination(out: Path) -> None:
    """Raises CheckpointError unless `out` is absent or an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; give another output directory or remove it first")


@contextmanager
def staged(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A directory to fill that becomes `out` when the block ends well, synced to the disk; nothing is left
    of it otherwise. Raises CheckpointError before anything is written when `out` is not empty or the disk
    has less than `needed_bytes`.
    """
    check_destination(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.burnish-partial-"
    for sibling in out.parent.iterdir():
        if sibling.name.startswith(prefix):
            shutil.rmtree(sibling)
    free = shutil.disk_usage(out.parent).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{out.parent} has {free / 1e9:.2f} GB free, {needed_bytes / 1e9:.2f} GB are needed; "
            "free some space or choose a directory on another disk"
        )
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        partial.chmod(0o777 & ~_umask())
        yield partial
        _sync_tree(partial)
        os.rename(partial, out)  # an empty directory may be in its place
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_tree(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for file in files:
            _sync(Path(root) / file)
        _sync(Path(root))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
