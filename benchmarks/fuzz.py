"""Send a real server messages that no device would send, while a device writes answers there.

    .venv/bin/python benchmarks/fuzz.py                              # 100,000 messages, the default model
    .venv/bin/python benchmarks/fuzz.py --model FOLDER --messages 2000 --json

Most messages are mutations of recorded ones: an answer is written first and everything that the device sends
is kept. The rest is made up by hypothesis, from the words of the protocol. The server runs as a process with
a small ``--kv-memory``. All the while a device writes one answer after the other, and each must be that of a
quiet server. The result says how the server answered, and what became of its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import queue
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clouds import Cloud, resident_bytes, say
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from aparte.answer import Writer
from aparte.config import DEFAULT_MODEL, Compute, Cut, LinkSettings, Sampling, Stopping
from aparte.device import open_writer
from aparte.measure.prompts import PROMPTS
from aparte.model.parts import Blueprint
from aparte.model.registry import resolve
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.wire.frames import ErrorFrame, Hello, decode
from aparte.wire.record import Kind, Recorder, read_recording

#: Connections that attack at the same time.
ATTACKERS = 6
#: Share of messages that hypothesis makes up.
MADE_UP = 0.1
#: Most messages on a connection that is not closed before.
BURST = 6
_NUMBERS = (b"-1", b"0", b"1", b"3", b"7", b"600", b"2047", b"9007199254740992", b"1e9", b"null", b'"7"')
_HEADERS = (b"{}", b"[]", b"null", b'{"k":"step"}', b'{"k":"error"}', b"[" * 2000, b'{"k":' * 400)


def mutate(message: bytes, rng: random.Random) -> bytes:
    """Something between the message itself and rubbish: most mutations keep the header's length true."""
    length = int.from_bytes(message[:4], "big")
    header, payload = bytearray(message[4 : 4 + length]), bytearray(message[4 + length :])
    match rng.randrange(9):
        case 0:  # another length
            return (
                rng.choice([0, 1, length - 1, length + 1, len(message), 2**16, 2**31, 2**32 - 1]).to_bytes(
                    4, "big"
                )
                + message[4:]
            )
        case 1:  # the end is missing
            return message[: rng.randrange(len(message))]
        case 2 | 3:  # another number
            numbers = list(re.finditer(rb"-?\d+", header))
            if numbers:
                span = rng.choice(numbers).span()
                header[span[0] : span[1]] = rng.choice(_NUMBERS)
        case 4:  # other characters
            for _ in range(rng.randint(1, 3)):
                header[rng.randrange(len(header))] = rng.choice(b'{}[]",:0129aceknps\x00\xff')
        case 5:  # another payload
            for _ in range(rng.randint(1, 4)):
                if payload:
                    payload[rng.randrange(len(payload))] = rng.randrange(256)
        case 6:  # a payload of another size
            del payload[rng.randrange(len(payload) + 1) :]
            payload += rng.randbytes(rng.choice([0, 4, 128]))
        case 7:  # a header of another kind
            header = bytearray(rng.choice(_HEADERS))
    return len(header).to_bytes(4, "big") + bytes(header) + bytes(payload)


def made_up() -> st.SearchStrategy[bytes]:
    """Messages from the words of the protocol, with values of every kind."""
    number = st.one_of(st.integers(-2, 40), st.integers(), st.floats(), st.none(), st.booleans())
    value = st.one_of(
        number,
        st.text(max_size=20),
        st.lists(st.integers(-2, 700), max_size=600),
        st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=4),
    )
    keys = st.sampled_from(["s", "e", "c", "b", "n", "p", "v", "model", "wire", "resume", "code", "message"])
    kind = st.sampled_from(["step", "hello", "out", "welcome", "error", "", "STEP", 7, None])
    header = st.builds(lambda k, rest: {"k": k, **rest}, kind, st.dictionaries(keys, value, max_size=7))
    text = st.one_of(header.map(lambda one: json.dumps(one).encode()), st.binary(max_size=80))
    framed = st.builds(
        lambda head, body: len(head).to_bytes(4, "big") + head + body, text, st.binary(max_size=256)
    )
    return st.one_of(framed, framed, st.binary(max_size=64))


