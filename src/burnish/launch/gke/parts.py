"""What plain jobs and jobs with Pathways are made of alike: Jobs, pods, the container that runs the command, what it
mounts and what its environment is.
"""

import re
from collections.abc import Mapping

from burnish.launch.gke import objects
from burnish.launch.gke.names import (
    JOB_INDEX,
    OWN_LABELS,
    REPLICATED_JOB_REPLICAS,
    RESTART_ATTEMPT,
    TPU_ACCELERATOR,
    TPU_RESOURCE,
    TPU_TOPOLOGY,
    WORKLOAD_CONTAINER,
    secret_name,
)
from burnish.launch.job import VERBOSE_ENV, JobSpec, MountKind
from burnish.launch.topology import Slice

COORDINATOR_PORT = 8476  # jax.distributed's own
SHARED_MEMORY = "/dev/shm"

# Kubernetes sends SIGTERM to a container's first process only. This one hands it on to all that the command started,
# waits for them, and ends with the command's exit code. Its own standard error is closed: bash would report there how
# its child has ended.
_START = """\
export BURNISH_PROCESS_ID=$((JOB_INDEX * {hosts} + JOB_COMPLETION_INDEX))
exec 3>&2 2>/dev/null
set -m
"$@" 2>&3 3>&- &
child=$!
set +m
trap 'stopping=yes; kill -TERM -- "-$child"' TERM
wait "$child"; code=$?
while [ -n "$stopping" ]; do stopping=; wait "$child"; code=$?; done
exit "$code"
"""


def network(spec: JobSpec) -> objects.Network:
    return objects.Network(enable_dns_hostnames=True, publish_not_ready_addresses=True, subdomain=spec.name)


def failure_policy(spec: JobSpec, strategy: str) -> objects.FailurePolicy:
    """Restarts of the whole job; a time limit, or an exit code that is not to be restarted on, ends it at once."""
    rules = []
    if spec.timeout_seconds is not None:
        rules.append(_fail_on("time_limit", "DeadlineExceeded"))
    if spec.restart_on_exit_codes:
        rules.append(_fail_on("exit_code", "PodFailurePolicy"))
    return objects.FailurePolicy.model_validate(
        {"max_restarts": spec.restarts, "restart_strategy": strategy, "rules": tuple(rules) or None}
    )


def _fail_on(name: str, reason: str) -> objects.FailureRule:
    return objects.FailureRule(name=name, action="FailJobSet", on_job_failure_reasons=(reason,))


def job_specification(
    spec: JobSpec, pod: objects.PodTemplate, *, hosts: int, is_main: bool, backoff_limit: int = 0
) -> objects.JobSpecification:
    """A Job of one pod a host. The job's main part carries the time limit and the rule on exit codes."""
    policy = None
    if is_main and spec.restart_on_exit_codes:
        codes = objects.OnExitCodes(
            container_name=pod.spec.containers[0].name,
            operator="NotIn",
            values=tuple(sorted(set(spec.restart_on_exit_codes))),
        )
        disrupted = (objects.OnPodCondition(type="DisruptionTarget", status="True"),)
        policy = objects.PodFailurePolicy(
            rules=(
                # An evicted pod has an exit code, too, which says nothing: the job is restarted.
                objects.PodFailureRule(action="Count", on_pod_conditions=disrupted),
                objects.PodFailureRule(action="FailJob", on_exit_codes=codes),
            )
        )
    return objects.JobSpecification(
        parallelism=hosts,
        completions=hosts,
        backoff_limit=backoff_limit,
        completion_mode="Indexed",
        active_deadline_seconds=spec.timeout_seconds if is_main else None,
        pod_failure_policy=policy,
        template=pod,
    )


def pod_template(
    spec: JobSpec,
    containers: tuple[objects.Container, ...],
    *,
    init_containers: tuple[objects.Container, ...] | None = None,
    on_slice: bool = True,
    restart_policy: str = "Never",
    node_selector: Mapping[str, str] | None = None,
) -> objects.PodTemplate:
    """A pod on a host of the job's slice or, with `on_slice` false, on one that `node_selector` allows."""
    machine = spec.slice
    volumes = tuple(_volumes(spec, machine)) if any(container.volume_mounts for container in containers) else ()
    selector = dict(node_selector or {})
    if on_slice:
        selector |= _slice_selector(machine) | dict(spec.node_constraints)
    annotations = {}
    if on_slice and machine.is_tpu:
        annotations["cloud.google.com/gke-tpu-slice-topology"] = machine.topology
    if any(volume.csi for volume in volumes):
        annotations["gke-gcsfuse/volumes"] = "true"
    toleration = objects.Toleration(key=TPU_RESOURCE, operator="Exists", effect="NoSchedule")
    pull_secrets = (objects.LocalObjectReference(name=spec.image_pull_secret),) if spec.image_pull_secret else None
    pod = objects.PodSpec.model_validate(
        {
            "restart_policy": restart_policy,
            "termination_grace_period_seconds": spec.grace_seconds,
            "containers": containers,
            "init_containers": init_containers,
            "host_network": True if machine.is_tpu else None,
            "dns_policy": "ClusterFirstWithHostNet" if machine.is_tpu else None,
            "node_selector": selector or None,
            "tolerations": (toleration,) if on_slice and machine.is_tpu else None,
            "volumes": volumes or None,
            "image_pull_secrets": pull_secrets,
            "service_account_name": spec.service_account,
            "priority_class_name": spec.priority,
        }
    )
    return objects.PodTemplate(metadata=objects.Metadata(labels=OWN_LABELS, annotations=annotations or None), spec=pod)


