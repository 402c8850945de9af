"""Every ``$ aparte`` line of README and docs runs, adapted to this machine: a tiny model's folder for the
model's name, real servers' addresses for the documented ones, few tokens instead of many.

A comment above a block says where that is not so: ``<!-- slow: why -->`` blocks run with ``make slow`` and
shortened settings, ``<!-- not run: why -->`` blocks are only parsed.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from aparte.cli.gateway import KEY_VARIABLE
from aparte.config import DEFAULT_MODEL
from aparte.model.linear import packed_available
from aparte.wire import tunnel as tunnels
from certificates import make_certificate
from running import running_server
from ssh_server import SSHD, SshServer, ssh_server
from test_docs import Documented, commands, documented, resolve, run

FEW_TOKENS = "6"
HOME = os.environ.get("HOME", "")
START_S = 120
#: The documented addresses, and what stands in for each.
CLOUD, RELAYED, DIRECT, BEHIND = (
    "ws://127.0.0.1:7600",
    "ws://127.0.0.1:7601",
    "wss://gpu",
    "ssh://user@gpu.example/7600",
)
#: They run until they are stopped.
LASTING = ("serve", "gateway")

WRITES = ("generate", "chat", "verify")


def replaced(words: tuple[str, ...] | list[str], changes: dict[str, str]) -> list[str]:
    """``words`` with the values of these options changed, where they are given."""
    result = list(words)
    for position, word in enumerate(words[:-1]):
        if word in changes:
            result[position + 1] = changes[word]
    return result


def adapted(command: Documented, folder: Path, changes: dict[str, str] | None = None) -> list[str]:
    """The documented command for the tiny model in ``folder``."""
    words = replaced(command.words, {"--max-new-tokens": FEW_TOKENS, **(changes or {})})
    if command.name in WRITES and "--max-new-tokens" not in words:
        words += ["--max-new-tokens", FEW_TOKENS]
    return [str(folder) if word in (DEFAULT_MODEL, "./my-model") else word for word in words]


@contextmanager
def running(words: list[str], cwd: Path) -> Iterator[str]:
    """An ``aparte serve`` or ``aparte wan`` as a process of its own; gives where it listens."""
    with subprocess.Popen(
        [sys.executable, "-m", "aparte", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            line = child.stdout.readline()
            assert line, child.stderr.read()
            yield json.loads(line)["listening"]
        finally:
            child.terminate()
            assert child.wait(START_S) == 0


def first(name: str, page: str) -> Documented:
    return next(command for command in commands() if (command.name, command.page) == (name, page))


def each_once(mark: str = "") -> list[Documented]:
    """Documented commands whose block says ``mark``, or nothing; the same words only once."""
    found: dict[tuple[str, ...], Documented] = {}
    for command in commands():
        if command.mark.partition(":")[0] == mark:
            found.setdefault(command.words, command)
    return list(found.values())


@dataclass(frozen=True)
class Surroundings:
    """What the documentation supposes there to be."""

    folder: Path
    split: str
    whole: str
    tls: str
    relay: str
    ssh: SshServer | None

    def address(self, word: str, whole: bool) -> str:
        """What stands in for a documented address; other words stay."""
        if word == CLOUD:
            return self.whole if whole else self.split
        if word == RELAYED:
            return f"ws://{self.relay}"
        if word.startswith(DIRECT):
            return self.tls
        if word == BEHIND and self.ssh is not None:
            return self.ssh.url(urlsplit(self.split).port or 0)
        if word == "user@gpu.example" and self.ssh is not None:
            return f"{getpass.getuser()}@127.0.0.1:{self.ssh.port}"
        return word


@pytest.fixture(scope="module")
def surroundings(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    from aparte.cloud.door import tls_context

    work = tmp_path_factory.mktemp("documented")
    cert, key = make_certificate(work)
    for name in ("token", "token.txt", "key"):
        (work / name).write_text("f" * 64)
        (work / name).chmod(0o600)
    with contextlib.ExitStack() as stack:
        _, split = stack.enter_context(running_server(llama_folder))
        _, whole = stack.enter_context(running_server(llama_folder, whole=True))
        secured = running_server(llama_folder, tls=tls_context(cert, key), token="f" * 64)
        _, tls = stack.enter_context(secured)
        relay = replaced(first("wan", "docs/wan.md").words, {"--listen": "0", "--to": urlsplit(split).netloc})
        listening = stack.enter_context(running(relay, work))
        ssh = stack.enter_context(ssh_server(work / "ssh")) if SSHD else None
        yield Surroundings(work, split, whole, tls, listening, ssh)


@pytest.fixture
def as_a_new_process() -> Iterator[None]:
    """Gradients as a command finds them when it starts; the other tests here do without."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    yield
    torch.set_grad_enabled(before)


