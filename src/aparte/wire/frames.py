"""Frames: the messages of the protocol as bytes. No socket, clock or tensor in here.

A frame is a 4-byte big-endian header length, a small JSON header and raw tensor bytes:

    | length | {"k": "step", "s": 7, "e": 0, "c": 41, "b": 42, "n": 1} | payload |

Headers are terse because they are paid for at every round trip. In split mode they hold slot numbers,
counters and times; never token ids, text or masks. The shape of a tree and the accepted path do depend on
the text: docs/privacy.md says what that reveals.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aparte.errors import FrameError, SlotError
from aparte.step import Step, chain_parents

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 65_536
#: Most nodes per step that a header can ask for. A server's own limit is lower; this one bounds what
#: reading a header costs, which a chain of any length fits into.
MAX_NODES = 4096
#: Most characters in the name of a session.
MAX_RESUME = 64
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Hello:
    """Device to cloud, first message: what the device runs and how it wants to talk.

    ``resume`` names the session to go on with after a lost connection. It is empty for a new session that
    may be gone on with, and None for one that ends with its connection.
    """

    fingerprint: dict[str, str]
    wire: str
    version: int = PROTOCOL_VERSION
    resume: str | None = None


@dataclass(frozen=True)
class Welcome:
    """Cloud to device: what the cloud serves, what it allows, and the numbers it computes with.

    ``resume`` is what a later greeting has to give to go on with this session; with ``resumed`` this one
    goes on with the session that was asked for.
    """

    fingerprint: dict[str, str]
    max_nodes: int
    max_context: int
    dtype: str = ""
    version: int = PROTOCOL_VERSION
    resume: str = ""
    resumed: bool = False


@dataclass(frozen=True)
class StepFrame:
    """Device to cloud: a step, with the front's hidden states as payload."""

    step: Step
    payload: bytes | memoryview


@dataclass(frozen=True)
class ResultFrame:
    """Cloud to device: the middle's hidden states for every node of step ``number``.

    ``compute_ms`` is the forward pass, ``queue_ms`` the time the step waited for it.
    """

    number: int
    compute_ms: float
    queue_ms: float
    payload: bytes | memoryview


@dataclass(frozen=True)
class ErrorFrame:
    """Either side: the session ends. ``code`` is one of :data:`ERROR_CODES`.

    With ``retry_after_s`` the sender asks to be left alone for so many seconds; 0 asks for nothing.
    """

    code: str
    message: str
    retry_after_s: float = 0.0


Frame = Hello | Welcome | StepFrame | ResultFrame | ErrorFrame

ERROR_CODES = ("mismatch", "frame", "slot", "limit", "overflow", "expired", "busy", "denied", "internal")


def encode(frame: Frame) -> bytes:
    """The bytes of one frame."""
    match frame:
        case Hello():
            header: dict[str, Any] = {
                "k": "hello",
                "v": frame.version,
                "model": frame.fingerprint,
                "wire": frame.wire,
            }
            if frame.resume is not None:
                header["resume"] = frame.resume
            payload: bytes | memoryview = b""
        case Welcome():
            header = {
                "k": "welcome",
                "v": frame.version,
                "model": frame.fingerprint,
                "nodes": frame.max_nodes,
                "context": frame.max_context,
                "dtype": frame.dtype,
            }
            if frame.resume:
                header["resume"] = frame.resume
            if frame.resumed:
                header["resumed"] = True
            payload = b""
        case StepFrame():
            step = frame.step
            header = {"k": "step", "s": step.number, "e": step.epoch, "c": step.commit, "b": step.base}
            if step.is_chain:  # prefill, and most next-token steps: no need to spell the parents out
                header["n"] = len(step)
            else:
                header["p"] = step.parents
            payload = frame.payload
        case ResultFrame():
            header = {"k": "out", "s": frame.number, "ms": round(frame.compute_ms, 2)}
            if frame.queue_ms >= 0.005:
                header["q"] = round(frame.queue_ms, 2)
            payload = frame.payload
        case ErrorFrame():
            header = {"k": "error", "code": frame.code, "message": frame.message}
            if frame.retry_after_s:
                header["after"] = round(frame.retry_after_s, 1)
            payload = b""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(text)), text, payload))


