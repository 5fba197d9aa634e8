"""The verifier finds what is wrong with an export, and names it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from llama_variants import BASE, random_tensors, variant_config, write_checkpoint
from safetensors.numpy import load_file, save_file

from burnish.checkpoints import verify as verify_module
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_export import export, snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.verify import Verification, verify

Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def exported(tmp_path):
    config = variant_config("grouped_query")
    source = write_checkpoint(tmp_path / "source", config, random_tensors(config))
    snapshot_source(source, tmp_path / "snapshot")
    spec, params = load_params(source)
    out = tmp_path / "out"
    export(spec, params, tmp_path / "snapshot", out)
    dtypes = dict.fromkeys(random_tensors(config), "F32")
    return out, spec, params, tmp_path / "snapshot" / "config.json", dtypes


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def wrong(exported, match, *names):
    with pytest.raises(CheckpointError, match=match) as error:
        verify(*exported)
    for name in names:
        assert name in str(error.value)


def test_a_right_export_has_the_same_logits(exported):
    assert verify(*exported) == Verification(len(random_tensors(BASE)), 0.0)


def test_one_changed_weight_is_found(exported):
    def nudge(tensors):
        tensors[Q0][2, 3] += 1e-3

    edit(exported[0], nudge)
    wrong(exported, "differs from the trained weights by up to 0.001", Q0)


def test_two_swapped_tensors_of_one_shape_are_found(exported):
    def swap(tensors):
        a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
        tensors[a], tensors[b] = tensors[b], tensors[a]

    edit(exported[0], swap)
    wrong(exported, "differs", "model.layers.0.mlp")


def test_a_dropped_and_an_added_tensor_are_found(exported):
    edit(exported[0], lambda tensors: tensors.pop(Q0))
    wrong(exported, "missing", Q0)
    shutil.copy(exported[3].parents[1] / "source" / "model.safetensors", exported[0])
    edit(exported[0], lambda tensors: tensors.update({"model.extra": np.zeros(2, np.float32)}))
    wrong(exported, "no place", "model.extra")


def test_a_widened_or_narrowed_dtype_is_found(exported):
    edit(exported[0], lambda tensors: tensors.update({Q0: tensors[Q0].astype(np.float16)}))
    wrong(exported, "is F16, F32 was asked for", Q0)


def test_nan_is_found(exported):
    def spoil(tensors):
        tensors[Q0][0, 0] = np.nan

    edit(exported[0], spoil)
    wrong(exported, "NaN", Q0)


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "eos_token_id"])
def test_a_changed_config_is_found(exported, field):
    file = exported[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: 3}))
    wrong(exported, "differs from the source's", field)


def test_a_config_that_fits_the_files_but_not_the_training_is_found(exported):
    for file in (exported[0] / "config.json", exported[3]):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 3.0}))
    wrong(exported, "another model than was trained")


def test_truncation_is_found(exported):
    file = exported[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    wrong(exported, "truncated", "model.safetensors")


@pytest.mark.parametrize(("weight_dtype", "ulp"), [("float32", 0.0), ("float16", 2**-11), ("bfloat16", 2**-8)])
def test_the_effect_of_rounding_is_measured(weight_dtype, ulp, tmp_path):
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    snapshot_source(source, tmp_path / "snapshot")
    spec, params = load_params(source)
    verified = export(spec, params, tmp_path / "snapshot", tmp_path / "out", weight_dtype)
    assert ulp / 4 <= verified.rounding_error <= 8 * ulp


def test_right_tensors_under_code_that_reads_them_wrong_are_found(exported, monkeypatch):
    """The last line of defence: were the file's tensors put together differently, the logits would tell."""
    real = verify_module.probe_logits
    calls = []

    def probe_logits(spec, array_of):
        calls.append(spec)
        if len(calls) == 1:
            return real(dataclasses.replace(spec, rms_norm_eps=1e-2), array_of)
        return real(spec, array_of)

    monkeypatch.setattr(verify_module, "probe_logits", probe_logits)
    wrong(exported, "logits of the exported model differ")


def test_a_model_that_training_has_ruined_is_named_as_such(tmp_path):
    """Finite weights, so large that the logits are not."""
    config = variant_config("grouped_query")
    tensors = random_tensors(config)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    tensors["model.embed_tokens.weight"] *= 1e10
    source = write_checkpoint(tmp_path / "source", config, tensors)
    snapshot_source(source, tmp_path / "snapshot")
    with pytest.raises(CheckpointError, match="own logits are not finite"):
        export(*load_params(source), tmp_path / "snapshot", tmp_path / "out")
