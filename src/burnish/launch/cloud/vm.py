"""A TPU virtual machine: made, waited for, deleted, and the command and environment to work on it.

One host with its chips, as workflow A uses it. Whether it starts depends on what is free; what Compute Engine says
about that is passed on. The boot disk goes with the machine.
"""

import time
from dataclasses import dataclass
from typing import Any

from burnish.launch.cloud.access import VmAccess, explained, needed, reason
from burnish.launch.cloud.operations import MAX_SECONDS, REPORT_SECONDS, Say
from burnish.launch.cloud.parts import MANAGED_BY, OWNER, SCOPES
from burnish.launch.cloud.spec import MAX_RUN_SECONDS, Capacity, VmSpec, one_host
from burnish.launch.errors import LaunchError
from burnish.launch.topology import Slice, parse_shape
from burnish.observe.summary import duration

_PROVISIONING = {
    Capacity.ON_DEMAND: "STANDARD",
    Capacity.RESERVATION: "RESERVATION_BOUND",
    Capacity.SPOT: "SPOT",
    Capacity.FLEX_START: "FLEX_START",
}
_STARTING = ("PENDING", "PROVISIONING", "STAGING")


@dataclass(frozen=True)
class VmState:
    """A machine as Compute Engine knows it."""

    name: str
    status: str  # Compute Engine's: PROVISIONING, STAGING, RUNNING, STOPPING, TERMINATED, …
    machine_type: str
    capacity: Capacity
    address: str  # external IP address; "" where there is none
    ssh_user: str  # whose key was put on it; "" where nobody's was
    ours: bool


def instance_request(spec: VmSpec) -> dict[str, Any]:
    """The machine, in the names of compute_v1.Instance."""
    zone = f"zones/{spec.zone}"
    disk: dict[str, Any] = {
        "source_image": f"projects/{spec.image_project}/global/images/family/{spec.image_family}",
        "disk_size_gb": spec.boot_disk_gb,
    }
    if spec.machine_type.startswith("ct6e"):  # takes no other kind of boot disk
        disk["disk_type"] = f"{zone}/diskTypes/hyperdisk-balanced"
    network = spec.network if "/" in spec.network else f"global/networks/{spec.network}"
    interface: dict[str, Any] = {
        "network": network,
        "access_configs": [{"name": "External NAT", "type_": "ONE_TO_ONE_NAT"}],
    }
    if spec.subnetwork is not None:
        region = spec.zone.rpartition("-")[0]
        short = f"regions/{region}/subnetworks/{spec.subnetwork}"
        interface["subnetwork"] = spec.subnetwork if "/" in spec.subnetwork else short
    scheduling: dict[str, Any] = {
        "on_host_maintenance": "TERMINATE",
        "provisioning_model": _PROVISIONING[spec.capacity],
    }
    affinity: dict[str, Any] | None = None
    if spec.capacity is not Capacity.ON_DEMAND:
        scheduling["instance_termination_action"] = "DELETE"
    if spec.capacity in (Capacity.SPOT, Capacity.FLEX_START):
        scheduling["automatic_restart"] = False
    if spec.capacity is Capacity.RESERVATION:
        affinity = {
            "consume_reservation_type": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [spec.reservation],
        }
    elif spec.capacity is Capacity.FLEX_START:
        scheduling["max_run_duration"] = {"seconds": spec.max_run_seconds or MAX_RUN_SECONDS}
        affinity = {"consume_reservation_type": "NO_RESERVATION"}
    request: dict[str, Any] = {
        "name": spec.name,
        "machine_type": f"{zone}/machineTypes/{spec.machine_type}",
        "disks": [{"boot": True, "auto_delete": True, "initialize_params": disk}],
        "network_interfaces": [interface],
        "scheduling": scheduling,
        "service_accounts": [{"email": "default", "scopes": SCOPES}],
        "labels": {MANAGED_BY: OWNER},
    }
    if spec.capacity is Capacity.FLEX_START:  # how long the request may wait in Google's queue; 2 h is the most
        request["params"] = {"request_valid_for_duration": {"seconds": 7200}}
    if affinity is not None:
        request["reservation_affinity"] = affinity
    if spec.ssh_public_key is not None:
        request["metadata"] = {"items": [{"key": "ssh-keys", "value": f"{spec.ssh_user}:{spec.ssh_public_key}"}]}
    return request


def find(access: VmAccess, project: str, zone: str, name: str) -> VmState | None:
    """The machine, or None where there is none of that name."""
    errors = needed("google.api_core.exceptions")
    with explained(f"machine {name}", project):
        try:
            found = access.instances.get(request={"project": project, "zone": zone, "instance": name})
        except errors.NotFound:
            return None
    interfaces = [config for interface in found.network_interfaces for config in interface.access_configs]
    keys = next((item.value for item in found.metadata.items if item.key == "ssh-keys"), "")
    model = found.scheduling.provisioning_model
    return VmState(
        name=found.name,
        status=found.status,
        machine_type=found.machine_type.rpartition("/")[2],
        capacity=next((c for c, word in _PROVISIONING.items() if word == model), Capacity.ON_DEMAND),
        address=next((config.nat_i_p for config in interfaces if config.nat_i_p), ""),
        ssh_user=keys.partition(":")[0],
        ours=dict(found.labels).get(MANAGED_BY) == OWNER,
    )


def required(access: VmAccess, project: str, zone: str, name: str) -> VmState:
    """The machine. Raises LaunchError where there is none of that name."""
    found = find(access, project, zone, name)
    if found is None:
        raise LaunchError(
            f"there is no machine {name} in {zone} of project {project}; make it with burnish vm create {name}"
        )
    return found


