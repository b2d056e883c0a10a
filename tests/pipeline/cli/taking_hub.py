"""A hub on loopback that takes a model: creates the repository, stores large files by their digest
and the rest as a commit brings them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

_REPOSITORY = "me/op"


@dataclass
class TakingHub:
    """The files of one repository, as the hub was given them."""

    url: str = ""
    large: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """By digest."""
    committed: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """By path, once a commit has named them."""
    when_storing: Callable[[], int] = lambda: 200
    """Called at each large file; returns the status of the answer."""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a request."""
        match path.removeprefix(f"/api/models/{_REPOSITORY}").removeprefix(f"/{_REPOSITORY}"):
            case "/api/repos/create":
                return {"url": f"{self.url}/{_REPOSITORY}"}
            case "/api/validate-yaml":
                return {"warnings": [], "errors": []}
            case "/preupload/main":
                return {"files": [self._described(file["path"]) for file in json.loads(body)["files"]]}
            case ".git/info/lfs/objects/batch":
                objects = json.loads(body)["objects"]
                actions = [{"upload": {"href": f"{self.url}/lfs/{one['oid']}"}} for one in objects]
                pairs = zip(objects, actions, strict=True)
                return {"transfer": "basic", "objects": [{**one, "actions": action} for one, action in pairs]}
            case "/commit/main":
                self._commit([json.loads(line) for line in body.splitlines()])
                return {"commitUrl": f"{self.url}/{_REPOSITORY}/commit/1", "commitOid": "1", "success": True}
            case other:
                raise AssertionError(f"the hub was asked for {other}")

    def _described(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.committed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.committed[value["path"]] = self.large[value["oid"]]


@contextmanager
def taking_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[TakingHub]:
    """Serve it, as the only hub that there is."""
    hub = TakingHub()

    class _Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found = json.dumps(hub.answer(self.path, self._body())).encode()
            self._reply(200, found)

        def do_PUT(self) -> None:
            body = self._body()
            status = hub.when_storing()
            if status == 200:
                hub.large[self.path.rpartition("/")[2]] = body
            self._reply(status, b"")

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers["Content-Length"]))
            parts = list[bytes]()
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    # The other way of large files has no server of its own that runs here.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_from_the_environment")
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
