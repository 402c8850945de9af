"""The bridge as an edge model of its own: front, bridge and back, without the split target around them.

In split mode the middle's true output comes back for every token, and the bridge guesses only ahead of it.
Here the whole model runs elsewhere and answers with tokens. Where it returns its middle states too
(:class:`~aparte.target.states.StateStore`), the rows of the committed text are computed from those, as in
training, and only drafted tokens feed on guesses.

Where it returns none, the bridge sees at every position the mean of what it was trained to see. Its guesses
are poor then (``no_states`` of ``aparte bench spade`` has what that costs), but not as poor as those that
feed on guesses over a whole text, which lose their way within a few tokens.

Three caches, front, bridge and back, hold the same slots: those of a session of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from aparte.bridge.draft import NAMED, BridgeParts
from aparte.bridge.file import Bridge
from aparte.config import Cut
from aparte.model.parts import Blueprint, Progress
from aparte.session import Session
from aparte.speculate.neural import Guess
from aparte.speculate.tree import BELOW_ROOT
from aparte.step import Step
from aparte.target.states import StateStore

#: Tokens that are read in one pass.
CHUNK = 128
#: With true states, a text with more tokens without them is a prompt whose states are still to come.
MOST_GUESSED = 32


class EdgeParts(BridgeParts):
    """What the edge holds of a model: embedding, front, bridge, back, and the head's rows for drafting."""

    def __init__(
        self, bridge: Bridge, blueprint: Blueprint, cut: Cut, progress: Progress | None = None
    ) -> None:
        super().__init__(bridge, blueprint)
        middle = cut.middle(blueprint.layers)
        self.embed = blueprint.embedding()
        self.front = blueprint.stage(range(middle.start), progress, "front layers")
        self.back = blueprint.stage(range(middle.stop, blueprint.layers), progress, "back layers")
        self.max_context = blueprint.max_context
        self.vocab_size = blueprint.vocab_size
        self.hidden_size = blueprint.hidden_size
        #: The layer after which the verifier has to tap its states.
        self.returned_layer = middle.stop
        #: Numbers in these parts and in the whole model: their share of memory at equal precision.
        self.parameters, self.whole_parameters = _count(blueprint, cut, bridge)


