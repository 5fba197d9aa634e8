"""The functions of `burnish cluster` and `burnish vm`: options become a spec, and what is done about it is printed.

Answers go to standard output as text or JSON; the plan, the question and the progress go to standard error.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from burnish.config.cloud import CapacityOptions, ClusterPlaceOptions, VmNameOptions
from burnish.config.schema import (
    ClusterCreateConfig,
    ClusterDeleteConfig,
    ClusterDescribeConfig,
    VmCreateConfig,
    VmDeleteConfig,
    VmSshConfig,
)
from burnish.launch.answers import json_text, yaml_text
from burnish.launch.cloud import cluster, parts, vm
from burnish.launch.cloud.access import cluster_access, vm_access
from burnish.launch.cloud.cluster import Part, State
from burnish.launch.cloud.spec import (
    Capacity,
    ClusterSpec,
    VmSpec,
    check_bucket,
    check_cluster_name,
    check_location,
    check_project,
    check_vm_name,
    check_zone,
)
from burnish.launch.errors import LaunchError
from burnish.launch.job import parse_duration
from burnish.launch.settings import Settings, load_settings


def cluster_create(cfg: ClusterCreateConfig) -> None:
    """Makes the cluster, or says what would be made."""
    spec = cluster_spec(cfg)
    head = f"cluster {spec.name} in {spec.location} of project {spec.project}"
    cost = _cost(cfg, spec.chips)
    if cfg.dry_run:
        planned = cluster.planned_parts(spec)
        requests = _cluster_requests(spec)
        if cfg.output == "json":
            print(json_text({"parts": list(map(asdict, planned)), "requests": requests}))
        else:
            print(_plan(head, planned, cost))
            print(yaml_text(requests), end="")
        return
    access = cluster_access(spec.project)
    found = cluster.survey(spec, access)
    _say_lines(_plan(head, found, cost))
    if any(part.state is not State.THERE for part in found):
        _confirm(cfg.yes, "make this?")
        manifests = cluster.needed_manifests(spec, found)
        with _interruptible("what was begun goes on in Google Cloud; the same command continues from it"):
            cluster.create(spec, access, manifests, _say)
    if cfg.output == "json":
        print(json_text(cluster.describe(access, spec.project, spec.location, spec.name)))
    else:
        print(
            f"cluster {spec.name} is ready. To submit jobs to it:\n"
            f"  burnish job config set project {spec.project}\n"
            f"  burnish job config set location {spec.location}\n"
            f"  burnish job config set cluster {spec.name}\n"
            f"  burnish job submit --queue={spec.queue} …\n"
            f"It costs money until burnish cluster delete {spec.name}"
        )


def cluster_describe(cfg: ClusterDescribeConfig) -> None:
    name, project, location = _cluster_place(cfg)
    values = cluster.describe(cluster_access(project), project, location, name)
    if cfg.output == "json":
        print(json_text(values))
    else:
        print(yaml_text(values), end="")


def cluster_delete(cfg: ClusterDeleteConfig) -> None:
    name, project, location = _cluster_place(cfg)
    bucket = None if cfg.delete_bucket is None else _bucket(cfg.delete_bucket, "--delete-bucket")
    access = cluster_access(project)
    found = cluster.deletion_parts(access, project, location, name, bucket)
    if found:
        lines = [f"  {part.kind} {part.name}: {part.what}" for part in found]
        _say_lines("\n".join([f"to delete in {location} of project {project}:", *lines]))
        _confirm(cfg.yes, "delete this?")
        with _interruptible("a deletion that was begun goes on in Google Cloud; the same command continues from it"):
            cluster.delete(access, project, location, name, _say, bucket)
    if cfg.output == "json":
        print(json_text({"deleted": list(map(asdict, found))}))
    else:
        print(f"cluster {name} and what belongs to it are deleted" if found else f"nothing is left of cluster {name}")
        if bucket is None:
            print("buckets stay, and cost money; --delete-bucket=NAME deletes one")


def vm_create(cfg: VmCreateConfig) -> None:
    """Makes the machine, or says what would be made."""
    spec = vm_spec(cfg)
    source = f"reservation {spec.reservation}" if spec.reservation else str(spec.capacity)
    chips = spec.host.chips
    what = f"{spec.machine_type} ({chips} chips), {source}, boot disk {spec.boot_disk_gb} GB of {spec.image_family}"
    head = f"machine {spec.name} in {spec.zone} of project {spec.project}"
    cost = _cost(cfg, chips)
    if cfg.dry_run:
        planned = [Part("machine", spec.name, what, State.MISSING)]
        request = vm.instance_request(spec)
        if cfg.output == "json":
            print(json_text({"parts": list(map(asdict, planned)), "requests": {"instance": request}}))
        else:
            print(_plan(head, planned, cost))
            print(yaml_text({"instance": request}), end="")
        return
    access = vm_access()
    found = vm.find(access, spec.project, spec.zone, spec.name)
    if found is not None:
        vm.check_same(spec, found)
    state = State.MISSING if found is None else State.THERE if found.status == "RUNNING" else State.BUSY
    _say_lines(_plan(head, [Part("machine", spec.name, what, state)], cost))
    if state is State.MISSING:
        _confirm(cfg.yes, "make this?")
    with _interruptible(
        "the machine is made all the same; the same command waits for it, burnish vm delete deletes it"
    ):
        found = vm.create(spec, access, _say)
    if cfg.output == "json":
        print(json_text(_vm_values(found, spec.project, spec.zone)))
    else:
        print(
            f"machine {spec.name} runs. burnish vm ssh-command {spec.name} says how to get onto it.\n"
            f"It costs money until burnish vm delete {spec.name}"
        )


def vm_ssh_command(cfg: VmSshConfig) -> None:
    name, project, zone = _vm_place(cfg)
    found = vm.required(vm_access(), project, zone, name)
    if found.status != "RUNNING":
        raise LaunchError(f"machine {name} is {found.status}; it can be reached once it is RUNNING")
    if cfg.output == "json":
        print(json_text(_vm_values(found, project, zone)))
        return
    print(vm.ssh_command(found, project, zone))
    print("# on the machine:")
    for key, value in vm.tpu_environment(found.machine_type).items():
        print(f"export {key}={value}")


def vm_delete(cfg: VmDeleteConfig) -> None:
    name, project, zone = _vm_place(cfg)
    access = vm_access()
    found = vm.find(access, project, zone, name)
    if found is not None:
        if not found.ours:
            raise LaunchError(
                f"machine {name} was not made by burnish (it has no label {parts.MANAGED_BY}={parts.OWNER}), so it is "
                "left alone"
            )
        _say_lines(
            f"to delete in {zone} of project {project}:\n"
            f"  machine {name}: {found.machine_type}, {found.status}, with its boot disk and all that is on it"
        )
        _confirm(cfg.yes, "delete this?")
        vm.delete(access, project, zone, name, _say)
    if cfg.output == "json":
        print(json_text({"deleted": [] if found is None else [name]}))
    else:
        print(f"machine {name} is gone already" if found is None else f"machine {name} is deleted")


def cluster_spec(cfg: ClusterCreateConfig) -> ClusterSpec:
    """The cluster that the options describe. Raises LaunchError, naming the flag."""
    name, project, location = _cluster_place(cfg)
    zone = cfg.zone or location
    if cfg.zone is None and not zone[-2:-1] == "-":
        raise LaunchError(f"--zone is required: --location={location} is a region; give the zone of the slices")
    return ClusterSpec(
        name=name,
        project=project,
        location=location,
        zone=zone,
        compute_type=cfg.compute_type,
        topology=cfg.topology,
        num_slices=cfg.num_slices,
        capacity=_capacity(cfg),
        reservation=cfg.reservation,
        max_run_seconds=_max_run_seconds(cfg),
        system_machine_type=cfg.system_machine_type,
        system_zones=cfg.system_zones,
        authorized_cidr=cfg.authorized_cidr,
        head_machine_type=cfg.head_machine_type,
        head_max_nodes=cfg.head_max_nodes,
        bucket=None if cfg.bucket is None else _bucket(cfg.bucket, "--bucket"),
        service_account=cfg.service_account,
        network=cfg.network,
        subnetwork=cfg.subnetwork,
        release_channel=cfg.release_channel,
        namespace=load_settings().override(namespace=cfg.namespace).resolved_namespace,
        queue=cfg.queue,
        jobset_manifest=cfg.jobset_manifest,
        kueue_manifest=cfg.kueue_manifest,
    )


def vm_spec(cfg: VmCreateConfig) -> VmSpec:
    """The machine that the options describe. Raises LaunchError, naming the flag."""
    name, project, zone = _vm_place(cfg)
    key = None
    if cfg.ssh_public_key_file is not None:
        try:
            key = Path(cfg.ssh_public_key_file).expanduser().read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise LaunchError(
                f"--ssh-public-key-file={cfg.ssh_public_key_file}: cannot be read: {error.strerror}"
            ) from None
    return VmSpec(
        name=name,
        project=project,
        zone=zone,
        machine_type=cfg.machine_type,
        capacity=_capacity(cfg),
        reservation=cfg.reservation,
        max_run_seconds=_max_run_seconds(cfg),
        image_family=cfg.image_family,
        image_project=cfg.image_project,
        boot_disk_gb=cfg.boot_disk_gb,
        network=cfg.network,
        subnetwork=cfg.subnetwork,
        ssh_user=cfg.ssh_user,
        ssh_public_key=key,
    )


def _cluster_place(cfg: ClusterPlaceOptions) -> tuple[str, str, str]:
    """Name, project and location, each checked."""
    settings = load_settings().override(cluster=cfg.name, project=cfg.project, location=cfg.location)
    if not settings.cluster:
        raise LaunchError(
            "the cluster's name is required: burnish cluster … NAME, or burnish job config set cluster NAME"
        )
    check_cluster_name(settings.cluster)
    project, location = settings.require("project"), settings.require("location")
    check_project(project)
    check_location(location)
    return settings.cluster, project, location


def _vm_place(cfg: VmNameOptions) -> tuple[str, str, str]:
    """Name, project and zone, each checked."""
    settings: Settings = load_settings().override(project=cfg.project)
    check_vm_name(cfg.name)
    project = settings.require("project")
    check_project(project)
    zone = cfg.zone or settings.location
    if not zone:
        raise LaunchError("no zone is given; give --zone=ZONE, or run `burnish job config set location ZONE`")
    check_zone(zone)
    return cfg.name, project, zone


def _capacity(cfg: CapacityOptions) -> Capacity:
    given = {
        Capacity.RESERVATION: cfg.reservation is not None,
        Capacity.SPOT: cfg.spot,
        Capacity.FLEX_START: cfg.flex_start,
    }
    chosen = [capacity for capacity, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise LaunchError(f"{' and '.join(f'--{capacity}' for capacity in chosen)} are both given; give one")
    return chosen[0] if chosen else Capacity.ON_DEMAND


def _max_run_seconds(cfg: CapacityOptions) -> int | None:
    return None if cfg.max_run_duration is None else parse_duration(cfg.max_run_duration, "--max-run-duration")


def _bucket(text: str, flag: str) -> str:
    """The name of a bucket that may be given as gs://name, too."""
    name = text.removeprefix("gs://").rstrip("/")
    check_bucket(name, flag)
    return name


