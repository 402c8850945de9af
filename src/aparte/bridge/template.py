"""What a chat template puts around turns, as token ids, so that a model can write both sides itself."""

from __future__ import annotations

from dataclasses import dataclass

from aparte.errors import UserError
from aparte.text.tokenizer import Codec

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


def read_template(codec: Codec) -> Template:
    """Raises :class:`UserError` if there is none, or one whose pieces can't be told apart."""
    if not codec.has_chat_template:
        raise UserError(
            "This model has no chat template, and a bridge is trained on conversations that the model writes "
            "with itself. Use the instruction-tuned version of the model."
        )
    first, second, third = (_MARK.format(number) for number in range(3))
    text = codec.render(
        [
            {"role": "user", "content": first},
            {"role": "assistant", "content": second},
            {"role": "user", "content": third},
        ]
    )
    try:
        start, rest = text.split(first)
        to_answer, rest = rest.split(second)
        to_user, _ = rest.split(third)
    except ValueError:
        raise UserError(
            "The model's chat template changes or repeats what is said; it can't be used."
        ) from None
    pieces = [tuple(codec.encode_piece(piece)) for piece in (start, to_answer, to_user)]
    if not all(pieces[1:]):
        raise UserError("The model's chat template has no words between turns; it can't be used.")
    return Template(*pieces)
