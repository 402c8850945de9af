from __future__ import annotations

from pathlib import Path

import pytest

from cli.command import Command

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_the_demo_shows_an_identical_answer(aparte: Command, default_model: Path) -> None:
    result = aparte("demo", "--max-new-tokens", 12, "--rtt", 20)
    assert result.code == 0
    assert "identical to the unsplit model: yes" in result.err + result.out
    for label in ("tokens per round trip (MAT)", "tok/s", "bytes per token, up"):
        assert label in result.out
