"""Checkpoints that MaxText's own tools wrote; where they are absent, tests that want them are skipped."""

import os
import tarfile
from pathlib import Path

import pytest

FIXTURES = Path(os.environ.get("BURNISH_FIXTURES", Path(__file__).parents[3] / "shared" / "data")) / "maxtext"

LLAMA = "hf_llama31_tiny2L"
GEMMA = "hf_gemma4moe_tiny12L"
GEMMA_ARCHIVE = "gemma4moe_tiny12L_unscan_zarr2_noocdbt.tar.gz"

# name, its Hugging Face source, scanned, OCDBT, Zarr 3
STOCK = [
    ("llama31_tiny2L_scan", LLAMA, True, True, True),
    ("llama31_tiny2L_unscan", LLAMA, False, True, True),
    ("llama31_tiny2L_scan_zarr2_noocdbt", LLAMA, True, False, False),
    ("gemma4moe_tiny12L_scan", GEMMA, True, True, True),
    (GEMMA_ARCHIVE, GEMMA, False, False, False),
]


def fixture(name: str, scratch: Path) -> Path:
    """The directory of a fixture; an archive is unpacked into `scratch`."""
    path = FIXTURES / name
    if not path.exists():
        pytest.skip(f"{path} is not there; set BURNISH_FIXTURES to the directory that has maxtext/")
    if path.suffix != ".gz":
        return path
    with tarfile.open(path) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    (directory,) = (scratch / "unpacked").iterdir()
    return directory
