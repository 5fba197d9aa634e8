"""Runs of several processes, for real on this machine: the same as a run of one; what becomes of them when one is
killed or told to end."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import tiny_runs
from processes_of_a_run import HEARTBEAT_SECONDS, Processes

from burnish.checkpoints.store import TrainingStore
from burnish.config.overrides import load_config
from burnish.config.schema import EvalConfig, GenerateConfig, SFTConfig
from burnish.observe.rollouts import read_rollouts
from burnish.parallel import distributed
from burnish.parallel.distributed import find_cluster
from burnish.parallel.errors import ProcessError
from burnish.rl.evaluate_command import evaluate
from burnish.rl.generate_command import generate
from burnish.rl.sft import sft

STEPS = 2
WAIT = 500  # seconds; on two cores that other tests use as well


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(name, count, devices, *changes): the processes of a tiny run of that name."""
    base = tmp_path_factory.mktemp("processes")
    checkpoint = tiny_runs.write_checkpoint(base)
    questions = tiny_runs.write_questions(base / "questions.jsonl")

    def processes(name, count, devices, *changes):
        args = tiny_runs.train_args(checkpoint, questions, base, name, f"num_batches={STEPS}", *changes)
        logs = base / f"logs-{name}-{time.monotonic_ns()}"
        return Processes(["train-rl", *args], logs, count, devices)

    processes.base = base
    return processes


def finish(processes):
    with processes as running:
        codes = running.wait(WAIT)
        assert codes == [0] * running.count, running.log(0) + running.log(running.count - 1)
        return [running.log(i) for i in range(running.count)]


def assert_same(run, other):
    """Losses and all other figures but times are the same within rounding, and so are the completions."""
    for a, b in zip(tiny_runs.metrics(run), tiny_runs.metrics(other), strict=True):
        # What rounding alone makes of 0 differs by as much.
        rounding = {name: a.pop(name) + b.pop(name) for name in list(a) if name.startswith("logprob_difference")}
        assert max(rounding.values()) < 1e-4
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    for step in range(1, STEPS + 1):
        rows, others = (read_rollouts(r / "rollouts", step) for r in (run, other))
        assert [row.completion_ids for row in rows] == [row.completion_ids for row in others]


@pytest.fixture(scope="module")
def one(start):
    """Two steps of one process with 8 devices."""
    finish(start("one", 1, 8, "ici_data_parallelism=2"))
    return start.base / "one"


