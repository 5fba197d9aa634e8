"""What a cluster is made of: the requests that GKE and Kueue get, and where something found differs from them.

Pure: a ClusterSpec goes in, plain JSON values come out, in the clients' own names. One node pool is one slice; only a
slice of several hosts has a placement policy, as GKE wants it.
"""

from typing import Any

from burnish.launch.cloud.spec import Capacity, ClusterSpec, cpu_machine

MANAGED_BY = "managed-by"
OWNER = "burnish"
SYSTEM_POOL = "system"
HEAD_POOL = "cpu-np"
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
TPU_TAINT = "google.com/tpu"

# vCPUs and GiB of memory of a TPU host, from Google's tables of machine types.
_TPU_HOSTS = {
    "ct4p-hightpu-4t": (240, 407),
    "ct5lp-hightpu-1t": (24, 48),
    "ct5lp-hightpu-4t": (112, 192),
    "ct5lp-hightpu-8t": (224, 384),
    "ct5p-hightpu-4t": (208, 448),
    "ct6e-standard-1t": (44, 176),
    "ct6e-standard-4t": (180, 720),
    "ct6e-standard-8t": (180, 1440),
}


def labels(cluster: str) -> dict[str, str]:
    """Labels of everything that is made for a cluster, for bills and for `cluster delete`."""
    return {MANAGED_BY: OWNER, "burnish-cluster": cluster}


def slice_pool_names(spec: ClusterSpec) -> list[str]:
    return [f"slice-{index}" for index in range(spec.num_slices)]


def cluster_request(spec: ClusterSpec) -> dict[str, Any]:
    """The cluster with its system pool; everything else is added to it later, so that each part can be resumed."""
    request: dict[str, Any] = {
        "name": spec.name,
        "resource_labels": labels(spec.name),
        "network": spec.network,
        "ip_allocation_policy": {"use_ip_aliases": True},
        "workload_identity_config": {"workload_pool": workload_pool(spec.project)},
        "addons_config": {"gcs_fuse_csi_driver_config": {"enabled": True}},
        "release_channel": {"channel": spec.release_channel.upper()},
        "node_pools": [system_pool(spec)],
    }
    if spec.subnetwork is not None:
        request["subnetwork"] = spec.subnetwork
    if spec.authorized_cidr:
        request["control_plane_endpoints_config"] = endpoints(spec)
    return request


def endpoints(spec: ClusterSpec) -> dict[str, Any]:
    """Who may reach the API server: the authorized ranges only."""
    blocks = [{"display_name": f"burnish-{n}", "cidr_block": cidr} for n, cidr in enumerate(spec.authorized_cidr)]
    return {
        "ip_endpoints_config": {
            "enabled": True,
            "enable_public_endpoint": True,
            "authorized_networks_config": {"enabled": True, "cidr_blocks": blocks},
        }
    }


def workload_pool(project: str) -> str:
    return f"{project}.svc.id.goog"


def system_pool(spec: ClusterSpec) -> dict[str, Any]:
    """One node in each system zone, for the controllers."""
    return {
        "name": SYSTEM_POOL,
        "initial_node_count": 1,
        "locations": list(spec.resolved_system_zones),
        "config": _node_config(spec, spec.system_machine_type, "system"),
    }


def head_pool(spec: ClusterSpec) -> dict[str, Any]:
    """CPU nodes for Pathways heads and CPU jobs; there are none while no job needs one."""
    return {
        "name": HEAD_POOL,
        "initial_node_count": 0,
        "locations": [spec.zone],
        "autoscaling": {"enabled": True, "total_min_node_count": 0, "total_max_node_count": spec.head_max_nodes},
        "config": _node_config(spec, spec.head_machine_type, "head"),
    }


def slice_pool(spec: ClusterSpec, name: str) -> dict[str, Any]:
    """The node pool that is one slice."""
    tpu = spec.slice
    config = _node_config(spec, tpu.machine_type, "slice")
    config["taints"] = [{"key": TPU_TAINT, "value": "present", "effect": "NO_SCHEDULE"}]
    if tpu.machine_type.startswith("ct6e"):  # takes no other kind of boot disk
        config |= {"disk_type": "hyperdisk-balanced", "disk_size_gb": 100}
    pool: dict[str, Any] = {
        "name": name,
        "initial_node_count": tpu.hosts,
        "locations": [spec.zone],
        "config": config,
    }
    if tpu.hosts > 1:
        pool["placement_policy"] = {"type_": "COMPACT", "tpu_topology": tpu.topology}
    if spec.capacity is Capacity.RESERVATION:
        config["reservation_affinity"] = {
            "consume_reservation_type": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [spec.reservation],
        }
    elif spec.capacity is Capacity.SPOT:
        config["spot"] = True
    elif spec.capacity is Capacity.FLEX_START:
        # The hosts come when a job asks for them, all at once, and go when it has ended.
        config |= {"flex_start": True, "reservation_affinity": {"consume_reservation_type": "NO_RESERVATION"}}
        if spec.max_run_seconds is not None:
            config["max_run_duration"] = {"seconds": spec.max_run_seconds}
        pool["initial_node_count"] = 0
        pool["autoscaling"] = {
            "enabled": True,
            "total_min_node_count": 0,
            "total_max_node_count": tpu.hosts,
            "location_policy": "ANY",
        }
        pool["management"] = {"auto_upgrade": True, "auto_repair": False}
    return pool


