"""``--target`` on the command line: which options go together, and what drafts in draft mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aparte.cli.remember import remembered
from aparte.cli.setup import Setup, load_models, open_drafts
from aparte.config import LONGEST_DRAFT, TARGETS, Cut, Decoding, Drafting, one_of
from aparte.errors import UserError

if TYPE_CHECKING:
    from aparte.answer import Writer
    from aparte.config import Sampling
    from aparte.speculate.drafter import Drafter


def choose_decoding(
    target: str,
    model: str,
    cut: Cut,
    *,
    sampling: Sampling,
    decode: str,
    draft: str | None,
    ngram: int,
    max_nodes: int | None,
    in_flight: int | None,
    draft_length: str,
    accept: str,
    return_states: bool,
    draft_top: int = Drafting.top,
    draft_for: str = Drafting.goal,
    linked: bool,
    remember: bool,
) -> tuple[Decoding, Drafting]:
    """What the options of ``generate`` and ``chat`` mean together.

    ``linked`` says whether there is an option that needs a link to a cloud. Raises :class:`UserError` for
    those that do not go together.
    """
    one_of(target, TARGETS, "target")
    length = Drafting.parse_length(draft_length)
    if target == "draft":
        drafting = Drafting(draft, length, accept, return_states, draft_top, draft_for)
        _check_draft(decode, drafting, max_nodes, remember)
        from aparte.drafts import default_names

        names = drafting.names or default_names(model, cut)
        decoding = Decoding(
            "sequential" if decode == "sequential" else "+".join(names),
            ngram,
            # A chain decides itself how long it gets.
            length or max_nodes or (None if sampling.greedy else LONGEST_DRAFT),
            draft=drafting.model,
            # What is sent ahead for nothing costs the cloud.
            in_flight=1 if in_flight is None and drafting.spares_cloud else in_flight,
        )
        return decoding, drafting
    drafting = Drafting(None, length, accept, return_states, draft_top, draft_for)
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
    if target == "local" and (linked or cut != Cut()):
        raise UserError(
            "--target local runs the whole model on this machine: nothing is cut, and there is no link. "
            "Leave out --cut, --cloud, --rtt and --mbps, or choose another --target."
        )
    return Decoding(decode, ngram, max_nodes, draft=draft, in_flight=in_flight), drafting


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


@contextlib.contextmanager
def drafter_for(
    decoding: Decoding, sampling: Sampling, setup: Setup, writer: Writer, *, remember: bool, quiet: bool
) -> Iterator[Drafter]:
    """The drafter, with all that it has to load, for any target."""
    if setup.target == "draft":
        yield open_drafts(decoding, setup, writer, quiet).drafter(sampling)
        return
    models = load_models(decoding, setup, writer, quiet)
    with remembered(decoding, setup.model, writer.target.vocab_size, remember, models) as drafter:
        yield drafter
