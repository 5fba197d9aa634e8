"""What is known of local jobs on disk: one directory per job, under burnish/jobs in the user's state directory.

    plan.json, spec.json   what runs, and what was asked for; secrets are in neither
    status.json            the state, written whole each time
    events.jsonl           what happened, one line each
    logs/<host>.log        what a host has printed, over all restarts
    hosts/<host>           number and start of the host's process, written by that process
    lock                   locked as long as the supervisor lives
    cancel                 there when the job is to be ended

A job whose status is not final and whose lock is free has lost its supervisor: it was killed, or the machine was.
One whose files are missing or hold something else is damaged: it is shown as failed, and can only be cancelled.
"""

import contextlib
import fcntl
import json
import os
import re
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

LOST = "lost: what watched over it was killed, its disk was full, or the machine was restarted"


class DamagedJobError(LaunchError):
    """A job's file is not what was written there; the message says which."""


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
        """plan.json, spec.json or status.json. Raises FileNotFoundError where the job has gone, DamagedJobError where
        only the file has, or is no JSON object."""
        try:
            values = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            if not self.path.exists():
                raise
            raise self._damaged(name) from None
        except ValueError:
            raise self._damaged(name) from None
        if not isinstance(values, dict):
            raise self._damaged(name)
        return values

    def read_plan(self) -> dict[str, Any]:
        """plan.json, with what is asked of it after the job has started. Raises as `read` does."""
        plan = self.read("plan.json")
        try:
            is_whole = all(isinstance(host["host"], str) for host in plan["hosts"]) and all(
                isinstance(plan[name], int) for name in ("grace_seconds", "ttl_seconds")
            )
        except (KeyError, TypeError):
            is_whole = False
        if not is_whole:
            raise self._damaged("plan.json")
        return plan

    def _damaged(self, name: str) -> DamagedJobError:
        return DamagedJobError(
            f"{self.path / name}: damaged; burnish job cancel {self.name} --backend=local ends what still runs of the "
            "job, and removes it"
        )

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
        """What status.json says. Raises as `read` does."""
        values = self.read("status.json")
        try:
            completed = values["completed"]
            if not isinstance(values["exit_codes"], dict):
                raise TypeError
            return JobStatus(
                name=self.name,
                state=JobState(values["state"]),
                created=datetime.fromisoformat(values["created"]),
                completed=completed and datetime.fromisoformat(completed),
                restarts=values["restarts"],
                exit_code=values["exit_code"],
                reason=values["reason"],
            )
        except (KeyError, TypeError, ValueError):
            raise self._damaged("status.json") from None

    def status(self) -> JobStatus:
        """The state of the job now. One that is damaged or has lost its supervisor has failed, and what it has left
        running is named. Raises FileNotFoundError where the job has gone."""
        # In this order: when no supervisor lives, nobody writes what is read after.
        supervised = self.is_supervised()
        try:
            status = self.recorded_status()
        except DamagedJobError as error:
            # Nothing says when it was made: the directory changes when a job is made, ends or is damaged.
            moment = datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
            return JobStatus(self.name, JobState.FAILED, created=moment, completed=moment, reason=str(error))
        if not status.state.is_final and not supervised:
            status = replace(status, state=JobState.FAILED, completed=now(), reason=LOST)
            with contextlib.suppress(OSError):  # a full disk: it is shown so all the same
                self.write_status(status, self.read("status.json")["exit_codes"])
        if status.reason == LOST and (left := self.running_groups()):
            numbers = ", ".join(str(group.pid) for group in left.values())
            what = f"process {numbers} still runs" if len(left) == 1 else f"processes {numbers} still run"
            words = f"{LOST}; {what}: burnish job cancel {self.name} --backend=local ends them"
            return replace(status, reason=words)
        return status

    # The supervisor's life.

    def lock(self) -> int:
        """Locks the job for a supervisor; the lock goes with the file descriptor that is returned."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def is_supervised(self) -> bool:
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not self.path.exists():
                raise
            return False
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
        """The newest process of each host that was ever started. A file that holds no number says of none."""
        found = {}
        for path in sorted((self.path / "hosts").glob("*")):
            pid, _, mark = path.read_text(encoding="ascii", errors="replace").partition("\n")
            if re.fullmatch(r"[1-9][0-9]{0,9}", pid) and int(pid) > 1:
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
        """Without lines that were not written whole: at the end those of a power cut, elsewhere those of a full
        disk."""
        events = []
        for line in (self.path / "events.jsonl").read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                values = json.loads(line)
                events.append(Event(datetime.fromisoformat(values["time"]), values["text"]))
        return events

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
    if not name or name.startswith(".") or "/" in name or not job.path.is_dir():
        raise LaunchError(f"{name}: there is no such job on this machine; burnish job list --backend=local shows all")
    return job


def all_jobs() -> Iterator[JobDirectory]:
    """The jobs of this machine. Those that ended longer ago than they were to be kept are removed."""
    parent = jobs_directory()
    try:
        paths = sorted(parent.iterdir()) if parent.exists() else []
    except OSError as error:
        raise LaunchError(f"{parent}: cannot be read: {error.strerror}") from None
    for path in paths:
        job = JobDirectory(path)
        with contextlib.suppress(FileNotFoundError):
            if not path.name.startswith(".") and path.is_dir() and not _removed_when_expired(job):
                yield job


def _removed_when_expired(job: JobDirectory) -> bool:
    status = job.status()
    try:
        kept = timedelta(seconds=job.read_plan()["ttl_seconds"])
    except DamagedJobError:
        return False  # it is kept until it is cancelled
    if status.completed is None or now() < status.completed + kept or job.running_groups():
        return False
    with contextlib.suppress(OSError):  # a disk that can only be read: the job is not shown, and removed later
        forget(job, status)
    return True


def forget(job: JobDirectory, status: JobStatus) -> None:
    """Removes the ended job that `status` is of, and not another one that has taken its name since."""
    with _names_are_mine(), contextlib.suppress(FileNotFoundError):
        if job.status().created == status.created:
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
