"""Jobs as processes of this machine. Nothing runs in the background but the jobs' own supervisors: every call reads
what they have written, and jobs that ended long enough ago are removed on the way."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from burnish.launch.errors import LaunchError, waited_too_long
from burnish.launch.job import Event, JobSpec, JobState, JobStatus, LogLine
from burnish.launch.local.groups import end_groups
from burnish.launch.local.plan import base_environment, make_plan
from burnish.launch.local.state import DamagedJobError, JobDirectory, all_jobs, create, forget, open_job

POLL_SECONDS = 0.1
_SHOWN_LINES = 20


class LocalBackend:
    """The interface is backend.Backend."""

    def plan(self, spec: JobSpec) -> list[dict[str, Any]]:
        return [make_plan(spec, _directory())]

    def submit(self, spec: JobSpec) -> JobStatus:
        plan = make_plan(spec, _directory())
        if shutil.which("bash") is None:
            raise LaunchError("--command is run by bash, which is not on PATH here")
        self.list()  # a name whose time has passed is free
        hosts = [host["host"] for host in plan["hosts"]]
        job, lock = create(spec.name, {"plan.json": plan, "spec.json": spec.public()}, hosts)
        try:
            _start_supervisor(job, lock, spec)
        finally:
            os.close(lock)
        return job.status()

    def list(self) -> list[JobStatus]:
        statuses = []
        for job in all_jobs():
            with contextlib.suppress(FileNotFoundError):
                statuses.append(job.status())
        return sorted(statuses, key=lambda status: status.created)

    def status(self, name: str) -> JobStatus:
        with _while_there(name) as job:
            return job.status()

    def describe(self, name: str) -> dict[str, Any]:
        with _while_there(name) as job:
            job.recorded_status()  # raises where it is damaged
            status, values = job.status(), job.read("status.json")
            groups, running = job.groups(), job.running_groups()
            hosts = [
                {
                    "host": host,
                    "process": groups[host].pid if host in groups else None,
                    "running": host in running,
                    "exit_code": code,
                    "log": str(job.log(host)),
                }
                for host, code in values["exit_codes"].items()
            ]
            return {
                "name": name,
                "backend": "local",
                **{key: values[key] for key in ("state", "created", "completed", "restarts", "exit_code")},
                "reason": status.reason,
                "spec": job.read("spec.json"),
                "hosts": hosts,
                "events": [{"time": event.time.isoformat(), "text": event.text} for event in job.events()],
            }

    def logs(self, name: str, *, follow: bool = False, main_only: bool = False) -> Iterator[LogLine]:
        with _while_there(name) as job:
            hosts = [host["host"] for host in job.read_plan()["hosts"]]
            files = [_LogFile(host, job.log(host)) for host in (hosts[:1] if main_only else hosts)]
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
            for file in files:
                stack.callback(file.close)
            while True:
                ended = not follow or job.status().state.is_final  # asked first: what is written after is read below
                for file in files:
                    yield from file.lines(ended)
                if ended:
                    return
                time.sleep(POLL_SECONDS)

    def wait(self, name: str, *, timeout: float | None = None, on_event: Callable[[Event], None] | None = None) -> int:
        started, seen = time.monotonic(), 0
        with _while_there(name) as job:
            while True:
                status = job.status()
                events = job.events()
                if on_event is not None:
                    for event in events[seen:]:
                        on_event(event)
                seen = len(events)
                if status.state is JobState.SUCCEEDED:
                    return 0
                if status.state.is_final:
                    return status.exit_code or 1
                if timeout is not None and time.monotonic() - started > timeout:
                    raise waited_too_long(name, timeout)
                time.sleep(POLL_SECONDS)

    def cancel(self, name: str) -> JobStatus:
        with _while_there(name) as job:
            ended, grace = job.status().state.is_final, _grace_seconds(job)
            if job.is_supervised():
                job.ask_to_cancel()
            deadline = time.monotonic() + grace + 30
            while job.is_supervised():
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"job {name} does not end; what watches over it hangs: burnish job inspect {name} "
                        "--backend=local shows more"
                    )
                time.sleep(POLL_SECONDS)
            status = job.status()
            if ended or status.state is not JobState.CANCELLED:
                end_groups(job.running_groups().values(), grace)
                forget(job, status)
            return status

    def inspect(self, name: str) -> dict[str, Any]:
        with _while_there(name) as job:
            described = self.describe(name)
            disk = shutil.disk_usage(job.path)
            logs = {host["host"]: _tail(Path(host["log"])) for host in described["hosts"]}
            return described | {
                "directory": str(job.path),
                "plan": job.read_plan(),
                "supervisor": {"running": job.is_supervised(), "log": _tail(job.supervisor_log)},
                "logs": logs,
                "machine": {
                    "cpus": os.cpu_count(),
                    "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                    "disk_free_bytes": disk.free,
                    "python": sys.executable,
                },
            }


class _LogFile:
    """The lines of a host's log, as it grows."""

    def __init__(self, host: str, path: Path) -> None:
        self._host, self._path = host, path
        self._file: Any = None
        self._rest = b""

    def lines(self, to_the_end: bool) -> Iterator[LogLine]:
        """The whole lines that have come since; `to_the_end` also what has no line end."""
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = open(self._path, "rb")  # noqa: SIM115 (closed by close)
        while self._file is not None and (chunk := self._file.read(1 << 16)):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                yield self._line(line)
        if to_the_end and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, line: bytes) -> LogLine:
        return LogLine(self._host, line.decode("utf-8", errors="replace").removesuffix("\r"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@contextlib.contextmanager
def _while_there(name: str) -> Iterator[JobDirectory]:
    """The job. One that is removed meanwhile, and a disk that is full or broken, are errors of the user's."""
    job = open_job(name)
    try:
        yield job
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not job.path.exists():
            raise LaunchError(f"{name}: the job was removed meanwhile") from None
        if not _is_under(job.path.parent, error.filename):
            raise  # such as standard error, which events are told on
        raise LaunchError(f"{os.fsdecode(error.filename)}: {error.strerror}") from None


def _is_under(directory: Path, filename: Any) -> bool:
    """Whether an OSError's `filename`, which may be none or a number, lies in the directory."""
    return isinstance(filename, (str, bytes, os.PathLike)) and Path(os.fsdecode(filename)).is_relative_to(directory)


def _directory() -> str:
    """Where the job's processes run: where it is submitted from."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the current directory has been deleted; go to another, the job runs where it is") from None


def _grace_seconds(job: JobDirectory) -> float:
    """The job's own; that of a job with a damaged plan is what jobs have that say nothing."""
    try:
        return job.read_plan()["grace_seconds"]
    except DamagedJobError:
        return JobSpec.grace_seconds


def _start_supervisor(job: JobDirectory, lock: int, spec: JobSpec) -> None:
    """Starts the program that runs the job. The secrets go to it through a pipe."""
    with open(job.supervisor_log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "burnish.launch.local.supervisor", str(job.path), str(lock)],
            env=base_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
        )
    with contextlib.suppress(BrokenPipeError):
        process.communicate(json.dumps(dict(spec.secret_env)).encode())
    if process.returncode:
        words = "; ".join(_tail(job.supervisor_log)[-1:]) or f"exit code {process.returncode}"
        job.remove()
        raise LaunchError(f"job {spec.name} cannot be started: {words}")


def _tail(path: Path) -> list[str]:
    """The last lines of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            return file.read().decode("utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    except FileNotFoundError:
        return []
