"""A stage that several threads use."""

from __future__ import annotations

import threading

from aparte.model.stage import Item, Output, Stage


class TurnTaking(Stage):
    """The same stage, one pass at a time.

    Some families' rotary embeddings change with the longest sequence they have seen, and the threads of two
    passes at once would only be in each other's way.
    """

    def __init__(self, stage: Stage) -> None:
        vars(self).update(vars(stage))
        self._turn = threading.Lock()

    def forward_one(self, item: Item) -> Output:
        with self._turn:
            return super().forward_one(item)
