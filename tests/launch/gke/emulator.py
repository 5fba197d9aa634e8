"""A Kubernetes API server on localhost, enough of one for JobSets: its pods are real processes of this machine.

Three parts. `Store` keeps objects, resource versions and the history that watches read. `Cluster` does what the
controllers and the kubelet do: JobSet to Jobs to pods to processes, and their status back up. The HTTP handler
speaks the API: create 201, missing 404, there already 409, invalid 422, selectors, watches, logs that are followed.

Tests reach into it to make things go wrong: `fail` answers requests with an error, `cut_streams` breaks watches and
logs off in the middle, `evict` and `run_out_of_memory` end pods, `unschedulable` and `broken_images` keep them from
starting. Left out: admission webhooks (so a manifest has to be whole without them), networking (names of pods in
the environment become 127.0.0.1), nodes' capacity, mounts.
"""

import base64
import contextlib
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from schemas import crds_present, jobset_errors

Object = dict[str, Any]

KINDS = {
    "pods": "Pod",
    "secrets": "Secret",
    "services": "Service",
    "events": "Event",
    "nodes": "Node",
    "namespaces": "Namespace",
    "jobs": "Job",
    "jobsets": "JobSet",
    "workloads": "Workload",
    "localqueues": "LocalQueue",
    "clusterqueues": "ClusterQueue",
}
GROUPS = {"jobs": "batch", "jobsets": "jobset.x-k8s.io"} | dict.fromkeys(
    ("workloads", "localqueues", "clusterqueues"), "kueue.x-k8s.io"
)
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOBSET = "jobset.sigs.k8s.io"


def now(precise: bool = False) -> str:
    moment = datetime.now(UTC)
    if precise:
        return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": self.code,
            "reason": self.reason,
            "message": self.message,
        }


@dataclass
class Fault:
    """Requests whose 'METHOD path?query' matches are answered with an error, `times` times."""

    pattern: str
    code: int
    times: int
    retry_after: int | None = None
    message: str = "injected"
    after: bool = False  # the request is carried out first: only its answer is lost
    seen: int = 0

    def meets(self, request: str) -> bool:
        """Whether the request is to fail; counts it."""
        if self.seen >= self.times or not re.search(self.pattern, request):
            return False
        self.seen += 1
        return True

    def error(self) -> "ApiError":
        reasons = {401: "Unauthorized", 403: "Forbidden", 429: "TooManyRequests", 500: "InternalError"}
        return ApiError(self.code, reasons.get(self.code, ""), self.message, self.retry_after)


@dataclass(frozen=True)
class Change:
    version: int
    kind: str  # ADDED, MODIFIED or DELETED
    plural: str
    item: Object


class Store:
    """Objects by plural, namespace and name. Every change has a number, and watches read the changes in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.version = 1000
        self.changes: list[Change] = []
        self.oldest = 1000  # changes up to this number are forgotten: a watch from before it gets 410

    def get(self, plural: str, namespace: str, name: str) -> Object:
        with self.changed:
            found = self.objects.get((plural, namespace, name))
            if found is None:
                group = GROUPS.get(plural)
                resource = f"{plural}.{group}" if group else plural
                raise ApiError(404, "NotFound", f'{resource} "{name}" not found')
            return copy.deepcopy(found)

    def list(self, plural: str, namespace: str = "") -> list[Object]:
        with self.changed:
            return [
                copy.deepcopy(item)
                for (kind, space, _), item in self.objects.items()
                if kind == plural and (not namespace or space == namespace)
            ]

    def create(self, plural: str, namespace: str, item: Object) -> Object:
        with self.changed:
            metadata = item.setdefault("metadata", {})
            if "name" not in metadata and "generateName" in metadata:
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            name = metadata["name"]
            group = GROUPS.get(plural)
            if (plural, namespace, name) in self.objects:
                resource = f"{plural}.{group}" if group else plural
                raise ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists')
            item = copy.deepcopy(item)
            if namespace:
                item["metadata"]["namespace"] = namespace
            item["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
            item.setdefault("kind", KINDS[plural])
            self._put("ADDED", plural, namespace, name, item)
            return copy.deepcopy(item)

    def update(self, plural: str, namespace: str, name: str, change: Any) -> Object | None:
        """Applies a function to the object; nothing happens where it is gone or stays as it was."""
        with self.changed:
            item = self.objects.get((plural, namespace, name))
            if item is None:
                return None
            updated = copy.deepcopy(item)
            change(updated)
            if updated != item:
                self._put("MODIFIED", plural, namespace, name, updated)
            return copy.deepcopy(updated)

    def delete(self, plural: str, namespace: str, name: str) -> Object | None:
        with self.changed:
            item = self.objects.pop((plural, namespace, name), None)
            if item is not None:
                self.version += 1
                item["metadata"]["resourceVersion"] = str(self.version)
                self.changes.append(Change(self.version, "DELETED", plural, item))
                self.changed.notify_all()
            return item

    def forget_history(self) -> None:
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.changes.clear()

    def _put(self, kind: str, plural: str, namespace: str, name: str, item: Object) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.objects[plural, namespace, name] = item
        self.changes.append(Change(self.version, kind, plural, copy.deepcopy(item)))
        self.changed.notify_all()


@dataclass
class ContainerLog:
    """Lines of one container with the time of each; ended when the process has."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False


