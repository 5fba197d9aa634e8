"""A checkpoint, its data and one whole run, shared by the tests of the commands."""

from pathlib import Path

import pytest
import tiny_runs


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A random tiny Hugging Face checkpoint."""
    return tiny_runs.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def questions(tmp_path_factory) -> Path:
    """The training and evaluation data."""
    return tiny_runs.write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


@pytest.fixture
def args(checkpoint, questions, tmp_path):
    """args(name, *changes): the command line of a tiny run under tmp_path."""
    return lambda name, *changes: tiny_runs.train_args(checkpoint, questions, tmp_path, name, *changes)


@pytest.fixture(scope="session")
def whole_run(checkpoint, questions, tmp_path_factory) -> Path:
    """The directory of a run of six steps in one go, evaluated before and after, with a token in the environment."""
    base = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", tiny_runs.TOKEN)
        tiny_runs.run_training(*tiny_runs.train_args(checkpoint, questions, base, "run", "num_test_batches=2"))
    return base / "run"
