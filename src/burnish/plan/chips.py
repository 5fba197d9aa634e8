"""Accelerators that a run can be planned for: what each chip holds and does, and how slices of them are called.

Peak rates are those of the vendors' public pages; usable memory is what the compiler itself allows a program on one
device, of a GPU what JAX takes of it (both are less than there is). Nothing here imports JAX, and nothing was measured
on a chip.
"""

import difflib
import math
import os
import re
from dataclasses import dataclass, replace

from burnish.plan.errors import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One kind of chip. All figures are per JAX device; `devices` of them make a chip."""

    name: str
    platform: str  # as JAX calls it
    memory: int | None  # bytes that a program may use; None: not known beforehand
    flops: float | None  # bfloat16 FLOP/s
    memory_bandwidth: float | None  # byte/s
    link_bandwidth: float | None  # byte/s of one inter-chip link in one direction; of a GPU, of all its NVLinks
    shapes: dict[int, str]  # number behind the dash -> topology
    dimensions: int = 0  # of a topology
    devices: int = 1
    links: int = 2  # that a collective uses: one axis of a torus in both directions


_TORUS_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}

# v5p-N counts TensorCores, two of which make a chip (https://docs.cloud.google.com/tpu/docs/v5p).
_TORUS_3D = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8"}

CHIPS = {
    # Rates: https://docs.cloud.google.com/tpu/docs/v6e, which compares v6e with v5e, and for the bandwidth of v6e and
    # all of v5p and tpu7x https://docs.cloud.google.com/tpu/docs/tpu7x. A link's one-way bandwidth is the published
    # bidirectional figure of a chip over twice its links (4 in a 2D torus, 6 in a 3D one). Memory: what libtpu
    # 0.0.42.1 says it has available when a program does not fit.
    "v5e": Chip("v5e", "tpu", int(15.75 * GIB), 197e12, 800e9, 400e9 / 8, _TORUS_2D, 2),
    "v5p": Chip("v5p", "tpu", int(95.74 * GIB), 459e12, 2765e9, 1200e9 / 12, _TORUS_3D, 3),
    "v6e": Chip("v6e", "tpu", int(31.24 * GIB), 918e12, 1638e9, 800e9 / 8, _TORUS_2D, 2),
    # A tpu7x chip is two devices, each with half of everything.
    "tpu7x": Chip("tpu7x", "tpu", int(94.75 * GIB), 2307e12 / 2, 7380e9 / 2, 1200e9 / 12, {}, 3, devices=2),
    # https://www.nvidia.com/en-us/data-center/h100/, the column of the SXM module, without sparsity. NVLink's 900 GB/s
    # are both directions of a GPU's 18 links, through a switch: any exchange within a node may use all of them. Memory:
    # what CUDA says that an "80 GB" module has; parse_topology leaves the part that JAX takes.
    "h100": Chip("h100", "gpu", int(79.1 * GIB), 989e12, 3350e9, 450e9, {n: str(n) for n in (1, 2, 4, 8)}, 1, links=1),
    # Virtual devices of this machine: memory is shared with everything else and rates depend on the machine.
    "cpu": Chip("cpu", "cpu", None, None, None, None, {}),
}

# JAX devices of the largest slice: a whole pod of TPUs; more virtual devices than that exhaust a machine.
_LARGEST = {"v5e": 256, "v5p": 8960, "v6e": 256, "tpu7x": 2 * 9216, "cpu": 1024}


@dataclass(frozen=True)
class Topology:
    """A slice of one kind of chip, or several slices of the same shape."""

    chip: Chip
    shape: tuple[int, ...]  # () for virtual devices
    num_slices: int
    num_devices: int  # of all slices

    @property
    def num_chips(self) -> int:
        return self.num_devices // self.chip.devices

    @property
    def name(self) -> str:
        """As the compiler of TPUs calls one slice, and as GPUs are asked for."""
        if self.chip.platform == "gpu":
            return f"{self.chip.name}-{self.num_devices}"
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips_per_host(self) -> tuple[int, ...]:
        """Bounds of one host: the single-host slice of eight has them all, larger slices have hosts of four."""
        if self.shape == (2, 4):
            return (2, 4, 1)
        return (*(min(2, n) for n in self.shape[:2]), 1)

    def describe(self) -> str:
        if not self.shape:
            return f"{self.num_devices} virtual CPU devices"
        if self.chip.platform == "gpu":
            return f"{self.num_devices} {self.chip.name.upper()} GPU{'s' if self.num_devices > 1 else ''} of one node"
        slices = f"{self.num_slices} slices of " if self.num_slices > 1 else ""
        chips = self.num_chips // self.num_slices
        return f"{slices}{chips} {self.chip.name} chips ({'x'.join(map(str, self.shape))})"


def parse_topology(text: str, num_slices: int = 1) -> Topology:
    """`v6e-8`, `v6e:2x4`, `h100-8` or `cpu-8` -> Topology of `num_slices` such slices. Raises PlanError."""
    match = re.fullmatch(r"([a-z][a-z0-9]*?)(?:-(\d+)|:(\d+(?:x\d+)*))", text.strip().lower())
    if match is None:
        raise PlanError(
            f"topology={text!r} is not one: write a chip and a number (v6e-8, h100-8) or a shape (v6e:2x4), or cpu-8 "
            f"for virtual devices; chips: {', '.join(CHIPS)}"
        )
    name, count, shape = match.groups()
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.3)
        raise PlanError(
            f"topology={text}: {name} is not a known chip{f'; did you mean {near[0]}?' if near else ''}; chips: "
            f"{', '.join(CHIPS)}"
        )
    chip = CHIPS[name]
    if chip.platform == "cpu":
        if count is None or int(count) < 1:
            raise PlanError(f"topology={text}: virtual devices have no shape: write cpu-8 for eight of them")
        if num_slices > 1:
            raise PlanError(
                f"topology={text} with dcn_data_parallelism={num_slices}: virtual devices are of no slice; leave out "
                "dcn_data_parallelism, or plan for a TPU topology"
            )
        _check_size(text, chip, int(count))
        return Topology(chip, (), 1, int(count))
    if chip.platform == "gpu":
        if count is None or int(count) not in chip.shapes:
            known = ", ".join(f"{name}-{n}" for n in chip.shapes)
            raise PlanError(
                f"topology={text}: GPUs are planned for within one node, where NVLink joins them: write one of {known}"
            )
        if num_slices > 1:
            raise PlanError(
                f"topology={text} with dcn_data_parallelism={num_slices}: GPUs are planned for within one node only, "
                "because rates between nodes are not those of NVLink; leave out dcn_data_parallelism"
            )
        assert chip.memory is not None
        chip = replace(chip, memory=int(memory_share() * chip.memory))
        return Topology(chip, (int(count),), 1, int(count))
    if count is not None:
        if int(count) not in chip.shapes:
            known = ", ".join(f"{name}-{n} ({s})" for n, s in chip.shapes.items())
            raise PlanError(
                f"topology={text}: there is no {name} slice of that name"
                + (f"; there are {known}; or write a shape ({name}:{'x'.join('2' * chip.dimensions)})" if known else
                   f"; write its shape, as in {name}:2x2x1")
            )  # fmt: skip
        shape = chip.shapes[int(count)]
    sizes = tuple(int(n) for n in str(shape).split("x"))
    if len(sizes) != chip.dimensions or 0 in sizes:
        example = next(iter(chip.shapes.values()), "2x2x1")
        raise PlanError(f"topology={text}: a {name} slice has {chip.dimensions} sizes above 0, as in {name}:{example}")
    _check_size(text, chip, math.prod(sizes) * chip.devices)
    return Topology(chip, sizes, num_slices, math.prod(sizes) * chip.devices * num_slices)


def memory_share() -> float:
    """The part of a GPU's memory that JAX takes when it starts, by the environment variable (the second is its older
    name) that is taken to be the same where the run will be. Raises PlanError."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := os.environ.get(name):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise PlanError(
                    f"{name}={text} (environment) is no share of a GPU's memory: write one above 0, at most 1"
                )
            return share
    return 0.75


def _check_size(text: str, chip: Chip, num_devices: int) -> None:
    largest = _LARGEST.get(chip.name, num_devices)
    if num_devices > largest:
        what = "virtual devices" if chip.platform == "cpu" else "chips"
        raise PlanError(f"topology={text}: at most {largest // chip.devices:,} {what} can be planned for at once")
