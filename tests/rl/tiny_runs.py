"""Whole runs in seconds: a random two-layer checkpoint with the embedded model's tokenizer, six questions, and a reward
that a random model earns by chance, so that every step has advantages to train on.

The reward counts tags, and the tags are letters: "e" and "t" are there exactly once in some completions and not in
others. No answer is ever found (nothing is "<answer>"), so no checking process has to start.
"""

import json
from pathlib import Path

import jax
import numpy as np

from burnish.checkpoints.hf_export import export, snapshot_source
from burnish.checkpoints.hf_import import read_config
from burnish.checkpoints.orbax_files import OrbaxReader
from burnish.config.overrides import load_config
from burnish.config.schema import RunConfig
from burnish.data.tiny import write_tiny_base
from burnish.models.families import spec_from_hf
from burnish.models.params import init_params
from burnish.observe.metrics import read_metrics
from burnish.observe.rollouts import read_rollouts, rollout_steps
from burnish.rl.train import train

NUM_STEPS = 6
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
QUESTIONS = [
    "What is 1 + 2?",
    "How many apples are left?",
    "Tom has 3 apples and buys 4 more apples and 5 pears. How many fruits does he have now?",
    "What is 7 * 8?",
    "What is 20 - 4?",
    "How many?",
]
"""Of different lengths, so that batches differ; with batch_size=2 a pass is three steps."""

OPTIONS = (
    "dataset_name=json",
    "max_prefill_predict_length=72",
    "max_target_length=96",
    "batch_size=2",
    f"num_batches={NUM_STEPS}",
    "num_epoch=2",
    "num_test_batches=0",
    "checkpoint_period=3",
    "learning_rate=0.01",
    "rl.num_generations=4",
    "rl.grpo_beta=0",
    "dtype=float32",
    "remat_policy=none",
    "reasoning_start_token=e",
    "reasoning_end_token=t",
    "reward_partial_format_match=1",
)


def write_checkpoint(directory: Path, seed: int = 0) -> Path:
    """A Hugging Face directory with random weights, large enough that tokens are not all alike."""
    base = write_tiny_base(directory / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | SMALL))
    snapshot_source(base, directory / "snapshot")
    spec = spec_from_hf(read_config(base))
    params = jax.tree.map(np.asarray, init_params(spec, jax.random.key(seed), std=0.3))
    export(spec, params, directory / "snapshot", directory / "model")
    return directory / "model"


def write_questions(file: Path, answers="012345") -> Path:
    rows = [{"question": question, "answer": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train_args(checkpoint, questions, base, name, *changes):
    """The command line of a tiny run; later options win."""
    return [
        *OPTIONS,
        f"load_parameters_path={checkpoint}",
        f"hf_train_files={questions}",
        f"hf_eval_files={questions}",
        f"base_output_directory={base}",
        f"run_name={name}",
        *changes,
    ]


def run_training(*args):
    """Train in this process; the summary."""
    return train(load_config(RunConfig, list(args)))


def saved(run: Path, step: int):
    """Everything that a checkpoint holds: arrays by name, and the loop's own state."""
    directory = run / "checkpoints" / "actor" / str(step)
    content = json.loads((directory / "train_state.json").read_text())
    arrays = {}
    for tree, leaves in content["arrays"].items():
        reader = OrbaxReader(directory / tree)
        arrays |= {f"{tree}/{name}": reader.read(name.replace("/", ".")) for name in leaves}
    return arrays, content["extra"]


TIMES = ("seconds/", "tokens_per_second/", "compilations")
"""Metrics that are about the process, not about the training."""


def metrics(run: Path):
    """The lines of metrics.jsonl without times."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def assert_same_run(run: Path, other: Path, steps: int = NUM_STEPS):
    """Weights, optimizer state, data position, metrics and rollouts are the same to the last bit."""
    assert rollout_steps(run / "rollouts") == rollout_steps(other / "rollouts")
    for step in rollout_steps(run / "rollouts"):
        assert read_rollouts(run / "rollouts", step) == read_rollouts(other / "rollouts", step), f"step {step}"
    assert metrics(run) == metrics(other)
    (arrays, extra), (other_arrays, other_extra) = saved(run, steps), saved(other, steps)
    assert arrays.keys() == other_arrays.keys()
    for name, array in arrays.items():
        assert array.dtype == other_arrays[name].dtype
        assert array.tobytes() == other_arrays[name].tobytes(), name
    assert [extra[name] for name in ("data", "before")] == [other_extra[name] for name in ("data", "before")]
