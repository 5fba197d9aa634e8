"""`burnish plan`: says what a run needs and costs before it is paid for.

What the compiler of an absent device needs from the environment is set here, before JAX is imported.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from burnish.config.schema import PlanConfig
from burnish.errors import BurnishError
from burnish.observe.files import is_local, write_whole
from burnish.parallel import absent_tpu
from burnish.plan.chips import Topology, parse_topology

DOES_NOT_FIT = 3
"""Exit status where the plan was made and the run does not fit; 1 and 2 are errors, as of every command."""

_SPARSE_CORE_ALL_REDUCE = "xla_tpu_enable_sparse_core_collective_offload_all_reduce"


def plan(cfg: PlanConfig) -> dict[str, Any]:
    """Make the plan, print it, write it where the options say, and return it as JSON-able values. Raises BurnishError
    where it can not be made, and with status DOES_NOT_FIT where the run does not fit."""
    topology = parse_topology(cfg.topology, max(1, cfg.dcn_data_parallelism))
    for name in ("json_file", "html_file"):
        _check_writable(name, getattr(cfg, name))
    # That of GPUs is fast as it is, and at level O1 a failed check of its own ends the process (jax 0.10.2).
    exact = cfg.exact or topology.chip.platform == "gpu"
    prepare(topology, exact)
    from burnish.plan import make, report, search
    from burnish.plan.programs import devices_of

    spec = make.spec_of(cfg)
    devices = devices_of(topology)
    if cfg.dtype == "auto" and topology.chip.platform != "cpu":
        # What auto comes to on those devices; here it would be this machine's.
        cfg = cfg.model_copy(update={"dtype": "bfloat16"})
    setting = make.Setting.of(cfg, spec, topology, devices)
    with _progress() as show:
        made = make.make_plan(setting, exact=exact, on_program=lambda name: show(f"compiling {name}"))
    result = report.as_json(made)
    report.print_plan(made)
    if cfg.search and made.fits is False:
        with _progress() as show:
            found = search.search(cfg.model_copy(update={"exact": exact}), spec, topology, devices, show)
        report.print_search(found)
        result["search"] = report.search_json(found)
    if cfg.json_file:
        _write(cfg.json_file, report.json_text(result))
    if cfg.html_file:
        _write(cfg.html_file, report.as_html(made))
    if made.fits is False:
        hint = "" if cfg.search else "; search=true looks for settings that do"
        raise BurnishError(f"the run does not fit {topology.describe()}{hint}", exit_code=DOES_NOT_FIT)
    return result


def prepare(topology: Topology, exact: bool) -> None:
    """Sets what compiling for `topology` on this machine needs: no accelerator of its own, virtual devices where those
    are asked for, and the optimisation level."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a run may have the library in use
    if topology.chip.name == "tpu7x":
        # libtpu 0.0.42.1 aborts the process where it compiles a small all-reduce for this chip's sparse cores.
        args = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{args} --{_SPARSE_CORE_ALL_REDUCE}=false".strip()
    absent_tpu.settle()
    import jax

    # A program for a device that is not there can be written to the cache, but not read from it.
    jax.config.update("jax_enable_compilation_cache", False)
    if topology.chip.platform == "cpu":
        with contextlib.suppress(RuntimeError):  # JAX runs already: with the devices it has
            jax.config.update("jax_num_cpu_devices", topology.num_devices)
    jax.config.update("jax_optimization_level", "UNKNOWN" if exact else "O1")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what goes on: in one line of a terminal that is gone at the end, or else as a line each."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield lambda text: console.print(text, soft_wrap=True)


def _check_writable(name: str, path: str | None) -> None:
    """Before anything is compiled. An absent directory is made, as the write in the end would."""
    if path is None or not is_local(path):
        return
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BurnishError(f"{name}={path}: its directory cannot be made: {error.strerror}") from None
    if file.is_dir():
        raise BurnishError(f"{name}={path} is a directory; give the name of a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BurnishError(f"{name}={path} cannot be written")


def _write(path: str, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise BurnishError(f"{path}: cannot be written: {error.strerror}") from error
