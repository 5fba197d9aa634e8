"""Which API server is asked, with which credentials, and what is said where something of it is missing."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from emulator import Server
from google.auth.credentials import Credentials
from google.cloud import container_v1

from burnish.launch.errors import LaunchError
from burnish.launch.gke.backend import GkeBackend
from burnish.launch.gke.connect import connect, find_cluster
from burnish.launch.settings import Settings

GKE = Settings(project="project", cluster="slices", location="europe-west4-a")
PARENT = "projects/project/locations/europe-west4-a"


def kubeconfig(path: Path, url: str) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def clusters() -> Any:
    """The real ClusterManagerClient on a server that knows two clusters."""
    known = {
        f"{PARENT}/clusters/slices": container_v1.Cluster(name="slices", endpoint="10.0.0.1", status="RUNNING"),
        f"{PARENT}/clusters/young": container_v1.Cluster(name="young", status="PROVISIONING"),
    }

    def get(request: Any, context: Any) -> Any:
        if request.name == f"{PARENT}/clusters/forbidden":
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "Required container.clusters.get permission")
        if request.name not in known:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Not found: {request.name}")
        return known[request.name]

    def listed(request: Any, context: Any) -> Any:
        return container_v1.ListClustersResponse(clusters=list(known.values()))

    def handler(function: Any, request: Any, response: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(function, request.deserialize, response.serialize)

    server = grpc.server(ThreadPoolExecutor(2))
    methods = {
        "GetCluster": handler(get, container_v1.GetClusterRequest, container_v1.Cluster),
        "ListClusters": handler(listed, container_v1.ListClustersRequest, container_v1.ListClustersResponse),
    }
    generic = grpc.method_handlers_generic_handler("google.container.v1.ClusterManager", methods)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    transport = container_v1.ClusterManagerClient.get_transport_class("grpc")(channel=channel)
    yield container_v1.ClusterManagerClient(transport=transport)
    channel.close()
    server.stop(0)


def test_without_a_cluster_the_kubeconfig_is_taken(monkeypatch, tmp_path: Path, server: Server) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", server.url)))
    assert GkeBackend(Settings()).list() == []
    assert server.cluster.requests


def test_neither_cluster_nor_kubeconfig_is_an_error_with_the_command(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match=r"no cluster is set.*`burnish job config set cluster NAME`"):
        connect(Settings())


@pytest.mark.parametrize("missing", ["project", "location"])
def test_what_a_cluster_needs_is_named_with_the_command(missing: str) -> None:
    with pytest.raises(LaunchError, match=f"no {missing} is set; run `burnish job config set {missing} VALUE`"):
        connect(replace(GKE, **{missing: None}))


def test_missing_credentials_are_named_with_the_command(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(LaunchError, match=r"no credentials for Google Cloud.*gcloud auth application-default login"):
        connect(GKE)


def test_the_cluster_is_asked_for_by_its_name(clusters: Any) -> None:
    assert find_cluster(clusters, "project", "europe-west4-a", "slices").endpoint == "10.0.0.1"


def test_an_unknown_cluster_is_named_with_those_that_there_are(clusters: Any) -> None:
    with pytest.raises(
        LaunchError, match="no such cluster in europe-west4-a of project project; there are slices, young"
    ):
        find_cluster(clusters, "project", "europe-west4-a", "typo")


def test_a_cluster_that_is_being_made_is_no_cluster_yet(clusters: Any) -> None:
    with pytest.raises(LaunchError, match="--cluster=young: the cluster is PROVISIONING"):
        find_cluster(clusters, "project", "europe-west4-a", "young")


def test_a_cluster_that_may_not_be_seen_names_the_role(clusters: Any) -> None:
    with pytest.raises(LaunchError, match=r"cluster forbidden: Required container.clusters.get permission.*role"):
        find_cluster(clusters, "project", "europe-west4-a", "forbidden")


class ShortLived(Credentials):
    """Credentials whose every token is good for one request."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    @property
    def valid(self) -> bool:
        return False

    def refresh(self, request: Any) -> None:
        self.made += 1
        self.token = f"token-{self.made}"


def test_a_token_that_has_run_out_is_renewed(monkeypatch, server: Server, clusters: Any) -> None:
    account = ShortLived()
    monkeypatch.setattr("burnish.launch.gke.connect.credentials", lambda: account)
    monkeypatch.setattr(container_v1, "ClusterManagerClient", lambda credentials: clusters)
    api = connect(GKE)
    api._core.api_client.configuration.host = server.url
    backend = GkeBackend(GKE, api)
    backend.list()
    backend.list()
    tokens = server.cluster.authorizations
    assert tokens[0] == "Bearer token-2"  # the first was made to see whether there is one
    assert len(set(tokens)) == len(tokens) == 6


def test_a_missing_package_is_named_with_the_command(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(LaunchError, match=r"kubernetes.* is not installed; pip install 'burnish\[gke\]'"):
        GkeBackend(Settings()).list()


class _LoginPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Log in</html>")

    def log_message(self, *_: Any) -> None:
        pass


def test_a_login_page_in_place_of_the_server_is_said(monkeypatch, tmp_path: Path) -> None:
    page = HTTPServer(("127.0.0.1", 0), _LoginPage)
    thread = threading.Thread(target=page.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv(
            "KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{page.server_port}"))
        )
        with pytest.raises(LaunchError, match=r"list jobsets: http.* answers as no API server does"):
            GkeBackend(Settings()).list()
    finally:
        page.shutdown()
        page.server_close()
        thread.join()