class Attack:
    """Everything that is sent, and what came back."""

    def __init__(self, url: str, recorded: Sequence[bytes], messages: int, seed: int) -> None:
        """``recorded`` are a device's messages; the first is its greeting."""
        self.url = url
        self.hello, *self.steps = recorded
        self.left = messages
        self.sent = self.made_up = 0
        self.answers: Counter[str] = Counter()
        self._seed = seed
        self._made: queue.Queue[list[bytes]] = queue.Queue(maxsize=50)

    async def run(self) -> None:
        """All of it, from several sides at once."""
        maker = threading.Thread(target=self._make_up, daemon=True)
        maker.start()
        await asyncio.gather(*(self._side(random.Random(self._seed + side)) for side in range(ATTACKERS)))
        await asyncio.to_thread(maker.join)

    async def _side(self, rng: random.Random) -> None:
        while self.left > 0:
            if rng.random() < MADE_UP and not self._made.empty():
                made = self._made.get()
                self.made_up += len(made)
                messages = [self.hello, *made]
            elif rng.random() < 0.2:
                messages = [mutate(self.hello, rng)]
            else:
                start = rng.randrange(max(1, len(self.steps) - BURST))
                real = self.steps[: rng.choice([0, 1, 2])] or self.steps[start : start + 1]
                bad = [mutate(rng.choice(self.steps), rng) for _ in range(rng.randint(1, BURST))]
                messages = [self.hello, *real, *bad]
            self.left -= len(messages)
            await self._talk(messages, rng)

    async def _talk(self, messages: Sequence[bytes], rng: random.Random) -> None:
        try:
            async with connect(self.url, compression=None, proxy=None, close_timeout=1) as connection:
                with contextlib.suppress(ConnectionClosed):
                    for message in (*messages, b"the end"):
                        await connection.send(message)
                        self.sent += 1
                if rng.random() < 0.1:  # goes away in the middle of it
                    connection.transport.abort()
                with contextlib.suppress(ConnectionClosed):
                    while True:
                        self._note(await asyncio.wait_for(connection.recv(decode=False), 60))
        except InvalidStatus as error:
            self.answers[f"HTTP {error.response.status_code}"] += 1
        except (ConnectionClosed, ConnectionError):
            self.answers["closed"] += 1

    def _note(self, answer: bytes) -> None:
        frame = decode(answer)
        self.answers[frame.code if isinstance(frame, ErrorFrame) else type(frame).__name__] += 1

    def _make_up(self) -> None:
        """Hypothesis calls back with what it makes up, over and over with other seeds."""
        for number in itertools.count(self._seed):

            @seed(number)
            @settings(max_examples=50, database=None, deadline=None, suppress_health_check=list(HealthCheck))
            @given(st.lists(made_up(), min_size=1, max_size=BURST))
            def hand_over(messages: list[bytes]) -> None:
                while self.left > 0:
                    with contextlib.suppress(queue.Full):
                        self._made.put(messages, timeout=0.1)
                        break

            hand_over()
            if self.left <= 0:
                return


class Bystander(threading.Thread):
    """Writes one answer after the other; every one must be that of a quiet server."""

    def __init__(self, writer: Writer, most_tokens: int) -> None:
        super().__init__(daemon=True)
        self._writer = writer
        self._most_tokens = most_tokens
        self._expected = [self._write(number) for number in range(4)]
        self._over = threading.Event()
        self.answers = self.identical = 0
        self.failure = ""

    def _write(self, number: int) -> list[int]:
        self._writer.forget()
        text = PROMPTS[number % len(PROMPTS)]
        return self._writer.complete(
            self._writer.codec.encode_chat([{"role": "user", "content": text}]),
            make_drafter(Decoding("auto")),
            sampling=Sampling(0.8 * (number % 2), seed=number),
            decoding=Decoding("auto"),
            stopping=Stopping(self._most_tokens),
        ).token_ids

    def run(self) -> None:
        try:
            while not self._over.is_set():
                number = self.answers % len(self._expected)
                self.identical += self._write(number) == self._expected[number]
                self.answers += 1
        except Exception as error:
            self.failure = str(error)

    def finish(self) -> None:
        self._over.set()
        self.join()


class Watch(threading.Thread):
    """Looks at the server's memory all the while."""

    def __init__(self, cloud: Cloud, every_s: float = 0.5) -> None:
        super().__init__(daemon=True)
        self._cloud = cloud
        self._every_s = every_s
        self._over = threading.Event()
        self.resident: list[int] = []

    def run(self) -> None:
        while not self._over.wait(self._every_s) and self._cloud.is_alive:
            with contextlib.suppress(OSError):
                self.resident.append(resident_bytes(self._cloud.pid))

    def finish(self) -> None:
        self._over.set()
        self.join()


