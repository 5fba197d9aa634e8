"""Learning itself: the embedded model, half-good at word problems, gets better at those that it is not trained on."""

from importlib import resources

import pytest
from tiny_runs import run_training

DEMO = str(resources.files("burnish") / "assets" / "demo.yaml")
MARGIN = 0.3
"""What held-out accuracy gains at least, of the 0.5 or so that the runs below gain where they were written."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("num_batches=20",),
        (
            "num_batches=8",
            "rl.loss_algo=gspo-token",
            "rl.num_iterations=2",
            "rl.grpo_beta=0.01",
            "optimizer=adafactor",
            "train_micro_batch_size=4",
        ),
    ],
    ids=["grpo-adamw", "gspo-adafactor-several-iterations"],
)
def test_held_out_accuracy_rises(tmp_path, options):
    summary = run_training(DEMO, *options, f"base_output_directory={tmp_path}", "run_name=learning")
    assert summary["accuracy_after"] - summary["accuracy_before"] >= MARGIN
    assert summary["format_accuracy_after"] >= 0.95
    assert summary["mean_reward_after"] > summary["mean_reward_before"] + MARGIN
