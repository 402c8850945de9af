"""One device of a load measurement, as a process: ``python -m aparte.measure.load_client``.

It reads its settings as one JSON line, loads, writes one short answer and says that it is ready. Then, for
every line with a number of seconds, it writes one answer after the other for so long and reports, as one
JSON line, what it got. Devices of this measurement share their processors, so one thread computes unless the
environment says otherwise. Without a ``url`` it runs the whole model by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from aparte.answer import Writer
from aparte.config import Compute, Cut, Sampling, Stopping
from aparte.device import open_local_writer, open_writer
from aparte.errors import AparteError
from aparte.measure.prompts import PROMPTS
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding


class Client:
    """A writer, and the prompts in an order of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        blueprint = Blueprint.open(resolve(settings["model"]), Compute(settings["dtype"], settings["device"]))
        self._writer: Writer = (
            open_writer(
                blueprint,
                settings["model"],
                Cut.parse(settings["cut"]),
                cloud=settings["url"],
                token=os.environ.get("APARTE_TOKEN"),
            )
            if settings["url"]
            else open_local_writer(blueprint)
        )
        self._decoding = Decoding(settings["decode"], in_flight=1)
        self._most_tokens = int(settings["max_new_tokens"])
        self._next_prompt = int(settings["index"])
        self._prompts = [
            self._writer.codec.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS
        ]

    def answer_for(self, seconds: float, most_tokens: int | None = None) -> dict[str, Any]:
        """Write answers until the time is up; the last one is broken off."""
        started = time.perf_counter()
        tokens, answers = 0, []
        steps: list[dict[str, float]] = []
        while time.perf_counter() - started < seconds:
            prompt = self._next_prompt % len(PROMPTS)
            self._next_prompt += 1
            self._writer.forget()
            answer, pieces = self._writer.write(
                self._prompts[prompt],
                make_drafter(self._decoding),
                sampling=Sampling(),
                decoding=self._decoding,
                stopping=Stopping(max_new_tokens=most_tokens or self._most_tokens),
            )
            try:
                for number, piece in enumerate(pieces):
                    if time.perf_counter() - started > seconds:
                        break
                    tokens += len(piece.tokens)
                    if number:  # the first step carries the prompt
                        steps.append(
                            {
                                "step_ms": piece.record.step_ms,
                                "queue_ms": piece.record.timing.queue_ms,
                                "cloud_ms": piece.record.timing.cloud_ms,
                                "nodes": piece.record.nodes,
                                "tokens": len(piece.tokens),
                            }
                        )
            finally:
                pieces.close()  # type: ignore[attr-defined]
            answers.append({"prompt": prompt, "token_ids": answer.token_ids})
            if most_tokens is not None:
                break
        return {"seconds": seconds, "tokens": tokens, "answers": answers, "steps": steps}


def main() -> None:
    """Talk with :mod:`aparte.measure.load`."""
    try:
        client = Client(json.loads(sys.stdin.readline()))
        client.answer_for(60.0, most_tokens=4)
        _say({"ready": True})
        for line in sys.stdin:
            _say(client.answer_for(float(line)))
    except AparteError as error:
        sys.exit(str(error))  # the last line on standard error is what is reported


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
