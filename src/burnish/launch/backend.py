"""What runs jobs: the interface that the local and the GKE backend share, and how one is opened."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from burnish.launch.job import Event, JobSpec, JobStatus, LogLine
from burnish.launch.settings import Settings


class Backend(Protocol):
    """Runs jobs. Every method that names a job raises LaunchError where there is none of that name."""

    def plan(self, spec: JobSpec) -> list[dict[str, Any]]:
        """What `submit` would start or send, as documents of JSON values (on GKE, manifests); of secrets only the
        names. Raises LaunchError as `submit` does for what can be known here; starts, sends and asks nothing."""
        ...

    def submit(self, spec: JobSpec) -> JobStatus:
        """Starts the job. Raises LaunchError where the name is taken or the backend cannot do what is asked."""
        ...

    def list(self) -> list[JobStatus]:
        """All jobs, oldest first."""
        ...

    def status(self, name: str) -> JobStatus: ...

    def describe(self, name: str) -> dict[str, Any]:
        """What the job is, its state, its hosts and its events, as JSON values without secrets."""
        ...

    def logs(self, name: str, *, follow: bool = False, main_only: bool = False) -> Iterator[LogLine]:
        """The output so far; with `follow` also what comes, through restarts, until the job has ended. `main_only`
        leaves out all but the first host of the first slice (with Pathways, the head)."""
        ...

    def wait(self, name: str, *, timeout: float | None = None, on_event: Callable[[Event], None] | None = None) -> int:
        """Waits until the job has ended; events are passed on as they happen. Returns the exit code of the process
        that decided: 0 when the job succeeded, never 0 when it failed or was cancelled. `timeout` in seconds; raises
        LaunchError with exit code 124 after it, and leaves the job alone."""
        ...

    def cancel(self, name: str) -> JobStatus:
        """Ends the job if it runs, and frees its name."""
        ...

    def inspect(self, name: str) -> dict[str, Any]:
        """All that helps to find out why a job does not do what it should, as JSON values without secrets."""
        ...


def open_backend(settings: Settings) -> Backend:
    """The backend that the settings name. Its packages are imported only now."""
    if settings.resolved_backend == "local":
        from burnish.launch.local.backend import LocalBackend

        return LocalBackend()
    from burnish.launch.gke.backend import GkeBackend

    return GkeBackend(settings)
