"""What the server answers to plain HTTP requests, on the port of the sessions.

``/health`` is for everybody. ``/metrics`` and ``/status`` hold no content, but tell how much a server is
used and by how many: they need a token like a session does, and where there are no tokens they are for this
machine only.
"""

from __future__ import annotations

import http
import json

from websockets.datastructures import Headers
from websockets.http11 import Response

from aparte.address import is_loopback
from aparte.cloud.telemetry import Telemetry

PLAIN = "text/plain; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def health(sessions: int) -> Response:
    """``GET /health``."""
    return _response(http.HTTPStatus.OK, json.dumps({"status": "ok", "sessions": sessions}).encode())


def page(path: str, telemetry: Telemetry, *, peer: str, has_token: bool) -> Response | None:
    """The answer to ``path``, or None if there is no such page; ``has_token`` is whether a valid one came."""
    path = path.partition("?")[0]
    if path not in ("/metrics", "/status"):
        return None
    if not has_token and not is_loopback(peer):
        body = b"Without tokens this page is for the server's own machine only.\n"
        return _response(http.HTTPStatus.FORBIDDEN, body, PLAIN)
    if path == "/metrics":
        return _response(http.HTTPStatus.OK, telemetry.render(), PROMETHEUS)
    return _response(http.HTTPStatus.OK, json.dumps(telemetry.status()).encode())


def _response(status: http.HTTPStatus, body: bytes, kind: str = "application/json") -> Response:
    headers = Headers([("Content-Type", kind), ("Content-Length", str(len(body))), ("Connection", "close")])
    return Response(status.value, status.phrase, headers, body)
