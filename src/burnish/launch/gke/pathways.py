"""The JobSet of a job with Pathways: one head on a CPU node drives all TPU hosts.

The head's pod holds the resource manager and the proxy as sidecars (init containers that go on running: as plain
containers they would keep the job from ever completing) and the command; a worker runs on each TPU host. The job is
over when the head is.
"""

from collections.abc import Mapping

from burnish.launch.gke import objects
from burnish.launch.gke.names import (
    COORDINATOR,
    EXCLUSIVE_TOPOLOGY,
    JOB_INDEX,
    NODE_POOL,
    OWN_LABELS,
    REPLICATED_JOB_REPLICAS,
    TPU_RESOURCE,
    WORKER_JOB,
)
from burnish.launch.gke.parts import (
    as_written,
    failure_policy,
    from_label,
    job_specification,
    literal,
    network,
    place_environment,
    pod_template,
    verbose_environment,
    workload_container,
)
from burnish.launch.job import JOB_PATHWAYS_HEAD, JobSpec, PathwaysSpec

PROXY_PORT, MANAGER_PORT, MANAGER_DEBUG_PORT, WORKER_PORT = 29000, 29001, 29002, 29005
_HEAD = from_label("PATHWAYS_HEAD", COORDINATOR)
_MANAGER = f"--resource_manager_address=$(PATHWAYS_HEAD):{MANAGER_PORT}"


def pathways_specification(spec: JobSpec, pathways: PathwaysSpec) -> objects.JobSetSpecification:
    return objects.JobSetSpecification(
        replicated_jobs=(_head(spec, pathways), _workers(spec, pathways)),
        network=network(spec),
        coordinator=objects.Coordinator(replicated_job=JOB_PATHWAYS_HEAD, job_index=0, pod_index=0),
        success_policy=objects.SuccessPolicy(operator="All", target_replicated_jobs=(JOB_PATHWAYS_HEAD,)),
        startup_policy=objects.StartupPolicy(startup_policy_order="InOrder"),
        failure_policy=failure_policy(spec, "BlockingRecreate"),
        ttl_seconds_after_finished=spec.ttl_seconds,
    )


def _head(spec: JobSpec, pathways: PathwaysSpec) -> objects.ReplicatedJob:
    # Without a command, proxy and manager are what the pod runs, until the job is cancelled.
    restart_policy = None if pathways.headless else "Always"
    helpers = (_manager(spec, pathways, restart_policy), _proxy(spec, pathways, restart_policy))
    selector = {NODE_POOL: pathways.head_node_pool} if pathways.head_node_pool else {}
    if pathways.headless:
        pod = pod_template(spec, helpers, on_slice=False, node_selector=selector)
    else:
        command = workload_container(spec, _workload_environment(spec), chips=0)
        pod = pod_template(spec, (command,), init_containers=helpers, on_slice=False, node_selector=selector)
    return _replicated(
        JOB_PATHWAYS_HEAD, 1, "kubernetes.io/hostname", job_specification(spec, pod, hosts=1, is_main=True)
    )


def _workers(spec: JobSpec, pathways: PathwaysSpec) -> objects.ReplicatedJob:
    hosts = spec.slice.hosts
    given = (
        _HEAD,
        from_label("MEGASCALE_NUM_SLICES", REPLICATED_JOB_REPLICAS),
        from_label("MEGASCALE_SLICE_ID", JOB_INDEX),
        literal("MEGASCALE_COORDINATOR_ADDRESS", "$(PATHWAYS_HEAD)"),
        literal("MEGASCALE_GRPC_ENABLE_XOR_TRACER", "false"),
        *verbose_environment(spec),
    )
    worker = objects.Container(
        name="pathways-worker",
        image=pathways.worker_image,
        args=(
            f"--server_port={WORKER_PORT}",
            _MANAGER,
            f"--gcs_scratch_location={pathways.gcs_location}",
            *pathways.worker_args,
        ),
        env=_with_own(given, pathways.worker_env),
        ports=_ports(WORKER_PORT, 29006, 8471, 8080),
        resources=objects.Resources(limits={TPU_RESOURCE: str(spec.slice.chips_per_host)}),
    )
    pod = pod_template(spec, (worker,), restart_policy="OnFailure")
    # A worker that ends is started again in its place: four times a host, then the whole job is.
    job = job_specification(spec, pod, hosts=hosts, is_main=False, backoff_limit=4 * hosts)
    return _replicated(WORKER_JOB, spec.num_slices, NODE_POOL, job)


def _replicated(name: str, replicas: int, exclusive: str, job: objects.JobSpecification) -> objects.ReplicatedJob:
    metadata = objects.Metadata(labels=OWN_LABELS, annotations={EXCLUSIVE_TOPOLOGY: exclusive})
    return objects.ReplicatedJob(
        name=name, replicas=replicas, template=objects.JobTemplate(metadata=metadata, spec=job)
    )


def _proxy(spec: JobSpec, pathways: PathwaysSpec, restart_policy: str | None) -> objects.Container:
    return objects.Container.model_validate(
        {
            "name": "pathways-proxy",
            "image": pathways.proxy_image,
            "args": (
                f"--server_port={PROXY_PORT}",
                _MANAGER,
                f"--gcs_scratch_location={pathways.gcs_location}",
                *pathways.proxy_args,
            ),
            "env": _with_own((_HEAD, *verbose_environment(spec)), pathways.proxy_env),
            "ports": _ports(PROXY_PORT),
            "resources": _requests(pathways.proxy_cpu, pathways.proxy_memory),
            "restart_policy": restart_policy,
        }
    )


def _manager(spec: JobSpec, pathways: PathwaysSpec, restart_policy: str | None) -> objects.Container:
    given = (
        _HEAD,
        from_label("HOST_ADDRESS", COORDINATOR),
        literal("TPU_SKIP_MDS_QUERY", "true"),
        *verbose_environment(spec),
    )
    return objects.Container.model_validate(
        {
            "name": "pathways-rm",
            "image": pathways.server_image,
            "args": (
                f"--server_port={MANAGER_PORT}",
                f"--gcs_scratch_location={pathways.gcs_location}",
                "--node_type=resource_manager",
                f"--instance_count={spec.num_slices}",
                f"--instance_type={spec.slice.pathways_instance_type}",
                *pathways.server_args,
            ),
            "env": _with_own(given, pathways.server_env),
            "ports": _ports(MANAGER_PORT, MANAGER_DEBUG_PORT),
            "resources": _requests(pathways.server_cpu, pathways.server_memory),
            "restart_policy": restart_policy,
        }
    )


def _workload_environment(spec: JobSpec) -> tuple[objects.EnvVar, ...]:
    return (
        _HEAD,
        *place_environment(spec),
        literal("JAX_PLATFORMS", "proxy"),
        literal("XCLOUD_ENVIRONMENT", "GCP"),
        literal("JAX_BACKEND_TARGET", f"grpc://$(PATHWAYS_HEAD):{PROXY_PORT}"),
        *verbose_environment(spec),
    )


def _with_own(given: tuple[objects.EnvVar, ...], own: Mapping[str, str]) -> tuple[objects.EnvVar, ...]:
    kept = [variable for variable in given if variable.name not in own]
    return (*kept, *(literal(name, as_written(value)) for name, value in own.items()))


def _ports(*numbers: int) -> tuple[objects.ContainerPort, ...]:
    return tuple(objects.ContainerPort(container_port=number) for number in numbers)


def _requests(cpu: str, memory: str) -> objects.Resources:
    amounts = {"cpu": cpu, "memory": memory}
    return objects.Resources(requests=amounts, limits=amounts)
