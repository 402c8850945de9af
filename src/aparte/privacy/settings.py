"""What an audit covers: cuts, attacks, defences, and how much of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from aparte.config import Cut, WireName, one_of
from aparte.errors import UserError
from aparte.privacy.defences import parse_defence

BASELINE_NAMES = ("uniform", "frequency", "lm_only")
ATTACK_NAMES = (
    "mlp",
    "linear",
    "sequence",
    "vocabulary",
    "gradient",
    "completion",
    "logit_lens",
    "traffic",
    *BASELINE_NAMES,
)
#: Those that know a defence; they run where private ends are audited.
ADAPTIVE_NAMES = ("adaptive", "leaked")


@dataclass(frozen=True)
class Scale:
    """How much of everything: the full audit's numbers, or a quick one's."""

    cuts: tuple[str, ...] = ("2,2", "4,4", "6,6", "8,8")
    defences: tuple[str, ...] = (
        "none",
        "int8",
        "int4",
        "noise:1000",
        "noise:10000",
        "noise:100000",
        "random-cut:2-8",
    )
    attacker_tokens: int = 1_000_000
    #: Own text for the MLP without a defence at the first cut; the last size stands for ``attacker_tokens``.
    sizes: tuple[int, ...] = (880, 10_000, 100_000, 1_000_000)
    #: Most own text for learned attacks everywhere else.
    learned_tokens: int = 100_000
    #: Own text of one domain alone for the MLP, which is then tested on every domain.
    domain_tokens: tuple[int, ...] = (10_000, 100_000)
    victims: int = 60
    #: Tokens per text.
    length: int = 48
    conversations: int = 12
    answer: int = 32
    #: Limits of training and descent.
    seconds: float = 60.0
    steps: int = 400
    descents: int = 8
    #: Texts for vocabulary matching where distances alone do not decide, which takes seconds per text.
    doubtful: int = 12
    #: Own text for the closed-form inverter, which gains little from more.
    linear_tokens: int = 20_000
    traffic_prompts: int = 50
    traffic_tokens: int = 32
    price_texts: int = 24
    #: Questions whose answers are compared, and tokens of each answer.
    questions: int = 24
    question_tokens: int = 32
    #: Whether the learned attacks run at every cut undefended and on every defence at the first cut, or
    #: undefended at the first cut alone; and whether defences are audited at the last cut too.
    thorough: bool = True

    def limit(self, tokens: int) -> float:
        """Seconds of training on so much text."""
        return self.seconds * (6 if tokens > 2 * self.learned_tokens else 1)


QUICK = Scale(
    cuts=("2,2", "8,8"),
    defences=("none", "int8", "noise:10000"),
    attacker_tokens=3000,
    sizes=(880, 3000),
    learned_tokens=3000,
    domain_tokens=(1500,),
    victims=16,
    length=24,
    conversations=4,
    answer=16,
    seconds=15.0,
    steps=100,
    descents=4,
    doubtful=6,
    traffic_prompts=6,
    traffic_tokens=12,
    price_texts=6,
    questions=6,
    question_tokens=16,
    thorough=False,
)


@dataclass(frozen=True)
class AuditSettings:
    """What to audit. Empty tuples and None stand for the scale's own."""

    model: str
    cuts: tuple[Cut, ...] = ()
    texts: tuple[Path, ...] = ()
    attacks: tuple[str, ...] = ()
    defences: tuple[str, ...] = ()
    questions: Path | None = None
    attacker_tokens: int | None = None
    quick: bool = False
    seed: int = 0
    wire: WireName = "auto"
    #: Private ends that the attacker trained itself, to prepare for those under audit.
    attacker_ends: Path | None = None

    def __post_init__(self) -> None:
        for name in self.attacks:
            one_of(name, (*ATTACK_NAMES, *ADAPTIVE_NAMES), "attack")
        for setting in self.defences:
            parse_defence(setting)
        if self.attacker_tokens is not None and self.attacker_tokens < 100:
            raise UserError(f"attacker_tokens is {self.attacker_tokens}; an attacker needs 100 at least.")

    @property
    def scale(self) -> Scale:
        """The numbers to go by, with what the user set."""
        base = QUICK if self.quick else Scale()
        most = self.attacker_tokens or base.attacker_tokens
        return replace(
            base,
            cuts=tuple(map(str, self.cuts)) or base.cuts,
            defences=self.defences or base.defences,
            attacker_tokens=most,
            sizes=(*(size for size in base.sizes[:-1] if size < most), most),
            learned_tokens=min(most, base.learned_tokens),
            domain_tokens=tuple(dict.fromkeys(min(most, size) for size in base.domain_tokens)),
        )
