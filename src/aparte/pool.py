"""Several conversations with one model at a time: sessions on the cloud, kept and reused.

Every session is a writer of its own with its own connection and cache; the device's parts and the models that
draft are loaded once and shared. An answer gets the idle session that already holds most of its prompt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from aparte.adjust import AdjustedTarget, Adjustment, Penalized, TokenLogprob
from aparte.answer import Answer, Piece, Writer
from aparte.decode import FinishReason, PrefillProgress
from aparte.drafting import DraftPlan
from aparte.drafts import Drafts
from aparte.errors import AparteError, UserError
from aparte.grammar import Grammars
from aparte.options import Options
from aparte.target.outgoing import Sent
from aparte.target.split import SplitTarget


class BusyError(AparteError):
    """All sessions are busy, and as many answers as are allowed wait already."""


@dataclass(frozen=True)
class Part:
    """What one round trip added to an answer. ``logprobs`` has one entry per token if they were asked for.

    ``sent`` is what a split target's messages showed the cloud since the part before: the prompt is in the
    first one, and what is sent ahead comes a part early. ``finish`` is set on the last part.
    """

    piece: Piece
    logprobs: tuple[TokenLogprob, ...] = ()
    sent: tuple[Sent, ...] = ()
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        return self.piece.text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.piece.tokens


class Seat:
    """One session, and what drafts for it. Used by one answer at a time, in whatever thread."""

    def __init__(self, writer: Writer, plan: DraftPlan, drafts: Drafts, grammars: Grammars) -> None:
        self.writer = writer
        self._plan = plan
        self._drafts = drafts
        self._grammars = grammars
        self._adjusted: AdjustedTarget | None = None
        self._sent: list[Sent] = []
        if isinstance(writer.target, SplitTarget):
            writer.target.watch(self._sent.append)
        if writer.target.name != "draft":  # there logits stay on the cloud
            self._adjusted = AdjustedTarget(writer.target, writer.session)
            writer.target = self._adjusted
        #: The thread of this conversation. OpenMP keeps a team of threads for every thread that computes.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="conversation")

    @property
    def tokens(self) -> Sequence[int]:
        """What the session holds."""
        return self.writer.session.tokens

    def write(
        self, prompt: Sequence[int], options: Options, on_prefill: PrefillProgress | None = None
    ) -> tuple[Answer, Iterator[Part]]:
        """The answer to come, and the parts that fill it as they are consumed.

        Raises :class:`UserError` for options that this target has no logits for.
        """
        self._sent.clear()
        adjustments: list[Adjustment] = []
        if self._adjusted is None:
            check_needs(options)
        else:
            if options.penalties.active:
                if any(token >= self.writer.target.vocab_size for token, _ in options.logit_bias):
                    raise UserError("logit_bias names a token that the model does not have.")
                adjustments.append(Penalized(options.penalties))
            if options.json_schema is not None:
                adjustments.append(self._grammars.json_schema(options.json_schema))
            if options.grammar is not None:
                adjustments.append(self._grammars.lark(options.grammar))
            self._adjusted.begin(len(prompt), adjustments)
        answer, pieces = self.writer.write(
            prompt,
            self._drafts.drafter(options.sampling),
            sampling=options.sampling,
            decoding=self._plan.decoding_for(self.writer.target.name, options.sampling),
            stopping=options.stopping,
            on_prefill=on_prefill,
        )
        return answer, self._parts(answer, pieces, options)

    def redraft(self, plan: DraftPlan, drafts: Drafts) -> None:
        """Draft like this from now on, and keep nothing of earlier answers."""
        self._plan, self._drafts = plan, drafts
        self.writer.forget()

    def close(self) -> None:
        self.thread.shutdown(wait=False)  # it may be this one
        self.writer.target.close()

    def _parts(self, answer: Answer, pieces: Iterator[Piece], options: Options) -> Iterator[Part]:
        position = answer.prompt_tokens
        try:
            for piece in pieces:
                logprobs: tuple[TokenLogprob, ...] = ()
                if self._adjusted is not None and options.top_logprobs is not None:
                    logprobs = self._adjusted.logprobs(position, piece.tokens, options.top_logprobs)
                position += len(piece.tokens)
                sent = tuple(self._sent)
                self._sent.clear()
                yield Part(piece, logprobs, sent, answer.finish_reason)
        finally:
            close(pieces)


def check_needs(options: Options) -> None:
    """Raise :class:`UserError` for options that draft mode can't have."""
    if (name := options.needs_logits) is not None:
        raise UserError(
            f"{name} needs the model's logits, and in draft mode they stay on the cloud. Leave it out, or "
            "use --target split."
        )


def close(iterator: Iterator[object]) -> None:
    """End a generator early, with everything in order."""
    end: Callable[[], None] | None = getattr(iterator, "close", None)
    if end is not None:
        end()


def shared_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens both begin with."""
    limit = min(len(ours), len(theirs))
    return next((place for place in range(limit) if ours[place] != theirs[place]), limit)


@dataclass(frozen=True)
class _Waiting:
    prompt: Sequence[int]
    seat: Future[Seat]


class Pool:
    """At most ``size`` seats, opened when they are needed."""

    def __init__(self, open_seat: Callable[[], Seat], size: int, most_waiting: int = 64) -> None:
        if size < 1:
            raise UserError(f"The number of sessions is {size}; it must be at least 1.")
        self._open_seat = open_seat
        self._size = size
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._idle: list[Seat] = []  # the longest unused first
        self._count = 0  # open ones and those that are being opened
        self._waiting: deque[_Waiting] = deque()
        self._closed = False
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="connect")

    @property
    def busy(self) -> int:
        """Seats with an answer under way."""
        return self._count - len(self._idle)

    @property
    def waiting(self) -> int:
        """Answers that wait for a seat."""
        return len(self._waiting)

    @property
    def free(self) -> int:
        """How many further answers could begin at once."""
        return 0 if self._waiting else self._size - self.busy

    def acquire(self, prompt: Sequence[int]) -> Future[Seat]:
        """A seat for an answer to ``prompt``, as soon as there is one; cancel the future to stop waiting.

        Raises :class:`BusyError` if too many wait already.
        """
        future: Future[Seat] = Future()
        with self._lock:
            if self._closed:
                raise AparteError("The connection was closed.")
            best = max(self._idle, key=lambda seat: shared_prefix(seat.tokens, prompt), default=None)
            if best is not None and not self._is_waste(best, prompt):
                self._idle.remove(best)
                future.set_running_or_notify_cancel()
                future.set_result(best)
                return future
            if self._count < self._size:
                self._count += 1
                future.set_running_or_notify_cancel()
                self._opener.submit(self._open, future)
                return future
            if len(self._waiting) >= self._most_waiting:
                raise BusyError(
                    f"All {self._size} sessions are busy and {self._most_waiting} answers wait. "
                    "Try again later."
                )
            self._waiting.append(_Waiting(prompt, future))
        return future

    def add(self, seat: Seat) -> None:
        """Take in a session that was opened elsewhere."""
        with self._lock:
            self._count += 1
            self._idle.append(seat)

    def change(self, change: Callable[[Seat], None]) -> None:
        """Do something to every session. Raises :class:`UserError` while one is busy."""
        with self._lock:
            if self.busy:
                raise UserError("An answer is being written. Wait until it has ended, or end it.")
            for seat in self._idle:
                change(seat)

    def release(self, seat: Seat) -> None:
        """Give ``seat`` back; whoever waits the longest gets it."""
        with self._lock:
            while self._waiting:
                waiting = self._waiting.popleft()
                if waiting.seat.set_running_or_notify_cancel():
                    waiting.seat.set_result(seat)
                    return
            self._idle.append(seat)
            closed = self._closed
        if closed:
            seat.close()

    def close(self) -> None:
        """End all sessions; those with an answer under way when it ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            waiting, self._waiting = list(self._waiting), deque()
        for one in waiting:
            if one.seat.set_running_or_notify_cancel():
                one.seat.set_exception(AparteError("The connection was closed."))
        for seat in idle:
            seat.close()
        self._opener.shutdown(wait=True)

    def _is_waste(self, seat: Seat, prompt: Sequence[int]) -> bool:
        """Whether another conversation would lose more in ``seat`` than this one would gain, while there is
        room for a further session."""
        shared = shared_prefix(seat.tokens, prompt)
        return self._count < self._size and len(seat.tokens) - shared > shared

    def _open(self, future: Future[Seat]) -> None:
        try:
            seat = self._open_seat()
        except BaseException as error:
            with self._lock:
                self._count -= 1
                # Nobody else may come by to hand these a seat.
                stuck = [] if self._count else list(self._waiting)
                if stuck:
                    self._waiting.clear()
            future.set_exception(error)
            for one in stuck:
                if one.seat.set_running_or_notify_cancel():
                    one.seat.set_exception(error)
            return
        future.set_result(seat)
