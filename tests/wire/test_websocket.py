"""The device's way to its cloud: every door that stays shut, and every way a connection can end."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from websockets.protocol import State
from websockets.sync.server import ServerConnection

from aparte.cloud.door import tls_context
from aparte.cloud.server import MiddleServer
from aparte.config import Cut, LinkSettings, ServerLimits
from aparte.errors import (
    AparteError,
    DoorError,
    FrameError,
    LinkError,
    MismatchError,
    UserError,
    WireOverflowError,
)
from aparte.fingerprint import Fingerprint
from aparte.wire.frames import ErrorFrame, Frame, Hello, ResultFrame, Welcome, decode, encode
from aparte.wire.websocket import WebSocketLink
from certificates import make_certificate
from dialogue import (
    NO_ANSWER,
    NO_GREETING,
    PROMPT,
    Device,
    fingerprint_of,
    open_link,
    unsplit_tokens,
    wait_until,
)
from impostors import impostor, web_server
from relay import relay_to
from running import running_server
from tiny import save_tiny

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def cloud(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    with running_server(llama_folder) as (server, url):
        yield server, url


@pytest.fixture(scope="module")
def url(cloud: tuple[MiddleServer, str]) -> str:
    return cloud[1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_url(llama_folder: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
    with running_server(llama_folder, tls=tls_context(*certificate)) as (_, url):
        yield url


@contextlib.contextmanager
def listening(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that does ``behave`` with every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    behave(connections[-1])

        threading.Thread(target=accept, daemon=True).start()
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


def failure_of(link: WebSocketLink) -> AparteError:
    """The error that opening ``link`` ends with; nothing may stay open behind it."""
    with pytest.raises(AparteError) as caught:
        link.open()
    with pytest.raises(LinkError, match="not connected"):
        link.receive()
    return caught.value


# -- Nobody there, or somebody else ----------------------------------------------------------------


def test_nothing_listens(llama_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = failure_of(open_link(llama_folder, f"ws://127.0.0.1:{port}"))
    assert isinstance(error, LinkError)
    assert f"The cloud at ws://127.0.0.1:{port} cannot be reached" in str(error)
    assert "aparte serve" in str(error)


def test_the_host_is_unknown(llama_folder: Path) -> None:
    error = failure_of(open_link(llama_folder, "ws://no-such-host.invalid:7600"))
    assert isinstance(error, LinkError)
    assert "cannot be reached" in str(error)


@pytest.mark.parametrize(
    ("version", "told"), [("HTTP/1.1", "answered with HTTP status 404"), ("HTTP/1.0", "does not speak")]
)
def test_a_plain_web_server(llama_folder: Path, version: str, told: str) -> None:
    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = version

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = failure_of(open_link(llama_folder, f"ws://127.0.0.1:{server.server_port}/nothing-here"))
        server.shutdown()
    assert isinstance(error, LinkError)
    assert told in str(error)
    assert "is it `aparte serve`?" in str(error)


@pytest.mark.parametrize(
    "behave",
    [
        pytest.param(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n\r\n"), id="ssh"),
        pytest.param(lambda connection: connection.sendall(b"\x1b]0;owned\x07\r\n\r\n"), id="escape codes"),
        pytest.param(lambda connection: connection.close(), id="hangs up"),
    ],
)
def test_something_else_listens(llama_folder: Path, behave: Callable[[socket.socket], None]) -> None:
    with listening(behave) as url:
        error = failure_of(open_link(llama_folder, url, settings=NO_GREETING))
    assert isinstance(error, LinkError)
    assert str(error).isprintable()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:7600",
        "127.0.0.1:7600",
        "ws:///path",
        "",
        "ws://[::1",
        "ws://127.0.0.1:99999",
        "ws://127.0.0.1:port",
        "ws://127.0.0.1:7600/#part",
    ],
)
def test_an_address_that_is_none_is_a_users_mistake(llama_folder: Path, url: str) -> None:
    with pytest.raises(UserError, match=r"not a cloud's address\. It looks like ws://127"):
        open_link(llama_folder, url)


# -- Silence ---------------------------------------------------------------------------------------


def assert_took(seconds: float, started: float) -> None:
    """A timeout that is kept, give or take a busy machine and the closing handshake."""
    assert seconds * 0.9 <= time.monotonic() - started < seconds + 2.5


def test_a_server_that_accepts_and_says_nothing(llama_folder: Path) -> None:
    with listening(lambda connection: None) as url:
        started = time.monotonic()
        error = failure_of(open_link(llama_folder, url, settings=NO_GREETING))
        assert_took(NO_GREETING.connect_timeout_s, started)
    assert isinstance(error, LinkError)
    assert "did not answer within 0.4 s" in str(error)


def test_a_server_that_does_not_answer_the_greeting(llama_folder: Path) -> None:
    received: list[bytes] = []
    with impostor([], received) as url:
        started = time.monotonic()
        error = failure_of(open_link(llama_folder, url, settings=NO_GREETING))
        assert_took(NO_GREETING.connect_timeout_s, started)
    assert isinstance(error, LinkError)
    assert "did not answer within 0.4 s" in str(error)
    assert [type(decode(message)) for message in received] == [Hello]


def test_a_server_that_does_not_answer_a_step(llama_folder: Path) -> None:
    received: list[bytes] = []
    with impostor([welcome(llama_folder)], received) as url:
        device = Device(llama_folder, open_link(llama_folder, url, settings=NO_ANSWER))
        started = time.monotonic()
        with pytest.raises(LinkError, match=rf"{url} did not answer step 1 within 0\.4 s"):
            device.tokens()
        assert_took(NO_ANSWER.step_timeout_s, started)
    assert len(received) == 2


def test_a_server_that_reads_no_more(llama_folder: Path, url: str) -> None:
    """A send that the kernel cannot take is given up in time, too."""
    with relay_to(url) as relay:
        link = open_link(llama_folder, relay.url, settings=NO_ANSWER)
        link.open()
        relay.stall()
        started = time.monotonic()
        with pytest.raises(LinkError, match=r"took nothing for 0\.4 s"):
            link.send(bytes(100 << 20))  # more than all buffers on the way hold
        assert_took(NO_ANSWER.step_timeout_s, started)
        link.close()


def test_an_idle_link_outlives_the_timeout_of_a_step(llama_folder: Path, url: str) -> None:
    link = open_link(llama_folder, url, settings=LinkSettings(step_timeout_s=1))
    device = Device(llama_folder, link)
    assert device.tokens() == unsplit_tokens(llama_folder)
    time.sleep(1.5)
    assert link.open()
    assert device.tokens() == unsplit_tokens(llama_folder)
    link.close()


# -- The token -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(llama_folder: Path) -> Iterator[tuple[MiddleServer, str]]:
    with running_server(llama_folder, token=TOKEN) as (server, url):
        yield server, url


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_without_the_right_token_the_door_stays_shut(
    llama_folder: Path, guarded: tuple[MiddleServer, str], token: str | None
) -> None:
    server, url = guarded
    before = server.counters.sessions_opened
    with relay_to(url) as relay:
        error = failure_of(open_link(llama_folder, relay.url, token=token))
        assert relay.recording.messages_up == []
    assert isinstance(error, DoorError)
    assert "refused the token" in str(error)
    assert "--token-file" in str(error)
    assert TOKEN not in str(error)
    assert server.counters.sessions_opened == before


def test_with_the_right_token_it_opens(llama_folder: Path, guarded: tuple[MiddleServer, str]) -> None:
    link = open_link(llama_folder, guarded[1], token=TOKEN)
    assert Device(llama_folder, link).tokens() == unsplit_tokens(llama_folder)
    link.close()


@pytest.mark.parametrize("token", ["two\r\nX-Header: 1", "schlüssel", "tab\tbed"])
def test_a_token_that_does_not_fit_a_header_is_a_users_mistake(llama_folder: Path, token: str) -> None:
    with pytest.raises(UserError, match="printable ASCII"):
        open_link(llama_folder, "ws://127.0.0.1:7600", token=token)


# -- TLS -------------------------------------------------------------------------------------------


def test_tokens_through_tls(llama_folder: Path, tls_url: str, certificate: tuple[Path, Path]) -> None:
    link = open_link(llama_folder, tls_url, ca_file=certificate[0])
    device = Device(llama_folder, link)
    assert device.tokens() == unsplit_tokens(llama_folder)
    long_prompt = PROMPT * 8  # messages of several TLS records
    assert device.tokens(long_prompt) == unsplit_tokens(llama_folder, long_prompt)
    link.close()


def test_a_certificate_that_nobody_vouches_for(llama_folder: Path, tls_url: str) -> None:
    error = failure_of(open_link(llama_folder, tls_url))
    assert isinstance(error, DoorError)
    assert "could not be checked" in str(error)
    assert "--tls-ca" in str(error)


def test_another_authority_than_the_one_that_signed(llama_folder: Path, tls_url: str, tmp_path: Path) -> None:
    other, _ = make_certificate(tmp_path)
    assert isinstance(failure_of(open_link(llama_folder, tls_url, ca_file=other)), DoorError)


def test_a_certificate_for_another_host(llama_folder: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "192.0.2.1")
    with running_server(llama_folder, tls=tls_context(certificate, key)) as (_, url):
        error = failure_of(open_link(llama_folder, url, ca_file=certificate))
    assert isinstance(error, DoorError)
    assert "127.0.0.1" in str(error)


def test_tls_spoken_to_a_server_without_it(llama_folder: Path, url: str) -> None:
    error = failure_of(open_link(llama_folder, url.replace("ws://", "wss://")))
    assert isinstance(error, DoorError)
    assert "begins with ws://" in str(error)


def test_no_tls_spoken_to_a_server_with_it(llama_folder: Path, tls_url: str) -> None:
    assert isinstance(failure_of(open_link(llama_folder, tls_url.replace("wss://", "ws://"))), LinkError)


def test_an_authority_is_of_no_use_without_tls(llama_folder: Path, certificate: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="Use wss://"):
        open_link(llama_folder, "ws://127.0.0.1:7600", ca_file=certificate[0])


@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_an_authority_that_cannot_be_read(llama_folder: Path, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"ca\.pem is not a readable PEM certificate"):
        open_link(llama_folder, "wss://127.0.0.1:7600", ca_file=file)


# -- Another model on the other side ---------------------------------------------------------------


def welcome(folder: Path, cut: Cut | None = None, name: str = "tiny") -> Welcome:
    return Welcome(fingerprint_of(folder, cut, name).to_json(), 512, 512)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("other"), seed=1)


MISMATCHES = ["weights", "architecture", "cut"]


@pytest.fixture(params=MISMATCHES)
def mismatch(
    request: pytest.FixtureRequest, tiny_folders: dict[str, Path], other_weights: Path
) -> tuple[Path, Cut, str]:
    """Folder and cut of a device that does not fit a llama with cut 2,2, and what it should be told."""
    return {
        "weights": (other_weights, Cut(2, 2), "same architecture, different weights"),
        "architecture": (tiny_folders["qwen2"], Cut(2, 2), "different architectures"),
        "cut": (tiny_folders["llama"], Cut(1, 3), "2,2.*1,3|1,3.*2,2"),
    }[request.param]


def test_the_cloud_refuses_a_device_with_another_model(
    cloud: tuple[MiddleServer, str], mismatch: tuple[Path, Cut, str]
) -> None:
    server, url = cloud
    folder, cut, told = mismatch
    before = server.counters.steps
    with relay_to(url) as relay:
        device = Device(folder, open_link(folder, relay.url, cut=cut, name="the device's"), cut=cut)
        with pytest.raises(MismatchError, match=told) as caught:
            device.tokens()
        sent = [type(decode(message)) for message in relay.recording.messages_up]
    assert sent == [Hello], "something besides the greeting was sent"
    assert server.counters.steps == before
    assert "tiny" in str(caught.value)
    if cut == Cut(2, 2):
        assert "the device's" in str(caught.value)


def test_the_device_refuses_a_cloud_with_another_model(
    llama_folder: Path, mismatch: tuple[Path, Cut, str]
) -> None:
    """A cloud that lets everybody in learns nothing either."""
    folder, cut, told = mismatch
    received: list[bytes] = []
    with impostor([welcome(llama_folder, name="the cloud's")], received) as url:
        device = Device(folder, open_link(folder, url, cut=cut), cut=cut)
        with pytest.raises(MismatchError, match=told) as caught:
            device.tokens()
    assert [type(decode(message)) for message in received] == [Hello]
    assert "tiny" in str(caught.value)
    if cut == Cut(2, 2):
        assert "the cloud's" in str(caught.value)


def test_another_version_of_the_protocol(llama_folder: Path) -> None:
    later = Welcome(fingerprint_of(llama_folder).to_json(), 512, 512, version=2)
    with impostor([later], []) as url:
        error = failure_of(open_link(llama_folder, url))
    assert isinstance(error, MismatchError)
    assert "speaks protocol 2, this device 1. Install the same version" in str(error)


@pytest.mark.parametrize("answer", [ResultFrame(1, 1.0, 0.0, b""), b"garbage", Hello({}, "float32")])
def test_an_answer_that_is_no_greeting(llama_folder: Path, answer: Frame | bytes) -> None:
    with impostor([answer], []) as url:
        assert isinstance(failure_of(open_link(llama_folder, url)), FrameError)


def test_a_cloud_without_a_fingerprint(llama_folder: Path) -> None:
    with impostor([Welcome({"name": "x"}, 512, 512)], []) as url:
        assert isinstance(failure_of(open_link(llama_folder, url)), MismatchError)


def test_a_cloud_cannot_write_to_the_terminal_through_its_name(llama_folder: Path) -> None:
    ours = fingerprint_of(llama_folder)
    theirs = Fingerprint("\x1b[31mred", ours.cut, ours.config, "0" * 32)
    with impostor([Welcome(theirs.to_json(), 512, 512)], []) as url:
        error = failure_of(open_link(llama_folder, url))
    assert isinstance(error, MismatchError)
    assert str(error).isprintable()


def test_the_nodes_per_step_are_what_the_cloud_allows(llama_folder: Path) -> None:
    limits = ServerLimits(max_nodes_per_step=16)
    with running_server(llama_folder, limits=limits) as (_, url):
        link = open_link(llama_folder, url)
        link.open()
        assert link.max_nodes == 16
        assert Device(llama_folder, link).tokens() == unsplit_tokens(llama_folder)
        link.close()


def test_the_device_learns_what_the_cloud_computes_with(llama_folder: Path, url: str) -> None:
    link = open_link(llama_folder, url)
    link.open()
    assert link.cloud_dtype == "float32"
    link.close()


@pytest.mark.parametrize(
    ("url", "protected"),
    [
        ("ws://127.0.0.1:7600", True),
        ("ws://localhost:7600", True),
        ("ws://[::1]:7600", True),
        ("wss://example.org", True),
        ("ws://example.org", False),
        ("ws://192.168.1.5:7600", False),
    ],
)
def test_a_way_is_protected_if_it_is_encrypted_or_leaves_no_machine(
    llama_folder: Path, url: str, protected: bool
) -> None:
    assert open_link(llama_folder, url).is_protected is protected


# -- Gone in the middle ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cut", "shut down"])
def test_a_cloud_that_goes_away_and_comes_back(llama_folder: Path, end: str) -> None:
    """What was yielded before is valid; the next answer connects and prefills again."""
    truth = unsplit_tokens(llama_folder)
    first = contextlib.ExitStack()
    _, url = first.enter_context(running_server(llama_folder))
    with first, relay_to(url) as relay:
        device = Device(llama_folder, open_link(llama_folder, relay.url))
        blocks = device.blocks()
        pieces = [token for _ in range(3) for token in next(blocks).tokens]
        if end == "shut down":
            first.close()
        else:
            relay.cut()
        with pytest.raises(LinkError, match=f"The cloud at {relay.url} went away"):
            pieces += [token for block in blocks for token in block.tokens]
        assert pieces == truth[: len(pieces)]
        assert 3 <= len(pieces) < len(truth)
        assert device.session.tokens == []

        with running_server(llama_folder) as (server, url):
            relay.upstream = int(url.rpartition(":")[2])
            assert device.tokens() == truth
            assert server.counters.steps == len(truth)
            device.target.close()


def test_a_cloud_that_dies_while_the_prompt_is_sent(llama_folder: Path, url: str) -> None:
    prompt = PROMPT * 8
    with relay_to(url) as relay:
        device = Device(llama_folder, open_link(llama_folder, relay.url))
        blocks = device.blocks(prompt, chunk=16, on_prefill=lambda done, total: relay.cut())
        with pytest.raises(LinkError, match="went away"):
            list(blocks)
        assert device.tokens(prompt, chunk=16) == unsplit_tokens(llama_folder, prompt)
        device.target.close()


def test_an_open_link_keeps_its_session(llama_folder: Path, cloud: tuple[MiddleServer, str]) -> None:
    server, url = cloud
    with relay_to(url) as relay:
        link = open_link(llama_folder, relay.url)
        assert link.open() is False
        assert link.open() is True
        link.close()
        link.close()
        assert link.open() is False
        assert len(relay.recordings) == 2
        link.close()
    wait_until(lambda: server.session_count == 0)


def test_a_link_that_the_cloud_closed_while_idle_opens_again(llama_folder: Path) -> None:
    with running_server(llama_folder, limits=ServerLimits(idle_s=0.2)) as (server, url):
        device = Device(llama_folder, open_link(llama_folder, url))
        truth = unsplit_tokens(llama_folder)
        assert device.tokens() == truth
        wait_until(lambda: server.session_count == 0)
        time.sleep(0.1)  # until the device has read it
        assert device.target.open() is False
        device.session.clear()
        assert device.tokens() == truth
        device.target.close()


def test_what_the_cloud_said_last_is_told_even_if_a_send_fails_first(llama_folder: Path) -> None:
    received: list[bytes] = []

    def handle(connection: ServerConnection) -> None:
        received.append(connection.recv(decode=False))
        connection.send(encode(welcome(llama_folder)))
        connection.send(encode(ErrorFrame("overflow", "Too large. Use --wire bfloat16.")))

    with web_server(handle) as url:
        link = open_link(llama_folder, url)
        link.open()
        connection = link._socket
        assert connection is not None
        wait_until(lambda: connection.protocol.state is State.CLOSED)
        with pytest.raises(WireOverflowError, match="Use --wire bfloat16"):
            link.send(b"a step")
        link.close()


def test_a_closing_reason_is_told_without_control_characters(llama_folder: Path) -> None:
    def handle(connection: ServerConnection) -> None:
        connection.recv()
        connection.close(1011, "no \x1b[1mmemory")

    with web_server(handle) as url:
        error = failure_of(open_link(llama_folder, url))
    assert isinstance(error, LinkError)
    assert str(error) == f"The cloud at {url} went away (no ?[1mmemory)."


@pytest.mark.parametrize(("asked", "kept"), [(3.0, 3.0), (900_000.0, 10.0), (0.0, 0.0)])
def test_a_cloud_may_ask_to_be_left_alone_for_a_while_and_not_for_ever(
    llama_folder: Path, asked: float, kept: float
) -> None:
    with impostor([ErrorFrame("busy", "All sessions are taken.", asked)], []) as url:
        error = failure_of(open_link(llama_folder, url))
    assert isinstance(error, LinkError)
    assert error.retry_after_s == kept


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        pytest.param(ResultFrame(99, 1.0, 0.0, b"\0" * 40 * 32 * 4), FrameError, id="another step"),
        pytest.param(ResultFrame(1, 1.0, 0.0, b"\0" * 40 * 32 * 4 + b"\0"), FrameError, id="too long"),
        pytest.param(ResultFrame(1, 1.0, 0.0, b""), FrameError, id="too short"),
        pytest.param(ResultFrame(1, 1.0, 0.0, b"\xff" * 40 * 32 * 4), FrameError, id="not numbers"),
        pytest.param(b"garbage", FrameError, id="garbage"),
        pytest.param(ErrorFrame("internal", "The server failed."), LinkError, id="an error"),
        pytest.param(bytes(4096 * 32 * 4 + 65_537), LinkError, id="larger than anything asked for"),
    ],
)
def test_an_answer_that_lies_is_an_error(
    llama_folder: Path, answer: Frame | bytes, kind: type[AparteError]
) -> None:
    with impostor([welcome(llama_folder), answer], []) as url:
        device = Device(llama_folder, open_link(llama_folder, url))
        with pytest.raises(kind):
            device.tokens()
        with pytest.raises(LinkError, match="not connected"):
            device.target._link.receive()  # type: ignore[attr-defined]
