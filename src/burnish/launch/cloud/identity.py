"""The service account that nodes run as, its roles, and the bucket that jobs write to.

Every function makes only what is missing and can be run again. Policies are read, changed and written back with their
etag, so that a change somebody else makes at the same time is not lost.
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from burnish.launch.cloud.access import ClusterAccess, explained, needed, reason
from burnish.launch.cloud.parts import labels, workload_pool
from burnish.launch.cloud.spec import ClusterSpec
from burnish.launch.errors import LaunchError

PROJECT_ROLES = ("roles/container.defaultNodeServiceAccount", "roles/artifactregistry.reader")
BUCKET_ROLES = ("roles/storage.objectUser", "roles/storage.legacyBucketReader")
ACCOUNT_DESCRIPTION = "made by burnish cluster create"

_IAM = "https://iam.googleapis.com/v1"
_PROJECTS = "https://cloudresourcemanager.googleapis.com/v3/projects"
_ATTEMPTS = 12  # a new account is not known everywhere at once


def find_account(access: ClusterAccess, project: str, email: str) -> dict[str, Any] | None:
    """The service account as IAM describes it, or None."""
    url = f"{_IAM}/projects/{project}/serviceAccounts/{email}"
    found: dict[str, Any] | None = _call(access, project, f"service account {email}", "GET", url, absent=True)
    return found


def make_account(access: ClusterAccess, project: str, email: str, cluster: str) -> None:
    """Makes the service account; one that is there already is left as it is."""
    body = {
        "accountId": email.partition("@")[0],
        "serviceAccount": {"displayName": f"Nodes of {cluster}", "description": ACCOUNT_DESCRIPTION},
    }
    url = f"{_IAM}/projects/{project}/serviceAccounts"
    _call(access, project, f"service account {email}", "POST", url, body, conflict=True)


def delete_account(access: ClusterAccess, project: str, email: str) -> None:
    """Takes the account's project roles away and deletes it; one that is gone already is no error."""
    _change_project_policy(access, project, lambda policy: _without(policy, f"serviceAccount:{email}"))
    url = f"{_IAM}/projects/{project}/serviceAccounts/{email}"
    _call(access, project, f"service account {email}", "DELETE", url, absent=True)


def grant_project_roles(access: ClusterAccess, project: str, email: str, pause_seconds: float = 5.0) -> None:
    """Gives the nodes what every node needs: logs, metrics and the images of the project's registries."""
    member = f"serviceAccount:{email}"
    _change_project_policy(access, project, lambda policy: _with(policy, PROJECT_ROLES, member), pause_seconds)


def find_bucket(access: ClusterAccess, project: str, name: str) -> Any:
    """The bucket (storage.Bucket), or None."""
    with explained(f"bucket gs://{name}", project):
        return access.storage.lookup_bucket(name)


def make_bucket(access: ClusterAccess, spec: ClusterSpec) -> None:
    """Makes the bucket in the cluster's region: not public, and without soft delete, which would bill every old
    checkpoint for a week more."""
    assert spec.bucket is not None
    errors = needed("google.api_core.exceptions")
    bucket = access.storage.bucket(spec.bucket)
    bucket.labels = labels(spec.name)
    bucket.iam_configuration.uniform_bucket_level_access_enabled = True
    bucket.iam_configuration.public_access_prevention = "enforced"
    bucket.soft_delete_policy.retention_duration_seconds = 0
    with explained(f"bucket gs://{spec.bucket}", spec.project):
        try:
            bucket.create(location=spec.region)
        except errors.Conflict:
            if access.storage.lookup_bucket(spec.bucket) is None:  # raises Forbidden where it is another project's
                raise


def grant_bucket_roles(access: ClusterAccess, spec: ClusterSpec, pause_seconds: float = 5.0) -> None:
    """Lets the nodes' account, and the pods of this cluster by workload identity, read and write the bucket.

    Pods of the host's network act as the node's account, all others as themselves; so both get the roles.
    """
    errors = needed("google.api_core.exceptions")
    members = (f"serviceAccount:{spec.node_account}", _pods(access, spec))
    bucket = access.storage.bucket(spec.bucket)
    for attempt in range(1, _ATTEMPTS + 1):
        with explained(f"roles on gs://{spec.bucket}", spec.project):
            policy = bucket.get_iam_policy(requested_policy_version=3)
            policy.version = 3
            before = [{**binding, "members": sorted(binding["members"])} for binding in policy.bindings]
            after = _with({"bindings": before}, BUCKET_ROLES, *members)["bindings"]
            if after == before:
                return
            policy.bindings = after
            try:
                bucket.set_iam_policy(policy)
                return
            except (errors.PreconditionFailed, errors.Conflict, errors.BadRequest) as error:
                known = not isinstance(error, errors.BadRequest) or "does not exist" in str(error.message)
                if attempt == _ATTEMPTS or not known:
                    raise
        time.sleep(pause_seconds)


