"""Jobs through the official client on an emulated API server that runs real processes as pods."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulator import Cluster, Server
from kubernetes import client

from burnish.launch.errors import LaunchError
from burnish.launch.gke.api import Api, Retry
from burnish.launch.gke.backend import GkeBackend
from burnish.launch.job import Event, JobSpec, JobState, LogLine, PathwaysSpec
from burnish.launch.settings import Settings

SECRET = "planted-secret-value"
GATE = "while [ ! -e {gate} ]; do sleep 0.02; done; "


def job(command: str, **more: Any) -> JobSpec:
    """One host without chips, unless asked otherwise."""
    defaults: dict[str, Any] = {"name": "job", "compute_type": "e2-standard-2", "image": "image", "restarts": 0}
    return JobSpec(command=command, **(defaults | more))


def slice_job(command: str, **more: Any) -> JobSpec:
    """Two hosts of four chips."""
    return job(command, compute_type="ct6e-standard-4t", topology="2x4", **more)


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come to pass")


class Waiting:
    """A wait in a thread, with what it says."""

    def __init__(self, backend: GkeBackend, name: str = "job", **more: Any) -> None:
        self.events: list[str] = []
        self.code: int | None = None
        self.error: LaunchError | None = None
        self._thread = threading.Thread(target=self._wait, args=(backend, name, more), daemon=True)
        self._thread.start()

    def _wait(self, backend: GkeBackend, name: str, more: dict[str, Any]) -> None:
        def said(event: Event) -> None:
            self.events.append(event.text)

        try:
            self.code = backend.wait(name, on_event=said, **more)
        except LaunchError as error:
            self.error = error

    def says(self, part: str) -> bool:
        return any(part in text for text in self.events)

    def end(self) -> int | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.code


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def asking(backend: GkeBackend) -> tuple[Callable[[str], Any], ...]:
    return backend.status, backend.describe, backend.inspect, backend.wait, backend.cancel, backend.logs


# The whole way.


def test_every_host_of_every_slice_knows_its_place(backend: GkeBackend) -> None:
    command = "echo $BURNISH_PROCESS_ID of $BURNISH_NUM_PROCESSES, slice $MEGASCALE_SLICE_ID of $MEGASCALE_NUM_SLICES"
    backend.submit(slice_job(command, num_slices=2))
    assert backend.wait("job") == 0
    assert list(backend.logs("job")) == [
        LogLine("main-job-0-0", "0 of 4, slice 0 of 2"),
        LogLine("main-job-0-1", "1 of 4, slice 0 of 2"),
        LogLine("main-job-1-0", "2 of 4, slice 1 of 2"),
        LogLine("main-job-1-1", "3 of 4, slice 1 of 2"),
    ]
    status = backend.status("job")
    assert (status.state, status.exit_code, status.restarts) == (JobState.SUCCEEDED, 0, 0)
    assert status.completed is not None
    assert status.completed >= status.created


def test_the_command_is_run_as_it_was_written(backend: GkeBackend) -> None:
    command = """X=1; echo "$X" '$(X)' $((1 + 1)) "$(echo sub)"; echo $$ | grep -c '^[0-9]*$'; echo '$$'"""
    backend.submit(job(command, env={"X": "$(JOBSET_NAME) $$"}))
    assert backend.wait("job") == 0
    assert texts(list(backend.logs("job"))) == ["1 $(X) 2 sub", "1", "$$"]


def test_jobs_are_listed_oldest_first_and_only_burnishs_own(backend: GkeBackend, cluster: Cluster) -> None:
    backend.submit(job("true", name="first"))
    backend.submit(job("exit 3", name="second"))
    foreign = cluster.store.get("jobsets", "default", "first")
    foreign["metadata"] = {"name": "foreign", "labels": {}}
    cluster.store.create("jobsets", "default", foreign)
    backend.wait("first")
    backend.wait("second")
    listed = {status.name: (status.state, status.exit_code, status.reason) for status in backend.list()}
    assert list(listed) == ["first", "second"]
    assert listed["first"] == (JobState.SUCCEEDED, 0, "")
    assert listed["second"] == (JobState.FAILED, 3, "main-job-0-0 ended with exit code 3")


def test_a_name_is_taken_once(backend: GkeBackend) -> None:
    backend.submit(job("sleep 30"))
    with pytest.raises(LaunchError, match="--name=job: there is a job of that name already"):
        backend.submit(job("true"))
    assert backend.status("job").state in (JobState.PENDING, JobState.RUNNING)


def test_a_job_that_is_not_there_is_an_error_that_names_the_list(backend: GkeBackend) -> None:
    for ask in asking(backend):
        with pytest.raises(LaunchError, match=r"there is no job nobody in namespace default.*burnish job list"):
            ask("nobody")


def test_what_burnish_has_not_made_is_left_alone(backend: GkeBackend, cluster: Cluster) -> None:
    foreign = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "metadata": {"name": "foreign"}, "spec": {"suspend": True}}
    cluster.store.create("jobsets", "default", foreign)
    for ask in (*asking(backend), lambda name: backend.submit(job("true", name=name))):
        with pytest.raises(LaunchError, match="there is a JobSet of that name which burnish has not made"):
            ask("foreign")
    assert cluster.store.get("jobsets", "default", "foreign")


def test_a_secret_is_in_the_secret_and_in_the_process_alone(backend: GkeBackend, cluster: Cluster) -> None:
    backend.submit(job('test "$TOKEN" = ' + SECRET[:7] + '"-secret-value" && sleep 30', secret_env={"TOKEN": SECRET}))
    until(lambda: backend.status("job").state is JobState.RUNNING)
    commands = [Path(f"/proc/{process.pid}/cmdline").read_text() for process in cluster.processes()]
    shown = [
        json.dumps(cluster.store.get("jobsets", "default", "job")),
        json.dumps(cluster.store.list("pods") + cluster.store.list("jobs") + cluster.store.list("events")),
        json.dumps(backend.describe("job")),
        json.dumps(backend.inspect("job")),
        repr(backend.list()),
        *commands,
        *cluster.requests,
    ]
    assert commands
    assert not [text for text in shown if SECRET in text]
    held = cluster.store.get("secrets", "default", "job-env")
    owner = cluster.store.get("jobsets", "default", "job")["metadata"]
    assert held["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]
    backend.cancel("job")
    assert cluster.store.list("secrets") == []


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("POST .*/secrets", "create Secret job-env: not allowed"),
        ("POST .*/jobsets", "create JobSet job: not allowed"),
        ("PATCH .*/secrets/job-env", "change Secret job-env: not allowed"),
    ],
)
def test_of_a_submission_that_is_refused_halfway_nothing_stays(
    backend: GkeBackend, cluster: Cluster, request_: str, words: str
) -> None:
    cluster.fail(request_, 403, message='User "u" cannot do that')
    with pytest.raises(LaunchError, match=rf'{words}: .*User "u".*roles/container.developer'):
        backend.submit(job("true", secret_env={"TOKEN": SECRET}))
    assert cluster.store.list("jobsets") == []
    assert cluster.store.list("secrets") == []


def test_a_client_that_dies_halfway_leaves_no_job_that_waits_for_its_secret(
    backend: GkeBackend, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_create", killed)
        patch.setattr(backend, "_take_back", lambda *_: None)
        with pytest.raises(KilledError):
            backend.submit(job("true", secret_env={"TOKEN": "old"}))
    assert cluster.store.list("jobsets") == []
    assert cluster.store.list("secrets") != []
    backend.submit(job('test "$TOKEN" = new', secret_env={"TOKEN": "new"}))
    assert backend.wait("job") == 0


def test_a_secret_of_somebody_elses_is_left_alone(backend: GkeBackend, cluster: Cluster) -> None:
    foreign = {"apiVersion": "v1", "metadata": {"name": "job-env"}, "data": {}}
    cluster.store.create("secrets", "default", foreign)
    with pytest.raises(LaunchError, match="Secret job-env is there already and belongs to no job"):
        backend.submit(job("true", secret_env={"TOKEN": SECRET}))
    assert cluster.store.get("secrets", "default", "job-env")["data"] == {}
    assert cluster.store.list("jobsets") == []


def test_a_name_with_a_secret_is_taken_once_and_free_again_afterwards(backend: GkeBackend, cluster: Cluster) -> None:
    spec = job("sleep 30", secret_env={"TOKEN": SECRET})
    backend.submit(spec)
    with pytest.raises(LaunchError, match="--name=job: there is a job of that name already"):
        backend.submit(spec)
    assert len(cluster.store.list("secrets")) == 1
    backend.cancel("job")
    backend.submit(spec)
    assert len(cluster.store.list("secrets")) == 1


# How jobs end.


def test_the_exit_code_is_the_containers(backend: GkeBackend, cluster: Cluster) -> None:
    backend.submit(slice_job("[ $JOB_COMPLETION_INDEX = 1 ] || sleep 30; exit 41"))
    waiting = Waiting(backend)
    assert waiting.end() == 41
    assert waiting.says("main-job-0-1 ended with exit code 41")
    assert backend.status("job").reason == "main-job-0-1 ended with exit code 41"


def test_a_failed_job_is_restarted_as_often_as_asked(backend: GkeBackend, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    backend.submit(job(GATE.format(gate=gate) + "exit $((7 + RESTART_ATTEMPT))", restarts=2))
    waiting = Waiting(backend)
    until(lambda: waiting.says("main-job-0-0 runs"))
    gate.touch()
    assert waiting.end() == 9
    assert [text for text in waiting.events if text.startswith("restart ") or "exit code" in text] == [
        "main-job-0-0 ended with exit code 7",
        "restart 1 of 2",
        "main-job-0-0 ended with exit code 8 (attempt 2)",
        "restart 2 of 2",
        "main-job-0-0 ended with exit code 9 (attempt 3)",
    ]
    assert backend.status("job").restarts == 2


def test_only_the_named_exit_codes_restart(backend: GkeBackend) -> None:
    command = "[ $RESTART_ATTEMPT = 0 ] && exit 75; exit 76"
    backend.submit(job(command, restarts=5, restart_on_exit_codes=(75,)))
    assert backend.wait("job") == 76
    assert backend.status("job").restarts == 1


def test_out_of_memory_is_named_and_137(backend: GkeBackend, cluster: Cluster) -> None:
    backend.submit(slice_job("sleep 30"))
    waiting = Waiting(backend)
    until(lambda: waiting.says("all 2 hosts run"))
    victim = next(p for p in cluster.pods_of("job") if p["metadata"]["name"].startswith("job-main-job-0-1"))
    cluster.run_out_of_memory("default", victim["metadata"]["name"])
    assert waiting.end() == 137
    assert waiting.says("main-job-0-1 was killed: out of memory")


def test_an_evicted_host_restarts_the_job_whatever_the_exit_codes(backend: GkeBackend, cluster: Cluster) -> None:
    backend.submit(job("[ $RESTART_ATTEMPT = 1 ] || sleep 30", restarts=1, restart_on_exit_codes=(75,)))
    waiting = Waiting(backend)
    until(lambda: waiting.says("main-job-0-0 runs"))
    cluster.evict("default", cluster.pods_of("job")[0]["metadata"]["name"])
    assert waiting.end() == 0
    assert waiting.says("main-job-0-0 was evicted from its node: The node was low on resource: memory")
    assert waiting.says("restart 1 of 1")


def test_a_time_limit_ends_the_job_without_a_restart(backend: GkeBackend) -> None:
    backend.submit(job("sleep 30", restarts=3, timeout_seconds=1))
    assert backend.wait("job") == 124
    status = backend.status("job")
    assert (status.state, status.restarts) == (JobState.FAILED, 0)
    assert status.reason == "ran into the time limit of 1 s (--timeout)"


def test_cancel_sends_sigterm_to_all_that_the_command_started(backend: GkeBackend, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    program = f"trap 'echo done > {saved}; exit 42' TERM; echo up; while true; do sleep 0.05; done"
    backend.submit(job(f'cd / && bash -c "{program}"', grace_seconds=20))
    waiting = Waiting(backend)
    until(lambda: texts(list(backend.logs("job"))) == ["up"])
    status = backend.cancel("job")
    assert (status.state, status.name) == (JobState.CANCELLED, "job")
    assert until(saved.exists)
    assert waiting.end() == 143
    with pytest.raises(LaunchError, match="there is no job job"):
        GkeBackend(Settings(), backend._api).status("job")


def test_a_wait_that_takes_too_long_leaves_the_job_alone(backend: GkeBackend) -> None:
    backend.submit(job("sleep 30"))
    with pytest.raises(LaunchError, match=r"job job has not ended within 0.2 s; it goes on") as caught:
        backend.wait("job", timeout=0.2)
    assert caught.value.exit_code == 124
    assert not backend.status("job").state.is_final


def test_a_job_that_is_forgotten_at_once_has_still_succeeded(backend: GkeBackend, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    backend.submit(job(GATE.format(gate=gate), ttl_seconds=0))
    waiting = Waiting(backend)
    until(lambda: waiting.says("main-job-0-0 runs"))
    gate.touch()
    assert waiting.end() == 0
    assert backend.status("job").state is JobState.SUCCEEDED


# What waiting says.


def test_waiting_says_why_no_node_is_found_and_what_would_help(backend: GkeBackend, cluster: Cluster) -> None:
    cluster.unschedulable = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
    backend.submit(slice_job("true"))
    waiting = Waiting(backend)
    until(lambda: waiting.says("cannot be placed"))
    assert backend.status("job").state is JobState.PENDING
    assert "affinity" in backend.status("job").reason
    cluster.unschedulable = ""
    assert waiting.end() == 0
    said = next(text for text in waiting.events if "cannot be placed" in text)
    assert "2 hosts (main-job-0-0, …)" in said
    assert "it needs a free slice 2x4 of tpu-v6e-slice; `burnish cluster describe`" in said


def test_a_head_that_is_too_large_says_which_node_it_needs(backend: GkeBackend, cluster: Cluster) -> None:
    cluster.unschedulable = "0/1 nodes are available: 1 Insufficient cpu."
    backend.submit(slice_job("true", pathways=PathwaysSpec(gcs_location="gs://bucket/pathways/")))
    waiting = Waiting(backend)
    until(lambda: waiting.says("pathways-head-0-0 cannot be placed"))
    assert waiting.says("8 CPUs and 32Gi, and 16 CPUs and 100Gi free")
    assert waiting.says("--pathways-proxy-cpu")
    backend.cancel("job")
    assert waiting.end() == 143


def test_waiting_says_that_an_image_cannot_be_pulled(backend: GkeBackend, cluster: Cluster) -> None:
    cluster.broken_images = {"image"}
    backend.submit(job("true"))
    waiting = Waiting(backend)
    until(lambda: waiting.says("ImagePullBackOff"))
    assert waiting.says("main-job-0-0 does not start: container workload-container: ImagePullBackOff, image image")
    cluster.broken_images = set()
    assert waiting.end() == 0


def test_waiting_tells_of_the_queue(backend: GkeBackend, cluster: Cluster) -> None:
    cluster.kueue = True
    backend.submit(slice_job("true", name="other", queue="slices"))
    until(lambda: cluster.store.list("workloads"))
    backend.submit(slice_job("sleep 0.5", queue="slices"))
    waiting = Waiting(backend)
    until(lambda: waiting.says("waits in queue slices: insufficient unused quota for google.com/tpu, 8 more needed"))
    until(lambda: waiting.says("number 2 of 2 waiting in queue slices"))
    assert backend.status("job").state is JobState.SUSPENDED
    assert backend.status("job").reason == "waits in queue slices"
    assert "waits in queue slices: insufficient" in json.dumps(backend.inspect("job")["findings"])
    cluster.admit("default", "job")
    assert waiting.end() == 0
    assert waiting.says("admitted by queue slices")


def test_a_queue_works_without_a_view_of_kueues_objects(backend: GkeBackend, cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    cluster.missing_kinds = {"workloads"}
    backend.submit(job(GATE.format(gate=gate), queue="slices"))
    waiting = Waiting(backend)
    until(lambda: waiting.says("list workloads: the cluster does not know such objects"))
    gate.touch()
    assert waiting.end() == 0


# Faults of the server.


def test_waiting_survives_cut_watches_forgotten_versions_and_a_busy_server(
    backend: GkeBackend, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    backend.submit(job(GATE.format(gate=gate) + "exit 5"))
    waiting = Waiting(backend)
    until(lambda: waiting.says("main-job-0-0 runs"))
    cluster.cut_streams(4)
    cluster.fail("GET .*watch=", 500, times=2)
    cluster.fail("GET .*watch=", 429, times=1, retry_after=0)
    cluster.store.forget_history()
    pod = cluster.pods_of("job")[0]
    for number in range(6):  # something for the watches to break at
        cluster.event("default", pod, "Normal", "Noise", f"{number}")
        time.sleep(0.05)
    assert [fault.seen for fault in cluster.faults] == [2, 1]
    assert cluster.stream_cuts == 0
    gate.touch()
    assert waiting.end() == 5
    assert waiting.error is None


def test_waiting_survives_a_server_that_is_away_for_a_while(
    backend: GkeBackend, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    backend.submit(job(GATE.format(gate=gate)))
    waiting = Waiting(backend)
    until(lambda: waiting.says("main-job-0-0 runs"))
    away = cluster.fail("GET", 503, times=10**6)
    cluster.cut_streams(4)
    cluster.event("default", cluster.pods_of("job")[0], "Normal", "Noise", "")
    until(lambda: waiting.says("the API server does not answer, trying on: the server answers 503"))
    gate.touch()
    away.times = 0
    assert waiting.end() == 0


def test_events_that_may_not_be_seen_are_named_and_left_out(
    backend: GkeBackend, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    cluster.fail("GET .*/events", 403, times=100, message="events is forbidden")
    backend.submit(job(GATE.format(gate=gate)))
    waiting = Waiting(backend)
    until(lambda: waiting.says("list events: not allowed: events is forbidden"))
    gate.touch()
    assert waiting.end() == 0
    assert backend.describe("job")["events"] == []
    assert "events is forbidden" in backend.inspect("job")["not_shown"][0]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_submit_is_tried_again_where_the_server_is_busy(backend: GkeBackend, cluster: Cluster, code: int) -> None:
    fault = cluster.fail("POST .*/jobsets", code, times=3)
    backend.submit(job("true"))
    assert fault.seen == 3
    assert backend.wait("job") == 0


def test_a_submit_whose_answer_was_lost_is_not_a_duplicate(backend: GkeBackend, cluster: Cluster) -> None:
    cluster.fail("POST .*/jobsets", 500, after=True)
    cluster.fail("POST .*/secrets", 500, after=True)
    backend.submit(job("true", secret_env={"TOKEN": SECRET}))
    assert [request.split("?")[0][-7:] for request in cluster.requests if "POST" in request].count("jobsets") == 2
    assert backend.wait("job") == 0


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        (403, 'User "u" cannot create resource "jobsets"', 'not allowed: User "u".*roles/container.developer'),
        (401, "Unauthorized", "does not accept the credentials.*gcloud auth application-default login"),
        (422, "spec.replicatedJobs: Required value", "create JobSet job: spec.replicatedJobs: Required value"),
        (500, "etcd is gone", "the server answers 500: etcd is gone; tried 4 times"),
    ],
)
def test_a_refusal_says_what_would_mend_it(
    backend: GkeBackend, cluster: Cluster, code: int, message: str, words: str
) -> None:
    cluster.fail("POST .*/jobsets", code, times=10, message=message)
    with pytest.raises(LaunchError, match=words):
        backend.submit(job("true"))
    assert cluster.store.list("jobsets") == []


def test_a_cluster_without_jobset_is_named_as_such(backend: GkeBackend, cluster: Cluster) -> None:
    cluster.missing_kinds = {"jobsets"}
    with pytest.raises(LaunchError, match="`burnish cluster create` installs JobSet"):
        backend.submit(job("true"))


def test_a_namespace_that_is_not_there_is_named(server: Server, api: Api) -> None:
    elsewhere = Api(client.Configuration(host=server.url), "elsewhere", api.retry)
    with pytest.raises(LaunchError, match=r'namespaces "elsewhere" not found; make it, or.*config set namespace'):
        GkeBackend(Settings(), elsewhere).submit(job("true"))


def test_an_unreachable_server_is_named_with_the_likely_cause() -> None:
    nowhere = Api(client.Configuration(host="http://127.0.0.1:9", retries=False), "default", Retry(2, 0.01, 0.01))
    with pytest.raises(LaunchError, match=r"list jobsets: http://127.0.0.1:9 cannot be reached.*--authorized-cidr"):
        GkeBackend(Settings(), nowhere).list()


# Logs.


def test_following_shows_each_line_once_across_cuts_and_restarts(
    backend: GkeBackend, cluster: Cluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"  # a pod's log goes with it: the first attempt ends when its last line was read
    command = "for i in $(seq 30); do echo $RESTART_ATTEMPT-$i; sleep 0.01; done; "
    backend.submit(job(command + GATE.format(gate=gate) + "[ $RESTART_ATTEMPT = 1 ] || exit 1", restarts=1))
    cluster.cut_streams(8)
    lines = []
    for line in backend.logs("job", follow=True):
        lines.append(line)
        if line.text == "0-30":
            gate.touch()
    assert texts(lines) == [f"{attempt}-{number}" for attempt in (0, 1) for number in range(1, 31)]
    assert cluster.stream_cuts == 0


def test_following_several_hosts_names_each(backend: GkeBackend) -> None:
    backend.submit(slice_job("echo a $JOB_COMPLETION_INDEX; sleep 0.3; echo b $JOB_COMPLETION_INDEX"))
    lines = list(backend.logs("job", follow=True))
    for index in (0, 1):
        assert texts([line for line in lines if line.host == f"main-job-0-{index}"]) == [f"a {index}", f"b {index}"]
    assert len(lines) == 4


def test_main_only_is_the_first_host_of_the_first_slice(backend: GkeBackend) -> None:
    backend.submit(slice_job("echo $BURNISH_PROCESS_ID", num_slices=2))
    assert backend.wait("job") == 0
    assert list(backend.logs("job", main_only=True)) == [LogLine("main-job-0-0", "0")]
    assert list(backend.logs("job", main_only=True, follow=True)) == [LogLine("main-job-0-0", "0")]


def test_the_end_of_a_log_without_a_line_end_is_shown(backend: GkeBackend) -> None:
    backend.submit(job("echo whole; printf part"))
    assert backend.wait("job") == 0
    assert texts(list(backend.logs("job"))) == ["whole", "part"]


# Pathways.


def test_a_pathways_job_is_over_when_its_head_is(backend: GkeBackend, cluster: Cluster) -> None:
    pathways = PathwaysSpec(gcs_location="gs://bucket/pathways/", worker_env={"LEVEL": "3"})
    cluster.entrypoints[pathways.worker_image] = ["/bin/sh", "-c", 'echo "$@" level $LEVEL; exec sleep 30', "server"]
    backend.submit(slice_job("echo $JAX_PLATFORMS at $JAX_BACKEND_TARGET; sleep 1.5", name="pw", pathways=pathways))
    waiting = Waiting(backend, "pw")
    worker = until(lambda: [pod for pod in cluster.pods_of("pw") if "worker-0-1" in pod["metadata"]["name"]])[0]
    key = ("default", worker["metadata"]["name"], "pathways-worker")
    line = until(lambda: cluster.logs[key].lines if key in cluster.logs else [])[0][1]
    assert line == (
        "--server_port=29005 --resource_manager_address=127.0.0.1:29001 "
        "--gcs_scratch_location=gs://bucket/pathways/ level 3"
    )
    cluster.run_out_of_memory("default", worker["metadata"]["name"])
    assert waiting.end() == 0
    assert waiting.says("worker-0-1 was restarted in its place (1)")
    assert list(backend.logs("pw", main_only=True)) == [LogLine("pathways-head-0-0", "proxy at grpc://127.0.0.1:29000")]
    until(lambda: not cluster.processes())


# Description and diagnosis.


def test_a_diagnosis_names_missing_nodes_and_the_state_of_each_host(backend: GkeBackend, cluster: Cluster) -> None:
    labels = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-nodepool": "slice-0",
    }
    cluster.add_node("tpu-0", labels)
    cluster.unschedulable = "0/1 nodes are available: 1 Insufficient google.com/tpu."
    backend.submit(slice_job("true"))
    until(lambda: backend.status("job").reason)
    found = backend.inspect("job")
    json.dumps(found)
    kind = "cloud.google.com/gke-tpu-accelerator=tpu-v6e-slice, cloud.google.com/gke-tpu-topology=2x4"
    assert f"main-job needs 2 nodes with {kind}; 1 are there and ready" in found["findings"]
    assert any("cannot be placed" in text for text in found["findings"])
    assert [(node["name"], node["ready"], node["pool"]) for node in found["nodes"]] == [("tpu-0", True, "slice-0")]
    assert [host["host"] for host in found["hosts"]] == ["main-job-0-0", "main-job-0-1"]
    assert all("Insufficient google.com/tpu" in host["reason"] for host in found["hosts"])
    assert found["manifest"]["spec"]["replicatedJobs"][0]["name"] == "main-job"
    described = backend.describe("job")
    assert described["state"] == "Pending"
    assert any("FailedScheduling" in event["text"] for event in described["events"])


def test_events_of_an_earlier_job_of_that_name_are_not_told(backend: GkeBackend, cluster: Cluster) -> None:
    backend.submit(job("sleep 30"))
    pod = until(lambda: cluster.pods_of("job"))[0]
    cluster.event("default", pod, "Warning", "FailedMount", "MountVolume.SetUp failed: no such bucket")
    cluster.event("default", pod, "Warning", "FailedMount", "of long ago")
    for event in cluster.store.list("events"):
        if event["message"] == "of long ago":
            name = event["metadata"]["name"]
            cluster.store.update("events", "default", name, lambda e: e.update(lastTimestamp="2020-01-01T00:00:00Z"))
    waiting = Waiting(backend)
    until(lambda: waiting.says("FailedMount: MountVolume.SetUp failed: no such bucket"))
    assert not waiting.says("of long ago")
    backend.cancel("job")
    waiting.end()


def test_a_plan_needs_no_cluster_and_is_what_is_sent(backend: GkeBackend, cluster: Cluster) -> None:
    spec = replace(job("true"), secret_env={"TOKEN": SECRET})
    manifest, hidden = GkeBackend(Settings(cluster="nowhere")).plan(spec)
    assert hidden["stringData"] == {"TOKEN": "<not shown>"}
    backend.submit(spec)
    sent = cluster.store.get("jobsets", "default", "job")
    assert sent["spec"] == manifest["spec"]
    assert sent["metadata"]["labels"] == manifest["metadata"]["labels"]


def test_a_job_of_the_same_name_that_came_after_is_another_one(backend: GkeBackend, cluster: Cluster) -> None:
    backend.submit(job("trap '' TERM; echo old; sleep 30", grace_seconds=2))
    waiting = Waiting(backend)
    until(lambda: waiting.says("main-job-0-0 runs"))
    old = backend._jobset("job")
    cluster.stream_cuts = 3
    backend.cancel("job")
    backend.submit(job("echo new; sleep 0.3; exit 4"))
    assert waiting.end() == 143
    assert backend.wait("job") == 4
    assert texts(list(backend.logs("job"))) == ["new"]
    assert backend._pods(old) == []
