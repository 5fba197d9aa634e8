"""Worker processes: deadlines, deaths, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from burnish.rewards.pool import WorkerPool
from burnish.rewards.types import RewardError, ScoreStatus

ENDLESS = ("10", "10^(10^10)")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def user_pool(tmp_path: Path, source: str, *names: str, timeout: float = 20.0) -> WorkerPool:
    path = tmp_path / "user_rewards.py"
    path.write_text(textwrap.dedent(source))
    return WorkerPool(("user", str(path), names), timeout=timeout, num_procs=1)


def columns(*completions: str) -> dict[str, list[str]]:
    filled = ["" for _ in completions]
    return {"prompts": filled, "completions": list(completions), "answer": filled, "question": filled}


def test_an_endless_check_is_stopped_at_its_deadline_and_costs_no_other_item_its_result():
    with WorkerPool(("check",), timeout=1.0, num_procs=2) as pool:
        pool.start()
        before = time.monotonic()
        results = pool.run([("x+1", "1+x"), ENDLESS, ("2", "1+1"), ("2", "1+2"), ENDLESS, ("2x", "x+x")])
        seconds = time.monotonic() - before
    timed_out, scored = ScoreStatus.TIMED_OUT, ScoreStatus.SCORED
    assert [result.status for result in results] == [scored, timed_out, scored, scored, timed_out, scored]
    assert [results[i].value for i in (0, 2, 3, 5)] == [True, True, False, True]
    assert seconds < 10


def test_a_worker_is_started_only_when_there_is_work_and_kept_between_calls():
    with WorkerPool(("check",), timeout=20.0, num_procs=2) as pool:
        assert pool.pids == []
        assert pool.run([]) == []
        assert pool.pids == []
        pool.run([("2x", "x+x")])
        assert len(pool.pids) == 1
        first = pool.pids
        pool.run([("2x", "x+1")])
        assert pool.pids == first


def test_a_worker_that_dies_fails_its_own_item_only(tmp_path):
    source = """
        import ctypes

        def crash(completions, **kwargs):
            if completions == ["crash"]:
                ctypes.string_at(0)
            return [1.0] * len(completions)
    """
    with user_pool(tmp_path, source, "crash") as pool:
        results = pool.run([("crash", columns(text)) for text in ("a", "crash", "b")])
    assert [result.status for result in results] == ["scored", "failed", "scored"]
    assert "ended by signal 11" in results[1].detail


def test_a_forked_child_that_returns_sends_nothing(tmp_path):
    source = """
        import os

        def fork(completions, **kwargs):
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
            return [float(text) for text in completions]
    """
    with user_pool(tmp_path, source, "fork") as pool:
        assert [pool.run([("fork", columns(text))])[0].value for text in "1234"] == [[1.0], [2.0], [3.0], [4.0]]


def test_an_answer_to_another_task_is_never_taken_for_this_ones(tmp_path):
    """The function finds its worker's connection and answers twice."""
    source = """
        import os
        import sys
        from multiprocessing.connection import Connection

        def twice(completions, **kwargs):
            Connection(os.dup(int(sys.argv[1]))).send((1, "ok", [0.5]))
            return [1.0]
    """
    with user_pool(tmp_path, source, "twice") as pool:
        pool.run([("twice", columns("a"))])
        with pytest.raises(RewardError, match="answered task 1 where task 2 was asked"):
            pool.run([("twice", columns("a"))])
        assert pool.pids == []


def test_a_worker_killed_while_idle_is_replaced_without_loss():
    with WorkerPool(("check",), timeout=20.0, num_procs=1) as pool:
        pool.run([("2x", "x+x")])
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not is_running(pid))
        assert pool.run([("2x", "x+x")])[0].value is True


def test_the_pool_works_off_the_main_thread():
    results = []

    def work() -> None:
        with WorkerPool(("check",), timeout=1.0, num_procs=1) as pool:
            results.extend(pool.run([("x+1", "1+x"), ENDLESS]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [result.status for result in results] == [ScoreStatus.SCORED, ScoreStatus.TIMED_OUT]


def test_closing_the_pool_ends_its_workers_and_closes_its_files():
    open_files = len(os.listdir("/proc/self/fd"))
    with WorkerPool(("check",), timeout=20.0, num_procs=2) as pool:
        pool.run([("2x", "x+x"), ("2x", "x+1")])
        pids = pool.pids
        assert pids
    assert not any(is_running(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == open_files


def start_parent(script: str) -> tuple[subprocess.Popen[str], int]:
    """A Python process that runs `script` with a pool of one worker up; its handle and the worker's pid."""
    prelude = """
        import os, sys, threading, time
        from burnish.rewards.pool import WorkerPool
        pool = WorkerPool(("check",), timeout=100.0, num_procs=1)
        pool.start()
        print(pool.pids[0], flush=True)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("work", ["time.sleep(100)", "pool.run([('10', '10^(10^10)')])"], ids=["idle", "busy"])
def test_no_worker_outlives_a_parent_that_is_killed(work):
    parent, worker = start_parent(work)
    time.sleep(0.5)  # let a busy worker get into its task, which holds the interpreter lock
    assert is_running(worker)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_running(worker))


def test_no_worker_outlives_a_parent_that_exits_without_closing_the_pool():
    parent, worker = start_parent("")
    assert parent.wait(timeout=20) == 0
    assert wait_until(lambda: not is_running(worker))


def test_workers_do_not_import_jax():
    script = "import sys; import burnish.rewards.worker, burnish.rewards.stack; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_worker_ignores_modules_of_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise SystemExit('not the package')")
    monkeypatch.chdir(tmp_path)
    with WorkerPool(("check",), timeout=20.0, num_procs=1) as pool:
        assert pool.run([("x+1", "1+x")])[0].value is True


def test_a_user_file_that_cannot_be_loaded_is_an_error_at_the_start(tmp_path):
    with (
        user_pool(tmp_path, "1 / 0", "reward") as pool,
        pytest.raises(RewardError, match="ZeroDivisionError"),
    ):
        pool.start()
