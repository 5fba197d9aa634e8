"""JobSet and Kueue: their released manifests, checked against a known checksum, put into a cluster and waited for.

Objects are applied server-side, so that putting the same release in again changes nothing, and what the controllers
themselves have written into their objects (certificates) stays.
"""

import base64
import hashlib
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from burnish.launch.cloud.access import explained, needed
from burnish.launch.errors import LaunchError
from burnish.observe.summary import duration

FIELD_MANAGER = "burnish"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Release:
    """A controller's released manifest."""

    name: str
    version: str
    repository: str
    sha256: str
    namespace: str
    deployment: str

    @property
    def url(self) -> str:
        return f"https://github.com/{self.repository}/releases/download/{self.version}/manifests.yaml"

    @property
    def flag(self) -> str:
        return f"--{self.name.lower()}-manifest"


JOBSET = Release(
    "JobSet",
    "v0.12.0",
    "kubernetes-sigs/jobset",
    "a41aaf12dd0b7b0a3d626b8d6107f32c3dc889d7e7830adc46b8cdb77a8963bb",
    "jobset-system",
    "jobset-controller-manager",
)
KUEUE = Release(
    "Kueue",
    "v0.19.2",
    "kubernetes-sigs/kueue",
    "88881eb50734eb920b67486ebc2aa978ed325e1b12d99b22fc51a6d7e9e4d370",
    "kueue-system",
    "kueue-controller-manager",
)


