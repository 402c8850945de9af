"""The shapes of answers: whole ones and chunks of a stream, for chats and for plain completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aparte.adjust import TokenLogprob
from aparte.gateway.accounts import round_trip, what_was_sent
from aparte.gateway.hiding import restored
from aparte.gateway.tools import Call, ToolCalls
from aparte.gateway.translate import Order
from aparte.pool import Part
from aparte.privacy.restore import Restorer
from aparte.privacy.structured import in_json
from aparte.text.stream import INCOMPLETE
from aparte.text.tokenizer import Codec


class Spelling:
    """Tokens as strings, for lists of log-probabilities."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._names: dict[int, str] = {}

    def of(self, token: int) -> str:
        """Its text. Special tokens, and those that are a part of a character, go by the tokenizer's name."""
        if (text := self.text_of(token)) is not None:
            return text
        if not self._names:
            self._names = self._codec.vocabulary
        return self._names.get(token, "")

    def text_of(self, token: int) -> str | None:
        """Its text, or None if it has none of its own."""
        text = self._codec.decode([token])
        return text if text and INCOMPLETE not in text else None

    def length(self, tokens: Sequence[int]) -> int:
        """Characters of their text."""
        return len(self._codec.decode(tokens))


@dataclass
class Choice:
    """One answer as it grows."""

    index: int
    order: Order
    spelling: Spelling
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    round_trips: int = 0
    reason: str | None = None
    _parser: ToolCalls = field(default_factory=ToolCalls)
    _restorer: Restorer = field(default_factory=lambda: Restorer({}))

    def __post_init__(self) -> None:
        if self.order.names is not None:
            spell = str if self.order.options.json_schema is None else in_json
            self._restorer = self.order.names.restorer(spell)

    def take(self, part: Part) -> dict[str, Any]:
        """Add what a round trip brought; the choice of its chunk."""
        text, calls = self._parser.feed(part.text) if self.order.tools else (part.text, [])
        text = self._restorer.feed(text)
        if (names := self.order.names) is not None:
            calls = [restored(call, names.restorer) for call in calls]
        self.round_trips += 1
        self.text += text
        before = len(self.logprobs)
        self.logprobs += part.logprobs
        chunk = self._chunk(text, calls, self._logprobs(before))
        self.calls += calls
        chunk["aparte"] = round_trip(part.piece, self.round_trips)
        if self.order.include_sent:
            chunk["aparte"]["sent"] = what_was_sent(part.sent)
        return chunk

    def end(self, reason: str | None) -> dict[str, Any]:
        """The choice of the last chunk."""
        rest = self._restorer.feed(self._parser.finish()) + self._restorer.finish()
        self.text += rest
        self.reason = "tool_calls" if self.calls else reason
        return self._chunk(rest, [], None) | {"finish_reason": self.reason}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        whole: dict[str, Any] = {"index": self.index, "finish_reason": self.reason}
        if self.order.chat:
            message: dict[str, Any] = {"role": "assistant", "content": self.text}
            if self.calls:
                message["content"] = self.text.strip() or None
                message["tool_calls"] = [call.to_json() for call in self.calls]
            whole["message"] = message
        else:
            whole["text"] = self.text
        return whole | {"logprobs": self._logprobs(0)}

    def _chunk(self, text: str, calls: Sequence[Call], logprobs: Any) -> dict[str, Any]:
        chunk: dict[str, Any] = {"index": self.index, "finish_reason": None, "logprobs": logprobs}
        if not self.order.chat:
            return chunk | {"text": text}
        delta: dict[str, Any] = {"content": text}
        if calls:
            first = len(self.calls)
            delta["tool_calls"] = [
                {"index": first + number} | call.to_json() for number, call in enumerate(calls)
            ]
        return chunk | {"delta": delta}

    def _logprobs(self, start: int) -> dict[str, Any] | None:
        """Of the tokens from number ``start`` on."""
        if self.order.options.top_logprobs is None:
            return None
        told = self.logprobs[start:]
        if self.order.chat:
            return {"content": [self._entry(token) for token in told], "refusal": None}
        tokens = [token.token for token in self.logprobs]
        return {
            "tokens": [self.spelling.of(token.token) for token in told],
            "token_logprobs": [token.logprob for token in told],
            "top_logprobs": [{self.spelling.of(other): value for other, value in one.top} for one in told],
            "text_offset": [self.spelling.length(tokens[:place]) for place in range(start, len(tokens))],
        }

    def _entry(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._named(other, value) for other, value in token.top]
        return self._named(token.token, token.logprob) | {"top_logprobs": top}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self.spelling.text_of(token)
        raw = None if text is None else list(text.encode())
        return {"token": self.spelling.of(token), "logprob": value, "bytes": raw}


@dataclass(frozen=True)
class Envelope:
    """What is around the choices of one request."""

    model: str
    chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return self._around(kind, choices) | {"usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._around("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _around(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }
