"""What has happened to a job since one last asked, in sentences, each said once.

Progress takes in every change of the job's objects as it comes, so that no exit is missed even where the pod is deleted
a moment later; `news` looks at where things stand and says what is new. Pure: it asks nothing of the cluster.
"""

from dataclasses import replace
from typing import Any

from burnish.launch.gke.names import QUEUE_LABEL
from burnish.launch.gke.reading import (
    Exit,
    attempt_of,
    container_status,
    exit_of,
    has_ended,
    host_of,
    host_order,
    host_words,
    is_of,
    is_running,
    placement_hint,
    status_of,
    trouble_starting,
    unschedulable,
)
from burnish.launch.gke.resources import EVENTS, JOBS, JOBSETS, PODS, WORKLOADS, Change, Resource
from burnish.launch.job import JobState, JobStatus

Object = dict[str, Any]

# Events of the job's objects that say more than the objects themselves do.
_TELLING_EVENTS = {
    "FailedAttachVolume",
    "FailedCreate",
    "FailedMount",
    "FailedScaleUp",
    "Preempted",
    "TriggeredScaleUp",
}


def is_event_of(event: Object, jobset: Object) -> bool:
    """Whether an event of the namespace is of the JobSet, a Job or a pod of it; not of an earlier job of that name."""
    job, name = jobset["metadata"]["name"], event.get("involvedObject", {}).get("name", "")
    moment = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return (name == job or name.startswith(f"{job}-")) and moment >= jobset["metadata"]["creationTimestamp"]


