"""What to run again, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aparte.config import DEFAULT_MODEL, Compute, Cut, one_of

PAPERS = ("paper-a", "paper-b", "all")


@dataclass(frozen=True)
class Scale:
    """How much of everything. Full: under three hours on two cores."""

    #: Paper A's own: two prompts of each category, 100 tokens.
    prompts_per_category: int = 2
    ngram_tokens: int = 100
    ngrams: tuple[int, ...] = (3, 4, 5, 6, 7)
    transport_tokens: int = 64
    transport_prompts: int = 2
    latency_tokens: int = 96
    grid: str = "5,20,40,80,150x20,100,1000"
    grid_prompts: int = 2
    grid_tokens: int = 32
    grid_repeats: int = 2
    identity_prompts: int = 4
    identity_tokens: int = 200
    provider_tokens: int = 32
    attacker_tokens: int = 20_000
    audit_quick: bool = False
    jacobi_tokens: int = 96
    jacobi_blocks: tuple[int, ...] = (4, 8, 16)
    questions: int = 24
    spade_tokens: int = 96
    lengths: tuple[int, ...] = (1, 2, 4, 6, 8, 12)


QUICK = Scale(
    prompts_per_category=1,
    ngram_tokens=48,
    ngrams=(3, 4, 5, 6, 7),
    transport_tokens=20,
    transport_prompts=1,
    latency_tokens=40,
    grid="5,40,150x100",
    grid_prompts=1,
    grid_tokens=24,
    grid_repeats=1,
    identity_prompts=2,
    identity_tokens=48,
    provider_tokens=12,
    attacker_tokens=3000,
    audit_quick=True,
    jacobi_tokens=48,
    jacobi_blocks=(4, 8),
    questions=6,
    spade_tokens=32,
    lengths=(1, 2, 4, 6, 8),
)


@dataclass(frozen=True)
class Settings:
    """``data`` is Spec-Bench's file, where it is given."""

    model: str = DEFAULT_MODEL
    quick: bool = False
    seed: int = 0
    data: Path | None = None
    cut: Cut = field(default_factory=Cut)
    compute: Compute = field(default_factory=Compute)

    @property
    def name(self) -> str:
        """The model's for a report: of a folder or a file the last part."""
        return Path(self.model).name if Path(self.model).expanduser().exists() else self.model

    @property
    def scale(self) -> Scale:
        return QUICK if self.quick else Scale()


def check_paper(name: str) -> None:
    """Raise :class:`~aparte.errors.UserError` for anything but one of :data:`PAPERS`."""
    one_of(name, PAPERS, "paper")
