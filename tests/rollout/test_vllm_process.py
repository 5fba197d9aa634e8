"""What the trainer's side does with vLLM's process: what it sends, how long it waits, what it says when the process
dies, hangs or complains, and how it starts another. The process is a real one, without vLLM in it (vllm_stand_in.py);
test_vllm.py has the real vLLM."""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rollout_reference import TINY, decode_text, make_prompt, random_params

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from family_variants import ONE_OF_EACH, family_config, family_tensors
from llama_variants import write_checkpoint

from burnish.checkpoints.hf_import import load_params
from burnish.errors import BurnishError
from burnish.rollout.types import SamplingParams, StopReason
from burnish.rollout.vllm import process
from burnish.rollout.vllm.engine import VllmEngine, VllmOptions
from burnish.rollout.vllm.process import VllmError, VllmLost, VllmProcess, VllmWeightsError

PHASES = ("start", "weights_begin", "weights", "weights_end", "generate", "sampling", "sleep")
GREEDY = SamplingParams(max_total_tokens=40, temperature=0.0, stop_token_ids=(3, 4))
ANSWER = [[5, 6, 3], [-0.5, -0.25, -1.0], "stop", 3]
"""A completion as vLLM answers it: tokens, logprobs, why it ended, and at what."""


class StandIn:
    """Engines whose process is the stand-in, and what it saw."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.monkeypatch = directory, monkeypatch
        self.notes: list[str] = []
        self.engines: list[VllmEngine] = []
        self.log = directory / "vllm.log"
        monkeypatch.setattr(process, "WORKER", Path(__file__).parent / "vllm_stand_in.py")

    def engine(
        self, faults=None, completions=(ANSWER,), spec=TINY, dtype="float32", on_wait=None, **options
    ) -> VllmEngine:
        plan = {"directory": str(self.directory), "faults": faults or {}, "completions": list(completions)}
        self.monkeypatch.setenv("STAND_IN", json.dumps(plan))
        engine = VllmEngine(
            spec,
            self.directory / "model",
            decode_text,
            VllmOptions(**{"timeout": 20.0, "restarts": 0} | options),
            max_slots=2,
            max_prompt_tokens=16,
            max_total_tokens=40,
            dtype=dtype,
            log=self.log,
            note=self.notes.append,
            on_wait=on_wait,
        )
        self.engines.append(engine)
        return engine

    @property
    def requests(self):
        """[number of the start, message, described tensors], in order."""
        return [json.loads(line) for line in (self.directory / "requests.jsonl").read_text().splitlines()]

    @property
    def starts(self) -> int:
        return len(list(self.directory.glob("environment-*")))

    def pid(self, start: int) -> int:
        return int((self.directory / f"pid-{start}").read_text())


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    stand_in = StandIn(tmp_path, monkeypatch)
    yield stand_in
    for engine in stand_in.engines:
        engine.close()


@pytest.fixture(scope="module")
def params():
    return random_params(TINY, 0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def step(engine: VllmEngine, params, version: int = 0):
    """What a training step asks of an engine."""
    engine.load_weights(params, version)
    groups = engine.generate([make_prompt(5)], [[7]], GREEDY)
    engine.release_memory()
    return groups[0].completions[0]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_tensors_of_the_checkpoint_arrive_once_each_under_their_names(stand_in, tmp_path, name):
    """Against the files, which were written without any code of burnish."""
    config = family_config(name)
    tensors = family_tensors(config)
    spec, params = load_params(write_checkpoint(tmp_path / "checkpoint", config, tensors))
    engine = stand_in.engine(spec=spec, chunk_size=3)
    engine.load_weights(params, 0)
    messages = [described for _, message, described in stand_in.requests if message["do"] == "weights"]
    assert max(len(described) for described in messages) == 3
    described = [tensor for described in messages for tensor in described]
    assert sorted(tensor[0] for tensor in described) == sorted(tensors)
    for name, dtype, shape, _, checksum in described:
        found = np.frombuffer((tmp_path / f"1-{name}").read_bytes(), dtype).reshape(shape)
        np.testing.assert_array_equal(found, tensors[name])
        assert checksum == int(tensors[name].view(np.uint32).sum(dtype=np.uint64) % 2**32)
    (manifest,) = (message["manifest"] for _, message, _ in stand_in.requests if message["do"] == "start")
    assert manifest == [tensor[:1] + tensor[1:3] for tensor in described]


def test_bfloat16_weights_are_rounded_once_by_the_trainer(stand_in, tmp_path, params):
    engine = stand_in.engine(dtype="bfloat16")
    engine.load_weights(params, 0)
    found = np.frombuffer((tmp_path / "1-model.embed_tokens.weight").read_bytes(), jax.numpy.bfloat16)
    want = np.asarray(params["embed"]).astype(jax.numpy.bfloat16).ravel()
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_process_is_replaced_and_the_new_one_gets_the_weights_first(stand_in, params, phase):
    engine = stand_in.engine({f"1 {phase}": "kill"}, restarts=1)
    completion = step(engine, params, version=4)
    assert stand_in.starts == 2
    (note,) = stand_in.notes
    assert "SIGKILL" in note
    assert "about to be killed in" in note
    assert "0 restarts left" in note
    done = [message["do"] for start, message, _ in stand_in.requests if start == 2]
    if phase == "sleep":  # between sampling and the next weights there are none to give
        assert done == ["start", "sleep"]
    else:
        assert [do for do in done if do != "weights"] == ["start", "weights_begin", "weights_end", "generate", "sleep"]
    assert completion.token_ids.tolist() == [5, 6, 3]
    assert completion.weight_versions.tolist() == [4, 4, 4]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_without_restarts_the_run_ends_in_time_with_the_end_of_the_log(stand_in, params, phase, how):
    timeout = 0.7 if how == "hang" else 20.0
    before = time.monotonic()
    with pytest.raises(VllmLost) as error:
        step(stand_in.engine({f"1 {phase}": how}, timeout=timeout), params)
    assert time.monotonic() - before < 10
    told = str(error.value)
    assert ("hanging in" if how == "hang" else "about to be killed in") in told
    assert str(stand_in.log) in told
    assert ("rollout_timeout" if how == "hang" else "SIGKILL") in told
    assert not is_alive(stand_in.pid(1))


def test_a_process_that_dies_while_the_trainer_trains_is_replaced_at_the_next_weights(stand_in, params):
    engine = stand_in.engine(restarts=1)
    step(engine, params, 0)
    os.kill(stand_in.pid(1), signal.SIGKILL)
    assert step(engine, params, 1).weight_versions.tolist() == [1, 1, 1]
    assert stand_in.starts == 2


def test_no_more_restarts_than_allowed_and_each_error_has_its_own_process_log(stand_in, params):
    faults = {"1 generate": "kill", "2 start": "hang", "3 weights": "kill"}
    with pytest.raises(VllmLost, match="about to be killed in weights") as error:
        step(stand_in.engine(faults, restarts=2, timeout=0.7), params)
    assert stand_in.starts == 3
    assert len(stand_in.notes) == 2
    assert "start 3" in str(error.value)
    assert "start 2" not in str(error.value)


def test_one_that_leaves_by_itself_before_it_has_started_is_not_started_again(stand_in):
    with pytest.raises(VllmError, match=r"(?s)exit status 3.*leaving in start"):
        stand_in.engine({"1 start": "exit"}, restarts=5)
    assert stand_in.starts == 1


def test_a_failure_of_vllm_is_told_in_its_words_and_may_be_tried_again(stand_in, params):
    faults = {"1 generate": "failed: OutOfMemoryError", "2 generate": "failed: OutOfMemoryError"}
    with pytest.raises(VllmLost, match="OutOfMemoryError"):
        step(stand_in.engine(faults, restarts=1), params)
    assert stand_in.starts == 2
    assert "OutOfMemoryError" in stand_in.notes[0]


def test_what_vllm_refuses_is_not_tried_again(stand_in, params):
    with pytest.raises(VllmError, match="max_num_batched_tokens"):
        step(stand_in.engine({"1 generate": "refused: max_num_batched_tokens"}, restarts=5), params)
    assert stand_in.starts == 1


def test_after_refused_weights_the_process_goes_on_with_right_ones(stand_in, params):
    engine = stand_in.engine({"1 weights_end": "weights: 1 tensors did not come: model.norm.weight"}, restarts=5)
    for _ in range(2):
        with pytest.raises(VllmWeightsError, match=r"model\.norm\.weight"):
            engine.load_weights(params, 0)
    with pytest.raises(VllmWeightsError):  # nothing is sampled with them
        engine.generate([make_prompt(5)], [[7]], GREEDY)
    assert stand_in.starts == 1
    assert "generate" not in {message["do"] for _, message, _ in stand_in.requests}


def test_a_stop_while_sampling_ends_the_process_and_the_next_call_starts_another(stand_in, params):
    class Stopped(Exception):
        pass

    def stop(finished, tokens):
        raise Stopped

    engine = stand_in.engine({"1 sampling": "hang"})
    engine.load_weights(params, 0)
    with pytest.raises(Stopped):
        engine.generate([make_prompt(5)], [[7]], GREEDY, stop)
    assert not is_alive(stand_in.pid(1))
    assert engine.generate([make_prompt(5)], [[7]], GREEDY)[0].completions[0].token_ids.tolist() == [5, 6, 3]
    assert stand_in.notes == []


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_is_heeded_while_vllm_says_nothing(stand_in, params, phase):
    before = time.monotonic()

    def stop_after_a_second(*_):
        if time.monotonic() - before > 1:
            raise KeyboardInterrupt

    def one_step():
        engine = stand_in.engine({f"1 {phase}": "hang"}, timeout=60.0, on_wait=stop_after_a_second)
        engine.load_weights(params, 0)
        engine.generate([make_prompt(5)], [[7]], GREEDY, stop_after_a_second)
        engine.release_memory()

    with pytest.raises(KeyboardInterrupt):
        one_step()
    assert time.monotonic() - before < 15
    assert not is_alive(stand_in.pid(1))


def test_a_stopped_process_is_ended_too_and_its_directory_goes_with_it(stand_in, params):
    engine = stand_in.engine()
    engine.load_weights(params, 0)
    environment, (_, _, scratch) = json.loads((stand_in.directory / "environment-1").read_text())
    assert environment["TMPDIR"] == environment["VLLM_RPC_BASE_PATH"] == scratch
    meeting = Path(scratch) / f"vllm_dist_{os.getpid()}test"
    meeting.touch()
    block = Path("/dev/shm") / f"{meeting.name}-tp:0-cpushm_0"
    block.touch()
    os.kill(stand_in.pid(1), signal.SIGSTOP)
    before = time.monotonic()
    engine.close()
    assert time.monotonic() - before < 4  # the signal that ends it, not the one after the time of grace
    assert not is_alive(stand_in.pid(1))
    assert not Path(scratch).exists()
    assert not block.exists()


def test_secrets_are_not_in_the_environment_the_arguments_or_the_log(stand_in, monkeypatch, params):
    planted = {
        "HF_TOKEN": "planted-1",
        "AWS_SECRET_ACCESS_KEY": "planted-2",
        "OPENAI_API_KEY": "planted-3",
        "GOOGLE_APPLICATION_CREDENTIALS": "planted-4",
        "DB_PASSWORD": "planted-5",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    step(stand_in.engine(), params)
    environment, arguments = json.loads((stand_in.directory / "environment-1").read_text())
    assert "planted" not in json.dumps([environment, arguments])
    assert "planted" not in stand_in.log.read_text()
    assert "planted" not in json.dumps(stand_in.requests)
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert environment["PYTHONPATH"].endswith("vllm/worker")  # nothing of burnish's own environment


def test_options_reach_vllm_under_its_names(stand_in, params):
    options = {
        "tensor_parallelism": 2,
        "max_num_batched_tokens": 64,
        "memory_fraction": 0.5,
        "async_scheduling": True,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": 1},
        "additional_config": {"b": 2},
    }
    stand_in.engine(**options, cuda_devices="4,5")
    assert stand_in.requests[0][1]["options"] == {
        "dtype": "float32",
        "max_model_len": 40,
        "max_num_seqs": 2,
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.5,
        "async_scheduling": True,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": 1},
        "additional_config": {"b": 2},
    }
    environment, _ = json.loads((stand_in.directory / "environment-1").read_text())
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is in the environment of the tests")
def test_an_interpreter_without_vllm_is_named(tmp_path):
    """With the real worker."""
    vllm = VllmProcess(None, tmp_path / "log", dict(os.environ))
    with pytest.raises(VllmError, match=r"can not be imported.*vllm_python") as error:
        vllm.ask({"do": "start"}, timeout=60)
    vllm.close()
    assert sys.executable in str(error.value)
    assert not isinstance(error.value, VllmLost)


def test_programs_that_are_no_python_and_logs_that_can_not_be_written_are_named(stand_in, tmp_path):
    with pytest.raises(VllmError, match="/no/such/python"):
        stand_in.engine(python="/no/such/python")
    with pytest.raises(VllmError, match=r"/bin/true, ended with exit status 0"):
        stand_in.engine(python="/bin/true", restarts=5)
    stand_in.log = tmp_path / "missing" / "vllm.log"
    with pytest.raises(VllmError, match=r"missing/vllm\.log.*can not be written"):
        stand_in.engine()


@pytest.mark.parametrize(
    ("answer", "tokens", "reason"),
    [
        ([[5, 6, 3], [0.0] * 3, "stop", 3], [5, 6, 3], StopReason.STOP),
        ([[5, 6, 8], [0.0] * 3, "length", None], [5, 6, 8], StopReason.LENGTH),
        # Token i is the letter i: "fgh" holds "gh" after the third token. vLLM told later, or at another reason.
        ([[5, 6, 7, 8, 9], [0.0] * 5, "stop", "gh"], [5, 6, 7], StopReason.STOP_STRING),
        ([[5, 6, 7, 8, 9], [0.0] * 5, "length", None], [5, 6, 7], StopReason.STOP_STRING),
        ([[5, 6, 7, 8, 3], [0.0] * 5, "stop", 3], [5, 6, 7], StopReason.STOP_STRING),
        ([[5, 6, 7], [0.0] * 3, "stop", 7], [5, 6, 7], StopReason.STOP),
    ],
)
def test_completions_end_where_those_of_the_built_in_engine_end(stand_in, params, answer, tokens, reason):
    engine = stand_in.engine(completions=[answer])
    engine.load_weights(params, 0)
    sampling = SamplingParams(40, stop_token_ids=(3, 7), stop_strings=("gh",))
    (completion,) = engine.generate([make_prompt(5)], [[7]], sampling)[0].completions
    assert (completion.token_ids.tolist(), completion.stop_reason) == (tokens, reason)
    assert completion.text == decode_text(tokens)
    assert len(completion.logprobs) == len(completion.weight_versions) == len(tokens)


def test_a_stop_string_that_the_text_does_not_hold_is_an_error(stand_in, params):
    engine = stand_in.engine(completions=[[[5, 6], [0.0] * 2, "stop", "gh"]])
    engine.load_weights(params, 0)
    with pytest.raises(VllmError, match="'gh'"):
        engine.generate([make_prompt(5)], [[7]], SamplingParams(40, stop_strings=("gh",)))


@pytest.mark.parametrize("sampling", [SamplingParams(40, temperature=0.005), SamplingParams(40, min_p=0.1, top_p=0.9)])
def test_what_vllm_would_sample_otherwise_is_refused(stand_in, params, sampling):
    engine = stand_in.engine()
    engine.load_weights(params, 0)
    with pytest.raises(BurnishError, match="rollout_engine=builtin"):
        engine.generate([make_prompt(5)], [[7]], sampling)
    assert "generate" not in {message["do"] for _, message, _ in stand_in.requests}


def test_weights_that_the_trainer_has_changed_since_are_not_sent_again(stand_in):
    """Sampling one step ahead: the update has consumed the arrays that the lost process had."""
    engine = stand_in.engine({"1 generate": "kill"}, restarts=1)
    consumed = jax.tree.map(jax.numpy.copy, random_params(TINY, 1))
    engine.load_weights(consumed, 3)
    jax.tree.map(lambda a: a.delete(), consumed)
    with pytest.raises(VllmError, match=r"version 3.*resume=true"):
        engine.generate([make_prompt(5)], [[7]], GREEDY)
    assert not is_alive(stand_in.pid(2))


def test_nothing_is_sampled_between_release_and_new_weights(stand_in, params):
    engine = stand_in.engine()
    with pytest.raises(RuntimeError, match="before load_weights"):
        engine.generate([make_prompt(5)], [[7]], GREEDY)
    step(engine, params)
    with pytest.raises(RuntimeError, match="before load_weights"):
        engine.generate([make_prompt(5)], [[7]], GREEDY)
