"""``--remember``: a drafter that goes on with what earlier runs learned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aparte.cli.output import note
from aparte.config import Decoding
from aparte.errors import UserError

if TYPE_CHECKING:
    from aparte.speculate.common import CommonTable
    from aparte.speculate.drafter import Drafter
    from aparte.speculate.neural import TreeModel


def check_remember(decoding: Decoding, wanted: bool) -> None:
    """Raise :class:`UserError` if ``wanted`` and there is no table to keep."""
    if wanted and "recycling" not in decoding.sources:
        raise UserError(
            f"--remember keeps the recycling table, and --decode {decoding.decode} has none. Use auto."
        )


@contextlib.contextmanager
def remembered(
    decoding: Decoding,
    model: str,
    vocab_size: int,
    wanted: bool,
    models: Mapping[str, TreeModel | CommonTable],
) -> Iterator[Drafter]:
    """The drafter for ``decoding``; if ``wanted``, with the model's table, which is kept at the end.

    ``models`` are the neural ones it needs.
    """
    from aparte.speculate.drafter import make_drafter
    from aparte.speculate.memory import Memory

    if not wanted:
        yield make_drafter(decoding, models=models)
        return
    memory = Memory(Path(model).name, vocab_size)
    table = memory.load()
    try:
        yield make_drafter(decoding, table, models)
    finally:
        try:
            memory.save(table)
        except UserError as error:  # not worth an answer that is written already
            note(f"Error: {error}")
