"""The library: a model on two machines, from Python.

>>> from aparte import Aparte
>>> with Aparte.connect("smollm2-135m", cloud="ws://127.0.0.1:7600") as model:
...     print(model.generate("Why is the sky blue?").text)

The text stays in this process; what the cloud learns in which mode is the same as for the commands.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from aparte.answer import Answer
from aparte.config import (
    DEFAULT_MODEL,
    TARGETS,
    Compute,
    Cut,
    Drafting,
    LinkSettings,
    WireName,
    one_of,
)
from aparte.device import open_draft_writer, open_local_writer, open_writer
from aparte.drafts import DraftPlan, DraftShelf, plan_drafts
from aparte.errors import UserError
from aparte.grammar import Grammars
from aparte.live import LiveAnswer, Reading
from aparte.model.needed import needed_by_device, needed_to_draft
from aparte.model.parts import Blueprint, Progress
from aparte.model.registry import resolve
from aparte.model.turns import TurnTaking
from aparte.options import Options
from aparte.pool import Part, Pool, Seat
from aparte.privacy.guard import protect
from aparte.privacy.protection import Protection
from aparte.privatize.ends import PrivateEnds
from aparte.privatize.use import adopt, hide
from aparte.talk import Chat, Stream, merged
from aparte.target.split import SplitTarget
from aparte.text.tokenizer import Codec, Message
from aparte.wire.record import Recorder

#: Text (a single question), a conversation, or token ids.
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Connection:
    """Which model, where its middle (or, in draft mode, all of it) is, and how to reach it."""

    model: str = DEFAULT_MODEL
    cut: Cut = field(default_factory=Cut)
    target: str = TARGETS[0]
    #: Where the first one is away, the next is asked.
    clouds: tuple[str, ...] = ()
    compute: Compute = field(default_factory=Compute)
    wire: WireName = "auto"
    token: str | None = None
    ca_file: Path | None = None
    link: LinkSettings = field(default_factory=LinkSettings)
    protection: Protection = field(default_factory=Protection)
    pins: tuple[str, ...] = ()
    #: A new file for every frame that is sent or received.
    record: Path | None = None

    def __post_init__(self) -> None:
        one_of(self.target, TARGETS, "target")
        one_of(self.wire, get_args(WireName), "wire format")
        if self.target == "local" and self.clouds:
            raise UserError("--target local runs the whole model on this machine. Leave the cloud out.")
        if self.target == "local" and self.record is not None:
            raise UserError("A recording keeps what a cloud sees, and target local has none. Leave one out.")


class Aparte:
    """A model that is ready to write. Close it, or use it in ``with``.

    Several threads may use it at a time; with a cloud so many answers as there are ``sessions`` are written
    at once, and further ones wait. Each has a session of its own at the cloud, and a conversation is found
    again there by its beginning.
    """

    def __init__(
        self,
        connection: Connection,
        plan: DraftPlan,
        *,
        sessions: int = 4,
        progress: Progress | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """Connects once, so that mistakes show here. ``notice`` is told what the user should know."""
        self.connection = connection
        self._plan = plan
        self._progress = progress
        self._notice = notice
        remote = bool(connection.clouds)
        folder = resolve(connection.model, wanted=self._wanted() if remote else None, progress=progress)
        weightless = connection.target == "draft" and remote
        self._blueprint = Blueprint.open(folder, connection.compute, weightless=weightless)
        #: The private ends of this device, if it has any.
        self.ends: PrivateEnds | None = None
        if connection.protection.ends is not None:
            self.ends = adopt(self._blueprint, connection.cut, connection.protection.ends)
        self._codec = Codec(folder)
        self._shelf = DraftShelf(
            plan,
            self._blueprint,
            connection.model,
            connection.cut,
            connection.target,
            self._codec,
            connection.compute,
            progress,
            notice,
        )
        self._first: SplitTarget | None = None
        # Without a cloud the model's parts are in this process, for one conversation at a time.
        self._pool = Pool(self._open_seat, sessions if remote else min(sessions, 1))
        self._grammars: Grammars | None = None
        self._recorder = Recorder(connection.record) if connection.record else None
        try:
            seat = self._pool.acquire(()).result()
        except BaseException:
            self.close()
            raise
        #: Most tokens of prompt and answer together.
        self.max_context = seat.writer.target.max_context
        self._pool.release(seat)

    @classmethod
    def connect(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        cloud: str | Sequence[str] = (),
        target: str = TARGETS[0],
        cut: str | Cut = Cut(),
        decode: str = "auto",
        draft: str | None = None,
        draft_length: int | None = None,
        draft_for: str = Drafting.goal,
        dtype: str = Compute.dtype,
        device: str = Compute.device,
        kv: str = Compute.kv,
        batch_invariant: bool = Compute.batch_invariant,
        wire: str = "auto",
        token: str | None = None,
        ca_file: Path | None = None,
        pins: Sequence[str] = (),
        connect_timeout_s: float = LinkSettings.connect_timeout_s,
        step_timeout_s: float = LinkSettings.step_timeout_s,
        answer_timeout_s: float | None = LinkSettings.answer_timeout_s,
        failover: str = LinkSettings.failover,
        private_ends: Path | None = None,
        sessions: int = 4,
        record: Path | None = None,
        progress: Progress | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> Aparte:
        """Load the device's part of ``model`` and reach the rest.

        The names are those of ``aparte generate``. Of several clouds the first that can be reached is used.
        ``record`` is a new file that keeps every frame sent and received (:mod:`aparte.wire.record`).
        """
        where = cut if isinstance(cut, Cut) else Cut.parse(cut)
        connection = Connection(
            model,
            where,
            target,
            (cloud,) if isinstance(cloud, str) else tuple(cloud),
            Compute(dtype, device, kv, batch_invariant),  # type: ignore[arg-type]
            wire,  # type: ignore[arg-type]
            token,
            ca_file,
            LinkSettings(connect_timeout_s, step_timeout_s, answer_timeout_s, failover=failover),
            Protection.parse(target, Protection.defence, None, private_ends),
            pins=tuple(pins),
            record=record,
        )
        plan = plan_drafts(
            model,
            where,
            target,
            decode=decode,
            draft=draft,
            draft_length=draft_length,
            draft_for=draft_for,
        )
        return cls(connection, plan, sessions=sessions, progress=progress, notice=notice)

    @property
    def codec(self) -> Codec:
        """The model's tokenizer and chat template."""
        return self._codec

    @property
    def blueprint(self) -> Blueprint:
        """The model's configuration."""
        return self._blueprint

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._blueprint.vocab_size

    @property
    def pool(self) -> Pool:
        """The sessions at the cloud."""
        return self._pool

    @property
    def front_layers(self) -> int | None:
        """After how many layers hidden states leave this device; None where none do."""
        return self.connection.cut.front if self.connection.target == "split" else None

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt. Text is a question for the chat template; with ``raw`` it is continued."""
        if isinstance(prompt, str):
            return (
                self._codec.encode(prompt)
                if raw
                else self._codec.encode_chat([{"role": "user", "content": prompt}])
            )
        if prompt and isinstance(prompt[0], int):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        return self._codec.encode_chat(list(prompt))  # type: ignore[arg-type]

    def generate(self, prompt: Prompt, *, raw: bool = False, **options: Any) -> Answer:
        """The whole answer at once; ``options`` are fields of :class:`Options`."""
        with self.stream(prompt, raw=raw, **options) as stream:
            for _ in stream:
                pass
        return stream.answer

    def stream(self, prompt: Prompt, *, raw: bool = False, **options: Any) -> Stream:
        """The answer round trip by round trip."""
        tokens = self.encode(prompt, raw=raw)
        return Stream(self._pool, tokens, merged(Options(), options))

    def chat(self, system: str | None = None, **options: Any) -> Chat:
        """A conversation that remembers what was said."""
        return Chat(self, system, merged(Options(), options))

    async def agenerate(self, prompt: Prompt, *, raw: bool = False, **options: Any) -> Answer:
        """As :meth:`generate`, without holding up the event loop."""
        async with self.live(self.encode(prompt, raw=raw), merged(Options(), options)) as live:
            async for _ in live.events():
                pass
        return live.answer

    async def astream(self, prompt: Prompt, *, raw: bool = False, **options: Any) -> AsyncIterator[Part]:
        """As :meth:`stream`, without holding up the event loop."""
        async with self.live(self.encode(prompt, raw=raw), merged(Options(), options)) as live:
            async for event in live.events():
                if not isinstance(event, Reading):
                    yield event

    def live(self, tokens: Sequence[int], options: Options) -> LiveAnswer:
        """The answer to a prompt of tokens with everything that happens, for a running event loop."""
        return LiveAnswer(self._pool, tokens, options)

    def close(self) -> None:
        """End all sessions."""
        self._pool.close()
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> Aparte:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_seat(self) -> Seat:
        connection, blueprint = self.connection, self._blueprint
        reach: dict[str, Any] = {
            "cloud": connection.clouds or None,
            "wire": connection.wire,
            "token": connection.token,
            "ca_file": connection.ca_file,
            "pins": connection.pins,
            "settings": connection.link,
            "progress": self._progress,
            "notice": self._notice,
            "record": self._recorder,
        }
        if connection.target == "local":
            writer = open_local_writer(blueprint, connection.link, self._progress)
        elif connection.target == "draft":
            writer = open_draft_writer(blueprint, connection.model, self._plan.drafting, **reach)
        else:
            parts = self._first.parts if self._first is not None else None
            writer = open_writer(blueprint, connection.model, connection.cut, parts=parts, **reach)
        if self._first is None and isinstance(writer.target, SplitTarget):
            self._first = writer.target
            parts = self._first.parts
            parts.front, parts.back = TurnTaking(parts.front), TurnTaking(parts.back)
        if self.ends is not None:
            hide(writer.target, self.ends)
        if connection.protection != Protection():
            protect(writer.target, connection.protection, writer.codec)
        self._progress = self._notice = None  # told once
        if self._grammars is None:
            self._grammars = Grammars(blueprint.checkpoint.folder, writer.target.vocab_size, self._codec.eos)
        drafts = self._shelf.open(writer.target, writer.session)
        return Seat(writer, self._plan, drafts, self._grammars)

    def _wanted(self) -> Any:
        """What this device has to have of the model while the rest is at a cloud."""
        if self.connection.target != "draft":
            return needed_by_device(self.connection.cut)
        layers = self._plan.drafting.layers
        return needed_to_draft(self.connection.cut, self._plan.decoding.sources, layers)
