"""The API server, through the official client: how it is reached, what is asked of it, and its errors in words.

Objects are plain JSON. A request that finds the server busy or failing (429, 5xx, no connection) is made again with
growing pauses; any other refusal is a RefusedError that says what would mend it.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from burnish.launch.cloud.access import LOGIN, needed
from burnish.launch.errors import LaunchError
from burnish.launch.gke.resources import NODES, Resource

Object = dict[str, Any]

_BUSY = (429, 500, 502, 503, 504)
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 60.0
_QUIET_SECONDS = 300.0  # a followed log that says nothing for so long is asked for again: the connection may be dead


class RefusedError(LaunchError):
    """The server answered a request with an error; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(LaunchError):
    """There is no answer from the server, or none but that it is busy, after all attempts; `why` is in its words."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class StreamBrokenError(Exception):
    """A watch or a log ended before the server said so; where it stood is known, and it can be taken up again."""


@dataclass(frozen=True)
class Retry:
    """Attempts at a request, and the pause in seconds after the first, which doubles."""

    attempts: int = 6
    pause: float = 0.5
    longest: float = 15.0

    def pause_after(self, attempt: int) -> float:
        return min(self.pause * 2**attempt, self.longest)


@dataclass(frozen=True)
class Refusal:
    """An answer of the server with a bad status."""

    status: int
    body: Any  # a Status object as JSON, mostly
    reason: Any
    headers: Any

    @property
    def message(self) -> str:
        try:
            return str(json.loads(self.body)["message"]).rstrip(".")
        except (ValueError, KeyError, TypeError):
            return str(self.reason)

    @property
    def retry_after(self) -> float:
        """Seconds that the server wants to be left alone, a minute at most."""
        value = (self.headers or {}).get("Retry-After", "")
        return min(float(value), 60.0) if value.isdigit() else 0.0


class Api:
    """Requests to one API server, in one namespace. May be used from several threads."""

    def __init__(self, configuration: Any, namespace: str, retry: Retry | None = None) -> None:
        self.namespace = namespace
        self.retry = retry or Retry()
        # Looked up here and not at the top: the packages are those of an extra.
        kubernetes = needed("kubernetes.client")
        configuration.retries = False  # what is tried again, and when, is decided here
        self._client = kubernetes.ApiClient(configuration)
        self._core = kubernetes.CoreV1Api(self._client)
        self._custom = kubernetes.CustomObjectsApi(self._client)
        self._delete_options = kubernetes.V1DeleteOptions(propagation_policy="Background")
        self._refused = kubernetes.ApiException
        self._cut = needed("urllib3.exceptions").HTTPError
        self._host = configuration.host

    def create(self, resource: Resource, body: Object) -> Object:
        """Raises RefusedError, with status 409 where an object of that name is there already."""
        what = f"create {body['kind']} {body['metadata']['name']}"
        if resource.group:
            create = self._custom.create_namespaced_custom_object
            return self._ask(what, create, *self._place(resource), body, field_validation="Strict")
        create = getattr(self._core, f"create_namespaced_{resource.singular}")
        return self._ask(what, create, self.namespace, body, field_validation="Strict")

    def get(self, resource: Resource, name: str) -> Object:
        """Raises RefusedError with status 404 where there is none of that name."""
        what = f"read {resource.singular} {name}"
        if resource.group:
            return self._ask(what, self._custom.get_namespaced_custom_object, *self._place(resource), name)
        return self._ask(what, getattr(self._core, f"read_namespaced_{resource.singular}"), name, self.namespace)

    def list(self, resource: Resource, *, labels: str = "", fields: str = "") -> tuple[list[Object], str]:
        """The objects and the resource version from which a watch goes on."""
        answer = self._ask(f"list {resource.plural}", *self._listing(resource), **_selectors(labels, fields))
        return answer["items"], answer["metadata"].get("resourceVersion", "")

    def patch_secret(self, name: str, change: Object) -> None:
        """Merges a change into a Secret. Raises RefusedError with status 409 where the change names another uid."""
        kwargs = {"field_validation": "Strict", "_content_type": "application/merge-patch+json"}
        self._ask(f"change Secret {name}", self._core.patch_namespaced_secret, name, self.namespace, change, **kwargs)

    def delete(self, resource: Resource, name: str) -> None:
        what = f"delete {resource.singular} {name}"
        if resource.group:
            place = self._place(resource)
            self._ask(what, self._custom.delete_namespaced_custom_object, *place, name, body=self._delete_options)
        else:
            delete = getattr(self._core, f"delete_namespaced_{resource.singular}")
            self._ask(what, delete, name, self.namespace, body=self._delete_options)

    def watch(
        self, resource: Resource, version: str, *, labels: str = "", fields: str = "", seconds: int = 240
    ) -> "Stream":
        """Changes after a resource version, as the server's {"type", "object"}; ends after so many seconds.

        Raises RefusedError with status 410 where the server has forgotten that version.
        """
        function, *place = self._listing(resource)
        response = self._open(
            f"watch {resource.plural}",
            function,
            *place,
            watch=True,
            resource_version=version,
            timeout_seconds=seconds,
            allow_watch_bookmarks=True,
            _request_timeout=(_CONNECT_SECONDS, seconds + _READ_SECONDS),
            is_stream=True,
            **_selectors(labels, fields),
        )
        return Stream(response, self._cut)

    def log(self, pod: str, container: str, *, follow: bool, last_seconds: int | None = None) -> "Stream":
        """Lines '<time> <text>' of a container. Raises RefusedError: 404 where the pod is gone, 400 where the
        container has not started."""
        kwargs: dict[str, Any] = {"container": container, "follow": follow, "timestamps": True}
        if last_seconds is not None:
            kwargs["since_seconds"] = last_seconds
        response = self._open(
            f"read the log of pod {pod}",
            self._core.read_namespaced_pod_log,
            pod,
            self.namespace,
            _request_timeout=(_CONNECT_SECONDS, _QUIET_SECONDS if follow else _READ_SECONDS),
            is_stream=True,
            **kwargs,
        )
        return Stream(response, self._cut)

    def place_in_queue(self, queue: str, owner_uid: str) -> tuple[int, int] | None:
        """Which of how many waiting jobs the owner of a Kueue workload is, from 1; None where Kueue does not tell."""
        path = (
            f"/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/{self.namespace}/localqueues/{queue}/pendingworkloads"
        )

        def ask(_request_timeout: Any, _preload_content: bool) -> Any:
            # The generated methods have none for this path.
            request = self._client.param_serialize("GET", path, auth_settings=["BearerToken"])
            return self._client.call_api(*request, _request_timeout=_request_timeout).response

        try:
            items = self._ask(f"read queue {queue}", ask, attempts=1)["items"]
        except (RefusedError, UnreachableError):
            return None
        for item in items:
            if any(owner["uid"] == owner_uid for owner in item["metadata"].get("ownerReferences", [])):
                return item["positionInLocalQueue"] + 1, len(items)
        return None

    def _place(self, resource: Resource) -> tuple[str, str, str, str]:
        return resource.group, resource.version, self.namespace, resource.plural

    def _listing(self, resource: Resource) -> tuple[Any, ...]:
        if resource.group:
            return (self._custom.list_namespaced_custom_object, *self._place(resource))
        if resource is NODES:
            return (self._core.list_node,)
        return getattr(self._core, f"list_namespaced_{resource.singular}"), self.namespace

    def _ask(self, what: str, function: Any, *args: Any, **kwargs: Any) -> Object:
        response = self._open(what, function, *args, _request_timeout=(_CONNECT_SECONDS, _READ_SECONDS), **kwargs)
        try:
            answer: Object = json.loads(response.data)
        except ValueError:
            why = (
                f"{self._host} answers as no API server does; is that its address, and no proxy or login page between?"
            )
            raise UnreachableError(f"{what}: {why}", why) from None
        return answer

    def _open(
        self, what: str, function: Any, *args: Any, attempts: int | None = None, is_stream: bool = False, **kwargs: Any
    ) -> Any:
        """A response with a good status, after as many attempts as it takes; at most `attempts`, or what `retry`
        allows."""
        failure = ""
        attempts = attempts or self.retry.attempts
        for attempt in range(attempts):
            pause = self.retry.pause_after(attempt)
            try:
                with _credentials_explained():
                    response = function(*args, _preload_content=False, **kwargs)
                if 200 <= response.status < 300:
                    if not is_stream:
                        response.read(cache_content=True)  # here, where a cut is one more reason to try again
                    return response
                refusal = Refusal(response.status, response.data, response.reason, response.headers)
            except self._cut as error:
                refusal = None
                failure = f"{self._host} cannot be reached: {_cause(error)}"
            except self._refused as error:
                if not error.status:  # TLS
                    why = f"{self._host}: {' '.join(str(error.reason).split())}"
                    raise UnreachableError(f"{what}: {why}", why) from None
                refusal = Refusal(error.status, error.body, error.reason, error.headers)
            if refusal is not None:
                if refusal.status not in _BUSY:
                    raise RefusedError(_explained(what, refusal.status, refusal.message), refusal.status)
                pause = max(pause, refusal.retry_after)
                failure = f"the server answers {refusal.status}: {refusal.message}"
            if attempt + 1 < attempts:
                time.sleep(pause)
        hint = "is the cluster up, and may this machine reach it (--authorized-cidr of `burnish cluster create`)?"
        raise UnreachableError(f"{what}: {failure}; tried {attempts} times; {hint}", failure)


class Stream:
    """Lines that come while the connection lasts."""

    def __init__(self, response: Any, cut: type[Exception]) -> None:
        self._response = response
        self._cut = cut  # what a broken connection raises

    def lines(self) -> Iterator[str]:
        """Raises StreamBrokenError where the connection was cut; the start of a line that was cut is dropped."""
        rest = b""
        try:
            for chunk in self._response.stream(amt=None, decode_content=False):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")
        except (self._cut, OSError, ValueError, AttributeError) as error:
            # ValueError and AttributeError: of a response that another thread has closed
            raise StreamBrokenError(str(error)) from None
        finally:
            self.close()

    def events(self) -> Iterator[Object]:
        """The changes of a watch. Raises RefusedError where the server ends it with an error, StreamBrokenError as
        `lines` does and where a line is no change."""
        for line in self.lines():
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except ValueError:
                raise StreamBrokenError("a change was cut in the middle") from None
            if event["type"] == "ERROR":
                status = event["object"].get("code", 500)
                raise RefusedError(f"watch: {event['object'].get('message', 'ended by the server')}", status)
            yield event

    def close(self) -> None:
        self._response.close()
        self._response.release_conn()

    def abort(self) -> None:
        """Ends the lines for a thread that waits for the next one; closing alone would wait for it, too."""
        sock = getattr(getattr(self._response, "connection", None), "sock", None)
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _selectors(labels: str, fields: str) -> dict[str, Any]:
    return ({"label_selector": labels} if labels else {}) | ({"field_selector": fields} if fields else {})


def _explained(what: str, status: int, message: str) -> str:
    """What the server refused, with what would mend it."""
    if status == 401:
        return f"{what}: the cluster does not accept the credentials: {message}; {LOGIN}"
    if status == 403:
        return (
            f"{what}: not allowed: {message}; ask whoever owns the project for the role roles/container.developer, or "
            "for these rights in the namespace"
        )
    if status == 404 and message == "the server could not find the requested resource":
        return f"{what}: the cluster does not know such objects; `burnish cluster create` installs JobSet and Kueue"
    if status == 404 and message.startswith("namespaces "):
        return f"{what}: {message}; make it, or name another by `burnish job config set namespace NAME`"
    return f"{what}: {message}"


def _cause(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split())


@contextmanager
def _credentials_explained() -> Iterator[None]:
    """The client asks for a fresh token on its way to the server, which may fail."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("google.auth"):
            first = next(iter(str(error).splitlines()), "")
            raise LaunchError(f"the Google credentials cannot be used: {first}; {LOGIN}") from None
        raise
