"""What the processes of a run say to one another: small values that all of them get in the same order.

All processes run the same program, so each function here must be called by all of them, at the same point. With one
process they cost nothing.
"""

import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from burnish import __version__
from burnish.parallel.errors import ProcessError

T = TypeVar("T")

_WAIT = 0.5  # seconds between two questions whether all have ended


def is_first() -> bool:
    """Whether this is the process that writes what is written once."""
    return jax.process_index() == 0


def gather(value: T) -> list[T]:
    """The value of every process, by process number, on all of them."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def any_of(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).any())


def together(call: Callable[[], T]) -> T:
    """`call()` in every process; where it raises in one it raises in all, so that none waits for one that has gone."""
    error: Exception | None = None
    result: Any = None
    try:
        result = call()
    except Exception as e:
        error = e
    said = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for process, text in enumerate(said):
        if text is not None:
            raise ProcessError(f"process {process}: {text}")
    return result


class GivenUp(Exception):
    """Raised inside a call that nobody waits for any more."""


def together_while(call: Callable[[Callable[[], None] | None], T], check: Callable[[], None] | None) -> T:
    """`call(on_wait)` in every process, as `together` does it, while all of them ask `check` again and again, at the
    same points, until the last has ended. What `check` raises in all of them ends the calls: on_wait, which they are to
    call at least twice a second, raises then. On one process on_wait is `check` itself."""
    if jax.process_count() == 1:
        return call(check)
    given_up = threading.Event()

    def on_wait() -> None:
        if given_up.is_set():
            raise GivenUp

    # The call has a thread of its own, because exchange between processes must be in the same order in all.
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(call, on_wait)
        try:
            while any_of(not wait([running], _WAIT).done):
                if check is not None:
                    check()
        except BaseException:
            given_up.set()
            raise
    return together(running.result)


def by_first(call: Callable[[], Any]) -> None:
    """`call()` in the first process alone; where it raises, it raises in all."""
    together(call if is_first() else lambda: None)


def same_options(options: Mapping[str, Any]) -> None:
    """Raises ProcessError in all processes where their options or versions are not the same: they would run different
    programs, which wait for one another in the middle of a step or add up what does not belong together."""
    _same({**options, "version of burnish": __version__, "version of JAX": jax.__version__}, "start all of them with "
          "the same command and the same code")  # fmt: skip


def same_inputs(digests: Mapping[str, str]) -> None:
    """Raises ProcessError in all processes where one has read something else than the others, by its name."""
    _same(digests, "give all hosts the same files")


def _same(values: Mapping[str, Any], advice: str) -> None:
    said = gather(dict(values))
    absent = object()
    differences = []
    for name in dict.fromkeys(name for one in said for name in one):
        by_process = [one.get(name, absent) for one in said]
        other = next((i for i, value in enumerate(by_process) if value != by_process[0]), None)
        if other is not None:
            words = [
                f"{'missing' if by_process[i] is absent else repr(by_process[i])} in process {i}" for i in (0, other)
            ]
            differences.append(f"{name} is {' and '.join(words)}")
    if differences:
        raise ProcessError(f"the processes differ: {'; '.join(differences)}. {advice[0].upper()}{advice[1:]}")
