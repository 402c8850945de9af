"""A certificate of the server's own: made once, for its owner alone."""

from __future__ import annotations

import os
import ssl
import stat
import sys
import threading
from pathlib import Path

import pytest

from aparte.cloud.certificate import own_certificate
from aparte.cloud.door import pin_of, tls_context
from aparte.errors import UserError
from dialogue import Device, open_link, unsplit_tokens
from running import running_server


def test_it_is_made_at_the_first_run_and_kept(tmp_path: Path) -> None:
    path, made = own_certificate(tmp_path / "state")
    assert made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.read_bytes()
    assert own_certificate(tmp_path / "state") == (path, False)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["tls.pem"]
    other, _ = own_certificate(tmp_path / "other")
    assert pin_of(other) != pin_of(path)


def test_whatever_the_umask_it_is_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path, _ = own_certificate(tmp_path / "state")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_its_pin_opens_the_door(llama_folder: Path, tmp_path: Path) -> None:
    path, _ = own_certificate(tmp_path)
    context = tls_context(path, path)
    assert isinstance(context, ssl.SSLContext)
    with running_server(llama_folder, tls=context, token="open-sesame") as (_, url):
        device = Device(llama_folder, open_link(llama_folder, url, token="open-sesame", pins=[pin_of(path)]))
        assert device.tokens() == unsplit_tokens(llama_folder)
        device.target.close()


def test_two_servers_that_start_at_once_have_the_same(tmp_path: Path) -> None:
    found: list[bytes] = []
    gate = threading.Barrier(6)

    def run() -> None:
        gate.wait()
        found.append(own_certificate(tmp_path / "state")[0].read_bytes())

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["tls.pem"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path, _ = own_certificate(tmp_path)
    path.chmod(mode)
    with pytest.raises(UserError, match="chmod 600"):
        own_certificate(tmp_path)


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="another folder with --state"):
        own_certificate(tmp_path / "file" / "state")


def test_without_the_package_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UserError, match=r"aparte\[server\].*--tls-cert and --tls-key"):
        own_certificate(tmp_path / "state")
    assert not list((tmp_path / "state").glob("*"))
