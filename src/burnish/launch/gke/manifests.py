"""A JobSpec as the JobSet and the Secret that run it, written out so that they need no mutating webhook.

A plain job is one replicated job: a Job a slice, a pod a host, the command in each. A job with Pathways is built in
pathways from the same parts. Secret values are in the Secret alone; the JobSet names their keys.
"""

import re
from collections.abc import Mapping

from burnish.launch.errors import LaunchError
from burnish.launch.gke import objects
from burnish.launch.gke.names import (
    EXCLUSIVE_TOPOLOGY,
    JOB_INDEX,
    NODE_POOL,
    OWN_LABELS,
    QUEUE_LABEL,
    REPLICATED_JOB_REPLICAS,
    RESTART_ATTEMPT,
    TPU_ACCELERATOR,
    TPU_RESOURCE,
    TPU_TOPOLOGY,
    WORKLOAD_CONTAINER,
    secret_name,
)
from burnish.launch.job import JOB_MAIN, VERBOSE_ENV, JobSpec, MountKind
from burnish.launch.topology import Slice

COORDINATOR_PORT = 8476  # jax.distributed's own
SHARED_MEMORY = "/dev/shm"

# Kubernetes sends SIGTERM to a container's first process only. This one hands it on to all that the command started,
# waits for them, and ends with the command's exit code. The command's own shell waits for what it runs, too.
_START = """\
set -m
{before}"$@" &
child=$!
set +m
trap 'stopping=yes; kill -TERM -- "-$child"' TERM
wait "$child"; code=$?
while [ -n "$stopping" ]; do stopping=; wait "$child"; code=$?; done
exit "$code"
"""
_SHELL_TRAP = "trap 'exit $?' TERM\n"


def job_set(spec: JobSpec) -> objects.JobSet:
    """The job's JobSet. Raises LaunchError where the job lacks what a cluster needs."""
    if _is_headless(spec):
        for flag, given in (("--env", spec.env), ("--mount", spec.mounts)):
            if given:
                raise LaunchError(f"{flag}: with --pathways-headless there is no command to have it; leave it out")
    elif not spec.image:
        raise LaunchError("--image is required on GKE: the container image that the command runs in")
    if spec.pathways:
        from burnish.launch.gke.pathways import pathways_specification

        specification = pathways_specification(spec, spec.pathways)
    else:
        specification = plain_specification(spec)
    labels = OWN_LABELS | ({QUEUE_LABEL: spec.queue} if spec.queue else {})
    return objects.JobSet(metadata=objects.Metadata(name=spec.name, labels=labels), spec=specification)


def secret(spec: JobSpec, owner_uid: str | None = None) -> objects.Secret | None:
    """The Secret with the job's secret variables, deleted with the JobSet that owns it; None where there are none, or
    no command to have them."""
    if not spec.secret_env or _is_headless(spec):
        return None
    owner = objects.OwnerReference(
        api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name=spec.name, uid=owner_uid or ""
    )
    metadata = objects.Metadata(
        name=secret_name(spec.name), labels=OWN_LABELS, owner_references=(owner,) if owner_uid else None
    )
    return objects.Secret(metadata=metadata, string_data=dict(spec.secret_env))


def plain_specification(spec: JobSpec) -> objects.JobSetSpecification:
    pod = pod_template(spec, (workload_container(spec, plain_environment(spec), chips=spec.slice.chips_per_host),))
    exclusive = {EXCLUSIVE_TOPOLOGY: NODE_POOL} if spec.slice.hosts > 1 else None
    main = objects.ReplicatedJob(
        name=JOB_MAIN,
        replicas=spec.num_slices,
        template=objects.JobTemplate(
            metadata=objects.Metadata(labels=OWN_LABELS, annotations=exclusive),
            spec=job_specification(spec, pod, hosts=spec.slice.hosts),
        ),
    )
    return objects.JobSetSpecification(
        replicated_jobs=(main,),
        network=network(spec),
        success_policy=objects.SuccessPolicy(operator="All"),
        startup_policy=objects.StartupPolicy(startup_policy_order="AnyOrder"),
        failure_policy=failure_policy(spec, "Recreate"),
        ttl_seconds_after_finished=spec.ttl_seconds,
    )


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
    spec: JobSpec, pod: objects.PodTemplate, *, hosts: int, backoff_limit: int = 0
) -> objects.JobSpecification:
    """A Job of one pod a host. The pods that run the command carry the time limit and the rule on exit codes."""
    runs_command = pod.spec.containers[0].name == WORKLOAD_CONTAINER
    policy = None
    if spec.restart_on_exit_codes and runs_command:
        codes = objects.OnExitCodes(
            container_name=WORKLOAD_CONTAINER, operator="NotIn", values=tuple(sorted(set(spec.restart_on_exit_codes)))
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
        active_deadline_seconds=spec.timeout_seconds if runs_command else None,
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


def plain_environment(spec: JobSpec) -> tuple[objects.EnvVar, ...]:
    """By what the processes of a job know where they are and find each other. Where there are several slices, the
    process's number is computed when the container starts (_argv)."""
    first = f"{spec.name}-{JOB_MAIN}-0-0.{spec.name}"
    variables = [
        literal("JOBSET_NAME", spec.name),
        literal("REPLICATED_JOB_NAME", JOB_MAIN),
        from_label("JOB_INDEX", JOB_INDEX),
        from_label("RESTART_ATTEMPT", RESTART_ATTEMPT),
        literal("BURNISH_COORDINATOR_ADDRESS", f"{first}:{COORDINATOR_PORT}"),
        literal("BURNISH_NUM_PROCESSES", str(spec.slice.hosts * spec.num_slices)),
    ]
    if spec.num_slices > 1:
        variables += [
            literal("MEGASCALE_COORDINATOR_ADDRESS", first),
            from_label("MEGASCALE_NUM_SLICES", REPLICATED_JOB_REPLICAS),
            from_label("MEGASCALE_SLICE_ID", JOB_INDEX),
        ]
    if spec.verbose:
        variables += [literal(name, value) for name, value in VERBOSE_ENV.items()]
    return tuple(variables)


def literal(name: str, value: str) -> objects.EnvVar:
    return objects.EnvVar(name=name, value=value)


def from_label(name: str, label: str) -> objects.EnvVar:
    source = objects.EnvSource(field_ref=objects.FieldRef(field_path=f"metadata.labels['{label}']"))
    return objects.EnvVar(name=name, value_from=source)


def as_written(text: str) -> str:
    """The text, escaped so that Kubernetes hands it on as it is: it would replace $(NAME) and make $$ one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _argv(spec: JobSpec) -> tuple[str, ...]:
    start = _START.format(before=_process_id(spec))
    return tuple(map(as_written, ("bash", "-c", start, "bash", "bash", "-c", _SHELL_TRAP + spec.command)))


def _is_headless(spec: JobSpec) -> bool:
    return spec.pathways is not None and spec.pathways.headless


def _process_id(spec: JobSpec) -> str:
    if spec.pathways:
        return ""
    return f"export BURNISH_PROCESS_ID=$((JOB_INDEX * {spec.slice.hosts} + JOB_COMPLETION_INDEX))\n"


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
