"""Signals ask for a stop; only a second Ctrl-C forces one."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from burnish.checkpoints.preemption import SAVED_FOR_RESTART, stop_on_signals


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_nothing_else(signum):
    with stop_on_signals() as stop:
        assert (stop.requested, stop.reason) == (False, "")
        send(signum)
        assert (stop.requested, stop.reason) == (True, signal.Signals(signum).name)


def test_repeated_sigterm_is_one_request():
    with stop_on_signals() as stop:
        for _ in range(3):
            send(signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_a_second_ctrl_c_raises():
    with stop_on_signals() as stop:
        send(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_handlers_of_before_come_back_also_after_an_error():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def fails_inside() -> None:
        with stop_on_signals():
            assert signal.getsignal(signal.SIGTERM) not in before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails_inside()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_exit_status_is_the_one_for_try_again():
    assert os.EX_TEMPFAIL == SAVED_FOR_RESTART


OUTLIVE_THE_TERMINAL = """
import sys, time
from burnish.checkpoints.preemption import stop_on_signals
with stop_on_signals() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    open(sys.argv[1], "w").write(stop.reason)
"""


def test_a_run_whose_terminal_is_gone_can_still_print_and_save(tmp_path):
    saved = tmp_path / "saved"
    terminal, child_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OUTLIVE_THE_TERMINAL, str(saved)],
        stdin=child_end,
        stdout=child_end,
        stderr=child_end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(child_end)
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert saved.read_text() == "SIGHUP"


def test_nohup_stays_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            send(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
