"""burnish to-huggingface: from a training checkpoint alone, or from a Hugging Face directory."""

import io
import json
import shutil
from importlib import resources

import numpy as np
import pytest
from llama_variants import BASE, random_tensors, write_checkpoint
from rich.console import Console
from safetensors.numpy import load, load_file

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.export_command import to_huggingface
from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.store import TrainingStore
from burnish.config.schema import ExportConfig
from burnish.models.errors import ModelError


@pytest.fixture
def run(tmp_path):
    """A run directory with a checkpoint of step 3 whose weights moved; its source is gone."""
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    snapshot_source(source, tmp_path / "snapshot")
    _, params = load_params(source)
    params["layers"]["v_proj"] += np.float32(0.5)
    store = TrainingStore(tmp_path / "checkpoints" / "actor", keep=2)
    store.save(3, params=params, optimizer_state={}, extra={}, hf_source=tmp_path / "snapshot")
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "snapshot")
    return tmp_path


def convert(tmp_path, path, **options):
    text = io.StringIO()
    config = ExportConfig(load_parameters_path=str(path), base_output_directory=str(tmp_path / "hf"), **options)
    out = to_huggingface(config, Console(file=text, width=200))
    assert out == tmp_path / "hf"
    return out, text.getvalue()


@pytest.mark.parametrize("path", ["checkpoints/actor/3/model_params", "checkpoints/actor/3"])
def test_a_training_checkpoint_alone_becomes_a_hugging_face_directory(path, run):
    out, text = convert(run, run / path)
    want = random_tensors(BASE)
    for name, tensor in load_file(out / "model.safetensors").items():
        moved = tensor - want[name]
        assert np.allclose(moved, 0.5 if "v_proj" in name else 0.0, atol=1e-6)
    assert json.loads((out / "config.json").read_text()) == BASE
    assert (out / "generation_config.json").exists()
    assert not (out / "burnish_source.json").exists()
    assert "Verified: all 21 tensors" in text
    assert str(out) in text


def test_weight_dtype_is_applied(run):
    out, _ = convert(run, run / "checkpoints/actor/3/model_params", weight_dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {t.dtype.name for t in load_file(out / "model.safetensors").values()} == {"bfloat16"}


def test_a_hugging_face_directory_changes_dtype(tmp_path):
    write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    out, _ = convert(tmp_path, tmp_path / "source", weight_dtype="float16")
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {np.dtype(np.float16)}


def test_model_name_must_agree_unless_told_otherwise(run):
    path = run / "checkpoints/actor/3/model_params"
    with pytest.raises(ModelError, match="hidden_size is 32 there"):
        convert(run, path, model_name="llama3.1-8b")
    assert not (run / "hf").exists()
    convert(run, path, model_name="llama3.1-8b", override_model_architecture=True)


def test_a_checkpoint_without_its_source_is_refused(run):
    shutil.rmtree(run / "checkpoints/actor/3/hf_source")
    with pytest.raises(CheckpointError, match="without its source's files"):
        convert(run, run / "checkpoints/actor/3/model_params")


def test_a_path_that_holds_nothing_is_refused(run):
    with pytest.raises(CheckpointError, match="no directory"):
        convert(run, run / "checkpoints/actor/4/model_params")


def test_the_embedded_model_is_exported_by_its_name(tmp_path):
    out, _ = convert(tmp_path, "builtin")
    embedded = resources.files("burnish") / "assets" / "tiny"
    for file in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (embedded / file).read_bytes()
    want = load(embedded.joinpath("model.safetensors").read_bytes())
    written = load_file(out / "model.safetensors")
    assert written.keys() == want.keys()
    assert all(np.array_equal(written[name], want[name]) for name in want)
