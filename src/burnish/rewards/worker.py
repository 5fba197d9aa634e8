"""The process that checks answers or runs a user's reward functions: `python -m burnish.rewards.worker FD
FD`.

It serves one task at a time over a connection inherited from its parent, and exits when that connection
closes. A task may be stuck in C code that holds the interpreter lock (10^(10^10)), so the parent's death
cannot be noticed by Python code here: the kernel ends the process by a SIGIO on a pipe that only the parent
holds open."""

import contextlib
import fcntl
import logging
import os
import resource
import select
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

from burnish.rewards.types import RewardError
from burnish.rewards.user import call_function, load_functions, traceback_from

# What a worker is for, sent as its first message.
CheckRole = tuple[Literal["check"]]
UserRole = tuple[Literal["user"], str, tuple[str, ...]]  # path of the file, names of the functions
Role = CheckRole | UserRole

# Replies: ("ready" | "refused" | "ok" | "invalid" | "raised" | "out_of_memory", value or text). On the wire the
# number of the message that is answered comes first: 0 for the role, then the task's.
Reply = tuple[str, Any]


def main() -> None:
    connection_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:3])
    _end_with_parent(lifeline_fd)
    connection = Connection(connection_fd)
    pid = os.getpid()
    try:
        role: Role = connection.recv()
        reply, handle = _prepare(role)
        number = 0
        while True:
            if os.getpid() != pid:  # a child that a user's file has forked and let return
                os._exit(0)
            connection.send((number, *reply))
            if handle is None:
                return
            number, arguments = connection.recv()
            reply = _answer(handle, arguments, file=role[1] if role[0] == "user" else None)
    except (EOFError, ConnectionError):
        pass  # the parent is gone, or done with this worker


def _end_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process as soon as the other end of the pipe is closed."""
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # closed before the lines above took effect
        sys.exit(0)


def _prepare(role: Role) -> tuple[Reply, Callable[..., Any] | None]:
    if role[0] == "check":
        import math_verify  # noqa: F401 -- the slow import belongs to the start, not to the first task's deadline

        from burnish.rewards.check import symbolic_equal

        logging.disable(logging.CRITICAL)  # math-verify warns about every answer that it cannot parse
        _limit_memory(4 << 30)
        return ("ready", None), symbolic_equal

    try:
        functions = load_functions(role[1], role[2])
    except RewardError as error:
        return ("refused", str(error)), None
    return ("ready", None), lambda name, columns: call_function(functions[name], columns)


def _limit_memory(num_bytes: int) -> None:
    """An answer such as 9^(9^(9^9)) must not take the machine's memory from the training."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > num_bytes:
        with contextlib.suppress(ValueError, OSError):  # not every system lets itself be limited
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def _answer(handle: Callable[..., Any], arguments: tuple[Any, ...], file: str | None) -> Reply:
    """What the handler makes of a task; a traceback begins in `file`, where that is given."""
    try:
        return ("ok", handle(*arguments))
    except RewardError as error:
        return ("invalid", str(error))
    except MemoryError as error:
        return ("out_of_memory", traceback_from(error, file))
    except (Exception, SystemExit) as error:
        return ("raised", traceback_from(error, file))


if __name__ == "__main__":
    main()
