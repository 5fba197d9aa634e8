"""Programs on virtual devices of the CPU: how many there are is settled when JAX starts, so each is a process of its
own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Programs run once or twice: they need not be fast, and are compiled in half the time."""


def xla_flags(devices: int, more: str = FLAGS) -> str:
    return f"--xla_force_host_platform_device_count={devices} {more}"


def found_by(program: Path, directory: Path, devices: int, flags: str = "") -> dict[str, Any]:
    """What `python PROGRAM DIRECTORY` has written as DIRECTORY/found.json, and as "log" what it has said. It finds the
    modules that the test finds."""
    environment = os.environ | {
        "XLA_FLAGS": xla_flags(devices, flags),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # several runs of the same programs
    }
    done = subprocess.run(
        [sys.executable, str(program), str(directory)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return json.loads((directory / "found.json").read_text()) | {"log": done.stdout}