@pytest.fixture
def here(
    surroundings: Surroundings,
    monkeypatch: pytest.MonkeyPatch,
    as_a_new_process: None,
) -> Surroundings:
    """In the folder with the files that the documentation names, and without anybody's own settings."""
    monkeypatch.chdir(surroundings.folder)
    monkeypatch.setenv("APARTE_CACHE", str(surroundings.folder / "cache"))
    for variable in ("APARTE_TOKEN", "APARTE_DEBUG", KEY_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    if surroundings.ssh:
        monkeypatch.setenv("HOME", str(surroundings.ssh.home))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        monkeypatch.setattr(tunnels, "_tunnels", {})
    return surroundings


@contextmanager
def interrupted_once_it_listens() -> Iterator[None]:
    """Ctrl-C for a command that runs until then. Until it wants to hear of that, nothing is sent."""
    usual, over = signal.getsignal(signal.SIGINT), threading.Event()

    def watch() -> None:
        while not over.is_set() and signal.getsignal(signal.SIGINT) is usual:
            time.sleep(0.02)
        if not over.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGINT, usual)


class TestEveryCommand:
    @pytest.mark.parametrize("command", each_once(), ids=str)
    def test_runs(self, command: Documented, here: Surroundings, llama_folder: Path) -> None:
        if "packed16" in command.words and not packed_available():
            pytest.skip("packed16 needs an x86 CPU with AVX2")
        if here.ssh is None and any("user@gpu" in word for word in command.words):
            pytest.skip("sshd is not installed (Debian: openssh-server)")
        if "--help" in command.words or "--version" in command.words:
            assert run(list(command.words))
            return
        words = adapted(command, llama_folder)
        words = [here.address(word, "draft" in command.words) for word in words]
        if command.name == "wan":
            relay = replaced(words, {"--listen": "0", "--to": urlsplit(here.split).netloc})
            with running(relay, here.folder) as address:
                assert address.startswith("127.0.0.1:")
            return
        if "middle" in words:  # a shard
            shutil.rmtree("middle", ignore_errors=True)
            if command.name != "shard":
                run(["shard", str(llama_folder), "--out", "middle"])
        if command.name in LASTING and "--show-manifest" not in words:
            words = replaced(words, {"--port": "0", "--host": "127.0.0.1"})
            words += [] if "--port" in words else ["--port", "0"]
            with interrupted_once_it_listens():
                run(words)
            return
        if command.name == "verify":
            (here.folder / "prompts.txt").write_text(
                "Why is the sky blue?\nWrite a haiku.\n", encoding="utf-8"
            )
            words += ["--prompts", "prompts.txt"]
        if command.name == "tokens":  # as if nobody had been given one, or only who is named here
            Path("tokens").unlink(missing_ok=True)
            if words[1] != "add":
                run(["tokens", "add", "bob" if "bob" in words else "alice", "--file", "tokens"])
        if any(word.startswith("wss:") for word in words) and "--tls-ca" not in words:
            words += ["--tls-ca", "cert.pem"]  # where the documented server has one of a public authority
        said = run(words, input="Hello\n\n/help\nAnd then?\n/exit\n" if command.name == "chat" else None)
        assert said or command.name in ("tokens", "shard"), "it says something"
        if command.name == "generate" and {"--rtt", "--json"} <= set(words):
            rtt_ms = float(words[words.index("--rtt") + 1])
            assert all(step["rtt_ms"] >= rtt_ms for step in json.loads(said)["steps"])

    def test_blocks_that_are_not_run_say_why(self) -> None:
        marks = {command.mark for command in commands() if command.mark}
        assert all(len(mark.partition(": ")[2].split()) >= 3 for mark in marks), marks
        plain = [command for command in commands() if not command.mark]
        assert len(plain) >= 0.6 * len(commands())

    def test_marks_are_read(self) -> None:
        assert {command.mark.partition(":")[0] for command in commands()} >= {"", "slow"}


