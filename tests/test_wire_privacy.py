"""What a private session puts on the wire: every byte of it, recorded between device and cloud.

The hidden states themselves are another matter: docs/privacy.md says what can be read from them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from aparte.answer import Writer
from aparte.config import Sampling, Stopping
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import Drafter, Nothing, make_drafter
from aparte.speculate.settings import Decoding
from aparte.text.tokenizer import Codec
from aparte.wire.frames import Hello, StepFrame, Welcome, decode
from aparte.wire.tensors import WIRE_DTYPES
from dialogue import Device, fingerprint_of, one_thread, open_link
from relay import Recording, relay_to, websocket_frames
from running import FLOAT32, running_server
from tiny import save_tiny

SECRET = "the quick brown Xylophon-4711 jumps over Zürich and no word of it may be seen"
WIDTH = 32
NEW_TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def url(llama_folder: Path) -> Iterator[str]:
    with running_server(llama_folder) as (_, url):
        yield url


@dataclass
class Session:
    """What was said, and what was recorded of it."""

    prompt: list[int]
    answer: list[int]
    recording: Recording

    @property
    def steps(self) -> list[StepFrame]:
        return [frame for frame in map(decode, self.recording.messages_up) if isinstance(frame, StepFrame)]


def record(
    folder: Path,
    url: str,
    prompt: Sequence[int],
    *,
    wire: str = "float32",
    drafter: Drafter | None = None,
    chunk: int = 16,
    new_tokens: int = NEW_TOKENS,
) -> Session:
    """One answer, from the first byte of the connection to the last."""
    with relay_to(url) as relay:
        device = Device(folder, open_link(folder, relay.url, wire=wire), wire=wire)
        blocks = device.blocks(prompt, new_tokens, drafter, chunk)
        answer = [token for block in blocks for token in block.tokens]
        device.target.close()
        return Session(list(prompt), answer, relay.recording)


def header_bytes(message: bytes) -> bytes:
    return message[4 : 4 + int.from_bytes(message[:4], "big")]


def spellings_of_text(text: str) -> Iterator[bytes]:
    """Ways in which ``text`` or a word of it could be written; none is so short that chance would do it."""
    for part in {text, *text.split()}:
        if len(part) < 5:
            continue
        yield json.dumps(part).encode()
        for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
            data = part.encode(encoding)
            yield data
            yield data.hex().encode()
            for shift in range(3):  # inside of something longer, at any alignment
                encoded = base64.b64encode(bytes(shift) + data)[4:-4]
                if len(encoded) >= 8:
                    yield encoded


def spellings_of_tokens(tokens: Sequence[int]) -> Iterator[bytes]:
    """Ways in which three or more token ids in a row could be written."""
    for start in range(len(tokens) - 2):
        run = tokens[start : start + 3]
        for separator in (",", ", ", " ", "\n"):
            yield separator.join(map(str, run)).encode()
        for kind in ("<i2", ">i2", "<i4", ">i4", "<i8", ">i8", "<f4"):
            yield np.array(run, dtype=kind).tobytes()


@pytest.mark.parametrize("decoding", ["sequential", "jacobi", "lookahead"])
@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_neither_text_nor_token_ids_are_on_the_wire(
    llama_folder: Path, url: str, decoding: str, wire: str
) -> None:
    codec = Codec(llama_folder)
    drafter = make_drafter(Decoding(decoding))  # type: ignore[arg-type]
    session = record(llama_folder, url, codec.encode(SECRET), wire=wire, drafter=drafter)
    text = codec.decode(session.answer)
    # As TCP carried it, and with the mask taken off that WebSocket puts over what a client sends.
    streams = [
        bytes(session.recording.up),
        bytes(session.recording.down),
        b"".join(data for _, data in websocket_frames(bytes(session.recording.up))),
    ]
    assert all(len(stream) > 1000 for stream in streams)
    for spelling in (
        *spellings_of_text(SECRET),
        *spellings_of_text(text),
        *spellings_of_tokens(session.prompt),
        *spellings_of_tokens(session.answer),
    ):
        assert not any(spelling in stream for stream in streams), spelling


def test_the_search_finds_what_is_there(llama_folder: Path) -> None:
    tokens = Codec(llama_folder).encode(SECRET)
    for leak in (SECRET.encode(), base64.b64encode(b"So: " + SECRET.encode()), SECRET.encode("utf-16")):
        assert any(spelling in leak for spelling in spellings_of_text(SECRET))
    for leak in (json.dumps(tokens).encode(), np.array(tokens, dtype="<i2").tobytes()):
        assert any(spelling in leak for spelling in spellings_of_tokens(tokens))


def without_times(message: bytes) -> bytes:
    """A header from the cloud without times, and without its random name of the session."""
    return re.sub(rb',"((ms|q)":[0-9.e-]+|resume":"[\w-]+")', b"", header_bytes(message))


def test_nothing_but_hidden_states_depends_on_the_tokens(llama_folder: Path, url: str) -> None:
    """Two prompts of one length: the same messages, the same sizes, the same headers but for the times."""
    one = record(llama_folder, url, list(range(10, 60)))
    two = record(llama_folder, url, list(range(259, 209, -1)))
    assert one.answer != two.answer
    up_one, up_two = one.recording.messages_up, two.recording.messages_up
    down_one, down_two = one.recording.messages_down, two.recording.messages_down
    assert [header_bytes(message) for message in up_one] == [header_bytes(message) for message in up_two]
    assert [len(message) for message in up_one] == [len(message) for message in up_two]
    assert [without_times(message) for message in down_one] == [
        without_times(message) for message in down_two
    ]
    payloads = [(a.payload, b.payload) for a, b in zip(one.steps, two.steps, strict=True)]
    assert all(a != b for a, b in payloads)
    # Below the messages: the handshake is the same but for its random key, and nothing else is sent.
    assert opcodes(one.recording.up) == opcodes(two.recording.up) == [2] * len(up_one) + [8]
    assert opcodes(one.recording.down) == opcodes(two.recording.down) == [2] * len(down_one) + [8]
    assert handshake(one.recording.up) == handshake(two.recording.up)
    assert handshake(one.recording.down) == handshake(two.recording.down)


def opcodes(stream: bytearray) -> list[int]:
    return [opcode for opcode, _ in websocket_frames(bytes(stream))]


def handshake(stream: bytearray) -> bytes:
    """The HTTP head without what differs from connection to connection."""
    head, _, _ = bytes(stream).partition(b"\r\n\r\n")
    return re.sub(rb"(?im)^(Sec-WebSocket-(Key|Accept)|Host|Date): .*$", b"", head)


@pytest.mark.parametrize("wire", WIRE_DTYPES)
def test_a_message_is_a_length_a_header_and_hidden_states(llama_folder: Path, url: str, wire: str) -> None:
    """So there are no masks, cosines, sines or positions: there is no room for them."""
    session = record(llama_folder, url, list(range(10, 60)), wire=wire, drafter=make_drafter(Decoding()))
    itemsize = WIRE_DTYPES[wire].itemsize
    sent, answered = session.recording.messages_up, session.recording.messages_down
    assert isinstance(decode(sent[0]), Hello)
    assert isinstance(decode(answered[0]), Welcome)
    assert len(sent) == len(answered)
    assert any(not step.step.is_chain for step in session.steps) or len(session.steps) > NEW_TOKENS
    for up, down in zip(sent[1:], answered[1:], strict=True):
        step = decode(up)
        assert isinstance(step, StepFrame)
        nodes = len(step.step)
        for message in (up, down):
            assert len(message) == 4 + len(header_bytes(message)) + nodes * WIDTH * itemsize


def test_headers_hold_nothing_but_counters_slots_and_times(llama_folder: Path, url: str) -> None:
    session = record(llama_folder, url, list(range(10, 60)), drafter=make_drafter(Decoding()))
    for message in session.recording.messages_up[1:]:
        header = json.loads(header_bytes(message))
        assert set(header) <= {"k", "s", "e", "c", "b", "n", "p"}
    for message in session.recording.messages_down[1:]:
        header = json.loads(header_bytes(message))
        assert set(header) <= {"k", "s", "ms", "q"}


def test_the_greeting_names_the_model_and_nothing_else(llama_folder: Path, url: str) -> None:
    session = record(llama_folder, url, list(range(10, 60)))
    header = json.loads(header_bytes(session.recording.messages_up[0]))
    assert header == {
        "k": "hello",
        "v": 1,
        "model": fingerprint_of(llama_folder).to_json(),
        "wire": "float32",
        "resume": "",  # a new session; later the cloud's own random name of it
    }


def test_a_follow_up_sends_only_what_is_new(llama_folder: Path, url: str) -> None:
    with relay_to(url) as relay:
        link = open_link(llama_folder, relay.url)
        device = Device(llama_folder, link)
        first = list(range(10, 60))
        answer = [token for block in device.blocks(first, 4) for token in block.tokens]
        before = len(relay.recording.messages_up)
        list(device.blocks([*first, *answer, 70, 71, 72], 1))
        follow_up = decode(relay.recording.messages_up[before])
        device.target.close()
    assert isinstance(follow_up, StepFrame)
    assert len(follow_up.step) == 4  # the last token of the answer, which was never sent, and three new ones


def test_bytes_per_token_are_two_hidden_states(tmp_path: Path) -> None:
    """Within 5 % of 2 x hidden x 2 bytes, for a model as wide as the default one, in float16."""
    wide = save_tiny(
        "llama",
        tmp_path / "wide",
        layers=5,
        hidden_size=576,
        intermediate_size=64,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        initializer_range=0.02,
    )
    with running_server(wide) as (_, url):
        session = record(wide, url, list(range(10, 110)), wire="float16", chunk=128, new_tokens=20)
    steps = list(zip(session.recording.messages_up, session.recording.messages_down, strict=True))[2:]
    assert len(steps) == 19
    expected = 2 * 576 * 2
    assert all(expected < len(up) + len(down) < 1.05 * expected for up, down in steps)
    # WebSocket's own header is 8 bytes up and 4 down.
    on_tcp = sum(len(up) + 8 + len(down) + 4 for up, down in steps) / len(steps)
    assert on_tcp < 1.06 * expected


def test_the_commands_way_of_writing_sends_no_text_either(llama_folder: Path, url: str) -> None:
    """The same for a whole answer with text, stop strings and the tokenizer on top."""
    codec = Codec(llama_folder)
    blueprint = Blueprint.open(llama_folder, FLOAT32)
    with relay_to(url) as relay:
        device = Device(llama_folder, open_link(llama_folder, relay.url))
        writer = Writer(device.target, codec, "2,2")
        answer, pieces = writer.write(
            codec.encode(SECRET),
            Nothing(),
            sampling=Sampling(temperature=0.8, seed=7),
            decoding=Decoding("sequential"),
            stopping=Stopping(max_new_tokens=NEW_TOKENS, stop=("Geheimwort",)),
        )
        list(pieces)
        device.target.close()
        stream = b"".join((*relay.recording.messages_up, *relay.recording.messages_down))
    assert blueprint.hidden_size == WIDTH
    for text in (SECRET, answer.text, "Geheimwort"):
        assert not any(spelling in stream for spelling in spellings_of_text(text))
    assert not any(spelling in stream for spelling in spellings_of_tokens(answer.token_ids))
