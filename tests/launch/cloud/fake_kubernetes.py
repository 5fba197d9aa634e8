"""A cluster's API server over TLS, enough of one to install controllers: discovery, server-side apply, and reading.

It is strict where a real one is: who has no right token gets 401, kinds are known only once their definition is
applied, an object in a namespace that is missing is refused, and Deployments take a few looks to become available.
"""

import base64
import datetime
import ipaddress
import json
import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

TOKEN = "a-token-of-adc"
BUILT_IN = (
    ("", "v1", "namespaces", "Namespace", False),
    ("", "v1", "serviceaccounts", "ServiceAccount", True),
    ("", "v1", "secrets", "Secret", True),
    ("", "v1", "services", "Service", True),
    ("apps", "v1", "deployments", "Deployment", True),
    ("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False),
    ("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False),
)


@dataclass
class ApiServer:
    """Objects by path. `webhook_failures` applications of Kueue's own kinds are refused as by a webhook that is not
    up yet; `looks` is how often a Deployment is read before it is available, -1: never."""

    looks: int = 2
    webhook_failures: int = 0
    kinds: list[tuple[str, str, str, str, bool]] = field(default_factory=lambda: list(BUILT_IN))
    objects: dict[str, Any] = field(default_factory=dict)
    applied: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.objects["/api/v1/namespaces/default"] = {"metadata": {"name": "default"}}

    def start(self) -> ThreadingHTTPServer:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one packet: else each answer waits for a delayed ACK

            def log_message(self, *_: Any) -> None:
                pass

            def _do(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                url = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                with api.lock:
                    if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                        status, answer = api.error(401, "Unauthorized")
                    elif self.command == "PATCH":
                        status, answer = api.apply(url.path, query, self.headers["Content-Type"], json.loads(data))
                    else:
                        status, answer = api.get(url.path)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PATCH = _do

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        certificate, key = self_signed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + key)
            file.flush()
            context.load_cert_chain(file.name)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        self.certificate = base64.b64encode(certificate).decode()
        self.endpoint = f"127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def error(self, code: int, message: str) -> tuple[int, Any]:
        return code, {"kind": "Status", "status": "Failure", "code": code, "message": message}

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"major": "1", "minor": "35", "gitVersion": "v1.35.1"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups: dict[str, list[str]] = {}
            for group, version, *_ in self.kinds:
                if group and version not in groups.setdefault(group, []):
                    groups[group].append(version)
            items = []
            for group, versions in groups.items():
                known = [{"groupVersion": f"{group}/{v}", "version": v} for v in versions]
                items.append({"name": group, "versions": known, "preferredVersion": known[0]})
            return 200, {"kind": "APIGroupList", "groups": items}
        if resources := self._resources(path):
            return 200, {"kind": "APIResourceList", "groupVersion": "", "resources": resources}
        found = self.objects.get(path)
        if found is None:
            return self.error(404, f"{path} not found")
        if found.get("kind") == "Deployment":
            self.seen[path] = self.seen.get(path, 0) + 1
            ready = 0 <= self.looks <= self.seen[path]
            condition = {"type": "Available", "status": "True" if ready else "False", "message": "0 of 1 are ready"}
            found = {**found, "status": {"availableReplicas": int(ready), "conditions": [condition]}}
        return 200, found

    def _resources(self, path: str) -> list[dict[str, Any]]:
        return [
            {"name": plural, "kind": kind, "namespaced": namespaced, "verbs": ["get", "patch"], "singularName": ""}
            for group, version, plural, kind, namespaced in self.kinds
            if path == (f"/apis/{group}/{version}" if group else f"/api/{version}")
        ]

    def apply(self, path: str, query: dict[str, str], content_type: str, body: Any) -> tuple[int, Any]:
        assert content_type == "application/apply-patch+yaml", content_type
        if not query.get("fieldManager"):
            return self.error(400, "fieldManager is required for apply patch")
        parts = path.strip("/").split("/")
        if "namespaces" in parts[:-2] and f"/api/v1/namespaces/{parts[-3]}" not in self.objects:
            return self.error(404, f'namespaces "{parts[-3]}" not found')
        if "kueue.x-k8s.io" in path and self.webhook_failures:
            self.webhook_failures -= 1
            return self.error(500, 'Internal error occurred: failed calling webhook "mclusterqueue.kb.io": refused')
        if body["kind"] == "CustomResourceDefinition":
            spec = body["spec"]
            for version in spec["versions"]:
                names = spec["names"]
                kind = (spec["group"], version["name"], names["plural"], names["kind"], spec["scope"] == "Namespaced")
                if kind not in self.kinds:
                    self.kinds.append(kind)
        status = 200 if path in self.objects else 201
        self.objects[path] = merged(self.objects.get(path, {}), body)
        self.applied.append(f"{body['kind']} {body['metadata']['name']}")
        return status, self.objects[path]


def merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
    return new


def self_signed() -> tuple[bytes, bytes]:
    """A certificate for 127.0.0.1 that is its own authority, and its key, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster")])
    now = datetime.datetime.now(datetime.UTC)
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(key_id, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def release(name: str, version: str, namespace: str, deployment: str, crds: list[Any]) -> list[dict[str, Any]]:
    """A controller's manifest in the form of the real ones: namespace, definitions, account, role, service, secret,
    deployment."""
    labels = {"app": name}
    image = f"registry.k8s.io/{name}/{name}:{version}"
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "manager", "image": image}]}}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        *crds,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": f"{name}-manager"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{name}-certs", "namespace": namespace}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": deployment, "namespace": namespace},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
    ]


def definition(group: str, kind: str, version: str, namespaced: bool) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {"plural": plural, "kind": kind},
            "scope": "Namespaced" if namespaced else "Cluster",
            "versions": [{"name": version, "served": True, "storage": True}],
        },
    }
