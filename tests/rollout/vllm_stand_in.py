"""Takes the place of vLLM's process: reads the messages as they are documented, keeps what arrives for the test to look
at, and dies, hangs or complains where the test says. It samples nothing: it answers what the test tells it to.

STAND_IN is JSON: "directory" to write to, "faults" {"<number of the start> <request>": how} (with a number behind it:
when that is asked for the second time, …), "completions" to answer.
"""

import collections
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

plan = json.loads(os.environ["STAND_IN"])
directory = Path(plan["directory"])
start = len(list(directory.glob("environment-*"))) + 1
(directory / f"environment-{start}").write_text(json.dumps([dict(os.environ), sys.argv]))
(directory / f"pid-{start}").write_text(str(os.getpid()))
print(f"start {start} of the stand-in", flush=True)
stream = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")


def send(message):
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def fail(how, do):
    """Returns whether the request has been answered with that."""
    if how == "kill":
        print(f"about to be killed in {do}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        print(f"leaving in {do}", file=sys.stderr, flush=True)
        sys.exit(3)
    elif how == "hang":
        print(f"hanging in {do}", flush=True)
        time.sleep(600)
    elif how is not None:
        kind, text = how.split(": ", 1)
        send({"error": text, "kind": kind})
        if kind != "weights":
            sys.exit(1)
    return how is not None


times = collections.Counter()
while line := stream.readline():
    message = json.loads(line)
    do = message["do"]
    times[do] += 1
    tensors = message.pop("tensors", [])
    for name, *_, nbytes, _checksum in tensors:
        (directory / f"{start}-{name}").write_bytes(stream.read(nbytes))
    with (directory / "requests.jsonl").open("a") as file:
        file.write(json.dumps([start, message, tensors]) + "\n")
    if fail(plan["faults"].get(f"{start} {do}") or plan["faults"].get(f"{start} {do} {times[do]}"), do):
        continue
    if do == "weights_end":
        version = message["version"]
    if do == "generate":
        send({"progress": [0, 1]})
        fail(plan["faults"].get(f"{start} sampling"), do)
        send({"completions": plan["completions"], "version": version})
    else:
        send({})
