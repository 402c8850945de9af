"""WebSocket servers that are not what a device hopes for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from websockets.sync.server import ServerConnection, serve

from aparte.wire.frames import Frame, encode


@contextlib.contextmanager
def web_server(handle: Callable[[ServerConnection], None]) -> Iterator[str]:
    """Does ``handle`` with every connection; yields the URL."""
    with serve(handle, "127.0.0.1", 0, compression=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


@contextlib.contextmanager
def impostor(answers: list[Frame | bytes], received: list[bytes]) -> Iterator[str]:
    """Answers the first messages with ``answers`` and the later ones never."""

    def handle(connection: ServerConnection) -> None:
        for number, message in enumerate(connection):
            assert isinstance(message, bytes)
            received.append(message)
            if number < len(answers):
                answer = answers[number]
                connection.send(answer if isinstance(answer, bytes) else encode(answer))

    with web_server(handle) as url:
        yield url
