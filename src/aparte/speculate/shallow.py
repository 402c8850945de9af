"""``shallow:K``: the first K layers of the target's own checkpoint as a draft model.

Final norm and LM head follow right after them, as if the other layers were not there. Nothing is trained and
nothing else has to be downloaded; how good the guesses are depends on how far the model has got by then.
"""

from __future__ import annotations

from aparte.errors import UserError
from aparte.model.parts import Blueprint, Progress
from aparte.speculate.draft_model import TOP, DraftModel


def open_shallow(
    blueprint: Blueprint, layers: int, *, top: int = TOP, progress: Progress | None = None
) -> DraftModel:
    """Load the first ``layers`` layers, embedding, norm and head.

    Raises :class:`UserError` if the model has no more than these.
    """
    if not 1 <= layers < blueprint.layers:
        raise UserError(
            f"shallow:{layers} does not fit: the model has {blueprint.layers} layers, "
            f"so K must be 1 to {blueprint.layers - 1}."
        )
    return DraftModel(blueprint, blueprint.vocab_size, top=top, layers=layers, progress=progress)
