"""Saves that fail: an exception, a full disk or SIGKILL in every phase leaves the run with a checkpoint to
resume from.
"""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from burnish.checkpoints import store
from burnish.checkpoints.store import StoreError, TrainingStore

# Each phase of a save as (function of the module, after how many calls of it); before the first the save
# has not begun.
PHASES = {
    "remove leftovers": ("_remove_leftovers", 0),
    "check space": ("_check_space", 0),
    "write parameters": ("_write_tree", 0),
    "write optimizer state": ("_write_tree", 1),
    "copy source files": ("_copy_files", 0),
    "write train state": ("_write_train_state", 0),
    "verify": ("_verify", 0),
    "sync": ("_sync", 0),
    "mark complete": ("_mark_complete", 0),
    "publish": ("_publish", 0),
    "prune": ("_prune", 0),
}
PUBLISHED = ("prune",)  # failing here, the new checkpoint is complete


def params_of(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"embed": rng.normal(size=(64, 32)).astype(np.float32), "norm": np.full(32, step, np.float32)}


def state_of(step: int) -> dict[str, Any]:
    return {"count": np.int32(step), "mu": params_of(step + 100)}


def save(directory: Path, step: int) -> None:
    TrainingStore(directory, keep=1).save(
        step, params_of(step), state_of(step), {"step": step}, directory.parent / "hf"
    )


def check_restorable(directory: Path, allowed: tuple[int, ...]) -> int:
    """Every step that is listed restores bit for bit; the newest one is among `allowed`."""
    target = TrainingStore(directory, keep=1)
    assert target.latest() in allowed
    for step in target.steps():
        params, state, extra = target.restore(step, params_of(step), state_of(step))
        for got, wanted in ((params, params_of(step)), (state["mu"], state_of(step)["mu"])):
            assert all(got[name].tobytes() == wanted[name].tobytes() for name in wanted)
        assert (state["count"], extra) == (step, {"step": step})
        np.testing.assert_array_equal(store.load_model_params(directory / str(step))["embed"], params["embed"])
    return target.latest()


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    save(tmp_path / "actor", 1)
    return tmp_path / "actor"


def inject(name: str, calls_before: int, fault: Any) -> None:
    """Makes the function fail on entry to its call number `calls_before`."""
    real, calls = getattr(store, name), 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > calls_before:
            fault()
        return real(*args)

    setattr(store, name, failing)


