"""A new file of known size, filled in any order from several threads, past the page cache where it can be.

What a conversion writes is not read again soon; putting it into the page cache takes more processor time than
converting it, and pushes out what is of use there. Large writes therefore go to the disk as whole blocks from an
aligned buffer of each thread (O_DIRECT). Blocks that two writes share, small writes and file systems without
direct I/O take the usual way.
"""

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

from burnish.checkpoints.errors import CheckpointError

BLOCK = max(4096, mmap.PAGESIZE)  # whole pages, so that no cached page is also written directly
_BUFFER_BYTES = 4 << 20
_SMALL_BYTES = 256 << 10

_of_thread = threading.local()


class DirectFile:
    """Close it, or use it in a with statement. Nothing is synced here."""

    def __init__(self, path: Path, size: int) -> None:
        """Makes the file at its full size. Raises CheckpointError when the disk is too full, FileExistsError
        where there is one already."""
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._direct_fd: int | None = None
        try:
            _reserve(self._fd, size, path)
            self._direct_fd = os.open(path, os.O_WRONLY | os.O_DIRECT) if hasattr(os, "O_DIRECT") else None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def write(self, data: np.ndarray, at: int) -> None:
        """Bytes (uint8, one axis, contiguous) from offset `at` on."""
        first, last = -(-at // BLOCK) * BLOCK, (at + len(data)) // BLOCK * BLOCK
        if self._direct_fd is None or last - first < _SMALL_BYTES:
            _write_at(self._fd, data, at)
            return
        _write_at(self._fd, data[: first - at], at)
        for start in range(first, last, _BUFFER_BYTES):
            block = _buffer()[: min(_BUFFER_BYTES, last - start)]
            np.copyto(block, data[start - at : start - at + len(block)])
            try:
                _write_at(self._direct_fd, block, start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                _write_at(self._fd, block, start)  # this file system wants another alignment
        _write_at(self._fd, data[last - at :], last)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _buffer() -> np.ndarray:
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)  # starts at a page
    buffer: np.ndarray = _of_thread.buffer
    return buffer


def _reserve(fd: int, size: int, file: Path) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise CheckpointError(
                f"{file}: {size / 1e9:.2f} GB cannot be reserved ({os.strerror(error.errno or 0)}); free some space "
                "or choose a directory on another disk"
            ) from error
        os.ftruncate(fd, size)


def _write_at(fd: int, data: np.ndarray, at: int) -> None:
    view = data.data
    while view:
        count = os.pwrite(fd, view[: 1 << 30], at)
        view, at = view[count:], at + count
