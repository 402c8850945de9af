"""Whether drafting with a model is worth its time, from times measured while running.

A step that commits ``E`` tokens in ``T`` ms gains from ``c`` ms more of drafting that bring ``d`` tokens
more exactly if ``(E + d) / (T + c) > E / T``, that is if ``d / c > E / T``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

#: Weight of what was seen before, per further observation.
FADE = 0.9
#: A time of more than so many times the mean counts as so many times the mean (a stall, not a trend).
STALL = 3.0
#: Until the pace of steps is known, a level has to promise so many tokens.
FIRST_GAIN = 0.1
#: Chance that a model's best guess is right, before there is experience, and what that counts for.
FIRST_HIT_RATE = 0.6
FIRST_WEIGHT = 4.0
#: Share of what it foresees that no other source does, likewise.
FIRST_OWN_SHARE = 0.5
#: A model that does not pay is tried again after so many steps, then for so many.
REST = 24
TRIAL = 3
#: Where drafting costs nothing, a level still has to promise so many tokens.
LEAST_GAIN = 0.08
#: A step commits fewer tokens than this; a context that grew by more is another answer's.
LONGEST_STEP = 64


class FadingMean:
    """Mean of observations, the older the less; ``None`` while there is none."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._sum = 0.0
        self.seen = 0

    def add(self, value: float) -> None:
        self._weight = FADE * self._weight + 1
        self._sum = FADE * self._sum + value
        self.seen += 1

    def add_time(self, ms: float) -> None:
        """Add a time, cut to :data:`STALL` times the mean."""
        mean = self.mean
        self.add(ms if mean is None else min(ms, STALL * mean))

    @property
    def mean(self) -> float | None:
        return self._sum / self._weight if self._weight else None

    def mean_from(self, guess: float, weight: float) -> float:
        """The mean, with ``guess`` as an observation of ``weight`` beforehand."""
        return (self._sum + weight * guess) / (self._weight + weight)


class Pace:
    """Times and gains of one model's drafting."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._step_ms = FadingMean()
        self._step_tokens = FadingMean()
        self._level_ms = FadingMean()
        self._draft_ms = FadingMean()
        self._foreseen = FadingMean()
        self._gained = FadingMean()
        self._hits = FadingMean()
        self._last_step: tuple[float, int] | None = None  # when, and the length of the next context
        self._last_length: int | None = None  # of the context drafted for last, None after a rest
        self._resting = 0
        self._trying = TRIAL

    @property
    def tokens_per_ms(self) -> float | None:
        """How fast the text grows; None until two steps in a row were seen."""
        tokens, ms = self._step_tokens.mean, self._step_ms.mean
        return None if tokens is None or not ms else tokens / ms

    def step(self, context_length: int, tokens: int) -> None:
        """A step committed ``tokens`` below a context of that length, just now."""
        now = self._clock()
        # Between two answers lies the user's thinking and a prompt to read: no time of a step.
        if self._last_step is not None and self._last_step[1] == context_length:
            self._step_ms.add_time((now - self._last_step[0]) * 1e3)
            self._step_tokens.add(tokens)
        self._last_step = now, context_length + tokens

    def best_guess(self, hit: bool) -> None:
        """Whether a best guess on the accepted path was right."""
        self._hits.add(hit)

    def foreseen(self, tokens: int, gained: int) -> None:
        """So many accepted tokens of a step had been guessed; ``gained`` of them by nobody else."""
        self._foreseen.add(tokens)
        self._gained.add(gained)

    @contextlib.contextmanager
    def level(self) -> Iterator[None]:
        """Measures one level."""
        started = self._clock()
        yield
        self._level_ms.add_time((self._clock() - started) * 1e3)

    @contextlib.contextmanager
    def drafting(self, context_length: int) -> Iterator[None]:
        """Measures all of the drafting for one step, unless the model first has to catch up."""
        started = self._clock()
        yield
        last, self._last_length = self._last_length, context_length
        if last is not None and abs(context_length - last) < LONGEST_STEP:
            self._draft_ms.add_time((self._clock() - started) * 1e3)

    def is_worth_a_level(self, chance: float) -> bool:
        """Whether to look below nodes of which one lies on the accepted path with ``chance``."""
        gain = chance * self._hits.mean_from(FIRST_HIT_RATE, FIRST_WEIGHT)
        rate, cost_ms = self.tokens_per_ms, self._level_ms.mean
        if rate is None or cost_ms is None:
            return gain >= FIRST_GAIN
        return gain * self._own_share() > cost_ms * rate

    def _own_share(self) -> float:
        """The share of what this model foresees that no other source does."""
        gained = self._gained.mean_from(FIRST_OWN_SHARE, FIRST_WEIGHT)
        return min(1.0, gained / max(1e-6, self._foreseen.mean_from(1.0, FIRST_WEIGHT)))

    def is_worth_drafting(self) -> bool:
        """Whether to ask the model at all for this step. Counts the steps, so ask once per step."""
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._trying = TRIAL
            return False
        if self._trying:
            self._trying -= 1
            return True
        rate, cost_ms, gain = self.tokens_per_ms, self._draft_ms.mean, self._gained.mean
        if rate is None or cost_ms is None or gain is None or gain > cost_ms * rate:
            return True
        self._resting, self._last_length = REST, None
        return False


class Patience(Pace):
    """For drafting that may take its time, because only the verifier's counts."""

    def is_worth_a_level(self, chance: float) -> bool:
        return chance * self._hits.mean_from(FIRST_HIT_RATE, FIRST_WEIGHT) >= LEAST_GAIN

    def is_worth_drafting(self) -> bool:
        return True