@dataclass
class Running:
    """A pod's processes."""

    directory: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    end: str = ""  # OOMKilled or Evicted, where a test ended it
    deleted: bool = False


class Cluster:
    """The controllers and the kubelet: one thread that turns JobSets to pods, and one thread a pod."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.store = Store()
        self.environment = environment or {}  # of every container, under what its manifest says
        self.entrypoints: dict[str, list[str]] = {}  # image: what it runs where the manifest has no command
        self.unschedulable = ""  # why pods find no node, while it says so
        self.broken_images: set[str] = set()
        self.missing_kinds: set[str] = set()  # plurals that the server does not know
        self.kueue = False  # JobSets with a queue wait until `admit`
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.authorizations: list[str] = []  # of each request
        self.errors: list[Exception] = []  # of the emulator itself
        self.stream_cuts = 0  # so many streams are still to be cut after their next item
        self.logs: dict[tuple[str, str, str], ContainerLog] = {}  # namespace, pod, container
        self._pods: dict[tuple[str, str], Running] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="pods-"))
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.store.create("namespaces", "", {"apiVersion": "v1", "metadata": {"name": "default"}})
        controller = threading.Thread(target=self._control, daemon=True)
        controller.start()
        self._threads.append(controller)

    # What tests do to it.

    def fail(self, pattern: str, code: int, times: int = 1, **more: Any) -> Fault:
        fault = Fault(pattern, code, times, **more)
        self.faults.append(fault)
        return fault

    def cut_streams(self, count: int) -> None:
        self.stream_cuts = count

    def add_node(self, name: str, labels: dict[str, str]) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"conditions": [ready], "allocatable": {"cpu": "8", "memory": "32Gi"}}
        node = {"apiVersion": "v1", "metadata": {"name": name, "labels": labels}, "status": status}
        self.store.create("nodes", "", node)

    def pods_of(self, jobset: str) -> list[Object]:
        return [
            pod for pod in self.store.list("pods") if pod["metadata"]["labels"].get(f"{JOBSET}/jobset-name") == jobset
        ]

    def evict(self, namespace: str, pod: str) -> None:
        self._end(namespace, pod, "Evicted")

    def run_out_of_memory(self, namespace: str, pod: str) -> None:
        self._end(namespace, pod, "OOMKilled")

    def processes(self) -> list[subprocess.Popen[bytes]]:
        with self.store.changed:
            return [process for pod in self._pods.values() for process in pod.processes.values()]

    def admit(self, namespace: str, jobset: str) -> None:
        def admitted(workload: Object) -> None:
            workload["status"] = {
                "conditions": [_condition("QuotaReserved", True), _condition("Admitted", True)],
            }

        self.store.update("workloads", namespace, f"jobset-{jobset}-00000", admitted)
        self.store.update("jobsets", namespace, jobset, lambda item: item["spec"].update(suspend=False))

    def pending(self, namespace: str, queue: str) -> list[Object]:
        """Kueue's summary of the workloads that wait, the oldest first."""
        if not self.kueue:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        waiting = [
            workload
            for workload in self.store.list("workloads", namespace)
            if workload["spec"]["queueName"] == queue and workload["status"]["conditions"][0]["status"] == "False"
        ]
        return [{"metadata": w["metadata"], "positionInLocalQueue": index} for index, w in enumerate(waiting)]

    def close(self) -> None:
        self._closing.set()
        with self.store.changed:
            for pod in list(self._pods.values()):
                pod.deleted = True
                _signal(pod, signal.SIGKILL)
            self.store.changed.notify_all()
        for thread in self._threads:
            thread.join(10)
        shutil.rmtree(self._directory, ignore_errors=True)
        if self.errors:
            raise self.errors[0]

    def event(self, namespace: str, involved: Object, kind: str, reason: str, message: str) -> None:
        reference = {
            "kind": involved["kind"],
            "name": involved["metadata"]["name"],
            "namespace": namespace,
            "uid": involved["metadata"]["uid"],
        }
        body = {
            "apiVersion": "v1",
            "metadata": {"name": f"{reference['name']}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": reference,
            "type": kind,
            "reason": reason,
            "message": message,
            "lastTimestamp": now(),
            "firstTimestamp": now(),
            "count": 1,
        }
        self.store.create("events", namespace, body)

    # Deletion, with what the object owns.

    def remove(self, plural: str, namespace: str, name: str) -> Object:
        item = self.store.get(plural, namespace, name)
        if plural == "pods":
            self._stop_pod(namespace, name)
        self.store.delete(plural, namespace, name)
        for owned in ("jobs", "services", "pods", "secrets", "workloads"):
            for child in self.store.list(owned, namespace):
                owners = child["metadata"].get("ownerReferences", ())
                if any(owner["uid"] == item["metadata"]["uid"] for owner in owners):
                    self.remove(owned, namespace, child["metadata"]["name"])
        return item

    def _stop_pod(self, namespace: str, name: str) -> None:
        with self.store.changed:
            pod = self._pods.get((namespace, name))
            if pod is None or pod.deleted:
                return
            pod.deleted = True
            _signal(pod, signal.SIGTERM)
            self.store.changed.notify_all()
        manifest = self.store.objects.get(("pods", namespace, name), {})
        grace = manifest.get("spec", {}).get("terminationGracePeriodSeconds", 30)
        killer = threading.Timer(grace, _signal, (pod, signal.SIGKILL))
        killer.daemon = True
        killer.start()

    def _end(self, namespace: str, name: str, reason: str) -> None:
        with self.store.changed:
            pod = self._pods[namespace, name]
            pod.end = reason
            _signal(pod, signal.SIGKILL)

    # The JobSet and Job controllers.

    def _control(self) -> None:
        seen = -1
        while not self._closing.is_set():
            with self.store.changed:
                if self.store.version == seen:
                    self.store.changed.wait(0.5)
                seen = self.store.version
            for jobset in self.store.list("jobsets"):
                try:
                    self._reconcile(jobset)
                except Exception as error:
                    self.errors.append(error)
                    return

    def _reconcile(self, jobset: Object) -> None:
        namespace, name = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
        status = jobset.get("status", {})
        finished = [c for c in status.get("conditions", ()) if c["type"] in ("Completed", "Failed")]
        if finished:
            ttl = jobset["spec"].get("ttlSecondsAfterFinished")
            ended = datetime.fromisoformat(finished[0]["lastTransitionTime"])
            if ttl is not None and datetime.now(UTC) >= ended + timedelta(seconds=ttl):
                self.remove("jobsets", namespace, name)
            return
        if self.kueue and QUEUE_LABEL in jobset["metadata"].get("labels", {}):
            self._queue(namespace, jobset)
            jobset = self.store.objects.get(("jobsets", namespace, name), jobset)
        if jobset["spec"].get("suspend"):
            self._set_condition(namespace, name, "Suspended", True, "SuspendedJobs", "jobset is suspended")
            return
        if any(c["type"] == "Suspended" and c["status"] == "True" for c in status.get("conditions", ())):
            self._set_condition(namespace, name, "Suspended", False, "ResumeJobs", "jobset is resumed")
        self._make_service(namespace, jobset)
        restarts = status.get("restarts", 0)
        in_order = jobset["spec"].get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder"
        counts = []
        for replicated in jobset["spec"]["replicatedJobs"]:
            count = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0) | {
                "name": replicated["name"]
            }
            for index in range(replicated.get("replicas", 1)):
                job = self._job(namespace, jobset, replicated, index, restarts)
                self._settle(namespace, job, count)
            counts.append(count)
            if in_order and count["ready"] + count["succeeded"] < replicated.get("replicas", 1):
                break
        self.store.update(
            "jobsets",
            namespace,
            name,
            lambda item: item.setdefault("status", {}).update(replicatedJobsStatus=counts, restarts=restarts),
        )
        self._finish(namespace, jobset, counts, restarts)

    def _queue(self, namespace: str, jobset: Object) -> None:
        name = jobset["metadata"]["name"]
        if ("workloads", namespace, f"jobset-{name}-00000") in self.store.objects:
            return
        self.store.update("jobsets", namespace, name, lambda item: item["spec"].update(suspend=True))
        waiting = _condition("QuotaReserved", False)
        waiting |= {"reason": "Pending", "message": "insufficient unused quota for google.com/tpu, 8 more needed"}
        body = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "metadata": {"name": f"jobset-{name}-00000", "ownerReferences": [_owner(jobset)]},
            "spec": {"queueName": jobset["metadata"]["labels"][QUEUE_LABEL]},
            "status": {"conditions": [waiting]},
        }
        self.store.create("workloads", namespace, body)

    def _make_service(self, namespace: str, jobset: Object) -> None:
        name = jobset["spec"].get("network", {}).get("subdomain") or jobset["metadata"]["name"]
        if ("services", namespace, name) not in self.store.objects:
            body = {"apiVersion": "v1", "metadata": {"name": name, "ownerReferences": [_owner(jobset)]}}
            self.store.create("services", namespace, body | {"spec": {"clusterIP": "None"}})

    def _job(self, namespace: str, jobset: Object, replicated: Object, index: int, restarts: int) -> Object:
        """The Job, made where it is missing together with its pods."""
        name = f"{jobset['metadata']['name']}-{replicated['name']}-{index}"
        found = self.store.objects.get(("jobs", namespace, name))
        if found is not None:
            return found
        template = copy.deepcopy(replicated["template"])
        labels = {
            f"{JOBSET}/jobset-name": jobset["metadata"]["name"],
            f"{JOBSET}/jobset-uid": jobset["metadata"]["uid"],
            f"{JOBSET}/replicatedjob-name": replicated["name"],
            f"{JOBSET}/replicatedjob-replicas": str(replicated.get("replicas", 1)),
            f"{JOBSET}/job-index": str(index),
            f"{JOBSET}/restart-attempt": str(restarts),
        }
        coordinator = jobset["spec"].get("coordinator")
        if coordinator:
            host = f"{coordinator['replicatedJob']}-{coordinator.get('jobIndex', 0)}-{coordinator.get('podIndex', 0)}"
            subdomain = jobset["spec"].get("network", {}).get("subdomain") or jobset["metadata"]["name"]
            labels[f"{JOBSET}/coordinator"] = f"{jobset['metadata']['name']}-{host}.{subdomain}"
        metadata = template.pop("metadata", {})
        metadata |= {"name": name, "labels": metadata.get("labels", {}) | labels, "ownerReferences": [_owner(jobset)]}
        job = self.store.create("jobs", namespace, {"apiVersion": "batch/v1", "metadata": metadata} | template)
        for pod_index in range(job["spec"].get("completions", 1)):
            self._make_pod(namespace, job, pod_index, labels)
        return job

    def _make_pod(self, namespace: str, job: Object, index: int, labels: dict[str, str]) -> None:
        template = job["spec"]["template"]
        name = f"{job['metadata']['name']}-{index}-{uuid.uuid4().hex[:5]}"
        metadata = copy.deepcopy(template.get("metadata", {}))
        own = {
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        metadata |= {"name": name, "ownerReferences": [_owner(job)]}
        metadata["labels"] = metadata.get("labels", {}) | labels | own
        spec = copy.deepcopy(template["spec"])
        spec |= {"hostname": f"{job['metadata']['name']}-{index}", "subdomain": labels[f"{JOBSET}/jobset-name"]}
        for container in spec["containers"] + spec.get("initContainers", []):
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        body = {"apiVersion": "v1", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}
        self.store.create("pods", namespace, body)
        running = Running(self._directory / name)
        running.directory.mkdir()
        with self.store.changed:
            self._pods[namespace, name] = running
        thread = threading.Thread(target=self._run_pod, args=(namespace, name, running), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _settle(self, namespace: str, job: Object, count: dict[str, Any]) -> None:
        """Adds the Job to its replicated job's counts, after marking it complete or failed where its pods are."""
        name = job["metadata"]["name"]
        conditions = {c["type"]: c for c in job.get("status", {}).get("conditions", ())}
        pods = [
            pod
            for pod in self.store.list("pods", namespace)
            if pod["metadata"]["labels"].get("batch.kubernetes.io/job-name") == name
        ]
        phases = [pod["status"]["phase"] for pod in pods]
        if not conditions:
            failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
            deadline = job["spec"].get("activeDeadlineSeconds")
            started = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
            late = deadline is not None and datetime.now(UTC) >= started + timedelta(seconds=deadline)
            if failed or (late and not all(phase == "Succeeded" for phase in phases)):
                reason = _failure_reason(job, failed[0]) if failed else "DeadlineExceeded"
                conditions = {"Failed": _condition("Failed", True) | {"reason": reason}}
                for pod in pods:  # a Job that has failed ends its other pods
                    if pod["status"]["phase"] in ("Pending", "Running"):
                        self.remove("pods", namespace, pod["metadata"]["name"])
            elif phases and all(phase == "Succeeded" for phase in phases):
                conditions = {"Complete": _condition("Complete", True)}
            if conditions:
                status = {"conditions": list(conditions.values())}
                self.store.update("jobs", namespace, name, lambda item: item.update(status=status))
        count["succeeded"] += "Complete" in conditions
        count["failed"] += "Failed" in conditions
        count["active"] += not conditions
        ready = [pod for pod in pods if _is_ready(pod)]
        count["ready"] += not conditions and len(ready) == job["spec"].get("completions", 1)

    def _finish(self, namespace: str, jobset: Object, counts: list[dict[str, Any]], restarts: int) -> None:
        name, spec = jobset["metadata"]["name"], jobset["spec"]
        if any(count["failed"] for count in counts):
            policy = spec.get("failurePolicy", {})
            reasons = {
                condition["reason"]
                for job in self._jobs_of(namespace, name)
                for condition in job.get("status", {}).get("conditions", ())
                if condition["type"] == "Failed"
            }
            rules = [
                rule
                for rule in policy.get("rules", ())
                if not rule.get("onJobFailureReasons") or reasons & set(rule["onJobFailureReasons"])
            ]
            if rules and rules[0]["action"] == "FailJobSet":
                self._end_jobset(namespace, name, "Failed", "FailJobSetFailurePolicyAction", "by a rule")
            elif restarts >= policy.get("maxRestarts", 0):
                reason = "ReachedMaxRestarts" if policy.get("maxRestarts") else "FailedJobs"
                self._end_jobset(namespace, name, "Failed", reason, "jobset failed due to one or more job failures")
            else:
                for job in self._jobs_of(namespace, name):
                    self.remove("jobs", namespace, job["metadata"]["name"])
                self.store.update("jobsets", namespace, name, lambda item: item["status"].update(restarts=restarts + 1))
            return
        targets = spec.get("successPolicy", {}).get("targetReplicatedJobs") or [
            r["name"] for r in spec["replicatedJobs"]
        ]
        done = {count["name"]: count["succeeded"] for count in counts}
        wanted = {r["name"]: r.get("replicas", 1) for r in spec["replicatedJobs"]}
        if all(done.get(target, 0) == wanted[target] for target in targets):
            self._end_jobset(namespace, name, "Completed", "AllJobsCompleted", "jobset completed successfully")

    def _end_jobset(self, namespace: str, name: str, kind: str, reason: str, message: str) -> None:
        for job in self._jobs_of(namespace, name):
            if not job.get("status", {}).get("conditions"):
                self.remove("jobs", namespace, job["metadata"]["name"])
        self._set_condition(namespace, name, kind, True, reason, message)

    def _jobs_of(self, namespace: str, jobset: str) -> list[Object]:
        return [
            job
            for job in self.store.list("jobs", namespace)
            if job["metadata"]["labels"].get(f"{JOBSET}/jobset-name") == jobset
        ]

    def _set_condition(self, namespace: str, name: str, kind: str, value: bool, reason: str, message: str) -> None:
        def change(item: Object) -> None:
            conditions = item.setdefault("status", {}).setdefault("conditions", [])
            if any(c["type"] == kind and c["status"] == str(value) for c in conditions):
                return
            conditions[:] = [c for c in conditions if c["type"] != kind]
            conditions.append(_condition(kind, value) | {"reason": reason, "message": message})

        self.store.update("jobsets", namespace, name, change)

    # The scheduler and the kubelet: a thread a pod.

    def _run_pod(self, namespace: str, name: str, running: Running) -> None:
        pod = self.store.objects.get(("pods", namespace, name))
        if pod is None:
            return
        self._wait_for_node(namespace, pod, running)
        self._wait_for_image(namespace, pod, running)
        if running.deleted:
            return
        containers = pod["spec"]["containers"]
        while True:
            try:
                for container in pod["spec"].get("initContainers", []) + containers:
                    self._container_environment(namespace, pod, container)
                break
            except ApiError as error:  # a Secret that is not there, or not yet
                self._wait_on(namespace, pod, "CreateContainerConfigError", error.message)
            if running.deleted or self._closing.wait(0.1):
                return
        for container in pod["spec"].get("initContainers", []) + containers:
            self._start(namespace, pod, container, running)
        if running.deleted:
            return
        restarts = 0
        self._report(namespace, pod, running, restarts)
        while True:
            codes = [running.processes[container["name"]].wait() for container in containers]
            if running.deleted or not any(codes) or pod["spec"]["restartPolicy"] == "Never":
                break
            restarts += 1
            for container in containers:
                self._start(namespace, pod, container, running)
            self._report(namespace, pod, running, restarts)
        _signal(running, signal.SIGKILL)  # sidecars end with the pod
        for process in running.processes.values():
            process.wait()
        while any(not log.ended for key, log in self.logs.items() if key[:2] == (namespace, name)):
            time.sleep(0.005)
        self._report(namespace, pod, running, restarts)
        with self.store.changed:
            self._pods.pop((namespace, name), None)

    def _wait_for_node(self, namespace: str, pod: Object, running: Running) -> None:
        said = ""
        name = pod["metadata"]["name"]
        while self.unschedulable and not running.deleted and not self._closing.is_set():
            if said != self.unschedulable:
                said = self.unschedulable
                condition = _condition("PodScheduled", False) | {"reason": "Unschedulable", "message": said}
                self._set_status(namespace, name, {"phase": "Pending", "conditions": [condition]})
                self.event(namespace, pod, "Warning", "FailedScheduling", said)
            time.sleep(0.02)

        def scheduled(item: Object) -> None:
            item["spec"]["nodeName"] = f"node-{item['metadata']['labels'].get(f'{JOBSET}/job-index', 0)}"
            item["status"] = {"phase": "Pending", "conditions": [_condition("PodScheduled", True)]}

        self.store.update("pods", namespace, name, scheduled)

    def _set_status(self, namespace: str, pod: str, status: Object) -> None:
        self.store.update("pods", namespace, pod, lambda item: item.update(status=status))

    def _wait_for_image(self, namespace: str, pod: Object, running: Running) -> None:
        images = {container["image"] for container in pod["spec"]["containers"]}
        self.event(namespace, pod, "Normal", "Pulling", f'Pulling image "{min(images)}"')
        self._wait_on(namespace, pod, "ContainerCreating", "")
        while images & self.broken_images and not running.deleted and not self._closing.is_set():
            image = min(images & self.broken_images)
            message = f'Back-off pulling image "{image}": not found'
            self._wait_on(namespace, pod, "ImagePullBackOff", message)
            time.sleep(0.02)

    def _wait_on(self, namespace: str, pod: Object, reason: str, message: str) -> None:
        waiting = {"waiting": {"reason": reason} | ({"message": message} if message else {})}
        statuses = [
            {
                "name": container["name"],
                "image": container["image"],
                "ready": False,
                "restartCount": 0,
                "state": waiting,
            }
            for container in pod["spec"]["containers"]
        ]

        def change(item: Object) -> None:
            item["status"] = item["status"] | {"containerStatuses": statuses}

        self.store.update("pods", namespace, pod["metadata"]["name"], change)

    def _start(self, namespace: str, pod: Object, container: Object, running: Running) -> None:
        environment = self.environment | self._container_environment(namespace, pod, container)
        command = container.get("command") or self.entrypoints.get(
            container["image"], ["/bin/sh", "-c", "exec sleep 9999"]
        )
        arguments = [_expand(word, environment) for word in [*command, *container.get("args", ())]]
        with self.store.changed:
            if running.deleted:
                return
            process = subprocess.Popen(
                arguments,
                env={"PATH": os.environ["PATH"], "HOME": str(running.directory)} | environment,
                cwd=running.directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.processes[container["name"]] = process
        log = self.logs.setdefault((namespace, pod["metadata"]["name"], container["name"]), ContainerLog())
        log.ended = False
        threading.Thread(target=self._collect, args=(process, log), daemon=True).start()

    def _collect(self, process: subprocess.Popen[bytes], log: ContainerLog) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.store.changed:
                log.lines.append((now(precise=True), line.decode(errors="replace").rstrip("\n")))
                self.store.changed.notify_all()
        process.stdout.close()
        with self.store.changed:
            log.ended = True
            self.store.changed.notify_all()

    def _container_environment(self, namespace: str, pod: Object, container: Object) -> dict[str, str]:
        values: dict[str, str] = {}
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                secret = self.store.get("secrets", namespace, source["secretKeyRef"]["name"])
                value = base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
            elif "fieldRef" in source:
                value = _downward(pod, source["fieldRef"]["fieldPath"])
            else:
                value = _expand(variable.get("value", ""), values)
            values[variable["name"]] = value
        jobset = pod["metadata"]["labels"][f"{JOBSET}/jobset-name"]
        return {name: re.sub(rf"{jobset}-[\w-]+\.{jobset}\b", "127.0.0.1", value) for name, value in values.items()}

    def _report(self, namespace: str, pod: Object, running: Running, restarts: int) -> None:
        """Writes the pod's status from its processes."""
        codes = {name: process.poll() for name, process in running.processes.items()}
        mains = [container["name"] for container in pod["spec"]["containers"]]
        ended = all(codes[name] is not None for name in mains)
        phase = "Running"
        if ended and not (pod["spec"]["restartPolicy"] == "OnFailure" and any(codes[name] for name in mains)):
            phase = "Failed" if any(codes[name] for name in mains) else "Succeeded"
        statuses = {
            key: [
                self._container_status(container, codes, running, restarts) for container in pod["spec"].get(source, ())
            ]
            for key, source in (("containerStatuses", "containers"), ("initContainerStatuses", "initContainers"))
        }
        conditions = [_condition("PodScheduled", True), _condition("Ready", phase == "Running")]
        status: Object = {"phase": phase, "conditions": conditions} | statuses
        if running.end == "Evicted":
            status |= {"reason": "Evicted", "message": "The node was low on resource: memory."}
            conditions.append(_condition("DisruptionTarget", True) | {"reason": "TerminationByKubelet"})

        def change(item: Object) -> None:
            item["status"] = status

        self.store.update("pods", namespace, pod["metadata"]["name"], change)

    def _container_status(self, container: Object, codes: dict[str, Any], running: Running, restarts: int) -> Object:
        code = codes[container["name"]]
        if code is None:
            state: Object = {"running": {"startedAt": now()}}
        else:
            reason = "Completed" if code == 0 else "OOMKilled" if running.end == "OOMKilled" else "Error"
            exit_code = code if code >= 0 else 128 - code
            state = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": now()}}
        return {
            "name": container["name"],
            "image": container["image"],
            "ready": code is None,
            "restartCount": restarts,
            "state": state,
        }


def _signal(pod: Running, number: int) -> None:
    """SIGKILL ends all that a container started; any other signal goes to its first process only, as by a kubelet."""
    for process in pod.processes.values():
        targets = _session(process.pid) if number == signal.SIGKILL else [process.pid]
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)


def _session(leader: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    members.append(int(entry.name))
    return members


def _owner(item: Object) -> Object:
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "name": item["metadata"]["name"],
        "uid": item["metadata"]["uid"],
        "controller": True,
    }


def _condition(kind: str, value: bool) -> Object:
    return {"type": kind, "status": str(value), "lastTransitionTime": now()}


def _is_ready(pod: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def _failure_reason(job: Object, pod: Object) -> str:
    conditions = {c["type"] for c in pod["status"].get("conditions", ()) if c["status"] == "True"}
    for rule in job["spec"].get("podFailurePolicy", {}).get("rules", ()):
        if any(wanted["type"] in conditions for wanted in rule.get("onPodConditions", ())):
            break  # the only action here is Count
        codes = rule.get("onExitCodes", {})
        for status in pod["status"].get("containerStatuses", ()):
            code = status["state"].get("terminated", {}).get("exitCode", 0)
            if codes and code and (code in codes["values"]) == (codes["operator"] == "In"):
                return "PodFailurePolicy"
    return "BackoffLimitExceeded"


def _downward(pod: Object, path: str) -> str:
    found = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if found:
        return str(pod["metadata"].get(found[1], {}).get(found[2], ""))
    value: Any = pod
    for part in path.split("."):
        value = value[part]
    return str(value)


def _expand(text: str, values: dict[str, str]) -> str:
    """As the kubelet: $(NAME) becomes the value where NAME is set, $$ becomes $, all else stays."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else values.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


@dataclass(frozen=True)
class Target:
    """What a path of the API names."""

    plural: str
    namespace: str
    name: str = ""
    part: str = ""  # status or log


def parse_path(path: str, missing: set[str]) -> Target:
    words = [unquote(word) for word in path.strip("/").split("/")]
    rest = words[2:] if words[0] == "api" else words[3:]
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    known = rest and rest[0] in KINDS and rest[0] not in missing
    if not known or (words[0] == "apis" and GROUPS.get(rest[0]) != words[1]):
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    name, part = [*rest[1:], "", ""][:2]
    return Target(rest[0], namespace, name, part)


def selects(item: Object, labels: str, fields: str) -> bool:
    own = item["metadata"].get("labels", {})
    for term in filter(None, re.split(r",(?![^(]*\))", labels)):
        among = re.fullmatch(r"\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*", term)
        if among:
            held = own.get(among[1]) in [value.strip() for value in among[3].split(",")]
            if held != (among[2] == "in"):
                return False
        elif "!=" in term:
            key, _, value = term.partition("!=")
            if own.get(key.strip()) == value.strip():
                return False
        elif "=" in term:
            key, _, value = term.replace("==", "=").partition("=")
            if own.get(key.strip()) != value.strip():
                return False
        elif (term.strip().lstrip("!") in own) == term.strip().startswith("!"):
            return False
    for term in filter(None, fields.split(",")):
        path, _, wanted = term.partition("=")
        value: Any = item
        for step in path.split("."):
            value = value.get(step, {}) if isinstance(value, dict) else {}
        if value != wanted.lstrip("="):
            return False
    return True


def check(plural: str, body: Object, strict: bool) -> None:
    """Raises the API's own errors for a body that the server would not take."""
    if plural != "jobsets":
        return
    name = body.get("metadata", {}).get("name", "")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise ApiError(422, "Invalid", f'JobSet.jobset.x-k8s.io "{name}" is invalid: metadata.name: Invalid value')
    if crds_present():
        errors = jobset_errors(body, "v0.12.0")
        unknown = [error for error in errors if "Additional properties" in error]
        if unknown and strict:
            raise ApiError(400, "BadRequest", f"strict decoding error: {'; '.join(unknown)}")
        if len(errors) > len(unknown):
            message = f'JobSet.jobset.x-k8s.io "{name}" is invalid: {"; ".join(errors)}'
            raise ApiError(422, "Invalid", message)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"
    _lost_answer: Fault | None = None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        cluster = self.server.cluster
        request = f"{self.command} {self.path}"
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        cluster.requests.append(request)
        cluster.authorizations.append(self.headers.get("Authorization", ""))
        try:
            fault = next((fault for fault in cluster.faults if fault.meets(request)), None)
            if fault is not None and not fault.after:
                raise fault.error()
            self._lost_answer = fault
            path = urlsplit(self.path)
            queue = re.fullmatch(
                r"/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/([^/]+)/localqueues/([^/]+)/pendingworkloads",
                path.path,
            )
            if queue:
                self._answer(200, {"kind": "PendingWorkloadsSummary", "items": cluster.pending(queue[1], queue[2])})
                return
            query = {key: values[-1] for key, values in parse_qs(path.query).items()}
            getattr(self, f"_{self.command.lower()}")(
                cluster, parse_path(path.path, cluster.missing_kinds), query, body
            )
        except ApiError as error:
            self._answer(error.code, error.status(), error.retry_after)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def _get(self, cluster: Cluster, target: Target, query: dict[str, str], body: Object) -> None:
        if target.part == "log":
            self._log(cluster, target, query)
        elif target.name:
            self._answer(200, cluster.store.get(target.plural, target.namespace, target.name))
        elif query.get("watch") in ("true", "True", "1"):
            self._watch(cluster, target, query)
        else:
            with cluster.store.changed:
                found = cluster.store.list(target.plural, target.namespace)
                version = str(cluster.store.version)
            chosen = [
                item for item in found if selects(item, query.get("labelSelector", ""), query.get("fieldSelector", ""))
            ]
            listing = {"kind": KINDS[target.plural] + "List", "apiVersion": "v1"}
            self._answer(200, listing | {"metadata": {"resourceVersion": version}, "items": chosen})

    def _post(self, cluster: Cluster, target: Target, query: dict[str, str], body: Object) -> None:
        if ("namespaces", "", target.namespace) not in cluster.store.objects:
            raise ApiError(404, "NotFound", f'namespaces "{target.namespace}" not found')
        check(target.plural, body, query.get("fieldValidation") == "Strict")
        body.pop("status", None)
        if target.plural == "secrets":
            values = {
                key: base64.b64encode(value.encode()).decode() for key, value in body.pop("stringData", {}).items()
            }
            body["data"] = body.get("data", {}) | values
        self._answer(201, cluster.store.create(target.plural, target.namespace, body))

    def _patch(self, cluster: Cluster, target: Target, query: dict[str, str], body: Object) -> None:
        if self.command == "PATCH" and self.headers.get("Content-Type") != "application/merge-patch+json":
            raise ApiError(415, "UnsupportedMediaType", "only merge patches are known here")
        found = cluster.store.get(target.plural, target.namespace, target.name)
        if body.get("metadata", {}).get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            raise ApiError(409, "Conflict", "Precondition failed: UID in precondition is another")

        def change(item: Object) -> None:
            for key, value in body.items():
                if (key == "status") == (target.part == "status"):
                    item[key] = _merged(item.get(key), value)

        changed = cluster.store.update(target.plural, target.namespace, target.name, change)
        assert changed is not None
        self._answer(200, changed)

    _put = _patch

    def _delete(self, cluster: Cluster, target: Target, query: dict[str, str], body: Object) -> None:
        removed = cluster.remove(target.plural, target.namespace, target.name)
        details = {"name": target.name, "kind": target.plural, "uid": removed["metadata"]["uid"]}
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details})

    def _answer(self, code: int, body: Object, retry_after: int | None = None) -> None:
        if self._lost_answer is not None:
            error, self._lost_answer = self._lost_answer.error(), None
            code, body = error.code, error.status()
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, items: Iterator[bytes]) -> None:
        """Sends items as chunks; a cut closes the connection before the end is told."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        cluster = self.server.cluster
        try:
            for item in items:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(item), item))
                self.wfile.flush()
                if cluster.stream_cuts > 0:
                    cluster.stream_cuts -= 1
                    self.close_connection = True
                    return
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _watch(self, cluster: Cluster, target: Target, query: dict[str, str]) -> None:
        self._stream(self._changes(cluster, target, query))

    def _changes(self, cluster: Cluster, target: Target, query: dict[str, str]) -> Iterator[bytes]:
        store = cluster.store
        after = int(query.get("resourceVersion") or 0)
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 60)
        while time.monotonic() < deadline and not self.server.closing:
            with store.changed:
                if after < store.oldest:
                    gone = ApiError(410, "Expired", f"too old resource version: {after} ({store.oldest})")
                    yield json.dumps({"type": "ERROR", "object": gone.status()}).encode() + b"\n"
                    return
                news = [change for change in store.changes if change.version > after]
                if not news:
                    store.changed.wait(min(0.2, max(deadline - time.monotonic(), 0)))
                    continue
            for change in news:
                after = change.version
                inside = not target.namespace or change.item["metadata"].get("namespace") == target.namespace
                chosen = selects(change.item, query.get("labelSelector", ""), query.get("fieldSelector", ""))
                if change.plural == target.plural and inside and chosen:
                    yield json.dumps({"type": change.kind, "object": change.item}).encode() + b"\n"

    def _log(self, cluster: Cluster, target: Target, query: dict[str, str]) -> None:
        pod = cluster.store.get("pods", target.namespace, target.name)
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        log = cluster.logs.get((target.namespace, target.name, container))
        if log is None:
            message = f'container "{container}" in pod "{target.name}" is waiting to start: ContainerCreating'
            raise ApiError(400, "BadRequest", message)
        self._stream(self._lines(cluster, log, query))

    def _lines(self, cluster: Cluster, log: ContainerLog, query: dict[str, str]) -> Iterator[bytes]:
        sent = 0
        since = ""
        if "sinceSeconds" in query:
            oldest = datetime.now(UTC) - timedelta(seconds=int(query["sinceSeconds"]))
            since = oldest.strftime("%Y-%m-%dT%H:%M:%S")
        if "tailLines" in query:
            sent = max(len(log.lines) - int(query["tailLines"]), 0)
        while not self.server.closing:
            with cluster.store.changed:
                news, ended = log.lines[sent:], log.ended
                if not news and not ended and query.get("follow") == "true":
                    cluster.store.changed.wait(0.2)
                    continue
            sent += len(news)
            for stamp, text in news:
                if stamp[:19] >= since:
                    prefix = f"{stamp} " if query.get("timestamps") == "true" else ""
                    yield f"{prefix}{text}\n".encode()
            if not news or query.get("follow") != "true":
                return


def _merged(old: Any, new: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(new, dict):
        return new
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cluster = cluster
        self.closing = False
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.closing = True
        self.shutdown()
        self.server_close()
        self.cluster.close()
        self._thread.join(10)
