"""What drafts, and how much: which settings go together. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aparte.config import Cut, Sampling
from aparte.errors import UserError
from aparte.privacy.protection import Protection
from aparte.speculate.settings import LONGEST_DRAFT, Decoding, Drafting


@dataclass(frozen=True)
class DraftPlan:
    """How to draft: the settings of ``--decode`` and, in draft mode, of ``--draft``."""

    decoding: Decoding
    drafting: Drafting
    #: Whether the recycling table is kept between runs, on this device.
    remember: bool = False

    def decoding_for(self, target: str, sampling: Sampling) -> Decoding:
        """In draft mode a chain for sampled tokens decides itself how long it gets."""
        if target != "draft" or self.decoding.max_nodes is not None or sampling.greedy:
            return self.decoding
        return replace(self.decoding, max_nodes=LONGEST_DRAFT)

    def within(self, protection: Protection) -> DraftPlan:
        """The plan as far as what is sent may have any shape.

        Raises :class:`UserError` if the user wants something else.
        """
        return replace(self, decoding=protection.limit(self.decoding))


def default_names(model: str, cut: Cut) -> tuple[str, ...]:
    """What drafts in draft mode by default: all that costs nothing, and the bridge if there is one."""
    from aparte.bridge.file import find_bridge
    from aparte.speculate.common import shipped_table

    return (
        *(() if find_bridge(model, cut) is None else ("bridge",)),
        "context",
        "recycling",
        *(() if shipped_table(model) is None else ("common",)),
    )


def plan_drafts(
    model: str,
    cut: Cut,
    target: str,
    *,
    decode: str = Decoding.decode,
    draft: str | None = Decoding.draft,
    draft_length: int | None = Drafting.length,
    accept: str = Drafting.accept,
    return_states: bool = Drafting.return_states,
    draft_top: int = Drafting.top,
    draft_for: str = Drafting.goal,
    ngram: int = Decoding.ngram,
    max_nodes: int | None = Decoding.max_nodes,
    in_flight: int | None = Decoding.in_flight,
    remember: bool = False,
) -> DraftPlan:
    """What the options of ``aparte generate`` with these names mean together.

    Raises :class:`UserError` for those that do not go together.
    """
    if target == "draft":
        drafting = Drafting(draft, draft_length, accept, return_states, draft_top, draft_for)
        _check_draft(decode, drafting, max_nodes, remember)
        names = drafting.names or default_names(model, cut)
        decoding = Decoding(
            "sequential" if decode == "sequential" else "+".join(names),
            ngram,
            draft_length or max_nodes,
            draft=drafting.model,
            # What is sent ahead for nothing costs the cloud.
            in_flight=1 if in_flight is None and drafting.spares_cloud else in_flight,
            spares_cloud=drafting.spares_cloud,
        )
        return DraftPlan(decoding, drafting)
    drafting = Drafting(None, draft_length, accept, return_states, draft_top, draft_for)
    for option, changed in (
        ("--draft-length", drafting.length != Drafting.length),
        ("--accept", drafting.accept != Drafting.accept),
        ("--no-return-states", drafting.return_states != Drafting.return_states),
        ("--draft-top", drafting.top != Drafting.top),
        ("--draft-for", drafting.goal != Drafting.goal),
    ):
        if changed:
            raise UserError(
                f"{option} belongs to draft mode, in which the cloud sees the text. Add --target draft, or "
                "leave it out."
            )
    if draft is not None and Drafting(draft).names != ("model",):
        raise UserError(
            f"--draft {draft} is for --target draft. Otherwise choose what drafts by --decode, for example "
            "--decode bridge or --decode context."
        )
    decoding = Decoding(decode, ngram, max_nodes, draft=draft, in_flight=in_flight)
    if remember and "recycling" not in decoding.sources:
        raise UserError(f"--remember keeps the recycling table, and --decode {decode} has none. Use auto.")
    return DraftPlan(decoding, drafting, remember)


def _check_draft(decode: str, drafting: Drafting, max_nodes: int | None, remember: bool) -> None:
    if decode not in ("auto", "sequential"):
        raise UserError(
            f"In draft mode --draft says what drafts, and --decode {decode} has no use. Give --draft, or "
            "--decode sequential for no drafts at all."
        )
    if decode == "sequential" and (drafting.draft is not None or drafting.length is not None):
        raise UserError("--decode sequential drafts nothing. Leave it out, or --draft and --draft-length.")
    if drafting.length is not None and max_nodes is not None:
        raise UserError("--draft-length and --max-nodes both limit what is drafted. Leave one of them out.")
    if drafting.spares_cloud and (drafting.length is not None or max_nodes is not None):
        raise UserError(
            "--draft-for says what an automatic number of drafts is good for, and here the number is given. "
            "Leave out --draft-for, or --draft-length and --max-nodes."
        )
    if remember:
        raise UserError("--remember keeps the recycling table, and draft mode has none. Leave it out.")
