"""The other end of :mod:`aparte.measure.http_link`: the middle behind an HTTP server, for comparison only.

One request at a time, in the thread that loaded the model, as the real server computes.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hmac
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from aparte.cloud.engine import Engine
from aparte.cloud.inprocess import InProcessLink
from aparte.config import Compute, Cut
from aparte.errors import AparteError, FrameError
from aparte.measure.http_link import OPEN, STEP, step_from_json
from aparte.wire.frames import ResultFrame, encode

MOST_SESSIONS = 8
_POLL_S = 0.2


class HttpCloud:
    """Serves ``engine`` on a free port of loopback to whoever knows ``token``."""

    def __init__(self, engine: Engine, token: str) -> None:
        self._engine = engine
        self._token = token
        self._sessions: dict[str, InProcessLink] = {}
        self._server = HTTPServer(("127.0.0.1", 0), _handler(self))

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def serve_forever(self) -> None:
        """Answer requests in this thread until :meth:`stop`."""
        self._server.serve_forever(_POLL_S)
        self._server.server_close()

    def stop(self) -> None:
        self._server.shutdown()

    @property
    def most_bytes(self) -> int:
        """The largest request there can be reason for: base64 and JSON around the largest message."""
        return self._engine.max_message_bytes * 2

    def admits(self, header: str) -> bool:
        return hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode())

    def answer(self, path: str, data: dict[str, Any]) -> dict[str, Any]:
        """What a request gets. Raises :class:`AparteError` for one that is refused."""
        if path == OPEN:
            return self._open(str(data.get("wire")))
        link = self._sessions.get(str(data.get("session")))
        if path != STEP or link is None:
            raise FrameError("There is no such session.")
        link.send(encode(step_from_json(data)))
        result, _ = link.receive()
        assert isinstance(result, ResultFrame)
        hidden = base64.b64encode(result.payload).decode("ascii")
        return {"s": result.number, "ms": result.compute_ms, "hidden": hidden}

    def _open(self, wire: str) -> dict[str, Any]:
        link = InProcessLink(self._engine, wire)
        link.open()
        while len(self._sessions) >= MOST_SESSIONS:  # whoever came first has left
            self._sessions.pop(next(iter(self._sessions))).close()
        name = secrets.token_hex(8)
        self._sessions[name] = link
        return {"session": name, "nodes": link.max_nodes, "context": link.max_context}


def _handler(cloud: HttpCloud) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # headers and body leave together
        timeout = 120

        def do_POST(self) -> None:
            try:
                size = int(self.headers.get("Content-Length", ""))
            except ValueError:
                size = -1
            if not cloud.admits(self.headers.get("Authorization", "")):
                self._refuse(401, "The token is another one.")
            elif not 0 <= size <= cloud.most_bytes:  # before it is read
                self._refuse(413, "The request has no size, or a larger one than any step.")
            else:
                self._answer(self.rfile.read(size))

        def _answer(self, body: bytes) -> None:
            try:
                data = json.loads(body)
                if not isinstance(data, dict):
                    raise FrameError("A request is no JSON object.")
                self._reply(200, cloud.answer(self.path, data))
            except (ValueError, RecursionError):
                self._refuse(400, "A request is not JSON.")
            except AparteError as error:
                self._refuse(400, str(error))

        def _refuse(self, status: int, sentence: str) -> None:
            self.close_connection = True
            self._reply(status, {"error": sentence})

        def _reply(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            """Nothing is logged."""

    return Handler


@contextlib.contextmanager
def http_cloud_process(model: str, cut: Cut, compute: Compute) -> Iterator[tuple[tuple[str, int], str]]:
    """A process that serves ``model``; gives its address and its token, and ends with the block."""
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", __name__, model, "--cut", str(cut), "--dtype", compute.dtype]
    command += ["--device", compute.device, "--exit-with-parent", str(os.getpid())]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "APARTE_TOKEN": token},
        text=True,
        start_new_session=True,
    ) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                raise AparteError("The HTTP cloud for comparison did not start. Does `aparte serve` start?")
            yield ("127.0.0.1", int(line)), token
        finally:
            child.terminate()
            child.wait(10)


def main() -> None:
    """``python -m aparte.measure.http_cloud MODEL …``: prints its port when it is ready."""
    from aparte.cloud.load import load_engine
    from aparte.model.parts import Blueprint
    from aparte.model.registry import resolve

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("cut", "dtype", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--exit-with-parent", type=int, required=True)
    options = parser.parse_args()
    blueprint = Blueprint.open(resolve(options.model), Compute(options.dtype, options.device))
    engine = load_engine(blueprint, Cut.parse(options.cut), options.model)
    engine.probe()
    cloud = HttpCloud(engine, os.environ["APARTE_TOKEN"])
    threading.Thread(target=_stop_with_parent, args=(cloud, options.exit_with_parent), daemon=True).start()
    sys.stdout.write(f"{cloud.port}\n")
    sys.stdout.flush()
    cloud.serve_forever()


def _stop_with_parent(cloud: HttpCloud, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    cloud.stop()


if __name__ == "__main__":
    main()
