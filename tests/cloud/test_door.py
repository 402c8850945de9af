"""Who may come in: rules that are checked before a server listens."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from aparte.cloud.door import check, tls_context
from aparte.errors import UserError
from certificates import make_certificate

LOOPBACK = ["127.0.0.1", "127.8.8.8", "::1", "localhost"]
ELSEWHERE = ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "localhost.example.org"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_this_machine_needs_neither_token_nor_tls(host: str) -> None:
    check(host, has_token=False, has_tls=False, insecure=False)


@pytest.mark.parametrize("host", ELSEWHERE)
@pytest.mark.parametrize(
    ("has_token", "has_tls", "told"),
    [
        (False, False, "--token-file and --tls-cert are missing"),
        (True, False, "--tls-cert is missing"),
        (False, True, "--token-file is missing"),
    ],
)
def test_other_machines_need_both_and_are_told_what_is_missing(
    host: str, has_token: bool, has_tls: bool, told: str
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        check(host, has_token=has_token, has_tls=has_tls, insecure=False)
    assert "--insecure" in str(caught.value)
    check(host, has_token=has_token, has_tls=has_tls, insecure=True)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_with_both_a_server_may_listen_anywhere(host: str) -> None:
    check(host, has_token=True, has_tls=True, insecure=False)


def test_without_files_there_is_no_tls() -> None:
    assert tls_context(None, None) is None


def test_a_certificate_and_its_key(tmp_path: Path) -> None:
    context = tls_context(*make_certificate(tmp_path))
    assert isinstance(context, ssl.SSLContext)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_one_file_alone_is_not_enough(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    for pair in ((certificate, None), (None, key)):
        with pytest.raises(UserError, match="needs both --tls-cert and --tls-key"):
            tls_context(*pair)


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "of another pair", "swapped", "a folder"])
def test_files_that_do_not_work_are_named(tmp_path: Path, damage: str) -> None:
    certificate, key = make_certificate(tmp_path / "one")
    match damage:
        case "missing":
            key.unlink()
        case "empty":
            certificate.write_bytes(b"")
        case "garbage":
            certificate.write_bytes(b"\x00\xffnot a certificate")
        case "of another pair":
            _, key = make_certificate(tmp_path / "two")
        case "swapped":
            certificate, key = key, certificate
        case "a folder":
            certificate = tmp_path
    with pytest.raises(UserError, match="are not a readable PEM certificate") as caught:
        tls_context(certificate, key)
    assert str(certificate) in str(caught.value)
    assert str(key) in str(caught.value)


def test_an_encrypted_key_is_an_error_and_no_prompt_on_the_terminal(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, password="secret")
    with pytest.raises(UserError, match="unencrypted private key"):
        tls_context(certificate, key)
