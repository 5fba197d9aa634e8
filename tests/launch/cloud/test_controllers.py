"""Manifests are checked before they are used; controllers are installed over TLS, with the right token, in order."""

import hashlib
import http.server
import threading
from dataclasses import replace

import pytest
import yaml

pytest.importorskip("grpc")
from cloud_setup import PATH, cluster_spec, installs

from burnish.launch.cloud import cluster, controllers, parts
from burnish.launch.cloud.controllers import JOBSET, KUEUE
from burnish.launch.errors import LaunchError


@pytest.fixture
def client(cloud):
    """The official client of a cluster that has been made, its API server still empty."""
    spec = cluster_spec(bucket=None)
    waiter = cluster.Waiter(cloud.access.clusters, spec.project, spec.location, cloud.said.append, 0.005)
    found = cluster._ensure_cluster(spec, cloud.access, waiter)
    with controllers.api_client(found, cloud.access.credentials, spec.project) as client:
        yield client


@pytest.fixture
def website(tmp_path, monkeypatch):
    """A server that stands for the one that releases are downloaded from."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/manifests.yaml"
    monkeypatch.setattr(controllers.Release, "url", property(lambda self: address))
    yield tmp_path / "manifests.yaml"
    server.shutdown()
    server.server_close()


def test_the_released_manifests_are_those_of_github():
    assert JOBSET.url == "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml"
    assert KUEUE.url == "https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml"


def test_a_download_is_used_where_its_checksum_is_right_and_else_not(website):
    text = yaml.safe_dump_all(installs()["JobSet"])
    website.write_text(text)
    right = replace(JOBSET, sha256=hashlib.sha256(text.encode()).hexdigest())
    assert controllers.read_manifest(right, None) == installs()["JobSet"]
    website.write_text(text + "# changed\n")
    with pytest.raises(LaunchError, match=r"its SHA-256 is [0-9a-f]{64}, expected was .*--jobset-manifest=FILE"):
        controllers.read_manifest(right, None)
    website.unlink()
    with pytest.raises(LaunchError, match=r"cannot be downloaded.*--kueue-manifest=FILE"):
        controllers.read_manifest(KUEUE, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not YAML"),
        ("a: 1", "an object without apiVersion"),
        ("- 1", "not a Kubernetes manifest"),
        ("apiVersion: v1\nkind: Namespace\nmetadata: {name: n}", "there is no Deployment"),
        ("", "there is no Deployment"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path, text, words):
    file = tmp_path / "m.yaml"
    file.write_text(text)
    with pytest.raises(LaunchError, match=words):
        controllers.read_manifest(JOBSET, str(file))
    with pytest.raises(LaunchError, match=r"--jobset-manifest=.*cannot be read"):
        controllers.read_manifest(JOBSET, str(tmp_path / "missing"))


def test_a_file_is_read_as_it_is(tmp_path):
    file = tmp_path / "kueue.yaml"
    file.write_text("---\n" + yaml.safe_dump_all(installs()["Kueue"], explicit_start=True) + "---\n")
    assert controllers.read_manifest(KUEUE, str(file)) == installs()["Kueue"]


def test_controllers_come_before_the_queue_and_slices_last(cloud):
    cloud.create(cluster_spec(namespace="team"))
    order = cloud.api.applied
    assert order.index("Deployment jobset-controller-manager") < order.index("Deployment kueue-controller-manager")
    assert order[-5:] == [
        "Namespace team",
        "ResourceFlavor cpu-np",
        "ResourceFlavor tpu-v6e-slice-4x8",
        "ClusterQueue burnish",
        "LocalQueue burnish",
    ]
    assert "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/localqueues/burnish" in cloud.api.objects
    assert cloud.said.index("Kueue: runs") < cloud.said.index("node pool slice-0 …")


def test_what_controllers_have_written_into_their_objects_stays(client, cloud):
    controllers.apply(client, installs()["Kueue"], "here")
    path = "/api/v1/namespaces/kueue-system/secrets/kueue-certs"
    cloud.api.objects[path]["data"] = {"tls.key": "x"}
    controllers.apply(client, installs()["Kueue"], "here")
    assert cloud.api.objects[path]["data"] == {"tls.key": "x"}


def test_a_webhook_that_is_not_up_yet_is_waited_for(client, cloud):
    for objects in installs().values():
        controllers.apply(client, objects, "here")
    cloud.api.webhook_failures = 3
    controllers.apply(client, parts.queue_manifests(cluster_spec()), "here", pause=0.005)
    cloud.api.webhook_failures = 10**9
    with pytest.raises(LaunchError, match=r"ResourceFlavor cpu-np: .*failed calling webhook"):
        controllers.apply(client, parts.queue_manifests(cluster_spec()), "here", patience=0.05, pause=0.005)


def test_a_kind_that_stays_unknown_is_named(client):
    with pytest.raises(LaunchError, match=r"does not know kueue.x-k8s.io/v1beta2 ResourceFlavor"):
        controllers.apply(client, parts.queue_manifests(cluster_spec()), "here", patience=0.02, pause=0.005)


def test_a_refusal_is_passed_on_at_once(client):
    item = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "missing"}}
    with pytest.raises(LaunchError, match=r'Secret s: namespaces "missing" not found \(404\)'):
        controllers.apply(client, [item], "here")


def test_a_controller_that_does_not_come_up_is_explained(client, cloud):
    controllers.apply(client, installs()["JobSet"], "here")
    cloud.api.looks = -1
    with pytest.raises(LaunchError, match=r"jobset-controller-manager in jobset-system is not available.*0 of 1"):
        controllers.wait_available(client, installs()["JobSet"], "here", cloud.said.append, patience=0.03, pause=0.005)
    assert controllers.deployed_version(client, JOBSET, "here") is None


def test_a_token_that_is_not_accepted_and_a_server_that_is_not_reached_are_said(cloud):
    cloud.create(cluster_spec(bucket=None))
    made = cloud.gke.clusters[PATH]
    cloud.access.credentials.token = "of somebody else"
    with (
        controllers.api_client(made, cloud.access.credentials, "my-project") as client,
        pytest.raises(LaunchError, match=r"JobSet: Unauthorized \(401\)"),
    ):
        controllers.deployed_version(client, JOBSET, "us-east5-b")
    made.endpoint = "127.0.0.1:9"
    with (
        controllers.api_client(made, cloud.access.credentials, "my-project") as client,
        pytest.raises(LaunchError, match=r"us-east5-b cannot be reached.*--authorized-cidr"),
    ):
        controllers.deployed_version(client, JOBSET, "us-east5-b")


def test_a_server_with_another_certificate_is_not_spoken_to(cloud):
    from fake_kubernetes import ApiServer

    cloud.create(cluster_spec(bucket=None))
    other = ApiServer()
    server = other.start()
    made = cloud.gke.clusters[PATH]
    made.endpoint = other.endpoint
    with (
        controllers.api_client(made, cloud.access.credentials, "my-project") as client,
        pytest.raises(LaunchError, match="cannot be reached"),
    ):
        controllers.deployed_version(client, JOBSET, "us-east5-b")
    server.shutdown()
    server.server_close()


def test_other_versions_and_queues_of_another_size_are_noticed(cloud, tmp_path):
    spec = cluster_spec()
    cloud.create(spec)
    [path] = [p for p in cloud.api.objects if p.endswith("deployments/jobset-controller-manager")]
    cloud.api.objects[path]["spec"]["template"]["spec"]["containers"][0]["image"] = "r/jobset/jobset:v0.8.1"
    states = {part.name: (str(part.state), part.note) for part in cluster.survey(spec, cloud.access)}
    assert states["JobSet"] == ("to change", "v0.8.1 runs")
    assert states["Kueue"] == ("there", "")
    assert states["burnish"][0] == "there"
    wider = cluster_spec(num_slices=2)
    states = {part.name: str(part.state) for part in cluster.survey(wider, cloud.access)}
    assert (states["burnish"], states["slice-0"], states["slice-1"]) == ("to make", "there", "to make")
    file = tmp_path / "kueue.yaml"
    file.write_text(yaml.safe_dump_all(installs()["Kueue"]))
    own = cluster_spec(kueue_manifest=str(file))
    found = cluster.survey(own, cloud.access)
    assert {part.name: str(part.state) for part in found}["Kueue"] == "to change"
    only_kueue = [part for part in found if part.name == "Kueue"]
    assert cluster.needed_manifests(own, only_kueue) == {"Kueue": installs()["Kueue"]}
