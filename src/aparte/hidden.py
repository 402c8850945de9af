"""Pseudonyms in the library: stand-ins before a prompt becomes tokens, the originals in the answer's text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from aparte.errors import UserError
from aparte.options import Options
from aparte.pool import Part
from aparte.privacy.pseudonyms import Pseudonyms
from aparte.privacy.restore import Restorer
from aparte.privacy.structured import hide_schema, in_json
from aparte.text.tokenizer import Message

#: Text (a single question), a conversation, or token ids.
Prompt = str | Sequence[Message] | Sequence[int]


def hide_prompt(prompt: Prompt, hide: Callable[[str], str]) -> Prompt:
    """Raises :class:`UserError` for what cannot be searched for names."""
    if isinstance(prompt, str):
        return hide(prompt)
    if any(isinstance(turn, int) or not isinstance(turn.get("content"), str) for turn in prompt):
        raise UserError("Pseudonyms replace names in text. Give the prompt as text, or as messages of text.")
    return [turn | {"content": hide(turn["content"])} for turn in prompt]  # type: ignore[operator, index]


def hide_options(options: Options, hide: Callable[[str], str]) -> Options:
    """The options whose text the model, or its answer, is compared with."""
    if options.grammar is not None:
        raise UserError("Pseudonyms cannot be put into a grammar. Use json_schema, or leave them out.")
    schema = options.json_schema
    if schema is not None:
        try:
            schema = json.dumps(hide_schema(json.loads(schema), hide))
        except ValueError:
            raise UserError("json_schema is not JSON.") from None
    return replace(options, stop=tuple(map(hide, options.stop)), json_schema=schema)


class Restoring:
    """Puts the originals back into one answer, as its parts come."""

    def __init__(self, names: Pseudonyms | None, options: Options) -> None:
        """What ``names`` replaced until now; without any, nothing changes."""
        self._restorer = Restorer({})
        if names is not None:
            self._restorer = names.restorer(str if options.json_schema is None else in_json)

    @property
    def written(self) -> str:
        """What the model wrote, stand-ins and all."""
        return self._restorer.given

    @property
    def text(self) -> str:
        """What it says."""
        return self._restorer.text

    def take(self, part: Part) -> Part:
        """The part as it is shown. An unfinished name waits for the next one."""
        text = self._restorer.feed(part.text)
        if part.finish is not None:
            text += self._restorer.finish()
        return part if text == part.text else replace(part, piece=replace(part.piece, text=text))

    def finish(self) -> None:
        """No more parts come."""
        self._restorer.finish()
