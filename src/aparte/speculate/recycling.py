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

#: Values per block in :func:`largest`.
BLOCK = 128

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
        logits = outcome.logits.float()
        best, ids = largest(logits, KEPT)  # no vocabulary is smaller than that
        # The share within the full distribution, so that a flat one does not look certain.
        top = best[:, :1]
        shares = (best - top).exp_() / (logits - top).exp_().sum(dim=-1, keepdim=True)
        rows = [
            list(zip(tokens, values, strict=True))
            for tokens, values in zip(ids.tolist(), shares.tolist(), strict=True)
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


def largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, in descending order, and their places, both ``[n, count]``.

    ``topk`` looks at one value after the other. Maxima of blocks take vector instructions, and the
    largest values lie in the blocks with the largest maxima, so that few blocks are left to look into.
    """
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if blocks < 8 * count:
        found = logits.topk(count, dim=-1)
        return found.values, found.indices
    maxima = logits[:, : blocks * BLOCK].view(rows, blocks, BLOCK).amax(dim=-1)
    starts = maxima.topk(count, dim=-1).indices * BLOCK
    places = (starts[:, :, None] + torch.arange(BLOCK, device=logits.device)).flatten(1)
    rest = torch.arange(blocks * BLOCK, vocab, device=logits.device).expand(rows, -1)
    places = torch.cat([places, rest], dim=-1)
    found = logits.gather(1, places).topk(count, dim=-1)
    return found.values, places.gather(1, found.indices)


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
        _, ids = largest(last[None], 3)
        self._tokens = [token for token in ids[0].tolist() if token != chosen][:2]
