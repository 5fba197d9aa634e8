"""Runs start from MaxText checkpoints as from the Hugging Face checkpoint that they were made of."""

import shutil

import numpy as np
import pytest
from etils import epath
from rich.console import Console

from burnish.checkpoints.convert_commands import to_maxtext
from burnish.config.overrides import load_config
from burnish.config.schema import GenerateConfig, ToMaxTextConfig
from burnish.errors import BurnishError
from burnish.rl import loading
from burnish.rl.loading import open_model

LENGTHS = ("max_prefill_predict_length=72", "max_target_length=96")


def opened(path, *options):
    return open_model(load_config(GenerateConfig, [f"load_parameters_path={path}", *LENGTHS, *options]))


@pytest.mark.parametrize("scanned", [True, False])
def test_a_maxtext_checkpoint_is_the_model_it_was_made_of(scanned, checkpoint, tmp_path):
    config = ToMaxTextConfig(
        hf_model_path=str(checkpoint), base_output_directory=str(tmp_path / "mt"), scan_layers=scanned
    )
    items = to_maxtext(config, Console(quiet=True))
    model, original = opened(items), opened(checkpoint)
    assert model.spec == original.spec
    assert str(items) in model.describe()
    found, want = model.load(), original.load()
    for name, array in want["layers"].items():
        # q goes through MaxText's factor 1/√N and back.
        np.testing.assert_allclose(found["layers"][name], array, rtol=3e-7 if name == "q_proj" else 0)
    assert np.array_equal(found["embed"], want["embed"])

    shutil.rmtree(tmp_path / "mt" / "hf_source")
    with pytest.raises(BurnishError, match="with tokenizer_path, or its model_name"):
        opened(items)
    assert opened(items, f"tokenizer_path={checkpoint}").spec == original.spec


def test_the_copy_of_files_from_an_object_store_ends_with_the_process(tmp_path, monkeypatch):
    class Stored(type(epath.Path(tmp_path))):
        def __str__(self):
            return f"gs:/{super().__str__()}"

        def iterdir(self):
            return epath.Path(tmp_path).iterdir()

    (tmp_path / "config.json").write_text("{}")
    at_the_end = []
    monkeypatch.setattr(loading.atexit, "register", lambda *call, **options: at_the_end.append((call, options)))
    copy = loading.local_directory(Stored(tmp_path))
    assert copy != tmp_path
    assert (copy / "config.json").read_text() == "{}"
    [((call, *arguments), options)] = at_the_end
    call(*arguments, **options)
    assert not copy.exists()
    assert (tmp_path / "config.json").exists()
