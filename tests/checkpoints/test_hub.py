"""Downloads from and uploads to the hub, with a server on this machine standing in for it."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from hub_server import Hub, serving
from llama_variants import BASE, random_tensors, write_checkpoint
from safetensors.numpy import load_file

from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import load_params
from burnish.checkpoints.hub import HUB_IDS
from burnish.checkpoints.store import TrainingStore
from burnish.config.schema import ExportConfig
from burnish.models.families import PRESETS

TOKEN = "hf_a_token_that_must_stay_secret"


@pytest.fixture
def hub(tmp_path):
    source = write_checkpoint(tmp_path / "source", BASE, random_tensors(BASE))
    with serving(Hub(TOKEN, {"owner/model": source})) as hub:
        yield hub


def burnish(hub, tmp_path, *args, token=True):
    """(status, all that was printed) of the program, with the stand-in as hub and a cache of its own."""
    env = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    env.pop("HF_TOKEN", None)
    if token:
        env["HF_TOKEN"] = TOKEN
    done = subprocess.run(
        [sys.executable, "-m", "burnish.cli.main", *args], env=env, capture_output=True, text=True, timeout=240
    )
    assert TOKEN not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def assert_token_is_nowhere(tmp_path):
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert TOKEN.encode() not in file.read_bytes(), file


@pytest.mark.slow
def test_a_repository_is_downloaded_and_converted(hub, tmp_path):
    status, text = burnish(hub, tmp_path, "convert", "owner/model", str(tmp_path / "out"), "--to", "hf")
    assert status == 0, text
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == random_tensors(BASE).keys()
    assert_token_is_nowhere(tmp_path)


@pytest.mark.slow
def test_a_download_that_is_cut_goes_on_where_it_stopped(hub, tmp_path):
    config = BASE | {"vocab_size": 131072}
    shutil.rmtree(hub.repositories["owner/model"])
    tensors = random_tensors(config)
    write_checkpoint(hub.repositories["owner/model"], config, tensors)
    hub.cut_after["model.safetensors"] = 22_000_000
    status, text = burnish(hub, tmp_path, "convert", "owner/model", str(tmp_path / "out"), "--to", "hf")
    assert status == 0, text
    starts = [asked for file, asked in hub.ranges if file == "model.safetensors"]
    assert starts[0] == ""
    assert len(starts) == 2
    assert int(starts[1].removeprefix("bytes=").removesuffix("-")) > 10_000_000
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(found[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


@pytest.mark.slow
def test_a_gated_model_says_where_to_accept_its_licence(hub, tmp_path):
    hub.gated.add("owner/model")
    args = ("to-maxtext", "--hf_model_path=owner/model", f"base_output_directory={tmp_path / 'out'}")
    status, text = burnish(hub, tmp_path, *args, token=False)
    assert status == 1
    assert "accept its licence" in text
    assert f"{hub.endpoint}/owner/model" in text
    assert "HF_TOKEN" in text
    status, text = burnish(hub, tmp_path, *args, f"hf_access_token={TOKEN}", token=False)
    assert status == 0, text
    assert_token_is_nowhere(tmp_path)


@pytest.mark.slow
def test_an_export_is_uploaded_with_a_card_that_says_what_was_trained(hub, tmp_path):
    source = hub.repositories["owner/model"]
    snapshot_source(source, tmp_path / "snapshot")
    _, params = load_params(source)
    run = tmp_path / "runs" / "monday"
    TrainingStore(run / "checkpoints" / "actor", keep=1).save(5, params, {}, {}, hf_source=tmp_path / "snapshot")
    options = {
        "run_name": "monday",
        "load_parameters_path": "owner/model",
        "dataset_name": "openai/gsm8k",
        "train_split": "train",
        "num_batches": 5,
        "learning_rate": 3e-6,
        "rl": {"num_generations": 4, "grpo_beta": 0.08},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(options))
    (run / "summary.json").write_text(json.dumps({"accuracy_before": 12.5, "accuracy_after": 31.25}))
    args = (
        "to-huggingface",
        f"load_parameters_path={run / 'checkpoints/actor/5/model_params'}",
        f"base_output_directory={tmp_path / 'out'}",
        "--push-to-hub",
        "owner/trained",
    )
    hub.uploaded["model-00001-of-00002.safetensors"] = b"of an earlier export"
    status, text = burnish(hub, tmp_path, *args)
    assert status == 0, text
    assert "model-00001-of-00002.safetensors" not in hub.uploaded
    assert hub.created[0]["name"] == "trained"
    assert "private" in json.dumps(hub.created[0])
    for file in ("config.json", "tokenizer.json", "generation_config.json", "model.safetensors"):
        assert hub.uploaded[file] == (tmp_path / "out" / file).read_bytes()
    card = hub.uploaded["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "owner/model"
    assert header["datasets"] == ["openai/gsm8k"]
    for said in ("monday", "GRPO", "step 5", "rl.num_generations: 4", "learning_rate: 3e-06", "31.25"):
        assert said in card
    assert_token_is_nowhere(tmp_path)

    shutil.rmtree(tmp_path / "out")
    status, text = burnish(hub, tmp_path, *args, token=False)
    assert status == 1
    assert "is exported, but was not uploaded" in text
    assert "HF_TOKEN" in text
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("repository", ["name", "owner/", "a/b/c", "owner/na me"])
def test_a_repository_without_owner_is_refused_before_anything_is_exported(repository):
    with pytest.raises(ValueError, match="push_to_hub"):
        ExportConfig(load_parameters_path="builtin", base_output_directory="out", push_to_hub=repository)


def test_every_preset_has_a_repository():
    assert PRESETS.keys() <= HUB_IDS.keys()