def delete_bucket(access: ClusterAccess, project: str, name: str, say: Callable[[str], None]) -> None:
    """Deletes the bucket with everything in it; one that is gone already is no error."""
    errors = needed("google.api_core.exceptions")
    bucket = access.storage.bucket(name)

    def delete(blob: Any) -> None:
        with contextlib.suppress(errors.NotFound):
            blob.delete()

    with explained(f"bucket gs://{name}", project):
        try:
            with ThreadPoolExecutor(16) as workers:
                count = sum(1 for _ in workers.map(delete, bucket.list_blobs(versions=True)))
            say(f"bucket gs://{name}: {count} objects deleted")
            bucket.delete()
        except errors.NotFound:
            say(f"bucket gs://{name}: gone already")


def _pods(access: ClusterAccess, spec: ClusterSpec) -> str:
    """IAM's name for all pods of the cluster."""
    answer = _call(access, spec.project, f"project {spec.project}", "GET", f"{_PROJECTS}/{spec.project}")
    number = answer["name"].rpartition("/")[2]
    cluster = f"projects/{spec.project}/locations/{spec.location}/clusters/{spec.name}"
    return (
        f"principalSet://iam.googleapis.com/projects/{number}/locations/global/workloadIdentityPools/"
        f"{workload_pool(spec.project)}/kubernetes.cluster/https://container.googleapis.com/v1/{cluster}"
    )


def _change_project_policy(
    access: ClusterAccess,
    project: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    pause_seconds: float = 5.0,
) -> None:
    what = f"IAM policy of project {project}"
    for attempt in range(1, _ATTEMPTS + 1):
        asked = {"options": {"requestedPolicyVersion": 3}}
        policy = _call(access, project, what, "POST", f"{_PROJECTS}/{project}:getIamPolicy", asked)
        changed = change(policy)
        if changed == policy:
            return
        body = {"policy": changed | {"version": 3}}
        done = _call(
            access,
            project,
            what,
            "POST",
            f"{_PROJECTS}/{project}:setIamPolicy",
            body,
            conflict=True,
            unknown_member=attempt < _ATTEMPTS,
        )
        if done is not None:
            return
        time.sleep(pause_seconds)
    raise LaunchError(f"{what}: somebody else changes it all the time; run the command again")


def _with(policy: dict[str, Any], roles: tuple[str, ...], *members: str) -> dict[str, Any]:
    """The policy with the members in the roles, unconditionally."""
    bindings = [dict(binding) for binding in policy.get("bindings", [])]
    for role in roles:
        plain = next((b for b in bindings if b["role"] == role and not b.get("condition")), None)
        if plain is None:
            bindings.append({"role": role, "members": sorted(members)})
        elif missing := sorted(set(members) - set(plain["members"])):
            plain["members"] = [*plain["members"], *missing]
    return {**policy, "bindings": bindings}


def _without(policy: dict[str, Any], member: str) -> dict[str, Any]:
    """The policy without the member; bindings that have nobody left go."""
    bindings = [{**b, "members": [m for m in b["members"] if m != member]} for b in policy.get("bindings", [])]
    changed = {**policy, "bindings": [binding for binding in bindings if binding["members"]]}
    return changed if bindings else policy


def _call(
    access: ClusterAccess,
    project: str,
    what: str,
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    *,
    absent: bool = False,
    conflict: bool = False,
    unknown_member: bool = False,
) -> Any:
    """The JSON that a REST call answers. None where the thing is not there (`absent`), was made or changed by
    somebody else (`conflict`), or names a new account that is not known everywhere yet (`unknown_member`), as far as
    these are asked for; anything else but success is a LaunchError."""
    with explained(what, project):
        response = access.session.request(method, url, json=body, timeout=60)
    if response.ok:
        return response.json()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    if (absent and response.status_code == 404) or (conflict and response.status_code == 409):
        return None
    if unknown_member and response.status_code == 400 and "does not exist" in message:
        return None
    raise LaunchError(f"{what}: {reason(message, project, response.status_code)}")
