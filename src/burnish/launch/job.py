"""What a job is (JobSpec) and what is known of one that was submitted (JobStatus, LogLine, Event).

A JobSpec is checked when it is made: a wrong one is an error that names the flag, before anything is started or sent.
Values of `secret_env` are in no repr and in no plan; whoever runs the job hands them to its processes by environment.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from burnish.launch.errors import LaunchError
from burnish.launch.names import RFC_1035, check_name
from burnish.launch.topology import Slice, resolve

MAX_NAME = 28
MAX_NAME_PATHWAYS = 22  # <name>-pathways-head-0-0.<name> has to fit a label of 63 bytes
JOB_MAIN = "main-job"  # the replicated job that runs the command
JOB_PATHWAYS_HEAD = "pathways-head"  # the one that runs it with Pathways

_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
ENV_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?|")
_DURATION = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s?)?")
HF_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")
_QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")

# What the launcher itself says to a process; a job that set these would not know where it is.
RESERVED_ENV = frozenset(
    {
        "JOB_COMPLETION_INDEX",
        "JOB_INDEX",
        "JOBSET_NAME",
        "REPLICATED_JOB_NAME",
        "RESTART_ATTEMPT",
        "TPU_WORKER_ID",
        "TPU_WORKER_HOSTNAMES",
        "BURNISH_COORDINATOR_ADDRESS",
        "BURNISH_NUM_PROCESSES",
        "BURNISH_PROCESS_ID",
        "PATHWAYS_HEAD",
    }
)

# What --verbose adds to a process's environment.
VERBOSE_ENV = MappingProxyType({"TPU_STDERR_LOG_LEVEL": "0", "TPU_MIN_LOG_LEVEL": "0", "TF_CPP_MIN_LOG_LEVEL": "0"})


class JobState(StrEnum):
    PENDING = "Pending"
    SUSPENDED = "Suspended"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class MountKind(StrEnum):
    BUCKET = "bucket"  # gs://…, by gcsfuse
    HOST = "host"  # a directory of the node
    CLAIM = "claim"  # a persistent volume claim


@dataclass(frozen=True)
class Mount:
    """A bucket, a directory of the node or a claim that the job sees under `path`."""

    kind: MountKind
    source: str  # gs://bucket/directory, /directory, or the claim's name
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class PathwaysSpec:
    """A job with one controller for all hosts. Sizes are Kubernetes quantities."""

    gcs_location: str
    proxy_args: tuple[str, ...] = ()
    server_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    proxy_env: Mapping[str, str] = field(default_factory=dict)
    server_env: Mapping[str, str] = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    proxy_image: str = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/proxy_server:latest"
    server_image: str = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server:latest"
    worker_image: str = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server:latest"
    head_node_pool: str | None = None
    headless: bool = False  # no command: the proxy waits for a client from outside
    proxy_cpu: str = "16"
    proxy_memory: str = "100Gi"
    server_cpu: str = "8"
    server_memory: str = "32Gi"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"gs://[a-z0-9][-a-z0-9_.]{1,220}[a-z0-9](/.*)?", self.gcs_location):
            raise LaunchError(
                f"--pathways-gcs-location={self.gcs_location}: expected a place such as gs://bucket/pathways/"
            )
        for part in ("proxy", "server", "worker"):
            mapping = getattr(self, f"{part}_env")
            _check_env(mapping, f"--pathways-{part}-env")
            object.__setattr__(self, f"{part}_env", MappingProxyType(dict(mapping)))
        for name in ("proxy_cpu", "proxy_memory", "server_cpu", "server_memory"):
            value = getattr(self, name)
            if not _QUANTITY.fullmatch(value):
                flag = f"--pathways-{name.replace('_', '-')}"
                raise LaunchError(f"{flag}={value}: expected a Kubernetes quantity such as 8 or 32Gi")
        if self.head_node_pool is not None and not RFC_1035.fullmatch(self.head_node_pool):
            raise LaunchError(f"--pathways-head-np={self.head_node_pool}: expected the name of a node pool")


@dataclass(frozen=True)
class JobSpec:
    """A job: one command on every host of every slice, or once with Pathways.

    Raises LaunchError, naming the flag, where a field is wrong or two do not fit.
    """

    name: str
    command: str  # run by bash
    compute_type: str
    topology: str | None = None
    num_slices: int = 1
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    mounts: tuple[Mount, ...] = ()
    queue: str | None = None
    priority: str | None = None
    restarts: int = 1  # of the whole job
    restart_on_exit_codes: tuple[int, ...] = ()  # empty: whatever the code
    ttl_seconds: int = 3600  # a finished job is forgotten after this time
    grace_seconds: int = 30  # between SIGTERM and SIGKILL
    timeout_seconds: int | None = None  # of one attempt; a job that runs into it is not restarted
    node_constraints: Mapping[str, str] = field(default_factory=dict)
    image_pull_secret: str | None = None
    service_account: str | None = None
    verbose: bool = False
    pathways: PathwaysSpec | None = None

    def __post_init__(self) -> None:
        for name in ("env", "secret_env", "node_constraints"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        check_job_name(self.name, with_pathways=self.pathways is not None)
        self._check_command()
        self._check_env()
        self._check_numbers()
        self._check_kubernetes_names()
        machine = self.slice
        if not machine.is_tpu and self.num_slices > 1:
            raise LaunchError(f"--num-slices={self.num_slices}: a CPU job is one host; leave --num-slices out")
        if not machine.is_tpu and self.pathways:
            raise LaunchError(
                f"--pathways: --compute-type={self.compute_type} has no TPUs; give one such as ct6e-standard-4t"
            )

    @property
    def slice(self) -> Slice:
        return resolve(self.compute_type, self.topology)

    @property
    def argv(self) -> tuple[str, ...]:
        """What a host runs. At SIGTERM the shell waits for the program that it runs, and then ends with the program's
        exit code in place of going on in the command."""
        return ("bash", "-c", f"trap 'exit $?' TERM\n{self.command}")

    def public(self) -> dict[str, Any]:
        """The job as JSON values; of secrets only the names."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return values | {"secret_env": sorted(self.secret_env)}

    @property
    def main_job(self) -> str:
        """Name of the replicated job whose first process is the job's main one."""
        return JOB_PATHWAYS_HEAD if self.pathways else JOB_MAIN

    def _check_command(self) -> None:
        headless = self.pathways is not None and self.pathways.headless
        if headless and self.command:
            raise LaunchError("--pathways-headless runs no command; leave --command out")
        if not headless and not self.command.strip():
            raise LaunchError("--command is required: what each host runs, as one text for bash")
        if "\0" in self.command:
            raise LaunchError("--command holds a NUL character")
        texts = {"--command": self.command, **{f"--env={name}": value for name, value in self.env.items()}}
        if self.pathways:
            for part in ("proxy", "server", "worker"):
                texts[f"--pathways-{part}-args"] = " ".join(getattr(self.pathways, f"{part}_args"))
                for name, value in getattr(self.pathways, f"{part}_env").items():
                    texts[f"--pathways-{part}-env={name}"] = value
        for flag, text in texts.items():
            for name, secret in self.secret_env.items():
                if len(secret) >= 8 and secret in text:
                    raise LaunchError(
                        f"{flag} holds the value of {name}, which would be seen by all who can list the job; the job "
                        f"finds it in its environment: write ${name}, in single quotes, or leave it out"
                    )
            if HF_TOKEN.search(text):
                raise LaunchError(
                    f"{flag} holds a Hugging Face token, which would be seen by all who can list the job; set HF_TOKEN "
                    "where you submit the job: the job then has it in its environment"
                )

    def _check_env(self) -> None:
        _check_env(self.env, "--env")
        _check_env(self.secret_env, "--env-file or --secret-env")
        if both := sorted(set(self.env) & set(self.secret_env)):
            raise LaunchError(f"--env={both[0]} is a secret variable, too (--env-file, --secret-env); give it once")

    def _check_numbers(self) -> None:
        for flag, value, least in (
            ("--num-slices", self.num_slices, 1),
            ("--restarts", self.restarts, 0),
            ("--gke-ttl-after-finished", self.ttl_seconds, 0),
            ("--grace-period", self.grace_seconds, 0),
            ("--timeout", self.timeout_seconds, 1),
        ):
            if value is not None and not least <= value < 2**31:
                raise LaunchError(f"{flag}={value}: expected {least} to {2**31 - 1}")
        for code in self.restart_on_exit_codes:
            if not 1 <= code <= 255:
                raise LaunchError(f"--restart-on-exit-codes={code}: expected exit codes from 1 to 255")
        if self.restart_on_exit_codes and self.restarts == 0:
            raise LaunchError("--restart-on-exit-codes: --restarts=0 restarts nothing; give --restarts=1 or more")

    def _check_kubernetes_names(self) -> None:
        for flag, value in (
            ("--queue", self.queue),
            ("--priority", self.priority),
            ("--image-pull-secret", self.image_pull_secret),
            ("--service-account", self.service_account),
        ):
            if value is not None and (len(value) > 253 or not _DNS_SUBDOMAIN.fullmatch(value)):
                raise LaunchError(f"{flag}={value}: expected the name of a Kubernetes object (a-z, 0-9, - and .)")
        for key, value in self.node_constraints.items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                raise LaunchError(f"--node-constraint={key}={value}: expected the key and value of a node label")
        if self.image is not None and (not self.image or re.search(r"\s", self.image)):
            raise LaunchError(f"--image={self.image}: expected the name of a container image")
        for mount in self.mounts:
            if sum(other.path == mount.path for other in self.mounts) > 1:
                raise LaunchError(f"--mount: {mount.path} is given twice")


