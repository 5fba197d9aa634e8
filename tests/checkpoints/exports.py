"""Exports of parameters that a test has in memory, the way a run's are made: saved by the training store, then
`to-huggingface`.
"""

import tempfile
from pathlib import Path

from rich.console import Console
from safetensors import safe_open

from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.store import TrainingStore
from burnish.config.schema import ExportConfig


def export(params, snapshot, out, weight_dtype=None):
    """The directory `out` with `params` and the files of `snapshot`."""
    with tempfile.TemporaryDirectory(dir=Path(out).parents[1]) as scratch:
        TrainingStore(scratch, keep=1).save(1, params, {}, {}, hf_source=snapshot)
        config = ExportConfig(
            load_parameters_path=f"{scratch}/1", base_output_directory=str(out), weight_dtype=weight_dtype
        )
        return to_huggingface(config, Console(quiet=True))


def raw_tensors(directory):
    """{name: (dtype, shape, bytes)} by the safetensors library, without burnish."""
    tensors = {}
    for file in Path(directory).glob("*.safetensors"):
        with safe_open(file, "numpy") as f:
            assert f.metadata() == {"format": "pt"}
            for name in f.keys():  # noqa: SIM118 (not a dict)
                array = f.get_tensor(name)
                tensors[name] = (array.dtype.name, array.shape, array.tobytes())
    return tensors
