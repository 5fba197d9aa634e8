"""The directory that vLLM's process and its helpers have for sockets and files. burnish deletes it, or, where burnish
was killed, vLLM's process."""

import contextlib
import shutil
from pathlib import Path


def remove_scratch(directory):
    """Deletes the directory and the shared memory that is named after its files. vLLM's workers meet at a file
    vllm_dist_<number>; on CPUs the blocks in which they add up are called vllm_dist_<number>-…, and nobody deletes
    those."""
    for meeting in Path(directory).glob("vllm_dist_*"):
        for block in Path("/dev/shm").glob(f"{meeting.name}-*"):
            with contextlib.suppress(FileNotFoundError):
                block.unlink()
    shutil.rmtree(directory, ignore_errors=True)
