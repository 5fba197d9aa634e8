"""Peak memory of a command, in a process of its own."""

import json
import subprocess
import sys
import textwrap

PROGRAM = """
    import importlib, json, resource, sys
    from rich.console import Console
    from burnish.config import schema
    module, function, config, options = sys.argv[1:]
    command = getattr(importlib.import_module(module), function)
    config = getattr(schema, config)(**json.loads(options))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    command(config, Console(quiet=True))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def peak_above_start(command, config, **options):
    """Bytes that a command of burnish.checkpoints needs above what it has once it is imported; `config` is the class of
    its options."""
    names = [command.__module__, command.__name__, config.__name__, json.dumps(options, default=str)]
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), *names]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()[-1])
