"""Which devices train and which sample, and their meshes.

By default all devices do both in turn. With fractions, the first ones train and the last ones sample; that takes one
process that controls all of them, because weights then go from some devices to others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from burnish.config.devices import SamplerMeshOptions, TrainerMeshOptions
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError
from burnish.models.params import ParamInfo, param_infos
from burnish.models.spec import ModelSpec
from burnish.parallel import rules
from burnish.parallel.errors import MeshError
from burnish.parallel.mesh import MeshSizes, make_mesh

WHOLE = 0.01
"""How far from a whole number of devices a share may be: thirds and sevenths have no exact decimals."""


@dataclass(frozen=True)
class Devices:
    """The same devices twice, or two sets without a common one."""

    trainer: tuple[jax.Device, ...]
    sampler: tuple[jax.Device, ...]

    @property
    def split(self) -> bool:
        return self.trainer != self.sampler


def choose_devices(cfg: RunConfig, devices: Sequence[jax.Device] | None = None) -> Devices:
    """The devices of the options, of all there are. Raises BurnishError where the shares can not be had."""
    everything = tuple(jax.devices() if devices is None else devices)
    if not cfg.has_split_devices:
        return Devices(everything, everything)
    names = {
        "trainer_devices_fraction": cfg.trainer_devices_fraction,
        "sampler_devices_fraction": cfg.sampler_devices_fraction,
    }
    given = " and ".join(f"{name}={fraction:g}" for name, fraction in names.items())
    if len(everything) == 1:
        raise BurnishError(f"{given}: there is one device, which has to do both; give 1 and 1, or leave them out")
    if jax.process_count() > 1:
        raise BurnishError(
            f"{given} move weights between devices of different processes, of which there are {jax.process_count()}: "
            "that takes one that controls all devices (Pathways, JAX_PLATFORMS=proxy); without it give 1 and 1"
        )
    counts = []
    for name, fraction in names.items():
        exact = len(everything) * fraction
        count = round(exact)
        if count < 1 or abs(exact - count) > WHOLE:
            raise BurnishError(
                f"{name}={fraction:g} of {len(everything)} devices is {exact:.4g}; it must come to a whole number of "
                f"them, so be a multiple of 1/{len(everything)}"
            )
        counts.append(count)
    return Devices(everything[: counts[0]], everything[len(everything) - counts[1] :])


def sampler_mesh(cfg: SamplerMeshOptions, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of rollout_{data,expert,tensor}_parallelism. Raises MeshError where the sizes are not those of the
    devices."""
    return make_mesh(devices, sampler_sizes(cfg, devices), allow_split_physical_axes=cfg.allow_split_physical_axes)


def sampler_sizes(cfg: SamplerMeshOptions, devices: Sequence[jax.Device]) -> MeshSizes:
    """Sizes of the sampler's mesh axes on these devices. Raises MeshError."""
    return MeshSizes(
        data=cfg.rollout_data_parallelism,
        expert=cfg.rollout_expert_parallelism,
        tensor=cfg.rollout_tensor_parallelism,
        prefix="rollout",
    ).resolve(len(devices))


def trainer_mesh(cfg: TrainerMeshOptions, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of ici_{data,fsdp,expert,tensor}_parallelism and dcn_data_parallelism. Raises MeshError where the sizes
    are not those of the devices."""
    return make_mesh(devices, trainer_sizes(cfg, devices), allow_split_physical_axes=cfg.allow_split_physical_axes)


def trainer_sizes(cfg: TrainerMeshOptions, devices: Sequence[jax.Device]) -> MeshSizes:
    """Sizes of the trainer's mesh axes on these devices. Raises MeshError."""
    slices = cfg.dcn_data_parallelism
    if slices == -1:
        slices = len({getattr(device, "slice_index", 0) for device in devices})
    return MeshSizes(
        data=cfg.ici_data_parallelism,
        fsdp=cfg.ici_fsdp_parallelism,
        expert=cfg.ici_expert_parallelism,
        tensor=cfg.ici_tensor_parallelism,
        slices=slices,
    ).resolve(len(devices))


def describe(cfg: RunConfig, trainer: Mesh, sampler: Mesh) -> list[str]:
    """Who does what on which devices, in words; one device alone is not named."""

    def words(mesh: Mesh) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "whole"

    if not cfg.has_split_devices:
        lines = []
        if trainer.size > 1:
            lines.append(f"Devices: {trainer.size} train ({words(trainer)}) and sample ({words(sampler)}) in turn.")
        if cfg.rl.reshard_chunk_size is not None and cfg.rollout_engine == "builtin":
            lines.append("rl.reshard_chunk_size changes nothing: the sampler has the trainer's devices.")
        return lines
    when = "while the others train" if cfg.rl.off_policy_steps else "in turn with them"
    return [f"Devices: {trainer.size} train ({words(trainer)}), {sampler.size} sample {when} ({words(sampler)})."]


def check_model(spec: ModelSpec, sizes: MeshSizes) -> None:
    """Raises MeshError where these (resolved) sizes do not divide those of the model: each option that has to be
    another, with the sizes that would do. To be called before weights are read or anything is compiled."""
    axes: dict[str, set[tuple[str, int]]] = {}
    for info in jax.tree.leaves(param_infos(spec), is_leaf=lambda x: isinstance(x, ParamInfo)):
        for axis, size in zip(info.axes, info.shape, strict=True):
            for name in rules.TABLE[axis]:
                axes.setdefault(name, set()).add((axis, size))
    problems = []
    for name, found in axes.items():
        parts = getattr(sizes, name)
        wrong = [f"{axis} ({size})" for axis, size in sorted(found) if not rules.divides(axis, size, parts)]
        if wrong:
            largest = max(size for _, size in found)
            fit = [n for n in range(1, largest + 1) if all(rules.divides(axis, size, n) for axis, size in found)]
            problems.append(
                f"{sizes.option(name)}={parts} does not divide the model's {', '.join(wrong)}; "
                f"sizes that would do: {', '.join(map(str, fit))}"
            )
    if sizes.expert > 1 and "expert" not in axes:
        problems.append(f"{sizes.option('expert')}={sizes.expert}: the model has no experts; it must be 1")
    if problems:
        raise MeshError("; ".join(problems))
