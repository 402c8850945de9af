"""What is said on the command line of ``--defence``, ``--constant-shape`` and ``--pseudonyms``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aparte.cli.output import note

if TYPE_CHECKING:
    from aparte.api import Aparte
    from aparte.config import Cut
    from aparte.model.parts import Blueprint
    from aparte.privacy.replacing import Replacing
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


def report_cadence(model: Aparte, quiet: bool) -> None:
    """Say so if steps could not keep to their times: an observer saw which ones."""
    late, steps = model.side.cadence
    if late and not quiet:
        note(
            f"{late} of {steps} steps missed the cadence of --constant-shape, which shows. "
            "Choose a longer one than a round trip takes."
        )


def read_pseudonyms(file: Path | None, quiet: bool, spacy_model: str | None = None) -> Replacing | None:
    """What is replaced, if anything is; says so."""
    if file is None and spacy_model is None:
        return None
    from aparte.privacy.replacing import read_replacing

    replacing = read_replacing(file, spacy_model)
    if replacing is not None and not quiet:
        note(replacing.sentence)
    return replacing