@dataclass(frozen=True)
class JobStatus:
    """What is known of a job at a moment. Times are aware, UTC."""

    name: str
    state: JobState
    created: datetime
    completed: datetime | None = None
    restarts: int = 0
    exit_code: int | None = None  # of the process that decided the job
    reason: str = ""  # why it is in this state, one sentence without its full stop


@dataclass(frozen=True)
class LogLine:
    """One line of output, without its line end."""

    host: str  # such as main-job-0-3: replicated job, slice, host in the slice
    text: str


@dataclass(frozen=True)
class Event:
    """Something that happened to a job, in words."""

    time: datetime
    text: str


def check_job_name(name: str, *, with_pathways: bool = False) -> None:
    """Raises LaunchError where a job cannot be called so."""
    if with_pathways:
        check_name(name, MAX_NAME_PATHWAYS, "at most {} are possible with --pathways")
    else:
        check_name(name, MAX_NAME, "at most {} are possible")


def parse_duration(text: str, flag: str) -> int:
    """Seconds of a text such as 90, 30s, 10m, 24h or 1h30m. Raises LaunchError, naming the flag."""
    match = _DURATION.fullmatch(text)
    if not match or not text:
        raise LaunchError(f"{flag}={text}: expected a duration such as 30s, 10m, 24h or 1h30m")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_assignment(text: str, flag: str) -> tuple[str, str]:
    """Name and value of NAME=VALUE. Raises LaunchError, which does not repeat a value that lost its name."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise LaunchError(f"{flag}: expected NAME=VALUE")
    return name, value


def parse_mount(text: str) -> Mount:
    """The mount in SOURCE:/PATH[:ro]. Raises LaunchError where it is none."""
    match = re.fullmatch(r"(gs://[^:]+|/[^:]*|[a-z0-9][-a-z0-9.]*):(/[^:/][^:]*)(:ro)?", text)
    if not match:
        raise LaunchError(
            f"--mount={text}: expected gs://bucket/directory:/path, /directory:/path or claim:/path, and :ro after it "
            "for reading only"
        )
    source, path, read_only = match.groups()
    if ".." in PurePosixPath(path).parts:
        raise LaunchError(f"--mount={text}: the path may not hold '..'")
    kind = MountKind.BUCKET if "://" in source else MountKind.HOST if source.startswith("/") else MountKind.CLAIM
    return Mount(kind, source, path, read_only is not None)


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, (Mount, PathwaysSpec)):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


def _check_env(mapping: Mapping[str, str], flag: str) -> None:
    for name, value in mapping.items():
        if not ENV_NAME.fullmatch(name):
            raise LaunchError(f"{flag}: {name!r} is no name of a variable: letters, digits and _, no digit first")
        if name in RESERVED_ENV:
            raise LaunchError(f"{flag}: {name} is set by the launcher; give the variable another name")
        if "\0" in value:
            raise LaunchError(f"{flag}: the value of {name} holds a NUL character")
