from __future__ import annotations

import pytest

from cli.command import Command


@pytest.fixture
def aparte(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("APARTE_TOKEN", raising=False)
    monkeypatch.delenv("APARTE_DEBUG", raising=False)
    return Command(monkeypatch, capsys)
