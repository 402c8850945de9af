"""A real server for tests: its own thread and event loop, real sockets on loopback."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aparte.answer import Writer
from aparte.cloud.keys import Keyring
from aparte.cloud.load import load_engine
from aparte.cloud.server import MiddleServer
from aparte.cloud.verifier import load_verifier
from aparte.config import Compute, Cut, ServerLimits
from aparte.model.parts import Blueprint
from aparte.text.tokenizer import Codec

#: What most tests compute with; APARTE_TEST_DEVICE=cuda runs them on a GPU.
FLOAT32 = Compute(dtype="float32", device=os.environ.get("APARTE_TEST_DEVICE", "cpu"))


@contextmanager
def running_server(
    folder: Path,
    cut: Cut | None = None,
    *,
    compute: Compute = FLOAT32,
    limits: ServerLimits | None = None,
    token: str | None = None,
    keys: Keyring | None = None,
    tls: ssl.SSLContext | None = None,
    name: str = "tiny",
    whole: bool = False,
    inner: bool = False,
) -> Iterator[tuple[MiddleServer, str]]:
    """Serve the middle of the model in ``folder``, or the ``whole`` of it; yields the server and its URL."""
    blueprint = Blueprint.open(folder, compute)
    engine = (
        load_verifier(blueprint, name, limits)
        if whole
        else load_engine(blueprint, cut or Cut(), name, limits, inner=inner)
    )
    server = MiddleServer(engine, token=token, keys=keys, tls=tls)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result(10)
    try:
        yield server, f"{'wss' if tls else 'ws'}://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def tokens_of_target(writer: Writer) -> tuple[Codec, int]:
    """What a draft model has to share with the target of ``writer``."""
    return writer.codec, writer.target.vocab_size
