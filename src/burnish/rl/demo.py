"""`burnish demo`: workflow A in small, on the embedded model and data: import, evaluate, train, evaluate, export."""

from importlib import resources
from typing import Any

from etils import epath

from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.run_dir import RunDirectory
from burnish.config.overrides import load_config
from burnish.config.schema import DemoConfig, ExportConfig, RunConfig
from burnish.observe.summary import print_final
from burnish.rl.train import run_training


def demo(cfg: DemoConfig) -> dict[str, Any]:
    """Run the demonstration, print before and after, and return the run's summary. Raises BurnishError."""
    directory = RunDirectory(cfg.base_output_directory, cfg.run_name)
    recipe = str(resources.files("burnish") / "assets" / "demo.yaml")
    place = [f"base_output_directory={cfg.base_output_directory}", f"run_name={cfg.run_name}"]
    run = load_config(RunConfig, [recipe, *place])
    outcome = run_training(run)
    export = load_config(
        ExportConfig,
        [
            f"load_parameters_path={directory.checkpoints / str(run.num_batches) / 'model_params'}",
            f"base_output_directory={directory.export}",
        ],
    )
    exported = to_huggingface(export)
    print_final(outcome.figures, outcome.summary["seconds"], {"model": epath.Path(exported)} | outcome.places)
    return outcome.summary
