"""The WAN emulator over real loopback sockets.

Other work on the machine can only make deliveries late, so the shortest times are asserted strictly
and the typical ones get a few attempts. ``APARTE_TESTS_TIMEOUT_FACTOR`` scales the time-outs.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from aparte.address import format_address, parse_address
from aparte.errors import UserError
from aparte.measure.wan import WanRelay
from aparte.measure.wan_link import WanProfile
from aparte.measure.wan_process import wan_process

TIMEOUT_S = 10 * float(os.environ.get("APARTE_TESTS_TIMEOUT_FACTOR", "1"))
ATTEMPTS = 4

Handler = Callable[[socket.socket], None]


@contextmanager
def serving(handler: Handler) -> Iterator[tuple[str, int]]:
    """A loopback server that runs ``handler`` on each connection in a thread and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def handle(connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, suppress(OSError):
            handler(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        listener.close()


@contextmanager
def relaying(handler: Handler, **profile: float | None) -> Iterator[socket.socket]:
    """A client connected through a relay, with real-time priority where allowed, to ``handler``."""
    with serving(handler) as server:
        relay = WanRelay(("127.0.0.1", 0), server, WanProfile(**profile))  # type: ignore[arg-type]
        thread = threading.Thread(target=relay.serve_forever, kwargs={"realtime": True}, daemon=True)
        thread.start()
        try:
            with connect(relay.address) as client:
                yield client
        finally:
            relay.stop()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def connect(address: tuple[str, int]) -> socket.socket:
    client = socket.create_connection(address, timeout=TIMEOUT_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def swallow(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, f"ended after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


def receive_all(connection: socket.socket) -> bytes:
    data = bytearray()
    while piece := connection.recv(1 << 16):
        data += piece
    return bytes(data)


def ping_ms(client: socket.socket) -> float:
    start = time.perf_counter()
    client.sendall(b"ping")
    receive(client, 4)
    return (time.perf_counter() - start) * 1e3


def stream_delays_ms(rtt_ms: float) -> list[float]:
    """How long each of fifty messages of a stream is on its way to the server."""
    departures: list[float] = []
    arrivals: list[float] = []

    def note(connection: socket.socket) -> None:
        for _ in range(50):
            receive(connection, 4)
            arrivals.append(time.perf_counter())
        connection.sendall(b"done")

    with relaying(note, rtt_ms=rtt_ms) as client:
        time.sleep(1.5 * rtt_ms / 1e3)  # past the connect
        for _ in range(50):
            departures.append(time.perf_counter())
            client.sendall(b"ping")
            time.sleep(0.002)
        receive(client, 4)
    return [(end - start) * 1e3 for start, end in zip(departures, arrivals, strict=True)]


class TestDelay:
    @pytest.mark.parametrize("rtt_ms", [0, 20, 80])
    def test_ping_pong_takes_the_round_trip(self, rtt_ms: float) -> None:
        with relaying(echo, rtt_ms=rtt_ms) as client:
            ping_ms(client)  # carries the connect's round trip too
            for _ in range(ATTEMPTS):
                pings = [ping_ms(client) for _ in range(9)]
                assert min(pings) >= rtt_ms
                if statistics.median(pings) < rtt_ms + 2:
                    break
            else:
                pytest.fail(f"median {statistics.median(pings):.2f} ms for {rtt_ms} ms")

    def test_first_bytes_pay_for_the_connect(self) -> None:
        start = time.perf_counter()
        with relaying(echo, rtt_ms=40) as client:
            ping_ms(client)
            assert 80 <= (time.perf_counter() - start) * 1e3 < 80 + 35

    def test_bytes_sent_later_than_the_connect_takes_do_not(self) -> None:
        with relaying(echo, rtt_ms=40) as client:
            time.sleep(0.06)
            assert min(ping_ms(client), ping_ms(client)) < 40 + 20

    def test_a_server_that_speaks_first_is_heard_after_two_round_trips(self) -> None:
        start = time.perf_counter()
        with relaying(lambda connection: connection.sendall(b"hello"), rtt_ms=40) as client:
            assert receive(client, 5) == b"hello"
            assert 80 <= (time.perf_counter() - start) * 1e3 < 80 + 35

    def test_a_stream_is_not_serialised(self) -> None:
        """Fifty messages, 2 ms apart, share the delay: one after the other they would take 2 s."""
        for _ in range(ATTEMPTS):
            delays_ms = stream_delays_ms(rtt_ms=80)
            assert min(delays_ms) >= 40
            if statistics.median(delays_ms) < 40 + 3:
                return
        pytest.fail(f"{delays_ms}")

    def test_jitter_adds_up_to_its_maximum(self) -> None:
        with relaying(echo, rtt_ms=10, jitter_ms=10) as client:
            ping_ms(client)
            pings = [ping_ms(client) for _ in range(20)]
        assert min(pings) >= 10
        assert 14 < statistics.median(pings) < 28  # 20 on average, of at most 30
        assert max(pings) - min(pings) > 3

    def test_jitter_keeps_the_order(self) -> None:
        sent = b"".join(number.to_bytes(2, "big") for number in range(300))
        with relaying(echo, rtt_ms=2, jitter_ms=10) as client:
            for offset in range(0, len(sent), 2):
                client.sendall(sent[offset : offset + 2])
                time.sleep(0.0002)
            assert receive(client, len(sent)) == sent


class TestBandwidth:
    @pytest.mark.parametrize(("rtt_ms", "size"), [(0, 3_000_000), (80, 5_000_000)])
    def test_a_limited_link_carries_what_was_asked(self, rtt_ms: float, size: int) -> None:
        def rate_mbps() -> float:
            with relaying(
                lambda connection: connection.sendall(bytes(size)), rtt_ms=rtt_ms, mbps=40
            ) as client:
                first = len(client.recv(1 << 16))
                start = time.perf_counter()
                receive(client, size - first)
                return (size - first) * 8 / (time.perf_counter() - start) / 1e6

        rates = []
        for _ in range(ATTEMPTS):
            rates.append(rate_mbps())
            assert rates[-1] < 40 * 1.05
            if rates[-1] > 40 * 0.95:
                return
        pytest.fail(f"{rates} Mbit/s")

    def test_a_message_pays_for_its_size(self) -> None:
        """100 kB at 40 Mbit/s take 20 ms each way, on top of the round trip."""
        with relaying(echo, rtt_ms=20, mbps=40) as client:
            ping_ms(client)
            start = time.perf_counter()
            client.sendall(bytes(100_000))
            receive(client, 100_000)
            assert 40 <= (time.perf_counter() - start) * 1e3 < 60 + 20  # the echo overlaps with the way there

    def test_an_unlimited_link_is_not_held_back_by_the_delay(self) -> None:
        size = 100_000_000
        with relaying(lambda connection: connection.sendall(bytes(size)), rtt_ms=80) as client:
            client.recv(1)
            start = time.perf_counter()
            receive(client, size - 1)
            assert time.perf_counter() - start < 2  # waiting for each megabyte would take 4 s

    def test_back_pressure_reaches_the_sender(self) -> None:
        """At 1 Mbit/s a sender that never waits must come to a stop, not fill the memory."""
        with relaying(swallow, rtt_ms=20, mbps=1) as client:
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.sendall(bytes(64 << 20))

    def test_directions_do_not_share_the_bandwidth(self) -> None:
        """Each way takes 0.4 s alone; in a shared link both together would take 0.8 s."""
        size = 2_000_000

        def both(connection: socket.socket) -> None:
            threading.Thread(target=connection.sendall, args=(bytes(size),), daemon=True).start()
            receive(connection, size)
            connection.sendall(b"done")

        with relaying(both, mbps=40) as client:
            start = time.perf_counter()
            threading.Thread(target=client.sendall, args=(bytes(size),), daemon=True).start()
            receive(client, size + 4)
            assert time.perf_counter() - start < 0.65


class TestEnds:
    def test_half_close_travels_behind_the_data(self) -> None:
        def answer_at_end(connection: socket.socket) -> None:
            connection.sendall(receive_all(connection).upper())

        start = time.perf_counter()
        with relaying(answer_at_end, rtt_ms=40) as client:
            client.sendall(b"question")
            client.shutdown(socket.SHUT_WR)
            assert receive_all(client) == b"QUESTION"
            assert time.perf_counter() - start >= 0.08

    def test_an_upstream_reset_resets_the_client(self) -> None:
        def reset(connection: socket.socket) -> None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

        with relaying(reset, rtt_ms=10) as client, pytest.raises(ConnectionResetError):
            receive_all(client)

    def test_a_client_reset_resets_the_upstream(self) -> None:
        seen: list[BaseException] = []
        done = threading.Event()

        def watch(connection: socket.socket) -> None:
            try:
                receive_all(connection)
            except OSError as error:
                seen.append(error)
            done.set()

        with relaying(watch, rtt_ms=10) as client:
            client.sendall(b"x")
            time.sleep(0.05)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            assert done.wait(TIMEOUT_S)
        assert [type(error) for error in seen] == [ConnectionResetError]

    def test_a_refused_upstream_closes_the_client(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            nobody = unused.getsockname()
        with WanRelay(("127.0.0.1", 0), nobody, WanProfile(rtt_ms=5)) as relay:
            start = time.perf_counter()
            with pytest.raises(ConnectionResetError):  # from connect() if the relay is quick
                connect(relay.address).recv(1)
            assert time.perf_counter() - start < 1

    @pytest.mark.parametrize("drop_after", [1, 10_000, 30_000])
    def test_drop_resets_after_the_count_on_both_sides(self, drop_after: int) -> None:
        received = 0
        upstream_reset = threading.Event()

        def count(connection: socket.socket) -> None:
            nonlocal received
            try:
                while data := connection.recv(1 << 16):
                    received += len(data)
            except ConnectionResetError:
                upstream_reset.set()

        with relaying(count, rtt_ms=4, drop_after=drop_after) as client:
            client.sendall(bytes(drop_after + 1000))  # all fits in the kernel's buffers
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            assert upstream_reset.wait(TIMEOUT_S)
        assert received == drop_after

    def test_drop_counts_both_directions(self) -> None:
        with relaying(echo, drop_after=10) as client:
            client.sendall(b"1234")
            assert receive(client, 4) == b"1234"
            client.sendall(b"56")  # ten are full before the echo
            with pytest.raises(ConnectionResetError):
                receive_all(client)

    def test_stop_ends_promptly_and_resets_what_is_open(self) -> None:
        with serving(echo) as server:
            relay = WanRelay(("127.0.0.1", 0), server, WanProfile(rtt_ms=100_000))
            with relay, connect(relay.address) as client:
                client.sendall(b"never arrives")
                time.sleep(0.05)
                start = time.perf_counter()
                relay.stop()
                with pytest.raises(ConnectionResetError):
                    receive(client, 1)
                assert time.perf_counter() - start < 1
            with pytest.raises(ConnectionRefusedError):
                connect(relay.address)


class TestRelay:
    def test_connections_are_independent(self) -> None:
        with serving(echo) as server, WanRelay(("127.0.0.1", 0), server, WanProfile(rtt_ms=20)) as relay:
            clients = [connect(relay.address) for _ in range(40)]
            start = time.perf_counter()
            for number, client in enumerate(clients):
                client.sendall(number.to_bytes(4, "big"))
            answers = [int.from_bytes(receive(client, 4), "big") for client in clients]
            elapsed_ms = (time.perf_counter() - start) * 1e3
            for client in clients:
                client.close()
        assert answers == list(range(40))
        assert elapsed_ms < 40 * 20 / 2

    def test_it_does_not_busy_the_processor_when_idle(self) -> None:
        with relaying(echo, rtt_ms=10) as client:
            ping_ms(client)
            before = time.process_time()
            time.sleep(0.3)
            assert time.process_time() - before < 0.1

    def test_it_tries_all_addresses_of_a_name(self) -> None:
        """``localhost`` is often IPv6 first, while the server is on IPv4 only."""
        with serving(echo) as (_, port):
            relay = WanRelay(("127.0.0.1", 0), ("localhost", port), WanProfile())
            with relay, connect(relay.address) as client:
                client.sendall(b"ping")
                assert receive(client, 4) == b"ping"

    def test_port_in_use_is_a_sentence(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(UserError, match=f"Port {port} is in use already; choose another"):
                WanRelay(("127.0.0.1", port), ("127.0.0.1", 1), WanProfile())

    @pytest.mark.parametrize("address", [("192.0.2.1", 0), ("no such host", 0)])
    def test_foreign_listening_address_is_a_sentence(self, address: tuple[str, int]) -> None:
        with pytest.raises(UserError, match="give an address of this machine"):
            WanRelay(address, ("127.0.0.1", 1), WanProfile())

    def test_unknown_upstream_host_is_a_sentence(self) -> None:
        with pytest.raises(UserError, match="'no such host' of --to is unknown"):
            WanRelay(("127.0.0.1", 0), ("no such host", 1), WanProfile())


class TestProfile:
    @pytest.mark.parametrize(
        ("setting", "sentence"),
        [
            ({"rtt_ms": -1}, "round trip of -1 ms"),
            ({"rtt_ms": math.nan}, "round trip of nan ms"),
            ({"jitter_ms": math.inf}, "jitter of inf ms"),
            ({"mbps": 0}, "bandwidth of 0 Mbit/s"),
            ({"mbps": -5}, "bandwidth of -5 Mbit/s"),
            ({"drop_after": 0}, "after 0 bytes"),
        ],
    )
    def test_impossible_links_are_refused(self, setting: dict[str, float], sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            WanProfile(**setting)  # type: ignore[arg-type]

    def test_it_reads_as_a_description(self) -> None:
        assert str(WanProfile()) == "0 ms round trip, unlimited bandwidth"
        assert str(WanProfile(80, 2.5, 40, 1000)) == (
            "80 ms round trip, up to 2.5 ms jitter each way, 40 Mbit/s each way, reset after 1000 bytes"
        )

    def test_buffers_hold_twice_the_link(self) -> None:
        assert WanProfile(rtt_ms=80, mbps=1000).buffer_bytes == 20_000_000
        assert WanProfile(rtt_ms=80, mbps=1).buffer_bytes == 1 << 20


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "address"),
        [("8765", ("127.0.0.1", 8765)), ("cloud.example:1", ("cloud.example", 1)), ("[::1]:80", ("::1", 80))],
    )
    def test_addresses_are_read_and_written(self, text: str, address: tuple[str, int]) -> None:
        assert parse_address(text) == address
        assert parse_address(format_address(address)) == address

    @pytest.mark.parametrize("text", ["", "host", "host:", "host:http", "host:65536", "host:-1"])
    def test_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(UserError, match="is not an address; give HOST:PORT"):
            parse_address(text)


class TestProcess:
    COMMAND = (sys.executable, "-c", "import typer; from aparte.cli.wan import wan; typer.run(wan)")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_the_command_relays_until_a_signal(self, number: signal.Signals) -> None:
        with serving(echo) as server:
            options = ["--json", "--to", format_address(server), "--rtt", "30", "--mbps", "50"]
            with subprocess.Popen(
                [*self.COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as child:
                assert child.stdout is not None
                assert child.stderr is not None
                said = json.loads(child.stdout.readline())
                assert (said["rtt_ms"], said["mbps"], said["drop_after"]) == (30, 50, None)
                with connect(parse_address(said["listening"])) as client:
                    ping_ms(client)
                    assert ping_ms(client) >= 30
                    child.send_signal(number)
                    assert child.wait(TIMEOUT_S) == 0
                assert child.stdout.read() == b""
                assert child.stderr.read() == b""

    def test_the_command_ends_with_its_parent(self) -> None:
        options = ["--to", "127.0.0.1:1", "--exit-with-parent", "1"]  # not this process: its parent "died"
        done = subprocess.run([*self.COMMAND, *options], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert (done.returncode, done.stderr) == (0, "")
        assert "relaying to 127.0.0.1:1: 0 ms round trip, unlimited bandwidth" in done.stdout

    def test_a_relay_in_a_process_of_its_own(self) -> None:
        pytest.importorskip("aparte.cli.app")
        profile = WanProfile(rtt_ms=20, jitter_ms=0.5, mbps=100, drop_after=100)
        with serving(echo) as server, wan_process(server, profile) as address, connect(address) as client:
            ping_ms(client)
            assert 20 <= min(ping_ms(client) for _ in range(5)) < 24
            client.sendall(bytes(60))
            with pytest.raises(ConnectionResetError):
                receive_all(client)
        with pytest.raises(ConnectionRefusedError):
            connect(address)
