"""What is different under Pathways: who is told before JAX looks for devices, and how checkpoints are stored."""

import sys
import types

import pytest

from burnish.config.overrides import load_config
from burnish.config.schema import RunConfig
from burnish.parallel import distributed, pathways
from burnish.parallel.errors import ProcessError
from burnish.rl.run import storage


def options(*args):
    return load_config(RunConfig, ["load_parameters_path=x", *args])


@pytest.mark.parametrize("platforms", ["proxy", "proxy,cpu"])
def test_pathways_is_initialised_when_the_platform_says_so(monkeypatch, platforms):
    calls = []
    package = types.ModuleType("pathwaysutils")
    package.initialize = lambda: calls.append(1)
    monkeypatch.setitem(sys.modules, "pathwaysutils", package)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    distributed.start()
    assert calls == [1]
    assert distributed.find_cluster({"JAX_PLATFORMS": platforms, "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None


def test_nothing_is_initialised_elsewhere(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    distributed.start()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    monkeypatch.setenv("JAX_PLATFORMS", "proxy,cpu")
    with pytest.raises(
        ProcessError, match=r"JAX_PLATFORMS=proxy,cpu .*pathwaysutils.*pip install 'burnish\[pathways\]'"
    ):
        pathways.initialize()


def test_storage_follows_the_platform_unless_it_is_given(monkeypatch):
    forms = {}
    for platforms in ("cpu", "proxy,cpu"):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        given = options("checkpoint_storage_use_ocdbt=true", "checkpoint_storage_use_zarr3=0")
        forms[platforms] = [(s.use_ocdbt, s.use_zarr3) for s in (storage(options()), storage(given))]
    assert forms == {"cpu": [(True, True), (True, False)], "proxy,cpu": [(False, False), (True, False)]}
