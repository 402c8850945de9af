"""Pins: the right certificate and no other, before anything is sent."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from aparte.cloud.door import pin_of, tls_context
from aparte.errors import DoorError, UserError
from aparte.pin import parse_pin
from certificates import make_certificate
from dialogue import Device, open_link, unsplit_tokens
from relay import relay_to
from running import running_server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    # For an address that nobody connects to: a pin looks at no name.
    return make_certificate(tmp_path_factory.mktemp("pinned"), "192.0.2.1")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("other"), "127.0.0.1")


@pytest.fixture(scope="module")
def url(llama_folder: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
    with running_server(llama_folder, tls=tls_context(*certificate), token="open-sesame") as (_, url):
        yield url


def test_a_pin_is_the_digest_of_the_certificate(certificate: tuple[Path, Path]) -> None:
    der = ssl.PEM_cert_to_DER_cert(certificate[0].read_text())
    assert pin_of(certificate[0]) == f"sha256:{hashlib.sha256(der).hexdigest()}"


def test_of_a_chain_it_is_the_servers_own(
    tmp_path: Path, certificate: tuple[Path, Path], other: tuple[Path, Path]
) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_text(f"Some words.\n{certificate[0].read_text()}{other[0].read_text()}")
    assert pin_of(chain) == pin_of(certificate[0])


def test_with_the_pin_the_door_opens(
    llama_folder: Path, url: str, certificate: tuple[Path, Path], other: tuple[Path, Path]
) -> None:
    pins = [pin_of(other[0]), pin_of(certificate[0])]
    device = Device(llama_folder, open_link(llama_folder, url, token="open-sesame", pins=pins))
    assert device.tokens() == unsplit_tokens(llama_folder)
    device.target.close()


def test_another_certificate_is_refused_before_the_token_is_sent(
    llama_folder: Path, url: str, certificate: tuple[Path, Path], other: tuple[Path, Path]
) -> None:
    with relay_to(url) as relay:
        link = open_link(
            llama_folder,
            relay.url.replace("ws:", "wss:"),
            token="open-sesame",
            pins=[pin_of(other[0])],
        )
        with pytest.raises(DoorError, match=f"another certificate.*{pin_of(certificate[0])}"):
            link.open()
        # A handshake, and no record of application data behind it: in TLS 1.3 the device's Finished is
        # one of that type, alone.
        sent = bytes(relay.recording.up)
    assert records(sent)[-2:] != [23, 23]


def records(stream: bytes) -> list[int]:
    """Types of the TLS records in a stream."""
    types: list[int] = []
    at = 0
    while at + 5 <= len(stream):
        types.append(stream[at])
        at += 5 + int.from_bytes(stream[at + 3 : at + 5], "big")
    return types


@pytest.mark.parametrize(
    "text",
    [
        "sha256:" + "ab" * 32,
        "SHA256:" + "AB" * 32,
        "sha256:" + ":".join(["AB"] * 32),
        " sha256:" + "ab" * 32 + "\n",
    ],
)
def test_pins_are_read_as_they_are_printed(text: str) -> None:
    assert parse_pin(text) == "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "ab" * 31, "md5:" + "ab" * 32, "ab" * 32, "sha256:" + "xy" * 32]
)
def test_what_is_not_a_pin_is_a_users_mistake(llama_folder: Path, text: str) -> None:
    with pytest.raises(UserError, match="is not a pin"):
        open_link(llama_folder, "wss://127.0.0.1:7600", pins=[text])


def test_a_pin_belongs_to_tls(llama_folder: Path, certificate: tuple[Path, Path]) -> None:
    pin = pin_of(certificate[0])
    with pytest.raises(UserError, match="not encrypted"):
        open_link(llama_folder, "ws://127.0.0.1:7600", pins=[pin])
    with pytest.raises(UserError, match="two ways"):
        open_link(llama_folder, "wss://127.0.0.1:7600", pins=[pin], ca_file=certificate[0])
