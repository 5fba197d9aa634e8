"""A directory that is there whole or not at all: written under a hidden name beside its place, then renamed.

A process locks what it fills, so that a second one that would write to the same place is refused, and what a killed one
left is told from it and removed. An object store has no rename: what goes there is filled on this machine and uploaded,
the file that makes it whole last.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from burnish.checkpoints.errors import CheckpointError
from burnish.observe.files import is_local

_DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""What a disk says that is full, damaged or not to be written to."""


def check_destination(out: epath.PathLike) -> None:
    """Raises CheckpointError unless `out` (absolute, or of an object store) is absent or an empty directory, and can be
    made."""
    if not is_local(out):
        with reaching(out):
            used = epath.Path(out).exists() and any(epath.Path(out).iterdir())
        if used:
            raise CheckpointError(f"{out} exists and is not empty; give another output directory or remove it first")
        return
    out = _place(Path(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; give another output directory or remove it first")
    there = next(parent for parent in out.parents if os.path.lexists(parent))
    if not there.is_dir():
        raise CheckpointError(f"{out} cannot be made: {there} is no directory; give another output directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(f"{out} cannot be made: {there} is not writable; give another output directory")


def _place(out: Path) -> Path:
    """Where a directory that `out` links to is, or will be: it is written on its own disk, and the link stays."""
    return Path(os.path.realpath(out)) if out.is_symlink() else out


@contextmanager
def staged(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A directory to fill that becomes `out` when the block ends well, synced to the disk; nothing is left
    of it otherwise. Raises CheckpointError before anything is written when `out` is not empty or cannot be made,
    when another process is writing it, or when the disk has less than `needed_bytes`.
    """
    check_destination(out)
    out = _place(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be made: {error.strerror}; give another output directory") from error
    free = shutil.disk_usage(out.parent).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{out.parent} has {free / 1e9:.2f} GB free, {needed_bytes / 1e9:.2f} GB are needed; "
            "free some space or choose a directory on another disk"
        )
    partial, lock = _make_partial(out)
    try:
        partial.chmod(0o777 & ~_umask())
        yield partial
        _sync_tree(partial)
        os.rename(partial, out)  # an empty directory may be in its place
        _sync(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _DISK_FAILS:
            raise CheckpointError(
                f"{out} could not be written: {error.strerror}; nothing is left of it. Free some space, or choose a "
                "directory on another disk"
            ) from error
        raise
    finally:
        os.close(lock)


@contextmanager
def uploaded(out: epath.PathLike, needed_bytes: int, last: str) -> Iterator[Path]:
    """A directory of this machine to fill whose files are copied to `out`, in an object store, when the block ends
    well: `last`, without which they are of no use, last. Raises CheckpointError as `staged` does."""
    check_destination(out)
    with (
        tempfile.TemporaryDirectory(prefix="burnish-upload-") as scratch,
        staged(Path(scratch) / "all", needed_bytes) as d,
    ):
        yield d
        with reaching(out):
            for file in sorted(d.iterdir(), key=lambda file: file.name == last):
                epath.Path(file).copy(epath.Path(out) / file.name)


@contextmanager
def reaching(out: epath.PathLike) -> Iterator[None]:
    """Turns what an object store says inside into a CheckpointError."""
    try:
        yield
    except ImportError as error:
        raise CheckpointError(f"{out} needs gcsfs; pip install 'burnish[gcs]'") from error
    except Exception as error:  # no such bucket, no credentials, no network: each library has its own
        raise CheckpointError(f"{out} cannot be used: {error or type(error).__name__}") from error


def _make_partial(out: Path) -> tuple[Path, int]:
    """A new directory beside `out`, and a file descriptor that holds it for this process."""
    prefix = f".{out.name}.burnish-partial-"
    parent = os.open(out.parent, os.O_RDONLY)
    try:
        _flock(parent, fcntl.LOCK_EX)  # one at a time from looking for others to being there
        for sibling in [p for p in out.parent.iterdir() if p.name.startswith(prefix)]:
            other = os.open(sibling, os.O_RDONLY)
            try:
                _flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(sibling)
            except BlockingIOError:
                raise CheckpointError(
                    f"{out} is being written by another process; wait for it, or give another output directory"
                ) from None
            finally:
                os.close(other)
        check_destination(out)  # the other process may have come to its end meanwhile
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
        lock = os.open(partial, os.O_RDONLY)
        _flock(lock, fcntl.LOCK_EX)
        return partial, lock
    except OSError as error:
        raise CheckpointError(f"{out} cannot be made: {error.strerror}; give another output directory") from error
    finally:
        os.close(parent)


def _flock(fd: int, operation: int) -> None:
    """Some network file systems have no locks on directories; there, two processes are not told apart."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_tree(directory: Path) -> None:
    paths = [Path(root) / name for root, _, files in os.walk(directory) for name in (*files, "")]
    with ThreadPoolExecutor(8) as pool:  # a disk takes many syncs at once in the time of one
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