def _cost(cfg: CapacityOptions, chips: int) -> str:
    if cfg.price_per_chip_hour is None:
        return f"costs: {chips} chips while they are there; --price-per-chip-hour=… makes an estimate of it"
    hourly = chips * cfg.price_per_chip_hour
    return (
        f"costs: about {hourly:.2f} an hour ({24 * hourly:.0f} a day) for {chips} chips at "
        f"{cfg.price_per_chip_hour:g} while they are there; CPU machines, disks, storage and traffic come on top"
    )


def _cluster_requests(spec: ClusterSpec) -> dict[str, Any]:
    """What GKE and Kueue would get, in this order."""
    pools = [parts.head_pool(spec), *(parts.slice_pool(spec, name) for name in parts.slice_pool_names(spec))]
    return {"cluster": parts.cluster_request(spec), "node_pools": pools, "queue": parts.queue_manifests(spec)}


def _vm_values(found: vm.VmState, project: str, zone: str) -> dict[str, Any]:
    return {
        **asdict(found),
        "ssh_command": vm.ssh_command(found, project, zone),
        "environment": vm.tpu_environment(found.machine_type),
    }


def _plan(head: str, found: list[Part], cost: str) -> str:
    lines = [head]
    for part in found:
        note = f" ({part.note})" if part.note else ""
        lines.append(f"  {part.state:<11}  {part.kind} {part.name}: {part.what}{note}")
    return "\n".join([*lines, cost])


@contextmanager
def _interruptible(note: str) -> Iterator[None]:
    """Says what Ctrl-C does not stop."""
    try:
        yield
    except KeyboardInterrupt:
        _say_lines(note)
        raise


def _confirm(yes: bool, question: str) -> None:
    """Raises LaunchError where the answer is not yes."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise LaunchError("nobody can be asked here (standard input is no terminal); give --yes to go on")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise LaunchError("nothing was done")


def _say(text: str) -> None:
    for line in text.splitlines():
        print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def _say_lines(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
