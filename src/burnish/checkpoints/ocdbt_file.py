"""Writes an OCDBT database on a local disk in one go: values to one data file as they come, then one B+tree
leaf with their places, then the manifest that makes it a database.

TensorStore reads and writes OCDBT too, but commits each batch of values with a new tree and through the page
cache. Left out: values inside nodes, several levels (a leaf holds a million entries, 4 TB of weights),
compression of nodes.

Source: the storage format in TensorStore's documentation of its OCDBT driver.
"""

import os
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.checkpoints.direct_file import BLOCK, DirectFile

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_MAX_NODE_BYTES = 8 << 20
_MAX_INLINE_BYTES = 100
_ARITY_LOG2 = 4


def stored_bytes(nbytes: int) -> int:
    """What a value of `nbytes` takes in the data file: values start at whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class OcdbtFile:
    """A new database. Values may be put from several threads; nothing can be read before `finish`. Close it
    in any case."""

    def __init__(self, directory: Path, capacity: int) -> None:
        """`capacity` is the sum of the values' `stored_bytes`. Raises CheckpointError when the disk is too
        full."""
        self._directory = directory
        self._data_path = f"d/{secrets.token_hex(16)}"
        (directory / "d").mkdir(parents=True)
        self._file = DirectFile(directory / self._data_path, capacity)
        self._places: dict[bytes, tuple[int, int]] = {}
        self._end = 0
        self._lock = threading.Lock()

    def put(self, key: str, value: np.ndarray) -> None:
        """Store bytes (uint8, one axis) under a key."""
        with self._lock:
            offset = self._end
            self._end += stored_bytes(len(value))
            self._places[key.encode()] = (offset, len(value))
        self._file.write(value, offset)

    def finish(self) -> None:
        """Write the tree and the manifest."""
        keys = sorted(self._places)
        node = _leaf(keys, [self._places[key] for key in keys], self._data_path)
        self._file.write(np.frombuffer(node, np.uint8), self._end)
        self._file.truncate(self._end + len(node))
        value_bytes = sum(length for _, length in self._places.values())
        config = (
            os.urandom(16) + _varints([0, _MAX_INLINE_BYTES, _MAX_NODE_BYTES]) + bytes([_ARITY_LOG2]) + _varints([0])
        )
        # One version (generation 1, root of height 0), whose root is the node; no older versions.
        version = _varints([1, 1]) + bytes([0]) + _varints([0, self._end, len(node), len(keys), len(node), value_bytes])
        body = config + _files(self._data_path) + version + struct.pack("<Q", time.time_ns()) + _varints([0])
        (self._directory / MANIFEST).write_bytes(_framed(_MANIFEST_MAGIC, body))

    def close(self) -> None:
        self._file.close()


def _leaf(keys: Sequence[bytes], places: Sequence[tuple[int, int]], data_path: str) -> bytes:
    """A B+tree leaf whose values all lie in one data file. No key leaves out what it shares with the one
    before."""
    body = bytes([0]) + _files(data_path) + _varints([len(keys)])
    body += _varints([0] * (len(keys) - 1)) + _varints([len(key) for key in keys]) + b"".join(keys)
    body += _varints([length for _, length in places]) + bytes([1]) * len(keys)  # 1: not in the node
    body += _varints([0] * len(keys)) + _varints([offset for offset, _ in places])
    return _framed(_NODE_MAGIC, body)


def _files(path: str) -> bytes:
    """A table of one data file: the length of its path, that of the part it hands down to nodes it holds."""
    return _varints([1, len(path), 0]) + path.encode()


def _framed(magic: int, body: bytes) -> bytes:
    """Magic, length, version 0, no compression, body, CRC-32C of all of it."""
    content = struct.pack(">I", magic) + struct.pack("<Q", 12 + 2 + len(body) + 4) + bytes([0, 0]) + body
    return content + struct.pack("<I", crc32c(content))


def _varints(numbers: Sequence[int]) -> bytes:
    """Little-endian groups of seven bits, the high bit set on all but the last."""
    out = bytearray()
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [c >> 1 ^ (0x82F63B78 if c & 1 else 0) for c in table]
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC, byte by byte: only nodes and manifests are summed."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
