"""Pathways: one process controls the devices of all hosts, through a proxy that JAX takes for its only backend.

To the rest of the program it is one machine with many devices. JAX has to be told before it looks for devices, and
checkpoints are stored the way that Pathways' workers can write by themselves.
"""

import importlib
import os
from collections.abc import Mapping

from burnish.parallel.errors import ProcessError


def is_asked_for(env: Mapping[str, str] | None = None) -> bool:
    """Whether the environment names the proxy as the platform (JAX_PLATFORMS=proxy or proxy,cpu)."""
    return "proxy" in (os.environ if env is None else env).get("JAX_PLATFORMS", "").split(",")


def initialize() -> None:
    """To be called before JAX looks for devices, once or more. Raises ProcessError without Pathways' package."""
    try:
        package = importlib.import_module("pathwaysutils")
    except ImportError as error:
        raise ProcessError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} asks for Pathways, which needs the package "
            f"pathwaysutils ({error}): pip install 'burnish[pathways]'"
        ) from error
    package.initialize()
