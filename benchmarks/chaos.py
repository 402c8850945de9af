"""A relay that stalls and resets: what happens to TCP connections on bad days."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Weather:
    """Chances per piece of data that passes, either way; a step is one piece up and one down at least."""

    reset: float = 0.0
    stall: float = 0.0
    #: Shortest and longest stall, in seconds. Nothing passes meanwhile, in that direction.
    stall_s: tuple[float, float] = (0.5, 3.0)


class Chaos:
    """Listens on a port of its own and relays to ``to``."""

    def __init__(self, to: tuple[str, int], weather: Weather, seed: int = 0) -> None:
        self._to = to
        self._weather = weather
        self._random = random.Random(seed)
        self.port = 0
        self.connections = self.resets = self.stalls = self.pieces = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Chaos]:
        """In a thread of its own."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(self._listen(), loop).result(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._to)
        except OSError:
            _reset(writer)
            return
        ways = [
            asyncio.create_task(self._copy(reader, far_writer)),
            asyncio.create_task(self._copy(far_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        _reset(writer)
        _reset(far_writer)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Until either end is gone, or chance resets the connection."""
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 18):
                self.pieces += 1
                if self._random.random() < self._weather.stall:
                    self.stalls += 1
                    await asyncio.sleep(self._random.uniform(*self._weather.stall_s))
                if self._random.random() < self._weather.reset:
                    self.resets += 1
                    return
                sink.write(data)
                await sink.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST, so that what was under way is lost."""
    with contextlib.suppress(OSError):
        end: socket.socket = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
