"""Clusters made, looked at and deleted.

Creating looks at what is there, says what it will make, and then makes one part after the other, each of them only
where it is missing; so a run that failed or was interrupted is continued by the same command. The slices, which cost
most, come last. Deleting says what it deletes and takes everything away that costs money.
"""

import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from burnish.launch.cloud import controllers, identity, parts
from burnish.launch.cloud.access import ClusterAccess, explained, needed, reason
from burnish.launch.cloud.controllers import JOBSET, KUEUE, Release
from burnish.launch.cloud.operations import MAX_SECONDS, Say, Waiter
from burnish.launch.cloud.spec import Capacity, ClusterSpec, check_cluster_name, node_account
from burnish.launch.errors import LaunchError
from burnish.observe.summary import duration

Manifests = dict[str, list[dict[str, Any]]]  # by name of the release


class State(StrEnum):
    """Of a part of a cluster."""

    MISSING = "to make"
    BUSY = "in progress"
    BROKEN = "broken, to make anew"
    THERE = "there"
    CHANGED = "to change"


@dataclass(frozen=True)
class Part:
    """A thing that a cluster consists of. `name` is Google Cloud's name of it."""

    kind: str
    name: str
    what: str
    state: State
    note: str = ""


@dataclass(frozen=True)
class Pauses:
    """Seconds between two looks at something that takes its time."""

    operation: float = 5.0
    policy: float = 5.0
    api: float = 3.0


def planned_parts(spec: ClusterSpec) -> list[Part]:
    """What the cluster will consist of, in the order in which it is made, as if nothing were there."""
    tpu = spec.slice
    system_zones = ", ".join(spec.resolved_system_zones)
    open_to = ", ".join(spec.authorized_cidr) or "every address, with credentials"
    source = f"reservation {spec.reservation}" if spec.reservation else str(spec.capacity)
    if spec.capacity is Capacity.FLEX_START:
        source += ", hosts come when a job asks for them"
    bucket_words = f", may write to gs://{spec.bucket}" if spec.bucket else ""
    found = [
        ("service account", spec.node_account, f"runs the nodes{bucket_words}"),
        ("bucket", f"gs://{spec.bucket}", f"in {spec.region}, not public, without soft delete"),
        (
            "cluster",
            spec.name,
            f"in {spec.location}, channel {spec.release_channel}; API server open to {open_to}",
        ),
        (
            "node pool",
            parts.SYSTEM_POOL,
            f"{len(spec.resolved_system_zones)} × {spec.system_machine_type} in {system_zones}, for the controllers",
        ),
        (
            "node pool",
            parts.HEAD_POOL,
            f"0 to {spec.head_max_nodes} × {spec.head_machine_type} in {spec.zone}, for Pathways heads and CPU jobs",
        ),
        *(("controller", release.name, manifest_file(spec, release) or release.version) for release in RELEASES),
        (
            "queue",
            spec.queue,
            f"in namespace {spec.namespace}: {spec.chips} chips, CPU and memory of {parts.HEAD_POOL}",
        ),
        *(("node pool", name, f"{tpu} in {spec.zone}, {source}") for name in parts.slice_pool_names(spec)),
    ]
    if spec.bucket is None:
        del found[1]
    return [Part(kind, name, what, State.MISSING) for kind, name, what in found]


def survey(spec: ClusterSpec, access: ClusterAccess) -> list[Part]:
    """The planned parts with the state that each is in.

    Raises LaunchError where something is there that is not what was asked for.
    """
    cluster = _find(access, spec.project, spec.location, spec.name)
    if cluster is not None:
        _check_ours(cluster, spec.name)
        problems = parts.cluster_differences(spec, cluster) if cluster.status.name != "ERROR" else []
        pools = {pool.name: pool for pool in cluster.node_pools}
        for request in _pool_requests(spec):
            if request["name"] in pools and pools[request["name"]].status.name not in _BROKEN:
                differences = parts.pool_differences(request, pools[request["name"]])
                problems += [f"node pool {request['name']}: {difference}" for difference in differences]
        if problems:
            lines = "\n".join(f"cluster {spec.name} is there and differs: {problem}" for problem in problems)
            raise LaunchError(
                f"{lines}\ngive the flags that it was made with, another name, or delete it first: burnish cluster "
                f"delete {spec.name}"
            )
    inside = _inside(spec, access, cluster)
    return [_with_state(part, spec, access, cluster, inside) for part in planned_parts(spec)]


