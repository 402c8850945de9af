"""Several clouds: which one is asked, and what is told if none can be."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from aparte.cloud.server import MiddleServer
from aparte.config import Cut, LinkSettings, ServerLimits
from aparte.errors import DoorError, LinkError, MismatchError, UserError
from aparte.wire.failover import Failover
from dialogue import Device, open_link, unsplit_tokens, wait_until
from impostors import web_server
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
