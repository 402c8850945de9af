"""Several clouds: which one is asked, and what is told if none can be."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aparte.address import parse_address
from aparte.cloud.server import MiddleServer
from aparte.config import Cut, LinkSettings, ServerLimits
from aparte.errors import DoorError, LinkError, MismatchError, UserError
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.recovery import Recovery
from aparte.wire.failover import Failover
from aparte.wire.frames import Welcome
from cli.command import Command
from dialogue import Device, fingerprint_of, open_link, unsplit_tokens, wait_until
from impostors import impostor, web_server
from relay import relay_to
from running import running_server


@pytest.fixture(scope="module")
def clouds(llama_folder: Path) -> Iterator[list[tuple[MiddleServer, str]]]:
    with running_server(llama_folder) as one, running_server(llama_folder) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def guarded(llama_folder: Path) -> Iterator[str]:
    with running_server(llama_folder, token="open-sesame") as (_, url):
        yield url


@pytest.fixture
def nowhere() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return f"ws://127.0.0.1:{port}"


def failover(folder: Path, *urls: str, settings: LinkSettings | None = None) -> Failover:
    return Failover([open_link(folder, url, settings=settings) for url in urls])


def test_the_first_that_can_be_reached_is_used(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]], nowhere: str
) -> None:
    (one, first), (two, second) = clouds
    link = failover(llama_folder, nowhere, first, second)
    assert link.open() is False
    assert link.where.endswith(first)
    assert link.open() is True
    assert (one.session_count, two.session_count) == (1, 0)
    device = Device(llama_folder, link)
    assert device.tokens() == unsplit_tokens(llama_folder)
    link.close()
    wait_until(lambda: one.session_count == 0)


def test_limits_are_those_of_the_cloud_in_use(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]], nowhere: str
) -> None:
    link = failover(llama_folder, nowhere, clouds[0][1])
    link.open()
    assert link.max_nodes == 512
    assert link.max_context == 512
    assert link.current.cloud_dtype == "float32"
    link.close()


def test_a_cloud_that_wants_another_token_is_passed_over(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]], guarded: str
) -> None:
    link = failover(llama_folder, guarded, clouds[0][1])
    link.open()
    assert link.where.endswith(clouds[0][1])
    link.close()


def test_one_cloud_alone_speaks_for_itself(llama_folder: Path, nowhere: str, guarded: str) -> None:
    with pytest.raises(LinkError, match=f"^The cloud at {nowhere} cannot be reached"):
        failover(llama_folder, nowhere).open()
    with pytest.raises(DoorError):
        failover(llama_folder, guarded).open()


def test_if_none_can_be_reached_all_are_named(llama_folder: Path, nowhere: str, guarded: str) -> None:
    with pytest.raises(LinkError, match="None of the 2 clouds") as caught:
        failover(llama_folder, guarded, nowhere).open()
    assert guarded in str(caught.value)
    assert nowhere in str(caught.value)


def test_if_none_will_ever_do_it_is_the_users_mistake(llama_folder: Path, guarded: str) -> None:
    with running_server(llama_folder, Cut(1, 1)) as (_, other):
        with pytest.raises(DoorError, match="refused the token"):
            failover(llama_folder, guarded, other).open()
        with pytest.raises(MismatchError):
            failover(llama_folder, other, guarded).open()
        assert issubclass(MismatchError, UserError)


def test_a_full_cloud_says_when_to_come_again(llama_folder: Path, nowhere: str) -> None:
    with running_server(llama_folder, limits=ServerLimits(max_sessions=1)) as (_, url):
        first = open_link(llama_folder, url)
        first.open()
        with pytest.raises(LinkError, match="is full") as caught:
            failover(llama_folder, url).open()
        assert caught.value.retry_after_s == 5
        with pytest.raises(LinkError, match="None of the 2") as caught:
            failover(llama_folder, url, nowhere).open()
        assert caught.value.retry_after_s == 0  # the other one may be back sooner
        first.close()


def test_what_is_no_server_of_ours_is_passed_over(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]]
) -> None:
    with web_server(lambda connection: connection.close()) as stranger:
        link = failover(llama_folder, stranger, clouds[1][1])
        link.open()
        assert link.where.endswith(clouds[1][1])
        link.close()


# -- The nearest -----------------------------------------------------------------------------------


@contextlib.contextmanager
def far_away(url: str, rtt_ms: float = 80) -> Iterator[str]:
    with WanRelay(("127.0.0.1", 0), parse_address(url.removeprefix("ws://")), WanProfile(rtt_ms)) as relay:
        yield f"ws://127.0.0.1:{relay.port}"


def nearest(folder: Path, *urls: str, settings: LinkSettings | None = None) -> Failover:
    return Failover([open_link(folder, url, settings=settings) for url in urls], nearest=True)


def test_the_distance_is_that_of_a_round_trip(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]]
) -> None:
    (server, url), _ = clouds
    with far_away(url, 60) as far:
        assert 60 <= open_link(llama_folder, far).measure() < 110
        assert open_link(llama_folder, url).measure() < 30
    wait_until(lambda: server._guests == 0)
    assert server.counters.errors == 0


@pytest.mark.parametrize("far_first", [True, False])
def test_the_nearest_is_used_whatever_comes_first(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]], nowhere: str, far_first: bool
) -> None:
    (_, one), (_, near) = clouds
    with far_away(one) as far:
        link = nearest(llama_folder, nowhere, *((far, near) if far_first else (near, far)))
        device = Device(llama_folder, link)
        assert device.tokens() == unsplit_tokens(llama_folder)
        assert link.where.endswith(near)
        assert link.open() is True
        device.target.close()
        # In the order in which they are given it would have been the other one.
        given = failover(llama_folder, far, near)
        given.open()
        assert given.where.endswith(far)
        given.close()


def test_when_the_nearest_goes_the_next_nearest_goes_on_with_the_same_text(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]]
) -> None:
    (_, one), (_, other) = clouds
    with (
        running_server(llama_folder) as (_, third),
        relay_to(third) as near,
        far_away(one, 120) as farthest,
        far_away(other, 40) as far,
    ):
        link = nearest(llama_folder, farthest, near.url, far)
        device = Device(llama_folder, link)
        blocks = device.blocks(recovery=Recovery(LinkSettings(first_wait_s=0.01)))
        written = list(next(blocks).tokens)
        assert link.where.endswith(near.url)
        near.upstream = 9
        near.cut()
        written += [token for block in blocks for token in block.tokens]
        assert written == unsplit_tokens(llama_folder)
        assert link.where.endswith(far)
        device.target.close()


def test_one_that_never_answers_holds_nobody_up(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]]
) -> None:
    """A socket that takes connections and says nothing, as behind some firewalls."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        link = nearest(llama_folder, f"ws://127.0.0.1:{dead.getsockname()[1]}", clouds[0][1])
        started = time.monotonic()
        link.open()
        assert time.monotonic() - started < 3
        assert link.where.endswith(clouds[0][1])
        link.close()


