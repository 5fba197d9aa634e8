"""What a cluster (ClusterSpec) or a virtual machine (VmSpec) is to be.

Both are checked when they are made: a wrong one is an error that names the flag, before anything is sent. Whether a
zone has such machines, and whether the project may have them, only Google Cloud knows.
"""

import ipaddress
import re
from dataclasses import dataclass
from enum import StrEnum

from burnish.launch.errors import LaunchError
from burnish.launch.names import check_name
from burnish.launch.topology import Slice, resolve

MAX_CLUSTER_NAME = 20
MAX_VM_NAME = 63
MAX_RUN_SECONDS = 7 * 24 * 3600  # Google's limit for flex-start

_PROJECT = re.compile(r"([a-z][-a-z0-9.]*:)?[a-z][-a-z0-9]{4,28}[a-z0-9]")
_REGION = re.compile(r"[a-z]+-[a-z]+\d+")
_ZONE = re.compile(r"([a-z]+-[a-z]+\d+)-[a-z]")
_BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_RESERVATION = re.compile(r"(projects/[^/]+/reservations/)?[a-z]([-a-z0-9]*[a-z0-9])?(/reservationBlocks/[-a-z0-9]+)?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_CPU_MACHINE = re.compile(r"(?:e2|n2d?|n4|c3d?|c4|c4d|t2d)-(standard|highmem|highcpu)-([0-9]{1,3})")
_GIB_PER_CPU = {"standard": 4, "highmem": 8, "highcpu": 1}


class Capacity(StrEnum):
    """Where the TPU hosts come from."""

    ON_DEMAND = "on-demand"
    RESERVATION = "reservation"
    SPOT = "spot"
    FLEX_START = "flex-start"


@dataclass(frozen=True)
class ClusterSpec:
    """A GKE cluster with one node pool per TPU slice. Raises LaunchError, naming the flag, where a field is wrong or
    two do not fit."""

    name: str
    project: str
    location: str  # a zone, or a region, which keeps the control plane in several zones
    zone: str  # of the slices
    compute_type: str
    topology: str | None = None
    num_slices: int = 1
    capacity: Capacity = Capacity.ON_DEMAND
    reservation: str | None = None
    max_run_seconds: int | None = None  # of a flex-start host
    system_machine_type: str = "e2-standard-8"
    system_zones: tuple[str, ...] = ()  # empty: the zone of the slices
    authorized_cidr: tuple[str, ...] = ()  # empty: any address, with credentials
    head_machine_type: str = "n2-standard-64"
    head_max_nodes: int = 1
    bucket: str | None = None
    service_account: str | None = None  # e-mail address of one that is there; None: one is made
    network: str = "default"
    subnetwork: str | None = None
    release_channel: str = "regular"
    namespace: str = "default"
    queue: str = "burnish"
    jobset_manifest: str | None = None  # files to install instead of the releases
    kueue_manifest: str | None = None

    def __post_init__(self) -> None:
        check_cluster_name(self.name)
        check_project(self.project)
        check_location(self.location)
        _check_zone(self.zone, "--zone")
        if _region(self.zone) != _region(self.location) or (
            _ZONE.fullmatch(self.location) and self.zone != self.location
        ):
            raise LaunchError(
                f"--zone={self.zone} is not in --location={self.location}; give a zone of that region, or the zone as "
                "the location"
            )
        for zone in self.system_zones:
            _check_zone(zone, "--system-zones")
            if _region(zone) != _region(self.location):
                raise LaunchError(f"--system-zones={zone} is not in the region of --location={self.location}")
        self._check_slices()
        for cidr in self.authorized_cidr:
            _check_cidr(cidr)
        if len(self.authorized_cidr) > 100:
            raise LaunchError(f"--authorized-cidr: {len(self.authorized_cidr)} ranges; GKE takes at most 100")
        for flag, machine in (
            ("--system-machine-type", self.system_machine_type),
            ("--head-machine-type", self.head_machine_type),
        ):
            cpu_machine(machine, flag)
        if not 1 <= self.head_max_nodes <= 1000:
            raise LaunchError(f"--head-max-nodes={self.head_max_nodes}: expected 1 to 1000")
        if self.bucket is not None:
            check_bucket(self.bucket, "--bucket")
        if self.service_account is not None and not _EMAIL.fullmatch(self.service_account):
            raise LaunchError(f"--service-account={self.service_account}: expected the e-mail address of one")
        if self.release_channel not in ("rapid", "regular", "stable"):
            raise LaunchError(f"--release-channel={self.release_channel}: expected rapid, regular or stable")
        for flag, value in (("--namespace", self.namespace), ("--queue", self.queue)):
            if not _LABEL.fullmatch(value):
                raise LaunchError(f"{flag}={value}: expected lower-case letters, digits and '-', at most 63")

    @property
    def slice(self) -> Slice:
        return resolve(self.compute_type, self.topology)

    @property
    def chips(self) -> int:
        return self.num_slices * self.slice.chips

    @property
    def region(self) -> str:
        return _region(self.location)

    @property
    def resolved_system_zones(self) -> tuple[str, ...]:
        return self.system_zones or (self.zone,)

    @property
    def node_account(self) -> str:
        """E-mail address of the service account that the nodes run as."""
        return self.service_account or node_account(self.name, self.project)

    def _check_slices(self) -> None:
        tpu = self.slice
        if tpu.generation is None:
            raise LaunchError(f"--compute-type={self.compute_type} has no TPUs; give one such as ct6e-standard-4t")
        if tpu.generation.name == "v7x":
            raise LaunchError(
                f"--compute-type={self.compute_type}: node pools of v7x need a workload policy of Compute Engine, "
                "which this version does not make; known are v4, v5e, v5p and v6e"
            )
        if not 1 <= self.num_slices <= 256:
            raise LaunchError(f"--num-slices={self.num_slices}: expected 1 to 256")
        _check_capacity(self.capacity, self.reservation, self.max_run_seconds)
        if self.capacity is Capacity.FLEX_START and tpu.generation.name == "v4":
            raise LaunchError("--flex-start: v4 cannot be had so; give --spot or --reservation")


@dataclass(frozen=True)
class VmSpec:
    """A TPU virtual machine of one host. Raises LaunchError, naming the flag, where a field is wrong."""

    name: str
    project: str
    zone: str
    machine_type: str = "ct6e-standard-8t"
    capacity: Capacity = Capacity.ON_DEMAND
    reservation: str | None = None
    max_run_seconds: int | None = None
    image_family: str = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    image_project: str = "ubuntu-os-accelerator-images"
    boot_disk_gb: int = 200
    network: str = "default"
    subnetwork: str | None = None
    ssh_user: str | None = None
    ssh_public_key: str | None = None  # the key itself, "ssh-ed25519 AAAA… comment"

    def __post_init__(self) -> None:
        check_vm_name(self.name)
        check_project(self.project)
        _check_zone(self.zone, "--zone")
        one_host(self.machine_type)
        _check_capacity(self.capacity, self.reservation, self.max_run_seconds)
        if not 10 <= self.boot_disk_gb <= 65536:
            raise LaunchError(f"--boot-disk-gb={self.boot_disk_gb}: expected 10 to 65536")
        if (self.ssh_user is None) != (self.ssh_public_key is None):
            raise LaunchError("--ssh-user and --ssh-public-key-file go together; give both or neither")
        if self.ssh_user is not None and not re.fullmatch(r"[a-z_][-a-z0-9_]{0,31}", self.ssh_user):
            raise LaunchError(f"--ssh-user={self.ssh_user}: expected the name of a Linux user")
        if self.ssh_public_key is not None and not re.fullmatch(
            r"(ssh|ecdsa|sk)-[-\w@.]+ \S+( .*)?", self.ssh_public_key
        ):
            raise LaunchError("--ssh-public-key-file: not a public key of OpenSSH (one line: type, key, comment)")

    @property
    def host(self) -> Slice:
        return one_host(self.machine_type)


def one_host(machine_type: str) -> Slice:
    """The slice that one machine of this type is. Raises LaunchError for a type that has no TPU virtual machines of
    its own."""
    match = re.fullmatch(r"ct(6e-standard|5lp-hightpu|5p-hightpu)-(\d)t", machine_type)
    shapes = {"1": "1x1", "4": "2x2x1" if machine_type.startswith("ct5p") else "2x2", "8": "2x4"}
    if not match or match[2] not in shapes:
        raise LaunchError(
            f"--machine-type={machine_type}: not a type whose virtual machines burnish makes; known are "
            "ct6e-standard-{1,4,8}t, ct5lp-hightpu-{1,4,8}t and ct5p-hightpu-4t"
        )
    return resolve(machine_type, shapes[match[2]])


def cpu_machine(machine_type: str, flag: str) -> tuple[int, int]:
    """vCPUs and GiB of memory of a CPU machine type. Raises LaunchError, naming the flag, for any other name."""
    match = _CPU_MACHINE.fullmatch(machine_type)
    if not match:
        raise LaunchError(f"{flag}={machine_type}: expected a CPU machine type such as e2-standard-8 or n2-highmem-64")
    cpus = int(match[2])
    return cpus, cpus * _GIB_PER_CPU[match[1]]


def node_account(cluster: str, project: str) -> str:
    """E-mail address of the service account that burnish makes for a cluster's nodes."""
    domain, _, plain = project.rpartition(":")
    return f"{cluster}-nodes@{plain + '.' + domain if domain else plain}.iam.gserviceaccount.com"


def check_cluster_name(name: str) -> None:
    """Raises LaunchError where a cluster cannot be called so."""
    check_name(name, MAX_CLUSTER_NAME, "a cluster's name has at most {}")


def check_vm_name(name: str) -> None:
    """Raises LaunchError where a virtual machine cannot be called so."""
    check_name(name, MAX_VM_NAME, "a virtual machine's name has at most {}")


def check_project(project: str) -> None:
    """Raises LaunchError where this is no project id."""
    if not _PROJECT.fullmatch(project):
        raise LaunchError(
            f"--project={project}: expected a project id: 6 to 30 lower-case letters, digits and '-', a letter first "
            "(not the project's name or number)"
        )


def check_location(location: str) -> None:
    """Raises LaunchError where this is neither a region nor a zone."""
    if not _REGION.fullmatch(location) and not _ZONE.fullmatch(location):
        raise LaunchError(f"--location={location}: expected a zone such as us-east5-b or a region such as us-east5")


def check_zone(zone: str) -> None:
    """Raises LaunchError where this is no zone."""
    _check_zone(zone, "--zone")


def check_bucket(bucket: str, flag: str) -> None:
    """Raises LaunchError, naming the flag, where a bucket cannot be called so."""
    parts = bucket.split(".")
    if not _BUCKET.fullmatch(bucket) or any(not 1 <= len(part) <= 63 for part in parts) or bucket.startswith("goog"):
        raise LaunchError(
            f"{flag}={bucket}: expected the name of a bucket: 3 to 63 lower-case letters, digits, '-', '_' and '.', "
            "a letter or digit first and last"
        )


def _check_capacity(capacity: Capacity, reservation: str | None, max_run_seconds: int | None) -> None:
    if capacity is Capacity.RESERVATION and reservation is None:
        raise LaunchError("--reservation is required where hosts come from a reservation")
    if capacity is not Capacity.RESERVATION and reservation is not None:
        raise LaunchError(f"--reservation={reservation} and --{capacity} are both given; give one")
    if reservation is not None and not _RESERVATION.fullmatch(reservation):
        raise LaunchError(
            f"--reservation={reservation}: expected its name, or projects/PROJECT/reservations/NAME for a shared one"
        )
    if max_run_seconds is not None and capacity is not Capacity.FLEX_START:
        raise LaunchError("--max-run-duration goes with --flex-start only")
    if max_run_seconds is not None and not 600 <= max_run_seconds <= MAX_RUN_SECONDS:
        raise LaunchError(f"--max-run-duration={max_run_seconds}s: expected 10m to 7d")


def _check_zone(zone: str, flag: str) -> None:
    if not _ZONE.fullmatch(zone):
        raise LaunchError(f"{flag}={zone}: expected a zone such as us-east5-b")


def _region(location: str) -> str:
    match = _ZONE.fullmatch(location)
    return match[1] if match else location


def _check_cidr(cidr: str) -> None:
    try:
        ipaddress.ip_network(cidr)
    except ValueError as error:
        raise LaunchError(
            f"--authorized-cidr={cidr}: {error}; expected a range of addresses such as 203.0.113.7/32"
        ) from None
