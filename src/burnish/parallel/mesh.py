"""Meshes: which devices hold which part of an array.

A mesh has always the same four axes; an axis that is not used has size 1. `data` copies weights, `fsdp` splits them
and gathers each layer when it is needed, `expert` splits experts, `tensor` splits heads, MLP width and vocabulary. The
rows of a batch are split over the first three. Several slices lie along `data`, where least is exchanged.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from burnish.parallel.errors import MeshError

AXES = ("data", "fsdp", "expert", "tensor")


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the axes within a slice, -1 (one at most) for what is left over, and the number of slices."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    slices: int = 1
    prefix: str = "ici"
    """How the options are called whose values these are: <prefix>_<axis>_parallelism."""

    def option(self, axis: str) -> str:
        return f"{self.prefix}_{axis}_parallelism"

    def resolve(self, num_devices: int) -> "MeshSizes":
        """The same with every size known and their product `num_devices`. Raises MeshError."""
        slices = 1 if self.slices == -1 else self.slices
        if num_devices % slices:
            there_are = "there is one device" if num_devices == 1 else f"there are {num_devices} devices"
            raise MeshError(f"dcn_data_parallelism={slices} is not possible: {there_are}, which it has to divide")
        per_slice = num_devices // slices
        sizes = {axis: getattr(self, axis) for axis in AXES}
        words = " × ".join(f"{self.option(a)}={n}" for a, n in sizes.items() if n != 1) or f"{self.prefix}_* all 1"
        left_over = [axis for axis, size in sizes.items() if size == -1]
        known = math.prod(size for size in sizes.values() if size != -1)
        if len(left_over) > 1:
            raise MeshError(f"{words}: at most one axis can be what is left over (-1)")
        if per_slice % known or (not left_over and per_slice != known):
            if left_over:
                raise MeshError(
                    f"{words}: there are {per_slice} devices{' in a slice' if slices > 1 else ''}, which {known} does "
                    "not divide, so that -1 can not be what is left over"
                )
            raise MeshError(
                f"{words} makes {known} devices, but there are {per_slice}{' in a slice' if slices > 1 else ''}; the "
                f"product must be {per_slice}, and -1 takes what is left over"
            )
        if left_over:
            sizes[left_over[0]] = per_slice // known
        return MeshSizes(**sizes, slices=slices, prefix=self.prefix)


def make_mesh(devices: Sequence[jax.Device], sizes: MeshSizes, *, allow_split_physical_axes: bool = False) -> Mesh:
    """A mesh over all of `devices`, its axes laid along the machine's own where it has any. Raises MeshError."""
    sizes = sizes.resolve(len(devices))
    # Without slices of their own, devices are told apart by process.
    found = len({getattr(device, "slice_index", device.process_index) for device in devices})
    if sizes.slices > 1 and sizes.slices != found:
        raise MeshError(f"dcn_data_parallelism={sizes.slices}, but the devices are of {found} slices; -1 takes those")
    shape = tuple(getattr(sizes, axis) for axis in AXES)
    try:
        if sizes.slices > 1:
            array = mesh_utils.create_hybrid_device_mesh(
                shape,
                (sizes.slices, 1, 1, 1),
                devices,
                process_is_granule=not hasattr(devices[0], "slice_index"),
                allow_split_physical_axes=allow_split_physical_axes,
            )
        else:
            array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=allow_split_physical_axes)
    except (NotImplementedError, ValueError) as error:
        raise MeshError(
            f"these devices can not be laid out as {dict(zip(AXES, shape, strict=True))} on {sizes.slices} slices: "
            f"{error}; allow_split_physical_axes=true lets an axis span parts of several physical ones"
        ) from error
    return Mesh(array, AXES)


def single_device_mesh(device: jax.Device | None = None) -> Mesh:
    """The mesh of one device (the default one)."""
    return Mesh(np.array([device or jax.devices()[0]]).reshape(1, 1, 1, 1), AXES)


def on(mesh: Mesh) -> AbstractContextManager:
    """Within it, compiled functions run on `mesh`, and `rules.constrain` refers to it."""
    return jax.set_mesh(mesh)


def platform() -> str:
    """Where the function that is being traced will run ("cpu", "tpu", "gpu"): on the mesh of `on`, which may be one
    of devices that are not there (`burnish plan`), else on this machine's own devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
