"""The one table from logical axes to mesh axes, and what follows from it: how parameters and activations are split.

Models name the axes of their arrays ("embed", "heads", …) and know nothing of meshes. An axis of the mesh that has
size 1 splits nothing, so that one device is no special case. Most of a program is left to the compiler (`constrain`
says how a few activations are split); where it would copy work or gather too much, `per_device` runs a function on
each device's part. Inside `per_copy` a program is that of one copy of the weights, for which there is no axis `data`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from burnish.parallel.errors import MeshError

TABLE: dict[str, tuple[str, ...]] = {
    # parameters
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "routes": (),
    "layers": (),
    "head_dim": (),
    "gate_up": (),
    "one": (),
    # activations
    "batch": ("data", "fsdp", "expert"),
    "length": (),
    "width": (),
    "drawn": ("tensor",),  # rows of a batch, while their next tokens are drawn
}

Axes = tuple[str | None, ...]
"""Logical names of an array's first axes; None and axes without a name are whole."""

REPLICATED_WHEN_FEW = ("kv_heads",)
"""Axes that stay whole where the mesh axis is a multiple of their size: several devices then have the same copy."""


def ways(axis: str | None, mesh_sizes: Mapping[str, int]) -> int:
    """Into how many parts the table splits a logical axis on a mesh of these sizes."""
    parts = 1
    for name in TABLE[axis] if axis else ():
        parts *= mesh_sizes[name]
    return parts


def divides(axis: str | None, size: int, parts: int) -> bool:
    """Whether an axis of this size can be on a mesh that splits it into so many parts."""
    return size % parts == 0 or (axis in REPLICATED_WHEN_FEW and parts % size == 0)


def partition(axes: Axes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, strict: bool = True) -> PartitionSpec:
    """How an array with these logical axes is split. A size that does not divide raises MeshError, or, where that is
    not `strict`, leaves the axis whole. What `per_copy` has split already is not split again."""
    manual = mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()
    sizes = {name: 1 if name in manual else size for name, size in mesh.shape.items()}
    parts: list[tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=False):
        parts_of = ways(axis, sizes)
        names = tuple(n for n in TABLE[axis] if sizes[n] > 1) if axis else ()
        if size % parts_of:
            if strict and not divides(axis, size, parts_of):
                raise MeshError(
                    f"{axis} has size {size}, which {parts_of} devices (mesh axis {' × '.join(names)}) do not divide"
                )
            names = ()
        parts.append(names or None)
    return PartitionSpec(*parts)


def sharding(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition(axes, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def current_mesh() -> AbstractMesh | None:
    """The mesh that the function being traced is compiled for; None where it is one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x, split as its logical axes say on the current mesh, whole along axes that do not divide; x itself where there
    is no mesh. To be called while JAX traces."""
    mesh = current_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh, strict=False))


@dataclass(frozen=True)
class Part:
    """Which part of the whole the function that `per_device` runs has before it, by logical axis. Without a mesh it
    has all of it, and every method gives its argument back."""

    names: Mapping[str, tuple[str, ...]]  # mesh axes over which a logical axis is split

    def is_split(self, axis: str) -> bool:
        return bool(self.names.get(axis))

    def index(self, axis: str) -> jax.Array | int:
        """Number of this part of the axis."""
        return jax.lax.axis_index(self.names[axis]) if self.is_split(axis) else 0

    def sum(self, x: jax.Array, axis: str) -> jax.Array:
        return jax.lax.psum(x, self.names[axis]) if self.is_split(axis) else x

    def max(self, x: jax.Array, axis: str) -> jax.Array:
        return jax.lax.pmax(x, self.names[axis]) if self.is_split(axis) else x

    def gather(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """The whole axis, which is x's `dim`."""
        return jax.lax.all_gather(x, self.names[axis], axis=dim, tiled=True) if self.is_split(axis) else x

    def own(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """This part of the whole axis, which is x's `dim`: the inverse of `gather`."""
        if not self.is_split(axis):
            return x
        size = x.shape[dim] // jax.lax.axis_size(self.names[axis])
        return jax.lax.dynamic_slice_in_dim(x, self.index(axis) * size, size, axis=dim)

    def scatter_sum(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """Sum over the parts of an axis, of which each keeps its own part along `dim`."""
        if not self.is_split(axis):
            return x
        return jax.lax.psum_scatter(x, self.names[axis], scatter_dimension=dim, tiled=True)


def per_device(
    function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any, *, checked: bool = True
) -> Callable[..., Any]:
    """`function(part, *arguments)` on each device's part of the arguments; on the whole where there is no mesh.

    `in_axes` has the logical axes of each argument, `out_axes` those of the result (a tree prefix where it is a tree of
    arrays). Axes that do not divide are whole. `checked` lets JAX follow which values differ between devices, for
    exact derivatives with no superfluous sums; it does not work with loops that start from constants.
    """

    def run(*arguments: Any) -> Any:
        mesh = current_mesh()
        if mesh is None:
            return function(Part({}), *arguments)
        specs = tuple(
            partition(axes, jnp.shape(x), mesh, strict=False) for axes, x in zip(in_axes, arguments, strict=True)
        )
        names: dict[str, tuple[str, ...]] = {}
        for axes, spec in zip(in_axes, specs, strict=True):
            for axis, part in zip(axes, spec, strict=False):
                if axis:
                    names[axis] = (part,) if isinstance(part, str) else part or ()
        out_specs = jax.tree.map(
            lambda axes: PartitionSpec(*(names[a] or None if a else None for a in axes)),
            out_axes,
            is_leaf=lambda x: isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x),
        )
        mapped = jax.shard_map(
            partial(function, Part(names)),
            mesh=mesh,
            in_specs=specs,
            out_specs=out_specs,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
            check_vma=checked,
        )
        return mapped(*arguments)

    return run


COPIES = "data"
"""The mesh axis along which the copies of the weights lie."""


def copies(mesh: Mesh) -> int:
    """How many copies of the weights the mesh holds."""
    return mesh.shape[COPIES]


def stacked(sharding: NamedSharding) -> NamedSharding:
    """For arrays with one more axis in front, of which each copy of the weights holds its own entry."""
    return NamedSharding(sharding.mesh, PartitionSpec(COPIES, *sharding.spec))


def per_copy(function: Callable[..., Any], in_split: Any, out_split: Any) -> Callable[..., Any]:
    """`function` run by each copy of the weights for itself: what it computes is exchanged with no other copy, unless
    it asks for that (`sum_over_copies`); along the other axes the compiler splits it as ever.

    `in_split` and `out_split` (tree prefixes) are True for arrays whose first axis is split over the copies and False
    for those that are the same in all of them.
    """

    def specs(split: Any) -> Any:
        return jax.tree.map(lambda s: PartitionSpec(COPIES) if s else PartitionSpec(), split)

    # Unchecked: else the derivative by what is the same in all copies would be summed over them.
    return jax.shard_map(
        function, in_specs=specs(in_split), out_specs=specs(out_split), axis_names={COPIES}, check_vma=False
    )


def sum_over_copies(x: jax.Array) -> jax.Array:
    """Within `per_copy`: the sum of all copies' x."""
    return jax.lax.psum(x, COPIES)


def max_over_copies(x: jax.Array) -> jax.Array:
    """Within `per_copy`: the largest of all copies' x."""
    return jax.lax.pmax(x, COPIES)
