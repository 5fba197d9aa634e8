"""The program that runs a local job: it starts the hosts, watches them, and starts all anew when one fails.

`python -m burnish.launch.local.supervisor DIRECTORY LOCK_FD` is started by the backend with the secrets on its
standard input, and detaches itself: it outlives the terminal. One host that fails fails the attempt, and the others
are ended; what is left of a host's processes when its command has ended is ended, too, as in a container.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from burnish.launch.job import JobState, JobStatus
from burnish.launch.local.groups import Group, end_groups
from burnish.launch.local.plan import start_environment
from burnish.launch.local.state import JobDirectory, now

POLL_SECONDS = 0.05
TIMED_OUT = 124  # as of timeout(1)


@dataclass(frozen=True)
class Outcome:
    """How an attempt has ended."""

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    may_restart: bool = False


_CANCELLED = Outcome(JobState.CANCELLED, 128 + signal.SIGTERM)


class _CannotStartError(Exception):
    """A host's process was not started; the message says which and why."""


class Supervisor:
    """One job's life, from its first start to its last."""

    def __init__(self, job: JobDirectory, secrets: Mapping[str, str]) -> None:
        self._job = job
        self._plan: dict[str, Any] = job.read("plan.json")
        self._secrets = secrets
        self._status: JobStatus = job.recorded_status()
        self._exit_codes: dict[str, int | None] = {}
        self._stopped_by = ""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        # Not SIG_IGN, which the hosts would inherit.
        signal.signal(signal.SIGHUP, lambda *_: None)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopped_by = signal.Signals(signum).name

    def run(self) -> None:
        if self._plan["left_out"]:
            self._job.add_event(f"without effect on this machine: {', '.join(self._plan['left_out'])}")
        while True:
            outcome = self._attempt()
            if outcome.may_restart and self._job.is_cancelled:
                outcome = _CANCELLED
            restarts = self._status.restarts
            if not outcome.may_restart or restarts >= self._plan["restarts"]:
                break
            self._job.add_event(f"restart {restarts + 1} of {self._plan['restarts']}")
            self._write(restarts=restarts + 1)
        reason = f": {outcome.reason}" if outcome.reason else ""
        self._job.add_event(f"{outcome.state.lower()}{reason}")
        self._write(state=outcome.state, completed=now(), exit_code=outcome.exit_code, reason=outcome.reason)

    def _write(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self._job.write_status(self._status, self._exit_codes)

    def _attempt(self) -> Outcome:
        """Starts all hosts and watches them until the attempt is decided; none runs when it returns."""
        self._exit_codes = dict.fromkeys(host["host"] for host in self._plan["hosts"])
        common = start_environment(_free_port(), self._status.restarts)
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for host in self._plan["hosts"]:
                running[host["host"]] = self._start(host, common)
            self._write(state=JobState.RUNNING)
            self._job.add_event(f"running: {_count(len(running), 'process', 'processes')}")
            return self._watch(running)
        except _CannotStartError as error:
            return Outcome(JobState.FAILED, 127, str(error))
        finally:
            end_groups(map(_group, running.values()), 0)
            for name, process in running.items():
                self._exit_codes[name] = _shell_code(process.wait())

    def _start(self, host: dict[str, Any], common: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **host["environment"], **common, **self._secrets}
        try:
            with open(self._job.log(host["host"]), "ab") as log:
                return subprocess.Popen(
                    self._plan["argv"],
                    cwd=self._plan["directory"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # Safe here: this program has one thread.
                    preexec_fn=lambda: self._job.record_group(host["host"]),
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise _CannotStartError(f"{host['host']} cannot be started: {error}") from None

    def _watch(self, running: dict[str, "subprocess.Popen[bytes]"]) -> Outcome:
        """Waits for what decides the attempt. Hosts that end well are taken out of `running`, and where it is decided
        otherwise the others have had their time to end."""
        timeout = self._plan["timeout_seconds"]
        deadline = None if timeout is None else time.monotonic() + timeout
        while running:
            for host, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                self._exit_codes[host] = code = _shell_code(code)
                del running[host]
                _group(process).signal(signal.SIGKILL)
                if code:
                    self._job.add_event(f"{host} has ended with {_code_words(code)}")
                    self._end(running)
                    return self._failed(host, code)
                self._write()
            if self._job.is_cancelled:
                self._job.add_event("cancelled: ending its processes")
                self._end(running)
                return _CANCELLED
            if self._stopped_by:
                self._end(running)
                words = f"what watches over it was stopped by {self._stopped_by}"
                return Outcome(JobState.FAILED, 128 + signal.SIGTERM, words)
            if deadline is not None and time.monotonic() > deadline:
                self._end(running)
                return Outcome(JobState.FAILED, TIMED_OUT, f"it ran longer than --timeout={timeout}s")
            time.sleep(POLL_SECONDS)
        return Outcome(JobState.SUCCEEDED, 0)

    def _end(self, running: Mapping[str, "subprocess.Popen[bytes]"]) -> None:
        end_groups(map(_group, running.values()), self._plan["grace_seconds"])

    def _failed(self, host: str, code: int) -> Outcome:
        reason = f"{host} has ended with {_code_words(code)}"
        codes = self._plan["restart_on_exit_codes"]
        if codes and code not in codes:
            return Outcome(JobState.FAILED, code, f"{reason}, which is none of --restart-on-exit-codes")
        if self._status.restarts and self._status.restarts >= self._plan["restarts"]:
            restarts = _count(self._status.restarts, "restart", "restarts")
            return Outcome(JobState.FAILED, code, f"{reason}, after {restarts}")
        return Outcome(JobState.FAILED, code, reason, may_restart=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _group(process: "subprocess.Popen[bytes]") -> Group:
    return Group.of_leader(process.pid)


def _shell_code(code: int) -> int:
    """128 + n for a process that signal n has ended."""
    return code if code >= 0 else 128 - code


def _code_words(code: int) -> str:
    if code > 128:
        try:
            return f"exit code {code} ({signal.Signals(code - 128).name})"
        except ValueError:
            pass
    return f"exit code {code}"


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun if number == 1 else plural}"


def main() -> None:
    job = JobDirectory(Path(sys.argv[1]))
    os.set_inheritable(int(sys.argv[2]), False)  # the lock is this program's, not its children's
    secrets = json.load(sys.stdin)
    if os.fork():
        os._exit(0)  # whoever started it knows now that it runs
    os.setsid()
    try:
        Supervisor(job, secrets).run()
    except BaseException:
        traceback.print_exc()  # into supervisor.log
        os._exit(1)


if __name__ == "__main__":
    main()
