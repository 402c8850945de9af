"""The sessions of one connection: writers that share what is loaded, each with drafters of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aparte.connection import Connection
from aparte.drafting import DraftPlan
from aparte.drafts import Drafts, DraftShelf
from aparte.errors import UserError
from aparte.grammar import Grammars
from aparte.model.needed import Wanted, needed_by_device, needed_to_draft
from aparte.model.parts import Progress
from aparte.pool import Pool, Seat
from aparte.session import Session
from aparte.side import DeviceSide
from aparte.speculate.memory import Memory
from aparte.speculate.recycling import Recycling
from aparte.target.base import Target


class Sessions:
    """Opens the first one at once, so that mistakes show, and others when they are needed."""

    def __init__(
        self,
        connection: Connection,
        plan: DraftPlan,
        most: int,
        progress: Progress | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """At ``most`` so many where the rest of the model serves several; else there is one."""
        self._plan = plan
        self._progress = progress
        self._notice = notice
        self._shelf: DraftShelf | None = None
        self._grammars: Grammars | None = None
        self._memory: tuple[Memory, Recycling] | None = None
        count = most if connection.remote else min(most, 1)
        self.pool = Pool(self._open, count)
        self.side = DeviceSide(
            connection,
            wanted=_wanted(connection, plan),
            rejection=plan.drafting.accept == "rejection",
            shared=count > 1,
            progress=progress,
            notice=notice,
        )
        try:
            seat = self._open()
        except BaseException:
            self.close()
            raise
        self._progress = None  # told once
        #: Most tokens of prompt and answer together.
        self.max_context = seat.writer.target.max_context
        self.pool.add(seat)

    @property
    def plan(self) -> DraftPlan:
        """How they draft."""
        return self._plan

    def redraft(self, plan: DraftPlan) -> None:
        """Draft by another plan from now on; what sessions held and learned is forgotten.

        Raises :class:`UserError` while an answer is written.
        """
        before = self._plan, self._shelf
        self._plan, self._shelf = plan, None

        def change(seat: Seat) -> None:
            seat.redraft(plan, self._drafts(seat.writer.target, seat.writer.session))

        try:
            self.pool.change(change)
        except BaseException:
            self._plan, self._shelf = before
            raise

    def close(self) -> None:
        """End all sessions, and keep what was learned if that is wanted."""
        self.pool.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            try:
                memory[0].save(memory[1])
            except UserError as error:  # not worth an answer that is written already
                if self._notice:
                    self._notice(str(error))
        self.side.close()

    def _open(self) -> Seat:
        writer = self.side.open()
        try:
            drafts = self._drafts(writer.target, writer.session)
            if self._grammars is None:
                folder = self.side.blueprint.checkpoint.folder
                self._grammars = Grammars(folder, writer.target.vocab_size, writer.codec.eos)
            return Seat(writer, self._plan, drafts, self._grammars)
        except BaseException:
            writer.target.close()
            raise

    def _drafts(self, target: Target, session: Session) -> Drafts:
        side, connection = self.side, self.side.connection
        if self._shelf is None:
            self._shelf = DraftShelf(
                self._plan,
                side.blueprint,
                connection.model,
                connection.cut,
                connection.target,
                side.codec,
                connection.compute,
                self._progress,
                self._notice,
            )
        if self._plan.remember and self._memory is None:
            memory = Memory(Path(connection.model).name, target.vocab_size)
            self._memory = memory, memory.load()
        table = self._memory[1] if self._plan.remember and self._memory else None
        return self._shelf.open(target, session, table)


def _wanted(connection: Connection, plan: DraftPlan) -> Wanted:
    """What this device has to have of the model while the rest is at a cloud."""
    if connection.target != "draft":
        return needed_by_device(connection.cut)
    return needed_to_draft(connection.cut, plan.decoding.sources, plan.drafting.layers)
