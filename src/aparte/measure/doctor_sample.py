"""What an examination needs the model for: the link's figures, and some tokens over the whole path."""

from __future__ import annotations

from collections.abc import Sequence

from aparte.answer import Answer
from aparte.config import Sampling, Stopping
from aparte.decode import StepRecord
from aparte.measure.decomposition import decompose_all
from aparte.measure.doctor import Sample
from aparte.measure.link_probe import LinkFigures
from aparte.measure.prompts import PROMPTS
from aparte.measure.rtt_runs import DECODE, Device
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding

TOKENS = 12
_MAX_NODES = 12


def take_sample(device: Device, url: str) -> tuple[LinkFigures, Sample]:
    """Probe the link, then write a first token, some more one by one, and some with drafts.

    Raises what connecting raises, among it :class:`~aparte.errors.MismatchError` for another model.
    """
    link = device.link(url)
    link.open()
    try:
        cloud = {
            "dtype": link.cloud_dtype,
            "max_nodes": link.max_nodes,
            "max_context": link.max_context,
            "model": device.fingerprint.to_json(),
        }
    finally:
        link.close()
    place = device.place(url)
    writer = place.writer
    writer.codec.eos = frozenset()  # so many tokens are wanted, whatever they are
    prompt = writer.codec.encode_chat([{"role": "user", "content": PROMPTS[1]}])

    def write(decoding: Decoding, tokens: int) -> Answer:
        writer.forget()
        return writer.complete(
            prompt,
            make_drafter(decoding),
            sampling=Sampling(),
            decoding=decoding,
            stopping=Stopping(max_new_tokens=tokens),
        )

    try:
        writer.target.open()
        one_by_one = Decoding("sequential", in_flight=1)
        token_ms = write(one_by_one, 1).ttft_ms
        plain = write(one_by_one, TOKENS).steps[1:]  # the first one carries the prompt
        drafted = write(Decoding(DECODE, max_nodes=_MAX_NODES, in_flight=1), 2 * TOKENS).steps[1:]
    finally:
        writer.target.close()
    return place.figures, Sample(
        token_ms=token_ms,
        parts=decompose_all(plain, place.bandwidth).per(len(plain)),
        tok_s=_tok_s(plain),
        speculative_tok_s=_tok_s(drafted) if drafted else None,
        cloud=cloud,
        device_dtype=device.parts.precision.name,
    )


def _tok_s(steps: Sequence[StepRecord]) -> float:
    return sum(step.accepted for step in steps) * 1e3 / sum(step.step_ms for step in steps)