def decode(message: bytes) -> Frame:
    """Read one frame. Raises :class:`FrameError` for anything that is not exactly one.

    Nothing is allocated beyond the header; the payload is a view into ``message``. Whether the payload
    has the right size for the step is for the receiver to check, who knows the width and number format.
    """
    if len(message) < _LENGTH.size:
        raise FrameError("A message is shorter than its length field.")
    (length,) = _LENGTH.unpack_from(message)
    if length > MAX_HEADER_BYTES or length > len(message) - _LENGTH.size:
        raise FrameError("A message announces a header that is longer than the message or the limit.")
    try:
        header = _JSON.decode(str(memoryview(message)[_LENGTH.size : _LENGTH.size + length], "utf-8"))
    except (ValueError, RecursionError):
        raise FrameError("A message header is not JSON.") from None
    if not isinstance(header, dict):
        raise FrameError("A message header is not a JSON object.")
    kind = header.get("k")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise FrameError("A message is of an unknown kind.")
    payload = memoryview(message)[_LENGTH.size + length :]
    return reader(header, payload)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON.")


#: NaN and Infinity, which Python reads by default, are not JSON.
_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _integer(header: dict[str, Any], key: str, low: int, high: int = 2**53) -> int:
    value = header.get(key)
    if type(value) is not int or not low <= value <= high:
        raise FrameError(f"Header field {key!r} is missing or out of range.")
    return value


def _milliseconds(header: dict[str, Any], key: str, default: float | None = None) -> float:
    value = header.get(key, default)
    if type(value) not in (int, float) or not 0 <= value < 1e9:  # type: ignore[operator]
        raise FrameError(f"Header field {key!r} is missing or out of range.")
    return float(value)  # type: ignore[arg-type]


def _string(header: dict[str, Any], key: str, limit: int, default: str | None = None) -> str:
    value = header.get(key, default)
    if not isinstance(value, str) or len(value) > limit:
        raise FrameError(f"Header field {key!r} is missing or too long.")
    return value


def _fingerprint(header: dict[str, Any]) -> dict[str, str]:
    value = header.get("model")
    if not isinstance(value, dict) or len(value) > 16:
        raise FrameError("Header field 'model' is missing or not an object.")
    if not all(isinstance(entry, str) for entry in value.values()):
        raise FrameError("Header field 'model' holds something that is not a string.")
    return {key: entry[:256] for key, entry in value.items()}


def _empty(payload: memoryview) -> None:
    if len(payload):
        raise FrameError("A message carries a payload where none belongs.")


def _read_hello(header: dict[str, Any], payload: memoryview) -> Hello:
    _empty(payload)
    return Hello(
        _fingerprint(header),
        _string(header, "wire", 32),
        _integer(header, "v", 0, 1000),
        _string(header, "resume", MAX_RESUME) if "resume" in header else None,
    )


def _read_welcome(header: dict[str, Any], payload: memoryview) -> Welcome:
    _empty(payload)
    resumed = header.get("resumed", False)
    if type(resumed) is not bool:
        raise FrameError("Header field 'resumed' is neither true nor false.")
    return Welcome(
        _fingerprint(header),
        _integer(header, "nodes", 1, MAX_NODES),
        _integer(header, "context", 1),
        _string(header, "dtype", 32, ""),
        _integer(header, "v", 0, 1000),
        _string(header, "resume", MAX_RESUME, ""),
        resumed,
    )


def _read_step(header: dict[str, Any], payload: memoryview) -> StepFrame:
    commit, base = _integer(header, "c", -1), _integer(header, "b", 0)
    if "p" in header:
        parents = header["p"]
        if not isinstance(parents, list) or not 1 <= len(parents) <= MAX_NODES:
            raise FrameError("Header field 'p' is not a list of parents.")
        if not all(type(parent) is int and -1 <= parent <= 2**53 for parent in parents):
            raise FrameError("Header field 'p' holds something that is not a slot.")
    else:
        parents = chain_parents(commit, base, _integer(header, "n", 1, MAX_NODES))
    try:
        step = Step(_integer(header, "s", 0), _integer(header, "e", 0), commit, base, tuple(parents))
    except SlotError as error:
        raise FrameError(str(error)) from None
    return StepFrame(step, payload)


def _read_result(header: dict[str, Any], payload: memoryview) -> ResultFrame:
    return ResultFrame(
        _integer(header, "s", 0), _milliseconds(header, "ms"), _milliseconds(header, "q", 0.0), payload
    )


def _read_error(header: dict[str, Any], payload: memoryview) -> ErrorFrame:
    _empty(payload)
    after_s = header.get("after", 0)
    if type(after_s) not in (int, float) or not 0 <= after_s < 1e6:
        raise FrameError("Header field 'after' is out of range.")
    return ErrorFrame(_string(header, "code", 32), _string(header, "message", 2000), float(after_s))


_READERS: dict[str, Callable[[dict[str, Any], memoryview], Frame]] = {
    "hello": _read_hello,
    "welcome": _read_welcome,
    "step": _read_step,
    "out": _read_result,
    "error": _read_error,
}
