"""Trees of arrays on disk: every leaf gets a name and a checksum, Orbax stores the arrays.

A tree is written as nested dicts whose keys are the tree's own names ("0/mu/layers/q_proj"), so that
optimizer states made of named tuples need no special case, and reading goes group by group so that memory
stays bounded by the group (or the largest leaf). What belongs to a training checkpoint besides arrays is
store.py's subject.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

READ_GROUP_BYTES = 1 << 28  # leaves are read back in groups of about this size
CHUNK_BYTES = 1 << 22  # arrays are stored in chunks of at most this size, of which a reader holds a few at a time


@dataclass(frozen=True)
class LeafRecord:
    """What is known of one stored array: shape, dtype name and the CRC-32 of its bytes in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    crc32: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * jax.numpy.dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype, "crc32": self.crc32}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "LeafRecord":
        return cls(tuple(int(n) for n in value["shape"]), str(value["dtype"]), int(value["crc32"]))


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, in tree order: names of dict keys, fields and positions joined by "/".

    Raises ValueError for a tree that is a single leaf, for two leaves of one name and for a leaf that is a
    typed PRNG key, which has no bytes of its own (store `jax.random.key_data(key)`).
    """
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not path:
            raise ValueError(f"a tree with named leaves is needed, this is a single {type(leaf).__name__}")
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"leaf {name} is a typed PRNG key; store jax.random.key_data of it")
        if name in leaves:
            raise ValueError(f'two leaves are named {name}: keys must not contain "/"')
        leaves[name] = leaf
    return leaves


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def record(leaf: Any) -> LeafRecord:
    """Shape, dtype and checksum of an array or scalar; arrays on a device are copied to the host for it."""
    array = _on_host(leaf)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return LeafRecord(array.shape, str(array.dtype), zlib.crc32(data.data))


def _on_host(leaf: Any) -> np.ndarray:
    """The leaf as a NumPy array. A jax.Array keeps the host copy that np.asarray makes of it for as long as
    it lives; going through its shard leaves the copy with a temporary instead, so that a checkpoint of
    parameters that stay in use does not hold a second set of them on the host.
    """
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(leaf)


def write_arrays(path: epath.Path, leaves: Mapping[str, Any]) -> None:
    """Writes named arrays and scalars as one Orbax checkpoint (OCDBT, Zarr 3). Nothing is written for no
    leaves.
    """
    if not leaves:
        return
    tree = nested({n: x if isinstance(x, jax.Array) else np.asarray(x) for n, x in leaves.items()})
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))


def read_arrays(
    path: epath.Path, records: Mapping[str, LeafRecord], group_bytes: int = READ_GROUP_BYTES
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) for each recorded leaf, holding about `group_bytes` (or one leaf) at a time.

    The arrays are not compared with the records here. Raises what Orbax and TensorStore raise for a
    checkpoint that cannot be read: ValueError, KeyError or OSError.
    """
    with _checkpointer() as checkpointer:
        for group in _groups(records, group_bytes):
            restored = checkpointer.restore(
                path,
                args=ocp.args.PyTreeRestore(
                    item=nested(dict.fromkeys(group, 0)),
                    restore_args=nested(dict.fromkeys(group, ocp.RestoreArgs(restore_type=np.ndarray))),
                    partial_restore=True,
                ),
            )
            arrays = named_leaves(restored)
            del restored
            for name in group:
                yield name, np.asarray(arrays.pop(name))


def _groups(records: Mapping[str, LeafRecord], group_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, leaf in records.items():
        if group and size + leaf.num_bytes > group_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += leaf.num_bytes
    if group:
        yield group


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
