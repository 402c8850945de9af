"""What is asked for with one answer."""

from __future__ import annotations

from dataclasses import dataclass

from aparte.config import Penalties, Sampling, Stopping
from aparte.errors import UserError

#: Most of the likeliest tokens that are told with each token.
MOST_TOP = 20


@dataclass(frozen=True)
class Options:
    """How tokens are chosen, when the answer ends, and what is told with it.

    The names are those of ``aparte generate``. ``eos`` are the tokens that end the answer; without it the
    model's own do. ``top_logprobs`` asks for the log-probability of every token
    and of so many likeliest ones; ``json_schema`` is a JSON schema, as a string, that the answer has to
    follow, and ``grammar`` a grammar in llguidance's variant of Lark. These three, penalties and biases need
    the model's logits, which draft mode doesn't bring here.
    """

    max_new_tokens: int = Stopping.max_new_tokens
    temperature: float = Sampling.temperature
    top_p: float = Sampling.top_p
    top_k: int = Sampling.top_k
    min_p: float = Sampling.min_p
    seed: int = Sampling.seed
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] | None = None
    frequency_penalty: float = Penalties.frequency
    presence_penalty: float = Penalties.presence
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    json_schema: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _ = self.sampling, self.stopping, self.penalties  # which check their values
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MOST_TOP:
            raise UserError(f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MOST_TOP}.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p, self.seed)

    @property
    def stopping(self) -> Stopping:
        return Stopping(self.max_new_tokens, self.stop, self.eos)

    @property
    def penalties(self) -> Penalties:
        return Penalties(self.frequency_penalty, self.presence_penalty, self.logit_bias)

    @property
    def needs_logits(self) -> str | None:
        """The first option given that only works where logits come to this device, or None."""
        given = {
            "frequency_penalty": bool(self.frequency_penalty),
            "presence_penalty": bool(self.presence_penalty),
            "logit_bias": bool(self.logit_bias),
            "logprobs": self.top_logprobs is not None,
            "json_schema": self.json_schema is not None,
            "grammar": self.grammar is not None,
        }
        return next((name for name, is_given in given.items() if is_given), None)
