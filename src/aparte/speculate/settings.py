"""What a user can set about speculation: which drafter proposes and how much, in split and in draft mode.

Like all of :mod:`aparte.config`: frozen, validated on construction, the only source of defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from aparte.config import MAX_TOP, one_of
from aparte.errors import UserError

#: Drafters that stand for themselves, and the sources that ``auto`` merges; sources may be joined by "+".
DECODING_MODES = ("auto", "sequential", "jacobi", "lookahead")
SOURCES = ("context", "recycling", "runner-up")
#: Further sources: ``auto`` takes up *model* if there is a ``--draft``, *common* and *bridge* if there is one
#: for the model; *shallow* is for draft mode.
MORE_SOURCES = ("common", "model", "bridge", "lookahead", "shallow")
#: Most tokens in a drafted block.
LONGEST_DRAFT = 64
#: How the verifier of draft mode takes drafts where tokens are sampled.
ACCEPTANCES = ("coupled", "rejection")
#: What an automatic draft length in draft mode is good for: a fast answer, or little of the cloud's time.
GOALS = ("speed", "cloud")
#: What drafts in draft mode besides models and ``shallow:K``.
DRAFTERS = ("bridge", "context", "recycling", "common")


@dataclass(frozen=True)
class Decoding:
    """Which drafter proposes, and how much."""

    decode: str = "auto"
    ngram: int = 3
    #: Tree nodes that speculation may add to one step; None leaves it to the mode (see ``node_limit``).
    max_nodes: int | None = None
    #: Guesses per block in Jacobi decoding.
    jacobi_block: int = 8
    #: The draft model of the ``model`` source: a folder, a file or an id, as for the model itself.
    draft: str | None = None
    #: Most steps to have under way at a time. None leaves it to the mode, which decides step by step.
    in_flight: int | None = None
    #: Whether an automatic number of nodes is for the least time of the cloud, not for the fastest answer.
    spares_cloud: bool = False

    @property
    def flight_limit(self) -> int:
        """Most steps under way at a time; 1 is no pipelining."""
        if self.in_flight is not None:
            return self.in_flight
        return 4 if self.sources else 1

    @property
    def node_limit(self) -> int:
        """Most nodes that speculation may add to a step."""
        if self.max_nodes is not None:
            return self.max_nodes
        return 32 if self.sources else 12

    @property
    def automatic(self) -> bool:
        """True if the number of nodes follows the measured cost of steps."""
        return self.max_nodes is None and bool(self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources to merge into one tree; empty for a drafter that stands for itself."""
        if self.decode == "auto":
            return SOURCES if self.draft is None else (*SOURCES, "model")
        return () if self.decode in DECODING_MODES else tuple(self.decode.split("+"))

    def __post_init__(self) -> None:
        if self.decode not in DECODING_MODES:
            joinable = (*SOURCES, *MORE_SOURCES)
            for name in self.decode.split("+"):
                one_of(name, tuple(dict.fromkeys((*DECODING_MODES, *joinable))), "decoding mode")
                if name not in joinable:
                    raise UserError(f"{name} cannot be joined with others; {', '.join(joinable)} can.")
        if "model" in self.sources and self.draft is None:
            raise UserError(
                f"--decode {self.decode} needs a draft model: name one of the same family with --draft."
            )
        if "model" not in self.sources and self.draft is not None:
            raise UserError(
                f"--decode {self.decode} has no use for a draft model. Leave --draft out, or use "
                "--decode auto, or model, or join model to the sources with +."
            )
        if not 3 <= self.ngram <= 7:
            raise UserError(f"ngram is {self.ngram}; lookahead works with n-grams of 3 to 7 tokens.")
        if self.max_nodes is not None and not 1 <= self.max_nodes <= 256:
            raise UserError(f"max_nodes is {self.max_nodes}; it must be between 1 and 256.")
        if self.in_flight is not None and not 1 <= self.in_flight <= 8:
            raise UserError(f"in_flight is {self.in_flight}; it must be between 1 and 8.")
        if not 1 <= self.jacobi_block <= 64:
            raise UserError(f"jacobi_block is {self.jacobi_block}; it must be between 1 and 64.")


@dataclass(frozen=True)
class Drafting:
    """Draft mode (SPADE): what drafts on this machine, how much at a time, and how the cloud accepts it.

    ``draft`` is one of :data:`DRAFTERS`, ``shallow:K`` or a model, or several joined by ``+``. ``length`` is
    that of a block, a chain of tokens.
    """

    draft: str | None = None
    length: int | None = None
    accept: str = "coupled"
    return_states: bool = True
    #: Candidates that a draft names for each token. Where tokens are drawn for rejection sampling, their
    #: distribution goes along with the draft, eight bytes each.
    top: int = 8
    #: What an automatic length is for, one of :data:`GOALS`.
    goal: str = GOALS[0]

    def __post_init__(self) -> None:
        one_of(self.accept, ACCEPTANCES, "acceptance")
        one_of(self.goal, GOALS, "goal of drafting")
        if self.length is not None and not 1 <= self.length <= LONGEST_DRAFT:
            raise UserError(
                f"The draft length is {self.length}; it must be auto, or between 1 and {LONGEST_DRAFT}."
            )
        if not 1 <= self.top <= MAX_TOP:
            raise UserError(f"The draft's top is {self.top}; it must be between 1 and {MAX_TOP} candidates.")
        parts = () if self.draft is None else tuple(self.draft.split("+"))
        if len(set(parts)) != len(parts) or not all(parts):
            raise UserError(f"--draft {self.draft} names a drafter twice, or none between two +.")
        if len(self._models) > 1 or len([part for part in parts if part.startswith("shallow:")]) > 1:
            raise UserError(f"--draft {self.draft} names two models of a kind; one can draft at a time.")
        if self.layers is not None and self.layers < 1:
            raise UserError(f"--draft {self.draft} keeps no layer; shallow:K needs a K of at least 1.")

    @property
    def spares_cloud(self) -> bool:
        """Whether drafts are for the least time of the cloud, whatever that costs this side."""
        return self.goal == "cloud"

    @classmethod
    def parse_length(cls, text: str) -> int | None:
        """Read ``auto`` or a number."""
        if text == "auto":
            return None
        try:
            return int(text)
        except ValueError:
            raise UserError(
                f"The draft length is {text!r}; it must be auto, or between 1 and {LONGEST_DRAFT}."
            ) from None

    @property
    def names(self) -> tuple[str, ...]:
        """Of :data:`DRAFTERS`, ``shallow`` and, for a model, ``model``; empty by default."""
        parts = () if self.draft is None else self.draft.split("+")
        return tuple(
            part if part in DRAFTERS else "shallow" if part.startswith("shallow:") else "model"
            for part in parts
        )

    @property
    def model(self) -> str | None:
        """The model that drafts, if one is named."""
        return self._models[0] if self._models else None

    @property
    def layers(self) -> int | None:
        """The K of ``shallow:K``."""
        for part in () if self.draft is None else self.draft.split("+"):
            if part.startswith("shallow:"):
                try:
                    return int(part.removeprefix("shallow:"))
                except ValueError:
                    raise UserError(f"{part} is not of the form shallow:K; for example shallow:6.") from None
        return None

    @property
    def _models(self) -> list[str]:
        parts = () if self.draft is None else self.draft.split("+")
        return [part for part, name in zip(parts, self.names, strict=True) if name == "model"]
