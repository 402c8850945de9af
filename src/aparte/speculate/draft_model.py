"""The *model* drafter: a smaller model of the same vocabulary guesses ahead.

It has its own weights and its own cache, shares nothing with the target, and runs on the device, so what
it drafts stays there. Its cache follows the text by the target's own means: slots, steps, and a session
that is rewound to what a new context shares with the last one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from aparte.errors import MismatchError
from aparte.model.parts import Blueprint, Progress
from aparte.model.turns import TurnTaking
from aparte.session import Session
from aparte.speculate.neural import Guess
from aparte.speculate.tree import BELOW_ROOT
from aparte.step import Step
from aparte.text.tokenizer import Codec

#: Tokens named per place.
TOP = 8
#: Tokens of a context that are read in one pass.
CHUNK = 128
#: Differing tokens that an error shows.
SHOWN = 3


class DraftModel:
    """A :class:`~aparte.speculate.neural.TreeModel`: any supported model, whole, in this process."""

    def __init__(
        self,
        blueprint: Blueprint,
        vocab_size: int,
        *,
        top: int = TOP,
        chunk: int = CHUNK,
        layers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """``vocab_size`` is the target's: rows of padding that one of the two has more are never named.

        With ``layers``, only so many of them, the first, and then norm and head.
        """
        self._own_vocab_size = blueprint.vocab_size
        self._shared_vocab_size = min(vocab_size, blueprint.vocab_size)
        self._max_context = blueprint.uniform_context
        self._top = top
        self._chunk = chunk
        self._stage = blueprint.stage(range(layers or blueprint.layers), progress, "draft model")
        self._embed, self._head = blueprint.ends()
        self._reset()

    def another(self) -> DraftModel:
        """One of the same weights, for another conversation at the same time."""
        if not isinstance(self._stage, TurnTaking):
            self._stage = TurnTaking(self._stage)
        twin = copy.copy(self)
        twin._reset()
        return twin

    def begin(self, context: Sequence[int]) -> Guess | None:
        """Read what is new in ``context``. None if it does not fit this model."""
        if len(context) >= self._max_context:
            return None
        self._keep_tree(context)
        new = context[self._session.rewind_to(context) :]
        if not all(0 <= token < self._own_vocab_size for token in new):
            return None
        for start in range(0, len(new), self._chunk):
            part = new[start : start + self._chunk]
            step = self._session.chain(len(part))
            hidden = self._run(step, part)
            self._session.commit(part, step.slots)
        return self._guesses(hidden[-1:])[0]

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        """One pass over new nodes; their slots follow those of the earlier ones."""
        first = self._session.tip + 1  # slot of node 0; BELOW_ROOT is the slot before it
        if not all(BELOW_ROOT <= parent < len(self._tokens) for parent in parents):
            raise ValueError("a parent is not a node of this tree")
        if not tokens:
            return []
        step = replace(
            self._session.chain(0),
            base=first + len(self._tokens),
            parents=tuple(first + parent for parent in parents),
        )
        hidden = self._run(step, tokens)
        for parent, token in zip(parents, tokens, strict=True):
            self._nodes.setdefault((parent, token), len(self._tokens))
            self._tokens.append(token)
        return self._guesses(hidden)

    def _keep_tree(self, context: Sequence[int]) -> None:
        """Commit the path of the last tree that ``context`` went along: it need not be read again."""
        first, position, node = self._session.tip + 1, len(self._session.tokens), BELOW_ROOT
        # Where the context has left the text before that, rewinding takes it all back.
        while position < len(context) - 1:
            child = self._nodes.get((node, context[position]))
            if child is None:
                break
            self._session.commit([context[position]], [first + child])
            position, node = position + 1, child
        self._nodes.clear()
        self._tokens.clear()

    def _run(self, step: Step, tokens: Sequence[int]) -> torch.Tensor:
        """``[n] -> [n, D]``."""
        try:
            return self._stage.forward(self._cache, step, self._embed(torch.tensor(tokens)))
        except BaseException:  # what the cache holds is unknown now
            self._reset()
            raise

    def _reset(self) -> None:
        self._cache = self._stage.new_cache()
        self._session = Session()
        # The tree of the last begin: its tokens, and its nodes by (parent, token).
        self._tokens: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    @torch.inference_mode()
    def _guesses(self, hidden: torch.Tensor) -> list[Guess]:
        """``[n, D]`` to n guesses. Ids that the target does not have get no share."""
        shares = self._head(hidden)[:, : self._shared_vocab_size].softmax(dim=-1)
        best = shares.topk(min(self._top, self._shared_vocab_size), dim=-1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Guess(tuple(tokens), tuple(values)) for tokens, values in rows]


def check_vocabulary(target: Codec, draft: Codec, draft_name: str) -> None:
    """Raise :class:`MismatchError` unless both tokenizers mean the same by every id.

    How they split text may differ: a draft model only continues tokens, it never sees text.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    special = sorted(target.special_tokens ^ draft.special_tokens)
    if not different and not special:
        return
    parts = []
    if different:
        pairs = (
            f"{token} is {_shown(ours.get(token))} here and {_shown(theirs.get(token))} there"
            for token in different[:SHOWN]
        )
        more = ", ..." if len(different) > SHOWN else ""
        parts.append(
            f"{len(different)} of {len(ours.keys() | theirs.keys())} ids differ: {', '.join(pairs)}{more}"
        )
    if special:
        names = (f"{token} ({_shown(ours.get(token, theirs.get(token)))})" for token in special[:SHOWN])
        more = ", ..." if len(special) > SHOWN else ""
        parts.append(f"{len(special)} ids are special tokens on one side only: {', '.join(names)}{more}")
    raise MismatchError(
        f"The draft model {draft_name} has {len(theirs)} tokens and the model {len(ours)}, and they are "
        f"not the same: {'; '.join(parts)}. Give a draft model of the same family, or leave --draft out."
    )


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
