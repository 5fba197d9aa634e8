"""Runs tasks in worker processes, each with a deadline, and survives whatever a task does.

A worker that is not done by its deadline is killed and replaced; one that dies takes only its own task with
it. No signal handlers are involved, so the pool works on any thread. Workers are plain subprocesses, not
forks: they never see the parent's accelerator, threads or `__main__`. They start when there is work for
them, wait between calls, and end with the pool or with the parent, however it ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from burnish.rewards.types import RewardError, ScoreStatus
from burnish.rewards.worker import Role

_WAIT = 0.5  # seconds between two calls of on_wait
_START_DEADLINE = 120.0  # seconds until a worker has to be ready; the imports take about half a second


@dataclass(frozen=True)
class TaskResult:
    """What became of one task. `value` is its result where the status is SCORED; otherwise `detail` says in
    words, or by a traceback, what happened. A task that ran out of memory counts as TIMED_OUT: it was over
    its budget."""

    status: ScoreStatus
    value: Any
    detail: str


class WorkerPool:
    """`num_procs` workers (None: one per usable CPU) of one role; each task has `timeout` seconds of wall
    time, from when a ready worker gets it. Use as a context manager, or call `close`."""

    def __init__(self, role: Role, *, timeout: float, num_procs: int | None = None) -> None:
        self._role = role
        self._timeout = timeout
        self._num_procs = num_procs or usable_cpus()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        # A closure over the list, not over self: the finalizer must not keep the pool alive.
        self._finalizer = weakref.finalize(self, _kill_all_of, os.getpid(), self._workers)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers. A later `run` starts new ones."""
        with self._lock:
            _kill_all(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are up now."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Bring one worker up and wait until it is ready; raises RewardError where it cannot be."""
        with self._lock:
            if not self._workers:
                self._workers.append(_Worker(self._role))
            while not self._workers[0].ready:
                self._receive(self._workers[0], wait_until=self._workers[0].deadline)

    def run(self, tasks: Sequence[tuple[Any, ...]], on_wait: Callable[[], None] | None = None) -> list[TaskResult]:
        """One result per task, in order. `on_wait` is called at least twice a second while workers are at it; what
        it raises ends them and goes through. Raises RewardError only where workers cannot be started at all."""
        results: list[TaskResult | None] = [None] * len(tasks)
        queue = deque(range(len(tasks)))
        with self._lock:
            try:
                while any(result is None for result in results):
                    self._assign(tasks, queue)
                    self._collect(results, on_wait)
            except BaseException:
                _kill_all(self._workers)  # a worker that is half-way through a task cannot be used again
                raise
        return [result for result in results if result is not None]

    def _assign(self, tasks: Sequence[tuple[Any, ...]], queue: "deque[int]") -> None:
        for worker in [worker for worker in self._workers if worker.ready and worker.task is None]:
            if not queue:
                return
            if worker.give(queue[0], tasks[queue[0]], self._timeout):
                queue.popleft()
            else:  # it died while idle: nobody's task is lost
                self._drop(worker)
        starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self._num_procs and starting < len(queue):
            self._workers.append(_Worker(self._role))
            starting += 1

    def _collect(self, results: list[TaskResult | None], on_wait: Callable[[], None] | None) -> None:
        """Wait for the next reply or deadline among the workers that owe one."""
        owing = [worker for worker in self._workers if not worker.ready or worker.task is not None]
        nearest = min(worker.deadline for worker in owing)
        if on_wait is not None:
            on_wait()
            nearest = min(nearest, time.monotonic() + _WAIT)
        answered = wait([worker.connection for worker in owing], max(0.0, nearest - time.monotonic()))
        for worker in owing:
            if worker.connection in answered or time.monotonic() >= worker.deadline:
                task = worker.task
                result = self._receive(worker, wait_until=0.0)
                if task is not None:
                    results[task] = result

    def _receive(self, worker: "_Worker", wait_until: float) -> TaskResult | None:
        """Take a worker's reply; drop the worker when it is dead or past its deadline. None: it became
        ready."""
        try:
            if not worker.connection.poll(max(0.0, wait_until - time.monotonic())):
                was_ready = worker.ready
                self._drop(worker)
                if not was_ready:
                    raise RewardError(f"a reward worker was not ready within {_START_DEADLINE:g} seconds.")
                return TaskResult(ScoreStatus.TIMED_OUT, None, f"not done within {self._timeout:g} seconds")
            number, kind, value = worker.connection.recv()
        except (EOFError, OSError):
            was_ready = worker.ready
            how = self._drop(worker)
            if not was_ready:
                raise RewardError(
                    f"a reward worker could not start: it {how}. Its own message is above, on stderr."
                ) from None
            return TaskResult(ScoreStatus.FAILED, None, f"the worker process {how}")
        if number != worker.number:
            self._drop(worker)
            raise RewardError(
                f"a reward worker answered task {number} where task {worker.number} was asked: a function has sent"
                " more than one answer, as one that forks does when its child returns too. End such a child by"
                " os._exit."
            )
        worker.task = None
        match kind:
            case "ready":
                worker.ready = True
                return None
            case "refused":
                self._drop(worker)
                raise RewardError(value)
            case "ok":
                return TaskResult(ScoreStatus.SCORED, value, "")
            case "invalid":
                raise RewardError(value)
            case "out_of_memory":
                return TaskResult(ScoreStatus.TIMED_OUT, None, value)
            case _:
                return TaskResult(ScoreStatus.FAILED, None, value)

    def _drop(self, worker: "_Worker") -> str:
        self._workers.remove(worker)
        return worker.kill()


class _Worker:
    """One process, the connection to it, and what it is doing."""

    def __init__(self, role: Role) -> None:
        parent_end, child_end = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        package_parent = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH", "")]))
        try:
            self.process = subprocess.Popen(
                # -P: a math_verify.py in the current directory must not stand in for the package.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "burnish.rewards.worker",
                    str(child_end.fileno()),
                    str(lifeline_read),
                ],
                pass_fds=(child_end.fileno(), lifeline_read),
                stdin=subprocess.DEVNULL,
                # A user's reward file may use jax; the accelerator belongs to the parent.
                env={**os.environ, "PYTHONPATH": search_path, "JAX_PLATFORMS": "cpu"},
                start_new_session=True,  # Ctrl-C is for the parent; it ends its workers
            )
        finally:
            child_end.close()
            os.close(lifeline_read)
        self.connection = Connection(parent_end.detach())
        self.ready = False
        self.task: int | None = None
        self.number = 0  # of the message that it owes an answer to; the role is the first
        self.deadline = time.monotonic() + _START_DEADLINE
        with contextlib.suppress(OSError):  # it died at once, which shows when its reply is awaited
            self.connection.send(role)

    def give(self, index: int, arguments: tuple[Any, ...], timeout: float) -> bool:
        """Hand a task over; False where the worker is not alive any more."""
        try:
            self.connection.send((self.number + 1, arguments))
        except OSError:
            return False
        self.number += 1
        self.task = index
        self.deadline = time.monotonic() + timeout
        return True

    def kill(self) -> str:
        """End the process, wait for it, and say how it had ended, in words."""
        try:  # a process whose connection has just closed is about to report its own end
            self.process.wait(timeout=1.0 if self._connection_closed() else 0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with whatever a user's function has started
        code = self.process.wait()
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"

    def _connection_closed(self) -> bool:
        try:
            if not self.connection.poll(0):
                return False
            self.connection.recv()
        except (EOFError, OSError):
            return True
        return False


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kill_all_of(owner_pid: int, workers: list[_Worker]) -> None:
    if os.getpid() == owner_pid:  # not in a fork of the parent that happens to exit
        _kill_all(workers)


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
