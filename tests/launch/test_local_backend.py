"""Jobs as real processes: what they get, how they end, and what is left of them."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.launch.errors import LaunchError
from burnish.launch.job import JobSpec, JobState, Mount, MountKind, PathwaysSpec
from burnish.launch.local.backend import LocalBackend
from burnish.launch.local.groups import Group
from burnish.launch.local.state import JobDirectory, forget, jobs_directory

TOKEN = "hf_planted" + "Xy7" * 8
ENDLESS = "while true; do sleep 0.02; done"


@pytest.fixture
def backend(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    local = LocalBackend()
    yield local
    for status in local.list():
        local.cancel(status.name)


def job(command: str, **changes) -> JobSpec:
    return JobSpec(**{"name": "job", "compute_type": "v6e-4", "grace_seconds": 1, **changes, "command": command})


def two_hosts(command: str, **changes) -> JobSpec:
    return job(command, **{"compute_type": "ct6e-standard-4t", "topology": "2x4", **changes})


def until(happened: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def output(backend: LocalBackend, name: str = "job", host: str = "", **options) -> list[str]:
    """What was printed, by one host or by all; without what the shell says of a `sleep` of its own that was ended."""
    lines = backend.logs(name, **options)
    return [line.text for line in lines if host in ("", line.host) and line.text != "Terminated"]


def directory(name: str = "job") -> JobDirectory:
    return JobDirectory(jobs_directory() / name)


def supervisor(name: str = "job") -> int:
    """The number of the process that watches over a job."""
    wanted = str(directory(name).path).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in arguments and b"burnish.launch.local.supervisor" in arguments:
            return int(path.parent.name)
    raise AssertionError("no supervisor runs")


NAMES = [
    *("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID", "XLA_FLAGS"),
    *("BURNISH_PROCESS_ID", "BURNISH_NUM_PROCESSES", "BURNISH_COORDINATOR_ADDRESS", "TPU_WORKER_HOSTNAMES"),
    *("RESTART_ATTEMPT", "JAX_PLATFORMS"),
]
SHOW = "echo " + "\\;".join(f'"${name}"' for name in NAMES)


def environments(backend: LocalBackend) -> list[dict[str, str]]:
    shown = [dict(zip(NAMES, line.split(";"), strict=True)) for line in output(backend)]
    return sorted(shown, key=lambda values: int(values["BURNISH_PROCESS_ID"]))


def test_every_host_of_every_slice_has_the_environment_of_its_pod(backend):
    backend.submit(two_hosts(SHOW, num_slices=2, env={"XLA_FLAGS": "--xla_dump_to=x"}))
    assert backend.wait("job", timeout=20) == 0
    shown = environments(backend)
    places = [(e["JOB_INDEX"], e["JOB_COMPLETION_INDEX"], e["TPU_WORKER_ID"], e["BURNISH_PROCESS_ID"]) for e in shown]
    assert places == [("0", "0", "0", "0"), ("0", "1", "1", "1"), ("1", "0", "0", "2"), ("1", "1", "1", "3")]
    for values in shown:
        assert (values["JOBSET_NAME"], values["REPLICATED_JOB_NAME"]) == ("job", "main-job")
        assert (values["BURNISH_NUM_PROCESSES"], values["RESTART_ATTEMPT"]) == ("4", "0")
        assert values["XLA_FLAGS"] == "--xla_dump_to=x --xla_force_host_platform_device_count=4"
        assert values["JAX_PLATFORMS"] == "cpu"
        assert len(values["TPU_WORKER_HOSTNAMES"].split(",")) == 2
    (address,) = {values["BURNISH_COORDINATOR_ADDRESS"] for values in shown}
    assert address.startswith("127.0.0.1:")


def test_with_pathways_one_process_has_all_chips(backend):
    backend.submit(job(SHOW, compute_type="v6e-32", pathways=PathwaysSpec("gs://bucket/x")))
    assert backend.wait("job", timeout=20) == 0
    (values,) = environments(backend)
    assert values["XLA_FLAGS"] == "--xla_force_host_platform_device_count=32"
    assert (values["REPLICATED_JOB_NAME"], values["BURNISH_NUM_PROCESSES"]) == ("pathways-head", "1")


def test_a_cpu_job_has_no_chips(backend):
    backend.submit(job('echo "${XLA_FLAGS-none} ${TPU_WORKER_ID-none}"', compute_type="e2-standard-8"))
    assert backend.wait("job", timeout=20) == 0
    assert output(backend) == ["none none"]


def test_a_job_has_of_the_submitters_environment_only_what_finds_programs(backend, monkeypatch):
    monkeypatch.setenv("SOMETHING_OF_MINE", "x")
    backend.submit(job('echo "${SOMETHING_OF_MINE-none} $GIVEN"; command -v python; pwd', env={"GIVEN": "y z"}))
    assert backend.wait("job", timeout=20) == 0
    assert output(backend) == ["none y z", str(Path(sys.executable).parent / "python"), os.getcwd()]


def test_one_failing_host_restarts_all_and_the_logs_hold_both_starts(backend):
    command = (
        'echo "start $RESTART_ATTEMPT"; [ "$RESTART_ATTEMPT$JOB_COMPLETION_INDEX" = 01 ] && exit 7; '
        '[ "$RESTART_ATTEMPT" = 0 ] && sleep 60; true'
    )
    backend.submit(two_hosts(command, restarts=1))
    events = []
    assert backend.wait("job", timeout=20, on_event=lambda event: events.append(event.text)) == 0
    assert backend.status("job").restarts == 1
    assert events == [
        "running: 2 processes",
        "main-job-0-1 has ended with exit code 7",
        "restart 1 of 1",
        "running: 2 processes",
        "succeeded",
    ]
    assert sorted(output(backend)) == ["start 0", "start 0", "start 1", "start 1"]


def test_a_job_whose_restarts_are_used_up_has_failed_with_the_hosts_exit_code(backend):
    backend.submit(job("exit 7", restarts=2))
    assert backend.wait("job", timeout=20) == 7
    status = backend.status("job")
    assert (status.state, status.restarts, status.exit_code) == (JobState.FAILED, 2, 7)
    assert status.completed is not None
    assert status.reason == "main-job-0-0 has ended with exit code 7, after 2 restarts"


@pytest.mark.parametrize(("code", "restarts"), [(75, 1), (3, 0)])
def test_only_the_given_exit_codes_restart(backend, code, restarts):
    backend.submit(job(f"exit {code}", restarts=1, restart_on_exit_codes=(75,)))
    assert backend.wait("job", timeout=20) == code
    assert backend.status("job").restarts == restarts


def test_a_host_killed_with_nine_restarts_the_job_and_the_others_could_save(backend):
    command = f'trap "echo saved; exit 0" TERM; echo up; [ $RESTART_ATTEMPT = 1 ] || {ENDLESS}'
    backend.submit(two_hosts(command, restarts=1))
    until(lambda: output(backend).count("up") == 2)
    os.killpg(directory().groups()["main-job-0-1"].pid, signal.SIGKILL)
    assert backend.wait("job", timeout=20) == 0
    assert output(backend, host="main-job-0-0") == ["up", "saved", "up"]
    assert backend.status("job").restarts == 1


def test_a_host_killed_without_restarts_left_says_the_signal(backend):
    backend.submit(job(ENDLESS, restarts=0))
    until(lambda: directory().running_groups())
    os.killpg(directory().groups()["main-job-0-0"].pid, signal.SIGKILL)
    assert backend.wait("job", timeout=20) == 137
    assert backend.status("job").reason == "main-job-0-0 has ended with exit code 137 (SIGKILL)"


def test_a_job_that_runs_too_long_has_failed_and_is_not_restarted(backend):
    backend.submit(job(ENDLESS, restarts=3, timeout_seconds=1))
    assert backend.wait("job", timeout=20) == 124
    status = backend.status("job")
    assert (status.state, status.restarts) == (JobState.FAILED, 0)
    assert "--timeout=1s" in status.reason


def test_cancelling_ends_everything_a_host_has_started(backend):
    backend.submit(two_hosts(f"({ENDLESS}) & trap '' TERM; echo up; {ENDLESS}", grace_seconds=0))
    until(lambda: output(backend).count("up") == 2)
    groups = directory().groups()
    assert backend.cancel("job").state is JobState.CANCELLED
    assert not any(group.runs for group in groups.values())
    assert backend.wait("job", timeout=5) != 0


def test_what_is_stopped_has_the_grace_period_to_save_and_nothing_else_is_begun(backend):
    saves = "import signal, time\nsignal.signal(15, lambda *_: (time.sleep(0.5), print('saved'), exit(75)))\n"
    command = f"python -c \"{saves}print('up', flush=True)\ntime.sleep(60)\"; echo next"
    backend.submit(job(command, grace_seconds=20))
    until(lambda: output(backend) == ["up"])
    start = time.monotonic()
    backend.cancel("job")
    assert output(backend) == ["up", "saved"]
    assert time.monotonic() - start < 10
    assert backend.describe("job")["hosts"][0]["exit_code"] == 75


def test_what_a_command_leaves_running_ends_with_it(backend):
    backend.submit(job(f"({ENDLESS}) & echo up"))
    assert backend.wait("job", timeout=20) == 0
    until(lambda: not directory().running_groups())


def test_names_are_taken_until_they_are_freed(backend):
    backend.submit(job("true"))
    assert backend.wait("job", timeout=20) == 0
    with pytest.raises(LaunchError, match="--name=job is taken"):
        backend.submit(job("true"))
    assert backend.cancel("job").state is JobState.SUCCEEDED
    assert backend.list() == []
    backend.submit(job(ENDLESS))
    backend.cancel("job")
    assert [status.state for status in backend.list()] == [JobState.CANCELLED]
    backend.submit(job("echo third"))
    assert backend.wait("job", timeout=20) == 0
    assert output(backend) == ["third"]


@pytest.mark.parametrize("freed", [False, True], ids=["a new name", "the name of a cancelled job"])
def test_of_many_who_take_a_name_at_once_one_gets_it(backend, freed):
    taken = []
    if freed:
        backend.submit(job(ENDLESS))
        backend.cancel("job")

    def submit() -> None:
        try:
            backend.submit(job("true"))
        except LaunchError as error:
            taken.append(str(error))

    threads = [threading.Thread(target=submit) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 4
    assert all("is taken" in words for words in taken)
    assert backend.wait("job", timeout=20) == 0
    assert [path.name for path in jobs_directory().iterdir() if path.is_dir()] == ["job"]


def test_who_forgets_a_job_does_not_take_the_next_one_of_its_name(backend):
    backend.submit(job("true"))
    assert backend.wait("job", timeout=20) == 0
    ended = backend.status("job")
    backend.cancel("job")
    backend.submit(job("echo second"))
    forget(directory(), ended)
    assert backend.wait("job", timeout=20) == 0
    assert output(backend) == ["second"]


def test_several_jobs_run_at_once(backend):
    for name in ("a", "b"):
        other = "b" if name == "a" else "a"
        command = f"touch $DIR/{name}; until [ -e $DIR/{other} ]; do sleep 0.02; done"
        backend.submit(job(command, name=name, env={"DIR": str(jobs_directory().parent)}))
    assert [backend.wait(name, timeout=20) for name in ("a", "b")] == [0, 0]
    assert [status.name for status in backend.list()] == ["a", "b"]


def test_a_finished_job_is_forgotten_after_its_time(backend):
    backend.submit(job("true", ttl_seconds=0))
    backend.submit(job("true", name="kept"))
    until(lambda: [status.name for status in backend.list()] == ["kept"])
    with pytest.raises(LaunchError, match="there is no such job"):
        backend.status("job")


def test_a_killed_supervisor_is_a_failed_job_whose_processes_are_named_and_can_be_ended(backend):
    backend.submit(two_hosts(ENDLESS))
    until(lambda: len(directory().running_groups()) == 2)
    groups = directory().groups()
    os.kill(supervisor(), signal.SIGKILL)
    until(lambda: not directory().is_supervised())
    (status,) = backend.list()
    assert (status.state, status.completed is not None) == (JobState.FAILED, True)
    assert status.reason.startswith("lost: what watched over it was killed")
    assert all(str(group.pid) in status.reason for group in groups.values())
    assert "burnish job cancel job" in status.reason
    assert backend.wait("job", timeout=5) == 1
    backend.cancel("job")
    assert not any(group.runs for group in groups.values())
    assert backend.list() == []


def test_a_supervisor_that_is_asked_to_stop_ends_the_job_first(backend):
    backend.submit(job(f"trap 'echo saved; exit' TERM; echo up; {ENDLESS}"))
    until(lambda: output(backend) == ["up"])
    os.kill(supervisor(), signal.SIGTERM)
    assert backend.wait("job", timeout=20) == 143
    assert output(backend) == ["up", "saved"]
    assert backend.status("job").reason.endswith("stopped by SIGTERM")


def test_after_a_restart_of_the_machine_no_other_process_is_taken_for_the_jobs(backend):
    backend.submit(job(ENDLESS))
    until(lambda: directory().running_groups())
    backend.cancel("job")
    host = directory().path / "hosts" / "main-job-0-0"
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        group = Group.of_leader(other.pid)
        boot, start = group.mark.split()
        for mark in (f"00000000-0000-0000-0000-000000000000 {start}", f"{boot} 1"):
            host.write_text(f"{group.pid}\n{mark}\n")
            assert directory().running_groups() == {}
        host.write_text(f"{group.pid}\n{group.mark}\n")
        assert directory().running_groups() == {"main-job-0-0": group}
        host.write_text("")
        other.kill()


def test_a_job_outlives_the_terminal_it_was_started_from(backend):
    script = (
        "import time\nfrom burnish.launch.job import JobSpec\nfrom burnish.launch.local.backend import LocalBackend\n"
        f"LocalBackend().submit(JobSpec('job', {ENDLESS!r}, 'v6e-4', grace_seconds=1))\n"
        "print('submitted', flush=True)\ntime.sleep(60)"
    )
    terminal = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert terminal.stdout is not None
    assert terminal.stdout.readline() == b"submitted\n"
    os.killpg(terminal.pid, signal.SIGHUP)
    os.killpg(terminal.pid, signal.SIGKILL)
    terminal.wait()
    terminal.stdout.close()
    until(lambda: directory().running_groups())
    time.sleep(0.2)
    assert backend.status("job").state is JobState.RUNNING
    assert len(directory().running_groups()) == 1


def test_a_planted_token_reaches_the_processes_and_nothing_else(backend, tmp_path):
    spec = two_hosts(f"echo ${{#HF_TOKEN}}; {ENDLESS}", secret_env={"HF_TOKEN": TOKEN})
    backend.submit(spec)
    until(lambda: output(backend) == [str(len(TOKEN))] * 2)
    shown = json.dumps([backend.plan(spec), backend.describe("job"), backend.inspect("job")])
    command_lines = [path.read_bytes() for path in readable(Path("/proc").glob("[0-9]*/cmdline"))]
    assert any(b"burnish.launch.local.supervisor" in line for line in command_lines)
    backend.cancel("job")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert TOKEN not in shown
    assert not any(TOKEN.encode() in text for text in command_lines)
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


def readable(paths):
    for path in paths:
        try:
            path.read_bytes()
        except OSError:
            continue
        yield path


def test_logs_are_followed_through_a_restart_until_the_end(backend):
    command = 'for i in 1 2; do echo "$RESTART_ATTEMPT.$i"; sleep 0.1; done; printf end; exit $((1 - RESTART_ATTEMPT))'
    backend.submit(job(command, restarts=1))
    # The log goes on where the first start has left it, in the middle of a line.
    assert output(backend, follow=True) == ["0.1", "0.2", "end1.1", "1.2", "end"]
    assert {line.host for line in backend.logs("job")} == {"main-job-0-0"}


def test_main_only_is_the_first_host_of_the_first_slice(backend):
    backend.submit(two_hosts("echo $BURNISH_PROCESS_ID", num_slices=2))
    assert backend.wait("job", timeout=20) == 0
    assert output(backend, main_only=True, follow=True) == ["0"]
    assert sorted(output(backend)) == ["0", "1", "2", "3"]


def test_output_that_is_no_text_is_shown_all_the_same(backend):
    backend.submit(job(r"printf 'a\xffb\r\n'"))
    assert backend.wait("job", timeout=20) == 0
    assert output(backend) == ["a\ufffdb"]


def test_waiting_ends_after_its_time_and_the_job_goes_on(backend):
    backend.submit(job(ENDLESS))
    with pytest.raises(LaunchError, match="it goes on") as late:
        backend.wait("job", timeout=0.1)
    assert late.value.exit_code == 124
    assert not backend.status("job").state.is_final


def test_what_only_a_cluster_has_is_named(backend):
    spec = job("true", image="img", queue="q", node_constraints={"a": "b"})
    (plan,) = backend.plan(spec)
    assert plan["left_out"] == ["--image", "--queue", "--node-constraint"]
    backend.submit(spec)
    assert backend.wait("job", timeout=20) == 0
    assert backend.describe("job")["events"][0]["text"] == (
        "without effect on this machine: --image, --queue, --node-constraint"
    )


@given(
    st.sampled_from(["2x2", "2x4", "4x4", "4x8"]),
    st.integers(1, 4),
    st.booleans(),
    st.dictionaries(st.sampled_from(["A", "B", "XLA_FLAGS"]), st.text(st.sampled_from("ab= "), max_size=5)),
)
def test_every_process_of_a_plan_has_a_number_and_a_name_of_its_own(topology, slices, pathways, env):
    spec = job(
        "true",
        compute_type="ct6e-standard-4t",
        topology=topology,
        num_slices=slices,
        pathways=PathwaysSpec("gs://bucket/x") if pathways else None,
        env=env,
    )
    (plan,) = LocalBackend().plan(spec)
    hosts = plan["hosts"]
    chips = slices * spec.slice.chips
    assert len(hosts) == (1 if pathways else chips // 4)
    assert sum(host["chips"] for host in hosts) == chips
    assert [int(host["environment"]["BURNISH_PROCESS_ID"]) for host in hosts] == list(range(len(hosts)))
    assert len({host["host"] for host in hosts}) == len(hosts)
    for host in hosts:
        environment = host["environment"]
        assert env.items() <= {**environment, "XLA_FLAGS": env.get("XLA_FLAGS")}.items()
        assert environment["XLA_FLAGS"].endswith(f"--xla_force_host_platform_device_count={host['chips']}")
        assert environment["XLA_FLAGS"].startswith(env.get("XLA_FLAGS", ""))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mounts": (Mount(MountKind.BUCKET, "gs://b", "/data"),)}, "--mount=gs://b:/data"),
        ({"mounts": (Mount(MountKind.HOST, "/nowhere", "/nowhere"),)}, "there is no directory /nowhere"),
        ({"env": {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}}, "--env=XLA_FLAGS"),
        ({"pathways": PathwaysSpec("gs://bucket/x", headless=True), "command": ""}, "--pathways-headless"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_is_made(backend, changes, words):
    spec = JobSpec(**{"name": "job", "compute_type": "v6e-4", "command": "true", **changes})
    for refuse in (backend.plan, backend.submit):
        with pytest.raises(LaunchError) as refused:
            refuse(spec)
        assert words in str(refused.value)
    assert backend.list() == []


def test_a_supervisor_that_does_not_start_leaves_no_job(backend, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match="job job cannot be started: exit code 1"):
        backend.submit(job("true"))
    assert backend.list() == []


def test_a_directory_that_has_gone_is_said(backend, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    (plan,) = backend.plan(job("true"))
    monkeypatch.setattr("burnish.launch.local.backend.make_plan", lambda *_: {**plan, "directory": str(gone / "x")})
    backend.submit(job("true"))
    assert backend.wait("job", timeout=20) == 127
    assert "main-job-0-0 cannot be started" in backend.status("job").reason


def test_what_a_power_cut_leaves_of_the_events_is_shown(backend):
    backend.submit(job("true"))
    assert backend.wait("job", timeout=20) == 0
    with (directory().path / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-')
    assert [event["text"] for event in backend.describe("job")["events"]] == ["running: 1 process", "succeeded"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("status.json", ""),
        ("status.json", "[]"),
        ("status.json", "{}"),
        ("status.json", '{"state": "Odd", "completed": null}'),
        ("status.json", '{"state": "Failed", "completed": null, "exit_codes": null}'),
        ("status.json", None),
        ("plan.json", "[]"),
        ("plan.json", "{}"),
        ("plan.json", '{"hosts": [{}], "grace_seconds": 1, "ttl_seconds": 1}'),
        ("plan.json", '{"hosts": [], "grace_seconds": "x", "ttl_seconds": 1}'),
        ("plan.json", None),
        ("lock", None),
        ("hosts/main-job-0-0", "-1\n"),
    ],
)
def test_a_damaged_job_is_shown_stands_in_nobodys_way_and_can_be_cancelled(backend, file, content):
    backend.submit(job("true"))
    assert backend.wait("job", timeout=20) == 0
    until(lambda: not directory().is_supervised())
    path = directory().path / file
    path.unlink() if content is None else path.write_text(content)
    backend.submit(job("true", name="other"))
    assert backend.wait("other", timeout=20) == 0
    shown = {status.name: status for status in backend.list()}
    assert shown["other"].state is JobState.SUCCEEDED
    if file == "status.json":
        assert shown["job"].state is JobState.FAILED
        assert "status.json: damaged; burnish job cancel job --backend=local" in shown["job"].reason
        with pytest.raises(LaunchError, match=r"status\.json: damaged"):
            backend.describe("job")
    if file == "plan.json":
        for ask in (lambda name: list(backend.logs(name)), backend.inspect):
            with pytest.raises(LaunchError, match=r"plan\.json: damaged; burnish job cancel job --backend=local"):
                ask("job")
    backend.cancel("job")
    assert [status.name for status in backend.list()] == ["other"]


def test_cancelling_a_job_whose_status_was_damaged_ends_its_processes(backend):
    backend.submit(job(ENDLESS))
    until(lambda: directory().running_groups())
    groups = list(directory().running_groups().values())
    (directory().path / "status.json").write_text("{")
    backend.cancel("job")
    assert not any(group.runs for group in groups)


def test_a_lost_job_on_a_full_disk_is_shown_and_cancelled(backend, monkeypatch):
    backend.submit(job(ENDLESS))
    until(lambda: directory().running_groups())
    os.kill(supervisor(), signal.SIGKILL)
    until(lambda: not directory().is_supervised())

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as broken:
        broken.setattr("burnish.launch.local.state.write_whole", full)
        assert [status.state for status in backend.list()] == [JobState.FAILED]
        broken.setattr(JobDirectory, "remove", lambda job: full(job.path, ""))
        with pytest.raises(LaunchError, match="burnish/jobs/job: No space left on device"):
            backend.cancel("job")
    backend.cancel("job")
    assert backend.list() == []


def test_a_job_that_fails_while_it_is_cancelled_is_not_started_again(backend):
    command = f"if [ $JOB_COMPLETION_INDEX = 0 ]; then sleep 0.2; exit 3; fi; trap 'echo end' TERM; {ENDLESS}"
    backend.submit(two_hosts(command, restarts=5, grace_seconds=2))
    until(lambda: "end" in output(backend))
    assert backend.cancel("job").state is JobState.CANCELLED
    assert backend.status("job").restarts == 0


def test_more_processes_than_a_machine_should_run_are_refused(backend):
    with pytest.raises(LaunchError, match=r"--num-slices=65 of 8 hosts .* are 520 processes; .* 512 at most"):
        backend.plan(job("true", compute_type="v6e-32", num_slices=65))


def test_a_job_is_not_submitted_from_a_directory_that_was_deleted(backend, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    with monkeypatch.context() as there:
        there.chdir(gone)
        gone.rmdir()
        with pytest.raises(LaunchError, match="the current directory has been deleted"):
            backend.submit(job("true"))


def test_a_place_that_cannot_be_written_to_is_named(backend, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(LaunchError, match="/proc/nowhere/burnish/jobs: cannot be written: "):
        backend.submit(job("true"))
    assert backend.list() == []


@pytest.mark.parametrize("name", ["absent", "", "..", ".new-1", "a/b"])
def test_a_job_that_is_not_there_is_said(backend, name):
    for call in (backend.status, backend.describe, backend.inspect, backend.cancel, backend.wait):
        with pytest.raises(LaunchError, match="no such job"):
            call(name)
    with pytest.raises(LaunchError, match="no such job"):
        next(backend.logs(name))
