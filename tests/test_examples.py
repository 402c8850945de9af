"""The scripts in ``examples/`` run as their README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_every_script_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {script.name for script in EXAMPLES.glob("*.py")}


class TestSplitInOneProcess:
    SCRIPT = str(EXAMPLES / "split_in_one_process.py")

    def test_it_prints_text_mat_and_bytes(self, llama_folder: Path) -> None:
        done = run(self.SCRIPT, str(llama_folder), "Why is the sky blue?")
        assert done.returncode == 0, done.stderr
        *text, summary, sizes = done.stdout.splitlines()
        assert "".join(text)
        tokens, trips, mat = re.fullmatch(
            r"(\d+) tokens in (\d+) round trips: MAT ([\d.]+)", summary
        ).groups()  # type: ignore[union-attr]
        assert float(mat) == pytest.approx(int(tokens) / int(trips), abs=0.005)
        up, down = map(int, re.fullmatch(r"bytes per token: (\d+) up, (\d+) down", sizes).groups())  # type: ignore[union-attr]
        assert min(up, down) >= 32 * 2  # a hidden state of the tiny model in 16 bits

    def test_mistakes_are_a_sentence(self) -> None:
        done = run(self.SCRIPT, "nomodel")
        assert done.returncode == 1
        assert done.stderr.startswith("Error: Unknown model 'nomodel'.")

    def test_without_arguments_it_says_how(self) -> None:
        done = run(self.SCRIPT)
        assert done.returncode == 1
        assert "split_in_one_process.py MODEL [PROMPT]" in done.stderr
