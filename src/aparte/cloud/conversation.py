"""What passes over one connection: steps that come in, results and refusals that go out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from websockets.exceptions import ConnectionClosed

from aparte.cloud.connection import Connection
from aparte.cloud.sessions import Computed, Session
from aparte.errors import FrameError
from aparte.step import Step
from aparte.wire.frames import ErrorFrame, Frame, ResultFrame, StepFrame, decode, encode

#: Steps a session may have waiting; a device that sends more is made to wait by its own TCP window.
QUEUE_STEPS = 16


@dataclass(frozen=True)
class Queued:
    """A step that waits for the forward pass, when it came, and how large its message was."""

    frame: StepFrame
    arrived: float
    num_bytes: int


async def read_steps(
    connection: Connection,
    session: Session,
    queue: asyncio.Queue[Queued | Exception],
    on_step: Callable[[Step, int], None] = lambda step, size: None,
) -> None:
    """Move steps from the socket to the queue; whatever ends that goes into the queue too.

    ``on_step`` is told of every step that is within bounds, and the size of its message.
    """
    try:
        while True:
            message = await connection.recv(decode=False)
            arrived = time.perf_counter()
            frame: Frame = decode(message)
            if not isinstance(frame, StepFrame):
                raise FrameError("A message after the greeting is not a step.")
            session.check(frame.step, frame.payload)
            on_step(frame.step, len(message))
            session.epoch = max(session.epoch, frame.step.epoch)
            session.unanswered += 1
            session.last_used = time.monotonic()
            await queue.put(Queued(frame, arrived, len(message)))
    except Exception as error:  # of any kind: a session whose reader is gone would wait for ever
        session.abandoned = isinstance(error, ConnectionClosed)
        await queue.put(error)


def queued_ms(item: Queued, computed: Computed) -> float:
    """How long a step was here without being computed."""
    return max(0.0, (time.perf_counter() - item.arrived) * 1e3 - computed.compute_ms)


def result_of(item: Queued, computed: Computed, queue_ms: float) -> bytes:
    return encode(ResultFrame(item.frame.step.number, computed.compute_ms, queue_ms, computed.payload))


async def refuse(connection: Connection, code: str, message: str, retry_after_s: float = 0.0) -> None:
    """Tell the device why, and when to come again, then close; it may be gone already."""
    with contextlib.suppress(ConnectionClosed):
        await connection.send(encode(ErrorFrame(code, message[:1000], retry_after_s)))
        # What the device has sent meanwhile lies in front of its goodbye and has to be read away.
        await asyncio.gather(connection.close(1008, code), _discard(connection))


async def dismiss(connection: Connection, code: str, message: str) -> None:
    """The same while somebody else is reading from the connection, and will see it end."""
    with contextlib.suppress(ConnectionClosed):
        await connection.send(encode(ErrorFrame(code, message)))
        await connection.close(1008, code)


async def _discard(connection: Connection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await connection.recv(decode=False)
