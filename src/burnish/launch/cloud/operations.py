"""GKE's long operations: found, waited for with a line now and then, and explained where they failed.

An operation lives in Google Cloud: who stops waiting loses nothing, and the next run finds it again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from burnish.launch.cloud.access import explained, needed, reason
from burnish.launch.errors import LaunchError
from burnish.observe.summary import duration

Say = Callable[[str], None]

REPORT_SECONDS = 30.0
MAX_SECONDS = 3 * 3600.0
_ATTEMPTS = 20


@dataclass(frozen=True)
class Waiter:
    """Waits for the operations of one project and location."""

    clusters: Any  # container_v1.ClusterManagerClient
    project: str
    location: str
    say: Say
    poll_seconds: float = 5.0

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.location}"

    def in_flight(self, cluster: str) -> list[Any]:
        """Operations (container_v1.Operation) on the cluster or its pools that have not ended."""
        with explained(f"operations in {self.location}", self.project):
            response = self.clusters.list_operations(request={"parent": self.parent})
        return [
            operation
            for operation in response.operations
            if operation.status.name != "DONE" and cluster in _cluster_of(operation.target_link)
        ]

    def finish_others(self, cluster: str) -> None:
        """Waits for what is already under way; how it ends shows in the state of the cluster and its pools."""
        for operation in self.in_flight(cluster):
            words = operation.operation_type.name.lower().replace("_", " ")
            target = operation.target_link.rpartition("/")[2]
            self.wait(operation, f"{target}: {words}, begun before", must_succeed=False)

    def wait(self, operation: Any, what: str, *, must_succeed: bool = True) -> None:
        """Waits until the operation has ended. Raises LaunchError saying why it failed."""
        name = f"{self.parent}/operations/{operation.name}"
        start = reported = time.monotonic()
        self.say(f"{what} …")
        while operation.status.name != "DONE":
            if time.monotonic() - start > MAX_SECONDS:
                raise LaunchError(
                    f"{what}: not done after {duration(MAX_SECONDS)}; it goes on in Google Cloud, the same command "
                    "waits for it again"
                )
            time.sleep(self.poll_seconds)
            with explained(what, self.project):
                operation = self.clusters.get_operation(request={"name": name})
            if time.monotonic() - reported >= REPORT_SECONDS and operation.status.name != "DONE":
                reported = time.monotonic()
                detail = f" ({operation.detail})" if operation.detail else ""
                self.say(f"{what} … {duration(reported - start)}{detail}")
        message = operation.error.message or operation.status_message
        if operation.error.code or message:
            text = f"{what} failed: {reason(message, self.project)}"
            if must_succeed:
                raise LaunchError(text)
            self.say(text)
        else:
            self.say(f"{what}: done after {duration(time.monotonic() - start)}")

    def run(self, start: Callable[[], Any], what: str, cluster: str, *, deletes: bool = False) -> None:
        """Begins an operation and waits for it. Raises LaunchError saying why it failed."""
        operation = self.begin(start, what, cluster, deletes=deletes)
        if operation is not None:
            self.wait(operation, what)

    def begin(self, start: Callable[[], Any], what: str, cluster: str, *, deletes: bool = False) -> Any:
        """Begins an operation; where GKE says that another one is in its way, after that one. None where somebody
        else has begun or done the same in between, which then has been waited for."""
        errors = needed("google.api_core.exceptions")
        done_by_others = errors.NotFound if deletes else errors.AlreadyExists
        attempts = 0
        while True:
            with explained(what, self.project):
                try:
                    return start()
                except done_by_others:
                    self.finish_others(cluster)
                    return None
                except errors.FailedPrecondition as error:
                    attempts += 1
                    if "incompatible operation" not in str(error.message).lower() or attempts == _ATTEMPTS:
                        raise
            self.finish_others(cluster)
            time.sleep(self.poll_seconds)


def _cluster_of(target_link: str) -> list[str]:
    """The names behind `clusters` in the address of an operation's target: one, or none."""
    parts = target_link.split("/")
    return [parts[i + 1] for i, part in enumerate(parts[:-1]) if part == "clusters"]
