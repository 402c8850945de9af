"""The library: a model on two machines, from Python.

>>> from aparte import Aparte
>>> with Aparte.connect("smollm2-135m", cloud="ws://127.0.0.1:7600") as model:
...     print(model.generate("Why is the sky blue?").text)

The text stays in this process; what the cloud learns in which mode is the same as for the commands, which
write through here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from aparte.answer import Answer
from aparte.config import DEFAULT_MODEL, TARGETS, Compute, Cut, LinkSettings
from aparte.connection import Connection
from aparte.decode import PrefillProgress
from aparte.drafting import DraftPlan, plan_drafts
from aparte.hidden import Prompt, Restoring, hide_options, hide_prompt
from aparte.live import LiveAnswer, Reading
from aparte.model.parts import Blueprint, Progress
from aparte.options import Options
from aparte.pool import Part, Pool
from aparte.privacy.guard import draw_cut
from aparte.privacy.protection import Protection
from aparte.privacy.pseudonyms import Pseudonyms
from aparte.privacy.replacing import Replacing, read_replacing
from aparte.sessions import Sessions
from aparte.side import DeviceSide
from aparte.speculate.settings import Decoding, Drafting
from aparte.talk import Chat, Stream, merged
from aparte.text.tokenizer import Codec


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
        pseudonyms: Replacing | None = None,
        progress: Progress | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """Connects once, so that mistakes show here. ``notice`` is told what the user should know."""
        self.connection = connection
        self._replacing = pseudonyms
        self._sessions = Sessions(connection, plan, sessions, progress, notice)
        #: Most tokens of prompt and answer together.
        self.max_context = self._sessions.max_context

    @classmethod
    def connect(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        cloud: str | Sequence[str] = (),
        target: str = TARGETS[0],
        cut: str | Cut = Cut(),
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
        rtt_ms: float | None = None,
        mbps: float | None = None,
        wire: str = "auto",
        defence: str = Protection.defence,
        constant_shape: str | None = None,
        private_ends: Path | None = None,
        pseudonyms: Path | Replacing | None = None,
        spacy_model: str | None = None,
        dtype: str = Compute.dtype,
        device: str = Compute.device,
        kv: str = Compute.kv,
        batch_invariant: bool = Compute.batch_invariant,
        token: str | None = None,
        ca_file: Path | None = None,
        pins: Sequence[str] = (),
        failover: str = LinkSettings.failover,
        connect_timeout_s: float = LinkSettings.connect_timeout_s,
        step_timeout_s: float = LinkSettings.step_timeout_s,
        answer_timeout_s: float | None = LinkSettings.answer_timeout_s,
        retries: int = LinkSettings.retries,
        record: Path | None = None,
        sessions: int = 4,
        progress: Progress | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> Aparte:
        """Load the device's part of ``model`` and reach the rest.

        The names are those of ``aparte generate``, with units. Of several clouds the first that can be
        reached is used. ``record`` is a new file that keeps every frame sent and received
        (:mod:`aparte.wire.record`). ``progress`` is told what is being loaded, ``notice``, in sentences, what
        the user should know. Raises :class:`~aparte.errors.UserError` for settings that do not go together.
        """
        hosted = cut if isinstance(cut, Cut) else Cut.parse(cut)
        protection = Protection.parse(target, defence, constant_shape, private_ends)
        where = hosted if defence == Protection.defence else draw_cut(defence, hosted)
        plan = plan_drafts(
            model,
            where,
            target,
            decode=decode,
            draft=draft,
            draft_length=draft_length,
            accept=accept,
            return_states=return_states,
            draft_top=draft_top,
            draft_for=draft_for,
            ngram=ngram,
            max_nodes=max_nodes,
            in_flight=in_flight,
            remember=remember,
        )
        connection = Connection(
            model,
            where,
            target,
            (cloud,) if isinstance(cloud, str) else tuple(cloud),
            Compute(dtype, device, kv, batch_invariant),  # type: ignore[arg-type]
            wire,  # type: ignore[arg-type]
            token,
            ca_file,
            LinkSettings(
                connect_timeout_s, step_timeout_s, answer_timeout_s, retries=retries, failover=failover
            ),
            protection,
            tuple(pins),
            record,
            rtt_ms,
            mbps,
            None if defence == Protection.defence else hosted,
        )
        return cls(
            connection,
            plan.within(protection),
            sessions=sessions,
            pseudonyms=_replaced(pseudonyms, spacy_model, notice),
            progress=progress,
            notice=notice,
        )

    @property
    def codec(self) -> Codec:
        """The model's tokenizer and chat template."""
        return self.side.codec

    @property
    def blueprint(self) -> Blueprint:
        """The model's configuration."""
        return self.side.blueprint

    @property
    def side(self) -> DeviceSide:
        """What is loaded on this device."""
        return self._sessions.side

    @property
    def plan(self) -> DraftPlan:
        """What drafts, and how much."""
        return self._sessions.plan

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.blueprint.vocab_size

    @property
    def pool(self) -> Pool:
        """The sessions at the cloud."""
        return self._sessions.pool

    @property
    def front_layers(self) -> int | None:
        """After how many layers hidden states leave this device; None where none do."""
        return self.connection.cut.front if self.connection.target == "split" else None

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt. Text is a question for the chat template; with ``raw`` it is continued."""
        if isinstance(prompt, str):
            return (
                self.codec.encode(prompt)
                if raw
                else self.codec.encode_chat([{"role": "user", "content": prompt}])
            )
        if prompt and isinstance(prompt[0], int):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        return self.codec.encode_chat(list(prompt))  # type: ignore[arg-type]

    def generate(self, prompt: Prompt, *, raw: bool = False, **options: Any) -> Answer:
        """The whole answer at once; ``options`` are fields of :class:`Options`."""
        with self.stream(prompt, raw=raw, **options) as stream:
            for _ in stream:
                pass
        return stream.answer

    def stream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        on_prefill: PrefillProgress | None = None,
        **options: Any,
    ) -> Stream:
        """The answer round trip by round trip. ``on_prefill`` is told how much of a long prompt is read."""
        names = self._conversation()
        tokens, chosen = self._asked(prompt, raw, options, names)
        return Stream(self.pool, tokens, chosen, names=names, on_prefill=on_prefill)

    def chat(self, system: str | None = None, **options: Any) -> Chat:
        """A conversation that remembers what was said."""
        return Chat(self, system, merged(Options(), options), self._conversation())

    async def agenerate(self, prompt: Prompt, *, raw: bool = False, **options: Any) -> Answer:
        """As :meth:`generate`, without holding up the event loop."""
        names = self._conversation()
        tokens, chosen = self._asked(prompt, raw, options, names)
        restoring = Restoring(names, chosen)
        async with self.live(tokens, chosen) as live:
            async for event in live.events():
                if not isinstance(event, Reading):
                    restoring.take(event)
        live.answer.text = restoring.text
        return live.answer

    async def astream(self, prompt: Prompt, *, raw: bool = False, **options: Any) -> AsyncIterator[Part]:
        """As :meth:`stream`, without holding up the event loop."""
        names = self._conversation()
        tokens, chosen = self._asked(prompt, raw, options, names)
        restoring = Restoring(names, chosen)
        async with self.live(tokens, chosen) as live:
            async for event in live.events():
                if not isinstance(event, Reading):
                    yield restoring.take(event)

    def live(self, tokens: Sequence[int], options: Options) -> LiveAnswer:
        """The answer to a prompt of tokens with everything that happens, for a running event loop.

        Nothing is replaced in it, and nothing restored.
        """
        return LiveAnswer(self.pool, tokens, options)

    def redraft(
        self,
        *,
        decode: str = Decoding.decode,
        draft: str | None = Decoding.draft,
        draft_length: int | None = Drafting.length,
        draft_for: str = Drafting.goal,
        ngram: int = Decoding.ngram,
        max_nodes: int | None = Decoding.max_nodes,
        in_flight: int | None = Decoding.in_flight,
    ) -> None:
        """Draft like this from now on, over the connections that there are; sessions begin anew.

        Raises :class:`~aparte.errors.UserError` while an answer is written. The text stays the same.
        """
        former = self.plan.drafting
        plan = plan_drafts(
            self.connection.model,
            self.connection.cut,
            self.connection.target,
            decode=decode,
            draft=draft,
            draft_length=draft_length,
            accept=former.accept,
            return_states=former.return_states,
            draft_top=former.top,
            draft_for=draft_for,
            ngram=ngram,
            max_nodes=max_nodes,
            in_flight=in_flight,
            remember=self.plan.remember,
        )
        self._sessions.redraft(plan.within(self.connection.protection))

    def close(self) -> None:
        """End all sessions, and keep what was learned if that is wanted."""
        self._sessions.close()

    def __enter__(self) -> Aparte:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _conversation(self) -> Pseudonyms | None:
        return None if self._replacing is None else self._replacing.conversation()

    def _asked(
        self, prompt: Prompt, raw: bool, options: dict[str, Any], names: Pseudonyms | None
    ) -> tuple[list[int], Options]:
        """The prompt's tokens, and the options, as the model sees them."""
        chosen = merged(Options(), options)
        if names is not None:
            prompt, chosen = hide_prompt(prompt, names.hide), hide_options(chosen, names.hide)
        return self.encode(prompt, raw=raw), chosen


def _replaced(
    given: Path | Replacing | None, spacy_model: str | None, notice: Callable[[str], None] | None
) -> Replacing | None:
    if given is not None and not isinstance(given, str | Path):
        return given
    replacing = read_replacing(None if given is None else Path(given), spacy_model)
    if replacing is not None and notice is not None:
        notice(replacing.sentence)
    return replacing
