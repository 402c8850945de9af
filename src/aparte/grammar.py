"""Constrained decoding: only tokens with which the answer can still become what a schema or grammar allows.

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
    """Compiles schemas and grammars for the tokenizer of one model."""

    def __init__(self, folder: Path, vocab_size: int, eos: frozenset[int]) -> None:
        """``folder`` is the model's; nothing is loaded before the first one comes."""
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos = sorted(eos)
        self._tokenizer: Any = None

    def json_schema(self, schema: str) -> Constraint:
        """Raises :class:`UserError` if ``schema`` is none, or uses what llguidance does not support."""
        return self._compiled("json_schema", schema, "JSON schema")

    def lark(self, grammar: str) -> Constraint:
        """A grammar in llguidance's variant of Lark.

        Raises :class:`UserError` if ``grammar`` is none, or uses what llguidance does not support.
        """
        return self._compiled("lark", grammar, "grammar")

    def _compiled(self, kind: str, source: str, what: str) -> Constraint:
        try:
            from llguidance import LLMatcher, LLTokenizer, grammar_from
        except ImportError:
            raise UserError(
                f"A {what} needs the package llguidance on this device. Install it with "
                "`pip install 'aparte[gateway]'`, or leave it out."
            ) from None
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=self._eos)
            except Exception as error:  # of any kind: tokenizers come in many shapes
                raise UserError(
                    f"This model's tokenizer can't be used with a {what} ({type(error).__name__}). "
                    "Leave it out."
                ) from None
        try:
            matcher = LLMatcher(self._tokenizer, grammar_from(kind, source), log_level=0)  # type: ignore[arg-type]
        except ValueError:
            raise UserError(f"The {what} is not one. Correct it.") from None
        if matcher.is_error():
            raise UserError(f"The {what} cannot be used: {_first_line(matcher.get_error())}")
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
