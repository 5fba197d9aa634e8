"""Manifests are what the JobSet CRD, Kubernetes' own schemas and the webhook's rules allow, whatever the flags."""

import json
import os
import re
import subprocess
from copy import deepcopy
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import HealthCheck, given, settings
from schemas import ABSENT, JOBSET_VERSIONS, crds_present, jobset_errors
from strategies import TEXTS, jobs

from burnish.launch.errors import LaunchError
from burnish.launch.gke.backend import GkeBackend
from burnish.launch.gke.manifests import job_set, owner, secret
from burnish.launch.gke.parts import as_written
from burnish.launch.gke.validate import check, problems_of
from burnish.launch.job import JobSpec, PathwaysSpec, parse_mount
from burnish.launch.settings import Settings

needs_crds = pytest.mark.skipif(not crds_present(), reason=ABSENT)
many = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PLAIN = JobSpec(
    name="train",
    command="burnish train-rl",
    compute_type="ct6e-standard-4t",
    topology="4x8",
    image="image",
    num_slices=2,
    timeout_seconds=3600,
    restart_on_exit_codes=(75,),
    mounts=(parse_mount("gs://bucket/data:/data:ro"),),
    secret_env={"HF_TOKEN": "a-secret-value"},
)
PATHWAYS = replace(PLAIN, name="pw", num_slices=1, pathways=PathwaysSpec(gcs_location="gs://bucket/pathways/"))


def manifest_of(spec: JobSpec) -> dict[str, Any]:
    return job_set(spec).manifest()


@needs_crds
@many
@given(jobs())
def test_every_manifest_is_valid_by_the_crds_and_the_rules(spec: JobSpec) -> None:
    manifest = manifest_of(spec)
    for version in JOBSET_VERSIONS:
        assert jobset_errors(manifest, version) == []
    assert list(problems_of(manifest)) == []


