"""The scripts in ``examples/`` run as their README says, on a tiny model and a real server."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.served import NAME, connected, serving
from running import running_server
from ssh_server import ssh_server

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(script.name for script in EXAMPLES.glob("*.py"))

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script as the shell would, without a new interpreter; its output."""

    def run(script: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *words])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def cloud(llama_folder: Path) -> Iterator[str]:
    with running_server(llama_folder) as (_, url):
        yield url


def test_every_script_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
class TestEach:
    def test_without_arguments_it_says_how(self, script: str, run: Run) -> None:
        with pytest.raises(SystemExit) as left:
            run(script)
        assert f"python examples/{script} MODEL" in str(left.value)

    def test_mistakes_are_a_sentence(self, script: str, run: Run) -> None:
        elsewhere = {"openai_client.py": "http://127.0.0.1:9/v1", "tunnel.py": "ssh://user:word@host"}
        with pytest.raises(SystemExit) as left:
            run(script, "nomodel", *([elsewhere[script]] if script in elsewhere else []))
        assert str(left.value).startswith("Error: ")


class TestOutput:
    def test_generate(self, run: Run, llama_folder: Path, cloud: str) -> None:
        alone, split = run("generate.py", str(llama_folder)), run("generate.py", str(llama_folder), cloud)
        text, trips, sizes = re.fullmatch(
            r"(.*)\n(\d+ tokens in \d+ round trips: MAT [\d.]+)\n(.*)\n", split, re.DOTALL
        ).groups()  # type: ignore[union-attr]
        assert alone.startswith(text)
        assert text
        assert trips in alone
        assert "bytes per token" in sizes

    def test_stream(self, run: Run, llama_folder: Path, cloud: str) -> None:
        said = run("stream.py", str(llama_folder), cloud)
        assert re.match(r"\d+ of \d+ nodes, least p 0\.\d+: '", said)

    def test_async_answers(self, run: Run, llama_folder: Path, cloud: str) -> None:
        said = run("async_answers.py", str(llama_folder), cloud)
        assert all(question in said for question in ("Why is the sky blue? ", "What is a prime? "))

    def test_chat(self, run: Run, llama_folder: Path, cloud: str) -> None:
        kept = re.findall(
            r"\((\d+) tokens of prompt, (\d+) of them kept\)", run("chat.py", str(llama_folder), cloud)
        )
        assert int(kept[0][1]) == 0
        assert int(kept[1][1]) >= int(kept[0][0])

    def test_hf_generate(self, run: Run, llama_folder: Path, cloud: str) -> None:
        assert run("hf_generate.py", str(llama_folder), cloud).startswith("The sky is blue because")

    def test_openai_client(self, run: Run, llama_folder: Path, cloud: str) -> None:
        with connected(llama_folder, cloud, sessions=1) as model, serving(model) as url:
            said = run("openai_client.py", NAME, f"{url}/v1")
        assert re.search(r"\n\d+ tokens in \d+ round trips\n$", said)

    def test_tunnel(
        self, run: Run, llama_folder: Path, cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ssh_server(tmp_path / "ssh") as sshd:
            monkeypatch.setenv("HOME", str(sshd.home))
            said = run("tunnel.py", str(llama_folder), sshd.url(int(cloud.rpartition(":")[2])))
        assert re.match(r"SSH took \d+ ms to set up; a round trip takes [\d.]+ ms\n", said)
        assert said.endswith(" round trips, 0 reconnects\n")

    def test_split_in_one_process(self, run: Run, llama_folder: Path) -> None:
        *text, summary, sizes = run(
            "split_in_one_process.py", str(llama_folder), "Why is the sky blue?"
        ).splitlines()
        assert "".join(text)
        tokens, trips, mat = re.fullmatch(
            r"(\d+) tokens in (\d+) round trips: MAT ([\d.]+)", summary
        ).groups()  # type: ignore[union-attr]
        assert float(mat) == pytest.approx(int(tokens) / int(trips), abs=0.005)
        up, down = map(int, re.fullmatch(r"bytes per token: (\d+) up, (\d+) down", sizes).groups())  # type: ignore[union-attr]
        assert min(up, down) >= 32 * 2  # a hidden state of the tiny model in 16 bits
