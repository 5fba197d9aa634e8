"""Google Cloud on localhost, enough of it for clusters and machines: GKE over gRPC, the rest over HTTP.

The servers keep state and are held to what the real ones do: things that are there already are ALREADY_EXISTS,
an operation takes a few looks until it is done and can end with an error that leaves a broken thing behind, a cluster
that is being worked on refuses other work. Tests make things go wrong through `Gke.fail`, `Gke.refuse`,
`Rest.refuse` and `Rest.fail`. Nothing here shares code with what it tests.
"""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import grpc
import requests
from google.cloud import container_v1

LOOKS = 2  # how many times an operation is looked at before it is done


@dataclass
class Work:
    """What an operation does in the end, and whether it goes wrong."""

    operation: Any
    finish: Any
    error: str = ""
    looks: int = 0


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.code, self.message = code, message


@dataclass
class Gke:
    """google.container.v1.ClusterManager."""

    endpoint: str = "127.0.0.1:1"
    certificate: str = ""
    clusters: dict[str, Any] = field(default_factory=dict)  # by projects/…/clusters/NAME
    work: dict[str, Work] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # of methods that change something
    refusals: dict[str, tuple[grpc.StatusCode, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by name of the thing: its next operation fails so
    lock: Any = field(default_factory=threading.RLock)

    def refuse(self, method: str, code: grpc.StatusCode, message: str) -> None:
        """The next call of the method is refused."""
        self.refusals[method] = (code, message)

    def fail(self, name: str, message: str) -> None:
        """The next operation on the thing of that name begins and then fails."""
        self.failures[name] = message

    def start(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(4))
        methods = {
            "GetCluster": (container_v1.GetClusterRequest, container_v1.Cluster, self.get_cluster),
            "ListClusters": (container_v1.ListClustersRequest, container_v1.ListClustersResponse, self.list_clusters),
            "CreateCluster": (container_v1.CreateClusterRequest, container_v1.Operation, self.create_cluster),
            "UpdateCluster": (container_v1.UpdateClusterRequest, container_v1.Operation, self.update_cluster),
            "DeleteCluster": (container_v1.DeleteClusterRequest, container_v1.Operation, self.delete_cluster),
            "CreateNodePool": (container_v1.CreateNodePoolRequest, container_v1.Operation, self.create_node_pool),
            "DeleteNodePool": (container_v1.DeleteNodePoolRequest, container_v1.Operation, self.delete_node_pool),
            "ListOperations": (
                container_v1.ListOperationsRequest,
                container_v1.ListOperationsResponse,
                self.list_operations,
            ),
            "GetOperation": (container_v1.GetOperationRequest, container_v1.Operation, self.get_operation),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(name, function),
                request_deserializer=request.deserialize,
                response_serializer=response.serialize,
            )
            for name, (request, response, function) in methods.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("google.container.v1.ClusterManager", handlers),)
        )
        self.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server

    def _answering(self, name: str, function: Any) -> Any:
        def answer(request: Any, context: Any) -> Any:
            with self.lock:
                if not name.startswith(("Get", "List")):
                    self.calls.append(name)
                try:
                    if name in self.refusals:
                        raise Refused(*self.refusals.pop(name))
                    return function(request)
                except Refused as refused:
                    context.abort(refused.code, refused.message)

        return answer

    def get_cluster(self, request: Any) -> Any:
        return self._cluster(request.name)

    def list_clusters(self, request: Any) -> Any:
        project = request.parent.split("/")[1]
        found = [c for path, c in self.clusters.items() if path.split("/")[1] == project]
        return container_v1.ListClustersResponse(clusters=found)

    def create_cluster(self, request: Any) -> Any:
        path = f"{request.parent}/clusters/{request.cluster.name}"
        if path in self.clusters:
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"Already exists: {path}.")
        cluster = container_v1.Cluster(request.cluster)
        cluster.location = request.parent.split("/")[3]
        cluster.status = container_v1.Cluster.Status.PROVISIONING
        for pool in cluster.node_pools:
            pool.status = container_v1.NodePool.Status.PROVISIONING
        self.clusters[path] = cluster

        def finish(error: str) -> None:
            if error:
                cluster.status = container_v1.Cluster.Status.ERROR
                cluster.conditions = [container_v1.StatusCondition(message=error)]
                return
            cluster.status = container_v1.Cluster.Status.RUNNING
            cluster.endpoint = self.endpoint
            cluster.master_auth.cluster_ca_certificate = self.certificate
            cluster.current_master_version = "1.35.1-gke.1"
            for pool in cluster.node_pools:
                pool.status = container_v1.NodePool.Status.RUNNING

        return self._begin("CREATE_CLUSTER", path, finish)

    def update_cluster(self, request: Any) -> Any:
        cluster = self._idle(request.name)

        def finish(_: str) -> None:
            cluster.control_plane_endpoints_config = request.update.desired_control_plane_endpoints_config

        return self._begin("UPDATE_CLUSTER", request.name, finish)

    def delete_cluster(self, request: Any) -> Any:
        cluster = self._idle(request.name)
        cluster.status = container_v1.Cluster.Status.STOPPING

        def finish(error: str) -> None:
            if not error:
                del self.clusters[request.name]

        return self._begin("DELETE_CLUSTER", request.name, finish)

    def create_node_pool(self, request: Any) -> Any:
        cluster = self._cluster(request.parent)
        if cluster.status != container_v1.Cluster.Status.RUNNING:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "Cluster is not running.")
        if any(pool.name == request.node_pool.name for pool in cluster.node_pools):
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"Already exists: {request.node_pool.name}.")
        pool = container_v1.NodePool(request.node_pool)
        pool.status = container_v1.NodePool.Status.PROVISIONING
        cluster.node_pools = [*cluster.node_pools, pool]

        def finish(error: str) -> None:
            for own in cluster.node_pools:
                if own.name == request.node_pool.name:
                    own.status = container_v1.NodePool.Status.ERROR if error else container_v1.NodePool.Status.RUNNING
                    if error:
                        own.conditions = [container_v1.StatusCondition(message=error)]

        return self._begin("CREATE_NODE_POOL", f"{request.parent}/nodePools/{pool.name}", finish)

    def delete_node_pool(self, request: Any) -> Any:
        parent, _, name = request.name.partition("/nodePools/")
        cluster = self._cluster(parent)

        def finish(_: str) -> None:
            cluster.node_pools = [pool for pool in cluster.node_pools if pool.name != name]

        return self._begin("DELETE_NODE_POOL", request.name, finish)

    def list_operations(self, request: Any) -> Any:
        return container_v1.ListOperationsResponse(operations=[work.operation for work in self.work.values()])

    def get_operation(self, request: Any) -> Any:
        work = self.work.get(request.name.rpartition("/")[2])
        if work is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Not found: {request.name}.")
        work.looks += 1
        if work.looks >= LOOKS and work.operation.status != container_v1.Operation.Status.DONE:
            work.operation.status = container_v1.Operation.Status.DONE
            if work.error:
                work.operation.error = {"code": 8, "message": work.error}
            work.finish(work.error)
        return work.operation

    def pool(self, path: str, name: str) -> Any:
        return next(pool for pool in self.clusters[path].node_pools if pool.name == name)

    def busy(self) -> list[str]:
        return [n for n, w in self.work.items() if w.operation.status != container_v1.Operation.Status.DONE]

    def _cluster(self, path: str) -> Any:
        if path not in self.clusters:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Not found: {path}.")
        return self.clusters[path]

    def _idle(self, path: str) -> Any:
        cluster = self._cluster(path)
        if busy := self.busy():
            message = f"Cluster is running incompatible operation {busy[0]}."
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, message)
        return cluster

    def _begin(self, kind: str, target: str, finish: Any) -> Any:
        number = f"operation-{len(self.work)}"
        operation = container_v1.Operation(
            name=number,
            operation_type=container_v1.Operation.Type[kind],
            status=container_v1.Operation.Status.RUNNING,
            target_link=f"https://container.googleapis.com/v1/{target}",
            start_time="2026-11-30T12:00:00Z",
        )
        self.work[number] = Work(operation, finish, self.failures.pop(target.rpartition("/")[2], ""))
        return operation


