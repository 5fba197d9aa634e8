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
from threading import Event, Thread, Timer
from typing import Any

import jax
from jax._src.distributed import global_state  # the processes' own store has no public name

from burnish.parallel import pathways
from burnish.parallel.errors import ProcessError

EXPLICIT = ("BURNISH_COORDINATOR_ADDRESS", "BURNISH_NUM_PROCESSES", "BURNISH_PROCESS_ID")
HEARTBEAT = "BURNISH_HEARTBEAT_SECONDS"
DEFAULT_HEARTBEAT_SECONDS = 100
START_SECONDS = 300
FAIL_TOGETHER_SECONDS = 30
"""How much later than the first the last process may come to an error that all of them have."""

WATCH_SECONDS = 2

_FAILURE = "burnish/failure"
"""Where the first process to fail says why, in what JAX's processes share."""


@dataclass(frozen=True)
class Cluster:
    """How processes find one another. Without an address JAX asks the environment `name`."""

    name: str
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def describe(self) -> str:
        if self.coordinator_address is None:
            return self.name
        return f"process {self.process_id} of {self.num_processes}, coordinator {self.coordinator_address}"


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
        address = env["BURNISH_COORDINATOR_ADDRESS"]
        if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
            raise ProcessError(f"BURNISH_COORDINATOR_ADDRESS={address}: it must be host:port of process 0")
        return Cluster("BURNISH_*", address, count, process) if count > 1 else None
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
        with _deadline(cluster):
            jax.distributed.initialize(
                cluster.coordinator_address,
                cluster.num_processes,
                cluster.process_id,
                initialization_timeout=2 * START_SECONDS,
                heartbeat_timeout_seconds=heartbeat,
                shutdown_timeout_seconds=heartbeat,
            )
    except (RuntimeError, ValueError) as error:
        raise ProcessError(f"{cluster.describe()}: the processes could not find one another: {error}") from error
    if cluster.num_processes not in (None, jax.process_count()):
        raise ProcessError(
            f"{cluster.describe()}: process 0 was told of {jax.process_count()} processes; give all the same number"
        )
    mine, everything = jax.local_device_count(), jax.device_count()
    print(
        f"Process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}: {mine} of {everything} "
        f"devices ({jax.devices()[0].device_kind}), found by {cluster.name}",
        flush=True,
    )


@contextmanager
def _deadline(cluster: Cluster) -> Iterator[None]:
    """Ends the process where the others have not come after START_SECONDS: JAX would abort it with a stack trace."""

    def give_up() -> None:
        print(
            f"error: {cluster.describe()}: not all processes were there after {START_SECONDS} s. Each process id from "
            "0 up has to be started, once, and all must reach the coordinator's port",
            file=sys.stderr,
        )
        _leave(ProcessError.exit_code)

    timer = Timer(START_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def others_needed() -> Iterator[None]:
    """Within it no process is left waiting for one that has failed. What fails in all of them alike goes its way. One
    that fails alone tells the others why, and all end within twice FAIL_TOGETHER_SECONDS, whatever they wait for. Of
    one that is gone without a word JAX says something at the next exchange, which becomes a ProcessError."""
    if jax.process_count() == 1:
        yield
        return
    over = Event()
    Thread(target=_watch, args=(over,), daemon=True).start()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        over.set()
        if _is_of_others(error):
            atexit.register(_leave, ProcessError.exit_code)
            first = str(error).strip().splitlines()[0]
            raise ProcessError(_without_others(_failure() or f"one has gone or is far behind ({first})")) from error
        _announce(error)
        if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C: whoever presses it does not want to wait
            atexit.register(_leave, 130)
        elif not _all_come_to_the_end():
            atexit.register(_leave, getattr(error, "exit_code", 1))
        raise
    finally:
        over.set()


def _is_of_others(error: BaseException) -> bool:
    """Whether something could not be exchanged with another process; being out of memory is this one's own. What Gloo,
    which connects processes with CPU devices, says comes as ValueError where it says it as a program is started."""
    if isinstance(error, ValueError):
        return "Gloo" in str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith("RESOURCE_EXHAUSTED")


def _without_others(why: str) -> str:
    return (
        f"process {jax.process_index()} cannot go on without the others: {why}. The cause is what that one said last; "
        "start all of them again with resume=true"
    )


def _announce(error: BaseException) -> None:
    text = f"process {jax.process_index()} has failed: {str(error) or type(error).__name__}"
    with suppress(RuntimeError):  # another one was first, or the one that keeps it has gone
        _shared().key_value_set(_FAILURE, text)


def _all_come_to_the_end() -> bool:
    """Whether the others fail, too, soon enough."""
    try:
        _shared().wait_at_barrier("burnish/failed", FAIL_TOGETHER_SECONDS * 1000)
    except RuntimeError:
        return False
    return True


def _failure() -> str | None:
    """What the first process to fail said; None while none has, and where the process that keeps it has gone."""
    try:
        return str(_shared().key_value_try_get(_FAILURE))
    except RuntimeError:
        return None


def _watch(over: Event) -> None:
    """Ends this process when another one has failed and it does not come to an error itself: it may be waiting for that
    one in a program on its devices, which nothing interrupts. Process 0 goes after the one that has failed, which JAX
    would abort."""
    patience = FAIL_TOGETHER_SECONDS * (1.5 if jax.process_index() == 0 else 0.5)
    while not over.wait(WATCH_SECONDS):
        why = _failure()
        if why and not over.wait(patience):
            print(f"error: {_without_others(why)}", file=sys.stderr)
            _leave(ProcessError.exit_code)


def _shared() -> Any:
    """The store and barriers that JAX's processes have in common."""
    return global_state.client


def _leave(status: int) -> None:
    """Ends the process without JAX's farewell, for which it would wait for the others, and then abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _number(env: Mapping[str, str], name: str, least: int) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise ProcessError(f"{name}={env[name]}: it must be a whole number, at least {least}")
    return value
