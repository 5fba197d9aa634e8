"""Objects of a cluster as they change: a list, then a watch that is taken up again wherever it breaks.

Each feed is a thread that puts changes into a queue. A watch that was cut goes on from its last resource version; where
the server has forgotten that version (410), everything is listed anew; where the server is away, the feed says so and
tries on for as long as its patience lasts.
"""

import threading
import time
from queue import Queue

from burnish.launch.errors import LaunchError
from burnish.launch.gke.api import Api, RefusedError, Stream, StreamBrokenError, UnreachableError
from burnish.launch.gke.resources import Change, Resource

GONE = 410


class Feed(threading.Thread):
    """Changes of one kind of objects. `optional`: where the server has no such objects or does not show them, that is
    a change (DENIED) and no error."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        changes: "Queue[Change | LaunchError]",
        *,
        labels: str = "",
        fields: str = "",
        optional: bool = False,
        patience: float = 600.0,
    ) -> None:
        super().__init__(daemon=True)
        self._api, self._resource, self._changes = api, resource, changes
        self._labels, self._fields = labels, fields
        self._optional, self._patience = optional, patience
        self._stopped = threading.Event()
        self._stream: Stream | None = None
        self._version = ""  # of the last change that was seen; "": everything is to be listed

    def run(self) -> None:
        away_since: float | None = None
        while not self._stopped.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
                away_since = None
                self._stopped.wait(self._api.retry.pause)  # who ends watches at once is not to be asked at once
            except StreamBrokenError:
                self._stopped.wait(self._api.retry.pause)
            except UnreachableError as error:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self._patience:
                    self._put(error)
                    return
                self._put(Change(self._resource, "AWAY", text=error.why))
                self._stopped.wait(self._api.retry.pause)
            except RefusedError as error:
                if error.status == GONE:
                    self._version = ""
                elif self._optional and error.status in (403, 404):
                    self._put(Change(self._resource, "DENIED", text=str(error)))
                    return
                else:
                    self._put(error)
                    return
            except LaunchError as error:
                self._put(error)
                return

    def stop(self) -> None:
        self._stopped.set()
        stream = self._stream
        if stream is not None:
            stream.abort()

    def _list(self) -> None:
        items, self._version = self._api.list(self._resource, labels=self._labels, fields=self._fields)
        self._put(Change(self._resource, "LISTED", tuple(items)))

    def _watch(self) -> None:
        self._stream = self._api.watch(self._resource, self._version, labels=self._labels, fields=self._fields)
        for event in self._stream.events():
            self._version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self._put(Change(self._resource, event["type"], (event["object"],)))

    def _put(self, change: Change | LaunchError) -> None:
        if not self._stopped.is_set():
            self._changes.put(change)