def check_same(spec: VmSpec, found: VmState) -> None:
    """Raises LaunchError where the machine that is there is not the one that is asked for, or is not up."""
    other = ""
    if found.machine_type != spec.machine_type:
        other = f"a {found.machine_type}, asked for is a {spec.machine_type}"
    elif found.capacity != spec.capacity:
        other = f"{found.capacity}, asked for is {spec.capacity}"
    if other:
        raise LaunchError(f"machine {spec.name} is there and is {other}; give another name or delete it first")
    if found.status not in (*_STARTING, "RUNNING"):
        raise LaunchError(
            f"machine {spec.name} is there and is {found.status}; delete it (burnish vm delete {spec.name}) and make "
            "it anew when it is gone"
        )


def create(spec: VmSpec, access: VmAccess, say: Say, poll_seconds: float = 5.0) -> VmState:
    """Makes the machine where it is missing, waits until it runs and returns it. Raises LaunchError saying why it
    does not; the same call tries again, or goes on waiting."""
    errors = needed("google.api_core.exceptions")
    what = f"machine {spec.name}"
    place = {"project": spec.project, "zone": spec.zone}
    found = find(access, spec.project, spec.zone, spec.name)
    operation = _in_flight(access, spec.project, spec.zone, spec.name)
    if operation is not None:
        _wait(access, spec.project, spec.zone, operation, f"{what}, begun before", say, poll_seconds)
    elif found is None:
        with explained(what, spec.project):
            try:
                operation = access.instances.insert_unary(
                    request={**place, "instance_resource": instance_request(spec)}
                )
            except errors.Conflict:  # somebody else has just made it
                operation = None
        if operation is not None:
            _wait(access, spec.project, spec.zone, operation, what, say, poll_seconds)
    start = time.monotonic()
    while True:
        found = required(access, spec.project, spec.zone, spec.name)
        check_same(spec, found)
        if found.status == "RUNNING":
            return found
        if time.monotonic() - start > MAX_SECONDS:
            raise LaunchError(f"{what} is {found.status} after {duration(MAX_SECONDS)}; the same command waits on")
        time.sleep(poll_seconds)


def delete(access: VmAccess, project: str, zone: str, name: str, say: Say, poll_seconds: float = 5.0) -> None:
    """Deletes the machine with its boot disk; one that is gone already is no error."""
    errors = needed("google.api_core.exceptions")
    what = f"machine {name}: deletion"
    with explained(what, project):
        try:
            operation = access.instances.delete_unary(request={"project": project, "zone": zone, "instance": name})
        except errors.NotFound:
            say(f"machine {name}: gone already")
            return
    _wait(access, project, zone, operation, what, say, poll_seconds)


def ssh_command(found: VmState, project: str, zone: str) -> str:
    """The command that opens a shell on the machine: plain ssh where a key was put on it, else gcloud's, which puts
    one there."""
    if found.ssh_user and found.address:
        return f"ssh {found.ssh_user}@{found.address}"
    return f"gcloud compute ssh {found.name} --project={project} --zone={zone}"


def tpu_environment(machine_type: str) -> dict[str, str]:
    """What the TPU runtime wants to know on a machine that is a slice by itself, and would else ask the metadata
    server for in vain."""
    host: Slice = one_host(machine_type)
    assert host.generation is not None
    name = {"v5e": "v5litepod"}.get(host.generation.name, host.generation.name)
    shape = (*parse_shape(host.topology), 1)[:3]
    return {
        "TPU_ACCELERATOR_TYPE": f"{name}-{host.chips * host.generation.cores_per_unit}",
        "TPU_WORKER_ID": "0",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_TOPOLOGY": host.topology,
        "TPU_CHIPS_PER_HOST_BOUNDS": ",".join(map(str, shape)),
        "TPU_HOST_BOUNDS": "1,1,1",
    }


def _in_flight(access: VmAccess, project: str, zone: str, name: str) -> Any:
    """The operation (compute_v1.Operation) on the machine that has not ended, or None."""
    with explained(f"operations in {zone}", project):
        operations = access.operations.list(
            request={"project": project, "zone": zone, "filter": 'status != "DONE"'},
        )
        return next(
            (
                operation
                for operation in operations
                if operation.target_link.endswith(f"/instances/{name}") and operation.operation_type == "insert"
            ),
            None,
        )


def _wait(access: VmAccess, project: str, zone: str, operation: Any, what: str, say: Say, poll_seconds: float) -> None:
    """Waits until the operation has ended. Raises LaunchError saying why it failed."""
    start = reported = time.monotonic()
    say(f"{what} …")
    while operation.status.name != "DONE":
        if time.monotonic() - start > MAX_SECONDS:
            raise LaunchError(
                f"{what}: not done after {duration(MAX_SECONDS)}; it goes on in Google Cloud, the same command waits "
                "for it again"
            )
        time.sleep(poll_seconds)
        with explained(what, project):
            operation = access.operations.get(request={"project": project, "zone": zone, "operation": operation.name})
        if time.monotonic() - reported >= REPORT_SECONDS and operation.status.name != "DONE":
            reported = time.monotonic()
            detail = f" ({operation.status_message})" if operation.status_message else ""
            say(f"{what} … {duration(reported - start)}{detail}")
    problems = [f"{error.message} ({error.code})" for error in operation.error.errors]
    if problems or operation.http_error_status_code:
        message = "; ".join(problems) or operation.http_error_message
        raise LaunchError(f"{what} failed: {reason(message, project, operation.http_error_status_code or None)}")
    say(f"{what}: done after {duration(time.monotonic() - start)}")
