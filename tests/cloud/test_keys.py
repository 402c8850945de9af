"""Tokens: named, hashed, revoked while the server runs; and who is let in by them."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from aparte.cloud.keys import FIRST, KeyFile, Keyring
from aparte.errors import DoorError, LinkError, UserError
from aparte.fingerprint import Fingerprint
from aparte.step import ROOT
from aparte.wire.frames import ErrorFrame, Hello, ResultFrame, Welcome
from dialogue import Device, RawDevice, fingerprint_of, open_link, unsplit_tokens, wait_until
from running import running_server


def name_of(keys: Keyring, token: str) -> str | None:
    owner = keys.owner_of(token)
    return owner and owner.name


# -- The file --------------------------------------------------------------------------------------


def test_the_first_run_makes_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    keys, token = KeyFile.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.names == (FIRST,)
    assert name_of(keys, token) == FIRST
    assert len(token) >= 43  # 256 random bits
    assert token not in path.read_text()
    with pytest.raises(UserError, match="cannot be written"):
        KeyFile.create(path)


def test_tokens_have_names(tmp_path: Path) -> None:
    keys, first = KeyFile.create(tmp_path / "tokens")
    tokens = {name: keys.add(name) for name in ("alice", "bob@example.org", "ci-2")}
    again = KeyFile(tmp_path / "tokens")
    assert again.names == (FIRST, *tokens)
    assert {name: name_of(again, token) for name, token in tokens.items()} == {name: name for name in tokens}
    assert len({first, *tokens.values()}) == 4
    text = (tmp_path / "tokens").read_text()
    assert not any(token in text for token in tokens.values())
    assert stat.S_IMODE((tmp_path / "tokens").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["tokens"]


def test_no_other_token_opens(tmp_path: Path) -> None:
    keys, token = KeyFile.create(tmp_path / "tokens")
    for wrong in ("", token[:-1], token + "x", token.swapcase(), "Bearer " + token, "sha256:", "\udcff"):
        assert keys.owner_of(wrong) is None
    # What is in the file is no token either.
    assert keys.owner_of((tmp_path / "tokens").read_text().split()[1]) is None


def test_a_revoked_token_opens_nothing(tmp_path: Path) -> None:
    keys, first = KeyFile.create(tmp_path / "tokens")
    token = keys.add("alice")
    keys.revoke("alice")
    assert keys.owner_of(token) is None
    assert name_of(keys, first) == FIRST
    with pytest.raises(UserError, match=r"no token called alice.*There is: default"):
        keys.revoke("alice")


def test_a_new_token_of_the_same_name_is_another(tmp_path: Path) -> None:
    keys, old = KeyFile.create(tmp_path / "tokens")
    before = keys.owner_of(old)
    keys.revoke(FIRST)
    new = keys.add(FIRST)
    assert keys.owner_of(old) is None
    assert before not in keys.owners
    assert keys.owner_of(new) in keys.owners


def test_changes_are_seen(tmp_path: Path) -> None:
    keys, _ = KeyFile.create(tmp_path / "tokens")
    assert not keys.refresh()
    token = KeyFile(tmp_path / "tokens").add("alice")
    assert keys.owner_of(token) is None
    assert keys.refresh()
    assert name_of(keys, token) == "alice"
    assert not keys.refresh()


def test_a_file_that_cannot_be_read_any_more_leaves_things_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    keys, token = KeyFile.create(path)
    path.write_text("garbage")
    with pytest.raises(UserError):
        keys.refresh()
    assert name_of(keys, token) == FIRST
    assert not keys.refresh()
    path.unlink()
    with pytest.raises(UserError):
        keys.refresh()
    assert name_of(keys, token) == FIRST


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "Zoë", "a\nb", "a:b"])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    keys, _ = KeyFile.create(tmp_path / "tokens")
    with pytest.raises(UserError, match="no name for a token"):
        keys.add(name)


def test_a_name_is_given_once(tmp_path: Path) -> None:
    keys, _ = KeyFile.create(tmp_path / "tokens")
    with pytest.raises(UserError, match="already"):
        keys.add(FIRST)


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice sha256:12",
        f"alice md5:{'0' * 64}",
        f"alice sha256:{'g' * 64}",
        f"a b sha256:{'0' * 64}",
        f"{FIRST} sha256:{'0' * 64}",
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    KeyFile.create(path)
    path.write_text(f"{path.read_text()}\n# a comment\n{line}\n")
    with pytest.raises(UserError, match=r"Line 4 of .* is not a name"):
        KeyFile(path)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604, 0o620])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    KeyFile.create(tmp_path / "tokens")
    (tmp_path / "tokens").chmod(mode)
    with pytest.raises(UserError, match="chmod 600"):
        KeyFile(tmp_path / "tokens")


# -- The door --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fingerprint(llama_folder: Path) -> Fingerprint:
    return fingerprint_of(llama_folder)


@pytest.fixture(scope="module", autouse=True)
def _often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aparte.cloud.server.KEYS_INTERVAL_S", 0.05)
        yield


def greet(url: str, fingerprint: Fingerprint, token: str, resume: str) -> tuple[RawDevice, Welcome]:
    device = RawDevice(url, token)
    device.send(Hello(fingerprint.to_json(), "float32", resume=resume))
    frame = device.receive()
    assert isinstance(frame, Welcome)
    return device, frame


def test_each_token_opens_and_no_other_does(llama_folder: Path, tmp_path: Path) -> None:
    keys, first = KeyFile.create(tmp_path / "tokens")
    second = keys.add("alice")
    with running_server(llama_folder, keys=keys) as (server, url):
        for token in (first, second):
            device = Device(llama_folder, open_link(llama_folder, url, token=token))
            assert device.tokens() == unsplit_tokens(llama_folder)
            device.target.close()
        for wrong in ("", "x", first[:-1]):
            with pytest.raises(InvalidStatus):
                RawDevice(url, wrong)
        assert server.counters.errors == 3


def test_a_token_is_revoked_and_added_while_the_server_runs(
    llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint
) -> None:
    keys, first = KeyFile.create(tmp_path / "tokens")
    token = keys.add("alice")
    with running_server(llama_folder, keys=KeyFile(tmp_path / "tokens")) as (server, url):
        alice, _ = greet(url, fingerprint, token, "")
        alice.step(1, ROOT)
        assert isinstance(alice.receive(), ResultFrame)
        other, _ = greet(url, fingerprint, first, "")
        keys.revoke("alice")
        told = alice.receive()
        assert isinstance(told, ErrorFrame)
        assert told.code == "denied"
        wait_until(lambda: server.session_count == 1)
        assert len(server.parking) == 0
        with pytest.raises(DoorError, match="refused the token"):
            open_link(llama_folder, url, token=token).open()
        other.step(1, ROOT)  # the others notice nothing
        assert isinstance(other.receive(), ResultFrame)
        other.close()
        bob = keys.add("bob")

        def bob_is_in() -> bool:
            with contextlib.suppress(InvalidStatus):
                RawDevice(url, bob).close()
                return True
            return False

        wait_until(bob_is_in)


def test_an_answer_ends_at_once_when_its_token_is_revoked(llama_folder: Path, tmp_path: Path) -> None:
    keys, _ = KeyFile.create(tmp_path / "tokens")
    token = keys.add("alice")
    with running_server(llama_folder, keys=KeyFile(tmp_path / "tokens")) as (server, url):
        device = Device(llama_folder, open_link(llama_folder, url, token=token))
        blocks = device.blocks(new_tokens=400)
        next(blocks)
        keys.revoke("alice")
        with pytest.raises((DoorError, LinkError)) as caught:
            list(blocks)
        assert isinstance(caught.value, DoorError)
        wait_until(lambda: server.cache_bytes == 0)


def test_a_session_belongs_to_its_token(llama_folder: Path, tmp_path: Path, fingerprint: Fingerprint) -> None:
    """Somebody else's name for a session, even if it were known, opens nothing."""
    keys, first = KeyFile.create(tmp_path / "tokens")
    token = keys.add("alice")
    with running_server(llama_folder, keys=KeyFile(tmp_path / "tokens")) as (server, url):
        device, welcome = greet(url, fingerprint, token, "")
        device.step(1, ROOT)
        device.receive()
        device.abort()
        wait_until(lambda: len(server.parking) == 1)
        thief, other = greet(url, fingerprint, first, welcome.resume)
        assert not other.resumed
        assert len(server.parking) == 1
        thief.close()
        keys.revoke("alice")  # what is parked goes too
        wait_until(lambda: len(server.parking) == 0 and server.cache_bytes == 0)


def test_one_token_alone_has_a_name_too() -> None:
    keys = Keyring.of("open-sesame")
    assert name_of(keys, "open-sesame") == FIRST
    assert keys.owner_of("open-sesam") is None
    assert not keys.refresh()
