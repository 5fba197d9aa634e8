"""Settings for JAX's TPU library on a machine without TPU, where it is installed to plan for TPUs only.

Left alone, it asks for a TPU at length and complains at every start. Nothing here imports JAX: it has to be set before.
"""

import os
from pathlib import Path

SETTINGS = {
    # Which TPU this is: any answer does, nobody asks for more.
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at a time
}


def has_tpu() -> bool:
    """Whether this machine may have TPU chips: they show as one of two kinds of device files."""
    return any(Path("/dev").glob("accel*")) or Path("/dev/vfio").exists()


def settle() -> None:
    """Sets what is not set already, unless there is a TPU."""
    if not has_tpu():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
