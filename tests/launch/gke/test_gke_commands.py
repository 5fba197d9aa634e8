"""The commands of workflow B, typed as for a real cluster, against the emulated one with real processes as pods."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from emulator import Cluster, Server
from test_gke_connect import kubeconfig

import burnish as package
from burnish.cli.main import main

TOKEN = "hf_" + "aB3" * 10
SOURCE = Path(package.__file__).parents[1]
TINY = Path(package.__file__).parent / "assets" / "tiny"
SLICE = ("--image=image", "--compute-type=ct6e-standard-4t", "--topology=2x4")


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path: Path, server: Server) -> None:
    """This user has set up the emulated cluster, and has a token."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", server.url)))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.cluster.environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "JAX_PLATFORMS": "cpu",
    }


def burnish(capfd, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["job", *args])
    printed = capfd.readouterr()
    return exit_.value.code or 0, printed.out, printed.err


def answer(capfd, *args: str) -> Any:
    code, out, err = burnish(capfd, *args, "--output=json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_workflow_bs_commands_run_as_they_are_typed(capfd, tmp_path: Path, cluster: Cluster) -> None:
    command = f"""if [ "$JOB_COMPLETION_INDEX" = 0 ]; then
        burnish to_maxtext hf_model_path={TINY} base_output_directory={tmp_path}/max-text-format/ scan_layers=False \\
            use_multimodal=False skip_jax_distributed_system=true checkpoint_storage_use_zarr3=0 \\
            checkpoint_storage_use_ocdbt=0 hardware=cpu --lazy_load_tensors=True
    else sleep 2; fi; test -n $HF_TOKEN"""
    given = ("--name=hf-to-mt", "--num-slices=1", *SLICE, "--await-job-completion", f"--command={command}")
    code, out, err = burnish(capfd, "submit", *given)
    assert (code, out) == (0, "job hf-to-mt has succeeded\n"), err
    assert "all 2 hosts run" in err
    assert (tmp_path / "max-text-format" / "0" / "items").is_dir()
    _, log, _ = burnish(capfd, "logs", "hf-to-mt", "--main-only", "-f")
    assert f"{tmp_path}/max-text-format/0/items" in log
    assert [(job["name"], job["state"]) for job in answer(capfd, "list")] == [("hf-to-mt", "Succeeded")]
    assert answer(capfd, "describe", "hf-to-mt")["hosts"][1]["exit_code"] == 0
    for verb in ("list", "describe", "inspect", "logs"):
        _, out, err = burnish(capfd, verb, *(() if verb == "list" else ("hf-to-mt",)))
        assert TOKEN not in out + err
    assert burnish(capfd, "cancel", "hf-to-mt")[0] == 0
    assert answer(capfd, "list") == []
    assert TOKEN not in json.dumps([cluster.requests, cluster.store.list("pods"), cluster.store.list("jobsets")])


def test_a_failed_jobs_exit_code_is_the_commands_own(capfd) -> None:
    given = ("submit", "--name=bad", *SLICE, "--restarts=0", "--await-job-completion", "--command=sleep 0.3; exit 42")
    code, _, err = burnish(capfd, *given)
    assert code == 42
    assert "ended with exit code 42" in err
    assert "error: job bad" in err


def test_a_dry_run_prints_the_manifests_and_sends_nothing(capfd, cluster: Cluster) -> None:
    code, out, _ = burnish(capfd, "submit", "--name=plan", *SLICE, "--dry-run", "--command=true")
    assert code == 0
    assert out.startswith("apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n")
    assert "HF_TOKEN: <not shown>" in out
    assert TOKEN not in out
    assert cluster.requests == []


def test_following_ends_with_the_job_that_another_terminal_cancels(capfd, cluster: Cluster) -> None:
    assert burnish(capfd, "submit", "--name=long", *SLICE, "--command=echo up; sleep 60")[0] == 0
    follower = subprocess.Popen(
        [sys.executable, "-m", "burnish.cli.main", "job", "logs", "long", "-f"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    killer = threading.Timer(60, follower.kill)
    killer.start()
    assert follower.stdout is not None
    first = {follower.stdout.readline(), follower.stdout.readline()}
    assert first == {"[main-job-0-0] up\n", "[main-job-0-1] up\n"}
    assert burnish(capfd, "cancel", "long")[0] == 0
    assert follower.wait() == 0
    killer.cancel()
    follower.stdout.close()