@pytest.mark.slow
def test_two_processes_give_what_one_gives_and_one_of_them_writes(start, one):
    logs = finish(start("two", 2, 4, "ici_data_parallelism=2"))
    assert_same(start.base / "two", one)
    assert "Process 1 of 2" in logs[1]
    assert "4 of 8 devices" in logs[1]
    assert " 2/2 " in logs[0]
    assert " 2/2 " not in logs[1]
    names = [sorted(p.name for p in (start.base / run).iterdir()) for run in ("one", "two")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_on_another_mesh(start, one):
    """Two processes with two devices each, the weights split four ways, go on where one with eight has ended."""
    more = ("resume=true", f"num_batches={STEPS + 1}", "learning_rate_schedule_steps=3")
    run = shutil.copytree(one, start.base / "longer")
    finish(start("longer", 2, 2, *more))
    assert TrainingStore(run / "checkpoints" / "actor", keep=1).steps()[-1] == STEPS + 1
    assert tiny_runs.metrics(run)[-1]["step"] == STEPS + 1
    assert tiny_runs.saved(run, STEPS + 1)[0].keys() == tiny_runs.saved(one, STEPS)[0].keys()


def wait_for_step(running, run, step):
    end = time.monotonic() + WAIT
    lines = run / "metrics.jsonl"
    while time.monotonic() < end and (not lines.exists() or lines.read_text().count("\n") < step):
        assert all(p.poll() is None for p in running.processes), running.log(0) + running.log(1)
        time.sleep(0.05)


LONG = ("num_batches=3000", "num_epoch=1000", "checkpoint_period=1", "max_num_checkpoints_to_keep=2")


@pytest.mark.slow
def test_when_one_is_killed_the_others_end_and_say_why_and_the_run_goes_on(start):
    run = start.base / "killed"
    with start("killed", 2, 1, *LONG) as running:
        wait_for_step(running, run, 2)
        running.processes[1].kill()
        since = time.monotonic()
        code = running.processes[0].wait(WAIT)
        assert time.monotonic() - since < 2 * HEARTBEAT_SECONDS
        assert code != 0
        assert "cannot go on without the others" in running.log(0), running.log(0)
    saved = TrainingStore(run / "checkpoints" / "actor", keep=2).latest()
    assert saved >= 1
    logs = finish(start("killed", 2, 1, *LONG, "resume=true", f"num_batches={saved + 1}"))
    assert f"from step {saved}" in logs[0]
    assert tiny_runs.metrics(run)[-1]["step"] == saved + 1


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step_saved(start):
    run = start.base / "told"
    with start("told", 2, 1, *LONG) as running:
        wait_for_step(running, run, 1)
        os.kill(running.processes[1].pid, signal.SIGTERM)
        assert running.wait(WAIT) == [75, 75]
        said = [running.log(i).splitlines()[-1] for i in range(2)]
    steps = TrainingStore(run / "checkpoints" / "actor", keep=2).steps()
    assert all(f"step {steps[-1]} is saved" in line for line in said), said
    assert tiny_runs.metrics(run)[-1]["step"] == steps[-1]


SLOW_REWARD = """\
import os
import time

def slow(completions, **kwargs):
    if len(completions) == 4:  # a process's half of a training batch; the probe has more
        open(os.environ["WAITING"] + str(os.getppid()), "w").close()
        time.sleep(3600)
    return [0.0] * len(completions)
"""


@pytest.mark.slow
def test_a_signal_while_rewards_are_waited_for_stops_all_at_once(start, monkeypatch):
    """The process that is told waits for its reward function, and so does the other."""
    rewards = start.base / "rewards.py"
    rewards.write_text(SLOW_REWARD)
    monkeypatch.setenv("WAITING", str(start.base / "waiting-"))
    options = (f"reward_functions_path={rewards}", "reward_functions=slow", "math_verify_timeout=3600")
    with start("waits", 2, 1, *options) as running:
        waiting = [start.base / f"waiting-{process.pid}" for process in running.processes]
        end = time.monotonic() + WAIT
        while not all(file.exists() for file in waiting):
            assert time.monotonic() < end, running.log(0) + running.log(1)
            assert all(p.poll() is None for p in running.processes), running.log(0) + running.log(1)
            time.sleep(0.05)
        os.kill(running.processes[1].pid, signal.SIGTERM)
        assert running.wait(HEARTBEAT_SECONDS) == [75, 75]
        said = [running.log(i).splitlines()[-1] for i in range(2)]
    assert "SIGTERM before the first step was done" in said[1]
    assert "a signal to another process before the first step was done" in said[0]


@pytest.mark.slow
def test_fine_tuning_evaluation_and_generation_with_two_processes_give_what_one_gives(tmp_path, capsys):
    """The embedded model; the one process is this one, with one device."""
    lengths = ("dtype=float32", "max_prefill_predict_length=72", "max_target_length=104")
    model = ("load_parameters_path=builtin", *lengths)

    def two(*command):
        return finish(Processes([*command], tmp_path / f"logs-{command[0]}", 2, 4))

    def sft_options(name):
        sizes = ("batch_size=8", "num_batches=2", "num_test_batches=1", "remat_policy=none", "adam_eps=0.01")
        return [*model, "dataset_name=builtin", *sizes, f"base_output_directory={tmp_path}", f"run_name={name}"]

    one = sft(load_config(SFTConfig, sft_options("one")))
    logs = two("sft", *sft_options("two"), "ici_data_parallelism=2")
    assert " 2/2 " in logs[0]
    assert " 2/2 " not in logs[1]
    for a, b in zip(tiny_runs.metrics(tmp_path / "two"), tiny_runs.metrics(tmp_path / "one"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["loss_after"] < summary["loss_before"]
    for name in ("loss_before", "loss_after"):
        assert summary[name] == pytest.approx(one[name], rel=1e-5)

    trained = f"load_parameters_path={tmp_path}/two/checkpoints/actor/2/model_params"
    options = [trained, *lengths, "dataset_name=builtin", "num_test_batches=1", "eval_batch_size=8"]
    options += ["num_eval_passes=2", "eval_sampling_strategy=liberal"]
    logs = two("evaluate", *options)
    capsys.readouterr()
    figures = evaluate(load_config(EvalConfig, options))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "corr=" in line]
    assert 0 < figures["corr"] < 8
    assert line in logs[0]
    assert "corr=" not in logs[1]

    options = [trained, *lengths, "num_completions=4", "prompt=Tom has 3 apples and buys 4 more. How many are there?"]
    two("generate", *options, f"output_file={tmp_path}/two.jsonl")
    generate(load_config(GenerateConfig, [*options, f"output_file={tmp_path}/one.jsonl"]))
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()


@pytest.mark.slow
def test_eight_processes_give_what_one_gives(start, one):
    finish(start("eight", 8, 4, "ici_data_parallelism=8"))
    assert_same(start.base / "eight", one)


# ---- processes that do not go together ----


@pytest.fixture
def exchange(tmp_path):
    """exchange(case, *ids, **env): statuses and last words of processes with these ids (of two) that come to a case."""

    def run(case, *ids, **env):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        shared = {**os.environ, "BURNISH_COORDINATOR_ADDRESS": address, "BURNISH_NUM_PROCESSES": "2", **env}
        logs = [tmp_path / f"{i}.log" for i in range(len(ids))]
        running = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("exchange.py")), case],
                env=shared | {"BURNISH_PROCESS_ID": str(process)},
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for process, log in zip(ids, logs, strict=True)
        ]
        try:
            return [p.wait(WAIT) for p in running], [log.read_text() for log in logs]
        finally:
            for p in running:
                p.kill()
                p.wait()

    return run


