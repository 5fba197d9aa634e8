"""What the tests of clusters and machines share: the things of both workflows, and a cloud as one object."""

from dataclasses import dataclass, field
from typing import Any

from burnish.launch.cloud import cluster
from burnish.launch.cloud.access import ClusterAccess, VmAccess
from burnish.launch.cloud.spec import Capacity, ClusterSpec, VmSpec

PATH = "projects/my-project/locations/us-east5-b/clusters/rl"
ACCOUNT = "rl-nodes@my-project.iam.gserviceaccount.com"


@dataclass
class Cloud:
    gke: Any
    rest: Any
    api: Any
    access: ClusterAccess
    vms: VmAccess
    said: list[str] = field(default_factory=list)

    @property
    def manifests(self) -> dict[str, Any]:
        return installs()

    def create(self, spec: ClusterSpec) -> None:
        cluster.create(spec, self.access, self.manifests, self.said.append, PAUSES)

    def states(self, spec: ClusterSpec) -> dict[str, str]:
        return {part.name: str(part.state) for part in cluster.survey(spec, self.access)}

    @property
    def changes(self) -> list[str]:
        return [*self.gke.calls, *self.rest.calls, *self.api.applied]


PAUSES = cluster.Pauses(operation=0.005, policy=0.005, api=0.005)


def installs() -> dict[str, Any]:
    """What stands for the released manifests of JobSet and Kueue."""
    from fake_kubernetes import definition, release

    kueue = [
        definition("kueue.x-k8s.io", kind, "v1beta2", kind == "LocalQueue")
        for kind in ("ResourceFlavor", "ClusterQueue", "LocalQueue")
    ]
    jobset = [definition("jobset.x-k8s.io", "JobSet", "v1alpha2", True)]
    return {
        "JobSet": release("jobset", "v0.12.0", "jobset-system", "jobset-controller-manager", jobset),
        "Kueue": release("kueue", "v0.19.2", "kueue-system", "kueue-controller-manager", kueue),
    }


def cluster_spec(**changed: Any) -> ClusterSpec:
    """The cluster of workflow B."""
    given = {
        "name": "rl",
        "project": "my-project",
        "location": "us-east5-b",
        "zone": "us-east5-b",
        "compute_type": "ct6e-standard-4t",
        "topology": "4x8",
        "capacity": Capacity.RESERVATION,
        "reservation": "my-reservation",
        "authorized_cidr": ("203.0.113.7/32",),
        "bucket": "my-bucket",
    }
    return ClusterSpec(**given | changed)


def vm_spec(**changed: Any) -> VmSpec:
    """The machine of workflow A."""
    given = {
        "name": "vm",
        "project": "my-project",
        "zone": "us-east5-b",
        "capacity": Capacity.RESERVATION,
        "reservation": "my-reservation",
    }
    return VmSpec(**given | changed)
