"""A cloud on localhost, and the real clients that talk to it."""

from collections.abc import Iterator

import pytest
from cloud_setup import Cloud

from burnish.launch.cloud.access import ClusterAccess, VmAccess


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("google.cloud.container_v1")
    pytest.importorskip("kubernetes")
    from cloud_fakes import Gke, Redirect, Rest
    from fake_kubernetes import TOKEN, ApiServer
    from google.auth.credentials import AnonymousCredentials
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud import compute_v1, container_v1, storage
    from google.cloud.compute_v1.services.instances.transports import InstancesRestTransport
    from google.cloud.compute_v1.services.zone_operations.transports import ZoneOperationsRestTransport
    from google.cloud.container_v1.services.cluster_manager.transports import ClusterManagerGrpcTransport
    from google.oauth2.credentials import Credentials

    api, rest = ApiServer(), Rest()
    api_server, rest_server = api.start(), rest.start()
    gke = Gke(api.endpoint, api.certificate)
    gke_server = gke.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{gke.port}")
    session = AuthorizedSession(AnonymousCredentials())
    session.mount("https://", Redirect(rest.host))
    local = {"host": rest.host, "url_scheme": "http", "credentials": AnonymousCredentials()}
    yield Cloud(
        gke,
        rest,
        api,
        ClusterAccess(
            clusters=container_v1.ClusterManagerClient(transport=ClusterManagerGrpcTransport(channel=channel)),
            storage=storage.Client(
                project="my-project",
                credentials=AnonymousCredentials(),
                client_options={"api_endpoint": f"http://{rest.host}"},
            ),
            session=session,
            credentials=Credentials(token=TOKEN),
        ),
        VmAccess(
            instances=compute_v1.InstancesClient(transport=InstancesRestTransport(**local)),
            operations=compute_v1.ZoneOperationsClient(transport=ZoneOperationsRestTransport(**local)),
        ),
    )
    channel.close()
    gke_server.stop(None)
    for server in (api_server, rest_server):
        server.shutdown()
        server.server_close()
