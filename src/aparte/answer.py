"""Writing one answer as text: the decoding loop, detokenised, stopped and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aparte.config import Sampling, Stopping
from aparte.decode import FinishReason, Job, PrefillProgress, StepRecord, decode
from aparte.measure.decomposition import Bandwidth, Parts, decompose_all, fitted_bandwidth
from aparte.recovery import Recovery
from aparte.session import Session
from aparte.speculate.ahead import SendAhead
from aparte.speculate.budget import NodeBudget
from aparte.speculate.cloud_budget import CloudBudget
from aparte.speculate.drafter import Drafter
from aparte.speculate.settings import Decoding
from aparte.target.base import Target
from aparte.text.stream import Detokenizer, StopMatcher
from aparte.text.tokenizer import Codec


@dataclass(frozen=True)
class Piece:
    """What one round trip added: its text (maybe empty, while a character or a stop string is open),
    the tokens it committed, and its record."""

    text: str
    tokens: tuple[int, ...]
    record: StepRecord


@dataclass
class Answer:
    """An answer and what it took. Grows while it is written; ``finish_reason`` is None until the end."""

    decode: str
    cut: str
    prompt_tokens: int
    #: Where the model is: ``split``, ``draft`` or ``local``.
    target: str = "split"
    reused_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    ttft_ms: float = 0.0
    elapsed_s: float = 0.0
    #: All messages of the answer, stale steps included.
    bytes_up: int = 0
    bytes_down: int = 0
    #: Steps sent ahead for nothing, and the nodes in them.
    stale_steps: int = 0
    stale_nodes: int = 0
    #: Of the link, where it is known.
    bandwidth: Bandwidth | None = None

    @property
    def round_trips(self) -> int:
        """Steps whose result was used, also those that overlapped with the one before; not stale ones.

        Prefill chunks are sent before the first one and not waited for singly.
        """
        return len(self.steps)

    @property
    def ahead_steps(self) -> int:
        """Round trips among them that overlapped with the one before."""
        return sum(step.ahead for step in self.steps)

    @property
    def reconnects(self) -> int:
        """How often the connection was lost on the way, and found again."""
        return sum(step.reconnects for step in self.steps)

    @property
    def mat(self) -> float:
        """Tokens committed per round trip, the target's own included; 1.00 is plain autoregression."""
        return len(self.token_ids) / len(self.steps) if self.steps else 0.0

    @property
    def tok_s(self) -> float:
        """New tokens per second of wall time, prefill included."""
        return len(self.token_ids) / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bytes_per_token(self) -> tuple[float, float]:
        """Bytes up and down per new token, without the step that carried the prompt."""
        tokens = sum(step.accepted for step in self.steps[1:])
        if not tokens:
            return 0.0, 0.0
        first = self.steps[0].timing
        return (self.bytes_up - first.bytes_up) / tokens, (self.bytes_down - first.bytes_down) / tokens

    @property
    def link(self) -> Bandwidth:
        """The bandwidth that transfer goes by: known, or fitted to the steps, or unknown; transfer is then
        part of the latency."""
        return self.bandwidth or fitted_bandwidth(self.steps)

    def decomposition(self) -> Parts:
        """Where ``elapsed_s`` went (:mod:`aparte.measure.decomposition`); what was done between two steps
        is part of the rest."""
        parts = decompose_all(self.steps, self.link)
        return parts + Parts(rest_ms=self.elapsed_s * 1e3 - parts.total_ms)

    def parts(self) -> dict[str, float | None]:
        """The decomposition in ms, with the bandwidth ``mbps`` that transfer goes by, or None."""
        mbps = self.link.mbps_up
        return {**self.decomposition().to_json(), "mbps": mbps and round(mbps, 3)}

    def to_json(self) -> dict[str, Any]:
        """The fields of design section 8, and more."""
        up, down = self.bytes_per_token
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "new_tokens": len(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "round_trips": self.round_trips,
            "mat": round(self.mat, 4),
            "ahead_steps": self.ahead_steps,
            "stale_steps": self.stale_steps,
            "stale_nodes": self.stale_nodes,
            "reconnects": self.reconnects,
            "tok_s": round(self.tok_s, 3),
            "ttft_ms": round(self.ttft_ms, 2),
            "elapsed_s": round(self.elapsed_s, 4),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "bytes_per_token_up": round(up, 1),
            "bytes_per_token_down": round(down, 1),
            "decode": self.decode,
            "cut": self.cut,
            "target": self.target,
            "finish_reason": self.finish_reason,
            "parts": self.parts(),
            "steps": [step.to_json() for step in self.steps],
        }


class Writer:
    """Writes answers with one target, keeping the conversation's prefix between them."""

    def __init__(
        self,
        target: Target,
        codec: Codec,
        cut: str,
        prefill_chunk: int = 128,
        clock: Callable[[], float] = time.perf_counter,
        recovery: Recovery | None = None,
    ) -> None:
        """``clock`` gives the seconds that answers are timed by; the target has to have the same one.

        ``recovery`` says what a lost connection means; without it that is the end of an answer.
        """
        self.target = target
        self.codec = codec
        self._cut = cut
        self._prefill_chunk = prefill_chunk
        self._clock = clock
        self._recovery = recovery or Recovery()
        #: Which tokens of the conversation lie in which slots.
        self.session = Session()
        # What these learn of the link holds for the next answer too.
        self.budget = NodeBudget()
        self.cloud_budget = CloudBudget()
        self.ahead = SendAhead()
        #: Of the link, where it is known; answers tell by it what transfer took.
        self.bandwidth: Bandwidth | None = None

    def forget(self) -> None:
        """Keep nothing of earlier answers: the next one sends its whole prompt."""
        self.session.clear()

    def write(
        self,
        prompt: Sequence[int],
        drafter: Drafter,
        *,
        sampling: Sampling,
        decoding: Decoding,
        stopping: Stopping,
        on_prefill: PrefillProgress | None = None,
    ) -> tuple[Answer, Iterator[Piece]]:
        """The answer to come, and the pieces that fill it as they are consumed."""
        answer = Answer(decoding.decode, self._cut, len(prompt), self.target.name, bandwidth=self.bandwidth)
        budget = self.cloud_budget if decoding.spares_cloud else self.budget
        job = Job(
            prompt=tuple(prompt),
            sampling=sampling,
            max_new_tokens=stopping.max_new_tokens,
            eos=self.codec.eos if stopping.eos is None else frozenset(stopping.eos),
            max_nodes=decoding.node_limit,
            budget=budget if decoding.automatic else None,
            prefill_chunk=self._prefill_chunk,
            in_flight=decoding.flight_limit,
            ahead=self.ahead if decoding.in_flight is None else None,
            clock=self._clock,
            recovery=self._recovery,
        )
        return answer, self._pieces(answer, job, drafter, stopping, on_prefill)

    def complete(
        self,
        prompt: Sequence[int],
        drafter: Drafter,
        *,
        sampling: Sampling,
        decoding: Decoding,
        stopping: Stopping,
    ) -> Answer:
        """The whole answer at once."""
        answer, pieces = self.write(prompt, drafter, sampling=sampling, decoding=decoding, stopping=stopping)
        for _ in pieces:
            pass
        return answer

    def _pieces(
        self,
        answer: Answer,
        job: Job,
        drafter: Drafter,
        stopping: Stopping,
        on_prefill: PrefillProgress | None,
    ) -> Iterator[Piece]:
        detokenizer, matcher = Detokenizer(self.codec.decode), StopMatcher(stopping.stop)
        count = self._counter(answer)
        started = self._clock()
        loop = decode(self.target, self.session, drafter, job, on_prefill)
        try:
            for block in loop:
                answer.elapsed_s = self._clock() - started
                answer.ttft_ms = answer.ttft_ms or answer.elapsed_s * 1e3
                answer.reused_tokens = block.reused
                text, used = "", 0
                for token in block.tokens:
                    used += 1
                    text += matcher.feed(detokenizer.feed(token))
                    if matcher.stopped:
                        break
                finish = "stop" if matcher.stopped else block.finish
                if finish and not matcher.stopped:
                    text += matcher.feed(detokenizer.finish()) + matcher.finish()
                answer.token_ids += block.tokens[:used]
                answer.text += text
                answer.steps.append(block.record)
                answer.finish_reason = finish
                count()
                yield Piece(text, block.tokens[:used], block.record)
                if finish:
                    return
        finally:
            loop.close()
            count()

    def _counter(self, answer: Answer) -> Callable[[], None]:
        """Brings the answer's totals up to date whenever it is called."""

        def totals() -> dict[str, int]:
            return {
                "bytes_up": self.target.bytes_up,
                "bytes_down": self.target.bytes_down,
                "stale_steps": self.session.stale_steps,
                "stale_nodes": self.session.stale_nodes,
            }

        before = totals()

        def count() -> None:
            for name, total in totals().items():
                setattr(answer, name, total - before[name])

        return count
