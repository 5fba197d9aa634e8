"""The directory that vLLM's process and its helpers have for sockets and files. burnish deletes it, or, where burnish
was killed, vLLM's process."""

import contextlib
import shutil
from pathlib import Path


def meetings(directory):
    """Names of the files at which vLLM's workers meet. To be asked for while they run: in good order they delete them,
    but not what is named after them."""
    return {path.name for path in Path(directory).glob("vllm_dist_*")}


def remove_scratch(directory, meetings):
    """Deletes the directory and the shared memory named after the meetings. On CPUs the blocks in which vLLM's workers
    add up are called <meeting>-…, and nobody deletes those."""
    for meeting in meetings:
        for block in Path("/dev/shm").glob(f"{meeting}-*"):
            with contextlib.suppress(FileNotFoundError):
                block.unlink()
    shutil.rmtree(directory, ignore_errors=True)
