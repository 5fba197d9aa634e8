"""Writing small files whole or not at all, on local disks and on gs://.

A local file is written under a temporary name, synced and renamed; an object store makes an object visible
only when its upload is complete, so there a plain write is enough.
"""

import os
import uuid
from pathlib import Path

from etils import epath


def is_local(path: epath.PathLike) -> bool:
    """True for a path of this machine's file system, False for gs:// and other object stores."""
    return "://" not in os.fspath(path)


def write_whole(path: epath.PathLike, content: bytes | str) -> None:
    """Writes the file and its missing parent directories; a reader sees the old content or all of the new."""
    data = content.encode() if isinstance(content, str) else content
    target = epath.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not is_local(path):
        target.write_bytes(data)
        return
    temporary = Path(f"{os.fspath(path)}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(os.fspath(path))
    finally:
        temporary.unlink(missing_ok=True)
