"""A run directory belongs to one run and to one live process."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from burnish.checkpoints.run_dir import RunDirectory, RunDirectoryError
from burnish.errors import BurnishError


def test_paths_are_those_of_the_tutorials(tmp_path):
    run = RunDirectory(str(tmp_path), "rl")
    assert run.checkpoints == run.path / "checkpoints/actor"
    assert os.fspath(run.path) == str(tmp_path / "rl")
    assert (
        os.fspath(RunDirectory("gs://bucket/trained/", "rl").checkpoints) == "gs://bucket/trained/rl/checkpoints/actor"
    )


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_run_name_is_one_directory_name(name):
    with pytest.raises(BurnishError, match="run_name="):
        RunDirectory("/tmp", name)


def test_a_used_directory_is_refused_without_resume_and_both_ways_out_are_named(tmp_path):
    run = RunDirectory(str(tmp_path), "rl")
    with run.claim(resume=False):
        run.metrics.write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl\): continue it with resume=true or .*another run_name"):
        run.claim(resume=False).__enter__()
    with run.claim(resume=True):
        assert run.metrics.read_text() == "{}"


def test_a_claim_that_was_cut_short_leaves_the_directory_unused(tmp_path):
    run = RunDirectory(str(tmp_path), "rl")
    for resume in (False, False, True):
        with run.claim(resume=resume):
            pass


def test_a_live_process_keeps_others_out(tmp_path):
    run = RunDirectory(str(tmp_path), "rl")
    with run.claim(resume=True):
        with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()} on"):
            run.claim(resume=True).__enter__()
        other = RunDirectory(str(tmp_path), "other")
        with other.claim(resume=False):
            pass
    with run.claim(resume=True):
        pass


HOLD_AND_FORK = """
import os, sys, time
from burnish.checkpoints.run_dir import RunDirectory
with RunDirectory(sys.argv[1], "rl").claim(resume=True):
    child = os.fork()
    if child == 0:
        time.sleep(60)
    print(child, flush=True)
    time.sleep(60)
"""


def test_a_killed_run_frees_its_directory_even_while_a_forked_child_lives_on(tmp_path):
    run = RunDirectory(str(tmp_path), "rl")
    process = subprocess.Popen([sys.executable, "-c", HOLD_AND_FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid} on"):
            run.claim(resume=True).__enter__()
        process.kill()
        process.wait()
        os.kill(child, 0)  # the child is alive
        with run.claim(resume=True):
            pass
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def hold(directory: str, seconds: float, results: "multiprocessing.Queue[str]") -> None:
    try:
        with RunDirectory(directory, "rl").claim(resume=False) as _:
            results.put("claimed")
            time.sleep(seconds)
    except RunDirectoryError:
        results.put("refused")


def test_of_two_starting_at_once_one_gets_the_directory(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["burnish.checkpoints.store"])
    results = context.Queue()
    processes = [context.Process(target=hold, args=(str(tmp_path), 1.0, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == ["claimed", "refused"]
    for process in processes:
        process.join()


def test_a_run_that_ended_before_its_first_step_leaves_the_directory_unused(tmp_path):
    run = RunDirectory(str(tmp_path), "rl")
    with run.claim(resume=False):
        run.config.write_text("seed: 0")
        run.metrics.write_text("")
        run.tensorboard.mkdir()
        (run.tensorboard / "events").write_text("")
    with run.claim(resume=False):
        run.metrics.write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"already holds a run \(metrics.jsonl\)"):
        run.claim(resume=False).__enter__()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    run = RunDirectory(str(tmp_path / "file" / "below"), "rl")
    with pytest.raises(RunDirectoryError, match="file is no directory"):
        run.check(resume=False)
    with pytest.raises(RunDirectoryError, match="cannot be used"):
        run.claim(resume=False).__enter__()


def test_a_directory_that_is_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != str(tmp_path))
    with pytest.raises(RunDirectoryError, match="is not writable"):
        RunDirectory(str(tmp_path / "runs"), "rl").check(resume=False)
    assert not (tmp_path / "runs").exists()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunDirectoryError, match="No locks available"):
        RunDirectory(str(tmp_path), "rl").claim(resume=False).__enter__()


def test_an_error_inside_a_claim_stays_what_it_is(tmp_path):
    with pytest.raises(OSError, match="mine"), RunDirectory(str(tmp_path), "rl").claim(resume=False):
        raise OSError("mine")


def test_object_stores_need_their_package_and_only_one_kind_is_known(monkeypatch):
    def missing(_):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(RunDirectory, "contents", missing)
    for use in (RunDirectory.check, lambda run, resume: run.claim(resume).__enter__()):
        with pytest.raises(RunDirectoryError, match=r"burnish\[gcs\]"):
            use(RunDirectory("gs://bucket/runs", "rl"), False)
    with pytest.raises(RunDirectoryError, match="s3://bucket: give a local directory or gs://"):
        RunDirectory("s3://bucket", "rl")
