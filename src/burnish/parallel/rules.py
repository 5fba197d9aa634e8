"""The one table from logical axes to mesh axes, and what follows from it: how parameters and activations are split.

Models name the axes of their arrays ("embed", "heads", …) and know nothing of meshes. An axis of the mesh that has
size 1 splits nothing, so that one device is no special case.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from burnish.parallel.errors import MeshError

TABLE: dict[str, tuple[str, ...]] = {
    # parameters
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "layers": (),
    "head_dim": (),
    "gate_up": (),
    "one": (),
    # activations
    "batch": ("data", "fsdp", "expert"),
    "length": (),
    "width": (),
}

REPLICATED_WHEN_FEW = ("kv_heads",)
"""Axes that stay whole where the mesh axis is larger than they are, or no divisor: every device of it has a copy."""


def partition(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | jax.sharding.AbstractMesh
) -> PartitionSpec:
    """How an array with these logical axes (None: whole) is split. Raises MeshError where a size does not divide."""
    parts: list[tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        names = tuple(n for n in TABLE[axis] if mesh.shape[n] > 1) if axis else ()
        ways = 1
        for name in names:
            ways *= mesh.shape[name]
        if size % ways:
            if axis not in REPLICATED_WHEN_FEW:
                raise MeshError(_does_not_divide(str(axis), size, names, ways))
            names = ()
        parts.append(names or None)
    return PartitionSpec(*parts)


def sharding(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x, split as its logical axes say on the mesh that the function is compiled for; x itself where there is none.

    To be called while JAX traces.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def _does_not_divide(axis: str, size: int, names: tuple[str, ...], ways: int) -> str:
    fits = [str(n) for n in range(1, size + 1) if size % n == 0 and n <= 4 * ways]
    return (
        f"{axis} has size {size}, which can not be split over {ways} devices (mesh axis {' × '.join(names)}); "
        f"sizes that would do: {', '.join(fits)}"
    )
