"""Workflow B with the embedded model, on processes of this machine: as the guide writes it, and with a host killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.checkpoints.safetensors_file import list_tensors
from burnish.launch.job import JobSpec
from burnish.launch.local.backend import LocalBackend
from burnish.launch.local.state import JobDirectory, jobs_directory
from burnish.observe.metrics import read_metrics

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "gke.md"


@pytest.fixture
def backend(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    local = LocalBackend()
    yield local
    for status in local.list():
        local.cancel(status.name)


def rehearsal() -> str:
    """The guide's own script."""
    section = GUIDE.read_text(encoding="utf-8").split("\n## Rehearsal on this machine\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    return "set -eu\n" + "\n".join(blocks)


@pytest.mark.slow
def test_the_guides_rehearsal_runs_as_it_is_written(backend, tmp_path):
    done = subprocess.run(["bash", "-c", rehearsal()], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    states = {name: state for name, state, *_ in (line.split() for line in lines if line.startswith("tiny-"))}
    assert states == {"tiny-hf-to-mt": "Succeeded", "tiny-training": "Succeeded", "tiny-mt-to-hf": "Succeeded"}
    assert sum(line.startswith("Pre RL Training: corr=") for line in lines) == 1
    assert sum(line.startswith("Post RL Training: corr=") for line in lines) == 1
    assert f"{tmp_path}/rehearsal/max-text-format/0/items" in lines
    assert done.stderr.count("running: 8 processes") == 2
    assert "job tiny-mistake is Cancelled; its name is free" in lines
    assert backend.list()[0].name == "tiny-mistake"
    tensors = list_tensors(tmp_path / "rehearsal" / "hf-trained")
    assert len(tensors) == 38


@pytest.mark.slow
def test_training_whose_host_is_killed_goes_on_from_its_checkpoint(backend, tmp_path):
    steps = 6
    command = (
        f"burnish train_rl run_name=rl base_output_directory={tmp_path} resume=true load_parameters_path=builtin "
        f"dataset_name=builtin num_batches={steps} batch_size=4 rl.num_generations=4 num_test_batches=0 "
        "max_prefill_predict_length=64 max_target_length=96 rl.grpo_beta=0 checkpoint_period=1 log_period=1"
    )
    backend.submit(JobSpec("train", command, "v6e-4", restarts=1))
    checkpoints = tmp_path / "rl" / "checkpoints" / "actor"
    deadline = time.monotonic() + 200
    while not (checkpoints / "2").exists():
        assert time.monotonic() < deadline, [line.text for line in backend.logs("train")]
        time.sleep(0.02)
    (host,) = JobDirectory(jobs_directory() / "train").groups().values()
    os.killpg(host.pid, signal.SIGKILL)
    assert backend.wait("train", timeout=200) == 0, [line.text for line in backend.logs("train")]
    assert backend.status("train").restarts == 1
    events = [event["text"] for event in backend.describe("train")["events"]]
    assert events[1:3] == ["main-job-0-0 has ended with exit code 137 (SIGKILL)", "restart 1 of 1"]
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    # Steps that were shown: the second start did not begin anew. Step 2 may have been saved and not yet shown.
    shown = [line.text.split()[0] for line in backend.logs("train") if re.match(r" *\d/6 ", line.text)]
    assert shown.count("1/6") == 1
    assert shown.count("2/6") <= 1


MEET = """
import os
import jax

jax.distributed.initialize(
    os.environ["BURNISH_COORDINATOR_ADDRESS"],
    int(os.environ["BURNISH_NUM_PROCESSES"]),
    int(os.environ["BURNISH_PROCESS_ID"]),
)
print(jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count())
"""


def test_the_processes_of_a_job_meet_by_their_variables(backend, tmp_path):
    (tmp_path / "meet.py").write_text(MEET)
    backend.submit(JobSpec("meet", "python meet.py", "ct6e-standard-4t", "2x2", num_slices=2, restarts=0))
    assert backend.wait("meet", timeout=200) == 0, [line.text for line in backend.logs("meet")]
    assert sorted(line.text for line in backend.logs("meet") if line.text[1:2] == " ") == ["0 2 4 8", "1 2 4 8"]
