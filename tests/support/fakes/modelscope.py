"""ModelScope over HTTP, for modelscope-hub's own client: listings, and files with ranges from a store.

Its routes and envelopes are those that the client's source reads. As with the real one, an unknown revision
is an empty listing and no error, and small files come without a redirect and know no ranges.
"""

from __future__ import annotations

import hashlib
import json
from urllib.parse import parse_qs, unquote, urlsplit

from support.fakes.hub import LARGE, Fault, HubHandler


class ModelScopeHandler(HubHandler):
    """Answers as ModelScope does; repositories and faults are those of the tests' hub."""

    def _asked(self) -> str:
        return unquote(self.path)

    def _route(self, path: str, body: bytes, fault: Fault | None) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        names = parts.path.strip("/").split("/")
        if path.startswith("/objects/"):
            self._object(path.removeprefix("/objects/"), body, fault)
        elif names[:3] == ["api", "v1", "models"] and names[5:] in (["repo", "files"], ["repo"]):
            self._of_repository("/".join(names[3:5]), names[5:] == ["repo"], query, fault)
        elif names == ["api", "v1", "repos", "internalAccelerationInfo"]:
            self._envelope(200, {})
        else:
            self._envelope(404, None, "no such route")

    def _of_repository(self, name: str, file: bool, query: dict[str, str], fault: Fault | None) -> None:
        repository = self.state.repositories.get(name)
        signed_in = self.headers.get("Authorization") is not None
        if repository is None:
            return self._envelope(404, None, "record not found")
        if repository.gated and not signed_in:
            return self._envelope(403, None, "no access")
        commit = repository.resolve(query.get("Revision", "master"))
        files = {} if commit is None else repository.commits[commit]
        if not file:
            listed = [_listed(path, content) for path, content in files.items()]
            folders = {path.rsplit("/", 1)[0] for path in files if "/" in path}
            listed += [{"Path": path, "Name": path, "Type": "tree", "Size": 0} for path in sorted(folders)]
            return self._envelope(200, {"Files": listed or None, "IsVisual": 0})
        content = files.get(query["FilePath"])
        if content is None:
            return self._envelope(404, None, "no such file")
        if len(content) <= LARGE:
            lie = content if fault is None or fault.lie is None else fault.lie
            return self._send(200, lie, cut=None if fault is None else fault.cut)
        oid = hashlib.sha256(content).hexdigest()
        self.state.objects.setdefault(oid, content)
        return self._send(302, b"", {"Location": f"{self.state.store}/objects/{oid}"})

    def _envelope(self, status: int, data: object, message: str = "success") -> None:
        found = {"Code": status, "Data": data, "Message": message, "Success": status == 200}
        self._send(status, json.dumps(found).encode())


def _listed(path: str, content: bytes) -> dict[str, object]:
    return {
        "Path": path,
        "Name": path.rsplit("/", 1)[-1],
        "Type": "blob",
        "Size": len(content),
        "Sha256": hashlib.sha256(content).hexdigest(),
        "IsLFS": len(content) > LARGE,
        "Revision": "0" * 40,
    }
