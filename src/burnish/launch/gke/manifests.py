"""A JobSpec as the JobSet and the Secret that run it, written out so that they need no mutating webhook.

A plain job is one replicated job: a Job a slice, a pod a host, the command in each. A job with Pathways is built in
pathways from the same parts. Secret values are in the Secret alone; the JobSet names their keys.
"""

from burnish.launch.errors import LaunchError
from burnish.launch.gke import objects
from burnish.launch.gke.names import EXCLUSIVE_TOPOLOGY, NODE_POOL, OWN_LABELS, QUEUE_LABEL, secret_name
from burnish.launch.gke.parts import (
    failure_policy,
    job_specification,
    network,
    place_environment,
    pod_template,
    slices_environment,
    verbose_environment,
    workload_container,
)
from burnish.launch.gke.pathways import pathways_specification
from burnish.launch.job import JOB_MAIN, JobSpec


def job_set(spec: JobSpec) -> objects.JobSet:
    """The job's JobSet. Raises LaunchError where the job lacks what a cluster needs."""
    if _is_headless(spec):
        for flag, given in (("--env", spec.env), ("--mount", spec.mounts)):
            if given:
                raise LaunchError(f"{flag}: with --pathways-headless there is no command to have it; leave it out")
    elif not spec.image:
        raise LaunchError("--image is required on GKE: the container image that the command runs in")
    specification = pathways_specification(spec, spec.pathways) if spec.pathways else _plain_specification(spec)
    labels = OWN_LABELS | ({QUEUE_LABEL: spec.queue} if spec.queue else {})
    return objects.JobSet(metadata=objects.Metadata(name=spec.name, labels=labels), spec=specification)


def secret(spec: JobSpec) -> objects.Secret | None:
    """The Secret with the job's secret variables; None where there are none, or no command to have them."""
    if not spec.secret_env or _is_headless(spec):
        return None
    metadata = objects.Metadata(name=secret_name(spec.name), labels=OWN_LABELS)
    return objects.Secret(metadata=metadata, string_data=dict(spec.secret_env))


def owner(name: str, uid: str) -> objects.OwnerReference:
    """What a Secret says of the JobSet with which it is deleted."""
    return objects.OwnerReference(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name=name, uid=uid)


def _plain_specification(spec: JobSpec) -> objects.JobSetSpecification:
    given = (*place_environment(spec), *slices_environment(spec), *verbose_environment(spec))
    pod = pod_template(spec, (workload_container(spec, given, chips=spec.slice.chips_per_host),))
    exclusive = {EXCLUSIVE_TOPOLOGY: NODE_POOL} if spec.slice.hosts > 1 else None
    main = objects.ReplicatedJob(
        name=JOB_MAIN,
        replicas=spec.num_slices,
        template=objects.JobTemplate(
            metadata=objects.Metadata(labels=OWN_LABELS, annotations=exclusive),
            spec=job_specification(spec, pod, hosts=spec.slice.hosts, is_main=True),
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


def _is_headless(spec: JobSpec) -> bool:
    return spec.pathways is not None and spec.pathways.headless
