"""A recording in numbers: sizes, times, shapes and lengths of states. No content, however it is looked at."""

from __future__ import annotations

import statistics
from typing import Any

from aparte.errors import FrameError, UserError
from aparte.wire.playback import Exchange, Visit, visits
from aparte.wire.record import Recording
from aparte.wire.tensors import TensorCodec


def summary(recording: Recording) -> dict[str, Any]:
    """What ``aparte record show --json`` prints."""
    about = recording.about
    codec = codec_of(about) if about.get("target") == "split" else None
    return {
        "about": {key: about.get(key) for key in _ABOUT},
        "cut_short": recording.cut_short,
        "messages": len(recording.messages),
        "bytes": sum(len(message.data) for message in recording.messages),
        "sessions": [_session(visit, codec) for visit in visits(recording.messages)],
    }


_ABOUT = ("format", "version", "started", "target", "model", "cut", "wire", "width", "layers", "dtype")


def codec_of(about: dict[str, Any]) -> TensorCodec:
    """How states are written in it. Raises :class:`UserError` if the header does not say."""
    wire, width = about.get("wire"), about.get("width")
    if not isinstance(wire, str) or type(width) is not int or not 1 <= width <= 1 << 20:
        raise UserError("The recording's header does not say how states are written. Record again.")
    return TensorCodec(wire, width)


def _session(visit: Visit, codec: TensorCodec | None) -> dict[str, Any]:
    waits = [exchange.wait_ms for exchange in visit.exchanges if exchange.wait_ms is not None]
    return {
        "link": visit.link,
        "at_s": round(visit.at_s, 3),
        "connections": visit.connections,
        "errors": visit.errors,
        "damaged": visit.damaged,
        "nodes": sum(len(exchange.sent.step) for exchange in visit.exchanges),
        "bytes_up": sum(exchange.bytes_up for exchange in visit.exchanges),
        "bytes_down": sum(exchange.bytes_down for exchange in visit.exchanges),
        "wait_p50_ms": round(statistics.median(waits), 2) if waits else None,
        "steps": [_step(exchange, codec) for exchange in visit.exchanges],
    }


def _step(exchange: Exchange, codec: TensorCodec | None) -> dict[str, Any]:
    step, result = exchange.sent.step, exchange.result
    return {
        "step": step.number,
        "epoch": step.epoch,
        "commit": step.commit,
        "base": step.base,
        "nodes": len(step),
        "chain": step.is_chain,
        "at_s": round(exchange.at_s, 4),
        "wait_ms": None if exchange.wait_ms is None else round(exchange.wait_ms, 2),
        "cloud_ms": None if result is None else result.compute_ms,
        "queue_ms": None if result is None else result.queue_ms,
        "bytes_up": exchange.bytes_up,
        "bytes_down": exchange.bytes_down,
        "norm_up": _norm(codec, exchange.sent.payload, len(step)),
        "norm_down": None if result is None else _norm(codec, result.payload, len(step)),
    }


def _norm(codec: TensorCodec | None, payload: bytes | memoryview, nodes: int) -> float | None:
    """Mean length of the rows; None in draft mode, where there are none, and for what is none."""
    if codec is None:
        return None
    try:
        return round(float(codec.decode(payload, nodes).float().norm(dim=1).mean()), 3)
    except FrameError:
        return None
