"""All that a cluster tells of a job, for `burnish job describe` and `burnish job inspect`, as JSON values.

Secrets are not asked for: of them only the names stand in the JobSet. What the account may not see is named and left
out, and is no error.
"""

from typing import Any

from burnish.launch.gke.api import Api, RefusedError
from burnish.launch.gke.names import JOBSET_NAME, NODE_POOL, QUEUE_LABEL, TPU_ACCELERATOR, TPU_RESOURCE, TPU_TOPOLOGY
from burnish.launch.gke.progress import Progress, is_event_of
from burnish.launch.gke.reading import (
    attempt_of,
    container_status,
    host_of,
    host_order,
    is_of,
    status_of,
    trouble_starting,
    unschedulable,
)
from burnish.launch.gke.resources import EVENTS, JOBS, NODES, PODS, WORKLOADS, Change, Resource

Object = dict[str, Any]


class Evidence:
    """A job's objects, each kind asked for once."""

    def __init__(self, api: Api, jobset: Object) -> None:
        self.not_shown: list[str] = []
        self._api = api
        self.jobset = jobset
        own = f"{JOBSET_NAME}={jobset['metadata']['name']}"
        self.pods = sorted((pod for pod in api.list(PODS, labels=own)[0] if is_of(pod, jobset)), key=host_order)
        self.jobs = [job for job in api.list(JOBS, labels=own)[0] if is_of(job, jobset)]
        self.events = [event for event in self._optional(EVENTS) if is_event_of(event, jobset)]

    def workloads(self) -> list[Object]:
        """Kueue's objects for the job; none where the job has no queue."""
        if QUEUE_LABEL not in self.jobset["metadata"].get("labels", {}):
            return []
        uid = self.jobset["metadata"]["uid"]
        return [
            item
            for item in self._optional(WORKLOADS)
            if any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", []))
        ]

    def nodes(self) -> list[Object]:
        return self._optional(NODES)

    def _optional(self, resource: Resource) -> list[Object]:
        try:
            return self._api.list(resource)[0]
        except RefusedError as error:
            if error.status not in (403, 404):
                raise
            self.not_shown.append(str(error))
            return []


def description(api: Api, jobset: Object) -> Object:
    """What the job is, its state, its hosts and its events."""
    return _description(api, Evidence(api, jobset))


def diagnosis(api: Api, jobset: Object) -> Object:
    """The description with what seems to be wrong, and the objects behind it."""
    evidence = Evidence(api, jobset)
    workloads, nodes = evidence.workloads(), evidence.nodes()
    progress = Progress(jobset)
    if queue := jobset["metadata"].get("labels", {}).get(QUEUE_LABEL):
        progress.place = api.place_in_queue(queue, jobset["metadata"]["uid"])
    for resource, items in (
        (PODS, evidence.pods),
        (JOBS, evidence.jobs),
        (EVENTS, evidence.events),
        (WORKLOADS, workloads),
    ):
        progress.take_in(Change(resource, "LISTED", tuple(items)))
    return _description(api, evidence) | {
        "findings": [*progress.news(), *_node_findings(jobset, nodes)],
        "conditions": jobset.get("status", {}).get("conditions", []),
        "jobs": [{"name": job["metadata"]["name"], "status": job.get("status", {})} for job in evidence.jobs],
        "pods": [{"name": pod["metadata"]["name"], "status": pod.get("status", {})} for pod in evidence.pods],
        "workloads": [{"name": item["metadata"]["name"], "status": item.get("status", {})} for item in workloads],
        "nodes": [_node(node) for node in nodes],
        "manifest": {"metadata": jobset["metadata"], "spec": jobset["spec"]},
        "not_shown": evidence.not_shown,
    }


def _description(api: Api, evidence: Evidence) -> Object:
    status = status_of(evidence.jobset, evidence.pods, evidence.jobs)
    return {
        "name": status.name,
        "backend": "gke",
        "namespace": api.namespace,
        "state": status.state.value,
        "created": status.created.isoformat(),
        "completed": status.completed and status.completed.isoformat(),
        "restarts": status.restarts,
        "exit_code": status.exit_code,
        "reason": status.reason,
        "queue": evidence.jobset["metadata"].get("labels", {}).get(QUEUE_LABEL),
        "parts": [_part(replicated) for replicated in evidence.jobset["spec"]["replicatedJobs"]],
        "hosts": [_host(pod) for pod in evidence.pods],
        "events": [_event(event) for event in evidence.events],
    }


def _part(replicated: Object) -> Object:
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    return {
        "name": replicated["name"],
        "slices": replicated["replicas"],
        "hosts_per_slice": job["completions"],
        "node_selector": pod.get("nodeSelector", {}),
        "containers": [
            {"name": container["name"], "image": container["image"], "command": container.get("command", [])}
            for container in pod["containers"] + pod.get("initContainers", [])
        ],
    }


def _host(pod: Object) -> Object:
    terminated = container_status(pod).get("state", {}).get("terminated", {})
    return {
        "host": host_of(pod),
        "pod": pod["metadata"]["name"],
        "node": pod["spec"].get("nodeName"),
        "attempt": attempt_of(pod),
        "phase": pod.get("status", {}).get("phase", "Pending"),
        "exit_code": terminated.get("exitCode"),
        "reason": trouble_starting(pod) or unschedulable(pod) or terminated.get("reason", ""),
    }


def _event(event: Object) -> Object:
    moment = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    text = f"{event['involvedObject']['name']}: {event.get('reason', '')}: {event.get('message', '')}"
    return {"time": moment, "text": " ".join(text.split())}


def _node(node: Object) -> Object:
    labels = node["metadata"].get("labels", {})
    return {
        "name": node["metadata"]["name"],
        "ready": _is_ready(node),
        "unschedulable": node["spec"].get("unschedulable", False) if "spec" in node else False,
        "pool": labels.get(NODE_POOL),
        "accelerator": labels.get(TPU_ACCELERATOR),
        "topology": labels.get(TPU_TOPOLOGY),
        "allocatable": {
            key: value
            for key, value in node.get("status", {}).get("allocatable", {}).items()
            if key in ("cpu", "memory", TPU_RESOURCE)
        },
    }


def _node_findings(jobset: Object, nodes: list[Object]) -> list[str]:
    """Where there are fewer nodes of a kind than the job has hosts. Nodes may still be made, by an autoscaler."""
    findings = []
    for replicated in jobset["spec"]["replicatedJobs"] if nodes else []:
        job = replicated["template"]["spec"]
        selector = job["template"]["spec"].get("nodeSelector", {})
        fitting = [
            node for node in nodes if selector.items() <= node["metadata"].get("labels", {}).items() and _is_ready(node)
        ]
        needed = replicated["replicas"] * job["completions"]
        if selector and len(fitting) < needed:
            kind = ", ".join(f"{key}={value}" for key, value in selector.items())
            findings.append(
                f"{replicated['name']} needs {needed} nodes with {kind}; {len(fitting)} are there and ready"
            )
    return findings


def _is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
