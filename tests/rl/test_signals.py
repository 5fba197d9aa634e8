"""SIGTERM ends a run within a step, with everything up to the last whole step saved; SIGKILL at any moment costs no
more than the steps that no checkpoint had."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import TOKEN, assert_same_run, metrics, run_training, train_args

from burnish.checkpoints import store
from burnish.checkpoints.store import TrainingStore
from burnish.errors import BurnishError
from burnish.rl import train

SAVED_FOR_RESTART = 75
SECONDS = 10  # of grace for a run that is told to end; a cluster gives 30

SLOW_REWARD = """\
import time

def slow(completions, **kwargs):
    if len(completions) == 8:  # a training batch; the probe has more
        time.sleep(600)
    return [0.0] * len(completions)
"""


def send_at(patch, owner, name, call):
    """This process gets SIGTERM at the start of the call-th call of owner.name."""
    function, left = getattr(owner, name), iter(range(call - 1))

    def counted(*arguments, **options):
        if next(left, None) is None:
            patch.setattr(owner, name, function)
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments, **options)

    patch.setattr(owner, name, counted)


def checkpoints(run):
    return TrainingStore(run / "checkpoints" / "actor", keep=1).steps()


@pytest.mark.parametrize(
    ("owner", "name", "call", "saved"),
    [
        (train, "_evaluate", 1, []),
        (train, "_sample", 3, [2]),
        (train, "score_groups", 4, [3]),
        (train, "pack", 4, [3, 4]),
        (store, "_write_train_state", 1, [3]),
        (train, "_evaluate", 2, [3, 6]),
    ],
    ids=["evaluation-before", "sampling", "scoring", "updating", "saving", "evaluation-after"],
)
def test_a_run_that_is_told_to_end_saves_what_is_whole_and_resumes(
    whole_run, args, tmp_path, monkeypatch, owner, name, call, saved
):
    """checkpoint_period is 3."""
    send_at(monkeypatch, owner, name, call)
    with pytest.raises(BurnishError, match="SIGTERM") as error:
        run_training(*args("run", "num_test_batches=2"))
    assert error.value.exit_code == SAVED_FOR_RESTART
    assert checkpoints(tmp_path / "run") == saved
    run_training(*args("run", "num_test_batches=2", "resume=true"))
    assert_same_run(tmp_path / "run", whole_run)


def test_a_run_that_waits_for_rewards_ends_at_once(args, tmp_path, monkeypatch):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(SLOW_REWARD)
    score, started = train.score_groups, []

    def told_a_second_later(*arguments):
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        started.append(time.monotonic())
        return score(*arguments)

    monkeypatch.setattr(train, "score_groups", told_a_second_later)
    with pytest.raises(BurnishError, match=r"SIGTERM.*nothing to save"):
        run_training(*args("run", f"reward_functions_path={rewards}", "reward_functions=slow"))
    assert time.monotonic() - started[0] < SECONDS


def environment():
    return {**os.environ, "HF_TOKEN": TOKEN}


def test_the_program_exits_with_the_restart_code(checkpoint, questions, tmp_path):
    """Many steps, so that the signal comes in the middle of one."""
    long = ["num_batches=3000", "num_epoch=1000", "checkpoint_period=100000"]
    command = train_args(checkpoint, questions, tmp_path, "run", *long)
    process = subprocess.Popen(
        [sys.executable, "-m", "burnish.cli.main", "train-rl", *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and (not lines.exists() or lines.read_text().count("\n") < 3):
            time.sleep(0.02)
        process.terminate()
        start = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - start < SECONDS
    finally:
        process.kill()
    assert process.returncode == SAVED_FOR_RESTART, output
    assert "resume=true" in output
    assert checkpoints(tmp_path / "run") == [metrics(tmp_path / "run")[-1]["step"]]
    assert TOKEN not in output


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_same_to_the_last_bit(whole_run, checkpoint, questions, tmp_path):
    """At calls drawn by chance (a step makes about 2500, the save after it 700), and in the phases of a save."""
    moments = [
        *(("burnish:*", call) for call in np.random.default_rng(0).integers(1, 6400, 2)),
        ("burnish.checkpoints.store:_write_train_state", 1),
        ("burnish.checkpoints.store:_publish", 1),
        ("burnish.observe.metrics:MetricsWriter.write", 1),
    ]
    killed = [sys.executable, str(Path(__file__).with_name("killed.py"))]
    options = ["num_test_batches=2", "checkpoint_period=1", "max_num_checkpoints_to_keep=1", "resume=true"]
    command = ["train-rl", *train_args(checkpoint, questions, tmp_path, "run", *options)]
    for where, call in moments:
        ended = subprocess.run([*killed, where, str(call), *command], env=environment(), capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    run_training(*command[1:])
    assert_same_run(tmp_path / "run", whole_run)
