"""The steps under way: the next one in order, and those sent ahead of its result.

A step sent ahead (design section 3) hangs its nodes below the end of a path that is not verified yet. It
is of use if exactly that path is accepted and the target's own token after it is among the nodes. Then
the result of the step goes on from that token without a further round trip. Otherwise the step, and all
that were sent after it, are *stale*: the epoch goes up and the next step writes over their slots.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aparte.session import Session
from aparte.speculate.accept import Accepted
from aparte.speculate.drafter import Drafter, wanted_likely
from aparte.speculate.tree import BELOW_ROOT, DraftTree, sanitize
from aparte.step import Step
from aparte.target.base import Ask, Evaluation, Target, Timing

if TYPE_CHECKING:
    from aparte.decode import Job

#: Less than this between the end of other work and a result means that the result may have been waiting.
SLACK_MS = 2.0


@dataclass(frozen=True)
class Flight:
    """A step under way.

    ``context`` is everything up to the token that the tree hangs below; its last ``pending`` tokens are
    evaluated by this step too. There are none if it was sent ahead: then it hangs below node ``below`` of
    the step before, which it is right about with ``chance``, all before that being right.
    """

    step: Step
    context: tuple[int, ...]
    pending: int
    tree: DraftTree
    draft_ms: float
    below: int = BELOW_ROOT
    chance: float = 1.0
    #: Whether the cloud may have had stale steps to finish first.
    behind_stale: bool = False

    @property
    def ahead(self) -> bool:
        return not self.pending

    def slot(self, node: int) -> int:
        """The slot of a node of the tree."""
        return self.step.slots[self.pending + node]

    @property
    def known(self) -> int:
        """How many of the tokens that it leads to are known before: the first, if it was sent ahead."""
        return int(self.ahead)

    @property
    def pending_tokens(self) -> tuple[int, ...]:
        return self.context[len(self.context) - self.pending :]

    @property
    def pending_slots(self) -> range:
        return self.step.slots[: self.pending]


class Pipeline:
    """Sends and collects the steps of one answer."""

    def __init__(self, target: Target, session: Session, drafter: Drafter, job: Job, longest: int) -> None:
        """``longest`` is the number of tokens that prompt and answer may have together."""
        self._target = target
        self._session = session
        self._drafter = drafter
        self._job = job
        self.longest = longest
        self._flights: deque[Flight] = deque()
        self._behind_stale = False
        self._busy_ms = 0.0  # spent on sending ahead since the last step that was not

    def __len__(self) -> int:
        return len(self._flights)

    def send(self, context: Sequence[int]) -> None:
        """Send the next step: the tokens of ``context`` without slots, usually one, and a proposal."""
        pending = len(context) - len(self._session.tokens)
        room = min(self._job.max_nodes, self._target.max_nodes - pending)
        tree, draft_ms = self._draft(context, max(0, room))
        flight = Flight(
            self._session.grow(pending, tree),
            tuple(context),
            pending,
            tree,
            draft_ms,
            behind_stale=self._behind_stale,
        )
        self._behind_stale, self._busy_ms = False, 0.0
        self._launch(flight)

    def send_ahead(self) -> None:
        """Send further steps, as many as are allowed and worth while."""
        started = self._job.clock()
        while self._drafter.runs_ahead and len(self._flights) < self._job.in_flight:
            flight = self._foresee(self._flights[-1])
            if flight is None:
                break
            self._launch(flight)
        self._busy_ms += (self._job.clock() - started) * 1e3

    def collect(self) -> tuple[Flight, Evaluation]:
        """Wait for the next step in order."""
        return self._flights.popleft(), self._job.recovery.collect(self._target)

    def is_plain(self, flight: Flight, timing: Timing) -> bool:
        """Whether the step took what one round trip takes: nothing was under way when it was sent, and the
        device was waiting, not busy with sending ahead, when its result came."""
        waiting = self._busy_ms < SLACK_MS or timing.wait_ms > self._busy_ms + SLACK_MS
        return waiting and not flight.ahead

    def settle(self, flight: Flight, accepted: Accepted) -> int:
        """Keep what was sent ahead if it is right about this step's outcome, else abandon it.

        Returns how many steps were abandoned.
        """
        ended = accepted.path[-1] if accepted.path else BELOW_ROOT
        plan, foreseen = self._job.ahead, likeliest_leaf(flight.tree)
        if plan is not None and foreseen is not None:
            plan.saw(flight.tree.probabilities[foreseen], ended == foreseen)
        if not self._flights or ended != self._flights[0].below:
            return self.abandon()
        tree = self._flights[0].tree
        right = (BELOW_ROOT, accepted.tokens[-1]) in tree.children()
        if plan is not None:
            plan.saw(_coverage(tree), right)
        return 0 if right else self.abandon()

    def abandon(self) -> int:
        """Give up whatever is under way; returns how many steps that is."""
        count = len(self._flights)
        if count:
            self._session.abandon([flight.step for flight in self._flights])
            self._target.abandon()
            self._flights.clear()
            self._behind_stale = True
        return count

    def forget(self) -> None:
        """The target has lost everything, and with it what is under way: it will be proposed again."""
        self._flights.clear()
        self._behind_stale = False

    def _foresee(self, last: Flight) -> Flight | None:
        """The step after ``last`` if all goes as predicted, or None if there is none, or it doesn't pay."""
        leaf = likeliest_leaf(last.tree)
        if leaf is None:
            return None
        # The first step under way is sure to count; each one after it may turn out stale.
        so_far = math.prod(flight.chance for flight in list(self._flights)[1:])
        chance = self._likely(last.tree.probabilities[leaf])
        if not self._pays(so_far * chance, 0):
            return None
        # What hangs unverified below the tip is never more than one step may bring.
        room = self._session.tip + 1 + self._target.max_nodes - last.step.slots.stop
        if room < 1:
            return None
        context = (*last.context, *path_tokens(last.tree, leaf))
        tree, draft_ms = self._draft(context, min(self._job.max_nodes, room))
        chance *= self._likely(_coverage(tree))
        if not tree or not self._pays(so_far * chance, len(tree)):
            return None
        step = self._session.ahead(last.step, last.slot(leaf), tree)
        return Flight(step, context, 0, tree, draft_ms, below=leaf, chance=chance)

    def _draft(self, context: Sequence[int], room: int) -> tuple[DraftTree, float]:
        """What to hang below ``context``, and how many milliseconds it took to find."""
        started = self._job.clock()
        if self._job.budget is not None:
            room = self._job.budget.room(room)
        tree = sanitize(
            self._drafter.propose(context, room),
            vocab_size=self._target.vocab_size,
            max_nodes=room,
            # The target's own token comes on top of an accepted draft, hence one less than is left.
            max_depth=self._end() - len(context),
        )
        # What was drawn at random is judged as it was drawn: cutting it by what it turned out to be would
        # favour some tokens.
        if self._job.budget is not None and not tree.drawn:
            tree = self._job.budget.trim(tree)
        return tree, (self._job.clock() - started) * 1e3

    def _end(self) -> int:
        """How long ``context`` and what is drafted below it may be."""
        switch = self._target.rotary_switch
        if switch is None or self._session.origin:
            return self.longest - 1
        return min(self.longest - 1, switch)  # what comes after that is computed anew first

    def _launch(self, flight: Flight) -> None:
        tokens = (*flight.pending_tokens, *flight.tree.tokens)
        ask = Ask(
            max(0, flight.pending - 1),
            self._job.sampling,
            flight.tree.drawn,
            wanted_likely([self._drafter]),
        )
        self._target.submit(flight.step, tokens, ask)
        self._flights.append(flight)

    def _likely(self, probability: float) -> float:
        return probability if self._job.ahead is None else self._job.ahead.likely(probability)

    def _pays(self, chance: float, nodes: int) -> bool:
        return self._job.ahead is None or self._job.ahead.pays(chance, nodes, len(self._flights))


def likeliest_leaf(tree: DraftTree) -> int | None:
    """The leaf whose whole path is most likely to be accepted, of equals the last; None for no nodes."""
    inner = set(tree.parents)
    leaves = (node for node in range(len(tree)) if node not in inner)
    return max(leaves, key=lambda node: (tree.probabilities[node], node), default=None)


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    """The tokens from below the root to ``node``."""
    tokens: list[int] = []
    while node != BELOW_ROOT:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


def _coverage(tree: DraftTree) -> float:
    """Chance that the token after the pending one is in the tree."""
    pairs = zip(tree.probabilities, tree.parents, strict=True)
    return min(1.0, sum(probability for probability, parent in pairs if parent == BELOW_ROOT))
