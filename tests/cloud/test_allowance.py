"""What the holder of one token may have, and that others do not notice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from aparte.cloud import allowance
from aparte.cloud.allowance import BURST_S, LONGEST_WAIT_S, Allowances, Meter, ShareError, UsedUpError
from aparte.cloud.keys import FIRST, Key, KeyFile, Keyring, Owner
from aparte.cloud.server import MiddleServer
from aparte.config import LinkSettings, TokenLimits
from aparte.errors import LinkError, UserError
from aparte.fingerprint import Fingerprint
from aparte.model.slab import FIRST_ROWS
from aparte.step import ROOT
from aparte.wire.frames import ErrorFrame, Hello, ResultFrame, Welcome
from dialogue import Device, RawDevice, fingerprint_of, open_link, unsplit_tokens, wait_until
from running import running_server


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


ALICE = Owner("alice", b"a")
BOB = Owner("bob", b"b")


def allowances(clock: Clock, **limits: float) -> Allowances:
    """For Alice with these limits, and Bob without any."""
    keys = Keyring({"alice": Key(b"a", TokenLimits(**limits)), "bob": Key(b"b")})  # type: ignore[arg-type]
    return Allowances(keys, clock)


# -- Rates -----------------------------------------------------------------------------------------


def test_a_pause_earns_a_burst_and_no_more() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.use(BURST_S * 10, rate=10)
    assert meter.wait_s == 0
    meter.use(10, rate=10)
    assert meter.wait_s == pytest.approx(1)
    clock.now += 0.25
    assert meter.wait_s == pytest.approx(0.75)
    clock.now += 3600
    meter.use(BURST_S * 10 + 10, rate=10)
    assert meter.wait_s == pytest.approx(1)


def test_in_the_long_run_the_rate_holds() -> None:
    """Steps of any size, each as soon as it may be."""
    clock = Clock()
    shares = allowances(clock, tokens_per_second=20)
    begun, used = clock.now, 0
    for step in [1, 64, 3, 1, 1, 200, 12] * 20:
        clock.now += shares.check_step(ALICE)
        shares.use(ALICE, tokens=step)
        used += step
    clock.now += shares.check_step(ALICE)
    assert used / (clock.now - begun) == pytest.approx(20, rel=0.05)


def test_bytes_count_both_ways_and_the_scarcer_one_decides() -> None:
    clock = Clock()
    shares = allowances(clock, tokens_per_second=1000, bytes_per_second=100)
    shares.use(ALICE, tokens=1, num_bytes=300)
    shares.use(ALICE, num_bytes=400)
    assert shares.check_step(ALICE) == pytest.approx(7 - BURST_S)


def test_nobody_pays_for_others_and_no_limit_is_none() -> None:
    clock = Clock()
    shares = allowances(clock, tokens_per_second=1)
    shares.use(ALICE, tokens=30)
    shares.use(BOB, tokens=10**9, num_bytes=10**12)
    assert shares.check_step(ALICE) > 20
    assert shares.check_step(BOB) == 0
    assert shares.check_step(None) == 0
    open_door = Allowances(None, clock)
    open_door.use(ALICE, tokens=10**9)
    assert open_door.check_step(ALICE) == 0


def test_who_has_used_up_a_lot_is_told_when_to_come_again() -> None:
    clock = Clock()
    shares = allowances(clock, tokens_per_second=1)
    shares.use(ALICE, tokens=int(LONGEST_WAIT_S + BURST_S) + 30)
    with pytest.raises(UsedUpError, match="for 90 s to come") as caught:
        shares.check_step(ALICE)
    assert caught.value.retry_after_s == pytest.approx(90)
    with pytest.raises(ShareError, match="for 90 s to come"):
        shares.check_connection(ALICE)
    clock.now += 31
    shares.check_connection(ALICE)
    assert shares.check_step(ALICE) == pytest.approx(59)


def test_a_limit_that_is_lifted_is_no_longer_felt() -> None:
    clock = Clock()
    keys = Keyring({"alice": Key(b"a", TokenLimits(tokens_per_second=1))})
    shares = Allowances(keys, clock)
    shares.use(ALICE, tokens=40)
    assert shares.check_step(ALICE) > 30
    keys._keys["alice"] = Key(b"a")
    assert shares.check_step(ALICE) == 0


@pytest.mark.parametrize(
    "limits",
    [{"max_sessions": 0}, {"tokens_per_second": -1}, {"bytes_per_second": float("nan")}, {"kv_bytes": 0}],
)
def test_limits_are_positive(limits: dict[str, float]) -> None:
    with pytest.raises(UserError, match="positive"):
        TokenLimits(**limits)  # type: ignore[arg-type]


# -- At the server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fingerprint(llama_folder: Path) -> Fingerprint:
    return fingerprint_of(llama_folder)


@contextlib.contextmanager
def serving(
    folder: Path, tmp_path: Path, limits: TokenLimits
) -> Iterator[tuple[MiddleServer, str, str, str, KeyFile]]:
    """A server, its URL, a token with ``limits`` and one without, and the file that they are in."""
    keys, free = KeyFile.create(tmp_path / "tokens")
    token = keys.add("alice", limits)
    with running_server(folder, keys=KeyFile(tmp_path / "tokens")) as (server, url):
        yield server, url, token, free, keys


def greeted(url: str, fingerprint: Fingerprint, token: str, resume: str | None = None) -> RawDevice:
    device = RawDevice(url, token)
    device.send(Hello(fingerprint.to_json(), "float32", resume=resume))
    frame = device.receive()
    assert isinstance(frame, Welcome), frame
    device.welcome = frame  # type: ignore[attr-defined]
    return device


def test_a_token_has_so_many_sessions_at_a_time(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint
) -> None:
    with serving(llama_folder, tmp_path, TokenLimits(max_sessions=2)) as (server, url, token, free, _):
        one, two = greeted(url, fingerprint, token), greeted(url, fingerprint, token)
        refused = RawDevice(url, token)
        refused.send(Hello(fingerprint.to_json(), "float32"))
        told = refused.receive()
        assert isinstance(told, ErrorFrame)
        assert (told.code, told.retry_after_s) == ("busy", 5)
        assert "This token may have 2 sessions at a time" in told.message
        others = [greeted(url, fingerprint, free) for _ in range(3)]  # who have another token
        two.close()
        wait_until(lambda: server.session_count == 4)
        greeted(url, fingerprint, token).close()
        for device in (one, *others):
            device.close()
        wait_until(lambda: server.session_count == 0 and not server.cache_bytes)


def test_connections_that_do_not_greet_are_counted_at_the_door(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint
) -> None:
    with serving(llama_folder, tmp_path, TokenLimits(max_sessions=1)) as (_, url, token, free, _):
        silent = [RawDevice(url, token), RawDevice(url, token)]
        with pytest.raises(InvalidStatus) as caught:
            RawDevice(url, token)
        assert caught.value.response.status_code == 429
        assert caught.value.response.headers["Retry-After"] == "5"
        once = LinkSettings(retries=0)
        with pytest.raises(LinkError, match="says: This token may have one session at a time") as told:
            open_link(llama_folder, url, token=token, settings=once).open()
        assert told.value.retry_after_s == 5
        greeted(url, fingerprint, free).close()
        for device in silent:
            device.close()
        wait_until(lambda: _opens(url, token))


def _opens(url: str, token: str) -> bool:
    with contextlib.suppress(InvalidStatus):
        RawDevice(url, token).close()
        return True
    return False


def test_a_device_that_comes_back_takes_its_own_session_over(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint
) -> None:
    """The connection that it lost may still look alive, and counts no second time."""
    with serving(llama_folder, tmp_path, TokenLimits(max_sessions=1)) as (server, url, token, _, _):
        one = greeted(url, fingerprint, token, "")
        again = greeted(url, fingerprint, token, one.welcome.resume)  # type: ignore[attr-defined]
        assert again.welcome.resumed  # type: ignore[attr-defined]
        again.abort()
        wait_until(lambda: len(server.parking) == 1)
        other = greeted(url, fingerprint, token, "")
        late = RawDevice(url, token)
        late.send(Hello(fingerprint.to_json(), "float32", resume=one.welcome.resume))  # type: ignore[attr-defined]
        told = late.receive()
        assert isinstance(told, ErrorFrame)
        assert told.code == "busy"
        assert len(server.parking) == 1  # it waits on
        other.close()
        wait_until(lambda: server.session_count == 0)
        last = greeted(url, fingerprint, token, one.welcome.resume)  # type: ignore[attr-defined]
        assert last.welcome.resumed  # type: ignore[attr-defined]
        last.close()
        wait_until(lambda: server.cache_bytes == 0 and not len(server.parking))


def test_a_step_waits_until_its_token_may_go_on(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "BURST_S", 0.0)
    with serving(llama_folder, tmp_path, TokenLimits(tokens_per_second=50)) as (_, url, token, free, _):
        slow, quick = greeted(url, fingerprint, token), greeted(url, fingerprint, free)
        slow.step(1, ROOT, 40)
        slow.step(2, 39)
        started = time.monotonic()
        assert isinstance(slow.receive(), ResultFrame)
        assert time.monotonic() - started < 0.5
        pong = slow.connection.ping()
        assert pong.wait(0.5)  # the server goes on reading
        quick.step(1, ROOT, 200)
        assert isinstance(quick.receive(0.6), ResultFrame)
        waited = slow.receive()
        assert isinstance(waited, ResultFrame)
        assert time.monotonic() - started > 0.75
        assert waited.queue_ms > 500
        slow.close()
        quick.close()


def test_a_device_that_waits_for_its_turn_may_leave_at_once(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "BURST_S", 0.0)
    limits = TokenLimits(tokens_per_second=10)
    with serving(llama_folder, tmp_path, limits) as (server, url, token, _, _):
        device = greeted(url, fingerprint, token)
        device.step(1, ROOT, 300)
        device.receive()
        device.step(2, 299)
        device.close()
        wait_until(lambda: server.session_count == 0 and server.cache_bytes == 0, 3)


def test_use_goes_on_counting_over_connections(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint
) -> None:
    """Coming again is no way around a rate; nor is it a way to be heard sooner."""
    with serving(llama_folder, tmp_path, TokenLimits(tokens_per_second=1)) as (
        server,
        url,
        token,
        free,
        keys,
    ):
        device = greeted(url, fingerprint, token)
        device.step(1, ROOT, 200)
        assert isinstance(device.receive(), ResultFrame)
        device.step(2, 199)
        told = device.receive()
        assert isinstance(told, ErrorFrame)
        assert told.code == "limit"
        assert 150 < told.retry_after_s < 200
        assert "used up what it may use per second" in told.message
        with pytest.raises(InvalidStatus) as caught:
            RawDevice(url, token)
        assert caught.value.response.status_code == 429
        assert 150 < int(caught.value.response.headers["Retry-After"]) <= 200
        greeted(url, fingerprint, free).close()
        keys.limit("alice", TokenLimits())  # while the server runs
        wait_until(lambda: _opens(url, token), 5)
        wait_until(lambda: server.session_count == 0)


def test_an_answer_goes_on_within_its_rate(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowance, "BURST_S", 0.1)
    with serving(llama_folder, tmp_path, TokenLimits(bytes_per_second=20_000)) as (_, url, token, _, _):
        device = Device(llama_folder, open_link(llama_folder, url, token=token))
        started = time.monotonic()
        assert device.tokens() == unsplit_tokens(llama_folder)
        # 47 rows of 32 numbers of 4 bytes each way, and headers.
        assert time.monotonic() - started > 0.4
        device.target.close()


def test_a_token_has_a_share_of_the_memory(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint
) -> None:
    keys, free = KeyFile.create(tmp_path / "tokens")
    with running_server(llama_folder, keys=KeyFile(tmp_path / "tokens")) as (server, url):
        server.engine.probe()
        first = FIRST_ROWS * server.engine.row_bytes  # what a session begins with, and doubles
        token = keys.add("alice", TokenLimits(kv_bytes=2 * first - 1))
        wait_until(lambda: _opens(url, token), 5)
        other = greeted(url, fingerprint, free)
        other.step(1, ROOT, 400)
        assert isinstance(other.receive(), ResultFrame)
        held = server.cache_bytes
        idle, busy = greeted(url, fingerprint, token), greeted(url, fingerprint, token)
        idle.step(1, ROOT, 60)
        assert isinstance(idle.receive(), ResultFrame)
        busy.step(1, ROOT, 100)  # the idle one of the same token has to go
        assert isinstance(busy.receive(), ResultFrame)
        told = idle.receive()
        assert isinstance(told, ErrorFrame)
        assert told.code == "expired"
        busy.step(2, 99, 300)
        told = busy.receive()
        assert isinstance(told, ErrorFrame)
        assert told.code == "busy"
        assert told.retry_after_s == 5
        assert "This token's share" in told.message
        wait_until(lambda: server.session_count == 1)
        assert server.cache_bytes == held
        other.step(2, 399)
        assert isinstance(other.receive(), ResultFrame)
        other.close()


def test_limits_are_kept_in_the_file(tmp_path: Path) -> None:
    keys, _ = KeyFile.create(tmp_path / "tokens")
    limits = TokenLimits(max_sessions=2, tokens_per_second=0.5, bytes_per_second=2e6, kv_bytes=10**9)
    keys.add("alice", limits)
    keys.add("bob")
    again = KeyFile(tmp_path / "tokens")
    assert again.limits_of("alice") == limits
    assert again.limits_of("bob") == again.limits_of(FIRST) == again.limits_of("nobody") == TokenLimits()
    assert "sessions=2 tokens/s=0.5 bytes/s=2000000 memory=1000000000" in (tmp_path / "tokens").read_text()
    again.limit("bob", TokenLimits(max_sessions=1))
    assert keys.refresh()
    assert keys.limits_of("bob") == TokenLimits(max_sessions=1)
    with pytest.raises(UserError, match="no token called carol"):
        keys.limit("carol", TokenLimits())


@pytest.mark.parametrize(
    "limits", ["sessions=0", "sessions=x", "sessions=1 sessions=2", "speed=3", "sessions="]
)
def test_limits_that_there_are_not_are_refused(tmp_path: Path, limits: str) -> None:
    keys, _ = KeyFile.create(tmp_path / "tokens")
    text = (tmp_path / "tokens").read_text()
    (tmp_path / "tokens").write_text(f"{text.rstrip()} {limits}\n")
    with pytest.raises(UserError, match=r"Line 1 of .*limits that there are"):
        KeyFile(tmp_path / "tokens")
    assert keys.limits_of(FIRST) == TokenLimits()
