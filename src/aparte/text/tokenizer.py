"""Text to token ids and back, through the model's own tokenizer and chat template. Device only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aparte.errors import CheckpointError, UserError

Message = dict[str, Any]


class Codec:
    """The tokenizer of one model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise CheckpointError(
                f"The tokenizer in {folder} cannot be loaded ({type(error).__name__}). "
                "Check that tokenizer.json is there and complete; download the model again if not."
            ) from error
        # A file may have it pad or cut, which the first call undoes; after that, threads can share it.
        self._tokenizer("")
        self.eos = _end_tokens(folder, self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def vocabulary(self) -> dict[int, str]:
        """Every token by its id, special and added ones included, as the tokenizer spells it inside."""
        return {token: text for text, token in self._tokenizer.get_vocab().items()}

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids of tokens that are no text, such as those between the turns of a conversation."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(token for token, entry in added if entry.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer itself adds."""
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def encode_piece(self, text: str) -> list[int]:
        """Token ids of a piece out of a longer text: nothing is added."""
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as its template spells it."""
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        return text

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools, and for calls in ``<tool_call>`` tags."""
        template = str(self._tokenizer.chat_template or "")
        return "tools" in template and "<tool_call>" in template

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        ``tools`` are descriptions of functions for the template (:attr:`takes_tools`).
        """
        if not self.has_chat_template:
            raise UserError("This model has no chat template. Use --raw to continue plain text.")
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )
        except Exception as error:
            # Templates raise whatever they like (jinja2 errors, TemplateError, TypeError).
            raise UserError(f"The model's chat template refuses this conversation: {error}.") from error
        return [int(token) for token in encoded["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` without special tokens, exactly as the tokens spell it."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: from the generation config, else the config, else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        if isinstance(value, int):
            return frozenset([value])
        if isinstance(value, list) and value:
            return frozenset(int(token) for token in value)
    return frozenset() if tokenizer.eos_token_id is None else frozenset([int(tokenizer.eos_token_id)])