def record(folder: Path, options: argparse.Namespace, url: str) -> list[bytes]:
    """The messages of a device that writes an answer."""
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Recorder(Path(scratch) / "recording")
        writer = open_writer(
            Blueprint.open(folder, Compute(options.dtype)), options.model, Cut(), cloud=url, record=recorder
        )
        prompt = writer.codec.encode_chat([{"role": "user", "content": PROMPTS[0]}])
        writer.complete(
            prompt,
            make_drafter(Decoding("auto")),
            sampling=Sampling(),
            decoding=Decoding("auto"),
            stopping=Stopping(24),
        )
        writer.target.close()
        recorder.close()
        messages = read_recording(Path(scratch) / "recording").messages
        up = [bytes(message.data) for message in messages if message.kind is Kind.UP]
    assert isinstance(decode(up[0]), Hello)
    return up


def measure(options: argparse.Namespace, cloud: Cloud) -> dict[str, Any]:
    folder = resolve(options.model)
    recorded = record(folder, options, cloud.url)
    writer = open_writer(
        Blueprint.open(folder, Compute(options.dtype)),
        options.model,
        Cut(),
        cloud=cloud.url,
        wire="float32",
        settings=LinkSettings(retries=0),
    )
    bystander = Bystander(writer, options.max_new_tokens)
    attack, watch = Attack(cloud.url, recorded, options.messages, options.seed), Watch(cloud)
    started = time.monotonic()
    bystander.start()
    watch.start()
    with progress(attack):
        asyncio.run(attack.run())
    seconds = time.monotonic() - started
    bystander.finish()
    watch.finish()
    writer.target.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        after = cloud.status()
        if not after["sessions"]["connected"] and not after["memory"]["kv_bytes"]:
            break
        time.sleep(0.1)
    settled = watch.resident[len(watch.resident) // 5 :] or [0]
    return {
        "messages": attack.sent,
        "made_up": attack.made_up,
        "seconds": round(seconds, 1),
        "answers": dict(attack.answers.most_common()),
        "internal_errors": after["errors"].get("internal", 0),
        "alive": cloud.is_alive,
        "other_session": {
            "answers": bystander.answers,
            "identical": bystander.identical,
            "failure": bystander.failure,
        },
        "sessions_left": after["sessions"]["connected"] + after["sessions"]["parked"],
        "kv_bytes": {
            "budget": after["memory"]["kv_budget_bytes"],
            "most": after["memory"]["kv_peak_bytes"],
            "after": after["memory"]["kv_bytes"],
        },
        "resident_mb": {
            "after_a_fifth": round(settled[0] / 1e6, 1),
            "most": round(max(settled) / 1e6, 1),
            "end": round(settled[-1] / 1e6, 1),
        },
    }


def passed(report: dict[str, Any]) -> bool:
    """Whether nothing went wrong."""
    other, kv = report["other_session"], report["kv_bytes"]
    return bool(
        report["alive"]
        and not report["internal_errors"]
        and not other["failure"]
        and other["answers"] == other["identical"] > 0
        and not report["sessions_left"]
        and kv["after"] == 0
        and kv["most"] <= kv["budget"]
        # What 64 sessions' messages may take at a time, over what it took after the first fifth.
        and report["resident_mb"]["most"] <= 1.1 * report["resident_mb"]["after_a_fifth"] + 64
    )


@contextlib.contextmanager
def progress(attack: Attack) -> Iterator[None]:
    over = threading.Event()

    def tell() -> None:
        while not over.wait(10):
            say(f"{attack.sent} messages, {attack.left} left")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--max-new-tokens", type=int, default=24, help="per answer of the other session")
    parser.add_argument("--kv-memory", default="200MB")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cloud = Cloud(options.model, options.dtype, "--kv-memory", options.kv_memory, "--grace", "1")
    cloud.wait_until_ready()
    try:
        report = measure(options, cloud)
    finally:
        cloud.kill()
    print(json.dumps(report, indent=None if options.json else 1))
    sys.exit(not passed(report))


if __name__ == "__main__":
    main()