def create(
    spec: ClusterSpec,
    access: ClusterAccess,
    manifests: Manifests,
    say: Say,
    pauses: Pauses = Pauses(),
) -> None:
    """Makes what is missing of the cluster. `manifests` holds the objects of JobSet and Kueue; where a release is
    missing in it, that controller is already there.

    Raises LaunchError saying which part failed and why; the same call continues from there.
    """
    waiter = Waiter(access.clusters, spec.project, spec.location, say, pauses.operation)
    if spec.service_account is None:
        if identity.find_account(access, spec.project, spec.node_account) is None:
            identity.make_account(access, spec.project, spec.node_account, spec.name)
            say(f"service account {spec.node_account}: made")
        identity.grant_project_roles(access, spec.project, spec.node_account, pauses.policy)
    if spec.bucket is not None and identity.find_bucket(access, spec.project, spec.bucket) is None:
        identity.make_bucket(access, spec)
        say(f"bucket gs://{spec.bucket}: made")
    cluster = _ensure_cluster(spec, access, waiter)
    if spec.bucket is not None:  # the pods' identities exist once the project's first such cluster does
        identity.grant_bucket_roles(access, spec, pauses.policy)
        say(f"bucket gs://{spec.bucket}: nodes and pods of {spec.name} may write")
    _ensure_pools(spec, [parts.head_pool(spec)], access, waiter)
    _install(spec, access, cluster, manifests, say, pauses)
    _ensure_pools(spec, _slice_requests(spec), access, waiter)


def needed_manifests(spec: ClusterSpec, found: list[Part]) -> Manifests:
    """The objects of the controllers that are to be installed: of the user's files, or downloaded and checked."""
    wanted = {part.name for part in found if part.kind == "controller" and part.state is not State.THERE}
    return {
        release.name: controllers.read_manifest(release, manifest_file(spec, release))
        for release in RELEASES
        if release.name in wanted
    }


def manifest_file(spec: ClusterSpec, release: Release) -> str | None:
    """The user's own manifest of a controller."""
    return spec.jobset_manifest if release is JOBSET else spec.kueue_manifest


def describe(access: ClusterAccess, project: str, location: str, name: str) -> dict[str, Any]:
    """The cluster as JSON values. Raises LaunchError where there is none."""
    cluster = _required(access, project, location, name)
    waiter = Waiter(access.clusters, project, location, lambda _: None)
    return {
        "name": cluster.name,
        "project": project,
        "location": cluster.location,
        "status": cluster.status.name,
        "message": _conditions(cluster),
        "version": cluster.current_master_version,
        "endpoint": cluster.endpoint,
        "made_by_burnish": dict(cluster.resource_labels).get(parts.MANAGED_BY) == parts.OWNER,
        "node_pools": [
            {
                "name": pool.name,
                "status": pool.status.name,
                "message": _conditions(pool),
                "machine_type": pool.config.machine_type,
                "topology": pool.placement_policy.tpu_topology,
                "zones": list(pool.locations),
                "nodes": pool.initial_node_count,
                "most_nodes": pool.autoscaling.total_max_node_count or pool.initial_node_count,
                "capacity": _capacity(pool),
            }
            for pool in cluster.node_pools
        ],
        "operations": [
            {
                "name": operation.name,
                "type": operation.operation_type.name,
                "target": operation.target_link.rpartition("/")[2],
                "since": operation.start_time,
            }
            for operation in waiter.in_flight(name)
        ],
        "controllers": _controllers(access, project, cluster),
    }


def deletion_parts(
    access: ClusterAccess, project: str, location: str, name: str, bucket: str | None = None
) -> list[Part]:
    """What `delete` will take away; parts that are gone already are not in it.

    Raises LaunchError where the cluster was not made by burnish.
    """
    found = []
    cluster = _find(access, project, location, name)
    if cluster is not None:
        _check_ours(cluster, name)
        found.append(Part("cluster", name, f"in {location}, with everything that runs on it", State.THERE))
        for pool in cluster.node_pools:
            what = f"{pool.initial_node_count} × {pool.config.machine_type}"
            if pool.autoscaling.enabled:
                what = f"0 to {pool.autoscaling.total_max_node_count} × {pool.config.machine_type}"
            found.append(Part("node pool", pool.name, what, State.THERE))
    account = _account_to_delete(access, project, location, name)
    if account is not None:
        found.append(Part("service account", account, "and its roles in the project", State.THERE))
    if bucket is not None and identity.find_bucket(access, project, bucket) is not None:
        found.append(Part("bucket", f"gs://{bucket}", "with all objects in it, for good", State.THERE))
    return found


