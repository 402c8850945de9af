"""The container image and the systemd unit: what they start exists, and it does not run as root."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from aparte.cli.app import app
from aparte.cloud.certificate import own_certificate
from aparte.cloud.door import tls_context
from running import running_server

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def parsed(words: list[str]) -> dict[str, object]:
    """The options of an ``aparte serve`` command line, as the command itself reads them."""
    assert words[0] == "serve"
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", words[1:]).params)


# -- The image -------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line and line[0] != "#"]


def last(name: str) -> str:
    return [value for word, value in instructions() if word == name][-1]


def test_the_image_does_not_run_as_root() -> None:
    user, group = last("USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    words = [word for word, _ in instructions()]
    assert "COPY" not in words[words.index("USER") :]
    assert "RUN" not in words[words.index("USER") :]
    assert f"--uid {user} " in last("RUN")


def test_no_weights_are_baked_in() -> None:
    copied = [value.split() for word, value in instructions() if word in ("COPY", "ADD")]
    sources = {source for words in copied for source in words[:-1] if not source.startswith("--")}
    assert sources == {
        "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src", "/opt/aparte",
        "deploy/healthcheck.py",
    }  # fmt: skip
    assert not any(word == "ADD" for word, _ in instructions())
    assert not any(
        re.search(r"\b(models? get|huggingface|hf_hub_download)\b", value) for _, value in instructions()
    )
    lets_in = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {line[1:] for line in lets_in} == sources - {"/opt/aparte"}
    assert all((ROOT / line[1:]).exists() for line in lets_in)


def test_what_the_image_starts_exists() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["aparte"]
    options = parsed(json.loads(last("CMD")))
    assert (options["host"], options["tls"]) == ("0.0.0.0", "auto")
    assert str(options["port"]) == last("EXPOSE")
    assert json.loads(last("VOLUME")) == ["/var/lib/aparte"]
    assert "APARTE_STATE=/var/lib/aparte" in last("ENV")
    (check,) = (value for word, value in instructions() if word == "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command == ["python", "/opt/aparte/healthcheck.py", last("EXPOSE")]


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_health_check_sees_a_server_and_none(llama_folder: Path, tmp_path: Path, with_tls: bool) -> None:
    path, _ = own_certificate(tmp_path)
    tls = tls_context(path, path) if with_tls else None

    def check(port: str) -> int:
        command = [sys.executable, str(DEPLOY / "healthcheck.py"), port]
        return subprocess.run(command, timeout=30, check=False).returncode

    with running_server(llama_folder, tls=tls, token="open-sesame") as (_, url):
        port = url.rpartition(":")[2]
        assert check(port) == 0
    assert check(port) == 1


# -- The unit --------------------------------------------------------------------------------------


class Unit(configparser.RawConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit() -> Unit:
    parser = Unit(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.read(DEPLOY / "aparte.service", encoding="utf-8")
    return parser


def test_the_unit_starts_what_there_is() -> None:
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(program).name == "aparte"
    options = parsed(words)
    assert (options["host"], options["tls"]) == ("0.0.0.0", "auto")
    assert "APARTE_STATE=%S/aparte" in unit()["Service"]["Environment"]


def test_the_unit_does_not_run_as_root_and_sees_little() -> None:
    service = unit()["Service"]
    assert service["User"] == service["Group"] == "aparte"
    assert service["NoNewPrivileges"] == service["ProtectHome"] == service["PrivateTmp"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert (service["StateDirectory"], service["StateDirectoryMode"]) == ("aparte", "0700")
    assert service["UMask"] == "0077"
    # With these the server would not find its GPU, its free memory, or compile its kernels.
    assert not {"PrivateDevices", "ProcSubset", "MemoryDenyWriteExecute"} & set(service)


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "aparte.service"
    text = (DEPLOY / "aparte.service").read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/aparte/bin/aparte", sys.executable), encoding="utf-8")
    run = analyze("verify", "--man=no", str(copy))
    complaints = [line for line in (run.stdout + run.stderr).splitlines() if "aparte.service" in line]
    assert complaints == []


def test_systemd_finds_little_exposed(tmp_path: Path) -> None:
    run = analyze("security", "--offline=true", "--threshold=30", str(DEPLOY / "aparte.service"))
    if "unrecognized option" in run.stderr:
        pytest.skip("this systemd-analyze cannot look at files")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr
