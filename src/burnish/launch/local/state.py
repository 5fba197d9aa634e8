"""What is known of local jobs on disk: one directory per job, under burnish/jobs in the user's state directory.

    plan.json, spec.json   what runs, and what was asked for; secrets are in neither
    status.json            the state, written whole each time
    events.jsonl           what happened, one line each
    logs/<host>.log        what a host has printed, over all restarts
    hosts/<host>           number and start of the host's process, written by that process
    lock                   locked as long as the supervisor lives
    cancel                 there when the job is to be ended

A job whose status is not final and whose lock is free has lost its supervisor: it was killed, or the machine was.
"""

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from burnish.launch.errors import LaunchError
from burnish.launch.job import Event, JobState, JobStatus
from burnish.launch.local.groups import Group
from burnish.observe.files import write_whole

LOST = "lost: what watched over it was killed, or the machine was restarted"


def jobs_directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return (Path(base) / "burnish" / "jobs").absolute()


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class JobDirectory:
    """The files of one job."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def log(self, host: str) -> Path:
        return self.path / "logs" / f"{host}.log"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    def read(self, name: str) -> dict[str, Any]:
        """plan.json, spec.json or status.json. Raises FileNotFoundError where the job has gone."""
        data = (self.path / name).read_bytes()
        try:
            return json.loads(data)
        except ValueError:
            raise LaunchError(f"{self.path / name}: damaged; delete {self.path}, the job is lost") from None

    # The status.

    def write_status(self, status: JobStatus, exit_codes: dict[str, int | None]) -> None:
        """`exit_codes` by host; None: it has not ended."""
        times = {"created": status.created, "completed": status.completed}
        values = {
            "state": status.state.value,
            **{key: moment and moment.isoformat() for key, moment in times.items()},
            "restarts": status.restarts,
            "exit_code": status.exit_code,
            "reason": status.reason,
            "exit_codes": exit_codes,
        }
        write_whole(self.path / "status.json", json.dumps(values, indent=2) + "\n")

    def recorded_status(self) -> JobStatus:
        """What status.json says."""
        values = self.read("status.json")
        completed = values["completed"]
        return JobStatus(
            name=self.name,
            state=JobState(values["state"]),
            created=datetime.fromisoformat(values["created"]),
            completed=completed and datetime.fromisoformat(completed),
            restarts=values["restarts"],
            exit_code=values["exit_code"],
            reason=values["reason"],
        )

    def status(self) -> JobStatus:
        """The state of the job now. One that has lost its supervisor has failed, and what it has left running is
        named. Raises FileNotFoundError where the job has gone."""
        # In this order: when no supervisor lives, nobody writes what is read after.
        supervised = self.is_supervised()
        status = self.recorded_status()
        if not status.state.is_final and not supervised:
            status = replace(status, state=JobState.FAILED, completed=now(), reason=LOST)
            self.write_status(status, self.read("status.json")["exit_codes"])
        if status.reason == LOST and (left := self.running_groups()):
            numbers = ", ".join(str(group.pid) for group in left.values())
            noun = "process" if len(left) == 1 else "processes"
            words = f"{LOST}; {noun} {numbers} still run: burnish job cancel {self.name} --backend=local ends them"
            return replace(status, reason=words)
        return status

    # The supervisor's life.

    def lock(self) -> int:
        """Locks the job for a supervisor; the lock goes with the file descriptor that is returned."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def is_supervised(self) -> bool:
        fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    # Its processes.

    def record_group(self, host: str) -> None:
        """Called by a host's own process before it becomes the command, so that none is ever unknown."""
        group = Group.of_leader(os.getpid())
        (self.path / "hosts" / host).write_text(f"{group.pid}\n{group.mark}\n", encoding="ascii")

    def groups(self) -> dict[str, Group]:
        """The newest process of each host that was ever started."""
        found = {}
        for path in sorted((self.path / "hosts").iterdir()):
            pid, _, mark = path.read_text(encoding="ascii").partition("\n")
            if pid:
                found[path.name] = Group(int(pid), mark.strip())
        return found

    def running_groups(self) -> dict[str, Group]:
        return {host: group for host, group in self.groups().items() if group.runs}

    # Events.

    def add_event(self, text: str) -> None:
        line = json.dumps({"time": now().isoformat(), "text": text}) + "\n"
        with open(self.path / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(line)

    def events(self) -> list[Event]:
        """Without a last line that was not written to its end."""
        lines = (self.path / "events.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return [Event(datetime.fromisoformat(v["time"]), v["text"]) for v in map(json.loads, lines)]

    # The wish to end it.

    @property
    def is_cancelled(self) -> bool:
        return (self.path / "cancel").exists()

    def ask_to_cancel(self) -> None:
        (self.path / "cancel").touch()

    def remove(self) -> None:
        """All at once for whoever looks: the name is free before the files are deleted."""
        gone = self.path.with_name(f".gone-{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(gone)
            shutil.rmtree(gone)


def create(name: str, files: dict[str, Any], hosts: list[str]) -> tuple[JobDirectory, int]:
    """A new job's directory with these JSON files, and its lock. It appears whole, or not at all where the name is
    taken: then it raises LaunchError."""
    parent = jobs_directory()
    new, job = JobDirectory(parent / f".new-{uuid.uuid4().hex}"), JobDirectory(parent / name)
    lock = -1
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        (new.path / "logs").mkdir(parents=True)
        (new.path / "hosts").mkdir()
        (new.path / "events.jsonl").touch()
        lock = new.lock()
        for file, content in files.items():
            write_whole(new.path / file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        new.write_status(JobStatus(name, JobState.PENDING, created=now()), dict.fromkeys(hosts))
        with _names_are_mine():
            _free_if_cancelled(job)
            new.path.rename(job.path)
    except BaseException as error:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(new.path, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        if not job.path.exists():
            raise LaunchError(f"{parent}: cannot be written: {error.strerror}") from None
        raise LaunchError(
            f"--name={name} is taken by another job; give another name, or free it with "
            f"burnish job cancel {name} --backend=local"
        ) from None
    return job, lock


def open_job(name: str) -> JobDirectory:
    """Raises LaunchError where there is no such job."""
    job = JobDirectory(jobs_directory() / name)
    if not name or name.startswith(".") or "/" in name or not (job.path / "status.json").exists():
        raise LaunchError(f"{name}: there is no such job on this machine; burnish job list --backend=local shows all")
    return job


def all_jobs() -> Iterator[JobDirectory]:
    """The jobs of this machine. Those that ended longer ago than they were to be kept are removed."""
    parent = jobs_directory()
    for path in sorted(parent.iterdir()) if parent.exists() else ():
        job = JobDirectory(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not path.name.startswith(".") and not _removed_when_expired(job):
                yield job


def _removed_when_expired(job: JobDirectory) -> bool:
    status = job.status()
    kept = timedelta(seconds=job.read("plan.json")["ttl_seconds"])
    if status.completed is None or now() < status.completed + kept or job.running_groups():
        return False
    forget(job, status)
    return True


def forget(job: JobDirectory, status: JobStatus) -> None:
    """Removes the ended job that `status` is of, and not another one that has taken its name since."""
    with _names_are_mine(), contextlib.suppress(FileNotFoundError):
        if job.recorded_status().created == status.created:
            job.remove()


@contextlib.contextmanager
def _names_are_mine() -> Iterator[None]:
    """Meanwhile nobody else gives a name to a job or takes it away."""
    fd = os.open(jobs_directory() / ".names", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _free_if_cancelled(job: JobDirectory) -> None:
    """A cancelled job's name is free, as on a cluster; what it has printed is kept until somebody takes the name."""
    with contextlib.suppress(FileNotFoundError):
        if job.status().state is JobState.CANCELLED:
            job.remove()