def delete(
    access: ClusterAccess,
    project: str,
    location: str,
    name: str,
    say: Say,
    bucket: str | None = None,
    pauses: Pauses = Pauses(),
) -> None:
    """Deletes the cluster with its pools, the nodes' service account, and the bucket where one is named; what is gone
    already is passed over."""
    waiter = Waiter(access.clusters, project, location, say, pauses.operation)
    cluster = _find(access, project, location, name)
    if cluster is not None:
        _check_ours(cluster, name)
        waiter.finish_others(name)
    if _find(access, project, location, name) is not None:  # what was waited for may have been a deletion
        request = {"name": f"{waiter.parent}/clusters/{name}"}
        start = partial(access.clusters.delete_cluster, request=request)
        waiter.run(start, f"cluster {name}: deletion", name, deletes=True)
    account = _account_to_delete(access, project, location, name)
    if account is not None:
        identity.delete_account(access, project, account)
        say(f"service account {account}: deleted")
    if bucket is not None:
        identity.delete_bucket(access, project, bucket, say)


RELEASES = (JOBSET, KUEUE)

_BROKEN = ("ERROR", "RUNNING_WITH_ERROR")
_USABLE = ("RUNNING", "RECONCILING", "DEGRADED")


def _find(access: ClusterAccess, project: str, location: str, name: str) -> Any:
    """The cluster (container_v1.Cluster), or None."""
    errors = needed("google.api_core.exceptions")
    with explained(f"cluster {name}", project):
        try:
            path = f"projects/{project}/locations/{location}/clusters/{name}"
            return access.clusters.get_cluster(request={"name": path})
        except errors.NotFound:
            return None


def _required(access: ClusterAccess, project: str, location: str, name: str) -> Any:
    cluster = _find(access, project, location, name)
    if cluster is None:
        with explained(f"clusters of {project}", project):
            all_clusters = access.clusters.list_clusters(request={"parent": f"projects/{project}/locations/-"}).clusters
        names = ", ".join(f"{c.name} in {c.location}" for c in all_clusters) or "none"
        raise LaunchError(f"there is no cluster {name} in {location}; project {project} has: {names}")
    return cluster


def _others(access: ClusterAccess, project: str, location: str, name: str) -> bool:
    """Whether another location has a cluster of this name, which shares its service account."""
    check_cluster_name(name)
    with explained(f"clusters of {project}", project):
        all_clusters = access.clusters.list_clusters(request={"parent": f"projects/{project}/locations/-"}).clusters
    return any(cluster.name == name and cluster.location != location for cluster in all_clusters)


def _account_to_delete(access: ClusterAccess, project: str, location: str, name: str) -> str | None:
    """The service account that was made for this cluster, unless a cluster of the same name elsewhere uses it."""
    email = node_account(name, project)
    account = identity.find_account(access, project, email)
    made_here = account is not None and account.get("description") == identity.ACCOUNT_DESCRIPTION
    return email if made_here and not _others(access, project, location, name) else None


def _check_ours(cluster: Any, name: str) -> None:
    if dict(cluster.resource_labels).get(parts.MANAGED_BY) != parts.OWNER:
        raise LaunchError(
            f"cluster {name} was not made by burnish (it has no label {parts.MANAGED_BY}={parts.OWNER}), so it is left "
            "alone; jobs can be submitted to it, and to make one of your own give another name"
        )


def _pool_requests(spec: ClusterSpec) -> list[dict[str, Any]]:
    return [parts.system_pool(spec), parts.head_pool(spec), *_slice_requests(spec)]


def _slice_requests(spec: ClusterSpec) -> list[dict[str, Any]]:
    return [parts.slice_pool(spec, name) for name in parts.slice_pool_names(spec)]


@dataclass(frozen=True)
class _Inside:
    """What the cluster's API server says; `problem` where it cannot be asked."""

    versions: dict[str, str | None]
    queue_is_right: bool = False
    problem: str = ""