@pytest.mark.parametrize("error", [RuntimeError("broken"), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_in_any_phase_leaves_a_checkpoint_and_no_debris(directory, monkeypatch, phase, error):
    name, calls_before = PHASES[phase]

    def fault():
        raise error

    monkeypatch.setattr(store, name, getattr(store, name))  # undone afterwards
    inject(name, calls_before, fault)
    with pytest.raises(StoreError, match=f"step 2 (was not|is) saved.*{error.args[-1]}"):
        save(directory, 2)
    expected = 2 if phase in PUBLISHED else 1
    assert check_restorable(directory, (expected,)) == expected
    assert not [p for p in directory.iterdir() if ".tmp-" in p.name]

    monkeypatch.undo()
    save(directory, 3)
    assert check_restorable(directory, (3,))
    assert [p.name for p in directory.iterdir()] == ["3"]


def test_ctrl_c_during_a_save_stays_a_ctrl_c(directory, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(directory, 2)
    assert [p.name for p in directory.iterdir()] == ["1"]


def killed_save(directory: str, name: str, calls_before: int) -> None:
    inject(name, calls_before, lambda: os.kill(os.getpid(), signal.SIGKILL))
    save(Path(directory), 2)


def endless_saves(directory: str, first: int) -> None:
    for step in range(first, 10_000):
        save(Path(directory), step)


@pytest.fixture(scope="module")
def processes():
    """Processes that start quickly because their server has imported everything before it forks them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["burnish.checkpoints.store"])
    return context


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_in_any_phase_leaves_a_checkpoint(directory, processes, phase):
    process = processes.Process(target=killed_save, args=(str(directory), *PHASES[phase]))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    expected = 2 if phase in PUBLISHED else 1
    assert check_restorable(directory, (expected,)) == expected
    save(directory, 3)
    assert [p.name for p in directory.iterdir()] == ["3"]
    assert check_restorable(directory, (3,))


@pytest.mark.slow
def test_kills_at_random_moments_leave_a_checkpoint(directory, processes):
    newest = 1
    rng = np.random.default_rng(0)
    for _ in range(8):
        process = processes.Process(target=endless_saves, args=(str(directory), newest + 1))
        process.start()
        deadline = time.monotonic() + 60
        while TrainingStore(directory, keep=1).latest() < newest + 1 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        reached = TrainingStore(directory, keep=1).latest()
        assert reached > newest
        newest = check_restorable(directory, (reached,))


def test_a_deletion_that_was_cut_short_does_not_count(directory, monkeypatch):
    save_path = directory / "1"
    monkeypatch.setattr(type(store._absolute(save_path)), "rmtree", lambda self: (_ for _ in ()).throw(OSError("cut")))
    with pytest.raises(StoreError, match=r"step 2 is saved, but older ones could not be deleted"):
        save(directory, 2)
    monkeypatch.undo()
    assert save_path.exists()
    assert TrainingStore(directory, keep=5).steps() == [2]
    save(directory, 3)
    assert [p.name for p in directory.iterdir()] == ["3"]


def test_a_write_that_the_system_refuses_is_an_error(directory):
    """The limit makes write(2) itself fail inside TensorStore, as a full disk does."""
    big = {"w": np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        with pytest.raises(StoreError, match=r"step 2 was not saved .*step 1 is intact.*File too large"):
            TrainingStore(directory, keep=1).save(2, big, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in directory.iterdir()] == ["1"]
    assert check_restorable(directory, (1,))


def test_too_little_disk_space_is_noticed_before_anything_is_written(directory, monkeypatch):
    usage = store.shutil.disk_usage(directory)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StoreError, match=r"0.02 GiB are needed and 0.00 GiB are free in .*max_num_checkpoints_to_keep"):
        save(directory, 2)
    assert [p.name for p in directory.iterdir()] == ["1"]


def test_without_atomic_rename_the_marker_alone_decides(directory, monkeypatch):
    """Object stores: the checkpoint is written in place, and counts only once its marker is there."""
    monkeypatch.setattr(store, "is_local", lambda path: False)
    inject_at = store._mark_complete

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(store, "_mark_complete", fail)
    with pytest.raises(StoreError, match="broken"):
        save(directory, 2)
    assert (directory / "2/model_params").exists()
    assert check_restorable(directory, (1,))
    monkeypatch.setattr(store, "_mark_complete", inject_at)
    save(directory, 2)
    assert check_restorable(directory, (2,))
    assert [p.name for p in directory.iterdir()] == ["2"]


def test_the_start_of_a_run_finds_out_that_no_checkpoint_fits(directory, monkeypatch):
    """The trees are described, not there; what an unfinished save left does not count."""
    target = TrainingStore(directory, keep=1)
    params = {"embed": jax.ShapeDtypeStruct((1 << 20, 1 << 12), np.float32)}
    source = directory.parent / "hf"
    leftover = directory / "2.tmp-0"
    leftover.mkdir()
    target.make_room(params_of(1), state_of(1), source)
    assert not leftover.exists()
    free = shutil.disk_usage(directory)._replace(free=15 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(StoreError, match=r"no checkpoint could be saved .*step 1 is intact.*16.02 GiB are needed"):
        target.make_room(params, {}, source)
    with pytest.raises(StoreError, match="no earlier one"):
        TrainingStore(directory.parent / "other" / "actor", keep=1).make_room(params, {}, source)


def test_a_run_directory_is_no_checkpoint_and_the_newest_one_in_it_is_named(tmp_path):
    (tmp_path / "hf").mkdir()
    actor = tmp_path / "run" / "checkpoints" / "actor"
    for step in (1, 12):
        TrainingStore(actor, keep=2).save(step, params_of(step), {}, {}, tmp_path / "hf")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", actor):
        with pytest.raises(StoreError, match=f"holds some.*{actor}/12/model_params"):
            store.find_checkpoint(path)
    assert store.find_checkpoint(actor / "1") == actor / "1"
    assert store.find_checkpoint(tmp_path) is None
