"""Jobs as JobSets of a Kubernetes cluster: submitted, watched, read and cancelled through its API server.

The cluster keeps all there is to know; nothing is written on this machine. The API server is asked for only when a
method needs it, so that a plan can be made without a cluster and without the packages of the extra `gke`.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from queue import Empty, Queue
from typing import Any

from burnish.launch.errors import LaunchError, waited_too_long
from burnish.launch.gke.api import Api, RefusedError
from burnish.launch.gke.connect import connect
from burnish.launch.gke.diagnosis import description, diagnosis
from burnish.launch.gke.feeds import Feed
from burnish.launch.gke.logs import followed, written_so_far
from burnish.launch.gke.manifests import job_set, owner, secret
from burnish.launch.gke.names import JOBSET_NAME, OWN_LABELS, OWN_SELECTOR, QUEUE_LABEL, SUBMISSION, secret_name
from burnish.launch.gke.progress import Progress
from burnish.launch.gke.reading import host_order, is_main, is_of, main_job, status_of
from burnish.launch.gke.resources import EVENTS, JOBS, JOBSETS, PODS, SECRETS, WORKLOADS, Change, Resource
from burnish.launch.gke.validate import check
from burnish.launch.job import Event, JobSpec, JobState, JobStatus, LogLine
from burnish.launch.settings import Settings

Object = dict[str, Any]
Objects = list[Object]  # a name for it, since `list` is a method here

_CANCELLED = 143  # exit code of a wait whose job was cancelled, as of SIGTERM
_LOOK_AT_QUEUE_SECONDS = 5.0
_SETTLE_SECONDS = 0.3  # changes that come together are told together


class GkeBackend:
    """backend.Backend on Kubernetes. `api`: a connection that is there already; else the settings' cluster."""

    def __init__(self, settings: Settings, api: Api | None = None) -> None:
        self._settings = settings
        self._given_api = api
        self._ended: dict[str, JobStatus] = {}  # jobs that were waited for: the cluster may have forgotten them

    @cached_property
    def _api(self) -> Api:
        if self._given_api is not None:
            return self._given_api
        return connect(self._settings)

    def plan(self, spec: JobSpec) -> Objects:
        manifest = job_set(spec).manifest()
        check(manifest)
        hidden = secret(spec)
        if hidden is None:
            return [manifest]
        without_values = hidden.manifest()
        without_values["stringData"] = dict.fromkeys(without_values["stringData"], "<not shown>")
        return [manifest, without_values]

    def submit(self, spec: JobSpec) -> JobStatus:
        """A Secret is there before the JobSet, whose pods would wait for it for ever, and is given to it afterwards."""
        manifest = self.plan(spec)[0]
        submission = uuid.uuid4().hex
        hidden = secret(spec)
        if hidden is None:
            return status_of(self._create(manifest, submission), [], [])
        try:
            held = self._create_secret(hidden.manifest(), spec.name, submission)
            created = self._create(manifest, submission)
            reference = owner(spec.name, created["metadata"]["uid"]).manifest()
            change = {"uid": held["metadata"]["uid"], "ownerReferences": [reference]}
            self._api.patch_secret(held["metadata"]["name"], {"metadata": change})
        except BaseException:
            self._take_back(spec.name, submission)
            raise
        return status_of(created, [], [])

    def list(self) -> list[JobStatus]:
        jobsets, _ = self._api.list(JOBSETS, labels=OWN_SELECTOR)
        pods, _ = self._api.list(PODS, labels=OWN_SELECTOR)
        jobs, _ = self._api.list(JOBS, labels=OWN_SELECTOR)
        statuses = [
            status_of(jobset, [pod for pod in pods if is_of(pod, jobset)], [job for job in jobs if is_of(job, jobset)])
            for jobset in jobsets
        ]
        return sorted(statuses, key=lambda status: (status.created, status.name))

    def status(self, name: str) -> JobStatus:
        try:
            jobset = self._jobset(name)
        except LaunchError:
            if name in self._ended:
                return self._ended[name]
            raise
        return status_of(jobset, self._pods(jobset), self._jobs(jobset))

    def describe(self, name: str) -> Object:
        return description(self._api, self._jobset(name))

    def inspect(self, name: str) -> Object:
        return diagnosis(self._api, self._jobset(name))

    def logs(self, name: str, *, follow: bool = False, main_only: bool = False) -> Iterator[LogLine]:
        jobset = self._jobset(name)
        main = main_job(jobset)

        def wanted(pod: Object) -> bool:
            return not main_only or is_main(pod, main)

        if follow:
            return followed(self._api, jobset, wanted)
        return written_so_far(self._api, [pod for pod in self._pods(jobset) if wanted(pod)])

    def wait(self, name: str, *, timeout: float | None = None, on_event: Callable[[Event], None] | None = None) -> int:
        jobset = self._jobset(name)
        progress = Progress(jobset)
        started = time.monotonic()
        deadline = None if timeout is None else started + timeout
        changes, stop = self._feeds(jobset)
        queue, next_look = jobset["metadata"].get("labels", {}).get(QUEUE_LABEL), 0.0
        try:
            while True:
                _take_in(changes, progress, deadline)
                status = progress.status()
                if queue and status.state is JobState.SUSPENDED and time.monotonic() >= next_look:
                    progress.place = self._api.place_in_queue(queue, jobset["metadata"]["uid"])
                    next_look = time.monotonic() + _LOOK_AT_QUEUE_SECONDS
                if status.state.is_final:
                    # That it has ended may have been told before how it has: what is left is read once more.
                    progress.take_in(Change(PODS, "LISTED", tuple(self._pods(jobset))))
                    progress.take_in(Change(JOBS, "LISTED", tuple(self._jobs(jobset))))
                    status = progress.status()
                for text in progress.news():
                    if on_event is not None:
                        on_event(Event(datetime.now(UTC), text))
                if status.state.is_final:
                    return self._end(status)
                if timeout is not None and time.monotonic() - started > timeout:
                    raise waited_too_long(name, timeout)
        finally:
            stop()

    def cancel(self, name: str) -> JobStatus:
        status = self.status(name)
        self._delete(JOBSETS, name)
        if status.state.is_final:
            return status
        return replace(status, state=JobState.CANCELLED, completed=datetime.now(UTC), reason="cancelled")

    def _create(self, manifest: Object, submission: str) -> Object:
        name = manifest["metadata"]["name"]
        manifest["metadata"]["annotations"] = {SUBMISSION: submission}
        try:
            return self._api.create(JOBSETS, manifest)
        except RefusedError as error:
            if error.status != 409:
                raise
        # The server may have made it on an attempt whose answer was lost.
        found = self._jobset(name)
        if _is_from(found, submission):
            return found
        raise _taken(name)

    def _create_secret(self, manifest: Object, job: str, submission: str) -> Object:
        name = manifest["metadata"]["name"]
        manifest["metadata"]["annotations"] = {SUBMISSION: submission}
        for attempt in range(self._api.retry.attempts):
            try:
                return self._api.create(SECRETS, manifest)
            except RefusedError as error:
                if error.status != 409:
                    raise
            found = self._found(SECRETS, name)
            if found is None:
                continue
            if _is_from(found, submission):
                return found
            if self._found(JOBSETS, job) is not None:
                raise _taken(job)
            if not any(other["kind"] == "JobSet" for other in found["metadata"].get("ownerReferences", [])):
                if not OWN_LABELS.items() <= found["metadata"].get("labels", {}).items():
                    raise LaunchError(
                        f"Secret {name} is there already and belongs to no job; delete it or take another --name"
                    )
                self._delete(SECRETS, name)  # of a submission that was cut off before its job was there
                continue
            time.sleep(self._api.retry.pause_after(attempt))  # of an earlier job, about to be deleted with it
        raise LaunchError(f"Secret {name} of an earlier job of that name is still being deleted; submit again later")

    def _take_back(self, name: str, submission: str) -> None:
        """Deletes what this submission has made, as far as the server answers."""
        with suppress(LaunchError):
            for resource, its_name in ((JOBSETS, name), (SECRETS, secret_name(name))):
                found = self._found(resource, its_name)
                if found is not None and _is_from(found, submission):
                    self._delete(resource, its_name)

    def _found(self, resource: Resource, name: str) -> Object | None:
        try:
            return self._api.get(resource, name)
        except RefusedError as error:
            if error.status != 404:
                raise
        return None

    def _delete(self, resource: Resource, name: str) -> None:
        """It may have gone meanwhile."""
        try:
            self._api.delete(resource, name)
        except RefusedError as error:
            if error.status != 404:
                raise

    def _jobset(self, name: str) -> Object:
        try:
            found = self._api.get(JOBSETS, name)
        except RefusedError as error:
            if error.status != 404 or "not found" not in str(error):
                raise
            raise LaunchError(
                f"there is no job {name} in namespace {self._api.namespace}; `burnish job list` shows those that "
                "there are, and finished ones are forgotten after their --gke-ttl-after-finished"
            ) from None
        if not OWN_LABELS.items() <= found["metadata"].get("labels", {}).items():
            raise LaunchError(f"--name={name}: there is a JobSet of that name which burnish has not made; take another")
        return found

    def _pods(self, jobset: Object) -> Objects:
        return sorted(self._of(PODS, jobset), key=host_order)

    def _jobs(self, jobset: Object) -> Objects:
        return self._of(JOBS, jobset)

    def _of(self, resource: Resource, jobset: Object) -> Objects:
        found, _ = self._api.list(resource, labels=f"{JOBSET_NAME}={jobset['metadata']['name']}")
        return [item for item in found if is_of(item, jobset)]

    def _end(self, status: JobStatus) -> int:
        self._ended[status.name] = status
        if status.state is JobState.CANCELLED:
            return _CANCELLED
        return status.exit_code or (0 if status.state is JobState.SUCCEEDED else 1)

    def _feeds(self, jobset: Object) -> tuple["Queue[Change | LaunchError]", Callable[[], None]]:
        """Feeds of everything that tells of a job, running, and the function that ends them."""
        changes: Queue[Change | LaunchError] = Queue()
        name = jobset["metadata"]["name"]
        own = f"{JOBSET_NAME}={name}"
        feeds = [
            Feed(self._api, JOBSETS, changes, fields=f"metadata.name={name}"),
            Feed(self._api, PODS, changes, labels=own),
            Feed(self._api, JOBS, changes, labels=own),
            Feed(self._api, EVENTS, changes, optional=True),
        ]
        if QUEUE_LABEL in jobset["metadata"].get("labels", {}):
            feeds += [Feed(self._api, WORKLOADS, changes, optional=True)]
        for feed in feeds:
            feed.start()

        def stop() -> None:
            for feed in feeds:
                feed.stop()

        return changes, stop


def _is_from(item: Object, submission: str) -> bool:
    return item["metadata"].get("annotations", {}).get(SUBMISSION) == submission


def _taken(name: str) -> LaunchError:
    return LaunchError(
        f"--name={name}: there is a job of that name already; take another, or `burnish job cancel {name}`"
    )


def _take_in(changes: "Queue[Change | LaunchError]", progress: Progress, deadline: float | None) -> None:
    """Waits for a change and takes in those that come with it."""
    patience = 1.0 if deadline is None else min(max(deadline - time.monotonic(), 0.01), 1.0)
    try:
        change = changes.get(timeout=patience)
        latest = time.monotonic() + 5 * _SETTLE_SECONDS
        while True:
            if isinstance(change, LaunchError):
                raise change
            progress.take_in(change)
            if time.monotonic() > latest:
                return
            change = changes.get(timeout=_SETTLE_SECONDS)
    except Empty:
        return