def _inside(spec: ClusterSpec, access: ClusterAccess, cluster: Any) -> _Inside:
    if cluster is None or cluster.status.name not in _USABLE:
        return _Inside({})
    try:
        with controllers.api_client(cluster, access.credentials, spec.project) as client:
            versions = {r.name: controllers.deployed_version(client, r, spec.location) for r in RELEASES}
            right = all(versions.values()) and controllers.holds(client, parts.queue_manifests(spec), spec.location)
            return _Inside(versions, right)
    except LaunchError as error:  # it may be open to other addresses only, which creating mends
        return _Inside({}, problem=str(error))


def _with_state(part: Part, spec: ClusterSpec, access: ClusterAccess, cluster: Any, inside: _Inside) -> Part:
    state, note = State.MISSING, ""
    if part.kind == "service account":
        if spec.service_account or identity.find_account(access, spec.project, spec.node_account):
            state = State.THERE
    elif part.kind == "bucket":
        if identity.find_bucket(access, spec.project, str(spec.bucket)) is not None:
            state = State.THERE
    elif cluster is None or cluster.status.name == "ERROR":
        if cluster is not None and part.kind == "cluster":
            state, note = State.BROKEN, _conditions(cluster)
    elif part.kind == "cluster":
        state = _state_of(cluster)
        if state is State.THERE and not _authorized_as_asked(spec, cluster):
            state, note = State.CHANGED, "who may reach the API server"
    elif part.kind == "node pool":
        pool = next((pool for pool in cluster.node_pools if pool.name == part.name), None)
        if pool is not None:
            state, note = _state_of(pool), _conditions(pool)
    elif part.kind == "queue":
        state, note = (State.THERE if inside.queue_is_right else State.MISSING), inside.problem
    else:
        release = next(release for release in RELEASES if release.name == part.name)
        version = inside.versions.get(release.name)
        note = inside.problem
        if version is not None:
            same = version == release.version and manifest_file(spec, release) is None
            state, note = (State.THERE, "") if same else (State.CHANGED, f"{version} runs")
    return Part(part.kind, part.name, part.what, state, note)


def _state_of(found: Any) -> State:
    """Of a cluster or a node pool that is there."""
    if found.status.name in _BROKEN:
        return State.BROKEN
    return State.THERE if found.status.name in _USABLE else State.BUSY


def _conditions(found: Any) -> str:
    """What GKE says about a cluster or a node pool that is not well."""
    return "; ".join(condition.message for condition in found.conditions if condition.message) or found.status_message


def _authorized_as_asked(spec: ClusterSpec, cluster: Any) -> bool:
    if not spec.authorized_cidr:  # nothing is asked for, so it stays as it is
        return True
    config = cluster.control_plane_endpoints_config.ip_endpoints_config.authorized_networks_config
    return {block.cidr_block for block in config.cidr_blocks} == set(spec.authorized_cidr)


def _ensure_cluster(spec: ClusterSpec, access: ClusterAccess, waiter: Waiter) -> Any:
    """The cluster (container_v1.Cluster), made where it is missing or broken."""
    what = f"cluster {spec.name}"
    path = f"{waiter.parent}/clusters/{spec.name}"
    cluster = _settled(spec, access, waiter)
    if cluster is not None and cluster.status.name == "ERROR":
        waiter.say(f"{what} is broken: {_conditions(cluster)}")
        broken = {"name": path}
        delete_it = partial(access.clusters.delete_cluster, request=broken)
        waiter.run(delete_it, f"{what}: deletion of the broken one", spec.name, deletes=True)
        cluster = None
    if cluster is None:
        request = {"parent": waiter.parent, "cluster": parts.cluster_request(spec)}
        waiter.run(partial(access.clusters.create_cluster, request=request), what, spec.name)
    elif not _authorized_as_asked(spec, cluster):
        request = {"name": path, "update": {"desired_control_plane_endpoints_config": parts.endpoints(spec)}}
        update = partial(access.clusters.update_cluster, request=request)
        waiter.run(update, f"{what}: who may reach the API server", spec.name)
    cluster = _settled(spec, access, waiter)
    if cluster is None or cluster.status.name not in _USABLE:
        why = "gone" if cluster is None else f"{cluster.status.name}: {_conditions(cluster) or 'no reason is given'}"
        raise LaunchError(f"{what} is {why}")
    return cluster


