"""The *recycling* source: the best next tokens seen in any logits so far.

The device has logits for every node it sent, rejected ones too, or in draft mode what the verifier names of
them; what the target thought likely after a token once, it often thinks likely again. (Token Recycling, with
pairs of tokens besides.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from aparte.distribution import Row
from aparte.likely import likely
from aparte.speculate.drafter import Outcome
from aparte.speculate.source import Candidate
from aparte.speculate.tree import BELOW_ROOT

#: Next tokens remembered per key.
KEPT = 6

#: Probability that a token is taken to have had which the target chose without telling more, and what
#: becomes of those of former choices.
CHOSEN = 0.7
FORMER = 0.5

Place = tuple[int, int]  # the last two tokens
Key = TypeVar("Key")


class Recycling:
    """Tables from the last token, and from the last two, to the most probable next ones."""

    likely = KEPT

    def __init__(self) -> None:
        #: Best first, with their probabilities, :data:`KEPT` per key; the newest keys last.
        self.after_one: dict[int, Row] = {}
        self.after_two: dict[Place, Row] = {}

    def __len__(self) -> int:
        return len(self.after_one) + len(self.after_two)

    def start(self, context: Sequence[int]) -> Place:
        return (context[-2] if len(context) > 1 else -1, context[-1])

    def candidates(self, place: Place) -> list[Candidate]:
        found: dict[int, Candidate] = {}
        for name, row, trust in (
            ("two", self.after_two.get(place, ()), 0.8),
            ("one", self.after_one.get(place[1], ()), 0.5),
        ):
            for rank, (token, probability) in enumerate(row):
                if token not in found:
                    kind = (f"after-{name}", rank, int(probability * 4))
                    found[token] = Candidate(token, kind, trust * probability)
        return list(found.values())

    def advance(self, place: Place, token: int) -> Place:
        return place[1], token

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:
        rows = outcome.likely or (likely(outcome.logits, KEPT) if len(outcome.logits) else ())
        if not rows:
            self._learn_choices(context, outcome)
            return
        before, root = self.start(context)
        self._store(before, root, rows[0])
        for node, (token, parent) in enumerate(zip(outcome.tree.tokens, outcome.tree.parents, strict=True)):
            previous = root if parent == BELOW_ROOT else outcome.tree.tokens[parent]
            self._store(previous, token, rows[1 + node])

    def _learn_choices(self, context: Sequence[int], outcome: Outcome) -> None:
        """Where the target tells its choices only: they come before what was chosen earlier."""
        before, root = self.start(context)
        nodes = [(before, root)]
        for token, parent in zip(outcome.tree.tokens, outcome.tree.parents, strict=True):
            nodes.append((root if parent == BELOW_ROOT else outcome.tree.tokens[parent], token))
        for (previous, token), choice in zip(nodes, outcome.choices, strict=True):
            if choice < 0:  # rejection sampling leaves nodes off the path without one
                continue
            self._put(self.after_one, token, _with_choice(self.after_one.get(token, []), choice))
            pair = previous, token
            self._put(self.after_two, pair, _with_choice(self.after_two.get(pair, []), choice))

    def _store(self, previous: int, token: int, row: Row) -> None:
        self._put(self.after_one, token, row)
        self._put(self.after_two, (previous, token), row)

    @staticmethod
    def _put(table: dict[Key, Row], key: Key, row: Row) -> None:
        table.pop(key, None)  # the newest goes last, so that the oldest can go first
        table[key] = row


def _with_choice(row: Row, choice: int) -> Row:
    """``row`` with what was chosen now in front, and what was chosen before the less likely."""
    former = [(token, FORMER * probability) for token, probability in row if token != choice]
    return [(choice, CHOSEN), *former][:KEPT]


class RunnerUp:
    """The *runner-up* source: what nearly came instead of the pending token may come right after it."""

    likely = KEPT

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def start(self, context: Sequence[int]) -> bool:  # noqa: ARG002
        return True  # only directly below the pending token

    def candidates(self, place: bool) -> list[Candidate]:
        if not place:
            return []
        return [Candidate(token, ("runner-up", rank), 0.04) for rank, token in enumerate(self._tokens)]

    def advance(self, place: bool, token: int) -> bool:  # noqa: ARG002
        return False

    def learn(self, context: Sequence[int], outcome: Outcome) -> None:  # noqa: ARG002
        path = outcome.accepted.path
        node = 1 + path[-1] if path else 0
        last: Row = ()
        if outcome.likely:
            last = outcome.likely[node][:3]
        elif len(outcome.logits):
            last = likely(outcome.logits[node : node + 1], 3)[0]
        chosen = outcome.accepted.tokens[-1]
        self._tokens = [token for token, _ in last if token != chosen][:2]
