"""A model that is ready, for the commands: loading shows as bars, what the user should know as lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aparte.cli.output import note, progress_bar
from aparte.cli.protection import privacy_line, read_pseudonyms
from aparte.speculate.settings import Decoding, Drafting

if TYPE_CHECKING:
    from aparte.answer import Writer
    from aparte.api import Aparte
    from aparte.connection import Connection
    from aparte.drafts import Model
    from aparte.side import DeviceSide

DRAFT_LINE = (
    "Draft mode: the cloud sees the text. It gets the prompt and the answer as tokens; this device only "
    "saves it work. Where the cloud is not to be given text, use --target split."
)


class _Report:
    """Bars while things are loaded; notices wait until they are gone."""

    def __init__(self, quiet: bool) -> None:
        self._bars = contextlib.ExitStack()
        self.progress = self._bars.enter_context(progress_bar(quiet))
        self._waiting: list[str] | None = []

    def notice(self, sentence: str) -> None:
        if self._waiting is None:
            note(sentence)
        else:
            self._waiting.append(sentence)

    def tell(self) -> None:
        """All is loaded."""
        self.close()  # a live bar would take the answer's standard output
        waiting, self._waiting = self._waiting or [], None
        for sentence in waiting:
            note(sentence)

    def close(self) -> None:
        self._bars.close()


@contextlib.contextmanager
def open_model(
    model: str,
    *,
    quiet: bool = False,
    sessions: int = 1,
    pseudonyms: Path | None = None,
    spacy_model: str | None = None,
    **settings: Any,
) -> Iterator[Aparte]:
    """What a command writes with; ``settings`` are those of :meth:`aparte.api.Aparte.connect`."""
    from aparte.api import Aparte

    replaced = read_pseudonyms(pseudonyms, quiet, spacy_model)
    with contextlib.ExitStack() as stack:
        report = _Report(quiet)
        stack.callback(report.close)
        ready = Aparte.connect(
            model,
            sessions=sessions,
            pseudonyms=replaced,
            progress=report.progress,
            notice=report.notice,
            **settings,
        )
        if not quiet and ready.side.recorder is not None and ready.connection.target == "draft":
            stack.callback(_say_what_is_recorded, ready.side)
        stack.callback(ready.close)
        report.tell()
        _say_what_is_seen(ready.side, quiet)
        yield ready


@contextlib.contextmanager
def connect(connection: Connection, quiet: bool = False) -> Iterator[Writer]:
    """A writer of its own, for measurements that choose step by step what is done with it."""
    from aparte.side import DeviceSide

    with contextlib.ExitStack() as stack:
        report = _Report(quiet)
        stack.callback(report.close)
        side = DeviceSide(connection, progress=report.progress, notice=report.notice)
        stack.callback(side.close)
        writer = side.open()
        stack.callback(writer.target.close)
        report.tell()
        _say_what_is_seen(side, quiet)
        yield writer


def load_models(
    decoding: Decoding, connection: Connection, writer: Writer, quiet: bool = False
) -> dict[str, Model]:
    """What ``decoding`` drafts with and has to load first, by source.

    Raises :class:`~aparte.errors.UserError` if one is asked for by name that there is not; ``auto`` does
    without.
    """
    from aparte.device import blueprint_of
    from aparte.drafting import DraftPlan
    from aparte.drafts import DraftShelf

    with progress_bar(quiet) as progress:
        shelf = DraftShelf(
            DraftPlan(decoding, Drafting()),
            blueprint_of(writer.target),
            connection.model,
            connection.cut,
            connection.target,
            writer.codec,
            connection.compute,
            progress,
            notice=note,
        )
    return shelf.models(writer.target, writer.session)


def what_is_seen(side: DeviceSide) -> str | None:
    """A sentence on what the cloud can learn; None where there is no cloud."""
    connection = side.connection
    if connection.target == "draft":
        return DRAFT_LINE
    if not connection.remote:
        return None
    hosted = connection.hosted or connection.cut
    return privacy_line(side.blueprint, hosted, connection.protection.defence, side.ends)


def _say_what_is_seen(side: DeviceSide, quiet: bool) -> None:
    sentence = what_is_seen(side)
    if quiet or sentence is None:
        return
    note(sentence)
    if side.connection.hosted not in (None, side.connection.cut):
        note(f"The cut of this session is {side.connection.cut}.")


def _say_what_is_recorded(side: DeviceSide) -> None:
    if side.recorder is not None and not side.recorder.failure:
        note(f"{side.connection.record} holds the text as tokens, as the cloud got it.")
