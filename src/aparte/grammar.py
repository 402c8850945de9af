"""Constrained decoding: only tokens with which the answer can still become JSON of a given schema.

The grammar is compiled and followed by llguidance. A mask depends on the text so far and nothing else, so it
works node by node in a draft tree (:mod:`aparte.adjust`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aparte.errors import UserError


class Grammars:
    """Compiles schemas for the tokenizer of one model."""

    def __init__(self, folder: Path, vocab_size: int, eos: frozenset[int]) -> None:
        """``folder`` is the model's; nothing is loaded before a schema comes."""
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos = sorted(eos)
        self._tokenizer: Any = None

    def json_schema(self, schema: str) -> Constraint:
        """Raises :class:`UserError` if ``schema`` is none, or uses what llguidance does not support."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise UserError(
                "A JSON schema needs the package llguidance on this device. Install it with "
                "`pip install 'aparte[gateway]'`, or leave the schema out."
            ) from None
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=self._eos)
            except Exception as error:  # of any kind: tokenizers come in many shapes
                raise UserError(
                    f"This model's tokenizer can't be used with a JSON schema ({type(error).__name__}). "
                    "Leave the schema out."
                ) from None
        try:
            matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        except ValueError:
            raise UserError("The JSON schema is not a JSON object. Correct it.") from None
        if matcher.is_error():
            raise UserError(f"The JSON schema cannot be used: {_first_line(matcher.get_error())}")
        return Constraint(matcher, self._vocab_size)


class Constraint:
    """An :class:`~aparte.adjust.Adjustment` for one answer."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._read: list[int] = []  # what the matcher has consumed
        self._vocab_size = vocab_size

    def __call__(self, written: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if not self._follow(written):
            return logits  # nothing leads here: an earlier mask forbids it
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[: len(logits)].bool()
        forbidden = torch.ones(len(logits), dtype=torch.bool)
        forbidden[: len(allowed)] = ~allowed
        return logits.float().masked_fill(forbidden.to(logits.device), float("-inf"))

    def _follow(self, written: Sequence[int]) -> bool:
        """Bring the matcher to where ``written`` ends; False if the grammar does not allow that text."""
        pairs = zip(self._read, written, strict=False)
        same = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        same = min(len(self._read), len(written)) if same is None else same
        self._matcher.rollback(len(self._read) - same)
        del self._read[same:]
        new = list(written[same:])
        consumed = self._matcher.try_consume_tokens(new)
        self._read += new[:consumed]
        return bool(consumed == len(new)) and not self._matcher.is_error()


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "llguidance does not say why."
