"""Which API server the settings mean: a GKE cluster's, asked for from Google Cloud, or the one of a kubeconfig.

A GKE cluster is reached with Application Default Credentials, without gcloud and kubectl. Where no cluster is set, the
current context of $KUBECONFIG or ~/.kube/config is taken: any Kubernetes with JobSet will do.
"""

import os
from typing import Any

from burnish.launch.cloud.access import credentials, explained, needed
from burnish.launch.cloud.controllers import api_configuration
from burnish.launch.errors import LaunchError
from burnish.launch.gke.api import Api
from burnish.launch.settings import Settings


def connect(settings: Settings) -> Api:
    """Raises LaunchError where a setting, a package, the credentials or the cluster is missing."""
    if settings.cluster is None:
        return Api(_kubeconfig(), settings.resolved_namespace)
    project, location = settings.require("project"), settings.require("location")
    account = credentials()
    clusters = needed("google.cloud.container_v1").ClusterManagerClient(credentials=account)
    found = find_cluster(clusters, project, location, settings.cluster)
    return Api(api_configuration(found, account, project), settings.resolved_namespace)


def find_cluster(clusters: Any, project: str, location: str, name: str) -> Any:
    """The running cluster (container_v1.Cluster) of that name. Raises LaunchError, naming those that there are."""
    not_found = needed("google.api_core.exceptions").NotFound
    parent = f"projects/{project}/locations/{location}"
    with explained(f"cluster {name}", project):
        try:
            found = clusters.get_cluster(name=f"{parent}/clusters/{name}")
        except not_found:
            there = sorted(other.name for other in clusters.list_clusters(parent=parent).clusters)
            words = f"there are {', '.join(there)}" if there else "there is none there"
            raise LaunchError(
                f"--cluster={name}: no such cluster in {location} of project {project}; {words}; "
                "`burnish job config set cluster NAME` sets another"
            ) from None
    status = needed("google.cloud.container_v1").Cluster.Status(found.status).name
    if status not in ("RUNNING", "RECONCILING", "DEGRADED"):
        raise LaunchError(f"--cluster={name}: the cluster is {status}; `burnish cluster describe` shows more")
    return found


def _kubeconfig() -> Any:
    config = needed("kubernetes.config")
    configuration = needed("kubernetes.client").Configuration()
    file = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        config.load_kube_config(config_file=file, client_configuration=configuration)
    except config.ConfigException as error:
        raise LaunchError(
            "no cluster is set, and there is no kubeconfig to take one from "
            f"({' '.join(str(error).split()).rstrip('.')}); run `burnish job config set cluster NAME`, "
            "and the same for project and location; jobs of this machine are meant with --backend=local"
        ) from None
    return configuration
