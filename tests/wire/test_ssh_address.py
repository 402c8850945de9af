"""What an ssh:// address may be."""

from __future__ import annotations

import pytest

from aparte.address import DEFAULT_PORT
from aparte.errors import UserError
from aparte.wire.ssh_address import Account, SshAddress, is_ssh


@pytest.mark.parametrize(
    ("url", "account", "to"),
    [
        ("ssh://gpu.example", Account("gpu.example"), ("127.0.0.1", DEFAULT_PORT)),
        ("ssh://gpu.example/", Account("gpu.example"), ("127.0.0.1", DEFAULT_PORT)),
        ("ssh://me@gpu.example:2222/8765", Account("gpu.example", "me", 2222), ("127.0.0.1", 8765)),
        ("ssh://MyAlias/7601", Account("MyAlias"), ("127.0.0.1", 7601)),
        ("SSH://me@h/10.0.0.7:80", Account("h", "me"), ("10.0.0.7", 80)),
        ("ssh://me@[2001:db8::1]:22/[::1]:7600", Account("2001:db8::1", "me", 22), ("::1", 7600)),
        ("ssh://me@[2001:db8::1]/7600", Account("2001:db8::1", "me"), ("127.0.0.1", 7600)),
        ("ssh://first%20last@h/7600".replace("%20", "."), Account("h", "first.last"), ("127.0.0.1", 7600)),
    ],
)
def test_addresses(url: str, account: Account, to: tuple[str, int]) -> None:
    assert is_ssh(url)
    assert SshAddress.parse(url) == SshAddress(account, to)


@pytest.mark.parametrize(
    "url",
    [
        "ssh://", "ssh:///7600", "ssh://@h/7600", "ssh://h:port/7600", "ssh://h:99999/7600", "ssh://h/seven",
        "ssh://h/0", "ssh://h/7600?x=1", "ssh://h/7600#x", "ssh://-oProxyCommand=x/7600", "ssh://h/a b:1",
        "ssh://h/-x:1", "ssh://u%0a@h/7600", "ssh://[::1/7600",
    ],
)  # fmt: skip
def test_what_is_none(url: str) -> None:
    with pytest.raises(UserError, match="is not a cloud's address"):
        SshAddress.parse(url)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError, match="must not hold a password") as caught:
        SshAddress.parse("ssh://me:hunter2@h/7600")
    assert "hunter2" not in str(caught.value)


def test_an_account_is_written_as_ssh_takes_it() -> None:
    assert str(Account("h")) == "h"
    assert str(Account("h", "me", 2222)) == "me@h -p 2222"
