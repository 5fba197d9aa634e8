"""Trees of arrays on disk: every leaf gets a name and a checksum, Orbax stores the arrays.

A tree is written as nested dicts whose keys are the tree's own names ("0/mu/layers/q_proj"), so that
optimizer states made of named tuples need no special case. An array that is split over devices has a checksum for
each region, so that every process can say and compare its own. What belongs to a training checkpoint besides arrays
is store.py's subject.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

PART_BYTES = 1 << 28
"""Checksums are of parts of at most about this size, so that a reader need not hold more to know that it is whole."""

Region = tuple[tuple[int, int], ...]
"""Start and stop on each axis of an array."""


@dataclass(frozen=True)
class LeafRecord:
    """What is known of one stored array: shape, dtype name and the CRC-32 of its bytes in row-major order. An array
    that was split over devices, or is large, has one for each of several regions, and its own is that of theirs."""

    shape: tuple[int, ...]
    dtype: str
    crc32: int
    parts: tuple[tuple[Region, int], ...] = ()

    @classmethod
    def of_parts(cls, shape: tuple[int, ...], dtype: str, parts: Mapping[Region, int]) -> "LeafRecord":
        found = tuple(sorted(parts.items()))
        if len(found) == 1:
            return cls(shape, dtype, found[0][1])
        return cls(shape, dtype, zlib.crc32(b"".join(struct.pack("<I", crc32) for _, crc32 in found)), found)

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * jax.numpy.dtype(self.dtype).itemsize

    @property
    def checksums(self) -> tuple[tuple[Region, int], ...]:
        """CRC-32 of each region that has one."""
        return self.parts or ((whole(self.shape), self.crc32),)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype, "crc32": self.crc32}
        if self.parts:
            value["parts"] = [{"region": [list(axis) for axis in r], "crc32": crc32} for r, crc32 in self.parts]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "LeafRecord":
        parts = tuple(
            (tuple((int(start), int(stop)) for start, stop in part["region"]), int(part["crc32"]))
            for part in value.get("parts", ())
        )
        return cls(tuple(int(n) for n in value["shape"]), str(value["dtype"]), int(value["crc32"]), parts)


def whole(shape: tuple[int, ...]) -> Region:
    """The region that is all of an array."""
    return tuple((0, n) for n in shape)


def index_of(region: Region, within: Region | None = None) -> tuple[slice, ...]:
    """The index of a region in the array, or in a part of it that begins where `within` does."""
    starts = [0] * len(region) if within is None else [start for start, _ in within]
    return tuple(slice(a - base, b - base) for (a, b), base in zip(region, starts, strict=True))


def overlap(a: Region, b: Region) -> Region | None:
    """What two regions have in common."""
    both = tuple((max(x, y), min(m, n)) for (x, m), (y, n) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """What a device holds, from how JAX says it."""
    return tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))


def regions_of(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...]) -> dict[Region, list[jax.Device]]:
    """The different regions of an array of this shape that this process's devices hold, each with its devices.
    Without a sharding the one region is the whole."""
    if sharding is None:
        return {whole(shape): []}
    found: dict[Region, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        found.setdefault(region_of(index, shape), []).append(device)
    return found


def array_of(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, parts: Mapping[Region, np.ndarray]
) -> jax.Array | np.ndarray:
    """The array whose regions on this process are `parts`; its memory is its own, so that an update may consume it."""
    if sharding is None:
        return next(iter(parts.values()))
    pieces = [
        jax.device_put(parts[region], device, may_alias=False)
        for region, devices in regions_of(sharding, shape).items()
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


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


def record(leaf: Any, like: LeafRecord | None = None) -> LeafRecord:
    """Shape, dtype and checksums of an array or scalar that this process has whole; arrays on devices are copied to
    the host for it. With `like`, checksums of the same regions as that record's."""
    shape, dtype = np.shape(leaf), str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
    if like is None or like.shape != shape:
        return LeafRecord.of_parts(shape, dtype, own_checksums(leaf))
    array = np.asarray(leaf)
    return LeafRecord.of_parts(shape, dtype, {r: checksum(array[index_of(r)]) for r, _ in like.checksums})


def own_checksums(leaf: Any) -> dict[Region, int]:
    """CRC-32 of the regions of an array or scalar for which this process answers: of every region one device."""
    found = {}
    for region, array in _own_parts(leaf):
        for part in _cut(region, array.dtype.itemsize):
            found[part] = checksum(array[index_of(part, region)])
    return found


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the bytes in row-major order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _own_parts(leaf: Any) -> Iterator[tuple[Region, np.ndarray]]:
    if not isinstance(leaf, jax.Array):
        yield whole(np.shape(leaf)), np.asarray(leaf)
        return
    # Shard by shard: the host copy that np.asarray makes of a whole jax.Array is kept for as long as that lives.
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield region_of(shard.index, leaf.shape), np.asarray(shard.data)


def _cut(region: Region, itemsize: int) -> Iterable[Region]:
    """A region in pieces along its first axis, of PART_BYTES or one index of it."""
    row = int(np.prod([b - a for a, b in region[1:]])) * itemsize
    if not region or (region[0][1] - region[0][0]) * row <= PART_BYTES:
        return [region]
    (first, last), step = region[0], max(1, PART_BYTES // max(row, 1))
    return [((a, min(a + step, last)), *region[1:]) for a in range(first, last, step)]


def write_arrays(path: epath.Path, leaves: Mapping[str, Any]) -> None:
    """Writes named arrays and scalars as one Orbax checkpoint (OCDBT, Zarr 3). Nothing is written for no
    leaves.
    """
    if not leaves:
        return
    tree = nested({n: x if isinstance(x, jax.Array) else np.asarray(x) for n, x in leaves.items()})
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