@dataclass
class Rest:
    """Cloud Storage, IAM, Resource Manager and Compute Engine: JSON over HTTP, on one port."""

    buckets: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[str, dict[str, bytes]] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)  # of buckets, and of "project"
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # that change something
    refusals: list[tuple[str, int, str]] = field(default_factory=list)
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)  # by machine: code and message
    unknown_member_answers: int = 0  # how often a new service account is not known yet
    races: int = 0  # how often somebody else changes a policy in between
    lock: Any = field(default_factory=threading.RLock)

    def refuse(self, pattern: str, code: int, message: str) -> None:
        """The next request whose 'METHOD path' matches is refused."""
        self.refusals.append((pattern, code, message))

    def fail(self, machine: str, code: str, message: str) -> None:
        """The next insertion of the machine begins and then fails."""
        self.failures[machine] = (code, message)

    def start(self) -> ThreadingHTTPServer:
        rest = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one packet: else each answer waits for a delayed ACK

            def log_message(self, *_: Any) -> None:
                pass

            def _do(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or b"{}")
                url = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                with rest.lock:
                    status, answer = rest.answer(self.command, unquote(url.path), query, body)
                data = b"" if status == 204 else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _do

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method != "GET" and not path.endswith(":getIamPolicy"):
            self.calls.append(f"{method} {path}")
        for refusal in self.refusals:
            if re.search(refusal[0], f"{method} {path}"):
                self.refusals.remove(refusal)
                return self._error(refusal[1], refusal[2])
        for pattern, function in (
            (r"/(?:storage/v1)?/?b(?:/([^/]+))?", self._bucket),
            (r"/storage/v1/b/([^/]+)/iam", self._bucket_policy),
            (r"/storage/v1/b/([^/]+)/o(?:/(.+))?", self._object),
            (r"/v1/projects/[^/]+/serviceAccounts(?:/(.+))?", self._account),
            (r"/v3/projects/([^/:]+)(?::(\w+))?", self._project),
            (r"/compute/v1/projects/([^/]+)/zones/([^/]+)/instances(?:/(.+))?", self._instance),
            (r"/compute/v1/projects/[^/]+/zones/[^/]+/operations(?:/(.+))?", self._operation),
        ):
            if match := re.fullmatch(pattern, path):
                return function(method, *match.groups(), query=query, body=body)
        return self._error(404, f"no such path: {method} {path}")

    def _error(self, code: int, message: str) -> tuple[int, Any]:
        return code, {"error": {"code": code, "message": message, "errors": [{"message": message}]}}

    def _bucket(self, method: str, name: str | None, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "POST":
            if body["name"] in self.buckets:
                return self._error(409, "Your previous request to create the named bucket succeeded.")
            self.buckets[body["name"]] = body
            self.objects[body["name"]] = {}
            self.policies[body["name"]] = {"version": 1, "etag": "e0", "bindings": []}
            return 200, body
        if name not in self.buckets:
            return self._error(404, "The specified bucket does not exist.")
        if method == "DELETE":
            if self.objects[name]:
                return self._error(409, "The bucket you tried to delete is not empty.")
            del self.buckets[name]
            return 204, {}
        return 200, self.buckets[name]

    def _bucket_policy(self, method: str, name: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return self._policy(name, None if method == "GET" else body)

    def _policy(self, key: str, new: Any) -> tuple[int, Any]:
        policy = self.policies.setdefault(key, {"version": 1, "etag": "e0", "bindings": []})
        if new is None:
            return 200, policy
        if self.races:
            self.races -= 1
            policy["etag"] += "x"
        if new.get("etag") != policy["etag"]:
            return self._error(409 if key == "project" else 412, "The policy was changed in between.")
        if self.unknown_member_answers:
            self.unknown_member_answers -= 1
            return self._error(400, "Service account rl-nodes@… does not exist.")
        for binding in new["bindings"]:
            for member in binding["members"]:
                email = member.removeprefix("serviceAccount:")
                if member.startswith("serviceAccount:") and "rl-" in email and email not in self.accounts:
                    return self._error(400, f"Service account {email} does not exist.")
        self.policies[key] = {**new, "etag": policy["etag"] + "n"}
        return 200, self.policies[key]

    def _object(self, method: str, bucket: str, name: str | None, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if bucket not in self.buckets:
            return self._error(404, "The specified bucket does not exist.")
        if method == "DELETE":
            assert name is not None
            if self.objects[bucket].pop(name, None) is None:
                return self._error(404, "No such object.")
            return 204, {}
        items = [{"name": key, "bucket": bucket, "generation": "1"} for key in self.objects[bucket]]
        return 200, {"kind": "storage#objects", "items": items}

    def _account(self, method: str, email: str | None, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "POST":
            email = f"{body['accountId']}@my-project.iam.gserviceaccount.com"
            if email in self.accounts:
                return self._error(409, "Service account already exists.")
            self.accounts[email] = {"email": email, **body["serviceAccount"]}
        if email not in self.accounts:
            return self._error(404, f"Unknown service account {email}.")
        return 200, self.accounts.pop(email) and {} if method == "DELETE" else self.accounts[email]

    def _project(
        self, method: str, project: str, verb: str | None, query: dict[str, str], body: Any
    ) -> tuple[int, Any]:
        if verb is None:
            return 200, {"name": "projects/123456789", "projectId": project}
        return self._policy("project", body["policy"] if verb == "setIamPolicy" else None)

    def _instance(
        self, method: str, project: str, zone: str, name: str | None, query: dict[str, str], body: Any
    ) -> tuple[int, Any]:
        if method == "POST":
            name = body["name"]
            if name in self.instances:
                return self._error(409, f"The resource '{name}' already exists")
            self.instances[name] = {**body, "status": "PROVISIONING"}
            return 200, self._begin("insert", project, zone, name)
        if name not in self.instances:
            return self._error(404, f"The resource '{name}' was not found")
        if method == "DELETE":
            self.instances[name]["status"] = "STOPPING"
            return 200, self._begin("delete", project, zone, name)
        return 200, self.instances[name]

    def _begin(self, kind: str, project: str, zone: str, name: str) -> dict[str, Any]:
        number = f"operation-{len(self.operations)}"
        self.operations[number] = {
            "name": number,
            "operationType": kind,
            "status": "RUNNING",
            "targetLink": f"https://www.googleapis.com/compute/v1/projects/{project}/zones/{zone}/instances/{name}",
            "looks": 0,
            "machine": name,
        }
        return self._shown(self.operations[number])

    def _operation(self, method: str, name: str | None, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if name is None:
            items = [self._shown(o) for o in self.operations.values() if o["status"] != "DONE"]
            return 200, {"items": items} if items else {}
        operation = self.operations[name]
        operation["looks"] += 1
        if operation["looks"] >= LOOKS and operation["status"] != "DONE":
            self._finish(operation)
        return 200, self._shown(operation)

    def _finish(self, operation: dict[str, Any]) -> None:
        machine = operation["machine"]
        operation["status"] = "DONE"
        if operation["operationType"] == "delete":
            del self.instances[machine]
        elif machine in self.failures:
            code, message = self.failures.pop(machine)
            operation["error"] = {"errors": [{"code": code, "message": message}]}
            operation["httpErrorStatusCode"] = 503
            del self.instances[machine]
        else:
            self.instances[machine]["status"] = "RUNNING"
            for interface in self.instances[machine]["networkInterfaces"]:
                for config in interface.get("accessConfigs", []):
                    config["natIP"] = "203.0.113.50"

    def _shown(self, operation: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in operation.items() if key not in ("looks", "machine")}


class Redirect(requests.adapters.HTTPAdapter):
    """Sends what is meant for Google's addresses to a local server."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host

    def send(self, request: Any, **kwargs: Any) -> Any:
        url = urlsplit(request.url)
        request.url = url._replace(scheme="http", netloc=self.host).geturl()
        return super().send(request, **kwargs)