def test_if_none_is_near_all_are_named(llama_folder: Path, nowhere: str, guarded: str) -> None:
    with pytest.raises(LinkError, match="None of the 2 clouds") as caught:
        nearest(llama_folder, guarded, nowhere).open()
    assert guarded in str(caught.value)
    assert nowhere in str(caught.value)


def test_one_that_was_silent_is_the_last_to_be_asked_again(
    llama_folder: Path, clouds: list[tuple[MiddleServer, str]]
) -> None:
    """It still answers pings, and soonest of all."""
    welcome = Welcome(fingerprint_of(llama_folder).to_json(), 512, 512)
    settings = LinkSettings(step_timeout_s=0.4, first_wait_s=0.01)
    with impostor([welcome], []) as silent, far_away(clouds[0][1]) as far:
        link = nearest(llama_folder, far, silent, settings=settings)
        device = Device(llama_folder, link)
        blocks = device.blocks(recovery=Recovery(settings))
        written = [token for block in blocks for token in block.tokens]
        assert written == unsplit_tokens(llama_folder)
        assert link.where.endswith(far)
        device.target.close()


def test_the_command_takes_the_nearest_too(
    aparte: Command, llama_folder: Path, clouds: list[tuple[MiddleServer, str]]
) -> None:
    (one, first), (two, second) = clouds
    with far_away(first) as far:
        before = one.counters.steps, two.counters.steps
        asked = ("generate", llama_folder, "the cat", "--max-new-tokens", 4, "--dtype", "float32", "--json")
        result = aparte(*asked, "--cloud", far, "--cloud", second, "--failover", "latency")
        assert result.code == 0, result.err
        assert (one.counters.steps, two.counters.steps > before[1]) == (before[0], True)
        assert result.json["text"] == aparte(*asked).json["text"]
    assert aparte(*asked, "--cloud", second, "--failover", "nearest").code == 2


def test_the_order_is_one_that_there_is() -> None:
    with pytest.raises(UserError, match="Known: order, latency"):
        LinkSettings(failover="random")
