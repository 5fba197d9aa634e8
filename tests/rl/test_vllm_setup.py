"""From options to vLLM: what is refused before it starts, and the devices it gets. tests/rollout has vLLM itself."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
from tiny_rl import SPEC

from burnish.config.overrides import load_config
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError
from burnish.rl import setup
from burnish.rollout.vllm import process


def config(*options):
    needed = ("load_parameters_path=x", "base_output_directory=y", "run_name=z", "rollout_engine=vllm")
    return load_config(RunConfig, [*needed, *options])


def test_axes_that_vllm_does_not_have_are_refused_with_what_would_do():
    four = [object()] * 4
    with pytest.raises(BurnishError, match=r"rollout_data_parallelism=4.*rollout_tensor_parallelism=4"):
        setup.check_sampler(config(), SPEC, four)
    with pytest.raises(BurnishError, match=r"rollout_expert_parallelism=2"):
        setup.check_sampler(config("rollout_expert_parallelism=2", "rollout_tensor_parallelism=2"), SPEC, four)
    setup.check_sampler(config("rollout_tensor_parallelism=4"), SPEC, four)
    setup.check_sampler(config("rollout_tensor_parallelism=-1", "rollout_data_parallelism=1"), SPEC, four)


@pytest.mark.parametrize(
    "options",
    [("decode_sampling_temperature=0.001",), ("decode_sampling_min_p=0.1", "decode_sampling_nucleus_p=0.9")],
)
def test_sampling_that_vllm_would_do_otherwise_is_refused_before_it_starts(options):
    source = SimpleNamespace(tokenizer=SimpleNamespace(stop_token_ids=(2,)))
    cpu = [SimpleNamespace(platform="cpu")]
    with (
        pytest.raises(BurnishError, match="rollout_engine=builtin"),
        setup.open_engine(source, config(*options), cpu, 8, 1, print),
    ):
        pass


def test_vllm_gets_the_gpus_of_the_sampler_as_they_are_called_outside():
    gpus = [SimpleNamespace(platform="gpu", local_hardware_id=i) for i in range(4)]
    assert setup.cuda_devices(gpus[2:], None) == "2,3"
    assert setup.cuda_devices(gpus[1:3], "7,5,3,1") == "5,3"
    assert setup.cuda_devices([SimpleNamespace(platform="cpu")], None) is None


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        ("start", "before the first step was done: there was nothing to save"),
        ("weights_begin", "before the first step was done: there was nothing to save"),
        ("weights_begin 2", "after step 1: step 1 is saved"),
    ],
)
def test_a_signal_is_heeded_while_vllm_starts_or_takes_weights(tmp_path, monkeypatch, phase, told):
    """vLLM's process, in whose place vllm_stand_in.py runs, answers nothing any more in that phase."""
    monkeypatch.setattr(process, "WORKER", Path(__file__).parents[1] / "rollout" / "vllm_stand_in.py")
    answers = [[[5 + i, 2], [-1.0, -1.0], "stop", 2] for i in range(8)]
    plan = {"directory": str(tmp_path), "faults": {f"1 {phase}": "hang"}, "completions": answers}
    monkeypatch.setenv("STAND_IN", json.dumps(plan))
    model = tiny_runs.write_checkpoint(tmp_path / "model")
    questions = tiny_runs.write_questions(tmp_path / "questions.jsonl")
    log = tmp_path / "run" / "vllm.log"

    def send_when_it_hangs():
        while not (log.exists() and "hanging" in log.read_text()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_when_it_hangs, daemon=True).start()
    options = ("rollout_engine=vllm", "rl.max_logprob_difference=null", "num_batches=3", "num_epoch=1")
    with pytest.raises(BurnishError, match=f"stopped by SIGTERM {told}") as error:
        tiny_runs.run_training(*tiny_runs.train_args(model, questions, tmp_path, "run", *options))
    assert error.value.exit_code == 75
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid-1").read_text()), 0)
