"""Process groups: which of them still run, and how they are ended.

A host of a job is the leader of its own session and group, so that what it starts is ended with it. A group is
recognised again by its leader's number and start, after the program that started it has gone, too.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Group:
    """A process group. `mark` tells its leader from another process that later gets the same number: where the
    system has /proc, the boot and the moment of its start; elsewhere it is empty and the number alone decides."""

    pid: int
    mark: str

    @staticmethod
    def of_leader(pid: int) -> "Group":
        return Group(pid, _mark(pid))

    def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    @property
    def runs(self) -> bool:
        """Whether a process of the group is there; one that has ended and only was not asked after does not count."""
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        if not self.mark:
            return True
        if self.mark.split()[0] != _boot() or _mark(self.pid) not in ("", self.mark):
            return False
        return any(pgid == self.pid and state not in "ZX" for pgid, state in _states())


def end_groups(groups: Iterable[Group], grace_seconds: float) -> None:
    """SIGTERM, time to save, SIGKILL. Returns when no process of the groups runs."""
    groups = list(groups)
    for group in groups:
        group.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while any(group.runs for group in groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    for group in groups:
        group.signal(signal.SIGKILL)
    while any(group.runs for group in groups):
        time.sleep(0.05)


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _mark(pid: int) -> str:
    """Empty where there is no such process, or no /proc."""
    try:
        return f"{_boot()} {_stat(pid)[19]}"
    except OSError:
        return ""


def _states() -> Iterable[tuple[int, str]]:
    """(process group, state) of every process."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = _stat(int(entry.name))
                yield int(fields[2]), fields[0]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat behind the program's name, which may hold anything: state, parent, group, …"""
    text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
