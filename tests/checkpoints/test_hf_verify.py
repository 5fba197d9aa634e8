"""The verifier finds what is wrong with an export, and names it."""

import json
import shutil

import numpy as np
import pytest
from llama_variants import random_tensors, variant_config, write_checkpoint
from safetensors.numpy import load_file, save_file

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.sources import open_source
from burnish.checkpoints.targets import row_tensors, write_hf
from burnish.checkpoints.verify import check_written, compare_values

Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module", params=["grouped_query", "tied_head"])
def whole(request, tmp_path_factory):
    """A source and an export of it; the tied model's source holds its head once more."""
    path = tmp_path_factory.mktemp(request.param)
    tensors = random_tensors(variant_config(request.param))
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    write_checkpoint(path / "source", variant_config(request.param), tensors)
    with open_source(str(path / "source")) as opened:
        write_hf(opened, path / "out", None, lambda needs: None, lambda done, total: None)
    return path


@pytest.fixture
def exported(whole, tmp_path):
    shutil.copytree(whole / "out", tmp_path / "out")
    return whole / "source", tmp_path / "out"


def verify(source, directory):
    with open_source(str(source)) as opened:
        check_written(directory, row_tensors(opened, None), opened.config)
        compare_values(directory, opened.source, opened.copies, lambda nbytes: None)


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def wrong(exported, match, *names):
    with pytest.raises(CheckpointError, match=match) as error:
        verify(*exported)
    for name in names:
        assert name in str(error.value)


def test_a_right_export_passes(exported):
    verify(*exported)


@pytest.mark.parametrize("name", [Q0, "lm_head.weight", "model.norm.weight"])
def test_one_changed_weight_is_found(exported, name):
    def nudge(tensors):
        tensors[name].flat[3] += 1e-3

    edit(exported[1], nudge)
    wrong(exported, "differs from the source by up to 0.001", name)


def test_two_swapped_tensors_of_one_shape_are_found(exported):
    def swap(tensors):
        a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
        tensors[a], tensors[b] = tensors[b], tensors[a]

    edit(exported[1], swap)
    wrong(exported, "differs", "model.layers.0.mlp")


def test_a_dropped_and_an_added_tensor_are_found(exported):
    edit(exported[1], lambda tensors: tensors.pop(Q0))
    wrong(exported, "does not read back", Q0)
    shutil.copy(exported[0] / "model.safetensors", exported[1])
    edit(exported[1], lambda tensors: tensors.update({"model.extra": np.zeros(2, np.float32)}))
    wrong(exported, "does not read back", "model.extra")


def test_a_narrowed_dtype_is_found(exported):
    edit(exported[1], lambda tensors: tensors.update({Q0: tensors[Q0].astype(np.float16)}))
    wrong(exported, "does not read back", Q0)


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "eos_token_id"])
def test_a_changed_config_is_found(exported, field):
    file = exported[1] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: 3}))
    wrong(exported, "differs from the source's", field)


def test_truncation_is_found(exported):
    file = exported[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    wrong(exported, "truncated", "model.safetensors")
