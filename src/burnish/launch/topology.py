"""Machine types and slices: how many hosts of how many chips a `--compute-type` and a `--topology` come to.

One table says what each TPU generation is called by GKE and by Pathways and which machine types it has; the valid
shapes of a slice follow from the generation. What is free in a zone, what it costs and GPUs are left out.
"""

import math
import re
from dataclasses import dataclass

from burnish.launch.errors import LaunchError

_FLAT_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


@dataclass(frozen=True)
class Generation:
    """A TPU generation."""

    name: str  # as in a shorthand: v6e-32
    accelerator: str  # GKE's node label cloud.google.com/gke-tpu-accelerator
    pathways: str  # Pathways' instance type is `<pathways>:<topology>`
    machine_types: tuple[str, ...]  # smallest first; the suffix -4t says 4 chips a host
    dimensions: int  # of a topology
    cores_per_unit: int  # chips × this is the number in a shorthand: v5p-8 is 4 chips
    aliases: tuple[str, ...] = ()

    def shape_is_valid(self, shape: tuple[int, ...]) -> bool:
        if self.dimensions == 2:
            return _shape_text(shape) in _FLAT_SHAPES
        if shape == (2, 2, 1):
            return True
        if len(shape) != 3 or list(shape) != sorted(shape) or math.prod(shape) > 16 * 16 * 24:
            return False
        small = {(2, 2, 2), (2, 2, 4), (2, 4, 4)}
        return shape in small or all(length % 4 == 0 for length in shape)

    def shape_words(self) -> str:
        if self.dimensions == 2:
            return ", ".join(_FLAT_SHAPES)
        return "2x2x1, 2x2x2, 2x2x4, 2x4x4, and AxBxC of multiples of 4, smallest first (4x4x4, 4x4x8, …)"

    def shape_of(self, chips: int) -> tuple[int, ...] | None:
        """The shape of a slice of so many chips: of several, the one nearest to a square or cube."""
        if self.dimensions == 2:
            return next((s for s in map(parse_shape, _FLAT_SHAPES) if math.prod(s) == chips), None)
        if chips == 4:
            return (2, 2, 1)
        shapes = [
            (a, b, chips // (a * b))
            for a in range(2, 17, 2)
            for b in range(a, 25, 2)
            if chips % (a * b) == 0 and self.shape_is_valid((a, b, chips // (a * b)))
        ]
        return min(shapes, key=lambda shape: (shape[-1] - shape[0], shape), default=None)


GENERATIONS = (
    Generation("v4", "tpu-v4-podslice", "tpuv4", ("ct4p-hightpu-4t",), 3, 2),
    Generation(
        "v5e",
        "tpu-v5-lite-podslice",
        "tpuv5e",
        ("ct5lp-hightpu-1t", "ct5lp-hightpu-4t", "ct5lp-hightpu-8t"),
        2,
        1,
        ("v5litepod",),
    ),
    Generation("v5p", "tpu-v5p-slice", "tpuv5", ("ct5p-hightpu-4t",), 3, 2),
    Generation("v6e", "tpu-v6e-slice", "tpuv6e", ("ct6e-standard-1t", "ct6e-standard-4t", "ct6e-standard-8t"), 2, 1),
    Generation("v7x", "tpu7x", "tpu7x", ("tpu7x-standard-4t",), 3, 2, ("tpu7x",)),
)

_TPU_MACHINE = re.compile(r"(ct\w+|tpu\w+)-\w+-(\d+)t")
_SHORTHAND = re.compile(r"(v\d+\w*|tpu7x)-([0-9]{1,6})")
_CPU_MACHINE = re.compile(r"(e2|[ncmt]\d[a-z]?)-[a-z]+(-\w+)*")


@dataclass(frozen=True)
class Slice:
    """What one slice of a job is made of. A CPU job is one host without chips and topology."""

    machine_type: str
    hosts: int
    chips_per_host: int = 0
    topology: str = ""
    generation: Generation | None = None

    @property
    def is_tpu(self) -> bool:
        return self.generation is not None

    @property
    def chips(self) -> int:
        return self.hosts * self.chips_per_host

    @property
    def accelerator(self) -> str:
        """Value of the node label cloud.google.com/gke-tpu-accelerator; "" for a CPU job."""
        return self.generation.accelerator if self.generation else ""

    @property
    def pathways_instance_type(self) -> str:
        """Such as tpuv6e:4x8; "" for a CPU job."""
        return f"{self.generation.pathways}:{self.topology}" if self.generation else ""

    def __str__(self) -> str:
        if not self.is_tpu:
            return f"1 host of {self.machine_type}"
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{hosts} of {self.machine_type} with {_chip_words(self.chips_per_host)} each, topology {self.topology}"


def resolve(compute_type: str, topology: str | None) -> Slice:
    """The slice that --compute-type (a machine type or a shorthand) and --topology ask for.

    Raises LaunchError, naming the flag, where a machine type is unknown, the shape is none of the generation's, or
    the two do not fit each other.
    """
    if match := _SHORTHAND.fullmatch(compute_type):
        return _of_shorthand(compute_type, match[1], int(match[2]), topology)
    if match := _TPU_MACHINE.fullmatch(compute_type):
        return _of_machine(compute_type, topology)
    if _CPU_MACHINE.fullmatch(compute_type):
        if topology:
            raise LaunchError(f"--topology={topology}: --compute-type={compute_type} has no TPUs; leave --topology out")
        return Slice(compute_type, hosts=1)
    raise LaunchError(
        f"--compute-type={compute_type}: not a machine type that is known; give one such as ct6e-standard-4t, a TPU "
        "type such as v6e-32, or a CPU machine type such as e2-standard-8"
    )


def parse_shape(topology: str) -> tuple[int, ...]:
    """The lengths in a topology such as 4x8 or 2x2x4. Raises LaunchError where it is none."""
    if not re.fullmatch(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){1,2}", topology):
        raise LaunchError(f"--topology={topology}: expected lengths such as 4x8 or 2x2x4")
    return tuple(map(int, topology.split("x")))


def _of_shorthand(compute_type: str, name: str, number: int, topology: str | None) -> Slice:
    generation = next((g for g in GENERATIONS if name in (g.name, *g.aliases)), None)
    if generation is None:
        known = ", ".join(f"{g.name}-N" for g in GENERATIONS)
        raise LaunchError(f"--compute-type={compute_type}: no such TPU type; known are {known}")
    chips, rest = divmod(number, generation.cores_per_unit)
    shape = None if rest else generation.shape_of(chips)
    if shape is None:
        raise LaunchError(
            f"--compute-type={compute_type}: there is no slice of {number}; "
            f"shapes of {generation.name}: {generation.shape_words()}"
        )
    if topology is None:
        topology = _shape_text(shape)
    elif math.prod(parse_shape(topology)) != chips:
        raise LaunchError(
            f"--topology={topology} has {math.prod(parse_shape(topology))} chips, --compute-type={compute_type} has "
            f"{chips}; give --topology={_shape_text(shape)} or leave it out"
        )
    # One host where a machine type has all the chips, as the Cloud TPU names mean it; else hosts of 4.
    whole = [m for m in generation.machine_types if _chips_of(m) == chips]
    machine = whole[0] if whole else next(m for m in generation.machine_types if _chips_of(m) == 4)
    return _of_machine(machine, topology)


def _of_machine(machine_type: str, topology: str | None) -> Slice:
    generation = next((g for g in GENERATIONS if machine_type in g.machine_types), None)
    if generation is None:
        known = ", ".join(m for g in GENERATIONS for m in g.machine_types)
        raise LaunchError(f"--compute-type={machine_type}: no such TPU machine type; known are {known}")
    per_host = _chips_of(machine_type)
    if topology is None:
        shape = generation.shape_of(per_host)
        hint = f", e.g. --topology={_shape_text(shape)} for one host" if shape else ""
        raise LaunchError(f"--topology is required with --compute-type={machine_type}{hint}")
    shape = parse_shape(topology)
    if not generation.shape_is_valid(shape):
        raise LaunchError(
            f"--topology={topology}: not a shape of {generation.name}, which has {generation.shape_words()}"
        )
    chips = math.prod(shape)
    hosts, rest = divmod(chips, per_host)
    if rest or (hosts > 1 and per_host != 4):
        fitting = [m for m in generation.machine_types if _chips_of(m) == min(chips, 4) or _chips_of(m) == chips]
        raise LaunchError(
            f"--topology={topology} ({_chip_words(chips)}) cannot be made of --compute-type={machine_type}, which has "
            f"{_chip_words(per_host)} a host; give --compute-type={' or '.join(fitting)}"
        )
    return Slice(machine_type, hosts, per_host, topology, generation)


def _chips_of(machine_type: str) -> int:
    return int(machine_type.rpartition("-")[2].removesuffix("t"))


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _chip_words(count: int) -> str:
    return "1 chip" if count == 1 else f"{count} chips"
