"""Stopping in good order: a signal sets a flag, the training loop looks at it between steps, saves and
exits.

A scheduler takes the exit status SAVED_FOR_RESTART as "start me again"; at the terminal a first Ctrl-C asks
for a save and a second one ends the program at once.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAVED_FOR_RESTART = 75  # EX_TEMPFAIL of sysexits.h: temporary failure, try again


class StopFlag:
    """Whether a stop was asked for, and by which signal."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

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
        if self._signal is None or signum == signal.SIGINT:
            self._signal = signal.Signals(signum)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Inside, the first SIGTERM or SIGINT sets the flag instead of ending the process, further SIGTERMs do
    nothing and a second SIGINT raises KeyboardInterrupt; on leaving, the handlers of before are back. Main
    thread only: Python's `signal.signal` raises ValueError elsewhere.
    """
    flag = StopFlag()
    before = {s: signal.signal(s, flag._handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
