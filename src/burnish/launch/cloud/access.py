"""The clients of Google Cloud, opened with Application Default Credentials, and their errors in words.

Service accounts and project roles have no client among the packages of the extra `gke`: for these two the REST
interface of IAM and Resource Manager is called through google-auth's AuthorizedSession, which needs no package more.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from burnish.launch.errors import LaunchError

_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
LOGIN = (
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the file of a service "
    "account's key"
)


@dataclass(frozen=True)
class ClusterAccess:
    """What clusters are made with."""

    clusters: Any  # container_v1.ClusterManagerClient
    storage: Any  # storage.Client
    session: Any  # AuthorizedSession, for IAM and Resource Manager
    credentials: Any  # for the cluster's own API server


@dataclass(frozen=True)
class VmAccess:
    """What virtual machines are made with."""

    instances: Any  # compute_v1.InstancesClient
    operations: Any  # compute_v1.ZoneOperationsClient


def cluster_access(project: str) -> ClusterAccess:
    """Raises LaunchError where a package or the credentials are missing."""
    container = needed("google.cloud.container_v1")
    storage = needed("google.cloud.storage")
    requests = needed("google.auth.transport.requests")
    account = credentials()
    return ClusterAccess(
        clusters=container.ClusterManagerClient(credentials=account),
        storage=storage.Client(project=project, credentials=account),
        session=requests.AuthorizedSession(account),
        credentials=account,
    )


def vm_access() -> VmAccess:
    """Raises LaunchError where a package or the credentials are missing."""
    compute = needed("google.cloud.compute_v1")
    account = credentials()
    return VmAccess(
        instances=compute.InstancesClient(credentials=account),
        operations=compute.ZoneOperationsClient(credentials=account),
    )


def needed(module: str) -> Any:
    """A module of the extra `gke`. Raises LaunchError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # "google" alone would say little: many packages lie below it.
        missing = module if f"{module}.".startswith(f"{error.name}.") else error.name
        raise LaunchError(f"{missing} is not installed; pip install 'burnish[gke]'") from None


def credentials() -> Any:
    """The Application Default Credentials. Raises LaunchError with the command that makes them."""
    auth = needed("google.auth")
    try:
        found, _ = auth.default(scopes=_SCOPES)
    except auth.exceptions.DefaultCredentialsError as error:
        raise LaunchError(f"no credentials for Google Cloud: {_first_line(error)}; {LOGIN}") from None
    return found


@contextmanager
def explained(what: str, project: str) -> Iterator[None]:
    """Turns an error of a Google client into a LaunchError that says what failed and what would mend it."""
    auth = needed("google.auth.exceptions")
    errors = needed("google.api_core.exceptions")
    requests = needed("requests")
    try:
        yield
    except auth.GoogleAuthError as error:
        raise LaunchError(f"{what}: the credentials were not accepted: {_first_line(error)}; {LOGIN}") from None
    except errors.GoogleAPICallError as error:
        raise LaunchError(f"{what}: {reason(str(error.message), project, error.code)}") from None
    except (errors.RetryError, requests.ConnectionError, requests.Timeout) as error:
        raise LaunchError(
            f"{what}: Google Cloud cannot be reached: {_first_line(error)}; what was begun there goes on, the same "
            "command continues from it"
        ) from None


def reason(message: str, project: str, code: int | None = None) -> str:
    """What Google Cloud said, and what the user can do about it. `code` is an HTTP status."""
    message = " ".join(message.split()).rstrip(".")
    lower = message.lower()
    if "has not been used in project" in lower or "it is disabled" in lower or "service_disabled" in lower:
        return f"{message}. Enable that API for project {project}, wait a minute and run the command again"
    if code in (401, 403) and "quota" not in lower:
        return (
            f"{message}. The account of the Application Default Credentials lacks a role in project {project}: "
            "roles/container.admin for clusters, roles/compute.instanceAdmin.v1 for virtual machines, "
            "roles/iam.serviceAccountAdmin, roles/iam.serviceAccountUser and roles/resourcemanager.projectIamAdmin "
            "for the nodes' service account, roles/storage.admin for the bucket"
        )
    if "quota" in lower:
        return (
            f"{message}. Ask for more quota at https://console.cloud.google.com/iam-admin/quotas?project={project}, or "
            "take a smaller slice, another zone or another kind of capacity"
        )
    if any(word in lower for word in ("stockout", "resource_pool_exhausted", "does not have enough resources")):
        return (
            f"{message}. The zone has no such machines free now: run the command again later, or take another zone, "
            "--flex-start or a reservation"
        )
    if "reservation" in lower:
        return f"{message}. Look at the reservation's zone, machine type, free count and whom it is shared with"
    return message


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
