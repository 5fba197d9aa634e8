"""The output of a job's hosts, line by line, across cut connections and restarted pods.

One thread reads the log of one pod. Lines come with their times: after a cut the log is asked for again from a little
before the last line, and what was there already is left out. When a job is restarted its new pods are found by a feed.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from queue import Empty, Queue
from typing import Any

from burnish.launch.errors import LaunchError
from burnish.launch.gke.api import Api, RefusedError, Stream, StreamBrokenError
from burnish.launch.gke.feeds import Feed
from burnish.launch.gke.names import JOBSET_NAME
from burnish.launch.gke.progress import Progress
from burnish.launch.gke.reading import has_ended, has_started, host_of, host_order, is_of, main_container
from burnish.launch.gke.resources import JOBSETS, PODS, Change
from burnish.launch.job import LogLine

Object = dict[str, Any]

_OVERLAP_SECONDS = 30  # lines of so long before the last one are asked for again: a line takes its time to get here
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class LineFilter:
    """Lets each line of one container through once, however often parts of the log are read again."""

    def __init__(self) -> None:
        self._last: tuple[datetime, int] | None = None
        self._at_last = 0  # lines that have the time of the last one
        self._again = 0  # of those, how many this reading has passed

    def begin(self) -> None:
        """A reading begins, which may repeat lines."""
        self._again = 0

    def take(self, line: str) -> str | None:
        """The text of '<time> <text>' where it is new."""
        stamp, _, text = line.partition(" ")
        moment = parse_stamp(stamp)
        if moment is None:  # no line of a container: a message of the kubelet
            return line
        if self._last is not None and moment < self._last:
            return None
        if moment == self._last:
            self._again += 1
            if self._again <= self._at_last:
                return None
            self._at_last = self._again
            return text
        self._last, self._at_last, self._again = moment, 1, 1
        return text


def parse_stamp(text: str) -> tuple[datetime, int] | None:
    """A time of RFC 3339, with nanoseconds, which Python's own datetime has not; None where it is none."""
    match = _STAMP.fullmatch(text)
    if not match:
        return None
    return datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00")), int((match[2] or "").ljust(9, "0"))


class PodLog:
    """The output of one pod's main container."""

    def __init__(self, api: Api, pod: Object) -> None:
        self._api, self._pod = api, pod
        self._stopped = threading.Event()
        self._stream: Stream | None = None

    def lines(self, *, follow: bool) -> Iterator[LogLine]:
        """Each line once. With `follow` until the pod has ended or is gone. Raises LaunchError where the cluster
        refuses."""
        name, container, host = self._pod["metadata"]["name"], main_container(self._pod), host_of(self._pod)
        seen, last_heard = LineFilter(), None
        while not self._stopped.is_set():
            seen.begin()
            last_seconds = None if last_heard is None else int(time.monotonic() - last_heard) + _OVERLAP_SECONDS
            try:
                # Asked before reading: the log of a pod that had ended by then is complete.
                complete = not follow or has_ended(self._api.get(PODS, name))
                self._stream = self._api.log(name, container, follow=follow, last_seconds=last_seconds)
                for line in self._stream.lines():
                    last_heard = time.monotonic()
                    text = seen.take(line)
                    if text is not None:
                        yield LogLine(host, text)
                if complete:
                    return
            except StreamBrokenError:
                pass
            except RefusedError as error:
                if error.status == 404:  # the pod is gone, and has nothing more to say
                    return
                if error.status != 400:  # 400: the container waits to be started
                    raise
                if complete:
                    return
            self._stopped.wait(self._api.retry.pause)

    def stop(self) -> None:
        self._stopped.set()
        stream = self._stream
        if stream is not None:
            stream.abort()


def written_so_far(api: Api, pods: list[Object]) -> Iterator[LogLine]:
    """The output of the pods up to now, one host after the other."""
    for pod in sorted(pods, key=host_order):
        if has_started(pod):
            yield from PodLog(api, pod).lines(follow=False)


def followed(api: Api, jobset: Object, wanted: Callable[[Object], bool]) -> Iterator[LogLine]:
    """The output of those pods that are wanted, through restarts, until the job has ended or is gone."""
    changes: Queue[Change | LaunchError] = Queue()
    name = jobset["metadata"]["name"]
    selector = f"{JOBSET_NAME}={name}"
    feeds = [Feed(api, JOBSETS, changes, fields=f"metadata.name={name}"), Feed(api, PODS, changes, labels=selector)]
    progress = Progress(jobset)
    lines: Queue[LogLine | Exception | None] = Queue(maxsize=10_000)
    logs: dict[str, PodLog] = {}
    reading, complete = 0, False
    for feed in feeds:
        feed.start()
    try:
        while True:
            while not changes.empty():
                change = changes.get()
                if isinstance(change, LaunchError):
                    raise change
                progress.take_in(change)
            over = progress.status().state.is_final
            pods = progress.pods
            if over and not complete:
                # The feed may not have told of all of them yet.
                pods, complete = [pod for pod in api.list(PODS, labels=selector)[0] if is_of(pod, jobset)], True
            for pod in pods:
                uid = pod["metadata"]["uid"]
                if uid not in logs and wanted(pod) and has_started(pod):
                    logs[uid] = PodLog(api, pod)
                    threading.Thread(target=_pump, args=(logs[uid], lines), daemon=True).start()
                    reading += 1
            if over and not reading and lines.empty():
                return
            try:
                line = lines.get(timeout=0.1)
            except Empty:
                continue
            if line is None:
                reading -= 1
            elif isinstance(line, Exception):
                raise line
            else:
                yield line
    finally:
        for feed in feeds:
            feed.stop()
        for log in logs.values():
            log.stop()


def _pump(log: PodLog, lines: "Queue[LogLine | Exception | None]") -> None:
    try:
        for line in log.lines(follow=True):
            lines.put(line)
    except Exception as error:  # whatever it is, it is raised where the lines are read
        lines.put(error)
    finally:
        lines.put(None)