def test_different_options_are_refused_by_name_in_all_processes(exchange):
    statuses, said = exchange("options", 0, 1)
    assert statuses == [1, 1], said
    for text in said:
        assert (
            "error: the processes differ: batch_size is 2 in process 0 and 3 in process 1; search is missing in" in text
        )
        assert "seed" not in text


def test_different_data_are_refused_by_name(exchange):
    statuses, said = exchange("inputs", 0, 1)
    assert statuses == [1, 1], said
    assert all("the training data is 'cd' in process 0 and 'ab' in process 1. Give all hosts" in text for text in said)


def test_the_same_options_and_data_are_no_error(exchange):
    statuses, said = exchange("same", 0, 1)
    assert statuses == [0, 0], said
    assert all(text.endswith("went on\n") for text in said)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_alone_ends_with_its_own_status_and_the_others_say_why(exchange, failing):
    since = time.monotonic()
    statuses, said = exchange(f"{failing} fails", 0, 1, BURNISH_HEARTBEAT_SECONDS="400")
    assert time.monotonic() - since < 400, "noticed by the heartbeat only"
    assert (statuses[failing], statuses[1 - failing]) == (3, 1), said
    assert "error: no room in /there" in said[failing]
    expected = f"cannot go on without the others: process {failing} has failed: no room in /there"
    assert expected in said[1 - failing]


def test_processes_that_do_not_come_are_not_waited_for_without_end(exchange):
    statuses, said = exchange("same", 1, START_SECONDS="2")
    assert statuses == [1]
    assert "error: process 1 of 2, coordinator 127.0.0.1:" in said[0]
    assert "not all processes were there after 2 s" in said[0]


@pytest.mark.parametrize(
    ("error", "of_others"),
    [
        (ValueError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"), True),
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (ValueError("2 is no power of 3"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
    ],
)
def test_which_errors_say_that_another_process_has_gone(monkeypatch, error, of_others):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "_failure", lambda: None)
    monkeypatch.setattr(distributed, "_announce", lambda error: None)
    monkeypatch.setattr(distributed, "_all_come_to_the_end", lambda: True)
    monkeypatch.setattr(distributed.atexit, "register", lambda *_: None)
    with pytest.raises(ProcessError if of_others else type(error)), distributed.others_needed():
        raise error


# ---- who is one of how many ----

THREE = {"BURNISH_COORDINATOR_ADDRESS": "host:1", "BURNISH_NUM_PROCESSES": "4", "BURNISH_PROCESS_ID": "3"}


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, None),
        (THREE, "BURNISH_*"),
        (THREE | {"BURNISH_NUM_PROCESSES": "1", "BURNISH_PROCESS_ID": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "JAX_PLATFORMS": "cuda"}, "Slurm"),
        ({"SLURM_NTASKS": "2"}, None),  # within sbatch, not started by srun
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU slice"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "proxy,cpu"}, None),
    ],
)
def test_the_environment_says_who_is_one_of_how_many(env, name):
    found = find_cluster(env)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"BURNISH_PROCESS_ID": ""}, "BURNISH_PROCESS_ID is not"),
        ({"BURNISH_PROCESS_ID": "4"}, "below BURNISH_NUM_PROCESSES=4"),
        ({"BURNISH_NUM_PROCESSES": "many"}, "BURNISH_NUM_PROCESSES=many"),
        ({"BURNISH_COORDINATOR_ADDRESS": "host"}, "BURNISH_COORDINATOR_ADDRESS=host: it must be host:port"),
        ({"BURNISH_COORDINATOR_ADDRESS": ":1"}, "BURNISH_COORDINATOR_ADDRESS=:1: it must be host:port"),
    ],
)
def test_half_an_environment_is_refused(changes, words):
    with pytest.raises(ProcessError, match=words):
        find_cluster(THREE | changes)
