"""The container image and the systemd unit: what they start exists, and it does not run as root."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from aparte.cli.app import app
from aparte.cloud.certificate import own_certificate
from aparte.cloud.door import tls_context
from cli.command import Command
from dialogue import open_link
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

    with running_server(llama_folder, tls=tls, token="open-sesame") as (_, url):
        port = int(url.rpartition(":")[2])
        assert check_health(port) == 0
    assert check_health(port) == 1


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


# -- Both, run as somebody without rights ----------------------------------------------------------


class Somebody:
    """A user without rights, and what it takes to run our commands as that user."""

    def __init__(self, uid: int, home: Path) -> None:
        self.uid = uid
        #: A folder that everybody may enter; those of pytest are for their owner alone.
        self.home = home

    @property
    def _prefix(self) -> list[str]:
        """As root: become that user, without capabilities and without a way to get any. Else as we are."""
        if os.getuid() != 0:
            return []
        ids = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return ["setpriv", *ids, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]

    def python(self) -> list[str]:
        """An interpreter with our dependencies that this user may execute; skips where there is none."""
        if os.getuid() == 0 and shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed, and as root it takes that to become another user")
        names = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for program in (sys.executable, shutil.which(names, path="/usr/bin:/usr/local/bin")):
            if program is None:
                continue
            code = "import aparte.cli.app, importlib.util; assert importlib.util.find_spec('torch')"
            tried = [*self._prefix, program, "-c", code]
            if subprocess.run(tried, capture_output=True, env=self.environment(), cwd="/").returncode == 0:
                return [program]
        pytest.skip("no interpreter with our dependencies that another user may execute")

    def environment(self, **more: str) -> dict[str, str]:
        paths = [str(ROOT / "src"), sysconfig.get_path("purelib")]
        return {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(paths), "HOME": "/nonexistent"} | more

    def folder(self, name: str) -> Path:
        """One of this user's own, for nobody else."""
        made = self.home / name
        made.mkdir(mode=0o700)
        if os.getuid() == 0:
            os.chown(made, self.uid, self.uid)
        return made

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd="/",
            umask=0o077,
        )


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aparte-deploy-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def shard(aparte: Command, llama_folder: Path, home: Path) -> Path:
    """What is mounted or copied for the server: readable for all, and root's."""
    assert aparte("shard", llama_folder, "--cut", "2,2", "--out", home / "shard").code == 0
    for path in (home / "shard", *(home / "shard").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return home / "shard"


def placed(words: list[str], shard: Path, port: int) -> list[str]:
    """The command line of a file in ``deploy/``, with its shard and its port exchanged, and nothing else."""
    at = words.index("serve") + 1
    exchanged = [*words[:at], str(shard), *words[at + 1 :]]
    exchanged[exchanged.index("--port") + 1] = str(port)
    return exchanged


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def check_health(port: int) -> int:
    command = [sys.executable, str(DEPLOY / "healthcheck.py"), str(port)]
    return subprocess.run(command, timeout=30, check=False).returncode


def started(child: subprocess.Popen[str]) -> str:
    """What it says until it is ready: the line to copy comes last."""
    assert child.stdout is not None
    said = ""
    for line in child.stdout:
        said += line
        if "--pin" in line:
            return said
    pytest.fail(f"it ended with {child.wait()}: {said}")


def stopped(child: subprocess.Popen[str], within_s: float) -> int:
    """Its exit code after what a stop sends."""
    child.send_signal(signal.SIGTERM)
    code = child.wait(within_s)
    assert child.stdout is not None
    assert "Traceback" not in child.stdout.read()
    child.stdout.close()
    return code


def test_the_unit_runs_as_its_user_and_keeps_its_secrets(
    aparte: Command, llama_folder: Path, shard: Path, home: Path
) -> None:
    """Everything that the unit says about the process, but for the kernel's filters."""
    service, somebody = unit()["Service"], Somebody(65534, home)
    state, cache = somebody.folder("state"), somebody.folder("cache")
    assert (service["UMask"], service["StateDirectoryMode"]) == ("0077", "0700")
    told = service["Environment"].replace("%S/aparte", str(state)).replace("%C/aparte", str(cache))
    environment = somebody.environment(**dict(word.split("=", 1) for word in told.split()))
    port = free_port()
    words = placed(shlex.split(service["ExecStart"])[1:], shard, port)
    command = [*somebody.python(), "-m", "aparte", *words]

    child = somebody.start(command, environment)
    said = started(child)
    status = Path(f"/proc/{child.pid}/status").read_text()
    assert not re.search(r"^Uid:\s+0\b", status, re.MULTILINE)
    if os.getuid() == 0:
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    assert check_health(port) == 0
    pin = re.search(r"--pin (sha256:[0-9a-f]{64})", said)
    token = re.search(r"APARTE_TOKEN=(\S+)", said)
    assert pin, said
    assert token, said
    link = open_link(llama_folder, f"wss://127.0.0.1:{port}", token=token[1], pins=[pin[1]])
    link.open()
    link.close()
    assert stopped(child, float(service["TimeoutStopSec"])) == 0, "a stop is no failure to start again after"
    kept = {path.name: path.stat() for path in state.iterdir()}
    assert set(kept) == {"tls.pem", "tokens"}
    assert {entry.st_mode & 0o777 for entry in kept.values()} == {0o600}


def test_what_the_image_runs_while_it_is_built_exists(home: Path) -> None:
    """Against the Debian of this machine; a Python image is one, too."""
    runs = [value for word, value in instructions() if word == "RUN"]
    programs = [command.split()[0] for run in runs for command in run.split(" && ")]
    assert programs == ["python", "/opt/aparte/bin/pip", "groupadd", "useradd", "install"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    (extra,) = re.findall(r'"\.\[(\w+)\]"', runs[0])
    assert extra in re.findall(r"^(\w+) = \[", table, re.MULTILINE)
    (entry,) = json.loads(last("ENTRYPOINT"))
    scripts = project.split("[project.scripts]")[1].split("\n[")[0]
    assert re.search(rf"^{entry} = ", scripts, re.MULTILINE)
    if os.getuid() != 0 or any(shutil.which(program) is None for program in programs[2:]):
        pytest.skip("making users takes root, and Debian's programs for it")
    (home / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (home / "etc" / name).touch()
    for command in runs[1].split(" && "):
        words = shlex.split(command.replace("/var/lib", f"{home}/var/lib"))
        if words[0] != "install":
            words[1:1] = ["--prefix", str(home)]
        subprocess.run(words, check=True, capture_output=True, timeout=30)
    name, _, uid, gid, _, _, shell = (home / "etc" / "passwd").read_text().strip().split(":")
    assert (name, f"{uid}:{gid}", shell) == ("aparte", last("USER"), "/usr/sbin/nologin")
    folder = (home / "var" / "lib" / "aparte").stat()
    assert (folder.st_uid, folder.st_gid, folder.st_mode & 0o777) == (10001, 10001, 0o700)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_by_hand(shard: Path, home: Path) -> None:
    """The Dockerfile's own commands, one after the other, in a folder instead of an image.

    Its first stage installs into a clean environment, from the files that it copies and nothing else; then
    its entry point runs as its user, with its settings only, and its health check finds the server well.
    """
    program = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    if program is None or subprocess.run([program, "-c", "import ensurepip"]).returncode:
        pytest.skip("no python with venv that another user may execute")
    context, opt, bin_ = home / "src-context", home / "opt", home / "bin"
    for folder in (context, opt, bin_):
        folder.mkdir()
    (bin_ / "python").symlink_to(program)
    for name in next(value for word, value in instructions() if word == "COPY").split()[:-1]:
        shutil.copy(ROOT / name, context)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", context / "src", ignore=ignore)
    build = next(value for word, value in instructions() if word == "RUN")
    build = build.replace("/opt/aparte", f"{opt}/aparte")
    environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "PIP_CONSTRAINT": "constraints.txt"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(["sh", "-euc", build], check=True, cwd=context, env=environment, timeout=1800)
    shutil.copy(DEPLOY / "healthcheck.py", opt / "aparte")

    user = int(last("USER").split(":")[0])
    somebody, port = Somebody(user, home), free_port()
    state = somebody.folder("state")
    settings = last("ENV").replace("/opt/aparte", f"{opt}/aparte").replace("/var/lib/aparte", str(state))
    given = dict(word.split("=", 1) for word in settings.split())
    given["PATH"] = given["PATH"].replace("$PATH", "/usr/bin:/bin")
    (entry,) = json.loads(last("ENTRYPOINT"))
    found = shutil.which(entry, path=given["PATH"])
    assert found == f"{opt}/aparte/bin/aparte"
    child = somebody.start([found, *placed(json.loads(last("CMD")), shard, port)], given)
    started(child)
    (check,) = (value for word, value in instructions() if word == "HEALTHCHECK")
    words = json.loads(check[check.index("[") :])
    words = [word.replace("/opt/aparte", f"{opt}/aparte").replace("7600", str(port)) for word in words]
    checked = somebody.start([shutil.which(words[0], path=given["PATH"]) or "", *words[1:]], given)
    assert checked.wait(30) == 0
    assert stopped(child, 20) == 0
    assert {path.name for path in state.iterdir()} >= {"tls.pem", "tokens"}
