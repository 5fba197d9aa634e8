"""Groups of options of the `burnish cluster` and `burnish vm` commands.

Here is only what each option is called, its type and its meaning; what fits together is checked by
launch.cloud.spec, so that the same errors meet whoever makes a cluster or a machine.
"""

from typing import ClassVar

from burnish.config.fields import Options, option
from burnish.config.groups import NameList
from burnish.config.jobs import JobOutputOptions

_SETTINGS = "what `burnish job config set` says"


class ProjectOptions(JobOutputOptions):
    section: ClassVar[str] = "Where"

    project: str | None = option(None, "Google Cloud project, by its id", default_words=_SETTINGS)


class ConfirmOptions(Options):
    section: ClassVar[str] = "Output"

    yes: bool = option(False, "Do not ask before anything is made or deleted", short="y")


class ClusterNameOptions(Options):
    section: ClassVar[str] = "Cluster"

    name: str | None = option(
        None,
        "Name of the cluster: a lower-case letter, then lower-case letters, digits and '-', 20 characters at most",
        default_words="the cluster that `burnish job config set` says",
    )


class ClusterPlaceOptions(ClusterNameOptions, ProjectOptions):
    section: ClassVar[str] = "Where"

    location: str | None = option(
        None,
        "Zone of the cluster, or a region, which keeps its control plane in several zones",
        default_words=_SETTINGS,
    )


class CapacityOptions(Options):
    """Where hosts with TPUs come from."""

    section: ClassVar[str] = "Hosts"

    reservation: str | None = option(
        None,
        "Reservation that the hosts come from; projects/PROJECT/reservations/NAME for one of another project",
        default_words="none: on demand",
    )
    spot: bool = option(False, "Take spot capacity: cheaper, and taken away when others need it")
    flex_start: bool = option(False, "Wait in Google's queue for hosts that stay for a limited time")
    max_run_duration: str | None = option(
        None, "How long a host of flex_start stays, such as 12h or 7d", default_words="7 days"
    )
    price_per_chip_hour: float | None = option(
        None, "What a chip costs you an hour, in your currency, for an estimate", default_words="no estimate", gt=0
    )


class NetworkOptions(Options):
    section: ClassVar[str] = "Network"

    network: str = option("default", "VPC network")
    subnetwork: str | None = option(None, "Subnetwork of it", default_words="that of the region")


class ClusterNodesOptions(CapacityOptions):
    section: ClassVar[str] = "Hosts"

    zone: str | None = option(None, "Zone of the slices", default_words="location, where that is a zone")
    compute_type: str = option(..., "Machine type of a TPU host (ct6e-standard-4t has 4 chips), or a TPU type (v6e-32)")
    topology: str | None = option(
        None, "Shape of a slice in chips, such as 4x8", default_words="that of the TPU type, if one is given"
    )
    num_slices: int = option(1, "Slices, each a node pool of its own", unit="slices")
    system_machine_type: str = option("e2-standard-8", "Machine type of the nodes that the controllers run on")
    system_zones: NameList = option(
        (), "Zones of these nodes, one node in each, separated by commas", default_words="the zone of the slices"
    )
    head_machine_type: str = option(
        "n2-standard-64",
        "Machine type of the nodes for Pathways heads and CPU jobs; a head asks for 24 CPUs and 132 GiB by default",
    )
    head_max_nodes: int = option(1, "Most nodes of that kind; there are none while no job needs one", unit="nodes")


class ClusterAccessOptions(NetworkOptions):
    section: ClassVar[str] = "Network"

    authorized_cidr: NameList = option(
        (),
        "Ranges of addresses that may reach the cluster's API server, such as 203.0.113.7/32, separated by commas",
        default_words="every address, with credentials",
    )


class ClusterPartsOptions(Options):
    section: ClassVar[str] = "Cluster"

    bucket: str | None = option(
        None, "Bucket that jobs may write to; made if missing", default_words="none is made or opened to the nodes"
    )
    service_account: str | None = option(
        None,
        "E-mail address of the service account that nodes run as, whose roles you see to",
        default_words="NAME-nodes, made with the roles that nodes need",
    )
    namespace: str | None = option(
        None, "Kubernetes namespace that the queue is in", default_words=f"{_SETTINGS}, or default"
    )
    queue: str = option("burnish", "Name of the queue (Kueue) that jobs are submitted to")
    release_channel: str = option("regular", "How early GKE's new versions come: rapid, regular or stable")
    jobset_manifest: str | None = option(
        None, "File to install JobSet from", default_words="the release, downloaded and checked"
    )
    kueue_manifest: str | None = option(
        None,
        "File to install Kueue from; its API kueue.x-k8s.io/v1beta2 is used",
        default_words="the release, downloaded and checked",
    )


class DryRunOptions(Options):
    section: ClassVar[str] = "Output"

    dry_run: bool = option(False, "Print what would be made and what would be sent; ask nobody, send nothing")


class VmNameOptions(ProjectOptions):
    section: ClassVar[str] = "Machine"

    name: str = option(..., "Name of the machine: a lower-case letter, then lower-case letters, digits and '-'")
    zone: str | None = option(
        None, "Zone of the machine", default_words="the location that `burnish job config set` says"
    )


class VmMachineOptions(CapacityOptions, NetworkOptions):
    section: ClassVar[str] = "Machine"

    machine_type: str = option("ct6e-standard-8t", "Machine type: ct6e-standard-8t has 8 chips of TPU v6e")
    image_family: str = option("ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e", "Image family of the boot disk")
    image_project: str = option("ubuntu-os-accelerator-images", "Project that the image family is in")
    boot_disk_gb: int = option(200, "Size of the boot disk", unit="GB")
    ssh_user: str | None = option(
        None, "Linux user that ssh_public_key_file is for", default_words="none: gcloud puts your key there"
    )
    ssh_public_key_file: str | None = option(
        None, "File of your public SSH key, to reach the machine without gcloud", default_words="none"
    )