@settings(parent=many, max_examples=25)
@given(jobs())
def test_jobs_and_secrets_are_valid_by_kubernetes_own_schemas(spec: JobSpec) -> None:
    for replicated in manifest_of(spec)["spec"]["replicatedJobs"]:
        template = replicated["template"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": template["metadata"], "spec": template["spec"]}
        kubernetes_validate.validate(job, "1.33", strict=True)
    hidden = secret(spec)
    assert (hidden is None) == (not spec.secret_env or not spec.command)
    if hidden is not None:
        owned = hidden.manifest()
        owned["metadata"]["ownerReferences"] = [owner(spec.name, "00000000-0000-0000-0000-000000000000").manifest()]
        for manifest in (hidden.manifest(), owned):
            kubernetes_validate.validate(manifest, "1.33", strict=True)


@many
@given(jobs())
def test_secret_values_are_in_the_secret_alone(spec: JobSpec) -> None:
    manifest = json.dumps(manifest_of(spec))
    plan = json.dumps(GkeBackend(Settings()).plan(spec))
    hidden = secret(spec)
    for name, value in spec.secret_env.items():
        assert value not in manifest
        assert value not in plan
        if spec.command:
            assert f'"{name}"' in manifest
            assert hidden is not None
            assert hidden.manifest()["stringData"][name] == value
            assert value not in repr(hidden)


@settings(deadline=None)
@given(TEXTS | TEXTS.map(lambda text: f"$({text}) $${text} $" + "{X} $$$(X)"))
def test_kubernetes_hands_a_text_on_as_it_was_written(text: str) -> None:
    def expanded(text: str, values: dict[str, str]) -> str:
        """The kubelet's expansion, character by character, as its documentation has it."""
        result, index = "", 0
        while index < len(text):
            if text[index] == "$" and index + 1 < len(text):
                if text[index + 1] == "$":
                    result, index = result + "$", index + 2
                    continue
                close = text.find(")", index + 2)
                if text[index + 1] == "(" and close >= 0:
                    name = text[index + 2 : close]
                    result += values.get(name, f"$({name})")
                    index = close + 1
                    continue
            result, index = result + text[index], index + 1
        return result

    assert expanded(as_written(text), {"X": "replaced", "": "replaced", text: "replaced"}) == text


def test_a_multi_host_slice_asks_for_its_nodes_and_chips() -> None:
    replicated = manifest_of(PLAIN)["spec"]["replicatedJobs"]
    assert [job["name"] for job in replicated] == ["main-job"]
    job = replicated[0]["template"]
    pod = job["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert replicated[0]["replicas"] == 2
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (8, 8)
    assert job["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert pod["metadata"]["annotations"]["cloud.google.com/gke-tpu-slice-topology"] == "4x8"
    assert pod["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x8",
    }
    assert pod["spec"]["tolerations"] == [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (pod["spec"]["hostNetwork"], pod["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert container["resources"] == {"limits": {"google.com/tpu": "4"}}
    names = {variable["name"] for variable in container["env"]}
    assert {"MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"} <= names


def test_what_the_mutating_webhook_would_fill_in_is_written_out() -> None:
    spec = manifest_of(PLAIN)["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "train"}
    assert spec["successPolicy"] == {"operator": "All"}
    assert spec["startupPolicy"] == {"startupPolicyOrder": "AnyOrder"}
    assert [rule["name"] for rule in spec["failurePolicy"]["rules"]] == ["time_limit", "exit_code"]
    assert spec["replicatedJobs"][0]["template"]["spec"]["completionMode"] == "Indexed"


def test_pathways_runs_its_helpers_as_sidecars_that_know_the_head() -> None:
    manifest = manifest_of(PATHWAYS)
    spec = manifest["spec"]
    head, worker = spec["replicatedJobs"]
    assert (head["name"], worker["name"]) == ("pathways-head", "worker")
    assert spec["coordinator"] == {"replicatedJob": "pathways-head", "jobIndex": 0, "podIndex": 0}
    assert spec["startupPolicy"] == {"startupPolicyOrder": "InOrder"}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["pathways-head"]}
    assert spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    pod = head["template"]["spec"]["template"]["spec"]
    assert {c["name"]: c["restartPolicy"] for c in pod["initContainers"]} == {
        "pathways-rm": "Always",
        "pathways-proxy": "Always",
    }
    assert "nodeSelector" not in pod
    manager = next(c for c in pod["initContainers"] if c["name"] == "pathways-rm")
    assert "--instance_type=tpuv6e:4x8" in manager["args"]
    workload = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert workload["JAX_BACKEND_TARGET"] == "grpc://$(PATHWAYS_HEAD):29000"
    assert worker["template"]["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    for container in [*pod["initContainers"], *worker["template"]["spec"]["template"]["spec"]["containers"]]:
        named = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert named <= {variable["name"] for variable in container["env"]}


def test_a_cpu_job_asks_for_its_machine_type_and_no_chips() -> None:
    spec = JobSpec(name="convert", command="burnish convert", compute_type="e2-standard-8", image="image")
    pod = manifest_of(spec)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "e2-standard-8"}
    assert "tolerations" not in pod["spec"]
    assert "hostNetwork" not in pod["spec"]
    assert "resources" not in pod["spec"]["containers"][0]


def test_the_queue_is_a_label_only_where_one_is_given() -> None:
    assert "kueue.x-k8s.io/queue-name" not in manifest_of(PLAIN)["metadata"]["labels"]
    queued = manifest_of(replace(PLAIN, queue="slices"))
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "slices"


def test_an_own_variable_wins_over_the_launchers() -> None:
    env = {"MEGASCALE_NUM_SLICES": "7"}
    manifest = manifest_of(replace(PLAIN, env=env))
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    values = [variable for variable in container["env"] if variable["name"] == "MEGASCALE_NUM_SLICES"]
    assert values == [{"name": "MEGASCALE_NUM_SLICES", "value": "7"}]


def test_a_job_without_an_image_is_refused() -> None:
    with pytest.raises(LaunchError, match="--image is required on GKE"):
        job_set(replace(PLAIN, image=None))


def test_what_only_a_command_could_use_is_refused_without_one() -> None:
    headless = PathwaysSpec(gcs_location="gs://bucket/pathways/", headless=True)
    with pytest.raises(LaunchError, match="--mount: with --pathways-headless"):
        job_set(replace(PATHWAYS, command="", pathways=headless))


JOB = ("spec", "replicatedJobs", 0)
SPEC = (*JOB, "template", "spec")
POD = (*SPEC, "template", "spec")
CONTAINER = (*POD, "containers", 0)

# What is broken, the path to it and the value, and what the error has to name: the field and the flag.
BROKEN = [
    (PLAIN, ("metadata", "name"), "Train", "metadata.name", "--name"),
    (PLAIN, ("metadata", "name"), "a" * 45, "spec.replicatedJobs[0].name", "--name"),
    (PLAIN, ("metadata", "labels", "kueue.x-k8s.io/queue-name"), "q" * 64, "metadata.labels", "--queue"),
    (PLAIN, (*JOB, "name"), "Main", "spec.replicatedJobs[0].name", "--name"),
    (PATHWAYS, (*JOB, "name"), "worker", "spec.replicatedJobs", "--name"),
    (PLAIN, (*JOB, "replicas"), 0, "spec.replicatedJobs[0].replicas", "--num-slices"),
    (PLAIN, (*SPEC, "parallelism"), 4, "spec.replicatedJobs[0].template.spec.parallelism", "--topology"),
    (PLAIN, (*SPEC, "completionMode"), "NonIndexed", "template.spec.completionMode", "--topology"),
    (PLAIN, (*POD, "restartPolicy"), "OnFailure", "template.spec.podFailurePolicy", "--restart-on-exit-codes"),
    (
        PLAIN,
        (*SPEC, "podFailurePolicy", "rules", 1, "onExitCodes", "containerName"),
        "other",
        "podFailurePolicy.rules[1].onExitCodes.containerName",
        "--restart-on-exit-codes",
    ),
    (
        PLAIN,
        (*SPEC, "podFailurePolicy", "rules", 1, "onExitCodes", "values"),
        [3, 1],
        "podFailurePolicy.rules[1].onExitCodes.values",
        "--restart-on-exit-codes",
    ),
    (PLAIN, (*POD, "nodeSelector", "pool"), "no label!", "template.spec.nodeSelector.pool", "--node-constraint"),
    (PLAIN, (*CONTAINER, "image"), "", "containers[0].image", "--image"),
    (PLAIN, (*CONTAINER, "env", 0, "name"), "1=2", "containers[0].env", "--env"),
    (PLAIN, (*CONTAINER, "env", 0, "name"), "JOB_INDEX", "containers[0].env", "--env"),
    (PLAIN, (*CONTAINER, "env", 0, "value"), "$(LATER)", "containers[0].env", "--env"),
    (PLAIN, (*CONTAINER, "volumeMounts", 0, "name"), "none", "containers[0].volumeMounts[0].name", "--mount"),
    (PLAIN, (*CONTAINER, "volumeMounts", 0, "mountPath"), "data", "volumeMounts[0].mountPath", "--mount"),
    (PLAIN, (*CONTAINER, "volumeMounts", 0, "mountPath"), "/dev/shm", "containers[0].volumeMounts", "--mount"),
    (PLAIN, (*POD, "volumes", 0, "name"), "shared-memory", "template.spec.volumes", "--mount"),
    (PATHWAYS, (*POD, "initContainers", 1, "env", 0, "name"), "OTHER", "initContainers[1].args[1]", "--pathways-proxy"),
    (PATHWAYS, (*POD, "initContainers", 0, "name"), "pathways-proxy", "template.spec.containers", "--pathways"),
    (PATHWAYS, (*JOB, "dependsOn"), [{"name": "worker", "status": "Ready"}], "spec.startupPolicy", "--pathways"),
    (PATHWAYS, (*JOB, "dependsOn"), [{"name": "none", "status": "Ready"}], "replicatedJobs[0].dependsOn", "--pathways"),
    (PATHWAYS, ("spec", "successPolicy", "targetReplicatedJobs"), ["none"], "spec.successPolicy", "--pathways"),
    (PLAIN, ("spec", "failurePolicy", "maxRestarts"), -1, "spec.failurePolicy.maxRestarts", "--restarts"),
    (
        PLAIN,
        ("spec", "failurePolicy", "rules", 0, "onJobFailureReasons"),
        ["Whim"],
        "spec.failurePolicy.rules[0].onJobFailureReasons",
        "--restart-on-exit-codes",
    ),
    (PLAIN, ("spec", "failurePolicy", "rules", 0, "name"), "exit_code", "spec.failurePolicy.rules", "--restart"),
    (PLAIN, ("spec", "failurePolicy", "rules", 0, "name"), "a-b", "spec.failurePolicy.rules[0].name", "--restart"),
    (
        PLAIN,
        ("spec", "failurePolicy", "rules", 0, "targetReplicatedJobs"),
        ["none"],
        "spec.failurePolicy.rules[0].targetReplicatedJobs",
        "--pathways",
    ),
    (PATHWAYS, ("spec", "coordinator", "replicatedJob"), "none", "spec.coordinator.replicatedJob", "--pathways"),
    (PATHWAYS, ("spec", "coordinator", "jobIndex"), 1, "spec.coordinator.jobIndex", "--pathways"),
    (PATHWAYS, ("spec", "coordinator", "podIndex"), 1, "spec.coordinator.podIndex", "--pathways"),
    (PATHWAYS, ("spec", "network", "subdomain"), "s" * 50, "spec.coordinator", "--name"),
    (PLAIN, ("spec", "network", "subdomain"), "a.b", "spec.network.subdomain", "--name"),
]


@pytest.mark.parametrize(("spec", "path", "value", "field", "flag"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_manifest_is_refused_with_field_and_flag(
    spec: JobSpec, path: tuple[Any, ...], value: Any, field: str, flag: str
) -> None:
    manifest = deepcopy(manifest_of(spec))
    *way, last = path
    part: Any = manifest
    for step in way:
        part = part[step]
    part[last] = value
    found = [(problem.path, problem.flag) for problem in problems_of(manifest)]
    assert any(field in path and flag in named for path, named in found), found
    with pytest.raises(LaunchError, match="the cluster would refuse this job"):
        check(manifest)


def test_the_longest_name_still_fits_with_the_largest_slices() -> None:
    check(manifest_of(replace(PLAIN, name="n" * 28, num_slices=99)))
    check(manifest_of(replace(PATHWAYS, name="n" * 22)))


def test_a_container_says_nothing_of_its_own_and_ends_as_the_command_does() -> None:
    container = manifest_of(PLAIN)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    *start, _ = (word.replace("$$", "$") for word in container["command"])
    environment = {"PATH": os.environ["PATH"], "JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "2"}
    for command, said, code in (
        ("echo out; echo err >&2; echo $BURNISH_PROCESS_ID", "out\nerr\n10\n", 0),
        ("exit 7", "", 7),
        ("kill -9 $$", "", 137),
        ("exec 3>&1; ls /proc/self/fd | wc -l >&3", "5\n", 0),
    ):
        for _ in range(5):  # a command may end before or after its shell looks at it
            done = subprocess.run(
                [*start, command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert (done.stdout, done.returncode) == (said, code)
