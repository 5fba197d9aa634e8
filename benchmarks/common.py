"""What every benchmark measures beside its own subject: this machine's float32 matrix-product rate, wall and
CPU seconds, peak memory, and how busy other processes kept the machine meanwhile.

A share of the machine's own rate, taken in the same run, is what can be compared between machines and days; a
figure taken while others were busy can not, so it is always reported beside them. Reads Linux's /proc only.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Usage:
    """What a measured block used; filled in when the block ends."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # of this process (and others that are named), all threads, user and system
    others_cores: float = 0.0  # cores that other processes kept busy, on average


def _machine_busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used since boot (without idle, iowait and steal)."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds(pids: Sequence[int]) -> float:
    """CPU seconds of this process and of those with these numbers, which belong to it."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def measured(*pids: int) -> Iterator[Usage]:
    """`with measured() as usage: …` fills `usage` at the end of the block. `pids`: other processes that do its work."""
    usage = Usage()
    wall, cpu, busy = time.perf_counter(), _cpu_seconds(pids), _machine_busy_seconds()
    yield usage
    usage.wall_s = time.perf_counter() - wall
    usage.cpu_s = _cpu_seconds(pids) - cpu
    others = _machine_busy_seconds() - busy - usage.cpu_s
    usage.others_cores = max(0.0, others / usage.wall_s)


def peak_memory_gb(*pids: int) -> float:
    """The highest resident memory of this process so far, and of `pids`, each at its own time, in GB (10⁹ bytes)."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kilobytes += next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return kilobytes * 1024 / 1e9


@dataclass(frozen=True)
class MatmulRate:
    """float32 matrix product at 2048³ on all cores of this process; the better of NumPy and JAX counts."""

    numpy_gflops: float
    jax_gflops: float
    numpy_gflops_per_cpu_s: float  # 10⁹ FLOP per CPU second: less disturbed by a busy machine than the wall rate
    jax_gflops_per_cpu_s: float

    @property
    def gflops(self) -> float:
        return max(self.numpy_gflops, self.jax_gflops)

    @property
    def gflops_per_cpu_s(self) -> float:
        return max(self.numpy_gflops_per_cpu_s, self.jax_gflops_per_cpu_s)


def matmul_rate(size: int = 2048, repeats: int = 6) -> MatmulRate:
    """Best of `repeats` products of two (size, size) float32 matrices, 2·size³ FLOP each."""
    import jax

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    ja, jb = jax.device_put(a), jax.device_put(b)
    product = jax.jit(jax.numpy.matmul)
    calls = {"numpy": lambda: a @ b, "jax": lambda: product(ja, jb).block_until_ready()}
    usages: dict[str, list[Usage]] = {name: [] for name in calls}
    for call in calls.values():  # starts threads, compiles
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            with measured() as usage:
                call()
            usages[name].append(usage)
    gflop = 2 * size**3 / 1e9

    def wall_rate(name: str) -> float:
        return gflop / min(u.wall_s for u in usages[name])

    def cpu_rate(name: str) -> float:
        return gflop * repeats / sum(u.cpu_s for u in usages[name])

    return MatmulRate(wall_rate("numpy"), wall_rate("jax"), cpu_rate("numpy"), cpu_rate("jax"))


def summary(values: list[float]) -> dict[str, float]:
    """Median and extremes of interleaved repeats."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine_facts() -> dict[str, Any]:
    """What the figures were taken on."""
    import jax

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "unknown")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }


def write_json(path: str | Path, result: dict[str, Any]) -> None:
    """Write a benchmark's result; dataclasses among its values become objects."""
    Path(path).write_text(json.dumps(result, indent=2, default=asdict) + "\n")
