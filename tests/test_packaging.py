"""What is built and installed: everything that is needed, nothing else, and quick to start."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from aparte import __version__
from cli.command import Command

ROOT = Path(__file__).parents[1]
EXTRAS = {"audit", "dev", "docs", "gateway", "gpu", "plots", "pseudonyms", "scores", "server"}
#: The command by its name, in an interpreter of its own.
COMMAND = "import sys; sys.argv = ['aparte']; from aparte.cli.app import main; main()"
#: What is no Python and has to come along.
DATA = (
    "aparte/py.typed",
    "aparte/bridge/shipped/smollm2-135m.safetensors",
    "aparte/speculate/common.safetensors",
    "aparte/speculate/priors.json",
    "aparte/gateway/static/page.js",
)


class TestStart:
    def test_help_loads_nothing_heavy(self) -> None:
        code = (
            "import sys; from aparte.cli.app import main\n"
            "sys.argv = ['aparte', '--help']\n"
            "try: main()\n"
            "except SystemExit: pass\n"
            "print(*sys.modules, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert "generate" in done.stdout
        heavy = {"torch", "transformers", "numpy", "websockets", "asyncssh", "cryptography", "fastapi"}
        assert heavy & set(done.stderr.split()) == set()

    def test_version(self, aparte: Command) -> None:
        assert aparte("--version").out == f"aparte {__version__}\n"

    @pytest.mark.parametrize(
        ("shell", "words"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete")]
    )
    def test_completion(self, shell: str, words: str) -> None:
        environment = os.environ | {"_APARTE_COMPLETE": f"source_{shell}"}
        done = subprocess.run(
            [sys.executable, "-c", COMMAND],
            capture_output=True, text=True, timeout=60, env=environment,
        )  # fmt: skip
        assert words in done.stdout
        assert "_APARTE_COMPLETE" in done.stdout

    def test_it_completes_commands_and_options(self) -> None:
        def complete(line: str) -> str:
            environment = os.environ | {
                "_APARTE_COMPLETE": "complete_bash",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split()) - 1),
            }
            return subprocess.run(
                [sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60, env=environment
            ).stdout

        assert "generate" in complete("aparte gen").split()
        assert "--max-new-tokens" in complete("aparte generate --max-new").split()


def test_extras_are_those_of_the_documentation() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert set(re.findall(r"^(\w+) = \[", table, re.MULTILINE)) >= EXTRAS
    told = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\nExtras:")[1]
    assert [extra for extra in sorted(EXTRAS) if f"`{extra}`" not in told] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from that."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return folder


@pytest.mark.slow
class TestBuilt:
    def test_the_wheel(self, built: Path) -> None:
        (wheel,) = built.glob("*.whl")
        assert wheel.name == f"aparte-{__version__}-py3-none-any.whl", "one wheel for every machine"
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = email.message_from_bytes(
                archive.read(next(name for name in names if name.endswith("METADATA")))
            )
        tops = {name.split("/")[0] for name in names}
        assert tops == {"aparte", f"aparte-{__version__}.dist-info"}, "no tests, no docs"
        assert set(DATA) <= set(names)
        modules = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*.py")}
        assert modules <= set(names)
        assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))]
        assert set(metadata.get_all("Provides-Extra") or []) >= EXTRAS
        assert metadata["Requires-Python"] == ">=3.10"

    def test_the_sdist(self, built: Path) -> None:
        (sdist,) = built.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        wanted = {f"src/{name}" for name in DATA} | {
            "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt",
            "tests/test_packaging.py", "docs/index.md", "examples/generate.py", "mkdocs.yml",
        }  # fmt: skip
        assert wanted <= names
        assert not [
            name for name in names if name.startswith((".venv", "shared", "site/")) or ".git/" in name
        ]

    def test_it_installs_without_a_compiler(self, built: Path, tmp_path: Path) -> None:
        """Into an environment of its own, which sees this one's dependencies: none is built from source."""
        (wheel,) = built.glob("*.whl")
        environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CC": "/nowhere"}
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
        python = str(tmp_path / "venv" / "bin" / "python")
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", str(wheel)],
            check=True, timeout=120, env=environment,
        )  # fmt: skip
        (there,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        (there / "dependencies.pth").write_text(f"{ours}\n")
        done = subprocess.run(
            [str(tmp_path / "venv" / "bin" / "aparte"), "--version"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment,
        )  # fmt: skip
        assert done.stdout == f"aparte {__version__}\n", done.stderr
        code = (
            "import aparte, pathlib; from aparte.bridge.file import find_bridge\n"
            "from aparte.config import Cut\n"
            "print(pathlib.Path(aparte.__file__).parents[1]); print(find_bridge('smollm2-135m', Cut()))"
        )
        found = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
        )
        where, bridge = found.stdout.splitlines()
        assert where == str(there), "not the checkout"
        assert bridge.startswith(str(there))
