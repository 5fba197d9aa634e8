"""What the JobSet webhook and the CRD's CEL rules refuse, checked on the manifest before anything is sent.

The typed models of objects rule out misspelt and missing keys; what is here spans several of them: names that have to
fit together within 63 characters, references to replicated jobs, secrets and variables, policies that exclude each
other. Rules on changing a JobSet are left out, since burnish never changes one.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from burnish.launch.errors import LaunchError

MAX_LABEL = 63
POD_SUFFIX = 6  # a pod's name ends with '-' and five random characters
FAILURE_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)

_RFC_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_REFERENCE = re.compile(r"(?<!\$)\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True)
class Problem:
    """What is wrong with a field of a manifest, and the flag that it comes from."""

    path: str
    message: str
    flag: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.message} (field {self.path})"


def check(manifest: dict[str, Any]) -> None:
    """Raises LaunchError with everything that is wrong with a JobSet."""
    problems = list(problems_of(manifest))
    if problems:
        raise LaunchError("the cluster would refuse this job:\n" + "\n".join(f"  {problem}" for problem in problems))


def problems_of(manifest: dict[str, Any]) -> Iterator[Problem]:
    """All that is wrong with a JobSet, in the order of its fields."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    jobs = spec["replicatedJobs"]
    yield from _names(name, spec, jobs)
    yield from _labels("metadata.labels", manifest["metadata"].get("labels", {}))
    for index, job in enumerate(jobs):
        yield from _replicated_job(f"spec.replicatedJobs[{index}]", job)
    yield from _policies(spec, jobs)
    yield from _coordinator(name, spec, jobs)


def _names(name: str, spec: dict[str, Any], jobs: list[dict[str, Any]]) -> Iterator[Problem]:
    if not _RFC_1035.fullmatch(name):
        yield Problem("metadata.name", f"{name!r} is no DNS label: lower-case letters, digits and '-'", "--name")
    subdomain = spec["network"].get("subdomain", name)
    if not _RFC_1035.fullmatch(subdomain) or len(subdomain) > MAX_LABEL:
        yield Problem("spec.network.subdomain", f"{subdomain!r} is no DNS label", "--name")
    for repeated in _repeated(job["name"] for job in jobs):
        yield Problem("spec.replicatedJobs", f"two replicated jobs are called {repeated!r}", "--name")
    for index, job in enumerate(jobs):
        path = f"spec.replicatedJobs[{index}].name"
        job_name = f"{name}-{job['name']}-{max(job['replicas'] - 1, 0)}"
        pod_name = f"{job_name}-{max(job['template']['spec']['completions'] - 1, 0)}"
        if not _RFC_1035.fullmatch(job_name):
            yield Problem(path, f"the Job would be called {job_name!r}, which is no DNS label", "--name")
        if len(pod_name) + POD_SUFFIX > MAX_LABEL:
            yield Problem(
                path,
                f"a pod would be called {pod_name}-xxxxx, {len(pod_name) + POD_SUFFIX} characters; at most {MAX_LABEL} "
                "are possible",
                "--name",
            )


def _replicated_job(path: str, job: dict[str, Any]) -> Iterator[Problem]:
    if job["replicas"] < 1:
        yield Problem(f"{path}.replicas", f"{job['replicas']} is less than 1", "--num-slices")
    template = job["template"]
    specification, path = template["spec"], f"{path}.template.spec"
    if not 1 <= specification["parallelism"] == specification["completions"]:
        yield Problem(
            f"{path}.parallelism",
            f"{specification['parallelism']} pods at a time of {specification['completions']}: all have to run at once",
            "--topology",
        )
    if specification.get("completionMode") != "Indexed":
        yield Problem(f"{path}.completionMode", "has to be Indexed: hosts are told apart by it", "--topology")
    pod, pod_path = specification["template"]["spec"], f"{path}.template.spec"
    containers = [("containers", pod["containers"]), ("initContainers", pod.get("initContainers", []))]
    if specification.get("podFailurePolicy"):
        yield from _pod_failure_policy(f"{path}.podFailurePolicy", specification["podFailurePolicy"], pod)
    yield from _labels(f"{path}.template.metadata.labels", specification["template"]["metadata"].get("labels", {}))
    yield from _labels(f"{pod_path}.nodeSelector", pod.get("nodeSelector", {}), "--node-constraint")
    for repeated in _repeated(container["name"] for _, group in containers for container in group):
        yield Problem(f"{pod_path}.containers", f"two containers are called {repeated!r}", "--pathways")
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    for repeated in _repeated(volumes):
        yield Problem(f"{pod_path}.volumes", f"two volumes are called {repeated!r}", "--mount")
    for kind, group in containers:
        for index, container in enumerate(group):
            yield from _container(f"{pod_path}.{kind}[{index}]", container, volumes)


