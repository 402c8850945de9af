"""Which nodes of a session's steps were kept: read from the headers of the steps that follow.

Acceptance is decided on the device. But every step names the slot that is the tip of the committed path now,
and what lies between the last tip and this one was accepted. So a step is *decided* when a later one commits
some of its nodes, and the depth that was reached in it is the number of its nodes on the path. Nothing else
is looked at, and nothing is asked of the device that it does not send anyway.

What a header cannot tell is which nodes were guesses. The first node of a step is the token that the target
chose itself, unless the step was sent ahead. Prompts are told apart where it can be done: the first steps
after a new session or a rollback, steps that were committed as a whole before they were answered, and those
with more than :data:`LONGEST` nodes on the path. A short question in the middle of a conversation looks like
a step of which everything was accepted, once per question. A step of which nothing was kept leaves no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from aparte.step import ROOT, Step

#: Positions that are counted one by one.
POSITIONS = 16
#: A step of which more nodes are kept is part of a prompt: no device drafts further ahead.
LONGEST = 64


class Acceptance:
    """Follows one session."""

    def __init__(self) -> None:
        self._tip = ROOT
        # Slots that may yet be committed: the parent of each, and the number of the step that brought it.
        self._nodes: dict[int, tuple[int, int]] = {}
        self._prompts: set[int] = set()  # numbers of steps that carry one, as far as is known
        self._last: Step | None = None

    def arrived(self, step: Step, *, unanswered: bool) -> tuple[int, list[int]]:
        """What ``step`` says of those before it. ``unanswered`` is whether any of them still waits.

        Returns how many tokens were committed, and for each decided step how many of its nodes were.
        """
        path = self._path_to(step.commit)
        if path is None:
            self._nodes.clear()
        begins = path is None or self._last is None
        kept = Counter(path or ())
        last, self._last = self._last, step
        if begins or (
            unanswered and last is not None and last.is_chain and step.commit == last.slots.stop - 1
        ):
            self._prompts.add(step.number)
            if last is not None and not begins:
                self._prompts.add(last.number)
        decided = [
            count for number, count in kept.items() if number not in self._prompts and count <= LONGEST
        ]
        self._follow(step)
        return kept.total(), decided

    def _path_to(self, slot: int) -> Iterable[int] | None:
        """The step of each slot from the old tip's child to ``slot``; None if that is not below the tip."""
        numbers: list[int] = []
        while slot != self._tip:
            if slot not in self._nodes:
                return None
            slot, number = self._nodes[slot]
            numbers.append(number)
        return numbers[::-1]

    def _follow(self, step: Step) -> None:
        self._tip = step.commit
        self._nodes = {slot: node for slot, node in self._nodes.items() if step.commit < slot < step.base}
        self._nodes |= zip(step.slots, ((parent, step.number) for parent in step.parents), strict=True)
        if len(self._prompts) > POSITIONS:
            alive = {number for _, number in self._nodes.values()}
            self._prompts &= alive
