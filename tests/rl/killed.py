"""`python killed.py MODULE:NAME CALL ARGUMENTS`: burnish, but the process is killed at the start of the CALL-th call of
the function. With MODULE:* every call of any function of burnish counts, from the first training step on.
"""

import importlib
import os
import signal
import sys


def kill_at_any_call(call):
    from burnish.rl import train

    step, left = train._step, iter(range(call - 1))

    def count(frame, event, argument):
        if event == "call" and "/burnish/" in frame.f_code.co_filename and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(*arguments):
        sys.setprofile(count)
        return step(*arguments)

    train._step = counted


def kill_at(module, name, call):
    owner = importlib.import_module(module)
    *classes, name = name.split(".")
    for cls in classes:
        owner = getattr(owner, cls)
    function, left = getattr(owner, name), iter(range(call - 1))

    def counted(*arguments, **options):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, counted)


if __name__ == "__main__":
    where, call, *arguments = sys.argv[1:]
    module, _, name = where.partition(":")
    if name == "*":
        kill_at_any_call(int(call))
    else:
        kill_at(module, name, int(call))
    from burnish.cli.main import main

    main(arguments)