class Progress:
    """One job, as far as the changes that were taken in tell it."""

    def __init__(self, jobset: Object) -> None:
        self.jobset = jobset
        self.deleted = False  # the JobSet is gone; another of its name may be there
        self.place: tuple[int, int] | None = None  # in its queue: which of how many, from 1
        self._items: dict[Resource, dict[str, Object]] = {}
        self._exits: dict[str, Exit] = {}  # by the pod's uid
        self._said: set[str] = set()
        self._pending: list[str] = []  # of the feeds, still to be told
        self._restarts: list[tuple[int, int, str]] = []  # as _ends, but what came after it
        self._restarts_known = 0
        self._running_said = (0, 0)
        self._most_running = (0, 0, "")  # attempt, how many hosts ran in it at once, one of them

    @property
    def pods(self) -> list[Object]:
        """Those of the newest attempt, in the order of the hosts."""
        pods = [pod for pod in self._items.get(PODS, {}).values() if is_of(pod, self.jobset)]
        newest = max(map(attempt_of, pods), default=0)
        return sorted((pod for pod in pods if attempt_of(pod) == newest), key=host_order)

    def status(self) -> JobStatus:
        """A job whose JobSet is gone before it ended was cancelled."""
        jobs = [job for job in self._items.get(JOBS, {}).values() if is_of(job, self.jobset)]
        status = status_of(self.jobset, self.pods, jobs, list(self._exits.values()))
        if self.deleted and not status.state.is_final:
            return replace(status, state=JobState.CANCELLED, reason="its JobSet was deleted")
        return status

    def take_in(self, change: Change) -> None:
        if change.kind == "AWAY":
            self._pending.append(f"the API server does not answer, trying on: {change.text}")
        elif change.kind == "DENIED":
            self._pending.append(f"{change.text}; what it would tell is left out")
        elif change.resource == JOBSETS:
            self._take_in_jobset(change)
        else:
            self._take_in_items(change)

    def news(self) -> list[str]:
        """Sentences on what is new, in order."""
        fresh, self._pending = self._pending, []
        attempts = sorted(self._restarts + self._ends())
        newest = max(map(attempt_of, self.pods), default=0)
        fresh += [text for attempt, _, text in attempts if attempt < newest]
        fresh += [*self._queue(), *self._events(), *self._placement(), *self._starting(), *self._running()]
        fresh += [text for attempt, _, text in attempts if attempt >= newest]
        said = []
        for text in fresh:
            if text not in self._said:
                self._said.add(text)
                said.append(text)
        return said

    def _take_in_jobset(self, change: Change) -> None:
        uid = self.jobset["metadata"]["uid"]
        found = next((item for item in change.items if item["metadata"]["uid"] == uid), None)
        self.jobset = found or self.jobset
        # LISTED is all that there is, and a name has one JobSet: where another one is, this one is not.
        self.deleted = self.deleted or found is None or change.kind == "DELETED"
        count = self.jobset.get("status", {}).get("restarts", 0)
        if count > self._restarts_known:
            most = self.jobset["spec"].get("failurePolicy", {}).get("maxRestarts", 0)
            self._restarts.append((count - 1, 1, f"restart {count} of {most}"))
            self._restarts_known = count

    def _take_in_items(self, change: Change) -> None:
        if change.kind == "LISTED":
            self._items[change.resource] = {}
        known = self._items.setdefault(change.resource, {})
        for item in change.items:
            uid = item["metadata"]["uid"]
            if change.resource == PODS:
                ended = exit_of(item) if is_of(item, self.jobset) else None
                if ended is not None and uid not in self._exits:
                    self._exits[uid] = ended
            if change.kind == "DELETED":
                known.pop(uid, None)
            else:
                known[uid] = item
        if change.resource == PODS:
            running = [pod for pod in self.pods if is_running(pod)]
            if running:
                now = (attempt_of(running[0]), len(running), host_of(running[0]))
                self._most_running = max(self._most_running, now)

    def _queue(self) -> list[str]:
        queue = self.jobset["metadata"].get("labels", {}).get(QUEUE_LABEL)
        if not queue:
            return []
        texts = []
        own = self.jobset["metadata"]["uid"]
        workloads = [
            item
            for item in self._items.get(WORKLOADS, {}).values()
            if any(owner["uid"] == own for owner in item["metadata"].get("ownerReferences", []))
        ]
        for workload in workloads:
            conditions = {c["type"]: c for c in workload.get("status", {}).get("conditions", [])}
            if conditions.get("Admitted", {}).get("status") == "True":
                texts.append(f"admitted by queue {queue}")
            elif conditions.get("Evicted", {}).get("status") == "True":
                texts.append(f"put back into queue {queue}: {conditions['Evicted'].get('message', '')}")
            elif reserved := conditions.get("QuotaReserved"):
                why = reserved.get("message") or reserved.get("reason", "")
                texts.append(f"waits in queue {queue}: {why}")
        status = self.status()
        if status.state is JobState.SUSPENDED:
            if not workloads:
                texts.append(f"waits in queue {queue}")
            if self.place is not None:
                texts.append(f"number {self.place[0]} of {self.place[1]} waiting in queue {queue}")
        return texts

    def _events(self) -> list[str]:
        return [
            f"{event['reason']}: {' '.join(event.get('message', '').split())}"
            for event in self._items.get(EVENTS, {}).values()
            if event.get("reason") in _TELLING_EVENTS and is_event_of(event, self.jobset)
        ]

    def _placement(self) -> list[str]:
        waiting: dict[str, list[Object]] = {}
        for pod in self.pods:
            why = unschedulable(pod)
            if why is not None and not has_ended(pod):
                waiting.setdefault(why, []).append(pod)
        texts = []
        for why, pods in waiting.items():
            hint = placement_hint(pods[0], why)
            text = f"{host_words([host_of(pod) for pod in pods])} cannot be placed: {why.rstrip('.')}"
            texts.append(f"{text}; {hint}" if hint else text)
        return texts

    def _starting(self) -> list[str]:
        texts = []
        pulling: dict[str, list[str]] = {}
        for pod in self.pods:
            trouble = trouble_starting(pod)
            if trouble is not None:
                texts.append(f"{host_of(pod)} does not start: {trouble}")
            elif times := container_status(pod).get("restartCount", 0):
                texts.append(f"{host_of(pod)} was restarted in its place ({times})")
            elif not is_running(pod) and not has_ended(pod) and (image := self._pulls(pod)):
                pulling.setdefault(image, []).append(host_of(pod))
        texts += [
            f"{host_words(hosts)} pulls {image}" if len(hosts) == 1 else f"{host_words(hosts)} pull {image}"
            for image, hosts in pulling.items()
        ]
        return texts

    def _pulls(self, pod: Object) -> str | None:
        """The image that an event says the pod pulls."""
        for event in self._items.get(EVENTS, {}).values():
            own = event.get("involvedObject", {}).get("uid") == pod["metadata"]["uid"]
            if own and event.get("reason") == "Pulling":
                return str(event.get("message", "")).partition('"')[2].rstrip('"') or None
        return None

    def _running(self) -> list[str]:
        attempt, running, host = self._most_running
        if not running or (attempt, running) <= self._running_said:
            return []
        self._running_said = (attempt, running)
        hosts = self._hosts
        if hosts == 1:
            text = f"{host} runs"
        else:
            text = f"all {running} hosts run" if running == hosts else f"{running} of {hosts} hosts run"
        self._said.discard(text)  # it may be true again after a restart
        return [text]

    @property
    def _hosts(self) -> int:
        """How many pods the job has when all are there."""
        jobs = self.jobset["spec"]["replicatedJobs"]
        return sum(job["replicas"] * job["template"]["spec"]["completions"] for job in jobs)

    def _ends(self) -> list[tuple[int, int, str]]:
        """Number of each attempt that has ended, 0, and what ended it. One process that fails takes the others with
        it: only the cause is told."""
        exits = sorted(self._exits.values(), key=lambda item: item.weight)
        ends = []
        for attempt in sorted({item.attempt for item in exits if item.code}):
            cause = next(item for item in exits if item.attempt == attempt and item.code)
            ends.append((attempt, 0, f"{cause.words}{f' (attempt {attempt + 1})' if attempt else ''}"))
        return ends
