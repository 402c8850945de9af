"""What a chat template puts around turns, as token ids, so that a model can write both sides itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aparte.errors import UserError

_MARK = "aparte-turn-{}-marker"


@dataclass(frozen=True)
class Template:
    """Pieces of a conversation: ``start``, user text, ``to_answer``, answer, ``to_user``, user text, ...

    The first token of ``to_answer`` and of ``to_user`` is what ends a turn.
    """

    start: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return frozenset([self.to_answer[0], self.to_user[0]])


def read_template(folder: Path) -> tuple[Template, Any]:
    """The template of the model in ``folder``, and its tokenizer.

    Raises :class:`UserError` if the model has none, or one whose pieces can't be told apart.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise UserError(
            "This model has no chat template, and a bridge is trained on conversations that the model writes "
            "with itself. Use the instruction-tuned version of the model."
        )
    first, second, third = (_MARK.format(number) for number in range(3))
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": first},
            {"role": "assistant", "content": second},
            {"role": "user", "content": third},
        ],
        tokenize=False,
    )
    try:
        start, rest = text.split(first)
        to_answer, rest = rest.split(second)
        to_user, _ = rest.split(third)
    except ValueError:
        raise UserError(
            "The model's chat template changes or repeats what is said; it can't be used."
        ) from None

    def ids(piece: str) -> tuple[int, ...]:
        return tuple(tokenizer(piece, add_special_tokens=False)["input_ids"])

    template = Template(ids(start), ids(to_answer), ids(to_user))
    if not (template.to_answer and template.to_user):
        raise UserError("The model's chat template has no words between turns; it can't be used.")
    return template, tokenizer
