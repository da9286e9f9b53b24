"""A model hub over HTTP, for huggingface_hub's own client: listings, files with ranges, commits, large files.

What it answers has the routes, headers and error codes that the client's source reads. A second server, under
another host name, plays the store that large files are redirected to, where no token may arrive.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 1000


@dataclass
class Repository:
    """Commits by hash, each a mapping of paths to contents; branches and tags by name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        name = hashlib.sha1(f"{ref} {len(self.commits)}".encode()).hexdigest()
        self.commits[name], self.refs[ref] = dict(files), name
        return name

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None
    host: str
    cookie: str | None = None


@dataclass
class Fault:
    """What goes wrong with requests whose path contains ``part``, ``times`` times.

    status and headers: answered instead. cut: bytes of a body after which the connection ends. lie: replaces
    the body. hang: no answer comes before the hub closes. flood: as many bytes come instead of the body, with
    no word of how many. anew: a range is not heeded.
    """

    part: str
    times: int = 1
    method: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    lie: bytes | None = None
    hang: bool = False
    flood: int = 0
    anew: bool = False


class Hub:
    """State of the hub; tests fill ``repositories`` and ``faults`` and read ``requests``."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.objects: dict[str, bytes] = {}
        self.flooded = 0
        self.closing = threading.Event()
        self.endpoint = self.store = ""

    def add(self, name: str, files: dict[str, bytes], ref: str = "main") -> str:
        return self.repositories.setdefault(name, Repository()).commit(files, ref)

    def fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.part in path and fault.method in ("", method):
                fault.times -= 1
                return fault
        return None


@contextlib.contextmanager
def running_hub(routes: type[HubHandler] | None = None) -> Iterator[Hub]:
    """Serve a hub. routes: of another hub than Hugging Face's."""
    hub = Hub()

    class Handler(routes or HubHandler):  # type: ignore[misc]
        state = hub

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that goes away is what some tests are about."""

    servers = [Server((host, 0), Handler) for host in ("127.0.0.1", "127.0.0.2")]
    hub.endpoint, hub.store = (
        f"http://{host}:{port}" for host, port in (s.server_address[:2] for s in servers)
    )  # type: ignore[misc, str-bytes-safe]
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        for server in servers:
            server.shutdown()
            server.server_close()


class HubHandler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Answer a request of any method."""
        path = self._asked()
        body = self._body()
        self.state.requests.append(
            Request(
                self.command,
                path,
                self.headers.get("Range"),
                self.headers.get("Authorization"),
                self.headers.get("Host", ""),
                self.headers.get("Cookie"),
            )
        )
        fault = self.state.fault(self.command, path)
        if fault is not None and fault.hang:
            self.state.closing.wait(30)
            self.close_connection = True
        elif fault is not None and fault.flood and self.command == "GET":
            self._flood(fault)
        elif fault is not None and fault.status:
            self._send(fault.status, fault.body, fault.headers)
        else:
            self._route(path, body, fault)

    def _asked(self) -> str:
        """Return the path that is asked for, as faults and requests name it."""
        return unquote(urlsplit(self.path).path)

    def _route(self, path: str, body: bytes, fault: Fault | None) -> None:
        if path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"), body)
        elif path.startswith("/api/"):
            self._other_api(path, body)
        elif path.startswith("/objects/"):
            self._object(path.removeprefix("/objects/"), body, fault)
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif "/resolve/" in path:
            self._resolve(urlsplit(self.path).path, fault)
        else:
            self._send(404, b"{}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.do_GET()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = b""
        while size := int(self.rfile.readline(), 16):
            chunks += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return chunks

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def _flood(self, fault: Fault) -> None:
        self.send_response(fault.status or 200)
        self.send_header("Connection", "close")
        self.end_headers()
        block = bytes(2**16)
        for _ in range(fault.flood // len(block)):
            self.wfile.write(block)
            self.state.flooded += len(block)

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """Return the repository and the commit; None if the refusal has been sent."""
        repository = self.state.repositories.get(name)
        if repository is None:
            self._error(
                401 if self.headers.get("Authorization") is None else 404,
                "RepoNotFound",
                "Repository not found",
            )
            return None
        commit = repository.resolve(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    def _api(self, rest: str, body: bytes) -> None:
        parts = rest.split("/", 3)
        name, verb = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "revision"
        found = self._find(name, parts[3] if len(parts) > 3 else "main")
        if found is None:
            return
        if verb == "revision":
            self._send(200, json.dumps(_model_info(name, found[1], found[0].commits[found[1]])).encode())
        elif verb == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] > LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            self._send(200, json.dumps({"files": modes, "commitOid": found[1]}).encode())
        elif verb == "commit":
            self._commit(name, found[0], found[0].commits[found[1]], body)
        else:
            self._send(404, b"{}")

    def _other_api(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.state.repositories:
                answer = {"error": "exists", "url": f"{self.state.endpoint}/{name}"}
                return self._send(409, json.dumps(answer).encode())
            self.state.add(name, {".gitattributes": b""})
            return self._send(
                200, json.dumps({"url": f"{self.state.endpoint}/{name}", "name": name}).encode()
            )
        if path == "/api/validate-yaml":
            return self._send(200, b'{"errors": [], "warnings": []}')
        return self._send(404, b"{}")

    def _commit(self, name: str, repository: Repository, old: dict[str, bytes], body: bytes) -> None:
        files = dict(old)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.state.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files)
        url = f"{self.state.endpoint}/{name}/commit/{commit}"
        self._send(200, json.dumps({"success": True, "commitOid": commit, "commitUrl": url}).encode())

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {
                **one,
                **(
                    {}
                    if one["oid"] in self.state.objects
                    else {"actions": {"upload": {"href": f"{self.state.store}/objects/{one['oid']}"}}}
                ),
            }
            for one in asked["objects"]
        ]
        self._send(200, json.dumps({"transfer": "basic", "objects": objects}).encode())

    def _resolve(self, path: str, fault: Fault | None) -> None:
        name, rest = path[1:].split("/resolve/", 1)
        revision, file = map(unquote, rest.split("/", 1))
        found = self._find(name, revision)
        if found is None:
            return None
        repository, commit = found
        if repository.gated and self.headers.get("Authorization") is None:
            return self._error(401, "GatedRepo", f"Access to model {name} is restricted.")
        content = repository.commits[commit].get(file)
        if content is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_blob(content)}"', "Accept-Ranges": "bytes"}
        if len(content) <= LARGE:
            return self._ranged(content, headers, fault)
        oid = hashlib.sha256(content).hexdigest()
        self.state.objects.setdefault(oid, content)
        headers |= {
            "X-Linked-Etag": f'"{oid}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self.state.store}/objects/{oid}",
        }
        return self._send(302, b"", headers)

    def _object(self, oid: str, body: bytes, fault: Fault | None) -> None:
        if self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid, "the store checks what it is given"
            self.state.objects[oid] = body
            return self._send(200, b"")
        return self._ranged(self.state.objects[oid], {"Content-Type": "application/octet-stream"}, fault)

    def _ranged(self, content: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        if fault is not None and fault.lie is not None:
            content = fault.lie
        asked = None if fault is not None and fault.anew else self.headers.get("Range")
        start = int((asked or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        self._send(206 if start else 200, content[start:], headers, None if fault is None else fault.cut)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _model_info(name: str, commit: str, files: dict[str, bytes]) -> dict[str, object]:
    siblings = []
    for path, content in files.items():
        one: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": _blob(content)}
        if len(content) > LARGE:
            one["lfs"] = {
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "pointerSize": 134,
            }
        siblings.append(one)
    return {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": [], "private": False}