def _settled(spec: ClusterSpec, access: ClusterAccess, waiter: Waiter) -> Any:
    """The cluster (container_v1.Cluster) once nothing is under way on it and its pools, whoever began it; None where
    there is none."""
    start = time.monotonic()
    while True:
        waiter.finish_others(spec.name)
        cluster = _find(access, spec.project, spec.location, spec.name)
        if cluster is None or cluster.status.name == "ERROR":  # the pools of a broken cluster stay as they are
            return cluster
        things = [cluster, *cluster.node_pools]
        busy = [thing for thing in things if thing.status.name not in (*_USABLE, *_BROKEN)]
        if not busy:
            return cluster
        if time.monotonic() - start > MAX_SECONDS:
            raise LaunchError(f"{busy[0].name} is {busy[0].status.name} after {duration(MAX_SECONDS)}")
        time.sleep(waiter.poll_seconds)


def _ensure_pools(spec: ClusterSpec, requests: list[dict[str, Any]], access: ClusterAccess, waiter: Waiter) -> None:
    """Makes the node pools that are missing or broken, side by side as far as GKE lets them."""
    cluster = _required(access, spec.project, spec.location, spec.name)
    pools = {pool.name: pool for pool in cluster.node_pools}
    parent = f"{waiter.parent}/clusters/{spec.name}"
    begun = []
    for request in requests:
        name = request["name"]
        what = f"node pool {name}"
        if name in pools and pools[name].status.name in _BROKEN:
            waiter.say(f"{what} is broken: {_conditions(pools[name])}")
            old = {"name": f"{parent}/nodePools/{name}"}
            delete_old = partial(access.clusters.delete_node_pool, request=old)
            waiter.run(delete_old, f"{what}: deletion of the broken one", spec.name, deletes=True)
        elif name in pools:
            continue
        new = {"parent": parent, "node_pool": request}
        operation = waiter.begin(partial(access.clusters.create_node_pool, request=new), what, spec.name)
        if operation is not None:
            begun.append((operation, what))
    problems = []
    for operation, what in begun:
        try:
            waiter.wait(operation, what)
        except LaunchError as error:
            problems.append(str(error))
    names = {request["name"] for request in requests} - {what.removeprefix("node pool ") for _, what in begun}
    cluster = _settled(spec, access, waiter)
    for pool in cluster.node_pools if cluster is not None else []:  # what another run has begun
        if pool.name in names and pool.status.name in _BROKEN:
            problems.append(f"node pool {pool.name} failed: {reason(_conditions(pool), spec.project)}")
    if problems:
        problems.append(
            "what failed may hold machines that cost money: run the same command again, which deletes it and makes it "
            f"anew, or burnish cluster delete {spec.name}"
        )
        raise LaunchError("\n".join(problems))


def _install(
    spec: ClusterSpec, access: ClusterAccess, cluster: Any, manifests: Manifests, say: Say, pauses: Pauses
) -> None:
    """JobSet and Kueue, as far as their manifests are given, and the queue."""
    with controllers.api_client(cluster, access.credentials, spec.project) as client:
        for release in RELEASES:
            objects = manifests.get(release.name)
            if objects is None:
                continue
            say(f"{release.name} …")
            controllers.apply(client, objects, spec.location, pause=pauses.api)
            controllers.wait_available(client, objects, spec.location, say, pause=pauses.api)
            say(f"{release.name}: runs")
        controllers.apply(client, parts.queue_manifests(spec), spec.location, pause=pauses.api)
        say(f"queue {spec.queue} in namespace {spec.namespace}: {spec.chips} chips")


def _controllers(access: ClusterAccess, project: str, cluster: Any) -> dict[str, Any]:
    """The controllers' versions; where the API server does not answer, why."""
    if cluster.status.name not in _USABLE:
        return {"unknown": f"the cluster is {cluster.status.name}"}
    try:
        with controllers.api_client(cluster, access.credentials, project) as client:
            return {
                release.name: controllers.deployed_version(client, release, cluster.location) for release in RELEASES
            }
    except LaunchError as error:
        return {"unknown": str(error)}


def _capacity(pool: Any) -> str:
    if pool.config.spot:
        return str(Capacity.SPOT)
    if pool.config.flex_start:
        return str(Capacity.FLEX_START)
    values = ", ".join(pool.config.reservation_affinity.values)
    return f"{Capacity.RESERVATION} {values}" if values else str(Capacity.ON_DEMAND)
