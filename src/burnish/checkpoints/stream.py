"""Work in pieces on a few threads, within a memory budget: reading, converting and writing overlap.

Each piece of work reserves the bytes that it holds before it starts and frees them when its last part is
done. The first error stops everything and is raised; nothing waits for ever.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any


class Stream:
    """`with Stream(…) as stream: stream.run(…)`; leaving it waits for all work and raises what went wrong."""

    def __init__(self, num_threads: int, memory_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="burnish-convert")
        self._changed = threading.Condition()
        self._free = self._budget = memory_bytes
        self._pending = 0
        self._error: BaseException | None = None

    def run(self, nbytes: int, read: Callable[[], Any], parts: Sequence[Callable[[Any], None]]) -> None:
        """Call `read`, then each of `parts` with what it gave. Waits until `nbytes` are free; work that is
        larger than the whole budget runs alone."""
        held = min(nbytes, self._budget)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= held or self._error is not None)
            self._raise_error()
            self._free -= held
        left = [len(parts)]

        def finish_part() -> None:
            with self._changed:
                left[0] -= 1
                if left[0] == 0:
                    self._free += held
                    self._changed.notify_all()

        def read_then_fan_out() -> None:
            shared = read()

            def run_part(part: Callable[[Any], None]) -> None:
                part(shared)
                finish_part()

            for part in parts[1:]:
                self._submit(partial(run_part, part))
            run_part(parts[0])

        self._submit(read_then_fan_out)

    def _submit(self, call: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                if self._error is None:
                    call()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()

        with self._changed:
            self._pending += 1
        self._pool.submit(guarded)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if value is not None:
                self._error = self._error or value
            self._changed.wait_for(lambda: self._pending == 0)
        self._pool.shutdown()
        if value is None:
            self._raise_error()
