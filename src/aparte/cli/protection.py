"""``--defence``, ``--constant-shape`` and ``--pseudonyms`` on the command line, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aparte.cli.output import note
from aparte.errors import UserError
from aparte.privacy.protection import Protection

if TYPE_CHECKING:
    from aparte.answer import Writer
    from aparte.config import Cut
    from aparte.model.parts import Blueprint
    from aparte.privacy.finders import Finder, Listed
    from aparte.privacy.pseudonyms import Pseudonyms
    from aparte.privatize.ends import PrivateEnds

PRIVACY_LINE = (
    "The cloud receives hidden states, never text. With the model's public weights it can reconstruct the "
    "prompt and the answer from them: see `aparte audit`, and docs/privacy.md before you rely on it."
)


UNKNOWN_LINE = (
    "private ends: no audit on this machine says what the cloud can recover through them; measure it with "
    "`aparte audit --defences none,private-ends=FILE`, and count on nothing until then."
)


def privacy_line(blueprint: Blueprint, cut: Cut, defence: str, ends: PrivateEnds | None = None) -> str:
    """What the cloud can recover: as an audit on this machine found, else in general."""
    from aparte.privacy.verdict import recall

    if ends is not None:
        found = recall(blueprint, cut, ends.setting)
        return UNKNOWN_LINE if found is None else found.sentence_of_ends()
    verdict = recall(blueprint, cut, defence)
    return PRIVACY_LINE if verdict is None else verdict.sentence(defence)


def settle(protection: Protection, cut: Cut) -> Cut:
    """The cut of this session: ``cut``, or one that the defence draws.

    Raises :class:`UserError` for a defence that there is not, before anything is loaded.
    """
    if protection.defence == Protection.defence:
        return cut
    from aparte.privacy.guard import draw_cut

    return draw_cut(protection.defence, cut)


def check_draws(defence: str, hosted: Cut, layers: int) -> None:
    """Raise :class:`UserError` if the defence could draw a cut that the model does not have."""
    from aparte.privacy import guard

    guard.check_draws(defence, hosted, layers)


def apply(protection: Protection, writer: Writer) -> None:
    """Have the writer's target send as ``protection`` says."""
    if protection != Protection():
        from aparte.privacy.guard import protect

        protect(writer.target, protection, writer.codec)


def report_cadence(writer: Writer, quiet: bool) -> None:
    """Say so if steps could not keep to their times: an observer saw which ones."""
    shape = getattr(writer.target, "shape", None)
    if shape is not None and shape.late and not quiet:
        note(
            f"{shape.late} of {shape.steps} steps missed the cadence of --constant-shape, which shows. "
            "Choose a longer one than a round trip takes."
        )


def open_pseudonyms(file: Path | None, quiet: bool, spacy_model: str | None = None) -> Pseudonyms | None:
    """The pseudonyms of one conversation, with the names in ``file``; None without one."""
    replaced = read_pseudonyms(file, quiet, spacy_model)
    if replaced is None:
        return None
    from aparte.privacy.pseudonyms import Pseudonyms

    return Pseudonyms(*replaced)


def read_pseudonyms(
    file: Path | None, quiet: bool, spacy_model: str | None = None
) -> tuple[Sequence[Listed], Sequence[Finder]] | None:
    """The names in ``file`` and what finds more of them; None without one."""
    if file is None:
        if spacy_model is not None:
            raise UserError("--spacy-model finds names for --pseudonyms. Give that too, or leave it out.")
        return None
    from aparte.privacy.finders import find_patterns, read_names
    from aparte.privacy.presidio import PresidioMissing, presidio_finder

    names = read_names(file)
    finders: list[Finder] = [find_patterns]
    try:
        finder, model = presidio_finder(spacy_model)
        finders.append(finder)
        more = (
            f"and what Presidio finds with the language model {model}"
            if model
            else "and the numbers that Presidio knows. Other names stay as they are: there is no language "
            "model of spaCy to find them (python -m spacy download en_core_web_lg fetches one)"
        )
    except PresidioMissing as missing:
        if spacy_model is not None:
            raise UserError(f"--spacy-model needs Presidio. {missing}.") from None
        more = f"and nothing else ({missing})"
    if not quiet:
        note(
            f"The model sees stand-ins for {len(names)} listed names, for e-mail addresses, dates and "
            f"numbers of five digits or more, {more}."
        )
    return names, finders
