"""Stopping in good order: a signal sets a flag, the training loop looks at it between steps, saves and
exits.

A scheduler takes the exit status SAVED_FOR_RESTART as "start me again"; at the terminal a first Ctrl-C asks
for a save and a second one ends the program at once. A terminal that goes away (a lost ssh connection) asks too.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAVED_FOR_RESTART = 75  # EX_TEMPFAIL of sysexits.h: temporary failure, try again


class StopFlag:
    """Whether a stop was asked for, and by which signal."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        # Asked now: a terminal that has gone is none any more.
        self._terminal = [s.fileno() for s in (sys.__stdout__, sys.__stderr__) if s is not None and s.isatty()]

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def reason(self) -> str:
        """The name of the signal ("SIGTERM"), "" while none has come."""
        return "" if self._signal is None else self._signal.name

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._signal is signal.SIGINT and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if signum == signal.SIGHUP:
            self._drop_terminal()
        if self._signal is None or signum == signal.SIGINT:
            self._signal = signal.Signals(signum)

    def _drop_terminal(self) -> None:
        """Output to the terminal goes nowhere from here on: it is gone, and a failing print must not cost the save."""
        for fd in self._terminal:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the process by SystemExit with the status that a shell knows them by, so that what
    is half done is removed, as Ctrl-C does. A signal that somebody handles or ignores already is left alone, and so are
    all of them outside the main thread."""
    taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        taken = []

    def unwind(signum: int, frame: FrameType | None) -> None:
        for s in taken:
            signal.signal(s, signal.SIG_IGN)  # another one must not cut the removal short
        sys.exit(128 + signum)

    for signum in taken:
        signal.signal(signum, unwind)
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Inside, the first SIGTERM, SIGINT or SIGHUP sets the flag instead of ending the process, further SIGTERMs do
    nothing and a second SIGINT raises KeyboardInterrupt; on leaving, the handlers of before are back. SIGHUP stays
    ignored where it was (nohup). Main thread only: Python's `signal.signal` raises ValueError elsewhere.
    """
    flag = StopFlag()
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    before = {s: signal.signal(s, flag._handle) for s in (signal.SIGTERM, signal.SIGINT, *hangup)}
    try:
        yield flag
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
