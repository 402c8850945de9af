"""The *recycling* source: the best next tokens seen in any logits so far.

The device computes logits for every node it sent, rejected ones too; what the target thought likely
after a token once, it often thinks likely again. (Token Recycling, with pairs of tokens besides.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aparte.speculate.drafter import Outcome
from aparte.speculate.source import Candidate
from aparte.speculate.tree import BELOW_ROOT

#: Next tokens remembered per key.
KEPT = 6

Place = tuple[int, int]  # the last two tokens


class Recycling:
    """Tables from the last token, and from the last two, to the most probable next ones."""

    def __init__(self) -> None:
        #: Best first, with their probabilities, :data:`KEPT` per key; the newest keys last.
        self.after_one: dict[int, list[tuple[int, float]]] = {}
        self.after_two: dict[Place, list[tuple[int, float]]] = {}

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
        best = outcome.logits.float().topk(KEPT, dim=-1)  # no vocabulary is smaller than that
        # The share within the full distribution, so that a flat one does not look certain.
        shares = (best.values - outcome.logits.float().logsumexp(dim=-1, keepdim=True)).exp()
        rows = [
            list(zip(tokens, values, strict=True))
            for tokens, values in zip(best.indices.tolist(), shares.tolist(), strict=True)
        ]
        before, root = self.start(context)
        self._store(before, root, rows[0])
        for node, (token, parent) in enumerate(zip(outcome.tree.tokens, outcome.tree.parents, strict=True)):
            previous = root if parent == BELOW_ROOT else outcome.tree.tokens[parent]
            self._store(previous, token, rows[1 + node])

    def _store(self, previous: int, token: int, row: list[tuple[int, float]]) -> None:
        # The newest goes last, so that the oldest can go first.
        self.after_one.pop(token, None)
        self.after_one[token] = row
        self.after_two.pop((previous, token), None)
        self.after_two[previous, token] = row


class RunnerUp:
    """The *runner-up* source: what nearly came instead of the pending token may come right after it."""

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
        last = outcome.logits[1 + path[-1] if path else 0]
        chosen = outcome.accepted.tokens[-1]
        self._tokens = [token for token in torch.topk(last, 3).indices.tolist() if token != chosen][:2]
