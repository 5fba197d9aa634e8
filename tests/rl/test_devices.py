"""Which devices train and which sample: by number, without any device."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from burnish.config.overrides import load_config
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError
from burnish.parallel.errors import MeshError
from burnish.parallel.mesh import AXES, MeshSizes, make_mesh
from burnish.rl.devices import choose_devices, describe, sampler_sizes

EIGHT = list(range(8))


def options(*args):
    return load_config(RunConfig, ["load_parameters_path=x", *args])


def split(trainer, sampler):
    return options(f"trainer_devices_fraction={trainer}", f"sampler_devices_fraction={sampler}")


def test_the_first_devices_train_and_the_last_ones_sample():
    shared = choose_devices(options(), EIGHT)
    assert shared.trainer == shared.sampler == tuple(EIGHT)
    for trainer, sampler, numbers in ((0.5, 0.5, (4, 4)), (0.25, 0.75, (2, 6)), (0.5, 0.25, (4, 2))):
        devices = choose_devices(split(trainer, sampler), EIGHT)
        assert (len(devices.trainer), len(devices.sampler)) == numbers
        assert devices.trainer == tuple(EIGHT[: numbers[0]])
        assert devices.sampler == tuple(EIGHT[-numbers[1] :])
        assert devices.split


def test_shares_that_are_no_whole_number_of_devices_are_refused():
    with pytest.raises(BurnishError, match=r"trainer_devices_fraction=0.3 of 8 devices is 2.4.*multiple of 1/8"):
        choose_devices(split(0.3, 0.5), EIGHT)
    with pytest.raises(BurnishError, match=r"trainer_devices_fraction=0.5 .*there is one device.*give 1 and 1"):
        choose_devices(split(0.5, 0.5), EIGHT[:1])


def test_thirds_and_sevenths_need_not_be_exact():
    for number, shares, counts in (
        (3, (0.333, 0.667), (1, 2)),
        (12, (0.3333, 0.6667), (4, 8)),
        (7, (0.143, 0.857), (1, 6)),
    ):
        devices = choose_devices(split(*shares), list(range(number)))
        assert (len(devices.trainer), len(devices.sampler)) == counts
    with pytest.raises(BurnishError, match=r"trainer_devices_fraction=0.32 of 3 devices is 0.96; it must come to"):
        choose_devices(split(0.32, 0.5), EIGHT[:3])


@pytest.mark.parametrize("engine", ["builtin", "vllm"])
def test_a_chunk_size_for_moving_weights_is_said_to_change_nothing_only_where_it_does(engine):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), AXES)
    lines = describe(options(f"rollout_engine={engine}", "rl.reshard_chunk_size=4"), mesh, mesh)
    assert [line.split(":")[0] for line in lines] == (
        ["rl.reshard_chunk_size changes nothing"] if engine == "builtin" else []
    )
    assert describe(options(), mesh, mesh) == []


def test_processes_that_control_a_part_each_can_not_split_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(BurnishError, match=r"different processes, of which there are 2.*Pathways.*give 1 and 1"):
        choose_devices(split(0.5, 0.5), EIGHT)
    assert choose_devices(options(), EIGHT).trainer == tuple(EIGHT)


def test_the_samplers_axes_must_come_to_its_devices():
    sizes = sampler_sizes(options("rollout_tensor_parallelism=4"), EIGHT)
    assert (sizes.data, sizes.expert, sizes.tensor) == (2, 1, 4)
    with pytest.raises(MeshError, match=r"rollout_tensor_parallelism=3: there are 8 devices, which 3 does not divide"):
        sampler_sizes(options("rollout_tensor_parallelism=3"), EIGHT)


def test_more_slices_than_there_are_are_refused_by_name():
    with pytest.raises(MeshError, match="dcn_data_parallelism=2, but the devices are of 1 slices; -1 takes those"):
        make_mesh([jax.devices()[0]] * 2, MeshSizes(fsdp=-1, slices=2))
