"""What answers took: the ``usage`` object, with what the cloud was shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aparte.answer import Answer, Piece
from aparte.measure.decomposition import Parts, decompose
from aparte.target.outgoing import Sent


def usage(
    answers: Sequence[Answer], prompt_tokens: int, target: str, layer: int | None, pseudonyms: int | None
) -> dict[str, Any]:
    """Of all choices together; ``prompt_tokens`` are those of the prompts, each counted once.

    ``layer`` is the number of layers that hidden states have passed before they leave the device;
    ``pseudonyms`` how many names and numbers were replaced, None where none are.
    """
    written = sum(len(answer.token_ids) for answer in answers)
    trips = sum(answer.round_trips for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": answers[0].reused_tokens if answers else 0},
        "aparte": {
            "target": target,
            "round_trips": trips,
            "mat": round(written / trips, 4) if trips else 0.0,
            "bytes_up": sum(answer.bytes_up for answer in answers),
            "bytes_down": sum(answer.bytes_down for answer in answers),
            "elapsed_s": round(sum(answer.elapsed_s for answer in answers), 4),
            "parts": _parts(answers),
            "revealed": _revealed(answers, target, layer),
            "pseudonyms": pseudonyms,
        },
    }


def _parts(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Where the time of all answers went; it adds up to their ``elapsed_s``, and nothing is negative."""
    total = Parts()
    for answer in answers:
        total += answer.decomposition().settled()
    known = {answer.link.mbps_up for answer in answers}
    mbps = known.pop() if len(known) == 1 else None
    return {**total.to_json(), "mbps": mbps and round(mbps, 3)}


def _revealed(answers: Sequence[Answer], target: str, layer: int | None) -> dict[str, Any]:
    """What reached the cloud. Every node of a step did, also drafts that were rejected."""
    nodes = sum(map(_nodes, answers))
    match target:
        case "split":
            return {"kind": "hidden_states", "after_layer": layer, "positions": nodes}
        case "draft":
            return {"kind": "tokens", "after_layer": None, "positions": nodes}
        case _:
            return {"kind": "nothing", "after_layer": None, "positions": 0}


def _nodes(answer: Answer) -> int:
    """Positions that were sent: what was new of the prompt, and then every node of every step."""
    if not answer.steps:
        return 0
    first = answer.steps[0]
    last_chunk = first.nodes - first.drafted  # of the prompt, counted with it
    prompt = answer.prompt_tokens - answer.reused_tokens
    return prompt - last_chunk + sum(step.nodes for step in answer.steps) + answer.stale_nodes


def round_trip(piece: Piece, number: int) -> dict[str, Any]:
    """What a chunk of a stream tells of its round trip."""
    step = piece.record.to_json()
    parts = decompose(piece.record).settled()
    kept = (
        "nodes",
        "drafted",
        "step_ms",
        "rtt_ms",
        "device_ms",
        "cloud_ms",
        "queue_ms",
        "bytes_up",
        "bytes_down",
        "reconnects",
    )
    return {
        "round_trip": number,
        "tokens": len(piece.tokens),
        **{name: step[name] for name in kept},
        "parts": parts.to_json(),
    }


def what_was_sent(messages: Sequence[Sent]) -> list[dict[str, Any]]:
    """What a chunk of a stream tells of the messages to the cloud, if it was asked to."""
    return [
        {
            "positions": len(sent.norms),
            "width": sent.width,
            "wire": sent.wire,
            "bytes_up": sent.bytes_up,
            "norms": [float(f"{norm:.4g}") for norm in sent.norms],
            "sample": sent.sample.hex(),
        }
        for sent in messages
    ]
