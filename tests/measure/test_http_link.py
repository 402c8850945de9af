"""HTTP with base64 in JSON, as paper A began: the same text as over frames, and refusals in sentences."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aparte.answer import Writer
from aparte.cloud.load import load_engine
from aparte.config import Cut, Sampling, ServerLimits, Stopping
from aparte.device import open_writer
from aparte.errors import FrameError, LinkError
from aparte.measure.http_cloud import MOST_SESSIONS, HttpCloud
from aparte.measure.http_link import STEP, HttpLink, step_from_json, step_to_json
from aparte.model.parts import Blueprint
from aparte.speculate.drafter import make_drafter
from aparte.speculate.settings import Decoding
from aparte.step import Step
from aparte.target.split import DeviceParts, SplitTarget
from aparte.text.tokenizer import Codec
from aparte.wire.frames import Hello, StepFrame, encode
from running import FLOAT32

TOKEN = "open sesame"


@pytest.fixture(scope="module")
def blueprint(llama_folder: Path) -> Blueprint:
    return Blueprint.open(llama_folder, FLOAT32)


@pytest.fixture(scope="module")
def cloud(blueprint: Blueprint) -> Iterator[HttpCloud]:
    server = HttpCloud(load_engine(blueprint, Cut(), "tiny", ServerLimits(max_nodes_per_step=64)), TOKEN)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.stop()
    thread.join(10)


@contextmanager
def writer_over(link: HttpLink, blueprint: Blueprint) -> Iterator[Writer]:
    target = SplitTarget(DeviceParts(blueprint, Cut()), link, "float32")
    codec = Codec(blueprint.checkpoint.folder)
    codec.eos = frozenset()
    try:
        yield Writer(target, codec, "2,2", prefill_chunk=16)
    finally:
        target.close()


def answer(writer: Writer, decode: str) -> list[int]:
    return writer.complete(
        tuple(range(20, 60)),
        make_drafter(Decoding(decode)),
        sampling=Sampling(),
        decoding=Decoding(decode),
        stopping=Stopping(max_new_tokens=12),
    ).token_ids


@pytest.mark.parametrize("keep", [True, False])
def test_the_text_is_that_of_the_frames(cloud: HttpCloud, blueprint: Blueprint, keep: bool) -> None:
    plain = open_writer(blueprint, "tiny", Cut(), wire="float32")
    plain.codec.eos = frozenset()
    link = HttpLink(f"http://127.0.0.1:{cloud.port}", TOKEN, "float32", keep=keep)
    with writer_over(link, blueprint) as writer:
        expected = answer(plain, "sequential")
        assert answer(writer, "sequential") == expected
        writer.forget()
        assert answer(writer, "lookahead") == expected
    # 40 prompt tokens and 11 more, twice; base64 makes four bytes of three.
    assert link.bytes_up > 2 * 51 * blueprint.hidden_size * 4 * 4 / 3


def test_a_step_is_the_same_on_the_other_side() -> None:
    frame = StepFrame(Step(7, 1, 3, 4, (3, 4, 4)), b"\x00\x01\xff")
    again = step_from_json(json.loads(json.dumps(step_to_json(frame))))
    assert (again.step, bytes(again.payload)) == (frame.step, frame.payload)


@pytest.mark.parametrize(
    "change",
    [{"s": "7"}, {"p": [9]}, {"p": 3}, {"hidden": "?"}, {"hidden": None}, {"c": True}, {"b": -1}],
)
def test_what_is_no_step_is_refused(change: dict[str, object]) -> None:
    frame = StepFrame(Step(7, 1, 3, 4, (3,)), b"\x00\x01\xff")
    with pytest.raises(FrameError):
        step_from_json(step_to_json(frame) | change)


class TestRefusals:
    def request(self, cloud: HttpCloud, path: str, body: bytes, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", cloud.port, timeout=10)
        connection.request("POST", path, body, {"Authorization": f"Bearer {TOKEN}", **headers})
        response = connection.getresponse()
        said = json.loads(response.read())["error"]
        connection.close()
        return response.status, said

    def test_another_token(self, cloud: HttpCloud) -> None:
        with pytest.raises(LinkError, match="401"):
            HttpLink(f"http://127.0.0.1:{cloud.port}", "wrong", "float32").open()

    def test_another_number_format(self, cloud: HttpCloud) -> None:
        with pytest.raises(LinkError, match="400"):
            HttpLink(f"http://127.0.0.1:{cloud.port}", TOKEN, "float3").open()

    def test_nobody_there(self) -> None:
        with pytest.raises(LinkError, match="cannot be reached"):
            HttpLink("http://127.0.0.1:9", TOKEN, "float32").open()

    def test_other_frames(self, cloud: HttpCloud) -> None:
        link = HttpLink(f"http://127.0.0.1:{cloud.port}", TOKEN, "float32")
        with pytest.raises(FrameError):
            link.send(encode(Hello({"name": "", "cut": "", "config": "", "tensors": ""}, "float16")))

    def test_bodies(self, cloud: HttpCloud) -> None:
        assert self.request(cloud, STEP, b"{")[0] == 400
        assert self.request(cloud, STEP, b"[]")[0] == 400
        assert self.request(cloud, STEP, b"[" * 100_000)[0] == 400
        assert "session" in self.request(cloud, STEP, b'{"session": "x"}')[1]
        assert "session" in self.request(cloud, "/elsewhere", b"{}")[1]
        # Refused by what is announced, before anything is read.
        assert self.request(cloud, STEP, b"", **{"Content-Length": str(cloud.most_bytes + 1)})[0] == 413

    def test_sessions_are_few(self, cloud: HttpCloud) -> None:
        links = [
            HttpLink(f"http://127.0.0.1:{cloud.port}", TOKEN, "float32", keep=False)
            for _ in range(MOST_SESSIONS + 1)
        ]
        assert [link.open() for link in links] == [False] * len(links)
        assert links[-1].open() is True
        frame = encode(StepFrame(Step(1, 0, -1, 0, (-1,)), bytes(32 * 4)))
        links[0].send(frame)
        with pytest.raises(LinkError, match="no such session"):
            links[0].receive()
