"""A recording as sessions: who answered what, over lost connections, and with rubbish in between."""

from __future__ import annotations

from itertools import count

from aparte.step import ROOT, Step
from aparte.wire.frames import ErrorFrame, Frame, Hello, ResultFrame, StepFrame, Welcome, encode
from aparte.wire.playback import visits
from aparte.wire.record import Kind, Message

HELLO = Hello({}, "float32", resume="")


def welcome(*, resumed: bool = False) -> Welcome:
    return Welcome({}, 512, 512, resume="name", resumed=resumed)


def step(number: int) -> StepFrame:
    return StepFrame(Step(number, 0, ROOT, 0, (ROOT,)), b"x" * number)


def result(number: int) -> ResultFrame:
    return ResultFrame(number, 1.0, 0.0, b"y")


def messages(*what: Frame | bytes | None, link: int = 0) -> list[Message]:
    """One per second; None is a connection."""
    clock = count()

    def message(one: Frame | bytes | None) -> Message:
        if one is None:
            return Message(Kind.OPENED, link, float(next(clock)), memoryview(b""))
        up = isinstance(one, Hello | StepFrame)
        data = one if isinstance(one, bytes) else encode(one)
        return Message(Kind.UP if up else Kind.DOWN, link, float(next(clock)), memoryview(data))

    return [message(one) for one in what]


def test_steps_meet_their_results() -> None:
    (visit,) = visits(messages(None, HELLO, welcome(), step(1), step(2), result(1), result(2), step(3)))
    assert [exchange.sent.step.number for exchange in visit.exchanges] == [1, 2, 3]
    assert [exchange.wait_ms for exchange in visit.exchanges] == [2000, 2000, None]
    assert visit.exchanges[0].bytes_up == len(encode(step(1)))
    assert visit.connections == 1


def test_a_session_that_went_on_is_one() -> None:
    (visit,) = visits(
        messages(None, HELLO, welcome(), step(1), None, HELLO, welcome(resumed=True), step(1), result(1))
    )
    assert visit.connections == 2
    first, again = visit.exchanges
    assert first.result is None
    assert again.result is not None


def test_a_session_that_was_lost_is_another() -> None:
    lost, new = visits(messages(None, HELLO, welcome(), step(1), None, HELLO, welcome(), step(2), result(2)))
    assert (len(lost.exchanges), len(new.exchanges)) == (1, 1)


def test_two_clouds_are_two_sessions() -> None:
    one = messages(None, HELLO, welcome(), step(1), link=0)
    other = messages(None, HELLO, welcome(), step(1), result(1), link=1)
    both = [message for pair in zip(one, other, strict=False) for message in pair] + other[len(one) :]
    assert [(visit.link, len(visit.exchanges)) for visit in visits(both)] == [(0, 1), (1, 1)]


def test_errors_and_rubbish_are_counted() -> None:
    (visit,) = visits(
        messages(None, HELLO, welcome(), step(1), b"rubbish", result(9), ErrorFrame("busy", "full"))
    )
    assert visit.errors == ["busy"]
    assert visit.damaged == 1
    assert visit.exchanges[0].result is None


def test_a_greeting_alone_is_no_session() -> None:
    assert visits(messages(None, HELLO, welcome())) == []
    assert visits([]) == []
