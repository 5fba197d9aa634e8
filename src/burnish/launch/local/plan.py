"""What a job is as processes: one per host, with the virtual chips and the environment that its pod would have.

The plan is a document of JSON values: `--dry-run` prints it, and the supervisor runs exactly it. Secrets are named
in it only. What can only be had on a cluster is left out and named, or refused where the job would not be the same.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from burnish.launch.errors import LaunchError
from burnish.launch.job import VERBOSE_ENV, JobSpec, MountKind

_CHIPS_FLAG = "--xla_force_host_platform_device_count"
_LOOPBACK = "127.0.0.1"
_MAX_PROCESSES = 512  # what is more is a slip of the keyboard, which would bring the machine to a stand

# What a process has from the environment that the job was submitted in. A pod has nothing of it, so this is only what
# programs of this machine need to be found and to find their files: the rest is given by --env, as on a cluster.
_INHERITED = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV"),
        *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "JAX_COMPILATION_CACHE_DIR"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    }
)


def make_plan(spec: JobSpec, directory: str) -> dict[str, Any]:
    """The job's processes, to be run in `directory`. Raises LaunchError for what this machine cannot do."""
    _check(spec)
    machine, hosts = spec.slice, []
    if spec.pathways:
        chips = machine.chips * spec.num_slices
        hosts.append(_host(spec, hosts=1, num_slices=1, slice_id=0, host_id=0, chips=chips))
    else:
        for slice_id in range(spec.num_slices):
            for host_id in range(machine.hosts):
                hosts.append(
                    _host(
                        spec,
                        hosts=machine.hosts,
                        num_slices=spec.num_slices,
                        slice_id=slice_id,
                        host_id=host_id,
                        chips=machine.chips_per_host,
                    )
                )
    return {
        "kind": "LocalJob",
        "name": spec.name,
        "argv": list(spec.argv),
        "directory": directory,
        "restarts": spec.restarts,
        "restart_on_exit_codes": list(spec.restart_on_exit_codes),
        "grace_seconds": spec.grace_seconds,
        "timeout_seconds": spec.timeout_seconds,
        "ttl_seconds": spec.ttl_seconds,
        "secrets": sorted(spec.secret_env),
        "left_out": _left_out(spec),
        "hosts": hosts,
    }


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What every process inherits. The programs beside the running Python, burnish among them, are found first."""
    kept = {name: value for name, value in environment.items() if name in _INHERITED or name.startswith("LC_")}
    programs = os.path.dirname(sys.executable)
    kept["PATH"] = os.pathsep.join(filter(None, (programs, kept.get("PATH", os.defpath))))
    return kept


def start_environment(port: int, attempt: int) -> dict[str, str]:
    """What differs from one start of the job to the next: the coordinator's free port and the number of restarts."""
    return {"BURNISH_COORDINATOR_ADDRESS": f"{_LOOPBACK}:{port}", "RESTART_ATTEMPT": str(attempt)}


def _host(spec: JobSpec, *, hosts: int, num_slices: int, slice_id: int, host_id: int, chips: int) -> dict[str, Any]:
    environment = {
        **(VERBOSE_ENV if spec.verbose else {}),
        "JAX_PLATFORMS": "cpu",
        **spec.env,
        "JOBSET_NAME": spec.name,
        "REPLICATED_JOB_NAME": spec.main_job,
        "JOB_INDEX": str(slice_id),
        "JOB_COMPLETION_INDEX": str(host_id),
        "BURNISH_NUM_PROCESSES": str(num_slices * hosts),
        "BURNISH_PROCESS_ID": str(slice_id * hosts + host_id),
    }
    if chips:
        flags = f"{_CHIPS_FLAG}={chips}"
        environment["XLA_FLAGS"] = f"{spec.env['XLA_FLAGS']} {flags}" if spec.env.get("XLA_FLAGS") else flags
        environment["TPU_WORKER_ID"] = str(host_id)
        environment["TPU_WORKER_HOSTNAMES"] = ",".join([_LOOPBACK] * hosts)
    if num_slices > 1:
        environment["MEGASCALE_NUM_SLICES"] = str(num_slices)
        environment["MEGASCALE_SLICE_ID"] = str(slice_id)
        environment["MEGASCALE_COORDINATOR_ADDRESS"] = _LOOPBACK
    return {"host": f"{spec.main_job}-{slice_id}-{host_id}", "chips": chips, "environment": environment}


def _check(spec: JobSpec) -> None:
    processes = 1 if spec.pathways else spec.num_slices * spec.slice.hosts
    if processes > _MAX_PROCESSES:
        raise LaunchError(
            f"--num-slices={spec.num_slices} of {spec.slice} are {processes} processes; the local backend starts "
            f"{_MAX_PROCESSES} at most"
        )
    if spec.pathways and spec.pathways.headless:
        raise LaunchError("--pathways-headless: on this machine there is no proxy to wait for clients; give --command")
    if _CHIPS_FLAG in spec.env.get("XLA_FLAGS", "") and spec.slice.is_tpu:
        raise LaunchError(f"--env=XLA_FLAGS: {_CHIPS_FLAG} is what --compute-type says; leave it out of the variable")
    for mount in spec.mounts:
        if mount.kind is not MountKind.HOST or mount.source != mount.path:
            raise LaunchError(
                f"--mount={mount.source}:{mount.path}: the local backend mounts nothing; the job sees this machine's "
                "directories where they are, so leave --mount out or give one with the same path on both sides"
            )
        if not os.path.isdir(mount.source):
            raise LaunchError(f"--mount={mount.source}:{mount.path}: there is no directory {mount.source}")


def _left_out(spec: JobSpec) -> list[str]:
    """Flags that mean something on a cluster only."""
    given = {
        "--image": spec.image,
        "--queue": spec.queue,
        "--priority": spec.priority,
        "--node-constraint": spec.node_constraints,
        "--image-pull-secret": spec.image_pull_secret,
        "--service-account": spec.service_account,
        "--pathways-*": spec.pathways,
    }
    return [flag for flag, value in given.items() if value]
