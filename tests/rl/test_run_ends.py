"""How a run ends when it cannot go on: weights that were ruined, a full disk, a directory that cannot be used."""

import errno
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import metrics, run_training

from burnish.checkpoints.store import TrainingStore
from burnish.config.overrides import load_config
from burnish.config.schema import SFTConfig
from burnish.errors import BurnishError
from burnish.observe.metrics import MetricsWriter
from burnish.rl import loading, sft, train
from burnish.rl.update import Updater


def saved_steps(run):
    return TrainingStore(run / "checkpoints" / "actor", keep=1).steps()


@pytest.fixture
def skipping(monkeypatch):
    """skipping(step): every update from this one on counts as one with a gradient that is not finite."""

    def skipping(first):
        step, calls = Updater.step, iter(range(1, 100))

        def skipped(updater, state, packed):
            if next(calls) >= first:
                nan = replace(packed.denominators, sequences=np.nan, tokens=np.nan)
                packed = replace(packed, denominators=nan)
            return step(updater, state, packed)

        monkeypatch.setattr(Updater, "step", skipped)

    return skipping


def test_a_run_whose_last_updates_were_skipped_is_an_error(args, tmp_path, skipping, capsys):
    skipping(3)
    with pytest.raises(BurnishError, match=r"not finite in the last 2 updates.*the newest is .*actor/2\b"):
        run_training(*args("run", "num_batches=4", "checkpoint_period=2", "num_test_batches=1"))
    printed = capsys.readouterr().out
    assert "Step 3: an update was skipped" in printed
    assert "Post RL Training" not in printed
    assert saved_steps(tmp_path / "run") == [2]
    assert [row["nonfinite_updates"] for row in metrics(tmp_path / "run")] == [0, 0, 1, 1]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_fine_tuning_ends_in_the_same_way(checkpoint, questions, tmp_path, skipping, capsys):
    skipping(2)
    options = [
        f"load_parameters_path={checkpoint}",
        "dataset_name=json",
        f"hf_train_files={questions}",
        f"base_output_directory={tmp_path}",
        "run_name=run",
        "batch_size=2",
        "num_batches=2",
        "num_test_batches=0",
        "max_prefill_predict_length=72",
        "max_target_length=96",
        "dtype=float32",
    ]
    with pytest.raises(BurnishError, match=r"not finite in the last 1 updates.*there is none"):
        sft.sft(load_config(SFTConfig, options))
    assert "Step 2: an update was skipped" in capsys.readouterr().out
    assert saved_steps(tmp_path / "run") == []


@pytest.mark.parametrize("what", ["metrics", "rollouts"])
def test_a_full_disk_is_named_and_so_is_the_last_checkpoint(args, tmp_path, monkeypatch, what):
    owner, name = (MetricsWriter, "write") if what == "metrics" else (train, "write_rollouts")
    write, calls = getattr(owner, name), iter(range(1, 100))

    def full(*arguments):
        if next(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(BurnishError, match=r"No space left on device.*step 2 is safe.*run_name=run resume=true"):
            run_training(*args("run", "num_batches=4", "checkpoint_period=2"))
    run_training(*args("run", "num_batches=4", "checkpoint_period=2", "resume=true"))


def test_a_disk_without_room_for_a_checkpoint_is_found_before_any_step(args, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(BurnishError, match=r"no checkpoint could be saved in .*GiB are needed"):
        run_training(*args("run", "num_batches=1"))
    run_training(*args("run", "num_batches=1", "enable_checkpointing=false"))


def test_a_directory_that_cannot_be_made_is_found_before_anything_is_read(args, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "open_model", None)
    monkeypatch.setattr(loading, "load_tokenizer", None)
    (tmp_path / "file").write_text("")
    for base, why in ((tmp_path / "file", "is no directory"), ("s3://bucket", "a local directory or gs://")):
        with pytest.raises(BurnishError, match=why):
            run_training(*args("run", f"base_output_directory={base}"))