def read_manifest(release: Release, file: str | None) -> list[dict[str, Any]]:
    """The objects of the user's manifest file, or of the release, downloaded and checked.

    Raises LaunchError where it cannot be had or is not what it should be.
    """
    if file is not None:
        source = f"{release.flag}={file}"
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            raise LaunchError(f"{source}: cannot be read: {error.strerror}") from None
    else:
        source = release.url
        try:
            with urllib.request.urlopen(release.url, timeout=60) as response:
                data = response.read()
        except (urllib.error.URLError, OSError) as error:
            raise LaunchError(
                f"{source}: cannot be downloaded: {getattr(error, 'reason', error)}; download it elsewhere and give it "
                f"with {release.flag}=FILE"
            ) from None
        found = hashlib.sha256(data).hexdigest()
        if found != release.sha256:
            raise LaunchError(
                f"{source}: its SHA-256 is {found}, expected was {release.sha256}; nothing was installed. Look at the "
                f"file, and give it with {release.flag}=FILE if it is right"
            )
    try:
        documents = list(yaml.load_all(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise LaunchError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    objects = [document for document in documents if document]
    for item in objects:
        if not isinstance(item, dict) or not {"apiVersion", "kind", "metadata"} <= item.keys():
            raise LaunchError(f"{source}: not a Kubernetes manifest: an object without apiVersion, kind or metadata")
    if not any(item["kind"] == "Deployment" for item in objects):
        raise LaunchError(f"{source}: there is no Deployment in it; {release.name}'s release has one")
    return objects


@contextmanager
def api_client(cluster: Any, credentials: Any, project: str) -> Iterator[Any]:
    """The official client (kubernetes.client.ApiClient) of a cluster (container_v1.Cluster)."""
    configuration = api_configuration(cluster, credentials, project)
    configuration.retries = 2
    with needed("kubernetes.client").ApiClient(configuration) as client:
        yield client


def api_configuration(cluster: Any, credentials: Any, project: str) -> Any:
    """How a cluster's API server is reached (kubernetes.client.Configuration); tokens are renewed as they expire."""
    kubernetes = needed("kubernetes.client")
    transport = needed("google.auth.transport.requests")

    def put_token(configuration: Any) -> None:
        if not credentials.valid:
            credentials.refresh(transport.Request())
        configuration.api_key["authorization"] = f"Bearer {credentials.token}"

    configuration = kubernetes.Configuration(host=f"https://{cluster.endpoint}")
    configuration.ca_cert_data = base64.b64decode(cluster.master_auth.cluster_ca_certificate).decode()
    configuration.refresh_api_key_hook = put_token
    with explained("credentials", project):
        put_token(configuration)
    return configuration


@contextmanager
def api_explained(what: str, location: str) -> Iterator[None]:
    """Turns errors of the Kubernetes client into a LaunchError."""
    exceptions = needed("kubernetes.client.exceptions")
    urllib3 = needed("urllib3.exceptions")
    try:
        yield
    except exceptions.ApiException as error:
        raise LaunchError(f"{what}: {_api_message(error)}") from None
    except urllib3.HTTPError as error:
        raise LaunchError(
            f"{what}: the cluster's API server in {location} cannot be reached ({type(error).__name__}); this "
            "machine's address has to be in --authorized-cidr"
        ) from None


def deployed_version(client: Any, release: Release, location: str) -> str | None:
    """The tag of the controller's image where the controller is there and available; None otherwise."""
    kubernetes = needed("kubernetes.client")
    exceptions = needed("kubernetes.client.exceptions")
    with api_explained(release.name, location):
        try:
            found = kubernetes.AppsV1Api(client).read_namespaced_deployment(release.deployment, release.namespace)
        except exceptions.ApiException as error:
            if error.status == 404:
                return None
            raise
    if not found.status.available_replicas:
        return None
    images = [container.image for container in found.spec.template.spec.containers]
    return next((image.rpartition(":")[2] for image in images if release.name.lower() in image), None)


def holds(client: Any, objects: Iterable[dict[str, Any]], location: str) -> bool:
    """Whether the Kueue objects among these are all in the cluster, with the same spec where theirs says something."""
    kubernetes = needed("kubernetes.client")
    exceptions = needed("kubernetes.client.exceptions")
    api = kubernetes.CustomObjectsApi(client)
    for item in objects:
        group, _, version = item["apiVersion"].rpartition("/")
        if not group:
            continue
        plural, metadata = f"{item['kind'].lower()}s", item["metadata"]
        with api_explained(f"{item['kind']} {metadata['name']}", location):
            try:
                if "namespace" in metadata:
                    found = api.get_namespaced_custom_object(
                        group, version, metadata["namespace"], plural, metadata["name"]
                    )
                else:
                    found = api.get_cluster_custom_object(group, version, plural, metadata["name"])
            except exceptions.ApiException as error:
                if error.status == 404:
                    return False
                raise
        if any(found.get("spec", {}).get(key) != value for key, value in item["spec"].items()):
            return False
    return True


def apply(
    client: Any, objects: Iterable[dict[str, Any]], location: str, *, patience: float = 180.0, pause: float = 3.0
) -> None:
    """Applies the objects in order. A webhook that does not answer yet, or a kind that is not known yet, is tried
    again for `patience` seconds."""
    dynamic = needed("kubernetes.dynamic")
    missing = needed("kubernetes.dynamic.exceptions").ResourceNotFoundError
    api_error = needed("kubernetes.client.exceptions").ApiException
    urllib3 = needed("urllib3.exceptions")
    deadline = time.monotonic() + patience
    with tempfile.TemporaryDirectory(prefix="burnish-") as directory:
        with api_explained("API server", location):
            kinds = dynamic.DynamicClient(client, cache_file=f"{directory}/kinds.json")
        for item in objects:
            metadata = item["metadata"]
            what = f"{item['kind']} {metadata['name']}"
            while True:
                with api_explained(what, location):
                    try:
                        resource = kinds.resources.get(api_version=item["apiVersion"], kind=item["kind"])
                        resource.server_side_apply(
                            body=item,
                            name=metadata["name"],
                            namespace=metadata.get("namespace", "default") if resource.namespaced else None,
                            field_manager=FIELD_MANAGER,
                            force_conflicts=True,
                        )
                        break
                    except missing:
                        if time.monotonic() > deadline:
                            raise LaunchError(
                                f"{what}: the cluster does not know {item['apiVersion']} {item['kind']}"
                            ) from None
                    except api_error as error:
                        starting = error.status == 500 and "webhook" in _api_message(error)
                        if not (starting or error.status in (429, 503)) or time.monotonic() > deadline:
                            raise
                    except urllib3.HTTPError:  # the control plane of a young cluster is resized, and away for a moment
                        if time.monotonic() > deadline:
                            raise
                time.sleep(pause)


def wait_available(
    client: Any,
    objects: Iterable[dict[str, Any]],
    location: str,
    say: Say,
    *,
    patience: float = 600.0,
    pause: float = 3.0,
) -> None:
    """Waits until the Deployments among the objects are available. Raises LaunchError saying why one is not."""
    kubernetes = needed("kubernetes.client")
    apps = kubernetes.AppsV1Api(client)
    start = reported = time.monotonic()
    for item in objects:
        if item["kind"] != "Deployment":
            continue
        name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
        while True:
            with api_explained(f"deployment {name}", location):
                status = apps.read_namespaced_deployment(name, namespace).status
            conditions = {condition.type: condition for condition in status.conditions or []}
            if "Available" in conditions and conditions["Available"].status == "True":
                break
            why = "; ".join(c.message for c in conditions.values() if c.status != "True" and c.message)
            if time.monotonic() - start > patience:
                raise LaunchError(
                    f"deployment {name} in {namespace} is not available after {duration(patience)}"
                    f"{': ' + why if why else ''}; run the command again, or look at its pods"
                )
            if time.monotonic() - reported > 30:
                reported = time.monotonic()
                say(f"deployment {name} … {duration(reported - start)}{' (' + why + ')' if why else ''}")
            time.sleep(pause)


def _api_message(error: Any) -> str:
    """What the API server said, in one line."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason or ""
    return f"{' '.join(str(message).split())} ({error.status})"