def _node_config(spec: ClusterSpec, machine_type: str, role: str) -> dict[str, Any]:
    return {
        "machine_type": machine_type,
        "service_account": spec.node_account,
        "oauth_scopes": list(SCOPES),
        "workload_metadata_config": {"mode": "GKE_METADATA"},
        "labels": {"burnish-role": role},
        "resource_labels": labels(spec.name),
    }


def queue_manifests(spec: ClusterSpec) -> list[dict[str, Any]]:
    """The Kueue queue: all slices, and the head's CPU and memory from the CPU pool.

    The TPU nodes' taint stands in their flavor, so that Kueue never places a pod there that does not tolerate it.
    """
    tpu = spec.slice
    head_cpus, head_memory = cpu_machine(spec.head_machine_type, "--head-machine-type")
    host_cpus, host_memory = _TPU_HOSTS[tpu.machine_type]
    hosts = spec.num_slices * tpu.hosts
    head_flavor, tpu_flavor = HEAD_POOL, f"{tpu.accelerator}-{tpu.topology}"
    kueue = "kueue.x-k8s.io/v1beta2"
    flavors = [
        _flavor(head_flavor, spec.head_max_nodes * head_cpus, spec.head_max_nodes * head_memory, 0),
        _flavor(tpu_flavor, hosts * host_cpus, hosts * host_memory, spec.chips),
    ]
    node_labels = {
        "cloud.google.com/gke-tpu-accelerator": tpu.accelerator,
        "cloud.google.com/gke-tpu-topology": tpu.topology,
    }
    taint = {"key": TPU_TAINT, "value": "present", "effect": "NoSchedule"}
    manifests = [
        {
            "apiVersion": kueue,
            "kind": "ResourceFlavor",
            "metadata": {"name": head_flavor},
            "spec": {"nodeLabels": {"cloud.google.com/gke-nodepool": HEAD_POOL}},
        },
        {
            "apiVersion": kueue,
            "kind": "ResourceFlavor",
            "metadata": {"name": tpu_flavor},
            "spec": {"nodeLabels": node_labels, "nodeTaints": [taint]},
        },
        {
            "apiVersion": kueue,
            "kind": "ClusterQueue",
            "metadata": {"name": spec.queue},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [{"coveredResources": ["cpu", "memory", TPU_TAINT], "flavors": flavors}],
            },
        },
        {
            "apiVersion": kueue,
            "kind": "LocalQueue",
            "metadata": {"name": spec.queue, "namespace": spec.namespace},
            "spec": {"clusterQueue": spec.queue},
        },
    ]
    if spec.namespace != "default":
        manifests.insert(0, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": spec.namespace}})
    return manifests


def _flavor(name: str, cpus: int, memory_gib: int, chips: int) -> dict[str, Any]:
    quotas = {"cpu": str(cpus), "memory": f"{memory_gib}Gi", TPU_TAINT: str(chips)}
    return {"name": name, "resources": [{"name": key, "nominalQuota": quota} for key, quota in quotas.items()]}


def cluster_differences(spec: ClusterSpec, found: Any) -> list[str]:
    """How a cluster that is there (container_v1.Cluster) differs from what is asked for, one text per difference."""
    wanted = {
        "workload identity pool": workload_pool(spec.project),
        "gcsfuse CSI driver": True,
        "network": spec.network.rpartition("/")[2],
    }
    has = {
        "workload identity pool": found.workload_identity_config.workload_pool,
        "gcsfuse CSI driver": found.addons_config.gcs_fuse_csi_driver_config.enabled,
        "network": found.network.rpartition("/")[2],
    }
    if spec.subnetwork is not None:
        wanted["subnetwork"] = spec.subnetwork.rpartition("/")[2]
        has["subnetwork"] = found.subnetwork.rpartition("/")[2]
    return _differences(wanted, has)


def pool_differences(wanted: dict[str, Any], found: Any) -> list[str]:
    """How a node pool that is there (container_v1.NodePool) differs from the request that would make it."""
    config, placement = wanted["config"], wanted.get("placement_policy", {})
    affinity = config.get("reservation_affinity", {})
    autoscaling = wanted.get("autoscaling", {})
    wanted_values = {
        "machine type": config["machine_type"],
        "zones": sorted(wanted["locations"]),
        "service account": config["service_account"],
        "spot": config.get("spot", False),
        "flex-start": config.get("flex_start", False),
        "reservation": list(affinity.get("values", [])),
        "most nodes": autoscaling.get("total_max_node_count", 0),
    }
    found_values = {
        "machine type": found.config.machine_type,
        "zones": sorted(found.locations),
        "service account": found.config.service_account,
        "spot": found.config.spot,
        "flex-start": bool(found.config.flex_start),
        "reservation": list(found.config.reservation_affinity.values),
        "most nodes": found.autoscaling.total_max_node_count,
    }
    if placement:  # a slice of one host has the shape of its machine type
        wanted_values["topology"] = placement["tpu_topology"]
        found_values["topology"] = found.placement_policy.tpu_topology
    if not autoscaling:  # what an autoscaler has changed is no difference
        wanted_values["nodes"] = wanted["initial_node_count"]
        found_values["nodes"] = found.initial_node_count
    return _differences(wanted_values, found_values)


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{name} is {_words(found[name])}, asked for is {_words(value)}"
        for name, value in wanted.items()
        if found[name] != value
    ]


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "none"
