"""Import, export and verification for models whose layers are a pattern, with a rest, with experts of both layouts."""

import jax
import numpy as np
import pytest
from exports import export
from family_variants import family_config, family_tensors
from llama_variants import write_checkpoint
from safetensors.numpy import load_file

from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params


@pytest.mark.parametrize("name", ["qwen3_moe_every_second_layer", "gemma3", "gemma4_experts"])
def test_a_round_trip_gives_back_every_tensor_bit_by_bit(name, tmp_path):
    config = family_config(name)
    tensors = family_tensors(config)
    source = write_checkpoint(tmp_path / "source", config, tensors, shards=3)
    spec, params = load_params(source)
    snapshot_source(source, tmp_path / "snapshot")
    export(params, tmp_path / "snapshot", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(tensors)
    assert all(np.array_equal(written[n], tensors[n]) for n in tensors)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    trained = jax.tree.map(lambda a: a + np.float32(0.5), params)
    export(trained, tmp_path / "snapshot", tmp_path / "trained")
    again, found = load_params(tmp_path / "trained")
    assert again == spec
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(found), strict=True))
