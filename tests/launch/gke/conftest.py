"""An emulated cluster, and the backend that talks to it through the official client."""

from collections.abc import Iterator

import pytest
from emulator import Cluster, Server
from kubernetes import client

from burnish.launch.gke.api import Api, Retry
from burnish.launch.gke.backend import GkeBackend
from burnish.launch.settings import Settings


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Cluster())
    yield server
    server.close()


@pytest.fixture
def cluster(server: Server) -> Cluster:
    return server.cluster


@pytest.fixture
def api(server: Server) -> Api:
    return Api(client.Configuration(host=server.url), "default", Retry(attempts=4, pause=0.02, longest=0.1))


@pytest.fixture
def backend(api: Api) -> GkeBackend:
    return GkeBackend(Settings(), api)
