"""The checked-in recipes are read, and those of the public tutorials ask for what the tutorials ask for."""

from pathlib import Path

import pytest

from burnish.config.overrides import load_config
from burnish.config.schema import PlanConfig, RunConfig

RECIPES = Path(__file__).parents[2] / "recipes"
TUTORIALS = {
    "llama3.1-8b-v6e-8": {
        "model_name": "llama3.1-8b-Instruct",
        "chips_per_vm": 8,
        "num_batches": 50,
        "num_test_batches": 10,
        "rollout_data_parallelism": 1,
        "rollout_tensor_parallelism": -1,
    },
    "gemma4-26b-v6e-32": {
        "model_name": "gemma4-26b",
        "num_batches": 50,
        "batch_size": 4,
        "train_micro_batch_size": 2,
        "max_target_length": 640,
        "max_prefill_predict_length": 256,
        "mu_dtype": "bfloat16",
        "grad_dtype": "bfloat16",
        "optimizer": "adafactor",
        "rollout_tensor_parallelism": 4,
        "rollout_expert_parallelism": 1,
        "trainer_devices_fraction": 0.5,
        "sampler_devices_fraction": 0.5,
        "ici_tensor_parallelism": 2,
        "ici_expert_parallelism": 4,
        "ici_fsdp_parallelism": -1,
        "remat_policy": "full",
        "allow_split_physical_axes": True,
        "decode_sampling_temperature": 0.8,
        "decode_sampling_top_k": 50,
        "decode_sampling_nucleus_p": 0.95,
        "learning_rate": 2e-5,
        "learning_rate_schedule_steps": 100,
    },
}


@pytest.mark.parametrize("name", TUTORIALS)
def test_recipes_of_the_tutorials_ask_for_the_same(name):
    cfg = load_config(RunConfig, [str(RECIPES / f"{name}.yaml")])
    assert {option: getattr(cfg, option) for option in TUTORIALS[name]} == TUTORIALS[name]
    if name.startswith("gemma"):
        assert (cfg.rl.num_generations, cfg.rl.reshard_chunk_size) == (4, 4)


def test_the_recipe_for_gpus_asks_for_the_work_of_the_tuned_one_for_tpus():
    gpus, tpus = (
        load_config(RunConfig, [str(RECIPES / f"llama3.1-8b-{name}.yaml")]) for name in ("h100-8", "v6e-8-tuned")
    )
    own = {"run_name", "chips_per_vm", "ici_fsdp_parallelism", "ici_tensor_parallelism"}
    assert gpus.model_dump(exclude=own) == tpus.model_dump(exclude=own)
    assert gpus.ici_fsdp_parallelism == 8


@pytest.mark.parametrize("name", TUTORIALS)
def test_tuned_variants_have_all_devices_do_both(name):
    cfg = load_config(PlanConfig, [str(RECIPES / f"{name}-tuned.yaml"), f"topology={name[-6:].lstrip('-')}"])
    assert not cfg.has_split_devices
    assert cfg.model_name == TUTORIALS[name]["model_name"]