def workload_container(spec: JobSpec, given: tuple[objects.EnvVar, ...], *, chips: int) -> objects.Container:
    """The container that runs the command. `given` is the launcher's environment; the job's own --env wins over it."""
    own = {
        **{name: objects.EnvVar(name=name, value=as_written(value)) for name, value in spec.env.items()},
        **{name: _from_secret(spec, name) for name in spec.secret_env},
    }
    environment = (*(variable for variable in given if variable.name not in own), *own.values())
    mounts = [
        objects.VolumeMount(name=_volume_name(index), mount_path=mount.path, read_only=mount.read_only or None)
        for index, mount in enumerate(spec.mounts)
    ]
    if _has_shared_memory(spec):
        mounts.append(objects.VolumeMount(name="shared-memory", mount_path=SHARED_MEMORY))
    return objects.Container(
        name=WORKLOAD_CONTAINER,
        image=spec.image or "",
        command=_argv(spec),
        env=environment or None,
        resources=objects.Resources(limits={TPU_RESOURCE: str(chips)}) if chips else None,
        volume_mounts=tuple(mounts) or None,
    )


def place_environment(spec: JobSpec) -> tuple[objects.EnvVar, ...]:
    """By what the processes of a job know where they are and find each other: the same variables as launch/local sets.
    BURNISH_PROCESS_ID is computed when the container starts (_argv), JOB_COMPLETION_INDEX comes from Kubernetes."""
    return (
        literal("JOBSET_NAME", spec.name),
        literal("REPLICATED_JOB_NAME", spec.main_job),
        from_label("JOB_INDEX", JOB_INDEX),
        from_label("RESTART_ATTEMPT", RESTART_ATTEMPT),
        literal("BURNISH_COORDINATOR_ADDRESS", f"{_first_host(spec)}:{COORDINATOR_PORT}"),
        literal("BURNISH_NUM_PROCESSES", str(_processes_per_slice(spec) * (1 if spec.pathways else spec.num_slices))),
    )


def verbose_environment(spec: JobSpec) -> tuple[objects.EnvVar, ...]:
    return tuple(literal(name, value) for name, value in VERBOSE_ENV.items()) if spec.verbose else ()


def slices_environment(spec: JobSpec) -> tuple[objects.EnvVar, ...]:
    """By what the TPU runtime finds the other slices."""
    if spec.num_slices == 1:
        return ()
    return (
        literal("MEGASCALE_COORDINATOR_ADDRESS", _first_host(spec)),
        from_label("MEGASCALE_NUM_SLICES", REPLICATED_JOB_REPLICAS),
        from_label("MEGASCALE_SLICE_ID", JOB_INDEX),
    )


def _first_host(spec: JobSpec) -> str:
    return f"{spec.name}-{spec.main_job}-0-0.{spec.name}"


def _processes_per_slice(spec: JobSpec) -> int:
    return 1 if spec.pathways else spec.slice.hosts


def literal(name: str, value: str) -> objects.EnvVar:
    return objects.EnvVar(name=name, value=value)


def from_label(name: str, label: str) -> objects.EnvVar:
    source = objects.EnvSource(field_ref=objects.FieldRef(field_path=f"metadata.labels['{label}']"))
    return objects.EnvVar(name=name, value_from=source)


def as_written(text: str) -> str:
    """The text, escaped so that Kubernetes hands it on as it is: it would replace $(NAME) and make $$ one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _argv(spec: JobSpec) -> tuple[str, ...]:
    start = _START.format(hosts=_processes_per_slice(spec))
    return tuple(map(as_written, ("bash", "-c", start, "bash", *spec.argv)))


def _from_secret(spec: JobSpec, name: str) -> objects.EnvVar:
    reference = objects.SecretKeyRef(name=secret_name(spec.name), key=name)
    return objects.EnvVar(name=name, value_from=objects.EnvSource(secret_key_ref=reference))


def _slice_selector(machine: Slice) -> dict[str, str]:
    if not machine.is_tpu:
        return {"node.kubernetes.io/instance-type": machine.machine_type}
    return {TPU_ACCELERATOR: machine.accelerator, TPU_TOPOLOGY: machine.topology}


def _volumes(spec: JobSpec, machine: Slice) -> list[objects.Volume]:
    volumes = []
    for index, mount in enumerate(spec.mounts):
        name = _volume_name(index)
        if mount.kind is MountKind.BUCKET:
            volumes.append(objects.Volume(name=name, csi=_bucket(mount.source, mount.read_only, machine)))
        elif mount.kind is MountKind.HOST:
            volumes.append(objects.Volume(name=name, host_path=objects.HostPathVolume(path=mount.source)))
        else:
            claim = objects.ClaimVolume(claim_name=mount.source, read_only=mount.read_only or None)
            volumes.append(objects.Volume(name=name, persistent_volume_claim=claim))
    if _has_shared_memory(spec):
        # A container has 64 MB of shared memory else, too little for data workers.
        volumes.append(objects.Volume(name="shared-memory", empty_dir=objects.EmptyDirVolume(medium="Memory")))
    return volumes


def _bucket(source: str, read_only: bool, machine: Slice) -> objects.CsiVolume:
    bucket, _, directory = source.removeprefix("gs://").partition("/")
    options = ["implicit-dirs"] + ([f"only-dir={directory.strip('/')}"] if directory.strip("/") else [])
    attributes = {"bucketName": bucket, "mountOptions": ",".join(options)}
    if machine.is_tpu:
        attributes["hostNetworkPodKSA"] = "true"  # else a pod on the host's network has no service account there
    return objects.CsiVolume(
        driver="gcsfuse.csi.storage.gke.io", read_only=read_only or None, volume_attributes=attributes
    )


def _volume_name(index: int) -> str:
    return f"mount-{index}"


def _has_shared_memory(spec: JobSpec) -> bool:
    return all(mount.path.rstrip("/") != SHARED_MEMORY for mount in spec.mounts)
