"""Start-up of many processes: who is one of them, and where the first one is.

Whoever starts the processes says so in the environment: burnish's launcher, and people by hand, with
BURNISH_COORDINATOR_ADDRESS (host:port of process 0), BURNISH_NUM_PROCESSES and BURNISH_PROCESS_ID; Slurm, slices of TPU
VMs and GKE with variables of their own, which JAX knows. A process that nothing says this to is alone. Under Pathways
one process controls all devices and there is nothing to start.
"""

import atexit
import glob
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import jax

from burnish.parallel import pathways
from burnish.parallel.errors import ProcessError

EXPLICIT = ("BURNISH_COORDINATOR_ADDRESS", "BURNISH_NUM_PROCESSES", "BURNISH_PROCESS_ID")
HEARTBEAT = "BURNISH_HEARTBEAT_SECONDS"
DEFAULT_HEARTBEAT_SECONDS = 100
START_SECONDS = 300


@dataclass(frozen=True)
class Cluster:
    """How processes find one another. Without an address JAX asks the environment `name`."""

    name: str
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def find_cluster(env: Mapping[str, str]) -> Cluster | None:
    """The cluster that the environment describes; None for a process that is alone. Raises ProcessError where it says
    half of it."""
    given = [name for name in EXPLICIT if env.get(name)]
    if given:
        if missing := [name for name in EXPLICIT if name not in given]:
            raise ProcessError(f"{', '.join(given)} is set, but {', '.join(missing)} is not; set all three or none")
        count, process = _number(env, "BURNISH_NUM_PROCESSES", 1), _number(env, "BURNISH_PROCESS_ID", 0)
        if process >= count:
            raise ProcessError(f"BURNISH_PROCESS_ID={process} must be below BURNISH_NUM_PROCESSES={count}")
        return Cluster("BURNISH_*", env["BURNISH_COORDINATOR_ADDRESS"], count, process) if count > 1 else None
    platforms = env.get("JAX_PLATFORMS", "")
    if "proxy" in platforms:
        return None
    if int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))) > 1 and "SLURM_PROCID" in env:
        return Cluster("Slurm")
    if platforms and "tpu" not in platforms:
        return None
    if "TPU_WORKER_HOSTNAMES" in env:
        return Cluster("TPU slice") if "," in env["TPU_WORKER_HOSTNAMES"] else None
    on_tpu_vm = importlib.util.find_spec("libtpu") and (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))
    return Cluster("TPU VM") if on_tpu_vm and not env.get("TPU_SKIP_MDS_QUERY") else None


def start(env: Mapping[str, str] | None = None) -> None:
    """Join the other processes, where there are others, and say so in one line. To be called before anything is
    computed, once or more. Raises ProcessError."""
    env = os.environ if env is None else env
    if pathways.is_asked_for(env):
        pathways.initialize()
        return
    cluster = find_cluster(env)
    if cluster is None or jax.distributed.is_initialized():
        return
    heartbeat = _number(env, HEARTBEAT, 1) if env.get(HEARTBEAT) else DEFAULT_HEARTBEAT_SECONDS
    try:
        jax.distributed.initialize(
            cluster.coordinator_address,
            cluster.num_processes,
            cluster.process_id,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=heartbeat,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessError(f"the processes of {cluster.name} could not find one another: {error}") from error
    mine, everything = jax.local_device_count(), jax.device_count()
    print(
        f"Process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}: {mine} of {everything} "
        f"devices ({jax.devices()[0].device_kind}), found by {cluster.name}",
        flush=True,
    )


@contextmanager
def others_needed() -> Iterator[None]:
    """What JAX says inside when another process has gone, as a ProcessError that tells where to look."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        atexit.register(_leave)
        first = str(error).strip().splitlines()[0]
        raise ProcessError(
            f"process {jax.process_index()} cannot go on without the others, one of which has gone or is far behind "
            f"({first}). The cause is what that one said last; start all of them again with resume=true"
        ) from error


def _leave() -> None:
    """Ends the process with status 1 without JAX's farewell, for which it would wait for the process that has gone, and
    then abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(ProcessError.exit_code)


def _number(env: Mapping[str, str], name: str, least: int) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise ProcessError(f"{name}={env[name]}: it must be a whole number, at least {least}")
    return value