def _container(path: str, container: dict[str, Any], volumes: list[str]) -> Iterator[Problem]:
    flag = _container_flag(container["name"])
    if not container["image"] or re.search(r"\s", container["image"]):
        yield Problem(f"{path}.image", f"{container['image']!r} is no image", f"{flag}image")
    names = [variable["name"] for variable in container.get("env", [])]
    for name in names:
        if not _ENV_NAME.fullmatch(name):
            yield Problem(f"{path}.env", f"{name!r} is no name of a variable", f"{flag}env")
    for repeated in _repeated(names):
        yield Problem(f"{path}.env", f"{repeated} is set twice", f"{flag}env")
    for index, word in enumerate((*container.get("command", ()), *container.get("args", ()))):
        for name in _REFERENCE.findall(word):
            if name not in names:
                yield Problem(f"{path}.args[{index}]", f"$({name}) is no variable of this container", f"{flag}args")
    known: set[str] = set()
    for variable in container.get("env", []):
        for name in _REFERENCE.findall(variable.get("value", "")):
            if name not in known:
                yield Problem(
                    f"{path}.env", f"{variable['name']} names $({name}), which is not set before it", f"{flag}env"
                )
        known.add(variable["name"])
    mounts = container.get("volumeMounts", [])
    for index, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            yield Problem(f"{path}.volumeMounts[{index}].name", f"there is no volume {mount['name']!r}", "--mount")
        if not mount["mountPath"].startswith("/") or ":" in mount["mountPath"]:
            message = f"{mount['mountPath']!r} is no absolute path without ':'"
            yield Problem(f"{path}.volumeMounts[{index}].mountPath", message, "--mount")
    for repeated in _repeated(mount["mountPath"] for mount in mounts):
        yield Problem(f"{path}.volumeMounts", f"{repeated} is mounted twice", "--mount")


def _pod_failure_policy(path: str, policy: dict[str, Any], pod: dict[str, Any]) -> Iterator[Problem]:
    flag = "--restart-on-exit-codes"
    if pod["restartPolicy"] != "Never":
        yield Problem(path, f"needs restartPolicy Never, not {pod['restartPolicy']}", flag)
    names = [container["name"] for container in pod["containers"]]
    for index, rule in enumerate(policy["rules"]):
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        if codes["containerName"] not in names:
            message = f"there is no container {codes['containerName']!r}"
            yield Problem(f"{path}.rules[{index}].onExitCodes.containerName", message, flag)
        values = codes["values"]
        if values != sorted(set(values)) or not 1 <= len(values) <= 255:
            message = f"{values}: expected 1 to 255 codes in order, none twice"
            yield Problem(f"{path}.rules[{index}].onExitCodes.values", message, flag)
        if codes["operator"] == "In" and 0 in values:
            yield Problem(f"{path}.rules[{index}].onExitCodes.values", "0 is no failure", flag)


