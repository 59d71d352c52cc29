"""A W&B server on loopback, small enough to read, that keeps what it is sent."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class WandbServer(ThreadingHTTPServer):
    """Answers what wandb 0.31 needs for a run: an upserted run, streamed history, uploaded files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.exit_codes: list[int] = []

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no matter."""

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "Viewer":
            return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if operation == "UpsertBucket":
            self.runs.append(variables)
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "r", "name": variables["name"], "displayName": variables["displayName"]}
            return {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/files/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if operation == "CreateArtifact":  # committed already: the table travels as a file of the run, too
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        return {"serverInfo": {"features": []}, "project": {"artifact": None}}


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            request = json.loads(body)
            operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
            self._reply({"data": self.server.answer(operation, request.get("variables") or {})})
            return
        if self.path.endswith("/file_stream"):
            sent = json.loads(body)
            lines = sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history.extend(map(json.loads, lines))
            if "exitcode" in sent:
                self.server.exit_codes.append(sent["exitcode"])
        self._reply({})

    def do_PUT(self) -> None:
        self.server.files[self.path.removeprefix("/files/")] = self._body()
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)
