"""What an attack is given, and what it hands in.

An attack sees :class:`~aparte.privacy.observe.Seen` sessions without looking at their ``tokens`` and
``answer``, which are the truth it is scored against. What else it may use is in its ``assumes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from aparte.model.parts import Progress
from aparte.privacy.observe import Observer, Seen

#: Texts that are watched together.
TOGETHER = 16

Target = Literal["prompt", "answer"]

#: Instead of a domain: the attacker's text, or what is attacked, is of all of them.
ALL = "all"


@dataclass
class Case:
    """One device's way of sending, some sessions to attack, and the attacker's own text."""

    observer: Observer
    victims: Sequence[Seen]
    #: Token texts that the attacker may put through the same device, or its own copy of it.
    corpus: Sequence[Sequence[int]]
    #: Most tokens of them to use.
    tokens: int
    progress: Progress
    seed: int = 0
    #: The device itself, for attackers to whom pairs of it leak; None where ``observer`` is the device.
    device: Observer | None = None
    #: What an attacker prepared who knows the defence: a device like it, with a secret of its own.
    own: Observer | None = None
    _pairs: list[Seen] = field(default_factory=list)

    def pairs(self, tokens: int | None = None) -> list[Seen]:
        """Sessions of the attacker's own text, whose tokens it knows: ``tokens`` of them, or all allowed."""
        wanted = min(self.tokens, tokens or self.tokens)
        have = sum(len(seen.tokens) for seen in self._pairs)
        while have < wanted and len(self._pairs) < len(self.corpus):
            # Always the same texts together: what somebody asked for before must not change a figure.
            start = len(self._pairs)
            # Another seed than the victims', or their noise would come again.
            mine = replace(self.observer, seed=self.observer.seed + 1_000_003 + start)
            self._pairs += mine.watch(self.corpus[start : start + TOGETHER])
            have += sum(len(seen.tokens) for seen in self._pairs[start:])
            self.progress("the attacker's own text", min(have, wanted), wanted)
        chosen: list[Seen] = []
        left = wanted
        for seen in self._pairs:
            if left <= 0:
                break
            chosen.append(seen.head(left))
            left -= len(seen.tokens)
        return chosen


@dataclass(frozen=True)
class Recovered:
    """Guesses of an attack, best first: ``[T, RANKS]`` token ids per victim.

    ``attacker_tokens`` is the text of its own that it needed, ``seconds`` the time for everything but
    collecting that text. ``extra`` are further fields for the results.
    """

    guesses: list[torch.Tensor]
    attacker_tokens: int
    seconds: float
    extra: dict[str, Any] = field(default_factory=dict)


class Attack(Protocol):
    """An attack on what the cloud holds; the strings are for the report."""

    name: str
    target: Target
    threat: str
    source: str
    assumes: str
    cost: str

    def run(self, case: Case) -> Recovered:
        """Attack every victim of ``case``."""
        ...


def joined(sessions: Sequence[Seen]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens ``[N]``, states ``[N, D]`` in float32, and positions ``[N]`` of all sessions in a row."""
    tokens = torch.cat([seen.tokens for seen in sessions])
    states = torch.cat([seen.up for seen in sessions]).float()
    positions = torch.cat([torch.arange(len(seen.tokens)) for seen in sessions])
    return tokens, states, positions


def total(sessions: Sequence[Seen]) -> int:
    """Tokens of all sessions."""
    return sum(len(seen.tokens) for seen in sessions)