def _policies(spec: dict[str, Any], jobs: list[dict[str, Any]]) -> Iterator[Problem]:
    names = [job["name"] for job in jobs]
    if spec["startupPolicy"]["startupPolicyOrder"] == "InOrder" and any(job.get("dependsOn") for job in jobs):
        yield Problem("spec.startupPolicy", "InOrder and dependsOn exclude each other", "--pathways")
    for index, job in enumerate(jobs):
        for needed in job.get("dependsOn", []):
            if needed["name"] not in names[:index]:
                message = f"{needed['name']!r} is no replicated job before this one"
                yield Problem(f"spec.replicatedJobs[{index}].dependsOn", message, "--pathways")
    yield from _targets("spec.successPolicy", spec["successPolicy"], names)
    policy = spec["failurePolicy"]
    if policy["maxRestarts"] < 0:
        yield Problem("spec.failurePolicy.maxRestarts", f"{policy['maxRestarts']} is less than 0", "--restarts")
    rules = policy.get("rules", [])
    for repeated in _repeated(rule["name"] for rule in rules):
        yield Problem("spec.failurePolicy.rules", f"two rules are called {repeated!r}", "--restart-on-exit-codes")
    for index, rule in enumerate(rules):
        path = f"spec.failurePolicy.rules[{index}]"
        if not _RULE_NAME.fullmatch(rule["name"]) or len(rule["name"]) > 128:
            message = f"{rule['name']!r}: expected a letter, then letters, digits, '_', ',' and ':'"
            yield Problem(f"{path}.name", message, "--restart-on-exit-codes")
        for reason in rule.get("onJobFailureReasons", []):
            if reason not in FAILURE_REASONS:
                message = f"{reason!r} is none of {', '.join(FAILURE_REASONS)}"
                yield Problem(f"{path}.onJobFailureReasons", message, "--restart-on-exit-codes")
        yield from _targets(path, rule, names)


def _targets(path: str, policy: dict[str, Any], names: list[str]) -> Iterator[Problem]:
    for target in policy.get("targetReplicatedJobs", []):
        if target not in names:
            message = f"{target!r} is none of the replicated jobs {', '.join(names)}"
            yield Problem(f"{path}.targetReplicatedJobs", message, "--pathways")


def _coordinator(name: str, spec: dict[str, Any], jobs: list[dict[str, Any]]) -> Iterator[Problem]:
    coordinator = spec.get("coordinator")
    if coordinator is None:
        return
    path = "spec.coordinator"
    job = next((job for job in jobs if job["name"] == coordinator["replicatedJob"]), None)
    if job is None:
        message = f"there is no replicated job {coordinator['replicatedJob']!r}"
        yield Problem(f"{path}.replicatedJob", message, "--pathways")
        return
    if not 0 <= coordinator["jobIndex"] < job["replicas"]:
        message = f"{coordinator['jobIndex']} is no index of {job['replicas']} Jobs"
        yield Problem(f"{path}.jobIndex", message, "--pathways")
    completions = job["template"]["spec"]["completions"]
    if job["template"]["spec"].get("completionMode") != "Indexed":
        yield Problem(f"{path}.replicatedJob", "its completionMode has to be Indexed", "--pathways")
    if not 0 <= coordinator["podIndex"] < completions:
        message = f"{coordinator['podIndex']} is no index of {completions} pods"
        yield Problem(f"{path}.podIndex", message, "--pathways")
    host = f"{name}-{job['name']}-{coordinator['jobIndex']}-{coordinator['podIndex']}"
    label = f"{host}.{spec['network'].get('subdomain', name)}"
    if len(label) > MAX_LABEL:
        message = f"the coordinator's address {label} has {len(label)} characters; a label has at most {MAX_LABEL}"
        yield Problem(path, message, "--name")


def _labels(path: str, labels: dict[str, str], flag: str = "--name") -> Iterator[Problem]:
    for key, value in labels.items():
        owner = "--queue" if key.endswith("queue-name") else flag
        if len(value) > MAX_LABEL or not _LABEL_VALUE.fullmatch(value):
            yield Problem(f"{path}.{key}", f"{value!r} is no label: at most {MAX_LABEL} of a-z 0-9 - _ .", owner)


def _container_flag(name: str) -> str:
    parts = {"pathways-proxy": "proxy-", "pathways-rm": "server-", "pathways-worker": "worker-"}
    return f"--pathways-{parts[name]}" if name in parts else "--"


def _repeated(names: Any) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
