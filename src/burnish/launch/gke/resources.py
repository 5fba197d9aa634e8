"""The kinds of objects that burnish asks a cluster for, and how a change of some is told."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Resource:
    """A kind of objects: `plural` of the core API, or of a group."""

    plural: str
    group: str = ""
    version: str = "v1"

    @property
    def singular(self) -> str:
        return self.plural.removesuffix("s")


PODS = Resource("pods")
EVENTS = Resource("events")
SECRETS = Resource("secrets")
NODES = Resource("nodes")
JOBS = Resource("jobs", "batch", "v1")
JOBSETS = Resource("jobsets", "jobset.x-k8s.io", "v1alpha2")
WORKLOADS = Resource("workloads", "kueue.x-k8s.io", "v1beta2")


@dataclass(frozen=True)
class Change:
    """LISTED: `items` is all there is. ADDED, MODIFIED, DELETED: of one item. AWAY: the server does not answer,
    `text` says how. DENIED: these objects cannot be had, and none will come."""

    resource: Resource
    kind: Literal["LISTED", "ADDED", "MODIFIED", "DELETED", "AWAY", "DENIED"]
    items: tuple[dict[str, Any], ...] = ()
    text: str = ""
