"""From options to vLLM: what is refused before it starts, and the devices it gets. tests/rollout has vLLM itself."""

from types import SimpleNamespace

import pytest
from tiny_rl import SPEC

from burnish.config.overrides import load_config
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError
from burnish.rl import setup


def config(*options):
    needed = ("load_parameters_path=x", "base_output_directory=y", "run_name=z", "rollout_engine=vllm")
    return load_config(RunConfig, [*needed, *options])


def test_axes_that_vllm_does_not_have_are_refused_with_what_would_do():
    four = [object()] * 4
    with pytest.raises(BurnishError, match=r"rollout_data_parallelism=4.*rollout_tensor_parallelism=4"):
        setup.check_sampler(config(), SPEC, four)
    with pytest.raises(BurnishError, match=r"rollout_expert_parallelism=2"):
        setup.check_sampler(config("rollout_expert_parallelism=2", "rollout_tensor_parallelism=2"), SPEC, four)
    setup.check_sampler(config("rollout_tensor_parallelism=4"), SPEC, four)
    setup.check_sampler(config("rollout_tensor_parallelism=-1", "rollout_data_parallelism=1"), SPEC, four)


@pytest.mark.parametrize(
    "options",
    [("decode_sampling_temperature=0.001",), ("decode_sampling_min_p=0.1", "decode_sampling_nucleus_p=0.9")],
)
def test_sampling_that_vllm_would_do_otherwise_is_refused_before_it_starts(options):
    source = SimpleNamespace(tokenizer=SimpleNamespace(stop_token_ids=(2,)))
    cpu = [SimpleNamespace(platform="cpu")]
    with (
        pytest.raises(BurnishError, match="rollout_engine=builtin"),
        setup.open_engine(source, config(*options), cpu, 8, 1, print),
    ):
        pass


def test_vllm_gets_the_gpus_of_the_sampler_as_they_are_called_outside():
    gpus = [SimpleNamespace(platform="gpu", local_hardware_id=i) for i in range(4)]
    assert setup.cuda_devices(gpus[2:], None) == "2,3"
    assert setup.cuda_devices(gpus[1:3], "7,5,3,1") == "5,3"
    assert setup.cuda_devices([SimpleNamespace(platform="cpu")], None) is None
