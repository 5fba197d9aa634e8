"""Signals ask for a stop; only a second Ctrl-C forces one."""

import os
import signal

import pytest

from burnish.checkpoints.preemption import SAVED_FOR_RESTART, stop_on_signals


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
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
