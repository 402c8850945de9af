"""A real gateway for tests: uvicorn on loopback, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from aparte.api import Aparte
from aparte.gateway.app import create_app

NAME = "tiny"


@contextmanager
def connected(folder: Path, cloud: str | None, **settings: Any) -> Iterator[Aparte]:
    """The model in ``folder``, computed in float32 throughout."""
    settings = {"dtype": "float32", "device": "cpu", "wire": "float32", **settings}
    with Aparte.connect(str(folder), cloud=cloud or (), **settings) as model:
        yield model


@contextmanager
def serving(model: Aparte, *, name: str = NAME, **settings: Any) -> Iterator[str]:
    """A gateway to ``model``; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(create_app(model, name, **settings), log_level="critical")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def wait_for(condition: Any, seconds: float = 10) -> None:
    """Until it holds, which it has to."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
