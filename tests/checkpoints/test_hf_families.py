"""Import, export and verification for models whose layers are a pattern, with a rest, with experts of both layouts."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from exports import export
from family_variants import MULTIMODAL, family_config, family_tensors, multimodal
from llama_variants import probe_tokens, write_checkpoint
from rich.console import Console
from safetensors.numpy import load_file

from burnish.checkpoints.compare_command import compare
from burnish.checkpoints.convert_commands import convert
from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.config.schema import CompareConfig, ConvertConfig


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


def exported_text_part(name, tmp_path):
    """The export of a run that started from a multimodal checkpoint and learnt nothing."""
    config, tensors = multimodal(name)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    (source / "preprocessor_config.json").write_text("{}")
    snapshot_source(source, tmp_path / "snapshot")
    return export(load_params(source)[1], tmp_path / "snapshot", tmp_path / "out")


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_model_is_exported_as_a_model_of_its_own(name, tmp_path):
    out = exported_text_part(name, tmp_path)
    want, written = family_tensors(family_config(name)), load_file(out / "model.safetensors")
    assert set(written) == set(want)
    assert all(np.array_equal(written[n], want[n]) for n in want)
    assert json.loads((out / "config.json").read_text()) == family_config(name) | {"eos_token_id": [2, 5]}
    assert (out / "generation_config.json").exists()
    assert not (out / "preprocessor_config.json").exists()


@pytest.mark.parametrize(("name", "to"), [("gemma3", "training"), ("gemma4_experts", "hf")])
def test_a_multimodal_source_and_what_it_was_converted_to_are_the_same(name, to, tmp_path):
    source = write_checkpoint(tmp_path / "source", *multimodal(name))
    convert(ConvertConfig(source=str(source), destination=str(tmp_path / "out"), to=to), Console(quiet=True))
    for pair in ((source, tmp_path / "out"), (tmp_path / "out", source)):
        compare(CompareConfig(first=str(pair[0]), second=str(pair[1])), Console(quiet=True))


@pytest.mark.torch
@pytest.mark.parametrize("name", MULTIMODAL)
def test_transformers_loads_the_text_part_of_a_multimodal_model(name, tmp_path):
    pytest.importorskip("torch")
    from make_references import transformers_logits

    logits = transformers_logits(exported_text_part(name, tmp_path), probe_tokens(family_config(name)))[0]
    want = np.load(Path(__file__).parents[1] / "references" / "family_variants.npz")[name]
    assert np.abs(logits - want).max() < 1e-5
