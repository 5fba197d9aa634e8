"""What a JobSet, its Jobs and its pods say of a job. Pure: the API's JSON goes in, a JobStatus and words come out."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from burnish.launch.gke.names import (
    COMPLETION_INDEX,
    JOB_INDEX,
    JOBSET_NAME,
    JOBSET_UID,
    QUEUE_LABEL,
    REPLICATED_JOB_NAME,
    RESTART_ATTEMPT,
    TPU_ACCELERATOR,
    TPU_TOPOLOGY,
)
from burnish.launch.job import JobState, JobStatus

Object = dict[str, Any]

_KILLED, _TERMINATED = 137, 143
_TIME_LIMIT = 124  # exit code of a job that ran into its time limit, as of `timeout`
_NEVER_STARTS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
}


@dataclass(frozen=True)
class Exit:
    """How a host's main container, or its whole pod, came to its end."""

    host: str
    code: int
    words: str
    finished: datetime
    attempt: int  # how often the job had been restarted before

    @property
    def weight(self) -> tuple[int, datetime, bool]:
        """Sorts the deciding exit first: of the last attempt, the earliest, and a cause before those who were killed
        along with it."""
        return -self.attempt, self.finished, self.code in (_KILLED, _TERMINATED) and "memory" not in self.words


def host_of(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return f"{labels.get(REPLICATED_JOB_NAME, '')}-{labels.get(JOB_INDEX, '')}-{labels.get(COMPLETION_INDEX, '')}"


def host_order(pod: Object) -> tuple[str, int, int]:
    labels = pod["metadata"]["labels"]
    return labels.get(REPLICATED_JOB_NAME, ""), int(labels.get(JOB_INDEX, 0)), int(labels.get(COMPLETION_INDEX, 0))


def is_of(item: Object, jobset: Object) -> bool:
    """Whether a pod or Job is of this JobSet, and not of an earlier one of that name that is still being deleted."""
    labels, metadata = item["metadata"].get("labels", {}), jobset["metadata"]
    return labels.get(JOBSET_NAME) == metadata["name"] and labels.get(JOBSET_UID, metadata["uid"]) == metadata["uid"]


def is_main(pod: Object, main_job: str) -> bool:
    """Whether the pod is the first host of the first slice of the replicated job that runs the command."""
    return host_order(pod) == (main_job, 0, 0)


def main_job(jobset: Object) -> str:
    """The replicated job that runs the command: the first one."""
    name: str = jobset["spec"]["replicatedJobs"][0]["name"]
    return name


def attempt_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"].get(RESTART_ATTEMPT, 0))


def main_container(pod: Object) -> str:
    name: str = pod["spec"]["containers"][0]["name"]
    return name


def container_status(pod: Object) -> Object:
    """The status of the main container; {} before it has one."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return next((status for status in statuses if status["name"] == main_container(pod)), {})


def has_started(pod: Object) -> bool:
    state = container_status(pod).get("state", {})
    return "running" in state or "terminated" in state


def is_running(pod: Object) -> bool:
    return "running" in container_status(pod).get("state", {})


def has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def unschedulable(pod: Object) -> str | None:
    """Why the pod finds no node, in the scheduler's words."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", condition.get("reason", "")))
    return None


def placement_hint(pod: Object, message: str) -> str:
    """What would make room for a pod that finds no node."""
    selector = pod["spec"].get("nodeSelector", {})
    hints = []
    if TPU_TOPOLOGY in selector and ("affinity" in message or "google.com/tpu" in message):
        hints.append(
            f"it needs a free slice {selector[TPU_TOPOLOGY]} of {selector.get(TPU_ACCELERATOR, 'TPUs')}; "
            "`burnish cluster describe` shows what there is"
        )
    if "Insufficient cpu" in message or "Insufficient memory" in message:
        containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
        asked = [container.get("resources", {}).get("requests", {}) for container in containers]
        sizes = [f"{size['cpu']} CPUs and {size['memory']}" for size in asked if "cpu" in size and "memory" in size]
        if sizes:
            hints.append(
                f"its node has to have {', and '.join(sizes)} free; larger machines in that node pool, or smaller "
                "--pathways-proxy-cpu, --pathways-proxy-memory, --pathways-server-cpu and --pathways-server-memory, "
                "would mend it"
            )
    return "; ".join(hints)


def trouble_starting(pod: Object) -> str | None:
    """Why a container of the pod does not start, where something is wrong."""
    status = pod.get("status", {})
    for container in status.get("initContainerStatuses", []) + status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _NEVER_STARTS:
            words = f"container {container['name']}: {waiting['reason']}"
            if "Image" in waiting["reason"] or "ImagePull" in waiting["reason"]:
                words += f", image {container['image']}"
            message = " ".join(str(waiting.get("message", "")).split())
            return f"{words}: {message}" if message else words
    return None


def exit_of(pod: Object) -> Exit | None:
    """The pod's end; None while it runs, or its container is to be started again in its place. Code 0 is success."""
    status = pod.get("status", {})
    terminated = container_status(pod).get("state", {}).get("terminated")
    if pod["spec"]["restartPolicy"] != "Never" and not has_ended(pod):
        return None
    disrupted = next(
        (
            condition
            for condition in status.get("conditions", [])
            if condition["type"] == "DisruptionTarget" and condition["status"] == "True"
        ),
        None,
    )
    if terminated is None and status.get("phase") != "Failed":
        return None
    terminated = terminated or {}
    code = int(terminated.get("exitCode", 1))
    finished = _time(terminated.get("finishedAt")) or _time(pod["metadata"].get("deletionTimestamp")) or _created(pod)
    host = host_of(pod)
    if status.get("phase") == "Failed" and (status.get("reason") == "Evicted" or disrupted):
        why = status.get("message") or (disrupted or {}).get("message") or (disrupted or {}).get("reason") or ""
        words = f"{host} was evicted from its node" + (f": {why.rstrip('.')}" if why else "")
        return Exit(host, code or 1, words, finished, attempt_of(pod))
    if status.get("phase") == "Failed" and not terminated:
        why = status.get("message") or status.get("reason") or "no container of it has an exit code"
        return Exit(host, 1, f"{host} failed: {why.rstrip('.')}", finished, attempt_of(pod))
    if terminated.get("reason") == "OOMKilled":
        limit = _memory_limit(pod)
        words = f"{host} was killed: out of memory" + (f" (limit {limit})" if limit else "")
        return Exit(host, code or _KILLED, words, finished, attempt_of(pod))
    return Exit(host, code, f"{host} ended with exit code {code}", finished, attempt_of(pod))


def deciding_exit(exits: list[Exit]) -> Exit | None:
    """The exit that a failed job is reported with."""
    return min((item for item in exits if item.code), key=lambda item: item.weight, default=None)


def conditions_of(jobset: Object) -> dict[str, Object]:
    """The conditions that hold, by type."""
    return {c["type"]: c for c in jobset.get("status", {}).get("conditions", []) if c["status"] == "True"}


def state_of(jobset: Object, pods: list[Object]) -> JobState:
    conditions = conditions_of(jobset)
    if "Completed" in conditions:
        return JobState.SUCCEEDED
    if "Failed" in conditions:
        return JobState.FAILED
    if "Suspended" in conditions or jobset["spec"].get("suspend"):
        return JobState.SUSPENDED
    return JobState.RUNNING if any(has_started(pod) or has_ended(pod) for pod in pods) else JobState.PENDING


def status_of(jobset: Object, pods: list[Object], jobs: list[Object], exits: list[Exit] | None = None) -> JobStatus:
    """`exits`: those that were seen while one watched; else those of the pods that are still there."""
    state = state_of(jobset, pods)
    conditions = conditions_of(jobset)
    ended = conditions.get("Completed") or conditions.get("Failed")
    code, reason = None, ""
    if state is JobState.SUCCEEDED:
        code = 0
    elif state is JobState.FAILED:
        code, reason = _failure(conditions["Failed"], jobs, exits or [e for e in map(exit_of, pods) if e])
    elif state is JobState.SUSPENDED:
        queue = jobset["metadata"].get("labels", {}).get(QUEUE_LABEL)
        reason = f"waits in queue {queue}" if queue else "suspended"
    elif state is JobState.PENDING:
        reason = next((why for why in map(_waits_for, pods) if why), "")
    return JobStatus(
        name=jobset["metadata"]["name"],
        state=state,
        created=_created(jobset),
        completed=_time(ended.get("lastTransitionTime")) if ended else None,
        restarts=int(jobset.get("status", {}).get("restarts", 0)),
        exit_code=code,
        reason=reason,
    )


def host_words(hosts: list[str]) -> str:
    """One host by its name, several by their number and the first."""
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts ({hosts[0]}, …)"


def _failure(condition: Object, jobs: list[Object], exits: list[Exit]) -> tuple[int, str]:
    for job in jobs:
        for failed in job.get("status", {}).get("conditions", []):
            if failed["type"] == "Failed" and failed.get("reason") == "DeadlineExceeded":
                seconds = job["spec"].get("activeDeadlineSeconds")
                return _TIME_LIMIT, f"ran into the time limit of {seconds} s (--timeout)"
    deciding = deciding_exit(exits)
    if deciding is not None:
        return deciding.code, deciding.words
    message = str(condition.get("message") or condition.get("reason") or "no reason is given")
    return 1, message.rstrip(".")


def _waits_for(pod: Object) -> str:
    return trouble_starting(pod) or unschedulable(pod) or ""


def _memory_limit(pod: Object) -> str:
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return str(limits.get("memory", ""))


def _created(item: Object) -> datetime:
    return _time(item["metadata"]["creationTimestamp"]) or datetime.now(UTC)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).astimezone(UTC) if text else None
