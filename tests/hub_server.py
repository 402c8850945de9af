"""A real HTTP server on loopback that speaks as much of the hub's protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What is served, and what was asked for."""

    url: str
    repos: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    #: Other branches, tags and commits than the main one: folder and commit by repository and name.
    revisions: dict[tuple[str, str], tuple[Path, str]] = field(default_factory=dict)
    #: Files whose transfer breaks off, once, after so many bytes.
    breaks: dict[str, int] = field(default_factory=dict)
    #: What came in the headers *Authorization* and *Range*.
    tokens: set[str] = field(default_factory=set)
    ranges: list[str] = field(default_factory=list)

    def downloads(self) -> list[str]:
        """Names of the files whose contents were fetched, sorted."""
        return sorted(name for method, name in self.requests if method == "GET")


@contextmanager
def serve_hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        parts = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            repo, file = "/".join(parts[2:4]), None
        else:
            repo, file = "/".join(parts[:2]), "/".join(parts[4:])
        hub.tokens.add(self.headers.get("Authorization", ""))
        if repo in hub.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        folder = hub.repos.get(repo)
        if folder is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if file is None:
            siblings = [{"rfilename": entry.name} for entry in sorted(folder.iterdir())]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        revision, commit = parts[3], COMMIT
        if revision not in ("main", COMMIT):
            known = {**hub.revisions, **{(repo, held[1]): held for (repo, _), held in hub.revisions.items()}}
            if (repo, revision) not in known:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            folder, commit = known[repo, revision]
        hub.requests.append((self.command, file))
        headers = {"X-Repo-Commit": commit}
        if not (folder / file).is_file():
            return self._send(404, b"", {**headers, "X-Error-Code": "EntryNotFound"})
        data = (folder / file).read_bytes()
        headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        headers["Accept-Ranges"] = "bytes"
        status = 200
        if (asked := self.headers.get("Range", "")).startswith("bytes="):
            hub.ranges.append(asked)
            first = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[first:]
        if body and (sent := hub.breaks.pop(file, None)) is not None:
            self.close_connection = True
            return self._send(status, data[:sent], headers, length=len(data))
        return self._send(status, data, headers, body)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        body: bool = True,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data)