#: How a slow command is cut down to what fits a test; the meaning stays.
SHORTER = {
    "--limit": "1", "--clients": "1,2", "--seconds": "1", "--emulate": "5,20x100", "--project": "40x50",
    "--nodes": "1,4", "--context": "64", "--tokens": "1000", "--steps": "3", "--links": "5x100,20x100",
    "--cut": "2,2", "--cuts": "2,2", "--rtt": "5",
}  # fmt: skip
#: And where it is not given, because the default would take as long.
GIVEN = {
    "--max-new-tokens": FEW_TOKENS, "--attacks": "vocabulary,uniform", "--repeats": "1", "--limit": "1",
    "--clients": "1,2", "--seconds": "1", "--tokens": "1000", "--steps": "3",
}  # fmt: skip


@pytest.mark.slow
class TestSlowCommands:
    @pytest.mark.parametrize("command", each_once("slow"), ids=str)
    def test_runs(
        self,
        command: Documented,
        here: Surroundings,
        llama_folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        # In a folder of its own: what another command left there would be gone on with, or refused.
        for file in filter(Path.is_file, here.folder.iterdir()):
            shutil.copy(file, tmp_path)
        monkeypatch.chdir(tmp_path)
        own_model = command.name in ("demo", "models")
        if own_model:  # kept where it is always kept
            monkeypatch.delenv("APARTE_CACHE")
            monkeypatch.setenv("HOME", HOME)
        words = list(command.words) if own_model else adapted(command, llama_folder, SHORTER)
        # There is no bridge for a tiny model.
        words = replaced(words, {"--draft": "context"}) if "bridge" in " ".join(words) else words
        words = replaced([here.address(word, "draft" in words) for word in words], {"--max-new-tokens": "6"})
        for word in ("spec_bench.jsonl", "letters.txt"):
            if word in words:
                _sample(tmp_path / word)
        _, click_command, _ = resolve(tuple(words))
        names = {option for parameter in click_command.params for option in parameter.opts}
        for option, value in GIVEN.items():
            if option in names and option not in words:
                words += [option, value]
        run(words)


def _sample(file: Path) -> None:
    if file.suffix == ".txt":
        colours = ("grey", "blue", "white", "red", "green")
        lines = (f"Letter {n} came on a {colours[n % 5]} morning and nobody opened it.\n" for n in range(160))
        file.write_text("".join(lines), encoding="utf-8")
        return
    turns = ["Why is the sky over the sea of another colour?", "And then?"]
    kinds = ("writing", "summarization", "qa", "math_reasoning", "translation", "rag")
    rows = [{"question_id": n, "category": kind, "turns": turns} for n, kind in enumerate(kinds)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class TestTogether:
    """Commands that belong together, with what they have to say to each other."""

    @pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
    def test_serve_and_generate(self, page: str, llama_folder: Path, here: Surroundings) -> None:
        command = next(
            c for c in commands() if (c.name, c.page) == ("generate", page) and "--cloud" in c.words
        )
        alone, serve = first("generate", page), first("serve", page)
        assert command.words[:3] == alone.words[:3], "the same question, so the same answer"
        assert command.words[-1].rpartition("/")[2] == serve.words[serve.words.index("--port") + 1]
        cloud = here.split if here.ssh is None else here.address(BEHIND, whole=False)
        assert run(adapted(command, llama_folder, {"--cloud": cloud})) == run(adapted(alone, llama_folder))

    def test_chat(self, llama_folder: Path, here: Surroundings) -> None:
        words = adapted(first("chat", "README.md"), llama_folder, {"--cloud": here.split})
        said = run([*words, "--json"], input="Hello\n\n/help\nAnd then?\n/exit\n")
        answers = [json.loads(line) for line in said.splitlines()]
        assert [answer["new_tokens"] > 0 for answer in answers] == [True, True]

    def test_tls_and_token(self, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The recipe in docs/renting.md, certificate and all, on this machine."""
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        page = "docs/renting.md"
        for command in documented(page):
            if command.program in ("openssl", "chmod"):
                line = command.text.replace("gpu.example", "localhost")
                subprocess.run(line, shell=True, cwd=tmp_path, check=True, capture_output=True)
        serve, generate = (
            next(c for c in commands() if (c.page, c.name) == (page, name) and "--token-file" in c.words)
            for name in ("serve", "generate")
        )
        with running(adapted(serve, llama_folder, {"--port": "0"}), tmp_path) as url:
            monkeypatch.chdir(tmp_path)
            cloud = f"wss://localhost:{urlsplit(url).port}"
            run(adapted(generate, llama_folder, {"--cloud": cloud}))
