"""Weights from one mesh to another: on the same devices, or from the trainer's to the sampler's.

Arrays are cut out of their stacks, cast, and laid out for the receiver on the sender's devices, where links are
fastest; what then crosses to other devices is whole shards, each copied from one device to another. Across devices
every array is summed up on both sides (`checksum`), so that one that went missing, was changed or took another's place
is found before it is used.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from burnish.parallel.errors import MeshError
from burnish.parallel.mesh import AXES, on


class TransferError(MeshError):
    """Weights did not arrive as they were sent."""


@dataclass(frozen=True)
class Piece:
    """One array of the receiver: `source`, or its part `index` along the first axis, to be laid out as `target`."""

    name: str
    source: Any  # jax.Array or NumPy array
    index: int | None
    target: NamedSharding


@dataclass(frozen=True)
class Transfer:
    """What was moved between devices."""

    version: int
    num_arrays: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        size = self.num_bytes / 1e9
        return (
            f"Reshard finished: weights of version {self.version}, {self.num_arrays} arrays, {size:.3g} GB in "
            f"{self.seconds:.3g} s ({size / max(self.seconds, 1e-9):.3g} GB/s)"
        )


def checksum(x: jax.Array) -> jax.Array:
    """() uint32, a sum of all bits of x weighted by their place: exact, and the same however x is split."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    place = jnp.uint32(1)
    for axis in range(x.ndim):
        # An odd factor loses no bit.
        place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def relaid(pieces: Sequence[Piece], dtype: Any) -> list[jax.Array]:
    """Copies of the pieces in `dtype` on their targets, whose devices are the sources' (or the sources are on none)."""
    layouts = tuple(p.target for p in pieces)
    sent = _layouts_on_sender(pieces)
    with on(_mesh(sent[0])):
        arrays, _ = cutter(dtype, _ways(pieces, sent), summed=False)(_arrays(pieces), _indices(pieces))
    return [x if a == b else jax.device_put(x, b) for x, a, b in zip(arrays, sent, layouts, strict=True)]


def send(pieces: Sequence[Piece], dtype: Any, version: int, chunk_size: int | None) -> tuple[dict[str, Any], Transfer]:
    """The pieces, by name, in `dtype` on their targets, which are other devices than the sources': `chunk_size` at
    a time (None: all), each of them once. Raises TransferError."""
    start = time.perf_counter()
    received: dict[str, jax.Array] = {}
    sums_sent: dict[str, jax.Array] = {}
    size = chunk_size or len(pieces)
    for i in range(0, len(pieces), size):
        chunk = pieces[i : i + size]
        sent = _layouts_on_sender(chunk)
        with on(_mesh(sent[0])):
            arrays, sums = cutter(dtype, _ways(chunk, sent), summed=True)(_arrays(chunk), _indices(chunk))
        sums_sent |= {p.name: s for p, s in zip(chunk, sums, strict=True)}
        arrived = _copy({p.name: x for p, x in zip(chunk, arrays, strict=True)}, {p.name: p.target for p in chunk})
        if chunk_size is not None:
            jax.block_until_ready(arrived)  # so that no more than a chunk is held twice
        received |= arrived
    _verify(version, sums_sent, received, _mesh(pieces[0].target))
    num_bytes = sum(x.nbytes for x in received.values())
    return received, Transfer(version, len(received), num_bytes, time.perf_counter() - start)


def same_devices(mesh: Mesh, tree: Any) -> bool:
    """Whether a compiled function can read this tree and write to the mesh: all its arrays are on the mesh's devices,
    or on none in particular."""
    devices = set(mesh.devices.flat)
    return all(
        not isinstance(x, jax.Array) or not x.committed or x.sharding.device_set == devices
        for x in jax.tree.leaves(tree)
    )


def _arrays(pieces: Sequence[Piece]) -> tuple[Any, ...]:
    """The sources; of those on the host only what is wanted."""
    return tuple(
        p.source[p.index] if isinstance(p.source, np.ndarray) and p.index is not None else p.source for p in pieces
    )


def _indices(pieces: Sequence[Piece]) -> tuple[np.int32 | None, ...]:
    return tuple(None if p.index is None or isinstance(p.source, np.ndarray) else np.int32(p.index) for p in pieces)


def _layouts_on_sender(pieces: Sequence[Piece]) -> tuple[NamedSharding, ...]:
    """The targets' layouts on the devices that the sources are on: the same number of parts, in the same order."""
    return tuple(
        layout_on(p.source.sharding, p.target) if isinstance(p.source, jax.Array) and p.source.committed else p.target
        for p in pieces
    )


@lru_cache(maxsize=1024)
def layout_on(source: Sharding, target: NamedSharding) -> NamedSharding:
    """The target's layout on the devices of the source: as many parts, in the same order."""
    devices = list(source.mesh.devices.flat) if isinstance(source, NamedSharding) else list(source.device_set)
    if devices == list(target.mesh.devices.flat):
        return target
    sizes = [target.mesh.shape[axis] for axis in AXES]
    parts = math.prod(sizes[1:])
    if math.prod(sizes) == len(devices):
        shape = sizes
    elif len(devices) % parts == 0:
        shape = [len(devices) // parts, *sizes[1:]]
    else:  # the parts differ then, and the copy goes through the host
        return NamedSharding(Mesh(np.array(devices).reshape(-1, 1, 1, 1), AXES), PartitionSpec())
    return NamedSharding(Mesh(np.array(devices).reshape(shape), AXES), target.spec)


Way = tuple[NamedSharding, ...]
"""Layouts that an array goes through, the last of which is wanted."""


def _ways(pieces: Sequence[Piece], sent: Sequence[NamedSharding]) -> tuple[Way, ...]:
    return tuple(
        way_to(layout, p.source.sharding, p.source.shape, p.index is not None)
        if isinstance(p.source, jax.Array) and p.source.committed
        else (layout,)
        for p, layout in zip(pieces, sent, strict=True)
    )


@lru_cache(maxsize=1024)
def way_to(layout: NamedSharding, source: Sharding, shape: tuple[int, ...], stacked: bool) -> Way:
    """From the source's layout (or that of its parts along the first axis, if it is stacked) to this one of the same
    devices in the same order, in steps each of which the compiler knows a small exchange for.

    Left to itself, the compiler gathers whole arrays where parts of the source are on several devices, or parts of the
    result are. Steps: as it is; each device its part of what it has; parts of one axis for parts of another; those in
    the wanted order; what is still split and shall not be is gathered.
    """
    if not isinstance(source, NamedSharding) or source.mesh.size == 1:
        return (layout,)
    if stacked:
        source, shape = NamedSharding(source.mesh, PartitionSpec(*source.spec[1:])), shape[1:]
    fine = _common(_mesh(source), _mesh(layout))
    if fine is None:
        return (source, layout)
    have, want = (_spread_over(fine, x, len(shape)) for x in (source, layout))
    held = {name for axis in have for name in axis}
    # New parts cost nothing; of those that go to another axis one at a time, for the compiler knows no two at once.
    step = [(*axis, *(n for n in aim if n not in held)) for axis, aim in zip(have, want, strict=True)]
    steps = [have, step]
    for to, aim in enumerate(want):
        for name in aim:
            if name not in step[to]:
                step = [tuple(n for n in axis if n != name) for axis in step]
                step[to] = (*step[to], name)
                steps.append(step)
    steps += [[(*aim, *(n for n in axis if n not in aim)) for axis, aim in zip(step, want, strict=True)], want]
    if any(size % math.prod(fine.shape[n] for n in axis) for x in steps for size, axis in zip(shape, x, strict=True)):
        return (source, layout)
    way = [NamedSharding(fine, PartitionSpec(*(axis or None for axis in x))) for x in steps[:-1]]
    return (*(x for i, x in enumerate(way) if i == 0 or x != way[i - 1]), layout)


def _common(a: Mesh, b: Mesh) -> Mesh | None:
    """The mesh of which the axes of both, of the same devices in the same order, are groups of axes that follow one
    another; None where there is none."""
    ends = sorted({1} | {math.prod(x.devices.shape[i:]) for x in (a, b) for i in range(x.devices.ndim)})
    if any(after % before for before, after in itertools.pairwise(ends)):
        return None
    sizes = [after // before for before, after in itertools.pairwise(ends)][::-1]
    return Mesh(a.devices.reshape(sizes), tuple(f"part {i}" for i in range(len(sizes))))


def _spread_over(fine: Mesh, sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """For each of an array's axes the axes of a finer mesh that it is split over."""
    mesh = sharding.mesh
    names: dict[str, tuple[str, ...]] = dict.fromkeys(mesh.axis_names, ())
    left = list(fine.axis_names)
    for axis, size in mesh.shape.items():
        while math.prod(fine.shape[n] for n in names[axis]) < size:
            names[axis] = (*names[axis], left.pop(0))
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    return [tuple(n for axis in ((e,) if isinstance(e, str) else e or ()) for n in names[axis]) for e in spec]


def _mesh(layout: NamedSharding) -> Mesh:
    assert isinstance(layout.mesh, Mesh)
    return layout.mesh


@lru_cache(maxsize=1024)
def cutter(dtype: Any, ways: tuple[Way, ...], *, summed: bool) -> jax.stages.Wrapped:
    """A compiled function of arrays and indices into those that are stacked (None for the others), that returns what is
    wanted of each in `dtype` at the end of its way, and checksums. These are copies, never the arrays themselves: their
    owner gives them away to its next update."""

    def cut_out(
        arrays: tuple[jax.Array, ...], indices: tuple[jax.Array | None, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        parts = []
        for x, index, way in zip(arrays, indices, ways, strict=True):
            if index is not None:
                x = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
            x = jnp.array(x, dtype, copy=True)
            for layout in way if way[-1].mesh.size > 1 else ():
                x = jax.lax.with_sharding_constraint(x, layout)
            parts.append(x)
        return parts, [checksum(x) for x in parts] if summed else []

    # A constraint alone does not keep the compiler from returning whole arrays.
    return jax.jit(cut_out, out_shardings=([way[-1] for way in ways], None))


def _copy(arrays: Mapping[str, jax.Array], targets: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
    """From the sender's devices to the receiver's."""
    return dict(zip(arrays, jax.device_put(list(arrays.values()), [targets[name] for name in arrays]), strict=True))


_checksums = jax.jit(lambda arrays: [checksum(x) for x in arrays])


def _verify(
    version: int, sums_sent: Mapping[str, jax.Array], received: Mapping[str, jax.Array], receiver: Mesh
) -> None:
    what = f"transfer of weights, version {version}"
    for name in sorted(sums_sent.keys() ^ received.keys()):
        raise TransferError(f"{what}: {name} {'did not arrive' if name in sums_sent else 'was not sent'}")
    names = list(received)
    with on(receiver):
        sums = jax.device_get(_checksums([received[name] for name in names]))
    for name, got in zip(names, sums, strict=True):
        if got != (sent := np.asarray(sums_sent[name])):
            raise TransferError(f"{what}: {name} is not what was sent (checksum {got:08x}, sent {int(sent):08x})")