class EdgeBridge:
    """A :class:`~aparte.speculate.neural.TreeModel`, driven by token ids and, if there are any, states."""

    def __init__(
        self,
        parts: EdgeParts,
        session: Session,
        states: StateStore | None = None,
        *,
        top: int = NAMED,
    ) -> None:
        """``session`` tells which slots of the verifier hold which tokens; ``states`` are by those slots."""
        self._parts = parts
        self._target_session = session
        self._states = states
        self._top = min(top, len(parts.draft_ids))
        #: The middle's output for every row, true or guessed, and how many of them are true.
        self._guessed = torch.zeros(0, parts.hidden_size, dtype=parts.front.dtype, device=parts.front.device)
        self._true = 0
        # The tree of the last begin: its tokens, guesses, and nodes by (parent, token).
        self._drafted = self._guessed
        self._tokens: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}
        self._reset()

    @torch.inference_mode()
    def begin(self, context: Sequence[int]) -> Guess | None:
        """Read what is new in ``context``. None if it does not fit, or its states are still on their way."""
        last = len(context) - 1
        if last < 0 or len(context) >= self._parts.max_context:
            return None
        if min(context) < 0 or max(context) >= self._parts.vocab_size:
            return None
        true = min(self._returned(context), last)  # tokens whose middle output is known
        if self._states is not None and last - true > MOST_GUESSED:
            return None
        try:
            return self._guesses(self._read(context, true))[0]
        except BaseException:  # what the caches hold is unknown now
            self._reset()
            raise

    @torch.inference_mode()
    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        """One pass over new nodes; their slots follow those of the earlier ones."""
        if not all(BELOW_ROOT <= parent < len(self._tokens) for parent in parents):
            raise ValueError("a parent is not a node of this tree")
        if not tokens:
            return []
        first = self._rows.tip + 1  # slot of node 0; BELOW_ROOT is the slot before it
        step = replace(
            self._rows.chain(0),
            base=first + len(self._tokens),
            parents=tuple(first + parent for parent in parents),
        )
        before = torch.cat([self._guessed[-1:], self._drafted])[[1 + parent for parent in parents]]
        try:
            guess = self._bridge(step, self._front(step, tokens), before)
            final = self._back(step, guess)
        except BaseException:  # what the caches hold is unknown now
            self._reset()
            raise
        for parent, token in zip(parents, tokens, strict=True):
            self._nodes.setdefault((parent, token), len(self._tokens))
            self._tokens.append(token)
        self._drafted = torch.cat([self._drafted, guess])
        return self._guesses(final)

    def _read(self, context: Sequence[int], true: int) -> torch.Tensor:
        """Bring the rows up to ``context``, whose first ``true`` tokens have states; the last output."""
        self._keep_tree(context)
        kept, last = self._rows.rewind_to(context), len(context) - 1
        if true > min(self._true, kept):  # what was guessed there is known now
            kept = min(self._true, kept)
        self._keep(kept)
        while kept <= last:
            # With states: those before ``true`` have one, and the next one has one before it.
            stop = min(kept + CHUNK, last + 1 if self._states is None else max(true, kept) + 1)
            final = self._read_rows(context, kept, stop, true)
            kept = stop
        return final[-1:]

    def _returned(self, context: Sequence[int]) -> int:
        """How many tokens of ``context``, from the first on, have a true middle state in the store."""
        if self._states is None:
            return 0
        known = self._target_session.tokens
        most = min(len(known), len(context))
        same = next((place for place in range(most) if known[place] != context[place]), most)
        return self._states.returned(self._target_session.slots[:same])

    def _keep_tree(self, context: Sequence[int]) -> None:
        """Commit the path of the last tree that ``context`` went along: it need not be read again."""
        first, position, node = self._rows.tip + 1, len(self._rows.tokens), BELOW_ROOT
        path = []
        while position < len(context) - 1:
            child = self._nodes.get((node, context[position]))
            if child is None:
                break
            self._rows.commit([context[position]], [first + child])
            path.append(child)
            position, node = position + 1, child
        self._guessed = torch.cat([self._guessed, self._drafted[path]])
        self._drafted = self._drafted[:0]
        self._nodes.clear()
        self._tokens.clear()

    def _keep(self, count: int) -> None:
        del self._rows.tokens[count:], self._rows.slots[count:]
        self._guessed = self._guessed[:count]
        self._true = min(self._true, count)

    def _read_rows(self, context: Sequence[int], start: int, stop: int, true: int) -> torch.Tensor:
        """Tokens ``start .. stop - 1``, of which those before ``true`` have states; the back's output."""
        known = self._guessed[max(0, start - 1) :]
        if self._states is not None and true >= start:
            slots = self._target_session.slots[max(0, start - 1) : min(stop, true)]
            known = self._states.middle(slots).to(known)
        if start == 0:  # the first token has none before it
            known = torch.cat([known.new_zeros(1, self._parts.hidden_size), known])
        tokens, step = context[start:stop], self._rows.chain(stop - start)
        middle = self._bridge(step, self._front(step, tokens), known[: stop - start]).clone()
        middle[: len(known) - 1] = known[1:]
        final = self._back(step, middle)
        self._rows.commit(tokens, step.slots)
        self._guessed = torch.cat([self._guessed, middle])
        self._true = max(self._true, min(stop, true))
        return final

    def _front(self, step: Step, tokens: Sequence[int]) -> torch.Tensor:
        parts = self._parts
        return parts.front.forward(self._front_cache, step, parts.embed(torch.tensor(list(tokens))))

    def _bridge(self, step: Step, front: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Guesses of the middle's output, ``[n, D]``, from those before and the front's output."""
        net = self._parts.net
        if self._states is None:
            before = net.middle_mean.to(front).expand_as(front)
        return net.exit(self._parts.stage.forward(self._bridge_cache, step, net.enter(front, before)))

    def _back(self, step: Step, middle: torch.Tensor) -> torch.Tensor:
        return self._parts.back.forward(self._back_cache, step, middle)

    def _guesses(self, final: torch.Tensor) -> list[Guess]:
        best = self._parts.head(final).softmax(dim=-1).topk(self._top, dim=-1)
        tokens = self._parts.draft_ids[best.indices.cpu()].tolist()
        return [
            Guess(tuple(row), tuple(shares)) for row, shares in zip(tokens, best.values.tolist(), strict=True)
        ]

    def _reset(self) -> None:
        parts = self._parts
        self._front_cache = parts.front.new_cache()
        self._bridge_cache = parts.stage.new_cache()
        self._back_cache = parts.back.new_cache()
        self._rows = Session()
        self._guessed = self._drafted = self._guessed[:0]
        self._true = 0
        self._tokens.clear()
        self._nodes.clear()


def _count(blueprint: Blueprint, cut: Cut, bridge: Bridge) -> tuple[int, int]:
    """Numbers in the edge's parts, and in the whole model."""
    shapes = blueprint.checkpoint.shapes()
    middle, width = cut.middle(blueprint.layers), blueprint.hidden_size

    def layers(*indices: int) -> int:
        return sum(math.prod(shapes[name][1]) for name in blueprint.names(indices))

    table = blueprint.vocab_size * width
    ends = layers(*range(middle.start), *range(middle.stop, blueprint.layers))
    # Of the bridge: its layer, both linear maps, and means and deviations.
    added = layers(bridge.layer) + 3 * width * width + 4 * width + len(bridge.draft_ids) * width
    tied = blueprint.config.tie_word_embeddings or "lm_head.weight" not in shapes
    return table + ends + added + width, layers(*range(blueprint.layers)) + (1 if tied else 2) * table + width
