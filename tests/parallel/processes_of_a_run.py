"""Starts a training run as several processes of several virtual devices each, on this machine."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from virtual_devices import xla_flags

HEARTBEAT_SECONDS = 60  # processes may wait long for a turn on a machine with two cores


@dataclass
class Processes:
    """The processes of one run; `log(i)` is what process i has said. Use as a context manager: none outlives it."""

    command: list[str]
    directory: Path
    count: int
    devices: int
    env: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> "Processes":
        self.directory.mkdir(parents=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.processes = []
        for i in range(self.count):
            env = {
                **os.environ,
                "XLA_FLAGS": xla_flags(self.devices),
                "BURNISH_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
                **self.env,
            }
            if self.count > 1:
                env |= {
                    "BURNISH_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                    "BURNISH_NUM_PROCESSES": str(self.count),
                    "BURNISH_PROCESS_ID": str(i),
                }
            with self._file(i).open("w") as out:
                command = [sys.executable, "-m", "burnish.cli.main", *self.command]
                self.processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _file(self, i: int) -> Path:
        return self.directory / f"process-{i}.log"

    def log(self, i: int) -> str:
        return self._file(i).read_text(errors="replace")

    def wait(self, seconds: float) -> list[int]:
        """The exit codes, once all have ended."""
        end = time.monotonic() + seconds
        try:
            return [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(
                "\n".join(f"--- process {i}\n{self.log(i)[-2000:]}" for i in range(self.count))
            ) from None
