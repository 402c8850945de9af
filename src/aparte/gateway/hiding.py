"""Pseudonyms at the gateway: stand-ins before anything becomes tokens, the originals in what clients read.

Requests bring their whole conversation, and nothing of it is kept here between them. So the stand-ins are
drawn again for every request, from a source that depends on how the conversation begins and on a secret of
this process: the same conversation gets the same ones, which is what lets it find its prefix at the cloud,
and another one gets others.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aparte.gateway.tools import Call
from aparte.privacy.finders import Finder, Listed
from aparte.privacy.pseudonyms import Pseudonyms
from aparte.privacy.restore import Restorer
from aparte.privacy.structured import each_text, hide_schema


class Hiding:
    """What is replaced in all requests of a gateway."""

    def __init__(self, listed: Sequence[Listed], finders: Sequence[Finder]) -> None:
        """Raises :class:`~aparte.errors.UserError` for listed stand-ins that could be mistaken."""
        self._listed = listed
        self._lock = threading.Lock()  # finders need not expect several threads
        self._finders = [self._in_turn(finder) for finder in finders]
        self._secret = secrets.token_bytes(32)
        Pseudonyms(self._listed, self._finders)

    def conversation(self, beginning: Sequence[str]) -> Pseudonyms:
        """For a conversation that begins with these texts, or for prompts without one."""
        seed = hmac.digest(self._secret, json.dumps(list(beginning)).encode(), hashlib.sha256)
        return Pseudonyms(self._listed, self._finders, random.Random(seed))

    def _in_turn(self, finder: Finder) -> Finder:
        def find(text: str) -> Any:
            with self._lock:
                return list(finder(text))

        return find


def beginning(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts up to the first question: what a conversation is told from others by."""
    first = next((place for place, one in enumerate(messages) if one["role"] == "user"), len(messages))
    return [str(message["content"]) for message in messages[: first + 1]]


def hide_message(message: dict[str, Any], hide: Callable[[str], str]) -> dict[str, Any]:
    """A turn of a chat template, arguments of calls included."""
    hidden = message | {"content": hide(message["content"])}
    if "tool_calls" in message:
        hidden["tool_calls"] = [
            call | {"function": _hide_arguments(call["function"], hide)} for call in message["tool_calls"]
        ]
    return hidden


def _hide_arguments(function: dict[str, Any], hide: Callable[[str], str]) -> dict[str, Any]:
    return function | {"arguments": each_text(function["arguments"], hide)}


def hide_tool(tool: dict[str, Any], hide: Callable[[str], str]) -> dict[str, Any]:
    """A function's description and parameters; its name stays, it is the program's."""
    function = dict(tool["function"])
    if "description" in function:
        function["description"] = hide(function["description"])
    if "parameters" in function:
        function["parameters"] = hide_schema(function["parameters"], hide)
    return tool | {"function": function}


def restored(call: Call, restore: Callable[[], Restorer]) -> Call:
    """A call with the originals in its arguments, as the client's function expects them."""
    arguments = each_text(json.loads(call.arguments), lambda text: whole(restore(), text))
    return Call(call.id, call.name, json.dumps(arguments, ensure_ascii=False))


def whole(restorer: Restorer, text: str) -> str:
    """All of a text, restored."""
    return restorer.feed(text) + restorer.finish()
