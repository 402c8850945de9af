"""Lost connections: whatever ends one, and whenever, the text is that of an undisturbed run, printed once."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from websockets.sync.server import ServerConnection

from aparte.cloud.server import MiddleServer
from aparte.config import Cut, LinkSettings, Sampling, ServerLimits
from aparte.deadline import Deadline
from aparte.decode import Committed, Job, decode
from aparte.errors import GivenUpError, LinkError
from aparte.fingerprint import Fingerprint
from aparte.model.fingerprint import take_fingerprint
from aparte.model.parts import Blueprint
from aparte.recovery import Recovery
from aparte.session import Session
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.settings import Decoding
from aparte.target.base import Target
from aparte.target.draft import DraftTarget
from aparte.target.local import LocalTarget
from aparte.target.split import DeviceParts, SplitTarget
from aparte.wire.failover import Failover
from aparte.wire.frames import ResultFrame, StepFrame, Welcome, encode
from aparte.wire.frames import decode as decode_frame
from aparte.wire.websocket import WebSocketLink
from dialogue import PROMPT, one_thread, wait_until
from drafters import Oracle
from impostors import impostor, web_server
from relay import Break, relay_to
from running import FLOAT32, running_server

LONG = PROMPT * 3
COUNT = 40
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=5)}
QUICK = LinkSettings(retries=12, first_wait_s=0.001, longest_wait_s=0.03)
#: What a server does with the session of a lost connection: keep it, or lose it as if it had been restarted.
KEPT, GONE = ServerLimits(grace_s=30), ServerLimits(grace_s=0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def blueprint(llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, FLOAT32)


@pytest.fixture(scope="module")
def parts(blueprint: Blueprint) -> DeviceParts:
    return DeviceParts(blueprint, Cut())


@pytest.fixture(scope="module")
def truth(blueprint: Blueprint) -> dict[str, list[int]]:
    """What the unsplit model writes after :data:`LONG`."""
    return {
        name: [
            token
            for block in decode(
                LocalTarget(blueprint), Session(), Nothing(), Job(LONG, how, COUNT, frozenset(), 1)
            )
            for token in block.tokens
        ]
        for name, how in SAMPLINGS.items()
    }


@dataclass
class Clouds:
    """One server of each kind: for either target, keeping lost sessions or not."""

    servers: dict[tuple[str, str], tuple[MiddleServer, str]]

    def __getitem__(self, key: tuple[str, str]) -> tuple[MiddleServer, str]:
        return self.servers[key]


@pytest.fixture(scope="module")
def clouds(llama_folder: Path) -> Iterator[Clouds]:
    with contextlib.ExitStack() as stack:
        yield Clouds(
            {
                (target, memory): stack.enter_context(
                    running_server(llama_folder, whole=target == "draft", limits=limits)
                )
                for target in ("split", "draft")
                for memory, limits in (("kept", KEPT), ("gone", GONE))
            }
        )


class Talk:
    """A conversation that bears with its link."""

    def __init__(
        self,
        parts: DeviceParts,
        *urls: str,
        target: str = "split",
        settings: LinkSettings = QUICK,
        name: str = "tiny",
    ) -> None:
        blueprint = parts.blueprint
        cut = None if target == "draft" else parts.cut
        self.deadline = Deadline(settings.answer_timeout_s)
        self.link = Failover(
            [
                link_to(url, blueprint, take_fingerprint(blueprint, cut, name), settings, self.deadline)
                for url in urls
            ]
        )
        self.target: Target = (
            DraftTarget(blueprint, self.link, "float32")
            if target == "draft"
            else SplitTarget(parts, self.link, "float32")
        )
        self.session = Session()
        self.recovery = Recovery(settings, self.deadline)

    def blocks(
        self,
        drafter: Drafter | None = None,
        *,
        sampling: Sampling = SAMPLINGS["greedy"],
        in_flight: int = 1,
        prompt: tuple[int, ...] = LONG,
        chunk: int = 16,
        count: int = COUNT,
    ) -> Iterator[Committed]:
        job = Job(
            prompt,
            sampling,
            count,
            frozenset(),
            8,
            prefill_chunk=chunk,
            in_flight=in_flight,
            recovery=self.recovery,
        )
        return decode(self.target, self.session, drafter or Nothing(), job)

    def tokens(self, *args: object, **more: object) -> list[int]:
        return [token for block in self.blocks(*args, **more) for token in block.tokens]  # type: ignore[arg-type]


def link_to(
    url: str, blueprint: Blueprint, fingerprint: Fingerprint, settings: LinkSettings, deadline: Deadline
) -> WebSocketLink:
    return WebSocketLink(
        url,
        fingerprint,
        wire="float32",
        width=blueprint.hidden_size,
        settings=settings,
        deadline=deadline,
    )


def drafter_named(name: str, text: list[int]) -> Drafter:
    return {
        "sequential": Nothing,
        "auto": lambda: make_drafter(Decoding("auto")),
        "pipelined": lambda: Oracle([*LONG, *text], block=3),
    }[name]()


def random_breaks(rng: random.Random, count: int, most: int) -> list[Break]:
    """Where connections end: some in the handshake or the greeting, most of them in the middle of steps."""
    return [
        Break(up=rng.randint(1, most)) if rng.random() < 0.5 else Break(down=rng.randint(1, most))
        for _ in range(count)
    ]


# -- Any point -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("name", ["sequential", "auto", "pipelined"])
@pytest.mark.parametrize("memory", ["kept", "gone"])
@pytest.mark.parametrize("target", ["split", "draft"])
def test_connections_that_break_anywhere_leave_no_trace_in_the_text(
    parts: DeviceParts,
    clouds: Clouds,
    truth: dict[str, list[int]],
    target: str,
    memory: str,
    name: str,
    how: str,
) -> None:
    server, url = clouds[target, memory]
    rng = random.Random(f"{target} {memory} {name} {how}")
    opened, resumed = server.counters.sessions_opened, server.counters.sessions_resumed
    # In draft mode there are fewer bytes to break at.
    breaks = random_breaks(rng, 6, 12_000 if target == "split" else 2_500)
    with relay_to(url, breaks) as relay:
        talk = Talk(parts, relay.url, target=target)
        blocks = list(
            talk.blocks(
                drafter_named(name, truth[how]),
                sampling=SAMPLINGS[how],
                in_flight=1 if name == "sequential" else 4,
            )
        )
        written = [token for block in blocks for token in block.tokens]
        assert written == truth[how]
        assert talk.session.tokens == [*LONG, *written][: len(talk.session.tokens)]
        assert sum(block.record.reconnects for block in blocks) == talk.recovery.lost > 0
        if name == "pipelined":
            assert any(block.record.ahead for block in blocks)
        talk.target.close()
    if memory == "kept":
        assert server.counters.sessions_resumed > resumed
    else:
        assert server.counters.sessions_resumed == resumed
        assert server.counters.sessions_opened > opened + 1
    wait_until(lambda: server.session_count == 0)


@pytest.mark.parametrize("place", [2, 7])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_kept_session_is_not_prefilled_again(
    parts: DeviceParts, clouds: Clouds, truth: dict[str, list[int]], direction: str, place: int
) -> None:
    """The connection ends in the middle of one step, on its way up or down: that one alone is repeated."""
    server, url = clouds["split", "kept"]
    chunks = len(LONG) // 16
    with relay_to(url) as relay:
        undisturbed = Talk(parts, relay.url)
        assert undisturbed.tokens() == truth["greedy"]
        undisturbed.target.close()
        recording = relay.recording
    steps = server.counters.steps
    end = size_up_to(bytes(recording.up if direction == "up" else recording.down), chunks + place) + 80
    with relay_to(url, [Break(up=end) if direction == "up" else Break(down=end)]) as relay:
        talk = Talk(parts, relay.url)
        assert talk.tokens() == truth["greedy"]
        assert talk.recovery.lost == 1
        again = [decode_frame(message) for message in relay.recording.messages_up]
        sizes = [len(frame.step) for frame in again if isinstance(frame, StepFrame)]
        assert len(sizes) == COUNT - place + 1
        assert sum(sizes[1:]) == COUNT - place
        talk.target.close()
    assert server.counters.steps - steps - chunks - COUNT == (direction == "down")


def size_up_to(stream: bytes, message: int) -> int:
    """Bytes before the given binary message of a recorded direction."""
    head, _, _ = stream.partition(b"\r\n\r\n")
    at = len(head) + 4
    for _ in range(message):
        length = stream[at + 1] & 0x7F
        masked = 4 if stream[at + 1] & 0x80 else 0
        if length == 126:
            at += 4 + masked + int.from_bytes(stream[at + 2 : at + 4], "big")
        else:
            assert length < 126
            at += 2 + masked + length
    return at


def test_a_server_that_is_restarted(
    parts: DeviceParts, llama_folder: Path, truth: dict[str, list[int]]
) -> None:
    """The process is another one, its memory is empty, and for a while nobody listens."""
    first = contextlib.ExitStack()
    _, url = first.enter_context(running_server(llama_folder))
    with first, relay_to(url) as relay:
        talk = Talk(parts, relay.url)
        blocks = talk.blocks(sampling=SAMPLINGS["sampled"])
        written = [token for _ in range(9) for token in next(blocks).tokens]
        first.close()
        relay.upstream = 9
        with running_server(llama_folder) as (server, url):
            port = int(url.rpartition(":")[2])
            threading.Timer(0.1, lambda: setattr(relay, "upstream", port)).start()
            written += [token for block in blocks for token in block.tokens]
            assert written == truth["sampled"]
            assert server.counters.sessions_opened == 1
            talk.target.close()


def test_an_expired_session_in_the_middle_of_an_answer(
    parts: DeviceParts, llama_folder: Path, truth: dict[str, list[int]]
) -> None:
    """A reader that takes its time: the cloud has forgotten the session, which is no error."""
    with running_server(llama_folder, limits=ServerLimits(idle_s=0.2)) as (server, url):
        talk = Talk(parts, url)
        blocks = talk.blocks()
        written = list(next(blocks).tokens)
        wait_until(lambda: server.session_count == 0)
        written += [token for block in blocks for token in block.tokens]
        assert written == truth["greedy"]
        assert server.counters.sessions_opened == 2
        talk.target.close()


def test_the_next_answer_goes_on_in_a_session_whose_connection_broke_while_idle(
    parts: DeviceParts, clouds: Clouds, truth: dict[str, list[int]]
) -> None:
    server, url = clouds["split", "kept"]
    resumed = server.counters.sessions_resumed
    with relay_to(url) as relay:
        talk = Talk(parts, relay.url)
        assert talk.tokens() == truth["greedy"]
        relay.cut()
        wait_until(lambda: server.session_count == 0)
        prompt = (*LONG, *truth["greedy"])
        blocks = list(talk.blocks(prompt=prompt, count=3))
        assert blocks[0].reused == len(prompt) - 1
        assert server.counters.sessions_resumed == resumed + 1
        talk.target.close()


def test_a_consumer_may_stop_after_a_reconnect(
    parts: DeviceParts, clouds: Clouds, truth: dict[str, list[int]]
) -> None:
    _, url = clouds["split", "kept"]
    with relay_to(url, [Break(up=11_000)]) as relay:
        talk = Talk(parts, relay.url)
        blocks = talk.blocks(Oracle([*LONG, *truth["greedy"]], block=3), in_flight=4)
        written: list[int] = []
        for block in blocks:
            written += block.tokens
            if talk.recovery.lost:
                break
        blocks.close()  # type: ignore[attr-defined]
        assert written == truth["greedy"][: len(written)]
        assert talk.tokens() == truth["greedy"]
        talk.target.close()


# -- Another cloud ---------------------------------------------------------------------------------


def test_a_killed_cloud_is_followed_by_the_next_one(
    parts: DeviceParts, clouds: Clouds, llama_folder: Path, truth: dict[str, list[int]]
) -> None:
    _, spare = clouds["split", "kept"]
    with running_server(llama_folder) as (_, url), relay_to(url) as relay:
        talk = Talk(parts, relay.url, spare)
        blocks = talk.blocks(sampling=SAMPLINGS["sampled"])
        written = [token for _ in range(5) for token in next(blocks).tokens]
        relay.upstream = 9
        relay.cut()
        written += [token for block in blocks for token in block.tokens]
        assert written == truth["sampled"]
        assert talk.link.where.endswith(spare)
        talk.target.close()


def test_what_an_abandoned_cloud_kept_is_never_taken_up_again(
    parts: DeviceParts, clouds: Clouds, truth: dict[str, list[int]]
) -> None:
    """There and back: the first cloud still has a session, with other tokens in the same slots."""
    _, first = clouds["split", "kept"]
    _, second = clouds["split", "gone"]
    with relay_to(first) as one, relay_to(second) as other:
        talk = Talk(parts, one.url, other.url)
        blocks = talk.blocks(Oracle([*LONG, *truth["greedy"]], block=2))
        written = list(next(blocks).tokens)
        upstream, one.upstream = one.upstream, 9
        one.cut()
        written += next(blocks).tokens
        assert talk.link.where.endswith(other.url)
        one.upstream, other.upstream = upstream, 9
        other.cut()
        written += [token for block in blocks for token in block.tokens]
        assert talk.link.where.endswith(one.url)
        assert written == truth["greedy"]
        talk.target.close()


# -- Giving up -------------------------------------------------------------------------------------


def test_a_cloud_that_never_comes_back_is_given_up_with_what_was_written(
    parts: DeviceParts, llama_folder: Path, truth: dict[str, list[int]]
) -> None:
    with contextlib.ExitStack() as stack:
        _, url = stack.enter_context(running_server(llama_folder))
        talk = Talk(parts, url, settings=LinkSettings(retries=3, first_wait_s=0.001, longest_wait_s=0.01))
        blocks = talk.blocks()
        written = [token for _ in range(4) for token in next(blocks).tokens]
        stack.close()
        with pytest.raises(GivenUpError) as caught:
            written += [token for block in blocks for token in block.tokens]
    assert written == truth["greedy"][: len(written)]
    told = str(caught.value)
    assert f"The cloud at {url} went away" in told
    assert "3 times in vain" in told
    assert "What was written until then is valid" in told
    assert "second --cloud" in told
    assert talk.session.tokens == []


def test_without_retries_the_first_loss_is_the_end(
    parts: DeviceParts, clouds: Clouds, truth: dict[str, list[int]]
) -> None:
    server, url = clouds["split", "kept"]
    parked = len(server.parking)
    with relay_to(url, [Break(up=12_000)]) as relay:
        talk = Talk(parts, relay.url, settings=LinkSettings(retries=0))
        with pytest.raises(LinkError, match="went away"):
            talk.tokens()
        assert len(relay.recordings) == 1
        wait_until(lambda: server.session_count == 0)
        assert len(server.parking) <= parked  # nothing is kept for a device that will not ask for it


def test_a_failing_step_is_not_tried_for_ever(parts: DeviceParts, clouds: Clouds) -> None:
    """The connection ends at every answer to the step after the prompt."""
    _, url = clouds["split", "gone"]
    settings = LinkSettings(retries=4, first_wait_s=0.001, longest_wait_s=0.01)
    with relay_to(url, [Break(up=3_000)] * 50) as relay:
        talk = Talk(parts, relay.url, settings=settings)
        with pytest.raises(GivenUpError, match="4 times in vain"):
            talk.tokens()
        assert len(relay.recordings) < 20


def test_a_server_that_never_answers_a_step_is_named_with_the_step(
    parts: DeviceParts, blueprint: Blueprint
) -> None:
    received: list[bytes] = []
    welcome = Welcome(take_fingerprint(blueprint, Cut(), "tiny").to_json(), 512, 512, resume="abc")
    settings = LinkSettings(step_timeout_s=0.3, first_wait_s=0.001)
    with impostor([welcome], received) as url:
        talk = Talk(parts, url, settings=settings)
        with pytest.raises(LinkError, match=f"{re.escape(url)} did not answer step 1 within 0.3 s"):
            talk.tokens(prompt=PROMPT[:8])
    assert len(received) == 2


def test_a_silent_cloud_is_followed_by_the_next_one(
    parts: DeviceParts, clouds: Clouds, blueprint: Blueprint, truth: dict[str, list[int]]
) -> None:
    _, good = clouds["split", "kept"]
    welcome = Welcome(take_fingerprint(blueprint, Cut(), "tiny").to_json(), 512, 512)
    settings = LinkSettings(step_timeout_s=0.3, first_wait_s=0.001)
    with impostor([welcome], []) as silent:
        talk = Talk(parts, silent, good, settings=settings)
        assert talk.tokens() == truth["greedy"]
        talk.target.close()
        with impostor([welcome], []) as another:
            talk = Talk(parts, silent, another, settings=settings)
            with pytest.raises(LinkError, match=f"{re.escape(another)} did not answer step"):
                talk.tokens()


def test_an_answer_has_a_time_of_its_own(parts: DeviceParts, blueprint: Blueprint) -> None:
    """The server answers each step, but not soon enough for all of them."""
    fingerprint = take_fingerprint(blueprint, Cut(), "tiny").to_json()

    def slowly(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(encode(Welcome(fingerprint, 512, 512)))
        for message in connection:
            assert isinstance(message, bytes)
            frame = decode_frame(message)
            assert isinstance(frame, StepFrame)
            time.sleep(0.1)
            connection.send(encode(ResultFrame(frame.step.number, 1.0, 0.0, frame.payload)))

    with web_server(slowly) as url:
        talk = Talk(parts, url, settings=LinkSettings(answer_timeout_s=0.55))
        blocks = talk.blocks(prompt=PROMPT[:8])
        written = list(next(blocks).tokens)
        with pytest.raises(GivenUpError, match=r"not finished within 0\.55 s.*--answer-timeout"):
            written += [token for block in blocks for token in block.tokens]
        assert written
        talk.target.close()


def test_a_stall_before_the_deadline_ends_at_the_deadline(
    parts: DeviceParts, clouds: Clouds, truth: dict[str, list[int]]
) -> None:
    _, url = clouds["split", "kept"]
    with relay_to(url) as relay:
        talk = Talk(parts, relay.url, settings=LinkSettings(answer_timeout_s=0.8))
        blocks = talk.blocks()
        written = list(next(blocks).tokens)
        relay.stall()
        with pytest.raises(GivenUpError, match=r"not finished within 0\.8 s"):
            written += [token for block in blocks for token in block.tokens]
        assert written == truth["greedy"][: len(written)]
