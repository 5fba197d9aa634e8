"""A server on this machine that stands in for the Hugging Face hub: enough of its protocol to download and
upload a model repository, and to misbehave on purpose.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has and what it saw."""

    token: str
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)  # file -> bytes after which the first answer ends
    ranges: list[tuple[str, str]] = field(default_factory=list)  # (file, Range header)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    created: list[dict] = field(default_factory=list)
    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def allowed(self, repository: str) -> bool:
        hub = self.hub
        if repository not in hub.repositories:
            self.reply(404, X_Error_Code="RepoNotFound")
            return False
        if repository in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.reply(403, X_Error_Code="GatedRepo", X_Error_Message="Access to this model is restricted")
            return False
        return True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            if self.allowed(match[1]):
                files = sorted(p.name for p in self.hub.repositories[match[1]].iterdir())
                self.reply_json(
                    {"id": match[1], "sha": COMMIT, "siblings": [{"rfilename": f} for f in files], "tags": []}
                )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            if any(f"{made['organization']}/{made['name']}" == match[1] for made in self.hub.created):
                self.reply_json(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                        for name, data in sorted(self.hub.uploaded.items())
                    ]
                )
            elif self.allowed(match[1]):
                root = self.hub.repositories[match[1]]
                self.reply_json(
                    [
                        {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                        for p in sorted(root.iterdir())
                    ]
                )
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            if self.allowed(match[1]):
                self.file(self.hub.repositories[match[1]] / match[2])
        else:
            self.reply(404)

    do_HEAD = do_GET

    def file(self, file: Path) -> None:
        if not file.exists():
            self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        data = file.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X_Repo_Commit": COMMIT,
            "Accept_Ranges": "bytes",
        }
        asked = self.headers.get("Range", "")
        status, start = 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-", asked):
            status, start = 206, int(match[1])
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.ranges.append((file.name, asked))
            cut = self.hub.cut_after.pop(file.name, None)
            if cut is not None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[:cut])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
        self.reply(status, data[start:], **headers)

    def do_POST(self) -> None:
        body = self.body()
        hub = self.hub
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.reply(401)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.reply_json({"url": f"{hub.endpoint}/{hub.created[-1].get('organization')}/{hub.created[-1]['name']}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in files
            ]
            self.reply_json({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{hub.endpoint}/lfs/{o['oid']}", "header": {}}},
                }
                for o in json.loads(body)["objects"]
            ]
            self.reply_json({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    hub.uploaded[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    hub.uploaded[entry["value"]["path"]] = hub.objects[entry["value"]["oid"]]
                elif entry["key"] == "deletedFile":
                    del hub.uploaded[entry["value"]["path"]]
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self.reply_json({"commitUrl": f"{hub.endpoint}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})
        elif self.path == "/api/validate-yaml":
            self.reply_json({"errors": [], "warnings": []})
        else:
            self.reply(404)

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.reply(200)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at `hub.endpoint`, until the block ends."""
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
