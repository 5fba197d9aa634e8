"""`python exchange.py CASE`: one of several processes, found by BURNISH_*, that come to the situation of that name. A
program of its own, because JAX's processes end with the program."""

import os
import sys

from burnish.errors import BurnishError
from burnish.parallel import distributed, processes


def case(name: str, process: int) -> None:
    if name == "options":
        processes.same_options({"batch_size": 2 + process, "seed": 0} | ({"search": True} if process else {}))
    elif name == "inputs":
        processes.same_inputs({"the training data": "ab" if process else "cd", "the model's config.json": "ef"})
    elif name == "same":
        processes.same_options({"batch_size": 2})
        processes.same_inputs({"the training data": "ab"})
        print("went on")
    elif name in ("0 fails", "1 fails"):
        if process == int(name[0]):
            raise BurnishError("no room in /there", exit_code=3)
        processes.gather(0)


if os.environ.get("START_SECONDS"):
    distributed.START_SECONDS = int(os.environ["START_SECONDS"])
distributed.FAIL_TOGETHER_SECONDS = 5
try:
    distributed.start()
    with distributed.others_needed():
        case(sys.argv[1], int(os.environ["BURNISH_PROCESS_ID"]))
except BurnishError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
